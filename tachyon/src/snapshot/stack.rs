//! One thread's frames, read while the thread may run on.
//!
//! Nothing is stopped, so a stack can change while it is read. It is therefore read until two readings in a row agree;
//! a thread that waits agrees at once. One that calls and returns all the time may never do so, and its last complete
//! stack is marked as changed.

use super::memory::Pages;
use super::{Deadline, Target};
use tachyon_common::event::{RawFrame, status};
use tachyon_common::layout::Layout;
use tachyon_common::limits::MAX_PY_FRAMES;
use tachyon_common::stop::StopReason;
use tachyon_common::walk::{
    self, CodeBuffer, CodeIdentity, FrameBuffer, FrameSink, FrameWalk, InterpBuffer, OwnStack, ThreadBuffer,
    ThreadFacts, ThreadPointer, UserMemory,
};

/// Readings of one stack. A thread that makes a million calls a second agrees after a few.
const MAX_READINGS: usize = 32;

/// Frames looked at in one walk: 1,024 that count, the rest for shim frames, which a hostile chain can link into a cycle that
/// never stores a frame.
pub(super) const MAX_LOOKS: usize = 6 * MAX_PY_FRAMES;

/// A thread's stack.
#[derive(Clone, Debug)]
pub(super) struct Stack {
    /// Leaf first.
    pub frames: Vec<RawFrame>,
    pub stop: StopReason,
    /// Shim frames below the outermost frame.
    pub root_shims: u16,
    pub facts: ThreadFacts,
    /// Two readings in a row agreed.
    pub steady: bool,
}

/// Reads the stack of the thread state at `tstate`.
pub(super) fn read<M: UserMemory + ?Sized>(memory: &M, target: &Target<'_>, tstate: u64, deadline: Deadline) -> Stack {
    let mut last = once(memory, target, tstate);
    let mut whole: Option<Stack> = None;
    for _ in 1..MAX_READINGS {
        if deadline.passed() {
            break;
        }
        let next = once(memory, target, tstate);
        if agree(&last, &next) {
            return Stack { steady: true, ..next };
        }
        if matches!(last.stop, StopReason::Complete | StopReason::NoFrame) {
            whole = Some(last);
        }
        last = next;
    }
    match whole {
        Some(whole) if last.stop != StopReason::Complete => whole,
        _ => last,
    }
}

/// Where on a C stack the evaluator was entered innermost with a thread state; `None`: it runs nothing, or this is not known
/// (3.8 and 3.9). Up to 3.12 it is the `cframe`, later the entry frame.
pub(super) fn entered_at<M: UserMemory + ?Sized>(memory: &M, target: &Target<'_>, tstate: u64) -> Option<u64> {
    let (pages, layout) = (Pages::new(memory), &target.layout);
    let mut thread = ThreadBuffer::default();
    walk::read_thread(&pages, layout, tstate, &mut thread).ok()?;
    if Layout::present(layout.tstate_cframe) {
        // The one in the state itself, with which nothing runs, is on no stack at all.
        let nowhere = OwnStack { sp: 1, end: 1 };
        let runs = !walk::runs_here(layout, tstate, nowhere, &thread);
        return runs.then(|| thread.u64(layout.tstate_cframe));
    }
    let mut chain = FrameWalk::start(walk::innermost_frame(&pages, layout, &thread).ok()?);
    chain.enter(layout, &thread);
    let (mut frame_buffer, mut code_buffer, mut frames) =
        (FrameBuffer::default(), CodeBuffer::default(), Frames::default());
    let code_type = target.entry.code_type;
    for _ in 0..MAX_LOOKS {
        let stop =
            chain.frame(&pages, layout, code_type, super::SEED, &mut frame_buffer, &mut code_buffer, &mut frames);
        if chain.entry_frame != 0 || stop.is_some() {
            break;
        }
    }
    Some(chain.entry_frame).filter(|&entry| entry != 0)
}

/// Whether two readings show the same stack. The leaf's instruction may have moved on: the thread runs.
fn agree(a: &Stack, b: &Stack) -> bool {
    let (leaf_a, leaf_b) = (a.frames.first(), b.frames.first());
    let same_leaf = match (leaf_a, leaf_b) {
        (Some(a), Some(b)) => (a.code, a.fingerprint, a.flags, a.shims) == (b.code, b.fingerprint, b.flags, b.shims),
        (None, None) => true,
        _ => false,
    };
    (a.stop, a.root_shims) == (b.stop, b.root_shims) && same_leaf && a.frames.get(1..) == b.frames.get(1..)
}

fn once<M: UserMemory + ?Sized>(memory: &M, target: &Target<'_>, tstate: u64) -> Stack {
    let pages = Pages::new(memory);
    let (layout, entry) = (&target.layout, &target.entry);
    let mut frames = Frames::default();
    let mut thread = ThreadBuffer::default();
    if walk::read_thread(&pages, layout, tstate, &mut thread).is_err() {
        return Stack {
            frames: Vec::new(),
            stop: StopReason::UnreadableThread,
            root_shims: 0,
            facts: ThreadFacts { status: status::UNKNOWN, interp_id: -1, ..ThreadFacts::default() },
            steady: false,
        };
    }
    let (stop, root_shims) = chain(&pages, target, &thread, &mut frames);
    let pointer = ThreadPointer { address: thread.u64(layout.tstate_thread_id), reach: 0 };
    let facts = walk::thread_facts(&pages, layout, (entry, pointer), tstate, &thread, &mut InterpBuffer::default());
    Stack { frames: frames.0, stop, root_shims, facts, steady: false }
}

fn chain<M: UserMemory + ?Sized>(
    memory: &M,
    target: &Target<'_>,
    thread: &ThreadBuffer,
    frames: &mut Frames,
) -> (StopReason, u16) {
    let layout = &target.layout;
    let frame = match walk::innermost_frame(memory, layout, thread) {
        Ok(frame) => frame,
        Err(reason) => return (reason, 0),
    };
    let mut chain = FrameWalk::start(frame);
    chain.enter(layout, thread);
    let (mut frame_buffer, mut code_buffer) = (FrameBuffer::default(), CodeBuffer::default());
    for _ in 0..MAX_LOOKS {
        let stopped = chain.frame(
            memory,
            layout,
            target.entry.code_type,
            super::SEED,
            &mut frame_buffer,
            &mut code_buffer,
            frames,
        );
        if let Some(reason) = stopped {
            let settled =
                walk::believable_stop(layout, reason, frames.0.len(), frames.0.first(), frames.0.last(), false);
            if settled != reason {
                frames.0.clear();
            }
            return (settled, u16::try_from(chain.shims).unwrap_or(u16::MAX));
        }
    }
    (StopReason::TooDeep, 0)
}

/// Frames in the order in which they are found.
#[derive(Debug, Default)]
pub(super) struct Frames(pub Vec<RawFrame>);

impl FrameSink for Frames {
    fn store(&mut self, index: usize, frame: RawFrame, _identity: &CodeIdentity) {
        if index == self.0.len() && index < MAX_PY_FRAMES {
            self.0.push(frame);
        }
    }

    fn mark_entry(&mut self, index: usize) {
        if let Some(frame) = self.0.get_mut(index) {
            frame.flags |= tachyon_common::event::frame::ENTRY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(frames: &[(u64, i32)]) -> Stack {
        let frames = frames.iter().map(|&(code, lasti)| RawFrame { code, lasti, ..RawFrame::default() }).collect();
        Stack { frames, stop: StopReason::Complete, root_shims: 0, facts: ThreadFacts::default(), steady: false }
    }

    #[test]
    fn only_the_leaf_may_move_on() {
        let first = stack(&[(1, 2), (3, 4)]);
        assert!(agree(&first, &stack(&[(1, 8), (3, 4)])));
        for other in [&[(1, 2), (3, 6)][..], &[(5, 2), (3, 4)], &[(3, 4)], &[], &[(9, 0), (1, 2), (3, 4)]] {
            assert!(!agree(&first, &stack(other)), "{other:?}");
        }
        assert!(agree(&stack(&[]), &stack(&[])));
    }
}
