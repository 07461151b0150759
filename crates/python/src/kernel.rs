//! What runs in the kernel, for Python. Calls concern the network namespace of the calling thread.

use crate::{bad_input, detached};
use mission_kernel::{bond, dctcp, delay, switch, transport};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use std::sync::Mutex;
use std::time::Duration;

/// DCTCP as a congestion control of this machine, until this object is gone, or its pin where it has one.
#[pyclass]
pub struct Dctcp(Option<dctcp::Registration>);

#[pymethods]
impl Dctcp {
    #[new]
    fn new() -> PyResult<Dctcp> {
        dctcp::Registration::new().map(|registration| Dctcp(Some(registration))).map_err(failed)
    }

    fn pin(&mut self, path: std::path::PathBuf) -> PyResult<()> {
        self.0.take().map_or(Ok(()), |registration| registration.pin(&path)).map_err(failed)
    }

    fn close(&mut self) {
        self.0 = None;
    }

    /// Alpha, in 1/1,024, after a window: RFC 8257, 3.3.
    #[staticmethod]
    fn alpha_after(alpha: u32, marked: u32, all: u32) -> PyResult<u32> {
        dctcp::alpha_after(alpha, marked, all).map_err(failed)
    }
}

/// The ports of one bridge.
#[pyclass(frozen)]
pub struct Switch(switch::Switch);

#[pymethods]
impl Switch {
    /// `groups`: JSON, as `mission_kernel::switch::Group`.
    #[staticmethod]
    fn build(groups: &str) -> PyResult<Switch> {
        let groups: Vec<switch::Group> = serde_json::from_str(groups).map_err(bad_input)?;
        switch::Switch::build(&groups).map(Switch).map_err(failed)
    }

    /// The switch of which the interface is a port.
    #[staticmethod]
    fn open(interface: u32) -> PyResult<Switch> {
        switch::Switch::open(interface).map(Switch).map_err(failed)
    }

    /// Changes a port while it runs; `settings`: JSON.
    fn set(&self, interface: u32, settings: &str) -> PyResult<()> {
        let settings = serde_json::from_str(settings).map_err(bad_input)?;
        self.0.set(interface, &settings).map_err(failed)
    }

    /// JSON: what each port has counted.
    fn counters(&self) -> PyResult<String> {
        serde_json::to_string(&self.0.counters().map_err(failed)?).map_err(bad_input)
    }

    fn trace(&self, on: bool) -> PyResult<()> {
        self.0.trace(on).map_err(failed)
    }

    /// (nanoseconds, interface, bytes queued, bytes of real backlog) since the last call.
    fn samples(&self) -> PyResult<Vec<(u64, u32, u32, u32)>> {
        self.0.samples().map_err(failed)
    }
}

/// Delay lines of hosts' links, until they are closed.
#[pyclass(frozen)]
pub struct Delays(Mutex<Option<delay::Delays>>);

#[pymethods]
impl Delays {
    /// `pairs`: indexes of the interfaces towards a host and towards the switch; `frames_max`: most that a line may hold.
    #[new]
    fn new(pairs: Vec<(u32, u32)>, delay_us: u64, frames_max: usize) -> PyResult<Delays> {
        let lines = delay::Delays::start(&pairs, Duration::from_micros(delay_us), frames_max)?;
        Ok(Delays(Mutex::new(Some(lines))))
    }

    /// JSON: what all lines have counted together, as `mission_kernel::delay::Counted`; `null` once they are closed.
    fn counted(&self) -> PyResult<String> {
        let lines = self.0.lock().expect("no panic while held");
        serde_json::to_string(&lines.as_ref().map(delay::Delays::counted)).map_err(bad_input)
    }

    /// Ends the thread; frames under way are lost.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let lines = self.0.lock().expect("no panic while held").take();
        detached(py, || drop(lines))
    }
}

/// Has an interface's TCP and UDP compute checksums itself, so that frames can be read as they are on a wire.
#[pyfunction]
pub fn checksums_off(interface: &str) -> PyResult<()> {
    Ok(delay::checksums_off(interface)?)
}

/// Gives the sockets of a cgroup another transport, as long as it lives.
#[pyclass(frozen)]
pub struct Setter(transport::Setter);

#[pymethods]
impl Setter {
    /// `wanted`: JSON, as `mission_kernel::transport::Wanted`.
    #[new]
    fn new(cgroup: std::path::PathBuf, wanted: &str) -> PyResult<Setter> {
        let wanted = serde_json::from_str(wanted).map_err(bad_input)?;
        transport::Setter::new(&cgroup, &wanted).map(Setter).map_err(failed)
    }

    /// JSON: what connections were found to have, and how many.
    fn agreed(&self) -> PyResult<String> {
        serde_json::to_string(&self.0.agreed().map_err(failed)?).map_err(bad_input)
    }
}

/// Bytes of the library that gives a program Multipath TCP.
#[pyfunction]
pub fn mptcp_preload() -> &'static [u8] {
    transport::MPTCP_PRELOAD
}

/// Bonds pairs of interfaces, given by their indexes: packets take their links in turn.
#[pyfunction(name = "bond")]
pub fn bond_pairs(pairs: Vec<(u32, u32)>) -> PyResult<()> {
    bond::bond(&pairs).map_err(failed)
}

fn failed(error: switch::Error) -> PyErr {
    PyOSError::new_err(format!("{error:#}"))
}
