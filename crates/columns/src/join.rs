//! Joins parts to columns.

use crate::{Kind, padded, word};

/// Parts whose rows follow one another, checked against their kinds.
pub struct Joined<'a> {
    kinds: &'a [Kind],
    parts: Vec<Part<'a>>,
    rows: usize,
    sizes: Vec<[usize; 2]>,
}

struct Part<'a> {
    rows: usize,
    /// Of each buffer.
    buffers: Vec<&'a [u8]>,
}

/// Checks the parts to join. The bytes may come from anywhere, so invalid ones are an error.
///
/// # Errors
/// A part does not have these buffers, or offsets of four bytes cannot name all bytes.
pub fn measure<'a>(parts: &[&'a [u8]], kinds: &'a [Kind]) -> Result<Joined<'a>, String> {
    let parts = parts.iter().filter(|part| !part.is_empty()).enumerate();
    let parts = parts.map(|(number, bytes)| parse(bytes, kinds).map_err(|why| format!("part {number}: {why}")));
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    let rows = parts.iter().map(|part| part.rows).sum();
    let size_of = |(at, kind): (usize, &Kind)| match kind {
        Kind::Fixed(width) => Ok([rows * width, 0]),
        Kind::Bits if parts.iter().all(|part| part.buffers[at].is_empty()) => Ok([0, 0]),
        Kind::Bits => Ok([usize::div_ceil(rows, 8), 0]),
        Kind::Variable { wide } => {
            let bytes: usize = parts.iter().map(|part| part.buffers[at].len() - padded(4 * part.rows)).sum();
            if !wide && bytes > i32::MAX as usize {
                return Err(format!("{bytes} bytes of one column in one partition: the limit of its type is 2 GiB"));
            }
            Ok([(rows + 1) * if *wide { 8 } else { 4 }, bytes])
        }
    };
    let sizes = kinds.iter().enumerate().map(size_of).collect::<Result<_, _>>()?;
    Ok(Joined { kinds, parts, rows, sizes })
}

fn parse<'a>(bytes: &'a [u8], kinds: &[Kind]) -> Result<Part<'a>, String> {
    let short = || format!("it has {} bytes, which is too few", bytes.len());
    let rows = word(bytes, 0).and_then(|rows| u32::try_from(rows).ok()).ok_or_else(short)? as usize;
    let mut rest = bytes.get(8 * (1 + kinds.len())..).ok_or_else(short)?;
    let mut buffers = Vec::with_capacity(kinds.len());
    for (at, kind) in kinds.iter().enumerate() {
        let len = word(bytes, 1 + at).and_then(|len| usize::try_from(len).ok()).ok_or_else(short)?;
        let own = rest.get(..len).ok_or_else(short)?;
        rest = rest.get(len.next_multiple_of(8)..).ok_or_else(short)?;
        let fits = match kind {
            Kind::Fixed(width) => rows.checked_mul(*width) == Some(len),
            Kind::Bits => len == 0 || len == rows.div_ceil(8),
            Kind::Variable { .. } => {
                let lengths = own.get(..padded(4 * rows)).ok_or_else(short)?;
                let sum: u64 = lengths_in(lengths, rows).map(|length| length as u64).sum();
                (len - lengths.len()) as u64 == sum
            }
        };
        if !fits {
            return Err(format!("buffer {at} has {len} bytes for {rows} rows of {kind:?}"));
        }
        buffers.push(own);
    }
    if rest.is_empty() { Ok(Part { rows, buffers }) } else { Err(format!("{} bytes too many", rest.len())) }
}

fn lengths_in(buffer: &[u8], rows: usize) -> impl Iterator<Item = usize> {
    buffer.as_chunks().0[..rows].iter().map(|length| u32::from_le_bytes(*length) as usize)
}

impl Joined<'_> {
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Of each buffer, the bytes of its values, bits or offsets, and then the bytes that offsets name. Bits that are all set have none.
    pub fn sizes(&self) -> &[[usize; 2]] {
        &self.sizes
    }

    /// The values of a buffer of fixed width, as each part has them.
    pub fn values(&self, buffer: usize) -> impl Iterator<Item = &[u8]> {
        self.parts.iter().map(move |part| part.buffers[buffer])
    }

    /// Writes a buffer.
    ///
    /// # Panics
    /// The sizes of `out` differ from [`Joined::sizes`].
    pub fn write(&self, buffer: usize, out: [&mut [u8]; 2]) {
        let [first, second] = out;
        assert_eq!([first.len(), second.len()], self.sizes[buffer], "as measured");
        let parts = self.parts.iter().map(|part| (part.rows, part.buffers[buffer]));
        match self.kinds[buffer] {
            Kind::Fixed(_) => {
                let mut rest = first;
                for (_, bytes) in parts {
                    rest.split_off_mut(..bytes.len()).expect("measured").copy_from_slice(bytes);
                }
            }
            Kind::Bits if first.is_empty() => {}
            Kind::Bits => {
                first.fill(0);
                let mut at = 0;
                for (rows, bits) in parts {
                    append_bits(first, at, rows, bits);
                    at += rows;
                }
            }
            Kind::Variable { wide: true } => join_variable(parts, first.as_chunks_mut().0, second, u64::to_le_bytes),
            Kind::Variable { wide: false } => {
                join_variable(parts, first.as_chunks_mut().0, second, |end| (end as u32).to_le_bytes())
            }
        }
    }
}

/// Sets `rows` bits from bit `at`, which are 0; no `bits`: all of them.
fn append_bits(out: &mut [u8], at: usize, rows: usize, bits: &[u8]) {
    let shift = at % 8;
    for byte in 0..rows.div_ceil(8) {
        let left = rows - 8 * byte;
        let mask = if left >= 8 { 0xff } else { (1u8 << left) - 1 };
        let value = bits.get(byte).copied().unwrap_or(0xff) & mask;
        let to = at / 8 + byte;
        out[to] |= value << shift;
        if shift > 0 && value >> (8 - shift) != 0 {
            out[to + 1] |= value >> (8 - shift);
        }
    }
}

fn join_variable<'a, const WIDTH: usize>(
    parts: impl Iterator<Item = (usize, &'a [u8])>,
    offsets: &mut [[u8; WIDTH]],
    values: &mut [u8],
    offset: impl Fn(u64) -> [u8; WIDTH],
) {
    let (mut row, mut end) = (0, 0);
    offsets[0] = offset(0);
    for (rows, bytes) in parts {
        let (lengths, own) = bytes.split_at(padded(4 * rows));
        values[end..end + own.len()].copy_from_slice(own);
        for length in lengths_in(lengths, rows) {
            end += length;
            row += 1;
            offsets[row] = offset(end as u64);
        }
    }
}
