//! Tasks that have delegated their result to a next step (CIEL's tail spawn: paper 001, 2.2 and table 4.2).
//!
//! The engine keeps the step's arguments. Core keeps the objects that they name alive until the next step or the
//! result, and decides whether the step can still run with them, and whether the task may start again if not.

use super::objects::Holder;
use super::{Carried, Command, Controller, Record, record};
use crate::mission;
use crate::types::ObjectId;
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// How often a task starts again without progress: its inputs may be lost permanently, or kill its workers.
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
    /// Restarts since its last progress.
    again: u32,
}

/// What to do with a task whose next step needs a lost object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostStep {
    BeginAgain,
    GiveUp,
}

/// A task that has handed its result on, and is not over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainNow {
    pub task: u64,
    /// Calls that it has delegated to since its last start.
    pub steps: u64,
    /// Restarts since its last progress.
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
        // Hold before releasing: the previous step may need the same objects.
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

    /// Whether a task's next step needs a lost object, and what to do then.
    pub fn lost_step(&self, task: u64) -> Option<LostStep> {
        let chain = self.delegates.chains.get(&task)?;
        let is_lost = |object: ObjectId| self.objects.whole(object).is_empty() && !self.doubts.has(object);
        let lost = self.objects.of(Holder::Step(task)).any(is_lost);
        lost.then_some(if chain.again < BEGINS_AGAIN_MAX { LostStep::BeginAgain } else { LostStep::GiveUp })
    }

    /// Whether a task is at its furthest step so far: earlier deaths of workers are no reason to give it up.
    pub fn is_furthest(&self, task: u64) -> bool {
        self.delegates.chains.get(&task).is_some_and(|chain| chain.steps == chain.furthest && chain.again == 0)
    }
}
