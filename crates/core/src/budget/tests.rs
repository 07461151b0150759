//! Receivers whose links, buffers and senders change: where the limit settles, and what it costs.

use super::*;

const CHUNK: f64 = 64_000.0;
const TIMEOUT_S: f64 = 0.2;

/// A receiver with many senders, in steps of a millisecond.
struct Receiver {
    /// Bytes per second of its link, and of each sender's.
    link: f64,
    sender: f64,
    /// More flows than this lose packets: their link is idle for a timeout, a few times a second.
    stands: u32,
    senders: u32,
    budget: Budget,
    now: f64,
    idle_until: f64,
    moved: f64,
    timeouts: u32,
    /// Bytes are reported when their chunk has ended.
    late: bool,
    told: f64,
}

impl Receiver {
    fn new(link: f64, sender: f64, stands: u32, senders: u32) -> Receiver {
        let budget = Budget::default();
        Receiver {
            link,
            sender,
            stands,
            senders,
            budget,
            now: 0.0,
            idle_until: 0.0,
            moved: 0.0,
            timeouts: 0,
            late: false,
            told: 0.0,
        }
    }

    /// The used fraction of the link, or of what all senders can do.
    fn run(&mut self, seconds: f64) -> f64 {
        let (moved, end) = (self.moved, self.now + seconds);
        while self.now < end {
            let flows = self.budget.limit().min(self.senders);
            self.now += 1e-3;
            let mut bytes = 0.0;
            if self.now >= self.idle_until {
                bytes = (f64::from(flows) * self.sender).min(self.link) * 1e-3;
                if flows > self.stands && (self.moved / 400e3).floor() != ((self.moved + bytes) / 400e3).floor() {
                    self.idle_until = self.now + TIMEOUT_S;
                    self.timeouts += 1;
                }
            }
            let chunks = ((self.moved + bytes) / CHUNK).floor() - (self.moved / CHUNK).floor();
            self.moved += bytes;
            let waiting = self.senders - flows;
            let told = if self.late { (self.moved / CHUNK).floor() * CHUNK } else { self.moved };
            let new = (told - self.told) as u64;
            self.told = told;
            self.budget.observe(Time::from_secs_f64(self.now), new, chunks as u32, flows, waiting);
        }
        (self.moved - moved) / seconds / self.link.min(self.sender * f64::from(self.senders))
    }
}

#[test]
fn one_flow_is_enough_where_a_sender_is_as_fast_as_the_receiver() {
    for stands in [1, 2, 8] {
        for senders in [1, 2, 16, 47] {
            let mut receiver = Receiver::new(12.5e6, 12.5e6, stands, senders);
            receiver.run(5.0);
            let learning = receiver.timeouts;
            assert!(receiver.run(100.0) > 0.98, "{stands} {senders}");
            assert_eq!(receiver.budget.limit().min(senders), 1);
            assert!(receiver.timeouts <= learning + 1, "one trial after a minute: {}", receiver.timeouts);
        }
    }
}

#[test]
fn as_many_flows_as_fill_the_link_where_senders_are_slower() {
    for (sender, filling, late) in [(1.25e6, 10, false), (4.2e6, 3, false), (0.5e6, 25, false), (1.25e6, 10, true)] {
        let mut receiver = Receiver { late, ..Receiver::new(12.5e6, sender, 40, 47) };
        receiver.run(30.0);
        assert!(receiver.run(60.0) > 0.97);
        assert!((filling..=filling + 1).contains(&receiver.budget.limit()), "{}", receiver.budget.limit());
    }
    // All of them do not fill it.
    let mut receiver = Receiver::new(12.5e6, 0.1e6, 64, 20);
    receiver.run(60.0);
    assert!(receiver.run(60.0) > 0.97 && receiver.budget.limit() == 20);
}

#[test]
fn never_more_than_the_port_stands_even_where_the_link_is_not_full() {
    let mut receiver = Receiver::new(12.5e6, 1.25e6, 6, 47);
    receiver.run(10.0);
    let timeouts = receiver.timeouts;
    assert!(receiver.run(100.0) > 0.55 && receiver.budget.limit() <= 6);
    assert!(receiver.timeouts <= timeouts + 3);
}

#[test]
fn few_that_want_something_for_a_while_teach_nothing_of_many() {
    let mut receiver = Receiver::new(12.5e6, 1.25e6, 40, 47);
    receiver.run(30.0);
    let limit = receiver.budget.limit();
    for _ in 0..5 {
        receiver.senders = 3;
        receiver.run(5.0);
        receiver.senders = 47;
        receiver.run(5.0);
    }
    assert!(receiver.budget.limit().abs_diff(limit) <= 1, "{limit} {}", receiver.budget.limit());
    assert!(receiver.run(10.0) > 0.97);
}

#[test]
fn a_link_that_changes_is_learned_anew() {
    changed_link(false);
    changed_link(true);
}

fn changed_link(late: bool) {
    let mut receiver = Receiver { late, ..Receiver::new(12.5e6, 1.25e6, 40, 47) };
    receiver.run(30.0);
    // Ten flows that filled it are three now.
    receiver.link = 3.75e6;
    receiver.run(20.0);
    assert!(receiver.run(20.0) > 0.97 && receiver.budget.limit() <= 4, "{}", receiver.budget.limit());
    // Senders become as fast as the receiver, and the port gets small.
    (receiver.link, receiver.sender, receiver.stands) = (12.5e6, 12.5e6, 1);
    receiver.run(20.0);
    assert!(receiver.run(60.0) > 0.95 && receiver.budget.limit() == 1, "{}", receiver.budget.limit());
}

/// Chunks that arrive one after the other at a rate in bytes per second, with as many under way as may be.
fn arrive(budget: &mut Budget, now: &mut f64, chunks: u32, rate: f64, more: u32) {
    for left in (0..chunks).rev() {
        budget.observe(Time::from_secs_f64(*now), 0, 0, budget.limit(), more);
        *now += CHUNK / rate;
        let (in_use, waiting) = if left == 0 && more == 0 { (0, 0) } else { (budget.limit(), more) };
        budget.observe(Time::from_secs_f64(*now), CHUNK as u64, 1, in_use, waiting);
    }
}

#[test]
fn a_gain_that_was_chance_is_not_kept() {
    let (mut budget, mut now) = (Budget::default(), 0.0);
    // The first rounds are slow by chance, until a trial begins.
    while budget.limit() == 1 {
        arrive(&mut budget, &mut now, 1, 8e6, 50);
    }
    arrive(&mut budget, &mut now, 400, 9.5e6, 50);
    assert_eq!(budget.limit(), 1);
}

#[test]
fn a_gain_that_timeouts_eat_is_given_back() {
    let (mut budget, mut now) = (Budget::default(), 0.0);
    let (mut slow, mut late) = (0, 0);
    for block in 0..40_000 {
        // Beyond 16 flows every third block waits for a timeout, and those between are a little faster.
        let rate = match budget.limit() {
            17.. if block % 3 == 0 => 50e6,
            17.. => 95e6,
            flows => 88e6 * f64::from(flows) / 16.0,
        };
        slow += u32::from(rate == 50e6);
        late += u32::from(rate == 50e6 && now > 600.0);
        arrive(&mut budget, &mut now, 40, rate, 47);
        arrive(&mut budget, &mut now, 7, rate, 0);
    }
    assert!(budget.limit() == 16 && slow <= 60 && late <= 15 && now > 1200.0, "{} {slow} {late}", budget.limit());
}

#[test]
fn small_steps_to_fewer_do_not_add_up() {
    let (mut budget, mut now) = (Budget::default(), 0.0);
    for _ in 0..2000 {
        let rate = match budget.limit() {
            flows @ ..=8 => 11e6 * f64::from(flows),
            flows => 95e6 * (1.0 - 0.006 * f64::from(16u32.saturating_sub(flows))),
        };
        arrive(&mut budget, &mut now, 40, rate, 47);
        arrive(&mut budget, &mut now, 7, rate, 0);
    }
    assert_eq!(budget.limit(), 14);
}

#[test]
fn blocks_whose_ends_are_faster_than_their_beginnings_are_compared_as_a_whole() {
    let (mut budget, mut now) = (Budget::default(), 0.0);
    for block in 0..200 {
        arrive(&mut budget, &mut now, 8, 2e6, 20);
        arrive(&mut budget, &mut now, 8, 20e6, 0);
        assert!(block < 20 || budget.limit() <= 2, "{} in block {block}", budget.limit());
    }
}
