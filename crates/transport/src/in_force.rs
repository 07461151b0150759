//! The shares that are in force in this process. They come from the Mission Controller, or from the speaker of this
//! host; the later of the two finds them in force already.

use crate::arbiter::Numbers;
use crate::fetcher::Fetcher;
use crate::uplink::Uplink;
use mission_core::mission;
use mission_core::standing::Standing;
use std::sync::{Arc, Mutex, MutexGuard};

pub(crate) struct InForce {
    standing: Mutex<Option<Standing>>,
    fetcher: Arc<Fetcher>,
    uplink: Arc<Uplink>,
    numbers: Numbers,
}

/// What became of received shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Took {
    InForce,
    /// Newer ones are in force, or these.
    Old,
    /// They are a change to a version that this process does not have.
    Gap,
}

impl InForce {
    pub fn new(fetcher: Arc<Fetcher>, uplink: Arc<Uplink>, numbers: Numbers) -> InForce {
        InForce { standing: Mutex::default(), fetcher, uplink, numbers }
    }

    /// Puts shares in force, unless newer ones are. Ignores other commands.
    pub fn take(&self, command: mission::Command) -> Took {
        let mut standing = self.lock();
        let last = standing.as_ref().map(|own| own.version);
        let new = match command {
            // Shares without a version are for processes that have none from a Mission Controller.
            mission::Command::Shares(new) if last.is_none_or(|last| new.version > last || last == 0) => new,
            mission::Command::SharesChanged(changes) if last.is_none_or(|last| changes.version > last) => {
                match standing.as_ref().and_then(|own| own.after(&changes)) {
                    Some(new) => new,
                    None => return Took::Gap,
                }
            }
            _ => return Took::Old,
        };
        // Under the lock: of two concurrent ones the newer one stays.
        self.uplink.set_shares(new.flows_per_host, self.numbers.shares_of(new.level, &new.shares));
        self.fetcher.set_shares(&new);
        *standing = Some(new);
        Took::InForce
    }

    /// Forgets the versions of a Mission Controller that this process has left for another.
    pub fn begin_anew(&self) {
        *self.lock() = None;
    }

    /// All shares; `None` before any were received.
    pub fn standing(&self) -> Option<Standing> {
        self.lock().clone()
    }

    pub fn version(&self) -> u64 {
        self.lock().as_ref().map_or(0, |own| own.version)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Standing>> {
        self.standing.lock().expect("no panic while held")
    }
}
