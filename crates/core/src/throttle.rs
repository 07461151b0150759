//! The Throttle Controller: one per worker process, runs the flows of every fetch there.
//!
//! A fetch is cut into chunks. Each chunk waits for a slot ([`crate::slots`] gives them out, per host), runs on one
//! connection to one source, and ends whole, broken, or refused; what is broken resumes after its last verified byte,
//! from the same source or another. Events in, commands out; sockets and threads are the caller's.

use crate::defaults;
use crate::random::SplitMix;
use crate::types::JobId;
use crate::units::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

pub type FetchId = u64;
/// A server that objects can be fetched from; numbered by the caller.
pub type SourceId = u32;

/// A part of an object that a fetch brings.
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
        job: JobId,
        pieces: Vec<Piece>,
        chunk_bytes: u64,
        /// Most runs on one source at once; one, where a connection is to carry all.
        runs_per_source: u32,
        /// Decides the order of the sources; the same seed gives the same order.
        seed: u64,
    },
    /// The host's arbiter gave this process a slot.
    Granted {
        job: JobId,
    },
    /// A run is over.
    Ended {
        run: Run,
        outcome: Outcome,
    },
    /// Nobody waits for this fetch any more, or its objects are known to be lost.
    Abandon {
        fetch: FetchId,
        error: FetchError,
    },
    Tick,
}

/// A range to be moved now, on one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub fetch: FetchId,
    pub job: JobId,
    pub chunk: usize,
    pub piece: usize,
    pub source: SourceId,
    /// Within the piece.
    pub start: u64,
    pub len: u64,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Whole,
    /// Some bytes, from the start of the range, arrived and were verified; then this went wrong.
    Broken {
        verified: u64,
        fault: Fault,
    },
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
    /// Wait for so many slots more, each for about so many bytes.
    Want {
        job: JobId,
        bytes: u64,
        slots: u32,
    },
    /// Wait for so many slots less.
    Withdraw {
        job: JobId,
        slots: u32,
    },
    GiveBack {
        job: JobId,
        granted: u64,
        moved: u64,
    },
    Run(Run),
    Finished {
        fetch: FetchId,
        result: Result<(), FetchError>,
        tally: Tally,
    },
    /// Send [`Event::Tick`] then, at the latest.
    WakeAt(Time),
}

/// What a fetch took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    pub bytes: u64,
    /// Chunks that had to be asked for again because they arrived damaged.
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
    /// No progress within the patience; the last cause.
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
            FetchError::Damaged(why) => write!(f, "the data arrived damaged again and again: {why}"),
            FetchError::Denied(why) => write!(f, "refused: {why}"),
            FetchError::Cancelled(why) => write!(f, "cancelled: {why}"),
        }
    }
}

#[derive(Default)]
pub struct ThrottleController {
    fetches: BTreeMap<FetchId, Fetch>,
    jobs: BTreeMap<JobId, Job>,
    sources: BTreeMap<SourceId, Source>,
    patience: Option<Duration>,
}

struct Fetch {
    job: JobId,
    pieces: Vec<Piece>,
    chunks: Vec<Chunk>,
    /// Chunks that wait, in the order in which they are tried.
    waiting: VecDeque<usize>,
    running: u32,
    runs_per_source: u32,
    running_on: BTreeMap<SourceId, u32>,
    unfinished: usize,
    last_progress: Time,
    last_fault: Option<String>,
    failed: Option<FetchError>,
    tally: Tally,
}

struct Chunk {
    piece: usize,
    start: u64,
    len: u64,
    damaged: u32,
    /// Charged when the slot was granted in which this chunk is under way.
    granted: u64,
    /// Bytes that earlier chunks moved in that slot.
    moved_before: u64,
    /// The chunk that takes the slot over when this one ends.
    next: Option<usize>,
}

#[derive(Default)]
struct Job {
    /// Oldest first.
    fetches: Vec<FetchId>,
    /// Slots asked for and not granted yet.
    wanted: usize,
    /// Sources to which this job has just used a connection: going on with them saves a handshake.
    warm: Vec<SourceId>,
}

#[derive(Default)]
struct Source {
    failures: u32,
    not_before: Time,
}

/// Slots that one job asks its arbiter for ahead of time; more would only lengthen the queue there.
const WANTED_MAX: usize = 64;
/// Waiting chunks that are looked at for that: they are in the order of their turns, so the first of each source are there.
const SCANNED_MAX: usize = 1024;
/// How far into the waiting chunks one for a warm connection is looked for.
const WARM_WINDOW: usize = 64;

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

impl ThrottleController {
    /// With another patience than [`defaults::PROGRESS_TIMEOUT`].
    pub fn with_patience(patience: Duration) -> ThrottleController {
        ThrottleController { patience: Some(patience), ..ThrottleController::default() }
    }

    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Command> {
        let mut commands = Vec::new();
        match event {
            Event::Asked { fetch, job, pieces, chunk_bytes, runs_per_source, seed } => {
                self.ask(now, fetch, &job, pieces, chunk_bytes, runs_per_source, seed, &mut commands);
                self.adjust(now, &job, &mut commands);
            }
            Event::Granted { job } => self.granted(now, &job, &mut commands),
            Event::Ended { run, outcome } => {
                self.ended(now, &run, outcome, &mut commands);
                self.adjust(now, &run.job, &mut commands);
            }
            Event::Abandon { fetch, error } => self.fail(now, fetch, error, &mut commands),
            Event::Tick => {
                self.check_progress(now, &mut commands);
                let jobs: Vec<JobId> = self.jobs.keys().cloned().collect();
                jobs.iter().for_each(|job| self.adjust(now, job, &mut commands));
            }
        }
        commands
    }

    /// A chunk that can be asked for on the connection of `run` before that has ended, and that takes over its slot: a
    /// connection that waits for each answer before it asks again stands idle for a round trip per chunk. For slots that
    /// nobody else waits for; others are given out anew after each chunk.
    pub fn ahead(&mut self, now: Time, run: &Run) -> Option<Run> {
        let fetch = self.fetches.get_mut(&run.fetch).filter(|fetch| fetch.failed.is_none())?;
        // Towards the end the other slots would stand empty for it.
        if fetch.waiting.len() < fetch.running as usize {
            return None;
        }
        let sources = &self.sources;
        let same = |index: &usize| eligible(now, fetch.piece(*index), sources, |_| false) == Ok(run.source);
        let at = fetch.waiting.iter().take(WARM_WINDOW).position(same)?;
        let index = fetch.waiting.remove(at).expect("a place in the queue");
        fetch.chunks[run.chunk].next = Some(index);
        fetch.chunks[index].next = None;
        Some(fetch.run(run.fetch, index, run.source))
    }

    pub fn running(&self) -> u32 {
        self.fetches.values().map(|fetch| fetch.running).sum()
    }

    #[allow(clippy::too_many_arguments)]
    fn ask(
        &mut self,
        now: Time,
        id: FetchId,
        job: &JobId,
        pieces: Vec<Piece>,
        chunk_bytes: u64,
        runs_per_source: u32,
        seed: u64,
        commands: &mut Vec<Command>,
    ) {
        let mut chunks = Vec::new();
        for (piece, own) in pieces.iter().enumerate() {
            let mut start = 0;
            while start < own.len {
                let len = chunk_bytes.min(own.len - start);
                chunks.push(Chunk { piece, start, len, damaged: 0, granted: 0, moved_before: 0, next: None });
                start += len;
            }
        }
        if chunks.is_empty() {
            commands.push(finished(id, Ok(()), Tally::default()));
            return;
        }
        let waiting = order_of_sources(&pieces, &chunks, seed);
        let fetch = Fetch {
            job: job.clone(),
            unfinished: chunks.len(),
            pieces,
            chunks,
            waiting,
            running: 0,
            runs_per_source: runs_per_source.max(1),
            running_on: BTreeMap::new(),
            last_progress: now,
            last_fault: None,
            failed: None,
            tally: Tally::default(),
        };
        self.fetches.insert(id, fetch);
        self.jobs.entry(job.clone()).or_default().fetches.push(id);
    }

    fn granted(&mut self, now: Time, job: &JobId, commands: &mut Vec<Command>) {
        let Some(own) = self.jobs.get_mut(job) else {
            commands.push(Command::GiveBack { job: job.clone(), granted: 0, moved: 0 });
            return;
        };
        own.wanted = own.wanted.saturating_sub(1);
        let warm = own.warm.pop();
        for id in own.fetches.clone() {
            let fetch = self.fetches.get_mut(&id).expect("a job's fetches exist");
            let Some((at, source)) = pick(now, fetch, &self.sources, warm) else { continue };
            let index = fetch.waiting.remove(at).expect("pick names a place in the queue");
            fetch.running += 1;
            *fetch.running_on.entry(source).or_default() += 1;
            fetch.tally.flows_peak = fetch.tally.flows_peak.max(fetch.running);
            let chunk = &mut fetch.chunks[index];
            (chunk.granted, chunk.moved_before, chunk.next) = (chunk.len, 0, None);
            commands.push(Command::Run(fetch.run(id, index, source)));
            return;
        }
        // Meanwhile all that waits has to wait for its source.
        commands.push(Command::GiveBack { job: job.clone(), granted: 0, moved: 0 });
        self.adjust(now, job, commands);
    }

    fn ended(&mut self, now: Time, run: &Run, outcome: Outcome, commands: &mut Vec<Command>) {
        let Some(fetch) = self.fetches.get_mut(&run.fetch) else {
            commands.push(Command::GiveBack { job: run.job.clone(), granted: run.len, moved: run.len });
            return;
        };
        let chunk = &mut fetch.chunks[run.chunk];
        let (moved, unasked, fault) = match outcome {
            Outcome::Whole => (chunk.len, false, None),
            Outcome::Broken { verified, fault } => (verified.min(chunk.len), false, Some(fault)),
            Outcome::Unasked => (0, true, None),
        };
        let (granted, moved_in_slot, next) = (chunk.granted, chunk.moved_before + moved, chunk.next.take());
        chunk.start += moved;
        chunk.len -= moved;
        fetch.tally.bytes += moved;
        match next {
            Some(next) => (fetch.chunks[next].granted, fetch.chunks[next].moved_before) = (granted, moved_in_slot),
            None => {
                fetch.running -= 1;
                *fetch.running_on.entry(run.source).or_default() -= 1;
                commands.push(Command::GiveBack { job: run.job.clone(), granted, moved: moved_in_slot });
            }
        }
        let source = self.sources.entry(run.source).or_default();
        if moved > 0 {
            fetch.last_progress = now;
            fetch.tally.used.insert(run.source);
            source.failures = 0;
        }
        let error = match fault {
            None if unasked => {
                fetch.waiting.push_front(run.chunk);
                None
            }
            None => {
                fetch.unfinished -= 1;
                if let Some(job) = self.jobs.get_mut(&run.job) {
                    job.warm.retain(|warm| *warm != run.source);
                    job.warm.push(run.source);
                }
                None
            }
            Some(fault) => {
                // Next in turn, so that a fetch in order stays nearly in order.
                fetch.waiting.push_front(run.chunk);
                handle_fault(now, fetch, run, source, fault)
            }
        };
        match error.or(fetch.failed.clone()) {
            Some(error) => self.fail(now, run.fetch, error, commands),
            None if fetch.unfinished == 0 => self.finish(run.fetch, Ok(()), commands),
            None => {}
        }
    }

    fn check_progress(&mut self, now: Time, commands: &mut Vec<Command>) {
        let patience = self.patience.unwrap_or(defaults::PROGRESS_TIMEOUT);
        let tired: Vec<_> = self
            .fetches
            .iter()
            .filter(|(_, fetch)| fetch.running == 0 && now.since(fetch.last_progress) >= patience)
            .filter_map(|(id, fetch)| Some((*id, fetch.last_fault.clone()?)))
            .collect();
        for (id, fault) in tired {
            self.fail(now, id, FetchError::Unreachable(fault), commands);
        }
    }

    /// Ends a fetch with an error once none of its runs is under way: they write into its memory.
    fn fail(&mut self, now: Time, id: FetchId, error: FetchError, commands: &mut Vec<Command>) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        fetch.waiting.clear();
        if fetch.running > 0 {
            fetch.failed.get_or_insert(error);
            return;
        }
        let error = fetch.failed.take().unwrap_or(error);
        let job = fetch.job.clone();
        self.finish(id, Err(error), commands);
        self.adjust(now, &job, commands);
    }

    fn finish(&mut self, id: FetchId, result: Result<(), FetchError>, commands: &mut Vec<Command>) {
        let fetch = self.fetches.remove(&id).expect("it was there");
        if let Some(job) = self.jobs.get_mut(&fetch.job) {
            job.fetches.retain(|own| *own != id);
        }
        commands.push(finished(id, result, fetch.tally));
    }

    /// Asks for as many slots as chunks could run now, and for a tick when the next source may be tried again.
    fn adjust(&mut self, now: Time, id: &JobId, commands: &mut Vec<Command>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let mut ready = 0;
        let mut next_bytes = 0;
        let mut wake: Option<Time> = None;
        for fetch in job.fetches.iter().filter_map(|fetch| self.fetches.get(fetch)) {
            // Slots that the source of a chunk could not use would only be given back.
            let mut runs = fetch.running_on.clone();
            for &index in fetch.waiting.iter().take(SCANNED_MAX) {
                let taken = |source| runs.get(&source).is_some_and(|runs| *runs >= fetch.runs_per_source);
                match eligible(now, fetch.piece(index), &self.sources, taken) {
                    Ok(source) => {
                        *runs.entry(source).or_default() += 1;
                        ready += 1;
                        next_bytes = fetch.chunks[index].len;
                    }
                    Err(Some(at)) => wake = Some(wake.map_or(at, |wake| wake.min(at))),
                    Err(None) => {}
                }
                if ready >= WANTED_MAX {
                    break;
                }
            }
        }
        let ready = ready.min(WANTED_MAX);
        if job.wanted < ready {
            let slots = (ready - job.wanted) as u32;
            commands.push(Command::Want { job: id.clone(), bytes: next_bytes, slots });
        } else if job.wanted > ready {
            commands.push(Command::Withdraw { job: id.clone(), slots: (job.wanted - ready) as u32 });
        }
        job.wanted = ready;
        if let Some(at) = wake {
            commands.push(Command::WakeAt(at));
        }
        if job.fetches.is_empty() && job.wanted == 0 {
            self.jobs.remove(id);
        }
    }
}

impl Fetch {
    fn piece(&self, chunk: usize) -> &Piece {
        &self.pieces[self.chunks[chunk].piece]
    }

    fn takes_no_more(&self, source: SourceId) -> bool {
        self.running_on.get(&source).is_some_and(|runs| *runs >= self.runs_per_source)
    }

    fn run(&self, fetch: FetchId, index: usize, source: SourceId) -> Run {
        let Chunk { piece, start, len, .. } = self.chunks[index];
        Run { fetch, job: self.job.clone(), chunk: index, piece, source, start, len }
    }
}

/// A new order for every fetch, source by source: receivers that start together do not ask the same sender first
/// (spark#1549), and the chunks of one source follow one another on one connection.
fn order_of_sources(pieces: &[Piece], chunks: &[Chunk], seed: u64) -> VecDeque<usize> {
    let mut random = SplitMix(seed);
    let mut rank: BTreeMap<SourceId, u64> = BTreeMap::new();
    for piece in pieces {
        if let Some(&source) = piece.sources.first() {
            rank.entry(source).or_insert_with(|| random.next());
        }
    }
    let mut order: Vec<usize> = (0..chunks.len()).collect();
    let mut nth: BTreeMap<SourceId, u64> = BTreeMap::new();
    let key: Vec<(u64, u64)> = chunks
        .iter()
        .map(|chunk| {
            let source = pieces[chunk.piece].sources.first().copied().unwrap_or_default();
            let turn = nth.entry(source).or_default();
            *turn += 1;
            (*turn, rank.get(&source).copied().unwrap_or_default())
        })
        .collect();
    order.sort_by_key(|&index| key[index]);
    order.into()
}

/// The source to be asked for this chunk now, or when the first may be asked; `None`: not before a run ends.
fn eligible(
    now: Time,
    piece: &Piece,
    sources: &BTreeMap<SourceId, Source>,
    taken: impl Fn(SourceId) -> bool,
) -> Result<SourceId, Option<Time>> {
    let not_before = |source: &SourceId| sources.get(source).map_or(Time(0), |own| own.not_before);
    let mut all = piece.sources.iter().filter(|source| !taken(**source));
    // The first in order that has not just failed.
    let free = all.clone().find(|source| not_before(source) <= now);
    free.copied().ok_or_else(|| all.by_ref().map(not_before).min())
}

/// The place in the queue of the chunk to run now, and its source: one for the warm connection if there is one near.
fn pick(
    now: Time,
    fetch: &Fetch,
    sources: &BTreeMap<SourceId, Source>,
    warm: Option<SourceId>,
) -> Option<(usize, SourceId)> {
    let waiting = fetch.waiting.iter().enumerate();
    let ready = waiting.filter_map(|(at, &index)| {
        Some((at, eligible(now, fetch.piece(index), sources, |source| fetch.takes_no_more(source)).ok()?))
    });
    let mut first = None;
    for (at, source) in ready.take(WARM_WINDOW) {
        if warm.is_none_or(|warm| warm == source) {
            return Some((at, source));
        }
        first.get_or_insert((at, source));
    }
    first
}

/// What a fault means for the chunk, its source and the fetch; an error where there is no way on.
fn handle_fault(now: Time, fetch: &mut Fetch, run: &Run, source: &mut Source, fault: Fault) -> Option<FetchError> {
    let mut back_off = |why: String| {
        let wait = defaults::RETRY_FIRST.saturating_mul(1 << source.failures.min(10)).min(defaults::RETRY_MAX);
        source.failures += 1;
        source.not_before = now + wait;
        fetch.last_fault = Some(why);
    };
    match fault {
        Fault::Connection(why) => {
            fetch.tally.resumed += 1;
            back_off(why);
            None
        }
        Fault::Damaged(why) => {
            fetch.tally.refetches += 1;
            let chunk = &mut fetch.chunks[run.chunk];
            chunk.damaged += 1;
            // What one source damages another may have whole.
            let sources = &mut fetch.pieces[run.piece].sources;
            if sources.len() > 1 {
                sources.retain(|own| *own != run.source);
            }
            fetch.last_fault = Some(why.clone());
            (chunk.damaged >= defaults::CORRUPT_MAX).then_some(FetchError::Damaged(why))
        }
        Fault::Busy { retry_after } => {
            fetch.tally.busy += 1;
            source.not_before = now + retry_after;
            fetch.last_fault = Some("every server that has it is at its limit".into());
            None
        }
        Fault::Gone(_) | Fault::Denied(_) => {
            let (why, error) = match fault {
                Fault::Gone(why) => (why.clone(), FetchError::Lost(why)),
                Fault::Denied(why) => (why.clone(), FetchError::Denied(why)),
                _ => unreachable!("matched above"),
            };
            let sources = &mut fetch.pieces[run.piece].sources;
            // Another chunk of the piece may have left this source before.
            sources.retain(|own| *own != run.source);
            fetch.last_fault = Some(why);
            sources.is_empty().then_some(error)
        }
    }
}

fn finished(fetch: FetchId, result: Result<(), FetchError>, tally: Tally) -> Command {
    Command::Finished { fetch, result, tally }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Grants every wanted slot at once and answers every run by `reply`, until the fetch is over.
    fn play(pieces: &[Piece], mut reply: impl FnMut(&Run) -> Outcome) -> (Result<(), FetchError>, Tally, Vec<Run>) {
        let mut throttle = ThrottleController::default();
        let mut now = Time(0);
        let job = JobId::from("job");
        let asked = Event::Asked {
            fetch: 1,
            job: job.clone(),
            pieces: pieces.to_vec(),
            chunk_bytes: 4,
            runs_per_source: 9,
            seed: 7,
        };
        let mut queue: VecDeque<Command> = throttle.handle(now, asked).into();
        let mut runs = Vec::new();
        loop {
            let events = match queue.pop_front() {
                Some(Command::Want { job, slots, .. }) => vec![Event::Granted { job }; slots as usize],
                Some(Command::Run(run)) => {
                    runs.push(run.clone());
                    let outcome = reply(&run);
                    vec![Event::Ended { run, outcome }]
                }
                Some(Command::Finished { result, tally, .. }) => return (result, tally, runs),
                Some(Command::WakeAt(at)) if queue.is_empty() => {
                    now = now.max(at);
                    vec![Event::Tick]
                }
                Some(_) => vec![],
                None => {
                    now = now + Duration::from_secs(1);
                    vec![Event::Tick]
                }
            };
            for event in events {
                queue.extend(throttle.handle(now, event));
            }
        }
    }

    fn piece(len: u64, sources: &[SourceId]) -> Piece {
        Piece { len, sources: sources.to_vec() }
    }

    fn broken(verified: u64, why: &str) -> Outcome {
        Outcome::Broken { verified, fault: Fault::Connection(why.into()) }
    }

    #[test]
    fn every_byte_is_asked_for_once() {
        let (result, tally, runs) = play(&[piece(10, &[1]), piece(0, &[1]), piece(4, &[2])], |_| Outcome::Whole);
        assert_eq!(result, Ok(()));
        assert_eq!(tally.bytes, 14);
        let mut ranges: Vec<_> = runs.iter().map(|run| (run.piece, run.start, run.len)).collect();
        ranges.sort_unstable();
        assert_eq!(ranges, [(0, 0, 4), (0, 4, 4), (0, 8, 2), (2, 0, 4)]);
    }

    #[test]
    fn a_broken_range_resumes_after_its_last_verified_byte() {
        let mut first = true;
        let (result, tally, runs) =
            play(&[piece(4, &[1])], |_| if std::mem::take(&mut first) { broken(3, "reset") } else { Outcome::Whole });
        assert_eq!(result, Ok(()));
        assert_eq!((tally.bytes, tally.resumed), (4, 1));
        assert_eq!((runs[1].start, runs[1].len), (3, 1));
    }

    #[test]
    fn a_source_that_fails_is_left_for_another() {
        let (result, _, runs) =
            play(&[piece(4, &[1, 2])], |run| if run.source == 1 { broken(0, "refused") } else { Outcome::Whole });
        assert_eq!(result, Ok(()));
        assert_eq!(runs.last().unwrap().source, 2);
    }

    #[test]
    fn what_one_source_damages_comes_from_another() {
        let damaged = || Outcome::Broken { verified: 0, fault: Fault::Damaged("checksum".into()) };
        let (result, tally, runs) =
            play(&[piece(4, &[1, 2])], |run| if run.source == 1 { damaged() } else { Outcome::Whole });
        assert_eq!((result, tally.refetches, runs.len()), (Ok(()), 1, 2));
        assert!(tally.used.iter().eq([&2]), "{tally:?}");
    }

    #[test]
    fn an_object_that_nobody_has_is_lost() {
        let gone = |_: &Run| Outcome::Broken { verified: 0, fault: Fault::Gone("no such object".into()) };
        let (result, _, runs) = play(&[piece(4, &[1, 2])], gone);
        assert_eq!(result, Err(FetchError::Lost("no such object".into())));
        assert_eq!(runs.len(), 2, "both were asked");
    }

    #[test]
    fn a_second_chunk_that_finds_a_source_gone_goes_on_to_the_next() {
        let gone = |run: &Run| match run.source {
            1 => Outcome::Broken { verified: 0, fault: Fault::Gone("no such object".into()) },
            _ => Outcome::Whole,
        };
        // Both chunks are under way when the first answer comes.
        let mut throttle = ThrottleController::default();
        let job = JobId::from("job");
        let pieces = vec![piece(8, &[1, 2])];
        throttle.handle(
            Time(0),
            Event::Asked { fetch: 1, job: job.clone(), pieces, chunk_bytes: 4, runs_per_source: 9, seed: 0 },
        );
        let mut queue: VecDeque<Command> = VecDeque::new();
        for _ in 0..2 {
            queue.extend(throttle.handle(Time(0), Event::Granted { job: job.clone() }));
        }
        let mut result = None;
        while let Some(command) = queue.pop_front() {
            match command {
                Command::Run(run) => {
                    let outcome = gone(&run);
                    queue.extend(throttle.handle(Time(0), Event::Ended { run, outcome }));
                }
                Command::Want { job, slots, .. } => {
                    (0..slots)
                        .for_each(|_| queue.extend(throttle.handle(Time(0), Event::Granted { job: job.clone() })));
                }
                Command::Finished { result: done, .. } => result = Some(done),
                _ => {}
            }
        }
        assert_eq!(result, Some(Ok(())));
    }

    #[test]
    fn patience_ends_and_the_cause_is_named() {
        let (result, tally, _) = play(&[piece(4, &[1])], |_| broken(0, "connection refused"));
        assert_eq!(result, Err(FetchError::Unreachable("connection refused".into())));
        assert!(tally.resumed > 10);
    }

    #[test]
    fn damaged_chunks_are_fetched_again_and_counted_but_not_for_ever() {
        let damaged = || Outcome::Broken { verified: 0, fault: Fault::Damaged("checksum".into()) };
        let mut left = 3;
        let (result, tally, _) = play(&[piece(4, &[1])], |_| {
            left -= 1;
            if left > 0 { damaged() } else { Outcome::Whole }
        });
        assert_eq!((result, tally.refetches), (Ok(()), 2));
        let (result, tally, _) = play(&[piece(4, &[1])], |_| damaged());
        assert_eq!(result, Err(FetchError::Damaged("checksum".into())));
        assert_eq!(tally.refetches, defaults::CORRUPT_MAX);
    }

    #[test]
    fn a_busy_server_gives_its_slot_to_another_source() {
        let (result, tally, runs) = play(&[piece(4, &[1]), piece(4, &[2])], {
            let mut refused = false;
            move |run| {
                if run.source == 1 && !std::mem::replace(&mut refused, true) {
                    return Outcome::Broken {
                        verified: 0,
                        fault: Fault::Busy { retry_after: Duration::from_millis(20) },
                    };
                }
                Outcome::Whole
            }
        });
        assert_eq!((result, tally.busy), (Ok(()), 1));
        assert_eq!(runs.len(), 3);
    }

    #[test]
    fn a_fetch_that_failed_waits_for_its_runs_and_leaves_no_slot_behind() {
        let mut throttle = ThrottleController::default();
        let job = JobId::from("job");
        let asked = Event::Asked {
            fetch: 1,
            job: job.clone(),
            pieces: vec![piece(12, &[1])],
            chunk_bytes: 4,
            runs_per_source: 9,
            seed: 0,
        };
        assert!(matches!(throttle.handle(Time(0), asked)[..], [Command::Want { slots: 3, .. }]));
        let runs: Vec<Run> = (0..2)
            .flat_map(|_| throttle.handle(Time(0), Event::Granted { job: job.clone() }))
            .filter_map(|command| if let Command::Run(run) = command { Some(run) } else { None })
            .collect();
        let abandon = Event::Abandon { fetch: 1, error: FetchError::Cancelled("interrupted".into()) };
        assert!(throttle.handle(Time(0), abandon).is_empty(), "two runs still write");
        let mut commands = Vec::new();
        for run in runs {
            commands.extend(throttle.handle(Time(0), Event::Ended { run, outcome: Outcome::Whole }));
        }
        let count = |wanted: fn(&Command) -> bool| commands.iter().filter(|command| wanted(command)).count();
        assert_eq!(count(|command| matches!(command, Command::GiveBack { .. })), 2);
        assert_eq!(count(|command| matches!(command, Command::Withdraw { .. })), 1);
        assert_eq!(count(|command| matches!(command, Command::Finished { result: Err(_), .. })), 1);
        assert_eq!(throttle.running(), 0);
    }

    #[test]
    fn one_run_at_a_time_goes_to_a_source_whose_connection_carries_all() {
        let mut throttle = ThrottleController::default();
        let job = JobId::from("job");
        let pieces = vec![piece(12, &[1]), piece(12, &[2])];
        let asked = Event::Asked { fetch: 1, job: job.clone(), pieces, chunk_bytes: 4, runs_per_source: 1, seed: 0 };
        let wanted = throttle.handle(Time(0), asked);
        assert!(matches!(wanted[..], [Command::Want { slots: 2, .. }]), "{wanted:?}");
        let mut runs: Vec<Run> = (0..2)
            .flat_map(|_| throttle.handle(Time(0), Event::Granted { job: job.clone() }))
            .filter_map(|command| if let Command::Run(run) = command { Some(run) } else { None })
            .collect();
        runs.sort_by_key(|run| run.source);
        assert_eq!(runs.iter().map(|run| run.source).collect::<Vec<_>>(), [1, 2]);
        let ahead = throttle.ahead(Time(0), &runs[0]).expect("the next on the same connection");
        assert_eq!(ahead.source, 1);
        throttle.handle(Time(0), Event::Ended { run: runs[0].clone(), outcome: Outcome::Whole });
        let ended = throttle.handle(Time(0), Event::Ended { run: ahead, outcome: Outcome::Whole });
        assert!(ended.iter().any(|command| matches!(command, Command::Want { slots: 1, .. })), "{ended:?}");
    }

    #[test]
    fn chunks_that_follow_on_one_connection_share_its_slot() {
        let mut throttle = ThrottleController::default();
        let job = JobId::from("job");
        let asked = Event::Asked {
            fetch: 1,
            job: job.clone(),
            pieces: vec![piece(12, &[1])],
            chunk_bytes: 4,
            runs_per_source: 9,
            seed: 0,
        };
        throttle.handle(Time(0), asked);
        let mut granted = throttle.handle(Time(0), Event::Granted { job: job.clone() });
        let Some(Command::Run(first)) = granted.pop() else { panic!("{granted:?}") };
        let second = throttle.ahead(Time(0), &first).expect("it waits for the same source");
        assert_eq!((second.start, throttle.running()), (4, 1));
        let ended = throttle.handle(Time(0), Event::Ended { run: first, outcome: Outcome::Whole });
        assert!(!ended.iter().any(|command| matches!(command, Command::GiveBack { .. })), "{ended:?}");
        let third = throttle.ahead(Time(0), &second).expect("one more");
        let broken = Event::Ended { run: second.clone(), outcome: broken(3, "reset") };
        throttle.handle(Time(0), broken);
        // The connection went with the second chunk: the third was never begun.
        let ended = throttle.handle(Time(0), Event::Ended { run: third, outcome: Outcome::Unasked });
        assert!(ended.contains(&Command::GiveBack { job: job.clone(), granted: 4, moved: 7 }), "{ended:?}");
        assert_eq!(throttle.running(), 0);
        let tick = throttle.handle(Time(1 << 32), Event::Tick);
        assert!(tick.iter().any(|command| matches!(command, Command::Want { .. })), "{tick:?}");
    }
}
