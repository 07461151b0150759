//! Rows in the order of their bytes: which range each is in, and rows of one width sorted.

use crate::{Buffer, Offsets};
use std::cmp::Ordering;

/// Bytes at the front of a row that are compared as one number.
const FRONT: usize = 16;
/// Of a row that is sorted, the bytes in front that stand in one number with its place.
const SORT_FRONT: usize = 10;
/// Inputs and rows of each, as their numbers have 16 and 32 bits.
const INPUTS_MAX: usize = 1 << 16;
const ROWS_MAX: usize = 1 << 32;

/// The front of a row as a number that sorts like its bytes, if those differ.
fn front(row: &[u8]) -> u128 {
    let mut bytes = [0; FRONT];
    let len = row.len().min(FRONT);
    bytes[..len].copy_from_slice(&row[..len]);
    u128::from_be_bytes(bytes)
}

/// Writes to `out` how many of the ascending `splitters` each row is not below, by bytes; a shorter row is below a longer one
/// that begins with it.
///
/// # Errors
/// The buffer has bits, or fewer rows than `out`, or offsets outside of its bytes.
pub fn ranges(buffer: &Buffer<'_>, splitters: &[Vec<u8>], out: &mut [i64]) -> Result<(), String> {
    let splitters: Vec<(u128, &[u8])> = splitters.iter().map(|own| (front(own), &own[..])).collect();
    let range = |row: &[u8]| {
        let number = front(row);
        let is_above = |(of, whole): &(u128, &[u8])| match of.cmp(&number) {
            Ordering::Equal => *whole <= row,
            other => other == Ordering::Less,
        };
        splitters.partition_point(is_above) as i64
    };
    match buffer {
        Buffer::Fixed { width, values } if *width > 0 && values.len() / width >= out.len() => {
            for (to, row) in out.iter_mut().zip(values.chunks_exact(*width)) {
                *to = range(row);
            }
        }
        Buffer::Variable { offsets, values } if out.is_empty() || offsets.len() > out.len() => {
            for (place, to) in out.iter_mut().enumerate() {
                *to = range(row_at(offsets, values, place)?);
            }
        }
        _ => return Err("a column is not of bytes, or has too few rows".to_owned()),
    }
    Ok(())
}

fn row_at<'a>(offsets: &Offsets<'_>, values: &'a [u8], place: usize) -> Result<&'a [u8], String> {
    let [start, end] = [offsets.get(place), offsets.get(place + 1)].map(|own| usize::try_from(own).ok());
    start
        .zip(end)
        .and_then(|(start, end)| values.get(start..end))
        .ok_or_else(|| format!("row {place} lies outside of its column"))
}

/// Sorts rows of `width` bytes by the first `key` of them into `out`. Equal ones keep their order.
///
/// # Errors
/// An input is not a whole number of rows, the inputs' total length differs from `out`, or there are too many.
pub fn sort_rows(inputs: &[&[u8]], width: usize, key: usize, out: &mut [u8]) -> Result<(), String> {
    if width == 0 || key > width || inputs.iter().any(|own| !own.len().is_multiple_of(width)) {
        return Err(format!(
            "an input is not a whole number of rows of {width} bytes, or its key of {key} bytes is longer"
        ));
    }
    if inputs.iter().map(|own| own.len()).sum::<usize>() != out.len() {
        return Err(format!("the output has {} bytes, which is not the sum of the inputs", out.len()));
    }
    if inputs.len() > INPUTS_MAX || inputs.iter().any(|own| own.len() / width > ROWS_MAX) {
        return Err(format!("there are more than {INPUTS_MAX} inputs, or one has more than {ROWS_MAX} rows"));
    }
    let front_len = key.min(SORT_FRONT);
    let row_of = |entry: &u128| {
        let (input, place) = ((*entry >> 32) as u16 as usize, *entry as u32 as usize);
        &inputs[input][place * width..(place + 1) * width]
    };
    // Key above, place below: one comparison of numbers, and stable.
    let entries = inputs.iter().enumerate().flat_map(|(input, rows)| {
        rows.chunks_exact(width).enumerate().map(move |(place, row)| {
            let mut bytes = [0; 16];
            bytes[..front_len].copy_from_slice(&row[..front_len]);
            u128::from_be_bytes(bytes) | (input as u128) << 32 | place as u128
        })
    });
    let mut order: Vec<u128> = Vec::with_capacity(out.len() / width);
    order.extend(entries);
    order.sort_unstable();
    if key > SORT_FRONT {
        for equal in order.chunk_by_mut(|one, other| *one >> 48 == *other >> 48).filter(|own| own.len() > 1) {
            equal.sort_by(|one, other| row_of(one)[SORT_FRONT..key].cmp(&row_of(other)[SORT_FRONT..key]));
        }
    }
    for (to, entry) in out.chunks_exact_mut(width).zip(&order) {
        to.copy_from_slice(row_of(entry));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows() -> impl Strategy<Value = Vec<Vec<u8>>> {
        // Few letters, so that many begin alike.
        prop::collection::vec(prop::collection::vec(prop::sample::select(vec![0, 1, 255]), 0..24), 0..60)
    }

    proptest! {
        #[test]
        fn a_row_is_in_the_range_that_its_bytes_say(rows in rows(), mut splitters in rows()) {
            splitters.sort();
            let values = rows.concat();
            let ends = rows.iter().scan(0u64, |end, row| { *end += row.len() as u64; Some(*end) });
            let offsets: Vec<u8> = std::iter::once(0).chain(ends).flat_map(u64::to_le_bytes).collect();
            let mut out = vec![0; rows.len()];
            ranges(&Buffer::Variable { offsets: Offsets::Wide(&offsets), values: &values }, &splitters, &mut out).unwrap();
            let expected: Vec<i64> = rows.iter().map(|row| splitters.iter().filter(|own| *own <= row).count() as i64).collect();
            prop_assert_eq!(out, expected);
        }

        #[test]
        fn rows_of_several_inputs_are_sorted_and_equal_ones_stay(
            mut values in prop::collection::vec(prop::sample::select(vec![0u8, 1, 255]), 0..900),
            width in 1usize..20,
            key in 0usize..20,
            cut in 0usize..900,
        ) {
            let key = key.min(width);
            values.truncate(values.len() / width * width);
            let (first, second) = values.split_at(cut / width * width % (values.len() + width).max(1));
            let mut out = vec![0; values.len()];
            sort_rows(&[first, second], width, key, &mut out).unwrap();
            let mut expected: Vec<&[u8]> = values.chunks_exact(width).collect();
            expected.sort_by_key(|row| &row[..key]);
            prop_assert_eq!(out, expected.concat());
        }
    }

    #[test]
    fn what_has_too_few_rows_is_an_error() {
        let mut out = [0; 2];
        assert!(ranges(&Buffer::Fixed { width: 4, values: &[0; 7] }, &[], &mut out).is_err());
        assert!(ranges(&Buffer::AllSet, &[], &mut out).is_err());
        let offsets: Vec<u8> = [0u32, 3, 9].iter().flat_map(|own| own.to_le_bytes()).collect();
        let buffer = Buffer::Variable { offsets: Offsets::Narrow(&offsets), values: b"abcd" };
        assert!(ranges(&buffer, &[], &mut out).is_err());
        assert!(sort_rows(&[b"abc"], 2, 1, &mut [0; 2]).is_err());
        assert!(sort_rows(&[b"ab"], 2, 3, &mut [0; 2]).is_err());
        assert!(sort_rows(&[b"ab"], 1, 1, &mut [0; 1]).is_err());
    }
}
