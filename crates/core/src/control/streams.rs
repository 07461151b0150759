//! Streams that tasks write: who writes each, and which objects of its inputs it needs.
//!
//! The result of a task that writes a stream is known before the task is over. So the engine may release its inputs,
//! and considers its worker idle, while the task still writes.
//!
//! When a stream is lost the engine takes back the tasks that read it, until its writer has begun again. If the writer
//! repeats the same data, their threads can continue: such a task is assigned to the worker where it ran
//! ([`Controller::repeats`]). Its thread reports that it waits ([`super::Event::Continues`]), before or after that. It
//! continues in the engine's run in which it began, with the location of the new stream ([`Controller::continues`],
//! [`Controller::written_again`]).

use super::objects::Holder;
use super::{Carried, Command, Controller};
use crate::types::{ObjectId, WorkerId};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Default)]
pub struct Streams {
    /// By task: the stream that its last run writes, and where.
    written: BTreeMap<u64, (ObjectId, WorkerId)>,
    begun: BTreeMap<u64, Begun>,
    /// Tasks whose threads wait until a stream that they read is written again: their worker, and the engine's run.
    continuing: BTreeMap<u64, (WorkerId, u64)>,
}

/// The streams that the runs of a task have begun.
#[derive(Default)]
struct Begun {
    /// The last one last.
    streams: Vec<ObjectId>,
    /// All runs write the same data.
    repeats: bool,
}

/// A stream that was written again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continued {
    /// What earlier runs of its writer had begun.
    pub before: Vec<ObjectId>,
    pub now: ObjectId,
    /// Of its writer's data plane.
    pub address: Arc<str>,
}

impl Streams {
    pub fn len(&self) -> usize {
        self.written.len() + self.begun.len() + self.continuing.len()
    }

    pub fn forget(&mut self, task: u64) {
        self.begun.remove(&task);
        self.continuing.remove(&task);
    }

    /// A task was given to a worker: nothing of it waits.
    pub fn begins(&mut self, task: u64) {
        self.continuing.remove(&task);
    }
}

impl Controller {
    pub(super) fn writes(
        &mut self,
        task: u64,
        worker: WorkerId,
        (stream, repeats): (ObjectId, bool),
        needs: Vec<Carried>,
        commands: &mut Vec<Command>,
    ) {
        // An earlier run's inputs may be needed again: hold them before releasing the old ones.
        let before = self.streams.written.insert(task, (stream, worker));
        let begun = self.streams.begun.entry(task).or_default();
        begun.repeats = repeats;
        if begun.streams.last() != Some(&stream) {
            begun.streams.push(stream);
        }
        let still = needs.iter().map(|own| own.object).collect();
        for Carried { object, owner, bytes, copies, .. } in needs {
            // An object without holders is already free, and its name is never reused.
            if self.objects.has(object) {
                let there = self.workers.contains_key(&owner);
                self.objects.hold(Holder::Needs(task), object, there.then_some(&owner), bytes, copies);
            }
        }
        if before.is_some() {
            let free = self.objects.release_of(Holder::Needs(task), &still);
            self.free(free, commands);
        }
    }

    /// A task is over that wrote this stream; another run of it may write another one by now.
    pub(super) fn wrote(&mut self, task: u64, stream: ObjectId, commands: &mut Vec<Command>) {
        if self.streams.written.get(&task).is_some_and(|(own, _)| *own == stream) {
            self.writes_no_more(task, commands);
        }
    }

    pub(super) fn writes_no_more(&mut self, task: u64, commands: &mut Vec<Command>) {
        if self.streams.written.remove(&task).is_some() {
            self.release(Holder::Needs(task), commands);
        }
    }

    /// A worker is gone, and its writers with it. A writer that runs again has recomputed inputs.
    pub(super) fn writers_gone(&mut self, worker: &WorkerId, commands: &mut Vec<Command>) {
        self.streams.continuing.retain(|_, (own, _)| own != worker);
        let gone = self.streams.written.iter().filter(|(_, (_, own))| own == worker).map(|(task, _)| *task);
        gone.collect::<Vec<_>>().into_iter().for_each(|task| self.writes_no_more(task, commands));
    }

    /// The thread of a task waits until a stream that it reads is written again.
    pub(super) fn waits(&mut self, task: u64, worker: WorkerId, run: Option<u64>) {
        let continuing = &mut self.streams.continuing;
        match run {
            Some(run) if self.workers.contains_key(&worker) => _ = continuing.insert(task, (worker, run)),
            None if continuing.get(&task).is_some_and(|(own, _)| *own == worker) => _ = continuing.remove(&task),
            _ => {}
        }
    }

    /// Whether a task writes the same stream each time it runs.
    pub fn repeats(&self, task: u64) -> bool {
        self.streams.begun.get(&task).is_some_and(|begun| begun.repeats)
    }

    /// The engine's run in which the thread of a task waits on this worker.
    pub fn continues(&self, task: u64, worker: &WorkerId) -> Option<u64> {
        self.streams.continuing.get(&task).filter(|(own, _)| own == worker).map(|(_, run)| *run)
    }

    /// Of the streams that these tasks have written, those that were written again.
    pub fn written_again(&self, writers: &[u64]) -> Vec<Continued> {
        let again = |writer: &u64| {
            let (now, before) = self.streams.begun.get(writer)?.streams.split_last()?;
            let worker = self.objects.whole(*now).first()?;
            let address = self.workers.get(worker)?.address.clone();
            (!before.is_empty()).then(|| Continued { before: before.to_vec(), now: *now, address })
        };
        writers.iter().filter_map(again).collect()
    }

    /// Workers on which a task writes a stream.
    pub fn writers(&self) -> Vec<WorkerId> {
        self.streams.written.values().map(|(_, worker)| worker.clone()).collect()
    }

    /// Whether a task's present result carries an object.
    pub fn is_carried(&self, task: u64, object: ObjectId) -> bool {
        self.objects.of(Holder::Result(task)).any(|own| own == object)
    }
}
