//! The threads of a worker ([`mission_core::threads`]) in real time: a task without a turn waits in its thread.

use mission_core::defaults::LATE_TURN;
use mission_core::threads::{self, Command, Event, TaskId};
use mission_core::types::JobId;
use mission_core::units::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub struct Threads {
    state: Mutex<State>,
    /// A task's turn has come.
    turn: Condvar,
    started: Instant,
}

struct State {
    threads: threads::Threads,
    waiting: BTreeSet<TaskId>,
    closed: bool,
}

impl Threads {
    pub fn new(threads: usize) -> Threads {
        let state = State { threads: threads::Threads::new(threads), waiting: BTreeSet::new(), closed: false };
        Threads { state: Mutex::new(state), turn: Condvar::new(), started: Instant::now() }
    }

    /// Waits until a task may begin; `priority`: its job's.
    pub fn begins(&self, task: TaskId, job: JobId, priority: f64) {
        self.wait(task, Event::Begins { task, job, priority });
    }

    /// A task waits for the network: another one may use its thread.
    pub fn lends(&self, task: TaskId) {
        self.say(Event::Lends { task });
    }

    /// The task has what it waited for. Waits until there is a thread again.
    pub fn goes_on(&self, task: TaskId) {
        self.wait(task, Event::GoesOn { task });
    }

    /// The task is over, or leaves the threads.
    pub fn ends(&self, task: TaskId) {
        self.say(Event::Ends { task });
    }

    /// Sets the current weights of jobs.
    pub fn weigh(&self, weights: BTreeMap<JobId, f64>) {
        self.say(Event::Weights { weights });
    }

    /// Of several jobs, whose task is to be begun next.
    pub fn next(&self, jobs: &[JobId]) -> Option<JobId> {
        let now = self.now();
        self.lock().threads.next(now, jobs).cloned()
    }

    /// How many tasks more than threads may have begun.
    pub fn ahead(&self, live_bytes: u64, limit_bytes: u64) -> usize {
        self.lock().threads.ahead(live_bytes, limit_bytes)
    }

    /// How many tasks may have released their threads.
    pub fn most(&self) -> usize {
        self.lock().threads.most()
    }

    /// Tasks that have begun and are not over.
    pub fn len(&self) -> usize {
        self.lock().threads.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ends all waits for turns.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.waiting.clear();
        self.turn.notify_all();
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    fn wait(&self, task: TaskId, event: Event) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        state.waiting.insert(task);
        self.handle(&mut state, event);
        let since = Instant::now();
        while state.waiting.contains(&task) {
            // Turns of others wake this thread, too; they must not delay its own.
            let left = LATE_TURN.saturating_sub(since.elapsed());
            state = self.turn.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            if since.elapsed() >= LATE_TURN && state.waiting.contains(&task) {
                // The running tasks may wait for this one: for a lock that it holds, for instance.
                self.handle(&mut state, Event::Late { task });
            }
        }
    }

    fn say(&self, event: Event) {
        self.handle(&mut self.lock(), event);
    }

    fn handle(&self, state: &mut State, event: Event) {
        let mut commands = Vec::new();
        state.threads.handle(self.now(), event, &mut commands);
        for Command::Run { task } in commands {
            state.waiting.remove(&task);
            self.turn.notify_all();
        }
    }

    fn now(&self) -> Time {
        Time(self.started.elapsed().as_nanos() as u64)
    }

    /// A panic under the lock is one failure: the next question is answered from what stands there.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
