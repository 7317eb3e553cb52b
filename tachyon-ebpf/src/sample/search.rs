//! The second stage: which of the interpreter's thread states is this thread's.

use super::{Scratch, go_on, go_on_to_walk, lose, next};
use crate::interrupt::Interrupt;
use crate::layouts::layout_of;
use crate::maps::{STAGE_SEARCH, config, repair};
use crate::memory::CurrentProcess;
use crate::thread;
use tachyon_common::config::flags as config_flags;
use tachyon_common::event::status;
use tachyon_common::layout::Layout;
use tachyon_common::limits::{MAX_THREAD_STEPS, THREADS_PER_STEP};
use tachyon_common::opaque;
use tachyon_common::stop::{LossCause, StopReason};
use tachyon_common::walk::{self, Found, StackScan};

/// Looks at one thread state of the list: gives one of [`result`], or the number of the reason why the search has ended.
/// A global function, as [`super::frames::walk_python_frames`] is.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_thread() -> u64 {
    let Some(state) = Scratch::state() else { return result::GOES_ON };
    let Some(layout) = layout_of(state.process.layout) else { return result::GOES_ON };
    match opaque::place(&mut state.search).look(&CurrentProcess, layout, &state.slots) {
        Found::More => result::GOES_ON,
        Found::Scan => result::SCANS,
        Found::State { tstate, unique } => {
            state.found = tstate;
            if unique { result::UNIQUE } else { result::FOUND }
        }
        Found::Stop(reason) => reason as u64,
    }
}

/// What [`look_at_thread`] gives: no reason has these numbers.
mod result {
    /// There is more to look at.
    pub const GOES_ON: u64 = crate::maps::GOES_ON as u64;
    /// The thread's state is [`crate::maps::State::found`].
    pub const FOUND: u64 = GOES_ON + 1;
    /// It is, and it may be remembered.
    pub const UNIQUE: u64 = GOES_ON + 2;
    /// The stack is to be looked at.
    pub const SCANS: u64 = GOES_ON + 3;
}

/// Looks at a piece of the thread's stack for a frame object. A global function, as `look_at_thread` is.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn scan_piece() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let (scan, buffer) = (opaque::place(&mut state.search.scan), &mut state.stack_buffer);
    scan.go_on(&CurrentProcess, state.own_stack, &state.native.leaf, buffer);
    0
}

/// Looks at as much of it as is looked at.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn scan_stack() -> u64 {
    let mut pieces = 0;
    while pieces < StackScan::PIECES {
        pieces += 1;
        scan_piece();
    }
    0
}

/// Looks at some thread states, likewise. The verifier follows each turn of a loop, and two loops of 8 are cheaper than one of 64.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_threads() -> u64 {
    let mut looks = 0;
    while looks < THREADS_PER_CALL {
        looks += 1;
        let found = look_at_thread();
        if found == result::SCANS {
            scan_stack();
        } else if found != result::GOES_ON {
            return found;
        }
    }
    result::GOES_ON
}

/// Thread states that one call looks at.
const THREADS_PER_CALL: usize = 8;

const _: () = assert!(THREADS_PER_STEP.is_multiple_of(THREADS_PER_CALL));

/// Searches the thread list; the second stage on a miss of the cache.
#[inline(always)]
pub fn search_threads<C: Interrupt>(ctx: &C) {
    let mut steps = 0;
    let mut found = result::GOES_ON;
    while steps < THREADS_PER_STEP / THREADS_PER_CALL && found == result::GOES_ON {
        steps += 1;
        found = look_at_threads();
    }
    let mut next = searched(found as u32);
    let Some(mut scratch) = Scratch::get() else { return };
    if next == u64::from(next::NOTHING) {
        return;
    }
    if next == u64::from(next::LOST) {
        lose(ctx, scratch.counters, LossCause::Internal);
        return;
    }
    if next == u64::from(next::SEARCH) {
        go_on(ctx, &mut scratch, STAGE_SEARCH);
        next = break_off();
    }
    go_on_to_walk(ctx, &mut scratch, next as u32);
    lose(ctx, scratch.counters, LossCause::Internal);
}

/// What follows from what was found, one of [`result`] or the number of a reason: one of [`next`], or likewise. A global function, as
/// `look_at_thread` is.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn searched(found: u32) -> u64 {
    let Some(mut scratch) = Scratch::get() else { return u64::from(next::NOTHING) };
    let state = &mut *scratch.state;
    let Some(layout) = layout_of(state.process.layout) else { return u64::from(next::LOST) };
    let tid = scratch.sample.record.tid;
    if found == result::GOES_ON as u32 {
        state.thread_steps += 1;
        return if state.thread_steps < MAX_THREAD_STEPS { u64::from(next::SEARCH) } else { break_off() };
    }
    if found != result::FOUND as u32 && found != result::UNIQUE as u32 {
        thread::start_over(&state.process, tid);
        return u64::from(found);
    }
    let tstate = state.found;
    if found == result::UNIQUE as u32 {
        let token = thread::token(layout, &state.process, state.thread_starts);
        thread::remember(&state.process, tid, token, tstate);
    }
    if walk::read_thread(&CurrentProcess, layout, tstate, &mut state.thread_buffer).is_err() {
        return StopReason::UnreadableThread as u64;
    }
    u64::from(enter(&mut scratch, layout, tstate))
}

/// Remembers where the search stands, and gives the number of the reason. A global function, likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn break_off() -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return u64::from(next::NOTHING) };
    let Some(layout) = layout_of(state.process.layout) else { return u64::from(next::LOST) };
    let token = thread::token(layout, &state.process, state.thread_starts);
    thread::break_off(&state.search, &state.process, sample.record.tid, token);
    StopReason::ThreadListTooLong as u64
}

/// Takes down the thread's state, which has been copied, and prepares the walk. Gives one of [`next`].
#[inline(always)]
pub(super) fn enter(scratch: &mut Scratch, layout: &Layout, tstate: u64) -> u32 {
    let state = &mut *scratch.state;
    let record = &mut scratch.sample.record;
    let (thread, interp) = (&state.thread_buffer, &mut state.interp_buffer);
    let process = (&state.process, state.thread_pointer);
    let facts = walk::thread_facts(&CurrentProcess, layout, process, tstate, thread, interp);
    record.tstate = tstate;
    record.status |= facts.status;
    record.interp_id = facts.interp_id;
    record.code_generation = facts.code_generation;
    let process = (state.process.instance, state.process.image);
    state.codes.enter(layout, process, facts.interp_id, facts.code_generation);
    if config!(flags) & config_flags::GIL_ONLY != 0 && record.status & status::HAS_GIL == 0 {
        scratch.counters.filtered += 1;
        return next::NOTHING;
    }
    if Layout::present(layout.tstate_cframe) {
        state.entered_at = state.thread_buffer.u64(layout.tstate_cframe);
    }
    let ip = record.user_ip;
    if ip >= state.process.entering_start && ip < state.process.entering_end {
        if state.process.cframe_offset != 0 {
            state.repair = repair::WANTED;
        }
        state.begins = StopReason::EnteringEval as u32;
    } else {
        match walk::innermost_frame(&CurrentProcess, layout, &state.thread_buffer) {
            Ok(frame) => state.walk.next = frame,
            Err(reason) => state.begins = reason as u32,
        }
    }
    state.walk.gc_frame = facts.gc_frame;
    // The numbers of 3.15's opcodes are those that the readers of the format know.
    if config!(flags) & config_flags::OPCODES != 0 && layout.version_hex >= 0x030f_0000 {
        state.walk.opcodes = 1;
    }
    state.walk.enter(layout, &state.thread_buffer);
    next::WALK
}
