//! The controller's message to a worker, without its version.

use super::{Describe, Keep, Take};
use crate::mission;
use crate::types::{JobId, ObjectId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Version of the protocol between controller and workers: increased with every change that an older one would not
/// understand, or would misunderstand.
pub const PROTOCOL: u32 = 9;

/// Everything that a worker shall do now; absent fields require nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Message {
    /// For its data plane.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<mission::Command>,
    /// Objects, and copies of objects, without references: free them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub free: Vec<ObjectId>,
    /// Lost objects, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<ObjectId>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Sources of objects that lie elsewhere than their references say, best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub locations: Vec<(ObjectId, Vec<Arc<str>>)>,
    /// Put a manifest of each of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub describe: Vec<Describe>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub take: Vec<Take>,
    /// Make whole objects of these, if there are copies of all parts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub keep: Vec<Keep>,
    /// Send the last report on this job, which is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<JobId>,
    /// Nothing more of this job is coming.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forget_job: Option<JobId>,
    /// Have these send to it at the same time, and report what happened to their packets ([`crate::ecn`]).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub probe_ecn: Vec<Arc<str>>,
    /// Address of the speaker's data plane: the worker's own, if it is the speaker or if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speaker: Option<Arc<str>>,
    /// Whether two jobs or more that somebody named are there, so that jobs share threads and messages by weight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contended: Option<bool>,
}
