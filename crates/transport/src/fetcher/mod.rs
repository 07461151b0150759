//! Fetches parts of objects: from this host's memory, from their owners, and in broadcasts from other receivers.
//!
//! All decisions are in [`mission_core::host::process`] and [`mission_core::swarm`]; this module has the clock, the
//! threads and the connections. [`home`] finds parts that need not be moved, [`broadcast`] asks for pieces of what many
//! receive, and [`runs`] moves ranges. [`plans`] chooses the legs, and [`locations`] knows where objects lie. Commands
//! of the Mission Controller come to [`orders`]; its reports come from [`records`]. [`stream`] reads streams that are
//! still being written.

mod broadcast;
mod caller;
mod home;
mod locations;
mod orders;
mod plans;
mod records;
mod runs;
pub mod stream;

use crate::arbiter::{Arbiter, Said};
use crate::auth::Token;
use crate::carrier::Context;
use crate::carrier::shm::Borrower;
use crate::clock::Clock;
use crate::connections::Connections;
use crate::object::ObjectId;
use crate::parts::{self, FetchRequest, Fetched, Home, Part};
use crate::segment::{Pool, Segment};
use crate::store::Store;
use crate::streams::Streams;
use caller::Caller;
use home::{Found, shared_memory};
use mission_core::cluster::Senders;
use mission_core::flight::Environment;
use mission_core::host::fetches::{FetchError, FetchId, SourceId, Tally};
use mission_core::host::process::{Command, Event, Process};
use mission_core::host::{GroupId, Ticket};
use mission_core::report::TransferReport;
use mission_core::shares::FlowsPerHost;
use mission_core::types::{Demands, JobId, TransferId, Transport};
use mission_core::units::Time;
use plans::Planned;
use records::Bytes;
use runs::{Assigned, Far, Running};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

pub struct Fetcher {
    shared: Arc<Shared>,
}

struct Shared {
    /// For the threads that it starts.
    own: Weak<Shared>,
    state: Mutex<State>,
    /// Helpers wait here for runs, the ticker for its next tick.
    work: Condvar,
    tick: Condvar,
    /// Some fetch has ended.
    ended: Condvar,
    arbiter: OnceLock<Arbiter>,
    borrower: Borrower,
    context: Context,
    store: Arc<Store>,
    streams: Arc<Streams>,
    pool: Arc<Pool>,
    own_address: SocketAddr,
    clock: Clock,
}

struct State {
    process: Process,
    fetches: HashMap<FetchId, Active>,
    next_fetch: FetchId,
    /// Ranges under way, by their tickets.
    running: HashMap<Ticket, Running>,
    /// Runs for helpers.
    queue: VecDeque<Assigned>,
    /// Kept between events.
    commands: Vec<Command>,
    helpers: usize,
    idle_helpers: usize,
    wake: Option<Time>,
    sources: Vec<SocketAddr>,
    source_numbers: HashMap<SocketAddr, SourceId>,
    connections: Connections,
    flows_per_host: FlowsPerHost,
    plans: BTreeMap<JobId, Result<Arc<Planned>, String>>,
    /// What this host can do, and what those can do that it fetches from.
    own: Arc<Environment>,
    senders: Arc<Senders>,
    groups: HashMap<GroupId, JobId>,
    /// What each job's transfers weigh together.
    weights: BTreeMap<JobId, f64>,
    transfers: BTreeMap<TransferId, TransferReport>,
    /// Transfers that may have changed since the last report, and those that it called active.
    stirred: BTreeSet<TransferId>,
    said_moved: BTreeSet<TransferId>,
    /// Transfers that were reported to move no more: since when, and the end that their records had. The first comes
    /// first.
    quiet: VecDeque<(Instant, f64, TransferId)>,
    /// Transfers whose parts many processes receive.
    broadcasts: BTreeSet<TransferId>,
    /// Objects whose owners are gone, and why; names of objects are not reused.
    lost: BTreeMap<ObjectId, String>,
    /// The same, oldest first.
    lost_first: VecDeque<ObjectId>,
    /// Owners of objects that no longer lie where their references say, best first.
    locations: BTreeMap<ObjectId, Vec<SocketAddr>>,
    changed: bool,
    /// When the last report listed what fetches wait for.
    waits_said: Option<Instant>,
    closing: bool,
}

/// A fetch that somebody waits for.
struct Active {
    transfer: TransferId,
    planned: Arc<Planned>,
    far: Vec<Far>,
    /// Runs for the caller's own thread, and whether it has none now.
    mine: VecDeque<Assigned>,
    caller_waits: bool,
    done: Arc<Condvar>,
    result: Option<(Result<(), FetchError>, Tally)>,
    /// By source: bytes received, and how long connections were busy with them.
    brought: BTreeMap<SourceId, (u64, Duration)>,
}

/// How long closing waits for fetches to end: each of their threads sees it at the next byte, or after a stall.
const CLOSE_WITHIN: Duration = Duration::from_secs(15);
/// More bytes than any process has addresses for.
const ADDRESSABLE: usize = 1 << 46;
const CLOSES: &str = "this worker is closing";
/// How often a waiting caller checks whether it was interrupted.
const INTERRUPT_EVERY: Duration = Duration::from_millis(100);

impl Fetcher {
    /// `slots`: name and secret of those who share this host's slots.
    ///
    /// # Errors
    /// No thread can be started.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        context: Context,
        environment: Environment,
        store: Arc<Store>,
        streams: Arc<Streams>,
        pool: Arc<Pool>,
        own_address: SocketAddr,
        cluster: &str,
        slots: (&str, Token),
        flows_per_host: FlowsPerHost,
    ) -> std::io::Result<Fetcher> {
        let state = State {
            process: Process::default(),
            fetches: HashMap::new(),
            next_fetch: 1,
            running: HashMap::new(),
            queue: VecDeque::new(),
            commands: Vec::new(),
            helpers: 0,
            idle_helpers: 0,
            wake: None,
            sources: Vec::new(),
            source_numbers: HashMap::new(),
            connections: Connections::default(),
            flows_per_host,
            plans: BTreeMap::new(),
            own: Arc::new(environment),
            senders: Arc::default(),
            groups: HashMap::new(),
            weights: BTreeMap::new(),
            transfers: BTreeMap::new(),
            stirred: BTreeSet::new(),
            said_moved: BTreeSet::new(),
            quiet: VecDeque::new(),
            broadcasts: BTreeSet::new(),
            lost: BTreeMap::new(),
            lost_first: VecDeque::new(),
            locations: BTreeMap::new(),
            changed: false,
            waits_said: None,
            closing: false,
        };
        let borrower = Borrower::new(cluster, context.token.clone())?;
        let shared = Arc::new_cyclic(|weak| Shared {
            own: weak.clone(),
            state: Mutex::new(state),
            work: Condvar::new(),
            tick: Condvar::new(),
            ended: Condvar::new(),
            arbiter: OnceLock::new(),
            borrower,
            context,
            store,
            streams,
            pool,
            own_address,
            clock: Clock::start(),
        });
        let weak = Arc::downgrade(&shared);
        let wake = move || {
            if let Some(shared) = weak.upgrade() {
                shared.hear_arbiter();
            }
        };
        let arbiter = Arbiter::new(slots.0, slots.1, flows_per_host, Box::new(wake))?;
        shared.arbiter.set(arbiter).ok().expect("set once");
        shared.hear_arbiter();
        let ticker = shared.clone();
        thread::Builder::new().name("mission-tick".into()).stack_size(256 << 10).spawn(move || ticker.run_ticks())?;
        Ok(Fetcher { shared })
    }

    /// Fetches all requested parts; blocks until they are there.
    ///
    /// Calls `interrupted` every 100 ms while this thread waits; no lock is held meanwhile.
    ///
    /// # Errors
    /// Why the fetch failed. None of its memory is returned to the caller then.
    pub fn fetch(&self, request: FetchRequest, interrupted: impl FnMut() -> bool) -> Result<Fetched, FetchError> {
        self.fetch_for(request, None, interrupted)
    }

    /// As [`Fetcher::fetch`], into memory that other processes of the host can map for `sharers`, a job.
    ///
    /// # Errors
    /// As there.
    pub fn fetch_for(
        &self,
        mut request: FetchRequest,
        sharers: Option<GroupId>,
        mut interrupted: impl FnMut() -> bool,
    ) -> Result<Fetched, FetchError> {
        let shared = &self.shared;
        shared.look_up(&mut request.parts);
        let planned = shared.plan(&request.transfer.job, &request.demands)?;
        let caller = Caller::new(shared, &mut interrupted);
        let (mut homes, receiving) = shared.begin(&request, &planned.plan, &caller)?;
        let elsewhere = |number: usize| matches!(homes[number], Found::Here(_)) || receiving.contains_key(&number);
        let (places, len) = parts::places(&request, elsewhere);
        let segment = shared.take(len, sharers)?;
        let mut far = Vec::new();
        let mut bytes = Bytes::default();
        let mut spooled = None;
        for (number, (wanted, &(start, len))) in request.parts.iter().zip(&places).enumerate() {
            // SAFETY: nobody else knows of this segment yet, and the places in it do not overlap.
            let into = unsafe { std::slice::from_raw_parts_mut(segment.as_ptr().add(start), len) };
            let is_here = match &homes[number] {
                Found::Here(home) => {
                    if request.packed {
                        into.copy_from_slice(home.bytes());
                    }
                    true
                }
                Found::Spooled(part) => {
                    let copied = shared.copy_spooled(&request, &planned.plan, part, into, &caller)?;
                    if copied {
                        spooled.get_or_insert_with(|| (0, part.negotiated())).0 += wanted.len;
                    }
                    homes[number] = Found::Elsewhere;
                    copied
                }
                Found::Elsewhere if shared.owns(wanted) => {
                    shared.copy_own(wanted, into)?;
                    true
                }
                // No source is asked for empty parts.
                Found::Elsewhere => wanted.len == 0 && !receiving.contains_key(&number),
            };
            if is_here {
                bytes.count_here(wanted, shared);
                continue;
            }
            bytes.far += wanted.len;
            if !receiving.contains_key(&number) {
                far.push(Far::of(wanted, 0, wanted.len, &segment, start));
            }
        }
        shared.asks(&request.transfer, &bytes);
        if let (Some((bytes, negotiated)), Some(leg)) = (spooled, shared_memory(&planned.plan)) {
            shared.lock().record(&request.transfer).transport.carried(leg, bytes, negotiated);
        }
        let mut interrupted = || caller.gives_up();
        let mut tally = Tally::default();
        let bring = || {
            for (number, receiving) in receiving {
                let wanted = &request.parts[number];
                // Each part has its own segment: a kept part of a broadcast must not keep other memory.
                let (own, start) = if request.packed {
                    (segment.clone(), places[number].0)
                } else {
                    (shared.take(wanted.len as usize, None)?, 0)
                };
                receiving.copy.lies_in(own.clone(), start);
                let (ended, took) =
                    shared.receive_broadcast(&request.transfer, &planned, wanted, &receiving, &own, &mut interrupted);
                tally.add(&took);
                ended?;
                receiving.keep();
                let home = Part { home: Home::Own(own), start, len: wanted.len as usize };
                if !request.packed {
                    homes[number] = Found::Here(home);
                }
            }
            let (ended, took) = shared.carry(&request.transfer, &planned, far, &mut interrupted);
            tally.add(&took);
            ended
        };
        if let Err(error) = bring() {
            shared.gives_up(&request.transfer, &bytes, &tally);
            return Err(error);
        }
        let own = |(start, len)| Part { home: Home::Own(segment.clone()), start, len };
        let all = request.packed.then(|| own((0, segment.len())));
        let parts = homes.into_iter().zip(places).map(|(home, place)| match home {
            Found::Here(home) if !request.packed => home,
            _ => own(place),
        });
        Ok(Fetched { parts: parts.collect(), all, tally })
    }

    /// As [`Fetcher::fetch`]; each part comes into memory of its own, which the caller may write to and accounts for.
    ///
    /// # Errors
    /// As there.
    pub fn receive(
        &self,
        mut request: FetchRequest,
        mut interrupted: impl FnMut() -> bool,
    ) -> Result<Vec<Arc<Segment>>, FetchError> {
        let shared = &self.shared;
        shared.look_up(&mut request.parts);
        let planned = shared.plan(&request.transfer.job, &request.demands)?;
        let caller = Caller::new(shared, &mut interrupted);
        let homes = shared.copied_at_home(&request, &planned.plan, &caller)?;
        let mut segments = Vec::with_capacity(homes.len());
        let mut far = Vec::new();
        let mut bytes = Bytes::default();
        for (wanted, home) in request.parts.iter().zip(homes) {
            segments.push(match home {
                Some(segment) => {
                    bytes.count_here(wanted, shared);
                    Arc::new(segment)
                }
                None => {
                    let taken = shared.pool.take_for_result(addressable(wanted.len)?);
                    let segment = Arc::new(taken.map_err(|error| no_memory(wanted.len, &error))?);
                    bytes.far += wanted.len;
                    far.push(Far::of(wanted, 0, wanted.len, &segment, 0));
                    segment
                }
            });
        }
        shared.asks(&request.transfer, &bytes);
        let (ended, tally) = shared.carry(&request.transfer, &planned, far, &mut || caller.gives_up());
        if let Err(error) = ended {
            shared.gives_up(&request.transfer, &bytes, &tally);
            return Err(error);
        }
        Ok(segments)
    }

    /// The job, if others of this host may want to map what it puts. Never where it demands encryption: its plan has no
    /// leg over shared memory then.
    pub fn sharers(&self, job: &JobId, demands: &Demands) -> Option<GroupId> {
        let planned = self.shared.plan(job, demands);
        let planned = planned.is_ok_and(|planned| planned.plan.legs.iter().any(|leg| leg.transport == Transport::Shm));
        (planned && self.has_neighbours()).then(|| self.shared.context.numbers.group_of(job))
    }

    /// Data connections: under way, and kept.
    pub fn connections(&self) -> (u32, usize) {
        self.shared.lock().connections.count()
    }

    /// Whether there are other processes of the cluster on this host.
    pub fn has_neighbours(&self) -> bool {
        self.shared.arbiter().has_neighbours()
    }

    pub fn gives_out_slots(&self) -> bool {
        self.shared.arbiter().gives_out()
    }

    /// Why this process does not share the slots of its host, if it does not.
    pub fn arbitrates_alone(&self) -> Option<String> {
        self.shared.arbiter().alone()
    }

    /// Abandons every fetch, cuts what is under way, and lets none begin.
    pub fn abandon(&self) {
        let mut state = self.shared.lock();
        state.closing = true;
        self.shared.abandon_all(&mut state);
    }

    /// As [`Fetcher::abandon`]; waits until all have ended, but not for ever.
    pub fn close(&self) {
        self.abandon();
        let shared = &self.shared;
        let mut state = shared.lock();
        let end = Instant::now() + CLOSE_WITHIN;
        while !state.fetches.is_empty() && Instant::now() < end {
            state = shared.ended.wait_timeout(state, INTERRUPT_EVERY).expect("no panic while held").0;
        }
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        let closed = state.connections.close_all();
        self.shared.abandon_all(&mut state);
        self.shared.work.notify_all();
        self.shared.tick.notify_all();
        drop(state);
        drop(closed);
    }
}

impl State {
    fn source(&mut self, address: SocketAddr) -> SourceId {
        if let Some(&number) = self.source_numbers.get(&address) {
            return number;
        }
        let number = self.sources.len() as SourceId;
        self.sources.push(address);
        self.source_numbers.insert(address, number);
        number
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    fn arbiter(&self) -> &Arbiter {
        self.arbiter.get().expect("set when the fetcher was made")
    }

    fn time(&self) -> Time {
        self.clock.now()
    }

    /// Memory for what is fetched.
    fn take(&self, len: usize, sharers: Option<GroupId>) -> Result<Arc<Segment>, FetchError> {
        let len = addressable(len as u64)?;
        self.store.make_room(len as u64);
        let taken = self.pool.take(len, sharers);
        taken.map(Arc::new).map_err(|error| no_memory(len as u64, &error))
    }

    fn abandon_all(&self, state: &mut State) {
        let waiting: Vec<_> = state.fetches.keys().copied().collect();
        for fetch in waiting {
            self.handle(state, Event::Abandon { fetch, error: FetchError::Cancelled(CLOSES.into()) });
        }
    }

    fn hear_arbiter(&self) {
        let mut state = self.lock();
        self.drain_arbiter(&mut state);
    }

    /// Passes to the process's machine what happened to its slots. Under the lock, so that events arrive in order.
    fn drain_arbiter(&self, state: &mut State) {
        // Events from before the arbiter is set are not lost: they are taken once it is.
        while let Some(said) = self.arbiter.get().and_then(Arbiter::next) {
            let event = match said {
                Said::Message(message) => Event::Arbiter(message),
                Said::Joined { remote } => Event::Joined { remote },
                Said::Lost => Event::Lost,
            };
            self.step(state, event);
        }
    }
}

/// # Errors
/// No process has so many addresses.
fn addressable(len: u64) -> Result<usize, FetchError> {
    let found = usize::try_from(len).ok().filter(|len| *len <= ADDRESSABLE);
    found.ok_or_else(|| FetchError::Cancelled(format!("no memory for {len} bytes")))
}

fn no_memory(len: u64, error: &std::io::Error) -> FetchError {
    FetchError::Cancelled(format!("no memory for {len} bytes: {error}"))
}
