//! One perf event -> one record.

mod codes;
mod end;
mod frames;
mod search;

pub use codes::name_codes;
pub use end::{to_holder, to_native};
pub use frames::{walk_frames, walk_python_frames};
pub use search::search_threads;

use crate::interrupt::Interrupt;
use crate::kernel::KernelPtr;
use crate::layouts::layout_of;
use crate::lifecycle;
use crate::maps::{
    COUNTERS, ENTRIES, GOES_ON, PROCESSES, SAMPLE, STAGE_BEGIN, STAGE_NAME, STAGE_NATIVE, STAGE_SEARCH, STAGE_WALK,
    STATE, STOPS, SampleScratch, State, TRACE_HITS, config, repair,
};
use crate::memory::CurrentProcess;
use crate::native;
use crate::stack;
use crate::thread;
use crate::verdicts;
use crate::whose;
use aya_ebpf::helpers::generated::{bpf_get_smp_processor_id, bpf_ktime_get_ns};
use aya_ebpf::helpers::{bpf_get_current_comm, bpf_get_current_pid_tgid};
use aya_ebpf::programs::TracePointContext;
use end::name;
use search::enter;
use tachyon_common::config::{flags as config_flags, machine};
use tachyon_common::event::{Counters, RecordHeader, SampleRecord, kind, status};
use tachyon_common::layout::{Layout, flags as layout_flags};
use tachyon_common::limits::{MAX_EVENTS, MAX_TAIL_CALLS};
use tachyon_common::process::{Life, flags as process_flags};
use tachyon_common::segment;
use tachyon_common::stop::{LossCause, StopReason};
use tachyon_common::walk::{self, FrameWalk, OwnStack, ThreadPointer, ThreadSearch};

/// The scratch values of this CPU and the counters, all behind checked lookups.
pub struct Scratch {
    pub counters: &'static mut Counters,
    pub sample: &'static mut SampleScratch,
    pub state: &'static mut State,
}

impl Scratch {
    #[inline(always)]
    pub fn get() -> Option<Self> {
        let sample = SAMPLE.get_ptr_mut(0)?;
        // SAFETY: this CPU's value, see below; a sample keeps to the bank that its run began in.
        let counters = COUNTERS.get_ptr_mut(u32::from(unsafe { (*sample).record.header.bank }))?;
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

    /// The state alone: a look-up in place of three.
    #[inline(always)]
    pub fn state() -> Option<&'static mut State> {
        let state = STATE.get_ptr_mut(0)?;
        // SAFETY: as above.
        Some(unsafe { &mut *state })
    }

    /// The sample and the state.
    #[inline(always)]
    pub fn sample_and_state() -> Option<(&'static mut SampleScratch, &'static mut State)> {
        let sample = SAMPLE.get_ptr_mut(0)?;
        // SAFETY: as above.
        Some((unsafe { &mut *sample }, Self::state()?))
    }
}

/// Counts what left no sample: a run, or the ticks of a wait.
#[inline(always)]
pub fn lose<C: Interrupt>(ctx: &C, counters: &mut Counters, cause: LossCause) {
    counters.loss[cause as usize] += ctx.weight();
}

/// A chosen event: notes which, and goes on to the first stage.
#[inline(always)]
pub fn on_event<C: Interrupt>(ctx: &C, event: u32) {
    let Some(state) = STATE.get_ptr_mut(0) else { return };
    // SAFETY: this CPU's value, see `Scratch::get`.
    unsafe { (*state).event = event };
    // SAFETY: nothing here has a destructor. A call that the kernel refuses leaves a run that only the kernel has counted.
    unsafe { ctx.stages().tail_call(ctx, STAGE_BEGIN) };
}

/// The same for a tracepoint, every hit of which runs its program, whatever its period.
#[inline(always)]
pub fn on_trace(ctx: &TracePointContext, event: u32) {
    let Some(hits) = TRACE_HITS.get_ptr_mut(event) else { return };
    // SAFETY: this CPU's value, which no other program writes.
    let hits = unsafe { &mut *hits };
    *hits += 1;
    let period = u64::from(config!(trace_periods)[event as usize % MAX_EVENTS]);
    if period <= 1 || *hits % period == 0 {
        on_event(ctx, event);
    }
}

/// Counts, filters, identifies; the first stage.
#[inline(always)]
pub fn on_sample<C: Interrupt>(ctx: &C) {
    if config!(flags) & config_flags::ONE_LAYOUT != 0 {
        // To the program that is made for all layouts, if there is one by now; as long as there is none, the kernel goes on here.
        // SAFETY: nothing here has a destructor.
        unsafe { ctx.stages().tail_call(ctx, STAGE_BEGIN) };
    }
    let bank = bank();
    let Some(counters) = COUNTERS.get_ptr_mut(bank) else { return };
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
            lose(ctx, counters, LossCause::UnknownProcess);
            lifecycle::tell_unknown(tgid);
        }
        return;
    };
    // SAFETY: a live map value: these are preallocated, and one that is deleted now is reused at worst, which cannot be told
    // from having come a moment later.
    let process: &mut Life = unsafe { &mut *process };
    let entry = ENTRIES.get_ptr(&process.entry);
    let flags = match entry {
        // SAFETY: a live map value, likewise.
        Some(entry) => unsafe { (*entry).flags },
        // Nobody has decided yet: what was inherited.
        None => process.flags,
    };
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
    if process.flags & process_flags::EXITED != 0 {
        lose(ctx, counters, LossCause::ProcessGone);
        process.after_exit += 1;
        return;
    }
    let Some(entry) = entry.filter(|_| flags & process_flags::PYTHON != 0) else {
        lose(ctx, counters, LossCause::Uninspected);
        process.uninspected += 1;
        return;
    };
    let task = KernelPtr::current_task();
    let tid = thread::own_tid(task, pid_tgid);
    if tid == 0 {
        // A thread in its last moments, when its id has been taken from it.
        lose(ctx, counters, LossCause::ProcessGone);
        return;
    }
    let (Some(sample), Some(state)) = (SAMPLE.get_ptr_mut(0), STATE.get_ptr_mut(0)) else {
        lose(ctx, counters, LossCause::Internal);
        return;
    };
    // SAFETY: this CPU's values, see `Scratch::get`.
    let mut scratch = Scratch { counters, sample: unsafe { &mut *sample }, state: unsafe { &mut *state } };
    // SAFETY: a live map value, copied.
    scratch.state.process = unsafe { *entry };
    if scratch.state.process.instance != process.instance || scratch.state.process.image != process.image {
        // Removed meanwhile, and used again: another program has begun, or the process has ended.
        lose(ctx, scratch.counters, LossCause::ProcessGone);
        return;
    }
    if config!(flags) & config_flags::ONE_LAYOUT != 0 && scratch.state.process.layout != 0 {
        // It was made known since this run began, and programs for it, too.
        lose(ctx, scratch.counters, LossCause::Uninspected);
        process.uninspected += 1;
        return;
    }
    let event = if config!(flags) & config_flags::EVENTS == 0 { 0 } else { scratch.state.event as u8 };
    scratch.sample.record.header = RecordHeader { kind: kind::SAMPLE, bank: bank as u8, event, len: 0 };
    begin(ctx, &mut scratch, process, task, (tgid, tid));
}

/// The bank of counters of a run that begins now.
#[inline(always)]
pub fn bank() -> u32 {
    segment::bank(verdicts::word(segment::SELECTED), || {
        // SAFETY: the helper takes nothing and cannot fail.
        (verdicts::word(segment::CUT_AT), unsafe { bpf_ktime_get_ns() })
    })
}

/// Fills the record's head and finds the thread state.
#[inline(always)]
pub fn begin<C: Interrupt>(
    ctx: &C,
    scratch: &mut Scratch,
    process: &mut Life,
    task: KernelPtr,
    (tgid, tid): (u32, u32),
) {
    let regs = ctx.user_regs(task);
    let state = &mut *scratch.state;
    state.thread_starts = u64::from(process.thread_starts);
    // That of a chosen event has led here, or that of the program that is made for one layout.
    let led = config!(flags) & (config_flags::EVENTS | config_flags::AFTER_ONE_LAYOUT) != 0;
    state.tail_calls = C::CALLS_BEFORE + u32::from(led);
    state.thread_steps = 0;
    state.codes.clear();
    state.code_buffer.content.refill();
    state.native_at = 0;
    state.evaluators = 0;
    (state.entered_at, state.entered) = (0, 0);
    state.repair = repair::NONE;
    state.walk = FrameWalk::default();
    state.begins = GOES_ON;
    state.whose.clear();
    state.thread_pointer = ThreadPointer {
        address: task.read(config!(task_thread_pointer)),
        reach: u64::from(config!(thread_pointer_reach)),
    };
    state.own_stack = OwnStack::of(state.thread_pointer, regs.sp);
    // SAFETY: the helper takes nothing and cannot fail.
    let ktime_ns = unsafe { bpf_ktime_get_ns() };
    // SAFETY: as above.
    let cpu = unsafe { bpf_get_smp_processor_id() } as u32;
    let comm = bpf_get_current_comm().unwrap_or_default();
    scratch.sample.record = SampleRecord {
        header: scratch.sample.record.header,
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
        whose: 0,
        python_frames: 0,
        native_frames: 0,
        kernel_frames: 0,
        tail_calls: 0,
        comm,
        layout: state.process.layout,
        entered: 0,
    };
    let next = find_state(ctx, scratch, process, tid);
    if next == next::NOTHING {
        return;
    }
    if next == next::SEARCH {
        go_on(ctx, scratch, STAGE_SEARCH);
    } else if next != next::LOST {
        go_on_to_walk(ctx, scratch, next);
    }
    lose(ctx, scratch.counters, LossCause::Internal);
}

/// Goes on to the thread's frames, or to what follows them where there is a reason why there are none: what a record needs to be sent is
/// not verified once more here. Comes back only when the kernel refuses.
#[inline(always)]
fn go_on_to_walk<C: Interrupt>(ctx: &C, scratch: &mut Scratch, next: u32) {
    if next != next::WALK {
        scratch.state.begins = STOPS | next;
    }
    go_on(ctx, scratch, STAGE_WALK);
}

/// What follows a look for the thread's state: one of these, or the number of the reason why there are no frames. (One end of each
/// program: the verifier follows all that comes after a branch twice.)
mod next {
    /// The walk of its frames.
    pub const WALK: u32 = crate::maps::GOES_ON;
    /// More of the search.
    pub const SEARCH: u32 = WALK + 1;
    /// There is to be no sample.
    pub const NOTHING: u32 = WALK + 2;
    /// What should be there is not.
    pub const LOST: u32 = WALK + 3;
}

/// Enters the thread's state if it is remembered, or begins to search for it. Gives one of [`next`], or the number of a reason.
#[inline(always)]
fn find_state<C: Interrupt>(ctx: &C, scratch: &mut Scratch, process: &Life, tid: u32) -> u32 {
    let state = &mut *scratch.state;
    let Some(layout) = layout_of(state.process.layout) else { return next::LOST };
    if state.thread_pointer.address == 0 {
        // Before the dynamic linker has set one up.
        return StopReason::RuntimeNotInitialized as u32;
    }
    if state.process.spans != 0 {
        whose::read_span();
    }
    let state = &mut *scratch.state;
    let token = thread::token(layout, &state.process, state.thread_starts);
    let (wanted, thread) = ((state.thread_pointer, state.own_stack), &mut state.thread_buffer);
    if let Some(tstate) = thread::remembered(layout, &state.process, tid, wanted, token, thread) {
        return enter(scratch, layout, tstate);
    }
    gather_evidence(ctx, layout, state);
    let forked = process.flags & process_flags::FORKED != 0;
    match ThreadSearch::start(&CurrentProcess, layout, &state.process, state.thread_pointer, state.own_stack, forked) {
        Ok(search) => {
            state.search = search;
            thread::resume(&mut state.search, layout, &state.process, tid, token);
            next::SEARCH
        }
        Err(reason) => reason as u32,
    }
}

/// Takes down what a search may ask of the thread: what its C library keeps for it, or its registers.
#[inline(always)]
fn gather_evidence<C: Interrupt>(ctx: &C, layout: &Layout, state: &mut State) {
    if Layout::present(layout.tstate_cframe) {
        return;
    }
    if layout.status_bound_gilstate != 0 {
        walk::read_slots(&CurrentProcess, layout, state.thread_pointer, &mut state.slots);
    } else if layout.has(layout_flags::FRAME_OBJECTS) {
        state.native.leaf = [0; 16];
        if config!(machine) == machine::X86_64 {
            ctx.others(&mut state.native.leaf);
        }
    }
}

/// Tail-calls the next stage; comes back only where a sample may take no more calls, or when the kernel refuses. The last call is left for
/// the native stack, at whose end a sample is sent.
#[inline(always)]
fn go_on<C: Interrupt>(ctx: &C, scratch: &mut Scratch, stage: u32) {
    let most = if stage == STAGE_NATIVE || stage == STAGE_NAME { MAX_TAIL_CALLS } else { MAX_TAIL_CALLS - 1 };
    if scratch.state.tail_calls < most {
        scratch.state.tail_calls += 1;
        // SAFETY: nothing here has a destructor, and all state lies in maps.
        unsafe { ctx.stages().tail_call(ctx, stage) };
    }
}

/// Walks a part of the native stack; the fourth stage, only when native frames are wanted.
#[inline(always)]
pub fn walk_native<C: Interrupt>(ctx: &C) {
    let begun = native::begin(ctx);
    let mut ended = if begun == u64::from(GOES_ON) { native::step() } else { begun };
    let Some(mut scratch) = Scratch::get() else { return };
    scratch.sample.record.native_frames = scratch.state.native.stored as u16;
    scratch.sample.record.entered = scratch.state.entered;
    if scratch.state.native.by_frame_pointer > 0 {
        scratch.sample.record.status |= status::BY_FRAME_POINTER;
    }
    if ended == u64::from(GOES_ON) {
        go_on(ctx, &mut scratch, STAGE_NATIVE);
        ended = StopReason::TailCallFailed as u64;
    }
    scratch.sample.record.native_stop = ended as u8;
    walk_callers(ctx, &mut scratch);
    // Of the walk that the record will have.
    if scratch.state.native.lacks_tables(u32::from(scratch.sample.record.native_stop)) {
        let _zero = stack::copy();
    }
    name(ctx, &mut scratch);
}

/// Most tail calls that a sample may have taken before it is repaired: up to 10 more for Python's frames, and the native
/// stack is walked once more.
const MOST_BEFORE_REPAIR: u32 = 8;

/// Goes back to the Python frames when the thread was entering the evaluator and the native stack has led to the
/// evaluator that it was called from: that one's `cframe` is filled. Comes back when there is nothing to go back for.
#[inline(always)]
fn walk_callers<C: Interrupt>(ctx: &C, scratch: &mut Scratch) {
    let state = &mut *scratch.state;
    let found = state.repair == repair::WANTED && state.evaluators == 2;
    if !found || state.tail_calls > MOST_BEFORE_REPAIR {
        return;
    }
    let Some(layout) = layout_of(state.process.layout) else { return };
    let cframe = state.caller_sp.wrapping_add(u64::from(state.process.cframe_offset));
    let Ok(frame) = walk::read_u64(&CurrentProcess, cframe, layout.cframe_current_frame) else { return };
    if frame == 0 {
        return;
    }
    state.walk.restart(frame);
    state.entered_at = cframe;
    state.repair = repair::WALKING;
    // The addresses lie where the frames go: they are walked again behind those.
    state.native_at = 0;
    scratch.sample.record.native_frames = 0;
    go_on(ctx, scratch, STAGE_WALK);
    scratch.sample.record.native_stop = StopReason::TailCallFailed as u8;
}
