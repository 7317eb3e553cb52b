//! Whose work the thread does: read where the walk begins, and put behind the frames.

use crate::maps::{ASYNCIO, LAYOUTS, SCRATCH_BYTES, SPANS};
use crate::memory::{CurrentProcess, masked};
use crate::sample::Scratch;
use tachyon_common::walk;
use tachyon_common::whose::{Whose, flags};

/// Takes down the span that the thread is in. A global function, as `sample::frames::walk_python_frames` is. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn read_span() -> u64 {
    let Some(Scratch { state, .. }) = Scratch::get() else { return 0 };
    let Some(at) = SPANS.get(u32::from(state.process.spans)) else { return 0 };
    state.whose = Whose::NOBODY;
    walk::running_span(&CurrentProcess, at, state.thread_pointer, &mut state.whose);
    0
}

/// Takes down the task that the thread runs, and tells the walk the frame of its coroutine. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn read_task() -> u64 {
    let Some(Scratch { state, sample, .. }) = Scratch::get() else { return 0 };
    let Some(layout) = LAYOUTS.get(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    if state.whose.flags & flags::SPAN == 0 {
        state.whose = Whose::NOBODY;
    }
    let tstate = sample.record.tstate;
    state.walk.task_frame = walk::running_task(&CurrentProcess, layout, asyncio, tstate, &mut state.whose);
    0
}

/// Puts it behind what the record has so far, and gives its length in bytes.
#[inline(always)]
pub fn append(at: usize) -> usize {
    append_whose(at as u64) as usize & 0xff
}

/// The same. A global function: it is verified once.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn append_whose(at: u64) -> u64 {
    const BYTES: usize = size_of::<Whose>();
    let Some(Scratch { state, sample, .. }) = Scratch::get() else { return 0 };
    let at = masked::<0x7ff8>(at as usize);
    if at > SCRATCH_BYTES - BYTES {
        return 0;
    }
    sample.record.whose = 1;
    state.whose.task_frames = state.walk.task_frames as u16;
    // SAFETY: `at` is inside the scratch value.
    let to = unsafe { (&raw mut *sample).cast::<u8>().add(at) };
    // SAFETY: as many bytes are left of it.
    unsafe { to.cast::<Whose>().write(state.whose) };
    BYTES as u64
}
