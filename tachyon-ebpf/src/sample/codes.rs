//! The last stage: the names of code objects that the sample met for the first time.

use super::{Scratch, go_on};
use crate::emit::emit;
use crate::interrupt::Interrupt;
use crate::layouts::layout_of;
use crate::maps::{FRAME_SLOTS, STAGE_NAME};
use crate::memory::masked;
use crate::names::{self, Named};
use tachyon_common::limits::CODES_PER_STEP;

/// Sends the next record of the code objects seen for the first time, and gives one of [`named`]. A global function, as
/// [`super::frames::walk_python_frames`] is.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn name_code() -> u64 {
    let Some(Scratch { state, sample, counters }) = Scratch::get() else { return named::ALL };
    let Some(layout) = layout_of(state.process.layout) else { return named::ALL };
    let Some((index, lacking)) = state.codes.next() else { return named::ALL };
    // SAFETY: masked to a slot of the array.
    let frame = unsafe { sample.frames.as_ptr().add(masked::<{ FRAME_SLOTS as u32 - 1 }>(index)) };
    // SAFETY: as above.
    let raw = unsafe { frame.read() };
    match names::send(state, layout, &sample.record, &raw, lacking) {
        Named::Nothing => {
            state.codes.pending_next += 1;
            return named::GOES_ON;
        }
        Named::Done => state.codes.pending_next += 1,
        Named::Partly => {}
        Named::RingFull => {
            counters.code_ring_full += 1;
            return named::LATER;
        }
        Named::PutOff => {
            counters.codes_put_off += 1;
            return named::LATER;
        }
    }
    counters.codes_sent += 1;
    named::GOES_ON
}

/// What [`name_code`] gives.
mod named {
    /// There may be more.
    pub const GOES_ON: u64 = 0;
    /// All have been sent.
    pub const ALL: u64 = 1;
    /// The ring is full, or the second's share is used up: the others are tried with another sample.
    pub const LATER: u64 = 2;
}

/// Sends code objects seen for the first time; the last stage, only when there are any.
#[inline(always)]
pub fn name_codes<C: Interrupt>(ctx: &C) {
    let mut steps = 0;
    let mut result = named::GOES_ON;
    while steps < CODES_PER_STEP && result == named::GOES_ON {
        steps += 1;
        result = name_code();
    }
    let Some(mut scratch) = Scratch::get() else { return };
    if result == named::GOES_ON {
        go_on(ctx, &mut scratch, STAGE_NAME);
    }
    emit(ctx, &mut scratch);
}
