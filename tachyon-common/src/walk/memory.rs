//! The target's memory, whoever reads it.

use super::content::Content;
use crate::layout::Layout;

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

    /// Hashes a code object's string or line table: [`Content::object`]. The kernel side has it as a function of its own,
    /// which its verifier looks at once.
    #[inline(always)]
    fn hash_object(&self, layout: &Layout, content: &mut Content) {
        content.object(self, layout);
    }

    /// Hashes the next piece of it: [`Content::piece`], likewise.
    #[inline(always)]
    fn hash_piece(&self, content: &mut Content) {
        content.piece(self);
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
