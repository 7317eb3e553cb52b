//! Streams of bytes in one unnamed temporary file: what sinks keep about every sample.
//!
//! Each stream gathers a small block in memory before it goes to the file, and all blocks together are bounded, so
//! memory grows neither with the length of a recording nor much with the number of streams.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes gathered before a stream's block goes to the file.
const BLOCK: usize = 8 * 1024;
/// Bytes gathered in all streams together before all go to the file: 2,000 whole blocks.
const MOST_GATHERED: usize = 16 << 20;

/// The streams, each in order of arrival.
#[derive(Debug, Default)]
pub(super) struct Streams {
    file: Option<File>,
    file_len: u64,
    streams: Vec<Stream>,
    gathered: usize,
}

#[derive(Debug, Default)]
struct Stream {
    /// Offset and length in the file.
    blocks: Vec<(u64, u32)>,
    buffer: Vec<u8>,
}

impl Streams {
    /// In this file, which must be empty, instead of one in the system's temporary directory.
    pub fn in_file(file: File) -> Self {
        Self { file: Some(file), ..Self::default() }
    }

    /// Adds the record that `write` makes to a stream.
    ///
    /// # Errors
    /// When the temporary file cannot be made or written.
    pub fn push(&mut self, stream: usize, write: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
        if stream >= self.streams.len() {
            self.streams.resize_with(stream + 1, Stream::default);
        }
        let to = &mut self.streams[stream];
        let before = to.buffer.len();
        write(&mut to.buffer);
        self.gathered += to.buffer.len() - before;
        if to.buffer.len() >= BLOCK {
            self.write_block(stream)?;
        }
        if self.gathered >= MOST_GATHERED {
            for stream in 0..self.streams.len() {
                self.write_block(stream)?;
                // There are very many streams: quiet ones should cost nothing.
                self.streams[stream].buffer = Vec::new();
            }
        }
        Ok(())
    }

    fn write_block(&mut self, stream: usize) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(tempfile::tempfile()?),
        };
        let stream = &mut self.streams[stream];
        let Ok(len @ 1..) = u32::try_from(stream.buffer.len()) else { return Ok(()) };
        file.write_all_at(&stream.buffer, self.file_len)?;
        stream.blocks.push((self.file_len, len));
        self.file_len += u64::from(len);
        self.gathered -= stream.buffer.len();
        stream.buffer.clear();
        Ok(())
    }

    /// Gives `take` the records of a stream, in order of arrival. Each call takes one record from the front of the bytes.
    ///
    /// # Errors
    /// When the temporary file cannot be read, or any error of `take`.
    pub fn read(&self, stream: usize, mut take: impl FnMut(&mut &[u8]) -> io::Result<()>) -> io::Result<()> {
        let Some(stream) = self.streams.get(stream) else { return Ok(()) };
        let mut block = Vec::new();
        for &(offset, len) in &stream.blocks {
            block.resize(len as usize, 0);
            let file = self.file.as_ref().expect("a stream with blocks has a file");
            file.read_exact_at(&mut block, offset)?;
            each(&block, &mut take)?;
        }
        each(&stream.buffer, &mut take)
    }
}

fn each(mut bytes: &[u8], take: &mut impl FnMut(&mut &[u8]) -> io::Result<()>) -> io::Result<()> {
    while !bytes.is_empty() {
        take(&mut bytes)?;
    }
    Ok(())
}

/// Writes a number.
pub(super) fn put(out: &mut Vec<u8>, value: u64) {
    prost::encoding::encode_varint(value, out);
}

/// Takes a number.
pub(super) fn get(bytes: &mut &[u8]) -> io::Result<u64> {
    prost::encoding::decode_varint(bytes).map_err(|_| damaged())
}

/// Takes a number of 32 bits.
pub(super) fn get_u32(bytes: &mut &[u8]) -> io::Result<u32> {
    u32::try_from(get(bytes)?).map_err(|_| damaged())
}

/// Takes plain bytes.
pub(super) fn array<const N: usize>(bytes: &mut &[u8]) -> io::Result<[u8; N]> {
    let (&array, rest) = bytes.split_first_chunk().ok_or_else(damaged)?;
    *bytes = rest;
    Ok(array)
}

/// What is read is what was written, unless another program wrote to the file.
pub(super) fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the temporary file of samples was changed")
}
