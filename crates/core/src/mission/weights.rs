//! Weights of active transfers: by the policy, or by one that the caller computes.

use super::{Command, Guide, Job, MissionController, TransferWeight, Weight};
use crate::host::fair::Level;
use crate::policy::external::{self, Counts};
use crate::policy::{self, JobView, TransferView};
use crate::shares::{self, Share};
use crate::types::{HostId, TransferId};
use crate::units::Time;
use std::collections::{BTreeMap, BTreeSet};

impl MissionController {
    /// Takes an external policy's answer; true if weights may change by it.
    pub(super) fn weighed(&mut self, asked: &[TransferView], counts: Result<Counts, String>) -> bool {
        if !is_external(&self.policy_spec) {
            return false;
        }
        match counts.and_then(|counts| counts.check(asked).map(|()| counts)) {
            Ok(counts) => {
                self.policy = counts.policy();
                self.policy_error = None;
                true
            }
            Err(why) => {
                self.policy_error =
                    Some(format!("policy {}: {why}; the previous weights stay in force", self.policy_spec));
                false
            }
        }
    }

    pub(super) fn weigh(&mut self, now: Time, asks: bool, commands: &mut Vec<Command>) {
        for transfer in self.jobs.values_mut().flat_map(|job| job.transfers.values_mut()).filter(|own| own.active()) {
            transfer.measure(now);
        }
        let views = self.active(now);
        let mut weights = policy::weights(&self.policy, &views);
        if let Some(guide) = &self.guide {
            weights.transfers = guided(guide, &views);
        }
        let flows = shares::split(self.flows_per_host.usual(), &weights.transfers);
        let own = weights.transfers.iter().zip(flows).map(|(&weight, flows)| Weight { weight, flows });
        let all =
            views.iter().zip(own).map(|(view, weight)| TransferWeight { transfer: view.transfer.clone(), weight });
        let all: Vec<TransferWeight> = all.collect();
        let own: BTreeMap<TransferId, Weight> = all.iter().map(|one| (one.transfer.clone(), one.weight)).collect();
        if own != self.weights && !own.is_empty() {
            commands.push(Command::Weights { transfers: all });
        }
        self.weights = own;
        let new: Vec<Share> = match self.policy.level() {
            // Even if nothing is active here: a worker of this cluster may grant slots that clusters share.
            _ if let Some(guide) = &self.guide => guide.shares.clone(),
            Level::Groups => weights
                .jobs
                .iter()
                .map(|(job, weight)| Share { job: job.clone(), stages: None, weight: *weight })
                .collect(),
            Level::Members => {
                let share = |(view, weight): (&TransferView, &f64)| {
                    let TransferId { job, from, to } = view.transfer.clone();
                    Share { job, stages: Some((from, to)), weight: *weight }
                };
                views.iter().zip(&weights.transfers).map(share).collect()
            }
        };
        // With nothing active no worker needs new shares: the previous ones do no harm.
        let changed = new != self.shares;
        let tells = changed && !new.is_empty();
        self.version += u64::from(changed);
        self.shares = new;
        if tells {
            commands.push(self.command());
        }
        if asks && is_external(&self.policy_spec) && !views.is_empty() {
            commands.push(Command::Weigh { transfers: views });
        }
    }

    /// All active transfers, as a policy sees them, in the order in which they began.
    pub fn active(&self, now: Time) -> Vec<TransferView> {
        let mut views: Vec<TransferView> = self.jobs.values().flat_map(|job| self.views(now, job)).collect();
        views.sort_by_key(|view| view.arrival);
        views
    }

    /// The current weights, in the form of a policy's answer.
    pub(super) fn had(&self) -> Counts {
        match self.policy.level() {
            Level::Groups => {
                let mut jobs = BTreeMap::new();
                for (transfer, own) in &self.weights {
                    *jobs.entry(transfer.job.clone()).or_default() += own.weight;
                }
                Counts::Jobs(jobs)
            }
            Level::Members => {
                Counts::Transfers(self.weights.iter().map(|(transfer, own)| (transfer.clone(), own.weight)).collect())
            }
        }
    }

    /// The active transfers of a job, as a policy sees them.
    fn views<'a>(&'a self, now: Time, job: &'a Job) -> impl Iterator<Item = TransferView> + 'a {
        let spec = &job.spec;
        let age_secs = now.since(job.arrived_at).as_secs_f64();
        let since_admission_secs = now.since(job.admitted_at).as_secs_f64();
        let view = JobView {
            job: spec.job.clone(),
            user: spec.user.clone(),
            class: spec.class.clone(),
            arrival: job.arrival,
            priority: spec.priority,
            deadline_secs: spec.deadline_secs.map(|deadline| deadline - since_admission_secs),
            age_secs,
        };
        let active = job.transfers.iter().filter(|(_, transfer)| transfer.active());
        active.map(move |((from, to), transfer)| {
            let (to_receive, to_send) = match self.policy.looks_at_hosts() {
                true => (transfer.to_receive.clone(), transfer.to_send.clone()),
                false => Default::default(),
            };
            let machines = || {
                let hosts: BTreeSet<&HostId> = transfer.to_receive.keys().chain(transfer.to_send.keys()).collect();
                hosts.len() as u32
            };
            let (asked_bytes, served_bytes) = transfer.totals();
            TransferView {
                transfer: TransferId { job: spec.job.clone(), from: from.clone(), to: to.clone() },
                job: view.clone(),
                arrival: transfer.arrival,
                pattern: transfer.pattern(),
                evidence: transfer.why(),
                machines: if spec.machines > 0 || !self.policy.looks_at_hosts() { spec.machines } else { machines() },
                asked_bytes,
                served_bytes,
                to_receive,
                to_send,
                bytes_per_sec: transfer.bytes_per_sec(),
                age_secs: transfer.began_at.map_or(0.0, |began| now.since(began).as_secs_f64()),
            }
        })
    }
}

/// The guide's weight of each transfer; one that it does not know yet gets almost nothing.
fn guided(guide: &Guide, views: &[TransferView]) -> Vec<f64> {
    let weight = |view: &TransferView| {
        let TransferId { job, from, to } = &view.transfer;
        let of_job = guide.shares.iter().filter(|share| share.job == *job);
        match guide.level {
            Level::Groups => {
                let transfers = views.iter().filter(|other| other.transfer.job == *job).count();
                of_job.map(|share| share.weight).sum::<f64>() / transfers as f64
            }
            Level::Members => of_job
                .filter(|share| share.stages.as_ref().is_some_and(|(own, other)| own == from && other == to))
                .map(|share| share.weight)
                .sum(),
        }
    };
    views.iter().map(weight).collect()
}

/// Whether the caller computes it.
pub(super) fn is_external(policy_spec: &str) -> bool {
    policy_spec.starts_with(external::PREFIX)
}
