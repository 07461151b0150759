//! One transfer: what its receivers have requested and received, its rate, and its pattern.

use super::Command;
use crate::defaults;
use crate::graph::Classified;
use crate::pattern::Evidence;
use crate::types::{HostId, Pattern, TransferId, WorkerId};
use crate::units::Time;
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) struct Transfer {
    pub(super) arrival: u64,
    /// When the first fetch began.
    pub(super) began_at: Option<Time>,
    pub(super) evidence: Evidence,
    /// The pattern by the task graph.
    pub(super) classified: Option<Classified>,
    /// The workers know that it is a broadcast.
    pub(super) announced: bool,
    pub(super) progress: BTreeMap<WorkerId, Progress>,
    /// Bytes of workers that left, and of records that are over.
    left: u64,
    /// Over `progress`: bytes that were requested and that came, and workers where something is under way.
    asked: u64,
    served: u64,
    moving: usize,
    /// It is among those of its job that may be forgotten.
    pub(super) listed: bool,
    /// Outstanding bytes, by the hosts that receive and that send them: sums over `progress`.
    pub(super) to_receive: BTreeMap<HostId, u64>,
    pub(super) to_send: BTreeMap<HostId, u64>,
    /// When its rate was measured last, what had been served by then, and the rate.
    pub(super) measured: (Time, u64, f64),
}

/// One worker's report of a transfer.
#[derive(Default)]
pub(super) struct Progress {
    pub(super) asked: u64,
    pub(super) served: u64,
    pub(super) moved: bool,
    /// Its host, and those that it waits for.
    pub(super) host: Option<HostId>,
    pub(super) waits_for: Vec<(HostId, u64)>,
}

impl Progress {
    fn is_active(&self) -> bool {
        self.served < self.asked || self.moved
    }
}

impl Transfer {
    pub(super) fn new(arrival: u64, now: Time) -> Transfer {
        Transfer {
            arrival,
            began_at: None,
            evidence: Evidence::default(),
            classified: None,
            announced: false,
            progress: BTreeMap::new(),
            left: 0,
            asked: 0,
            served: 0,
            moving: 0,
            listed: false,
            to_receive: BTreeMap::new(),
            to_send: BTreeMap::new(),
            measured: (now, 0, 0.0),
        }
    }

    /// Replaces a worker's report; `None` if the worker is gone, or forgets its record.
    pub(super) fn learn(&mut self, worker: &WorkerId, new: Option<Progress>) {
        let leaves = new.is_none();
        let before = match new {
            Some(new) => {
                // A worker may say anything: sums wrap, and come back with what it says next.
                self.asked = self.asked.wrapping_add(new.asked);
                self.served = self.served.wrapping_add(new.served);
                self.moving += usize::from(new.is_active());
                if let Some(host) = &new.host {
                    *self.to_receive.entry(host.clone()).or_default() += new.asked.saturating_sub(new.served);
                }
                for (host, bytes) in &new.waits_for {
                    *self.to_send.entry(host.clone()).or_default() += bytes;
                }
                self.progress.insert(worker.clone(), new)
            }
            None => self.progress.remove(worker),
        };
        let before = before.unwrap_or_default();
        self.asked = self.asked.wrapping_sub(before.asked);
        self.served = self.served.wrapping_sub(before.served);
        self.moving -= usize::from(before.is_active());
        if leaves {
            self.left = self.left.wrapping_add(before.served);
        }
        let mut less = |sums: fn(&mut Transfer) -> &mut BTreeMap<HostId, u64>, host: &HostId, bytes: u64| {
            if let Some(sum) = sums(self).get_mut(host) {
                *sum = sum.saturating_sub(bytes);
            }
        };
        if let Some(host) = &before.host {
            less(|own| &mut own.to_receive, host, before.asked.saturating_sub(before.served));
        }
        before.waits_for.iter().for_each(|(host, bytes)| less(|own| &mut own.to_send, host, *bytes));
        if self.is_quiet() {
            // What counts for its pattern is known by now.
            self.evidence.settle();
            // An empty map keeps a node.
            self.progress.clear();
            self.to_receive.clear();
            self.to_send.clear();
        }
    }

    /// Bytes that were requested, and that came.
    pub(super) fn totals(&self) -> (u64, u64) {
        (self.asked.wrapping_add(self.left), self.served.wrapping_add(self.left))
    }

    pub(super) fn active(&self) -> bool {
        self.moving > 0
    }

    /// No worker has a record of it.
    pub(super) fn is_quiet(&self) -> bool {
        self.progress.is_empty()
    }

    /// Bytes were requested, or have moved. The rate is measured from then on; an idle transfer has none.
    pub(super) fn stirs(&mut self, now: Time) {
        self.began_at.get_or_insert(now);
        if !self.active() {
            self.measured = (now, self.totals().1, 0.0);
        }
    }

    /// Whether it is quiet after something has moved, and not listed yet; it is from now on.
    pub(super) fn may_be_listed(&mut self) -> bool {
        let new = self.is_quiet() && self.began_at.is_some() && !self.listed;
        self.listed |= new;
        new
    }

    pub(super) fn bytes_per_sec(&self) -> f64 {
        if self.active() { self.measured.2 } else { 0.0 }
    }

    pub(super) fn measure(&mut self, now: Time) {
        let (_, served) = self.totals();
        let (since, before, _) = self.measured;
        let seconds = now.since(since).as_secs_f64();
        if seconds >= defaults::WEIGHTS_EVERY.as_secs_f64() {
            self.measured = (now, served, served.saturating_sub(before) as f64 / seconds);
        }
    }

    /// Announces once that it is a broadcast. It stays one for its receivers, which costs them nothing.
    pub(super) fn announce(&mut self, id: TransferId, commands: &mut Vec<Command>) {
        if !self.announced && self.pattern() == Pattern::Broadcast {
            self.announced = true;
            commands.push(Command::Broadcast { transfer: id });
        }
    }

    /// The task graph decides until fetches show otherwise: parts that several tasks took, or what half of all tasks did.
    pub(super) fn by_graph(&self) -> Option<&Classified> {
        let graph = self.classified.as_ref().filter(|graph| graph.pattern != Pattern::Unknown)?;
        let shown = match self.evidence.pattern() {
            Pattern::Broadcast if self.evidence.receivers() > 1 => true,
            Pattern::Unknown => false,
            _ => self.evidence.has_half_of(graph.consumers),
        };
        (!shown).then_some(graph)
    }

    pub(super) fn pattern(&self) -> Pattern {
        self.by_graph().map_or_else(|| self.evidence.pattern(), |graph| graph.pattern)
    }

    /// The evidence for its pattern.
    pub(super) fn why(&self) -> Arc<str> {
        match (self.by_graph(), self.evidence.pattern()) {
            (Some(graph), _) => format!("task graph: {}", graph.why).into(),
            (None, Pattern::Unknown) => "nothing was fetched yet".into(),
            (None, _) => self.evidence.words().into(),
        }
    }
}
