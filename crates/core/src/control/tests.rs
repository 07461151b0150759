//! The lives of workers, jobs and objects, as an engine's adapter would tell them.

use super::jobs::inputs_first;
use super::*;
use crate::defaults::HAND_OVER_WITHIN;
use crate::graph::Kind;
use crate::report::TransferReport;
use crate::types::Transport;
use std::collections::VecDeque;
use std::time::Duration;

struct World {
    controller: Controller,
    now: Time,
    /// What was said to each worker, oldest first.
    sent: BTreeMap<WorkerId, VecDeque<Arc<Message>>>,
    records: Vec<Record>,
    recompute: BTreeSet<u64>,
    /// The manifest of the last request to each worker to take an object.
    asked: BTreeMap<(String, ObjectId), ObjectId>,
}

impl World {
    fn new(workers: &[&str]) -> World {
        let environment = Environment { carriers: vec![Transport::Tcp], interfaces: 1, ..Environment::default() };
        let controller = Controller::new("fair", FlowsPerHost::Fixed(10), environment.clone()).unwrap();
        let mut world = World {
            controller,
            now: Time(0),
            sent: BTreeMap::new(),
            records: Vec::new(),
            recompute: BTreeSet::new(),
            asked: BTreeMap::new(),
        };
        for worker in workers {
            let (host, address) = (format!("host of {worker}").into(), format!("{worker}:1").into());
            let environment = environment.clone();
            world.event(Event::Join {
                worker: (*worker).into(),
                host,
                address,
                environment,
                problems: vec![],
                protocol: PROTOCOL,
            });
            world.event(Event::Known { worker: (*worker).into(), places: None });
        }
        world.event(Event::Flush);
        world.sent.clear();
        world
    }

    /// Gives the commands that are neither messages nor records.
    fn event(&mut self, event: Event) -> Vec<Command> {
        let mut commands = Vec::new();
        self.controller.handle(self.now, event, &mut commands);
        let mut rest = Vec::new();
        for command in commands {
            match command {
                Command::Tell { worker, message, .. } => self.sent.entry(worker).or_default().push_back(message),
                Command::Record { record } => self.records.push(*record),
                Command::Recompute { tasks } => self.recompute.extend(tasks),
                other => rest.push(other),
            }
        }
        rest
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.event(Event::Tick);
    }

    fn admit(&mut self, job: &str, client: &str) -> JobId {
        let spec = JobSpec::named(job.into());
        let said = self.event(Event::Admit { spec, client: client.into() });
        let [Command::Admitted { job, refused: None }] = &said[..] else { panic!("{said:?}") };
        job.clone()
    }

    fn task(&mut self, task: u64, job: &str, by: Option<u64>) {
        let spec = (!job.is_empty()).then(|| JobSpec::named(job.into()));
        let origin = Origin { client: "client".into(), spec, by, span: None };
        let new = NewTask { task, stage: "stage".into(), kind: Kind::Work, inputs: vec![] };
        self.event(Event::Tasks { origin, tasks: vec![new] });
    }

    fn carries(&mut self, task: u64, object: u128, owner: &str) -> Vec<Command> {
        let carried = Carried { object: ObjectId(object), owner: owner.into(), parts: 1, bytes: 5, copies: 1 };
        self.event(Event::Carries { task, objects: vec![carried], alive: true })
    }

    /// What a worker was asked to free, and of what it heard that it is lost, since it was asked last.
    fn heard(&mut self, worker: &str) -> (Vec<u128>, Vec<u128>) {
        let all = self.sent.remove(worker).unwrap_or_default();
        let ids = |of: fn(&Message) -> &Vec<ObjectId>| {
            all.iter().flat_map(|message| of(message).iter().map(|id| id.0)).collect()
        };
        (ids(|message| &message.free), ids(|message| &message.lost))
    }

    fn left(&self) -> Vec<(&'static str, usize)> {
        self.controller.held().into_iter().filter(|(_, count)| *count > 0).collect()
    }
}

#[test]
fn a_job_is_over_when_all_have_said_their_last_words_or_are_late() {
    for late in [false, true] {
        let mut world = World::new(&["a", "b"]);
        let job = world.admit("etl", "client");
        world.task(1, "etl", None);
        world.event(Event::Leave { job: job.clone(), client: "client".into() });
        let report =
            TransferReport { job: "etl".into(), from: "m".into(), to: "r".into(), ..TransferReport::default() };
        let of = |last_of: Option<JobId>, served_bytes| {
            let records = vec![TransferReport { served_bytes, asked_bytes: 9, ..report.clone() }];
            WorkerReport { records, last_of, ..WorkerReport::default() }
        };
        world.event(Event::Report { worker: "a".into(), report: of(None, 4) });
        world.event(Event::Forgotten { task: 1 });
        let asked: Vec<_> = world.sent["a"].iter().filter_map(|message| message.report.clone()).collect();
        assert!(asked.iter().eq([&job]));
        world.event(Event::Report { worker: "a".into(), report: of(Some(job.clone()), 9) });
        assert!(!world.records.iter().any(|record| matches!(record, Record::JobEnded(_))), "b has not spoken");
        if late {
            world.pass(LAST_WORDS);
        } else {
            world.event(Event::Report { worker: "b".into(), report: of(Some(job.clone()), 1) });
        }
        let ended = world.records.iter().find_map(|record| match record {
            Record::JobEnded(job) => Some(job.transfers[0].status.served_bytes),
            _ => None,
        });
        assert_eq!(ended, Some(if late { 9 } else { 10 }));
        assert!(world.sent["b"].iter().any(|message| message.forget_job == Some(job.clone())));
        assert_eq!(world.left(), []);
        // Late words bring nothing back.
        world.event(Event::Report { worker: "b".into(), report: of(None, 8) });
        assert_eq!(world.left(), []);
    }
}

#[test]
fn objects_of_a_worker_that_is_gone_are_lost_and_computed_again() {
    let mut world = World::new(&["a", "b"]);
    world.task(1, "etl", None);
    world.task(2, "etl", None);
    world.carries(1, 11, "a");
    world.carries(2, 12, "b");
    let copied = WorkerReport { copied: vec![ObjectId(11), ObjectId(99)], ..WorkerReport::default() };
    world.event(Event::Report { worker: "b".into(), report: copied });
    assert_eq!(world.heard("b"), (vec![99], vec![]), "that was freed while it was copied");
    let said = world.event(Event::Gone { worker: "a".into() });
    assert!(said.is_empty() && world.recompute.is_empty(), "b may have all of it");
    world.keeps_not("b");
    assert_eq!(world.recompute, BTreeSet::from([1]));
    world.event(Event::ResultGone { task: 1, wanted: true });
    world.event(Event::Flush);
    assert_eq!(world.heard("b"), (vec![11], vec![11]), "its copy is freed");
    assert!(world.records.contains(&Record::Recomputed { job: "etl".into(), task: 1 }));
    // Late word of a result that was made there.
    assert_eq!(world.carries(1, 13, "a"), [Command::Soon]);
    world.event(Event::Flush);
    assert_eq!(world.heard("b"), (vec![], vec![13]));
    // It is computed again, on another worker.
    world.event(Event::ResultGone { task: 1, wanted: true });
    world.carries(1, 14, "b");
    for task in [1, 2] {
        world.event(Event::Forgotten { task });
    }
    assert_eq!(world.heard("b").0, [14, 12]);
    world.pass(LAST_WORDS);
    assert_eq!(world.left(), []);
}

#[test]
fn what_a_child_carries_lives_until_the_tasks_beside_its_parent_are_done() {
    let mut world = World::new(&["a"]);
    world.task(1, "etl", None);
    world.event(Event::Begins { task: 1, worker: "a".into() });
    world.task(2, "", Some(1));
    world.event(Event::Submitted { by: 1, tasks: vec![2] });
    world.event(Event::Begins { task: 2, worker: "a".into() });
    world.carries(2, 7, "a");
    world.event(Event::Ends { task: 2 });
    // Its client is gone with the call: the parent may still return the reference.
    world.event(Event::ResultGone { task: 2, wanted: false });
    world.event(Event::Forgotten { task: 2 });
    assert_eq!(world.heard("a").0, [0u128; 0]);
    world.carries(1, 7, "a");
    world.event(Event::Ends { task: 1 });
    assert_eq!(world.heard("a").0, [0u128; 0], "its own result carries it");
    world.event(Event::Forgotten { task: 1 });
    assert_eq!(world.heard("a").0, [7]);
    world.pass(LAST_WORDS);
    assert_eq!(world.left(), []);
}

#[test]
fn a_task_belongs_to_the_job_that_the_program_the_parent_or_the_client_says() {
    let mut world = World::new(&[]);
    world.task(1, "etl", None);
    world.task(2, "", Some(1));
    world.task(3, "", None);
    let span = Origin { client: "client".into(), spec: None, by: None, span: Some("part".into()) };
    let new = NewTask { task: 4, stage: "s".into(), kind: Kind::Work, inputs: vec![] };
    world.event(Event::Tasks { origin: span, tasks: vec![new] });
    let jobs = [1, 2, 3, 4].map(|task| world.controller.spec_of_task(task).unwrap().job.to_string());
    assert_eq!(jobs, ["etl", "etl", "client", "part"]);
}

#[test]
fn what_somebody_changed_of_a_job_holds_for_its_later_tasks() {
    let mut world = World::new(&["a"]);
    world.task(1, "etl", None);
    let change = Change { priority: Some(5.0), transport: Some(Some(Transport::Tcp)) };
    let said = world.event(Event::Change { job: "etl".into(), change });
    assert_eq!(said, [Command::Changed { error: None, refused: None }]);
    world.task(2, "etl", None);
    assert_eq!(world.controller.spec_of_task(2).unwrap().priority, 5.0);
    for (change, wrong, refused) in [
        (Change { priority: Some(0.0), transport: None }, true, false),
        (Change { priority: None, transport: Some(Some(Transport::Mptcp)) }, false, true),
    ] {
        let said = world.event(Event::Change { job: "etl".into(), change });
        let [Command::Changed { error, refused: why }] = &said[..] else { panic!("{said:?}") };
        assert_eq!((error.is_some(), why.is_some()), (wrong, refused));
    }
    let said = world.event(Event::Change { job: "nobody".into(), change: Change::default() });
    assert!(matches!(&said[..], [Command::Changed { error: Some(why), .. }] if why.contains("no job")), "{said:?}");
    assert_eq!(world.controller.spec_of_task(1).unwrap().priority, 5.0);
}

#[test]
fn a_worker_that_the_engine_does_not_know_is_gone_after_a_while() {
    let mut world = World::new(&["a"]);
    let (host, address) = ("h".into(), "b:1".into());
    let environment = Environment { carriers: vec![Transport::Tcp], ..Environment::default() };
    let said = world.event(Event::Join {
        worker: "b".into(),
        host,
        address,
        environment,
        problems: vec![],
        protocol: PROTOCOL,
    });
    assert!(
        matches!(&said[..], [Command::Briefing { version, .. }] if *version == world.sent.get("b").map_or(0, |sent| sent.len() as u64))
    );
    world.pass(KNOWN_WITHIN);
    assert_eq!(world.controller.status(None).workers.len(), 2);
    world.pass(Duration::from_secs(1));
    assert_eq!(world.controller.status(None).workers.len(), 1);
    assert!(world.records.contains(&Record::WorkerLeft { worker: "b".into() }));
}

#[test]
fn jobs_that_demand_something_are_rejected_where_no_worker_has_a_data_plane() {
    let mut world = World::new(&[]);
    world.event(Event::Without { worker: "a".into(), why: "no memory".into() });
    world.event(Event::Known { worker: "a".into(), places: None });
    let mut spec = JobSpec::named("etl".into());
    world.admit("anything", "client");
    spec.demands.transport = Some(Transport::Tcp);
    let said = world.event(Event::Admit { spec: spec.clone(), client: "client".into() });
    assert!(
        matches!(&said[..], [Command::Admitted { refused: Some(why), .. }] if why.contains("no memory")),
        "{said:?}"
    );
    world.event(Event::Gone { worker: "a".into() });
    let said = world.event(Event::Admit { spec, client: "another".into() });
    assert!(matches!(&said[..], [Command::Admitted { refused: None, job }] if &**job == "etl"), "{said:?}");
}

#[test]
fn tasks_come_in_any_order() {
    let new = |task, inputs: &[u64]| NewTask { task, stage: "s".into(), kind: Kind::Work, inputs: inputs.to_vec() };
    let given = vec![new(3, &[1, 2]), new(1, &[0, 99]), new(2, &[1, 2]), new(0, &[])];
    let order: Vec<u64> = inputs_first(given).into_iter().map(|own| own.task).collect();
    assert_eq!(order, [0, 1, 2, 3]);
    // A chain as long as any: no recursion.
    let chain: Vec<NewTask> = (0..100_000).rev().map(|task: u64| new(task, &[task.wrapping_sub(1)])).collect();
    assert!(inputs_first(chain).iter().map(|own| own.task).eq(0..100_000));
}

/// Dask says that a result is gone before it says so of the worker that had it.
#[test]
fn what_went_with_a_result_that_is_wanted_is_lost() {
    let mut world = World::new(&["a", "b"]);
    world.task(1, "etl", None);
    world.carries(1, 11, "a");
    assert_eq!(world.event(Event::ResultGone { task: 1, wanted: true }), [Command::Soon]);
    world.event(Event::Gone { worker: "a".into() });
    world.event(Event::Flush);
    assert_eq!(world.heard("b"), (vec![], vec![11]));
}

/// A world in which a worker has put some objects, each of a task's result, and leaves.
fn leaving(objects: &[u128]) -> World {
    let mut world = World::new(&["a", "b", "c"]);
    for (task, object) in (1..).zip(objects) {
        world.task(task, "etl", None);
        world.carries(task, *object, "a");
    }
    world.sent.clear();
    world.event(Event::Leaving { worker: "a".into() });
    world
}

impl World {
    fn says(&mut self, worker: &str, report: WorkerReport) {
        self.event(Event::Report { worker: worker.into(), report });
        self.event(Event::Flush);
    }

    /// What a worker is asked to describe; it puts this manifest.
    fn describes(&mut self, worker: &str, manifest: u128) -> Vec<u128> {
        let all = self.sent.remove(worker).unwrap_or_default();
        let asked: Vec<&Describe> = all.iter().flat_map(|message| &message.describe).collect();
        if let [Describe { job, objects }] = &asked[..] {
            let described = vec![Described { job: job.clone(), manifest: ObjectId(manifest), bytes: 9 }];
            self.says(worker, WorkerReport { described, ..WorkerReport::default() });
            return objects.iter().map(|id| id.0).collect();
        }
        assert!(asked.is_empty(), "{asked:?}");
        Vec::new()
    }

    /// What a worker is asked to take.
    fn takes(&mut self, worker: &str) -> Vec<u128> {
        self.asked(worker, ObjectId(0));
        let all = self.sent.remove(worker).unwrap_or_default();
        all.iter().flat_map(|message| &message.take).flat_map(|take| take.objects.iter().map(|(id, _)| id.0)).collect()
    }

    /// The manifest of the last request to take an object; none: it was asked to keep the object.
    fn asked(&mut self, worker: &str, object: ObjectId) -> Option<ObjectId> {
        for take in self.sent.get(worker).into_iter().flatten().flat_map(|message| &message.take) {
            for (object, _) in &take.objects {
                self.asked.insert((worker.to_owned(), *object), take.manifest);
            }
        }
        self.asked.get(&(worker.to_owned(), object)).copied()
    }

    fn took(&mut self, worker: &str, objects: &[u128]) {
        let taken = |object: &u128| {
            let object = ObjectId(*object);
            Taken { object, manifest: self.asked(worker, object) }
        };
        let took = objects.iter().map(taken).collect();
        self.says(worker, WorkerReport { took, ..WorkerReport::default() });
    }

    fn is_handing_over(&self) -> bool {
        self.controller.is_handing_over(&"a".into())
    }
}

#[test]
fn a_worker_that_leaves_waits_until_others_have_its_objects() {
    let mut world = leaving(&[11, 12]);
    assert!(world.is_handing_over());
    assert_eq!(world.describes("a", 99), [11, 12]);
    let (b, c) = (world.takes("b"), world.takes("c"));
    assert_eq!((b.len(), c.len()), (1, 1), "each takes some");
    world.took("b", &b);
    assert!(world.is_handing_over());
    assert!(world.sent["c"].iter().any(|message| message.locations[0].1 == ["b:1".into(), "a:1".into()]));
    world.took("c", &c);
    assert!(!world.is_handing_over());
    assert_eq!(world.heard("a").0, [99], "nobody needs the manifest any more");
    // Something that it did meanwhile.
    world.task(3, "etl", None);
    world.carries(3, 13, "a");
    world.event(Event::Flush);
    assert!(world.is_handing_over());
    assert_eq!(world.describes("a", 98), [13]);
    world.took("b", &[13]);
    assert!(!world.is_handing_over());
    // It is gone, and nothing is computed again.
    world.sent.clear();
    world.event(Event::Gone { worker: "a".into() });
    assert!(world.recompute.is_empty());
    let handed = Record::HandedOver { worker: "a".into(), objects: 3, bytes: 15 };
    assert!(world.records.contains(&handed));
    let locations: Vec<_> = world.sent["b"].iter().flat_map(|message| message.locations.clone()).collect();
    assert_eq!(locations.len(), 3);
    assert!(locations.iter().all(|(_, at)| at.len() == 1 && &*at[0] != "a:1"));
    // A result that was on its way carries the reference as it was.
    world.task(4, "etl", None);
    world.carries(4, 11, "a");
    assert!(world.recompute.is_empty() && world.heard("b").1.is_empty());
    for task in 1..=4 {
        world.event(Event::Forgotten { task });
    }
    world.pass(LAST_WORDS);
    assert_eq!(world.left(), []);
    for worker in ["b", "c"] {
        let mut freed = world.heard(worker).0;
        freed.sort_unstable();
        assert_eq!(freed, [11, 12, 13], "all know where they lie");
    }
}

#[test]
fn who_has_no_room_is_asked_again_and_a_worker_that_nobody_can_help_leaves_at_last() {
    let mut world = leaving(&[11]);
    world.describes("a", 99);
    let mut asked = Vec::new();
    let untaken = |manifest| vec![Untaken { object: ObjectId(11), manifest, why: "the disk is full".into() }];
    let mut manifest = 100;
    for _ in 0..4 {
        for worker in ["b", "c"] {
            if world.takes(worker) == [11] {
                asked.push(worker);
                let untaken = untaken(world.asked(worker, ObjectId(11)));
                world.says(worker, WorkerReport { untaken, ..WorkerReport::default() });
                manifest += 1;
                world.describes("a", manifest);
            }
        }
    }
    assert_eq!(asked, ["b", "c"], "each once");
    world.pass(TRY_AGAIN);
    world.describes("a", 200);
    assert_eq!(world.takes("b"), [11]);
    assert!(world.is_handing_over());
    world.pass(HAND_OVER_WITHIN);
    assert!(!world.is_handing_over());
    let gave_up = world.records.iter().any(|record| {
        matches!(record, Record::NotHandedOver { objects: 1, bytes: 5, why, .. } if why == "b said nothing for 60 s")
    });
    assert!(gave_up, "{:?}", world.records);
    world.event(Event::Gone { worker: "a".into() });
    assert_eq!(world.recompute, BTreeSet::from([1]));
}

#[test]
fn whoever_says_nothing_is_passed_over_and_may_still_answer_late() {
    let mut world = leaving(&[11, 12]);
    world.describes("a", 99);
    let (b, c) = (world.takes("b"), world.takes("c"));
    world.took("c", &c);
    world.pass(SILENT / 2);
    assert!(world.describes("a", 98).is_empty(), "it is still being taken");
    world.pass(SILENT / 2);
    assert_eq!(world.describes("a", 98), b);
    assert_eq!(world.takes("c"), b, "the other one is asked");
    world.took("b", &b);
    assert!(world.heard("b").0.is_empty(), "it has it after all");
    world.took("c", &b);
    assert!(!world.is_handing_over() && world.recompute.is_empty());
    world.event(Event::Gone { worker: "a".into() });
    for task in [1, 2] {
        world.event(Event::Forgotten { task });
    }
    world.pass(SILENT);
    assert_eq!(world.left(), []);
}

/// The source of the first take dies, and another worker that has the object is the source of the second.
#[test]
fn a_late_answer_to_one_take_is_none_to_another() {
    let mut world = World::new(&["a", "b", "c"]);
    world.task(1, "etl", None);
    let carried = Carried { object: ObjectId(11), owner: "a".into(), parts: 1, bytes: 5, copies: 3 };
    world.event(Event::Carries { task: 1, objects: vec![carried], alive: true });
    world.event(Event::Flush);
    world.describes("a", 99);
    world.took("b", &[11]);
    let first = world.asked("c", ObjectId(11));
    world.event(Event::Gone { worker: "a".into() });
    world.event(Event::Flush);
    world.describes("b", 98);
    let second = world.asked("c", ObjectId(11));
    assert_eq!((first, second), (Some(ObjectId(99)), Some(ObjectId(98))));
    let why = "its source is gone".to_owned();
    let untaken = vec![Untaken { object: ObjectId(11), manifest: first, why }];
    world.says("c", WorkerReport { untaken, ..WorkerReport::default() });
    assert!(!world.heard("b").0.contains(&98), "the manifest is still needed");
    world.took("c", &[11]);
    assert!(world.heard("c").0.is_empty(), "it keeps what it took");
    assert!(world.heard("b").0.contains(&98));
}

#[test]
fn a_second_data_plane_of_a_worker_has_none_of_the_objects_of_the_first() {
    let mut world = World::new(&["a", "b"]);
    world.task(1, "etl", None);
    world.carries(1, 11, "a");
    world.sent.clear();
    let environment = Environment { carriers: vec![Transport::Tcp], interfaces: 1, ..Environment::default() };
    world.event(Event::Join {
        worker: "a".into(),
        host: "host of a".into(),
        address: "a:2".into(),
        environment,
        problems: vec![],
        protocol: PROTOCOL,
    });
    assert_eq!(world.recompute, BTreeSet::from([1]));
    world.event(Event::Flush);
    assert_eq!(world.heard("b").1, [11]);
}

#[test]
fn whoever_is_gone_takes_nothing_and_another_one_does() {
    let mut world = leaving(&[11]);
    world.describes("a", 99);
    assert_eq!(world.takes("b"), [11]);
    world.event(Event::Gone { worker: "b".into() });
    assert_eq!(world.describes("a", 98), [11]);
    assert_eq!(world.takes("c"), [11]);
    // The source dies: what was being taken is lost, unless it has arrived.
    world.event(Event::Gone { worker: "a".into() });
    assert_eq!(world.recompute, BTreeSet::from([1]));
    world.event(Event::ResultGone { task: 1, wanted: true });
    world.took("c", &[11]);
    assert_eq!(world.heard("c").0, [11], "it came too late");
    world.event(Event::Forgotten { task: 1 });
    world.pass(LAST_WORDS);
    assert_eq!(world.left(), []);
}

#[test]
fn an_object_of_several_copies_lies_on_several_hosts_and_outlives_one_of_them() {
    let mut world = World::new(&["a", "b", "c"]);
    world.task(1, "etl", None);
    let carried = Carried { object: ObjectId(11), owner: "a".into(), parts: 1, bytes: 5, copies: 2 };
    let said = world.event(Event::Carries { task: 1, objects: vec![carried], alive: true });
    assert_eq!(said, [Command::Soon]);
    world.event(Event::Flush);
    world.describes("a", 99);
    assert_eq!(world.takes("b"), [11]);
    world.took("b", &[11]);
    world.sent.clear();
    world.event(Event::Gone { worker: "a".into() });
    assert!(world.recompute.is_empty());
    // Two shall have it: another one takes it from the one that is left.
    assert_eq!(world.describes("b", 98), [11]);
    assert_eq!(world.takes("c"), [11]);
    let joined = world.controller.locations(vec![ObjectId(11)]);
    assert_eq!(joined, [(ObjectId(11), vec!["b:1".into()])]);
}

#[test]
fn a_worker_of_another_version_does_not_join() {
    let mut world = World::new(&["a"]);
    let (host, address) = ("host".into(), "b:1".into());
    let environment = Environment::default();
    let join = Event::Join { worker: "b".into(), host, address, environment, problems: vec![], protocol: PROTOCOL - 1 };
    let said = world.event(join);
    let [Command::Rejected { why, .. }] = &said[..] else { panic!("{said:?}") };
    assert!(why.contains("this worker's is the older one") && why.contains("install the same version"), "{why}");
    assert!(!world.controller.workers.contains_key("b"));
}

/// A world in which two workers keep parts of an object whose owner dies.
fn in_doubt() -> World {
    let mut world = World::new(&["a", "b", "c"]);
    world.task(1, "etl", None);
    let carried = Carried { object: ObjectId(11), owner: "a".into(), parts: 3, bytes: 5, copies: 1 };
    world.event(Event::Carries { task: 1, objects: vec![carried], alive: true });
    for worker in ["b", "c"] {
        world.says(worker, WorkerReport { copied: vec![ObjectId(11)], ..WorkerReport::default() });
    }
    world.sent.clear();
    world.event(Event::Gone { worker: "a".into() });
    world.event(Event::Flush);
    world
}

impl World {
    /// What a worker is asked to keep, and of what it hears that it is lost.
    fn keeps(&mut self, worker: &str) -> (Vec<Keep>, Vec<u128>) {
        let all = self.sent.remove(worker).unwrap_or_default();
        let keep = all.iter().flat_map(|message| message.keep.clone()).collect();
        (keep, all.iter().flat_map(|message| message.lost.iter().map(|id| id.0)).collect())
    }

    fn keeps_not(&mut self, worker: &str) {
        let untaken = vec![Untaken { object: ObjectId(11), manifest: None, why: "it has not all of its parts".into() }];
        self.says(worker, WorkerReport { untaken, ..WorkerReport::default() });
    }
}

#[test]
fn who_has_all_parts_of_a_broadcast_keeps_the_object_when_its_owner_dies() {
    let keep = vec![Keep { object: ObjectId(11), parts: 3 }];
    let mut world = in_doubt();
    assert_eq!((world.keeps("b"), world.keeps("c")), ((keep.clone(), vec![]), (vec![], vec![])));
    world.keeps_not("b");
    assert_eq!(world.keeps("c"), (keep, vec![]));
    world.took("c", &[11]);
    assert!(world.recompute.is_empty());
    assert_eq!(world.sent["b"].back().unwrap().locations, [(ObjectId(11), vec!["c:1".into()])]);
    world.pass(DOUBT);
    assert!(world.recompute.is_empty());
}

#[test]
fn where_nobody_has_all_parts_or_answers_the_result_is_computed_again() {
    for late in [false, true] {
        let mut world = in_doubt();
        world.keeps_not("b");
        if late {
            world.pass(DOUBT);
        } else {
            world.event(Event::Gone { worker: "c".into() });
        }
        world.event(Event::Flush);
        assert_eq!(world.recompute, BTreeSet::from([1]));
        assert_eq!(world.keeps("b").1, [11]);
    }
    // The engine computes it again itself: whoever waits for the old one hears so.
    let mut world = in_doubt();
    world.event(Event::ResultGone { task: 1, wanted: true });
    world.event(Event::Flush);
    assert_eq!(world.keeps("c").1, [11]);
    world.took("b", &[11]);
    assert_eq!(world.heard("b").0.iter().filter(|freed| **freed == 11).count(), 2, "the copy, and what it made of it");
    world.event(Event::Forgotten { task: 1 });
    world.pass(LAST_WORDS);
    assert_eq!(world.left(), []);
}

#[test]
fn names_that_cannot_be_printed_are_refused_and_those_of_spans_are_made_fit() {
    let mut world = World::new(&["a"]);
    let origin = |spec, span| Origin { client: "client".into(), spec, by: None, span };
    let new = |task| vec![NewTask { task, stage: "stage".into(), kind: Kind::Work, inputs: vec![] }];
    for wrong in ["", "a\nWARNING", &"x".repeat(300)] {
        let spec = JobSpec::named(wrong.into());
        let said = world.event(Event::Tasks { origin: origin(Some(spec.clone()), None), tasks: new(1) });
        assert!(matches!(&said[..], [Command::Invalid { why }] if why.len() < 200 && !why.contains('\n')), "{said:?}");
        assert!(world.controller.spec_of_task(1).is_none());
        let said = world.event(Event::Admit { spec, client: "client".into() });
        assert!(matches!(&said[..], [Command::Invalid { .. }]), "{said:?}");
    }
    world.event(Event::Tasks { origin: origin(None, Some("two\nlines".into())), tasks: new(2) });
    assert_eq!(world.controller.job_of(2).map(|job| &**job), Some("two?lines"));
}
