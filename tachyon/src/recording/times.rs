//! What the threads of each process did with their time: ran, waited for a CPU, or waited for something else. Counted separately from
//! the samples of waiting threads: its switches show how long a thread waited ([`SeenThread::waited_ns`]), and the kernel how long of
//! that it was ready to run.
//!
//! The kernel's own CPU time is no measure for short waits: if a thread is woken on an idle CPU, the time counts as the thread's from the
//! moment that CPU queues it, some microseconds before it runs.

use super::registry::{EndedThread, SegmentCounts};
use crate::kernel::Kernel;
use crate::merge::ProgramKey;
use crate::remote::{RemoteProcess, TaskTimes};
use crate::report::TimeReport;
use crate::types::{KtimeNs, Pid};
use std::collections::{BTreeMap, HashMap};
use tachyon_common::event::ProcessRecord;
use tachyon_common::wait::SeenThread;

/// How long all threads of a process together have lived, have waited since waits have been sampled, and have been ready to run without a
/// CPU, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lives {
    pub lives_ns: u64,
    pub queued_ns: u64,
    pub waited_ns: u64,
}

impl std::ops::Add for Lives {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            lives_ns: self.lives_ns + other.lives_ns,
            queued_ns: self.queued_ns + other.queued_ns,
            waited_ns: self.waited_ns + other.waited_ns,
        }
    }
}

impl Lives {
    /// For a thread that ended, or for all threads that a process had.
    pub fn of_ended(record: &ProcessRecord) -> Self {
        Self { lives_ns: record.lives_ns, queued_ns: record.queued_ns, waited_ns: record.waited_ns }
    }

    fn since(self, earlier: Self) -> Self {
        Self {
            lives_ns: self.lives_ns.saturating_sub(earlier.lives_ns),
            queued_ns: self.queued_ns.saturating_sub(earlier.queued_ns),
            waited_ns: self.waited_ns.saturating_sub(earlier.waited_ns),
        }
    }
}

/// What one thread has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ThreadLife {
    pub ran_ns: u64,
    pub lives: Lives,
    /// When it started, to a hundredth of a second: distinguishes it from a later one with the same id.
    start_ns: u64,
}

impl ThreadLife {
    fn since(self, earlier: Option<&Self>) -> Self {
        // The kernel gives the start of an exiting thread exactly, of others to a hundredth of a second.
        const APART_NS: u64 = 20_000_000;
        let same = earlier.filter(|earlier| earlier.start_ns.abs_diff(self.start_ns) < APART_NS);
        let Some(earlier) = same else { return self };
        Self {
            ran_ns: self.ran_ns.saturating_sub(earlier.ran_ns),
            lives: self.lives.since(earlier.lives),
            start_ns: self.start_ns,
        }
    }
}

/// A process at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    lives: Lives,
    /// Its live threads.
    threads: HashMap<u32, ThreadLife>,
}

impl Known {
    /// A process so far. A thread that ends meanwhile is counted once: if one has, all are read again.
    fn of(pid: u32, kernel: &Kernel, waits: &Waits<'_>) -> Option<Self> {
        const TRIES: usize = 3;
        let ended = || {
            let life = kernel.process(pid)?;
            Some(Lives { lives_ns: life.lives_ns, queued_ns: life.queued_ns, waited_ns: life.waited_ns })
        };
        for _ in 0..TRIES {
            let (before, living, after) = (ended()?, Self::of_living(pid, waits)?, ended()?);
            if before == after {
                return Some(Self { lives: living.lives + after, ..living });
            }
        }
        None
    }

    fn of_living(pid: u32, waits: &Waits<'_>) -> Option<Self> {
        let process = RemoteProcess::at(Pid(pid));
        let mut sum = Self::default();
        for tid in process.thread_ids().ok()? {
            // If it has ended, the kernel side reports it.
            let Some(times) = process.task_times(tid) else { continue };
            let now_ns = KtimeNs::now().0;
            let lives_ns = now_ns.saturating_sub(times.start_ns);
            let waited_ns = waits.of(tid, &times, now_ns);
            let lives = Lives { lives_ns, queued_ns: times.queued_ns, waited_ns };
            sum.lives = sum.lives + lives;
            sum.threads.insert(tid, ThreadLife { ran_ns: times.ran_ns, lives, start_ns: times.start_ns });
        }
        Some(sum)
    }
}

/// What is known about waits at one moment.
struct Waits<'a> {
    /// Threads that have been switched since waits have been sampled.
    seen: &'a BTreeMap<u32, SeenThread>,
    /// Since when those of this process have been.
    began_ns: u64,
}

impl Waits<'_> {
    /// How long a live thread has waited since then.
    fn of(&self, tid: u32, times: &TaskTimes, now_ns: u64) -> u64 {
        match self.seen.get(&tid) {
            Some(seen) if seen.left_ns == 0 => seen.waited_ns,
            Some(seen) => seen.waited_ns + now_ns.saturating_sub(seen.left_ns),
            // It has been on its CPU, or asleep, all the time.
            None if times.runs => 0,
            None => now_ns.saturating_sub(self.began_ns.max(times.start_ns)),
        }
    }
}

/// What was known at the last cut.
#[derive(Debug, Default)]
pub(super) struct Times {
    /// Counted up to then, by instance.
    counted: Read,
    /// When the recording began: what a process did before does not belong to it.
    began_ns: u64,
}

/// What is known at one moment, by instance.
pub(super) type Read = HashMap<u64, Known>;

/// What all live recorded processes have done with their time.
pub(super) fn read(programs: &[(ProgramKey, u32)], kernel: &Kernel) -> Read {
    let seen = &kernel.seen_threads();
    let waits = |pid| Waits { seen, began_ns: kernel.waits_began_of(pid).0 };
    programs.iter().filter_map(|&(key, pid)| Some((key.instance, Known::of(pid, kernel, &waits(pid))?))).collect()
}

/// What a process did with its time in a segment.
#[derive(Clone, Debug, Default)]
pub(super) struct Passed {
    pub lives: Lives,
    /// Its threads, those that ended meanwhile too, by their ids.
    pub threads: Vec<(u32, ThreadLife)>,
}

impl Times {
    /// The recording begins.
    pub fn begin(&mut self, mut now: Read) {
        // No waits have been counted so far.
        for known in now.values_mut() {
            known.lives.waited_ns = 0;
            known.threads.values_mut().for_each(|thread| thread.lives.waited_ns = 0);
        }
        (self.counted, self.began_ns) = (now, KtimeNs::now().0);
    }

    /// What the processes of a segment did with their time in it. If one has executed another program meanwhile, everything
    /// counts for the new program.
    pub fn cut(&mut self, now: &Read, counts: &SegmentCounts) -> HashMap<ProgramKey, Passed> {
        let mut passed = HashMap::new();
        for (&key, info) in counts.processes.iter().filter(|(_, info)| !info.execs_later()) {
            let known = now.get(&key.instance);
            let Some(total) = known.map(|known| known.lives).or(info.lives_end) else { continue };
            let nothing = Known::default();
            let before = match self.counted.get(&key.instance) {
                // Fewer than before: threads that were counted then ended at an `exec`.
                Some(before) if before.lives.lives_ns <= total.lives_ns => before,
                Some(_) => &nothing,
                // A process older than the recording that was found late.
                None if self.is_older(info.pid) => known.unwrap_or(&nothing),
                None => &nothing,
            };
            let ended = counts.threads.get(&key.instance).map_or(&[][..], Vec::as_slice);
            let living = known.iter().flat_map(|known| &known.threads).map(|(&tid, &life)| (tid, life));
            // The kernel side reports threads even before the recording begins.
            let ended = ended.iter().filter(|thread| thread.ended_ns >= self.began_ns);
            let threads = ended.map(of_ended).chain(living);
            let since = |(tid, life): (u32, ThreadLife)| (tid, life.since(before.threads.get(&tid)));
            let threads = threads.map(since).collect();
            passed.insert(key, Passed { lives: total.since(before.lives), threads });
        }
        self.counted.clone_from(now);
        passed
    }

    fn is_older(&self, pid: u32) -> bool {
        RemoteProcess::at(Pid(pid)).task_start_ns(pid).is_some_and(|start_ns| start_ns < self.began_ns)
    }
}

fn of_ended(thread: &EndedThread) -> (u32, ThreadLife) {
    let start_ns = thread.ended_ns.saturating_sub(thread.lives.lives_ns);
    (thread.tid, ThreadLife { ran_ns: thread.ran_ns, lives: thread.lives, start_ns })
}

/// What a process or a thread did with its time: `cpu_ns` of it on a CPU as the kernel counts it, or less, if its waits leave less
/// than that; `ticks` of its waits, by cause, show what for.
pub(super) fn told(lives: Lives, cpu_ns: u64, ticks: &BTreeMap<&'static str, u64>) -> TimeReport {
    let seconds = |ns: u64| ns as f64 / 1e9;
    // In the first moments of a process, waits were not yet watched and so not counted.
    let ran_ns = cpu_ns.min(lives.lives_ns.saturating_sub(lives.waited_ns));
    let blocked = seconds(lives.lives_ns.saturating_sub(ran_ns).saturating_sub(lives.queued_ns));
    let of_waits = ticks.iter().filter(|(cause, _)| **cause != super::waits::FOR_A_CPU);
    let all: u64 = of_waits.clone().map(|(_, ticks)| ticks).sum();
    let mut blocked_s: BTreeMap<String, f64> =
        of_waits.map(|(cause, &ticks)| ((*cause).to_owned(), blocked * ticks as f64 / all as f64)).collect();
    if all == 0 && blocked > 0.0 {
        // Too short for a sample.
        blocked_s.insert("other".to_owned(), blocked);
    }
    let gil_wait_s = blocked_s.get(super::waits::GIL).copied().unwrap_or(0.0);
    TimeReport { running_s: seconds(ran_ns), queued_s: seconds(lives.queued_ns), blocked_s, gil_wait_s }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_the_threads_lives() {
        let ticks = BTreeMap::from([("gil", 30), ("socket", 10), ("cpu", 7)]);
        let lives = Lives { lives_ns: 10_000_000_000, queued_ns: 1_000_000_000, waited_ns: 4_000_000_000 };
        let time = told(lives, 5_000_000_000, &ticks);
        assert_eq!((time.running_s, time.queued_s, time.gil_wait_s), (5.0, 1.0, 3.0));
        assert_eq!(time.blocked_s, BTreeMap::from([("gil".to_owned(), 3.0), ("socket".to_owned(), 1.0)]));
        let time = told(lives, 5_000_000_000, &BTreeMap::new());
        assert_eq!(time.blocked_s, BTreeMap::from([("other".to_owned(), 4.0)]));
        // The kernel counts a thread as running while the CPU that will run it still wakes up.
        let time = told(Lives { waited_ns: 6_000_000_000, ..lives }, 5_000_000_000, &ticks);
        assert_eq!((time.running_s, time.queued_s, time.gil_wait_s), (4.0, 1.0, 3.75));
        // Values measured one after the other never yield a negative time.
        let nothing_counted = told(Lives { waited_ns: 0, ..lives }, 20_000_000_000, &ticks);
        assert!(nothing_counted.blocked_s.values().all(|&seconds| seconds == 0.0));
    }

    #[test]
    fn a_thread_waits_since_its_last_switch() {
        let seen = |tid, left_ns| (tid, SeenThread { tid, left_ns, waited_ns: 30, ..SeenThread::default() });
        let waits = Waits { seen: &BTreeMap::from([seen(1, 0), seen(2, 150)]), began_ns: 100 };
        let of = |tid, start_ns, runs| waits.of(tid, &TaskTimes { start_ns, runs, ..TaskTimes::default() }, 200);
        assert_eq!((of(1, 5, true), of(2, 5, false)), (30, 80));
        // Never switched: on a CPU all the time, asleep since before, asleep since it started.
        assert_eq!((of(3, 5, true), of(3, 5, false), of(3, 120, false)), (0, 100, 80));
    }

    #[test]
    fn a_thread_is_told_from_an_earlier_one_with_its_id() {
        let life = |start_ns, ran_ns, lives_ns| {
            let lives = Lives { lives_ns, queued_ns: ran_ns / 2, waited_ns: ran_ns };
            ThreadLife { ran_ns, lives, start_ns }
        };
        let (before, now) = (life(1_000_000_000, 40, 100), life(1_009_000_000, 100, 400));
        let since = now.since(Some(&before));
        assert_eq!((since.ran_ns, since.lives), (60, Lives { lives_ns: 300, queued_ns: 30, waited_ns: 60 }));
        assert_eq!(life(2_000_000_000, 100, 400).since(Some(&before)).ran_ns, 100);
        assert_eq!(now.since(None), now);
    }
}
