//! How many flows a receiver's link can carry in parallel: flows per host `auto`, found by trial.
//! Design: docs/explanation/design-lab.md, "Flows per host `auto`".
//!
//! If the port before the receiver can hold the bytes of all senders, incast does not happen, on any TCP; with too few
//! senders, the link is idle. The best number depends on rates, buffer and bytes per flow, which are unknown and may
//! change. So it is found by trial, from what every receiver can measure: the rate at which bytes arrive.
//!
//! A trial compares the rate of a round under another limit with that of the round before. More flows are kept if the
//! rate is clearly higher (a small gain has to be confirmed), fewer if it is equal: the result is the smallest number
//! that fills the link. A failed trial may cost a timeout, so the next one waits, each time twice as long. The rate of
//! each limit is remembered over several rounds: if another limit was better, it is used again. If the rate changes
//! under an unchanged limit, the network has changed, and everything is learned again.
//!
//! If work arrives in blocks, one after the other, a round is whole blocks: their ends are slower than their
//! beginnings, and senders differ.

use crate::units::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// More flows stay if the rate rises by this factor. Losses lower the rate, and a full link does not raise it: rates of
/// rounds differ by some per cent.
const GAIN: f64 = 1.05;
/// A smaller gain than this has to be confirmed against the previous limit, which is measured again: a round that was
/// slow by chance makes the next one look fast.
const CLEAR: f64 = 1.5;
/// Fewer flows stay if the rate is at least this fraction.
const AS_MUCH: f64 = 0.985;
/// A limit with less than this fraction of a larger limit's rate is replaced by that one; so is a limit with less than
/// [`AS_MUCH`] of a smaller one's rate. Past the onset, two rounds without a timeout look like a gain, and even more
/// flows may have a higher rate, since they hide one another's timeouts.
const WORSE: f64 = 0.95;
/// A rate that differs by more than this from the learned one means that the network has changed.
const CHANGED: f64 = 1.2;
/// Chunks of a round, and its shortest time: a rate over less is mostly noise.
const ROUND_CHUNKS: u32 = 4;
const ROUND: Duration = Duration::from_millis(20);
/// Longest block that a round is extended to. And a block may take so many times as long as the last one before rounds
/// end anywhere again.
const BLOCK_MAX: Duration = Duration::from_secs(2);
const BLOCK_LATE: u32 = 2;
/// A trial is aborted before its round is over if its bytes take so many times as long as before.
const STALLED: f64 = 2.0;
const STALLED_PLUS: Duration = Duration::from_millis(50);
/// Waits before the next trial of more flows, after one that failed: the first if there are numbers in between and the
/// failure cost a timeout; later the second, doubled each time.
const WAIT_SOON: Duration = Duration::from_secs(5);
const WAIT_MIN: Duration = Duration::from_secs(60);
const WAIT_MAX: Duration = Duration::from_secs(600);
/// The initial limit: the only number for which every port is large enough. Four were tried: on a stack without SACK
/// the first second was one timeout after another (docs/measurements/incast-cure/what-did-not-work.md).
const START: u32 = 1;
/// Most flows of a host, whatever their rate.
pub const FLOWS_MAX: u32 = 256;

/// The rates of one receiver's flows, and the limit on their number.
#[derive(Clone, Debug)]
pub struct Budget {
    limit: u32,
    /// Bytes per second under `limit`, once known, and how many flows there were then: demand may have been lower.
    rate: Option<f64>,
    rate_of: u32,
    /// The limit before a trial.
    from: Option<u32>,
    /// A limit that was slightly faster than this one, and its rate: this one is measured again.
    doubted: Option<(u32, f64)>,
    /// The rate of each limit, over several rounds.
    brought: BTreeMap<u32, GoodputEstimate>,
    /// The largest limit below `limit` with a lower rate, and the smallest above without a higher one.
    below: u32,
    above: Option<u32>,
    /// Try fewer flows, once a round has confirmed the old rate.
    narrows: bool,
    wait: Duration,
    next_trial: Time,
    /// This round: how long flows were active, and the bytes that arrived.
    busy: Duration,
    bytes: u64,
    chunks: u32,
    /// Chunks that have to end before a round under a new limit begins: they began under the old one.
    passing: u32,
    /// Recent duration of one chunk.
    chunk_bytes: f64,
    /// Highest demand for flows in this round.
    wanted: u32,
    /// Rounds in a row whose rate differed from the learned one.
    strange: u32,
    /// Most flows that were active in this round.
    peak: u32,
    last: Time,
    /// Events count for this round now.
    counts: bool,
    /// Demand fell below the limit, so a partial block is not evidence.
    lacked: bool,
    /// Start of the current block; duration of the last one, once there was one.
    block_began: Option<Time>,
    block: Option<Duration>,
    /// All work is done: a block has ended.
    at_end: bool,
    /// This round began with a new block.
    aligned: bool,
}

/// Rate of the rounds under one limit; older ones have less weight. Includes rounds with a timeout.
#[derive(Clone, Copy, Debug, Default)]
struct GoodputEstimate {
    bytes: f64,
    seconds: f64,
}

impl GoodputEstimate {
    fn rate(&self) -> f64 {
        self.bytes / self.seconds
    }

    fn add(&mut self, rate: f64) {
        (self.bytes, self.seconds) = (self.bytes * 0.75 + 1.0, self.seconds * 0.75 + 1.0 / rate);
    }
}

impl Default for Budget {
    fn default() -> Budget {
        Budget {
            limit: START,
            rate: None,
            rate_of: 0,
            from: None,
            doubted: None,
            brought: BTreeMap::new(),
            below: 0,
            above: None,
            narrows: false,
            wait: WAIT_MIN,
            next_trial: Time::default(),
            busy: Duration::ZERO,
            bytes: 0,
            chunks: 0,
            passing: 0,
            chunk_bytes: 0.0,
            wanted: 0,
            strange: 0,
            peak: 0,
            last: Time::default(),
            counts: false,
            lacked: false,
            block_began: None,
            block: None,
            at_end: true,
            aligned: true,
        }
    }
}

impl Budget {
    /// Flows that may be active now.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Records what has happened until `now`, and decides: `bytes` arrived, `chunks` ended; from now on `in_use` flows
    /// are active and `waiting` more are wanted. Bytes may be reported when their chunk has ended.
    pub fn observe(&mut self, now: Time, bytes: u64, chunks: u32, in_use: u32, waiting: u32) {
        if self.counts {
            self.busy += now.since(self.last);
            self.bytes += bytes;
            self.chunks += chunks;
        }
        self.last = now;
        self.wanted = self.wanted.max(in_use.saturating_add(waiting));
        self.at_end = in_use == 0 && waiting == 0;
        match self.block_began {
            None if !self.at_end => self.block_began = Some(now),
            Some(began) if self.at_end => (self.block, self.block_began) = (Some(now.since(began)), None),
            _ => {}
        }
        self.decide(now);
        // The end of a block, with fewer active flows, counts: a timeout delays only the last ones.
        self.counts = in_use > 0 && in_use <= self.limit;
        self.peak = self.peak.max(if self.counts { in_use } else { 0 });
        self.lacked |= self.counts && waiting == 0 && in_use < self.limit;
    }

    fn decide(&mut self, now: Time) {
        let trial = self.from.zip(self.rate);
        let stalled = trial.is_some_and(|(_, before)| {
            let under_way = f64::from(self.peak) * self.chunk_bytes;
            let expected = Duration::from_secs_f64((self.bytes as f64 + under_way) / before);
            self.busy > expected.mul_f64(STALLED) + STALLED_PLUS
        });
        if self.passing > 0 && !stalled {
            if self.chunks >= self.passing {
                self.count_anew();
            }
            return;
        }
        if self.at_end && !self.aligned {
            self.count_anew();
            return;
        }
        let whole = self.at_end || !self.in_blocks(now);
        let over = self.chunks >= ROUND_CHUNKS.max(2 * self.peak) && self.busy >= ROUND && whole;
        if !over && !stalled {
            return;
        }
        let part_of_block = self.lacked && !(self.aligned && self.at_end);
        if (part_of_block || trial.is_some() && self.peak < self.limit) && !stalled {
            // Demand was below the limit, at least at times: the round is no evidence for it.
            self.count_anew();
            return;
        }
        let seen = self.bytes as f64 / self.busy.as_secs_f64();
        let Some((from, before)) = trial else {
            self.settled(now, seen);
            return;
        };
        let more = self.limit > from;
        let wins =
            !stalled && if more { seen >= before * GAIN } else { seen >= self.most_from(from, before) * AS_MUCH };
        self.from = None;
        if more && wins && seen < before * CLEAR {
            (self.doubted, self.limit) = (Some((self.limit, seen)), from);
            self.begin();
            return;
        }
        self.narrows = true;
        if wins {
            self.rate_of = self.limit;
        }
        match (more, wins) {
            (true, true) => {
                // The gain is clear: no confirmation is needed.
                self.below = from;
                self.remember(self.limit, seen);
                if self.believe(seen) {
                    return;
                }
            }
            (true, false) => {
                self.above = Some(self.limit);
                let between = self.limit > from + 1;
                self.waits(now, between);
                if between && !stalled {
                    self.next_trial = now;
                }
                self.limit = from;
            }
            (false, true) => {
                // The link is full, and more flows would gain nothing; unless demand was lower then.
                let wait = self.above.map_or(Duration::ZERO, |_| self.wait);
                (self.rate, self.next_trial) = (Some(seen), now + wait);
            }
            (false, false) => (self.below, self.limit) = (self.limit, from),
        }
        self.begin();
    }

    /// Whether the round can wait for the end of the current block.
    fn in_blocks(&self, now: Time) -> bool {
        let passed = self.block_began.map_or(Duration::ZERO, |began| now.since(began));
        self.block.is_some_and(|block| block <= BLOCK_MAX && passed <= BLOCK_LATE * block)
    }

    /// Keeps more flows, whose rate was `seen`. True if even more are tried.
    fn believe(&mut self, seen: f64) -> bool {
        (self.rate, self.rate_of, self.wait) = (Some(seen), self.limit, WAIT_MIN);
        self.narrows = true;
        if self.above == Some(self.limit) {
            self.above = None;
        }
        self.attempt_more()
    }

    /// Handles a round under a limit that is not on trial.
    fn settled(&mut self, now: Time, seen: f64) {
        if let Some((limit, gained)) = self.doubted.take() {
            // A limit that had timeouts before, and has none now, is not trusted either.
            if gained >= seen * GAIN && self.remember(limit, gained) >= seen {
                self.limit = limit;
                if !self.believe(gained) {
                    self.begin();
                }
                return;
            }
            // The gain was chance; drop the rate that suggested it.
            (self.above, self.rate) = (Some(limit), Some(seen));
            self.waits(now, limit > self.limit + 1);
        }
        if self.rate_of != self.peak {
            (self.rate, self.rate_of, self.strange) = (Some(seen), self.peak, 0);
        }
        let known = *self.rate.get_or_insert(seen);
        if self.peak == self.limit {
            self.remember(self.limit, seen);
        }
        self.chunk_bytes = self.bytes as f64 / f64::from(self.chunks.max(1));
        let other = seen > known * CHANGED || seen < known / CHANGED;
        self.strange = if other { self.strange + 1 } else { 0 };
        if self.strange >= 2 {
            // The network has changed: earlier results do not hold. If the rate is lower, fewer flows may be better.
            *self = Budget {
                limit: self.limit,
                rate: Some(seen),
                rate_of: self.rate_of,
                chunk_bytes: self.chunk_bytes,
                narrows: seen < known,
                wanted: self.wanted,
                block_began: self.block_began,
                block: self.block,
                at_end: self.at_end,
                aligned: self.aligned,
                next_trial: if seen < known { now + WAIT_SOON } else { now },
                last: self.last,
                ..Budget::default()
            };
        } else if !other {
            self.rate = Some(known + (seen - known) / 4.0);
            if self.returns_to_best(now) {
                return;
            }
        }
        // An unusual round only means that another one is needed.
        let doubtful = other && self.strange > 0;
        let tried = !doubtful && (self.attempt_fewer() || now >= self.next_trial && self.attempt_more());
        if tried && self.wait > WAIT_MIN {
            // A limit that was worse a minute ago may be better now.
            self.below = 0;
        }
        if !tried {
            self.begin();
        }
    }

    /// Records the rate of a round under a limit; returns the mean of its rounds, in which older ones have less weight.
    fn remember(&mut self, limit: u32, seen: f64) -> f64 {
        let own = self.brought.entry(limit).or_default();
        own.add(seen);
        own.rate()
    }

    /// The highest rate of this limit or a larger one: losses of many small steps to fewer flows would add up.
    fn most_from(&self, limit: u32, known: f64) -> f64 {
        self.brought.range(limit..).map(|(_, own)| own.rate()).fold(known, f64::max)
    }

    /// Returns to the limit with the highest rate, if this one is worse.
    fn returns_to_best(&mut self, now: Time) -> bool {
        let rates = || self.brought.iter().map(|(limit, own)| (*limit, own.rate()));
        let known = rates().find(|(limit, _)| *limit == self.limit && self.peak == self.limit);
        let best = rates().max_by(|(_, one), (_, other)| one.total_cmp(other));
        let Some(((_, known), (limit, rate))) = known.zip(best) else { return false };
        let fewer = limit < self.limit;
        if limit == self.limit || known >= rate * if fewer { AS_MUCH } else { WORSE } {
            return false;
        }
        self.above = Some(self.limit).filter(|_| fewer);
        self.waits(now, !fewer || self.limit > limit + 1);
        (self.limit, self.below) = (limit, 0);
        (self.rate, self.rate_of, self.strange) = (None, 0, 0);
        self.begin();
        true
    }

    /// Delays the next trial of more flows: for long, and twice as long each time, if no number in between is left.
    fn waits(&mut self, now: Time, between: bool) {
        self.next_trial = now + if between { WAIT_SOON } else { self.wait };
        if !between {
            self.wait = (self.wait * 2).min(WAIT_MAX);
        }
    }

    /// Tries more flows: twice as many, or a number below one without a gain; not more than are wanted.
    fn attempt_more(&mut self) -> bool {
        let more = self.above.map_or(2 * self.limit, |above| (self.limit + above) / 2).max(self.limit + 1);
        let more = more.min(self.wanted).min(FLOWS_MAX);
        let tried = more > self.limit;
        if tried {
            self.attempt(more);
        }
        tried
    }

    /// Tries a number between this one and the largest that is known to be worse.
    fn attempt_fewer(&mut self) -> bool {
        let fewer = (self.peak + self.below) / 2;
        let tried = self.narrows && fewer > self.below && fewer < self.peak;
        if tried {
            self.attempt(fewer);
        } else {
            self.narrows = false;
        }
        tried
    }

    fn attempt(&mut self, limit: u32) {
        self.from = Some(self.limit);
        self.limit = limit;
        self.begin();
    }

    /// A round of `limit` begins.
    fn begin(&mut self) {
        self.count_anew();
        let passing = if self.at_end { 0 } else { self.limit.min(self.wanted) };
        (self.passing, self.wanted, self.counts) = (passing, 0, false);
    }

    fn count_anew(&mut self) {
        (self.busy, self.bytes, self.chunks, self.passing, self.peak) = (Duration::ZERO, 0, 0, 0, 0);
        self.lacked = false;
        self.aligned = self.at_end;
    }
}

#[cfg(test)]
mod tests;
