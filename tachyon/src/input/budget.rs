//! What reading files from elsewhere may cost.
//!
//! A file of some kilobytes can hold hundreds of millions of samples, or millions of threads. So that reading it does not bring down a
//! machine, CPU time and memory are limited by the size of the files, far above what a recording of that size takes.

use crate::advice::{Advice, advises};
use nix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// A file up to this size gets what one of this size may cost, a larger one proportionally more.
const UNIT_BYTES: u64 = 16 << 20;
/// CPU time of all threads.
const CPU: Duration = Duration::from_secs(10);
/// Resident memory of the process, beyond what it had before. The checks made while reading ([`Budget::check`]) stop a little earlier
/// than the watching thread ([`Watch`]).
const MEMORY_BYTES: u64 = 448 << 20;
const WATCHED_BYTES: u64 = 512 << 20;
/// How much more CPU time the watching thread allows.
const LATER: Duration = Duration::from_millis(300);
/// How often it looks: memory fills at some gigabytes a second.
const TURN: Duration = Duration::from_millis(10);
/// Steps between two checks of clock and memory.
const STEPS: u64 = 4096;

/// How much may be used, and what had been used at the start.
#[derive(Debug)]
pub struct Budget {
    cpu: Duration,
    memory_bytes: u64,
    began: Duration,
    /// What the process had before, for example for other files.
    began_bytes: u64,
    steps: AtomicU64,
}

/// Files took more than they may.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it takes more than files of its size should: stopped after {:.1} s of CPU time with {} MiB of memory",
    used.as_secs_f64(), used_bytes >> 20
)]
pub struct Exceeded {
    /// CPU time used.
    pub used: Duration,
    /// Resident memory added while they were read.
    pub used_bytes: u64,
}

advises!(Exceeded);

impl Advice for Exceeded {
    fn hint(&self) -> Option<String> {
        Some("if the file is to be trusted, --force-large goes on".to_owned())
    }
}

impl Budget {
    /// For files of this total size.
    #[must_use]
    pub fn of_size(bytes: u64) -> Self {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX).max(1);
        Self::new(CPU.saturating_mul(units), MEMORY_BYTES.saturating_mul(units.into()))
    }

    /// With limits of its own, counted from now on.
    #[must_use]
    pub fn new(cpu: Duration, memory_bytes: u64) -> Self {
        Self { cpu, memory_bytes, began: cpu_time(), began_bytes: resident_bytes(), steps: AtomicU64::new(0) }
    }

    /// Counts a step, and now and then checks what was used.
    ///
    /// # Errors
    /// When it is too much.
    pub fn step(&self) -> Result<(), Exceeded> {
        if self.steps.fetch_add(1, Ordering::Relaxed).is_multiple_of(STEPS) { self.check() } else { Ok(()) }
    }

    /// Checks what was used.
    ///
    /// # Errors
    /// When it is too much.
    pub fn check(&self) -> Result<(), Exceeded> {
        let used = cpu_time().saturating_sub(self.began);
        let used_bytes = resident_bytes().saturating_sub(self.began_bytes);
        if used > self.cpu || used_bytes > self.memory_bytes { Err(Exceeded { used, used_bytes }) } else { Ok(()) }
    }
}

/// Watches what this process uses, whatever it does: a single step may cost more than a whole budget.
#[derive(Debug)]
pub struct Watch {
    _done: Sender<()>,
}

impl Watch {
    /// For reading files of this total size, until it is dropped. `exceeded` is called once, on a thread of its own.
    #[must_use]
    pub fn start(bytes: u64, exceeded: impl FnOnce(Exceeded) + Send + 'static) -> Self {
        let budget = Budget::of_size(bytes);
        let (cpu, memory) = (budget.cpu + LATER, budget.memory_bytes / MEMORY_BYTES * WATCHED_BYTES);
        Self::over(Budget { cpu, memory_bytes: memory, ..budget }, exceeded)
    }

    /// The same with this budget.
    fn over(budget: Budget, exceeded: impl FnOnce(Exceeded) + Send + 'static) -> Self {
        let (done, wait) = channel();
        // Without a thread the checks made while reading remain.
        let _no_thread = std::thread::Builder::new().name("tachyon-watch".to_owned()).spawn(move || {
            while wait.recv_timeout(TURN) == Err(RecvTimeoutError::Timeout) {
                if let Err(why) = budget.check() {
                    return exceeded(why);
                }
            }
        });
        Self { _done: done }
    }
}

fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// 0 if unknown.
fn resident_bytes() -> u64 {
    let read = || {
        let text = std::fs::read_to_string("/proc/self/statm").ok()?;
        let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
        let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok()??;
        Some(pages.saturating_mul(u64::try_from(page).ok()?))
    };
    read().unwrap_or_default()
}

/// An output that fails when too much was used for it.
pub struct Guarded<'a, W> {
    out: W,
    budget: Option<&'a Budget>,
}

impl<'a, W> Guarded<'a, W> {
    /// Without a budget everything passes.
    pub fn new(out: W, budget: Option<&'a Budget>) -> Self {
        Self { out, budget }
    }
}

impl<W: std::io::Write> std::io::Write for Guarded<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // Sinks write some ten kilobytes at once: far fewer steps than samples.
        if let Some(budget) = self.budget {
            budget.check().map_err(std::io::Error::other)?;
        }
        self.out.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn time_and_memory_are_in_the_error() {
        assert_eq!(Budget::of_size(1).check(), Ok(()));
        let few = Budget::new(Duration::from_secs(1000), 32 << 20);
        assert_eq!(few.check(), Ok(()), "what the process had before is not the file's");
        let hog = vec![1_u8; 64 << 20];
        let error = few.check().unwrap_err();
        assert!(error.used_bytes > 32 << 20 && hog[5] == 1);
        let told = error.to_string();
        assert!(told.contains(" s of CPU time with ") && told.ends_with(" MiB of memory"), "{told}");
        let none = Budget::new(Duration::ZERO, u64::MAX);
        while none.check().is_ok() {}
        let mut out = Guarded::new(Vec::new(), Some(&none));
        assert!(out.write_all(b"x").unwrap_err().to_string().contains("CPU time"));
        Guarded::new(Vec::new(), None).write_all(b"x").unwrap();
    }

    #[test]
    fn what_is_watched_is_told_of_once_and_not_after_its_end() {
        let (tell, told) = channel();
        // No test may fill the memory of the process: others run in it.
        let budget = Budget::new(Duration::from_secs(1000), 1);
        let watch = Watch::over(budget, move |why| tell.send(why).expect("the test waits"));
        let why: Exceeded = told.recv_timeout(Duration::from_secs(60)).expect("it is told");
        assert!(why.used_bytes > 1, "{why}");
        drop(watch);
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn larger_files_may_cost_more() {
        let of = |bytes| Budget::of_size(bytes).cpu;
        assert_eq!([of(0), of(16 << 20), of(17 << 20), of(160 << 20)].map(|cpu| cpu.as_secs()), [10, 10, 20, 100]);
    }
}
