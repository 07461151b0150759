//! Receive windows after ICTCP (Wu, Feng, Guo, Zhang: "ICTCP: Incast Congestion Control for TCP in data center networks",
//! CoNEXT 2010, section 4): the receiver sizes each sender's window by the free capacity of its link.
//!
//! Time goes in slots of two round trips. In the first half the link's free bandwidth is measured:
//! `BW_A = max(0, alpha C - BW_T)`; in the second, windows may grow as long as the increase fits into it. Each round
//! trip a connection's measured rate `b_m` is compared with what its window would allow, `b_e = max(b_m, rwnd / RTT)`:
//! `d = (b_e - b_m) / b_e`.
//!
//! | | then the window |
//! |---|---|
//! | `d <= gamma_1`, or `d <= MSS / rwnd` | grows, in the second half: doubles at first, by a segment later |
//! | `d > gamma_2` in three round trips | shrinks by a segment, and is never doubled again |
//! | `BW_A < 0.2 C` | shrinks by a segment where it is above the mean: those below it catch up |
//!
//! No window is smaller than two segments. So N senders have at least `2 N` segments in flight, and a port that holds
//! fewer overflows whatever the receiver does.

use crate::units::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// Fraction of the link that is granted.
const ALPHA: f64 = 0.9;
/// Fractions of the expected rate that may be missing if a window grows, and that must be missing if it shrinks.
const GAMMA_1: f64 = 0.1;
const GAMMA_2: f64 = 0.5;
/// Round trips in a row before a window shrinks.
const LOW_ROUNDS_MAX: u32 = 3;
/// Fraction of the link: with less free capacity, large windows make room for small ones.
const SCARCE: f64 = 0.2;
const WINDOW_MIN: u32 = 2;
/// Weight of the past in a connection's rate; a larger present counts at once. The paper leaves the number open.
const PAST: f64 = 0.75;
/// Shortest interval between two samples: half a kernel's tick of 1 ms would count single packets.
const LOOK_MIN: Duration = Duration::from_millis(1);
/// Longest interval, if round trips are unknown or a queue has made them long.
const LOOK_MAX: Duration = Duration::from_millis(50);

pub type FlowId = u64;

/// What is known of a connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Bytes received since it began.
    pub received: u64,
    /// As the receiver sees it; zero: not known yet.
    pub rtt: Duration,
    /// Payload of a full segment, in bytes.
    pub mss: u32,
}

/// The receive windows of one interface.
#[derive(Clone, Debug)]
pub struct Windows {
    /// Bytes per second.
    capacity: f64,
    flows: BTreeMap<FlowId, Flow>,
    /// Time of the last sample, and the bytes that the interface had received by then.
    last: Option<(Time, u64)>,
    /// Mean over connections, weighted by received bytes.
    rtt: Duration,
    /// Free bandwidth in bytes per second. It is measured in the first half of a slot and granted in the second.
    left: f64,
    second_half: bool,
}

#[derive(Clone, Debug)]
struct Flow {
    /// In bytes.
    window: u32,
    received: u64,
    /// Bytes per second.
    rate: f64,
    doubles: bool,
    /// Round trips in a row with far fewer bytes than its window allows.
    low: u32,
}

impl Windows {
    /// Of an interface that can receive so many bits per second.
    pub fn new(bits_per_second: u64) -> Windows {
        Windows {
            capacity: bits_per_second as f64 / 8.0,
            flows: BTreeMap::new(),
            last: None,
            rtt: Duration::ZERO,
            left: 0.0,
            second_half: false,
        }
    }

    /// Time until the next sample: one round trip.
    pub fn period(&self) -> Duration {
        self.rtt.clamp(LOOK_MIN, LOOK_MAX)
    }

    /// The window of a new connection, in bytes.
    pub fn first(mss: u32) -> u32 {
        WINDOW_MIN * mss
    }

    /// Takes a sample once per round trip: all connections, and the total bytes that the interface has received.
    /// Returns the window of each, in bytes.
    pub fn look(&mut self, now: Time, arrived: u64, samples: &BTreeMap<FlowId, Sample>) -> Vec<(FlowId, u32)> {
        self.flows.retain(|id, _| samples.contains_key(id));
        if let Some((last, arrived_before)) = self.last
            && now > last
        {
            let seconds = now.since(last).as_secs_f64();
            let brought = self.measure(seconds, samples);
            if !self.second_half {
                let total = arrived.saturating_sub(arrived_before) as f64 / seconds;
                self.left = (ALPHA * self.capacity - total).max(0.0);
            }
            self.judge(samples, &brought);
            if self.second_half && self.left < SCARCE * self.capacity {
                self.make_room(samples);
            }
            self.second_half = !self.second_half;
        }
        for (id, sample) in samples {
            let flow = self.flows.entry(*id).or_insert_with(|| Flow {
                window: Windows::first(sample.mss),
                received: sample.received,
                rate: 0.0,
                doubles: true,
                low: 0,
            });
            // The size of a full segment is known from the first one.
            flow.window = flow.window.max(Windows::first(sample.mss));
        }
        self.last = Some((now, arrived));
        self.flows.iter().map(|(id, flow)| (*id, flow.window)).collect()
    }

    /// Updates rates since the last sample. Returns the connections with new bytes: the others may have had no request,
    /// so they are not judged.
    fn measure(&mut self, seconds: f64, samples: &BTreeMap<FlowId, Sample>) -> Vec<FlowId> {
        let (mut brought, mut bytes, mut weighted) = (Vec::new(), 0.0, 0.0);
        for (id, flow) in &mut self.flows {
            let sample = &samples[id];
            let count = sample.received.saturating_sub(flow.received) as f64;
            flow.received = sample.received;
            if count == 0.0 {
                continue;
            }
            let seen = count / seconds;
            flow.rate = seen.max(PAST * flow.rate + (1.0 - PAST) * seen);
            brought.push(*id);
            bytes += count;
            weighted += count * sample.rtt.as_secs_f64();
        }
        if bytes > 0.0 {
            self.rtt = Duration::from_secs_f64(weighted / bytes);
        }
        brought
    }

    fn judge(&mut self, samples: &BTreeMap<FlowId, Sample>, brought: &[FlowId]) {
        for id in brought {
            let (flow, sample) = (self.flows.get_mut(id).expect("one that was measured"), &samples[id]);
            let rtt = sample.rtt.max(LOOK_MIN).as_secs_f64();
            let expected = flow.rate.max(f64::from(flow.window) / rtt);
            let missing = (expected - flow.rate) / expected;
            if missing <= GAMMA_1 || missing <= f64::from(sample.mss) / f64::from(flow.window) {
                flow.low = 0;
                if self.second_half {
                    self.left -= flow.grow(sample.mss, rtt, self.left);
                }
            } else if missing > GAMMA_2 {
                flow.low += 1;
                if flow.low >= LOW_ROUNDS_MAX {
                    flow.low = 0;
                    flow.shrink(sample.mss);
                }
            } else {
                flow.low = 0;
            }
        }
    }

    fn make_room(&mut self, samples: &BTreeMap<FlowId, Sample>) {
        let sum: f64 = self.flows.values().map(|flow| f64::from(flow.window)).sum();
        let mean = sum / self.flows.len().max(1) as f64;
        for (id, flow) in &mut self.flows {
            if f64::from(flow.window) > mean {
                flow.shrink(samples[id].mss);
            }
        }
    }
}

impl Flow {
    /// Returns the bandwidth that it takes of `left`.
    fn grow(&mut self, mss: u32, rtt: f64, left: f64) -> f64 {
        let doubled = f64::from(self.window) / rtt;
        if self.doubles && doubled <= left {
            self.window = self.window.saturating_mul(2);
            return doubled;
        }
        self.doubles = false;
        let more = f64::from(mss) / rtt;
        if more > left {
            return 0.0;
        }
        self.window = self.window.saturating_add(mss);
        more
    }

    fn shrink(&mut self, mss: u32) {
        self.doubles = false;
        self.window = self.window.saturating_sub(mss).max(Windows::first(mss));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1000;
    const MS: u64 = 1_000_000;

    /// Connections with a round trip of 10 ms on a link of 1 MB/s, sampled every 10 ms.
    struct Link {
        windows: Windows,
        now: u64,
        arrived: u64,
        samples: BTreeMap<FlowId, Sample>,
    }

    impl Link {
        fn new(flows: u64) -> Link {
            let sample = Sample { received: 0, rtt: Duration::from_millis(10), mss: MSS };
            let samples = (0..flows).map(|id| (id, sample)).collect();
            let mut link = Link { windows: Windows::new(8_000_000), now: 0, arrived: 0, samples };
            assert!(link.look(&[]).iter().all(|window| *window == 2 * MSS));
            link
        }

        /// A round trip in which each connection delivers so many bytes.
        fn look(&mut self, brought: &[u64]) -> Vec<u32> {
            for (sample, bytes) in self.samples.values_mut().zip(brought) {
                sample.received += bytes;
                self.arrived += bytes;
            }
            self.now += 10 * MS;
            let windows = self.windows.look(Time(self.now), self.arrived, &self.samples);
            windows.into_iter().map(|(_, window)| window).collect()
        }
    }

    #[test]
    fn a_window_that_is_used_doubles_until_the_rest_of_the_link_is_too_small_and_grows_by_a_segment_then() {
        let mut link = Link::new(1);
        // Measured, granted: 0.9 MB/s - 0.2 MB/s are left, and 2,000 B more in 10 ms take 0.2 MB/s.
        assert_eq!([link.look(&[2000]), link.look(&[2000])], [[2000], [4000]]);
        assert_eq!([link.look(&[4000]), link.look(&[4000])], [[4000], [8000]]);
        // 0.1 MB/s are left: a segment in 10 ms is just that, but a link that is nearly full is not left to large windows
        // alone; the only one is the mean.
        assert_eq!([link.look(&[8000]), link.look(&[8000])], [[8000], [9000]]);
        assert_eq!([link.look(&[9000]), link.look(&[9000])], [[9000], [9000]]);
    }

    #[test]
    fn a_window_that_is_not_used_shrinks_after_three_round_trips_and_not_below_two_segments() {
        let mut link = Link::new(1);
        link.look(&[2000]);
        assert_eq!(link.look(&[2000]), [4000]);
        // The past holds its rate up for a while: 0.15 and 0.11 MB/s of 0.4 are more than half missing.
        let mut shrunk: Vec<_> = (0..12).flat_map(|_| link.look(&[100])).collect();
        shrunk.dedup();
        assert_eq!(shrunk, [4000, 3000, 2000]);
    }

    #[test]
    fn where_little_is_left_large_windows_make_room_for_small_ones() {
        let mut link = Link::new(2);
        link.windows.flows.get_mut(&0).unwrap().window = 8000;
        link.look(&[8000, 500]);
        assert_eq!(link.look(&[8000, 500]), [7000, 2000]);
    }

    #[test]
    fn connections_that_brought_nothing_keep_their_windows_and_those_that_end_are_forgotten() {
        let mut link = Link::new(2);
        for _ in 0..20 {
            assert_eq!(link.look(&[0, 0]), [2000, 2000]);
        }
        link.samples.remove(&0);
        link.look(&[0]);
        assert_eq!(link.windows.flows.len(), 1);
    }

    #[test]
    fn it_is_looked_at_once_per_round_trip() {
        let mut link = Link::new(1);
        assert_eq!(link.windows.period(), LOOK_MIN);
        link.look(&[2000]);
        assert_eq!(link.windows.period(), Duration::from_millis(10));
    }
}
