//! One fetch: which of its chunks is requested next from which source, and how it handles faults.

use super::{Fault, FetchError, FetchId, Piece, Run, SourceId, Tally};
use crate::defaults;
use crate::host::{GroupId, MemberId, Ticket};
use crate::random::SplitMix;
use crate::units::Time;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub struct Fetch {
    pub group: GroupId,
    pub member: MemberId,
    /// Of each piece, which list of sources it has.
    pub pieces: Vec<u32>,
    pub lists: Vec<Vec<SourceId>>,
    pub chunks: Vec<Chunk>,
    /// Of each list, the chunks that wait and have no ticket, in the order in which they are tried. Chunks with the same
    /// sources are together, so that a source with a retry delay does not hide others.
    pub queues: Vec<VecDeque<u32>>,
    /// Lists in the order of their turns, and the next one.
    pub turns: Vec<u32>,
    pub turn: usize,
    pub queued: usize,
    /// Chunks that wait for a slot, oldest first.
    pub asked: VecDeque<Ticket>,
    pub running: u32,
    /// Chunks that wait for a slot or run, by source.
    pub on_source: BTreeMap<SourceId, u32>,
    /// Sources that have one run at a time.
    pub one_run: BTreeSet<SourceId>,
    pub unfinished: usize,
    pub last_progress: Time,
    /// Ranges in a row that broke before a block of them was whole.
    pub fruitless: u32,
    /// The last fault since there was progress.
    pub fault: Option<String>,
    pub failed: Option<FetchError>,
    pub tally: Tally,
}

#[derive(Clone, Copy)]
pub struct Chunk {
    pub piece: u32,
    pub start: u64,
    pub len: u64,
    /// Attempts in a row that arrived damaged before any block of what is missing was whole.
    pub damaged: u32,
}

#[derive(Default)]
pub struct Source {
    pub failures: u32,
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
            chunks: Vec::new(),
            queues: Vec::new(),
            turns: Vec::new(),
            turn: 0,
            queued: 0,
            asked: VecDeque::new(),
            running: 0,
            on_source: BTreeMap::new(),
            one_run,
            unfinished: 0,
            last_progress: now,
            fruitless: 0,
            fault: None,
            failed: None,
            tally: Tally::default(),
        };
        let mut known: BTreeMap<&[SourceId], u32> = BTreeMap::new();
        for (number, piece) in pieces.iter().enumerate() {
            let list = *known.entry(&piece.sources).or_insert_with(|| {
                fetch.lists.push(piece.sources.clone());
                fetch.queues.push(VecDeque::new());
                (fetch.lists.len() - 1) as u32
            });
            fetch.pieces.push(list);
            let mut start = 0;
            while start < piece.len {
                let len = chunk_bytes.min(piece.len - start);
                fetch.queues[list as usize].push_back(fetch.chunks.len() as u32);
                fetch.chunks.push(Chunk { piece: number as u32, start, len, damaged: 0 });
                start += len;
            }
        }
        (fetch.queued, fetch.unfinished) = (fetch.chunks.len(), fetch.chunks.len());
        // A new order for every fetch: receivers that start together do not ask the same sender first (spark#1549).
        let mut random = SplitMix(seed);
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
        let list = self.pieces[self.chunks[chunk as usize].piece as usize];
        self.queues[list as usize].push_front(chunk);
        self.queued += 1;
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
        let mut first: Option<Time> = None;
        for source in self.lists[list as usize].iter().filter(|source| !self.is_taken(**source)) {
            match ways.ready(*source) {
                Ok(()) => return Ok(*source),
                Err(Some(at)) => first = Some(first.map_or(at, |first| first.min(at))),
                // It is known soon whether this one can be reached; the others come after it.
                Err(None) => break,
            }
        }
        Err(first)
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
            if self.queues[list as usize].is_empty() {
                continue;
            }
            match self.eligible(list, ways) {
                Ok(source) => {
                    self.turn = at + 1;
                    self.queued -= 1;
                    let chunk = self.queues[list as usize].pop_front().expect("it is not empty");
                    return Ok((chunk, source));
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
    pub fn next_of(&mut self, now: Time, source: SourceId, sources: &BTreeMap<SourceId, Source>) -> Option<u32> {
        let ready = |source: &SourceId| sources.get(source).is_none_or(|own| own.not_before <= now);
        let first = |list: &u32| self.lists[*list as usize].iter().find(|source| ready(source)) == Some(&source);
        let list = *self.turns.iter().find(|list| !self.queues[**list as usize].is_empty() && first(list))?;
        self.queued -= 1;
        self.queues[list as usize].pop_front()
    }

    pub fn run(&self, fetch: FetchId, ticket: Ticket, chunk: u32, source: SourceId, leg: u8, plan: u32) -> Run {
        let Chunk { piece, start, len, .. } = self.chunks[chunk as usize];
        Run { fetch, ticket, group: self.group, chunk, piece, source, leg, plan, start, len, fresh: false }
    }

    /// A source that is too slow comes last wherever there is another.
    pub fn prefer_others(&mut self, source: SourceId) {
        for list in &mut self.lists {
            if let Some(at) = list.iter().position(|own| *own == source) {
                let slow = list.remove(at);
                list.push(slow);
            }
        }
    }

    /// Takes a source from a piece, or makes it the last to be asked; the piece's waiting chunks move to another list.
    pub fn leave_source(&mut self, piece: u32, source: SourceId, ask_last: bool) {
        let list = self.pieces[piece as usize] as usize;
        if !self.lists[list].contains(&source) {
            return;
        }
        let mut rest: Vec<SourceId> = self.lists[list].iter().copied().filter(|own| *own != source).collect();
        rest.extend(ask_last.then_some(source));
        self.relist(piece, rest);
    }

    /// A piece lies with this source too.
    pub fn add_source(&mut self, piece: u32, source: SourceId) {
        let Some(list) = self.pieces.get(piece as usize) else { return };
        let mut sources = self.lists[*list as usize].clone();
        if !sources.contains(&source) {
            sources.push(source);
            self.relist(piece, sources);
        }
    }

    /// Another list of sources for a piece; its waiting chunks go with it.
    fn relist(&mut self, piece: u32, rest: Vec<SourceId>) {
        let list = self.pieces[piece as usize] as usize;
        if rest == self.lists[list] {
            return;
        }
        let new = self.lists.iter().position(|own| *own == rest).unwrap_or_else(|| {
            self.lists.push(rest);
            self.queues.push(VecDeque::new());
            self.turns.push((self.lists.len() - 1) as u32);
            self.lists.len() - 1
        });
        self.pieces[piece as usize] = new as u32;
        let chunks = &self.chunks;
        let (moves, stays) = self.queues[list].iter().partition(|chunk| chunks[**chunk as usize].piece == piece);
        self.queues[list] = stays;
        let moves: VecDeque<u32> = moves;
        self.queues[new].extend(moves);
    }

    /// Applies a fault to the chunk, its source and the fetch; returns an error if the fetch cannot continue.
    pub fn handle_fault(&mut self, now: Time, run: &Run, source: &mut Source, fault: Fault) -> Option<FetchError> {
        let why = words(&fault);
        self.fault = Some(why.clone());
        match fault {
            Fault::Connection(_) => {
                self.tally.resumed += 1;
                let wait = defaults::RETRY_FIRST.saturating_mul(1 << source.failures.min(10)).min(defaults::RETRY_MAX);
                source.failures += 1;
                source.not_before = now + wait;
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
                // The source answers: only broken connections increase its retry delay.
                source.failures = 0;
                // Limit the delay: a forged answer would disable this source for ever.
                source.not_before = now + retry_after.min(defaults::RETRY_MAX);
                None
            }
            Fault::Gone(_) | Fault::Denied(_) => {
                source.failures = 0;
                // Another chunk of the piece may have left this source before.
                self.leave_source(run.piece, run.source, false);
                let none_left = self.lists[self.pieces[run.piece as usize] as usize].is_empty();
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
