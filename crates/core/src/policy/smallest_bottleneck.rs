//! Smallest effective bottleneck first (Varys: Chowdhury, Zhong and Stoica 2014, section 5.3).

use super::{Entry, Policy, TransferPolicy, TransferView, no_parameters, ranks};

pub const ENTRY: Entry = Entry {
    name: "smallest-bottleneck-first",
    meaning: "first the transfer whose busiest host has the fewest bytes left to send or receive",
    make: |parameters| {
        no_parameters("smallest-bottleneck-first", parameters)?;
        Ok(Policy::Transfers(Box::new(SmallestBottleneckFirst)))
    },
};

struct SmallestBottleneckFirst;

impl TransferPolicy for SmallestBottleneckFirst {
    fn counts(&self, transfers: &[TransferView]) -> Vec<f64> {
        let mut order: Vec<usize> = (0..transfers.len()).collect();
        order.sort_by_key(|&index| (transfers[index].bottleneck_bytes(), transfers[index].arrival));
        ranks::counts(&order)
    }
}
