//! `--max-cpu`: compares what the profiler uses with what it may use, and samples less often where it is too much; once
//! the load has been gone for a while, it samples more often again, as far as there is room.
//!
//! Also keeps account of the rates over time: the expected number of samples is the sum over the periods with one rate
//! each.

use super::bell::Bell;
use super::follow::lock;
use super::registry::Registry;
use super::request::Request;
use super::stats::Stats;
use crate::kernel::{Kernel, KernelError, drop_privileges_but_sampling};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the profiler's use is compared with its limit.
const SECOND: Duration = Duration::from_secs(1);
/// The longest interval between samples, as for `--interval`.
const SLOWEST: Duration = Duration::from_secs(1);
/// The rate is lowered by this much more than the excess requires, so that one step is mostly enough.
const MARGIN: f64 = 1.1;
/// Most that one step lowers or raises: what one second shows may not last.
const LARGEST_STEP: f64 = 4.0;
/// Raised only so far that this share of the limit would have sufficed in each of the seconds before. Use apart from
/// sampling does not grow with the rate, so this errs on the side of caution.
const RAISE_TO: f64 = 0.7;
/// This many seconds in a row must have had room, the first time; twice as many each time that the rate had to be
/// lowered again, up to [`PATIENCE_MOST`]: the rate must not go up and down with the load.
const PATIENCE: u32 = 10;
const PATIENCE_MOST: u32 = 640;
/// Less than this is not worth attaching the event anew, which may cost a sample.
const WORTH: f64 = 1.25;

/// Decides on the interval from what was used.
#[derive(Debug)]
pub(super) struct Throttle {
    /// Share of one core.
    limit: f64,
    interval: Duration,
    /// The interval asked for: it never gets shorter.
    shortest: Duration,
    /// Time since the start, and what was used by then.
    last: Option<(Duration, Duration)>,
    /// Share used in the second before, if it was too much.
    over: Option<f64>,
    /// Seconds in a row that had room, and the largest share used in one of them.
    calm: (u32, f64),
    /// How many such seconds it takes.
    patience: u32,
    raised: bool,
}

impl Throttle {
    /// Starts with `interval` between samples.
    pub fn new(limit: f64, interval: Duration) -> Self {
        Self {
            limit,
            interval,
            shortest: interval,
            last: None,
            over: None,
            calm: (0, 0.0),
            patience: PATIENCE,
            raised: false,
        }
    }

    /// Takes what was used until now. Returns a longer interval if two seconds in a row were over the limit (a single
    /// one may have been spent on the start of a hundred processes), and a shorter one if there has been room for long.
    pub fn turn(&mut self, elapsed: Duration, used: Duration) -> Option<Duration> {
        let Some((before, used_before)) = self.last else {
            self.last = Some((elapsed, used));
            return None;
        };
        let span = elapsed.saturating_sub(before);
        if span < SECOND {
            return None;
        }
        self.last = Some((elapsed, used));
        let share = used.saturating_sub(used_before).as_secs_f64() / span.as_secs_f64();
        if share <= self.limit {
            self.over = None;
            return self.raise(share);
        }
        self.calm = (0, 0.0);
        let first = self.over.replace(share)?;
        self.over = None;
        if std::mem::take(&mut self.raised) {
            self.patience = (self.patience * 2).min(PATIENCE_MOST);
        }
        let factor = (first.min(share) / self.limit * MARGIN).min(LARGEST_STEP);
        let interval = self.interval.mul_f64(factor).min(SLOWEST);
        (interval > self.interval).then(|| {
            self.interval = interval;
            interval
        })
    }

    /// A second with room, of which this share of a core was used.
    fn raise(&mut self, share: f64) -> Option<Duration> {
        let (seconds, most) = (self.calm.0 + 1, self.calm.1.max(share));
        self.calm = (seconds, most);
        if seconds < self.patience || self.interval == self.shortest {
            return None;
        }
        self.calm = (0, 0.0);
        let factor = (self.limit * RAISE_TO / most).min(LARGEST_STEP);
        if factor < WORTH {
            return None;
        }
        self.raised = true;
        self.interval = self.interval.div_f64(factor).max(self.shortest);
        Some(self.interval)
    }
}

/// Which rate the kernel was asked for during how much of the targets' CPU time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    rate_hz: f64,
    /// CPU time of the targets up to the last change.
    cpu_ns: u64,
    /// Samples to expect from it.
    expected: f64,
}

impl Rates {
    /// Starts with a rate.
    pub fn new(rate_hz: f64) -> Self {
        Self { rate_hz, cpu_ns: 0, expected: 0.0 }
    }

    /// The rate changes, when the targets have used so much altogether.
    pub fn change(&mut self, cpu_ns: u64, rate_hz: f64) {
        self.expected = self.expected(cpu_ns);
        // A process that has just ended may be missing until its end is reported: its time must not count twice.
        self.cpu_ns = self.cpu_ns.max(cpu_ns);
        self.rate_hz = rate_hz;
    }

    /// Samples to expect from this much CPU time.
    pub fn expected(&self, cpu_ns: u64) -> f64 {
        self.expected + cpu_ns.saturating_sub(self.cpu_ns) as f64 / 1e9 * self.rate_hz
    }
}

/// Keeps a recording within its limit, if there is one. Runs in a thread of its own because it keeps the right to
/// attach the event anew, which the others drop.
pub(super) struct Limiter {
    rates: Arc<Mutex<Rates>>,
    running: Option<Thread>,
}

struct Thread {
    /// The thread ends when this is dropped.
    stop: mpsc::Sender<()>,
    /// Messages for the user while it runs.
    told: mpsc::Receiver<String>,
    thread: JoinHandle<()>,
}

impl Limiter {
    /// Starts when sampling starts. `max_cpu` is a share of one core; `None`: no limit, and no thread.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn start(
        request: &Request,
        stats: &Arc<Stats>,
        kernel: &Arc<Mutex<Kernel>>,
        registry: &Arc<Mutex<Registry>>,
        news: &Bell,
    ) -> std::io::Result<Self> {
        let rates = Arc::new(Mutex::new(Rates::new(request.rate_hz)));
        let Some(limit) = request.max_cpu else { return Ok(Self { rates, running: None }) };
        let (stop, stopped) = mpsc::channel();
        let (sender, told) = mpsc::channel();
        let worker = Worker {
            throttle: Throttle::new(limit, request.interval),
            rates: Arc::clone(&rates),
            stats: Arc::clone(stats),
            kernel: Arc::clone(kernel),
            registry: Arc::clone(registry),
            told: sender,
            news: news.clone(),
        };
        let thread = std::thread::Builder::new().name("tachyon-limit".to_owned()).spawn(move || {
            // Where the kernel refuses, the main thread says so.
            let _refused = drop_privileges_but_sampling();
            worker.run(&stopped);
        })?;
        Ok(Self { rates, running: Some(Thread { stop, told, thread }) })
    }

    /// Messages for the user so far.
    pub fn told(&self) -> Vec<String> {
        self.running.iter().flat_map(|thread| thread.told.try_iter()).collect()
    }

    /// The sampling rates so far.
    pub fn rates(&self) -> Rates {
        *lock(&self.rates)
    }

    /// Ends it: from now on the event stays as it is.
    pub fn stop(&mut self) {
        if let Some(Thread { stop, thread, told }) = self.running.take() {
            drop((stop, told));
            // Its panic is on standard error; the rate last asked for stays.
            let _panicked = thread.join();
        }
    }
}

/// The thread's own.
struct Worker {
    throttle: Throttle,
    rates: Arc<Mutex<Rates>>,
    stats: Arc<Stats>,
    kernel: Arc<Mutex<Kernel>>,
    registry: Arc<Mutex<Registry>>,
    told: mpsc::Sender<String>,
    /// Rung when there is a message.
    news: Bell,
}

impl Worker {
    fn run(mut self, stopped: &mpsc::Receiver<()>) {
        let start = Instant::now();
        let (mut lowest_hz, mut told) = (f64::INFINITY, false);
        if !self.stats.are_on() {
            let note = "the CPU limit is compared with the profiler's own process alone: what BPF costs takes CAP_SYS_ADMIN to know";
            lock(&self.registry).notes.insert(note.to_owned());
        }
        while stopped.recv_timeout(SECOND) == Err(mpsc::RecvTimeoutError::Timeout) {
            let before = self.throttle.interval;
            let used = self.stats.time(&lock(&self.kernel));
            let Some(interval) = self.throttle.turn(start.elapsed(), used) else { continue };
            if let Err(error) = self.reattach(interval, before) {
                let note = format!("the sampling rate cannot be changed any more: {error}");
                lock(&self.registry).notes.insert(note.clone());
                // The recording may just be ending.
                let _over = self.told.send(note);
                return self.news.ring();
            }
            let rate_hz = 1.0 / interval.as_secs_f64();
            let cpu_ns = lock(&self.registry).python_cpu_ns_in_all();
            lock(&self.rates).change(cpu_ns, rate_hz);
            lowest_hz = lowest_hz.min(rate_hz);
            if !std::mem::replace(&mut told, true) {
                // As it was given, with two decimals at most.
                let percent = (self.throttle.limit * 10_000.0).round() / 100.0;
                let _over = self.told.send(format!(
                    "the profiler used more than its CPU limit, {percent} % of a core: sampling at {rate_hz:.1} Hz, less if need be, and more when there is room again"
                ));
                self.news.ring();
            }
        }
        if told {
            let last_hz = lock(&self.rates).rate_hz;
            let raised =
                if last_hz > lowest_hz { format!(", and was {last_hz:.1} Hz at the end") } else { String::new() };
            let note =
                format!("the sampling rate was lowered to {lowest_hz:.1} Hz to keep within the CPU limit{raised}");
            lock(&self.registry).notes.insert(note);
        }
    }

    /// Attaches the event with another interval. Where that fails it is as it was, if the kernel lets it.
    fn reattach(&self, interval: Duration, before: Duration) -> Result<(), KernelError> {
        let mut kernel = lock(&self.kernel);
        kernel.detach_sampling();
        if let Err(error) = kernel.attach_sampling(interval) {
            kernel.attach_sampling(before)?;
            return Err(error);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn two_seconds_over_the_limit_lower_the_rate() {
        let mut throttle = Throttle::new(0.01, ms(10));
        // (time, used, new interval in ms)
        for (line, (elapsed, used, expected)) in [
            (0, 500, None),
            // Too early to tell.
            (900, 600, None),
            // 100 ms in a second is ten times too much, but only once.
            (1000, 600, None),
            (2000, 605, None),
            (3000, 655, None),
            // 50 and 20 ms: by the lesser, twice and the margin.
            (4000, 675, Some(22)),
            // What came before the change does not count twice.
            (5000, 700, None),
            (6000, 710, None),
            (7000, 2000, None),
            // The largest single step.
            (8000, 3000, Some(88)),
            (9000, 4000, None),
            (10_000, 5000, Some(352)),
            (11_000, 6000, None),
            // No rarer than once a second.
            (12_000, 7000, Some(1000)),
            (13_000, 8000, None),
            (14_000, 9000, None),
        ]
        .into_iter()
        .enumerate()
        {
            let interval = throttle.turn(ms(elapsed), ms(used));
            assert_eq!(interval.map(|interval| interval.as_millis()), expected, "line {line}");
        }
    }

    #[test]
    fn seconds_with_room_raise_the_rate_again() {
        let mut throttle = Throttle::new(0.01, ms(10));
        let (mut second, mut used) = (0, 0);
        let mut spend = |throttle: &mut Throttle, seconds: u64, millis: u64| {
            let mut changes = Vec::new();
            for _ in 0..seconds {
                (second, used) = (second + 1, used + millis * 10);
                let interval = throttle.turn(ms(second * 1000), Duration::from_micros(used * 100));
                changes.extend(interval.map(|interval| interval.as_millis()));
            }
            changes
        };
        // As asked for: there is nothing to raise.
        assert!(spend(&mut throttle, 30, 1).is_empty());
        // 40 ms is four times too much.
        assert_eq!(spend(&mut throttle, 2, 40), [40]);
        // 6 ms leaves too little room to be worth it.
        assert!(spend(&mut throttle, 60, 6).is_empty());
        // 2 ms leaves room for 3.5 times as much; the interval never gets shorter than what was asked for.
        assert_eq!(spend(&mut throttle, 20, 2), [11, 10]);
        // The load comes back: from now on it takes twice as long without it.
        assert_eq!(spend(&mut throttle, 2, 40), [40]);
        assert!(spend(&mut throttle, 19, 1).is_empty());
        assert_eq!(spend(&mut throttle, 1, 1), [10]);
        assert_eq!(spend(&mut throttle, 2, 40), [40]);
        assert_eq!(spend(&mut throttle, 40, 1), [10]);
    }

    #[test]
    fn expected_is_the_sum_over_rates() {
        let second = 1_000_000_000;
        let mut rates = Rates::new(100.0);
        assert_eq!(rates.expected(3 * second), 300.0);
        rates.change(2 * second, 50.0);
        // A process that ended and has not been reported yet.
        rates.change(second, 25.0);
        assert_eq!(rates.expected(2 * second), 200.0);
        assert_eq!(rates.expected(6 * second), 300.0);
    }
}
