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

use crate::auth::{Purpose, Token};
use crate::checksum;
use crate::facts::Negotiated;
use crate::host;
use crate::local::{self, Incoming, Outgoing};
use crate::object::ObjectId;
use crate::segment::{SEALS, SHARED_MIN};
use crate::store::{Object, Store};
use mission_core::defaults::STALL;
use mission_core::types::{Encryption, Transport};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::RecvFlags;
use serde::{Deserialize, Serialize};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Parts that one lease covers, and checksums that one answer carries: a question about more is answered in parts.
const PARTS_MAX: usize = 4096;
const BLOCKS_MAX: usize = 16 << 10;
/// Longest message: so many checksums of up to 20 digits each, and the largest part alone.
const MESSAGE_BYTES: usize = 8 << 20;
/// Connections that have not proved anything yet; more are closed at once.
const UNADMITTED_MAX: usize = 64;
/// Processes that read here at once: a host has fewer workers.
const READERS_MAX: usize = 256;
/// An owner that did not answer is not asked again for so long: its bytes come another way.
const SILENT_FOR: Duration = STALL;
/// For so long an owner without a name here counts as one of another host.
const ELSEWHERE_FOR: Duration = Duration::from_secs(60);
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

/// The owner's side.
pub struct Lender {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    listener: UnixListener,
    token: Token,
    store: Arc<Store>,
    closing: AtomicBool,
    readers: Mutex<HashMap<u64, UnixStream>>,
    unadmitted: AtomicUsize,
}

impl Lender {
    /// Gives leases on the objects of `store`, whose server has `address`.
    ///
    /// # Errors
    /// Another process of this network namespace has the name: memory is not shared then.
    pub fn new(cluster: &str, address: SocketAddr, token: Token, store: Arc<Store>) -> io::Result<Lender> {
        let listener = local::bind(&name(cluster, address))?;
        let shared = Arc::new(Shared {
            listener,
            token,
            store,
            closing: AtomicBool::new(false),
            readers: Mutex::default(),
            unadmitted: AtomicUsize::new(0),
        });
        let accepting = shared.clone();
        let acceptor = thread::Builder::new()
            .name("mission-lease".into())
            .stack_size(256 << 10)
            .spawn(move || accepting.accept_all())?;
        Ok(Lender { shared, acceptor: Some(acceptor) })
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts: Linux ends its call with an error.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
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
                thread::sleep(Duration::from_millis(10));
                continue;
            };
            if self.unadmitted.load(Ordering::Relaxed) >= UNADMITTED_MAX
                || self.readers.lock().expect("no panic while held").len() >= READERS_MAX
            {
                continue;
            }
            self.unadmitted.fetch_add(1, Ordering::Relaxed);
            let own = self.clone();
            let serve = move || {
                let admitted = local::admit(&reader, &own.token, Purpose::Memory);
                own.unadmitted.fetch_sub(1, Ordering::Relaxed);
                if admitted.is_err() {
                    return;
                }
                let Ok(kept) = reader.try_clone() else { return };
                // A reader that takes no answer is left.
                let _ = reader.set_write_timeout(Some(STALL));
                {
                    let mut readers = own.readers.lock().expect("no panic while held");
                    if own.closing.load(Ordering::SeqCst) {
                        return;
                    }
                    readers.insert(number, kept);
                }
                own.serve(reader);
                own.readers.lock().expect("no panic while held").remove(&number);
            };
            let thread = thread::Builder::new().name("mission-lease".into()).stack_size(256 << 10).spawn(serve);
            if thread.is_err() {
                self.unadmitted.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Gives leases to one reader until it goes: what it has mapped stays as it is until then, whatever it says.
    fn serve(&self, mut reader: UnixStream) {
        let mut leases: HashMap<u64, Leased> = HashMap::new();
        let mut next = 0;
        let (mut heard, mut said) = (Incoming::new(MESSAGE_BYTES), Outgoing::default());
        loop {
            match heard.read(&mut reader) {
                Ok(Some(Question::Borrow { question, object, parts })) => {
                    next += 1;
                    let found = self.store.get(&object);
                    let object = found.as_ref().ok_or_else(|| NO_SUCH_OBJECT.to_owned());
                    let (given, file) = match object.and_then(|object| lease(object, &parts, next)) {
                        Ok((given, file)) => (Ok(given), Some(file)),
                        Err(reason) => (Err(reason), None),
                    };
                    let leased = file.is_some();
                    let frame = said.frame(&Answer { question, given });
                    let sent = local::send(&reader, &frame, file);
                    leases.extend(found.filter(|_| leased).map(|object| (next, Leased(object))));
                    if sent.is_err() {
                        break;
                    }
                }
                Ok(Some(Question::Return { lease })) => drop(leases.remove(&lease)),
                Ok(None) => return,
                Err(_) => break,
            }
        }
        // It is not understood any more, but it may still look at what it has mapped.
        let _ = reader.shutdown(Shutdown::Write);
        let _ = io::copy(&mut reader, &mut io::sink());
    }
}

/// An object with a lease on it: its memory is shared, and read-only.
struct Leased(Arc<Object>);

impl Drop for Leased {
    fn drop(&mut self) {
        self.0.segment().expect("only objects in memory have leases").unprotect();
    }
}

/// A lease on as many of the parts as one answer has room for, at least one; and the memory.
fn lease<'a>(
    object: &'a Arc<Object>,
    parts: &[u32],
    lease: u64,
) -> Result<(Given, std::os::fd::BorrowedFd<'a>), String> {
    if object.encryption != Encryption::None {
        return Err("this object may only leave encrypted".into());
    }
    let segment = object.segment().ok_or("the object lies in the spool")?;
    if segment.len() < SHARED_MIN {
        return Err(format!("objects below {} are copied", mission_core::units::format_bytes(SHARED_MIN as u64)));
    }
    let mut given = Vec::new();
    let mut count = 0;
    for part in parts.iter().take(PARTS_MAX) {
        let len = object.part_len(*part).ok_or("no such part")?;
        let (start, blocks) = object.place(*part, len).ok_or("no such part")?;
        count += blocks.len();
        if count > BLOCKS_MAX && !given.is_empty() {
            break;
        }
        given.push(Place { start, len, blocks: blocks.to_vec() });
    }
    let shared = segment.protect()?;
    given.iter_mut().for_each(|place| place.start += shared.start);
    // Its address tells one memory from another as long as this process has it.
    let memory = rustix::fs::fstat(shared.file).map_err(|error| {
        segment.unprotect();
        error.to_string()
    })?;
    let memory = memory.st_ino;
    Ok((Given { lease, memory, size: shared.size, parts: given }, shared.file.as_fd()))
}

/// The reader's side: leases on what other processes of this host have.
pub struct Borrower {
    cluster: String,
    token: Token,
    links: Arc<Mutex<HashMap<SocketAddr, Known>>>,
    /// For the thread that returns leases: a task must not wait for that.
    returns: Sender<(Arc<Link>, u64)>,
}

/// What is known of an owner.
#[derive(Clone)]
enum Known {
    Linked(Arc<Link>),
    /// There is no such name in this network namespace; until then, since a worker may start with that address.
    Elsewhere(Instant),
    /// It did not answer, or refused this process; it is asked again after this.
    Silent(Instant, String),
}

struct Link {
    stream: Mutex<Talk>,
    /// To return leases without waiting for an answer that another thread waits for.
    back: Mutex<(UnixStream, Outgoing)>,
    /// An answer is missing, and may still come: nobody asks over this link any more.
    failed: AtomicBool,
    /// The owner takes no returns: its leases come back when the last of them lets the connection go.
    takes_nothing: AtomicBool,
    /// What is mapped of the owner's memory, while anybody looks at it.
    memories: Mutex<BTreeMap<u64, Weak<Mapped>>>,
}

struct Talk {
    stream: UnixStream,
    heard: Incoming,
    questions: u64,
}

/// Memory of an owner, read-only.
struct Mapped {
    start: NonNull<u8>,
    size: usize,
    /// Parts whose blocks were verified, and how many leases they are under: without one their owner may write to them.
    verified: Mutex<HashMap<(ObjectId, u32), u32>>,
}

// SAFETY: read-only memory that no thread owns.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and whoever saw it is gone.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.size) };
    }
}

/// A lease on parts of an object, in their owner's memory.
pub struct Borrowed {
    mapped: Option<Arc<Mapped>>,
    object: ObjectId,
    /// Its parts that were verified.
    verified: Vec<u32>,
    lease: u64,
    link: Arc<Link>,
    returns: Sender<(Arc<Link>, u64)>,
}

/// A part under a lease: where it lies in the memory.
pub type Part = (Arc<Borrowed>, usize, usize);

/// Why there is no lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseDenied {
    /// Its owner is on another host.
    Elsewhere,
    /// Its owner has freed it.
    Gone,
    /// Its owner does not answer; why.
    Silent(String),
    /// The owner refuses, or what it gave is not what was expected.
    Refused(String),
}

impl Borrower {
    /// # Errors
    /// No thread can be had.
    pub fn new(cluster: &str, token: Token) -> io::Result<Borrower> {
        let (returns, returned): (_, Receiver<(Arc<Link>, u64)>) = channel();
        let links: Arc<Mutex<HashMap<SocketAddr, Known>>> = Arc::default();
        let known = links.clone();
        let give_back = move || {
            for (link, lease) in returned {
                if link.takes_nothing.load(Ordering::Relaxed) {
                    continue;
                }
                let (stream, said) = &mut *link.back.lock().expect("no panic while held");
                let frame = said.frame(&Question::Return { lease });
                if local::send(stream, &frame, None).is_err() {
                    // Other owners are not to wait for this one. What is still mapped keeps the connection open.
                    link.takes_nothing.store(true, Ordering::Relaxed);
                    link.failed.store(true, Ordering::Relaxed);
                    let is_it = |own: &Known| matches!(own, Known::Linked(own) if Arc::ptr_eq(own, &link));
                    known.lock().expect("no panic while held").retain(|_, own| !is_it(own));
                }
            }
        };
        thread::Builder::new().name("mission-return".into()).stack_size(128 << 10).spawn(give_back)?;
        Ok(Borrower { cluster: cluster.to_owned(), token, links, returns })
    }

    /// Leases on parts of an object, given as number and length; each part in their order.
    ///
    /// # Errors
    /// All of them have to come another way; see [`LeaseDenied`].
    pub fn borrow(&self, owner: SocketAddr, object: ObjectId, parts: &[(u32, u64)]) -> Result<Vec<Part>, LeaseDenied> {
        let link = self.link(owner)?;
        let mut all = Vec::with_capacity(parts.len());
        while all.len() < parts.len() {
            let wanted = &parts[all.len()..];
            let (given, file) = match link.ask(object, wanted) {
                Ok(Ok(given)) => given,
                Ok(Err(reason)) if reason == NO_SUCH_OBJECT => return Err(LeaseDenied::Gone),
                Ok(Err(reason)) => return Err(LeaseDenied::Refused(reason)),
                Err(error) => {
                    let why = format!("its owner does not answer: {error}");
                    self.forget(owner, &link, why.clone());
                    return Err(LeaseDenied::Silent(why));
                }
            };
            let returns = self.returns.clone();
            let (mapped, verified) = (None, Vec::with_capacity(given.parts.len()));
            let mut borrowed = Borrowed { mapped, object, verified, lease: given.lease, link: link.clone(), returns };
            let mapped = link.mapped(&given, &file).map_err(LeaseDenied::Refused)?;
            borrowed.mapped = Some(mapped.clone());
            verify(&mapped, &mut borrowed, wanted, &given).map_err(LeaseDenied::Refused)?;
            let borrowed = Arc::new(borrowed);
            let places = given.parts.iter().map(|place| (borrowed.clone(), place.start as usize, place.len as usize));
            all.extend(places);
        }
        Ok(all)
    }

    fn forget(&self, owner: SocketAddr, link: &Arc<Link>, why: String) {
        let mut links = self.links.lock().expect("no panic while held");
        if let Some(Known::Linked(own)) = links.get(&owner)
            && Arc::ptr_eq(own, link)
        {
            links.insert(owner, Known::Silent(Instant::now() + SILENT_FOR, why));
        }
    }

    fn link(&self, owner: SocketAddr) -> Result<Arc<Link>, LeaseDenied> {
        let known = self.links.lock().expect("no panic while held").get(&owner).cloned();
        match known {
            Some(Known::Linked(link)) => return Ok(link),
            Some(Known::Elsewhere(until)) if Instant::now() < until => return Err(LeaseDenied::Elsewhere),
            Some(Known::Silent(until, why)) if Instant::now() < until => return Err(LeaseDenied::Silent(why)),
            _ => {}
        }
        // Without the lock: other owners are not to wait for one that does not answer.
        let (known, result) = match connect(&self.cluster, owner, &self.token) {
            Ok(link) => {
                let link = Arc::new(link);
                (Known::Linked(link.clone()), Ok(link))
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                (Known::Elsewhere(Instant::now() + ELSEWHERE_FOR), Err(LeaseDenied::Elsewhere))
            }
            Err(error) => {
                let why = match error.kind() {
                    io::ErrorKind::PermissionDenied => "whoever has its owner's name does not prove the token".into(),
                    io::ErrorKind::TimedOut => "its owner does not answer".into(),
                    _ => format!("its owner cannot be asked: {error}"),
                };
                (Known::Silent(Instant::now() + SILENT_FOR, why.clone()), Err(LeaseDenied::Silent(why)))
            }
        };
        let mut links = self.links.lock().expect("no panic while held");
        let now = Instant::now();
        links.retain(|_, known| match known {
            Known::Linked(link) => !link.is_closed(),
            Known::Elsewhere(until) | Known::Silent(until, _) => now < *until,
        });
        match (links.get(&owner), &result) {
            // Another thread was faster.
            (Some(Known::Linked(link)), _) => Ok(link.clone()),
            _ => {
                links.insert(owner, known);
                result
            }
        }
    }
}

impl Link {
    /// Whether its owner is gone.
    fn is_closed(&self) -> bool {
        // While a thread sends a return the owner is there.
        let Ok(back) = self.back.try_lock() else { return false };
        let looked = rustix::net::recv(&back.0, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        !matches!(looked, Ok((1.., _)) | Err(Errno::AGAIN))
    }

    /// Asks for parts; the owner's refusal is an answer too.
    ///
    /// # Errors
    /// No answer, or one that is not to this question: the link asks nothing any more.
    fn ask(&self, object: ObjectId, wanted: &[(u32, u64)]) -> io::Result<Result<(Given, OwnedFd), String>> {
        let mut talk = self.stream.lock().expect("no panic while held");
        if self.failed.load(Ordering::Relaxed) {
            return Err(io::Error::other("an earlier answer is missing"));
        }
        let answer = self.exchange(&mut talk, object, wanted);
        self.failed.fetch_or(answer.is_err(), Ordering::Relaxed);
        answer
    }

    fn exchange(
        &self,
        talk: &mut Talk,
        object: ObjectId,
        wanted: &[(u32, u64)],
    ) -> io::Result<Result<(Given, OwnedFd), String>> {
        talk.questions += 1;
        let question = talk.questions;
        let parts = wanted.iter().take(PARTS_MAX).map(|(part, _)| *part).collect();
        {
            let (stream, said) = &mut *self.back.lock().expect("no panic while held");
            local::send(stream, &said.frame(&Question::Borrow { question, object, parts }), None)?;
        }
        let (answer, file): (Answer, _) =
            talk.heard.read_with_file(&mut talk.stream)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let wrong = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        if answer.question != question {
            return Err(wrong("the answer is to another question"));
        }
        match (answer.given, file) {
            (Err(reason), _) => Ok(Err(reason)),
            (Ok(given), Some(file)) => {
                let fits = |(place, (_, len)): (&Place, &(u32, u64))| place.len == *len;
                if given.parts.is_empty()
                    || given.parts.len() > wanted.len()
                    || !given.parts.iter().zip(wanted).all(fits)
                {
                    return Err(wrong("the answer does not fit its question"));
                }
                Ok(Ok((given, file)))
            }
            (Ok(_), None) => Err(wrong("the answer came without its memory")),
        }
    }

    /// The memory of an answer, mapped once however much lies in it.
    fn mapped(&self, given: &Given, file: &OwnedFd) -> Result<Arc<Mapped>, String> {
        let mut memories = self.memories.lock().expect("no panic while held");
        if let Some(mapped) = memories.get(&given.memory).and_then(Weak::upgrade)
            && mapped.size as u64 == given.size
        {
            return Ok(mapped);
        }
        let mapped = Arc::new(map(file, given.size)?);
        memories.retain(|_, known| known.strong_count() > 0);
        memories.insert(given.memory, Arc::downgrade(&mapped));
        Ok(mapped)
    }
}

/// Compares every block with its checksum: what a process reads of another's memory is verified once, while it has a
/// lease on it.
fn verify(mapped: &Mapped, lease: &mut Borrowed, wanted: &[(u32, u64)], given: &Given) -> Result<(), String> {
    for (place, (part, _)) in given.parts.iter().zip(wanted) {
        if place.start.checked_add(place.len).is_none_or(|end| end > mapped.size as u64) {
            return Err("a part lies outside of its memory".into());
        }
        let key = (lease.object, *part);
        let verified = || mapped.verified.lock().expect("no panic while held");
        // Counted before it is looked at, so that it is not forgotten meanwhile.
        let known = verified().get_mut(&key).map(|leases| *leases += 1).is_some();
        if !known {
            if checksum::of_blocks(mapped.bytes(place.start as usize, place.len as usize)) != place.blocks {
                return Err("a block of its memory does not fit its checksum".into());
            }
            *verified().entry(key).or_insert(0) += 1;
        }
        lease.verified.push(*part);
    }
    Ok(())
}

impl Mapped {
    fn bytes(&self, start: usize, len: usize) -> &[u8] {
        // SAFETY: callers have compared the range with the mapping; nobody can write to it, and it lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(start), len) }
    }
}

impl Borrowed {
    /// A range that was compared with the mapping when the lease was given.
    pub fn bytes(&self, start: usize, len: usize) -> &[u8] {
        self.mapped.as_ref().expect("present until dropped").bytes(start, len)
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
        // The mapping goes first: what comes back may be written to at once.
        if let Some(mapped) = self.mapped.take() {
            let mut verified = mapped.verified.lock().expect("no panic while held");
            for part in &self.verified {
                if let Entry::Occupied(mut leases) = verified.entry((self.object, *part)) {
                    *leases.get_mut() -= 1;
                    if *leases.get() == 0 {
                        leases.remove();
                    }
                }
            }
        }
        let _ = self.returns.send((self.link.clone(), self.lease));
    }
}

/// Maps all of a memory read-only, after it has proved to be what an owner gives.
fn map(file: &OwnedFd, size: u64) -> Result<Mapped, String> {
    let seals = rustix::fs::fcntl_get_seals(file).map_err(|error| format!("its memory has no seals: {error}"))?;
    if !seals.contains(SEALS) {
        return Err(format!("its memory is sealed by {seals:?} only"));
    }
    let actual = rustix::fs::fstat(file).map_err(|error| error.to_string())?.st_size as u64;
    if actual != size || size == 0 {
        return Err(format!("its memory has {actual} bytes, not {size}"));
    }
    let len = size as usize;
    // SAFETY: a new mapping touches no memory that exists; sealed memory does not shrink under it.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0) };
    let start = start.map_err(|error| format!("its memory cannot be mapped: {error}"))?;
    let start = NonNull::new(start.cast()).expect("mmap does not give null");
    Ok(Mapped { start, size: len, verified: Mutex::default() })
}

fn connect(cluster: &str, owner: SocketAddr, token: &Token) -> io::Result<Link> {
    let stream = local::connect(&name(cluster, owner), token, Purpose::Memory)?;
    stream.set_read_timeout(Some(STALL))?;
    stream.set_write_timeout(Some(STALL))?;
    let back = stream.try_clone()?;
    Ok(Link {
        stream: Mutex::new(Talk { stream, heard: Incoming::new(MESSAGE_BYTES), questions: 0 }),
        back: Mutex::new((back, Outgoing::default())),
        failed: AtomicBool::new(false),
        takes_nothing: AtomicBool::new(false),
        memories: Mutex::default(),
    })
}

fn name(cluster: &str, address: SocketAddr) -> String {
    format!("{}-{address}", host::socket_name(cluster))
}
