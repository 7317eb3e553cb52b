//! Structures of the target, copied in one read each.

use super::content::Content;
use super::memory::{Unreadable, UserMemory};
use crate::limits::{CODE_READ, FRAMES_READ, INTERP_READ, SLOTS_READ, THREAD_READ};

/// A structure copied from the target, as aligned words: `BYTES` bytes that an offset may name (a power of two), in
/// `WORDS` = `BYTES / 8` words. Offsets are masked, which is the bound the verifier sees.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Buffer<const BYTES: usize, const WORDS: usize> {
    words: [u64; WORDS],
}

/// Room for a thread state's fields of interest.
pub type ThreadBuffer = Buffer<THREAD_READ, { THREAD_READ / 8 }>;
/// Room for a thread's values of `pthread_setspecific`.
pub type SlotBuffer = Buffer<SLOTS_READ, { SLOTS_READ / 8 }>;
/// Room for an interpreter state's fields of interest.
pub type InterpBuffer = Buffer<INTERP_READ, { INTERP_READ / 8 }>;
/// Room for frames: [`FRAMES_READ`] bytes of neighbours, then one that lies alone.
pub type FrameBuffer = Buffer<{ FRAMES_READ * 2 }, { FRAMES_READ / 4 }>;

/// Room for one code object: its head, and what is hashed of its strings and line table.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CodeBuffer {
    pub(super) head: Buffer<CODE_READ, { CODE_READ / 8 }>,
    /// What is hashed.
    pub content: Content,
}

impl<const BYTES: usize, const WORDS: usize> Default for Buffer<BYTES, WORDS> {
    fn default() -> Self {
        Self { words: [0; WORDS] }
    }
}

impl<const BYTES: usize, const WORDS: usize> Buffer<BYTES, WORDS> {
    const CHECKED: () = assert!(BYTES == WORDS * 8 && BYTES.is_power_of_two());

    /// Copies `len` bytes (at most `BYTES`) from `addr`.
    #[inline(always)]
    pub(crate) fn fill<M: UserMemory + ?Sized>(&mut self, memory: &M, addr: u64, len: u32) -> Result<(), Unreadable> {
        self.fill_at::<M, 0, BYTES>(memory, addr, len)
    }

    /// Copies `len` bytes (at most `ROOM`, a power of two) from `addr` to offset `AT`.
    #[inline(always)]
    pub(super) fn fill_at<M: UserMemory + ?Sized, const AT: usize, const ROOM: usize>(
        &mut self,
        memory: &M,
        addr: u64,
        len: u32,
    ) -> Result<(), Unreadable> {
        let () = Self::CHECKED;
        const { assert!(AT + ROOM <= BYTES && ROOM.is_power_of_two()) };
        // `len` is at most `ROOM` by validation; the mask is for the verifier, the comparison for us.
        let len = len as usize & (2 * ROOM - 1);
        if len > ROOM {
            return Err(Unreadable);
        }
        // SAFETY: the words are `BYTES` initialised bytes, and any bytes are valid words.
        let bytes = unsafe { core::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>(), BYTES) };
        let Some(into) = bytes.get_mut(AT..AT + len) else { return Err(Unreadable) };
        memory.read(addr, into)
    }

    /// Copies a head of `head` bytes (the bits of `MAX_HEAD`, which is below `AT`) and `len` more from `addr`, so that what follows the head
    /// lies at offset `AT`; false when they cannot be read.
    #[inline(always)]
    pub(super) fn fill_before<M: UserMemory + ?Sized, const AT: usize, const MAX_HEAD: usize>(
        &mut self,
        memory: &M,
        addr: u64,
        head: u32,
        len: u32,
    ) -> bool {
        let () = Self::CHECKED;
        const { assert!(MAX_HEAD < AT && AT + BYTES / 2 <= BYTES) };
        // The masks are the bounds that the verifier sees.
        let head = head as usize & MAX_HEAD;
        let len = len as usize & (BYTES / 2 - 1);
        // SAFETY: as in `fill_at`.
        let bytes = unsafe { core::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>(), BYTES) };
        bytes.get_mut(AT - head..AT + len).is_some_and(|into| memory.read(addr, into).is_ok())
    }

    /// Copies `LEN` bytes from `addr`, zeros when they cannot be read.
    #[inline(always)]
    pub(super) fn fill_or_zero<M: UserMemory + ?Sized, const LEN: usize>(&mut self, memory: &M, addr: u64) {
        const { assert!(LEN <= BYTES) };
        // SAFETY: the words are at least `LEN` initialised bytes, and any bytes are valid words.
        let into = unsafe { core::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>(), LEN) };
        memory.read_or_zero(addr, into);
    }

    /// Makes the bytes from an offset on zero, up to 25 of them: to the end of a block of 32 that begins where a word does.
    #[inline(always)]
    pub(super) fn clear_behind(&mut self, offset: u32) {
        let at = (offset / 8) as usize;
        self.words[at & (WORDS - 1)] &= (1 << ((offset & 7) * 8)) - 1;
        self.words[(at + 1) & (WORDS - 1)] = 0;
        self.words[(at + 2) & (WORDS - 1)] = 0;
        self.words[(at + 3) & (WORDS - 1)] = 0;
    }

    /// The word at an offset, which is a multiple of 8.
    #[inline(always)]
    #[must_use]
    pub fn u64(&self, offset: u32) -> u64 {
        self.words[(offset / 8) as usize & (WORDS - 1)]
    }

    /// The word `NTH` words behind an offset, which is a multiple of `8 * N`: one of `N` (a power of two) for which the verifier sees
    /// one bound.
    #[inline(always)]
    pub(super) fn nth_of<const N: usize>(&self, offset: u32, nth: usize) -> u64 {
        const { assert!(N.is_power_of_two() && N <= WORDS) };
        self.words[((offset / 8) as usize & (WORDS - N)) + (nth & (N - 1))]
    }

    /// The half word at an offset, which is a multiple of 4.
    #[inline(always)]
    pub(super) fn u32(&self, offset: u32) -> u32 {
        (self.shifted(offset) & 0xffff_ffff) as u32
    }

    /// The byte at an offset.
    #[inline(always)]
    pub(super) fn u8(&self, offset: u32) -> u8 {
        (self.shifted(offset) & 0xff) as u8
    }

    /// The word around an offset, with the byte at the offset lowest. (Targets that eBPF is built for here are
    /// little-endian.)
    #[inline(always)]
    fn shifted(&self, offset: u32) -> u64 {
        self.u64(offset) >> ((offset & 7) * 8)
    }
}

// What it holds, and nothing else, whatever the size.
const _: () = assert!(core::mem::size_of::<Buffer<256, 32>>() == 256);
const _: () = assert!(core::mem::size_of::<CodeBuffer>() == CODE_READ + core::mem::size_of::<Content>());
