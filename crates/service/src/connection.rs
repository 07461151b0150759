//! One non-blocking connection, plain or TLS, with its receive and send buffers.

use rustls::{ServerConfig, ServerConnection};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

/// Most bytes that a client may send before it has presented a token.
pub const UNADMITTED_BYTES: usize = 64 << 10;
/// Of one line of a session: a hello with all transfers of a cluster.
pub const LINE_BYTES: usize = 64 << 20;
/// Most unsent bytes to a member: one that does not read is disconnected; it returns, and its welcome has everything.
pub const BACKLOG_BYTES: usize = 64 << 20;
/// The same for other clients.
pub const QUESTION_BACKLOG_BYTES: usize = 16 << 20;
const READ: usize = 64 << 10;

pub struct Connection {
    stream: TcpStream,
    tls: Option<Box<ServerConnection>>,
    /// Received bytes that were not taken yet.
    pub received: Vec<u8>,
    /// Up to here there is no end of line.
    searched: usize,
    /// Whole lines that were received, and how much of them was taken.
    lines: Vec<u8>,
    taken: usize,
    outgoing: Vec<u8>,
    sent: usize,
    /// Since when the connection shall be closed, once everything is sent.
    pub ends: Option<Instant>,
    /// It has presented a valid token.
    pub admitted: bool,
    /// It is a session, no longer HTTP.
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
            admitted: false,
            session: false,
        })
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Reads what has arrived.
    ///
    /// # Errors
    /// The connection is over, or its peer sends too much.
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

    /// The next whole line, with its end.
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

    /// Queues bytes to send.
    pub fn say(&mut self, bytes: &[u8]) {
        self.outgoing.extend_from_slice(bytes);
    }

    /// Whether bytes are still to be sent.
    pub fn waits(&self) -> bool {
        self.sent < self.outgoing.len() || self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Sends what the peer takes now.
    ///
    /// # Errors
    /// The connection is over, or the peer reads too little.
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
                    // Drop sent bytes, even if the peer never reads all of them.
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
