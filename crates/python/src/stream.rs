//! Streams for Python: their writers and readers.

use crate::endpoint::{Cancelled, Endpoint, OfIo, StreamFailed, exception, parse_demands};
use crate::memory::{Part, buffer_of, bytes_of};
use crate::{bad_input, detached};
use mission_core::pattern::Asked;
use mission_core::stream::{End, ReaderId};
use mission_core::types::{JobId, TransferId};
use mission_transport::endpoint;
use mission_transport::fetcher::stream::{Next, ReadError, Reader, Reading};
use mission_transport::object::ObjectId;
use mission_transport::streams::WriteError;
use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, Weak};

/// A stream that this process writes.
#[pyclass(frozen)]
pub struct StreamWriter {
    /// It may close while tasks still hold their streams.
    endpoint: Weak<endpoint::Endpoint>,
    id: ObjectId,
}

/// A part of a stream that is read.
#[pyclass(frozen)]
pub struct StreamReader {
    /// `None` once it is closed.
    inner: Mutex<Option<Arc<Reader>>>,
}

#[pymethods]
impl StreamWriter {
    #[new]
    fn new(
        py: Python<'_>,
        endpoint: &Endpoint,
        job: &str,
        demands: &str,
        parts: u32,
        ahead_bytes: u64,
        keep: bool,
    ) -> PyResult<Self> {
        let (endpoint, job, demands) = (endpoint.get()?, JobId::from(job), parse_demands(demands)?);
        let id = detached(py, || endpoint.open_stream(&job, &demands, parts, ahead_bytes, keep))?;
        Ok(StreamWriter { id: id.map_err(PyOSError::new_err_of)?, endpoint: Arc::downgrade(&endpoint) })
    }

    #[getter]
    fn object(&self) -> String {
        self.id.to_string()
    }

    fn write(&self, py: Python<'_>, part: u32, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let buffer = buffer_of(buffer)?;
        // SAFETY: `buffer` holds it until the copy is made, and the caller was told not to write meanwhile.
        let bytes = unsafe { bytes_of(&buffer) }?;
        let mut signal = None;
        let endpoint = self.endpoint.upgrade().ok_or_else(|| Cancelled::new_err("this worker closes"))?;
        let written = detached(py, || {
            let interrupted = || Python::attach(|py| py.check_signals().map_err(|error| signal = Some(error)).is_err());
            endpoint.streams.write(&self.id, part, &bytes, interrupted)
        })?;
        written.map_err(|error| match error {
            WriteError::Over(why) => Cancelled::new_err(why),
            WriteError::Interrupted => signal.take().unwrap_or_else(|| PyRuntimeError::new_err("interrupted")),
            WriteError::Io(error) => PyOSError::new_err_of(error),
        })
    }

    /// Those who read are told that it is lost.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let Some(endpoint) = self.endpoint.upgrade() else { return Ok(()) };
        detached(py, || _ = endpoint.free(&self.id))
    }

    #[pyo3(signature = (error=None))]
    fn end(&self, py: Python<'_>, error: Option<String>) -> PyResult<()> {
        let end = error.map_or(End::Complete, End::Failed);
        let Some(endpoint) = self.endpoint.upgrade() else { return Ok(()) };
        detached(py, || endpoint.streams.end(&self.id, end))?.map_err(PyOSError::new_err_of)
    }
}

#[pymethods]
impl StreamReader {
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        endpoint: &Endpoint,
        job: &str,
        source: &str,
        to: &str,
        demands: &str,
        stream: &str,
        part: u32,
        part_count: u32,
        address: &str,
        receiver: &str,
        run: u64,
    ) -> PyResult<Self> {
        let endpoint = endpoint.get()?;
        let reading = Reading {
            stream: stream.parse().map_err(bad_input)?,
            part,
            address: address.parse().map_err(bad_input)?,
            reader: ReaderId { task: mission_transport::checksum::of(receiver.as_bytes()), run },
            transfer: TransferId { job: job.into(), from: source.into(), to: to.into() },
            demands: parse_demands(demands)?,
        };
        let asked = Asked {
            receiver: receiver.into(),
            objects: 1,
            object: stream.into(),
            part,
            parts: part_count,
            whole: part_count == 1,
        };
        let reader = detached(py, || {
            endpoint.asks(reading.transfer.clone(), asked);
            Reader::new(endpoint.fetcher.clone(), reading)
        })?;
        Ok(StreamReader { inner: Mutex::new(Some(Arc::new(reader.map_err(PyOSError::new_err_of)?))) })
    }

    /// The next chunk and the sizes of its writes; (`None`, `None`): the end, or, without `wait`, nothing yet, as the last says.
    #[pyo3(signature = (wait=true))]
    fn next(&self, py: Python<'_>, wait: bool) -> PyResult<(Option<Part>, Option<Part>, bool)> {
        let inner = self.inner.lock().expect("no panic while held").clone();
        let inner = inner.ok_or_else(|| PyRuntimeError::new_err("this stream is read no more"))?;
        let mut signal = None;
        let next = detached(py, || {
            let interrupted = || Python::attach(|py| py.check_signals().map_err(|error| signal = Some(error)).is_err());
            inner.next(wait, interrupted)
        })?;
        let part = |inner| Part { inner };
        match next {
            Ok(Next::Chunk(arrived)) => Ok((Some(part(arrived.bytes)), arrived.sizes.map(part), true)),
            Ok(Next::Later) => Ok((None, None, true)),
            Ok(Next::End) => Ok((None, None, false)),
            Err(ReadError::Writer(why)) => Err(StreamFailed::new_err(why)),
            Err(ReadError::Fetch(error)) => Err(signal.take().unwrap_or_else(|| exception(error))),
        }
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || drop(self.inner.lock().expect("no panic while held").take()))
    }
}
