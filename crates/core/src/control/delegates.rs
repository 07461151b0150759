//! Tasks that have handed their result on to a next step (CIEL's tail spawn: paper 001, 2.2 and table 4.2).
//!
//! The engine keeps what the step is called with. Core keeps the objects that this names alive, until there is another step or
//! the result. It says whether the step can still have them, and whether the task may begin again if not.

use super::objects::Holder;
use super::{Carried, Command, Controller, Record, record};
use crate::mission;
use crate::types::ObjectId;
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// So often a task begins again without coming further than before: what it needs may be gone for good, or kill its workers.
pub const BEGINS_AGAIN_MAX: u32 = 5;

/// By task, while a step of it is to run or runs.
#[derive(Default)]
pub struct Delegates {
    chains: BTreeMap<u64, Chain>,
}

/// Steps are counted since the task began, the last time.
#[derive(Default)]
struct Chain {
    steps: u64,
    furthest: u64,
    /// How often it began again since it came further than ever.
    again: u32,
}

/// What to do with a task whose next step needs an object that nobody has any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostStep {
    BeginAgain,
    GiveUp,
}

/// A task that has handed its result on, and is not over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainNow {
    pub task: u64,
    /// How many calls it has handed its result on to, since it began the last time.
    pub steps: u64,
    /// How often it began again since it came further than ever.
    pub again: u32,
}

impl Delegates {
    pub fn len(&self) -> usize {
        self.chains.len()
    }

    /// The chains that run, in the order of their tasks.
    pub fn now(&self) -> impl Iterator<Item = ChainNow> {
        self.chains.iter().map(|(task, own)| ChainNow { task: *task, steps: own.steps, again: own.again })
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
        let chain = self.delegates.chains.entry(task).or_default();
        chain.steps += 1;
        if chain.steps > chain.furthest {
            (chain.furthest, chain.again) = (chain.steps, 0);
        }
        self.decide(now, mission::Event::TaskTakes { task, inputs }, commands);
    }

    pub(super) fn delegate_ends(&mut self, task: u64, again: bool, commands: &mut Vec<Command>) {
        let Some(chain) = self.delegates.chains.get_mut(&task) else { return };
        if again {
            (chain.steps, chain.again) = (0, chain.again + 1);
            let job = self.jobs.of(task).cloned().unwrap_or_else(|| "unnamed".into());
            *self.recomputed.entry(job.clone()).or_default() += 1;
            commands.push(record(Record::Recomputed { job, task }));
        } else {
            self.delegates.chains.remove(&task);
        }
        self.release(Holder::Step(task), commands);
    }

    /// Whether a task's next step needs an object that nobody has any more, and what to do then.
    pub fn lost_step(&self, task: u64) -> Option<LostStep> {
        let chain = self.delegates.chains.get(&task)?;
        let is_lost = |object: ObjectId| self.objects.whole(object).is_empty() && !self.doubts.has(object);
        let lost = self.objects.of(Holder::Step(task)).any(is_lost);
        lost.then_some(if chain.again < BEGINS_AGAIN_MAX { LostStep::BeginAgain } else { LostStep::GiveUp })
    }

    /// Whether a task has never come further than now: workers that died earlier are no reason to give it up.
    pub fn is_furthest(&self, task: u64) -> bool {
        self.delegates.chains.get(&task).is_some_and(|chain| chain.steps == chain.furthest && chain.again == 0)
    }
}
