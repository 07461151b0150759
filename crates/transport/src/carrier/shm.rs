//! Shared memory between processes of one host: an object's owner lends it, and its readers map it where it lies.
//!
//! The owner listens on an abstract Unix socket that bears its address. Such a name exists in one network namespace only:
//! whoever can connect is on the owner's host, whatever else the two do not share (containers that have only the network
//! in common, for instance). A message is a JSON object; with "lent" comes the descriptor of the memory.
//!
//! An answer repeats the object and the part that it is about, and a connection on which anything failed asks for nothing
//! any more: the late answer of a process that was stopped is never taken for the answer to another question. The reader
//! verifies the checksum of every block that it maps, once, before anybody sees it.
//!
//! What is lent cannot shrink (sealed), cannot be mapped for writing by anybody (sealed), and the owner's own mapping is
//! read-only until every reader has given it back; only then is the memory used again. A reader that dies gives back
//! by its closed connection. Shares do not apply, and nothing is copied: it is the same memory.

use crate::checksum;
use crate::facts::Negotiated;
use crate::host;
use crate::object::ObjectId;
use crate::segment::{SEALS, SHARED_MIN};
use crate::store::{Object, Store};
use mission_core::defaults::STALL;
use mission_core::types::{Encryption, Transport};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};
use socket2::{Domain, SockAddr, Socket, Type};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

/// Longest message: the checksums of a part of some 4 GiB. Larger parts come another way.
const MESSAGE_BYTES: usize = 384 << 10;
/// Of a number in a list of JSON, with its comma.
const DIGITS_OF_U64: usize = 21;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    Borrow { object: ObjectId, part: u32 },
    Lent { object: ObjectId, part: u32, lease: u64, start: u64, len: u64, size: u64, blocks: Vec<u64> },
    Refused { object: ObjectId, part: u32, reason: String },
    GiveBack { lease: u64 },
}

/// The owner's side.
pub struct Lender {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    listener: Socket,
    store: Arc<Store>,
    closing: AtomicBool,
    readers: Mutex<HashMap<u64, Socket>>,
}

impl Lender {
    /// Lends the objects of `store`, whose server has `address`.
    ///
    /// # Errors
    /// Another process of this network namespace has the name.
    pub fn new(cluster: &str, address: SocketAddr, store: Arc<Store>) -> io::Result<Lender> {
        let listener = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
        listener.bind(&name(cluster, address)?)?;
        listener.listen(128)?;
        let shared = Arc::new(Shared { listener, store, closing: AtomicBool::new(false), readers: Mutex::default() });
        let acceptor = thread::Builder::new().name("mission-lend".into()).stack_size(256 << 10).spawn({
            let shared = shared.clone();
            move || shared.accept_all()
        })?;
        Ok(Lender { shared, acceptor: Some(acceptor) })
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        let _ = self.shared.listener.shutdown(Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        for reader in self.shared.readers.lock().expect("no panic while held").values() {
            let _ = reader.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn accept_all(self: Arc<Shared>) {
        for number in 0.. {
            let accepted = self.listener.accept();
            if self.closing.load(Ordering::SeqCst) {
                return;
            }
            let Ok((reader, _)) = accepted else {
                // Out of descriptors, most likely: the next try may find one.
                thread::sleep(std::time::Duration::from_millis(10));
                continue;
            };
            if host::uid_of_peer(&reader) != Some(host::own_uid()) {
                // Another user's process: it is told nothing, and takes another transport.
                continue;
            }
            let Ok(kept) = reader.try_clone() else { continue };
            let _ = reader.set_send_buffer_size(MESSAGE_BYTES);
            self.readers.lock().expect("no panic while held").insert(number, kept);
            let own = self.clone();
            let thread = thread::Builder::new().name("mission-lend".into()).stack_size(256 << 10).spawn(move || {
                own.serve(&reader);
                own.readers.lock().expect("no panic while held").remove(&number);
            });
            if thread.is_err() {
                self.readers.lock().expect("no panic while held").remove(&number);
            }
        }
    }

    /// Lends to one reader until it goes.
    fn serve(&self, reader: &Socket) {
        let mut lent: HashMap<u64, Arc<Object>> = HashMap::new();
        let mut leases = 0;
        while let Ok(Some((message, _))) = receive(reader) {
            match message {
                Message::Borrow { object, part } => {
                    leases += 1;
                    let answer = self.store.get(&object).ok_or_else(|| "no such object here".to_owned());
                    let sent = match answer.as_ref().map_err(Clone::clone).and_then(|object| lend(object, part)) {
                        Ok((file, start, len, size, blocks)) => {
                            let lease = leases;
                            let blocks = blocks.to_vec();
                            let message = Message::Lent { object, part, lease, start, len, size, blocks };
                            let sent = send(reader, &message, Some(file));
                            lent.extend(answer.ok().map(|object| (leases, object.clone())));
                            sent
                        }
                        Err(reason) => send(reader, &Message::Refused { object, part, reason }, None),
                    };
                    if sent.is_err() {
                        return;
                    }
                }
                Message::GiveBack { lease } => drop(lent.remove(&lease)),
                Message::Lent { .. } | Message::Refused { .. } => return,
            }
        }
    }
}

/// Memory, start, length, size of the memory, and the checksums of the part's blocks.
fn lend(object: &Object, part: u32) -> Result<(&File, u64, u64, u64, &[u64]), String> {
    if object.encryption != Encryption::None {
        return Err("this object may only leave encrypted".into());
    }
    let (segment, start, len) = object.in_memory(part).ok_or("the object lies in the spool")?;
    if segment.len() < SHARED_MIN {
        return Err(format!("objects below {} are copied", mission_core::units::format_bytes(SHARED_MIN as u64)));
    }
    let (_, blocks) = object.range(part, 0, len).ok_or("no such part")?;
    if blocks.len() * DIGITS_OF_U64 > MESSAGE_BYTES - 1024 {
        return Err(format!("the checksums of {} blocks do not fit into one message", blocks.len()));
    }
    let file = segment.protect()?;
    Ok((file, start, len, segment.size() as u64, blocks))
}

/// The reader's side: what other processes of this host lend.
pub struct Borrower {
    cluster: String,
    links: Mutex<HashMap<SocketAddr, Result<Arc<Link>, LeaseDenied>>>,
}

struct Link {
    socket: Mutex<Socket>,
    /// To give back without waiting for an answer that another thread waits for.
    back: Socket,
    /// Something failed on it: an answer may still come, and nobody must take it for the answer to a later question. The
    /// connection stays open for what was mapped over it.
    failed: AtomicBool,
}

/// Part of an object, in its owner's memory.
pub struct Borrowed {
    mapping: NonNull<u8>,
    mapped: usize,
    /// Of the part, in the mapping.
    start: usize,
    len: usize,
    lease: u64,
    link: Arc<Link>,
}

// SAFETY: read-only memory that no thread owns.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

/// Why a part was not lent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseDenied {
    /// Its owner is on another host.
    Elsewhere,
    /// The owner refuses, or what it gave is not what was promised.
    Refused(String),
}

impl Borrower {
    pub fn new(cluster: &str) -> Borrower {
        Borrower { cluster: cluster.to_owned(), links: Mutex::default() }
    }

    /// # Errors
    /// It has to come another way; see [`LeaseDenied`].
    pub fn borrow(&self, owner: SocketAddr, object: ObjectId, part: u32, len: u64) -> Result<Borrowed, LeaseDenied> {
        let link = self.link(owner)?;
        let (lease, start, size, blocks, file) = match link.ask(object, part, len) {
            Ok(Ok(answer)) => answer,
            Ok(Err(reason)) => return Err(LeaseDenied::Refused(reason)),
            Err(error) => {
                let mut links = self.links.lock().expect("no panic while held");
                if links.get(&owner).is_some_and(|own| own.as_ref().is_ok_and(|own| Arc::ptr_eq(own, &link))) {
                    links.remove(&owner);
                }
                return Err(LeaseDenied::Refused(format!("its owner does not answer: {error}")));
            }
        };
        let give_back = || drop(send(&link.back, &Message::GiveBack { lease }, None));
        let (mapping, mapped, start) = map(&file, start, len, size).map_err(|why| {
            give_back();
            LeaseDenied::Refused(why)
        })?;
        let borrowed = Borrowed { mapping, mapped, start, len: len as usize, lease, link: link.clone() };
        if checksum::of_blocks(borrowed.bytes()) != blocks {
            return Err(LeaseDenied::Refused("a block of its memory does not fit its checksum".into()));
        }
        Ok(borrowed)
    }

    fn link(&self, owner: SocketAddr) -> Result<Arc<Link>, LeaseDenied> {
        let mut links = self.links.lock().expect("no panic while held");
        let connected = || match connect(&self.cluster, owner) {
            Ok(link) => Ok(Arc::new(link)),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Err(LeaseDenied::Refused("its owner is another user".into()))
            }
            // No such name in this network namespace.
            Err(_) => Err(LeaseDenied::Elsewhere),
        };
        links.entry(owner).or_insert_with(connected).clone()
    }
}

/// What an owner gives: lease, start, size of the memory, checksums of the part's blocks, and the memory.
type Lent = (u64, u64, u64, Vec<u64>, OwnedFd);

impl Link {
    /// Asks for a part; the owner's refusal is an answer too.
    ///
    /// # Errors
    /// No answer, or one that is not to this question: the link asks for nothing any more.
    fn ask(&self, object: ObjectId, part: u32, len: u64) -> io::Result<Result<Lent, String>> {
        let socket = self.socket.lock().expect("no panic while held");
        if self.failed.load(Ordering::Relaxed) {
            return Err(io::Error::other("an earlier answer is missing"));
        }
        let answer = Link::exchange(&socket, object, part, len);
        self.failed.fetch_or(answer.is_err(), Ordering::Relaxed);
        answer
    }

    fn exchange(socket: &Socket, object: ObjectId, part: u32, len: u64) -> io::Result<Result<Lent, String>> {
        send(socket, &Message::Borrow { object, part }, None)?;
        match receive(socket)?.ok_or(io::ErrorKind::UnexpectedEof)? {
            (Message::Lent { object: o, part: p, lease, start, len: given, size, blocks }, Some(file))
                if (o, p, given) == (object, part, len) =>
            {
                Ok(Ok((lease, start, size, blocks, file)))
            }
            (Message::Refused { object: o, part: p, reason }, _) if (o, p) == (object, part) => Ok(Err(reason)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the answer is not to this question")),
        }
    }
}

impl Borrowed {
    pub fn as_ptr(&self) -> *const u8 {
        // SAFETY: `start` lies in the mapping.
        unsafe { self.mapping.as_ptr().add(self.start) }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has these bytes, nobody can write to them, and they live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// What was verified before the memory was mapped.
    pub fn negotiated() -> Negotiated {
        Negotiated {
            transport: Transport::Shm.name().into(),
            memory: Some(format!("of user {}, sealed against shrinking, growing and writing", host::own_uid())),
            ..Negotiated::default()
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and whoever saw it is gone.
        let _ = unsafe { rustix::mm::munmap(self.mapping.as_ptr().cast(), self.mapped) };
        let _ = send(&self.link.back, &Message::GiveBack { lease: self.lease }, None);
    }
}

/// Maps a range read-only, after it has proved to be what a lender gives; gives the mapping, its size, and the place of
/// the range in it.
fn map(file: &OwnedFd, start: u64, len: u64, size: u64) -> Result<(NonNull<u8>, usize, usize), String> {
    let seals = rustix::fs::fcntl_get_seals(file).map_err(|error| format!("its memory has no seals: {error}"))?;
    if !seals.contains(SEALS) {
        return Err(format!("its memory is sealed by {seals:?} only"));
    }
    let actual = rustix::fs::fstat(file).map_err(|error| error.to_string())?.st_size as u64;
    if actual != size || start.checked_add(len).is_none_or(|end| end > size) {
        return Err(format!("its memory has {actual} bytes, not {size}"));
    }
    let page = rustix::param::page_size() as u64;
    let first = start / page * page;
    let mapped = (start + len - first).max(1) as usize;
    // SAFETY: a new mapping touches no memory that exists; sealed memory does not shrink under it.
    let mapping =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), mapped, ProtFlags::READ, MapFlags::SHARED, file, first) };
    let mapping = mapping.map_err(|error| format!("its memory cannot be mapped: {error}"))?;
    Ok((NonNull::new(mapping.cast()).expect("mmap does not give null"), mapped, (start - first) as usize))
}

fn connect(cluster: &str, owner: SocketAddr) -> io::Result<Link> {
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
    socket.connect(&name(cluster, owner)?)?;
    if host::uid_of_peer(&socket) != Some(host::own_uid()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    socket.set_read_timeout(Some(STALL))?;
    socket.set_write_timeout(Some(STALL))?;
    let back = socket.try_clone()?;
    Ok(Link { socket: Mutex::new(socket), back, failed: AtomicBool::new(false) })
}

fn name(cluster: &str, address: SocketAddr) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0{}-{address}", host::socket_name(cluster)))
}

fn send(socket: &Socket, message: &Message, file: Option<&File>) -> io::Result<()> {
    let text = serde_json::to_vec(message).expect("messages are plain data");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&text)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next message, with a descriptor if one came; `None`: the peer is gone.
fn receive(socket: &Socket) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
    let mut text = vec![0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut ancillary, flags)
    })?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let file = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    Ok(Some((serde_json::from_slice(&text[..received.bytes])?, file)))
}
