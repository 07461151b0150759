//! The threads of a worker for Python: whose task runs next. What waits does so without Python's lock.

use crate::{detached, guarded};
use mission_core::threads::TaskId;
use mission_core::types::JobId;
use mission_transport::threads;
use pyo3::prelude::*;
use std::collections::BTreeMap;

#[pyclass(frozen)]
pub struct Threads(threads::Threads);

#[pymethods]
impl Threads {
    #[new]
    fn new(threads: usize) -> Self {
        Threads(threads::Threads::new(threads))
    }

    fn begins(&self, py: Python<'_>, task: TaskId, job: &str, priority: f64) -> PyResult<()> {
        let job: JobId = job.into();
        detached(py, || self.0.begins(task, job, priority))
    }

    fn lends(&self, task: TaskId) -> PyResult<()> {
        guarded(|| self.0.lends(task))
    }

    fn goes_on(&self, py: Python<'_>, task: TaskId) -> PyResult<()> {
        detached(py, || self.0.goes_on(task))
    }

    fn ends(&self, task: TaskId) -> PyResult<()> {
        guarded(|| self.0.ends(task))
    }

    fn weigh(&self, weights: BTreeMap<String, f64>) -> PyResult<()> {
        let weights = weights.into_iter().map(|(job, weight)| (job.into(), weight)).collect();
        guarded(|| self.0.weigh(weights))
    }

    fn next(&self, jobs: Vec<String>) -> PyResult<Option<String>> {
        let jobs: Vec<JobId> = jobs.into_iter().map(Into::into).collect();
        guarded(|| self.0.next(&jobs).map(|job| job.to_string()))
    }

    fn ahead(&self, live_bytes: u64, limit_bytes: u64) -> PyResult<usize> {
        guarded(|| self.0.ahead(live_bytes, limit_bytes))
    }

    fn close(&self) -> PyResult<()> {
        guarded(|| self.0.close())
    }

    #[getter]
    fn closed(&self) -> PyResult<bool> {
        guarded(|| self.0.is_closed())
    }

    #[getter]
    fn most(&self) -> PyResult<usize> {
        guarded(|| self.0.most())
    }

    fn __len__(&self) -> PyResult<usize> {
        guarded(|| self.0.len())
    }
}
