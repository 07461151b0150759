//! Cooperative broadcast: which receiver gets which piece of a part from whom.
//!
//! One object that many hosts want would leave its owner's link once per host. Here receivers serve the pieces that they
//! have (as BitTorrent's peers and Orchestra's Cornet do), so the copies multiply. Unlike BitTorrent, all peers belong
//! to one cluster and can be trusted: the owner coordinates the broadcast, as a tracker that knows every piece, and
//! names to each receiver its next piece and source. There is nothing to choke, and no piece is requested in vain. Only
//! a receiver that has everything and asks no more may be gone unnoticed: one failure removes it, and the owner
//! remembers few of them per host.
//!
//! A receiver asks on one or more **lanes**, each for one piece at a time. The piece is the rarest that it lacks and that
//! somebody can send now; the source is the least busy that has it. Events in, answers out; sockets are the caller's.

use crate::defaults::{BLOCK_BYTES, CHUNK_BYTES, STALL, UPLOADS_PER_PEER};
use crate::random::SplitMix;
use crate::units::Time;
use std::collections::{BTreeMap, VecDeque};

/// A receiver; numbered by the caller.
pub type PeerId = u32;
/// Where receivers run; numbered by the caller.
pub type HostNumber = u32;
/// One of the connections on which a receiver asks; numbered by the caller.
pub type LaneId = u64;

/// Pieces that a part is cut into, unless they would be larger than a chunk: with more pieces, each receiver has
/// something to send sooner, but there are more requests.
const PIECES: u64 = 64;
/// A receiver that is silent for so many stalls is not waited for: its assignments are dropped.
const STALLS: u32 = 2;
/// A peer that failed to send this often is no longer named, unless it proves that it is alive by asking itself.
const MISSES_MAX: u32 = 3;
/// Complete receivers of one host that are still named as sources. A host that is gone, or a worker that invents
/// receivers, costs the others at most so many failed connections. One receiver can fill the host's link.
const FINISHED_PER_HOST: usize = 4;

/// Bytes of each piece of a part of `len` bytes, but for the last: whole blocks, at most a chunk.
pub fn piece_bytes(len: u64) -> u64 {
    (len.div_ceil(PIECES).div_ceil(BLOCK_BYTES) * BLOCK_BYTES).clamp(BLOCK_BYTES, CHUNK_BYTES)
}

/// How many pieces a part of `len` bytes has.
pub fn pieces(len: u64) -> usize {
    len.div_ceil(piece_bytes(len)) as usize
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A receiver asks for its next piece; that ends its lane's earlier assignment, successful or not.
    Asks {
        lane: LaneId,
        peer: PeerId,
        host: HostNumber,
        /// Of each piece, whether the receiver has it. The complete list each time: a lost message costs nothing, and
        /// pieces that a receiver has lost are forgotten.
        has: Vec<bool>,
        /// A source that was named to it and sent nothing.
        missed: Option<PeerId>,
    },
    /// A lane asks no more, or its receiver is gone.
    Closed { lane: LaneId },
}

/// To a lane that asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// `None`: from the owner.
    Fetch { piece: usize, source: Option<PeerId> },
    /// The receiver has every piece, or its other lanes are fetching the rest.
    Done,
}

/// The state of one part's broadcast.
pub struct Swarm {
    pieces: Vec<Piece>,
    peers: BTreeMap<PeerId, Peer>,
    lanes: BTreeMap<LaneId, Lane>,
    /// Receivers without lanes, which have everything and are named as sources; who finished first is first.
    finished: Vec<PeerId>,
    /// Lanes that wait for an answer, longest first.
    waiting: VecDeque<LaneId>,
    owner_uploads: u32,
    random: SplitMix,
}

#[derive(Default)]
struct Piece {
    holders: Vec<PeerId>,
    /// Receivers that are fetching it.
    coming: u32,
}

#[derive(Default)]
struct Peer {
    host: HostNumber,
    has: Vec<bool>,
    uploads: u32,
    lanes: u32,
    misses: u32,
}

struct Lane {
    peer: PeerId,
    told: Option<(usize, Option<PeerId>)>,
    told_at: Time,
}

impl Swarm {
    /// State for a part of so many pieces; the seed decides between equal choices.
    pub fn new(pieces: usize, seed: u64) -> Swarm {
        Swarm {
            pieces: (0..pieces).map(|_| Piece::default()).collect(),
            peers: BTreeMap::new(),
            lanes: BTreeMap::new(),
            finished: Vec::new(),
            waiting: VecDeque::new(),
            owner_uploads: 0,
            random: SplitMix(seed),
        }
    }

    /// Answers to lanes, the asking one among them or not: who is not answered yet waits.
    pub fn handle(&mut self, now: Time, event: Event, answers: &mut Vec<(LaneId, Answer)>) {
        let late = |lane: &Lane| lane.told.is_some() && now.since(lane.told_at) >= STALL * STALLS;
        let silent: Vec<LaneId> = self.lanes.iter().filter(|(_, lane)| late(lane)).map(|(id, _)| *id).collect();
        silent.into_iter().for_each(|lane| self.over(lane));
        match event {
            Event::Asks { lane, peer, host, has, missed } => {
                self.over(lane);
                if let Some(missed) = missed {
                    self.miss(missed);
                }
                let own = self.peers.entry(peer).or_default();
                own.host = host;
                if !self.lanes.contains_key(&lane) {
                    own.lanes += 1;
                    self.finished.retain(|finished| *finished != peer);
                    self.lanes.insert(lane, Lane { peer, told: None, told_at: now });
                }
                self.learn(peer, has);
                self.waiting.retain(|waiting| *waiting != lane);
                self.waiting.push_back(lane);
            }
            Event::Closed { lane } => {
                self.over(lane);
                self.waiting.retain(|waiting| *waiting != lane);
                if let Some(Lane { peer, .. }) = self.lanes.remove(&lane) {
                    let own = self.peers.get_mut(&peer).expect("lanes have peers");
                    own.lanes -= 1;
                    match (own.lanes, own.has.iter().all(|has| *has)) {
                        (0, true) => self.finish(peer),
                        // A receiver that aborted has discarded its pieces.
                        (0, false) => self.forget(peer),
                        _ => {}
                    }
                }
            }
        }
        self.answer_waiting(now, answers);
    }

    #[cfg(test)]
    fn is_idle(&self) -> bool {
        self.lanes.is_empty()
    }

    fn answer_waiting(&mut self, now: Time, answers: &mut Vec<(LaneId, Answer)>) {
        let mut still = VecDeque::new();
        while let Some(lane) = self.waiting.pop_front() {
            match self.answer(now, lane) {
                Some(answer) => answers.push((lane, answer)),
                None => still.push_back(lane),
            }
        }
        self.waiting = still;
    }

    fn answer(&mut self, now: Time, lane: LaneId) -> Option<Answer> {
        let peer = self.lanes[&lane].peer;
        let mut lacks = vec![true; self.pieces.len()];
        for (lack, has) in lacks.iter_mut().zip(&self.peers[&peer].has) {
            *lack = !has;
        }
        for (piece, _) in self.lanes.values().filter(|other| other.peer == peer).filter_map(|other| other.told) {
            lacks[piece] = false;
        }
        // Equally rare pieces are tried in a different order each time, so that receivers get different pieces.
        let turn = self.random.next() as usize % self.pieces.len().max(1);
        let order = (turn..self.pieces.len()).chain(0..turn);
        let mut wanted: Vec<usize> = order.filter(|piece| lacks[*piece]).collect();
        if wanted.is_empty() {
            return Some(Answer::Done);
        }
        if self.owner_uploads >= UPLOADS_PER_PEER && self.peers.values().all(|peer| peer.uploads >= UPLOADS_PER_PEER) {
            return None;
        }
        wanted.sort_by_key(|&piece| self.pieces[piece].holders.len() as u32 + self.pieces[piece].coming);
        let (piece, source) = wanted.into_iter().find_map(|piece| Some((piece, self.source(peer, piece)?)))?;
        self.pieces[piece].coming += 1;
        *self.uploads(source).expect("a source is known") += 1;
        let own = self.lanes.get_mut(&lane).expect("it waits");
        (own.told, own.told_at) = (Some((piece, source)), now);
        Some(Answer::Fetch { piece, source })
    }

    /// The least busy of those that have a piece and may send one more; the owner where it is less busy than all others:
    /// only it has pieces that no receiver has yet.
    fn source(&self, peer: PeerId, piece: usize) -> Option<Option<PeerId>> {
        let gives = |holder: &&PeerId| **holder != peer && self.peers[*holder].misses < MISSES_MAX;
        let holders = self.pieces[piece].holders.iter().filter(gives);
        let peers = holders.map(|holder| (self.peers[holder].uploads, Some(*holder)));
        let all = peers.chain(std::iter::once((self.owner_uploads, None)));
        let (uploads, source) = all.min_by_key(|(uploads, source)| (*uploads, source.is_none()))?;
        (uploads < UPLOADS_PER_PEER).then_some(source)
    }

    /// Ends a lane's assignment.
    fn over(&mut self, lane: LaneId) {
        let Some((piece, source)) = self.lanes.get_mut(&lane).and_then(|lane| lane.told.take()) else { return };
        self.pieces[piece].coming -= 1;
        // A source that was forgotten meanwhile has no uploads to count.
        if let Some(uploads) = self.uploads(source) {
            *uploads = uploads.saturating_sub(1);
        }
    }

    fn uploads(&mut self, source: Option<PeerId>) -> Option<&mut u32> {
        match source {
            None => Some(&mut self.owner_uploads),
            Some(peer) => self.peers.get_mut(&peer).map(|peer| &mut peer.uploads),
        }
    }

    /// A complete receiver may still be named as a source.
    fn finish(&mut self, peer: PeerId) {
        let host = self.peers[&peer].host;
        self.finished.push(peer);
        let mut of_host = self.finished.iter().copied().filter(|finished| self.peers[finished].host == host);
        let first = of_host.next();
        if of_host.count() >= FINISHED_PER_HOST {
            first.into_iter().for_each(|first| self.forget(first));
        }
    }

    /// A source sent nothing to a receiver that was assigned to it.
    fn miss(&mut self, source: PeerId) {
        if self.finished.contains(&source) {
            self.forget(source);
        } else if let Some(own) = self.peers.get_mut(&source) {
            own.misses += 1;
        }
    }

    fn forget(&mut self, peer: PeerId) {
        self.peers.remove(&peer);
        self.finished.retain(|finished| *finished != peer);
        self.pieces.iter_mut().for_each(|piece| piece.holders.retain(|holder| *holder != peer));
    }

    fn learn(&mut self, peer: PeerId, has: Vec<bool>) {
        let own = self.peers.get_mut(&peer).expect("its lane is known");
        own.misses = 0;
        own.has.resize(self.pieces.len(), false);
        let says = has.into_iter().chain(std::iter::repeat(false));
        for (piece, (known, has)) in self.pieces.iter_mut().zip(own.has.iter_mut().zip(says)) {
            match (std::mem::replace(known, has), has) {
                (false, true) => piece.holders.push(peer),
                (true, false) => piece.holders.retain(|holder| *holder != peer),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(swarm: &mut Swarm, now: Time, event: Event) -> Vec<(LaneId, Answer)> {
        let mut answers = Vec::new();
        swarm.handle(now, event, &mut answers);
        answers
    }
    use std::collections::BTreeSet;

    /// Every sender sends at the same rate, shared evenly by what it sends; receiving is not limited. Gives the time until
    /// all have everything, in times of one copy, and how many copies left the owner.
    fn broadcast(receivers: u32, pieces: usize, lanes: u64, dies: Option<PeerId>) -> (f64, f64) {
        struct Flow {
            lane: LaneId,
            piece: usize,
            source: Option<PeerId>,
            left: f64,
        }
        let mut swarm = Swarm::new(pieces, 1);
        let mut has = vec![vec![false; pieces]; receivers as usize];
        let mut flows: Vec<Flow> = Vec::new();
        let mut over = BTreeSet::new();
        let (mut now, mut from_owner) = (0.0, 0);
        let mut events: VecDeque<Event> = (0..lanes)
            .flat_map(|lane| (0..receivers).map(move |peer| (u64::from(peer) * lanes + lane, peer)))
            .map(|(lane, peer)| Event::Asks { lane, peer, host: peer, has: vec![false; pieces], missed: None })
            .collect();
        let mut dead = None;
        loop {
            while let Some(event) = events.pop_front() {
                for (lane, answer) in said(&mut swarm, Time(0), event) {
                    match answer {
                        Answer::Fetch { piece, source } => {
                            assert!(
                                source.is_none_or(|source| has[source as usize][piece]),
                                "{source:?} lacks {piece}"
                            );
                            assert!(!has[(lane / lanes) as usize][piece], "it has {piece} already");
                            from_owner += u32::from(source.is_none());
                            flows.push(Flow { lane, piece, source, left: 1.0 / pieces as f64 });
                        }
                        Answer::Done => {
                            over.insert(lane);
                            events.push_back(Event::Closed { lane });
                        }
                    }
                }
            }
            if flows.is_empty() {
                break;
            }
            let mut sends: BTreeMap<Option<PeerId>, f64> = BTreeMap::new();
            flows.iter().for_each(|flow| *sends.entry(flow.source).or_default() += 1.0);
            let step = flows.iter().map(|flow| flow.left * sends[&flow.source]).fold(f64::MAX, f64::min);
            now += step;
            flows.iter_mut().for_each(|flow| flow.left -= step / sends[&flow.source]);
            let (ended, rest): (Vec<Flow>, Vec<Flow>) = flows.into_iter().partition(|flow| flow.left < 1e-12);
            flows = rest;
            for flow in ended {
                let peer = (flow.lane / lanes) as PeerId;
                has[peer as usize][flow.piece] = true;
                let has = has[peer as usize].clone();
                events.push_back(Event::Asks { lane: flow.lane, peer, host: peer, has, missed: None });
            }
            if let Some(peer) = dies.filter(|_| dead.is_none() && now > 0.5) {
                dead = Some(peer);
                flows.retain(|flow| (flow.lane / lanes) as PeerId != peer);
                events.retain(|event| !matches!(event, Event::Asks { peer: own, .. } if *own == peer));
                events.extend((0..lanes).map(|entry| Event::Closed { lane: u64::from(peer) * lanes + entry }));
                // Receivers that were fetching from it report that, and ask again.
                let (missing, rest): (Vec<Flow>, Vec<Flow>) =
                    flows.into_iter().partition(|flow| flow.source == Some(peer));
                flows = rest;
                for flow in missing {
                    let own = (flow.lane / lanes) as PeerId;
                    let has = has[own as usize].clone();
                    events.push_back(Event::Asks { lane: flow.lane, peer: own, host: own, has, missed: Some(peer) });
                }
            }
        }
        let whole = |peer: u32| has[peer as usize].iter().all(|has| *has) || dead == Some(peer);
        assert!((0..receivers).all(whole), "somebody lacks something");
        assert!(swarm.is_idle() && swarm.waiting.is_empty() && swarm.owner_uploads == 0);
        assert!(swarm.peers.values().all(|peer| peer.uploads == 0));
        (now, f64::from(from_owner) / pieces as f64)
    }

    #[test]
    fn thirty_two_copies_take_less_than_twice_the_time_of_one() {
        for lanes in 1..=4 {
            let (time, from_owner) = broadcast(32, 64, lanes, None);
            assert!(lanes < 2 || time < 1.5, "{lanes} lanes: {time:.2} times");
            assert!(from_owner < 1.5, "{lanes} lanes: {from_owner:.2} copies left the owner");
        }
        for receivers in [1, 2, 4, 8, 16, 64, 128] {
            let (time, _) = broadcast(receivers, 64, 2, None);
            assert!(time < 1.7, "{receivers} receivers: {time:.2} times");
        }
    }

    #[test]
    fn a_receiver_that_dies_holds_nobody_up() {
        let (time, _) = broadcast(32, 64, 2, Some(5));
        assert!(time < 1.6, "{time:.2} times");
    }

    fn asks(lane: LaneId, peer: PeerId, has: &[bool], missed: Option<PeerId>) -> Event {
        Event::Asks { lane, peer, host: peer, has: has.to_vec(), missed }
    }

    fn fetch(piece: usize, source: Option<PeerId>) -> Answer {
        Answer::Fetch { piece, source }
    }

    #[test]
    fn a_receiver_is_never_told_to_fetch_what_it_has_or_is_fetching() {
        let mut swarm = Swarm::new(3, 1);
        said(&mut swarm, Time(0), asks(1, 1, &[true, true, false], None));
        // Another reports that the first sent nothing: it keeps its own pieces anyway.
        said(&mut swarm, Time(0), asks(2, 2, &[false; 3], Some(1)));
        assert_eq!(said(&mut swarm, Time(0), asks(3, 1, &[true, true, false], None)), [(3, Answer::Done)]);
    }

    #[test]
    fn what_a_receiver_has_lost_is_not_asked_of_it() {
        let mut swarm = Swarm::new(1, 1);
        said(&mut swarm, Time(0), asks(1, 1, &[true], None));
        assert_eq!(said(&mut swarm, Time(0), asks(2, 2, &[false], None)), [(2, fetch(0, Some(1)))]);
        assert_eq!(said(&mut swarm, Time(0), asks(1, 1, &[false], None)), [(1, fetch(0, None))]);
        assert_eq!(said(&mut swarm, Time(0), asks(3, 3, &[false], None)), [(3, fetch(0, None))]);
    }

    #[test]
    fn a_source_that_gives_nothing_again_and_again_is_left_until_it_shows_that_it_lives() {
        let mut swarm = Swarm::new(1, 1);
        said(&mut swarm, Time(0), asks(1, 1, &[true], None));
        let mut missed = None;
        for _ in 0..MISSES_MAX {
            assert_eq!(said(&mut swarm, Time(0), asks(2, 2, &[false], missed)), [(2, fetch(0, Some(1)))]);
            missed = Some(1);
        }
        assert_eq!(said(&mut swarm, Time(0), asks(2, 2, &[false], missed)), [(2, fetch(0, None))]);
        said(&mut swarm, Time(0), asks(1, 1, &[true], None));
        assert_eq!(said(&mut swarm, Time(0), asks(2, 2, &[false], None)), [(2, fetch(0, Some(1)))]);
    }

    /// Receivers of one host that say they have everything, and leave.
    fn finish(swarm: &mut Swarm, peers: std::ops::Range<PeerId>) {
        for peer in peers {
            let lane = LaneId::from(peer);
            said(swarm, Time(0), Event::Asks { lane, peer, host: 7, has: vec![true], missed: None });
            said(swarm, Time(0), Event::Closed { lane });
        }
    }

    #[test]
    fn who_finished_and_gives_nothing_once_is_named_no_more() {
        let mut swarm = Swarm::new(1, 1);
        finish(&mut swarm, 1..2);
        assert_eq!(said(&mut swarm, Time(0), asks(8, 8, &[false], None)), [(8, fetch(0, Some(1)))]);
        assert_eq!(said(&mut swarm, Time(0), asks(8, 8, &[false], Some(1))), [(8, fetch(0, None))]);
    }

    #[test]
    fn a_host_that_is_gone_costs_few_failed_connections() {
        let mut swarm = Swarm::new(1, 1);
        finish(&mut swarm, 100..1000);
        assert_eq!(swarm.peers.len(), FINISHED_PER_HOST);
        let (mut missed, mut failed) = (None, 0);
        while let [(_, Answer::Fetch { source: Some(source), .. })] =
            said(&mut swarm, Time(0), asks(8, 8, &[false], missed))[..]
        {
            (missed, failed) = (Some(source), failed + 1);
        }
        assert_eq!(failed, FINISHED_PER_HOST);
    }

    #[test]
    fn who_finished_and_asks_again_counts_as_one_that_asks() {
        let mut swarm = Swarm::new(1, 1);
        finish(&mut swarm, 1..2);
        // It has lost what it had.
        said(&mut swarm, Time(0), Event::Asks { lane: 1, peer: 1, host: 7, has: vec![false], missed: None });
        finish(&mut swarm, 2..2 + FINISHED_PER_HOST as PeerId);
        assert_eq!(swarm.peers.len(), FINISHED_PER_HOST + 1);
        said(&mut swarm, Time(0), Event::Closed { lane: 1 });
        assert_eq!(swarm.peers.len(), FINISHED_PER_HOST);
    }

    #[test]
    fn receivers_that_fall_silent_hold_no_places_for_ever() {
        let mut swarm = Swarm::new(4, 1);
        for lane in 0..u64::from(UPLOADS_PER_PEER) {
            assert_eq!(said(&mut swarm, Time(0), asks(lane, lane as PeerId, &[false; 4], None)).len(), 1);
        }
        assert_eq!(said(&mut swarm, Time(0), asks(9, 9, &[false; 4], None)), [], "the owner is busy");
        let later = Time(0) + STALL * STALLS;
        assert!(matches!(said(&mut swarm, later, asks(9, 9, &[false; 4], None))[..], [(9, Answer::Fetch { .. })]));
    }

    #[test]
    fn pieces_are_whole_blocks_and_no_larger_than_a_chunk() {
        for len in [1, BLOCK_BYTES, 10 << 20, 64 << 20, (1 << 30) + 1, 100 << 30] {
            let size = piece_bytes(len);
            assert!(size.is_multiple_of(BLOCK_BYTES) && size <= CHUNK_BYTES, "{len}: {size}");
            assert_eq!(pieces(len) as u64, len.div_ceil(size));
        }
        assert_eq!(pieces(64 << 20), 64);
    }
}
