//! What `/proc` and the clocks tell of a running process: CPU time, memory, and the BPF objects it holds.
//!
//! The profiler is watched from outside, so that it needs no code for its own benchmark.

use std::fs;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// `BPF_PROG_TYPE_PERF_EVENT` (include/uapi/linux/bpf.h): the timer's programs, and the kicks'.
const PERF_EVENT: u64 = 7;
/// `BPF_PROG_TYPE_RAW_TRACEPOINT`: what hears of starts, ends and switches.
const RAW_TRACEPOINT: u64 = 17;

/// Has the kernel measure the runs of BPF programs as long as what it gives lives (`BPF_ENABLE_STATS`, bpf(2)).
pub(crate) fn measure_bpf() -> Result<OwnedFd> {
    const BPF_ENABLE_STATS: libc::c_long = 32;
    // `attr.enable_stats.type`: `BPF_STATS_RUN_TIME`.
    let run_time = 0_u32;
    // SAFETY: the command reads the word, as long as it says it is.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_ENABLE_STATS, &raw const run_time, size_of::<u32>()) };
    let fd = i32::try_from(fd).ok().filter(|&fd| fd >= 0);
    let fd = fd.ok_or_else(io::Error::last_os_error).context("the kernel does not measure BPF programs (5.8)")?;
    // SAFETY: a descriptor that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// BPF objects behind the descriptors of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BpfObjects {
    /// Maps.
    pub(crate) maps: usize,
    /// Links: attached tracepoints and, from 5.15 on, perf events.
    pub(crate) links: usize,
    /// Perf events, the one that follows mappings included.
    pub(crate) perf_events: usize,
    /// Runs of the timer's program, as the kernel counts them.
    pub(crate) timer_runs: u64,
    /// Nanoseconds of these runs.
    pub(crate) timer_ns: u64,
    /// Nanoseconds of all other programs.
    pub(crate) other_ns: u64,
    /// Runs of the raw tracepoint that has run most: where waits are sampled, that of the switches.
    pub(crate) tracepoint_runs: u64,
    /// Nanoseconds of these runs.
    pub(crate) tracepoint_ns: u64,
}

impl BpfObjects {
    /// Of a process; all zero when it is gone or holds none.
    pub(crate) fn of(pid: u32) -> Self {
        let mut objects = Self::default();
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return objects };
        for descriptor in descriptors.filter_map(std::result::Result::ok) {
            let Ok(link) = fs::read_link(descriptor.path()) else { continue };
            match link.to_str() {
                Some("anon_inode:bpf-map") => objects.maps += 1,
                Some("anon_inode:bpf_link" | "anon_inode:bpf-link") => objects.links += 1,
                Some("anon_inode:[perf_event]") => objects.perf_events += 1,
                Some("anon_inode:bpf-prog") => {
                    let info = Path::new("/proc").join(pid.to_string()).join("fdinfo").join(descriptor.file_name());
                    objects.add_program(&fs::read_to_string(info).unwrap_or_default());
                }
                _ => {}
            }
        }
        objects
    }

    fn add_program(&mut self, info: &str) {
        let field = |name| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        let (runs, nanoseconds) = (field("run_cnt"), field("run_time_ns"));
        if field("prog_type") == PERF_EVENT {
            // A tail-called program's time is its caller's; only the attached one has runs.
            self.timer_runs += runs;
            self.timer_ns += nanoseconds;
            return;
        }
        self.other_ns += nanoseconds;
        if field("prog_type") == RAW_TRACEPOINT && runs > self.tracepoint_runs {
            (self.tracepoint_runs, self.tracepoint_ns) = (runs, nanoseconds);
        }
    }

    /// What was added since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            timer_runs: self.timer_runs.saturating_sub(before.timer_runs),
            timer_ns: self.timer_ns.saturating_sub(before.timer_ns),
            other_ns: self.other_ns.saturating_sub(before.other_ns),
            tracepoint_runs: self.tracepoint_runs.saturating_sub(before.tracepoint_runs),
            tracepoint_ns: self.tracepoint_ns.saturating_sub(before.tracepoint_ns),
            ..*self
        }
    }
}

/// CPU time of all threads of a process, ended ones included.
///
/// # Errors
/// The process is gone.
pub(crate) fn cpu_time(pid: u32) -> Result<Duration> {
    let process = Pid::from_raw(i32::try_from(pid).context("a pid is no larger")?);
    let clock = clock_getcpuclockid(process).with_context(|| format!("pid {pid} has no CPU clock any more"))?;
    let time = clock_gettime(clock).with_context(|| format!("cannot read the CPU clock of pid {pid}"))?;
    Ok(time.into())
}

/// Time that the main thread of a process waited for a CPU while it wanted one.
///
/// # Errors
/// The process is gone, or the kernel does not tell (`CONFIG_SCHED_INFO`).
pub(crate) fn run_delay(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/schedstat");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let nanoseconds = text.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    Ok(Duration::from_nanos(nanoseconds.with_context(|| format!("{path} holds no run delay: {text:?}"))?))
}

/// One field of `/proc/PATH` in the form `name: value`.
pub(crate) fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

/// Jiffies of all CPUs together, and those of them that the hypervisor gave to others (proc_stat(5), 8th field).
pub(crate) fn steal() -> (u64, u64) {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let first = text.lines().next().unwrap_or_default();
    // Guest time, from the 9th on, is in user time already.
    let jiffies: Vec<u64> = first.split_whitespace().skip(1).take(8).filter_map(|word| word.parse().ok()).collect();
    (jiffies.iter().sum(), jiffies.get(7).copied().unwrap_or(0))
}

/// Processes and threads started since boot.
pub(crate) fn forks() -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("processes ")?.trim().parse().ok());
    count.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_apart_by_type() {
        let mut objects = BpfObjects::default();
        objects.add_program("prog_type:\t7\nrun_time_ns:\t3583747\nrun_cnt:\t1530\n");
        objects.add_program("prog_type:\t7\nrun_time_ns:\t0\nrun_cnt:\t0\n");
        objects.add_program("prog_type:\t17\nrun_time_ns:\t12469\nrun_cnt:\t37\n");
        assert_eq!((objects.timer_runs, objects.timer_ns, objects.other_ns), (1530, 3_583_747, 12_469));
        objects.add_program("prog_type:\t17\nrun_time_ns:\t900\nrun_cnt:\t9\n");
        assert_eq!((objects.tracepoint_runs, objects.tracepoint_ns, objects.other_ns), (37, 12_469, 13_369));
        let later = BpfObjects { timer_runs: 2000, timer_ns: 4_000_000, ..objects };
        assert_eq!(later.since(&objects).timer_runs, 470);
    }

    #[test]
    fn this_process_has_clocks() {
        let own = std::process::id();
        assert!(cpu_time(own).unwrap() > Duration::ZERO);
        run_delay(own).unwrap();
        assert!(field("/proc/self/status", "VmHWM").unwrap().ends_with("kB"));
        assert!(steal().0 > 0);
        assert!(forks() > 0);
    }
}
