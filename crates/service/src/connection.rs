//! One connection, plain or TLS, that never blocks: what came, and what has yet to go.

use rustls::{ServerConfig, ServerConnection};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

/// Before a token was shown nobody may say more.
pub const UNADMITTED_BYTES: usize = 64 << 10;
/// Of one line of a session: a hello with all transfers of a cluster.
pub const LINE_BYTES: usize = 64 << 20;
/// A member that does not read what is sent to it is left: it comes back, and its welcome has everything.
pub const BACKLOG_BYTES: usize = 64 << 20;
/// The same for who only asks.
pub const QUESTION_BACKLOG_BYTES: usize = 16 << 20;
const READ: usize = 64 << 10;

pub struct Connection {
    stream: TcpStream,
    tls: Option<Box<ServerConnection>>,
    /// Received, and not taken yet.
    pub received: Vec<u8>,
    /// Up to here there is no end of a line.
    searched: usize,
    /// Whole lines that came, and how much of them was taken.
    lines: Vec<u8>,
    taken: usize,
    outgoing: Vec<u8>,
    sent: usize,
    /// Since when it is to be closed, once all has gone.
    pub ends: Option<Instant>,
    pub since: Instant,
    /// It has shown a token that allows something.
    pub admitted: bool,
    /// It is a session, and no more HTTP.
    pub session: bool,
}

impl Connection {
    /// # Errors
    /// The socket cannot be set up.
    pub fn new(stream: TcpStream, tls: Option<&Arc<ServerConfig>>) -> io::Result<Connection> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let tls = tls.map(|config| ServerConnection::new(config.clone())).transpose().map_err(io::Error::other)?;
        Ok(Connection {
            stream,
            tls: tls.map(Box::new),
            received: Vec::new(),
            searched: 0,
            lines: Vec::new(),
            taken: 0,
            outgoing: Vec::new(),
            sent: 0,
            ends: None,
            since: Instant::now(),
            admitted: false,
            session: false,
        })
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Takes what has come.
    ///
    /// # Errors
    /// The connection is over, or its peer says too much.
    pub fn receive(&mut self) -> io::Result<()> {
        let most = if self.session { LINE_BYTES } else { UNADMITTED_BYTES };
        let mut buffer = [0u8; READ];
        loop {
            let read = match &mut self.tls {
                None => self.stream.read(&mut buffer),
                Some(tls) => match tls.read_tls(&mut self.stream) {
                    Ok(0) => Ok(0),
                    Ok(_) => {
                        tls.process_new_packets().map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
                        loop {
                            match tls.reader().read(&mut buffer) {
                                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                                Err(error) => return Err(error),
                            }
                        }
                        if self.received.len() > most {
                            return Err(ErrorKind::InvalidData.into());
                        }
                        continue;
                    }
                    Err(error) => Err(error),
                },
            };
            match read {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if self.received.len() > most {
                return Err(ErrorKind::InvalidData.into());
            }
        }
    }

    /// The next whole line that came, with its end.
    pub fn line(&mut self) -> Option<Vec<u8>> {
        if self.taken == self.lines.len() {
            (self.lines, self.taken) = (self.whole_lines(), 0);
        }
        let rest = &self.lines[self.taken..];
        let end = rest.iter().position(|byte| *byte == b'\n')? + 1;
        let line = rest[..end].to_vec();
        self.taken += end;
        Some(line)
    }

    fn whole_lines(&mut self) -> Vec<u8> {
        let Some(end) = self.received[self.searched..].iter().rposition(|byte| *byte == b'\n') else {
            self.searched = self.received.len();
            return Vec::new();
        };
        let rest = self.received.split_off(self.searched + end + 1);
        self.searched = rest.len();
        std::mem::replace(&mut self.received, rest)
    }

    /// Something to be sent, once the peer takes it.
    pub fn say(&mut self, bytes: &[u8]) {
        self.outgoing.extend_from_slice(bytes);
    }

    /// Whether something has yet to go.
    pub fn waits(&self) -> bool {
        self.sent < self.outgoing.len() || self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Sends what the peer takes now.
    ///
    /// # Errors
    /// The connection is over, or the peer takes too little.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.outgoing.len() - self.sent > if self.session { BACKLOG_BYTES } else { QUESTION_BACKLOG_BYTES } {
            return Err(ErrorKind::TimedOut.into());
        }
        loop {
            if let Some(tls) = &mut self.tls
                && tls.wants_write()
            {
                match tls.write_tls(&mut self.stream) {
                    Ok(_) => continue,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
            if self.sent == self.outgoing.len() {
                self.outgoing.clear();
                self.sent = 0;
                return Ok(());
            }
            let rest = &self.outgoing[self.sent..];
            let wrote = match &mut self.tls {
                None => self.stream.write(rest),
                Some(tls) => tls.writer().write(rest),
            };
            match wrote {
                Ok(0) => return Ok(()),
                Ok(count) => {
                    self.sent += count;
                    // A peer that always leaves something would have all of it kept.
                    if self.sent > self.outgoing.len() / 2 && self.sent > READ {
                        self.outgoing.drain(..self.sent);
                        self.sent = 0;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
