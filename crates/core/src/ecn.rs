//! Whether ECN marks arrive end to end: measured, never configured (paper 001, table 4.5 and 5.4).
//! Design: docs/explanation/design-lab.md, "ECN is measured".
//!
//! A mark is only seen where a queue is long. So two hosts send to each host in turn at the same time, by DCTCP: for a
//! moment its port receives twice its rate. If packets were marked, its switch marks; if packets were lost and none was
//! marked, it does not; otherwise the result is unknown.
//!
//! A sender sends to only one receiver in a round: with two, its own link would halve its rate, and no port would be
//! overloaded. So a turn of all hosts takes a few rounds, and the senders, and with them the paths, change with each
//! turn.

use crate::defaults::{ECN_PROBE_AGAIN, ECN_PROBE_EVERY, ECN_PROBE_LOST_MIN, ECN_PROBE_ROUND};
use crate::types::{HostId, WorkerId};
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Hosts that send to one receiver at the same time.
const SENDERS: usize = 2;

/// What a receiver learnt of its two senders' connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Packets that arrived marked.
    pub marks: u64,
    /// Retransmitted segments.
    pub lost: u64,
    /// Connections that did not negotiate ECN.
    pub without: u64,
}

impl Seen {
    /// Whether marks arrive at `host`, with the evidence; `None` if that is unknown.
    pub fn verdict(&self, host: &str) -> Option<(bool, String)> {
        if self.without > 0 {
            return Some((false, format!("{host} and a host that sent to it did not negotiate ECN")));
        }
        if self.marks > 0 {
            return Some((true, format!("{host} received marked packets")));
        }
        let why = format!("packets to {host} were lost and none was marked");
        (self.lost >= ECN_PROBE_LOST_MIN).then_some((false, why))
    }
}

/// A measurement: one host receives from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    pub receiver: WorkerId,
    pub senders: Vec<WorkerId>,
}

/// Decides when to probe, and which hosts.
#[derive(Default)]
pub struct Prober {
    /// When the last turn of all hosts began, and how many have.
    turn: Option<Time>,
    turns: usize,
    /// When the last round of that turn began.
    round: Option<Time>,
    /// Hosts that have not been receivers in this turn yet.
    waiting: Vec<HostId>,
    /// Workers that have not reported in this round yet.
    asked: BTreeSet<WorkerId>,
    /// Somebody joined or left since.
    changed: bool,
}

impl Prober {
    /// Hosts joined or left: earlier results do not cover them.
    pub fn changed(&mut self) {
        self.changed = true;
    }

    /// A receiver has reported, even if it saw nothing.
    pub fn reported(&mut self, receiver: &WorkerId) {
        self.asked.remove(receiver);
    }

    /// Whether the next round of a turn, or the next turn, may begin. The wait for missing reports is short.
    pub fn is_due(&self, now: Time) -> bool {
        let passed = |since: Option<Time>, time| since.is_none_or(|since| now.since(since) >= time);
        let again = if self.changed { ECN_PROBE_AGAIN } else { ECN_PROBE_EVERY };
        (self.asked.is_empty() || passed(self.round, ECN_PROBE_ROUND))
            && (!self.waiting.is_empty() || passed(self.turn, again))
    }

    /// Probes to make at `now`; none while the last ones are recent.
    pub fn due<'a>(&mut self, now: Time, workers: impl Iterator<Item = (&'a WorkerId, &'a HostId)>) -> Vec<Probe> {
        if !self.is_due(now) {
            return Vec::new();
        }
        // One worker speaks for all of its host.
        let mut hosts: BTreeMap<&HostId, &WorkerId> = BTreeMap::new();
        workers.for_each(|(worker, host)| {
            hosts.entry(host).or_insert(worker);
        });
        self.asked.clear();
        self.waiting.retain(|host| hosts.contains_key(host));
        if hosts.len() <= SENDERS {
            return Vec::new();
        }
        if self.waiting.is_empty() {
            self.waiting = hosts.keys().copied().cloned().collect();
            self.waiting.rotate_left(self.turns % hosts.len());
            (self.turn, self.turns, self.changed) = (Some(now), self.turns + 1, false);
        }
        self.round = Some(now);
        let count = self.waiting.len().min(hosts.len() / (1 + SENDERS));
        let receivers: Vec<HostId> = self.waiting.drain(..count).collect();
        let mut others: Vec<_> =
            hosts.iter().filter(|(host, _)| !receivers.contains(host)).map(|(_, own)| *own).collect();
        // By one, two, three, ... further on: in step with the receivers' order, few would ever meet.
        let first = self.turns * (self.turns + 1) / 2 % others.len();
        others.rotate_left(first);
        let receivers: Vec<_> = receivers.iter().map(|host| hosts[host].clone()).collect();
        self.asked = receivers.iter().cloned().collect();
        let probe = |(receiver, senders): (WorkerId, &[&WorkerId])| Probe {
            receiver,
            senders: senders.iter().copied().cloned().collect(),
        };
        receivers.into_iter().zip(others.chunks_exact(SENDERS)).map(probe).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workers(count: usize) -> Vec<(WorkerId, HostId)> {
        (0..count).map(|number| (format!("w{number}").into(), format!("h{number}").into())).collect()
    }

    fn due(prober: &mut Prober, seconds: f64, workers: &[(WorkerId, HostId)]) -> Vec<Probe> {
        prober.due(Time::from_secs_f64(seconds), workers.iter().map(|(worker, host)| (worker, host)))
    }

    #[test]
    fn marks_losses_and_refusals_are_told_apart() {
        let verdict = |marks, lost, without| Seen { marks, lost, without }.verdict("h1").map(|(arrive, _)| arrive);
        assert_eq!(verdict(5, 100, 0), Some(true));
        assert_eq!(verdict(0, 100, 0), Some(false));
        assert_eq!(verdict(0, 1, 0), None, "one may be a probe for a lost tail");
        assert_eq!(verdict(0, 0, 0), None, "no queue was long");
        assert_eq!(verdict(5, 0, 1), Some(false));
    }

    #[test]
    fn every_host_is_sent_to_in_each_turn_and_in_time_by_most_others() {
        for count in [3, 4, 5, 6, 7, 9] {
            let (mut prober, workers) = (Prober::default(), workers(count));
            let mut met = BTreeSet::new();
            for turn in 0..8 * count {
                let mut received = BTreeSet::new();
                while received.len() < count {
                    let probes = due(&mut prober, 100.0 * turn as f64, &workers);
                    assert!(!probes.is_empty(), "the next round follows when the last one is told");
                    let mut busy = BTreeSet::new();
                    for probe in probes {
                        assert!(received.insert(probe.receiver.clone()), "once in a turn");
                        assert_eq!(probe.senders.len(), 2);
                        assert!(busy.insert(probe.receiver.clone()), "a receiver does nothing else in a round");
                        for sender in probe.senders {
                            assert!(busy.insert(sender.clone()), "nor does a sender");
                            met.insert((probe.receiver.clone(), sender));
                        }
                        prober.reported(&probe.receiver);
                    }
                }
                assert!(due(&mut prober, 100.0 * turn as f64, &workers).is_empty(), "the turn is over");
            }
            assert!(met.len() >= count * (count - 1) * 3 / 4, "{} pairs of {count} hosts", met.len());
        }
    }

    #[test]
    fn probes_wait_for_their_time_unless_somebody_came() {
        let (mut prober, all) = (Prober::default(), workers(4));
        assert!(due(&mut prober, 0.0, &all[..2]).is_empty(), "two cannot congest a third");
        let turn = |prober: &mut Prober, seconds: f64, workers: &[(WorkerId, HostId)]| {
            let mut probes = 0;
            while let [probe] = due(prober, seconds, workers).as_slice() {
                prober.reported(&probe.receiver);
                probes += 1;
            }
            probes
        };
        assert_eq!(turn(&mut prober, 0.0, &all[..3]), 3);
        assert_eq!(turn(&mut prober, 2.0, &all[..3]), 0);
        prober.changed();
        assert_eq!(turn(&mut prober, 2.0, &all), 4);
        assert_eq!(turn(&mut prober, 3.0, &all), 0);
        assert_eq!(turn(&mut prober, 13.0, &all), 4);
    }

    #[test]
    fn a_receiver_that_says_nothing_holds_nobody_up_for_long() {
        let (mut prober, all) = (Prober::default(), workers(3));
        assert_eq!(due(&mut prober, 0.0, &all)[0].receiver, all[0].0);
        assert!(due(&mut prober, 0.5, &all).is_empty(), "the first is still at it");
        assert_eq!(due(&mut prober, 5.0, &all)[0].receiver, all[1].0);
        assert_eq!(due(&mut prober, 10.0, &all[..2]), [], "and who is gone is not asked");
    }
}
