//! Lanes between two workers: one for each job whose results pass.
//! Design: docs/explanation/design-dask.md, "A message of Dask's".
//!
//! An engine asks a peer for results in one message at a time, and bounds the bytes that a worker has requested. Then a
//! job whose messages are many and large leaves no room to others, whatever their weights are. With a lane for each
//! job, no message has results of two jobs. The next message is for the job with the fewest bytes in transit relative
//! to its weight.

use crate::types::JobId;
use std::collections::BTreeMap;

/// Large messages of a lane that are in transit in parallel: while one arrives, the peer prepares the next. With one at
/// a time a job that should have 8 of 9 bytes had 0.68 of them (2026-11-24, a sender of 100 MB/s).
pub const MESSAGES: u32 = 2;
/// From so many bytes on a message is large. Results that wait while a small one is in transit share the next.
pub const LARGE: u64 = 1 << 20;
/// The smallest weight that counts.
const WEIGHT_MIN: f64 = 1e-9;

/// The messages that a worker has asked its peers for.
#[derive(Default)]
pub struct Lanes {
    /// Bytes of each message under way, by its number.
    under_way: BTreeMap<(String, JobId), BTreeMap<u32, u64>>,
    weights: BTreeMap<JobId, f64>,
}

impl Lanes {
    /// Current weights of the jobs that move bytes.
    pub fn weigh(&mut self, weights: BTreeMap<JobId, f64>) {
        self.weights = weights;
    }

    /// The number of the message that may begin now in the lane of a job to a peer, if one may.
    pub fn free(&self, peer: &str, job: &JobId) -> Option<u32> {
        let Some(own) = self.under_way.get(&(peer.to_owned(), job.clone())) else { return Some(0) };
        let large = own.values().all(|bytes| *bytes >= LARGE);
        (0..MESSAGES).find(|number| !own.contains_key(number)).filter(|_| large)
    }

    /// A message of so many bytes is requested.
    pub fn begins(&mut self, peer: String, job: JobId, number: u32, bytes: u64) {
        self.under_way.entry((peer, job)).or_default().insert(number, bytes);
    }

    /// It has arrived, or failed.
    pub fn ends(&mut self, peer: String, job: JobId, number: u32) {
        let lane = (peer, job);
        if let Some(own) = self.under_way.get_mut(&lane) {
            own.remove(&number);
            if own.is_empty() {
                self.under_way.remove(&lane);
            }
        }
    }

    /// Chooses whose message is next, of jobs and their priorities. A job that has moved no bytes yet has the weight
    /// that its priority would give it among those that have.
    pub fn next<'a>(&self, jobs: &'a [(JobId, f64)]) -> Option<&'a JobId> {
        let known = jobs.iter().filter_map(|(job, priority)| Some((self.weights.get(job)?, priority)));
        let (weights, priorities) = known.fold((0.0, 0.0), |(all, of), (weight, own)| (all + weight, of + own));
        let by_priority = if weights > 0.0 && priorities > 0.0 { weights / priorities } else { 1.0 };
        let mut bytes: BTreeMap<&JobId, u64> = BTreeMap::new();
        for ((_, job), own) in &self.under_way {
            *bytes.entry(job).or_default() += own.values().sum::<u64>();
        }
        let tag = |(job, priority): &(JobId, f64)| {
            let weight = self.weights.get(job).copied().filter(|own| *own > 0.0).unwrap_or(priority * by_priority);
            bytes.get(job).map_or(0.0, |bytes| *bytes as f64) / weight.max(WEIGHT_MIN)
        };
        // The first of equals: the caller's order decides.
        jobs.iter().min_by(|one, other| tag(one).total_cmp(&tag(other))).map(|(job, _)| job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(of: &[(&str, f64)]) -> Vec<(JobId, f64)> {
        of.iter().map(|(job, priority)| ((*job).into(), *priority)).collect()
    }

    #[test]
    fn bytes_under_way_follow_the_weights() {
        for weights in [BTreeMap::new(), BTreeMap::from([("a".into(), 0.8), ("b".into(), 0.1)])] {
            let mut lanes = Lanes::default();
            lanes.weigh(weights);
            let both = jobs(&[("a", 8.0), ("b", 1.0)]);
            let mut counts = BTreeMap::new();
            for peer in 0..90 {
                let job = lanes.next(&both).unwrap().clone();
                *counts.entry(job.to_string()).or_insert(0) += 1;
                lanes.begins(peer.to_string(), job, 0, 50);
            }
            assert_eq!(counts, BTreeMap::from([("a".to_owned(), 80), ("b".to_owned(), 10)]));
        }
    }

    #[test]
    fn a_job_without_bytes_under_way_comes_next() {
        let mut lanes = Lanes::default();
        let both = jobs(&[("a", 1000.0), ("b", 1.0)]);
        lanes.begins("peer".into(), "a".into(), 0, 1);
        assert_eq!(lanes.next(&both), Some(&"b".into()));
        lanes.begins("peer".into(), "b".into(), 0, 1);
        assert_eq!(lanes.next(&both), Some(&"a".into()));
        lanes.ends("peer".into(), "a".into(), 0);
        lanes.ends("peer".into(), "b".into(), 0);
        assert!(lanes.under_way.is_empty() && lanes.next(&[]).is_none());
    }

    #[test]
    fn a_job_that_has_moved_nothing_weighs_as_its_priority_beside_others() {
        let mut lanes = Lanes::default();
        lanes.weigh(BTreeMap::from([("old".into(), 0.001)]));
        lanes.begins("peer".into(), "old".into(), 0, 100);
        lanes.begins("peer".into(), "new".into(), 0, 100);
        assert_eq!(lanes.next(&jobs(&[("old", 1.0), ("new", 2.0)])), Some(&"new".into()));
        assert_eq!(lanes.next(&jobs(&[("old", 2.0), ("new", 1.0)])), Some(&"old".into()));
    }

    #[test]
    fn two_large_messages_of_a_lane_are_under_way_and_small_results_wait_for_one_another() {
        let mut lanes = Lanes::default();
        let job = JobId::from("job");
        assert_eq!(lanes.free("peer", &job), Some(0));
        lanes.begins("peer".into(), job.clone(), 0, LARGE - 1);
        assert_eq!(lanes.free("peer", &job), None);
        assert_eq!((lanes.free("other", &job), lanes.free("peer", &"other".into())), (Some(0), Some(0)));
        lanes.ends("peer".into(), job.clone(), 0);
        lanes.begins("peer".into(), job.clone(), 0, LARGE);
        assert_eq!(lanes.free("peer", &job), Some(1));
        lanes.begins("peer".into(), job.clone(), 1, LARGE);
        assert_eq!(lanes.free("peer", &job), None);
        lanes.ends("peer".into(), job.clone(), 0);
        assert_eq!(lanes.free("peer", &job), Some(0));
    }
}
