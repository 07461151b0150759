//! Storage of the service's inputs: one order of changes for all replicas, a leader's key with a lease, and writes on
//! condition that the writer still has that key.

pub mod etcd;
pub mod file;

use crate::moment::Moment;
use mission_core::service::{Entry, Epoch};
use std::sync::Arc;

/// All that there is, as of a revision.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    pub revision: u64,
    pub entries: Vec<Entry>,
    /// Address of the replica that has the leader's key.
    pub leader: Option<Arc<str>>,
}

/// What was written at one revision.
#[derive(Clone, Debug, PartialEq)]
pub struct Changed {
    pub revision: u64,
    pub entries: Vec<Entry>,
    /// Whether the leader's key changed hands, and to whom.
    pub leader: Option<Option<Arc<str>>>,
}

/// The leader's key, and until when it is this replica's by this replica's own clock, unless it is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elected {
    pub epoch: Epoch,
    pub until: Moment,
}

/// Why a store operation failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// This replica has lost the leader's key.
    NotLeader,
    /// The store did not answer, or refused; the operation may have happened or not. One line for users.
    Unknown(String),
}

/// Shared by a replica's threads. Every method returns within a few seconds, [`Store::watch`] within a few more than
/// nothing has changed.
pub trait Store: Send + Sync {
    /// # Errors
    /// The store does not answer.
    fn load(&self) -> Result<Loaded, Failure>;

    /// Passes writes after a revision to `each`, in order, until none has arrived for a while: a dead connection looks
    /// like one without changes, so the caller loads everything again. `each` returns whether to continue.
    ///
    /// # Errors
    /// The store does not answer, or does not know that revision any more.
    fn watch(&self, after: u64, each: &mut dyn FnMut(Changed) -> bool) -> Result<(), Failure>;

    /// Tries to get the leader's key; `None`: somebody else has it.
    ///
    /// # Errors
    /// The store does not answer.
    fn campaign(&self, address: &str) -> Result<Option<Elected>, Failure>;

    /// Renews the lease; gives until when it holds.
    ///
    /// # Errors
    /// [`Failure::NotLeader`], or the store does not answer.
    fn renew(&self) -> Result<Moment, Failure>;

    /// Returns the leader's key, so that no replica has to wait for the end of the lease.
    fn resign(&self);

    /// Closes the store: watches end, and another process may open it.
    fn close(&self) {}

    /// Writes all of it or nothing, if the leader's key still has this epoch; gives the revision as of which it is there.
    ///
    /// # Errors
    /// [`Failure::NotLeader`], or the result is unknown.
    fn write(&self, epoch: Epoch, entries: &[Entry]) -> Result<u64, Failure>;
}
