//! What has to hold after every step.

use mission_core::host::fair::{Level, QueueId, QueueShare, Shares};
use mission_core::host::slots::{self, Slots};
use mission_core::host::{ClientId, FromArbiter, GroupId, MemberId, Ticket, ToArbiter};
use mission_core::shares::{cap, caps_bind};
use std::collections::{BTreeMap, BTreeSet};

/// Which bytes of a fetch have arrived.
#[derive(Default)]
pub struct Ranges {
    /// Of each piece: start and end of what is here.
    here: BTreeMap<u32, BTreeMap<u64, u64>>,
    pub bytes: u64,
}

impl Ranges {
    /// Bytes that arrive for the first time, or this panics.
    pub fn arrive(&mut self, piece: u32, start: u64, len: u64) {
        if len == 0 {
            return;
        }
        let here = self.here.entry(piece).or_default();
        let end = start + len;
        if let Some((_, before)) = here.range(..end).next_back() {
            assert!(*before <= start, "bytes {start} to {end} of piece {piece} arrived twice");
        }
        here.insert(start, end);
        self.bytes += len;
    }
}

/// Whose chunk it is.
type Owner = (GroupId, MemberId);

/// Follows the arbiter of one host: what it charged to whom, and whether shares, caps and budget were kept.
#[derive(Default)]
pub struct Ledger {
    wants: BTreeMap<(ClientId, Ticket), (Owner, u64)>,
    held: BTreeMap<(ClientId, Ticket), (Owner, u64)>,
    adopted: BTreeMap<(ClientId, Ticket), Owner>,
    /// Bytes of each queue: charged in all; of these after the chunk, because it was longer than its grant; given back.
    charged: BTreeMap<QueueId, f64>,
    added: BTreeMap<QueueId, f64>,
    returned: BTreeMap<QueueId, f64>,
    largest: f64,
    level: Level,
    shares: Vec<QueueShare>,
    limit: u32,
    /// Since when two queues both wait below their caps: of each what it was charged by then, and what it may be apart for.
    pairs: BTreeMap<(QueueId, QueueId), [[f64; 2]; 2]>,
    pub pairs_checked: u64,
    pub grants: u64,
}

impl Ledger {
    pub fn shares(&mut self, shares: &Shares) {
        self.level = shares.level;
        self.shares = shares.queues.clone();
        self.pairs.clear();
    }

    pub fn left(&mut self, client: ClientId) {
        // What it held is charged and not given back: it may have moved all of it.
        self.wants.retain(|(own, _), _| *own != client);
        self.held.retain(|(own, _), _| *own != client);
        self.adopted.retain(|(own, _), _| *own != client);
        self.pairs.clear();
    }

    pub fn heard(&mut self, client: ClientId, message: ToArbiter) {
        match message {
            ToArbiter::Want { ticket, group, member, bytes } => {
                self.wants.insert((client, ticket), ((group, member), bytes));
                self.largest = self.largest.max(bytes as f64);
            }
            ToArbiter::Withdraw { ticket } => drop(self.wants.remove(&(client, ticket))),
            ToArbiter::Held { ticket, group, member } => drop(self.adopted.insert((client, ticket), (group, member))),
            ToArbiter::Done { ticket, moved } => {
                if let Some((owner, charged)) = self.held.remove(&(client, ticket)) {
                    let queue = self.queue(owner);
                    // An uncontended slot may have carried a longer chunk: that is charged in the end.
                    for map in [&mut self.charged, &mut self.added] {
                        *map.entry(queue).or_default() += moved.saturating_sub(charged) as f64;
                    }
                    *self.returned.entry(queue).or_default() += charged.saturating_sub(moved) as f64;
                }
                self.adopted.remove(&(client, ticket));
            }
            ToArbiter::Pong => {}
        }
    }

    /// Checks a step of the arbiter, and its commands.
    pub fn step(&mut self, slots: &Slots, commands: &[slots::Command]) {
        let mut granted = Vec::new();
        for command in commands {
            if let slots::Command::Send { client, message: FromArbiter::Grant { ticket } } = command {
                let want = self.wants.remove(&(*client, *ticket));
                let (owner, bytes) = want.expect("only what is wanted is granted");
                let queue = self.queue(owner);
                self.held.insert((*client, *ticket), (owner, bytes));
                *self.charged.entry(queue).or_default() += bytes as f64;
                self.grants += 1;
                granted.push(queue);
            }
        }
        assert_eq!(slots.in_use() as usize, self.held.len() + self.adopted.len(), "every slot is somebody's");
        assert_eq!(slots.waiting(), self.wants.len(), "every request is known");
        if !granted.is_empty() {
            // A budget that is found by trial may change after a grant.
            let limit = slots.limit().max(self.limit);
            assert!(slots.in_use() <= limit, "{} slots of {limit}", slots.in_use());
        }
        self.limit = slots.limit();
        self.check_caps(slots, &granted);
        self.check_shares(slots);
    }

    fn queue(&self, (group, member): Owner) -> QueueId {
        self.level.queue(group, member)
    }

    fn in_use(&self, queue: QueueId) -> u32 {
        let held = self.held.values().map(|(owner, _)| owner).chain(self.adopted.values());
        held.filter(|owner| self.queue(**owner) == queue).count() as u32
    }

    fn waits(&self, queue: QueueId) -> bool {
        self.wants.values().any(|(owner, _)| self.queue(*owner) == queue)
    }

    /// Those that wait or hold slots.
    fn queues(&self) -> BTreeSet<QueueId> {
        let owners = self.wants.values().chain(self.held.values()).map(|(owner, _)| owner);
        owners.chain(self.adopted.values()).map(|owner| self.queue(*owner)).collect()
    }

    fn limit_of(&self, slots: &Slots, queue: QueueId) -> Option<u32> {
        let wanting = self.queues();
        let total: f64 = wanting.iter().map(|own| self.weight(*own)).sum();
        caps_bind(slots.limit(), wanting.len()).then(|| cap(slots.limit(), self.weight(queue) / total))
    }

    /// The weight as sent, or the average of all that were sent.
    fn weight(&self, queue: QueueId) -> f64 {
        let told = self.shares.iter().find(|share| share.queue == queue);
        told.map_or(1.0 / self.shares.len().max(1) as f64, |share| share.weight)
    }

    fn capped(&self, slots: &Slots, queue: QueueId) -> bool {
        self.limit_of(slots, queue).is_some_and(|limit| self.in_use(queue) >= limit)
    }

    /// No queue is granted more than its limit while a queue below its own limit waits.
    fn check_caps(&self, slots: &Slots, granted: &[QueueId]) {
        for queue in granted {
            let Some(limit) = self.limit_of(slots, *queue) else { continue };
            if self.in_use(*queue) > limit {
                let below = |other: &QueueId| other != queue && self.waits(*other) && !self.capped(slots, *other);
                let other = self.queues().into_iter().find(below);
                assert!(other.is_none(), "queue {queue} is above its limit of {limit} and {other:?} waits");
            }
        }
    }

    /// The bound of `host/fair.rs`: while two queues wait and neither is held back, the bytes charged to them, by weight, differ
    /// by at most one chunk of each and one of the lighter. What was given back may be had once more, and what was charged
    /// after a chunk is waited for.
    fn check_shares(&mut self, slots: &Slots) {
        let queues: Vec<QueueShare> = self.shares.clone();
        for (at, one) in queues.iter().enumerate() {
            for other in &queues[at + 1..] {
                let (a, b) = (one.queue, other.queue);
                let both = self.waits(a) && self.waits(b) && !self.capped(slots, a) && !self.capped(slots, b);
                if !both {
                    self.pairs.remove(&(a, b));
                    continue;
                }
                let of = |map: &BTreeMap<QueueId, f64>, queue| map.get(&queue).copied().unwrap_or(0.0);
                let now =
                    [a, b].map(|queue| [of(&self.charged, queue), of(&self.returned, queue) + of(&self.added, queue)]);
                // Who is more than a chunk behind when it begins may catch up; who is more than a chunk ahead waits.
                let began = std::array::from_fn(|at| {
                    let beyond = (slots.lead([a, b][at]).abs() - self.largest).max(0.0);
                    [now[at][0], now[at][1] - beyond]
                });
                let since = *self.pairs.entry((a, b)).or_insert(began);
                self.pairs_checked += 1;
                let [[b1, o1], [b2, o2]]: [[f64; 2]; 2] =
                    std::array::from_fn(|at| std::array::from_fn(|index| now[at][index] - since[at][index]));
                let apart = (b1 / one.weight - b2 / other.weight).abs();
                let most = (self.largest + o1) / one.weight
                    + (self.largest + o2) / other.weight
                    + self.largest / one.weight.min(other.weight);
                assert!(apart <= most * (1.0 + 1e-9) + 1e-6, "queues {a} and {b} are {apart} apart, at most {most}");
            }
        }
    }

    /// Nothing is held and nothing waits.
    pub fn is_empty(&self) -> bool {
        self.wants.is_empty() && self.held.is_empty() && self.adopted.is_empty()
    }
}
