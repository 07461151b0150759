//! Policies: pure functions from active transfers to weights (paper 001, tables 4.3 and 4.4).
//!
//! There are two kinds. A job policy weighs jobs; the transfers of a job that wait on a host share its fraction there
//! equally. A transfer policy weighs each transfer, so a job with two transfers has two shares.
//!
//! A new policy is one file here and one line in [`POLICIES`]; the property suite in `tests/policies.rs` then runs over
//! it too.

mod deadline;
pub mod external;
mod fair;
mod fifo;
mod least_attained;
mod performance;
mod priority;
mod ranks;
mod sincronia;
mod smallest_bottleneck;

use crate::host::fair::Level;
use crate::types::{HostId, JobId, Pattern, TransferId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a policy may know of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    pub job: JobId,
    pub user: Option<Arc<str>>,
    pub class: Option<Arc<str>>,
    /// Order of arrival; no two jobs have the same.
    pub arrival: u64,
    /// Set by the user, above 0.
    pub priority: f64,
    /// Seconds until the user wants it done; negative once that is over.
    pub deadline_secs: Option<f64>,
    /// Since it arrived.
    pub age_secs: f64,
}

/// What a policy may know of a transfer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferView {
    pub transfer: TransferId,
    pub job: JobView,
    /// Order in which transfers began; no two have the same.
    pub arrival: u64,
    pub pattern: Pattern,
    /// The evidence for the pattern.
    pub evidence: Arc<str>,
    /// Hosts that send or receive in it: N in equations 4.1 and 4.2 (paper 001); 0 is taken as 1.
    pub machines: u32,
    /// Bytes that receivers have requested since it began.
    pub asked_bytes: u64,
    /// Of those, bytes that have arrived.
    pub served_bytes: u64,
    /// Requested bytes that have not arrived, by the host that waits for them.
    pub to_receive: BTreeMap<HostId, u64>,
    /// The same, by the host that has them, as far as that is known.
    pub to_send: BTreeMap<HostId, u64>,
    /// As it was measured last.
    pub bytes_per_sec: f64,
    /// Since it began.
    pub age_secs: f64,
}

impl TransferView {
    /// Bytes that its busiest host has yet to send or to receive: no order of transfers ends it before those are moved
    /// (Varys: Chowdhury, Zhong and Stoica 2014, equation 1, with all links alike).
    pub fn bottleneck_bytes(&self) -> u64 {
        self.to_receive.values().chain(self.to_send.values()).copied().max().unwrap_or(0)
    }
}

/// Weighs jobs.
pub trait JobPolicy: Send {
    /// The relative weight of each job, in the order of `jobs`: above 0, of any scale.
    fn counts(&self, jobs: &[JobView]) -> Vec<f64>;

    /// Whether views of transfers must have their bytes by host: an external policy reads them.
    fn looks_at_hosts(&self) -> bool {
        false
    }
}

/// Weighs transfers.
pub trait TransferPolicy: Send {
    /// The relative weight of each transfer, in the order of `transfers`: above 0, of any scale.
    fn counts(&self, transfers: &[TransferView]) -> Vec<f64>;

    /// Whether it reads `to_receive`, `to_send` or `machines`: they are left out of the views where it does not.
    fn looks_at_hosts(&self) -> bool {
        true
    }
}

pub enum Policy {
    Jobs(Box<dyn JobPolicy>),
    Transfers(Box<dyn TransferPolicy>),
}

impl Policy {
    /// Whether it reads the bytes of a transfer by host, or the number of hosts.
    pub fn looks_at_hosts(&self) -> bool {
        match self {
            Policy::Jobs(policy) => policy.looks_at_hosts(),
            Policy::Transfers(policy) => policy.looks_at_hosts(),
        }
    }

    pub fn level(&self) -> Level {
        match self {
            Policy::Jobs(_) => Level::Groups,
            Policy::Transfers(_) => Level::Members,
        }
    }
}

/// A policy, or one line that names the invalid parameter.
type Made = Result<Policy, String>;

/// A registered policy: its name, what it does in a sentence, and how it is made from its parameters.
pub struct Entry {
    pub name: &'static str,
    pub meaning: &'static str,
    make: fn(&[(&str, &str)]) -> Made,
}

/// All policies there are; the first is the default.
pub const POLICIES: &[Entry] = &[
    performance::ENTRY,
    fair::ENTRY,
    fifo::ENTRY,
    priority::ENTRY,
    smallest_bottleneck::ENTRY,
    least_attained::ENTRY,
    deadline::ENTRY,
    sincronia::ENTRY,
];

/// Makes a policy from its specification: a name, then parameters, as in `performance-centric:count=machines`.
///
/// # Errors
/// One line that names the policies, or the parameters, that there are.
pub fn policy(spec: &str) -> Result<Policy, String> {
    if spec.strip_prefix(external::PREFIX).is_some_and(|name| !name.is_empty()) {
        return Ok(external::Counts::default().policy());
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

/// Weights of active jobs and transfers: each of the two adds up to 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// In the order of arrival.
    pub jobs: Vec<(JobId, f64)>,
    /// In the order of the views. Under a job policy, a transfer has this weight on a host where all transfers of its
    /// job wait.
    pub transfers: Vec<f64>,
}

/// Weighs active transfers.
pub fn weights(policy: &Policy, transfers: &[TransferView]) -> Weights {
    match policy {
        Policy::Jobs(policy) => {
            let mut jobs: BTreeMap<u64, (&JobView, usize)> = BTreeMap::new();
            for view in transfers {
                jobs.entry(view.job.arrival).or_insert((&view.job, 0)).1 += 1;
            }
            let views: Vec<JobView> = jobs.values().map(|(view, _)| (*view).clone()).collect();
            let weights = normalized(policy.counts(&views));
            let by_arrival: BTreeMap<u64, f64> = jobs
                .iter()
                .zip(&weights)
                .map(|((arrival, (_, count)), weight)| (*arrival, weight / *count as f64))
                .collect();
            Weights {
                jobs: views.into_iter().map(|view| view.job).zip(weights).collect(),
                transfers: transfers.iter().map(|view| by_arrival[&view.job.arrival]).collect(),
            }
        }
        Policy::Transfers(policy) => {
            let weights = normalized(policy.counts(transfers));
            let mut of_job: BTreeMap<u64, (JobId, f64)> = BTreeMap::new();
            for (view, weight) in transfers.iter().zip(&weights) {
                of_job.entry(view.job.arrival).or_insert_with(|| (view.job.job.clone(), 0.0)).1 += weight;
            }
            Weights { jobs: of_job.into_values().collect(), transfers: weights }
        }
    }
}

/// Normalizes relative weights to a sum of 1; none becomes 0, however small.
fn normalized(counts: Vec<f64>) -> Vec<f64> {
    let total: f64 = counts.iter().sum();
    counts.iter().map(|count| (count / total).max(LEAST)).collect()
}

/// The smallest weight: even a million of them do not change the other weights noticeably.
const LEAST: f64 = 1e-12;

/// For policies without parameters.
fn no_parameters(name: &str, parameters: &[(&str, &str)]) -> Result<(), String> {
    match parameters.first() {
        None => Ok(()),
        Some((key, _)) => Err(format!("policy {name} has no parameter {key:?}: leave it out")),
    }
}
