//! Chunks that wait for a connection or a slot, or run in one, found by their tickets.

use super::{FetchId, SourceId};
use crate::host::Ticket;
use crate::units::Time;

/// Chunks with a ticket, found by its number.
#[derive(Default)]
pub struct Tickets {
    pub slots: Vec<(u32, Option<Held>)>,
    pub free: Vec<u32>,
}

/// A chunk that waits for a connection to its source, waits for a slot, or runs in one.
pub struct Held {
    pub fetch: FetchId,
    pub chunk: u32,
    pub source: SourceId,
    pub running: bool,
    /// What runs is an attempt to connect: it has no slot.
    pub connects: bool,
    /// The chunk that follows on the same connection and in the same slot.
    pub next: Option<u32>,
    /// Bytes moved by the chunk that the slot was granted for, once it has ended.
    pub moved: Option<u64>,
    /// Start of the current slow period, and the bytes that had arrived by then.
    pub watched_at: Time,
    pub watched_bytes: u64,
    pub cut: bool,
}

impl Tickets {
    pub fn add(&mut self, held: Held) -> Ticket {
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[at as usize];
        slot.1 = Some(held);
        Ticket::from(slot.0) << 32 | Ticket::from(at)
    }

    pub fn get(&mut self, ticket: Ticket) -> Option<&mut Held> {
        let (generation, held) = self.slots.get_mut((ticket & 0xffff_ffff) as usize)?;
        held.as_mut().filter(|_| Ticket::from(*generation) == ticket >> 32)
    }

    pub fn remove(&mut self, ticket: Ticket) -> Option<Held> {
        self.get(ticket)?;
        let at = (ticket & 0xffff_ffff) as u32;
        let slot = &mut self.slots[at as usize];
        slot.0 = slot.0.wrapping_add(1);
        self.free.push(at);
        slot.1.take()
    }
}
