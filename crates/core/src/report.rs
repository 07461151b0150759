//! Workers' reports of transfers. What was planned, negotiated and observed is recorded separately.

use crate::flight::Leg;
use crate::types::{Encryption, TransferId, Transport};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What one process has received in a transfer; totals since its start, so a lost message costs nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransferReport {
    pub job: String,
    pub from: String,
    pub to: String,
    pub asked_bytes: u64,
    pub served_bytes: u64,
    /// Of those, bytes that never left this process.
    pub local_bytes: u64,
    /// And bytes that another receiver served, not their owner.
    pub peer_bytes: u64,
    pub fetches: u64,
    /// Bytes were in transit since the last report.
    pub moved: bool,
    /// The last report of this record: its process forgets it. What moves later begins another, with another `started`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub over: bool,
    /// Outstanding bytes, by the address of the worker that has them.
    pub waits_for: BTreeMap<String, u64>,
    /// Ranges under way.
    pub flows: u32,
    pub flows_peak: u32,
    pub refetches: u64,
    pub resumed: u64,
    pub busy: u64,
    /// Seconds since the epoch.
    pub started: f64,
    pub ended: f64,
    pub transport: TransportFacts,
    /// Where the facts of [`TransferReport::transport`] that are not counted lie in the table of a folded report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub facts: Option<usize>,
}

impl TransferReport {
    /// Adds what another record of the same transfer says. Merged with others, the sum says the same as both.
    pub fn absorb(&mut self, other: &TransferReport) {
        self.asked_bytes = self.asked_bytes.saturating_add(other.asked_bytes);
        self.served_bytes = self.served_bytes.saturating_add(other.served_bytes);
        self.local_bytes = self.local_bytes.saturating_add(other.local_bytes);
        self.peer_bytes = self.peer_bytes.saturating_add(other.peer_bytes);
        self.fetches = self.fetches.saturating_add(other.fetches);
        self.flows_peak = self.flows_peak.max(other.flows_peak);
        self.refetches = self.refetches.saturating_add(other.refetches);
        self.resumed = self.resumed.saturating_add(other.resumed);
        self.busy = self.busy.saturating_add(other.busy);
        self.started = self.started.min(other.started);
        self.ended = self.ended.max(other.ended);
        let facts = &mut self.transport;
        for (transport, bytes) in &other.transport.bytes {
            let own = facts.bytes.entry(*transport).or_default();
            *own = own.saturating_add(*bytes);
        }
        if let Some(chosen) = other.transport.chosen
            && facts.chosen.is_none_or(|own| facts.bytes.get(&own) < facts.bytes.get(&chosen))
        {
            let TransportFacts { reason, planned, .. } = other.transport.clone();
            (facts.chosen, facts.reason, facts.planned) = (Some(chosen), reason, planned);
        }
        facts.observed.add(&other.transport.observed);
        let room = NEGOTIATED_MAX.saturating_sub(facts.negotiated.len());
        let new = other.transport.negotiated.difference(&facts.negotiated).take(room).cloned().collect::<Vec<_>>();
        facts.negotiated.extend(new);
        facts.fallbacks.extend(other.transport.fallbacks.iter().cloned());
    }

    pub fn transfer(&self) -> TransferId {
        TransferId { job: self.job.as_str().into(), from: self.from.as_str().into(), to: self.to.as_str().into() }
    }
}

/// What was negotiated with the peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Negotiated {
    pub transport: String,
    pub congestion_control: String,
    pub rto_min_us: Option<u32>,
    /// TLS version and cipher, as the library names them.
    pub tls: Option<String>,
    /// The peer presented a certificate of the cluster.
    pub authenticated: bool,
    /// Of a Multipath TCP connection.
    pub subflows: Option<u32>,
    /// What was verified of shared memory.
    pub memory: Option<String>,
}

/// What happened on the connections of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Observed {
    pub rto_us_max: u32,
    pub rtt_us_max: u32,
    pub retransmits: u64,
    pub timeouts: u64,
    pub marks: u64,
    pub rates: Rates,
}

/// How fast fetches were: what Jain's index of a transfer's flows needs. Each fetch has one rate per source: its bytes
/// divided by the time that connections were busy with them, including failures. A single range has no rate: one that
/// is requested while the range before it waits for a lost packet arrives at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rates {
    pub count: u64,
    /// Of all rates, in bytes per second.
    pub sum: f64,
    /// Of their squares.
    pub squares: f64,
}

impl Rates {
    /// Adds `bytes` of one source, for which connections were `busy`.
    pub fn carried(&mut self, bytes: u64, busy: Duration) {
        // Without a minimum, a range faster than the clock's resolution would have an infinite rate.
        let rate = bytes as f64 / busy.as_secs_f64().max(1e-6);
        self.add(Rates { count: 1, sum: rate, squares: rate * rate });
    }

    fn add(&mut self, other: Rates) {
        self.count += other.count;
        self.sum += other.sum;
        self.squares += other.squares;
    }
}

/// All of it, for one transfer at one receiver.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransportFacts {
    pub chosen: Option<Transport>,
    pub reason: String,
    pub planned: Option<Leg>,
    /// Each negotiated result; one if all connections are alike.
    pub negotiated: BTreeSet<Negotiated>,
    pub observed: Observed,
    /// Bytes that each transport carried.
    pub bytes: BTreeMap<Transport, u64>,
    /// Where the plan and the negotiated result differ, and why.
    pub fallbacks: BTreeSet<String>,
}

/// All workers' reports of one transfer, merged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Merged {
    pub local_bytes: u64,
    pub peer_bytes: u64,
    pub fetches: u64,
    pub refetches: u64,
    pub resumed: u64,
    pub busy: u64,
    /// Ranges under way.
    pub flows_now: u32,
    /// Of one worker.
    pub flows_peak: u32,
    /// Seconds since the epoch; absent before the first report.
    pub started: Option<f64>,
    pub ended: Option<f64>,
    pub transport: TransportFacts,
}

/// The reason of a transfer without bytes between workers.
const NOTHING_LEFT: &str = "all data stayed on its worker";

impl Merged {
    pub fn of<'a>(reports: impl IntoIterator<Item = &'a TransferReport>) -> Merged {
        let mut merged = Merged::default();
        let mut reasons: BTreeMap<Transport, (String, Option<Leg>)> = BTreeMap::new();
        for own in reports {
            merged.local_bytes += own.local_bytes;
            merged.peer_bytes += own.peer_bytes;
            merged.fetches += own.fetches;
            merged.refetches += own.refetches;
            merged.resumed += own.resumed;
            merged.busy += own.busy;
            merged.flows_now += own.flows;
            merged.flows_peak = merged.flows_peak.max(own.flows_peak);
            merged.started = Some(merged.started.map_or(own.started, |first| first.min(own.started)));
            merged.ended = Some(merged.ended.map_or(own.ended, |last| last.max(own.ended)));
            let (facts, transport) = (&mut merged.transport, &own.transport);
            for (carrier, bytes) in &transport.bytes {
                *facts.bytes.entry(*carrier).or_default() += bytes;
            }
            if let Some(chosen) = transport.chosen {
                let said = || (transport.reason.clone(), transport.planned.clone());
                reasons.entry(chosen).or_insert_with(said);
            }
            facts.negotiated.extend(transport.negotiated.iter().cloned());
            facts.fallbacks.extend(transport.fallbacks.iter().cloned());
            facts.observed.add(&transport.observed);
        }
        // The transport that carried most bytes stands for the whole transfer.
        let facts = &mut merged.transport;
        let most = facts.bytes.iter().max_by_key(|(_, bytes)| **bytes).map(|(transport, _)| *transport);
        facts.reason = NOTHING_LEFT.into();
        if let Some((chosen, (reason, planned))) = most.and_then(|most| Some((most, reasons.remove(&most)?))) {
            (facts.chosen, facts.reason, facts.planned) = (Some(chosen), reason, planned);
        }
        merged
    }
}

impl Observed {
    /// Keeps the maximum: kernel counters only grow, and those of several connections cannot be added. Rates can.
    fn add(&mut self, other: &Observed) {
        self.rto_us_max = self.rto_us_max.max(other.rto_us_max);
        self.rtt_us_max = self.rtt_us_max.max(other.rtt_us_max);
        self.retransmits = self.retransmits.max(other.retransmits);
        self.timeouts = self.timeouts.max(other.timeouts);
        self.marks = self.marks.max(other.marks);
        self.rates.add(other.rates);
    }
}

/// Limit on negotiated results per transfer: peers could send any text, and all of it is reported.
const NEGOTIATED_MAX: usize = 32;

impl TransportFacts {
    /// Adds bytes that a leg of the plan carried. The transport that carried most bytes stands for the whole transfer.
    pub fn carried(&mut self, leg: &Leg, bytes: u64, negotiated: Negotiated) {
        let own = self.bytes.entry(leg.transport).or_default();
        *own += bytes;
        let own = *own;
        if self.planned.as_ref() != Some(leg) && self.bytes.values().all(|other| *other <= own) {
            self.chosen = Some(leg.transport);
            self.reason = leg.reason.clone();
            self.planned = Some(leg.clone());
        }
        self.agree(leg, negotiated);
    }

    /// Records a negotiated result, and where it differs from the plan.
    fn agree(&mut self, leg: &Leg, negotiated: Negotiated) {
        if self.negotiated.contains(&negotiated) || self.negotiated.len() >= NEGOTIATED_MAX {
            return;
        }
        if let Some(wanted) = &leg.congestion_control
            && *wanted != negotiated.congestion_control
        {
            let got = &negotiated.congestion_control;
            self.fallbacks.insert(format!("{wanted} was planned, the sender's kernel uses {got}"));
        }
        if leg.rto_min_us.is_some() && negotiated.rto_min_us.is_none() {
            self.fallbacks.insert("the sender's kernel has no minimum RTO per socket (before 6.15)".into());
        }
        if leg.transport == Transport::Mptcp && negotiated.subflows.is_none() {
            self.fallbacks.insert("mptcp was planned, the connection fell back to plain tcp".into());
        }
        if let (Some(planned), Some(got)) = (leg.subflows, negotiated.subflows)
            && got < planned
        {
            // The first range may be over before the path manager has made them all.
            self.fallbacks.insert(format!(
                "{planned} subflows were planned, a connection had {got}: the hosts' path managers decide (ip mptcp limits, \
                 ip mptcp endpoint)"
            ));
        }
        if leg.encryption == Encryption::Authenticated && !negotiated.authenticated {
            self.fallbacks.insert("the peer presented no certificate".into());
        }
        self.negotiated.insert(negotiated);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leg(transport: Transport) -> Leg {
        Leg {
            transport,
            reach: crate::flight::Reach::Anywhere,
            encryption: Encryption::None,
            congestion_control: None,
            rto_min_us: None,
            subflows: None,
            reason: format!("by {}", transport.name()),
            except: None,
        }
    }

    fn report(carried: &[(Transport, u64)], started: f64, ended: f64) -> TransferReport {
        let mut own =
            TransferReport { flows: 1, flows_peak: 3, fetches: 2, started, ended, ..TransferReport::default() };
        for (transport, bytes) in carried {
            let negotiated = Negotiated { transport: transport.name().into(), ..Negotiated::default() };
            own.transport.carried(&leg(*transport), *bytes, negotiated);
        }
        own
    }

    #[test]
    fn rates_of_all_receivers_are_added_up() {
        let mut one = report(&[], 0.0, 1.0);
        one.transport.observed.rates.carried(100, Duration::from_secs(1));
        one.transport.observed.rates.carried(100, Duration::from_millis(500));
        let mut other = report(&[], 0.0, 1.0);
        other.transport.observed.rates.carried(300, Duration::from_secs(1));
        let rates = Merged::of([&one, &other]).transport.observed.rates;
        assert_eq!(rates, Rates { count: 3, sum: 600.0, squares: 140_000.0 });
    }

    #[test]
    fn what_is_said_of_all_is_said_of_what_carried_most_of_it() {
        let all = [
            report(&[(Transport::Shm, 100)], 5.0, 6.0),
            report(&[(Transport::Tcp, 70), (Transport::Shm, 20)], 4.0, 9.0),
            report(&[(Transport::Tcp, 80)], 7.0, 8.0),
        ];
        let merged = Merged::of(&all);
        assert_eq!((merged.started, merged.ended), (Some(4.0), Some(9.0)));
        assert_eq!((merged.flows_now, merged.flows_peak, merged.fetches), (3, 3, 6));
        assert_eq!(merged.transport.bytes, BTreeMap::from([(Transport::Shm, 120), (Transport::Tcp, 150)]));
        assert_eq!((merged.transport.chosen, &*merged.transport.reason), (Some(Transport::Tcp), "by tcp"));
        assert_eq!(merged.transport.negotiated.len(), 2);
    }

    #[test]
    fn nobody_has_said_anything_yet() {
        let merged = Merged::of([]);
        assert_eq!((merged.started, merged.transport.chosen), (None, None));
        assert_eq!(merged.transport.reason, NOTHING_LEFT);
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let report = report(&[(Transport::Mptcp, 7)], 1.0, 2.0);
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<TransferReport>(&text).unwrap(), report);
    }
}
