//! The owner's side of a broadcast: keeps the books ([`mission_core::swarm`]), and names to each receiver its next piece
//! and whom to get it from.

use crate::copies::PartKey;
use crate::object::ObjectId;
use mission_core::swarm::{Answer, Event, LaneId, PeerId, Swarm};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Longest wait for a piece that somebody can send; after it the receiver is told to ask again, so that whoever is gone
/// is noticed.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

#[derive(Default)]
pub struct Tracker {
    books: Mutex<HashMap<PartKey, Arc<Book>>>,
    lanes: AtomicU64,
}

/// The books of one part.
struct Book(Mutex<State>);

struct State {
    swarm: Swarm,
    peers: Vec<SocketAddr>,
    numbers: HashMap<SocketAddr, PeerId>,
    /// Where the answers of lanes go that wait for one.
    waiting: HashMap<LaneId, Sender<Answer>>,
}

/// A connection on which a receiver asks; leaves the books when dropped.
pub struct Lane {
    book: Arc<Book>,
    key: PartKey,
    id: LaneId,
}

/// What a receiver says of itself.
pub struct Asking {
    pub serves: SocketAddr,
    pub has: Vec<bool>,
    pub missed: Option<SocketAddr>,
}

/// What it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// `None`: from the owner.
    Fetch {
        piece: usize,
        source: Option<SocketAddr>,
    },
    Done,
    /// Nobody can send it a piece now.
    Later,
}

impl Tracker {
    /// Answers a receiver, as soon as there is something to answer. `lane` is its connection's; `lives` tells which
    /// objects there still are: the books of others are closed.
    pub fn next(
        &self,
        lane: &mut Option<Lane>,
        (key, pieces): (PartKey, usize),
        asking: Asking,
        lives: impl Fn(&ObjectId) -> bool,
    ) -> Told {
        if lane.as_ref().is_none_or(|lane| lane.key != key) {
            let mut books = self.books.lock().expect("no panic while held");
            if !books.contains_key(&key) {
                books.retain(|(object, _), _| lives(object));
            }
            let book = books.entry(key).or_insert_with(|| Arc::new(Book::new(key, pieces))).clone();
            let id = self.lanes.fetch_add(1, Ordering::Relaxed);
            *lane = Some(Lane { book, key, id });
        }
        lane.as_ref().expect("there is one now").ask(asking)
    }
}

impl Book {
    fn new((object, part): PartKey, pieces: usize) -> Book {
        let seed = u64::from_ne_bytes(object.0[..8].try_into().expect("eight bytes")) ^ u64::from(part);
        Book(Mutex::new(State {
            swarm: Swarm::new(pieces, seed),
            peers: Vec::new(),
            numbers: HashMap::new(),
            waiting: HashMap::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic while held")
    }
}

impl State {
    fn number(&mut self, address: SocketAddr) -> PeerId {
        *self.numbers.entry(address).or_insert_with(|| {
            self.peers.push(address);
            (self.peers.len() - 1) as PeerId
        })
    }

    fn handle(&mut self, event: Event) {
        for (lane, answer) in self.swarm.handle(event) {
            if let Some(waiting) = self.waiting.remove(&lane) {
                // Who waits no longer asks again, and that ends what it was told.
                let _ = waiting.send(answer);
            }
        }
    }
}

impl Lane {
    fn ask(&self, asking: Asking) -> Told {
        let (sender, answer) = channel();
        let mut state = self.book.lock();
        let peer = state.number(asking.serves);
        let missed = asking.missed.and_then(|address| state.numbers.get(&address).copied());
        state.waiting.insert(self.id, sender);
        state.handle(Event::Asks { lane: self.id, peer, has: asking.has, missed });
        drop(state);
        match answer.recv_timeout(ANSWER_WITHIN) {
            Ok(Answer::Fetch { piece, source }) => {
                let source = source.map(|peer| self.book.lock().peers[peer as usize]);
                Told::Fetch { piece, source }
            }
            Ok(Answer::Done) => Told::Done,
            Err(_) => Told::Later,
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut state = self.book.lock();
        state.waiting.remove(&self.id);
        state.handle(Event::Closed { lane: self.id });
    }
}
