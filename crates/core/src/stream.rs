//! One stream at the process that writes it (CIEL's streaming references: paper 001, table 4.1).
//!
//! A stream has parts, each written in order. What is written of a part is sealed into *chunks*, which are objects like
//! any other: their readers fetch them. This machine decides when a chunk is sealed, which chunks a reader may have,
//! when they are freed, and whether the writer has to wait.
//!
//! A chunk is sealed once it is large, or as soon as a reader waits for it: if readers keep up, bytes are sent at once;
//! if not, in few large chunks.
//!
//! The writer waits only for active readers: not for one that has been silent for [`ACTIVE`], whose unread chunks go to
//! the spool. So no cycle of readers and writers can stand still.

use crate::units::Time;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

/// A reader that has been silent for this long does not delay the writer. It is longer than a fetch of all chunks of
/// one question on a slow link, and than most pauses of a program.
pub const ACTIVE: Duration = Duration::from_secs(10);
/// Readers of one part whose places are known; beyond it those that asked longest ago are forgotten.
const READERS_MAX: usize = 1024;

/// Who reads: a task, the same number each time it runs, and its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReaderId {
    pub task: u64,
    pub run: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub parts: u32,
    /// Bytes of a chunk; a single write is not split.
    pub chunk_bytes: u64,
    /// How many bytes of a part the writer may be ahead of its slowest active reader.
    pub ahead_bytes: u64,
    /// Chunks stay until the stream is freed, for any number of readers. Otherwise each part has one reader, and a chunk is freed
    /// once that has it.
    pub keep: bool,
}

/// How a stream ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Complete,
    /// Its writer raised an error.
    Failed(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Bytes were added to the unsealed rest of a part; maybe 0.
    Wrote { part: u32, bytes: u64 },
    /// A chunk was sealed: the unsealed rest of a part, or one large write.
    Sealed { part: u32, bytes: u64 },
    /// A reader has all chunks of a part before this one.
    Asked { part: u32, reader: ReaderId, after: u64 },
    /// The writer has ended, and everything is sealed.
    Ended(End),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Seal the rest of a part as a chunk.
    Seal { part: u32 },
    /// These chunks of a part are no longer needed: free them.
    Free { part: u32, chunks: Range<u64> },
    /// Readers that wait for this part may have something now.
    Wake { part: u32 },
    /// The writer of this part may continue.
    Room { part: u32 },
}

/// The answer to a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Sealed, and not freed.
    Chunks(Range<u64>),
    /// Nothing yet.
    Later,
    /// The reader has every chunk, and the stream has ended.
    Complete,
    Failed(String),
    /// The beginning was read and freed: the stream has to be written again.
    Freed,
    /// Another reader takes this part, or the same task has read it before, and chunks are not kept.
    Taken,
    /// The stream has no such part.
    NoPart,
}

struct Part {
    /// Where each chunk that is there ends, in bytes since the start of the part.
    ends: VecDeque<u64>,
    /// Number of the first of them.
    first: u64,
    /// Bytes of all that were freed.
    freed: u64,
    /// Unsealed bytes; a write may be empty.
    open: Option<u64>,
    /// By their tasks; where chunks are kept by their runs.
    readers: BTreeMap<u64, Reader>,
}

#[derive(Clone, Copy)]
struct Reader {
    run: u64,
    /// The first chunk that it does not have.
    next: u64,
    /// Bytes that it has.
    has: u64,
    asked: Time,
}

pub struct Stream {
    settings: Settings,
    parts: Vec<Part>,
    end: Option<End>,
}

impl Part {
    fn sealed(&self) -> u64 {
        self.ends.back().copied().unwrap_or(self.freed)
    }

    fn chunk_count(&self) -> u64 {
        self.first + self.ends.len() as u64
    }

    /// Bytes before a chunk; of those before the first that is there, all that was freed.
    fn before(&self, chunk: u64) -> u64 {
        match chunk.saturating_sub(self.first) {
            0 => self.freed,
            count => self.ends.get(count as usize - 1).copied().unwrap_or_else(|| self.sealed()),
        }
    }

    /// Whether its only reader is a different one: of another task, or of the same run at an earlier place. Another run
    /// of the same task starts again.
    fn is_taken(&self, reader: ReaderId, after: u64) -> bool {
        self.readers.iter().any(|(task, own)| *task != reader.task || (own.run == reader.run && after < own.next))
    }

    /// Whether a recent reader has everything.
    fn is_awaited(&self, now: Time) -> bool {
        self.readers.values().any(|reader| reader.has >= self.sealed() && now.since(reader.asked) < ACTIVE)
    }
}

impl Stream {
    pub fn new(settings: Settings) -> Stream {
        let part = || Part { ends: VecDeque::new(), first: 0, freed: 0, open: None, readers: BTreeMap::new() };
        Stream { settings, parts: (0..settings.parts).map(|_| part()).collect(), end: None }
    }

    /// Handles an event. One of an unknown part changes nothing.
    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::Wrote { part, bytes } => {
                let chunk_bytes = self.settings.chunk_bytes;
                let Some(own) = self.parts.get_mut(part as usize) else { return };
                let open = own.open.unwrap_or(0) + bytes;
                own.open = Some(open);
                if open >= chunk_bytes || own.is_awaited(now) {
                    commands.push(Command::Seal { part });
                }
            }
            Event::Sealed { part, bytes } => {
                let Some(own) = self.parts.get_mut(part as usize) else { return };
                own.open = None;
                own.ends.push_back(own.sealed() + bytes);
                commands.push(Command::Wake { part });
            }
            Event::Asked { part, reader, after } => self.asked(now, part, reader, after, commands),
            Event::Ended(end) => {
                let failed = matches!(end, End::Failed(_));
                self.end.get_or_insert(end);
                for (part, own) in (0..).zip(&mut self.parts) {
                    own.open = None;
                    // A failed stream delivers nothing more.
                    if failed && !own.ends.is_empty() {
                        commands.push(Command::Free { part, chunks: own.first..own.chunk_count() });
                        (own.first, own.freed) = (own.chunk_count(), own.sealed());
                        own.ends.clear();
                    }
                    commands.push(Command::Wake { part });
                }
            }
        }
    }

    fn asked(&mut self, now: Time, part: u32, reader: ReaderId, after: u64, commands: &mut Vec<Command>) {
        let keep = self.settings.keep;
        let Some(own) = self.parts.get_mut(part as usize) else { return };
        if (!keep && own.is_taken(reader, after)) || after < own.first || after > own.chunk_count() {
            return;
        }
        let ReaderId { task, run } = reader;
        let reader = if keep { run } else { task };
        if !own.readers.contains_key(&reader) && own.readers.len() >= READERS_MAX {
            let oldest = own.readers.iter().min_by_key(|(_, own)| own.asked).map(|(id, _)| *id);
            oldest.inspect(|id| _ = own.readers.remove(id));
        }
        own.readers.insert(reader, Reader { run, next: after, has: own.before(after), asked: now });
        if !keep && after > own.first {
            commands.push(Command::Free { part, chunks: own.first..after });
            own.freed = own.before(after);
            own.ends.drain(..(after - own.first) as usize);
            own.first = after;
        }
        if own.open.is_some() && after == own.chunk_count() {
            commands.push(Command::Seal { part });
        }
        commands.push(Command::Room { part });
    }

    /// The answer to a reader of a part that has all chunks before `after`.
    pub fn answer(&self, part: u32, reader: ReaderId, after: u64) -> Answer {
        let Some(own) = self.parts.get(part as usize) else { return Answer::NoPart };
        if !self.settings.keep && own.is_taken(reader, after) {
            return Answer::Taken;
        }
        if let Some(End::Failed(why)) = &self.end {
            return Answer::Failed(why.clone());
        }
        if after < own.first {
            return Answer::Freed;
        }
        if after < own.chunk_count() {
            return Answer::Chunks(after..own.chunk_count());
        }
        if self.end.is_some() { Answer::Complete } else { Answer::Later }
    }

    /// Until when the writer of a part has to wait at most; `None`: it need not.
    pub fn waits(&self, now: Time, part: u32) -> Option<Time> {
        let own = self.parts.get(part as usize).filter(|_| self.end.is_none())?;
        let written = own.sealed() + own.open.unwrap_or(0);
        let slow =
            own.readers.values().filter(|reader| written.saturating_sub(reader.has) >= self.settings.ahead_bytes);
        slow.map(|reader| reader.asked + ACTIVE).filter(|until| *until > now).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;

    const SECOND: u64 = 1_000_000_000;

    fn stream(keep: bool) -> Stream {
        Stream::new(Settings { parts: 2, chunk_bytes: 100, ahead_bytes: 300, keep })
    }

    fn handle(stream: &mut Stream, now: u64, event: Event) -> Vec<Command> {
        let mut commands = Vec::new();
        stream.handle(Time(now), event, &mut commands);
        commands
    }

    fn id(task: u64) -> ReaderId {
        ReaderId { task, run: 100 + task }
    }

    fn chunk(stream: &mut Stream, now: u64, bytes: u64) {
        handle(stream, now, Event::Wrote { part: 0, bytes });
        handle(stream, now, Event::Sealed { part: 0, bytes });
    }

    #[test]
    fn a_chunk_is_sealed_when_it_is_large_or_somebody_waits_for_it() {
        let mut own = stream(false);
        assert_eq!(handle(&mut own, 0, Event::Wrote { part: 0, bytes: 60 }), []);
        assert_eq!(handle(&mut own, 0, Event::Wrote { part: 0, bytes: 60 }), [Command::Seal { part: 0 }]);
        handle(&mut own, 0, Event::Sealed { part: 0, bytes: 120 });
        assert_eq!(own.answer(0, id(1), 0), Answer::Chunks(0..1));
        handle(&mut own, 0, Event::Asked { part: 0, reader: id(1), after: 1 });
        assert_eq!(own.answer(0, id(1), 1), Answer::Later);
        assert_eq!(handle(&mut own, SECOND, Event::Wrote { part: 0, bytes: 1 }), [Command::Seal { part: 0 }]);
        handle(&mut own, SECOND, Event::Sealed { part: 0, bytes: 1 });
        // It has not confirmed this one, so the writer does not wait.
        assert_eq!(handle(&mut own, SECOND, Event::Wrote { part: 0, bytes: 1 }), []);
        let asks = handle(&mut own, SECOND, Event::Asked { part: 0, reader: id(1), after: 2 });
        assert!(asks.contains(&Command::Seal { part: 0 }));
    }

    #[test]
    fn a_chunk_is_freed_once_its_reader_has_it_unless_chunks_are_kept() {
        for keep in [false, true] {
            let mut own = stream(keep);
            chunk(&mut own, 0, 100);
            chunk(&mut own, 0, 100);
            let commands = handle(&mut own, 0, Event::Asked { part: 0, reader: id(1), after: 1 });
            let free = Command::Free { part: 0, chunks: 0..1 };
            assert_eq!(commands.contains(&free), !keep);
            // The same task asks once more, and in another run.
            assert_eq!(own.answer(0, id(1), 0), if keep { Answer::Chunks(0..2) } else { Answer::Taken });
            let again = ReaderId { run: 7, ..id(1) };
            assert_eq!(own.answer(0, again, 0), if keep { Answer::Chunks(0..2) } else { Answer::Freed });
            handle(&mut own, 0, Event::Asked { part: 0, reader: id(2), after: 0 });
            assert_eq!(own.answer(0, id(2), 0), if keep { Answer::Chunks(0..2) } else { Answer::Taken });
        }
    }

    #[test]
    fn the_writer_waits_for_a_reader_that_takes_something_and_for_no_other() {
        let mut own = stream(false);
        (0..5).for_each(|_| chunk(&mut own, 0, 100));
        assert_eq!(own.waits(Time(0), 0), None, "nobody reads yet");
        handle(&mut own, SECOND, Event::Asked { part: 0, reader: id(1), after: 1 });
        let until = Time(SECOND) + ACTIVE;
        assert_eq!(own.waits(Time(2 * SECOND), 0), Some(until));
        assert_eq!(own.waits(until, 0), None, "it asks no more");
        handle(&mut own, 2 * SECOND, Event::Asked { part: 0, reader: id(1), after: 3 });
        assert_eq!(own.waits(Time(2 * SECOND), 0), None, "two hundred bytes are ahead");
        assert_eq!(own.waits(Time(2 * SECOND), 1), None, "the other part has no reader");
    }

    #[test]
    fn a_reader_hears_of_the_end_after_all_chunks_and_of_a_failure_at_once() {
        for bytes in [0, 10] {
            let mut own = stream(false);
            handle(&mut own, 0, Event::Wrote { part: 0, bytes });
            assert_eq!(own.answer(0, id(1), 0), Answer::Later);
            handle(&mut own, 0, Event::Sealed { part: 0, bytes });
            handle(&mut own, 0, Event::Ended(End::Complete));
            assert_eq!(own.answer(0, id(1), 0), Answer::Chunks(0..1));
            handle(&mut own, 0, Event::Asked { part: 0, reader: id(1), after: 1 });
            assert_eq!(own.answer(0, id(1), 1), Answer::Complete);
            assert_eq!(own.answer(1, id(1), 0), Answer::Complete, "of a part with nothing in it too");
            assert_eq!(own.answer(2, id(1), 0), Answer::NoPart);
        }
        let mut own = stream(false);
        chunk(&mut own, 0, 100);
        handle(&mut own, 0, Event::Ended(End::Failed("it broke".into())));
        assert_eq!(own.answer(0, id(1), 0), Answer::Failed("it broke".into()));
    }

    /// Readers may send any question.
    #[test]
    fn each_chunk_is_freed_once_and_never_before_it_was_there() {
        let mut random = SplitMix(3);
        for keep in [false, true] {
            let mut own = stream(keep);
            let (mut sealed, mut freed) = ([0u64; 2], [0u64; 2]);
            for step in 0..5000u64 {
                let (part, bytes) = ((random.next() % 3) as u32, random.next() % 150);
                let event = match random.next() % 4 {
                    0 => Event::Wrote { part, bytes },
                    1 => Event::Asked { part, reader: id(random.next() % 2), after: random.next() % 2000 },
                    2 => {
                        let at = *freed.get(part as usize).unwrap_or(&0) + random.next() % 3;
                        Event::Asked { part, reader: id(0), after: at }
                    }
                    _ => Event::Wrote { part, bytes: 0 },
                };
                for command in handle(&mut own, step, event) {
                    match command {
                        Command::Seal { part } => {
                            handle(&mut own, step, Event::Sealed { part, bytes: 1 });
                            sealed[part as usize] += 1;
                        }
                        Command::Free { part, chunks } => {
                            assert_eq!(chunks.start, freed[part as usize]);
                            assert!(chunks.end > chunks.start && chunks.end <= sealed[part as usize]);
                            freed[part as usize] = chunks.end;
                        }
                        Command::Wake { .. } | Command::Room { .. } => {}
                    }
                }
            }
            assert!(sealed.iter().all(|count| *count > 100));
            assert_eq!(freed.iter().all(|count| *count > 10), !keep);
        }
    }
}
