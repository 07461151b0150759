//! Policies: pure functions from active jobs to weights (paper 001, tables 4.3 and 4.4).
//!
//! A new policy is one file here and one line in [`POLICIES`]; the property suite in `tests/policies.rs` then runs over
//! it too.

pub mod external;
mod fair;
mod fifo;
mod performance;
mod priority;

use crate::types::JobId;
use serde::{Deserialize, Serialize};

/// What a policy may look at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    pub job: JobId,
    /// Order of arrival; no two jobs have the same.
    pub arrival: u64,
    /// What the user gave, above 0.
    pub priority: f64,
    /// Machines that the job uses (N in equations 4.1 and 4.2); 0 is taken as 1.
    pub machines: u32,
    /// One of the job's active transfers is a broadcast.
    pub broadcasts: bool,
}

pub trait Policy: Send {
    /// How much each job counts, in the order of `jobs`: above 0, of any scale.
    fn counts(&self, jobs: &[JobView]) -> Vec<f64>;
}

/// A policy, or one line that says why its parameters are wrong.
type Made = Result<Box<dyn Policy>, String>;

/// A registered policy: its name, what it does in a sentence, and how it is made from its parameters.
pub struct Entry {
    pub name: &'static str,
    pub meaning: &'static str,
    make: fn(&[(&str, &str)]) -> Made,
}

/// All policies there are; the first is the default.
pub const POLICIES: &[Entry] = &[performance::ENTRY, fair::ENTRY, fifo::ENTRY, priority::ENTRY];

/// Makes a policy from its specification: a name, then parameters, as in `performance-centric:count=machines`.
///
/// # Errors
/// One line that names the policies, or the parameters, that there are.
pub fn policy(spec: &str) -> Result<Box<dyn Policy>, String> {
    if spec.strip_prefix(external::PREFIX).is_some_and(|name| !name.is_empty()) {
        return Ok(Box::new(external::External::default()));
    }
    let mut words = spec.split(':');
    let name = words.next().unwrap_or_default();
    let entry = POLICIES.iter().find(|entry| entry.name == name).ok_or_else(|| {
        let names: Vec<_> = POLICIES.iter().map(|entry| entry.name).collect();
        format!("there is no policy {name:?}: use one of {}, or python:NAME", names.join(", "))
    })?;
    let parameters = words
        .map(|word| word.split_once('=').ok_or_else(|| format!("{word:?} in policy {spec:?}: write name=value")))
        .collect::<Result<Vec<_>, _>>()?;
    (entry.make)(&parameters)
}

/// Weights of `jobs`, in their order; they add up to 1.
pub fn weights(policy: &dyn Policy, jobs: &[JobView]) -> Vec<f64> {
    let counts = policy.counts(jobs);
    let total: f64 = counts.iter().sum();
    counts.iter().map(|count| count / total).collect()
}

/// For policies without parameters.
fn no_parameters(name: &str, parameters: &[(&str, &str)]) -> Result<(), String> {
    match parameters.first() {
        None => Ok(()),
        Some((key, _)) => Err(format!("policy {name} has no parameter {key:?}: leave it out")),
    }
}
