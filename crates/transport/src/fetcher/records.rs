//! What each transfer requested and received, for the Mission Controller.

use super::{Fetcher, Shared, State};
use crate::clock::lasting;
use crate::parts::Wanted;
use mission_core::defaults::FORGET_QUIET;
use mission_core::host::fetches::Tally;
use mission_core::report::TransferReport;
use mission_core::types::TransferId;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

/// How often a report lists how many bytes fetches wait for, by source.
const WAITS_EVERY: Duration = Duration::from_secs(1);

/// Bytes that a fetch requests.
#[derive(Default)]
pub(super) struct Bytes {
    /// To be fetched.
    pub(super) far: u64,
    /// On this host already.
    here: u64,
    /// Of those, in this process.
    local: u64,
}

impl Bytes {
    pub(super) fn count_here(&mut self, wanted: &Wanted, shared: &Shared) {
        self.here += wanted.len;
        self.local += if shared.owns(wanted) { wanted.len } else { 0 };
    }
}

impl Fetcher {
    /// The transfers of this process that changed since the last call, if any did.
    pub fn report(&self) -> Option<Vec<TransferReport>> {
        let mut state = self.shared.lock();
        if !std::mem::take(&mut state.changed) {
            let records = state.forget_quiet();
            return (!records.is_empty()).then_some(records);
        }
        // The list of what fetches wait for is long, and policies read it once a second.
        let says_waits = state.waits_said.is_none_or(|said| said.elapsed() >= WAITS_EVERY);
        let mut waits: BTreeMap<TransferId, BTreeMap<String, u64>> = BTreeMap::new();
        for active in state.fetches.values() {
            let own = waits.entry(active.transfer.clone()).or_default();
            for far in active.far.iter().filter(|far| says_waits && far.left > 0) {
                if let Some(source) = far.sources.first() {
                    *own.entry(source.to_string()).or_default() += far.left;
                }
            }
        }
        if says_waits {
            state.waits_said = Some(Instant::now());
        }
        let (mut records, mut moved) = (Vec::new(), BTreeSet::new());
        let State { transfers, stirred, said_moved, quiet, .. } = &mut *state;
        stirred.append(said_moved);
        for transfer in std::mem::take(stirred) {
            let Some(record) = transfers.get_mut(&transfer) else { continue };
            match waits.remove(&transfer) {
                Some(waits) if says_waits => record.waits_for = waits,
                Some(_) => {}
                None => record.waits_for.clear(),
            }
            records.push(record.clone());
            if record.moved {
                record.moved = record.flows > 0;
                moved.insert(transfer);
            } else {
                quiet.push_back((Instant::now(), record.ended, transfer));
            }
        }
        records.extend(state.forget_quiet());
        // Report it once more, so that the Mission Controller learns that nothing moves any more.
        state.changed = !moved.is_empty();
        state.said_moved = moved;
        Some(records)
    }

    /// Whether some transfer has changed since the last report, or has been quiet for long.
    pub fn has_news(&self) -> bool {
        let state = self.shared.lock();
        state.changed || state.is_quiet_long()
    }

    pub fn transfers(&self) -> Vec<TransferReport> {
        self.shared.lock().transfers.values().cloned().collect()
    }
}

impl State {
    fn is_quiet_long(&self) -> bool {
        self.quiet.front().is_some_and(|(since, ..)| since.elapsed() >= lasting(FORGET_QUIET))
    }

    /// Takes out the records of transfers that have been quiet for long: their last reports.
    fn forget_quiet(&mut self) -> Vec<TransferReport> {
        let mut over = Vec::new();
        while self.is_quiet_long()
            && let Some((_, ended, transfer)) = self.quiet.pop_front()
        {
            // What has moved since comes again later. One that still waits for bytes moves none.
            let is_over = |record: &TransferReport| {
                record.ended == ended && !record.moved && record.flows == 0 && record.asked_bytes <= record.served_bytes
            };
            if self.transfers.get(&transfer).is_some_and(is_over)
                && let Some(record) = self.transfers.remove(&transfer)
            {
                over.push(TransferReport { over: true, waits_for: BTreeMap::new(), ..record });
            }
        }
        over
    }

    pub(super) fn record(&mut self, transfer: &TransferId) -> &mut TransferReport {
        self.changed = true;
        if !self.stirred.contains(transfer) {
            self.stirred.insert(transfer.clone());
        }
        let record = self.transfers.entry(transfer.clone()).or_insert_with(|| TransferReport {
            job: transfer.job.to_string(),
            from: transfer.from.to_string(),
            to: transfer.to.to_string(),
            started: now(),
            ended: now(),
            ..TransferReport::default()
        });
        record.moved = true;
        record
    }
}

impl Shared {
    /// A fetch begins.
    pub(super) fn asks(&self, transfer: &TransferId, bytes: &Bytes) {
        let mut state = self.lock();
        let record = state.record(transfer);
        record.asked_bytes += bytes.far + bytes.here;
        record.served_bytes += bytes.here;
        record.local_bytes += bytes.local;
        record.fetches += 1;
        record.ended = now();
    }

    /// A fetch failed: its missing bytes are no longer requested.
    pub(super) fn gives_up(&self, transfer: &TransferId, bytes: &Bytes, tally: &Tally) {
        let mut state = self.lock();
        let record = state.record(transfer);
        // A record that was forgotten meanwhile begins anew.
        record.asked_bytes = record.asked_bytes.saturating_sub(bytes.far - tally.bytes.min(bytes.far));
    }
}

pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
