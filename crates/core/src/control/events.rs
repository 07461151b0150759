//! What an engine's adapter reports to the controller.

#[cfg(doc)]
use super::Command;
use super::{Carrier, ClientId, Counted, ShuffleId, WorkerReport};
use crate::ecn;
use crate::flight::Environment;
use crate::graph::Kind;
use crate::policy::TransferView;
use crate::policy::external::Counts;
use crate::service::{ClusterId, FollowerEvent};
use crate::types::{HostId, JobId, JobSpec, ObjectId, Stage, Transport, WorkerId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A worker's data plane is up; the answer is [`Command::Briefing`], or [`Command::Rejected`].
    Join {
        worker: WorkerId,
        host: HostId,
        address: Arc<str>,
        environment: Environment,
        #[serde(default)]
        problems: Vec<String>,
        /// Its [`PROTOCOL`].
        #[serde(default)]
        protocol: u32,
    },
    /// A worker works without a data plane; it may have joined before something failed.
    Without {
        worker: WorkerId,
        why: String,
    },
    /// The engine knows this worker: it may have joined before.
    Known {
        worker: WorkerId,
    },
    /// A worker is going to leave: others have to take its objects first; see [`Controller::is_handing_over`].
    Leaving {
        worker: WorkerId,
    },
    /// The worker does not leave after all.
    Stays {
        worker: WorkerId,
    },
    /// A worker is gone, and its objects with it.
    Gone {
        worker: WorkerId,
    },
    /// A worker missed messages after a version: they are sent again.
    Again {
        worker: WorkerId,
        after: u64,
    },
    Report {
        worker: WorkerId,
        report: WorkerReport,
    },
    /// Whether each worker has a session of its own; at first each host has one ([`crate::host::session`]).
    Sessions {
        apart: bool,
    },
    /// A worker's result of an ECN measurement.
    Probed {
        worker: WorkerId,
        seen: ecn::Seen,
    },
    /// A client wants to submit for a job; the answer is [`Command::Admitted`].
    Admit {
        spec: JobSpec,
        client: ClientId,
    },
    /// The client stops submitting for this job.
    Leave {
        job: JobId,
        client: ClientId,
    },
    ClientGone {
        client: ClientId,
    },
    /// Another transport or priority for a job that runs; the answer is [`Command::Changed`].
    Change {
        job: JobId,
        change: Change,
    },
    Policy {
        policy: String,
    },
    /// The cluster is a member of a control service from now on, under this name. `incarnation`: a random number that
    /// is unique.
    Follow {
        cluster: ClusterId,
        incarnation: u64,
        addresses: Vec<Arc<str>>,
    },
    /// An event of the connection to it.
    Service {
        heard: FollowerEvent,
    },
    Weighed {
        asked: Vec<TransferView>,
        counts: Result<Counts, String>,
    },
    /// New tasks of one origin, in any order; inputs among them or known before count.
    Tasks {
        origin: Origin,
        tasks: Vec<NewTask>,
    },
    /// A task has submitted others, new ones or not.
    Submitted {
        by: u64,
        tasks: Vec<u64>,
    },
    /// A task was given to a worker, or to another one.
    Begins {
        task: u64,
        worker: WorkerId,
    },
    /// A task is done, or was taken away.
    Ends {
        task: u64,
    },
    /// A task's result carries these objects; sent before the engine is informed that the task is done. `alive`: the
    /// engine still wants its result.
    Carries {
        task: u64,
        objects: Vec<Carried>,
        alive: bool,
    },
    /// A task writes a stream: it continues although its result is known. Sent before that. `needs`: objects of its
    /// inputs, which the engine may release meanwhile.
    Writes {
        task: u64,
        worker: WorkerId,
        stream: ObjectId,
        /// It writes the same each time it runs.
        #[serde(default)]
        repeats: bool,
        needs: Vec<Carried>,
    },
    /// The thread of a task, in this run of the engine's, waits until a stream that it reads is written again; `None`:
    /// it no longer waits, and the task has to start again.
    Continues {
        task: u64,
        worker: WorkerId,
        run: Option<u64>,
    },
    /// A task is over that wrote this stream.
    Wrote {
        task: u64,
        stream: ObjectId,
    },
    /// A task has delegated its result to a next step, which runs under its number. `inputs`: tasks whose results the
    /// step takes; `objects`: what its arguments name. `alive`: the engine still wants the result.
    Delegates {
        task: u64,
        inputs: Vec<u64>,
        objects: Vec<Carried>,
        alive: bool,
    },
    /// The last step of a task that had delegated is over. `again`: what it needs is lost, so the task begins with its first
    /// step.
    DelegateEnds {
        task: u64,
        again: bool,
    },
    /// A result is gone. `wanted`: it is going to be computed again.
    ResultGone {
        task: u64,
        wanted: bool,
    },
    /// The engine has forgotten a task.
    Forgotten {
        task: u64,
    },
    /// A shuffle of the engine begins, maybe again. `task`: one of its tasks, which determines the job.
    ShuffleBegins {
        task: u64,
        shuffle: ShuffleId,
        /// Number of output partitions.
        outputs: u32,
        #[serde(default)]
        counted: Counted,
        engine: Carrier,
        #[serde(default)]
        why: String,
    },
    /// A worker knows all inputs of a shuffle's run: their rows, and the rows that no output needs.
    ShuffleIn {
        shuffle: ShuffleId,
        run: u64,
        rows: u64,
        unwanted: u64,
        /// How many outputs are in each cohort, whose parts are freed together: the first ones are in the first.
        #[serde(default)]
        cohorts: Vec<u32>,
    },
    /// A task is done that has an output partition of a shuffle's run, complete.
    ShuffleOut {
        shuffle: ShuffleId,
        run: u64,
        output: u32,
        rows: u64,
    },
    /// The answer to [`Command::Soon`].
    Flush,
    /// Only time has passed; to be sent every second.
    Tick,
}

/// Where tasks come from: it determines their job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    pub client: ClientId,
    /// The job that the program specifies.
    #[serde(default)]
    pub spec: Option<JobSpec>,
    /// The task that submitted them.
    #[serde(default)]
    pub by: Option<u64>,
    /// The program's name for this part of itself.
    #[serde(default)]
    pub span: Option<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewTask {
    pub task: u64,
    pub stage: Stage,
    pub kind: Kind,
    pub inputs: Vec<u64>,
}

/// An object whose reference a result carries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Carried {
    pub object: ObjectId,
    pub owner: WorkerId,
    pub parts: u32,
    pub bytes: u64,
    /// Wanted number of replicas.
    #[serde(default = "one")]
    pub copies: u32,
}

fn one() -> u32 {
    1
}

/// Reads a field that is present, even if it is `null`.
fn said<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Option<Transport>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// A change of a running job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Change {
    #[serde(default)]
    pub priority: Option<f64>,
    /// `Some(None)`, in JSON `null`: Mission Control chooses again. Absent: it stays.
    #[serde(default, deserialize_with = "said", skip_serializing_if = "Option::is_none")]
    pub transport: Option<Option<Transport>>,
}
