//! Waits: which of them count, and what is said of one (`docs/dev/waiting.md`).
//!
//! Each thread has one tick in each period, at a random moment of it. A wait that holds `n` ticks is a sample of weight `n`.

use crate::interrupt::Interrupt as _;
use crate::kernel::{KernelPtr, UserRegs, arm64};
use crate::maps::{
    COUNTERS, ENTRIES, KICKS, LAYOUTS, PROCESSES, SAMPLE, SCRATCH_BYTES, STATE, THREADS_SEEN, WAIT_COUNTS, WAITING,
    WAITS_TOLD, Waiting, config,
};
use crate::memory::{CurrentProcess, masked};
use crate::sample::{self, Scratch};
use crate::{thread, verdicts};
use aya_ebpf::cty::c_void;
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::helpers::generated::{
    bpf_get_smp_processor_id, bpf_ktime_get_ns, bpf_map_lookup_elem, bpf_ringbuf_output,
};
use aya_ebpf::programs::RawTracePointContext;
use core::ptr::NonNull;
use tachyon_common::config::machine;
use tachyon_common::event::{RecordHeader, WaitCounters, WaitFacts, kind};
use tachyon_common::layout::Layout;
use tachyon_common::limits::MAX_WAITS_A_SECOND;
use tachyon_common::process::flags;
use tachyon_common::segment::{CUT_AT, WAIT_BANKS};
use tachyon_common::stop::LossCause;
use tachyon_common::wait::{self, SeenThread};
use tachyon_common::walk;

/// `TASK_INTERRUPTIBLE` (`include/linux/sched.h`).
const TASK_INTERRUPTIBLE: u32 = 1;
/// `TASK_DEAD` (`include/linux/sched.h`): the thread never runs again.
const TASK_DEAD: u32 = 0x80;
/// `BPF_RB_FORCE_WAKEUP`.
const FORCE_WAKEUP: u64 = 2;

fn now() -> u64 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_ktime_get_ns() }
}

/// A CPU goes from the thread `prev`, which is still the current one, to `next`.
#[inline(always)]
pub fn on_switch(ctx: &RawTracePointContext) {
    let (preempt, prev, next): (u64, u64, u64) = (ctx.arg(0), ctx.arg(1), ctx.arg(2));
    let now = now();
    leave(KernelPtr(prev), preempt & 0xff != 0, now);
    if let Some(seen) = THREADS_SEEN.get_ptr_mut(&next) {
        // SAFETY: a live map value of a thread that this CPU alone switches.
        arrive(next, unsafe { &mut *seen }, now);
    } else {
        arrive_first(KernelPtr(next), now);
    }
}

/// A thread that was asleep when the recording of waits began has been switched by nobody: it waited since then.
#[inline(always)]
fn arrive_first(task: KernelPtr, now: u64) {
    // SAFETY: a live map value that nobody changes.
    let Some(began_ns) = THREADS_SEEN.get_ptr(&wait::BEGAN).map(|began| unsafe { (*began).left_ns }) else { return };
    // One that is new waited for its first turn alone.
    let pid: u32 = task.read(config!(task_pid));
    if pid == 0 || task.read::<u64>(config!(task_start_time)) >= began_ns || !is_recorded(thread::tgid(task)) {
        return;
    }
    let tid = thread::tid(task);
    let seen = SeenThread { left_ns: began_ns, tid, state: TASK_INTERRUPTIBLE | wait::NOT_SEEN, told_ns: 0 };
    if tid == 0 || THREADS_SEEN.insert(&task.0, &seen, 0).is_err() {
        counts(sample::bank(), |counts| counts.threads_without_room += 1);
        return;
    }
    if let Some(seen) = THREADS_SEEN.get_ptr_mut(&task.0) {
        // SAFETY: a live map value of a thread that this CPU alone switches.
        arrive(task.0, unsafe { &mut *seen }, now);
    }
}

/// Notes since when a thread waits.
#[inline(always)]
fn leave(task: KernelPtr, preempted: bool, now: u64) {
    let pid_tgid = bpf_get_current_pid_tgid();
    if pid_tgid == 0 {
        return;
    }
    if let Some(seen) = THREADS_SEEN.get_ptr_mut(&task.0) {
        let state: u32 = task.read(config!(task_state));
        if state & TASK_DEAD != 0 {
            let _gone = THREADS_SEEN.remove(&task.0);
            return;
        }
        // SAFETY: a live map value of a thread that this CPU alone switches.
        let seen = unsafe { &mut *seen };
        // A thread that is preempted on its way to a wait is ready to run.
        seen.state = if preempted { 0 } else { state };
        seen.left_ns = now;
        return;
    }
    if !is_recorded(thread::own_tgid(pid_tgid)) {
        return;
    }
    let state: u32 = task.read(config!(task_state));
    let tid = thread::own_tid(task, pid_tgid);
    if state & TASK_DEAD != 0 || tid == 0 {
        return;
    }
    let seen = SeenThread { left_ns: now, tid, state: if preempted { 0 } else { state }, told_ns: 0 };
    if THREADS_SEEN.insert(&task.0, &seen, 0).is_err() {
        counts(sample::bank(), |counts| counts.threads_without_room += 1);
    }
}

/// Whether waits of a process are wanted.
#[inline(always)]
fn is_recorded(tgid: u32) -> bool {
    if verdicts::recall(verdicts::changes(), tgid) != 0 {
        return false;
    }
    let Some(life) = PROCESSES.get_ptr(&tgid) else { return false };
    // SAFETY: a live map value.
    let key = unsafe { (*life).entry };
    let Some(entry) = ENTRIES.get_ptr(&key) else { return false };
    const WANTED: u32 = flags::SELECTED | flags::PYTHON;
    // SAFETY: a live map value.
    unsafe { (*entry).flags & WANTED == WANTED }
}

#[inline(always)]
fn counts(bank: u32, count: impl FnOnce(&mut WaitCounters)) {
    if let Some(counts) = WAIT_COUNTS.get_ptr_mut(bank) {
        // SAFETY: this CPU's value; see the map for who writes it.
        count(unsafe { &mut *counts });
    }
}

/// Kicks a thread whose wait counts.
#[inline(always)]
fn arrive(task: u64, seen: &mut SeenThread, now: u64) {
    let period_ns = verdicts::word(wait::PERIOD);
    let mut began_ns = seen.left_ns;
    let mut ticks = if began_ns == 0 { 0 } else { wait::ticks(config!(seed), seen.tid, period_ns, began_ns, now) };
    if ticks > 0 && began_ns < verdicts::word(CUT_AT) {
        began_ns = not_told(seen, began_ns);
        ticks = wait::ticks(config!(seed), seen.tid, period_ns, began_ns, now);
    }
    // Last: who finds that the thread has come back finds what cut its wait short.
    // SAFETY: a field of a live map value.
    unsafe { core::ptr::write_volatile(&raw mut seen.left_ns, 0) };
    if ticks == 0 {
        return;
    }
    let bank = sample::bank();
    counts(bank, |counts| counts.due += ticks);
    let Some(waiting) = WAITING.get_ptr_mut(0) else { return };
    // SAFETY: this CPU's value.
    let waiting = unsafe { &mut *waiting };
    if waiting.task != 0 {
        // The kick before this one did not come in time.
        let lost = u64::from(waiting.facts.weight);
        counts(waiting.bank, |counts| counts.not_met += lost);
        waiting.task = 0;
    }
    if is_too_much(waiting, now) {
        counts(bank, |counts| counts.too_many += ticks);
        return;
    }
    waiting.bank = bank;
    waiting.facts.began_ns = began_ns;
    waiting.facts.ended_ns = now;
    waiting.facts.weight = ticks as u32;
    waiting.facts.state = seen.state;
    waiting.task = task;
    if !kick() {
        waiting.task = 0;
        counts(bank, |counts| counts.not_kicked += ticks);
    }
}

/// Where the part of a wait begins that user space has not told of.
#[inline(always)]
fn not_told(seen: &mut SeenThread, began_ns: u64) -> u64 {
    let Some(told) = WAITS_TOLD.get_ptr(&seen.tid) else { return began_ns };
    // SAFETY: a live map value, read once.
    let told_ns = unsafe { core::ptr::read_volatile(told) };
    if told_ns <= began_ns {
        return began_ns;
    }
    // SAFETY: a field of a live map value.
    unsafe { core::ptr::write_volatile(&raw mut seen.told_ns, told_ns) };
    told_ns
}

/// Whether this CPU has taken as many stacks this second as it may.
#[inline(always)]
fn is_too_much(waiting: &mut Waiting, now: u64) -> bool {
    let second = now / 1_000_000_000;
    if waiting.second != second {
        waiting.second = second;
        waiting.stacks = 0;
    }
    waiting.stacks += 1;
    waiting.stacks > MAX_WAITS_A_SECOND
}

/// Raises an interrupt on this CPU.
#[inline(always)]
fn kick() -> bool {
    // SAFETY: the helper takes nothing and cannot fail.
    let cpu = unsafe { bpf_get_smp_processor_id() } as u32;
    // SAFETY: what the loader puts in the place of `KICKS` is an array of maps with keys like this one.
    let ring = unsafe { bpf_map_lookup_elem((&raw const KICKS).cast_mut().cast(), (&raw const cpu).cast()) };
    let Some(ring): Option<NonNull<c_void>> = NonNull::new(ring) else { return false };
    let mut nothing = 0_u64;
    // SAFETY: a ring, and a word that is valid for reads.
    unsafe { bpf_ringbuf_output(ring.as_ptr(), (&raw mut nothing).cast(), 8, FORCE_WAKEUP) == 0 }
}

/// The interrupt: the walk begins if it met the thread that it was raised for.
#[inline(always)]
pub fn on_kick(ctx: &RawTracePointContext) {
    let Some(waiting) = WAITING.get_ptr_mut(0) else { return };
    // SAFETY: this CPU's value; the interrupt does not come while a CPU switches.
    let waiting = unsafe { &mut *waiting };
    if waiting.task == 0 {
        return;
    }
    let task = KernelPtr::current_task();
    let met = waiting.task == task.0;
    waiting.task = 0;
    let lost = u64::from(waiting.facts.weight);
    if !met {
        counts(waiting.bank, |counts| counts.not_met += lost);
        return;
    }
    let bank = waiting.bank + WAIT_BANKS;
    let (Some(counters), Some(sample), Some(state)) =
        (COUNTERS.get_ptr_mut(bank), SAMPLE.get_ptr_mut(0), STATE.get_ptr_mut(0))
    else {
        counts(waiting.bank, |counts| counts.not_met += lost);
        return;
    };
    let mut scratch = Scratch {
        // SAFETY: this CPU's value: neither the timer nor this interrupt interrupts the other.
        counters: unsafe { &mut *counters },
        // SAFETY: as above.
        sample: unsafe { &mut *sample },
        // SAFETY: as above.
        state: unsafe { &mut *state },
    };
    scratch.counters.ran += ctx.weight();
    let pid_tgid = bpf_get_current_pid_tgid();
    let tgid = thread::own_tgid(pid_tgid);
    let tid = thread::own_tid(task, pid_tgid);
    let Some(process) = PROCESSES.get_ptr_mut(&tgid).filter(|_| is_recorded(tgid) && tid != 0) else {
        return sample::lose(ctx, scratch.counters, LossCause::ProcessGone);
    };
    // SAFETY: a live map value, as in `sample::on_sample`.
    let process = unsafe { &mut *process };
    let Some(entry) = ENTRIES.get_ptr(&process.entry) else {
        return sample::lose(ctx, scratch.counters, LossCause::ProcessGone);
    };
    // SAFETY: a live map value, copied.
    scratch.state.process = unsafe { *entry };
    if scratch.state.process.instance != process.instance || scratch.state.process.image != process.image {
        return sample::lose(ctx, scratch.counters, LossCause::ProcessGone);
    }
    note_call(&mut waiting.facts, task);
    scratch.sample.record.header = RecordHeader { kind: kind::WAIT, bank: bank as u8, event: 0, len: 0 };
    sample::begin(ctx, &mut scratch, process, task, (tgid, tid));
}

/// The record of a wait was sent.
#[inline(always)]
pub fn sent() {
    let Some(waiting) = WAITING.get_ptr(0) else { return };
    // SAFETY: this CPU's value.
    counts(unsafe { (*waiting).bank }, |counts| counts.records += 1);
}

/// Ticks of the wait whose stack is walked.
#[inline(always)]
pub fn weight() -> u64 {
    // SAFETY: this CPU's value.
    WAITING.get_ptr(0).map_or(0, |waiting| u64::from(unsafe { (*waiting).facts.weight }))
}

/// Takes down the system call in which the thread waits, with its arguments.
#[inline(always)]
fn note_call(facts: &mut WaitFacts, task: KernelPtr) {
    facts.syscall = -1;
    facts.args = [0; 3];
    facts.polled = 0;
    facts.gil = 0;
    if config!(machine) == machine::ARM64 {
        let Some(regs) = UserRegs::saved_at_arm64(task) else { return };
        facts.syscall = i64::from(regs.read::<u32>(arm64::SYSCALL) as i32);
        facts.args = [regs.read(arm64::ORIG_X0), regs.read(8), regs.read(16)];
    } else {
        let Some(regs) = UserRegs::saved_at(task) else { return };
        // `struct pt_regs`: dx 96, si 104, di 112, orig_ax 120.
        facts.syscall = regs.read::<u64>(120) as i64;
        facts.args = [regs.read(112), regs.read(104), regs.read(96)];
    }
}

/// Puts what is known of the wait behind the frames of the sample, from `at` on, and gives its length. A global function: it is
/// verified once.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn append_wait(at: u64) -> u64 {
    const BYTES: usize = size_of::<WaitFacts>();
    let Some(Scratch { state, sample, .. }) = Scratch::get() else { return 0 };
    let Some(waiting) = WAITING.get_ptr_mut(0) else { return 0 };
    // SAFETY: this CPU's value.
    let facts = unsafe { &mut (*waiting).facts };
    if let Some(layout) = LAYOUTS.get(state.process.layout) {
        facts.gil = gil(layout, state.process.runtime, sample.record.tstate);
    }
    facts.polled = walk::read_u64(&CurrentProcess, facts.args[0], 0).unwrap_or(0);
    let at = masked::<0x7ff8>(at as usize);
    if at > SCRATCH_BYTES - BYTES {
        return 0;
    }
    // SAFETY: `at` is inside the scratch value.
    let to = unsafe { (&raw mut *sample).cast::<u8>().add(at) };
    // SAFETY: as many bytes are left of it.
    unsafe { to.cast::<WaitFacts>().write(*facts) };
    BYTES as u64
}

/// Where the GIL of a thread state is; 0: not known.
#[inline(always)]
fn gil(layout: &Layout, runtime: u64, tstate: u64) -> u64 {
    if Layout::present(layout.interp_ceval_gil) {
        let interp = walk::read_u64(&CurrentProcess, tstate, layout.tstate_interp).unwrap_or(0);
        return walk::read_u64(&CurrentProcess, interp, layout.interp_ceval_gil).unwrap_or(0);
    }
    if Layout::present(layout.runtime_gil) { runtime.wrapping_add(u64::from(layout.runtime_gil)) } else { 0 }
}
