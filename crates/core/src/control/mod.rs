//! All that is known of a cluster, and what is said to whom about it: the lives of workers, clients, jobs, tasks and objects.
//!
//! An engine's adapter turns what its scheduler does into events and carries the commands out. The shares, plans and patterns
//! are decided in [`crate::mission`]; here its commands become messages to workers, numbered so that none is missed.
//!
//! Tasks are numbered by the adapter: keys of an engine may be anything. A number is not used again while its task is known.

mod doubt;
mod handover;
mod holds;
mod jobs;
mod messages;
mod objects;
mod status;
#[cfg(test)]
mod tests;
mod transfers;

use crate::ecn;
use crate::flight::Environment;
use crate::graph::Kind;
use crate::mission::{self, MissionController, TransferWeight};
use crate::policy::TransferView;
use crate::policy::external::Counts;
use crate::shares::FlowsPerHost;
use crate::types::{Encryption, HostId, JobId, JobSpec, ObjectId, Stage, Transport, WorkerId};
use crate::units::Time;
use crate::versions::Outbox;
use doubt::Doubts;
pub use doubt::{DOUBT, Keep};
use handover::Handover;
pub use handover::{Describe, Described, HAND_OVER, TRY_AGAIN, Take, Untaken};
use holds::Holds;
pub use jobs::ClientId;
use jobs::Jobs;
pub use messages::Message;
use objects::{ByWorker, Holder, Objects};
use serde::{Deserialize, Serialize};
pub use status::{JobNow, Status, WorkerNow};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use transfers::Transfers;
pub use transfers::{Fetched, WorkerReport};

/// What controller and workers say to one another, as a number: it is raised with every change that an older one would not
/// understand, or would misunderstand.
pub const PROTOCOL: u32 = 2;
/// After the last task of a job, for its workers' last reports: a worker that does not answer may be gone.
pub const LAST_WORDS: Duration = Duration::from_secs(5);
/// After it joined, a worker that the engine does not know by then is gone.
pub const KNOWN_WITHIN: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A worker's data plane is up; the answer is [`Command::Briefing`], or [`Command::Rejected`].
    Join {
        worker: WorkerId,
        host: HostId,
        address: Arc<str>,
        environment: Environment,
        #[serde(default)]
        problems: Vec<String>,
        /// Its [`PROTOCOL`].
        #[serde(default)]
        protocol: u32,
    },
    /// A worker works without a data plane; it may have joined before something failed.
    Without {
        worker: WorkerId,
        why: String,
    },
    /// The engine knows this worker: it may have joined before.
    Known {
        worker: WorkerId,
    },
    /// A worker is going to leave: others are to have its objects first; see [`Controller::is_handing_over`].
    Leaving {
        worker: WorkerId,
    },
    /// It does not leave after all.
    Stays {
        worker: WorkerId,
    },
    /// A worker is gone, and its objects with it.
    Gone {
        worker: WorkerId,
    },
    /// A worker missed what was said after a version: it is said again.
    Again {
        worker: WorkerId,
        after: u64,
    },
    Report {
        worker: WorkerId,
        report: WorkerReport,
    },
    /// What a worker learnt of ECN marks.
    Probed {
        worker: WorkerId,
        seen: ecn::Seen,
    },
    /// A client wants to submit for a job; the answer is [`Command::Admitted`].
    Admit {
        spec: JobSpec,
        client: ClientId,
    },
    /// The client submits no more for this job.
    Leave {
        job: JobId,
        client: ClientId,
    },
    ClientGone {
        client: ClientId,
    },
    /// Another transport or priority for a job that runs; the answer is [`Command::Changed`].
    Change {
        job: JobId,
        change: Change,
    },
    Policy {
        policy: String,
    },
    Weighed {
        asked: Vec<TransferView>,
        counts: Result<Counts, String>,
    },
    /// New tasks of one origin, in any order; inputs among them or known before count.
    Tasks {
        origin: Origin,
        tasks: Vec<NewTask>,
    },
    /// A task has submitted others, new ones or not.
    Submitted {
        by: u64,
        tasks: Vec<u64>,
    },
    /// A task was given to a worker, or to another one.
    Begins {
        task: u64,
        worker: WorkerId,
    },
    /// A task is done, or was taken away.
    Ends {
        task: u64,
    },
    /// A task's result carries these objects; said before the engine hears that the task is done. `alive`: the engine still
    /// wants its result.
    Carries {
        task: u64,
        objects: Vec<Carried>,
        alive: bool,
    },
    /// A result is gone. `wanted`: it is going to be computed again.
    ResultGone {
        task: u64,
        wanted: bool,
    },
    /// The engine has forgotten a task.
    Forgotten {
        task: u64,
    },
    /// What [`Command::Soon`] asked for.
    Flush,
    /// Only time has passed; to be said each second.
    Tick,
}

/// Where tasks come from: it tells their job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    pub client: ClientId,
    /// What the program says of them.
    #[serde(default)]
    pub spec: Option<JobSpec>,
    /// The task that submitted them.
    #[serde(default)]
    pub by: Option<u64>,
    /// What the program calls this part of itself.
    #[serde(default)]
    pub span: Option<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewTask {
    pub task: u64,
    pub stage: Stage,
    pub kind: Kind,
    pub inputs: Vec<u64>,
}

/// An object whose reference a result carries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Carried {
    pub object: ObjectId,
    pub owner: WorkerId,
    pub parts: u32,
    #[serde(default)]
    pub bytes: u64,
    /// How many workers shall have it.
    #[serde(default = "one")]
    pub copies: u32,
}

fn one() -> u32 {
    1
}

/// What somebody changes of a job while it runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Change {
    #[serde(default)]
    pub priority: Option<f64>,
    /// `Some(None)`: Mission Control chooses again.
    #[serde(default)]
    pub transport: Option<Option<Transport>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Command {
    /// To this worker, with this version.
    Tell { worker: WorkerId, version: u64, message: Arc<Message> },
    /// To a worker that has joined: all that it must know, and the version as of which that holds.
    Briefing {
        worker: WorkerId,
        commands: Vec<mission::Command>,
        /// Of objects that lie elsewhere than their references say.
        places: Vec<(ObjectId, Vec<Arc<str>>)>,
        version: u64,
    },
    /// To a worker that cannot join, and why: it works without a data plane.
    Rejected { worker: WorkerId, why: String },
    /// To a client: the name under which its job runs, or why it may not.
    Admitted { job: JobId, refused: Option<String> },
    /// To who asked: why the job cannot be changed so, if it cannot.
    Changed { error: Option<String>, refused: Option<String> },
    /// To the engine: these results are invalid, with all their copies; what is still needed of them is computed again.
    Recompute { tasks: BTreeSet<u64> },
    /// To the adapter: say [`Event::Flush`] when it has done what it is at.
    Soon,
    /// To the adapter: have the external policy compute what these count, and say so by [`Event::Weighed`].
    Weigh { transfers: Vec<TransferView> },
    /// For reports.
    Record { record: Box<Record> },
    /// To the adapter itself: the event was wrong, in one line that says what to do; nothing has changed.
    Invalid { why: String },
}

/// What is kept for reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Record {
    Worker {
        worker: WorkerId,
        host: HostId,
        address: Arc<str>,
    },
    WorkerWithout {
        worker: WorkerId,
        why: String,
    },
    /// Before it left, others took so many objects of a worker.
    HandedOver {
        worker: WorkerId,
        objects: usize,
        bytes: u64,
    },
    /// A worker leaves, and nobody has these objects of it.
    NotHandedOver {
        worker: WorkerId,
        objects: usize,
        bytes: u64,
        why: String,
    },
    WorkerLeft {
        worker: WorkerId,
    },
    Job(JobSpec),
    Refused {
        job: JobId,
        reason: String,
    },
    JobEnded(Box<JobNow>),
    Progress(transfers::Progress),
    EcnProbed {
        worker: WorkerId,
        #[serde(flatten)]
        seen: ecn::Seen,
    },
    /// By the number of the task.
    Recomputed {
        job: JobId,
        task: u64,
    },
    Decision(mission::Command),
    PolicyError {
        why: String,
    },
}

pub struct Controller {
    mission: MissionController,
    policy_error: Option<String>,
    workers: BTreeMap<WorkerId, Joined>,
    /// Workers that have no data plane, and why.
    without: BTreeMap<WorkerId, String>,
    /// Workers that the engine may not know, and when they joined.
    unknown: BTreeMap<WorkerId, Time>,
    outbox: Outbox<WorkerId, Arc<Message>>,
    jobs: Jobs,
    /// What somebody changed of a job; its tasks still come with what they were submitted with.
    changed: BTreeMap<JobId, Change>,
    /// Jobs that are over.
    ending: BTreeMap<JobId, Ending>,
    recomputed: BTreeMap<JobId, u64>,
    objects: Objects,
    /// Lost objects that were not told yet, by what became of them.
    lost: BTreeMap<String, BTreeSet<ObjectId>>,
    handover: Handover,
    doubts: Doubts,
    holds: Holds,
    /// Of each task that tasks submitted, the workers on which they ran.
    submitted_on: BTreeMap<u64, BTreeSet<WorkerId>>,
    transfers: Transfers,
}

struct Joined {
    host: HostId,
    address: Arc<str>,
    problems: Vec<String>,
}

/// A job that is over: whose last words are awaited, and how long.
struct Ending {
    awaits: BTreeSet<WorkerId>,
    until: Time,
}

impl Controller {
    /// # Errors
    /// The policy is unknown, or the budget is 0: one line that says what to do.
    pub fn new(policy: &str, flows_per_host: FlowsPerHost, environment: Environment) -> Result<Controller, String> {
        Ok(Controller {
            mission: MissionController::new(policy, flows_per_host, environment)?,
            policy_error: None,
            workers: BTreeMap::new(),
            without: BTreeMap::new(),
            unknown: BTreeMap::new(),
            outbox: Outbox::default(),
            jobs: Jobs::default(),
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

    /// How many jobs have tasks.
    pub fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// How many tasks of a job a worker has.
    pub fn processing(&self, job: &JobId, worker: &WorkerId) -> usize {
        self.jobs.processing(job, worker)
    }

    pub fn policy(&self) -> &str {
        self.mission.policy()
    }

    /// Takes an event at `now`; adds what is to be said to whom, and what is to be done. An event that is wrong changes
    /// nothing; the answer is [`Command::Invalid`] then.
    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::Join { worker, protocol, .. } if protocol != PROTOCOL => {
                commands.push(Command::Rejected { worker, why: of_another_version(protocol) });
            }
            Event::Join { worker, host, address, environment, problems, .. } => {
                self.join(now, worker, Joined { host, address, problems }, environment, commands);
            }
            Event::Without { worker, why } => self.without(now, worker, why, commands),
            Event::Known { worker } => _ = self.unknown.remove(&worker),
            Event::Leaving { worker } => self.leaving(now, &worker, commands),
            Event::Stays { worker } => self.stays(&worker),
            Event::Gone { worker } => self.gone(now, &worker, commands),
            Event::Again { worker, after } => {
                let again = self.outbox.after(&worker, after).map(|(version, message)| Command::Tell {
                    worker: worker.clone(),
                    version,
                    message: message.clone(),
                });
                commands.extend(again);
            }
            Event::Report { worker, report } => self.report(now, &worker, report, commands),
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
            Event::Policy { policy } => self.decide(now, mission::Event::Policy { policy }, commands),
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
                self.jobs.begins(task, &worker);
                self.holds.begin(task, &worker);
            }
            Event::Ends { task } => {
                self.jobs.ends(task);
                for hold in self.holds.end(task) {
                    self.release(Holder::Hold(hold), commands);
                }
            }
            Event::Carries { task, objects, alive } => self.carries(now, task, objects, alive, commands),
            Event::ResultGone { task, wanted } => {
                if wanted && self.objects.holds(Holder::Result(task)) {
                    let job = self.jobs.of(task).cloned().unwrap_or_else(|| "unnamed".into());
                    *self.recomputed.entry(job.clone()).or_default() += 1;
                    commands.push(record(Record::Recomputed { job, task }));
                }
                self.hold_for_submitters(task);
                // What is lost was told so.
                let there = |object: &ObjectId| !self.objects.whole(*object).is_empty() || self.doubts.has(*object);
                let there: Vec<ObjectId> = self.objects.of(Holder::Result(task)).filter(there).collect();
                let free = self.objects.release(Holder::Result(task));
                if wanted {
                    // A copy of the old result may still be on its way somewhere. Who meets it waits for the new one. The
                    // engine may say that the result is gone before it says so of its worker.
                    let old: Vec<ObjectId> = there.into_iter().filter(|old| !self.objects.has(*old)).collect();
                    self.lose("their result is computed again", old, commands);
                }
                self.free(free, commands);
            }
            Event::Forgotten { task } => {
                // What a worker that had been away said of it late.
                self.release(Holder::Result(task), commands);
                self.submitted_on.remove(&task);
                self.decide(now, mission::Event::TaskForgotten { task }, commands);
                let over = self.jobs.remove(task);
                over.into_iter().for_each(|job| self.end(now, job, commands));
            }
            Event::Flush => {
                self.tell_lost(commands);
                self.hand_over_again(now, commands);
                // And what a graph has told.
                self.decide(now, mission::Event::Tick, commands);
            }
            Event::Tick => self.tick(now, commands),
        }
    }

    fn tick(&mut self, now: Time, commands: &mut Vec<Command>) {
        self.decide(now, mission::Event::Tick, commands);
        let late = |(worker, joined): (&WorkerId, &Time)| (now.since(*joined) > KNOWN_WITHIN).then(|| worker.clone());
        for worker in self.unknown.iter().filter_map(late).collect::<Vec<_>>() {
            self.gone(now, &worker, commands);
        }
        self.hand_over_again(now, commands);
        self.doubt_no_longer(now, None, commands);
        let over = |(job, own): (&JobId, &Ending)| (now >= own.until).then(|| job.clone());
        for job in self.ending.iter().filter_map(over).collect::<Vec<_>>() {
            self.finish(now, &job, commands);
        }
    }

    /// Lets the Mission Controller decide, and tells the workers.
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
                mission::Command::Weights { .. } => commands.push(record(Record::Decision(command))),
                mission::Command::Own { ref worker, .. } => {
                    commands.push(record(Record::Decision(command.clone())));
                    let worker = worker.clone();
                    self.tell(&worker, Message { commands: vec![command], ..Message::default() }.into(), commands);
                }
                // Their weights have a record of their own.
                mission::Command::Shares { .. } => to_all.push(command),
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

/// Workers.
impl Controller {
    fn join(
        &mut self,
        now: Time,
        worker: WorkerId,
        joined: Joined,
        environment: Environment,
        commands: &mut Vec<Command>,
    ) {
        let Joined { host, address, .. } = &joined;
        let (host, address) = (host.clone(), address.clone());
        commands.push(record(Record::Worker { worker: worker.clone(), host: host.clone(), address: address.clone() }));
        self.without.remove(&worker);
        self.workers.insert(worker.clone(), joined);
        self.unknown.insert(worker.clone(), now);
        let event = mission::Event::WorkerJoined { worker: worker.clone(), host, address, environment };
        self.decide(now, event, commands);
        let (briefing, version) = (self.mission.briefing(&worker), self.outbox.last(&worker));
        let places = self.places(self.objects.moved().collect());
        commands.push(Command::Briefing { worker, commands: briefing, places, version });
        if self.shall_hand_over() {
            self.hand_over_soon(commands); // it may take what nobody could
        }
    }

    fn without(&mut self, now: Time, worker: WorkerId, why: String, commands: &mut Vec<Command>) {
        self.gone(now, &worker, commands);
        commands.push(record(Record::WorkerWithout { worker: worker.clone(), why: why.clone() }));
        self.unknown.insert(worker.clone(), now);
        self.without.insert(worker, why);
    }

    /// A worker is gone, and its objects with it: the results that carry them are invalid, wherever copies of them are.
    fn gone(&mut self, now: Time, worker: &WorkerId, commands: &mut Vec<Command>) {
        self.unknown.remove(worker);
        self.without.remove(worker);
        if self.workers.remove(worker).is_none() {
            return;
        }
        self.outbox.forget(worker);
        commands.push(record(Record::WorkerLeft { worker: worker.clone() }));
        self.transfers.worker_gone(worker);
        self.last_words(now, worker, None, commands);
        self.decide(now, mission::Event::WorkerLeft { worker: worker.clone() }, commands);
        let lost = self.objects.worker_gone(worker);
        self.hand_over_without(now, worker, commands);
        self.tell_places(lost.elsewhere.iter().map(|(object, _)| *object).collect(), commands);
        self.doubt_no_longer(now, Some(worker), commands);
        let why = format!("worker {worker} left");
        let gone = self.doubt(now, &why, lost.objects, commands);
        let tasks: BTreeSet<u64> = gone.iter().flat_map(|object| self.objects.results(*object)).collect();
        self.lose(&why, gone, commands);
        if !tasks.is_empty() {
            commands.push(Command::Recompute { tasks });
        }
    }

    /// A worker has said its last words on a job, or on all.
    fn last_words(&mut self, now: Time, worker: &WorkerId, job: Option<&JobId>, commands: &mut Vec<Command>) {
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

/// Jobs and their tasks.
impl Controller {
    fn admit(&mut self, now: Time, mut spec: JobSpec, client: &ClientId, commands: &mut Vec<Command>) {
        if let Err(why) = crate::types::check_priority(&spec.job, spec.priority) {
            return commands.push(Command::Invalid { why });
        }
        let refused = self.mission.admits(&spec).err().or_else(|| self.lacks(&spec));
        let job = self.jobs.name(&spec.job, client);
        if let Some(reason) = &refused {
            commands.push(record(Record::Refused { job: job.clone(), reason: reason.clone() }));
            self.jobs.release_name(&job);
        } else {
            spec.job = job.clone();
            self.arrive(now, spec, true, commands);
            self.jobs.expect(&job, client);
        }
        commands.push(Command::Admitted { job, refused });
    }

    /// Why no worker can do what a job demands of its transfers, if none has a data plane.
    fn lacks(&self, spec: &JobSpec) -> Option<String> {
        let demanded = spec.demands.transport.is_some() || spec.demands.encrypt != Encryption::None;
        let (worker, why) = self.without.first_key_value().filter(|_| demanded && self.workers.is_empty())?;
        Some(format!("no worker has a data plane; of {worker}: {why}"))
    }

    fn change(&mut self, now: Time, job: &JobId, change: Change, commands: &mut Vec<Command>) {
        let Some(spec) = self.jobs.spec(job) else {
            let error = Some(format!("there is no job {job:?} now"));
            return commands.push(Command::Changed { error, refused: None });
        };
        let changed = changed(spec.clone(), &change);
        let wrong = crate::types::check_priority(job, changed.priority).err();
        if let Some(error) = wrong.or_else(|| crate::flight::contradiction(&changed.demands)) {
            return commands.push(Command::Changed { error: Some(error), refused: None });
        }
        let refused = self.mission.admits(&changed).err();
        if refused.is_none() {
            let known = self.changed.entry(job.clone()).or_default();
            known.priority = change.priority.or(known.priority);
            known.transport = change.transport.or(known.transport);
            self.arrive(now, changed, false, commands);
        }
        commands.push(Command::Changed { error: None, refused });
    }

    fn tasks(&mut self, now: Time, origin: Origin, tasks: Vec<NewTask>, commands: &mut Vec<Command>) {
        let spec = self.spec_of(origin);
        let job = spec.job.clone();
        if let Err(why) = crate::types::check_priority(&job, spec.priority) {
            return commands.push(Command::Invalid { why });
        }
        self.arrive(now, spec, false, commands);
        for NewTask { task, stage, kind, inputs } in inputs_first(tasks) {
            self.jobs.add(task, &job);
            let added = mission::Event::TaskAdded { task, job: job.clone(), stage, kind, inputs };
            self.decide(now, added, commands);
        }
    }

    /// The job of new tasks: as the program says, else that of the task that submitted them, else that of the part of the
    /// program, else one for the client.
    fn spec_of(&mut self, origin: Origin) -> JobSpec {
        let Origin { client, spec, by, span } = origin;
        if let Some(spec) = spec {
            return spec;
        }
        let parent = by.and_then(|by| self.jobs.of(by)).and_then(|job| self.jobs.spec(job));
        if let Some(parent) = parent {
            return parent.clone();
        }
        JobSpec::named(self.jobs.name(&span.unwrap_or_else(|| client.clone()), &client))
    }

    fn arrive(&mut self, now: Time, spec: JobSpec, admitted: bool, commands: &mut Vec<Command>) {
        let spec = match self.changed.get(&spec.job) {
            Some(change) => changed(spec, change),
            None => spec,
        };
        let new = self.jobs.arrive(spec.clone());
        if new {
            commands.push(record(Record::Job(spec.clone())));
        }
        if new || admitted {
            self.decide(now, mission::Event::JobArrived { spec, admitted }, commands);
        }
    }

    /// The job is over; its workers have a moment to say what is still to be said of it.
    fn end(&mut self, now: Time, job: JobId, commands: &mut Vec<Command>) {
        let awaits = self.workers.keys().cloned().collect();
        self.ending.insert(job.clone(), Ending { awaits, until: now + LAST_WORDS });
        self.tell_all(Message { report: Some(job.clone()), ..Message::default() }, commands);
        if self.workers.is_empty() {
            self.finish(now, &job, commands);
        }
    }

    fn finish(&mut self, now: Time, job: &JobId, commands: &mut Vec<Command>) {
        if self.ending.remove(job).is_none() || self.jobs.spec(job).is_some() {
            return; // it has come back meanwhile
        }
        self.changed.remove(job);
        let ended = self.jobs_now(|own| own.job == *job);
        commands.extend(ended.into_iter().map(|own| record(Record::JobEnded(Box::new(own)))));
        self.recomputed.remove(job);
        self.transfers.forget(job);
        self.decide(now, mission::Event::JobEnded { job: job.clone() }, commands);
        self.tell_all(Message { forget_job: Some(job.clone()), ..Message::default() }, commands);
    }

    /// Whether something may still be said of a job.
    fn is_known(&self, job: &JobId) -> bool {
        self.jobs.spec(job).is_some() || self.ending.contains_key(job)
    }
}

/// Objects.
impl Controller {
    fn carries(&mut self, now: Time, task: u64, objects: Vec<Carried>, alive: bool, commands: &mut Vec<Command>) {
        let mut shared = false;
        for Carried { object, owner, parts, bytes, copies } in objects {
            shared |= copies > 1 || self.handover.is_leaving(&owner);
            let put = mission::Event::Put { task, parts };
            self.decide(now, put, commands);
            let there = self.workers.contains_key(&owner);
            self.objects.hold(Holder::Result(task), object, there.then_some(&owner), bytes, copies);
            self.objects.has_parts(object, parts);
            if self.objects.whole(object).is_empty() && !self.doubts.has(object) {
                self.lose(&format!("worker {owner} left"), [object], commands);
            }
        }
        if !alive {
            self.release(Holder::Result(task), commands);
        }
        if shared {
            self.hand_over_soon(commands);
        }
    }

    /// The tasks that submitted this one may return its references: they live until their own results are known.
    fn hold_for_submitters(&mut self, task: u64) {
        let carried = self.objects.held_by(Holder::Result(task));
        let Some(workers) = self.submitted_on.get(&task).filter(|_| !carried.is_empty()) else { return };
        if let Some(hold) = self.holds.hold(workers) {
            for (object, owner) in carried {
                self.objects.hold(Holder::Hold(hold), object, Some(&owner), 0, 1);
            }
        }
    }

    fn release(&mut self, holder: Holder, commands: &mut Vec<Command>) {
        let free = self.objects.release(holder);
        self.free(free, commands);
    }

    fn free(&mut self, free: ByWorker, commands: &mut Vec<Command>) {
        let freed = free.values().flatten().copied().collect::<Vec<_>>();
        freed.into_iter().for_each(|object| self.is_certain(object));
        let moved = self.objects.freed_moved();
        if !moved.is_empty() {
            // All know where they lie.
            self.tell_all(Message { free: moved.iter().copied().collect(), ..Message::default() }, commands);
        }
        for (worker, mut objects) in free {
            objects.retain(|object| !moved.contains(object));
            if !objects.is_empty() {
                self.tell(&worker, Message { free: objects, ..Message::default() }.into(), commands);
            }
        }
    }

    /// Objects that nobody has any more: a copy of a result that carries them may still be on its way.
    fn lose(&mut self, why: &str, objects: impl IntoIterator<Item = ObjectId>, commands: &mut Vec<Command>) {
        let mut objects = objects.into_iter().peekable();
        if objects.peek().is_none() {
            return;
        }
        if self.lost.is_empty() {
            // Once for all of them: where the only copy of a result went, the engine says so result by result.
            commands.push(Command::Soon);
        }
        self.lost.entry(why.to_owned()).or_default().extend(objects);
    }

    fn tell_lost(&mut self, commands: &mut Vec<Command>) {
        for (why, objects) in std::mem::take(&mut self.lost) {
            self.tell_all(Message { lost: objects.into_iter().collect(), why, ..Message::default() }, commands);
        }
    }
}

/// New tasks, each after those of them that it takes from; they have no cycle.
fn inputs_first(tasks: Vec<NewTask>) -> Vec<NewTask> {
    let places: BTreeMap<u64, usize> = tasks.iter().enumerate().map(|(place, new)| (new.task, place)).collect();
    let mut tasks: Vec<Option<NewTask>> = tasks.into_iter().map(Some).collect();
    let mut sorted = Vec::with_capacity(tasks.len());
    for first in 0..tasks.len() {
        let mut pending = vec![first];
        while let Some(&place) = pending.last() {
            let inputs = tasks[place].as_ref().map_or(&[][..], |new| &new.inputs);
            let waits = |input: &u64| places.get(input).copied().filter(|own| *own != place && tasks[*own].is_some());
            let before: Vec<usize> = inputs.iter().filter_map(waits).collect();
            if before.is_empty() {
                sorted.extend(tasks[place].take());
                pending.pop();
            }
            pending.extend(before);
        }
    }
    sorted
}

fn changed(spec: JobSpec, change: &Change) -> JobSpec {
    let mut spec = spec;
    spec.priority = change.priority.unwrap_or(spec.priority);
    spec.demands.transport = change.transport.unwrap_or(spec.demands.transport);
    spec
}

fn of_another_version(protocol: u32) -> String {
    let older = if protocol < PROTOCOL { "this worker's is the older one" } else { "the scheduler's is the older one" };
    format!(
        "its Mission Control speaks protocol {protocol} and the scheduler's speaks {PROTOCOL}; {older}: install the same \
         version on both, and start it again"
    )
}

fn record(record: Record) -> Command {
    Command::Record { record: Box::new(record) }
}

/// Every active transfer's weight, as records have it.
pub type Weights = Vec<TransferWeight>;
