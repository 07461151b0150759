//! A replica of the control service, for `mission serve`.

use crate::{bad_input, detached};
use mission_service::service;
use pyo3::prelude::*;

/// A replica that runs in threads of its own until it is stopped.
#[pyclass(frozen)]
pub struct Service(service::Service);

#[pymethods]
impl Service {
    /// `settings`: `mission_service::settings::Settings` as JSON.
    #[new]
    fn new(py: Python<'_>, settings: &str) -> PyResult<Self> {
        let settings = serde_json::from_str(settings).map_err(bad_input)?;
        detached(py, || service::Service::start(settings))?.map(Service).map_err(bad_input)
    }

    #[getter]
    fn port(&self) -> u16 {
        self.0.address().port()
    }

    /// As JSON; `None`: it has stopped.
    fn status(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let status = detached(py, || self.0.status())?;
        status.map(|status| serde_json::to_string(&status).map_err(bad_input)).transpose()
    }

    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.0.stop())
    }
}
