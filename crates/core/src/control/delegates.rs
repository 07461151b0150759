//! Tasks that have handed their result on to a next step (CIEL's tail spawn: paper 001, 2.2 and table 4.2).
//!
//! The engine keeps what the step is called with. Core keeps the objects that this names alive, until there is another step or
//! the result, and says whether the step can still have them.

use super::objects::Holder;
use super::{Carried, Command, Controller, Record, record};
use crate::mission;
use crate::types::ObjectId;
use crate::units::Time;
use std::collections::{BTreeMap, BTreeSet};

/// By task, while a step of it is to run or runs: how many there were.
#[derive(Default)]
pub struct Delegates {
    steps: BTreeMap<u64, u64>,
}

impl Delegates {
    pub fn len(&self) -> usize {
        self.steps.len()
    }
}

impl Controller {
    pub(super) fn delegates(
        &mut self,
        now: Time,
        task: u64,
        inputs: Vec<u64>,
        objects: Vec<Carried>,
        alive: bool,
        commands: &mut Vec<Command>,
    ) {
        let step = Holder::Step(task);
        let needed: BTreeSet<ObjectId> = objects.iter().map(|own| own.object).collect();
        // First, because the step before may need the same.
        self.hold_carried(now, task, step, objects, commands);
        if !alive {
            self.release(step, commands);
            return;
        }
        let free = self.objects.release_of(step, &needed);
        self.free(free, commands);
        *self.delegates.steps.entry(task).or_default() += 1;
        self.decide(now, mission::Event::TaskTakes { task, inputs }, commands);
    }

    pub(super) fn delegate_ends(&mut self, task: u64, again: bool, commands: &mut Vec<Command>) {
        if self.delegates.steps.remove(&task).is_none() {
            return;
        }
        if again {
            let job = self.jobs.of(task).cloned().unwrap_or_else(|| "unnamed".into());
            *self.recomputed.entry(job.clone()).or_default() += 1;
            commands.push(record(Record::Recomputed { job, task }));
        }
        self.release(Holder::Step(task), commands);
    }

    /// Whether a task's next step needs an object that nobody has any more: the task has to begin again.
    pub fn step_is_lost(&self, task: u64) -> bool {
        let lost = |object: ObjectId| self.objects.whole(object).is_empty() && !self.doubts.has(object);
        self.objects.of(Holder::Step(task)).any(lost)
    }
}
