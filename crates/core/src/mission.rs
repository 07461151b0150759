//! The Mission Controller: one per cluster, beside the engine's scheduler.
//!
//! It knows jobs, transfers and workers; it assigns weights and picks transports. Events in, commands out; the caller
//! owns the clock and the channels. Workers keep the last commands they got, so a scheduler that stalls stops nothing.

use crate::cluster::{Cluster, Hosts};
use crate::defaults;
use crate::ecn::{self, Prober};
use crate::flight::{self, Environment, FlightPlan};
use crate::graph::{Classified, Graph, Kind};
use crate::host::fair::Level;
use crate::pattern::{Asked, Evidence};
use crate::policy::external::{self, Counts};
use crate::policy::{self, JobView, Policy, TransferView};
use crate::shares;
use crate::shares::{FlowsPerHost, Share};
use crate::types::{Demands, Encryption, HostId, JobId, JobSpec, Pattern, Stage, TransferId, WorkerId, check_priority};
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    WorkerJoined {
        worker: WorkerId,
        host: HostId,
        /// On which its objects are fetched.
        address: Arc<str>,
        environment: Environment,
    },
    WorkerLeft {
        worker: WorkerId,
    },
    JobArrived {
        spec: JobSpec,
        /// A client has just said so: a deadline counts from now.
        #[serde(default)]
        admitted: bool,
    },
    /// All tasks of the job are forgotten.
    JobEnded {
        job: JobId,
    },
    /// A fetch began.
    Asked {
        transfer: TransferId,
        asked: Asked,
    },
    /// What a worker has asked for and got in a transfer since its start: totals, so a lost message costs nothing.
    Progress {
        worker: WorkerId,
        transfer: TransferId,
        asked_bytes: u64,
        served_bytes: u64,
        /// Bytes were under way at some time since the worker's last word: what comes and goes between two words
        /// competes for the network all the same.
        #[serde(default)]
        moved: bool,
        /// Of the bytes that are asked for and not served, how many come from each worker, by the address on which its
        /// objects are fetched, as far as that is known.
        #[serde(default)]
        waits_for: BTreeMap<Arc<str>, u64>,
    },
    /// The engine has a new task, after its inputs; tasks are numbered by the caller. Those that are not known do not count.
    TaskAdded {
        task: u64,
        job: JobId,
        stage: Stage,
        kind: Kind,
        inputs: Vec<u64>,
    },
    /// A task's result carries an object of so many parts.
    Put {
        task: u64,
        parts: u32,
    },
    /// The engine has forgotten a task.
    TaskForgotten {
        task: u64,
    },
    /// Another policy from now on.
    Policy {
        policy: String,
    },
    /// What an external policy says to [`Command::Weigh`]: how much each job or transfer counts, or what went wrong.
    Weighed {
        asked: Vec<TransferView>,
        counts: Result<Counts, String>,
    },
    /// What a worker learnt by [`Command::ProbeEcn`].
    EcnProbed {
        worker: WorkerId,
        seen: ecn::Seen,
    },
    /// Only time has passed.
    Tick,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Command {
    /// To every worker. `level`: whether jobs have the shares ([`Level::Groups`]) or transfers ([`Level::Members`]).
    Shares { flows_per_host: FlowsPerHost, level: Level, shares: Vec<Share> },
    /// To every worker.
    Plan { job: JobId, plan: FlightPlan },
    /// To every worker: what the hosts of its senders can do.
    Hosts { hosts: Hosts },
    /// To this worker: what its own host can do.
    Own { worker: WorkerId, environment: Environment },
    /// To every worker: many receive the same parts in this transfer, and serve one another ([`crate::swarm`]).
    Broadcast { transfer: TransferId },
    /// The job may not run; said before a byte moves.
    Refuse { job: JobId, reason: String },
    /// To this worker: have the others send to it at once ([`crate::ecn`]), and say so by [`Event::EcnProbed`].
    ProbeEcn { worker: WorkerId, senders: Vec<WorkerId> },
    /// To the caller itself: the event was wrong, in one line that says what to do; nothing has changed.
    Invalid { why: String },
    /// To the caller itself: have the external policy compute what these transfers or their jobs count, and say so by
    /// [`Event::Weighed`].
    Weigh { transfers: Vec<TransferView> },
    /// To the caller itself, for people: what every active transfer has from now on, in the order of arrival.
    Weights { transfers: Vec<TransferWeight> },
}

pub struct MissionController {
    policy_spec: String,
    policy: Policy,
    /// What went wrong last with a policy that the caller computes.
    policy_error: Option<String>,
    flows_per_host: FlowsPerHost,
    /// Jobs and transfers that there were.
    arrivals: u64,
    jobs: BTreeMap<JobId, Job>,
    cluster: Cluster,
    /// Of the active transfers, as of [`MissionController::weighed_at`].
    shares: Vec<Share>,
    weights: BTreeMap<TransferId, Weight>,
    weighed_at: Option<Time>,
    /// Something has changed since then that weights depend on.
    stale: bool,
    prober: Prober,
    graph: Graph,
    /// Transports that the caller's Carriers offer while no worker has joined yet.
    environment: Environment,
}

/// What a transfer may have: a part of every host's bytes, and the whole flows that this is (paper 001, table 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Weight {
    pub weight: f64,
    pub flows: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferWeight {
    #[serde(flatten)]
    pub transfer: TransferId,
    #[serde(flatten)]
    pub weight: Weight,
}

struct Job {
    spec: JobSpec,
    arrival: u64,
    arrived_at: Time,
    /// By a client, the last time: its deadline counts from then.
    admitted_at: Time,
    plan: Option<FlightPlan>,
    refused: Option<String>,
    transfers: BTreeMap<(Arc<str>, Arc<str>), Transfer>,
}

struct Transfer {
    arrival: u64,
    /// When the first fetch began.
    began_at: Option<Time>,
    evidence: Evidence,
    /// What the task graph tells.
    classified: Option<Classified>,
    /// The workers know that it is a broadcast.
    announced: bool,
    progress: BTreeMap<WorkerId, Progress>,
    /// Totals of workers that left.
    left: u64,
    /// Bytes that are still to come, by the hosts that receive and that send them: sums over `progress`.
    to_receive: BTreeMap<HostId, u64>,
    to_send: BTreeMap<HostId, u64>,
    /// When its rate was measured last, what had been served by then, and the rate.
    measured: (Time, u64, f64),
}

/// What one worker says of a transfer.
#[derive(Default)]
struct Progress {
    asked: u64,
    served: u64,
    moved: bool,
    /// Its host, and those that it waits for.
    host: Option<HostId>,
    waits_for: Vec<(HostId, u64)>,
}

/// What the Mission Controller knows of a job, for people to look at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    pub job: JobId,
    pub priority: f64,
    pub demands: Demands,
    pub active: bool,
    /// Of the last weights; absent while the job is not active.
    pub weight: Option<f64>,
    pub flows: Option<u32>,
    pub refused: Option<String>,
    pub plan: Option<FlightPlan>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transfers: Vec<TransferStatus>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferStatus {
    pub from: Arc<str>,
    pub to: Arc<str>,
    pub pattern: Pattern,
    /// By what the pattern is known.
    pub evidence: Arc<str>,
    /// Of the last weights; absent while the transfer is not active.
    pub weight: Option<f64>,
    pub flows: Option<u32>,
    pub bytes_per_sec: f64,
    pub asked_bytes: u64,
    pub served_bytes: u64,
}

impl Transfer {
    fn new(arrival: u64, now: Time) -> Transfer {
        Transfer {
            arrival,
            began_at: None,
            evidence: Evidence::default(),
            classified: None,
            announced: false,
            progress: BTreeMap::new(),
            left: 0,
            to_receive: BTreeMap::new(),
            to_send: BTreeMap::new(),
            measured: (now, 0, 0.0),
        }
    }

    /// What a worker says from now on, in place of what it said before; nothing more, where it is gone.
    fn learn(&mut self, worker: &WorkerId, new: Option<Progress>) -> Progress {
        let before = match new {
            Some(new) => {
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
        let mut less = |sums: fn(&mut Transfer) -> &mut BTreeMap<HostId, u64>, host: &HostId, bytes: u64| {
            if let Some(sum) = sums(self).get_mut(host) {
                *sum = sum.saturating_sub(bytes);
            }
        };
        if let Some(host) = &before.host {
            less(|own| &mut own.to_receive, host, before.asked.saturating_sub(before.served));
        }
        before.waits_for.iter().for_each(|(host, bytes)| less(|own| &mut own.to_send, host, *bytes));
        before
    }

    fn totals(&self) -> (u64, u64) {
        let (asked, served) = self.progress.values().fold((0, 0), |sum, own| (sum.0 + own.asked, sum.1 + own.served));
        (asked + self.left, served + self.left)
    }

    fn active(&self) -> bool {
        self.progress.values().any(|own| own.served < own.asked || own.moved)
    }

    /// Something was asked for, or has moved. Its rate is measured from then on; that of an idle one is nothing.
    fn stirs(&mut self, now: Time) {
        self.began_at.get_or_insert(now);
        if !self.active() {
            self.measured = (now, self.totals().1, 0.0);
        }
    }

    fn bytes_per_sec(&self) -> f64 {
        if self.active() { self.measured.2 } else { 0.0 }
    }

    fn measure(&mut self, now: Time) {
        let (_, served) = self.totals();
        let (since, before, _) = self.measured;
        let seconds = now.since(since).as_secs_f64();
        if seconds >= defaults::WEIGHTS_EVERY.as_secs_f64() {
            self.measured = (now, served, served.saturating_sub(before) as f64 / seconds);
        }
    }

    /// Says once that it is a broadcast: what was one stays one for its receivers, who lose nothing by it.
    fn announce(&mut self, id: TransferId, commands: &mut Vec<Command>) {
        if !self.announced && self.pattern() == Pattern::Broadcast {
            self.announced = true;
            commands.push(Command::Broadcast { transfer: id });
        }
    }

    /// The task graph decides until fetches show otherwise: parts that several tasks took, or what half of all tasks did.
    fn by_graph(&self) -> Option<&Classified> {
        let graph = self.classified.as_ref().filter(|graph| graph.pattern != Pattern::Unknown)?;
        let shown = match self.evidence.pattern() {
            Pattern::Broadcast if self.evidence.receivers() > 1 => true,
            Pattern::Unknown => false,
            _ => self.evidence.has_half_of(graph.consumers),
        };
        (!shown).then_some(graph)
    }

    fn pattern(&self) -> Pattern {
        self.by_graph().map_or_else(|| self.evidence.pattern(), |graph| graph.pattern)
    }

    /// By what its pattern is known.
    fn why(&self) -> Arc<str> {
        match (self.by_graph(), self.evidence.pattern()) {
            (Some(graph), _) => format!("task graph: {}", graph.why).into(),
            (None, Pattern::Unknown) => "nothing was fetched yet".into(),
            (None, _) => self.evidence.words().into(),
        }
    }
}

impl Job {
    fn active(&self) -> bool {
        self.transfers.values().any(Transfer::active)
    }
}

impl MissionController {
    /// # Errors
    /// The policy is unknown: one line that names those there are; or the budget is 0.
    pub fn new(
        policy_spec: &str,
        flows_per_host: FlowsPerHost,
        environment: Environment,
    ) -> Result<MissionController, String> {
        flows_per_host.check()?;
        Ok(MissionController {
            policy_spec: policy_spec.to_owned(),
            policy: policy::policy(policy_spec)?,
            policy_error: None,
            flows_per_host,
            arrivals: 0,
            jobs: BTreeMap::new(),
            cluster: Cluster::default(),
            shares: Vec::new(),
            weights: BTreeMap::new(),
            weighed_at: None,
            stale: false,
            prober: Prober::default(),
            graph: Graph::default(),
            environment,
        })
    }

    /// Takes an event at `now`; adds what is to be said to whom. Only [`Event::Policy`] and [`Event::JobArrived`] can be
    /// wrong; the answer is [`Command::Invalid`] then, and nothing has changed.
    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        if let Err(why) = self.take(now, event, commands) {
            commands.push(Command::Invalid { why });
        }
    }

    fn take(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) -> Result<(), String> {
        // An answer is not answered by the same question.
        let asks = !matches!(event, Event::Weighed { .. });
        // Whoever says these waits for what comes of it.
        let at_once = matches!(event, Event::Weighed { .. } | Event::Policy { .. });
        // Only these can make a probe due; most events are reports, and there are many.
        let may_probe = matches!(
            event,
            Event::Tick
                | Event::JobArrived { .. }
                | Event::WorkerJoined { .. }
                | Event::WorkerLeft { .. }
                | Event::EcnProbed { .. }
        );
        let reweigh = match event {
            Event::WorkerJoined { worker, host, address, environment } => {
                let changed = self.cluster.join(worker, host, address, environment);
                self.prober.changed();
                if changed {
                    self.plan_all(commands);
                }
                false
            }
            Event::WorkerLeft { worker } => {
                let changed = self.cluster.leave(&worker);
                self.prober.changed();
                for transfer in self.jobs.values_mut().flat_map(|job| job.transfers.values_mut()) {
                    transfer.left += transfer.learn(&worker, None).served;
                }
                if changed {
                    self.plan_all(commands);
                }
                true
            }
            Event::JobArrived { spec, admitted } => {
                check_priority(&spec.job, spec.priority)?;
                let job = spec.job.clone();
                self.arrive(now, spec, commands);
                if let Some(own) = self.jobs.get_mut(&job).filter(|_| admitted) {
                    own.admitted_at = now;
                }
                false
            }
            Event::JobEnded { job } => {
                self.graph.forget_job(&job);
                self.jobs.remove(&job).is_some()
            }
            Event::Asked { transfer: id, asked } => {
                let transfer = self.transfer(now, &id);
                transfer.stirs(now);
                let before = transfer.pattern();
                transfer.evidence.add(&asked);
                let changed = before != transfer.pattern();
                transfer.announce(id, commands);
                changed
            }
            // What these tell is looked at with the next other event: a graph comes task by task.
            Event::TaskAdded { task, job, stage, kind, inputs } => {
                self.graph.add(task, &job, &stage, kind, &inputs);
                return Ok(());
            }
            Event::Put { task, parts } => {
                self.graph.put(task, parts);
                return Ok(());
            }
            Event::TaskForgotten { task } => {
                self.graph.forget(task);
                return Ok(());
            }
            Event::Progress { worker, transfer, asked_bytes, served_bytes, moved, waits_for } => {
                let host = Some(self.cluster.host_of(&worker).unwrap_or(&worker).clone());
                let at = |(address, bytes): (Arc<str>, u64)| {
                    let host = self.cluster.host_at(&address).cloned();
                    (host.unwrap_or(address), bytes)
                };
                let waits_for = waits_for.into_iter().map(at).collect();
                let transfer = self.transfer(now, &transfer);
                transfer.stirs(now);
                let before = transfer.active();
                let progress = Progress { asked: asked_bytes, served: served_bytes, moved, host, waits_for };
                transfer.learn(&worker, Some(progress));
                before != transfer.active()
            }
            Event::Policy { policy } => {
                let new = policy::policy(&policy)?;
                // Until one that the caller computes has answered, everybody has what it had.
                self.policy = if is_external(&policy) { self.had().policy() } else { new };
                self.policy_error = None;
                self.policy_spec = policy;
                true
            }
            Event::Weighed { asked, counts } => self.weighed(&asked, counts),
            Event::EcnProbed { worker, seen } => {
                self.prober.reported(&worker);
                if self.cluster.probed(&worker, seen) {
                    self.plan_all(commands);
                    for worker in self.cluster.workers_of(&worker).cloned() {
                        let environment = self.cluster.environment_of(&worker);
                        commands.extend(environment.map(|environment| Command::Own { worker, environment }));
                    }
                }
                false
            }
            Event::Tick => {
                // Once a second, and not for each of many workers that join.
                commands.extend(self.cluster.news().map(|hosts| Command::Hosts { hosts }));
                false
            }
        };
        self.stale |= self.learn(now, commands) || reweigh;
        let since = self.weighed_at.map(|at| now.since(at));
        let due = if self.stale { defaults::WEIGHTS_APART } else { defaults::WEIGHTS_EVERY };
        if (at_once && self.stale) || since.is_none_or(|since| since >= due) {
            (self.weighed_at, self.stale) = (Some(now), false);
            self.weigh(now, asks, commands);
        }
        if may_probe && self.prober.is_due(now) {
            self.probe(now, commands);
        }
        Ok(())
    }

    /// All that a worker that has just joined must be told.
    pub fn briefing(&self, worker: &str) -> Vec<Command> {
        let own = self.cluster.environment_of(worker);
        let own = own.map(|environment| Command::Own { worker: worker.into(), environment });
        let hosts = Command::Hosts { hosts: self.cluster.hosts() };
        let plans = self
            .jobs
            .iter()
            .filter_map(|(job, own)| own.plan.clone().map(|plan| Command::Plan { job: job.clone(), plan }));
        let broadcasts = self.jobs.iter().flat_map(|(job, own)| {
            own.transfers.iter().filter(|(_, transfer)| transfer.announced).map(|((from, to), _)| Command::Broadcast {
                transfer: TransferId { job: job.clone(), from: from.clone(), to: to.clone() },
            })
        });
        own.into_iter().chain([hosts, self.command()]).chain(plans).chain(broadcasts).collect()
    }

    fn command(&self) -> Command {
        let (flows_per_host, level) = (self.flows_per_host, self.policy.level());
        Command::Shares { flows_per_host, level, shares: self.shares.clone() }
    }

    /// Whether the engine's own channel is encrypted.
    pub fn engine_encrypts(&self) -> bool {
        self.environment.engine_tls
    }

    /// Whether the data plane of a worker has the certificates of the engine's own channel.
    pub fn encrypts(&self, worker: &str) -> bool {
        self.cluster.is(worker, |own| own.engine_tls)
    }

    /// Whether a job could run, without letting it arrive.
    ///
    /// # Errors
    /// The refusal: one line that names what is missing.
    pub fn admits(&self, spec: &JobSpec) -> Result<FlightPlan, String> {
        flight::choose(&spec.demands, &self.kinds())
    }

    pub fn policy(&self) -> &str {
        &self.policy_spec
    }

    /// What is wrong with an external policy; the last weights that it gave are in force.
    pub fn policy_error(&self) -> Option<&str> {
        self.policy_error.as_deref()
    }

    pub fn status(&self) -> Vec<JobStatus> {
        let mut jobs: Vec<_> = self.jobs.values().collect();
        jobs.sort_by_key(|job| job.arrival);
        let status = |job: &Job| {
            let transfers: Vec<TransferStatus> = job
                .transfers
                .iter()
                .map(|((from, to), transfer)| self.transfer_status(job, from, to, transfer))
                .collect();
            let weights: Vec<f64> = transfers.iter().filter_map(|own| own.weight).collect();
            let flows: u32 = transfers.iter().filter_map(|own| own.flows).sum();
            JobStatus {
                job: job.spec.job.clone(),
                priority: job.spec.priority,
                demands: job.spec.demands,
                active: job.active(),
                weight: (!weights.is_empty()).then(|| weights.iter().sum()),
                flows: (!weights.is_empty()).then_some(flows),
                refused: job.refused.clone(),
                plan: job.plan.clone(),
                transfers,
            }
        };
        jobs.into_iter().map(status).collect()
    }

    fn transfer_status(&self, job: &Job, from: &Arc<str>, to: &Arc<str>, transfer: &Transfer) -> TransferStatus {
        let (asked_bytes, served_bytes) = transfer.totals();
        let own = self.weights.get(&TransferId { job: job.spec.job.clone(), from: from.clone(), to: to.clone() });
        TransferStatus {
            from: from.clone(),
            to: to.clone(),
            pattern: transfer.pattern(),
            evidence: transfer.why(),
            weight: own.map(|own| own.weight),
            flows: own.map(|own| own.flows),
            bytes_per_sec: transfer.bytes_per_sec(),
            asked_bytes,
            served_bytes,
        }
    }

    fn arrive(&mut self, now: Time, spec: JobSpec, commands: &mut Vec<Command>) {
        let job = spec.job.clone();
        if let Some(known) = self.jobs.get_mut(&job) {
            if known.spec == spec {
                return;
            }
            known.spec = spec;
        } else {
            let arrival = self.arrivals;
            self.arrivals += 1;
            let transfers = BTreeMap::new();
            let new = Job { spec, arrival, arrived_at: now, admitted_at: now, plan: None, refused: None, transfers };
            self.jobs.insert(job.clone(), new);
        }
        let hosts = self.kinds();
        self.plan(&job, &hosts, commands);
    }

    /// Takes over what the task graph has told since the last time; true if the pattern of an active transfer changed.
    fn learn(&mut self, now: Time, commands: &mut Vec<Command>) -> bool {
        let mut changed = false;
        for (((_, from), (job, to)), classified) in self.graph.changed() {
            let id = TransferId { job, from, to };
            let transfer = self.transfer(now, &id);
            let before = transfer.pattern();
            transfer.classified = Some(classified);
            changed |= transfer.active() && before != transfer.pattern();
            transfer.announce(id, commands);
        }
        changed
    }

    /// Tasks of the engine that are remembered.
    pub fn tasks(&self) -> usize {
        self.graph.tasks()
    }

    /// The transfer, and its job where nobody announced it.
    fn transfer(&mut self, now: Time, id: &TransferId) -> &mut Transfer {
        if !self.jobs.contains_key(&id.job) {
            self.arrive(now, JobSpec::named(id.job.clone()), &mut Vec::new());
        }
        let job = self.jobs.get_mut(&id.job).expect("it has just arrived");
        let arrivals = &mut self.arrivals;
        job.transfers.entry((id.from.clone(), id.to.clone())).or_insert_with(|| {
            *arrivals += 1;
            Transfer::new(*arrivals - 1, now)
        })
    }

    fn plan_all(&mut self, commands: &mut Vec<Command>) {
        let jobs: Vec<JobId> = self.jobs.keys().cloned().collect();
        let hosts = self.kinds();
        jobs.iter().for_each(|job| self.plan(job, &hosts, commands));
    }

    fn plan(&mut self, id: &JobId, hosts: &[Environment], commands: &mut Vec<Command>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        match flight::choose(&job.spec.demands, hosts) {
            Ok(plan) => {
                job.refused = None;
                if job.plan.as_ref() != Some(&plan) {
                    job.plan = Some(plan.clone());
                    commands.push(Command::Plan { job: id.clone(), plan });
                }
            }
            Err(reason) => {
                job.plan = None;
                if job.refused.as_ref() != Some(&reason) {
                    job.refused = Some(reason.clone());
                    commands.push(Command::Refuse { job: id.clone(), reason });
                }
            }
        }
    }

    /// One host of each kind; before the first worker joins, what the scheduler's own side offers.
    fn kinds(&self) -> Vec<Environment> {
        if self.cluster.is_empty() { vec![self.environment.clone()] } else { self.cluster.kinds().collect() }
    }

    /// Has ECN measured where that decides: some job leaves the transport open, and every host has DCTCP.
    fn probe(&mut self, now: Time, commands: &mut Vec<Command>) {
        let open = |job: &Job| job.spec.demands.transport.is_none() && job.spec.demands.encrypt == Encryption::None;
        if !self.jobs.values().any(open) || !self.kinds().iter().any(flight::has_dctcp) {
            return;
        }
        let with_dctcp = self.cluster.places().filter(|(worker, _)| self.cluster.is(worker, flight::has_dctcp));
        let probes = self.prober.due(now, with_dctcp);
        let command = |probe: ecn::Probe| Command::ProbeEcn { worker: probe.receiver, senders: probe.senders };
        commands.extend(probes.into_iter().map(command));
    }

    /// Takes what an external policy says; true if weights may change by it.
    fn weighed(&mut self, asked: &[TransferView], counts: Result<Counts, String>) -> bool {
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
                self.policy_error = Some(format!("policy {}: {why}; the last weights stay", self.policy_spec));
                false
            }
        }
    }

    fn weigh(&mut self, now: Time, asks: bool, commands: &mut Vec<Command>) {
        for transfer in self.jobs.values_mut().flat_map(|job| job.transfers.values_mut()).filter(|own| own.active()) {
            transfer.measure(now);
        }
        let mut views: Vec<TransferView> = self.jobs.values().flat_map(|job| self.views(now, job)).collect();
        views.sort_by_key(|view| view.arrival);
        let weights = policy::weights(&self.policy, &views);
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
        // With nothing active there is nobody to tell: the last shares do no harm.
        let tells = new != self.shares && !new.is_empty();
        self.shares = new;
        if tells {
            commands.push(self.command());
        }
        if asks && is_external(&self.policy_spec) && !views.is_empty() {
            commands.push(Command::Weigh { transfers: views });
        }
    }

    /// The weights as they are, as if a policy had counted them.
    fn had(&self) -> Counts {
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

/// Whether the caller computes it.
fn is_external(policy_spec: &str) -> bool {
    policy_spec.starts_with(external::PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handled(mission: &mut MissionController, now: Time, event: Event) -> Vec<Command> {
        let mut commands = Vec::new();
        mission.handle(now, event, &mut commands);
        commands
    }
    use crate::types::{Demands, Encryption, Transport};

    fn controller(policy: &str) -> MissionController {
        let environment = Environment { carriers: vec![Transport::Tcp, Transport::Tls], ..Environment::default() };
        MissionController::new(policy, FlowsPerHost::Fixed(10), environment).unwrap()
    }

    fn transfer(job: &str) -> TransferId {
        TransferId { job: job.into(), from: "map".into(), to: "reduce".into() }
    }

    fn progress(job: &str, asked_bytes: u64, served_bytes: u64) -> Event {
        let (worker, waits_for) = ("w".into(), BTreeMap::new());
        Event::Progress { worker, transfer: transfer(job), asked_bytes, served_bytes, moved: false, waits_for }
    }

    /// Of ten, by job, where the last command tells new shares.
    fn flows(commands: &[Command]) -> Vec<(String, u32)> {
        let Some(Command::Shares { shares, .. }) = commands.last() else { return Vec::new() };
        let weights: Vec<f64> = shares.iter().map(|share| share.weight).collect();
        shares.iter().map(|share| share.job.to_string()).zip(shares::split(10, &weights)).collect()
    }

    #[test]
    fn shares_follow_the_jobs_that_are_active() {
        let mut mission = controller("fifo");
        let mut now = Time(0);
        let mut at = |event| {
            now = now + defaults::WEIGHTS_APART;
            handled(&mut mission, now, event)
        };
        assert_eq!(flows(&at(progress("one", 100, 0))), [("one".into(), 10)]);
        assert_eq!(flows(&at(progress("two", 100, 0))), [("one".into(), 7), ("two".into(), 3)]);
        assert!(at(progress("two", 100, 50)).is_empty(), "nothing changed");
        assert_eq!(flows(&at(progress("one", 100, 100))), [("two".into(), 10)]);
    }

    #[test]
    fn what_comes_and_goes_at_once_is_weighed_once() {
        let mut mission = controller("fair");
        assert_eq!(handled(&mut mission, Time(0), progress("one", 100, 0)).len(), 2);
        assert!(handled(&mut mission, Time(1), progress("two", 100, 0)).is_empty());
        assert!(handled(&mut mission, Time(2), progress("three", 100, 0)).is_empty());
        // Whatever is said next, once it is time.
        let later = Time(0) + defaults::WEIGHTS_APART;
        assert_eq!(flows(&handled(&mut mission, later, Event::Tick)).len(), 3);
    }

    #[test]
    fn a_worker_that_left_keeps_no_job_active() {
        let mut mission = controller("fair");
        handled(&mut mission, Time(0), progress("one", 100, 40));
        handled(&mut mission, Time(0), progress("two", 100, 0));
        handled(&mut mission, Time(0), Event::WorkerLeft { worker: "w".into() });
        assert!(mission.status().iter().all(|job| !job.active));
        assert_eq!(mission.status()[0].transfers[0].served_bytes, 40);
    }

    #[test]
    fn a_broadcast_doubles_the_weight_of_its_job_while_it_is_active() {
        let mut mission = controller("performance-centric");
        handled(&mut mission, Time(0), progress("shuffles", 1, 0));
        handled(&mut mission, Time(0), progress("broadcasts", 1, 0));
        let mut commands = Vec::new();
        for (at, receiver) in [(100_000_000, "r0"), (200_000_000, "r1")] {
            let asked =
                Asked { receiver: receiver.into(), objects: 1, object: "o".into(), part: 0, parts: 1, whole: true };
            commands = handled(&mut mission, Time(at), Event::Asked { transfer: transfer("broadcasts"), asked });
        }
        assert_eq!(flows(&commands), [("shuffles".into(), 3), ("broadcasts".into(), 7)]);
    }

    #[test]
    fn a_job_whose_encryption_cannot_be_had_is_refused() {
        let mut mission = controller("fair");
        let demands = Demands { encrypt: Encryption::Authenticated, transport: None };
        let spec = JobSpec { demands, ..JobSpec::named("secret".into()) };
        let commands = handled(&mut mission, Time(0), Event::JobArrived { spec, admitted: false });
        assert!(matches!(&commands[0], Command::Refuse { reason, .. } if reason.contains("TLS")));
        // Said once, and not again whenever plans are looked at.
        let joined = |worker: &str| Event::WorkerJoined {
            worker: worker.into(),
            host: "h".into(),
            address: worker.into(),
            environment: Environment::default(),
        };
        handled(&mut mission, Time(0), joined("one"));
        let again = handled(&mut mission, Time(0), joined("another"));
        assert!(!again.iter().any(|command| matches!(command, Command::Refuse { .. })), "{again:?}");
    }

    #[test]
    fn priority_0_is_bad_input() {
        let spec = JobSpec { priority: 0.0, ..JobSpec::named("j".into()) };
        let said = handled(&mut controller("priority"), Time(0), Event::JobArrived { spec, admitted: false });
        assert!(matches!(&said[..], [Command::Invalid { why }] if why.contains("above 0")), "{said:?}");
    }

    #[test]
    fn plans_are_sent_once_and_again_when_the_environment_changes() {
        let mut mission = controller("fair");
        let spec = JobSpec::named("j".into());
        assert_eq!(handled(&mut mission, Time(0), Event::JobArrived { spec: spec.clone(), admitted: false }).len(), 1);
        assert!(handled(&mut mission, Time(0), Event::JobArrived { spec, admitted: false }).is_empty());
        let environment =
            Environment { carriers: vec![Transport::Tcp, Transport::Mptcp], interfaces: 2, ..Environment::default() };
        let (worker, address) = ("w".into(), "w:1".into());
        let joined = Event::WorkerJoined { worker, host: "h".into(), address, environment };
        let commands = handled(&mut mission, Time(0), joined);
        assert!(matches!(&commands[0], Command::Plan { plan, .. } if plan.legs[0].transport == Transport::Mptcp));
    }

    #[test]
    fn an_external_policy_is_asked_and_what_makes_no_sense_leaves_the_last_weights() {
        let mut mission = controller("python:mine");
        for job in ["a", "b"] {
            handled(&mut mission, Time(0), progress(job, 10, 0));
        }
        let weights = |mission: &MissionController| mission.shares.iter().map(|share| share.weight).collect::<Vec<_>>();
        let commands = handled(&mut mission, Time(2_000_000_000), Event::Tick);
        let Some(Command::Weigh { transfers }) = commands.last().cloned() else { panic!("{commands:?}") };
        assert_eq!(weights(&mission), [0.5, 0.5], "until it has answered");
        let said = |counts: &[(&str, f64)]| {
            let counts = counts.iter().map(|(job, count)| (JobId::from(*job), *count)).collect();
            Event::Weighed { asked: transfers.clone(), counts: Ok(Counts::Jobs(counts)) }
        };
        let commands = handled(&mut mission, Time(2_000_000_000), said(&[("a", 3.0), ("b", 1.0)]));
        assert!(matches!(&commands[..], [Command::Weights { .. }, Command::Shares { .. }]), "{commands:?}");
        assert_eq!(weights(&mission), [0.75, 0.25]);
        for nonsense in [
            said(&[("a", 1.0)]),
            said(&[("a", f64::NAN), ("b", 1.0)]),
            said(&[("a", 0.0), ("b", 1.0)]),
            Event::Weighed { asked: transfers.clone(), counts: Err("it raised KeyError".into()) },
        ] {
            handled(&mut mission, Time(2_000_000_000), nonsense);
            assert!(mission.policy_error().is_some_and(|why| why.contains("python:mine")));
            assert_eq!(weights(&mission), [0.75, 0.25]);
        }
    }
}
