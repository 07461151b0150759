//! Rows of columns: their hashes and ranges, which say where each goes; split by output partition into parts; joined to columns again;
//! and sorted.
//!
//! A column has one or more buffers, laid out as Apache Arrow and NumPy have them: values of one width, bits, or offsets and
//! bytes. A part holds the rows of all buffers that go to one output partition:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | number of rows |
//! | 8 for each buffer | bytes of this buffer's rows, without padding |
//! | | the rows of each buffer, padded to 8 bytes |
//!
//! Numbers are little-endian. The rows of a buffer of fixed width are its values. Those of a buffer of bits begin with the lowest bit of
//! the first byte; no bits at all means that all are set. Those of a buffer of variable length are their lengths (4
//! bytes each, padded to 8) and then their bytes. A partition without rows has a part without bytes.

mod hash;
mod join;
mod order;
mod split;

pub use hash::{Column, hash_column, hash_rows};
pub use join::{Joined, measure};
pub use order::{ranges, sort_rows};
pub use split::Split;

/// Where a buffer's offsets are, one more than rows.
#[derive(Clone, Copy, Debug)]
pub enum Offsets<'a> {
    /// Four bytes each.
    Narrow(&'a [u8]),
    /// Eight bytes each.
    Wide(&'a [u8]),
}

/// One buffer of a column.
#[derive(Clone, Copy, Debug)]
pub enum Buffer<'a> {
    /// `width` bytes a row.
    Fixed { width: usize, values: &'a [u8] },
    /// One bit a row, from bit `start`.
    Bits { bits: &'a [u8], start: usize },
    /// A bit a row, and all are set.
    AllSet,
    /// Row `i` has the bytes from offset `i` to offset `i + 1`.
    Variable { offsets: Offsets<'a>, values: &'a [u8] },
}

/// What a buffer of a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// So many bytes a row.
    Fixed(usize),
    Bits,
    /// Offsets have eight bytes if `wide`, else four.
    Variable {
        wide: bool,
    },
}

impl Offsets<'_> {
    fn len(&self) -> usize {
        match self {
            Offsets::Narrow(bytes) => bytes.len() / 4,
            Offsets::Wide(bytes) => bytes.len() / 8,
        }
    }

    /// Below 0 where it is no offset.
    fn get(&self, at: usize) -> i64 {
        match self {
            Offsets::Narrow(bytes) => i64::from(i32::from_le_bytes(bytes.as_chunks().0[at])),
            Offsets::Wide(bytes) => i64::from_le_bytes(bytes.as_chunks().0[at]),
        }
    }
}

/// Rounds up to whole words.
fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(8)
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.as_chunks().0.get(at)?))
}
