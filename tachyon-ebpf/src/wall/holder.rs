//! Who held the GIL that a thread waited for: the innermost frames of that thread are a part of the record.

use super::facts::{self, is_for_gil};
use super::record;
use crate::layouts::layout_of;
use crate::maps::State;
use crate::memory::CurrentProcess;
use crate::sample::{self, Scratch, walk_python_frames};
use aya_ebpf::programs::RawTracePointContext;
use tachyon_common::layout::Layout;
use tachyon_common::walk;

/// Puts the walk at the holder's innermost frame, if the thread waited for the GIL and another one has or had it; else 0. A global
/// function: it is verified once.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn find_holder() -> u64 {
    let (Some(Scratch { state, sample, .. }), Some(waiting)) = (Scratch::get(), record::waiting()) else { return 0 };
    let facts = &mut waiting.facts;
    (facts.holder, facts.holder_frames) = (0, 0);
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    facts.gil = facts::gil(layout, state.process.runtime, sample.record.tstate);
    if !is_for_gil(facts, &sample.record) {
        return 0;
    }
    // Who has it, or had it last: that one is on its way out.
    let holder = walk::read_u64(&CurrentProcess, facts.gil, layout.gil_last_holder).unwrap_or(0);
    if holder == 0 || holder == sample.record.tstate {
        return 0;
    }
    let frame = innermost_frame(layout, holder, state);
    if frame == 0 {
        return 0;
    }
    facts.holder = holder;
    state.own_frames = state.walk.stored;
    // The walk of the holder's frames forgets where this thread's evaluator was entered, which the native stack is asked for.
    if state.entered_at == 0 {
        state.entered_at = state.walk.entry_frame;
    }
    state.walk.enter(layout, &state.thread_buffer);
    state.walk.go_on_at(frame);
    1
}

#[inline(always)]
fn innermost_frame(layout: &Layout, holder: u64, state: &mut State) -> u64 {
    if walk::read_thread(&CurrentProcess, layout, holder, &mut state.thread_buffer).is_err() {
        return 0;
    }
    walk::innermost_frame(&CurrentProcess, layout, &state.thread_buffer).unwrap_or(0)
}

/// Walks the holder's innermost frames behind the thread's own; a stage of its own, for the walk needs much of the stack.
#[inline(always)]
pub fn walk_holder(ctx: &RawTracePointContext) {
    walk_python_frames();
    let (Some(mut scratch), Some(waiting)) = (Scratch::get(), record::waiting()) else { return };
    waiting.facts.holder_frames = scratch.state.walk.stored.wrapping_sub(scratch.state.own_frames);
    sample::to_native(ctx, &mut scratch);
}
