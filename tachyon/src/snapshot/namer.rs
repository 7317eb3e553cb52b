//! Names the frames of stacks that were read.

use super::{Deadline, PythonStack, ReadStack, SEED, Target};
use crate::profile::{FrameId, Profile};
use crate::symbolize::{CodeKey, Symbolizer};
use tachyon_common::event::{RawFrame, status};
use tachyon_common::layout::flags;
use tachyon_common::walk::UserMemory;

/// Reads the names of frames.
pub(super) struct Namer<'a, M> {
    memory: &'a M,
    target: &'a Target<'a>,
    pub symbolizer: Symbolizer,
    pub profile: &'a mut Profile,
    deadline: Deadline,
    /// Names were not read because the time was up.
    pub late: bool,
}

impl<'a, M: UserMemory> Namer<'a, M> {
    /// One that has read no names yet, besides those that the symbolizer knows.
    pub fn new(
        (memory, target): (&'a M, &'a Target<'a>),
        symbolizer: Symbolizer,
        profile: &'a mut Profile,
        deadline: Deadline,
    ) -> Self {
        Self { memory, target, symbolizer, profile, deadline, late: false }
    }

    /// The stack, and all of its frames: `None` for the interpreter's own, which are not shown.
    pub fn name(&mut self, read: &ReadStack) -> (PythonStack, Vec<Option<FrameId>>) {
        let stack = &read.stack;
        let mut steady = stack.steady;
        let frames: Vec<Option<FrameId>> = stack
            .frames
            .iter()
            .map(|raw| {
                let (frame, named) = self.frame(raw);
                steady &= named;
                frame
            })
            .collect();
        let facts = &stack.facts;
        let holds = facts.status & status::HAS_GIL != 0;
        // If no GIL is switched on, no thread can be said not to hold it.
        let without = self.target.layout.has(flags::FREE_THREADED) && !holds;
        let known = facts.status & status::UNKNOWN == 0 && read.gil.is_some() && !without;
        let python = PythonStack {
            interpreter: u64::try_from(facts.interp_id).ok(),
            holds_gil: known.then_some(holds),
            gil: read.gil.filter(|_| !self.target.layout.has(flags::FREE_THREADED)),
            frames: frames.iter().copied().flatten().collect(),
            stop: stack.stop,
            steady,
        };
        (python, frames)
    }

    /// The frame, and whether its names could be read: its code object may be another one by now.
    pub fn frame(&mut self, raw: &RawFrame) -> (Option<FrameId>, bool) {
        let key = CodeKey { image: 0, code: raw.code, fingerprint: raw.fingerprint };
        let frame = self.symbolizer.frame(self.profile, key, raw.lasti, raw.opcode);
        if !self.symbolizer.is_named(frame) {
            if self.deadline.passed() {
                self.late = true;
            } else {
                // A failure shows in the frame: it stays without a name.
                let _unnamed = self.symbolizer.read_missing(self.profile, key, &self.target.layout, SEED, self.memory);
            }
        }
        (Some(frame).filter(|_| !self.symbolizer.is_shim(key)), self.symbolizer.is_named(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::RemoteProcess;
    use crate::types::Pid;
    use std::time::{Duration, Instant};
    use tachyon_common::layout::Layout;
    use tachyon_common::process::ProcessEntry;

    /// A function whose name cannot be read has none; one whose name was not read may have it at the next reading.
    #[test]
    fn names_that_were_not_read_are_late() {
        let process = &RemoteProcess::at(Pid(std::process::id()));
        let target = &Target { process, layout: Layout::default(), entry: ProcessEntry::default() };
        for (seconds, late) in [(0, true), (60, false)] {
            let deadline = Deadline(Instant::now() + Duration::from_secs(seconds));
            let mut profile = Profile::default();
            let mut namer = Namer::new((process, target), Symbolizer::new(), &mut profile, deadline);
            assert!(!namer.frame(&RawFrame::default()).1);
            assert_eq!(namer.late, late);
        }
    }
}
