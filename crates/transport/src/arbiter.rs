//! The slots of a host, shared by all its worker processes.
//!
//! One process gives them out: whoever binds the abstract Unix socket of the cluster in this network namespace. The
//! others ask it over that socket, a JSON object per line. A lost connection returns its slots; a lost arbiter is
//! replaced by the next to bind, to whom each process says what it still holds.
//!
//! While nobody waits in vain a process keeps the slots that it was granted and uses them again without asking: a question
//! for each chunk would cost two context switches, as much as the chunk itself where chunks are small. As soon as
//! somebody waits, the arbiter says so to all, and from then on each chunk is asked for.

use crate::host;
use mission_core::budget::Budget;
use mission_core::slots::{ClientId, FlowsPerHost, Share, Slots};
use mission_core::types::JobId;
use mission_core::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// Called for every slot that was not granted at once. Must not call back into the arbiter while it holds a lock that
/// is also held around calls to the arbiter.
pub type OnGrant = Box<dyn Fn(JobId) + Send + Sync>;

/// This process's own number where it gives the slots out itself.
const SELF: ClientId = 0;
/// Longest time in which a process that starts finds an arbiter, or becomes it.
const ELECTION: Duration = Duration::from_secs(5);
/// Wait before another try to bind or connect after the arbiter was lost.
const ELECTION_PAUSE: Duration = Duration::from_millis(5);
/// Before a successor gives slots out, the others have this long to say what they still hold.
const SETTLE: Duration = Duration::from_millis(50);
/// A process that does not read its grants for this long has lost its slots.
const SLOW_CLIENT: Duration = Duration::from_millis(200);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    Want {
        job: JobId,
        bytes: u64,
        slots: u32,
    },
    Withdraw {
        job: JobId,
        slots: u32,
    },
    GiveBack {
        job: JobId,
        granted: u64,
        moved: u64,
    },
    Held {
        job: JobId,
        slots: u32,
    },
    Grant {
        job: JobId,
    },
    /// Somebody waits: slots that are not in use come back, and each chunk is asked for.
    Contended {
        contended: bool,
    },
}

pub struct Arbiter {
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    state: Mutex<State>,
    on_grant: OnGrant,
}

struct State {
    role: Role,
    /// What this process waits for and holds; told to the next arbiter if this one is lost.
    wanted: BTreeMap<JobId, VecDeque<u64>>,
    /// How much of that the arbiter has been told, where it is another process. It may be told of less later: while
    /// nobody else waits, a message for each chunk would only wake it.
    told: BTreeMap<JobId, usize>,
    held: BTreeMap<JobId, u32>,
    /// Of those held, the ones not in use now; only while nobody waits for them.
    spare: BTreeMap<JobId, u32>,
    contended: bool,
    flows_per_host: FlowsPerHost,
    shares: Vec<Share>,
    closing: bool,
}

enum Role {
    Electing,
    Leader(Leader),
    Follower(UnixStream),
}

struct Leader {
    slots: Slots,
    /// Where the number of slots is found by trial.
    budget: Option<Box<Budget>>,
    started: Instant,
    clients: HashMap<ClientId, UnixStream>,
    /// Absent where another user holds the name: then this process arbitrates for itself alone.
    listener: Option<UnixListener>,
    settling: bool,
    /// As last told to the clients.
    contended: bool,
}

impl Arbiter {
    /// Joins the host's arbitration for the cluster, or begins it.
    pub fn new(cluster: &str, flows_per_host: FlowsPerHost, on_grant: OnGrant) -> io::Result<Arbiter> {
        let state = State {
            role: Role::Electing,
            wanted: BTreeMap::new(),
            told: BTreeMap::new(),
            held: BTreeMap::new(),
            spare: BTreeMap::new(),
            contended: false,
            flows_per_host,
            shares: Vec::new(),
            closing: false,
        };
        let name = host::socket_name(cluster);
        let shared = Arc::new(Shared { name, state: Mutex::new(state), on_grant });
        // A predecessor that is just closing still holds the name, and answers nobody.
        let deadline = Instant::now() + ELECTION;
        while let Err(error) = shared.elect(false) {
            if Instant::now() >= deadline {
                return Err(error);
            }
            thread::sleep(ELECTION_PAUSE);
        }
        thread::Builder::new().name("mission-arbiter".into()).spawn({
            let shared = shared.clone();
            move || shared.run()
        })?;
        Ok(Arbiter { shared })
    }

    /// Wants slots, each for about so many bytes; returns a job for each that was granted at once.
    pub fn want(&self, job: &JobId, bytes: u64, slots: u32) -> Vec<JobId> {
        let mut state = self.shared.lock();
        let spare = state.spare.get_mut(job).map_or(0, |spare| {
            let used = slots.min(*spare);
            *spare -= used;
            used
        });
        let mut granted = vec![job.clone(); spare as usize];
        let missing = slots - spare;
        if missing > 0 {
            state.wanted.entry(job.clone()).or_default().extend((0..missing).map(|_| bytes));
            if let Role::Follower(_) = state.role {
                state.update(job);
            } else {
                granted.extend(state.tell(Message::Want { job: job.clone(), bytes, slots: missing }));
            }
        }
        granted
    }

    /// Waits for so many slots less.
    pub fn withdraw(&self, job: &JobId, slots: u32) -> Vec<JobId> {
        let mut state = self.shared.lock();
        if let Some(own) = state.wanted.get_mut(job) {
            own.truncate(own.len().saturating_sub(slots as usize));
        }
        if let Role::Follower(_) = state.role {
            state.update(job);
            return Vec::new();
        }
        state.tell(Message::Withdraw { job: job.clone(), slots })
    }

    /// Whether somebody waits for a slot in vain, as far as this process knows.
    pub fn contended(&self) -> bool {
        let state = self.shared.lock();
        match &state.role {
            Role::Leader(leader) => leader.settling || leader.contended,
            Role::Follower(_) => state.contended,
            Role::Electing => true,
        }
    }

    /// Gives a slot back that was charged `granted` bytes and moved `moved`.
    pub fn give_back(&self, job: &JobId, granted: u64, moved: u64) -> Vec<JobId> {
        let mut state = self.shared.lock();
        if matches!(state.role, Role::Follower(_)) && !state.contended {
            // The chunk that waits longest takes the slot over.
            if state.wanted.get_mut(job).and_then(VecDeque::pop_front).is_some() {
                state.update(job);
                return vec![job.clone()];
            }
            *state.spare.entry(job.clone()).or_default() += 1;
            return Vec::new();
        }
        state.let_go(job);
        state.tell(Message::GiveBack { job: job.clone(), granted, moved })
    }

    /// New shares of the host; in force here if this process gives the slots out, or once it does.
    pub fn set_shares(&self, flows_per_host: FlowsPerHost, shares: &[Share]) -> Vec<JobId> {
        let mut state = self.shared.lock();
        state.flows_per_host = flows_per_host;
        state.shares = shares.to_vec();
        let Role::Leader(leader) = &mut state.role else { return Vec::new() };
        leader.set_shares(flows_per_host, shares);
        state.give_out()
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
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        // The listener goes with the role, so that the name is free for a successor.
        match std::mem::replace(&mut state.role, Role::Electing) {
            Role::Leader(leader) => {
                leader.clients.values().for_each(|client| drop(client.shutdown(Shutdown::Both)));
                if let Some(listener) = &leader.listener {
                    // SAFETY: an open socket; this wakes the thread that accepts on it.
                    unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
                }
            }
            Role::Follower(stream) => drop(stream.shutdown(Shutdown::Both)),
            Role::Electing => {}
        }
    }
}

impl State {
    /// Hands a message to whoever gives the slots out; returns the jobs of this process that were granted one at once.
    fn tell(&mut self, message: Message) -> Vec<JobId> {
        match &mut self.role {
            Role::Leader(leader) => {
                leader.take(SELF, message);
                self.give_out()
            }
            Role::Follower(stream) => {
                // A lost arbiter shows in the thread that reads from it; the next one is told everything again.
                let _ = send(stream, &message);
                Vec::new()
            }
            Role::Electing => Vec::new(),
        }
    }

    /// Tells the arbiter, another process, what has changed in the slots that this one waits for, as far as it matters.
    fn update(&mut self, job: &JobId) {
        let wanted = self.wanted.get(job).map_or(0, VecDeque::len);
        let told = self.told.get(job).copied().unwrap_or(0);
        if wanted > told {
            let bytes = self.wanted[job].back().copied().unwrap_or(0);
            self.tell(Message::Want { job: job.clone(), bytes, slots: (wanted - told) as u32 });
        } else if wanted < told && (wanted == 0 || self.contended) {
            self.tell(Message::Withdraw { job: job.clone(), slots: (told - wanted) as u32 });
        } else {
            return;
        }
        self.told.insert(job.clone(), wanted);
        if wanted == 0 {
            self.wanted.remove(job);
            self.told.remove(job);
        }
    }

    /// Gives out the free slots; returns those of this process.
    fn give_out(&mut self) -> Vec<JobId> {
        let Role::Leader(leader) = &mut self.role else { return Vec::new() };
        if leader.settling {
            return Vec::new();
        }
        let mut own = Vec::new();
        loop {
            let grants = leader.slots.grants();
            if grants.is_empty() && !leader.observe(0, 0) {
                break;
            }
            for grant in grants {
                if grant.client == SELF {
                    own.push(grant.job);
                    continue;
                }
                let told = leader
                    .clients
                    .get(&grant.client)
                    .is_some_and(|mut stream| send(&mut stream, &Message::Grant { job: grant.job.clone() }).is_ok());
                if !told {
                    leader.clients.remove(&grant.client).map(|stream| stream.shutdown(Shutdown::Both));
                    leader.slots.drop_client(grant.client);
                }
            }
        }
        leader.tell_contention();
        own.iter().for_each(|job| self.granted(job));
        own
    }

    /// Spare slots were the last arbiter's to lend.
    fn forget_spare(&mut self) {
        self.contended = false;
        self.told.clear();
        for (job, spare) in std::mem::take(&mut self.spare) {
            (0..spare).for_each(|_| self.let_go(&job));
        }
    }

    fn let_go(&mut self, job: &JobId) {
        if let Some(held) = self.held.get_mut(job) {
            *held = held.saturating_sub(1);
            if *held == 0 {
                self.held.remove(job);
            }
        }
    }

    /// The arbiter says whether somebody waits in vain.
    fn on_contention_changed(&mut self, contended: bool) {
        self.contended = contended;
        if !contended {
            return;
        }
        let told: Vec<JobId> = self.told.keys().cloned().collect();
        told.iter().for_each(|job| self.update(job));
        for (job, spare) in std::mem::take(&mut self.spare) {
            for _ in 0..spare {
                self.let_go(&job);
                self.tell(Message::GiveBack { job: job.clone(), granted: 0, moved: 0 });
            }
        }
    }

    fn granted(&mut self, job: &JobId) {
        if let Some(told) = self.told.get_mut(job) {
            *told = told.saturating_sub(1);
        }
        if let Some(own) = self.wanted.get_mut(job) {
            own.pop_front();
            if own.is_empty() {
                self.wanted.remove(job);
            }
        }
        *self.held.entry(job.clone()).or_default() += 1;
    }
}

impl Leader {
    fn new(flows_per_host: FlowsPerHost, shares: &[Share], listener: Option<UnixListener>, settling: bool) -> Leader {
        let mut leader = Leader {
            slots: Slots::new(flows_per_host.usual()),
            budget: None,
            started: Instant::now(),
            clients: HashMap::new(),
            listener,
            settling,
            contended: false,
        };
        leader.set_shares(flows_per_host, shares);
        leader
    }

    fn set_shares(&mut self, flows_per_host: FlowsPerHost, shares: &[Share]) {
        if let FlowsPerHost::Fixed(flows) = flows_per_host {
            self.budget = None;
            self.slots.set_shares(flows, shares);
            return;
        }
        let limit = self.budget.get_or_insert_default().limit();
        self.slots.set_shares(limit, shares);
        self.slots.set_budget(limit);
    }

    /// What has arrived decides how many slots there are, where that is not given; true if it has changed.
    fn observe(&mut self, bytes: u64, chunks: u32) -> bool {
        let Some(budget) = &mut self.budget else { return false };
        let (before, now) = (budget.limit(), Time::from_secs_f64(self.started.elapsed().as_secs_f64()));
        budget.observe(now, bytes, chunks, self.slots.in_use(), self.slots.waiting() as u32);
        let changed = budget.limit() != before;
        if changed {
            self.slots.set_budget(budget.limit());
        }
        changed
    }

    fn take(&mut self, client: ClientId, message: Message) {
        match message {
            Message::Want { job, bytes, slots } => (0..slots).for_each(|_| self.slots.want(client, &job, bytes)),
            Message::Withdraw { job, slots } => (0..slots).for_each(|_| self.slots.withdraw(client, &job)),
            Message::GiveBack { job, granted, moved } => {
                self.slots.give_back(client, &job, granted, moved);
                self.observe(moved, u32::from(moved > 0));
            }
            Message::Held { job, slots } => self.slots.adopt(client, &job, slots),
            Message::Grant { .. } | Message::Contended { .. } => {}
        }
    }

    fn tell_contention(&mut self) {
        // Where rates decide, every chunk is told.
        let contended = self.budget.is_some() || self.slots.contended();
        if contended == self.contended {
            return;
        }
        self.contended = contended;
        for mut stream in self.clients.values() {
            // Who does not hear it is lost, as with a grant; the thread that reads from it sees that.
            if send(&mut stream, &Message::Contended { contended }).is_err() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    /// Becomes the one that gives out, or connects to it; one try. A successor takes over what others still hold.
    fn elect(&self, succeeds: bool) -> io::Result<()> {
        let address = SocketAddr::from_abstract_name(&self.name)?;
        let listener = match UnixListener::bind_addr(&address) {
            Ok(listener) => Some(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => match UnixStream::connect_addr(&address) {
                Ok(stream) if host::uid_of_peer(&stream) == Some(host::own_uid()) => {
                    self.follow(stream);
                    return Ok(());
                }
                // Another user has taken the name: slots cannot be shared with a stranger.
                Ok(_) => None,
                Err(error) => return Err(error),
            },
            Err(error) => return Err(error),
        };
        let settling = succeeds && listener.is_some();
        self.lead(listener, settling);
        Ok(())
    }

    fn lead(&self, listener: Option<UnixListener>, settling: bool) {
        let mut state = self.lock();
        state.forget_spare();
        let mut leader = Leader::new(state.flows_per_host, &state.shares, listener, settling);
        for (job, held) in &state.held {
            leader.slots.adopt(SELF, job, *held);
        }
        for (job, wanted) in &state.wanted {
            wanted.iter().for_each(|bytes| leader.slots.want(SELF, job, *bytes));
        }
        state.role = Role::Leader(leader);
        let grants = state.give_out();
        drop(state);
        grants.into_iter().for_each(|job| (self.on_grant)(job));
    }

    fn follow(&self, mut stream: UnixStream) {
        let mut state = self.lock();
        state.forget_spare();
        let held = state.held.iter().map(|(job, slots)| Message::Held { job: job.clone(), slots: *slots });
        let wanted = state.wanted.iter().flat_map(|(job, wanted)| {
            wanted.iter().map(move |bytes| Message::Want { job: job.clone(), bytes: *bytes, slots: 1 })
        });
        for message in held.chain(wanted) {
            let _ = send(&mut stream, &message);
        }
        state.told = state.wanted.iter().map(|(job, wanted)| (job.clone(), wanted.len())).collect();
        state.role = Role::Follower(stream);
    }

    /// Lives as long as the arbiter: leads or follows, and takes part in the next election when the arbiter is lost.
    fn run(self: Arc<Shared>) {
        enum Now {
            Accept(UnixListener),
            Read(UnixStream),
            Alone,
            Elect,
        }
        loop {
            let now = {
                let state = self.lock();
                if state.closing {
                    return;
                }
                match &state.role {
                    Role::Leader(Leader { listener: Some(listener), .. }) => listener.try_clone().map(Now::Accept),
                    Role::Leader(_) => Ok(Now::Alone),
                    Role::Follower(stream) => stream.try_clone().map(Now::Read),
                    Role::Electing => Ok(Now::Elect),
                }
            };
            match now {
                Ok(Now::Accept(listener)) => self.accept(&listener),
                Ok(Now::Read(stream)) => self.read_grants(stream),
                Ok(Now::Alone) => return,
                Ok(Now::Elect) => match self.elect(true) {
                    Ok(()) => self.settle_later(),
                    Err(_) => thread::sleep(ELECTION_PAUSE),
                },
                Err(_) => thread::sleep(ELECTION_PAUSE),
            }
        }
    }

    /// Begins to give out once the others had their time; the accepting thread hears them meanwhile.
    fn settle_later(self: &Arc<Shared>) {
        let own = self.clone();
        let settle = move || {
            thread::sleep(SETTLE);
            let grants = {
                let mut state = own.lock();
                if let Role::Leader(leader) = &mut state.role {
                    leader.settling = false;
                }
                state.give_out()
            };
            grants.into_iter().for_each(|job| (own.on_grant)(job));
        };
        if matches!(self.lock().role, Role::Leader(_)) {
            thread::spawn(settle);
        }
    }

    fn accept(self: &Arc<Shared>, listener: &UnixListener) {
        for client in SELF + 1.. {
            let accepted = listener.accept();
            if self.lock().closing {
                return;
            }
            let Ok((stream, _)) = accepted else {
                thread::sleep(ELECTION_PAUSE);
                continue;
            };
            if host::uid_of_peer(&stream) != Some(host::own_uid())
                || stream.set_write_timeout(Some(SLOW_CLIENT)).is_err()
            {
                continue;
            }
            let Ok(reader) = stream.try_clone() else { continue };
            if let Role::Leader(leader) = &mut self.lock().role {
                if leader.contended {
                    let _ = send(&mut &stream, &Message::Contended { contended: true });
                }
                leader.clients.insert(client, stream);
            }
            let own = self.clone();
            let name = "mission-slots".to_owned();
            let started =
                thread::Builder::new().name(name).stack_size(128 << 10).spawn(move || own.serve(client, reader));
            if started.is_err() {
                self.lose(client);
            }
        }
    }

    fn serve(&self, client: ClientId, stream: UnixStream) {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let Ok(message) = serde_json::from_str(&line) else { break };
            let grants = {
                let mut state = self.lock();
                let Role::Leader(leader) = &mut state.role else { return };
                leader.take(client, message);
                state.give_out()
            };
            grants.into_iter().for_each(|job| (self.on_grant)(job));
        }
        self.lose(client);
    }

    fn lose(&self, client: ClientId) {
        let grants = {
            let mut state = self.lock();
            let Role::Leader(leader) = &mut state.role else { return };
            leader.clients.remove(&client);
            leader.slots.drop_client(client);
            state.give_out()
        };
        grants.into_iter().for_each(|job| (self.on_grant)(job));
    }

    fn read_grants(&self, stream: UnixStream) {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            match serde_json::from_str(&line) {
                Ok(Message::Grant { job }) => {
                    self.lock().granted(&job);
                    (self.on_grant)(job);
                }
                Ok(Message::Contended { contended }) => self.lock().on_contention_changed(contended),
                _ => {}
            }
        }
        self.lock().role = Role::Electing;
    }
}

fn send(stream: &mut (impl Write + ?Sized), message: &Message) -> io::Result<()> {
    let mut line = serde_json::to_vec(message).expect("messages are plain data");
    line.push(b'\n');
    stream.write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::cluster_name;
    use std::sync::mpsc::{Receiver, channel};

    fn arbiter(cluster: &str) -> (Arbiter, Receiver<JobId>) {
        let (sender, receiver) = channel();
        let sender = Mutex::new(sender);
        let on_grant = move |job| drop(sender.lock().unwrap().send(job));
        (Arbiter::new(cluster, FlowsPerHost::Fixed(2), Box::new(on_grant)).unwrap(), receiver)
    }

    fn granted(receiver: &Receiver<JobId>) -> bool {
        receiver.recv_timeout(Duration::from_secs(5)).is_ok()
    }

    fn nothing(receiver: &Receiver<JobId>) -> bool {
        receiver.recv_timeout(Duration::from_millis(50)).is_err()
    }

    #[test]
    fn processes_of_a_host_share_its_slots() {
        let cluster = cluster_name(&crate::auth::random::<16>());
        let (first, _grants) = arbiter(&cluster);
        let (second, grants) = arbiter(&cluster);
        assert!(first.gives_out() && !second.gives_out());
        let job = JobId::from("job");
        assert_eq!(first.want(&job, 1, 1).len() + first.want(&job, 1, 1).len(), 2);
        assert!(second.want(&job, 1, 1).is_empty());
        assert!(nothing(&grants));
        first.give_back(&job, 1, 1);
        assert!(granted(&grants));
    }

    #[test]
    fn a_slot_that_nobody_waits_for_is_used_again_and_comes_back_when_somebody_does() {
        let cluster = cluster_name(&crate::auth::random::<16>());
        let (first, first_grants) = arbiter(&cluster);
        let (second, grants) = arbiter(&cluster);
        let job = JobId::from("job");
        assert!(second.want(&job, 1, 1).is_empty() && second.want(&job, 1, 1).is_empty());
        assert!(granted(&grants) && granted(&grants));
        second.give_back(&job, 1, 1);
        assert_eq!(second.want(&job, 1, 1).len(), 1, "without asking");
        second.give_back(&job, 1, 1);
        // Both slots are the second's, one of them spare: it comes back, the other does when its chunk ends.
        assert!(first.want(&job, 1, 1).is_empty() && first.want(&job, 1, 1).is_empty());
        assert!(granted(&first_grants) && nothing(&first_grants));
        second.give_back(&job, 1, 1);
        assert!(granted(&first_grants));
    }

    #[test]
    fn a_lost_connection_returns_its_slots_and_a_lost_arbiter_is_replaced() {
        let cluster = cluster_name(&crate::auth::random::<16>());
        let (first, _) = arbiter(&cluster);
        let (second, second_grants) = arbiter(&cluster);
        let (third, third_grants) = arbiter(&cluster);
        let job = JobId::from("job");
        second.want(&job, 1, 1);
        second.want(&job, 1, 1);
        assert!(granted(&second_grants) && granted(&second_grants));
        third.want(&job, 1, 1);
        assert!(nothing(&third_grants));
        // The arbiter goes; its successor knows that the second still holds both slots.
        drop(first);
        assert!(nothing(&third_grants));
        drop(second);
        assert!(granted(&third_grants));
    }
}
