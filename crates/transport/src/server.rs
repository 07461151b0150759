//! Serves parts of a store's objects to authorized clients.

use crate::auth::{self, Nonce, Purpose, Role};
use crate::carrier::{self, Below, Channel, Context, Incoming};
use crate::checksum;
use crate::clock::{Clock, lasting};
use crate::facts::Sender;
use crate::limit::Limit;
use crate::object::{ObjectId, from_hex, to_hex};
use crate::socket;
use crate::store::{Holding, Source, Store};
use crate::streams::Streams;
use crate::tracker::{Asking, Lane, Tracker};
use crate::uplink::Uplink;
use crate::wire::{HeadReader, PieceReply, Request, Response, Wants};
use mission_core::defaults::{SERVER_CONNECTIONS, SERVER_IDLE, STALL};
use mission_core::host::door::{Door, Entry, Number, Turn};
use mission_core::units::Time;
use rustix::event::{PollFd, PollFlags, poll};
use socket2::{Domain, Protocol, Socket, Type};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The congestion control that needs ECN; not every kernel has it.
const ECN_CONGESTION_CONTROL: &str = "dctcp";
/// How long the acceptor waits before it checks whether the server closes, and which clients missed the time for their
/// proof.
const ACCEPT_WAIT: Duration = Duration::from_millis(100);
/// The same while no client owes its proof: each look of an idle worker costs it 45 us.
const IDLE_WAIT: Duration = Duration::from_secs(1);
/// Connections that wait to be accepted: all receivers of a shuffle may come at once.
const BACKLOG: i32 = 1024;
/// Connections accepted in a row before earlier ones are checked again.
const ACCEPTED_AT_ONCE: usize = 16;
/// Readers of streams that may wait for an answer; further ones are answered immediately, and ask again.
const ASKING_MAX: usize = SERVER_CONNECTIONS / 2;
/// How long a reader of a stream waits for an answer: less than [`STALL`], after which the reader would consider this
/// process lost.
const CHUNKS_WITHIN: Duration = Duration::from_secs(1);
/// A client that left before it sent anything.
const GONE: PollFlags = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR);

pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    /// The only address of this host that is served.
    address: IpAddr,
    store: Arc<Store>,
    streams: Arc<Streams>,
    context: Context,
    limit: Option<Limit>,
    uplink: Arc<Uplink>,
    tracker: Tracker,
    /// The host's congestion control, for clients that request none.
    congestion_control: String,
    closing: AtomicBool,
    clock: Clock,
    connections: Mutex<Connections>,
    /// Readers of streams that wait for an answer.
    asking: AtomicUsize,
    sent_bytes: AtomicU64,
}

/// The connections that are open, and who may come in. Kept so that another thread can end what they wait for.
struct Connections {
    all: HashMap<Number, Arc<TcpStream>>,
    door: Door,
}

impl Connections {
    fn add(&mut self, now: Time, number: Number, stream: TcpStream, from: IpAddr) {
        self.all.insert(number, Arc::new(stream));
        self.door.arrives(now, number, from);
    }

    /// Connections that have sent nothing yet.
    fn silent(&self) -> Vec<(Number, Arc<TcpStream>)> {
        self.door.silent().filter_map(|number| Some((number, self.all.get(&number)?.clone()))).collect()
    }

    fn close(&mut self, number: Number) {
        if let Some(stream) = self.all.remove(&number) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn tidy(&mut self, now: Time) {
        self.door.tidy(now).into_iter().for_each(|number| self.close(number));
    }

    fn admit(&mut self, now: Time, number: Number, turn: Option<Turn>) -> Entry {
        let admitted = self.door.admit(now, number, turn);
        if let Entry::Open { closes: Some(other) } = admitted {
            self.close(other);
        }
        admitted
    }

    /// A connection has answered: whether it is to make room.
    fn answered(&mut self, now: Time, number: Number) -> bool {
        self.door.idle(number, Some(now));
        self.door.yields(now, number)
    }

    fn remove(&mut self, number: Number) {
        self.door.leaves(number);
        self.all.remove(&number);
    }
}

impl Server {
    /// Listen at `host`, on the first of `ports` that is free; send at most `limit` bytes a second.
    ///
    /// # Errors
    /// The address is not this machine's, or none of the ports is free.
    pub fn new(
        host: IpAddr,
        ports: &[u16],
        store: Arc<Store>,
        streams: Arc<Streams>,
        context: Context,
        limit: Option<u64>,
        uplink: Arc<Uplink>,
    ) -> io::Result<Server> {
        let listener = listen(host, ports)?;
        let address = SocketAddr::new(host, listener.local_addr()?.port());
        let shared = Arc::new(Shared {
            address: host,
            store,
            streams,
            context,
            limit: limit.map(Limit::new),
            uplink,
            tracker: Tracker::default(),
            congestion_control: socket::default_congestion_control(),
            closing: AtomicBool::new(false),
            clock: Clock::start(),
            connections: Mutex::new(Connections {
                all: HashMap::new(),
                door: Door::new(u64::from_ne_bytes(auth::random())),
            }),
            asking: AtomicUsize::new(0),
            sent_bytes: AtomicU64::new(0),
        });
        let acceptor = thread::Builder::new().name("mission-accept".into()).spawn({
            let shared = shared.clone();
            move || accept_all(&listener, &shared)
        })?;
        Ok(Server { address, shared, acceptor: Some(acceptor) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn connections(&self) -> usize {
        self.shared.connections().all.len()
    }

    /// An object is freed: its broadcast is no longer coordinated.
    pub fn forget(&self, object: &ObjectId) {
        self.shared.tracker.forget(object);
    }

    pub fn sent_bytes(&self) -> u64 {
        self.shared.sent_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The acceptor checks the flag after each bounded wait for a connection, so a connection ends the wait.
        self.shared.closing.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect_timeout(&self.address, ACCEPT_WAIT);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        if let Some(limit) = &self.shared.limit {
            limit.close();
        }
        for stream in self.shared.connections().all.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Listen at the first of these ports that is free.
fn listen(host: IpAddr, ports: &[u16]) -> io::Result<TcpListener> {
    for port in ports {
        match listen_at(host, *port) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            other => return other,
        }
    }
    let (first, last) = (ports.first().copied().unwrap_or(0), ports.last().copied().unwrap_or(0));
    let none = format!("none of the ports {first} to {last} at {host} is free for data");
    Err(io::Error::new(io::ErrorKind::AddrInUse, none))
}

/// A listener for Multipath TCP where the kernel has it: clients that speak plain TCP get plain TCP from it. With several
/// interfaces it is bound to all of them, else further subflows are refused silently (FACTS); connections to
/// another address than `host` are closed as soon as they are accepted.
fn listen_at(host: IpAddr, port: u16) -> io::Result<TcpListener> {
    let multipath = Socket::new(Domain::for_address(SocketAddr::new(host, 0)), Type::STREAM, Some(Protocol::MPTCP));
    let several = multipath.is_ok() && crate::host::interfaces().len() > 1 && !host.is_loopback();
    let any = if host.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0u16; 8]) };
    if several {
        // Only connections to this address are served: if it is another machine's, none would be.
        TcpListener::bind((host, port))?;
    }
    let address = SocketAddr::new(if several { any } else { host }, port);
    let domain = Domain::for_address(address);
    let socket = multipath.or_else(|_| Socket::new(domain, Type::STREAM, Some(Protocol::TCP)))?;
    // A listener whose congestion control does not use ECN does not negotiate ECN with a client. The first request of
    // each connection sets the congestion control that it names.
    let _ = socket.set_tcp_congestion(ECN_CONGESTION_CONTROL.as_bytes());
    // A port can be reused although connections to it have just ended.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Accepts connections. Each gets a thread once its client has sent something, so silent strangers cost little.
fn accept_all(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut next = 0;
    while !shared.closing.load(Ordering::SeqCst) {
        let (silent, owed) = {
            let connections = shared.connections();
            (connections.silent(), connections.door.has_strangers())
        };
        let wait = if owed { ACCEPT_WAIT } else { IDLE_WAIT };
        let mut waits: Vec<_> = silent.iter().map(|(_, stream)| PollFd::new(stream, PollFlags::IN | GONE)).collect();
        waits.push(PollFd::new(listener, PollFlags::IN));
        let _ = poll(&mut waits, Some(&wait.try_into().expect("a short time")));
        let seen: Vec<_> = waits.iter().map(PollFd::revents).collect();
        for ((number, stream), seen) in silent.into_iter().zip(seen) {
            if seen.intersects(GONE) {
                shared.connections().remove(number);
            } else if seen.intersects(PollFlags::IN) {
                serve_in_a_thread(number, stream, shared);
            }
        }
        shared.connections().tidy(shared.clock.now());
        // Accept a few in a row: those that have already sent something are found before any has to be closed.
        for _ in 0..ACCEPTED_AT_ONCE {
            match listener.accept() {
                Ok((stream, from)) => {
                    // The listener may have to be bound to every address; only the given one is served.
                    let meant = stream.local_addr().map(|own| own.ip()).ok() == Some(shared.address);
                    if meant && stream.set_nonblocking(false).is_ok() {
                        shared.connections().add(shared.clock.now(), next, stream, from.ip());
                        next += 1;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // Out of descriptors, most likely: a later try may find one.
                    thread::sleep(Duration::from_millis(10));
                    break;
                }
            }
        }
    }
}

fn serve_in_a_thread(number: u64, stream: Arc<TcpStream>, shared: &Arc<Shared>) {
    shared.connections().door.asked(number);
    let own = shared.clone();
    let thread = thread::Builder::new().name("mission-serve".into()).stack_size(256 << 10).spawn(move || {
        let registered = Registered { number, shared: &own };
        // A client that disconnects or speaks another protocol is not an error of this server.
        let _ = serve(stream, &registered);
    });
    if thread.is_err() {
        shared.connections().remove(number);
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().expect("no panic while held")
    }
}

/// Registers a served connection until its thread ends, even by a panic.
struct Registered<'a> {
    number: u64,
    shared: &'a Shared,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        if let Ok(mut connections) = self.shared.connections.lock() {
            connections.remove(self.number);
        }
    }
}

fn serve(stream: Arc<TcpStream>, registered: &Registered<'_>) -> io::Result<()> {
    let shared = registered.shared;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(lasting(SERVER_IDLE)))?;
    // A receiver that reads nothing for this long has abandoned this connection.
    stream.set_write_timeout(Some(lasting(2 * STALL)))?;
    let mut channel = carrier::accept(Incoming::of(stream.clone()), &shared.context)?;
    let mut client = Client {
        peer: channel.below().peer()?,
        binding: channel.binding()?,
        admitted: false,
        challenged: false,
        challenge: None,
        asked: (None, None),
        given: None,
        lane: None,
    };
    let mut heads = HeadReader::default();
    while let Some(head) = heads.read(&mut channel)? {
        let seen = checksum::of(&head);
        match Request::parse(&head) {
            Ok(request) => {
                if !client.admitted {
                    match admit(channel.as_mut(), &mut client, &request, seen, shared)? {
                        Admission::Proved => {
                            let now = shared.clock.now();
                            let admitted = shared.connections().admit(now, registered.number, request.turn);
                            if let Entry::Busy { turn, retry_after } = admitted {
                                let mut busy = Response::refusal(503, "too many connections", seen);
                                (busy.turn, busy.retry_after_ms) = (turn, Some(retry_after.as_millis() as u64));
                                return channel.send(&busy.write(), b"");
                            }
                        }
                        Admission::Asked => continue,
                        Admission::Refused => return Ok(()),
                    }
                }
                // A client that waits for a stream's next chunk can connect again if this connection has to be closed.
                let waits = matches!(request.wants, Wants::Chunks { .. });
                shared.connections().door.idle(registered.number, waits.then(|| shared.clock.now()));
                answer(channel.as_mut(), &mut client, &request, seen, shared)?;
                // The client finds its connection closed when it asks for more, and comes again.
                if shared.connections().answered(shared.clock.now(), registered.number)
                    // A receiver of a broadcast would get all from here instead.
                    && !matches!(request.wants, Wants::Source { .. })
                    && !heads.has_more()
                    && !asks_more(&stream)
                {
                    return Ok(());
                }
            }
            Err(bad) => {
                // After a header that cannot be parsed, the rest cannot be parsed either.
                channel.send(&Response::refusal(bad.status, &bad.reason, seen).write(), b"")?;
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Whether the client has sent its next request already.
fn asks_more(stream: &TcpStream) -> bool {
    let mut look = [PollFd::new(stream, PollFlags::IN)];
    poll(&mut look, Some(&Duration::ZERO.try_into().expect("no time"))).is_ok_and(|ready| ready > 0)
}

/// What a server knows of one connection.
struct Client {
    peer: IpAddr,
    /// What only the two ends of a TLS session know; empty without one.
    binding: Vec<u8>,
    admitted: bool,
    /// The proof was requested; that happens once.
    challenged: bool,
    challenge: Option<(Nonce, Nonce)>,
    /// Socket options of the last request, and what the kernel has in force: congestion control, minimum RTO.
    asked: (Option<String>, Option<u32>),
    given: Option<(String, Option<u32>)>,
    /// The lane on which it asks for its next piece of a broadcast.
    lane: Option<Lane>,
}

fn answer(
    channel: &mut dyn Channel,
    client: &mut Client,
    request: &Request,
    seen: u64,
    shared: &Shared,
) -> io::Result<()> {
    let refuse = |channel: &mut dyn Channel, status, reason: &str| {
        channel.send(&Response::refusal(status, reason, seen).write(), b"")
    };
    if request.wants == Wants::Place {
        return channel.send(&Response::refusal(204, "", seen).write(), b"");
    }
    if let Wants::Chunks { after, reader } = request.wants {
        let Some(encryption) = shared.streams.encryption(&request.object) else {
            return refuse(channel, 404, "no such stream here");
        };
        if channel.encryption() < encryption {
            return refuse(channel, 403, "this stream may only be sent encrypted");
        }
        let asks = shared.asking.fetch_add(1, Ordering::Relaxed);
        // Other readers wait here too.
        let within = if asks < ASKING_MAX { CHUNKS_WITHIN } else { Duration::ZERO };
        let reply = shared.streams.ask(&request.object, request.part, reader, after, within);
        shared.asking.fetch_sub(1, Ordering::Relaxed);
        return channel.send(&Response::chunk_reply(reply, seen).write(), b"");
    }
    let Some(holding) = shared.store.holding(&request.object, request.part) else {
        return refuse(channel, 404, "no such object here");
    };
    if channel.encryption() < holding.encryption() {
        return refuse(channel, 403, "this object may only be sent encrypted");
    }
    match &request.wants {
        Wants::Range { start, len, congestion_control, rto_min_us, transfer } => {
            let Some((source, checksums)) = holding.range(*start, *len) else {
                // A copy may not have it yet: another source does.
                let status = if matches!(holding, Holding::Copy(_)) { 404 } else { 416 };
                return refuse(channel, status, "no such part, or the range is not whole blocks of it");
            };
            let congestion_control = congestion_control.as_ref().unwrap_or(&shared.congestion_control);
            ask_below(channel.below(), client, (Some(congestion_control.clone()), *rto_min_us));
            let encryption = holding.encryption();
            let head = Response { len: *len, blocks: checksums, encryption, ..Response::refusal(206, "", seen) };
            // Bytes that stay on this host do not use its link. An aborted range counts in full: else a client that
            // aborts often would be served more than others.
            let leaves = transfer.filter(|_| client.peer != shared.address);
            let _turn = leaves.map(|(job, transfer)| shared.uplink.turn(job, transfer, *len));
            send(channel, client, head, source, shared)
        }
        Wants::Chunks { .. } | Wants::Place => unreachable!("answered above"),
        Wants::Source { serves, has, missed } => {
            let Holding::Own(object, part) = holding else {
                return refuse(channel, 404, "only its owner knows where the parts of an object are");
            };
            let Some(len) = object.part_len(part).filter(|len| *len > 0) else {
                return refuse(channel, 416, "no such part");
            };
            if serves.ip() != client.peer {
                return refuse(channel, 403, "a receiver has to serve from the address that it asks from");
            }
            let asking = Asking { serves: *serves, has: has.clone(), missed: *missed };
            let reply = shared.tracker.next(&mut client.lane, (request.object, part), len, asking);
            if shared.store.holding(&request.object, part).is_none() {
                // It was freed meanwhile, maybe before its broadcast was registered just now.
                shared.tracker.forget(&request.object);
            }
            let blocks = match reply {
                PieceReply::Fetch(next) => object.range(part, next.start, next.len).map(|(_, blocks)| blocks.to_vec()),
                _ => None,
            };
            let blocks = blocks.unwrap_or_default();
            let response = Response { encryption: object.encryption, blocks, ..Response::piece(reply, seen) };
            channel.send(&response.write(), b"")
        }
    }
}

/// Sends a range, as fast as it may leave.
fn send(
    channel: &mut dyn Channel,
    client: &Client,
    head: Response,
    source: Source<'_>,
    shared: &Shared,
) -> io::Result<()> {
    let (congestion_control, rto_min_us) = client.given.clone().expect("asked just now");
    let sender = Sender { congestion_control, rto_min_us, ..channel.below().facts() };
    let len = head.len;
    let head = Response { sender, ..head }.write();
    let Some(limit) = &shared.limit else {
        match source {
            Source::Memory(bytes) => channel.send(&head, bytes)?,
            Source::Spooled(range, offset) => {
                let (file, place) = range.place(offset);
                channel.send_file(&head, file, place, len)?;
            }
        }
        shared.sent_bytes.fetch_add(len, Ordering::Relaxed);
        return Ok(());
    };
    // The head does not wait: its receiver knows then that this process lives.
    channel.send(&head, b"")?;
    let (mut sent, most) = (0, limit.slice() as u64);
    while sent < len {
        let slice = (len - sent).min(most);
        limit.wait(slice as usize)?;
        match &source {
            Source::Memory(bytes) => channel.send(b"", &bytes[sent as usize..(sent + slice) as usize])?,
            Source::Spooled(range, offset) => {
                let (file, place) = range.place(*offset);
                channel.send_file(b"", file, place + sent, slice)?;
            }
        }
        sent += slice;
        shared.sent_bytes.fetch_add(slice, Ordering::Relaxed);
    }
    Ok(())
}

/// The result of a client's first requests.
enum Admission {
    Proved,
    /// It was answered, and has one more try.
    Asked,
    Refused,
}

/// Asks a client once to prove that it knows the token, even if it has a certificate.
fn admit(
    channel: &mut dyn Channel,
    client: &mut Client,
    request: &Request,
    seen: u64,
    shared: &Shared,
) -> io::Result<Admission> {
    let token = &shared.context.token;
    if let (Some((theirs, ours)), Some(proof)) = (client.challenge.take(), &request.proof) {
        let proof = from_hex(proof).unwrap_or_default();
        if token.proves(Role::Client, &theirs, &ours, Purpose::Ranges(&client.binding), &proof) {
            client.admitted = true;
            return Ok(Admission::Proved);
        }
    }
    if std::mem::replace(&mut client.challenged, true) {
        let refused = Response::refusal(401, "the proof does not match this cluster's token", seen);
        return channel.send(&refused.write(), b"").map(|()| Admission::Refused);
    }
    let mut response = Response::refusal(401, "prove that you know this cluster's token", seen);
    if let Some(theirs) = request.nonce {
        let ours = auth::random();
        client.challenge = Some((theirs, ours));
        let proof = token.prove(Role::Server, &theirs, &ours, Purpose::Ranges(&client.binding));
        response.challenge = Some((ours, to_hex(&proof)));
    }
    channel.send(&response.write(), b"").map(|()| Admission::Asked)
}

/// Sets the socket options of the flight plan, and reads back what is in force.
fn ask_below(below: &dyn Below, client: &mut Client, asked: (Option<String>, Option<u32>)) {
    if client.given.is_none() || client.asked != asked {
        client.given = Some(below.ask(asked.0.as_deref(), asked.1));
        client.asked = asked;
    }
}
