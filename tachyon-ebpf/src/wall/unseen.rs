//! Threads that came back to a CPU without a hook: in some virtual machines the kernel does not tell of switches from the idle task.
//!
//! What such a thread waited for is not known any more: its ticks count as lost, where the thread leaves again.

use super::{counts, not_told};
use crate::kernel::KernelPtr;
use crate::maps::config;
use crate::sample;
use crate::verdicts;
use tachyon_common::wait::{self, SeenThread, method};

/// A thread leaves that, as far as is known, never came back.
#[cold]
#[inline(never)]
pub fn came_back(task: KernelPtr, seen: &mut SeenThread, now: u64) {
    // Without the kernel's word, its run is a part of its wait.
    let arrived = arrived_ns(task, now).unwrap_or(now);
    let ended = if arrived < seen.left_ns { seen.left_ns } else { arrived };
    lose(seen, ended, now);
}

/// Since when a thread has waited that leaves and that nobody has met, whose process's waits are sampled since `began_ns`; 0: it did not
/// come back since then, or the kernel does not say.
#[cold]
#[inline(never)]
pub fn left_ns(task: KernelPtr, began_ns: u64, now: u64) -> u64 {
    let came_back = arrived_ns(task, now).is_some_and(|arrived| arrived > began_ns);
    if came_back && task.read::<u64>(config!(task_start_time)) < began_ns { began_ns } else { 0 }
}

/// When the thread that leaves came to its CPU; `None`: the kernel does not say.
#[inline(always)]
fn arrived_ns(task: KernelPtr, now: u64) -> Option<u64> {
    if config!(task_last_arrival) == 0 {
        return None;
    }
    let clock: u64 = task.follow(config!(task_cfs_rq)).follow(config!(cfs_rq_rq)).read(config!(rq_clock));
    let arrived = now.wrapping_sub(clock.wrapping_sub(task.read(config!(task_last_arrival))));
    // The clocks of two CPUs are not quite one.
    Some(if arrived > now { now } else { arrived })
}

/// Counts a wait's ticks as lost, but those that user space told of.
#[inline(always)]
fn lose(seen: &mut SeenThread, ended_ns: u64, now: u64) {
    let mut began_ns = seen.left_ns;
    seen.waited_ns = seen.waited_ns.wrapping_add(ended_ns.wrapping_sub(began_ns));
    if began_ns < verdicts::word(wait::TOLD_AT) {
        began_ns = not_told(seen, began_ns, now);
    }
    let period = (verdicts::word(wait::PERIOD), seen.widening);
    let mut ticks = wait::widened_ticks(config!(seed), seen.tid, period, began_ns, ended_ns) & 0xffff_ffff;
    if verdicts::word(wait::METHOD) == method::SWITCH_OUT {
        // Those of waits that others stand for are not counted.
        ticks = if seen.chosen == 0 { 0 } else { ticks << (seen.chosen.wrapping_sub(1) & 31) };
    }
    counts(sample::bank(), |counts| {
        counts.due += ticks;
        counts.unreported += ticks;
        counts.widened += if seen.widening > 0 { ticks } else { 0 };
    });
}
