//! TCP incast: many senders answer one receiver at once, the port before it overflows, and the link waits for timeouts.
//!
//! The model of Chen, Griffith, Zats, Joseph and Katz ("Understanding TCP Incast and Its Implications for Big Data
//! Workloads", papers 000, 002 and 004), with the shared buffer of paper 003. Symbols, and the fields that hold them:
//!
//! | symbol | meaning | unit |
//! |---|---|---|
//! | N | senders that answer at once | |
//! | blockSize | bytes of one sender's answer, here `fragment` | bytes |
//! | linkBandwidth | of the receiver's link | bit/s |
//! | RTT, RTO | round trip, retransmission timeout | s |
//! | alpha | fraction of an RTO in which the link is idle (partial RTO) | |
//! | perSenderBuffer | of the port before the receiver; one for all senders, despite its name | bytes |
//!
//! What the papers print differently: 000 and 004 say that goodput collapses for 16 KB at 23 senders, 002 says 13; the
//! equation gives 13, and so does figure 4. All three say that the equation gives 2 senders for 128 KB; it gives 3. Table 1
//! counts 16 KB as 16,000 bytes and the buffer's 64 KB as 65,536: only so do table and onsets come out.

pub mod advice;
pub mod modern;

use modern::Term;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The path to one receiver.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Path {
    /// Rate of the receiver's link, in bits per second.
    pub link_bits_per_sec: f64,
    /// Round trip without queues, in seconds.
    pub rtt_s: f64,
    /// Minimum retransmission timeout, in seconds.
    pub rto_s: f64,
    pub buffer: Buffer,
    /// Payload of a full segment, in bytes.
    pub mss: u64,
    /// What a connection sends at first, in bytes. Linux has ten segments; Table 1 begins with one.
    pub initial_window: u64,
    /// Selective acknowledgments, and with them recovery by time and tail loss probes (RFC 8985); read by [`modern`] only.
    #[serde(default = "sack")]
    pub sack: bool,
    /// Each block comes over connections that have just begun; read by [`modern`] only.
    #[serde(default)]
    pub fresh: bool,
}

/// The default: true, as on every current system.
fn sack() -> bool {
    true
}

/// What the port before the receiver may hold.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Buffer {
    /// A static number of bytes.
    Port(u64),
    /// The switch of paper 003, slide 13: 786,432 bytes shared by each group of 12 ports, each port at most a sixth. The
    /// other ports of the group are taken to be empty: there is one receiver.
    #[serde(rename = "paper-003")]
    Paper003,
}

/// Bytes that a group of ports shares, and into how many parts of which a port may have one.
const PAPER_003: (u64, u64) = (786_432, 6);

impl Buffer {
    /// Bytes for the receiver's port.
    pub fn bytes(self) -> u64 {
        match self {
            Buffer::Port(bytes) => bytes,
            Buffer::Paper003 => PAPER_003.0 / PAPER_003.1,
        }
    }
}

/// How much each of `senders` sends for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Every sender this many bytes (FAST 2008, WREN 2009).
    Fragment(u64),
    /// All together this many (SIGCOMM 2009).
    Total(u64),
}

impl Form {
    pub fn fragment(self, senders: u32) -> u64 {
        match self {
            Form::Fragment(bytes) => bytes,
            Form::Total(bytes) => bytes.div_ceil(u64::from(senders.max(1))),
        }
    }
}

impl Path {
    /// Time of a block in which nothing is lost, in seconds: the denominator of equation 1.
    pub fn ideal_seconds(&self, fragment: u64, senders: u32) -> f64 {
        self.rtt_s + fragment as f64 * 8.0 * f64::from(senders) / self.link_bits_per_sec
    }

    /// Goodput in bits per second of blocks that take `seconds` each.
    fn goodput(fragment: u64, senders: u32, seconds: f64) -> f64 {
        fragment as f64 * 8.0 * f64::from(senders) / seconds
    }

    /// Equation 1: goodput in bits per second before the onset of incast.
    pub fn goodput_before(&self, fragment: u64, senders: u32) -> f64 {
        Path::goodput(fragment, senders, self.ideal_seconds(fragment, senders))
    }

    /// Equation 4: goodput in bits per second after the onset, where the link is idle for `alpha` RTOs in every block;
    /// with `alpha` 1 it is equation 2. The paper fits 0.6 and, with more senders, 1.0 to 1024 KB, 0.8 and 1.5 to 512 KB.
    pub fn goodput_after(&self, fragment: u64, senders: u32, alpha: f64) -> f64 {
        Path::goodput(fragment, senders, self.ideal_seconds(fragment, senders) + alpha * self.rto_s)
    }

    /// As equation 4, with a wait of `wait_s` seconds before each of a sender's packets: what a model of timeouts alone
    /// leaves out, and why it predicts too much (paper 003, slide 16: "inter-packet wait time").
    pub fn goodput_waiting(&self, fragment: u64, senders: u32, alpha: f64, wait_s: f64) -> f64 {
        let waits = fragment.div_ceil(self.mss) as f64 * wait_s;
        Path::goodput(fragment, senders, self.ideal_seconds(fragment, senders) + alpha * self.rto_s + waits)
    }

    /// Equation 3: senders from which on goodput collapses.
    pub fn onset(&self, fragment: u64) -> u32 {
        let largest = slow_start_windows(fragment, self.mss, self.initial_window).into_iter().max().unwrap_or(1);
        u32::try_from(self.buffer.bytes().div_ceil(largest) + 1).unwrap_or(u32::MAX)
    }
}

/// Figure 4: at 16 KB some measurements are near the link's rate up to 16 senders, where the equation says 13.
const ONSET_LATE: f64 = 16.0 / 13.0;
/// Senders that are tried for the onset where a block is split over them.
const SENDERS_MAX: u32 = 10_000;

impl Path {
    /// The onset for a block of this form, and how far it may be off: from the senders whose largest windows fill the buffer
    /// (equation 3 adds one for what is on the wire) to the last that figure 4 shows.
    fn onset_of(&self, form: Form) -> Onset {
        let (bytes, value) = match form {
            Form::Fragment(bytes) => (bytes, self.onset(bytes)),
            Form::Total(bytes) => {
                let collapses = |senders: &u32| *senders >= self.onset(form.fragment(*senders));
                (bytes, (2..=SENDERS_MAX).find(collapses).unwrap_or(SENDERS_MAX))
            }
        };
        let high = (f64::from(value) * ONSET_LATE).round() as u32;
        Onset { bytes, value: Some(value), low: Some((value - 1).max(2)), high: Some(high) }
    }

    /// # Errors
    /// An invalid path: one line with a hint.
    pub fn check(&self) -> Result<(), String> {
        let positive = |value: f64, what: &str| {
            if value.is_finite() && value > 0.0 { Ok(()) } else { Err(format!("{what} of {value}: use more than 0")) }
        };
        positive(self.link_bits_per_sec, "a link rate")?;
        positive(self.rtt_s, "a round trip time")?;
        positive(self.rto_s, "a retransmission timeout")?;
        positive(self.mss as f64, "a segment size")?;
        positive(self.initial_window as f64, "an initial window")?;
        if self.buffer.bytes() < self.mss {
            return Err(format!(
                "a buffer of {} B holds no packet of {} B: use a larger one",
                self.buffer.bytes(),
                self.mss
            ));
        }
        Ok(())
    }
}

/// Table 1: what a connection sends in each round trip of slow start, in bytes, until `fragment` bytes are sent.
pub fn slow_start_windows(fragment: u64, mss: u64, initial_window: u64) -> Vec<u64> {
    let (mut windows, mut left, mut window) = (Vec::new(), fragment, initial_window.max(mss));
    while left > 0 {
        let sent = window.min(left);
        windows.push(sent);
        left -= sent;
        window = window.saturating_mul(2);
    }
    windows
}

/// Which equations answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Model {
    /// Equations 1 to 4 as printed.
    Paper,
    /// Equation 4 with its alpha explained, fitted to kernels of today ([`modern`]).
    Modern,
}

/// A question to the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    pub path: Path,
    pub forms: Vec<Form>,
    pub senders: Vec<u32>,
    pub model: Model,
    /// Fraction of an RTO in which the link is idle in each block after the onset.
    pub alpha: f64,
    /// Before each packet of a sender, in seconds; 0 but in the variant of paper 003.
    pub wait_s: f64,
    /// Terms of the modern model to omit, to measure their effect.
    #[serde(default)]
    pub without: BTreeSet<Term>,
}

/// The answer, in the order of the question.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    pub rows: Vec<Row>,
    pub onset: Vec<Onset>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Regime {
    Ideal,
    Collapsed,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Of each sender.
    pub fragment_bytes: u64,
    pub senders: u32,
    pub goodput_mbit: f64,
    /// Where nothing is lost: equation 1 with headers, and slow start where connections are fresh.
    pub ideal_mbit: f64,
    pub regime: Regime,
}

/// From how many senders on goodput collapses; absent where it never does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Onset {
    /// As asked: of each sender, or of all.
    pub bytes: u64,
    pub value: Option<u32>,
    /// It is between these, both among them, in nine cases of ten.
    pub low: Option<u32>,
    pub high: Option<u32>,
}

/// Answers a question.
///
/// # Errors
/// An invalid question: one line with a hint.
pub fn predict(question: &Question) -> Result<Answer, String> {
    let path = &question.path;
    path.check()?;
    if question.senders.contains(&0) {
        return Err("0 senders send nothing: use 1 or more".into());
    }
    let mut answer = Answer { rows: Vec::new(), onset: Vec::new() };
    for form in &question.forms {
        let (Form::Fragment(bytes) | Form::Total(bytes)) = *form;
        if bytes == 0 {
            return Err("a fragment of 0 bytes: use 1 or more".into());
        }
        let onset = match question.model {
            Model::Paper => path.onset_of(*form),
            Model::Modern => modern::onset(path, *form, &question.without),
        };
        answer.onset.push(onset);
        for &senders in &question.senders {
            let fragment = form.fragment(senders);
            let collapsed = onset.value.is_some_and(|value| senders >= value);
            let goodput = match question.model {
                Model::Modern => modern::goodput(path, fragment, senders, &question.without),
                Model::Paper if collapsed => path.goodput_waiting(fragment, senders, question.alpha, question.wait_s),
                Model::Paper => path.goodput_before(fragment, senders),
            };
            answer.rows.push(Row {
                fragment_bytes: fragment,
                senders,
                goodput_mbit: goodput / 1e6,
                ideal_mbit: modern::ideal(path, fragment, senders) / 1e6,
                regime: if collapsed { Regime::Collapsed } else { Regime::Ideal },
            });
        }
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of figure 4: 1 Gbit/s, 64 KB for the port, RTO 200 ms.
    fn path(buffer: u64) -> Path {
        Path {
            link_bits_per_sec: 1e9,
            rtt_s: 1e-3,
            rto_s: 0.2,
            buffer: Buffer::Port(buffer),
            mss: 1448,
            initial_window: 1448,
            fresh: false,
            sack: false,
        }
    }

    #[test]
    fn the_windows_of_slow_start_are_those_of_table_1() {
        let windows = |fragment| slow_start_windows(fragment, 1448, 1448);
        assert_eq!(windows(16_000), [1448, 2896, 5792, 5864]);
        assert_eq!(windows(32_000), [1448, 2896, 5792, 11584, 10280]);
        assert_eq!(windows(64_000), [1448, 2896, 5792, 11584, 23168, 19112]);
        assert_eq!(windows(128_000), [1448, 2896, 5792, 11584, 23168, 46336, 36776]);
        assert_eq!(windows(1000), [1000]);
        assert_eq!(windows(0), [] as [u64; 0]);
        assert_eq!(slow_start_windows(64_000, 1448, 14_480), [14480, 28960, 20560]);
    }

    #[test]
    fn the_onsets_are_those_of_the_papers() {
        assert_eq!([16_000, 32_000, 64_000].map(|fragment| path(65_536).onset(fragment)), [13, 7, 4]);
        assert_eq!(path(65_536).onset(128_000), 3, "the papers say 2");
        assert_eq!(path(4096).onset(256_000), 2);
    }

    #[test]
    fn the_curves_are_those_of_figure_2() {
        // Read off by hand from the equations: 64 KB, 1 sender: 512,000 bit in 1.512 ms, and in 201.512 ms.
        let path = path(65_536);
        let close = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-9, "{got} {want}");
        close(path.goodput_before(64_000, 1), 512_000.0 / 1.512e-3);
        close(path.goodput_after(64_000, 1, 1.0), 512_000.0 / 0.201512);
        close(path.goodput_before(1_024_000, 48), 393_216_000.0 / 0.394216);
        close(path.goodput_after(1_024_000, 48, 0.6), 393_216_000.0 / 0.514216);
        // More senders and larger blocks only help, and never beyond the link.
        for fragment in [64_000, 256_000, 1_024_000, 64_000_000] {
            for senders in 1..48 {
                let at = |senders| (path.goodput_before(fragment, senders), path.goodput_after(fragment, senders, 1.0));
                assert!(at(senders).0 < at(senders + 1).0 && at(senders).1 < at(senders + 1).1);
                assert!(at(senders).1 < at(senders).0 && at(senders).0 < 1e9);
            }
        }
        assert!(path.goodput_before(64_000_000, 1) > 0.99e9 && path.goodput_after(64_000_000, 48, 1.0) > 0.99e9);
    }

    #[test]
    fn a_fixed_total_is_split_and_a_shared_buffer_is_a_sixth_of_a_group() {
        assert_eq!(Form::Total(1_000_000).fragment(40), 25_000);
        assert_eq!(Form::Fragment(1_000_000).fragment(40), 1_000_000);
        assert_eq!(Buffer::Paper003.bytes(), 131_072);
    }

    #[test]
    fn a_question_is_answered_for_each_form_and_number_of_senders() {
        let question = Question {
            path: path(65_536),
            forms: vec![Form::Fragment(64_000), Form::Total(1_000_000)],
            senders: (1..=48).collect(),
            model: Model::Paper,
            alpha: 1.0,
            wait_s: 0.0,
            without: BTreeSet::new(),
        };
        let answer = predict(&question).unwrap();
        assert_eq!(answer.rows.len(), 96);
        assert_eq!((answer.rows[2].regime, answer.rows[3].regime), (Regime::Ideal, Regime::Collapsed));
        assert_eq!(answer.rows[3].goodput_mbit, path(65_536).goodput_after(64_000, 4, 1.0) / 1e6);
        let onset = answer.onset[0];
        assert_eq!((onset.bytes, onset.value, onset.low, onset.high), (64_000, Some(4), Some(3), Some(5)));
        // 250,000 B of each of four: windows up to 91,224 B, of which not two fit.
        assert_eq!(answer.onset[1].value, Some(2));
        assert_eq!(answer.rows[48 + 9].fragment_bytes, 100_000);
        let wrong = |senders, buffer| predict(&Question { senders, path: path(buffer), ..question.clone() });
        assert!(wrong(vec![0], 65_536).unwrap_err().contains("0 senders"));
        assert!(wrong(vec![1], 1000).unwrap_err().contains("holds no packet"));
    }

    #[test]
    fn waits_between_packets_make_goodput_smaller() {
        let path = path(65_536);
        assert_eq!(path.goodput_waiting(64_000, 8, 1.0, 0.0), path.goodput_after(64_000, 8, 1.0));
        let waited = 64_000.0 * 8.0 * 8.0 / path.goodput_waiting(64_000, 8, 1.0, 1e-4);
        let without = 64_000.0 * 8.0 * 8.0 / path.goodput_after(64_000, 8, 1.0);
        assert!((waited - without - 45.0 * 1e-4).abs() < 1e-9, "45 packets");
    }
}
