//! Rates of jobs over the last minutes, for users.

use super::*;
use std::collections::VecDeque;

/// Between two points of a curve.
pub const SAMPLE_EVERY: Duration = Duration::from_secs(2);
/// Points of a curve: three minutes.
const SAMPLES: usize = 90;
/// Curves that are shown at once: those of the jobs that moved most.
const SHOWN: usize = 50;

#[derive(Default)]
pub struct Rates {
    sampled_at: Option<Time>,
    jobs: BTreeMap<(ClusterId, JobId), VecDeque<u64>>,
}

/// Bytes per second, the last point last.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RatesNow {
    pub every_secs: f64,
    /// Those of all jobs together.
    pub all: Vec<u64>,
    pub jobs: Vec<JobRates>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobRates {
    pub cluster: ClusterId,
    pub job: JobId,
    pub rates: Vec<u64>,
}

impl Rates {
    fn add(&mut self, rates: &BTreeMap<(ClusterId, JobId), f64>) {
        for (job, rate) in rates {
            // One that begins now has 0 before, as far as is known.
            let own = self.jobs.entry(job.clone()).or_default();
            own.push_back(*rate as u64);
        }
        for (job, own) in &mut self.jobs {
            if !rates.contains_key(job) {
                own.push_back(0);
            }
            if own.len() > SAMPLES {
                own.pop_front();
            }
        }
        self.jobs.retain(|_, own| own.iter().any(|rate| *rate > 0));
    }

    fn now(&self) -> RatesNow {
        let longest = self.jobs.values().map(VecDeque::len).max().unwrap_or(0);
        let mut all = vec![0; longest];
        for own in self.jobs.values() {
            let offset = longest - own.len();
            own.iter().zip(&mut all[offset..]).for_each(|(rate, sum)| *sum = u64::saturating_add(*sum, *rate));
        }
        let mut jobs: Vec<_> = self.jobs.iter().collect();
        let whole = |own: &VecDeque<u64>| own.iter().fold(0, |sum: u64, rate| sum.saturating_add(*rate));
        jobs.sort_by_cached_key(|(_, own)| std::cmp::Reverse(whole(own)));
        let job = |((cluster, job), own): (&(ClusterId, JobId), &VecDeque<u64>)| JobRates {
            cluster: cluster.clone(),
            job: job.clone(),
            rates: own.iter().copied().collect(),
        };
        let jobs = jobs.into_iter().take(SHOWN).map(job).collect();
        RatesNow { every_secs: SAMPLE_EVERY.as_secs_f64(), all, jobs }
    }
}

impl Replica {
    pub(super) fn sample_rates(&mut self, now: Time) {
        let Some(own) = &mut self.leading else { return };
        if own.rates.sampled_at.is_some_and(|at| now.since(at) < SAMPLE_EVERY) {
            return;
        }
        own.rates.sampled_at = Some(now);
        let mut rates: BTreeMap<(ClusterId, JobId), f64> = BTreeMap::new();
        for member in self.sessions.values().filter_map(|session| session.member.as_ref()) {
            for seen in member.transfers.values() {
                let key = (member.cluster.clone(), seen.view.transfer.job.clone());
                *rates.entry(key).or_default() += seen.view.bytes_per_sec.max(0.0);
            }
        }
        own.rates.add(&rates);
    }

    /// `None`: this replica does not lead, so no cluster reports to it.
    pub fn rates(&self) -> Option<RatesNow> {
        self.leading.as_ref().map(|own| own.rates.now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_end_now_and_those_of_jobs_that_are_long_over_are_forgotten() {
        let id = |job: &str| -> (ClusterId, JobId) { ("c".into(), job.into()) };
        let mut rates = Rates::default();
        rates.add(&[(id("a"), 5.0)].into());
        rates.add(&[(id("a"), 6.0), (id("b"), 100.0)].into());
        let now = rates.now();
        assert_eq!(now.all, [5, 106]);
        assert_eq!(
            now.jobs.iter().map(|own| (&*own.job, own.rates.clone())).collect::<Vec<_>>(),
            [("b", vec![100]), ("a", vec![5, 6])]
        );
        for _ in 0..=SAMPLES {
            rates.add(&BTreeMap::new());
        }
        assert_eq!(rates.now(), RatesNow { every_secs: 2.0, all: vec![], jobs: vec![] });
    }
}
