//! Two clusters on the same hosts, and a replica of the service between them.

use super::*;
use crate::mission;
use crate::service::{self, Asked, Books, Entry, FollowerCommand, Leader, Replica};
use crate::shares::Share;
use crate::standing::Standing;

/// What is between them: a store that answers at once, and connections.
struct Between {
    replica: Replica,
    books: Books,
    clusters: Vec<World>,
    now: Time,
}

impl Between {
    fn new() -> Between {
        let cluster = |index: usize| {
            let mut world = World::new(&[]);
            for worker in ["a", "b"] {
                let environment =
                    Environment { carriers: vec![Transport::Tcp], interfaces: 1, ..Environment::default() };
                world.event(Event::Join {
                    worker: format!("{worker}{index}").into(),
                    host: format!("host-{worker}").into(),
                    address: format!("{worker}{index}:1").into(),
                    environment,
                    problems: vec![],
                    protocol: PROTOCOL,
                });
            }
            world
        };
        let own = Leader { address: "r".into(), tokens: "".into() };
        let replica = Replica::new(own, "priority".into(), 1);
        let mut between =
            Between { replica, books: Books::default(), clusters: vec![cluster(0), cluster(1)], now: Time(0) };
        between.serve(service::Event::Loaded { revision: 0, entries: vec![], leader: None });
        for index in 0..2 {
            let follow = Event::Follow {
                cluster: format!("c{index}").into(),
                incarnation: index as u64,
                addresses: vec!["r".into()],
            };
            between.cluster(index, follow);
        }
        between
    }

    fn serve(&mut self, event: service::Event) {
        let mut commands = Vec::new();
        self.replica.handle(self.now, event, &mut commands);
        for command in commands {
            match command {
                service::Command::Campaign => {
                    let leader = Some(Some("r".into()));
                    let revision = self.books.revision + 1;
                    self.books.take(revision, &[]);
                    self.serve(service::Event::Elected { epoch: revision, until: Time(u64::MAX) });
                    self.serve(service::Event::Changed { revision, entries: vec![], leader });
                }
                service::Command::Renew | service::Command::Resign => {}
                service::Command::Write { write, entries, .. } => self.write(write, entries),
                service::Command::Say { session, message } => {
                    let heard = service::FollowerEvent::Heard { message };
                    self.cluster(session as usize, Event::Service { heard });
                }
                service::Command::Close { .. } => panic!("nobody is closed"),
                service::Command::Answer { result, .. } => result.unwrap(),
            }
        }
    }

    fn write(&mut self, write: u64, entries: Vec<Entry>) {
        let revision = self.books.revision + 1;
        self.books.take(revision, &entries);
        self.serve(service::Event::Changed { revision, entries, leader: None });
        self.serve(service::Event::Written { write, revision });
    }

    fn cluster(&mut self, index: usize, event: Event) {
        self.clusters[index].now = self.now;
        for command in self.clusters[index].event(event) {
            match command {
                Command::Service { does: FollowerCommand::Connect { .. } } => {
                    self.serve(service::Event::Opened { session: index as u64 });
                    self.cluster(index, Event::Service { heard: service::FollowerEvent::Connected });
                }
                Command::Service { does: FollowerCommand::Send { message } } => {
                    self.serve(service::Event::Said { session: index as u64, message });
                }
                Command::Admitted { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Jobs of these priorities, one in each cluster, move bytes.
    fn move_bytes(&mut self, bytes: u64) {
        for index in 0..2 {
            let job = format!("job-{index}");
            let report = TransferReport {
                job,
                from: "m".into(),
                to: "r".into(),
                asked_bytes: 1 << 30,
                served_bytes: bytes,
                ..TransferReport::default()
            };
            let report = WorkerReport { records: vec![report], ..WorkerReport::default() };
            self.cluster(index, Event::Report { worker: format!("a{index}").into(), report });
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        (0..2).for_each(|index| self.cluster(index, Event::Tick));
        self.serve(service::Event::Tick);
    }

    /// That are in force on a worker.
    fn shares(&self, index: usize) -> Vec<Share> {
        let messages = self.clusters[index].sent[&*format!("a{index}")].iter();
        let standing = messages.flat_map(|message| &message.commands).fold(None, |last, command| match command {
            mission::Command::Shares(standing) => Some(standing.clone()),
            mission::Command::SharesChanged(changes) => {
                last.map(|last: Standing| last.after(changes).expect("in order"))
            }
            _ => last,
        });
        standing.expect("some shares").shares
    }
}

fn weight(shares: &[Share], job: &str) -> f64 {
    let own = shares.iter().find(|share| *share.job == *job);
    own.unwrap_or_else(|| panic!("{job}: {shares:?}")).weight
}

#[test]
fn jobs_of_two_clusters_share_hosts_by_the_services_policy() {
    let mut between = Between::new();
    for (index, priority) in [(0, 7.0), (1, 3.0)] {
        let spec = JobSpec { priority, ..JobSpec::named(format!("job-{index}").into()) };
        between.cluster(index, Event::Admit { spec, client: "client".into() });
    }
    for second in 1..6 {
        between.move_bytes(second << 20);
        between.pass(Duration::from_secs(1));
    }
    let shares = between.shares(0);
    assert!((weight(&shares, "job-0") - 0.7).abs() < 1e-9, "{shares:?}");
    assert!((weight(&shares, "c1\u{1f}job-1") - 0.3).abs() < 1e-9, "{shares:?}");
    assert!((weight(&between.shares(1), "job-1") - 0.3).abs() < 1e-9);
    let status = between.clusters[0].controller.status(None);
    assert!((status.jobs[0].status.weight.unwrap() - 0.7).abs() < 1e-9, "{:?}", status.jobs[0].status);
    assert_eq!(status.policy, "priority", "the service's");
    // An operator changes the priority; it is written first, and then in force.
    let change = Change { priority: Some(28.0 / 3.0), ..Change::default() };
    let asked = Asked::Change { cluster: "c1".into(), job: "job-1".into(), change };
    between.serve(service::Event::Asks { ask: 1, asked });
    between.move_bytes(7 << 20);
    between.pass(Duration::from_secs(1));
    between.pass(Duration::from_secs(1));
    assert!((weight(&between.shares(1), "job-1") - 4.0 / 7.0).abs() < 1e-9, "{:?}", between.shares(1));
    // The service is gone: after a while each continues alone.
    let lost = || Event::Service { heard: service::FollowerEvent::Disconnected { why: "reset".into() } };
    (0..2).for_each(|index| {
        between.clusters[index].event(lost());
    });
    for second in 0..20 {
        between.now = between.now + Duration::from_secs(1);
        for index in 0..2 {
            between.clusters[index].now = between.now;
            let report = TransferReport {
                job: format!("job-{index}"),
                from: "m".into(),
                to: "r".into(),
                asked_bytes: 1 << 30,
                served_bytes: (8 + second) << 20,
                ..TransferReport::default()
            };
            let report = WorkerReport { records: vec![report], ..WorkerReport::default() };
            between.clusters[index].event(Event::Report { worker: format!("a{index}").into(), report });
            between.clusters[index].event(Event::Tick);
        }
    }
    assert_eq!(between.shares(0).len(), 1, "{:?}", between.shares(0));
    assert!((weight(&between.shares(0), "job-0") - 1.0).abs() < 1e-9);
    assert!(between.clusters[0].records.iter().any(|record| matches!(record, Record::Alone { .. })));
}

#[test]
fn a_cluster_that_follows_has_the_services_policy() {
    let mut between = Between::new();
    let spec = JobSpec::named("job-0".into());
    between.cluster(0, Event::Admit { spec, client: "client".into() });
    for second in 1..4 {
        between.move_bytes(second << 20);
        between.pass(Duration::from_secs(1));
    }
    let said = between.clusters[0].event(Event::Policy { policy: "fifo".into() });
    assert!(matches!(&said[..], [Command::Invalid { why }] if why.contains("follows a service")), "{said:?}");
}
