//! Who gives out a host's slots: arbiters, their elections, and the connections to them.

use super::*;

impl World {
    pub(super) fn arbiter(&mut self, id: ArbiterId, event: slots::Event) {
        let mut commands = Vec::new();
        {
            let Some(arbiter) = &mut self.arbiters[id] else { return };
            match &event {
                slots::Event::Message { client, message } => {
                    if *client != SELF && !arbiter.clients.contains_key(client) {
                        return;
                    }
                    arbiter.ledger.heard(*client, *message);
                }
                slots::Event::Left { client } => arbiter.ledger.left(*client),
                slots::Event::Shares { shares, .. } => arbiter.ledger.shares(shares),
                _ => {}
            }
            arbiter.slots.handle(self.now, event, &mut commands);
            for command in &commands {
                if let slots::Command::Expel { client } = command {
                    arbiter.ledger.left(*client);
                }
            }
            arbiter.ledger.step(&arbiter.slots, &commands);
        }
        for command in commands {
            match command {
                slots::Command::Send { client, message } => self.down(id, client, message),
                slots::Command::Expel { client } => self.cut_off(id, client),
                slots::Command::Confirm => {
                    if !self.is_replaced(id) {
                        self.arbiter(id, slots::Event::Confirmed);
                    }
                }
                slots::Command::WakeAt(_) => {}
            }
        }
    }

    fn down(&mut self, id: ArbiterId, client: ClientId, message: FromArbiter) {
        let Some(arbiter) = &self.arbiters[id] else { return };
        let found = if client == SELF {
            let owner = arbiter.owner;
            self.workers[owner].link.map(|link| (owner, link.id))
        } else {
            arbiter.clients.get(&client).copied()
        };
        let Some((process, link)) = found else { return };
        let delay = self.delay(client);
        let Some(own) = self.workers[process].link.as_mut().filter(|own| own.id == link) else { return };
        own.last_down = own.last_down.max(self.now + delay);
        let at = own.last_down;
        self.at(at, Happens::ToProcess { process, link, message });
    }

    /// A process and its own arbiter share a lock; others share a socket.
    fn delay(&mut self, client: ClientId) -> Duration {
        if client == SELF { Duration::ZERO } else { Duration::from_micros(5 + self.random.next() % 300) }
    }

    pub(super) fn up(&mut self, process: ProcessId, message: ToArbiter) {
        let Some(link) = self.workers[process].link else { return };
        let delay = self.delay(link.client);
        let own = self.workers[process].link.as_mut().expect("there is one");
        own.last_up = own.last_up.max(self.now + delay);
        let at = own.last_up;
        self.at(at, Happens::ToArbiter { arbiter: link.arbiter, client: link.client, message });
    }

    /// The arbiter closes a client's connection.
    fn cut_off(&mut self, id: ArbiterId, client: ClientId) {
        let found = self.arbiters[id].as_mut().and_then(|arbiter| arbiter.clients.remove(&client));
        if let Some((process, link)) = found {
            self.after(Duration::from_micros(50), Happens::LinkLost { process, link });
        }
    }

    /// A process closes its connection, or it breaks.
    pub(super) fn leave_link(&mut self, process: ProcessId) {
        let Some(link) = self.workers[process].link.take() else { return };
        if link.client == SELF {
            return;
        }
        self.after(Duration::from_micros(50), Happens::ClientLeft { arbiter: link.arbiter, client: link.client });
    }

    /// An arbiter of a higher generation answers: this one steps down.
    pub(super) fn is_replaced(&mut self, id: ArbiterId) -> bool {
        let Some(own) = &self.arbiters[id] else { return true };
        let (host, generation, owner) = (own.host, own.generation, own.owner);
        let higher = self
            .arbiters
            .iter()
            .flatten()
            .any(|other| other.host == host && other.generation > generation && !self.workers[other.owner].stopped);
        if higher {
            self.end_arbiter(id);
            self.workers[owner].link = None;
            self.process(owner, process::Event::Lost);
            self.after(Duration::from_millis(1), Happens::Elect { process: owner, waited: false });
        }
        higher
    }

    pub(super) fn end_arbiter(&mut self, id: ArbiterId) {
        if let Some(arbiter) = self.arbiters[id].take() {
            self.grants += arbiter.ledger.grants;
            for (process, link) in arbiter.clients.into_values() {
                self.after(Duration::from_micros(50), Happens::LinkLost { process, link });
            }
        }
    }

    pub(super) fn elect(&mut self, process: ProcessId, waited: bool) {
        if self.workers[process].link.is_some() {
            return;
        }
        let host = self.workers[process].host;
        let mut there: Vec<(u64, ArbiterId, bool)> = Vec::new();
        for (id, arbiter) in self.arbiters.iter().enumerate() {
            if let Some(arbiter) = arbiter.as_ref().filter(|arbiter| arbiter.host == host) {
                there.push((arbiter.generation, id, self.workers[arbiter.owner].stopped));
            }
        }
        there.sort_unstable();
        match there.last() {
            Some((_, id, false)) => self.join(process, *id),
            Some(_) if !waited => self.after(HANDSHAKE, Happens::Elect { process, waited: true }),
            _ => {
                let generation = self.generations[host] + 1;
                self.generations[host] = generation;
                let id = self.arbiters.len();
                let ledger = Ledger::default();
                let shares = self.workers[process].shares.clone();
                let slots = Slots::new(self.now, self.flows, generation > 1);
                self.arbiters.push(Some(Arbiter {
                    host,
                    owner: process,
                    generation,
                    slots,
                    ledger,
                    clients: BTreeMap::new(),
                    next_client: SELF + 1,
                }));
                self.link(process, id, SELF);
                self.arbiter(id, slots::Event::Shares { flows_per_host: self.flows, shares });
                self.process(process, process::Event::Joined { remote: false });
                self.at(self.now, Happens::ArbiterTick { arbiter: id, count: 0 });
            }
        }
    }

    fn join(&mut self, process: ProcessId, id: ArbiterId) {
        let arbiter = self.arbiters[id].as_mut().expect("it was just there");
        let client = arbiter.next_client;
        arbiter.next_client += 1;
        let link = self.link(process, id, client);
        let arbiter = self.arbiters[id].as_mut().expect("it was just there");
        arbiter.clients.insert(client, (process, link));
        self.arbiter(id, slots::Event::Joined { client });
        self.process(process, process::Event::Joined { remote: true });
    }

    fn link(&mut self, process: ProcessId, arbiter: ArbiterId, client: ClientId) -> LinkId {
        let id = self.next_link;
        self.next_link += 1;
        self.workers[process].link = Some(Link { id, arbiter, client, last_up: self.now, last_down: self.now });
        id
    }
}
