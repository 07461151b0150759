//! The owner's side of a broadcast: coordinates it ([`mission_core::swarm`]), and names to each receiver its next piece
//! and a source.

use crate::copies::PartKey;
use crate::object::ObjectId;
use crate::wire::{Next, PieceReply};
use mission_core::swarm::{self, Answer, Event, HostNumber, LaneId, PeerId, Swarm};
use mission_core::units::Time;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Longest wait until a source is available; then the receiver has to ask again, so that a lost peer is noticed.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

#[derive(Default)]
pub struct Tracker {
    books: Mutex<HashMap<PartKey, Arc<Book>>>,
    lanes: AtomicU64,
}

/// The state of one part's broadcast.
struct Book {
    /// Of the part.
    len: u64,
    opened: Instant,
    state: Mutex<State>,
}

struct State {
    swarm: Swarm,
    peers: Vec<SocketAddr>,
    numbers: HashMap<SocketAddr, PeerId>,
    hosts: HashMap<IpAddr, HostNumber>,
    /// Channels to the lanes that wait for an answer.
    waiting: HashMap<LaneId, Sender<Answer>>,
}

/// A connection on which a receiver asks; leaves the broadcast when dropped.
pub struct Lane {
    book: Arc<Book>,
    key: PartKey,
    serves: SocketAddr,
    id: LaneId,
}

/// What a receiver reports of itself.
pub struct Asking {
    pub serves: SocketAddr,
    pub has: Vec<bool>,
    pub missed: Option<SocketAddr>,
}

impl Tracker {
    /// Answers a receiver of a part of `len` bytes, as soon as there is an answer. `lane` is its connection's.
    pub fn next(&self, lane: &mut Option<Lane>, key: PartKey, len: u64, asking: Asking) -> PieceReply {
        let fits = |lane: &Lane| lane.key == key && lane.serves == asking.serves;
        if !lane.as_ref().is_some_and(fits) {
            let book = {
                let mut books = self.books.lock().expect("no panic while held");
                books.entry(key).or_insert_with(|| Arc::new(Book::new(key, len))).clone()
            };
            let id = self.lanes.fetch_add(1, Ordering::Relaxed);
            *lane = Some(Lane { book, key, serves: asking.serves, id });
        }
        lane.as_ref().expect("there is one now").ask(asking)
    }

    /// Ends the broadcasts of an object that is freed.
    pub fn forget(&self, object: &ObjectId) {
        self.books.lock().expect("no panic while held").retain(|(own, _), _| own != object);
    }
}

impl Book {
    fn new((object, part): PartKey, len: u64) -> Book {
        let seed = u64::from_ne_bytes(object.0[..8].try_into().expect("eight bytes")) ^ u64::from(part);
        let state = State {
            swarm: Swarm::new(swarm::pieces(len), seed),
            peers: Vec::new(),
            numbers: HashMap::new(),
            hosts: HashMap::new(),
            waiting: HashMap::new(),
        };
        Book { len, opened: Instant::now(), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    fn now(&self) -> Time {
        Time(self.opened.elapsed().as_nanos() as u64)
    }
}

impl State {
    fn number(&mut self, address: SocketAddr) -> PeerId {
        *self.numbers.entry(address).or_insert_with(|| {
            self.peers.push(address);
            (self.peers.len() - 1) as PeerId
        })
    }

    fn handle(&mut self, now: Time, event: Event) {
        let mut answers = Vec::new();
        self.swarm.handle(now, event, &mut answers);
        for (lane, answer) in answers {
            if let Some(waiting) = self.waiting.remove(&lane) {
                // A receiver that no longer waits asks again, and that ends its old assignment.
                let _ = waiting.send(answer);
            }
        }
    }
}

impl Lane {
    fn ask(&self, asking: Asking) -> PieceReply {
        let (sender, answer) = channel();
        let mut state = self.book.lock();
        let peer = state.number(asking.serves);
        let hosts = state.hosts.len() as HostNumber;
        let host = *state.hosts.entry(asking.serves.ip()).or_insert(hosts);
        let missed = asking.missed.and_then(|address| state.numbers.get(&address).copied());
        state.waiting.insert(self.id, sender);
        state.handle(self.book.now(), Event::Asks { lane: self.id, peer, host, has: asking.has, missed });
        drop(state);
        match answer.recv_timeout(ANSWER_WITHIN) {
            Ok(Answer::Fetch { piece, source }) => {
                let source = source.map(|peer| self.book.lock().peers[peer as usize]);
                let start = piece as u64 * swarm::piece_bytes(self.book.len);
                let len = swarm::piece_bytes(self.book.len).min(self.book.len - start);
                PieceReply::Fetch(Next { start, len, source })
            }
            Ok(Answer::Done) => PieceReply::Done,
            Err(_) => PieceReply::Later,
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // If the lock is poisoned, this thread may be ending by the same panic.
        if let Ok(mut state) = self.book.state.lock() {
            state.waiting.remove(&self.id);
            state.handle(self.book.now(), Event::Closed { lane: self.id });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mission_core::defaults::BLOCK_BYTES;

    const LEN: u64 = 2 * BLOCK_BYTES;

    fn asking(serves: u16, has: &[bool]) -> Asking {
        Asking { serves: SocketAddr::from(([127, 0, 0, 1], serves)), has: has.to_vec(), missed: None }
    }

    #[test]
    fn a_connection_may_speak_for_another_receiver_and_say_nonsense() {
        let (tracker, key) = (Tracker::default(), (ObjectId([1; 16]), 0));
        let mut lane = None;
        for (serves, has) in [(1, &[][..]), (2, &[true; 100]), (1, &[false])] {
            assert_ne!(tracker.next(&mut lane, key, LEN, asking(serves, has)), PieceReply::Later);
        }
        drop(lane);
        tracker.forget(&key.0);
        assert!(tracker.books.lock().unwrap().is_empty());
    }

    #[test]
    fn the_second_receiver_is_sent_to_the_first() {
        let (tracker, key) = (Tracker::default(), (ObjectId([1; 16]), 0));
        let (mut first, mut second) = (None, None);
        assert_eq!(tracker.next(&mut first, key, LEN, asking(1, &[true, true])), PieceReply::Done);
        let told = tracker.next(&mut second, key, LEN, asking(2, &[true, false]));
        let source = Some(SocketAddr::from(([127, 0, 0, 1], 1)));
        assert_eq!(told, PieceReply::Fetch(Next { start: BLOCK_BYTES, len: BLOCK_BYTES, source }));
    }
}
