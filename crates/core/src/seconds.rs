//! Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996) of jobs, over the seconds for which their tasks hold something.
//!
//! How long a task will hold it is not known at the start. Until the task gives it back, the mean of earlier tasks counts.

use crate::threads::TaskId;
use crate::types::JobId;
use crate::units::Time;
use std::collections::BTreeMap;

pub(crate) struct Seconds {
    /// The tag of the last grant: a job that arrives later begins there.
    virtual_now: f64,
    /// Recent mean of the seconds that a task of any job held it.
    burst: f64,
    jobs: BTreeMap<JobId, Account>,
}

struct Account {
    /// Seconds of its tasks, each divided by the job's weight at that time.
    had: f64,
    /// Recent mean of the seconds that one task held it; `None`: none has returned it yet.
    burst: Option<f64>,
    holds: BTreeMap<TaskId, Hold>,
}

#[derive(Clone, Copy)]
struct Hold {
    since: Time,
    /// Its job was charged for the time until then.
    paid: Time,
}

impl Hold {
    /// Expected seconds that are not charged yet.
    fn owes(&self, now: Time, least: f64) -> f64 {
        now.since(self.paid).as_secs_f64().max(least - self.paid.since(self.since).as_secs_f64())
    }
}

/// Weight of the newest value in a mean.
const NEWEST: f64 = 0.2;
/// Expected seconds of a task if nothing is known: only ratios matter then.
const FIRST_BURST: f64 = 0.1;
/// A job that requested nothing for a while, although it has tasks, is owed at most so many times the duration of one
/// task.
const OWED_BURSTS: f64 = 16.0;

impl Default for Seconds {
    fn default() -> Seconds {
        Seconds { virtual_now: 0.0, burst: FIRST_BURST, jobs: BTreeMap::new() }
    }
}

impl Seconds {
    /// A job's tag: what it was charged, plus the expected rest of its current tasks. The job with the smallest tag is
    /// next.
    pub fn tag(&self, now: Time, job: &JobId, weight: f64) -> f64 {
        let Some(own) = self.jobs.get(job) else { return self.first_tag() };
        let burst = own.burst.unwrap_or(self.burst);
        let holding = own.holds.values().map(|hold| hold.owes(now, burst)).sum::<f64>();
        own.had.max(self.virtual_now - OWED_BURSTS * burst / weight) + holding / weight
    }

    pub fn start(&mut self, now: Time, job: &JobId, task: TaskId, weight: f64) {
        let tag = self.tag(now, job, weight);
        let new = Account { had: self.first_tag(), burst: None, holds: BTreeMap::new() };
        let own = self.jobs.entry(job.clone()).or_insert(new);
        let burst = own.burst.unwrap_or(self.burst);
        own.had = own.had.max(self.virtual_now - OWED_BURSTS * burst / weight);
        own.holds.insert(task, Hold { since: now, paid: now });
        self.virtual_now = self.virtual_now.max(tag);
    }

    /// A task returns what it held, if anything.
    pub fn stop(&mut self, now: Time, job: &JobId, task: TaskId, weight: f64) {
        let Some(own) = self.jobs.get_mut(job) else { return };
        let Some(hold) = own.holds.remove(&task) else { return };
        let seconds = now.since(hold.since).as_secs_f64();
        own.had += now.since(hold.paid).as_secs_f64() / weight;
        let mean = |before: f64| before + NEWEST * (seconds - before);
        own.burst = Some(own.burst.map_or(seconds, mean));
        self.burst = mean(self.burst);
    }

    /// Weights are about to change: charge what is held by the old ones.
    pub fn settle(&mut self, now: Time, weight: impl Fn(&JobId) -> f64) {
        for (job, own) in &mut self.jobs {
            let paid: f64 = own.holds.values().map(|hold| now.since(hold.paid).as_secs_f64()).sum();
            own.had += paid / weight(job);
            own.holds.values_mut().for_each(|hold| hold.paid = now);
        }
    }

    /// Initial tag of a new job: that of the jobs that have waited longest for long tasks to end.
    fn first_tag(&self) -> f64 {
        let holding = self.jobs.values().filter(|own| !own.holds.is_empty()).map(|own| own.had);
        self.virtual_now.max(holding.min_by(f64::total_cmp).unwrap_or(0.0))
    }

    pub fn holds(&self, job: &JobId, task: TaskId) -> bool {
        self.jobs.get(job).is_some_and(|own| own.holds.contains_key(&task))
    }

    /// Tasks that hold something.
    pub fn len(&self) -> usize {
        self.jobs.values().map(|own| own.holds.len()).sum()
    }

    /// Forgets jobs without tasks, except those ahead of others: they would return as if they had used nothing.
    pub fn forget(&mut self, has_tasks: impl Fn(&JobId) -> bool) {
        self.jobs.retain(|job, own| has_tasks(job) || own.had > self.virtual_now);
        if self.jobs.keys().all(|job| !has_tasks(job)) {
            self.jobs.clear();
            // Reset all tags: seconds divided by tiny weights would otherwise add up until a second is lost in
            // rounding.
            self.virtual_now = 0.0;
        }
    }
}
