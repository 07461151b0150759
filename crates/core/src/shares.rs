//! Shares of a host: weights, and the whole flows that they get of the host's limit.

use crate::budget::FLOWS_MAX;
use crate::defaults::FLOWS_PER_HOST;
use crate::types::{JobId, Stage};
use serde::{Deserialize, Serialize};

/// How many chunks a host receives in parallel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowsPerHost {
    /// The number with the highest goodput, found by trial ([`crate::budget`]).
    Auto,
    #[serde(untagged)]
    Fixed(u32),
}

impl FlowsPerHost {
    /// The upper limit.
    pub fn most(self) -> u32 {
        match self {
            FlowsPerHost::Auto => FLOWS_MAX,
            FlowsPerHost::Fixed(flows) => flows,
        }
    }

    /// The number that weights are split by before a host has found its own.
    pub fn usual(self) -> u32 {
        match self {
            FlowsPerHost::Auto => FLOWS_PER_HOST,
            FlowsPerHost::Fixed(flows) => flows,
        }
    }

    /// # Errors
    /// The limit is 0, which would move nothing.
    pub fn check(self) -> Result<(), String> {
        if self == FlowsPerHost::Fixed(0) {
            return Err("0 flows per host would move nothing: use 1 or more".into());
        }
        Ok(())
    }
}

/// What a job, or one of its transfers, may have on every host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    pub job: JobId,
    /// Stages of the transfer, from and to; absent where the job as a whole has the share.
    #[serde(default)]
    pub stages: Option<(Stage, Stage)>,
    /// Fraction of the bytes; the weights of all shares add up to 1.
    pub weight: f64,
}

/// Splits `budget` flows by `weights` (which add up to 1): largest remainder, ties to the earlier job, and at least 1
/// each while the budget is at least twice the number of jobs. The flows add up to the budget.
pub fn split(budget: u32, weights: &[f64]) -> Vec<u32> {
    let quotas: Vec<f64> = weights.iter().map(|weight| weight * f64::from(budget)).collect();
    let mut flows: Vec<u32> = quotas.iter().map(|quota| quota.floor() as u32).collect();
    let mut by_remainder: Vec<usize> = (0..quotas.len()).collect();
    by_remainder.sort_by(|&a, &b| (quotas[b].fract()).total_cmp(&quotas[a].fract()).then(a.cmp(&b)));
    let rest = budget.saturating_sub(flows.iter().sum()) as usize;
    for &index in by_remainder.iter().cycle().take(if flows.is_empty() { 0 } else { rest }) {
        flows[index] += 1;
    }
    if caps_bind(budget, weights.len()) {
        while let Some(poor) = flows.iter().position(|&flow| flow == 0) {
            // Take the flow from the job that is farthest above its quota; with a budget of twice the jobs, one always
            // has more than 1.
            let Some(rich) = (0..flows.len()).filter(|&index| flows[index] > 1).max_by(|&a, &b| {
                let above = |index: usize| f64::from(flows[index]) - quotas[index];
                above(a).total_cmp(&above(b)).then(b.cmp(&a))
            }) else {
                break;
            };
            flows[rich] -= 1;
            flows[poor] += 1;
        }
    }
    flows
}

/// Slots that a weight may hold while others want theirs: rounded up, so that rounding does not bend the shares of bytes.
pub fn cap(budget: u32, weight: f64) -> u32 {
    // Keep values whole that differ from a whole number only by a rounding error.
    (f64::from(budget) * weight - 1e-9).ceil().max(1.0) as u32
}

/// Whether the numbers of flows limit the jobs: with fewer slots than twice the jobs, bytes alone decide.
pub fn caps_bind(budget: u32, jobs: usize) -> bool {
    budget as usize >= 2 * jobs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_job_table_of_the_paper_comes_out() {
        assert_eq!(split(10, &[2.0 / 3.0, 1.0 / 3.0]), [7, 3]);
        assert_eq!(split(10, &[1.0 / 3.0, 2.0 / 3.0]), [3, 7]);
        assert_eq!(split(10, &[0.5, 0.5]), [5, 5]);
        assert_eq!(split(10, &[1.0]), [10]);
        assert_eq!(split(10, &[]), [] as [u32; 0]);
    }

    #[test]
    fn a_small_job_keeps_one_flow_while_the_budget_allows() {
        assert_eq!(split(10, &[0.97, 0.01, 0.01, 0.01]), [7, 1, 1, 1]);
        assert_eq!(split(3, &[0.98, 0.01, 0.01]), [3, 0, 0]);
    }
}
