//! The order in which one receiver asks many senders, a few in parallel, when it has to wait for the last of them.
//!
//! The sender with most bytes left goes first, in pieces. So all end together, and senders of every speed are active at
//! any time. Many slow senders in parallel would not fill the link; many fast ones would overflow the port. Longest
//! processing time first (McNaughton 1959), which ends soonest if the link is no limit, does just that: all slow ones,
//! then all fast ones. Example: 47 senders, six in parallel; a third of them has the link's rate, a third of it, and a
//! tenth of it. That order filled 84 % of the link, pieces fill 97 % (the test below). Pieces are used only if several
//! senders are active: the request for the next piece costs a round trip, in which others must fill the link.

/// Pieces are used from this many parallel senders on.
const PIECES_FROM: u32 = 4;
/// Pieces of a fragment; and the smallest piece: half of the initial window (RFC 6928), so it arrives one round trip
/// after its request. Pieces twice as large left a tenth of the link idle in the last round of a block: 16 senders with
/// a tenth of its rate, 64 kB of each, filled 87 to 91 % of it; these fill 95 to 100 %
/// (docs/measurements/incast-slow-senders/smaller-pieces.md).
const PIECES: u64 = 32;
const PIECE_LEAST: u64 = 8_000;

/// Fraction of the time that all others need: a sender that needs this long is late if it waits once.
const ABOUT: f64 = 0.8;
/// Multiples of the golden ratio spread over the unit interval (Knuth, The Art of Computer Programming 3, 6.4):
/// neighbours, which are often alike, are asked at distant times.
const GOLDEN: f64 = 0.618_033_988_749_895;

/// What is left of a block, and how fast each sender is.
#[derive(Clone, Debug, Default)]
pub struct Turns {
    fragment: u64,
    in_pieces: bool,
    senders: Vec<Sender>,
}

#[derive(Clone, Debug, Default)]
struct Sender {
    /// Bytes not requested yet.
    left: u64,
    asked: bool,
    /// Rate of its last piece; 0: there was none.
    seconds_per_byte: f64,
}

impl Turns {
    /// `in_pieces`: use pieces where they help.
    pub fn new(senders: usize, in_pieces: bool) -> Turns {
        Turns { fragment: 0, in_pieces, senders: vec![Sender::default(); senders] }
    }

    /// A block begins, with so many bytes from each sender.
    pub fn begin(&mut self, fragment: u64) {
        self.fragment = fragment;
        for sender in &mut self.senders {
            (sender.left, sender.asked) = (fragment, false);
        }
    }

    /// Senders with unrequested bytes that are not active now.
    pub fn waiting(&self) -> usize {
        self.senders.iter().filter(|sender| sender.waits()).count()
    }

    /// The next sender and how many bytes to request, if fewer than `limit` are active; only senders for which `may` is
    /// true.
    pub fn next(&mut self, limit: u32, may: impl Fn(usize) -> bool) -> Option<(usize, u64)> {
        let in_pieces = self.in_pieces && limit >= PIECES_FROM && (limit as usize) < self.senders.len();
        let waiting = self.senders.iter().enumerate().filter(|(at, sender)| sender.waits() && may(*at));
        let rest = |sender: &Sender| sender.left as f64 * sender.seconds_per_byte;
        let all: f64 = self.senders.iter().map(rest).sum();
        // Whole fragments: slower senders first. Pieces: first a sender that needs about as long as all others, since
        // all wait for its end.
        let urgency = |sender: &Sender| match rest(sender) {
            own if !in_pieces || own * f64::from(limit - 1) >= ABOUT * (all - own) => own,
            _ => 0.0,
        };
        let place = |at: usize| (at as f64 * GOLDEN).fract();
        let (at, _) = waiting.max_by(|(at, one), (beside, other)| {
            let urgent = urgency(one).total_cmp(&urgency(other));
            urgent.then(one.left.cmp(&other.left)).then(place(*beside).total_cmp(&place(*at)))
        })?;
        let piece = if in_pieces { PIECE_LEAST.max(self.fragment / PIECES) } else { u64::MAX };
        let sender = &mut self.senders[at];
        let mut bytes = sender.left.min(piece);
        // No tiny rest: it would cost another round trip.
        if sender.left - bytes < PIECE_LEAST / 2 {
            bytes = sender.left;
        }
        sender.left -= bytes;
        sender.asked = true;
        Some((at, bytes))
    }

    /// A sender's requested bytes have arrived.
    pub fn arrived(&mut self, at: usize, bytes: u64, seconds: f64) {
        let sender = &mut self.senders[at];
        sender.asked = false;
        sender.seconds_per_byte = seconds / bytes.max(1) as f64;
    }
}

impl Sender {
    fn waits(&self) -> bool {
        self.left > 0 && !self.asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For senders that share a link, with so many bytes per second each: seconds until the last is done, and how many
    /// of the fastest were active at most.
    fn makespan(rates: &[f64], link: f64, fragment: u64, limit: u32) -> (f64, usize) {
        let fastest = rates.iter().copied().fold(0.0, f64::max);
        let mut turns = Turns::new(rates.len(), true);
        let mut told = (0.0, 0);
        // The second block knows the rates.
        for _ in 0..2 {
            turns.begin(fragment);
            let (mut now, mut fast) = (0.0, 0);
            let mut under_way: Vec<Piece> = Vec::new();
            loop {
                while under_way.len() < limit as usize
                    && let Some((at, bytes)) = turns.next(limit, |_| true)
                {
                    under_way.push(Piece { at, bytes, left: bytes as f64, began: now });
                }
                if under_way.is_empty() {
                    break;
                }
                fast = fast.max(under_way.iter().filter(|under_way| rates[under_way.at] == fastest).count());
                // Each gets its part of the link, and what slower ones leave of theirs.
                under_way.sort_by(|one, other| rates[one.at].total_cmp(&rates[other.at]));
                let (mut rest, count) = (link, under_way.len());
                let shares: Vec<f64> = (0..count)
                    .map(|place| {
                        let share = rates[under_way[place].at].min(rest / (count - place) as f64);
                        rest -= share;
                        share
                    })
                    .collect();
                let step = under_way.iter().zip(&shares).map(|(own, share)| own.left / share).fold(f64::MAX, f64::min);
                now += step;
                for (own, share) in under_way.iter_mut().zip(&shares) {
                    own.left -= share * step;
                }
                under_way.retain(|under_way| {
                    let done = under_way.left < 1e-3;
                    if done {
                        turns.arrived(under_way.at, under_way.bytes, now - under_way.began);
                    }
                    !done
                });
            }
            told = (now, fast);
        }
        told
    }

    struct Piece {
        at: usize,
        bytes: u64,
        left: f64,
        began: f64,
    }

    /// Of a third each, in turn or apart.
    fn differing(apart: bool) -> Vec<f64> {
        let mut rates: Vec<f64> = [12.5e6, 3.75e6, 1.25e6].into_iter().cycle().take(47).collect();
        if apart {
            rates.sort_by(f64::total_cmp);
        }
        rates
    }

    #[test]
    fn a_few_at_once_are_asked_for_all() {
        let mut turns = Turns::new(3, true);
        turns.begin(64_000);
        let asked: Vec<_> = std::iter::from_fn(|| turns.next(2, |at| at != 1)).collect();
        assert_eq!((asked, turns.waiting()), (vec![(0, 64_000), (2, 64_000)], 1));
    }

    #[test]
    fn where_the_last_round_would_be_nearly_empty_pieces_fill_it() {
        let rates = [1e6; 16];
        // In whole fragments: two rounds of ten and six.
        assert!((makespan(&rates, 1e9, 64_000, 10).0 - 16.0 * 0.064 / 10.0).abs() < 0.004);
        assert!((makespan(&rates, 1e9, 64_000, 3).0 - 6.0 * 0.064).abs() < 1e-6);
    }

    #[test]
    fn six_of_senders_that_differ_fill_the_link_and_few_of_them_are_fast() {
        for apart in [false, true] {
            let (seconds, fast) = makespan(&differing(apart), 12.5e6, 64_000, 6);
            assert!(47.0 * 64_000.0 / 12.5e6 / seconds > 0.96 && fast <= 3, "{seconds} {fast}");
        }
    }

    #[test]
    fn one_that_is_far_slower_is_always_under_way() {
        for (slow, limit) in (0..47).flat_map(|slow| [2, 4, 6].map(|limit| (slow, limit))) {
            let mut rates = [12.5e6; 47];
            rates[slow] = 0.27e6;
            let (seconds, _) = makespan(&rates, 12.5e6, 64_000, limit);
            assert!(47.0 * 64_000.0 / 12.5e6 / seconds > 0.96, "{slow} {limit} {seconds}");
        }
    }

    #[test]
    fn where_the_link_is_no_limit_slow_senders_are_not_kept_waiting() {
        let rates: Vec<f64> = [10e6, 3e6, 1e6].into_iter().cycle().take(16).collect();
        // One slow sender alone needs 64 ms: nothing is faster.
        let (seconds, _) = makespan(&rates, 1e9, 64_000, 8);
        assert!(seconds < 0.075, "{seconds}");
    }

    #[test]
    fn no_crumbs_are_left() {
        let mut turns = Turns::new(8, true);
        turns.begin(11_000);
        assert_eq!(turns.next(4, |_| true), Some((0, 11_000)));
    }
}
