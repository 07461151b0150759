//! The parts that this host has in memory already: in this process, or in one that lends them.

use super::Shared;
use crate::carrier::shm::{Borrowed, LeaseDenied};
use crate::copies::PartKey;
use crate::parts::{FetchRequest, Home, Part, Wanted};
use crate::store::Object;
use mission_core::flight::{FlightPlan, Leg, Reach};
use mission_core::host::fetches::FetchError;
use mission_core::types::Transport;
use std::sync::Arc;

impl Shared {
    /// Where each part lies; `None`: it has to be brought, or copied from the spool.
    pub(super) fn at_home(&self, request: &FetchRequest, plan: &FlightPlan) -> Result<Vec<Option<Part>>, FetchError> {
        let memory = plan.legs.iter().find(|leg| leg.transport == Transport::Shm);
        let elsewhere = plan.legs.iter().any(|leg| leg.reach == Reach::Anywhere);
        let mut homes = Vec::with_capacity(request.parts.len());
        for wanted in &request.parts {
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
            if let Some(copy) = self.copy_at_home(&(wanted.object, wanted.part)) {
                homes.push(Some(copy));
                continue;
            }
            match memory.filter(|_| wanted.len > 0).map(|leg| self.borrow(request, wanted, leg)) {
                Some(Ok(part)) => homes.push(Some(part)),
                Some(Err(why)) if !elsewhere => {
                    return Err(FetchError::Denied(format!("shared memory was demanded, but {why}")));
                }
                Some(Err(_)) | None => homes.push(None),
            }
        }
        Ok(homes)
    }

    /// A part that was received in a broadcast, and kept.
    pub(super) fn copy_at_home(&self, key: &PartKey) -> Option<Part> {
        let (segment, start, len) = self.store.copies.whole(key)?;
        Some(Part { home: Home::Own(segment), start, len })
    }

    /// # Errors
    /// Why it has to come another way.
    fn borrow(&self, request: &FetchRequest, wanted: &Wanted, leg: &Leg) -> Result<Part, String> {
        let mut reason = "its owner is on another host".to_owned();
        for &owner in &wanted.addresses {
            match self.borrower.borrow(owner, wanted.object, wanted.part, wanted.len) {
                Ok(borrowed) => {
                    let mut state = self.lock();
                    let record = state.record(&request.transfer);
                    record.transport.carried(leg, wanted.len, Borrowed::negotiated());
                    let (start, len) = (0, wanted.len as usize);
                    return Ok(Part { home: Home::Borrowed(Arc::new(borrowed)), start, len });
                }
                Err(LeaseDenied::Elsewhere) => {}
                Err(LeaseDenied::Refused(why)) => {
                    let mut state = self.lock();
                    state.record(&request.transfer).transport.fallbacks.insert(format!("shm: {why}"));
                    reason = why;
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
