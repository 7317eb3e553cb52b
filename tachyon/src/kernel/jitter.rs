//! Intervals that vary, so that no program can be in step with them.
//!
//! A program that alternates between one thing for 5 ms and another for 5 ms is met in the same one by every firing of a 10 ms timer: 0
//! : 100 where 50 : 50 is true. So each CPU's interval is drawn anew: once at the start, then about twice a second, and ever more
//! rarely as the recording goes on, down to once in two seconds, for each draw wakes a thread and interrupts every CPU. How often
//! matters little: an interval that happens to be in step spoils more samples the longer it lasts, but such intervals are then rarer.
//! After the first seconds none that was drawn later lasts longer than a fifth of what had been recorded before it.
//!
//! When the kernel is given another interval (`PERF_EVENT_IOC_PERIOD`), it forgets how much of the old one had passed
//! (`__perf_event_period()`, kernel/events/core.c): that moves the phase to anywhere, and costs half an interval on average.
//! What was forgotten is owed, and the following intervals are shortened so that the requested rate is kept: see [`Pace`].

use perf_event::Counter;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// How far an interval may lie from the mean, as a share of it.
pub(super) const SPREAD: f64 = 0.2;
/// An interval is never shorter or longer than these shares of the requested one, whatever is owed.
const SHORTEST: f64 = 0.5;
const LONGEST: f64 = 1.5;
/// Average time between two changes: short compared with the recording up to now ...
const OF_RECORDING: u32 = 8;
/// ... within these bounds ...
const BETWEEN: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(2));
/// ... but at least this many intervals, because each change costs half of one.
const INTERVALS_BETWEEN: u32 = 10;
/// A change interrupts its CPU for some microseconds: on large machines each CPU gets fewer of them.
const BETWEEN_FOR_EACH_CPU: Duration = Duration::from_millis(5);

mod request {
    nix::ioctl_write_ptr!(
        /// `PERF_EVENT_IOC_PERIOD` (include/uapi/linux/perf_event.h).
        set_period,
        b'$',
        4,
        u64
    );
}

/// The interval that was asked for, nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mean(f64);

impl Mean {
    pub(super) fn of(interval_ns: u64) -> Self {
        Self(interval_ns as f64)
    }
}

/// How one CPU keeps the requested rate.
#[derive(Clone, Copy, Debug)]
struct Pace {
    mean: Mean,
    interval: f64,
    /// Firings that should have happened but did not.
    owed: f64,
}

impl Pace {
    fn new(mean: Mean) -> Self {
        Self { mean, interval: mean.0, owed: 0.0 }
    }

    /// The next interval, in nanoseconds, when the last one has been in use for `passed` and the next will be in use for
    /// about `planned`. `draw` is uniform between 0 and 1.
    fn next(&mut self, passed: Duration, planned: Duration, draw: f64) -> u64 {
        let passed = passed.as_nanos() as f64;
        let fired = (passed / self.interval).floor();
        self.owed += passed / self.mean.0 - fired;
        let planned = planned.as_nanos() as f64;
        // Half an interval will be lost at the next change.
        let wanted = planned / self.mean.0 + self.owed + 0.5;
        let rate = 1.0 + SPREAD * (2.0 * draw - 1.0);
        let interval = planned / wanted.max(f64::MIN_POSITIVE) / rate;
        // In whole nanoseconds, as the kernel counts them: over long runs of short intervals the remainders would add up.
        self.interval = interval.clamp(self.mean.0 * SHORTEST, self.mean.0 * LONGEST).round().max(1.0);
        self.interval as u64
    }
}

/// Draws the intervals of all CPUs.
#[derive(Debug)]
pub(super) struct Jitter {
    mean: Mean,
    began: Instant,
    /// By CPU, with the time when its interval was last drawn.
    paces: Vec<(Pace, Instant)>,
    due: Instant,
}

impl Jitter {
    /// Draws first intervals for `events`: one for each CPU, whose interval is `mean` now.
    pub(super) fn begin(events: &[Counter], mean: Mean) -> Self {
        let now = Instant::now();
        let mut jitter = Self { mean, began: now, paces: vec![(Pace::new(mean), now); events.len()], due: now };
        jitter.turn(events);
        jitter
    }

    /// Draws them anew if it is time. Returns when it will next be time.
    pub(super) fn turn(&mut self, events: &[Counter]) -> Instant {
        if Instant::now() < self.due {
            return self.due;
        }
        let between = between(self.mean, events.len(), self.began.elapsed());
        for (event, (pace, since)) in events.iter().zip(&mut self.paces) {
            let now = Instant::now();
            let interval = pace.next(now - *since, between, fastrand::f64());
            *since = now;
            // SAFETY: an open descriptor, and a number that lives as long as the call.
            let changed = unsafe { request::set_period(event.as_raw_fd(), &raw const interval) };
            if changed.is_err() {
                // The event of a CPU that has gone offline: it owes nothing when it is back.
                *pace = Pace::new(self.mean);
            }
        }
        self.due = Instant::now() + between.mul_f64(0.5 + fastrand::f64());
        self.due
    }
}

/// How long an interval is in use, on average, when so much has been recorded.
fn between(mean: Mean, cpus: usize, recorded: Duration) -> Duration {
    let intervals = Duration::from_nanos(mean.0 as u64).saturating_mul(INTERVALS_BETWEEN);
    let for_cpus = BETWEEN_FOR_EACH_CPU.saturating_mul(u32::try_from(cpus).unwrap_or(u32::MAX));
    (recorded / OF_RECORDING).clamp(BETWEEN.0, BETWEEN.1).max(intervals).max(for_cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A timer like the kernel's, and a thread that changes it at moments that it does not choose.
    #[test]
    fn the_asked_rate_is_kept() {
        let mut random = fastrand::Rng::with_seed(7);
        for hz in [19.0, 99.0, 100.0, 997.0, 10_000.0_f64] {
            let mean = Mean::of((1e9 / hz) as u64);
            let mut pace = Pace::new(mean);
            let (mut passed, mut fired) = (0.0_f64, 0.0);
            let mut spread = (f64::MAX, 0.0_f64);
            for change in 0..2_000 {
                let between = between(mean, 2, Duration::from_secs_f64(passed));
                // Now and then the thread gets no CPU for a long time.
                let late = if change % 50 == 0 { 5.0 } else { 1.0 };
                let used = between.mul_f64((0.5 + random.f64()) * late);
                passed += used.as_secs_f64();
                fired += (used.as_nanos() as f64 / pace.interval).floor();
                let interval = pace.next(used, between, random.f64()) as f64 / mean.0;
                spread = (spread.0.min(interval), spread.1.max(interval));
            }
            let error = fired / (passed * hz) - 1.0;
            assert!(error.abs() < 2e-4, "{hz} Hz: {fired} firings in {passed} s, {error}");
            assert!(spread.0 < 0.9 && spread.1 > 1.1, "{hz} Hz: {spread:?}");
        }
    }

    #[test]
    fn changes_are_rare_where_they_cost_most() {
        let seconds = |hz: f64, cpus, recorded| {
            between(Mean::of((1e9 / hz) as u64), cpus, Duration::from_secs(recorded)).as_secs_f64()
        };
        let expected = [
            (1000.0, 2, 0, 0.5),
            (1000.0, 2, 4, 0.5),
            (1000.0, 2, 10, 1.25),
            (1000.0, 2, 3_600, 2.0),
            (10.0, 2, 0, 1.0),
            (1.0, 2, 3_600, 10.0),
            (1000.0, 128, 0, 0.64),
            (1000.0, 1_024, 3_600, 5.12),
        ];
        for (hz, cpus, recorded, due) in expected {
            assert!((seconds(hz, cpus, recorded) - due).abs() < 1e-6, "{hz} Hz, {cpus} CPUs, after {recorded} s");
        }
    }
}
