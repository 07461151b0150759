//! The inner loops of the sort workload: records of 100 bytes with a 10-byte key, as in the public sort benchmark.

use crate::memory::{Bytes, Exclusive, Segment, buffer_of, bytes_of};
use crate::{bad_input, detached};
use pyo3::prelude::*;

const RECORD: usize = 100;
const KEY: usize = 10;

/// A key as a number that sorts like its bytes.
fn key(record: &[u8]) -> u128 {
    let mut bytes = [0; 16];
    bytes[6..].copy_from_slice(&record[..KEY]);
    u128::from_be_bytes(bytes)
}

fn records(bytes: &[u8]) -> PyResult<std::slice::ChunksExact<'_, u8>> {
    if !bytes.len().is_multiple_of(RECORD) {
        return Err(bad_input(format!("{} bytes are no whole number of records of {RECORD} bytes", bytes.len())));
    }
    Ok(bytes.chunks_exact(RECORD))
}

/// The right to write `len` bytes to a segment.
///
/// # Errors
/// It has another size, or is not for this call alone.
fn writable<'a>(out: &'a Segment, inputs: &[Bytes<'_>]) -> PyResult<Exclusive<'a>> {
    let len: usize = inputs.iter().map(|input| input.len()).sum();
    if out.inner.len() != len {
        return Err(bad_input(format!("the output has {} bytes, the input {len}", out.inner.len())));
    }
    out.exclusive(inputs)
}

/// Splits records by ascending splitter keys into `out`; gives the bytes of each part, one more than splitters.
#[pyfunction]
pub fn records_partition(
    py: Python<'_>,
    input: &Bound<'_, PyAny>,
    splitters: Vec<u8>,
    out: &Segment,
) -> PyResult<Vec<u64>> {
    let buffer = buffer_of(input)?;
    // SAFETY: `buffer` holds it, and the caller does not write to its input meanwhile.
    let input = unsafe { bytes_of(&buffer) }?;
    let records = records(&input)?;
    let bounds: Vec<u128> = splitters.chunks_exact(KEY).map(key).collect();
    let mut out = writable(out, std::slice::from_ref(&input))?;
    detached(py, || {
        let out = out.bytes_mut();
        let parts: Vec<u32> =
            records.clone().map(|record| bounds.partition_point(|bound| *bound <= key(record)) as u32).collect();
        let mut counts = vec![0u64; bounds.len() + 1];
        parts.iter().for_each(|part| counts[*part as usize] += 1);
        let mut ends: Vec<usize> = counts
            .iter()
            .scan(0, |start, count| Some(std::mem::replace(start, *start + *count as usize * RECORD)))
            .collect();
        for (record, part) in records.zip(&parts) {
            let at = &mut ends[*part as usize];
            out[*at..*at + RECORD].copy_from_slice(record);
            *at += RECORD;
        }
        counts.iter().map(|count| count * RECORD as u64).collect()
    })
}

/// Sorts records of several inputs, at most 65,536, by key into `out`; equal keys keep their order.
#[pyfunction]
pub fn records_sort(py: Python<'_>, inputs: Vec<Bound<'_, PyAny>>, out: &Segment) -> PyResult<()> {
    let buffers = inputs.iter().map(buffer_of).collect::<PyResult<Vec<_>>>()?;
    // SAFETY: as above.
    let inputs = buffers.iter().map(|buffer| unsafe { bytes_of(buffer) }).collect::<PyResult<Vec<_>>>()?;
    if inputs.len() > 1 << 16 {
        return Err(bad_input(format!("{} inputs are more than 65,536: join some of them first", inputs.len())));
    }
    let parts = inputs.iter().map(|input| records(input)).collect::<PyResult<Vec<_>>>()?;
    let mut out = writable(out, &inputs)?;
    detached(py, || {
        let out = out.bytes_mut();
        // Key above, place below: one comparison of numbers, and stable.
        let entries = parts.iter().enumerate().flat_map(|(part, records)| {
            let part = (part as u128) << 32;
            records.clone().enumerate().map(move |(place, record)| key(record) << 48 | part | place as u128)
        });
        let mut order: Vec<u128> = Vec::with_capacity(out.len() / RECORD);
        order.extend(entries);
        order.sort_unstable();
        for (to, entry) in out.chunks_exact_mut(RECORD).zip(&order) {
            let (part, place) = ((*entry >> 32) as u16 as usize, *entry as u32 as usize);
            to.copy_from_slice(&inputs[part][place * RECORD..(place + 1) * RECORD]);
        }
    })
}

/// Number, in order, first key, last key, checksum.
type Checked = (u64, bool, Vec<u8>, Vec<u8>, u64);

/// Of records: how many, whether their keys never fall, first and last key, and a checksum that does not depend on
/// their order (the sum of their XXH3-64, as the public benchmark sums CRC-32).
#[pyfunction]
pub fn records_check(py: Python<'_>, input: &Bound<'_, PyAny>) -> PyResult<Checked> {
    let buffer = buffer_of(input)?;
    // SAFETY: as above.
    let input = unsafe { bytes_of(&buffer) }?;
    let records = records(&input)?;
    detached(py, || {
        let ordered = records.clone().map(key).is_sorted();
        let sum = records.clone().map(twox_hash::XxHash3_64::oneshot).fold(0u64, u64::wrapping_add);
        let edge = |record: Option<&[u8]>| record.map_or(Vec::new(), |record| record[..KEY].to_vec());
        (records.len() as u64, ordered, edge(records.clone().next()), edge(records.clone().last()), sum)
    })
}
