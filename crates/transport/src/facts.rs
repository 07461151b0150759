//! What was planned, what was negotiated, and what was observed of a connection: three things, recorded apart.

use mission_core::flight::Leg;
use mission_core::types::{Encryption, Transport};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What the sender's kernel says of the connection; comes back with every chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sender {
    pub congestion_control: String,
    /// As the kernel rounded it; `None` where it has no such option.
    pub rto_min_us: Option<u32>,
    pub rto_us: u32,
    pub rtt_us: u32,
    pub cwnd: u32,
    pub retransmits: u32,
    pub timeouts: u32,
    /// Segments that arrived marked by a switch.
    pub marks: u32,
}

impl Sender {
    /// As the value of a header.
    pub fn write(&self) -> String {
        let rto_min = self.rto_min_us.map_or(String::new(), |value| format!(" rto_min_us={value}"));
        format!(
            "cc={}{rto_min} rto_us={} rtt_us={} cwnd={} retransmits={} timeouts={} marks={}",
            self.congestion_control, self.rto_us, self.rtt_us, self.cwnd, self.retransmits, self.timeouts, self.marks
        )
    }

    /// Reads what [`Sender::write`] wrote; words that are unknown or no numbers are passed over.
    pub fn parse(text: &str) -> Sender {
        let mut sender = Sender::default();
        for (key, value) in text.split(' ').filter_map(|word| word.split_once('=')) {
            let number = value.parse().unwrap_or_default();
            match key {
                "cc" => sender.congestion_control = value.to_owned(),
                "rto_min_us" => sender.rto_min_us = Some(number),
                "rto_us" => sender.rto_us = number,
                "rtt_us" => sender.rtt_us = number,
                "cwnd" => sender.cwnd = number,
                "retransmits" => sender.retransmits = number,
                "timeouts" => sender.timeouts = number,
                "marks" => sender.marks = number,
                _ => {}
            }
        }
        sender
    }
}

/// What was agreed with the peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Negotiated {
    pub transport: String,
    pub congestion_control: String,
    pub rto_min_us: Option<u32>,
    /// TLS version and cipher, as the library names them.
    pub tls: Option<String>,
    /// The peer showed a certificate of the cluster.
    pub authenticated: bool,
    /// Of a Multipath TCP connection.
    pub subflows: Option<u32>,
    /// What was verified of shared memory.
    pub memory: Option<String>,
}

/// What happened on the connections of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Observed {
    pub rto_us_max: u32,
    pub rtt_us_max: u32,
    pub retransmits: u64,
    pub timeouts: u64,
    pub marks: u64,
}

/// All of it, for one transfer at one receiver.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TransportFacts {
    pub chosen: Option<Transport>,
    pub reason: String,
    pub planned: Option<Leg>,
    /// Each agreement that was reached; one, where all connections are alike.
    pub negotiated: BTreeSet<Negotiated>,
    pub observed: Observed,
    /// Bytes that each transport carried.
    pub bytes: BTreeMap<Transport, u64>,
    /// Where the plan and the agreement differ, and why.
    pub fallbacks: BTreeSet<String>,
}

impl TransportFacts {
    /// Notes bytes that a leg of the plan carried. What is said of the transfer as a whole is said of the transport that
    /// carried most of it.
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

    /// Notes an agreement and where it falls short of the plan.
    fn agree(&mut self, leg: &Leg, negotiated: Negotiated) {
        if self.negotiated.contains(&negotiated) {
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
            self.fallbacks.insert("the peer showed no certificate".into());
        }
        self.negotiated.insert(negotiated);
    }
}
