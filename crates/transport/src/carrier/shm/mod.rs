//! Shared memory between processes of one host: an object's owner grants leases on it, and readers use it in place.
//!
//! The owner listens on an abstract Unix socket named by its address. Such a name exists in one network namespace only:
//! a process that can connect is on the owner's host, whatever else the two do not share (containers that have only the
//! network in common, for instance). Both ends prove the cluster's token first ([`crate::local`]). With a lease come
//! descriptors: of the memory that objects lie in, which readers map, and of the spool file, which they read. A
//! question is about all objects that a fetch takes from their owner; each has a lease of its own, named by the
//! question and the object's place in it.
//!
//! An answer repeats the number of its question. A connection with a failure is not used for questions any more, but
//! stays open as long as anything is mapped over it: so the late answer of a stopped process is never mistaken for the
//! answer to another question. The reader verifies the checksum of every block that it maps, once, before use, and of
//! every block that it reads from a spool file.
//!
//! The memory cannot shrink (sealed), cannot be mapped for writing (sealed), and the owner's own mapping is read-only
//! until every lease is returned; only then is the memory reused. Readers cannot write to a spool file, and its owner
//! does not reuse a place in it while there is a lease. A reader that dies returns its leases by its closed connection.
//! Shares do not apply, and memory is not copied: it is the same memory.

mod owner;
mod reader;

use crate::host;
use crate::object::ObjectId;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

pub use owner::Lender;
pub use reader::{Borrowed, Borrower, LeaseDenied, LeasedPart, WantedOf, map_all};

/// Parts that one lease covers, and checksums that one answer carries: a question about more is answered in parts.
const PARTS_MAX: usize = 4096;
const BLOCKS_MAX: usize = 16 << 10;
/// Longest message: so many checksums of up to 20 digits each, and the largest part alone.
const MESSAGE_BYTES: usize = 8 << 20;
/// An owner's refusal for an object that it has freed, or never had.
const NO_SUCH_OBJECT: &str = "no such object here";

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Question {
    /// Leases on parts of objects.
    Borrow {
        question: u64,
        wanted: Vec<(ObjectId, Vec<u32>)>,
    },
    Return {
        leases: Vec<LeaseName>,
    },
    /// All leases of a question whose answer could not be read.
    ReturnAll {
        question: u64,
    },
}

/// The question, and the object's place in its answer.
type LeaseName = (u64, usize);

/// Leases on the first of the requested parts: at least one, or a refusal.
#[derive(Serialize, Deserialize)]
struct Answer {
    /// The question's number.
    question: u64,
    /// Files that contain the objects; their descriptors are sent with the answer, in this order.
    files: Vec<SharedFile>,
    /// Of each object in the order of the question: where it lies, or why there is no lease on it.
    objects: Vec<Result<Given, String>>,
}

/// A file with objects in it.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct SharedFile {
    kind: Kind,
    /// The same for all that lies in it.
    name: u64,
    /// Of all of it, where it is memory.
    size: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Memory,
    Spool,
}

/// The first of an object's requested parts; all of them lie in the same file.
#[derive(Serialize, Deserialize)]
struct Given {
    /// Its place among the answer's files.
    file: usize,
    parts: Vec<Place>,
}

/// Where a part lies in its file, and the checksums of its blocks.
#[derive(Serialize, Deserialize)]
struct Place {
    start: u64,
    len: u64,
    blocks: Vec<u64>,
}

/// Where the owner with an address listens.
fn name(cluster: &str, address: SocketAddr) -> String {
    format!("{}-{address}", host::socket_name(cluster))
}
