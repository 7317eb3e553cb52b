//! What a file that is being written lacks: records that the compressor still holds, and repeated samples that have no
//! record yet. A program that keeps them elsewhere can be killed without losing them, and the file stays byte for byte
//! as it would have been.

use super::pending::Pending;
use super::records::put_repeat_head;
use super::{Options, RECORD_HEAD_LEN};

/// Least number of bytes between a base and the next one; also the most that is held for one checkpoint.
const PERIOD: usize = 128 * 1024;

/// A place in the samples of a file, before compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// Bytes of records before it.
    pub len: u64,
    /// CRC-32 of the recording's start and interval and of those bytes: what follows belongs to no other file.
    pub crc32: u32,
}

/// Records that a file lacks, as returned by [`Writer::checkpoint`](super::Writer::checkpoint).
///
/// The bytes of the file's samples up to the newest base, then the records of its checkpoint and of all that came since,
/// are the records of every sample taken: [`Reader::continue_with`](super::Reader::continue_with) reads them.
#[derive(Clone, Copy, Debug)]
pub struct Checkpoint<'a> {
    /// Where the records continue from, if not from the last checkpoint: what was returned before is then no longer
    /// needed. A base is in the file.
    pub base: Option<Base>,
    /// Whole records.
    pub records: &'a [u8],
}

impl Checkpoint<'_> {
    /// Most bytes of records that come with this base and up to the next one.
    #[must_use]
    pub fn max_len(&self) -> usize {
        self.records.len() + self.records.len().max(PERIOD)
    }
}

/// The checksum of no records yet.
pub(super) fn checksum(options: &Options) -> crc32fast::Hasher {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&options.start_time_us.to_le_bytes());
    hasher.update(&options.sample_interval_us.to_le_bytes());
    hasher
}

/// Gathers the records of the next checkpoint. Memory does not grow with the number of samples.
pub(super) struct Log {
    records: Vec<u8>,
    /// Those of the last checkpoint.
    given: Vec<u8>,
    /// Bytes that may still be given before the next base.
    left: usize,
    /// The next checkpoint has a new base.
    anew: bool,
}

impl Log {
    pub(super) fn new() -> Self {
        Self { records: Vec::new(), given: Vec::new(), left: 0, anew: true }
    }

    /// Takes a record that is in the file's samples.
    pub(super) fn put(&mut self, record: &[u8]) {
        if self.anew {
            return;
        }
        self.records.extend_from_slice(record);
        if self.records.len() > self.left {
            // The next checkpoint has it all.
            self.anew = true;
            self.records = Vec::new();
        }
    }

    /// Takes the repeated samples of a thread that it has not taken yet.
    pub(super) fn put_repeated(&mut self, id: u64, interpreter: u32, pending: &mut Pending) {
        if self.anew {
            return;
        }
        let (count, samples) = pending.take_unlogged();
        if count > 0 {
            let mut head = Vec::with_capacity(RECORD_HEAD_LEN + 5);
            put_repeat_head(&mut head, id, interpreter, count);
            self.put(&head);
            self.put(samples);
        }
    }

    /// Whether [`Self::begin`] must come before the next checkpoint.
    pub(super) fn needs_base(&self) -> bool {
        self.anew
    }

    /// Begins with the records that the file holds back; all repeated samples are to follow, whatever was taken before.
    pub(super) fn begin(&mut self, held_back: [&[u8]; 2]) {
        (self.anew, self.left) = (false, usize::MAX);
        self.records.clear();
        held_back.iter().for_each(|bytes| self.records.extend_from_slice(bytes));
    }

    /// Gives what was taken since the last time, with the base if there is a new one.
    pub(super) fn checkpoint(&mut self, base: Option<Base>) -> Checkpoint<'_> {
        self.given.clear();
        std::mem::swap(&mut self.records, &mut self.given);
        let checkpoint = Checkpoint { base, records: &self.given };
        self.left = if base.is_some() { checkpoint.max_len() - self.given.len() } else { self.left - self.given.len() };
        checkpoint
    }
}
