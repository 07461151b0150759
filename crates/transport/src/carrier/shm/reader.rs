//! The reader's side: maps memory that other processes of its host lease to it.

use super::{
    Answer, Given, Kind, LeaseName, MESSAGE_BYTES, NO_SUCH_OBJECT, PARTS_MAX, Place, Question, SharedFile, name,
};
use crate::auth::Token;
use crate::checksum;
use crate::host;
use crate::local::{self, Incoming, Outgoing};
use crate::object::ObjectId;
use crate::segment::SEALS;
use mission_core::defaults::{BLOCK_BYTES, PROGRESS_TIMEOUT, STALL};
use mission_core::report::Negotiated;
use mission_core::types::Transport;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::RecvFlags;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::iter::once;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self};
use std::time::{Duration, Instant};

/// An owner that did not answer is not asked again for this long: its bytes are fetched another way.
const SILENT_FOR: Duration = STALL;
/// An owner without a name here is considered to be on another host for this long.
const ELSEWHERE_FOR: Duration = Duration::from_secs(60);
/// Letters of an owner's reason that are kept and reported.
const REASON_MAX: usize = 200;
/// Leases that go back in one message: as many as an answer has parts.
const RETURNS_MAX: usize = PARTS_MAX;

/// The reader's side: leases on objects of other processes of this host.
pub struct Borrower {
    cluster: String,
    token: Token,
    links: Arc<Mutex<HashMap<SocketAddr, Known>>>,
    /// Channel to the thread that returns leases: a task must not wait for that.
    returns: Sender<(Arc<Link>, Ended)>,
}

/// What is known of an owner.
#[derive(Clone)]
enum Known {
    Linked(Arc<Link>),
    /// There is no such name in this network namespace; until then, since a worker may start with that address.
    Elsewhere(Instant),
    /// It did not answer, or rejected this process; it is asked again after this.
    Silent(Instant, String),
}

struct Link {
    stream: Mutex<Talk>,
    /// To return leases without waiting for an answer that another thread waits for.
    back: Mutex<(UnixStream, Outgoing)>,
    /// An answer is missing, and may still arrive: this link is not used for questions any more.
    failed: AtomicBool,
    /// The owner reads no returns: its leases are returned when the last of them closes the connection.
    takes_nothing: AtomicBool,
    /// Mapped memory of the owner, while it is in use.
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
    file: Arc<(SharedFile, OwnedFd)>,
    /// Verified parts, and the number of their leases: without a lease the owner may write to them.
    verified: Mutex<HashMap<(ObjectId, u32), u32>>,
}

// SAFETY: read-only memory that no thread owns.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and its users are gone.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.size) };
    }
}

/// Returned leases for an owner.
enum Ended {
    Lease(LeaseName),
    /// All leases of a question whose answer could not be read.
    All(u64),
}

/// A lease on an object's parts from one answer; returned when none of them is in use.
struct Lease {
    name: LeaseName,
    link: Arc<Link>,
    returns: Sender<(Arc<Link>, Ended)>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let _ = self.returns.send((self.link.clone(), Ended::Lease(self.name)));
    }
}

/// A leased part that was not verified yet.
pub struct LeasedPart {
    object: ObjectId,
    part: u32,
    place: Place,
    file: Arc<(SharedFile, OwnedFd)>,
    lease: Arc<Lease>,
}

/// Parts of an object in their owner's memory, mapped and verified.
pub struct Borrowed {
    mapped: Option<Arc<Mapped>>,
    object: ObjectId,
    /// Its parts that were verified.
    verified: Vec<u32>,
    /// Dropped after the mapping.
    _lease: Arc<Lease>,
}

/// A mapped part: where it lies in the memory.
pub type Part = (Arc<Borrowed>, usize, usize);

/// Parts of an object: number and bytes of each.
pub type WantedOf = (ObjectId, Vec<(u32, u64)>);

/// Why there is no lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseDenied {
    /// Its owner is on another host.
    Elsewhere,
    /// Its owner has freed it.
    Gone,
    /// The owner does not answer; why.
    Silent(String),
    /// The owner refuses, or its answer is not as expected.
    Refused(String),
}

impl Borrower {
    /// # Errors
    /// No thread can be had.
    pub fn new(cluster: &str, token: Token) -> io::Result<Borrower> {
        let (returns, returned): (_, Receiver<(Arc<Link>, Ended)>) = channel();
        let links: Arc<Mutex<HashMap<SocketAddr, Known>>> = Arc::default();
        let known = links.clone();
        let give_back = move || {
            for first in &returned {
                // Include leases that ended meanwhile.
                let mut ended: Vec<(Arc<Link>, Vec<LeaseName>)> = Vec::new();
                for (link, gone) in once(first).chain(returned.try_iter().take(RETURNS_MAX)) {
                    match gone {
                        Ended::All(question) => give(&known, &link, &Question::ReturnAll { question }),
                        Ended::Lease(name) => match ended.iter_mut().find(|(own, _)| Arc::ptr_eq(own, &link)) {
                            Some((_, names)) => names.push(name),
                            None => ended.push((link, vec![name])),
                        },
                    }
                }
                for (link, leases) in ended {
                    give(&known, &link, &Question::Return { leases });
                }
            }
        };
        thread::Builder::new().name("mission-return".into()).stack_size(128 << 10).spawn(give_back)?;
        Ok(Borrower { cluster: cluster.to_owned(), token, links, returns })
    }

    /// Takes leases on parts of objects; returns for each object, in order, all requested parts, or why they have to be
    /// fetched another way. Calls `gives_up` before each question.
    pub fn borrow(
        &self,
        owner: SocketAddr,
        wanted: &[WantedOf],
        gives_up: impl Fn() -> bool,
        mut take: impl FnMut(&WantedOf, Result<Vec<LeasedPart>, LeaseDenied>),
    ) {
        let (mut done, mut begun) = (0, Vec::new());
        let mut waited = Duration::ZERO;
        let mut ask_all = || -> Result<(), LeaseDenied> {
            let link = self.link(owner)?;
            while done < wanted.len() {
                if gives_up() {
                    return Err(LeaseDenied::Silent("no fetch waits for it any more".into()));
                }
                if waited > PROGRESS_TIMEOUT {
                    let why = format!("its owner took {waited:.0?} to send some of its answers");
                    self.forget(owner, &link, why.clone());
                    return Err(LeaseDenied::Silent(why));
                }
                let asked = Instant::now();
                let answered = self.ask(owner, &link, &wanted[done..], begun.len())?;
                waited += asked.elapsed();
                for given in answered {
                    let own = &wanted[done];
                    match given {
                        Ok(leased) => {
                            begun.extend(leased);
                            if begun.len() < own.1.len() {
                                // The rest is in the next answer.
                                continue;
                            }
                            take(own, Ok(std::mem::take(&mut begun)));
                        }
                        Err(reason) => {
                            begun.clear();
                            take(own, Err(reason));
                        }
                    }
                    done += 1;
                }
            }
            Ok(())
        };
        if let Err(denied) = ask_all() {
            wanted[done..].iter().for_each(|own| take(own, Err(denied.clone())));
        }
    }

    /// Leases of one answer for these objects; the first `begun` parts are already leased.
    fn ask(
        &self,
        owner: SocketAddr,
        link: &Arc<Link>,
        wanted: &[WantedOf],
        begun: usize,
    ) -> Result<Vec<Result<Vec<LeasedPart>, LeaseDenied>>, LeaseDenied> {
        let (answer, files) = link.ask(wanted, begun).map_err(|(question, error)| {
            if let Some(question) = question {
                let _ = self.returns.send((link.clone(), Ended::All(question)));
            }
            let why = format!("its owner does not answer: {error}");
            self.forget(owner, link, why.clone());
            LeaseDenied::Silent(why)
        })?;
        let files: Vec<Arc<(SharedFile, OwnedFd)>> = answer.files.into_iter().zip(files).map(Arc::new).collect();
        let leased_of = |number: usize, given: Given| {
            let lease = Lease { name: (answer.question, number), link: link.clone(), returns: self.returns.clone() };
            let lease = Arc::new(lease);
            let (object, parts) = &wanted[number];
            let parts = &parts[if number == 0 { begun } else { 0 }..];
            // If this process has no descriptors left, the kernel drops the received ones.
            let file = files.get(given.file).ok_or("this process has no file descriptor left for it")?;
            if given.parts.iter().zip(parts).any(|(place, (_, len))| place.len != *len) {
                return Err("a part has a different length at its owner");
            }
            let leased = |(place, (part, _)): (Place, &(u32, u64))| {
                let (object, part, file, lease) = (*object, *part, file.clone(), lease.clone());
                LeasedPart { object, part, place, file, lease }
            };
            Ok(given.parts.into_iter().zip(parts).map(leased).collect())
        };
        let objects = answer.objects.into_iter().enumerate().map(|(number, given)| match given {
            Ok(given) => leased_of(number, given).map_err(|why| LeaseDenied::Refused(why.into())),
            Err(reason) if reason == NO_SUCH_OBJECT => Err(LeaseDenied::Gone),
            Err(reason) => Err(LeaseDenied::Refused(reason.chars().take(REASON_MAX).collect())),
        });
        Ok(objects.collect())
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
                    io::ErrorKind::PermissionDenied => {
                        "the process under its owner's name does not prove the cluster's token".into()
                    }
                    io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "its owner does not answer".into(),
                    _ => format!("its owner cannot be reached: {error}"),
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
        // While a thread sends a return, the owner is alive.
        let Ok(back) = self.back.try_lock() else { return false };
        let looked = rustix::net::recv(&back.0, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        !matches!(looked, Ok((1.., _)) | Err(Errno::AGAIN))
    }

    /// Asks for parts of objects, without those of the first that are already leased; refusals are answers, too.
    ///
    /// # Errors
    /// No answer, or one that is not to this question: the link asks nothing any more. With the question, if it was asked.
    fn ask(&self, wanted: &[WantedOf], begun: usize) -> Result<(Answer, Vec<OwnedFd>), (Option<u64>, io::Error)> {
        let mut talk = self.stream.lock().expect("no panic while held");
        if self.failed.load(Ordering::Relaxed) {
            return Err((None, io::Error::other("an earlier answer is missing")));
        }
        let answer = self.exchange(&mut talk, wanted, begun);
        self.failed.fetch_or(answer.is_err(), Ordering::Relaxed);
        answer.map_err(|error| (Some(talk.questions), error))
    }

    fn exchange(&self, talk: &mut Talk, wanted: &[WantedOf], begun: usize) -> io::Result<(Answer, Vec<OwnedFd>)> {
        talk.questions += 1;
        let question = talk.questions;
        // As many as one answer may carry.
        let mut room = PARTS_MAX;
        let mut asked: Vec<(ObjectId, &[(u32, u64)])> = Vec::new();
        for (object, parts) in wanted {
            let parts = if asked.is_empty() { &parts[begun..] } else { parts };
            asked.push((*object, &parts[..parts.len().min(room)]));
            room -= asked.last().map_or(0, |(_, parts)| parts.len());
            if room == 0 {
                break;
            }
        }
        let numbers = |parts: &[(u32, u64)]| parts.iter().map(|(part, _)| *part).collect();
        let borrow = Question::Borrow {
            question,
            wanted: asked.iter().map(|(object, parts)| (*object, numbers(parts))).collect(),
        };
        {
            let (stream, said) = &mut *self.back.lock().expect("no panic while held");
            local::send(stream, &said.frame(&borrow), &[])?;
        }
        let (answer, files): (Answer, _) =
            talk.heard.read_with_files(&mut talk.stream)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let wrong = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidData, why.to_owned()));
        if answer.question != question {
            return wrong("the answer belongs to another request");
        }
        let last = answer.objects.len().wrapping_sub(1);
        let given = answer.objects.iter().zip(&asked).enumerate();
        let mut given = given.filter_map(|(number, (given, (_, asked)))| Some((number, given.as_ref().ok()?, *asked)));
        let fits = |(number, given, asked): (usize, &Given, &[(u32, u64)])| {
            // An answer may end in the middle of an object.
            let count = given.parts.len();
            given.file < answer.files.len()
                && (count == asked.len() || (number == last && (1..asked.len()).contains(&count)))
        };
        if answer.objects.is_empty() || answer.objects.len() > asked.len() || !given.all(fits) {
            return wrong("the answer does not match its request");
        }
        Ok((answer, files))
    }

    /// Maps memory of the owner, once for all objects in it.
    fn mapped(&self, file: &Arc<(SharedFile, OwnedFd)>) -> Result<Arc<Mapped>, String> {
        let shared = file.0;
        let mut memories = self.memories.lock().expect("no panic while held");
        if let Some(mapped) = memories.get(&shared.name).and_then(Weak::upgrade)
            && mapped.size as u64 == shared.size
        {
            return Ok(mapped);
        }
        let mapped = Arc::new(map(file, shared.size)?);
        memories.retain(|_, known| known.strong_count() > 0);
        memories.insert(shared.name, Arc::downgrade(&mapped));
        Ok(mapped)
    }
}

impl LeasedPart {
    /// Whether it lies in memory that can be mapped; else it has to be copied.
    pub fn is_memory(&self) -> bool {
        self.file.0.kind == Kind::Memory
    }

    pub fn size(&self) -> u64 {
        self.place.len
    }

    /// Copies the part out of its owner's file. The file is not mapped: the page faults of a mapping that is used once
    /// cost more than the kernel's copy. Each block is verified in the copy, while it lies in the cache.
    ///
    /// # Errors
    /// Why it has to be fetched another way; or `gives_up` is true, which is called before each block.
    ///
    /// # Panics
    /// `into` has another length.
    pub fn copy(&self, into: &mut [u8], gives_up: impl Fn() -> bool) -> Result<(), String> {
        assert_eq!(into.len() as u64, self.place.len);
        copy_verified(&self.file.1, &self.place, into, gives_up)
    }

    /// What was verified of the memory, for reports.
    pub fn negotiated(&self) -> Negotiated {
        let of = match self.file.0.kind {
            Kind::Memory => "sealed against shrinking, growing and writing",
            Kind::Spool => "read from its worker's spool file",
        };
        Negotiated {
            transport: Transport::Shm.name().into(),
            memory: Some(format!("of user {}, {of}", host::own_uid())),
            ..Negotiated::default()
        }
    }
}

/// Sends returned leases to an owner; other owners must not wait for one that reads nothing.
fn give(known: &Mutex<HashMap<SocketAddr, Known>>, link: &Arc<Link>, returned: &Question) {
    if link.takes_nothing.load(Ordering::Relaxed) {
        return;
    }
    let (stream, said) = &mut *link.back.lock().expect("no panic while held");
    if local::send(stream, &said.frame(returned), &[]).is_err() {
        // What is still mapped keeps the connection open.
        link.takes_nothing.store(true, Ordering::Relaxed);
        link.failed.store(true, Ordering::Relaxed);
        let is_it = |own: &Known| matches!(own, Known::Linked(own) if Arc::ptr_eq(own, link));
        known.lock().expect("no panic while held").retain(|_, own| !is_it(own));
    }
}

/// Maps parts of one object where they lie, in memory.
///
/// # Errors
/// Why they have to be fetched another way.
pub fn map_all(leased: &[LeasedPart]) -> Result<Vec<Part>, String> {
    let mut all = Vec::with_capacity(leased.len());
    // Parts of one answer are under one lease.
    for of_answer in leased.chunk_by(|one, next| Arc::ptr_eq(&one.lease, &next.lease)) {
        let mapped = of_answer[0].lease.link.mapped(&of_answer[0].file)?;
        let (object, lease) = (of_answer[0].object, of_answer[0].lease.clone());
        let verified = Vec::with_capacity(of_answer.len());
        let mut borrowed = Borrowed { mapped: Some(mapped.clone()), object, verified, _lease: lease };
        of_answer.iter().try_for_each(|part| verify(&mapped, &mut borrowed, part))?;
        let borrowed = Arc::new(borrowed);
        all.extend(
            of_answer
                .iter()
                .map(|LeasedPart { place, .. }| (borrowed.clone(), place.start as usize, place.len as usize)),
        );
    }
    Ok(all)
}

/// Compares every block with its checksum: another process's memory is verified once, while there is a lease on it.
fn verify(mapped: &Mapped, borrowed: &mut Borrowed, part: &LeasedPart) -> Result<(), String> {
    let place = &part.place;
    if place.start.checked_add(place.len).is_none_or(|end| end > mapped.size as u64) {
        return Err("a part lies outside of its memory".into());
    }
    let key = (part.object, part.part);
    let verified = || mapped.verified.lock().expect("no panic while held");
    // Counted before verification, so that it is not forgotten meanwhile.
    let known = verified().get_mut(&key).map(|leases| *leases += 1).is_some();
    if !known {
        if checksum::of_blocks(mapped.bytes(place.start as usize, place.len as usize)) != place.blocks {
            return Err("a block of its memory does not match its checksum".into());
        }
        *verified().entry(key).or_insert(0) += 1;
    }
    borrowed.verified.push(part.part);
    Ok(())
}

fn copy_verified(file: &OwnedFd, place: &Place, into: &mut [u8], gives_up: impl Fn() -> bool) -> Result<(), String> {
    let blocks = into.chunks_mut(BLOCK_BYTES as usize);
    if blocks.len() != place.blocks.len() {
        return Err("a part's number of blocks does not match its size".into());
    }
    let mut at = place.start;
    for (block, checksum) in blocks.zip(&place.blocks) {
        if gives_up() {
            return Err("no fetch waits for it any more".into());
        }
        let mut rest = &mut *block;
        while !rest.is_empty() {
            let read =
                rustix::io::pread(file, &mut *rest, at).map_err(|error| format!("its file cannot be read: {error}"))?;
            if read == 0 {
                return Err("a part lies outside of its file".into());
            }
            at += read as u64;
            rest = &mut rest[read..];
        }
        if checksum::of(block) != *checksum {
            return Err("a block of its file does not match its checksum".into());
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

    /// A descriptor of its memory.
    pub fn file(&self) -> &OwnedFd {
        &self.mapped.as_ref().expect("present until dropped").file.1
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // Drop the mapping first: returned memory may be written to at once.
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
    }
}

/// Maps all of a memory file read-only, after its seals and size were verified.
fn map(shared: &Arc<(SharedFile, OwnedFd)>, size: u64) -> Result<Mapped, String> {
    let file = &shared.1;
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
    Ok(Mapped { start, size: len, file: shared.clone(), verified: Mutex::default() })
}

fn connect(cluster: &str, owner: SocketAddr, token: &Token) -> io::Result<Link> {
    let stream = local::connect(&name(cluster, owner), token)?;
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
