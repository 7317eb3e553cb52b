//! What tells code objects apart: the identity under which their names are kept.

use super::buffer::CodeBuffer;
use super::content::{Content, TextHash};
use super::memory::{UserMemory, read_u64};
use crate::layout::{Layout, flags};
use crate::stop::StopReason;

/// Mixes a word into a hash (a multiply and a fold; the multiplier is 2^64 divided by the golden ratio).
#[inline(always)]
#[must_use]
pub const fn mix(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

/// What is shown of a code object, in one word, and where it lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodeIdentity {
    /// Hash of all that is shown of a frame: both names and the line table, whole ([`super::Content`] has their bounds),
    /// `firstlineno`, and the code size, which bounds the instruction. Two code objects with one fingerprint are shown alike,
    /// so it does not matter which of them it is: neither where they lie nor what lay there before enters it. (Less does not
    /// do: of what forked processes make after their fork, addresses and `co_version`s are equal, and 33 to 67 % of their
    /// samples had another one's name, file or line under a hash of those, of the strings' last 32 bytes and of the line
    /// table's first 32: `tests/live/identity.rs`.)
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
    /// What is not in the fingerprint and must not be shown: bits of [`super::lacks`].
    pub lacks: u32,
}

impl CodeIdentity {
    /// Reads a code object's head: all of its identity but the fingerprint. False when it cannot be read.
    #[inline(always)]
    pub fn read_head<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        code: u64,
        buffer: &mut CodeBuffer,
    ) -> bool {
        let head = &mut buffer.head;
        if head.fill(memory, code, u32::from(layout.code_read)).is_err() {
            return false;
        }
        self.ob_type = head.u64(layout.ob_type);
        self.qualname = head.u64(layout.code_qualname);
        self.filename = head.u64(layout.code_filename);
        self.linetable = head.u64(layout.code_linetable);
        self.firstlineno = head.u32(layout.code_firstlineno).cast_signed();
        self.code_units = if layout.has(flags::FRAME_OBJECTS) { 0 } else { head.u32(layout.ob_size) };
        self.version = if Layout::present(layout.code_version) { head.u32(layout.code_version) } else { 0 };
        true
    }

    /// Reads the head of the code object at `code`, and its name. Its file's name must be read, too, if it is not that of the code object
    /// before, which need not be read again while its process is stopped; then the [rest](Self::read_table).
    #[inline(always)]
    pub(super) fn read<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        (seed, code): (u64, u64),
        buffer: &mut CodeBuffer,
    ) -> Identified {
        if !self.read_head(memory, layout, code, buffer) {
            return Identified::Unreadable;
        }
        let content = &mut buffer.content;
        content.seed = seed;
        content.qualname = self.qualname;
        content.filename = self.filename;
        content.linetable = self.linetable;
        if content.name(memory, layout) { Identified::OfTheSameFile } else { Identified::OfAnotherFile }
    }

    /// Reads the line table, and computes the fingerprint.
    #[inline(always)]
    pub(super) fn read_table<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout, content: &mut Content) {
        content.line_table(memory, layout);
        self.lacks = content.lacks;
        let sizes = u64::from(self.firstlineno.cast_unsigned()) | (u64::from(self.code_units) << 32);
        self.fingerprint = mix(mix(content.hash(), sizes), u64::from(content.lacks));
    }
}

/// What was read of a code object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Identified {
    /// Its head cannot be read.
    Unreadable,
    /// Its head and its name: its file is that of the code object before.
    OfTheSameFile,
    /// The same: its file is another one.
    OfAnotherFile,
}

/// Reads the head of the code object at `code`, and all that is shown of it. `file` is the file of the code object before,
/// which need not be read again while its process is stopped.
///
/// # Errors
/// [`StopReason::UnreadableCode`].
pub fn code_identity<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    seed: u64,
    code: u64,
    buffer: &mut CodeBuffer,
    file: &mut TextHash,
) -> Result<CodeIdentity, StopReason> {
    let mut identity = CodeIdentity::default();
    buffer.content.file = *file;
    match identity.read(memory, layout, (seed, code), buffer) {
        Identified::Unreadable => return Err(StopReason::UnreadableCode),
        Identified::OfAnotherFile => buffer.content.file_name(memory, layout),
        Identified::OfTheSameFile => {}
    }
    identity.read_table(memory, layout, &mut buffer.content);
    *file = buffer.content.file;
    Ok(identity)
}

/// Length in bytes of the line table that is the bytes object at `linetable`, as the target claims; 0: not readable.
#[inline(always)]
#[must_use]
pub fn linetable_len<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, linetable: u64) -> u64 {
    read_u64(memory, linetable, layout.ob_size).unwrap_or(0)
}
