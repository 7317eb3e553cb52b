//! Copies a file's samples into another file, byte for byte, while they are read and checked.
//!
//! A conversion from TACH to TACH only changes what surrounds the samples: the layout of the header, the statistics
//! block. Encoding and compressing the samples again would take three times as long, and give the same samples.

use super::finish::{Body, finish_file};
use super::header::ByteOrder;
use super::samples::Source;
use super::{HEADER_LEN, Layout, Options, ReadError, Reader, Samples, Summary, WriteError};
use std::io::{self, Read, Seek, SeekFrom, Write};

/// Samples that are read in one step.
const RUN: usize = 64 * 1024;

/// Why a file could not be copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The file that is read is damaged, or cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The output cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl<R: Read + Seek> Reader<R> {
    /// Whether [`Reader::copy_to`] accepts this file: samples in the other byte order must be written anew, as must
    /// those of a file that is continued.
    #[must_use]
    pub fn can_be_copied(&self) -> bool {
        self.header.byte_order == ByteOrder::Little && self.end.is_none()
    }

    /// Writes this file anew in the released layout: its samples as they are, byte for byte, with the same tables and
    /// statistics. Every sample is read on its way, so what comes out can be read to its end. `out` must be empty and stand
    /// at its start.
    ///
    /// ```
    /// use std::io::Cursor;
    /// use tachyon::tach::{Layout, Options, Reader, Sample, Writer};
    ///
    /// let mut writer = Writer::new(Cursor::new(Vec::new()), Options { layout: Layout::Early, ..Options::default() })?;
    /// writer.write_sample(&Sample { thread_id: 1, interpreter_id: 0, timestamp_us: 5, status: 3, frames: &[] })?;
    /// let (early, _) = writer.finish::<&str>([], [], None)?;
    ///
    /// let (released, summary) = Reader::new(early)?.copy_to(Cursor::new(Vec::new()))?;
    /// assert_eq!(summary.samples, 1);
    /// assert_eq!(Reader::new(released)?.header().layout, Layout::Released);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When this file is damaged, or `out` cannot be written; then what was written is not a valid profile.
    ///
    /// # Panics
    /// When [`Reader::can_be_copied`] says no.
    pub fn copy_to<W: Write + Seek>(self, out: W) -> Result<(W, Summary), CopyError> {
        self.copy_renamed(out, |_| None)
    }

    /// The same with other texts for some entries of the string table, by their index.
    ///
    /// # Errors
    /// As [`Reader::copy_to`].
    ///
    /// # Panics
    /// As [`Reader::copy_to`].
    pub fn copy_renamed<W: Write + Seek>(
        self,
        mut out: W,
        renamed: impl Fn(u32) -> Option<String>,
    ) -> Result<(W, Summary), CopyError> {
        assert!(self.can_be_copied(), "the caller asks first");
        let Self { source, header, statistics, tables, end: _ } = self;
        let options = Options { layout: Layout::Released, ..Options::from(&header) };
        out.write_all(&options.header().encode()).map_err(WriteError::Io)?;
        let mut tee = Tee { source, out, written: 0, failed: None };
        tee.source.seek(SeekFrom::Start(HEADER_LEN)).map_err(ReadError::Io)?;
        let read = Source::new(&mut tee, &header, None).and_then(|source| {
            let mut samples = Samples::new(source, &header, &tables);
            let mut times_us = Vec::new();
            while samples.next_run(&mut times_us, RUN)?.is_some() {
                times_us.clear();
            }
            Ok((samples.records(), samples.thread_count(), samples.bytes_read()))
        });
        if let Some(error) = tee.failed {
            return Err(WriteError::Io(error).into());
        }
        let (records, threads, sample_bytes) = read?;
        // The end of the samples is the end of the section: a reader that stops before it would have reported an error.
        debug_assert_eq!(tee.written, header.string_table_offset - HEADER_LEN);
        let body = Body {
            samples: records.samples(),
            threads: u32::try_from(threads).map_err(|_| WriteError::TooMany("threads"))?,
            records,
            sample_bytes,
            stored_bytes: tee.written,
        };
        let frames = tables.frames().iter().copied();
        let renamed: Vec<Option<String>> = (0..tables.string_count() as u32).map(renamed).collect();
        let strings = tables.strings().zip(&renamed).map(|(old, new)| new.as_deref().unwrap_or(old));
        Ok(finish_file(tee.out, &options, &body, strings, frames, statistics.as_ref())?)
    }
}

/// Writes what is read.
struct Tee<R, W> {
    source: R,
    out: W,
    written: u64,
    /// Why `out` could not be written: whoever reads from this sees a failed read.
    failed: Option<io::Error>,
}

impl<R: Read, W: Write> Read for Tee<R, W> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(into)?;
        match self.out.write_all(&into[..count]) {
            Ok(()) => {
                self.written += count as u64;
                Ok(count)
            }
            Err(error) => {
                self.failed = Some(error);
                Err(io::Error::other("the copy cannot be written"))
            }
        }
    }
}
