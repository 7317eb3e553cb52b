//! Since when a thread has been asleep, if it was not watched when it fell asleep.
//!
//! The kernel notes when it last accounted for a thread's time on a CPU: when the thread left it (`se.exec_start` in
//! `/proc/PID/task/TID/sched`, `kernel/sched/debug.c`). That is a moment of the CPU's own clock (`rq_clock_task`), which leaves out the
//! time of interrupts and, in a virtual machine, of the host; a thread of this process on that CPU can read what the clock shows now.

use super::{RemoteError, RemoteProcess};
use crate::types::KtimeNs;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
use std::time::Duration;

/// What the CPUs' clocks show, as far as they have been read.
#[derive(Debug, Default)]
pub struct CpuClocks {
    known: HashMap<u32, Option<Reading>>,
}

/// What a CPU's clock showed at a moment.
#[derive(Clone, Copy, Debug)]
struct Reading {
    at: KtimeNs,
    clock: Duration,
}

impl CpuClocks {
    /// When a CPU's clock showed this; `None` if no thread of this process may run there, or the kernel does not say.
    fn moment(&mut self, cpu: u32, clock: Duration) -> Option<KtimeNs> {
        let reading = (*self.known.entry(cpu).or_insert_with(|| ask(cpu)))?;
        let ago = reading.clock.checked_sub(clock)?;
        Some(KtimeNs(reading.at.0.saturating_sub(u64::try_from(ago.as_nanos()).ok()?)))
    }
}

/// Reads a CPU's clock, from a thread that runs there.
fn ask(cpu: u32) -> Option<Reading> {
    let read = move || {
        let mut only = CpuSet::new();
        only.set(cpu as usize).ok()?;
        sched_setaffinity(nix::unistd::Pid::from_raw(0), &only).ok()?;
        // Has the kernel account for this thread up to now (`task_sched_runtime`).
        clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).ok()?;
        let at = KtimeNs::now();
        let text = std::fs::read("/proc/thread-self/sched").ok()?;
        Some(Reading { at, clock: exec_start(&text)? })
    };
    std::thread::Builder::new().name("tachyon-clock".to_owned()).spawn(read).ok()?.join().ok().flatten()
}

impl RemoteProcess {
    /// Since when one of its threads has been off the CPU; `None` if it has ended, or the kernel does not say. For a running thread
    /// it is a moment just now.
    #[must_use]
    pub fn asleep_since(&self, tid: u32, clocks: &mut CpuClocks) -> Option<KtimeNs> {
        let file = |name: &str| -> Result<Vec<u8>, RemoteError> { self.task_file(tid, name) };
        let cpu = super::status::last_cpu(&file("stat").ok()?)?;
        clocks.moment(cpu, exec_start(&file("sched").ok()?)?)
    }
}

/// `se.exec_start : 2030429.817907`, milliseconds.
fn exec_start(text: &[u8]) -> Option<Duration> {
    let text = String::from_utf8_lossy(text);
    let line = text.lines().find(|line| line.starts_with("se.exec_start"))?;
    let (millis, nanos) = line.rsplit_once(':')?.1.trim().split_once('.')?;
    if nanos.len() != 6 {
        return None;
    }
    Some(Duration::from_millis(millis.parse().ok()?) + Duration::from_nanos(nanos.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Pid;
    use std::sync::mpsc;

    #[test]
    fn the_kernels_line_is_milliseconds() {
        let text = b"head (15402, #threads: 1)\n---\nse.exec_start                                :       2030429.817907\nse.vruntime : 1.5\n";
        assert_eq!(exec_start(text), Some(Duration::from_nanos(2_030_429_817_907)));
        assert_eq!(exec_start(b"se.exec_start : 12.5\n"), None);
        assert_eq!(exec_start(b""), None);
    }

    #[test]
    fn a_thread_of_ours_is_asleep_since_it_said_so() {
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tell.send((nix::unistd::gettid().as_raw().unsigned_abs(), KtimeNs::now())).expect("the test listens");
            // Ends when the test drops its side.
            let _ended = ended.recv();
        });
        let (tid, said) = told.recv().expect("it tells");
        std::thread::sleep(Duration::from_millis(300));
        let process = RemoteProcess::at(Pid(std::process::id()));
        let now = KtimeNs::now();
        let since = process.asleep_since(tid, &mut CpuClocks::default());
        drop(end);
        thread.join().expect("it ends");
        if !std::path::Path::new("/proc/self/sched").exists() {
            assert_eq!(since, None);
            return;
        }
        // It fell asleep after it had said so, and no clock goes faster than the one it is compared with.
        let since = since.expect("the kernel tells");
        assert!(since >= said && since < now, "said {said:?}, asleep since {since:?}, now {now:?}");
    }
}
