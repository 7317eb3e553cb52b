//! Samples of one thread that repeat its stack, as a REPEAT record will hold them: kept back until the record is complete.

use super::varint::{MAX_LEN, put_u64};

/// Bytes that are kept back for each thread (`MAX_RLE_BUF_SIZE`).
const MAX_PENDING: usize = 16 * 1024;
/// Bytes that must be free for one more: a delta and a status byte (`MAX_RLE_ENTRY_SIZE`).
pub(super) const MAX_ENTRY: usize = MAX_LEN + 1;
/// Memory that a thread starts with; most threads repeat few samples.
const FIRST: usize = 256;

/// Deltas and status bytes. Samples are counted after they are put, many at once.
#[derive(Default)]
pub(super) struct Pending {
    /// Zeros after the filled part: a sample is put without checking whether there is memory for it.
    buffer: Vec<u8>,
    filled: usize,
    /// Bytes of the samples that are counted.
    counted: usize,
    count: u32,
    /// Bytes and number of the samples that a checkpoint has.
    logged: (usize, u32),
}

impl Pending {
    /// The samples put so far.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.filled]
    }

    /// How many samples were counted.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of samples that are not counted.
    pub(super) fn uncounted_bytes(&self) -> u64 {
        (self.filled - self.counted) as u64
    }

    /// Counts the samples that were put since the last time. Returns their bytes.
    pub(super) fn count_samples(&mut self, samples: u64) -> u64 {
        self.count += u32::try_from(samples).expect("16 KiB hold no more than fit");
        let bytes = self.uncounted_bytes();
        self.counted = self.filled;
        bytes
    }

    /// Whether the next sample needs a new record.
    pub(super) fn is_full(&self) -> bool {
        self.filled + MAX_ENTRY > MAX_PENDING
    }

    /// How many samples can be put, however long they are: at least one, unless it is full.
    pub(super) fn make_room(&mut self) -> usize {
        if self.filled + MAX_ENTRY > self.buffer.len() {
            self.buffer.resize((2 * self.buffer.len()).clamp(FIRST, MAX_PENDING), 0);
        }
        (self.buffer.len() - self.filled) / MAX_ENTRY
    }

    /// Takes a sample, for which room was made.
    #[inline]
    pub(super) fn put(&mut self, delta: u64, status: u8) {
        let place = self.buffer[self.filled..].first_chunk_mut::<MAX_ENTRY>().expect("room was made for it");
        let status_bits = u64::from(status);
        let (bits, len) = match delta {
            0..0x80 => (delta | status_bits << 8, 2),
            0x80..0x4000 => (delta & 0x7f | 0x80 | (delta >> 7) << 8 | status_bits << 16, 3),
            _ => return self.put_long(delta, status),
        };
        // Eight bytes in one step: those after the status belong to the next sample.
        *place.first_chunk_mut().expect("eleven are more than eight") = bits.to_le_bytes();
        self.filled += len;
    }

    #[cold]
    fn put_long(&mut self, delta: u64, status: u8) {
        let mut sample = Vec::with_capacity(MAX_ENTRY);
        put_u64(&mut sample, delta);
        sample.push(status);
        self.buffer[self.filled..][..sample.len()].copy_from_slice(&sample);
        self.filled += sample.len();
    }

    /// How many samples are in no checkpoint yet, and their bytes. All must be counted; after this a checkpoint has them.
    pub(super) fn take_unlogged(&mut self) -> (u32, &[u8]) {
        let (bytes, count) = std::mem::replace(&mut self.logged, (self.filled, self.count));
        (self.count - count, &self.buffer[bytes..self.filled])
    }

    /// The next checkpoint is to have all samples.
    pub(super) fn forget_logged(&mut self) {
        self.logged = (0, 0);
    }

    /// Forgets the samples, and keeps the memory.
    pub(super) fn clear(&mut self) {
        (self.filled, self.counted, self.count, self.logged) = (0, 0, 0, (0, 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_its_delta_and_its_status() {
        for delta in [0, 0x7f, 0x80, 0x3fff, 0x4000, u64::MAX] {
            let mut expected = Vec::new();
            put_u64(&mut expected, delta);
            expected.push(35);
            let mut pending = Pending::default();
            pending.make_room();
            pending.put(delta, 35);
            pending.make_room();
            pending.put(delta, 35);
            assert_eq!(pending.bytes(), [&expected[..], &expected].concat(), "{delta}");
            assert_eq!(pending.count_samples(2), pending.bytes().len() as u64);
            assert_eq!((pending.count(), pending.uncounted_bytes()), (2, 0));
        }
    }

    #[test]
    fn room_that_was_made_is_there_and_ends_at_a_full_record() {
        let mut pending = Pending::default();
        while !pending.is_full() {
            for _ in 0..pending.make_room() {
                assert!(!pending.is_full());
                pending.put(u64::MAX, 1);
            }
        }
        assert_eq!(pending.make_room(), 0);
        assert_eq!(pending.bytes().len(), MAX_PENDING / MAX_ENTRY * MAX_ENTRY);
        pending.clear();
        assert!(pending.bytes().is_empty() && pending.make_room() > 0);
    }
}
