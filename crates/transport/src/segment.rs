//! Memory that objects and fetched parts live in, used again and again.
//!
//! Touching new pages costs more than moving bytes over loopback (FACTS: 0.77 CPU-s/GiB), so a segment that nobody
//! needs any more goes back to its pool. Segments are mapped, not allocated, so that giving them back to the kernel is
//! one call, and asked to be huge pages.

use std::collections::BTreeMap;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const HUGE: usize = 2 << 20;

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
    by_size: BTreeMap<usize, Vec<Mapping>>,
    bytes: usize,
}

struct Mapping {
    start: NonNull<u8>,
    size: usize,
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
}

// SAFETY: writing goes through `&mut self`, or through `writer`, whose callers keep their ranges apart.
unsafe impl Sync for Segment {}

impl Pool {
    /// A pool that keeps free memory for the next user as long as that and what is in use are at most `keep_bytes`.
    pub fn new(keep_bytes: usize) -> Arc<Pool> {
        Arc::new(Pool { free: Mutex::default(), live: AtomicU64::new(0), keep_bytes })
    }

    /// A segment of `len` bytes with unspecified content.
    ///
    /// # Errors
    /// The kernel has no memory to map.
    pub fn take(self: &Arc<Pool>, len: usize) -> io::Result<Segment> {
        let size = size_class(len);
        let kept = {
            let mut free = self.free.lock().expect("no panic while held");
            let kept = free.by_size.get_mut(&size).and_then(Vec::pop);
            free.bytes -= kept.as_ref().map_or(0, |mapping| mapping.size);
            kept
        };
        let mapping = match kept {
            Some(mapping) => mapping,
            None => map(size)?,
        };
        self.live.fetch_add(size as u64, Ordering::Relaxed);
        Ok(Segment { mapping: Some(mapping), len, pool: self.clone() })
    }

    /// Bytes of the segments in use.
    pub fn live_bytes(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    /// Bytes kept for the next user.
    pub fn free_bytes(&self) -> u64 {
        self.free.lock().expect("no panic while held").bytes as u64
    }

    fn put_back(&self, mapping: Mapping) {
        self.live.fetch_sub(mapping.size as u64, Ordering::Relaxed);
        let mut evicted = Vec::new();
        let mut free = self.free.lock().expect("no panic while held");
        let room = self.keep_bytes.saturating_sub(self.live_bytes() as usize);
        if mapping.size <= room {
            // Sizes that nobody asks for any more make room for those in use.
            while free.bytes + mapping.size > room {
                let Some(other) = free.by_size.keys().copied().find(|size| *size != mapping.size) else { break };
                let stack = free.by_size.get_mut(&other).expect("found among the keys");
                let gone = stack.pop().expect("no stack is empty");
                if stack.is_empty() {
                    free.by_size.remove(&other);
                }
                free.bytes -= gone.size;
                evicted.push(gone);
            }
            if free.bytes + mapping.size <= room {
                free.bytes += mapping.size;
                free.by_size.entry(mapping.size).or_default().push(mapping);
            }
        }
        free.by_size.retain(|_, stack| !stack.is_empty());
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
        self.pool.put_back(self.mapping.take().expect("present until dropped"));
    }
}

/// Eight classes per power of two: at most an eighth is wasted, and sizes that are nearly the same share a class.
fn size_class(len: usize) -> usize {
    let grain = (len.next_power_of_two() / 8).max(4096);
    let size = len.max(1).div_ceil(grain) * grain;
    if size >= HUGE { size.div_ceil(HUGE) * HUGE } else { size }
}

fn map(size: usize) -> io::Result<Mapping> {
    // SAFETY: an anonymous private mapping touches no memory that exists.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if size >= HUGE {
        // SAFETY: advice about the mapping that was just made; where the kernel has no huge pages nothing happens.
        unsafe { libc::madvise(start, size, libc::MADV_HUGEPAGE) };
    }
    Ok(Mapping { start: NonNull::new(start.cast()).expect("mmap does not give null"), size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again() {
        let pool = Pool::new(64 << 20);
        let first = pool.take(3 << 20).unwrap();
        let start = first.as_ptr();
        assert_eq!(pool.live_bytes(), 4 << 20);
        drop(first);
        assert_eq!((pool.live_bytes(), pool.free_bytes()), (0, 4 << 20));
        assert_eq!(pool.take((3 << 20) + 5).unwrap().as_ptr(), start);
    }

    #[test]
    fn what_is_kept_has_a_limit_and_old_sizes_make_room() {
        let pool = Pool::new(8 << 20);
        let all: Vec<_> = [4, 4, 6].iter().map(|mib| pool.take(mib << 20).unwrap()).collect();
        drop(all);
        assert_eq!(pool.free_bytes(), 6 << 20);
        drop(pool.take(16 << 20).unwrap());
        assert_eq!(pool.free_bytes(), 6 << 20, "too large to be kept");
    }

    #[test]
    fn classes_waste_at_most_an_eighth() {
        for len in [1, 4096, 100_000, 3 << 20, (64 << 20) + 1] {
            let size = size_class(len);
            assert!(size >= len && size <= len + len / 4 + HUGE, "{len} -> {size}");
        }
    }
}
