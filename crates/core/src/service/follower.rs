//! A cluster's adapter as a member of the service: finds the leader, sends changes, executes the leader's commands.
//!
//! Without the service it keeps the last weights; after [`ALONE_AFTER`] the cluster's own Mission Controller computes
//! weights again. Commands of an older leader than the last one are not executed. The hosts of a cluster receive
//! weights only from its scheduler, so this covers them, too.

use super::messages::{Carried, FromService, PROTOCOL, State, ToService, Weighed};
use super::{ClusterId, Epoch, ServiceId};
use crate::control::Change;
use crate::policy::TransferView;
use crate::shares::FlowsPerHost;
use crate::types::{HostId, JobId, JobSpec, TransferId};
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Without a leader for this long, a cluster continues alone: longer than an election, shorter than a person waits.
pub const ALONE_AFTER: Duration = Duration::from_secs(15);
/// Heartbeat interval of a member, independent of other messages: the leader may have no reason to answer those.
pub const HERE_EVERY: Duration = Duration::from_millis(1500);
/// A leader that is silent for this long is left for another.
pub const SILENT: Duration = Duration::from_secs(3);
/// Interval between two attempts, each at one replica.
pub const TRY_EVERY: Duration = Duration::from_millis(250);
/// Interval after a refusal: the replica will refuse again until something has been changed.
pub const REJECTED_AGAIN: Duration = Duration::from_secs(5);
/// Connect timeout.
pub const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Shortest interval of progress reports; beginnings, ends and new patterns are reported at once.
pub const REPORT_EVERY: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    Connected,
    /// Or could not be connected.
    Disconnected {
        why: String,
    },
    Heard {
        message: FromService,
    },
    Job {
        spec: JobSpec,
    },
    JobEnded {
        job: JobId,
    },
    Hosts {
        hosts: BTreeSet<HostId>,
    },
    /// All active transfers.
    Transfers {
        transfers: Vec<TransferView>,
    },
    /// How all active transfers are carried; sent with the next report.
    Carried {
        carried: Vec<(TransferId, Carried)>,
    },
    Tick,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Command {
    /// The connection is closed.
    Connect {
        address: Arc<str>,
    },
    Disconnect,
    Send {
        message: ToService,
    },
    /// These weights are in force on the hosts of this cluster.
    Guide {
        weights: Weighed,
    },
    /// The cluster's own weights are in force, and why.
    Alone {
        why: String,
    },
    Policy {
        policy: String,
    },
    Change {
        job: JobId,
        change: Change,
    },
    Drained {
        hosts: BTreeSet<HostId>,
    },
    /// A job is in the store.
    Kept {
        job: JobId,
    },
}

pub struct Follower {
    cluster: ClusterId,
    incarnation: u64,
    addresses: Vec<Arc<str>>,
    /// Which of them is next.
    next: usize,
    link: Link,
    service: Option<ServiceId>,
    epoch: Epoch,
    state: State,
    guided: bool,
    /// When the last message of a leader arrived; initially the start time.
    heard_at: Time,
    alone_said: bool,
    problem: Option<String>,
    jobs: BTreeMap<JobId, JobSpec>,
    hosts: BTreeSet<HostId>,
    flows_per_host: Option<FlowsPerHost>,
    transfers: BTreeMap<TransferId, TransferView>,
    carried: BTreeMap<TransferId, Carried>,
    said: BTreeMap<TransferId, TransferView>,
    said_carried: BTreeMap<TransferId, Carried>,
    reported_at: Option<Time>,
    /// What was sent in this session, as of the last event.
    words: u64,
}

enum Link {
    /// Since when.
    Down(Option<Time>),
    Connecting(Time),
    /// A hello was sent, and not answered yet.
    Greeting {
        since: Time,
    },
    Joined {
        version: u64,
        heard_at: Time,
        asked_at: Time,
    },
}

/// Status for users.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub cluster: ClusterId,
    pub joined: bool,
    /// Whether the service's weights are in force.
    pub guided: bool,
    pub epoch: Epoch,
    pub leader: Option<Arc<str>>,
    pub problem: Option<String>,
}

impl Follower {
    pub fn new(now: Time, cluster: ClusterId, incarnation: u64, addresses: Vec<Arc<str>>) -> Follower {
        Follower {
            cluster,
            incarnation,
            addresses,
            next: 0,
            link: Link::Down(None),
            service: None,
            epoch: 0,
            state: State::default(),
            guided: false,
            heard_at: now,
            alone_said: false,
            problem: None,
            jobs: BTreeMap::new(),
            hosts: BTreeSet::new(),
            flows_per_host: None,
            transfers: BTreeMap::new(),
            carried: BTreeMap::new(),
            said: BTreeMap::new(),
            said_carried: BTreeMap::new(),
            reported_at: None,
            words: 0,
        }
    }

    /// Flows per host of the cluster, for users.
    pub fn with_budget(mut self, flows: FlowsPerHost) -> Follower {
        self.flows_per_host = Some(flows);
        self
    }

    /// Whether the next report includes progress, and how transfers are carried.
    pub fn reports(&self, now: Time) -> bool {
        matches!(self.link, Link::Joined { .. }) && self.late(now)
    }

    fn late(&self, now: Time) -> bool {
        self.reported_at.is_none_or(|at| now.since(at) >= REPORT_EVERY)
    }

    pub fn status(&self) -> Status {
        let joined = matches!(self.link, Link::Joined { .. });
        Status {
            cluster: self.cluster.clone(),
            joined,
            guided: self.guided,
            epoch: self.epoch,
            leader: joined.then(|| self.addresses[self.next].clone()),
            problem: self.problem.clone(),
        }
    }

    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        // Before the hello, a leader cannot assign messages to a cluster.
        let greeted = matches!(self.link, Link::Greeting { .. } | Link::Joined { .. });
        let before = commands.len();
        match event {
            Event::Connected => self.greet(now, commands),
            Event::Disconnected { why } => {
                self.problem = Some(format!("{}: {why}", self.addresses[self.next]));
                self.turn_to_next(now);
            }
            Event::Heard { message } => self.heard(now, message, commands),
            Event::Job { spec } => self.job(spec, greeted, commands),
            Event::JobEnded { job } => {
                // Its changes must not apply to the next job of this name.
                self.state.changes.remove(&job);
                if self.jobs.remove(&job).is_some() {
                    commands.extend(greeted.then_some(Command::Send { message: ToService::JobEnded { job } }));
                }
            }
            Event::Hosts { hosts } => {
                if self.hosts != hosts {
                    self.hosts.clone_from(&hosts);
                    commands.extend(greeted.then_some(Command::Send { message: ToService::Hosts { hosts } }));
                }
            }
            Event::Transfers { transfers } => {
                // The transfer of a job that was not announced.
                let unknown = |view: &&TransferView| !self.jobs.contains_key(&view.transfer.job);
                let unknown: BTreeSet<JobId> =
                    transfers.iter().filter(unknown).map(|view| view.transfer.job.clone()).collect();
                for job in unknown {
                    self.job(JobSpec::named(job), greeted, commands);
                }
                self.transfers = transfers.into_iter().map(|view| (view.transfer.clone(), view)).collect();
            }
            Event::Carried { carried } => {
                self.carried = carried.into_iter().collect();
                return;
            }
            Event::Tick => {}
        }
        self.report(now, commands);
        self.keep(now, before, commands);
        self.words += sends(&commands[before..]);
    }

    fn job(&mut self, spec: JobSpec, greeted: bool, commands: &mut Vec<Command>) {
        if self.jobs.get(&spec.job) != Some(&spec) {
            self.jobs.insert(spec.job.clone(), spec.clone());
            commands.extend(greeted.then_some(Command::Send { message: ToService::Job { spec } }));
        }
    }

    /// Sends the complete state.
    fn greet(&mut self, now: Time, commands: &mut Vec<Command>) {
        self.link = Link::Greeting { since: now };
        self.words = 0;
        self.carried.retain(|transfer, _| self.transfers.contains_key(transfer));
        self.said.clone_from(&self.transfers);
        self.said_carried.clone_from(&self.carried);
        self.reported_at = Some(now);
        let message = ToService::Hello {
            protocol: PROTOCOL,
            cluster: self.cluster.clone(),
            incarnation: self.incarnation,
            jobs: self.jobs.values().cloned().collect(),
            hosts: self.hosts.clone(),
            transfers: self.transfers.values().cloned().collect(),
            carried: self.carried.iter().map(|(transfer, own)| (transfer.clone(), own.clone())).collect(),
            flows_per_host: self.flows_per_host,
        };
        commands.push(Command::Send { message });
    }

    fn heard(&mut self, now: Time, message: FromService, commands: &mut Vec<Command>) {
        let epoch = match &message {
            FromService::Welcome { epoch, .. }
            | FromService::Update { epoch, .. }
            | FromService::Kept { epoch, .. }
            | FromService::Here { epoch, .. } => Some(*epoch),
            FromService::Moved { .. } | FromService::Rejected { .. } => None,
        };
        match message {
            FromService::Welcome { service, epoch, version, state } => {
                if let Err(why) = self.fits(now, service, epoch) {
                    self.leave(now, why, commands);
                    return;
                }
                (self.service, self.epoch, self.problem) = (Some(service), epoch, None);
                self.link = Link::Joined { version, heard_at: now, asked_at: now };
                self.heard_at = now;
                self.welcomed(state, commands);
                // What has changed since the hello.
                self.reported_at = None;
                return;
            }
            FromService::Moved { to } => {
                self.problem = Some(match &to {
                    Some(leader) => format!("{} does not lead; {leader} does", self.addresses[self.next]),
                    None => "the service has no leader now".into(),
                });
                commands.push(Command::Disconnect);
                self.turn_to_next(now);
                if let Some(to) = to {
                    // The token is sent to configured addresses only.
                    self.next = self.addresses.iter().position(|own| *own == to).unwrap_or(self.next);
                }
                return;
            }
            FromService::Rejected { why } => {
                self.leave(now, why, commands);
                self.link = Link::Down(Some(now + (REJECTED_AGAIN - TRY_EVERY)));
                return;
            }
            _ => {}
        }
        let Link::Joined { version, heard_at, .. } = &mut self.link else { return };
        if epoch.is_some_and(|epoch| epoch != self.epoch) {
            let why = format!(
                "a message of epoch {} came from the leader of epoch {}",
                epoch.unwrap_or_default(),
                self.epoch
            );
            self.leave(now, why, commands);
            return;
        }
        *heard_at = now;
        self.heard_at = now;
        match message {
            FromService::Update { version: own, update, .. } => {
                if own != *version + 1 {
                    let why = format!("version {own} arrived after version {version}");
                    self.leave(now, why, commands);
                    return;
                }
                *version = own;
                let weighs = update.weights.is_some() || update.parts.is_some();
                let (policy, changes) = (update.policy.clone(), update.changes.clone());
                let drained = update.drained.clone();
                self.state.apply(update);
                if weighs {
                    self.guide(commands);
                }
                commands.extend(policy.map(|policy| Command::Policy { policy }));
                commands.extend(changes.into_iter().map(|(job, change)| Command::Change { job, change }));
                commands.extend(drained.map(|hosts| Command::Drained { hosts }));
            }
            // The last update is missing.
            FromService::Here { version: own, .. } if own != *version => {
                let why = format!("the leader is at version {own}, but {version} arrived last");
                self.leave(now, why, commands);
            }
            FromService::Kept { job, .. } => commands.push(Command::Kept { job }),
            _ => {}
        }
    }

    /// # Errors
    /// Why this leader's commands are not executed.
    fn fits(&self, now: Time, service: ServiceId, epoch: Epoch) -> Result<(), String> {
        let old = now.since(self.heard_at) >= ALONE_AFTER;
        match self.service {
            Some(own) if own != service && !old => Err(format!(
                "service {service:016x} is another one than {own:016x}: its store has lost its data, or two services have \
                 the same addresses; it is followed {} s after the last message of the other",
                ALONE_AFTER.as_secs()
            )),
            // After so long it is a store that was restored from a backup.
            Some(own) if own == service && epoch < self.epoch && !old => {
                Err(format!("a leader of epoch {epoch} is older than the last one, of {}", self.epoch))
            }
            _ => Ok(()),
        }
    }

    fn welcomed(&mut self, state: State, commands: &mut Vec<Command>) {
        let old = std::mem::replace(&mut self.state, state);
        if self.state.weights.is_none() {
            // The leader still waits for other members: the current weights stay in force.
            self.state.weights = old.weights;
        } else {
            self.guide(commands);
        }
        if old.policy != self.state.policy {
            commands.push(Command::Policy { policy: self.state.policy.clone() });
        }
        let changed = self.state.changes.iter().filter(|(job, change)| old.changes.get(*job) != Some(*change));
        commands.extend(changed.map(|(job, change)| Command::Change { job: job.clone(), change: change.clone() }));
        if old.drained != self.state.drained {
            commands.push(Command::Drained { hosts: self.state.drained.clone() });
        }
    }

    fn guide(&mut self, commands: &mut Vec<Command>) {
        if let Some(weights) = &self.state.weights {
            (self.guided, self.alone_said) = (true, false);
            commands.push(Command::Guide { weights: weights.clone() });
        }
    }

    fn leave(&mut self, now: Time, why: String, commands: &mut Vec<Command>) {
        self.problem = Some(why);
        commands.push(Command::Disconnect);
        self.turn_to_next(now);
    }

    fn turn_to_next(&mut self, now: Time) {
        self.link = Link::Down(Some(now));
        self.next = (self.next + 1) % self.addresses.len().max(1);
    }

    /// Reports changed transfers.
    fn report(&mut self, now: Time, commands: &mut Vec<Command>) {
        if !matches!(self.link, Link::Joined { .. }) {
            return;
        }
        let late = self.late(now);
        let differs = |new: &TransferView| match self.said.get(&new.transfer) {
            None => true,
            Some(old) => !same_kind(old, new) || late && !same(old, new),
        };
        let changed: Vec<TransferView> = self.transfers.values().filter(|view| differs(view)).cloned().collect();
        let ended: Vec<TransferId> =
            self.said.keys().filter(|transfer| !self.transfers.contains_key(*transfer)).cloned().collect();
        let mut carried = Vec::new();
        if late {
            self.reported_at = Some(now);
            let differs = |(transfer, own): &(&TransferId, &Carried)| {
                self.transfers.contains_key(*transfer) && self.said_carried.get(*transfer) != Some(*own)
            };
            carried.extend(self.carried.iter().filter(differs).map(|(transfer, own)| (transfer.clone(), own.clone())));
        }
        if changed.is_empty() && carried.is_empty() && ended.is_empty() {
            return;
        }
        self.said.retain(|transfer, _| self.transfers.contains_key(transfer));
        self.said_carried.retain(|transfer, _| self.transfers.contains_key(transfer));
        self.said.extend(changed.iter().map(|view| (view.transfer.clone(), view.clone())));
        self.said_carried.extend(carried.iter().cloned());
        commands.push(Command::Send { message: ToService::Transfers { changed, carried, ended } });
    }

    /// Handles timeouts and heartbeats. `before`: number of commands of earlier events.
    fn keep(&mut self, now: Time, before: usize, commands: &mut Vec<Command>) {
        match &mut self.link {
            Link::Down(since) if since.is_none_or(|since| now.since(since) >= TRY_EVERY) => {
                if let Some(address) = self.addresses.get(self.next) {
                    self.link = Link::Connecting(now);
                    commands.push(Command::Connect { address: address.clone() });
                }
            }
            Link::Down(_) => {}
            Link::Connecting(since) if now.since(*since) >= CONNECT_WITHIN => {
                let why = format!("{}: no connection within {} s", self.addresses[self.next], CONNECT_WITHIN.as_secs());
                self.leave(now, why, commands);
            }
            Link::Connecting(_) => {}
            Link::Greeting { since } if now.since(*since) >= SILENT => {
                let why = format!("{}: no welcome within {} s", self.addresses[self.next], SILENT.as_secs());
                self.leave(now, why, commands);
            }
            Link::Greeting { .. } => {}
            Link::Joined { heard_at, .. } if now.since(*heard_at) >= SILENT => {
                let why = format!("{}: no message for {} s", self.addresses[self.next], SILENT.as_secs());
                self.leave(now, why, commands);
            }
            Link::Joined { asked_at, version, .. } if now.since(*asked_at) >= HERE_EVERY => {
                *asked_at = now;
                let here = ToService::Here { version: *version, words: self.words + sends(&commands[before..]) + 1 };
                commands.push(Command::Send { message: here });
            }
            Link::Joined { .. } => {}
        }
        if !self.alone_said && now.since(self.heard_at) >= ALONE_AFTER {
            (self.guided, self.alone_said) = (false, true);
            let seconds = ALONE_AFTER.as_secs();
            let why = self.problem.as_deref().unwrap_or("it has not answered yet");
            commands.push(Command::Alone { why: format!("no leader of the service for {seconds} s ({why})") });
        }
    }
}

fn sends(commands: &[Command]) -> u64 {
    commands.iter().filter(|command| matches!(command, Command::Send { .. })).count() as u64
}

/// Whether a policy that does not read bytes gives both the same weight.
fn same_kind(a: &TransferView, b: &TransferView) -> bool {
    let kind = |view: &TransferView| {
        (view.pattern, view.machines, view.job.priority, view.job.user.clone(), view.job.class.clone())
    };
    kind(a) == kind(b)
}

/// Whether they differ in time alone.
fn same(a: &TransferView, b: &TransferView) -> bool {
    let moved =
        |view: &TransferView| (view.asked_bytes, view.served_bytes, view.to_receive.clone(), view.to_send.clone());
    moved(a) == moved(b)
}

#[cfg(test)]
mod tests {
    use super::super::messages::{Part, ShareId, Update};
    use super::*;

    fn at(seconds: u64) -> Time {
        Time(0) + Duration::from_secs(seconds)
    }

    fn weighed(weight: f64) -> Weighed {
        let id = ShareId { cluster: "c".into(), job: "j".into(), stages: None };
        Weighed { parts: [(id, Part { weight, arrival: 0 })].into(), ..Weighed::default() }
    }

    fn welcome(service: ServiceId, epoch: Epoch) -> FromService {
        let state = State { policy: "fair".into(), weights: Some(weighed(1.0)), ..State::default() };
        FromService::Welcome { service, epoch, version: 1, state }
    }

    fn handle(follower: &mut Follower, seconds: u64, event: Event) -> Vec<Command> {
        let mut commands = Vec::new();
        follower.handle(at(seconds), event, &mut commands);
        commands
    }

    /// One that has joined at second 1, in epoch 7 of service 1.
    fn joined() -> Follower {
        let mut follower = Follower::new(at(0), "c".into(), 5, vec!["a".into(), "b".into()]);
        assert_eq!(handle(&mut follower, 0, Event::Tick), [Command::Connect { address: "a".into() }]);
        handle(&mut follower, 1, Event::Connected);
        let commands = handle(&mut follower, 1, Event::Heard { message: welcome(1, 7) });
        assert!(commands.contains(&Command::Guide { weights: weighed(1.0) }), "{commands:?}");
        follower
    }

    #[test]
    fn a_leader_of_an_older_epoch_is_not_obeyed() {
        let mut follower = joined();
        handle(&mut follower, 2, Event::Disconnected { why: "reset".into() });
        handle(&mut follower, 3, Event::Tick);
        handle(&mut follower, 3, Event::Connected);
        let commands = handle(&mut follower, 3, Event::Heard { message: welcome(1, 6) });
        assert_eq!(commands, [Command::Disconnect]);
        assert!(follower.status().problem.unwrap().contains("epoch 6 is older"));
        assert!(follower.status().guided, "the last weights hold");
    }

    #[test]
    fn another_service_is_followed_only_once_the_first_was_silent_for_long() {
        let mut follower = joined();
        handle(&mut follower, 2, Event::Disconnected { why: "reset".into() });
        let try_again = |follower: &mut Follower, seconds| {
            handle(follower, seconds, Event::Tick);
            handle(follower, seconds, Event::Connected);
            handle(follower, seconds, Event::Heard { message: welcome(2, 1) })
        };
        assert_eq!(try_again(&mut follower, 3), [Command::Disconnect]);
        assert!(follower.status().problem.unwrap().contains("another one"), "{:?}", follower.status());
        let commands = try_again(&mut follower, 30);
        assert!(commands.contains(&Command::Guide { weights: weighed(1.0) }), "{commands:?}");
    }

    #[test]
    fn a_version_that_was_missed_begins_a_new_session() {
        let mut follower = joined();
        let update = Update { policy: Some("fifo".into()), ..Update::default() };
        let message = |version| FromService::Update { epoch: 7, version, update: update.clone() };
        let commands = handle(&mut follower, 2, Event::Heard { message: message(2) });
        assert_eq!(commands.first(), Some(&Command::Policy { policy: "fifo".into() }));
        assert_eq!(handle(&mut follower, 2, Event::Heard { message: message(4) }), [Command::Disconnect]);
    }

    #[test]
    fn without_a_leader_it_goes_on_alone_after_a_time_that_it_says() {
        let mut follower = joined();
        handle(&mut follower, 2, Event::Disconnected { why: "reset".into() });
        for second in 3..16 {
            let commands = handle(&mut follower, second, Event::Tick);
            assert!(!commands.iter().any(|command| matches!(command, Command::Alone { .. })), "{second}: {commands:?}");
        }
        let commands = handle(&mut follower, 16, Event::Tick);
        let why = commands.iter().find_map(|command| match command {
            Command::Alone { why } => Some(why.clone()),
            _ => None,
        });
        assert!(why.unwrap().starts_with("no leader of the service for 15 s"));
        assert!(!follower.status().guided);
    }
}
