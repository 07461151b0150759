//! How long the objects of a task's children live: as long as the tasks that may pass them on.
//!
//! Tasks of one worker share a client, so whichever of them runs there when a child's result goes may have its reference. A
//! hold lasts until all tasks that ran on some workers when it began are done. Tasks and holds are numbered as they begin;
//! a hold ends on a worker with the last task there that has a lower number. So a task that begins or ends, and a hold, each
//! cost the same however many there are.

use crate::types::WorkerId;
use std::collections::{BTreeMap, VecDeque};

#[derive(Default)]
pub struct Holds {
    next: u64,
    /// Where a task runs, and its number there. Several where it was stolen: its first worker may not know that yet.
    places: BTreeMap<u64, Vec<(WorkerId, u64)>>,
    workers: BTreeMap<WorkerId, Running>,
    /// On how many workers each hold has not ended.
    left: BTreeMap<u64, usize>,
}

/// What runs on one worker.
#[derive(Default)]
struct Running {
    /// Tasks by their numbers.
    tasks: BTreeMap<u64, u64>,
    /// Holds by their numbers, oldest first.
    holds: VecDeque<u64>,
}

impl Holds {
    /// A task is given to a worker, or to another one.
    pub fn begin(&mut self, task: u64, worker: &WorkerId) {
        let places = self.places.entry(task).or_default();
        if let Some(at) = places.iter().position(|(own, _)| own == worker) {
            // Stolen, and stolen back: it runs where it was given last.
            let place = places.remove(at);
            return places.push(place);
        }
        places.push((worker.clone(), self.next));
        self.workers.entry(worker.clone()).or_default().tasks.insert(self.next, task);
        self.next += 1;
    }

    /// A task is done, or was taken away; gives the holds that are over.
    pub fn end(&mut self, task: u64) -> Vec<u64> {
        let mut over = Vec::new();
        for (worker, number) in self.places.remove(&task).into_iter().flatten() {
            let own = self.workers.get_mut(&worker).expect("the task runs there");
            own.tasks.remove(&number);
            let oldest = own.tasks.keys().next().copied().unwrap_or(u64::MAX);
            while let Some(hold) = own.holds.pop_front_if(|hold| *hold < oldest) {
                let left = self.left.get_mut(&hold).expect("it has not ended here");
                *left -= 1;
                if *left == 0 {
                    self.left.remove(&hold);
                    over.push(hold);
                }
            }
            if own.tasks.is_empty() {
                self.workers.remove(&worker);
            }
        }
        over
    }

    /// Until all tasks that run on these workers now are done; `None` if there are none.
    pub fn hold<'a>(&mut self, workers: impl IntoIterator<Item = &'a WorkerId>) -> Option<u64> {
        let hold = self.next;
        let mut busy = 0;
        for worker in workers {
            if let Some(own) = self.workers.get_mut(worker) {
                own.holds.push_back(hold);
                busy += 1;
            }
        }
        if busy == 0 {
            return None;
        }
        self.next += 1;
        self.left.insert(hold, busy);
        Some(hold)
    }

    /// Where a task runs, as far as is known.
    pub fn worker_of(&self, task: u64) -> Option<&WorkerId> {
        self.places.get(&task)?.last().map(|(worker, _)| worker)
    }

    /// Tasks that run, and holds that have not ended.
    pub fn len(&self) -> usize {
        self.places.len() + self.workers.len() + self.left.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;
    use std::collections::BTreeSet;

    fn worker(name: &str) -> WorkerId {
        name.into()
    }

    #[test]
    fn a_hold_ends_with_the_last_task_that_ran_when_it_began() {
        let mut holds = Holds::default();
        for (task, name) in [(1, "one"), (2, "one"), (3, "two"), (4, "three")] {
            holds.begin(task, &worker(name));
        }
        let both = holds.hold(&[worker("one"), worker("two")]).unwrap();
        let one = holds.hold(&[worker("one")]).unwrap();
        holds.begin(5, &worker("one"));
        assert_eq!(holds.hold(&[worker("nowhere")]), None);
        assert!(holds.end(2).is_empty() && holds.end(4).is_empty());
        assert_eq!(holds.end(1), [one], "a task that began later holds nothing");
        assert_eq!(holds.end(3), [both]);
        assert!(holds.end(5).is_empty() && holds.end(6).is_empty() && holds.len() == 0);
    }

    #[test]
    fn a_task_that_was_stolen_holds_what_its_new_worker_submitted() {
        let mut holds = Holds::default();
        holds.begin(1, &worker("one"));
        holds.begin(1, &worker("two"));
        let hold = holds.hold(&[worker("two")]).unwrap();
        assert_eq!(holds.end(1), [hold]);
        // And back again.
        ["one", "two", "one"].into_iter().for_each(|name| holds.begin(1, &worker(name)));
        assert_eq!(holds.worker_of(1), Some(&worker("one")));
        assert!(holds.end(1).is_empty());
        assert_eq!(holds.len(), 0);
    }

    #[test]
    fn every_hold_ends_once_and_never_too_early() {
        for seed in 0..200 {
            let mut random = SplitMix(seed);
            let mut holds = Holds::default();
            let mut running: BTreeMap<u64, WorkerId> = BTreeMap::new();
            let mut waits: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
            for step in 0..300 {
                let any = ["x", "y", "z"][(random.next() % 3) as usize];
                match random.next() % 5 {
                    0 | 1 => {
                        running.insert(step, worker(any));
                        holds.begin(step, &worker(any));
                    }
                    2 | 3 if !running.is_empty() => {
                        let task = *running.keys().nth(random.next() as usize % running.len()).unwrap();
                        running.remove(&task);
                        waits.values_mut().for_each(|tasks| _ = tasks.remove(&task));
                        let over: Vec<u64> =
                            waits.iter().filter(|(_, tasks)| tasks.is_empty()).map(|(hold, _)| *hold).collect();
                        let mut said = holds.end(task);
                        said.sort_unstable();
                        assert_eq!(said, over, "seed {seed}, step {step}");
                        waits.retain(|_, tasks| !tasks.is_empty());
                    }
                    _ => {
                        let workers: Vec<WorkerId> =
                            ["x", "y", "z"].into_iter().filter(|name| *name != any).map(worker).collect();
                        let beside: BTreeSet<u64> =
                            running.iter().filter(|(_, own)| workers.contains(own)).map(|(task, _)| *task).collect();
                        let hold = holds.hold(&workers);
                        assert_eq!(hold.is_none(), beside.is_empty());
                        waits.extend(hold.map(|hold| (hold, beside)));
                    }
                }
            }
        }
    }
}
