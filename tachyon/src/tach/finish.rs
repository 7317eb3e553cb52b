//! The end of a file: tables, statistics, footer, and the header, which can only be written now.

use super::statistics::MARK;
use super::{FOOTER_LEN, Frame, HEADER_LEN, Header, Options, RecordCounts, Statistics, Summary, WriteError, tables};
use std::io::{Seek, SeekFrom, Write};

/// Bytes of the statistics' trailer, which comes before the footer and begins with their mark.
const TRAILER: usize = 16;

/// Table bytes that are gathered before they are written.
const TABLE_BUFFER: usize = 64 * 1024;

/// The totals of the samples, which are already in the file.
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
    let buffer = Vec::with_capacity(TABLE_BUFFER);
    let mut table = Table { file: &mut file, buffer, written: 0, tail: [0; TRAILER] };
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
    table.drain(0)?;
    match statistics {
        Some(statistics) => table.buffer.extend(statistics.encode()?),
        // Lines and columns come from a program, and their bytes may happen to look like the end of statistics. Nothing reads
        // what lies between the last frame and the footer.
        None if table.tail.starts_with(&MARK) => table.buffer.push(0),
        None => {}
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
    /// The last bytes that were written.
    tail: [u8; TRAILER],
}

impl<W: Write> Table<'_, W> {
    /// Writes the buffer when it holds `threshold` bytes or more.
    fn drain(&mut self, threshold: usize) -> Result<(), WriteError> {
        if self.buffer.len() >= threshold {
            self.file.write_all(&self.buffer)?;
            self.written += self.buffer.len() as u64;
            let new = self.buffer.len().min(TRAILER);
            self.tail.rotate_left(new);
            self.tail[TRAILER - new..].copy_from_slice(&self.buffer[self.buffer.len() - new..]);
            self.buffer.clear();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::tach::{Frame, Options, Reader, Writer};
    use std::io::Cursor;

    /// A frame whose location spells the mark of statistics, followed by more than a file can have after it.
    #[test]
    fn frames_that_look_like_statistics_are_frames() {
        let zigzag = |byte: u8| i32::from(byte >> 1) ^ -i32::from(byte & 1);
        let text = b"TACHSTAT\x01\0\0\0\x07\0\0";
        // File and function by index, four zigzags, the opcode: seven bytes each, and the mark in the midst of them.
        let frame = |bytes: [u8; 7]| {
            let [file, function, line, end_line, column, end_column, opcode] = bytes;
            let (lineno, column) = (zigzag(line), zigzag(column));
            Frame {
                filename: file.into(),
                function: function.into(),
                lineno,
                end_lineno: lineno.wrapping_add(zigzag(end_line)),
                column,
                end_column: column.wrapping_add(zigzag(end_column)),
                opcode,
            }
        };
        let bytes: Vec<u8> = [&[0; 5][..], &text[..], &[0]].concat();
        assert_eq!(bytes.len(), 21);
        let frames: Vec<Frame> = bytes.chunks(7).map(|bytes| frame(bytes.try_into().expect("seven each"))).collect();
        let strings: Vec<String> = (0..256).map(|number| number.to_string()).collect();
        let writer = Writer::new(Cursor::new(Vec::new()), Options::default()).unwrap();
        let (file, _) = writer.finish(&strings, frames.iter().copied(), None).unwrap();
        let spelled = file.get_ref().windows(8).any(|bytes| bytes == super::MARK);
        assert!(spelled, "{:?}", file.get_ref());
        let reader = Reader::new(file).expect("it is whole");
        assert!(reader.statistics().is_none());
        assert_eq!(reader.tables().frames(), frames);
    }
}
