//! Objects that memory has no room for: files that are already deleted.
//!
//! A file has no name once it is open, so that a process that is killed leaves nothing behind. Freed objects are
//! punched out, so disk space is returned at once, and later objects reuse their places: a file does not outgrow the
//! file system.
//!
//! What other processes of the host may read lies in a file of its job: whoever has its descriptor can read all of it.
//! The rest lies in a file of this process alone. A job's file is closed when the job is over and its last object is freed.

use mission_core::host::GroupId;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The files of a process.
pub struct Spools {
    folder: PathBuf,
    /// By the job whose processes may read it; `None`: nobody else may.
    files: Mutex<HashMap<Option<GroupId>, Arc<Spool>>>,
    live: Arc<AtomicU64>,
}

struct Spool {
    file: File,
    /// The same file, open for reading only; `None`: nobody else may read it.
    read_only: Option<File>,
    places: Mutex<Places>,
    /// Bytes in all files of this process.
    live: Arc<AtomicU64>,
}

/// Which ranges of the file are free, by their start, and where all of them end.
#[derive(Default)]
struct Places {
    free: BTreeMap<u64, u64>,
    end: u64,
}

impl Places {
    fn take(&mut self, len: u64) -> u64 {
        let Some((&start, &room)) = self.free.iter().find(|(_, room)| **room >= len) else {
            let start = self.end;
            self.end += len;
            return start;
        };
        self.free.remove(&start);
        if room > len {
            self.free.insert(start + len, room - len);
        }
        start
    }

    fn put_back(&mut self, mut start: u64, mut len: u64) {
        if let Some((&before, &room)) = self.free.range(..start).next_back()
            && before + room == start
        {
            self.free.remove(&before);
            (start, len) = (before, room + len);
        }
        if let Some(room) = self.free.remove(&(start + len)) {
            len += room;
        }
        if start + len == self.end {
            self.end = start;
        } else {
            self.free.insert(start, len);
        }
    }
}

/// A range of the spool file; punched out when dropped.
pub struct SpoolRange {
    spool: Arc<Spool>,
    start: u64,
    len: u64,
}

impl Spools {
    /// `folder`: made when the first file is.
    pub fn new(folder: PathBuf) -> Spools {
        Spools { folder, files: Mutex::default(), live: Arc::default() }
    }

    /// Writes `bytes`, which other processes of the host may read for `sharers`, a job. On an error nothing of them can be
    /// read, and their space is free again.
    ///
    /// # Errors
    /// The disk is full, with a hint in the message; or it is broken, or cannot be written to.
    pub fn write(&self, bytes: &[u8], sharers: Option<GroupId>) -> io::Result<SpoolRange> {
        let spool = self
            .file(sharers)
            .map_err(|error| io::Error::new(error.kind(), format!("spool in {}: {error}", self.folder.display())))?;
        spool.write(bytes)
    }

    fn file(&self, sharers: Option<GroupId>) -> io::Result<Arc<Spool>> {
        let mut files = self.files.lock().expect("no panic while held");
        if let Some(spool) = files.get(&sharers) {
            return Ok(spool.clone());
        }
        match Spool::new(&self.folder, sharers.is_some(), self.live.clone()) {
            Ok(spool) => {
                let spool = Arc::new(spool);
                files.insert(sharers, spool.clone());
                Ok(spool)
            }
            // Without a descriptor for its own file, a job uses the process's private one.
            Err(error) => files.get(&None).cloned().ok_or(error),
        }
    }

    /// A job is over: its file is closed with its last object.
    pub fn forget_job(&self, job: GroupId) {
        let gone = self.files.lock().expect("no panic while held").remove(&Some(job));
        // Closing may take its time, without the lock.
        drop(gone);
    }

    /// Bytes of the objects in all files.
    pub fn live_bytes(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }
}

impl Spool {
    fn new(folder: &Path, is_shared: bool, live: Arc<AtomicU64>) -> io::Result<Spool> {
        std::fs::create_dir_all(folder)?;
        let name = folder.join(format!("mission-spool-{}", crate::object::ObjectId::random()));
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&name)?;
        let read_only = is_shared.then(|| File::open(&name)).transpose();
        std::fs::remove_file(&name)?;
        Ok(Spool { file, read_only: read_only?, places: Mutex::default(), live })
    }

    fn write(self: &Arc<Spool>, bytes: &[u8]) -> io::Result<SpoolRange> {
        let len = bytes.len() as u64;
        let start = self.places.lock().expect("no panic while held").take(len);
        self.live.fetch_add(len, Ordering::Relaxed);
        let range = SpoolRange { spool: self.clone(), start, len };
        match self.file.write_all_at(bytes, start) {
            Ok(()) => Ok(range),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG)) => {
                Err(io::Error::new(
                    io::ErrorKind::StorageFull,
                    format!(
                        "the spool disk is full ({error}) with {} of this worker on it: free space there, or point the \
                         worker's local directory to a larger disk",
                        mission_core::units::format_bytes(self.live.load(Ordering::Relaxed) - len)
                    ),
                ))
            }
            Err(error) => Err(error),
        }
    }
}

impl SpoolRange {
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.spool.file.read_exact_at(into, self.start + offset)
    }

    /// The file and the place in it, for `sendfile`.
    pub fn place(&self, offset: u64) -> (&File, u64) {
        (&self.spool.file, self.start + offset)
    }

    /// As [`SpoolRange::place`], for other processes; `None`: they may not read it.
    pub fn shared(&self) -> Option<(&File, u64)> {
        Some((self.spool.read_only.as_ref()?, self.start))
    }

    #[cfg(test)]
    pub fn overwrite(&self, offset: u64, bytes: &[u8]) {
        self.spool.file.write_all_at(bytes, self.start + offset).unwrap();
    }
}

impl Drop for SpoolRange {
    fn drop(&mut self) {
        self.spool.live.fetch_sub(self.len, Ordering::Relaxed);
        // Where the file system cannot punch holes the space comes back when the process ends.
        // SAFETY: a call on an open file with a range that this value owns.
        unsafe {
            libc::fallocate(
                self.spool.file.as_raw_fd(),
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                self.start as i64,
                self.len as i64,
            )
        };
        self.spool.places.lock().expect("no panic while held").put_back(self.start, self.len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn folder() -> PathBuf {
        std::env::temp_dir().join(format!("mission-test-{}", crate::object::ObjectId::random()))
    }

    #[test]
    fn freed_ranges_give_their_space_back_and_no_file_is_left() {
        let folder = folder();
        let spools = Spools::new(folder.clone());
        let range = spools.write(&[7; 1 << 20], None).unwrap();
        let file = &range.spool.clone().file;
        let mut back = [0; 4];
        range.read_at(100, &mut back).unwrap();
        assert_eq!(back, [7; 4]);
        range.overwrite(100, &[1]);
        file.sync_all().unwrap();
        assert!(file.metadata().unwrap().blocks() > 0);
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600, "nobody else may read it");
        drop(range);
        file.sync_all().unwrap();
        assert_eq!((spools.live_bytes(), file.metadata().unwrap().blocks()), (0, 0));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(folder).unwrap();
    }

    /// A11: places were never used again, until the file was as long as the file system allows.
    #[test]
    fn freed_places_are_used_again_and_grow_together() {
        let folder = folder();
        let spools = Spools::new(folder.clone());
        let mut ranges: Vec<_> = (0..8u8).map(|number| spools.write(&[number; 1000], None).unwrap()).collect();
        let spool = ranges[0].spool.clone();
        // Two adjacent free ranges make room for a larger one.
        ranges.drain(2..4);
        ranges.push(spools.write(&[9; 2000], None).unwrap());
        assert_eq!(spool.places.lock().unwrap().end, 8000);
        for (range, number) in ranges.iter().zip([0, 1, 4, 5, 6, 7, 9]) {
            let mut back = vec![0; range.len as usize];
            range.read_at(0, &mut back).unwrap();
            assert!(back.iter().all(|byte| *byte == number));
        }
        drop(ranges);
        assert_eq!((spool.places.lock().unwrap().end, spools.live_bytes()), (0, 0));
        std::fs::remove_dir(folder).unwrap();
    }

    #[test]
    fn each_job_has_a_file_that_others_can_only_read_and_what_nobody_may_read_lies_elsewhere() {
        let folder = folder();
        let spools = Spools::new(folder.clone());
        let jobs = [Some(1), Some(2), None];
        let ranges: Vec<_> = jobs.iter().map(|job| spools.write(&[5; 1000], *job).unwrap()).collect();
        let another = spools.write(&[6; 10], Some(1)).unwrap();
        assert!(Arc::ptr_eq(&another.spool, &ranges[0].spool));
        assert!(ranges[2].shared().is_none());
        let inode = |range: &SpoolRange| range.shared().unwrap().0.metadata().unwrap().ino();
        assert_ne!(inode(&ranges[0]), inode(&ranges[1]));
        let (file, start) = another.shared().unwrap();
        let mut back = [0; 10];
        file.read_exact_at(&mut back, start).unwrap();
        assert_eq!(back, [6; 10]);
        assert!(file.write_all_at(&back, 0).is_err());
        // A job's file is closed when the job is over and its last object is freed.
        let file = Arc::downgrade(&another.spool);
        drop(ranges);
        spools.forget_job(1);
        assert!(file.upgrade().is_some());
        drop(another);
        assert!(file.upgrade().is_none());
        assert_eq!(spools.live_bytes(), 0);
        std::fs::remove_dir(folder).unwrap();
    }
}
