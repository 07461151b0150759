//! Election of the arbiter: it is found or started at the start, elected again when it is lost, and steps down for a
//! higher generation.

use super::leader::LOOK_EVERY;
use super::names::{GENERATIONS, NAMES_MAX, generations, name};
use super::{ELECTION, ELECTION_PAUSE, Role, Said, Shared};
use crate::local;
use mission_core::host::HEARTBEAT;
use mission_core::host::slots::Event;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

pub(super) fn alone(error: &io::Error) -> String {
    format!("slots are not shared with other processes of this host: no arbiter could be found or started: {error}")
}

impl Shared {
    /// Finds the arbiter of this host or becomes it; one attempt. A successor waits for reports of held slots.
    pub(super) fn elect(&self, succeeds: bool) -> io::Result<()> {
        let mut highest = self.lock().generation;
        for generation in generations(&self.key).into_iter().take(NAMES_MAX) {
            match local::connect(&name(&self.key, generation), &self.token) {
                Ok(stream) => {
                    self.follow(stream, generation);
                    return Ok(());
                }
                // Ignore names of strangers, and names without a listener. Also ignore one that accepts no connections:
                // it may be a stranger's, and if it is not, it is skipped below.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::PermissionDenied | io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock
                    ) => {}
                // It has more connections than it can handle now: retry.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(error),
                // Stopped: the next generation takes its place.
                Err(_) => highest = highest.max(generation),
            }
        }
        // Skip names that a stranger has taken.
        let mut result = Err(io::ErrorKind::AddrInUse.into());
        for generation in (highest + 1..GENERATIONS).take(NAMES_MAX) {
            result = local::bind(&name(&self.key, generation));
            match &result {
                Ok(_) => {
                    self.lock().generation = generation;
                    break;
                }
                // Another process of this cluster may have been faster: retry.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    if let Ok(stream) = local::connect(&name(&self.key, generation), &self.token) {
                        self.follow(stream, generation);
                        return Ok(());
                    }
                }
                Err(_) => break,
            }
        }
        self.lead(Some(result?), succeeds, None);
        Ok(())
    }

    /// Lives as long as the arbiter: leads or follows, and takes part in the next election when the arbiter is lost.
    pub(super) fn run(self: Arc<Shared>) {
        enum Now {
            Accept(UnixListener),
            Read(UnixStream),
            Alone,
            Elect,
        }
        let mut electing = None;
        loop {
            let (now, epoch) = {
                let state = self.lock();
                if state.closing {
                    return;
                }
                let now = match &state.role {
                    Role::Leader(leader) => match &leader.listener {
                        Some(listener) => listener.try_clone().map(Now::Accept),
                        None => Ok(Now::Alone),
                    },
                    Role::Follower(peer) => peer.stream.try_clone().map(Now::Read),
                    Role::Electing => Ok(Now::Elect),
                };
                (now, state.epoch)
            };
            match now {
                Ok(Now::Accept(listener)) => self.accept(&listener, epoch),
                Ok(Now::Read(stream)) => self.read(stream, epoch),
                Ok(Now::Alone) => {
                    let (mut state, since) = (self.lock(), Instant::now());
                    while !state.closing && state.epoch == epoch && since.elapsed() < LOOK_EVERY {
                        state = self.tick.wait_timeout(state, HEARTBEAT).expect("no panic while held").0;
                    }
                    let still = !state.closing && state.epoch == epoch;
                    drop(state);
                    // The process that blocked the others may be gone.
                    if still {
                        let _ = self.elect(true);
                    }
                }
                Ok(Now::Elect) => {
                    let since = *electing.get_or_insert_with(Instant::now);
                    match self.elect(true) {
                        Ok(()) => electing = None,
                        Err(error) if since.elapsed() >= ELECTION => {
                            electing = None;
                            self.lead(None, false, Some(alone(&error)));
                        }
                        Err(_) => thread::sleep(ELECTION_PAUSE),
                    }
                }
                Err(_) => thread::sleep(ELECTION_PAUSE),
            }
        }
    }

    /// Steps down if an arbiter of a higher generation answers.
    pub(super) fn look(&self, generation: u64, epoch: u64) {
        let higher = generations(&self.key).into_iter().take_while(|other| *other > generation).take(NAMES_MAX);
        let found = higher.into_iter().find_map(|other| {
            let stream = local::connect(&name(&self.key, other), &self.token).ok()?;
            Some((stream, other))
        });
        let mut state = self.lock();
        if state.epoch != epoch || state.closing {
            return;
        }
        let Some((stream, other)) = found else {
            if let Role::Leader(leader) = &mut state.role {
                (leader.unsure, leader.looking, leader.looked_at) = (false, false, Instant::now());
            }
            self.lead_by(&mut state, Event::Confirmed);
            drop(state);
            (self.wake)();
            return;
        };
        if let Role::Leader(leader) = std::mem::replace(&mut state.role, Role::Electing) {
            leader.close();
        }
        state.parted_at = Some(Instant::now());
        state.inbox.push_back(Said::Lost);
        drop(state);
        self.follow(stream, other);
    }
}
