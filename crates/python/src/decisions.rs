//! Decisions of `mission_core` for Python.

use crate::bad_input;
use mission_core::budget::FLOWS_MAX;
use mission_core::host::fair::{Level, QueueShare, Shares};
use mission_core::host::slots::{Command, Event, SELF, Slots};
use mission_core::host::{FromArbiter, ToArbiter};
use mission_core::policy::{self, JobView, TransferView};
use mission_core::shares::FlowsPerHost;
use mission_core::types::{self, Demands, JobId, Pattern, TransferId, Transport};
use mission_core::units::Time;
use mission_core::{defaults as core_defaults, flight, shares, units};
use pyo3::prelude::*;
use serde::Deserialize;
use std::collections::{BTreeMap, VecDeque};

const WRITE_FLOWS: &str = "use a whole number from 1 on, all, or auto";

/// A number of flows, or the name of a way to find it.
#[derive(FromPyObject)]
pub enum Flows {
    Number(u32),
    Name(String),
    /// Anything else, so that the error is one line.
    Other(Py<PyAny>),
}

impl Flows {
    pub fn get(self) -> PyResult<FlowsPerHost> {
        match self {
            Flows::Number(flows) => Ok(FlowsPerHost::Fixed(flows)),
            Flows::Name(name) if name == "auto" => Ok(FlowsPerHost::Auto),
            Flows::Name(name) if name == "all" => Ok(FlowsPerHost::Fixed(FLOWS_MAX)),
            Flows::Name(name) => Err(bad_input(format!("{name} flows per host: {WRITE_FLOWS}"))),
            Flows::Other(other) => Err(bad_input(format!("{other} flows per host: {WRITE_FLOWS}"))),
        }
    }
}

/// Whether a job can have this priority.
#[pyfunction]
pub fn check_priority(job: &str, priority: f64) -> PyResult<()> {
    types::check_priority(job, priority).map_err(bad_input)
}

/// Seconds that a host's arbiter takes for one chunk, from its request to its grant, with so many groups and so many chunks
/// that wait.
#[pyfunction]
pub fn seconds_per_grant(py: Python<'_>, groups: u64, waiting: u64, chunks: u64) -> PyResult<f64> {
    crate::detached(py, || {
        let share = |queue| QueueShare { queue, weight: 1.0 / groups as f64 };
        let shares = Shares { level: Level::Groups, queues: (0..groups).map(share).collect() };
        let mut slots = Slots::new(Time(0), FlowsPerHost::Fixed(10), false);
        let mut commands = Vec::new();
        slots.handle(Time(0), Event::Shares { flows_per_host: FlowsPerHost::Fixed(10), shares }, &mut commands);
        let mut granted = VecDeque::new();
        let mut say = |message, granted: &mut VecDeque<u64>| {
            slots.handle(Time(0), Event::Message { client: SELF, message }, &mut commands);
            for command in commands.drain(..) {
                if let Command::Send { message: FromArbiter::Grant { ticket }, .. } = command {
                    granted.push_back(ticket);
                }
            }
        };
        let want = |ticket: u64| {
            let group = ticket % groups;
            ToArbiter::Want { ticket, group, member: group, bytes: 4 << 20 }
        };
        (0..waiting + 10).for_each(|ticket| say(want(ticket), &mut granted));
        let began = std::time::Instant::now();
        for chunk in 0..chunks {
            say(want(waiting + 10 + chunk), &mut granted);
            // The oldest grant ends, and the next one is given.
            let ticket = granted.pop_front().expect("ten slots are in use");
            say(ToArbiter::Done { ticket, moved: 4 << 20 }, &mut granted);
        }
        began.elapsed().as_secs_f64() / chunks as f64
    })
}

/// A transfer of `mission weights`.
#[derive(Deserialize)]
struct Typed {
    job: String,
    /// Absent where the job has only this one.
    transfer: Option<String>,
    priority: f64,
    machines: u32,
    pattern: Pattern,
    /// That its busiest host has yet to receive.
    bytes: u64,
    deadline_secs: Option<f64>,
}

/// Transfers (JSON, a list) in order of arrival, all of them active; gives weight and flows of each.
#[pyfunction]
pub fn weights(spec: &str, transfers: &str, flows_per_host: Flows) -> PyResult<Vec<(f64, u32)>> {
    let policy = policy::policy(spec).map_err(bad_input)?;
    let flows_per_host = flows_per_host.get()?;
    flows_per_host.check().map_err(bad_input)?;
    let typed: Vec<Typed> = serde_json::from_str(transfers).map_err(bad_input)?;
    let mut jobs: Vec<&str> = Vec::new();
    let mut views = Vec::new();
    for (arrival, own) in typed.iter().enumerate() {
        types::check_priority(&own.job, own.priority).map_err(bad_input)?;
        let of_job = jobs.iter().position(|job| *job == own.job).unwrap_or_else(|| {
            jobs.push(&own.job);
            jobs.len() - 1
        });
        let job: JobId = own.job.as_str().into();
        views.push(TransferView {
            transfer: TransferId {
                job: job.clone(),
                from: own.transfer.as_deref().unwrap_or_default().into(),
                to: "".into(),
            },
            job: JobView {
                job,
                user: None,
                class: None,
                arrival: of_job as u64,
                priority: own.priority,
                deadline_secs: own.deadline_secs,
                age_secs: 0.0,
            },
            arrival: arrival as u64,
            pattern: own.pattern,
            evidence: "as typed".into(),
            machines: own.machines,
            asked_bytes: own.bytes,
            served_bytes: 0,
            to_receive: BTreeMap::from([("host".into(), own.bytes)]),
            to_send: BTreeMap::new(),
            bytes_per_sec: 0.0,
            age_secs: 0.0,
        });
    }
    let weights = policy::weights(&policy, &views).transfers;
    let flows = shares::split(flows_per_host.usual(), &weights);
    Ok(weights.into_iter().zip(flows).collect())
}

/// Why demands (as JSON) exclude each other; `None` where they do not.
#[pyfunction]
pub fn contradiction(demands: &str) -> PyResult<Option<String>> {
    let demands: Demands = serde_json::from_str(demands).map_err(bad_input)?;
    Ok(flight::contradiction(&demands))
}

#[pyfunction]
pub fn policies() -> Vec<(&'static str, &'static str)> {
    policy::POLICIES.iter().map(|entry| (entry.name, entry.meaning)).collect()
}

#[pyfunction]
pub fn transports() -> Vec<&'static str> {
    Transport::ALL.iter().map(|transport| transport.name()).collect()
}

#[pyfunction]
pub fn defaults() -> Vec<(&'static str, String, &'static str)> {
    core_defaults::table()
}

#[pyfunction]
pub fn parse_bytes(text: &str) -> PyResult<u64> {
    units::parse_bytes(text).map_err(bad_input)
}

#[pyfunction]
pub fn parse_rate(text: &str) -> PyResult<u64> {
    units::parse_rate_bits_per_sec(text).map_err(bad_input)
}

/// Seconds.
#[pyfunction]
pub fn parse_duration(text: &str) -> PyResult<f64> {
    units::parse_duration(text).map(|duration| duration.as_secs_f64()).map_err(bad_input)
}

#[pyfunction]
pub fn format_bytes(bytes: u64) -> String {
    units::format_bytes(bytes)
}
