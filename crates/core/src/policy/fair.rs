//! Every job the same.

use super::{Entry, JobPolicy, JobView, Policy, no_parameters};

pub const ENTRY: Entry = Entry {
    name: "fair",
    meaning: "equal weights for jobs",
    make: |parameters| no_parameters("fair", parameters).map(|()| Policy::Jobs(Box::new(Fair))),
};

struct Fair;

impl JobPolicy for Fair {
    fn counts(&self, jobs: &[JobView]) -> Vec<f64> {
        vec![1.0; jobs.len()]
    }
}
