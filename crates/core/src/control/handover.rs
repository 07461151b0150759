//! Workers copy objects from one another: what only a leaving worker has, and what several workers are to have.
//!
//! First the source puts a manifest, an object with the sizes of the others ([`Message::describe`]). Then each target fetches
//! the manifest and the objects ([`Message::take`]), and keeps them under the same names. When a target has an object,
//! all workers receive its location ([`Message::locations`]).

use super::objects::{Holder, Objects};
use super::{Command, Controller, Message, Record, record};
use crate::defaults::HAND_OVER_WITHIN;
use crate::types::{Demands, JobId, ObjectId, WorkerId};
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Where objects that are handed over go to, as the transfers of their jobs are called.
pub const HAND_OVER: &str = "hand-over";
/// A worker that could not take an object is asked again after this: there may be room by then.
pub const TRY_AGAIN: Duration = Duration::from_secs(5);
/// A target that neither answers nor receives bytes for this long is replaced by others. Far longer than a fetch waits
/// for its next bytes, so its process hangs.
pub const SILENT: Duration = Duration::from_secs(60);

/// A manifest may always have this length: it is padded so that it can be mapped (`SHARED_MIN` of the data plane).
pub const MANIFEST_MIN: u64 = 64 << 10;

/// Bytes that an object of so many parts may take in a manifest: its name, its protection, and a number for each part.
fn manifest_bytes_max(parts: u32) -> u64 {
    128 + 21 * u64::from(parts)
}

/// What a worker shall describe: objects of one job, so that their manifest has the same protection as they have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Describe {
    pub job: JobId,
    pub objects: Vec<ObjectId>,
}

/// What a worker shall take from another: objects of one job, under their names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Take {
    pub job: JobId,
    /// What the job demands of its transfers, for workers without its plan.
    pub demands: Demands,
    /// Where both the manifest and the objects lie.
    pub from: Arc<str>,
    pub manifest: ObjectId,
    pub manifest_bytes: u64,
    /// With the bytes of each, as reported when it was put: an object of another size is not taken under its name.
    pub objects: Vec<(ObjectId, u64)>,
}

/// A worker has put the requested manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Described {
    pub job: JobId,
    pub manifest: ObjectId,
    pub bytes: u64,
}

/// A worker has all of an object that it was asked to take or to keep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Taken {
    pub object: ObjectId,
    /// Of the [`Take`]; absent: it was asked to keep the object.
    pub manifest: Option<ObjectId>,
}

/// A worker could not take or keep an object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Untaken {
    pub object: ObjectId,
    /// As in [`Taken`].
    pub manifest: Option<ObjectId>,
    pub why: String,
}

#[derive(Default)]
pub struct Handover {
    leaving: BTreeMap<WorkerId, Leaving>,
    /// What each source shall describe, by job, and for which targets.
    described: BTreeMap<WorkerId, BTreeMap<JobId, Asked>>,
    /// By their manifests.
    batches: BTreeMap<ObjectId, Batch>,
    /// When each target was last asked, answered, or received bytes.
    heard: BTreeMap<WorkerId, Time>,
    /// Targets that are taking an object.
    taking: BTreeMap<ObjectId, BTreeSet<WorkerId>>,
    /// Unanswered requests to take, by their manifests. A request stays when its source is gone: the target may already
    /// have all of the object.
    unanswered: BTreeSet<(ObjectId, ObjectId, WorkerId)>,
    /// Workers that could not take an object.
    untaken: BTreeMap<ObjectId, BTreeSet<WorkerId>>,
    /// When they are asked again.
    again: Option<Time>,
    /// [`Command::Soon`] was sent for this.
    soon: bool,
}

#[derive(Default)]
struct Asked {
    /// The objects, and their targets.
    objects: Vec<(ObjectId, WorkerId)>,
    /// The longest possible manifest of it.
    longest: u64,
}

struct Leaving {
    /// When it was informed, or one of its objects last arrived somewhere.
    progress_at: Time,
    objects: usize,
    bytes: u64,
    gave_up: bool,
    /// Why an object was not taken, if one was not.
    why: Option<String>,
}

struct Batch {
    source: WorkerId,
    /// Open requests: targets that have not answered for an object.
    open: BTreeSet<(ObjectId, WorkerId)>,
}

impl Handover {
    /// How many requests are open.
    pub fn len(&self) -> usize {
        let takes = self.batches.len() + self.taking.len() + self.unanswered.len() + self.untaken.len();
        self.described.len() + takes + self.heard.len()
    }

    pub fn is_leaving(&self, worker: &WorkerId) -> bool {
        self.leaving.contains_key(worker)
    }

    fn is_busy(&self, source: &WorkerId) -> bool {
        self.described.contains_key(source) || self.batches.values().any(|batch| batch.source == *source)
    }

    /// A worker's open requests: manifests, and objects.
    fn open_of(&self, worker: &WorkerId) -> Vec<(ObjectId, ObjectId)> {
        let open = self.batches.iter().flat_map(|(manifest, batch)| batch.open.iter().map(move |own| (manifest, own)));
        open.filter(|(_, (_, target))| target == worker).map(|(manifest, (object, _))| (*manifest, *object)).collect()
    }

    /// Whether a worker has open requests.
    fn is_taking(&self, worker: &WorkerId) -> bool {
        self.batches.values().any(|batch| batch.open.iter().any(|(_, target)| target == worker))
    }

    fn is_untaken(&self, object: ObjectId, worker: &WorkerId) -> bool {
        self.untaken.get(&object).is_some_and(|workers| workers.contains(worker))
    }

    /// A worker no longer takes an object.
    fn stop_taking(&mut self, object: ObjectId, worker: &WorkerId) {
        if let Some(workers) = self.taking.get_mut(&object) {
            workers.remove(worker);
            if workers.is_empty() {
                self.taking.remove(&object);
            }
        }
    }

    fn stop_describing(&mut self, source: &WorkerId, job: Option<&JobId>) -> Vec<(ObjectId, WorkerId)> {
        let Some(own) = self.described.get_mut(source) else { return Vec::new() };
        let stopped = own.extract_if(.., |other, _| job.is_none_or(|job| other == job));
        let stopped: Vec<_> = stopped.flat_map(|(_, asked)| asked.objects).collect();
        if own.is_empty() {
            self.described.remove(source);
        }
        stopped.iter().for_each(|(object, target)| self.stop_taking(*object, target));
        stopped
    }
}

impl Controller {
    /// Whether a leaving worker still has to wait: others have to take its objects first.
    pub fn is_handing_over(&self, worker: &WorkerId) -> bool {
        let waits = self.handover.leaving.get(worker).is_some_and(|leaving| !leaving.gave_up);
        waits && (self.handover.is_busy(worker) || self.objects.has_alone(worker))
    }

    /// A worker is going to leave: it receives no more objects, and others take those that only it has.
    pub(super) fn leaving(&mut self, now: Time, worker: &WorkerId, commands: &mut Vec<Command>) {
        if !self.workers.contains_key(worker) || self.handover.leaving.contains_key(worker) {
            return;
        }
        let leaving = Leaving { progress_at: now, objects: 0, bytes: 0, gave_up: false, why: None };
        self.handover.leaving.insert(worker.clone(), leaving);
        self.hand_over(now, commands);
    }

    /// The worker does not leave after all.
    pub(super) fn stays(&mut self, worker: &WorkerId) {
        self.handover.leaving.remove(worker);
    }

    /// Asks sources for manifests of the objects that others shall take.
    pub(super) fn hand_over(&mut self, now: Time, commands: &mut Vec<Command>) {
        let mut wanted: BTreeMap<WorkerId, BTreeMap<JobId, Asked>> = BTreeMap::new();
        let mut room: Option<BTreeMap<WorkerId, u64>> = None;
        let alone = self.handover.leaving.iter().filter(|(_, leaving)| !leaving.gave_up);
        let alone: BTreeSet<ObjectId> = alone
            .filter(|(worker, _)| !self.handover.is_busy(worker))
            .flat_map(|(worker, _)| self.objects.only_at(worker).into_iter().map(|(object, _)| object))
            .collect();
        let more = self.objects.wanting().filter(|object| !alone.contains(object));
        let all: Vec<ObjectId> = alone.iter().copied().chain(more).collect();
        for object in all {
            let whole = self.objects.whole(object);
            let staying = whole.iter().filter(|worker| !self.handover.leaving.contains_key(*worker));
            let have = staying.clone().count() + self.handover.taking.get(&object).map_or(0, BTreeSet::len);
            let free = |worker: &&WorkerId| !self.handover.is_busy(worker);
            let Some(source) = staying.chain(whole).find(free).cloned() else { continue };
            let room = room.get_or_insert_with(|| {
                let staying = self.workers.keys().filter(|worker| !self.handover.leaving.contains_key(*worker));
                staying.map(|worker| (worker.clone(), self.objects.bytes_at(worker))).collect()
            });
            for _ in have..self.objects.copies(object) as usize {
                let Some(target) = self.target(object, room) else { break };
                *room.get_mut(&target).expect("it was chosen from there") += self.objects.bytes(object);
                self.handover.taking.entry(object).or_default().insert(target.clone());
                let job = self.objects.needed_by(object).find_map(|task| self.jobs.of(task)).cloned();
                let of_source = wanted.entry(source.clone()).or_default();
                let asked = of_source.entry(job.unwrap_or_else(|| "unnamed".into())).or_default();
                asked.objects.push((object, target));
                asked.longest += manifest_bytes_max(self.objects.part_count(object));
            }
        }
        for (source, asked) in wanted {
            let describe = asked.iter().map(|(job, asked)| {
                let objects: BTreeSet<ObjectId> = asked.objects.iter().map(|(object, _)| *object).collect();
                Describe { job: job.clone(), objects: objects.into_iter().collect() }
            });
            let message = Message { describe: describe.collect(), ..Message::default() };
            self.handover.described.insert(source.clone(), asked);
            self.tell(&source, message.into(), commands);
        }
        self.give_up(now, commands);
    }

    /// Chooses the target of an object: if several copies are wanted, first a worker on a host without one; then one
    /// that keeps parts of it; then the one with the fewest bytes. Not a worker that could not take it just now.
    fn target(&self, object: ObjectId, room: &BTreeMap<WorkerId, u64>) -> Option<WorkerId> {
        let whole = self.objects.whole(object);
        let taking = self.handover.taking.get(&object);
        let has = |worker: &WorkerId| whole.contains(worker) || taking.is_some_and(|all| all.contains(worker));
        let several = self.objects.copies(object) > 1;
        let on_host = |worker: &WorkerId| {
            let host = &self.workers[worker].host;
            let all = whole.iter().chain(taking.into_iter().flatten());
            several && all.filter_map(|other| self.workers.get(other)).any(|other| other.host == *host)
        };
        let free = room.iter().filter(|(worker, _)| !has(worker) && !self.handover.is_untaken(object, worker));
        let best = free.min_by_key(|(worker, bytes)| (on_host(worker), !self.objects.keeps(object, worker), **bytes));
        best.map(|(worker, _)| worker.clone())
    }

    /// A source has described its objects: asks the targets to take them.
    pub(super) fn described(
        &mut self,
        now: Time,
        source: &WorkerId,
        described: Described,
        commands: &mut Vec<Command>,
    ) {
        let Described { job, manifest, bytes: manifest_bytes } = described;
        let longest = self
            .handover
            .described
            .get(source)
            .and_then(|own| own.get(&job))
            .map_or(0, |own| own.longest)
            .max(MANIFEST_MIN);
        let asked = self.handover.stop_describing(source, Some(&job));
        if manifest_bytes > longest {
            // Its reader would allocate memory for it first. No worker shall take these before `TRY_AGAIN`.
            for (object, _) in asked.into_iter().filter(|(object, _)| self.objects.has(*object)) {
                self.handover.untaken.entry(object).or_default().extend(self.workers.keys().cloned());
            }
            self.handover.again.get_or_insert(now + TRY_AGAIN);
            if let Some(leaving) = self.handover.leaving.get_mut(source) {
                leaving.why =
                    Some(format!("{source} described its objects in {manifest_bytes} bytes; the limit is {longest}"));
            }
            let free = Message { free: vec![manifest], ..Message::default() };
            return self.tell(source, free.into(), commands);
        }
        let mut takes: BTreeMap<WorkerId, Vec<(ObjectId, u64)>> = BTreeMap::new();
        let mut open = BTreeSet::new();
        for (object, target) in asked {
            let goes = self.workers.contains_key(&target) && !self.handover.leaving.contains_key(&target);
            if !goes || !self.objects.has(object) {
                continue;
            }
            takes.entry(target.clone()).or_default().push((object, self.objects.bytes(object)));
            self.handover.taking.entry(object).or_default().insert(target.clone());
            self.handover.unanswered.insert((manifest, object, target.clone()));
            open.insert((object, target));
        }
        let Some(from) = self.workers.get(source).map(|joined| joined.address.clone()) else { return };
        if open.is_empty() {
            let free = Message { free: vec![manifest], ..Message::default() };
            return self.tell(source, free.into(), commands);
        }
        for target in takes.keys() {
            if !self.handover.is_taking(target) {
                self.handover.heard.insert(target.clone(), now);
            }
        }
        self.handover.batches.insert(manifest, Batch { source: source.clone(), open });
        let demands = self.jobs.spec(&job).map(|spec| spec.demands).unwrap_or_default();
        for (target, objects) in takes {
            let take = Take { job: job.clone(), demands, from: from.clone(), manifest, manifest_bytes, objects };
            self.tell(&target, Message { take: vec![take], ..Message::default() }.into(), commands);
        }
    }

    /// A worker's answers about objects that it was asked to take.
    pub(super) fn took(
        &mut self,
        now: Time,
        worker: &WorkerId,
        took: Vec<Taken>,
        untaken: Vec<Untaken>,
        commands: &mut Vec<Command>,
    ) {
        if took.is_empty() && untaken.is_empty() {
            return;
        }
        self.handover.heard.entry(worker.clone()).and_modify(|heard| *heard = now);
        let batches = self.handover.batches.len();
        let (mut free, mut moved) = (Vec::new(), Vec::new());
        for Taken { object, manifest } in took {
            let was_asked = match manifest {
                Some(manifest) => self.handover.unanswered.remove(&(manifest, object, worker.clone())),
                None => self.doubts.asks(object, worker),
            };
            let source = manifest.and_then(|manifest| self.answered(manifest, object, worker, commands));
            if !was_asked && self.objects.whole(object).contains(worker) {
                continue;
            }
            // Without this check, a worker could claim objects that others put.
            if !was_asked || !self.objects.replicated(object, worker) {
                free.push(object); // or it was freed while it came
                continue;
            }
            self.is_certain(object);
            moved.push(object);
            let bytes = self.objects.bytes(object);
            if let Some(leaving) = source.and_then(|source| self.handover.leaving.get_mut(&source)) {
                (leaving.progress_at, leaving.objects, leaving.bytes) =
                    (now, leaving.objects + 1, leaving.bytes + bytes);
            }
        }
        for Untaken { object, manifest, why } in untaken {
            let Some(manifest) = manifest else {
                self.keeps_not(now, worker, object, commands);
                continue;
            };
            self.handover.unanswered.remove(&(manifest, object, worker.clone()));
            // Else its source is gone, or it was passed over; it may be about to take it from another.
            let Some(source) = self.answered(manifest, object, worker, commands) else { continue };
            if let Some(leaving) = self.handover.leaving.get_mut(&source) {
                leaving.why = Some(format!("{worker}: {why}"));
            }
            if self.objects.has(object) {
                self.handover.untaken.entry(object).or_default().insert(worker.clone());
                self.handover.again.get_or_insert(now + TRY_AGAIN);
            }
        }
        if !free.is_empty() {
            self.free(BTreeMap::from([(worker.clone(), free)]), commands);
        }
        self.tell_locations(moved, commands);
        if self.handover.batches.len() < batches {
            self.hand_over(now, commands);
        }
    }

    /// Bytes arrive at a target: its sources make progress.
    pub(super) fn hand_over_moves(&mut self, now: Time, target: &WorkerId) {
        let Handover { batches, leaving, heard, .. } = &mut self.handover;
        heard.entry(target.clone()).and_modify(|heard| *heard = now);
        for batch in batches.values().filter(|batch| batch.open.iter().any(|(_, worker)| worker == target)) {
            if let Some(leaving) = leaving.get_mut(&batch.source) {
                leaving.progress_at = now;
            }
        }
    }

    /// The set of objects to hand over has changed; several changes are handled together.
    pub(super) fn hand_over_soon(&mut self, commands: &mut Vec<Command>) {
        if !std::mem::replace(&mut self.handover.soon, true) {
            commands.push(Command::Soon);
        }
    }

    /// A worker has answered for an object that it was asked to take; returns its source, if the answer was awaited.
    fn answered(
        &mut self,
        manifest: ObjectId,
        object: ObjectId,
        worker: &WorkerId,
        commands: &mut Vec<Command>,
    ) -> Option<WorkerId> {
        let batch = self.handover.batches.get_mut(&manifest)?;
        if !batch.open.remove(&(object, worker.clone())) {
            return None;
        }
        let (source, over) = (batch.source.clone(), batch.open.is_empty());
        self.handover.stop_taking(object, worker);
        if !self.handover.is_taking(worker) {
            self.handover.heard.remove(worker);
        }
        if over {
            self.handover.batches.remove(&manifest);
            let free = Message { free: vec![manifest], ..Message::default() };
            self.tell(&source, free.into(), commands);
        }
        Some(source)
    }

    /// A worker is gone: it takes nothing and gives nothing.
    pub(super) fn hand_over_without(&mut self, now: Time, worker: &WorkerId, commands: &mut Vec<Command>) {
        if let Some(leaving) = self.handover.leaving.remove(worker)
            && leaving.objects > 0
        {
            let (objects, bytes) = (leaving.objects, leaving.bytes);
            commands.push(record(Record::HandedOver { worker: worker.clone(), objects, bytes }));
        }
        self.handover.stop_describing(worker, None);
        self.handover.heard.remove(worker);
        self.handover.unanswered.retain(|(_, _, target)| target != worker);
        for (manifest, object) in self.handover.open_of(worker) {
            self.answered(manifest, object, worker, commands);
        }
        let gone: Vec<ObjectId> = self
            .handover
            .batches
            .iter()
            .filter(|(_, own)| own.source == *worker)
            .map(|(manifest, _)| *manifest)
            .collect();
        for manifest in gone {
            let batch = self.handover.batches.remove(&manifest).expect("it was just there");
            batch.open.iter().for_each(|(object, target)| self.handover.stop_taking(*object, target));
        }
        let Handover { batches, heard, .. } = &mut self.handover;
        heard.retain(|worker, _| batches.values().any(|batch| batch.open.iter().any(|(_, target)| target == worker)));
        for workers in self.handover.untaken.values_mut() {
            workers.remove(worker);
        }
        self.handover.untaken.retain(|_, workers| !workers.is_empty());
        self.hand_over(now, commands);
    }

    /// Retries workers that could not take an object, and lets a worker leave whose objects no other can take.
    pub(super) fn hand_over_again(&mut self, now: Time, commands: &mut Vec<Command>) {
        self.handover.soon = false;
        self.pass_over_silent(now, commands);
        if self.handover.again.is_some_and(|again| now >= again) {
            self.handover.again = None;
            self.handover.untaken.clear();
        }
        if self.shall_hand_over() {
            self.hand_over(now, commands);
        }
    }

    /// Replaces silent targets by others. A late answer still counts.
    fn pass_over_silent(&mut self, now: Time, commands: &mut Vec<Command>) {
        let silent = self.handover.heard.extract_if(.., |_, heard| now.since(*heard) >= SILENT);
        for worker in silent.map(|(worker, _)| worker).collect::<Vec<_>>() {
            for (manifest, object) in self.handover.open_of(&worker) {
                let source = self.answered(manifest, object, &worker, commands);
                if let Some(leaving) = source.and_then(|source| self.handover.leaving.get_mut(&source)) {
                    leaving.why = Some(format!("{worker} did not answer for {} s", SILENT.as_secs()));
                }
                if self.objects.has(object) {
                    self.handover.untaken.entry(object).or_default().insert(worker.clone());
                    self.handover.again.get_or_insert(now + SILENT);
                }
            }
        }
    }

    /// Whether there may be objects to hand over.
    pub(super) fn shall_hand_over(&self) -> bool {
        self.handover.leaving.values().any(|leaving| !leaving.gave_up) || self.objects.wanting().next().is_some()
    }

    /// Leaving workers wait only for a limited time; objects that only they have are recomputed.
    fn give_up(&mut self, now: Time, commands: &mut Vec<Command>) {
        let stays = self.workers.keys().any(|worker| !self.handover.leaving.contains_key(worker));
        let leaving: Vec<WorkerId> = self.handover.leaving.keys().cloned().collect();
        let busy: BTreeSet<WorkerId> = leaving.into_iter().filter(|worker| self.handover.is_busy(worker)).collect();
        for (worker, leaving) in &mut self.handover.leaving {
            let late = now.since(leaving.progress_at) >= HAND_OVER_WITHIN;
            if leaving.gave_up || (stays && !late) {
                continue;
            }
            let alone = self.objects.only_at(worker);
            if alone.is_empty() && !busy.contains(worker) {
                leaving.progress_at = now; // what is still to come from it counts anew
                continue;
            }
            leaving.gave_up = true;
            if alone.is_empty() {
                continue; // somebody else's copy is awaited, which others can give
            }
            let why = leaving.why.clone().unwrap_or_else(|| "no other worker with a data plane stays".into());
            let (objects, bytes) = (alone.len(), alone.iter().map(|(_, bytes)| bytes).sum());
            commands.push(record(Record::NotHandedOver { worker: worker.clone(), objects, bytes, why }));
        }
    }

    /// Sends the locations of these objects to all workers.
    pub(super) fn tell_locations(&mut self, objects: Vec<ObjectId>, commands: &mut Vec<Command>) {
        let locations = self.locations(objects);
        if !locations.is_empty() {
            self.tell_all(Message { locations, ..Message::default() }, commands);
        }
    }

    /// The addresses that have each object: first workers that stay.
    pub(super) fn locations(&self, objects: Vec<ObjectId>) -> Vec<(ObjectId, Vec<Arc<str>>)> {
        let location = |object: ObjectId| {
            let mut whole: Vec<&WorkerId> = self.objects.whole(object).iter().collect();
            whole.sort_by_key(|worker| self.handover.leaving.contains_key(*worker));
            let at: Vec<_> =
                whole.into_iter().filter_map(|worker| Some(self.workers.get(worker)?.address.clone())).collect();
            (!at.is_empty()).then_some((object, at))
        };
        objects.into_iter().filter_map(location).collect()
    }
}

impl Objects {
    /// The tasks whose results carry an object, or whose next steps name it.
    pub fn needed_by(&self, object: ObjectId) -> impl Iterator<Item = u64> {
        self.holders(object).filter_map(|holder| match holder {
            Holder::Result(task) | Holder::Step(task) => Some(task),
            Holder::Hold(_) | Holder::Needs(_) => None,
        })
    }
}
