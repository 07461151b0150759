//! The clock of the data plane, which a lab with time dilation slows down.
//!
//! Where all rates are divided by a number and all delays multiplied by it, what a network needs lasts that many times
//! longer ("true dilation", paper 000 at its own operating point). A wait for the network must last as much longer, or
//! it would end before a retransmission timeout does; so decisions see a slower clock, and sockets get longer limits.

use mission_core::units::Time;
use std::io;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Passes the time dilation of a lab to its processes: how many times slower than the modelled network it is.
const SLOW_MOTION: &str = "MISSION_SLOW_MOTION";
/// A minimum RTO of 200 ms is then as long as the kernel's longest (TCP_RTO_MAX, 120 s).
const SLOWEST: u32 = 600;

/// How many times slower than the modelled network this process's network is: 1 outside of labs.
///
/// # Errors
/// The environment variable is not such a number.
pub fn slow_motion() -> io::Result<u32> {
    let Ok(given) = std::env::var(SLOW_MOTION) else { return Ok(1) };
    let wrong = || {
        let text = format!("{SLOW_MOTION}: '{given}' is not a whole number from 1 to {SLOWEST}");
        io::Error::new(io::ErrorKind::InvalidInput, text)
    };
    given.parse().ok().filter(|slow| (1..=SLOWEST).contains(slow)).ok_or_else(wrong)
}

/// The same, read once; 1 if the variable is invalid, which [`slow_motion`] reports when an endpoint is made.
fn slow() -> u32 {
    static SLOW: OnceLock<u32> = OnceLock::new();
    *SLOW.get_or_init(|| slow_motion().unwrap_or(1))
}

/// How long a wait for the network lasts here.
pub fn lasting(duration: Duration) -> Duration {
    duration * slow()
}

/// Time as decisions see it.
pub struct Clock {
    started: Instant,
}

impl Clock {
    pub fn start() -> Clock {
        Clock { started: Instant::now() }
    }

    pub fn now(&self) -> Time {
        Time(self.started.elapsed().as_nanos() as u64 / u64::from(slow()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outside_of_a_lab_time_is_as_it_is() {
        let (clock, since) = (Clock::start(), Instant::now());
        std::thread::sleep(Duration::from_millis(2));
        let seen = Duration::from_nanos(clock.now().0);
        assert!(seen >= Duration::from_millis(2) && seen <= since.elapsed() + Duration::from_millis(1), "{seen:?}");
        assert_eq!(lasting(Duration::from_secs(5)), Duration::from_secs(5));
    }
}
