//! The data connections of a process: how many each job uses, and those that are kept for its next range.

use crate::carrier::Connection;
use crate::clock::lasting;
use mission_core::defaults::IDLE_TIMEOUT;
use mission_core::flight::Leg;
use mission_core::host::fetches::SourceId;
use mission_core::types::JobId;
use std::collections::BTreeMap;
use std::time::Instant;

#[derive(Default)]
pub struct Connections {
    idle: Vec<Idle>,
    /// Connections in use, per job.
    busy: BTreeMap<JobId, u32>,
    /// Most that a job may have, busy and kept; without an entry it has no cap.
    caps: BTreeMap<JobId, u32>,
}

/// An idle connection that is kept.
struct Idle {
    job: JobId,
    source: SourceId,
    leg: Leg,
    connection: Box<dyn Connection>,
    since: Instant,
}

/// Connections to close. Closing takes time: drop them once no lock is held.
pub type Closed = Vec<Box<dyn Connection>>;

impl Connections {
    /// Takes a connection: a kept one if there is one, unless it has to be `fresh`.
    pub fn begin(
        &mut self,
        job: &JobId,
        source: SourceId,
        leg: &Leg,
        fresh: bool,
    ) -> (Option<Box<dyn Connection>>, Closed) {
        let fits = |idle: &Idle| !fresh && idle.job == *job && idle.source == source && idle.leg.serves(leg);
        let kept = self.idle.iter().rposition(fits).map(|at| self.idle.remove(at).connection);
        *self.busy.entry(job.clone()).or_default() += 1;
        (kept, self.trim())
    }

    /// Returns a connection; keeps it if another range can be requested on it.
    pub fn end(&mut self, job: &JobId, source: SourceId, leg: Leg, used: Option<Box<dyn Connection>>) -> Closed {
        if let Some(busy) = self.busy.get_mut(job) {
            *busy -= 1;
            if *busy == 0 {
                self.busy.remove(job);
            }
        }
        let mut closed = Vec::new();
        match used {
            Some(connection) if connection.usable() => {
                self.idle.push(Idle { job: job.clone(), source, leg, connection, since: Instant::now() });
            }
            Some(connection) => closed.push(connection),
            None => {}
        }
        closed.extend(self.trim());
        closed
    }

    pub fn set_caps(&mut self, caps: BTreeMap<JobId, u32>) -> Closed {
        self.caps = caps;
        self.trim()
    }

    /// Removes those that were idle for [`IDLE_TIMEOUT`].
    pub fn expire(&mut self) -> Closed {
        self.take(|idle| idle.since.elapsed() >= lasting(IDLE_TIMEOUT))
    }

    pub fn forget_job(&mut self, job: &JobId) -> Closed {
        self.take(|idle| idle.job == *job)
    }

    pub fn close_all(&mut self) -> Closed {
        self.take(|_| true)
    }

    /// Counts connections in use, and kept.
    pub fn count(&self) -> (u32, usize) {
        (self.busy.values().sum(), self.idle.len())
    }

    /// Closes kept connections of jobs above their caps; connections in use count.
    fn trim(&mut self) -> Closed {
        if self.caps.is_empty() {
            return Vec::new();
        }
        let (caps, busy) = (&self.caps, &self.busy);
        let room = |job: &JobId| {
            let cap = i64::from(caps.get(job).copied().unwrap_or(u32::MAX).max(1));
            cap - i64::from(busy.get(job).copied().unwrap_or(0))
        };
        let mut rooms: BTreeMap<JobId, i64> = BTreeMap::new();
        // The latest used are the likeliest to be used again.
        let keep: Vec<bool> = self
            .idle
            .iter()
            .rev()
            .map(|idle| {
                let room = rooms.entry(idle.job.clone()).or_insert_with(|| room(&idle.job));
                *room -= 1;
                *room >= 0
            })
            .collect();
        let mut keep = keep.into_iter().rev();
        self.take(|_| !keep.next().expect("one for each"))
    }

    fn take(&mut self, mut goes: impl FnMut(&Idle) -> bool) -> Closed {
        let (gone, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.idle).into_iter().partition(|idle| goes(idle));
        self.idle = kept;
        gone.into_iter().map(|idle| idle.connection).collect()
    }
}
