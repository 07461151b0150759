//! The checksum of a block: XXH3-64 (xxHash specification 0.2), which misses damage once in 2^64.
//!
//! A receiver checks each block while it lies in the cache, on the thread that copies it out of the socket. There a CRC
//! by carry-less multiplication took as long as the copy (10 GiB/s without AVX-512), and XXH3 takes a quarter of that
//! (docs/measurements/data-path/what-was-tried-for-the-receiver.md).

use mission_core::defaults::BLOCK_BYTES;

pub fn of(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

/// Checksums of the blocks of a part; the last block may be short.
pub fn of_blocks(part: &[u8]) -> Vec<u64> {
    part.chunks(BLOCK_BYTES as usize).map(of).collect()
}

/// Copies a part, and gives the checksums of its blocks: each is summed up while the copy lies in the cache.
///
/// # Panics
/// The lengths differ.
pub fn copy(part: &[u8], into: &mut [u8]) -> Vec<u64> {
    assert_eq!(part.len(), into.len());
    let blocks = part.chunks(BLOCK_BYTES as usize).zip(into.chunks_mut(BLOCK_BYTES as usize));
    let copied = blocks.map(|(block, into)| {
        into.copy_from_slice(block);
        // Of the copy, because its reader compares that.
        of(into)
    });
    copied.collect()
}
