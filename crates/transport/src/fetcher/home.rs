//! The parts that this host has already: in this process, or in one that gives leases on them.

use super::caller::Caller;
use super::{Shared, addressable, no_memory};
use crate::carrier::shm::{LeaseDenied, LeasedPart, WantedOf, map_all};
use crate::clock::lasting;
use crate::object::ObjectId;
use crate::parts::{FetchRequest, Home, Part, Wanted};
use crate::segment::Segment;
use crate::store::Object;
use mission_core::defaults::PROGRESS_TIMEOUT;
use mission_core::flight::{FlightPlan, Leg, Reach};
use mission_core::host::fetches::FetchError;
use mission_core::report::Negotiated;
use mission_core::types::Transport;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Retry interval while an owner is silent and there is no other source.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Where a part is when a fetch begins.
pub(super) enum Found {
    Here(Part),
    /// In the spool of another process of this host.
    Spooled(LeasedPart),
    /// It has to be fetched, or copied from this process's spool.
    Elsewhere,
}

impl Found {
    pub(super) fn is_elsewhere(&self) -> bool {
        matches!(self, Found::Elsewhere)
    }
}

/// Of each object that may lie on this host, which parts are wanted: places in the request.
type Near = BTreeMap<ObjectId, Vec<usize>>;

/// What was leased of an object, and what to record if that was a transfer just now.
type Taken<T> = (Vec<T>, Option<Negotiated>);

impl Shared {
    /// Where each part is.
    pub(super) fn at_home(
        &self,
        request: &FetchRequest,
        plan: &FlightPlan,
        caller: &Caller<'_>,
    ) -> Result<Vec<Found>, FetchError> {
        let memory = shared_memory(plan);
        let mut found = Vec::with_capacity(request.parts.len());
        let mut near = Near::new();
        for (number, wanted) in request.parts.iter().enumerate() {
            let here = if self.owns(wanted) {
                let object = self.own(wanted)?;
                let in_memory = object.in_memory(wanted.part).filter(|(segment, ..)| !segment.has_writers());
                in_memory.map(|(segment, start, len)| Part {
                    home: Home::Own(segment.clone()),
                    start: start as usize,
                    len: len as usize,
                })
            } else {
                let copy = self.copy_at_home(wanted);
                if copy.is_none() && memory.is_some() && wanted.len > 0 {
                    near.entry(wanted.object).or_default().push(number);
                }
                copy
            };
            found.push(here.map_or(Found::Elsewhere, Found::Here));
        }
        let take = |leased: Vec<LeasedPart>| {
            if !leased[0].is_memory() {
                return Ok((leased.into_iter().map(Found::Spooled).collect(), None));
            }
            let parts = map_all(&leased).map_err(LeaseDenied::Refused)?;
            let part = |(lease, start, len)| Found::Here(Part { home: Home::Borrowed(lease), start, len });
            Ok((parts.into_iter().map(part).collect(), Some(leased[0].negotiated())))
        };
        self.nearby(request, plan, &near, caller, take, |number, part| found[number] = part)?;
        Ok(found)
    }

    /// Copies each part that is on this host into a segment of its own; `None`: it has to be fetched.
    pub(super) fn copied_at_home(
        &self,
        request: &FetchRequest,
        plan: &FlightPlan,
        caller: &Caller<'_>,
    ) -> Result<Vec<Option<Segment>>, FetchError> {
        let memory = shared_memory(plan);
        let taken = |len| self.pool.take_for_result(addressable(len)?).map_err(|error| no_memory(len, &error));
        let mut near = Near::new();
        let mut segments = Vec::with_capacity(request.parts.len());
        for (number, wanted) in request.parts.iter().enumerate() {
            let mut segment = None;
            if wanted.len == 0 || self.owns(wanted) {
                let mut own = taken(wanted.len)?;
                if wanted.len > 0 {
                    self.copy_own(wanted, own.bytes_mut())?;
                }
                segment = Some(own);
            } else if let Some(copy) = self.copy_at_home(wanted) {
                let mut own = taken(wanted.len)?;
                own.bytes_mut().copy_from_slice(copy.bytes());
                segment = Some(own);
            } else if memory.is_some() {
                near.entry(wanted.object).or_default().push(number);
            }
            segments.push(segment);
        }
        let take = |leased: Vec<LeasedPart>| {
            let copy = |part: &LeasedPart| {
                let mut own = taken(part.size()).map_err(|error| LeaseDenied::Refused(error.to_string()))?;
                part.copy(own.bytes_mut(), || caller.gives_up()).map_err(LeaseDenied::Refused)?;
                Ok(own)
            };
            let copied: Result<Vec<Segment>, LeaseDenied> = leased.iter().map(copy).collect();
            Ok((copied?, Some(leased[0].negotiated())))
        };
        self.nearby(request, plan, &near, caller, take, |number, segment| segments[number] = Some(segment))?;
        Ok(segments)
    }

    /// Leases what other processes of this host have. What none of them leases is left to fetch, unless the job demands
    /// shared memory.
    fn nearby<T>(
        &self,
        request: &FetchRequest,
        plan: &FlightPlan,
        near: &Near,
        caller: &Caller<'_>,
        take: impl Fn(Vec<LeasedPart>) -> Result<Taken<T>, LeaseDenied>,
        mut give: impl FnMut(usize, T),
    ) -> Result<(), FetchError> {
        let Some(leg) = shared_memory(plan).filter(|_| !near.is_empty()) else { return Ok(()) };
        let elsewhere = plan.legs.iter().any(|leg| leg.reach == Reach::Anywhere);
        let answers = self.ask_owners(request, near, leg, caller, &take);
        caller.waits()?;
        for (object, taken) in answers {
            let parts = match taken {
                Err(_) if elsewhere => continue,
                Err(denied) => {
                    let one = Near::from([(object, near[&object].clone())]);
                    let ask = || self.ask_owners(request, &one, leg, caller, &take).remove(&object);
                    self.insist(denied, object, caller, || ask().unwrap_or(Err(LeaseDenied::Elsewhere)))?
                }
                Ok(parts) => parts,
            };
            near[&object].iter().zip(parts).for_each(|(number, part)| give(*number, part));
        }
        Ok(())
    }

    /// Leases an object of a job that demands shared memory: retries until its owner answers. The message that a worker
    /// has left comes later than its sockets break, and a reported loss has the object recomputed.
    ///
    /// # Errors
    /// The object is lost, its owner refuses, or it is silent for [`PROGRESS_TIMEOUT`].
    fn insist<T>(
        &self,
        mut denied: LeaseDenied,
        object: ObjectId,
        caller: &Caller<'_>,
        borrow: impl Fn() -> Result<Vec<T>, LeaseDenied>,
    ) -> Result<Vec<T>, FetchError> {
        let refused = |why: &str| Err(FetchError::Denied(format!("the job demands shared memory, but {why}")));
        let since = Instant::now();
        let mut silent = None;
        loop {
            if let Some(lost) = self.lock().lost.get(&object) {
                return Err(FetchError::Lost(lost.clone()));
            }
            match (denied, &silent) {
                (LeaseDenied::Gone, _) => return Err(FetchError::Lost("its owner has freed it".into())),
                (LeaseDenied::Refused(why), _) => return refused(&why),
                (LeaseDenied::Elsewhere, None) => return refused("its owner is on another host"),
                (LeaseDenied::Silent(why), _) => silent = Some(why),
                // Its owner was here, and ended.
                (LeaseDenied::Elsewhere, Some(_)) => {}
            }
            if since.elapsed() >= lasting(PROGRESS_TIMEOUT) {
                return refused(silent.as_deref().unwrap_or_default());
            }
            caller.waits()?;
            // First without a wait: the record that this owner is silent may be old.
            denied = match borrow() {
                Ok(parts) => return Ok(parts),
                Err(denied) => denied,
            };
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// A part that was received in a broadcast, and kept.
    pub(super) fn copy_at_home(&self, wanted: &Wanted) -> Option<Part> {
        let (segment, start, len) = self.store.copies.whole(&(wanted.object, wanted.part))?;
        (len as u64 == wanted.len).then_some(())?;
        Some(Part { home: Home::Own(segment), start, len })
    }

    /// Leases these parts of each object from the first of its owners that grants them. One question to an owner covers
    /// all of its objects.
    ///
    /// Returns for each object what was leased, or why its parts have to come another way: of several owners on this
    /// host, the last one's reason.
    fn ask_owners<T>(
        &self,
        request: &FetchRequest,
        near: &Near,
        leg: &Leg,
        caller: &Caller<'_>,
        take: impl Fn(Vec<LeasedPart>) -> Result<Taken<T>, LeaseDenied>,
    ) -> BTreeMap<ObjectId, Result<Vec<T>, LeaseDenied>> {
        let mut owners: BTreeMap<ObjectId, VecDeque<SocketAddr>> = BTreeMap::new();
        let state = self.lock();
        for (object, numbers) in near {
            let known = &request.parts[numbers[0]].addresses;
            let moved = state.locations.get(object).into_iter().flatten();
            let new = moved.filter(|address| !known.contains(address));
            owners.insert(*object, known.iter().chain(new).copied().collect());
        }
        drop(state);
        let mut answers = BTreeMap::new();
        loop {
            let mut wanted_of: BTreeMap<SocketAddr, Vec<WantedOf>> = BTreeMap::new();
            for (object, owners) in owners.iter_mut().filter(|(object, _)| !matches!(answers.get(*object), Some(Ok(_))))
            {
                let Some(owner) = owners.pop_front() else { continue };
                let parts = near[object].iter().map(|number| &request.parts[*number]);
                let parts = parts.map(|wanted| (wanted.part, wanted.len)).collect();
                wanted_of.entry(owner).or_default().push((*object, parts));
            }
            if wanted_of.is_empty() {
                return answers;
            }
            for (owner, wanted) in wanted_of {
                let mut all = Vec::with_capacity(wanted.len());
                // Each is taken as it comes, so that few descriptors are open at once.
                let take = |(object, parts): &WantedOf, answer: Result<Vec<LeasedPart>, LeaseDenied>| {
                    let bytes: u64 = parts.iter().map(|(_, len)| len).sum();
                    all.push((*object, bytes, answer.and_then(&take)));
                };
                self.borrower.borrow(owner, &wanted, || caller.gives_up(), take);
                let mut state = self.lock();
                let facts = &mut state.record(&request.transfer).transport;
                for (object, bytes, taken) in all {
                    match taken {
                        Ok((taken, carried)) => {
                            if let Some(negotiated) = carried {
                                facts.carried(leg, bytes, negotiated);
                            }
                            answers.insert(object, Ok(taken));
                        }
                        Err(LeaseDenied::Elsewhere) => {
                            answers.entry(object).or_insert(Err(LeaseDenied::Elsewhere));
                        }
                        Err(denied) => {
                            let why = match &denied {
                                LeaseDenied::Refused(why) | LeaseDenied::Silent(why) => why,
                                LeaseDenied::Elsewhere | LeaseDenied::Gone => "its owner has freed it",
                            };
                            facts.fallbacks.insert(format!("shm: {why}"));
                            answers.insert(object, Err(denied));
                        }
                    }
                }
            }
        }
    }

    /// Copies a part from its owner's spool to its place; false: it has to come another way.
    ///
    /// # Errors
    /// It cannot be read, and may not come another way; or no fetch waits for it any more.
    pub(super) fn copy_spooled(
        &self,
        request: &FetchRequest,
        plan: &FlightPlan,
        part: &LeasedPart,
        into: &mut [u8],
        caller: &Caller<'_>,
    ) -> Result<bool, FetchError> {
        let Err(why) = part.copy(into, || caller.gives_up()) else { return Ok(true) };
        caller.waits()?;
        if !plan.legs.iter().any(|leg| leg.reach == Reach::Anywhere) {
            return Err(FetchError::Denied(format!("the job demands shared memory, but {why}")));
        }
        self.lock().record(&request.transfer).transport.fallbacks.insert(format!("shm: {why}"));
        Ok(false)
    }

    pub(super) fn owns(&self, wanted: &Wanted) -> bool {
        wanted.addresses.contains(&self.own_address)
    }

    fn own(&self, wanted: &Wanted) -> Result<Arc<Object>, FetchError> {
        self.store.get(&wanted.object).ok_or_else(|| FetchError::Lost("this worker has freed it".into()))
    }

    pub(super) fn copy_own(&self, wanted: &Wanted, into: &mut [u8]) -> Result<(), FetchError> {
        let copied = self.own(wanted)?.copy(wanted.part, into);
        copied.map_err(|error| FetchError::Lost(format!("this worker's own copy: {error}")))
    }
}

pub(super) fn shared_memory(plan: &FlightPlan) -> Option<&Leg> {
    plan.legs.iter().find(|leg| leg.transport == Transport::Shm)
}
