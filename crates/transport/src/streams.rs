//! The streams that this process writes: buffers that become objects, and readers that wait for them.
//!
//! All decisions are in [`mission_core::stream`]; here are the memory and the threads that wait. What was written and is
//! not sealed lies in a buffer of its part; a chunk is an object of the [`store`](crate::store), with one part for the bytes
//! and, where several writes are in it, a second one with their sizes.

use crate::object::ObjectId;
use crate::store::Store;
use mission_core::defaults::CHUNK_BYTES;
use mission_core::host::GroupId;
use mission_core::stream::{Answer, Command, End, Event, ReaderId, Settings, Stream};
use mission_core::types::Encryption;
use mission_core::units::Time;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

/// Limit on unsealed bytes in all parts of a stream.
const OPEN_BYTES: u64 = 64 << 20;
/// The smallest chunk that is sealed for its size.
const SEAL_BYTES_MIN: u64 = 4 << 10;
/// Bytes for the size of a write.
const SIZE_BYTES: u64 = 8;
/// Parts of a stream: each has a buffer and a lock.
pub const PARTS_MAX: u32 = 1 << 16;
/// Chunks that one reply names: they fit into the head of an answer.
pub const CHUNKS_PER_REPLY: usize = 64;
/// How often a waiting writer checks whether it was interrupted.
const INTERRUPT_EVERY: Duration = Duration::from_millis(100);
/// Interval at which a reader retries a part that is being written to.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// Longest text of an error of a writer, so that it fits into the head of an answer.
pub const WHY_MAX: usize = 2000;

/// A chunk that a reader may fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub object: ObjectId,
    pub bytes: u64,
    /// How many writes are in it; their sizes are its second part if there are several.
    pub writes: u64,
}

/// The answer to a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChunkReply {
    Chunks(Vec<Chunk>),
    Later,
    Complete,
    /// The writer raised this.
    Failed(String),
    /// The stream has to be written again.
    Freed,
    /// Another reader takes this part.
    Taken,
    /// There is no such stream, or no such part.
    Unknown,
}

/// Why a write failed.
#[derive(Debug)]
pub enum WriteError {
    /// No task needs the stream any more, or it was ended.
    Over(&'static str),
    Interrupted,
    /// No memory, or no room in the spool.
    Io(io::Error),
}

/// The streams of a process.
pub struct Streams {
    all: RwLock<HashMap<ObjectId, Arc<Writer>>>,
    store: Arc<Store>,
    started: Instant,
}

/// How a stream is made.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    pub parts: u32,
    /// As [`Settings::ahead_bytes`].
    pub ahead_bytes: u64,
    pub keep: bool,
    pub encryption: Encryption,
    /// The job whose other processes on the host may map its chunks.
    pub sharers: Option<GroupId>,
}

struct Writer {
    encryption: Encryption,
    sharers: Option<GroupId>,
    chunk_bytes: u64,
    /// The unsealed bytes of each part. Lock it before the state, never after.
    open: Vec<Mutex<Open>>,
    state: Mutex<State>,
    /// Wakes readers, and writers, of a part.
    changed: Vec<Condvar>,
    room: Vec<Condvar>,
}

#[derive(Default)]
struct Open {
    bytes: Vec<u8>,
    sizes: Vec<u64>,
}

struct State {
    stream: Stream,
    chunks: Vec<Chunks>,
    /// Its writer is ending it, or has ended it: no more writes.
    ending: bool,
    /// No task needs it any more.
    freed: bool,
}

/// The chunks of a part that are kept, and the number of the first.
#[derive(Default)]
struct Chunks {
    first: u64,
    there: VecDeque<Chunk>,
}

impl Streams {
    pub fn new(store: Arc<Store>) -> Streams {
        Streams { all: RwLock::default(), store, started: Instant::now() }
    }

    /// # Errors
    /// It has no part, or too many.
    pub fn open(&self, opening: &Opening) -> io::Result<ObjectId> {
        let Opening { parts, ahead_bytes, keep, encryption, sharers } = *opening;
        if parts == 0 || parts > PARTS_MAX {
            let text = format!("a stream has 1 to {PARTS_MAX} parts, not {parts}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let chunk_bytes = (OPEN_BYTES / u64::from(parts)).clamp(SEAL_BYTES_MIN, CHUNK_BYTES);
        let writer = Writer {
            encryption,
            sharers,
            chunk_bytes,
            open: (0..parts).map(|_| Mutex::default()).collect(),
            state: Mutex::new(State {
                stream: Stream::new(Settings { parts, chunk_bytes, ahead_bytes, keep }),
                chunks: (0..parts).map(|_| Chunks::default()).collect(),
                ending: false,
                freed: false,
            }),
            changed: (0..parts).map(|_| Condvar::new()).collect(),
            room: (0..parts).map(|_| Condvar::new()).collect(),
        };
        let id = ObjectId::random();
        self.all.write().expect("no panic while held").insert(id, Arc::new(writer));
        Ok(id)
    }

    /// Adds bytes to a part; they stay together. Waits while a reader of it is far behind; calls `interrupted`
    /// meanwhile, with no lock held.
    ///
    /// # Errors
    /// See [`WriteError`]; nothing was written then.
    pub fn write(
        &self,
        id: &ObjectId,
        part: u32,
        bytes: &[u8],
        mut interrupted: impl FnMut() -> bool,
    ) -> Result<(), WriteError> {
        let writer = self.get(id).ok_or(WriteError::Over("no task needs this stream any more"))?;
        if part as usize >= writer.open.len() {
            let text = format!("there is no part {part}: this stream has {}, from 0", writer.open.len());
            return Err(WriteError::Io(io::Error::new(io::ErrorKind::InvalidInput, text)));
        }
        writer.wait_for_room(part, || self.now(), &mut interrupted)?;
        let mut open = writer.open[part as usize].lock().expect("no panic while held");
        // The stream may have been ended during the wait; ending seals each part once.
        writer.lock().is_writable()?;
        if bytes.len() as u64 >= writer.chunk_bytes {
            // Seal earlier bytes first.
            self.seal(&writer, part, &mut open).map_err(WriteError::Io)?;
            return self.keep(&writer, part, &[bytes], 1).map_err(WriteError::Io);
        }
        open.bytes.extend_from_slice(bytes);
        open.sizes.push(bytes.len() as u64);
        let event = Event::Wrote { part, bytes: bytes.len() as u64 + SIZE_BYTES };
        let mut commands = Vec::new();
        writer.lock().stream.handle(self.now(), event, &mut commands);
        if commands.contains(&Command::Seal { part })
            && let Err(error) = self.seal(&writer, part, &mut open)
        {
            // A repeated write must not duplicate the bytes.
            open.sizes.pop();
            let before = open.bytes.len() - bytes.len();
            open.bytes.truncate(before);
            return Err(WriteError::Io(error));
        }
        Ok(())
    }

    /// The writer ends the stream.
    ///
    /// # Errors
    /// Unsealed bytes cannot be stored: then the stream has failed.
    pub fn end(&self, id: &ObjectId, end: End) -> io::Result<()> {
        let Some(writer) = self.get(id) else { return Ok(()) };
        let end = match end {
            End::Failed(mut why) => {
                let cut = (0..=WHY_MAX.min(why.len())).rev().find(|at| why.is_char_boundary(*at));
                why.truncate(cut.unwrap_or(0));
                End::Failed(why)
            }
            complete => complete,
        };
        if std::mem::replace(&mut writer.lock().ending, true) {
            return Ok(());
        }
        let mut sealed = Ok(());
        for (part, open) in (0..).zip(&writer.open) {
            let mut open = open.lock().expect("no panic while held");
            if end == End::Complete {
                sealed = sealed.and(self.seal(&writer, part, &mut open));
            }
            *open = Open::default();
        }
        let end = match &sealed {
            Ok(()) => end,
            Err(error) => End::Failed(error.to_string()),
        };
        let mut state = writer.lock();
        let (mut commands, mut gone) = (Vec::new(), Vec::new());
        state.stream.handle(self.now(), Event::Ended(end), &mut commands);
        for command in commands {
            if let Command::Free { part, chunks } = command {
                gone.extend(state.take(part, chunks));
            }
        }
        drop(state);
        writer.wake_all();
        gone.iter().for_each(|chunk| _ = self.store.free(&chunk.object));
        sealed
    }

    /// The answer to a reader of a part that has all chunks before `after`; waits for chunks up to `within`.
    pub fn ask(&self, id: &ObjectId, part: u32, reader: ReaderId, after: u64, within: Duration) -> ChunkReply {
        let deadline = Instant::now() + within;
        loop {
            let Some(writer) = self.get(id) else { return ChunkReply::Unknown };
            let (mut state, mut commands) = (writer.lock(), Vec::new());
            if state.freed {
                return ChunkReply::Unknown;
            }
            state.stream.handle(self.now(), Event::Asked { part, reader, after }, &mut commands);
            let mut seals = false;
            let mut gone = Vec::new();
            for command in commands {
                match command {
                    Command::Seal { .. } => seals = true,
                    Command::Free { part, chunks } => gone.extend(state.take(part, chunks)),
                    Command::Room { part } => writer.room[part as usize].notify_all(),
                    // A waiting reader checks for itself.
                    Command::Wake { .. } => {}
                }
            }
            let reply = match state.stream.answer(part, reader, after) {
                Answer::Chunks(range) => ChunkReply::Chunks(state.chunks_of(part, range)),
                Answer::Complete => ChunkReply::Complete,
                Answer::Failed(why) => ChunkReply::Failed(why),
                Answer::Freed => ChunkReply::Freed,
                Answer::Taken => ChunkReply::Taken,
                Answer::NoPart => ChunkReply::Unknown,
                Answer::Later => ChunkReply::Later,
            };
            if reply != ChunkReply::Later || !gone.is_empty() {
                drop(state);
                gone.iter().for_each(|chunk: &Chunk| _ = self.store.free(&chunk.object));
                if reply != ChunkReply::Later {
                    return reply;
                }
                continue;
            }
            let mut left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return ChunkReply::Later;
            }
            if seals {
                drop(state);
                if let Ok(mut open) = writer.open[part as usize].try_lock()
                    && self.seal(&writer, part, &mut open).is_ok()
                {
                    continue;
                }
                // A write is in progress: the disk may be slow, and the reader needs an answer meanwhile. Or there is
                // no room: the writer gets that error when it writes or ends.
                left = left.min(LOOK_AGAIN);
                state = writer.lock();
            }
            drop(writer.changed[part as usize].wait_timeout(state, left).expect("no panic while held"));
        }
    }

    /// How the stream may leave this process, if there is one.
    pub fn encryption(&self, id: &ObjectId) -> Option<Encryption> {
        self.get(id).map(|writer| writer.encryption)
    }

    /// No task needs a stream any more: frees all chunks. False if there was none.
    pub fn free(&self, id: &ObjectId) -> bool {
        let gone = self.all.write().expect("no panic while held").remove(id);
        let Some(writer) = gone else { return false };
        let mut state = writer.lock();
        state.freed = true;
        let chunks: Vec<Chunk> = state.chunks.iter_mut().flat_map(|own| own.there.drain(..)).collect();
        drop(state);
        writer.wake_all();
        chunks.iter().for_each(|chunk| _ = self.store.free(&chunk.object));
        true
    }

    /// Ends all streams: writers get an error from their next write.
    pub fn close(&self) {
        let all: Vec<ObjectId> = self.all.read().expect("no panic while held").keys().copied().collect();
        all.iter().for_each(|id| _ = self.free(id));
    }

    pub fn len(&self) -> usize {
        self.all.read().expect("no panic while held").len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn get(&self, id: &ObjectId) -> Option<Arc<Writer>> {
        self.all.read().expect("no panic while held").get(id).cloned()
    }

    fn now(&self) -> Time {
        Time(self.started.elapsed().as_nanos() as u64)
    }

    /// Seals the rest of a part as a chunk, if there are bytes.
    fn seal(&self, writer: &Writer, part: u32, open: &mut Open) -> io::Result<()> {
        if open.sizes.is_empty() {
            return Ok(());
        }
        let sizes: Vec<u8> = open.sizes.iter().flat_map(|size| size.to_le_bytes()).collect();
        let parts: &[&[u8]] = if open.sizes.len() > 1 { &[&open.bytes, &sizes] } else { &[&open.bytes] };
        self.keep(writer, part, parts, open.sizes.len() as u64)?;
        // A new buffer: memory of a part that is no longer read is not counted anywhere.
        *open = Open::default();
        Ok(())
    }

    fn keep(&self, writer: &Writer, part: u32, parts: &[&[u8]], writes: u64) -> io::Result<()> {
        let object = self.store.put(parts, writer.encryption, writer.sharers)?;
        let bytes = parts[0].len() as u64;
        let mut state = writer.lock();
        if state.freed {
            drop(state);
            self.store.free(&object);
            return Ok(());
        }
        state.chunks[part as usize].there.push_back(Chunk { object, bytes, writes });
        state.stream.handle(self.now(), Event::Sealed { part, bytes }, &mut Vec::new());
        drop(state);
        writer.changed[part as usize].notify_all();
        Ok(())
    }
}

impl Writer {
    fn wake_all(&self) {
        self.changed.iter().chain(&self.room).for_each(Condvar::notify_all);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    fn wait_for_room(
        &self,
        part: u32,
        now: impl Fn() -> Time,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(), WriteError> {
        loop {
            let state = self.lock();
            state.is_writable()?;
            let now = now();
            let Some(until) = state.stream.waits(now, part) else { return Ok(()) };
            let time = until.since(now).min(INTERRUPT_EVERY);
            drop(self.room[part as usize].wait_timeout(state, time).expect("no panic while held"));
            if interrupted() {
                return Err(WriteError::Interrupted);
            }
        }
    }
}

impl State {
    fn take(&mut self, part: u32, chunks: Range<u64>) -> Vec<Chunk> {
        let own = &mut self.chunks[part as usize];
        let count = (chunks.end - own.first) as usize;
        own.first = chunks.end;
        own.there.drain(..count).collect()
    }

    fn chunks_of(&self, part: u32, range: Range<u64>) -> Vec<Chunk> {
        let own = &self.chunks[part as usize];
        own.there.iter().skip((range.start - own.first) as usize).take(CHUNKS_PER_REPLY).copied().collect()
    }

    /// # Errors
    /// No task needs it, or it was ended.
    fn is_writable(&self) -> Result<(), WriteError> {
        if self.freed {
            return Err(WriteError::Over("no task needs this stream any more"));
        }
        if self.ending { Err(WriteError::Over("this stream was ended")) } else { Ok(()) }
    }
}
