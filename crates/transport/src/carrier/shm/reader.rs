//! The reader's side: maps what other processes of its host lease to it.

use super::{Answer, Given, MESSAGE_BYTES, NO_SUCH_OBJECT, PARTS_MAX, Place, Question, name};
use crate::auth::{Purpose, Token};
use crate::checksum;
use crate::host;
use crate::local::{self, Incoming, Outgoing};
use crate::object::ObjectId;
use crate::segment::{SEALS, Segment};
use mission_core::defaults::{BLOCK_BYTES, STALL};
use mission_core::report::Negotiated;
use mission_core::types::Transport;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::RecvFlags;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self};
use std::time::{Duration, Instant};

/// An owner that did not answer is not asked again for so long: its bytes come another way.
const SILENT_FOR: Duration = STALL;
/// For so long an owner without a name here counts as one of another host.
const ELSEWHERE_FOR: Duration = Duration::from_secs(60);
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
            let (mut borrowed, given, file) = self.lease(owner, &link, object, wanted)?;
            let mapped = link.mapped(&given, &file).map_err(LeaseDenied::Refused)?;
            borrowed.mapped = Some(mapped.clone());
            verify(&mapped, &mut borrowed, wanted, &given).map_err(LeaseDenied::Refused)?;
            let borrowed = Arc::new(borrowed);
            let places = given.parts.iter().map(|place| (borrowed.clone(), place.start as usize, place.len as usize));
            all.extend(places);
        }
        Ok(all)
    }

    /// Copies parts of an object out of their owner's memory, which is not mapped for that: the pages of a mapping that is used once cost
    /// more than the kernel's copy. Each block is verified in the copy, while it lies in the cache.
    ///
    /// # Errors
    /// As [`Borrower::borrow`].
    pub fn copy(
        &self,
        owner: SocketAddr,
        object: ObjectId,
        parts: &[(u32, u64)],
        into: &mut [Segment],
    ) -> Result<(), LeaseDenied> {
        let link = self.link(owner)?;
        let mut done = 0;
        while done < parts.len() {
            let (_lease, given, file) = self.lease(owner, &link, object, &parts[done..])?;
            for place in &given.parts {
                copy_verified(&file, place, into[done].bytes_mut()).map_err(LeaseDenied::Refused)?;
                done += 1;
            }
        }
        Ok(())
    }

    /// A lease on the first of these parts, as many as one answer has.
    fn lease(
        &self,
        owner: SocketAddr,
        link: &Arc<Link>,
        object: ObjectId,
        wanted: &[(u32, u64)],
    ) -> Result<(Borrowed, Given, OwnedFd), LeaseDenied> {
        match link.ask(object, wanted) {
            Ok(Ok((given, file))) => {
                let (returns, verified) = (self.returns.clone(), Vec::with_capacity(given.parts.len()));
                let (lease, link) = (given.lease, link.clone());
                Ok((Borrowed { mapped: None, object, verified, lease, link, returns }, given, file))
            }
            Ok(Err(reason)) if reason == NO_SUCH_OBJECT => Err(LeaseDenied::Gone),
            Ok(Err(reason)) => Err(LeaseDenied::Refused(reason)),
            Err(error) => {
                let why = format!("its owner does not answer: {error}");
                self.forget(owner, link, why.clone());
                Err(LeaseDenied::Silent(why))
            }
        }
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

fn copy_verified(file: &OwnedFd, place: &Place, into: &mut [u8]) -> Result<(), String> {
    let blocks = into.chunks_mut(BLOCK_BYTES as usize);
    if blocks.len() != place.blocks.len() {
        return Err("a part has another number of blocks than its size".into());
    }
    let mut at = place.start;
    for (block, checksum) in blocks.zip(&place.blocks) {
        let mut rest = &mut *block;
        while !rest.is_empty() {
            let read = rustix::io::pread(file, &mut *rest, at)
                .map_err(|error| format!("its memory cannot be read: {error}"))?;
            if read == 0 {
                return Err("a part lies outside of its memory".into());
            }
            at += read as u64;
            rest = &mut rest[read..];
        }
        if checksum::of(block) != *checksum {
            return Err("a block of its memory does not fit its checksum".into());
        }
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
