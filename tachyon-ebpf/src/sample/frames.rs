//! The third stage: the thread's Python frames.

use super::end::stopped;
use super::{Scratch, go_on};
use crate::interrupt::Interrupt;
use crate::layouts::layout_of;
use crate::maps::{FRAME_SLOTS, GOES_ON, STAGE_WALK, STOPS, config, repair};
use crate::memory::{CurrentProcess, masked};
use crate::names;
use crate::whose;
use tachyon_common::codes::Codes;
use tachyon_common::event::{RawFrame, frame, status};
use tachyon_common::limits::{PY_FRAMES_PER_CALL, PY_FRAMES_PER_STEP};
use tachyon_common::opaque;
use tachyon_common::stop::StopReason;
use tachyon_common::walk::{CodeIdentity, FrameSink, FrameWalk, Link};

/// Puts frames into the sample and remembers which code objects are new.
struct SampleFrames<'a> {
    frames: *mut RawFrame,
    codes: &'a mut Codes,
}

impl SampleFrames<'_> {
    #[inline(always)]
    fn slot(&self, index: usize) -> *mut RawFrame {
        // SAFETY: masked to a slot of the array (its length is a power of two).
        unsafe { self.frames.add(masked::<{ FRAME_SLOTS as u32 - 1 }>(index)) }
    }
}

impl FrameSink for SampleFrames<'_> {
    #[inline(always)]
    fn known(&mut self, code: u64, identity: &mut CodeIdentity) -> bool {
        let _zero = names::look_up(self.codes, code, identity);
        opaque::place(&mut *self.codes).known != 0
    }

    #[inline(always)]
    fn store(&mut self, index: usize, raw: RawFrame, _identity: &CodeIdentity) {
        let slot = self.slot(index);
        // SAFETY: `slot` is inside the scratch value.
        unsafe { slot.write(raw) };
        if self.codes.known == 0 {
            // In this CPU's scratch, where the function looks up both them and what the walk has read of the code object.
            let codes = opaque::place(&mut *self.codes);
            let _zero = names::note_code(index as u32, raw.code);
            let _same = opaque::place(codes);
        }
    }

    #[inline(always)]
    fn mark_entry(&mut self, index: usize) {
        // SAFETY: `slot` is inside the scratch value.
        unsafe { (*self.slot(index)).flags |= frame::ENTRY };
    }
}

/// Looks at [`PY_FRAMES_PER_CALL`] frames, and gives the number of the reason why the walk has ended, or [`GOES_ON`].
///
/// A global function, without arguments, is verified once and by itself: to its callers it is one instruction with any
/// result. Inlined, or as a function of this file, all of its paths would be verified anew in each turn of a loop.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn walk_python_frames() -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return u64::from(GOES_ON) };
    let Some(layout) = layout_of(state.process.layout) else { return u64::from(GOES_ON) };
    let mut frames = SampleFrames { frames: sample.frames.as_mut_ptr(), codes: &mut state.codes };
    let mut ended = None;
    let mut looks = 0;
    while looks < PY_FRAMES_PER_CALL && ended.is_none() {
        looks += 1;
        ended = opaque::place(&mut state.walk).frame(
            &CurrentProcess,
            layout,
            state.process.code_type,
            config!(seed),
            &mut state.frame_buffer,
            &mut state.code_buffer,
            &mut frames,
        );
    }
    u64::from(ended.map_or(GOES_ON, |reason| reason as u32))
}

/// Looks at the innermost frame's link, or at its next caller for that ([`Link`]). A global function, as [`walk_python_frames`]
/// is.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_caller() -> u64 {
    let Some(state) = Scratch::state() else { return Link::NotProven as u64 };
    let Some(layout) = layout_of(state.process.layout) else { return Link::NotProven as u64 };
    opaque::place(&mut state.walk).look_at_callers(&CurrentProcess, layout, &mut state.frame_buffer) as u64
}

/// Notes it where the innermost frame has run nothing and is proven to be linked. A global function, likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_link() -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    // SAFETY: the array's first element.
    let leaf = unsafe { sample.frames.as_ptr().read() };
    let (ip, evaluator) = (sample.record.user_ip, state.process.evaluator_start);
    let distance = (ip != 0 && evaluator != 0).then_some(ip.wrapping_sub(evaluator));
    let mut link = state.walk.leaf_is_linked(layout, &leaf, distance) as u64;
    let mut looks = 0;
    while looks < FrameWalk::CALLERS && link == Link::More as u64 {
        looks += 1;
        link = look_at_caller();
    }
    if link == Link::Linked as u64 {
        sample.record.status |= status::LINKED;
    }
    0
}

/// Walks a part of the frame chain, once it is known whose work it is; the third stage.
#[inline(always)]
pub fn walk_frames<C: Interrupt>(ctx: &C) {
    let Some(state) = Scratch::state() else { return };
    // The reason why there is nothing to walk, or `GOES_ON`.
    let begins = core::mem::take(&mut state.begins);
    if begins != 0 && begins & STOPS == 0 {
        whose::read(state);
    }
    let mut ended = u64::from(begins & !STOPS);
    if begins == 0 || begins == GOES_ON {
        let mut steps = 0;
        loop {
            ended = walk_python_frames();
            steps += 1;
            if ended != u64::from(GOES_ON) || steps == PY_FRAMES_PER_STEP / PY_FRAMES_PER_CALL {
                break;
            }
        }
    }
    let Some(mut scratch) = Scratch::get() else { return };
    if ended == u64::from(GOES_ON) {
        go_on(ctx, &mut scratch, STAGE_WALK);
        ended = StopReason::TailCallFailed as u64;
    } else if scratch.state.walk.stored > 0 && scratch.state.repair != repair::WALKING {
        look_at_link();
    }
    stopped(ctx, &mut scratch, ended as u32);
}
