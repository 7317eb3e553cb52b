//! TACH, the binary profile format of CPython 3.15's `profiling.sampling`.
//!
//! In: samples as numbers, and the tables of strings and frames that the numbers point into; out: a file that
//! `python3.15 -m profiling.sampling replay` accepts, and the way back. [`Writer`] streams in memory that does not grow
//! with the number of samples, [`Reader`] reads both layouts, both byte orders and both compressions without trusting a
//! byte. Nothing here knows about processes, `Profile` or eBPF: that is in `sinks::tach`.
//!
//! The facts come from `Modules/_remote_debugging/binary_io_{writer,reader}.c` of CPython 3.15.2 and from tests
//! against it; `docs/formats/tach.md` holds this project's own decisions.
//!
//! # Example
//!
//! ```
//! use std::io::Cursor;
//! use tachyon::tach::{Frame, Options, Reader, Sample, Writer};
//!
//! let mut writer = Writer::new(Cursor::new(Vec::new()), Options { start_time_us: 1_000, ..Options::default() })?;
//! for tick in 1..=3 {
//!     let timestamp_us = 1_000 + tick * 10_000;
//!     writer.write_sample(&Sample { thread_id: 42, interpreter_id: 0, timestamp_us, status: 3, frames: &[0] })?;
//! }
//! let frame = Frame { filename: 0, function: 1, lineno: 7, end_lineno: 7, column: 4, end_column: 9, opcode: 255 };
//! let (file, summary) = writer.finish(["app.py", "main"], [frame], None)?;
//! assert_eq!(summary.samples, 3);
//!
//! let mut reader = Reader::new(file)?;
//! let mut samples = reader.samples()?;
//! while let Some(sample) = samples.next_sample()? {
//!     assert_eq!((sample.thread_id, sample.frames), (42, [0].as_slice()));
//! }
//! assert_eq!(samples.records().repeat_samples, 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod ahead;
mod bytes;
mod checkpoint;
mod compress;
mod copy;
mod error;
mod finish;
mod header;
mod intern;
mod options;
mod pending;
mod reader;
mod records;
mod samples;
mod statistics;
mod tables;
mod varint;
mod writer;

pub(crate) use ahead::{Read, ReadAhead};
pub use checkpoint::{Base, Checkpoint};
pub use copy::CopyError;
pub use error::{OffsetFault, ReadError, Section, WriteError};
pub use header::{ByteOrder, Compression, Features, Header, Layout, Mode};
pub(crate) use header::{HEAD_LEN, start_time_of};
pub use intern::{Interner, omitted, omitted_name, trim_stack};
pub use options::Options;
pub use reader::Reader;
pub use samples::Samples;
pub use statistics::Statistics;
pub use tables::{Frame, Location, Tables};
pub use writer::{Summary, Writer};

/// First four bytes of a file, read in its own byte order ("TACH" when big-endian).
pub const MAGIC: u32 = 0x5441_4348;
/// The only version there is; all layouts use it.
pub const VERSION: u32 = 1;
/// Bytes of the header, and offset of the sample data.
pub const HEADER_LEN: u64 = 64;
/// Bytes of the footer, which ends the file.
pub const FOOTER_LEN: u64 = 32;
/// Deepest stack that CPython's reader takes (`MAX_STACK_DEPTH`).
pub const MAX_DEPTH: usize = 256;
/// Most bytes of samples that CPython's reader takes out of a compressed file.
pub const MAX_SAMPLE_BYTES: u64 = 1 << 30;

/// Bytes before the rest of every record: `thread_id` (8), `interpreter_id` (4), encoding (1).
const RECORD_HEAD_LEN: usize = 13;

/// The encodings of a record.
mod encoding {
    pub(super) const REPEAT: u8 = 0;
    pub(super) const FULL: u8 = 1;
    pub(super) const SUFFIX: u8 = 2;
    pub(super) const POP_PUSH: u8 = 3;
}

/// One sample of one thread, as stored in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample<'a> {
    /// On Linux the kernel's thread id as the target sees it.
    pub thread_id: u64,
    /// `PyInterpreterState.id`.
    pub interpreter_id: u32,
    /// Microseconds on the monotonic clock. Steps back are legal.
    pub timestamp_us: u64,
    /// 1 holds the GIL, 2 on a CPU, 4 unknown, 8 GIL requested, 16 has an exception, 32 main thread.
    pub status: u8,
    /// Indices into the frame table, innermost first.
    pub frames: &'a [u32],
}

/// How many records of each kind a file has, and what they hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RecordCounts {
    /// Records that repeat a thread's last stack.
    pub repeat: u64,
    /// Samples in those.
    pub repeat_samples: u64,
    /// Records with a whole stack.
    pub full: u64,
    /// Records that add innermost frames.
    pub suffix: u64,
    /// Records that exchange innermost frames.
    pub pop_push: u64,
}

impl std::ops::AddAssign for RecordCounts {
    fn add_assign(&mut self, more: Self) {
        self.repeat += more.repeat;
        self.repeat_samples += more.repeat_samples;
        self.full += more.full;
        self.suffix += more.suffix;
        self.pop_push += more.pop_push;
    }
}

impl RecordCounts {
    /// All records.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.repeat + self.full + self.suffix + self.pop_push
    }

    /// All samples.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.repeat_samples + self.full + self.suffix + self.pop_push
    }
}
