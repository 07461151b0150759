//! Sockets between processes of one host: abstract Unix sockets on which both ends prove the cluster's token.
//!
//! An abstract name exists once in each network namespace, so a process that can connect is on the same host. Any local
//! user can take a name, so the other end has to run as this user and to prove the token before any message is sent. A
//! message is a sequence number and JSON: a receiver that misses one closes the connection, and both ends send all of
//! their state again on the next one.

use crate::auth::{self, NONCE_BYTES, PROOF_BYTES, Purpose, Role, Token};
use crate::host;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// Time for both ends to prove themselves.
pub const HANDSHAKE: Duration = Duration::from_secs(1);

/// Takes a name.
///
/// # Errors
/// Another process has it ([`io::ErrorKind::AddrInUse`]).
pub fn bind(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Connects to the process that has a name.
///
/// # Errors
/// No process has it ([`io::ErrorKind::ConnectionRefused`]); the process that has it belongs to another user or does
/// not know the token ([`io::ErrorKind::PermissionDenied`]), does not answer in time ([`io::ErrorKind::TimedOut`]), or
/// accepts no connection now ([`io::ErrorKind::WouldBlock`]); in the last case it may be any user's.
pub fn connect(name: &str, token: &Token) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // A process that is stopped accepts nothing: with a full backlog a blocking call would wait for it.
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(format!("\0{name}"))?)?;
    socket.set_nonblocking(false)?;
    let stream = UnixStream::from(socket);
    if host::uid_of_peer(&stream) != Some(host::own_uid()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let end = Instant::now() + HANDSHAKE;
    let own = auth::random::<NONCE_BYTES>();
    let purpose = Purpose::Socket(name.as_bytes());
    write_until(&stream, &own, end)?;
    let mut answer = [0; NONCE_BYTES + PROOF_BYTES];
    read_until(&stream, &mut answer, end)?;
    let (theirs, proof) = answer.split_at(NONCE_BYTES);
    let theirs = theirs.try_into().expect("split at its length");
    if !token.proves(Role::Server, &own, &theirs, purpose, proof) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    write_until(&stream, &token.prove(Role::Client, &own, &theirs, purpose), end)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(stream)
}

/// The other end of [`connect`].
///
/// # Errors
/// As there.
pub fn admit(stream: &UnixStream, token: &Token) -> io::Result<()> {
    if host::uid_of_peer(stream) != Some(host::own_uid()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let address = stream.local_addr()?;
    let purpose = Purpose::Socket(address.as_abstract_name().unwrap_or_default());
    let end = Instant::now() + HANDSHAKE;
    let mut theirs = [0; NONCE_BYTES];
    read_until(stream, &mut theirs, end)?;
    let own = auth::random::<NONCE_BYTES>();
    let proof = token.prove(Role::Server, &theirs, &own, purpose);
    write_until(stream, &[&own[..], &proof].concat(), end)?;
    let mut proof = [0; PROOF_BYTES];
    read_until(stream, &mut proof, end)?;
    if !token.proves(Role::Client, &theirs, &own, purpose, &proof) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)
}

fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

/// Reads until an absolute time, however small the pieces that arrive.
fn read_until(mut stream: &UnixStream, mut into: &mut [u8], end: Instant) -> io::Result<()> {
    while !into.is_empty() {
        stream.set_read_timeout(Some(left(end)?))?;
        match stream.read(into) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = &mut into[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(timed_out(error)),
        }
    }
    Ok(())
}

fn write_until(mut stream: &UnixStream, bytes: &[u8], end: Instant) -> io::Result<()> {
    stream.set_write_timeout(Some(left(end)?))?;
    stream.write_all(bytes).map_err(timed_out)
}

fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Counts the messages that are sent on a connection.
#[derive(Default)]
pub struct Outgoing(u64);

impl Outgoing {
    /// The message as it goes over the socket: length, number, JSON.
    ///
    /// # Panics
    /// It cannot be written as JSON, or its length does not fit into four bytes.
    pub fn frame(&mut self, message: &impl Serialize) -> Vec<u8> {
        let mut frame = vec![0; FRAME_HEAD];
        serde_json::to_writer(&mut frame, message).expect("messages are plain data");
        let len = u32::try_from(frame.len() - FRAME_HEAD).expect("messages are short");
        self.0 += 1;
        frame[..4].copy_from_slice(&len.to_le_bytes());
        frame[4..FRAME_HEAD].copy_from_slice(&self.0.to_le_bytes());
        frame
    }
}

const FRAME_HEAD: usize = 12;
/// From the first byte of a message to its last.
const MESSAGE_TIME: Duration = Duration::from_secs(5);

/// Descriptors that one message carries: the kernel takes up to 253 (`SCM_MAX_FD`, unix(7)).
pub const FILES_MAX: usize = 64;

/// Sends a frame, and descriptors with its first byte: at most [`FILES_MAX`].
///
/// # Errors
/// The peer is gone, or reads nothing for too long.
pub fn send(mut stream: &UnixStream, frame: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    if files.is_empty() {
        return stream.write_all(frame);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(stream, &[IoSlice::new(frame)], &mut ancillary, SendFlags::NOSIGNAL)
    })?;
    stream.write_all(&frame[sent..])
}

/// Reads from a socket, and keeps the descriptors that come with the bytes.
struct WithFiles<'a> {
    stream: &'a UnixStream,
    files: Vec<OwnedFd>,
}

impl Read for WithFiles<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(self.stream, &mut [IoSliceMut::new(into)], &mut ancillary, flags)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        if self.files.len() > FILES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message arrived with too many descriptors"));
        }
        Ok(received.bytes)
    }
}

/// Reads the messages of a connection in their order.
pub struct Incoming {
    longest: usize,
    seen: u64,
}

impl Incoming {
    /// `longest`: bytes of a message; a longer one ends the connection.
    pub fn new(longest: usize) -> Incoming {
        Incoming { longest, seen: 0 }
    }

    /// The next message, with the descriptors that came with it; `None`: the peer is gone.
    ///
    /// # Errors
    /// As of [`Incoming::read`].
    pub fn read_with_files<T: DeserializeOwned>(
        &mut self,
        stream: &mut UnixStream,
    ) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let mut reader = WithFiles { stream, files: Vec::new() };
        let message = self.read(&mut reader)?;
        Ok(message.map(|message| (message, reader.files)))
    }

    /// The next message; `None`: the peer is gone.
    ///
    /// # Errors
    /// The connection broke; a message is too long, is missing, or makes no sense ([`io::ErrorKind::InvalidData`]).
    pub fn read<T: DeserializeOwned>(&mut self, stream: &mut impl Read) -> io::Result<Option<T>> {
        let mut head = [0; FRAME_HEAD];
        match stream.read(&mut head[..1]) {
            Ok(0) => return Ok(None),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return self.read(stream),
            Err(error) => return Err(error),
        }
        let end = Instant::now() + MESSAGE_TIME;
        fill(stream, &mut head[1..], end)?;
        let (len, number) = head.split_at(4);
        let len = u32::from_le_bytes(len.try_into().expect("four bytes")) as usize;
        let number = u64::from_le_bytes(number.try_into().expect("eight bytes"));
        self.seen += 1;
        if len > self.longest || number != self.seen {
            let why = format!("message {number} ({len} bytes) arrived in place of message {}", self.seen);
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let mut text = vec![0; len];
        fill(stream, &mut text, end)?;
        Ok(Some(serde_json::from_slice(&text)?))
    }
}

/// As `read_exact`, but a peer that sends byte by byte has until `end`.
fn fill(stream: &mut impl Read, mut into: &mut [u8], end: Instant) -> io::Result<()> {
    while !into.is_empty() {
        if Instant::now() >= end {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "a message did not arrive completely in time"));
        }
        match stream.read(into) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = &mut into[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn name() -> String {
        format!("mission-test-{}", crate::object::to_hex(&auth::random::<8>()))
    }

    /// What each end sends when they have these tokens.
    fn meet(one: &[u8], other: &[u8]) -> (io::Result<()>, io::Result<UnixStream>) {
        let name = name();
        let listener = bind(&name).unwrap();
        let server = Token::new(one);
        let admitted = thread::spawn(move || admit(&listener.accept().unwrap().0, &server));
        let connected = connect(&name, &Token::new(other));
        (admitted.join().unwrap(), connected)
    }

    #[test]
    fn only_who_knows_the_token_is_admitted_and_believed() {
        let (admitted, connected) = meet(b"secret", b"secret");
        assert!(admitted.is_ok() && connected.is_ok());
        let (admitted, connected) = meet(b"secret", b"another");
        assert!(admitted.is_err());
        assert_eq!(connected.err().map(|error| error.kind()), Some(io::ErrorKind::PermissionDenied));
    }

    #[test]
    fn whoever_relays_to_a_socket_of_another_name_proves_nothing() {
        let (theirs, relayed) = (name(), name());
        let (listener, relay) = (bind(&theirs).unwrap(), bind(&relayed).unwrap());
        let token = Token::new(b"secret");
        let admitted = thread::spawn({
            let token = token.clone();
            move || admit(&listener.accept().unwrap().0, &token)
        });
        let connected = thread::spawn(move || connect(&relayed, &token));
        let (client, _) = relay.accept().unwrap();
        let server = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&theirs).unwrap()).unwrap();
        let there = thread::spawn({
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            move || io::copy(&mut from, &mut to).and_then(|_| to.shutdown(std::net::Shutdown::Both))
        });
        let _ = io::copy(&mut &server, &mut &client);
        let _ = client.shutdown(std::net::Shutdown::Both);
        let _ = there.join();
        assert!(admitted.join().unwrap().is_err());
        assert_eq!(connected.join().unwrap().err().map(|error| error.kind()), Some(io::ErrorKind::PermissionDenied));
    }

    #[test]
    fn who_has_the_name_and_says_nothing_is_not_waited_for() {
        let name = name();
        let _listener = bind(&name).unwrap();
        let began = Instant::now();
        let error = connect(&name, &Token::new(b"secret")).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() < 10 * HANDSHAKE);
        assert_eq!(bind(&name).err().map(|error| error.kind()), Some(io::ErrorKind::AddrInUse));
    }

    #[test]
    fn messages_come_in_order_and_one_that_is_missing_or_too_long_ends_the_connection() {
        let mut sent = Outgoing::default();
        let frames: Vec<Vec<u8>> = ["one", "two", "three"].iter().map(|text| sent.frame(text)).collect();
        let mut received = Incoming::new(100);
        let bytes = [frames[0].clone(), frames[2].clone()].concat();
        let mut bytes = &bytes[..];
        assert_eq!(received.read::<String>(&mut bytes).unwrap(), Some("one".to_owned()));
        assert_eq!(
            received.read::<String>(&mut bytes).err().map(|error| error.kind()),
            Some(io::ErrorKind::InvalidData)
        );
        assert!(Incoming::new(2).read::<String>(&mut &frames[0][..]).is_err());
        assert_eq!(Incoming::new(2).read::<String>(&mut &[][..]).unwrap(), None);
        assert!(Incoming::new(100).read::<String>(&mut &frames[0][..5]).is_err());
    }
}
