//! Carriers: the acting half of every transport.
//!
//! A Carrier makes connections and accepts those of clients; a [`Connection`] moves ranges and reports what was
//! negotiated. A new transport is one file here, one line in [`CARRIERS`], and its Flight Controller in core. Carriers
//! of byte streams share [`http`], whose ends are [`Channel`]s.

mod dctcp;
pub mod http;
mod ictcp;
mod mptcp;
pub mod shm;
mod tcp;
mod tls;
mod turns;

use crate::arbiter::Numbers;
use crate::auth::Token;
use crate::facts::Sender;
use crate::object::ObjectId;
use crate::streams::ChunkReply;
use crate::tls::TlsSettings;
use crate::windows::Governor;
use crate::wire::{PieceReply, Wants};
use mission_core::flight::Leg;
use mission_core::host::fetches::Fault;
use mission_core::host::{GroupId, MemberId};
use mission_core::report::Negotiated;
use mission_core::types::{Encryption, Transport};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
pub use tcp::Incoming;
use turns::Turns;

/// What every connection of this process needs.
#[derive(Clone)]
pub struct Context {
    pub token: Token,
    pub tls: TlsSettings,
    /// Of this cluster's jobs.
    pub numbers: Numbers,
    /// Where the rate of this host's link is known.
    pub governor: Option<Arc<Governor>>,
    /// Where this process waits for a place.
    pub turns: Arc<Turns>,
}

/// A requested range of a part.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    pub object: ObjectId,
    pub part: u32,
    pub start: u64,
    /// Of which job and transfer: their weights decide the sender's turns. `None`: it is sent without a turn.
    pub transfer: Option<(GroupId, MemberId)>,
}

/// A range that did not arrive completely: `verified` bytes from its start, then this fault.
#[derive(Debug)]
pub struct Broken {
    pub verified: u64,
    pub fault: Fault,
}

pub trait Carrier: Sync {
    fn transport(&self) -> Transport;

    /// Whether this kernel has it.
    fn available(&self) -> bool {
        true
    }

    /// # Errors
    /// Not reachable in time, or the peer does not agree to what the leg demands.
    fn connect(&self, address: SocketAddr, leg: &Leg, context: &Context) -> Result<Box<dyn Connection>, Fault>;

    /// Whether its clients begin with this byte, and others' do not.
    fn begins_with(&self, _first: u8) -> bool {
        false
    }

    /// Takes a connection whose client has begun as this carrier's do.
    ///
    /// # Errors
    /// The client went away, or does not agree.
    fn accept(&self, _incoming: Incoming, _context: &Context) -> io::Result<Box<dyn Channel>> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "clients of this carrier begin like those of another one"))
    }
}

/// Ends a connection from another thread: a thread that waits for it gets an error at once.
pub trait End: Send + Sync {
    fn end(&self);
}

pub trait Connection: Send {
    /// Proves the token, and waits until the server serves this connection.
    ///
    /// # Errors
    /// The server has no place, refuses, or cannot be asked; the connection is used up.
    fn take_place(&mut self) -> Result<(), Fault>;

    /// Asks for `len` bytes. May be called again before they have been received: answers arrive in the order of
    /// requests.
    ///
    /// # Errors
    /// The connection is used up.
    fn ask(&mut self, ask: &Ask, len: u64) -> Result<(), Fault>;

    /// Receives the oldest request's range into `into`, which has its length.
    ///
    /// # Errors
    /// What arrived before the fault, and the fault; unless the server merely refused, the connection is used up.
    fn receive(&mut self, into: &mut [u8]) -> Result<(), Broken>;

    /// Checksums of the verified blocks of the last range, and the protection that its object needs.
    fn brought(&self) -> (&[u64], Encryption);

    /// Asks for the next piece of a broadcast and its source; waits for the answer. The answer has the checksums of the
    /// piece's blocks: receivers serve one another, and only the owner is trusted for the content.
    ///
    /// # Errors
    /// The peer does not coordinate a broadcast of this part, or cannot be asked.
    fn next(&mut self, object: ObjectId, part: u32, wants: Wants) -> Result<(PieceReply, Vec<u64>), Fault>;

    /// Asks which chunks of a stream follow, and waits for the answer.
    ///
    /// # Errors
    /// The peer cannot be asked, or refuses.
    fn chunks(&mut self, stream: ObjectId, part: u32, wants: Wants) -> Result<ChunkReply, Fault>;

    /// Whether more can be requested, or is still to be received.
    fn usable(&self) -> bool;

    /// Handles for another thread: one ends the connection, the other counts the bytes of the current range.
    fn watch(&self) -> (Arc<dyn End>, Arc<AtomicU64>);

    fn negotiated(&self) -> Negotiated;

    /// The sender's side, as of the last range.
    fn sender(&self) -> &Sender;
}

/// All carriers there are that make connections; [`shm`] needs none.
pub const CARRIERS: &[&dyn Carrier] = &[&tcp::Tcp, &dctcp::Dctcp, &tls::Tls, &mptcp::Mptcp, &ictcp::Ictcp];

/// Transports that this process can carry.
pub fn transports() -> Vec<Transport> {
    let carried = CARRIERS.iter().filter(|carrier| carrier.available()).map(|carrier| carrier.transport());
    std::iter::once(Transport::Shm).chain(carried).collect()
}

pub fn carrier(transport: Transport) -> Option<&'static dyn Carrier> {
    CARRIERS.iter().copied().find(|carrier| carrier.transport() == transport)
}

/// The network connection below a channel: its socket options and its state.
pub trait Below {
    /// Where the other end is.
    ///
    /// # Errors
    /// The connection is gone.
    fn peer(&self) -> io::Result<IpAddr>;

    fn ends(&self) -> Arc<dyn End>;

    /// Sets a congestion control and a minimum RTO (microseconds) if they are given; returns what is in force.
    fn ask(&self, congestion_control: Option<&str>, rto_min_us: Option<u32>) -> (String, Option<u32>);

    /// Its current state, without what [`Below::ask`] returned.
    fn facts(&self) -> Sender;

    /// How many subflows it has; `None`: it is one flow by its kind.
    fn subflows(&self) -> Option<u32>;
}

/// A byte stream that carries [`http`], on either side.
pub trait Channel: Read + Write + Send {
    fn below(&self) -> &dyn Below;

    /// What only the two ends of the session know (RFC 9266); empty without a session.
    ///
    /// # Errors
    /// The session is not up.
    fn binding(&self) -> io::Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// How the connection is encrypted and authenticated.
    fn encryption(&self) -> Encryption;

    /// TLS version and cipher.
    fn tls(&self) -> Option<String>;

    /// Sends a head and a body from memory.
    fn send(&mut self, head: &[u8], body: &[u8]) -> io::Result<()> {
        self.write_all(head)?;
        self.write_all(body)?;
        self.flush()
    }

    /// Sends a head and a body from a place in a file.
    fn send_file(&mut self, head: &[u8], file: &File, offset: u64, len: u64) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        self.write_all(head)?;
        let mut buffer = vec![0; len.min(256 << 10) as usize];
        let mut sent = 0;
        while sent < len {
            let count = buffer.len().min((len - sent) as usize);
            file.read_exact_at(&mut buffer[..count], offset + sent)?;
            self.write_all(&buffer[..count])?;
            sent += count as u64;
        }
        self.flush()
    }
}

/// Takes a connection that a client made, by the carrier whose clients begin as it does.
///
/// # Errors
/// The client went away, or does not agree with that carrier.
pub fn accept(incoming: Incoming, context: &Context) -> io::Result<Box<dyn Channel>> {
    let first = incoming.first()?;
    let carrier = CARRIERS.iter().find(|carrier| carrier.begins_with(first));
    let unknown =
        || io::Error::new(io::ErrorKind::InvalidData, format!("no carrier has clients that begin with {first}"));
    carrier.ok_or_else(unknown)?.accept(incoming, context)
}

/// Sends a range of a file without copying it.
fn sendfile(socket: &impl AsRawFd, file: &File, offset: u64, len: u64) -> io::Result<()> {
    let mut at = offset as libc::off_t;
    let end = at + len as libc::off_t;
    while at < end {
        // SAFETY: two open descriptors and a place that the kernel moves on.
        let sent = unsafe { libc::sendfile(socket.as_raw_fd(), file.as_raw_fd(), &raw mut at, (end - at) as usize) };
        match sent {
            0 => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the spool file is shorter than it was")),
            1.. => {}
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}
