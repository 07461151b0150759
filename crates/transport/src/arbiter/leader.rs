//! The arbiter: it receives its clients' messages, lets the state machine of core decide, and sends the grants.

use super::{ELECTION_PAUSE, MESSAGE_BYTES, Peer, Role, SLOW_PEER, Said, Shared, State};
use crate::local::{self, Incoming, Outgoing};
use mission_core::host::slots::{Command, Event, SELF, Slots};
use mission_core::host::{ClientId, HEARTBEAT};
use std::collections::HashMap;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Connections that have not proved anything yet; more are closed at once.
const UNADMITTED_MAX: usize = 64;
/// Processes that get their slots here: a host has fewer workers.
const CLIENTS_MAX: usize = 1024;
/// How often an arbiter checks whether another process of its host has replaced it unnoticed.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(2);

pub(super) struct Leader {
    pub(super) slots: Slots,
    pub(super) clients: HashMap<ClientId, Peer>,
    pub(super) next_client: ClientId,
    /// Absent if no name was available: then this process arbitrates only for itself.
    pub(super) listener: Option<UnixListener>,
    /// It has to be confirmed that no other has replaced it.
    pub(super) unsure: bool,
    pub(super) looked_at: Instant,
    pub(super) looking: bool,
    pub(super) commands: Vec<Command>,
}

impl Leader {
    pub(super) fn close(self) {
        self.clients.values().for_each(|client| drop(client.stream.shutdown(Shutdown::Both)));
        if let Some(listener) = &self.listener {
            // SAFETY: an open socket; this wakes the thread that accepts on it.
            unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
        }
    }
}

impl State {
    /// Disconnects a client, if it is still one.
    fn part(&mut self, client: ClientId) {
        if let Role::Leader(leader) = &mut self.role
            && let Some(peer) = leader.clients.remove(&client)
        {
            let _ = peer.stream.shutdown(Shutdown::Both);
            self.parted_at = Some(Instant::now());
        }
    }
}

impl Shared {
    pub(super) fn lead(&self, listener: Option<UnixListener>, succeeds: bool, alone: Option<String>) {
        let mut state = self.lock();
        if state.closing {
            return;
        }
        let leader = Leader {
            slots: Slots::new(self.now(), state.flows_per_host, succeeds && listener.is_some()),
            clients: HashMap::new(),
            next_client: SELF + 1,
            listener,
            unsure: false,
            looked_at: Instant::now(),
            looking: false,
            commands: Vec::new(),
        };
        state.epoch += 1;
        state.alone = alone;
        state.role = Role::Leader(Box::new(leader));
        state.inbox.push_back(Said::Joined { remote: false });
        let event = Event::Shares { flows_per_host: state.flows_per_host, shares: state.shares.clone() };
        self.lead_by(&mut state, event);
        drop(state);
        (self.wake)();
    }

    /// Lets the arbiter's state machine decide, and executes its commands.
    pub(super) fn lead_by(&self, state: &mut State, event: Event) {
        let now = self.now();
        let Role::Leader(leader) = &mut state.role else { return };
        leader.slots.handle(now, event, &mut leader.commands);
        let mut commands = std::mem::take(&mut leader.commands);
        let mut gone = Vec::new();
        for command in commands.drain(..) {
            match command {
                Command::Send { client: SELF, message } => state.inbox.push_back(Said::Message(message)),
                Command::Send { client, message } => {
                    let sent = leader.clients.get_mut(&client).is_some_and(|peer| peer.send(&message).is_ok());
                    if !sent {
                        gone.push(client);
                    }
                }
                Command::Expel { client } => gone.push(client),
                Command::Confirm => leader.unsure = true,
                // The thread that ticks does so often enough.
                Command::WakeAt(_) => {}
            }
        }
        leader.commands = commands;
        for client in gone {
            // The thread that reads from it notices that, and reports that it has left.
            state.part(client);
        }
    }

    /// Ticks the arbiter's state machine, and checks whether another has replaced it.
    pub(super) fn beat(self: Arc<Shared>) {
        let mut state = self.lock();
        while !state.closing {
            state = self.tick.wait_timeout(state, HEARTBEAT).expect("no panic while held").0;
            if state.closing {
                return;
            }
            let Role::Leader(leader) = &mut state.role else { continue };
            // A successor's time for the others is shorter than a heartbeat, so the first tick ends it.
            let look = !leader.looking && (leader.unsure || leader.looked_at.elapsed() >= LOOK_EVERY);
            leader.looking |= look;
            self.lead_by(&mut state, Event::Tick);
            let (generation, epoch) = (state.generation, state.epoch);
            drop(state);
            (self.wake)();
            if look {
                // On a thread of its own: one that does not answer must not stop the heartbeat.
                let own = self.clone();
                let looks = move || own.look(generation, epoch);
                let looks = thread::Builder::new().name("mission-look".into()).stack_size(128 << 10).spawn(looks);
                state = self.lock();
                let still = state.epoch == epoch;
                if looks.is_err()
                    && still
                    && let Role::Leader(leader) = &mut state.role
                {
                    // No thread can be started now; without another check it would never grant again.
                    leader.looking = false;
                }
                continue;
            }
            state = self.lock();
        }
    }

    pub(super) fn accept(self: &Arc<Shared>, listener: &UnixListener, epoch: u64) {
        loop {
            let accepted = listener.accept();
            let state = self.lock();
            if state.closing || state.epoch != epoch {
                return;
            }
            drop(state);
            let Ok((stream, _)) = accepted else {
                // Out of descriptors, most likely: the next try may find one.
                thread::sleep(ELECTION_PAUSE);
                continue;
            };
            if self.unadmitted.load(Ordering::Relaxed) >= UNADMITTED_MAX {
                continue;
            }
            self.unadmitted.fetch_add(1, Ordering::Relaxed);
            let own = self.clone();
            let serve = move || {
                let admitted = local::admit(&stream, &own.token);
                own.unadmitted.fetch_sub(1, Ordering::Relaxed);
                if admitted.is_ok() {
                    own.serve(stream, epoch);
                }
            };
            let started = thread::Builder::new().name("mission-slots".into()).stack_size(128 << 10).spawn(serve);
            if started.is_err() {
                self.unadmitted.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Reads messages of one client until it disconnects.
    fn serve(&self, stream: UnixStream, epoch: u64) {
        if stream.set_write_timeout(Some(SLOW_PEER)).is_err() {
            return;
        }
        let Ok(mut reader) = stream.try_clone() else { return };
        let client = {
            let mut state = self.lock();
            if state.epoch != epoch {
                return;
            }
            let Role::Leader(leader) = &mut state.role else { return };
            if leader.clients.len() >= CLIENTS_MAX {
                return;
            }
            let client = leader.next_client;
            leader.next_client += 1;
            leader.clients.insert(client, Peer { stream, sent: Outgoing::default() });
            self.lead_by(&mut state, Event::Joined { client });
            client
        };
        let mut messages = Incoming::new(MESSAGE_BYTES);
        let hear = |event: Event| {
            let mut state = self.lock();
            let hears = state.epoch == epoch
                && matches!(&state.role, Role::Leader(leader) if leader.clients.contains_key(&client));
            if hears || event == (Event::Left { client }) && state.epoch == epoch {
                self.lead_by(&mut state, event);
            }
            drop(state);
            (self.wake)();
            hears
        };
        while let Ok(Some(message)) = messages.read(&mut reader) {
            if !hear(Event::Message { client, message }) {
                break;
            }
        }
        hear(Event::Left { client });
        let mut state = self.lock();
        if state.epoch == epoch {
            state.part(client);
        }
    }
}
