//! The threads of a worker for Python: whose task runs next.

use crate::guarded;
use mission_core::threads::{self, Command, Event, TaskId};
use mission_core::types::JobId;
use mission_core::units::Time;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// What is said to it gives the tasks that have a thread from now on.
#[pyclass(frozen)]
pub struct Threads(Mutex<threads::Threads>);

#[pymethods]
impl Threads {
    #[new]
    fn new(threads: usize) -> Self {
        Threads(Mutex::new(threads::Threads::new(threads)))
    }

    fn weights(&self, now: f64, weights: BTreeMap<String, f64>) -> PyResult<Vec<TaskId>> {
        let weights = weights.into_iter().map(|(job, weight)| (job.into(), weight)).collect();
        self.handle(now, Event::Weights { weights })
    }

    fn begins(&self, now: f64, task: TaskId, job: &str, priority: f64) -> PyResult<Vec<TaskId>> {
        self.handle(now, Event::Begins { task, job: job.into(), priority })
    }

    fn lends(&self, now: f64, task: TaskId) -> PyResult<Vec<TaskId>> {
        self.handle(now, Event::Lends { task })
    }

    fn goes_on(&self, now: f64, task: TaskId) -> PyResult<Vec<TaskId>> {
        self.handle(now, Event::GoesOn { task })
    }

    fn late(&self, now: f64, task: TaskId) -> PyResult<Vec<TaskId>> {
        self.handle(now, Event::Late { task })
    }

    fn ends(&self, now: f64, task: TaskId) -> PyResult<Vec<TaskId>> {
        self.handle(now, Event::Ends { task })
    }

    /// Of several jobs, whose task is to be begun next.
    fn next(&self, now: f64, jobs: Vec<String>) -> Option<String> {
        let jobs: Vec<JobId> = jobs.into_iter().map(Into::into).collect();
        self.lock().next(Time::from_secs_f64(now), &jobs).map(ToString::to_string)
    }

    /// How many tasks more than threads may have begun.
    fn ahead(&self, live_bytes: u64, limit_bytes: u64) -> usize {
        self.lock().ahead(live_bytes, limit_bytes)
    }

    /// How many tasks may have lent their threads at most.
    #[getter]
    fn most(&self) -> usize {
        self.lock().most()
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }
}

impl Threads {
    fn handle(&self, now: f64, event: Event) -> PyResult<Vec<TaskId>> {
        guarded(|| {
            let mut commands = Vec::new();
            self.lock().handle(Time::from_secs_f64(now), event, &mut commands);
            commands.into_iter().map(|Command::Run { task }| task).collect()
        })
    }

    fn lock(&self) -> MutexGuard<'_, threads::Threads> {
        self.0.lock().expect("no panic while held")
    }
}
