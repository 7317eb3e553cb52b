//! What the threads of each process did with their lives, as the kernel itself counts it: ran, waited for a CPU, or waited for
//! something else. Counted beside the samples of waiting threads, and not from them.

use super::registry::SegmentCounts;
use crate::kernel::Kernel;
use crate::merge::ProgramKey;
use crate::remote::RemoteProcess;
use crate::report::TimeReport;
use crate::types::{KtimeNs, Pid};
use std::collections::{BTreeMap, HashMap};

/// How long all threads of a process together have lived, and been ready to run without a CPU, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lives {
    pub lives_ns: u64,
    pub queued_ns: u64,
}

impl std::ops::Add for Lives {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { lives_ns: self.lives_ns + other.lives_ns, queued_ns: self.queued_ns + other.queued_ns }
    }
}

impl Lives {
    fn since(self, earlier: Self) -> Self {
        Self {
            lives_ns: self.lives_ns.saturating_sub(earlier.lives_ns),
            queued_ns: self.queued_ns.saturating_sub(earlier.queued_ns),
        }
    }

    /// Those of a process so far. A thread that ends meanwhile is counted once: where one has, all are asked again.
    fn of(pid: u32, kernel: &Kernel) -> Option<Self> {
        const TRIES: usize = 3;
        let ended = || kernel.process(pid).map(|life| Self { lives_ns: life.lives_ns, queued_ns: life.queued_ns });
        for _ in 0..TRIES {
            let (before, living, after) = (ended()?, Self::of_living(pid)?, ended()?);
            if before == after {
                return Some(living + after);
            }
        }
        None
    }

    fn of_living(pid: u32) -> Option<Self> {
        let process = RemoteProcess::at(Pid(pid));
        let now = KtimeNs::now().0;
        let mut sum = Self::default();
        for tid in process.thread_ids().ok()? {
            // One that has ended the kernel side tells of.
            if let Some((start_ns, queued_ns)) = process.task_start_and_delay(tid) {
                sum = sum + Self { lives_ns: now.saturating_sub(start_ns), queued_ns };
            }
        }
        Some(sum)
    }
}

/// What was known at the last cut.
#[derive(Debug, Default)]
pub(super) struct Times {
    /// Instance -> up to then.
    counted: HashMap<u64, Lives>,
    /// When the recording began: what a process did before that is none of its.
    began_ns: u64,
}

/// What is known at one moment, by instance.
pub(super) type Read = HashMap<u64, Lives>;

/// What all processes that are recorded and live have come to.
pub(super) fn read(programs: &[(ProgramKey, u32)], kernel: &Kernel) -> Read {
    programs.iter().filter_map(|&(key, pid)| Some((key.instance, Lives::of(pid, kernel)?))).collect()
}

impl Times {
    /// The recording begins.
    pub fn begin(&mut self, now: Read) {
        (self.counted, self.began_ns) = (now, KtimeNs::now().0);
    }

    /// What the processes of a segment came to in it. Of one that has executed another program meanwhile, all is that one's.
    pub fn cut(&mut self, now: &Read, counts: &SegmentCounts) -> HashMap<ProgramKey, Lives> {
        let mut passed = HashMap::new();
        for (&key, info) in counts.processes.iter().filter(|(_, info)| !info.execs_later()) {
            let Some(total) = now.get(&key.instance).copied().or(info.lives_end) else { continue };
            let before = match self.counted.get(&key.instance) {
                // Fewer than before: threads that were counted then ended at an `exec`.
                Some(&before) if before.lives_ns <= total.lives_ns => before,
                Some(_) => Lives::default(),
                // One that is older than the recording was found late.
                None if self.is_older(info.pid) => total,
                None => Lives::default(),
            };
            passed.insert(key, total.since(before));
        }
        self.counted.clone_from(now);
        passed
    }

    fn is_older(&self, pid: u32) -> bool {
        RemoteProcess::at(Pid(pid)).task_start_ns(pid).is_some_and(|start_ns| start_ns < self.began_ns)
    }
}

/// What a process did with its time: `cpu_ns` of it on a CPU; `ticks` of its waits, by cause, tell what for.
pub(super) fn told(lives: Lives, cpu_ns: u64, ticks: &BTreeMap<&'static str, u64>) -> TimeReport {
    let seconds = |ns: u64| ns as f64 / 1e9;
    let blocked = seconds(lives.lives_ns.saturating_sub(cpu_ns).saturating_sub(lives.queued_ns));
    let of_waits = ticks.iter().filter(|(cause, _)| **cause != super::waits::FOR_A_CPU);
    let all: u64 = of_waits.clone().map(|(_, ticks)| ticks).sum();
    let mut blocked_s: BTreeMap<String, f64> =
        of_waits.map(|(cause, &ticks)| ((*cause).to_owned(), blocked * ticks as f64 / all as f64)).collect();
    if all == 0 && blocked > 0.0 {
        // Too short for a sample.
        blocked_s.insert("other".to_owned(), blocked);
    }
    let gil_wait_s = blocked_s.get("gil").copied().unwrap_or(0.0);
    TimeReport { running_s: seconds(cpu_ns), queued_s: seconds(lives.queued_ns), blocked_s, gil_wait_s }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_the_threads_lives() {
        let ticks = BTreeMap::from([("gil", 30), ("socket", 10), ("cpu", 7)]);
        let lives = Lives { lives_ns: 10_000_000_000, queued_ns: 1_000_000_000 };
        let time = told(lives, 5_000_000_000, &ticks);
        assert_eq!((time.running_s, time.queued_s, time.gil_wait_s), (5.0, 1.0, 3.0));
        assert_eq!(time.blocked_s, BTreeMap::from([("gil".to_owned(), 3.0), ("socket".to_owned(), 1.0)]));
        let time = told(lives, 5_000_000_000, &BTreeMap::new());
        assert_eq!(time.blocked_s, BTreeMap::from([("other".to_owned(), 4.0)]));
        // What was measured one after the other never gives less than nothing.
        assert!(told(lives, 20_000_000_000, &ticks).blocked_s.values().all(|&seconds| seconds == 0.0));
    }
}
