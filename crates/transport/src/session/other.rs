//! A process with another speaker: keeps a connection to it, and executes its messages.

use super::{FromSpeaker, MESSAGE_BYTES, SLOW_PEER, Shared, TRY_AGAIN, ToSpeaker, name};
use crate::in_force::Took;
use crate::local::{self, Incoming, Outgoing};
use mission_core::host::session::Event;
use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

/// The way to the speaker.
pub(super) struct Link {
    stream: UnixStream,
    sent: Outgoing,
}

impl Link {
    /// # Errors
    /// The speaker reads nothing, or the message is too long: close the connection.
    pub fn send(&mut self, message: &ToSpeaker) -> io::Result<()> {
        let frame = self.sent.frame(message);
        if frame.len() > MESSAGE_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.stream.write_all(&frame)
    }

    pub fn close(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Starts a thread that keeps a connection to the speaker, until this process ends.
pub(super) fn keep_connected(shared: Arc<Shared>) -> io::Result<()> {
    let run = move || {
        loop {
            let speaker = {
                let mut state = shared.lock();
                loop {
                    match state.speaker {
                        _ if state.closing => return,
                        Some(speaker) if speaker != shared.own => break speaker,
                        _ => state = shared.changed.wait(state).expect("no panic while held"),
                    }
                }
            };
            // Reconnect, whatever ended the connection.
            let _ = shared.listen_to(speaker);
            let state = shared.lock();
            let moves = |state: &mut super::State| !state.closing && state.speaker == Some(speaker);
            drop(shared.changed.wait_timeout_while(state, TRY_AGAIN, moves));
        }
    };
    thread::Builder::new().name("mission-session".into()).stack_size(256 << 10).spawn(run).map(drop)
}

impl Shared {
    /// Reads messages until the connection ends, or one is invalid.
    fn listen_to(&self, speaker: SocketAddr) -> io::Result<()> {
        let mut stream = local::connect(&name(&self.cluster, speaker), &self.token)?;
        // Messages are sent under locks.
        stream.set_write_timeout(Some(SLOW_PEER))?;
        {
            let mut link = Link { stream: stream.try_clone()?, sent: Outgoing::default() };
            link.send(&ToSpeaker::Here { address: self.own.to_string().into() })?;
            let mut state = self.lock();
            if state.closing || state.speaker != Some(speaker) {
                return Ok(());
            }
            state.link = Some(link);
            state.handle(self, Event::Joined);
        }
        let ended = self.hear_all(&mut stream);
        let mut state = self.lock();
        // Another connection cannot have taken its place: this thread makes them.
        state.leave(self);
        ended
    }

    fn hear_all(&self, stream: &mut UnixStream) -> io::Result<()> {
        let mut messages = Incoming::new(MESSAGE_BYTES);
        // Changes that were in transit before the complete shares may apply to any version.
        let mut has_all = false;
        while let Some(message) = messages.read(stream)? {
            match message {
                FromSpeaker::Passed { number } => {
                    self.lock().handle(self, Event::Passed { number });
                }
                FromSpeaker::Do(command) => {
                    let Some(in_force) = self.in_force.upgrade() else { return Ok(()) };
                    let all = matches!(command, mission_core::mission::Command::Shares(_));
                    let took = in_force.take(command);
                    if took == Took::Gap && has_all {
                        return Err(io::Error::new(io::ErrorKind::InvalidData, "shares are missing"));
                    }
                    has_all |= all;
                }
            }
        }
        Ok(())
    }
}
