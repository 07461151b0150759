//! Objects that memory has no room for: one file per process, already deleted.
//!
//! The file has no name once it is open, so that a process that is killed leaves nothing behind. Freed objects are punched
//! out, so the disk space goes back at once, and later objects take their places: the file does not outgrow the file system.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub struct Spool {
    file: File,
    places: Mutex<Places>,
    live: AtomicU64,
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

impl Spool {
    /// # Errors
    /// The folder cannot be written to.
    pub fn new(folder: &Path) -> io::Result<Arc<Spool>> {
        std::fs::create_dir_all(folder)?;
        let name = folder.join(format!("mission-spool-{}", crate::object::ObjectId::random()));
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&name)?;
        std::fs::remove_file(&name)?;
        Ok(Arc::new(Spool { file, places: Mutex::default(), live: AtomicU64::new(0) }))
    }

    /// Writes `bytes`; on an error nothing of them can be read, and their space is free again.
    ///
    /// # Errors
    /// The disk is full, with a hint in the message; or it is broken.
    pub fn write(self: &Arc<Spool>, bytes: &[u8]) -> io::Result<SpoolRange> {
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
                        mission_core::units::format_bytes(self.live_bytes() - len)
                    ),
                ))
            }
            Err(error) => Err(error),
        }
    }

    pub fn live_bytes(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
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

    #[cfg(test)]
    fn overwrite(&self, offset: u64, bytes: &[u8]) {
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

    #[test]
    fn freed_ranges_give_their_space_back_and_no_file_is_left() {
        let folder = std::env::temp_dir().join(format!("mission-test-{}", crate::object::ObjectId::random()));
        let spool = Spool::new(&folder).unwrap();
        let range = spool.write(&[7; 1 << 20]).unwrap();
        let mut back = [0; 4];
        range.read_at(100, &mut back).unwrap();
        assert_eq!(back, [7; 4]);
        range.overwrite(100, &[1]);
        spool.file.sync_all().unwrap();
        assert!(spool.file.metadata().unwrap().blocks() > 0);
        assert_eq!(spool.file.metadata().unwrap().mode() & 0o777, 0o600, "nobody else may read it");
        drop(range);
        spool.file.sync_all().unwrap();
        assert_eq!((spool.live_bytes(), spool.file.metadata().unwrap().blocks()), (0, 0));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(folder).unwrap();
    }

    /// A11: places were never used again, until the file was as long as the file system allows.
    #[test]
    fn freed_places_are_used_again_and_grow_together() {
        let folder = std::env::temp_dir().join(format!("mission-test-{}", crate::object::ObjectId::random()));
        let spool = Spool::new(&folder).unwrap();
        let mut ranges: Vec<_> = (0..8u8).map(|number| spool.write(&[number; 1000]).unwrap()).collect();
        // Two that lie side by side make room for a larger one.
        ranges.drain(2..4);
        ranges.push(spool.write(&[9; 2000]).unwrap());
        assert_eq!(spool.places.lock().unwrap().end, 8000);
        for (range, number) in ranges.iter().zip([0, 1, 4, 5, 6, 7, 9]) {
            let mut back = vec![0; range.len as usize];
            range.read_at(0, &mut back).unwrap();
            assert!(back.iter().all(|byte| *byte == number));
        }
        drop(ranges);
        assert_eq!((spool.places.lock().unwrap().end, spool.live_bytes()), (0, 0));
        std::fs::remove_dir(folder).unwrap();
    }
}
