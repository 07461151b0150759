//! Parts that were received in broadcasts, or of objects that readers asked to keep: for other receivers, and for the
//! next reader in this process.
//!
//! A copy is served block by block while it still arrives. Once it is whole it stays until its object is freed, its job
//! ends, or its memory is needed: data that every iteration needs stays where it is used (CIEL's "sweethearts").

use crate::object::ObjectId;
use crate::segment::Segment;
use mission_core::defaults::BLOCK_BYTES;
use mission_core::types::{Encryption, JobId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// An object and the number of a part.
pub type PartKey = (ObjectId, u32);

#[derive(Default)]
pub struct Copies {
    state: Mutex<State>,
    /// Some copy is whole, or will not be.
    over: Condvar,
}

#[derive(Default)]
struct State {
    all: BTreeMap<PartKey, Kept>,
    /// Objects of which there is a whole copy since the last report.
    news: Vec<ObjectId>,
    uses: u64,
}

struct Kept {
    copy: Arc<PartCopy>,
    job: JobId,
    whole: bool,
    /// The larger, the later.
    used: u64,
}

/// A part, or what has arrived of it.
pub struct PartCopy {
    len: u64,
    memory: OnceLock<(Arc<Segment>, usize)>,
    blocks: Mutex<Blocks>,
}

struct Blocks {
    /// Checksum of each block that is here.
    here: Vec<Option<u64>>,
    missing: usize,
    encryption: Encryption,
}

/// A part that this process receives now, and nobody else in it; unless it is kept it is forgotten at the end.
pub struct Receiving<'a> {
    copies: &'a Copies,
    key: PartKey,
    pub copy: Arc<PartCopy>,
    /// Pieces that are assigned to some lane of this process, by where they start.
    claimed: Mutex<BTreeSet<u64>>,
    kept: bool,
}

impl Copies {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    /// Begins to receive parts of `len` bytes. `None`: another fetch of this process receives one of them, nothing was
    /// begun, and [`Copies::wait`] waits for it.
    pub fn begin(&self, parts: &[(PartKey, u64)], job: &JobId, encryption: Encryption) -> Option<Vec<Receiving<'_>>> {
        let mut state = self.lock();
        if parts.iter().any(|(key, _)| state.all.contains_key(key)) {
            return None;
        }
        let receiving = parts.iter().map(|&(key, len)| {
            let here = vec![None; len.div_ceil(BLOCK_BYTES) as usize];
            let blocks = Mutex::new(Blocks { missing: here.len(), here, encryption });
            let copy = Arc::new(PartCopy { len, memory: OnceLock::new(), blocks });
            state.all.insert(key, Kept { copy: copy.clone(), job: job.clone(), whole: false, used: 0 });
            Receiving { copies: self, key, copy, claimed: Mutex::default(), kept: false }
        });
        Some(receiving.collect())
    }

    /// Waits until some part has been received or given up, but not for long.
    pub fn wait(&self, longest: Duration) {
        let _ = self.over.wait_timeout(self.lock(), longest).expect("no panic while held");
    }

    /// The copy of a part.
    pub fn get(&self, key: &PartKey) -> Option<Arc<PartCopy>> {
        self.lock().all.get(key).map(|kept| kept.copy.clone())
    }

    /// Where a whole part lies: memory, start, length.
    pub fn whole(&self, key: &PartKey) -> Option<(Arc<Segment>, usize, usize)> {
        let mut state = self.lock();
        state.uses += 1;
        let now = state.uses;
        let kept = state.all.get_mut(key).filter(|kept| kept.whole)?;
        kept.used = now;
        let (segment, start) = kept.copy.memory.get().expect("a whole copy lies somewhere");
        Some((segment.clone(), *start, kept.copy.len as usize))
    }

    /// Objects of which a part has become whole since the last call.
    pub fn news(&self) -> Vec<ObjectId> {
        std::mem::take(&mut self.lock().news)
    }

    pub fn has_news(&self) -> bool {
        !self.lock().news.is_empty()
    }

    pub fn free(&self, object: &ObjectId) {
        self.drop_where(|key, _| key.0 == *object);
    }

    pub fn forget_job(&self, job: &JobId) {
        self.drop_where(|_, kept| kept.job == *job);
    }

    /// Drops whole copies, least recently used first, until so many bytes are free.
    pub fn make_room(&self, bytes: u64) {
        let mut state = self.lock();
        let mut whole: Vec<_> =
            state.all.iter().filter(|(_, kept)| kept.whole).map(|(key, kept)| (kept.used, *key)).collect();
        whole.sort_unstable();
        let mut gone = Vec::new();
        let mut left = bytes;
        for (_, key) in whole {
            if left == 0 {
                break;
            }
            let kept = state.all.remove(&key).expect("it was just there");
            left = left.saturating_sub(kept.copy.len);
            gone.push(kept);
        }
        drop(state);
    }

    pub fn len(&self) -> usize {
        self.lock().all.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn drop_where(&self, mut goes: impl FnMut(&PartKey, &Kept) -> bool) {
        let gone: Vec<Kept> =
            self.lock().all.extract_if(.., |key, kept| goes(key, kept)).map(|(_, kept)| kept).collect();
        // Memory goes back to its pool without the lock.
        drop(gone);
    }
}

impl PartCopy {
    /// Where the part will lie.
    pub fn lies_in(&self, segment: Arc<Segment>, start: usize) {
        let _ = self.memory.set((segment, start));
    }

    /// A range has arrived and was verified, block by block.
    pub fn arrived(&self, start: u64, checksums: &[u64]) {
        let mut blocks = self.blocks();
        let first = (start / BLOCK_BYTES) as usize;
        let Blocks { here, missing, .. } = &mut *blocks;
        for (block, checksum) in here.iter_mut().skip(first).zip(checksums) {
            *missing -= usize::from(block.replace(*checksum).is_none());
        }
    }

    /// The protection that a copy needs when it is sent: the same as at its owner.
    pub fn protect(&self, encryption: Encryption) {
        let mut blocks = self.blocks();
        blocks.encryption = blocks.encryption.max(encryption);
    }

    pub fn encryption(&self) -> Encryption {
        self.blocks().encryption
    }

    pub fn nbytes(&self) -> u64 {
        self.len
    }

    pub fn is_whole(&self) -> bool {
        self.blocks().missing == 0
    }

    /// Of each piece of so many bytes whether all of it is here.
    pub fn has(&self, piece_bytes: u64) -> Vec<bool> {
        let blocks = self.blocks();
        blocks
            .here
            .chunks((piece_bytes / BLOCK_BYTES) as usize)
            .map(|piece| piece.iter().all(Option::is_some))
            .collect()
    }

    /// A range and the checksums of its blocks; `None` where it does not begin and end with blocks, or is not all here.
    pub fn range(&self, start: u64, len: u64) -> Option<(&[u8], Vec<u64>)> {
        let end = start.checked_add(len).filter(|end| *end <= self.len)?;
        if !start.is_multiple_of(BLOCK_BYTES) || (!end.is_multiple_of(BLOCK_BYTES) && end != self.len) {
            return None;
        }
        let blocks = self.blocks();
        let here = blocks.here.get((start / BLOCK_BYTES) as usize..end.div_ceil(BLOCK_BYTES) as usize)?;
        let checksums = here.iter().copied().collect::<Option<Vec<u64>>>()?;
        let (segment, first) = self.memory.get()?;
        // SAFETY: these bytes have arrived, nobody writes to them any more, and they live as long as this copy.
        let bytes = unsafe { std::slice::from_raw_parts(segment.as_ptr().add(first + start as usize), len as usize) };
        Some((bytes, checksums))
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().expect("no panic while held")
    }
}

impl Receiving<'_> {
    /// Whether a piece is this caller's to fetch: nobody writes twice where others may be reading already.
    pub fn claim(&self, start: u64) -> bool {
        self.claimed.lock().expect("no panic while held").insert(start)
    }

    /// Where its first byte goes in the memory that [`PartCopy::lies_in`] named.
    pub fn place(&self) -> usize {
        self.copy.memory.get().expect("memory is named before anything arrives").1
    }

    /// All of it has arrived and was verified: keep it.
    pub fn keep(mut self) {
        self.kept = self.copy.is_whole();
    }
}

impl Drop for Receiving<'_> {
    fn drop(&mut self) {
        let mut state = self.copies.lock();
        let now = state.uses;
        // Its entry may have been freed meanwhile, and another fetch have begun anew.
        let own = state.all.get_mut(&self.key).filter(|kept| Arc::ptr_eq(&kept.copy, &self.copy));
        let gone = match own {
            Some(kept) if self.kept => {
                (kept.whole, kept.used) = (true, now);
                state.news.push(self.key.0);
                None
            }
            Some(_) => state.all.remove(&self.key),
            None => None,
        };
        drop(state);
        drop(gone);
        self.copies.over.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum;
    use crate::segment::Pool;

    const LEN: u64 = 3 * BLOCK_BYTES + 5;

    fn key(number: u8) -> PartKey {
        (ObjectId([number; 16]), 0)
    }

    fn begin(copies: &Copies, number: u8) -> Receiving<'_> {
        copies.begin(&[(key(number), LEN)], &"job".into(), Encryption::None).unwrap().remove(0)
    }

    fn receive(copies: &Copies, pool: &Arc<Pool>, number: u8) {
        let receiving = begin(copies, number);
        let mut segment = pool.take(LEN as usize, None).unwrap();
        segment.bytes_mut().fill(number);
        let checksums = checksum::of_blocks(segment.bytes());
        receiving.copy.lies_in(Arc::new(segment), 0);
        receiving.copy.arrived(0, &checksums);
        receiving.keep();
    }

    #[test]
    fn what_has_arrived_is_served_and_the_rest_is_not() {
        let (copies, pool) = (Copies::default(), Pool::new(0));
        let receiving = begin(&copies, 1);
        receiving.copy.lies_in(Arc::new(pool.take(LEN as usize, None).unwrap()), 0);
        receiving.copy.arrived(BLOCK_BYTES, &[7, 8]);
        let copy = copies.get(&key(1)).unwrap();
        assert_eq!(copy.has(BLOCK_BYTES), [false, true, true, false]);
        assert_eq!(copy.has(2 * BLOCK_BYTES), [false, false]);
        assert_eq!(copy.range(BLOCK_BYTES, 2 * BLOCK_BYTES).unwrap().1, [7, 8]);
        for (start, len) in [(0, BLOCK_BYTES), (BLOCK_BYTES, 5), (BLOCK_BYTES + 1, 5), (0, LEN + 1), (u64::MAX, 2)] {
            assert!(copy.range(start, len).is_none(), "{start} {len}");
        }
        drop(receiving);
        assert!(copies.is_empty() && copies.news().is_empty(), "it was given up");
    }

    #[test]
    fn one_fetch_of_a_process_receives_a_part_and_the_others_find_it() {
        let (copies, pool) = (Copies::default(), Pool::new(0));
        let first = begin(&copies, 1);
        assert!(copies.begin(&[(key(2), LEN), (key(1), LEN)], &"job".into(), Encryption::None).is_none());
        assert!(copies.get(&key(2)).is_none(), "nothing was begun");
        drop(first);
        receive(&copies, &pool, 1);
        assert_eq!(copies.whole(&key(1)).unwrap().0.bytes()[0], 1);
        assert_eq!((copies.news(), copies.news()), (vec![key(1).0], vec![]));
        copies.forget_job(&"job".into());
        assert_eq!(pool.live_bytes(), 0);
    }

    #[test]
    fn a_part_that_was_freed_and_begun_anew_is_not_taken_for_the_old_one() {
        let (copies, pool) = (Copies::default(), Pool::new(0));
        let old = begin(&copies, 1);
        old.copy.lies_in(Arc::new(pool.take(LEN as usize, None).unwrap()), 0);
        old.copy.arrived(0, &[1, 2, 3, 4]);
        copies.free(&key(1).0);
        let new = begin(&copies, 1);
        old.keep();
        assert!(copies.whole(&key(1)).is_none() && copies.get(&key(1)).is_some());
        assert!(new.claim(0) && !new.claim(0));
        drop(new);
        assert!(copies.is_empty());
    }

    #[test]
    fn room_is_made_by_what_was_used_least_lately() {
        let (copies, pool) = (Copies::default(), Pool::new(0));
        (1..=3).for_each(|number| receive(&copies, &pool, number));
        copies.whole(&key(1)).unwrap();
        copies.make_room(LEN + 1);
        let left: Vec<bool> = (1..=3).map(|number| copies.get(&key(number)).is_some()).collect();
        assert_eq!(left, [true, false, false]);
    }
}
