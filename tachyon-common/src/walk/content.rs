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
use crate::opaque;

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
    /// The name's hash, and the line table's.
    qualname_hash: u64,
    table_hash: u64,
    /// Bits of [`lacks`].
    pub(super) lacks: u32,
    /// Pieces that may still be read.
    pieces: u32,
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
            qualname_hash: 0,
            table_hash: 0,
            lacks: 0,
            // A kernel must come to an end; user space has no such hurry.
            pieces: u32::MAX,
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

/// Pieces of one turn of the outer loop.
const PIECES_PER_TURN: u32 = 16;

const fn max(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}

/// Where in the buffer the content of a string or table begins, whatever the size of its head.
const CONTENT_AT: u32 = 64;

/// The bits of a head's size: a multiple of a word, below [`CONTENT_AT`].
const MAX_HEAD: u32 = 0x38;

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

    /// Hashes the name; false when the file's name must be hashed, too.
    #[inline(always)]
    pub(super) fn name<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) -> bool {
        self.lacks = 0;
        self.qualname_hash = self.text(memory, layout, self.qualname, lacks::QUALNAME);
        self.file.object == self.filename && self.filename != 0
    }

    /// Hashes the file's name.
    #[inline(always)]
    pub(super) fn file_name<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) {
        let hash = self.text(memory, layout, self.filename, lacks::FILENAME);
        let whole = self.lacks & lacks::FILENAME == 0;
        self.file = TextHash { object: if whole { self.filename } else { 0 }, hash };
    }

    /// Hashes the line table, after both names, for it may take all that may be read.
    #[inline(always)]
    pub(super) fn line_table<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) {
        self.table_hash = self.table(memory, layout);
    }

    /// The hash of all three.
    #[inline(always)]
    pub(super) const fn hash(&self) -> u64 {
        mix(mix(self.qualname_hash, self.file.hash.rotate_left(17)), self.table_hash.rotate_left(34))
    }

    /// Reads and hashes what is left of a long string or line table. Only to be called by [`UserMemory::hash_pieces`].
    #[inline(always)]
    pub fn pieces<M: UserMemory + ?Sized>(&mut self, memory: &M) {
        let mut turn = 0;
        while turn < MOST_PIECES.div_ceil(PIECES_PER_TURN) && memory.hash_some_pieces(self) {
            turn += 1;
        }
    }

    /// Reads and hashes some of it; false: nothing is left. Only to be called by [`UserMemory::hash_some_pieces`]: the verifier follows
    /// each turn of a loop, and two loops of 16 are cheaper than one of 256.
    #[inline(always)]
    pub fn some_pieces<M: UserMemory + ?Sized>(&mut self, memory: &M) -> bool {
        let mut piece = 0;
        while piece < PIECES_PER_TURN {
            if !memory.hash_piece(self) {
                return false;
            }
            piece += 1;
        }
        true
    }

    /// Reads and hashes the next piece; false: nothing is left. Only to be called by [`UserMemory::hash_piece`].
    #[inline(always)]
    pub fn piece<M: UserMemory + ?Sized>(&mut self, memory: &M) -> bool {
        let bytes = opaque::min(u64::from(self.left), HASH_PIECE as u64) as u32;
        if self.pieces == 0 || self.buffer.fill_at::<M, 0, HASH_PIECE>(memory, self.from, bytes).is_err() {
            (self.failed, self.left) = (1, 0);
            return false;
        }
        self.pieces -= 1;
        self.lanes = self.blocks::<{ HASH_PIECE as u32 / 32 }, 0>(self.lanes, bytes);
        self.from = self.from.wrapping_add(u64::from(bytes));
        self.left -= bytes;
        self.left != 0
    }

    /// A string: its text up to [`MAX_TEXT_HASHED`], its length and its kind.
    #[inline(always)]
    fn text<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout, object: u64, is: u32) -> u64 {
        let head = layout.unicode_ascii_size.wrapping_sub(layout.unicode_length) & MAX_HEAD;
        let Some(have) = self.begin(memory, object.wrapping_add(u64::from(layout.unicode_length)), head, FIRST_OF_TEXT)
        else {
            self.lacks |= is;
            return 0;
        };
        let len = self.buffer.u64(CONTENT_AT - head);
        let state = layout.unicode_state.wrapping_sub(layout.unicode_length);
        let state = self.buffer.u32((CONTENT_AT - head).wrapping_add(state));
        let kind = (state >> (layout.unicode_kind_shift & 31)) & 7;
        if state & layout.unicode_compact_bit == 0 || (kind != 1 && kind != 2 && kind != 4) {
            self.lacks |= is;
            return 0;
        }
        let (mut start, mut have) = (layout.unicode_ascii_size, have);
        if state & layout.unicode_ascii_bit == 0 {
            (start, have) = (layout.unicode_compact_size, 0);
        }
        // The target's word: compared before it is multiplied.
        let most = u64::from(MAX_TEXT_HASHED / kind);
        let bytes = if len > most { MAX_TEXT_HASHED } else { (len as u32).wrapping_mul(kind) };
        let content = (object.wrapping_add(u64::from(start)), bytes, have);
        self.whole::<M, { FIRST_OF_TEXT / 32 }>(memory, content, len ^ (u64::from(kind) << 56), is)
    }

    /// The line table: its bytes up to [`MAX_LINETABLE_BYTES`], and its length.
    #[inline(always)]
    fn table<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) -> u64 {
        let (object, is) = (self.linetable, lacks::LINETABLE);
        let head = layout.bytes_sval.wrapping_sub(layout.ob_size) & MAX_HEAD;
        let Some(have) = self.begin(memory, object.wrapping_add(u64::from(layout.ob_size)), head, FIRST_OF_TABLE)
        else {
            self.lacks |= is;
            return 0;
        };
        let len = self.buffer.u64(CONTENT_AT - head);
        let bytes = if len > u64::from(MAX_LINETABLE_BYTES) { MAX_LINETABLE_BYTES } else { len as u32 };
        let content = (object.wrapping_add(u64::from(layout.bytes_sval)), bytes, have);
        self.whole::<M, { FIRST_OF_TABLE / 32 }>(memory, content, len, is)
    }

    /// Reads an object's head of `head` bytes, so that its content lies at [`CONTENT_AT`], and gives how many bytes of that were
    /// read with it: `first`, or 0 where its page may end before.
    #[inline(always)]
    fn begin<M: UserMemory + ?Sized>(&mut self, memory: &M, from: u64, head: u32, first: u32) -> Option<u32> {
        if self.buffer.fill_before::<M, { CONTENT_AT as usize }, { MAX_HEAD as usize }>(memory, from, head, first) {
            return Some(first);
        }
        self.buffer.fill_before::<M, { CONTENT_AT as usize }, { MAX_HEAD as usize }>(memory, from, head, 0).then_some(0)
    }

    /// The hash of `bytes` bytes from `start` on, of which the first `have`, at most `MOST` blocks, lie in the buffer, and of
    /// what else belongs to it. What cannot be read is noted in [`Content::lacks`], with the bit `is`.
    #[inline(always)]
    fn whole<M: UserMemory + ?Sized, const MOST: u32>(
        &mut self,
        memory: &M,
        (start, bytes, have): (u64, u32, u32),
        more: u64,
        is: u32,
    ) -> u64 {
        let lanes = [
            self.seed.wrapping_add(PRIMES[0]).wrapping_add(PRIMES[1]),
            self.seed.wrapping_add(PRIMES[1]),
            self.seed,
            self.seed.wrapping_sub(PRIMES[0]),
        ];
        // By way of memory: the verifier would follow the loop once for each.
        (self.left, self.from) = (have, u64::from(bytes));
        let this = opaque::place(&mut *self);
        let (have, bytes) = (this.left, this.from as u32);
        let mut lanes = this.blocks::<MOST, CONTENT_AT>(lanes, opaque::min(u64::from(bytes), u64::from(have)) as u32);
        if bytes > have {
            self.lanes = lanes;
            (self.from, self.left, self.failed) = (start.wrapping_add(u64::from(have)), bytes - have, 0);
            memory.hash_pieces(self);
            if self.failed != 0 {
                self.lacks |= is;
            }
            lanes = self.lanes;
        }
        end(lanes, more)
    }

    /// Hashes `bytes` bytes of the buffer from offset `AT` on, at most `MOST` blocks; all but the last call for a string or
    /// table with whole blocks.
    #[inline(always)]
    fn blocks<const MOST: u32, const AT: u32>(&mut self, lanes: [u64; 4], bytes: u32) -> [u64; 4] {
        self.buffer.clear_behind(AT.wrapping_add(bytes));
        let [mut a, mut b, mut c, mut d] = lanes;
        let mut block = 0;
        while block < MOST && block * 32 < bytes {
            // Hidden, so that the compiler does not drop the mask, without which 7.2 refused the program.
            let from = opaque::word(u64::from(AT.wrapping_add(block * 32))) as u32;
            a = round(a, self.buffer.nth_of::<4>(from, 0));
            b = round(b, self.buffer.nth_of::<4>(from, 1));
            c = round(c, self.buffer.nth_of::<4>(from, 2));
            d = round(d, self.buffer.nth_of::<4>(from, 3));
            block += 1;
        }
        [a, b, c, d]
    }
}

/// One hash of the four lanes and what else belongs to them. (XXH64 mixes each lane in once more; here each has just been
/// multiplied, and short strings are the rule.)
#[inline(always)]
const fn end([a, b, c, d]: [u64; 4], more: u64) -> u64 {
    let low = a.rotate_left(1).wrapping_add(b.rotate_left(7));
    let high = c.rotate_left(12).wrapping_add(d.rotate_left(18));
    let hash = low.wrapping_add(high) ^ round(0, more);
    let hash = (hash ^ (hash >> 33)).wrapping_mul(PRIMES[1]);
    let hash = (hash ^ (hash >> 29)).wrapping_mul(PRIMES[0]);
    hash ^ (hash >> 32)
}

const _: () = assert!(size_of::<TextHash>() == 16);
const _: () = assert!(size_of::<Content>() == 120 + 2 * HASH_PIECE);
