//! The Mission Controller: one per cluster, beside the engine's scheduler.
//!
//! It knows jobs, transfers and workers; it assigns weights and picks transports. Events in, commands out; the caller
//! owns the clock and the channels. Workers keep the last commands they got, so a scheduler that stalls stops nothing.

use crate::defaults;
use crate::ecn::{self, Prober};
use crate::flight::{self, Environment, FlightPlan};
use crate::pattern::{Asked, Evidence};
use crate::policy::external::{self, External};
use crate::policy::{self, JobView, Policy};
use crate::shares;
use crate::shares::{FlowsPerHost, Share};
use crate::types::{Demands, Encryption, HostId, JobId, JobSpec, Pattern, TransferId, Transport, check_priority};
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Address of a worker process.
pub type WorkerId = Arc<str>;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    WorkerJoined {
        worker: WorkerId,
        host: HostId,
        environment: Environment,
    },
    WorkerLeft {
        worker: WorkerId,
    },
    JobArrived {
        spec: JobSpec,
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
    },
    /// The task graph tells the pattern.
    Classified {
        transfer: TransferId,
        pattern: Pattern,
    },
    /// Another policy from now on.
    Policy {
        policy: String,
    },
    /// What an external policy says to [`Command::Weigh`]: how much each job counts, or what went wrong.
    Weighed {
        asked: Vec<JobView>,
        counts: Result<BTreeMap<JobId, f64>, String>,
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
    /// To every worker.
    Shares { flows_per_host: FlowsPerHost, shares: Vec<Share> },
    /// To every worker.
    Plan { job: JobId, plan: FlightPlan },
    /// To every worker: many receive the same parts in this transfer, and serve one another ([`crate::swarm`]).
    Broadcast { transfer: TransferId },
    /// The job may not run; said before a byte moves.
    Refuse { job: JobId, reason: String },
    /// To this worker: have the others send to it at once ([`crate::ecn`]), and say so by [`Event::EcnProbed`].
    ProbeEcn { worker: WorkerId, senders: Vec<WorkerId> },
    /// To the caller itself: the event was wrong, in one line that says what to do; nothing has changed.
    Invalid { why: String },
    /// To the caller itself: have the external policy compute what these jobs count, and say so by [`Event::Weighed`].
    Weigh { jobs: Vec<JobView> },
}

pub struct MissionController {
    policy_spec: String,
    policy: Box<dyn Policy>,
    /// What the caller computes, where the policy is its; and what went wrong with it last.
    external: Option<External>,
    policy_error: Option<String>,
    flows_per_host: FlowsPerHost,
    arrivals: u64,
    jobs: BTreeMap<JobId, Job>,
    workers: BTreeMap<WorkerId, (HostId, Environment)>,
    shares: Vec<Share>,
    weighed_at: Option<Time>,
    prober: Prober,
    /// Transports that the caller's Carriers offer while no worker has joined yet.
    environment: Environment,
}

struct Job {
    spec: JobSpec,
    arrival: u64,
    plan: Option<FlightPlan>,
    refused: Option<String>,
    transfers: BTreeMap<(Arc<str>, Arc<str>), Transfer>,
}

#[derive(Default)]
struct Transfer {
    evidence: Evidence,
    classified: Option<Pattern>,
    /// The workers know that it is a broadcast.
    announced: bool,
    progress: BTreeMap<WorkerId, (u64, u64, bool)>,
    /// Totals of workers that left.
    left: u64,
}

/// What the Mission Controller knows of a job, for people to look at.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
    pub transfers: Vec<TransferStatus>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TransferStatus {
    pub from: Arc<str>,
    pub to: Arc<str>,
    pub pattern: Pattern,
    pub asked_bytes: u64,
    pub served_bytes: u64,
}

impl Transfer {
    fn totals(&self) -> (u64, u64) {
        let (asked, served) = self.progress.values().fold((0, 0), |sum, own| (sum.0 + own.0, sum.1 + own.1));
        (asked + self.left, served + self.left)
    }

    fn active(&self) -> bool {
        self.progress.values().any(|(asked, served, moved)| served < asked || *moved)
    }

    /// Says once that it is a broadcast: what was one stays one for its receivers, who lose nothing by it.
    fn announce(&mut self, id: TransferId, commands: &mut Vec<Command>) {
        if !self.announced && self.pattern() == Pattern::Broadcast {
            self.announced = true;
            commands.push(Command::Broadcast { transfer: id });
        }
    }

    fn pattern(&self) -> Pattern {
        match self.evidence.pattern() {
            Pattern::Unknown => self.classified.unwrap_or(Pattern::Unknown),
            seen => seen,
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
            external: external(policy_spec),
            policy_error: None,
            flows_per_host,
            arrivals: 0,
            jobs: BTreeMap::new(),
            workers: BTreeMap::new(),
            shares: Vec::new(),
            weighed_at: None,
            prober: Prober::default(),
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
            Event::WorkerJoined { worker, host, mut environment } => {
                // What is known of its host is known of it.
                let neighbour = self.workers.values().find(|(known, own)| *known == host && own.ecn.is_some());
                if let Some((_, known)) = neighbour {
                    environment.ecn = known.ecn.clone();
                }
                self.workers.insert(worker, (host, environment));
                self.prober.changed();
                self.plan_all(commands);
                true
            }
            Event::WorkerLeft { worker } => {
                self.workers.remove(&worker);
                self.prober.changed();
                for transfer in self.jobs.values_mut().flat_map(|job| job.transfers.values_mut()) {
                    transfer.left += transfer.progress.remove(&worker).map_or(0, |(_, served, _)| served);
                }
                self.plan_all(commands);
                true
            }
            Event::JobArrived { spec } => {
                check_priority(&spec.job, spec.priority)?;
                self.arrive(spec, commands);
                false
            }
            Event::JobEnded { job } => self.jobs.remove(&job).is_some(),
            Event::Asked { transfer: id, asked } => {
                let transfer = self.transfer(&id);
                let before = transfer.pattern();
                transfer.evidence.add(&asked);
                let changed = before != transfer.pattern();
                transfer.announce(id, commands);
                changed
            }
            Event::Classified { transfer: id, pattern } => {
                let transfer = self.transfer(&id);
                transfer.classified = Some(pattern);
                transfer.announce(id, commands);
                false
            }
            Event::Progress { worker, transfer, asked_bytes, served_bytes, moved } => {
                let transfer = self.transfer(&transfer);
                let before = transfer.active();
                transfer.progress.insert(worker, (asked_bytes, served_bytes, moved));
                before != transfer.active()
            }
            Event::Policy { policy } => {
                self.policy = policy::policy(&policy)?;
                self.external = external(&policy);
                if let Some(external) = &mut self.external {
                    // Until it has answered, everything stays as it is.
                    external.begin(self.shares.iter().map(|share| (share.job.clone(), share.weight)).collect());
                    self.policy = Box::new(external.clone());
                }
                self.policy_error = None;
                self.policy_spec = policy;
                true
            }
            Event::Weighed { asked, counts } => self.weighed(&asked, counts),
            Event::EcnProbed { worker, seen } => {
                self.prober.reported(&worker);
                if self.probed(&worker, seen) {
                    self.plan_all(commands);
                }
                false
            }
            Event::Tick => false,
        };
        if reweigh || self.weighed_at.is_none_or(|at| now.since(at) >= defaults::WEIGHTS_EVERY) {
            self.weighed_at = Some(now);
            self.weigh(asks, commands);
        }
        if may_probe && self.prober.is_due(now) {
            self.probe(now, commands);
        }
        Ok(())
    }

    /// All that a worker that has just joined must be told.
    pub fn briefing(&self) -> Vec<Command> {
        let shares = Command::Shares { flows_per_host: self.flows_per_host, shares: self.shares.clone() };
        let plans = self
            .jobs
            .iter()
            .filter_map(|(job, own)| own.plan.clone().map(|plan| Command::Plan { job: job.clone(), plan }));
        let broadcasts = self.jobs.iter().flat_map(|(job, own)| {
            own.transfers.iter().filter(|(_, transfer)| transfer.announced).map(|((from, to), _)| Command::Broadcast {
                transfer: TransferId { job: job.clone(), from: from.clone(), to: to.clone() },
            })
        });
        std::iter::once(shares).chain(plans).chain(broadcasts).collect()
    }

    /// Whether a job could run, without letting it arrive.
    ///
    /// # Errors
    /// The refusal: one line that names what is missing.
    pub fn admits(&self, spec: &JobSpec) -> Result<FlightPlan, String> {
        flight::choose(&spec.demands, &self.common_environment())
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
        jobs.into_iter()
            .map(|job| {
                let share = self.shares.iter().find(|share| share.job == job.spec.job);
                JobStatus {
                    job: job.spec.job.clone(),
                    priority: job.spec.priority,
                    demands: job.spec.demands,
                    active: job.active(),
                    weight: share.map(|share| share.weight),
                    flows: share.map(|share| share.flows),
                    refused: job.refused.clone(),
                    plan: job.plan.clone(),
                    transfers: job
                        .transfers
                        .iter()
                        .map(|((from, to), transfer)| transfer_status(from, to, transfer))
                        .collect(),
                }
            })
            .collect()
    }

    fn arrive(&mut self, spec: JobSpec, commands: &mut Vec<Command>) {
        let job = spec.job.clone();
        if let Some(known) = self.jobs.get_mut(&job) {
            if known.spec == spec {
                return;
            }
            known.spec = spec;
        } else {
            let arrival = self.arrivals;
            self.arrivals += 1;
            let new = Job { spec, arrival, plan: None, refused: None, transfers: BTreeMap::new() };
            self.jobs.insert(job.clone(), new);
        }
        let environment = self.common_environment();
        self.plan(&job, &environment, commands);
    }

    /// The transfer, and its job where nobody announced it.
    fn transfer(&mut self, id: &TransferId) -> &mut Transfer {
        if !self.jobs.contains_key(&id.job) {
            let spec = JobSpec { job: id.job.clone(), priority: 1.0, demands: Default::default(), machines: 0 };
            self.arrive(spec, &mut Vec::new());
        }
        let job = self.jobs.get_mut(&id.job).expect("it has just arrived");
        job.transfers.entry((id.from.clone(), id.to.clone())).or_default()
    }

    fn plan_all(&mut self, commands: &mut Vec<Command>) {
        let jobs: Vec<JobId> = self.jobs.keys().cloned().collect();
        let environment = self.common_environment();
        jobs.iter().for_each(|job| self.plan(job, &environment, commands));
    }

    fn plan(&mut self, id: &JobId, environment: &Environment, commands: &mut Vec<Command>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        match flight::choose(&job.spec.demands, environment) {
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

    /// What all workers have in common; before the first joins, what the scheduler's own side offers.
    fn common_environment(&self) -> Environment {
        let mut all = self.workers.values().map(|(_, environment)| environment);
        let Some(first) = all.next() else { return self.environment.clone() };
        let mut common = all.fold(first.clone(), |common, own| Environment {
            carriers: intersect(&common.carriers, &own.carriers),
            interfaces: common.interfaces.min(own.interfaces),
            link_bits_per_sec: common.link_bits_per_sec.zip(own.link_bits_per_sec).map(|(one, other)| one.min(other)),
            ecn: ecn::both(common.ecn, own.ecn.clone()),
            congestion_controls: intersect(&common.congestion_controls, &own.congestion_controls),
            engine_tls: common.engine_tls && own.engine_tls,
        });
        // Shared memory needs two processes on one host, not all of them.
        let hosts: BTreeSet<_> = self.workers.values().map(|(host, _)| host).collect();
        if hosts.len() == self.workers.len() && self.workers.len() > 1 {
            common.carriers.retain(|transport| *transport != Transport::Shm);
        }
        common
    }

    /// Has ECN measured where that decides: some job leaves the transport open, and every host has DCTCP.
    fn probe(&mut self, now: Time, commands: &mut Vec<Command>) {
        let open = |job: &Job| job.spec.demands.transport.is_none() && job.spec.demands.encrypt == Encryption::None;
        if !self.jobs.values().any(open) || !flight::has_dctcp(&self.common_environment()) {
            return;
        }
        let probes = self.prober.due(now, self.workers.iter().map(|(worker, (host, _))| (worker, host)));
        let command = |probe: ecn::Probe| Command::ProbeEcn { worker: probe.receiver, senders: probe.senders };
        commands.extend(probes.into_iter().map(command));
    }

    /// What one worker saw holds for all of its host; true if that was not known.
    fn probed(&mut self, worker: &WorkerId, seen: ecn::Seen) -> bool {
        let Some((host, _)) = self.workers.get(worker) else { return false };
        let (host, Some((arrive, why))) = (host.clone(), seen.verdict(worker)) else { return false };
        let mut new = false;
        for (own, environment) in self.workers.values_mut() {
            let known = environment.ecn.as_ref().is_some_and(|(before, _)| *before == arrive);
            if *own == host && !known {
                environment.ecn = Some((arrive, why.clone()));
                new = true;
            }
        }
        new
    }

    /// Takes what an external policy says; true if weights may change by it.
    fn weighed(&mut self, asked: &[JobView], counts: Result<BTreeMap<JobId, f64>, String>) -> bool {
        let Some(external) = &mut self.external else { return false };
        match counts.and_then(|counts| external.replied(asked, counts)) {
            Ok(()) => {
                self.policy = Box::new(external.clone());
                self.policy_error = None;
                true
            }
            Err(why) => {
                self.policy_error = Some(format!("policy {}: {why}; the last weights stay", self.policy_spec));
                false
            }
        }
    }

    fn weigh(&mut self, asks: bool, commands: &mut Vec<Command>) {
        let mut active: Vec<&Job> = self.jobs.values().filter(|job| job.active()).collect();
        active.sort_by_key(|job| job.arrival);
        let hosts = self.workers.values().map(|(host, _)| host).collect::<BTreeSet<_>>().len() as u32;
        let views: Vec<JobView> = active.iter().map(|job| view(job, hosts)).collect();
        let weights = policy::weights(self.policy.as_ref(), &views);
        let flows = shares::split(self.flows_per_host.usual(), &weights);
        let new: Vec<Share> = views
            .iter()
            .zip(weights.iter().zip(&flows))
            .map(|(view, (&weight, &flows))| Share { job: view.job.clone(), weight, flows })
            .collect();
        // With nothing active there is nobody to tell: the last shares do no harm.
        if new != self.shares && !new.is_empty() {
            commands.push(Command::Shares { flows_per_host: self.flows_per_host, shares: new.clone() });
        }
        self.shares = new;
        if asks && self.external.is_some() && !views.is_empty() {
            commands.push(Command::Weigh { jobs: views });
        }
    }
}

fn external(policy_spec: &str) -> Option<External> {
    policy_spec.starts_with(external::PREFIX).then(External::default)
}

fn view(job: &Job, hosts: u32) -> JobView {
    JobView {
        job: job.spec.job.clone(),
        arrival: job.arrival,
        priority: job.spec.priority,
        machines: if job.spec.machines == 0 { hosts } else { job.spec.machines },
        broadcasts: job
            .transfers
            .values()
            .any(|transfer| transfer.active() && transfer.pattern() == Pattern::Broadcast),
    }
}

fn transfer_status(from: &Arc<str>, to: &Arc<str>, transfer: &Transfer) -> TransferStatus {
    let (asked_bytes, served_bytes) = transfer.totals();
    TransferStatus { from: from.clone(), to: to.clone(), pattern: transfer.pattern(), asked_bytes, served_bytes }
}

fn intersect<T: Clone + PartialEq>(a: &[T], b: &[T]) -> Vec<T> {
    a.iter().filter(|item| b.contains(item)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handled(mission: &mut MissionController, now: Time, event: Event) -> Vec<Command> {
        let mut commands = Vec::new();
        mission.handle(now, event, &mut commands);
        commands
    }
    use crate::types::{Demands, Encryption};

    fn controller(policy: &str) -> MissionController {
        let environment = Environment { carriers: vec![Transport::Tcp, Transport::Tls], ..Environment::default() };
        MissionController::new(policy, FlowsPerHost::Fixed(10), environment).unwrap()
    }

    fn transfer(job: &str) -> TransferId {
        TransferId { job: job.into(), from: "map".into(), to: "reduce".into() }
    }

    fn progress(job: &str, asked_bytes: u64, served_bytes: u64) -> Event {
        Event::Progress { worker: "w".into(), transfer: transfer(job), asked_bytes, served_bytes, moved: false }
    }

    fn flows(commands: &[Command]) -> Vec<(String, u32)> {
        let Some(Command::Shares { shares, .. }) = commands.last() else { return Vec::new() };
        shares.iter().map(|share| (share.job.to_string(), share.flows)).collect()
    }

    #[test]
    fn shares_follow_the_jobs_that_are_active() {
        let mut mission = controller("fifo");
        let mut at = |event| handled(&mut mission, Time(0), event);
        assert_eq!(flows(&at(progress("one", 100, 0))), [("one".into(), 10)]);
        assert_eq!(flows(&at(progress("two", 100, 0))), [("one".into(), 7), ("two".into(), 3)]);
        assert!(at(progress("two", 100, 50)).is_empty(), "nothing changed");
        assert_eq!(flows(&at(progress("one", 100, 100))), [("two".into(), 10)]);
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
        for receiver in ["r0", "r1"] {
            let asked =
                Asked { receiver: receiver.into(), objects: 1, object: "o".into(), part: 0, parts: 1, whole: true };
            commands = handled(&mut mission, Time(0), Event::Asked { transfer: transfer("broadcasts"), asked });
        }
        assert_eq!(flows(&commands), [("shuffles".into(), 3), ("broadcasts".into(), 7)]);
    }

    #[test]
    fn a_job_whose_encryption_cannot_be_had_is_refused() {
        let mut mission = controller("fair");
        let demands = Demands { encrypt: Encryption::Authenticated, transport: None };
        let spec = JobSpec { job: "secret".into(), priority: 1.0, demands, machines: 0 };
        let commands = handled(&mut mission, Time(0), Event::JobArrived { spec });
        assert!(matches!(&commands[0], Command::Refuse { reason, .. } if reason.contains("TLS")));
        // Said once, and not again whenever plans are looked at.
        let joined = |worker: &str| Event::WorkerJoined {
            worker: worker.into(),
            host: "h".into(),
            environment: Environment::default(),
        };
        handled(&mut mission, Time(0), joined("one"));
        let again = handled(&mut mission, Time(0), joined("another"));
        assert!(!again.iter().any(|command| matches!(command, Command::Refuse { .. })), "{again:?}");
    }

    #[test]
    fn priority_0_is_bad_input() {
        let spec = JobSpec { job: "j".into(), priority: 0.0, demands: Demands::default(), machines: 0 };
        let said = handled(&mut controller("priority"), Time(0), Event::JobArrived { spec });
        assert!(matches!(&said[..], [Command::Invalid { why }] if why.contains("above 0")), "{said:?}");
    }

    #[test]
    fn plans_are_sent_once_and_again_when_the_environment_changes() {
        let mut mission = controller("fair");
        let spec = JobSpec { job: "j".into(), priority: 1.0, demands: Demands::default(), machines: 0 };
        assert_eq!(handled(&mut mission, Time(0), Event::JobArrived { spec: spec.clone() }).len(), 1);
        assert!(handled(&mut mission, Time(0), Event::JobArrived { spec }).is_empty());
        let environment =
            Environment { carriers: vec![Transport::Tcp, Transport::Mptcp], interfaces: 2, ..Environment::default() };
        let joined = Event::WorkerJoined { worker: "w".into(), host: "h".into(), environment };
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
        let Some(Command::Weigh { jobs }) = commands.last().cloned() else { panic!("{commands:?}") };
        assert_eq!(weights(&mission), [0.5, 0.5], "until it has answered");
        let said = |counts: &[(&str, f64)]| {
            let counts = counts.iter().map(|(job, count)| (JobId::from(*job), *count)).collect();
            Event::Weighed { asked: jobs.clone(), counts: Ok(counts) }
        };
        let commands = handled(&mut mission, Time(2_000_000_000), said(&[("a", 3.0), ("b", 1.0)]));
        assert!(matches!(&commands[..], [Command::Shares { .. }]), "{commands:?}");
        assert_eq!(weights(&mission), [0.75, 0.25]);
        for nonsense in [
            said(&[("a", 1.0)]),
            said(&[("a", f64::NAN), ("b", 1.0)]),
            said(&[("a", 0.0), ("b", 1.0)]),
            Event::Weighed { asked: jobs.clone(), counts: Err("it raised KeyError".into()) },
        ] {
            handled(&mut mission, Time(2_000_000_000), nonsense);
            assert!(mission.policy_error().is_some_and(|why| why.contains("python:mine")));
            assert_eq!(weights(&mission), [0.75, 0.25]);
        }
    }
}
