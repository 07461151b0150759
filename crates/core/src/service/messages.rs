//! Messages between the members of a service and its leader.
//!
//! A session begins with the member's complete state ([`ToService::Hello`]); the answer has the leader's complete state
//! for it ([`FromService::Welcome`]). From then on both send changes. The leader's messages have its epoch, and a
//! version that grows by one within a session: a member that misses one begins a new session.

use super::{ClusterId, Epoch, ServiceId};
use crate::control::Change;
use crate::host::fair::Level;
use crate::policy::TransferView;
use crate::report::Negotiated;
use crate::shares::FlowsPerHost;
use crate::types::{HostId, JobId, JobSpec, Stage, TransferId, Transport};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Version of these messages. Members with another version are refused; the refusal names the older side.
pub const PROTOCOL: u32 = 1;

/// From the adapter of one cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub enum ToService {
    /// The complete state, at the beginning of a session.
    Hello {
        protocol: u32,
        cluster: ClusterId,
        /// Random number, chosen when the cluster's scheduler started: a different one under the same name is a
        /// different cluster.
        incarnation: u64,
        /// Current jobs.
        jobs: Vec<JobSpec>,
        hosts: BTreeSet<HostId>,
        /// Active transfers, as a policy sees them.
        transfers: Vec<TransferView>,
        /// How they are carried, as far as that is known.
        #[serde(default)]
        carried: Vec<(TransferId, Carried)>,
        /// Of each host of the cluster.
        #[serde(default)]
        flows_per_host: Option<FlowsPerHost>,
    },
    /// A job has arrived, or its specification has changed. Answered by [`FromService::Kept`] once it is stored.
    Job {
        spec: JobSpec,
    },
    JobEnded {
        job: JobId,
    },
    /// All hosts of the cluster.
    Hosts {
        hosts: BTreeSet<HostId>,
    },
    /// Transfers that have changed or begun, those that are carried otherwise, and those that are not active any more.
    Transfers {
        changed: Vec<TransferView>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        carried: Vec<(TransferId, Carried)>,
        ended: Vec<TransferId>,
    },
    /// Heartbeat: the number of messages in this session, and the version that is in force at the member. Answered by
    /// [`FromService::Here`].
    Here {
        version: u64,
        words: u64,
    },
}

/// How a transfer is carried, for users: no weight depends on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Carried {
    /// Chunks under way.
    pub flows: u32,
    pub transport: Option<Transport>,
    /// Why this transport.
    pub reason: Arc<str>,
    /// Each negotiated result.
    pub negotiated: BTreeSet<Negotiated>,
    /// Deviations from the plan, and why.
    pub fallbacks: BTreeSet<String>,
}

/// To the adapter of one cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub enum FromService {
    /// The complete state, with its version.
    Welcome { service: ServiceId, epoch: Epoch, version: u64, state: State },
    /// What has changed.
    Update { epoch: Epoch, version: u64, update: Update },
    /// A job is in the store: the next leader knows it.
    Kept { epoch: Epoch, job: JobId },
    /// The leader's heartbeat, with the version of its last update.
    Here { epoch: Epoch, version: u64 },
    /// This replica does not lead; the one that does, if it is known.
    Moved { to: Option<Arc<str>> },
    /// The session is refused: one line with a hint.
    Rejected { why: String },
}

/// The complete state that a cluster has to apply.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub policy: String,
    /// `None`: the leader does not know enough yet; the current weights stay in force.
    pub weights: Option<Weighed>,
    /// What operators changed of the cluster's jobs.
    pub changes: BTreeMap<JobId, Change>,
    /// Drained hosts.
    pub drained: BTreeSet<HostId>,
}

/// Fractions of a host's bytes, of all active jobs or transfers of all clusters on it: they add up to 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Weighed {
    pub level: Level,
    #[serde(with = "listed")]
    pub parts: BTreeMap<ShareId, Part>,
}

/// What has a share: a job of a cluster, or one of its transfers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ShareId {
    pub cluster: ClusterId,
    pub job: JobId,
    /// From and to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages: Option<(Stage, Stage)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    pub weight: f64,
    /// The first one to arrive wins a tie.
    pub arrival: u64,
}

/// Changes of a member's [`State`]; absent fields are unchanged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Update {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// All weights, if most are new.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<Arc<Weighed>>,
    /// Changed weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<Arc<PartsChanged>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub changes: BTreeMap<JobId, Change>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drained: Option<BTreeSet<HostId>>,
}

/// The change from one [`Weighed`] to another of the same level.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartsChanged {
    #[serde(with = "listed")]
    pub changed: BTreeMap<ShareId, Part>,
    pub gone: BTreeSet<ShareId>,
}

impl Weighed {
    /// The change from these to others; `None`: all of them have to be sent.
    pub fn changes_to(&self, new: &Weighed) -> Option<PartsChanged> {
        if self.level != new.level {
            return None;
        }
        let differs = |(id, part): &(&ShareId, &Part)| self.parts.get(*id) != Some(*part);
        let changed = new.parts.iter().filter(differs).map(|(id, part)| (id.clone(), *part)).collect();
        let gone = self.parts.keys().filter(|id| !new.parts.contains_key(*id)).cloned().collect();
        Some(PartsChanged { changed, gone })
    }
}

impl State {
    pub fn apply(&mut self, update: Update) {
        let Update { policy, weights, parts, changes, drained } = update;
        if let Some(policy) = policy {
            self.policy = policy;
        }
        if let Some(weights) = weights {
            self.weights = Some((*weights).clone());
        }
        if let (Some(own), Some(new)) = (&mut self.weights, parts) {
            own.parts.retain(|id, _| !new.gone.contains(id));
            own.parts.extend(new.changed.iter().map(|(id, part)| (id.clone(), *part)));
        }
        self.changes.extend(changes);
        if let Some(drained) = drained {
            self.drained = drained;
        }
    }
}

/// Serializes maps by share owner as lists, because JSON keys are texts.
mod listed {
    use super::{Part, ShareId};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::collections::BTreeMap;

    #[derive(Serialize, Deserialize)]
    struct Row {
        #[serde(flatten)]
        id: ShareId,
        #[serde(flatten)]
        part: Part,
    }

    pub fn serialize<S: Serializer>(parts: &BTreeMap<ShareId, Part>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(parts.iter().map(|(id, part)| Row { id: id.clone(), part: *part }))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<ShareId, Part>, D::Error> {
        let rows = Vec::<Row>::deserialize(deserializer)?;
        Ok(rows.into_iter().map(|row| (row.id, row.part)).collect())
    }
}
