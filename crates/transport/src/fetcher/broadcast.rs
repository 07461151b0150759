//! The receiver's side of a broadcast: asks the owner for its next piece and whom to get it from, and serves what it has.

use super::caller::Caller;
use super::home::Found;
use super::runs::Far;
use super::{INTERRUPT_EVERY, Planned, Shared};
use crate::carrier::{self, Connection};
use crate::clock::lasting;
use crate::copies::Receiving;
use crate::parts::{FetchRequest, Wanted};
use crate::segment::{SHARED_MIN, Segment};
use crate::wire::{Next, PieceReply, Wants};
use mission_core::defaults::{BLOCK_BYTES, LANES, PROGRESS_TIMEOUT, SWARM_MIN};
use mission_core::flight::{FlightPlan, Leg};
use mission_core::host::fetches::{FetchError, Tally};
use mission_core::swarm;
use mission_core::types::TransferId;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Instant;

/// Where each part lies already; and what is going to be received in a broadcast, by its place among the parts.
pub(super) type Begun<'a> = (Vec<Found>, BTreeMap<usize, Receiving<'a>>);

impl Shared {
    /// Where each part lies already, and, by their numbers, the parts that this fetch is going to receive as in a broadcast,
    /// and keep; waits while another fetch of this process does that.
    pub(super) fn begin(
        &self,
        request: &FetchRequest,
        plan: &FlightPlan,
        caller: &Caller<'_>,
    ) -> Result<Begun<'_>, FetchError> {
        let mut homes = self.at_home(request, plan, caller)?;
        // What is packed with others would keep their memory with its own.
        let may_stay = !request.packed || request.parts.len() == 1;
        let broadcast = request.whole && self.lock().broadcasts.contains(&request.transfer);
        if !may_stay || (!broadcast && request.keep.is_empty()) {
            return Ok((homes, BTreeMap::new()));
        }
        let takes_part = |wanted: &Wanted| {
            (broadcast && wanted.len >= SWARM_MIN)
                || (request.keep.contains(&wanted.object) && wanted.len >= SHARED_MIN as u64)
        };
        loop {
            let mut numbers = BTreeMap::new();
            for (number, (wanted, home)) in request.parts.iter().zip(&mut homes).enumerate() {
                let key = (wanted.object, wanted.part);
                if !home.is_elsewhere() || !takes_part(wanted) || self.owns(wanted) {
                    continue;
                }
                match self.copy_at_home(wanted) {
                    Some(copy) => *home = Found::Here(copy),
                    // Somebody has another length of it: one of both is wrong, and the owner knows which.
                    None if self.store.copies.get(&key).is_some_and(|copy| copy.nbytes() != wanted.len) => {}
                    None => drop(numbers.entry(key).or_insert((number, wanted.len))),
                }
            }
            let parts: Vec<_> = numbers.iter().map(|(key, (_, len))| (*key, *len)).collect();
            if let Some(receiving) = self.store.copies.begin(&parts, &request.transfer.job, request.demands.encrypt) {
                let numbers = numbers.into_values().map(|(number, _)| number);
                return Ok((homes, numbers.zip(receiving).collect()));
            }
            caller.waits()?;
            self.store.copies.wait(INTERRUPT_EVERY);
        }
    }

    /// Receives a part piece by piece, from the sources that the owner names. The rest comes from the owner, if it does
    /// not coordinate the broadcast or its answer was lost.
    pub(super) fn receive_broadcast(
        &self,
        transfer: &TransferId,
        planned: &Arc<Planned>,
        wanted: &Wanted,
        receiving: &Receiving<'_>,
        segment: &Arc<Segment>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> (Result<(), FetchError>, Tally) {
        let (stop, (ended, ends)) = (AtomicBool::new(false), channel());
        let mut tally = Tally::default();
        // The other lanes report only that they were stopped.
        let mut first_error = None;
        thread::scope(|scope| {
            for _ in 0..LANES {
                let (stop, ended) = (&stop, ended.clone());
                let lane = thread::Builder::new().name("mission-lane".into()).stack_size(512 << 10);
                // Without a thread, fewer lanes suffice.
                let _ = lane.spawn_scoped(scope, move || {
                    let _ = ended.send(self.lane(transfer, planned, wanted, receiving, segment, stop));
                });
            }
            drop(ended);
            loop {
                match ends.recv_timeout(INTERRUPT_EVERY) {
                    Ok((ended, took)) => {
                        tally.add(&took);
                        if let Err(error) = ended {
                            stop.store(true, Ordering::Relaxed);
                            first_error.get_or_insert(error);
                        }
                    }
                    Err(RecvTimeoutError::Timeout) if interrupted() => {
                        stop.store(true, Ordering::Relaxed);
                        first_error.get_or_insert_with(|| FetchError::Cancelled("interrupted".into()));
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
        });
        if let Some(error) = first_error {
            return (Err(error), tally);
        }
        let (ended, took) = self.carry(transfer, planned, rest(wanted, receiving, segment), interrupted);
        tally.add(&took);
        (ended, tally)
    }

    /// Asks and fetches until there is nothing more to get, or no owner to ask.
    fn lane(
        &self,
        transfer: &TransferId,
        planned: &Arc<Planned>,
        wanted: &Wanted,
        receiving: &Receiving<'_>,
        segment: &Arc<Segment>,
        stop: &AtomicBool,
    ) -> (Result<(), FetchError>, Tally) {
        let mut tally = Tally::default();
        let Some(mut owner) = self.ask_owner(planned, wanted) else { return (Ok(()), tally) };
        let mut missed = None;
        let (mut had, mut since) = (0, Instant::now());
        while !stop.load(Ordering::Relaxed) {
            if self.lock().closing {
                return (Err(FetchError::Cancelled(super::CLOSES.into())), tally);
            }
            let has = receiving.copy.has(swarm::piece_bytes(wanted.len));
            let have = has.iter().filter(|has| **has).count();
            if have > had {
                (had, since) = (have, Instant::now());
            }
            if since.elapsed() >= lasting(PROGRESS_TIMEOUT) {
                // The owner only answers "wait": request the rest from it as from any other source.
                break;
            }
            let wants = Wants::Source { serves: self.own_address, has, missed: missed.take() };
            let (next, blocks) = match owner.next(wanted.object, wanted.part, wants) {
                // The rest after all lanes have ended is requested from the owner.
                Ok((PieceReply::Fetch(next), blocks))
                    if is_piece(&next, &blocks, wanted.len) && receiving.claim(next.start) =>
                {
                    (next, blocks)
                }
                Ok((PieceReply::Later, _)) => continue,
                Ok((PieceReply::Fetch(_) | PieceReply::Done, _)) | Err(_) => break,
            };
            let mut far = piece(wanted, receiving, segment, next.start..next.start + next.len, next.source);
            far.expected = Some(blocks.into());
            let (ended, took) = self.carry(transfer, planned, vec![far], &mut || stop.load(Ordering::Relaxed));
            missed = next.source.filter(|source| {
                let state = self.lock();
                !state.source_numbers.get(source).is_some_and(|number| took.used.contains(number))
            });
            tally.add(&took);
            if ended.is_err() {
                return (ended, tally);
            }
        }
        (Ok(()), tally)
    }

    fn ask_owner(&self, planned: &Planned, wanted: &Wanted) -> Option<Box<dyn Connection>> {
        let connect = |leg: &Leg, address: &SocketAddr| -> Option<Box<dyn Connection>> {
            carrier::carrier(leg.transport)?.connect(*address, leg, &self.context).ok()
        };
        wanted.addresses.iter().find_map(|address| planned.to(*address).iter().find_map(|leg| connect(leg, address)))
    }
}

fn is_piece(next: &Next, blocks: &[u64], len: u64) -> bool {
    let bytes = swarm::piece_bytes(len);
    blocks.len() as u64 == next.len.div_ceil(BLOCK_BYTES)
        && next.start.is_multiple_of(bytes)
        && next.start < len
        && next.len == bytes.min(len - next.start)
}

/// A piece of a part, from a receiver if one is named, or else and at last from the owner.
fn piece(
    wanted: &Wanted,
    receiving: &Receiving<'_>,
    segment: &Arc<Segment>,
    range: Range<u64>,
    peer: Option<SocketAddr>,
) -> Far {
    let place = receiving.place() + range.start as usize;
    let mut far = Far::of(wanted, range.start, range.end - range.start, segment, place);
    far.sources.splice(0..0, peer);
    far.copy = Some(receiving.copy.clone());
    far.peer = peer;
    far
}

/// The missing ranges of a part.
fn rest(wanted: &Wanted, receiving: &Receiving<'_>, segment: &Arc<Segment>) -> Vec<Far> {
    let bytes = swarm::piece_bytes(wanted.len);
    let missing = receiving.copy.has(bytes).into_iter().enumerate().filter(|(_, has)| !has);
    let starts = missing.map(|(number, _)| number as u64 * bytes);
    starts.map(|start| piece(wanted, receiving, segment, start..wanted.len.min(start + bytes), None)).collect()
}
