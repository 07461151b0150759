//! Least attained service, without sizes: the discretized rule of Aalo (Chowdhury and Stoica 2015, section 4).

use super::{Entry, Policy, TransferPolicy, TransferView, ranks};
use crate::units::parse_bytes;

pub const ENTRY: Entry = Entry {
    name: "least-attained",
    meaning: "first the transfers that have moved least, by powers of ten from 10 MB; of those the oldest; first=SIZE and \
              growth=N: by powers of N from there",
    make: |parameters| {
        let mut own = LeastAttained { first: FIRST_QUEUE_BYTES, growth: GROWTH };
        for &(key, value) in parameters {
            match key {
                "first" => {
                    own.first = parse_bytes(value).map_err(|why| format!("first={value}: {why}"))?;
                }
                "growth" => {
                    let growth = value.parse().ok().filter(|growth| *growth >= 2);
                    own.growth = growth.ok_or(format!("growth={value}: use a whole number from 2 on"))?;
                }
                _ => return Err(format!("policy least-attained has no parameter {key:?}: it has first and growth")),
            }
        }
        if own.first == 0 {
            return Err("first=0: use a size above 0, such as 10 MB".into());
        }
        Ok(Policy::Transfers(Box::new(own)))
    },
};

/// The first queue ends here by default (section 5: Q_1^hi = 10 MB).
const FIRST_QUEUE_BYTES: u64 = 10_000_000;
/// Each queue ends this many times later than the one before by default (E = 10).
const GROWTH: u64 = 10;
/// Queues there are (K = 10).
const QUEUES: usize = 10;

struct LeastAttained {
    first: u64,
    growth: u64,
}

impl LeastAttained {
    /// The queue of a transfer that has moved so much.
    fn queue(&self, served_bytes: u64) -> usize {
        let ends = std::iter::successors(Some(self.first), |end| end.checked_mul(self.growth));
        ends.take(QUEUES - 1).take_while(|end| served_bytes >= *end).count()
    }
}

impl TransferPolicy for LeastAttained {
    fn counts(&self, transfers: &[TransferView]) -> Vec<f64> {
        let mut order: Vec<usize> = (0..transfers.len()).collect();
        order.sort_by_key(|&index| (self.queue(transfers[index].served_bytes), transfers[index].arrival));
        ranks::counts(&order)
    }

    fn looks_at_hosts(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_grow_and_the_last_takes_the_rest() {
        let usual = LeastAttained { first: FIRST_QUEUE_BYTES, growth: GROWTH };
        let queues = [0, 9_999_999, 10_000_000, 99_999_999, 100_000_000, u64::MAX].map(|bytes| usual.queue(bytes));
        assert_eq!(queues, [0, 0, 1, 1, 2, 9]);
        let small = LeastAttained { first: 1_000, growth: 2 };
        assert_eq!([999, 1_000, 2_000, 4_000, u64::MAX].map(|bytes| small.queue(bytes)), [0, 1, 2, 3, 9]);
    }

    #[test]
    fn wrong_parameters_are_refused() {
        let make = |parameters: &[(&str, &str)]| (ENTRY.make)(parameters).map(drop);
        assert_eq!(make(&[("first", "4 MB"), ("growth", "2")]), Ok(()));
        for (key, value) in [("first", "much"), ("first", "0 B"), ("growth", "1"), ("growth", "x"), ("size", "1 MB")] {
            assert!(make(&[(key, value)]).is_err(), "{key}={value}");
        }
    }
}
