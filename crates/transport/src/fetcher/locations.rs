//! Objects that have moved, and objects that are lost.

use super::{Active, Fetcher, Shared, State, runs};
use crate::object::ObjectId;
use crate::parts::Wanted;
use mission_core::host::fetches::{FetchError, FetchId};
use mission_core::host::process::Event;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;

/// Lost objects that are remembered: a task that asks for one of them runs again once it is recomputed.
const LOST_MAX: usize = 100_000;

impl Fetcher {
    /// Ends every fetch that still waits for an object which is known to be lost.
    pub fn lost(&self, objects: &[ObjectId], why: &str) {
        let mut state = self.shared.lock();
        for object in objects {
            if state.lost.insert(*object, why.to_owned()).is_none() {
                state.lost_first.push_back(*object);
            }
        }
        while state.lost.len() > LOST_MAX
            && let Some(oldest) = state.lost_first.pop_front()
        {
            state.lost.remove(&oldest);
        }
        let lost: HashSet<&ObjectId> = objects.iter().collect();
        let hit = |active: &Active| active.far.iter().any(|far| lost.contains(&far.object));
        let hit: Vec<_> = state.fetches.iter().filter(|(_, active)| hit(active)).map(|(id, _)| *id).collect();
        for fetch in hit {
            let error = FetchError::Lost(why.to_owned());
            self.shared.handle(&mut state, Event::Abandon { fetch, error });
        }
    }

    /// Sets who has these objects, best first: they lie elsewhere than their references say. Active fetches of them
    /// continue there.
    pub fn locations(&self, locations: Vec<(ObjectId, Vec<SocketAddr>)>) {
        if locations.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        let state = &mut *state;
        state.locations.extend(locations.iter().cloned());
        let locations: HashMap<ObjectId, Vec<SocketAddr>> = locations.into_iter().collect();
        let fetches: Vec<FetchId> = state.fetches.keys().copied().collect();
        for fetch in fetches {
            self.shared.found(state, fetch, &locations);
        }
    }

    /// An object is freed: nobody asks where it lies.
    pub fn forget_location(&self, object: &ObjectId) {
        self.shared.lock().locations.remove(object);
    }

    /// Which of these are known to be lost.
    pub fn known_lost(&self, objects: &[ObjectId]) -> Vec<ObjectId> {
        let state = self.shared.lock();
        objects.iter().filter(|object| state.lost.contains_key(*object)).copied().collect()
    }
}

impl Shared {
    /// Where each object lies, if that is not where its reference says. Each process starts with a different one of
    /// several sources.
    pub(super) fn look_up(&self, parts: &mut [Wanted]) {
        let state = self.lock();
        if state.locations.is_empty() {
            return;
        }
        for wanted in parts {
            if let Some(at) = state.locations.get(&wanted.object).filter(|at| !at.is_empty()) {
                wanted.addresses.clone_from(at);
                let first = usize::from(self.own_address.port() ^ u16::from(wanted.object.0[0])) % at.len();
                wanted.addresses.rotate_left(first);
            }
        }
    }

    /// Adds sources that have the objects of a fetch.
    pub(super) fn found(&self, state: &mut State, fetch: FetchId, locations: &HashMap<ObjectId, Vec<SocketAddr>>) {
        let Some(active) = state.fetches.get_mut(&fetch) else { return };
        let mut new = Vec::new();
        for (piece, far) in (0..).zip(&mut active.far) {
            for address in locations.get(&far.object).into_iter().flatten() {
                if !far.sources.contains(address) {
                    far.sources.push(*address);
                    new.push((piece, *address));
                }
            }
        }
        let job = active.transfer.job.clone();
        let planned = match state.plans.get(&job) {
            Some(Ok(planned)) => planned.clone(),
            _ => active.planned.clone(),
        };
        if !new.is_empty() {
            self.reaches(state, fetch, self.context.numbers.group_of(&job), &planned);
        }
        let (mut pieces, mut one_run) = (Vec::with_capacity(new.len()), BTreeSet::new());
        for (piece, address) in new {
            let source = state.source(address);
            pieces.push((piece, source));
            if runs::has_one_run(&planned, address) {
                one_run.insert(source);
            }
        }
        if !pieces.is_empty() {
            self.handle(state, Event::Found { fetch, pieces, one_run });
        }
    }
}
