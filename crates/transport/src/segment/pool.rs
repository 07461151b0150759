//! Memory that is kept for the next segment, up to a limit.

use super::memory::{Kind, Mapping, Memory, MemoryFile, Ranges, Slab, memory_file};
use super::{SEALS, SHARED_MIN, SLAB, Segment, Use};
use mission_core::defaults::IDLE_MEMORY;
use mission_core::host::GroupId;
use rustix::process::{Resource, getrlimit};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;
/// The largest segment that is cut out of a slab.
const SLAB_PART_MAX: usize = 8 << 20;
/// The fraction of a process's descriptors that shared memory may use.
const DESCRIPTORS_PART: u64 = 4;

/// Segments of one job that are freed at about the same time. They share slabs, so that a slab becomes free with them:
/// memory is returned to the kernel by whole slabs (shared memory is sealed, and nothing can be punched out of it).
pub type Cohort = u32;
type Slabs = BTreeMap<(GroupId, Cohort), Vec<Arc<Slab>>>;

/// Mapped memory that is free for reuse, up to a limit.
pub struct Pool {
    free: Mutex<Free>,
    /// The slabs of each job and cohort.
    slabs: Mutex<Slabs>,
    /// Jobs that are over, of which something may be kept.
    ended: Mutex<BTreeSet<GroupId>>,
    /// Bytes of the segments in use.
    pub(super) live: AtomicU64,
    /// Bytes of those that hold results of the engine's tasks: they are not counted among the former.
    pub(super) results: AtomicU64,
    /// Nothing more is kept once used and kept memory reach this together.
    keep_bytes: usize,
    descriptors: Arc<AtomicUsize>,
    descriptors_max: usize,
    pub(super) protected_parts: AtomicUsize,
}

#[derive(Default)]
struct Free {
    by_kind: BTreeMap<Kind, Vec<(Mapping, Instant)>>,
    bytes: usize,
}

impl Pool {
    /// A pool that keeps free memory for the next user as long as that and what is in use are at most `keep_bytes`.
    pub fn new(keep_bytes: usize) -> Arc<Pool> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Arc::new(Pool {
            free: Mutex::default(),
            slabs: Mutex::default(),
            ended: Mutex::default(),
            live: AtomicU64::new(0),
            results: AtomicU64::new(0),
            keep_bytes,
            descriptors: Arc::default(),
            protected_parts: AtomicUsize::new(0),
            descriptors_max: (limit / DESCRIPTORS_PART).min(usize::MAX as u64) as usize,
        })
    }

    /// A segment of `len` bytes with unspecified content. Processes of the host can map it for `sharers`, a job, if it is
    /// large enough for that and there are descriptors left.
    ///
    /// # Errors
    /// The kernel has no memory to map.
    pub fn take(self: &Arc<Pool>, len: usize, sharers: Option<GroupId>) -> io::Result<Segment> {
        self.take_of(0, len, sharers)
    }

    /// As [`Pool::take`], of a cohort.
    ///
    /// # Errors
    /// As there.
    pub fn take_of(self: &Arc<Pool>, cohort: Cohort, len: usize, sharers: Option<GroupId>) -> io::Result<Segment> {
        if let Some(job) = sharers.filter(|_| len >= SHARED_MIN) {
            let is_part = len <= SLAB_PART_MAX;
            let taken = if is_part { self.take_part(len, job, cohort) } else { self.take_whole(len, Some(job)) };
            if let Ok(memory) = taken {
                return Ok(self.segment(memory, len, Use::DataPlane));
            }
        }
        let memory = self.take_whole(len, None)?;
        Ok(self.segment(memory, len, Use::DataPlane))
    }

    /// A segment for a task's result. The engine knows how large its results are and decides which go to the disk, so these bytes do not
    /// make objects go there.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn take_for_result(self: &Arc<Pool>, len: usize) -> io::Result<Segment> {
        let memory = self.take_whole(len, None)?;
        Ok(self.segment(memory, len, Use::Result))
    }

    fn segment(self: &Arc<Pool>, memory: Memory, len: usize, used: Use) -> Segment {
        self.bytes_of(used).fetch_add(memory.size() as u64, Ordering::Relaxed);
        Segment {
            memory: Some(memory),
            len,
            used,
            pool: self.clone(),
            writers: AtomicU32::new(0),
            protection: Mutex::default(),
        }
    }

    fn take_part(&self, len: usize, job: GroupId, cohort: Cohort) -> io::Result<Memory> {
        let size = len.next_multiple_of(PAGE);
        let part = |slabs: &[Arc<Slab>]| {
            let (slab, start) = slabs.iter().find_map(|slab| Some((slab, slab.take(size)?)))?;
            Some(Memory::Part { slab: slab.clone(), start, size })
        };
        let own = (job, cohort);
        if let Some(taken) = self.slabs.lock().expect("no panic while held").get(&own).and_then(|slabs| part(slabs)) {
            return Ok(taken);
        }
        // Without the lock: this visits all slabs.
        self.make_room(SLAB, Some((job, Some(cohort))));
        let mut slabs = self.slabs.lock().expect("no panic while held");
        let slabs = slabs.entry(own).or_default();
        if let Some(taken) = part(slabs) {
            return Ok(taken);
        }
        let mapping = self.map(SLAB, Some(job))?;
        let free = Ranges { by_start: BTreeMap::from([(0, SLAB)]), idle_since: None };
        let slab = Arc::new(Slab { mapping, free: Mutex::new(free) });
        let start = slab.take(size).expect("a new slab is larger");
        slabs.push(slab.clone());
        Ok(Memory::Part { slab, start, size })
    }

    fn take_whole(&self, len: usize, job: Option<GroupId>) -> io::Result<Memory> {
        let size = size_class(len);
        let kept = {
            let mut free = self.free.lock().expect("no panic while held");
            let stack = free.by_kind.get_mut(&(job, size));
            let (kept, emptied) = stack.map_or((None, false), |stack| (stack.pop(), stack.is_empty()));
            if emptied {
                free.by_kind.remove(&(job, size));
            }
            free.bytes -= kept.as_ref().map_or(0, |(mapping, _)| mapping.size);
            kept
        };
        Ok(Memory::Whole(match kept {
            Some((mapping, _)) => mapping,
            None => {
                self.make_room(size, job.map(|job| (job, None)));
                self.map(size, job)?
            }
        }))
    }

    fn map(&self, size: usize, job: Option<GroupId>) -> io::Result<Mapping> {
        let shared = job.map(|job| self.memory_file(size).map(|file| (file, job))).transpose()?;
        let (flags, descriptor) = match &shared {
            Some((memory, _)) => (libc::MAP_SHARED, memory.file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        // SAFETY: a new mapping touches no memory that exists.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, descriptor, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).expect("mmap does not give null");
        let mapping = Mapping { start, size, shared };
        if let Some((memory, _)) = &mapping.shared {
            // This mapping is the last that can write.
            rustix::fs::fcntl_add_seals(&memory.file, SEALS)?;
        }
        if size >= HUGE {
            // SAFETY: advice about the mapping that was just made; where the kernel has no huge pages nothing happens.
            unsafe { libc::madvise(start.as_ptr().cast(), size, libc::MADV_HUGEPAGE) };
        }
        Ok(mapping)
    }

    fn memory_file(&self, size: usize) -> io::Result<MemoryFile> {
        if self.descriptors.fetch_add(1, Ordering::Relaxed) >= self.descriptors_max {
            self.descriptors.fetch_sub(1, Ordering::Relaxed);
            return Err(io::Error::other("shared memory has used its share of the file descriptors"));
        }
        let count = self.descriptors.clone();
        memory_file(size).map(|file| MemoryFile { file, count: count.clone() }).inspect_err(|_| {
            count.fetch_sub(1, Ordering::Relaxed);
        })
    }

    pub(super) fn bytes_of(&self, used: Use) -> &AtomicU64 {
        match used {
            Use::DataPlane => &self.live,
            Use::Result => &self.results,
        }
    }

    /// Bytes of the segments in use, without those of results.
    pub fn live_bytes(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    /// Bytes of the segments that hold results.
    pub fn result_bytes(&self) -> u64 {
        self.results.load(Ordering::Relaxed)
    }

    /// Bytes kept for the next user: free segments, and what is free of the slabs.
    pub fn free_bytes(&self) -> u64 {
        let slabs = self.slabs.lock().expect("no panic while held");
        let free_of =
            |slab: &Arc<Slab>| slab.free.lock().expect("no panic while held").by_start.values().sum::<usize>();
        let of_slabs: usize = slabs.values().flatten().map(free_of).sum();
        drop(slabs);
        (self.free.lock().expect("no panic while held").bytes + of_slabs) as u64
    }

    /// Descriptors of shared memory that are open.
    pub fn descriptors(&self) -> usize {
        self.descriptors.load(Ordering::Relaxed)
    }

    /// Returns to the kernel what was unused for [`IDLE_MEMORY`].
    pub fn trim(&self) {
        let idle = |since: &Instant| since.elapsed() >= IDLE_MEMORY;
        self.release(|_, since| idle(since), |_, slab| slab.is_idle());
        if self.free_bytes() == 0 {
            self.ended.lock().expect("no panic while held").clear();
        }
    }

    /// A job is over. What is kept for it stays for [`IDLE_MEMORY`] unless others need the room: a program's next
    /// shuffle is the same job again, and fresh pages made rechunks take up to twice the CPU time (2026-11-24).
    pub fn forget_job(&self, job: GroupId) {
        self.ended.lock().expect("no panic while held").insert(job);
        self.make_room(0, None);
    }

    /// Returns memory to the kernel if so many more bytes, which `user` is going to use, exceed the limit: first what
    /// is kept for jobs that are over, then free memory of the others.
    fn make_room(&self, size: usize, user: Option<(GroupId, Option<Cohort>)>) {
        let mut ended = self.ended.lock().expect("no panic while held");
        if let Some((job, _)) = user {
            // The job continues.
            ended.remove(&job);
        }
        let is_over =
            || self.live_bytes() + self.result_bytes() + self.free_bytes() + size as u64 > self.keep_bytes as u64;
        let is_free = |slab: &Slab| slab.free.lock().expect("no panic while held").idle_since.is_some();
        if !ended.is_empty() && is_over() {
            self.release(
                |kind, _| kind.0.is_some_and(|job| ended.contains(&job)),
                |(job, _), slab| ended.contains(&job) && is_free(slab),
            );
            ended.clear();
        }
        drop(ended);
        if size > 0 && is_over() {
            self.release(
                |kind, _| kind.0.is_some_and(|job| user.is_none_or(|(own, _)| own != job)),
                |(job, cohort), slab| user != Some((job, Some(cohort))) && is_free(slab),
            );
        }
    }

    fn release(&self, whole: impl Fn(&Kind, &Instant) -> bool, slab: impl Fn((GroupId, Cohort), &Slab) -> bool) {
        let mut gone = Vec::new();
        let mut free = self.free.lock().expect("no panic while held");
        let mut bytes = 0;
        free.by_kind.retain(|kind, stack| {
            let goes = stack.extract_if(.., |(_, since)| whole(kind, since));
            gone.extend(goes.map(|(mapping, _)| mapping).inspect(|mapping| bytes += mapping.size));
            !stack.is_empty()
        });
        free.bytes -= bytes;
        drop(free);
        let mut slabs = self.slabs.lock().expect("no panic while held");
        let mut gone_slabs = Vec::new();
        slabs.retain(|of, all| {
            // No thread takes from it while the lock is held.
            gone_slabs.extend(all.extract_if(.., |own| slab(*of, own)));
            !all.is_empty()
        });
        // Memory goes back to the kernel without the locks.
        drop(slabs);
    }

    pub(super) fn count_unprotected(&self, memory: &Memory) {
        self.protected_parts.fetch_sub(usize::from(matches!(memory, Memory::Part { .. })), Ordering::Relaxed);
    }

    pub(super) fn put_back(&self, mapping: Mapping) {
        let mut evicted = Vec::new();
        let mut free = self.free.lock().expect("no panic while held");
        let room = self.keep_bytes.saturating_sub((self.live_bytes() + self.result_bytes()) as usize);
        if mapping.size <= room {
            // Sizes that are no longer requested make room for those in use.
            while free.bytes + mapping.size > room {
                let Some(other) = free.by_kind.keys().copied().find(|kind| *kind != mapping.kind()) else { break };
                let stack = free.by_kind.get_mut(&other).expect("found among the keys");
                let (gone, _) = stack.pop().expect("no stack is empty");
                if stack.is_empty() {
                    free.by_kind.remove(&other);
                }
                free.bytes -= gone.size;
                evicted.push(gone);
            }
            if free.bytes + mapping.size <= room {
                free.bytes += mapping.size;
                free.by_kind.entry(mapping.kind()).or_default().push((mapping, Instant::now()));
            }
        }
    }
}

/// Eight classes per power of two: at most an eighth is wasted, and sizes that are nearly the same share a class.
fn size_class(len: usize) -> usize {
    let grain = (len.next_power_of_two() / 8).max(4096);
    let size = len.max(1).div_ceil(grain) * grain;
    if size >= HUGE { size.div_ceil(HUGE) * HUGE } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_at_most_an_eighth() {
        for len in [1, 4096, 100_000, 3 << 20, (64 << 20) + 1] {
            let size = size_class(len);
            assert!(size >= len && size <= len + len / 4 + HUGE, "{len} -> {size}");
        }
    }

    #[test]
    fn shared_memory_leaves_descriptors_for_others() {
        let pool = Pool::new(1 << 30);
        let pool = Arc::new(Pool { descriptors_max: 2, ..Arc::into_inner(pool).unwrap() });
        let all: Vec<_> = (0..4).map(|_| pool.take(9 << 20, Some(1)).unwrap()).collect();
        assert_eq!(all.iter().filter(|segment| segment.shared().is_some()).count(), 2);
        drop(all);
    }
}
