//! A clock that goes on while the machine is suspended: a leader's lease ends in the store meanwhile.

use rustix::time::{ClockId, clock_gettime};
use std::ops::Add;
use std::time::Duration;

/// A moment, by `CLOCK_BOOTTIME`. The clock of [`std::time::Instant`] stands still while the machine is suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    pub fn now() -> Moment {
        let now = clock_gettime(ClockId::Boottime);
        Moment(Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32))
    }

    /// Nothing if `earlier` is later.
    pub fn since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, time: Duration) -> Moment {
        Moment(self.0 + time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R13: the time that the machine was suspended did not count.
    #[test]
    fn it_counts_the_time_in_which_the_machine_was_suspended() {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        // The kernel's own count since boot, with suspended time.
        let since_boot: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        let now = Moment::now().0.as_secs_f64();
        assert!(now + 0.02 >= since_boot && now <= since_boot + 5.0, "{now} {since_boot}");
        assert_eq!((Moment::now() + Duration::from_secs(3)).since(Moment::now()).as_secs(), 2);
    }
}
