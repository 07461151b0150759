//! Synchronized reads over real sockets: many senders answer one receiver at once (paper 000, figure 1).
//!
//! A [`Server`] sends synthetic data; [`measure`] asks many of them for a fragment each, and for the next block
//! when the last fragment is there. Senders report what their kernels did. A connection begins with JSON lines in both
//! directions:
//!
//! ```text
//! receiver  {"nonce": ...}                               sender  {"nonce": ..., "proof": ...}
//! receiver  {"proof": ..., "ask": Asked}                 sender  {"flow": Flow} or {"error": "..."}
//! then      8 bytes, big endian: how many bytes          those bytes; for 0 {"flow": Flow}
//! ```
//!
//! Blocks are requested over these connections, or each over connections of its own (`incast/fresh.rs`).

mod flow;
mod fresh;
mod server;

pub use flow::{Flow, Variables};
pub use server::{Limits, Server};

use crate::auth::{self, Nonce, Purpose, Role, Token};
use crate::object::{from_hex, to_hex};
use crate::windows::{Governed, Governor};
use mission_core::budget::Budget;
use mission_core::random::SplitMix;
use mission_core::turns::Turns;
use mission_core::units::Time;
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest line of the handshake.
const LINE_MAX: usize = 4096;
/// Time for connecting, and for the lines of the handshake.
const HELLO_PATIENCE: Duration = Duration::from_secs(10);
/// Time for all senders to report what their kernels did at the end. With time dilation of ten, a lost answer is
/// retransmitted after 2 s, and once more after 4.
const LAST_PATIENCE: Duration = Duration::from_secs(10);
/// How often a measurement checks whether it was interrupted.
const INTERRUPT_EVERY: Duration = Duration::from_millis(100);
/// Interval between two points of a trace.
const TRACE_EVERY: Duration = Duration::from_millis(1);
/// Bytes per read; larger than what a socket usually holds.
const READ_BYTES: usize = 256 << 10;

/// Options that the receiver requests for a sender's socket.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Asked {
    pub congestion_control: Option<String>,
    /// Minimum RTO of the socket, in microseconds.
    pub rto_min_us: Option<u32>,
    /// Bits per second that the socket may send.
    pub pace_bits_per_sec: Option<u64>,
}

fn say(mut stream: &TcpStream, value: &Value) -> io::Result<()> {
    let mut line = value.to_string();
    line.push('\n');
    stream.write_all(line.as_bytes())
}

/// Reads one line before the deadline, byte by byte: the bytes after it are not JSON.
fn hear(stream: &mut TcpStream, until: Instant) -> io::Result<Value> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() < LINE_MAX {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left))?;
        stream.read_exact(&mut byte)?;
        if byte == *b"\n" {
            return serde_json::from_slice(&line).map_err(|error| io::Error::new(ErrorKind::InvalidData, error));
        }
        line.extend(byte);
    }
    Err(io::Error::new(ErrorKind::InvalidData, "it is not a sender of synchronized reads"))
}

fn proves(token: &Token, role: Role, client: &Nonce, server: &Nonce, said: &Value) -> bool {
    let proof = said["proof"].as_str().and_then(from_hex).unwrap_or_default();
    token.proves(role, client, server, Purpose::Ranges(&[]), &proof)
}

fn nonce(hello: &Value) -> io::Result<Nonce> {
    let bytes = hello["nonce"].as_str().and_then(from_hex).and_then(|bytes| bytes.try_into().ok());
    bytes.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "it is not a sender of synchronized reads"))
}

/// How many senders are asked in parallel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Concurrent {
    All,
    /// The number with the highest goodput ([`Budget`]).
    Auto,
    #[serde(untagged)]
    Fixed(u32),
}

/// What is to be measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reads {
    pub senders: Vec<SocketAddr>,
    /// Bytes of each sender for each block.
    pub fragment: u64,
    /// Measured blocks, and warm-up blocks before them.
    pub blocks: u32,
    pub warm_up: u32,
    /// Senders that are asked in parallel; the next one when one is done.
    pub concurrent: Concurrent,
    /// Requests are delayed by a random time of up to this many microseconds.
    #[serde(default)]
    pub jitter_us: u32,
    /// Each socket's minimum RTO is shortened by a random fraction, up to this one; 0: all are equal. A longer one
    /// would have no effect on a connection that has measured its round trip: its estimate of the deviation only falls.
    #[serde(default)]
    pub rto_spread: f64,
    pub seed: u64,
    /// The measurement ends after so many seconds, with the results so far.
    pub deadline_s: f64,
    /// Rate of the receiver's link, in bits per second; then windows follow its free capacity
    /// ([`mission_core::ictcp`]).
    #[serde(default)]
    pub ictcp_link: Option<u64>,
    /// Each block is requested over new connections, which are made before its time begins.
    #[serde(default)]
    pub fresh: bool,
    /// For how many senders, from the first, the arrival of bytes is traced.
    #[serde(default)]
    pub traced: usize,
    #[serde(default)]
    pub ask: Asked,
}

/// What was measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Measured {
    /// Seconds of each block: from the first request to the last byte.
    pub blocks: Vec<f64>,
    /// Bytes of those blocks, and of one that did not end.
    pub bytes: u64,
    /// Seconds from the start of the first block to the end of the last, or of the measurement.
    pub seconds: f64,
    /// Since the warm-up.
    pub flows: Vec<Flow>,
    /// If the number of senders is found by trial: its changes, as seconds since the start of the warm-up and the
    /// number.
    pub limits: Vec<(f64, u32)>,
    /// For traced senders, in the order of time: seconds since the first block, number of the sender, its bytes so far.
    pub trace: Vec<(f64, usize, u64)>,
    /// Why the measurement ended before all blocks were read.
    pub ended: Option<String>,
}

impl Reads {
    /// How long the measurement may take.
    ///
    /// # Errors
    /// The deadline is not above 0, or too large for the clock.
    pub fn deadline(&self) -> Result<Duration, String> {
        let deadline = Duration::try_from_secs_f64(self.deadline_s).ok().filter(|deadline| !deadline.is_zero());
        let deadline = deadline.filter(|deadline| Instant::now().checked_add(*deadline).is_some());
        deadline.ok_or_else(|| format!("a deadline of {} s: use seconds above 0, such as 60", self.deadline_s))
    }
}

/// One connection of the receiver.
struct Reader {
    address: SocketAddr,
    /// The first connection, which stays.
    stream: TcpStream,
    /// Nonces of both ends, by which the sender identifies fresh connections.
    session: (Nonce, Nonce),
    /// The connection of this block, where each has its own.
    fresh: Option<Arc<TcpStream>>,
    left: u64,
    /// Its last request, and when.
    piece: (u64, Instant),
    bytes: u64,
    before: Flow,
    governed: Option<Governed>,
}

/// Called during a measurement with the number of blocks read, including the warm-up. True ends the measurement.
pub type Watch<'a> = &'a mut dyn FnMut(u32) -> bool;

/// Reads blocks from all senders, and measures how long each took.
///
/// # Errors
/// A sender cannot be reached or refuses: one line that names it. A later failure ends the measurement with the results
/// so far.
pub fn measure(reads: &Reads, token: &[u8], watch: Watch) -> Result<Measured, String> {
    let deadline = reads.deadline()?;
    let token = Token::new(token);
    let mut random = SplitMix(reads.seed);
    let governor = reads.ictcp_link.map(Governor::start).transpose().map_err(|error| error.to_string())?;
    let mut readers = Vec::new();
    for address in &reads.senders {
        let mut ask = reads.ask.clone();
        if reads.rto_spread > 0.0 {
            let part = random.unit() * reads.rto_spread;
            ask.rto_min_us = ask.rto_min_us.map(|rto| rto - (f64::from(rto) * part.min(1.0)) as u32);
        }
        let reader = Reader::connect(*address, &token, &ask, governor.as_ref());
        readers.push(reader.map_err(|why| format!("sender {address}: {why}"))?);
    }
    let mut measured = Measured::default();
    let began = Instant::now();
    let mut run = Run {
        reads,
        random,
        budget: Budget::default(),
        turns: Turns::new(reads.senders.len(), reads.concurrent == Concurrent::Auto),
        limits: Vec::new(),
        trace: Vec::new(),
        began,
        traced_since: None,
        deadline: began + deadline,
        watched: began,
        scratch: vec![0; READ_BYTES],
    };
    let mut seconds = Duration::ZERO;
    for number in 0..reads.warm_up + reads.blocks {
        if number == reads.warm_up {
            if let Err(why) = readers.iter_mut().try_for_each(|reader| {
                let until = Instant::now() + HELLO_PATIENCE;
                reader.question().map_err(|error| reader.failed(&error))?;
                reader.answer(until).map(|flow| reader.before = flow)
            }) {
                measured.ended = Some(why);
                break;
            }
            readers.iter_mut().for_each(|reader| reader.bytes = 0);
            seconds = Duration::ZERO;
            run.traced_since = Some(Instant::now());
        }
        if reads.fresh
            && let Err(why) =
                fresh::connect(&mut readers, &token, u64::from(number) + 1, governor.as_ref(), run.deadline)
        {
            measured.ended = Some(why);
            // Senders answer once they have counted what they sent over these.
            readers.iter_mut().for_each(Reader::close_fresh);
            break;
        }
        let start = Instant::now();
        let ended = run.block(&mut readers, number, watch);
        let took = start.elapsed();
        seconds += took;
        readers.iter_mut().for_each(Reader::close_fresh);
        match ended {
            Ok(()) if number >= reads.warm_up => measured.blocks.push(took.as_secs_f64()),
            Ok(()) => {}
            Err(why) => {
                measured.ended = Some(why);
                break;
            }
        }
    }
    (measured.limits, measured.trace) = (run.limits, run.trace);
    measured.seconds = seconds.as_secs_f64();
    measured.bytes = readers.iter().map(|reader| reader.bytes).sum();
    let until = Instant::now() + LAST_PATIENCE;
    // Ask all senders before reading an answer: a round trip may be long, and none shall wait for the answers of the
    // others.
    let asked: Vec<bool> =
        readers.iter().map(|reader| (reader.left == 0 || reads.fresh) && reader.question().is_ok()).collect();
    measured.flows = readers.iter_mut().zip(asked).map(|(reader, asked)| reader.flow(asked, until)).collect();
    Ok(measured)
}

/// State that continues from block to block.
struct Run<'a> {
    reads: &'a Reads,
    random: SplitMix,
    budget: Budget,
    turns: Turns,
    limits: Vec<(f64, u32)>,
    trace: Vec<(f64, usize, u64)>,
    began: Instant,
    /// The end of the warm-up.
    traced_since: Option<Instant>,
    deadline: Instant,
    /// When `watch` was last called.
    watched: Instant,
    scratch: Vec<u8>,
}

impl Run<'_> {
    /// Senders that may be asked in parallel now.
    fn limit(&self) -> u32 {
        match self.reads.concurrent {
            Concurrent::All => u32::MAX,
            Concurrent::Fixed(most) => most.max(1),
            Concurrent::Auto => self.budget.limit(),
        }
    }

    fn observe(&mut self, bytes: u64, chunks: u32, in_use: usize, waiting: usize) {
        if self.reads.concurrent != Concurrent::Auto {
            return;
        }
        let passed = self.began.elapsed().as_secs_f64();
        self.budget.observe(Time::from_secs_f64(passed), bytes, chunks, in_use as u32, waiting as u32);
        let limit = self.budget.limit();
        if self.limits.last().is_none_or(|(_, last)| *last != limit) {
            self.limits.push((passed, limit));
        }
    }

    /// Records the bytes of a traced sender: once in [`TRACE_EVERY`], and at the end of each fragment.
    fn note(&mut self, at: usize, bytes: u64, left: u64) {
        let Some(since) = self.traced_since.filter(|_| at < self.reads.traced) else { return };
        let now = since.elapsed().as_secs_f64();
        let last = self.trace.iter().rev().find(|(_, sender, _)| *sender == at);
        if left == 0 || last.is_none_or(|(before, _, _)| now - before >= TRACE_EVERY.as_secs_f64()) {
            self.trace.push((now, at, bytes));
        }
    }

    /// Reads one block.
    fn block(&mut self, readers: &mut [Reader], number: u32, watch: Watch) -> Result<(), String> {
        let begin = Instant::now();
        let jitter = f64::from(self.reads.jitter_us) / 1e6;
        let due: Vec<Instant> =
            readers.iter().map(|_| begin + Duration::from_secs_f64(self.random.unit() * jitter)).collect();
        self.turns.begin(self.reads.fragment);
        let mut asked: Vec<usize> = Vec::with_capacity(readers.len());
        let (mut bytes, mut chunks) = (0, 0);
        loop {
            let now = Instant::now();
            let limit = self.limit();
            while asked.len() < limit as usize
                && let Some((at, piece)) = self.turns.next(limit, |at| due[at] <= now)
            {
                readers[at].ask(piece)?;
                asked.push(at);
            }
            let waiting = self.turns.waiting();
            self.observe(bytes, chunks, asked.len(), waiting);
            (bytes, chunks) = (0, 0);
            if asked.is_empty() && waiting == 0 {
                return Ok(());
            }
            let mut until = (self.watched + INTERRUPT_EVERY).min(self.deadline);
            if let Some(next) = due.iter().filter(|due| **due > now && asked.len() < limit as usize).min() {
                until = until.min(*next);
            }
            let ready = ready(&asked, readers, until.saturating_duration_since(now))?;
            for at in ready {
                let before = readers[at].left;
                let left = readers[at].read(&mut self.scratch)?;
                bytes += before - left;
                self.note(at, readers[at].bytes, left);
                if left == 0 {
                    chunks += 1;
                    asked.retain(|other| *other != at);
                    let (piece, since) = readers[at].piece;
                    self.turns.arrived(at, piece, since.elapsed().as_secs_f64());
                }
            }
            let now = Instant::now();
            if now >= self.deadline {
                let slow: Vec<_> = asked.iter().map(|at| readers[*at].address.to_string()).collect();
                let (seconds, slow) = (self.reads.deadline_s, slow.join(", "));
                return Err(format!("the deadline of {seconds} s has passed; block {number} was waiting for {slow}"));
            }
            if now.duration_since(self.watched) >= INTERRUPT_EVERY {
                self.watched = now;
                if watch(number) {
                    return Err("interrupted".into());
                }
            }
        }
    }
}

/// The asked senders from which bytes have arrived, within `wait`.
fn ready(asked: &[usize], readers: &[Reader], wait: Duration) -> Result<Vec<usize>, String> {
    let mut polled: Vec<_> = asked.iter().map(|at| PollFd::new(readers[*at].data(), PollFlags::IN)).collect();
    let wait = wait.try_into().expect("a short time");
    match poll(&mut polled, Some(&wait)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.to_string()),
    }
    Ok(asked.iter().zip(&polled).filter(|(_, own)| !own.revents().is_empty()).map(|(at, _)| *at).collect())
}

impl Reader {
    fn connect(address: SocketAddr, token: &Token, ask: &Asked, governor: Option<&Governor>) -> Result<Reader, String> {
        let words = |error: io::Error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => "it does not answer".to_owned(),
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => "it closed the connection".to_owned(),
            _ => error.to_string(),
        };
        let mut stream = TcpStream::connect_timeout(&address, HELLO_PATIENCE).map_err(words)?;
        stream.set_nodelay(true).map_err(words)?;
        let govern = |governor: &Governor| governor.govern(Arc::new(stream.try_clone()?));
        let governed = governor.map(govern).transpose().map_err(words)?;
        let until = Instant::now() + HELLO_PATIENCE;
        let client: Nonce = auth::random();
        say(&stream, &json!({ "nonce": to_hex(&client) })).map_err(words)?;
        let hello = hear(&mut stream, until).map_err(words)?;
        if let Some(error) = hello["error"].as_str() {
            return Err(error.to_owned());
        }
        let server = nonce(&hello).map_err(words)?;
        // This side proves first: a sender that proved anything to strangers would let them guess a weak token at leisure.
        let proof = to_hex(&token.prove(Role::Client, &client, &server, Purpose::Ranges(&[])));
        say(&stream, &json!({ "proof": proof, "ask": ask })).map_err(words)?;
        let answer = hear(&mut stream, until).map_err(words)?;
        if answer["error"].is_null() && !proves(token, Role::Server, &client, &server, &answer) {
            return Err("the tokens differ".into());
        }
        let before = Flow::from_answer(answer)?;
        let session = (client, server);
        Ok(Reader { address, stream, session, fresh: None, left: 0, piece: (0, until), bytes: 0, before, governed })
    }

    /// The connection that carries data.
    fn data(&self) -> &TcpStream {
        self.fresh.as_deref().unwrap_or(&self.stream)
    }

    /// Ends the block's own connection, where there is one; the sender then counts what it did.
    fn close_fresh(&mut self) {
        if self.fresh.take().is_some() {
            self.governed = None;
        }
    }

    fn failed(&self, error: &io::Error) -> String {
        format!("sender {} is gone: {error}", self.address)
    }

    fn ask(&mut self, piece: u64) -> Result<(), String> {
        self.left = piece;
        self.piece = (piece, Instant::now());
        self.data().write_all(&piece.to_be_bytes()).map_err(|error| self.failed(&error))
    }

    /// Reads what has arrived; returns how many bytes are missing.
    fn read(&mut self, scratch: &mut [u8]) -> Result<u64, String> {
        let room = self.left.min(scratch.len() as u64) as usize;
        match self.data().read(&mut scratch[..room]) {
            Ok(0) => Err(format!("sender {} closed the connection", self.address)),
            Ok(bytes) => {
                self.left -= bytes as u64;
                self.bytes += bytes as u64;
                Ok(self.left)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(self.left),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Asks for the current counts of the sender's kernel.
    fn question(&self) -> io::Result<()> {
        (&self.stream).write_all(&0u64.to_be_bytes())
    }

    fn answer(&mut self, until: Instant) -> Result<Flow, String> {
        let heard = hear(&mut self.stream, until);
        heard.map_err(|error| self.failed(&error)).and_then(Flow::from_answer)
    }

    /// The counts since the warm-up. A sender that is in the middle of a fragment on the connection that would answer,
    /// or gone, is not `asked`: its counts are 0.
    fn flow(&mut self, asked: bool, until: Instant) -> Flow {
        let now = if asked { self.answer(until).ok() } else { None };
        let asked = now.is_some();
        let flow = now.map_or_else(|| self.before.clone().since(&self.before), |now| now.since(&self.before));
        Flow { sender: self.address.to_string(), bytes: self.bytes, asked, ..flow }
    }
}
