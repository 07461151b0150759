//! Hosts, their processes, the messages between them, and everything that goes wrong.

mod arbiters;
mod processes;

use crate::checks::{Ledger, Ranges};
use mission_core::flight::Environment;
use mission_core::host::fair::{QueueShare, Shares};
use mission_core::host::fetches::{Fault, FetchError, FetchId, Outcome, Piece, Run, SourceId};
use mission_core::host::process::{self, Process};
use mission_core::host::slots::{self, SELF, Slots};
use mission_core::host::{ClientId, FromArbiter, GroupId, HEARTBEAT, MemberId, Ticket, ToArbiter};
use mission_core::mission::{self, MissionController};
use mission_core::policy::POLICIES;
use mission_core::random::SplitMix;
use mission_core::shares::{FlowsPerHost, Share};
use mission_core::standing::Standing;
use mission_core::types::{JobSpec, TransferId};
use mission_core::units::Time;
use mission_core::versions::{Inbox, Outbox, Received};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

type ProcessId = usize;
type ArbiterId = usize;
/// A connection between a process and an arbiter.
type LinkId = u64;

const CHUNK: u64 = 256 << 10;
/// Time in which all requested data has to arrive, once there are no more faults.
const LONGEST: Duration = Duration::from_secs(400);
const STALL: Duration = Duration::from_secs(5);
const CONNECT: Duration = Duration::from_secs(3);
const HANDSHAKE: Duration = Duration::from_secs(1);
const REPORT: Duration = Duration::from_millis(250);

#[derive(Clone, Debug)]
enum Happens {
    ToArbiter { arbiter: ArbiterId, client: ClientId, message: ToArbiter },
    ToProcess { process: ProcessId, link: LinkId, message: FromArbiter },
    LinkLost { process: ProcessId, link: LinkId },
    ClientLeft { arbiter: ArbiterId, client: ClientId },
    Elect { process: ProcessId, waited: bool },
    Tick { process: ProcessId },
    Wake { process: ProcessId },
    Watch { process: ProcessId },
    ArbiterTick { arbiter: ArbiterId, count: u32 },
    Streaming { process: ProcessId, run: Run },
    RunEnds { process: ProcessId, run: Run, outcome: Outcome, stalled: bool },
    Ask { process: ProcessId },
    Abandon { process: ProcessId, fetch: FetchId, error: FetchError },
    Stop { process: ProcessId },
    Resume { process: ProcessId },
    Leave { process: ProcessId },
    Break { process: ProcessId },
    Report,
    SharesArrive { process: ProcessId, version: u64, shares: Shares },
    MissedArrives { process: ProcessId, missed: Vec<(u64, Shares)> },
    Priority,
    Budget,
    Policy,
}

struct Entry {
    at: Time,
    sequence: u64,
    what: Happens,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

struct Worker {
    host: usize,
    process: Process,
    alive: bool,
    stopped: bool,
    /// What happens to it while it is stopped.
    deferred: Vec<Happens>,
    link: Option<Link>,
    wake: Option<Time>,
    fetches: BTreeMap<FetchId, Fetch>,
    /// Ranges under way, and what follows each on its connection.
    running: BTreeMap<Ticket, Under>,
    shares: Shares,
    inbox: Inbox,
    asked: BTreeMap<TransferId, (u64, u64)>,
}

#[derive(Clone, Copy)]
struct Link {
    id: LinkId,
    arbiter: ArbiterId,
    client: ClientId,
    /// Messages are not overtaken: each comes after the last one in its direction.
    last_up: Time,
    last_down: Time,
}

struct Under {
    run: Run,
    /// An attempt to connect, without a slot.
    connects: bool,
    began: Time,
    trickles: bool,
    cut: bool,
    next: Option<Run>,
}

struct Fetch {
    transfer: TransferId,
    pieces: Vec<(u64, Vec<ProcessId>)>,
    arrived: Ranges,
    abandoned: bool,
}

struct Arbiter {
    host: usize,
    owner: ProcessId,
    generation: u64,
    slots: Slots,
    ledger: Ledger,
    clients: BTreeMap<ClientId, (ProcessId, LinkId)>,
    next_client: ClientId,
}

pub struct World {
    random: SplitMix,
    now: Time,
    queue: BinaryHeap<Entry>,
    sequence: u64,
    workers: Vec<Worker>,
    arbiters: Vec<Option<Arbiter>>,
    generations: Vec<u64>,
    mission: MissionController,
    outbox: Outbox<ProcessId, Shares>,
    shares: Shares,
    flows: FlowsPerHost,
    jobs: Vec<f64>,
    calm_at: Time,
    next_fetch: FetchId,
    next_link: LinkId,
    asks_left: u32,
    /// Fetches that are not over.
    open: usize,
    steps: u64,
    finished: u64,
    pub grants: u64,
}

fn seconds(seconds: f64) -> Time {
    Time::from_secs_f64(seconds)
}

fn job_name(job: usize) -> String {
    format!("job{job}")
}

fn group_of(job: usize) -> GroupId {
    job as GroupId + 1
}

/// Of the transfer that begins at one of a job's two stages.
fn member_of(group: GroupId, stage: u64) -> MemberId {
    group * 100 + stage
}

impl World {
    /// A cluster; the seed decides the number of hosts.
    pub fn new(seed: u64) -> World {
        World::of(seed, None)
    }

    pub fn of(seed: u64, hosts: Option<usize>) -> World {
        let mut random = SplitMix(seed);
        let policy = POLICIES[random.next() as usize % POLICIES.len()].name;
        let budget = 1 + random.next() as u32 % 12;
        let flows = if random.next().is_multiple_of(10) { FlowsPerHost::Auto } else { FlowsPerHost::Fixed(budget) };
        let mission = MissionController::new(policy, flows, Environment::default()).unwrap();
        // Mostly small, so that many are tried; some with as many hosts as a rack.
        let drawn = if random.next().is_multiple_of(200) { 50 } else { 3 + random.next() as usize % 4 };
        let hosts = hosts.unwrap_or(drawn);
        let jobs = (0..1 + random.next() % 4).map(|_| 0.5 + random.unit() * 8.0).collect();
        let mut world = World {
            calm_at: seconds(1.0 + random.unit() * 6.0),
            asks_left: 2 * hosts as u32 + random.next() as u32 % 20,
            random,
            now: Time(0),
            queue: BinaryHeap::new(),
            sequence: 0,
            workers: Vec::new(),
            arbiters: Vec::new(),
            generations: vec![0; hosts],
            mission,
            outbox: Outbox::default(),
            shares: Shares::default(),
            flows,
            jobs,
            next_fetch: 1,
            next_link: 1,
            open: 0,
            steps: 0,
            finished: 0,
            grants: 0,
        };
        for host in 0..hosts {
            for _ in 0..1 + world.chance() as usize * 3 / 2 {
                world.start(host);
            }
        }
        for job in 0..world.jobs.len() {
            world.arrive(job);
        }
        world.after(REPORT, Happens::Report);
        for _ in 0..world.asks_left {
            let at = world.until_calm();
            let process = world.any_process();
            world.at(at, Happens::Ask { process });
        }
        world.plan_harm();
        world
    }

    /// Runs to its end; gives the number of steps.
    pub fn run(mut self) -> u64 {
        let end = self.calm_at + LONGEST;
        let mut idle_since = None;
        while let Some(entry) = self.queue.pop() {
            self.now = entry.at;
            assert!(self.now < end, "{} fetches never end: {}", self.open, self.describe());
            self.steps += 1;
            assert!(
                self.steps < 3_000_000 + 1000 * self.generations.len() as u64,
                "it goes round in circles at {:?}: {:?}",
                self.now,
                entry.what
            );
            self.happen(entry.what);
            let quiet = self.asks_left == 0 && self.open == 0 && self.now > self.calm_at;
            let since = *idle_since.get_or_insert(self.now);
            if !quiet {
                idle_since = None;
            } else if self.now.since(since) >= 4 * HEARTBEAT {
                break;
            }
        }
        self.nothing_is_left();
        self.steps
    }

    fn describe(&self) -> String {
        let mut text = String::new();
        for (id, worker) in self.workers.iter().enumerate().filter(|(_, worker)| !worker.fetches.is_empty()) {
            text += &format!(
                "process {id} of host {} with {} fetches, {} running, linked: {}; ",
                worker.host,
                worker.fetches.len(),
                worker.running.len(),
                worker.link.is_some()
            );
        }
        text
    }

    fn nothing_is_left(&mut self) {
        for (id, worker) in self.workers.iter().enumerate().filter(|(_, worker)| worker.alive) {
            assert!(worker.process.is_idle(), "process {id} is not idle");
            assert_eq!(worker.process.spare(), 0, "process {id} keeps slots");
        }
        for arbiter in self.arbiters.iter().flatten() {
            assert_eq!((arbiter.slots.in_use(), arbiter.slots.waiting()), (0, 0), "slots or requests are left");
            assert!(arbiter.ledger.is_empty());
            self.grants += arbiter.ledger.grants;
        }
    }

    fn chance(&mut self) -> f64 {
        self.random.unit()
    }

    fn any_process(&mut self) -> ProcessId {
        self.random.next() as usize % self.workers.len()
    }

    fn until_calm(&mut self) -> Time {
        seconds(self.chance() * self.calm_at.as_secs_f64())
    }

    fn at(&mut self, at: Time, what: Happens) {
        self.sequence += 1;
        self.queue.push(Entry { at: at.max(self.now), sequence: self.sequence, what });
    }

    fn after(&mut self, wait: Duration, what: Happens) {
        self.at(self.now + wait, what);
    }

    fn plan_harm(&mut self) {
        for _ in 0..self.random.next() % 6 {
            let (at, process) = (self.until_calm(), self.any_process());
            let what = match self.random.next() % 7 {
                0 => Happens::Leave { process },
                1 | 2 => Happens::Break { process },
                3 => Happens::Priority,
                4 => Happens::Budget,
                5 => Happens::Policy,
                _ => Happens::Stop { process },
            };
            self.at(at, what);
        }
    }

    fn start(&mut self, host: usize) {
        let id = self.workers.len();
        self.workers.push(Worker {
            host,
            process: Process::default(),
            alive: true,
            stopped: false,
            deferred: Vec::new(),
            link: None,
            wake: None,
            fetches: BTreeMap::new(),
            running: BTreeMap::new(),
            shares: Shares::default(),
            inbox: Inbox::default(),
            asked: BTreeMap::new(),
        });
        for job in 0..self.jobs.len() {
            self.process(id, process::Event::Planned { group: group_of(job), legs: 2 });
        }
        self.at(self.now, Happens::Elect { process: id, waited: false });
        self.after(HEARTBEAT, Happens::Tick { process: id });
        self.after(Duration::from_secs(1), Happens::Watch { process: id });
        self.outbox.send(&id, self.shares.clone());
        self.say_again(id);
    }

    fn mission(&mut self, event: mission::Event) {
        let mut commands = Vec::new();
        self.mission.handle(self.now, event, &mut commands);
        for command in commands {
            if let mission::Command::Shares(Standing { shares, level, .. }) = command {
                let number = |name: &str, what: &str| name.trim_start_matches(what).parse::<usize>().unwrap();
                let share = |share: &Share| {
                    let group = group_of(number(&share.job, "job"));
                    let member = |(from, _): &(Arc<str>, Arc<str>)| member_of(group, number(from, "from") as u64);
                    QueueShare { queue: share.stages.as_ref().map_or(group, member), weight: share.weight }
                };
                let queues = shares.iter().map(share).collect();
                self.shares = Shares { level, queues };
                self.tell_all();
            }
        }
    }

    fn arrive(&mut self, job: usize) {
        let spec = JobSpec { priority: self.jobs[job], ..JobSpec::named(job_name(job).into()) };
        self.mission(mission::Event::JobArrived { spec, admitted: false });
    }

    /// Sends the shares to every process; some messages are lost.
    fn tell_all(&mut self) {
        for process in 0..self.workers.len() {
            if !self.workers[process].alive {
                continue;
            }
            let shares = self.shares.clone();
            let version = self.outbox.send(&process, shares.clone());
            if self.chance() < 0.1 && self.now < self.calm_at {
                continue;
            }
            let wait = Duration::from_micros(self.random.next() % 50_000);
            self.after(wait, Happens::SharesArrive { process, version, shares });
        }
    }

    /// A process asks again for what it missed.
    fn say_again(&mut self, process: ProcessId) {
        let seen = self.workers[process].inbox.last();
        let missed = self.outbox.after(&process, seen).map(|(version, shares)| (version, shares.clone())).collect();
        let wait = Duration::from_micros(self.random.next() % 20_000);
        self.after(wait, Happens::MissedArrives { process, missed });
    }

    fn take_shares(&mut self, id: ProcessId, shares: Shares) {
        self.workers[id].shares = shares.clone();
        let own = self.workers[id].link.filter(|link| link.client == SELF);
        if let Some(link) = own
            && self.arbiters[link.arbiter].is_some()
        {
            let event = slots::Event::Shares { flows_per_host: self.flows, shares };
            self.arbiter(link.arbiter, event);
        }
    }

    /// The process whose CPU this needs.
    fn runs_on(&self, what: &Happens) -> Option<ProcessId> {
        match what {
            Happens::ToArbiter { arbiter, .. }
            | Happens::ClientLeft { arbiter, .. }
            | Happens::ArbiterTick { arbiter, .. } => self.arbiters[*arbiter].as_ref().map(|arbiter| arbiter.owner),
            Happens::ToProcess { process, .. }
            | Happens::LinkLost { process, .. }
            | Happens::Elect { process, .. }
            | Happens::Tick { process }
            | Happens::Wake { process }
            | Happens::Watch { process }
            | Happens::Streaming { process, .. }
            | Happens::RunEnds { process, .. }
            | Happens::Ask { process }
            | Happens::Abandon { process, .. }
            | Happens::SharesArrive { process, .. }
            | Happens::MissedArrives { process, .. } => Some(*process),
            _ => None,
        }
    }

    fn happen(&mut self, what: Happens) {
        if let Some(process) = self.runs_on(&what) {
            if !self.workers[process].alive {
                if let Happens::Ask { .. } = what {
                    self.asks_left -= 1;
                }
                return;
            }
            if self.workers[process].stopped {
                self.workers[process].deferred.push(what);
                return;
            }
        }
        match what {
            Happens::ToArbiter { arbiter, client, message } => {
                self.arbiter(arbiter, slots::Event::Message { client, message });
            }
            Happens::ToProcess { process, link, message } => {
                if self.workers[process].link.is_some_and(|own| own.id == link) {
                    self.process(process, process::Event::Arbiter(message));
                }
            }
            Happens::LinkLost { process, link } => {
                if self.workers[process].link.is_some_and(|own| own.id == link) {
                    self.workers[process].link = None;
                    self.process(process, process::Event::Lost);
                    self.after(Duration::from_millis(1), Happens::Elect { process, waited: false });
                }
            }
            Happens::ClientLeft { arbiter, client } => {
                let known = self.arbiters[arbiter].as_mut().is_some_and(|own| own.clients.remove(&client).is_some());
                if known {
                    self.arbiter(arbiter, slots::Event::Left { client });
                }
            }
            Happens::Elect { process, waited } => self.elect(process, waited),
            Happens::Tick { process } => {
                self.process(process, process::Event::Tick);
                self.after(HEARTBEAT, Happens::Tick { process });
            }
            Happens::Wake { process } => {
                self.workers[process].wake = None;
                self.process(process, process::Event::Tick);
            }
            Happens::Watch { process } => {
                self.watch(process);
                self.after(Duration::from_secs(1), Happens::Watch { process });
            }
            Happens::ArbiterTick { arbiter, count } => {
                if self.arbiters[arbiter].is_none() || count % 4 == 3 && self.is_replaced(arbiter) {
                    return;
                }
                self.arbiter(arbiter, slots::Event::Tick);
                self.after(HEARTBEAT, Happens::ArbiterTick { arbiter, count: count + 1 });
            }
            Happens::Streaming { process, run } => {
                let under = self.workers[process].running.get(&run.ticket);
                if under.is_some_and(|under| under.run == run && under.next.is_none()) {
                    self.process(process, process::Event::Streaming { run });
                }
            }
            Happens::RunEnds { process, run, outcome, stalled } => self.run_ends(process, run, outcome, stalled),
            Happens::Ask { process } => self.ask(process),
            Happens::Abandon { process, fetch, error } => {
                if let Some(own) = self.workers[process].fetches.get_mut(&fetch) {
                    own.abandoned = true;
                    self.process(process, process::Event::Abandon { fetch, error });
                }
            }
            Happens::Stop { process } => {
                if self.workers[process].alive && !self.workers[process].stopped {
                    self.workers[process].stopped = true;
                    let most = self.calm_at.since(self.now).as_secs_f64().max(0.1);
                    let long = if self.chance() < 0.5 { most } else { most.min(1.0) };
                    let wait = Duration::from_secs_f64(self.chance() * long);
                    self.after(wait, Happens::Resume { process });
                }
            }
            Happens::Resume { process } => {
                let worker = &mut self.workers[process];
                worker.stopped = false;
                for what in std::mem::take(&mut worker.deferred) {
                    self.at(self.now, what);
                }
            }
            Happens::Leave { process } => self.leave(process),
            Happens::Break { process } => {
                if let Some(link) = self.workers[process].link.filter(|link| link.client != SELF) {
                    self.at(self.now, Happens::LinkLost { process, link: link.id });
                    let (arbiter, client) = (link.arbiter, link.client);
                    self.after(Duration::from_micros(50), Happens::ClientLeft { arbiter, client });
                }
            }
            Happens::Report => {
                for id in 0..self.workers.len() {
                    if !self.workers[id].alive || self.workers[id].stopped {
                        continue;
                    }
                    self.outbox.seen(&id, self.workers[id].inbox.last());
                    for (transfer, (asked_bytes, served_bytes)) in self.workers[id].asked.clone() {
                        let (worker, moved) = (format!("w{id}").into(), false);
                        // A quiet record is forgotten at some time; its bytes stay counted.
                        let over = asked_bytes == served_bytes && self.chance() < 0.2;
                        if over {
                            self.workers[id].asked.remove(&transfer);
                        }
                        self.mission(mission::Event::Progress {
                            worker,
                            transfer,
                            asked_bytes,
                            served_bytes,
                            moved,
                            waits_for: BTreeMap::new(),
                            over,
                        });
                    }
                }
                self.mission(mission::Event::Tick);
                self.after(REPORT, Happens::Report);
            }
            Happens::SharesArrive { process, version, shares } => match self.workers[process].inbox.receive(version) {
                Received::InOrder => self.take_shares(process, shares),
                Received::Old => {}
                Received::Gap => self.say_again(process),
            },
            Happens::MissedArrives { process, missed } => {
                for (version, shares) in missed {
                    if self.workers[process].inbox.receive(version) == Received::InOrder {
                        self.take_shares(process, shares);
                    }
                }
            }
            Happens::Priority => {
                let job = self.random.next() as usize % self.jobs.len();
                self.jobs[job] = 0.5 + self.chance() * 8.0;
                self.arrive(job);
            }
            Happens::Policy => {
                let policy = POLICIES[self.random.next() as usize % POLICIES.len()].name.to_owned();
                self.mission(mission::Event::Policy { policy });
            }
            Happens::Budget => {
                if self.flows != FlowsPerHost::Auto {
                    self.flows = FlowsPerHost::Fixed(1 + self.random.next() as u32 % 12);
                    self.tell_all();
                }
            }
        }
    }
}
