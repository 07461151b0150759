//! Memory that objects and fetched parts live in, used again and again.
//!
//! Touching new pages costs more than moving bytes over loopback (FACTS: 0.77 CPU-s/GiB), so a segment that nobody
//! needs any more goes back to its pool. There are two kinds. Private ones are huge pages where the kernel has them. Shared
//! ones lie behind a descriptor: other processes of the host can map them, and the kernel sends from them without a copy;
//! but few kernels give shared memory huge pages, so they are for objects that are going to be mapped.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::MprotectFlags;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const HUGE: usize = 2 << 20;
/// Smaller segments are never shared: a descriptor and a mapping cost more than copying so little.
pub const SHARED_MIN: usize = 64 << 10;
/// What lent memory is sealed against: shrinking, growing, new mappings that can write, and other seals.
pub const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// Mapped memory that is free to be used again, up to a limit.
pub struct Pool {
    free: Mutex<Free>,
    /// Bytes of the segments in use.
    live: AtomicU64,
    /// Nothing more is kept once this much is in use and kept together.
    keep_bytes: usize,
}

#[derive(Default)]
struct Free {
    by_kind: BTreeMap<Kind, Vec<Mapping>>,
    bytes: usize,
}

/// Shared or not, and how large.
type Kind = (bool, usize);

struct Mapping {
    start: NonNull<u8>,
    size: usize,
    /// Of shared memory.
    file: Option<File>,
    /// Nobody can write to it now, not even its owner.
    protected: bool,
}

impl Mapping {
    fn kind(&self) -> Kind {
        (self.file.is_some(), self.size)
    }

    fn protect(&mut self, protected: bool) -> io::Result<()> {
        if self.protected != protected {
            let flags = if protected { MprotectFlags::READ } else { MprotectFlags::READ | MprotectFlags::WRITE };
            // SAFETY: this value owns the mapping; who could write to it is gone, see [`Segment::protect`].
            unsafe { rustix::mm::mprotect(self.start.as_ptr().cast(), self.size, flags)? };
            self.protected = protected;
        }
        Ok(())
    }
}

// SAFETY: a Mapping owns its memory; nothing about it is tied to a thread.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `size` are what mmap gave, and the owner is going away.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.size) };
    }
}

/// A piece of memory of its own; back to its pool when dropped.
pub struct Segment {
    mapping: Option<Mapping>,
    len: usize,
    pool: Arc<Pool>,
    /// Who may write through a pointer.
    writers: AtomicU32,
    /// Held while the memory becomes read-only.
    protecting: Mutex<bool>,
}

// SAFETY: writing goes through `&mut self`, or through `as_ptr`, whose callers keep their ranges apart.
unsafe impl Sync for Segment {}

impl Pool {
    /// A pool that keeps free memory for the next user as long as that and what is in use are at most `keep_bytes`.
    pub fn new(keep_bytes: usize) -> Arc<Pool> {
        Arc::new(Pool { free: Mutex::default(), live: AtomicU64::new(0), keep_bytes })
    }

    /// A segment of `len` bytes with unspecified content; `shared` if it is large enough for that, and there is a
    /// descriptor left.
    ///
    /// # Errors
    /// The kernel has no memory to map.
    pub fn take(self: &Arc<Pool>, len: usize, shared: bool) -> io::Result<Segment> {
        if shared
            && len >= SHARED_MIN
            && let Ok(segment) = self.take_kind(len, true)
        {
            return Ok(segment);
        }
        self.take_kind(len, false)
    }

    fn take_kind(self: &Arc<Pool>, len: usize, shared: bool) -> io::Result<Segment> {
        let size = size_class(len);
        let kept = {
            let mut free = self.free.lock().expect("no panic while held");
            let stack = free.by_kind.get_mut(&(shared, size));
            let (kept, emptied) = stack.map_or((None, false), |stack| (stack.pop(), stack.is_empty()));
            if emptied {
                free.by_kind.remove(&(shared, size));
            }
            free.bytes -= kept.as_ref().map_or(0, |mapping| mapping.size);
            kept
        };
        let mapping = match kept {
            Some(mapping) => mapping,
            None => map(size, shared)?,
        };
        self.live.fetch_add(size as u64, Ordering::Relaxed);
        let (writers, protecting) = (AtomicU32::new(0), Mutex::new(false));
        Ok(Segment { mapping: Some(mapping), len, pool: self.clone(), writers, protecting })
    }

    /// Bytes of the segments in use.
    pub fn live_bytes(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    /// Bytes kept for the next user.
    pub fn free_bytes(&self) -> u64 {
        self.free.lock().expect("no panic while held").bytes as u64
    }

    fn put_back(&self, mut mapping: Mapping) {
        self.live.fetch_sub(mapping.size as u64, Ordering::Relaxed);
        if mapping.protect(false).is_err() {
            return;
        }
        let mut evicted = Vec::new();
        let mut free = self.free.lock().expect("no panic while held");
        let room = self.keep_bytes.saturating_sub(self.live_bytes() as usize);
        if mapping.size <= room {
            // Sizes that nobody asks for any more make room for those in use.
            while free.bytes + mapping.size > room {
                let Some(other) = free.by_kind.keys().copied().find(|kind| *kind != mapping.kind()) else { break };
                let stack = free.by_kind.get_mut(&other).expect("found among the keys");
                let gone = stack.pop().expect("no stack is empty");
                if stack.is_empty() {
                    free.by_kind.remove(&other);
                }
                free.bytes -= gone.size;
                evicted.push(gone);
            }
            if free.bytes + mapping.size <= room {
                free.bytes += mapping.size;
                free.by_kind.entry(mapping.kind()).or_default().push(mapping);
            }
        }
    }
}

impl Segment {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ref().expect("present until dropped").start.as_ptr()
    }

    /// What other processes could map, and the kernel sends from without a copy.
    pub fn file(&self) -> Option<&File> {
        self.mapping.as_ref().expect("present until dropped").file.as_ref()
    }

    /// Of the whole mapping.
    pub fn size(&self) -> usize {
        self.mapping.as_ref().expect("present until dropped").size
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

    /// Makes shared memory read-only for everybody until it goes back to its pool; gives it for others to map.
    ///
    /// # Errors
    /// Somebody may still write to it, or it cannot be shared.
    pub fn protect(&self) -> Result<&File, String> {
        let file = self.file().ok_or("it was put while there was nobody to share with")?;
        let mut protected = self.protecting.lock().expect("no panic while held");
        if !*protected {
            if self.has_writers() {
                return Err("the task that wrote it still holds its memory".into());
            }
            let why = |error: rustix::io::Errno| format!("its memory cannot be made read-only: {error}");
            rustix::fs::fcntl_get_seals(file)
                .and_then(|seals| if seals.contains(SEALS) { Ok(()) } else { rustix::fs::fcntl_add_seals(file, SEALS) })
                .map_err(why)?;
            // SAFETY: the mapping is this segment's own, and nobody writes to it.
            unsafe { rustix::mm::mprotect(self.as_ptr().cast(), self.size(), MprotectFlags::READ) }.map_err(why)?;
            *protected = true;
        }
        Ok(file)
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
        let mut mapping = self.mapping.take().expect("present until dropped");
        mapping.protected = *self.protecting.get_mut().expect("no panic while held");
        self.pool.put_back(mapping);
    }
}

/// Eight classes per power of two: at most an eighth is wasted, and sizes that are nearly the same share a class.
fn size_class(len: usize) -> usize {
    let grain = (len.next_power_of_two() / 8).max(4096);
    let size = len.max(1).div_ceil(grain) * grain;
    if size >= HUGE { size.div_ceil(HUGE) * HUGE } else { size }
}

fn map(size: usize, shared: bool) -> io::Result<Mapping> {
    let file = if shared { Some(memory_file(size)?) } else { None };
    let (flags, descriptor) = match &file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    // SAFETY: a new mapping touches no memory that exists.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, descriptor, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if size >= HUGE {
        // SAFETY: advice about the mapping that was just made; where the kernel has no huge pages nothing happens.
        unsafe { libc::madvise(start, size, libc::MADV_HUGEPAGE) };
    }
    Ok(Mapping { start: NonNull::new(start.cast()).expect("mmap does not give null"), size, file, protected: false })
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
    fn memory_is_used_again() {
        let pool = Pool::new(64 << 20);
        let first = pool.take(3 << 20, false).unwrap();
        let start = first.as_ptr();
        assert_eq!(pool.live_bytes(), 4 << 20);
        drop(first);
        assert_eq!((pool.live_bytes(), pool.free_bytes()), (0, 4 << 20));
        assert_eq!(pool.take((3 << 20) + 5, false).unwrap().as_ptr(), start);
    }

    #[test]
    fn what_is_kept_has_a_limit_and_old_sizes_make_room() {
        let pool = Pool::new(8 << 20);
        let all: Vec<_> = [4, 4, 6].iter().map(|mib| pool.take(mib << 20, false).unwrap()).collect();
        drop(all);
        assert_eq!(pool.free_bytes(), 6 << 20);
        drop(pool.take(16 << 20, false).unwrap());
        assert_eq!(pool.free_bytes(), 6 << 20, "too large to be kept");
    }

    #[test]
    fn a_size_of_which_nothing_is_kept_any_more_makes_no_room() {
        let pool = Pool::new(8 << 20);
        drop(pool.take(4 << 20, false).unwrap());
        let _used_again = pool.take(4 << 20, false).unwrap();
        let others: Vec<_> = (0..3).map(|_| pool.take(2 << 20, false).unwrap()).collect();
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
