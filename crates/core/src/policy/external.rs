//! An external policy: a Python function of the user. Its answers are checked here.

use super::{JobPolicy, JobView, Policy, TransferPolicy, TransferView};
use crate::types::{JobId, TransferId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What specifications of external policies begin with.
pub const PREFIX: &str = "python:";

/// The last answer: relative weights of jobs, or of transfers. It decides which kind the policy is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Counts {
    Jobs(BTreeMap<JobId, f64>),
    Transfers(Vec<(TransferId, f64)>),
}

impl Default for Counts {
    fn default() -> Counts {
        Counts::Jobs(BTreeMap::new())
    }
}

impl Counts {
    /// Checks that this has a valid weight for all requested transfers.
    ///
    /// # Errors
    /// Why the answer is invalid.
    pub fn check(&self, asked: &[TransferView]) -> Result<(), String> {
        match self {
            Counts::Jobs(counts) => asked.iter().try_for_each(|view| {
                let job = &view.transfer.job;
                check(counts.get(job), || format!("job {job}"))
            }),
            Counts::Transfers(counts) => {
                let counts: BTreeMap<&TransferId, f64> = counts.iter().map(|(id, count)| (id, *count)).collect();
                asked.iter().try_for_each(|view| {
                    let TransferId { job, from, to } = &view.transfer;
                    check(counts.get(&view.transfer), || format!("transfer {from} -> {to} of job {job}"))
                })
            }
        }
    }

    /// The policy that returns these weights, until there are others.
    pub fn policy(&self) -> Policy {
        match self.clone() {
            Counts::Jobs(counts) => Policy::Jobs(Box::new(Answered(counts))),
            Counts::Transfers(counts) => Policy::Transfers(Box::new(Answered(counts.into_iter().collect()))),
        }
    }
}

fn check(count: Option<&f64>, whose: impl Fn() -> String) -> Result<(), String> {
    match count {
        None => Err(format!("it returned no weight for {}", whose())),
        Some(count) if count.is_finite() && *count > 0.0 => Ok(()),
        Some(count) => Err(format!("it returned the weight {count} for {}: use numbers above 0", whose())),
    }
}

struct Answered<Id: Ord>(BTreeMap<Id, f64>);

impl<Id: Ord> Answered<Id> {
    /// A new job or transfer gets the mean weight of the others.
    fn counts<'a>(&self, ids: impl Iterator<Item = &'a Id> + Clone) -> Vec<f64>
    where
        Id: 'a,
    {
        // Relative to the largest, so that the sum of large ones is finite.
        let largest = self.0.values().copied().fold(f64::MIN_POSITIVE, f64::max);
        let known: Vec<f64> = ids.clone().filter_map(|id| self.0.get(id)).map(|count| count / largest).collect();
        let mean = if known.is_empty() { 1.0 } else { known.iter().sum::<f64>() / known.len() as f64 };
        ids.map(|id| self.0.get(id).map_or(mean, |count| count / largest)).collect()
    }
}

impl JobPolicy for Answered<JobId> {
    fn counts(&self, jobs: &[JobView]) -> Vec<f64> {
        Answered::counts(self, jobs.iter().map(|view| &view.job))
    }

    fn looks_at_hosts(&self) -> bool {
        true
    }
}

impl TransferPolicy for Answered<TransferId> {
    fn counts(&self, transfers: &[TransferView]) -> Vec<f64> {
        Answered::counts(self, transfers.iter().map(|view| &view.transfer))
    }
}
