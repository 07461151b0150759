//! What has to hold after every step.

use mission_core::host::fair::GroupShare;
use mission_core::host::slots::{self, Slots};
use mission_core::host::{ClientId, FromArbiter, GroupId, Ticket, ToArbiter};
use mission_core::shares::caps_bind;
use std::collections::BTreeMap;

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

/// Follows the arbiter of one host: what it charged to whom, and whether shares, caps and budget were kept.
#[derive(Default)]
pub struct Ledger {
    wants: BTreeMap<(ClientId, Ticket), (GroupId, u64)>,
    held: BTreeMap<(ClientId, Ticket), (GroupId, u64)>,
    adopted: BTreeMap<(ClientId, Ticket), GroupId>,
    charged: BTreeMap<GroupId, f64>,
    returned: BTreeMap<GroupId, f64>,
    largest: f64,
    shares: Vec<GroupShare>,
    limit: u32,
    /// Since when two groups both wait below their caps: charged and returned by then.
    pairs: BTreeMap<(GroupId, GroupId), [f64; 4]>,
    pub pairs_checked: u64,
    pub grants: u64,
}

impl Ledger {
    pub fn shares(&mut self, shares: &[GroupShare]) {
        self.shares = shares.to_vec();
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
            ToArbiter::Want { ticket, group, bytes, .. } => {
                self.wants.insert((client, ticket), (group, bytes));
                self.largest = self.largest.max(bytes as f64);
            }
            ToArbiter::Withdraw { ticket } => drop(self.wants.remove(&(client, ticket))),
            ToArbiter::Held { ticket, group, .. } => drop(self.adopted.insert((client, ticket), group)),
            ToArbiter::Done { ticket, moved } => {
                if let Some((group, charged)) = self.held.remove(&(client, ticket)) {
                    // A slot that nobody else wanted may have carried a longer chunk: that is charged in the end.
                    *self.charged.entry(group).or_default() += moved.saturating_sub(charged) as f64;
                    *self.returned.entry(group).or_default() += charged.saturating_sub(moved) as f64;
                }
                self.adopted.remove(&(client, ticket));
            }
            ToArbiter::Pong => {}
        }
    }

    /// After a step of the arbiter, and what it said.
    pub fn step(&mut self, slots: &Slots, commands: &[slots::Command]) {
        let mut granted = Vec::new();
        for command in commands {
            if let slots::Command::Send { client, message: FromArbiter::Grant { ticket } } = command {
                let want = self.wants.remove(&(*client, *ticket));
                let (group, bytes) = want.expect("only what is wanted is granted");
                self.held.insert((*client, *ticket), (group, bytes));
                *self.charged.entry(group).or_default() += bytes as f64;
                self.grants += 1;
                granted.push(group);
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

    fn in_use(&self, group: GroupId) -> u32 {
        let held = self.held.values().filter(|(own, _)| *own == group).count();
        (held + self.adopted.values().filter(|own| **own == group).count()) as u32
    }

    fn waits(&self, group: GroupId) -> bool {
        self.wants.values().any(|(own, _)| *own == group)
    }

    fn groups(&self) -> Vec<GroupId> {
        let mut all: Vec<GroupId> = self.wants.values().chain(self.held.values()).map(|(group, _)| *group).collect();
        all.extend(self.adopted.values());
        all.sort_unstable();
        all.dedup();
        all
    }

    fn capped(&self, slots: &Slots, group: GroupId) -> bool {
        let share = self.shares.iter().find(|share| share.group == group);
        caps_bind(slots.limit(), self.groups().len()) && share.is_some_and(|share| self.in_use(group) >= share.cap)
    }

    /// Nobody is given more than his cap while somebody below his own waits.
    fn check_caps(&self, slots: &Slots, granted: &[GroupId]) {
        for group in granted {
            let Some(share) = self.shares.iter().find(|share| share.group == *group) else { continue };
            if caps_bind(slots.limit(), self.groups().len()) && self.in_use(*group) > share.cap {
                let other = self
                    .groups()
                    .into_iter()
                    .find(|other| other != group && self.waits(*other) && !self.capped(slots, *other));
                assert!(other.is_none(), "group {group} is above its cap of {} and {other:?} waits", share.cap);
            }
        }
    }

    /// Goyal, Vin and Cheng 1996, theorem 1: while two groups wait and neither is held back, the bytes charged to them,
    /// by weight, differ by at most one chunk of each. What was given back may be had once more.
    fn check_shares(&mut self, slots: &Slots) {
        let groups: Vec<GroupShare> = self.shares.clone();
        for (at, one) in groups.iter().enumerate() {
            for other in &groups[at + 1..] {
                let (a, b) = (one.group, other.group);
                let both = self.waits(a) && self.waits(b) && !self.capped(slots, a) && !self.capped(slots, b);
                if !both {
                    self.pairs.remove(&(a, b));
                    continue;
                }
                let of = |map: &BTreeMap<GroupId, f64>, group| map.get(&group).copied().unwrap_or(0.0);
                let now = [of(&self.charged, a), of(&self.charged, b), of(&self.returned, a), of(&self.returned, b)];
                // Who is behind when it begins, because chunks broke off, may catch up.
                let credit = |group| slots.behind(group);
                let began = [now[0], now[1], now[2] - credit(a), now[3] - credit(b)];
                let since = *self.pairs.entry((a, b)).or_insert(began);
                self.pairs_checked += 1;
                let [b1, b2, r1, r2] = std::array::from_fn(|index| now[index] - since[index]);
                let apart = (b1 / one.weight - b2 / other.weight).abs();
                let most = (self.largest + r1) / one.weight + (self.largest + r2) / other.weight;
                assert!(apart <= most * (1.0 + 1e-9) + 1e-6, "groups {a} and {b} are {apart} apart, at most {most}");
            }
        }
    }

    /// Nothing is held and nothing waits.
    pub fn is_empty(&self) -> bool {
        self.wants.is_empty() && self.held.is_empty() && self.adopted.is_empty()
    }
}
