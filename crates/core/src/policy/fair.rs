//! Every job the same.

use super::{Entry, JobView, Policy, no_parameters};

pub const ENTRY: Entry = Entry {
    name: "fair",
    meaning: "equal weights",
    make: |parameters| no_parameters("fair", parameters).map(|()| Box::new(Fair) as Box<dyn Policy>),
};

struct Fair;

impl Policy for Fair {
    fn counts(&self, jobs: &[JobView]) -> Vec<f64> {
        vec![1.0; jobs.len()]
    }
}
