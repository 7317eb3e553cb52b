//! The newest samples of a TACH file that is being written, kept beside it: those that the compressor still holds, and
//! repeated ones that have no record yet ([`crate::tach::Checkpoint`]).
//!
//! Records are appended to a *slot*, and each new base begins a new slot elsewhere in the file, overwriting only the
//! second-to-last one: however long the recording, the file has the size of a few slots, and at any moment one slot is
//! whole. `docs/formats/tach.md` has the bytes.

use crate::tach::{Base, Checkpoint, MAX_SAMPLE_BYTES};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt as _;

const MAGIC: [u8; 8] = *b"TACHtail";
/// Magic, the journal's number, generation, length of the base, bytes of records that came with it, checksum of the base, checksum of all that.
const HEAD_LEN: usize = 5 * 8 + 2 * 4;
/// Length of the records and checksum.
const CHUNK_HEAD_LEN: usize = 4 + 4;
/// Most bytes of records in a chunk: with its head, one page.
const MAX_CHUNK: usize = 4096 - CHUNK_HEAD_LEN;
/// A slot starts at 0 or at a power of two from this one on.
const MIN_SLOT_LOG: u32 = 18;

/// Where a slot lies, and how far it may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    start: u64,
    end: u64,
}

impl Slot {
    /// A place for `len` bytes that leaves `last` alone.
    fn next_to(last: Option<Self>, len: u64) -> Self {
        let len = len.next_power_of_two().max(1 << MIN_SLOT_LOG);
        let start = match last {
            Some(last) if last.start < len => last.end.max(len).next_power_of_two(),
            _ => 0,
        };
        Self { start, end: start + len }
    }
}

/// Writes the file.
#[derive(Debug)]
pub(super) struct Tail {
    out: File,
    id: u64,
    generation: u64,
    slot: Option<Slot>,
    /// Where the next chunk goes.
    end: u64,
    buffer: Vec<u8>,
}

impl Tail {
    /// `out` is an empty file, `id` the journal's.
    pub fn new(out: File, id: u64) -> Self {
        Self { out, id, generation: 0, slot: None, end: 0, buffer: Vec::new() }
    }

    /// Writes a checkpoint to the file. If it has a base, that must already be in the TACH file.
    pub fn put(&mut self, checkpoint: &Checkpoint<'_>, sync: bool) -> io::Result<()> {
        self.buffer.clear();
        if let Some(base) = checkpoint.base {
            self.generation += 1;
            // The head of a chunk is shorter than the shortest record.
            let slot = Slot::next_to(self.slot, (HEAD_LEN + 2 * checkpoint.max_len()) as u64);
            (self.slot, self.end) = (Some(slot), slot.start);
            let first_len = checkpoint.records.len() as u64;
            self.buffer.extend(Head { generation: self.generation, base, first_len }.encode(self.id));
        }
        for records in checkpoint.records.chunks(MAX_CHUNK) {
            let place = self.end + self.buffer.len() as u64;
            self.buffer.extend(u32::try_from(records.len()).expect("a page").to_le_bytes());
            self.buffer.extend(chunk_checksum(self.id ^ self.generation, place, records).to_le_bytes());
            self.buffer.extend_from_slice(records);
        }
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.out.write_all_at(&self.buffer, self.end)?;
        self.end += self.buffer.len() as u64;
        debug_assert!(self.slot.is_some_and(|slot| self.end <= slot.end), "{self:?}");
        if sync { self.out.sync_data() } else { Ok(()) }
    }
}

/// Bound to its slot and place, so that leftovers of an older slot do not pass for a chunk of this one.
fn chunk_checksum(slot: u64, place: u64, records: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&slot.to_le_bytes());
    hasher.update(&place.to_le_bytes());
    hasher.update(records);
    hasher.finalize()
}

/// The start of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    /// Counts slots.
    generation: u64,
    base: Base,
    /// Bytes of records without which the slot is useless.
    first_len: u64,
}

impl Head {
    fn encode(&self, id: u64) -> [u8; HEAD_LEN] {
        let mut bytes = Vec::with_capacity(HEAD_LEN);
        bytes.extend(MAGIC);
        bytes.extend(id.to_le_bytes());
        bytes.extend(self.generation.to_le_bytes());
        bytes.extend(self.base.len.to_le_bytes());
        bytes.extend(self.first_len.to_le_bytes());
        bytes.extend(self.base.crc32.to_le_bytes());
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes.try_into().expect("the length is the sum of these")
    }

    fn decode(bytes: &[u8; HEAD_LEN], id: u64) -> Option<Self> {
        let number = |index: usize| bytes[8 * index..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let crc32 = bytes[40..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let head =
            Self { generation: number(2)?, base: Base { len: number(3)?, crc32: crc32? }, first_len: number(4)? };
        (head.encode(id) == *bytes).then_some(head)
    }
}

/// A slot of a file that was read.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    id: u64,
    start: u64,
    head: Head,
}

impl Found {
    /// The slots of a file, newest first, that belong to the journal of this number.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn all(file: &File, id: u64) -> io::Result<Vec<Self>> {
        let len = file.metadata()?.len();
        let starts = (MIN_SLOT_LOG..u64::BITS).map(|log| 1 << log).take_while(|&start| start < len);
        let mut found = Vec::new();
        for start in std::iter::once(0).chain(starts) {
            let mut bytes = [0; HEAD_LEN];
            match file.read_exact_at(&mut bytes, start) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
                other => {
                    other?;
                    found.extend(Head::decode(&bytes, id).map(|head| Self { id, start, head }));
                }
            }
        }
        found.sort_by_key(|found| std::cmp::Reverse(found.head.generation));
        Ok(found)
    }

    /// What its records continue from.
    #[must_use]
    pub fn base(&self) -> Base {
        self.head.base
    }

    /// Its records up to the first incomplete one; `None`: that one is among those that came with its base.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn records(&self, mut file: &File) -> io::Result<Option<Vec<u8>>> {
        let mut place = self.start + HEAD_LEN as u64;
        file.seek(SeekFrom::Start(place))?;
        let (mut bytes, mut records) = (BufReader::new(file), Vec::new());
        while let Some(chunk) = self.chunk(&mut bytes, place)? {
            // Readers accept no more.
            if (records.len() + chunk.len()) as u64 > MAX_SAMPLE_BYTES {
                break;
            }
            place += (CHUNK_HEAD_LEN + chunk.len()) as u64;
            records.extend(chunk);
        }
        Ok((records.len() as u64 >= self.head.first_len).then_some(records))
    }

    /// The chunk at that place; `None`: there is none.
    fn chunk(&self, bytes: &mut impl Read, place: u64) -> io::Result<Option<Vec<u8>>> {
        let (mut len, mut checksum) = ([0; 4], [0; 4]);
        if !(filled(bytes, &mut len)? && filled(bytes, &mut checksum)?) {
            return Ok(None);
        }
        let len = usize::try_from(u32::from_le_bytes(len)).unwrap_or(usize::MAX);
        if !(1..=MAX_CHUNK).contains(&len) {
            return Ok(None);
        }
        let mut chunk = vec![0; len];
        let whole = filled(bytes, &mut chunk)?
            && chunk_checksum(self.id ^ self.head.generation, place, &chunk) == u32::from_le_bytes(checksum);
        Ok(whole.then_some(chunk))
    }
}

/// Whether there were enough bytes.
fn filled(bytes: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match bytes.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_leaves_the_last_one_alone() {
        let mut last: Option<Slot> = None;
        let mut most = 0;
        for len in [1, 300_000, 300_000, 5, 9_000_000, 7, 7, 700_000, 1 << 20, 1 << 20, (1 << 20) + 1, 1, 1] {
            let slot = Slot::next_to(last, len);
            assert!(slot.end - slot.start >= len);
            assert!(slot.start == 0 || slot.start >= 1 << MIN_SLOT_LOG && slot.start.is_power_of_two(), "{slot:?}");
            assert!(last.is_none_or(|last| slot.end <= last.start || slot.start >= last.end), "{last:?} {slot:?}");
            most = most.max(slot.end);
            last = Some(slot);
        }
        assert_eq!(most, 1 << 25, "twice the longest, which begins behind another");
    }

    #[test]
    fn the_newest_slot_stands_first_and_only_whole() {
        let file = tempfile::tempfile().unwrap();
        let mut tail = Tail::new(file.try_clone().unwrap(), 7);
        let base = |len| Some(Base { len, crc32: 5 });
        let long = vec![1; 10_000];
        tail.put(&Checkpoint { base: base(1), records: b"one" }, false).unwrap();
        tail.put(&Checkpoint { base: None, records: b"two" }, false).unwrap();
        tail.put(&Checkpoint { base: base(2), records: &long }, true).unwrap();
        tail.put(&Checkpoint { base: None, records: &[] }, true).unwrap();
        let found = |id| Found::all(&file, id).unwrap();
        assert!(found(8).is_empty(), "another journal's");
        let records = |found: &[Found]| -> Vec<_> {
            found.iter().map(|slot| (slot.base().len, slot.records(&file).unwrap())).collect()
        };
        assert_eq!(records(&found(7)), [(2, Some(long.clone())), (1, Some(b"onetwo".to_vec()))]);
        // The last chunk of those that came with the newest base is cut.
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        assert_eq!(records(&found(7)), [(2, None), (1, Some(b"onetwo".to_vec()))]);
        // A shorter slot in place of the first one: what is left of the old one is not part of it.
        tail.put(&Checkpoint { base: base(3), records: b"x" }, false).unwrap();
        assert_eq!(records(&found(7)), [(3, Some(b"x".to_vec())), (2, None)]);
    }
}
