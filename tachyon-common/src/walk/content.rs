//! Hashes of what a code object's strings and line table hold, whole: what is shown of a frame has entered its identity.
//!
//! In: addresses of two strings and of the line table. Out: one hash. It depends on the content alone, not on how the
//! content was read: whole blocks of 32 bytes, the last one filled up with zeros, then the length. The rounds are those of XXH64
//! (<https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>), whose four lanes do not wait for each other.

use super::buffer::Buffer;
use super::code::mix;
use super::memory::UserMemory;
use crate::layout::Layout;
use crate::limits::{
    FIRST_OF_TABLE, FIRST_OF_TEXT, HASH_PIECE, HASH_PIECES_PER_SAMPLE, MAX_LINETABLE_BYTES, MAX_TEXT_HASHED,
};

/// Bits of [`super::CodeIdentity::lacks`]: what could not be read, or not within what one sample may read. It must not be
/// shown under that identity.
pub mod lacks {
    /// The function's name.
    pub const QUALNAME: u32 = 1;
    /// The file's name.
    pub const FILENAME: u32 = 1 << 1;
    /// The line table.
    pub const LINETABLE: u32 = 1 << 2;
}

/// A string that was hashed, by its address: callers of one file have one `co_filename`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct TextHash {
    object: u64,
    hash: u64,
}

/// What is hashed of one code object, and the room for it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Content {
    /// The key of all hashes of a recording.
    pub(super) seed: u64,
    pub(super) qualname: u64,
    pub(super) filename: u64,
    pub(super) linetable: u64,
    /// The file's name hashed last, which need not be read again while its process is stopped.
    pub(super) file: TextHash,
    /// The result.
    pub(super) hash: u64,
    /// Bits of [`lacks`].
    pub(super) lacks: u32,
    /// Pieces that may still be read.
    pieces: u32,
    /// The string or line table that is hashed at present, its bit of [`lacks`], and in the end its hash.
    object: u64,
    object_hash: u64,
    object_is: u32,
    _pad: u32,
    /// Where the next piece is read, and how many bytes are left to be hashed.
    from: u64,
    left: u32,
    /// 1: a piece could not be read.
    failed: u32,
    lanes: [u64; 4],
    /// A piece, and room to fill it up behind its end.
    buffer: Buffer<{ HASH_PIECE * 2 }, { HASH_PIECE / 4 }>,
}

impl Default for Content {
    fn default() -> Self {
        Self {
            seed: 0,
            qualname: 0,
            filename: 0,
            linetable: 0,
            file: TextHash::default(),
            hash: 0,
            lacks: 0,
            // A kernel must come to an end; user space has no such hurry.
            pieces: u32::MAX,
            object: 0,
            object_hash: 0,
            object_is: 0,
            _pad: 0,
            from: 0,
            left: 0,
            failed: 0,
            lanes: [0; 4],
            buffer: Buffer::default(),
        }
    }
}

/// XXH64's first two primes.
const PRIMES: [u64; 2] = [0x9e37_79b1_85eb_ca87, 0xc2b2_ae3d_27d4_eb4f];

/// Pieces of the longest string or table: the loop's bound.
const MOST_PIECES: u32 = max(MAX_LINETABLE_BYTES, MAX_TEXT_HASHED) / HASH_PIECE as u32 + 1;

const fn max(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}

/// What a head says: where the content lies, how much of it is hashed, and how much of that lies behind the head in the
/// buffer already.
struct Found {
    start: u64,
    bytes: u32,
    have: u32,
    head: u32,
    /// What else belongs to the hash.
    more: u64,
}

#[inline(always)]
const fn round(lane: u64, word: u64) -> u64 {
    lane.wrapping_add(word.wrapping_mul(PRIMES[1])).rotate_left(31).wrapping_mul(PRIMES[0])
}

impl Content {
    /// Gives the next sample what one may read.
    #[inline(always)]
    pub fn refill(&mut self) {
        self.pieces = HASH_PIECES_PER_SAMPLE;
    }

    /// Hashes all three.
    #[inline(always)]
    pub(super) fn code<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) {
        self.lacks = 0;
        let qualname = self.hash_of(memory, layout, self.qualname, lacks::QUALNAME);
        if self.file.object != self.filename || self.filename == 0 {
            let hash = self.hash_of(memory, layout, self.filename, lacks::FILENAME);
            let whole = self.lacks & lacks::FILENAME == 0;
            self.file = TextHash { object: if whole { self.filename } else { 0 }, hash };
        }
        let table = self.hash_of(memory, layout, self.linetable, lacks::LINETABLE);
        self.hash = mix(mix(qualname, self.file.hash.rotate_left(17)), table.rotate_left(34));
    }

    #[inline(always)]
    fn hash_of<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout, object: u64, is: u32) -> u64 {
        (self.object, self.object_is) = (object, is);
        memory.hash_object(layout, self);
        self.object_hash
    }

    /// Hashes one string or line table. Only to be called by [`UserMemory::hash_object`].
    #[inline(always)]
    pub fn object<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) {
        self.object_hash = 0;
        let found =
            if self.object_is == lacks::LINETABLE { self.table(memory, layout) } else { self.text(memory, layout) };
        let Some(Found { start, bytes, have, head, more }) = found else {
            self.lacks |= self.object_is;
            return;
        };
        self.begin();
        self.blocks::<{ max(FIRST_OF_TABLE, FIRST_OF_TEXT) / 32 }>(head, bytes.min(have));
        if bytes > have {
            (self.from, self.left, self.failed) = (start.wrapping_add(u64::from(have)), bytes - have, 0);
            let mut piece = 0;
            while piece < MOST_PIECES && self.left != 0 {
                memory.hash_piece(self);
                piece += 1;
            }
            if self.failed != 0 {
                self.lacks |= self.object_is;
            }
        }
        self.object_hash = self.end(more);
    }

    /// Reads and hashes the next piece. Only to be called by [`UserMemory::hash_piece`].
    #[inline(always)]
    pub fn piece<M: UserMemory + ?Sized>(&mut self, memory: &M) {
        let bytes = self.left.min(HASH_PIECE as u32);
        if self.pieces == 0 || self.buffer.fill_at::<M, 0, HASH_PIECE>(memory, self.from, bytes).is_err() {
            (self.failed, self.left) = (1, 0);
            return;
        }
        self.pieces -= 1;
        self.blocks::<{ HASH_PIECE as u32 / 32 }>(0, bytes);
        self.from = self.from.wrapping_add(u64::from(bytes));
        self.left -= bytes;
    }

    /// A string: its text up to [`MAX_TEXT_HASHED`], its length and its kind.
    #[inline(always)]
    fn text<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) -> Option<Found> {
        let from = self.object.wrapping_add(u64::from(layout.unicode_length));
        let head = layout.unicode_ascii_size.wrapping_sub(layout.unicode_length) & 0x38;
        let mut have = FIRST_OF_TEXT;
        if self.buffer.fill(memory, from, head + FIRST_OF_TEXT).is_err() {
            // The string may end within these bytes, and its page with it.
            have = 0;
            self.buffer.fill(memory, from, head).ok()?;
        }
        let len = self.buffer.u64(0);
        let state = self.buffer.u32(layout.unicode_state.wrapping_sub(layout.unicode_length));
        let kind = (state >> (layout.unicode_kind_shift & 31)) & 7;
        if state & layout.unicode_compact_bit == 0 || (kind != 1 && kind != 2 && kind != 4) {
            return None;
        }
        let mut start = layout.unicode_ascii_size;
        if state & layout.unicode_ascii_bit == 0 {
            (start, have) = (layout.unicode_compact_size, 0);
        }
        // The target's word: compared before it is multiplied.
        let most = u64::from(MAX_TEXT_HASHED / kind);
        let bytes = if len > most { MAX_TEXT_HASHED } else { (len as u32).wrapping_mul(kind) };
        let start = self.object.wrapping_add(u64::from(start));
        Some(Found { start, bytes, have, head, more: len ^ (u64::from(kind) << 56) })
    }

    /// A line table: its bytes up to [`MAX_LINETABLE_BYTES`], and its length.
    #[inline(always)]
    fn table<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) -> Option<Found> {
        let from = self.object.wrapping_add(u64::from(layout.ob_size));
        let head = layout.bytes_sval.wrapping_sub(layout.ob_size) & 0x38;
        let mut have = FIRST_OF_TABLE;
        if self.buffer.fill(memory, from, head + FIRST_OF_TABLE).is_err() {
            have = 0;
            self.buffer.fill(memory, from, 8).ok()?;
        }
        let len = self.buffer.u64(0);
        let bytes = if len > u64::from(MAX_LINETABLE_BYTES) { MAX_LINETABLE_BYTES } else { len as u32 };
        let start = self.object.wrapping_add(u64::from(layout.bytes_sval));
        Some(Found { start, bytes, have, head, more: len })
    }

    #[inline(always)]
    fn begin(&mut self) {
        let seed = self.seed;
        self.lanes = [
            seed.wrapping_add(PRIMES[0]).wrapping_add(PRIMES[1]),
            seed.wrapping_add(PRIMES[1]),
            seed,
            seed.wrapping_sub(PRIMES[0]),
        ];
    }

    /// Hashes `bytes` bytes of the buffer from offset `at` on, at most `MOST` blocks; all but the last call for a string or
    /// table with whole blocks.
    #[inline(always)]
    fn blocks<const MOST: u32>(&mut self, at: u32, bytes: u32) {
        self.buffer.clear_behind(at.wrapping_add(bytes));
        let [mut a, mut b, mut c, mut d] = self.lanes;
        let mut block = 0;
        while block < MOST && block * 32 < bytes {
            let from = at.wrapping_add(block * 32);
            a = round(a, self.buffer.u64(from));
            b = round(b, self.buffer.u64(from.wrapping_add(8)));
            c = round(c, self.buffer.u64(from.wrapping_add(16)));
            d = round(d, self.buffer.u64(from.wrapping_add(24)));
            block += 1;
        }
        self.lanes = [a, b, c, d];
    }

    /// One hash of the four lanes and what else belongs to them. (XXH64 mixes each lane in once more; here each has just been
    /// multiplied, and short strings are the rule.)
    #[inline(always)]
    const fn end(&self, more: u64) -> u64 {
        let [a, b, c, d] = self.lanes;
        let low = a.rotate_left(1).wrapping_add(b.rotate_left(7));
        let high = c.rotate_left(12).wrapping_add(d.rotate_left(18));
        let hash = low.wrapping_add(high) ^ round(0, more);
        let hash = (hash ^ (hash >> 33)).wrapping_mul(PRIMES[1]);
        let hash = (hash ^ (hash >> 29)).wrapping_mul(PRIMES[0]);
        hash ^ (hash >> 32)
    }
}

const _: () = assert!(size_of::<TextHash>() == 16);
const _: () = assert!(size_of::<Content>() == 136 + 2 * HASH_PIECE);
