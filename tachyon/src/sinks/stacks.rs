//! Distinct stacks, and how often each thread had them: the state of sinks that sum up.

use crate::profile::{FrameId, Profile, Sample, WorkId};
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::Arc;
use tachyon_common::event::status;

/// Index of a stack in [`Stacks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct StackId(pub u32);

/// Stacks stored once, in order of first use. Memory grows with the number of distinct stacks only.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stacks {
    stacks: Vec<Arc<[FrameId]>>,
    ids: HashMap<Arc<[FrameId]>, StackId, RandomState>,
    frame_count: usize,
}

impl Stacks {
    /// The handle of a stack, leaf first, which is stored if it is new.
    pub fn intern(&mut self, frames: &[FrameId]) -> StackId {
        if let Some(&id) = self.ids.get(frames) {
            return id;
        }
        let id = StackId(u32::try_from(self.stacks.len()).expect("fewer than 2^32 stacks fit in memory"));
        let frames: Arc<[FrameId]> = frames.into();
        self.frame_count += frames.len();
        self.stacks.push(Arc::clone(&frames));
        self.ids.insert(frames, id);
        id
    }

    /// Frames of all stacks together.
    pub fn frame_count(&self) -> usize {
        self.frame_count
    }

    /// The stack behind a handle, leaf first.
    pub fn get(&self, id: StackId) -> &[FrameId] {
        &self.stacks[id.0 as usize]
    }

    /// All stacks, in order of their handles.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[FrameId]> {
        self.stacks.iter().map(|stack| &**stack)
    }
}

/// What samples that are counted together have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    /// Index of the thread.
    pub thread: u32,
    /// The stack.
    pub stack: StackId,
    /// Whether the thread held the GIL; `None`: not known, or not asked for.
    pub gil: Option<bool>,
    /// Whose work it was; `None`: not known, or not asked for.
    pub work: Option<WorkId>,
}

/// Counts of equal stacks.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub stacks: Stacks,
    counts: HashMap<Key, u64, RandomState>,
    /// The stack at hand.
    shown: Vec<FrameId>,
}

impl Counts {
    /// Counts `count` samples by their frames as shown: native addresses do not matter.
    pub fn add_shown(&mut self, profile: &Profile, sample: &Sample<'_>, count: usize) {
        let mut buffer = std::mem::take(&mut self.shown);
        let frames = profile.shown_stack(sample.frames, &mut buffer);
        self.add(&Sample { frames, ..*sample }, false, count);
        self.shown = buffer;
    }

    /// Counts `count` samples that are the same in everything that matters here; with labels, who held the GIL and whose work it
    /// was matter, too.
    pub fn add(&mut self, sample: &Sample<'_>, with_labels: bool, count: usize) {
        let stack = self.stacks.intern(sample.frames);
        let (gil, work) = if with_labels { (gil_held(sample.status), sample.work) } else { (None, None) };
        *self.counts.entry(Key { thread: sample.thread.0, stack, gil, work }).or_default() += count as u64;
    }

    /// How many counts there are: several for a stack if its samples differ in more.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// All counts, in an order that is the same for the same samples.
    pub fn sorted(&self) -> Vec<(Key, u64)> {
        let mut counts: Vec<_> = self.counts.iter().map(|(&key, &count)| (key, count)).collect();
        counts.sort_unstable();
        counts
    }
}

/// Whether a status byte says that the thread held the GIL; `None` if it says that this is unknown.
pub(crate) fn gil_held(status: u8) -> Option<bool> {
    let bits = u32::from(status);
    if bits & status::HAS_GIL != 0 {
        Some(true)
    } else if bits & status::UNKNOWN != 0 {
        None
    } else {
        Some(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Merge, ThreadId};

    #[test]
    fn equal_stacks_are_counted_together() {
        let mut counts = Counts::default();
        let (a, b) = ([FrameId(1), FrameId(0)], [FrameId(0)]);
        for (thread, status, frames) in [(0, 1, &a[..]), (0, 1, &a), (0, 0, &a), (1, 4, &b), (0, 1, &[])] {
            let sample =
                Sample { thread: ThreadId(thread), time_us: 0, status, frames, merge: Merge::None, work: None };
            counts.add(&sample, true, 1);
        }
        let key = |thread, stack, gil| Key { thread, stack: StackId(stack), gil, work: None };
        assert_eq!(
            counts.sorted(),
            [(key(0, 0, Some(false)), 1), (key(0, 0, Some(true)), 2), (key(0, 2, Some(true)), 1), (key(1, 1, None), 1)]
        );
        assert_eq!(counts.stacks.get(StackId(0)), a);
        assert_eq!(counts.stacks.iter().len(), 3);
    }
}
