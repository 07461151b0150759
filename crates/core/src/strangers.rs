//! Connections whose clients have not proved anything yet: which of them stay.
//!
//! Whoever can reach a port can connect to it. Strangers have few places, and a time to prove who they are. When the
//! places are full, the address that has most of them gives one back: attackers from one address cost others none.

use crate::random::SplitMix;
use crate::units::Time;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

/// A connection, numbered by the caller; numbers are not used again.
pub type Number = u64;

/// A client sends at once. One that a busy host delays has this long before unknown clients that send are preferred to
/// it.
const SILENT: Duration = Duration::from_millis(20);

struct Stranger {
    number: Number,
    since: Time,
    from: IpAddr,
    /// It has sent something, as every client does at once.
    asked: bool,
}

pub struct Strangers {
    most: usize,
    within: Duration,
    /// The oldest first.
    all: VecDeque<Stranger>,
    from: BTreeMap<IpAddr, usize>,
    random: SplitMix,
}

impl Strangers {
    /// At most so many, each for at most so long. `seed`: which one has to go is not to be foreseen.
    pub fn new(most: usize, within: Duration, seed: u64) -> Strangers {
        Strangers { most, within, all: VecDeque::new(), from: BTreeMap::new(), random: SplitMix(seed) }
    }

    /// A connection was accepted.
    pub fn arrives(&mut self, now: Time, number: Number, from: IpAddr) {
        self.all.push_back(Stranger { number, since: now, from, asked: false });
        *self.from.entry(from).or_default() += 1;
    }

    /// A connection has sent its first bytes.
    pub fn asked(&mut self, number: Number) {
        if let Some(own) = self.all.iter_mut().find(|own| own.number == number) {
            own.asked = true;
        }
    }

    /// Connections that have sent nothing yet.
    pub fn silent(&self) -> impl Iterator<Item = Number> + '_ {
        self.all.iter().filter(|own| !own.asked).map(|own| own.number)
    }

    /// It has proved who it is, or has ended.
    pub fn leaves(&mut self, number: Number) {
        if let Some(at) = self.all.iter().position(|own| own.number == number) {
            self.remove(at);
        }
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Gives the connections to close: those whose time for the proof is over; then, while there are too many, one of the
    /// address that has most of them: one that has been silent, if any. Not the oldest: attackers that connect faster
    /// than a proof takes would leave no client the time for it.
    pub fn tidy(&mut self, now: Time) -> Vec<Number> {
        let mut closes = Vec::new();
        while self.all.front().is_some_and(|own| now.since(own.since) >= self.within) {
            closes.extend(self.remove(0));
        }
        while self.all.len() > self.most {
            let from = *self.from.iter().max_by_key(|(_, count)| **count).expect("there are some").0;
            let of_it = |silent: bool| {
                let is_silent = |own: &Stranger| !own.asked && now.since(own.since) >= SILENT;
                let all = self.all.iter().enumerate();
                let found = all.filter(|(_, own)| own.from == from && (!silent || is_silent(own)));
                found.map(|(at, _)| at).collect::<Vec<_>>()
            };
            let mut candidates = of_it(true);
            if candidates.is_empty() {
                candidates = of_it(false);
            }
            let at = candidates[self.random.next() as usize % candidates.len()];
            closes.extend(self.remove(at));
        }
        closes
    }

    fn remove(&mut self, at: usize) -> Option<Number> {
        let own = self.all.remove(at)?;
        if let Some(count) = self.from.get_mut(&own.from) {
            *count -= 1;
            if *count == 0 {
                self.from.remove(&own.from);
            }
        }
        Some(own.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 64;
    const WITHIN: Duration = Duration::from_secs(5);

    fn at(millis: u64) -> Time {
        Time(0) + Duration::from_millis(millis)
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Connections of one address, each with or without received bytes, and one that arrived last.
    fn strangers(count: u64, asked: bool, seed: u64) -> Strangers {
        let mut strangers = Strangers::new(MOST, WITHIN, seed);
        for number in 0..count {
            strangers.arrives(at(0), number, address(1));
            if asked {
                strangers.asked(number);
            }
        }
        strangers.arrives(at(40), count, address(1));
        strangers
    }

    #[test]
    fn who_is_silent_makes_room_for_one_that_has_just_come() {
        for seed in 0..200 {
            assert!(!strangers(64, false, seed).tidy(at(40)).contains(&64));
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
        let mut strangers = strangers(3, true, 1);
        assert_eq!(strangers.tidy(Time(0) + WITHIN), [0, 1, 2]);
        assert_eq!((strangers.len(), strangers.from.len()), (1, 1));
        strangers.leaves(3);
        assert!(strangers.is_empty() && strangers.from.is_empty());
    }

    /// X4: the oldest went, so who was a hundred milliseconds away was never answered while others kept connecting.
    #[test]
    fn who_connects_for_ever_takes_no_place_of_one_that_is_far_away() {
        let mut strangers = Strangers::new(MOST, WITHIN, 3);
        let mut closed = Vec::new();
        strangers.arrives(at(0), 0, address(2));
        for number in 1..2800 {
            strangers.arrives(at(number / 28), number, address(1));
            closed.extend(strangers.tidy(at(number / 28)));
        }
        assert!(!closed.contains(&0));
        assert_eq!((closed.len(), strangers.len()), (2800 - MOST, MOST));
    }
}
