//! The state of a cluster, and the messages to its workers: the lifecycles of workers, clients, jobs, tasks and objects.
//!
//! An engine's adapter turns what its scheduler does into events ([`Event`]), and carries the commands out ([`Command`]).
//! [`crate::mission`] decides shares, plans and patterns. This module sends them to the workers, in numbered messages, so
//! that a worker notices when it has missed one.
//!
//! The adapter numbers its tasks, because the keys of an engine can be anything. It does not reuse a number while the task is
//! known.

mod commands;
mod delegates;
mod doubt;
mod events;
mod folded;
mod handover;
mod holds;
mod jobs;
mod messages;
mod objects;
mod service;
mod sessions;
mod shuffles;
mod status;
mod streams;
#[cfg(test)]
mod tests;
mod transfers;
mod workers;

use crate::flight::Environment;
use crate::mission::{self, MissionController, TransferWeight};
use crate::service::{Follower, FollowerEvent};
use crate::shares::FlowsPerHost;
use crate::types::{HostId, JobId, JobSpec, ObjectId, WorkerId};
use crate::units::Time;
use crate::versions::Outbox;
pub use commands::{Command, Record};
use delegates::Delegates;
pub use delegates::{BEGINS_AGAIN_MAX, ChainNow, LostStep};
use doubt::Doubts;
pub use doubt::{DOUBT, Keep};
pub use events::{Carried, Change, Event, NewTask, Origin};
use handover::Handover;
pub use handover::{Describe, Described, HAND_OVER, MANIFEST_MIN, SILENT, TRY_AGAIN, Take, Taken, Untaken};
use holds::Holds;
pub use jobs::{ClientId, LAST_WORDS};
use jobs::{Ending, Jobs};
pub use messages::{Message, PROTOCOL};
use objects::{Holder, Objects};
use sessions::Sessions;
use shuffles::Shuffles;
pub use shuffles::{Carrier, Counted, ShuffleId, ShuffleNow};
pub use status::{JobNow, Status, WorkerNow};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
pub use streams::Continued;
use streams::Streams;
use transfers::Transfers;
pub use transfers::{Fetched, WorkerReport};
pub use workers::KNOWN_WITHIN;
use workers::{Joined, of_another_version};

pub struct Controller {
    mission: MissionController,
    policy_error: Option<String>,
    workers: BTreeMap<WorkerId, Joined>,
    /// Workers that have no data plane, and why.
    without: BTreeMap<WorkerId, String>,
    /// Workers that the engine may not know, and when they joined.
    unknown: BTreeMap<WorkerId, Time>,
    outbox: Outbox<WorkerId, Arc<Message>>,
    sessions: Sessions,
    jobs: Jobs,
    /// Whether the engine was instructed to let jobs share by weight ([`Command::Contention`]).
    contended: bool,
    /// Changes of running jobs; their tasks still arrive with the specification that they were submitted with.
    changed: BTreeMap<JobId, Change>,
    /// Jobs that are over.
    ending: BTreeMap<JobId, Ending>,
    recomputed: BTreeMap<JobId, u64>,
    objects: Objects,
    /// Lost objects that were not announced yet, by reason.
    lost: BTreeMap<String, BTreeSet<ObjectId>>,
    handover: Handover,
    doubts: Doubts,
    holds: Holds,
    /// For each task that was submitted by tasks, the workers on which those ran.
    submitted_on: BTreeMap<u64, BTreeSet<WorkerId>>,
    transfers: Transfers,
    shuffles: Shuffles,
    streams: Streams,
    delegates: Delegates,
    /// Of a control service.
    follower: Option<Box<Follower>>,
    /// Drained hosts.
    drained: BTreeSet<HostId>,
}

impl Controller {
    /// # Errors
    /// The policy is unknown, or the limit is 0: one line with a hint.
    pub fn new(policy: &str, flows_per_host: FlowsPerHost, environment: Environment) -> Result<Controller, String> {
        Ok(Controller {
            mission: MissionController::new(policy, flows_per_host, environment)?,
            policy_error: None,
            workers: BTreeMap::new(),
            without: BTreeMap::new(),
            unknown: BTreeMap::new(),
            outbox: Outbox::default(),
            sessions: Sessions::default(),
            jobs: Jobs::default(),
            contended: false,
            changed: BTreeMap::new(),
            ending: BTreeMap::new(),
            recomputed: BTreeMap::new(),
            objects: Objects::default(),
            lost: BTreeMap::new(),
            handover: Handover::default(),
            doubts: Doubts::default(),
            holds: Holds::default(),
            submitted_on: BTreeMap::new(),
            transfers: Transfers::default(),
            shuffles: Shuffles::default(),
            streams: Streams::default(),
            delegates: Delegates::default(),
            follower: None,
            drained: BTreeSet::new(),
        })
    }

    /// Whether a job could run, without letting it arrive.
    ///
    /// # Errors
    /// The refusal: one line that names what is missing.
    pub fn admits(&self, spec: &JobSpec) -> Result<(), String> {
        self.mission.admits(spec).map(drop)
    }

    /// The job of a task, as specified now.
    pub fn spec_of_task(&self, task: u64) -> Option<&JobSpec> {
        self.jobs.spec(self.jobs.of(task)?)
    }

    /// The job of a task.
    pub fn job_of(&self, task: u64) -> Option<&JobId> {
        self.jobs.of(task)
    }

    /// The job of a task, if somebody has named it.
    pub fn named_job_of(&self, task: u64) -> Option<&JobId> {
        self.jobs.of(task).filter(|job| self.jobs.is_named(job))
    }

    /// Of jobs that have queued tasks (`None`: all those that nobody has named), the one whose task goes to a worker next.
    pub fn next(&self, waiting: &[Option<JobId>]) -> usize {
        self.jobs.next(waiting)
    }

    /// Jobs that somebody has named, and that are not over.
    pub fn named(&self) -> usize {
        self.jobs.named()
    }

    pub fn policy(&self) -> &str {
        self.mission.policy()
    }

    /// Handles an event at `now`; adds commands. An invalid event changes nothing; the answer is [`Command::Invalid`]
    /// then.
    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        self.happen(now, event, commands);
        self.contend(commands);
    }

    fn happen(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::Join { worker, protocol, .. } if protocol != PROTOCOL => {
                commands.push(Command::Rejected { worker, why: of_another_version(protocol) });
            }
            Event::Join { worker, host, address, environment, problems, .. } => {
                self.join(now, worker, Joined { host, address, problems }, environment, commands);
            }
            Event::Without { worker, why } => self.without(now, worker, why, commands),
            Event::Known { worker } => drop(self.unknown.remove(&worker)),
            Event::Leaving { worker } => self.leaving(now, &worker, commands),
            Event::Stays { worker } => self.stays(&worker),
            Event::Gone { worker } => {
                self.writers_gone(&worker, commands);
                self.gone(now, &worker, commands);
            }
            Event::Again { worker, after } => {
                let again = self.outbox.after(&worker, after).map(|(version, message)| Command::Tell {
                    worker: worker.clone(),
                    version,
                    message: message.clone(),
                });
                commands.extend(again);
            }
            Event::Report { worker, report } => self.report(now, &worker, report, commands),
            Event::Sessions { apart } => self.sessions(now, apart, commands),
            Event::Probed { worker, seen } => {
                commands.push(record(Record::EcnProbed { worker: worker.clone(), seen }));
                self.decide(now, mission::Event::EcnProbed { worker, seen }, commands);
            }
            Event::Admit { spec, client } => self.admit(now, spec, &client, commands),
            Event::Leave { job, client } => {
                let over = self.jobs.leave(&job, &client);
                over.into_iter().for_each(|job| self.end(now, job, commands));
            }
            Event::ClientGone { client } => {
                let over = self.jobs.client_gone(&client);
                over.into_iter().for_each(|job| self.end(now, job, commands));
            }
            Event::Change { job, change } => self.change(now, &job, change, commands),
            Event::Policy { .. } if let Some(member) = self.member().filter(|member| member.guided) => {
                let why =
                    format!("cluster {} follows a service, which sets the policy: change it there", member.cluster);
                commands.push(Command::Invalid { why });
            }
            Event::Policy { policy } => self.decide(now, mission::Event::Policy { policy }, commands),
            Event::Follow { cluster, incarnation, addresses } => {
                self.follow(now, cluster, incarnation, addresses, commands);
            }
            Event::Service { heard } => self.service(now, heard, commands),
            Event::Weighed { asked, counts } => self.decide(now, mission::Event::Weighed { asked, counts }, commands),
            Event::Tasks { origin, tasks } => self.tasks(now, origin, tasks, commands),
            Event::Submitted { by, tasks } => {
                if let Some(worker) = self.holds.worker_of(by).cloned() {
                    for task in tasks {
                        self.submitted_on.entry(task).or_default().insert(worker.clone());
                    }
                }
            }
            Event::Begins { task, worker } => {
                self.streams.begins(task);
                self.jobs.begins(task);
                self.holds.begin(task, &worker);
            }
            Event::Ends { task } => self.ends(task, commands),
            Event::Carries { task, objects, alive } => self.carries(now, task, objects, alive, commands),
            Event::Writes { task, worker, stream, repeats, needs } => {
                self.writes(task, worker, (stream, repeats), needs, commands);
            }
            Event::Continues { task, worker, run } => self.waits(task, worker, run),
            Event::Wrote { task, stream } => self.wrote(task, stream, commands),
            Event::Delegates { task, inputs, objects, alive } => {
                self.delegates(now, task, inputs, objects, alive, commands);
            }
            Event::DelegateEnds { task, again } => self.delegate_ends(task, again, commands),
            Event::ResultGone { task, wanted } => self.result_gone(task, wanted, commands),
            Event::Forgotten { task } => {
                // The engine may have lost the two events before, and a disconnected worker may report a result late.
                self.result_gone(task, false, commands);
                self.ends(task, commands);
                self.writes_no_more(task, commands);
                self.streams.forget(task);
                self.delegate_ends(task, false, commands);
                self.submitted_on.remove(&task);
                self.decide(now, mission::Event::TaskForgotten { task }, commands);
                let over = self.jobs.remove(task);
                over.into_iter().for_each(|job| self.end(now, job, commands));
            }
            Event::ShuffleBegins { .. } | Event::ShuffleIn { .. } | Event::ShuffleOut { .. } => {
                self.shuffle(event, commands);
            }
            Event::Flush => {
                self.tell_lost(commands);
                self.hand_over_again(now, commands);
                // Also compute the patterns of new parts of the graph.
                self.decide(now, mission::Event::Tick, commands);
            }
            Event::Tick => self.tick(now, commands),
        }
    }

    /// A task is done, or was taken away from its worker.
    fn ends(&mut self, task: u64, commands: &mut Vec<Command>) {
        self.jobs.ends(task);
        for hold in self.holds.end(task) {
            self.release(Holder::Hold(hold), commands);
        }
    }

    fn result_gone(&mut self, task: u64, wanted: bool, commands: &mut Vec<Command>) {
        if wanted && self.objects.holds(Holder::Result(task)) {
            let job = self.jobs.of(task).cloned().unwrap_or_else(|| "unnamed".into());
            *self.recomputed.entry(job.clone()).or_default() += 1;
            commands.push(record(Record::Recomputed { job, task }));
        }
        self.hold_for_submitters(task);
        // Lost objects were already announced.
        let there = |object: &ObjectId| !self.objects.whole(*object).is_empty() || self.doubts.has(*object);
        let there: Vec<ObjectId> = self.objects.of(Holder::Result(task)).filter(there).collect();
        let free = self.objects.release(Holder::Result(task));
        if wanted {
            // A copy of the old result may still be in transit. Its receiver waits for the new one. The engine
            // may report that the result is gone before it reports that of its worker.
            let old: Vec<ObjectId> = there.into_iter().filter(|old| !self.objects.has(*old)).collect();
            self.lose("their result is recomputed", old, commands);
        }
        self.free(free, commands);
    }

    fn tick(&mut self, now: Time, commands: &mut Vec<Command>) {
        self.decide(now, mission::Event::Tick, commands);
        self.service(now, FollowerEvent::Tick, commands);
        let late = |(worker, joined): (&WorkerId, &Time)| (now.since(*joined) > KNOWN_WITHIN).then(|| worker.clone());
        for worker in self.unknown.iter().filter_map(late).collect::<Vec<_>>() {
            self.gone(now, &worker, commands);
        }
        self.hand_over_again(now, commands);
        self.look_at_sessions(now, commands);
        self.doubt_no_longer(now, None, commands);
        let over = |(job, own): (&JobId, &Ending)| (now >= own.until).then(|| job.clone());
        for job in self.ending.iter().filter_map(over).collect::<Vec<_>>() {
            self.finish(now, &job, commands);
        }
    }

    /// Lets the Mission Controller decide, and sends its commands to the workers.
    fn decide(&mut self, now: Time, event: mission::Event, commands: &mut Vec<Command>) {
        let mut said = Vec::new();
        self.mission.handle(now, event, &mut said);
        let mut to_all = Vec::new();
        for command in said {
            match command {
                mission::Command::Invalid { why } => commands.push(Command::Invalid { why }),
                mission::Command::Weigh { transfers } => commands.push(Command::Weigh { transfers }),
                mission::Command::ProbeEcn { worker, senders } => {
                    let addresses = senders.iter().filter_map(|sender| Some(self.workers.get(sender)?.address.clone()));
                    let message = Message { probe_ecn: addresses.collect(), ..Message::default() };
                    self.tell(&worker, message.into(), commands);
                }
                mission::Command::Forgotten { transfer } => self.transfers.forget_one(&transfer),
                mission::Command::Weights { .. } => commands.push(record(Record::Decision(command))),
                mission::Command::Own { ref worker, .. } => {
                    commands.push(record(Record::Decision(command.clone())));
                    let worker = worker.clone();
                    self.tell(&worker, Message { commands: vec![command], ..Message::default() }.into(), commands);
                }
                // Weights have their own record.
                mission::Command::Shares(standing) => self.say_shares(now, standing, commands),
                // Only this module sends this command.
                mission::Command::SharesChanged(_) => {}
                mission::Command::Plan { .. }
                | mission::Command::Broadcast { .. }
                | mission::Command::Hosts { .. }
                | mission::Command::Refuse { .. } => {
                    commands.push(record(Record::Decision(command.clone())));
                    to_all.push(command);
                }
            }
        }
        if !to_all.is_empty() {
            self.tell_all(Message { commands: to_all, ..Message::default() }, commands);
        }
        let error = self.mission.policy_error().map(str::to_owned);
        if error != self.policy_error {
            commands.extend(error.clone().map(|why| record(Record::PolicyError { why })));
            self.policy_error = error;
        }
        // Last: its results are newer than the messages above.
        self.report_to_service(now, commands);
    }

    fn tell_all(&mut self, message: Message, commands: &mut Vec<Command>) {
        let message = Arc::new(message);
        let workers: Vec<WorkerId> = self.workers.keys().cloned().collect();
        workers.iter().for_each(|worker| self.tell(worker, message.clone(), commands));
    }

    /// To a worker whose data plane is up.
    fn tell(&mut self, worker: &WorkerId, message: Arc<Message>, commands: &mut Vec<Command>) {
        if self.workers.contains_key(worker) {
            let version = self.outbox.send(worker, message.clone());
            commands.push(Command::Tell { worker: worker.clone(), version, message });
        }
    }
}

fn record(record: Record) -> Command {
    Command::Record { record: Box::new(record) }
}

/// Every active transfer's weight, as records have it.
pub type Weights = Vec<TransferWeight>;
