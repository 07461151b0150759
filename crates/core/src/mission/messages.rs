//! Events and commands of the Mission Controller, and its status as people see it.

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
        /// A client has just said so: a deadline counts from now.
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
    /// What a worker has asked for and got in a transfer since its start: totals, so a lost message costs nothing.
    Progress {
        worker: WorkerId,
        transfer: TransferId,
        asked_bytes: u64,
        served_bytes: u64,
        /// Bytes were under way at some time since the worker's last word: what comes and goes between two words
        /// competes for the network all the same.
        #[serde(default)]
        moved: bool,
        /// Of the bytes that are asked for and not served, how many come from each worker, by the address on which its
        /// objects are fetched, as far as that is known.
        #[serde(default)]
        waits_for: BTreeMap<Arc<str>, u64>,
    },
    /// The engine has a new task, after its inputs; tasks are numbered by the caller. Those that are not known do not count.
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
    /// What the control service says each job or transfer may have ([`crate::service`]); `None`: this controller weighs
    /// alone.
    Guided {
        guide: Option<Guide>,
    },
    /// What an external policy says to [`Command::Weigh`]: how much each job or transfer counts, or what went wrong.
    Weighed {
        asked: Vec<TransferView>,
        counts: Result<Counts, String>,
    },
    /// What a worker learnt by [`Command::ProbeEcn`].
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
    /// To a worker that has the shares before: said in place of [`Command::Shares`] ([`crate::control`]).
    SharesChanged(SharesChanged),
    /// To every worker.
    Plan { job: JobId, plan: FlightPlan },
    /// To every worker: what the hosts of its senders can do.
    Hosts { hosts: Hosts },
    /// To this worker: what its own host can do.
    Own { worker: WorkerId, environment: Environment },
    /// To every worker: many receive the same parts in this transfer, and serve one another ([`crate::swarm`]).
    Broadcast { transfer: TransferId },
    /// The job may not run; said before a byte moves.
    Refuse { job: JobId, reason: String },
    /// To this worker: have the others send to it at once ([`crate::ecn`]), and say so by [`Event::EcnProbed`].
    ProbeEcn { worker: WorkerId, senders: Vec<WorkerId> },
    /// To the caller itself: the event was wrong, in one line that says what to do; nothing has changed.
    Invalid { why: String },
    /// To the caller itself: have the external policy compute what these transfers or their jobs count, and say so by
    /// [`Event::Weighed`].
    Weigh { transfers: Vec<TransferView> },
    /// To the caller itself, for people: what every active transfer has from now on, in the order of arrival.
    Weights { transfers: Vec<TransferWeight> },
}

/// Shares that hold in place of this controller's own weights: of this cluster's jobs, and of others' on its hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guide {
    pub level: Level,
    /// In the order of arrival.
    pub shares: Vec<Share>,
}

/// What a transfer may have: a part of every host's bytes, and the whole flows that this is (paper 001, table 4.4).
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

/// What the Mission Controller knows of a job, for people to look at.
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
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferStatus {
    pub from: Arc<str>,
    pub to: Arc<str>,
    pub pattern: Pattern,
    /// By what the pattern is known.
    pub evidence: Arc<str>,
    /// Of the last weights; absent while the transfer is not active.
    pub weight: Option<f64>,
    pub flows: Option<u32>,
    pub bytes_per_sec: f64,
    pub asked_bytes: u64,
    pub served_bytes: u64,
}
