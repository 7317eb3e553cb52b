//! What tells code objects apart: the identity under which their names are kept.

use super::buffer::CodeBuffer;
use super::memory::{UserMemory, read_u64};
use crate::layout::{Layout, flags};
use crate::limits::{LINETABLE_HASHED, TEXT_HASHED, TEXT_READ};
use crate::stop::StopReason;

/// Mixes a word into a hash (a multiply and a fold; the multiplier is 2^64 divided by the golden ratio).
#[inline(always)]
#[must_use]
pub const fn mix(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

/// What tells one code object from every other that ever lies at its address, and where its names are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodeIdentity {
    /// Hash of the three addresses below, `firstlineno`, the code size, both strings' texts, and of `co_version` (3.12+),
    /// which is no other code object's. Where there is none, or the interpreter has run out of them: of the line table's
    /// length and first bytes. (A code object made like one that was freed before it may lie where that
    /// one lay, with all of its strings: one of 6,000 template code objects on 3.8 and on 3.10.)
    pub fingerprint: u64,
    /// `ob_type`.
    pub ob_type: u64,
    /// Address of the `co_qualname` (before 3.11 `co_name`) string.
    pub qualname: u64,
    /// Address of the `co_filename` string.
    pub filename: u64,
    /// Address of the line table's bytes object.
    pub linetable: u64,
    /// `co_firstlineno`.
    pub firstlineno: i32,
    /// Size of the code: code units (3.11+), else 0.
    pub code_units: u32,
    /// `co_version` (3.12+), a number that its interpreter has given to no other code object; 0: none.
    pub version: u32,
}

/// A string that was hashed, by its address: callers of one file have one `co_filename`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct TextHash {
    object: u64,
    hash: u64,
}

/// Reads the head of the code object at `code`, and what else tells it apart. `file` is the file of the code object before,
/// which need not be read again while its process is stopped.
///
/// # Errors
/// [`StopReason::UnreadableCode`].
#[inline(always)]
pub fn code_identity<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    seed: u64,
    code: u64,
    buffer: &mut CodeBuffer,
    file: &mut TextHash,
) -> Result<CodeIdentity, StopReason> {
    if buffer.fill(memory, code, u32::from(layout.code_read)).is_err() {
        return Err(StopReason::UnreadableCode);
    }
    let mut identity = CodeIdentity {
        fingerprint: 0,
        ob_type: buffer.u64(layout.ob_type),
        qualname: buffer.u64(layout.code_qualname),
        filename: buffer.u64(layout.code_filename),
        linetable: buffer.u64(layout.code_linetable),
        firstlineno: buffer.u32(layout.code_firstlineno).cast_signed(),
        code_units: if layout.has(flags::FRAME_OBJECTS) { 0 } else { buffer.u32(layout.ob_size) },
        version: if Layout::present(layout.code_version) { buffer.u32(layout.code_version) } else { 0 },
    };
    let mut hash = mix(seed, identity.qualname);
    hash = mix(hash, identity.filename);
    hash = mix(hash, identity.linetable);
    hash = mix(hash, u64::from(identity.firstlineno.cast_unsigned()) | (u64::from(identity.code_units) << 32));
    hash = mix(hash, text_hash(memory, layout, identity.qualname, buffer));
    if file.object != identity.filename || identity.filename == 0 {
        *file = TextHash { object: identity.filename, hash: text_hash(memory, layout, identity.filename, buffer) };
    }
    hash = mix(hash, file.hash);
    if identity.version != 0 {
        // In one process. Forked ones give the same versions, often at the same addresses: the texts tell those apart.
        identity.fingerprint = mix(hash, u64::from(identity.version));
        return Ok(identity);
    }
    // One read for the table's length and first bytes, which lie side by side; into the same buffer, whose fields have
    // been taken out.
    let head = layout.bytes_sval.wrapping_sub(layout.ob_size) & 0x3f;
    let from = identity.linetable.wrapping_add(u64::from(layout.ob_size));
    let whole = buffer.fill(memory, from, head + LINETABLE_HASHED as u32).is_ok();
    // The object may end within these bytes, and its page with it; or the table is not in memory at this moment. The
    // identity without its bytes is still one, under a hash of its own.
    if !whole && buffer.fill(memory, from, 8).is_err() {
        identity.fingerprint = mix(hash, u64::MAX);
        return Ok(identity);
    }
    let len = buffer.u64(0);
    hash = mix(hash, len);
    // Whole words inside the table only: bytes past its end belong to somebody else and change. A mask takes them out and
    // not a branch, so that the verifier has one state behind each word (a third of all it has to look at).
    let words = if whole { len / 8 } else { 0 };
    let mut at = 0;
    while at < LINETABLE_HASHED as u64 / 8 {
        // A negative number, all of whose bits are set by the shift, while `at` is below `words`, which is below 2^61.
        let inside = (at.wrapping_sub(words).cast_signed() >> 63).cast_unsigned();
        hash = mix(hash, buffer.u64(head + at as u32 * 8) & inside);
        at += 1;
    }
    identity.fingerprint = hash;
    Ok(identity)
}

/// Length in bytes of the line table that is the bytes object at `linetable`, as the target claims; 0: not readable.
#[inline(always)]
#[must_use]
pub fn linetable_len<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, linetable: u64) -> u64 {
    read_u64(memory, linetable, layout.ob_size).unwrap_or(0)
}

/// Hashes a string's length, its own hash (-1 while it has none), and its text, of a longer one than [`TEXT_HASHED`] bytes
/// the last of it. (Of one that is not ASCII these bytes lie before its text or end before its end: they are the
/// string's own all the same, and seldom change. `hash` lies behind `length`: `PyASCIIObject`, 3.8 to 3.15.)
///
/// A short string is one read. What cannot be read counts as zeros.
#[inline(always)]
fn text_hash<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, object: u64, buffer: &mut CodeBuffer) -> u64 {
    let from = object.wrapping_add(u64::from(layout.unicode_length));
    let text = layout.unicode_ascii_size.wrapping_sub(layout.unicode_length) & 0x3f;
    let whole = buffer.fill(memory, from, TEXT_READ as u32).is_ok();
    if !whole {
        // The string may end within these bytes, and its page with it.
        buffer.fill_or_zero::<M, 16>(memory, from);
    }
    let len = buffer.u64(0);
    let mut hash = mix(len, buffer.u64(8));
    // Whole words, the last of which has bytes of the allocator's behind the string: they stay while the string does.
    let (mut at, mut words) = (text, len.wrapping_add(7) / 8);
    if len > TEXT_HASHED as u64 {
        let end = from.wrapping_add(u64::from(text)).wrapping_add(len);
        buffer.fill_or_zero::<M, TEXT_HASHED>(memory, end.wrapping_sub(TEXT_HASHED as u64));
        (at, words) = (0, TEXT_HASHED as u64 / 8);
    } else if !whole && buffer.fill(memory, from, text + words as u32 * 8).is_err() {
        words = 0;
    }
    let mut word = 0;
    while word < TEXT_HASHED as u64 / 8 {
        // As for the line table below: a mask and not a branch.
        let inside = (word.wrapping_sub(words).cast_signed() >> 63).cast_unsigned();
        hash = mix(hash, buffer.u64(at + word as u32 * 8) & inside);
        word += 1;
    }
    hash
}
