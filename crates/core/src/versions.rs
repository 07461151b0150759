//! Versions of what one process says to another: a receiver that missed something knows it, and asks for everything.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Numbers what is sent to each receiver, from 1.
#[derive(Clone, Debug, Default)]
pub struct Outbox<R: Ord> {
    last: BTreeMap<R, u64>,
}

impl<R: Ord + Clone> Outbox<R> {
    /// The version of the next message to a receiver.
    pub fn next(&mut self, receiver: &R) -> u64 {
        let last = self.last.entry(receiver.clone()).or_default();
        *last += 1;
        *last
    }

    /// The version of the last message to a receiver: what a full statement of everything replaces.
    pub fn last(&self, receiver: &R) -> u64 {
        self.last.get(receiver).copied().unwrap_or(0)
    }

    pub fn forget(&mut self, receiver: &R) {
        self.last.remove(receiver);
    }
}

/// What a receiver makes of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Received {
    /// The next one: it is in force.
    InOrder,
    /// It was seen before: it says nothing new.
    Old,
    /// Something is missing before it: ask for everything. It is not in force.
    Gap,
}

/// The versions that a receiver has seen.
#[derive(Clone, Debug, Default)]
pub struct Inbox {
    last: u64,
}

impl Inbox {
    pub fn receive(&mut self, version: u64) -> Received {
        if version <= self.last {
            Received::Old
        } else if version == self.last + 1 {
            self.last = version;
            Received::InOrder
        } else {
            Received::Gap
        }
    }

    /// Everything was stated anew, as of this version; false if something later is known already.
    pub fn restate(&mut self, version: u64) -> bool {
        let news = version >= self.last;
        self.last = self.last.max(version);
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_sees_what_it_missed_and_what_it_knows() {
        let mut sent = Outbox::default();
        let mut seen = Inbox::default();
        assert_eq!(seen.receive(sent.next(&"w")), Received::InOrder);
        let lost = sent.next(&"w");
        assert_eq!(seen.receive(sent.next(&"w")), Received::Gap);
        assert_eq!(seen.receive(sent.next(&"w")), Received::Gap, "until all was stated anew");
        assert!(seen.restate(sent.last(&"w")));
        assert_eq!(seen.receive(lost), Received::Old);
        assert_eq!(seen.receive(sent.next(&"w")), Received::InOrder);
        assert!(!seen.restate(2), "an old statement is late");
        assert_eq!(sent.next(&"another"), 1);
        sent.forget(&"w");
        assert_eq!(sent.last(&"w"), 0);
    }
}
