//! Whether ECN marks arrive end to end: measured, never configured (DESIGN 4.3; paper 001, table 4.5 and 5.4).
//!
//! A mark is only seen where a queue is long. So each host in turn is sent to by two others at once, by DCTCP: for a moment
//! its port gets twice what it can pass on. If packets were marked, its switch marks; if packets were lost and none was
//! marked, it does not; if neither happened, nothing was learnt. Who sends changes with each round, and so do the paths.

use crate::defaults::{ECN_PROBE_AGAIN, ECN_PROBE_EVERY, ECN_PROBE_LOST_MIN};
use crate::mission::WorkerId;
use crate::nouns::HostId;
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Those who send at once to one receiver.
const SENDERS: usize = 2;

/// What a receiver learnt of its two senders' connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Packets that arrived marked.
    pub marks: u64,
    /// Segments that were sent again.
    pub lost: u64,
    /// Connections that agreed on no ECN.
    pub without: u64,
}

impl Seen {
    /// Whether marks arrive at `host`, and why that is believed; `None` where nothing was learnt.
    pub fn verdict(&self, host: &str) -> Option<(bool, String)> {
        if self.without > 0 {
            return Some((false, format!("{host} and a host that sent to it did not agree on ECN")));
        }
        if self.marks > 0 {
            return Some((true, format!("{host} got marked packets")));
        }
        let why = format!("{host}'s packets were lost and none was marked");
        (self.lost >= ECN_PROBE_LOST_MIN).then_some((false, why))
    }
}

/// What is known of two hosts together: marks arrive where they do at both; what fails decides before what is not known.
pub fn both(one: Option<(bool, String)>, other: Option<(bool, String)>) -> Option<(bool, String)> {
    match (one, other) {
        (Some((false, why)), _) | (_, Some((false, why))) => Some((false, why)),
        (one, other) => one.and(other),
    }
}

/// One host is sent to by others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    pub receiver: WorkerId,
    pub senders: Vec<WorkerId>,
}

/// Says when to probe, and who.
#[derive(Default)]
pub struct Prober {
    last: Option<Time>,
    round: usize,
    /// Somebody joined or left since.
    changed: bool,
}

impl Prober {
    /// Hosts joined or left: what was learnt is not of them.
    pub fn changed(&mut self) {
        self.changed = true;
    }

    /// Whether the last probes are old enough.
    pub fn is_due(&self, now: Time) -> bool {
        let after = if self.changed { ECN_PROBE_AGAIN } else { ECN_PROBE_EVERY };
        self.last.is_none_or(|last| now.since(last) >= after)
    }

    /// Probes to make at `now`, one for each host; none while the last ones are recent.
    pub fn due<'a>(&mut self, now: Time, workers: impl Iterator<Item = (&'a WorkerId, &'a HostId)>) -> Vec<Probe> {
        if !self.is_due(now) {
            return Vec::new();
        }
        // One worker speaks for all of its host.
        let mut hosts: BTreeMap<&HostId, &WorkerId> = BTreeMap::new();
        workers.for_each(|(worker, host)| {
            hosts.entry(host).or_insert(worker);
        });
        let hosts: Vec<_> = hosts.into_values().collect();
        if hosts.len() <= SENDERS {
            return Vec::new();
        }
        self.last = Some(now);
        self.changed = false;
        // In each round other neighbours in the list: 1 and 2 further on, then 2 and 3, ...
        let first = self.round % (hosts.len() - SENDERS);
        self.round += 1;
        let sender = |receiver: usize, number: usize| hosts[(receiver + 1 + first + number) % hosts.len()].clone();
        (0..hosts.len())
            .map(|own| Probe {
                receiver: hosts[own].clone(),
                senders: (0..SENDERS).map(|number| sender(own, number)).collect(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

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
    fn every_host_is_sent_to_by_two_others_and_in_time_by_all() {
        let (mut prober, workers) = (Prober::default(), workers(5));
        let mut met = BTreeSet::new();
        for round in 0..3 {
            let probes = due(&mut prober, 100.0 * f64::from(round), &workers);
            assert_eq!(probes.len(), 5);
            for probe in probes {
                assert_eq!(probe.senders.len(), 2);
                assert_ne!(probe.senders[0], probe.senders[1]);
                assert!(!probe.senders.contains(&probe.receiver));
                met.extend(probe.senders.into_iter().map(|sender| (probe.receiver.clone(), sender)));
            }
        }
        assert_eq!(met.len(), 5 * 4);
    }

    #[test]
    fn probes_wait_for_their_time_unless_somebody_came() {
        let (mut prober, all) = (Prober::default(), workers(4));
        assert!(due(&mut prober, 0.0, &workers(2)).is_empty(), "two cannot congest a third");
        assert_eq!(due(&mut prober, 0.0, &all[..3]).len(), 3);
        assert!(due(&mut prober, 2.0, &all[..3]).is_empty());
        prober.changed();
        assert_eq!(due(&mut prober, 2.0, &all).len(), 4);
        assert!(due(&mut prober, 3.0, &all).is_empty());
        assert_eq!(due(&mut prober, 13.0, &all).len(), 4);
    }
}
