//! The reader of a part of a stream: asks its writer which chunks follow, and fetches them ahead of the task that reads.

use super::{CLOSES, Fetcher, Planned, Shared};
use crate::carrier::{self, Connection};
use crate::clock::lasting;
use crate::object::ObjectId;
use crate::parts::{FetchRequest, Part, Wanted};
use crate::streams::{Chunk, ChunkReply};
use crate::wire::Wants;
use mission_core::defaults::PROGRESS_TIMEOUT;
use mission_core::flight::{Leg, Reach};
use mission_core::host::fetches::{Fault, FetchError};
use mission_core::host::retry::Retry;
use mission_core::random::SplitMix;
use mission_core::stream::ReaderId;
use mission_core::types::{Demands, Encryption, TransferId, Transport};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes fetched ahead of the task that reads: eight chunks.
const READ_AHEAD_BYTES: u64 = 32 << 20;
/// How long a stream of this process is asked at a time.
const ASK_WITHIN: Duration = Duration::from_millis(200);
/// A writer that answers "nothing yet" sooner than this has many readers: it is asked again after this time.
const ASK_AGAIN: Duration = Duration::from_millis(50);
/// How often a reader reports to the writer that it still takes chunks, while it fetches or its task reads.
const RENEW_EVERY: Duration = Duration::from_secs(3);
/// Fetches in a row without data, although the writer answers.
const MISSED_MAX: u32 = 3;
/// How often a waiting task is checked for an interrupt.
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

/// What the task that reads can take.
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

/// Reads one part, from its first chunk, until it is dropped.
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
    /// The task has taken something since the last report to the writer.
    took: bool,
    end: Option<Result<(), ReadError>>,
    /// The task has stopped reading.
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
            let shared = &fetcher.shared;
            let planned = shared.plan(&reading.transfer.job, &reading.demands).map_err(ReadError::Fetch);
            let asking = RefCell::new(Asking { connection: None, last: Instant::now() });
            let missed = Cell::new(0);
            let asker = planned.map(|planned| Asker {
                fetcher: &fetcher,
                reading: &reading,
                queue: &own,
                planned,
                after: 0,
                asking,
                missed,
            });
            let end = asker.and_then(Asker::run);
            own.lock().end = Some(end);
            own.changed.notify_all();
        };
        thread::Builder::new().name("mission-stream".into()).stack_size(512 << 10).spawn(read)?;
        Ok(Reader { queue })
    }

    /// Returns the next chunk; `wait`: until there is one, or the end. Calls `interrupted` meanwhile.
    ///
    /// # Errors
    /// The part cannot be read to its end.
    pub fn next(&self, wait: bool, mut interrupted: impl FnMut() -> bool) -> Result<Next, ReadError> {
        let mut state = self.queue.lock();
        loop {
            if let Some(arrived) = state.arrived.pop_front() {
                state.bytes -= arrived.bytes.bytes().len() as u64;
                state.took = true;
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
    planned: Arc<Planned>,
    /// Chunks that have come.
    after: u64,
    /// Asks the writer, and when it last did.
    asking: RefCell<Asking>,
    /// Fetches in a row without data.
    missed: Cell<u32>,
}

struct Asking {
    connection: Option<Box<dyn Connection>>,
    last: Instant,
}

impl Asker<'_> {
    fn run(mut self) -> Result<(), ReadError> {
        // Since when the writer gives no answer that is of use.
        let mut without = None::<Instant>;
        let (mut retry, mut random) = (Retry::default(), SplitMix(u64::from_ne_bytes(crate::auth::random())));
        loop {
            self.waits_for_room()?;
            let asked = Instant::now();
            match self.ask() {
                Ok(reply) => {
                    without = None;
                    retry.answered();
                    match reply {
                        ChunkReply::Chunks(chunks) => self.after += self.bring(&chunks)?,
                        ChunkReply::Later if asked.elapsed() < ASK_AGAIN => self.pauses(ASK_AGAIN)?,
                        ChunkReply::Later => {}
                        ChunkReply::Complete => return Ok(()),
                        ChunkReply::Failed(why) => return Err(ReadError::Writer(why)),
                        ChunkReply::Freed => return Err(self.lost("its beginning was read and freed")),
                        ChunkReply::Unknown => return Err(self.lost("its writer's worker no longer has it")),
                        ChunkReply::Taken => {
                            let why =
                                "this part was read before, by this or another task: open the stream with keep=True";
                            return Err(ReadError::Fetch(FetchError::Denied(why.into())));
                        }
                    }
                }
                Err(Fault::Denied(why)) => return Err(ReadError::Fetch(FetchError::Denied(why))),
                Err(fault) => {
                    // The message that its worker has left comes later than its sockets break.
                    self.is_there()?;
                    let (why, pause) = match fault {
                        Fault::Busy { retry_after } => {
                            ("is at its connection limit".into(), retry.busy(retry_after, &mut random))
                        }
                        other => (format!("{other:?}"), retry.failed(&mut random)),
                    };
                    let since = without.get_or_insert_with(Instant::now);
                    if since.elapsed() >= lasting(PROGRESS_TIMEOUT) {
                        let why = format!("the writer of the stream at {}: {why}", self.reading.address);
                        return Err(ReadError::Fetch(FetchError::Unreachable(why)));
                    }
                    self.pauses(pause)?;
                }
            }
        }
    }

    /// Reports that the stream is gone, so that it can be written again.
    fn lost(&self, why: &str) -> ReadError {
        let why = format!("the stream has to be written again: {why}");
        self.fetcher.lost(&[self.reading.stream], &why);
        ReadError::Fetch(FetchError::Lost(why))
    }

    /// # Errors
    /// The Mission Controller has reported that the stream is lost.
    fn is_there(&self) -> Result<(), ReadError> {
        match self.fetcher.shared.lock().lost.get(&self.reading.stream) {
            Some(why) => Err(ReadError::Fetch(FetchError::Lost(why.clone()))),
            None => Ok(()),
        }
    }

    fn ask(&self) -> Result<ChunkReply, Fault> {
        let shared = &self.fetcher.shared;
        let Reading { stream, part, address, reader, .. } = *self.reading;
        let mut asking = self.asking.borrow_mut();
        asking.last = Instant::now();
        self.queue.lock().took = false;
        if address == shared.own_address {
            return Ok(shared.streams.ask(&stream, part, reader, self.after, ASK_WITHIN));
        }
        let mut connection = match asking.connection.take() {
            Some(connection) => connection,
            None => connect(shared, &self.planned, address)?,
        };
        let reply = connection.chunks(stream, part, Wants::Chunks { after: self.after, reader });
        // After an error the next question opens a new connection.
        asking.connection = Some(connection).filter(|_| reply.is_ok());
        reply
    }

    fn is_due(&self) -> bool {
        self.asking.borrow().last.elapsed() >= RENEW_EVERY
    }

    /// Reports to the writer that chunks are being taken.
    fn renew(&self) {
        if self.is_due() {
            // The writer has chunks after this one, so it answers at once. The next question handles an error.
            let _ = self.ask();
        }
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
                // Allocate nothing for a header that claims an impossible number.
                let len = chunk
                    .writes
                    .checked_mul(8)
                    .ok_or_else(|| self.lost("a chunk has an impossible number of writes"))?;
                parts.push(wanted(chunk.object, 1, len));
            }
        }
        let Reading { transfer, demands, .. } = self.reading;
        let request = FetchRequest::new(transfer.clone(), *demands, parts);
        let over = || {
            self.renew();
            self.queue.lock().closed || self.is_there().is_err()
        };
        let fetched = match self.fetcher.fetch(request, over) {
            Ok(fetched) => fetched,
            Err(error) => {
                self.is_there()?;
                return match error {
                    // The next question to the writer shows what happened: the stream may have failed, or its worker be
                    // gone.
                    FetchError::Lost(_) | FetchError::Unreachable(_) if self.missed.get() < MISSED_MAX => {
                        self.missed.set(self.missed.get() + 1);
                        Ok(0)
                    }
                    FetchError::Lost(why) => Err(self.lost(&why)),
                    other => Err(ReadError::Fetch(other)),
                };
            }
        };
        self.missed.set(0);
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

    /// Waits while enough chunks are ahead of the task.
    fn waits_for_room(&self) -> Result<(), ReadError> {
        loop {
            self.pauses(Duration::ZERO)?;
            let state = self.queue.lock();
            if state.bytes < READ_AHEAD_BYTES {
                return Ok(());
            }
            if state.took && self.is_due() {
                drop(state);
                self.renew();
                continue;
            }
            drop(self.queue.changed.wait_timeout(state, INTERRUPT_EVERY).expect("no panic while held"));
        }
    }

    /// # Errors
    /// The task has stopped reading, or this worker is closing.
    fn pauses(&self, time: Duration) -> Result<(), ReadError> {
        let end = Instant::now() + time;
        let cancelled = |why: &str| Err(ReadError::Fetch(FetchError::Cancelled(why.into())));
        loop {
            if self.fetcher.shared.lock().closing {
                return cancelled(CLOSES);
            }
            let state = self.queue.lock();
            if state.closed {
                return cancelled("the stream's reader was closed");
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            drop(self.queue.changed.wait_timeout(state, left.min(INTERRUPT_EVERY)).expect("no panic while held"));
        }
    }
}

/// A connection for questions that meets the job's demands. Where its bytes may only come by shared memory, questions
/// go over TCP.
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
    let mut failed = Fault::Denied("this worker supports none of the planned transports".into());
    for leg in &legs {
        let Some(carrier) = carrier::carrier(leg.transport) else { continue };
        match carrier.connect(address, leg, &shared.context) {
            Ok(connection) => return Ok(connection),
            Err(fault) => failed = fault,
        }
    }
    Err(failed)
}
