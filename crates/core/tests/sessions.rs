//! Hosts with several processes and one session each, in virtual time: speakers die, hang and return, connections
//! break. In the end every process has the shares, and every total is right; and a host sends each report once.

use mission_core::control::{Command, Controller, Event, Message, PROTOCOL, WorkerReport};
use mission_core::defaults::REPORT_EVERY;
use mission_core::flight::Environment;
use mission_core::host::session::{self, Session};
use mission_core::mission;
use mission_core::random::SplitMix;
use mission_core::report::TransferReport;
use mission_core::shares::FlowsPerHost;
use mission_core::standing::Standing;
use mission_core::types::{JobId, JobSpec, Transport, WorkerId};
use mission_core::units::Time;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

const HOSTS: usize = 3;
const PROCESSES: usize = 4;
const TURN: Duration = REPORT_EVERY;

/// One worker process, with what a data plane does around the machine of core.
struct Process {
    host: usize,
    worker: WorkerId,
    address: Arc<str>,
    machine: Session,
    /// Address of the speaker, as this process knows it.
    speaker: Option<Arc<str>>,
    /// Whether it is connected to it.
    connected: bool,
    standing: Standing,
    /// It hangs until then.
    stopped_until: usize,
    /// Messages of its scheduler, in order.
    inbox: VecDeque<Arc<Message>>,
    /// What others have given it: their address and report; and the last number of each that it has taken.
    given: Vec<(Arc<str>, WorkerReport)>,
    taken: BTreeMap<Arc<str>, u64>,
    /// Bytes that it has received of each job, and those that it has reported.
    totals: BTreeMap<JobId, u64>,
    reported: BTreeMap<JobId, u64>,
    said_shares: u64,
}

struct World {
    now: Time,
    turn: usize,
    random: SplitMix,
    controller: Controller,
    processes: Vec<Process>,
    born: usize,
    /// Reports that reached the scheduler as one message.
    messages: usize,
    /// Messages with shares that left the scheduler.
    told: usize,
    weighed: usize,
    /// Totals of processes that are gone, as far as they had reported them.
    gone: BTreeMap<JobId, u64>,
}

impl World {
    fn new(seed: u64, apart: bool) -> World {
        let environment = Environment { carriers: vec![Transport::Tcp], interfaces: 1, ..Environment::default() };
        let controller = Controller::new("fair", FlowsPerHost::Fixed(10), environment).unwrap();
        let mut world = World {
            now: Time(0),
            turn: 0,
            random: SplitMix(seed),
            controller,
            processes: Vec::new(),
            born: 0,
            messages: 0,
            told: 0,
            weighed: 0,
            gone: BTreeMap::new(),
        };
        world.event(Event::Sessions { apart });
        for host in 0..HOSTS {
            (0..PROCESSES).for_each(|_| world.start(host));
        }
        for job in 0..3 {
            let spec = JobSpec::named(format!("job-{job}").into());
            world.event(Event::Admit { spec, client: "client".into() });
        }
        world
    }

    fn below(&mut self, most: usize) -> usize {
        (self.random.next() % most as u64) as usize
    }

    fn start(&mut self, host: usize) {
        let (worker, address): (WorkerId, Arc<str>) =
            (format!("worker-{}", self.born).into(), format!("10.0.0.{host}:{}", 1000 + self.born).into());
        self.born += 1;
        let environment = Environment { carriers: vec![Transport::Tcp], interfaces: 1, ..Environment::default() };
        let nothing = Standing {
            version: 0,
            flows_per_host: FlowsPerHost::Fixed(10),
            level: mission_core::host::fair::Level::Groups,
            shares: Vec::new(),
        };
        self.processes.push(Process {
            host,
            worker: worker.clone(),
            address: address.clone(),
            machine: Session::new(address.clone()),
            speaker: None,
            connected: false,
            standing: nothing,
            stopped_until: 0,
            inbox: VecDeque::new(),
            given: Vec::new(),
            taken: BTreeMap::new(),
            totals: BTreeMap::new(),
            reported: BTreeMap::new(),
            said_shares: 0,
        });
        let host = format!("host-{host}").into();
        let joins =
            Event::Join { worker: worker.clone(), host, address, environment, problems: vec![], protocol: PROTOCOL };
        self.event(joins);
        self.event(Event::Known { worker });
    }

    fn event(&mut self, event: Event) {
        let mut commands = Vec::new();
        self.controller.handle(self.now, event, &mut commands);
        let mut shares = 0;
        for command in commands {
            match command {
                Command::Tell { worker, message, .. } => {
                    shares += usize::from(message.commands.iter().any(is_shares));
                    if let Some(own) = self.processes.iter_mut().find(|own| own.worker == worker) {
                        own.inbox.push_back(message);
                    }
                }
                Command::Briefing { worker, commands, .. } => {
                    let own = self.processes.iter_mut().find(|own| own.worker == worker).expect("it has just joined");
                    for command in commands {
                        take(&mut own.standing, command);
                    }
                }
                Command::Invalid { why } => panic!("{why}"),
                _ => {}
            }
        }
        self.told += shares;
        self.weighed += usize::from(shares > 0);
    }

    fn place(&self, address: &Arc<str>) -> Option<usize> {
        self.processes.iter().position(|own| own.address == *address)
    }

    /// A process dies: with it what it was given and has not passed on.
    fn kill(&mut self, place: usize) {
        let own = self.processes.remove(place);
        for (job, said) in &own.reported {
            *self.gone.entry(job.clone()).or_default() += said;
        }
        self.break_links(&own.address);
        self.event(Event::Gone { worker: own.worker });
    }

    /// Closes all connections to this process.
    fn break_links(&mut self, address: &Arc<str>) {
        let now = self.now;
        for other in self.processes.iter_mut().filter(|other| other.speaker.as_ref() == Some(address)) {
            other.disconnect(now);
        }
        if let Some(place) = self.place(address) {
            (self.processes[place].given, self.processes[place].taken) = Default::default();
        }
    }

    fn turn(&mut self, faults: bool) {
        self.now = self.now + TURN;
        self.turn += 1;
        if faults {
            self.fault();
        }
        for place in 0..self.processes.len() {
            if self.processes[place].stopped_until > self.turn {
                continue;
            }
            self.hear(place);
            self.connect(place);
            self.report(place);
        }
        if self.turn.is_multiple_of(4) {
            self.event(Event::Tick);
        }
    }

    fn fault(&mut self) {
        let place = self.below(self.processes.len());
        match self.below(40) {
            0 => {
                let host = self.processes[place].host;
                self.kill(place);
                self.start(host);
            }
            1 => self.processes[place].stopped_until = self.turn + 2 + self.below(30),
            2 => {
                let address = self.processes[place].address.clone();
                self.break_links(&address);
            }
            _ => {}
        }
    }

    /// Executes the scheduler's messages; passes shares on to connected processes.
    fn hear(&mut self, place: usize) {
        while let Some(message) = self.processes[place].inbox.pop_front() {
            if let Some(speaker) = &message.speaker {
                let (address, now) = (self.processes[place].address.clone(), self.now);
                let own = &mut self.processes[place];
                if own.speaker.as_ref() != Some(speaker) {
                    own.disconnect(now);
                    own.speaker = Some(speaker.clone());
                    self.break_links(&address);
                }
            }
            for command in message.commands.iter().filter(|command| is_shares(command)) {
                if take(&mut self.processes[place].standing, command.clone()) == Some(true) {
                    self.pass(place, command);
                }
            }
        }
    }

    fn pass(&mut self, place: usize, command: &mission::Command) {
        let (address, now) = (self.processes[place].address.clone(), self.now);
        for other in self.processes.iter_mut().filter(|other| other.connected) {
            if other.speaker.as_ref() == Some(&address) && take(&mut other.standing, command.clone()).is_none() {
                other.disconnect(now);
            }
        }
    }

    fn connect(&mut self, place: usize) {
        let own = &self.processes[place];
        let Some(speaker) = own.speaker.clone().filter(|speaker| !own.connected && *speaker != own.address) else {
            return;
        };
        // A process that does not know yet that it is the speaker does not listen.
        let listens = |at: &usize| self.processes[*at].speaker.as_ref() == Some(&speaker);
        let Some(at) = self.place(&speaker).filter(listens) else { return };
        if self.processes[at].stopped_until > self.turn {
            return;
        }
        let standing = self.processes[at].standing.clone();
        let (own, now) = (&mut self.processes[place], self.now);
        own.connected = true;
        own.machine.handle(now, session::Event::Joined, &mut Vec::new());
        take(&mut own.standing, mission::Command::Shares(standing));
    }

    fn report(&mut self, place: usize) {
        let now = self.now;
        // What was taken the last time has been passed on.
        let own = &mut self.processes[place];
        let (given, taken) = (std::mem::take(&mut own.given), std::mem::take(&mut own.taken));
        for (address, report) in &given {
            let last = self.processes[place].taken.entry(address.clone()).or_default();
            *last = report.number.max(*last);
        }
        for (address, number) in taken {
            if let Some(at) = self.place(&address) {
                self.processes[at].machine.handle(now, session::Event::Passed { number }, &mut Vec::new());
            }
        }
        let own = &mut self.processes[place];
        let all = own.machine.says_all();
        let is_new = |(job, bytes): &(&JobId, &u64)| all || own.reported.get(*job) != Some(*bytes);
        let record = |(job, bytes): (&JobId, &u64)| TransferReport {
            job: job.to_string(),
            from: "m".into(),
            to: "r".into(),
            asked_bytes: u64::MAX >> 8,
            served_bytes: *bytes,
            moved: true,
            ..TransferReport::default()
        };
        let records: Vec<TransferReport> = own.totals.iter().filter(is_new).map(record).collect();
        own.reported = own.totals.clone();
        let shares = own.standing.version;
        let is_new = !records.is_empty() || shares != own.said_shares || !given.is_empty();
        own.said_shares = shares;
        let report = WorkerReport { records, shares, others: given, ..WorkerReport::default() };
        let report = is_new.then(|| Box::new(report));
        let mut commands = Vec::new();
        own.machine.handle(now, session::Event::Report { report }, &mut commands);
        for command in commands {
            match command {
                session::Command::Leave => self.processes[place].connected = false,
                session::Command::HandOver(report) => {
                    let own = &self.processes[place];
                    let (address, speaker) = (own.address.clone(), own.speaker.clone().expect("it is connected"));
                    let at = self.place(&speaker).expect("it is connected");
                    self.processes[at].given.push((address, *report));
                }
                session::Command::Say(report) => {
                    self.messages += 1;
                    let worker = self.processes[place].worker.clone();
                    self.event(Event::Report { worker, report: *report });
                }
            }
        }
    }

    /// Every process receives something of some job.
    fn receive(&mut self) {
        for place in 0..self.processes.len() {
            let job: JobId = format!("job-{}", self.below(3)).into();
            let bytes = self.below(1000) as u64 + 1;
            if self.processes[place].stopped_until <= self.turn {
                *self.processes[place].totals.entry(job).or_default() += bytes;
            }
        }
    }

    fn served(&mut self) -> BTreeMap<JobId, u64> {
        let jobs = self.controller.status(None).jobs.into_iter();
        jobs.map(|job| (job.status.job, job.transfers.iter().map(|own| own.status.served_bytes).sum())).collect()
    }
}

impl Process {
    fn disconnect(&mut self, now: Time) {
        if std::mem::take(&mut self.connected) {
            self.machine.handle(now, session::Event::Left, &mut Vec::new());
        }
    }
}

fn is_shares(command: &mission::Command) -> bool {
    matches!(command, mission::Command::Shares(_) | mission::Command::SharesChanged(_))
}

/// Whether shares are in force by it; `None`: they lead from another version.
fn take(standing: &mut Standing, command: mission::Command) -> Option<bool> {
    let new = match command {
        mission::Command::Shares(new) => new,
        mission::Command::SharesChanged(changes) if changes.version > standing.version => standing.after(&changes)?,
        _ => return Some(false),
    };
    let is_newer = new.version > standing.version;
    if is_newer {
        *standing = new;
    }
    Some(is_newer)
}

#[test]
fn whatever_becomes_of_speakers_everybody_has_the_shares_and_every_total_is_right() {
    for seed in 0..300 {
        let mut world = World::new(seed, false);
        for _ in 0..400 {
            world.receive();
            world.turn(true);
        }
        // All stand up again; then nothing moves any more.
        world.processes.iter_mut().for_each(|own| own.stopped_until = 0);
        for _ in 0..40 {
            world.turn(false);
        }
        let mut expected = world.gone.clone();
        for own in &world.processes {
            own.totals.iter().for_each(|(job, bytes)| *expected.entry(job.clone()).or_default() += bytes);
        }
        let served = world.served();
        for (job, most) in expected {
            let lost: u64 = most - served[&job];
            // Reports of a dead process to a speaker that died, too, are lost.
            assert!(lost <= world.gone.get(&job).copied().unwrap_or(0), "seed {seed}: {job} lacks {lost} of {most}");
        }
        let last = world.processes.iter().map(|own| own.standing.version).max().unwrap();
        let newest = world.processes.iter().find(|own| own.standing.version == last).unwrap().standing.clone();
        for own in &world.processes {
            assert_eq!(own.standing.version, last, "seed {seed}: {}", own.worker);
            assert_eq!(own.standing.shares.len(), newest.shares.len(), "seed {seed}: {}", own.worker);
            for a in &newest.shares {
                let b = own.standing.shares.iter().find(|b| a.job == b.job).expect("the same jobs");
                assert!((a.weight - b.weight).abs() < 1e-9, "seed {seed}: {}", own.worker);
            }
        }
    }
}

#[test]
fn nothing_is_lost_with_a_speaker() {
    for seed in 0..50 {
        let mut world = World::new(seed, false);
        for round in 0..6 {
            for _ in 0..10 {
                world.receive();
                world.turn(false);
            }
            let speaker = world.processes.iter().position(|own| own.speaker.as_ref() == Some(&own.address)).unwrap();
            let (worker, host) = (world.processes[speaker].worker.clone(), world.processes[speaker].host);
            let own = world.processes[speaker].reported.clone();
            let others: BTreeMap<JobId, u64> =
                world.processes.iter().filter(|own| own.worker != worker).fold(BTreeMap::new(), |mut all, own| {
                    own.totals.iter().for_each(|(job, bytes)| *all.entry(job.clone()).or_default() += bytes);
                    all
                });
            world.kill(speaker);
            for _ in 0..20 {
                world.turn(false);
            }
            let served = world.served();
            for (job, bytes) in others {
                let mine = own.get(&job).copied().unwrap_or(0);
                let least = bytes + world.gone.get(&job).copied().unwrap_or(0) - mine;
                assert!(served[&job] >= least, "seed {seed}, round {round}: {job}: {} of {least}", served[&job]);
            }
            world.start(host);
        }
    }
}

#[test]
fn a_host_says_as_much_as_a_process_and_hears_as_much() {
    let count = |apart: bool| {
        let mut world = World::new(1, apart);
        (0..20).for_each(|_| world.turn(false));
        let (messages, told, weighed) = (world.messages, world.told, world.weighed);
        for _ in 0..100 {
            world.receive();
            world.turn(false);
        }
        (world.messages - messages, world.told - told, world.weighed - weighed)
    };
    let (messages, told, weighed) = count(false);
    assert!(messages <= 100 * HOSTS + HOSTS, "{messages}");
    assert_eq!(told, weighed * HOSTS, "each time once for each host");
    let (messages, told, weighed) = count(true);
    assert!(messages >= 90 * HOSTS * PROCESSES, "{messages}");
    assert_eq!(told, weighed * HOSTS * PROCESSES);
}

impl World {
    /// A new job begins to move, so that all weights change.
    fn change_weights(&mut self, place: usize) {
        let job: JobId = format!("job-{}", 10 + self.turn).into();
        self.event(Event::Admit { spec: JobSpec::named(job.clone()), client: "client".into() });
        *self.processes[place].totals.entry(job).or_default() += 1;
    }

    fn newest(&self) -> u64 {
        self.processes.iter().map(|own| own.standing.version).max().expect("there are some")
    }
}

#[test]
fn a_speaker_that_is_deaf_while_weights_change_all_the_time_keeps_nobody_from_them() {
    let mut world = World::new(1, false);
    (0..10).for_each(|_| world.turn(false));
    let first = world.processes.iter().find(|own| own.host == 0).unwrap().worker.clone();
    world.processes[0].stopped_until = usize::MAX;
    let far = world.processes.iter().position(|own| own.host == 2).unwrap();
    for turn in 0..60 {
        world.change_weights(far);
        world.turn(false);
        // Two turns until they are said, a second until they are late, another until that is looked at.
        let least = world.newest().saturating_sub(14);
        let behind = world.processes.iter().filter(|own| own.host == 0 && own.worker != first);
        let behind: Vec<u64> = behind.map(|own| own.standing.version).filter(|own| *own < least).collect();
        assert!(turn < 14 || behind.is_empty(), "turn {turn}: {behind:?} of {}", world.newest());
    }
    let speaker = world.processes.iter().find(|own| own.host == 0 && own.worker != first).unwrap().speaker.clone();
    assert_ne!(speaker, Some(world.processes[0].address.clone()), "another speaks");
}

#[test]
fn what_a_speaker_that_dies_did_not_pass_on_its_successor_is_told() {
    for left in 1..PROCESSES {
        let mut world = World::new(1, false);
        // So many others are left on its host.
        for _ in left + 1..PROCESSES {
            let place = world.processes.iter().rposition(|own| own.host == 0).unwrap();
            world.kill(place);
        }
        (0..10).for_each(|_| world.turn(false));
        // It receives nothing more, and dies.
        world.processes[0].stopped_until = usize::MAX;
        let far = world.processes.iter().position(|own| own.host == 2).unwrap();
        world.change_weights(far);
        (0..2).for_each(|_| world.turn(false));
        assert!(world.processes[1].standing.version < world.newest());
        world.kill(0);
        // The next ones are said to it as all others are; so nothing more changes.
        (0..12).for_each(|_| world.turn(false));
        let newest = world.newest();
        assert!(world.processes.iter().all(|own| own.standing.version == newest), "{left} left");
    }
}

#[test]
fn an_old_report_counts_for_no_later_job_of_the_same_name() {
    let mut world = World::new(1, true);
    let worker = world.processes[0].worker.clone();
    let report = |number, served_bytes, last_of| WorkerReport {
        records: vec![TransferReport {
            job: "again".into(),
            from: "m".into(),
            to: "r".into(),
            asked_bytes: 100,
            served_bytes,
            moved: true,
            ..TransferReport::default()
        }],
        number,
        last_of,
        ..WorkerReport::default()
    };
    let admit = |world: &mut World| {
        world.event(Event::Admit { spec: JobSpec::named("again".into()), client: "client".into() });
    };
    let say = |world: &mut World, report| world.event(Event::Report { worker: worker.clone(), report });
    admit(&mut world);
    say(&mut world, report(1, 10, None));
    world.event(Event::Leave { job: "again".into(), client: "client".into() });
    say(&mut world, report(3, 30, Some("again".into())));
    for own in world.processes.iter().skip(1).map(|own| own.worker.clone()).collect::<Vec<_>>() {
        let last = WorkerReport { last_of: Some("again".into()), ..WorkerReport::default() };
        world.event(Event::Report { worker: own, report: last });
    }
    assert!(!world.served().contains_key("again"), "it is over");
    admit(&mut world);
    // By way of a speaker that stood still.
    say(&mut world, report(2, 20, None));
    assert_eq!(world.served()["again"], 0);
    say(&mut world, report(4, 5, None));
    assert_eq!(world.served()["again"], 5);
}
