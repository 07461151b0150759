//! Which process of a host gives its slots out, and how the others talk to it.
//!
//! All decisions are in [`mission_core::host`]; here are the sockets, the threads and the election. The arbiter is whoever
//! binds an abstract Unix socket whose name carries a generation. Where it falls silent, because its process was stopped,
//! the others bind the next generation. An arbiter that wakes up and finds a higher one steps down; what it granted
//! meanwhile reaches nobody, since the others have left its connection.

use crate::auth::Token;
use crate::checksum;
use crate::local::{self, Incoming, Outgoing};
use mission_core::host::fair::{Level, QueueShare, Shares};
use mission_core::host::slots::{Command, Event, SELF, Slots};
use mission_core::host::{ClientId, FromArbiter, GroupId, HEARTBEAT, MemberId, ToArbiter};
use mission_core::shares::{FlowsPerHost, Share};
use mission_core::types::{JobId, Stage, TransferId};
use mission_core::units::Time;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// Called when [`Arbiter::next`] has something, by a thread that holds no lock of this module.
pub type Wake = Box<dyn Fn() + Send + Sync>;

/// Longest time in which a process that starts finds an arbiter or becomes it; then it arbitrates for itself alone.
const ELECTION: Duration = Duration::from_secs(5);
/// Wait before another try to bind or connect.
const ELECTION_PAUSE: Duration = Duration::from_millis(5);
/// A process that takes no message for this long is left.
const SLOW_PEER: Duration = Duration::from_millis(200);
/// Longest message: a ticket, two ids and a number.
const MESSAGE_BYTES: usize = 512;
/// Connections that have not proved anything yet; more are closed at once.
const UNADMITTED_MAX: usize = 64;
/// Processes that get their slots here: a host has fewer workers.
const CLIENTS_MAX: usize = 1024;
/// How many names of arbiters are tried in one election: a stranger may have taken some.
const NAMES_MAX: usize = 8;
/// Numbers from here on are a stranger's: no arbiter is replaced that often.
const GENERATIONS: u64 = 1 << 40;
/// How often an arbiter looks whether another process of its host took its place without its noticing.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// What happens to this process's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    Message(FromArbiter),
    /// An arbiter was found or begun.
    Joined {
        remote: bool,
    },
    Lost,
}

/// This process's part in the arbitration of its host.
pub struct Arbiter {
    shared: Arc<Shared>,
}

struct Shared {
    key: String,
    token: Token,
    started: Instant,
    state: Mutex<State>,
    /// Wakes the thread that ticks when the arbiter closes.
    tick: Condvar,
    wake: Wake,
    unadmitted: AtomicUsize,
}

struct State {
    role: Role,
    /// Counts the roles: what a thread of an earlier one has to say does not count.
    epoch: u64,
    /// The highest generation that was seen to be an arbiter's of this cluster.
    generation: u64,
    flows_per_host: FlowsPerHost,
    shares: Shares,
    /// For this process, in order.
    inbox: VecDeque<Said>,
    /// Why slots are not shared with the host's other processes.
    alone: Option<String>,
    closing: bool,
}

enum Role {
    Electing,
    Leader(Box<Leader>),
    Follower(Peer),
}

struct Leader {
    slots: Slots,
    clients: HashMap<ClientId, Peer>,
    next_client: ClientId,
    /// Absent where no name could be had: then this process arbitrates for itself alone.
    listener: Option<UnixListener>,
    /// It has to be made sure that no other took its place.
    unsure: bool,
    looked_at: Instant,
    looking: bool,
    commands: Vec<Command>,
}

/// The other end of a connection.
struct Peer {
    stream: UnixStream,
    sent: Outgoing,
}

fn alone(error: &io::Error) -> String {
    format!("slots are not shared with other processes of this host: no arbiter could be found or begun: {error}")
}

/// The group of a job: the same in every process, so that nothing has to be agreed.
pub fn group_of(job: &JobId) -> GroupId {
    checksum::of(job.as_bytes())
}

/// The member of a transfer.
pub fn member_of(transfer: &TransferId) -> MemberId {
    checksum::of([&transfer.job, "\0", &transfer.from, "\0", &transfer.to].concat().as_bytes())
}

/// Shares by the numbers of their jobs and transfers.
pub fn shares_of(level: Level, shares: &[Share]) -> Shares {
    let share = |share: &Share| {
        let transfer = |(from, to): &(Stage, Stage)| {
            member_of(&TransferId { job: share.job.clone(), from: from.clone(), to: to.clone() })
        };
        let queue = share.stages.as_ref().map_or_else(|| group_of(&share.job), transfer);
        QueueShare { queue, weight: share.weight }
    };
    Shares { level, queues: shares.iter().map(share).collect() }
}

fn name(key: &str, generation: u64) -> String {
    format!("{}{generation}", prefix(key))
}

fn prefix(key: &str) -> String {
    format!("{}-slots-", crate::host::socket_name(key))
}

/// Generations whose names are taken, highest first.
fn generations(key: &str) -> Vec<u64> {
    let prefix = format!("@{}", prefix(key));
    let text = std::fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
    let names = text.lines().filter_map(|line| line.split_whitespace().last()?.strip_prefix(&prefix)?.parse().ok());
    let taken: BTreeSet<u64> = names.filter(|generation| *generation < GENERATIONS).collect();
    taken.into_iter().rev().collect()
}

impl Arbiter {
    /// Joins the host's arbitration, or begins it. `key` names those who share the slots, and `token` is what they prove
    /// to each other.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn new(key: &str, token: Token, flows_per_host: FlowsPerHost, wake: Wake) -> io::Result<Arbiter> {
        let state = State {
            role: Role::Electing,
            epoch: 0,
            generation: 0,
            flows_per_host,
            shares: Shares::default(),
            inbox: VecDeque::new(),
            alone: None,
            closing: false,
        };
        let shared = Arc::new(Shared {
            key: key.to_owned(),
            token,
            started: Instant::now(),
            state: Mutex::new(state),
            tick: Condvar::new(),
            wake,
            unadmitted: AtomicUsize::new(0),
        });
        let deadline = Instant::now() + ELECTION;
        while let Err(error) = shared.elect(false) {
            if Instant::now() >= deadline {
                shared.lead(None, false, Some(alone(&error)));
                break;
            }
            thread::sleep(ELECTION_PAUSE);
        }
        // Where a thread cannot be had the others end with it.
        let arbiter = Arbiter { shared: shared.clone() };
        let roles = shared.clone();
        thread::Builder::new().name("mission-arbiter".into()).stack_size(256 << 10).spawn(move || roles.run())?;
        thread::Builder::new().name("mission-beat".into()).stack_size(256 << 10).spawn(move || shared.beat())?;
        Ok(arbiter)
    }

    /// Says something to whoever gives the slots out. What this process is to hear comes by [`Arbiter::next`].
    pub fn send(&self, message: ToArbiter) {
        let mut state = self.shared.lock();
        match &mut state.role {
            Role::Leader(_) => self.shared.lead_by(&mut state, Event::Message { client: SELF, message }),
            // An arbiter that takes nothing is left: the thread that reads from it elects another, which hears everything.
            Role::Follower(peer) => {
                if peer.send(&message).is_err() {
                    let _ = peer.stream.shutdown(Shutdown::Both);
                }
            }
            Role::Electing => {}
        }
    }

    /// What happened to this process's slots, in order.
    pub fn next(&self) -> Option<Said> {
        self.shared.lock().inbox.pop_front()
    }

    /// New shares of the host; in force here if this process gives the slots out, or once it does.
    pub fn set_shares(&self, flows_per_host: FlowsPerHost, shares: Shares) {
        let mut state = self.shared.lock();
        (state.flows_per_host, state.shares) = (flows_per_host, shares.clone());
        if let Role::Leader(_) = state.role {
            self.shared.lead_by(&mut state, Event::Shares { flows_per_host, shares });
        }
    }

    /// Leaves an arbiter that is silent; another is elected.
    pub fn replace(&self) {
        if let Role::Follower(peer) = &self.shared.lock().role {
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether there are other processes of the cluster on this host.
    pub fn has_neighbours(&self) -> bool {
        match &self.shared.lock().role {
            Role::Leader(leader) => !leader.clients.is_empty(),
            Role::Follower(_) => true,
            Role::Electing => false,
        }
    }

    pub fn gives_out(&self) -> bool {
        matches!(self.shared.lock().role, Role::Leader(_))
    }

    /// Why this process does not share the slots of its host, if it does not.
    pub fn alone(&self) -> Option<String> {
        self.shared.lock().alone.clone()
    }
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        // The listener goes with the role, so that the name is free for a successor.
        match std::mem::replace(&mut state.role, Role::Electing) {
            Role::Leader(leader) => leader.close(),
            Role::Follower(peer) => drop(peer.stream.shutdown(Shutdown::Both)),
            Role::Electing => {}
        }
        self.shared.tick.notify_all();
    }
}

impl Peer {
    fn send<T: serde::Serialize>(&mut self, message: &T) -> io::Result<()> {
        let frame = self.sent.frame(message);
        self.stream.write_all(&frame)
    }
}

impl Leader {
    fn close(self) {
        self.clients.values().for_each(|client| drop(client.stream.shutdown(Shutdown::Both)));
        if let Some(listener) = &self.listener {
            // SAFETY: an open socket; this wakes the thread that accepts on it.
            unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    fn now(&self) -> Time {
        Time(self.started.elapsed().as_nanos() as u64)
    }

    /// Lets the arbiter's machine decide, and carries out what it says.
    fn lead_by(&self, state: &mut State, event: Event) {
        let now = self.now();
        let Role::Leader(leader) = &mut state.role else { return };
        leader.slots.handle(now, event, &mut leader.commands);
        let mut commands = std::mem::take(&mut leader.commands);
        let mut gone = Vec::new();
        for command in commands.drain(..) {
            match command {
                Command::Send { client: SELF, message } => state.inbox.push_back(Said::Message(message)),
                Command::Send { client, message } => {
                    let sent = leader.clients.get_mut(&client).is_some_and(|peer| peer.send(&message).is_ok());
                    if !sent {
                        gone.push(client);
                    }
                }
                Command::Expel { client } => gone.push(client),
                Command::Confirm => leader.unsure = true,
                // The thread that ticks does so often enough.
                Command::WakeAt(_) => {}
            }
        }
        leader.commands = commands;
        for client in gone {
            // The thread that reads from it sees that, and says that it has left.
            if let Some(peer) = leader.clients.remove(&client) {
                let _ = peer.stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Finds the arbiter of this host or becomes it; one try. A successor waits for what others still hold.
    fn elect(&self, succeeds: bool) -> io::Result<()> {
        let mut highest = self.lock().generation;
        for generation in generations(&self.key).into_iter().take(NAMES_MAX) {
            match local::connect(&name(&self.key, generation), &self.token) {
                Ok(stream) => {
                    self.follow(stream, generation);
                    return Ok(());
                }
                // A stranger's name counts for nothing, nor does one at which nobody listens. Nor does one that takes no
                // connections: it may be a stranger's, and if it is not, it is passed over below.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::PermissionDenied | io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock
                    ) => {}
                // It has more connections than it can look at now: it is asked again.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(error),
                // Stopped: the next generation takes its place.
                Err(_) => highest = highest.max(generation),
            }
        }
        // Names that a stranger has taken are passed over.
        let mut result = Err(io::ErrorKind::AddrInUse.into());
        for generation in (highest + 1..GENERATIONS).take(NAMES_MAX) {
            result = local::bind(&name(&self.key, generation));
            match &result {
                Ok(_) => {
                    self.lock().generation = generation;
                    break;
                }
                // It may be another process of this cluster that was faster: it is asked again.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    if let Ok(stream) = local::connect(&name(&self.key, generation), &self.token) {
                        self.follow(stream, generation);
                        return Ok(());
                    }
                }
                Err(_) => break,
            }
        }
        self.lead(Some(result?), succeeds, None);
        Ok(())
    }

    fn lead(&self, listener: Option<UnixListener>, succeeds: bool, alone: Option<String>) {
        let mut state = self.lock();
        if state.closing {
            return;
        }
        let leader = Leader {
            slots: Slots::new(self.now(), state.flows_per_host, succeeds && listener.is_some()),
            clients: HashMap::new(),
            next_client: SELF + 1,
            listener,
            unsure: false,
            looked_at: Instant::now(),
            looking: false,
            commands: Vec::new(),
        };
        state.epoch += 1;
        state.alone = alone;
        state.role = Role::Leader(Box::new(leader));
        state.inbox.push_back(Said::Joined { remote: false });
        let event = Event::Shares { flows_per_host: state.flows_per_host, shares: state.shares.clone() };
        self.lead_by(&mut state, event);
        drop(state);
        (self.wake)();
    }

    fn follow(&self, stream: UnixStream, generation: u64) {
        let mut state = self.lock();
        if state.closing {
            return;
        }
        // Messages are sent under locks.
        let _ = stream.set_write_timeout(Some(SLOW_PEER));
        state.generation = generation;
        state.epoch += 1;
        state.alone = None;
        state.role = Role::Follower(Peer { stream, sent: Outgoing::default() });
        state.inbox.push_back(Said::Joined { remote: true });
        drop(state);
        (self.wake)();
    }

    /// Lives as long as the arbiter: leads or follows, and takes part in the next election when the arbiter is lost.
    fn run(self: Arc<Shared>) {
        enum Now {
            Accept(UnixListener),
            Read(UnixStream),
            Alone,
            Elect,
        }
        let mut electing = None;
        loop {
            let (now, epoch) = {
                let state = self.lock();
                if state.closing {
                    return;
                }
                let now = match &state.role {
                    Role::Leader(leader) => match &leader.listener {
                        Some(listener) => listener.try_clone().map(Now::Accept),
                        None => Ok(Now::Alone),
                    },
                    Role::Follower(peer) => peer.stream.try_clone().map(Now::Read),
                    Role::Electing => Ok(Now::Elect),
                };
                (now, state.epoch)
            };
            match now {
                Ok(Now::Accept(listener)) => self.accept(&listener, epoch),
                Ok(Now::Read(stream)) => self.read(stream, epoch),
                Ok(Now::Alone) => {
                    let (mut state, since) = (self.lock(), Instant::now());
                    while !state.closing && state.epoch == epoch && since.elapsed() < LOOK_EVERY {
                        state = self.tick.wait_timeout(state, HEARTBEAT).expect("no panic while held").0;
                    }
                    let still = !state.closing && state.epoch == epoch;
                    drop(state);
                    // Whoever kept it from the others may be gone.
                    if still {
                        let _ = self.elect(true);
                    }
                }
                Ok(Now::Elect) => {
                    let since = *electing.get_or_insert_with(Instant::now);
                    match self.elect(true) {
                        Ok(()) => electing = None,
                        Err(error) if since.elapsed() >= ELECTION => {
                            electing = None;
                            self.lead(None, false, Some(alone(&error)));
                        }
                        Err(_) => thread::sleep(ELECTION_PAUSE),
                    }
                }
                Err(_) => thread::sleep(ELECTION_PAUSE),
            }
        }
    }

    /// Ticks the arbiter's machine, and looks whether another took its place.
    fn beat(self: Arc<Shared>) {
        let mut state = self.lock();
        while !state.closing {
            state = self.tick.wait_timeout(state, HEARTBEAT).expect("no panic while held").0;
            if state.closing {
                return;
            }
            let Role::Leader(leader) = &mut state.role else { continue };
            // A successor's time for the others is shorter than a heartbeat, so the first tick ends it.
            let look = !leader.looking && (leader.unsure || leader.looked_at.elapsed() >= LOOK_EVERY);
            leader.looking |= look;
            self.lead_by(&mut state, Event::Tick);
            let (generation, epoch) = (state.generation, state.epoch);
            drop(state);
            (self.wake)();
            if look {
                // On a thread of its own: one that does not answer must not stop the heartbeat.
                let own = self.clone();
                let looks = move || own.look(generation, epoch);
                let looks = thread::Builder::new().name("mission-look".into()).stack_size(128 << 10).spawn(looks);
                state = self.lock();
                let still = state.epoch == epoch;
                if looks.is_err()
                    && still
                    && let Role::Leader(leader) = &mut state.role
                {
                    // No thread can be had now; without another look it would grant nothing for ever.
                    leader.looking = false;
                }
                continue;
            }
            state = self.lock();
        }
    }

    /// Steps down where an arbiter of a higher generation answers.
    fn look(&self, generation: u64, epoch: u64) {
        let higher = generations(&self.key).into_iter().take_while(|other| *other > generation).take(NAMES_MAX);
        let found = higher.into_iter().find_map(|other| {
            let stream = local::connect(&name(&self.key, other), &self.token).ok()?;
            Some((stream, other))
        });
        let mut state = self.lock();
        if state.epoch != epoch || state.closing {
            return;
        }
        let Some((stream, other)) = found else {
            if let Role::Leader(leader) = &mut state.role {
                (leader.unsure, leader.looking, leader.looked_at) = (false, false, Instant::now());
            }
            self.lead_by(&mut state, Event::Confirmed);
            drop(state);
            (self.wake)();
            return;
        };
        if let Role::Leader(leader) = std::mem::replace(&mut state.role, Role::Electing) {
            leader.close();
        }
        state.inbox.push_back(Said::Lost);
        drop(state);
        self.follow(stream, other);
    }

    fn accept(self: &Arc<Shared>, listener: &UnixListener, epoch: u64) {
        loop {
            let accepted = listener.accept();
            let state = self.lock();
            if state.closing || state.epoch != epoch {
                return;
            }
            drop(state);
            let Ok((stream, _)) = accepted else {
                // Out of descriptors, most likely: the next try may find one.
                thread::sleep(ELECTION_PAUSE);
                continue;
            };
            if self.unadmitted.load(Ordering::Relaxed) >= UNADMITTED_MAX {
                continue;
            }
            self.unadmitted.fetch_add(1, Ordering::Relaxed);
            let own = self.clone();
            let serve = move || {
                let admitted = local::admit(&stream, &own.token);
                own.unadmitted.fetch_sub(1, Ordering::Relaxed);
                if admitted.is_ok() {
                    own.serve(stream, epoch);
                }
            };
            let started = thread::Builder::new().name("mission-slots".into()).stack_size(128 << 10).spawn(serve);
            if started.is_err() {
                self.unadmitted.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Hears one client until it leaves.
    fn serve(&self, stream: UnixStream, epoch: u64) {
        if stream.set_write_timeout(Some(SLOW_PEER)).is_err() {
            return;
        }
        let Ok(mut reader) = stream.try_clone() else { return };
        let client = {
            let mut state = self.lock();
            if state.epoch != epoch {
                return;
            }
            let Role::Leader(leader) = &mut state.role else { return };
            if leader.clients.len() >= CLIENTS_MAX {
                return;
            }
            let client = leader.next_client;
            leader.next_client += 1;
            leader.clients.insert(client, Peer { stream, sent: Outgoing::default() });
            self.lead_by(&mut state, Event::Joined { client });
            client
        };
        let mut messages = Incoming::new(MESSAGE_BYTES);
        let hear = |event: Event| {
            let mut state = self.lock();
            let hears = state.epoch == epoch
                && matches!(&state.role, Role::Leader(leader) if leader.clients.contains_key(&client));
            if hears || event == (Event::Left { client }) && state.epoch == epoch {
                self.lead_by(&mut state, event);
            }
            drop(state);
            (self.wake)();
            hears
        };
        while let Ok(Some(message)) = messages.read(&mut reader) {
            if !hear(Event::Message { client, message }) {
                break;
            }
        }
        hear(Event::Left { client });
        let mut state = self.lock();
        if state.epoch == epoch
            && let Role::Leader(leader) = &mut state.role
            && let Some(peer) = leader.clients.remove(&client)
        {
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
    }

    fn read(&self, mut stream: UnixStream, epoch: u64) {
        let mut messages = Incoming::new(MESSAGE_BYTES);
        while let Ok(Some(message)) = messages.read(&mut stream) {
            let mut state = self.lock();
            if state.epoch != epoch {
                return;
            }
            state.inbox.push_back(Said::Message(message));
            drop(state);
            (self.wake)();
        }
        let mut state = self.lock();
        if state.epoch == epoch {
            state.epoch += 1;
            state.role = Role::Electing;
            state.inbox.push_back(Said::Lost);
        }
        drop(state);
        (self.wake)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::cluster_name;
    use mission_core::host::Ticket;

    fn arbiter(key: &str) -> Arbiter {
        Arbiter::new(key, Token::new(b"secret"), FlowsPerHost::Fixed(2), Box::new(|| ())).unwrap()
    }

    fn cluster() -> String {
        cluster_name(&crate::auth::random::<16>())
    }

    fn want(arbiter: &Arbiter, ticket: Ticket) {
        arbiter.send(ToArbiter::Want { ticket, group: 1, member: 1, bytes: 1 });
    }

    /// Whether it is granted within some seconds; answers pings meanwhile.
    fn granted(arbiter: &Arbiter, ticket: Ticket, within: Duration) -> bool {
        let end = Instant::now() + within;
        while Instant::now() < end {
            match arbiter.next() {
                Some(Said::Message(FromArbiter::Grant { ticket: own })) if own == ticket => return true,
                Some(Said::Message(FromArbiter::Ping { .. })) => arbiter.send(ToArbiter::Pong),
                Some(_) => {}
                None => thread::sleep(Duration::from_millis(1)),
            }
        }
        false
    }

    fn joined(arbiter: &Arbiter, remote: bool) {
        let end = Instant::now() + Duration::from_secs(10);
        while arbiter.next() != Some(Said::Joined { remote }) {
            assert!(Instant::now() < end);
            thread::sleep(Duration::from_millis(1));
        }
    }

    const SOON: Duration = Duration::from_secs(5);
    const NOT: Duration = Duration::from_millis(100);

    #[test]
    fn processes_of_a_host_share_its_slots() {
        let key = cluster();
        let (first, second) = (arbiter(&key), arbiter(&key));
        assert!(first.gives_out() && !second.gives_out());
        want(&first, 1);
        want(&first, 2);
        assert!(granted(&first, 1, SOON) && granted(&first, 2, SOON));
        want(&second, 1);
        assert!(!granted(&second, 1, NOT));
        first.send(ToArbiter::Done { ticket: 1, moved: 1 });
        assert!(granted(&second, 1, SOON));
    }

    #[test]
    fn a_lost_connection_returns_its_slots_and_a_lost_arbiter_is_replaced() {
        let key = cluster();
        let (first, second, third) = (arbiter(&key), arbiter(&key), arbiter(&key));
        want(&second, 1);
        want(&second, 2);
        assert!(granted(&second, 1, SOON) && granted(&second, 2, SOON));
        want(&third, 1);
        assert!(!granted(&third, 1, NOT));
        joined(&third, true);
        // The arbiter goes; its successor hears from the second that it still holds both slots.
        drop(first);
        while !second.gives_out() && !third.gives_out() {
            thread::sleep(Duration::from_millis(1));
        }
        for ticket in [11, 12] {
            second.send(ToArbiter::Held { ticket, group: 1, member: 1 });
        }
        want(&third, 2);
        assert!(!granted(&third, 2, NOT));
        drop(second);
        // If the second was the arbiter, the third says it all again to itself.
        if !granted(&third, 2, NOT) {
            want(&third, 3);
            assert!(granted(&third, 3, SOON));
        }
    }

    #[test]
    fn another_token_has_slots_of_its_own() {
        let key = cluster();
        let first = arbiter(&key);
        let stranger = Arbiter::new(&key, Token::new(b"other"), FlowsPerHost::Fixed(2), Box::new(|| ())).unwrap();
        assert!(first.gives_out() && stranger.gives_out());
        assert!(!first.has_neighbours());
    }

    #[test]
    fn a_socket_that_takes_no_connections_keeps_nobody_from_sharing() {
        use socket2::{Domain, SockAddr, Socket, Type};
        let key = cluster();
        let socket = || Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        // Its queue of connections is full, so nobody learns whose it is.
        let address = SockAddr::unix(format!("\0{}", name(&key, GENERATIONS - 1))).unwrap();
        let (full, waits) = (socket(), socket());
        full.bind(&address).unwrap();
        full.listen(0).unwrap();
        waits.connect(&address).unwrap();
        let (first, second) = (arbiter(&key), arbiter(&key));
        assert!(first.gives_out() && !second.gives_out() && first.alone().is_none());
    }

    #[test]
    fn a_name_that_somebody_has_taken_and_does_not_answer_is_passed_over() {
        let key = cluster();
        let _taken = local::bind(&name(&key, 1)).unwrap();
        let (first, second) = (arbiter(&key), arbiter(&key));
        assert!(first.gives_out() && !second.gives_out() && first.alone().is_none());
        want(&second, 1);
        assert!(granted(&second, 1, SOON));
    }
}
