//! The fetches of one process: which range is requested next, from which source, on which leg; and how faults are
//! handled.
//!
//! A fetch is cut into chunks. A source is connected to before any chunk for it wants a slot: a source that cannot be
//! reached holds none. Each chunk then wants a slot; with one it runs on one connection to one source, and ends whole,
//! broken or refused. A broken run resumes after its last verified byte, from the same source or another. If a leg of the
//! flight plan cannot be connected, the next one is tried. A fetch without progress for [`defaults::PROGRESS_TIMEOUT`]
//! fails, and reports what it waited for.

mod fetch;
mod tickets;

use super::{GroupId, MemberId, Ticket};
use crate::defaults;
use crate::units::{self, Time};
use fetch::{Fetch, Source, Ways, words};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tickets::{Held, Tickets};

pub type FetchId = u64;
/// A server that objects can be fetched from, numbered by the caller.
pub type SourceId = u32;

/// A part of an object to fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub len: u64,
    /// Servers that have it, best first.
    pub sources: Vec<SourceId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Asked {
        fetch: FetchId,
        group: GroupId,
        member: MemberId,
        pieces: Vec<Piece>,
        chunk_bytes: u64,
        /// Sources of which one connection is to carry all: one run at a time.
        one_run: BTreeSet<SourceId>,
        /// Decides the order of the sources; the same seed gives the same order.
        seed: u64,
    },
    Granted {
        ticket: Ticket,
    },
    /// What has arrived so far of the range that runs with this ticket.
    Received {
        ticket: Ticket,
        bytes: u64,
    },
    Ended {
        run: Run,
        outcome: Outcome,
    },
    /// A group's flight plan has so many legs; they are tried from the first again.
    Planned {
        group: GroupId,
        legs: u8,
    },
    /// Only so many of its legs reach this source; until the next plan.
    Reaches {
        group: GroupId,
        source: SourceId,
        legs: u8,
    },
    /// Other sources of pieces, used if the known ones fail. `one_run`: of which one connection carries all.
    Found {
        fetch: FetchId,
        pieces: Vec<(u32, SourceId)>,
        one_run: BTreeSet<SourceId>,
    },
    /// Forget the group.
    Forget {
        group: GroupId,
    },
    /// Chunks that ended on this host so far, as its arbiter reports.
    HostDone {
        done: u64,
    },
    /// The fetch was abandoned, or its objects are known to be lost.
    Abandon {
        fetch: FetchId,
        error: FetchError,
    },
    Tick,
}

/// A range to be moved now, on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub fetch: FetchId,
    pub ticket: Ticket,
    pub group: GroupId,
    pub chunk: u32,
    pub piece: u32,
    pub source: SourceId,
    /// Of the flight plan's legs that reach other hosts, counted from 0.
    pub leg: u8,
    /// Counts the plans of the group: the leg is one of that plan.
    pub plan: u32,
    /// Within the piece.
    pub start: u64,
    pub len: u64,
    /// On a new connection: a kept one had been closed by the server.
    pub fresh: bool,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Whole,
    /// The answer to [`Command::Connect`]: there is a connection, which is kept for the first run.
    Connected,
    /// Some bytes, from the start of the range, arrived and were verified; then this went wrong.
    Broken {
        verified: u64,
        fault: Fault,
    },
    /// There was no connection to ask on.
    NotConnected {
        fault: Fault,
    },
    /// The server had closed the kept connection: no fault of the range, nor of what was to follow it there.
    Stale,
    /// Nothing was tried: the connection on which it was to follow another run is gone.
    Unasked,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Not connected, reset, or silent for too long.
    Connection(String),
    /// What arrived is not what was sent.
    Damaged(String),
    /// The server is at its limit.
    Busy { retry_after: Duration },
    /// The server does not have the object (any more).
    Gone(String),
    /// The server refuses this client or this request.
    Denied(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A chunk of so many bytes wants a slot.
    Want {
        ticket: Ticket,
        group: GroupId,
        member: MemberId,
        bytes: u64,
    },
    /// The chunk no longer wants a slot.
    Withdraw {
        ticket: Ticket,
    },
    /// Its slot is free; the chunk that it was granted for moved so many bytes.
    Done {
        ticket: Ticket,
        moved: u64,
    },
    /// Connect to the source of this run on its leg; request nothing. It holds no slot.
    Connect(Run),
    Run(Run),
    /// End this run now: shut its connection down.
    Cut {
        ticket: Ticket,
    },
    /// A leg could not be connected to this source; the next one is tried.
    FellBack {
        fetch: FetchId,
        source: SourceId,
        leg: u8,
        why: String,
    },
    Finished {
        fetch: FetchId,
        result: Result<(), FetchError>,
        tally: Tally,
    },
    /// Send [`Event::Tick`] then, at the latest.
    WakeAt(Time),
}

/// Statistics of a fetch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    pub bytes: u64,
    /// Chunks that were requested again because they arrived damaged.
    pub refetches: u32,
    /// Ranges resumed after a broken connection.
    pub resumed: u32,
    /// Times that a server was at its limit.
    pub busy: u32,
    /// Most chunks under way at once.
    pub flows_peak: u32,
    /// Sources that bytes came from.
    #[serde(skip)]
    pub used: BTreeSet<SourceId>,
}

/// Why a fetch failed; the text names the cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchError {
    /// No source has the object: it is to be recomputed.
    Lost(String),
    /// No progress for [`defaults::PROGRESS_TIMEOUT`]; what it waited for.
    Unreachable(String),
    Damaged(String),
    Denied(String),
    Cancelled(String),
}

impl std::fmt::Display for FetchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FetchError::Lost(why) => write!(f, "the object is lost: {why}"),
            FetchError::Unreachable(why) => write!(f, "no source could be reached: {why}"),
            FetchError::Damaged(why) => write!(f, "the data arrived damaged repeatedly: {why}"),
            FetchError::Denied(why) => write!(f, "refused: {why}"),
            FetchError::Cancelled(why) => write!(f, "cancelled: {why}"),
        }
    }
}

/// All fetches of a process.
#[derive(Default)]
pub struct Fetches {
    fetches: BTreeMap<FetchId, Fetch>,
    members: BTreeMap<MemberId, Member>,
    groups: BTreeMap<GroupId, Group>,
    sources: BTreeMap<SourceId, Source>,
    tickets: Tickets,
    /// Attempts to connect that are under way, and the member that was served first when one ended last.
    connecting: usize,
    served: MemberId,
    host_done: u64,
    host_done_at: Time,
    /// When this process last received something.
    progress_at: Time,
}

#[derive(Default)]
struct Member {
    /// Oldest first.
    fetches: Vec<FetchId>,
    /// Tickets that wait for a slot.
    asked: usize,
}

#[derive(Default)]
struct Group {
    legs: u8,
    plan: u32,
    /// The leg that each source was last reached by, where it is not the first.
    leg_of: BTreeMap<SourceId, u8>,
    /// Sources that fewer legs reach, and how many.
    fewer: BTreeMap<SourceId, u8>,
    /// Sources that answered the last attempt to connect, and whose connections have not failed since.
    reached: BTreeSet<SourceId>,
    /// Sources that are being connected to, by a leg of this plan.
    connecting: BTreeSet<SourceId>,
    /// Sources that could not be connected to: since when, and why at last.
    unreached: BTreeMap<SourceId, (Time, String)>,
    /// Sources to which a connection has just carried a chunk: going on with them saves a handshake.
    warm: Vec<SourceId>,
    members: u32,
    /// It goes with its last member.
    forgotten: bool,
}

/// Slots that one member requests ahead of time, and all members of a process together: more would only lengthen the
/// queue at the arbiter.
const ASKED_MAX: usize = 64;
const ASKED_IN_ALL: usize = 2048;
/// Attempts to connect of one process at once: each has a thread, for up to 3 s where nobody answers.
const CONNECTING_MAX: usize = 64;
/// Slots that a member may always request, however many members there are.
const ASKED_MIN: usize = 4;
/// How many of those tickets are searched for one to a source with a kept connection.
const WARM_WINDOW: usize = 64;
/// Kept connections that are remembered for that.
const WARM_MAX: usize = 64;

impl Tally {
    /// What two fetches took together.
    pub fn add(&mut self, other: &Tally) {
        self.bytes += other.bytes;
        self.refetches += other.refetches;
        self.resumed += other.resumed;
        self.busy += other.busy;
        self.flows_peak = self.flows_peak.max(other.flows_peak);
        self.used.extend(&other.used);
    }
}

impl Fetches {
    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::Asked { fetch, group, member, pieces, chunk_bytes, one_run, seed } => {
                let new = Fetch::new(now, group, member, &pieces, chunk_bytes, one_run, seed);
                if new.chunks.is_empty() {
                    commands.push(Command::Finished { fetch, result: Ok(()), tally: Tally::default() });
                    return;
                }
                self.fetches.insert(fetch, new);
                let known = self.members.contains_key(&member);
                self.members.entry(member).or_default().fetches.push(fetch);
                let group = self.groups.entry(group).or_default();
                group.members += u32::from(!known);
                group.forgotten = false;
                self.adjust(now, member, commands);
            }
            Event::Granted { ticket } => self.granted(now, ticket, commands),
            Event::Received { ticket, bytes } => self.received(now, ticket, bytes, commands),
            Event::Ended { run, outcome } => self.ended(now, &run, outcome, commands),
            Event::Planned { group, legs } => {
                let group = self.groups.entry(group).or_default();
                group.legs = legs;
                group.plan = group.plan.wrapping_add(1);
                group.leg_of.clear();
                group.fewer.clear();
                group.warm.clear();
                group.reached.clear();
                group.unreached.clear();
                group.connecting.clear();
            }
            Event::Reaches { group, source, legs } => {
                self.groups.entry(group).or_default().fewer.insert(source, legs);
            }
            Event::Found { fetch: id, pieces, one_run } => {
                let Some(fetch) = self.fetches.get_mut(&id) else { return };
                fetch.one_run.extend(one_run);
                pieces.into_iter().for_each(|(piece, source)| fetch.add_source(piece, source));
                let member = fetch.member;
                self.adjust(now, member, commands);
            }
            Event::Forget { group: id } => {
                if let Some(group) = self.groups.get_mut(&id) {
                    group.forgotten = true;
                    if group.members == 0 {
                        self.groups.remove(&id);
                    }
                }
            }
            Event::HostDone { done } => {
                if done != self.host_done {
                    (self.host_done, self.host_done_at) = (done, now);
                }
            }
            Event::Abandon { fetch, error } => self.fail(now, fetch, error, commands),
            Event::Tick => {
                self.check_progress(now, commands);
                let members: Vec<MemberId> = self.members.keys().copied().collect();
                members.into_iter().for_each(|member| self.adjust(now, member, commands));
            }
        }
    }

    /// Chooses a chunk to request on the connection of `run` before that has ended, which takes over its slot: a
    /// connection that waits for each answer before the next request is idle for a round trip per chunk. Only without
    /// contention for the slot; else it is granted again after each chunk.
    pub fn chain(&mut self, now: Time, run: &Run, commands: &mut Vec<Command>) -> Option<Run> {
        let held = self.tickets.get(run.ticket)?;
        if held.chunk != run.chunk || held.next.is_some() || held.cut {
            return None;
        }
        let fetch = self.fetches.get_mut(&run.fetch).filter(|fetch| fetch.failed.is_none())?;
        let plan = self.groups.get(&fetch.group).map_or(0, |group| group.plan);
        // Towards the end, other slots would be idle meanwhile; and a new plan begins with the next chunk.
        if fetch.queued + fetch.asked.len() < (fetch.running - fetch.connecting) as usize || plan != run.plan {
            return None;
        }
        let tickets = &mut self.tickets;
        let chunk = match fetch
            .asked
            .iter()
            .position(|ticket| tickets.get(*ticket).is_some_and(|own| own.source == run.source))
        {
            Some(at) => {
                let ticket = fetch.asked.remove(at).expect("found at that place");
                let held = tickets.remove(ticket).expect("it waits");
                fetch.count(held.source, -1);
                self.members.entry(fetch.member).or_default().asked -= 1;
                commands.push(Command::Withdraw { ticket });
                held.chunk
            }
            None => {
                let group = self.groups.get(&fetch.group)?;
                fetch.next_of(run.source, &group.ways(now, &self.sources, self.connecting))?
            }
        };
        self.tickets.get(run.ticket)?.next = Some(chunk);
        let member = fetch.member;
        let run = Run { fresh: false, ..fetch.run(run.fetch, run.ticket, chunk, run.source, run.leg, run.plan) };
        self.adjust(now, member, commands);
        Some(run)
    }

    /// Chunks that run.
    pub fn running(&self) -> u32 {
        self.fetches.values().map(|fetch| fetch.running).sum()
    }

    /// Nothing is under way and nothing is remembered of what was.
    pub fn is_idle(&self) -> bool {
        self.fetches.is_empty() && self.members.is_empty() && self.tickets.free.len() == self.tickets.slots.len()
    }

    fn granted(&mut self, now: Time, ticket: Ticket, commands: &mut Vec<Command>) {
        self.swap_for_warm(ticket);
        let Some(held) = self.tickets.get(ticket) else {
            commands.push(Command::Done { ticket, moved: 0 });
            return;
        };
        let fetch = self.fetches.get_mut(&held.fetch).expect("a ticket's fetch exists");
        fetch.asked.retain(|own| *own != ticket);
        let member = fetch.member;
        self.members.entry(member).or_default().asked -= 1;
        // Its source may have failed since; then another one, or later.
        fetch.count(held.source, -1);
        let list = fetch.list_of(held.chunk);
        let group = self.groups.entry(fetch.group).or_default();
        let ways = group.ways(now, &self.sources, self.connecting);
        let source = if fetch.may_run(held.source, list, &ways) {
            Some(held.source)
        } else {
            fetch.eligible(list, &ways).ok().filter(|source| ways.is_reached(*source))
        };
        match source {
            Some(source) => {
                fetch.count(source, 1);
                (held.source, held.running) = (source, true);
                (held.watched_at, held.watched_bytes) = (now, 0);
                fetch.running += 1;
                fetch.tally.flows_peak = fetch.tally.flows_peak.max(fetch.running - fetch.connecting);
                let leg = group.leg_to(source);
                let (id, chunk) = (held.fetch, held.chunk);
                commands.push(Command::Run(fetch.run(id, ticket, chunk, source, leg, group.plan)));
            }
            None => {
                let chunk = held.chunk;
                self.tickets.remove(ticket);
                fetch.requeue(chunk);
                commands.push(Command::Done { ticket, moved: 0 });
                self.adjust(now, member, commands);
            }
        }
    }

    /// Where a connection to another source is kept, the chunk for it takes this ticket, if it is as long.
    fn swap_for_warm(&mut self, ticket: Ticket) {
        let Some(&Held { fetch: id, chunk, source, .. }) = self.tickets.get(ticket).map(|held| &*held) else { return };
        let Some(fetch) = self.fetches.get(&id) else { return };
        let Some(warm) = self.groups.get_mut(&fetch.group).and_then(|group| group.warm.pop()) else { return };
        if warm == source {
            return;
        }
        let len = fetch.chunks[chunk as usize].len;
        let other = fetch.asked.iter().take(WARM_WINDOW).copied().find(|other| {
            let fits = |held: &Held| held.source == warm && fetch.chunks[held.chunk as usize].len == len;
            self.tickets.get(*other).is_some_and(|held| fits(held))
        });
        if let Some(other) = other {
            let held = self.tickets.get(other).expect("found just now");
            let theirs = (held.chunk, held.source);
            (held.chunk, held.source) = (chunk, source);
            let held = self.tickets.get(ticket).expect("looked at above");
            (held.chunk, held.source) = theirs;
        }
    }

    fn received(&mut self, now: Time, ticket: Ticket, bytes: u64, commands: &mut Vec<Command>) {
        let Some(held) = self.tickets.get(ticket).filter(|held| held.running && !held.cut) else { return };
        if bytes < held.watched_bytes {
            // Of the next chunk on its connection.
            (held.watched_at, held.watched_bytes) = (now, bytes);
        } else if bytes >= held.watched_bytes + defaults::TRICKLE_BYTES {
            (held.watched_at, held.watched_bytes) = (now, bytes);
            // On a slow link a block takes long; but runs that repeatedly break before the first whole block are no
            // progress.
            if let Some(fetch) = self.fetches.get_mut(&held.fetch) {
                if bytes > defaults::BLOCK_BYTES {
                    fetch.fruitless = 0;
                }
                if fetch.fruitless < defaults::FRUITLESS_MAX {
                    fetch.last_progress = now;
                }
            }
        } else if now.since(held.watched_at) >= defaults::TRICKLE {
            held.cut = true;
            commands.push(Command::Cut { ticket });
        }
    }

    fn ended(&mut self, now: Time, run: &Run, outcome: Outcome, commands: &mut Vec<Command>) {
        let Some(held) = self.tickets.get(run.ticket).filter(|held| held.running && held.chunk == run.chunk) else {
            return;
        };
        let connects = held.connects;
        let Some(fetch) = self.fetches.get_mut(&run.fetch) else { return };
        let slow = std::mem::take(&mut held.cut);
        if outcome == Outcome::Stale {
            // The connection is gone, and what was to follow on it waits again.
            if let Some(next) = held.next.take() {
                fetch.requeue(next);
            }
            if fetch.failed.is_none() {
                commands.push(Command::Run(Run { fresh: true, ..*run }));
                return;
            }
        }
        let chunk = &mut fetch.chunks[run.chunk as usize];
        let (moved, fault, connected) = match outcome {
            Outcome::Whole => (chunk.len, None, true),
            Outcome::Broken { verified, fault } => (verified.min(chunk.len), Some(fault), true),
            Outcome::NotConnected { fault } => (0, Some(fault), false),
            Outcome::Stale | Outcome::Unasked | Outcome::Connected => (0, None, true),
        };
        chunk.start += moved;
        chunk.len -= moved;
        if moved > 0 {
            // Repeated damage at one place comes from the source's memory; at varying places, from the wire.
            chunk.damaged = 0;
        }
        let whole = chunk.len == 0;
        fetch.tally.bytes += moved;
        let in_slot = *held.moved.get_or_insert(moved);
        match held.next.take() {
            Some(next) => {
                (held.chunk, held.watched_at, held.watched_bytes) = (next, now, 0);
            }
            None => {
                self.tickets.remove(run.ticket);
                fetch.running -= 1;
                fetch.count(run.source, -1);
                if connects {
                    fetch.connecting -= 1;
                } else {
                    commands.push(Command::Done { ticket: run.ticket, moved: in_slot });
                }
            }
        }
        let group = self.groups.entry(fetch.group).or_default();
        if connects {
            self.connecting -= 1;
            group.connected(now, run, &fault);
        }
        let source = self.sources.entry(run.source).or_default();
        if moved > 0 {
            self.progress_at = now;
            (fetch.last_progress, fetch.fault, fetch.fruitless) = (now, None, 0);
            fetch.tally.used.insert(run.source);
            source.retry.answered();
        }
        if moved == 0 && connected && matches!(fault, Some(Fault::Connection(_))) {
            fetch.fruitless += 1;
        }
        if whole {
            fetch.unfinished -= 1;
        } else {
            // Next in turn, so that a fetch in order stays nearly in order.
            fetch.requeue(run.chunk);
        }
        let error = match fault {
            None => {
                if whole {
                    group.keep_warm(run.source);
                }
                None
            }
            // Its other runs were cut because of that: no fault of their sources.
            Some(_) if fetch.failed.is_some() => None,
            Some(fault) => {
                if slow {
                    fetch.prefer_others(run.source);
                } else if matches!(fault, Fault::Connection(_)) {
                    group.reached.remove(&run.source);
                }
                let next_leg = (!connected).then(|| group.next_leg(run)).flatten();
                match next_leg {
                    Some(()) => {
                        let why = words(&fault);
                        if !connects {
                            fetch.fault = Some(why.clone());
                        }
                        commands.push(Command::FellBack { fetch: run.fetch, source: run.source, leg: run.leg, why });
                        None
                    }
                    None => {
                        let before = fetch.fault.take();
                        let error = fetch.handle_fault(now, run, source, fault);
                        if connects {
                            // Its group knows it, for all fetches that wait for this source.
                            fetch.fault = before;
                        }
                        error
                    }
                }
            }
        };
        let (member, group) = (fetch.member, fetch.group);
        match error.or(fetch.failed.clone()) {
            Some(error) => self.fail(now, run.fetch, error, commands),
            None if fetch.unfinished == 0 => self.finish(run.fetch, Ok(()), commands),
            None => {}
        }
        if connects {
            self.looked_for(now, group, commands);
        } else {
            self.adjust(now, member, commands);
        }
    }

    /// An attempt to connect has ended: all that waited for it go on.
    fn looked_for(&mut self, now: Time, group: GroupId, commands: &mut Vec<Command>) {
        let full = self.connecting + 1 == CONNECTING_MAX;
        // Others may have waited for their turn to connect.
        let waits = |fetch: &&Fetch| fetch.queued > 0 && (full || fetch.group == group);
        let members: BTreeSet<MemberId> = self.fetches.values().filter(waits).map(|fetch| fetch.member).collect();
        // Not always the same first.
        let mut members: Vec<MemberId> = members.into_iter().collect();
        let first = members.partition_point(|member| *member <= self.served);
        members.rotate_left(first);
        self.served = members.first().copied().unwrap_or(self.served);
        members.into_iter().for_each(|member| self.adjust(now, member, commands));
    }

    fn check_progress(&mut self, now: Time, commands: &mut Vec<Command>) {
        let mut stuck = Vec::new();
        for (id, fetch) in &self.fetches {
            if now.since(fetch.last_progress) < defaults::PROGRESS_TIMEOUT || fetch.failed.is_some() {
                continue;
            }
            let seconds = defaults::PROGRESS_TIMEOUT.as_secs();
            // It waits for slots; or there was no fault, and other fetches of its member have requested all slots that
            // the member may.
            let waits_for_slots = !fetch.asked.is_empty() || fetch.fault.is_none();
            let group = self.groups.get(&fetch.group);
            let unreached = group.filter(|_| fetch.asked.is_empty()).and_then(|group| {
                let found = fetch.unreached(&group.ways(now, &self.sources, self.connecting), &group.unreached);
                found.filter(|(since, _)| now.since(*since) >= defaults::PROGRESS_TIMEOUT)
            });
            let why = if fetch.running > fetch.connecting {
                fetch.fault.clone().unwrap_or_else(|| format!("its sources sent nothing in {seconds} s"))
            } else if let Some((_, why)) = unreached {
                why.clone()
            } else if fetch.connecting > 0 {
                continue;
            } else if waits_for_slots {
                // Others get their chunks: this one's turn comes.
                if now.since(self.host_done_at.max(self.progress_at)) < defaults::PROGRESS_TIMEOUT {
                    continue;
                }
                format!("no receiving slot of this host became free in {seconds} s")
            } else {
                fetch.fault.clone().unwrap_or_else(|| format!("its sources sent nothing in {seconds} s"))
            };
            stuck.push((*id, why));
        }
        for (id, why) in stuck {
            self.fail(now, id, FetchError::Unreachable(why), commands);
        }
    }

    /// Ends a fetch with an error once none of its runs is under way: they write into its memory.
    fn fail(&mut self, now: Time, id: FetchId, error: FetchError, commands: &mut Vec<Command>) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        let member = fetch.member;
        for ticket in std::mem::take(&mut fetch.asked) {
            self.tickets.remove(ticket);
            self.members.entry(member).or_default().asked -= 1;
            commands.push(Command::Withdraw { ticket });
        }
        fetch.clear();
        if fetch.running > 0 {
            if fetch.failed.is_none() {
                fetch.failed = Some(error);
                for (at, (generation, held)) in self.tickets.slots.iter_mut().enumerate() {
                    if let Some(held) = held.as_mut().filter(|held| held.fetch == id && held.running && !held.cut) {
                        held.cut = true;
                        commands.push(Command::Cut { ticket: Ticket::from(*generation) << 32 | at as Ticket });
                    }
                }
            }
            return;
        }
        let error = fetch.failed.take().unwrap_or(error);
        self.finish(id, Err(error), commands);
        self.adjust(now, member, commands);
    }

    fn finish(&mut self, id: FetchId, result: Result<(), FetchError>, commands: &mut Vec<Command>) {
        let fetch = self.fetches.remove(&id).expect("it was there");
        if let Some(member) = self.members.get_mut(&fetch.member) {
            member.fetches.retain(|own| *own != id);
        }
        commands.push(Command::Finished { fetch: id, result, tally: fetch.tally });
        if self.members.get(&fetch.member).is_some_and(|member| member.fetches.is_empty()) {
            self.members.remove(&fetch.member);
            if let Some(group) = self.groups.get_mut(&fetch.group) {
                group.members -= 1;
                if group.members == 0 && group.forgotten {
                    self.groups.remove(&fetch.group);
                }
            }
        }
    }

    /// Requests slots for the chunks that could run now, and a tick when the next source may be retried.
    fn adjust(&mut self, now: Time, id: MemberId, commands: &mut Vec<Command>) {
        let most = asked_max(self.members.len());
        let Some(member) = self.members.get_mut(&id) else { return };
        let mut wake: Option<Time> = None;
        'fetches: for fetch_id in &member.fetches {
            let fetch = self.fetches.get_mut(fetch_id).expect("a member's fetches exist");
            let group = self.groups.entry(fetch.group).or_default();
            while fetch.queued > 0 {
                if member.asked >= most {
                    break 'fetches;
                }
                match fetch.next(&group.ways(now, &self.sources, self.connecting)) {
                    Ok((chunk, source)) => {
                        let connects = !group.reached.contains(&source);
                        let held = Held {
                            fetch: *fetch_id,
                            chunk,
                            source,
                            running: connects,
                            connects,
                            next: None,
                            moved: None,
                            watched_at: now,
                            watched_bytes: 0,
                            cut: false,
                        };
                        let ticket = self.tickets.add(held);
                        fetch.count(source, 1);
                        if connects {
                            fetch.running += 1;
                            fetch.connecting += 1;
                            self.connecting += 1;
                            group.connecting.insert(source);
                            let leg = group.leg_to(source);
                            let run = fetch.run(*fetch_id, ticket, chunk, source, leg, group.plan);
                            commands.push(Command::Connect(run));
                            continue;
                        }
                        fetch.asked.push_back(ticket);
                        member.asked += 1;
                        let bytes = fetch.chunks[chunk as usize].len;
                        commands.push(Command::Want { ticket, group: fetch.group, member: id, bytes });
                    }
                    Err(at) => {
                        wake = match (wake, at) {
                            (Some(one), Some(other)) => Some(one.min(other)),
                            (one, other) => one.or(other),
                        };
                        break;
                    }
                }
            }
        }
        if let Some(at) = wake {
            commands.push(Command::WakeAt(at));
        }
    }
}

impl Group {
    fn ways<'a>(&'a self, now: Time, sources: &'a BTreeMap<SourceId, Source>, connecting: usize) -> Ways<'a> {
        let may_connect = connecting < CONNECTING_MAX;
        Ways { now, sources, reached: &self.reached, connecting: &self.connecting, may_connect }
    }

    /// The leg that a source was last reached by, or the first.
    fn leg_to(&self, source: SourceId) -> u8 {
        self.leg_of.get(&source).copied().unwrap_or(0)
    }

    /// An attempt to connect has ended.
    fn connected(&mut self, now: Time, run: &Run, fault: &Option<Fault>) {
        if run.plan != self.plan {
            return; // that leg is of another plan
        }
        self.connecting.remove(&run.source);
        match fault {
            None => {
                self.reached.insert(run.source);
                self.unreached.remove(&run.source);
                self.keep_warm(run.source);
            }
            Some(fault) => self.unreached.entry(run.source).or_insert((now, String::new())).1 = words(fault),
        }
    }

    fn keep_warm(&mut self, source: SourceId) {
        self.warm.retain(|warm| *warm != source);
        if self.warm.len() == WARM_MAX {
            self.warm.remove(0);
        }
        self.warm.push(source);
    }

    /// The leg of `run` cannot be connected: the next one of the same plan, or, after the last, the first again and later.
    fn next_leg(&mut self, run: &Run) -> Option<()> {
        let current = self.leg_to(run.source);
        if run.plan != self.plan || current > run.leg {
            // Another run has found out before, or there is another plan.
            return Some(());
        }
        if run.leg + 1 < self.fewer.get(&run.source).copied().unwrap_or(self.legs) {
            self.leg_of.insert(run.source, run.leg + 1);
            return Some(());
        }
        self.leg_of.remove(&run.source);
        None
    }
}

fn asked_max(members: usize) -> usize {
    (ASKED_IN_ALL / members.max(1)).clamp(ASKED_MIN, ASKED_MAX)
}

/// The error of a range that arrived too slowly.
pub fn too_slow() -> String {
    let least = units::format_bytes(defaults::TRICKLE_BYTES);
    format!("its source sent less than {least} in {} s", defaults::TRICKLE.as_secs())
}
