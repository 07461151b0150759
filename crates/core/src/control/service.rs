//! A cluster as a member of a control service ([`crate::service`]).
//!
//! The cluster's own Mission Controller still decides plans and patterns, and computes its own weights. While the
//! service is connected, its weights are in force instead.

use super::{Command, Controller, Record, record};
use crate::mission::{self, Guide};
use crate::report::TransportFacts;
use crate::service::{
    Carried, ClusterId, Follower, FollowerCommand, FollowerEvent, FollowerStatus, OF_CLUSTER, Weighed,
};
use crate::shares::Share;
use crate::types::{HostId, JobId, JobSpec, WorkerId};
use crate::units::Time;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Controller {
    /// From now on this cluster is a member.
    pub(super) fn follow(
        &mut self,
        now: Time,
        cluster: ClusterId,
        incarnation: u64,
        addresses: Vec<Arc<str>>,
        commands: &mut Vec<Command>,
    ) {
        let follower = Follower::new(now, cluster, incarnation, addresses);
        self.follower = Some(Box::new(follower.with_budget(self.mission.flows_per_host())));
        for spec in self.mission.specs().cloned().collect::<Vec<_>>() {
            self.service(now, FollowerEvent::Job { spec }, commands);
        }
        self.hosts_changed(now, commands);
    }

    /// Its status for users; `None`: the cluster is not a member.
    pub fn member(&self) -> Option<FollowerStatus> {
        self.follower.as_ref().map(|follower| follower.status())
    }

    pub(super) fn service(&mut self, now: Time, event: FollowerEvent, commands: &mut Vec<Command>) {
        let Some(follower) = &mut self.follower else { return };
        let mut said = Vec::new();
        follower.handle(now, event, &mut said);
        // First, and in order: the other commands cause newer messages of their own.
        let goes_out = |command: &FollowerCommand| {
            matches!(
                command,
                FollowerCommand::Connect { .. } | FollowerCommand::Disconnect | FollowerCommand::Send { .. }
            )
        };
        let (goes_out, said): (Vec<_>, Vec<_>) = said.into_iter().partition(goes_out);
        commands.extend(goes_out.into_iter().map(|does| Command::Service { does }));
        for command in said {
            match command {
                FollowerCommand::Connect { .. } | FollowerCommand::Disconnect | FollowerCommand::Send { .. } => {}
                FollowerCommand::Guide { weights } => {
                    let guide = Some(guide_of(&self.member().expect("it follows").cluster, &weights));
                    self.decide(now, mission::Event::Guided { guide }, commands);
                }
                FollowerCommand::Alone { why } => {
                    commands.push(record(Record::Alone { why }));
                    self.decide(now, mission::Event::Guided { guide: None }, commands);
                }
                FollowerCommand::Policy { policy } => self.decide(now, mission::Event::Policy { policy }, commands),
                FollowerCommand::Change { job, change } => {
                    // A job that is over does not change, and no client waits for the answer.
                    let before = commands.len();
                    self.change(now, &job, change, commands);
                    let answers = |command: &Command| matches!(command, Command::Changed { .. });
                    let rest: Vec<Command> = commands.drain(before..).filter(|command| !answers(command)).collect();
                    commands.extend(rest);
                }
                FollowerCommand::Drained { hosts } => {
                    self.drained = hosts;
                    let on = |worker: &super::Joined| self.drained.contains(&worker.host);
                    let workers = self.workers.iter().filter(|(_, own)| on(own)).map(|(worker, _)| worker.clone());
                    let workers: BTreeSet<_> = workers.collect();
                    commands.extend((!workers.is_empty()).then_some(Command::Drain { workers }));
                }
                FollowerCommand::Kept { job } => commands.push(record(Record::Kept { job })),
            }
        }
    }

    /// Passes the event that the Mission Controller has just handled to the service.
    pub(super) fn report_to_service(&mut self, now: Time, commands: &mut Vec<Command>) {
        if self.follower.is_none() || self.mission.weighed_at() != Some(now) {
            return;
        }
        let transfers = self.mission.active(now);
        if self.follower.as_ref().is_some_and(|follower| follower.reports(now)) {
            let carried = transfers.iter().map(|view| {
                let reported = self.transfers.merged(&view.transfer);
                let TransportFacts { chosen, reason, negotiated, fallbacks, .. } = reported.transport;
                let (flows, transport, reason) = (reported.flows_now, chosen, reason.into());
                (view.transfer.clone(), Carried { flows, transport, reason, negotiated, fallbacks })
            });
            let carried = carried.collect();
            self.service(now, FollowerEvent::Carried { carried }, commands);
        }
        self.service(now, FollowerEvent::Transfers { transfers }, commands);
    }

    /// A worker that joins on a drained host leaves again.
    pub(super) fn drain_joined(&self, worker: &WorkerId, commands: &mut Vec<Command>) {
        if self.workers.get(worker).is_some_and(|own| self.drained.contains(&own.host)) {
            commands.push(Command::Drain { workers: [worker.clone()].into() });
        }
    }

    pub(super) fn job_arrived(&mut self, now: Time, spec: JobSpec, commands: &mut Vec<Command>) {
        self.service(now, FollowerEvent::Job { spec }, commands);
    }

    pub(super) fn job_ended(&mut self, now: Time, job: JobId, commands: &mut Vec<Command>) {
        self.service(now, FollowerEvent::JobEnded { job }, commands);
    }

    pub(super) fn hosts_changed(&mut self, now: Time, commands: &mut Vec<Command>) {
        if self.follower.is_some() {
            let hosts: BTreeSet<HostId> = self.workers.values().map(|own| own.host.clone()).collect();
            self.service(now, FollowerEvent::Hosts { hosts }, commands);
        }
    }
}

/// Shares of this cluster's jobs, and of other clusters' jobs on its hosts, under names that none of its own jobs has.
fn guide_of(cluster: &ClusterId, weights: &Weighed) -> Guide {
    let mut parts: Vec<_> = weights.parts.iter().collect();
    parts.sort_by_key(|(_, part)| part.arrival);
    let share = |(id, part): (&crate::service::ShareId, &crate::service::Part)| Share {
        job: if id.cluster == *cluster { id.job.clone() } else { [&id.cluster, OF_CLUSTER, &id.job].concat().into() },
        stages: id.stages.clone(),
        weight: part.weight,
    };
    Guide { level: weights.level, shares: parts.into_iter().map(share).collect() }
}
