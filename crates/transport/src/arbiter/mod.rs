//! Which process of a host grants its slots, and how the others communicate with it.
//!
//! All decisions are in [`mission_core::host`]; here are the sockets and the threads. The arbiter is the process that
//! binds an abstract Unix socket whose name contains a generation ([`names`]). If it falls silent, because its process
//! was stopped, the others bind the next generation ([`election`]). An arbiter that continues and finds a higher
//! generation steps down; its grants meanwhile reach no process, since the others have closed their connections.
//! [`leader`] grants slots, [`follower`] requests them, and [`queues`] numbers the jobs and transfers.

mod election;
mod follower;
mod leader;
mod names;
mod queues;
#[cfg(test)]
mod tests;

pub use queues::Numbers;

use crate::auth::Token;
use crate::clock::Clock;
use crate::local::Outgoing;
use leader::Leader;
use mission_core::host::fair::Shares;
use mission_core::host::slots::{Event, SELF};
use mission_core::host::{FromArbiter, ToArbiter};
use mission_core::shares::FlowsPerHost;
use mission_core::units::Time;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// Called when [`Arbiter::next`] has something, by a thread that holds no lock of this module.
pub type Wake = Box<dyn Fn() + Send + Sync>;

/// Longest time for a starting process to find an arbiter or become it; then it arbitrates only for itself.
const ELECTION: Duration = Duration::from_secs(5);
/// Wait before another attempt to bind or connect.
const ELECTION_PAUSE: Duration = Duration::from_millis(5);
/// A process that lost a connection to another counts as one with neighbours for this long: the others find the next
/// arbiter meanwhile, or come back, and what is put before that is for them, too.
const NEIGHBOURS_AGAIN: Duration = ELECTION;
/// A process that reads no message for this long is disconnected.
const SLOW_PEER: Duration = Duration::from_millis(200);
/// Longest message: a ticket, two ids and a number.
const MESSAGE_BYTES: usize = 512;

/// What happens to this process's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    Message(FromArbiter),
    /// An arbiter was found or started.
    Joined {
        remote: bool,
    },
    Lost,
}

/// This process's role in the arbitration of its host.
pub struct Arbiter {
    shared: Arc<Shared>,
}

struct Shared {
    key: String,
    token: Token,
    clock: Clock,
    state: Mutex<State>,
    /// Wakes the thread that ticks when the arbiter closes.
    tick: Condvar,
    wake: Wake,
    unadmitted: AtomicUsize,
}

struct State {
    role: Role,
    /// Counts the roles: events from threads of an earlier role are ignored.
    epoch: u64,
    /// The highest known generation of an arbiter of this cluster.
    generation: u64,
    flows_per_host: FlowsPerHost,
    shares: Shares,
    /// Events for this process, in order.
    inbox: VecDeque<Said>,
    /// Why slots are not shared with the host's other processes.
    alone: Option<String>,
    /// When the last connection to another process ended.
    parted_at: Option<Instant>,
    closing: bool,
}

enum Role {
    Electing,
    Leader(Box<Leader>),
    Follower(Peer),
}

/// The other end of a connection.
struct Peer {
    stream: UnixStream,
    sent: Outgoing,
}

impl Arbiter {
    /// Joins the host's arbitration, or starts it. `key` names the group that shares the slots; its members prove
    /// `token` to each other.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn new(key: &str, token: Token, flows_per_host: FlowsPerHost, wake: Wake) -> io::Result<Arbiter> {
        let state = State {
            role: Role::Electing,
            epoch: 0,
            generation: 0,
            flows_per_host,
            shares: Shares::default(),
            inbox: VecDeque::new(),
            alone: None,
            parted_at: None,
            closing: false,
        };
        let shared = Arc::new(Shared {
            key: key.to_owned(),
            token,
            clock: Clock::start(),
            state: Mutex::new(state),
            tick: Condvar::new(),
            wake,
            unadmitted: AtomicUsize::new(0),
        });
        let deadline = Instant::now() + ELECTION;
        while let Err(error) = shared.elect(false) {
            if Instant::now() >= deadline {
                shared.lead(None, false, Some(election::alone(&error)));
                break;
            }
            thread::sleep(ELECTION_PAUSE);
        }
        // If a thread cannot be started, dropping this ends the others.
        let arbiter = Arbiter { shared: shared.clone() };
        let roles = shared.clone();
        thread::Builder::new().name("mission-arbiter".into()).stack_size(256 << 10).spawn(move || roles.run())?;
        thread::Builder::new().name("mission-beat".into()).stack_size(256 << 10).spawn(move || shared.beat())?;
        Ok(arbiter)
    }

    /// Sends a message to the arbiter. Its answers arrive by [`Arbiter::next`].
    pub fn send(&self, message: ToArbiter) {
        let mut state = self.shared.lock();
        match &mut state.role {
            Role::Leader(_) => self.shared.lead_by(&mut state, Event::Message { client: SELF, message }),
            // An arbiter that reads nothing is disconnected: the reading thread elects another, which receives the
            // complete state.
            Role::Follower(peer) => {
                if peer.send(&message).is_err() {
                    let _ = peer.stream.shutdown(Shutdown::Both);
                }
            }
            Role::Electing => {}
        }
    }

    /// What happened to this process's slots, in order.
    pub fn next(&self) -> Option<Said> {
        self.shared.lock().inbox.pop_front()
    }

    /// Sets new shares of the host; in force here if this process is the arbiter, or once it is.
    pub fn set_shares(&self, flows_per_host: FlowsPerHost, shares: Shares) {
        let mut state = self.shared.lock();
        (state.flows_per_host, state.shares) = (flows_per_host, shares.clone());
        if let Role::Leader(_) = state.role {
            self.shared.lead_by(&mut state, Event::Shares { flows_per_host, shares });
        }
    }

    /// Disconnects from a silent arbiter; another is elected.
    pub fn replace(&self) {
        if let Role::Follower(peer) = &self.shared.lock().role {
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether there are other processes of the cluster on this host; also during an election, and until the others have
    /// had the time to find its result.
    pub fn has_neighbours(&self) -> bool {
        let state = self.shared.lock();
        let met = match &state.role {
            Role::Leader(leader) => !leader.clients.is_empty(),
            Role::Follower(_) => true,
            Role::Electing => false,
        };
        met || state.parted_at.is_some_and(|at| at.elapsed() < NEIGHBOURS_AGAIN)
    }

    pub fn gives_out(&self) -> bool {
        matches!(self.shared.lock().role, Role::Leader(_))
    }

    /// Why this process does not share the slots of its host, if it does not.
    pub fn alone(&self) -> Option<String> {
        self.shared.lock().alone.clone()
    }
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        // The listener is dropped with the role, so that the name is free for a successor.
        match std::mem::replace(&mut state.role, Role::Electing) {
            Role::Leader(leader) => leader.close(),
            Role::Follower(peer) => drop(peer.stream.shutdown(Shutdown::Both)),
            Role::Electing => {}
        }
        self.shared.tick.notify_all();
    }
}

impl Peer {
    fn send<T: serde::Serialize>(&mut self, message: &T) -> io::Result<()> {
        let frame = self.sent.frame(message);
        self.stream.write_all(&frame)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    fn now(&self) -> Time {
        self.clock.now()
    }
}
