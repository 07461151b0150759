//! The checksum of a block: CRC-64/NVME, which vector units do at memory speed and which finds every burst of up to 64
//! flipped bits.

use mission_core::defaults::BLOCK_BYTES;

pub fn of(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// Checksums of the blocks of a part; the last block may be short.
pub fn of_blocks(part: &[u8]) -> Vec<u64> {
    part.chunks(BLOCK_BYTES as usize).map(of).collect()
}
