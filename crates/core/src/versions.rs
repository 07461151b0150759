//! Versions of the messages from one process to another: a receiver that missed one notices that, and asks again.

use std::collections::{BTreeMap, VecDeque};

/// Messages to each receiver, numbered from 1, until the receiver confirms them.
#[derive(Clone, Debug)]
pub struct Outbox<R: Ord, M> {
    sent: BTreeMap<R, Sent<M>>,
}

#[derive(Clone, Debug)]
struct Sent<M> {
    last: u64,
    /// The newest ones, oldest first; the newest of them has the version `last`.
    unseen: VecDeque<M>,
}

impl<R: Ord, M> Default for Outbox<R, M> {
    fn default() -> Outbox<R, M> {
        Outbox { sent: BTreeMap::new() }
    }
}

impl<R: Ord + Clone, M> Outbox<R, M> {
    /// Keeps a message; returns the version with which it is sent.
    pub fn send(&mut self, receiver: &R, message: M) -> u64 {
        let sent = self.sent.entry(receiver.clone()).or_insert(Sent { last: 0, unseen: VecDeque::new() });
        sent.last += 1;
        sent.unseen.push_back(message);
        sent.last
    }

    /// The version of the last message to a receiver. A receiver that joins gets the whole state, and begins there.
    pub fn last(&self, receiver: &R) -> u64 {
        self.sent.get(receiver).map_or(0, |sent| sent.last)
    }

    /// A receiver has confirmed everything up to a version: it will not be requested again.
    pub fn seen(&mut self, receiver: &R, version: u64) {
        if let Some(sent) = self.sent.get_mut(receiver) {
            let rest = sent.last.saturating_sub(version) as usize;
            sent.unseen.drain(..sent.unseen.len().saturating_sub(rest));
        }
    }

    /// Messages after a version, oldest first, as they were sent: for a receiver that asks again.
    pub fn after(&self, receiver: &R, version: u64) -> impl Iterator<Item = (u64, &M)> {
        let messages = self.sent.get(receiver).into_iter().flat_map(|sent| {
            let first = sent.last - sent.unseen.len() as u64 + 1;
            (first..).zip(&sent.unseen)
        });
        messages.filter(move |(number, _)| *number > version)
    }

    pub fn forget(&mut self, receiver: &R) {
        self.sent.remove(receiver);
    }
}

/// How a received version compares with the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// The next one: it is in force.
    InOrder,
    /// It was received before.
    Old,
    /// A version before it is missing: ask again. It is not in force.
    Gap,
}

/// The versions that a receiver has seen.
#[derive(Clone, Debug, Default)]
pub struct Inbox {
    last: u64,
}

impl Inbox {
    /// Of a receiver that got the whole state as of a version.
    pub fn from(version: u64) -> Inbox {
        Inbox { last: version }
    }

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

    /// Everything up to this version was received.
    pub fn last(&self) -> u64 {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_sees_what_it_missed_and_asks_again() {
        let mut sent = Outbox::default();
        let mut seen = Inbox::default();
        assert_eq!(seen.receive(sent.send(&"w", 'a')), Received::InOrder);
        let lost = sent.send(&"w", 'b');
        assert_eq!(seen.receive(sent.send(&"w", 'c')), Received::Gap);
        assert_eq!(seen.receive(sent.send(&"w", 'd')), Received::Gap, "until it has what it missed");
        let again: Vec<_> = sent.after(&"w", seen.last()).collect();
        assert_eq!(again, [(lost, &'b'), (3, &'c'), (4, &'d')]);
        assert!(again.iter().all(|(version, _)| seen.receive(*version) == Received::InOrder));
        assert_eq!(seen.receive(lost), Received::Old);
        assert_eq!(sent.send(&"another", 'x'), 1);
    }

    #[test]
    fn what_was_seen_is_not_kept() {
        let mut sent = Outbox::default();
        for message in 'a'..='e' {
            sent.send(&"w", message);
        }
        sent.seen(&"w", 3);
        sent.seen(&"w", 1);
        assert_eq!(sent.after(&"w", 0).collect::<Vec<_>>(), [(4, &'d'), (5, &'e')]);
        sent.seen(&"w", 9);
        assert_eq!(sent.after(&"w", 0).count(), 0);
        assert_eq!(Inbox::from(sent.last(&"w")).receive(sent.send(&"w", 'f')), Received::InOrder);
        sent.forget(&"w");
        assert_eq!(sent.last(&"w"), 0);
    }
}
