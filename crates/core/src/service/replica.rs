//! One replica of the service: leader, or one that waits to become it.
//!
//! What clusters have (jobs, hosts) is what they said last; what the books have is what the store says. A leader writes
//! the difference, so a write that failed is simply written again, and a leader that takes over has nothing to catch up
//! with but the store. An operator's change is written once, and answered when it is in the store.
//!
//! A leader acts only while its lease holds by its own clock, and once its books are as new as its epoch. Whatever it
//! says has that epoch.

mod history;
mod limits;
mod rates;
mod status;
mod transfers;
mod writing;

pub use history::{Happened, What};
pub use rates::RatesNow;
pub use status::{JobNow, Status};
pub use transfers::{Look, Page, Sort};

use self::history::History;
use self::rates::Rates;
use super::books::{Books, Entry, Input, Job, Known};
use super::messages::{Carried, FromService, PROTOCOL, State, ToService, Update, Weighed};
use super::shares::{self, Reported};
use super::{ClusterId, Epoch, ServiceId};
use crate::control::Change;
use crate::defaults::{WEIGHTS_APART, WEIGHTS_EVERY};
use crate::policy::{self, Policy, TransferView};
use crate::report::Negotiated;
use crate::shares::FlowsPerHost;
use crate::types::{HostId, JobId, JobSpec, TransferId, check_name, check_priority};
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// A member's connection, numbered by the caller.
pub type SessionId = u64;
/// A write under way.
pub type WriteId = u64;
/// An operator's question, numbered by the caller.
pub type AskId = u64;

/// A lease of this length is renewed so often: two renewals may be lost.
pub const RENEW_EVERY: Duration = Duration::from_millis(500);
/// So often the leader's key is tried for while nobody has it.
pub const CAMPAIGN_EVERY: Duration = Duration::from_millis(250);
/// A new leader says no weights before all clusters have come, or this time is over: those of half the clusters would be
/// wrong.
pub const SETTLE: Duration = Duration::from_millis(1500);
/// What depends on time alone is looked at so often.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A cluster without a session is forgotten after this time, with its jobs.
pub const FORGET_AFTER: Duration = Duration::from_secs(60);
/// Who says nothing for so long is not there: its transfers count no more, and another may take its name.
pub const SILENT: Duration = Duration::from_secs(15);
/// A write that the store has not answered by then may have happened or not.
pub const WRITE_WITHIN: Duration = Duration::from_secs(3);
/// A store that has not answered by then never will: each try has a bound.
const WRITE_FORGOTTEN: Duration = Duration::from_secs(60);
/// After a write that failed the next one waits so long.
pub const WRITE_AGAIN: Duration = Duration::from_millis(250);
/// Entries of one write: etcd takes 128 in a transaction, unless it is started with another `--max-txn-ops`.
pub const WRITE_MAX: usize = 100;
/// Bytes of one write: etcd takes 1.5 MiB in a request (`--max-request-bytes`), which has them in base 64.
pub const WRITE_BYTES: usize = 512 << 10;
/// What members said is compared with the books at most so often.
const RECONCILE_APART: Duration = Duration::from_millis(5);

#[derive(Clone, Debug)]
pub enum Event {
    /// All that the store has, as of a revision: instead of what these books have. `leader`: as in the leader's key.
    Loaded {
        revision: u64,
        entries: Vec<Entry>,
        leader: Option<Arc<str>>,
    },
    /// What was written at a revision, in order. `leader`: somebody got the leader's key (its text), or lost it.
    Changed {
        revision: u64,
        entries: Vec<Entry>,
        leader: Option<Option<Arc<str>>>,
    },
    /// This replica has the leader's key, at least until then unless it is renewed.
    Elected {
        epoch: Epoch,
        until: Time,
    },
    Renewed {
        until: Time,
    },
    /// It did not get it.
    NotElected,
    /// It has it no more. `epoch`: of what was asked; `None`: of the last.
    Deposed {
        epoch: Option<Epoch>,
    },
    /// A write is in the store, as of a revision.
    Written {
        write: WriteId,
        revision: u64,
    },
    /// A write did not happen, or nobody knows.
    Unwritten {
        write: WriteId,
        why: String,
    },
    /// The store does not answer, and why; or does again.
    Store {
        problem: Option<String>,
    },
    Opened {
        session: SessionId,
    },
    Said {
        session: SessionId,
        message: ToService,
    },
    Closed {
        session: SessionId,
    },
    Asks {
        ask: AskId,
        asked: Asked,
    },
    Tick,
}

/// What an operator wants changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum Asked {
    Policy { policy: String },
    Change { cluster: ClusterId, job: JobId, change: Change },
    Drain { host: HostId },
    Undrain { host: HostId },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Try to get the leader's key.
    Campaign,
    /// Renew the lease.
    Renew,
    /// Give the leader's key back: this replica does not act any more.
    Resign,
    /// Write these, if the leader's key still has this epoch.
    Write {
        write: WriteId,
        epoch: Epoch,
        entries: Vec<Entry>,
    },
    Say {
        session: SessionId,
        message: FromService,
    },
    Close {
        session: SessionId,
    },
    Answer {
        ask: AskId,
        result: Result<(), Refused>,
    },
}

/// Why nothing was changed, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It makes no sense, or cannot be.
    Wrong(String),
    /// Another replica is to be asked, or this one later: nothing was changed.
    Elsewhere(String),
    /// Nobody knows whether it is changed.
    Unknown(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    Leader,
    Follower,
}

/// A replica, as it names itself in the leader's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Where members find it.
    pub address: Arc<str>,
    /// Replicas that have the same tokens have the same text here, which says nothing else of them.
    pub tokens: Arc<str>,
}

impl Leader {
    /// As [`text`](Leader::text) has written it.
    fn read(text: &str) -> Leader {
        let (address, tokens) = text.split_once(' ').unwrap_or((text, ""));
        Leader { address: address.into(), tokens: tokens.into() }
    }

    /// In the leader's key.
    pub fn text(&self) -> String {
        format!("{} {}", self.address, self.tokens)
    }
}

pub struct Replica {
    own: Leader,
    draw: ServiceId,
    books: Books,
    loaded: bool,
    /// Who has the leader's key.
    leader: Option<Leader>,
    leading: Option<Leading>,
    store_problem: Option<String>,
    /// Why the last write failed.
    write_problem: Option<String>,
    sessions: BTreeMap<SessionId, Session>,
    writes: BTreeMap<WriteId, Write>,
    next_write: WriteId,
    /// Policy where nobody has said one.
    default_policy: String,
    tried_at: Option<Time>,
    /// It tries to get the leader's key, since then.
    campaigns: Option<Time>,
    /// Something may have to be written, or said to members that wait for it.
    unwritten: bool,
    looked_at: Option<Time>,
    history: History,
}

struct Leading {
    epoch: Epoch,
    until: Time,
    since: Time,
    renewed_at: Time,
    settled: bool,
    policy: Policy,
    islands: BTreeMap<ClusterId, ClusterId>,
    /// What was said last of each island.
    said: BTreeMap<ClusterId, Arc<Weighed>>,
    weighed_at: Option<Time>,
    stale: bool,
    next_arrival: u64,
    /// A write failed then.
    failed_at: Option<Time>,
    /// Clusters of the books without a session, since when.
    absent: BTreeMap<ClusterId, Time>,
    rates: Rates,
}

struct Session {
    member: Option<Member>,
    /// Of what was said last; 0: no welcome yet.
    version: u64,
    /// Heard, from the hello on.
    words: u64,
    heard_at: Time,
}

struct Member {
    cluster: ClusterId,
    known: Known,
    jobs: BTreeMap<JobId, JobSpec>,
    transfers: BTreeMap<TransferId, Seen>,
    carried: BTreeMap<TransferId, Carried>,
    flows_per_host: Option<FlowsPerHost>,
    /// Jobs of which it waits to hear that they are kept.
    unkept: BTreeSet<JobId>,
    /// The island whose weights it has.
    island: Option<ClusterId>,
}

/// A transfer as its cluster's adapter saw it at a time.
struct Seen {
    view: TransferView,
    at: Time,
}

struct Write {
    keys: Vec<String>,
    ask: Option<AskId>,
    since: Time,
    /// It is in the store, as of this revision, which these books may not have reached yet.
    revision: Option<u64>,
    /// Whoever asked was answered that nobody knows. The store may still do it, so nothing else is written there.
    given_up: bool,
}

impl Replica {
    /// `draw`: any number that nobody else draws, for the case that the store is new.
    pub fn new(own: Leader, default_policy: String, draw: ServiceId) -> Replica {
        Replica {
            own,
            draw,
            books: Books::default(),
            loaded: false,
            leader: None,
            leading: None,
            store_problem: None,
            write_problem: None,
            sessions: BTreeMap::new(),
            writes: BTreeMap::new(),
            next_write: 1,
            default_policy,
            tried_at: None,
            campaigns: None,
            unwritten: true,
            looked_at: None,
            history: History::default(),
        }
    }

    pub fn role(&self) -> Role {
        if self.leading.is_some() { Role::Leader } else { Role::Follower }
    }

    pub fn epoch(&self) -> Option<Epoch> {
        self.leading.as_ref().map(|own| own.epoch)
    }

    pub fn books(&self) -> &Books {
        &self.books
    }

    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        if self.leading.as_ref().is_some_and(|own| now >= own.until) {
            self.depose(commands);
        }
        self.unwritten |= match &event {
            Event::Said { message, .. } => !matches!(message, ToService::Here { .. } | ToService::Transfers { .. }),
            Event::Tick | Event::Renewed { .. } | Event::Store { .. } => false,
            _ => true,
        };
        match event {
            Event::Loaded { revision, entries, leader } => {
                let before = std::mem::take(&mut self.books);
                self.books.take(revision, &entries);
                let first = !std::mem::replace(&mut self.loaded, true);
                self.lead_by(now, leader.as_deref());
                if !first {
                    self.history.compare(now, &before, &self.books);
                }
                self.learned(now, &before, commands);
            }
            Event::Changed { revision, entries, leader } => {
                // Most of what has no entries only says that something was written.
                let before = if entries.is_empty() { None } else { Some(self.books.clone()) };
                self.books.take(revision, &entries);
                if let Some(before) = &before {
                    self.history.compare(now, before, &self.books);
                }
                if let Some(leader) = leader {
                    self.lead_by(now, leader.as_deref());
                    let other = self.leader.as_ref() != Some(&self.own);
                    if other && self.leading.as_ref().is_some_and(|own| revision > own.epoch) {
                        self.depose(commands);
                    }
                }
                if let Some(before) = &before {
                    self.learned(now, before, commands);
                }
            }
            Event::Elected { epoch, until } => {
                self.campaigns = None;
                match &mut self.leading {
                    Some(own) if own.epoch == epoch => own.until = until,
                    _ => self.elected(now, epoch, until),
                }
            }
            Event::NotElected => self.campaigns = None,
            Event::Renewed { until } => {
                if let Some(own) = &mut self.leading {
                    own.until = until;
                }
            }
            // A write of an earlier time as a leader says nothing of this one.
            Event::Deposed { epoch } => {
                if epoch.is_none() || epoch == self.epoch() {
                    self.depose(commands);
                }
            }
            Event::Written { write, revision } => {
                self.write_problem = None;
                if let Some(own) = self.writes.get_mut(&write) {
                    own.revision = Some(revision);
                }
            }
            Event::Unwritten { write, why } => {
                self.write_problem = Some(why.clone());
                self.written(now, write, Err(Refused::Unknown(why)), commands);
            }
            Event::Store { problem } => {
                self.history.store(now, self.store_problem.as_deref(), problem.as_deref());
                self.store_problem = problem;
            }
            Event::Opened { session } => {
                self.sessions.insert(session, Session { member: None, version: 0, words: 0, heard_at: now });
            }
            Event::Said { session, message } => self.said(now, session, message, commands),
            Event::Closed { session } => {
                self.sessions.remove(&session);
                if let Some(own) = &mut self.leading {
                    own.stale = true;
                }
            }
            Event::Asks { ask, asked } => self.asks(now, ask, asked, commands),
            Event::Tick => {}
        }
        self.finish(now, commands);
        self.give_up(now, commands);
        self.campaign(now, commands);
        if self.acts(now) {
            // Most of what members say is that they are there.
            let apart = if self.unwritten { RECONCILE_APART } else { LOOK_EVERY };
            if self.looked_at.is_none_or(|at| now.since(at) >= apart) {
                (self.unwritten, self.looked_at) = (false, Some(now));
                self.leave_silent(now, commands);
                self.reconcile(now, commands);
                self.welcome(now, commands);
            }
            self.weigh(now, commands);
            self.sample_rates(now);
        }
    }

    /// Whether it may say anything to anybody.
    fn acts(&self, now: Time) -> bool {
        let in_time = |own: &Leading| now < own.until && self.books.revision >= own.epoch;
        self.loaded && self.leading.as_ref().is_some_and(in_time)
    }

    fn campaign(&mut self, now: Time, commands: &mut Vec<Command>) {
        let since = |at: Time| now.since(at);
        if let Some(own) = &mut self.leading {
            if since(own.renewed_at) >= RENEW_EVERY {
                own.renewed_at = now;
                commands.push(Command::Renew);
            }
        } else if self.loaded
            && self.leader.is_none()
            && self.tried_at.is_none_or(|at| since(at) >= CAMPAIGN_EVERY)
            // One at a time: a second one that wins would have another epoch.
            && self.campaigns.is_none_or(|at| since(at) >= WRITE_WITHIN)
        {
            (self.tried_at, self.campaigns) = (Some(now), Some(now));
            commands.push(Command::Campaign);
        }
    }

    fn elected(&mut self, now: Time, epoch: Epoch, until: Time) {
        let spec = self.books.policy.as_ref().unwrap_or(&self.default_policy);
        // What is in the store was checked when it was written; a newer version's policy is not known here.
        let policy = policy::policy(spec).unwrap_or_else(|_| policy::policy(&self.default_policy).expect("it is one"));
        self.leading = Some(Leading {
            epoch,
            until,
            since: now,
            renewed_at: now,
            settled: false,
            policy,
            islands: shares::islands(&self.books.clusters),
            said: BTreeMap::new(),
            weighed_at: None,
            stale: true,
            next_arrival: self.books.next_arrival(),
            failed_at: None,
            absent: BTreeMap::new(),
            rates: Rates::default(),
        });
    }

    /// Says so to its members, who look for the leader.
    fn depose(&mut self, commands: &mut Vec<Command>) {
        if self.leading.take().is_none() {
            return;
        }
        self.write_problem = None;
        commands.push(Command::Resign);
        for (session, own) in std::mem::take(&mut self.sessions) {
            if own.member.is_some() {
                commands.push(Command::Say { session, message: self.moved() });
            }
            commands.push(Command::Close { session });
        }
        let why = "this replica leads no more, and does not know whether the change is kept: look, and ask again";
        for (_, write) in std::mem::take(&mut self.writes) {
            commands.extend(write.ask.map(|ask| Command::Answer { ask, result: Err(Refused::Unknown(why.into())) }));
        }
    }

    fn lead_by(&mut self, now: Time, leader: Option<&str>) {
        let leader = leader.map(Leader::read);
        if self.leader != leader {
            let address = leader.as_ref().map(|leader| leader.address.clone());
            self.history.add(now, What::Leader { leader: address });
            self.leader = leader;
        }
    }

    fn moved(&self) -> FromService {
        let other = self.leader.as_ref().filter(|leader| **leader != self.own);
        FromService::Moved { to: other.map(|leader| leader.address.clone()) }
    }

    /// The books have changed.
    fn learned(&mut self, now: Time, before: &Books, commands: &mut Vec<Command>) {
        let Some(own) = &mut self.leading else { return };
        own.next_arrival = own.next_arrival.max(self.books.next_arrival());
        own.stale = true;
        if self.books.clusters != before.clusters {
            own.islands = shares::islands(&self.books.clusters);
        }
        let mut update = Update::default();
        if self.books.policy != before.policy
            && let Some(spec) = &self.books.policy
            && let Ok(policy) = policy::policy(spec)
        {
            own.policy = policy;
            update.policy = Some(spec.clone());
        }
        if self.books.drained != before.drained {
            update.drained = Some(self.books.drained.clone());
        }
        if !self.acts(now) {
            return;
        }
        let epoch = self.epoch().expect("it acts");
        for (session, own) in self.sessions.iter_mut().filter(|(_, own)| own.version > 0) {
            let Some(member) = &own.member else { continue };
            let changes = changes_of(&self.books, &member.cluster);
            let old = changes_of(before, &member.cluster);
            let changes = changes.into_iter().filter(|(job, change)| old.get(job) != Some(change)).collect();
            let update = Update { changes, ..update.clone() };
            if update != Update::default() {
                own.say(*session, epoch, update, commands);
            }
        }
    }

    fn said(&mut self, now: Time, session: SessionId, message: ToService, commands: &mut Vec<Command>) {
        let moved = self.moved();
        let leads = self.leading.is_some();
        let Some(own) = self.sessions.get_mut(&session) else { return };
        own.heard_at = now;
        own.words += 1;
        if !leads {
            commands.push(Command::Say { session, message: moved });
            return;
        }
        match (message, &mut own.member) {
            (
                ToService::Hello { protocol, cluster, incarnation, jobs, hosts, transfers, carried, flows_per_host },
                _,
            ) => {
                if let Err(why) = self.may_join(now, session, protocol, &cluster, incarnation) {
                    commands.push(Command::Say { session, message: FromService::Rejected { why } });
                    return;
                }
                if let Err(why) = limits::check_hosts(&hosts) {
                    commands.push(Command::Say { session, message: FromService::Rejected { why } });
                    return;
                }
                if let Some(bad) = jobs.iter().find(|job| !makes_sense(job)) {
                    commands.push(Command::Say { session, message: nonsense(bad) });
                    return;
                }
                let old = |(id, own): (&SessionId, &Session)| {
                    let same = own.member.as_ref().is_some_and(|member| member.cluster == cluster);
                    (same && *id != session).then_some(*id)
                };
                for old in self.sessions.iter().filter_map(old).collect::<Vec<_>>() {
                    self.sessions.remove(&old);
                    commands.push(Command::Close { session: old });
                }
                let mut member = Member {
                    cluster,
                    known: Known { incarnation, hosts },
                    unkept: jobs.iter().map(|job| job.job.clone()).collect(),
                    jobs: jobs.into_iter().map(|job| (job.job.clone(), job)).collect(),
                    transfers: BTreeMap::new(),
                    carried: BTreeMap::new(),
                    flows_per_host,
                    island: None,
                };
                member.take(now, transfers, carried);
                let own = self.sessions.get_mut(&session).expect("it was there");
                (own.member, own.version) = (Some(member), 0);
            }
            (ToService::Job { spec }, Some(_)) if !makes_sense(&spec) => {
                commands.push(Command::Say { session, message: nonsense(&spec) });
                self.sessions.remove(&session);
                commands.push(Command::Close { session });
            }
            (ToService::Job { spec }, Some(member)) => {
                member.unkept.insert(spec.job.clone());
                member.jobs.insert(spec.job.clone(), spec);
            }
            (ToService::JobEnded { job }, Some(member)) => {
                member.jobs.remove(&job);
                member.unkept.remove(&job);
                member.transfers.retain(|transfer, _| transfer.job != job);
                member.carried.retain(|transfer, _| transfer.job != job);
            }
            (ToService::Hosts { hosts }, Some(_)) if limits::check_hosts(&hosts).is_err() => {
                let why = limits::check_hosts(&hosts).err().unwrap_or_default();
                self.sessions.remove(&session);
                commands.push(Command::Say { session, message: FromService::Rejected { why } });
                commands.push(Command::Close { session });
            }
            (ToService::Hosts { hosts }, Some(member)) => member.known.hosts = hosts,
            (ToService::Transfers { changed, carried, ended }, Some(member)) => {
                for transfer in &ended {
                    member.transfers.remove(transfer);
                    member.carried.remove(transfer);
                }
                member.take(now, changed, carried);
            }
            // Something is missing that was said before.
            (ToService::Here { words, .. }, Some(_)) if words != own.words => {
                self.sessions.remove(&session);
                commands.push(Command::Close { session });
            }
            (ToService::Here { .. }, Some(_)) => {
                let version = own.version;
                if let Some(epoch) = self.epoch().filter(|_| self.acts(now)) {
                    commands.push(Command::Say { session, message: FromService::Here { epoch, version } });
                }
                return;
            }
            // It has not said who it is.
            (_, None) => {
                self.sessions.remove(&session);
                commands.push(Command::Close { session });
            }
        }
        if let Some(own) = &mut self.leading {
            own.stale = true;
        }
        self.limit(session, commands);
    }

    /// Ends the session of a member that says more than any cluster has.
    fn limit(&mut self, session: SessionId, commands: &mut Vec<Command>) {
        let Some(member) = self.sessions.get(&session).and_then(|own| own.member.as_ref()) else { return };
        if let Err(why) = limits::check(member) {
            self.sessions.remove(&session);
            commands.push(Command::Say { session, message: FromService::Rejected { why } });
            commands.push(Command::Close { session });
        }
    }

    /// # Errors
    /// One line that says what to do.
    fn may_join(
        &self,
        now: Time,
        session: SessionId,
        protocol: u32,
        cluster: &ClusterId,
        incarnation: u64,
    ) -> Result<(), String> {
        check_name("cluster", cluster)?;
        if self.sessions.len() > limits::MEMBERS_MAX {
            return Err(format!("a service has at most {} clusters", limits::MEMBERS_MAX));
        }
        if protocol != PROTOCOL {
            let older = if protocol < PROTOCOL { "cluster" } else { "service" };
            return Err(format!(
                "cluster {cluster} speaks version {protocol} and the service {PROTOCOL}: update the {older}'s Mission Control"
            ));
        }
        let taken = |(id, own): (&SessionId, &Session)| {
            own.member.as_ref().is_some_and(|member| {
                member.cluster == *cluster && member.known.incarnation != incarnation && *id != session
            }) && now.since(own.heard_at) < SILENT
        };
        if self.sessions.iter().any(taken) {
            return Err(format!(
                "another cluster has joined as {cluster}: give this one a name of its own with MISSION_CLUSTER=NAME, or \
                 wait {} s after the other has ended",
                SILENT.as_secs()
            ));
        }
        Ok(())
    }

    /// Ends the sessions of members that are not there any more; they come back with all that they have.
    fn leave_silent(&mut self, now: Time, commands: &mut Vec<Command>) {
        let silent = |(session, own): (&SessionId, &Session)| (now.since(own.heard_at) >= SILENT).then_some(*session);
        for session in self.sessions.iter().filter_map(silent).collect::<Vec<_>>() {
            self.sessions.remove(&session);
            commands.push(Command::Close { session });
            if let Some(own) = &mut self.leading {
                own.stale = true;
            }
        }
    }

    /// Those whose clusters and jobs are in the books by now.
    fn welcome(&mut self, now: Time, commands: &mut Vec<Command>) {
        let own = self.leading.as_mut().expect("it acts");
        let Some(service) = self.books.service else { return };
        for (session, session_own) in self.sessions.iter_mut().filter(|(_, own)| own.version == 0) {
            let Some(member) = &mut session_own.member else { continue };
            let has = |job: &JobId| self.books.jobs.contains_key(&(member.cluster.clone(), job.clone()));
            if self.books.clusters.get(&member.cluster) != Some(&member.known) || !member.jobs.keys().all(has) {
                continue;
            }
            let island = &own.islands[&member.cluster];
            let weights = own.said.get(island).filter(|_| own.settled);
            member.island = weights.map(|_| island.clone());
            session_own.version = 1;
            let state = State {
                policy: self.books.policy.as_ref().unwrap_or(&self.default_policy).clone(),
                weights: weights.map(|weights| (**weights).clone()),
                changes: changes_of(&self.books, &member.cluster),
                drained: self.books.drained.clone(),
            };
            let message = FromService::Welcome { service, epoch: own.epoch, version: 1, state };
            commands.push(Command::Say { session: *session, message });
        }
        if !own.settled {
            let here = |cluster: &ClusterId| {
                let of = |session: &Session| {
                    session.version > 0 && session.member.as_ref().is_some_and(|m| m.cluster == *cluster)
                };
                self.sessions.values().any(of)
            };
            own.settled = now.since(own.since) >= SETTLE || self.books.clusters.keys().all(here);
        }
    }

    fn weigh(&mut self, now: Time, commands: &mut Vec<Command>) {
        let own = self.leading.as_mut().expect("it acts");
        let due = if own.stale { WEIGHTS_APART } else { WEIGHTS_EVERY };
        if !own.settled || own.weighed_at.is_some_and(|at| now.since(at) < due) {
            return;
        }
        (own.weighed_at, own.stale) = (Some(now), false);
        let mut reported: BTreeMap<&ClusterId, Vec<Reported<'_>>> = BTreeMap::new();
        for member in self.sessions.values().filter_map(|session| session.member.as_ref()) {
            let Some(island) = own.islands.get(&member.cluster) else { continue };
            let of = member.transfers.values().map(|seen| {
                let since = now.since(seen.at).as_secs_f64();
                Reported { cluster: &member.cluster, view: &seen.view, since }
            });
            reported.entry(island).or_default().extend(of);
        }
        let mut said = BTreeMap::new();
        let mut updates: BTreeMap<ClusterId, Update> = BTreeMap::new();
        for (island, reported) in reported {
            let new = shares::weigh(&own.policy, &self.books, &reported);
            let old = own.said.get(island);
            // With nothing active there is nobody to tell: the last shares do no harm.
            let (all, update) = match old {
                Some(old) if new.parts.is_empty() || **old == new => (old.clone(), None),
                _ => {
                    let parts = old.and_then(|old| old.changes_to(&new)).map(Arc::new);
                    let all = Arc::new(new);
                    let whole = parts.is_none().then(|| all.clone());
                    (all, Some(Update { weights: whole, parts, ..Update::default() }))
                }
            };
            updates.extend(update.map(|update| (island.clone(), update)));
            said.insert(island.clone(), all);
        }
        own.said = said;
        for (session, session_own) in self.sessions.iter_mut().filter(|(_, own)| own.version > 0) {
            let Some(member) = &mut session_own.member else { continue };
            let Some(island) = own.islands.get(&member.cluster) else { continue };
            let update = if member.island.as_ref() == Some(island) {
                updates.get(island).cloned()
            } else {
                let all = own.said.get(island).filter(|all| !all.parts.is_empty());
                all.map(|all| Update { weights: Some(all.clone()), ..Update::default() })
            };
            if let Some(update) = update {
                member.island = Some(island.clone());
                session_own.say(*session, own.epoch, update, commands);
            }
        }
    }
}

impl Member {
    /// Takes transfers that have begun or changed, and how they are carried.
    fn take(&mut self, now: Time, changed: Vec<TransferView>, carried: Vec<(TransferId, Carried)>) {
        for view in changed.into_iter().filter(|view| limits::makes_sense(&view.transfer)) {
            let view = limits::sound(view);
            self.transfers.insert(view.transfer.clone(), Seen { view, at: now });
        }
        for (transfer, own) in carried {
            if self.transfers.contains_key(&transfer) {
                self.carried.insert(transfer, limits::sound_carried(own));
            }
        }
    }
}

impl Session {
    fn say(&mut self, session: SessionId, epoch: Epoch, update: Update, commands: &mut Vec<Command>) {
        self.version += 1;
        commands.push(Command::Say { session, message: FromService::Update { epoch, version: self.version, update } });
    }
}

/// Whether a job is one that could have been admitted: a member says what it likes.
fn makes_sense(spec: &JobSpec) -> bool {
    spec.check().is_ok() && check_priority(&spec.job, spec.priority).is_ok()
}

fn nonsense(spec: &JobSpec) -> FromService {
    let name: String = spec.job.chars().take(40).collect();
    FromService::Rejected {
        why: format!("job {name:?} makes no sense: use names and priorities as mission_control.job does"),
    }
}

fn changes_of(books: &Books, cluster: &ClusterId) -> BTreeMap<JobId, Change> {
    let own = books.changes.iter().filter(|((own, _), _)| own == cluster);
    own.map(|((_, job), change)| (job.clone(), change.clone())).collect()
}
