//! Samples kept in an unnamed temporary file until all names are known: the state of sinks that keep every sample.
//!
//! A sample takes a few bytes: its stack is an index into the table of distinct stacks. Streams (one for each thread,
//! where a format wants threads one after the other) are gathered in small blocks, so memory does not grow with the
//! number of samples.

use super::stacks::{StackId, Stacks};
use crate::profile::{Sample, ThreadId};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes gathered before a stream's block goes to the file.
const BLOCK: usize = 8 * 1024;

/// A sample as it comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spooled {
    /// The thread.
    pub thread: ThreadId,
    /// Microseconds on `CLOCK_MONOTONIC`.
    pub time_us: u64,
    /// TACH's status byte.
    pub status: u8,
    /// The stack.
    pub stack: StackId,
}

/// Samples in order of arrival, by stream.
#[derive(Debug, Default)]
pub(super) struct Spool {
    pub stacks: Stacks,
    file: Option<File>,
    file_len: u64,
    streams: Vec<Stream>,
}

#[derive(Debug, Default)]
struct Stream {
    /// Offset and length in the file.
    blocks: Vec<(u64, u32)>,
    buffer: Vec<u8>,
    last_us: u64,
}

impl Spool {
    /// Adds a sample to a stream.
    ///
    /// # Errors
    /// When the temporary file cannot be made or written.
    pub fn push(&mut self, stream: usize, sample: &Sample<'_>) -> io::Result<()> {
        let stack = self.stacks.intern(sample.frames);
        if stream >= self.streams.len() {
            self.streams.resize_with(stream + 1, Stream::default);
        }
        let to = &mut self.streams[stream];
        put(&mut to.buffer, u64::from(sample.thread.0));
        // Wraps where time goes back, as it may in a file from elsewhere; reading wraps again.
        put(&mut to.buffer, sample.time_us.wrapping_sub(to.last_us));
        to.buffer.push(sample.status);
        put(&mut to.buffer, u64::from(stack.0));
        to.last_us = sample.time_us;
        if to.buffer.len() >= BLOCK { self.write_block(stream) } else { Ok(()) }
    }

    fn write_block(&mut self, stream: usize) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(tempfile::tempfile()?),
        };
        let stream = &mut self.streams[stream];
        file.write_all_at(&stream.buffer, self.file_len)?;
        let len = u32::try_from(stream.buffer.len()).expect("a block is little longer than 8 KiB");
        stream.blocks.push((self.file_len, len));
        self.file_len += u64::from(len);
        stream.buffer.clear();
        Ok(())
    }

    /// Gives all samples of a stream to `take`, in order of arrival.
    ///
    /// # Errors
    /// When the temporary file cannot be read, or what `take` says.
    pub fn read(&self, stream: usize, mut take: impl FnMut(Spooled) -> io::Result<()>) -> io::Result<()> {
        let Some(stream) = self.streams.get(stream) else { return Ok(()) };
        let mut last_us = 0;
        let mut block = Vec::new();
        for &(offset, len) in &stream.blocks {
            block.resize(len as usize, 0);
            let file = self.file.as_ref().expect("a stream with blocks has a file");
            file.read_exact_at(&mut block, offset)?;
            decode(&block, &mut last_us, &mut take)?;
        }
        decode(&stream.buffer, &mut last_us, &mut take)
    }
}

fn decode(mut bytes: &[u8], last_us: &mut u64, take: &mut impl FnMut(Spooled) -> io::Result<()>) -> io::Result<()> {
    while !bytes.is_empty() {
        let thread = ThreadId(get_u32(&mut bytes)?);
        *last_us = last_us.wrapping_add(get(&mut bytes)?);
        let (&status, rest) = bytes.split_first().ok_or_else(damaged)?;
        bytes = rest;
        let stack = StackId(get_u32(&mut bytes)?);
        take(Spooled { thread, time_us: *last_us, status, stack })?;
    }
    Ok(())
}

fn put(out: &mut Vec<u8>, value: u64) {
    prost::encoding::encode_varint(value, out);
}

fn get(bytes: &mut &[u8]) -> io::Result<u64> {
    prost::encoding::decode_varint(bytes).map_err(|_| damaged())
}

fn get_u32(bytes: &mut &[u8]) -> io::Result<u32> {
    u32::try_from(get(bytes)?).map_err(|_| damaged())
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the temporary file of samples was changed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::FrameId;

    #[test]
    fn samples_come_back_by_stream() {
        let mut spool = Spool::default();
        let mut pushed = [Vec::new(), Vec::new()];
        for number in 0..20_000_u32 {
            let stream = usize::from(number % 3 == 0);
            let time_us = if number == 7000 { 3 } else { u64::from(number) * 1_000_003 };
            let frames = [FrameId(number % 5)];
            let sample =
                Sample { thread: ThreadId(number % 300), time_us, status: (number % 64) as u8, frames: &frames };
            spool.push(stream, &sample).unwrap();
            pushed[stream].push((sample.thread, time_us, sample.status, frames));
        }
        for (stream, pushed) in pushed.iter().enumerate() {
            let mut read = Vec::new();
            spool
                .read(stream, |sample| {
                    let frames = spool.stacks.get(sample.stack).try_into().unwrap();
                    read.push((sample.thread, sample.time_us, sample.status, frames));
                    Ok(())
                })
                .unwrap();
            assert_eq!(&read, pushed);
        }
        assert_eq!(spool.stacks.iter().len(), 5);
        spool.read(9, |_| panic!("there is no such stream")).unwrap();
    }
}
