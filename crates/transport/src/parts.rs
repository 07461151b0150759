//! What a fetch requests, and where it lies once it has arrived.

use crate::carrier::shm::Borrowed;
use crate::object::ObjectId;
use crate::segment::Segment;
use mission_core::host::fetches::Tally;
use mission_core::types::{Demands, TransferId};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A part of an object, and who has it.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub object: ObjectId,
    pub part: u32,
    pub len: u64,
    pub addresses: Vec<SocketAddr>,
}

/// All parts that one call requests.
pub struct FetchRequest {
    pub transfer: TransferId,
    pub demands: Demands,
    pub parts: Vec<Wanted>,
    /// The call requests all parts of every object, so other processes may want the same.
    pub whole: bool,
    /// Objects whose parts stay here, while there is room: they will be needed again.
    pub keep: BTreeSet<ObjectId>,
    /// All parts in one piece of memory, without gaps. Otherwise each lies where it is cheapest: what this host has
    /// already is not copied, and the rest begins at multiples of [`ALIGN`].
    pub packed: bool,
}

impl FetchRequest {
    /// For parts that no other process needs, each where it is cheapest.
    pub fn new(transfer: TransferId, demands: Demands, parts: Vec<Wanted>) -> FetchRequest {
        FetchRequest { transfer, demands, parts, whole: false, keep: BTreeSet::new(), packed: false }
    }
}

/// The alignment that Arrow recommends for buffers.
pub const ALIGN: usize = 64;

/// Parts that have arrived.
pub struct Fetched {
    pub parts: Vec<Part>,
    /// All of them, where they are packed.
    pub all: Option<Part>,
    pub tally: Tally,
}

/// Memory in which a part lies; it stays as it is while this lives.
#[derive(Clone)]
pub struct Part {
    pub(crate) home: Home,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

#[derive(Clone)]
pub(crate) enum Home {
    Own(Arc<Segment>),
    Borrowed(Arc<Borrowed>),
}

impl Part {
    /// Where it lies in memory that other processes can map: a descriptor of this process, and where it begins there. It is there
    /// as long as this part; `None`: its memory is this process's alone.
    pub fn place(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.home {
            Home::Own(segment) => {
                let shared = segment.shared()?;
                Some((shared.file.as_fd(), shared.start + self.start as u64))
            }
            Home::Borrowed(borrowed) => Some((borrowed.file().as_fd(), self.start as u64)),
        }
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.home {
            Home::Own(segment) => &segment.bytes()[self.start..self.start + self.len],
            Home::Borrowed(borrowed) => borrowed.bytes(self.start, self.len),
        }
    }
}

/// Where each part goes in the memory that is taken for this fetch, and how much of it there is; what lies `elsewhere` needs
/// no place there unless the parts are to be packed.
pub(crate) fn places(request: &FetchRequest, elsewhere: impl Fn(usize) -> bool) -> (Vec<(usize, usize)>, usize) {
    let mut end = 0usize;
    let places = request
        .parts
        .iter()
        .enumerate()
        .map(|(number, wanted)| {
            if elsewhere(number) && !request.packed {
                return (0, 0);
            }
            let start = if request.packed { end } else { end.saturating_add(ALIGN - 1) / ALIGN * ALIGN };
            end = start.saturating_add(wanted.len as usize);
            (start, wanted.len as usize)
        })
        .collect();
    (places, end)
}
