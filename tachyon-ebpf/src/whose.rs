//! Whose work the thread does: read where the walk begins, who awaits that behind it, and put behind the frames.

use crate::interrupt::Interrupt;
use crate::maps::{ASYNCIO, LAYOUTS, SCRATCH_BYTES, SPAN_VARIABLES, SPANS, SpanVariable, config};
use crate::memory::{CurrentProcess, masked};
use crate::sample::{self, Scratch, walk_python_frames};
use tachyon_common::config::flags as config_flags;
use tachyon_common::limits::SPAN_SLOTS;
use tachyon_common::stop::StopReason;
use tachyon_common::walk;
use tachyon_common::whose::{MAX_AWAITING, MAX_AWAITING_SET, MAX_COROUTINES, Task, Whose, flags};

/// Takes down the span that the thread is in. A global function, as `sample::frames::walk_python_frames` is. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn read_span() -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let place = u32::from(state.process.spans);
    let Some(at) = SPANS.get(place) else { return 0 };
    state.whose = Whose::NOBODY;
    let (image, tid, pointer) = (state.process.image, sample.record.tid, state.thread_pointer);
    let found = if at.entry_size == 0 { None } else { variable_slot(image, tid) };
    let Some(slot) = found else { return 0 };
    let key = walk::mix(walk::mix(image, pointer.address), u64::from(tid) << 32 | u64::from(place));
    // SAFETY: a pointer into a map value, checked by the lookup; a torn value leads nowhere.
    let known = unsafe { core::ptr::read_volatile(slot) };
    let address = if known.key == key {
        known.sealed ^ key
    } else {
        let address = walk::thread_variable(&CurrentProcess, at, pointer);
        if address != 0 {
            // SAFETY: likewise.
            unsafe { core::ptr::write_volatile(slot, SpanVariable { key, sealed: address ^ key }) };
        }
        address
    };
    walk::span_at(&CurrentProcess, address, &mut state.whose);
    0
}

#[inline(always)]
fn variable_slot(image: u64, tid: u32) -> Option<*mut SpanVariable> {
    SPAN_VARIABLES.get_ptr_mut((walk::mix(image, u64::from(tid)) as u32) & (SPAN_SLOTS - 1))
}

/// Forgets where a thread that ends has its variable: another one may have its number and its place later.
#[inline(always)]
pub fn forget_variable(image: u64, tid: u32) {
    if let Some(slot) = variable_slot(image, tid) {
        // SAFETY: as in `read_span`.
        let key = unsafe { &raw mut (*slot).key };
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(key, 0) };
    }
}

/// Takes down the task that the thread runs, and tells the walk the frame of its coroutine. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn read_task() -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let Some(layout) = LAYOUTS.get(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    if state.whose.flags & flags::SPAN == 0 {
        state.whose = Whose::NOBODY;
    }
    let tstate = sample.record.tstate;
    state.walk.tasks[0] =
        walk::running_task(&CurrentProcess, layout, asyncio, tstate, &mut state.task_reader, &mut state.whose);
    0
}

/// Begins with the tasks that the event loops of the process run. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn begin_current() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    if state.whose.flags & flags::SPAN == 0 {
        state.whose = Whose::NOBODY;
    }
    let dict = state.process.current_tasks;
    state.task_reader.begin();
    core::hint::black_box(&mut state.current).begin(&CurrentProcess, asyncio, dict);
    0
}

/// [`CurrentTasks::look`](walk::CurrentTasks::look): 1 or 0. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_current() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = LAYOUTS.get(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    let current = core::hint::black_box(&mut state.current);
    u64::from(current.look(&CurrentProcess, layout, asyncio, &mut state.task_reader, &mut state.walk.tasks))
}

/// Takes down the one of them whose frame the walk has met: so this thread runs it. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn take_current() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = LAYOUTS.get(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    state.whose.flags &= !flags::TASK;
    let met = if state.walk.stored == 0 { 0 } else { state.walk.task_met };
    let (current, whose) = (core::hint::black_box(&mut state.current), &mut state.whose);
    current.take(&CurrentProcess, layout, asyncio, met, &mut state.task_reader, whose);
    // Who awaits it is not kept there.
    if config!(flags) & config_flags::AWAITING != 0 && whose.flags & flags::TASK != 0 {
        whose.flags |= flags::MORE_AWAITING;
    }
    0
}

/// Tells the walk the frames of the tasks that this thread may run: the one that it does run is known when it has met it. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_for_current() -> u64 {
    begin_current();
    let mut looks = 0;
    while looks < walk::MAX_CURRENT_LOOKS && look_at_current() != 0 {
        looks += 1;
    }
    0
}

/// Begins with those that await the running task. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn begin_awaiting() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    state.awaiting.begin(state.whose.task.address);
    // The walk of their frames forgets where this thread's evaluator was entered, which the native stack is asked for.
    if state.entered_at == 0 {
        state.entered_at = state.walk.entry_frame;
    }
    0
}

/// [`Awaiting::find`](walk::Awaiting::find): 1 or 0. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn find_awaiting() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    let found = core::hint::black_box(&mut state.awaiting).find(&CurrentProcess, asyncio, &mut state.task_reader);
    found.map_or(0, |set| u64::from(set) + 1)
}

/// [`Awaiting::look`](walk::Awaiting::look), likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_awaiting() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    u64::from(core::hint::black_box(&mut state.awaiting).look(&CurrentProcess))
}

/// [`Awaiting::take`](walk::Awaiting::take), likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn take_awaiting() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = LAYOUTS.get(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    let (awaiting, running) = (core::hint::black_box(&mut state.awaiting), &mut state.whose.task);
    u64::from(awaiting.take(&CurrentProcess, layout, asyncio, &mut state.task_reader, running, state.walk.stored))
}

/// [`Awaiting::coroutine`](walk::Awaiting::coroutine), likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_coroutine() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = LAYOUTS.get(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    u64::from(core::hint::black_box(&mut state.awaiting).coroutine(
        &CurrentProcess,
        layout,
        asyncio,
        &mut state.task_reader,
    ))
}

/// Puts the walk at the next coroutine's frame, if there is one, likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn go_on_at_coroutine() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let frame = core::hint::black_box(&mut state.awaiting).frame();
    if frame == 0 {
        return 0;
    }
    state.walk.go_on_at(frame);
    1
}

/// Notes that it has been walked. False: there are no more.
#[inline(always)]
fn walked_coroutine(whole: bool) -> bool {
    let Some(state) = Scratch::state() else { return false };
    state.awaiting.walked(state.walk.stored, whole)
}

/// Walks the coroutines of those that await the running task behind the thread's own frames; a stage of its own.
#[inline(always)]
pub fn walk_awaiting<C: Interrupt>(ctx: &C) {
    begin_awaiting();
    let mut tasks = 0;
    // Futures between two tasks count, too.
    while tasks < 2 * MAX_AWAITING {
        tasks += 1;
        let found = find_awaiting();
        if found == 0 {
            break;
        }
        let mut looks = 0;
        while found > 1 && looks < MAX_AWAITING_SET && look_at_awaiting() != 0 {
            looks += 1;
        }
        if take_awaiting() == 0 {
            break;
        }
        let mut coroutines = 0;
        while coroutines < MAX_COROUTINES && look_at_coroutine() != 0 {
            coroutines += 1;
        }
        let mut frames = 0;
        while frames < MAX_COROUTINES && go_on_at_coroutine() != 0 {
            frames += 1;
            let ended = walk_python_frames();
            if !walked_coroutine(ended == StopReason::Complete as u64) {
                break;
            }
        }
    }
    let Some(mut scratch) = Scratch::get() else { return };
    scratch.state.whose.awaiting = scratch.state.awaiting.found;
    if scratch.state.awaiting.more != 0 {
        scratch.state.whose.flags |= flags::MORE_AWAITING;
    }
    sample::to_holder(ctx, &mut scratch);
}

/// Puts it behind what the record has so far, and gives its length in bytes.
#[inline(always)]
pub fn append(at: usize) -> usize {
    let appended = append_whose(at as u64);
    let (mut bytes, awaiting) = (appended as usize & 0xff, (appended >> 8 & 0xff).min(MAX_AWAITING as u64));
    let mut tasks = 0;
    while tasks < awaiting {
        let task = append_task((at + bytes) as u64, tasks) as usize & 0xff;
        if task == 0 {
            break;
        }
        bytes += task;
        tasks += 1;
    }
    bytes
}

/// The same, without those that await: how many those are follows from the ninth bit on. A global function: it is verified once.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn append_whose(at: u64) -> u64 {
    const BYTES: usize = size_of::<Whose>();
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let at = masked::<0x7ff8>(at as usize);
    if at > SCRATCH_BYTES - BYTES {
        return 0;
    }
    sample.record.whose = 1;
    state.whose.task.frames = state.walk.task_frames as u16;
    // SAFETY: `at` is inside the scratch value.
    let to = unsafe { (&raw mut *sample).cast::<u8>().add(at) };
    // SAFETY: as many bytes are left of it.
    unsafe { to.cast::<Whose>().write(state.whose) };
    BYTES as u64 | u64::from(state.whose.awaiting & 0xff) << 8
}

/// One of those that await, if there are so many; gives its length in bytes, or 0. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn append_task(at: u64, number: u64) -> u64 {
    const BYTES: usize = size_of::<Task>();
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let (at, number) = (masked::<0x7ff8>(at as usize), masked::<0xff>(number as usize));
    if at > SCRATCH_BYTES - BYTES || number >= state.whose.awaiting as usize || number >= MAX_AWAITING {
        return 0;
    }
    // SAFETY: `at` is inside the scratch value.
    let to = unsafe { (&raw mut *sample).cast::<u8>().add(at) };
    // SAFETY: as many bytes are left of it.
    unsafe { to.cast::<Task>().write(state.awaiting.tasks[number]) };
    BYTES as u64
}
