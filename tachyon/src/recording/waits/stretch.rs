//! Splits a wait by cause: what the thread waited for, then a CPU.

use super::cause::FOR_A_CPU;
use crate::profile::Wait;
use tachyon_common::event::WaitFacts;
use tachyon_common::wait::BY_INTERRUPT;

/// A part of a wait that counts under one cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub cause: &'static str,
    /// Where its ticks lie, nanoseconds of `CLOCK_MONOTONIC`.
    pub began_ns: u64,
    pub ended_ns: u64,
    /// When the whole wait ended.
    pub over_ns: u64,
    /// What is recorded about it, its weight included.
    pub wait: Wait<'static>,
}

/// Splits a wait by cause: what the thread waited for, and then, once it was woken, a CPU. Parts without a tick are left out.
/// `cause` says what the thread waited for.
pub(crate) fn stretches(facts: &WaitFacts, cause: impl FnOnce() -> &'static str) -> impl Iterator<Item = Stretch> {
    let (queued_ns, whole) = (facts.queued_ns.clamp(facts.began_ns, facts.ended_ns), told(facts));
    let queued_since_ns = if facts.state == 0 { facts.left_ns } else { queued_ns };
    let blocked = Stretch {
        cause: if facts.weight > 0 { cause() } else { FOR_A_CPU },
        began_ns: facts.began_ns,
        ended_ns: queued_ns,
        over_ns: facts.ended_ns,
        wait: whole,
    };
    let queued = Stretch {
        cause: FOR_A_CPU,
        began_ns: queued_ns,
        wait: Wait {
            weight: u64::from(facts.queued),
            since_us: queued_since_ns / 1000,
            wait_us: whole.queued_us.unwrap_or(0),
            syscall: None,
            futex: None,
            ..whole
        },
        ended_ns: facts.ended_ns,
        ..blocked
    };
    [blocked, queued].into_iter().filter(|stretch| stretch.wait.weight > 0)
}

/// What is recorded about a wait apart from its cause and stack.
pub(crate) fn told(facts: &WaitFacts) -> Wait<'static> {
    // A preempted thread was in no system call, whatever its registers say.
    let syscall = u32::try_from(facts.syscall).ok().filter(|_| facts.state != 0);
    let is_futex = syscall.is_some_and(|call| libc::c_long::from(call) == libc::SYS_futex);
    let (since_us, over_us) = (facts.left_ns / 1000, facts.ended_ns / 1000);
    let queued_since_us = if facts.state == 0 { since_us } else { facts.queued_ns / 1000 };
    Wait {
        weight: u64::from(facts.weight),
        since_us,
        wait_us: over_us.saturating_sub(since_us),
        syscall,
        futex: is_futex.then_some(facts.args[0]),
        queued_us: Some(over_us.saturating_sub(queued_since_us)),
        waker: Some(facts.waker).filter(|&tid| tid != 0 && tid != BY_INTERRUPT),
        ..Wait::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::cause;
    use super::*;

    #[test]
    fn a_wait_is_for_something_and_then_for_a_cpu() {
        let futex = WaitFacts {
            left_ns: 1_000_000,
            began_ns: 1_000_000,
            queued_ns: 5_000_000,
            ended_ns: 7_000_000,
            syscall: libc::SYS_futex,
            args: [0x7000, 0, 0],
            weight: 4,
            queued: 2,
            state: 1,
            waker: 9,
            ..WaitFacts::default()
        };
        let told = |facts: &WaitFacts| -> Vec<_> {
            let told = |it: Stretch| (it.cause, it.wait.weight, it.wait.since_us, it.wait.wait_us, it.wait.queued_us);
            stretches(facts, || cause(1, facts)).map(told).collect()
        };
        assert_eq!(told(&futex), [("lock", 4, 1_000, 6_000, Some(2_000)), ("cpu", 2, 5_000, 2_000, Some(2_000))]);
        assert_eq!(stretches(&futex, || "lock").map(|it| it.wait.waker).collect::<Vec<_>>(), [Some(9); 2]);
        // What was reported before does not count here; how long it has lasted does.
        let later = WaitFacts { began_ns: 6_000_000, weight: 0, ..futex };
        assert_eq!(told(&later), [("cpu", 2, 6_000, 2_000, Some(2_000))]);
        let preempted = WaitFacts { queued_ns: 1_000_000, weight: 0, queued: 6, state: 0, waker: 0, ..futex };
        assert_eq!(told(&preempted), [("cpu", 6, 1_000, 6_000, Some(6_000))]);
        let by_timer = WaitFacts { queued_ns: 7_000_000, queued: 0, waker: BY_INTERRUPT, ..futex };
        assert_eq!(told(&by_timer), [("lock", 4, 1_000, 6_000, Some(0))]);
        assert_eq!(stretches(&by_timer, || "lock").map(|it| it.wait.waker).collect::<Vec<_>>(), [None]);
    }
}
