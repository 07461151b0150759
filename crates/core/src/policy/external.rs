//! A policy that somebody else computes: a function of the user's, in Python. What it says is checked here.

use super::{JobView, Policy};
use crate::types::JobId;
use std::collections::BTreeMap;

/// What specifications of external policies begin with.
pub const PREFIX: &str = "python:";

/// Counts as they were told last, by job.
#[derive(Clone, Debug, Default)]
pub struct External {
    counts: BTreeMap<JobId, f64>,
}

impl External {
    /// What holds until it is told something.
    pub fn begin(&mut self, counts: BTreeMap<JobId, f64>) {
        self.counts = counts;
    }

    /// Takes what was computed for `asked`.
    ///
    /// # Errors
    /// It makes no sense, in words; what was told before stays.
    pub fn replied(&mut self, asked: &[JobView], counts: BTreeMap<JobId, f64>) -> Result<(), String> {
        for view in asked {
            match counts.get(&view.job) {
                None => return Err(format!("it says nothing of job {}", view.job)),
                Some(count) if !(count.is_finite() && *count > 0.0) => {
                    return Err(format!("it gives job {} the weight {count}: use numbers above 0", view.job));
                }
                Some(_) => {}
            }
        }
        self.counts = counts;
        Ok(())
    }
}

impl Policy for External {
    /// A job that nothing was said of yet counts as the others do on average.
    fn counts(&self, jobs: &[JobView]) -> Vec<f64> {
        let known: Vec<f64> = jobs.iter().filter_map(|view| self.counts.get(&view.job)).copied().collect();
        let mean = if known.is_empty() { 1.0 } else { known.iter().sum::<f64>() / known.len() as f64 };
        jobs.iter().map(|view| self.counts.get(&view.job).copied().unwrap_or(mean)).collect()
    }
}
