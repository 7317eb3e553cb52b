//! Where the text of a string object is.

use super::memory::{UserMemory, read_u32, read_u64};
use crate::layout::Layout;

/// A string object's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Text {
    /// Its first byte.
    pub addr: u64,
    /// How many bytes of it are taken.
    pub bytes: u32,
    /// Bytes a code point has: 1, 2 or 4.
    pub kind: u8,
    /// Whether there are more.
    pub cut: bool,
}

/// Where the text of the string at `object` is by its head, and how long, up to `most` bytes (a multiple of 4, so that the cut keeps
/// whole code points); `None` when it is not compact.
#[inline(always)]
pub fn text_of(layout: &Layout, object: u64, state: u32, length: u64, most: u32) -> Option<Text> {
    if state & layout.unicode_compact_bit == 0 {
        return None;
    }
    let kind = (state >> (layout.unicode_kind_shift & 31)) & 7;
    let ascii = state & layout.unicode_ascii_bit != 0;
    if kind != 1 && kind != 2 && kind != 4 {
        return None;
    }
    let start = if ascii { layout.unicode_ascii_size } else { layout.unicode_compact_size };
    // `length` is the target's word: compare before multiplying.
    let cut = length > u64::from(most) / u64::from(kind);
    let bytes = if cut { most } else { (length as u32).wrapping_mul(kind) };
    Some(Text { addr: object.wrapping_add(u64::from(start)), bytes, kind: kind as u8, cut })
}

/// `text_of` a string whose head is in the target's memory; `None` also when that cannot be read.
#[inline(always)]
pub fn text<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, object: u64, most: u32) -> Option<Text> {
    let state = read_u32(memory, object, layout.unicode_state).ok()?;
    let length = read_u64(memory, object, layout.unicode_length).ok()?;
    text_of(layout, object, state, length, most)
}
