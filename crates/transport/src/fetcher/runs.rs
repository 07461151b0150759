//! What the Throttle Controller decides, carried out: runs, on threads and connections.
//!
//! The thread that calls [`Shared::carry`] moves bytes itself; helper threads join it while there are more runs than
//! callers.

use super::records::now;
use super::{Active, INTERRUPT_EVERY, Planned, Shared, State};
use crate::arbiter::Numbers;
use crate::carrier::{self, Ask, Broken, Connection, End};
use crate::clock::lasting;
use crate::copies::PartCopy;
use crate::object::ObjectId;
use crate::parts::Wanted;
use crate::segment::Segment;
use mission_core::defaults::{BLOCK_BYTES, FLOWS_PER_HOST};
use mission_core::flight::{Leg, Reach};
use mission_core::host::fetches::{Fault, FetchError, FetchId, Outcome, Piece, Run, Tally, too_slow};
use mission_core::host::process::{Command, Event};
use mission_core::host::{GroupId, HEARTBEAT, Ticket};
use mission_core::report::TransportFacts;
use mission_core::types::{JobId, TransferId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// Chunks that follow one another on a connection before its thread checks for an interrupt: 64 MiB.
const CHAIN_MAX: u32 = 16;
/// How often the arrived bytes of each range are counted.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// Longest life of a helper without work.
const HELPER_IDLE: Duration = Duration::from_secs(5);

/// A range of a part to fetch.
pub(super) struct Far {
    pub object: ObjectId,
    pub part: u32,
    /// Within the part.
    pub start: u64,
    pub len: u64,
    /// Of those, bytes that have not arrived.
    pub left: u64,
    /// Who has it, best first.
    pub sources: Vec<SocketAddr>,
    /// Where it goes.
    pub segment: Arc<Segment>,
    pub place: usize,
    /// The copy kept for other receivers of a broadcast; and which sources are receivers too.
    pub copy: Option<Arc<PartCopy>>,
    pub peer: Option<SocketAddr>,
    /// Checksums of its blocks, from its owner, where other receivers may send it.
    pub expected: Option<Arc<[u64]>>,
}

impl Far {
    /// A range of a part as the caller wants it, whose first byte goes to `place` in the segment.
    pub fn of(wanted: &Wanted, start: u64, len: u64, segment: &Arc<Segment>, place: usize) -> Far {
        let sources = wanted.addresses.clone();
        Far {
            object: wanted.object,
            part: wanted.part,
            start,
            len,
            left: len,
            sources,
            segment: segment.clone(),
            place,
            copy: None,
            peer: None,
            expected: None,
        }
    }
}

/// Whether a leg leads to other hosts, and this process has a carrier for it.
pub(super) fn is_carried(leg: &Leg) -> bool {
    let available = |transport| carrier::carrier(transport).is_some_and(|carrier| carrier.available());
    leg.reach == Reach::Anywhere && available(leg.transport)
}

/// Where flows are subflows, one connection carries all that comes from a source.
pub(super) fn has_one_run(planned: &Planned, source: SocketAddr) -> bool {
    planned.to(source).first().is_some_and(|leg| leg.subflows.is_some())
}

/// A job's newest plan, unless the fetch demands more encryption than that has.
fn stricter<'a>(newest: &'a Arc<Planned>, own: &'a Arc<Planned>) -> &'a Arc<Planned> {
    if newest.plan.demands.encrypt < own.plan.demands.encrypt { own } else { newest }
}

/// A run, and the leg that it takes.
pub(super) struct Assigned {
    run: Run,
    /// Only connect to its source: it has no slot.
    connects: bool,
    job: JobId,
    planned: Arc<Planned>,
    leg: Leg,
}

/// A range that is under way.
#[derive(Default)]
pub(super) struct Running {
    /// Of its connection, once there is one.
    ends: Option<Arc<dyn End>>,
    received: Arc<AtomicU64>,
    cut: bool,
}

/// Where a run's bytes come from, and where they go.
struct Place {
    ask: Ask,
    segment: Arc<Segment>,
    start: usize,
    copy: Option<Arc<PartCopy>>,
    /// Of its blocks, and of those after them.
    expected: Option<(Arc<[u64]>, usize)>,
}

impl Place {
    fn of(state: &State, run: &Run, numbers: &Numbers) -> Place {
        let active = state.fetches.get(&run.fetch).expect("a fetch outlives its runs");
        let far = &active.far[run.piece as usize];
        Place {
            ask: Ask {
                object: far.object,
                part: far.part,
                start: far.start + run.start,
                transfer: Some((numbers.group_of(&active.transfer.job), numbers.member_of(&active.transfer))),
            },
            segment: far.segment.clone(),
            start: far.place + run.start as usize,
            copy: far.copy.clone(),
            expected: far.expected.clone().map(|blocks| (blocks, (run.start / BLOCK_BYTES) as usize)),
        }
    }
}

impl Shared {
    /// Fetches ranges to their places, and blocks until they are there; the calling thread works like the helpers.
    /// Returns the tally, also of a failure.
    pub(super) fn carry(
        &self,
        transfer: &TransferId,
        planned: &Arc<Planned>,
        mut far: Vec<Far>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> (Result<(), FetchError>, Tally) {
        let mut state = self.lock();
        // Locations that arrived since this fetch began; from now on the fetch receives them itself.
        for far in &mut far {
            let at = state.locations.get(&far.object).into_iter().flatten();
            let new: Vec<SocketAddr> = at.filter(|address| !far.sources.contains(address)).copied().collect();
            far.sources.extend(new);
        }
        if far.is_empty() {
            return (Ok(()), Tally::default());
        }
        if planned.legs.is_empty() {
            let why = "this worker supports none of the planned transports".into();
            return (Err(FetchError::Denied(why)), Tally::default());
        }
        if state.closing {
            return (Err(FetchError::Cancelled(super::CLOSES.into())), Tally::default());
        }
        if let Some(why) = far.iter().find_map(|far| state.lost.get(&far.object)) {
            return (Err(FetchError::Lost(why.clone())), Tally::default());
        }
        let id = state.next_fetch;
        state.next_fetch += 1;
        let pieces: Vec<Piece> = far
            .iter()
            .map(|far| Piece {
                len: far.len,
                sources: far.sources.iter().map(|address| state.source(*address)).collect(),
            })
            .collect();
        let done = Arc::new(Condvar::new());
        let active = Active {
            transfer: transfer.clone(),
            planned: planned.clone(),
            far,
            mine: VecDeque::new(),
            caller_waits: true,
            done: done.clone(),
            result: None,
            brought: BTreeMap::new(),
        };
        state.fetches.insert(id, active);
        let seed = u64::from_ne_bytes(crate::auth::random());
        let (group, member) = (self.context.numbers.group_of(&transfer.job), self.context.numbers.member_of(transfer));
        let chunk_bytes = planned.plan.chunk_at(&planned.own);
        // The newest plan's, whichever the fetch began with.
        let newest = match state.plans.get(&transfer.job) {
            Some(Ok(newest)) => stricter(newest, planned).clone(),
            _ => planned.clone(),
        };
        self.reaches(&mut state, id, group, &newest);
        let all =
            pieces.iter().zip(&state.fetches[&id].far).flat_map(|(piece, far)| piece.sources.iter().zip(&far.sources));
        let one_run = all.filter(|(_, address)| has_one_run(&newest, **address)).map(|(source, _)| *source).collect();
        self.handle(&mut state, Event::Asked { fetch: id, group, member, pieces, chunk_bytes, one_run, seed });
        let mut looked = Instant::now();
        loop {
            if looked.elapsed() >= INTERRUPT_EVERY {
                // The answer may need a lock whose holder waits for this one: Python's.
                drop(state);
                let interrupted = interrupted();
                looked = Instant::now();
                state = self.lock();
                if interrupted {
                    let error = FetchError::Cancelled("interrupted".into());
                    self.handle(&mut state, Event::Abandon { fetch: id, error });
                }
            }
            let own = state.fetches.get_mut(&id).expect("it stays until its caller takes it out");
            if let Some((result, tally)) = own.result.take() {
                let brought = std::mem::take(&mut own.brought);
                state.fetches.remove(&id);
                self.ended.notify_all();
                let record = state.record(transfer);
                record.refetches += u64::from(tally.refetches);
                record.resumed += u64::from(tally.resumed);
                record.busy += u64::from(tally.busy);
                for (bytes, busy) in brought.into_values().filter(|(bytes, _)| *bytes > 0) {
                    record.transport.observed.rates.carried(bytes, busy);
                }
                return (result, tally);
            }
            let run = own.mine.pop_front().or_else(|| {
                let at = state.queue.iter().position(|assigned| assigned.run.fetch == id)?;
                state.queue.remove(at)
            });
            let own = state.fetches.get_mut(&id).expect("as above");
            own.caller_waits = run.is_none();
            state = match run {
                Some(run) => self.execute(state, run),
                None => done.wait_timeout(state, INTERRUPT_EVERY).expect("no panic while held").0,
            };
        }
    }

    /// Lets the process's machine decide, and executes those commands that do not block.
    pub(super) fn handle(&self, state: &mut State, event: Event) -> Option<Run> {
        let chained = self.step(state, event);
        self.drain_arbiter(state);
        chained
    }

    /// Handles one event, without the arbiter's answers to it. Returns the next run on the same connection, if any.
    pub(super) fn step(&self, state: &mut State, event: Event) -> Option<Run> {
        let mut commands = std::mem::take(&mut state.commands);
        state.process.handle(self.time(), event, &mut commands);
        let mut chained = None;
        for command in commands.drain(..) {
            match command {
                Command::Send(message) => self.arbiter().send(message),
                Command::Connect(run) => self.assign(state, run, true),
                Command::Run(run) => self.assign(state, run, false),
                Command::Chain(run) => chained = Some(run),
                Command::Cut { ticket } => {
                    let running = state.running.entry(ticket).or_default();
                    running.cut = true;
                    if let Some(ends) = &running.ends {
                        ends.end();
                    }
                }
                Command::FellBack { fetch, source, leg, why } => {
                    let Some(transfer) = state.fetches.get(&fetch).map(|active| active.transfer.clone()) else {
                        continue;
                    };
                    let name = match state.plans.get(&transfer.job) {
                        Some(Ok(planned)) => {
                            let legs = planned.to(state.sources[source as usize]);
                            legs.get(usize::from(leg)).map(|leg| leg.transport.name())
                        }
                        _ => None,
                    };
                    let fallback = format!("{}: {why}", name.unwrap_or("an earlier plan"));
                    state.record(&transfer).transport.fallbacks.insert(fallback);
                }
                Command::Finished { fetch, result, tally } => {
                    if let Some(active) = state.fetches.get_mut(&fetch) {
                        active.result = Some((result, tally));
                        active.done.notify_one();
                    }
                }
                Command::Replace => self.arbiter().replace(),
                Command::WakeAt(at) => {
                    if state.wake.is_none_or(|wake| at < wake) {
                        state.wake = Some(at);
                        self.tick.notify_one();
                    }
                }
            }
        }
        state.commands = commands;
        chained
    }

    /// Reports the sources of a fetch that fewer legs of the plan reach.
    pub(super) fn reaches(&self, state: &mut State, fetch: FetchId, group: GroupId, planned: &Planned) {
        let Some(active) = state.fetches.get(&fetch) else { return };
        let sources: BTreeSet<SocketAddr> = active.far.iter().flat_map(|far| far.sources.iter().copied()).collect();
        for address in sources {
            let legs = planned.to(address).len();
            if legs != planned.legs.len() {
                let (source, legs) = (state.source(address), legs.min(u8::MAX.into()) as u8);
                self.handle(state, Event::Reaches { group, source, legs });
            }
        }
    }

    /// The caller's own thread if it waits, else a helper; a new one if none is idle. What connects gets a thread of its
    /// own: where nobody answers, it is busy for seconds, and helpers are as many as slots.
    fn assign(&self, state: &mut State, run: Run, connects: bool) {
        let job = state.groups.get(&run.group).cloned();
        let planned = job.as_ref().and_then(|job| state.plans.get(job)?.as_ref().ok().cloned());
        let Some(active) = state.fetches.get_mut(&run.fetch) else { return };
        let planned =
            planned.map_or_else(|| active.planned.clone(), |newest| stricter(&newest, &active.planned).clone());
        // The newest plan, so that a transport can be replaced at a chunk boundary.
        let address = state.sources[run.source as usize];
        let legs = if planned.legs.is_empty() { active.planned.to(address) } else { planned.to(address) };
        let leg = legs.get(usize::from(run.leg)).or(legs.first()).expect("a fetch without any leg is refused").clone();
        let transfer = active.transfer.clone();
        let assigned = Assigned { run, connects, job: transfer.job.clone(), planned, leg };
        if active.caller_waits && active.mine.is_empty() {
            active.mine.push_back(assigned);
            active.done.notify_one();
        } else if connects {
            let own = self.own.upgrade().expect("called through an Arc");
            let assigned = Arc::new(Mutex::new(Some(assigned)));
            let taken = assigned.clone();
            let thread = thread::Builder::new().name("mission-connect".into()).stack_size(256 << 10);
            let connect = move || {
                let assigned = taken.lock().expect("no panic while held").take().expect("taken once");
                drop(own.execute(own.lock(), assigned));
            };
            if thread.spawn(connect).is_err() {
                // The caller, or a helper, does it when it is free.
                state.queue.extend(assigned.lock().expect("no panic while held").take());
                self.work.notify_one();
            }
        } else {
            state.queue.push_back(assigned);
            if state.idle_helpers >= state.queue.len() {
                self.work.notify_one();
            } else if state.helpers < state.flows_per_host.most().max(FLOWS_PER_HOST) as usize {
                state.helpers += 1;
                let own = self.own.upgrade().expect("called through an Arc");
                let helper = thread::Builder::new().name("mission-fetch".into()).stack_size(512 << 10);
                if helper.spawn(move || own.help()).is_err() {
                    // The caller, or another helper, does it when it is free.
                    state.helpers -= 1;
                }
            }
        }
        if !connects {
            let record = state.record(&transfer);
            record.flows += 1;
            record.flows_peak = record.flows_peak.max(record.flows);
        }
    }

    /// Connects to a source, and keeps the connection for the first run there; the lock is free meanwhile.
    fn connect<'a>(&'a self, mut state: MutexGuard<'a, State>, assigned: Assigned) -> MutexGuard<'a, State> {
        let Assigned { run, job, leg, .. } = assigned;
        let address = state.sources[run.source as usize];
        let (_, closed) = state.connections.begin(&job, run.source, &leg, true);
        state.running.entry(run.ticket).or_default();
        drop(state);
        drop(closed);
        let mut connection = None;
        let began = Instant::now();
        let outcome = match self.connected(&mut connection, address, &leg, run.ticket) {
            // In a slot it would keep others waiting; and a server closes what is silent to make room.
            Ok(connection) => match connection.take_place() {
                Ok(()) => Outcome::Connected,
                // It answers: another leg would be answered alike.
                Err(fault) => broken(0, fault),
            },
            Err(fault) => Outcome::NotConnected { fault },
        };
        let took = began.elapsed();
        let mut state = self.lock();
        state.running.remove(&run.ticket);
        // First: the run that this allows finds it.
        let spent = state.connections.end(&job, run.source, leg, connection);
        self.ended(&mut state, run, outcome, None, took, false);
        if spent.is_empty() {
            return state;
        }
        drop(state);
        drop(spent);
        self.lock()
    }

    /// Carries a run in its slot, and those that follow it there; the lock is free while bytes move.
    fn execute<'a>(&'a self, mut state: MutexGuard<'a, State>, assigned: Assigned) -> MutexGuard<'a, State> {
        if assigned.connects {
            return self.connect(state, assigned);
        }
        let Assigned { run, job, planned, leg, .. } = assigned;
        let (source, ticket) = (run.source, run.ticket);
        let address = state.sources[source as usize];
        let (mut connection, closed) = state.connections.begin(&job, source, &leg, run.fresh);
        state.running.entry(ticket).or_default();
        if !closed.is_empty() {
            drop(state);
            drop(closed);
            state = self.lock();
        }
        let mut kept = connection.is_some();
        let mut chained = 0;
        let mut current = Some((run, false));
        while let Some((run, asked)) = current.take() {
            let place = Place::of(&state, &run, &self.context.numbers);
            drop(state);
            let mut next = None;
            let began = Instant::now();
            let mut outcome = match self.connected(&mut connection, address, &leg, ticket) {
                Ok(connection) => self.bring(connection, &run, asked, &place, &mut next, &mut chained),
                Err(fault) => Outcome::NotConnected { fault },
            };
            let took = began.elapsed();
            // The server has closed what it found idle, or after its last answer: that is no fault of the range.
            let closed = matches!(&outcome, Outcome::Broken { verified: 0, fault: Fault::Connection(_) });
            drop(place);
            state = self.lock();
            let cut = state.running.get(&ticket).is_some_and(|running| running.cut);
            if (std::mem::take(&mut kept) || asked) && closed && !cut {
                outcome = Outcome::Stale;
            }
            if cut && let Outcome::Broken { fault: Fault::Connection(why), .. } = &mut outcome {
                *why = too_slow();
            }
            let stale = outcome == Outcome::Stale;
            let goes_on = !stale && next.is_some() && connection.as_ref().is_some_and(|own| own.usable());
            if !goes_on {
                state.running.remove(&ticket);
            }
            let used = connection.as_deref().map(|connection| (connection, &*planned, &leg));
            self.ended(&mut state, run, outcome, used, took, !goes_on);
            match next {
                Some(next) if goes_on => current = Some((next, true)),
                // What was to follow a stale run waits again already.
                Some(next) if !stale => {
                    self.handle(&mut state, Event::Ended { run: next, outcome: Outcome::Unasked });
                    state.running.remove(&ticket);
                }
                _ => {}
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
        ticket: Ticket,
    ) -> Result<&'c mut dyn Connection, Fault> {
        if connection.is_none() {
            let carrier = carrier::carrier(leg.transport).expect("chosen among those there are");
            *connection = Some(carrier.connect(address, leg, &self.context)?);
        }
        let connection = connection.as_deref_mut().expect("there is one now");
        let (ends, received) = connection.watch();
        received.store(0, Ordering::Relaxed);
        let mut state = self.lock();
        let running = state.running.entry(ticket).or_default();
        if running.cut {
            // It was cut while it connected.
            ends.end();
        }
        (running.ends, running.received) = (Some(ends), received);
        Ok(connection)
    }

    /// Moves the range of a run. While its bytes are in transit, the next range is requested if the machine decides so.
    fn bring(
        &self,
        connection: &mut dyn Connection,
        run: &Run,
        asked: bool,
        place: &Place,
        next: &mut Option<Run>,
        chained: &mut u32,
    ) -> Outcome {
        if !asked && let Err(fault) = connection.ask(&place.ask, run.len) {
            return broken(0, fault);
        }
        let mut state = self.lock();
        // The thread stops from time to time: its caller may have been interrupted.
        if *chained < CHAIN_MAX {
            *next = self.handle(&mut state, Event::Streaming { run: *run });
            *chained += 1;
        }
        let next_place = next.as_ref().map(|next| Place::of(&state, next, &self.context.numbers));
        drop(state);
        if let (Some(next), Some(place)) = (next, next_place) {
            // Where asking fails, receiving does.
            let _ = connection.ask(&place.ask, next.len);
        }
        // SAFETY: runs of a fetch have ranges that do not overlap, and `place` holds the segment.
        let into = unsafe { std::slice::from_raw_parts_mut(place.segment.as_ptr().add(place.start), run.len as usize) };
        let received = connection.receive(into);
        if let Some((expected, first)) = &place.expected {
            let (came, _) = connection.brought();
            if expected.get(*first..first + came.len()) != Some(came) {
                let why = "a receiver of the broadcast sent data that differs from the owner's".to_owned();
                return broken(0, Fault::Damaged(why));
            }
        }
        if let Some(copy) = &place.copy {
            let (checksums, encryption) = connection.brought();
            copy.protect(encryption);
            copy.arrived(place.ask.start, checksums);
        }
        match received {
            Ok(()) => Outcome::Whole,
            Err(Broken { verified, fault }) => broken(verified, fault),
        }
    }

    /// Records the outcome of a run, and passes it to the Throttle Controller.
    fn ended(
        &self,
        state: &mut State,
        run: Run,
        outcome: Outcome,
        used: Option<(&dyn Connection, &Planned, &Leg)>,
        took: Duration,
        last_of_slot: bool,
    ) {
        let moved = match &outcome {
            Outcome::Whole => run.len,
            Outcome::Broken { verified, .. } => *verified,
            Outcome::Connected | Outcome::NotConnected { .. } | Outcome::Stale | Outcome::Unasked => 0,
        };
        let active = state.fetches.get_mut(&run.fetch).expect("a fetch outlives its runs");
        let far = &mut active.far[run.piece as usize];
        far.left = far.left.saturating_sub(moved);
        // A run that was requested while the previous one arrived is timed from the end of that one: their sum is
        // right. Runs without bytes count their time, too.
        let (bytes, busy) = active.brought.entry(run.source).or_default();
        *bytes += moved;
        *busy += took;
        let (peer, transfer) = (far.peer, active.transfer.clone());
        let from_peer = peer == Some(state.sources[run.source as usize]);
        let record = state.record(&transfer);
        record.peer_bytes += if from_peer { moved } else { 0 };
        // A record that was forgotten meanwhile begins anew.
        record.flows = record.flows.saturating_sub(u32::from(last_of_slot));
        record.served_bytes += moved;
        record.ended = now();
        if let Some((connection, planned, leg)) = used
            && moved > 0
        {
            note(&mut record.transport, planned, leg, moved, connection);
        }
        self.handle(state, Event::Ended { run, outcome });
    }

    pub(super) fn run_ticks(self: Arc<Shared>) {
        let mut state = self.lock();
        let mut watched = Instant::now();
        while !state.closing || !state.fetches.is_empty() {
            let now = self.time();
            let wait = state.wake.map_or(HEARTBEAT, |wake| lasting(wake.since(now)).min(HEARTBEAT));
            let waited = self.tick.wait_timeout(state, wait.max(Duration::from_millis(1)));
            (state, _) = waited.expect("no panic while held");
            if state.wake.is_some_and(|wake| wake <= self.time()) {
                state.wake = None;
            }
            if watched.elapsed() >= WATCH_EVERY {
                watched = Instant::now();
                let received =
                    |(ticket, running): (&Ticket, &Running)| (*ticket, running.received.load(Ordering::Relaxed));
                let all: Vec<(Ticket, u64)> =
                    state.running.iter().filter(|(_, own)| own.ends.is_some()).map(received).collect();
                for (ticket, bytes) in all {
                    self.handle(&mut state, Event::Received { ticket, bytes });
                }
            }
            self.handle(&mut state, Event::Tick);
            let old = state.connections.expire();
            drop(state);
            drop(old);
            self.pool.trim();
            state = self.lock();
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
fn note(facts: &mut TransportFacts, planned: &Planned, leg: &Leg, bytes: u64, connection: &dyn Connection) {
    let (plan, carried) = (&planned.plan, &planned.legs);
    facts.carried(leg, bytes, connection.negotiated());
    let before = plan.legs.iter().take_while(|other| other.transport != leg.transport);
    for skipped in before.filter(|leg| leg.reach == Reach::Anywhere && !carried.contains(leg)) {
        facts.fallbacks.insert(format!("{}: this worker does not support it", skipped.transport.name()));
    }
    let sender = connection.sender();
    facts.observed.rto_us_max = facts.observed.rto_us_max.max(sender.rto_us);
    facts.observed.rtt_us_max = facts.observed.rtt_us_max.max(sender.rtt_us);
    // Counters of a connection, not of a range: the largest seen on any is a lower bound of their sum.
    facts.observed.retransmits = facts.observed.retransmits.max(u64::from(sender.retransmits));
    facts.observed.timeouts = facts.observed.timeouts.max(u64::from(sender.timeouts));
    facts.observed.marks = facts.observed.marks.max(u64::from(sender.marks));
}
