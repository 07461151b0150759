//! Status of a replica, for users.

use super::*;
use crate::types::Transport;

/// Most clusters, or hosts, named in problems: more would hide the rest.
const NAMED: usize = 10;
/// After an election all clusters come back within this time.
const ABSENT_NAMED: Duration = Duration::from_secs(5);

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
    /// Those with the highest rates first, as many as were requested.
    pub jobs: Vec<JobNow>,
    /// Matching jobs that were left out.
    pub jobs_hidden: usize,
    /// All jobs that there are.
    pub jobs_there: usize,
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
    /// Clusters that share hosts with it, directly or through others, have the same island.
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
    /// That it demands; `None`: Mission Control chooses.
    pub transport: Option<Transport>,
    pub arrival: u64,
    /// Fraction of the bytes of its island's hosts; `None`: it is not active, or this replica does not lead.
    pub weight: Option<f64>,
    /// Active ones.
    pub transfers: usize,
    pub bytes_per_sec: f64,
}

impl Replica {
    /// `most`: jobs that are shown, of those whose names have all these words, in small letters.
    pub fn status(&self, now: Time, most: usize, words: &[String]) -> Status {
        let leading = self.leading.as_ref();
        let welcome = self.sessions.values().filter(|own| own.version > 0);
        let members = welcome.filter_map(|own| own.member.as_ref().map(|member| (member, own.heard_at)));
        let members: BTreeMap<&ClusterId, (&Member, Time)> =
            members.map(|(member, heard_at)| (&member.cluster, (member, heard_at))).collect();
        let member = |cluster: &ClusterId| members.get(cluster).copied();
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
        let mut weights: BTreeMap<(&ClusterId, &JobId), f64> = BTreeMap::new();
        for (id, part) in leading.iter().flat_map(|own| own.said.values()).flat_map(|said| &said.parts) {
            *weights.entry((&id.cluster, &id.job)).or_default() += part.weight;
        }
        let has = |cluster: &ClusterId, job: &JobId| {
            let name = if words.is_empty() { String::new() } else { format!("{cluster}/{job}").to_lowercase() };
            words.iter().all(|word| name.contains(word.as_str()))
        };
        let jobs =
            self.books.jobs.iter().filter(|((cluster, job), _)| has(cluster, job)).map(|((cluster, job), own)| {
                JobNow {
                    cluster: cluster.clone(),
                    job: job.clone(),
                    priority: self.books.priority_of(cluster, job).unwrap_or(own.spec.priority),
                    arrival: own.arrival,
                    transport: {
                        let change =
                            self.books.changes.get(&(cluster.clone(), job.clone())).and_then(|own| own.transport);
                        change.unwrap_or(own.spec.demands.transport)
                    },
                    weight: weights.get(&(cluster, job)).copied(),
                    transfers: moves.get(&(cluster, job)).map_or(0, |(transfers, _)| *transfers),
                    bytes_per_sec: moves.get(&(cluster, job)).map_or(0.0, |(_, rate)| *rate),
                }
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
        let mut problems: Vec<String> = self.store_problem.iter().chain(&self.write_problem).cloned().collect();
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
            let late = |(_, since): &(&ClusterId, &Time)| now.since(**since) >= ABSENT_NAMED;
            let absent = own.absent.iter().filter(late).count();
            if absent > NAMED {
                problems.push(format!("{absent} clusters have no session; the first of them follow"));
            }
            for (cluster, since) in own.absent.iter().filter(late).take(NAMED) {
                let (ago, forget) = (now.since(*since).as_secs(), FORGET_AFTER.as_secs());
                problems.push(format!(
                    "cluster {cluster} has had no session for {ago} s: it works by its last weights, then alone; after \
                     {forget} s it is forgotten with its jobs until it comes back; see the log of its scheduler"
                ));
            }
        }
        let somewhere = |host: &&HostId| self.books.clusters.values().any(|known| known.hosts.contains(*host));
        for host in self.books.drained.iter().filter(|host| !somewhere(host)).take(NAMED) {
            problems.push(format!(
                "{host} is drained, and no cluster has it: it stays empty if it comes; mission service drain {host} --undo"
            ));
        }
        if !self.books.unreadable.is_empty() {
            let keys = self.books.unreadable.iter().cloned().collect::<Vec<_>>().join(", ");
            problems.push(format!("the store has keys that this version cannot read: {keys}"));
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
            jobs_there: self.books.jobs.len(),
            drained: self.books.drained.clone(),
            sessions: self.sessions.len(),
            writes: self.writes.len(),
        }
    }
}
