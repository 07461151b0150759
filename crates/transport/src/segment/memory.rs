//! Mapped memory: a whole mapping, or a part of a slab that a job's small segments share.

use super::SLAB;
use mission_core::defaults::IDLE_MEMORY;
use mission_core::host::GroupId;
use rustix::fs::MemfdFlags;
use rustix::mm::MprotectFlags;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The job whose processes may map it, if any may, and its size.
pub(super) type Kind = (Option<GroupId>, usize);

pub(super) struct Mapping {
    pub(super) start: NonNull<u8>,
    pub(super) size: usize,
    /// Of shared memory: the file, and whose it is.
    pub(super) shared: Option<(MemoryFile, GroupId)>,
}

/// A file of memory, counted.
pub(super) struct MemoryFile {
    pub(super) file: File,
    pub(super) count: Arc<AtomicUsize>,
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Mapping {
    pub(super) fn kind(&self) -> Kind {
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
pub(super) struct Slab {
    pub(super) mapping: Mapping,
    pub(super) free: Mutex<Ranges>,
}

/// Free ranges of a slab, by their start, and since when all of it is free.
pub(super) struct Ranges {
    pub(super) by_start: BTreeMap<usize, usize>,
    pub(super) idle_since: Option<Instant>,
}

impl Slab {
    pub(super) fn take(&self, size: usize) -> Option<usize> {
        let mut free = self.free.lock().expect("no panic while held");
        let (&start, &len) = free.by_start.iter().find(|(_, len)| **len >= size)?;
        free.by_start.remove(&start);
        if len > size {
            free.by_start.insert(start + size, len - size);
        }
        free.idle_since = None;
        Some(start)
    }

    pub(super) fn put_back(&self, mut start: usize, mut size: usize) {
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

    pub(super) fn is_idle(&self) -> bool {
        let free = self.free.lock().expect("no panic while held");
        free.idle_since.is_some_and(|since| since.elapsed() >= IDLE_MEMORY)
    }
}

pub(super) enum Memory {
    Whole(Mapping),
    Part { slab: Arc<Slab>, start: usize, size: usize },
}

impl Memory {
    pub(super) fn size(&self) -> usize {
        match self {
            Memory::Whole(mapping) => mapping.size,
            Memory::Part { size, .. } => *size,
        }
    }

    pub(super) fn mapping(&self) -> (&Mapping, usize) {
        match self {
            Memory::Whole(mapping) => (mapping, 0),
            Memory::Part { slab, start, .. } => (&slab.mapping, *start),
        }
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        let (mapping, start) = self.mapping();
        // SAFETY: the start lies in the mapping.
        unsafe { mapping.start.as_ptr().add(start) }
    }

    pub(super) fn protect(&self, protected: bool) -> io::Result<()> {
        let flags = if protected { MprotectFlags::READ } else { MprotectFlags::READ | MprotectFlags::WRITE };
        // SAFETY: the range belongs to this value; its writers are gone, see [`Segment::protect`].
        unsafe { rustix::mm::mprotect(self.as_ptr().cast(), self.size(), flags)? };
        Ok(())
    }
}

/// A file of memory without a name.
pub(super) fn memory_file(size: usize) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Before Linux 6.3 memory could not be marked as non-executable.
    let file = rustix::fs::memfd_create("mission-control", flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create("mission-control", flags))?;
    let file = File::from(file);
    file.set_len(size as u64)?;
    Ok(file)
}
