/* The way of a delayed link that takes no time: what comes by one interface leaves by another at once. */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#define LINKS_MAX 1024

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, LINKS_MAX);
    __type(key, __u32);   /* index of the interface that a frame comes by */
    __type(value, __u32); /* of that it leaves by */
} others SEC(".maps");

SEC("tc")
int pass_ingress(struct __sk_buff *skb)
{
    __u32 index = skb->ifindex;
    __u32 *other = bpf_map_lookup_elem(&others, &index);
    return other ? bpf_redirect(*other, 0) : TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
