//! The wire: HTTP/1.1 range requests on kept connections; `curl -v` shows them.
//!
//! A request names an object, a part and a range. Every answer repeats a checksum of the request's header as the server
//! saw it, ends its own header with a checksum of that header, and lists the checksums of its body's blocks: a flipped
//! bit anywhere, in payload, length or header, is found by the side that can retry. docs/reference/wire.md shows an
//! exchange.

use crate::auth::Nonce;
use crate::checksum;
use crate::clock::lasting;
use crate::facts::Sender;
use crate::object::{ObjectId, from_hex, to_hex};
use crate::streams::{Chunk, ChunkReply};
use mission_core::defaults::HEAD_BYTES_MAX;
use mission_core::host::door::Turn;
use mission_core::host::{GroupId, MemberId};
use mission_core::stream::ReaderId;
use mission_core::types::Encryption;
use std::fmt::Write;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const HEADERS_MAX: usize = 16;
/// Time from the first byte of a header to its last: a header fits into a few packets.
const HEAD_TIME: Duration = Duration::from_secs(10);
const END: &[u8] = b"\r\n\r\n";
/// Last line of an answer's header: the checksum of all before it.
const LAST: &[u8] = b"Mission-Head: 0123456789abcdef\r\n\r\n";
/// Last part of the path that asks for a source.
const SOURCE: &str = "/source";
/// Last part of the path that asks for chunks of a stream.
const CHUNKS: &str = "/chunks";
/// Last part of the path of a request that only proves the token: of no object.
const PLACE: &str = "/place";
const PAD: &str = "Mission-Pad: ";
/// A header before a body is padded to a multiple of this. Behind a header of odd length, every copy of the body into
/// and out of the kernel's buffers straddles cache lines, which costs 7 to 15 % of the rate
/// (docs/measurements/data-path.md).
const BODY_ALIGN: usize = 64;

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub object: ObjectId,
    pub part: u32,
    pub wants: Wants,
    /// For admission: the client's nonce, and its proof once the server has sent its own nonce.
    pub nonce: Option<Nonce>,
    pub proof: Option<String>,
    /// What a busy server gave this client when it sent it away ([`mission_core::host::door`]).
    pub turn: Option<Turn>,
}

/// What a client wants of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wants {
    /// Nothing yet: a place among the connections that are served. The part is of no meaning.
    Place,
    /// Bytes of it.
    Range {
        start: u64,
        /// At least 1.
        len: u64,
        /// Options that the sender shall set on its socket.
        congestion_control: Option<String>,
        rto_min_us: Option<u32>,
        /// Of which job and transfer it is.
        transfer: Option<(GroupId, MemberId)>,
    },
    /// Its next piece in a broadcast, and whom to get it from ([`mission_core::swarm`]).
    Source {
        /// Where the client serves what it has.
        serves: SocketAddr,
        /// Of each piece whether it has it; the last ones are padding, of eight.
        has: Vec<bool>,
        /// The source named last, which sent nothing.
        missed: Option<SocketAddr>,
    },
    /// Which chunks follow of a part of a stream, where the object is one ([`crate::streams`]). The answer may be late.
    Chunks {
        /// The reader has all before this one.
        after: u64,
        reader: ReaderId,
    },
}

/// The next piece of a broadcast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    pub start: u64,
    pub len: u64,
    /// Who sends it; `None`: the owner, which answers this.
    pub source: Option<SocketAddr>,
}

/// An owner's answer to a receiver of a broadcast that asks for its next piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceReply {
    Fetch(Next),
    /// The receiver has every piece, or is fetching it.
    Done,
    /// No source is available now: ask again.
    Later,
}

/// An invalid request, with the status of its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRequest {
    pub status: u16,
    pub reason: String,
}

/// The header of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub len: u64,
    /// Checksums of the blocks of the body.
    pub blocks: Vec<u64>,
    /// Checksum of the request's header as the server saw it.
    pub request_checksum: u64,
    pub sender: Sender,
    /// The server's nonce and its proof, with status 401.
    pub challenge: Option<(Nonce, String)>,
    /// With status 200.
    pub next: Option<Next>,
    /// With status 200, of a stream.
    pub chunks: Vec<Chunk>,
    /// The protection that the object needs when it is sent on.
    pub encryption: Encryption,
    pub retry_after_ms: Option<u64>,
    /// For the next try, with status 503.
    pub turn: Option<Turn>,
    /// Reason why there is no body.
    pub reason: String,
}

impl Request {
    pub fn write(&self) -> Vec<u8> {
        let mut head = format!("GET /v1/{}/{}", self.object, self.part);
        match &self.wants {
            Wants::Place => {
                let _ = write!(head, "{PLACE} HTTP/1.1\r\nHost: mission\r\n");
            }
            Wants::Range { start, len, congestion_control, rto_min_us, transfer } => {
                let _ = write!(head, " HTTP/1.1\r\nHost: mission\r\nRange: {}\r\n", range_of(*start, *len));
                if let Some(name) = congestion_control {
                    let _ = write!(head, "Mission-Congestion-Control: {name}\r\n");
                }
                if let Some(value) = rto_min_us {
                    let _ = write!(head, "Mission-Rto-Min-Us: {value}\r\n");
                }
                if let Some((job, transfer)) = transfer {
                    let _ = write!(head, "Mission-Transfer: {job:016x}/{transfer:016x}\r\n");
                }
            }
            Wants::Source { serves, has, missed } => {
                let _ = write!(head, "{SOURCE} HTTP/1.1\r\nHost: mission\r\nMission-Serves: {serves}\r\n");
                let bytes: Vec<u8> = has
                    .chunks(8)
                    .map(|bits| bits.iter().enumerate().fold(0, |byte, (bit, has)| byte | u8::from(*has) << bit))
                    .collect();
                let _ = write!(head, "Mission-Has: {}\r\n", to_hex(&bytes));
                if let Some(missed) = missed {
                    let _ = write!(head, "Mission-Missed: {missed}\r\n");
                }
            }
            Wants::Chunks { after, reader } => {
                let _ = write!(head, "{CHUNKS} HTTP/1.1\r\nHost: mission\r\n");
                let ReaderId { task, run } = reader;
                let _ = write!(head, "Mission-After: {after}\r\nMission-Reader: {task:016x}/{run:016x}\r\n");
            }
        }
        if let Some(nonce) = &self.nonce {
            let _ = write!(head, "Mission-Nonce: {}\r\n", to_hex(nonce));
        }
        if let Some(proof) = &self.proof {
            let _ = write!(head, "Authorization: Mission {proof}\r\n");
        }
        if let Some(turn) = &self.turn {
            let _ = write!(head, "Mission-Turn: {turn}\r\n");
        }
        head.push_str("\r\n");
        head.into_bytes()
    }

    /// Reads a whole head, its last empty line included.
    ///
    /// # Errors
    /// 400: not a request of this protocol. 404: the name cannot be an object. 416: not a range.
    pub fn parse(head: &[u8]) -> Result<Request, BadRequest> {
        let bad = |status, reason: &str| BadRequest { status, reason: reason.into() };
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut parsed = httparse::Request::new(&mut headers);
        match parsed.parse(head) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) => return Err(bad(400, "the header has no end")),
            Err(error) => return Err(bad(400, &format!("no HTTP request: {error}"))),
        }
        if parsed.method != Some("GET") {
            return Err(bad(405, "only GET is served"));
        }
        let path = parsed.path.unwrap_or_default();
        let (path, source) = path.strip_suffix(SOURCE).map_or((path, false), |path| (path, true));
        let (path, chunks) = path.strip_suffix(CHUNKS).map_or((path, false), |path| (path, true));
        let (path, place) = path.strip_suffix(PLACE).map_or((path, false), |path| (path, true));
        let target = path.strip_prefix("/v1/").and_then(|rest| rest.split_once('/'));
        let target = target.and_then(|(object, part)| Some((object.parse().ok()?, strict_number(part)?)));
        let (object, part) = target.ok_or_else(|| bad(404, "paths are /v1/<object>/<part>"))?;
        let part = u32::try_from(part).map_err(|_| bad(404, "no object has such a part"))?;
        let (mut asked, mut congestion_control, mut rto_min_us, mut transfer) = (None, None, None, None);
        let (mut serves, mut has, mut missed) = (None, None, None);
        let (mut after, mut reader) = (None, None);
        let (mut own_nonce, mut proof, mut turn) = (None, None, None);
        for header in parsed.headers.iter() {
            let value = std::str::from_utf8(header.value).map_err(|_| bad(400, "a header is not text"))?;
            let address = || value.parse().map(Some).map_err(|_| bad(400, "an address is written as 10.0.0.1:4711"));
            match header.name.to_ascii_lowercase().as_str() {
                "range" => asked = Some(range(value).ok_or_else(|| bad(416, "ranges are bytes=a-b"))?),
                "mission-congestion-control" => congestion_control = Some(value.to_owned()),
                "mission-rto-min-us" => {
                    let value = strict_number(value).and_then(|value| u32::try_from(value).ok());
                    rto_min_us = Some(value.ok_or_else(|| bad(400, "a minimum RTO is a number of microseconds"))?);
                }
                "mission-transfer" => {
                    let ids = value.split_once('/').and_then(|(job, own)| Some((hex_u64(job)?, hex_u64(own)?)));
                    transfer = Some(ids.ok_or_else(|| bad(400, "a transfer is two numbers of 16 hexadecimal digits"))?);
                }
                "mission-serves" => serves = address()?,
                "mission-missed" => missed = address()?,
                "mission-after" => after = strict_number(value),
                "mission-reader" => {
                    let ids = value.split_once('/').and_then(|(task, run)| Some((hex_u64(task)?, hex_u64(run)?)));
                    reader = ids.map(|(task, run)| ReaderId { task, run });
                }
                "mission-has" => {
                    let bytes = from_hex(value).ok_or_else(|| bad(400, "pieces are written in hexadecimal digits"))?;
                    has = Some(bytes.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1)).collect());
                }
                "mission-nonce" => own_nonce = Some(nonce(value).ok_or_else(|| bad(400, "a nonce has 32 digits"))?),
                "authorization" => proof = value.strip_prefix("Mission ").map(str::to_owned),
                "mission-turn" => turn = strict_number(value),
                _ => {}
            }
        }
        let wants = if place {
            Wants::Place
        } else if source {
            let serves = serves.ok_or_else(|| {
                bad(400, "a request for a source has to name the address that its sender serves from")
            })?;
            Wants::Source { serves, has: has.unwrap_or_default(), missed }
        } else if chunks {
            let asked = after.zip(reader);
            let (after, reader) =
                asked.ok_or_else(|| bad(400, "a request for chunks has to name the reader and its last chunk"))?;
            Wants::Chunks { after, reader }
        } else {
            let (start, len) = asked.ok_or_else(|| bad(416, "a range is needed: bytes=a-b"))?;
            Wants::Range { start, len, congestion_control, rto_min_us, transfer }
        };
        Ok(Request { object, part, wants, nonce: own_nonce, proof, turn })
    }
}

impl Response {
    /// An answer without a body.
    pub fn refusal(status: u16, reason: &str, request_checksum: u64) -> Response {
        Response {
            status,
            len: 0,
            blocks: Vec::new(),
            request_checksum,
            sender: Sender::default(),
            challenge: None,
            next: None,
            chunks: Vec::new(),
            encryption: Encryption::None,
            retry_after_ms: None,
            turn: None,
            reason: reason.into(),
        }
    }

    /// The answer to a reader of a stream.
    pub fn chunk_reply(reply: ChunkReply, request_checksum: u64) -> Response {
        let refusal = |status, reason: &str| Response::refusal(status, reason, request_checksum);
        match reply {
            ChunkReply::Chunks(chunks) => Response { chunks, ..refusal(200, "") },
            ChunkReply::Later => refusal(202, ""),
            ChunkReply::Complete => refusal(204, ""),
            ChunkReply::Unknown => refusal(404, "no such stream here"),
            ChunkReply::Taken => refusal(409, "this part was read before, by this or another task"),
            ChunkReply::Freed => refusal(410, "the beginning of the stream was read and freed"),
            ChunkReply::Failed(why) => refusal(424, &why),
        }
    }

    /// Reads this as the answer to a reader of a stream.
    ///
    /// # Errors
    /// It is another answer: the answer itself.
    pub fn to_chunk_reply(self) -> Result<ChunkReply, Box<Response>> {
        Ok(match self.status {
            200 if !self.chunks.is_empty() => ChunkReply::Chunks(self.chunks),
            202 => ChunkReply::Later,
            204 => ChunkReply::Complete,
            404 => ChunkReply::Unknown,
            409 => ChunkReply::Taken,
            410 => ChunkReply::Freed,
            424 => ChunkReply::Failed(self.reason),
            _ => return Err(self.into()),
        })
    }

    pub fn piece(reply: PieceReply, request_checksum: u64) -> Response {
        let (status, next) = match reply {
            PieceReply::Fetch(next) => (200, Some(next)),
            PieceReply::Later => (202, None),
            PieceReply::Done => (204, None),
        };
        Response { next, ..Response::refusal(status, "", request_checksum) }
    }

    pub fn write(&self) -> Vec<u8> {
        let phrase = match self.status {
            200 => "OK",
            202 => "Accepted",
            204 => "No Content",
            206 => "Partial Content",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            409 => "Conflict",
            410 => "Gone",
            416 => "Range Not Satisfiable",
            424 => "Failed Dependency",
            503 => "Service Unavailable",
            _ => "Bad Request",
        };
        let mut head = format!("HTTP/1.1 {} {phrase}\r\nContent-Length: {}\r\n", self.status, self.len);
        let _ = write!(head, "Mission-Request: {:016x}\r\n", self.request_checksum);
        if !self.blocks.is_empty() {
            let blocks: Vec<_> = self.blocks.iter().map(|block| format!("{block:016x}")).collect();
            let _ = write!(head, "Mission-Blocks: {}\r\n", blocks.join(","));
        }
        if self.sender != Sender::default() {
            let _ = write!(head, "Mission-Sender: {}\r\n", self.sender.write());
        }
        if let Some((nonce, proof)) = &self.challenge {
            let _ = write!(head, "WWW-Authenticate: Mission {} {proof}\r\n", to_hex(nonce));
        }
        if let Some(next) = &self.next {
            let _ = write!(head, "Mission-Next: {}\r\n", range_of(next.start, next.len));
            if let Some(source) = next.source {
                let _ = write!(head, "Mission-Source: {source}\r\n");
            }
        }
        if !self.chunks.is_empty() {
            let chunk = |own: &Chunk| format!("{}/{}/{}", own.object, own.bytes, own.writes);
            let chunks: Vec<_> = self.chunks.iter().map(chunk).collect();
            let _ = write!(head, "Mission-Chunks: {}\r\n", chunks.join(","));
        }
        if self.encryption != Encryption::None {
            let _ = write!(head, "Mission-Encryption: {}\r\n", self.encryption.name());
        }
        if let Some(wait) = self.retry_after_ms {
            let _ = write!(head, "Mission-Retry-After-Ms: {wait}\r\n");
        }
        if let Some(turn) = self.turn {
            let _ = write!(head, "Mission-Turn: {turn}\r\n");
        }
        if !self.reason.is_empty() {
            let _ = write!(head, "Mission-Reason: {}\r\n", self.reason.replace(['\r', '\n'], " "));
        }
        if self.len > 0 {
            let len = head.len() + PAD.len() + "\r\n".len() + LAST.len();
            let _ = write!(head, "{PAD}{:.>1$}\r\n", "", len.next_multiple_of(BODY_ALIGN) - len);
        }
        let own = checksum::of(head.as_bytes());
        let _ = write!(head, "Mission-Head: {own:016x}\r\n\r\n");
        head.into_bytes()
    }

    /// Reads a whole head, its last empty line included.
    ///
    /// # Errors
    /// It is damaged, or not a header of this protocol.
    pub fn parse(head: &[u8]) -> Result<Response, String> {
        let body = head.len().checked_sub(LAST.len()).ok_or("the header is too short")?;
        let (covered, last) = head.split_at(body);
        let own = last.strip_prefix(b"Mission-Head: ").and_then(|rest| rest.strip_suffix(END));
        let own = own.and_then(|digits| hex_u64(std::str::from_utf8(digits).ok()?));
        if own != Some(checksum::of(covered)) {
            return Err("the header does not match its checksum".into());
        }
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut parsed = httparse::Response::new(&mut headers);
        if !matches!(parsed.parse(head), Ok(httparse::Status::Complete(_))) {
            return Err("no HTTP response".into());
        }
        let status = parsed.code.filter(|status| (100..600).contains(status)).ok_or("not a status of HTTP")?;
        let mut response = Response::refusal(status, "", 0);
        let (mut next, mut source) = (None, None);
        for header in parsed.headers.iter() {
            let value = std::str::from_utf8(header.value).map_err(|_| "a header is not text")?;
            let wrong = || format!("{} is {value:?}", header.name);
            match header.name {
                "Content-Length" => response.len = strict_number(value).ok_or_else(wrong)?,
                "Mission-Request" => response.request_checksum = hex_u64(value).ok_or_else(wrong)?,
                "Mission-Blocks" => {
                    response.blocks = value.split(',').map(hex_u64).collect::<Option<_>>().ok_or_else(wrong)?;
                }
                "Mission-Sender" => response.sender = Sender::parse(value),
                "WWW-Authenticate" => {
                    let words = value.strip_prefix("Mission ").and_then(|words| words.split_once(' '));
                    response.challenge = words.and_then(|(n, proof)| Some((nonce(n)?, proof.to_owned())));
                }
                "Mission-Chunks" => {
                    response.chunks = value.split(',').map(chunk).collect::<Option<_>>().ok_or_else(wrong)?;
                }
                "Mission-Next" => next = Some(range(value).ok_or_else(wrong)?),
                "Mission-Encryption" => response.encryption = Encryption::named(value).ok_or_else(wrong)?,
                "Mission-Source" => source = Some(value.parse().map_err(|_| wrong())?),
                "Mission-Retry-After-Ms" => response.retry_after_ms = strict_number(value),
                "Mission-Turn" => response.turn = strict_number(value),
                "Mission-Reason" => response.reason = value.to_owned(),
                _ => {}
            }
        }
        response.next = next.map(|(start, len)| Next { start, len, source });
        Ok(response)
    }
}

/// Reads from a connection up to the end of a header; bytes after it stay in the buffer.
#[derive(Default)]
pub struct HeadReader {
    buffer: Vec<u8>,
    filled: usize,
}

/// Enough for any header in one call, and little to copy if the body follows immediately.
const READ_BYTES: usize = 2048;

impl HeadReader {
    /// Returns the next header. `None`: the peer closed the connection between two headers.
    ///
    /// # Errors
    /// The connection broke; the header is longer than allowed ([`io::ErrorKind::InvalidData`]).
    pub fn read(&mut self, stream: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
        let mut searched = 0usize;
        let mut began = None;
        loop {
            let from = searched.saturating_sub(END.len() - 1);
            let found = self.buffer[from..self.filled].windows(END.len()).position(|window| window == END);
            if let Some(at) = found {
                let end = from + at + END.len();
                let head = self.buffer[..end].to_vec();
                self.buffer.copy_within(end..self.filled, 0);
                self.filled -= end;
                return Ok(Some(head));
            }
            searched = self.filled;
            if self.filled > 0 && began.get_or_insert_with(Instant::now).elapsed() >= lasting(HEAD_TIME) {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the header did not arrive completely in time"));
            }
            if self.filled >= HEAD_BYTES_MAX {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the header is longer than allowed"));
            }
            self.buffer.resize((self.filled + READ_BYTES).min(HEAD_BYTES_MAX), 0);
            match stream.read(&mut self.buffer[self.filled..]) {
                Ok(0) if self.filled == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether bytes after the last header are here already.
    pub fn has_more(&self) -> bool {
        self.filled > 0
    }

    /// Moves the bytes after the header into the body; returns how many.
    pub fn take_rest(&mut self, into: &mut [u8]) -> usize {
        let count = self.filled.min(into.len());
        into[..count].copy_from_slice(&self.buffer[..count]);
        self.buffer.copy_within(count..self.filled, 0);
        self.filled -= count;
        count
    }
}

/// Digits only: no sign, no space.
fn strict_number(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) { None } else { text.parse().ok() }
}

fn hex_u64(text: &str) -> Option<u64> {
    Some(u64::from_be_bytes(from_hex(text)?.try_into().ok()?))
}

fn chunk(text: &str) -> Option<Chunk> {
    let (object, rest) = text.split_once('/')?;
    let (bytes, writes) = rest.split_once('/')?;
    Some(Chunk { object: object.parse().ok()?, bytes: strict_number(bytes)?, writes: strict_number(writes)? })
}

fn nonce(text: &str) -> Option<Nonce> {
    from_hex(text)?.try_into().ok()
}

fn range_of(start: u64, len: u64) -> String {
    format!("bytes={start}-{}", start + len.max(1) - 1)
}

/// `bytes=a-b`, both inclusive, as start and length.
fn range(value: &str) -> Option<(u64, u64)> {
    let (first, last) = value.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last) = (strict_number(first)?, strict_number(last)?);
    let len = last.checked_sub(first)?.checked_add(1)?;
    first.checked_add(len).map(|_| (first, len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request() -> Request {
        Request {
            object: ObjectId([0xab; 16]),
            part: 7,
            wants: Wants::Range {
                start: 1 << 20,
                len: 4 << 20,
                congestion_control: Some("cubic".into()),
                rto_min_us: Some(5000),
                transfer: Some((0xaa, u64::MAX)),
            },
            nonce: Some([1; 16]),
            proof: Some("00ff".into()),
            turn: Some(u64::MAX),
        }
    }

    fn source_request() -> Request {
        let has = [true, false, true, true, false, false, true, false].repeat(3);
        let (serves, missed) = ("10.0.0.1:4711".parse().unwrap(), Some("[::1]:7".parse().unwrap()));
        Request { wants: Wants::Source { serves, has, missed }, ..request() }
    }

    fn chunks_request() -> Request {
        Request { wants: Wants::Chunks { after: u64::MAX, reader: ReaderId { task: 7, run: u64::MAX } }, ..request() }
    }

    /// As many chunks as one reply ever has, and the longest reason.
    #[test]
    fn chunk_replies_fit_into_a_head() {
        let chunk = Chunk { object: ObjectId([7; 16]), bytes: u64::MAX, writes: u64::MAX };
        let reason = "x".repeat(crate::streams::WHY_MAX);
        for reply in [ChunkReply::Chunks(vec![chunk; crate::streams::CHUNKS_PER_REPLY]), ChunkReply::Failed(reason)] {
            let head = Response::chunk_reply(reply.clone(), 1).write();
            assert!(head.len() < HEAD_BYTES_MAX);
            assert_eq!(Response::parse(&head).unwrap().to_chunk_reply(), Ok(reply));
        }
    }

    fn response() -> Response {
        Response {
            status: 206,
            len: 300_000,
            blocks: vec![1, u64::MAX],
            request_checksum: 42,
            sender: Sender { congestion_control: "cubic".into(), rtt_us: 10, ..Sender::default() },
            challenge: Some(([3; 16], "aa".into())),
            next: Some(Next { start: 5, len: 9, source: Some("10.0.0.1:4711".parse().unwrap()) }),
            chunks: vec![Chunk { object: ObjectId([7; 16]), bytes: u64::MAX, writes: 3 }; 2],
            encryption: Encryption::Opportunistic,
            retry_after_ms: Some(20),
            turn: Some(7),
            reason: "because".into(),
        }
    }

    #[test]
    fn heads_come_back_as_they_were_written() {
        assert_eq!(Request::parse(&request().write()), Ok(request()));
        assert_eq!(Request::parse(&source_request().write()), Ok(source_request()));
        assert_eq!(Request::parse(&chunks_request().write()), Ok(chunks_request()));
        let place = Request { wants: Wants::Place, ..request() };
        assert_eq!(Request::parse(&place.write()), Ok(place));
        assert_eq!(Response::parse(&response().write()), Ok(response()));
    }

    #[test]
    fn a_body_begins_aligned_whatever_its_head_says() {
        for blocks in 0..20 {
            let head = Response { blocks: vec![7; blocks], reason: "x".repeat(blocks), ..response() }.write();
            assert_eq!(head.len() % BODY_ALIGN, 0);
        }
    }

    #[test]
    fn what_is_no_object_or_no_range_is_refused() {
        let ask = |path: &str, headers: &str| {
            Request::parse(format!("GET {path} HTTP/1.1\r\n{headers}\r\n").as_bytes()).unwrap_err().status
        };
        let object = format!("/v1/{}/0", ObjectId([1; 16]));
        for path in [
            "/etc/passwd",
            "/v1/../../etc/passwd",
            "/v1/00/0",
            &format!("{object}/../x"),
            &format!("{object}9999999999"),
            "/v1/",
        ] {
            assert_eq!(ask(path, "Range: bytes=0-1\r\n"), 404, "{path}");
        }
        for range in [
            "",
            "Range: bytes=5-4\r\n",
            "Range: bytes=-5\r\n",
            "Range: bytes=0-18446744073709551615\r\n",
            "Range: 0-1\r\n",
        ] {
            assert_eq!(ask(&object, range), 416, "{range}");
        }
        assert_eq!(Request::parse(b"POST / HTTP/1.1\r\n\r\n").unwrap_err().status, 405);
    }

    #[test]
    fn a_head_without_end_is_given_up() {
        let mut endless = io::repeat(b'a');
        let error = HeadReader::default().read(&mut endless).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_body_that_came_with_its_head_is_not_lost() {
        let mut stream = io::Cursor::new([&response().write()[..], b"body"].concat());
        let mut reader = HeadReader::default();
        assert_eq!(Response::parse(&reader.read(&mut stream).unwrap().unwrap()), Ok(response()));
        let mut body = [0; 10];
        assert_eq!((reader.take_rest(&mut body), &body[..4]), (4, &b"body"[..]));
        assert!(reader.read(&mut stream).unwrap().is_none());
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parsers_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = Request::parse(&bytes);
            let _ = Response::parse(&bytes);
            let _ = HeadReader::default().read(&mut io::Cursor::new(bytes));
        }

        /// A fuzzer bounded in time: headers of this protocol, then cut, flipped, repeated and spliced.
        #[test]
        fn mutated_heads_are_refused_or_make_sense(
            cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..8),
        ) {
            for head in [request().write(), source_request().write(), chunks_request().write(), response().write()] {
                let mut bytes = head.clone();
                for (at, byte, what) in &cuts {
                    let at = at.index(bytes.len().max(1)).min(bytes.len().saturating_sub(1));
                    match what {
                        0 if !bytes.is_empty() => bytes[at] = *byte,
                        1 => bytes.truncate(at),
                        2 => { let tail = bytes[at..].to_vec(); bytes.extend(tail); }
                        _ => bytes.insert(at, *byte),
                    }
                }
                if let Ok(Request { wants: Wants::Range { start, len, .. }, .. }) = Request::parse(&bytes) {
                    prop_assert!(len > 0 && start.checked_add(len).is_some());
                }
                if bytes != head {
                    prop_assert!(Response::parse(&bytes).is_err());
                }
            }
        }
    }

    #[test]
    fn every_flipped_bit_of_a_head_is_found() {
        let flipped = |head: &[u8], bit: usize| {
            let mut head = head.to_vec();
            head[bit / 8] ^= 1 << (bit % 8);
            head
        };
        let answer = response().write();
        for bit in 0..8 * answer.len() {
            assert!(Response::parse(&flipped(&answer, bit)).is_err(), "bit {bit}");
        }
        // The answer repeats what the server saw; the client knows what it sent.
        let asked = request().write();
        for bit in 0..8 * asked.len() {
            assert_ne!(checksum::of(&flipped(&asked, bit)), checksum::of(&asked), "bit {bit}");
        }
    }
}
