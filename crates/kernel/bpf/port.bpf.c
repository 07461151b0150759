/* The egress of a switch port: drops packets that its buffer has no room for, and marks packets above a queue length.
 *
 * A token bucket filter behind it paces the port. Its queue is long enough never to drop; what is dropped or marked is
 * decided here, by a virtual queue that drains as the filter does: at the port's rate, and after a rest a burst at
 * once. Without the burst a port that is fed at its own rate by another filter would lose what each rest between two
 * packets costs, and its virtual queue would grow for ever. The real backlog is read, too: if a slow machine has
 * stalled the filter, it is longer than the virtual queue by what was lost of the port's rate. That is counted, and
 * the virtual queue begins anew from the real one, since a port that is always busy would never catch up. */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include "port.h"

/* The few fields of the kernel's structures that are read; libbpf finds where they are in the running kernel. */
struct gnet_stats_queue {
    __u32 backlog;
} __attribute__((preserve_access_index));

struct Qdisc {
    struct gnet_stats_queue qstats;
} __attribute__((preserve_access_index));

struct net_device {
    struct Qdisc *qdisc;
} __attribute__((preserve_access_index));

struct sk_buff {
    struct net_device *dev;
} __attribute__((preserve_access_index));

extern void *bpf_cast_to_kern_ctx(void *context) __ksym;

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, GROUPS_MAX);
    __type(key, __u32);
    __type(value, struct group);
} groups SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, GROUPS_MAX * PORTS_PER_GROUP);
    __type(key, __u32);
    __type(value, struct port_config);
} port_configs SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, GROUPS_MAX);
    __type(key, __u32);
    __type(value, struct group_config);
} group_configs SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, GROUPS_MAX * PORTS_PER_GROUP);
    __type(key, __u32); /* index of the interface */
    __type(value, struct place);
} places SEC(".maps");

/* 1: samples of queue lengths are wanted. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __type(key, __u32);
    __type(value, __u32);
} tracing SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, 1 << 20);
} samples SEC(".maps");

/* Lets time pass for a virtual queue. */
static __always_inline void drain(struct port *port, __u64 now)
{
    if (now <= port->drained_ns || !port->bytes_per_second)
        return;
    __u64 passed = now - port->drained_ns;
    __u64 queue = port->queue_bytes;
    /* After a second any buffer is empty; and the product below does not overflow. */
    __u64 left = passed > 1000000000 ? queue + port->burst_bytes : passed * port->bytes_per_second / 1000000000;
    __u64 bucket = port->limit_bytes ? queue * BUCKETS / port->limit_bytes : 0;
    if (bucket > BUCKETS)
        bucket = BUCKETS;
    /* What passed after the queue was empty is time with nothing queued. */
    __u64 busy = left < queue ? passed : queue * 1000000000 / port->bytes_per_second;
    if (busy > passed)
        busy = passed;
    port->nanoseconds[bucket] += busy;
    port->nanoseconds[0] += passed - busy;
    port->busy_ns += busy;
    port->queue_bytes = left < queue ? queue - left : 0;
    if (left > queue) {
        __u64 credit = port->credit_bytes + left - queue;
        port->credit_bytes = credit < port->burst_bytes ? credit : port->burst_bytes;
    }
    /* What is less than a byte stays for the next time. */
    port->drained_ns = left < queue ? port->drained_ns + left * 1000000000 / port->bytes_per_second : now;
}

SEC("tc")
int port_egress(struct __sk_buff *skb)
{
    __u32 index = skb->ifindex;
    struct place *place = bpf_map_lookup_elem(&places, &index);
    if (!place)
        return TC_ACT_OK;
    __u32 number = place->group, slot = place->port, flat = number * PORTS_PER_GROUP + slot;
    struct group *group = bpf_map_lookup_elem(&groups, &number);
    struct group_config *shared = bpf_map_lookup_elem(&group_configs, &number);
    struct port_config *config = bpf_map_lookup_elem(&port_configs, &flat);
    if (!group || !shared || !config || slot >= PORTS_PER_GROUP)
        return TC_ACT_OK;
    __u32 zero = 0, *wanted = bpf_map_lookup_elem(&tracing, &zero);
    struct sk_buff *real = bpf_cast_to_kern_ctx(skb);
    __u64 backlog = BPF_CORE_READ(real, dev, qdisc, qstats.backlog);
    __u64 now = bpf_ktime_get_ns(), bytes = skb->len;
    __u64 limit = config->limit_bytes, mtu = config->mtu_bytes, queue;
    struct port *port = &group->port[slot];
    int drop = 0, mark = 0, sample = 0;

    bpf_spin_lock(&group->lock);
    if (!port->bytes_per_second)
        port->drained_ns = now;
    if (shared->shared_bytes) {
        for (int i = 0; i < PORTS_PER_GROUP; i++) {
            if (i < shared->ports)
                drain(&group->port[i], now);
        }
    } else {
        drain(port, now);
    }
    port->bytes_per_second = config->bytes_per_second;
    port->limit_bytes = config->limit_bytes;
    port->burst_bytes = config->burst_bytes;
    queue = port->queue_bytes;
    __u64 gap = backlog > queue ? backlog - queue : queue - backlog;
    if (gap > GAP_FRAMES * mtu) {
        port->lost_bytes += gap;
        port->queue_bytes = queue = backlog;
    }
    if (shared->shared_bytes) {
        /* After that: bytes that are really queued here are not free. */
        __u64 used = 0;
        for (int i = 0; i < PORTS_PER_GROUP; i++) {
            if (i < shared->ports)
                used += group->port[i].queue_bytes;
        }
        __u64 free = used < shared->shared_bytes ? shared->shared_bytes - used : 0;
        __u64 threshold = free * shared->alpha_256 / 256;
        if (threshold < limit)
            limit = threshold;
        if (bytes > free)
            limit = 0;
    }
    if (queue + bytes > limit) {
        drop = 1;
        port->drops++;
        port->dropped_bytes += bytes;
    } else {
        mark = config->ecn_bytes && queue > config->ecn_bytes;
        __u64 at_once = bytes < port->credit_bytes ? bytes : port->credit_bytes;
        port->credit_bytes -= at_once;
        queue += bytes - at_once;
        port->queue_bytes = queue;
        port->packets++;
        port->bytes += bytes;
        if (queue > port->queue_bytes_max)
            port->queue_bytes_max = queue;
    }
    if (bytes > mtu)
        port->oversized++;
    if (wanted && *wanted && now - port->traced_ns >= TRACE_EVERY_NS) {
        port->traced_ns = now;
        sample = 1;
    }
    bpf_spin_unlock(&group->lock);

    if (mark && bpf_skb_ecn_set_ce(skb))
        __sync_fetch_and_add(&port->marks, 1);
    if (sample) {
        struct sample *out = bpf_ringbuf_reserve(&samples, sizeof *out, 0);
        if (out) {
            out->ns = now;
            out->group = number;
            out->port = slot;
            out->queue_bytes = queue;
            out->backlog_bytes = backlog;
            bpf_ringbuf_submit(out, 0);
        }
    }
    return drop ? TC_ACT_SHOT : TC_ACT_OK;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
