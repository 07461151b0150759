//! The arbiter's half: grants the slots of a host to its processes.
//!
//! Each grant is kept with its charge until the slot is returned, so the final charge is what was moved. A process that
//! is silent for too long loses its slots to others. An arbiter that was stopped itself grants nothing until its caller
//! has confirmed that no other arbiter replaced it.

use super::fair::{FairQueue, QueueId, Request, Shares as QueueShares};
use super::{ClientId, FromArbiter, GroupId, HEARTBEAT, JUMP, MemberId, SETTLE, SILENT, Ticket, ToArbiter};
use crate::budget::{Budget, FLOWS_MAX};
use crate::shares::FlowsPerHost;
use crate::units::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// Longest chunk: charges stay far below the largest tag of fair queueing.
const BYTES_MAX: u64 = 1 << 30;
/// The arbiter's own process.
pub const SELF: ClientId = 0;
/// A slot that comes back without a byte is free if it was held no longer than this: the source had become unreachable,
/// or was busy, and said so at once. A connection that fails, or a silent server, holds one for seconds.
const FREE_FOR: Duration = Duration::from_millis(100);
/// Waiting tickets of one process: a client with more violates the protocol.
pub const WAITING_MAX: usize = 16 << 10;

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Joined {
        client: ClientId,
    },
    /// Its connection is gone.
    Left {
        client: ClientId,
    },
    Message {
        client: ClientId,
        message: ToArbiter,
    },
    Shares {
        flows_per_host: FlowsPerHost,
        shares: QueueShares,
    },
    /// The answer to [`Command::Confirm`]: no other arbiter replaced this one.
    Confirmed,
    Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Send {
        client: ClientId,
        message: FromArbiter,
    },
    /// The client is silent or violates the protocol: close its connection. Its slots are granted to others.
    Expel {
        client: ClientId,
    },
    /// This process was stopped for a while: check whether another arbiter replaced it. Nothing is granted before
    /// [`Event::Confirmed`].
    Confirm,
    /// Send [`Event::Tick`] then, at the latest.
    WakeAt(Time),
}

/// The slots of one host.
pub struct Slots {
    queue: FairQueue,
    flows_per_host: FlowsPerHost,
    shares: QueueShares,
    limit: u32,
    /// Where the number of slots is found by trial.
    budget: Option<Box<Budget>>,
    clients: Vec<Client>,
    contended: bool,
    settled_at: Time,
    ticked_at: Time,
    confirmed: bool,
    /// Chunks that ended with at least a byte.
    done: u64,
}

struct Client {
    id: ClientId,
    held: Vec<Held>,
    /// Where each of its waiting tickets is.
    waiting: BTreeMap<Ticket, (GroupId, MemberId)>,
    heard_at: Time,
}

/// A granted slot.
struct Held {
    ticket: Ticket,
    group: GroupId,
    member: MemberId,
    /// Absent if an earlier arbiter granted it: it was not charged here, so nothing is refunded.
    charged: Option<u64>,
    granted_at: Time,
}

impl Slots {
    /// `succeeds`: others may still hold slots of an earlier arbiter; they have [`SETTLE`] to report them.
    pub fn new(now: Time, flows_per_host: FlowsPerHost, succeeds: bool) -> Slots {
        let mut slots = Slots {
            queue: FairQueue::default(),
            flows_per_host,
            shares: QueueShares::default(),
            limit: flows_per_host.usual(),
            budget: None,
            clients: Vec::new(),
            contended: false,
            settled_at: if succeeds { now + SETTLE } else { now },
            ticked_at: now,
            confirmed: true,
            done: 0,
        };
        slots.set_shares(flows_per_host, QueueShares::default());
        slots.join(now, SELF);
        slots
    }

    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        if self.confirmed && now.since(self.ticked_at) >= JUMP {
            // Clients that seemed silent while this process was stopped are not dropped.
            self.clients.iter_mut().for_each(|client| client.heard_at = now);
            self.confirmed = false;
            self.ticked_at = now;
            commands.push(Command::Confirm);
        }
        match event {
            Event::Joined { client } => {
                self.join(now, client);
                if self.contended {
                    commands.push(Command::Send { client, message: FromArbiter::Contended { contended: true } });
                }
            }
            Event::Left { client } => self.drop_client(client),
            Event::Message { client, message } => self.message(now, client, message, commands),
            Event::Shares { flows_per_host, shares } => self.set_shares(flows_per_host, shares),
            Event::Confirmed => self.confirmed = true,
            Event::Tick => self.tick(now, commands),
        }
        self.grant(now, commands);
        self.tell_contention(commands);
    }

    /// Slots that are granted now.
    pub fn in_use(&self) -> u32 {
        self.queue.in_use()
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.queue.waiting()
    }

    /// As [`FairQueue::lead`].
    pub fn lead(&self, queue: QueueId) -> f64 {
        self.queue.lead(queue)
    }

    /// Slots that may be granted at once.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    fn join(&mut self, now: Time, id: ClientId) {
        self.drop_client(id);
        self.clients.push(Client { id, held: Vec::new(), waiting: BTreeMap::new(), heard_at: now });
    }

    fn set_shares(&mut self, flows_per_host: FlowsPerHost, shares: QueueShares) {
        self.flows_per_host = flows_per_host;
        self.shares = shares;
        match flows_per_host {
            FlowsPerHost::Fixed(flows) => (self.budget, self.limit) = (None, flows),
            FlowsPerHost::Auto => self.limit = self.budget.get_or_insert_default().limit(),
        }
        self.queue.set_shares(&self.shares);
    }

    fn message(&mut self, now: Time, id: ClientId, message: ToArbiter, commands: &mut Vec<Command>) {
        let Some(client) = self.clients.iter_mut().find(|client| client.id == id) else { return };
        client.heard_at = now;
        match message {
            ToArbiter::Held { ticket, group, member } => {
                if client.held.iter().any(|held| held.ticket == ticket) {
                    return;
                }
                // No process can have held more slots than a host has.
                if client.held.len() >= FLOWS_MAX as usize && id != SELF {
                    commands.push(Command::Expel { client: id });
                    self.drop_client(id);
                    return;
                }
                client.held.push(Held { ticket, group, member, charged: None, granted_at: now });
                self.queue.adopt(group, member);
            }
            ToArbiter::Want { ticket, group, member, bytes } => {
                // The arbiter's own process is not checked: it is this one.
                if (client.waiting.len() >= WAITING_MAX || bytes > BYTES_MAX) && id != SELF {
                    commands.push(Command::Expel { client: id });
                    self.drop_client(id);
                    return;
                }
                let known = client.waiting.contains_key(&ticket);
                if !known && client.held.iter().all(|held| held.ticket != ticket) {
                    client.waiting.insert(ticket, (group, member));
                    self.queue.push(group, member, Request { client: id, ticket, bytes });
                }
            }
            ToArbiter::Withdraw { ticket } => {
                if let Some((group, member)) = client.waiting.remove(&ticket) {
                    self.queue.withdraw(group, member, id, ticket);
                }
            }
            ToArbiter::Done { ticket, moved } => {
                if let Some(at) = client.held.iter().position(|held| held.ticket == ticket) {
                    let held = client.held.swap_remove(at);
                    // No progress without a byte: others wait for what the slot was to carry.
                    self.done += u64::from(moved > 0);
                    // Without contention, a slot may have carried a longer chunk than it was granted for.
                    let moved = held.charged.map_or(0, |_| moved.min(BYTES_MAX));
                    let charged = held.charged.unwrap_or(0);
                    // Else who holds slots in vain would win the next one, too.
                    let in_vain = moved == 0 && now.since(held.granted_at) > FREE_FOR;
                    self.queue.done(held.group, held.member, charged, if in_vain { charged } else { moved });
                    self.observe(now, moved, u32::from(moved > 0));
                }
            }
            ToArbiter::Pong => {}
        }
    }

    fn tick(&mut self, now: Time, commands: &mut Vec<Command>) {
        self.ticked_at = now;
        let silent = |client: &Client| client.id != SELF && now.since(client.heard_at) >= SILENT;
        while let Some(id) = self.clients.iter().find(|client| silent(client)).map(|client| client.id) {
            commands.push(Command::Expel { client: id });
            self.drop_client(id);
        }
        let message = FromArbiter::Ping { done: self.done };
        commands.extend(self.clients.iter().map(|client| Command::Send { client: client.id, message }));
        commands.push(Command::WakeAt(now + HEARTBEAT));
    }

    /// What a client held and waited for is free again.
    fn drop_client(&mut self, id: ClientId) {
        let Some(at) = self.clients.iter().position(|client| client.id == id) else { return };
        let client = self.clients.swap_remove(at);
        self.queue.withdraw_all(id);
        for held in client.held {
            let charged = held.charged.unwrap_or(0);
            self.queue.done(held.group, held.member, charged, charged);
        }
    }

    fn grant(&mut self, now: Time, commands: &mut Vec<Command>) {
        if !self.confirmed {
            return;
        }
        if now < self.settled_at {
            commands.push(Command::WakeAt(self.settled_at));
            return;
        }
        loop {
            while self.queue.in_use() < self.limit {
                let Some(turn) = self.queue.pop(self.limit) else { break };
                let Request { client: id, ticket, bytes } = turn.request;
                let client =
                    self.clients.iter_mut().find(|client| client.id == id).expect("it asked and did not leave");
                client.waiting.remove(&ticket);
                let (group, member) = (turn.group, turn.member);
                client.held.push(Held { ticket, group, member, charged: Some(bytes), granted_at: now });
                commands.push(Command::Send { client: id, message: FromArbiter::Grant { ticket } });
            }
            if !self.observe(now, 0, 0) {
                return;
            }
        }
    }

    /// Updates the number of slots from the arrived bytes, if it is found by trial; true if it has changed.
    fn observe(&mut self, now: Time, bytes: u64, chunks: u32) -> bool {
        let Some(budget) = &mut self.budget else { return false };
        let before = budget.limit();
        budget.observe(now, bytes, chunks, self.queue.in_use(), self.queue.waiting() as u32);
        let limit = budget.limit();
        if limit != before {
            self.limit = limit;
        }
        limit != before
    }

    /// Whether there is contention: a request waits while another process or member holds a slot, or waits, too.
    fn is_contended(&self) -> bool {
        // If slots are found by trial, every chunk needs a request.
        if self.budget.is_some() {
            return true;
        }
        let wanting = self.clients.iter().filter(|client| !client.held.is_empty() || !client.waiting.is_empty());
        self.queue.waiting() > 0 && (wanting.take(2).count() > 1 || self.queue.members_compete())
    }

    fn tell_contention(&mut self, commands: &mut Vec<Command>) {
        let contended = self.is_contended();
        if contended != self.contended {
            self.contended = contended;
            let message = FromArbiter::Contended { contended };
            commands.extend(self.clients.iter().map(|client| Command::Send { client: client.id, message }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Host {
        slots: Slots,
        now: Time,
        said: Vec<Command>,
    }

    impl Host {
        fn new(flows: u32) -> Host {
            let now = Time::from_secs_f64(0.0);
            Host { slots: Slots::new(now, FlowsPerHost::Fixed(flows), false), now, said: Vec::new() }
        }

        fn event(&mut self, event: Event) -> Vec<Command> {
            self.said.clear();
            self.slots.handle(self.now, event, &mut self.said);
            self.said.clone()
        }

        fn say(&mut self, client: ClientId, message: ToArbiter) -> Vec<Command> {
            self.event(Event::Message { client, message })
        }

        fn want(&mut self, client: ClientId, ticket: Ticket) -> Vec<Command> {
            self.say(client, ToArbiter::Want { ticket, group: 1, member: 1, bytes: 10 })
        }

        fn pass(&mut self, seconds: f64) -> Vec<Command> {
            let end = self.now.as_secs_f64() + seconds;
            let mut all = Vec::new();
            while self.now.as_secs_f64() < end {
                self.now = self.now + HEARTBEAT;
                all.extend(self.event(Event::Tick));
            }
            all
        }
    }

    fn grant(client: ClientId, ticket: Ticket) -> Command {
        Command::Send { client, message: FromArbiter::Grant { ticket } }
    }

    #[test]
    fn processes_share_the_slots_and_hear_when_somebody_waits_in_vain() {
        let mut host = Host::new(1);
        host.event(Event::Joined { client: 1 });
        assert_eq!(host.want(SELF, 7), [grant(SELF, 7)]);
        let contended = |contended| FromArbiter::Contended { contended };
        let said = host.want(1, 9);
        assert!(said.contains(&Command::Send { client: SELF, message: contended(true) }), "{said:?}");
        let said = host.say(SELF, ToArbiter::Done { ticket: 7, moved: 10 });
        assert_eq!(said[0], grant(1, 9));
        assert!(said.contains(&Command::Send { client: 1, message: contended(false) }), "{said:?}");
    }

    #[test]
    fn a_client_that_leaves_or_falls_silent_returns_its_slots() {
        let mut host = Host::new(1);
        host.event(Event::Joined { client: 1 });
        host.event(Event::Joined { client: 2 });
        host.want(1, 1);
        host.want(2, 2);
        assert!(host.event(Event::Left { client: 1 }).contains(&grant(2, 2)));
        host.want(SELF, 3);
        let said = host.pass(SILENT.as_secs_f64());
        assert!(said.contains(&Command::Expel { client: 2 }) && said.contains(&grant(SELF, 3)), "{said:?}");
    }

    /// A2, the other way round: a slot that carried more than it was granted for was charged for less.
    #[test]
    fn a_chunk_that_was_longer_than_its_grant_is_charged() {
        let mut host = Host::new(1);
        let mut next = 10;
        let mut want = |host: &mut Host, group, bytes| {
            next += 1;
            host.say(SELF, ToArbiter::Want { ticket: next, group, member: group, bytes });
            next
        };
        let mut groups = BTreeMap::new();
        for (group, bytes) in [(1, 1), (2, 4), (1, 1), (2, 4)] {
            groups.insert(want(&mut host, group, bytes), group);
        }
        // Whatever either asks for, it moves four bytes.
        let mut moved = BTreeMap::from([(1, 0), (2, 0)]);
        let mut granted = *groups.keys().min().unwrap();
        for _ in 0..200 {
            let group = groups[&granted];
            *moved.get_mut(&group).unwrap() += 4;
            groups.insert(want(&mut host, group, if group == 1 { 1 } else { 4 }), group);
            let said = host.say(SELF, ToArbiter::Done { ticket: granted, moved: 4 });
            let Command::Send { message: FromArbiter::Grant { ticket }, .. } = said[0] else { panic!("{said:?}") };
            granted = ticket;
        }
        assert!((395..=405).contains(&moved[&1]), "{moved:?}");
    }

    /// R2: a connection that failed held a slot for 3 s, was refunded in full, and won the next slot.
    #[test]
    fn who_held_a_slot_in_vain_has_had_its_turn() {
        let mut host = Host::new(1);
        let want = |host: &mut Host, ticket, group| {
            host.say(SELF, ToArbiter::Want { ticket, group, member: group, bytes: 10 })
        };
        let done = |host: &mut Host, ticket, moved| host.say(SELF, ToArbiter::Done { ticket, moved });
        let (dead, live) = (1, 2);
        want(&mut host, 1, dead);
        want(&mut host, 2, dead);
        want(&mut host, 3, live);
        host.pass(3.0);
        assert_eq!(done(&mut host, 1, 0)[0], grant(SELF, 3));
        assert_eq!(host.slots.done, 0, "no progress");
        // What comes back at once costs nothing: the next of the same goes first.
        let mut host = Host::new(1);
        want(&mut host, 1, dead);
        want(&mut host, 2, dead);
        want(&mut host, 3, live);
        assert_eq!(done(&mut host, 1, 0)[0], grant(SELF, 2));
        assert_eq!(done(&mut host, 2, 10)[0], grant(SELF, 3));
        assert_eq!(host.slots.done, 1);
    }

    #[test]
    fn who_says_what_cannot_be_is_expelled_and_charges_nobody() {
        let mut host = Host::new(1);
        for client in [1, 2] {
            host.event(Event::Joined { client });
        }
        let absurd = ToArbiter::Want { ticket: 1, group: 1, member: 1, bytes: u64::MAX };
        assert!(host.say(1, absurd).contains(&Command::Expel { client: 1 }));
        for ticket in 0..u64::from(FLOWS_MAX) {
            let said = host.say(2, ToArbiter::Held { ticket, group: 1, member: 1 });
            assert!(!said.contains(&Command::Expel { client: 2 }), "ticket {ticket}");
        }
        let said = host.say(2, ToArbiter::Held { ticket: 1 << 20, group: 1, member: 1 });
        assert!(said.contains(&Command::Expel { client: 2 }));
        // All of it came back.
        assert_eq!(host.want(SELF, 3), [grant(SELF, 3)]);
        assert_eq!(host.slots.in_use(), 1);
    }

    #[test]
    fn who_answers_is_not_expelled() {
        let mut host = Host::new(1);
        host.event(Event::Joined { client: 1 });
        for _ in 0..20 {
            let said = host.pass(HEARTBEAT.as_secs_f64());
            assert!(!said.contains(&Command::Expel { client: 1 }));
            host.say(1, ToArbiter::Pong);
        }
    }

    #[test]
    fn an_arbiter_that_was_stopped_grants_nothing_before_it_knows_that_it_was_not_replaced() {
        let mut host = Host::new(1);
        host.event(Event::Joined { client: 1 });
        host.pass(1.0);
        host.now = host.now + JUMP;
        assert_eq!(host.want(1, 1), [Command::Confirm]);
        assert!(host.event(Event::Confirmed).contains(&grant(1, 1)));
    }

    #[test]
    fn a_successor_waits_until_the_others_have_said_what_they_hold() {
        let now = Time::from_secs_f64(0.0);
        let mut host = Host { slots: Slots::new(now, FlowsPerHost::Fixed(1), true), now, said: Vec::new() };
        host.event(Event::Joined { client: 1 });
        host.say(1, ToArbiter::Held { ticket: 5, group: 1, member: 1 });
        assert_eq!(
            host.want(SELF, 6),
            [
                Command::WakeAt(now + SETTLE),
                Command::Send { client: SELF, message: FromArbiter::Contended { contended: true } },
                Command::Send { client: 1, message: FromArbiter::Contended { contended: true } }
            ]
        );
        host.now = now + SETTLE;
        assert_eq!(host.slots.in_use(), 1);
        assert!(!host.event(Event::Tick).contains(&grant(SELF, 6)));
        assert!(host.say(1, ToArbiter::Done { ticket: 5, moved: 10 }).contains(&grant(SELF, 6)));
    }

    #[test]
    fn nonsense_changes_nothing() {
        let mut host = Host::new(2);
        host.want(SELF, 1);
        host.want(SELF, 1);
        host.say(SELF, ToArbiter::Done { ticket: 99, moved: u64::MAX });
        host.say(SELF, ToArbiter::Withdraw { ticket: 99 });
        host.say(77, ToArbiter::Want { ticket: 1, group: 1, member: 1, bytes: 1 });
        assert_eq!((host.slots.in_use(), host.slots.waiting()), (1, 0));
        host.event(Event::Joined { client: 1 });
        let more = (0..WAITING_MAX as u64 + 10).flat_map(|ticket| host.want(1, 100 + ticket)).collect::<Vec<_>>();
        assert!(more.contains(&Command::Expel { client: 1 }));
    }
}
