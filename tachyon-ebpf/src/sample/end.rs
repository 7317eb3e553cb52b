//! What follows the Python frames: the frames of others, the native stack, names, the record.

use super::{Scratch, go_on, lose};
use crate::emit::emit;
use crate::interrupt::Interrupt;
use crate::layouts::layout_of;
use crate::maps::{
    FRAME_SLOTS, STAGE_AWAITING, STAGE_HOLDER, STAGE_NAME, STAGE_NATIVE, SampleScratch, State, config, repair,
};
use crate::memory::masked;
use crate::thread;
use crate::whose;
use tachyon_common::config::flags as config_flags;
use tachyon_common::event::{SampleRecord, frame, status};
use tachyon_common::layout::{Layout, flags as layout_flags};
use tachyon_common::stop::{LossCause, StopReason};
use tachyon_common::walk::{self, FrameWalk};
use tachyon_common::whose::flags as whose_flags;

/// Whether the leaf was being linked to its caller, where the native stack leads to its activation's callers (3.11, 3.12):
/// what user space finds as well and then leaves these frames out ([`walk::believable_stop`]). One that C may have entered the
/// evaluator for is left to it.
#[inline(always)]
fn is_being_linked(sample: &SampleScratch, state: &State) -> bool {
    let stored = state.walk.stored as usize;
    if state.process.cframe_offset == 0 || stored == 0 {
        return false;
    }
    let frames = &sample.frames;
    // SAFETY: the array's first element.
    let leaf = unsafe { frames.as_ptr().read() };
    // SAFETY: masked to a slot of the array.
    let root = unsafe { frames.as_ptr().add(masked::<{ FRAME_SLOTS as u32 - 1 }>(stored - 1)) };
    // SAFETY: as above.
    let root = unsafe { root.read() };
    let unlinked = leaf.lasti < 0 && sample.record.status & status::LINKED == 0;
    let switching = sample.record.status & status::SWITCHING != 0;
    (unlinked || root.flags & frame::ENTRY == 0) && leaf.flags & frame::ENTRY == 0 && !switching
}

/// Notes it where the chain of frames ends because the thread is going from one greenlet to another, and not because a frame was being
/// linked.
#[inline(always)]
fn look_for_switch(record: &mut SampleRecord, state: &State) {
    if !whose::has_greenlets(state) || state.walk.stored == 0 || state.walk.entry_frame != 0 {
        return;
    }
    let Some(layout) = layout_of(state.process.layout) else { return };
    // Where each chain has such frames (3.12+).
    let has_shims = !layout.has(layout_flags::FRAME_OBJECTS) && !Layout::present(layout.frame_is_entry);
    if has_shims && whose::is_switching() != 0 {
        record.status |= status::SWITCHING;
    }
}

/// Ends the walk of Python frames for a reason, told by its number, and goes on to the native stack.
#[inline(always)]
pub(super) fn stopped<C: Interrupt>(ctx: &C, scratch: &mut Scratch, reason: u32) {
    let has_more = settle(reason);
    if config!(flags) & config_flags::AWAITING != 0 && has_more != 0 {
        go_on(ctx, scratch, STAGE_AWAITING);
        if whose::current_tasks(scratch.state) != 0 {
            whose::take_current();
        }
    }
    to_holder(ctx, scratch);
}

/// Takes down what the walk of Python frames has come to: 1 where the frames of greenlets' parents or of tasks that await are to be
/// walked behind them, else 0. A global function, as [`super::walk_python_frames`] is: what follows is verified once, and not for each
/// way in which a walk ends.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn settle(reason: u32) -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let record = &mut sample.record;
    record.stop = reason as u8;
    if let Some(layout) = layout_of(state.process.layout)
        && !walk::entered_here(layout, state.own_stack, state.walk.entry_frame)
    {
        // Another thread runs this state: these frames are that one's, and so is all else that was read in it.
        state.walk = FrameWalk::default();
        state.codes.pending_count = 0;
        state.whose.flags &= !(whose_flags::TASK | whose_flags::GREENLET);
        record.stop = StopReason::UnknownThread as u8;
        record.status &= !status::BY_THREAD_STATE;
        record.interp_id = -1;
        thread::forget(&state.process, record.tid);
    }
    if reason == StopReason::Complete as u32 {
        look_for_switch(record, state);
        if state.repair == repair::NONE && is_being_linked(sample, state) {
            state.repair = repair::WANTED;
        }
    }
    let record = &mut sample.record;
    if state.repair == repair::WALKING {
        record.stop = StopReason::EnteringEval as u8;
        if reason == StopReason::Complete as u32 {
            record.status |= status::CALLERS;
        } else {
            // Whatever lay there was no `cframe`.
            state.walk.stored = 0;
            state.codes.pending_count = 0;
        }
    }
    record.root_shims = state.walk.shims as u8;
    // Before 3.14, which task runs is not known yet, and those that await it are not.
    let knows = if whose::current_tasks(state) == 0 { whose_flags::TASK } else { 0 };
    let has_more = state.whose.flags & (knows | whose_flags::GREENLET) != 0;
    if config!(flags) & config_flags::AWAITING != 0 && has_more {
        return 1;
    }
    if whose::current_tasks(state) != 0 {
        whose::take_current();
    }
    0
}

/// Goes on to the frames of another thread, where such are wanted, once this one's have been walked.
#[inline(always)]
pub fn to_holder<C: Interrupt>(ctx: &C, scratch: &mut Scratch) {
    if ctx.has_more_python() {
        go_on(ctx, scratch, STAGE_HOLDER);
    }
    to_native(ctx, scratch);
}

/// Goes on to the native stack, where that is wanted, once Python's has been walked.
#[inline(always)]
pub fn to_native<C: Interrupt>(ctx: &C, scratch: &mut Scratch) {
    if config!(flags) & config_flags::NATIVE != 0 {
        go_on(ctx, scratch, STAGE_NATIVE);
        lose(ctx, scratch.counters, LossCause::Internal);
    } else {
        name(ctx, scratch);
    }
}

/// Goes on to new code objects, if there are any, and emits what there is.
#[inline(always)]
pub(super) fn name<C: Interrupt>(ctx: &C, scratch: &mut Scratch) {
    if scratch.state.codes.pending_count > 0 {
        go_on(ctx, scratch, STAGE_NAME);
    }
    emit(ctx, scratch);
}
