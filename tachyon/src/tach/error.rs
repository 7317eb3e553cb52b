//! What can be wrong with a file, each kind under its own name.

use super::{FOOTER_LEN, HEADER_LEN, MAX_DEPTH, MAX_SAMPLE_BYTES};
use crate::advice::{Advice, advises};
use std::fmt;
use std::io;

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// The sample records.
    Samples,
    /// The string table.
    Strings,
    /// The frame table.
    Frames,
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Samples => "sample data",
            Self::Strings => "string table",
            Self::Frames => "frame table",
        })
    }
}

/// Why a header does not fit its file in one layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffsetFault {
    /// The string table is said to start inside the header.
    StringsInHeader(u64),
    /// The string table is said to start past the end.
    StringsPastEnd(u64),
    /// The frame table is said to start inside the header.
    FramesInHeader(u64),
    /// The frame table is said to start past the end.
    FramesPastEnd(u64),
    /// The frame table (second) is said to start before the string table (first).
    FramesBeforeStrings(u64, u64),
    /// A compression that does not exist.
    Compression(u32),
}

impl fmt::Display for OffsetFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StringsInHeader(offset) => write!(f, "string table offset {offset} is inside the header"),
            Self::StringsPastEnd(offset) => write!(f, "string table offset {offset} is past the end"),
            Self::FramesInHeader(offset) => write!(f, "frame table offset {offset} is inside the header"),
            Self::FramesPastEnd(offset) => write!(f, "frame table offset {offset} is past the end"),
            Self::FramesBeforeStrings(strings, frames) => {
                write!(f, "frame table offset {frames} is before string table offset {strings}")
            }
            Self::Compression(value) => write!(f, "compression {value} does not exist"),
        }
    }
}

/// Why a file cannot be read, or cannot be read further.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The bytes could not be read.
    #[error("cannot read the file: {0}")]
    Io(#[source] io::Error),
    /// Not even room for header and footer.
    #[error("too small for a profile: {0} bytes, header and footer alone take {min}", min = HEADER_LEN + FOOTER_LEN)]
    TooSmall(u64),
    /// Another kind of file.
    #[error("not a binary sampling profile: magic number is 0x{0:08x}")]
    BadMagic(u32),
    /// The writer was stopped before it wrote the header.
    #[error("the recording was cut before its end: the header was never completed")]
    Unfinished,
    /// A version that does not exist yet.
    #[error("unsupported format version {0}, only 1 is known")]
    UnsupportedVersion(u32),
    /// The header contradicts the file in either layout.
    #[error(
        "the header does not fit the file's {size} bytes: as released with 3.15, {released}; as in its early alphas, {early}"
    )]
    BadOffsets {
        /// The file's size.
        size: u64,
        /// What is wrong in the layout of 3.15.
        released: OffsetFault,
        /// What is wrong in the layout of 3.15.0a4 to b3.
        early: OffsetFault,
    },
    /// The header names a compression that does not exist.
    #[error("unknown compression {0}, only 0 (none) and 1 (zstd) are known")]
    UnknownCompression(u32),
    /// The header names a mode that does not exist.
    #[error("invalid profiling mode in header: {0}")]
    InvalidMode(u32),
    /// The footer promises more table entries than bytes can hold.
    #[error("footer declares {count} entries of the {section}, {available} bytes have no room for them")]
    TooManyEntries {
        /// Which table.
        section: Section,
        /// What the footer declares.
        count: u32,
        /// Bytes from the table's start to the file's end.
        available: u64,
    },
    /// The statistics block contradicts itself.
    #[error("invalid statistics block: {0}")]
    InvalidStatistics(&'static str),
    /// A number longer than its type.
    #[error("malformed varint in {0}")]
    MalformedVarint(Section),
    /// A table or a record goes on past the end of its bytes.
    #[error("{0} ends inside an entry")]
    Cut(Section),
    /// A string is said to be longer than the rest of the file.
    #[error("string {index} is {len_bytes} bytes long, {available} are left")]
    StringOverflow {
        /// Which string.
        index: usize,
        /// Its declared length.
        len_bytes: u32,
        /// Bytes up to the end of the file.
        available: u64,
    },
    /// A compressed file without any compressed data.
    #[error("corrupted zstd data: no frame at all")]
    EmptyZstd,
    /// The compressed data ends inside a frame.
    #[error("incomplete zstd frame: the sample data was cut")]
    IncompleteZstd,
    /// The compressed data is not zstd, or asks for too large a window.
    #[error("corrupted zstd data: {0}")]
    Zstd(#[source] io::Error),
    /// More sample bytes than any reader takes.
    #[error("sample data is larger than {MAX_SAMPLE_BYTES} bytes when decompressed")]
    TooLarge,
    /// A few bytes after the last record.
    #[error("truncated sample data: {0} trailing bytes")]
    TrailingBytes(usize),
    /// An encoding that does not exist.
    #[error("unknown record encoding {0}")]
    UnknownEncoding(u8),
    /// A stack deeper than any reader takes.
    #[error("stack depth {0} exceeds {MAX_DEPTH}")]
    TooDeep(u64),
    /// A record keeps more frames than there are.
    #[error("a record keeps {shared} frames of a stack of {depth}")]
    SharedTooDeep {
        /// What it keeps.
        shared: u32,
        /// What there is.
        depth: usize,
    },
    /// A sample points past the frame table.
    #[error("invalid frame index {index}: the table has {count}")]
    InvalidFrameIndex {
        /// The index.
        index: u32,
        /// The table's size.
        count: usize,
    },
    /// A frame in use points past the string table.
    #[error("invalid string index {index} in frame {frame}: the table has {count}")]
    InvalidStringIndex {
        /// The frame.
        frame: u32,
        /// The index.
        index: u32,
        /// The table's size.
        count: usize,
    },
    /// More threads in the samples than the header declares.
    #[error("invalid thread count: header declares {0}, the samples are of more")]
    TooManyThreads(u32),
    /// The header declares another number of samples than the records hold.
    #[error("sample count mismatch: header declares {declared}, the records hold {found}")]
    SampleCountMismatch {
        /// In the header.
        declared: u64,
        /// In the records.
        found: u64,
    },
}

advises!(ReadError);

impl Advice for ReadError {
    fn hint(&self) -> Option<String> {
        let mend = match self {
            Self::Unfinished => "`tachyon-bpf recover` makes a readable file of a recording that was cut",
            Self::BadOffsets { .. } => "the file may have been cut",
            _ => return None,
        };
        Some(mend.to_owned())
    }
}

/// Why something was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The output failed. The file is lost: later writes give [`WriteError::Broken`].
    #[error("cannot write the profile: {0}")]
    Io(#[from] io::Error),
    /// An earlier write failed.
    #[error("cannot write the profile: an earlier write failed")]
    Broken,
    /// A stack deeper than any reader takes; see [`super::trim_stack`].
    #[error("stack of {0} frames, the format holds {MAX_DEPTH}")]
    TooDeep(usize),
    /// The sample could make the file larger than any reader takes; see [`super::Writer::would_overflow`].
    #[error("the file is full: CPython's reader takes {MAX_SAMPLE_BYTES} bytes of samples")]
    Full,
    /// More samples, threads, strings or frames than the format's counters hold.
    #[error("too many {0} for the format")]
    TooMany(&'static str),
    /// A string of 4 GiB or more.
    #[error("a string of {0} bytes is too long for the format")]
    StringTooLong(usize),
    /// Statistics that no reader takes.
    #[error("invalid statistics: {0}")]
    InvalidStatistics(&'static str),
}

impl From<WriteError> for io::Error {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Io(error) => error,
            other => Self::other(other),
        }
    }
}
