/* The transport of unchanged programs: what sockets of a cgroup get before their first packet.
 *
 * Values are put there by the loader; 0, or an empty name, leaves what the program or the kernel has chosen. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define SOL_SOCKET 1
#define SO_RCVBUF 8
#define SO_MAX_PACING_RATE 47
#define IPPROTO_TCP 6
#define TCP_WINDOW_CLAMP 10
#define TCP_CONGESTION 13
/* The option that eBPF programs have for it, in microseconds; they may not use TCP_RTO_MIN_US. */
#define TCP_BPF_RTO_MIN 1004
#define NAME_BYTES 16

struct wanted {
    char congestion_control[NAME_BYTES];
    __u32 rto_min_us;
    __u32 window_clamp_bytes;
    __u32 pacing_bytes_per_second;
    __u32 ecn;
};

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __type(key, __u32);
    __type(value, struct wanted);
} wanted SEC(".maps");

/* What connections were found to have once they were made, and how many. */
struct agreed {
    char congestion_control[NAME_BYTES];
    __u32 rto_min_us;
    __u32 window_clamp_bytes;
    __u32 pacing_bytes_per_second;
};

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, 1024);
    __type(key, struct agreed);
    __type(value, __u64);
} agreements SEC(".maps");

static __always_inline void read_back(struct bpf_sock_ops *ops)
{
    struct agreed own = {};
    __u64 one = 1, *count;
    bpf_getsockopt(ops, IPPROTO_TCP, TCP_CONGESTION, own.congestion_control, NAME_BYTES);
    bpf_getsockopt(ops, IPPROTO_TCP, TCP_BPF_RTO_MIN, &own.rto_min_us, sizeof own.rto_min_us);
    bpf_getsockopt(ops, IPPROTO_TCP, TCP_WINDOW_CLAMP, &own.window_clamp_bytes, sizeof own.window_clamp_bytes);
    bpf_getsockopt(ops, SOL_SOCKET, SO_MAX_PACING_RATE, &own.pacing_bytes_per_second,
                   sizeof own.pacing_bytes_per_second);
    count = bpf_map_lookup_elem(&agreements, &own);
    if (count)
        __sync_fetch_and_add(count, 1);
    else
        bpf_map_update_elem(&agreements, &own, &one, BPF_NOEXIST);
}

static __always_inline void set(struct bpf_sock_ops *ops, struct wanted *own)
{
    /* What the kernel refuses is seen when the options are read back. */
    if (own->congestion_control[0])
        bpf_setsockopt(ops, IPPROTO_TCP, TCP_CONGESTION, own->congestion_control, NAME_BYTES);
    if (own->rto_min_us)
        bpf_setsockopt(ops, IPPROTO_TCP, TCP_BPF_RTO_MIN, &own->rto_min_us, sizeof own->rto_min_us);
    if (own->window_clamp_bytes) {
        bpf_setsockopt(ops, IPPROTO_TCP, TCP_WINDOW_CLAMP, &own->window_clamp_bytes, sizeof own->window_clamp_bytes);
        /* With the first full segment the kernel takes what the buffer has room for in place of the clamp: half of twice
         * what is set here, and a little more. */
        bpf_setsockopt(ops, SOL_SOCKET, SO_RCVBUF, &own->window_clamp_bytes, sizeof own->window_clamp_bytes);
    }
    if (own->pacing_bytes_per_second)
        bpf_setsockopt(ops, SOL_SOCKET, SO_MAX_PACING_RATE, &own->pacing_bytes_per_second,
                       sizeof own->pacing_bytes_per_second);
}

SEC("sockops")
int transport(struct bpf_sock_ops *ops)
{
    __u32 zero = 0;
    struct wanted *own = bpf_map_lookup_elem(&wanted, &zero);
    if (!own)
        return 1;
    switch (ops->op) {
    /* Before the first packet of either side; what a listener has is inherited, and decides on ECN. */
    case BPF_SOCK_OPS_TCP_CONNECT_CB:
    case BPF_SOCK_OPS_TCP_LISTEN_CB:
        set(ops, own);
        break;
    case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
        set(ops, own);
        read_back(ops);
        break;
    case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
        read_back(ops);
        break;
    case BPF_SOCK_OPS_NEEDS_ECN:
        ops->reply = own->ecn;
        break;
    }
    return 1;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
