//! What a recording costs: its own CPU time and memory, and what the kernel measures of the BPF programs.
//!
//! The kernel measures each run of every BPF program of the host, or none: two clock readings per run. For samples that is not
//! noticeable; where waits are sampled, a program runs at each context switch, and measuring would cost as much as the program does. So
//! there it is measured at first, and after that estimated from the number of switches, which the kernel counts anyway.

use super::follow::lock;
use crate::kernel::{Kernel, RunStats};
use crate::remote::helpers_cpu_time;
use crate::report::{CostReport, StartReport};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use nix::sys::time::TimeVal;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long to measure where waits are sampled.
const MEASURED: Duration = Duration::from_millis(900);

/// What the report's `bpf_stats` says from then on.
const RECKONED: &str = "for the first second; from then on by the number of context switches";

/// The kernel's own measuring of BPF programs.
pub(super) struct Stats(Mutex<State>);

enum State {
    /// The kernel refuses, and why.
    Off(String),
    /// It is on while this lives.
    On { _held: OwnedFd, until: Option<Until> },
    /// It was on.
    Reckoned(Reckoned),
}

/// Measures for a while, from this moment.
#[derive(Clone, Copy)]
struct Until {
    began: Instant,
    run_ns: u64,
    switches: u64,
}

/// What BPF costs, estimated from the number of switches.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Reckoned {
    /// Up to the last moment that was measured.
    run_ns: u64,
    switches: u64,
    each_ns: f64,
}

impl Reckoned {
    fn new(began: &Until, run_ns: u64, switches: u64) -> Self {
        let (ns, met) = (run_ns.saturating_sub(began.run_ns), switches.saturating_sub(began.switches));
        Self { run_ns, switches, each_ns: ns as f64 / met.max(1) as f64 }
    }

    fn run_ns(&self, switches: u64) -> u64 {
        self.run_ns + (switches.saturating_sub(self.switches) as f64 * self.each_ns) as u64
    }
}

/// What had been used by a moment, since the very start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Used {
    /// Runs of the timer's program since the object was loaded, as the kernel counted them.
    pub runs: Option<u64>,
    run_ns: Option<u64>,
    /// User and system time of this process, seconds.
    cpu_s: f64,
}

impl Stats {
    /// Asks the kernel to measure.
    pub fn start() -> Self {
        let held = aya::sys::enable_stats(aya::sys::Stats::RunTime);
        Self(Mutex::new(match held {
            Ok(held) => State::On { _held: held, until: None },
            // The kernel always requires CAP_SYS_ADMIN for it.
            Err(error) => State::Off(format!("off: {}", error.io_error)),
        }))
    }

    /// Waits are sampled from now on: [`Stats::turn`] ends the measuring.
    pub fn waits_begin(&self, kernel: &Kernel) {
        let (Ok(measured), Some(switches)) = (kernel.run_stats(), context_switches()) else { return };
        if let State::On { until, .. } = &mut *lock(&self.0) {
            *until = Some(Until { began: Instant::now(), run_ns: measured.run_ns, switches });
        }
    }

    /// Ends the measuring if it is time. To be called now and then.
    pub fn turn(&self, kernel: &Kernel) {
        let mut state = lock(&self.0);
        let State::On { until: Some(until), .. } = &*state else { return };
        if until.began.elapsed() < MEASURED {
            return;
        }
        let (Ok(measured), Some(switches)) = (kernel.run_stats(), context_switches()) else { return };
        *state = State::Reckoned(Reckoned::new(until, measured.run_ns, switches));
    }

    /// Whether it is known what BPF programs cost.
    pub fn are_on(&self) -> bool {
        !matches!(&*lock(&self.0), State::Off(_))
    }

    /// Runs of the timer's program, if the kernel counted each, and the nanoseconds of all programs.
    fn measured(&self, kernel: &Kernel) -> (Option<u64>, Option<u64>) {
        match &*lock(&self.0) {
            State::Off(_) => (None, None),
            State::On { .. } => {
                let stats = kernel.run_stats().ok();
                let of = |what: fn(&RunStats) -> u64| stats.as_ref().map(what);
                (of(|it| it.run_count), of(|it| it.run_ns))
            }
            State::Reckoned(by) => (None, Some(by.run_ns(context_switches().unwrap_or(by.switches)))),
        }
    }

    /// CPU time of this process up to now, and of the BPF programs if known.
    pub fn time(&self, kernel: &Kernel) -> Duration {
        let bpf_ns = self.measured(kernel).1.unwrap_or(0);
        Duration::from_nanos(bpf_ns + super::registry::cpu_time_ns(std::process::id()).unwrap_or(0))
            + helpers_cpu_time()
    }

    /// What was used up to now.
    pub fn used(&self, kernel: &Kernel) -> Used {
        let (runs, run_ns) = self.measured(kernel);
        let own_s = usage().map_or(0.0, |usage| seconds(usage.user_time()) + seconds(usage.system_time()));
        Used { runs, run_ns, cpu_s: own_s + helpers_cpu_time().as_secs_f64() }
    }

    /// What was used between two moments.
    pub fn cost(&self, before: &Used, now: &Used, kernel: &Kernel, ring_bytes: u32, start: StartReport) -> CostReport {
        let since = |before: Option<u64>, now: Option<u64>| now.map(|now| now.saturating_sub(before.unwrap_or(0)));
        CostReport {
            bpf_run_count: since(before.runs, now.runs),
            bpf_run_ns: since(before.run_ns, now.run_ns),
            bpf_stats: match &*lock(&self.0) {
                State::Off(why) => why.clone(),
                State::On { .. } => "on".to_owned(),
                State::Reckoned(_) => RECKONED.to_owned(),
            },
            user_cpu_s: now.cpu_s - before.cpu_s,
            peak_rss_bytes: peak_rss_bytes(),
            map_bytes: kernel.map_bytes(),
            ring_bytes: u64::from(ring_bytes),
            start,
        }
    }
}

/// Context switches of the host since it was started (`ctxt` in proc_stat(5)).
fn context_switches() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("ctxt ")?.trim().parse().ok())
}

/// Peak resident memory of this program: `VmHWM`, in kB (proc_pid_status(5)). `ru_maxrss` outlives `exec`, and would be that of
/// whatever started the program where that had more.
fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    peak.unwrap_or(0) * 1024
}

fn usage() -> Option<Usage> {
    getrusage(UsageWho::RUSAGE_SELF).ok()
}

fn seconds(time: TimeVal) -> f64 {
    time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_measured_goes_by_switches() {
        let began = Until { began: Instant::now(), run_ns: 1_000, switches: 50 };
        let by = Reckoned::new(&began, 6_000, 75);
        assert_eq!(by, Reckoned { run_ns: 6_000, switches: 75, each_ns: 200.0 });
        assert_eq!((by.run_ns(75), by.run_ns(85)), (6_000, 8_000));
        // No switch in between, or a count from another machine.
        assert_eq!(Reckoned::new(&began, 1_000, 50).run_ns(90), 1_000);
        assert_eq!(by.run_ns(3), 6_000);
    }

    #[test]
    fn the_host_counts_its_switches() {
        let before = context_switches().expect("every kernel tells it");
        std::thread::sleep(Duration::from_millis(1));
        assert!(context_switches() > Some(before), "this thread was switched");
    }
}
