//! Earliest deadline first; what cannot be met any more yields (D3: Wilson, Ballani, Karagiannis and Rowstron 2011).

use super::{Entry, Policy, TransferPolicy, TransferView, ranks};
use crate::units::parse_rate_bits_per_sec;

pub const ENTRY: Entry = Entry {
    name: "deadline",
    meaning: "earliest deadline first, then jobs without one, then late jobs; link=RATE: also those late at that rate",
    make: |parameters| {
        let mut link = None;
        for &(key, value) in parameters {
            match key {
                "link" => {
                    let rate = parse_rate_bits_per_sec(value).map_err(|bad| format!("link={value:?}: {bad}"))?;
                    link = Some(rate as f64);
                }
                _ => return Err(format!("policy deadline has no parameter {key:?}: it has link")),
            }
        }
        Ok(Policy::Transfers(Box::new(Deadline { link })))
    },
};

struct Deadline {
    /// Bits per second that a host can send or receive; without it a deadline is met until it has passed.
    link: Option<f64>,
}

/// Who comes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Meets,
    HasNone,
    TooLate,
}

impl Deadline {
    fn class(&self, transfer: &TransferView) -> Class {
        let needs_secs = self.link.map_or(0.0, |link| transfer.bottleneck_bytes() as f64 * 8.0 / link);
        match transfer.job.deadline_secs {
            None => Class::HasNone,
            Some(left) if left < needs_secs || left <= 0.0 => Class::TooLate,
            Some(_) => Class::Meets,
        }
    }
}

impl TransferPolicy for Deadline {
    fn counts(&self, transfers: &[TransferView]) -> Vec<f64> {
        let mut order: Vec<usize> = (0..transfers.len()).collect();
        let left = |index: usize| transfers[index].job.deadline_secs.unwrap_or(0.0);
        order.sort_by(|&one, &other| {
            let class = |index: usize| self.class(&transfers[index]);
            let arrival = |index: usize| transfers[index].arrival;
            class(one)
                .cmp(&class(other))
                .then(left(one).total_cmp(&left(other)))
                .then(arrival(one).cmp(&arrival(other)))
        });
        ranks::counts(&order)
    }
}
