//! The parts that this host has in memory already: in this process, or in one that lends them.

use super::{Shared, addressable, no_memory};
use crate::carrier::shm::{Borrowed, LeaseDenied};
use crate::copies::PartKey;
use crate::object::ObjectId;
use crate::parts::{FetchRequest, Home, Part, Wanted};
use crate::segment::Segment;
use crate::store::Object;
use mission_core::defaults::PROGRESS_TIMEOUT;
use mission_core::flight::{FlightPlan, Leg, Reach};
use mission_core::host::fetches::FetchError;
use mission_core::types::Transport;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where an owner is silent, and nobody else may be asked.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

impl Shared {
    /// Where each part lies; `None`: it has to be brought, or copied from the spool.
    pub(super) fn at_home(
        &self,
        request: &FetchRequest,
        plan: &FlightPlan,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Option<Part>>, FetchError> {
        let memory = plan.legs.iter().find(|leg| leg.transport == Transport::Shm);
        let mut homes = Vec::with_capacity(request.parts.len());
        // Of each object that may lie on this host, which parts are wanted.
        let mut near: BTreeMap<ObjectId, Vec<usize>> = BTreeMap::new();
        for (number, wanted) in request.parts.iter().enumerate() {
            if self.owns(wanted) {
                let object = self.own(wanted)?;
                let in_memory = object.in_memory(wanted.part).filter(|(segment, ..)| !segment.has_writers());
                homes.push(in_memory.map(|(segment, start, len)| Part {
                    home: Home::Own(segment.clone()),
                    start: start as usize,
                    len: len as usize,
                }));
                continue;
            }
            let copy = self.copy_at_home(&(wanted.object, wanted.part));
            if copy.is_none() && memory.is_some() && wanted.len > 0 {
                near.entry(wanted.object).or_default().push(number);
            }
            homes.push(copy);
        }
        let borrow = |owner, object, parts: &[_]| {
            let part = |(lease, start, len)| Part { home: Home::Borrowed(lease), start, len };
            Ok(self.borrower.borrow(owner, object, parts)?.into_iter().map(part).collect())
        };
        self.nearby(request, plan, near, interrupted, borrow, |number, part| homes[number] = Some(part))?;
        Ok(homes)
    }

    /// Copies each part that is on this host into a segment of its own; `None`: it has to be brought.
    pub(super) fn copied_at_home(
        &self,
        request: &FetchRequest,
        plan: &FlightPlan,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Option<Segment>>, FetchError> {
        let memory = plan.legs.iter().any(|leg| leg.transport == Transport::Shm);
        let taken = |len| self.pool.take_for_result(addressable(len)?).map_err(|error| no_memory(len, &error));
        let mut near: BTreeMap<ObjectId, Vec<usize>> = BTreeMap::new();
        let mut segments = Vec::with_capacity(request.parts.len());
        for (number, wanted) in request.parts.iter().enumerate() {
            let mut segment = None;
            if wanted.len == 0 || self.owns(wanted) {
                let mut own = taken(wanted.len)?;
                if wanted.len > 0 {
                    self.copy_own(wanted, own.bytes_mut())?;
                }
                segment = Some(own);
            } else if let Some(copy) = self.copy_at_home(&(wanted.object, wanted.part)) {
                let mut own = taken(wanted.len)?;
                own.bytes_mut().copy_from_slice(copy.bytes());
                segment = Some(own);
            } else if memory {
                near.entry(wanted.object).or_default().push(number);
            }
            segments.push(segment);
        }
        let copy = |owner, object, parts: &[(u32, u64)]| {
            let own = parts.iter().map(|(_, len)| taken(*len)).collect::<Result<Vec<_>, _>>();
            let mut own = own.map_err(|error| LeaseDenied::Refused(error.to_string()))?;
            self.borrower.copy(owner, object, parts, &mut own)?;
            Ok(own)
        };
        self.nearby(request, plan, near, interrupted, copy, |number, segment| segments[number] = Some(segment))?;
        Ok(segments)
    }

    /// Takes what other processes of this host have; what none of them gives stays as it is, unless it may come by
    /// shared memory alone. `near`: of each object, which parts are wanted.
    fn nearby<T>(
        &self,
        request: &FetchRequest,
        plan: &FlightPlan,
        near: BTreeMap<ObjectId, Vec<usize>>,
        interrupted: &mut dyn FnMut() -> bool,
        take: impl Fn(SocketAddr, ObjectId, &[(u32, u64)]) -> Result<Vec<T>, LeaseDenied>,
        mut give: impl FnMut(usize, T),
    ) -> Result<(), FetchError> {
        let memory = plan.legs.iter().find(|leg| leg.transport == Transport::Shm);
        let elsewhere = plan.legs.iter().any(|leg| leg.reach == Reach::Anywhere);
        for (object, numbers) in near {
            let leg = memory.expect("nothing is near without it");
            let try_all = || self.ask_owners(request, object, &numbers, leg, &take);
            let parts = match try_all() {
                Err(_) if elsewhere => continue,
                Err(denied) => self.insist(denied, object, interrupted, try_all)?,
                Ok(parts) => parts,
            };
            numbers.into_iter().zip(parts).for_each(|(number, part)| give(number, part));
        }
        Ok(())
    }

    /// The leases on an object that may only come by shared memory, once its owner answers again; another borrow is
    /// attempted until then. Word that a worker has left comes later than its sockets break, and whoever hears of the loss
    /// can have the object made again.
    ///
    /// # Errors
    /// The object is lost, its owner refuses, or it says nothing for [`PROGRESS_TIMEOUT`].
    fn insist<T>(
        &self,
        mut denied: LeaseDenied,
        object: ObjectId,
        interrupted: &mut dyn FnMut() -> bool,
        borrow: impl Fn() -> Result<Vec<T>, LeaseDenied>,
    ) -> Result<Vec<T>, FetchError> {
        let refused = |why: &str| Err(FetchError::Denied(format!("shared memory was demanded, but {why}")));
        let since = Instant::now();
        let mut silent = None;
        loop {
            let state = self.lock();
            if let Some(lost) = state.lost.get(&object) {
                return Err(FetchError::Lost(lost.clone()));
            }
            if state.closing {
                return Err(FetchError::Cancelled(super::CLOSES.into()));
            }
            drop(state);
            match (denied, &silent) {
                (LeaseDenied::Gone, _) => return Err(FetchError::Lost("its owner has freed it".into())),
                (LeaseDenied::Refused(why), _) => return refused(&why),
                (LeaseDenied::Elsewhere, None) => return refused("its owner is on another host"),
                (LeaseDenied::Silent(why), _) => silent = Some(why),
                // Its owner was here, and ended.
                (LeaseDenied::Elsewhere, Some(_)) => {}
            }
            if since.elapsed() >= PROGRESS_TIMEOUT {
                return refused(silent.as_deref().unwrap_or_default());
            }
            if interrupted() {
                return Err(FetchError::Cancelled("interrupted".into()));
            }
            std::thread::sleep(LOOK_AGAIN);
            denied = match borrow() {
                Ok(parts) => return Ok(parts),
                Err(denied) => denied,
            };
        }
    }

    /// A part that was received in a broadcast, and kept.
    pub(super) fn copy_at_home(&self, key: &PartKey) -> Option<Part> {
        let (segment, start, len) = self.store.copies.whole(key)?;
        Some(Part { home: Home::Own(segment), start, len })
    }

    /// Takes these parts of an object from the first of its owners that gives them.
    ///
    /// # Errors
    /// Why they have to come another way; of several owners, why the last one on this host gave none.
    fn ask_owners<T>(
        &self,
        request: &FetchRequest,
        object: ObjectId,
        numbers: &[usize],
        leg: &Leg,
        take: impl Fn(SocketAddr, ObjectId, &[(u32, u64)]) -> Result<Vec<T>, LeaseDenied>,
    ) -> Result<Vec<T>, LeaseDenied> {
        let mut reason = LeaseDenied::Elsewhere;
        let wanted: Vec<&Wanted> = numbers.iter().map(|number| &request.parts[*number]).collect();
        let parts: Vec<(u32, u64)> = wanted.iter().map(|wanted| (wanted.part, wanted.len)).collect();
        let moved = self.lock().locations.get(&object).cloned().unwrap_or_default();
        let new: Vec<_> = moved.into_iter().filter(|address| !wanted[0].addresses.contains(address)).collect();
        for &owner in wanted[0].addresses.iter().chain(&new) {
            match take(owner, object, &parts) {
                Ok(taken) => {
                    let bytes = parts.iter().map(|(_, len)| len).sum();
                    let mut state = self.lock();
                    state.record(&request.transfer).transport.carried(leg, bytes, Borrowed::negotiated());
                    return Ok(taken);
                }
                Err(LeaseDenied::Elsewhere) => {}
                Err(denied) => {
                    let why = match &denied {
                        LeaseDenied::Refused(why) | LeaseDenied::Silent(why) => why,
                        LeaseDenied::Elsewhere | LeaseDenied::Gone => "its owner has freed it",
                    };
                    let mut state = self.lock();
                    state.record(&request.transfer).transport.fallbacks.insert(format!("shm: {why}"));
                    reason = denied;
                }
            }
        }
        Err(reason)
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
