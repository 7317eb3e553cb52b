//! Which waits count, and for how much.
//!
//! A thread has one tick in each period `P`, at `(k + U) * P` with `U` drawn from the recording's key, the thread and `k`. So a wait of
//! length `d` holds `d / P` ticks on average, whatever its length, and nobody who does not know the key can be in step with them.
//! Where too many threads wait, those that begin to wait have longer periods, a power of two times `P`, and each of their ticks counts
//! that often: the average stays.

use crate::limits::{THREAD_SLOTS, TOLD_WAITS, UNWATCHED_SLOTS};
use crate::walk::mix;

/// Index in the `VERDICTS` map of the period in which each waiting thread has one tick, nanoseconds; 0: waits are not sampled.
pub const PERIOD: u32 = 4;
/// Index of [`SeenThread::widening`] of threads that begin to wait now.
pub const WIDENING: u32 = 5;
/// Index of the moment up to which user space has told of waits that last, or will have: those that began later have all their ticks.
pub const TOLD_AT: u32 = 6;
/// Index of where stacks are taken: one of [`method`].
pub const METHOD: u32 = 7;
/// Index of when a CPU took as many stacks as it may, or nearly, for the last time.
pub const BUSY_AT: u32 = 8;
/// Index of when [`WIDENING`] was changed last.
pub const WIDENED_AT: u32 = 9;
/// Index of since when waits are sampled, nanoseconds: threads that slept then have been switched by nobody.
pub const BEGAN: u32 = 10;

/// Where the stacks of waiting threads are taken.
pub mod method {
    /// When the wait is over, by an interrupt that the thread is met with: where its length is known.
    pub const KICK: u64 = 0;
    /// When it begins, of one in a known number of waits, which then counts that often.
    pub const SWITCH_OUT: u64 = 1;
}

/// Bytes of `struct _gil_runtime_state` at most: two condition variables, two mutexes and four words or five
/// (`Include/internal/pycore_gil.h`, 3.8 to 3.15).
pub const GIL_BYTES: u64 = 224;

/// Bytes above a thread's stack pointer in which a futex may lie that its C library keeps there (musl's condition variables).
pub const NEAR_STACK: u64 = 4096;
/// Words behind such a futex that refer to the GIL at least where that is what is waited for: its condition and its mutex. Below the futex
/// words may be left from when the thread gave the GIL back, before it waited for something else.
pub const GIL_REFERENCES: u32 = 2;

/// [`SeenThread::widening`] at most: with a period of 10 ms, 41 s.
pub const MAX_WIDENING: u32 = 12;

/// Bit of [`SeenThread::state`] and [`crate::event::WaitFacts::state`]: the thread left its CPU before anybody looked, and it is not known
/// whether it slept or was ready to run. No state of the kernel's has it (`TASK_STATE_MAX`, `include/linux/sched.h`).
pub const NOT_SEEN: u32 = 1 << 31;

/// [`SeenThread::waker`]: an interrupt woke it: a timer, a device, a packet from outside.
pub const BY_INTERRUPT: u32 = u32::MAX;

/// A thread that is recorded, and since when it waits. Value of the `THREADS_SEEN` map. What each switch needs comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SeenThread {
    /// When it left its CPU, `bpf_ktime_get_ns()`; 0: it runs.
    pub left_ns: u64,
    /// How long the waits lasted that are over, since waits are sampled.
    pub waited_ns: u64,
    /// Its first tick after it left, as long as its period is [`SeenThread::period_ns`].
    pub next_tick_ns: u64,
    /// `P << widening` when that was worked out; 0: it never was.
    pub period_ns: u64,
    /// How long it had been ready to run in all its life when it left, as the kernel counts it (`sched_info.run_delay`); where a hook
    /// on wake-ups tells when it was woken, 0.
    pub delay_ns: u64,
    /// When it was woken; 0: it has not been, or was ready to run all the time, or only its wait's end tells ([`SeenThread::delay_ns`]).
    pub woken_ns: u64,
    /// The kernel's `__state` when it left; 0: it was ready to run.
    pub state: u32,
    /// Its period in this wait: `P << widening`.
    pub widening: u32,
    /// The moment in `WAITS_TOLD` that cut its last wait short; 0: none ever did. Written before `left_ns` is.
    pub told_ns: u64,
    /// Thread id in the profiler's namespace.
    pub tid: u32,
    /// Process id, likewise.
    pub tgid: u32,
    /// Thread that woke it, in the profiler's namespace; 0: not known, or [`BY_INTERRUPT`].
    pub waker: u32,
    /// Where stacks are taken when threads leave: one more than the binary logarithm of how many waits this one stands for;
    /// 0: it was not chosen.
    pub chosen: u32,
}

/// A thread and its `task_struct`. Value of the `THREAD_SLOTS` map, which begins at a page: the first half is a cache line with all that
/// a switch needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct ThreadSlot {
    /// 0: the slot is free.
    pub task: u64,
    /// What is known of the thread.
    pub thread: SeenThread,
}

impl SeenThread {
    /// Whether the kernel side leaves the part of a wait up to `until_ns` to user space, which put that moment into `WAITS_TOLD`
    /// after it had read `before` and then read `now`: the thread still waits, or its wait's end was cut short by that moment.
    #[must_use]
    pub fn is_left_to_user_space(before: Option<Self>, now: Option<Self>, until_ns: u64) -> bool {
        match (before, now) {
            // It has not been switched since waits are sampled.
            (None, None) => true,
            // It has ended, and its wait before that.
            (Some(_), None) => false,
            (Some(before), Some(now)) if before.left_ns == now.left_ns => true,
            (_, Some(now)) => now.told_ns == until_ns,
        }
    }

    /// Notes that it leaves its CPU: its first tick is worked out where the last one is over.
    #[inline(always)]
    pub fn leave(&mut self, key: u64, now: u64, (period_ns, widening): (u64, u32)) {
        let period_ns = period_ns << capped(widening);
        self.widening = widening;
        if period_ns != self.period_ns || self.next_tick_ns <= now {
            self.period_ns = period_ns;
            self.next_tick_ns = next_tick(key, self.tid, period_ns, now);
        }
    }

    /// Whether no tick of its wait has come yet: cheaper than [`widened_ticks`].
    #[inline(always)]
    #[must_use]
    pub fn has_no_tick(&self, now: u64, period_ns: u64) -> bool {
        now < self.next_tick_ns && period_ns << capped(self.widening) == self.period_ns
    }

    /// Notes when it was woken, if it was ready to run for so long before now.
    #[inline(always)]
    pub fn was_ready_for(&mut self, ready_ns: u64, now: u64) {
        let woken_ns = now.wrapping_sub(ready_ns);
        // The clocks of two CPUs are not quite one.
        self.woken_ns = if woken_ns > now || woken_ns < self.left_ns { self.left_ns } else { woken_ns };
    }

    /// When a wait that ends now, at `ended_ns`, became one for a CPU.
    #[inline(always)]
    #[must_use]
    pub fn queued_from(&self, began_ns: u64, ended_ns: u64) -> u64 {
        if self.state == 0 {
            began_ns
        } else if self.woken_ns == 0 {
            ended_ns
        } else if self.woken_ns < began_ns {
            began_ns
        } else {
            self.woken_ns
        }
    }
}

/// The word that says that a task is not recorded, under this number of changes of the process table
/// ([`crate::verdicts::changes`]). It fits no other task: tasks are apart by less than 2^48, and numbers of changes, spread over
/// all bits, differ in more.
#[inline(always)]
#[must_use]
pub const fn unwatched(task: u64, changes: u64) -> u64 {
    task ^ (changes >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Where that word lies.
#[inline(always)]
#[must_use]
pub const fn unwatched_slot(task: u64) -> u32 {
    spread(task) & (UNWATCHED_SLOTS - 1)
}

/// The slot that a task has if it is the first to ask for it.
#[inline(always)]
#[must_use]
pub const fn thread_slot(task: u64) -> u32 {
    spread(task) & (THREAD_SLOTS - 1)
}

/// Tasks lie in cache lines of their own, several thousand bytes apart.
#[inline(always)]
const fn spread(task: u64) -> u32 {
    ((task >> 6) ^ (task >> 18)) as u32
}

/// What [`foreseen`] gives for a stack that would be taken.
pub const ONE_STACK: u64 = 256;

/// How often the stack of a wait that had one would have been taken if the wait had had the widening of those that begin now, instead of
/// its own, in parts of [`ONE_STACK`]. A wait of length `d` has a stack with probability `min(1, d / (P << widening))`.
#[inline(always)]
#[must_use]
pub fn foreseen(period_ns: u64, (own, of_now): (u32, u32), wait_ns: u64) -> u64 {
    let (own, of_now) = (capped(own), capped(of_now));
    let (own_ns, of_now_ns) = (period_ns << own, period_ns << of_now);
    let within = |period_ns: u64| if wait_ns < period_ns { wait_ns } else { period_ns };
    let least = within(own_ns);
    if least == 0 {
        return ONE_STACK;
    }
    let times = within(of_now_ns).wrapping_mul(ONE_STACK) / least;
    if of_now > own { times >> (of_now - own) } else { times << (own - of_now) }
}

/// The word that says up to when user space has told of a thread's wait, and back: [`told`] of it is that moment. Under another thread's
/// id it is no moment of any recording.
#[inline(always)]
#[must_use]
pub const fn told(key: u64, tid: u32, told_ns: u64) -> u64 {
    told_ns ^ mix(mix(key, 4), tid as u64)
}

/// Where that word lies.
#[inline(always)]
#[must_use]
pub const fn told_slot(tid: u32) -> u32 {
    tid & (TOLD_WAITS - 1)
}

/// The moment of a thread's tick in a period, nanoseconds. (Periods are below 2^40 ns, 18 minutes.)
#[inline(always)]
fn tick(key: u64, tid: u32, period_ns: u64, period: u64) -> u64 {
    // Once would leave numbers that rise evenly with the period.
    let drawn = mix(mix(mix(mix(key, u64::from(tid)), period), 1), 2) >> 40;
    period.wrapping_mul(period_ns).wrapping_add(drawn.wrapping_mul(period_ns) >> 24)
}

/// A thread's first tick after a moment; the end of time where it has none.
#[inline(always)]
#[must_use]
pub fn next_tick(key: u64, tid: u32, period_ns: u64, after_ns: u64) -> u64 {
    if period_ns == 0 {
        return u64::MAX;
    }
    let period = after_ns / period_ns;
    let next = tick(key, tid, period_ns, period);
    if next > after_ns { next } else { tick(key, tid, period_ns, period + 1) }
}

/// [`SeenThread::widening`], with the bound that a shift needs.
#[inline(always)]
const fn capped(widening: u32) -> u32 {
    if widening > MAX_WIDENING { MAX_WIDENING } else { widening }
}

/// How many ticks of a thread lie after `began_ns`, and not after `ended_ns`.
#[inline(always)]
#[must_use]
pub fn ticks(key: u64, tid: u32, period_ns: u64, began_ns: u64, ended_ns: u64) -> u64 {
    if period_ns == 0 || ended_ns <= began_ns {
        return 0;
    }
    let (first, last) = (began_ns / period_ns, ended_ns / period_ns);
    let first_tick = tick(key, tid, period_ns, first);
    let in_first = u64::from(first_tick > began_ns && first_tick <= ended_ns);
    if first == last {
        return in_first;
    }
    in_first + (last - first - 1) + u64::from(tick(key, tid, period_ns, last) <= ended_ns)
}

/// The same where the thread's periods are longer: each tick counts for all that it has less of.
#[inline(always)]
#[must_use]
pub fn widened_ticks(key: u64, tid: u32, (period_ns, widening): (u64, u32), began_ns: u64, ended_ns: u64) -> u64 {
    let widening = capped(widening);
    ticks(key, tid, period_ns << widening, began_ns, ended_ns) << widening
}

const _: () = assert!(core::mem::size_of::<SeenThread>() == 80);
const _: () = assert!(core::mem::size_of::<ThreadSlot>() == 128);
const _: () = assert!(core::mem::offset_of!(ThreadSlot, thread.widening) < 64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_side_by_side_hold_each_tick_once() {
        let (period, end) = (10_000_000, 3_000_000_000);
        let mut at = 5_000_000;
        let (begin, mut sum, mut step) = (at, 0, 1_u64);
        while at < end {
            step = step.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let next = at + (step >> 40);
            sum += ticks(7, 42, period, at, next);
            at = next;
        }
        assert_eq!(sum, ticks(7, 42, period, begin, at));
        assert!(sum >= (at - begin) / period - 1 && sum <= (at - begin) / period + 1);
    }

    #[test]
    fn a_wait_counts_by_its_length() {
        // 7 ms of every 10, in step with the period: 0.7 of the ticks, give or take 4.4 deviations of a binomial.
        let (period, turns) = (10_000_000_u64, 20_000_u64);
        let sum: u64 = (0..turns).map(|turn| ticks(99, 7, period, turn * period, turn * period + 7_000_000)).sum();
        let deviation = (turns as f64 * 0.7 * 0.3).sqrt();
        assert!((sum as f64 - turns as f64 * 0.7).abs() < 4.4 * deviation, "{sum} of {turns}");
    }

    #[test]
    fn each_part_of_a_wait_is_told_by_one() {
        let seen = |left_ns, told_ns| Some(SeenThread { left_ns, told_ns, ..SeenThread::default() });
        for (before, now, expected) in [
            // Asleep all the time, with and without a switch before that.
            (None, None, true),
            (seen(5, 0), seen(5, 0), true),
            (seen(5, 7), seen(5, 7), true),
            // It came back before the moment was written, after that, and has waited again since.
            (seen(5, 0), seen(0, 0), false),
            (seen(5, 7), seen(0, 7), false),
            (seen(5, 7), seen(0, 20), true),
            (seen(5, 0), seen(30, 20), true),
            (None, seen(0, 0), false),
            (None, seen(30, 20), true),
            (seen(5, 0), None, false),
        ] {
            assert_eq!(SeenThread::is_left_to_user_space(before, now, 20), expected, "{before:?} {now:?}");
        }
    }

    #[test]
    fn longer_periods_change_no_average() {
        // Waits of all lengths up to 30 periods, with the longest periods there are, so that most hold no tick.
        let (period, turns) = (10_000_000_u64, 40_000_u64);
        let (mut sum, mut expected, mut at) = (0, 0.0, 0);
        for turn in 0..turns {
            let length = turn % 30 * period;
            sum += widened_ticks(5, 9, (period, 6), at, at + length);
            expected += (length / period) as f64;
            at += length + period;
        }
        // Of each period of 64 a tick or none: a variance of 64 for each tick that is expected, at most.
        assert!((sum as f64 - expected).abs() < 4.4 * (expected * 64.0).sqrt(), "{sum} of {expected}");
        let whole = widened_ticks(5, 9, (period, 3), 0, 8_000 * period);
        assert!((7_992..=8_008).contains(&whole), "{whole}");
        assert_eq!(widened_ticks(5, 9, (period, 0), 7, 12 * period), ticks(5, 9, period, 7, 12 * period));
    }

    #[test]
    fn the_next_tick_is_where_the_wait_gets_its_first() {
        let (key, period) = (3, 10_000_000);
        let mut thread = SeenThread { tid: 5, ..SeenThread::default() };
        let mut at = 1_000;
        for turn in 0..3_000_u64 {
            let widening = u32::try_from(turn / 1_000).unwrap();
            thread.leave(key, at, (period, widening));
            let next = thread.next_tick_ns;
            assert!(next > at && thread.has_no_tick(next - 1, period) && !thread.has_no_tick(next, period));
            let ticks = |ended| widened_ticks(key, 5, (period, widening), at, ended);
            assert_eq!((ticks(next - 1), ticks(next)), (0, 1 << widening), "turn {turn}");
            at += turn % 7 * 3_333_333;
        }
        // Another period: what was worked out does not hold.
        assert!(!thread.has_no_tick(at, period / 2));
        assert_eq!(next_tick(key, 5, 0, at), u64::MAX);
    }

    #[test]
    fn a_wait_is_one_for_a_cpu_once_the_thread_is_woken() {
        let seen = |state, woken_ns| SeenThread { state, woken_ns, ..SeenThread::default() };
        for (thread, expected) in [
            (seen(1, 40), 40),
            // Nobody saw who woke it.
            (seen(1, 0), 90),
            // Ready to run all the time.
            (seen(0, 0), 20),
            // What was before is told of already.
            (seen(1, 10), 20),
        ] {
            assert_eq!(thread.queued_from(20, 90), expected, "{thread:?}");
        }
    }

    #[test]
    fn a_thread_was_woken_within_its_wait() {
        let mut thread = SeenThread { left_ns: 50, ..SeenThread::default() };
        for (ready_ns, expected) in [(0, 90), (10, 80), (40, 50), (41, 50), (u64::MAX - 5, 50)] {
            thread.was_ready_for(ready_ns, 90);
            assert_eq!(thread.woken_ns, expected, "{ready_ns}");
        }
    }

    #[test]
    fn a_task_that_is_not_recorded_is_not_taken_for_another() {
        let word = unwatched(0xffff_8880_0123_4000, 7 << 32);
        assert_eq!(word, unwatched(0xffff_8880_0123_4000, 7 << 32 | 99), "the verdict's own bits do not matter");
        for (task, changes) in [(0xffff_8880_0123_4000, 8), (0xffff_8880_0123_4040, 7), (0xffff_8880_0123_4000, 0)] {
            assert_ne!(word, unwatched(task, changes << 32));
        }
        assert!(unwatched_slot(u64::MAX) < UNWATCHED_SLOTS && thread_slot(u64::MAX) < THREAD_SLOTS);
    }

    #[test]
    fn stacks_are_foreseen_by_the_chance_that_each_had() {
        const MS: u64 = 1_000_000;
        let of = |wait_ns, own, of_now| foreseen(10 * MS, (own, of_now), wait_ns);
        for (wait_ns, own, of_now, expected) in [
            (MS, 0, 0, ONE_STACK),
            // One in ten such waits has a stack, then one in twenty.
            (MS, 0, 1, ONE_STACK / 2),
            (MS, 0, 3, ONE_STACK / 8),
            // Each has one, then three of four: 60 ms in 80 ms.
            (60 * MS, 0, 2, ONE_STACK),
            (60 * MS, 0, 3, ONE_STACK * 3 / 4),
            (60 * MS, 3, 2, ONE_STACK * 4 / 3),
            (60 * MS, 4, 2, ONE_STACK * 8 / 3),
            (0, 0, 5, ONE_STACK),
            (u64::MAX >> 9, 0, MAX_WIDENING, ONE_STACK),
        ] {
            assert!(of(wait_ns, own, of_now).abs_diff(expected) <= 2, "{wait_ns}: {own} to {of_now}");
        }
        // The sum of what is foreseen is what comes: waits of a thousand lengths, each with a stack as often as it has one.
        let (mut seen, mut later) = (0.0, 0.0);
        for wait_ns in (1..=1_000).map(|part| part * MS / 10) {
            let chance = |widening: u32| (wait_ns as f64 / f64::from(10 << widening) / MS as f64).min(1.0);
            seen += chance(1) * of(wait_ns, 1, 4) as f64 / ONE_STACK as f64;
            later += chance(4);
        }
        assert!((seen / later - 1.0).abs() < 0.01, "{seen} for {later}");
    }

    #[test]
    fn what_is_told_of_a_thread_is_told_of_no_other() {
        let word = told(11, 70_000, 5_000_000_000);
        assert_eq!(told(11, 70_000, word), 5_000_000_000);
        let other = told(11, 70_000 + TOLD_WAITS, word);
        assert_eq!(told_slot(70_000), told_slot(70_000 + TOLD_WAITS));
        assert!(other > 1 << 55, "{other} is a moment of the next year");
    }

    #[test]
    fn no_wait_holds_no_tick() {
        assert_eq!(ticks(1, 2, 1000, 500, 500), 0);
        assert_eq!(ticks(1, 2, 0, 0, 500), 0);
    }
}
