//! The sender's half of synchronized reads: synthetic data, for clients that know the token.

use super::fresh::Sessions;
use super::{Asked, Flow, HELLO_PATIENCE, READ_BYTES, Variables, hear, nonce, proves, say};
use crate::auth::{self, Nonce, Purpose, Role, Token};
use crate::clock::Clock;
use crate::object::to_hex;
use crate::socket;
use mission_core::defaults::UNADMITTED_CONNECTIONS;
use mission_core::strangers::Strangers;
use mission_core::units::Time;
use serde_json::{Value, json};
use socket2::{SockRef, TcpKeepalive};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Keep-alive interval of a silent peer.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// A client that requests nothing, or reads nothing, for this long has given up: a collapse backs off for minutes at
/// most.
const IDLE: Duration = Duration::from_secs(600);

/// What a server allows.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub connections: usize,
    /// Bytes of one answer.
    pub bytes: u64,
    /// Bits per second of each connection.
    pub pace_bits_per_sec: Option<u64>,
}

/// Serves synthetic bytes until it is dropped.
pub struct Server {
    shared: Arc<Serving>,
    accepting: Option<thread::JoinHandle<()>>,
}

struct Serving {
    listener: TcpListener,
    token: Token,
    limits: Limits,
    stop: AtomicBool,
    clock: Clock,
    open: Mutex<Open>,
    next: AtomicU64,
    served: AtomicU64,
    sessions: Sessions,
}

/// The connections, and which of them have proved nothing yet.
struct Open {
    streams: Vec<(u64, TcpStream)>,
    strangers: Strangers,
}

impl Server {
    /// Serves clients of `listener`, in threads of this thread's network namespace.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(listener: TcpListener, token: &[u8], limits: Limits) -> io::Result<Server> {
        listener.set_nonblocking(false)?;
        let shared = Arc::new(Serving {
            listener,
            token: Token::new(token),
            limits,
            stop: AtomicBool::new(false),
            clock: Clock::start(),
            open: Mutex::new(Open {
                streams: Vec::new(),
                // A client may open all of its connections at once.
                strangers: Strangers::new(
                    UNADMITTED_CONNECTIONS.max(limits.connections),
                    HELLO_PATIENCE,
                    u64::from_ne_bytes(auth::random()),
                ),
            }),
            next: AtomicU64::new(0),
            served: AtomicU64::new(0),
            sessions: Sessions::default(),
        });
        let own = shared.clone();
        let accepting = thread::Builder::new().name("incast-accept".into()).spawn(move || own.accept())?;
        Ok(Server { shared, accepting: Some(accepting) })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.shared.listener.local_addr()
    }

    /// State of each connection that has something under way.
    pub fn variables(&self) -> Vec<Variables> {
        self.shared.lock().streams.iter().filter_map(|(_, stream)| Variables::of(stream)).collect()
    }

    /// Bytes sent, and connections that are open.
    pub fn served(&self) -> (u64, usize) {
        (self.shared.served.load(Ordering::Relaxed), self.shared.lock().streams.len())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts: Linux ends its call with an error.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
        self.shared.lock().streams.iter().for_each(|(_, stream)| drop(stream.shutdown(Shutdown::Both)));
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

impl Open {
    /// A connection was accepted. Who only connects takes no place of those that prove the token.
    fn arrives(&mut self, now: Time, id: u64, stream: TcpStream, from: IpAddr) {
        self.streams.push((id, stream));
        self.strangers.arrives(now, id, from);
        for closed in self.strangers.tidy(now) {
            if let Some(at) = self.streams.iter().position(|(other, _)| *other == closed) {
                let _ = self.streams.swap_remove(at).1.shutdown(Shutdown::Both);
            }
        }
    }

    /// A client has proved the token: whether there is a place for it.
    fn admits(&mut self, id: u64, most: usize) -> bool {
        self.strangers.leaves(id);
        self.streams.len() - self.strangers.len() <= most
    }

    fn leaves(&mut self, id: u64) {
        self.strangers.leaves(id);
        self.streams.retain(|(other, _)| *other != id);
    }
}

impl Serving {
    fn lock(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().expect("no panic while held")
    }

    fn accept(self: &Arc<Self>) {
        while !self.stop.load(Ordering::Relaxed) {
            let Ok((stream, from)) = self.listener.accept() else {
                if !self.stop.load(Ordering::Relaxed) {
                    // Out of descriptors, or a peer that was gone at once.
                    thread::sleep(Duration::from_millis(10));
                }
                continue;
            };
            let Ok(clone) = stream.try_clone() else { continue };
            let id = self.next.fetch_add(1, Ordering::Relaxed);
            {
                let mut open = self.lock();
                if self.stop.load(Ordering::Relaxed) {
                    continue;
                }
                open.arrives(self.clock.now(), id, clone, from.ip());
            }
            let own = self.clone();
            let serve = move || {
                let mut stream = stream;
                let _ = own.serve(&mut stream, id);
                let _ = stream.shutdown(Shutdown::Both);
                own.lock().leaves(id);
            };
            if thread::Builder::new().name("incast-serve".into()).spawn(serve).is_err() {
                self.lock().leaves(id);
            }
        }
    }

    fn serve(&self, stream: &mut TcpStream, id: u64) -> io::Result<()> {
        stream.set_nodelay(true)?;
        SockRef::from(&*stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE))?;
        stream.set_write_timeout(Some(HELLO_PATIENCE))?;
        let until = Instant::now() + HELLO_PATIENCE;
        let hello = hear(stream, until)?;
        if !hello["session"].is_null() {
            return self.serve_fresh(stream, id, &hello);
        }
        let client: Nonce = nonce(&hello)?;
        let server: Nonce = auth::random();
        say(stream, &json!({ "nonce": to_hex(&server) }))?;
        let hello = hear(stream, until)?;
        if !proves(&self.token, Role::Client, &client, &server, &hello) {
            return say(stream, &json!({ "error": "the tokens differ" }));
        }
        if !self.lock().admits(id, self.limits.connections) {
            let text = format!("this sender already serves {} connections", self.limits.connections);
            return say(stream, &json!({ "error": text }));
        }
        let proof = to_hex(&self.token.prove(Role::Server, &client, &server, Purpose::Ranges(&[])));
        let set = serde_json::from_value::<Asked>(hello["ask"].clone())
            .map_err(|error| error.to_string())
            .and_then(|ask| self.set(stream, &ask).map(|()| ask));
        let first = Flow::of(stream);
        match set {
            Err(text) => say(stream, &json!({ "error": text })),
            Ok(ask) => {
                // Before the answer: the receiver may open a fresh connection next.
                self.sessions.begin(client, server, ask);
                let ended = say(stream, &json!({ "proof": proof, "flow": first })).and_then(|()| {
                    self.answer(stream, || {
                        let own = Flow { cwnd_first: first.cwnd, ..Flow::of(stream) };
                        self.sessions.counted(&server).unwrap_or(own)
                    })
                });
                self.sessions.end(&server);
                ended
            }
        }
    }

    /// Serves a connection of one block.
    fn serve_fresh(&self, stream: &TcpStream, id: u64, hello: &Value) -> io::Result<()> {
        let Some((server, ask)) = self.sessions.admit(&self.token, hello) else { return Ok(()) };
        if !self.lock().admits(id, self.limits.connections) {
            return Ok(());
        }
        // Nothing was sent yet: this is the initial window.
        let first = Flow::of(stream).cwnd;
        let flow = || Flow { cwnd_first: first, ..Flow::of(stream) };
        let set = self.set(stream, &ask).map_err(io::Error::other);
        let ended = set.and_then(|()| self.answer(stream, flow));
        self.sessions.count(&server, flow());
        ended
    }

    /// Sends the requested bytes, until the receiver has no more requests.
    fn answer(&self, mut stream: &TcpStream, flow: impl Fn() -> Flow) -> io::Result<()> {
        stream.set_read_timeout(Some(IDLE))?;
        stream.set_write_timeout(Some(IDLE))?;
        let zeros = vec![0u8; READ_BYTES];
        loop {
            let mut wanted = [0; 8];
            stream.read_exact(&mut wanted)?;
            let mut left = u64::from_be_bytes(wanted);
            if left == 0 {
                say(stream, &json!({ "flow": flow() }))?;
                continue;
            }
            if left > self.limits.bytes {
                return Ok(());
            }
            while left > 0 {
                let sent = stream.write(&zeros[..left.min(zeros.len() as u64) as usize])?;
                left -= sent as u64;
                self.served.fetch_add(sent as u64, Ordering::Relaxed);
            }
        }
    }

    fn set(&self, stream: &TcpStream, ask: &super::Asked) -> Result<(), String> {
        if let Some(name) = &ask.congestion_control {
            socket::set_congestion_control(stream, name).map_err(|error| {
                format!(
                    "congestion control {name}: {error}; load it, or allow it: sysctl net.ipv4.tcp_allowed_congestion_control"
                )
            })?;
        }
        if let Some(value) = ask.rto_min_us {
            socket::set_rto_min_us(stream, value)
                .map_err(|error| format!("a minimum RTO of {value} us: {error}; sockets have it since Linux 6.15"))?;
        }
        let paces = [ask.pace_bits_per_sec, self.limits.pace_bits_per_sec];
        if let Some(pace) = paces.into_iter().flatten().min() {
            socket::set_pace(stream, pace).map_err(|error| format!("a pace of {pace} bit/s: {error}"))?;
        }
        Ok(())
    }
}
