//! The turns that busy servers gave this process ([`mission_core::host::door`]): each goes with the next try there.

use crate::clock::lasting;
use mission_core::host::door::{TURN_LASTS, Turn};
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

/// Turns at one server: this process has no more connections there.
const MOST: usize = 256;

#[derive(Default)]
pub struct Turns {
    of: Mutex<HashMap<SocketAddr, VecDeque<(Instant, Turn)>>>,
}

impl Turns {
    /// The oldest turn at this server.
    pub fn take(&self, server: SocketAddr) -> Option<Turn> {
        let mut of = self.lock();
        let turns = of.get_mut(&server)?;
        turns.retain(|(given, _)| given.elapsed() < lasting(TURN_LASTS));
        let first = turns.pop_front().map(|(_, turn)| turn);
        if turns.is_empty() {
            of.remove(&server);
        }
        first
    }

    /// A server has sent this process away.
    pub fn keep(&self, server: SocketAddr, turn: Turn) {
        let mut of = self.lock();
        of.retain(|_, turns| turns.back().is_some_and(|(given, _)| given.elapsed() < lasting(TURN_LASTS)));
        let turns = of.entry(server).or_default();
        let at = turns.partition_point(|(_, other)| *other < turn);
        turns.insert(at, (Instant::now(), turn));
        turns.truncate(MOST);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SocketAddr, VecDeque<(Instant, Turn)>>> {
        self.of.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_turn_at_a_server_goes_first_and_each_once() {
        let (turns, server) = (Turns::default(), SocketAddr::from(([127, 0, 0, 1], 1)));
        for turn in [5, 3, 4] {
            turns.keep(server, turn);
        }
        assert_eq!(turns.take(SocketAddr::from(([127, 0, 0, 1], 2))), None);
        assert_eq!(std::array::from_fn(|_| turns.take(server)), [Some(3), Some(4), Some(5), None]);
        assert!(turns.lock().is_empty());
    }
}
