//! When to ask a peer again that failed, or that is at its limit: after pauses that grow, each a different one, so that
//! many that were sent away together do not come again together.

use crate::defaults::{BUSY_RETRY_MAX, RETRY_FIRST, RETRY_MAX};
use crate::random::SplitMix;
use std::time::Duration;

/// How one peer has answered lately.
#[derive(Clone, Copy, Debug, Default)]
pub struct Retry {
    /// Failures, and answers that it is busy, in a row.
    failures: u32,
    busy: u32,
}

impl Retry {
    /// It could not be reached, or its connection broke: the pause until the next try.
    pub fn failed(&mut self, random: &mut SplitMix) -> Duration {
        self.failures += 1;
        grown(RETRY_FIRST, self.failures, RETRY_MAX, random)
    }

    /// It answers, but is at its limit; `least`: the pause that it asks for. A forged answer could ask for any.
    pub fn busy(&mut self, least: Duration, random: &mut SplitMix) -> Duration {
        *self = Retry { failures: 0, busy: self.busy + 1 };
        least.min(RETRY_MAX).max(grown(least, self.busy, BUSY_RETRY_MAX, random))
    }

    /// The last try failed.
    pub fn is_failing(&self) -> bool {
        self.failures > 0
    }

    /// It has given an answer that is of use.
    pub fn answered(&mut self) {
        *self = Retry::default();
    }
}

/// `first`, doubled for each of `times` after the first one; half of it or more, by chance.
fn grown(first: Duration, times: u32, most: Duration, random: &mut SplitMix) -> Duration {
    let grown = first.saturating_mul(1 << (times - 1).min(10)).min(most);
    grown.mul_f64(0.5 + random.unit() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_no_two_are_alike() {
        let (mut retry, mut random) = (Retry::default(), SplitMix(1));
        let pauses: Vec<Duration> = (0..12).map(|_| retry.failed(&mut random)).collect();
        assert!(pauses[0] >= RETRY_FIRST / 2 && pauses[0] < RETRY_FIRST);
        assert!(pauses[10] >= RETRY_MAX / 2 && pauses[11] <= RETRY_MAX && pauses[10] != pauses[11]);
        let least = Duration::from_millis(20);
        let busy: Vec<Duration> = (0..12).map(|_| retry.busy(least, &mut random)).collect();
        assert!(busy.iter().all(|pause| (least..=BUSY_RETRY_MAX).contains(pause)));
        assert!(busy[11] >= BUSY_RETRY_MAX / 2);
        // One that asks for a longer pause gets it, to a limit.
        assert_eq!(retry.busy(Duration::from_secs(1), &mut random), Duration::from_secs(1));
        assert_eq!(retry.busy(Duration::MAX, &mut random), RETRY_MAX);
        assert!(retry.failed(&mut random) < RETRY_FIRST, "a busy peer lives");
    }
}
