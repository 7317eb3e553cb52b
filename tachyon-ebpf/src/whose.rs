//! Whose work the thread does: read where the walk begins, who awaits that behind it, and put behind the frames.

use crate::interrupt::Interrupt;
use crate::layouts::layout_of;
use crate::maps::{ASYNCIO, GOES_ON, GREENLETS, SCRATCH_BYTES, SPANS, State, VARIABLES, Variable, config};
use crate::memory::{CurrentProcess, masked};
use crate::sample::{self, Scratch, walk_python_frames};
use tachyon_common::config::flags as config_flags;
use tachyon_common::limits::{PY_FRAMES_PER_CALL, PY_FRAMES_PER_PARENT, VARIABLE_SLOTS};
use tachyon_common::opaque;
use tachyon_common::stop::StopReason;
use tachyon_common::walk::{self, ThreadPointer};
use tachyon_common::whose::{
    Greenlets, MAX_AWAITING, MAX_AWAITING_SET, MAX_COROUTINES, MAX_GREENLETS, Task, ThreadLocal, Whose, flags,
};

/// Takes down the span that the thread is in. A global function, as `sample::frames::walk_python_frames` is. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn read_span() -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let place = u32::from(state.process.spans);
    let Some(at) = SPANS.get(place) else { return 0 };
    let (image, tid, pointer) = (state.process.image, sample.record.tid, state.thread_pointer);
    let address = variable(image, tid, pointer, at, place);
    walk::span_at(&CurrentProcess, address, &mut state.whose);
    0
}

/// Where a thread has a variable of its own; 0: it has none yet. `place` tells one variable from another.
#[inline(always)]
fn variable(image: u64, tid: u32, pointer: ThreadPointer, at: &ThreadLocal, place: u32) -> u64 {
    let found = if at.entry_size == 0 { None } else { variable_slot(image, tid, place & OF_GREENLETS) };
    let Some(slot) = found else { return 0 };
    let key = walk::mix(walk::mix(image, pointer.address), u64::from(tid) << 32 | u64::from(place));
    // SAFETY: a pointer into a map value, checked by the lookup; a torn value leads nowhere.
    let known = unsafe { core::ptr::read_volatile(slot) };
    if known.key == key {
        return known.sealed ^ key;
    }
    let address = walk::thread_variable(&CurrentProcess, at, pointer);
    if address != 0 {
        // SAFETY: likewise.
        unsafe { core::ptr::write_volatile(slot, Variable { key, sealed: address ^ key }) };
    }
    address
}

/// Added to a place of `GREENLETS`, in what tells variables apart.
const OF_GREENLETS: u32 = 1 << 16;

#[inline(always)]
fn variable_slot(image: u64, tid: u32, which: u32) -> Option<*mut Variable> {
    VARIABLES.get_ptr_mut((walk::mix(image, u64::from(tid) << 32 | u64::from(which)) as u32) & (VARIABLE_SLOTS - 1))
}

/// Forgets where a thread that ends has its variables: another one may have its number and its place later.
#[inline(always)]
pub fn forget_variables(image: u64, tid: u32) {
    for which in [0, OF_GREENLETS] {
        if let Some(slot) = variable_slot(image, tid, which) {
            // SAFETY: as in `variable`.
            let key = unsafe { &raw mut (*slot).key };
            // SAFETY: as above.
            unsafe { core::ptr::write_volatile(key, 0) };
        }
    }
}

/// Takes down the greenlet and the task that the thread runs, where its process has such.
#[inline(always)]
pub fn read(state: &State) {
    let (current_tasks, asyncio) = (current_tasks(state), state.process.asyncio);
    if has_greenlets(state) {
        read_greenlet();
    }
    if current_tasks != 0 {
        look_for_current();
    } else if asyncio != 0 && config!(flags) & config_flags::NO_TASKS == 0 {
        read_task();
    }
}

/// Whether the process has greenlets, as far as is known, and the programs are made for such.
#[inline(always)]
pub fn has_greenlets(state: &State) -> bool {
    config!(flags) & config_flags::NO_GREENLETS == 0 && state.process.greenlets != 0
}

/// [`ProcessEntry::current_tasks`](tachyon_common::process::ProcessEntry::current_tasks), likewise.
#[inline(always)]
pub fn current_tasks(state: &State) -> u64 {
    if config!(flags) & config_flags::NO_TASKS == 0 { state.process.current_tasks } else { 0 }
}

/// Takes down the greenlet that the thread runs. (No function of its own: the kernel bounds the stacks of functions that call each other.)
#[inline(always)]
fn read_greenlet() {
    if begin_greenlets() != 0
        && take_greenlet()
        && let Some(state) = Scratch::state()
    {
        state.whose.flags |= flags::GREENLET;
    }
}

/// The state, where the thread keeps its greenlets, and the address of its variable; 0: it has none.
#[inline(always)]
fn own_greenlets() -> Option<(&'static mut State, &'static Greenlets, u64)> {
    let (sample, state) = Scratch::sample_and_state()?;
    let place = state.process.greenlets;
    let at = GREENLETS.get(place)?;
    let (image, tid, pointer) = (state.process.image, sample.record.tid, state.thread_pointer);
    let address = variable(image, tid, pointer, &at.state, place | OF_GREENLETS);
    Some((state, at, address))
}

/// [`GreenletWalk::begin`](walk::GreenletWalk::begin): 1 or 0. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn begin_greenlets() -> u64 {
    let Some((state, _, address)) = own_greenlets() else { return 0 };
    u64::from(opaque::place(&mut state.greenlets).begin(&CurrentProcess, address))
}

/// [`GreenletWalk::is_switching`](walk::GreenletWalk::is_switching): 1 or 0. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn is_switching() -> u64 {
    let Some((state, at, address)) = own_greenlets() else { return 0 };
    u64::from(opaque::place(&mut state.greenlets).is_switching(&CurrentProcess, at, address))
}

/// Takes down the next greenlet, with its name. False: there is none.
#[inline(always)]
fn take_greenlet() -> bool {
    if look_at_greenlet() == 0 {
        return false;
    }
    let mut looks = begin_greenlets_name();
    while looks > 0 && looks <= walk::MAX_NAME_LOOKS && look_at_greenlets_name() != 0 {
        looks -= 1;
    }
    take_greenlets_name();
    true
}

/// [`GreenletWalk::look`](walk::GreenletWalk::look): 1 or 0. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_greenlet() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let Some(at) = GREENLETS.get(state.process.greenlets) else { return 0 };
    let greenlets = opaque::place(&mut state.greenlets);
    u64::from(greenlets.look(&CurrentProcess, layout, at, &mut state.task_reader))
}

/// [`GreenletWalk::begin_name`](walk::GreenletWalk::begin_name), likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn begin_greenlets_name() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(at) = GREENLETS.get(state.process.greenlets) else { return 0 };
    opaque::place(&mut state.greenlets).begin_name(&CurrentProcess, at)
}

/// [`GreenletWalk::look_at_name`](walk::GreenletWalk::look_at_name): 1 or 0. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_greenlets_name() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let greenlets = opaque::place(&mut state.greenlets);
    u64::from(greenlets.look_at_name(&CurrentProcess, layout, &mut state.task_reader))
}

/// [`GreenletWalk::take_name`](walk::GreenletWalk::take_name), likewise. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn take_greenlets_name() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let Some(at) = GREENLETS.get(state.process.greenlets) else { return 0 };
    let greenlets = opaque::place(&mut state.greenlets);
    greenlets.take_name(&CurrentProcess, layout, at, &mut state.task_reader);
    0
}

/// Puts the walk at the frame in which the parent that was found last is suspended: 1, or 0 where there is none. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn go_on_at_parent() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    u64::from(opaque::place(&mut state.greenlets).go_on(&mut state.walk))
}

/// Walks the frames of the running greenlet's parents behind its own.
#[inline(always)]
fn walk_parents() {
    let Some(state) = Scratch::state() else { return };
    // The thread's own frames may be walked twice.
    state.greenlets.begin_parents();
    let mut parents = 0;
    while parents < MAX_GREENLETS && take_greenlet() {
        parents += 1;
        if go_on_at_parent() == 0 {
            continue;
        }
        let mut calls = 0;
        let mut ended = u64::from(GOES_ON);
        while calls < PY_FRAMES_PER_PARENT / PY_FRAMES_PER_CALL && ended == u64::from(GOES_ON) {
            calls += 1;
            ended = walk_python_frames();
        }
        let Some(state) = Scratch::state() else { return };
        state.greenlets.walked(state.walk.stored, ended == StopReason::Complete as u64);
    }
    let Some(state) = Scratch::state() else { return };
    if state.greenlets.more != 0 {
        state.whose.flags |= flags::MORE_GREENLETS;
    }
}

/// Takes down the task that the thread runs, and tells the walk the frame of its coroutine. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn read_task() -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    state.whose.task = Task::NONE;
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
    state.whose.task = Task::NONE;
    let dict = state.process.current_tasks;
    state.task_reader.begin();
    opaque::place(&mut state.current).begin(&CurrentProcess, asyncio, dict);
    0
}

/// [`CurrentTasks::look`](walk::CurrentTasks::look): 1 or 0. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_current() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    let current = opaque::place(&mut state.current);
    u64::from(current.look(&CurrentProcess, layout, asyncio, &mut state.task_reader, &mut state.walk.tasks))
}

/// Takes down the one of them whose frame the walk has met: so this thread runs it. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn take_current() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    state.whose.flags &= !flags::TASK;
    let met = if state.walk.stored == 0 { 0 } else { state.walk.task_met };
    let (current, whose) = (opaque::place(&mut state.current), &mut state.whose);
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
    0
}

/// [`Awaiting::find`](walk::Awaiting::find): 1 or 0. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn find_awaiting() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    let found = opaque::place(&mut state.awaiting).find(&CurrentProcess, asyncio, &mut state.task_reader);
    found.map_or(0, |set| u64::from(set) + 1)
}

/// [`Awaiting::look`](walk::Awaiting::look), likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_awaiting() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    u64::from(opaque::place(&mut state.awaiting).look(&CurrentProcess))
}

/// [`Awaiting::take`](walk::Awaiting::take), likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn take_awaiting() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    let (awaiting, running) = (opaque::place(&mut state.awaiting), &mut state.whose.task);
    u64::from(awaiting.take(&CurrentProcess, layout, asyncio, &mut state.task_reader, running, state.walk.stored))
}

/// [`Awaiting::coroutine`](walk::Awaiting::coroutine), likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_coroutine() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let Some(asyncio) = ASYNCIO.get(u32::from(state.process.asyncio)) else { return 0 };
    u64::from(opaque::place(&mut state.awaiting).coroutine(&CurrentProcess, layout, asyncio, &mut state.task_reader))
}

/// Puts the walk at the next coroutine's frame, if there is one, likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn go_on_at_coroutine() -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    let frame = opaque::place(&mut state.awaiting).frame();
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

/// Walks the frames of the running greenlet's parents behind the thread's own, and then the coroutines of those that await the running
/// task; a stage of its own.
#[inline(always)]
pub fn walk_awaiting<C: Interrupt>(ctx: &C) {
    let Some(state) = Scratch::state() else { return };
    keep_entry(state);
    if state.whose.flags & flags::GREENLET != 0 && config!(flags) & config_flags::NO_GREENLETS == 0 {
        walk_parents();
    }
    let Some(state) = Scratch::state() else { return };
    if current_tasks(state) != 0 {
        take_current();
    } else if state.whose.flags & flags::TASK != 0 && config!(flags) & config_flags::NO_TASKS == 0 {
        walk_tasks();
    }
    let Some(mut scratch) = Scratch::get() else { return };
    sample::to_holder(ctx, &mut scratch);
}

/// The walk of other frames forgets where this thread's evaluator was entered, which the native stack is asked for.
#[inline(always)]
fn keep_entry(state: &mut State) {
    if state.entered_at == 0 {
        state.entered_at = state.walk.entry_frame;
    }
}

/// Walks those that await the running task.
#[inline(always)]
fn walk_tasks() {
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
    let Some(state) = Scratch::state() else { return };
    state.whose.awaiting = state.awaiting.found as u16;
    if state.awaiting.more != 0 {
        state.whose.flags |= flags::MORE_AWAITING;
    }
}

/// Puts it behind what the record has so far, `at` bytes, and gives the length of all. A global function: it is verified once.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn append_whose(at: u64) -> u64 {
    let appended = append_own(at);
    let mut at = at + (appended & 0xff);
    let neither = config!(flags) & config_flags::NEITHER == config_flags::NEITHER;
    let (mut tasks, count) = (0, if neither { 0 } else { appended >> 8 & 0xff });
    while tasks < MOST_TASKS && tasks < count {
        let task = append_task(at, tasks);
        if task == 0 {
            break;
        }
        at += task;
        tasks += 1;
    }
    at
}

/// Greenlets and tasks of one record.
const MOST_TASKS: u64 = (MAX_GREENLETS + MAX_AWAITING) as u64;

/// The same, without greenlets and those that await: how many those are follows from the ninth bit on.
#[inline(always)]
fn append_own(at: u64) -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let at = masked::<0x7ff8>(at as usize);
    if at > SCRATCH_BYTES - size_of::<Whose>() {
        return 0;
    }
    sample.record.whose = 1;
    if state.whose.flags & flags::GREENLET != 0 {
        state.whose.greenlets = state.greenlets.found as u16;
    }
    // SAFETY: `at` is inside the scratch value.
    let to = unsafe { (&raw mut *sample).cast::<u8>().add(at) };
    if state.whose.flags & flags::TASK != 0 {
        state.whose.task.frames = state.walk.task_frames as u16;
        // SAFETY: as many bytes are left of it.
        unsafe { to.cast::<Whose>().write(state.whose) };
    } else {
        let head = (&raw const state.whose).cast::<[u64; Whose::HEAD / 8]>();
        // SAFETY: it begins with so many words, and as many bytes are left.
        unsafe { to.cast::<[u64; Whose::HEAD / 8]>().copy_from_nonoverlapping(head, 1) };
    }
    let bytes = Whose::bytes(state.whose.flags) as u64;
    bytes | u64::from((state.whose.greenlets + state.whose.awaiting) & 0xff) << 8
}

/// One of those, greenlets first, if there are so many; gives its length in bytes, or 0. Likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn append_task(at: u64, number: u64) -> u64 {
    const BYTES: usize = size_of::<Task>();
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let (at, number) = (masked::<0x7ff8>(at as usize), masked::<0xff>(number as usize));
    if at > SCRATCH_BYTES - BYTES {
        return 0;
    }
    let greenlets = usize::from(state.whose.greenlets);
    let (tasks, number) = if number < greenlets {
        (state.greenlets.greenlets.as_ptr(), number)
    } else {
        (state.awaiting.tasks.as_ptr(), number - greenlets)
    };
    const { assert!(MAX_GREENLETS == MAX_AWAITING) };
    // SAFETY: the number is masked to those of both arrays.
    let task = unsafe { tasks.add(masked::<{ MAX_AWAITING as u32 - 1 }>(number)) };
    // SAFETY: `at` is inside the scratch value.
    let to = unsafe { (&raw mut *sample).cast::<u8>().add(at) };
    // SAFETY: a task of its array; as many bytes are left of the scratch value.
    unsafe { to.cast::<Task>().copy_from_nonoverlapping(task, 1) };
    BYTES as u64
}
