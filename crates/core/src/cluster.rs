//! The workers of a cluster: where they are, and what their hosts can do.
//!
//! Most hosts of a cluster are alike. So capabilities are kept by kind of host: a decision for all of them costs time
//! per kind, not per worker.

use crate::ecn;
use crate::flight::Environment;
use crate::types::{HostId, Transport, WorkerId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// On which a worker's objects are fetched: `host:port`.
pub type Address = Arc<str>;

#[derive(Default)]
pub struct Cluster {
    workers: BTreeMap<WorkerId, Worker>,
    hosts: BTreeMap<HostId, Host>,
    addresses: BTreeMap<Address, WorkerId>,
    /// How many workers are of each kind.
    kinds: BTreeMap<Kind, u32>,
    /// Hosts with several workers.
    shared_hosts: u32,
    /// What most hosts can do, and the workers whose hosts differ.
    common: Option<Arc<Environment>>,
    others: BTreeMap<Address, Arc<Environment>>,
    /// Changes since the last message.
    news: News,
}

#[derive(Default)]
struct News {
    common: bool,
    others: BTreeSet<Address>,
}

struct Worker {
    host: HostId,
    address: Address,
    /// The environment without ECN, which is known per host.
    environment: Arc<Environment>,
}

#[derive(Default)]
struct Host {
    workers: BTreeSet<WorkerId>,
    /// Whether ECN marks arrive there, and why that is believed.
    ecn: Option<(bool, String)>,
}

/// What a host can do, and whether marks arrive there, if that is known.
type Kind = (Arc<Environment>, Option<bool>);

/// Capabilities of hosts, for receivers that choose legs to their senders: the common kind, and the exceptions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hosts {
    /// The common kind: holds for every host that is not listed. If present, it replaces all earlier lists.
    pub common: Option<Arc<Environment>>,
    /// The workers whose hosts can do something else.
    pub others: Vec<(Arc<Environment>, Vec<Address>)>,
    /// Workers that were named before, and are not any more.
    pub gone: Vec<Address>,
}

/// What a receiver knows of its senders.
#[derive(Clone, Debug, Default)]
pub struct Senders {
    common: Arc<Environment>,
    others: BTreeMap<Address, Arc<Environment>>,
}

impl Senders {
    pub fn learn(&mut self, hosts: Hosts) {
        if let Some(common) = hosts.common {
            self.common = common;
            self.others.clear();
        }
        for address in &hosts.gone {
            self.others.remove(address);
        }
        for (environment, addresses) in hosts.others {
            self.others.extend(addresses.into_iter().map(|address| (address, environment.clone())));
        }
    }

    /// What the host at an address can do.
    pub fn at(&self, address: &str) -> &Arc<Environment> {
        self.others.get(address).unwrap_or(&self.common)
    }
}

impl Cluster {
    /// A worker has joined; true if something is possible now that was not, or the other way round.
    pub fn join(&mut self, worker: WorkerId, host: HostId, address: Address, environment: Environment) -> bool {
        let mut changed = self.leave(&worker);
        let environment = Environment { ecn: None, ..environment };
        // The same one for all that are alike.
        let same = self.kinds.range((Arc::new(environment.clone()), None)..).next().map(|((known, _), _)| known);
        let environment = same.filter(|known| ***known == environment).cloned().unwrap_or_else(|| environment.into());
        let own = self.hosts.entry(host.clone()).or_default();
        own.workers.insert(worker.clone());
        if own.workers.len() == 2 {
            self.shared_hosts += 1;
            changed |= self.shared_hosts == 1;
        }
        let arrive = own.ecn.as_ref().map(|(arrive, _)| *arrive);
        changed |= self.count((environment.clone(), arrive), 1);
        self.addresses.insert(address.clone(), worker.clone());
        let common = self.common.get_or_insert_with(|| {
            self.news.common = true;
            environment.clone()
        });
        if *common != environment {
            self.others.insert(address.clone(), environment.clone());
            self.news.others.insert(address.clone());
        }
        self.workers.insert(worker, Worker { host, address, environment });
        // As many workers differ again: a new common kind makes the list shorter. This is rare, however many join.
        if self.others.len() > 2 * (self.workers.len() - self.others.len()) {
            self.choose_common();
        }
        // A single worker on its host has no process to share memory with.
        changed || (self.workers.len() == 2 && self.shared_hosts == 0)
    }

    /// A worker is gone; true if something is possible now that was not, or the other way round.
    pub fn leave(&mut self, worker: &str) -> bool {
        let Some(Worker { host, address, environment }) = self.workers.remove(worker) else { return false };
        // Another worker may have it by now.
        if self.addresses.get(&address).is_some_and(|own| **own == *worker) {
            self.addresses.remove(&address);
            if self.others.remove(&address).is_some() {
                self.news.others.insert(address);
            }
        }
        let own = self.hosts.get_mut(&host).expect("it has this worker");
        let arrive = own.ecn.as_ref().map(|(arrive, _)| *arrive);
        own.workers.remove(worker);
        let mut changed = false;
        match own.workers.len() {
            0 => _ = self.hosts.remove(&host),
            1 => {
                self.shared_hosts -= 1;
                changed = self.shared_hosts == 0;
            }
            _ => {}
        }
        let changed = self.count((environment.clone(), arrive), -1) || changed;
        let left =
            self.kinds.range((environment.clone(), None)..).next().is_some_and(|((own, _), _)| *own == environment);
        if !left && self.common.as_ref() == Some(&environment) {
            self.choose_common();
        }
        changed || (self.workers.len() == 1 && self.shared_hosts == 0)
    }

    /// Few or none of the common kind are left: another kind is common now.
    fn choose_common(&mut self) {
        let mut counts: BTreeMap<&Arc<Environment>, u32> = BTreeMap::new();
        for ((environment, _), count) in &self.kinds {
            *counts.entry(environment).or_default() += count;
        }
        let most = counts.into_iter().max_by_key(|(_, count)| *count);
        self.common = most.map(|(environment, _)| environment.clone());
        let differ = |own: &&Worker| Some(&own.environment) != self.common.as_ref();
        let others = self.workers.values().filter(differ);
        self.others = others.map(|own| (own.address.clone(), own.environment.clone())).collect();
        self.news = News { common: true, others: BTreeSet::new() };
    }

    /// All capabilities, for a receiver that knows none yet.
    pub fn hosts(&self) -> Hosts {
        let mut others: BTreeMap<&Arc<Environment>, Vec<Address>> = BTreeMap::new();
        for (address, environment) in &self.others {
            others.entry(environment).or_default().push(address.clone());
        }
        let others = others.into_iter().map(|(environment, addresses)| (environment.clone(), addresses)).collect();
        Hosts { common: self.common.clone(), others, gone: Vec::new() }
    }

    /// What is new of that since the last call, if anything is.
    pub fn news(&mut self) -> Option<Hosts> {
        let News { common, others: changed } = std::mem::take(&mut self.news);
        if common {
            return Some(self.hosts());
        }
        let mut others: BTreeMap<&Arc<Environment>, Vec<Address>> = BTreeMap::new();
        let mut gone = Vec::new();
        for address in changed {
            match self.others.get(&address) {
                Some(environment) => others.entry(environment).or_default().push(address),
                None => gone.push(address),
            }
        }
        let others: Vec<_> = others.into_iter().map(|(environment, all)| (environment.clone(), all)).collect();
        (!others.is_empty() || !gone.is_empty()).then_some(Hosts { common: None, others, gone })
    }

    /// True if there are none of a kind now, or some where there were none.
    fn count(&mut self, kind: Kind, by: i32) -> bool {
        let count = self.kinds.entry(kind.clone()).or_insert(0);
        let before = *count;
        *count = before.saturating_add_signed(by);
        if *count == 0 {
            self.kinds.remove(&kind);
        }
        (before == 0) != (before.saturating_add_signed(by) == 0)
    }

    /// Records a worker's ECN result for its host; true if that is new.
    pub fn probed(&mut self, worker: &str, seen: ecn::Seen) -> bool {
        let Some(own) = self.workers.get(worker) else { return false };
        let (id, Some((arrive, why))) = (own.host.clone(), seen.verdict(worker)) else { return false };
        let host = self.hosts.get_mut(&id).expect("it has this worker");
        let before = host.ecn.as_ref().map(|(arrive, _)| *arrive);
        if before == Some(arrive) {
            return false;
        }
        host.ecn = Some((arrive, why));
        let moved: Vec<Arc<Environment>> =
            host.workers.iter().map(|worker| self.workers[worker].environment.clone()).collect();
        for environment in moved {
            self.count((environment.clone(), before), -1);
            self.count((environment, Some(arrive)), 1);
        }
        true
    }

    pub fn len(&self) -> usize {
        self.workers.len()
    }

    pub fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }

    /// Of each kind of host one, with what is known of ECN there.
    pub fn kinds(&self) -> impl Iterator<Item = Environment> {
        self.kinds.keys().map(|(environment, arrive)| {
            let why = || {
                let of_kind = self.hosts.values().filter_map(|host| host.ecn.as_ref());
                of_kind.filter(|(own, _)| Some(*own) == *arrive).map(|(_, why)| why.clone()).next().unwrap_or_default()
            };
            let mut own = (**environment).clone();
            own.ecn = arrive.map(|arrive| (arrive, why()));
            // Shared memory needs two processes on one host.
            if self.shared_hosts == 0 && self.workers.len() > 1 {
                own.carriers.retain(|transport| *transport != Transport::Shm);
            }
            own
        })
    }

    /// What a worker's own host can do, with what is known of ECN there.
    pub fn environment_of(&self, worker: &str) -> Option<Environment> {
        let own = self.workers.get(worker)?;
        let ecn = self.hosts[&own.host].ecn.clone();
        Some(Environment { ecn, ..(*own.environment).clone() })
    }

    /// Whether something holds for the host of a worker.
    pub fn is(&self, worker: &str, holds: impl Fn(&Environment) -> bool) -> bool {
        self.workers.get(worker).is_some_and(|own| holds(&own.environment))
    }

    /// The workers of a host.
    pub fn workers_of<'a>(&'a self, worker: &str) -> impl Iterator<Item = &'a WorkerId> {
        let host = self.workers.get(worker).and_then(|own| self.hosts.get(&own.host));
        host.into_iter().flat_map(|host| &host.workers)
    }

    /// Each worker with its host.
    pub fn places(&self) -> impl Iterator<Item = (&WorkerId, &HostId)> {
        self.workers.iter().map(|(worker, own)| (worker, &own.host))
    }

    pub fn host_of(&self, worker: &str) -> Option<&HostId> {
        self.workers.get(worker).map(|own| &own.host)
    }

    pub fn host_at(&self, address: &str) -> Option<&HostId> {
        self.host_of(self.addresses.get(address)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;

    fn environment(interfaces: u32) -> Environment {
        Environment { interfaces, carriers: vec![Transport::Shm, Transport::Tcp], ..Environment::default() }
    }

    fn join(cluster: &mut Cluster, number: u32, host: u32, interfaces: u32) -> bool {
        let name = |what: &str, number: u32| Arc::from(format!("{what}{number}"));
        cluster.join(name("w", number), name("h", host), name("a", number), environment(interfaces))
    }

    #[test]
    fn only_what_is_new_changes_anything() {
        let mut cluster = Cluster::default();
        assert!(join(&mut cluster, 1, 1, 2));
        assert!(join(&mut cluster, 2, 2, 2), "alone it could have shared memory with whoever comes");
        assert!(cluster.kinds().all(|own| !own.carriers.contains(&Transport::Shm)), "no two are on one host");
        assert!(join(&mut cluster, 3, 2, 2), "now there are");
        assert!(cluster.kinds().all(|own| own.carriers.contains(&Transport::Shm)));
        assert!(join(&mut cluster, 4, 3, 1), "another kind");
        assert!(!join(&mut cluster, 5, 4, 1));
        assert_eq!(cluster.kinds().count(), 2);
        assert!(!cluster.leave("w4") && cluster.leave("w5") && !cluster.leave("w5"));
        assert!(cluster.leave("w3") && cluster.leave("w2") && cluster.leave("w1") && cluster.is_empty());
        assert_eq!((cluster.hosts.len(), cluster.addresses.len(), cluster.kinds.len()), (0, 0, 0));
    }

    #[test]
    fn what_a_worker_saw_holds_for_its_host() {
        let mut cluster = Cluster::default();
        for (worker, host) in [(1, 1), (2, 1), (3, 2)] {
            join(&mut cluster, worker, host, 1);
        }
        let marked = ecn::Seen { marks: 5, ..ecn::Seen::default() };
        assert!(cluster.probed("w1", marked) && !cluster.probed("w2", marked) && !cluster.probed("nobody", marked));
        let arrive =
            |cluster: &Cluster, worker: &str| cluster.environment_of(worker).unwrap().ecn.map(|(arrive, _)| arrive);
        assert_eq!([1, 2, 3].map(|worker| arrive(&cluster, &format!("w{worker}"))), [Some(true), Some(true), None]);
        join(&mut cluster, 4, 1, 1);
        assert_eq!(arrive(&cluster, "w4"), Some(true), "what is known of its host is known of it");
        assert_eq!(cluster.kinds().count(), 2);
    }

    /// Whatever joins and leaves: a receiver of all changes has the same state.
    #[test]
    fn receivers_that_hear_what_is_new_know_all() {
        let mut random = SplitMix(3);
        let (mut cluster, mut senders) = (Cluster::default(), Senders::default());
        let mut all: BTreeMap<u32, u32> = BTreeMap::new();
        for _ in 0..2000 {
            let number = (random.next() % 12) as u32;
            if random.next().is_multiple_of(2) {
                let interfaces = (random.next() % 3) as u32;
                join(&mut cluster, number, number % 5, interfaces);
                all.insert(number, interfaces);
            } else {
                cluster.leave(&format!("w{number}"));
                all.remove(&number);
            }
            if random.next().is_multiple_of(3) {
                cluster.news().into_iter().for_each(|news| senders.learn(news));
                let mut fresh = Senders::default();
                fresh.learn(cluster.hosts());
                for (number, interfaces) in &all {
                    let address = format!("a{number}");
                    assert_eq!(**senders.at(&address), environment(*interfaces));
                    assert_eq!(senders.at(&address), fresh.at(&address));
                }
                assert_eq!(cluster.news(), None);
            }
        }
    }
}
