/* Data Center TCP, from RFC 8257, as a congestion control of the kernel's.
 *
 * The receiver reports exactly which segments were marked (3.2); the sender estimates which fraction of its bytes was
 * (3.3) and shrinks its window by half of that, once per window (3.4). Losses count as with any other congestion control (3.5).
 * A connection whose peer has no ECN continues as Reno, and reads back as Reno. */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

/* alpha and g as fractions of 1,024; RFC 8257, 4.2 recommends g = 1/16 and to begin with alpha = 1. */
#define ONE 1024u
#define GAIN_SHIFT 4

#define IPPROTO_TCP 6
#define TCP_CONGESTION 13
#define TCP_ECN_OK 1
#define TCP_ECN_DEMAND_CWR 4
#define CA_PRIV_WORDS 13
#define TCP_CA_RECOVERY 3

/* The few fields of the kernel's structures that are used; libbpf finds where they are in the running kernel. */
struct sock {
    int unused;
} __attribute__((preserve_access_index));

struct inet_connection_sock {
    __u8 icsk_ca_state : 5;
    struct {
        __u8 pending;
    } icsk_ack;
    __u64 icsk_ca_priv[CA_PRIV_WORDS];
} __attribute__((preserve_access_index));

struct tcp_sock {
    struct inet_connection_sock inet_conn;
    __u32 rcv_nxt;
    __u32 snd_nxt;
    __u32 snd_una;
    __u32 snd_cwnd;
    __u32 snd_ssthresh;
    __u32 prior_cwnd;
    __u32 delivered;
    __u32 delivered_ce;
    __u8 ecn_flags;
} __attribute__((preserve_access_index));

struct ack_sample {
    __u32 pkts_acked;
    __s32 rtt_us;
    __u32 in_flight;
} __attribute__((preserve_access_index));

/* Only for their values, which libbpf takes from the running kernel. */
enum tcp_ca_event {
    CA_EVENT_ECN_NO_CE,
    CA_EVENT_ECN_IS_CE,
    CA_EVENT_LOSS,
};

enum inet_csk_ack_state_t {
    ICSK_ACK_TIMER,
    ICSK_ACK_NOW,
};

#define TCP_CONG_NON_RESTRICTED 1
#define TCP_CONG_NEEDS_ECN 2

struct tcp_congestion_ops {
    __u32 (*ssthresh)(struct sock *sk);
    void (*cong_avoid)(struct sock *sk, __u32 ack, __u32 acked);
    void (*set_state)(struct sock *sk, __u8 new_state);
    void (*cwnd_event)(struct sock *sk, enum tcp_ca_event event);
    void (*in_ack_event)(struct sock *sk, __u32 flags);
    __u32 (*undo_cwnd)(struct sock *sk);
    void (*init)(struct sock *sk);
    __u32 flags;
    char name[16];
} __attribute__((preserve_access_index));

extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;

/* Of a connection; lies in its private part. */
struct dctcp {
    __u32 delivered;    /* segments delivered, and of them marked, when the window began */
    __u32 delivered_ce;
    __u32 window_end;   /* the window ends when this is acknowledged */
    __u32 alpha;
    __u32 rcv_nxt_before; /* receiver: what was expected before the last segment, and whether that was marked */
    __u32 ce;
    __u32 cwnd_at_loss;
};

static __always_inline struct dctcp *own(struct tcp_sock *tp)
{
    return (struct dctcp *)tp->inet_conn.icsk_ca_priv;
}

/* RFC 8257, 3.3: alpha = (1 - g) * alpha + g * marked / all. What is left of a small alpha goes at last, too. */
static __always_inline __u32 next_alpha(__u32 alpha, __u32 marked, __u32 all)
{
    __u32 less = alpha >> GAIN_SHIFT;
    if (!less)
        less = alpha;
    alpha -= less;
    if (marked && all) {
        __u64 more = ((__u64)marked << 10 >> GAIN_SHIFT) / all;
        alpha = alpha + more > ONE ? ONE : alpha + more;
    }
    return alpha;
}

static __always_inline void begin_window(struct tcp_sock *tp, struct dctcp *ca)
{
    ca->window_end = tp->snd_nxt;
    ca->delivered = tp->delivered;
    ca->delivered_ce = tp->delivered_ce;
}

SEC("struct_ops")
void BPF_PROG(dctcp_init, struct sock *sk)
{
    struct tcp_sock *tp = (struct tcp_sock *)sk;
    struct dctcp *ca = own(tp);
    if (!(tp->ecn_flags & TCP_ECN_OK)) {
        /* Its packets would be marked instead of dropped, and the sender would not be notified. */
        char reno[] = "reno";
        bpf_setsockopt(sk, IPPROTO_TCP, TCP_CONGESTION, reno, sizeof reno);
        return;
    }
    ca->rcv_nxt_before = tp->rcv_nxt;
    ca->alpha = ONE;
    ca->cwnd_at_loss = 0;
    ca->ce = 0;
    begin_window(tp, ca);
}

SEC("struct_ops")
__u32 BPF_PROG(dctcp_ssthresh, struct sock *sk)
{
    struct tcp_sock *tp = (struct tcp_sock *)sk;
    struct dctcp *ca = own(tp);
    __u32 cwnd = tp->snd_cwnd;
    ca->cwnd_at_loss = cwnd;
    __u32 next = cwnd - (__u32)((__u64)cwnd * ca->alpha / (2 * ONE));
    return next > 2 ? next : 2;
}

SEC("struct_ops")
void BPF_PROG(dctcp_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
    tcp_reno_cong_avoid(sk, ack, acked);
}

/* Once per window: how much of it was marked. */
SEC("struct_ops")
void BPF_PROG(dctcp_in_ack, struct sock *sk, __u32 flags)
{
    struct tcp_sock *tp = (struct tcp_sock *)sk;
    struct dctcp *ca = own(tp);
    if ((__s32)(tp->snd_una - ca->window_end) < 0)
        return;
    ca->alpha = next_alpha(ca->alpha, tp->delivered_ce - ca->delivered_ce, tp->delivered - ca->delivered);
    begin_window(tp, ca);
}

/* A loss halves the window, whatever was marked (3.5). Done here, since ssthresh() runs before the state is known. */
static __always_inline void lost(struct tcp_sock *tp)
{
    own(tp)->cwnd_at_loss = tp->snd_cwnd;
    __u32 half = tp->snd_cwnd / 2;
    tp->snd_ssthresh = half > 2 ? half : 2;
}

SEC("struct_ops")
void BPF_PROG(dctcp_set_state, struct sock *sk, __u8 new_state)
{
    struct tcp_sock *tp = (struct tcp_sock *)sk;
    if (new_state == TCP_CA_RECOVERY && new_state != tp->inet_conn.icsk_ca_state)
        lost(tp);
}

/* The receiver's half (3.2): each change between marked and unmarked is acknowledged at once, so that the sender knows which
 * bytes were marked although acknowledgments are delayed. */
static __always_inline void change_ce(struct tcp_sock *tp, __u32 ce)
{
    struct dctcp *ca = own(tp);
    if (ca->ce != ce) {
        if (tp->inet_conn.icsk_ack.pending & bpf_core_enum_value(enum inet_csk_ack_state_t, ICSK_ACK_TIMER)) {
            /* Acknowledge what came before the change, with the mark that it had. */
            if (ca->ce)
                tp->ecn_flags |= TCP_ECN_DEMAND_CWR;
            else
                tp->ecn_flags &= ~TCP_ECN_DEMAND_CWR;
            bpf_tcp_send_ack(tp, ca->rcv_nxt_before);
        }
        tp->inet_conn.icsk_ack.pending |= bpf_core_enum_value(enum inet_csk_ack_state_t, ICSK_ACK_NOW);
    }
    ca->rcv_nxt_before = tp->rcv_nxt;
    ca->ce = ce;
    if (ce)
        tp->ecn_flags |= TCP_ECN_DEMAND_CWR;
    else
        tp->ecn_flags &= ~TCP_ECN_DEMAND_CWR;
}

SEC("struct_ops")
void BPF_PROG(dctcp_event, struct sock *sk, enum tcp_ca_event event)
{
    struct tcp_sock *tp = (struct tcp_sock *)sk;
    if (event == bpf_core_enum_value(enum tcp_ca_event, CA_EVENT_ECN_IS_CE))
        change_ce(tp, 1);
    else if (event == bpf_core_enum_value(enum tcp_ca_event, CA_EVENT_ECN_NO_CE))
        change_ce(tp, 0);
    else if (event == bpf_core_enum_value(enum tcp_ca_event, CA_EVENT_LOSS))
        lost(tp);
}

SEC("struct_ops")
__u32 BPF_PROG(dctcp_undo, struct sock *sk)
{
    struct tcp_sock *tp = (struct tcp_sock *)sk;
    struct dctcp *ca = own(tp);
    return tp->snd_cwnd > ca->cwnd_at_loss ? tp->snd_cwnd : ca->cwnd_at_loss;
}

SEC(".struct_ops.link")
struct tcp_congestion_ops dctcp = {
    .init = (void *)dctcp_init,
    .in_ack_event = (void *)dctcp_in_ack,
    .cwnd_event = (void *)dctcp_event,
    .ssthresh = (void *)dctcp_ssthresh,
    .cong_avoid = (void *)dctcp_cong_avoid,
    .undo_cwnd = (void *)dctcp_undo,
    .set_state = (void *)dctcp_set_state,
    .flags = TCP_CONG_NEEDS_ECN | TCP_CONG_NON_RESTRICTED,
    .name = "dctcp",
};

/* For the test of the arithmetic: alpha after a window. */
struct update {
    __u32 alpha;
    __u32 marked;
    __u32 all;
};

SEC("syscall")
int alpha_after(struct update *update)
{
    return next_alpha(update->alpha, update->marked, update->all);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
