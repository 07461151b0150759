//! Tasks that read a stream go on when that is written again.

use super::*;

fn stream(object: u128, owner: &str) -> Carried {
    Carried { object: ObjectId(object), owner: owner.into(), parts: 1, bytes: 5, copies: 0 }
}

/// A task begins a stream.
fn writes(world: &mut World, task: u64, worker: &str, object: u128) {
    world.event(Event::Begins { task, worker: worker.into() });
    world.event(Event::Writes { task, worker: worker.into(), stream: ObjectId(object), repeats: true, needs: vec![] });
    world.event(Event::Carries { task, objects: vec![stream(object, worker)], alive: true });
    world.event(Event::Ends { task });
}

#[test]
fn a_task_goes_on_where_its_thread_waits() {
    let mut world = World::new(&["a", "b", "c"]);
    (1..3).for_each(|task| world.task(task, "job", None));
    writes(&mut world, 1, "a", 7);
    world.event(Event::Begins { task: 2, worker: "b".into() });
    assert!(world.controller.repeats(1) && !world.controller.repeats(2));
    assert_eq!(world.controller.written_again(&[1, 2, 3]), [], "it is written once");
    world.event(Event::Continues { task: 2, worker: "b".into(), run: Some(5) });
    world.event(Event::Gone { worker: "a".into() });
    world.event(Event::Ends { task: 2 });
    writes(&mut world, 1, "c", 8);
    let now = Continued { before: vec![ObjectId(7)], now: ObjectId(8), address: "c:1".into() };
    assert_eq!(world.controller.written_again(&[1]), [now]);
    assert_eq!(world.controller.continues(2, &"c".into()), None, "its thread is elsewhere");
    assert_eq!(world.controller.continues(2, &"b".into()), Some(5));
    world.event(Event::Begins { task: 2, worker: "b".into() });
    assert_eq!(world.controller.continues(2, &"b".into()), None, "it goes on");
    for task in 1..3 {
        world.event(Event::Ends { task });
        world.event(Event::ResultGone { task, wanted: false });
        world.event(Event::Forgotten { task });
    }
    assert!(!world.left().iter().any(|(what, _)| ["objects", "writers of streams"].contains(what)));
}

#[test]
fn a_thread_that_is_gone_waits_for_nothing() {
    let mut world = World::new(&["a", "b"]);
    (1..4).for_each(|task| world.task(task, "job", None));
    world.event(Event::Begins { task: 3, worker: "b".into() });
    world.event(Event::Continues { task: 3, worker: "b".into(), run: Some(5) });
    world.event(Event::Gone { worker: "b".into() });
    assert_eq!(world.controller.continues(3, &"b".into()), None);
    world.event(Event::Continues { task: 3, worker: "b".into(), run: Some(5) });
    assert_eq!(world.controller.continues(3, &"b".into()), None, "it has left");
    world.event(Event::Continues { task: 3, worker: "a".into(), run: Some(6) });
    world.event(Event::Continues { task: 3, worker: "b".into(), run: None });
    assert_eq!(world.controller.continues(3, &"a".into()), Some(6));
    world.event(Event::Continues { task: 3, worker: "a".into(), run: None });
    assert_eq!(world.controller.continues(3, &"a".into()), None, "it has given up");
    world.event(Event::Continues { task: 3, worker: "a".into(), run: Some(6) });
    world.event(Event::Forgotten { task: 3 });
    assert_eq!(world.controller.continues(3, &"a".into()), None);
}
