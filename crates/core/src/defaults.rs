//! Every default of the data plane and of the controllers, in one place; `docs/reference/defaults.md` is generated from
//! [`table`].

use std::time::Duration;

/// Receiving slots of a host: the paper's "maximum number of concurrent flows per host" (paper 001, table 4.4).
pub const FLOWS_PER_HOST: u32 = 10;
/// Bytes that one slot carries before it is granted again. Shares are exact to one chunk per job, so smaller is
/// fairer; larger costs fewer requests.
pub const CHUNK_BYTES: u64 = 4 << 20;
/// Chunks of slow links are smaller: so that all slots of a host come free within this time, and a small transfer does not wait
/// for a large one's chunks. 4 MiB take 17 s for ten slots of 20 Mbit/s.
pub const ROUND: Duration = Duration::from_secs(1);
/// Unit of the checksum; a broken range resumes after its last whole block. Small enough to be checked while it still
/// lies in a core's second-level cache.
pub const BLOCK_BYTES: u64 = 256 << 10;
/// Minimum retransmission timeout requested from the kernel; at HZ=250 it reads back as 8 ms (FACTS: the kernel rounds
/// to ticks). The kernel's own default is 200 ms, the cause of the incast collapse.
pub const RTO_MIN_US: u32 = 5_000;
/// A peer that sends no byte for this long has stalled: its range is resumed on a new connection.
pub const STALL: Duration = Duration::from_secs(5);
/// Time to establish a connection.
pub const CONNECT: Duration = Duration::from_secs(3);
/// A fetch that made no progress at all for this long fails, naming the cause. Longer than the time in which Dask
/// notices a dead worker and recomputes what it held.
pub const PROGRESS_TIMEOUT: Duration = Duration::from_secs(60);
/// Tasks that may release their threads while they wait for the network, per thread of a worker. With four times as
/// many tasks, the weights showed in the jobs' times (FACTS-engines: 0.13, 0.29, 0.58 of 0.125, 0.25, 0.625).
pub const LENT_PER_THREAD: usize = 3;
/// The same, for a worker with many threads.
pub const LENT_MAX: usize = 32;
/// A task that has waited this long for its turn continues without one: one task more than threads does less harm than
/// tasks that wait for one another.
pub const LATE_TURN: Duration = Duration::from_secs(5);
/// A worker that leaves waits no longer than this until another worker has received the next of its objects: as long as
/// five fetches without progress. No other worker may have room.
pub const HAND_OVER_WITHIN: Duration = Duration::from_secs(300);
/// A range that receives less than [`TRICKLE_BYTES`] in this time is cut, and resumed from another source if there is
/// one. Twice the stall, so that a silent server is distinguished from a slow one.
pub const TRICKLE: Duration = Duration::from_secs(10);
/// 13 kbit/s: forty flows that share a link of 1 Mbit/s are faster.
pub const TRICKLE_BYTES: u64 = 16 << 10;
/// After this many ranges in a row that broke before their first whole block, arriving bytes no longer count as
/// progress of their fetch.
pub const FRUITLESS_MAX: u32 = 16;
/// First wait before a source that failed is tried again; doubles up to [`RETRY_MAX`].
pub const RETRY_FIRST: Duration = Duration::from_millis(50);
pub const RETRY_MAX: Duration = Duration::from_secs(2);
/// Attempts at one chunk that arrive damaged at the same place before the fetch fails: by then the sender's memory is
/// damaged, not the wire.
pub const CORRUPT_MAX: u32 = 8;
/// A kept connection that carries nothing is closed after this time.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(2);
/// A server closes a connection without a request for this long.
pub const SERVER_IDLE: Duration = Duration::from_secs(30);
/// Concurrent connections of one server; above it the answer is "busy, retry after".
pub const SERVER_CONNECTIONS: usize = 256;
/// Concurrent connections that have not proved the token yet; one more closes one of the address that has most of them. Each costs a thread and a
/// descriptor.
pub const UNADMITTED_CONNECTIONS: usize = 64;
/// Time from a connection's first packet to its proof; then the connection is closed.
pub const ADMISSION: Duration = Duration::from_secs(5);
/// Retry delay of a busy server, in milliseconds.
pub const BUSY_RETRY_MS: u64 = 20;
/// Longest pause before a busy server is asked again: a place that is free for one client waits for it.
pub const BUSY_RETRY_MAX: Duration = Duration::from_millis(320);
/// While clients wait for a place, a connection that has been there for this long leaves after its answer: some 30 chunks
/// of a link of 1 Gbit/s, so that a handshake costs little.
pub const YIELDS_AFTER: Duration = Duration::from_secs(1);
/// Parts from this size on are also sent by receivers of their broadcast; smaller ones are done before the owner has
/// coordinated them.
pub const SWARM_MIN: u64 = 2 << 20;
/// Pieces of a broadcast that one process sends in parallel. With one, the process would be idle between two pieces;
/// with many, each piece takes long and the next receivers wait for it.
pub const UPLOADS_PER_PEER: u32 = 2;
/// Pieces of a broadcast that one receiver requests in parallel.
pub const LANES: u32 = 2;
/// Longest header of a request or an answer; beyond it the connection ends.
pub const HEAD_BYTES_MAX: usize = 16 << 10;
/// Weights are recomputed at least this often (paper 001, 4.2: "updated every second").
pub const WEIGHTS_EVERY: Duration = Duration::from_secs(1);
/// And at most this often, whatever begins and ends: each time all workers receive the shares.
pub const WEIGHTS_APART: Duration = Duration::from_millis(100);
/// Interval of measuring whether switches mark packets, while jobs run that leave the transport open.
pub const ECN_PROBE_EVERY: Duration = Duration::from_secs(10);
/// Longest wait for one round of that measurement; what two hosts send in it takes half a second at 10 Mbit/s.
pub const ECN_PROBE_ROUND: Duration = Duration::from_secs(3);
/// Interval to the next measurement after hosts have joined or left.
pub const ECN_PROBE_AGAIN: Duration = Duration::from_secs(2);
/// Bytes that each of two hosts sends to a third for that: more than ports hold before they mark or drop.
pub const ECN_PROBE_BYTES: u64 = 256 << 10;
/// This many losses without a mark mean that no switch marks; one or two may be the kernel's own loss probes.
pub const ECN_PROBE_LOST_MIN: u64 = 3;
/// Fraction of a worker's memory limit that its own segments may take before objects go to spool files.
pub const STORE_MEMORY_FRACTION: f64 = 0.25;
/// Objects leave one part in this many of it free, for data that is being written, fetched or joined. Without that, no
/// memory is reused once objects go to the spool, and the kernel clears each page again: 12 % of the CPU time of
/// reading a shuffle of four times the memory (2026-11-25).
pub const STORE_WORKING_PART: u64 = 4;
/// Memory unused for this long is returned to the kernel: longer than the pause between two stages, since touching it
/// again costs 0.77 CPU-s/GiB (FACTS).
pub const IDLE_MEMORY: Duration = Duration::from_secs(10);
/// How often a worker reports its progress while bytes move.
pub const REPORT_EVERY: Duration = Duration::from_millis(250);
/// After a transfer has been quiet for this long, its worker forgets it; what it moved stays counted. Longer than the
/// pause between two fetches of a task, so that few transfers begin anew.
pub const FORGET_QUIET: Duration = Duration::from_secs(5);
/// Transfers of a living job that the controller knows one by one. Of the others, the quiet ones with the oldest end, it
/// knows the sum: a job may last as long as its client.
pub const TRANSFERS_PER_JOB: usize = 1000;

/// Rows of `docs/reference/defaults.md`: name, value, meaning.
pub fn table() -> Vec<(&'static str, String, &'static str)> {
    let seconds = |duration: Duration| format!("{} s", duration.as_secs_f64());
    let bytes = crate::units::format_bytes;
    vec![
        ("flows per host", FLOWS_PER_HOST.to_string(), "receiving slots of a host, shared by all its worker processes"),
        (
            "chunk",
            bytes(CHUNK_BYTES),
            "bytes that a slot carries before it is granted again; shares are exact to one chunk",
        ),
        ("round", seconds(ROUND), "time in which all slots of a host become free: slow links get smaller chunks"),
        (
            "block",
            bytes(BLOCK_BYTES),
            "unit of the checksum (XXH3-64); a broken range resumes after its last whole block",
        ),
        (
            "minimum RTO",
            format!("{RTO_MIN_US} us"),
            "requested from the kernel on every data connection; the value in force is read back",
        ),
        ("stall", seconds(STALL), "a connection silent for this long is dropped, and its range resumed on another"),
        ("connect", seconds(CONNECT), "time to establish a connection"),
        (
            "progress timeout",
            seconds(PROGRESS_TIMEOUT),
            "a fetch without any progress for this long fails with its cause",
        ),
        (
            "released threads",
            format!("{LENT_PER_THREAD} for each, {LENT_MAX}"),
            "tasks of a worker that may release their threads while they wait: per thread, and at most",
        ),
        ("late turn", seconds(LATE_TURN), "a task that has waited this long for its turn continues without one"),
        (
            "hand over within",
            seconds(HAND_OVER_WITHIN),
            "a retiring worker leaves if no other worker takes any of its objects for this long",
        ),
        (
            "trickle",
            seconds(TRICKLE),
            "a range that receives less than 16.0 KiB in this time is resumed from another source",
        ),
        ("retry, first", seconds(RETRY_FIRST), "wait before a failed source is tried again; doubles each time"),
        ("retry, longest", seconds(RETRY_MAX), "upper limit of that wait"),
        (
            "damaged attempts",
            CORRUPT_MAX.to_string(),
            "a fetch fails after so many attempts at one chunk that were damaged at the same place",
        ),
        ("idle timeout", seconds(IDLE_TIMEOUT), "a kept connection that carries nothing is closed after this time"),
        ("server idle", seconds(SERVER_IDLE), "a server closes a connection without a request for this long"),
        (
            "server connections",
            SERVER_CONNECTIONS.to_string(),
            "concurrent connections of a server; above it the answer is \"busy, retry after\"",
        ),
        (
            "unadmitted connections",
            UNADMITTED_CONNECTIONS.to_string(),
            "concurrent connections without a proof of the token; one more closes one of the address that has most",
        ),
        ("admission", seconds(ADMISSION), "time to prove the token before the connection is closed"),
        (
            "busy retry",
            format!("{BUSY_RETRY_MS} ms"),
            "shortest retry delay of a busy server; it grows while that is busy",
        ),
        (
            "yields after",
            seconds(YIELDS_AFTER),
            "a connection leaves after this time while other clients wait for a place",
        ),
        ("broadcast", bytes(SWARM_MIN), "from this size on, receivers of a broadcast serve one another"),
        ("uploads", UPLOADS_PER_PEER.to_string(), "pieces of a broadcast that one process sends in parallel"),
        ("lanes", LANES.to_string(), "pieces of a broadcast that one receiver requests in parallel"),
        ("longest header", bytes(HEAD_BYTES_MAX as u64), "largest header of a request or an answer"),
        (
            "ECN probe",
            seconds(ECN_PROBE_EVERY),
            "how often marking by switches is measured, while a job's transport depends on it",
        ),
        (
            "ECN probe, size",
            bytes(ECN_PROBE_BYTES),
            "bytes that each of two hosts sends to a third to measure that; needs three hosts with dctcp",
        ),
        (
            "weights",
            seconds(WEIGHTS_EVERY),
            "recomputed at least this often; also when transfers begin or end, at most every 100 ms",
        ),
        (
            "store memory",
            format!("{STORE_MEMORY_FRACTION} of the worker's limit"),
            "for segments; objects beyond three quarters go to spool files, the rest is for data in transit",
        ),
        ("idle memory", seconds(IDLE_MEMORY), "memory unused for this long is returned to the kernel"),
        ("report", seconds(REPORT_EVERY), "how often a worker reports progress while bytes move"),
        (
            "quiet",
            seconds(FORGET_QUIET),
            "a worker forgets a transfer that was quiet for this long; its bytes stay counted",
        ),
        (
            "transfers of a job",
            TRANSFERS_PER_JOB.to_string(),
            "known one by one; of the others, those that ended first, the controller knows the sum",
        ),
    ]
}
