//! Lanes between two workers for Python: of which job the next message is.

use crate::guarded;
use mission_core::lanes;
use mission_core::types::JobId;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[pyclass(frozen)]
#[derive(Default)]
pub struct Lanes(Mutex<lanes::Lanes>);

impl Lanes {
    /// A panic under the lock is one failure: the next question is answered from what stands there.
    fn lock(&self) -> MutexGuard<'_, lanes::Lanes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Lanes {
    #[new]
    fn new() -> Self {
        Lanes::default()
    }

    fn weigh(&self, weights: BTreeMap<String, f64>) -> PyResult<()> {
        let weights = weights.into_iter().map(|(job, weight)| (job.into(), weight)).collect();
        guarded(|| self.lock().weigh(weights))
    }

    fn free(&self, peer: &str, job: &str) -> PyResult<Option<u32>> {
        guarded(|| self.lock().free(peer, &job.into()))
    }

    fn begins(&self, peer: String, job: &str, number: u32, bytes: u64) -> PyResult<()> {
        guarded(|| self.lock().begins(peer, job.into(), number, bytes))
    }

    fn ends(&self, peer: String, job: &str, number: u32) -> PyResult<()> {
        guarded(|| self.lock().ends(peer, job.into(), number))
    }

    fn next(&self, jobs: Vec<(String, f64)>) -> PyResult<Option<String>> {
        let jobs: Vec<(JobId, f64)> = jobs.into_iter().map(|(job, priority)| (job.into(), priority)).collect();
        guarded(|| self.lock().next(&jobs).map(|job| job.to_string()))
    }
}
