//! The objects of one process: in memory up to a limit, then in the spool.

use crate::checksum;
use crate::copies::{Copies, PartCopy};
use crate::object::ObjectId;
use crate::probe;
use crate::segment::{Pool, Segment};
use crate::spool::{SpoolRange, Spools};
use mission_core::defaults::{BLOCK_BYTES, STORE_WORKING_PART};
use mission_core::host::GroupId;
use mission_core::types::{Encryption, JobId};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, RwLock};

pub struct Store {
    objects: RwLock<HashMap<ObjectId, Arc<Object>>>,
    /// Parts of others' objects that were received in broadcasts.
    pub copies: Copies,
    pool: Arc<Pool>,
    memory_limit: u64,
    spools: Spools,
}

/// Parts that lie one after another, with the checksums of their blocks.
pub struct Object {
    pub encryption: Encryption,
    parts: Vec<Part>,
    body: Body,
}

struct Part {
    start: u64,
    len: u64,
    checksums: Vec<u64>,
}

/// Where all of an object lies.
pub enum Body {
    Memory(Arc<Segment>),
    Spooled(SpoolRange),
}

/// A part that can be served: of an own object, or a copy.
pub enum Holding {
    Own(Arc<Object>, u32),
    Copy(Arc<PartCopy>),
    /// The synthetic object that every process serves.
    Probe,
}

/// Bytes of an object that are being sent.
pub enum Source<'a> {
    Memory(&'a [u8]),
    Spooled(&'a SpoolRange, u64),
}

impl Store {
    /// `memory_limit`: bytes of segments; objects beyond three quarters of it go to spool files in `spool_folder`.
    pub fn new(pool: Arc<Pool>, memory_limit: u64, spool_folder: PathBuf) -> Store {
        Store {
            objects: RwLock::default(),
            copies: Copies::default(),
            pool,
            memory_limit,
            spools: Spools::new(spool_folder),
        }
    }

    /// Keeps a copy of `parts`, in memory that other processes of the host can map for `sharers`, a job.
    ///
    /// # Errors
    /// No memory, or the spool disk is full: nothing was kept.
    pub fn put(&self, parts: &[&[u8]], encryption: Encryption, sharers: Option<GroupId>) -> io::Result<ObjectId> {
        let id = ObjectId::random();
        self.put_as(id, parts, encryption, sharers)?;
        Ok(id)
    }

    /// As [`Store::put`], under a name that the object has already.
    ///
    /// # Errors
    /// As there.
    pub fn put_as(
        &self,
        id: ObjectId,
        parts: &[&[u8]],
        encryption: Encryption,
        sharers: Option<GroupId>,
    ) -> io::Result<()> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let mut segment = self.pool.take(len, sharers)?;
        let mut rest = segment.bytes_mut();
        let mut start = 0;
        let mut kept = Vec::with_capacity(parts.len());
        for part in parts {
            let (own, after) = rest.split_at_mut(part.len());
            let checksums = checksum::copy(part, own);
            kept.push(Part { start, len: part.len() as u64, checksums });
            start += part.len() as u64;
            rest = after;
        }
        self.keep(id, Arc::new(segment), kept, encryption)
    }

    /// Keeps `segment` itself, cut into parts of `sizes`; nobody may write to it any more.
    ///
    /// # Errors
    /// The sizes do not add up to the segment, or the spool disk is full: nothing was kept.
    pub fn adopt(&self, segment: Arc<Segment>, sizes: &[u64], encryption: Encryption) -> io::Result<ObjectId> {
        let id = ObjectId::random();
        self.adopt_as(id, segment, sizes, encryption)?;
        Ok(id)
    }

    /// As [`Store::adopt`], under a name that the object has already.
    ///
    /// # Errors
    /// As there.
    pub fn adopt_as(
        &self,
        id: ObjectId,
        segment: Arc<Segment>,
        sizes: &[u64],
        encryption: Encryption,
    ) -> io::Result<()> {
        if sizes.iter().sum::<u64>() != segment.len() as u64 {
            let text = format!(
                "the sizes of the parts add up to {}, the segment has {}",
                sizes.iter().sum::<u64>(),
                segment.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut start = 0;
        let parts = sizes
            .iter()
            .map(|&len| {
                let bytes = &segment.bytes()[start as usize..(start + len) as usize];
                let part = Part { start, len, checksums: checksum::of_blocks(bytes) };
                start += len;
                part
            })
            .collect();
        self.keep(id, segment, parts, encryption)
    }

    fn keep(&self, id: ObjectId, segment: Arc<Segment>, parts: Vec<Part>, encryption: Encryption) -> io::Result<()> {
        let working = self.memory_limit / STORE_WORKING_PART;
        self.make_room(working);
        let room = self.memory_limit - working;
        let body = if self.pool.live_bytes() > room && !segment.is_empty() {
            let sharers = segment.sharers().filter(|_| encryption == Encryption::None);
            Body::Spooled(self.spools.write(segment.bytes(), sharers)?)
        } else {
            Body::Memory(segment)
        };
        self.objects.write().expect("no panic while held").insert(id, Arc::new(Object { encryption, parts, body }));
        Ok(())
    }

    pub fn get(&self, id: &ObjectId) -> Option<Arc<Object>> {
        self.objects.read().expect("no panic while held").get(id).cloned()
    }

    /// The object or copy that has a part.
    pub fn holding(&self, id: &ObjectId, part: u32) -> Option<Holding> {
        if *id == probe::OBJECT {
            return Some(Holding::Probe);
        }
        let own = self.get(id).map(|object| Holding::Own(object, part));
        own.or_else(|| self.copies.get(&(*id, part)).map(Holding::Copy))
    }

    /// Drops copies if so many more bytes would not fit into memory with them.
    pub fn make_room(&self, bytes: u64) {
        let over = (self.pool.live_bytes() + bytes).saturating_sub(self.memory_limit);
        if over > 0 {
            self.copies.make_room(over);
        }
    }

    /// Frees an object and its copies; a range that is being sent is sent to its end. False if it was not here.
    pub fn free(&self, id: &ObjectId) -> bool {
        let gone = self.objects.write().expect("no panic while held").remove(id);
        self.copies.free(id);
        gone.is_some()
    }

    /// A job is over.
    pub fn forget_job(&self, job: &JobId, group: GroupId) {
        self.copies.forget_job(job);
        self.spools.forget_job(group);
    }

    /// Bytes of memory for objects and what is fetched.
    pub fn memory_limit(&self) -> u64 {
        self.memory_limit
    }

    pub fn len(&self) -> usize {
        self.objects.read().expect("no panic while held").len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn spooled_bytes(&self) -> u64 {
        self.spools.live_bytes()
    }
}

impl Holding {
    pub fn encryption(&self) -> Encryption {
        match self {
            Holding::Own(object, _) => object.encryption,
            Holding::Copy(copy) => copy.encryption(),
            Holding::Probe => Encryption::None,
        }
    }

    /// As [`Object::range`].
    pub fn range(&self, start: u64, len: u64) -> Option<(Source<'_>, Vec<u64>)> {
        match self {
            Holding::Own(object, part) => {
                object.range(*part, start, len).map(|(source, checksums)| (source, checksums.to_vec()))
            }
            Holding::Copy(copy) => copy.range(start, len).map(|(bytes, checksums)| (Source::Memory(bytes), checksums)),
            Holding::Probe => probe::first(start, len).map(|(bytes, checksums)| (Source::Memory(bytes), checksums)),
        }
    }
}

impl Object {
    pub fn part_len(&self, part: u32) -> Option<u64> {
        self.parts.get(part as usize).map(|usize| usize.len)
    }

    /// Bytes of each part.
    pub fn sizes(&self) -> Vec<u64> {
        self.parts.iter().map(|part| part.len).collect()
    }

    /// Where a part lies in memory: start and length in a segment; `None` where it does not.
    pub fn in_memory(&self, part: u32) -> Option<(&Arc<Segment>, u64, u64)> {
        let own = self.parts.get(part as usize)?;
        match &self.body {
            Body::Memory(segment) => Some((segment, own.start, own.len)),
            Body::Spooled(_) => None,
        }
    }

    pub fn body(&self) -> &Body {
        &self.body
    }

    /// Where a part of `len` bytes begins, and the checksums of its blocks.
    pub fn place(&self, part: u32, len: u64) -> Option<(u64, &[u64])> {
        let own = self.parts.get(part as usize).filter(|own| own.len == len)?;
        Some((own.start, &own.checksums))
    }

    /// A range of a part and the checksums of its blocks; `None` where it is not a range of the part, or does not begin
    /// and end with blocks.
    pub fn range(&self, part: u32, start: u64, len: u64) -> Option<(Source<'_>, &[u64])> {
        let own = self.parts.get(part as usize)?;
        let end = start.checked_add(len).filter(|end| *end <= own.len)?;
        if !start.is_multiple_of(BLOCK_BYTES) || (!end.is_multiple_of(BLOCK_BYTES) && end != own.len) {
            return None;
        }
        let checksums = own.checksums.get((start / BLOCK_BYTES) as usize..end.div_ceil(BLOCK_BYTES) as usize)?;
        let place = own.start + start;
        let source = match &self.body {
            Body::Memory(segment) => Source::Memory(&segment.bytes()[place as usize..(place + len) as usize]),
            Body::Spooled(range) => Source::Spooled(range, place),
        };
        Some((source, checksums))
    }

    /// Copies a whole part to a reader in the same process.
    ///
    /// # Errors
    /// The spool cannot be read, or what it holds is damaged.
    pub fn copy(&self, part: u32, into: &mut [u8]) -> io::Result<()> {
        let (source, checksums) = self
            .range(part, 0, into.len() as u64)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the part has another size"))?;
        match source {
            Source::Memory(bytes) => into.copy_from_slice(bytes),
            Source::Spooled(range, offset) => {
                range.read_at(offset, into)?;
                if checksum::of_blocks(into) != checksums {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "the spool file is damaged"));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(memory_limit: u64) -> Store {
        Store::new(Pool::new(64 << 20), memory_limit, std::env::temp_dir())
    }

    #[test]
    fn parts_come_back_as_they_were_put_in_memory_and_from_the_spool() {
        let long = vec![9u8; 600_000];
        for limit in [u64::MAX, 0] {
            let store = store(limit);
            let id = store.put(&[b"one", b"", &long], Encryption::None, None).unwrap();
            assert_eq!(store.spooled_bytes() > 0, limit == 0);
            let object = store.get(&id).unwrap();
            for (part, expected) in [(0, &b"one"[..]), (1, b""), (2, &long)] {
                let mut back = vec![0; object.part_len(part).unwrap() as usize];
                object.copy(part, &mut back).unwrap();
                assert_eq!(back, expected);
            }
            drop(object);
            assert!(store.free(&id) && !store.free(&id));
            assert_eq!((store.pool.live_bytes(), store.spooled_bytes()), (0, 0));
        }
    }

    #[test]
    fn ranges_beyond_a_part_or_between_blocks_are_refused() {
        let store = store(u64::MAX);
        let id = store.put(&[&[1; 600_000], &[2; 10]], Encryption::None, None).unwrap();
        let object = store.get(&id).unwrap();
        assert_eq!(object.range(0, 0, 600_000).unwrap().1.len(), 3);
        assert_eq!(object.range(0, BLOCK_BYTES, BLOCK_BYTES).unwrap().1.len(), 1);
        for (part, start, len) in
            [(0, 0, 600_001), (0, 1, 10), (0, 0, 10), (2, 0, 0), (1, u64::MAX, 2), (0, u64::MAX - 5, 10)]
        {
            assert!(object.range(part, start, len).is_none(), "{part} {start} {len}");
        }
    }
}
