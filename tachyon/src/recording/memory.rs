//! `--max-memory`: keeps resident memory and BPF maps together within a limit, by giving things up in a fixed order. The memory
//! needed to finish the file counts as if it were in use.
//!
//! At the start the sample ring, the queue behind it, unwind tables and native symbols get at most an eighth of the
//! limit each. From three quarters of it on, whatever can be rebuilt is dropped; from seven eighths on nothing new is
//! named, so that no table grows with the functions of the host; at fifteen sixteenths the recording ends and its file
//! is finished, because what is left then grows with each process and thread that is met. Each step is reported once.

use super::follow::lock;
use super::samples::Maker;
use crate::advice::Refusal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often memory is checked: reading one line of `/proc` takes 10 µs.
const TURN: Duration = Duration::from_millis(200);
/// How often caches are dropped: they fill again in between.
const SHRINK_TURN: Duration = Duration::from_secs(10);
/// The ring gets one part in so many of `--max-memory`; the queue behind it, unwind tables and native symbols get as
/// much each.
const PARTS: u64 = 8;

/// What is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// What can be rebuilt.
    Caches,
    /// Names of functions that were not met before.
    Names,
    /// Nothing: there is room again.
    Nothing,
    /// The recording.
    All,
}

/// Compares what is used with the limit.
#[derive(Debug)]
pub(super) struct Memory {
    /// Bytes.
    limit: u64,
    /// Bytes of the BPF maps, which grow with the unwind tables.
    maps: Arc<AtomicU64>,
    looked: Option<Instant>,
    shrunk: Option<Duration>,
    no_names: bool,
    start: Instant,
}

impl Memory {
    /// Starts once everything that a recording begins with is in memory.
    ///
    /// # Errors
    /// When that already exceeds the limit.
    pub fn start(limit: u64, maps: Arc<AtomicU64>) -> Result<Self, Refusal> {
        let used = resident() + maps.load(Ordering::Relaxed);
        if used >= limit / 4 * 3 {
            // One and a half times of what is in use is the least that leaves room for names.
            let enough = (used / 2 * 3).next_multiple_of(8 << 20);
            let what = format!(
                "a memory limit of {} is too little: {} are in use before the first sample",
                mebibytes(limit),
                mebibytes(used)
            );
            return Err(Refusal::new(what).with_hint(format!("give it {}", mebibytes(enough))));
        }
        Ok(Self { limit, maps, looked: None, shrunk: None, no_names: false, start: Instant::now() })
    }

    /// What is to be given up now; finishing the file takes `finish_bytes`.
    fn turn(&mut self, finish_bytes: u64) -> Option<Step> {
        self.looked = Some(Instant::now());
        self.decide(self.start.elapsed(), resident() + self.maps.load(Ordering::Relaxed) + finish_bytes)
    }

    fn decide(&mut self, elapsed: Duration, used: u64) -> Option<Step> {
        if used < self.limit / 4 * 3 {
            return std::mem::take(&mut self.no_names).then_some(Step::Nothing);
        }
        if used >= self.limit / 16 * 15 {
            return Some(Step::All);
        }
        // Names are given up only after dropping the caches has had time to take effect.
        if self.shrunk.is_none_or(|shrunk| elapsed.saturating_sub(shrunk) >= SHRINK_TURN) {
            self.shrunk = Some(elapsed);
            return Some(Step::Caches);
        }
        let names = used >= self.limit / 8 * 7 && !self.no_names;
        names.then(|| {
            self.no_names = true;
            Step::Names
        })
    }
}

/// Most bytes for the sample ring, a power of two, and most that may be queued behind it.
pub(super) fn share(limit: u64) -> (u32, usize) {
    let share = u32::try_from(limit / PARTS).unwrap_or(u32::MAX);
    // A limit is 32 MiB at least, so this is never zero.
    (1 << share.max(1).ilog2(), usize::try_from(share).unwrap_or(usize::MAX))
}

impl Maker {
    /// Gives up what must go to stay within the limit.
    pub(super) fn keep_within_memory(&mut self) {
        let Some(memory) = &mut self.memory else { return };
        if memory.looked.is_some_and(|looked| looked.elapsed() < TURN) {
            return;
        }
        let finish_bytes = self.made.sink.as_ref().map_or(0, |sink| sink.finish_bytes(&self.made.profile));
        let Some(step) = memory.turn(finish_bytes) else { return };
        let limit = mebibytes(memory.limit);
        let told = match step {
            Step::Caches => {
                self.symbolizer.shrink();
                lock(&self.registry).shrink = true;
                self.live.bells.follow.ring();
                return_freed();
                format!("three quarters of the memory limit, {limit}, are in use: caches are dropped")
            }
            Step::Names => {
                self.symbolizer.set_full(true);
                format!("seven eighths of the memory limit, {limit}, are in use: functions not met so far get no names")
            }
            Step::Nothing => {
                self.symbolizer.set_full(false);
                return;
            }
            Step::All => {
                self.live.no_memory.store(true, Ordering::Relaxed);
                format!("the memory limit, {limit}, is used up: the recording ends, what it has is written")
            }
        };
        let mut registry = lock(&self.registry);
        if registry.notes.insert(told.clone()) {
            registry.told.push(told);
        }
        drop(registry);
        self.live.bells.news.ring();
    }
}

/// Resident memory of this process, bytes; 0 where `/proc` does not tell.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * page_size()
}

/// Bytes of a page of memory.
pub(super) fn page_size() -> u64 {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().map_or(4096, i64::unsigned_abs)
}

/// Gives memory that was freed back to the system: glibc keeps it.
pub(super) fn return_freed() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` may be called at any time, by any thread.
    unsafe {
        libc::malloc_trim(0)
    };
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_are_given_up_in_order() {
        let mut memory = Memory {
            limit: 1600,
            maps: Arc::default(),
            looked: None,
            shrunk: None,
            no_names: false,
            start: Instant::now(),
        };
        for (line, (seconds, used, expected)) in [
            (0, 1199, None),
            (1, 1200, Some(Step::Caches)),
            // It did not help, but there is still room for names.
            (2, 1399, None),
            (3, 1400, Some(Step::Names)),
            (4, 1450, None),
            // Caches have been made again.
            (11, 1450, Some(Step::Caches)),
            (12, 1200, None),
            // Processes have gone.
            (13, 1100, Some(Step::Nothing)),
            (14, 1100, None),
            (22, 1410, Some(Step::Caches)),
            (23, 1410, Some(Step::Names)),
            (24, 1500, Some(Step::All)),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(memory.decide(Duration::from_secs(seconds), used), expected, "line {line}");
        }
    }

    #[test]
    fn what_is_in_use_is_measured() {
        let before = resident();
        let some = vec![1_u8; 32 << 20];
        assert!(resident() >= before + (24 << 20), "{before} {} {}", resident(), some.len());
        let refused = Memory::start(1 << 20, Arc::default()).expect_err("no program is that small");
        assert!(refused.to_string().starts_with("a memory limit of 1 MiB is too little: "), "{refused}");
        assert!(Memory::start(1 << 40, Arc::new((1 << 20).into())).is_ok());
        assert_eq!(share(40 << 20), (4 << 20, 5 << 20));
    }
}
