//! Weights of all clusters' transfers, by the service's policy.
//!
//! Clusters that share a host share its bytes; those that share none, not even through others, are independent. So
//! weights are computed for each **island**: the clusters that are joined by hosts.

use super::ClusterId;
use super::books::{Books, Known};
use super::messages::{Part, ShareId, Weighed};
use crate::host::fair::Level;
use crate::policy::{self, Policy, TransferView};
use crate::types::{HostId, TransferId};
use std::collections::BTreeMap;

/// An active transfer of some cluster, as its adapter reported it.
pub struct Reported<'a> {
    pub cluster: &'a ClusterId,
    pub view: &'a TransferView,
    /// Seconds since the view was taken.
    pub since: f64,
}

/// Clusters that are joined by hosts, each in the island that is named by its first one.
pub fn islands(clusters: &BTreeMap<ClusterId, Known>) -> BTreeMap<ClusterId, ClusterId> {
    // Each cluster's number leads to a lower one of its island, and the lowest to itself (union-find; Tarjan 1975).
    let mut lower: Vec<usize> = Vec::with_capacity(clusters.len());
    let mut first_on: BTreeMap<&HostId, usize> = BTreeMap::new();
    for (own, known) in clusters.values().enumerate() {
        lower.push(own);
        for host in &known.hosts {
            let first = *first_on.entry(host).or_insert(own);
            let (a, b) = (lowest(&mut lower, own), lowest(&mut lower, first));
            lower[a.max(b)] = a.min(b);
        }
    }
    // Names come in order, so the lowest number is the first name.
    let names: Vec<&ClusterId> = clusters.keys().collect();
    let island = |own: usize| (names[own].clone(), names[lowest(&mut lower, own)].clone());
    (0..names.len()).map(island).collect()
}

/// Of a cluster's island; those on the way are led there at once from then on.
fn lowest(lower: &mut [usize], mut own: usize) -> usize {
    while lower[own] != own {
        lower[own] = lower[lower[own]];
        own = lower[own];
    }
    own
}

/// Weights of the transfers of one island. Those whose jobs are not stored are ignored.
pub fn weigh(policy: &Policy, books: &Books, reported: &[Reported<'_>]) -> Weighed {
    let job_of = |own: &Reported<'_>| books.jobs.get(&(own.cluster.clone(), own.view.transfer.job.clone()));
    let mut known: Vec<(&Reported<'_>, u64, f64)> = reported
        .iter()
        .filter_map(|own| {
            let priority = books.priority_of(own.cluster, &own.view.transfer.job)?;
            Some((own, job_of(own)?.arrival, priority))
        })
        .collect();
    known.sort_by(|(a, job_a, _), (b, job_b, _)| {
        let age = |own: &Reported<'_>| own.view.age_secs + own.since;
        let id = |own: &Reported<'_>| (own.cluster.clone(), own.view.transfer.clone());
        age(b).total_cmp(&age(a)).then(job_a.cmp(job_b)).then_with(|| id(a).cmp(&id(b)))
    });
    let views: Vec<TransferView> = (0..)
        .zip(&known)
        .map(|(arrival, (own, job, priority))| {
            let mut view = own.view.clone();
            (view.arrival, view.job.arrival, view.job.priority) = (arrival, *job, *priority);
            view.age_secs += own.since;
            view.job.age_secs += own.since;
            view.job.deadline_secs = view.job.deadline_secs.map(|deadline| deadline - own.since);
            view
        })
        .collect();
    let weights = policy::weights(policy, &views);
    let level = policy.level();
    let ids = known.iter().map(|(own, job, _)| {
        let TransferId { job: name, from, to } = own.view.transfer.clone();
        let stages = (level == Level::Members).then_some((from, to));
        (ShareId { cluster: own.cluster.clone(), job: name, stages }, *job)
    });
    let mut parts: BTreeMap<ShareId, Part> = BTreeMap::new();
    for (((id, job), view), weight) in ids.zip(&views).zip(weights.transfers) {
        let arrival = if level == Level::Members { view.arrival } else { job };
        // Under a policy of jobs a job's transfers have its weight together.
        parts.entry(id).or_insert(Part { weight: 0.0, arrival }).weight += weight;
    }
    Weighed { level, parts }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clusters(all: &[(&str, &[&str])]) -> BTreeMap<ClusterId, Known> {
        let known = |hosts: &[&str]| Known { incarnation: 1, hosts: hosts.iter().map(|host| (*host).into()).collect() };
        all.iter().map(|(name, hosts)| ((*name).into(), known(hosts))).collect()
    }

    fn names(all: &[(&str, &[&str])]) -> Vec<(String, String)> {
        islands(&clusters(all)).iter().map(|(own, island)| (own.to_string(), island.to_string())).collect()
    }

    #[test]
    fn clusters_are_joined_by_hosts_also_by_way_of_others() {
        let own = |name: &str, island: &str| (name.to_owned(), island.to_owned());
        assert_eq!(names(&[("a", &["1"]), ("b", &["2"])]), [own("a", "a"), own("b", "b")]);
        assert_eq!(names(&[("a", &["1", "2"]), ("b", &["2"])]), [own("a", "a"), own("b", "a")]);
        let chain: [(&str, &[&str]); 4] = [("a", &["1"]), ("b", &["2"]), ("c", &["3"]), ("d", &["3", "1"])];
        assert_eq!(names(&chain), [own("a", "a"), own("b", "b"), own("c", "a"), own("d", "a")]);
        assert_eq!(names(&[("a", &["1"]), ("b", &["2"]), ("c", &["2", "1"]), ("d", &["2"])]), {
            ["a", "b", "c", "d"].map(|name| own(name, "a"))
        });
    }
}
