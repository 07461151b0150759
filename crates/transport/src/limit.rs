//! A limit on the rate at which a process sends, over all its connections.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes sent between two reads of the clock: the kernel's largest segment.
pub const SLICE: usize = 64 << 10;
/// Sending may run ahead by this much, so that a thread that wakes late loses nothing.
const AHEAD: Duration = Duration::from_millis(5);

pub struct Limit {
    bytes_per_second: f64,
    /// When the next slice may leave.
    free_at: Mutex<Instant>,
}

impl Limit {
    pub fn new(bytes_per_second: u64) -> Limit {
        Limit { bytes_per_second: bytes_per_second.max(1) as f64, free_at: Mutex::new(Instant::now()) }
    }

    /// Waits until so many bytes may leave.
    pub fn wait(&self, bytes: usize) {
        let now = Instant::now();
        thread::sleep(self.leaves(now, bytes).saturating_duration_since(now));
    }

    /// When so many bytes may leave that are ready now; the next will not leave before they have.
    fn leaves(&self, now: Instant, bytes: usize) -> Instant {
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        let mut free_at = self.free_at.lock().expect("no panic while held");
        let leaves = (*free_at).max(now - AHEAD);
        *free_at = leaves + takes;
        leaves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_sent_together_keeps_the_rate() {
        let limit = Limit::new(1 << 20);
        let now = Instant::now() + Duration::from_secs(1);
        let leave = |at| limit.leaves(at, SLICE) - now;
        let slice = Duration::from_secs_f64(1.0 / 16.0);
        // The first is as late as it may be; each of the others leaves when the one before it has.
        let first = limit.leaves(now, SLICE);
        assert_eq!(now - first, AHEAD);
        assert_eq!([leave(now), leave(now)], [slice - AHEAD, 2 * slice - AHEAD]);
        // What was not used is gone.
        let later = now + Duration::from_secs(9);
        assert_eq!(later - limit.leaves(later, SLICE), AHEAD);
    }
}
