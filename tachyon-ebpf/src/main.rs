//! The kernel side: entry points only.
//!
//! Five perf-event programs make one sample (a sixth where the tasks that await the running one are wanted), each tail-calling the next; four raw tracepoints keep the process
//! table. Ten more, loaded only where waits are wanted, find the waits that count and walk the stacks of those; where events are chosen
//! (`--event`), one program for each event leads to the same five, or to five more where it is a tracepoint. What they agree on with user space is in `tachyon-common`, where the walk itself lives too.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]
// The entry points have comments; aya's macros leave them out of what they make.
#![allow(missing_docs)]

#[cfg(feature = "log")]
mod diagnostics;
mod emit;
mod interrupt;
mod kernel;
mod layouts;
mod lifecycle;
mod maps;
mod memory;
mod names;
mod native;
mod sample;
mod stack;
mod thread;
mod verdicts;
mod wall;
mod whose;

use aya_ebpf::{
    macros::{perf_event, raw_tracepoint, tracepoint},
    programs::{PerfEventContext, RawTracePointContext, TracePointContext},
};

/// Fires at the sampling rate on every CPU: counts, filters, finds the thread state; goes on to [`search_threads`] or
/// [`walk_frames`].
#[perf_event]
pub fn on_sample(ctx: PerfEventContext) -> u32 {
    sample::on_sample(&ctx);
    0
}

/// Tail-called while the thread list is searched; goes on to itself or [`walk_frames`].
#[perf_event]
pub fn search_threads(ctx: PerfEventContext) -> u32 {
    sample::search_threads(&ctx);
    0
}

/// Tail-called to walk frames; goes on to itself, to [`walk_native`], to [`name_codes`], or emits the sample.
#[perf_event]
pub fn walk_frames(ctx: PerfEventContext) -> u32 {
    sample::walk_frames(&ctx);
    0
}

/// Tail-called to walk the native stack, when that is wanted; goes on to itself, to [`name_codes`], or emits the sample.
#[perf_event]
pub fn walk_native(ctx: PerfEventContext) -> u32 {
    sample::walk_native(&ctx);
    0
}

/// Tail-called to emit code objects seen for the first time; goes on to itself, or emits the sample.
#[perf_event]
pub fn name_codes(ctx: PerfEventContext) -> u32 {
    sample::name_codes(&ctx);
    0
}

/// A process or thread was created: a child inherits its parent's entry. Emits `FORK` for wanted processes.
#[raw_tracepoint(tracepoint = "sched_process_fork")]
pub fn on_fork(ctx: RawTracePointContext) -> i32 {
    lifecycle::on_fork(&ctx);
    0
}

/// A process replaced its image: its entry starts anew. Emits `EXEC`.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn on_exec(ctx: RawTracePointContext) -> i32 {
    lifecycle::on_exec(&ctx);
    0
}

/// A thread exits; with the last one the process ends. Emits `EXIT`.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub fn on_exit(ctx: RawTracePointContext) -> i32 {
    lifecycle::on_exit(&ctx);
    0
}

/// A `task_struct` goes away: only now can its pid be used again, and its entry is removed.
#[raw_tracepoint(tracepoint = "sched_process_free")]
pub fn on_free(ctx: RawTracePointContext) -> i32 {
    lifecycle::on_free(&ctx);
    0
}

/// A CPU goes from one thread to another (`--wall`): the one that leaves is noted, the one that arrives is kicked where its wait
/// counts.
#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn on_switch(ctx: RawTracePointContext) -> i32 {
    wall::on_switch(&ctx);
    0
}

/// A thread is woken (`--wakers`, and on a kernel that does not count for how long threads are ready to run).
#[raw_tracepoint(tracepoint = "sched_waking")]
pub fn on_wake(ctx: RawTracePointContext) -> i32 {
    wall::on_wake(&ctx);
    0
}

/// The kick: fires in a thread whose wait counts, before it runs code of its own. (`ipi_entry` on arm64.)
#[raw_tracepoint(tracepoint = "irq_work_entry")]
pub fn on_kick(ctx: RawTracePointContext) -> i32 {
    wall::on_kick(&ctx);
    0
}

/// Tail-called where a wait has a record made: finds the thread state, as [`on_sample`] does.
#[raw_tracepoint]
pub fn wait_begin(ctx: RawTracePointContext) -> i32 {
    wall::begin(&ctx);
    0
}

/// Run by the loader: raises an interrupt as a wait's end does, to find out whether it is met.
#[raw_tracepoint]
pub fn try_kick(_ctx: RawTracePointContext) -> i32 {
    wall::try_kick();
    0
}

/// As [`search_threads`], after [`wait_begin`].
#[raw_tracepoint]
pub fn wait_search(ctx: RawTracePointContext) -> i32 {
    sample::search_threads(&ctx);
    0
}

/// As [`walk_frames`], after [`wait_begin`].
#[raw_tracepoint]
pub fn wait_frames(ctx: RawTracePointContext) -> i32 {
    sample::walk_frames(&ctx);
    0
}

/// As [`walk_native`], after [`wait_begin`].
#[raw_tracepoint]
pub fn wait_native(ctx: RawTracePointContext) -> i32 {
    sample::walk_native(&ctx);
    0
}

/// Tail-called after [`wait_frames`] where the thread waited for the GIL: walks the frames of the thread that held it.
#[raw_tracepoint]
pub fn wait_holder(ctx: RawTracePointContext) -> i32 {
    wall::walk_holder(&ctx);
    0
}

/// As [`name_codes`], after [`wait_begin`].
#[raw_tracepoint]
pub fn wait_codes(ctx: RawTracePointContext) -> i32 {
    sample::name_codes(&ctx);
    0
}

/// Chosen event 0 fired.
#[perf_event]
pub fn on_event_0(ctx: PerfEventContext) -> u32 {
    sample::on_event(&ctx, 0);
    0
}

/// Chosen event 1 fired.
#[perf_event]
pub fn on_event_1(ctx: PerfEventContext) -> u32 {
    sample::on_event(&ctx, 1);
    0
}

/// Chosen event 2 fired.
#[perf_event]
pub fn on_event_2(ctx: PerfEventContext) -> u32 {
    sample::on_event(&ctx, 2);
    0
}

/// Chosen event 3 fired.
#[perf_event]
pub fn on_event_3(ctx: PerfEventContext) -> u32 {
    sample::on_event(&ctx, 3);
    0
}

/// Chosen event 0, a tracepoint, was hit.
#[tracepoint]
pub fn on_trace_0(ctx: TracePointContext) -> u32 {
    sample::on_trace(&ctx, 0);
    0
}

/// Chosen event 1, a tracepoint, was hit.
#[tracepoint]
pub fn on_trace_1(ctx: TracePointContext) -> u32 {
    sample::on_trace(&ctx, 1);
    0
}

/// Chosen event 2, a tracepoint, was hit.
#[tracepoint]
pub fn on_trace_2(ctx: TracePointContext) -> u32 {
    sample::on_trace(&ctx, 2);
    0
}

/// Chosen event 3, a tracepoint, was hit.
#[tracepoint]
pub fn on_trace_3(ctx: TracePointContext) -> u32 {
    sample::on_trace(&ctx, 3);
    0
}

/// As [`on_sample`], at a tracepoint.
#[tracepoint]
pub fn trace_begin(ctx: TracePointContext) -> u32 {
    sample::on_sample(&ctx);
    0
}

/// As [`search_threads`], at a tracepoint.
#[tracepoint]
pub fn trace_search(ctx: TracePointContext) -> u32 {
    sample::search_threads(&ctx);
    0
}

/// As [`walk_frames`], at a tracepoint.
#[tracepoint]
pub fn trace_frames(ctx: TracePointContext) -> u32 {
    sample::walk_frames(&ctx);
    0
}

/// As [`walk_native`], at a tracepoint.
#[tracepoint]
pub fn trace_native(ctx: TracePointContext) -> u32 {
    sample::walk_native(&ctx);
    0
}

/// As [`name_codes`], at a tracepoint.
#[tracepoint]
pub fn trace_codes(ctx: TracePointContext) -> u32 {
    sample::name_codes(&ctx);
    0
}

/// Tail-called after [`walk_frames`] where a task runs, or a greenlet, and what leads on from it is wanted (`--async`): walks the
/// greenlet's parents, and the coroutines of the tasks that await the running one.
#[perf_event]
pub fn walk_awaiting(ctx: PerfEventContext) -> u32 {
    whose::walk_awaiting(&ctx);
    0
}

/// As [`walk_awaiting`], after [`wait_begin`].
#[raw_tracepoint]
pub fn wait_awaiting(ctx: RawTracePointContext) -> i32 {
    whose::walk_awaiting(&ctx);
    0
}

/// As [`walk_awaiting`], at a tracepoint.
#[tracepoint]
pub fn trace_awaiting(ctx: TracePointContext) -> u32 {
    whose::walk_awaiting(&ctx);
    0
}

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The helpers used need a GPL-compatible object.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
