//! One fetch: which of its chunks is requested next from which source, and how it handles faults.

use super::{Fault, FetchError, FetchId, Piece, Run, SourceId, Tally};
use crate::defaults;
use crate::host::retry::Retry;
use crate::host::{GroupId, MemberId, Ticket};
use crate::random::SplitMix;
use crate::units::Time;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub struct Fetch {
    pub group: GroupId,
    pub member: MemberId,
    pieces: Vec<OfPiece>,
    pub lists: Vec<Vec<SourceId>>,
    /// The number of each list. After [`Fetch::prefer_others`] two may be alike: it names one of them.
    numbers: BTreeMap<Vec<SourceId>, u32>,
    pub chunks: Vec<Chunk>,
    /// Of each list, the chunks that wait and have no ticket, in the order in which they are tried. Chunks with the same
    /// sources are together, so that a source with a retry delay does not hide others.
    queues: Vec<Queue>,
    /// Lists in the order of their turns, and the next one.
    pub turns: Vec<u32>,
    pub turn: usize,
    pub queued: usize,
    /// Chunks that wait for a slot, oldest first.
    pub asked: VecDeque<Ticket>,
    pub running: u32,
    /// Of those, attempts to connect.
    pub connecting: u32,
    /// Chunks that wait for a slot or run, by source.
    pub on_source: BTreeMap<SourceId, u32>,
    /// Sources that have one run at a time.
    pub one_run: BTreeSet<SourceId>,
    pub unfinished: usize,
    random: SplitMix,
    pub last_progress: Time,
    /// Ranges in a row that broke before a block of them was whole.
    pub fruitless: u32,
    /// The last fault since there was progress.
    pub fault: Option<String>,
    pub failed: Option<FetchError>,
    pub tally: Tally,
}

/// A queue is compacted from this many entries on that do not count.
const COMPACTED_FROM: usize = 64;

/// A piece: its list of sources, and its chunks.
struct OfPiece {
    list: u32,
    first: u32,
    chunks: u32,
}

/// Chunks with the same sources. When a piece gets other sources, its chunks leave their entries behind: to take them out
/// would be a walk through all that wait. An entry counts if its chunk is queued and has this list.
#[derive(Default)]
struct Queue {
    entries: VecDeque<u32>,
    /// Entries that count, each chunk once.
    waiting: usize,
}

#[derive(Clone, Copy)]
pub struct Chunk {
    pub piece: u32,
    pub start: u64,
    pub len: u64,
    /// It waits and has no ticket.
    queued: bool,
    /// Attempts in a row that arrived damaged before any block of what is missing was whole.
    pub damaged: u32,
}

#[derive(Default)]
pub struct Source {
    pub retry: Retry,
    pub not_before: Time,
}

/// How the sources of a group can be asked now.
pub struct Ways<'a> {
    pub now: Time,
    pub sources: &'a BTreeMap<SourceId, Source>,
    /// Sources that answered the last attempt to connect.
    pub reached: &'a BTreeSet<SourceId>,
    pub connecting: &'a BTreeSet<SourceId>,
    /// Whether this process may begin another attempt.
    pub may_connect: bool,
}

impl Queue {
    fn push(&mut self, chunk: u32) {
        self.entries.push_back(chunk);
        self.waiting += 1;
    }
}

impl Ways<'_> {
    /// A chunk for this source may ask for a slot, if the source is reached, or else for a connection.
    ///
    /// # Errors
    /// When it may; `None`: not before a run or an attempt to connect ends.
    fn ready(&self, source: SourceId) -> Result<(), Option<Time>> {
        let not_before = self.sources.get(&source).map_or(Time(0), |own| own.not_before);
        if not_before > self.now {
            return Err(Some(not_before));
        }
        let may = self.reached.contains(&source) || self.may_connect && !self.connecting.contains(&source);
        may.then_some(()).ok_or(None)
    }

    pub fn is_reached(&self, source: SourceId) -> bool {
        self.reached.contains(&source)
    }

    /// It failed when it was tried last.
    fn is_failing(&self, source: SourceId) -> bool {
        self.sources.get(&source).is_some_and(|own| own.retry.is_failing())
    }
}

impl Fetch {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        now: Time,
        group: GroupId,
        member: MemberId,
        pieces: &[Piece],
        chunk_bytes: u64,
        one_run: BTreeSet<SourceId>,
        seed: u64,
    ) -> Fetch {
        let mut fetch = Fetch {
            group,
            member,
            pieces: Vec::with_capacity(pieces.len()),
            lists: Vec::new(),
            numbers: BTreeMap::new(),
            chunks: Vec::new(),
            queues: Vec::new(),
            turns: Vec::new(),
            turn: 0,
            queued: 0,
            asked: VecDeque::new(),
            running: 0,
            connecting: 0,
            on_source: BTreeMap::new(),
            one_run,
            unfinished: 0,
            random: SplitMix(seed),
            last_progress: now,
            fruitless: 0,
            fault: None,
            failed: None,
            tally: Tally::default(),
        };
        for (number, piece) in pieces.iter().enumerate() {
            let list = fetch.list(&piece.sources);
            let first = fetch.chunks.len() as u32;
            let mut start = 0;
            while start < piece.len {
                let len = chunk_bytes.min(piece.len - start);
                fetch.queues[list as usize].push(fetch.chunks.len() as u32);
                fetch.chunks.push(Chunk { piece: number as u32, start, len, queued: true, damaged: 0 });
                start += len;
            }
            fetch.pieces.push(OfPiece { list, first, chunks: fetch.chunks.len() as u32 - first });
        }
        (fetch.queued, fetch.unfinished) = (fetch.chunks.len(), fetch.chunks.len());
        // A new order for every fetch: receivers that start together do not ask the same sender first (spark#1549).
        let random = &mut fetch.random;
        let mut order: Vec<(u64, u32)> = (0..fetch.lists.len() as u32).map(|list| (random.next(), list)).collect();
        order.sort_unstable();
        fetch.turns = order.into_iter().map(|(_, list)| list).collect();
        fetch
    }

    pub fn count(&mut self, source: SourceId, by: i32) {
        let count = self.on_source.entry(source).or_default();
        *count = count.saturating_add_signed(by);
        if *count == 0 {
            self.on_source.remove(&source);
        }
    }

    /// Back to the front of its queue.
    pub fn requeue(&mut self, chunk: u32) {
        if self.failed.is_some() {
            return;
        }
        let list = self.list_of(chunk);
        let queue = &mut self.queues[list as usize];
        queue.entries.push_front(chunk);
        queue.waiting += 1;
        self.chunks[chunk as usize].queued = true;
        self.queued += 1;
    }

    /// The list of sources that a chunk can come from.
    pub fn list_of(&self, chunk: u32) -> u32 {
        self.pieces[self.chunks[chunk as usize].piece as usize].list
    }

    /// Nothing waits any more.
    pub fn clear(&mut self) {
        self.queues.iter_mut().for_each(|queue| *queue = Queue::default());
        self.chunks.iter_mut().for_each(|chunk| chunk.queued = false);
        self.queued = 0;
    }

    /// Takes the first chunk out of a queue.
    fn pop(&mut self, list: u32) -> Option<u32> {
        while let Some(chunk) = self.queues[list as usize].entries.pop_front() {
            if self.chunks[chunk as usize].queued && self.list_of(chunk) == list {
                self.chunks[chunk as usize].queued = false;
                self.queues[list as usize].waiting -= 1;
                self.queued -= 1;
                return Some(chunk);
            }
        }
        None
    }

    /// The number of a list of sources, maybe a new one.
    fn list(&mut self, sources: &[SourceId]) -> u32 {
        if let Some(number) = self.numbers.get(sources) {
            return *number;
        }
        let number = self.lists.len() as u32;
        self.lists.push(sources.to_vec());
        self.queues.push(Queue::default());
        self.numbers.insert(sources.to_vec(), number);
        number
    }

    /// Whether a source that has one run at a time has it.
    fn is_taken(&self, source: SourceId) -> bool {
        self.one_run.contains(&source) && self.on_source.get(&source).is_some_and(|runs| *runs > 0)
    }

    /// The source of a list to be asked now: the first in order that has not just failed.
    ///
    /// # Errors
    /// When the first may be asked; `None`: not before a run or an attempt to connect ends.
    pub fn eligible(&self, list: u32, ways: &Ways<'_>) -> Result<SourceId, Option<Time>> {
        self.choose(list, ways, |source| !self.is_taken(source))
    }

    fn choose(&self, list: u32, ways: &Ways<'_>, may: impl Fn(SourceId) -> bool) -> Result<SourceId, Option<Time>> {
        let (mut first, mut only_reached) = (None::<Time>, false);
        for source in self.lists[list as usize].iter().filter(|source| may(**source)) {
            match ways.ready(*source) {
                Ok(()) if !only_reached || ways.is_reached(*source) => return Ok(*source),
                Ok(()) => {}
                Err(Some(at)) => first = Some(first.map_or(at, |first| first.min(at))),
                // It is tried for the first time: it is known soon whether it can be reached.
                Err(None) if ways.may_connect && !ways.is_failing(*source) => break,
                Err(None) => only_reached = true,
            }
        }
        Err(first)
    }

    /// Why none of its waiting chunks can be asked for: their sources cannot be reached, one of them since then.
    pub fn unreached<'a>(
        &self,
        ways: &Ways<'_>,
        why: &'a BTreeMap<SourceId, (Time, String)>,
    ) -> Option<&'a (Time, String)> {
        let waiting = self.lists.iter().zip(&self.queues).filter(|(_, queue)| queue.waiting > 0);
        let mut found = None;
        for (sources, _) in waiting {
            if sources.iter().any(|source| ways.is_reached(*source)) {
                return None;
            }
            found = Some(sources.iter().find_map(|source| why.get(source))?);
        }
        found
    }

    /// Whether a chunk of this list, which has a slot, may run from this source.
    pub fn may_run(&self, source: SourceId, list: u32, ways: &Ways<'_>) -> bool {
        let listed = self.lists[list as usize].contains(&source);
        listed && !self.is_taken(source) && ways.is_reached(source) && ways.ready(source).is_ok()
    }

    /// Takes the next chunk out of its queue, and chooses its source: from the lists in turn.
    pub fn next(&mut self, ways: &Ways<'_>) -> Result<(u32, SourceId), Option<Time>> {
        let mut wake: Option<Time> = None;
        for step in 0..self.turns.len() {
            let at = (self.turn + step) % self.turns.len();
            let list = self.turns[at];
            if self.queues[list as usize].waiting == 0 {
                continue;
            }
            match self.eligible(list, ways) {
                Ok(source) => {
                    self.turn = at + 1;
                    return Ok((self.pop(list).expect("one waits"), source));
                }
                Err(at) => {
                    wake = match (wake, at) {
                        (Some(one), Some(other)) => Some(one.min(other)),
                        (one, other) => one.or(other),
                    }
                }
            }
        }
        Err(wake)
    }

    /// Takes a chunk out of its queue for this source. The source may have one more run than its limit: the chunk
    /// follows on the same connection.
    pub fn next_of(&mut self, source: SourceId, ways: &Ways<'_>) -> Option<u32> {
        let first = |list: &u32| self.choose(*list, ways, |_| true) == Ok(source);
        let list = *self.turns.iter().find(|list| self.queues[**list as usize].waiting > 0 && first(list))?;
        self.pop(list)
    }

    pub fn run(&self, fetch: FetchId, ticket: Ticket, chunk: u32, source: SourceId, leg: u8, plan: u32) -> Run {
        let Chunk { piece, start, len, .. } = self.chunks[chunk as usize];
        Run { fetch, ticket, group: self.group, chunk, piece, source, leg, plan, start, len, fresh: false }
    }

    /// A source that is too slow comes last wherever there is another.
    pub fn prefer_others(&mut self, source: SourceId) {
        self.numbers.clear();
        for (number, list) in (0..).zip(&mut self.lists) {
            if let Some(at) = list.iter().position(|own| *own == source) {
                let slow = list.remove(at);
                list.push(slow);
            }
            self.numbers.insert(list.clone(), number);
        }
    }

    /// Takes a source from a piece, or makes it the last to be asked; the piece's waiting chunks move to another list.
    pub fn leave_source(&mut self, piece: u32, source: SourceId, ask_last: bool) {
        let list = self.pieces[piece as usize].list as usize;
        if !self.lists[list].contains(&source) {
            return;
        }
        let mut rest: Vec<SourceId> = self.lists[list].iter().copied().filter(|own| *own != source).collect();
        rest.extend(ask_last.then_some(source));
        self.relist(piece, rest);
    }

    /// A piece lies with this source too.
    pub fn add_source(&mut self, piece: u32, source: SourceId) {
        let Some(own) = self.pieces.get(piece as usize) else { return };
        let mut sources = self.lists[own.list as usize].clone();
        if !sources.contains(&source) {
            sources.push(source);
            self.relist(piece, sources);
        }
    }

    /// Another list of sources for a piece; its waiting chunks go with it. It costs as much as the piece has chunks.
    fn relist(&mut self, piece: u32, rest: Vec<SourceId>) {
        let old = self.pieces[piece as usize].list;
        if rest == self.lists[old as usize] {
            return;
        }
        let known = self.lists.len();
        let new = self.list(&rest);
        if self.lists.len() > known {
            self.turns.push(new);
        }
        let own = &mut self.pieces[piece as usize];
        own.list = new;
        for chunk in own.first..own.first + own.chunks {
            if self.chunks[chunk as usize].queued {
                self.queues[old as usize].waiting -= 1;
                self.queues[new as usize].push(chunk);
            }
        }
        self.compact(old);
        self.compact(new);
    }

    /// Drops the entries of a queue that do not count, once they are most of them.
    fn compact(&mut self, list: u32) {
        let queue = &self.queues[list as usize];
        if queue.entries.len() > 2 * queue.waiting + COMPACTED_FROM {
            let mut seen = BTreeSet::new();
            let mut entries = std::mem::take(&mut self.queues[list as usize].entries);
            entries.retain(|chunk| {
                self.chunks[*chunk as usize].queued && self.list_of(*chunk) == list && seen.insert(*chunk)
            });
            self.queues[list as usize].entries = entries;
        }
    }

    /// Applies a fault to the chunk, its source and the fetch; returns an error if the fetch cannot continue.
    pub fn handle_fault(&mut self, now: Time, run: &Run, source: &mut Source, fault: Fault) -> Option<FetchError> {
        let why = words(&fault);
        self.fault = Some(why.clone());
        match fault {
            Fault::Connection(_) => {
                self.tally.resumed += 1;
                source.not_before = now + source.retry.failed(&mut self.random);
                None
            }
            Fault::Damaged(_) => {
                self.tally.refetches += 1;
                let chunk = &mut self.chunks[run.chunk as usize];
                chunk.damaged += 1;
                let damaged = chunk.damaged;
                // Another source may have an undamaged copy; but it may be gone.
                self.leave_source(run.piece, run.source, true);
                (damaged >= defaults::CORRUPT_MAX).then_some(FetchError::Damaged(why))
            }
            Fault::Busy { retry_after } => {
                self.tally.busy += 1;
                source.not_before = now + source.retry.busy(retry_after, &mut self.random);
                None
            }
            Fault::Gone(_) | Fault::Denied(_) => {
                source.retry.answered();
                // Another chunk of the piece may have left this source before.
                self.leave_source(run.piece, run.source, false);
                let none_left = self.lists[self.pieces[run.piece as usize].list as usize].is_empty();
                let error =
                    if matches!(fault, Fault::Gone(_)) { FetchError::Lost(why) } else { FetchError::Denied(why) };
                none_left.then_some(error)
            }
        }
    }
}

pub fn words(fault: &Fault) -> String {
    match fault {
        Fault::Connection(why) | Fault::Damaged(why) | Fault::Gone(why) | Fault::Denied(why) => why.clone(),
        Fault::Busy { .. } => "every server that has the object is at its connection limit".into(),
    }
}
