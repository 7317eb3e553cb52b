//! One perf event -> one record.

use crate::emit::emit;
use crate::kernel::{KernelPtr, UserRegs};
use crate::lifecycle;
use crate::maps::{
    COUNTERS, FRAME_SLOTS, GOES_ON, LAYOUTS, PROCESSES, SAMPLE, STAGE_NAME, STAGE_NATIVE, STAGE_SEARCH, STAGE_WALK,
    STAGES, STATE, SampleScratch, State, config, repair,
};
use crate::memory::{CurrentProcess, masked};
use crate::names::{self, Codes, Named};
use crate::native;
use crate::thread;
use crate::verdicts;
use aya_ebpf::helpers::generated::{bpf_get_smp_processor_id, bpf_ktime_get_ns};
use aya_ebpf::helpers::{bpf_get_current_comm, bpf_get_current_pid_tgid};
use aya_ebpf::programs::PerfEventContext;
use tachyon_common::config::flags as config_flags;
use tachyon_common::event::{Counters, RawFrame, RecordHeader, SampleRecord, frame, kind, status};
use tachyon_common::layout::Layout;
use tachyon_common::limits::{
    CODES_PER_STEP, MAX_TAIL_CALLS, MAX_THREAD_STEPS, PY_FRAMES_PER_CALL, PY_FRAMES_PER_STEP, THREADS_PER_STEP,
};
use tachyon_common::process::{ProcessEntry, flags as process_flags};
use tachyon_common::stop::{LossCause, StopReason};
use tachyon_common::walk::{self, CodeIdentity, Found, FrameSink, FrameWalk, ThreadPointer, ThreadSearch};

/// The scratch values of this CPU and the counters, all behind checked lookups.
pub struct Scratch {
    pub counters: &'static mut Counters,
    pub sample: &'static mut SampleScratch,
    pub state: &'static mut State,
}

impl Scratch {
    #[inline(always)]
    pub fn get() -> Option<Self> {
        let counters = COUNTERS.get_ptr_mut(0)?;
        let sample = SAMPLE.get_ptr_mut(0)?;
        let state = STATE.get_ptr_mut(0)?;
        Some(Self {
            // SAFETY: this CPU's value; the kernel never nests perf programs on a CPU (`bpf_prog_active`).
            counters: unsafe { &mut *counters },
            // SAFETY: as above.
            sample: unsafe { &mut *sample },
            // SAFETY: as above.
            state: unsafe { &mut *state },
        })
    }
}

/// Counts a run that left no sample.
#[inline(always)]
pub fn lose(counters: &mut Counters, cause: LossCause) {
    counters.loss[cause as usize] += 1;
}

/// Counts, filters, identifies; the first stage.
#[inline(always)]
pub fn on_sample(ctx: &PerfEventContext) {
    let Some(counters) = COUNTERS.get_ptr_mut(0) else { return };
    // SAFETY: this CPU's value, see `Scratch::get`.
    let counters = unsafe { &mut *counters };
    counters.ran += 1;
    let pid_tgid = bpf_get_current_pid_tgid();
    if pid_tgid == 0 {
        counters.idle += 1;
        return;
    }
    let tgid = thread::own_tgid(pid_tgid);
    let changes = verdicts::changes();
    match verdicts::recall(changes, tgid) {
        verdicts::FILTERED => {
            counters.filtered += 1;
            return;
        }
        verdicts::NOT_PYTHON => {
            counters.not_python += 1;
            return;
        }
        _ => {}
    }
    let Some(process) = PROCESSES.get_ptr_mut(&tgid) else {
        if tgid == 0 || config!(flags) & config_flags::ALL_PYTHON == 0 {
            counters.filtered += 1;
            verdicts::remember(changes, tgid, verdicts::FILTERED);
        } else {
            lose(counters, LossCause::UnknownProcess);
            lifecycle::tell_unknown(tgid);
        }
        return;
    };
    // SAFETY: a live map value: entries are preallocated, and one that is deleted now is reused at worst, which the
    // copy below cannot tell from having come a moment later.
    let process: &mut ProcessEntry = unsafe { &mut *process };
    let flags = process.flags;
    if flags & process_flags::SELECTED == 0 {
        counters.filtered += 1;
        verdicts::remember(changes, tgid, verdicts::FILTERED);
        return;
    }
    if flags & process_flags::NOT_PYTHON != 0 {
        counters.not_python += 1;
        verdicts::remember(changes, tgid, verdicts::NOT_PYTHON);
        return;
    }
    if flags & process_flags::EXITED != 0 {
        lose(counters, LossCause::ProcessGone);
        process.after_exit += 1;
        return;
    }
    if flags & process_flags::PYTHON == 0 {
        lose(counters, LossCause::Uninspected);
        process.uninspected += 1;
        return;
    }
    let task = KernelPtr::current_task();
    let tid = thread::own_tid(task, pid_tgid);
    if tid == 0 {
        // A thread in its last moments, when its id has been taken from it.
        lose(counters, LossCause::ProcessGone);
        return;
    }
    let (Some(sample), Some(state)) = (SAMPLE.get_ptr_mut(0), STATE.get_ptr_mut(0)) else {
        lose(counters, LossCause::Internal);
        return;
    };
    // SAFETY: this CPU's values, see `Scratch::get`.
    let mut scratch = Scratch { counters, sample: unsafe { &mut *sample }, state: unsafe { &mut *state } };
    begin(ctx, &mut scratch, process, task, (tgid, tid));
}

/// Fills the record's head and finds the thread state.
#[inline(always)]
fn begin(
    ctx: &PerfEventContext,
    scratch: &mut Scratch,
    process: &mut ProcessEntry,
    task: KernelPtr,
    (tgid, tid): (u32, u32),
) {
    let regs = UserRegs::of(ctx, task);
    let state = &mut *scratch.state;
    state.process = *process;
    state.tail_calls = 0;
    state.thread_steps = 0;
    state.codes.clear();
    state.native_at = 0;
    state.evaluators = 0;
    state.repair = repair::NONE;
    state.walk = FrameWalk::default();
    state.thread_pointer = ThreadPointer {
        address: task.read(config!(task_thread_pointer)),
        reach: u64::from(config!(thread_pointer_reach)),
    };
    // SAFETY: the helper takes nothing and cannot fail.
    let ktime_ns = unsafe { bpf_ktime_get_ns() };
    // SAFETY: as above.
    let cpu = unsafe { bpf_get_smp_processor_id() } as u32;
    let comm = bpf_get_current_comm().unwrap_or_default();
    scratch.sample.record = SampleRecord {
        header: RecordHeader { kind: kind::SAMPLE, flags: 0, len: 0 },
        ktime_ns,
        image: process.image,
        instance: process.instance,
        tstate: 0,
        interp_id: -1,
        code_generation: 0,
        user_ip: regs.ip,
        user_sp: regs.sp,
        user_fp: regs.fp,
        tgid,
        tid,
        ns_tid: thread::innermost_tid(task, process, tid),
        cpu,
        status: status::ON_CPU | if regs.in_kernel { status::IN_KERNEL } else { 0 },
        stop: StopReason::Complete as u8,
        native_stop: StopReason::Complete as u8,
        root_shims: 0,
        _pad: 0,
        python_frames: 0,
        native_frames: 0,
        kernel_frames: 0,
        tail_calls: 0,
        comm,
        layout: process.layout,
        _reserved: 0,
    };
    let Some(layout) = LAYOUTS.get(state.process.layout) else {
        lose(scratch.counters, LossCause::Internal);
        return;
    };
    if state.thread_pointer.address == 0 {
        // Before the dynamic linker has set one up.
        return stop(ctx, scratch, StopReason::RuntimeNotInitialized);
    }
    let token = thread::token(layout, &state.process);
    let (wanted, thread) = (state.thread_pointer, &mut state.thread_buffer);
    if let Some(tstate) = thread::remembered(layout, &state.process, tid, wanted, token, thread) {
        return enter(ctx, scratch, layout, tstate);
    }
    match ThreadSearch::start(&CurrentProcess, layout, &state.process, state.thread_pointer) {
        Ok(search) => {
            state.search = search;
            thread::resume(&mut state.search, layout, &state.process, tid, token);
        }
        Err(reason) => return stop(ctx, scratch, reason),
    }
    go_on(ctx, scratch, STAGE_SEARCH);
    lose(scratch.counters, LossCause::Internal);
}

/// Tail-calls the next stage; comes back only when the kernel refuses.
#[inline(always)]
fn go_on(ctx: &PerfEventContext, scratch: &mut Scratch, stage: u32) {
    scratch.state.tail_calls += 1;
    if scratch.state.tail_calls <= MAX_TAIL_CALLS {
        // SAFETY: nothing here has a destructor, and all state lies in maps.
        unsafe { STAGES.tail_call(ctx, stage) };
    }
}

/// Looks at one thread state of the list: gives one of [`search`], or the number of the reason why the search has ended.
/// A global function, as [`walk_python_frames`] is.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn look_at_thread() -> u64 {
    let Some(Scratch { state, .. }) = Scratch::get() else { return search::GOES_ON };
    let Some(layout) = LAYOUTS.get(state.process.layout) else { return search::GOES_ON };
    match state.search.look(&CurrentProcess, layout) {
        Found::More => search::GOES_ON,
        Found::State { tstate, unique } => {
            state.found = tstate;
            if unique { search::UNIQUE } else { search::FOUND }
        }
        Found::Stop(reason) => reason as u64,
    }
}

/// What [`look_at_thread`] gives: no reason has these numbers.
mod search {
    /// There is more to look at.
    pub const GOES_ON: u64 = super::GOES_ON as u64;
    /// The thread's state is [`super::State::found`].
    pub const FOUND: u64 = GOES_ON + 1;
    /// It is, and it may be remembered.
    pub const UNIQUE: u64 = GOES_ON + 2;
}

/// Searches the thread list; the second stage on a miss of the cache.
#[inline(always)]
pub fn search_threads(ctx: &PerfEventContext) {
    let mut steps = 0;
    let mut found = search::GOES_ON;
    while steps < THREADS_PER_STEP && found == search::GOES_ON {
        steps += 1;
        found = look_at_thread();
    }
    let Some(mut scratch) = Scratch::get() else { return };
    let state = &mut *scratch.state;
    let Some(layout) = LAYOUTS.get(state.process.layout) else {
        lose(scratch.counters, LossCause::Internal);
        return;
    };
    let tid = scratch.sample.record.tid;
    if found == search::GOES_ON {
        state.thread_steps += 1;
        if state.thread_steps < MAX_THREAD_STEPS {
            go_on(ctx, &mut scratch, STAGE_SEARCH);
        }
        let state = &mut *scratch.state;
        let token = thread::token(layout, &state.process);
        thread::break_off(&state.search, &state.process, tid, token);
        return stop(ctx, &mut scratch, StopReason::ThreadListTooLong);
    }
    if found != search::FOUND && found != search::UNIQUE {
        thread::start_over(&state.process, tid);
        return stopped(ctx, &mut scratch, found as u8);
    }
    let tstate = state.found;
    if found == search::UNIQUE {
        let token = thread::token(layout, &state.process);
        thread::remember(&state.process, tid, token, tstate);
    }
    if walk::read_thread(&CurrentProcess, layout, tstate, &mut state.thread_buffer).is_err() {
        return stop(ctx, &mut scratch, StopReason::UnreadableThread);
    }
    enter(ctx, &mut scratch, layout, tstate);
}

/// Takes down the thread's state, which has been copied, and starts the walk.
#[inline(always)]
fn enter(ctx: &PerfEventContext, scratch: &mut Scratch, layout: &Layout, tstate: u64) {
    let state = &mut *scratch.state;
    let record = &mut scratch.sample.record;
    let (thread, interp) = (&state.thread_buffer, &mut state.interp_buffer);
    let facts = walk::thread_facts(&CurrentProcess, layout, &state.process, tstate, thread, interp);
    record.tstate = tstate;
    record.status |= facts.status;
    record.interp_id = facts.interp_id;
    record.code_generation = facts.code_generation;
    state.codes.enter(layout, &state.process, facts.interp_id, facts.code_generation);
    if config!(flags) & config_flags::GIL_ONLY != 0 && record.status & status::HAS_GIL == 0 {
        scratch.counters.filtered += 1;
        return;
    }
    let ip = record.user_ip;
    if ip >= state.process.entering_start && ip < state.process.entering_end {
        if state.process.cframe_offset != 0 {
            state.repair = repair::WANTED;
        }
        return stop(ctx, scratch, StopReason::EnteringEval);
    }
    match walk::innermost_frame(&CurrentProcess, layout, &state.thread_buffer) {
        Ok(frame) => state.walk.next = frame,
        Err(reason) => return stop(ctx, scratch, reason),
    }
    state.walk.gc_frame = facts.gc_frame;
    // The numbers of 3.15's opcodes are those that the readers of the format know.
    if config!(flags) & config_flags::OPCODES != 0 && layout.version_hex >= 0x030f_0000 {
        state.walk.opcodes = 1;
    }
    if Layout::present(layout.tstate_base_frame) {
        state.walk.base_frame = state.thread_buffer.u64(layout.tstate_base_frame);
    }
    go_on(ctx, scratch, STAGE_WALK);
    stop(ctx, scratch, StopReason::TailCallFailed);
}

/// Puts frames into the sample and remembers which code objects are new.
struct SampleFrames<'a> {
    frames: *mut RawFrame,
    image: u64,
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
        let _zero = self.codes.look_up(code, identity);
        core::hint::black_box(&mut *self.codes).known != 0
    }

    #[inline(always)]
    fn store(&mut self, index: usize, raw: RawFrame, identity: &CodeIdentity) {
        let slot = self.slot(index);
        // SAFETY: `slot` is inside the scratch value.
        unsafe { slot.write(raw) };
        if self.codes.known == 0 {
            // SAFETY: as above.
            let _zero = self.codes.note(self.image, index, unsafe { &*slot }, identity);
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
    let Some(Scratch { state, sample, .. }) = Scratch::get() else { return u64::from(GOES_ON) };
    let Some(layout) = LAYOUTS.get(state.process.layout) else { return u64::from(GOES_ON) };
    let mut frames =
        SampleFrames { frames: sample.frames.as_mut_ptr(), image: state.process.image, codes: &mut state.codes };
    let mut ended = None;
    let mut looks = 0;
    while looks < PY_FRAMES_PER_CALL && ended.is_none() {
        looks += 1;
        ended = core::hint::black_box(&mut state.walk).frame(
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

/// Walks a part of the frame chain; the third stage.
#[inline(always)]
pub fn walk_frames(ctx: &PerfEventContext) {
    let mut steps = 0;
    let mut ended = u64::from(GOES_ON);
    while steps < PY_FRAMES_PER_STEP / PY_FRAMES_PER_CALL && ended == u64::from(GOES_ON) {
        steps += 1;
        ended = walk_python_frames();
    }
    let Some(mut scratch) = Scratch::get() else { return };
    if ended == u64::from(GOES_ON) {
        go_on(ctx, &mut scratch, STAGE_WALK);
        return stop(ctx, &mut scratch, StopReason::TailCallFailed);
    }
    stopped(ctx, &mut scratch, ended as u8);
}

/// Walks a part of the native stack; the fourth stage, only when native frames are wanted.
#[inline(always)]
pub fn walk_native(ctx: &PerfEventContext) {
    let begun = native::begin(ctx);
    let mut ended = if begun == u64::from(GOES_ON) { native::step() } else { begun };
    let Some(mut scratch) = Scratch::get() else { return };
    scratch.sample.record.native_frames = scratch.state.native.stored as u16;
    if scratch.state.native.by_frame_pointer > 0 {
        scratch.sample.record.status |= status::BY_FRAME_POINTER;
    }
    if ended == u64::from(GOES_ON) {
        go_on(ctx, &mut scratch, STAGE_NATIVE);
        ended = StopReason::TailCallFailed as u64;
    }
    scratch.sample.record.native_stop = ended as u8;
    walk_callers(ctx, &mut scratch);
    name(ctx, &mut scratch);
}

/// Most tail calls that a sample may have taken before it is repaired: up to 10 more for Python's frames, and the native
/// stack is walked once more.
const MOST_BEFORE_REPAIR: u32 = 8;

/// Goes back to the Python frames when the thread was entering the evaluator and the native stack has led to the
/// evaluator that it was called from: that one's `cframe` is filled. Comes back when there is nothing to go back for.
#[inline(always)]
fn walk_callers(ctx: &PerfEventContext, scratch: &mut Scratch) {
    let state = &mut *scratch.state;
    let found = state.repair == repair::WANTED && state.evaluators == 2;
    if !found || state.tail_calls > MOST_BEFORE_REPAIR {
        return;
    }
    let Some(layout) = LAYOUTS.get(state.process.layout) else { return };
    let cframe = state.caller_sp.wrapping_add(u64::from(state.process.cframe_offset));
    let Ok(frame) = walk::read_u64(&CurrentProcess, cframe, layout.cframe_current_frame) else { return };
    if frame == 0 {
        return;
    }
    state.walk = FrameWalk::start(frame);
    state.repair = repair::WALKING;
    // The addresses lie where the frames go: they are walked again behind those.
    state.native_at = 0;
    scratch.sample.record.native_frames = 0;
    go_on(ctx, scratch, STAGE_WALK);
    scratch.sample.record.native_stop = StopReason::TailCallFailed as u8;
}

/// Sends the next record of the code objects seen for the first time, and gives one of [`named`]. A global function, as
/// [`walk_python_frames`] is.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn name_code() -> u64 {
    let Some(Scratch { state, sample, counters }) = Scratch::get() else { return named::ALL };
    let Some(layout) = LAYOUTS.get(state.process.layout) else { return named::ALL };
    let Some(index) = state.codes.next() else { return named::ALL };
    // SAFETY: masked to a slot of the array.
    let raw = unsafe { sample.frames.as_ptr().add(masked::<{ FRAME_SLOTS as u32 - 1 }>(index)).read() };
    match names::send(state, layout, sample.record.tgid, &raw) {
        Named::Done => state.codes.pending_next += 1,
        Named::Partly => {}
        Named::RingFull => {
            counters.code_ring_full += 1;
            return named::RING_FULL;
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
    /// The ring is full: the others are tried with another sample.
    pub const RING_FULL: u64 = 2;
}

/// Sends code objects seen for the first time; the last stage, only when there are any.
#[inline(always)]
pub fn name_codes(ctx: &PerfEventContext) {
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

/// Ends the walk of Python frames for a reason and goes on to the native stack.
#[inline(always)]
fn stop(ctx: &PerfEventContext, scratch: &mut Scratch, reason: StopReason) {
    stopped(ctx, scratch, reason as u8);
}

/// The same, for the number of a reason.
#[inline(always)]
fn stopped(ctx: &PerfEventContext, scratch: &mut Scratch, reason: u8) {
    scratch.sample.record.stop = reason;
    if scratch.state.repair == repair::WALKING {
        scratch.sample.record.stop = StopReason::EnteringEval as u8;
        if reason == StopReason::Complete as u8 {
            scratch.sample.record.status |= status::CALLERS;
        } else {
            // Whatever lay there was no `cframe`.
            scratch.state.walk.stored = 0;
            scratch.state.codes.pending_count = 0;
        }
    }
    if config!(flags) & config_flags::NATIVE != 0 {
        go_on(ctx, scratch, STAGE_NATIVE);
        scratch.sample.record.native_stop = StopReason::TailCallFailed as u8;
    }
    name(ctx, scratch);
}

/// Goes on to new code objects, if there are any, and emits what there is.
#[inline(always)]
fn name(ctx: &PerfEventContext, scratch: &mut Scratch) {
    if scratch.state.codes.pending_count > 0 {
        go_on(ctx, scratch, STAGE_NAME);
    }
    emit(ctx, scratch);
}
