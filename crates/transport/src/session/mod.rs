//! One session for each host: the processes of a cluster on one host send their reports to one of them, the speaker,
//! and receive the shares from it. Core chooses the speaker (`control/sessions.rs`) and the route of a report
//! ([`mission_core::host::session`]); here are the sockets.
//!
//! The speaker listens on an abstract Unix socket that bears its address ([`speaker`]); the others connect to it ([`other`]).

mod other;
mod speaker;
#[cfg(test)]
mod tests;

use crate::auth::Token;
use crate::clock::Clock;
use crate::host;
use crate::in_force::InForce;
use mission_core::control::WorkerReport;
use mission_core::host::session::{self as machine, Command, Event};
use mission_core::mission;
use serde::{Deserialize, Serialize};
use speaker::Speaker;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;

/// Longest message: shares and reports of some ten thousand transfers.
const MESSAGE_BYTES: usize = 16 << 20;
/// A process that reads no message for this long is disconnected.
const SLOW_PEER: Duration = Duration::from_millis(200);
/// Interval between two attempts to find the speaker.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Messages from a process to the speaker of its host.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ToSpeaker {
    /// First of all: the address of its data plane.
    Here {
        address: Arc<str>,
    },
    Report(Box<WorkerReport>),
}

/// Messages from the speaker to a process.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FromSpeaker {
    /// Shares: first all, then changes.
    Do(mission::Command),
    /// All reports up to this number are passed on.
    Passed { number: u64 },
}

/// This process's role in the session of its host.
pub(crate) struct Session {
    shared: Arc<Shared>,
}

struct Shared {
    cluster: String,
    token: Token,
    own: SocketAddr,
    in_force: Weak<InForce>,
    clock: Clock,
    state: Mutex<State>,
    /// Another speaker, or the end.
    changed: Condvar,
}

struct State {
    machine: machine::Session,
    /// The speaker of this host, once it is known.
    speaker: Option<SocketAddr>,
    /// To another process that speaks.
    link: Option<other::Link>,
    /// A thread keeps the connection to the speaker.
    connects: bool,
    /// This process is the speaker.
    speaks: Option<Speaker>,
    closing: bool,
}

impl Session {
    /// `own`: where this process's data plane listens.
    pub fn new(cluster: &str, token: Token, own: SocketAddr, in_force: &Arc<InForce>) -> Session {
        let state = State {
            machine: machine::Session::new(own.to_string().into()),
            speaker: None,
            link: None,
            connects: false,
            speaks: None,
            closing: false,
        };
        let shared = Shared {
            cluster: cluster.to_owned(),
            token,
            own,
            in_force: Arc::downgrade(in_force),
            clock: Clock::start(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        Session { shared: Arc::new(shared) }
    }

    /// The Mission Controller has named the speaker of this host. If it cannot be reached, reports go directly to the
    /// Mission Controller, as before.
    pub fn appointed(&self, speaker: SocketAddr) {
        let shared = &self.shared;
        let mut state = shared.lock();
        if state.speaker == Some(speaker) || state.closing {
            return;
        }
        state.speaker = Some(speaker);
        state.leave(shared);
        let before = state.speaks.take();
        if speaker != shared.own && !state.connects {
            state.connects = other::keep_connected(shared.clone()).is_ok();
        }
        shared.changed.notify_all();
        drop(state);
        drop(before);
        self.listen();
    }

    /// Becomes the speaker, if this process shall be and is not yet. If the name is not free yet, the next report
    /// retries; meanwhile the others send their reports themselves.
    fn listen(&self) {
        let shared = &self.shared;
        let mut state = shared.lock();
        if state.speaker == Some(shared.own) && state.speaks.is_none() && !state.closing {
            state.speaks = Speaker::listen(&name(&shared.cluster, shared.own), &shared.token, &shared.in_force).ok();
        }
    }

    /// This process sends its reports itself from now on: it is about to end, and waits for no other process.
    pub fn leave(&self) {
        let mut state = self.shared.lock();
        if state.speaker != Some(self.shared.own) {
            state.speaker = None;
        }
        state.leave(&self.shared);
        self.shared.changed.notify_all();
    }

    /// Passes new shares on to the others, if this process is the speaker.
    pub fn pass(&self, command: &mission::Command) {
        if let Some(speaker) = &self.shared.lock().speaks {
            speaker.pass(command);
        }
    }

    /// Reports of others since the last call. Those of the last call have been passed on: confirms them.
    pub fn reports_of_others(&self) -> Vec<(Arc<str>, WorkerReport)> {
        self.shared.lock().speaks.as_ref().map(Speaker::take).unwrap_or_default()
    }

    /// Whether the next report has something to do for the session.
    pub fn has_news(&self) -> bool {
        let state = self.shared.lock();
        let shall_speak = state.speaker == Some(self.shared.own) && state.speaks.is_none();
        shall_speak || state.machine.has_news() || state.speaks.as_ref().is_some_and(Speaker::has_news)
    }

    /// Whether the next report is to have all totals.
    pub fn says_all(&self) -> bool {
        self.shared.lock().machine.says_all()
    }

    /// Takes this process's changes; returns the reports that go directly to the Mission Controller.
    pub fn report(&self, report: Option<WorkerReport>) -> Option<WorkerReport> {
        self.listen();
        let mut state = self.shared.lock();
        let mut said = None;
        for command in state.handle(&self.shared, Event::Report { report: report.map(Box::new) }) {
            match command {
                Command::Say(report) => said = Some(*report),
                Command::Leave => state.leave(&self.shared),
                Command::HandOver(report) => {
                    let taken = state.link.as_mut().is_some_and(|link| link.send(&ToSpeaker::Report(report)).is_ok());
                    if !taken {
                        state.leave(&self.shared);
                    }
                }
            }
        }
        said
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        state.leave(&self.shared);
        let speaks = state.speaks.take();
        self.shared.changed.notify_all();
        drop(state);
        drop(speaks);
    }
}

impl State {
    fn handle(&mut self, shared: &Shared, event: Event) -> Vec<Command> {
        let mut commands = Vec::new();
        self.machine.handle(shared.clock.now(), event, &mut commands);
        commands
    }

    /// Closes the connection to the speaker. The thread that keeps it tries again.
    fn leave(&mut self, shared: &Shared) {
        if let Some(link) = self.link.take() {
            link.close();
            self.handle(shared, Event::Left);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }
}

/// Where the speaker with an address listens.
fn name(cluster: &str, speaker: SocketAddr) -> String {
    format!("{}-speaker-{speaker}", host::socket_name(cluster))
}
