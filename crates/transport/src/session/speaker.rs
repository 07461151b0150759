//! The speaker of a host: receives the others' reports, and passes the shares on to them.

use super::{FromSpeaker, MESSAGE_BYTES, SLOW_PEER, ToSpeaker};
use crate::auth::Token;
use crate::host;
use crate::in_force::InForce;
use crate::local::{self, Incoming, Outgoing};
use mission_core::control::WorkerReport;
use mission_core::mission;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::Duration;

/// Connections that have not proved anything yet; more are closed at once.
const UNADMITTED_MAX: usize = 64;
/// Processes of a host: it has fewer workers.
const OTHERS_MAX: usize = 1024;
/// Most reports of one process that wait to be passed on: a process stops sending after a second (`PASSED_WITHIN`),
/// four reports.
const REPORTS_MAX: usize = 64;
/// Wait before the next accept, if the process is out of descriptors.
const PAUSE: Duration = Duration::from_millis(10);

/// Listens until it is dropped.
pub(super) struct Speaker {
    shared: Arc<Shared>,
}

struct Shared {
    listener: UnixListener,
    token: Token,
    in_force: Weak<InForce>,
    closing: AtomicBool,
    unadmitted: AtomicUsize,
    others: Mutex<BTreeMap<u64, Other>>,
    /// Channel to the thread that writes: sending never blocks.
    says: Sender<(To, Says)>,
}

#[derive(Clone)]
enum Says {
    This(Arc<FromSpeaker>),
    /// All shares, as of the time of sending.
    Standing,
}

#[derive(Clone, Copy)]
enum To {
    One(u64),
    All,
}

/// Another process of the host.
struct Other {
    address: Arc<str>,
    stream: UnixStream,
    /// Reports since [`Speaker::take`].
    reports: Vec<WorkerReport>,
    /// The number of the last report that was taken, and of the last one that was confirmed to it.
    taken: u64,
    passed: u64,
}

impl Speaker {
    /// # Errors
    /// Another process has the name, or no thread can be started.
    pub fn listen(name: &str, token: &Token, in_force: &Weak<InForce>) -> io::Result<Speaker> {
        let (says, said) = channel();
        let shared = Arc::new(Shared {
            listener: local::bind(name)?,
            token: token.clone(),
            in_force: in_force.clone(),
            closing: AtomicBool::new(false),
            unadmitted: AtomicUsize::new(0),
            others: Mutex::default(),
            says,
        });
        // Dropping it ends the threads if one of them cannot be started.
        let speaker = Speaker { shared: shared.clone() };
        let weak = Arc::downgrade(&shared);
        thread::Builder::new()
            .name("mission-says".into())
            .stack_size(256 << 10)
            .spawn(move || write_all(&weak, &said))?;
        thread::Builder::new()
            .name("mission-speaker".into())
            .stack_size(128 << 10)
            .spawn(move || shared.accept_all())?;
        Ok(speaker)
    }

    /// Sends a message to all others; never blocks.
    pub fn pass(&self, command: &mission::Command) {
        let _ = self.shared.says.send((To::All, Says::This(Arc::new(FromSpeaker::Do(command.clone())))));
    }

    /// Whether some reports are to be taken, or confirmed.
    pub fn has_news(&self) -> bool {
        self.shared.others().values().any(|other| !other.reports.is_empty() || other.taken > other.passed)
    }

    /// The reports since the last call, by address. Those of the last call have been passed on.
    pub fn take(&self) -> Vec<(Arc<str>, WorkerReport)> {
        let mut reports = Vec::new();
        for (number, other) in self.shared.others().iter_mut() {
            if other.taken > other.passed {
                other.passed = other.taken;
                let passed = FromSpeaker::Passed { number: other.taken };
                let _ = self.shared.says.send((To::One(*number), Says::This(Arc::new(passed))));
            }
            if let Some(last) = other.reports.last() {
                other.taken = last.number;
            }
            reports.extend(other.reports.drain(..).map(|report| (other.address.clone(), report)));
        }
        reports
    }
}

impl Drop for Speaker {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts: Linux ends its call with an error.
        let _ = rustix::net::shutdown(self.shared.listener.as_fd(), rustix::net::Shutdown::Both);
        for other in self.shared.others().values() {
            let _ = other.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn others(&self) -> MutexGuard<'_, BTreeMap<u64, Other>> {
        self.others.lock().expect("no panic while held")
    }

    fn accept_all(self: Arc<Shared>) {
        for number in 0.. {
            let accepted = self.listener.accept();
            if self.closing.load(Ordering::SeqCst) {
                return;
            }
            let Ok((stream, _)) = accepted else {
                thread::sleep(PAUSE);
                continue;
            };
            // Processes of other users may not use up the slots for unproved connections.
            if host::uid_of_peer(&stream) != Some(host::own_uid())
                || self.unadmitted.load(Ordering::Relaxed) >= UNADMITTED_MAX
                || self.others().len() >= OTHERS_MAX
            {
                continue;
            }
            self.unadmitted.fetch_add(1, Ordering::Relaxed);
            let own = self.clone();
            let serve = move || {
                let admitted = local::admit(&stream, &own.token);
                own.unadmitted.fetch_sub(1, Ordering::Relaxed);
                if admitted.is_ok() {
                    // If this ends, the other process notices, and sends its reports itself.
                    let _ = own.hear(number, stream);
                    own.others().remove(&number);
                }
            };
            let started = thread::Builder::new().name("mission-hears".into()).stack_size(256 << 10).spawn(serve);
            if started.is_err() {
                self.unadmitted.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Reads messages of one process until it disconnects.
    fn hear(&self, number: u64, mut stream: UnixStream) -> io::Result<()> {
        let mut messages = Incoming::new(MESSAGE_BYTES);
        stream.set_read_timeout(Some(local::HANDSHAKE))?;
        let Some(ToSpeaker::Here { address }) = messages.read(&mut stream)? else { return Ok(()) };
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(SLOW_PEER))?;
        let other = Other { address, stream: stream.try_clone()?, reports: Vec::new(), taken: 0, passed: 0 };
        self.others().insert(number, other);
        if self.closing.load(Ordering::SeqCst) {
            return Ok(());
        }
        // Register it first, so that it receives changes from here on, too.
        let _ = self.says.send((To::One(number), Says::Standing));
        while let Some(ToSpeaker::Report(report)) = messages.read(&mut stream)? {
            let mut others = self.others();
            match others.get_mut(&number) {
                Some(other) if other.reports.len() < REPORTS_MAX => other.reports.push(*report),
                _ => break,
            }
        }
        let _ = stream.shutdown(Shutdown::Both);
        Ok(())
    }
}

/// Writes messages in order. A process that reads nothing is disconnected.
fn write_all(shared: &Weak<Shared>, said: &Receiver<(To, Says)>) {
    let mut sent: BTreeMap<u64, Outgoing> = BTreeMap::new();
    while let Ok((to, message)) = said.recv() {
        let Some(shared) = shared.upgrade() else { return };
        let message = match message {
            Says::This(message) => message,
            Says::Standing => {
                // If there are no shares yet, it receives the first ones with all others.
                let Some(standing) = shared.in_force.upgrade().and_then(|own| own.standing()) else { continue };
                Arc::new(FromSpeaker::Do(mission::Command::Shares(standing)))
            }
        };
        let streams: Vec<(u64, UnixStream)> = {
            let others = shared.others();
            sent.retain(|number, _| others.contains_key(number));
            let meant = others.iter().filter(|(number, _)| match to {
                To::One(one) => one == **number,
                To::All => true,
            });
            meant.filter_map(|(number, other)| Some((*number, other.stream.try_clone().ok()?))).collect()
        };
        for (number, mut stream) in streams {
            let frame = sent.entry(number).or_default().frame(&*message);
            if frame.len() > MESSAGE_BYTES || stream.write_all(&frame).is_err() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}
