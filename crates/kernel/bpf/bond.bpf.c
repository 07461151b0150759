/* A bonded pair of links, where the kernel has no bonding driver: of the packets that leave by the first, every other one takes
 * the second ("balance-rr"). */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#define PAIRS_MAX 1024

struct member {
    __u32 other; /* index of the second interface */
    __u32 packets;
};

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, PAIRS_MAX);
    __type(key, __u32); /* index of the first interface */
    __type(value, struct member);
} members SEC(".maps");

SEC("tc")
int bond_egress(struct __sk_buff *skb)
{
    __u32 index = skb->ifindex;
    struct member *member = bpf_map_lookup_elem(&members, &index);
    /* Two CPUs may count as one: then the same link is taken twice, which does no harm. */
    if (member && member->packets++ % 2)
        return bpf_redirect(member->other, 0);
    return TC_ACT_UNSPEC; /* what is attached after this decides */
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
