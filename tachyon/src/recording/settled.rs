//! Which parts of a record to trust: its Python frames may have been read while they were being linked.

use super::registry::Registry;
use crate::events::Frames;
use crate::merge::Boundaries;
use tachyon_common::event::{SampleRecord, frame, status};
use tachyon_common::layout::flags;
use tachyon_common::stop::StopReason;
use tachyon_common::walk;

/// The trusted part of a record.
pub(super) struct Settled<'a> {
    /// The record, with the corrected reason why its Python stack ended.
    pub record: SampleRecord,
    /// The frames, without Python ones if those were being linked.
    pub frames: Frames<'a>,
    /// Where activations begin in its interpreter's stacks.
    pub boundaries: Boundaries,
    /// Those Python frames, if they may be right all the same.
    pub doubted: Option<Frames<'a>>,
}

impl<'a> Settled<'a> {
    /// Takes what can be trusted from a record.
    pub fn of(registry: &Registry, record: &SampleRecord, frames: Frames<'a>) -> Self {
        let (mut leaf_first, record) = (frames.iter(), *record);
        let leaf = leaf_first.next();
        let root = leaf_first.next_back().or(leaf);
        let known = registry.layout(record.layout).zip(StopReason::from_number(record.stop));
        let mut settled = Self { record, frames, boundaries: Boundaries::Shim, doubted: None };
        let Some((layout, stop)) = known else { return settled };
        settled.boundaries = Boundaries::of(layout);
        if record.status & status::CALLERS != 0 {
            // C entered the evaluator for the outermost of all frames; otherwise what was read was not a `cframe`.
            let entered = root.is_some_and(|root| root.flags & frame::ENTRY != 0);
            if !entered {
                settled.forget_python();
            }
            return settled;
        }
        // Without those by which C entered the evaluator, which greenlet has taken out, all the others are there.
        if record.status & status::SWITCHING != 0 && stop == StopReason::Complete {
            return settled;
        }
        let linked = record.status & status::LINKED != 0;
        let reason = walk::believable_stop(layout, stop, frames.iter().len(), leaf.as_ref(), root.as_ref(), linked);
        if reason != stop {
            // C entered the evaluator for the leaf alone: the native stack can tell whether that is so, where the kernel side
            // cannot.
            let entered = leaf.is_some_and(|leaf| leaf.flags & frame::ENTRY != 0);
            if stop == StopReason::Complete && entered && !layout.has(flags::LINKS_FIRST) {
                settled.doubted = Some(frames);
            }
            settled.record.stop = reason as u8;
            settled.forget_python();
        }
        settled
    }

    fn forget_python(&mut self) {
        self.frames = self.frames.without_python();
        self.record.root_shims = 0;
    }
}
