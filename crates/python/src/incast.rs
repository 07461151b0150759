//! Synchronized reads, and the model of incast, for Python.

use crate::{bad_input, detached};
use mission_core::incast::{self, Form, Path, advice};
use mission_transport::incast::{Limits, Reads, Server, measure};
use pyo3::exceptions::{PyConnectionError, PyKeyboardInterrupt, PyOSError};
use pyo3::prelude::*;
use std::net::TcpListener;
use std::os::fd::FromRawFd;
use std::sync::Mutex;

/// Serves synthetic bytes on a socket that listens, in threads of the calling thread's network namespace.
#[pyclass(frozen)]
pub struct IncastServer(Mutex<Option<Server>>);

#[pymethods]
impl IncastServer {
    /// `descriptor` belongs to the server from now on (`socket.detach()`).
    #[new]
    #[pyo3(signature = (descriptor, token, connections, bytes, pace=None))]
    fn new(descriptor: i32, token: &[u8], connections: usize, bytes: u64, pace: Option<u64>) -> PyResult<Self> {
        // SAFETY: the caller has given it away.
        let listener = unsafe { TcpListener::from_raw_fd(descriptor) };
        let limits = Limits { connections, bytes, pace_bits_per_sec: pace };
        let server = Server::start(listener, token, limits).map_err(|error| PyOSError::new_err(error.to_string()))?;
        Ok(IncastServer(Mutex::new(Some(server))))
    }

    /// State of each connection with bytes in flight; a JSON list of `mission_transport::incast::Variables`.
    fn variables(&self) -> PyResult<String> {
        let found = self.0.lock().expect("no panic while held").as_ref().map(Server::variables);
        serde_json::to_string(&found.unwrap_or_default()).map_err(bad_input)
    }

    /// Bytes sent so far, and connections that are open.
    fn served(&self) -> (u64, usize) {
        self.0.lock().expect("no panic while held").as_ref().map_or((0, 0), Server::served)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let server = self.0.lock().expect("no panic while held").take();
        detached(py, || drop(server))
    }
}

/// Reads blocks from all senders; `reads` and the result are JSON (`mission_transport::incast`). `watch` receives the
/// number of blocks read, ten times a second; if it returns true, the measurement ends.
#[pyfunction]
pub fn incast_measure(py: Python<'_>, reads: &str, token: &[u8], watch: Py<PyAny>) -> PyResult<String> {
    let reads: Reads = serde_json::from_str(reads).map_err(bad_input)?;
    reads.deadline().map_err(bad_input)?;
    let mut raised = None;
    let measured = detached(py, || {
        let mut watch = |blocks: u32| {
            Python::attach(|py| {
                watch.call1(py, (blocks,)).and_then(|ends| ends.is_truthy(py)).unwrap_or_else(|error| {
                    raised = Some(error);
                    true
                })
            })
        };
        measure(&reads, token, &mut watch)
    })?;
    match raised {
        // An interrupt still returns the results so far.
        Some(error) if !Python::attach(|py| error.is_instance_of::<PyKeyboardInterrupt>(py)) => Err(error),
        _ => serde_json::to_string(&measured.map_err(PyConnectionError::new_err)?).map_err(bad_input),
    }
}

/// Predicts whether incast collapses goodput, and what each mitigation would give; everything but the number is JSON
/// (`mission_core::incast::advice`).
#[pyfunction]
pub fn incast_advise(path: &str, form: &str, senders: u32) -> PyResult<String> {
    let path: Path = serde_json::from_str(path).map_err(bad_input)?;
    let form: Form = serde_json::from_str(form).map_err(bad_input)?;
    serde_json::to_string(&advice::advise(&path, form, senders).map_err(bad_input)?).map_err(bad_input)
}

/// Evaluates the model; `question` and the answer are JSON (`mission_core::incast`).
#[pyfunction]
pub fn incast_predict(question: &str) -> PyResult<String> {
    let question = serde_json::from_str(question).map_err(bad_input)?;
    serde_json::to_string(&incast::predict(&question).map_err(bad_input)?).map_err(bad_input)
}
