//! Which waits count, and for how much.
//!
//! A thread has one tick in each period `P`, at `(k + U) * P` with `U` drawn from the recording's key, the thread and `k`. So a wait of
//! length `d` holds `d / P` ticks on average, whatever its length, and nobody who does not know the key can be in step with them.

use crate::walk::mix;

/// Key of `THREADS_SEEN` under which stands since when waits are sampled: threads that slept then have been switched by nobody.
pub const BEGAN: u64 = 0;
/// Index in the `VERDICTS` map of the period in which each waiting thread has one tick, nanoseconds; 0: waits are not sampled.
pub const PERIOD: u32 = 4;

/// Bit of [`SeenThread::state`] and [`crate::event::WaitFacts::state`]: the thread left its CPU before anybody looked, and it is not known
/// whether it slept or was ready to run. No state of the kernel's has it (`TASK_STATE_MAX`, `include/linux/sched.h`).
pub const NOT_SEEN: u32 = 1 << 31;

/// A thread that is recorded, and since when it waits. Value of the `THREADS_SEEN` map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SeenThread {
    /// When it left its CPU, `bpf_ktime_get_ns()`; 0: it runs.
    pub left_ns: u64,
    /// Thread id in the profiler's namespace.
    pub tid: u32,
    /// The kernel's `__state` when it left; 0: it was ready to run.
    pub state: u32,
    /// The moment in `WAITS_TOLD` that cut its last wait short; 0: none ever did. Written before `left_ns` is.
    pub told_ns: u64,
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
}

/// The moment of a thread's tick in a period, nanoseconds.
#[inline(always)]
fn tick(key: u64, tid: u32, period_ns: u64, period: u64) -> u64 {
    // Once would leave numbers that rise evenly with the period.
    let drawn = mix(mix(mix(mix(key, u64::from(tid)), period), 1), 2) >> 20;
    period.wrapping_mul(period_ns).wrapping_add(drawn % period_ns)
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

const _: () = assert!(core::mem::size_of::<SeenThread>() == 24);

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
    fn no_wait_holds_no_tick() {
        assert_eq!(ticks(1, 2, 1000, 500, 500), 0);
        assert_eq!(ticks(1, 2, 0, 0, 500), 0);
    }
}
