//! Replicas, clusters and a store in virtual time, and what goes between them.

mod checks;
mod faults;
mod store;

use mission_core::policy::{JobView, TransferView};
use mission_core::random::SplitMix;
use mission_core::service::{Asked, Entry, Epoch, Follower, FromService, Leader, Replica, Role, ToService, Weighed};
use mission_core::service::{Command, Event, FollowerCommand, FollowerEvent};
use mission_core::types::{JobSpec, Pattern, TransferId};
use mission_core::units::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

const REPLICAS: usize = 3;
const CLUSTERS: usize = 3;
const LEASE: Duration = Duration::from_secs(2);
const STEP: Duration = Duration::from_millis(20);
/// Of faults; then all is well for the rest.
const FAULTS: Duration = Duration::from_secs(60);
const CALM: Duration = Duration::from_secs(40);

/// Who can be cut off from whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    Store,
    Replica(usize),
    Cluster(usize),
}

/// What is on its way.
enum Mail {
    ToStore { from: usize, life: u64, sent: Time, request: Request },
    FromStore { to: usize, life: u64, event: Event },
    ToReplica { to: usize, life: u64, session: u64, event: SessionEvent },
    ToCluster { to: usize, session: u64, event: FollowerEvent },
}

enum Request {
    Load,
    Campaign,
    Renew,
    Resign,
    Write { write: u64, epoch: Epoch, entries: Vec<Entry> },
}

enum SessionEvent {
    Opened,
    Said(ToService),
    Closed,
}

#[derive(Default)]
struct Store {
    revision: u64,
    entries: BTreeMap<String, String>,
    /// Of whom, epoch, and until when.
    key: Option<(usize, u64, Epoch, Time)>,
    /// Who is sent changes.
    watches: BTreeSet<(usize, u64)>,
}

struct OneReplica {
    machine: Replica,
    /// Counts its starts: mail of an earlier one is lost.
    life: u64,
    stopped_until: Option<Time>,
    /// What came while it was stopped.
    waiting: Vec<Event>,
    dead_until: Option<Time>,
}

struct OneCluster {
    machine: Follower,
    session: Option<(u64, usize)>,
    highest: Epoch,
    guided: Option<Weighed>,
    policy: Option<String>,
    /// Jobs that come and go beside the one that moves bytes.
    more: BTreeSet<u64>,
}

pub struct World {
    now: Time,
    dice: SplitMix,
    store: Store,
    replicas: Vec<OneReplica>,
    clusters: Vec<OneCluster>,
    mail: Vec<(Time, u64, Mail)>,
    sent: u64,
    /// When the last mail between two arrives.
    last: BTreeMap<(Node, Node), Time>,
    cut: BTreeMap<(Node, Node), Time>,
    next_session: u64,
    /// Answered with success.
    pub drained: BTreeSet<String>,
    asked: BTreeMap<u64, String>,
    next_ask: u64,
    pub elections: u64,
}

fn named(replica: usize) -> Leader {
    Leader { address: address(replica), tokens: "".into() }
}

fn address(replica: usize) -> Arc<str> {
    format!("r{replica}").into()
}

fn name(cluster: usize) -> Arc<str> {
    format!("c{cluster}").into()
}

fn view(cluster: usize, bytes: u64) -> TransferView {
    let job: Arc<str> = format!("job-{cluster}").into();
    TransferView {
        transfer: TransferId { job: job.clone(), from: "map".into(), to: "reduce".into() },
        job: JobView {
            job,
            user: None,
            class: None,
            arrival: 0,
            priority: (cluster + 1) as f64,
            deadline_secs: None,
            age_secs: 1.0,
        },
        arrival: 0,
        pattern: Pattern::Shuffle,
        evidence: "said so".into(),
        machines: 2,
        asked_bytes: bytes,
        served_bytes: bytes / 2,
        to_receive: BTreeMap::new(),
        to_send: BTreeMap::new(),
        bytes_per_sec: 1.0,
        age_secs: 1.0,
    }
}

impl World {
    pub fn new(seed: u64) -> World {
        let addresses: Vec<Arc<str>> = (0..REPLICAS).map(address).collect();
        let replica = |index| OneReplica {
            machine: Replica::new(named(index), "priority".into(), 1000 + index as u64),
            life: 0,
            stopped_until: None,
            waiting: Vec::new(),
            dead_until: None,
        };
        let cluster = |index| {
            let mut own = addresses.clone();
            own.rotate_left(index % REPLICAS);
            OneCluster {
                machine: Follower::new(Time(0), name(index), 77 + index as u64, own),
                session: None,
                highest: 0,
                guided: None,
                policy: None,
                more: BTreeSet::new(),
            }
        };
        World {
            now: Time(0),
            dice: SplitMix(seed),
            store: Store::default(),
            replicas: (0..REPLICAS).map(replica).collect(),
            clusters: (0..CLUSTERS).map(cluster).collect(),
            mail: Vec::new(),
            sent: 0,
            last: BTreeMap::new(),
            cut: BTreeMap::new(),
            next_session: 1,
            drained: BTreeSet::new(),
            asked: BTreeMap::new(),
            next_ask: 1,
            elections: 0,
        }
    }

    pub fn run(&mut self) {
        for cluster in 0..CLUSTERS {
            // The first two share a host, the third has one of its own.
            let hosts = if cluster < 2 { ["shared"] } else { ["apart"] };
            let spec = JobSpec { priority: (cluster + 1) as f64, ..JobSpec::named(format!("job-{cluster}").into()) };
            self.cluster(cluster, FollowerEvent::Hosts { hosts: hosts.map(Into::into).into() });
            self.cluster(cluster, FollowerEvent::Job { spec });
        }
        let end = Time(0) + FAULTS;
        while self.now < end {
            self.fault();
            self.step();
        }
        self.cut.clear();
        self.replicas.iter_mut().for_each(|own| {
            own.dead_until = own.dead_until.map(|_| end);
            own.stopped_until = own.stopped_until.map(|_| end);
        });
        while self.now < end + CALM {
            self.step();
        }
        self.check_calm();
    }

    fn chance(&mut self, of: f64) -> bool {
        self.dice.unit() < of
    }

    fn pick(&mut self, of: usize) -> usize {
        (self.dice.next() % of as u64) as usize
    }

    /// Mail between two that are cut off from each other is lost, as after a connection that times out.
    fn post(&mut self, from: Node, to: Node, mail: Mail) {
        if self.is_cut(from, to) {
            return;
        }
        let delay = Duration::from_micros(200 + self.dice.next() % 20_000);
        self.sent += 1;
        // In order between the same two.
        let last = self.last.entry((from, to)).or_default();
        *last = (self.now + delay).max(*last);
        self.mail.push((*last, self.sent, mail));
    }

    fn step(&mut self) {
        self.now = self.now + STEP;
        let now = self.now;
        if self.store.key.is_some_and(|(.., until)| now >= until) {
            self.store.key = None;
            self.changed(Vec::new(), Some(None));
        }
        // In the end the last messages have reached every receiver.
        let ends = now + Duration::from_secs(2) >= Time(0) + FAULTS + CALM;
        if self.chance(0.02) && !ends {
            self.ask();
        }
        for cluster in 0..CLUSTERS {
            let bytes = now.0 / 1_000_000;
            self.cluster(cluster, FollowerEvent::Transfers { transfers: vec![view(cluster, bytes)] });
            self.cluster(cluster, FollowerEvent::Tick);
            if self.chance(0.01) && !ends {
                self.jobs(cluster);
            }
        }
        for replica in 0..REPLICAS {
            let own = &mut self.replicas[replica];
            if own.dead_until.is_some_and(|until| now >= until) {
                own.dead_until = None;
            }
            if own.stopped_until.is_some_and(|until| now >= until) {
                own.stopped_until = None;
                for event in std::mem::take(&mut self.replicas[replica].waiting) {
                    self.replica(replica, event);
                }
            }
            let own = &self.replicas[replica];
            if own.dead_until.is_none() && own.stopped_until.is_none() {
                let watches = self.store.watches.contains(&(replica, own.life));
                if !watches && self.chance(0.2) {
                    let life = self.replicas[replica].life;
                    let mail = Mail::ToStore { from: replica, life, sent: now, request: Request::Load };
                    self.post(Node::Replica(replica), Node::Store, mail);
                }
                self.replica(replica, Event::Tick);
            }
        }
        self.mail.sort_by_key(|(at, number, _)| (*at, *number));
        while self.mail.first().is_some_and(|(at, ..)| *at <= now) {
            let (_, _, mail) = self.mail.remove(0);
            self.deliver(mail);
        }
    }

    /// A job comes or goes.
    fn jobs(&mut self, cluster: usize) {
        let job = self.dice.next() % 5;
        let more = &mut self.clusters[cluster].more;
        let name: Arc<str> = format!("more-{job}").into();
        let event = if more.remove(&job) {
            FollowerEvent::JobEnded { job: name }
        } else {
            more.insert(job);
            FollowerEvent::Job { spec: JobSpec::named(name) }
        };
        self.cluster(cluster, event);
    }

    fn ask(&mut self) {
        let Some(leader) = self.replicas.iter().position(|own| own.machine.role() == Role::Leader) else { return };
        let ask = self.next_ask;
        self.next_ask += 1;
        let host = format!("host-{ask}");
        self.asked.insert(ask, host.clone());
        self.replica(leader, Event::Asks { ask, asked: Asked::Drain { host: host.into() } });
    }

    fn deliver(&mut self, mail: Mail) {
        match mail {
            Mail::ToStore { from, life, sent, request } => self.stored(from, life, sent, request),
            Mail::FromStore { to, life, event } => {
                if self.replicas[to].life == life {
                    self.replica(to, event);
                }
            }
            Mail::ToReplica { to, life, session, event } => {
                if self.replicas[to].life != life || self.replicas[to].dead_until.is_some() {
                    return;
                }
                let event = match event {
                    SessionEvent::Opened => Event::Opened { session },
                    SessionEvent::Said(message) => Event::Said { session, message },
                    SessionEvent::Closed => Event::Closed { session },
                };
                self.replica(to, event);
            }
            Mail::ToCluster { to, session, event } => {
                if self.clusters[to].session.is_some_and(|(own, _)| own == session) {
                    if matches!(event, FollowerEvent::Disconnected { .. }) {
                        self.clusters[to].session = None;
                    }
                    self.cluster(to, event);
                }
            }
        }
    }

    fn replica(&mut self, replica: usize, event: Event) {
        let own = &mut self.replicas[replica];
        if own.dead_until.is_some() {
            return;
        }
        if own.stopped_until.is_some() {
            own.waiting.push(event);
            return;
        }
        let (mut commands, life) = (Vec::new(), own.life);
        own.machine.handle(self.now, event, &mut commands);
        for command in commands {
            let ask = |request| Mail::ToStore { from: replica, life, sent: self.now, request };
            match command {
                Command::Campaign => self.post(Node::Replica(replica), Node::Store, ask(Request::Campaign)),
                Command::Resign => self.post(Node::Replica(replica), Node::Store, ask(Request::Resign)),
                Command::Renew => self.post(Node::Replica(replica), Node::Store, ask(Request::Renew)),
                Command::Write { write, epoch, entries } => {
                    if self.is_cut(Node::Replica(replica), Node::Store) {
                        self.replica(replica, Event::Unwritten { write, why: "the store does not answer".into() });
                    } else {
                        self.post(Node::Replica(replica), Node::Store, ask(Request::Write { write, epoch, entries }));
                    }
                }
                Command::Say { session, message } => {
                    self.check_leads(replica, &message);
                    let to = self.clusters.iter().position(|own| own.session.is_some_and(|(own, _)| own == session));
                    if let Some(to) = to {
                        let event = FollowerEvent::Heard { message };
                        self.post(Node::Replica(replica), Node::Cluster(to), Mail::ToCluster { to, session, event });
                    }
                }
                Command::Close { session } => {
                    let to = self.clusters.iter().position(|own| own.session.is_some_and(|(own, _)| own == session));
                    if let Some(to) = to {
                        let event = FollowerEvent::Disconnected { why: "closed".into() };
                        self.post(Node::Replica(replica), Node::Cluster(to), Mail::ToCluster { to, session, event });
                    }
                }
                Command::Answer { ask, result } => {
                    if let (Ok(()), Some(host)) = (result, self.asked.remove(&ask)) {
                        self.drained.insert(host);
                    }
                }
            }
        }
    }

    fn cluster(&mut self, cluster: usize, event: FollowerEvent) {
        let heard = match &event {
            FollowerEvent::Heard {
                message: FromService::Welcome { epoch, .. } | FromService::Update { epoch, .. },
            } => Some(*epoch),
            _ => None,
        };
        let mut commands = Vec::new();
        self.clusters[cluster].machine.handle(self.now, event, &mut commands);
        for command in commands {
            match command {
                FollowerCommand::Connect { address: to } => self.connect(cluster, &to),
                FollowerCommand::Disconnect => self.disconnect(cluster),
                FollowerCommand::Send { message } => {
                    if let Some((session, to)) = self.clusters[cluster].session {
                        let life = self.replicas[to].life;
                        let mail = Mail::ToReplica { to, life, session, event: SessionEvent::Said(message) };
                        self.post(Node::Cluster(cluster), Node::Replica(to), mail);
                    }
                }
                FollowerCommand::Guide { weights } => {
                    let epoch = heard.expect("only a leader's word guides");
                    let own = &mut self.clusters[cluster];
                    assert!(epoch >= own.highest, "cluster {cluster} obeys epoch {epoch} after {}", own.highest);
                    (own.highest, own.guided) = (epoch, Some(weights));
                }
                FollowerCommand::Alone { .. } => self.clusters[cluster].guided = None,
                FollowerCommand::Policy { policy } => self.clusters[cluster].policy = Some(policy),
                FollowerCommand::Change { .. } | FollowerCommand::Drained { .. } | FollowerCommand::Kept { .. } => {}
            }
        }
    }

    fn connect(&mut self, cluster: usize, to: &str) {
        self.disconnect(cluster);
        let replica = (0..REPLICAS).find(|replica| *address(*replica) == *to).expect("one of them");
        let (from, to) = (Node::Cluster(cluster), Node::Replica(replica));
        if self.is_cut(from, to) {
            return;
        }
        if self.replicas[replica].dead_until.is_some() {
            self.cluster(cluster, FollowerEvent::Disconnected { why: "refused".into() });
            return;
        }
        let session = self.next_session;
        self.next_session += 1;
        self.clusters[cluster].session = Some((session, replica));
        let life = self.replicas[replica].life;
        self.post(from, to, Mail::ToReplica { to: replica, life, session, event: SessionEvent::Opened });
        self.post(to, from, Mail::ToCluster { to: cluster, session, event: FollowerEvent::Connected });
    }

    fn disconnect(&mut self, cluster: usize) {
        if let Some((session, to)) = self.clusters[cluster].session.take() {
            let life = self.replicas[to].life;
            let mail = Mail::ToReplica { to, life, session, event: SessionEvent::Closed };
            self.post(Node::Cluster(cluster), Node::Replica(to), mail);
        }
    }
}
