//! A limit on the rate at which a process sends, over all its connections; in the time of the modelled network, as all
//! decisions.

use crate::clock::{Clock, lasting};
use mission_core::pacing::Pacer;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard};

pub struct Limit {
    clock: Clock,
    state: Mutex<State>,
    closes: Condvar,
}

struct State {
    pacer: Pacer,
    closed: bool,
}

impl Limit {
    pub fn new(bytes_per_second: u64) -> Limit {
        let state = State { pacer: Pacer::new(bytes_per_second), closed: false };
        Limit { clock: Clock::start(), state: Mutex::new(state), closes: Condvar::new() }
    }

    /// The most bytes that [`wait`](Limit::wait) should be given at once.
    pub fn slice(&self) -> usize {
        self.state().pacer.slice()
    }

    /// Waits until so many bytes may leave.
    ///
    /// # Errors
    /// The limit is closed, before or meanwhile.
    pub fn wait(&self, bytes: usize) -> io::Result<()> {
        let mut state = self.state();
        let leaves = state.pacer.leaves(self.clock.now(), bytes);
        loop {
            if state.closed {
                state.pacer.give_back(bytes);
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "this process closes"));
            }
            let waits = leaves.since(self.clock.now());
            if waits.is_zero() {
                return Ok(());
            }
            (state, _) =
                self.closes.wait_timeout(state, lasting(waits)).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Ends all waits.
    pub fn close(&self) {
        self.state().closed = true;
        self.closes.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn whoever_waits_is_woken_when_the_limit_closes() {
        let limit = Limit::new(1);
        thread::scope(|scope| {
            let waits: Vec<_> = (0..3).map(|_| scope.spawn(|| limit.wait(1 << 20))).collect();
            thread::sleep(Duration::from_millis(20));
            limit.close();
            let ends: Vec<bool> = waits.into_iter().map(|wait| wait.join().expect("no panic").is_ok()).collect();
            // The first sends at once; without a close the second would wait for twelve days.
            assert_eq!(ends.iter().filter(|sent| **sent).count(), 1);
        });
        assert!(limit.wait(1).is_err());
    }
}
