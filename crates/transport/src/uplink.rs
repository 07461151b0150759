//! The sender's queue ([`mission_core::host::uplink`]) in real time: the thread that serves a range waits for its turn.

use crate::clock::{Clock, lasting};
use crate::host;
use mission_core::host::fair::Shares;
use mission_core::host::uplink::{self, Command, Event, LONGEST, LOOK_EVERY};
use mission_core::host::{GroupId, MemberId, Ticket};
use mission_core::shares::FlowsPerHost;
use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

pub struct Uplink {
    state: Mutex<State>,
    /// Somebody's turn has come.
    turn: Condvar,
    clock: Clock,
}

struct State {
    uplink: uplink::Uplink,
    waiting: BTreeSet<Ticket>,
    next: Ticket,
}

/// A range that leaves now.
pub struct Turn<'a> {
    uplink: &'a Uplink,
    ticket: Ticket,
    bytes: u64,
}

impl Uplink {
    /// `bits_per_sec`: the rate of this host's links, if it is known.
    pub fn new(flows_per_host: FlowsPerHost, bits_per_sec: Option<u64>) -> Uplink {
        let uplink = uplink::Uplink::new(flows_per_host, bits_per_sec);
        let state = State { uplink, waiting: BTreeSet::new(), next: 0 };
        Uplink { state: Mutex::new(state), turn: Condvar::new(), clock: Clock::start() }
    }

    pub fn set_shares(&self, flows_per_host: FlowsPerHost, shares: Shares) {
        self.handle(&mut self.lock(), Event::Shares { flows_per_host, shares });
    }

    /// Waits until a range may leave: [`LONGEST`] at most.
    pub fn turn(&self, group: GroupId, member: MemberId, bytes: u64) -> Turn<'_> {
        let mut state = self.lock();
        let ticket = state.next;
        state.next += 1;
        state.waiting.insert(ticket);
        self.handle(&mut state, Event::Asks { ticket, group, member, bytes });
        let since = Instant::now();
        while state.waiting.contains(&ticket) {
            let (woken, waited) = self.turn.wait_timeout(state, LOOK_EVERY).expect("no panic while held");
            state = woken;
            if !state.waiting.contains(&ticket) {
                break;
            }
            // Turns of others wake it, too: they are not to put its own off.
            if since.elapsed() >= lasting(LONGEST) {
                self.handle(&mut state, Event::Late { ticket });
            } else if waited.timed_out() {
                self.handle(&mut state, Event::Tick);
            }
        }
        Turn { uplink: self, ticket, bytes }
    }

    fn handle(&self, state: &mut State, event: Event) {
        let now = self.clock.now();
        let mut commands = Vec::new();
        state.uplink.handle(now, event, &mut commands);
        if commands.contains(&Command::Look) {
            state.uplink.handle(now, Event::Looked { sent: host::sent_bytes() }, &mut commands);
        }
        for command in commands {
            if let Command::Send { ticket } = command {
                state.waiting.remove(&ticket);
                self.turn.notify_all();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let event = Event::Done { ticket: self.ticket, moved: self.bytes };
        self.uplink.handle(&mut self.uplink.lock(), event);
    }
}
