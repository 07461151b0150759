//! The sender's half: which range leaves a process next, when the uplink of its host is full.
//! Design: docs/explanation/design-data.md, "A sender delays ranges only while its link is full".
//!
//! Receivers grant slots by weight, so a link into a host is shared by weight. A link out of a host is not: if two
//! receivers fetch from it for different jobs, each uses all its slots, and TCP shares the uplink by flows. So a sender
//! starts as many ranges in parallel as a receiver does. Further ranges wait in the same fair queue, with the same
//! weights.
//!
//! Only a full uplink delays ranges. If it has room, the active ranges wait for their receivers, and a bound on their
//! number would make fast receivers wait behind slow ones. So a host that does not know the rate of its link delays
//! nothing.

use super::fair::{FairQueue, Request, Shares};
use super::{GroupId, MemberId, Ticket};
use crate::shares::FlowsPerHost;
use crate::units::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// How often the uplink's load is checked while ranges wait.
pub const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A range that has waited this long is sent out of turn: long before its receiver abandons this sender
/// ([`crate::defaults::STALL`]).
pub const LONGEST: Duration = Duration::from_secs(2);
/// Samples over a longer time than this are ignored.
const OLD: Duration = Duration::from_millis(500);
/// An uplink that carries this fraction of its rate is full: headers take 5 %, and the congestion control leaves some
/// idle.
const FULL: f64 = 0.8;

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Shares {
        flows_per_host: FlowsPerHost,
        shares: Shares,
    },
    /// A receiver asks for a range of so many bytes.
    Asks {
        ticket: Ticket,
        group: GroupId,
        member: MemberId,
        bytes: u64,
    },
    /// Bytes that the host has sent since it was started: the answer to [`Command::Look`].
    Looked {
        sent: u64,
    },
    /// [`LOOK_EVERY`] has passed while a range waits.
    Tick,
    /// A range has waited for [`LONGEST`].
    Late {
        ticket: Ticket,
    },
    /// A range was sent, or was aborted after so many bytes.
    Done {
        ticket: Ticket,
        moved: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send the range now.
    Send { ticket: Ticket },
    /// Report how much was sent.
    Look,
}

/// The ranges that one process sends.
pub struct Uplink {
    queue: FairQueue,
    bits_per_sec: Option<u64>,
    /// Ranges in parallel.
    most: u32,
    ranges: BTreeMap<Ticket, Range>,
    /// Additional ranges, since the uplink had room: doubled with each check that finds room, halved with each that
    /// finds it full.
    more: u32,
    looked: Option<(Time, u64)>,
}

struct Range {
    group: GroupId,
    member: MemberId,
    /// `None`: it waits.
    charged: Option<u64>,
}

impl Uplink {
    /// `bits_per_sec`: the host's rate, if it is known.
    pub fn new(flows_per_host: FlowsPerHost, bits_per_sec: Option<u64>) -> Uplink {
        Uplink {
            queue: FairQueue::default(),
            bits_per_sec,
            most: flows_per_host.most(),
            ranges: BTreeMap::new(),
            more: flows_per_host.most(),
            looked: None,
        }
    }

    pub fn handle(&mut self, now: Time, event: Event, commands: &mut Vec<Command>) {
        match event {
            Event::Shares { flows_per_host, shares } => {
                self.most = flows_per_host.most();
                self.queue.set_shares(&shares);
            }
            Event::Asks { ticket, group, member, bytes } => {
                self.ranges.insert(ticket, Range { group, member, charged: None });
                self.queue.push(group, member, Request { client: 0, ticket, bytes });
            }
            Event::Looked { sent } => self.looked(now, sent),
            Event::Tick => {}
            Event::Late { ticket } => {
                let late = self.ranges.get_mut(&ticket).filter(|range| range.charged.is_none());
                if let Some(range) = late.filter(|own| self.queue.withdraw(own.group, own.member, 0, ticket)) {
                    range.charged = Some(0);
                    self.queue.adopt(range.group, range.member);
                    commands.push(Command::Send { ticket });
                }
            }
            Event::Done { ticket, moved } => {
                if let Some(range) = self.ranges.remove(&ticket) {
                    match range.charged {
                        Some(charged) => self.queue.done(range.group, range.member, charged, moved),
                        None => drop(self.queue.withdraw(range.group, range.member, 0, ticket)),
                    }
                }
            }
        }
        self.send(now, commands);
    }

    /// Ranges that are under way.
    pub fn under_way(&self) -> u32 {
        self.queue.in_use()
    }

    pub fn waiting(&self) -> usize {
        self.queue.waiting()
    }

    fn looked(&mut self, now: Time, sent: u64) {
        let Some(rate) = self.bits_per_sec else { return };
        if let Some((at, before)) = self.looked {
            let elapsed = now.since(at);
            let bits = sent.saturating_sub(before) as f64 * 8.0;
            let full = bits >= FULL * rate as f64 * elapsed.as_secs_f64();
            if elapsed <= OLD {
                // Unused additional ranges must not delay the halving: weights have no effect until then.
                let used = self.queue.in_use().saturating_sub(self.most);
                self.more = if full { self.more.min(used) / 2 } else { self.more.saturating_add(1).saturating_mul(2) };
            }
        }
        self.looked = Some((now, sent));
    }

    fn send(&mut self, now: Time, commands: &mut Vec<Command>) {
        let most = if self.bits_per_sec.is_some() { self.most.saturating_add(self.more) } else { u32::MAX };
        let beyond = self.queue.in_use() as usize + self.queue.waiting() > self.most as usize;
        if self.bits_per_sec.is_some() && beyond && self.looked.is_none_or(|(at, _)| now.since(at) >= LOOK_EVERY) {
            commands.push(Command::Look);
        }
        while self.queue.in_use() < most
            && let Some(turn) = self.queue.pop(self.most)
        {
            let range = self.ranges.get_mut(&turn.request.ticket).expect("it waits until it leaves");
            range.charged = Some(turn.request.bytes);
            commands.push(Command::Send { ticket: turn.request.ticket });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fair::{Level, QueueShare};
    use super::*;
    use crate::random::SplitMix;
    use proptest::prelude::*;

    const CHUNK: u64 = 256 << 10;
    const RATE: u64 = 1_000_000_000;

    fn shares(weights: &[f64]) -> Event {
        let queues = weights.iter().zip(0..).map(|(weight, queue)| QueueShare { queue, weight: *weight }).collect();
        Event::Shares { flows_per_host: FlowsPerHost::Fixed(10), shares: Shares { level: Level::Groups, queues } }
    }

    /// Each receiver keeps so many ranges of one job requested; returns the bytes that each job got, in virtual time.
    /// The uplink has its rate, shared by the ranges that are under way, of which each receiver takes at most
    /// `receives`.
    fn run(uplink: &mut Uplink, receivers: u64, asks: u64, receives: f64, seconds: f64) -> (Vec<u64>, u32) {
        let (mut sent, mut got, mut most) = (0u64, vec![0u64; receivers as usize], 0);
        let (mut left, mut commands) = (BTreeMap::<Ticket, f64>::new(), Vec::new());
        let step = Duration::from_millis(1);
        let (mut next, mut now, mut dice) = (0, Time(0), SplitMix(1));
        for job in 0..receivers {
            for _ in 0..asks {
                let event = Event::Asks { ticket: next * receivers + job, group: job, member: job, bytes: CHUNK };
                uplink.handle(now, event, &mut commands);
                next += 1;
            }
        }
        while now.since(Time(0)).as_secs_f64() < seconds {
            if commands.contains(&Command::Look) {
                uplink.handle(now, Event::Looked { sent }, &mut commands);
            }
            for command in std::mem::take(&mut commands) {
                if let Command::Send { ticket } = command {
                    left.insert(ticket, CHUNK as f64);
                }
            }
            most = most.max(uplink.under_way());
            let fair = 2.0 * RATE as f64 / 8.0 * step.as_secs_f64() / left.len().max(1) as f64;
            let mut flows = vec![0.0; receivers as usize];
            left.keys().for_each(|ticket| flows[(ticket % receivers) as usize] += 1.0);
            let mut done = Vec::new();
            for (ticket, bytes) in &mut left {
                let job = (*ticket % receivers) as usize;
                // No two flows have the same speed at any time: chunks that always end together share by whole slots.
                let moved = (fair * dice.unit()).min(receives / 8.0 * step.as_secs_f64() / flows[job]).min(*bytes);
                *bytes -= moved;
                sent += moved as u64;
                if *bytes < 1.0 {
                    done.push(*ticket);
                }
            }
            now = now + step;
            for ticket in done {
                left.remove(&ticket);
                let job = ticket % receivers;
                got[job as usize] += CHUNK;
                uplink.handle(now, Event::Done { ticket, moved: CHUNK }, &mut commands);
                let event = Event::Asks { ticket: next * receivers + job, group: job, member: job, bytes: CHUNK };
                uplink.handle(now, event, &mut commands);
                next += 1;
            }
        }
        (got, most)
    }

    #[test]
    fn a_full_uplink_is_shared_by_weights() {
        let mut uplink = Uplink::new(FlowsPerHost::Fixed(10), Some(RATE));
        uplink.handle(Time(0), shares(&[0.25, 0.75]), &mut Vec::new());
        let (got, _) = run(&mut uplink, 2, 10, RATE as f64, 5.0);
        let part = got[1] as f64 / (got[0] + got[1]) as f64;
        assert!((part - 0.75).abs() < 0.03, "{part}");
    }

    #[test]
    fn an_uplink_that_does_not_know_its_rate_holds_nothing_back() {
        let mut uplink = Uplink::new(FlowsPerHost::Fixed(10), None);
        uplink.handle(Time(0), shares(&[0.25, 0.75]), &mut Vec::new());
        let (got, most) = run(&mut uplink, 2, 10, RATE as f64, 2.0);
        assert_eq!(most, 20);
        assert!((got[0] as f64 / got[1] as f64 - 1.0).abs() < 0.05, "TCP's own way: {got:?}");
    }

    #[test]
    fn behind_slow_receivers_nobody_waits() {
        let mut uplink = Uplink::new(FlowsPerHost::Fixed(10), Some(RATE));
        let (_, most) = run(&mut uplink, 3, 10, RATE as f64 / 10.0, 2.0);
        assert_eq!(most, 30, "each takes a tenth of the link: it has room");
    }

    proptest! {
        /// Whatever is asked, broken off and late: each range leaves at most once, and nothing is kept.
        #[test]
        fn every_range_leaves_once(seed in any::<u64>()) {
            let mut dice = SplitMix(seed);
            let mut uplink = Uplink::new(FlowsPerHost::Fixed(1 + (dice.next() % 5) as u32), Some(RATE));
            let (mut waits, mut leaves, mut next) = (Vec::new(), Vec::new(), 0);
            let (mut now, mut sent) = (Time(0), 0);
            for step in 0..400 {
                now = now + Duration::from_millis(dice.next() % 40);
                sent += dice.next() % 10_000_000;
                let mut commands = Vec::new();
                match dice.next() % (if step < 300 { 6 } else { 3 }) {
                    0 if !leaves.is_empty() => {
                        let ticket = leaves.swap_remove((dice.next() % leaves.len() as u64) as usize);
                        uplink.handle(now, Event::Done { ticket, moved: (dice.next() % CHUNK) }, &mut commands);
                    }
                    1 if !waits.is_empty() => {
                        let ticket = waits[(dice.next() % waits.len() as u64) as usize];
                        uplink.handle(now, Event::Late { ticket }, &mut commands);
                    }
                    2 => uplink.handle(now, Event::Looked { sent }, &mut commands),
                    3 if step % 50 == 0 => uplink.handle(now, shares(&[0.5, 0.3, 0.2]), &mut commands),
                    _ if step < 300 => {
                        waits.push(next);
                        let (group, member) = ((dice.next() % 4), 10 + (dice.next() % 8));
                        uplink.handle(now, Event::Asks { ticket: next, group, member, bytes: CHUNK }, &mut commands);
                        next += 1;
                    }
                    _ => {}
                }
                for command in commands {
                    if let Command::Send { ticket } = command {
                        let at = waits.iter().position(|own| *own == ticket);
                        leaves.push(waits.swap_remove(at.expect("it waited")));
                    }
                }
                prop_assert_eq!((uplink.waiting(), uplink.under_way() as usize), (waits.len(), leaves.len()));
            }
            for ticket in waits.into_iter().chain(leaves) {
                uplink.handle(now, Event::Done { ticket, moved: 0 }, &mut Vec::new());
            }
            prop_assert!(uplink.ranges.is_empty() && uplink.waiting() == 0 && uplink.under_way() == 0);
        }
    }
}
