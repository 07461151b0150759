//! The coordination of a broadcast, with receivers that are slow, stop, and leave.

use mission_core::random::SplitMix;
use mission_core::swarm::{Answer, Event, LaneId, PeerId, Swarm};
use mission_core::units::Time;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

const LANES: u64 = 2;
const RECEIVERS_PER_HOST: PeerId = 4;
/// A lane that is silent for two stalls is dropped.
const SILENT_NS: u64 = 10_000_000_000;

struct Receiver {
    has: Vec<bool>,
    /// Of each of its lanes: the piece on its way, and since when.
    coming: BTreeMap<LaneId, (usize, u64)>,
    done: u64,
    gone: bool,
}

/// One seed; gives the number of steps.
pub fn run(seed: u64) -> u64 {
    let mut random = SplitMix(seed ^ 0x5EED);
    let pieces = 1 + random.next() as usize % 20;
    let receivers = 1 + random.next() as usize % 10;
    let mut swarm = Swarm::new(pieces, seed);
    let new = || Receiver { has: vec![false; pieces], coming: BTreeMap::new(), done: 0, gone: false };
    let mut all: Vec<Receiver> = (0..receivers).map(|_| new()).collect();
    // When, which lane, and whether its piece arrives then.
    let mut queue: BinaryHeap<Reverse<(u64, LaneId, bool)>> = BinaryHeap::new();
    for lane in 0..receivers as u64 * LANES {
        queue.push(Reverse((random.next() % 1_000_000, lane, false)));
    }
    let mut steps = 0;
    let mut answers = Vec::new();
    while let Some(Reverse((now, lane, arrives))) = queue.pop() {
        steps += 1;
        assert!(steps < 100_000, "it never ends");
        let at = (lane / LANES) as usize;
        if all[at].gone {
            continue;
        }
        let peer = at as PeerId;
        let mut missed = None;
        if let Some((piece, _)) = all[at].coming.remove(&lane) {
            if arrives {
                // A silent lane's piece is named to a second lane too, and only one of them fetches it.
                all[at].has[piece] = true;
            } else {
                missed = (random.next().is_multiple_of(2)).then_some(random.next() as PeerId % receivers as PeerId);
            }
        }
        let leaves = receivers > 1 && random.next().is_multiple_of(200);
        let mut events = Vec::new();
        if leaves {
            all[at].gone = true;
            events.extend((0..LANES).map(|own| Event::Closed { lane: at as u64 * LANES + own }));
        } else {
            events.push(Event::Asks { lane, peer, host: peer / RECEIVERS_PER_HOST, has: all[at].has.clone(), missed });
        }
        for event in events {
            swarm.handle(Time(now), event, &mut answers);
        }
        for (lane, answer) in answers.drain(..) {
            let at = (lane / LANES) as usize;
            let receiver = &all[at];
            if receiver.gone {
                continue; // to the other lane of somebody who is closing both
            }
            match answer {
                Answer::Fetch { piece, source } => {
                    assert!(!receiver.has[piece], "receiver {at} has piece {piece}");
                    let twice = receiver.coming.values().any(|own| own.0 == piece && now - own.1 < SILENT_NS);
                    assert!(!twice, "piece {piece} is on its way to {at} already");
                    if let Some(source) = source {
                        let source = &all[source as usize];
                        assert!(source.has[piece] || source.gone, "the source does not have piece {piece}");
                    }
                    let comes =
                        source.is_none_or(|source| !all[source as usize].gone) && !random.next().is_multiple_of(20);
                    all[at].coming.insert(lane, (piece, now));
                    let stopped = if random.next().is_multiple_of(100) { 12_000_000_000 } else { 0 };
                    queue.push(Reverse((now + 1 + random.next() % 100_000_000 + stopped, lane, comes)));
                }
                Answer::Done => all[at].done += 1,
            }
        }
        // A waiting lane asks again after a while, as over the wire.
        if queue.is_empty() {
            for (at, receiver) in all.iter().enumerate().filter(|(_, own)| !own.gone) {
                let has_all = receiver.has.iter().all(|has| *has);
                if !has_all && receiver.coming.is_empty() {
                    queue.push(Reverse((now + 1_000_000_000, at as u64 * LANES, false)));
                }
            }
        }
    }
    for (at, receiver) in all.iter().enumerate().filter(|(_, own)| !own.gone) {
        assert!(receiver.has.iter().all(|has| *has), "receiver {at} lacks pieces");
        assert!(receiver.done > 0, "receiver {at} got no answer that it is done");
    }
    steps
}
