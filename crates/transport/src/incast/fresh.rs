//! Fresh connections: each block is requested over new ones, so that every block begins with the initial window.
//!
//! They are opened between two blocks, in parallel, and that time is not measured. The first connection to a sender
//! stays: it has the proofs of both ends, and the counts of all that follow. A fresh one begins with one line of the
//! receiver and no answer, because every byte that the sender wrote before the block could widen its window:
//!
//! ```text
//! receiver  {"session": nonce of the sender, "number": ..., "proof": ...}
//! then      as on the first connection
//! ```

use super::{Asked, Flow, HELLO_PATIENCE, Reader, say};
use crate::auth::{Nonce, Purpose, Role, Token};
use crate::object::{from_hex, to_hex};
use crate::windows::Governor;
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Time for the threads of closed connections to count what they did.
const CLOSING: Duration = Duration::from_secs(1);
/// Interval between two checks of them.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Opens a connection to each sender, in the place of those of the last block.
///
/// # Arguments
/// * `number`: of the block; a sender takes no number twice, nor a smaller one.
/// * `end`: of the whole measurement.
///
/// # Errors
/// One line that names a sender that does not answer.
pub(super) fn connect(
    readers: &mut [Reader],
    token: &Token,
    number: u64,
    governor: Option<&Governor>,
    end: Instant,
) -> Result<(), String> {
    let until = (Instant::now() + HELLO_PATIENCE).min(end);
    let mut opened = Vec::with_capacity(readers.len());
    for reader in readers.iter() {
        opened.push(begin(reader).map_err(|error| format!("sender {}: {error}", reader.address))?);
    }
    for (reader, socket) in readers.iter_mut().zip(opened) {
        let proof = token.prove(Role::Client, &reader.session.0, &reader.session.1, purpose(&number.to_be_bytes()));
        let hello = json!({ "session": to_hex(&reader.session.1), "number": number, "proof": to_hex(&proof) });
        finish(socket, until, &hello)
            .and_then(|stream| {
                let stream = Arc::new(stream);
                reader.governed = governor.map(|governor| governor.govern(stream.clone())).transpose()?;
                reader.fresh = Some(stream);
                Ok(())
            })
            .map_err(|error| format!("sender {}: {error}", reader.address))?;
    }
    Ok(())
}

fn begin(reader: &Reader) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(reader.address), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&reader.address.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket),
    }
}

fn finish(socket: Socket, until: Instant, hello: &Value) -> io::Result<TcpStream> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let wait = left.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&wait)) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer")),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if let Some(error) = socket.take_error()? {
        return Err(error);
    }
    socket.set_nonblocking(false)?;
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true)?;
    say(&stream, hello)?;
    Ok(stream)
}

/// The purpose of a fresh connection's proof: its number, so that an overheard proof cannot be replayed.
fn purpose(number: &[u8; 8]) -> Purpose<'_> {
    Purpose::Ranges(number)
}

/// The sender's half: who may open fresh connections, and what they did.
#[derive(Default)]
pub(super) struct Sessions(Mutex<HashMap<Nonce, Session>>);

struct Session {
    client: Nonce,
    ask: Asked,
    /// The last number that was taken.
    number: u64,
    /// Fresh connections that are not counted yet.
    open: usize,
    counted: Option<Flow>,
}

impl Sessions {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Nonce, Session>> {
        self.0.lock().expect("no panic while held")
    }

    /// A first connection has proved itself.
    pub(super) fn begin(&self, client: Nonce, server: Nonce, ask: Asked) {
        self.lock().insert(server, Session { client, ask, number: 0, open: 0, counted: None });
    }

    /// It is over, and takes no fresh ones any more.
    pub(super) fn end(&self, server: &Nonce) {
        self.lock().remove(server);
    }

    /// The session of a fresh connection, and the options of its socket. `None`: the proof in its line is wrong.
    pub(super) fn admit(&self, token: &Token, hello: &Value) -> Option<(Nonce, Asked)> {
        let server: Nonce = hello["session"].as_str().and_then(from_hex)?.try_into().ok()?;
        let number = hello["number"].as_u64()?;
        let proof = hello["proof"].as_str().and_then(from_hex)?;
        let mut sessions = self.lock();
        let session = sessions.get_mut(&server).filter(|session| number > session.number)?;
        if !token.proves(Role::Client, &session.client, &server, purpose(&number.to_be_bytes()), &proof) {
            return None;
        }
        session.number = number;
        session.open += 1;
        Some((server, session.ask.clone()))
    }

    /// A fresh connection is over.
    pub(super) fn count(&self, server: &Nonce, flow: Flow) {
        if let Some(session) = self.lock().get_mut(server) {
            session.open -= 1;
            session.counted = Some(match session.counted.take() {
                Some(before) => flow.with(&before),
                None => flow,
            });
        }
    }

    /// What all fresh connections did, once those that were closed are counted; `None`: there were none.
    pub(super) fn counted(&self, server: &Nonce) -> Option<Flow> {
        let until = Instant::now() + CLOSING;
        loop {
            if let Some(session) = self.lock().get(server)
                && (session.open == 0 || Instant::now() >= until)
            {
                return session.counted.clone();
            }
            if Instant::now() >= until {
                return None;
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_overheard_opens_nothing() {
        let (sessions, token) = (Sessions::default(), Token::new(b"token"));
        let (client, server): (Nonce, Nonce) = (crate::auth::random(), crate::auth::random());
        sessions.begin(client, server, Asked::default());
        let hello = |number: u64, token: &Token| {
            let proof = token.prove(Role::Client, &client, &server, purpose(&number.to_be_bytes()));
            json!({ "session": to_hex(&server), "number": number, "proof": to_hex(&proof) })
        };
        assert!(sessions.admit(&token, &hello(1, &Token::new(b"another"))).is_none());
        assert!(sessions.admit(&token, &hello(2, &token)).is_some());
        assert!(sessions.admit(&token, &hello(2, &token)).is_none(), "once");
        assert!(sessions.admit(&token, &hello(1, &token)).is_none(), "in order");
        sessions.end(&server);
        assert!(sessions.admit(&token, &hello(3, &token)).is_none(), "not after the first connection");
    }

    #[test]
    fn counts_of_fresh_connections_add_up() {
        let (sessions, token) = (Sessions::default(), Token::new(b"token"));
        let (client, server): (Nonce, Nonce) = (crate::auth::random(), crate::auth::random());
        sessions.begin(client, server, Asked::default());
        assert!(sessions.counted(&server).is_none());
        for number in [1u64, 2] {
            let proof = token.prove(Role::Client, &client, &server, purpose(&number.to_be_bytes()));
            let hello = json!({ "session": to_hex(&server), "number": number, "proof": to_hex(&proof) });
            sessions.admit(&token, &hello).unwrap();
            sessions.count(&server, Flow { timeouts: 2, cwnd: number as u32, ..Flow::default() });
        }
        let counted = sessions.counted(&server).unwrap();
        assert_eq!((counted.timeouts, counted.cwnd), (4, 2));
    }
}
