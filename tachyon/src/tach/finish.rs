//! The end of a file: tables, statistics, footer, and the header that only now can be written.

use super::{FOOTER_LEN, Frame, HEADER_LEN, Header, Options, RecordCounts, Statistics, Summary, WriteError, tables};
use std::io::{Seek, SeekFrom, Write};

/// Table bytes that are gathered before they are written.
const TABLE_BUFFER: usize = 64 * 1024;

/// What the samples came to, which are in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Body {
    pub samples: u64,
    pub threads: u32,
    pub records: RecordCounts,
    /// Bytes of samples before compression.
    pub sample_bytes: u64,
    /// Bytes of samples in the file, from the header's end to here.
    pub stored_bytes: u64,
}

/// Completes a file that stands at the end of its samples.
pub(super) fn finish_file<W: Write + Seek, S: AsRef<str>>(
    mut file: W,
    options: &Options,
    body: &Body,
    strings: impl IntoIterator<Item = S>,
    frames: impl IntoIterator<Item = Frame>,
    statistics: Option<&Statistics>,
) -> Result<(W, Summary), WriteError> {
    let string_table_offset = HEADER_LEN + body.stored_bytes;
    let mut table = Table { file: &mut file, buffer: Vec::with_capacity(TABLE_BUFFER), written: 0 };
    let mut string_count = 0_u32;
    for text in strings {
        tables::encode_string(text.as_ref(), &mut table.buffer)?;
        string_count = string_count.checked_add(1).ok_or(WriteError::TooMany("strings"))?;
        table.drain(TABLE_BUFFER)?;
    }
    table.drain(0)?;
    let frame_table_offset = string_table_offset + table.written;
    let mut frame_count = 0_u32;
    for frame in frames {
        frame.encode(&mut table.buffer);
        frame_count = frame_count.checked_add(1).ok_or(WriteError::TooMany("frames"))?;
        table.drain(TABLE_BUFFER)?;
    }
    if let Some(statistics) = statistics {
        table.buffer.extend(statistics.encode()?);
    }
    table.drain(0)?;
    let file_size = string_table_offset + table.written + FOOTER_LEN;

    let header = Header {
        sample_count: body.samples,
        thread_count: body.threads,
        string_table_offset,
        frame_table_offset,
        string_count,
        frame_count,
        declared_size: file_size,
        file_size,
        ..options.header()
    };
    file.write_all(&header.encode_footer())?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&header.encode())?;
    file.seek(SeekFrom::End(0))?;
    file.flush()?;
    let summary = Summary {
        samples: body.samples,
        threads: body.threads,
        strings: string_count,
        frames: frame_count,
        records: body.records,
        sample_bytes: body.sample_bytes,
        stored_bytes: body.stored_bytes,
        file_size,
    };
    Ok((file, summary))
}

/// The tables on their way to the file.
struct Table<'a, W> {
    file: &'a mut W,
    buffer: Vec<u8>,
    written: u64,
}

impl<W: Write> Table<'_, W> {
    /// Writes the buffer when it holds `threshold` bytes or more.
    fn drain(&mut self, threshold: usize) -> Result<(), WriteError> {
        if self.buffer.len() >= threshold {
            self.file.write_all(&self.buffer)?;
            self.written += self.buffer.len() as u64;
            self.buffer.clear();
        }
        Ok(())
    }
}
