//! Memory for objects and fetched parts, which is reused.
//!
//! Touching new pages costs more than moving bytes over loopback (FACTS: 0.77 CPU-s/GiB), so a released segment returns
//! to its pool, and to the kernel after some seconds without use. There are two kinds. Private ones are huge pages
//! where the kernel has them. Shared ones have a file descriptor: other processes of the host can map them, and the
//! kernel sends from them without a copy; but few kernels give shared memory huge pages, so they are used for objects
//! that will be mapped.
//!
//! A descriptor per object would exhaust a process's limit, so shared segments of a job are cut out of slabs. A slab, and what
//! is kept of it, serves one job: whoever maps it can read all of it.

mod memory;
mod pool;

pub use pool::{Cohort, Pool};

use memory::Memory;
use mission_core::host::GroupId;
use rustix::fs::SealFlags;
use std::fs::File;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Smaller segments are never shared: a descriptor and a mapping cost more than copying so little.
pub const SHARED_MIN: usize = 64 << 10;
/// A slab of shared memory. Segments too large for one have a descriptor of their own: as many as fit into memory are few.
const SLAB: usize = 64 << 20;
/// Parts of slabs that are read-only at once. Each may split its slab's mapping in three, and a process has 65,530 mappings
/// (`vm.max_map_count`).
const PROTECTED_PARTS_MAX: usize = 16_384;
/// Up to so many stay read-only without a lease, until their memory is reused: the next lease may follow at once, and
/// each change takes time for each page (a shuffle of 0.5 GiB between four workers spent an eighth of its CPU time on
/// it).
const IDLE_PARTS_MAX: usize = PROTECTED_PARTS_MAX / 2;
/// What shared memory is sealed against: shrinking, growing, new mappings that can write, and other seals.
pub const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// A piece of memory; returned to its pool when dropped.
pub struct Segment {
    memory: Option<Memory>,
    len: usize,
    used: Use,
    pool: Arc<Pool>,
    /// Who may write through a pointer.
    writers: AtomicU32,
    protection: Mutex<Protection>,
}

/// What a segment is for: it decides where its bytes are counted.
#[derive(Clone, Copy)]
enum Use {
    /// Objects, and what is fetched.
    DataPlane,
    /// Results of the engine's tasks.
    Result,
}

/// How many leases there are on a segment, and whether it is (still) read-only for them.
#[derive(Default)]
struct Protection {
    leases: u32,
    protected: bool,
}

// SAFETY: writing goes through `&mut self`, or through `as_ptr`, whose callers keep their ranges apart.
unsafe impl Sync for Segment {}

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

    /// The shared memory, which other processes can map and the kernel sends from without a copy.
    pub fn shared(&self) -> Option<SharedMemory<'_>> {
        let (mapping, start) = self.memory().mapping();
        let (memory, _) = mapping.shared.as_ref()?;
        Some(SharedMemory { file: &memory.file, start: start as u64, size: mapping.size as u64 })
    }

    /// The job whose processes could map it.
    pub fn sharers(&self) -> Option<GroupId> {
        self.memory().mapping().0.shared.as_ref().map(|(_, job)| *job)
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

    /// Adds a lease: makes shared memory read-only for every process, at least until all leases have ended by
    /// [`Segment::unprotect`]. Returns it for others to map.
    ///
    /// # Errors
    /// Somebody may still write to it, or it cannot be shared.
    pub fn protect(&self) -> Result<SharedMemory<'_>, String> {
        let private = "it lies in memory of its worker alone: it was put before others joined that host, or for another \
                       transport";
        let shared = self.shared().ok_or(private)?;
        let mut protection = self.protection.lock().expect("no panic while held");
        if !protection.protected {
            if self.has_writers() {
                return Err("the task that wrote it still holds its memory".into());
            }
            let parts = &self.pool.protected_parts;
            let is_part = matches!(self.memory(), Memory::Part { .. });
            if is_part && parts.fetch_add(1, Ordering::Relaxed) >= PROTECTED_PARTS_MAX {
                parts.fetch_sub(1, Ordering::Relaxed);
                return Err(format!("its owner already shares {PROTECTED_PARTS_MAX} small objects"));
            }
            if let Err(error) = self.memory().protect(true) {
                parts.fetch_sub(usize::from(is_part), Ordering::Relaxed);
                return Err(format!("its memory cannot be made read-only: {error}"));
            }
            protection.protected = true;
        }
        protection.leases += 1;
        Ok(shared)
    }

    /// A lease has ended.
    pub fn unprotect(&self) {
        let mut protection = self.protection.lock().expect("no panic while held");
        protection.leases -= 1;
        let is_part = matches!(self.memory(), Memory::Part { .. });
        let many = is_part && self.pool.protected_parts.load(Ordering::Relaxed) > IDLE_PARTS_MAX;
        if protection.leases == 0 && many && self.memory().protect(false).is_ok() {
            protection.protected = false;
            self.pool.count_unprotected(self.memory());
        }
    }

    #[cfg(test)]
    pub fn leases(&self) -> u32 {
        self.protection.lock().expect("no panic while held").leases
    }

    /// As [`Segment::unprotect`] does where many parts are read-only.
    #[cfg(test)]
    pub fn make_writable(&self) {
        let mut protection = self.protection.lock().expect("no panic while held");
        assert!(protection.leases == 0 && protection.protected);
        self.memory().protect(false).unwrap();
        protection.protected = false;
        self.pool.count_unprotected(self.memory());
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
        self.pool.bytes_of(self.used).fetch_sub(memory.size() as u64, Ordering::Relaxed);
        if self.protection.get_mut().expect("no panic while held").protected {
            if memory.protect(false).is_err() {
                // It is still read-only: a whole mapping is returned to the kernel, and a part stays unused.
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
        assert!(one_more.protect().is_err_and(|why| why.contains("already shares 16384 small objects")));
        // Refused and returned leases are not counted.
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
    fn memory_of_results_is_counted_apart_and_used_again() {
        let pool = Pool::new(64 << 20);
        let result = pool.take_for_result(3 << 20).unwrap();
        assert_eq!((pool.live_bytes(), pool.result_bytes()), (0, 4 << 20));
        let start = result.as_ptr();
        drop(result);
        assert_eq!((pool.result_bytes(), pool.free_bytes()), (0, 4 << 20));
        assert_eq!(pool.take(3 << 20, None).unwrap().as_ptr(), start);
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
        assert_eq!((pool.descriptors(), pool.live_bytes()), (2, 0));
    }

    #[test]
    fn memory_of_a_job_that_is_over_stays_for_the_next_one_while_there_is_room() {
        let pool = Pool::new(SLAB + (4 << 20));
        let made = pool.take(1 << 20, Some(1)).unwrap();
        let start = made.as_ptr();
        drop(made);
        pool.forget_job(1);
        let again = pool.take(1 << 20, Some(1)).unwrap();
        assert_eq!((pool.descriptors(), again.as_ptr()), (1, start));
        drop(again);
        pool.forget_job(1);
        let _other = pool.take(5 << 20, Some(2)).unwrap();
        assert_eq!(pool.descriptors(), 1, "of the other job");
    }

    #[test]
    fn what_is_freed_together_is_free_for_others_while_the_rest_of_its_job_is_used() {
        let pool = Pool::new(4 * SLAB);
        let take = |cohort| pool.take_of(cohort, 1 << 20, Some(1)).unwrap();
        let (early, late): (Vec<_>, Vec<_>) = (0..60).map(|_| (take(0), take(1))).unzip();
        assert_eq!(pool.descriptors(), 2);
        drop(early);
        let _result = pool.take_for_result(SLAB).unwrap();
        assert_eq!(pool.descriptors(), 2, "there is room for all");
        let _another = pool.take_for_result(2 * SLAB).unwrap();
        assert_eq!((pool.descriptors(), pool.live_bytes()), (1, 60 << 20));
        drop(late);
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
}
