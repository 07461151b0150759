//! A store for one replica: a journal in a folder, each line one write, on the disk before it counts.
//!
//! The folder is locked while it is used, so there is one leader. A line that was cut by a crash is the last one, and is
//! dropped: it was not answered.

use super::{Changed, Elected, Failure, Loaded, Store};
use crate::moment::Moment;
use mission_core::service::{Entry, Epoch};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const JOURNAL: &str = "journal.jsonl";
/// A journal is written anew, short, when it has so many times the lines that there are entries.
const GARBAGE: usize = 8;
const LINES_MIN: usize = 256;
/// No other replica can lead: the lease is always renewed in time.
const LEASE: Duration = Duration::from_secs(3600);
const SILENCE: Duration = Duration::from_secs(3);

#[derive(Serialize, Deserialize)]
struct Line {
    revision: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    entries: Vec<Entry>,
}

pub struct FileStore {
    folder: PathBuf,
    state: Mutex<State>,
    changed: Condvar,
    /// Locked as long as this lives.
    lock: File,
}

struct State {
    journal: File,
    /// Of the lines that are on the disk.
    bytes: u64,
    lines: usize,
    revision: u64,
    entries: BTreeMap<String, String>,
    leader: Option<(Arc<str>, Epoch)>,
    /// Of the last revisions, oldest first: for the one that watches.
    news: Vec<Changed>,
    closed: bool,
    /// The content of the journal is unknown, so nothing more is written.
    broken: Option<String>,
}

impl FileStore {
    /// # Errors
    /// The folder cannot be used, another service uses it, or its journal is damaged: one line.
    pub fn open(folder: &Path) -> Result<FileStore, String> {
        let named = |what: &str, error: io::Error| format!("{what} {}: {error}", folder.display());
        let created = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        created.map_err(|error| named("cannot create the folder", error))?;
        // Whoever may write in it could put another journal there.
        let about = std::fs::metadata(folder).map_err(|error| named("cannot use", error))?;
        if about.uid() == rustix::process::geteuid().as_raw() && about.mode() & 0o002 != 0 {
            return Err(format!("everybody can write in {0}: chmod 700 {0}", folder.display()));
        }
        let lock = private().create(true).truncate(false).write(true).open(folder.join("lock"));
        let lock = lock.and_then(only_ours).map_err(|error| named("cannot write in", error))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            format!("{} is used by another service: stop that one, or use another folder", folder.display())
        })?;
        let path = folder.join(JOURNAL);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(named("cannot read", error)),
        };
        let mut state = State {
            journal: private()
                .create(true)
                .append(true)
                .open(&path)
                .and_then(only_ours)
                .map_err(|error| named("cannot use the journal in", error))?,
            bytes: 0,
            lines: 0,
            revision: 0,
            entries: BTreeMap::new(),
            leader: None,
            news: Vec::new(),
            closed: false,
            broken: None,
        };
        // What follows the last end of line was cut, and not answered.
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for (number, line) in (1..).zip(bytes[..whole].split_inclusive(|byte| *byte == b'\n')) {
            let line: Line = serde_json::from_slice(line)
                .map_err(|error| format!("{}:{number}: not a line of a journal: {error}", path.display()))?;
            state.apply(line.revision, &line.entries);
            state.lines += 1;
        }
        state.bytes = whole as u64;
        if whole < bytes.len() {
            state.journal.set_len(whole as u64).map_err(|error| named("cannot use the journal in", error))?;
        }
        // The journal itself may be new.
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| named("cannot use the journal in", error))?;
        Ok(FileStore { folder: folder.to_owned(), state: Mutex::new(state), changed: Condvar::new(), lock })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    fn append(&self, state: &mut State, entries: Vec<Entry>, leader: Option<Option<Arc<str>>>) -> Result<u64, Failure> {
        if let Some(why) = &state.broken {
            return Err(Failure::Unknown(why.clone()));
        }
        let revision = state.revision + 1;
        let mut line =
            serde_json::to_string(&Line { revision, entries: entries.clone() }).expect("plain values have a text");
        line.push('\n');
        let failed = |error: &io::Error, then: &str| {
            format!("the journal in {} cannot be written: {error}; {then}", self.folder.display())
        };
        if let Err(error) = state.journal.write_all(line.as_bytes()) {
            // Half of it may be there, as on a disk that is full. Without it the journal is as it was.
            if state.journal.set_len(state.bytes).is_err() {
                state.broken = Some(failed(&error, "make room, then restart the service"));
            }
            return Err(Failure::Unknown(failed(&error, "make room, then retry")));
        }
        // After a failure the content of the disk is unknown, and a second try would report success (Rebello et al.,
        // "Can applications recover from fsync failures?", USENIX ATC 2020).
        if let Err(error) = state.journal.sync_data() {
            let why = failed(&error, "check the disk, then restart the service");
            state.broken = Some(why.clone());
            return Err(Failure::Unknown(why));
        }
        state.bytes += line.len() as u64;
        state.lines += 1;
        state.apply(revision, &entries);
        state.news.push(Changed { revision, entries, leader });
        if state.lines >= LINES_MIN && state.lines > GARBAGE * state.entries.len() {
            // As before, only longer: it can be tried again.
            let _ = self.shorten(state);
        }
        self.changed.notify_all();
        Ok(revision)
    }

    fn shorten(&self, state: &mut State) -> io::Result<()> {
        let (path, new) = (self.folder.join(JOURNAL), self.folder.join("journal.new"));
        let entries = state.entries.iter().map(|(key, value)| (key.clone(), Some(value.clone()))).collect();
        let mut line =
            serde_json::to_string(&Line { revision: state.revision, entries }).expect("plain values have a text");
        line.push('\n');
        let _ = std::fs::remove_file(&new);
        let mut file = private().create_new(true).append(true).open(&new)?;
        file.write_all(line.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, &path)?;
        // From here on the old journal is unused.
        (state.journal, state.bytes, state.lines) = (file, line.len() as u64, 1);
        File::open(&self.folder)?.sync_all()
    }
}

/// What is created is readable by this user only, whatever the umask: who can open the lock's file can lock it, and the
/// journal says who runs what.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// The same for a file that was there before, if it is this user's.
fn only_ours(file: File) -> io::Result<File> {
    let about = file.metadata()?;
    if about.uid() == rustix::process::geteuid().as_raw() && about.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

impl State {
    fn apply(&mut self, revision: u64, entries: &[Entry]) {
        self.revision = revision;
        for (key, value) in entries {
            match value {
                Some(value) => _ = self.entries.insert(key.clone(), value.clone()),
                None => _ = self.entries.remove(key),
            }
        }
    }
}

impl Store for FileStore {
    fn load(&self) -> Result<Loaded, Failure> {
        let mut state = self.lock();
        state.news.clear();
        let entries = state.entries.iter().map(|(key, value)| (key.clone(), Some(value.clone()))).collect();
        let leader = state.leader.as_ref().map(|(address, _)| address.clone());
        Ok(Loaded { revision: state.revision, entries, leader })
    }

    fn watch(&self, after: u64, each: &mut dyn FnMut(Changed) -> bool) -> Result<(), Failure> {
        let end = Instant::now() + SILENCE;
        let mut state = self.lock();
        loop {
            let news = std::mem::take(&mut state.news);
            drop(state);
            for change in news.into_iter().filter(|change| change.revision > after) {
                if !each(change) {
                    return Ok(());
                }
            }
            state = self.lock();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || state.closed {
                return Ok(());
            }
            if state.news.is_empty() {
                state = self.changed.wait_timeout(state, left).expect("no panic while held").0;
            }
        }
    }

    fn campaign(&self, address: &str) -> Result<Option<Elected>, Failure> {
        let mut state = self.lock();
        let epoch = self.append(&mut state, Vec::new(), Some(Some(address.into())))?;
        state.leader = Some((address.into(), epoch));
        Ok(Some(Elected { epoch, until: Moment::now() + LEASE }))
    }

    fn renew(&self) -> Result<Moment, Failure> {
        let state = self.lock();
        state.leader.as_ref().map(|_| Moment::now() + LEASE).ok_or(Failure::NotLeader)
    }

    fn resign(&self) {
        let mut state = self.lock();
        state.leader = None;
        // If it cannot be written, nothing else can be either.
        let _ = self.append(&mut state, Vec::new(), Some(None));
    }

    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.broken = Some("this service is shutting down".into());
        // The next process finds all confirmed writes: nothing is written after this.
        let _ = flock(&self.lock, FlockOperation::Unlock);
        self.changed.notify_all();
    }

    fn write(&self, epoch: Epoch, entries: &[Entry]) -> Result<u64, Failure> {
        let mut state = self.lock();
        if state.leader.as_ref().is_none_or(|(_, own)| *own != epoch) {
            return Err(Failure::NotLeader);
        }
        self.append(&mut state, entries.to_vec(), None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("mission-store-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        folder
    }

    /// With a umask of 0 the journal could be written by everybody, and another user's lock kept a service from starting.
    #[test]
    fn nobody_else_can_open_its_files_and_a_folder_in_which_everybody_can_write_is_refused() {
        let folder = folder("private");
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        drop(FileStore::open(&folder).unwrap());
        assert_eq!((mode(&folder), mode(&folder.join("lock")), mode(&folder.join(JOURNAL))), (0o700, 0o600, 0o600));
        for file in ["lock", JOURNAL] {
            std::fs::set_permissions(folder.join(file), Permissions::from_mode(0o666)).unwrap();
        }
        drop(FileStore::open(&folder).unwrap());
        assert_eq!((mode(&folder.join("lock")), mode(&folder.join(JOURNAL))), (0o600, 0o600), "of an earlier version");
        std::fs::set_permissions(&folder, Permissions::from_mode(0o777)).unwrap();
        assert!(FileStore::open(&folder).err().unwrap().contains("chmod 700"));
        std::fs::remove_dir_all(folder).unwrap();
    }

    fn entry(key: &str, value: &str) -> Entry {
        (key.into(), Some(value.into()))
    }

    #[test]
    fn what_was_answered_is_there_after_a_crash_and_a_line_that_was_cut_is_not() {
        let folder = folder("crash");
        let store = FileStore::open(&folder).unwrap();
        let Elected { epoch, .. } = store.campaign("here").unwrap().unwrap();
        store.write(epoch, &[entry("policy", "\"fair\"")]).unwrap();
        assert_eq!(store.write(epoch + 1, &[entry("policy", "\"fifo\"")]), Err(Failure::NotLeader));
        assert!(FileStore::open(&folder).err().unwrap().contains("another service"));
        drop(store);
        let mut journal = OpenOptions::new().append(true).open(folder.join(JOURNAL)).unwrap();
        journal.write_all(b"{\"revision\":3,\"entr").unwrap();
        let store = FileStore::open(&folder).unwrap();
        assert_eq!(store.load().unwrap().entries, [entry("policy", "\"fair\"")]);
        let later = store.campaign("here").unwrap().unwrap().epoch;
        assert!(later > epoch);
        store.write(later, &[("policy".into(), None)]).unwrap();
        drop(store);
        assert_eq!(FileStore::open(&folder).unwrap().load().unwrap().entries, []);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_damaged_journal_is_named_and_a_long_one_is_written_anew() {
        let folder = folder("damage");
        let store = FileStore::open(&folder).unwrap();
        let epoch = store.campaign("here").unwrap().unwrap().epoch;
        for number in 0..LINES_MIN {
            store.write(epoch, &[entry("policy", &number.to_string())]).unwrap();
        }
        let State { revision, lines, .. } = *store.lock();
        assert!(lines < 10, "{lines}");
        drop(store);
        let again = FileStore::open(&folder).unwrap();
        assert_eq!(again.load().unwrap().revision, revision);
        drop(again);
        std::fs::write(folder.join(JOURNAL), "nonsense\n").unwrap();
        assert!(FileStore::open(&folder).err().unwrap().contains("journal.jsonl:1:"));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn changes_come_in_order() {
        let folder = folder("watch");
        let store = FileStore::open(&folder).unwrap();
        let loaded = store.load().unwrap();
        let epoch = store.campaign("here").unwrap().unwrap().epoch;
        store.write(epoch, &[entry("a", "1")]).unwrap();
        let mut seen = Vec::new();
        store
            .watch(loaded.revision, &mut |change| {
                seen.push(change);
                seen.len() < 2
            })
            .unwrap();
        let leader = Changed { revision: epoch, entries: vec![], leader: Some(Some("here".into())) };
        assert_eq!(seen, [leader, Changed { revision: epoch + 1, entries: vec![entry("a", "1")], leader: None }]);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
