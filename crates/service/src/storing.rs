//! The threads that use the store, so that the deciding thread never waits for it.

use crate::moment::Moment;
use crate::store::{Changed, Elected, Failure, Loaded, Store};
use mission_core::service::{Entry, Epoch, Event, WriteId};
use mission_core::units::Time;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

/// A store that does not answer is asked again after this time.
const AGAIN: Duration = Duration::from_millis(250);

/// Commands to the store.
pub struct Storing {
    store: Arc<dyn Store>,
    lease: Sender<Lease>,
    writes: Sender<(WriteId, Epoch, Vec<Entry>)>,
}

enum Lease {
    Campaign,
    Renew,
    Resign(Sender<()>),
}

impl Storing {
    /// `says`: called with events of the store, from any thread; `false`: the replica has ended.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn start(
        store: &Arc<dyn Store>,
        address: &str,
        began: Moment,
        says: &Arc<dyn Fn(Event) -> bool + Send + Sync>,
    ) -> std::io::Result<Storing> {
        let (lease, leases) = channel();
        let (writes, written) = channel();
        let named = |name: &str| thread::Builder::new().name(name.into()).stack_size(512 << 10);
        let (own, speaks, address) = (store.clone(), says.clone(), address.to_owned());
        named("mission-lease").spawn(move || leads(&*own, &address, began, &leases, &*speaks))?;
        let (own, speaks) = (store.clone(), says.clone());
        named("mission-write").spawn(move || write(&*own, &written, &*speaks))?;
        let (own, speaks) = (store.clone(), says.clone());
        named("mission-watch").spawn(move || watch(&*own, &*speaks))?;
        Ok(Storing { store: store.clone(), lease, writes })
    }

    pub fn campaign(&self) {
        let _ = self.lease.send(Lease::Campaign);
    }

    pub fn renew(&self) {
        let _ = self.lease.send(Lease::Renew);
    }

    pub fn write(&self, write: WriteId, epoch: Epoch, entries: Vec<Entry>) {
        let _ = self.writes.send((write, epoch, entries));
    }

    /// Gives the leader's key back.
    pub fn resign(&self) {
        let _ = self.lease.send(Lease::Resign(channel().0));
    }

    /// Ends. A leader returns its key, and waits for that, but not for long.
    pub fn end(&self, leads: bool) {
        let (done, over) = channel();
        if leads && self.lease.send(Lease::Resign(done)).is_ok() {
            let _ = over.recv_timeout(Duration::from_secs(2));
        }
        self.store.close();
    }
}

fn leads(store: &dyn Store, address: &str, began: Moment, asked: &Receiver<Lease>, says: &dyn Fn(Event) -> bool) {
    let time = |at: Moment| Time(0) + at.since(began);
    while let Ok(first) = asked.recv() {
        let said = match first {
            Lease::Campaign => match store.campaign(address) {
                Ok(Some(Elected { epoch, until })) => Some(Event::Elected { epoch, until: time(until) }),
                Ok(None) => Some(Event::NotElected),
                Err(failure) => {
                    says(problem(&failure));
                    Some(Event::NotElected)
                }
            },
            Lease::Renew => match store.renew() {
                Ok(until) => Some(Event::Renewed { until: time(until) }),
                Err(Failure::NotLeader) => Some(Event::Deposed { epoch: None }),
                Err(failure) => Some(problem(&failure)),
            },
            Lease::Resign(done) => {
                store.resign();
                let _ = done.send(());
                None
            }
        };
        if said.is_some_and(|event| !says(event)) {
            return;
        }
    }
}

fn write(store: &dyn Store, asked: &Receiver<(WriteId, Epoch, Vec<Entry>)>, says: &dyn Fn(Event) -> bool) {
    while let Ok((write, epoch, entries)) = asked.recv() {
        let said = match store.write(epoch, &entries) {
            Ok(revision) => Event::Written { write, revision },
            // Another replica has the key, or none.
            Err(Failure::NotLeader) if !says(Event::Deposed { epoch: Some(epoch) }) => return,
            Err(Failure::NotLeader) => Event::Unwritten { write, why: "another replica leads now: retry".into() },
            Err(Failure::Unknown(why)) => {
                Event::Unwritten { write, why: format!("{why}; check whether the change was stored, then retry") }
            }
        };
        if !says(said) {
            return;
        }
    }
}

fn watch(store: &dyn Store, says: &dyn Fn(Event) -> bool) {
    let mut had: Option<Loaded> = None;
    let mut listens = true;
    while listens {
        let watched = store.load().and_then(|loaded| {
            let after = loaded.revision;
            // Most times nothing was missed.
            if had.as_ref() != Some(&loaded) {
                let Loaded { revision, entries, leader } = loaded.clone();
                listens = says(Event::Loaded { revision, entries, leader });
            }
            listens = listens && says(Event::Store { problem: None });
            had = Some(loaded);
            let mut changed = false;
            let watched = store.watch(after, &mut |Changed { revision, entries, leader }| {
                changed = true;
                listens = listens && says(Event::Changed { revision, entries, leader });
                listens
            });
            if changed {
                had = None;
            }
            watched
        });
        if let Err(failure) = watched {
            listens = listens && says(problem(&failure));
            thread::sleep(AGAIN);
        }
    }
}

fn problem(failure: &Failure) -> Event {
    let why = match failure {
        Failure::NotLeader => "another replica leads".into(),
        Failure::Unknown(why) => why.clone(),
    };
    Event::Store { problem: Some(why) }
}
