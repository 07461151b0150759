//! A limit on the rate at which a process sends, over all its connections.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// What is sent between two looks at the clock; as the kernel's largest segment.
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
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        let leaves = {
            let mut free_at = self.free_at.lock().expect("no panic while held");
            let leaves = (*free_at).max(now - AHEAD);
            *free_at = leaves + takes;
            leaves
        };
        thread::sleep(leaves.saturating_duration_since(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_senders_together_keep_the_rate() {
        let limit = Limit::new(10 << 20);
        let began = Instant::now();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..8).for_each(|_| limit.wait(SLICE)));
            }
        });
        // 2 MiB at 10 MiB/s, less what runs ahead and the last slice, which leaves at its beginning.
        assert!(began.elapsed() > Duration::from_millis(180), "{:?}", began.elapsed());
    }
}
