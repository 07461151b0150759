//! Brings parts of objects: from this host's memory, from their owners, and in broadcasts from other receivers.
//!
//! All decisions are in [`mission_core::throttle`] and [`mission_core::swarm`]; here are the clock, the threads and the
//! connections. [`home`] looks what need not be moved, [`broadcast`] asks for the pieces of what many receive, and [`runs`]
//! moves ranges.

mod broadcast;
mod home;
mod runs;

use crate::arbiter::Arbiter;
use crate::carrier::Context;
use crate::carrier::shm::Borrower;
use crate::connections::Connections;
use crate::facts::TransportFacts;
use crate::object::ObjectId;
use crate::parts::{FetchRequest, Fetched, Home, Part, places};
use crate::segment::{Pool, Segment};
use crate::store::Store;
use mission_core::flight::{self, Environment, FlightPlan};
use mission_core::mission;
use mission_core::shares::caps_bind;
use mission_core::slots::FlowsPerHost;
use mission_core::throttle::{Event, FetchError, FetchId, Run, SourceId, Tally, ThrottleController};
use mission_core::types::{Demands, JobId, TransferId, Transport};
use mission_core::units::Time;
use runs::Far;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
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
    flows_per_host: FlowsPerHost,
    plans: BTreeMap<JobId, Result<Arc<FlightPlan>, String>>,
    transfers: BTreeMap<TransferId, TransferRecord>,
    /// Those that many receive alike.
    broadcasts: BTreeSet<TransferId>,
    /// Objects whose owners are gone, and why; names of objects never come again.
    lost: BTreeMap<ObjectId, String>,
    changed: bool,
    closing: bool,
}

/// A fetch that somebody waits for.
struct Active {
    transfer: TransferId,
    plan: Arc<FlightPlan>,
    far: Vec<Far>,
    segment: Arc<Segment>,
    /// Runs for the caller's own thread, and whether it has none now.
    mine: VecDeque<Run>,
    caller_waits: bool,
    done: Arc<Condvar>,
    result: Option<(Result<(), FetchError>, Tally)>,
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
    pub local_bytes: u64,
    /// And bytes that another receiver served, not their owner.
    pub peer_bytes: u64,
    pub fetches: u64,
    /// Something was under way since the last report.
    pub moved: bool,
    #[serde(skip)]
    said_moved: bool,
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

/// Lost objects that are remembered, for fetches that are just between two steps.
const LOST_MAX: usize = 10_000;
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
        flows_per_host: FlowsPerHost,
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
            broadcasts: BTreeSet::new(),
            lost: BTreeMap::new(),
            changed: false,
            closing: false,
        };
        let shared = Arc::new_cyclic(|new_cyclic| Shared {
            own: new_cyclic.clone(),
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
    /// `interrupted` is asked every 100 ms while this thread waits; no lock is held meanwhile.
    ///
    /// # Errors
    /// What stands in the way, by cause; no part of the memory is given away then.
    pub fn fetch(&self, request: FetchRequest, mut interrupted: impl FnMut() -> bool) -> Result<Fetched, FetchError> {
        let shared = &self.shared;
        let plan = shared.lock().plan(&request.transfer.job, &request.demands, &shared.environment)?;
        let (mut homes, receiving) = shared.begin(&request, &plan, &mut interrupted)?;
        let elsewhere = |number: usize| homes[number].is_some() || receiving.contains_key(&number);
        let (places, len) = places(&request, elsewhere);
        let segment = shared.take(len)?;
        let mut far = Vec::new();
        let (mut far_bytes, mut here_bytes, mut local_bytes) = (0, 0, 0);
        for (number, (wanted, &(start, len))) in request.parts.iter().zip(&places).enumerate() {
            // SAFETY: nobody else knows of this segment yet, and the places in it do not overlap.
            let into = unsafe { std::slice::from_raw_parts_mut(segment.as_ptr().add(start), len) };
            match &homes[number] {
                Some(home) if request.packed => into.copy_from_slice(home.bytes()),
                Some(_) => {}
                None if shared.owns(wanted) => shared.copy_own(wanted, into)?,
                None => {
                    far_bytes += wanted.len;
                    if !receiving.contains_key(&number) {
                        far.push(Far::of(wanted, 0, wanted.len, start));
                    }
                    continue;
                }
            }
            here_bytes += wanted.len;
            local_bytes += if shared.owns(wanted) { wanted.len } else { 0 };
        }
        {
            let mut state = shared.lock();
            let record = state.record(&request.transfer);
            record.asked_bytes += far_bytes + here_bytes;
            record.served_bytes += here_bytes;
            record.local_bytes += local_bytes;
            record.fetches += 1;
            record.ended = now();
        }
        let mut tally = Tally::default();
        let bring = || {
            for (number, receiving) in receiving {
                let wanted = &request.parts[number];
                // Memory of its own: what is kept of a broadcast keeps nothing else.
                let (own, start) = if request.packed {
                    (segment.clone(), places[number].0)
                } else {
                    (shared.take(wanted.len as usize)?, 0)
                };
                receiving.copy.lies_in(own.clone(), start);
                let (ended, took) =
                    shared.receive_broadcast(&request.transfer, &plan, wanted, &receiving, &own, &mut interrupted);
                tally.add(&took);
                ended?;
                receiving.keep();
                let home = Part { home: Home::Own(own), start, len: wanted.len as usize };
                homes[number] = Some(home).filter(|_| !request.packed);
            }
            let (ended, took) = shared.carry(&request.transfer, &plan, far, &segment, &mut interrupted);
            tally.add(&took);
            ended
        };
        if let Err(error) = bring() {
            let mut state = shared.lock();
            let record = state.record(&request.transfer);
            // A record that was forgotten meanwhile begins anew.
            record.asked_bytes = record.asked_bytes.saturating_sub(far_bytes - tally.bytes.min(far_bytes));
            return Err(error);
        }
        let own = |(start, len)| Part { home: Home::Own(segment.clone()), start, len };
        let all = request.packed.then(|| own((0, segment.len())));
        let parts = homes.into_iter().zip(places).map(|(home, place)| match home {
            Some(home) if !request.packed => home,
            _ => own(place),
        });
        Ok(Fetched { parts: parts.collect(), all, tally })
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
        if state.lost.len() > LOST_MAX {
            state.lost.clear();
        }
        state.lost.extend(objects.iter().map(|object| (*object, why.to_owned())));
        let hit = |active: &Active| active.far.iter().any(|far| objects.contains(&far.object));
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
                // A budget that is found by trial has no caps that could be told beforehand.
                let bind = matches!(flows_per_host, FlowsPerHost::Fixed(flows) if caps_bind(flows, shares.len()));
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
            mission::Command::Broadcast { transfer } => {
                state.broadcasts.insert(transfer);
            }
            // For whoever stands beside the Mission Controller: it runs the policy, and has probes made.
            mission::Command::Weigh { .. } | mission::Command::ProbeEcn { .. } => {}
        }
    }

    /// Forgets what belongs to a job that is over.
    pub fn forget_job(&self, job: &JobId) {
        let mut state = self.shared.lock();
        state.plans.remove(job);
        state.transfers.retain(|id, _| id.job != *job);
        state.broadcasts.retain(|id| id.job != *job);
        let closed = state.connections.forget_job(job);
        drop(state);
        drop(closed);
        self.shared.store.copies.forget_job(job);
    }

    /// The transfers of this process that changed since the last call, if any did.
    pub fn report(&self) -> Option<Vec<TransferRecord>> {
        let mut state = self.shared.lock();
        if !std::mem::take(&mut state.changed) {
            return None;
        }
        let records = state.transfers.values().filter(|record| record.moved || record.said_moved).cloned().collect();
        // Once more next time, to say that nothing moves any more.
        state.changed = state.transfers.values().any(|record| record.moved);
        for record in state.transfers.values_mut() {
            (record.said_moved, record.moved) = (record.moved, record.flows > 0);
        }
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

    /// Memory for what is fetched.
    fn take(&self, len: usize) -> Result<Arc<Segment>, FetchError> {
        self.store.make_room(len as u64);
        let taken = self.pool.take(len, false);
        taken.map(Arc::new).map_err(|error| FetchError::Cancelled(format!("no memory for {len} bytes: {error}")))
    }

    fn event(&self, event: Event) {
        let mut state = self.lock();
        self.handle(&mut state, event);
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
