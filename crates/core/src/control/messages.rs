//! What the controller sends to a worker, besides the version of the message.

use super::{Describe, Keep, Take};
use crate::mission;
use crate::types::{JobId, ObjectId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What controller and workers say to one another, as a number: it is raised with every change that an older one would not
/// understand, or would misunderstand.
pub const PROTOCOL: u32 = 7;

/// All that a worker is to do now; what is absent asks for nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Message {
    /// For its data plane.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<mission::Command>,
    /// Objects, and copies of objects, that nothing carries any more.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub free: Vec<ObjectId>,
    /// Objects that nobody has any more, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<ObjectId>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Who has these objects, best first: they lie elsewhere than their references say.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub locations: Vec<(ObjectId, Vec<Arc<str>>)>,
    /// Put a manifest of each of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub describe: Vec<Describe>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub take: Vec<Take>,
    /// Keep these whole, of which there may be copies of all parts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub keep: Vec<Keep>,
    /// Say the last words on this job, which is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<JobId>,
    /// Nothing more of this job is coming.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forget_job: Option<JobId>,
    /// Have these send to it at once, and say what became of their packets ([`crate::ecn`]).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub probe_ecn: Vec<Arc<str>>,
    /// Address of the data plane that speaks for this host: the worker's own, if it does or if nobody does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speaker: Option<Arc<str>>,
}
