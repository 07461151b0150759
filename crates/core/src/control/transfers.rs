//! What workers report of their transfers.

use super::{Command, Controller, Described, HAND_OVER, Record, Taken, Untaken, record};
use crate::mission;
use crate::pattern::Asked;
use crate::report::{Merged, TransferReport, TransportFacts};
use crate::types::{JobId, ObjectId, TransferId, WorkerId};
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What has changed in a worker since its last report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerReport {
    /// Transfers that moved, or have just stopped; totals.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub records: Vec<TransferReport>,
    /// Fetches that began, for the patterns.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub asked: Vec<Fetched>,
    /// Objects that it keeps parts of.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub copied: Vec<ObjectId>,
    /// The requested manifests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub described: Vec<Described>,
    /// Requested objects that it has taken whole, and those that it could not take.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub took: Vec<Taken>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub untaken: Vec<Untaken>,
    /// CPU seconds of its process.
    pub cpu: f64,
    /// The version of the last message that it has seen.
    pub seen: u64,
    /// The version of the shares that are in force there.
    pub shares: u64,
    /// Grows with each report of its process: an older report that took the longer way is ignored.
    pub number: u64,
    /// This is its last report on this job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_of: Option<JobId>,
    /// Reports of other processes of its host, by the address of their data planes; and earlier reports of its own that
    /// may not have been passed on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<(Arc<str>, WorkerReport)>,
    /// Of the records here and in `others`, where they are folded ([`WorkerReport::folded`]).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<TransportFacts>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fetched {
    pub transfer: TransferId,
    pub asked: Asked,
}

/// A worker's totals of a transfer at some time, for the plots in reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    pub worker: WorkerId,
    #[serde(flatten)]
    pub transfer: TransferId,
    pub cpu: f64,
    pub asked_bytes: u64,
    pub served_bytes: u64,
    pub local_bytes: u64,
    /// Ranges under way.
    pub flows: u32,
    pub started: f64,
    pub ended: f64,
}

/// The last report of each worker on each transfer.
#[derive(Default)]
pub struct Transfers {
    reports: BTreeMap<TransferId, Reported>,
    /// The number of each worker's newest report with a record that is over. What an older one says of a transfer that
    /// the worker does not report any more came late: it is counted already.
    closed: BTreeMap<WorkerId, u64>,
    /// Of each job, what is known of transfers that ended long ago.
    earlier: BTreeMap<JobId, TransferReport>,
}

/// What a report of a transfer says that was not known.
enum Learned {
    Nothing,
    New,
    /// And the worker had forgotten this record of it, which nobody has heard.
    After(Box<TransferReport>),
}

#[derive(Default)]
struct Reported {
    /// With the number of the report that it was in.
    by_worker: BTreeMap<WorkerId, (u64, TransferReport)>,
    /// The sum of records that are over.
    past: Option<Box<TransferReport>>,
    /// The merged report, until a new one arrives.
    merged: Option<Merged>,
    /// When the last new report arrived.
    moved_at: Time,
}

impl Transfers {
    /// Takes report `number` of a transfer.
    fn learn(
        &mut self,
        now: Time,
        transfer: &TransferId,
        (worker, number): (&WorkerId, u64),
        report: TransferReport,
    ) -> Learned {
        let closed = self.closed.get(worker).copied().unwrap_or(0);
        let known = self.reports.get(transfer).is_some_and(|own| own.by_worker.contains_key(worker));
        if !known && (number < closed || report.over && number == closed) {
            return Learned::Nothing;
        }
        let own = self.reports.entry(transfer.clone()).or_default();
        let mut learned = Learned::New;
        if let Some((last, said)) = own.by_worker.get_mut(worker) {
            if *last > number {
                return Learned::Nothing; // it came late
            }
            *last = number;
            if *said == report {
                return Learned::Nothing;
            }
            if said.started != report.started {
                // The report that the other record is over was lost.
                let before = std::mem::take(said);
                own.past(&before);
                learned = Learned::After(Box::new(before));
            }
        }
        if report.over {
            own.by_worker.remove(worker);
            own.past(&report);
            if own.by_worker.is_empty() {
                // An empty map keeps a node, with room for eleven reports.
                own.by_worker = BTreeMap::new();
            }
        } else {
            own.by_worker.insert(worker.clone(), (number, report));
        }
        (own.merged, own.moved_at) = (None, now);
        learned
    }

    /// All workers' reports of a transfer, merged.
    pub fn merged(&mut self, transfer: &TransferId) -> Merged {
        let Some(own) = self.reports.get_mut(transfer) else { return Merged::of([]) };
        let now = own.by_worker.values().map(|(_, report)| report);
        own.merged.get_or_insert_with(|| Merged::of(own.past.as_deref().into_iter().chain(now))).clone()
    }

    /// This report had records that are over.
    fn closes(&mut self, worker: &WorkerId, number: u64) {
        let closed = self.closed.entry(worker.clone()).or_default();
        *closed = number.max(*closed);
    }

    /// What is known of a job's transfers that ended long ago.
    pub fn earlier(&self, job: &JobId) -> Merged {
        Merged::of(self.earlier.get(job))
    }

    /// A transfer ended long ago: it is only in the sum of its job.
    pub fn forget_one(&mut self, transfer: &TransferId) {
        if let Some(past) = self.reports.remove(transfer).and_then(|own| own.past) {
            match self.earlier.get_mut(&transfer.job) {
                Some(sum) => sum.absorb(&past),
                None => _ = self.earlier.insert(transfer.job.clone(), *past),
            }
        }
    }

    /// When the last new report of a transfer arrived.
    pub fn moved_at(&self, transfer: &TransferId) -> Option<Time> {
        self.reports.get(transfer).map(|own| own.moved_at)
    }

    pub fn forget(&mut self, job: &JobId) {
        self.reports.retain(|transfer, _| transfer.job != *job);
        self.earlier.remove(job);
    }

    /// A worker is gone: it has no active ranges; what it has received stays counted.
    pub fn worker_gone(&mut self, worker: &WorkerId) {
        self.closed.remove(worker);
        for own in self.reports.values_mut() {
            // Another process may have its name from now on.
            if let Some((_, report)) = own.by_worker.remove(worker) {
                own.past(&report);
                own.merged = None;
            }
        }
    }

    pub fn len(&self) -> usize {
        self.reports.len()
    }
}

impl Reported {
    /// A record is over.
    fn past(&mut self, record: &TransferReport) {
        match &mut self.past {
            Some(past) => past.absorb(record),
            None => {
                let ended = TransferReport { moved: false, flows: 0, waits_for: BTreeMap::new(), ..record.clone() };
                self.past = Some(Box::new(ended));
            }
        }
    }
}

impl Controller {
    pub(super) fn report(&mut self, now: Time, worker: &WorkerId, report: WorkerReport, commands: &mut Vec<Command>) {
        let WorkerReport {
            records,
            asked,
            copied,
            described,
            took,
            untaken,
            cpu,
            seen,
            shares,
            number,
            last_of,
            others,
            ..
        } = report.unfolded();
        self.reports_of_others(now, worker, others, commands);
        self.outbox.seen(worker, seen);
        self.in_force(worker, shares);
        if !self.workers.contains_key(worker) {
            return; // late words of a worker that is gone
        }
        described.into_iter().for_each(|described| self.described(now, worker, described, commands));
        self.took(now, worker, took, untaken, commands);
        let freed: Vec<ObjectId> = copied.into_iter().filter(|object| !self.objects.copied(*object, worker)).collect();
        if !freed.is_empty() {
            // They were freed while they were copied.
            self.free(BTreeMap::from([(worker.clone(), freed)]), commands);
        }
        for Fetched { transfer, asked } in asked {
            if self.is_known(&transfer.job) {
                self.decide(now, mission::Event::Asked { transfer, asked }, commands);
            }
        }
        let mut closes = false;
        for own in records {
            let transfer = own.transfer();
            // Late reports on a job that is over would keep it for ever, or be counted for the next one of its name.
            if !self.is_known(&transfer.job) || self.sessions.is_of_one_before(worker, &transfer.job, number) {
                continue;
            }
            closes |= own.over;
            let before = match self.transfers.learn(now, &transfer, (worker, number), own.clone()) {
                Learned::Nothing => continue,
                Learned::New => None,
                Learned::After(before) => Some(*before),
            };
            if *transfer.to == *HAND_OVER {
                self.hand_over_moves(now, worker);
            }
            for (own, over) in before.map(|before| (before, true)).into_iter().chain([(own.clone(), own.over)]) {
                let TransferReport { asked_bytes, served_bytes, moved, waits_for, .. } = own;
                let waits_for = waits_for.into_iter().map(|(address, bytes)| (Arc::from(address), bytes)).collect();
                let (worker, transfer) = (worker.clone(), transfer.clone());
                let event =
                    mission::Event::Progress { worker, transfer, asked_bytes, served_bytes, moved, waits_for, over };
                self.decide(now, event, commands);
            }
            let TransferReport { asked_bytes, served_bytes, local_bytes, flows, started, ended, .. } = own;
            let worker = worker.clone();
            let progress =
                Progress { worker, transfer, cpu, asked_bytes, served_bytes, local_bytes, flows, started, ended };
            commands.push(record(Record::Progress(progress)));
        }
        if closes {
            self.transfers.closes(worker, number);
        }
        if let Some(job) = last_of {
            self.sessions.last_words(now, worker, &job, number);
            self.last_words(now, worker, Some(&job), commands);
        }
    }
}
