//! One Mission Control for several clusters: what each replica of the control service decides, and the adapter of each
//! cluster that follows it.
//!
//! Replicas share a store with one order of changes, leases and conditional writes (etcd, or a local file for one
//! replica alone). The one that holds the leader's key acts; the **epoch** is the revision of the store at which it got
//! that key, so a later leader has a higher one. Inputs (jobs, policy, drained hosts, clusters) are written before they
//! are acted on, on condition that the writer still leads ([`books`]). Weights are derived from them and from clusters'
//! reports ([`shares`]); they are not stored, because the next leader computes them from the same inputs.
//!
//! ```text
//!  cluster's adapter (follower) ──hello, job, transfers──▶ replica (leader) ──write──▶ store ──changes──▶ every replica
//!          ▲                                                  │
//!          └────────────── welcome, update (epoch) ───────────┘
//! ```
//!
//! All of them take `now` and an event and give commands; sockets, store and clock are the caller's.

mod books;
mod follower;
mod messages;
mod replica;
mod shares;

pub use books::{Books, Entry, Input, Known};
pub use follower::{Command as FollowerCommand, Event as FollowerEvent, Follower, Status as FollowerStatus};
pub use messages::{Carried, FromService, PROTOCOL, Part, PartsChanged, ShareId, State, ToService, Update, Weighed};
pub use replica::{
    AskId, Asked, Command, Event, Happened, JobNow, Leader, Look, Page, RatesNow, Refused, Replica, Role, SessionId,
    Sort, Status, What, WriteId,
};
use std::sync::Arc;

/// Between the name of a cluster and that of its job, where jobs of several clusters are named: no name has it, since
/// none can be printed.
pub const OF_CLUSTER: &str = "\u{1f}";

/// Name of a cluster, unique among those of one service.
pub type ClusterId = Arc<str>;
/// A service: a random number, chosen when its store is first used.
pub type ServiceId = u64;
/// Epoch of a leader: the store's revision at which it got the leader's key.
pub type Epoch = u64;
