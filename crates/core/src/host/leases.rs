//! The process's half of slot sharing: which of its chunks have a slot, and which slots it keeps.
//!
//! Without contention, a process reuses a slot without a request and without a charge: a request per chunk would cost
//! two context switches, as much as a small chunk itself. Under contention, unused slots are returned, and each chunk
//! is requested and charged. So shares are exact under contention; without it they do not matter.
//!
//! A ticket is a chunk that wants a slot. A claim is a request that the arbiter knows of. They are separate so that a
//! chunk that took a kept slot leaves its claim to the next chunk of the same length, without a message.

use super::{FromArbiter, GroupId, HEARTBEAT, JUMP, MemberId, SILENT, Ticket, ToArbiter};
use crate::units::Time;
use std::collections::{BTreeMap, VecDeque};

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A chunk wants a slot.
    Want {
        ticket: Ticket,
        group: GroupId,
        member: MemberId,
        bytes: u64,
    },
    /// It no longer wants one.
    Withdraw {
        ticket: Ticket,
    },
    /// It has ended, or is not going to use its slot.
    Done {
        ticket: Ticket,
        moved: u64,
    },
    Arbiter(FromArbiter),
    /// An arbiter was found or started; `remote`: in another process.
    Joined {
        remote: bool,
    },
    /// The connection to it is gone.
    Lost,
    Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// The ticket has a slot.
    Granted {
        ticket: Ticket,
    },
    Send(ToArbiter),
    /// The arbiter is silent: leave it and elect another.
    Replace,
}

/// A process's requests for, and holdings of, its host's slots.
#[derive(Default)]
pub struct Leases {
    joined: bool,
    remote: bool,
    contended: bool,
    members: BTreeMap<MemberId, Member>,
    /// Slots in use.
    running: Vec<Running>,
    claims: Ticket,
    heard_at: Time,
    ticked_at: Time,
    /// Chunks that ended on the host, by the arbiter's last heartbeat.
    done: u64,
}

#[derive(Default)]
struct Member {
    group: GroupId,
    waiting: VecDeque<(Ticket, u64)>,
    /// Requests at the arbiter, oldest first, and their bytes.
    claims: VecDeque<(Ticket, u64)>,
    /// Kept slots that are not in use, and since when.
    spare: Vec<(Time, Lease)>,
}

/// A slot of the arbiter's: the claim that it was granted for, and what its own chunk moved once that has ended.
#[derive(Clone, Copy)]
struct Lease {
    claim: Ticket,
    moved: Option<u64>,
}

struct Running {
    ticket: Ticket,
    member: MemberId,
    group: GroupId,
    /// Absent where the arbiter that granted it is gone and no other has been found.
    lease: Option<Lease>,
}

impl Leases {
    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::Want { ticket, group, member, bytes } => self.want(ticket, group, member, bytes, commands),
            Event::Withdraw { ticket } => self.withdraw(ticket, commands),
            Event::Done { ticket, moved } => self.done(now, ticket, moved, commands),
            Event::Arbiter(message) => {
                self.heard_at = now;
                self.hear(now, message, commands);
            }
            Event::Joined { remote } => {
                (self.heard_at, self.ticked_at) = (now, now);
                self.join(remote, commands);
            }
            Event::Lost => self.lose(),
            Event::Tick => self.tick(now, commands),
        }
    }

    /// Whether another process may be waiting for a slot, as far as this process knows.
    pub fn contended(&self) -> bool {
        self.contended || !self.joined
    }

    /// Chunks that ended on this host so far: it grows while others make progress.
    pub fn done_on_host(&self) -> u64 {
        self.done
    }

    /// Slots in use.
    pub fn in_use(&self) -> usize {
        self.running.len()
    }

    /// Slots that are kept and not in use.
    pub fn spare(&self) -> usize {
        self.members.values().map(|member| member.spare.len()).sum()
    }

    fn want(&mut self, ticket: Ticket, group: GroupId, id: MemberId, bytes: u64, commands: &mut Vec<Command>) {
        let member = self.members.entry(id).or_insert_with(|| Member { group, ..Member::default() });
        if self.joined
            && !self.contended
            && let Some((_, lease)) = member.spare.pop()
        {
            self.run(ticket, id, group, lease, commands);
            return;
        }
        member.waiting.push_back((ticket, bytes));
        self.claim(id, commands);
    }

    /// Sends requests for chunks without a claim.
    fn claim(&mut self, id: MemberId, commands: &mut Vec<Command>) {
        if !self.joined {
            return;
        }
        let Some(member) = self.members.get_mut(&id) else { return };
        let unclaimed = member.waiting.len().saturating_sub(member.claims.len());
        for at in member.waiting.len() - unclaimed..member.waiting.len() {
            let bytes = member.waiting[at].1;
            self.claims += 1;
            member.claims.push_back((self.claims, bytes));
            commands.push(Command::Send(ToArbiter::Want {
                ticket: self.claims,
                group: member.group,
                member: id,
                bytes,
            }));
        }
    }

    fn withdraw(&mut self, ticket: Ticket, commands: &mut Vec<Command>) {
        let found = self.members.iter_mut().find_map(|(id, member)| {
            let at = member.waiting.iter().position(|(own, _)| *own == ticket)?;
            member.waiting.remove(at);
            Some(*id)
        });
        if let Some(id) = found {
            self.settle_claims(id, commands);
        }
    }

    /// Withdraws claims without a chunk, under contention or once nothing waits.
    fn settle_claims(&mut self, id: MemberId, commands: &mut Vec<Command>) {
        let Some(member) = self.members.get_mut(&id) else { return };
        if self.contended || member.waiting.is_empty() {
            while member.claims.len() > member.waiting.len() {
                let Some((claim, _)) = member.claims.pop_back() else { break };
                commands.push(Command::Send(ToArbiter::Withdraw { ticket: claim }));
            }
        }
        if self.contended {
            self.align_claims(id, commands);
        }
        self.forget_if_idle(id);
    }

    /// Under contention every claim has the length of the chunk that it stands for, so that what is charged is right.
    fn align_claims(&mut self, id: MemberId, commands: &mut Vec<Command>) {
        let Some(member) = self.members.get_mut(&id) else { return };
        for (claim, waiting) in member.claims.iter_mut().zip(&member.waiting) {
            if claim.1 != waiting.1 {
                commands.push(Command::Send(ToArbiter::Withdraw { ticket: claim.0 }));
                self.claims += 1;
                *claim = (self.claims, waiting.1);
                let (group, bytes) = (member.group, waiting.1);
                commands.push(Command::Send(ToArbiter::Want { ticket: self.claims, group, member: id, bytes }));
            }
        }
    }

    fn run(&mut self, ticket: Ticket, member: MemberId, group: GroupId, lease: Lease, commands: &mut Vec<Command>) {
        self.running.push(Running { ticket, member, group, lease: Some(lease) });
        commands.push(Command::Granted { ticket });
    }

    fn done(&mut self, now: Time, ticket: Ticket, moved: u64, commands: &mut Vec<Command>) {
        let Some(at) = self.running.iter().position(|running| running.ticket == ticket) else { return };
        let Running { member: id, group, lease, .. } = self.running.swap_remove(at);
        let Some(mut lease) = lease.filter(|_| self.joined) else {
            self.forget_if_idle(id);
            return;
        };
        // A slot that was used again is not charged again: what counts is what its first chunk moved.
        lease.moved.get_or_insert(moved);
        if self.contended {
            self.give_back(lease, commands);
            self.forget_if_idle(id);
            return;
        }
        let member = self.members.entry(id).or_insert_with(|| Member { group, ..Member::default() });
        match member.waiting.pop_front() {
            Some((next, _)) => {
                self.run(next, id, group, lease, commands);
                self.settle_claims(id, commands);
            }
            None => member.spare.push((now, lease)),
        }
    }

    fn give_back(&self, lease: Lease, commands: &mut Vec<Command>) {
        commands.push(Command::Send(ToArbiter::Done { ticket: lease.claim, moved: lease.moved.unwrap_or(0) }));
    }

    fn hear(&mut self, now: Time, message: FromArbiter, commands: &mut Vec<Command>) {
        match message {
            FromArbiter::Grant { ticket: claim } => self.granted(now, claim, commands),
            FromArbiter::Contended { contended } => self.on_contention_changed(contended, commands),
            FromArbiter::Ping { done } => {
                self.done = done;
                commands.push(Command::Send(ToArbiter::Pong));
            }
        }
    }

    fn granted(&mut self, now: Time, claim: Ticket, commands: &mut Vec<Command>) {
        let of = |member: &Member| member.claims.iter().position(|(own, _)| *own == claim);
        let found = self.members.iter_mut().find_map(|(id, member)| of(member).map(|at| (*id, member, at)));
        // It was withdrawn while the grant was in transit.
        let Some((id, member, at)) = found else {
            commands.push(Command::Send(ToArbiter::Done { ticket: claim, moved: 0 }));
            return;
        };
        let (_, bytes) = member.claims.remove(at).expect("found at that place");
        let group = member.group;
        // The chunk of that length that waits longest.
        let at = member.waiting.iter().position(|(_, own)| *own == bytes);
        let at = at.or_else(|| (!self.contended && !member.waiting.is_empty()).then_some(0));
        let Some((ticket, _)) = at.and_then(|at| member.waiting.remove(at)) else {
            let lease = Lease { claim, moved: Some(0) };
            if self.contended {
                self.give_back(lease, commands);
            } else {
                member.spare.push((now, lease));
            }
            return;
        };
        self.run(ticket, id, group, Lease { claim, moved: None }, commands);
        self.claim(id, commands);
        self.settle_claims(id, commands);
    }

    fn on_contention_changed(&mut self, contended: bool, commands: &mut Vec<Command>) {
        self.contended = contended;
        if !contended {
            return;
        }
        let ids: Vec<MemberId> = self.members.keys().copied().collect();
        for id in ids {
            let spare = self.members.get_mut(&id).map(|member| std::mem::take(&mut member.spare)).unwrap_or_default();
            spare.into_iter().for_each(|(_, lease)| self.give_back(lease, commands));
            self.settle_claims(id, commands);
        }
    }

    fn join(&mut self, remote: bool, commands: &mut Vec<Command>) {
        self.lose();
        (self.joined, self.remote) = (true, remote);
        for running in &mut self.running {
            self.claims += 1;
            // The new arbiter charges nothing for it.
            running.lease = Some(Lease { claim: self.claims, moved: Some(0) });
            let (ticket, group, member) = (self.claims, running.group, running.member);
            commands.push(Command::Send(ToArbiter::Held { ticket, group, member }));
        }
        let ids: Vec<MemberId> = self.members.keys().copied().collect();
        ids.into_iter().for_each(|id| self.claim(id, commands));
    }

    fn lose(&mut self) {
        (self.joined, self.contended) = (false, false);
        for running in &mut self.running {
            running.lease = None;
        }
        for member in self.members.values_mut() {
            // They were the last arbiter's.
            member.spare.clear();
            member.claims.clear();
        }
        self.members.retain(|_, member| !member.waiting.is_empty());
    }

    fn tick(&mut self, now: Time, commands: &mut Vec<Command>) {
        if now.since(self.ticked_at) >= JUMP {
            // This process was stopped, not the arbiter: restart the arbiter's timeout.
            self.heard_at = now;
        }
        self.ticked_at = now;
        if self.joined {
            self.give_idle_back(now, commands);
        }
        if self.joined && self.remote && now.since(self.heard_at) >= SILENT {
            self.lose();
            commands.push(Command::Replace);
        }
    }

    /// A slot that was not used again for a heartbeat is not kept.
    fn give_idle_back(&mut self, now: Time, commands: &mut Vec<Command>) {
        for member in self.members.values_mut() {
            member.spare.retain(|(kept_at, lease)| {
                let idle = now.since(*kept_at) >= HEARTBEAT;
                if idle {
                    let (ticket, moved) = (lease.claim, lease.moved.unwrap_or(0));
                    commands.push(Command::Send(ToArbiter::Done { ticket, moved }));
                }
                !idle
            });
        }
        self.members.retain(|_, member| !member.is_idle());
    }

    fn forget_if_idle(&mut self, id: MemberId) {
        if self.members.get(&id).is_some_and(Member::is_idle) {
            self.members.remove(&id);
        }
    }
}

impl Member {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.claims.is_empty() && self.spare.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Process {
        leases: Leases,
        said: Vec<Command>,
    }

    impl Process {
        fn joined() -> Process {
            let mut process = Process { leases: Leases::default(), said: Vec::new() };
            process.event(Event::Joined { remote: true });
            process
        }

        fn event(&mut self, event: Event) -> Vec<Command> {
            self.said.clear();
            self.leases.handle(Time::default(), event, &mut self.said);
            self.said.clone()
        }

        fn want(&mut self, ticket: Ticket) -> Vec<Command> {
            self.event(Event::Want { ticket, group: 1, member: 1, bytes: 10 })
        }

        fn grant(&mut self, claim: Ticket) -> Vec<Command> {
            self.event(Event::Arbiter(FromArbiter::Grant { ticket: claim }))
        }

        fn contended(&mut self, contended: bool) -> Vec<Command> {
            self.event(Event::Arbiter(FromArbiter::Contended { contended }))
        }
    }

    fn claim(ticket: Ticket, bytes: u64) -> Command {
        Command::Send(ToArbiter::Want { ticket, group: 1, member: 1, bytes })
    }

    fn back(ticket: Ticket, moved: u64) -> Command {
        Command::Send(ToArbiter::Done { ticket, moved })
    }

    #[test]
    fn a_slot_that_nobody_waits_for_is_used_again_without_a_word_and_comes_back_when_somebody_does() {
        let mut process = Process::joined();
        assert_eq!(process.want(100), [claim(1, 10)]);
        assert_eq!(process.grant(1), [Command::Granted { ticket: 100 }]);
        for ticket in 101..150 {
            assert!(process.event(Event::Done { ticket: ticket - 1, moved: 10 }).is_empty());
            assert_eq!(process.want(ticket), [Command::Granted { ticket }], "from the kept slot");
        }
        assert!(process.contended(true).is_empty(), "its only slot is in use");
        assert_eq!(process.event(Event::Done { ticket: 149, moved: 7 }), [back(1, 10)]);
        assert_eq!((process.leases.in_use(), process.leases.spare()), (0, 0));
    }

    #[test]
    fn a_chunk_that_took_a_kept_slot_leaves_its_claim_to_the_next() {
        let mut process = Process::joined();
        process.want(100);
        assert_eq!(process.want(101), [claim(2, 10)]);
        process.grant(1);
        assert_eq!(process.event(Event::Done { ticket: 100, moved: 10 })[0], Command::Granted { ticket: 101 });
        // Nothing waits any more: the arbiter is informed.
        assert!(process.leases.members.is_empty());
        let mut process = Process::joined();
        (100..103).for_each(|ticket| drop(process.want(ticket)));
        process.grant(1);
        process.event(Event::Done { ticket: 100, moved: 10 });
        assert!(process.want(103).is_empty(), "a claim is free for it");
    }

    #[test]
    fn under_contention_every_claim_is_as_long_as_its_chunk() {
        let mut process = Process::joined();
        (100..103).for_each(|ticket| drop(process.want(ticket)));
        process.grant(1);
        process.event(Event::Done { ticket: 100, moved: 10 });
        process.event(Event::Want { ticket: 103, group: 1, member: 1, bytes: 4 });
        // Claims 2 and 3 stand for chunks of 10 and 4 bytes.
        let said = process.contended(true);
        assert_eq!(said, [Command::Send(ToArbiter::Withdraw { ticket: 3 }), claim(4, 4)]);
    }

    #[test]
    fn a_grant_that_crossed_its_withdrawal_goes_back() {
        let mut process = Process::joined();
        process.want(100);
        assert_eq!(process.event(Event::Withdraw { ticket: 100 }), [Command::Send(ToArbiter::Withdraw { ticket: 1 })]);
        assert_eq!(process.grant(1), [back(1, 0)]);
        assert_eq!(process.grant(77), [back(77, 0)]);
    }

    #[test]
    fn a_new_arbiter_hears_what_is_held_and_wanted() {
        let mut process = Process::joined();
        process.want(100);
        process.grant(1);
        process.want(101);
        process.event(Event::Lost);
        assert!(process.leases.contended());
        process.want(102);
        let said = process.event(Event::Joined { remote: true });
        let held = Command::Send(ToArbiter::Held { ticket: 3, group: 1, member: 1 });
        assert_eq!(said, [held, claim(4, 10), claim(5, 10)]);
        process.contended(true);
        assert_eq!(process.event(Event::Done { ticket: 100, moved: 10 }), [back(3, 0)]);
    }

    #[test]
    fn a_silent_arbiter_is_replaced_but_not_by_a_process_that_was_stopped_itself() {
        let mut process = Process::joined();
        let mut at = |leases: &mut Leases, seconds: f64| {
            process.said.clear();
            leases.handle(Time::from_secs_f64(seconds), Event::Tick, &mut process.said);
            process.said.clone()
        };
        let mut leases = std::mem::take(&mut process.leases);
        for tick in 1..6 {
            assert!(at(&mut leases, f64::from(tick) * 0.5).is_empty());
        }
        assert_eq!(at(&mut leases, 3.0), [Command::Replace]);
        let mut process = Process::joined();
        assert!(at(&mut process.leases, 100.0).is_empty());
    }
}
