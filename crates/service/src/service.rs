//! A running replica: its connections, and the thread that decides.

use crate::connection::Connection;
use crate::http::{self, Heard, Question};
use crate::looking;
use crate::moment::Moment;
use crate::settings::{Allowed, Settings};
use crate::storing::Storing;
use mission_core::service::{
    AskId, Asked, Command, Event, FromService, Leader, Refused, Replica, Role, SessionId, Status,
};
use mission_core::strangers::Strangers;
use mission_core::units::Time;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fd::OwnedFd;
use rustls::ServerConfig;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The name of the session protocol in the HTTP request's `Upgrade` header.
pub const UPGRADE: &str = "mission-control";
/// Tick interval of the replica: a tenth of its shortest wait.
const TICK: Duration = Duration::from_millis(25);
/// A connection without a token by then is closed, and so is a silent one: members send a heartbeat every second.
const UNADMITTED: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_secs(60);
/// Time to send the last bytes of a connection that is being closed.
const ENDED: Duration = Duration::from_secs(5);
/// Messages wait after this time, so that the loop continues and a leader renews its lease.
const TURN: Duration = Duration::from_millis(20);
/// Interval of checks for expired connections.
const LOOK: Duration = Duration::from_secs(1);
/// Most connections without a token; one more closes one of the address that has most of them.
const UNADMITTED_MAX: usize = 512;
/// Connections accepted in a row before others are heard: a flood of them must not delay members.
const ACCEPTED_AT_ONCE: usize = 64;
const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const FIRST: u64 = 2;

/// A replica that runs until it is stopped or dropped.
pub struct Service {
    address: SocketAddr,
    inbox: Sender<Incoming>,
    wake: Arc<OwnedFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Incoming {
    Event(Event),
    Status(Sender<Status>),
    Stop,
}

struct Loop {
    settings: Settings,
    tls: Option<Arc<ServerConfig>>,
    listener: TcpListener,
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    inbox: Receiver<Incoming>,
    replica: Replica,
    storing: Storing,
    began: Moment,
    connections: BTreeMap<u64, Open>,
    /// Connections without a token.
    strangers: Strangers,
    next: u64,
    asks: BTreeMap<AskId, u64>,
    next_ask: AskId,
    commands: Vec<Command>,
    /// Connections with bytes to send.
    ready: Vec<u64>,
    /// Connections that may have further requests.
    more: BTreeSet<u64>,
    /// The first of them.
    next_turn: u64,
    /// No connection is accepted for a while: this process has no descriptors left.
    full: bool,
}

struct Open {
    connection: Connection,
    /// It is registered for being writable, too.
    writes: bool,
    heard_at: Instant,
}

impl Service {
    /// # Errors
    /// One line: the store, the certificate or the address cannot be used.
    pub fn start(settings: Settings) -> Result<Service, String> {
        let (store, tls) = (settings.store()?, settings.tls()?);
        let text = |error: &dyn std::fmt::Display| format!("the service cannot listen at {}: {error}", settings.listen);
        let listener = TcpListener::bind(settings.listen).map_err(|error| text(&error))?;
        listener.set_nonblocking(true).map_err(|error| text(&error))?;
        let address = listener.local_addr().map_err(|error| text(&error))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| text(&error))?;
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(|error| text(&error))?);
        for (number, added) in [
            (LISTENER, epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)),
            (WAKE, epoll::add(&epoll, &*wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)),
        ] {
            added.map_err(|error| format!("epoll {number}: {error}"))?;
        }
        let (inbox, incoming) = channel();
        let (sender, woken) = (Mutex::new(inbox.clone()), wake.clone());
        let says: Arc<dyn Fn(Event) -> bool + Send + Sync> = Arc::new(move |event| {
            let sent = sender.lock().expect("no panic while held").send(Incoming::Event(event)).is_ok();
            wake_up(&woken);
            sent
        });
        let began = Moment::now();
        let own = Leader { address: settings.address.as_str().into(), tokens: settings.tokens.fingerprint().into() };
        let storing = Storing::start(&store, &own.text(), began, &says).map_err(|error| text(&error))?;
        let mut draw = [0; 8];
        aws_lc_rs::rand::fill(&mut draw).map_err(|_| "no random numbers")?;
        // 53 bits: all numbers of JSON's are exact up to there.
        let draw = u64::from_le_bytes(draw) >> 11;
        let replica = Replica::new(own, settings.policy.clone(), draw);
        let run = Loop {
            settings,
            tls,
            listener,
            epoll,
            wake: wake.clone(),
            inbox: incoming,
            replica,
            storing,
            began,
            connections: BTreeMap::new(),
            strangers: Strangers::new(UNADMITTED_MAX, UNADMITTED, draw),
            next: FIRST,
            asks: BTreeMap::new(),
            next_ask: 1,
            commands: Vec::new(),
            ready: Vec::new(),
            more: BTreeSet::new(),
            next_turn: FIRST,
            full: false,
        };
        let builder = thread::Builder::new().name("mission-service".into());
        let thread = builder.spawn(move || run.run()).map_err(|error| format!("no thread: {error}"))?;
        Ok(Service { address, inbox, wake, thread: Mutex::new(Some(thread)) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `None`: it has stopped.
    pub fn status(&self) -> Option<Status> {
        let (answer, status) = channel();
        self.inbox.send(Incoming::Status(answer)).ok()?;
        wake_up(&self.wake);
        // A busy thread answers late; an ended one drops the request.
        status.recv().ok()
    }

    /// Returns the leader's key, and ends. Waits for that, with a limit.
    pub fn stop(&self) {
        let _ = self.inbox.send(Incoming::Stop);
        wake_up(&self.wake);
        let thread = self.thread.lock().expect("no panic while held").take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop();
    }
}

fn wake_up(wake: &OwnedFd) {
    // It cannot be full: it is read before 2^64 wake-ups.
    let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
}

impl Loop {
    fn run(mut self) {
        let (mut ticked, mut looked) = (Instant::now(), Instant::now());
        let mut events = Vec::with_capacity(1024);
        loop {
            let asked = self.more.iter().any(|number| self.may_be_heard(*number));
            let left = if asked { Duration::ZERO } else { TICK.saturating_sub(ticked.elapsed()) };
            let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: left.as_nanos() as i64 };
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                // Nothing can be done without it.
                Err(_) => return,
            }
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    WAKE => _ = rustix::io::read(&*self.wake, &mut [0u8; 8]),
                    number => self.moves(number),
                }
            }
            while let Ok(incoming) = self.inbox.try_recv() {
                match incoming {
                    Incoming::Event(event) => self.handle(event),
                    Incoming::Status(answer) => _ = answer.send(self.replica.status(self.now(), usize::MAX, &[])),
                    Incoming::Stop => {
                        self.storing.end(self.replica.role() == Role::Leader);
                        return;
                    }
                }
            }
            if ticked.elapsed() >= TICK {
                ticked = Instant::now();
                self.handle(Event::Tick);
                if looked.elapsed() >= LOOK {
                    looked = Instant::now();
                    self.close_old();
                }
            }
            self.hear_more();
            for number in std::mem::take(&mut self.ready) {
                self.flush(number);
            }
        }
    }

    fn now(&self) -> Time {
        Time(0) + Moment::now().since(self.began)
    }

    fn handle(&mut self, event: Event) {
        let mut commands = std::mem::take(&mut self.commands);
        self.replica.handle(self.now(), event, &mut commands);
        for command in commands.drain(..) {
            match command {
                Command::Campaign => self.storing.campaign(),
                Command::Renew => self.storing.renew(),
                Command::Resign => self.storing.resign(),
                Command::Write { write, epoch, entries } => self.storing.write(write, epoch, entries),
                Command::Say { session, message } => {
                    let mut line = serde_json::to_vec(&message).expect("plain values have a text");
                    line.push(b'\n');
                    self.say(session, &line);
                }
                Command::Close { session } => self.end(session),
                Command::Answer { ask, result } => {
                    let Some(number) = self.asks.remove(&ask) else { continue };
                    let answer = match result {
                        Ok(()) => http::answer(200, "application/json", "{\"ok\":true}"),
                        Err(Refused::Wrong(why)) => http::refusal(409, &why),
                        Err(Refused::Elsewhere(why)) => http::refusal(503, &why),
                        Err(Refused::Unknown(why)) => http::refusal(504, &why),
                    };
                    self.say(number, &answer);
                }
            }
        }
        self.commands = commands;
    }

    fn say(&mut self, number: u64, bytes: &[u8]) {
        if let Some(open) = self.connections.get_mut(&number) {
            open.connection.say(bytes);
            self.ready.push(number);
        }
    }

    /// Closes a connection once everything is sent.
    fn end(&mut self, number: u64) {
        if let Some(open) = self.connections.get_mut(&number) {
            open.connection.ends.get_or_insert_with(Instant::now);
            self.ready.push(number);
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            let (stream, from) = match self.listener.accept() {
                Ok((stream, from)) => (stream, from.ip()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Without descriptors it would be ready at once, again and again.
                Err(_) => {
                    self.full = epoll::delete(&self.epoll, &self.listener).is_ok();
                    return;
                }
            };
            let Ok(connection) = Connection::new(stream, self.tls.as_ref()) else { continue };
            let (number, flags) = (self.next, epoll::EventFlags::IN);
            self.next += 1;
            if epoll::add(&self.epoll, connection.stream(), epoll::EventData::new_u64(number), flags).is_err() {
                continue;
            }
            let open = Open { connection, writes: false, heard_at: Instant::now() };
            self.connections.insert(number, open);
            let now = self.now();
            self.strangers.arrives(now, number, from);
            self.strangers.tidy(now).into_iter().for_each(|number| self.drop_connection(number));
        }
    }

    /// A connection has received bytes, or can send more.
    fn moves(&mut self, number: u64) {
        let Some(open) = self.connections.get_mut(&number) else { return };
        let over = open.connection.receive().is_err();
        open.heard_at = Instant::now();
        self.strangers.asked(number);
        // Handle bytes that were received before the end.
        self.hear(number);
        if over {
            self.drop_connection(number);
        } else {
            self.ready.push(number);
        }
    }

    /// Handles further messages of connections, one after the other, as long as there is time.
    fn hear_more(&mut self) {
        let began = Instant::now();
        let waiting = std::mem::take(&mut self.more);
        let mut asked = waiting.range(self.next_turn..).chain(waiting.range(..self.next_turn)).copied();
        while began.elapsed() < TURN
            && let Some(number) = asked.next()
        {
            self.hear(number);
        }
        // Connections without a turn are first next time.
        let mut rest = asked.peekable();
        self.next_turn = rest.peek().copied().unwrap_or(FIRST);
        self.more.extend(rest);
    }

    /// Whether received messages of a connection may be handled now.
    fn may_be_heard(&self, number: u64) -> bool {
        self.connections.get(&number).is_some_and(|open| open.connection.session || !open.connection.waits())
            && !self.asks.values().any(|own| *own == number)
    }

    /// Handles received bytes: all lines of a session, or one request; others have requests, too.
    fn hear(&mut self, number: u64) {
        let may = self.may_be_heard(number);
        let Some(open) = self.connections.get_mut(&number) else { return };
        if open.connection.ends.is_some() {
            return;
        }
        if open.connection.session {
            self.session(number);
            return;
        }
        if !may {
            self.more.insert(number);
            return;
        }
        match http::hear(&mut open.connection.received) {
            Heard::Part => {}
            Heard::Nonsense(why) => {
                self.say(number, &http::refusal(400, why));
                self.end(number);
            }
            Heard::Question(question) => {
                self.question(number, &question);
                self.more.insert(number);
            }
        }
    }

    /// Lines of a session, until one ends it, or it had its turn.
    fn session(&mut self, number: u64) {
        let began = Instant::now();
        loop {
            let Some(open) = self.connections.get_mut(&number) else { return };
            if open.connection.ends.is_some() {
                return;
            }
            if began.elapsed() >= TURN {
                self.more.insert(number);
                return;
            }
            let Some(line) = open.connection.line() else { return };
            match serde_json::from_slice(&line) {
                Ok(message) => self.handle(Event::Said { session: number, message }),
                Err(error) => {
                    let why = format!("a message of the session cannot be read: {error}");
                    let mut line =
                        serde_json::to_vec(&FromService::Rejected { why }).expect("plain values have a text");
                    line.push(b'\n');
                    self.say(number, &line);
                    self.handle(Event::Closed { session: number });
                    self.end(number);
                }
            }
        }
    }

    fn question(&mut self, number: u64, question: &Question) {
        let allowed = self.settings.tokens.allow(question.token.as_deref());
        if let Some(open) = self.connections.get_mut(&number) {
            open.connection.admitted |= allowed != Allowed::Nothing;
            if open.connection.admitted {
                self.strangers.leaves(number);
            }
        }
        let (path, query) = question.path.split_once('?').unwrap_or((&question.path, ""));
        let may_change = allowed == Allowed::Change;
        let answer = match (question.method.as_str(), path, allowed) {
            ("GET", _, _) if let Some(answer) = looking::for_all(&self.replica, path) => answer,
            (_, _, Allowed::Nothing) => {
                http::refusal(401, "a token of the service is required: Authorization: Bearer TOKEN")
            }
            ("GET", "/v1/session", Allowed::Join) => {
                if question.upgrade.as_deref() != Some(UPGRADE) {
                    http::refusal(400, "a session has to begin with Upgrade: mission-control")
                } else {
                    self.say(number, &http::switches(UPGRADE));
                    if let Some(open) = self.connections.get_mut(&number) {
                        open.connection.session = true;
                    }
                    self.handle(Event::Opened { session: number });
                    return;
                }
            }
            (_, "/v1/session", _) => http::refusal(403, "a session requires the token of clusters"),
            (_, _, Allowed::Join) => http::refusal(403, "the token of clusters is valid only for sessions"),
            ("GET", path, _) if looking::is_one(path) => {
                looking::answer(&self.replica, self.now(), path, query, may_change)
            }
            ("POST", "/v1/ask", Allowed::Change) => match serde_json::from_slice::<Asked>(&question.body) {
                Ok(asked) => {
                    let ask = self.next_ask;
                    self.next_ask += 1;
                    self.asks.insert(ask, number);
                    self.handle(Event::Asks { ask, asked });
                    return;
                }
                Err(error) => http::refusal(400, &format!("not a request that the service knows: {error}")),
            },
            ("POST", "/v1/ask", _) => http::refusal(403, "changes require the operator's token"),
            (_, "/v1/ask", _) => http::refusal(405, "POST /v1/ask"),
            (_, path, _) if looking::is_one(path) || path == "/healthz" => http::refusal(405, "GET"),
            _ => http::refusal(
                404,
                "use /, /metrics, /healthz, or, below /v1, status, transfers, rates, history, ask or session",
            ),
        };
        self.say(number, &answer);
    }

    fn flush(&mut self, number: u64) {
        let Some(open) = self.connections.get_mut(&number) else { return };
        let sent = open.connection.flush();
        let waits = open.connection.waits();
        if sent.is_err() || open.connection.ends.is_some() && !waits {
            self.drop_connection(number);
        } else if waits != open.writes {
            open.writes = waits;
            let flags = if waits { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            let data = epoll::EventData::new_u64(number);
            let _ = epoll::modify(&self.epoll, open.connection.stream(), data, flags);
        }
    }

    fn close_old(&mut self) {
        let old = |(number, open): (&u64, &Open)| {
            let idle = open.heard_at.elapsed() >= IDLE;
            let ended = open.connection.ends.is_some_and(|since| since.elapsed() >= ENDED);
            (idle || ended).then_some(*number)
        };
        let late = self.strangers.tidy(self.now());
        let old = self.connections.iter().filter_map(old);
        for number in old.chain(late).collect::<Vec<_>>() {
            self.drop_connection(number);
        }
        if std::mem::take(&mut self.full) {
            let data = epoll::EventData::new_u64(LISTENER);
            self.full = epoll::add(&self.epoll, &self.listener, data, epoll::EventFlags::IN).is_err();
        }
    }

    fn drop_connection(&mut self, number: u64) {
        let Some(open) = self.connections.remove(&number) else { return };
        self.strangers.leaves(number);
        self.more.remove(&number);
        let _ = epoll::delete(&self.epoll, open.connection.stream());
        self.asks.retain(|_, own| *own != number);
        if open.connection.session {
            let session: SessionId = number;
            self.handle(Event::Closed { session });
        }
    }
}
