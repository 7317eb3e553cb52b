//! Threads in waits that last, which are not kicked: they are read from outside.
//!
//! A thread that has waited for a second is looked at once, while the hooks run: as long as it has not been switched, its stack is
//! the same. Its wait up to then is reported, and again each second where samples are written as they come, at each cut, and at the
//! end; the kernel side counts only what follows that moment. At the end, the last wait of a thread that could not be read or has
//! been switched meanwhile counts as lost.

mod look;
mod second;

pub(super) use look::{Choice, Sleeper};
pub(super) use second::{Means, start};

use super::follow::lock;
use super::registry::Registry;
use super::samples::Lasting;
use crate::inspect::ElfCache;
use crate::kernel::Kernel;
use crate::merge::ProgramKey;
use crate::remote::RemoteProcess;
use crate::types::{KtimeNs, Pid};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tachyon_common::event::WaitFacts;
use tachyon_common::wait::{NOT_SEEN, SeenThread};

/// How long all processes together are looked at when the recording has ended, while the user waits.
pub(super) const AT_END: Duration = Duration::from_secs(5);
/// The same once more, for threads that went on meanwhile.
pub(super) const AGAIN: Duration = Duration::from_millis(500);
/// And at a cut: a thread that is not reached is reported at the next one, or when its wait is over.
pub(super) const AT_CUT: Duration = Duration::from_secs(2);

/// A segment's part of a wait that is still going on.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub tid: u32,
    pub sleeper: Arc<Sleeper>,
    pub facts: WaitFacts,
}

impl Part {
    /// Its ticks.
    pub fn weight(&self) -> u64 {
        u64::from(self.facts.weight) + u64::from(self.facts.queued)
    }
}

/// A thread that has been looked at.
#[derive(Debug)]
struct Known {
    /// When it left its CPU; `None`: it has not been switched since waits have been sampled.
    left_ns: Option<u64>,
    /// Since when it waits in that case; its process's waits are sampled since then, or later.
    since_ns: u64,
    /// Since when waits of its process are sampled.
    recorded_ns: u64,
    sleeper: Arc<Sleeper>,
}

/// Waits that are still going on.
#[derive(Debug, Default)]
pub(super) struct Sleepers {
    choice: Choice,
    /// Threads that have been looked at, and have not been switched since.
    known: HashMap<u32, Known>,
    /// Thread -> until when its wait has been reported, nanoseconds.
    told: HashMap<u32, u64>,
    /// How often each program was searched for threads that have never been switched.
    searched: HashMap<ProgramKey, u32>,
    /// What is known about the interpreters' files.
    files: ElfCache,
}

/// How often to search for threads that were asleep when a process was met: some may not have gone to sleep by then.
const SEARCHES: u32 = 3;

impl Sleepers {
    pub fn new(choice: Choice) -> Self {
        Self { choice, ..Self::default() }
    }

    /// Looks at threads that have waited for at least this long and have not been looked at, those that wait longest first.
    pub fn look(&mut self, registry: &Mutex<Registry>, kernel: &Mutex<Kernel>, age: Duration, limit: Duration) {
        let deadline = Instant::now() + limit;
        let programs = lock(registry).live_programs();
        let seen = lock(kernel).seen_threads();
        self.forget_those_that_are_over(&programs, &seen, &mut lock(kernel));
        for (key, pid, mut wanted) in self.wanted(&programs, &seen, age) {
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else { return };
            wanted.retain(|tid| !self.known.contains_key(tid));
            if wanted.is_empty() {
                continue;
            }
            let looked = look::look_at((key, pid), &wanted, rest, &self.choice, &mut self.files);
            let (now, recorded_ns) = {
                let kernel = lock(kernel);
                (kernel.seen_threads(), kernel.waits_began_of(pid).0)
            };
            for (tid, sleeper) in looked {
                let left = |threads: &BTreeMap<u32, SeenThread>| threads.get(&tid).map(|seen| seen.left_ns);
                // If it has been switched meanwhile, it may have been read at any point.
                if left(&seen) == left(&now) {
                    // Had a thread that nobody has met run since then, it would have been met. The kernel's clock may say that
                    // it has: it leaves out the host's time.
                    let (since_ns, sleeper) = (sleeper.since_ns.min(recorded_ns), Arc::new(sleeper));
                    self.known.insert(tid, Known { left_ns: left(&now), since_ns, recorded_ns, sleeper });
                }
            }
        }
    }

    /// Threads to look at, by process; the process with the longest wait first.
    fn wanted(
        &mut self,
        programs: &[(ProgramKey, u32)],
        seen: &BTreeMap<u32, SeenThread>,
        age: Duration,
    ) -> Vec<(ProgramKey, u32, HashSet<u32>)> {
        let old_ns = KtimeNs::now().0.saturating_sub(u64::try_from(age.as_nanos()).unwrap_or(u64::MAX));
        let mut by_pid: HashMap<u32, (u64, HashSet<u32>)> = HashMap::new();
        let waiting = seen.values().filter(|seen| seen.left_ns != 0 && seen.left_ns <= old_ns);
        for seen in waiting.filter(|seen| !self.known.contains_key(&seen.tid)) {
            let (longest, tids) = by_pid.entry(seen.tgid).or_insert_with(|| (u64::MAX, HashSet::new()));
            *longest = seen.left_ns.min(*longest);
            tids.insert(seen.tid);
        }
        for &(key, pid) in programs {
            let searched = self.searched.entry(key).or_default();
            if *searched >= SEARCHES && !age.is_zero() {
                continue;
            }
            *searched += 1;
            let threads = RemoteProcess::at(Pid(pid)).thread_ids().unwrap_or_default();
            let never: Vec<u32> =
                threads.into_iter().filter(|tid| !seen.contains_key(tid) && !self.known.contains_key(tid)).collect();
            if !never.is_empty() {
                let (longest, tids) = by_pid.entry(pid).or_default();
                *longest = 0;
                tids.extend(never);
            }
        }
        let of = |&(key, pid): &(ProgramKey, u32)| by_pid.remove(&pid).map(|(longest, tids)| (longest, key, pid, tids));
        let mut wanted: Vec<_> = programs.iter().filter_map(of).collect();
        wanted.sort_by_key(|&(longest, ..)| longest);
        wanted.into_iter().map(|(_, key, pid, tids)| (key, pid, tids)).collect()
    }

    /// Takes over waits that are going on at a moment: up to then they are user space's, and belong to the segment that ends there,
    /// or to the samples up to there.
    pub fn tell(&mut self, kernel: &mut Kernel, at: KtimeNs) -> Vec<Part> {
        let seen = kernel.seen_threads();
        let mut parts = self.lasting(&seen, kernel, at);
        parts.retain(|part| part.weight() > 0);
        let left: HashSet<u32> = kernel.leave_waits(parts.iter().map(|part| part.tid), &seen, at).into_iter().collect();
        for part in parts.iter().filter(|part| !left.contains(&part.tid)) {
            self.forget(part.tid, kernel);
        }
        parts.retain(|part| left.contains(&part.tid));
        self.told.extend(left.into_iter().map(|tid| (tid, at.0)));
        parts
    }

    /// Waits that are going on at the end, when no switch goes unseen any more, and how many ticks lie in those of threads that could
    /// not be looked at.
    pub fn end(&self, kernel: &Kernel, at: KtimeNs) -> Lasting {
        let mut seen = kernel.seen_threads();
        let parts = self.lasting(&seen, kernel, at);
        for part in &parts {
            seen.remove(&part.tid);
        }
        let waiting = seen.values().filter(|seen| seen.left_ns != 0);
        let ticks =
            |seen: &SeenThread| kernel.ticks((seen.tid, seen.widening), self.not_told(seen.tid, seen.left_ns), at.0);
        Lasting { unread: waiting.map(ticks).sum(), parts }
    }

    /// Forgets threads that have been switched since they were looked at, and programs that have ended.
    fn forget_those_that_are_over(
        &mut self,
        programs: &[(ProgramKey, u32)],
        seen: &BTreeMap<u32, SeenThread>,
        kernel: &mut Kernel,
    ) {
        let living: HashSet<ProgramKey> = programs.iter().map(|(key, _)| *key).collect();
        self.searched.retain(|key, _| living.contains(key));
        let over = |tid: u32, known: &Known| {
            let lasts = match (known.left_ns, seen.get(&tid)) {
                (None, None) => Path::new(&format!("/proc/{tid}")).exists(),
                (left, now) => left == now.map(|now| now.left_ns),
            };
            !lasts || !living.contains(&known.sleeper.of.key)
        };
        let over: Vec<u32> = self.known.iter().filter(|(tid, known)| over(**tid, known)).map(|(tid, _)| *tid).collect();
        over.into_iter().for_each(|tid| self.forget(tid, kernel));
    }

    fn forget(&mut self, tid: u32, kernel: &mut Kernel) {
        self.known.remove(&tid);
        self.told.remove(&tid);
        kernel.forget_wait(tid);
    }

    fn not_told(&self, tid: u32, began_ns: u64) -> u64 {
        self.told.get(&tid).map_or(began_ns, |&told| told.max(began_ns))
    }

    /// Waits of threads that have not been switched since they were looked at.
    fn lasting(&self, seen: &BTreeMap<u32, SeenThread>, kernel: &Kernel, until: KtimeNs) -> Vec<Part> {
        let part = |(&tid, known): (&u32, &Known)| {
            let waits = match (known.left_ns, seen.get(&tid)) {
                // It may have gone to sleep long before.
                (None, None) => SeenThread { left_ns: known.since_ns, tid, state: NOT_SEEN, ..SeenThread::default() },
                (Some(left_ns), Some(seen)) if seen.left_ns == left_ns && left_ns != 0 => *seen,
                _ => return None,
            };
            let began_ns = self.not_told(tid, waits.left_ns.max(known.recorded_ns));
            let queued_ns = waits.queued_from(began_ns, until.0);
            let ticks = |from, to| u32::try_from(kernel.ticks((tid, waits.widening), from, to)).unwrap_or(u32::MAX);
            let facts = WaitFacts {
                left_ns: waits.left_ns,
                began_ns,
                queued_ns,
                ended_ns: until.0,
                weight: ticks(began_ns, queued_ns),
                queued: ticks(queued_ns, until.0),
                waker: waits.waker,
                ..known.sleeper.facts
            };
            Some(Part { tid, sleeper: Arc::clone(&known.sleeper), facts })
        };
        self.known.iter().filter_map(part).collect()
    }
}
