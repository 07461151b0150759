//! Events and commands of the Mission Controller, and its status for users.

use crate::cluster::Hosts;
use crate::ecn;
use crate::flight::{Environment, FlightPlan};
use crate::graph::Kind;
use crate::host::fair::Level;
use crate::pattern::Asked;
use crate::policy::TransferView;
use crate::policy::external::Counts;
use crate::shares::Share;
use crate::standing::{SharesChanged, Standing};
use crate::types::{Demands, HostId, JobId, JobSpec, Pattern, Stage, TransferId, WorkerId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    WorkerJoined {
        worker: WorkerId,
        host: HostId,
        /// On which its objects are fetched.
        address: Arc<str>,
        environment: Environment,
    },
    WorkerLeft {
        worker: WorkerId,
    },
    JobArrived {
        spec: JobSpec,
        /// A client has just announced the job: a deadline counts from now.
        #[serde(default)]
        admitted: bool,
    },
    /// All tasks of the job are forgotten.
    JobEnded {
        job: JobId,
    },
    /// A fetch began.
    Asked {
        transfer: TransferId,
        asked: Asked,
    },
    /// What a worker has requested and received in a transfer since its start: totals, so a lost message costs nothing.
    Progress {
        worker: WorkerId,
        transfer: TransferId,
        asked_bytes: u64,
        served_bytes: u64,
        /// Bytes were in transit at some time since the worker's last report: transfers between two reports compete for
        /// the network, too.
        #[serde(default)]
        moved: bool,
        /// Outstanding bytes by source: the address on which its objects are fetched, as far as that is known.
        #[serde(default)]
        waits_for: BTreeMap<Arc<str>, u64>,
        /// The worker forgets its record: what it reports later of this transfer does not count these bytes.
        #[serde(default)]
        over: bool,
    },
    /// The engine has a new task, after its inputs; tasks are numbered by the caller. Unknown inputs are ignored.
    TaskAdded {
        task: u64,
        job: JobId,
        stage: Stage,
        kind: Kind,
        inputs: Vec<u64>,
    },
    /// A task's result carries an object of so many parts.
    Put {
        task: u64,
        parts: u32,
    },
    /// The next step of a task takes these results, too.
    TaskTakes {
        task: u64,
        inputs: Vec<u64>,
    },
    /// The engine has forgotten a task.
    TaskForgotten {
        task: u64,
    },
    /// Another policy from now on.
    Policy {
        policy: String,
    },
    /// The control service's weights of each job or transfer ([`crate::service`]); `None`: this controller uses its
    /// own.
    Guided {
        guide: Option<Guide>,
    },
    /// An external policy's answer to [`Command::Weigh`]: the weight of each job or transfer, or an error.
    Weighed {
        asked: Vec<TransferView>,
        counts: Result<Counts, String>,
    },
    /// A worker's result of [`Command::ProbeEcn`].
    EcnProbed {
        worker: WorkerId,
        seen: ecn::Seen,
    },
    /// Only time has passed.
    Tick,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Command {
    /// To every worker.
    Shares(Standing),
    /// To a worker that has the previous shares: replaces [`Command::Shares`] ([`crate::control`]).
    SharesChanged(SharesChanged),
    /// To every worker.
    Plan { job: JobId, plan: FlightPlan },
    /// To every worker: what the hosts of its senders can do.
    Hosts { hosts: Hosts },
    /// To this worker: what its own host can do.
    Own { worker: WorkerId, environment: Environment },
    /// To every worker: many receive the same parts in this transfer, and serve one another ([`crate::swarm`]).
    Broadcast { transfer: TransferId },
    /// To the caller itself: this transfer ended long ago, and is only in the sum of its job ([`Earlier`]).
    Forgotten { transfer: TransferId },
    /// The job is refused, before a byte moves.
    Refuse { job: JobId, reason: String },
    /// To this worker: have the others send to it at the same time ([`crate::ecn`]), and report by
    /// [`Event::EcnProbed`].
    ProbeEcn { worker: WorkerId, senders: Vec<WorkerId> },
    /// To the caller itself: the event was invalid, with a hint in one line; nothing has changed.
    Invalid { why: String },
    /// To the caller itself: have the external policy compute weights of these transfers or their jobs, and answer by
    /// [`Event::Weighed`].
    Weigh { transfers: Vec<TransferView> },
    /// To the caller itself, for users: the new weight of every active transfer, in the order of arrival.
    Weights { transfers: Vec<TransferWeight> },
}

/// Shares that hold in place of this controller's own weights: of this cluster's jobs, and of others' on its hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guide {
    pub level: Level,
    /// In the order of arrival.
    pub shares: Vec<Share>,
}

/// A transfer's share: a fraction of every host's bytes, and the whole flows for that (paper 001, table 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Weight {
    pub weight: f64,
    pub flows: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferWeight {
    #[serde(flatten)]
    pub transfer: TransferId,
    #[serde(flatten)]
    pub weight: Weight,
}

/// The status of a job, for users.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    pub job: JobId,
    pub priority: f64,
    pub demands: Demands,
    pub active: bool,
    /// Of the last weights; absent while the job is not active.
    pub weight: Option<f64>,
    pub flows: Option<u32>,
    pub refused: Option<String>,
    pub plan: Option<FlightPlan>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transfers: Vec<TransferStatus>,
    /// Of transfers that were forgotten one by one.
    #[serde(default)]
    pub earlier: Earlier,
}

/// The sum of transfers that ended long ago.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Earlier {
    pub transfers: u64,
    pub asked_bytes: u64,
    pub served_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferStatus {
    pub from: Arc<str>,
    pub to: Arc<str>,
    pub pattern: Pattern,
    /// The evidence for the pattern.
    pub evidence: Arc<str>,
    /// Of the last weights; absent while the transfer is not active.
    pub weight: Option<f64>,
    pub flows: Option<u32>,
    pub bytes_per_sec: f64,
    pub asked_bytes: u64,
    pub served_bytes: u64,
}
