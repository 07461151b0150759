//! First come, most served.

use super::{Entry, JobPolicy, JobView, Policy, no_parameters};

pub const ENTRY: Entry = Entry {
    name: "fifo",
    meaning: "by arrival: of n jobs the oldest has weight n, the newest 1",
    make: |parameters| no_parameters("fifo", parameters).map(|()| Policy::Jobs(Box::new(Fifo))),
};

/// Of n jobs the oldest counts n and the newest 1. For two jobs and ten flows that is the paper's 7 and 3 (table 4.4);
/// for more than two the paper says nothing, and this is our decision.
struct Fifo;

impl JobPolicy for Fifo {
    fn counts(&self, jobs: &[JobView]) -> Vec<f64> {
        let mut order: Vec<usize> = (0..jobs.len()).collect();
        order.sort_by_key(|&index| jobs[index].arrival);
        let mut counts = vec![0.0; jobs.len()];
        for (rank, &index) in order.iter().enumerate() {
            counts[index] = (jobs.len() - rank) as f64;
        }
        counts
    }
}
