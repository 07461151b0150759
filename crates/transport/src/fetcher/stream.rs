//! The reader of a part of a stream: asks its writer which chunks follow, and fetches them ahead of the task that reads.

use super::{CLOSES, Fetcher, Planned, Shared};
use crate::carrier::{self, Connection};
use crate::object::ObjectId;
use crate::parts::{FetchRequest, Part, Wanted};
use crate::streams::{Chunk, Told};
use crate::wire::Wants;
use mission_core::defaults::{PROGRESS_TIMEOUT, RETRY_FIRST, RETRY_MAX};
use mission_core::flight::{Leg, Reach};
use mission_core::host::fetches::{Fault, FetchError};
use mission_core::stream::ReaderId;
use mission_core::types::{Demands, Encryption, TransferId, Transport};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// What is fetched ahead of the task that reads: eight chunks.
const READ_AHEAD_BYTES: u64 = 32 << 20;
/// How long a stream of this process is asked at a time.
const ASK_WITHIN: Duration = Duration::from_millis(200);
/// How often a task that waits is asked whether it was interrupted.
const INTERRUPT_EVERY: Duration = Duration::from_millis(100);

/// Which part of which stream is read, and for whom.
#[derive(Clone)]
pub struct Reading {
    pub stream: ObjectId,
    pub part: u32,
    /// Of its writer's data plane.
    pub address: SocketAddr,
    pub reader: ReaderId,
    pub transfer: TransferId,
    pub demands: Demands,
}

/// A chunk that is here.
pub struct Arrived {
    pub bytes: Part,
    /// The sizes of what was written, little-endian numbers of 64 bits; `None`: it was written at once.
    pub sizes: Option<Part>,
}

/// What there is for the task that reads.
pub enum Next {
    Chunk(Arrived),
    /// Nothing yet.
    Later,
    End,
}

/// Why a part cannot be read to its end.
#[derive(Clone, Debug)]
pub enum ReadError {
    /// The writer raised this.
    Writer(String),
    Fetch(FetchError),
}

/// Reads one part, from its first chunk. Dropped, it asks no more.
pub struct Reader {
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    /// There is something for the task, or room for more.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    arrived: VecDeque<Arrived>,
    bytes: u64,
    end: Option<Result<(), ReadError>>,
    /// The task reads no more.
    closed: bool,
}

impl Reader {
    /// Begins to read in a thread of its own.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn new(fetcher: Arc<Fetcher>, reading: Reading) -> std::io::Result<Reader> {
        let queue = Arc::<Queue>::default();
        let own = queue.clone();
        let read = move || {
            let end = Asker { fetcher: &fetcher, reading: &reading, queue: &own, connection: None }.run();
            own.lock().end = Some(end);
            own.changed.notify_all();
        };
        thread::Builder::new().name("mission-stream".into()).stack_size(512 << 10).spawn(read)?;
        Ok(Reader { queue })
    }

    /// The next chunk; `wait`: until there is one, or the end. `interrupted` is asked meanwhile.
    ///
    /// # Errors
    /// The part cannot be read to its end.
    pub fn next(&self, wait: bool, mut interrupted: impl FnMut() -> bool) -> Result<Next, ReadError> {
        let mut state = self.queue.lock();
        loop {
            if let Some(arrived) = state.arrived.pop_front() {
                state.bytes -= arrived.bytes.bytes().len() as u64;
                self.queue.changed.notify_all();
                return Ok(Next::Chunk(arrived));
            }
            match &state.end {
                Some(Ok(())) => return Ok(Next::End),
                Some(Err(error)) => return Err(error.clone()),
                None if !wait => return Ok(Next::Later),
                None => {}
            }
            state = self.queue.changed.wait_timeout(state, INTERRUPT_EVERY).expect("no panic while held").0;
            if state.arrived.is_empty() && state.end.is_none() {
                drop(state);
                if interrupted() {
                    return Err(ReadError::Fetch(FetchError::Cancelled("interrupted".into())));
                }
                state = self.queue.lock();
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }
}

/// The thread of a reader.
struct Asker<'a> {
    fetcher: &'a Fetcher,
    reading: &'a Reading,
    queue: &'a Queue,
    connection: Option<Box<dyn Connection>>,
}

impl Asker<'_> {
    fn run(mut self) -> Result<(), ReadError> {
        let shared = &self.fetcher.shared;
        let planned = shared.plan(&self.reading.transfer.job, &self.reading.demands).map_err(ReadError::Fetch)?;
        let mut after = 0;
        let (mut silent, mut pause) = (None::<(Instant, String)>, RETRY_FIRST);
        loop {
            self.waits_for_room()?;
            match self.ask(shared, &planned, after) {
                Ok(told) => {
                    (silent, pause) = (None, RETRY_FIRST);
                    match told {
                        Told::Chunks(chunks) => after += self.bring(&chunks)?,
                        Told::Later => {}
                        Told::Complete => return Ok(()),
                        Told::Failed(why) => return Err(ReadError::Writer(why)),
                        Told::Freed => return Err(self.lost("its beginning was read and freed")),
                        Told::Unknown => return Err(self.lost("its writer's worker has it no more")),
                        Told::Taken => {
                            let why = "another task reads this part of the stream: open it with keep=True for several";
                            return Err(ReadError::Fetch(FetchError::Denied(why.into())));
                        }
                    }
                }
                Err(Fault::Denied(why)) => return Err(ReadError::Fetch(FetchError::Denied(why))),
                Err(fault) => {
                    self.connection = None;
                    // Word that its worker has left comes later than its sockets break.
                    if let Some(why) = shared.lock().lost.get(&self.reading.stream) {
                        return Err(ReadError::Fetch(FetchError::Lost(why.clone())));
                    }
                    let (since, why) = silent.get_or_insert_with(|| (Instant::now(), format!("{fault:?}")));
                    if since.elapsed() >= PROGRESS_TIMEOUT {
                        let why = format!("the writer of the stream at {}: {why}", self.reading.address);
                        return Err(ReadError::Fetch(FetchError::Unreachable(why)));
                    }
                    self.pauses(pause)?;
                    pause = (2 * pause).min(RETRY_MAX);
                }
            }
        }
    }

    /// The stream is gone: whoever hears of it can have it written again.
    fn lost(&self, why: &str) -> ReadError {
        let why = format!("the stream has to be written again: {why}");
        self.fetcher.lost(&[self.reading.stream], &why);
        ReadError::Fetch(FetchError::Lost(why))
    }

    fn ask(&mut self, shared: &Shared, planned: &Planned, after: u64) -> Result<Told, Fault> {
        let Reading { stream, part, address, reader, .. } = *self.reading;
        if address == shared.own_address {
            return Ok(shared.streams.ask(&stream, part, reader, after, ASK_WITHIN));
        }
        if self.connection.is_none() {
            self.connection = Some(connect(shared, planned, address)?);
        }
        let connection = self.connection.as_mut().expect("there is one now");
        connection.chunks(stream, part, Wants::Chunks { after, reader })
    }

    /// Fetches as many of these chunks as are to be ahead of the task, at least one; gives how many.
    fn bring(&self, chunks: &[Chunk]) -> Result<u64, ReadError> {
        let ahead = self.queue.lock().bytes;
        let mut bytes = 0;
        let within = |chunk: &&Chunk| {
            let first = bytes == 0;
            bytes += chunk.bytes.max(1);
            first || ahead + bytes <= READ_AHEAD_BYTES
        };
        let chunks: Vec<Chunk> = chunks.iter().take_while(within).copied().collect();
        let wanted = |object, part, len| Wanted { object, part, len, addresses: vec![self.reading.address] };
        let mut parts = Vec::with_capacity(chunks.len());
        for chunk in &chunks {
            parts.push(wanted(chunk.object, 0, chunk.bytes));
            if chunk.writes > 1 {
                // Of a head that says more, no memory is taken for it.
                let len = chunk.writes.checked_mul(8).ok_or_else(|| self.lost("it makes no sense"))?;
                parts.push(wanted(chunk.object, 1, len));
            }
        }
        let Reading { transfer, demands, .. } = self.reading;
        let request =
            FetchRequest { transfer: transfer.clone(), demands: *demands, parts, packed: false, whole: false };
        let fetched = self.fetcher.fetch(request, || self.queue.lock().closed);
        let fetched = fetched.map_err(|error| match error {
            FetchError::Lost(why) => self.lost(&why),
            other => ReadError::Fetch(other),
        })?;
        let mut parts = fetched.parts.into_iter();
        let mut state = self.queue.lock();
        for chunk in &chunks {
            let bytes = parts.next().expect("as many as were asked for");
            let sizes = (chunk.writes > 1).then(|| parts.next().expect("as many as were asked for"));
            state.bytes += chunk.bytes;
            state.arrived.push_back(Arrived { bytes, sizes });
        }
        drop(state);
        self.queue.changed.notify_all();
        Ok(chunks.len() as u64)
    }

    /// Waits while enough is ahead of the task.
    fn waits_for_room(&self) -> Result<(), ReadError> {
        loop {
            self.pauses(Duration::ZERO)?;
            let state = self.queue.lock();
            if state.bytes < READ_AHEAD_BYTES {
                return Ok(());
            }
            drop(self.queue.changed.wait_timeout(state, INTERRUPT_EVERY).expect("no panic while held"));
        }
    }

    /// # Errors
    /// The task reads no more, or this worker closes.
    fn pauses(&self, time: Duration) -> Result<(), ReadError> {
        let end = Instant::now() + time;
        let cancelled = |why: &str| Err(ReadError::Fetch(FetchError::Cancelled(why.into())));
        loop {
            if self.fetcher.shared.lock().closing {
                return cancelled(CLOSES);
            }
            let state = self.queue.lock();
            if state.closed {
                return cancelled("nobody reads it any more");
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            drop(self.queue.changed.wait_timeout(state, left.min(INTERRUPT_EVERY)).expect("no panic while held"));
        }
    }
}

/// A connection to ask over, with what the job demands. Where its bytes may only come by shared memory, its questions go over
/// TCP.
fn connect(shared: &Shared, planned: &Planned, address: SocketAddr) -> Result<Box<dyn Connection>, Fault> {
    let plain = Leg {
        transport: Transport::Tcp,
        reach: Reach::Anywhere,
        encryption: Encryption::None,
        congestion_control: None,
        rto_min_us: None,
        subflows: None,
        reason: "questions".into(),
        except: None,
    };
    let mut legs = planned.to(address).to_vec();
    if legs.is_empty() && planned.plan.demands.encrypt == Encryption::None {
        legs.push(plain);
    }
    let mut failed = Fault::Denied("this process has a carrier for none of the planned transports".into());
    for leg in &legs {
        let Some(carrier) = carrier::carrier(leg.transport) else { continue };
        match carrier.connect(address, leg, &shared.context) {
            Ok(connection) => return Ok(connection),
            Err(fault) => failed = fault,
        }
    }
    Err(failed)
}
