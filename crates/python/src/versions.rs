//! Versions of what the scheduler's plug-in says to those of the workers.

use mission_core::versions::{Inbox as CoreInbox, Outbox as CoreOutbox, Received};
use pyo3::prelude::*;
use std::sync::Mutex;

/// What was said to each worker, until it has seen it.
#[pyclass(frozen)]
#[derive(Default)]
pub struct Outbox(Mutex<CoreOutbox<String, Py<PyAny>>>);

#[pymethods]
impl Outbox {
    #[new]
    fn new() -> Outbox {
        Outbox::default()
    }

    fn send(&self, receiver: String, message: Py<PyAny>) -> u64 {
        self.lock().send(&receiver, message)
    }

    fn last(&self, receiver: String) -> u64 {
        self.lock().last(&receiver)
    }

    fn seen(&self, receiver: String, version: u64) {
        self.lock().seen(&receiver, version);
    }

    fn after(&self, py: Python<'_>, receiver: String, version: u64) -> Vec<(u64, Py<PyAny>)> {
        self.lock().after(&receiver, version).map(|(number, message)| (number, message.clone_ref(py))).collect()
    }

    fn forget(&self, receiver: String) {
        self.lock().forget(&receiver);
    }
}

impl Outbox {
    fn lock(&self) -> std::sync::MutexGuard<'_, CoreOutbox<String, Py<PyAny>>> {
        self.0.lock().expect("no panic while held")
    }
}

/// The versions that a worker has seen.
#[pyclass(frozen)]
pub struct Inbox(Mutex<CoreInbox>);

#[pymethods]
impl Inbox {
    #[new]
    fn new(version: u64) -> Inbox {
        Inbox(Mutex::new(CoreInbox::from(version)))
    }

    /// `in-order`: it is in force; `old`: it was seen before; `gap`: something is missing before it.
    fn receive(&self, version: u64) -> &'static str {
        match self.0.lock().expect("no panic while held").receive(version) {
            Received::InOrder => "in-order",
            Received::Old => "old",
            Received::Gap => "gap",
        }
    }

    #[getter]
    fn last(&self) -> u64 {
        self.0.lock().expect("no panic while held").last()
    }
}
