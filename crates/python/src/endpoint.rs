//! The data plane of a process for Python.

use crate::decisions::Flows;
use crate::memory::{Part, Segment, buffer_of, bytes_of};
use crate::stream::{StreamReader, StreamWriter};
use crate::{bad_input, columns, detached};
use mission_core::host::fetches::FetchError;
use mission_core::mission;
use mission_core::pattern::Asked;
use mission_core::stream::ReaderId;
use mission_core::types::{Demands, JobId, TransferId};
use mission_transport::control::Location;
use mission_transport::endpoint;
use mission_transport::fetcher::stream::Reading;
use mission_transport::news::News;
use mission_transport::object::ObjectId;
use mission_transport::parts::{FetchRequest, Wanted};
use mission_transport::tls::Identity;
use pyo3::create_exception;
use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, RwLock};

create_exception!(mission_control, TransferError, PyRuntimeError);
create_exception!(mission_control, Lost, TransferError);
create_exception!(mission_control, Unreachable, TransferError);
create_exception!(mission_control, Damaged, TransferError);
create_exception!(mission_control, Denied, TransferError);
create_exception!(mission_control, Cancelled, TransferError);
create_exception!(mission_control, StreamFailed, TransferError);

/// Object, part, length and addresses.
fn wanted((object, part, len, addresses): (String, u32, u64, Vec<String>)) -> PyResult<Wanted> {
    let object: ObjectId = object.parse().map_err(bad_input)?;
    let addresses = addresses.iter().map(|address| address.parse().map_err(bad_input)).collect::<PyResult<_>>()?;
    Ok(Wanted { object, part, len, addresses })
}

#[pyclass(frozen)]
pub struct Endpoint {
    /// `None` once it is closed.
    inner: RwLock<Option<Arc<endpoint::Endpoint>>>,
    /// `None` until an event loop wants to know.
    news: Mutex<Option<News>>,
}

#[pymethods]
impl Endpoint {
    #[new]
    #[pyo3(signature = (host, token, *, memory_limit, spool_folder, flows_per_host, send_limit=None, ca=None, certificate=None, key=None, requires_encryption=false, ports=vec![0], cluster=None, host_token=None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        host: &str,
        token: Vec<u8>,
        memory_limit: u64,
        spool_folder: std::path::PathBuf,
        flows_per_host: Flows,
        send_limit: Option<u64>,
        ca: Option<Vec<u8>>,
        certificate: Option<Vec<u8>>,
        key: Option<Vec<u8>>,
        requires_encryption: bool,
        ports: Vec<u16>,
        cluster: Option<String>,
        host_token: Option<Vec<u8>>,
    ) -> PyResult<Self> {
        let identity = match (ca, certificate, key) {
            (Some(ca), Some(certificate), Some(key)) => Some(Identity { ca, certificate, key }),
            (None, None, None) => None,
            _ => return Err(bad_input("an identity is ca, certificate and key: give all three or none")),
        };
        let host =
            host.parse().map_err(|_| bad_input(format!("{host:?} is not an address: use one such as 127.0.0.1")))?;
        let settings = endpoint::Settings {
            host,
            ports,
            token,
            cluster,
            host_token,
            identity,
            requires_encryption,
            memory_limit,
            spool_folder,
            flows_per_host: flows_per_host.get()?,
            send_limit,
        };
        // It may wait for the host's arbiter.
        let inner = detached(py, || endpoint::Endpoint::new(settings))?.map_err(PyOSError::new_err_of)?;
        Ok(Endpoint { inner: RwLock::new(Some(Arc::new(inner))), news: Mutex::new(None) })
    }

    #[getter]
    fn address(&self) -> PyResult<String> {
        Ok(self.get()?.address().to_string())
    }

    #[getter]
    fn host(&self) -> PyResult<String> {
        Ok(self.get()?.host.clone())
    }

    /// Problems: what this data plane cannot do, and why; everything else works.
    #[getter]
    fn problems(&self) -> PyResult<Vec<String>> {
        Ok(self.get()?.problems.clone())
    }

    #[getter]
    fn environment(&self) -> PyResult<String> {
        serde_json::to_string(&self.get()?.environment).map_err(bad_input)
    }

    /// Allocates a segment that `job` is going to put; without a job, for the caller's own use. Segments of one cohort
    /// are freed at about the same time.
    #[pyo3(signature = (len, job=None, cohort=0))]
    fn allocate(&self, py: Python<'_>, len: usize, job: Option<(String, String)>, cohort: u32) -> PyResult<Segment> {
        let endpoint = self.get()?;
        let job =
            job.map(|(job, demands)| parse_demands(&demands).map(|demands| (JobId::from(job), demands))).transpose()?;
        let segment = detached(py, || match &job {
            Some((job, demands)) => endpoint.allocate(len, job, demands, cohort),
            None => endpoint.pool.take(len, None),
        })?;
        Ok(Segment::new(segment.map_err(PyOSError::new_err_of)?))
    }

    /// Allocates a segment for a task's result, which the engine accounts for.
    fn allocate_result(&self, py: Python<'_>, len: usize) -> PyResult<Segment> {
        let endpoint = self.get()?;
        let segment = detached(py, || endpoint.pool.take_for_result(len))?;
        Ok(Segment::new(segment.map_err(PyOSError::new_err_of)?))
    }

    /// Joins the parts of a data frame in memory for results (`columns::join`).
    fn join_columns(
        &self,
        py: Python<'_>,
        parts: Vec<Bound<'_, PyAny>>,
        kinds: Vec<Vec<(String, usize)>>,
    ) -> PyResult<(usize, Vec<Vec<columns::Place>>)> {
        columns::join(py, &self.get()?.pool, parts, kinds)
    }

    /// Sorts the rows of parts that have one column of fixed width (`columns::sorted`).
    fn sort_parts(
        &self,
        py: Python<'_>,
        parts: Vec<Bound<'_, PyAny>>,
        width: usize,
    ) -> PyResult<Option<(usize, Segment)>> {
        columns::sorted(py, &self.get()?.pool, parts, width)
    }

    fn put(
        &self,
        py: Python<'_>,
        parts: Vec<Bound<'_, PyAny>>,
        job: &str,
        demands: &str,
    ) -> PyResult<(String, Vec<usize>)> {
        let (job, demands) = (JobId::from(job), parse_demands(demands)?);
        let buffers = parts.iter().map(buffer_of).collect::<PyResult<Vec<_>>>()?;
        // SAFETY: `buffers` holds them until the copy is made, and the caller must not write meanwhile (documented).
        let inputs = buffers.iter().map(|buffer| unsafe { bytes_of(buffer) }).collect::<PyResult<Vec<_>>>()?;
        let slices: Vec<&[u8]> = inputs.iter().map(|input| &**input).collect();
        let endpoint = self.get()?;
        let id = detached(py, || endpoint.put(&slices, &job, &demands))?.map_err(PyOSError::new_err_of)?;
        Ok((id.to_string(), slices.iter().map(|slice| slice.len()).collect()))
    }

    fn adopt(&self, py: Python<'_>, segment: &Segment, sizes: Vec<u64>, demands: &str) -> PyResult<String> {
        let encryption = parse_demands(demands)?.encrypt;
        let reading = segment.read()?;
        let (endpoint, segment) = (self.get()?, segment.inner.clone());
        let id = detached(py, || endpoint.adopt(segment, &sizes, encryption))?.map_err(PyOSError::new_err_of)?;
        drop(reading);
        Ok(id.to_string())
    }

    fn free(&self, py: Python<'_>, object: &str) -> PyResult<bool> {
        let (endpoint, object) = (self.get()?, object.parse().map_err(bad_input)?);
        detached(py, || endpoint.free(&object))
    }

    /// `parts`: (object, part, length, addresses). Returns the parts, all of them as one if packed, and statistics
    /// (JSON). `receiver`: who asks, for the pattern of the transfer. `keep`: objects whose parts stay here while there
    /// is room.
    #[pyo3(signature = (job, source, to, demands, parts, packed, whole=false, receiver=None, part_count=0, keep=vec![]))]
    #[allow(clippy::too_many_arguments)]
    fn fetch(
        &self,
        py: Python<'_>,
        job: &str,
        source: &str,
        to: &str,
        demands: &str,
        parts: Vec<(String, u32, u64, Vec<String>)>,
        packed: bool,
        whole: bool,
        receiver: Option<&str>,
        part_count: u32,
        keep: Vec<String>,
    ) -> PyResult<(Vec<Part>, Option<Part>, String)> {
        let demands = parse_demands(demands)?;
        let keep = keep.iter().map(|object| object.parse().map_err(bad_input)).collect::<PyResult<_>>()?;
        let parts = parts.into_iter().map(wanted).collect::<PyResult<Vec<_>>>()?;
        let transfer = TransferId { job: job.into(), from: source.into(), to: to.into() };
        let endpoint = self.get()?;
        if let (Some(receiver), Some(first)) = (receiver, parts.first()) {
            let objects = parts.iter().map(|part| &part.object).collect::<BTreeSet<_>>().len() as u32;
            let (object, part) = (first.object.to_string().into(), first.part);
            let asked = Asked { receiver: receiver.into(), objects, object, part, parts: part_count, whole };
            endpoint.asks(transfer.clone(), asked);
        }
        let mut signal = None;
        let fetched = detached(py, || {
            let interrupted = || Python::attach(|py| py.check_signals().map_err(|error| signal = Some(error)).is_err());
            let request = FetchRequest { packed, whole, keep, ..FetchRequest::new(transfer, demands, parts) };
            endpoint.fetch(request, interrupted)
        })?;
        let fetched = fetched.map_err(|error| signal.take().unwrap_or_else(|| exception(error)))?;
        let tally = serde_json::to_string(&fetched.tally).map_err(bad_input)?;
        let part = |inner| Part { inner };
        Ok((fetched.parts.into_iter().map(part).collect(), fetched.all.map(part), tally))
    }

    /// As `fetch`, but each part has its own memory, which the caller may write to. `given_up`: whether the fetch is no
    /// longer needed; called repeatedly.
    #[allow(clippy::too_many_arguments)]
    fn receive(
        &self,
        py: Python<'_>,
        job: &str,
        source: &str,
        to: &str,
        demands: &str,
        parts: Vec<(String, u32, u64, Vec<String>)>,
        given_up: Py<PyAny>,
    ) -> PyResult<Vec<Segment>> {
        let demands = parse_demands(demands)?;
        let parts = parts.into_iter().map(wanted).collect::<PyResult<Vec<_>>>()?;
        let transfer = TransferId { job: job.into(), from: source.into(), to: to.into() };
        let endpoint = self.get()?;
        let request = FetchRequest::new(transfer, demands, parts);
        let interrupted =
            || Python::attach(|py| given_up.call0(py).and_then(|answer| answer.is_truthy(py)).unwrap_or(true));
        let received = detached(py, || endpoint.receive(request, interrupted))?;
        Ok(received.map_err(exception)?.into_iter().map(Segment::of).collect())
    }

    fn open_stream(
        &self,
        py: Python<'_>,
        job: &str,
        demands: &str,
        parts: u32,
        ahead_bytes: u64,
        keep: bool,
    ) -> PyResult<StreamWriter> {
        StreamWriter::open(py, &self.get()?, (job.into(), parse_demands(demands)?), parts, ahead_bytes, keep)
    }

    /// Reads a part of a stream. `place`: the stream, the part, the number of its parts, the address of its writer's data plane.
    /// `receiver`: the task that reads, and `run` its run.
    #[allow(clippy::too_many_arguments)]
    fn read_stream(
        &self,
        py: Python<'_>,
        job: &str,
        source: &str,
        to: &str,
        demands: &str,
        place: (String, u32, u32, String),
        receiver: &str,
        run: u64,
    ) -> PyResult<StreamReader> {
        let (stream, part, part_count, address) = place;
        let reading = Reading {
            stream: stream.parse().map_err(bad_input)?,
            part,
            address: address.parse().map_err(bad_input)?,
            reader: ReaderId { task: mission_transport::checksum::of(receiver.as_bytes()), run },
            transfer: TransferId { job: job.into(), from: source.into(), to: to.into() },
            demands: parse_demands(demands)?,
        };
        StreamReader::begin(py, &self.get()?, reading, receiver, part_count)
    }

    /// One command for the data plane, outside the numbered messages.
    fn command(&self, py: Python<'_>, command: &str) -> PyResult<()> {
        let command = serde_json::from_str(command).map_err(bad_input)?;
        let endpoint = self.get()?;
        detached(py, || endpoint.command(command))
    }

    /// This process has joined, and was given its briefing (JSON).
    /// Takes the initial state (JSON). Returns whether jobs share threads and messages by weight.
    fn joined(&self, py: Python<'_>, briefing: &str) -> PyResult<bool> {
        let Briefing { commands, locations, contended, version } = serde_json::from_str(briefing).map_err(bad_input)?;
        let endpoint = self.get()?;
        detached(py, || endpoint.joined(commands, locations, version))?;
        Ok(contended)
    }

    /// Executes a message (JSON). Returns the version after which messages are missing, the job to send the last report
    /// on, the addresses to probe, and whether jobs share threads and messages by weight, where that has changed.
    fn hear(&self, py: Python<'_>, version: u64, message: &str) -> PyResult<Heard> {
        let message = serde_json::from_str(message).map_err(bad_input)?;
        let endpoint = self.get()?;
        let left = detached(py, || endpoint.hear(version, message))?;
        let probed = left.probe_ecn.iter().map(ToString::to_string).collect();
        Ok((left.missing_after, left.report.map(|job| job.to_string()), probed, left.contended))
    }

    #[getter]
    fn heard(&self) -> PyResult<u64> {
        Ok(self.get()?.heard())
    }

    fn known_lost(&self, py: Python<'_>, objects: Vec<String>) -> PyResult<Vec<String>> {
        let objects = objects.iter().filter_map(|object| object.parse().ok()).collect::<Vec<_>>();
        let endpoint = self.get()?;
        Ok(detached(py, || endpoint.fetcher.known_lost(&objects))?.iter().map(ToString::to_string).collect())
    }

    /// Has the processes at these addresses send here at the same time; JSON: `mission_core::ecn::Seen`.
    fn probe_ecn(&self, py: Python<'_>, senders: Vec<String>) -> PyResult<String> {
        let senders =
            senders.iter().map(|address| address.parse().map_err(bad_input)).collect::<PyResult<Vec<SocketAddr>>>()?;
        let endpoint = self.get()?;
        let seen = detached(py, || endpoint.probe_ecn(&senders))?;
        serde_json::to_string(&seen.map_err(|fault| PyOSError::new_err(format!("{fault:?}")))?).map_err(bad_input)
    }

    fn lost(&self, py: Python<'_>, objects: Vec<String>, why: &str) -> PyResult<()> {
        let objects = objects.iter().map(|object| object.parse().map_err(bad_input)).collect::<PyResult<Vec<_>>>()?;
        let endpoint = self.get()?;
        detached(py, || endpoint.fetcher.lost(&objects, why))
    }

    fn forget_job(&self, py: Python<'_>, job: &str) -> PyResult<()> {
        let (endpoint, job) = (self.get()?, JobId::from(job));
        detached(py, || endpoint.fetcher.forget_job(&job))
    }

    /// The report of changes since the last one, as JSON; `None`: no changes.
    #[pyo3(signature = (cpu=0.0, last_of=None))]
    fn report(&self, py: Python<'_>, cpu: f64, last_of: Option<&str>) -> PyResult<Option<String>> {
        let (endpoint, last_of) = (self.get()?, last_of.map(Into::into));
        let report = detached(py, || endpoint.report(cpu, last_of))?;
        report.map(|report| serde_json::to_string(&report).map_err(bad_input)).transpose()
    }

    /// A descriptor that becomes readable when there is something to report; it is valid until this is closed.
    fn news(&self) -> PyResult<RawFd> {
        let endpoint = self.get()?;
        let mut news = self.news.lock().expect("no panic while held");
        if news.is_none() {
            *news = Some(News::of(&endpoint).map_err(PyOSError::new_err_of)?);
        }
        Ok(news.as_ref().expect("just made").descriptor())
    }

    /// Has this process send its remaining reports itself, not by way of the host's speaker: it is about to end.
    fn leaves_session(&self) -> PyResult<()> {
        self.get()?.leaves_session();
        Ok(())
    }

    fn transfers(&self, py: Python<'_>) -> PyResult<String> {
        let endpoint = self.get()?;
        serde_json::to_string(&detached(py, || endpoint.fetcher.transfers())?).map_err(bad_input)
    }

    /// Total weight of each job's transfers, for jobs that move bytes.
    fn weights(&self) -> PyResult<BTreeMap<String, f64>> {
        let weights = self.get()?.fetcher.weights();
        Ok(weights.into_iter().map(|(job, weight)| (job.to_string(), weight)).collect())
    }

    /// Bytes of memory that objects and what was fetched use now.
    fn live_bytes(&self) -> PyResult<u64> {
        Ok(self.get()?.pool.live_bytes())
    }

    fn resources(&self, py: Python<'_>) -> PyResult<String> {
        let endpoint = self.get()?;
        serde_json::to_string(&detached(py, || endpoint.resources())?).map_err(bad_input)
    }

    /// Ends every fetch, whose caller gets `Cancelled`, and then everything else.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.write().expect("no panic while held").take();
        let news = self.news.lock().expect("no panic while held").take();
        detached(py, || {
            drop(news);
            // Fetches that run hold it too: they are abandoned first.
            if let Some(endpoint) = &inner {
                endpoint.streams.close();
                endpoint.fetcher.close();
            }
            drop(inner);
        })
    }
}

/// Transports that this build can carry.
#[pyfunction]
pub fn carriers() -> Vec<&'static str> {
    mission_transport::carrier::transports().into_iter().map(|transport| transport.name()).collect()
}

/// Bits per second of this host's link; `None`: unknown. An invalid MISSION_LINK_RATE is a ValueError.
#[pyfunction]
pub fn link_rate() -> PyResult<Option<u64>> {
    mission_transport::host::link_rate().map_err(PyOSError::new_err_of)
}

impl Endpoint {
    pub fn get(&self) -> PyResult<Arc<endpoint::Endpoint>> {
        let inner = self.inner.read().expect("no panic while held").clone();
        inner.ok_or_else(|| PyRuntimeError::new_err("this endpoint is closed"))
    }
}

/// What a message leaves to do: the version after which messages are missing, the job to send the last report on, the
/// addresses to probe, whether jobs share by weight from now on.
type Heard = (Option<u64>, Option<String>, Vec<String>, Option<bool>);

/// As [`mission_core::control::Command::Briefing`].
#[derive(Deserialize)]
struct Briefing {
    commands: Vec<mission::Command>,
    locations: Vec<Location>,
    contended: bool,
    version: u64,
}

pub fn exception(error: FetchError) -> PyErr {
    let text = error.to_string();
    match error {
        FetchError::Lost(_) => Lost::new_err(text),
        FetchError::Unreachable(_) => Unreachable::new_err(text),
        FetchError::Damaged(_) => Damaged::new_err(text),
        FetchError::Denied(_) => Denied::new_err(text),
        FetchError::Cancelled(_) => Cancelled::new_err(text),
    }
}

pub fn parse_demands(text: &str) -> PyResult<Demands> {
    serde_json::from_str(text).map_err(bad_input)
}

/// Keeps the error number where there is one, so that Python chooses the right subclass.
pub trait OfIo {
    fn new_err_of(error: std::io::Error) -> PyErr;
}

impl OfIo for PyOSError {
    fn new_err_of(error: std::io::Error) -> PyErr {
        match error.kind() {
            std::io::ErrorKind::InvalidInput => bad_input(error),
            std::io::ErrorKind::StorageFull => PyOSError::new_err((libc::ENOSPC, error.to_string())),
            _ => match error.raw_os_error() {
                Some(number) => PyOSError::new_err((number, error.to_string())),
                None => PyOSError::new_err(error.to_string()),
            },
        }
    }
}
