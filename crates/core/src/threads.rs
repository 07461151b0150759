//! The threads of a worker: which job's task runs next.
//! Design: docs/explanation/design-control.md, "Tasks get threads by weight".
//!
//! Only running tasks fetch data. With few threads the engine's order of tasks would decide who gets the network, whatever
//! the weights are. So a task that waits for the network releases its thread to another task. The jobs share two things
//! by weight, each by fair queueing over seconds ([`crate::seconds`]): **threads**, among tasks that have begun; and
//! **places**, the number of active tasks, among tasks that could begin. Threads alone are not enough: if the network
//! is the bottleneck, the job that computes longest per byte would get the fewest bytes. A job always has the whole
//! places of its fraction, whatever it had before: a job without an active task fetches nothing, and the network does
//! not compensate for that. Inside a job, tasks that continue come before tasks that begin, because they hold memory;
//! then the engine's order decides.
//!
//! The weight of a job is the sum of its transfers' weights. A job that moves no bytes has the weight that its priority
//! would give it among the jobs that do.

use crate::defaults::{LENT_MAX, LENT_PER_THREAD};
use crate::seconds::Seconds;
use crate::types::JobId;
use crate::units::Time;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

/// A task of this process.
pub type TaskId = u64;

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Current weights of the jobs that move bytes.
    Weights { weights: BTreeMap<JobId, f64> },
    /// The engine gives a task to a thread; `priority`: its job's.
    Begins { task: TaskId, job: JobId, priority: f64 },
    /// The task waits for the network.
    Lends { task: TaskId },
    /// The task has what it waited for.
    GoesOn { task: TaskId },
    /// The task has waited for a thread for too long, and gets an additional one: the running tasks may wait for it.
    Late { task: TaskId },
    /// The task is over, or has left the threads permanently.
    Ends { task: TaskId },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// It has a thread.
    Run { task: TaskId },
}

pub struct Threads {
    /// How many tasks run in parallel.
    threads: usize,
    tasks: BTreeMap<TaskId, JobId>,
    jobs: BTreeMap<JobId, Job>,
    weights: BTreeMap<JobId, f64>,
    running: Seconds,
    under_way: Seconds,
}

#[derive(Default)]
struct Job {
    priority: f64,
    going_on: VecDeque<TaskId>,
    beginning: VecDeque<TaskId>,
    /// Tasks that are here.
    tasks: usize,
}

/// The smallest weight that counts. A second by a far smaller one would be so long that seconds of others are lost in it.
const WEIGHT_MIN: f64 = 1e-9;
/// Tasks begin ahead while less than this fraction of the memory for objects is in use: one half.
const AHEAD_MEMORY: u64 = 2;

impl Threads {
    pub fn new(threads: usize) -> Threads {
        Threads {
            threads: threads.max(1),
            tasks: BTreeMap::new(),
            jobs: BTreeMap::new(),
            weights: BTreeMap::new(),
            running: Seconds::default(),
            under_way: Seconds::default(),
        }
    }

    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::Weights { weights } => {
                if weights != self.weights {
                    let (mut running, mut under_way) =
                        (std::mem::take(&mut self.running), std::mem::take(&mut self.under_way));
                    running.settle(now, |job| self.weight(job));
                    under_way.settle(now, |job| self.weight(job));
                    (self.running, self.under_way, self.weights) = (running, under_way, weights);
                }
            }
            Event::Begins { task, job, priority } => {
                if let Entry::Vacant(new) = self.tasks.entry(task) {
                    new.insert(job.clone());
                    let own = self.jobs.entry(job.clone()).or_default();
                    own.priority = priority;
                    own.tasks += 1;
                    own.beginning.push_back(task);
                    let weight = self.weight(&job);
                    self.under_way.start(now, &job, task, weight);
                }
            }
            Event::Lends { task } => self.stop(now, task),
            Event::GoesOn { task } => {
                let Some(job) = self.tasks.get(&task) else { return };
                let own = self.jobs.get_mut(job).expect("it has a task");
                if !self.running.holds(job, task) && !own.waits(task) {
                    own.going_on.push_back(task);
                }
            }
            Event::Late { task } => {
                if let Some(job) = self.tasks.get(&task).cloned()
                    && self.jobs.get_mut(&job).is_some_and(|own| own.withdraw(task))
                {
                    self.run(now, &job, task, commands);
                }
            }
            Event::Ends { task } => {
                self.stop(now, task);
                let Some(job) = self.tasks.remove(&task) else { return };
                let weight = self.weight(&job);
                self.under_way.stop(now, &job, task, weight);
                let own = self.jobs.get_mut(&job).expect("it has a task");
                own.withdraw(task);
                own.tasks -= 1;
                if own.tasks == 0 {
                    self.jobs.remove(&job);
                }
                let has_tasks = |job: &JobId| self.jobs.contains_key(job);
                self.running.forget(has_tasks);
                self.under_way.forget(has_tasks);
            }
        }
        self.give(now, commands);
    }

    /// How many tasks may have released their threads.
    pub fn most(&self) -> usize {
        (LENT_PER_THREAD * self.threads).min(LENT_MAX)
    }

    /// How many more tasks than threads may have begun: as many as may release theirs, but none while fetched data
    /// takes a large fraction of the memory.
    pub fn ahead(&self, live_bytes: u64, limit_bytes: u64) -> usize {
        if live_bytes > limit_bytes / AHEAD_MEMORY {
            return 0;
        }
        let waiting: usize = self.jobs.values().map(|job| job.going_on.len() + job.beginning.len()).sum();
        (self.tasks.len() - self.running.len() - waiting).min(self.most())
    }

    /// Chooses the job whose task begins next, for an engine that keeps tasks until a thread is available. First a job
    /// that, with that task, would still be within its fraction of the active tasks; then by seconds.
    pub fn next<'a>(&self, now: Time, jobs: impl IntoIterator<Item = &'a JobId>) -> Option<&'a JobId> {
        let jobs: Vec<&JobId> = jobs.into_iter().collect();
        let others = self.jobs.keys().filter(|job| !jobs.contains(job));
        let all: f64 = jobs.iter().copied().chain(others).map(|job| self.weight(job)).sum();
        let places = self.tasks.len() + 1;
        let keys = jobs.into_iter().map(|job| {
            let (weight, tasks) = (self.weight(job), self.jobs.get(job).map_or(0, |own| own.tasks));
            // Keep values whole that differ from a whole number only by a rounding error.
            let has_its_part = (tasks + 1) as f64 > weight / all * places as f64 + 1e-9;
            (has_its_part, self.under_way.tag(now, job, weight), job)
        });
        keys.min_by(|one, other| one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))).map(|(_, _, job)| job)
    }

    /// Tasks that have begun and are not over.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Above 0: see [`WEIGHT_MIN`].
    fn weight(&self, job: &JobId) -> f64 {
        if let Some(weight) = self.weights.get(job).filter(|weight| **weight > 0.0) {
            return weight.max(WEIGHT_MIN);
        }
        let active = self.jobs.iter().filter_map(|(job, own)| Some((*self.weights.get(job)?, own.priority)));
        let (weights, priorities) = active.fold((0.0, 0.0), |(all, of), (weight, own)| (all + weight, of + own));
        let by_priority = if weights > 0.0 && priorities > 0.0 { weights / priorities } else { 1.0 };
        (self.jobs.get(job).map_or(1.0, |own| own.priority) * by_priority).max(WEIGHT_MIN)
    }

    fn run(&mut self, now: Time, job: &JobId, task: TaskId, commands: &mut Vec<Command>) {
        let weight = self.weight(job);
        self.running.start(now, job, task, weight);
        commands.push(Command::Run { task });
    }

    /// A task no longer has its thread.
    fn stop(&mut self, now: Time, task: TaskId) {
        if let Some(job) = self.tasks.get(&task) {
            let weight = self.weight(job);
            self.running.stop(now, job, task, weight);
        }
    }

    /// Gives free threads to the jobs that are farthest behind.
    fn give(&mut self, now: Time, commands: &mut Vec<Command>) {
        for _ in self.running.len()..self.threads {
            let waiting = self.jobs.iter().filter(|(_, own)| !own.going_on.is_empty() || !own.beginning.is_empty());
            let tags = waiting.map(|(job, _)| (self.running.tag(now, job, self.weight(job)), job));
            let Some((_, job)) = tags.min_by(|(one, _), (other, _)| one.total_cmp(other)) else { return };
            let job = job.clone();
            let own = self.jobs.get_mut(&job).expect("found there");
            let task = own.going_on.pop_front().or_else(|| own.beginning.pop_front()).expect("it waits");
            self.run(now, &job, task, commands);
        }
    }
}

impl Job {
    /// Whether a task waits for a thread.
    fn waits(&self, task: TaskId) -> bool {
        self.going_on.contains(&task) || self.beginning.contains(&task)
    }

    /// A task no longer waits; false if it did not.
    fn withdraw(&mut self, task: TaskId) -> bool {
        let waited = self.waits(task);
        self.going_on.retain(|other| *other != task);
        self.beginning.retain(|other| *other != task);
        waited
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

    /// Each job has a queue at the engine, and the network serves the jobs that have fetches under way by their weights. Tasks
    /// hardly compute, and those of one job more than others': what it gets is what the network gives.
    #[test]
    fn jobs_whose_tasks_wait_for_the_network_get_its_bytes_by_their_weights() {
        let weights = [(1, 0.125), (2, 0.25), (5, 0.625)];
        for most in [8, 16] {
            let mut threads = Threads::new(4);
            let known = BTreeMap::from(weights.map(|(number, weight)| (job(number), weight)));
            threads.handle(Time(0), Event::Weights { weights: known }, &mut Vec::new());
            // Of each fetch the seconds at the full rate that are left; of each task that computes, when it is over.
            let mut fetching: BTreeMap<u64, VecDeque<(TaskId, f64)>> = BTreeMap::new();
            let mut computing: Vec<(Time, TaskId)> = Vec::new();
            let (mut of, mut fetched, mut got) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::<u64, f64>::new());
            let (mut next, mut now, step) = (0, Time(0), 0.005);
            while now < Time::from_secs_f64(120.0) {
                let mut commands = Vec::new();
                while threads.len() < most {
                    let jobs = weights.map(|(number, _)| job(number));
                    let chosen = threads.next(now, &jobs).unwrap().clone();
                    let number = weights.iter().find(|(number, _)| job(*number) == chosen).unwrap().0;
                    next += 1;
                    of.insert(next, number);
                    threads.handle(now, Event::Begins { task: next, job: chosen, priority: 1.0 }, &mut commands);
                }
                let over: Vec<TaskId> = computing.iter().filter(|(at, _)| *at <= now).map(|(_, task)| *task).collect();
                computing.retain(|(at, _)| *at > now);
                for task in over {
                    let event = match fetched.get(&task) {
                        Some(()) => Event::Ends { task },
                        None => {
                            fetching.entry(of[&task]).or_default().push_back((task, 0.15));
                            Event::Lends { task }
                        }
                    };
                    threads.handle(now, event, &mut commands);
                }
                let active: f64 = weights.iter().filter(|own| fetching.contains_key(&own.0)).map(|own| own.1).sum();
                for (number, weight) in weights {
                    let Some(queue) = fetching.get_mut(&number) else { continue };
                    *got.entry(number).or_default() += step * weight / active;
                    queue[0].1 -= step * weight / active;
                    if queue[0].1 <= 0.0 {
                        let (task, _) = queue.pop_front().unwrap();
                        fetched.insert(task, ());
                        threads.handle(now, Event::GoesOn { task }, &mut commands);
                    }
                    fetching.retain(|_, queue| !queue.is_empty());
                }
                for Command::Run { task } in commands {
                    let seconds = if of[&task] == 5 { 0.05 } else { 0.01 };
                    computing.push((now + Duration::from_secs_f64(seconds), task));
                }
                now = now + Duration::from_secs_f64(step);
            }
            let all: f64 = got.values().sum();
            for (number, weight) in weights {
                let part = got[&number] / all;
                assert!((part - weight).abs() < 0.04, "{most} places, {number}: {part}");
            }
        }
    }

    /// A job that has all places at first gives them up as its tasks end, and from then on each has the whole places of its
    /// part: also one whose tasks take long.
    #[test]
    fn no_job_is_without_its_places_for_what_it_had_before() {
        let weights = [(1, 0.125), (2, 0.25), (5, 0.625)];
        let mut threads = Threads::new(4);
        let known = BTreeMap::from(weights.map(|(number, weight)| (job(number), weight)));
        threads.handle(Time(0), Event::Weights { weights: known }, &mut Vec::new());
        // Tasks that are under way, and when they are over: those of the lightest job take four times as long.
        let mut under_way: BTreeMap<(Time, TaskId), u64> = BTreeMap::new();
        let mut next = 0;
        let mut begin = |threads: &mut Threads, under_way: &mut BTreeMap<(Time, TaskId), u64>, now, number| {
            next += 1;
            threads.handle(now, Event::Begins { task: next, job: job(number), priority: 1.0 }, &mut Vec::new());
            threads.handle(now, Event::Lends { task: next }, &mut Vec::new());
            let lasts = [8.0, 2.0, 2.0][usize::from(number > 1)] + next as f64 * 1e-3;
            under_way.insert((now + Duration::from_secs_f64(lasts), next), number);
        };
        for _ in 0..16 {
            begin(&mut threads, &mut under_way, Time(0), 5);
        }
        let mut settled = false;
        while let Some(((now, task), _)) =
            under_way.pop_first().filter(|((now, _), _)| *now < Time::from_secs_f64(100.0))
        {
            threads.handle(now, Event::Ends { task }, &mut Vec::new());
            let chosen = threads.next(now, &weights.map(|(number, _)| job(number))).unwrap().clone();
            let number = weights.iter().find(|(number, _)| job(*number) == chosen).unwrap().0;
            begin(&mut threads, &mut under_way, now, number);
            let counts = [1, 2, 5].map(|number| under_way.values().filter(|own| **own == number).count());
            settled |= counts == [2, 4, 10];
            assert!(!settled || counts == [2, 4, 10], "{counts:?} at {now:?}");
        }
        assert!(settled);
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
        // A task that waits too long continues anyway; then there is one thread less for the others.
        assert_eq!(said(begins(4)), NONE);
        assert_eq!(said(Event::Late { task: 4 }), [4]);
        assert_eq!(said(Event::Late { task: 4 }), NONE);
        assert_eq!(said(Event::Ends { task: 4 }), NONE);
        // A task that ends while it waits, or has released its thread, leaves nothing.
        assert_eq!(said(Event::Lends { task: 1 }), [3]);
        assert_eq!(said(Event::Ends { task: 1 }), NONE);
        assert_eq!(said(Event::Ends { task: 3 }), NONE);
        assert_eq!(said(Event::Ends { task: 3 }), NONE);
        assert!(threads.is_empty() && threads.jobs.is_empty());
    }

    /// Any events in any order: never more than so many run, none is idle while a task waits, each runs once for
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
                assert_eq!(runs.len(), threads.running.len());
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
