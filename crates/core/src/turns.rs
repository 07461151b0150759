//! Whose turn it is where one receiver asks many senders, a few at once, and waits for the last of them.
//!
//! All are done soonest if whoever needs longest goes first, and may be interrupted for another who needs longer still
//! (McNaughton 1959): so what is asked for are pieces, of the sender whose rest will take longest. Pieces only where
//! several are under way: the request for the next one costs a round trip, in which others must fill the link.

/// Senders at once from which on they are asked for pieces.
const PIECES_FROM: u32 = 4;
/// Of a fragment; and the smallest piece: what a connection may send at first (RFC 6928), and a little more.
const PIECES: u64 = 16;
const PIECE_LEAST: u64 = 16_000;

/// What is left of a block, and how fast each sender is.
#[derive(Clone, Debug, Default)]
pub struct Turns {
    fragment: u64,
    in_pieces: bool,
    senders: Vec<Sender>,
}

#[derive(Clone, Debug, Default)]
struct Sender {
    /// Not asked for yet, in bytes.
    left: u64,
    asked: bool,
    /// Of its last piece; 0: there was none.
    seconds_per_byte: f64,
}

impl Turns {
    /// `in_pieces`: where that is of use.
    pub fn new(senders: usize, in_pieces: bool) -> Turns {
        Turns { fragment: 0, in_pieces, senders: vec![Sender::default(); senders] }
    }

    /// A block begins: so many bytes of each.
    pub fn begin(&mut self, fragment: u64) {
        self.fragment = fragment;
        for sender in &mut self.senders {
            (sender.left, sender.asked) = (fragment, false);
        }
    }

    /// Senders with something to be asked for, that are not asked now.
    pub fn waiting(&self) -> usize {
        self.senders.iter().filter(|sender| sender.waits()).count()
    }

    /// Whom to ask now, and for how many bytes, where `limit` may be asked at once; of those that `may` be.
    pub fn next(&mut self, limit: u32, may: impl Fn(usize) -> bool) -> Option<(usize, u64)> {
        let rest = |sender: &Sender| sender.left as f64 * sender.seconds_per_byte;
        let waiting = self.senders.iter().enumerate().filter(|(at, sender)| sender.waits() && may(*at));
        // Of equals the first.
        let (at, _) = waiting
            .rev()
            .max_by(|(_, one), (_, other)| rest(one).total_cmp(&rest(other)).then(one.left.cmp(&other.left)))?;
        let in_pieces = self.in_pieces && limit >= PIECES_FROM && (limit as usize) < self.senders.len();
        let piece = if in_pieces { PIECE_LEAST.max(self.fragment / PIECES) } else { u64::MAX };
        let sender = &mut self.senders[at];
        let mut bytes = sender.left.min(piece);
        // No crumbs: what would be left would cost a round trip as well.
        if sender.left - bytes < PIECE_LEAST / 2 {
            bytes = sender.left;
        }
        sender.left -= bytes;
        sender.asked = true;
        Some((at, bytes))
    }

    /// What a sender was asked for has arrived.
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

    /// Seconds until the last of the senders is done, each of which sends so many bytes a second.
    fn makespan(rates: &[f64], fragment: u64, limit: u32) -> f64 {
        let mut turns = Turns::new(rates.len(), true);
        let mut last = 0.0;
        // The second block knows the rates.
        for _ in 0..2 {
            turns.begin(fragment);
            let (mut now, mut under_way): (f64, Vec<(f64, usize, u64, f64)>) = (0.0, Vec::new());
            loop {
                while under_way.len() < limit as usize
                    && let Some((at, bytes)) = turns.next(limit, |_| true)
                {
                    under_way.push((now + bytes as f64 / rates[at], at, bytes, now));
                }
                under_way.sort_by(|one, other| other.0.total_cmp(&one.0));
                let Some((ends, at, bytes, began)) = under_way.pop() else { break };
                now = ends;
                turns.arrived(at, bytes, ends - began);
            }
            last = now;
        }
        last
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
        assert!((makespan(&rates, 64_000, 10) - 16.0 * 0.064 / 10.0).abs() < 0.012);
        assert_eq!(makespan(&rates, 64_000, 3), 6.0 * 0.064);
    }

    #[test]
    fn whoever_needs_longest_goes_first() {
        let rates: Vec<f64> = [10e6, 3e6, 1e6].into_iter().cycle().take(16).collect();
        // One slow sender alone needs 64 ms: nothing is faster.
        assert!(makespan(&rates, 64_000, 8) < 0.075);
    }

    #[test]
    fn no_crumbs_are_left() {
        let mut turns = Turns::new(8, true);
        turns.begin(20_000);
        assert_eq!(turns.next(4, |_| true), Some((0, 20_000)));
    }
}
