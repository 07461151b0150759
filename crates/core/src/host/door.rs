//! The door of a server: which of its connections stay, and who comes in when all places are taken.
//!
//! A client first proves that it knows the cluster's token, then it is admitted. Strangers have few places, and cannot
//! take those of clients. Where all places of clients are busy, a client is sent away with a **turn**, a number that it
//! shows when it comes again: whoever has waited longest comes in first. While clients wait, connections that have been
//! there for a while leave after their answer; their clients come again, with a later turn.

use crate::defaults::{
    ADMISSION, BUSY_RETRY_MAX, BUSY_RETRY_MS, PROGRESS_TIMEOUT, SERVER_CONNECTIONS, UNADMITTED_CONNECTIONS,
    YIELDS_AFTER,
};
use crate::strangers::Strangers;
use crate::units::Time;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

pub use crate::strangers::Number;
/// A place among those that wait for admission.
pub type Turn = u64;

/// A place is kept free for a client that waits for this long after it came: it comes again within [`BUSY_RETRY_MAX`],
/// unless it waits for a slot of its host, or has given up.
const KEPT_FREE: Duration = BUSY_RETRY_MAX.saturating_mul(2);
/// Its turn lasts for as long as a fetch waits.
pub const TURN_LASTS: Duration = PROGRESS_TIMEOUT;
/// Most clients whose turns are remembered. Further ones have none until then.
const WAITING_MAX: usize = 16 << 10;

/// The answer to a client that has proved the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// It is in. `closes`: this connection is to be closed for it, the one that has been idle for longest; its client
    /// makes another when it needs one.
    Open { closes: Option<Number> },
    /// All places are busy.
    Busy { turn: Option<Turn>, retry_after: Duration },
}

/// A connection of a client.
struct Guest {
    since: Time,
    /// Since when it carries nothing.
    idle: Option<Time>,
}

pub struct Door {
    strangers: Strangers,
    guests: BTreeMap<Number, Guest>,
    /// Clients that were sent away, by their turns, and when they came last.
    waiting: BTreeMap<Turn, Time>,
    next_turn: Turn,
}

impl Door {
    /// `seed`: which stranger has to go is not to be foreseen.
    pub fn new(seed: u64) -> Door {
        Door {
            strangers: Strangers::new(UNADMITTED_CONNECTIONS, ADMISSION, seed),
            guests: BTreeMap::new(),
            waiting: BTreeMap::new(),
            next_turn: 1,
        }
    }

    /// A connection was accepted.
    pub fn arrives(&mut self, now: Time, number: Number, from: IpAddr) {
        self.strangers.arrives(now, number, from);
    }

    /// Connections that have sent nothing yet.
    pub fn silent(&self) -> impl Iterator<Item = Number> + '_ {
        self.strangers.silent()
    }

    /// Whether some connection owes its proof.
    pub fn has_strangers(&self) -> bool {
        !self.strangers.is_empty()
    }

    /// A connection has sent its first bytes.
    pub fn asked(&mut self, number: Number) {
        self.strangers.asked(number);
    }

    /// Gives the connections of strangers to close.
    pub fn tidy(&mut self, now: Time) -> Vec<Number> {
        self.strangers.tidy(now)
    }

    /// A client has proved the token; `turn`: what it was given when it was sent away.
    pub fn admit(&mut self, now: Time, number: Number, turn: Option<Turn>) -> Entry {
        self.strangers.leaves(number);
        self.waiting.retain(|_, came| now.since(*came) < TURN_LASTS);
        // Only turns that were given out count.
        let turn = turn.filter(|turn| self.waiting.contains_key(turn));
        let earlier = self.waiting.range(..turn.unwrap_or(Turn::MAX));
        let before = earlier.filter(|(_, came)| now.since(**came) < KEPT_FREE).count();
        let idle = self.guests.iter().filter_map(|(own, guest)| Some((guest.idle?, *own)));
        let (count, longest) = idle.fold((0, None), |(count, longest), one| {
            (count + 1, Some(longest.map_or(one, |other: (Time, Number)| other.min(one))))
        });
        let free = SERVER_CONNECTIONS.saturating_sub(self.guests.len());
        if free + count > before {
            turn.map(|turn| self.waiting.remove(&turn));
            let closes = longest.filter(|_| free == 0).map(|(_, own)| own);
            closes.map(|own| self.guests.remove(&own));
            self.guests.insert(number, Guest { since: now, idle: None });
            return Entry::Open { closes };
        }
        let turn = turn.or_else(|| {
            (self.waiting.len() < WAITING_MAX).then(|| {
                self.next_turn += 1;
                self.next_turn - 1
            })
        });
        turn.map(|turn| self.waiting.insert(turn, now));
        // Who has many before it need not come soon.
        let rounds = 1 + before / SERVER_CONNECTIONS;
        let retry_after = Duration::from_millis(BUSY_RETRY_MS).saturating_mul(rounds as u32).min(BUSY_RETRY_MAX);
        Entry::Busy { turn, retry_after }
    }

    /// A connection carries something, or nothing since then.
    pub fn idle(&mut self, number: Number, since: Option<Time>) {
        if let Some(guest) = self.guests.get_mut(&number) {
            guest.idle = since;
        }
    }

    /// Whether a connection that has just answered is to make room for a client that waits.
    pub fn yields(&self, now: Time, number: Number) -> bool {
        let there = self.guests.get(&number).map(|guest| now.since(guest.since));
        let free = SERVER_CONNECTIONS.saturating_sub(self.guests.len());
        there.is_some_and(|there| there >= YIELDS_AFTER)
            && self.waiting.values().filter(|came| now.since(**came) < KEPT_FREE).take(free + 1).count() > free
    }

    /// A connection has ended.
    pub fn leaves(&mut self, number: Number) {
        self.strangers.leaves(number);
        self.guests.remove(&number);
    }

    /// Connections of strangers, and of clients.
    pub fn count(&self) -> (usize, usize) {
        (self.strangers.len(), self.guests.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn at(millis: u64) -> Time {
        Time(0) + Duration::from_millis(millis)
    }

    /// A door all of whose places are busy.
    fn full() -> Door {
        let mut door = Door::new(1);
        for number in 0..SERVER_CONNECTIONS as u64 {
            door.arrives(at(0), number, HERE);
            assert_eq!(door.admit(at(0), number, None), Entry::Open { closes: None });
        }
        door
    }

    #[test]
    fn the_connection_that_was_idle_for_longest_makes_room() {
        let mut door = full();
        door.idle(7, Some(at(10)));
        door.idle(3, Some(at(20)));
        assert_eq!(door.admit(at(30), 1000, None), Entry::Open { closes: Some(7) });
        door.idle(3, None);
        assert!(matches!(door.admit(at(30), 1001, None), Entry::Busy { .. }));
        door.leaves(5);
        assert_eq!(door.count(), (0, SERVER_CONNECTIONS - 1));
    }

    fn busy(said: Entry) -> Turn {
        let Entry::Busy { turn: Some(turn), .. } = said else { panic!("{said:?}") };
        turn
    }

    /// R7: whoever happened to ask when a place was free came in, and others never did.
    #[test]
    fn who_has_waited_longest_comes_in_first() {
        let mut door = full();
        let first = busy(door.admit(at(0), 1000, None));
        let second = busy(door.admit(at(1), 1001, None));
        door.leaves(0);
        // A new one, and the second, have to let the first in.
        let third = busy(door.admit(at(2), 1002, None));
        assert_eq!(busy(door.admit(at(3), 1003, Some(second))), second);
        assert_eq!(door.admit(at(4), 1004, Some(first)), Entry::Open { closes: None });
        // The second comes seldom: it keeps nobody out, but it has not lost its turn.
        door.leaves(1);
        let later = at(3) + KEPT_FREE;
        assert_eq!(busy(door.admit(at(500), 1005, Some(third))), third);
        assert_eq!(door.admit(later, 1006, Some(third)), Entry::Open { closes: None });
        let fourth = busy(door.admit(later, 1007, None));
        door.leaves(2);
        assert!(fourth > second);
        assert_eq!(door.admit(later, 1008, Some(second)), Entry::Open { closes: None });
    }

    /// Twice as many clients as places, each with work for ever: all come in again and again.
    #[test]
    fn clients_that_never_rest_take_turns() {
        let mut door = Door::new(1);
        let clients = 2 * SERVER_CONNECTIONS as u64;
        // Of each client: its turn, the connection that is in, and how often it came in.
        let mut state: Vec<(Option<Turn>, Option<Number>, u32)> = vec![(None, None, 0); clients as usize];
        let (mut next, mut now) = (0, at(0));
        for _ in 0..400 {
            now = now + Duration::from_millis(50);
            for own in &mut state {
                if let Some(number) = own.1 {
                    if door.yields(now, number) {
                        door.leaves(number);
                        own.1 = None;
                    }
                    continue;
                }
                next += 1;
                door.arrives(now, next, HERE);
                match door.admit(now, next, own.0) {
                    Entry::Open { closes } => {
                        assert_eq!(closes, None, "nobody is idle");
                        *own = (None, Some(next), own.2 + 1);
                    }
                    Entry::Busy { turn, retry_after } => {
                        assert!(retry_after <= BUSY_RETRY_MAX);
                        own.0 = turn;
                    }
                }
            }
            assert!(door.count().1 <= SERVER_CONNECTIONS);
        }
        let came: BTreeSet<u32> = state.iter().map(|own| own.2).collect();
        let (least, most) = (*came.first().unwrap(), *came.last().unwrap());
        assert!(least >= 5 && most <= least + 2, "they came in {least} to {most} times");
    }
}
