//! A worker that leaves hands its objects to others.

use super::*;

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
    pub(super) fn says(&mut self, worker: &str, report: WorkerReport) {
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

    pub(super) fn took(&mut self, worker: &str, objects: &[u128]) {
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
        matches!(record, Record::NotHandedOver { objects: 1, bytes: 5, why, .. } if why == "b did not answer for 60 s")
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
