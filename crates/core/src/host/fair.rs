//! Weighted fair queueing of requests in two levels: groups, and the members of each.
//!
//! Start-time fair queueing (Goyal, Vin and Cheng 1996, section 2) with chunks in place of packets: a request begins at the
//! virtual time of its queue, or where the last request of its group ended if that is later, and the one that begins first is
//! served first. The levels follow Bennett and Zhang (1996): a group's turn is decided among groups, and within the group
//! the same rule decides among its members. Groups have weights; members of a group count alike.
//!
//! Over any time in which two groups wait and neither is at its cap, the bytes charged to them differ, each divided by its
//! weight, by at most one largest chunk of either: |b1/w1 - b2/w2| <= c/w1 + c/w2. What a group was charged for and did not get,
//! because a chunk broke off, it may have once more on top.

use super::{ClientId, GroupId, MemberId, Ticket};
use std::collections::VecDeque;

/// A chunk that waits for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub client: ClientId,
    pub ticket: Ticket,
    /// Charged when it is granted.
    pub bytes: u64,
}

/// A request whose turn has come, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub group: GroupId,
    pub member: MemberId,
    pub request: Request,
}

/// Weight and cap of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupShare {
    pub group: GroupId,
    /// Fraction of the host's bytes.
    pub weight: f64,
    /// Slots that it may hold while others wait for theirs.
    pub cap: u32,
}

/// All that waits for a slot of one host, and how many slots each group and member holds.
#[derive(Default)]
pub struct FairQueue {
    /// In no particular order; found by scanning, since a host has few at a time.
    groups: Vec<Group>,
    virtual_time: f64,
    waiting: usize,
    in_use: u32,
    named: usize,
}

struct Group {
    id: GroupId,
    /// Absent until the Mission Controller has named the group.
    share: Option<(f64, u32)>,
    /// Its place among the shares, which are in the order of arrival: whoever came first wins a tie.
    rank: u32,
    waiting: usize,
    in_use: u32,
    /// Where its next request begins: bytes charged, divided by the weight.
    tag: f64,
    /// It was passed over because it held its cap. What it would have had meanwhile is not saved up.
    was_capped: bool,
    virtual_time: f64,
    members: Vec<Member>,
}

struct Member {
    id: MemberId,
    waiting: VecDeque<Request>,
    in_use: u32,
    tag: f64,
}

impl FairQueue {
    /// Replaces the shares of all groups. A group that is not named any more is forgotten once it is idle.
    pub fn set_shares(&mut self, shares: &[GroupShare]) {
        let before: Vec<(GroupId, f64)> =
            (0..self.groups.len()).map(|at| (self.groups[at].id, self.weight(at))).collect();
        for group in &mut self.groups {
            (group.share, group.rank) = (None, u32::MAX);
        }
        for (rank, share) in shares.iter().enumerate() {
            let at = self.find_or_add(share.group);
            self.groups[at].share = Some((share.weight.max(1e-9), share.cap));
            self.groups[at].rank = rank as u32;
        }
        self.named = shares.len();
        // Who is ahead stays ahead by as many bytes: a chunk that was much for a small weight is little for a large one.
        for (id, old) in before {
            if let Some(at) = self.groups.iter().position(|group| group.id == id) {
                let ahead = self.groups[at].tag - self.virtual_time;
                self.groups[at].tag = self.virtual_time + ahead * old / self.weight(at);
            }
        }
        self.groups.retain(|group| group.share.is_some() || !group.idle());
    }

    /// Slots that all groups hold.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Slots held and requests waiting of one group.
    pub fn of(&self, group: GroupId) -> (u32, usize) {
        self.groups.iter().find(|own| own.id == group).map_or((0, 0), |own| (own.in_use, own.waiting))
    }

    /// Bytes that a group is behind: it was charged for them, and the chunks broke off.
    pub fn behind(&self, group: GroupId) -> f64 {
        let at = self.groups.iter().position(|own| own.id == group);
        at.map_or(0.0, |at| (self.virtual_time - self.groups[at].tag).max(0.0) * self.weight(at))
    }

    /// Whether requests wait while at least two members hold slots or wait.
    pub fn members_compete(&self) -> bool {
        let wanting = self.groups.iter().flat_map(|group| &group.members).filter(|member| !member.idle());
        self.waiting > 0 && wanting.take(2).count() > 1
    }

    /// Adds a request at the end of its member's queue.
    pub fn push(&mut self, group: GroupId, member: MemberId, request: Request) {
        let virtual_time = self.virtual_time;
        let at = self.find_or_add(group);
        let group = &mut self.groups[at];
        if group.waiting == 0 {
            // Time in which it did not wait saves nothing up.
            group.tag = group.tag.max(virtual_time);
        }
        group.waiting += 1;
        let virtual_time = group.virtual_time;
        let member = group.member(member);
        if member.waiting.is_empty() {
            member.tag = member.tag.max(virtual_time);
        }
        member.waiting.push_back(request);
        self.waiting += 1;
    }

    /// Takes out a request that waits; false if there is none.
    pub fn withdraw(&mut self, group: GroupId, member: MemberId, client: ClientId, ticket: Ticket) -> bool {
        let Some(at) = self.groups.iter().position(|own| own.id == group) else { return false };
        let found = self.groups[at].members.iter_mut().find(|own| own.id == member).and_then(|member| {
            let is_it = |request: &Request| (request.client, request.ticket) == (client, ticket);
            let at = member.waiting.iter().rposition(is_it)?;
            member.waiting.remove(at)
        });
        if found.is_some() {
            self.groups[at].waiting -= 1;
            self.waiting -= 1;
            self.forget_if_idle(at);
        }
        found.is_some()
    }

    /// Takes out all requests of a client.
    pub fn withdraw_all(&mut self, client: ClientId) {
        for group in &mut self.groups {
            for member in &mut group.members {
                let before = member.waiting.len();
                member.waiting.retain(|request| request.client != client);
                let gone = before - member.waiting.len();
                group.waiting -= gone;
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
        // With fewer slots than twice the groups that want them, bytes alone decide.
        let wanting = self.groups.iter().filter(|group| !group.idle()).count();
        let caps_bind = crate::shares::caps_bind(budget, wanting);
        let virtual_time = self.virtual_time;
        let mut best: Option<(Key, usize)> = None;
        for (at, group) in self.groups.iter_mut().enumerate().filter(|(_, group)| group.waiting > 0) {
            let capped = caps_bind && group.share.is_some_and(|(_, cap)| group.in_use >= cap);
            if group.was_capped && !capped {
                group.tag = group.tag.max(virtual_time);
            }
            group.was_capped = capped;
            let key = (capped, group.tag, group.rank, group.id);
            if best.is_none_or(|(best, _)| before(key, best)) {
                best = Some((key, at));
            }
        }
        let at = best?.1;
        let weight = self.weight(at);
        let group = &mut self.groups[at];
        self.virtual_time = self.virtual_time.max(group.tag);
        let (member, request) = group.pop()?;
        group.tag += request.bytes as f64 / weight;
        group.waiting -= 1;
        group.in_use += 1;
        self.waiting -= 1;
        self.in_use += 1;
        Some(Turn { group: group.id, member, request })
    }

    /// A slot is free again: it was charged `charged` bytes and moved `moved` of them. The difference is given back.
    pub fn done(&mut self, group: GroupId, member: MemberId, charged: u64, moved: u64) {
        let Some(at) = self.groups.iter().position(|own| own.id == group) else { return };
        let weight = self.weight(at);
        let difference = moved as f64 - charged as f64;
        let group = &mut self.groups[at];
        group.tag += difference / weight;
        group.in_use -= 1;
        self.in_use -= 1;
        let member = group.member(member);
        member.tag += difference;
        member.in_use -= 1;
        self.forget_if_idle(at);
    }

    /// A slot that was granted elsewhere, before this queue existed: it is counted, and charged to nobody.
    pub fn adopt(&mut self, group: GroupId, member: MemberId) {
        let at = self.find_or_add(group);
        self.groups[at].in_use += 1;
        self.groups[at].member(member).in_use += 1;
        self.in_use += 1;
    }

    fn find_or_add(&mut self, id: GroupId) -> usize {
        if let Some(at) = self.groups.iter().position(|group| group.id == id) {
            return at;
        }
        self.forget_idle();
        let tag = self.virtual_time;
        self.groups.push(Group {
            id,
            share: None,
            rank: u32::MAX,
            waiting: 0,
            in_use: 0,
            tag,
            was_capped: false,
            virtual_time: 0.0,
            members: Vec::new(),
        });
        self.groups.len() - 1
    }

    /// A group that the Mission Controller has not named yet counts as an average one, and has no cap.
    fn weight(&self, at: usize) -> f64 {
        self.groups[at].share.map_or(1.0 / self.named.max(1) as f64, |(weight, _)| weight)
    }

    /// Forgets a member or group that is idle. One that is ahead of the others is kept: it has had its bytes.
    fn forget_if_idle(&mut self, at: usize) {
        if self.settle_if_idle() {
            self.forget_idle();
            return;
        }
        let group = &mut self.groups[at];
        if group.is_forgotten(self.virtual_time) {
            self.groups.swap_remove(at);
            return;
        }
        let virtual_time = group.virtual_time;
        group.members.retain(|member| !member.idle() || member.tag > virtual_time);
    }

    /// Where nothing waits and nothing is held nobody is ahead of anybody.
    fn settle_if_idle(&mut self) -> bool {
        let idle = self.waiting == 0 && self.in_use == 0;
        if idle {
            self.virtual_time = self.groups.iter().map(|group| group.tag).fold(self.virtual_time, f64::max);
        }
        idle
    }

    fn forget_idle(&mut self) {
        let virtual_time = self.virtual_time;
        self.groups.retain(|group| !group.is_forgotten(virtual_time));
        for group in self.groups.iter_mut().filter(|group| group.idle()) {
            group.members.clear();
        }
    }
}

/// What decides whose turn it is: whether it holds its cap, its tag, its rank, and at last its id.
type Key = (bool, f64, u32, GroupId);

fn before(one: Key, other: Key) -> bool {
    one.0.cmp(&other.0).then(one.1.total_cmp(&other.1)).then((one.2, one.3).cmp(&(other.2, other.3))).is_lt()
}

impl Group {
    fn idle(&self) -> bool {
        self.waiting == 0 && self.in_use == 0
    }

    fn is_forgotten(&self, virtual_time: f64) -> bool {
        self.idle() && self.share.is_none() && self.tag <= virtual_time
    }

    fn member(&mut self, id: MemberId) -> &mut Member {
        let at = self.members.iter().position(|member| member.id == id).unwrap_or_else(|| {
            self.members.push(Member { id, waiting: VecDeque::new(), in_use: 0, tag: self.virtual_time });
            self.members.len() - 1
        });
        &mut self.members[at]
    }

    fn pop(&mut self) -> Option<(MemberId, Request)> {
        let waiting = self.members.iter_mut().filter(|member| !member.waiting.is_empty());
        let member = waiting.min_by(|one, other| one.tag.total_cmp(&other.tag).then(one.id.cmp(&other.id)))?;
        let request = member.waiting.pop_front()?;
        self.virtual_time = self.virtual_time.max(member.tag);
        member.tag += request.bytes as f64;
        member.in_use += 1;
        Some((member.id, request))
    }
}

impl Member {
    fn idle(&self) -> bool {
        self.waiting.is_empty() && self.in_use == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const CHUNK: u64 = 1 << 20;

    fn share(group: GroupId, weight: f64, cap: u32) -> GroupShare {
        GroupShare { group, weight, cap }
    }

    fn request(ticket: Ticket, bytes: u64) -> Request {
        Request { client: 0, ticket, bytes }
    }

    /// Backlogged members of (group, member), `rounds` chunks one after the other through `budget` slots; bytes of each.
    fn backlogged(
        budget: u32,
        shares: &[GroupShare],
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
            let got = backlogged(2, &[share(1, a, 1), share(2, b, 1)], &members, 3000);
            let of = |member| got[&member] as f64 / (3000 * CHUNK) as f64;
            for member in [10, 11, 12] {
                assert!((of((1, member)) - a / 3.0).abs() < 0.01, "{got:?}");
            }
            assert!((of((2, 20)) - b).abs() < 0.01, "{got:?}");
        }
    }

    #[test]
    fn a_backlogged_group_holds_exactly_its_cap() {
        let mut queue = FairQueue::default();
        queue.set_shares(&[share(1, 0.7, 7), share(2, 0.3, 3)]);
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
        queue.set_shares(&[share(1, 0.5, 1), share(2, 0.5, 9)]);
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
        queue.set_shares(&[share(1, 0.5, 10), share(2, 0.5, 10)]);
        let mut got = BTreeMap::from([(1, 0), (2, 0)]);
        for _ in 0..40 {
            let turn = held.remove(0);
            queue.done(turn.group, turn.member, CHUNK, CHUNK);
            let turn = queue.pop(10).unwrap();
            *got.get_mut(&turn.group).unwrap() += 1;
            held.push(turn);
        }
        assert!(got[&1] <= 22, "{got:?}");
    }

    #[test]
    fn a_group_that_was_idle_has_saved_nothing_up() {
        let mut queue = FairQueue::default();
        queue.set_shares(&[share(1, 0.5, 1), share(2, 0.5, 1)]);
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
        queue.set_shares(&[share(1, 0.5, 5), share(2, 0.5, 5)]);
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

    /// A chunk that a group had under a tiny weight kept it waiting for hundreds of others once its weight was large.
    #[test]
    fn who_is_ahead_stays_ahead_by_bytes_when_weights_change() {
        let mut queue = FairQueue::default();
        queue.set_shares(&[share(1, 0.001, 10), share(2, 0.999, 10)]);
        for ticket in 0..40 {
            queue.push(1, 1, request(ticket, CHUNK));
            queue.push(2, 2, request(ticket, CHUNK));
        }
        let next = |queue: &mut FairQueue| {
            let turn = queue.pop(1).unwrap();
            queue.done(turn.group, turn.member, CHUNK, CHUNK);
            turn.group
        };
        // Both have had one: the first is a thousand chunks ahead, by its weight.
        assert_eq!([next(&mut queue), next(&mut queue)], [1, 2]);
        queue.set_shares(&[share(1, 0.5, 10), share(2, 0.5, 10)]);
        let got: Vec<GroupId> = (0..20).map(|_| next(&mut queue)).collect();
        assert!(got.iter().filter(|group| **group == 1).count() >= 9, "{got:?}");
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
        assert_eq!((queue.waiting(), queue.groups.len()), (0, 0));
    }

    #[test]
    fn idle_groups_and_members_are_forgotten() {
        let mut queue = FairQueue::default();
        for number in 0..100 {
            queue.push(number, number, request(number, 1));
            queue.pop(1).unwrap();
            queue.done(number, number, 1, 1);
        }
        assert!(queue.groups.len() <= 2, "{}", queue.groups.len());
        queue.push(1, 1, request(1, 1));
        assert!(queue.withdraw(1, 1, 0, 1) && !queue.withdraw(1, 1, 0, 1));
        queue.push(1, 1, request(2, 1));
        queue.withdraw_all(0);
        assert_eq!((queue.waiting(), queue.in_use()), (0, 0));
    }
}
