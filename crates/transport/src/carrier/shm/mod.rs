//! Shared memory between processes of one host: an object's owner gives leases on it, and readers map it where it lies.
//!
//! The owner listens on an abstract Unix socket that bears its address. Such a name exists in one network namespace only:
//! whoever can connect is on the owner's host, whatever else the two do not share (containers that have only the network
//! in common, for instance). Both ends prove the cluster's token first ([`crate::local`]). With a lease comes the descriptor of the
//! memory.
//!
//! An answer repeats the number of its question. A connection on which anything failed asks nothing any more, but stays
//! open as long as anything is mapped over it: the late answer of a process that was stopped is never taken for the answer to
//! another question. The reader verifies the checksum of every block that it maps, once, before anybody sees it.
//!
//! The memory cannot shrink (sealed), cannot be mapped for writing by anybody (sealed), and the owner's own mapping is
//! read-only until every lease has come back; only then is the memory used again. A reader that dies returns its leases
//! by its closed connection. Shares do not apply, and nothing is copied: it is the same memory.

mod owner;
mod reader;

use crate::host;
use crate::object::ObjectId;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

pub use owner::Lender;
pub use reader::{Borrowed, Borrower, LeaseDenied};

/// Parts that one lease covers, and checksums that one answer carries: a question about more is answered in parts.
const PARTS_MAX: usize = 4096;
const BLOCKS_MAX: usize = 16 << 10;
/// Longest message: so many checksums of up to 20 digits each, and the largest part alone.
const MESSAGE_BYTES: usize = 8 << 20;
/// What an owner says of an object that it has freed, or never had.
const NO_SUCH_OBJECT: &str = "no such object here";

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Question {
    /// A lease on these parts of an object.
    Borrow {
        question: u64,
        object: ObjectId,
        parts: Vec<u32>,
    },
    Return {
        lease: u64,
    },
}

#[derive(Serialize, Deserialize)]
struct Answer {
    /// The question's number.
    question: u64,
    given: Result<Given, String>,
}

/// A lease on the first of the parts that were asked for.
#[derive(Serialize, Deserialize)]
struct Given {
    lease: u64,
    /// Names the memory: the same for all that lies in it.
    memory: u64,
    /// Of all of it.
    size: u64,
    parts: Vec<Place>,
}

/// Where a part lies in the memory, and the checksums of its blocks.
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
