//! Who wakes a thread; and when, where the kernel does not count for how long it is ready to run then.

use super::{counts_for_nothing, is_unwatched, now, record, threads};
use crate::kernel::{KernelPtr, UserRegs, arm64};
use crate::maps::{WAIT_WAKES, WAITING, config};
use crate::{sample, thread, verdicts};
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::programs::RawTracePointContext;
use tachyon_common::config::{flags as config_flags, machine};
use tachyon_common::wait::BY_INTERRUPT;

/// A thread that is woken is ready to run only once it is in a CPU's queue, which may have to wake first; nanoseconds that this takes, and
/// more. A tick until then is one of the wait that its waker ends.
const UNTIL_QUEUED: u64 = 200_000;

/// Somebody wakes a thread.
#[inline(always)]
pub fn on_wake(ctx: &RawTracePointContext) {
    let task: u64 = ctx.arg(0);
    if is_unwatched(task, verdicts::changes()) {
        return;
    }
    // The kernel holds the thread's `pi_lock`, so it is woken by one at a time.
    let Some(seen) = threads::find(task) else { return };
    // A thread that has not left its CPU yet goes on, or notes itself that it was ready to run.
    if seen.left_ns == 0 || seen.state == 0 || seen.woken_ns != 0 {
        return;
    }
    let now = now();
    // Of a wait that counts for nothing nobody asks who ended it.
    let counts = !counts_for_nothing(seen, now.wrapping_add(UNTIL_QUEUED));
    if counts {
        seen.waker = waker();
    }
    // SAFETY: a field of a live map value.
    unsafe { core::ptr::write_volatile(&raw mut seen.woken_ns, now) };
    let by_thread = counts && seen.waker != 0 && seen.waker != BY_INTERRUPT;
    if by_thread && config!(flags) & config_flags::WAKERS != 0 {
        let Some(waiting) = WAITING.get_ptr_mut(WAIT_WAKES) else { return };
        // SAFETY: this CPU's value.
        let waiting = unsafe { &mut *waiting };
        waiting.bank = sample::bank();
        (waiting.facts.left_ns, waiting.facts.waker) = (seen.left_ns, seen.tid);
        record::make(ctx, WAIT_WAKES);
    }
}

/// The thread that does it; [`BY_INTERRUPT`] where it only happened to run.
#[inline(always)]
fn waker() -> u32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    let task = KernelPtr::current_task();
    if pid_tgid == 0 || is_interrupt(task) {
        return BY_INTERRUPT;
    }
    thread::own_tid(task, pid_tgid)
}

/// Bits of `preempt_count()`: an interrupt or an NMI is being served (`include/linux/preempt.h`: 4 bits from 16 on, and 4 more).
const IN_INTERRUPT: u32 = 0x00ff_0000;
/// A softirq is (`SOFTIRQ_OFFSET`).
const IN_SOFTIRQ: u32 = 0x100;

/// Whether the thread that runs has no part in what happens now. A softirq is its doing where it came from the thread's own system
/// call: what is sent to a socket of the same machine arrives there. Where the kernel does not tell whether an interrupt is being
/// served, a thread in a system call is taken for the one that wakes.
#[inline(always)]
fn is_interrupt(task: KernelPtr) -> bool {
    let count = if config!(preempt_count) == 0 { IN_SOFTIRQ } else { preempt_count(task) };
    if count & IN_INTERRUPT != 0 {
        return true;
    }
    count & IN_SOFTIRQ != 0 && !is_in_call(task)
}

/// `preempt_count()`: of arm64 in the task, of x86-64 among the CPU's own variables, whose run queue the task leads to.
#[inline(always)]
fn preempt_count(task: KernelPtr) -> u32 {
    if config!(machine) == machine::ARM64 {
        return task.read(config!(preempt_count));
    }
    let queue = task.follow(config!(task_cfs_rq)).follow(config!(cfs_rq_rq));
    // Both are variables of the CPU: they are this far apart on each.
    KernelPtr(queue.0.wrapping_add(i64::from(config!(preempt_count) as i32) as u64)).read(0)
}

/// Whether a thread is in a system call.
#[inline(always)]
fn is_in_call(task: KernelPtr) -> bool {
    if config!(machine) == machine::ARM64 {
        return UserRegs::saved_at_arm64(task).is_some_and(|regs| regs.read::<u32>(arm64::SYSCALL) as i32 >= 0);
    }
    // `struct pt_regs`: orig_ax 120.
    UserRegs::saved_at(task).is_some_and(|regs| regs.read::<u64>(120) as i64 >= 0)
}
