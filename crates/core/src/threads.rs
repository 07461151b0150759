//! The threads of a worker: whose task runs next (DESIGN 4.1, "Weights must become time").
//!
//! Only tasks that run ask for data, so with few threads the engine's order of tasks would decide who gets the network,
//! whatever the weights are. Here a task that waits for the network lends its thread to another; and tasks begin, and go on
//! once their data has come, by start-time fair queueing over seconds of threads, job by job (Goyal, Vin, Cheng: Start-time
//! Fair Queueing, SIGCOMM 1996). Inside a job those that go on come first, since they hold memory; then the engine's order.
//!
//! A job weighs what its transfers weigh together. One that moves nothing now weighs what its priority would bring: its part
//! of what those that do have, by priority.

use crate::defaults::{LENT_MAX, LENT_PER_THREAD};
use crate::types::JobId;
use crate::units::Time;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

/// A task of this process.
pub type TaskId = u64;

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// What the jobs that move bytes weigh now.
    Weights { weights: BTreeMap<JobId, f64> },
    /// The engine gives a task to a thread; `priority`: its job's.
    Begins { task: TaskId, job: JobId, priority: f64 },
    /// It waits for the network.
    Lends { task: TaskId },
    /// It has what it waited for.
    GoesOn { task: TaskId },
    /// It has waited for a thread for too long, and gets one more than there are: those who have them may wait for it.
    Late { task: TaskId },
    /// It is over, or has left the threads for good.
    Ends { task: TaskId },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// It has a thread.
    Run { task: TaskId },
}

pub struct Threads {
    /// How many run at once.
    threads: usize,
    tasks: BTreeMap<TaskId, JobId>,
    jobs: BTreeMap<JobId, Job>,
    weights: BTreeMap<JobId, f64>,
    /// The tag of the task that began last: who comes later begins there.
    virtual_now: f64,
    /// Seconds that a task of any job had a thread at a time, of late.
    burst: f64,
}

#[derive(Default)]
struct Job {
    priority: f64,
    /// Seconds of threads that it has had, each divided by its weight then.
    served: f64,
    /// The same of one task at a time, of late; `None`: none has ended.
    burst: Option<f64>,
    /// Tasks that have threads, and since when.
    running: BTreeMap<TaskId, Time>,
    going_on: VecDeque<TaskId>,
    beginning: VecDeque<TaskId>,
    /// Tasks that are here.
    tasks: usize,
}

/// How much of a mean the newest value makes.
const NEWEST: f64 = 0.2;
/// Tasks begin ahead while less than this part of the memory for objects is in use: one half.
const AHEAD_MEMORY: u64 = 2;
/// Seconds that a task is expected to need where nothing is known: what is compared are multiples of it.
const FIRST_BURST: f64 = 0.1;

impl Threads {
    pub fn new(threads: usize) -> Threads {
        Threads {
            threads: threads.max(1),
            tasks: BTreeMap::new(),
            jobs: BTreeMap::new(),
            weights: BTreeMap::new(),
            virtual_now: 0.0,
            burst: FIRST_BURST,
        }
    }

    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::Weights { weights } => self.weights = weights,
            Event::Begins { task, job, priority } => {
                if let Entry::Vacant(new) = self.tasks.entry(task) {
                    new.insert(job.clone());
                    let own =
                        self.jobs.entry(job).or_insert_with(|| Job { served: self.virtual_now, ..Job::default() });
                    own.priority = priority;
                    own.tasks += 1;
                    own.beginning.push_back(task);
                }
            }
            Event::Lends { task } => self.stop(now, task),
            Event::GoesOn { task } => {
                let job = self.tasks.get(&task).and_then(|job| self.jobs.get_mut(job));
                if let Some(job) = job.filter(|job| !job.has(task)) {
                    job.going_on.push_back(task);
                }
            }
            Event::Late { task } => {
                if let Some(job) = self.tasks.get(&task).cloned() {
                    let own = self.jobs.get_mut(&job).expect("it has a task");
                    let waits = own.going_on.len() + own.beginning.len();
                    own.going_on.retain(|other| *other != task);
                    own.beginning.retain(|other| *other != task);
                    if own.going_on.len() + own.beginning.len() < waits {
                        own.running.insert(task, now);
                        commands.push(Command::Run { task });
                    }
                }
            }
            Event::Ends { task } => {
                self.stop(now, task);
                let Some(job) = self.tasks.remove(&task) else { return };
                let own = self.jobs.get_mut(&job).expect("it has a task");
                own.going_on.retain(|other| *other != task);
                own.beginning.retain(|other| *other != task);
                own.tasks -= 1;
                if own.tasks == 0 {
                    self.jobs.remove(&job);
                }
            }
        }
        self.give(now, commands);
    }

    /// How many tasks may have lent their threads at most.
    pub fn most(&self) -> usize {
        (LENT_PER_THREAD * self.threads).min(LENT_MAX)
    }

    /// How many tasks more than threads may have begun: as many as lend theirs, but none while what they have fetched takes
    /// a good part of the memory.
    pub fn ahead(&self, live_bytes: u64, limit_bytes: u64) -> usize {
        if live_bytes > limit_bytes / AHEAD_MEMORY {
            return 0;
        }
        let waiting: usize = self.jobs.values().map(|job| job.going_on.len() + job.beginning.len()).sum();
        (self.tasks.len() - self.running() - waiting).min(self.most())
    }

    /// Of several jobs whose task is to be begun next; for an engine that keeps tasks until a thread may be
    /// had. Tasks that have begun and wait count as if they ran.
    pub fn next<'a>(&self, now: Time, jobs: impl IntoIterator<Item = &'a JobId>) -> Option<&'a JobId> {
        let tags = jobs.into_iter().map(|job| {
            let tag = self.jobs.get(job).map_or(self.virtual_now, |own| {
                let waiting = (own.beginning.len() + own.going_on.len()) as f64 * self.burst_of(own);
                self.tag(now, job, own) + waiting / self.weight(job, own)
            });
            (tag, job)
        });
        tags.min_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, job)| job)
    }

    /// Tasks that have begun and are not over.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    fn running(&self) -> usize {
        self.jobs.values().map(|job| job.running.len()).sum()
    }

    fn weight(&self, job: &JobId, own: &Job) -> f64 {
        if let Some(weight) = self.weights.get(job).filter(|weight| **weight > 0.0) {
            return *weight;
        }
        let active = self.jobs.iter().filter_map(|(job, own)| Some((*self.weights.get(job)?, own.priority)));
        let (weights, priorities) = active.fold((0.0, 0.0), |(all, of), (weight, own)| (all + weight, of + own));
        let by_priority = if weights > 0.0 && priorities > 0.0 { weights / priorities } else { 1.0 };
        (own.priority * by_priority).max(f64::MIN_POSITIVE)
    }

    fn burst_of(&self, job: &Job) -> f64 {
        job.burst.unwrap_or(self.burst)
    }

    /// What a job has had, with what those of its tasks that run are going to have had at least.
    fn tag(&self, now: Time, job: &JobId, own: &Job) -> f64 {
        let burst = self.burst_of(own);
        let running = own.running.values().map(|since| now.since(*since).as_secs_f64().max(burst));
        own.served + running.sum::<f64>() / self.weight(job, own)
    }

    /// A task has its thread no more.
    fn stop(&mut self, now: Time, task: TaskId) {
        let Some(job) = self.tasks.get(&task) else { return };
        let Some(since) = self.jobs.get_mut(job).and_then(|own| own.running.remove(&task)) else { return };
        let seconds = now.since(since).as_secs_f64();
        let weight = self.weight(job, &self.jobs[job]);
        let own = self.jobs.get_mut(job).expect("its task ran");
        own.served += seconds / weight;
        let mean = |before: f64| before + NEWEST * (seconds - before);
        own.burst = Some(own.burst.map_or(seconds, mean));
        self.burst = mean(self.burst);
    }

    /// Gives free threads to whoever is farthest behind.
    fn give(&mut self, now: Time, commands: &mut Vec<Command>) {
        for _ in self.running()..self.threads {
            let waiting = self.jobs.iter().filter(|(_, own)| !own.going_on.is_empty() || !own.beginning.is_empty());
            let tags = waiting.map(|(job, own)| (self.tag(now, job, own), job));
            let Some((tag, job)) = tags.min_by(|(one, _), (other, _)| one.total_cmp(other)) else { return };
            let (tag, job) = (tag, job.clone());
            let own = self.jobs.get_mut(&job).expect("found there");
            if own.running.is_empty() {
                // Who had nothing to do is owed nothing.
                own.served = own.served.max(self.virtual_now);
            }
            self.virtual_now = self.virtual_now.max(tag);
            let task = own.going_on.pop_front().or_else(|| own.beginning.pop_front()).expect("it waits");
            own.running.insert(task, now);
            commands.push(Command::Run { task });
        }
    }
}

impl Job {
    /// Whether a task runs, or waits for a thread.
    fn has(&self, task: TaskId) -> bool {
        self.running.contains_key(&task) || self.going_on.contains(&task) || self.beginning.contains(&task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;
    use std::time::Duration;

    fn job(number: u64) -> JobId {
        format!("job {number}").into()
    }

    /// Threads on which tasks compute, fetch and compute, in virtual time.
    struct World {
        threads: Threads,
        now: Time,
        /// What ends when, and whether it is a fetch.
        due: BTreeMap<(Time, TaskId), bool>,
        fetched: BTreeMap<TaskId, bool>,
        had: BTreeMap<JobId, f64>,
        next: TaskId,
        running: usize,
    }

    impl World {
        fn new(threads: usize) -> World {
            World {
                threads: Threads::new(threads),
                now: Time(0),
                due: BTreeMap::new(),
                fetched: BTreeMap::new(),
                had: BTreeMap::new(),
                next: 0,
                running: 0,
            }
        }

        fn say(&mut self, event: Event, seconds: impl Fn(TaskId) -> f64) {
            let mut commands = Vec::new();
            self.threads.handle(self.now, event, &mut commands);
            for Command::Run { task } in commands {
                self.running += 1;
                let lasts = seconds(task);
                self.due.insert((self.now + Duration::from_secs_f64(lasts), task), false);
                *self.had.entry(self.threads.tasks[&task].clone()).or_default() += lasts;
            }
        }

        fn begin(&mut self, of: u64, priority: f64, seconds: impl Fn(TaskId) -> f64) {
            self.next += 1;
            self.say(Event::Begins { task: self.next, job: job(of), priority }, seconds);
        }

        /// The next task that computes has computed, or has its data. Gives the task where it is over.
        fn step(&mut self, fetch: f64, seconds: impl Fn(TaskId) -> f64) -> Option<TaskId> {
            let ((at, task), fetching) = self.due.pop_first()?;
            self.now = at;
            if fetching {
                self.say(Event::GoesOn { task }, seconds);
                return None;
            }
            self.running -= 1;
            if fetch > 0.0 && self.fetched.insert(task, true).is_none() {
                self.due.insert((self.now + Duration::from_secs_f64(fetch), task), true);
                self.say(Event::Lends { task }, seconds);
                return None;
            }
            self.fetched.remove(&task);
            self.say(Event::Ends { task }, seconds);
            Some(task)
        }
    }

    #[test]
    fn jobs_that_all_have_work_get_seconds_by_their_weights() {
        // Tasks of unlike length: what counts are seconds.
        let seconds = |task: TaskId| [0.3, 0.1, 0.7][(task % 3) as usize];
        for fetch in [0.0, 0.5] {
            let mut world = World::new(4);
            let weights = BTreeMap::from([(job(1), 0.125), (job(2), 0.25), (job(5), 0.625)]);
            world.say(Event::Weights { weights }, seconds);
            let mut of = BTreeMap::new();
            // As many of each as may have begun, always.
            for _ in 0..16 {
                for number in [1, 2, 5] {
                    world.begin(number, 1.0, seconds);
                    of.insert(world.next, number);
                }
            }
            while world.now < Time::from_secs_f64(400.0) {
                if let Some(task) = world.step(fetch, seconds) {
                    let number = of.remove(&task).unwrap();
                    world.begin(number, 1.0, seconds);
                    of.insert(world.next, number);
                }
            }
            let all: f64 = world.had.values().sum();
            for (number, share) in [(1, 0.125), (2, 0.25), (5, 0.625)] {
                let had = world.had[&job(number)] / all;
                assert!((had - share).abs() < 0.02, "{fetch} {number}: {had}");
            }
        }
    }

    #[test]
    fn a_job_that_moves_nothing_weighs_what_its_priority_would_bring() {
        let mut world = World::new(2);
        let weights = BTreeMap::from([(job(1), 0.5), (job(2), 0.5)]);
        world.say(Event::Weights { weights }, |_| 1.0);
        for _ in 0..60 {
            world.begin(1, 1.0, |_| 1.0);
            world.begin(2, 1.0, |_| 1.0);
            world.begin(3, 2.0, |_| 1.0);
        }
        for _ in 0..80 {
            world.step(0.0, |_| 1.0);
        }
        let had = |number| world.had[&job(number)];
        assert!((had(3) / (had(1) + had(2)) - 1.0).abs() < 0.1, "{:?}", world.had);
    }

    #[test]
    fn a_thread_is_lent_while_its_task_waits_and_those_that_go_on_come_first() {
        const NONE: [TaskId; 0] = [];
        let mut threads = Threads::new(1);
        let mut said = |event| {
            let mut commands = Vec::new();
            threads.handle(Time(0), event, &mut commands);
            commands.into_iter().map(|Command::Run { task }| task).collect::<Vec<_>>()
        };
        let begins = |task| Event::Begins { task, job: job(1), priority: 1.0 };
        assert_eq!(said(begins(1)), [1]);
        assert_eq!(said(begins(2)), NONE);
        assert_eq!(said(begins(3)), NONE);
        assert_eq!(said(Event::Lends { task: 1 }), [2]);
        assert_eq!(said(Event::GoesOn { task: 1 }), NONE);
        assert_eq!(said(Event::GoesOn { task: 1 }), NONE, "once is enough");
        assert_eq!(said(Event::Ends { task: 2 }), [1]);
        // Who waits too long goes on all the same; then there is one less for the others.
        assert_eq!(said(begins(4)), NONE);
        assert_eq!(said(Event::Late { task: 4 }), [4]);
        assert_eq!(said(Event::Late { task: 4 }), NONE);
        assert_eq!(said(Event::Ends { task: 4 }), NONE);
        // Whatever ends while it waits, or lends, leaves nothing.
        assert_eq!(said(Event::Lends { task: 1 }), [3]);
        assert_eq!(said(Event::Ends { task: 1 }), NONE);
        assert_eq!(said(Event::Ends { task: 3 }), NONE);
        assert_eq!(said(Event::Ends { task: 3 }), NONE);
        assert!(threads.is_empty() && threads.jobs.is_empty());
    }

    /// Whatever is said in whatever order: never more than so many run, none is idle while somebody waits, each runs once for
    /// each time that it asks, and nothing is left.
    #[test]
    fn no_thread_is_idle_and_none_is_given_twice() {
        for seed in 0..200 {
            let mut random = SplitMix(seed);
            let mut threads = Threads::new(1 + (seed % 4) as usize);
            let (mut runs, mut lends, mut waits) = (Vec::new(), Vec::new(), Vec::new());
            let mut next = 0;
            for step in 0..400u64 {
                let mut commands = Vec::new();
                let now = Time(step * 10_000_000);
                let any = |random: &mut SplitMix, tasks: &mut Vec<TaskId>| {
                    (!tasks.is_empty()).then(|| tasks.swap_remove(random.next() as usize % tasks.len()))
                };
                match random.next() % 6 {
                    0 | 1 => {
                        next += 1;
                        waits.push(next);
                        let event = Event::Begins { task: next, job: job(random.next() % 3), priority: 1.0 };
                        threads.handle(now, event, &mut commands);
                    }
                    2 => {
                        if let Some(task) = any(&mut random, &mut runs) {
                            lends.push(task);
                            threads.handle(now, Event::Lends { task }, &mut commands);
                        }
                    }
                    3 => {
                        if let Some(task) = any(&mut random, &mut lends) {
                            waits.push(task);
                            threads.handle(now, Event::GoesOn { task }, &mut commands);
                        }
                    }
                    4 => {
                        if let Some(task) = any(&mut random, &mut runs) {
                            threads.handle(now, Event::Ends { task }, &mut commands);
                        }
                    }
                    _ => {
                        let all = [&mut waits, &mut lends];
                        let [one, other] = all;
                        let from = if random.next().is_multiple_of(2) { one } else { other };
                        if let Some(task) = any(&mut random, from) {
                            threads.handle(now, Event::Ends { task }, &mut commands);
                        }
                    }
                }
                for Command::Run { task } in commands {
                    let at = waits.iter().position(|other| *other == task).expect("it waits");
                    waits.swap_remove(at);
                    runs.push(task);
                }
                assert_eq!(runs.len(), threads.running());
                assert!(runs.len() <= threads.threads);
                assert!(runs.len() == threads.threads || waits.is_empty(), "seed {seed}, step {step}");
            }
            for task in 1..=next {
                threads.handle(Time(1 << 40), Event::Ends { task }, &mut Vec::new());
            }
            assert!(threads.is_empty() && threads.jobs.is_empty());
        }
    }
}
