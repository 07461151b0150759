//! Least attained service, without sizes: the discretized rule of Aalo (Chowdhury and Stoica 2015, section 4).

use super::{Entry, Policy, TransferPolicy, TransferView, no_parameters, ranks};

pub const ENTRY: Entry = Entry {
    name: "least-attained",
    meaning: "first the transfers that have moved least, by powers of ten from 10 MB; of those the oldest",
    make: |parameters| {
        no_parameters("least-attained", parameters)?;
        Ok(Policy::Transfers(Box::new(LeastAttained)))
    },
};

/// The first queue ends here (section 5: Q_1^hi = 10 MB).
const FIRST_QUEUE_BYTES: u64 = 10_000_000;
/// Each queue ends this many times later than the one before (E = 10).
const GROWTH: u64 = 10;
/// Queues there are (K = 10).
const QUEUES: u32 = 10;

struct LeastAttained;

/// The queue of a transfer that has moved so much.
fn queue(served_bytes: u64) -> u32 {
    let ends = std::iter::successors(Some(FIRST_QUEUE_BYTES), |end| end.checked_mul(GROWTH));
    ends.take(QUEUES as usize - 1).take_while(|end| served_bytes >= *end).count() as u32
}

impl TransferPolicy for LeastAttained {
    fn counts(&self, transfers: &[TransferView]) -> Vec<f64> {
        let mut order: Vec<usize> = (0..transfers.len()).collect();
        order.sort_by_key(|&index| (queue(transfers[index].served_bytes), transfers[index].arrival));
        ranks::counts(&order)
    }

    fn looks_at_hosts(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::queue;

    #[test]
    fn queues_grow_tenfold_and_the_last_takes_the_rest() {
        assert_eq!([0, 9_999_999, 10_000_000, 99_999_999, 100_000_000].map(queue), [0, 0, 1, 1, 2]);
        assert_eq!(queue(u64::MAX), 9);
    }
}
