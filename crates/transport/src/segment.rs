//! Memory that objects and fetched parts live in, used again and again.
//!
//! Touching new pages costs more than moving bytes over loopback (FACTS: 0.77 CPU-s/GiB), so a segment that nobody
//! needs any more goes back to its pool, and to the kernel when nobody has wanted it for some seconds. There are two kinds.
//! Private ones are huge pages where the kernel has them. Shared ones lie behind a descriptor: other processes of the host can
//! map them, and the kernel sends from them without a copy; but few kernels give shared memory huge pages, so they are
//! for objects that are going to be mapped.
//!
//! A descriptor per object would exhaust a process's limit, so shared segments of a job are cut out of slabs. A slab, and what
//! is kept of it, serves one job: whoever maps it can read all of it.

use mission_core::defaults::IDLE_MEMORY;
use mission_core::host::GroupId;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::MprotectFlags;
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;
/// Smaller segments are never shared: a descriptor and a mapping cost more than copying so little.
pub const SHARED_MIN: usize = 64 << 10;
/// A slab of shared memory, and the largest segment that is cut out of one. Larger ones have a descriptor of their own: as
/// many as fit into memory are few.
const SLAB: usize = 64 << 20;
const SLAB_PART_MAX: usize = 8 << 20;
/// The part of a process's descriptors that shared memory may use.
const DESCRIPTORS_PART: u64 = 4;
/// Parts of slabs that are read-only at once. Each may split its slab's mapping in three, and a process has 65,530 mappings
/// (`vm.max_map_count`).
const PROTECTED_PARTS_MAX: usize = 16_384;
/// What shared memory is sealed against: shrinking, growing, new mappings that can write, and other seals.
pub const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// Mapped memory that is free to be used again, up to a limit.
pub struct Pool {
    free: Mutex<Free>,
    /// Of each job.
    slabs: Mutex<BTreeMap<GroupId, Vec<Arc<Slab>>>>,
    /// Bytes of the segments in use.
    live: AtomicU64,
    /// Nothing more is kept once this much is in use and kept together.
    keep_bytes: usize,
    descriptors: Arc<AtomicUsize>,
    descriptors_max: usize,
    protected_parts: AtomicUsize,
}

#[derive(Default)]
struct Free {
    by_kind: BTreeMap<Kind, Vec<(Mapping, Instant)>>,
    bytes: usize,
}

/// The job whose processes may map it, if any may, and its size.
type Kind = (Option<GroupId>, usize);

struct Mapping {
    start: NonNull<u8>,
    size: usize,
    /// Of shared memory: the file, and whose it is.
    shared: Option<(MemoryFile, GroupId)>,
}

/// A file of memory, counted.
struct MemoryFile {
    file: File,
    count: Arc<AtomicUsize>,
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Mapping {
    fn kind(&self) -> Kind {
        (self.shared.as_ref().map(|(_, job)| *job), self.size)
    }
}

// SAFETY: a Mapping owns its memory; nothing about it is tied to a thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; who writes to it keeps to a range of its own.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `size` are what mmap gave, and the owner is going away.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.size) };
    }
}

/// Shared memory that small segments of one job are cut out of.
struct Slab {
    mapping: Mapping,
    free: Mutex<Ranges>,
}

/// Free ranges of a slab, by their start, and since when all of it is free.
struct Ranges {
    by_start: BTreeMap<usize, usize>,
    idle_since: Option<Instant>,
}

impl Slab {
    fn take(&self, size: usize) -> Option<usize> {
        let mut free = self.free.lock().expect("no panic while held");
        let (&start, &len) = free.by_start.iter().find(|(_, len)| **len >= size)?;
        free.by_start.remove(&start);
        if len > size {
            free.by_start.insert(start + size, len - size);
        }
        free.idle_since = None;
        Some(start)
    }

    fn put_back(&self, mut start: usize, mut size: usize) {
        let mut free = self.free.lock().expect("no panic while held");
        if let Some((&before, &len)) = free.by_start.range(..start).next_back()
            && before + len == start
        {
            free.by_start.remove(&before);
            (start, size) = (before, size + len);
        }
        if let Some(len) = free.by_start.remove(&(start + size)) {
            size += len;
        }
        free.by_start.insert(start, size);
        free.idle_since = (size == SLAB).then(Instant::now);
    }

    fn is_idle(&self) -> bool {
        let free = self.free.lock().expect("no panic while held");
        free.idle_since.is_some_and(|since| since.elapsed() >= IDLE_MEMORY)
    }
}

enum Memory {
    Whole(Mapping),
    Part { slab: Arc<Slab>, start: usize, size: usize },
}

/// A piece of memory of its own; back to its pool when dropped.
pub struct Segment {
    memory: Option<Memory>,
    len: usize,
    pool: Arc<Pool>,
    /// Who may write through a pointer.
    writers: AtomicU32,
    leases: Mutex<Leases>,
}

/// Of a segment: by how many leases others may look at it, and whether it is read-only for that.
#[derive(Default)]
struct Leases {
    count: u32,
    protected: bool,
}

// SAFETY: writing goes through `&mut self`, or through `as_ptr`, whose callers keep their ranges apart.
unsafe impl Sync for Segment {}

impl Pool {
    /// A pool that keeps free memory for the next user as long as that and what is in use are at most `keep_bytes`.
    pub fn new(keep_bytes: usize) -> Arc<Pool> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Arc::new(Pool {
            free: Mutex::default(),
            slabs: Mutex::default(),
            live: AtomicU64::new(0),
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
        if let Some(job) = sharers.filter(|_| len >= SHARED_MIN) {
            let taken = if len <= SLAB_PART_MAX { self.take_part(len, job) } else { self.take_whole(len, Some(job)) };
            if let Ok(memory) = taken {
                return Ok(self.segment(memory, len));
            }
        }
        let memory = self.take_whole(len, None)?;
        Ok(self.segment(memory, len))
    }

    fn segment(self: &Arc<Pool>, memory: Memory, len: usize) -> Segment {
        self.live.fetch_add(memory.size() as u64, Ordering::Relaxed);
        Segment { memory: Some(memory), len, pool: self.clone(), writers: AtomicU32::new(0), leases: Mutex::default() }
    }

    fn take_part(&self, len: usize, job: GroupId) -> io::Result<Memory> {
        let size = len.next_multiple_of(PAGE);
        let mut slabs = self.slabs.lock().expect("no panic while held");
        let slabs = slabs.entry(job).or_default();
        if let Some((slab, start)) = slabs.iter().find_map(|slab| Some((slab, slab.take(size)?))) {
            return Ok(Memory::Part { slab: slab.clone(), start, size });
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
            None => self.map(size, job)?,
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
            return Err(io::Error::other("shared memory has used its part of the descriptors"));
        }
        let count = self.descriptors.clone();
        memory_file(size).map(|file| MemoryFile { file, count: count.clone() }).inspect_err(|_| {
            count.fetch_sub(1, Ordering::Relaxed);
        })
    }

    /// Bytes of the segments in use.
    pub fn live_bytes(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
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

    /// Gives back to the kernel what nobody has wanted for [`IDLE_MEMORY`].
    pub fn trim(&self) {
        let idle = |since: &Instant| since.elapsed() >= IDLE_MEMORY;
        self.release(|_, since| idle(since), |_, slab| slab.is_idle());
    }

    /// Gives back what is kept for a job that is over.
    pub fn forget_job(&self, job: GroupId) {
        let is_free = |slab: &Slab| slab.free.lock().expect("no panic while held").idle_since.is_some();
        self.release(|kind, _| kind.0 == Some(job), |own, slab| own == job && is_free(slab));
    }

    fn release(&self, whole: impl Fn(&Kind, &Instant) -> bool, slab: impl Fn(GroupId, &Slab) -> bool) {
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
        slabs.retain(|job, all| {
            // Nobody takes of it while the lock is held.
            gone_slabs.extend(all.extract_if(.., |own| slab(*job, own)));
            !all.is_empty()
        });
        // Memory goes back to the kernel without the locks.
        drop(slabs);
    }

    fn count_unprotected(&self, memory: &Memory) {
        self.protected_parts.fetch_sub(usize::from(matches!(memory, Memory::Part { .. })), Ordering::Relaxed);
    }

    fn put_back(&self, mapping: Mapping) {
        let mut evicted = Vec::new();
        let mut free = self.free.lock().expect("no panic while held");
        let room = self.keep_bytes.saturating_sub(self.live_bytes() as usize);
        if mapping.size <= room {
            // Sizes that nobody asks for any more make room for those in use.
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

impl Memory {
    fn size(&self) -> usize {
        match self {
            Memory::Whole(mapping) => mapping.size,
            Memory::Part { size, .. } => *size,
        }
    }

    fn mapping(&self) -> (&Mapping, usize) {
        match self {
            Memory::Whole(mapping) => (mapping, 0),
            Memory::Part { slab, start, .. } => (&slab.mapping, *start),
        }
    }

    fn as_ptr(&self) -> *mut u8 {
        let (mapping, start) = self.mapping();
        // SAFETY: the start lies in the mapping.
        unsafe { mapping.start.as_ptr().add(start) }
    }

    fn protect(&self, protected: bool) -> io::Result<()> {
        let flags = if protected { MprotectFlags::READ } else { MprotectFlags::READ | MprotectFlags::WRITE };
        // SAFETY: the range is this value's own; who could write to it is gone, see [`Segment::protect`].
        unsafe { rustix::mm::mprotect(self.as_ptr().cast(), self.size(), flags)? };
        Ok(())
    }
}

/// Shared memory, for other processes to map.
pub struct SharedMemory<'a> {
    pub file: &'a File,
    /// Where the segment begins in it.
    pub start: u64,
    /// Of all of it.
    pub size: u64,
}

impl Segment {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("present until dropped")
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.memory().as_ptr()
    }

    /// What other processes could map, and the kernel sends from without a copy.
    pub fn shared(&self) -> Option<SharedMemory<'_>> {
        let (mapping, start) = self.memory().mapping();
        let (memory, _) = mapping.shared.as_ref()?;
        Some(SharedMemory { file: &memory.file, start: start as u64, size: mapping.size as u64 })
    }

    /// Somebody may write through [`Segment::as_ptr`] until [`Segment::writer_gone`].
    pub fn add_writer(&self) {
        self.writers.fetch_add(1, Ordering::AcqRel);
    }

    pub fn writer_gone(&self) {
        self.writers.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether it can still change.
    pub fn has_writers(&self) -> bool {
        self.writers.load(Ordering::Acquire) > 0
    }

    /// For one more lease: makes shared memory read-only for everybody until all leases have ended by
    /// [`Segment::unprotect`]; gives it for others to map.
    ///
    /// # Errors
    /// Somebody may still write to it, or it cannot be shared.
    pub fn protect(&self) -> Result<SharedMemory<'_>, String> {
        let private = "it lies in memory of its worker alone: it was put before others joined that host, or for another \
                       transport";
        let shared = self.shared().ok_or(private)?;
        let mut leases = self.leases.lock().expect("no panic while held");
        if !leases.protected {
            if self.has_writers() {
                return Err("the task that wrote it still holds its memory".into());
            }
            let parts = &self.pool.protected_parts;
            let is_part = matches!(self.memory(), Memory::Part { .. });
            if is_part && parts.fetch_add(1, Ordering::Relaxed) >= PROTECTED_PARTS_MAX {
                parts.fetch_sub(1, Ordering::Relaxed);
                return Err(format!("its owner lends {PROTECTED_PARTS_MAX} small objects already"));
            }
            if let Err(error) = self.memory().protect(true) {
                parts.fetch_sub(usize::from(is_part), Ordering::Relaxed);
                return Err(format!("its memory cannot be made read-only: {error}"));
            }
            leases.protected = true;
        }
        leases.count += 1;
        Ok(shared)
    }

    /// A lease has ended.
    pub fn unprotect(&self) {
        let mut leases = self.leases.lock().expect("no panic while held");
        leases.count -= 1;
        if leases.count == 0 && self.memory().protect(false).is_ok() {
            leases.protected = false;
            self.pool.count_unprotected(self.memory());
        }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has at least `len` bytes and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only way in.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let memory = self.memory.take().expect("present until dropped");
        self.pool.live.fetch_sub(memory.size() as u64, Ordering::Relaxed);
        if self.leases.get_mut().expect("no panic while held").protected {
            if memory.protect(false).is_err() {
                // It cannot be written to any more: a whole mapping goes to the kernel, and a part stays unused.
                return;
            }
            self.pool.count_unprotected(&memory);
        }
        match memory {
            Memory::Whole(mapping) => self.pool.put_back(mapping),
            Memory::Part { slab, start, size } => slab.put_back(start, size),
        }
    }
}

/// Eight classes per power of two: at most an eighth is wasted, and sizes that are nearly the same share a class.
fn size_class(len: usize) -> usize {
    let grain = (len.next_power_of_two() / 8).max(4096);
    let size = len.max(1).div_ceil(grain) * grain;
    if size >= HUGE { size.div_ceil(HUGE) * HUGE } else { size }
}

/// A file of memory without a name.
fn memory_file(size: usize) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Before Linux 6.3 one could not say that memory is no program.
    let file = rustix::fs::memfd_create("mission-control", flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create("mission-control", flags))?;
    let file = File::from(file);
    file.set_len(size as u64)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_few_parts_are_read_only_at_once_that_a_process_has_mappings_left() {
        let pool = Pool::new(4 << 30);
        let take = || pool.take(SHARED_MIN, Some(1)).unwrap();
        let mut shared: Vec<Segment> = (0..PROTECTED_PARTS_MAX).map(|_| take()).collect();
        assert!(shared.iter().all(|segment| segment.protect().is_ok()));
        let one_more = take();
        assert!(one_more.protect().is_err_and(|why| why.contains("lends 16384 small objects already")));
        // What was refused is not counted; nor is what went back, nor what nobody looks at any more.
        shared.pop();
        assert!(one_more.protect().is_ok());
        let another = take();
        assert!(shared[0].protect().is_ok() && another.protect().is_err());
        shared[0].unprotect();
        assert!(another.protect().is_err(), "it has another lease");
        shared[0].unprotect();
        assert!(another.protect().is_ok());
    }

    #[test]
    fn memory_is_used_again() {
        let pool = Pool::new(64 << 20);
        let first = pool.take(3 << 20, None).unwrap();
        let start = first.as_ptr();
        assert_eq!(pool.live_bytes(), 4 << 20);
        drop(first);
        assert_eq!((pool.live_bytes(), pool.free_bytes()), (0, 4 << 20));
        assert_eq!(pool.take((3 << 20) + 5, None).unwrap().as_ptr(), start);
    }

    #[test]
    fn many_small_objects_of_a_job_share_a_descriptor_and_another_jobs_do_not() {
        let pool = Pool::new(1 << 30);
        let mut one: Vec<_> = (0..500).map(|_| pool.take(64 << 10, Some(1)).unwrap()).collect();
        assert_eq!(pool.descriptors(), 1);
        let other = pool.take(64 << 10, Some(2)).unwrap();
        assert_eq!(pool.descriptors(), 2);
        for (number, segment) in one.iter_mut().enumerate() {
            segment.bytes_mut().fill(number as u8);
        }
        assert!(one.iter().enumerate().all(|(number, own)| own.bytes().iter().all(|byte| *byte == number as u8)));
        // What is read-only becomes writable again, and ranges grow together.
        assert!(one.iter().all(|segment| segment.protect().is_ok()));
        drop(one);
        let mut large = pool.take(8 << 20, Some(1)).unwrap();
        large.bytes_mut().fill(7);
        assert_eq!((pool.descriptors(), pool.live_bytes()), (2, (8 << 20) + (64 << 10)));
        drop((large, other));
        pool.forget_job(1);
        assert_eq!((pool.descriptors(), pool.live_bytes()), (1, 0));
    }

    #[test]
    fn shared_memory_leaves_descriptors_for_others() {
        let pool = Pool::new(1 << 30);
        let pool = Arc::new(Pool { descriptors_max: 2, ..Arc::into_inner(pool).unwrap() });
        let all: Vec<_> = (0..4).map(|_| pool.take(9 << 20, Some(1)).unwrap()).collect();
        assert_eq!(all.iter().filter(|segment| segment.shared().is_some()).count(), 2);
        drop(all);
    }

    #[test]
    fn what_is_kept_has_a_limit_and_old_sizes_make_room() {
        let pool = Pool::new(8 << 20);
        let all: Vec<_> = [4, 4, 6].iter().map(|mib| pool.take(mib << 20, None).unwrap()).collect();
        drop(all);
        assert_eq!(pool.free_bytes(), 6 << 20);
        drop(pool.take(16 << 20, None).unwrap());
        assert_eq!(pool.free_bytes(), 6 << 20, "too large to be kept");
    }

    #[test]
    fn a_size_of_which_nothing_is_kept_any_more_makes_no_room() {
        let pool = Pool::new(8 << 20);
        drop(pool.take(4 << 20, None).unwrap());
        let _used_again = pool.take(4 << 20, None).unwrap();
        let others: Vec<_> = (0..3).map(|_| pool.take(2 << 20, None).unwrap()).collect();
        drop(others);
        assert_eq!(pool.free_bytes(), 4 << 20);
    }

    #[test]
    fn classes_waste_at_most_an_eighth() {
        for len in [1, 4096, 100_000, 3 << 20, (64 << 20) + 1] {
            let size = size_class(len);
            assert!(size >= len && size <= len + len / 4 + HUGE, "{len} -> {size}");
        }
    }
}
