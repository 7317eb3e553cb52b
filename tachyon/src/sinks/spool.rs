//! Samples kept in an unnamed temporary file until all names are known: the state of sinks that keep every sample.
//!
//! A sample takes a few bytes: its stack is an index into the table of distinct stacks. Streams (one for each thread,
//! where a format wants threads one after the other) are gathered in small blocks, so memory does not grow with the
//! number of samples.

use super::stacks::{StackId, Stacks};
use super::streams::{Streams, get, get_u32, put};
use crate::profile::{FrameId, Merge, Profile, Sample, ThreadId};
use std::io;

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
    /// How it was put together.
    pub merge: Merge,
}

/// Samples in order of arrival, by stream.
#[derive(Debug, Default)]
pub(super) struct Spool {
    pub stacks: Stacks,
    streams: Streams,
    /// By stream: the time of its last sample.
    last_us: Vec<u64>,
    /// Earliest and latest sample.
    span: Option<(u64, u64)>,
    /// The stack at hand.
    shown: Vec<FrameId>,
}

impl Spool {
    /// Adds a sample to the stream of its thread, with what is shown of its frames: native addresses do not matter.
    ///
    /// # Errors
    /// As [`Spool::push`].
    pub fn push_by_thread(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        let mut buffer = std::mem::take(&mut self.shown);
        let frames = profile.shown_stack(sample.frames, &mut buffer);
        let result = self.push(sample.thread.0 as usize, &Sample { frames, ..*sample });
        self.shown = buffer;
        result
    }

    /// The threads up to the last one that has samples, where streams are threads.
    pub fn threads(&self) -> impl Iterator<Item = ThreadId> {
        (0..).map(ThreadId).take(self.last_us.len())
    }

    /// Times of the earliest and of the latest sample.
    pub fn span(&self) -> Option<(u64, u64)> {
        self.span
    }

    /// Adds a sample to a stream.
    ///
    /// # Errors
    /// When the temporary file cannot be made or written.
    pub fn push(&mut self, stream: usize, sample: &Sample<'_>) -> io::Result<()> {
        self.push_with(stream, sample, |_| {})
    }

    /// The same, with what its reader takes off again.
    ///
    /// # Errors
    /// As [`Spool::push`].
    pub fn push_with(&mut self, stream: usize, sample: &Sample<'_>, more: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
        let stack = self.stacks.intern(sample.frames);
        let (first, last) = self.span.unwrap_or((sample.time_us, sample.time_us));
        self.span = Some((first.min(sample.time_us), last.max(sample.time_us)));
        if stream >= self.last_us.len() {
            self.last_us.resize(stream + 1, 0);
        }
        // Wraps where time goes back, as it may in a file from elsewhere; reading wraps again.
        let delta = sample.time_us.wrapping_sub(std::mem::replace(&mut self.last_us[stream], sample.time_us));
        self.streams.push(stream, |out| {
            put(out, u64::from(sample.thread.0));
            put(out, delta);
            out.push(packed(sample));
            put(out, u64::from(stack.0));
            more(out);
        })
    }

    /// Gives all samples of a stream to `take`, in order of arrival.
    ///
    /// # Errors
    /// When the temporary file cannot be read, or what `take` says.
    pub fn read(&self, stream: usize, mut take: impl FnMut(Spooled) -> io::Result<()>) -> io::Result<()> {
        self.read_with(stream, |sample, _| take(sample))
    }

    /// The same; `take` takes off what was pushed with the sample.
    ///
    /// # Errors
    /// As [`Spool::read`].
    pub fn read_with(
        &self,
        stream: usize,
        mut take: impl FnMut(Spooled, &mut &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut last_us = 0_u64;
        self.streams.read(stream, |bytes| {
            let thread = ThreadId(get_u32(bytes)?);
            last_us = last_us.wrapping_add(get(bytes)?);
            let [byte] = super::streams::array(bytes)?;
            let (status, merge) = unpacked(byte);
            let stack = StackId(get_u32(bytes)?);
            take(Spooled { thread, time_us: last_us, status, stack, merge }, bytes)
        })
    }
}

/// Status and merge in one byte.
pub(super) fn packed(sample: &Sample<'_>) -> u8 {
    sample.status & STATUS_BITS | sample.merge.number() << 6
}

/// The other way round.
pub(super) fn unpacked(byte: u8) -> (u8, Merge) {
    (byte & STATUS_BITS, Merge::from_number(byte >> 6))
}

/// TACH's status has six bits.
const STATUS_BITS: u8 = 0x3f;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_come_back_by_stream() {
        let mut spool = Spool::default();
        let mut pushed = [Vec::new(), Vec::new()];
        for number in 0..20_000_u32 {
            let stream = usize::from(number % 3 == 0);
            let time_us = if number == 7000 { 3 } else { u64::from(number) * 1_000_003 };
            let frames = [FrameId(number % 5)];
            let sample = Sample {
                thread: ThreadId(number % 300),
                time_us,
                status: (number % 64) as u8,
                frames: &frames,
                merge: Merge::None,
            };
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
