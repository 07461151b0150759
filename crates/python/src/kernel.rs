//! What runs in the kernel, for Python. Calls concern the network namespace of the calling thread.

use crate::bad_input;
use mission_kernel::{bond, dctcp, switch, transport};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

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
