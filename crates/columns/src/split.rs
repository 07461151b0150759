//! Splits rows by the output partition of each.

use crate::{Buffer, padded};

/// An output partition that is not needed.
const UNWANTED: u32 = u32::MAX;

/// Which rows go to which part: those of a part in the order of the input.
pub struct Split {
    /// The part of each row; unneeded rows are behind the last part.
    part_of_row: Vec<u32>,
    /// Rows of each part, and of the unneeded rest.
    rows: Vec<usize>,
}

impl Split {
    /// `partitions`: of each row, the number of its output partition. `part_of`: of each output partition, the number of its part,
    /// from 0 to `parts`, or `u32::MAX` if its rows are not needed.
    ///
    /// # Errors
    /// A row has an unknown partition, or there are more than 2^32 - 1 rows.
    pub fn new(partitions: &[i64], part_of: &[u32], parts: usize) -> Result<Split, String> {
        if partitions.len() >= u32::MAX as usize {
            return Err(format!("{} rows in one partition are too many: make smaller partitions", partitions.len()));
        }
        if let Some(part) = part_of.iter().find(|part| **part != UNWANTED && **part as usize >= parts) {
            return Err(format!("part {part} of {parts}"));
        }
        let mut rows = vec![0; parts + 1];
        let mut part_of_row = Vec::with_capacity(partitions.len());
        for (row, partition) in partitions.iter().enumerate() {
            let part = usize::try_from(*partition).ok().and_then(|at| part_of.get(at)).ok_or_else(|| {
                format!("row {row} has output partition {partition}, but there are {}, from 0", part_of.len())
            })?;
            let part = (*part).min(parts as u32);
            rows[part as usize] += 1;
            part_of_row.push(part);
        }
        Ok(Split { part_of_row, rows })
    }

    /// Rows of output partitions that are not needed.
    pub fn unwanted(&self) -> u64 {
        self.rows[self.rows.len() - 1] as u64
    }

    /// Rows of each part.
    pub fn rows(&self) -> &[usize] {
        &self.rows[..self.rows.len() - 1]
    }

    /// Bytes of each part, if the rows have these buffers.
    ///
    /// # Errors
    /// A buffer has too few rows, its offsets do not rise or lead beyond its bytes, or a value has 4 GiB or more.
    pub fn sizes(&self, buffers: &[Buffer<'_>]) -> Result<Vec<u64>, String> {
        let head = 8 * (1 + buffers.len()) as u64;
        let mut sizes: Vec<u64> = self.rows().iter().map(|rows| if *rows > 0 { head } else { 0 }).collect();
        for (number, buffer) in buffers.iter().enumerate() {
            check(buffer, self.part_of_row.len()).map_err(|why| format!("buffer {number}: {why}"))?;
            for (size, own) in sizes.iter_mut().zip(self.bytes_of(buffer)) {
                *size += padded(own) as u64;
            }
        }
        Ok(sizes)
    }

    /// Writes all parts, one after another, into `outs`: each takes as many whole parts as it has bytes for ([`Split::sizes`], which has
    /// checked the buffers).
    ///
    /// # Panics
    /// The outputs have other sizes.
    pub fn write(&self, buffers: &[Buffer<'_>], outs: Vec<&mut [u8]>) {
        let bytes: Vec<Vec<usize>> = buffers.iter().map(|buffer| self.bytes_of(buffer)).collect();
        // Of each buffer, its room in each part.
        let mut rooms: Vec<Vec<&mut [u8]>> = buffers.iter().map(|_| Vec::with_capacity(self.rows.len())).collect();
        let mut outs = outs.into_iter();
        let mut out: &mut [u8] = &mut [];
        for (part, rows) in self.rows().iter().enumerate() {
            if *rows > 0 {
                while out.is_empty() {
                    out = outs.next().expect("room for all parts");
                }
                let words = std::iter::once(*rows).chain(bytes.iter().map(|own| own[part]));
                for word in words {
                    cut(&mut out, 8).copy_from_slice(&(word as u64).to_le_bytes());
                }
            }
            for (rooms, bytes) in rooms.iter_mut().zip(&bytes) {
                rooms.push(cut(&mut out, bytes[part]));
                cut(&mut out, padded(bytes[part]) - bytes[part]).fill(0);
            }
        }
        for (buffer, rooms) in buffers.iter().zip(rooms) {
            self.write_buffer(buffer, rooms);
        }
    }

    /// Of each part, without padding.
    fn bytes_of(&self, buffer: &Buffer<'_>) -> Vec<usize> {
        match buffer {
            Buffer::Fixed { width, .. } => self.rows().iter().map(|rows| width * rows).collect(),
            Buffer::Bits { .. } => self.rows().iter().map(|rows| rows.div_ceil(8)).collect(),
            Buffer::AllSet => vec![0; self.rows().len()],
            Buffer::Variable { offsets, .. } => {
                let mut bytes: Vec<usize> = self.rows.iter().map(|rows| padded(4 * rows)).collect();
                for (row, part) in self.part_of_row.iter().enumerate() {
                    bytes[*part as usize] += (offsets.get(row + 1) - offsets.get(row)) as usize;
                }
                bytes.pop();
                bytes
            }
        }
    }

    /// Reads row after row and appends to the parts: each byte of the input comes into the cache once. (Part after part reads each line
    /// of it as often as it has rows: 1.5 in place of 0.5 CPU-s/GiB for columns of 32 MB.)
    fn write_buffer(&self, buffer: &Buffer<'_>, mut rooms: Vec<&mut [u8]>) {
        match buffer {
            Buffer::Fixed { width: 1, values } => self.write_fixed::<1>(values, rooms),
            Buffer::Fixed { width: 2, values } => self.write_fixed::<2>(values, rooms),
            Buffer::Fixed { width: 4, values } => self.write_fixed::<4>(values, rooms),
            Buffer::Fixed { width: 8, values } => self.write_fixed::<8>(values, rooms),
            Buffer::Fixed { width: 16, values } => self.write_fixed::<16>(values, rooms),
            Buffer::Fixed { width, values } => {
                for (value, part) in values.chunks_exact(*width).zip(&self.part_of_row) {
                    if let Some(room) = rooms.get_mut(*part as usize) {
                        cut(room, *width).copy_from_slice(value);
                    }
                }
            }
            Buffer::Bits { bits, start } => {
                for room in &mut rooms {
                    room.fill(0);
                }
                let mut next = vec![0; rooms.len()];
                for (row, part) in self.part_of_row.iter().enumerate() {
                    if let Some(room) = rooms.get_mut(*part as usize) {
                        let (from, at) = (start + row, &mut next[*part as usize]);
                        room[*at / 8] |= (bits[from / 8] >> (from % 8) & 1) << (*at % 8);
                        *at += 1;
                    }
                }
            }
            Buffer::AllSet => {}
            Buffer::Variable { offsets, values } => {
                let mut lengths = Vec::with_capacity(rooms.len());
                for (room, rows) in rooms.iter_mut().zip(self.rows()) {
                    lengths.push(cut(room, 4 * rows));
                    cut(room, padded(4 * rows) - 4 * rows).fill(0);
                }
                for (row, part) in self.part_of_row.iter().enumerate() {
                    let value = &values[offsets.get(row) as usize..offsets.get(row + 1) as usize];
                    let part = *part as usize;
                    if let (Some(length), Some(room)) = (lengths.get_mut(part), rooms.get_mut(part)) {
                        cut(length, 4).copy_from_slice(&(value.len() as u32).to_le_bytes());
                        cut(room, value.len()).copy_from_slice(value);
                    }
                }
            }
        }
    }

    fn write_fixed<const WIDTH: usize>(&self, values: &[u8], mut rooms: Vec<&mut [u8]>) {
        for (value, part) in values.as_chunks::<WIDTH>().0.iter().zip(&self.part_of_row) {
            if let Some(room) = rooms.get_mut(*part as usize) {
                cut(room, WIDTH).copy_from_slice(value);
            }
        }
    }
}

/// Takes bytes off the front.
fn cut<'a>(room: &mut &'a mut [u8], bytes: usize) -> &'a mut [u8] {
    room.split_off_mut(..bytes).expect("room for what was counted")
}

fn check(buffer: &Buffer<'_>, rows: usize) -> Result<(), String> {
    let has = match buffer {
        Buffer::Fixed { width: 0, .. } => return Err("a width of 0".into()),
        Buffer::Fixed { width, values } => values.len() / width,
        Buffer::Bits { bits, start } => (8 * bits.len()).saturating_sub(*start),
        Buffer::AllSet => rows,
        Buffer::Variable { offsets, values } => {
            if offsets.len() > rows {
                for row in 0..rows {
                    let (start, end) = (offsets.get(row), offsets.get(row + 1));
                    if start < 0 || end < start || end as u64 > values.len() as u64 {
                        return Err(format!("row {row} lies from {start} to {end}, of {} bytes", values.len()));
                    }
                    if end - start > i64::from(u32::MAX) {
                        return Err(format!("row {row} has {} bytes; 4 GiB are the limit", end - start));
                    }
                }
            }
            offsets.len().saturating_sub(1)
        }
    };
    if has < rows { Err(format!("it has {has} of {rows} rows")) } else { Ok(()) }
}
