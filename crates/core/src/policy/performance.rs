//! Broadcasts before shuffles: the default.

use super::{Entry, JobView, Policy};

pub const ENTRY: Entry = Entry {
    name: "performance-centric",
    meaning: "2 while one of the job's active transfers is a broadcast, else 1; count=machines: N and N^2 machines",
    make: |parameters| {
        let mut count = Count::Pattern;
        for &(key, value) in parameters {
            count = match (key, value) {
                ("count", "pattern") => Count::Pattern,
                ("count", "machines") => Count::Machines,
                ("count", _) => return Err(format!("count={value:?}: use count=pattern or count=machines")),
                _ => return Err(format!("policy performance-centric has no parameter {key:?}: it has count")),
            };
        }
        Ok(Box::new(PerformanceCentric { count }) as Box<dyn Policy>)
    },
};

/// What a transfer counts by.
enum Count {
    /// "A broadcast transfer is assigned twice the weight of a shuffle transfer" (paper 001, table 4.3).
    Pattern,
    /// share_shuffle = N, share_broadcast = N^2 (paper 001, equations 4.1 and 4.2).
    Machines,
}

struct PerformanceCentric {
    count: Count,
}

impl Policy for PerformanceCentric {
    fn counts(&self, jobs: &[JobView]) -> Vec<f64> {
        let count = |job: &JobView| {
            let machines = f64::from(job.machines.max(1));
            match (&self.count, job.broadcasts) {
                (Count::Pattern, false) => 1.0,
                (Count::Pattern, true) => 2.0,
                (Count::Machines, false) => machines,
                (Count::Machines, true) => machines * machines,
            }
        };
        jobs.iter().map(count).collect()
    }
}
