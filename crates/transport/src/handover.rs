//! Workers copy objects from one another, as the Mission Controller asks ([`mission_core::control`]): the source puts a
//! manifest, and two threads of the target take and keep objects.

use crate::control::Control;
use crate::copies::PartCopy;
use crate::fetcher::Fetcher;
use crate::object::ObjectId;
use crate::parts::{FetchRequest, Home, Wanted};
use crate::segment::SHARED_MIN;
use crate::store::Store;
use mission_core::control::{Describe, Described, HAND_OVER, Keep, MANIFEST_MIN, Take, Taken, Untaken};
use mission_core::types::{Demands, Encryption, TransferId};
use mission_core::units::format_bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

/// Objects that are taken in parallel: each is a fetch with flows of its own, and small ones would wait for round
/// trips.
const AT_ONCE: usize = 4;
// The Mission Controller must not refuse a manifest for the room that makes it mappable.
const _: () = assert!(SHARED_MIN as u64 <= MANIFEST_MIN);

/// A manifest's entry for an object.
#[derive(Serialize, Deserialize)]
struct Entry {
    object: ObjectId,
    encryption: Encryption,
    sizes: Vec<u64>,
}

/// Puts a manifest of those of the objects that are here.
///
/// # Errors
/// No memory.
pub fn describe(store: &Store, fetcher: &Fetcher, asked: Describe) -> io::Result<Described> {
    let mut protection = Encryption::None;
    let mut entries = Vec::new();
    for object in asked.objects.into_iter().map(ObjectId::from) {
        if let Some(own) = store.get(&object) {
            protection = protection.max(own.encryption);
            entries.push(Entry { object, encryption: own.encryption, sizes: own.sizes() });
        }
    }
    let mut text = serde_json::to_vec(&entries).expect("numbers and names");
    let sharers = fetcher.sharers(&asked.job, &Demands { encrypt: protection, transport: None });
    if sharers.is_some() {
        // Padded so that it can be mapped: the job may allow shared memory only.
        text.resize(text.len().max(SHARED_MIN), b' ');
    }
    let manifest = store.put(&[&text], protection, sharers)?;
    Ok(Described { job: asked.job, manifest: manifest.into(), bytes: text.len() as u64 })
}

/// Carries out the Mission Controller's requests to take and to keep objects. Each kind has a thread: taking a large object can
/// last minutes, and the Mission Controller waits only seconds for the answer to a request to keep one.
pub struct Taker {
    takes: Option<Sender<Take>>,
    keeps: Option<Sender<Keep>>,
    threads: Vec<JoinHandle<()>>,
}

impl Taker {
    pub(crate) fn new(fetcher: Arc<Fetcher>, store: Arc<Store>, control: Arc<Control>) -> io::Result<Taker> {
        let (own, (takes, to_take), (keeps, to_keep)) =
            (Arc::new(Own { fetcher, store, control, large: Mutex::default() }), channel(), channel());
        let mut taker = Taker { takes: Some(takes), keeps: Some(keeps), threads: Vec::new() };
        let keeper = own.clone();
        taker.threads.push(thread::Builder::new().name("mission-keep".into()).spawn(move || {
            to_keep.iter().for_each(|Keep { object, parts }| {
                keeper.say(object.into(), None, keeper.keep(object.into(), parts));
            });
        })?);
        taker.threads.push(
            thread::Builder::new()
                .name("mission-take".into())
                .spawn(move || to_take.iter().for_each(|take| own.take_all(&take)))?,
        );
        Ok(taker)
    }

    pub fn take(&self, take: Take) {
        let _ = self.takes.as_ref().expect("only dropping takes it").send(take);
    }

    pub fn keep(&self, keep: Keep) {
        let _ = self.keeps.as_ref().expect("only dropping takes it").send(keep);
    }
}

impl Drop for Taker {
    /// Its fetches have been abandoned before.
    fn drop(&mut self) {
        drop((self.takes.take(), self.keeps.take()));
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

struct Own {
    fetcher: Arc<Fetcher>,
    store: Arc<Store>,
    control: Arc<Control>,
    /// Held while an object is received that is too large for several of its size to fit.
    large: Mutex<()>,
}

impl Own {
    fn take_all(&self, take: &Take) {
        let of = Some(take.manifest.into());
        let objects: Vec<(ObjectId, u64)> = take.objects.iter().map(|(object, len)| ((*object).into(), *len)).collect();
        let entries = match self.manifest(take) {
            Ok(entries) => entries,
            Err(why) => return objects.into_iter().for_each(|(object, _)| self.say(object, of, Err(why.clone()))),
        };
        let left = Mutex::new(objects.into_iter());
        let work = || {
            loop {
                let Some((object, len)) = left.lock().expect("no panic while held").next() else { return };
                self.say(object, of, self.take(take, object, len, entries.get(&object)));
            }
        };
        thread::scope(|scope| {
            for _ in 1..AT_ONCE.min(entries.len()) {
                // Without a thread, fewer suffice.
                let _ = thread::Builder::new().name("mission-take".into()).spawn_scoped(scope, work);
            }
            work();
        });
    }

    /// Reports the outcome for an object; `of`: the manifest of a request to take it.
    fn say(&self, object: ObjectId, of: Option<ObjectId>, taken: Result<(), String>) {
        let (object, manifest) = (object.into(), of.map(Into::into));
        match taken {
            Ok(()) => self.control.took(Taken { object, manifest }),
            Err(why) => self.control.untaken(Untaken { object, manifest, why }),
        }
    }

    /// Makes an object of the copies of all its parts, if they are here.
    fn keep(&self, object: ObjectId, parts: u32) -> Result<(), String> {
        if self.store.get(&object).is_some() {
            return Ok(());
        }
        if parts == 0 {
            return Err("the number of its parts is unknown".into());
        }
        let copies = (0..parts).map(|part| self.store.copies.get(&(object, part)).filter(|copy| copy.is_whole()));
        let copies: Vec<Arc<PartCopy>> = copies.collect::<Option<_>>().ok_or("some of its parts are missing")?;
        let bytes: Vec<&[u8]> =
            copies.iter().map(|copy| copy.range(0, copy.nbytes()).map_or(&[][..], |(bytes, _)| bytes)).collect();
        let protection = copies.iter().map(|copy| copy.encryption()).max().unwrap_or(Encryption::None);
        self.store.put_as(object, &bytes, protection, None).map_err(|error| error.to_string())?;
        self.store.copies.free(&object);
        Ok(())
    }

    fn manifest(&self, take: &Take) -> Result<BTreeMap<ObjectId, Entry>, String> {
        let parts = vec![wanted(take, take.manifest.into(), 0, take.manifest_bytes)?];
        let fetched = self.fetcher.fetch(request(take, take.demands, parts), || false);
        let fetched = fetched.map_err(|error| error.to_string())?;
        let entries: Vec<Entry> = serde_json::from_slice(fetched.parts[0].bytes()).map_err(|why| why.to_string())?;
        Ok(entries.into_iter().map(|entry| (entry.object, entry)).collect())
    }

    fn take(&self, take: &Take, object: ObjectId, len: u64, entry: Option<&Entry>) -> Result<(), String> {
        if self.store.get(&object).is_some() {
            return Ok(());
        }
        let entry = entry.ok_or("its owner does not have it")?;
        let described = entry.sizes.iter().try_fold(0u64, |sum, part| sum.checked_add(*part));
        if described != Some(len) {
            return Err(format!("it has {len} bytes, but its owner described a different length"));
        }
        let numbered = (0u32..).zip(&entry.sizes);
        let parts = numbered.map(|(part, len)| wanted(take, object, part, *len)).collect::<Result<Vec<_>, _>>()?;
        // It comes into memory before it may go to the spool.
        let room = self.store.memory_limit();
        if len > room {
            return Err(format!("it has {}, but this worker has room for {}", format_bytes(len), format_bytes(room)));
        }
        let _one_at_a_time = (len > room / AT_ONCE as u64).then(|| self.large.lock().expect("no panic while held"));
        let demands = Demands { encrypt: take.demands.encrypt.max(entry.encryption), ..take.demands };
        let sharers = self.fetcher.sharers(&take.job, &demands);
        let fetched = self.fetcher.fetch_for(request(take, demands, parts), sharers, || false);
        let all = fetched.map_err(|error| error.to_string())?.all.expect("it is packed");
        let Home::Own(segment) = all.home else { return Err("it was not received into memory of this process".into()) };
        let adopted = self.store.adopt_as(object, segment, &entry.sizes, entry.encryption);
        adopted.map_err(|error| error.to_string())?;
        // Parts of it that were kept from a broadcast.
        self.store.copies.free(&object);
        Ok(())
    }
}

fn wanted(take: &Take, object: ObjectId, part: u32, len: u64) -> Result<Wanted, String> {
    let address: SocketAddr =
        take.from.parse().map_err(|_| format!("{} is not an address such as 10.0.0.1:4711", take.from))?;
    Ok(Wanted { object, part, len, addresses: vec![address] })
}

fn request(take: &Take, demands: Demands, parts: Vec<Wanted>) -> FetchRequest {
    let transfer = TransferId { job: take.job.clone(), from: "objects".into(), to: HAND_OVER.into() };
    FetchRequest { whole: true, packed: true, ..FetchRequest::new(transfer, demands, parts) }
}
