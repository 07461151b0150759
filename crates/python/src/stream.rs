//! Streams for Python: their writers and readers.

use crate::detached;
use crate::endpoint::{Cancelled, OfIo, StreamFailed, exception};
use crate::memory::{Part, buffer_of, bytes_of};
use mission_core::pattern::Asked;
use mission_core::stream::End;
use mission_core::types::{Demands, JobId};
use mission_transport::endpoint;
use mission_transport::fetcher::stream::{Next, ReadError, Reader, Reading};
use mission_transport::object::ObjectId;
use mission_transport::prefix::{Differs, Prefix};
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

impl StreamWriter {
    pub fn open(
        py: Python<'_>,
        endpoint: &Arc<endpoint::Endpoint>,
        (job, demands): (JobId, Demands),
        parts: u32,
        ahead_bytes: u64,
        keep: bool,
    ) -> PyResult<Self> {
        let id = detached(py, || endpoint.open_stream(&job, &demands, parts, ahead_bytes, keep))?;
        Ok(StreamWriter { id: id.map_err(PyOSError::new_err_of)?, endpoint: Arc::downgrade(endpoint) })
    }
}

#[pymethods]
impl StreamWriter {
    #[getter]
    fn object(&self) -> String {
        self.id.to_string()
    }

    fn write(&self, py: Python<'_>, part: u32, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let buffer = buffer_of(buffer)?;
        // SAFETY: `buffer` holds it until the copy is made, and the caller must not write meanwhile.
        let bytes = unsafe { bytes_of(&buffer) }?;
        let mut signal = None;
        let endpoint = self.endpoint.upgrade().ok_or_else(|| Cancelled::new_err("this worker is closing"))?;
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

    /// Frees the stream; readers get an error that it is lost.
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

impl StreamReader {
    /// `receiver`: who asks, for the pattern of the transfer; of so many parts.
    pub fn begin(
        py: Python<'_>,
        endpoint: &Arc<endpoint::Endpoint>,
        reading: Reading,
        receiver: &str,
        part_count: u32,
    ) -> PyResult<Self> {
        let asked = Asked {
            receiver: receiver.into(),
            objects: 1,
            object: reading.stream.to_string().into(),
            part: reading.part,
            parts: part_count,
            whole: part_count == 1,
        };
        let reader = detached(py, || {
            endpoint.asks(reading.transfer.clone(), asked);
            Reader::new(endpoint.fetcher.clone(), reading)
        })?;
        Ok(StreamReader { inner: Mutex::new(Some(Arc::new(reader.map_err(PyOSError::new_err_of)?))) })
    }
}

#[pymethods]
impl StreamReader {
    /// Returns the next chunk and the sizes of its writes; (`None`, `None`): the end, or, without `wait`, nothing yet;
    /// the third value distinguishes them.
    #[pyo3(signature = (wait=true))]
    fn next(&self, py: Python<'_>, wait: bool) -> PyResult<(Option<Part>, Option<Part>, bool)> {
        let inner = self.inner.lock().expect("no panic while held").clone();
        let inner = inner.ok_or_else(|| PyRuntimeError::new_err("this reader of the stream is closed"))?;
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

/// What a task has read of a part of a stream whose writer writes the same each time.
#[pyclass(frozen)]
pub struct StreamPrefix(Mutex<Prefix>);

#[pymethods]
impl StreamPrefix {
    #[new]
    fn new() -> Self {
        StreamPrefix(Mutex::default())
    }

    /// How many writes of this chunk, from its first, the task has read before.
    #[pyo3(signature = (chunk, sizes))]
    fn take(&self, py: Python<'_>, chunk: &Part, sizes: Option<&Part>) -> PyResult<usize> {
        let (mut rest, sizes) = (chunk.inner.bytes(), sizes.map(|sizes| sizes.inner.bytes()));
        let whole = [(rest.len() as u64).to_le_bytes()];
        let sizes = sizes.map_or(&whole[..], |sizes| sizes.as_chunks::<8>().0);
        let writes = sizes.iter().map(move |size| {
            // Sizes that make no sense differ from what was written before.
            let (write, more) = rest.split_at(rest.len().min(u64::from_le_bytes(*size) as usize));
            rest = more;
            write
        });
        detached(py, || self.0.lock().expect("no panic while held").take(writes))?.map_err(|Differs| differs())
    }

    /// Another run of the writer is read from its beginning.
    fn begin_again(&self) {
        self.0.lock().expect("no panic while held").begin_again();
    }

    /// The stream has ended: the task has all that it read before.
    fn end(&self) -> PyResult<()> {
        if self.0.lock().expect("no panic while held").is_behind() { Err(differs()) } else { Ok(()) }
    }
}

fn differs() -> PyErr {
    StreamFailed::new_err(
        "its writer was lost and ran again, and did not write the same as before: a stream that is not the same each time \
         is not to be opened with deterministic=True",
    )
}
