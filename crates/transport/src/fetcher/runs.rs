//! What the Throttle Controller decides, carried out: runs, on threads and connections.
//!
//! The thread that calls [`Shared::carry`] moves bytes itself; helper threads join it while there are more runs than
//! callers.

use super::{Active, INTERRUPT_EVERY, Shared, State, now};
use crate::carrier::{self, Ask, Broken, Connection};
use crate::copies::PartCopy;
use crate::facts::TransportFacts;
use crate::object::ObjectId;
use crate::parts::Wanted;
use crate::segment::Segment;
use mission_core::defaults::{FLOWS_PER_HOST, IDLE_TIMEOUT};
use mission_core::flight::{FlightPlan, Leg, Reach};
use mission_core::throttle::{Command, Event, Fault, FetchError, Outcome, Piece, Run, Tally};
use mission_core::types::TransferId;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, MutexGuard};
use std::thread;
use std::time::Duration;

/// Longest life of a helper without work.
const HELPER_IDLE: Duration = Duration::from_secs(5);

/// A range of a part that has to be brought.
pub(super) struct Far {
    pub object: ObjectId,
    pub part: u32,
    /// Within the part.
    pub start: u64,
    pub len: u64,
    /// Who has it, best first.
    pub sources: Vec<SocketAddr>,
    /// Where it goes in the memory of the fetch.
    pub place: usize,
    /// Kept for others, where it is broadcast; and who of the sources is a receiver too.
    pub copy: Option<Arc<PartCopy>>,
    pub peer: Option<SocketAddr>,
}

impl Far {
    /// A range of a part as the caller wants it, whose first byte goes to `place`.
    pub fn of(wanted: &Wanted, start: u64, len: u64, place: usize) -> Far {
        let sources = wanted.addresses.clone();
        Far { object: wanted.object, part: wanted.part, start, len, sources, place, copy: None, peer: None }
    }
}

/// The leg of a plan that this process has a carrier for.
pub(super) fn carried(plan: &FlightPlan) -> Option<&Leg> {
    plan.legs.iter().find(|leg| leg.reach == Reach::Anywhere && carrier::carrier(leg.transport).is_some())
}

/// Where a run's bytes come from, and where they go.
struct Place {
    ask: Ask,
    segment: Arc<Segment>,
    start: usize,
    copy: Option<Arc<PartCopy>>,
}

impl Place {
    fn of(state: &State, run: &Run) -> Place {
        let active = state.fetches.get(&run.fetch).expect("a fetch outlives its runs");
        let far = &active.far[run.piece];
        Place {
            ask: Ask { object: far.object, part: far.part, start: far.start + run.start },
            segment: active.segment.clone(),
            start: far.place + run.start as usize,
            copy: far.copy.clone(),
        }
    }
}

impl Shared {
    /// Brings ranges into a segment, and blocks until they are there; the calling thread works with the others. Gives what
    /// it took, also where it failed.
    pub(super) fn carry(
        &self,
        transfer: &TransferId,
        plan: &Arc<FlightPlan>,
        far: Vec<Far>,
        segment: &Arc<Segment>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> (Result<(), FetchError>, Tally) {
        let mut state = self.lock();
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
            plan: plan.clone(),
            far,
            segment: segment.clone(),
            mine: VecDeque::new(),
            caller_waits: true,
            done: done.clone(),
            result: None,
        };
        state.fetches.insert(id, active);
        let seed = u64::from_ne_bytes(crate::auth::random());
        let (job, chunk_bytes) = (transfer.job.clone(), plan.chunk_bytes);
        // Where flows are subflows, one connection carries all that comes from a source.
        let runs_per_source = if carried(plan).is_some_and(|leg| leg.subflows.is_some()) { 1 } else { u32::MAX };
        self.handle(&mut state, Event::Asked { fetch: id, job, pieces, chunk_bytes, runs_per_source, seed });
        loop {
            let own = state.fetches.get_mut(&id).expect("it stays until its caller takes it out");
            if let Some((result, tally)) = own.result.take() {
                state.fetches.remove(&id);
                let record = state.record(transfer);
                record.refetches += u64::from(tally.refetches);
                record.resumed += u64::from(tally.resumed);
                record.busy += u64::from(tally.busy);
                return (result, tally);
            }
            let run = own.mine.pop_front().or_else(|| {
                let at = state.queue.iter().position(|run| run.fetch == id)?;
                state.queue.remove(at)
            });
            let own = state.fetches.get_mut(&id).expect("as above");
            own.caller_waits = run.is_none();
            state = match run {
                Some(run) => self.execute(state, run),
                None => {
                    let (state, wait) = done.wait_timeout(state, INTERRUPT_EVERY).expect("no panic while held");
                    if wait.timed_out() {
                        // The answer may need a lock whose holder waits for this one: Python's.
                        drop(state);
                        let interrupted = interrupted();
                        let mut state = self.lock();
                        if interrupted {
                            let error = FetchError::Cancelled("interrupted".into());
                            self.handle(&mut state, Event::Abandon { fetch: id, error });
                        }
                        state
                    } else {
                        state
                    }
                }
            };
        }
    }

    /// Lets the Throttle Controller decide, and carries its commands out as far as they block nobody.
    pub(super) fn handle(&self, state: &mut State, event: Event) {
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

    /// Carries a run in its slot, and those that follow it there; the lock is free while bytes move.
    fn execute<'a>(&'a self, mut state: MutexGuard<'a, State>, run: Run) -> MutexGuard<'a, State> {
        let active = state.fetches.get(&run.fetch).expect("a fetch outlives its runs");
        // The newest plan, so that a transport can be replaced at a chunk boundary.
        let plan = match state.plans.get(&run.job) {
            Some(Ok(plan)) => plan.clone(),
            _ => active.plan.clone(),
        };
        let Some(leg) = carried(&plan).cloned() else {
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
            let newest = |string: &Result<Arc<FlightPlan>, String>| {
                string.as_ref().is_ok_and(|string| Arc::ptr_eq(string, plan))
            };
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
        let received = connection.receive(into);
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
        let active = state.fetches.get(&run.fetch).expect("a fetch outlives its runs");
        let (transfer, peer) = (active.transfer.clone(), active.far[run.piece].peer);
        let from_peer = peer == Some(state.sources[run.source as usize]);
        let record = state.record(&transfer);
        record.peer_bytes += if from_peer { moved } else { 0 };
        // A record that was forgotten meanwhile begins anew.
        record.flows = record.flows.saturating_sub(u32::from(last_of_slot));
        record.served_bytes += moved;
        record.ended = now();
        if let Some((connection, plan, leg)) = used
            && moved > 0
        {
            note(&mut record.transport, plan, leg, moved, connection);
        }
        self.handle(state, Event::Ended { run, outcome });
    }

    pub(super) fn run_ticks(self: Arc<Shared>) {
        let mut state = self.lock();
        while !state.closing {
            let now = self.time();
            let at = state.wake.unwrap_or(now + IDLE_TIMEOUT / 2).min(now + IDLE_TIMEOUT / 2);
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
    facts.observed.marks = facts.observed.marks.max(u64::from(sender.marks));
}
