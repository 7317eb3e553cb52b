//! The target's memory, whoever reads it.

use super::buffer::CodeBuffer;
use super::code::Identified;
use super::content::Content;
use super::frames::FrameWalk;
use super::owner::{OwnStack, StackScan};
use crate::layout::Layout;
use crate::unwind::{NativeWalk, StackBuffer};

/// Some of the bytes asked for could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreadable;

/// Memory of a target process.
pub trait UserMemory {
    /// Fills `into` with the bytes at `addr`.
    ///
    /// # Errors
    /// [`Unreadable`] when any of them cannot be read; what `into` holds then is not specified.
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable>;

    /// Fills `into` with the bytes at `addr`, or with zeros when any of them cannot be read.
    #[inline(always)]
    fn read_or_zero(&self, addr: u64, into: &mut [u8]) {
        if self.read(addr, into).is_err() {
            into.fill(0);
        }
    }

    /// Reads what the code object at `code` is into the walk and into `buffer`; false when it cannot be read:
    /// [`FrameWalk::identify`], [`FrameWalk::identify_file`] and [`FrameWalk::identify_table`]. The kernel side has each as a
    /// function of its own, which its verifier looks at once.
    #[inline(always)]
    fn identify(&self, walk: &mut FrameWalk, layout: &Layout, seed: u64, code: u64, buffer: &mut CodeBuffer) -> bool {
        match walk.identify(self, layout, seed, code, buffer) {
            Identified::Unreadable => return false,
            Identified::OfAnotherFile => walk.identify_file(self, layout, buffer),
            Identified::OfTheSameFile => {}
        }
        walk.identify_table(self, layout, buffer);
        true
    }

    /// Looks at eight words of a piece of the stack: [`StackScan::look_at_eight`], likewise.
    #[inline(always)]
    fn look_at_eight(&self, scan: &mut StackScan, stack: OwnStack, buffer: &StackBuffer, eight: u32) {
        scan.look_at_eight(stack, buffer, eight);
    }

    /// Reads a word of the native stack: [`NativeWalk::load`], likewise.
    #[inline(always)]
    fn load(&self, walk: &mut NativeWalk, stack: &mut StackBuffer, address: u64) -> u64 {
        walk.load(self, stack, address)
    }

    /// Hashes what is left of a long string or line table: [`Content::pieces`], likewise.
    #[inline(always)]
    fn hash_pieces(&self, content: &mut Content) {
        content.pieces(self);
    }

    /// Hashes some pieces of it: [`Content::some_pieces`], likewise.
    #[inline(always)]
    fn hash_some_pieces(&self, content: &mut Content) -> bool {
        content.some_pieces(self)
    }

    /// Hashes the next piece of it: [`Content::piece`], likewise.
    #[inline(always)]
    fn hash_piece(&self, content: &mut Content) -> bool {
        content.piece(self)
    }
}

/// Reads a pointer-sized word at `base + offset`.
#[inline(always)]
pub fn read_u64<M: UserMemory + ?Sized>(memory: &M, base: u64, offset: u32) -> Result<u64, Unreadable> {
    let mut bytes = [0; 8];
    memory.read(base.wrapping_add(u64::from(offset)), &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Reads words that lie one behind the other; false when they cannot be read.
#[inline(always)]
pub(super) fn read_words<M: UserMemory + ?Sized, const N: usize>(memory: &M, at: u64, words: &mut [u64; N]) -> bool {
    // SAFETY: any bytes are words, and there are eight to each of them.
    let bytes = unsafe { core::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), N * 8) };
    memory.read(at, bytes).is_ok()
}

/// Reads a 32-bit word at `base + offset`.
#[inline(always)]
pub fn read_u32<M: UserMemory + ?Sized>(memory: &M, base: u64, offset: u32) -> Result<u32, Unreadable> {
    let mut bytes = [0; 4];
    memory.read(base.wrapping_add(u64::from(offset)), &mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// Reads a byte at `addr`.
#[inline(always)]
pub fn read_u8<M: UserMemory + ?Sized>(memory: &M, addr: u64) -> Result<u8, Unreadable> {
    let mut byte = [0];
    memory.read(addr, &mut byte)?;
    Ok(byte[0])
}
