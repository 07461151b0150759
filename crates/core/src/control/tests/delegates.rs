//! Tasks that hand their result on.

use super::*;
use crate::random::SplitMix;

fn carried(object: u128, owner: &str) -> Carried {
    Carried { object: ObjectId(object), owner: owner.into(), parts: 1, bytes: 5, copies: 1 }
}

fn step(task: u64, objects: Vec<Carried>) -> Event {
    Event::Delegates { task, inputs: vec![], objects, alive: true }
}

#[test]
fn what_a_step_names_lives_until_the_next_one() {
    let mut world = World::new(&["a", "b"]);
    world.task(1, "job", None);
    world.event(step(1, vec![carried(7, "a"), carried(8, "b")]));
    // The next one hands one of them on.
    world.event(step(1, vec![carried(8, "b"), carried(9, "a")]));
    assert_eq!((world.heard("a").0, world.heard("b").0), (vec![7], vec![]));
    let chains = |world: &mut World| world.controller.status(None).jobs.remove(0).chains;
    assert_eq!(chains(&mut world), [ChainNow { task: 1, steps: 2, again: 0 }]);
    // The result carries the last one.
    world.carries(1, 9, "a");
    world.event(Event::DelegateEnds { task: 1, again: false });
    assert_eq!((world.heard("a").0, world.heard("b").0), (vec![], vec![8]));
    assert_eq!(chains(&mut world), []);
    world.event(Event::ResultGone { task: 1, wanted: false });
    assert_eq!(world.heard("a").0, [9]);
    world.event(Event::Forgotten { task: 1 });
    assert!(!world.left().iter().any(|(what, _)| ["objects", "tasks that delegated"].contains(what)));
}

#[test]
fn a_step_that_nobody_wants_frees_what_it_names() {
    let mut world = World::new(&["a"]);
    world.event(Event::Delegates { task: 5, inputs: vec![], objects: vec![carried(7, "a")], alive: false });
    assert_eq!(world.heard("a").0, [7]);
    assert!(world.left().is_empty());
}

#[test]
fn a_task_whose_step_lost_an_object_begins_again() {
    let mut world = World::new(&["a", "b"]);
    world.task(1, "job", None);
    world.event(step(1, vec![carried(7, "a"), carried(8, "b")]));
    assert_eq!(world.controller.lost_step(1), None);
    world.event(Event::Gone { worker: "a".into() });
    world.event(Event::Flush);
    assert_eq!(world.controller.lost_step(1), Some(LostStep::BeginAgain));
    assert_eq!(world.recompute, BTreeSet::from([1]));
    assert_eq!(world.heard("b"), (vec![], vec![7]));
    world.event(Event::DelegateEnds { task: 1, again: true });
    assert!(world.records.iter().any(|own| matches!(own, Record::Recomputed { task: 1, .. })));
    assert_eq!(world.heard("b").0, [8]);
    assert_eq!(world.controller.lost_step(1), None);
}

#[test]
fn a_task_that_comes_no_further_is_given_up() {
    let mut world = World::new(&["a", "b"]);
    world.task(1, "job", None);
    world.event(step(1, vec![]));
    world.event(Event::Gone { worker: "a".into() });
    // Its input was lost before, and another task puts it.
    let needs = || step(1, vec![carried(7, "a")]);
    for _ in 0..BEGINS_AGAIN_MAX {
        world.event(needs());
        assert_eq!(world.controller.lost_step(1), Some(LostStep::BeginAgain));
        world.event(Event::DelegateEnds { task: 1, again: true });
        world.event(step(1, vec![]));
    }
    assert!(!world.controller.is_furthest(1));
    world.event(needs());
    assert_eq!(world.controller.lost_step(1), Some(LostStep::GiveUp));
    // It comes further after all.
    world.event(step(1, vec![]));
    assert!(world.controller.is_furthest(1));
    world.event(needs());
    assert_eq!(world.controller.lost_step(1), Some(LostStep::BeginAgain));
}

#[test]
fn a_task_whose_end_was_lost_keeps_no_objects_once_it_is_forgotten() {
    let mut world = World::new(&["a"]);
    (1..4).for_each(|task| world.task(task, "job", None));
    for task in [1, 2] {
        world.event(Event::Begins { task, worker: "a".into() });
    }
    world.event(Event::Submitted { by: 2, tasks: vec![3] });
    world.carries(3, 7, "a");
    // The result is gone while both tasks run; the engine loses the end of the first one.
    world.event(Event::Forgotten { task: 3 });
    world.event(Event::Ends { task: 2 });
    world.event(Event::Forgotten { task: 2 });
    assert!(world.heard("a").0.is_empty(), "a task that ran then may still have the reference");
    world.event(Event::Forgotten { task: 1 });
    assert_eq!(world.heard("a").0, [7]);
    assert!(!world.left().iter().any(|(what, _)| ["objects", "holds"].contains(what)), "{:?}", world.left());
}

/// Whatever order things come in: nothing is left, and what is freed is what nothing names any more.
#[test]
fn nothing_is_left_of_chains() {
    let mut random = SplitMix(11);
    for _ in 0..200 {
        let mut world = World::new(&["a", "b"]);
        let mut named: BTreeMap<u64, BTreeSet<u128>> = BTreeMap::new();
        let mut next = 0;
        (1..4).for_each(|task| world.task(task, "job", None));
        for _ in 0..60 {
            let task = 1 + random.next() % 3;
            match random.next() % 4 {
                0 | 1 => {
                    let old = named.remove(&task).unwrap_or_default();
                    let mut new: BTreeSet<u128> =
                        old.iter().copied().filter(|_| random.next().is_multiple_of(2)).collect();
                    next += 1;
                    new.insert(next);
                    world.event(step(task, new.iter().map(|object| carried(*object, "a")).collect()));
                    let freed: BTreeSet<u128> = world.heard("a").0.into_iter().collect();
                    assert_eq!(freed, &old - &new);
                    named.insert(task, new);
                }
                2 => {
                    world.event(Event::DelegateEnds { task, again: random.next().is_multiple_of(2) });
                    let freed: BTreeSet<u128> = world.heard("a").0.into_iter().collect();
                    assert_eq!(freed, named.remove(&task).unwrap_or_default());
                }
                _ => drop(world.event(Event::Begins { task, worker: "b".into() })),
            }
        }
        (1..4).for_each(|task| drop(world.event(Event::Forgotten { task })));
        assert!(!world.left().iter().any(|(what, _)| ["objects", "tasks that delegated"].contains(what)));
    }
}
