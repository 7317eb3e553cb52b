//! Waits: which of them count, and what is said of one (`docs/dev/waiting.md`).
//!
//! Each thread has one tick in each period, at a random moment of it. A wait that holds `n` ticks is a sample of weight `n`.

mod bound;
mod facts;
mod holder;
mod kick;
mod record;
mod threads;
mod unseen;
mod wake;

pub use facts::append;
pub use holder::{find_holder, walk_holder};
pub use kick::{on_kick, try_kick};
pub use record::{begin, sent, weight};
pub use wake::on_wake;

use crate::kernel::KernelPtr;
use crate::maps::{ENTRIES, PROCESSES, UNWATCHED, WAIT_BEGINS, WAIT_COUNTS, WAIT_ENDS, WAITING, WAITS_TOLD, config};
use crate::sample;
use crate::{thread, verdicts};
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use aya_ebpf::programs::RawTracePointContext;
use bound::TENTH;
use tachyon_common::config::flags as config_flags;
use tachyon_common::event::WaitCounters;
use tachyon_common::limits::WAITS_A_TENTH;
use tachyon_common::process::flags;
use tachyon_common::wait::{self, SeenThread, method};
use tachyon_common::walk::mix;

/// `TASK_INTERRUPTIBLE` (`include/linux/sched.h`).
const TASK_INTERRUPTIBLE: u32 = 1;
/// `TASK_DEAD` (`include/linux/sched.h`): the thread never runs again.
const TASK_DEAD: u32 = 0x80;

fn now() -> u64 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_ktime_get_ns() }
}

/// Whether it is known that a task is not recorded.
#[inline(always)]
fn is_unwatched(task: u64, changes: u64) -> bool {
    let slot = UNWATCHED.get_ptr(wait::unwatched_slot(task));
    // SAFETY: a word of a map value, which is written whole.
    slot.is_some_and(|slot| unsafe { core::ptr::read_volatile(slot) } == wait::unwatched(task, changes))
}

/// Notes it. `changes` was read before it was found out.
#[inline(always)]
fn set_unwatched(task: u64, changes: u64) {
    if let Some(slot) = UNWATCHED.get_ptr_mut(wait::unwatched_slot(task)) {
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(slot, wait::unwatched(task, changes)) };
    }
}

/// A task that is new has the address of one that is gone.
#[inline(always)]
pub fn new_task(task: u64) {
    if let Some(slot) = UNWATCHED.get_ptr_mut(wait::unwatched_slot(task)) {
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(slot, 0) };
    }
}

/// A CPU goes from the thread `prev`, which is still the current one, to `next`.
#[inline(always)]
pub fn on_switch(ctx: &RawTracePointContext) {
    let (preempt, prev, next): (u64, u64, u64) = (ctx.arg(0), ctx.arg(1), ctx.arg(2));
    let changes = verdicts::changes();
    let (prev_is_out, next_is_out) = (is_unwatched(prev, changes), is_unwatched(next, changes));
    if prev_is_out && next_is_out {
        return;
    }
    let now = now();
    if !next_is_out {
        if let Some(seen) = threads::find(next) {
            arrive(next, seen, now);
        } else {
            arrive_first(KernelPtr(next), now, changes);
        }
    }
    if !prev_is_out && leave(ctx, KernelPtr(prev), preempt & 0xff != 0, now, changes) {
        record::make(ctx, WAIT_BEGINS);
    }
}

/// A thread that was asleep when the recording of waits began has been switched by nobody: it waited since then.
#[inline(always)]
fn arrive_first(task: KernelPtr, now: u64, changes: u64) {
    let tgid = thread::tgid(task);
    let Some(began_ns) = recorded_since(tgid) else { return set_unwatched(task.0, changes) };
    // One that is new waited for its first turn alone.
    if task.read::<u64>(config!(task_start_time)) >= began_ns {
        return;
    }
    let tid = thread::tid(task);
    let state = TASK_INTERRUPTIBLE | wait::NOT_SEEN;
    // Where stacks are taken at the beginning there is none of it, which its end will tell.
    let seen = SeenThread { left_ns: began_ns, tid, tgid, state, chosen: 1, ..NOTHING_SEEN };
    if tid == 0 || !threads::follow(task.0, &seen) {
        return;
    }
    if let Some(seen) = threads::find(task.0) {
        arrive(task.0, seen, now);
    }
}

const NOTHING_SEEN: SeenThread = SeenThread {
    left_ns: 0,
    woken_ns: 0,
    delay_ns: 0,
    waited_ns: 0,
    next_tick_ns: 0,
    period_ns: 0,
    told_ns: 0,
    tid: 0,
    tgid: 0,
    state: 0,
    waker: 0,
    widening: 0,
    chosen: 0,
};

/// The period of waits that begin now.
#[inline(always)]
fn period() -> (u64, u32) {
    (verdicts::word(wait::PERIOD), verdicts::word(wait::WIDENING) as u32)
}

/// How long the thread that exits has waited since waits are sampled ([`SeenThread::waited_ns`]).
#[inline(always)]
pub fn waited_ns(task: u64) -> u64 {
    threads::find(task).map_or(0, |seen| seen.waited_ns)
}

/// The state that a thread leaves in, which newer kernels tell.
#[inline(always)]
fn state_of(ctx: &RawTracePointContext, task: KernelPtr) -> u32 {
    // A constant for the verifier: older kernels refuse a program that reads more than there is.
    if config!(flags) & config_flags::SWITCH_TELLS_STATE != 0 {
        return ctx.arg::<u64>(3) as u32;
    }
    task.read(config!(task_state))
}

/// Whether a hook on wake-ups writes into what is known of a thread.
#[inline(always)]
fn are_wakes_hooked() -> bool {
    config!(task_last_queued) == 0 || config!(flags) & config_flags::WAKERS != 0
}

/// Notes since when a thread waits. True when its stack is to be taken now.
#[inline(always)]
fn leave(ctx: &RawTracePointContext, task: KernelPtr, preempted: bool, now: u64, changes: u64) -> bool {
    let state = state_of(ctx, task);
    let is_dead = state & TASK_DEAD != 0;
    let Some(seen) = threads::find(task.0).or_else(|| if is_dead { None } else { meet(task, now, changes) }) else {
        return false;
    };
    if seen.left_ns != 0 {
        unseen::came_back(task, seen, now);
    }
    if is_dead {
        threads::forget(task.0);
        return false;
    }
    // A thread that is preempted on its way to a wait is ready to run.
    seen.state = if preempted { 0 } else { state };
    seen.woken_ns = 0;
    seen.delay_ns = delay_at_leave(task, seen.state);
    if are_wakes_hooked() {
        seen.waker = 0;
    }
    seen.leave(config!(seed), now, period());
    let chosen = choose(task, seen, now);
    // Last: who wakes it looks here first.
    // SAFETY: a field of a live map value.
    unsafe { core::ptr::write_volatile(&raw mut seen.left_ns, now) };
    chosen
}

/// Follows a thread that leaves and that nobody has met, if it is recorded and there is room.
#[inline(always)]
fn meet(task: KernelPtr, now: u64, changes: u64) -> Option<&'static mut SeenThread> {
    let pid_tgid = bpf_get_current_pid_tgid();
    let tgid = thread::own_tgid(pid_tgid);
    let Some(began_ns) = recorded_since(tgid).filter(|_| pid_tgid != 0) else {
        set_unwatched(task.0, changes);
        return None;
    };
    let tid = thread::own_tid(task, pid_tgid);
    // Where stacks are taken at the beginning there is none of a wait that nobody has seen begin, whose end will tell.
    let seen = SeenThread { left_ns: unseen::left_ns(task, began_ns, now), tid, tgid, chosen: 1, ..NOTHING_SEEN };
    if tid == 0 || !threads::follow(task.0, &seen) {
        return None;
    }
    threads::find(task.0)
}

/// [`SeenThread::delay_ns`] of one that leaves. One that is ready to run all the time needs none.
#[inline(always)]
fn delay_at_leave(task: KernelPtr, state: u32) -> u64 {
    if config!(task_last_queued) == 0 || state == 0 { 0 } else { task.read(config!(task_run_delay)) }
}

/// For how long a thread that arrives has been ready to run since it left: on the CPUs that it was moved away from meanwhile, which its
/// count has already, and on this one, since `last_queued`. The kernel adds that when it has been switched.
#[inline(always)]
fn ready_ns(task: KernelPtr, delay_ns: u64) -> u64 {
    let elsewhere = task.read::<u64>(config!(task_run_delay)).wrapping_sub(delay_ns);
    let since: u64 = task.read(config!(task_last_queued));
    if since == 0 {
        return elsewhere;
    }
    let queue = task.follow(config!(task_cfs_rq)).follow(config!(cfs_rq_rq));
    elsewhere.wrapping_add(queue.read::<u64>(config!(rq_clock)).wrapping_sub(since))
}

/// Where stacks are taken when threads leave: whether this one's is. The choice knows nothing of the wait's length.
#[inline(always)]
fn choose(task: KernelPtr, seen: &mut SeenThread, now: u64) -> bool {
    if verdicts::word(wait::METHOD) != method::SWITCH_OUT {
        return false;
    }
    seen.chosen = 0;
    let Some(waiting) = WAITING.get_ptr_mut(WAIT_BEGINS) else { return false };
    // SAFETY: this CPU's value.
    let waiting = unsafe { &mut *waiting };
    if waiting.tenth != now / TENTH {
        waiting.tenth = now / TENTH;
        if waiting.stacks < WAITS_A_TENTH / 4 && waiting.sparse > 0 {
            waiting.sparse -= 1;
        }
        waiting.stacks = 0;
    }
    let sparse = waiting.sparse & 31;
    let drawn = mix(mix(mix(config!(seed), now), task.0), 3) >> 20;
    if drawn & ((1 << sparse) - 1) != 0 {
        return false;
    }
    seen.chosen = sparse + 1;
    waiting.stacks += 1;
    if waiting.stacks > WAITS_A_TENTH && waiting.sparse < wait::MAX_WIDENING {
        waiting.stacks = WAITS_A_TENTH / 2;
        waiting.sparse += 1;
    }
    waiting.bank = sample::bank();
    waiting.facts.left_ns = now;
    waiting.facts.state = seen.state;
    true
}

/// What a process is whose waits are wanted.
const WANTED: u32 = flags::SELECTED | flags::PYTHON;

/// Since when a process's waits are sampled; `None`: they are not wanted.
#[inline(always)]
fn recorded_since(tgid: u32) -> Option<u64> {
    if tgid == 0 || verdicts::recall(verdicts::changes(), tgid) != 0 {
        return None;
    }
    let life = PROCESSES.get_ptr(&tgid)?;
    // SAFETY: a live map value.
    let key = unsafe { (*life).entry };
    let entry = ENTRIES.get_ptr(&key)?;
    // SAFETY: a live map value.
    let entry = unsafe { &*entry };
    if entry.flags & WANTED != WANTED {
        return None;
    }
    let began_ns = verdicts::word(wait::BEGAN);
    Some(if entry.known_ns > began_ns { entry.known_ns } else { began_ns })
}

#[inline(always)]
fn counts(bank: u32, count: impl FnOnce(&mut WaitCounters)) {
    if let Some(counts) = WAIT_COUNTS.get_ptr_mut(bank) {
        // SAFETY: this CPU's value; see the map for who writes it.
        count(unsafe { &mut *counts });
    }
}

/// Whether nothing is told of a wait: none of its ticks has come yet, or its stack was not taken where that is done at the beginning.
#[inline(always)]
fn counts_for_nothing(seen: &SeenThread, now: u64) -> bool {
    seen.has_no_tick(now, verdicts::word(wait::PERIOD))
        || verdicts::word(wait::METHOD) == method::SWITCH_OUT && seen.chosen == 0
}

/// Kicks a thread whose wait counts.
#[inline(always)]
fn arrive(task: u64, seen: &mut SeenThread, now: u64) {
    let left_ns = seen.left_ns;
    if left_ns == 0 {
        return;
    }
    seen.waited_ns = seen.waited_ns.wrapping_add(now.wrapping_sub(left_ns));
    if counts_for_nothing(seen, now) {
        // SAFETY: a field of a live map value.
        unsafe { core::ptr::write_volatile(&raw mut seen.left_ns, 0) };
        return;
    }
    if config!(task_last_queued) != 0 && seen.state != 0 && seen.state & wait::NOT_SEEN == 0 {
        seen.was_ready_for(ready_ns(KernelPtr(task), seen.delay_ns), now);
    }
    let mut began_ns = left_ns;
    let mut parts = Parts::of(seen, began_ns, now);
    if parts.all() > 0 && began_ns < verdicts::word(wait::TOLD_AT) {
        began_ns = not_told(seen, began_ns, now);
        parts = Parts::of(seen, began_ns, now);
    }
    // Last: who finds that the thread has come back finds what cut its wait short.
    // SAFETY: a field of a live map value.
    unsafe { core::ptr::write_volatile(&raw mut seen.left_ns, 0) };
    if parts.all() == 0 {
        return;
    }
    let at_beginning = verdicts::word(wait::METHOD) == method::SWITCH_OUT;
    if at_beginning {
        parts.count_for_all(seen.chosen);
    }
    let bank = sample::bank();
    let widened = if seen.widening > 0 { parts.all() } else { 0 };
    counts(bank, |counts| {
        counts.due += parts.all();
        counts.widened += widened;
    });
    let Some(waiting) = WAITING.get_ptr_mut(WAIT_ENDS) else { return };
    // SAFETY: this CPU's value.
    let waiting = unsafe { &mut *waiting };
    if waiting.task != 0 {
        // The kick before this one did not come in time.
        let lost = facts::weight(&waiting.facts);
        counts(waiting.bank, |counts| counts.not_met += lost);
        waiting.task = 0;
    }
    if !at_beginning && bound::is_too_much(waiting, seen, now.wrapping_sub(left_ns), now) {
        counts(bank, |counts| counts.too_many += parts.all());
        return;
    }
    waiting.bank = bank;
    let facts = &mut waiting.facts;
    (facts.left_ns, facts.began_ns, facts.queued_ns, facts.ended_ns) = (left_ns, began_ns, parts.queued_ns, now);
    (facts.weight, facts.queued) = (parts.blocked as u32, parts.queued as u32);
    (facts.state, facts.waker) = (seen.state, seen.waker);
    if at_beginning {
        return record::send_end(waiting, seen);
    }
    waiting.task = task;
    if !kick::kick() {
        waiting.task = 0;
        counts(bank, |counts| counts.not_kicked += parts.all());
    }
}

/// A wait's ticks.
struct Parts {
    queued_ns: u64,
    blocked: u64,
    queued: u64,
}

impl Parts {
    /// Those from a moment on of a wait that ends now.
    #[inline(always)]
    fn of(seen: &SeenThread, began_ns: u64, now: u64) -> Self {
        let period = (verdicts::word(wait::PERIOD), seen.widening);
        let queued_ns = seen.queued_from(began_ns, now);
        let ticks = |from, to| wait::widened_ticks(config!(seed), seen.tid, period, from, to) & 0xffff_ffff;
        Self { queued_ns, blocked: ticks(began_ns, queued_ns), queued: ticks(queued_ns, now) }
    }

    #[inline(always)]
    fn all(&self) -> u64 {
        self.blocked + self.queued
    }

    /// The wait stands for others ([`SeenThread::chosen`]).
    #[inline(always)]
    fn count_for_all(&mut self, chosen: u32) {
        let sparse = chosen.wrapping_sub(1) & 31;
        self.blocked = (self.blocked << sparse) & 0xffff_ffff;
        self.queued = (self.queued << sparse) & 0xffff_ffff;
    }
}

/// Where the part of a wait begins that user space has not told of.
#[inline(always)]
fn not_told(seen: &mut SeenThread, began_ns: u64, now: u64) -> u64 {
    let Some(word) = WAITS_TOLD.get_ptr(wait::told_slot(seen.tid)) else { return began_ns };
    // SAFETY: a word of a map value, which is written whole.
    let told_ns = wait::told(config!(seed), seen.tid, unsafe { core::ptr::read_volatile(word) });
    // What is written there for another thread, or was for a wait that is over, is no moment of this one.
    if told_ns <= began_ns || told_ns > now {
        return began_ns;
    }
    // SAFETY: a field of a live map value.
    unsafe { core::ptr::write_volatile(&raw mut seen.told_ns, told_ns) };
    told_ns
}
