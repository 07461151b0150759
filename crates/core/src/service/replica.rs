//! One replica of the service: leader, or one that waits to become it.
//!
//! The state of clusters (jobs, hosts) comes from their last reports; the books come from the store. A leader writes
//! the difference, so a failed write is simply repeated, and a new leader only has to read the store. An operator's
//! change is written once, and answered when it is in the store.
//!
//! A leader acts only while its lease holds by its own clock, and once its books are as new as its epoch. All of its
//! messages have that epoch.

mod events;
mod history;
mod limits;
mod members;
mod rates;
mod status;
mod transfers;
mod weighing;
mod writing;

pub use events::{Asked, Command, Event, Leader, Refused, Role};
pub use history::{Happened, What};
pub use rates::RatesNow;
pub use status::{JobNow, Status};
pub use transfers::{Look, Page, Sort};

use self::history::History;
use self::members::changes_of;
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
/// How often a replica tries to get the leader's key while no replica has it.
pub const CAMPAIGN_EVERY: Duration = Duration::from_millis(250);
/// A new leader sends no weights before all clusters have joined, or this time is over: weights of half the clusters
/// would be wrong.
pub const SETTLE: Duration = Duration::from_millis(1500);
/// Interval of checks that depend only on time.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A cluster without a session is forgotten after this time, with its jobs.
pub const FORGET_AFTER: Duration = Duration::from_secs(60);
/// A member that is silent for this long is gone: its transfers are ignored, and another may take its name.
pub const SILENT: Duration = Duration::from_secs(15);
/// Write timeout: after this, the result of a write is unknown.
pub const WRITE_WITHIN: Duration = Duration::from_secs(3);
/// After this, a write will not be answered any more: each attempt has a timeout.
const WRITE_FORGOTTEN: Duration = Duration::from_secs(60);
/// Wait after a failed write.
pub const WRITE_AGAIN: Duration = Duration::from_millis(250);
/// Entries of one write: etcd takes 128 in a transaction, unless it is started with another `--max-txn-ops`.
pub const WRITE_MAX: usize = 100;
/// Bytes of one write: etcd takes 1.5 MiB in a request (`--max-request-bytes`), which has them in base 64.
pub const WRITE_BYTES: usize = 512 << 10;
/// Shortest interval between comparisons of members' states with the books: this time, plus some for each member, since
/// all are compared (10,000 take about 10 ms: docs/measurements/service.md).
const RECONCILE_APART: Duration = Duration::from_millis(5);
const RECONCILE_MEMBER: Duration = Duration::from_micros(10);

pub struct Replica {
    own: Leader,
    draw: ServiceId,
    books: Books,
    loaded: bool,
    /// The replica that has the leader's key.
    leader: Option<Leader>,
    leading: Option<Leading>,
    store_problem: Option<String>,
    /// Why the last write failed.
    write_problem: Option<String>,
    sessions: BTreeMap<SessionId, Session>,
    writes: BTreeMap<WriteId, Write>,
    next_write: WriteId,
    /// Policy until an operator has chosen one.
    default_policy: String,
    tried_at: Option<Time>,
    /// Since when it tries to get the leader's key.
    campaigns: Option<Time>,
    /// There may be something to write, or to send to waiting members.
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
    /// The weights that were sent last, by island.
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
    /// Version of the last message; 0: no welcome yet.
    version: u64,
    /// Messages received, from the hello on.
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
    /// Jobs whose confirmation (`Kept`) is outstanding.
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
    /// The caller was answered that the result is unknown. The store may still apply the write, so these keys are not
    /// written again yet.
    given_up: bool,
}

impl Replica {
    /// `draw`: a random number that is unique, used if the store is new.
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
                // Changes without entries mostly only confirm a write.
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
            // A write of an earlier leadership is no evidence for this one.
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
            // Most messages of members are heartbeats.
            let said = RECONCILE_APART + RECONCILE_MEMBER * self.sessions.len() as u32;
            let apart = if self.unwritten { said } else { LOOK_EVERY.max(said) };
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

    /// Whether it may act as a leader now.
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
        // Stored policies were checked when they were written; this version may not know a newer version's policy.
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

    /// Informs its members, which then look for the leader.
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
        let why = "this replica no longer leads, and does not know whether the change was stored: check, then retry";
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
}
