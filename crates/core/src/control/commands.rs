//! The controller's commands to an engine's adapter, and the records that the adapter keeps for reports.

#[cfg(doc)]
use super::Event;
use super::transfers::Progress;
use super::{JobNow, Message, ShuffleId};
use crate::policy::TransferView;
use crate::types::{HostId, JobId, JobSpec, ObjectId, WorkerId};
use crate::{ecn, mission, service};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Command {
    /// Send to this worker, with this version.
    Tell { worker: WorkerId, version: u64, message: Arc<Message> },
    /// To a worker that has joined: its initial state, and the version of that state.
    Briefing {
        worker: WorkerId,
        commands: Vec<mission::Command>,
        /// Locations of objects that lie elsewhere than their references say.
        locations: Vec<(ObjectId, Vec<Arc<str>>)>,
        /// As in [`Message::contended`].
        contended: bool,
        version: u64,
    },
    /// To a worker that cannot join, and why: it works without a data plane.
    Rejected { worker: WorkerId, why: String },
    /// To a client: the name under which its job runs, or why it may not.
    Admitted { job: JobId, refused: Option<String> },
    /// To the caller: why the job cannot be changed, if it cannot.
    Changed { error: Option<String>, refused: Option<String> },
    /// To the engine: these results are invalid, with all their copies; what is still needed of them is computed again. A task
    /// that delegated, and waits, begins again with its first step.
    Recompute { tasks: BTreeSet<u64> },
    /// To the engine: whether two jobs or more that somebody named are there, so that jobs share its queue by weight;
    /// otherwise the engine's own order holds.
    Contention { contended: bool },
    /// To the workers that take part: the parts of this cohort of a shuffle's run are no longer needed
    /// ([`Event::ShuffleIn`]). A worker that misses this frees them when the run ends.
    Taken { shuffle: ShuffleId, run: u64, cohort: u32 },
    /// To the adapter: send [`Event::Flush`] after its current work.
    Soon,
    /// To the adapter: have the external policy compute weights, and answer by [`Event::Weighed`].
    Weigh { transfers: Vec<TransferView> },
    /// To the adapter: a command for its connection to the control service.
    Service { does: service::FollowerCommand },
    /// To the engine: give these workers no more tasks, and retire them when they have none; their hosts are being
    /// drained.
    Drain { workers: BTreeSet<WorkerId> },
    /// For reports.
    Record { record: Box<Record> },
    /// To the adapter itself: the event was invalid, with a hint in one line; nothing has changed.
    Invalid { why: String },
}

/// Records for reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Record {
    Worker {
        worker: WorkerId,
        host: HostId,
        address: Arc<str>,
    },
    WorkerWithout {
        worker: WorkerId,
        why: String,
    },
    /// Before a worker left, others took so many of its objects.
    HandedOver {
        worker: WorkerId,
        objects: usize,
        bytes: u64,
    },
    /// A worker leaves, and no other worker has these of its objects.
    NotHandedOver {
        worker: WorkerId,
        objects: usize,
        bytes: u64,
        why: String,
    },
    WorkerLeft {
        worker: WorkerId,
    },
    Job(JobSpec),
    Refused {
        job: JobId,
        reason: String,
    },
    JobEnded(Box<JobNow>),
    Progress(Progress),
    EcnProbed {
        worker: WorkerId,
        #[serde(flatten)]
        seen: ecn::Seen,
    },
    /// By the number of the task.
    Recomputed {
        job: JobId,
        task: u64,
    },
    Decision(mission::Command),
    PolicyError {
        why: String,
    },
    /// The control service is silent: the cluster's own weights are in force.
    Alone {
        why: String,
    },
    /// The control service has stored a job.
    Kept {
        job: JobId,
    },
}
