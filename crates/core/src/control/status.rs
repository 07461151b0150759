//! The state of a cluster, for users.

use super::objects::Holder;
use super::{ChainNow, Controller, ShuffleNow};
use crate::mission::{JobStatus, TransferStatus};
use crate::report::Merged;
use crate::service::FollowerStatus;
use crate::types::{HostId, JobId, TransferId, WorkerId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    pub policy: String,
    /// The error of a user's policy; its previous weights are in force.
    pub policy_error: Option<String>,
    pub workers: BTreeMap<WorkerId, WorkerNow>,
    /// Workers that have no data plane, and why.
    pub without: BTreeMap<WorkerId, String>,
    /// Objects that something carries.
    pub objects: usize,
    pub graph_tasks: usize,
    pub jobs: Vec<JobNow>,
    /// Transfers that were left out.
    pub hidden: usize,
    /// The control service, where the cluster is a member of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<FollowerStatus>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerNow {
    pub host: HostId,
    pub address: Arc<str>,
    /// Problems of its data plane.
    pub problems: Vec<String>,
    /// Of whole objects that lie there.
    pub object_bytes: u64,
    /// Of the last message to it; and messages that it has not seen yet.
    pub version: u64,
    pub unseen: usize,
    /// The worker that speaks for it ([`crate::host::session`]), if another one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speaker: Option<WorkerId>,
}

/// A job, with what the workers say of its transfers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobNow {
    #[serde(flatten)]
    pub status: JobStatus,
    /// Results that were lost with their objects.
    pub recomputed: u64,
    pub transfers: Vec<TransferNow>,
    /// What is known of transfers that are only in the sum ([`JobStatus::earlier`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier_reported: Option<Merged>,
    /// Of the engine's own.
    #[serde(default)]
    pub shuffles: Vec<ShuffleNow>,
    /// Its tasks that have handed their results on, and are not over.
    #[serde(default)]
    pub chains: Vec<ChainNow>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferNow {
    #[serde(flatten)]
    pub status: TransferStatus,
    #[serde(flatten)]
    pub reported: Merged,
}

impl Controller {
    /// At most so many of the transfers, those that moved last.
    pub fn status(&mut self, most: Option<usize>) -> Status {
        let mut jobs = self.jobs_now(|_| true);
        let all = jobs.iter().flat_map(|job| job.transfers.iter().map(|own| id(job, own)));
        let mut all: Vec<TransferId> = all.collect();
        let hidden = most.map_or(0, |most| all.len().saturating_sub(most));
        if hidden > 0 {
            all.sort_by_key(|transfer| std::cmp::Reverse(self.transfers.moved_at(transfer)));
            let shown: BTreeSet<TransferId> = all.drain(..most.unwrap_or(0)).collect();
            for job in &mut jobs {
                let transfers = std::mem::take(&mut job.transfers);
                job.transfers = transfers.into_iter().filter(|own| shown.contains(&id(job, own))).collect();
            }
        }
        let now = |(worker, own): (&WorkerId, &super::Joined)| {
            let (host, address, problems) = (own.host.clone(), own.address.clone(), own.problems.clone());
            let (version, unseen) = (self.outbox.last(worker), self.outbox.after(worker, 0).count());
            let object_bytes = self.objects.bytes_at(worker);
            let speaker = self.sessions.speaker_of(&host, worker).cloned();
            (worker.clone(), WorkerNow { host, address, problems, object_bytes, version, unseen, speaker })
        };
        Status {
            policy: self.mission.policy().to_owned(),
            policy_error: self.policy_error.clone(),
            workers: self.workers.iter().map(now).collect(),
            without: self.without.clone(),
            objects: self.objects.len(),
            graph_tasks: self.mission.tasks(),
            jobs,
            hidden,
            service: self.member(),
        }
    }

    /// Bytes of whole objects that lie with a worker.
    pub fn object_bytes(&self, worker: &WorkerId) -> u64 {
        self.objects.bytes_at(worker)
    }

    /// Bytes that a task with these inputs would probably have to fetch to a worker: of an object of several parts one
    /// part, and nothing that lies on its host.
    pub fn far_bytes(&self, inputs: &[u64], worker: &WorkerId) -> u64 {
        let Some(joined) = self.workers.get(worker) else { return 0 };
        let here = |other: &WorkerId| self.workers.get(other).is_some_and(|other| other.host == joined.host);
        let objects = inputs.iter().flat_map(|task| self.objects.of(Holder::Result(*task)));
        let far = objects
            .filter(|object| !self.objects.keeps(*object, worker) && !self.objects.whole(*object).iter().any(here));
        far.map(|object| self.objects.bytes_of_part(object)).sum()
    }

    /// Number of remembered entries by kind; most are 0 once nothing runs.
    pub fn held(&self) -> BTreeMap<&'static str, usize> {
        BTreeMap::from([
            ("jobs", self.jobs.len()),
            ("tasks of jobs", self.jobs.tasks()),
            ("names of jobs", self.jobs.names()),
            ("tasks of the graph", self.mission.tasks()),
            ("changed jobs", self.changed.len()),
            ("jobs that end", self.ending.len()),
            ("recomputed", self.recomputed.len()),
            ("objects", self.objects.len()),
            ("lost objects", self.lost.len()),
            ("objects handed over", self.handover.len()),
            ("objects in doubt", self.doubts.len()),
            ("holds", self.holds.len()),
            ("submitted tasks", self.submitted_on.len()),
            ("transfers", self.transfers.len()),
            ("shuffles", self.shuffles.len()),
            ("writers of streams", self.streams.len()),
            ("tasks that delegated", self.delegates.len()),
        ])
    }

    pub(super) fn jobs_now(&mut self, wanted: impl Fn(&JobStatus) -> bool) -> Vec<JobNow> {
        let mut chains: BTreeMap<JobId, Vec<ChainNow>> = BTreeMap::new();
        for own in self.delegates.now() {
            if let Some(job) = self.jobs.of(own.task) {
                chains.entry(job.clone()).or_default().push(own);
            }
        }
        let now = |mut status: JobStatus| {
            let own = std::mem::take(&mut status.transfers);
            let transfers = own.into_iter().map(|own| {
                let TransferStatus { from, to, .. } = &own;
                let id = TransferId { job: status.job.clone(), from: from.clone(), to: to.clone() };
                TransferNow { reported: self.transfers.merged(&id), status: own }
            });
            let transfers = transfers.collect();
            let shuffles = self.shuffles.of(&status.job);
            let chains = chains.remove(&status.job).unwrap_or_default();
            let recomputed = self.recomputed.get(&status.job).copied().unwrap_or(0);
            let is_some = status.earlier.transfers > 0;
            let earlier_reported = is_some.then(|| self.transfers.earlier(&status.job));
            JobNow { recomputed, transfers, earlier_reported, shuffles, chains, status }
        };
        self.mission.status().into_iter().filter(wanted).map(now).collect()
    }
}

fn id(job: &JobNow, own: &TransferNow) -> TransferId {
    TransferId { job: job.status.job.clone(), from: own.status.from.clone(), to: own.status.to.clone() }
}
