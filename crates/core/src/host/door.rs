//! The door of a server: which of its connections stay, and who comes in when all places are taken.
//!
//! A client first proves that it knows the cluster's token, then it is admitted. Strangers have few places, and cannot
//! take those of clients. Where all places of clients are busy, a client is sent away with a **turn**, a number that it
//! shows when it comes again: whoever has waited longest comes in first. While clients wait, connections that have been
//! there for a while leave after their answer; their clients come again, with a later turn.

use crate::defaults::{
    ADMISSION, BUSY_RETRY_MAX, BUSY_RETRY_MS, RETRY_MAX, SERVER_CONNECTIONS, UNADMITTED_CONNECTIONS, YIELDS_AFTER,
};
use crate::random::SplitMix;
use crate::units::Time;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

/// A connection, numbered by the caller; numbers are not used again.
pub type Number = u64;
/// A place among those that wait for admission.
pub type Turn = u64;

/// A client sends at once. One that a busy host delays has this long before unknown clients that send are preferred to
/// it.
const SILENT: Duration = Duration::from_millis(20);
/// A client that waits comes again within [`BUSY_RETRY_MAX`], once it has a slot of its host. After this time it has given
/// up: until then a place is kept free for it.
pub const GIVEN_UP: Duration = RETRY_MAX;
/// Most clients whose turns are remembered. Further ones have none until then.
const WAITING_MAX: usize = 16 << 10;

/// The answer to a client that has proved the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It is in. `closes`: this connection is to be closed for it, the one that has been idle for longest; its client
    /// makes another when it needs one.
    Admitted { closes: Option<Number> },
    /// All places are busy.
    Busy { turn: Option<Turn>, retry_after: Duration },
}

/// A connection whose client has not proved the token.
struct Stranger {
    number: Number,
    since: Time,
    from: IpAddr,
    /// It has sent something, as every client does at once.
    asked: bool,
}

/// A connection of a client.
struct Guest {
    since: Time,
    /// Since when it carries nothing.
    idle: Option<Time>,
}

pub struct Door {
    /// The oldest first.
    strangers: VecDeque<Stranger>,
    guests: BTreeMap<Number, Guest>,
    /// Clients that were sent away, by their turns, and when they came last.
    waiting: BTreeMap<Turn, Time>,
    next_turn: Turn,
    random: SplitMix,
}

impl Door {
    /// `seed`: which stranger has to go is not to be foreseen.
    pub fn new(seed: u64) -> Door {
        Door {
            strangers: VecDeque::new(),
            guests: BTreeMap::new(),
            waiting: BTreeMap::new(),
            next_turn: 1,
            random: SplitMix(seed),
        }
    }

    /// A connection was accepted.
    pub fn arrives(&mut self, now: Time, number: Number, from: IpAddr) {
        self.strangers.push_back(Stranger { number, since: now, from, asked: false });
    }

    /// Connections that have sent nothing yet.
    pub fn silent(&self) -> impl Iterator<Item = Number> + '_ {
        self.strangers.iter().filter(|own| !own.asked).map(|own| own.number)
    }

    /// Whether some connection owes its proof.
    pub fn has_strangers(&self) -> bool {
        !self.strangers.is_empty()
    }

    /// A connection has sent its first bytes.
    pub fn asked(&mut self, number: Number) {
        if let Some(own) = self.strangers.iter_mut().find(|own| own.number == number) {
            own.asked = true;
        }
    }

    /// Gives the connections to close: those whose time for the proof is over; then, until [`UNADMITTED_CONNECTIONS`] are
    /// left, one of the address that has most of them: one that has been silent, if any. Not the oldest: attackers that
    /// connect faster than a proof takes would leave no client the time for it.
    pub fn tidy(&mut self, now: Time) -> Vec<Number> {
        let mut closes = Vec::new();
        while self.strangers.front().is_some_and(|own| now.since(own.since) >= ADMISSION) {
            closes.extend(self.strangers.pop_front().map(|own| own.number));
        }
        while self.strangers.len() > UNADMITTED_CONNECTIONS {
            let mut counts = BTreeMap::<IpAddr, usize>::new();
            self.strangers.iter().for_each(|own| *counts.entry(own.from).or_default() += 1);
            let (from, _) = counts.into_iter().max_by_key(|(_, count)| *count).expect("there are some");
            let of_it = |silent: bool| {
                let is_silent = |own: &Stranger| !own.asked && now.since(own.since) >= SILENT;
                let all = self.strangers.iter().enumerate();
                let found = all.filter(|(_, own)| own.from == from && (!silent || is_silent(own)));
                found.map(|(at, _)| at).collect::<Vec<_>>()
            };
            let mut candidates = of_it(true);
            if candidates.is_empty() {
                candidates = of_it(false);
            }
            let at = candidates[self.random.next() as usize % candidates.len()];
            closes.extend(self.strangers.remove(at).map(|own| own.number));
        }
        closes
    }

    /// A client has proved the token; `turn`: what it was given when it was sent away.
    pub fn admit(&mut self, now: Time, number: Number, turn: Option<Turn>) -> Admission {
        self.strangers.retain(|own| own.number != number);
        self.waiting.retain(|_, came| now.since(*came) < GIVEN_UP);
        // Only turns that were given out count.
        let turn = turn.filter(|turn| self.waiting.contains_key(turn));
        let before = turn.map_or(self.waiting.len(), |turn| self.waiting.range(..turn).count());
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
            return Admission::Admitted { closes };
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
        Admission::Busy { turn, retry_after }
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
            && self.waiting.values().filter(|came| now.since(**came) < GIVEN_UP).take(free + 1).count() > free
    }

    /// A connection has ended.
    pub fn leaves(&mut self, number: Number) {
        self.strangers.retain(|own| own.number != number);
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

    /// Connections of one address: strangers, each with or without received bytes, and one that arrived last.
    fn strangers(count: u64, asked: bool, seed: u64) -> Door {
        let mut door = Door::new(seed);
        for number in 0..count {
            door.arrives(at(0), number, HERE);
            if asked {
                door.asked(number);
            }
        }
        door.arrives(at(40), count, HERE);
        door
    }

    #[test]
    fn who_is_silent_makes_room_for_one_that_has_just_come() {
        for seed in 0..200 {
            let mut door = strangers(64, false, seed);
            assert!(!door.tidy(at(40)).contains(&64));
        }
    }

    /// Regression: one byte kept an attacker's connection, and a client that had sent nothing yet lost its place.
    #[test]
    fn strangers_that_speak_are_not_preferred_to_one_that_has_just_come() {
        let stays = |seed: &u64| !strangers(64, true, *seed).tidy(at(40)).contains(&64);
        let stayed = (0..400).filter(stays).count();
        assert!(stayed > 350, "{stayed} of 400");
    }

    #[test]
    fn who_owes_its_proof_for_too_long_goes() {
        let mut door = strangers(3, true, 1);
        assert_eq!(door.tidy(Time(0) + ADMISSION), [0, 1, 2]);
        assert_eq!(door.count(), (1, 0));
    }

    /// A door all of whose places are busy.
    fn full() -> Door {
        let mut door = Door::new(1);
        for number in 0..SERVER_CONNECTIONS as u64 {
            door.arrives(at(0), number, HERE);
            assert_eq!(door.admit(at(0), number, None), Admission::Admitted { closes: None });
        }
        door
    }

    #[test]
    fn the_connection_that_was_idle_for_longest_makes_room() {
        let mut door = full();
        door.idle(7, Some(at(10)));
        door.idle(3, Some(at(20)));
        assert_eq!(door.admit(at(30), 1000, None), Admission::Admitted { closes: Some(7) });
        door.idle(3, None);
        assert!(matches!(door.admit(at(30), 1001, None), Admission::Busy { .. }));
        door.leaves(5);
        assert_eq!(door.count(), (0, SERVER_CONNECTIONS - 1));
    }

    fn busy(said: Admission) -> Turn {
        let Admission::Busy { turn: Some(turn), .. } = said else { panic!("{said:?}") };
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
        assert_eq!(door.admit(at(4), 1004, Some(first)), Admission::Admitted { closes: None });
        // The second has given up: it keeps nobody out.
        door.leaves(1);
        let later = at(1000) + GIVEN_UP;
        assert_eq!(busy(door.admit(at(1000), 1005, Some(third))), third);
        assert_eq!(door.admit(at(999) + GIVEN_UP, 1006, Some(third)), Admission::Admitted { closes: None });
        // A turn that nobody was given is none.
        assert!(busy(door.admit(later, 1007, Some(u64::MAX))) < u64::MAX);
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
                    Admission::Admitted { closes } => {
                        assert_eq!(closes, None, "nobody is idle");
                        *own = (None, Some(next), own.2 + 1);
                    }
                    Admission::Busy { turn, retry_after } => {
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
