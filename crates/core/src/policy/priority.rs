//! Weights by the users' priorities.

use super::{Entry, JobPolicy, JobView, Policy, no_parameters};

pub const ENTRY: Entry = Entry {
    name: "priority",
    meaning: "proportional to the priority that the user gives each job",
    make: |parameters| no_parameters("priority", parameters).map(|()| Policy::Jobs(Box::new(Priority))),
};

/// "A job with a priority of 2 is assigned a weight which is double the weight assigned to a priority 1 job" (paper
/// 001, table 4.3).
struct Priority;

impl JobPolicy for Priority {
    fn counts(&self, jobs: &[JobView]) -> Vec<f64> {
        jobs.iter().map(|job| job.priority).collect()
    }
}
