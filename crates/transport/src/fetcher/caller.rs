//! The caller that waits for a fetch, and may be interrupted meanwhile.

use super::{CLOSES, INTERRUPT_EVERY, Shared};
use mission_core::host::fetches::FetchError;
use std::cell::{Cell, RefCell};
use std::time::Instant;

pub(super) struct Caller<'a> {
    shared: &'a Shared,
    interrupted: RefCell<&'a mut dyn FnMut() -> bool>,
    asked: Cell<Instant>,
    gave_up: Cell<Option<&'static str>>,
}

impl<'a> Caller<'a> {
    pub(super) fn new(shared: &'a Shared, interrupted: &'a mut dyn FnMut() -> bool) -> Caller<'a> {
        let (interrupted, asked) = (RefCell::new(interrupted), Cell::new(Instant::now()));
        Caller { shared, interrupted, asked, gave_up: Cell::new(None) }
    }

    /// Whether the caller was interrupted, or this worker is closing. Cheap: checks every [`INTERRUPT_EVERY`].
    pub(super) fn gives_up(&self) -> bool {
        self.waits().is_err()
    }

    /// # Errors
    /// As [`Caller::gives_up`].
    pub(super) fn waits(&self) -> Result<(), FetchError> {
        if self.gave_up.get().is_none() && self.asked.get().elapsed() >= INTERRUPT_EVERY {
            self.asked.set(Instant::now());
            if self.shared.lock().closing {
                self.gave_up.set(Some(CLOSES));
            } else if (self.interrupted.borrow_mut())() {
                self.gave_up.set(Some("interrupted"));
            }
        }
        self.gave_up.get().map_or(Ok(()), |why| Err(FetchError::Cancelled(why.into())))
    }
}
