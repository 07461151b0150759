//! Incast on kernels of today: equation 4 with its alpha explained.
//!
//! The papers fit alpha, the fraction of an RTO in which the link is idle, to each block size and range of senders.
//! Measured block by block (docs/measurements/incast-model/block-by-block.md), it follows from four things:
//!
//! - **Not every block times out.** Losses are repaired without a timeout as long as a flow has some segments in the port.
//!   That hangs on its fair share of the buffer, `w = buffer / (N segments)`: with selective acknowledgments timeouts
//!   begin below some four segments, later where fragments are so short that a probe repairs their tails, and earlier
//!   where senders are many.
//! - **Others fill the link.** A block in which a flow waits for its timeout takes as long as that wait, or as all bytes
//!   take, whichever is longer: large blocks hide timeouts, and so alpha falls.
//! - **Timeouts meet again.** Where those that timed out are so many that two segments of each exceed the buffer, or where
//!   the others still fill the port when the timeout is over, the next one is twice as long: alpha jumps.
//! - **After the last timeout** the flow begins with one segment, and waits for a delayed acknowledgment.
//!
//! Over connections that have just begun slow start sets the pace, and half of its largest windows fill the port; the constants
//! of that have origins of their own, and were fitted without selective acknowledgments alone: with them such connections
//! have the hazards of those that stay.
//!
//! Every other constant here was fitted to what the lab gave at 100 Mbit/s and an RTO of 200 ms, Linux 6.18: with selective
//! acknowledgments 163 points, 2 to 47 senders, 16 to 256 kB, ports of 32 to 384 KiB; without 35, ports of 64 KiB. There no
//! flow repairs more than one loss a round trip, timeouts follow one another, and the model is rougher.

use super::{Form, Onset, Path, SENDERS_MAX};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What is in this model and not in the papers'; each can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Term {
    /// Frames are longer than their payload, by headers.
    Headers,
    /// A timeout is counted from a round trip that has the queue in it.
    QueueInRto,
    /// Losses are repaired without a timeout where a flow has segments enough in the port.
    Recovery,
    /// Others fill the link while one waits.
    Overlap,
    /// Timeouts that meet again are twice as long.
    Backoff,
    /// The time after the last timeout.
    Tail,
}

/// Bytes of a frame beside the payload: Ethernet 14, IP 20, TCP 20 and its timestamps 12.
const HEADERS: f64 = 66.0;
/// The kernel rounds timeouts up to its ticks of 4 ms (FACTS: HZ is 250; 200 ms asked, 207 seen, of which the queue makes 5).
const TICK_S: f64 = 0.004;

/// Of stacks with selective acknowledgments: timeouts of a flow in a block where its share of the buffer is nothing; the
/// share, in segments, from which on there are none of 24 senders, and how much less it is for a fragment of one segment;
/// the power. Of more senders a larger share is needed: 0.03 timeouts a flow where 47 of 64 kB have 3.7 segments each, and none
/// where 12 have 3.6 (docs/measurements/incast-model/larger-ports.md).
const SACK_HAZARD: f64 = 0.8;
const SACK_SHARE: f64 = 8.0;
const SACK_SHORT: f64 = 69.0;
const SACK_POWER: f64 = 4.0;
const SACK_SENDERS: f64 = 24.0;
const SACK_SENDERS_POWER: f64 = 0.27;
/// Timeouts of a block come together: so many of them count as one.
const SACK_TOGETHER: f64 = 0.67;
const SACK_TAIL_S: f64 = 0.067;
/// Part of the port that two segments of each that timed out exceed where timeouts meet again.
const SACK_CROWDED: f64 = 1.03;

/// However short a fragment is, in segments.
const SHARE_LEAST: f64 = 0.05;

/// The same for stacks without; a fragment of fewer segments than these times out more seldom; a block with any loss
/// times out with that probability at least.
const PLAIN_HAZARD: f64 = 1.28;
const PLAIN_SHARE: f64 = 11.3;
const PLAIN_POWER: f64 = 2.74;
const PLAIN_SEGMENTS: f64 = 44.0;
const PLAIN_SHORT_POWER: f64 = 0.35;
const PLAIN_TOGETHER: f64 = 0.28;
const PLAIN_LEAST: f64 = 0.11;
const PLAIN_TAIL_S: f64 = 0.05;

/// Of blocks over connections that have just begun, without selective acknowledgments, at the papers' operating point
/// (docs/measurements/incast-papers.md: 1 Gbit/s, a round trip of 1 ms, 64 KiB, 16 to 256 kB). What counts is
/// half of the largest window of slow start of all senders, as a part of the port: from one on blocks stall, nearly all
/// of them from three on; and how many flows of a block time out grows with its logarithm.
const FRESH_STALLS: f64 = 1.6;
const FRESH_EACH: f64 = 0.18;

/// What happens to a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    /// Seconds without a timeout, and with.
    pub ideal_s: f64,
    pub stalled_s: f64,
    /// Fraction of blocks in which a flow times out.
    pub stalls: f64,
    /// Timeouts of all flows in a block.
    pub timeouts: f64,
}

impl Block {
    /// In the mean.
    pub fn seconds(&self) -> f64 {
        self.stalls * self.stalled_s + (1.0 - self.stalls) * self.ideal_s
    }
}

/// A block of `fragment` bytes from each of `senders`.
pub fn block(path: &Path, fragment: u64, senders: u32, without: &BTreeSet<Term>) -> Block {
    let with = |term| !without.contains(&term);
    let frame = path.mss as f64 + if with(Term::Headers) { HEADERS } else { 0.0 };
    let (buffer, count) = (path.buffer.bytes() as f64, f64::from(senders));
    let wire = fragment as f64 * frame / path.mss as f64;
    let wire_s = wire * 8.0 * count / path.link_bits_per_sec;
    let (trips, largest) = if path.fresh { slow_start(path, fragment) } else { (1.0, 0.0) };
    // Round trips of slow start, in the largest of which the windows of all cross the link; or all bytes one after the other.
    let window_s = count * largest * frame * 8.0 / path.link_bits_per_sec;
    let ideal_s = (trips * path.rtt_s + window_s).max(path.rtt_s + wire_s);
    let queue_s = if with(Term::QueueInRto) { buffer * 8.0 / path.link_bits_per_sec + TICK_S } else { 0.0 };
    let rto_s = path.rto_s + queue_s;
    // All answer at once, and while the last byte of each comes the port has passed on as much as one of them sends.
    if (count - 1.0) * wire <= buffer {
        return Block { ideal_s, stalled_s: ideal_s, stalls: 0.0, timeouts: 0.0 };
    }
    // Acknowledgments come spread over the time that the link took for the data, and each lets two segments go: half of a
    // window of each is in the port at most.
    let overload = count * largest / 2.0 * frame / buffer;
    if path.fresh && overload <= 1.0 {
        return Block { ideal_s, stalled_s: ideal_s, stalls: 0.0, timeouts: 0.0 };
    }
    let segments = (fragment as f64 / path.mss as f64).max(1.0);
    let (room, share) = (buffer / frame, buffer / frame / count);
    let scarce = |limit: f64| (1.0 - share / limit).max(0.0);
    let (each, together, least, tail_s) = if path.sack {
        let of_few = (SACK_SHARE - SACK_SHORT / segments).max(SHARE_LEAST);
        let each = SACK_HAZARD * scarce(of_few * (count / SACK_SENDERS).powf(SACK_SENDERS_POWER)).powf(SACK_POWER);
        (each.min(1.0), SACK_TOGETHER, 0.0, SACK_TAIL_S)
    } else {
        let short = (segments / PLAIN_SEGMENTS).min(1.0).powf(PLAIN_SHORT_POWER);
        let each = PLAIN_HAZARD * scarce(PLAIN_SHARE).powf(PLAIN_POWER) * short;
        (each, PLAIN_TOGETHER, PLAIN_LEAST, PLAIN_TAIL_S)
    };
    let begins = path.fresh && !path.sack;
    let each = if begins { (FRESH_EACH * overload.ln()).min(1.0) } else { each };
    let timeouts = count * each;
    let stalls = if begins && with(Term::Recovery) {
        1.0 - (-FRESH_STALLS * (overload - 1.0)).exp()
    } else if with(Term::Recovery) {
        least + (1.0 - least) * (1.0 - (-together * timeouts).exp())
    } else {
        1.0
    };
    let waits = match (with(Term::Backoff), path.sack) {
        (false, _) => 1.0,
        // A fragment that is retransmitted after its timeout begins with one segment: two of each meet again in the
        // port.
        (true, false) if path.fresh => 1.0 + f64::from(u8::from(2.0 * timeouts > room)),
        // Each timeout repairs one loss, and some flows have several: they follow one another.
        (true, false) => (2.0 * each).ceil().max(1.0),
        (true, true) => {
            let crowded = 2.0 * timeouts > SACK_CROWDED * room;
            let rounds = match (crowded, ideal_s / rto_s) {
                (true, times) if times > 4.0 => 3,
                (crowded, times) if crowded || times > 2.0 => 2,
                _ => 1,
            };
            f64::from((1 << rounds) - 1)
        }
    };
    // Over a new connection the largest window is lost, which comes after the others; and what was lost comes a trip later.
    let slow_start_s = if path.fresh { trips * path.rtt_s } else { 0.0 };
    let wait_s = slow_start_s + waits * rto_s;
    let busy_s = if with(Term::Overlap) { ideal_s.max(wait_s) } else { ideal_s + wait_s };
    // Where the timeout is shorter than a delayed acknowledgment, it does not wait for that.
    let stalled_s = busy_s + if with(Term::Tail) { tail_s.min(path.rto_s) } else { 0.0 };
    Block { ideal_s, stalled_s, stalls, timeouts }
}

/// Round trips of slow start that a fragment takes, and the largest window of them, in segments.
fn slow_start(path: &Path, fragment: u64) -> (f64, f64) {
    let windows = super::slow_start_windows(fragment, path.mss, path.initial_window);
    let largest = windows.iter().max().map_or(1, |bytes| bytes.div_ceil(path.mss));
    (windows.len() as f64, largest as f64)
}

/// Goodput in bits per second.
pub fn goodput(path: &Path, fragment: u64, senders: u32, without: &BTreeSet<Term>) -> f64 {
    fragment as f64 * 8.0 * f64::from(senders) / block(path, fragment, senders, without).seconds()
}

/// Goodput in bits per second where nothing is lost.
pub fn ideal(path: &Path, fragment: u64, senders: u32) -> f64 {
    fragment as f64 * 8.0 * f64::from(senders) / block(path, fragment, senders, &BTreeSet::new()).ideal_s
}

/// The smallest number of senders whose median block takes longer than the ideal one by half an RTO. The interval is that
/// of the same for the first tenth and for the last tenth of the blocks, with a tail that is off by half.
pub fn onset(path: &Path, form: Form, without: &BTreeSet<Term>) -> Onset {
    let (Form::Fragment(bytes) | Form::Total(bytes)) = form;
    let first = |stalls: f64, longer_s: f64| {
        (2..=SENDERS_MAX).find(|&senders| {
            let own = block(path, form.fragment(senders), senders, without);
            own.stalls >= stalls && own.stalled_s + longer_s - own.ideal_s >= path.rto_s / 2.0
        })
    };
    let tail_s = if path.sack { SACK_TAIL_S } else { PLAIN_TAIL_S } / 2.0;
    let value = first(0.5, 0.0);
    let (low, high) = (first(0.1, tail_s), first(0.9, -tail_s).or(value));
    let Some(value) = value else { return Onset { bytes, value: None, low, high: None } };
    // An interval wider than a factor of two is useless.
    let low = low.unwrap_or(value).max((f64::from(value) / WIDEST.sqrt()).ceil() as u32).min(value);
    let high = high.unwrap_or(value).clamp(value, (f64::from(low) * WIDEST) as u32);
    Onset { bytes, value: Some(value), low: Some(low), high: Some(high) }
}

/// Of an interval's ends.
const WIDEST: f64 = 2.0;

#[cfg(test)]
pub(super) mod tests {
    use super::super::Buffer;
    use super::*;

    /// Of the lab's measurements.
    pub fn path(buffer: u64, sack: bool) -> Path {
        Path {
            link_bits_per_sec: 1e8,
            rtt_s: 1e-4,
            rto_s: 0.2,
            buffer: Buffer::Port(buffer),
            mss: 1448,
            initial_window: 14_480,
            fresh: false,
            sack,
        }
    }

    /// As measured (docs/measurements/incast-model/block-by-block.md): senders, kB, KiB of buffer, Mbit/s.
    const MEASURED: [(u32, u64, u64, f64); 20] = [
        (8, 64, 64, 95.3),
        (24, 64, 64, 46.0),
        (32, 64, 64, 56.6),
        (24, 32, 64, 26.9),
        (47, 32, 64, 42.3),
        (47, 16, 64, 22.2),
        (24, 128, 64, 80.9),
        (40, 128, 64, 64.8),
        (24, 256, 64, 75.9),
        (40, 256, 64, 87.7),
        (47, 256, 64, 71.2),
        (16, 128, 128, 93.1),
        (47, 32, 128, 42.7),
        (47, 128, 128, 70.4),
        (12, 64, 32, 25.5),
        (32, 16, 32, 15.5),
        (47, 32, 192, 45.2),
        (47, 32, 256, 59.9),
        (47, 64, 256, 85.1),
        (32, 64, 384, 95.5),
    ];

    #[test]
    fn goodput_is_what_was_measured_within_a_tenth_or_so() {
        let off = MEASURED.map(|(senders, kilobytes, buffer, measured)| {
            let own = goodput(&path(buffer << 10, true), kilobytes * 1000, senders, &BTreeSet::new()) / 1e6;
            (own / measured - 1.0).abs()
        });
        assert!(off.iter().all(|off| *off < 0.2), "{off:?}");
        assert!(off.iter().sum::<f64>() / off.len() as f64 <= 0.08, "{off:?}");
    }

    /// Over new connections at the papers' operating point, NewReno
    /// (docs/measurements/incast-papers/figure-4-quick.md): senders, kB, Mbit/s.
    const FRESH: [(u32, u64, f64); 16] = [
        (4, 16, 154.0),
        (8, 16, 280.0),
        (13, 16, 422.0),
        (4, 32, 225.0),
        (5, 32, 274.0),
        (7, 32, 363.0),
        (4, 64, 391.0),
        (8, 32, 22.0),
        (13, 32, 18.0),
        (15, 32, 17.0),
        (5, 64, 27.0),
        (7, 64, 25.0),
        (8, 64, 25.0),
        (13, 64, 30.0),
        (15, 64, 34.0),
        (16, 256, 138.0),
    ];

    #[test]
    fn over_new_connections_slow_start_sets_the_pace_and_half_of_its_largest_windows_fill_the_port() {
        // With time dilation of ten.
        let own = Path { rtt_s: 1e-2, rto_s: 2.0, initial_window: 3 * 1448, fresh: true, ..path(65_536, false) };
        let mut off = FRESH.map(|(senders, kilobytes, measured)| {
            (goodput(&own, kilobytes * 1000, senders, &BTreeSet::new()) / 1e5 / measured - 1.0).abs()
        });
        off.sort_by(f64::total_cmp);
        assert!(off[FRESH.len() / 2] <= 0.1, "{off:?}");
    }

    #[test]
    fn what_fits_into_the_port_is_not_lost() {
        for sack in [true, false] {
            // Four times 16,000 B with their headers, less what the port passes on meanwhile.
            let own = block(&path(65_536, sack), 16_000, 4, &BTreeSet::new());
            assert_eq!((own.stalls, own.stalled_s), (0.0, own.ideal_s));
            assert!(block(&path(65_536, sack), 16_000, 47, &BTreeSet::new()).stalls > 0.9);
        }
    }

    #[test]
    fn every_term_is_worth_something() {
        let all = |without: &[Term]| goodput(&path(65_536, true), 128_000, 40, &without.iter().copied().collect());
        for term in [Term::Headers, Term::QueueInRto, Term::Overlap, Term::Backoff, Term::Tail] {
            assert_ne!(all(&[term]), all(&[]), "{term:?}");
        }
        assert!(all(&[Term::Overlap]) < 0.8 * all(&[]), "the link would be idle in every timeout");
        let few = |without: &[Term]| goodput(&path(65_536, true), 64_000, 8, &without.iter().copied().collect());
        assert!(few(&[Term::Recovery]) < 0.3 * few(&[]), "every loss would time out");
        // With all of them left out it is equation 2.
        let paper = Term::Headers;
        let none = [paper, Term::QueueInRto, Term::Recovery, Term::Overlap, Term::Backoff, Term::Tail];
        let own = path(65_536, true);
        assert_eq!(all(&none), own.goodput_after(128_000, 40, 1.0));
    }

    #[test]
    fn onsets_have_intervals_of_a_factor_of_two_at_most() {
        for sack in [true, false] {
            for buffer in [16, 64, 192] {
                for fragment in [8, 16, 64, 256] {
                    let own = onset(&path(buffer << 10, sack), Form::Fragment(fragment * 1000), &BTreeSet::new());
                    if let Some(value) = own.value {
                        let (low, high) = (own.low.unwrap(), own.high.unwrap());
                        assert!(low <= value && value <= high && high <= 2 * low, "{own:?}");
                    }
                }
            }
        }
        let value = |kilobytes: u64| {
            onset(&path(65_536, true), Form::Fragment(kilobytes * 1000), &BTreeSet::new()).value.unwrap()
        };
        // Measured: between 32 and 40, between 16 and 24, at 16.
        assert!((32..=40).contains(&value(16)) && (16..=24).contains(&value(32)) && (13..=18).contains(&value(64)));
    }
}
