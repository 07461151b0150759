//! Hashes of rows, bit for bit as pandas has them (`pandas.util.hash_pandas_object` with its default key, without the index).
//!
//! Numbers become words of 64 bits. Texts become words by SipHash-2-4 (Aumasson and Bernstein 2012). A word is then spread over 64 bits by the
//! finalizer of splitmix64 (Steele, Lea and Flood 2014). Columns are combined as CPython hashed tuples before 3.8.

use crate::Offsets;
use siphasher::sip::SipHasher24;
use std::hash::Hasher;

/// pandas' `_default_hash_key`, "0123456789123456", as two words.
const KEY: [u64; 2] = [u64::from_le_bytes(*b"01234567"), u64::from_le_bytes(*b"89123456")];
/// Of a text that is missing, where pandas hashes different texts once (`categorize=True`).
const MISSING: u64 = u64::MAX;

/// A column whose rows are hashed.
#[derive(Clone, Copy, Debug)]
pub enum Column<'a> {
    /// Unsigned numbers, or signed ones taken for unsigned of their width: 1, 2, 4 or 8 bytes.
    Words { width: usize, values: &'a [u8] },
    /// IEEE 754 numbers of 2, 4 or 8 bytes. All that are not a number are alike, and so are both zeros.
    Floats { width: usize, values: &'a [u8] },
    /// UTF-8. `valid`: bits, and the first of them; `None`: no text is missing.
    Texts { offsets: Offsets<'a>, values: &'a [u8], valid: Option<(&'a [u8], usize)> },
    /// Hashes that the caller has made.
    Hashed(&'a [u8]),
}

/// Hashes rows of one column. `out` has a word for each row.
///
/// # Errors
/// The column has too few rows, or is invalid.
pub fn hash_column(column: Column<'_>, out: &mut [u64]) -> Result<(), String> {
    each(column, out.len(), |row, hash| out[row] = hash)
}

/// Hashes rows of several columns: each row as the tuple of its values.
///
/// # Errors
/// As [`hash_column`].
pub fn hash_rows(columns: &[Column<'_>], out: &mut [u64]) -> Result<(), String> {
    out.fill(0x34_5678);
    let mut factor = 1_000_003u64;
    for (number, column) in columns.iter().enumerate() {
        each(*column, out.len(), |row, hash| out[row] = (out[row] ^ hash).wrapping_mul(factor))?;
        let left = (columns.len() - number) as u64;
        factor = factor.wrapping_add(82_520 + 2 * left);
    }
    out.iter_mut().for_each(|hash| *hash = hash.wrapping_add(97_531));
    Ok(())
}

fn each(column: Column<'_>, rows: usize, mut take: impl FnMut(usize, u64)) -> Result<(), String> {
    let enough = |has: usize| if has < rows { Err(format!("it has {has} of {rows} rows")) } else { Ok(()) };
    macro_rules! words {
        ($type:ty, $values:expr, $word:expr) => {{
            let values = $values.as_chunks::<{ size_of::<$type>() }>().0;
            enough(values.len())?;
            for (row, value) in values[..rows].iter().enumerate() {
                take(row, $word(<$type>::from_le_bytes(*value)));
            }
        }};
    }
    match column {
        Column::Words { width: 1, values } => words!(u8, values, |own| spread(u64::from(own))),
        Column::Words { width: 2, values } => words!(u16, values, |own| spread(u64::from(own))),
        Column::Words { width: 4, values } => words!(u32, values, |own| spread(u64::from(own))),
        Column::Words { width: 8, values } => words!(u64, values, spread),
        Column::Floats { width: 2, values } => words!(u16, values, |own| spread(canonical(u64::from(own), 5, 10))),
        Column::Floats { width: 4, values } => words!(u32, values, |own| spread(canonical(u64::from(own), 8, 23))),
        Column::Floats { width: 8, values } => words!(u64, values, |own| spread(canonical(own, 11, 52))),
        Column::Words { width, .. } | Column::Floats { width, .. } => {
            return Err(format!("numbers of {width} bytes are not supported"));
        }
        Column::Hashed(values) => words!(u64, values, |own| own),
        Column::Texts { offsets, values, valid } => {
            enough(offsets.len().saturating_sub(1))?;
            if let Some((bits, start)) = valid {
                enough((8 * bits.len()).saturating_sub(start))?;
            }
            for row in 0..rows {
                if let Some((bits, start)) = valid
                    && bits[(start + row) / 8] >> ((start + row) % 8) & 1 == 0
                {
                    take(row, MISSING);
                    continue;
                }
                let text = usize::try_from(offsets.get(row)).ok().zip(usize::try_from(offsets.get(row + 1)).ok());
                let text = text.and_then(|(start, end)| values.get(start..end));
                let text = text.ok_or_else(|| format!("row {row} lies outside of {} bytes", values.len()))?;
                let mut hasher = SipHasher24::new_with_keys(KEY[0], KEY[1]);
                hasher.write(text);
                take(row, spread(hasher.finish()));
            }
        }
    }
    Ok(())
}

/// The bits of a float with this many bits of exponent and of fraction: one pattern for what is not a number, and one for zero.
fn canonical(bits: u64, exponent: u32, fraction: u32) -> u64 {
    let sign = 1 << (exponent + fraction);
    let infinite = ((1 << exponent) - 1) << fraction;
    match bits & !sign {
        0 => 0,
        own if own > infinite => infinite | 1 << (fraction - 1),
        _ => bits,
    }
}

fn spread(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
