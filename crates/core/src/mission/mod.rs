//! The Mission Controller: one per cluster, beside the engine's scheduler.
//!
//! It knows jobs, transfers and workers; it assigns weights and picks transports. Events in, commands out; the caller
//! owns the clock and the channels. Workers keep the last commands they got, so a scheduler that stalls stops nothing.

mod messages;
mod transfer;
mod weights;

pub use messages::{Command, Earlier, Event, Guide, JobStatus, TransferStatus, TransferWeight, Weight};

use crate::cluster::Cluster;
use crate::defaults;
use crate::ecn::{self, Prober};
use crate::flight::{self, Environment, FlightPlan};
use crate::graph::Graph;
use crate::policy::{self, Policy};
use crate::shares::{FlowsPerHost, Share};
use crate::standing::Standing;
use crate::types::{Encryption, JobId, JobSpec, TransferId, WorkerId, check_priority};
use crate::units::Time;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use transfer::{Progress, Transfer};
use weights::is_external;

pub struct MissionController {
    policy_spec: String,
    policy: Policy,
    /// The last error of a policy that the caller computes.
    policy_error: Option<String>,
    /// Weights that replace this controller's own.
    guide: Option<Guide>,
    flows_per_host: FlowsPerHost,
    /// How many jobs and transfers there were so far.
    arrivals: u64,
    jobs: BTreeMap<JobId, Job>,
    cluster: Cluster,
    /// Of the active transfers, as of [`MissionController::weighed_at`].
    shares: Vec<Share>,
    /// Version of the shares: it grows with each change, sent or not.
    version: u64,
    weights: BTreeMap<TransferId, Weight>,
    weighed_at: Option<Time>,
    /// Something has changed since then that weights depend on.
    stale: bool,
    prober: Prober,
    graph: Graph,
    /// Transports that the caller's Carriers offer while no worker has joined yet.
    environment: Environment,
}

struct Job {
    spec: JobSpec,
    arrival: u64,
    arrived_at: Time,
    /// By a client, the last time: its deadline counts from then.
    admitted_at: Time,
    plan: Option<FlightPlan>,
    refused: Option<String>,
    transfers: BTreeMap<Stages, Transfer>,
    /// Transfers whose records are over, unless they have stirred since; the first that ended comes first.
    quiet: VecDeque<Stages>,
    earlier: Earlier,
}

/// The stages that a transfer comes from and goes to.
type Stages = (Arc<str>, Arc<str>);

impl Job {
    fn active(&self) -> bool {
        self.transfers.values().any(Transfer::active)
    }

    fn worker_left(&mut self, worker: &WorkerId, commands: &mut Vec<Command>) {
        for (stages, own) in &mut self.transfers {
            own.learn(worker, None);
            if own.may_be_listed() {
                self.quiet.push_back(stages.clone());
            }
        }
        self.forget(commands);
    }

    /// A worker has forgotten its record of a transfer.
    fn settle(&mut self, stages: Stages) {
        if self.transfers.get_mut(&stages).is_some_and(Transfer::may_be_listed) {
            self.quiet.push_back(stages);
        }
    }

    /// Keeps no more quiet transfers than a job may have.
    fn forget(&mut self, commands: &mut Vec<Command>) {
        while self.quiet.len() > defaults::TRANSFERS_PER_JOB
            && let Some(oldest) = self.quiet.pop_front()
        {
            let Some(own) = self.transfers.get_mut(&oldest) else { continue };
            own.listed = false;
            if own.is_quiet() {
                let (asked, served) = own.totals();
                self.earlier.transfers += 1;
                self.earlier.asked_bytes = self.earlier.asked_bytes.wrapping_add(asked);
                self.earlier.served_bytes = self.earlier.served_bytes.wrapping_add(served);
                self.transfers.remove(&oldest);
                let transfer = TransferId { job: self.spec.job.clone(), from: oldest.0, to: oldest.1 };
                commands.push(Command::Forgotten { transfer });
            }
        }
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
            guide: None,
            flows_per_host,
            arrivals: 0,
            jobs: BTreeMap::new(),
            cluster: Cluster::default(),
            shares: Vec::new(),
            version: 0,
            weights: BTreeMap::new(),
            weighed_at: None,
            stale: false,
            prober: Prober::default(),
            graph: Graph::default(),
            environment,
        })
    }

    pub fn flows_per_host(&self) -> FlowsPerHost {
        self.flows_per_host
    }

    /// Handles an event at `now`; adds commands. Only [`Event::Policy`] and [`Event::JobArrived`] can be invalid; the
    /// answer is [`Command::Invalid`] then, and nothing has changed.
    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        if let Err(why) = self.take(now, event, commands) {
            commands.push(Command::Invalid { why });
        }
    }

    fn take(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) -> Result<(), String> {
        // An answer must not cause the same question again.
        let asks = !matches!(event, Event::Weighed { .. });
        // The sender of these waits for the result.
        let at_once = matches!(event, Event::Weighed { .. } | Event::Policy { .. } | Event::Guided { .. });
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
                self.jobs.values_mut().for_each(|job| job.worker_left(&worker, commands));
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
            // The effect of these is computed with the next other event: a graph arrives task by task.
            Event::TaskAdded { task, job, stage, kind, inputs } => {
                self.graph.add(task, &job, &stage, kind, &inputs);
                return Ok(());
            }
            Event::Put { task, parts } => {
                self.graph.put(task, parts);
                return Ok(());
            }
            Event::TaskTakes { task, inputs } => {
                self.graph.takes(task, &inputs);
                return Ok(());
            }
            Event::TaskForgotten { task } => {
                self.graph.forget(task);
                return Ok(());
            }
            Event::Progress { worker, transfer: id, asked_bytes, served_bytes, moved, waits_for, over } => {
                let host = Some(self.cluster.host_of(&worker).unwrap_or(&worker).clone());
                let at = |(address, bytes): (Arc<str>, u64)| {
                    let host = self.cluster.host_at(&address).cloned();
                    (host.unwrap_or(address), bytes)
                };
                let waits_for = waits_for.into_iter().map(at).collect();
                let transfer = self.transfer(now, &id);
                transfer.stirs(now);
                let before = transfer.active();
                let progress = Progress { asked: asked_bytes, served: served_bytes, moved, host, waits_for };
                transfer.learn(&worker, Some(progress));
                if over {
                    transfer.learn(&worker, None);
                }
                let changed = before != transfer.active();
                if over && let Some(job) = self.jobs.get_mut(&id.job) {
                    job.settle((id.from, id.to));
                    job.forget(commands);
                }
                changed
            }
            Event::Policy { policy } => {
                let new = policy::policy(&policy)?;
                // Until the caller's policy has answered, the previous weights stay in force; those of another such
                // policy are kept as it gave them, so that they hold for jobs that are idle now.
                match (is_external(&policy), is_external(&self.policy_spec)) {
                    (true, true) => {}
                    (true, false) => self.policy = self.had().policy(),
                    (false, _) => self.policy = new,
                }
                self.policy_error = None;
                self.policy_spec = policy;
                true
            }
            Event::Weighed { asked, counts } => self.weighed(&asked, counts),
            Event::Guided { guide } => {
                let changed = self.guide != guide;
                self.guide = guide;
                changed
            }
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

    /// The commands that a newly joined worker needs.
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
        let (version, flows_per_host) = (self.version, self.flows_per_host);
        let level = self.guide.as_ref().map_or_else(|| self.policy.level(), |guide| guide.level);
        Command::Shares(Standing { version, flows_per_host, level, shares: self.shares.clone() })
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

    /// The error of an external policy; its previous weights are in force.
    pub fn policy_error(&self) -> Option<&str> {
        self.policy_error.as_deref()
    }

    /// Of all jobs.
    pub fn specs(&self) -> impl Iterator<Item = &JobSpec> {
        self.jobs.values().map(|job| &job.spec)
    }

    /// When weights were computed last.
    pub fn weighed_at(&self) -> Option<Time> {
        self.weighed_at
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
                earlier: job.earlier,
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
            let new = Job {
                spec,
                arrival,
                arrived_at: now,
                admitted_at: now,
                plan: None,
                refused: None,
                transfers: BTreeMap::new(),
                quiet: VecDeque::new(),
                earlier: Earlier::default(),
            };
            self.jobs.insert(job.clone(), new);
        }
        let hosts = self.kinds();
        self.plan(&job, &hosts, commands);
    }

    /// Applies new classifications from the task graph; true if the pattern of an active transfer changed.
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

    /// The transfer; makes its job if that was not announced.
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

    /// One host of each kind; before the first worker joins, the scheduler's own environment.
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
}

#[cfg(test)]
mod tests;
