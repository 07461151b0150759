//! The history for users: what was written to the store, and which replica led.
//!
//! Every replica receives the same changes in the same order, so each has the same history since it started; one that
//! missed changes sees their sum.

use super::super::books::Books;
use super::*;
use crate::types::Transport;
use std::collections::VecDeque;

/// Entries kept of arriving and ending jobs, and as many of all others: many jobs must not hide operators' changes.
const KEPT: usize = 500;

#[derive(Default)]
pub struct History {
    jobs: VecDeque<(u64, Time, What)>,
    others: VecDeque<(u64, Time, What)>,
    next: u64,
}

/// One thing, and how long ago it was: clocks of hosts are not compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Happened {
    /// Of all that happened since this replica started, from 0.
    pub number: u64,
    pub ago_secs: f64,
    /// In words.
    pub text: String,
    #[serde(flatten)]
    pub what: What,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum What {
    /// `None`: nobody.
    Leader {
        leader: Option<Arc<str>>,
    },
    /// `None`: it answers again.
    Store {
        problem: Option<String>,
    },
    ClusterJoined {
        cluster: ClusterId,
        hosts: usize,
    },
    ClusterLeft {
        cluster: ClusterId,
    },
    /// It has other hosts, or its scheduler has started anew.
    ClusterChanged {
        cluster: ClusterId,
        hosts: usize,
    },
    JobArrived {
        cluster: ClusterId,
        job: JobId,
    },
    JobEnded {
        cluster: ClusterId,
        job: JobId,
    },
    /// By an operator.
    JobChanged {
        cluster: ClusterId,
        job: JobId,
        change: Change,
    },
    Policy {
        policy: String,
    },
    Drained {
        host: HostId,
    },
    Undrained {
        host: HostId,
    },
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = |hosts: &usize| if *hosts == 1 { "1 host".to_owned() } else { format!("{hosts} hosts") };
        match self {
            What::Leader { leader: Some(leader) } => write!(f, "{leader} leads"),
            What::Leader { leader: None } => write!(f, "no replica leads"),
            What::Store { problem: Some(problem) } => write!(f, "the store: {problem}"),
            What::Store { problem: None } => write!(f, "the store answers again"),
            What::ClusterJoined { cluster, hosts } => write!(f, "cluster {cluster} joined with {}", count(hosts)),
            What::ClusterLeft { cluster } => write!(f, "cluster {cluster} left"),
            What::ClusterChanged { cluster, hosts } => write!(f, "cluster {cluster} changed: {}", count(hosts)),
            What::JobArrived { cluster, job } => write!(f, "job {cluster}/{job} arrived"),
            What::JobEnded { cluster, job } => write!(f, "job {cluster}/{job} ended"),
            What::JobChanged { cluster, job, change } => {
                let priority = change.priority.map(|own| format!("priority {own}"));
                let transport =
                    change.transport.map(|own| format!("transport {}", own.map_or("auto", Transport::name)));
                let said: Vec<String> = priority.into_iter().chain(transport).collect();
                write!(f, "an operator changed {cluster}/{job}: {}", said.join(", "))
            }
            What::Policy { policy } => write!(f, "an operator chose the policy {policy}"),
            What::Drained { host } => write!(f, "an operator drained {host}"),
            What::Undrained { host } => write!(f, "an operator let clusters use {host} again"),
        }
    }
}

impl History {
    pub fn add(&mut self, now: Time, what: What) {
        let kept = match what {
            What::JobArrived { .. } | What::JobEnded { .. } => &mut self.jobs,
            _ => &mut self.others,
        };
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back((self.next, now, what));
        self.next += 1;
    }

    /// The newest ones, the last first.
    pub fn newest(&self, now: Time, most: usize) -> Vec<Happened> {
        let mut kept: Vec<&(u64, Time, What)> = self.jobs.iter().chain(&self.others).collect();
        kept.sort_by_key(|(number, ..)| std::cmp::Reverse(*number));
        let happened = |(number, at, what): &(u64, Time, What)| Happened {
            number: *number,
            ago_secs: now.since(*at).as_secs_f64(),
            text: what.to_string(),
            what: what.clone(),
        };
        kept.into_iter().take(most).map(happened).collect()
    }

    pub fn store(&mut self, now: Time, before: Option<&str>, problem: Option<&str>) {
        // The error text changes with each attempt; only the failure matters.
        if before.is_some() != problem.is_some() {
            self.add(now, What::Store { problem: problem.map(str::to_owned) });
        }
    }

    /// What differs between two states of the books.
    pub fn compare(&mut self, now: Time, before: &Books, after: &Books) {
        for (cluster, known) in &after.clusters {
            let (cluster, hosts) = (cluster.clone(), known.hosts.len());
            match before.clusters.get(&cluster) {
                None => self.add(now, What::ClusterJoined { cluster, hosts }),
                Some(old) if old != known => self.add(now, What::ClusterChanged { cluster, hosts }),
                Some(_) => {}
            }
        }
        for key in after.jobs.keys().filter(|key| !before.jobs.contains_key(*key)) {
            let (cluster, job) = key.clone();
            self.add(now, What::JobArrived { cluster, job });
        }
        for (key, change) in after.changes.iter().filter(|(key, change)| before.changes.get(*key) != Some(*change)) {
            let (cluster, job) = key.clone();
            let old = before.changes.get(key).cloned().unwrap_or_default();
            let change = Change {
                priority: change.priority.filter(|own| old.priority != Some(*own)),
                transport: change.transport.filter(|own| old.transport != Some(*own)),
            };
            self.add(now, What::JobChanged { cluster, job, change });
        }
        for key in before.jobs.keys().filter(|key| !after.jobs.contains_key(*key)) {
            let (cluster, job) = key.clone();
            self.add(now, What::JobEnded { cluster, job });
        }
        for cluster in before.clusters.keys().filter(|cluster| !after.clusters.contains_key(*cluster)) {
            self.add(now, What::ClusterLeft { cluster: cluster.clone() });
        }
        if let Some(policy) = after.policy.as_ref().filter(|policy| before.policy.as_ref() != Some(policy)) {
            self.add(now, What::Policy { policy: policy.clone() });
        }
        for host in after.drained.difference(&before.drained) {
            self.add(now, What::Drained { host: host.clone() });
        }
        for host in before.drained.difference(&after.drained) {
            self.add(now, What::Undrained { host: host.clone() });
        }
    }
}

impl Replica {
    /// What has happened since this replica started, the last first.
    pub fn history(&self, now: Time, most: usize) -> Vec<Happened> {
        self.history.newest(now, most)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::books::{Input, Known};
    use super::*;

    #[test]
    fn what_was_written_is_what_happened() {
        let (cluster, host): (ClusterId, HostId) = ("c".into(), "h".into());
        let spec = JobSpec::named("j".into());
        let known = Known { incarnation: 1, hosts: [host.clone()].into() };
        let change = Change { priority: Some(7.0), ..Change::default() };
        let writes = [
            vec![Input::Cluster(cluster.clone(), known)],
            vec![Input::Job(cluster.clone(), Job { spec: spec.clone(), arrival: 0 })],
            vec![Input::Change(cluster.clone(), spec.job.clone(), change.clone())],
            vec![Input::Drained(host.clone()), Input::Policy("fair".into())],
            vec![Input::JobGone(cluster.clone(), spec.job.clone()), Input::ClusterGone(cluster.clone())],
        ];
        let (mut books, mut history) = (Books::default(), History::default());
        for (revision, inputs) in (1..).zip(&writes) {
            let before = books.clone();
            books.take(revision, &inputs.iter().map(Input::entry).collect::<Vec<_>>());
            history.compare(Time(0) + Duration::from_secs(revision), &before, &books);
        }
        let happened = history.newest(Time(0) + Duration::from_secs(6), 100);
        let (cluster, job) = (|| cluster.clone(), || spec.job.clone());
        let expected = [
            (1.0, What::ClusterLeft { cluster: cluster() }),
            (1.0, What::JobEnded { cluster: cluster(), job: job() }),
            (2.0, What::Drained { host }),
            (2.0, What::Policy { policy: "fair".into() }),
            (3.0, What::JobChanged { cluster: cluster(), job: job(), change }),
            (4.0, What::JobArrived { cluster: cluster(), job: job() }),
            (5.0, What::ClusterJoined { cluster: cluster(), hosts: 1 }),
        ];
        let happened: Vec<(f64, What)> = happened.into_iter().map(|own| (own.ago_secs, own.what)).collect();
        assert_eq!(happened, expected);
        let auto = Change { priority: None, transport: Some(None) };
        let changed = What::JobChanged { cluster: cluster(), job: job(), change: auto };
        assert_eq!(changed.to_string(), "an operator changed c/j: transport auto");
        assert_eq!(history.newest(Time(0), 2).len(), 2);
        (0..2 * KEPT).for_each(|_| history.add(Time(0), What::Leader { leader: None }));
        let kept = history.newest(Time(0), usize::MAX);
        let of_jobs = kept.iter().filter(|own| matches!(own.what, What::JobArrived { .. } | What::JobEnded { .. }));
        assert_eq!((kept.len(), of_jobs.count()), (KEPT + 2, 2));
        assert!(kept.windows(2).all(|pair| pair[0].number > pair[1].number));
    }
}
