//! Whether a frame that has run nothing is linked to its caller (3.11, 3.12).
//!
//! An inlined call makes the new frame the innermost one, and compilers may write its `previous` some instructions later
//! (`DISPATCH_INLINED` in `Python/ceval_macros.h` [v3.12.1]). What lies there until then is of another call. The frame runs its
//! first instruction some twenty instructions after that, so nearly all of such frames are linked. This is the proof:
//!
//! - A frame that is called lies on the thread's data stack, behind all others there (`_PyFrame_PushUnchecked`). Frames follow
//!   each other without gaps, so one that ends where the new one begins is the one below it, whatever `previous` says.
//! - A frame whose `stacktop` is not -1 is not run by the evaluator at this moment, which sets it to -1 when it takes a frame up.
//!   What it waits for is a call, or a generator that it has resumed: `return_offset` is how far to jump behind the latter
//!   (3.12; 3.11 resumes generators through C), and 0 in a call. It has called something that has not returned. That
//!   lies behind it: it is the new frame.
//! - A generator's frame lies elsewhere. One that is in a call, and whose nearest caller on the data stack ends where the
//!   new frame begins, has called it too: whatever else it called would lie in between.
//!
//! So a stale `previous` does not pass: its frame is not the one below, or the evaluator runs it, or it waits for a generator.
//! Where a new chunk of the data stack begins, nothing is proven.
//!
//! A frame that C calls is linked before the evaluator's `cframe` is filled, if its machine code says so
//! ([`flags::LINKS_FIRST`]). What looks like one is one wherever no inlined call is on its way
//! ([`Layout::may_be_unlinked`]): `previous` may be left from when C called another frame there.

use super::buffer::FrameBuffer;
use super::frames::{Frame, FrameWalk};
use super::memory::{UserMemory, read_u8, read_u32};
use crate::event::{RawFrame, frame as frame_flags};
use crate::layout::{Layout, flags};
use crate::limits::{FRAME_READ, FRAMES_READ};

/// `FRAME_OWNED_BY_THREAD`: it lies on the data stack.
const OWNED_BY_THREAD: u32 = 0;

/// `FRAME_EXECUTING` (`Include/internal/pycore_frame.h`): the generator runs, or waits for what it has called.
const EXECUTING: u8 = 0;

/// How far the proof has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The leaf is linked.
    Linked,
    /// It may be.
    NotProven,
    /// There is more to look at: [`FrameWalk::look_at_callers`], at most [`FrameWalk::CALLERS`] times.
    More,
}

impl FrameWalk {
    /// Most callers that are looked at: up to the nearest one on the data stack.
    pub const CALLERS: u32 = 8;

    /// Whether the leaf has run nothing and is proven to be called by the frame that its `previous` names. The thread's next
    /// instruction lies `distance` bytes from the evaluator's first; `None`: it is not known.
    #[inline(always)]
    #[must_use]
    pub fn leaf_is_linked(&self, layout: &Layout, leaf: &RawFrame, distance: Option<u64>) -> Link {
        if !Layout::present(layout.frame_stacktop) || leaf.lasti >= 0 {
            return Link::NotProven;
        }
        if leaf.flags & frame_flags::ENTRY == 0 {
            return Link::More;
        }
        let linked = distance.is_some_and(|distance| !layout.may_be_unlinked(distance));
        if linked && layout.has(flags::LINKS_FIRST) { Link::Linked } else { Link::NotProven }
    }

    /// Looks at the leaf's next caller. The walk has ended: `buffer` is used anew, and the walk is at its end afterwards.
    #[inline(always)]
    pub fn look_at_callers<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        buffer: &mut FrameBuffer,
    ) -> Link {
        let at = self.leafs_caller;
        let read = u32::from(layout.frame_read);
        if buffer.fill_at::<M, FRAMES_READ, FRAME_READ>(memory, at, read).is_err() {
            return Link::NotProven;
        }
        let frame = Frame { buffer, at: FRAMES_READ as u32 };
        let owner = u32::from(frame.u8(layout.frame_owner));
        let is_shim = owner >= layout.owner_shim_min;
        if self.in_a_call == 0 && (is_shim || !is_in_a_call(layout, &frame)) {
            return Link::NotProven;
        }
        self.in_a_call = 1;
        if owner == OWNED_BY_THREAD {
            let end = end_of_frame(memory, layout, &frame, at);
            return if end == self.leaf { Link::Linked } else { Link::NotProven };
        }
        self.leafs_caller = frame.u64(layout.frame_previous);
        if is_shim {
            return Link::More;
        }
        if owner != layout.owner_generator {
            return Link::NotProven;
        }
        match read_u8(memory, at.wrapping_sub(u64::from(layout.generator_state_before))) {
            Ok(EXECUTING) => Link::More,
            _ => Link::NotProven,
        }
    }
}

#[inline(always)]
fn is_in_a_call(layout: &Layout, frame: &Frame<'_>) -> bool {
    let resumes = Layout::present(layout.frame_return_offset) && frame.u32(layout.frame_return_offset) & 0xffff != 0;
    frame.u32(layout.frame_stacktop).cast_signed() >= 0 && !resumes
}

/// The address behind a frame on the data stack; 0: its code object is not readable.
#[inline(always)]
fn end_of_frame<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, frame: &Frame<'_>, at: u64) -> u64 {
    let code = frame.u64(layout.frame_code);
    let locals = read_u32(memory, code, layout.code_nlocalsplus);
    let stack = read_u32(memory, code, layout.code_stacksize);
    let (Ok(locals), Ok(stack)) = (locals, stack) else { return 0 };
    let words = u64::from(locals).wrapping_add(u64::from(stack));
    at.wrapping_add(u64::from(layout.frame_localsplus)).wrapping_add(words.wrapping_mul(8))
}
