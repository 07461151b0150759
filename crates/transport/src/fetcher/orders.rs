//! Executes messages of the Mission Controller: shares, plans, capabilities of hosts, and jobs that are over.

use super::Fetcher;
use mission_core::host::process::Event;
use mission_core::mission;
use mission_core::shares::{FlowsPerHost, cap, caps_bind};
use mission_core::standing::Standing;
use mission_core::types::JobId;
use std::collections::BTreeMap;
use std::sync::Arc;

impl Fetcher {
    /// Executes a command of the Mission Controller.
    pub fn command(&self, command: mission::Command) {
        let shared = &self.shared;
        let mut state = shared.lock();
        match command {
            mission::Command::Plan { job, plan } => {
                shared.planned(&mut state, &job, plan);
            }
            mission::Command::Hosts { hosts } => {
                Arc::make_mut(&mut state.senders).learn(hosts);
                shared.plan_again(&mut state);
            }
            mission::Command::Own { environment, .. } => {
                state.own = environment.into();
                shared.plan_again(&mut state);
            }
            mission::Command::Refuse { job, reason } => {
                state.plans.insert(job, Err(reason));
            }
            mission::Command::Broadcast { transfer } => {
                state.broadcasts.insert(transfer);
            }
            // [`crate::in_force`] handles shares. The engine's adapter handles the rest: it runs the policy, keeps
            // records, and starts probes.
            mission::Command::Shares(_)
            | mission::Command::SharesChanged(_)
            | mission::Command::Weigh { .. }
            | mission::Command::Weights { .. }
            | mission::Command::ProbeEcn { .. }
            | mission::Command::Forgotten { .. }
            | mission::Command::Invalid { .. } => {}
        }
    }

    /// New shares of jobs or transfers.
    pub(crate) fn set_shares(&self, Standing { flows_per_host, level, shares, .. }: &Standing) {
        let shared = &self.shared;
        let mut state = shared.lock();
        state.flows_per_host = *flows_per_host;
        state.weights.clear();
        for share in shares {
            *state.weights.entry(share.job.clone()).or_default() += share.weight;
        }
        let mut caps = BTreeMap::new();
        // With flows per host found by trial, limits are not known in advance.
        if let FlowsPerHost::Fixed(flows) = *flows_per_host
            && caps_bind(flows, shares.len())
        {
            for share in shares {
                *caps.entry(share.job.clone()).or_insert(0) += cap(flows, share.weight);
            }
        }
        let closed = state.connections.set_caps(caps);
        shared.arbiter().set_shares(*flows_per_host, shared.context.numbers.shares_of(*level, shares));
        shared.drain_arbiter(&mut state);
        drop(state);
        drop(closed);
    }

    /// Forgets the state of a job that is over.
    pub fn forget_job(&self, job: &JobId) {
        let mut state = self.shared.lock();
        state.plans.remove(job);
        let group = self.shared.context.numbers.group_of(job);
        state.groups.remove(&group);
        self.shared.handle(&mut state, Event::Forget { group });
        state.transfers.retain(|id, _| id.job != *job);
        state.stirred.retain(|id| id.job != *job);
        state.said_moved.retain(|id| id.job != *job);
        state.quiet.retain(|(.., id)| id.job != *job);
        state.broadcasts.retain(|id| id.job != *job);
        let closed = state.connections.forget_job(job);
        drop(state);
        drop(closed);
        self.shared.store.forget_job(job, group);
        self.shared.pool.forget_job(group);
    }

    /// Total weight of each job's transfers, for jobs that move bytes.
    pub fn weights(&self) -> BTreeMap<JobId, f64> {
        self.shared.lock().weights.clone()
    }
}
