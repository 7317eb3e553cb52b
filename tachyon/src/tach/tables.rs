//! Strings and frames, which come after the samples.

use super::bytes::Bytes;
use super::varint::{put_i32, put_u32};
use super::{ReadError, Section, WriteError};
use std::io::Read;

/// An entry of the frame table, as the file holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// Index of the file name in the string table.
    pub filename: u32,
    /// Index of the function's name in the string table.
    pub function: u32,
    /// First line; -1: no location, whatever the other three hold.
    pub lineno: i32,
    /// Last line; -1: not known.
    pub end_lineno: i32,
    /// First column; -1: not known.
    pub column: i32,
    /// Column past the end; -1: not known. Without a first column it is no column, and CPython's reader does not look at it:
    /// see [`Frame::called_at`].
    pub end_column: i32,
    /// CPython opcode; 255: not recorded.
    pub opcode: u8,
}

/// Where in a file a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// First line.
    pub lineno: i32,
    /// Last line.
    pub end_lineno: i32,
    /// First column.
    pub column: i32,
    /// Column past the end.
    pub end_column: i32,
}

impl Frame {
    /// [`Frame::opcode`] of a frame whose opcode was not recorded.
    pub const NO_OPCODE: u8 = 255;
    /// [`Frame::lineno`] of a frame without location; also an unknown line or column.
    pub const NOT_AVAILABLE: i32 = -1;
    /// [`Frame::end_column`] of [`Frame::called_at`], whose column is not known: the file stores 1 as their difference, which
    /// CPython 3.15's reader skips where there is no column (`Modules/_remote_debugging/binary_io_reader.c`), and which its writer
    /// never writes there.
    const CALLED: i32 = 0;
    /// Fewest bytes of an entry: seven fields of one byte each.
    pub(super) const MIN_LEN: u64 = 7;

    /// A frame that has names only.
    #[must_use]
    pub fn without_location(filename: u32, function: u32) -> Self {
        let none = Self::NOT_AVAILABLE;
        Self {
            filename,
            function,
            lineno: none,
            end_lineno: none,
            column: none,
            end_column: none,
            opcode: Self::NO_OPCODE,
        }
    }

    /// A function without source of its own that a line of Python has called, native code for instance. It is shown at that
    /// line, so that viewers which count by line include in the line what it called.
    #[must_use]
    pub fn called_at(filename: u32, function: u32, lineno: i32) -> Self {
        Self { lineno, end_lineno: lineno, end_column: Self::CALLED, ..Self::without_location(filename, function) }
    }

    /// Whether it was made by [`Frame::called_at`].
    #[must_use]
    pub fn is_called(&self) -> bool {
        self.column == Self::NOT_AVAILABLE && self.end_column == Self::CALLED
    }

    /// The location, if there is one.
    #[must_use]
    pub fn location(&self) -> Option<Location> {
        let Self { lineno, end_lineno, column, end_column, .. } = *self;
        let end_column = if column == Self::NOT_AVAILABLE { column } else { end_column };
        (lineno != Self::NOT_AVAILABLE).then_some(Location { lineno, end_lineno, column, end_column })
    }

    /// The opcode, if it was recorded.
    #[must_use]
    pub fn opcode(&self) -> Option<u8> {
        (self.opcode != Self::NO_OPCODE).then_some(self.opcode)
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        put_u32(out, self.filename);
        put_u32(out, self.function);
        put_i32(out, self.lineno);
        put_i32(out, end_delta(self.lineno, self.end_lineno));
        put_i32(out, self.column);
        put_i32(out, if self.is_called() { CALLED_DELTA } else { end_delta(self.column, self.end_column) });
        out.push(self.opcode);
    }

    fn decode(bytes: &mut Bytes<impl Read>) -> Result<Self, ReadError> {
        let filename = bytes.varint_u32()?;
        let function = bytes.varint_u32()?;
        let lineno = bytes.varint_i32()?;
        let end_lineno = end(lineno, bytes.varint_i32()?);
        let column = bytes.varint_i32()?;
        let delta = bytes.varint_i32()?;
        let called = column == Self::NOT_AVAILABLE && delta == CALLED_DELTA && lineno != Self::NOT_AVAILABLE;
        let end_column = if called { Self::CALLED } else { end(column, delta) };
        Ok(Self { filename, function, lineno, end_lineno, column, end_column, opcode: bytes.u8()? })
    }
}

/// What a file stores for the end of the columns of [`Frame::called_at`].
const CALLED_DELTA: i32 = Frame::CALLED - Frame::NOT_AVAILABLE;

/// The end of a range as the file stores it. An unknown end of a known start reads back as the start: the format
/// has no way to say it.
fn end_delta(start: i32, end: i32) -> i32 {
    if start == Frame::NOT_AVAILABLE || end == Frame::NOT_AVAILABLE { 0 } else { end.wrapping_sub(start) }
}

fn end(start: i32, delta: i32) -> i32 {
    if start == Frame::NOT_AVAILABLE { start } else { start.wrapping_add(delta) }
}

/// Appends one entry of the string table.
pub(super) fn encode_string(text: &str, out: &mut Vec<u8>) -> Result<(), WriteError> {
    let len = u32::try_from(text.len()).map_err(|_| WriteError::StringTooLong(text.len()))?;
    put_u32(out, len);
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

/// The tables of a file that was read.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// All strings, one after the other.
    text: String,
    /// Where each string ends.
    ends: Vec<usize>,
    frames: Vec<Frame>,
}

impl Tables {
    /// Tables that were not read from a file, for [`super::Reader::cut`].
    pub fn new<S: AsRef<str>>(strings: impl IntoIterator<Item = S>, frames: Vec<Frame>) -> Self {
        let mut tables = Self { frames, ..Self::default() };
        for text in strings {
            tables.text.push_str(text.as_ref());
            tables.ends.push(tables.text.len());
        }
        tables
    }

    /// The string of an index.
    #[must_use]
    pub fn string(&self, index: u32) -> Option<&str> {
        self.string_at(index as usize)
    }

    fn string_at(&self, index: usize) -> Option<&str> {
        let start = if index == 0 { 0 } else { *self.ends.get(index - 1)? };
        self.text.get(start..*self.ends.get(index)?)
    }

    /// All strings in order.
    pub fn strings(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.ends.len()).map(|index| self.string_at(index).expect("the index is below the count"))
    }

    /// How many strings there are.
    #[must_use]
    pub fn string_count(&self) -> usize {
        self.ends.len()
    }

    /// The frame of an index.
    #[must_use]
    pub fn frame(&self, index: u32) -> Option<&Frame> {
        self.frames.get(index as usize)
    }

    /// All frames in order. Their string indices are checked when a sample uses them, as in CPython.
    #[must_use]
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// By frame: whether [`Tables::check`] lets a sample use it.
    pub(super) fn usable(&self) -> Vec<bool> {
        let there = |string: u32| (string as usize) < self.ends.len();
        self.frames.iter().map(|frame| there(frame.filename) && there(frame.function)).collect()
    }

    /// Checks that a sample may use a frame.
    pub(super) fn check(&self, index: u32) -> Result<(), ReadError> {
        let count = self.frames.len();
        let frame = self.frame(index).ok_or(ReadError::InvalidFrameIndex { index, count })?;
        for string in [frame.filename, frame.function] {
            if string as usize >= self.ends.len() {
                return Err(ReadError::InvalidStringIndex { frame: index, index: string, count: self.ends.len() });
            }
        }
        Ok(())
    }

    /// Reads the string table. Invalid UTF-8 is replaced, as CPython does.
    pub(super) fn read_strings(
        &mut self,
        bytes: &mut Bytes<impl Read>,
        count: u32,
        available: u64,
    ) -> Result<(), ReadError> {
        if u64::from(count) > available {
            return Err(ReadError::TooManyEntries { section: Section::Strings, count, available });
        }
        let mut raw = Vec::new();
        for index in 0..count as usize {
            let len = bytes.varint_u32()?;
            let left = available.saturating_sub(bytes.consumed());
            if u64::from(len) > left {
                return Err(ReadError::StringOverflow { index, len_bytes: len, available: left });
            }
            raw.clear();
            bytes.append(len as usize, &mut raw)?;
            self.text.push_str(&String::from_utf8_lossy(&raw));
            self.ends.push(self.text.len());
        }
        Ok(())
    }

    /// Reads the frame table.
    pub(super) fn read_frames(
        &mut self,
        bytes: &mut Bytes<impl Read>,
        count: u32,
        available: u64,
    ) -> Result<(), ReadError> {
        if u64::from(count) > available / Frame::MIN_LEN {
            return Err(ReadError::TooManyEntries { section: Section::Frames, count, available });
        }
        for _ in 0..count {
            self.frames.push(Frame::decode(bytes)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(frame: Frame) -> Frame {
        let mut out = Vec::new();
        frame.encode(&mut out);
        Frame::decode(&mut Bytes::new(out.as_slice(), Section::Frames, ReadError::Io, u64::MAX)).unwrap()
    }

    #[test]
    fn positions() {
        for (given, read) in [
            ((1, 2, 3, 4), (1, 2, 3, 4)),
            ((0, 0, 0, 0), (0, 0, 0, 0)),
            ((5, -1, 6, -1), (5, 5, 6, 6)),
            ((-1, 9, 9, 9), (-1, -1, 9, 9)),
            ((5, 5, -1, 9), (5, 5, -1, -1)),
            ((i32::MIN, i32::MAX, i32::MAX, i32::MIN), (i32::MIN, i32::MAX, i32::MAX, i32::MIN)),
            ((-7, -8, -2, -3), (-7, -8, -2, -3)),
        ] {
            let (lineno, end_lineno, column, end_column) = given;
            let frame = Frame { filename: 0, function: 300, lineno, end_lineno, column, end_column, opcode: 7 };
            let back = round_trip(frame);
            assert_eq!((back.lineno, back.end_lineno, back.column, back.end_column), read, "{given:?}");
            assert_eq!(back.location().is_none(), lineno == -1);
        }
        assert_eq!(round_trip(Frame::without_location(1, 2)), Frame::without_location(1, 2));
    }

    #[test]
    fn a_function_at_the_line_that_called_it() {
        let frame = Frame::called_at(1, 2, 30);
        let location = Location { lineno: 30, end_lineno: 30, column: -1, end_column: -1 };
        assert_eq!((round_trip(frame), frame.location()), (frame, Some(location)));
        assert!(round_trip(frame).is_called());
        for other in [Frame { end_column: -1, ..frame }, Frame { column: 0, ..frame }, Frame::without_location(1, 2)] {
            assert!(!round_trip(other).is_called(), "{other:?}");
        }
    }

    #[test]
    fn strings_are_checked_before_they_are_read() {
        let mut tables = Tables::default();
        let data = [1, b'a', 0xff, 0xff, 0xff, 0xff, 0x0f, b'b'];
        let mut bytes = Bytes::new(data.as_slice(), Section::Strings, ReadError::Io, u64::MAX);
        let error = tables.read_strings(&mut bytes, 2, 8).unwrap_err();
        assert!(matches!(error, ReadError::StringOverflow { index: 1, len_bytes: u32::MAX, available: 1 }), "{error}");
        assert_eq!(tables.string(0), Some("a"));
        assert_eq!(tables.string(1), None);
    }

    #[test]
    fn invalid_utf8_is_replaced() {
        let mut tables = Tables::default();
        let mut bytes = Bytes::new([2, b'a', 0xff, 0].as_slice(), Section::Strings, ReadError::Io, u64::MAX);
        tables.read_strings(&mut bytes, 2, 4).unwrap();
        assert_eq!(tables.strings().collect::<Vec<_>>(), ["a\u{fffd}", ""]);
    }
}
