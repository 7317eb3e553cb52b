//! Samples, kept in an unnamed temporary file until all names are known: the state of sinks that keep every sample.
//!
//! A sample takes a few bytes: its stack is an index into the table of distinct stacks. Streams (one for each thread,
//! if a format needs threads one after the other) are gathered in small blocks, so memory does not grow with the number
//! of samples.

use super::stacks::{StackId, Stacks};
use super::streams::{Streams, get, get_u32, put};
use crate::profile::{FrameId, Merge, Profile, Sample, ThreadId, WorkId};
use std::io;

/// A sample as it is read back.
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
    /// Whose work it was.
    pub work: Option<WorkId>,
    /// How many there are, one after the other.
    pub count: u64,
    /// How far apart they are; wraps.
    pub step_us: u64,
}

impl Spooled {
    /// Each sample separately.
    pub fn each(self) -> impl Iterator<Item = Self> {
        let at = move |number: u64| self.time_us.wrapping_add(self.step_us.wrapping_mul(number));
        (0..self.count).map(move |number| Self { time_us: at(number), count: 1, step_us: 0, ..self })
    }
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
    /// Adds samples that differ only in their times to the stream of their thread, with their frames as shown: native
    /// addresses do not matter.
    ///
    /// # Errors
    /// As [`Spool::push_with`].
    pub fn repeat_by_thread(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        let mut buffer = std::mem::take(&mut self.shown);
        let frames = profile.shown_stack(sample.frames, &mut buffer);
        let result = self.repeat_with(sample.thread.0 as usize, &Sample { frames, ..*sample }, times_us, |_| {});
        self.shown = buffer;
        result
    }

    /// The threads up to the last one that has samples, if streams are threads.
    pub fn threads(&self) -> impl Iterator<Item = ThreadId> {
        (0..).map(ThreadId).take(self.last_us.len())
    }

    /// Times of the earliest and of the latest sample.
    pub fn span(&self) -> Option<(u64, u64)> {
        self.span
    }

    /// Adds a sample to a stream, followed by more data that its reader takes off again.
    ///
    /// # Errors
    /// When the temporary file cannot be made or written.
    pub fn push_with(&mut self, stream: usize, sample: &Sample<'_>, more: impl Fn(&mut Vec<u8>)) -> io::Result<()> {
        self.repeat_with(stream, sample, &[sample.time_us], more)
    }

    /// The same for samples that differ only in their times. Evenly spaced ones become one entry: a file from another
    /// program may repeat a stack hundreds of millions of times.
    ///
    /// # Errors
    /// As [`Spool::push_with`].
    pub fn repeat_with(
        &mut self,
        stream: usize,
        sample: &Sample<'_>,
        times_us: &[u64],
        more: impl Fn(&mut Vec<u8>),
    ) -> io::Result<()> {
        let stack = self.stacks.intern(sample.frames);
        let (Some(least), Some(most)) = (times_us.iter().min(), times_us.iter().max()) else { return Ok(()) };
        let (first, last) = self.span.unwrap_or((*least, *most));
        self.span = Some((first.min(*least), last.max(*most)));
        if stream >= self.last_us.len() {
            self.last_us.resize(stream + 1, 0);
        }
        for (times_us, step) in even(times_us) {
            let (begin, end) = (times_us[0], times_us[times_us.len() - 1]);
            // Wraps if time goes back, as it may in a file from another program; reading wraps again.
            let delta = begin.wrapping_sub(std::mem::replace(&mut self.last_us[stream], end));
            self.streams.push(stream, |out| {
                put(out, u64::from(sample.thread.0));
                put(out, delta);
                out.push(packed(sample));
                put(out, u64::from(stack.0));
                put(out, sample.work.map_or(0, WorkId::number));
                put(out, times_us.len() as u64 - 1);
                if times_us.len() > 1 {
                    put(out, step);
                }
                more(out);
            })?;
        }
        Ok(())
    }

    /// Gives all samples of a stream to `take`, in order of arrival.
    ///
    /// # Errors
    /// When the temporary file cannot be read, or any error of `take`.
    pub fn read(&self, stream: usize, mut take: impl FnMut(Spooled) -> io::Result<()>) -> io::Result<()> {
        self.read_with(stream, |samples, _| samples.each().try_for_each(&mut take))
    }

    /// The same, one call per stored entry; `take` takes off the data that was pushed with the samples.
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
            let work = WorkId::from_number(get(bytes)?);
            let more = get(bytes)?;
            let step_us = if more > 0 { get(bytes)? } else { 0 };
            let time_us = last_us;
            last_us = last_us.wrapping_add(step_us.wrapping_mul(more));
            take(Spooled { thread, time_us, status, stack, merge, work, count: more.saturating_add(1), step_us }, bytes)
        })
    }
}

/// Times in runs of equal steps, which wrap.
fn even(times_us: &[u64]) -> impl Iterator<Item = (&[u64], u64)> {
    let mut rest = times_us;
    std::iter::from_fn(move || {
        let (first, second) = (*rest.first()?, rest.get(1).copied());
        let step = second.map_or(0, |second| second.wrapping_sub(first));
        let pairs = rest.windows(2).take_while(|pair| pair[1].wrapping_sub(pair[0]) == step);
        let (run, left) = rest.split_at(1 + pairs.count());
        rest = left;
        Some((run, step))
    })
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
                work: None,
            };
            spool.push_with(stream, &sample, |_| {}).unwrap();
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
    }

    #[test]
    fn what_is_repeated_evenly_is_one_entry() {
        let mut spool = Spool::default();
        let sample = Sample {
            thread: ThreadId(0),
            time_us: 10,
            status: 3,
            frames: &[FrameId(1)],
            merge: Merge::None,
            work: None,
        };
        let mut times: Vec<u64> = (0..1000).map(|number| 10 + number * 7).collect();
        // One on its own, one that steps back, and one at the end of the range.
        times.extend([9_000, 8_000, u64::MAX, 4]);
        spool.repeat_with(0, &sample, &times, |_| {}).unwrap();
        spool.push_with(0, &Sample { time_us: 5, ..sample }, |_| {}).unwrap();
        times.push(5);
        let (mut read, mut entries) = (Vec::new(), Vec::new());
        let read_time = |sample: Spooled| {
            read.push(sample.time_us);
            Ok(())
        };
        spool.read(0, read_time).unwrap();
        let read_count = |samples: Spooled, _: &mut &[u8]| {
            entries.push(samples.count);
            Ok(())
        };
        spool.read_with(0, read_count).unwrap();
        assert_eq!(read, times);
        assert_eq!(entries, [1000, 2, 2, 1]);
        assert_eq!(spool.span(), Some((4, u64::MAX)));
        spool.read(9, |_| panic!("there is no such stream")).unwrap();
    }
}
