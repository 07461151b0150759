//! Objects that memory has no room for: one file per process, already deleted.
//!
//! The file has no name once it is open, so that a process that is killed leaves nothing behind. Objects are appended,
//! and punched out again when they are freed, so the disk space goes back at once though the file's length only grows.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub struct Spool {
    file: File,
    end: AtomicU64,
    live: AtomicU64,
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
        let file = File::options().read(true).write(true).create_new(true).open(&name)?;
        std::fs::remove_file(&name)?;
        Ok(Arc::new(Spool { file, end: AtomicU64::new(0), live: AtomicU64::new(0) }))
    }

    /// Writes `bytes`; on an error nothing of them can be read, and their space is free again.
    ///
    /// # Errors
    /// The disk is full, with the mend in the message; or it is broken.
    pub fn write(self: &Arc<Spool>, bytes: &[u8]) -> io::Result<SpoolRange> {
        let len = bytes.len() as u64;
        let start = self.end.fetch_add(len, Ordering::Relaxed);
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
        drop(range);
        spool.file.sync_all().unwrap();
        assert_eq!((spool.live_bytes(), spool.file.metadata().unwrap().blocks()), (0, 0));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(folder).unwrap();
    }
}
