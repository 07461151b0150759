//! Workers that join, that the engine does not know any more, or that are gone with their objects.

use super::*;

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

/// Dask reports that a result is gone before it reports that of the worker that had it.
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

#[test]
fn what_a_worker_keeps_is_near_to_it() {
    let mut world = World::new(&["a", "b", "c"]);
    world.task(1, "job", None);
    world.carries(1, 7, "a");
    let far = |world: &World, worker: &str| world.controller.far_bytes(&[1], &worker.into());
    assert_eq!((far(&world, "a"), far(&world, "b"), far(&world, "c")), (0, 5, 5));
    let report = WorkerReport { copied: vec![ObjectId(7)], ..WorkerReport::default() };
    world.says("b", report);
    assert_eq!((far(&world, "a"), far(&world, "b"), far(&world, "c")), (0, 0, 5));
}
