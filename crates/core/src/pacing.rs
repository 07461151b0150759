//! When bytes may leave, so that all senders of a process together keep to a rate.
//!
//! Each slice of bytes has its own place in a row of slices, so that those who send at the same time take turns. None
//! books more than its next slice: what is booked for a receiver that has gone would keep the others waiting.

use crate::units::Time;
use std::time::Duration;

/// Sending may run ahead by this much, so that a thread that wakes late loses nothing.
const AHEAD: Duration = Duration::from_millis(5);
/// A slice lasts this long: as many senders as a server has connections (256) each send one within about a second
/// (four at 93 kB/s), before a receiver takes a silent sender for lost ([`STALL`](crate::defaults::STALL)).
const SLICE_LASTS: Duration = Duration::from_millis(4);
/// The largest slice: the kernel's largest segment.
const SLICE_MOST: u64 = 64 << 10;
/// The smallest: the payload of an Ethernet frame. It needs longer than [`SLICE_LASTS`] below 362 kB/s.
const SLICE_LEAST: u64 = 1_448;

/// The row of slices of one rate limit.
#[derive(Clone, Debug)]
pub struct Pacer {
    bytes_per_second: u64,
    /// When the next slice may leave.
    free_at: Time,
}

impl Pacer {
    /// A rate of 0 counts as 1 byte per second.
    pub fn new(bytes_per_second: u64) -> Pacer {
        Pacer { bytes_per_second: bytes_per_second.max(1), free_at: Time::default() }
    }

    /// Bytes of a slice.
    pub fn slice(&self) -> usize {
        let bytes = u128::from(self.bytes_per_second) * SLICE_LASTS.as_millis() / 1000;
        bytes.clamp(SLICE_LEAST.into(), SLICE_MOST.into()) as usize
    }

    /// When so many bytes may leave that are ready now; the next will not leave before they have.
    pub fn leaves(&mut self, now: Time, bytes: usize) -> Time {
        let leaves = self.free_at.max(Time(now.0.saturating_sub(AHEAD.as_nanos() as u64)));
        self.free_at = leaves + self.lasts(bytes);
        leaves
    }

    /// These bytes, whose time has not come yet, will not be sent.
    pub fn give_back(&mut self, bytes: usize) {
        self.free_at = Time(self.free_at.0.saturating_sub(self.lasts(bytes).as_nanos() as u64));
    }

    fn lasts(&self, bytes: usize) -> Duration {
        let nanos = bytes as u128 * 1_000_000_000 / u128::from(self.bytes_per_second);
        Duration::from_nanos(nanos.min(u64::MAX.into()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;

    fn at(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    #[test]
    fn all_that_is_sent_together_keeps_the_rate() {
        let mut pacer = Pacer::new(1 << 20);
        let slice = pacer.slice();
        let takes = Duration::from_nanos(slice as u64 * 1_000_000_000 / (1 << 20));
        // The first is as late as it may be; each of the others leaves when the one before it has.
        let first = pacer.leaves(at(1.0), slice);
        assert_eq!(at(1.0).since(first), AHEAD);
        assert_eq!([pacer.leaves(at(1.0), slice), pacer.leaves(at(1.0), slice)], [first + takes, first + 2 * takes]);
        // What was not used is gone.
        assert_eq!(at(10.0).since(pacer.leaves(at(10.0), slice)), AHEAD);
    }

    #[test]
    fn a_slice_that_is_given_back_is_somebody_elses() {
        let mut pacer = Pacer::new(1 << 20);
        let mut leave = |back: bool| {
            let slice = pacer.slice();
            let leaves = pacer.leaves(at(1.0), slice);
            if back {
                pacer.give_back(slice);
            }
            leaves
        };
        leave(false);
        let next = leave(true);
        assert_eq!(leave(false), next);
    }

    /// At every rate from 93 kB/s on, each of as many senders as a server has gets a slice well before its receiver
    /// takes it for lost.
    #[test]
    fn nobody_is_silent_for_long() {
        use crate::defaults::{SERVER_CONNECTIONS, STALL};
        let mut random = SplitMix(1);
        for _ in 0..1_000 {
            let rate =
                (SERVER_CONNECTIONS as f64 * SLICE_LEAST as f64 / 4.0 * (10f64).powf(random.unit() * 6.0)) as u64;
            let mut pacer = Pacer::new(rate);
            let slice = pacer.slice();
            let last = (0..SERVER_CONNECTIONS).map(|_| pacer.leaves(at(1.0), slice)).last();
            assert!(last.is_some_and(|last| last.since(at(1.0)) < STALL - Duration::from_millis(900)), "{rate}");
        }
    }

    #[test]
    fn no_rate_and_no_number_of_bytes_panics() {
        for rate in [0, 1, 7, u64::MAX] {
            let mut pacer = Pacer::new(rate);
            assert!(pacer.slice() > 0);
            for bytes in [0, 1, usize::MAX, usize::MAX] {
                pacer.leaves(Time(u64::MAX / 2), bytes);
                pacer.give_back(bytes);
            }
        }
    }
}
