//! The inner loops of the sort workload: records of 100 bytes with a 10-byte key, as in the public sort benchmark.

use crate::memory::{Segment, buffer_of, bytes_of};
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
        return Err(bad_input(format!("{} bytes are not a whole number of records of {RECORD} bytes", bytes.len())));
    }
    Ok(bytes.chunks_exact(RECORD))
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
    if out.inner.len() != input.len() {
        return Err(bad_input(format!(
            "the output has {} bytes, the input {}: make them the same length",
            out.inner.len(),
            input.len()
        )));
    }
    let mut out = out.exclusive(std::slice::from_ref(&input))?;
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
