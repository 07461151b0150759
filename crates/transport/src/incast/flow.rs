//! What a sender's kernel reports for one receiver.

use crate::socket::{self, TcpInfo};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::net::TcpStream;

/// State of a sender's TCP at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Variables {
    pub cwnd: u32,
    pub ssthresh: u32,
    pub srtt_us: u32,
    /// Deviation of the round trip (RFC 6298).
    pub rttvar_us: u32,
    pub rto_us: u32,
    /// Doublings of the timeout.
    pub backoff: u8,
    /// Segments in flight, lost, and retransmitted.
    pub unacked: u32,
    pub lost: u32,
    pub retransmitted: u32,
    /// Bytes per second.
    pub delivery_rate: u64,
    /// Bytes that have arrived since the connection began.
    pub acked_bytes: u64,
}

impl Variables {
    /// `None`: nothing is in flight.
    pub(super) fn of(stream: &TcpStream) -> Option<Variables> {
        let info = socket::tcp_info(stream);
        (info.unacked > 0).then_some(Variables {
            cwnd: info.cwnd,
            ssthresh: info.ssthresh,
            srtt_us: info.rtt_us,
            rttvar_us: info.rtt_deviation_us,
            rto_us: info.rto_us,
            backoff: info.backoff,
            unacked: info.unacked,
            lost: info.lost,
            retransmitted: info.retransmitted,
            delivery_rate: info.delivery_rate,
            acked_bytes: info.acked_bytes,
        })
    }
}

/// What the sender's kernel reports of one connection, since it began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Flow {
    #[serde(default)]
    pub sender: String,
    pub congestion_control: String,
    /// `None` where the kernel has no such option of a socket.
    pub rto_min_us: Option<u32>,
    pub rto_us: u32,
    pub srtt_us: u32,
    pub cwnd: u32,
    /// Its congestion window in segments at the first request.
    #[serde(default)]
    pub cwnd_first: u32,
    pub retransmits: u32,
    pub timeouts: u32,
    pub delivered: u32,
    pub marks: u32,
    /// For all connections of the sender's host: the kernel does not count them separately.
    pub loss_probes_of_host: u64,
    #[serde(default)]
    pub bytes: u64,
    /// The sender has reported at the end; else it was busy or gone, and nothing was counted.
    #[serde(default)]
    pub asked: bool,
}

impl Flow {
    pub(super) fn of(stream: &TcpStream) -> Flow {
        let TcpInfo { rto_us, rtt_us, cwnd, retransmits, timeouts, delivered, delivered_ce, .. } =
            socket::tcp_info(stream);
        Flow {
            sender: String::new(),
            congestion_control: socket::congestion_control(stream),
            rto_min_us: socket::rto_min_us(stream),
            rto_us,
            srtt_us: rtt_us,
            cwnd,
            cwnd_first: cwnd,
            retransmits,
            timeouts,
            delivered,
            marks: delivered_ce,
            loss_probes_of_host: loss_probes(),
            bytes: 0,
            asked: false,
        }
    }

    /// Reads a sender's answer.
    ///
    /// # Errors
    /// The sender's error text, or why the answer is invalid.
    pub(super) fn from_answer(mut answer: Value) -> Result<Flow, String> {
        match answer["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => serde_json::from_value(answer["flow"].take()).map_err(|error| error.to_string()),
        }
    }

    /// This connection's, with the counts of those before it.
    pub(super) fn with(mut self, before: &Flow) -> Flow {
        self.retransmits += before.retransmits;
        self.timeouts += before.timeouts;
        self.delivered += before.delivered;
        self.marks += before.marks;
        self
    }

    /// What happened since an earlier moment; what is a state and not a count stays.
    pub(super) fn since(mut self, before: &Flow) -> Flow {
        self.retransmits = self.retransmits.saturating_sub(before.retransmits);
        self.timeouts = self.timeouts.saturating_sub(before.timeouts);
        self.delivered = self.delivered.saturating_sub(before.delivered);
        self.marks = self.marks.saturating_sub(before.marks);
        self.loss_probes_of_host = self.loss_probes_of_host.saturating_sub(before.loss_probes_of_host);
        self
    }
}

/// `TCPLossProbes` of this thread's network namespace; 0 if the kernel does not report it.
fn loss_probes() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    let place = names.split(' ').position(|name| name == "TCPLossProbes");
    place.and_then(|place| values.split(' ').nth(place)?.parse().ok()).unwrap_or(0)
}
