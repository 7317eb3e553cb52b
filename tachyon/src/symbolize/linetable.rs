//! CPython's line tables: byte offset of an instruction to line and columns.
//!
//! In: the bytes of `co_lnotab` (3.8, 3.9) or `co_linetable` (3.10 and later), `co_firstlineno` and `lasti`. Out: a
//! [`Position`], equal to what `code.co_positions()` or `PyCode_Addr2Line()` says. The bytes come from a target:
//! decoding takes linear time for any bytes, and after a malformed entry there are no positions.
//!
//! Sources: `Objects/codeobject.c` and `Objects/lnotab_notes.txt` of CPython 3.9 and 3.10, `Objects/codeobject.c`
//! and `InternalDocs/code_objects.md` of CPython 3.13.

use std::hash::{Hash, Hasher};
use tachyon_common::layout::Layout;

/// A place in a source file, numbered as CPython does; -1 stands for what is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    /// First line, from 1.
    pub lineno: i32,
    /// Last line.
    pub end_lineno: i32,
    /// First column, in UTF-8 bytes from 0.
    pub column: i32,
    /// Column past the end.
    pub end_column: i32,
}

impl Position {
    /// No location: what compiler-made instructions have, and what CPython's own profiler says when a table has no
    /// entry (`Modules/_remote_debugging/code_objects.c`, `parse_code_object`).
    pub const NONE: Self = Self { lineno: -1, end_lineno: -1, column: -1, end_column: -1 };

    /// A line and nothing more: all that versions up to 3.10 record.
    #[must_use]
    pub const fn line(lineno: i32) -> Self {
        Self { lineno, ..Self::NONE }
    }
}

/// How a line table is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// `co_lnotab`: pairs of byte increment and signed line increment (3.8, 3.9).
    Lnotab,
    /// PEP 626's `co_linetable`: pairs of length in bytes and signed line increment, -128 for no line (3.10).
    Ranges,
    /// PEP 657's location table, with columns (3.11 and later).
    Locations,
}

impl Format {
    /// The format this interpreter's code objects use.
    #[must_use]
    pub fn of(layout: &Layout) -> Self {
        match layout.minor_version() {
            (..=2, _) | (3, ..=9) => Self::Lnotab,
            (3, 10) => Self::Ranges,
            _ => Self::Locations,
        }
    }
}

/// One code object's line table, kept as its bytes and a few marks from which a search may start.
///
/// Tables with the same content compare equal: code objects that were freed and made again, or that live in several
/// processes, can share one.
#[derive(Debug)]
pub struct LineTable {
    format: Format,
    firstlineno: i32,
    whole: bool,
    sound: bool,
    bytes: Box<[u8]>,
    /// Where the decoder stood every [`ENTRIES_PER_MARK`] entries.
    marks: Box<[Mark]>,
    code_len: u64,
}

/// Entries decoded from one mark to the next: the most that one lookup decodes.
const ENTRIES_PER_MARK: usize = 128;

impl PartialEq for LineTable {
    fn eq(&self, other: &Self) -> bool {
        // The rest is made from these.
        (self.format, self.firstlineno, self.whole, &self.bytes)
            == (other.format, other.firstlineno, other.whole, &other.bytes)
    }
}

impl Eq for LineTable {}

impl Hash for LineTable {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.format, self.firstlineno, self.whole, &self.bytes).hash(state);
    }
}

impl LineTable {
    /// Scans `bytes` once. `whole` is false if the table continues after them: then offsets that they do not cover have
    /// no position.
    #[must_use]
    pub fn new(format: Format, firstlineno: i32, bytes: Box<[u8]>, whole: bool) -> Self {
        let mut mark = Mark { at: 0, addr: 0, line: firstlineno };
        let mut marks = Vec::new();
        let mut code_len = 0;
        let mut entries: usize = 0;
        let sound = loop {
            if entries != 0 && entries.is_multiple_of(ENTRIES_PER_MARK) {
                marks.push(mark);
            }
            entries += 1;
            match mark.next(format, &bytes, whole) {
                Ok(Some(_)) => code_len = mark.addr,
                Ok(None) => break true,
                Err(Malformed) => break false,
            }
        };
        Self { format, firstlineno, whole, sound, bytes, marks: marks.into(), code_len }
    }

    /// Where the instruction at `lasti` is, a byte offset from the start of the code. A negative one belongs to a frame
    /// that has not started: its place is the function's first line, as in `PyCode_Addr2Line()`.
    ///
    /// `lasti` may lie anywhere in an instruction, its inline caches included: a table's ranges cover them.
    #[must_use]
    pub fn locate(&self, lasti: i32) -> Position {
        let Ok(lasti) = u64::try_from(lasti) else { return Position::line(self.firstlineno) };
        let past = self.marks.partition_point(|mark| mark.addr <= lasti);
        let start = Mark { at: 0, addr: 0, line: self.firstlineno };
        let mut mark = past.checked_sub(1).and_then(|index| self.marks.get(index)).copied().unwrap_or(start);
        while let Ok(Some(position)) = mark.next(self.format, &self.bytes, self.whole) {
            if mark.addr > lasti {
                return position;
            }
        }
        Position::NONE
    }

    /// Whether every byte could be decoded; nothing can be said about a table that is not whole. An empty `co_linetable` is not sound: each
    /// code object has instructions.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        !self.whole || self.sound && (self.format == Format::Lnotab || self.code_len > 0)
    }

    /// Whether `lasti` may be an offset into this code, as far as the table shows.
    #[must_use]
    pub fn covers(&self, lasti: i32) -> bool {
        !self.whole || u64::try_from(lasti).map_or(true, |lasti| lasti < self.code_len)
    }

    /// Bytes of memory this table takes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        size_of::<Self>() + self.bytes.len() + size_of_val(&*self.marks)
    }
}

/// A table that cannot be decoded further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Malformed;

/// Where a decoder stands.
#[derive(Clone, Copy, Debug)]
struct Mark {
    /// Bytes of the table read so far.
    at: usize,
    /// Byte offset of the first instruction not yet passed. Cannot overflow: an entry adds at most 255.
    addr: u64,
    /// Running line number, `computed_line` of CPython. Wraps, as a crafted table makes it do.
    line: i32,
}

impl Mark {
    /// Passes one entry, whose range then ends at `self.addr`. `None` at the end.
    fn next(&mut self, format: Format, bytes: &[u8], whole: bool) -> Result<Option<Position>, Malformed> {
        match format {
            Format::Lnotab => Ok(self.next_lnotab(bytes, whole)),
            Format::Ranges => self.next_range(bytes),
            Format::Locations => self.next_location(bytes),
        }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<u8, Malformed> {
        let byte = bytes.get(self.at).copied().ok_or(Malformed)?;
        self.at += 1;
        Ok(byte)
    }

    /// A pair says how far the line so far reaches, then how the line changes. The last line has no end.
    fn next_lnotab(&mut self, bytes: &[u8], whole: bool) -> Option<Position> {
        let position = Position::line(self.line);
        if let Some(&[increment, change]) = bytes.get(self.at..).and_then(|rest| rest.first_chunk()) {
            self.at += 2;
            self.addr += u64::from(increment);
            self.line = self.line.wrapping_add(i32::from(change.cast_signed()));
        } else if whole && self.addr != u64::MAX {
            // CPython ignores an odd last byte.
            self.addr = u64::MAX;
        } else {
            return None;
        }
        Some(position)
    }

    fn next_range(&mut self, bytes: &[u8]) -> Result<Option<Position>, Malformed> {
        if self.at >= bytes.len() {
            return Ok(None);
        }
        let length = self.take(bytes)?;
        let change = self.take(bytes)?.cast_signed();
        self.addr += u64::from(length);
        if change == i8::MIN {
            return Ok(Some(Position::NONE));
        }
        self.line = self.line.wrapping_add(i32::from(change));
        Ok(Some(Position::line(self.line)))
    }

    /// An entry's first byte has its highest bit set, four bits of code and three of length.
    fn next_location(&mut self, bytes: &[u8]) -> Result<Option<Position>, Malformed> {
        if self.at >= bytes.len() {
            return Ok(None);
        }
        let first = self.take(bytes)?;
        if first & 0x80 == 0 {
            return Err(Malformed);
        }
        let position = match (first >> 3) & 15 {
            // PY_CODE_LOCATION_INFO_NONE
            15 => Position::NONE,
            // PY_CODE_LOCATION_INFO_LONG
            14 => {
                self.line = self.line.wrapping_add(self.signed_varint(bytes)?);
                Position {
                    lineno: self.line,
                    end_lineno: self.line.wrapping_add(self.varint(bytes)?.cast_signed()),
                    column: self.varint(bytes)?.cast_signed().wrapping_sub(1),
                    end_column: self.varint(bytes)?.cast_signed().wrapping_sub(1),
                }
            }
            // PY_CODE_LOCATION_INFO_NO_COLUMNS
            13 => {
                self.line = self.line.wrapping_add(self.signed_varint(bytes)?);
                Position { end_lineno: self.line, ..Position::line(self.line) }
            }
            // PY_CODE_LOCATION_INFO_ONE_LINE0 to 2
            code @ 10..=12 => {
                self.line = self.line.wrapping_add(i32::from(code) - 10);
                Position {
                    lineno: self.line,
                    end_lineno: self.line,
                    column: i32::from(self.take(bytes)?),
                    end_column: i32::from(self.take(bytes)?),
                }
            }
            // PY_CODE_LOCATION_INFO_SHORT0 to 9
            code => {
                let second = self.take(bytes)?;
                let column = i32::from(code << 3 | second >> 4);
                let end_column = column + i32::from(second & 15);
                Position { lineno: self.line, end_lineno: self.line, column, end_column }
            }
        };
        self.addr += (u64::from(first & 7) + 1) * 2;
        Ok(Some(position))
    }

    /// Six bits a byte, least significant first; bit 6 says that more follow. CPython writes at most six bytes.
    fn varint(&mut self, bytes: &[u8]) -> Result<u32, Malformed> {
        let mut value = 0;
        for shift in (0..=30).step_by(6) {
            let byte = self.take(bytes)?;
            value |= u32::from(byte & 63) << shift;
            if byte & 64 == 0 {
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    /// Sign in the lowest bit.
    fn signed_varint(&mut self, bytes: &[u8]) -> Result<i32, Malformed> {
        let value = self.varint(bytes)?;
        let magnitude = (value >> 1).cast_signed();
        Ok(if value & 1 == 0 { magnitude } else { -magnitude })
    }
}

#[cfg(test)]
#[path = "linetable/tests.rs"]
pub(super) mod tests;
