//! The client's side of the wire, over any byte stream.

use super::tcp::Plain;
use super::turns::Turns;
use super::{Ask, Broken, Channel, Connection, Context, End};
use crate::auth::{self, Nonce, Purpose, Role, Token};
use crate::checksum;
use crate::clock::lasting;
use crate::facts::Sender;
use crate::object::{ObjectId, from_hex, to_hex};
use crate::socket;
use crate::streams::ChunkReply;
use crate::wire::{HeadReader, PieceReply, Request, Response, Wants};
use mission_core::defaults::{BLOCK_BYTES, BUSY_RETRY_MS, CONNECT, STALL};
use mission_core::flight::Leg;
use mission_core::host::fetches::Fault;
use mission_core::report::Negotiated;
use mission_core::types::{Encryption, Transport};
use socket2::{Domain, Protocol, Socket, Type};
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Makes a connection by TCP or MPTCP, with the leg's options for this side's socket.
///
/// # Errors
/// Not reachable in time.
pub(super) fn connect(address: SocketAddr, leg: &Leg, protocol: Protocol) -> Result<Plain, Fault> {
    let fault = |error: io::Error| Fault::Connection(format!("connection to {address}: {error}"));
    let made = Socket::new(Domain::for_address(address), Type::STREAM, Some(protocol)).map_err(fault)?;
    // The data flows the other way: what counts is what the server sets, and that is read back. But requests wait for
    // the timers of this side: a congestion control that paces (bbr) delays each of them. The option is set before the
    // connection is made, because DCTCP negotiates ECN with its first packet.
    if let Some(name) = &leg.congestion_control {
        let _ = made.set_tcp_congestion(name.as_bytes());
    }
    made.connect_timeout(&address.into(), lasting(CONNECT)).map_err(fault)?;
    let stream = TcpStream::from(made);
    stream.set_nodelay(true).map_err(fault)?;
    stream.set_read_timeout(Some(lasting(STALL))).map_err(fault)?;
    stream.set_write_timeout(Some(lasting(STALL))).map_err(fault)?;
    if let Some(value) = leg.rto_min_us {
        let _ = socket::set_rto_min_us(&stream, value);
    }
    Ok(Plain(Arc::new(stream)))
}

pub struct HttpConnection<C> {
    channel: C,
    head: HeadReader,
    leg: Leg,
    server: SocketAddr,
    token: Token,
    turns: Arc<Turns>,
    admitted: bool,
    usable: bool,
    /// Received bytes of the current range, for other threads.
    received: Arc<AtomicU64>,
    /// Checksums of the requests that were not answered yet.
    asked: VecDeque<u64>,
    sender: Sender,
    /// Of the blocks of the last range, as far as they were verified.
    checksums: Vec<u64>,
    object_encryption: Encryption,
}

impl<C: Channel> HttpConnection<C> {
    /// `server`: the address that it connects to.
    pub fn new(channel: C, leg: &Leg, server: SocketAddr, context: &Context) -> HttpConnection<C> {
        let head = HeadReader::default();
        HttpConnection {
            channel,
            head,
            leg: leg.clone(),
            server,
            token: context.token.clone(),
            turns: context.turns.clone(),
            admitted: false,
            usable: true,
            received: Arc::default(),
            asked: VecDeque::new(),
            sender: Sender::default(),
            checksums: Vec::new(),
            object_encryption: Encryption::None,
        }
    }

    fn send(&mut self, request: &Request) -> Result<(), Fault> {
        let sent = request.write();
        self.asked.push_back(checksum::of(&sent));
        self.channel.send(&sent, b"").map_err(broken)
    }

    fn response(&mut self) -> Result<Response, Fault> {
        let asked = self.asked.pop_front().expect("answers are awaited only for requests");
        let head = self.head.read(&mut self.channel).map_err(broken)?;
        let head = head.ok_or_else(|| Fault::Connection("the server closed the connection".into()))?;
        let response = Response::parse(&head).map_err(Fault::Damaged)?;
        if response.request_checksum != asked {
            return Err(Fault::Damaged("the request arrived damaged".into()));
        }
        if let Some(turn) = response.turn.filter(|_| response.status == 503) {
            self.turns.keep(self.server, turn);
        }
        Ok(response)
    }

    fn request(&mut self, request: Request) -> Result<(), Fault> {
        let asked = if self.admitted { self.send(&request) } else { self.ask_with_proof(request) };
        self.usable &= asked.is_ok();
        // If the proof was refused, the answer reports it.
        self.admitted = true;
        asked
    }

    /// Sends the first request on this connection, and answers the server's challenge.
    fn ask_with_proof(&mut self, mut request: Request) -> Result<(), Fault> {
        let own: Nonce = auth::random();
        request.nonce = Some(own);
        self.send(&request)?;
        let response = self.response()?;
        let Some((nonce, proof)) = response.challenge.filter(|_| response.status == 401) else {
            return Err(Fault::Denied(format!(
                "the server did not ask for a proof but answered {}: {}",
                response.status, response.reason
            )));
        };
        let binding = self.channel.binding().map_err(broken)?;
        let purpose = Purpose::Ranges(&binding);
        let proof = from_hex(&proof).unwrap_or_default();
        if !self.token.proves(Role::Server, &own, &nonce, purpose, &proof) {
            return Err(Fault::Denied("the server does not know this cluster's token".into()));
        }
        request.turn = self.turns.take(self.server);
        request.proof = Some(to_hex(&self.token.prove(Role::Client, &own, &nonce, purpose)));
        self.send(&request)
    }

    fn receive_body(&mut self, response: &Response, into: &mut [u8]) -> Result<(), Broken> {
        let blocks = into.len().div_ceil(BLOCK_BYTES as usize);
        if response.len != into.len() as u64 || response.blocks.len() != blocks {
            return Err(Broken { verified: 0, fault: Fault::Damaged("the answer has the wrong length".into()) });
        }
        let mut verified = 0;
        let mut filled = self.head.take_rest(into);
        self.received.store(filled as u64, Ordering::Relaxed);
        for expected in &response.blocks {
            let end = (verified + BLOCK_BYTES as usize).min(into.len());
            while filled < end {
                // No further than the block, so that it still lies in the cache when it is checked.
                match self.channel.read(&mut into[filled..end]) {
                    Ok(0) => {
                        let fault =
                            Fault::Connection("the server closed the connection in the middle of a range".into());
                        return Err(Broken { verified: verified as u64, fault });
                    }
                    Ok(count) => {
                        filled += count;
                        self.received.store(filled as u64, Ordering::Relaxed);
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(Broken { verified: verified as u64, fault: broken(error) }),
                }
            }
            if checksum::of(&into[verified..end]) != *expected {
                let fault = Fault::Damaged("a block does not match its checksum".into());
                return Err(Broken { verified: verified as u64, fault });
            }
            verified = end;
        }
        Ok(())
    }
}

impl<C: Channel> Connection for HttpConnection<C> {
    fn take_place(&mut self) -> Result<(), Fault> {
        let usable = std::mem::take(&mut self.usable);
        let (object, wants) = (ObjectId([0; 16]), Wants::Place);
        self.request(Request { object, part: 0, wants, nonce: None, proof: None, turn: None })?;
        let response = self.response()?;
        if response.status != 204 {
            return Err(refusal(&response));
        }
        self.usable = usable;
        Ok(())
    }

    fn ask(&mut self, ask: &Ask, len: u64) -> Result<(), Fault> {
        let wants = Wants::Range {
            start: ask.start,
            len,
            congestion_control: self.leg.congestion_control.clone(),
            rto_min_us: self.leg.rto_min_us,
            transfer: ask.transfer,
        };
        self.request(Request { object: ask.object, part: ask.part, wants, nonce: None, proof: None, turn: None })
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<(), Broken> {
        let usable = std::mem::take(&mut self.usable);
        self.checksums.clear();
        let nothing = |fault| Broken { verified: 0, fault };
        let response = self.response().map_err(nothing)?;
        if response.status != 206 {
            // The server refused and keeps the connection, unless it has too many.
            self.usable = usable && !matches!(response.status, 401 | 503);
            return Err(nothing(refusal(&response)));
        }
        let received = self.receive_body(&response, into);
        let verified = received.as_ref().map_or_else(|broken| broken.verified, |()| into.len() as u64);
        self.checksums = response.blocks;
        self.object_encryption = response.encryption;
        self.checksums.truncate(verified.div_ceil(BLOCK_BYTES) as usize);
        received?;
        self.sender = response.sender;
        self.usable = usable;
        Ok(())
    }

    fn brought(&self) -> (&[u64], Encryption) {
        (&self.checksums, self.object_encryption)
    }

    fn next(&mut self, object: ObjectId, part: u32, wants: Wants) -> Result<(PieceReply, Vec<u64>), Fault> {
        self.request(Request { object, part, wants, nonce: None, proof: None, turn: None })?;
        let response = self.response()?;
        match (response.status, response.next) {
            (200, Some(next)) => Ok((PieceReply::Fetch(next), response.blocks)),
            (202, _) => Ok((PieceReply::Later, Vec::new())),
            (204, _) => Ok((PieceReply::Done, Vec::new())),
            _ => Err(refusal(&response)),
        }
    }

    fn chunks(&mut self, stream: ObjectId, part: u32, wants: Wants) -> Result<ChunkReply, Fault> {
        self.request(Request { object: stream, part, wants, nonce: None, proof: None, turn: None })?;
        self.response()?.to_chunk_reply().map_err(|response| refusal(&response))
    }

    fn usable(&self) -> bool {
        self.usable
    }

    fn watch(&self) -> (Arc<dyn End>, Arc<AtomicU64>) {
        (self.channel.below().ends(), self.received.clone())
    }

    fn negotiated(&self) -> Negotiated {
        let multipath = match self.leg.transport {
            Transport::Mptcp => self.channel.below().subflows(),
            _ => None,
        };
        let plain = self.leg.transport == Transport::Mptcp && multipath.is_none();
        Negotiated {
            transport: if plain { Transport::Tcp } else { self.leg.transport }.name().into(),
            subflows: multipath,
            congestion_control: self.sender.congestion_control.clone(),
            rto_min_us: self.sender.rto_min_us,
            tls: self.channel.tls(),
            authenticated: self.channel.encryption() == Encryption::Authenticated,
            memory: None,
        }
    }

    fn sender(&self) -> &Sender {
        &self.sender
    }
}

fn refusal(response: &Response) -> Fault {
    let reason = response.reason.clone();
    match response.status {
        404 => Fault::Gone(reason),
        503 => Fault::Busy { retry_after: Duration::from_millis(response.retry_after_ms.unwrap_or(BUSY_RETRY_MS)) },
        401 => Fault::Denied("the server refuses this cluster's token".into()),
        _ => Fault::Denied(reason),
    }
}

fn broken(error: io::Error) -> Fault {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Fault::Connection("the connection stalled".into()),
        io::ErrorKind::InvalidData => Fault::Damaged(error.to_string()),
        _ => Fault::Connection(error.to_string()),
    }
}
