//! Shared memory between processes of one host: an object's owner lends it, and its readers map it where it lies.
//!
//! The owner listens on an abstract Unix socket that bears its address. Such a name exists in one network namespace only:
//! whoever can connect is on the owner's host, whatever else the two do not share (containers that have only the network
//! in common, for instance). A message is a JSON object; with "lent" comes the descriptor of the memory.
//!
//! What is lent cannot shrink (sealed), cannot be mapped for writing by anybody (sealed), and the owner's own mapping is
//! read-only until every reader has given it back; only then is the memory used again. A reader that dies gives back
//! by its closed connection. Shares do not apply, and nothing is copied or checked on the way: it is the same memory.

use crate::facts::Negotiated;
use crate::host;
use crate::object::ObjectId;
use crate::segment::{SEALS, SHARED_MIN};
use crate::store::{Object, Store};
use mission_core::defaults::STALL;
use mission_core::nouns::{Encryption, Transport};
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

/// Longest message: a refusal in words.
const MESSAGE_BYTES: usize = 1024;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    Borrow { object: ObjectId, part: u32 },
    Lent { lease: u64, start: u64, len: u64, size: u64 },
    Refused { reason: String },
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
                        Ok((file, start, len, size)) => {
                            let sent = send(reader, &Message::Lent { lease: leases, start, len, size }, Some(file));
                            lent.extend(answer.ok().map(|object| (leases, object.clone())));
                            sent
                        }
                        Err(reason) => send(reader, &Message::Refused { reason }, None),
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

/// Memory, start, length, and size of the memory.
fn lend(object: &Object, part: u32) -> Result<(&File, u64, u64, u64), String> {
    if object.encryption != Encryption::None {
        return Err("this object may only leave encrypted".into());
    }
    let (segment, start, len) = object.in_memory(part).ok_or("the object lies in the spool")?;
    if segment.len() < SHARED_MIN {
        return Err(format!("objects below {} are copied", mission_core::units::format_bytes(SHARED_MIN as u64)));
    }
    let file = segment.protect()?;
    Ok((file, start, len, segment.size() as u64))
}

/// The reader's side: what other processes of this host lend.
pub struct Borrower {
    cluster: String,
    links: Mutex<HashMap<SocketAddr, Result<Arc<Link>, NotLent>>>,
}

struct Link {
    socket: Mutex<Socket>,
    /// To give back without waiting for an answer that another thread waits for.
    back: Socket,
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
pub enum NotLent {
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
    /// It has to come another way; see [`NotLent`].
    pub fn borrow(&self, owner: SocketAddr, object: ObjectId, part: u32, len: u64) -> Result<Borrowed, NotLent> {
        let link = self.link(owner)?;
        let answer = link.ask(&Message::Borrow { object, part });
        let (message, file) = answer.map_err(|error| {
            self.links.lock().expect("no panic while held").remove(&owner);
            NotLent::Refused(format!("its owner does not answer: {error}"))
        })?;
        match (message, file) {
            (Message::Lent { lease, start, len: given, size }, Some(file)) if given == len => {
                map(&file, start, len, size)
                    .map(|(mapping, mapped, start)| Borrowed {
                        mapping,
                        mapped,
                        start,
                        len: len as usize,
                        lease,
                        link: link.clone(),
                    })
                    .map_err(|why| {
                        let _ = send(&link.back, &Message::GiveBack { lease }, None);
                        NotLent::Refused(why)
                    })
            }
            (Message::Refused { reason }, _) => Err(NotLent::Refused(reason)),
            _ => Err(NotLent::Refused("its owner's answer does not fit".into())),
        }
    }

    fn link(&self, owner: SocketAddr) -> Result<Arc<Link>, NotLent> {
        let mut links = self.links.lock().expect("no panic while held");
        let connected = || match connect(&self.cluster, owner) {
            Ok(link) => Ok(Arc::new(link)),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Err(NotLent::Refused("its owner is another user".into()))
            }
            // No such name in this network namespace.
            Err(_) => Err(NotLent::Elsewhere),
        };
        links.entry(owner).or_insert_with(connected).clone()
    }
}

impl Link {
    fn ask(&self, message: &Message) -> io::Result<(Message, Option<OwnedFd>)> {
        let socket = self.socket.lock().expect("no panic while held");
        send(&socket, message, None)?;
        receive(&socket)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
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
    Ok(Link { socket: Mutex::new(socket), back })
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
    let mut text = [0; MESSAGE_BYTES];
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
