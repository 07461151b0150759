//! Weighted fair queueing of a host's receiving slots.
//!
//! A slot is the right to receive one chunk now. A freed slot goes to the job that is farthest below its share of
//! bytes: start-time fair queueing (Goyal, Vin and Cheng 1996) with chunks in place of packets, so bytes follow weights
//! within one chunk per job. The numbers of flows of [`crate::shares`] are upper limits on top of that while other jobs
//! want their slots too; with fewer slots than twice the jobs they do not bind. No slot stays empty while work waits.

use crate::budget::FLOWS_MAX;
use crate::defaults::FLOWS_PER_HOST;
use crate::shares::{self, caps_bind};
use crate::types::JobId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// A process of the host that fetches.
pub type ClientId = u64;

/// How many chunks a host receives at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowsPerHost {
    /// As many as bring most, found by trial ([`crate::budget`]).
    Auto,
    #[serde(untagged)]
    Fixed(u32),
}

impl FlowsPerHost {
    /// Most that there can be.
    pub fn most(self) -> u32 {
        match self {
            FlowsPerHost::Auto => FLOWS_MAX,
            FlowsPerHost::Fixed(flows) => flows,
        }
    }

    /// By which weights become numbers of flows before a host has found its own.
    pub fn usual(self) -> u32 {
        match self {
            FlowsPerHost::Auto => FLOWS_PER_HOST,
            FlowsPerHost::Fixed(flows) => flows,
        }
    }

    /// # Errors
    /// A budget that moves nothing.
    pub fn check(self) -> Result<(), String> {
        if self == FlowsPerHost::Fixed(0) {
            return Err("0 flows per host would move nothing: use 1 or more".into());
        }
        Ok(())
    }
}

/// What a job may have on every host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    pub job: JobId,
    /// Part of the bytes; the weights of the active jobs add up to 1.
    pub weight: f64,
    /// Part of the slots of a host.
    pub flows: u32,
}

/// The right of a client to receive one chunk for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub client: ClientId,
    pub job: JobId,
}

/// The slots of one host.
pub struct Slots {
    budget: u32,
    jobs: BTreeMap<JobId, Queue>,
    shares: BTreeMap<JobId, Share>,
    /// Start tag of the last grant; a job that comes back starts here, so that idleness saves up nothing.
    virtual_time: f64,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<(ClientId, u64)>,
    held: BTreeMap<ClientId, u32>,
    in_use: u32,
    /// Bytes charged so far, divided by the weight.
    tag: f64,
}

impl Slots {
    pub fn new(budget: u32) -> Slots {
        Slots { budget, jobs: BTreeMap::new(), shares: BTreeMap::new(), virtual_time: 0.0 }
    }

    /// Replaces budget and shares; chunks that are under way end as they began.
    pub fn set_shares(&mut self, budget: u32, shares: &[Share]) {
        self.budget = budget;
        self.shares = shares.iter().map(|share| (share.job.clone(), share.clone())).collect();
        // What an idle job has had too much is forgotten once the Mission Controller no longer names it.
        let shares = &self.shares;
        self.jobs.retain(|job, queue| queue.in_use > 0 || !queue.waiting.is_empty() || shares.contains_key(job));
    }

    /// Replaces the budget, and splits it anew by the weights.
    pub fn set_budget(&mut self, budget: u32) {
        self.budget = budget;
        let weights: Vec<f64> = self.shares.values().map(|share| share.weight).collect();
        for (share, flows) in self.shares.values_mut().zip(shares::split(budget, &weights)) {
            share.flows = flows;
        }
    }

    /// A client wants one slot for a chunk of `bytes`.
    pub fn want(&mut self, client: ClientId, job: &JobId, bytes: u64) {
        let virtual_time = self.virtual_time;
        let queue = self.jobs.entry(job.clone()).or_default();
        if queue.waiting.is_empty() && queue.in_use == 0 {
            queue.tag = queue.tag.max(virtual_time);
        }
        queue.waiting.push_back((client, bytes));
    }

    /// A client gives a slot back; it was charged `granted` bytes and moved `moved` of them.
    pub fn give_back(&mut self, client: ClientId, job: &JobId, granted: u64, moved: u64) {
        let weight = self.weight(job);
        let Some(queue) = self.jobs.get_mut(job) else { return };
        let Some(held) = queue.held.get_mut(&client).filter(|held| **held > 0) else { return };
        *held -= 1;
        queue.in_use -= 1;
        queue.tag += (moved as f64 - granted as f64) / weight;
        self.forget_idle(job);
    }

    /// A client no longer waits for one slot of this job.
    pub fn withdraw(&mut self, client: ClientId, job: &JobId) {
        if let Some(queue) = self.jobs.get_mut(job) {
            if let Some(at) = queue.waiting.iter().rposition(|(waiting, _)| *waiting == client) {
                queue.waiting.remove(at);
            }
            self.forget_idle(job);
        }
    }

    /// A client holds `held` slots that another arbiter granted: this one takes its place.
    pub fn adopt(&mut self, client: ClientId, job: &JobId, held: u32) {
        let queue = self.jobs.entry(job.clone()).or_default();
        queue.in_use += held;
        *queue.held.entry(client).or_default() += held;
    }

    /// A client is gone: all it held and waited for is free again.
    pub fn drop_client(&mut self, client: ClientId) {
        for queue in self.jobs.values_mut() {
            queue.waiting.retain(|(waiting, _)| *waiting != client);
            queue.in_use -= queue.held.remove(&client).unwrap_or(0);
        }
        let jobs: Vec<JobId> = self.jobs.keys().cloned().collect();
        jobs.iter().for_each(|job| self.forget_idle(job));
    }

    /// The slots that can be given out now.
    pub fn grants(&mut self) -> Vec<Grant> {
        let mut grants = Vec::new();
        while self.in_use() < self.budget {
            let Some(job) = self.next_job() else { break };
            let weight = self.weight(&job);
            let queue = self.jobs.get_mut(&job).expect("next_job names a job that waits");
            let (client, bytes) = queue.waiting.pop_front().expect("next_job names a job that waits");
            self.virtual_time = self.virtual_time.max(queue.tag);
            queue.tag += bytes as f64 / weight;
            queue.in_use += 1;
            *queue.held.entry(client).or_default() += 1;
            grants.push(Grant { client, job });
        }
        grants
    }

    /// The cap of a job while caps bind; without a share the whole budget.
    pub fn cap_of(&self, job: &JobId) -> u32 {
        if caps_bind(self.budget, self.shares.len()) { self.cap(job).min(self.budget) } else { self.budget }
    }

    /// Whether somebody waits for a slot that another process or another job has, or waits for too.
    pub fn contended(&self) -> bool {
        let mut clients = self.jobs.values().flat_map(|queue| {
            let held = queue.held.iter().filter(|(_, held)| **held > 0).map(|(client, _)| *client);
            queue.waiting.iter().map(|(client, _)| *client).chain(held)
        });
        let first = clients.next();
        let one_client = clients.all(|client| Some(client) == first);
        let wanting = self.jobs.values().filter(|queue| queue.in_use > 0 || !queue.waiting.is_empty()).count();
        self.jobs.values().any(|queue| !queue.waiting.is_empty()) && (!one_client || wanting > 1)
    }

    pub fn waiting(&self) -> usize {
        self.jobs.values().map(|queue| queue.waiting.len()).sum()
    }

    pub fn in_use(&self) -> u32 {
        self.jobs.values().map(|queue| queue.in_use).sum()
    }

    /// Slots in use and waited for by one job.
    pub fn of(&self, job: &JobId) -> (u32, usize) {
        self.jobs.get(job).map_or((0, 0), |queue| (queue.in_use, queue.waiting.len()))
    }

    /// The waiting job that is farthest below its share; one at its cap only if no job below its cap waits.
    fn next_job(&self) -> Option<JobId> {
        let wanting = |queue: &Queue| queue.in_use > 0 || !queue.waiting.is_empty();
        let bind = caps_bind(self.budget, self.jobs.values().filter(|queue| wanting(queue)).count());
        self.jobs
            .iter()
            .filter(|(_, queue)| !queue.waiting.is_empty())
            .map(|(job, queue)| (bind && queue.in_use >= self.cap(job), queue.tag, job))
            .min_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(b.2)))
            .map(|(_, _, job)| job.clone())
    }

    /// A job that the Mission Controller has not named yet counts as an average one, and has no cap.
    fn weight(&self, job: &JobId) -> f64 {
        let unnamed = 1.0 / (self.shares.len().max(1) as f64);
        self.shares.get(job).map_or(unnamed, |share| share.weight.max(1e-9))
    }

    fn cap(&self, job: &JobId) -> u32 {
        self.shares.get(job).map_or(u32::MAX, |share| share.flows)
    }

    fn forget_idle(&mut self, job: &JobId) {
        // The tag of an idle job that is ahead of the others must not be forgotten: it has had its bytes.
        if let Some(queue) = self.jobs.get(job)
            && queue.in_use == 0
            && queue.waiting.is_empty()
            && queue.tag <= self.virtual_time
        {
            self.jobs.remove(job);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(job: &str, weight: f64, flows: u32) -> Share {
        Share { job: job.into(), weight, flows }
    }

    /// Two backlogged jobs, `rounds` chunks one after the other through the slots; bytes each got.
    fn backlogged(budget: u32, shares: &[Share], rounds: usize) -> BTreeMap<JobId, u64> {
        const CHUNK: u64 = 1 << 20;
        let mut slots = Slots::new(budget);
        slots.set_shares(budget, shares);
        for share in shares {
            (0..budget).for_each(|_| slots.want(0, &share.job, CHUNK));
        }
        let mut got = BTreeMap::new();
        let mut running: VecDeque<JobId> = slots.grants().into_iter().map(|grant| grant.job).collect();
        for _ in 0..rounds {
            let job = running.pop_front().expect("backlogged slots are never idle");
            *got.entry(job.clone()).or_insert(0) += CHUNK;
            slots.give_back(0, &job, CHUNK, CHUNK);
            slots.want(0, &job, CHUNK);
            running.extend(slots.grants().into_iter().map(|grant| grant.job));
        }
        got
    }

    #[test]
    fn two_slots_follow_the_weights_by_bytes() {
        for (a, b) in [(0.7, 0.3), (8.0 / 9.0, 1.0 / 9.0)] {
            let got = backlogged(2, &[share("a", a, 1), share("b", b, 1)], 1000);
            let part = got[&JobId::from("a")] as f64 / (1000 << 20) as f64;
            assert!((part - a).abs() < 0.01, "{part} for {a}");
        }
    }

    #[test]
    fn a_backlogged_job_holds_exactly_its_cap() {
        let mut slots = Slots::new(10);
        slots.set_shares(10, &[share("a", 0.7, 7), share("b", 0.3, 3)]);
        for job in ["a", "b"] {
            (0..20).for_each(|_| slots.want(0, &job.into(), 1));
        }
        slots.grants();
        assert_eq!(slots.of(&"a".into()).0, 7);
        assert_eq!(slots.of(&"b".into()).0, 3);
    }

    #[test]
    fn one_job_alone_has_every_slot_and_gives_them_up_chunk_by_chunk() {
        let mut slots = Slots::new(10);
        slots.set_shares(10, &[share("a", 0.5, 5), share("b", 0.5, 5)]);
        (0..30).for_each(|_| slots.want(0, &"a".into(), 1));
        assert_eq!(slots.grants().len(), 10);
        (0..30).for_each(|_| slots.want(1, &"b".into(), 1));
        assert!(slots.grants().is_empty());
        for _ in 0..5 {
            slots.give_back(0, &"a".into(), 1, 1);
            assert_eq!(slots.grants()[0].job, "b".into());
        }
        slots.give_back(0, &"a".into(), 1, 1);
        assert_eq!(slots.grants()[0].job, "a".into());
    }

    #[test]
    fn a_lost_client_returns_its_slots() {
        let mut slots = Slots::new(2);
        (0..2).for_each(|_| slots.want(1, &"a".into(), 1));
        assert_eq!(slots.grants().len(), 2);
        slots.want(2, &"a".into(), 1);
        assert!(slots.grants().is_empty());
        slots.drop_client(1);
        assert_eq!(slots.grants(), [Grant { client: 2, job: "a".into() }]);
    }

    #[test]
    fn a_job_that_was_idle_has_saved_nothing_up() {
        let mut slots = Slots::new(1);
        slots.set_shares(1, &[share("a", 0.5, 1), share("b", 0.5, 1)]);
        for _ in 0..100 {
            slots.want(0, &"a".into(), 1);
            assert_eq!(slots.grants().len(), 1);
            slots.give_back(0, &"a".into(), 1, 1);
        }
        let mut order = String::new();
        (0..6).for_each(|_| slots.want(0, &"a".into(), 1));
        (0..6).for_each(|_| slots.want(0, &"b".into(), 1));
        for _ in 0..6 {
            let grant = slots.grants().remove(0);
            order.push_str(&grant.job);
            slots.give_back(0, &grant.job, 1, 1);
        }
        assert_eq!(order.matches('a').count(), 3, "{order}");
    }
}
