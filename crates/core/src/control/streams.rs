//! Streams that tasks write: who writes each, and which objects of its inputs it needs.
//!
//! The result of a task that writes a stream is known before the task is over. So the engine may release its inputs, and takes
//! its worker for idle, while it still writes.

use super::objects::Holder;
use super::{Carried, Command, Controller};
use crate::types::{ObjectId, WorkerId};
use std::collections::BTreeMap;

/// By task: the stream that its last run writes, and where.
#[derive(Default)]
pub struct Streams {
    written: BTreeMap<u64, (ObjectId, WorkerId)>,
}

impl Streams {
    pub fn len(&self) -> usize {
        self.written.len()
    }
}

impl Controller {
    pub(super) fn writes(
        &mut self,
        task: u64,
        worker: WorkerId,
        stream: ObjectId,
        needs: Vec<Carried>,
        commands: &mut Vec<Command>,
    ) {
        // What an earlier run needed may be needed again: it is held before that is let go.
        let before = self.streams.written.insert(task, (stream, worker));
        let still = needs.iter().map(|own| own.object).collect();
        for Carried { object, owner, bytes, copies, .. } in needs {
            // What nobody holds any more is free already, and its name never comes again.
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

    /// A worker is gone, and its writers with it. Who runs again begins from inputs that are made again.
    pub(super) fn writers_gone(&mut self, worker: &WorkerId, commands: &mut Vec<Command>) {
        let gone = self.streams.written.iter().filter(|(_, (_, own))| own == worker).map(|(task, _)| *task);
        gone.collect::<Vec<_>>().into_iter().for_each(|task| self.writes_no_more(task, commands));
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
