//! Which process of a host gives its slots out, and how the others talk to it.
//!
//! All decisions are in [`mission_core::host`]; here are the sockets and the threads. The arbiter is whoever binds an
//! abstract Unix socket whose name carries a generation ([`names`]). Where it falls silent, because its process was
//! stopped, the others bind the next generation ([`election`]). An arbiter that wakes up and finds a higher one steps
//! down; what it granted meanwhile reaches nobody, since the others have left its connection. [`leader`] gives slots out,
//! [`follower`] has them given, and [`queues`] numbers what they are given to.

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

/// Longest time in which a process that starts finds an arbiter or becomes it; then it arbitrates for itself alone.
const ELECTION: Duration = Duration::from_secs(5);
/// Wait before another try to bind or connect.
const ELECTION_PAUSE: Duration = Duration::from_millis(5);
/// A process that takes no message for this long is left.
const SLOW_PEER: Duration = Duration::from_millis(200);
/// Longest message: a ticket, two ids and a number.
const MESSAGE_BYTES: usize = 512;

/// What happens to this process's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    Message(FromArbiter),
    /// An arbiter was found or begun.
    Joined {
        remote: bool,
    },
    Lost,
}

/// This process's part in the arbitration of its host.
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
    /// Counts the roles: what a thread of an earlier one has to say does not count.
    epoch: u64,
    /// The highest generation that was seen to be an arbiter's of this cluster.
    generation: u64,
    flows_per_host: FlowsPerHost,
    shares: Shares,
    /// For this process, in order.
    inbox: VecDeque<Said>,
    /// Why slots are not shared with the host's other processes.
    alone: Option<String>,
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
    /// Joins the host's arbitration, or begins it. `key` names those who share the slots, and `token` is what they prove
    /// to each other.
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
        // Where a thread cannot be had the others end with it.
        let arbiter = Arbiter { shared: shared.clone() };
        let roles = shared.clone();
        thread::Builder::new().name("mission-arbiter".into()).stack_size(256 << 10).spawn(move || roles.run())?;
        thread::Builder::new().name("mission-beat".into()).stack_size(256 << 10).spawn(move || shared.beat())?;
        Ok(arbiter)
    }

    /// Says something to whoever gives the slots out. What this process is to hear comes by [`Arbiter::next`].
    pub fn send(&self, message: ToArbiter) {
        let mut state = self.shared.lock();
        match &mut state.role {
            Role::Leader(_) => self.shared.lead_by(&mut state, Event::Message { client: SELF, message }),
            // An arbiter that takes nothing is left: the thread that reads from it elects another, which hears everything.
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

    /// New shares of the host; in force here if this process gives the slots out, or once it does.
    pub fn set_shares(&self, flows_per_host: FlowsPerHost, shares: Shares) {
        let mut state = self.shared.lock();
        (state.flows_per_host, state.shares) = (flows_per_host, shares.clone());
        if let Role::Leader(_) = state.role {
            self.shared.lead_by(&mut state, Event::Shares { flows_per_host, shares });
        }
    }

    /// Leaves an arbiter that is silent; another is elected.
    pub fn replace(&self) {
        if let Role::Follower(peer) = &self.shared.lock().role {
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether there are other processes of the cluster on this host.
    pub fn has_neighbours(&self) -> bool {
        match &self.shared.lock().role {
            Role::Leader(leader) => !leader.clients.is_empty(),
            Role::Follower(_) => true,
            Role::Electing => false,
        }
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
        // The listener goes with the role, so that the name is free for a successor.
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
