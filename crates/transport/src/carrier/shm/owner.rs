//! The owner's side: gives leases on its objects, as long as their readers live.

use super::{
    Answer, BLOCKS_MAX, Given, Kind, LentFile, MESSAGE_BYTES, NO_SUCH_OBJECT, PARTS_MAX, Place, Question, name,
};
use crate::auth::{Purpose, Token};
use crate::local::{self, FILES_MAX, Incoming, Outgoing};
use crate::object::ObjectId;
use crate::segment::SHARED_MIN;
use crate::store::{Body, Object, Store};
use mission_core::defaults::STALL;
use mission_core::types::Encryption;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Connections that have not proved anything yet; more are closed at once.
const UNADMITTED_MAX: usize = 64;
/// Processes that read here at once: a host has fewer workers.
const READERS_MAX: usize = 256;

/// What listens for readers of an owner's objects, and gives them leases until it is dropped.
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
        let mut leases: HashMap<u64, Lease> = HashMap::new();
        let mut next = 0;
        let (mut heard, mut said) = (Incoming::new(MESSAGE_BYTES), Outgoing::default());
        loop {
            match heard.read(&mut reader) {
                Ok(Some(Question::Borrow { question, wanted })) => {
                    next += 1;
                    let mut lease = Lease::default();
                    let objects = lease.give(&self.store, &wanted);
                    let files = lease.files.iter().map(|(shared, _)| *shared).collect();
                    let frame = said.frame(&Answer { question, lease: next, files, objects });
                    let files: Vec<BorrowedFd<'_>> = lease.files.iter().map(|(_, file)| file.as_fd()).collect();
                    let sent = local::send(&reader, &frame, &files);
                    drop(files);
                    // The reader has descriptors of its own now.
                    lease.files.clear();
                    if !lease.objects.is_empty() {
                        leases.insert(next, lease);
                    }
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

/// Objects that one reader looks at: their memory is read-only, and their places are not used again.
#[derive(Default)]
struct Lease {
    objects: Vec<Leased>,
    /// What they lie in, until the answer is sent.
    files: Vec<(LentFile, OwnedFd)>,
}

struct Leased(Arc<Object>);

impl Drop for Leased {
    fn drop(&mut self) {
        if let Body::Memory(segment) = self.0.body() {
            segment.unprotect();
        }
    }
}

/// What an answer may still carry; its first part fits in any case.
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

impl Lease {
    /// Takes as many parts of these objects as one answer carries; of each object where they lie, or why there is no lease.
    fn give(&mut self, store: &Store, wanted: &[(ObjectId, Vec<u32>)]) -> Vec<Result<Given, String>> {
        let mut objects = Vec::new();
        let mut room = Room { parts: PARTS_MAX, blocks: BLOCKS_MAX };
        for (object, parts) in wanted {
            if self.files.len() >= FILES_MAX {
                break;
            }
            let found = store.get(object).ok_or_else(|| NO_SUCH_OBJECT.to_owned());
            match found.and_then(|object| self.lend(&object, parts, &mut room)) {
                Ok(given) if given.parts.is_empty() => break,
                Ok(given) => {
                    let is_all = given.parts.len() == parts.len();
                    objects.push(Ok(given));
                    if !is_all {
                        break;
                    }
                }
                // It takes the place of a part.
                Err(reason) if room.take(0) => objects.push(Err(reason)),
                Err(_) => break,
            }
        }
        objects
    }

    /// The first of these parts, as many as there is room for.
    fn lend(&mut self, object: &Arc<Object>, parts: &[u32], room: &mut Room) -> Result<Given, String> {
        if object.encryption != Encryption::None {
            return Err("this object may only leave encrypted".into());
        }
        if parts.is_empty() {
            return Err("no parts were asked for".into());
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
        if places.is_empty() {
            return Ok(Given { file: 0, parts: places });
        }
        let (file, start) = match object.body() {
            Body::Memory(segment) => {
                let memory = segment.protect()?;
                self.objects.push(Leased(object.clone()));
                (self.file(Kind::Memory, memory.file, memory.size)?, memory.start)
            }
            Body::Spooled(range) => {
                let (file, start) =
                    range.lent().ok_or("it lies in the spool, in the file that is its worker's alone")?;
                self.objects.push(Leased(object.clone()));
                (self.file(Kind::Spool, file, 0)?, start)
            }
        };
        places.iter_mut().for_each(|place| place.start += start);
        Ok(Given { file, parts: places })
    }

    /// The place of a file among those of the answer.
    fn file(&mut self, kind: Kind, file: &File, size: u64) -> Result<usize, String> {
        // Its number tells one from another as long as this process has them open.
        let name = rustix::fs::fstat(file).map_err(|error| error.to_string())?.st_ino;
        if let Some(known) = self.files.iter().position(|(shared, _)| (shared.kind, shared.name) == (kind, name)) {
            return Ok(known);
        }
        let own =
            file.as_fd().try_clone_to_owned().map_err(|error| format!("its owner has no descriptor left: {error}"))?;
        self.files.push((LentFile { kind, name, size }, own));
        Ok(self.files.len() - 1)
    }
}
