//! What `/proc` and the clocks say about a running process: CPU time, memory, and the BPF objects it holds.
//!
//! The profiler is watched from outside, so that it needs no code for its own benchmark.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use aya::programs::{ProgramInfo, loaded_programs};
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// `BPF_PROG_TYPE_PERF_EVENT` (include/uapi/linux/bpf.h): the timer's programs.
const PERF_EVENT: u64 = 7;
/// The program that is run at context switches.
const SWITCH: &str = "on_switch";
/// The program that an interrupt runs to take the stack of a thread that has waited.
const KICK: &str = "on_kick";

/// Makes the kernel measure the runs of BPF programs as long as the returned descriptor lives (`BPF_ENABLE_STATS`, bpf(2)).
pub(crate) fn measure_bpf() -> Result<OwnedFd> {
    const BPF_ENABLE_STATS: libc::c_long = 32;
    // `attr.enable_stats.type`: `BPF_STATS_RUN_TIME`.
    let run_time = 0_u32;
    // SAFETY: the command reads the word, whose size is passed along.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_ENABLE_STATS, &raw const run_time, size_of::<u32>()) };
    let fd = i32::try_from(fd).ok().filter(|&fd| fd >= 0);
    let fd = fd.ok_or_else(io::Error::last_os_error).context("the kernel does not measure BPF programs (5.8)")?;
    // SAFETY: a descriptor with no other owner.
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
    /// Runs of the program for context switches, if waits are sampled.
    pub(crate) switch_runs: u64,
    /// Nanoseconds of these runs.
    pub(crate) switch_ns: u64,
    /// Runs of the program that takes stacks of threads that have waited.
    pub(crate) kick_runs: u64,
    /// Nanoseconds of these runs.
    pub(crate) kick_ns: u64,
}

/// Names of the programs in the kernel, by their ids.
fn program_names() -> HashMap<u64, String> {
    let named = |program: ProgramInfo| Some((u64::from(program.id()), program.name_as_str()?.to_owned()));
    loaded_programs().filter_map(std::result::Result::ok).filter_map(named).collect()
}

impl BpfObjects {
    /// The objects of a process; all zero if it is gone or holds none.
    pub(crate) fn of(pid: u32) -> Self {
        let mut objects = Self::default();
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return objects };
        let names = program_names();
        for descriptor in descriptors.filter_map(std::result::Result::ok) {
            let Ok(link) = fs::read_link(descriptor.path()) else { continue };
            match link.to_str() {
                Some("anon_inode:bpf-map") => objects.maps += 1,
                Some("anon_inode:bpf_link" | "anon_inode:bpf-link") => objects.links += 1,
                Some("anon_inode:[perf_event]") => objects.perf_events += 1,
                Some("anon_inode:bpf-prog") => {
                    let info = Path::new("/proc").join(pid.to_string()).join("fdinfo").join(descriptor.file_name());
                    objects.add_program(&fs::read_to_string(info).unwrap_or_default(), &names);
                }
                _ => {}
            }
        }
        objects
    }

    fn add_program(&mut self, info: &str, names: &HashMap<u64, String>) {
        let field = |name| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        let (runs, nanoseconds) = (field("run_cnt"), field("run_time_ns"));
        if field("prog_type") == PERF_EVENT {
            // A tail-called program's time counts for its caller; only the attached one has runs.
            self.timer_runs += runs;
            self.timer_ns += nanoseconds;
            return;
        }
        self.other_ns += nanoseconds;
        match names.get(&field("prog_id")).map(String::as_str) {
            Some(SWITCH) => (self.switch_runs, self.switch_ns) = (runs, nanoseconds),
            Some(KICK) => (self.kick_runs, self.kick_ns) = (runs, nanoseconds),
            _ => {}
        }
    }

    /// What was added since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            timer_runs: self.timer_runs.saturating_sub(before.timer_runs),
            timer_ns: self.timer_ns.saturating_sub(before.timer_ns),
            other_ns: self.other_ns.saturating_sub(before.other_ns),
            switch_runs: self.switch_runs.saturating_sub(before.switch_runs),
            switch_ns: self.switch_ns.saturating_sub(before.switch_ns),
            kick_runs: self.kick_runs.saturating_sub(before.kick_runs),
            kick_ns: self.kick_ns.saturating_sub(before.kick_ns),
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

/// Time that the main thread of a process spent waiting for a CPU.
///
/// # Errors
/// The process is gone, or the kernel does not say (`CONFIG_SCHED_INFO`).
pub(crate) fn run_delay(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/schedstat");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let nanoseconds = text.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    Ok(Duration::from_nanos(nanoseconds.with_context(|| format!("{path} holds no run delay: {text:?}"))?))
}

/// Voluntary context switches of all threads of a process that are alive: each is followed by a wake-up.
pub(crate) fn wakeups(pid: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(std::result::Result::ok);
    let switches = |thread: fs::DirEntry| {
        let status = thread.path().join("status");
        field(&status.to_string_lossy(), "voluntary_ctxt_switches")?.parse::<u64>().ok()
    };
    threads.filter_map(switches).sum()
}

/// One field of `/proc/PATH` in the form `name: value`.
pub(crate) fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

/// Bytes of a process's resident memory that are pages of BPF maps, each as often as it is mapped.
///
/// # Errors
/// It has ended.
pub(crate) fn mapped_maps(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).context("a profiler has ended")?;
    Ok(of_maps(&text))
}

/// The same, of the text of `smaps`.
fn of_maps(smaps: &str) -> u64 {
    let (mut is_map, mut kib) = (false, 0);
    for line in smaps.lines() {
        if let Some(rss) = line.strip_prefix("Rss:") {
            let rss: Option<u64> = rss.trim().strip_suffix(" kB").and_then(|rss| rss.parse().ok());
            kib += rss.filter(|_| is_map).unwrap_or(0);
        } else if line.starts_with(|first: char| first.is_ascii_digit() || first.is_ascii_lowercase()) {
            // The line that begins a mapping; all others begin with a capital letter.
            is_map = line.ends_with("anon_inode:bpf-map");
        }
    }
    kib * 1024
}

/// Jiffies of all CPUs together, and those that the hypervisor gave to others (proc_stat(5), 8th field).
pub(crate) fn steal() -> (u64, u64) {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let first = text.lines().next().unwrap_or_default();
    // Guest time, from the 9th on, is already included in user time.
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
    fn programs_are_told_apart_by_type_and_name() {
        let names = HashMap::from([(6, SWITCH), (7, KICK), (8, "on_fork")].map(|(id, name)| (id, name.to_owned())));
        let mut objects = BpfObjects::default();
        let mut add = |info: &str| objects.add_program(info, &names);
        add("prog_type:\t7\nprog_id:\t5\nrun_time_ns:\t3583747\nrun_cnt:\t1530\n");
        add("prog_type:\t7\nprog_id:\t4\nrun_time_ns:\t0\nrun_cnt:\t0\n");
        add("prog_type:\t17\nprog_id:\t6\nrun_time_ns:\t12469\nrun_cnt:\t37\n");
        add("prog_type:\t17\nprog_id:\t7\nrun_time_ns:\t900\nrun_cnt:\t9\n");
        add("prog_type:\t17\nprog_id:\t8\nrun_time_ns:\t70\nrun_cnt:\t50\n");
        assert_eq!((objects.timer_runs, objects.timer_ns, objects.other_ns), (1530, 3_583_747, 13_439));
        assert_eq!((objects.switch_runs, objects.switch_ns), (37, 12_469));
        assert_eq!((objects.kick_runs, objects.kick_ns), (9, 900));
        let later = BpfObjects { timer_runs: 2000, timer_ns: 4_000_000, ..objects };
        assert_eq!(later.since(&objects).timer_runs, 470);
    }

    #[test]
    fn pages_of_maps_are_told_from_others() {
        let smaps = "7f1c00000000-7f1c00021000 rw-p 00000000 00:00 0 \nSize:                132 kB\nRss:                  48 kB\n\
                     7f1c5a000000-7f1c5a100000 r--s 00001000 00:12 18 anon_inode:bpf-map\nSize:               1024 kB\n\
                     Rss:                 512 kB\nVmFlags: rd mr\n\
                     7f1c5b000000-7f1c5b001000 rw-s 00000000 00:12 18                         anon_inode:bpf-map\nRss: 4 kB\n\
                     ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\nRss: 8 kB\n";
        assert_eq!(of_maps(smaps), (512 + 4) * 1024);
        assert_eq!(mapped_maps(std::process::id()).unwrap(), 0);
    }

    #[test]
    fn this_process_has_clocks() {
        let own = std::process::id();
        assert!(cpu_time(own).unwrap() > Duration::ZERO);
        let before = wakeups(own);
        std::thread::sleep(Duration::from_millis(1));
        assert!(wakeups(own) > before, "it has slept");
        run_delay(own).unwrap();
        assert!(field("/proc/self/status", "VmHWM").unwrap().ends_with("kB"));
        assert!(steal().0 > 0);
        assert!(forks() > 0);
    }
}
