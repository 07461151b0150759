/* What the switch port's program and its loader agree on; src/switch.rs mirrors it. */
#pragma once

/* Ports that share a buffer; one group for each port where they do not. Paper 003's switch has groups of 12. */
#define PORTS_PER_GROUP 16
#define GROUPS_MAX 512
/* Of the time-weighted histogram of queue lengths: bucket i begins at i/64 of what the port may hold. */
#define BUCKETS 64
#define TRACE_EVERY_NS 100000
/* So far may virtual queue and real backlog be apart: a packet on its way, the burst, and one of each for timers. */
#define GAP_FRAMES 4

/* Of a port; written by the loader, and again while it runs. */
struct port_config {
    __u64 bytes_per_second;
    __u64 limit_bytes; /* most that it may hold, whatever a shared buffer has left */
    __u64 ecn_bytes;   /* a packet that finds more than this is marked; 0: none is */
    __u64 mtu_bytes;   /* longer frames are no packets of a wire */
    __u64 burst_bytes; /* what the filter behind it lets go at once after a rest */
};

struct group_config {
    __u32 ports;
    __u32 unused;
    __u64 shared_bytes; /* buffer of all its ports; 0: each has its own */
    __u64 alpha_256;    /* dynamic threshold (Choudhury and Hahne 1998): a port may hold alpha times what is free */
};

/* Of a port; written by the program. */
struct port {
    /* The virtual queue: what a port of that rate would hold. */
    __u64 bytes_per_second;
    __u64 limit_bytes;
    __u64 burst_bytes;
    __u64 queue_bytes;
    __u64 credit_bytes; /* what may go at once: the filter has rested */
    __u64 drained_ns;   /* until when it was drained */
    __u64 traced_ns;
    /* Counters. */
    __u64 packets;
    __u64 bytes;
    __u64 drops;
    __u64 dropped_bytes;
    __u64 marks;
    __u64 oversized;
    __u64 queue_bytes_max;
    __u64 lost_bytes; /* of its rate, because the machine was too slow */
    __u64 busy_ns; /* time with something queued */
    __u64 nanoseconds[BUCKETS + 1];
};

struct group {
    struct bpf_spin_lock lock;
    __u32 unused;
    struct port port[PORTS_PER_GROUP];
};

struct place {
    __u32 group;
    __u32 port;
};

struct sample {
    __u64 ns;
    __u32 group;
    __u32 port;
    __u32 queue_bytes;
    __u32 backlog_bytes;
};
