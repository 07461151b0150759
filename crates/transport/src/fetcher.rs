//! Brings parts of objects: runs what the Throttle Controller decides, on threads and connections.
//!
//! The thread that calls [`Fetcher::fetch`] moves bytes itself; helper threads join it while there are more runs than
//! callers. All decisions are in [`mission_core::throttle`]; this file keeps its clock, its threads and its connections.

use crate::arbiter::Arbiter;
use crate::carrier::shm::{Borrowed, Borrower, NotLent};
use crate::carrier::{self, Ask, Broken, Connection, Context};
use crate::connections::Connections;
use crate::facts::TransportFacts;
use crate::object::ObjectId;
use crate::parts::{FetchRequest, Fetched, Home, Part, Wanted, places};
use crate::segment::{Pool, Segment};
use crate::store::{Object, Store};
use mission_core::defaults::{FLOWS_PER_HOST, LINGER};
use mission_core::flight::{self, Environment, FlightPlan, Leg, Reach};
use mission_core::mission;
use mission_core::nouns::{Demands, JobId, TransferId, Transport};
use mission_core::throttle::{
    Command, Event, Fault, FetchError, FetchId, Outcome, Piece, Run, SourceId, Tally, ThrottleController,
};
use mission_core::units::Time;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

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
    arbiter: OnceLock<Arbiter>,
    borrower: Borrower,
    context: Context,
    environment: Environment,
    store: Arc<Store>,
    pool: Arc<Pool>,
    own_address: SocketAddr,
    started: Instant,
}

struct State {
    throttle: ThrottleController,
    fetches: HashMap<FetchId, Active>,
    next_fetch: FetchId,
    /// Runs for helpers.
    queue: VecDeque<Run>,
    helpers: usize,
    idle_helpers: usize,
    wake: Option<Time>,
    sources: Vec<SocketAddr>,
    source_numbers: HashMap<SocketAddr, SourceId>,
    connections: Connections,
    flows_per_host: u32,
    plans: BTreeMap<JobId, Result<Arc<FlightPlan>, String>>,
    transfers: BTreeMap<TransferId, TransferRecord>,
    changed: bool,
    closing: bool,
}

/// A fetch that somebody waits for.
struct Active {
    transfer: TransferId,
    plan: Arc<FlightPlan>,
    parts: Vec<Wanted>,
    /// Where the bytes of each piece go.
    places: Vec<(usize, usize)>,
    segment: Arc<Segment>,
    /// Runs for the caller's own thread, and whether it has none now.
    mine: VecDeque<Run>,
    caller_waits: bool,
    done: Arc<Condvar>,
    result: Option<(Result<(), FetchError>, Tally)>,
}

/// Where a run's bytes come from, and where they go.
struct Place {
    ask: Ask,
    segment: Arc<Segment>,
    start: usize,
}

impl Place {
    fn of(state: &State, run: &Run) -> Place {
        let active = state.fetches.get(&run.fetch).expect("a fetch outlives its runs");
        let wanted = &active.parts[run.piece];
        Place {
            ask: Ask { object: wanted.object, part: wanted.part, start: run.start },
            segment: active.segment.clone(),
            start: active.places[run.piece].0 + run.start as usize,
        }
    }
}

/// What one process has received in a transfer; totals since its start.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TransferRecord {
    pub job: String,
    pub from: String,
    pub to: String,
    pub asked_bytes: u64,
    pub served_bytes: u64,
    /// Of those, bytes that never left this process.
    pub own_bytes: u64,
    pub fetches: u64,
    /// Something was under way since the last report.
    pub moved: bool,
    pub flows: u32,
    pub flows_peak: u32,
    pub refetches: u64,
    pub resumed: u64,
    pub busy: u64,
    /// Seconds since the epoch.
    pub started: f64,
    pub ended: f64,
    pub transport: TransportFacts,
}

/// Longest life of a helper without work.
const HELPER_IDLE: Duration = Duration::from_secs(5);
/// How often a waiting caller looks whether it was interrupted.
const INTERRUPT_EVERY: Duration = Duration::from_millis(100);

impl Fetcher {
    pub fn new(
        context: Context,
        environment: Environment,
        store: Arc<Store>,
        pool: Arc<Pool>,
        own_address: SocketAddr,
        cluster: &str,
        flows_per_host: u32,
    ) -> std::io::Result<Fetcher> {
        let state = State {
            throttle: ThrottleController::default(),
            fetches: HashMap::new(),
            next_fetch: 1,
            queue: VecDeque::new(),
            helpers: 0,
            idle_helpers: 0,
            wake: None,
            sources: Vec::new(),
            source_numbers: HashMap::new(),
            connections: Connections::default(),
            flows_per_host,
            plans: BTreeMap::new(),
            transfers: BTreeMap::new(),
            changed: false,
            closing: false,
        };
        let shared = Arc::new_cyclic(|own| Shared {
            own: own.clone(),
            state: Mutex::new(state),
            work: Condvar::new(),
            tick: Condvar::new(),
            arbiter: OnceLock::new(),
            borrower: Borrower::new(cluster),
            context,
            environment,
            store,
            pool,
            own_address,
            started: Instant::now(),
        });
        let weak = Arc::downgrade(&shared);
        let on_grant = move |job| {
            if let Some(shared) = weak.upgrade() {
                shared.event(Event::Granted { job });
            }
        };
        let arbiter = Arbiter::new(cluster, flows_per_host, Box::new(on_grant))?;
        shared.arbiter.set(arbiter).ok().expect("set once");
        let ticker = shared.clone();
        thread::Builder::new().name("mission-tick".into()).stack_size(256 << 10).spawn(move || ticker.run_ticks())?;
        Ok(Fetcher { shared })
    }

    /// Brings all parts that are asked for; blocks until they are there.
    ///
    /// `interrupted` is asked every 100 ms while this thread waits.
    ///
    /// # Errors
    /// What stands in the way, by cause; no part of the memory is given away then.
    pub fn fetch(&self, request: FetchRequest, mut interrupted: impl FnMut() -> bool) -> Result<Fetched, FetchError> {
        let shared = &self.shared;
        let plan = shared.lock().plan(&request.transfer.job, &request.demands, &shared.environment)?;
        let homes = shared.at_home(&request, &plan)?;
        let (places, len) = places(&request, &homes);
        let segment = shared
            .pool
            .take(len, false)
            .map_err(|error| FetchError::Cancelled(format!("no memory for {len} bytes: {error}")))?;
        let segment = Arc::new(segment);
        let (mut far, mut far_places) = (Vec::new(), Vec::new());
        let (mut here_bytes, mut own_bytes) = (0, 0);
        for ((wanted, home), &place) in request.parts.iter().zip(&homes).zip(&places) {
            let (start, len) = place;
            // SAFETY: nobody else knows of this segment yet, and the places in it do not overlap.
            let into = unsafe { std::slice::from_raw_parts_mut(segment.as_ptr().add(start), len) };
            match home {
                Some(home) if request.packed => into.copy_from_slice(home.bytes()),
                Some(_) => {}
                None if shared.owns(wanted) => shared.copy_own(wanted, into)?,
                None => {
                    far.push(wanted.clone());
                    far_places.push(place);
                    continue;
                }
            }
            here_bytes += wanted.len;
            own_bytes += if shared.owns(wanted) { wanted.len } else { 0 };
        }
        let mut state = shared.lock();
        let id = state.next_fetch;
        state.next_fetch += 1;
        let bytes: u64 = far.iter().map(|wanted| wanted.len).sum();
        let record = state.record(&request.transfer);
        record.asked_bytes += bytes + here_bytes;
        record.served_bytes += here_bytes;
        record.own_bytes += own_bytes;
        record.fetches += 1;
        record.ended = now();
        let pieces: Vec<Piece> = far
            .iter()
            .map(|wanted| Piece {
                len: wanted.len,
                sources: wanted.addresses.iter().map(|address| state.source(*address)).collect(),
            })
            .collect();
        let done = Arc::new(Condvar::new());
        let active = Active {
            transfer: request.transfer.clone(),
            plan: plan.clone(),
            parts: far,
            places: far_places,
            segment: segment.clone(),
            mine: VecDeque::new(),
            caller_waits: true,
            done: done.clone(),
            result: None,
        };
        state.fetches.insert(id, active);
        let job = request.transfer.job.clone();
        let seed = u64::from_ne_bytes(crate::auth::random());
        shared.handle(&mut state, Event::Asked { fetch: id, job, pieces, chunk_bytes: plan.chunk_bytes, seed });
        loop {
            let own = state.fetches.get_mut(&id).expect("it stays until its caller takes it out");
            if let Some((result, tally)) = own.result.take() {
                let active = state.fetches.remove(&id).expect("it was just there");
                let missing = bytes - tally.bytes.min(bytes);
                let record = state.record(&active.transfer);
                record.asked_bytes -= missing;
                record.refetches += u64::from(tally.refetches);
                record.resumed += u64::from(tally.resumed);
                record.busy += u64::from(tally.busy);
                drop(state);
                result?;
                let own = |(start, len)| Part { home: Home::Own(segment.clone()), start, len };
                let all = request.packed.then(|| own((0, segment.len())));
                let parts = homes.into_iter().zip(places).map(|(home, place)| match home {
                    Some(home) if !request.packed => home,
                    _ => own(place),
                });
                return Ok(Fetched { parts: parts.collect(), all, tally });
            }
            let run = own.mine.pop_front().or_else(|| {
                let at = state.queue.iter().position(|run| run.fetch == id)?;
                state.queue.remove(at)
            });
            let own = state.fetches.get_mut(&id).expect("as above");
            own.caller_waits = run.is_none();
            state = match run {
                Some(run) => shared.execute(state, run),
                None => {
                    let (state, wait) = done.wait_timeout(state, INTERRUPT_EVERY).expect("no panic while held");
                    let mut state = state;
                    if wait.timed_out() && interrupted() {
                        let error = FetchError::Cancelled("interrupted".into());
                        shared.handle(&mut state, Event::Abandon { fetch: id, error });
                    }
                    state
                }
            };
        }
    }

    /// Whether others of this host may want to map what the job puts.
    pub fn shares_memory(&self, job: &JobId, demands: &Demands) -> bool {
        let plan = self.shared.lock().plan(job, demands, &self.shared.environment);
        let planned = plan.is_ok_and(|plan| plan.legs.iter().any(|leg| leg.transport == Transport::Shm));
        planned && self.has_neighbours()
    }

    /// Ends every fetch that still waits for an object which is known to be lost.
    pub fn lost(&self, objects: &[ObjectId], why: &str) {
        let mut state = self.shared.lock();
        let hit = |active: &Active| active.parts.iter().any(|wanted| objects.contains(&wanted.object));
        let hit: Vec<_> = state.fetches.iter().filter(|(_, active)| hit(active)).map(|(id, _)| *id).collect();
        for fetch in hit {
            let error = FetchError::Lost(why.to_owned());
            self.shared.handle(&mut state, Event::Abandon { fetch, error });
        }
    }

    /// Does what the Mission Controller says.
    pub fn command(&self, command: mission::Command) {
        let shared = &self.shared;
        let mut state = shared.lock();
        match command {
            mission::Command::Shares { flows_per_host, shares } => {
                state.flows_per_host = flows_per_host;
                let bind = mission_core::shares::caps_bind(flows_per_host, shares.len());
                let caps = shares.iter().filter(|_| bind).map(|share| (share.job.clone(), share.flows));
                let closed = state.connections.set_caps(caps.collect());
                let grants = shared.arbiter().set_shares(flows_per_host, &shares);
                for job in grants {
                    shared.handle(&mut state, Event::Granted { job });
                }
                drop(state);
                drop(closed);
            }
            mission::Command::Plan { job, plan } => {
                state.plans.insert(job, Ok(Arc::new(plan)));
            }
            mission::Command::Refuse { job, reason } => {
                state.plans.insert(job, Err(reason));
            }
            // For whoever runs the policy, beside the scheduler.
            mission::Command::Weigh { .. } => {}
        }
    }

    /// Forgets what belongs to a job that is over.
    pub fn forget_job(&self, job: &JobId) {
        let mut state = self.shared.lock();
        state.plans.remove(job);
        state.transfers.retain(|id, _| id.job != *job);
        let closed = state.connections.forget_job(job);
        drop(state);
        drop(closed);
    }

    /// The transfers of this process if anything changed since the last call.
    pub fn report(&self) -> Option<Vec<TransferRecord>> {
        let mut state = self.shared.lock();
        if !std::mem::take(&mut state.changed) {
            return None;
        }
        let records = state.transfers.values().cloned().collect();
        // Once more next time, to say that nothing moves any more.
        state.changed = state.transfers.values().any(|record| record.moved);
        state.transfers.values_mut().for_each(|record| record.moved = record.flows > 0);
        Some(records)
    }

    pub fn transfers(&self) -> Vec<TransferRecord> {
        self.shared.lock().transfers.values().cloned().collect()
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
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        drop(state.connections.close_all());
        let waiting: Vec<_> = state.fetches.keys().copied().collect();
        for fetch in waiting {
            let error = FetchError::Cancelled("this worker closes".into());
            self.shared.handle(&mut state, Event::Abandon { fetch, error });
        }
        self.shared.work.notify_all();
        self.shared.tick.notify_all();
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

    /// The plan that the Mission Controller sent; where it has sent none yet, its choice is made here, by the same code.
    fn plan(
        &mut self,
        job: &JobId,
        demands: &Demands,
        environment: &Environment,
    ) -> Result<Arc<FlightPlan>, FetchError> {
        let plan = self.plans.entry(job.clone()).or_insert_with(|| flight::choose(demands, environment).map(Arc::new));
        plan.clone().map_err(FetchError::Denied)
    }

    fn record(&mut self, transfer: &TransferId) -> &mut TransferRecord {
        self.changed = true;
        let record = self.transfers.entry(transfer.clone()).or_insert_with(|| TransferRecord {
            job: transfer.job.to_string(),
            from: transfer.from.to_string(),
            to: transfer.to.to_string(),
            started: now(),
            ended: now(),
            ..TransferRecord::default()
        });
        record.moved = true;
        record
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
        Time(self.started.elapsed().as_nanos() as u64)
    }

    fn event(&self, event: Event) {
        let mut state = self.lock();
        self.handle(&mut state, event);
    }

    /// Lets the Throttle Controller decide, and carries its commands out as far as they block nobody.
    fn handle(&self, state: &mut State, event: Event) {
        let mut commands: VecDeque<Command> = state.throttle.handle(self.time(), event).into();
        while let Some(command) = commands.pop_front() {
            let grants = match command {
                Command::Want { job, bytes, slots } => self.arbiter().want(&job, bytes, slots),
                Command::Withdraw { job, slots } => self.arbiter().withdraw(&job, slots),
                Command::GiveBack { job, granted, moved } => self.arbiter().give_back(&job, granted, moved),
                Command::Run(run) => {
                    self.assign(state, run);
                    continue;
                }
                Command::Finished { fetch, result, tally } => {
                    if let Some(active) = state.fetches.get_mut(&fetch) {
                        active.result = Some((result, tally));
                        active.done.notify_one();
                    }
                    continue;
                }
                Command::WakeAt(at) => {
                    if state.wake.is_none_or(|wake| at < wake) {
                        state.wake = Some(at);
                        self.tick.notify_one();
                    }
                    continue;
                }
            };
            for job in grants {
                commands.extend(state.throttle.handle(self.time(), Event::Granted { job }));
            }
        }
    }

    /// The caller's own thread if it waits, else a helper; a new one if none is idle.
    fn assign(&self, state: &mut State, run: Run) {
        let transfer = state.fetches.get(&run.fetch).map(|active| active.transfer.clone());
        if let Some(transfer) = transfer {
            let record = state.record(&transfer);
            record.flows += 1;
            record.flows_peak = record.flows_peak.max(record.flows);
        }
        if let Some(active) = state.fetches.get_mut(&run.fetch)
            && active.caller_waits
            && active.mine.is_empty()
        {
            active.mine.push_back(run);
            active.done.notify_one();
            return;
        }
        state.queue.push_back(run);
        if state.idle_helpers >= state.queue.len() {
            self.work.notify_one();
        } else if state.helpers < state.flows_per_host.max(FLOWS_PER_HOST) as usize {
            state.helpers += 1;
            let own = self.own.upgrade().expect("called through an Arc");
            let helper = thread::Builder::new().name("mission-fetch".into()).stack_size(512 << 10);
            if helper.spawn(move || own.help()).is_err() {
                // The caller, or another helper, does it when it is free.
                state.helpers -= 1;
            }
        }
    }

    /// Carries a run in its slot, and those that follow it there; the lock is free while bytes move.
    fn execute<'a>(&'a self, mut state: MutexGuard<'a, State>, run: Run) -> MutexGuard<'a, State> {
        let active = state.fetches.get(&run.fetch).expect("a fetch outlives its runs");
        // The newest plan, so that a transport can be replaced at a chunk boundary.
        let plan = match state.plans.get(&run.job) {
            Some(Ok(plan)) => plan.clone(),
            _ => active.plan.clone(),
        };
        let carried = |leg: &&Leg| leg.reach == Reach::Anywhere && carrier::carrier(leg.transport).is_some();
        let Some(leg) = plan.legs.iter().find(carried).cloned() else {
            let fault = Fault::Denied("this process carries none of the planned transports".into());
            self.ended(&mut state, run, broken(0, fault), None, true);
            return state;
        };
        let (job, source) = (run.job.clone(), run.source);
        let address = state.sources[source as usize];
        let (mut connection, closed) = state.connections.begin(&job, source, &leg);
        if !closed.is_empty() {
            drop(state);
            drop(closed);
            state = self.lock();
        }
        let mut kept = connection.is_some();
        let mut current = Some((run, false));
        while let Some((run, asked)) = current.take() {
            let place = Place::of(&state, &run);
            drop(state);
            let mut next = None;
            let outcome = loop {
                let outcome = match self.connected(&mut connection, address, &leg) {
                    Ok(connection) => self.bring(connection, &run, asked, &place, &plan, &mut next),
                    Err(fault) => broken(0, fault),
                };
                // The server has closed what it found idle: that is no fault of the range.
                let stale = matches!(&outcome, Outcome::Broken { verified: 0, fault: Fault::Connection(_) });
                if !(std::mem::take(&mut kept) && stale) {
                    break outcome;
                }
                connection = None;
            };
            drop(place);
            state = self.lock();
            let goes_on = next.is_some() && connection.as_ref().is_some_and(|connection| connection.usable());
            let used = connection.as_deref().map(|connection| (connection, &*plan, &leg));
            self.ended(&mut state, run, outcome, used, !goes_on);
            match next {
                Some(next) if goes_on => current = Some((next, true)),
                Some(next) => self.handle(&mut state, Event::Ended { run: next, outcome: Outcome::Unasked }),
                None => {}
            }
        }
        let spent = state.connections.end(&job, source, leg, connection);
        if spent.is_empty() {
            return state;
        }
        drop(state);
        drop(spent);
        self.lock()
    }

    fn connected<'c>(
        &self,
        connection: &'c mut Option<Box<dyn Connection>>,
        address: SocketAddr,
        leg: &Leg,
    ) -> Result<&'c mut dyn Connection, Fault> {
        if connection.is_none() {
            let carrier = carrier::carrier(leg.transport).expect("chosen among those there are");
            *connection = Some(carrier.connect(address, leg, &self.context)?);
        }
        Ok(connection.as_deref_mut().expect("there is one now"))
    }

    /// Moves the range of a run; while its bytes are on their way the next is asked for, unless the slot is wanted
    /// elsewhere.
    fn bring(
        &self,
        connection: &mut dyn Connection,
        run: &Run,
        asked: bool,
        place: &Place,
        plan: &Arc<FlightPlan>,
        next: &mut Option<Run>,
    ) -> Outcome {
        if !asked && let Err(fault) = connection.ask(&place.ask, run.len) {
            return broken(0, fault);
        }
        if next.is_none() && !self.arbiter().contended() {
            let mut state = self.lock();
            let newest = |own: &Result<Arc<FlightPlan>, String>| own.as_ref().is_ok_and(|own| Arc::ptr_eq(own, plan));
            if state.plans.get(&run.job).is_none_or(newest) {
                *next = state.throttle.ahead(self.time(), run);
            }
        }
        if let Some(next) = next {
            let place = Place::of(&self.lock(), next);
            // Where asking fails, receiving does.
            let _ = connection.ask(&place.ask, next.len);
        }
        // SAFETY: runs of a fetch have ranges that do not overlap, and `place` holds the segment.
        let into = unsafe { std::slice::from_raw_parts_mut(place.segment.as_ptr().add(place.start), run.len as usize) };
        match connection.receive(into) {
            Ok(()) => Outcome::Whole,
            Err(Broken { verified, fault }) => broken(verified, fault),
        }
    }

    /// Notes what came of a run, and tells the Throttle Controller.
    fn ended(
        &self,
        state: &mut State,
        run: Run,
        outcome: Outcome,
        used: Option<(&dyn Connection, &FlightPlan, &Leg)>,
        last_of_slot: bool,
    ) {
        let moved = match &outcome {
            Outcome::Whole => run.len,
            Outcome::Broken { verified, .. } => *verified,
            Outcome::Unasked => 0,
        };
        let transfer = state.fetches.get(&run.fetch).expect("a fetch outlives its runs").transfer.clone();
        let record = state.record(&transfer);
        record.flows -= u32::from(last_of_slot);
        record.served_bytes += moved;
        record.ended = now();
        if let Some((connection, plan, leg)) = used
            && moved > 0
        {
            note(&mut record.transport, plan, leg, moved, connection);
        }
        self.handle(state, Event::Ended { run, outcome });
    }

    /// The parts that this host has in memory already: in this process, or in one that lends them.
    fn at_home(&self, request: &FetchRequest, plan: &FlightPlan) -> Result<Vec<Option<Part>>, FetchError> {
        let memory = plan.legs.iter().find(|leg| leg.transport == Transport::Shm);
        let elsewhere = plan.legs.iter().any(|leg| leg.reach == Reach::Anywhere);
        let mut homes = Vec::with_capacity(request.parts.len());
        for wanted in &request.parts {
            if self.owns(wanted) {
                let object = self.own(wanted)?;
                let in_memory = object.in_memory(wanted.part).filter(|(segment, ..)| !segment.has_writers());
                homes.push(in_memory.map(|(segment, start, len)| Part {
                    home: Home::Own(segment.clone()),
                    start: start as usize,
                    len: len as usize,
                }));
                continue;
            }
            match memory.filter(|_| wanted.len > 0).map(|leg| self.borrow(request, wanted, leg)) {
                Some(Ok(part)) => homes.push(Some(part)),
                Some(Err(why)) if !elsewhere => {
                    return Err(FetchError::Denied(format!("shared memory was demanded, but {why}")));
                }
                Some(Err(_)) | None => homes.push(None),
            }
        }
        Ok(homes)
    }

    /// # Errors
    /// Why it has to come another way.
    fn borrow(&self, request: &FetchRequest, wanted: &Wanted, leg: &Leg) -> Result<Part, String> {
        let mut reason = "its owner is on another host".to_owned();
        for &owner in &wanted.addresses {
            match self.borrower.borrow(owner, wanted.object, wanted.part, wanted.len) {
                Ok(borrowed) => {
                    let mut state = self.lock();
                    let record = state.record(&request.transfer);
                    record.transport.carried(leg, wanted.len, Borrowed::negotiated());
                    let (start, len) = (0, wanted.len as usize);
                    return Ok(Part { home: Home::Borrowed(Arc::new(borrowed)), start, len });
                }
                Err(NotLent::Elsewhere) => {}
                Err(NotLent::Refused(why)) => {
                    let mut state = self.lock();
                    state.record(&request.transfer).transport.fallbacks.insert(format!("shm: {why}"));
                    reason = why;
                }
            }
        }
        Err(reason)
    }

    fn owns(&self, wanted: &Wanted) -> bool {
        wanted.addresses.contains(&self.own_address)
    }

    fn own(&self, wanted: &Wanted) -> Result<Arc<Object>, FetchError> {
        self.store.get(&wanted.object).ok_or_else(|| FetchError::Lost("this worker has freed it".into()))
    }

    fn copy_own(&self, wanted: &Wanted, into: &mut [u8]) -> Result<(), FetchError> {
        let copied = self.own(wanted)?.copy(wanted.part, into);
        copied.map_err(|error| FetchError::Lost(format!("this worker's own copy: {error}")))
    }

    fn run_ticks(self: Arc<Shared>) {
        let mut state = self.lock();
        while !state.closing {
            let now = self.time();
            let at = state.wake.unwrap_or(now + LINGER / 2).min(now + LINGER / 2);
            (state, _) = self
                .tick
                .wait_timeout(state, at.since(now).max(Duration::from_millis(1)))
                .expect("no panic while held");
            if state.wake.is_some_and(|wake| wake <= self.time()) {
                state.wake = None;
            }
            self.handle(&mut state, Event::Tick);
            let old = state.connections.expire();
            if !old.is_empty() {
                drop(state);
                drop(old);
                state = self.lock();
            }
        }
    }

    /// A helper's life.
    fn help(self: Arc<Shared>) {
        let mut state = self.lock();
        loop {
            if let Some(run) = state.queue.pop_front() {
                state = self.execute(state, run);
                continue;
            }
            if state.closing {
                break;
            }
            state.idle_helpers += 1;
            let waited = self.work.wait_timeout(state, HELPER_IDLE).expect("no panic while held");
            state = waited.0;
            state.idle_helpers -= 1;
            if waited.1.timed_out() && state.queue.is_empty() {
                break;
            }
        }
        state.helpers -= 1;
    }
}

fn broken(verified: u64, fault: Fault) -> Outcome {
    Outcome::Broken { verified, fault }
}

/// Records what a connection carried, what it agreed to, and how it fares.
fn note(facts: &mut TransportFacts, plan: &FlightPlan, leg: &Leg, bytes: u64, connection: &dyn Connection) {
    facts.carried(leg, bytes, connection.negotiated());
    for skipped in plan.legs.iter().take_while(|other| *other != leg).filter(|leg| leg.reach == Reach::Anywhere) {
        facts.fallbacks.insert(format!("{}: this process has no carrier for it", skipped.transport.name()));
    }
    let sender = connection.sender();
    facts.observed.rto_us_max = facts.observed.rto_us_max.max(sender.rto_us);
    facts.observed.rtt_us_max = facts.observed.rtt_us_max.max(sender.rtt_us);
    // Counters of a connection, not of a range: the largest seen on any is a lower bound of their sum.
    facts.observed.retransmits = facts.observed.retransmits.max(u64::from(sender.retransmits));
    facts.observed.timeouts = facts.observed.timeouts.max(u64::from(sender.timeouts));
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
