//! The directory of objects: which results carry an object, which workers have it, and when it is free or lost.
//!
//! An object lives as long as something carries a reference to it: the result of a task, or a hold for tasks whose results
//! are not known yet. One or more workers have all of it: the one that put it, and replicas. Workers that received parts of
//! it in a broadcast keep those as copies. Copies are not replicas.

use super::{Carried, Command, Controller, Message};
use crate::mission;
use crate::types::{ObjectId, WorkerId};
use crate::units::Time;
use std::collections::{BTreeMap, BTreeSet};

/// What keeps an object alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// The result of a task.
    Result(u64),
    /// Tasks that may still hand its reference on.
    Hold(u64),
    /// A task that writes a stream.
    Needs(u64),
    /// The next step of a task that handed its result on.
    Step(u64),
}

/// Objects by the worker to inform of them.
pub type ByWorker = BTreeMap<WorkerId, Vec<ObjectId>>;

#[derive(Default)]
pub struct Objects {
    objects: BTreeMap<ObjectId, Object>,
    held: BTreeMap<Holder, BTreeSet<ObjectId>>,
    /// Objects of each worker, whole or in part.
    at: BTreeMap<WorkerId, BTreeSet<ObjectId>>,
    /// Objects with fewer replicas than wanted.
    wanting: BTreeSet<ObjectId>,
    /// Objects that lie elsewhere than their references say.
    moved: BTreeSet<ObjectId>,
    /// Those of them that became free since the last call.
    freed_moved: BTreeSet<ObjectId>,
}

struct Object {
    bytes: u64,
    part_count: Option<u32>,
    /// Wanted number of replicas.
    copies: u32,
    /// A stream: no other worker can have it.
    stays: bool,
    /// Workers that have all of it, in the order in which they got it.
    whole: Vec<WorkerId>,
    /// Workers that keep parts of it.
    parts: BTreeSet<WorkerId>,
    holders: BTreeSet<Holder>,
}

/// What was lost with a worker.
#[derive(Debug, Default, PartialEq)]
pub struct Lost {
    /// Objects without a whole replica.
    pub objects: Vec<ObjectId>,
    /// Objects that others have, and who: fetches go there from now on.
    pub elsewhere: Vec<(ObjectId, WorkerId)>,
}

impl Objects {
    /// Adds a holder of an object's reference. The object lies whole with `owner`, unless that is gone. `copies`:
    /// wanted number of replicas; 0: a stream, which stays where it is written.
    pub fn hold(&mut self, holder: Holder, object: ObjectId, owner: Option<&WorkerId>, bytes: u64, copies: u32) {
        let own = self.objects.entry(object).or_insert_with(|| Object {
            bytes: 0,
            part_count: None,
            copies: 1,
            stays: copies == 0,
            whole: Vec::new(),
            parts: BTreeSet::new(),
            holders: BTreeSet::new(),
        });
        own.copies = own.copies.max(copies);
        if own.bytes == 0 {
            own.bytes = bytes; // who carries it first says so
        }
        if let Some(owner) = owner.filter(|_| own.whole.is_empty()) {
            own.whole.push(owner.clone());
            self.at.entry(owner.clone()).or_default().insert(object);
        }
        own.holders.insert(holder);
        self.held.entry(holder).or_default().insert(object);
        self.look(object);
    }

    /// Whether an object needs more replicas.
    fn look(&mut self, object: ObjectId) {
        // A lost object cannot be replicated.
        let lacks = |own: &Object| !own.whole.is_empty() && own.whole.len() < own.copies as usize;
        if self.objects.get(&object).is_some_and(lacks) {
            self.wanting.insert(object);
        } else {
            self.wanting.remove(&object);
        }
    }

    /// A worker keeps parts of an object; false if the object is gone.
    pub fn copied(&mut self, object: ObjectId, worker: &WorkerId) -> bool {
        let Some(own) = self.objects.get_mut(&object) else { return false };
        if !own.whole.contains(worker) {
            own.parts.insert(worker.clone());
            self.at.entry(worker.clone()).or_default().insert(object);
        }
        true
    }

    /// A worker has all of an object now; false if the object is gone.
    pub fn replicated(&mut self, object: ObjectId, worker: &WorkerId) -> bool {
        let Some(own) = self.objects.get_mut(&object) else { return false };
        own.parts.remove(worker);
        if !own.whole.contains(worker) {
            own.whole.push(worker.clone());
        }
        self.at.entry(worker.clone()).or_default().insert(object);
        self.moved.insert(object);
        self.look(object);
        true
    }

    /// Sets the number of an object's parts: the first reference has it.
    pub fn has_parts(&mut self, object: ObjectId, count: u32) {
        if let Some(own) = self.objects.get_mut(&object) {
            own.part_count.get_or_insert(count);
        }
    }

    /// The objects that a holder holds, each with a worker that has it whole, if one has.
    pub fn held_by(&self, holder: Holder) -> Vec<(ObjectId, Option<WorkerId>)> {
        let held = self.held.get(&holder).into_iter().flatten();
        held.map(|object| (*object, self.objects[object].whole.first().cloned())).collect()
    }

    /// Whether there is such an object.
    pub fn has(&self, object: ObjectId) -> bool {
        self.objects.contains_key(&object)
    }

    pub fn holds(&self, holder: Holder) -> bool {
        self.held.contains_key(&holder)
    }

    /// A holder is gone; returns the objects without holders, by each worker that has parts of them.
    pub fn release(&mut self, holder: Holder) -> ByWorker {
        self.release_of(holder, &BTreeSet::new())
    }

    /// A holder releases all but these; returns the objects without holders, by each worker that has parts of them.
    pub fn release_of(&mut self, holder: Holder, but: &BTreeSet<ObjectId>) -> ByWorker {
        let mut free = ByWorker::new();
        let held = self.held.remove(&holder).unwrap_or_default();
        let (kept, gone): (BTreeSet<_>, BTreeSet<_>) = held.into_iter().partition(|object| but.contains(object));
        if !kept.is_empty() {
            self.held.insert(holder, kept);
        }
        for object in gone {
            let own = self.objects.get_mut(&object).expect("it is held");
            own.holders.remove(&holder);
            if own.holders.is_empty() {
                let own = self.objects.remove(&object).expect("it was there");
                self.wanting.remove(&object);
                if self.moved.remove(&object) {
                    self.freed_moved.insert(object);
                }
                for worker in own.whole.into_iter().chain(own.parts) {
                    self.leave(&worker, object);
                    free.entry(worker).or_default().push(object);
                }
            }
        }
        free
    }

    /// A worker is gone, with its objects. A lost object stays known as long as a result carries it: the engine reports
    /// the end of that.
    pub fn worker_gone(&mut self, worker: &WorkerId) -> Lost {
        let mut lost = Lost::default();
        for object in self.at.remove(worker).into_iter().flatten() {
            let own = self.objects.get_mut(&object).expect("it lies there");
            own.parts.remove(worker);
            let Some(place) = own.whole.iter().position(|other| other == worker) else { continue };
            own.whole.remove(place);
            let own = &self.objects[&object];
            match own.whole.first() {
                Some(other) => lost.elsewhere.push((object, other.clone())),
                None => lost.objects.push(object),
            }
            self.look(object);
        }
        lost
    }

    /// Whole objects that only this worker has, largest first, with their bytes: it has to hand them over before it
    /// leaves. Not streams: they are written again.
    pub fn only_at(&self, worker: &WorkerId) -> Vec<(ObjectId, u64)> {
        let at = self.at.get(worker).into_iter().flatten();
        let only = at.filter(|object| self.is_alone(**object, worker));
        let mut found: Vec<(ObjectId, u64)> = only.map(|object| (*object, self.objects[object].bytes)).collect();
        found.sort_by_key(|(object, bytes)| (std::cmp::Reverse(*bytes), *object));
        found
    }

    /// Whether only this worker has some object that can be replicated.
    pub fn has_alone(&self, worker: &WorkerId) -> bool {
        let mut at = self.at.get(worker).into_iter().flatten();
        at.any(|object| self.is_alone(*object, worker))
    }

    fn is_alone(&self, object: ObjectId, worker: &WorkerId) -> bool {
        let own = &self.objects[&object];
        !own.stays && own.whole == [worker.clone()]
    }

    /// Objects with fewer replicas than wanted.
    pub fn wanting(&self) -> impl Iterator<Item = ObjectId> {
        self.wanting.iter().copied()
    }

    /// Objects that lie elsewhere than their references say.
    pub fn moved(&self) -> impl Iterator<Item = ObjectId> {
        self.moved.iter().copied()
    }

    /// Relocated objects that became free since the last call.
    pub fn freed_moved(&mut self) -> BTreeSet<ObjectId> {
        std::mem::take(&mut self.freed_moved)
    }

    /// Workers that have all of an object, in the order in which they got it.
    pub fn whole(&self, object: ObjectId) -> &[WorkerId] {
        self.objects.get(&object).map_or(&[], |own| &own.whole)
    }

    /// Whether a worker keeps parts of an object.
    pub fn keeps(&self, object: ObjectId, worker: &WorkerId) -> bool {
        self.objects.get(&object).is_some_and(|own| own.parts.contains(worker))
    }

    /// Objects of a holder.
    pub fn of(&self, holder: Holder) -> impl Iterator<Item = ObjectId> {
        self.held.get(&holder).into_iter().flatten().copied()
    }

    /// Mean bytes of a part of an object.
    pub fn bytes_of_part(&self, object: ObjectId) -> u64 {
        self.objects.get(&object).map_or(0, |own| own.bytes / u64::from(own.part_count.unwrap_or(1).max(1)))
    }

    pub fn part_count(&self, object: ObjectId) -> u32 {
        self.objects.get(&object).and_then(|own| own.part_count).unwrap_or(0)
    }

    /// Workers that keep parts of an object.
    pub fn keepers(&self, object: ObjectId) -> impl Iterator<Item = &WorkerId> {
        self.objects.get(&object).into_iter().flat_map(|own| &own.parts)
    }

    pub fn bytes(&self, object: ObjectId) -> u64 {
        self.objects.get(&object).map_or(0, |own| own.bytes)
    }

    /// Wanted replicas of an object.
    pub fn copies(&self, object: ObjectId) -> u32 {
        self.objects.get(&object).map_or(0, |own| own.copies)
    }

    pub fn holders(&self, object: ObjectId) -> impl Iterator<Item = Holder> {
        self.objects.get(&object).into_iter().flat_map(|own| own.holders.iter().copied())
    }

    /// Bytes of whole objects with each worker.
    pub fn bytes_at(&self, worker: &WorkerId) -> u64 {
        let at = self.at.get(worker).into_iter().flatten();
        at.map(|object| &self.objects[object]).filter(|own| own.whole.contains(worker)).map(|own| own.bytes).sum()
    }

    pub fn len(&self) -> usize {
        self.objects.len()
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    fn leave(&mut self, worker: &WorkerId, object: ObjectId) {
        if let Some(at) = self.at.get_mut(worker) {
            at.remove(&object);
            if at.is_empty() {
                self.at.remove(worker);
            }
        }
    }
}

impl Controller {
    pub(super) fn carries(
        &mut self,
        now: Time,
        task: u64,
        objects: Vec<Carried>,
        alive: bool,
        commands: &mut Vec<Command>,
    ) {
        self.hold_carried(now, task, Holder::Result(task), objects, commands);
        if !alive {
            self.release(Holder::Result(task), commands);
        }
    }

    /// A task has put these objects, or received their references; they shall live as long as a holder of the task.
    pub(super) fn hold_carried(
        &mut self,
        now: Time,
        task: u64,
        holder: Holder,
        objects: Vec<Carried>,
        commands: &mut Vec<Command>,
    ) {
        let mut shared = false;
        for Carried { object, owner, parts, bytes, copies } in objects {
            shared |= copies > 1 || self.handover.is_leaving(&owner);
            let put = mission::Event::Put { task, parts };
            self.decide(now, put, commands);
            let there = self.workers.contains_key(&owner);
            self.objects.hold(holder, object, there.then_some(&owner), bytes, copies);
            self.objects.has_parts(object, parts);
            if self.objects.whole(object).is_empty() && !self.doubts.has(object) {
                self.lose(&format!("worker {owner} left"), [object], commands);
            }
        }
        if shared {
            self.hand_over_soon(commands);
        }
    }

    /// The tasks that submitted this one may return its references: they live until their own results are known.
    pub(super) fn hold_for_submitters(&mut self, task: u64) {
        // If an object's owner is gone, others may have all parts.
        let doubts = &self.doubts;
        let mut carried = self.objects.held_by(Holder::Result(task));
        carried.retain(|(object, owner)| owner.is_some() || doubts.has(*object));
        let Some(workers) = self.submitted_on.get(&task).filter(|_| !carried.is_empty()) else { return };
        if let Some(hold) = self.holds.hold(workers) {
            for (object, owner) in carried {
                self.objects.hold(Holder::Hold(hold), object, owner.as_ref(), 0, 1);
            }
        }
    }

    pub(super) fn release(&mut self, holder: Holder, commands: &mut Vec<Command>) {
        let free = self.objects.release(holder);
        self.free(free, commands);
    }

    pub(super) fn free(&mut self, free: ByWorker, commands: &mut Vec<Command>) {
        let freed = free.values().flatten().copied().collect::<Vec<_>>();
        freed.into_iter().for_each(|object| self.is_certain(object));
        let moved = self.objects.freed_moved();
        if !moved.is_empty() {
            // All workers know where they lie.
            self.tell_all(Message { free: moved.iter().copied().collect(), ..Message::default() }, commands);
        }
        for (worker, mut objects) in free {
            objects.retain(|object| !moved.contains(object));
            if !objects.is_empty() {
                self.tell(&worker, Message { free: objects, ..Message::default() }.into(), commands);
            }
        }
    }

    /// Lost objects: a copy of a result that carries them may still be in transit.
    pub(super) fn lose(&mut self, why: &str, objects: impl IntoIterator<Item = ObjectId>, commands: &mut Vec<Command>) {
        let mut objects = objects.into_iter().peekable();
        if objects.peek().is_none() {
            return;
        }
        if self.lost.is_empty() {
            // One message for all of them: the engine reports lost results one by one.
            commands.push(Command::Soon);
        }
        self.lost.entry(why.to_owned()).or_default().extend(objects);
    }

    pub(super) fn tell_lost(&mut self, commands: &mut Vec<Command>) {
        for (why, objects) in std::mem::take(&mut self.lost) {
            self.tell_all(Message { lost: objects.into_iter().collect(), why, ..Message::default() }, commands);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;

    fn id(number: u128) -> ObjectId {
        ObjectId(number)
    }

    fn worker(number: u64) -> WorkerId {
        format!("w{number}").into()
    }

    #[test]
    fn an_object_lives_as_long_as_something_carries_it() {
        let mut objects = Objects::default();
        objects.hold(Holder::Result(1), id(7), Some(&worker(1)), 100, 1);
        objects.hold(Holder::Hold(1), id(7), Some(&worker(1)), 100, 1);
        assert!(objects.copied(id(7), &worker(2)) && !objects.copied(id(8), &worker(2)));
        assert!(objects.release(Holder::Result(1)).is_empty());
        assert_eq!(objects.held_by(Holder::Hold(1)), [(id(7), Some(worker(1)))]);
        assert_eq!(
            objects.release(Holder::Hold(1)),
            ByWorker::from([(worker(1), vec![id(7)]), (worker(2), vec![id(7)])])
        );
        assert!(objects.is_empty() && objects.at.is_empty() && objects.held.is_empty());
    }

    #[test]
    fn what_a_holder_still_needs_stays() {
        let mut objects = Objects::default();
        for object in [1, 2] {
            objects.hold(Holder::Result(1), id(object), Some(&worker(1)), 10, 1);
            objects.hold(Holder::Needs(2), id(object), Some(&worker(1)), 10, 1);
        }
        assert!(objects.release(Holder::Result(1)).is_empty());
        let free = objects.release_of(Holder::Needs(2), &BTreeSet::from([id(2)]));
        assert_eq!(free, ByWorker::from([(worker(1), vec![id(1)])]));
        assert_eq!(objects.release(Holder::Needs(2)), ByWorker::from([(worker(1), vec![id(2)])]));
        assert!(objects.is_empty() && objects.held.is_empty());
    }

    #[test]
    fn what_one_worker_had_alone_is_lost_with_it() {
        let mut objects = Objects::default();
        for (task, object) in [(1, 11), (1, 12), (2, 12), (3, 13)] {
            objects.hold(Holder::Result(task), id(object), Some(&worker(1)), 10, 1);
        }
        // A stream is no matter of others.
        objects.hold(Holder::Result(4), id(14), Some(&worker(1)), 0, 0);
        assert!(objects.only_at(&worker(1)).iter().all(|(object, _)| *object != id(14)));
        objects.release(Holder::Result(4));
        // A copy of some parts replaces nothing; a replica does.
        objects.copied(id(11), &worker(2));
        assert!(objects.replicated(id(13), &worker(3)));
        assert_eq!(objects.only_at(&worker(1)), [(id(11), 10), (id(12), 10)]);
        let lost = objects.worker_gone(&worker(1));
        assert_eq!(lost.objects, [id(11), id(12)]);
        assert_eq!(objects.needed_by(id(12)).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(lost.elsewhere, [(id(13), worker(3))]);
        assert_eq!(objects.held_by(Holder::Result(1)), [(id(11), None), (id(12), None)]);
        assert_eq!(objects.held_by(Holder::Result(3)), [(id(13), Some(worker(3)))]);
        // The copy is freed with the results that carried the lost object.
        assert_eq!(objects.release(Holder::Result(1)), ByWorker::from([(worker(2), vec![id(11)])]));
    }

    /// Invariant: an object exists exactly while it has a holder, and every worker that has parts of it is informed
    /// when it is free.
    #[test]
    fn nothing_is_left_and_nobody_is_forgotten() {
        let mut random = SplitMix(5);
        for _ in 0..200 {
            let mut objects = Objects::default();
            let mut held: BTreeMap<Holder, BTreeSet<ObjectId>> = BTreeMap::new();
            let mut locations: BTreeSet<(ObjectId, WorkerId)> = BTreeSet::new();
            for _ in 0..200 {
                let object = id(u128::from(random.next() % 10));
                let by = worker(random.next() % 5);
                let holder = if random.next().is_multiple_of(2) {
                    Holder::Result(random.next() % 6)
                } else {
                    Holder::Hold(random.next() % 3)
                };
                let there = held.values().any(|all| all.contains(&object));
                match random.next() % 6 {
                    0 | 1 => {
                        let whole = objects.objects.get(&object).is_some_and(|own| !own.whole.is_empty());
                        objects.hold(holder, object, Some(&by), 1, 1);
                        held.entry(holder).or_default().insert(object);
                        if !whole {
                            locations.insert((object, by));
                        }
                    }
                    2 => {
                        assert_eq!(objects.copied(object, &by), there);
                        if there {
                            locations.insert((object, by));
                        }
                    }
                    3 => {
                        assert_eq!(objects.replicated(object, &by), there);
                        if there {
                            locations.insert((object, by));
                        }
                    }
                    4 => {
                        let before: BTreeSet<ObjectId> = held.remove(&holder).unwrap_or_default();
                        let free = objects.release(holder);
                        let mut told: BTreeSet<(ObjectId, WorkerId)> = BTreeSet::new();
                        for (worker, all) in free {
                            told.extend(all.into_iter().map(|object| (object, worker.clone())));
                        }
                        let gone = |object: &ObjectId| {
                            before.contains(object) && !held.values().any(|all| all.contains(object))
                        };
                        let expected: BTreeSet<_> =
                            locations.iter().filter(|(object, _)| gone(object)).cloned().collect();
                        assert_eq!(told, expected);
                        locations.retain(|(object, _)| !gone(object));
                    }
                    _ => {
                        let lost = objects.worker_gone(&by);
                        locations.retain(|(_, worker)| *worker != by);
                        assert!(lost.objects.iter().all(|object| objects.objects[object].whole.is_empty()));
                        assert!(lost.elsewhere.iter().all(|location| locations.contains(location)));
                    }
                }
                assert_eq!(objects.len(), held.values().flatten().collect::<BTreeSet<_>>().len());
            }
            held.keys().for_each(|holder| _ = objects.release(*holder));
            assert!(objects.is_empty() && objects.held.is_empty() && objects.at.is_empty());
        }
    }
}
