//! The owner of a broadcast is gone: a worker with all parts keeps the object.

use super::*;

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
    /// Objects that a worker is asked to keep, and that are reported to it as lost.
    fn keeps(&mut self, worker: &str) -> (Vec<Keep>, Vec<u128>) {
        let all = self.sent.remove(worker).unwrap_or_default();
        let keep = all.iter().flat_map(|message| message.keep.clone()).collect();
        (keep, all.iter().flat_map(|message| message.lost.iter().map(|id| id.0)).collect())
    }

    pub(super) fn keeps_not(&mut self, worker: &str) {
        let untaken =
            vec![Untaken { object: ObjectId(11), manifest: None, why: "some of its parts are missing".into() }];
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
    // The engine recomputes it itself: a worker that waits for the old one is informed.
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
