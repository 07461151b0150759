//! What a replica knows, for people.

use super::*;

/// Of those that are drained, and are nowhere.
const HOSTS_NAMED: usize = 10;

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
    /// Those that move most first, as many as were asked for.
    pub jobs: Vec<JobNow>,
    /// Jobs that were left out.
    pub jobs_hidden: usize,
    pub drained: BTreeSet<HostId>,
    /// Members that have a session with this replica.
    pub sessions: usize,
    /// Writes to the store that are not answered yet.
    pub writes: usize,
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
    pub bytes_per_sec: f64,
    /// Of each host; `None`: it has no session.
    pub flows_per_host: Option<FlowsPerHost>,
    /// Seconds; `None`: it has no session.
    pub heard_ago: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct JobNow {
    pub cluster: ClusterId,
    pub job: JobId,
    pub priority: f64,
    pub arrival: u64,
    /// Part of the bytes of its island's hosts; `None`: nothing of it is active, or this replica does not lead.
    pub weight: Option<f64>,
    /// Active ones.
    pub transfers: usize,
    pub bytes_per_sec: f64,
}

impl Replica {
    /// `most`: jobs that are shown.
    pub fn status(&self, now: Time, most: usize) -> Status {
        let leading = self.leading.as_ref();
        let member = |cluster: &ClusterId| {
            let welcome = self.sessions.values().filter(|own| own.version > 0);
            let mut members = welcome.filter_map(|own| Some((own.member.as_ref()?, own.heard_at)));
            members.find(|(member, _)| member.cluster == *cluster)
        };
        let rate = |own: &Seen| own.view.bytes_per_sec;
        let island = |cluster: &ClusterId| leading.and_then(|own| own.islands.get(cluster).cloned());
        let clusters = self.books.clusters.iter().map(|(cluster, known)| ClusterNow {
            cluster: cluster.clone(),
            hosts: known.hosts.clone(),
            joined: member(cluster).is_some(),
            island: island(cluster),
            transfers: member(cluster).map_or(0, |(member, _)| member.transfers.len()),
            bytes_per_sec: member(cluster).map_or(0.0, |(member, _)| member.transfers.values().map(rate).sum()),
            flows_per_host: member(cluster).and_then(|(member, _)| member.flows_per_host),
            heard_ago: member(cluster).map(|(_, heard_at)| now.since(heard_at).as_secs_f64()),
        });
        let mut moves: BTreeMap<(&ClusterId, &JobId), (usize, f64)> = BTreeMap::new();
        for member in self.sessions.values().filter_map(|session| session.member.as_ref()) {
            for (transfer, seen) in &member.transfers {
                let own = moves.entry((&member.cluster, &transfer.job)).or_default();
                *own = (own.0 + 1, own.1 + rate(seen));
            }
        }
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
            transfers: moves.get(&(cluster, job)).map_or(0, |(transfers, _)| *transfers),
            bytes_per_sec: moves.get(&(cluster, job)).map_or(0.0, |(_, rate)| *rate),
        });
        let mut jobs: Vec<JobNow> = jobs.collect();
        let jobs_hidden = jobs.len().saturating_sub(most);
        if jobs_hidden > 0 {
            let before = |a: &JobNow, b: &JobNow| {
                b.bytes_per_sec.total_cmp(&a.bytes_per_sec).then(b.transfers.cmp(&a.transfers))
            };
            jobs.sort_by(before);
            jobs.truncate(most);
        }
        let mut problems: Vec<String> = self.store_problem.iter().cloned().collect();
        if self.loaded && self.leader.is_none() {
            problems.push(
                "the service has no leader now: one is elected within some seconds while the store answers".into(),
            );
        }
        if let Some(other) = self.leader.as_ref().filter(|own| own.tokens != self.own.tokens) {
            problems.push(format!(
                "the leader, {}, has other tokens than this replica: copy its files *.token to --state here, or, if they \
                 are two services, give one of them another --name",
                other.address
            ));
        }
        if let Some(own) = leading {
            for (cluster, since) in &own.absent {
                let (ago, forget) = (now.since(*since).as_secs(), FORGET_AFTER.as_secs());
                problems.push(format!(
                    "cluster {cluster} has had no session for {ago} s: it works by its last weights, then alone; after \
                     {forget} s it is forgotten with its jobs until it comes back; see the log of its scheduler"
                ));
            }
        }
        let somewhere = |host: &&HostId| self.books.clusters.values().any(|known| known.hosts.contains(*host));
        for host in self.books.drained.iter().filter(|host| !somewhere(host)).take(HOSTS_NAMED) {
            problems.push(format!(
                "{host} is drained, and no cluster has it: it stays empty if it comes; mission service drain {host} --undo"
            ));
        }
        if !self.books.unreadable.is_empty() {
            let keys = self.books.unreadable.iter().cloned().collect::<Vec<_>>().join(", ");
            problems.push(format!("the store has what this version cannot read: {keys}"));
        }
        Status {
            address: self.own.address.clone(),
            role: self.role(),
            leader: self.leader.as_ref().map(|leader| leader.address.clone()),
            epoch: self.epoch(),
            service: self.books.service,
            revision: self.books.revision,
            policy: self.books.policy.as_ref().unwrap_or(&self.default_policy).clone(),
            problems,
            clusters: clusters.collect(),
            jobs,
            jobs_hidden,
            drained: self.books.drained.clone(),
            sessions: self.sessions.len(),
            writes: self.writes.len(),
        }
    }
}
