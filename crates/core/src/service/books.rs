//! The inputs of the service, as stored: all replicas have the same at the same revision.
//!
//! Entries are texts, so a store needs to know nothing of them. Entries that this replica cannot read (of a newer
//! version, or damaged) are skipped and named in the status.

use super::{ClusterId, ServiceId};
use crate::control::Change;
use crate::types::{HostId, JobId, JobSpec};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What is written under a key; `None`: the key is no more.
pub type Entry = (String, Option<String>);

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Books {
    /// Revision of the store that this corresponds to.
    pub revision: u64,
    /// Random number of the service, chosen when the store was first used: a store that lost its data has another.
    pub service: Option<ServiceId>,
    pub policy: Option<String>,
    pub clusters: BTreeMap<ClusterId, Known>,
    pub jobs: BTreeMap<(ClusterId, JobId), Job>,
    /// What operators changed of jobs.
    pub changes: BTreeMap<(ClusterId, JobId), Change>,
    /// Drained hosts.
    pub drained: BTreeSet<HostId>,
    /// Keys that this replica cannot read.
    pub unreadable: BTreeSet<String>,
}

/// A cluster that has joined, and not left.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Known {
    pub incarnation: u64,
    pub hosts: BTreeSet<HostId>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    pub spec: JobSpec,
    /// In the order in which jobs of all clusters came.
    pub arrival: u64,
}

/// Something to be written.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    Service(ServiceId),
    Policy(String),
    Cluster(ClusterId, Known),
    ClusterGone(ClusterId),
    Job(ClusterId, Job),
    JobGone(ClusterId, JobId),
    Change(ClusterId, JobId, Change),
    ChangeGone(ClusterId, JobId),
    Drained(HostId),
    NotDrained(HostId),
}

impl Input {
    pub fn entry(&self) -> Entry {
        fn text(value: &impl Serialize) -> Option<String> {
            Some(serde_json::to_string(value).expect("plain values have a text"))
        }
        match self {
            Input::Service(service) => (key(&["service"]), text(service)),
            Input::Policy(policy) => (key(&["policy"]), text(policy)),
            Input::Cluster(cluster, known) => (key(&["cluster", cluster]), text(known)),
            Input::ClusterGone(cluster) => (key(&["cluster", cluster]), None),
            Input::Job(cluster, job) => (key(&["job", cluster, &job.spec.job]), text(job)),
            Input::JobGone(cluster, job) => (key(&["job", cluster, job]), None),
            Input::Change(cluster, job, change) => (key(&["change", cluster, job]), text(change)),
            Input::ChangeGone(cluster, job) => (key(&["change", cluster, job]), None),
            Input::Drained(host) => (key(&["drained", host]), text(&true)),
            Input::NotDrained(host) => (key(&["drained", host]), None),
        }
    }
}

impl Books {
    /// Applies a write of a revision; older ones are ignored.
    pub fn take(&mut self, revision: u64, entries: &[Entry]) {
        if revision <= self.revision {
            return;
        }
        self.revision = revision;
        for (key, value) in entries {
            if self.put(key, value.as_deref()).is_none() {
                self.unreadable.insert(key.clone());
            } else {
                self.unreadable.remove(key);
            }
        }
    }

    fn put(&mut self, key: &str, value: Option<&str>) -> Option<()> {
        fn put<K: Ord, V: for<'de> Deserialize<'de>>(
            map: &mut BTreeMap<K, V>,
            key: K,
            value: Option<&str>,
        ) -> Option<()> {
            match value {
                Some(text) => _ = map.insert(key, serde_json::from_str(text).ok()?),
                None => _ = map.remove(&key),
            }
            Some(())
        }
        let words = words(key);
        match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["service"] => self.service = value.map(serde_json::from_str).transpose().ok()?,
            ["policy"] => self.policy = value.map(serde_json::from_str).transpose().ok()?,
            ["cluster", cluster] => put(&mut self.clusters, cluster.into(), value)?,
            ["job", cluster, job] => put(&mut self.jobs, (cluster.into(), job.into()), value)?,
            ["change", cluster, job] => put(&mut self.changes, (cluster.into(), job.into()), value)?,
            ["drained", host] => match value {
                Some(_) => _ = self.drained.insert(host.into()),
                None => _ = self.drained.remove(host),
            },
            _ => return None,
        }
        Some(())
    }

    /// Of a job, as an operator changed it, or as it was specified.
    pub fn priority_of(&self, cluster: &ClusterId, name: &JobId) -> Option<f64> {
        let key = (cluster.clone(), name.clone());
        let job = self.jobs.get(&key)?;
        Some(self.changes.get(&key).and_then(|change| change.priority).unwrap_or(job.spec.priority))
    }

    /// Of the next job.
    pub fn next_arrival(&self) -> u64 {
        self.jobs.values().map(|job| job.arrival + 1).max().unwrap_or(0)
    }

    pub fn jobs_of<'a>(&'a self, cluster: &'a ClusterId) -> impl Iterator<Item = (&'a JobId, &'a Job)> {
        self.jobs.iter().filter(move |((own, _), _)| own == cluster).map(|((_, name), job)| (name, job))
    }
}

/// Words of a key, escaped so that each can be read back whatever is in it.
fn key(words: &[&str]) -> String {
    let escaped = |word: &&str| word.replace('%', "%25").replace('/', "%2F");
    words.iter().map(escaped).collect::<Vec<_>>().join("/")
}

fn words(key: &str) -> Vec<String> {
    key.split('/').map(|word| word.replace("%2F", "/").replace("%25", "%")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_whatever_names_contain() {
        let (cluster, host): (ClusterId, HostId) = ("a/b%2F".into(), "rack%/1".into());
        let job = Job { spec: JobSpec::named("every night/2".into()), arrival: 7 };
        let known = Known { incarnation: 3, hosts: [host.clone()].into() };
        let mut books = Books::default();
        let inputs = [
            Input::Cluster(cluster.clone(), known.clone()),
            Input::Job(cluster.clone(), job.clone()),
            Input::Drained(host.clone()),
            Input::Policy("fair".into()),
        ];
        books.take(1, &inputs.each_ref().map(Input::entry));
        assert_eq!(books.clusters[&cluster], known);
        assert_eq!(books.jobs_of(&cluster).collect::<Vec<_>>(), [(&job.spec.job, &job)]);
        assert_eq!((books.next_arrival(), books.drained.len()), (8, 1));
        books.take(2, &[Input::JobGone(cluster.clone(), job.spec.job).entry(), Input::NotDrained(host).entry()]);
        assert!(books.jobs.is_empty() && books.drained.is_empty() && books.unreadable.is_empty(), "{books:?}");
    }

    #[test]
    fn what_came_before_says_nothing_new_and_nonsense_is_named() {
        let mut books = Books::default();
        books.take(5, &[Input::Policy("fair".into()).entry()]);
        books.take(4, &[Input::Policy("fifo".into()).entry()]);
        assert_eq!(books.policy.as_deref(), Some("fair"));
        books.take(6, &[("policy".into(), Some("{".into())), ("else".into(), None)]);
        assert_eq!(books.policy.as_deref(), Some("fair"));
        assert_eq!(books.unreadable.iter().collect::<Vec<_>>(), ["else", "policy"]);
    }
}
