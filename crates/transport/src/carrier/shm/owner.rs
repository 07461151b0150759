//! The owner's side: grants leases on its objects, as long as their readers live.

use super::{
    Answer, BLOCKS_MAX, Given, Kind, LeaseName, MESSAGE_BYTES, NO_SUCH_OBJECT, PARTS_MAX, Place, Question, SharedFile,
    name,
};
use crate::auth::Token;
use crate::local::{self, FILES_MAX, Incoming, Outgoing};
use crate::object::ObjectId;
use crate::segment::SHARED_MIN;
use crate::store::{Body, Object, Store};
use mission_core::defaults::STALL;
use mission_core::types::Encryption;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Connections that have not proved anything yet; more are closed at once.
const UNADMITTED_MAX: usize = 64;
/// Most processes that read here: a host has fewer workers.
const READERS_MAX: usize = 256;

/// Most leases of one reader.
const LEASES_MAX: usize = 1 << 16;

/// Listens for readers of an owner's objects, and grants them leases until it is dropped.
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
    /// Leases that have ended.
    ended: Sender<Leased>,
}

impl Lender {
    /// Grants leases on the objects of `store`, whose server has `address`.
    ///
    /// # Errors
    /// Another process of this network namespace has the name: memory is not shared then.
    pub fn new(cluster: &str, address: SocketAddr, token: Token, store: Arc<Store>) -> io::Result<Lender> {
        let listener = local::bind(&name(cluster, address))?;
        let (ended, leases) = channel::<Leased>();
        let end_all = move || leases.into_iter().for_each(drop);
        thread::Builder::new().name("mission-return".into()).stack_size(128 << 10).spawn(end_all)?;
        let shared = Arc::new(Shared {
            listener,
            token,
            store,
            closing: AtomicBool::new(false),
            readers: Mutex::default(),
            unadmitted: AtomicUsize::new(0),
            ended,
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
                let admitted = local::admit(&reader, &own.token);
                own.unadmitted.fetch_sub(1, Ordering::Relaxed);
                if admitted.is_err() {
                    return;
                }
                let Ok(kept) = reader.try_clone() else { return };
                // A reader that reads no answer is disconnected.
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

    /// Grants leases to one reader until it disconnects: mapped memory stays unchanged until then, whatever it sends.
    fn serve(&self, mut reader: UnixStream) {
        let mut leases: BTreeMap<LeaseName, Leased> = BTreeMap::new();
        let (mut heard, mut said) = (Incoming::new(MESSAGE_BYTES), Outgoing::default());
        let mut is_answered = true;
        loop {
            match heard.read(&mut reader) {
                Ok(Some(Question::Borrow { question, wanted })) => {
                    if !is_answered {
                        continue;
                    }
                    let mut granting = Granting { before: leases.len(), ..Granting::default() };
                    let objects = granting.grant(&self.store, &wanted);
                    let files = granting.files.iter().map(|(file, _)| *file).collect();
                    let frame = said.frame(&Answer { question, files, objects });
                    let files: Vec<BorrowedFd<'_>> = granting.files.iter().map(|(_, file)| file.as_fd()).collect();
                    if local::send(&reader, &frame, &files).is_err() {
                        // Part of the answer may have arrived. The reader may still return those leases.
                        is_answered = false;
                        let _ = reader.shutdown(Shutdown::Write);
                    }
                    let given = granting.leases.into_iter().enumerate();
                    leases.extend(given.filter_map(|(number, lease)| Some(((question, number), lease?))));
                }
                Ok(Some(Question::Return { leases: gone })) => {
                    self.end(gone.iter().filter_map(|name| leases.remove(name)));
                }
                Ok(Some(Question::ReturnAll { question })) => {
                    let of_question = (question, 0)..=(question, usize::MAX);
                    self.end(leases.extract_if(of_question, |_, _| true).map(|(_, lease)| lease));
                }
                Ok(None) => break,
                Err(_) => {
                    // Its messages are not read any more, but it may still use what it has mapped.
                    let _ = reader.shutdown(Shutdown::Write);
                    let _ = io::copy(&mut reader, &mut io::sink());
                    break;
                }
            }
        }
        self.end(leases.into_values());
    }

    /// Ends leases in another thread: freeing places of a spool file takes the kernel a while.
    fn end(&self, leases: impl IntoIterator<Item = Leased>) {
        for lease in leases {
            // Without that thread, this one frees them.
            let _ = self.ended.send(lease);
        }
    }
}

/// One answer: for each object its lease, if there is one; and the files.
#[derive(Default)]
struct Granting {
    /// Leases that the reader has already.
    before: usize,
    leases: Vec<Option<Leased>>,
    files: Vec<(SharedFile, OwnedFd)>,
}

/// An object that one reader uses: its memory is read-only, and its place is not reused.
struct Leased(Arc<Object>);

impl Drop for Leased {
    fn drop(&mut self) {
        if let Body::Memory(segment) = self.0.body() {
            segment.unprotect();
        }
    }
}

/// Remaining space in an answer; its first part fits in any case.
#[derive(Clone, Copy)]
struct Room {
    parts: usize,
    blocks: usize,
}

impl Room {
    fn take(&mut self, blocks: usize) -> bool {
        let fits = self.parts == PARTS_MAX || (self.parts > 0 && blocks <= self.blocks);
        if fits {
            self.parts -= 1;
            self.blocks = self.blocks.saturating_sub(blocks);
        }
        fits
    }
}

impl Granting {
    /// Leases as many parts of these objects as fit into one answer; returns for each object where they lie, or why
    /// there is no lease.
    fn grant(&mut self, store: &Store, wanted: &[(ObjectId, Vec<u32>)]) -> Vec<Result<Given, String>> {
        let mut objects = Vec::new();
        let mut room = Room { parts: PARTS_MAX, blocks: BLOCKS_MAX };
        for (object, parts) in wanted {
            if self.files.len() >= FILES_MAX {
                break;
            }
            let before = room;
            let found = store.get(object).ok_or_else(|| NO_SUCH_OBJECT.to_owned());
            match found.and_then(|object| self.lease(&object, parts, &mut room)) {
                Ok((given, _)) if given.parts.is_empty() => break,
                Ok((given, lease)) => {
                    let is_all = given.parts.len() == parts.len();
                    objects.push(Ok(given));
                    self.leases.push(Some(lease));
                    if !is_all {
                        break;
                    }
                }
                Err(reason) => {
                    // It takes the place of a part.
                    room = before;
                    if !room.take(0) {
                        break;
                    }
                    objects.push(Err(reason));
                    self.leases.push(None);
                }
            }
        }
        objects
    }

    /// The first of these parts, as many as there is room for; no parts, where there is none.
    fn lease(&mut self, object: &Arc<Object>, parts: &[u32], room: &mut Room) -> Result<(Given, Leased), String> {
        if object.encryption != Encryption::None {
            return Err("this object may only be sent encrypted".into());
        }
        if parts.is_empty() {
            return Err("the request names no parts".into());
        }
        if self.before + self.leases.len() >= LEASES_MAX {
            return Err(format!("its reader has {LEASES_MAX} leases already"));
        }
        if let Body::Memory(segment) = object.body()
            && segment.len() < SHARED_MIN
        {
            let least = mission_core::units::format_bytes(SHARED_MIN as u64);
            return Err(format!("objects below {least} are copied"));
        }
        let mut places = Vec::with_capacity(parts.len().min(room.parts));
        for part in parts {
            let len = object.part_len(*part).ok_or("no such part")?;
            let (start, blocks) = object.place(*part, len).ok_or("no such part")?;
            if !room.take(blocks.len()) {
                break;
            }
            places.push(Place { start, len, blocks: blocks.to_vec() });
        }
        let (lease, file, start) = match object.body() {
            Body::Memory(segment) => {
                let memory = segment.protect()?;
                let lease = Leased(object.clone());
                (lease, self.file(Kind::Memory, memory.file, memory.size)?, memory.start)
            }
            Body::Spooled(range) => {
                let (file, start) = range.shared().ok_or("it lies in its worker's private spool file")?;
                (Leased(object.clone()), self.file(Kind::Spool, file, 0)?, start)
            }
        };
        places.iter_mut().for_each(|place| place.start += start);
        Ok((Given { file, parts: places }, lease))
    }

    /// The place of a file among those of the answer.
    fn file(&mut self, kind: Kind, file: &File, size: u64) -> Result<usize, String> {
        // Its number identifies it as long as this process has it open.
        let name = rustix::fs::fstat(file).map_err(|error| error.to_string())?.st_ino;
        if let Some(known) = self.files.iter().position(|(shared, _)| (shared.kind, shared.name) == (kind, name)) {
            return Ok(known);
        }
        let own = file
            .as_fd()
            .try_clone_to_owned()
            .map_err(|error| format!("its owner has no file descriptor left: {error}"))?;
        self.files.push((SharedFile { kind, name, size }, own));
        Ok(self.files.len() - 1)
    }
}
