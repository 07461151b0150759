//! Weighted fair queueing of requests: by groups, and equally by the members of each; or by members only.
//!
//! Requests ask for chunks. A request begins where the last request of its queue ended, or at the virtual time if that is later. It ends as many bytes
//! later as it has, divided by the weight of its queue. The virtual time is the latest begin of a granted request, as in
//! start-time fair queueing (Goyal, Vin and Cheng 1996, section 2). The request that **ends** first is granted first, as in
//! self-clocked fair queueing (Golestani 1994). Thus a newcomer of little weight waits: if the request that begins first came
//! first, a small transfer of a favoured job would wait for a chunk of every other job. And a newcomer of large weight does not:
//! if the virtual time were where the granted request ends, a chunk of little weight would put the newcomer behind all others.
//! The levels follow Bennett and Zhang (1996): a group's turn is decided among groups, and within the group
//! the same rule decides among its members. Where shares are given to groups, members of a group count alike. Where they
//! are given to members ([`Level::Members`]), each member has a queue of its own, whatever its group.
//!
//! Over any time in which two queues wait and neither is at its cap, the bytes charged to them differ, each divided by its
//! weight, by at most |b1/w1 - b2/w2| <= c/w1 + c/w2 + c/min(w1, w2), where c is the largest chunk. The request of queue 1 that is
//! granted ends no later than the one that waits in queue 2, so queue 1 is never more than c/w2 ahead, and at first queue 2 is
//! ahead by at most c/w1, or by c/w2 where queue 1 is new. What a queue was charged for and did not get, because a chunk
//! broke off, it may have once more on top. And what its slots carried beyond what they were granted for, while the process did not
//! know of others, makes it wait so much longer: it is charged at the end of the chunk.

use super::{ClientId, GroupId, MemberId, Ticket};
use crate::shares::{cap, caps_bind};
use std::collections::{BTreeMap, VecDeque};

/// A place in virtual time: bytes, divided by a weight, in units of 2^-20. An integer, because it only grows while
/// requests wait: in floating point a small request of one queue vanished beside large ones of a queue that weighs a
/// billionth of it. There is room for 2^47 of the largest chunks at the smallest weight.
type Tag = i128;

const UNITS_PER_BYTE: f64 = (1 << 20) as f64;
/// The smallest fraction of a host's bytes that counts.
const WEIGHT_MIN: f64 = 1e-9;

/// How far these bytes advance a queue of this weight.
fn advance(bytes: f64, weight: f64) -> Tag {
    (bytes * UNITS_PER_BYTE / weight).round() as Tag
}

/// A chunk that waits for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub client: ClientId,
    pub ticket: Ticket,
    /// Charged when it is granted.
    pub bytes: u64,
}

/// A granted request, and its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub group: GroupId,
    pub member: MemberId,
    pub request: Request,
}

/// What has weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Groups have weights; the waiting members of a group share its fraction equally.
    #[default]
    Groups,
    /// To each member.
    Members,
}

impl Level {
    /// In whose queue a member's requests wait.
    pub fn queue(self, group: GroupId, member: MemberId) -> QueueId {
        match self {
            Level::Groups => group,
            Level::Members => member,
        }
    }
}

/// A group or a member, by [`Level`].
pub type QueueId = u64;

/// Weight of a queue. While others want their slots it may hold [`crate::shares::cap`] of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueShare {
    pub queue: QueueId,
    /// Fraction of the host's bytes.
    pub weight: f64,
}

/// The shares of a host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shares {
    pub level: Level,
    /// In the order of arrival: the first one wins a tie.
    pub queues: Vec<QueueShare>,
}

/// The waiting requests of one host, and how many slots each queue and member holds.
#[derive(Default)]
pub struct FairQueue {
    level: Level,
    /// Weight and rank of each queue that the Mission Controller has named: those of the whole cluster.
    shares: BTreeMap<QueueId, (f64, u32)>,
    /// Those that want slots here, in no particular order; found by scanning, since a host has few at a time.
    queues: Vec<Queue>,
    virtual_time: Tag,
    waiting: usize,
    in_use: u32,
}

struct Queue {
    id: QueueId,
    /// Absent until the Mission Controller has named it.
    weight: Option<f64>,
    /// Its place among the shares, which are in the order of arrival: the first one wins a tie.
    rank: u32,
    waiting: usize,
    in_use: u32,
    /// Where its last request ended: bytes charged, divided by the weight.
    tag: Tag,
    /// It was skipped because it held its cap. It gets no credit for that time.
    was_capped: bool,
    /// In bytes, because members of a queue count alike.
    virtual_time: i128,
    members: Vec<Member>,
}

struct Member {
    id: MemberId,
    group: GroupId,
    waiting: VecDeque<Request>,
    in_use: u32,
    /// In bytes.
    tag: i128,
}

impl FairQueue {
    /// Replaces all shares. A queue that is not named any more is forgotten once it is idle. If the level changes, all
    /// waiting requests change their queues, and all tags are reset.
    pub fn set_shares(&mut self, shares: &Shares) {
        if shares.level != self.level {
            self.level = shares.level;
            self.sort_anew();
        }
        let before: Vec<(QueueId, f64)> =
            (0..self.queues.len()).map(|at| (self.queues[at].id, self.weight(at))).collect();
        let named = shares.queues.iter().zip(0..);
        self.shares = named.map(|(share, rank)| (share.queue, (share.weight.max(WEIGHT_MIN), rank))).collect();
        for queue in &mut self.queues {
            (queue.weight, queue.rank) = named_as(&self.shares, queue.id);
        }
        // Keep each queue's lead in bytes: a chunk that was much for a small weight is little for a large one.
        for (id, old) in before {
            if let Some(at) = self.queues.iter().position(|queue| queue.id == id) {
                let ahead = self.queues[at].tag - self.virtual_time;
                self.queues[at].tag = self.virtual_time + (ahead as f64 * old / self.weight(at)).round() as Tag;
            }
        }
        self.forget_idle();
    }

    /// Moves every member to its current queue.
    fn sort_anew(&mut self) {
        for member in std::mem::take(&mut self.queues).into_iter().flat_map(|queue| queue.members) {
            if !member.idle() {
                let at = self.find_or_add(self.level.queue(member.group, member.id));
                let queue = &mut self.queues[at];
                queue.waiting += member.waiting.len();
                queue.in_use += member.in_use;
                queue.members.push(Member { tag: 0, ..member });
            }
        }
    }

    /// Slots that are held.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Slots held and requests waiting of one queue.
    pub fn of(&self, queue: QueueId) -> (u32, usize) {
        self.queues.iter().find(|own| own.id == queue).map_or((0, 0), |own| (own.in_use, own.waiting))
    }

    /// Bytes that a queue is ahead of the virtual time; below 0: behind it. More than a chunk ahead is what was charged when a
    /// chunk ended, and more than a chunk behind is what was given back.
    pub fn lead(&self, queue: QueueId) -> f64 {
        let at = self.queues.iter().position(|own| own.id == queue);
        at.map_or(0.0, |at| (self.queues[at].tag - self.virtual_time) as f64 / UNITS_PER_BYTE * self.weight(at))
    }

    /// Whether requests wait while at least two members hold slots or wait.
    pub fn members_compete(&self) -> bool {
        let wanting = self.queues.iter().flat_map(|queue| &queue.members).filter(|member| !member.idle());
        self.waiting > 0 && wanting.take(2).count() > 1
    }

    /// Adds a request at the end of its member's queue.
    pub fn push(&mut self, group: GroupId, member: MemberId, request: Request) {
        let virtual_time = self.virtual_time;
        let at = self.find_or_add(self.level.queue(group, member));
        let queue = &mut self.queues[at];
        if queue.waiting == 0 {
            // It gets no credit for time in which it did not wait.
            queue.tag = queue.tag.max(virtual_time);
        }
        queue.waiting += 1;
        let virtual_time = queue.virtual_time;
        let member = queue.member(group, member);
        if member.waiting.is_empty() {
            member.tag = member.tag.max(virtual_time);
        }
        member.waiting.push_back(request);
        self.waiting += 1;
    }

    /// Takes out a request that waits; false if there is none.
    pub fn withdraw(&mut self, group: GroupId, member: MemberId, client: ClientId, ticket: Ticket) -> bool {
        let Some(at) = self.position(group, member) else { return false };
        let found = self.queues[at].members.iter_mut().find(|own| own.id == member).and_then(|member| {
            let is_it = |request: &Request| (request.client, request.ticket) == (client, ticket);
            let at = member.waiting.iter().rposition(is_it)?;
            member.waiting.remove(at)
        });
        if found.is_some() {
            self.queues[at].waiting -= 1;
            self.waiting -= 1;
            self.forget_if_idle(at);
        }
        found.is_some()
    }

    /// Takes out all requests of a client.
    pub fn withdraw_all(&mut self, client: ClientId) {
        for queue in &mut self.queues {
            for member in &mut queue.members {
                let before = member.waiting.len();
                member.waiting.retain(|request| request.client != client);
                let gone = before - member.waiting.len();
                queue.waiting -= gone;
                self.waiting -= gone;
            }
        }
        self.settle_if_idle();
        self.forget_idle();
    }

    /// The request whose turn it is, charged and with a slot of `budget`; `None`: nothing waits.
    pub fn pop(&mut self, budget: u32) -> Option<Turn> {
        if self.waiting == 0 {
            return None;
        }
        // With fewer slots than twice the queues that want them, bytes alone decide. Weights are for the whole cluster;
        // the queues with requests here share all slots.
        let wanting = (0..self.queues.len()).filter(|at| !self.queues[*at].idle());
        let (count, total) = wanting.fold((0, 0.0), |(count, total), at| (count + 1, total + self.weight(at)));
        let (caps_bind, average) = (caps_bind(budget, count), self.average());
        let virtual_time = self.virtual_time;
        let mut best: Option<(Key, usize)> = None;
        for (at, queue) in self.queues.iter_mut().enumerate().filter(|(_, queue)| queue.waiting > 0) {
            let part = queue.weight.unwrap_or(average) / total;
            let capped = caps_bind && queue.in_use >= cap(budget, part);
            if queue.was_capped && !capped {
                queue.tag = queue.tag.max(virtual_time);
            }
            queue.was_capped = capped;
            let key = (capped, queue.end(queue.weight.unwrap_or(average)), queue.rank, queue.id);
            if best.is_none_or(|(best, _)| key < best) {
                best = Some((key, at));
            }
        }
        let at = best?.1;
        let weight = self.weight(at);
        let queue = &mut self.queues[at];
        self.virtual_time = self.virtual_time.max(queue.tag);
        let turn = queue.pop()?;
        queue.tag += advance(turn.request.bytes as f64, weight);
        queue.waiting -= 1;
        queue.in_use += 1;
        self.waiting -= 1;
        self.in_use += 1;
        Some(turn)
    }

    /// A slot is free again: it was charged `charged` bytes and moved `moved`. What it did not move is given back. What it moved
    /// on top is charged now. If no other queue waits, no request was delayed by it: the virtual time advances, so that
    /// the queue need not wait later.
    pub fn done(&mut self, group: GroupId, member: MemberId, charged: u64, moved: u64) {
        let Some(at) = self.position(group, member) else { return };
        let weight = self.weight(at);
        let difference = i128::from(moved) - i128::from(charged);
        let queue = &mut self.queues[at];
        let further = advance(difference as f64, weight);
        queue.tag += further;
        if difference > 0 && queue.waiting == self.waiting {
            self.virtual_time += further;
        }
        queue.in_use -= 1;
        self.in_use -= 1;
        let member = queue.member(group, member);
        member.tag += difference;
        member.in_use -= 1;
        self.forget_if_idle(at);
    }

    /// A slot that was granted elsewhere, before this queue existed: it is counted, and not charged.
    pub fn adopt(&mut self, group: GroupId, member: MemberId) {
        let at = self.find_or_add(self.level.queue(group, member));
        self.queues[at].in_use += 1;
        self.queues[at].member(group, member).in_use += 1;
        self.in_use += 1;
    }

    fn position(&self, group: GroupId, member: MemberId) -> Option<usize> {
        let id = self.level.queue(group, member);
        self.queues.iter().position(|queue| queue.id == id)
    }

    fn find_or_add(&mut self, id: QueueId) -> usize {
        if let Some(at) = self.queues.iter().position(|queue| queue.id == id) {
            return at;
        }
        self.forget_idle();
        let tag = self.virtual_time;
        let (weight, rank) = named_as(&self.shares, id);
        self.queues.push(Queue {
            id,
            weight,
            rank,
            waiting: 0,
            in_use: 0,
            tag,
            was_capped: false,
            virtual_time: 0,
            members: Vec::new(),
        });
        self.queues.len() - 1
    }

    /// The weight of a queue: the mean of the others if the Mission Controller has not set it yet.
    fn weight(&self, at: usize) -> f64 {
        self.queues[at].weight.unwrap_or(self.average())
    }

    fn average(&self) -> f64 {
        1.0 / self.shares.len().max(1) as f64
    }

    /// Forgets a member or queue that is idle. One that is ahead of the others is kept: it has had its bytes.
    fn forget_if_idle(&mut self, at: usize) {
        if self.settle_if_idle() {
            self.forget_idle();
            return;
        }
        let queue = &mut self.queues[at];
        if queue.is_forgotten(self.virtual_time) {
            self.queues.swap_remove(at);
            return;
        }
        let virtual_time = queue.virtual_time;
        queue.members.retain(|member| !member.idle() || member.tag > virtual_time);
    }

    /// If nothing waits and nothing is held, nobody is ahead of anybody: all begin where the last one ended.
    fn settle_if_idle(&mut self) -> bool {
        let idle = self.waiting == 0 && self.in_use == 0;
        if idle {
            self.virtual_time = self.queues.iter().map(|queue| queue.tag).fold(self.virtual_time, Tag::max);
        }
        idle
    }

    fn forget_idle(&mut self) {
        let virtual_time = self.virtual_time;
        self.queues.retain(|queue| !queue.is_forgotten(virtual_time));
        for queue in self.queues.iter_mut().filter(|queue| queue.idle()) {
            queue.members.clear();
        }
    }
}

/// Weight and rank of a queue; one that was not named is last.
fn named_as(shares: &BTreeMap<QueueId, (f64, u32)>, id: QueueId) -> (Option<f64>, u32) {
    shares.get(&id).map_or((None, u32::MAX), |(weight, rank)| (Some(*weight), *rank))
}

/// What decides whose turn it is: whether it holds its cap, where its next request ends, its rank, and at last its id.
type Key = (bool, Tag, u32, QueueId);

impl Queue {
    fn idle(&self) -> bool {
        self.waiting == 0 && self.in_use == 0
    }

    fn member(&mut self, group: GroupId, id: MemberId) -> &mut Member {
        let at = self.members.iter().position(|member| member.id == id).unwrap_or_else(|| {
            self.members.push(Member { id, group, waiting: VecDeque::new(), in_use: 0, tag: self.virtual_time });
            self.members.len() - 1
        });
        &mut self.members[at]
    }

    fn is_forgotten(&self, virtual_time: Tag) -> bool {
        self.idle() && self.tag <= virtual_time
    }

    /// Where its next request ends, if the queue weighs so much.
    fn end(&self, weight: f64) -> Tag {
        let bytes = self.next().and_then(|at| self.members[at].waiting.front()).map_or(0, |request| request.bytes);
        self.tag + advance(bytes as f64, weight)
    }

    /// The member whose request is granted next.
    fn next(&self) -> Option<usize> {
        let ends = self.members.iter().enumerate().filter_map(|(at, member)| Some((member.end()?, member.id, at)));
        ends.min().map(|(_, _, at)| at)
    }

    fn pop(&mut self) -> Option<Turn> {
        let at = self.next()?;
        let member = &mut self.members[at];
        let request = member.waiting.pop_front()?;
        self.virtual_time = self.virtual_time.max(member.tag);
        member.tag += i128::from(request.bytes);
        member.in_use += 1;
        Some(Turn { group: member.group, member: member.id, request })
    }
}

impl Member {
    /// Where its next request ends; `None`: it has none.
    fn end(&self) -> Option<i128> {
        self.waiting.front().map(|request| self.tag + i128::from(request.bytes))
    }

    fn idle(&self) -> bool {
        self.waiting.is_empty() && self.in_use == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 1 << 20;

    fn share(queue: QueueId, weight: f64) -> QueueShare {
        QueueShare { queue, weight }
    }

    fn groups(shares: &[QueueShare]) -> Shares {
        Shares { level: Level::Groups, queues: shares.to_vec() }
    }

    fn members(shares: &[QueueShare]) -> Shares {
        Shares { level: Level::Members, queues: shares.to_vec() }
    }

    fn request(ticket: Ticket, bytes: u64) -> Request {
        Request { client: 0, ticket, bytes }
    }

    /// Backlogged members of (group, member), `rounds` chunks one after the other through `budget` slots; bytes of each.
    fn backlogged(
        budget: u32,
        shares: &Shares,
        members: &[(GroupId, MemberId)],
        rounds: u64,
    ) -> BTreeMap<(GroupId, MemberId), u64> {
        let mut queue = FairQueue::default();
        queue.set_shares(shares);
        let mut got = BTreeMap::new();
        for &(group, member) in members {
            (0..2).for_each(|ticket| queue.push(group, member, request(ticket, CHUNK)));
        }
        let mut running = VecDeque::new();
        for ticket in 0..rounds {
            while queue.in_use() < budget {
                let Some(turn) = queue.pop(budget) else { break };
                queue.push(turn.group, turn.member, request(ticket, CHUNK));
                running.push_back(turn);
            }
            let turn: Turn = running.pop_front().unwrap();
            *got.entry((turn.group, turn.member)).or_insert(0) += CHUNK;
            queue.done(turn.group, turn.member, CHUNK, CHUNK);
        }
        got
    }

    #[test]
    fn bytes_follow_the_weights_of_groups_and_members_of_a_group_get_alike() {
        for (a, b) in [(0.7, 0.3), (8.0 / 9.0, 1.0 / 9.0)] {
            // The first group has three members: it gets no more for that.
            let members = [(1, 10), (1, 11), (1, 12), (2, 20)];
            let got = backlogged(2, &groups(&[share(1, a), share(2, b)]), &members, 3000);
            let of = |member| got[&member] as f64 / (3000 * CHUNK) as f64;
            for member in [10, 11, 12] {
                assert!((of((1, member)) - a / 3.0).abs() < 0.01, "{got:?}");
            }
            assert!((of((2, 20)) - b).abs() < 0.01, "{got:?}");
        }
    }

    /// R6: after large chunks of a queue with a tiny weight, 1,000 of 1,000 small requests were granted to one of two
    /// queues that weigh the same.
    #[test]
    fn large_chunks_at_a_tiny_weight_do_not_swallow_small_requests() {
        let mut queue = FairQueue::default();
        queue.set_shares(&groups(&[share(1, 0.5), share(2, 0.5), share(3, 1e-9)]));
        // Something always waits, so virtual time is never settled.
        (0..20).for_each(|ticket| queue.push(3, 3, request(ticket, 1 << 30)));
        for _ in 0..10 {
            queue.pop(1).unwrap();
            queue.done(3, 3, 1 << 30, 1 << 30);
        }
        let mut got = BTreeMap::new();
        for ticket in 0..1002 {
            (1..=2).filter(|_| ticket < 2).for_each(|group| queue.push(group, group, request(ticket, 100)));
            let turn = queue.pop(1).unwrap();
            queue.done(turn.group, turn.member, 100, 100);
            queue.push(turn.group, turn.member, request(ticket, 100));
            *got.entry(turn.group).or_insert(0) += 1;
        }
        assert_eq!(got, BTreeMap::from([(1, 501), (2, 501)]));
    }

    proptest::proptest! {
        /// The bound of this module's documentation, for priorities from 1e-9 to 1e9, after any history.
        #[test]
        fn two_queues_that_wait_are_never_further_apart_than_their_chunks(
            exponents in [-9.0..9.0f64, -9.0..9.0, -9.0..9.0],
            sizes in proptest::collection::vec(1..(64u64 << 20), 3..40),
            history in 0u64..40,
        ) {
            let priorities = exponents.map(|exponent| 10f64.powf(exponent));
            let total: f64 = priorities.iter().sum();
            let weights = priorities.map(|priority| (priority / total).max(WEIGHT_MIN));
            let shares: Vec<QueueShare> = (1..).zip(weights).map(|(queue, weight)| share(queue, weight)).collect();
            let mut queue = FairQueue::default();
            queue.set_shares(&groups(&shares));
            // Alone for a while, and never idle.
            (0..2 + history).for_each(|ticket| queue.push(3, 3, request(ticket, 1 << 30)));
            for _ in 0..history {
                queue.pop(1).unwrap();
                queue.done(3, 3, 1 << 30, 1 << 30);
            }
            let largest = *sizes.iter().max().unwrap() as f64;
            let mut sizes = sizes.iter().copied().cycle();
            for group in [1, 2] {
                (0..2).for_each(|ticket| queue.push(group, group, request(ticket, sizes.next().unwrap())));
            }
            let mut charged = [0.0; 2];
            let bound = largest * (1.0 / weights[0] + 1.0 / weights[1] + 1.0 / weights[0].min(weights[1]));
            for ticket in 2..400 {
                let turn = queue.pop(1).unwrap();
                queue.done(turn.group, turn.member, turn.request.bytes, turn.request.bytes);
                if turn.group == 3 {
                    queue.push(3, 3, request(ticket, 1 << 30));
                    continue;
                }
                queue.push(turn.group, turn.member, request(ticket, sizes.next().unwrap()));
                let at = turn.group as usize - 1;
                charged[at] += turn.request.bytes as f64 / weights[at];
                proptest::prop_assert!((charged[0] - charged[1]).abs() <= bound * (1.0 + 1e-9), "{charged:?} {weights:?}");
            }
        }
    }

    #[test]
    fn where_members_have_weights_their_groups_count_for_nothing() {
        let shares = members(&[share(10, 0.5), share(11, 0.25), share(20, 0.25)]);
        let got = backlogged(2, &shares, &[(1, 10), (1, 11), (2, 20)], 3000);
        for (member, part) in [((1, 10), 0.5), ((1, 11), 0.25), ((2, 20), 0.25)] {
            assert!((got[&member] as f64 / (3000 * CHUNK) as f64 - part).abs() < 0.01, "{got:?}");
        }
        // The first is idle: the others share what it leaves.
        let got = backlogged(2, &shares, &[(1, 11), (2, 20)], 3000);
        assert!((got[&(1, 11)] as f64 / (3000 * CHUNK) as f64 - 0.5).abs() < 0.01, "{got:?}");
    }

    #[test]
    fn what_waits_and_what_is_held_stays_when_shares_go_to_members_and_back() {
        let mut queue = FairQueue::default();
        queue.set_shares(&groups(&[share(1, 0.5), share(2, 0.5)]));
        for (group, member) in [(1, 10), (1, 11), (2, 20)] {
            (0..8).for_each(|ticket| queue.push(group, member, request(ticket, CHUNK)));
        }
        let mut held: Vec<Turn> = (0..6).map(|_| queue.pop(9).unwrap()).collect();
        queue.set_shares(&members(&[share(10, 0.8), share(11, 0.1), share(20, 0.1)]));
        assert_eq!((queue.in_use(), queue.waiting()), (6, 18));
        let of = |queue: &FairQueue| [10, 11, 20].map(|member| queue.of(member));
        assert_eq!(of(&queue).iter().map(|(slots, _)| slots).sum::<u32>(), 6);
        for turn in held.drain(..) {
            queue.done(turn.group, turn.member, CHUNK, CHUNK);
        }
        let got: Vec<Turn> = (0..6).map(|_| queue.pop(9).unwrap()).collect();
        assert!(got.iter().filter(|turn| turn.member == 10).count() >= 4, "{got:?}");
        queue.set_shares(&groups(&[share(1, 0.5), share(2, 0.5)]));
        assert_eq!((queue.of(1).0 + queue.of(2).0, queue.waiting()), (6, 12));
        got.iter().for_each(|turn| queue.done(turn.group, turn.member, CHUNK, CHUNK));
        while let Some(turn) = queue.pop(9) {
            queue.done(turn.group, turn.member, CHUNK, CHUNK);
        }
        assert_eq!((queue.in_use(), queue.waiting()), (0, 0));
    }

    #[test]
    fn a_backlogged_group_holds_exactly_its_cap() {
        let mut queue = FairQueue::default();
        queue.set_shares(&groups(&[share(1, 0.7), share(2, 0.3)]));
        for group in [1, 2] {
            (0..20).for_each(|ticket| queue.push(group, group, request(ticket, 1)));
        }
        while queue.in_use() < 10 {
            queue.pop(10).unwrap();
        }
        assert_eq!((queue.of(1).0, queue.of(2).0), (7, 3));
    }

    /// A4: the tag of a group at its cap stood still, so that it monopolised the host once caps did not bind any more.
    #[test]
    fn a_group_that_was_held_at_its_cap_has_saved_nothing_up() {
        let mut queue = FairQueue::default();
        queue.set_shares(&groups(&[share(1, 0.1), share(2, 0.9)]));
        (0..600).for_each(|ticket| queue.push(1, 1, request(ticket, CHUNK)));
        (0..600).for_each(|ticket| queue.push(2, 2, request(ticket, CHUNK)));
        // The first group holds its only slot for long, the second moves much.
        let mut held = Vec::new();
        for _ in 0..200 {
            while queue.in_use() < 10 {
                held.push(queue.pop(10).unwrap());
            }
            let at = held.iter().position(|turn| turn.group == 2).unwrap();
            held.remove(at);
            queue.done(2, 2, CHUNK, CHUNK);
        }
        // Now caps do not bind: both get alike, and not the first alone.
        queue.set_shares(&groups(&[share(1, 0.5), share(2, 0.5)]));
        let mut got = BTreeMap::from([(1, 0), (2, 0)]);
        for _ in 0..40 {
            let turn = held.remove(0);
            queue.done(turn.group, turn.member, CHUNK, CHUNK);
            let turn = queue.pop(3).unwrap();
            *got.get_mut(&turn.group).unwrap() += 1;
            held.push(turn);
        }
        assert!(got[&1] <= 22, "{got:?}");
    }

    #[test]
    fn a_group_that_was_idle_has_saved_nothing_up() {
        let mut queue = FairQueue::default();
        queue.set_shares(&groups(&[share(1, 0.5), share(2, 0.5)]));
        for ticket in 0..100 {
            queue.push(1, 1, request(ticket, 1));
            queue.pop(1).unwrap();
            queue.done(1, 1, 1, 1);
        }
        for ticket in 0..6 {
            queue.push(1, 1, request(ticket, 1));
            queue.push(2, 2, request(ticket, 1));
        }
        let groups: Vec<GroupId> = (0..6)
            .map(|_| {
                let turn = queue.pop(1).unwrap();
                queue.done(turn.group, turn.member, 1, 1);
                turn.group
            })
            .collect();
        assert_eq!(groups.iter().filter(|group| **group == 1).count(), 3, "{groups:?}");
    }

    /// A2: the length of some other chunk was charged and given back.
    #[test]
    fn what_is_charged_is_what_is_moved() {
        let mut queue = FairQueue::default();
        queue.set_shares(&groups(&[share(1, 0.5), share(2, 0.5)]));
        // The first group's chunks all break off after a quarter: it gets four times as many.
        (0..400).for_each(|ticket| queue.push(1, 1, request(ticket, 4 * CHUNK)));
        (0..400).for_each(|ticket| queue.push(2, 2, request(ticket, 4 * CHUNK)));
        let mut moved = BTreeMap::from([(1, 0), (2, 0)]);
        for _ in 0..300 {
            let turn = queue.pop(1).unwrap();
            let came = if turn.group == 1 { CHUNK } else { 4 * CHUNK };
            *moved.get_mut(&turn.group).unwrap() += came;
            queue.done(turn.group, turn.member, 4 * CHUNK, came);
        }
        let apart = moved[&1] as f64 - moved[&2] as f64;
        assert!(apart.abs() <= (8 * CHUNK) as f64, "{moved:?}");
    }

    /// Small requests of a favoured queue are all granted before large ones of queues that weigh a hundredth.
    #[test]
    fn a_newcomer_gets_no_chunk_at_once_whatever_it_weighs() {
        let mut queue = FairQueue::default();
        queue.set_shares(&groups(&[share(1, 0.01), share(2, 0.01), share(3, 0.98)]));
        for group in [1, 2, 3] {
            let bytes = if group == 3 { CHUNK / 8 } else { CHUNK };
            (0..7).for_each(|ticket| queue.push(group, group * 10, request(ticket, bytes)));
        }
        let order: Vec<GroupId> = std::iter::from_fn(|| queue.pop(5)).map(|turn| turn.group).collect();
        assert_eq!(order[..7], [3; 7], "{order:?}");
        assert_eq!(order.len(), 21);
        // Others have waited for long, and one of them has just had a chunk. It has one request at a time.
        let light = (10..20).map(|group| share(group, 0.01)).chain([share(3, 0.9)]).collect::<Vec<_>>();
        queue.set_shares(&groups(&light));
        (10..20).for_each(|group| queue.push(group, group, request(0, CHUNK)));
        queue.pop(1).unwrap();
        for ticket in 0..8 {
            queue.push(3, 30, request(ticket, CHUNK / 8));
            let turn = queue.pop(1).unwrap();
            assert_eq!(turn.group, 3, "request {ticket}");
            queue.done(3, 30, CHUNK / 8, CHUNK / 8);
        }
    }

    /// Without contention, slots carried four times what they were granted for. A newcomer gets no more than its share
    /// for that.
    #[test]
    fn who_moved_more_than_was_granted_while_nobody_waited_need_not_wait_for_it() {
        let mut queue = FairQueue::default();
        queue.set_shares(&groups(&[share(1, 0.5), share(2, 0.5)]));
        (0..40).for_each(|ticket| queue.push(1, 1, request(ticket, CHUNK)));
        let held: Vec<Turn> = (0..10).map(|_| queue.pop(10).unwrap()).collect();
        held.iter().for_each(|_| queue.done(1, 1, CHUNK, 4 * CHUNK));
        (0..40).for_each(|ticket| queue.push(2, 2, request(ticket, CHUNK)));
        let mut got = BTreeMap::from([(1, 0), (2, 0)]);
        for _ in 0..20 {
            let turn = queue.pop(1).unwrap();
            *got.get_mut(&turn.group).unwrap() += 1;
            queue.done(turn.group, turn.member, CHUNK, CHUNK);
        }
        assert!((9..=11).contains(&got[&1]), "{got:?}");
    }

    /// A queue whose chunks break off has one request at a time: it may have what it did not get.
    #[test]
    fn what_is_given_back_is_not_lost_while_nothing_waits() {
        let mut queue = FairQueue::default();
        queue.set_shares(&groups(&[share(1, 0.5), share(2, 0.5)]));
        let mut moved = BTreeMap::from([(1, 0), (2, 0)]);
        [1, 2].into_iter().for_each(|group| queue.push(group, group, request(0, 4 * CHUNK)));
        for ticket in 1..300 {
            let turn = queue.pop(1).unwrap();
            let came = if turn.group == 1 { CHUNK } else { 4 * CHUNK };
            *moved.get_mut(&turn.group).unwrap() += came;
            queue.done(turn.group, turn.member, 4 * CHUNK, came);
            queue.push(turn.group, turn.member, request(ticket, 4 * CHUNK));
        }
        let apart = moved[&1] as f64 - moved[&2] as f64;
        assert!(apart.abs() <= (16 * CHUNK) as f64, "{moved:?}");
    }

    /// A queue that waited long under a tiny weight must neither wait so long under a large one, nor be owed for the time.
    #[test]
    fn who_waited_has_waited_for_as_many_bytes_when_weights_change() {
        for (before, after) in [(0.001, 0.5), (0.5, 0.001)] {
            let mut queue = FairQueue::default();
            queue.set_shares(&groups(&[share(1, before), share(2, 1.0 - before)]));
            for ticket in 0..60 {
                queue.push(1, 1, request(ticket, CHUNK));
                queue.push(2, 2, request(ticket, CHUNK));
            }
            let next = |queue: &mut FairQueue| {
                let turn = queue.pop(1).unwrap();
                queue.done(turn.group, turn.member, CHUNK, CHUNK);
                turn.group
            };
            (0..20).for_each(|_| _ = next(&mut queue));
            queue.set_shares(&groups(&[share(1, after), share(2, 1.0 - after)]));
            let got: Vec<GroupId> = (0..20).map(|_| next(&mut queue)).collect();
            let first = got.iter().filter(|group| **group == 1).count();
            let wanted = if after == 0.5 { 9..=11 } else { 0..=1 };
            assert!(wanted.contains(&first), "{got:?}");
        }
    }

    /// The groups that are forgotten with a client may be several, and the last ones.
    #[test]
    fn a_client_that_leaves_takes_all_of_its_groups_with_it() {
        let mut queue = FairQueue::default();
        queue.push(1, 1, request(1, 4 * CHUNK));
        queue.pop(2).unwrap();
        queue.done(1, 1, 4 * CHUNK, 4 * CHUNK);
        for group in [1, 2, 3] {
            queue.push(group, group, Request { client: 9, ticket: group, bytes: CHUNK });
        }
        queue.withdraw_all(9);
        assert_eq!((queue.waiting(), queue.queues.len()), (0, 0));
    }

    #[test]
    fn idle_groups_and_members_are_forgotten() {
        let mut queue = FairQueue::default();
        for number in 0..100 {
            queue.push(number, number, request(number, 1));
            queue.pop(1).unwrap();
            queue.done(number, number, 1, 1);
        }
        assert!(queue.queues.len() <= 2, "{}", queue.queues.len());
        queue.push(1, 1, request(1, 1));
        assert!(queue.withdraw(1, 1, 0, 1) && !queue.withdraw(1, 1, 0, 1));
        queue.push(1, 1, request(2, 1));
        queue.withdraw_all(0);
        assert_eq!((queue.waiting(), queue.in_use()), (0, 0));
    }
}
