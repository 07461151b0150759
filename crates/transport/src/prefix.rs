//! What a task has read of a part of a stream, for a second run of its writer: the task continues where it was, if the
//! second run wrote the same data.

use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// The second run wrote something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Differs;

#[derive(Default)]
pub struct Prefix {
    seen: Seen,
    /// What was skipped of the current run, until that is all that was read before.
    again: Option<Seen>,
}

/// Writes, and a checksum of their sizes and bytes. A chunk may hold any number of them, and in each run another one.
#[derive(Default)]
struct Seen {
    writes: u64,
    hasher: XxHash3_64,
}

impl Seen {
    fn add(&mut self, write: &[u8]) {
        self.writes += 1;
        self.hasher.write(&(write.len() as u64).to_le_bytes());
        self.hasher.write(write);
    }
}

impl Prefix {
    /// Another run of the writer is read from its beginning.
    pub fn begin_again(&mut self) {
        self.again = (self.seen.writes > 0).then(Seen::default);
    }

    /// Whether data that was read before is still to be skipped.
    pub fn is_behind(&self) -> bool {
        self.again.is_some()
    }

    /// Adds the next writes; returns how many of them, from the first, the task has read before.
    ///
    /// # Errors
    /// They are not the same as before.
    pub fn take<'a>(&mut self, writes: impl IntoIterator<Item = &'a [u8]>) -> Result<usize, Differs> {
        let mut passed = 0;
        for write in writes {
            let Some(again) = &mut self.again else {
                self.seen.add(write);
                continue;
            };
            again.add(write);
            passed += 1;
            if again.writes == self.seen.writes {
                if again.hasher.finish() != self.seen.hasher.finish() {
                    return Err(Differs);
                }
                self.again = None;
            }
        }
        Ok(passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mission_core::random::SplitMix;

    #[test]
    fn a_second_run_goes_on_where_the_first_was_however_it_is_cut() {
        for seed in 0..200 {
            let mut chance = SplitMix(seed);
            let count = (chance.next() % 40) as usize;
            let writes: Vec<Vec<u8>> =
                (0..count).map(|_| (0..(chance.next() % 20)).map(|_| chance.next() as u8).collect()).collect();
            let (mut prefix, mut read) = (Prefix::default(), Vec::new());
            for _ in 0..4 {
                // Each run ends anywhere, maybe before it is where the last one was.
                let until = (chance.next() % (count as u64 + 1)) as usize;
                let mut at = 0;
                while at < until {
                    let end = (at + 1 + (chance.next() % 5) as usize).min(until);
                    let passed = prefix.take(writes[at..end].iter().map(Vec::as_slice)).unwrap();
                    read.extend_from_slice(&writes[at + passed..end]);
                    at = end;
                }
                prefix.begin_again();
            }
            let passed = prefix.take(writes.iter().map(Vec::as_slice)).unwrap();
            read.extend_from_slice(&writes[passed..]);
            assert_eq!(read, writes, "seed {seed}");
            assert!(!prefix.is_behind());
        }
    }

    #[test]
    fn what_was_written_otherwise_is_noticed() {
        let before: [&[u8]; 3] = [b"one", b"two", b""];
        for other in
            [[b"one" as &[u8], b"tow", b""], [b"onet", b"wo", b""], [b"one", b"two", b"\0"], [b"", b"one", b"two"]]
        {
            let mut prefix = Prefix::default();
            assert_eq!(prefix.take(before), Ok(0));
            prefix.begin_again();
            assert_eq!(prefix.take(other), Err(Differs), "{other:?}");
        }
        let mut prefix = Prefix::default();
        assert_eq!(prefix.take(before), Ok(0));
        prefix.begin_again();
        assert_eq!(
            (prefix.take([b"one" as &[u8]]), prefix.is_behind()),
            (Ok(1), true),
            "a shorter one is behind at its end"
        );
    }
}
