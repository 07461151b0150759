//! What a replica knows, for people.

use super::*;

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    pub address: Arc<str>,
    pub role: Role,
    pub leader: Option<Arc<str>>,
    /// Of this replica, if it leads.
    pub epoch: Option<Epoch>,
    pub service: Option<ServiceId>,
    /// Of the store, as far as this replica has read it.
    pub revision: u64,
    pub policy: String,
    /// What is wrong, and what to do: one line each.
    pub problems: Vec<String>,
    pub clusters: Vec<ClusterNow>,
    pub jobs: Vec<JobNow>,
    pub drained: BTreeSet<HostId>,
}

#[derive(Clone, Debug, Serialize)]
pub struct ClusterNow {
    pub cluster: ClusterId,
    pub hosts: BTreeSet<HostId>,
    /// Whether it has a session with this replica.
    pub joined: bool,
    /// Clusters that share hosts with it, also by way of others, have the same island.
    pub island: Option<ClusterId>,
    /// Active ones.
    pub transfers: usize,
}

#[derive(Clone, Debug, Serialize)]
pub struct JobNow {
    pub cluster: ClusterId,
    pub job: JobId,
    pub priority: f64,
    pub arrival: u64,
    /// Part of the bytes of its island's hosts; `None`: nothing of it is active, or this replica does not lead.
    pub weight: Option<f64>,
}

impl Replica {
    pub fn status(&self) -> Status {
        let leading = self.leading.as_ref();
        let member = |cluster: &ClusterId| {
            let members = self.sessions.values().filter(|own| own.version > 0).filter_map(|own| own.member.as_ref());
            members.into_iter().find(|member| member.cluster == *cluster)
        };
        let island = |cluster: &ClusterId| leading.and_then(|own| own.islands.get(cluster).cloned());
        let clusters = self.books.clusters.iter().map(|(cluster, known)| ClusterNow {
            cluster: cluster.clone(),
            hosts: known.hosts.clone(),
            joined: member(cluster).is_some(),
            island: island(cluster),
            transfers: member(cluster).map_or(0, |member| member.transfers.len()),
        });
        let weight = |cluster: &ClusterId, job: &JobId| {
            let said = leading?.said.get(&island(cluster)?)?;
            let parts = said.parts.iter().filter(|(id, _)| id.cluster == *cluster && id.job == *job);
            parts.map(|(_, part)| part.weight).reduce(|sum, weight| sum + weight)
        };
        let jobs = self.books.jobs.iter().map(|((cluster, job), own)| JobNow {
            cluster: cluster.clone(),
            job: job.clone(),
            priority: self.books.priority_of(cluster, job).unwrap_or(own.spec.priority),
            arrival: own.arrival,
            weight: weight(cluster, job),
        });
        let mut problems: Vec<String> = self.store_problem.iter().cloned().collect();
        if self.loaded && self.leader.is_none() {
            problems.push(
                "the service has no leader now: one is elected within some seconds while the store answers".into(),
            );
        }
        if !self.books.unreadable.is_empty() {
            let keys = self.books.unreadable.iter().cloned().collect::<Vec<_>>().join(", ");
            problems.push(format!("the store has what this version cannot read: {keys}"));
        }
        Status {
            address: self.address.clone(),
            role: self.role(),
            leader: self.leader.clone(),
            epoch: self.epoch(),
            service: self.books.service,
            revision: self.books.revision,
            policy: self.books.policy.as_ref().unwrap_or(&self.default_policy).clone(),
            problems,
            clusters: clusters.collect(),
            jobs: jobs.collect(),
            drained: self.books.drained.clone(),
        }
    }
}
