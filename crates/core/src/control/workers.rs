//! Workers join, work without a data plane, and leave.

use super::{Command, Controller, PROTOCOL, Record, record};
use crate::flight::Environment;
use crate::mission;
use crate::types::{HostId, JobId, WorkerId};
use crate::units::Time;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// A worker that the engine does not know this long after it joined is gone.
pub const KNOWN_WITHIN: Duration = Duration::from_secs(30);

/// A worker whose data plane is up.
pub struct Joined {
    pub host: HostId,
    pub address: Arc<str>,
    pub problems: Vec<String>,
}

impl Controller {
    pub(super) fn join(
        &mut self,
        now: Time,
        worker: WorkerId,
        joined: Joined,
        environment: Environment,
        commands: &mut Vec<Command>,
    ) {
        let Joined { host, address, .. } = &joined;
        let (host, address) = (host.clone(), address.clone());
        if self.workers.get(&worker).is_some_and(|known| known.address != address) {
            // Another data plane of the same worker: the objects went with the first one.
            self.gone(now, &worker, commands);
        }
        commands.push(record(Record::Worker { worker: worker.clone(), host: host.clone(), address: address.clone() }));
        self.without.remove(&worker);
        self.workers.insert(worker.clone(), joined);
        self.unknown.insert(worker.clone(), now);
        let event = mission::Event::WorkerJoined { worker: worker.clone(), host, address, environment };
        self.decide(now, event, commands);
        self.hosts_changed(now, commands);
        let (briefing, version) = (self.mission.briefing(&worker), self.outbox.last(&worker));
        let shares = briefing.iter().find_map(|command| match command {
            mission::Command::Shares(standing) => Some(standing.version),
            _ => None,
        });
        let locations = self.locations(self.objects.moved().collect());
        let contended = self.contended;
        commands.push(Command::Briefing { worker: worker.clone(), commands: briefing, locations, contended, version });
        self.session_joined(now, &worker, shares.unwrap_or(0), commands);
        self.drain_joined(&worker, commands);
        if self.shall_hand_over() {
            self.hand_over_soon(commands); // it may take what nobody could
        }
    }

    pub(super) fn without(&mut self, now: Time, worker: WorkerId, why: String, commands: &mut Vec<Command>) {
        self.gone(now, &worker, commands);
        commands.push(record(Record::WorkerWithout { worker: worker.clone(), why: why.clone() }));
        self.unknown.insert(worker.clone(), now);
        self.without.insert(worker, why);
    }

    /// A worker is gone, and its objects with it: the results that carry them are invalid, wherever copies of them are.
    pub(super) fn gone(&mut self, now: Time, worker: &WorkerId, commands: &mut Vec<Command>) {
        self.unknown.remove(worker);
        self.without.remove(worker);
        let Some(Joined { host, .. }) = self.workers.remove(worker) else { return };
        self.outbox.forget(worker);
        self.session_left(now, &host, worker, commands);
        commands.push(record(Record::WorkerLeft { worker: worker.clone() }));
        self.transfers.worker_gone(worker);
        self.last_words(now, worker, None, commands);
        self.decide(now, mission::Event::WorkerLeft { worker: worker.clone() }, commands);
        self.hosts_changed(now, commands);
        let lost = self.objects.worker_gone(worker);
        self.hand_over_without(now, worker, commands);
        self.tell_locations(lost.elsewhere.iter().map(|(object, _)| *object).collect(), commands);
        self.doubt_no_longer(now, Some(worker), commands);
        let why = format!("worker {worker} left");
        let gone = self.doubt(now, &why, lost.objects, commands);
        let tasks: BTreeSet<u64> = gone.iter().flat_map(|object| self.objects.needed_by(*object)).collect();
        self.lose(&why, gone, commands);
        if !tasks.is_empty() {
            commands.push(Command::Recompute { tasks });
        }
    }

    /// A worker has sent its last report on a job, or on all.
    pub(super) fn last_words(
        &mut self,
        now: Time,
        worker: &WorkerId,
        job: Option<&JobId>,
        commands: &mut Vec<Command>,
    ) {
        let mut over = Vec::new();
        for (own, ending) in self.ending.iter_mut().filter(|(own, _)| job.is_none_or(|job| *own == job)) {
            ending.awaits.remove(worker);
            if ending.awaits.is_empty() {
                over.push(own.clone());
            }
        }
        over.iter().for_each(|job| self.finish(now, job, commands));
    }
}

pub(super) fn of_another_version(protocol: u32) -> String {
    let older = if protocol < PROTOCOL { "this worker's is the older one" } else { "the scheduler's is the older one" };
    format!(
        "its Mission Control speaks protocol {protocol} and the scheduler's speaks {PROTOCOL}; {older}: install the same \
         version on both, and start it again"
    )
}
