//! How one host shares its receiving slots: the state machines of its arbiter and of each of its worker processes.
//!
//! A slot is the right to receive one chunk now. One process of the host, the arbiter, runs [`slots`]: it grants slots
//! to the processes by weighted fair queueing ([`fair`]) up to a limit. Each process runs [`process`]: it cuts fetches
//! into chunks ([`fetches`]), keeps uncontended slots ([`leases`]), and decides which range runs on
//! which leg to which source. [`uplink`] is the sender's half. [`session`] chooses the route of its reports. All of
//! them take `now` and an event and give commands; sockets, threads and election are the caller's.
//!
//! ```text
//!  fetch ─▶ fetches ──want─▶ leases ──want, done─▶ slots (one process of the host)
//!             ▲  run                ◀──grant, contended──┘
//!             └──── granted ──┘
//! ```
//!
//! Groups and members are opaque here: the caller makes them jobs and transfers.

pub mod door;
pub mod fair;
pub mod fetches;
pub mod leases;
pub mod process;
pub mod retry;
pub mod session;
pub mod slots;
pub mod uplink;

/// A process of the host, numbered by the arbiter's caller.
pub type ClientId = u32;
/// What has a share: a job.
pub type GroupId = u64;
/// Members share a group's fraction equally: a transfer of the job. Unique across groups.
pub type MemberId = u64;
/// One chunk that a process asks a slot for, numbered by that process.
pub type Ticket = u64;

use std::time::Duration;

/// Heartbeat interval of the arbiter and its clients.
pub const HEARTBEAT: Duration = Duration::from_millis(500);
/// A process that is silent for this long has stopped: an arbiter is replaced, and a client's slots are granted to
/// others. Six heartbeats: a busy machine delays some, a stopped process all.
pub const SILENT: Duration = Duration::from_secs(3);
/// A process whose own clock jumped by this much was stopped itself, so others were not silent; an arbiter first checks
/// whether it was replaced meanwhile.
pub const JUMP: Duration = Duration::from_millis(1500);
/// Before a new arbiter grants slots, the others have this long to report what they still hold.
pub const SETTLE: Duration = Duration::from_millis(50);

/// Messages from a process to the arbiter of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToArbiter {
    /// A slot that an earlier arbiter granted is in use.
    Held { ticket: Ticket, group: GroupId, member: MemberId },
    /// A chunk of so many bytes waits for a slot.
    Want { ticket: Ticket, group: GroupId, member: MemberId, bytes: u64 },
    /// It no longer waits.
    Withdraw { ticket: Ticket },
    /// A granted slot is free again; the chunk that it was charged for moved so many bytes.
    Done { ticket: Ticket, moved: u64 },
    /// The answer to [`FromArbiter::Ping`].
    Pong,
}

/// Messages from the arbiter to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FromArbiter {
    Grant {
        ticket: Ticket,
    },
    /// Whether another process waits for a slot: if so, unused slots have to be returned, and each chunk needs a
    /// request.
    Contended {
        contended: bool,
    },
    /// The arbiter is alive. `done`: chunks that ended on this host so far.
    Ping {
        done: u64,
    },
}
