//! What the sender's kernel reports of a connection; reports of transfers are in [`mission_core::report`].

use serde::Serialize;

/// Letters of a name of a congestion control (`TCP_CA_NAME_MAX`, include/net/tcp.h).
const CC_NAME_MAX: usize = 16;

/// What the sender's kernel reports of the connection; returned with every chunk.
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
                "cc" => sender.congestion_control = value.chars().take(CC_NAME_MAX).collect(),
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
