//! Objects whose last owner is gone, while other workers have parts of them from a broadcast: one that has all parts keeps
//! the object.
//!
//! The controller asks these workers one after another. Until one of them has all parts, the object is in doubt: no worker is
//! informed that it is lost, and its tasks do not run again.

use super::{Command, Controller, Message};
use crate::types::{ObjectId, WorkerId};
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// How long an answer may take: a worker with all parts copies them once. Then the next one is asked.
pub const DOUBT: Duration = Duration::from_secs(5);
/// Limit for all answers together.
pub const DOUBT_ALL: Duration = Duration::from_secs(15);

/// An object that a worker shall keep whole, if it has all of its parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Keep {
    pub object: ObjectId,
    pub parts: u32,
}

#[derive(Default)]
pub struct Doubts {
    all: BTreeMap<ObjectId, Doubt>,
}

struct Doubt {
    /// Why it would be lost.
    why: String,
    until: Time,
    all_until: Time,
    asked: WorkerId,
    /// Workers to ask next.
    others: VecDeque<WorkerId>,
}

impl Doubts {
    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn has(&self, object: ObjectId) -> bool {
        self.all.contains_key(&object)
    }

    /// Whether this worker is asked for it now.
    pub fn asks(&self, object: ObjectId, worker: &WorkerId) -> bool {
        self.all.get(&object).is_some_and(|doubt| doubt.asked == *worker)
    }
}

impl Controller {
    /// The owner of these objects is gone: asks the workers that keep parts of them. Returns the objects without any
    /// parts.
    pub(super) fn doubt(
        &mut self,
        now: Time,
        why: &str,
        objects: Vec<ObjectId>,
        commands: &mut Vec<Command>,
    ) -> Vec<ObjectId> {
        let mut asks: BTreeMap<WorkerId, Vec<Keep>> = BTreeMap::new();
        let mut lost = Vec::new();
        for object in objects {
            let keeps = |worker: &&WorkerId| self.workers.contains_key(*worker);
            let mut others: VecDeque<WorkerId> = self.objects.keepers(object).filter(keeps).cloned().collect();
            let Some(asked) = others.pop_front() else {
                lost.push(object);
                continue;
            };
            asks.entry(asked.clone()).or_default().push(self.keep(object));
            let doubt = Doubt { why: why.to_owned(), until: now + DOUBT, all_until: now + DOUBT_ALL, asked, others };
            self.doubts.all.insert(object, doubt);
        }
        for (worker, keep) in asks {
            self.tell(&worker, Message { keep, ..Message::default() }.into(), commands);
        }
        lost
    }

    fn keep(&self, object: ObjectId) -> Keep {
        Keep { object, parts: self.objects.part_count(object) }
    }

    /// A worker has it whole, or it has no holders any more.
    pub(super) fn is_certain(&mut self, object: ObjectId) {
        self.doubts.all.remove(&object);
    }

    /// A worker does not have all of an object: the next one is asked, if there is one.
    pub(super) fn keeps_not(&mut self, now: Time, worker: &WorkerId, object: ObjectId, commands: &mut Vec<Command>) {
        let Some(doubt) = self.doubts.all.get_mut(&object).filter(|doubt| doubt.asked == *worker) else { return };
        while let Some(next) = doubt.others.pop_front() {
            if self.workers.contains_key(&next) {
                (doubt.asked, doubt.until) = (next.clone(), now + DOUBT);
                let message = Message { keep: vec![self.keep(object)], ..Message::default() };
                return self.tell(&next, message.into(), commands);
            }
        }
        self.lose_doubtful(BTreeSet::from([object]), commands);
    }

    /// Gives up objects without an answer in time, or whose asked worker is gone.
    pub(super) fn doubt_no_longer(&mut self, now: Time, gone: Option<&WorkerId>, commands: &mut Vec<Command>) {
        let over = self.doubts.all.iter().filter(|(_, doubt)| now >= doubt.all_until);
        let over: BTreeSet<ObjectId> = over.map(|(object, _)| *object).collect();
        self.lose_doubtful(over, commands);
        // A late answer is refused: the next worker was asked by then.
        let unanswered = |doubt: &Doubt| now >= doubt.until || gone == Some(&doubt.asked);
        let asked = self.doubts.all.iter().filter(|(_, doubt)| unanswered(doubt));
        let asked: Vec<_> = asked.map(|(object, doubt)| (*object, doubt.asked.clone())).collect();
        asked.into_iter().for_each(|(object, worker)| self.keeps_not(now, &worker, object, commands));
    }

    fn lose_doubtful(&mut self, objects: BTreeSet<ObjectId>, commands: &mut Vec<Command>) {
        let mut tasks = BTreeSet::new();
        for object in objects {
            let Some(doubt) = self.doubts.all.remove(&object) else { continue };
            tasks.extend(self.objects.needed_by(object));
            self.lose(&doubt.why, [object], commands);
        }
        if !tasks.is_empty() {
            commands.push(Command::Recompute { tasks });
        }
    }
}
