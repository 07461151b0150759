//! The store, which all replicas share.

use super::*;

impl World {
    /// The store is one, and always right; its answers may be lost.
    pub(super) fn stored(&mut self, from: usize, life: u64, sent: Time, request: Request) {
        let held = self.store.key;
        let answer = match request {
            Request::Load => {
                if self.is_cut(Node::Store, Node::Replica(from)) {
                    return;
                }
                self.store.watches.insert((from, life));
                let entries =
                    self.store.entries.iter().map(|(key, value)| (key.clone(), Some(value.clone()))).collect();
                let leader = held.map(|(replica, ..)| address(replica));
                Some(Event::Loaded { revision: self.store.revision, entries, leader })
            }
            Request::Campaign if held.is_none() => {
                let until = sent + LEASE;
                self.elections += 1;
                let epoch = self.changed_by(|store, revision| store.key = Some((from, life, revision, until)), from);
                Some(Event::Elected { epoch, until })
            }
            Request::Campaign => Some(Event::NotElected),
            Request::Resign => {
                if held.is_some_and(|(replica, own, ..)| (replica, own) == (from, life)) {
                    self.store.key = None;
                    self.changed(Vec::new(), Some(None));
                }
                None
            }
            Request::Renew => match held {
                Some((replica, own, epoch, _)) if (replica, own) == (from, life) => {
                    let until = sent + LEASE;
                    // By the store's own clock it lasts longer than the replica may believe.
                    self.store.key = Some((replica, own, epoch, self.now + LEASE));
                    Some(Event::Renewed { until })
                }
                _ => Some(Event::Deposed { epoch: None }),
            },
            Request::Write { write, epoch, entries } => {
                if held.is_some_and(|(replica, _, own, _)| (replica, own) == (from, epoch)) {
                    self.changed(entries, None);
                    Some(Event::Written { write, revision: self.store.revision })
                } else {
                    Some(Event::Unwritten { write, why: "another leads".into() })
                }
            }
        };
        if let Some(event) = answer {
            self.post(Node::Store, Node::Replica(from), Mail::FromStore { to: from, life, event });
        }
    }

    pub(super) fn changed_by(&mut self, change: impl FnOnce(&mut Store, u64), leader: usize) -> u64 {
        let revision = self.store.revision + 1;
        change(&mut self.store, revision);
        self.changed(Vec::new(), Some(Some(address(leader))));
        revision
    }

    pub(super) fn changed(&mut self, entries: Vec<Entry>, leader: Option<Option<Arc<str>>>) {
        self.store.revision += 1;
        for (key, value) in entries.clone() {
            match value {
                Some(value) => _ = self.store.entries.insert(key, value),
                None => _ = self.store.entries.remove(&key),
            }
        }
        let revision = self.store.revision;
        for (replica, life) in self.store.watches.clone() {
            let event = Event::Changed { revision, entries: entries.clone(), leader: leader.clone() };
            if self.is_cut(Node::Store, Node::Replica(replica)) {
                // Its watch breaks: it has to begin anew.
                self.store.watches.remove(&(replica, life));
            } else {
                self.post(Node::Store, Node::Replica(replica), Mail::FromStore { to: replica, life, event });
            }
        }
    }
}
