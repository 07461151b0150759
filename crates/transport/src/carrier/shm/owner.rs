//! The owner's side: gives leases on its objects, as long as their readers live.

use super::{Answer, BLOCKS_MAX, Given, MESSAGE_BYTES, NO_SUCH_OBJECT, PARTS_MAX, Place, Question, name};
use crate::auth::{Purpose, Token};
use crate::local::{self, Incoming, Outgoing};
use crate::segment::SHARED_MIN;
use crate::store::{Object, Store};
use mission_core::defaults::STALL;
use mission_core::types::Encryption;
use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
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
