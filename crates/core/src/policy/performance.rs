//! Broadcasts before shuffles: the default.

use super::{Entry, Policy, TransferPolicy, TransferView};
use crate::types::Pattern;

pub const ENTRY: Entry = Entry {
    name: "performance-centric",
    meaning: "a broadcast has weight 2, others 1, times their job's priority; count=machines: N^2 and N for N hosts",
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
        Ok(Policy::Transfers(Box::new(PerformanceCentric { count })))
    },
};

/// What the weight of a transfer depends on.
enum Count {
    /// "A broadcast transfer is assigned twice the weight of a shuffle transfer" (paper 001, table 4.3).
    Pattern,
    /// share_shuffle = N, share_broadcast = N^2 (paper 001, equations 4.1 and 4.2).
    Machines,
}

struct PerformanceCentric {
    count: Count,
}

impl TransferPolicy for PerformanceCentric {
    fn counts(&self, transfers: &[TransferView]) -> Vec<f64> {
        let count = |transfer: &TransferView| {
            let machines = f64::from(transfer.machines.max(1));
            let own = match (&self.count, transfer.pattern == Pattern::Broadcast) {
                (Count::Pattern, false) => 1.0,
                (Count::Pattern, true) => 2.0,
                (Count::Machines, false) => machines,
                (Count::Machines, true) => machines * machines,
            };
            own * transfer.job.priority
        };
        transfers.iter().map(count).collect()
    }

    fn looks_at_hosts(&self) -> bool {
        matches!(self.count, Count::Machines)
    }
}
