//! The samples of one segment, gathered until it has ended.

use crate::analysis::Collector;
use crate::profile::{FrameId, Merge, Profile, Sample, ThreadId};
use crate::report::Report;
use crate::sinks::Sink;
use crate::sinks::stacks::{StackId, Stacks};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// The samples of a segment, in the order in which they came.
#[derive(Debug, Default)]
pub struct Batch {
    pub(super) stacks: Stacks,
    pub(super) samples: Vec<BatchSample>,
}

/// One sample of a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchSample {
    pub time_us: u64,
    pub thread: ThreadId,
    pub stack: StackId,
    /// With the sample's [`crate::profile::Merge`] in its upper two bits.
    pub status: u8,
}

/// Takes the samples of one segment.
#[derive(Clone, Debug, Default)]
pub struct BatchSink(Arc<Mutex<Batch>>, Vec<FrameId>);

impl BatchSink {
    /// Takes what has come so far, leaving nothing.
    #[must_use]
    pub fn take(&self) -> Batch {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Sink for BatchSink {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        let mut batch = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let stack = batch.stacks.intern(profile.shown_stack(sample.frames, &mut self.1));
        let status = sample.status | sample.merge.number() << 6;
        batch.samples.push(BatchSample { time_us: sample.time_us, thread: sample.thread, stack, status });
        Ok(())
    }

    fn finish(&mut self, _profile: &Profile, _report: &Report) -> io::Result<()> {
        Ok(())
    }
}

impl Batch {
    /// Hands all samples to a collector, for a report of this segment alone.
    ///
    /// # Errors
    /// Any error of the collector.
    pub fn feed(&self, profile: &Profile, report: &Report, collector: &mut Collector<'_>) -> io::Result<()> {
        for BatchSample { time_us, thread, stack, status } in &self.samples {
            let merge = Merge::from_number(status >> 6);
            let frames = self.stacks.get(*stack);
            let (time_us, thread, status) = (*time_us, *thread, status & 0x3f);
            collector.sample(profile, &Sample { thread, time_us, status, frames, merge, work: None })?;
        }
        collector.finish(profile, report)
    }
}
