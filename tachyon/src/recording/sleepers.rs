//! Threads that wait when a segment ends: nobody kicks them, so they are read from outside, once.
//!
//! They are looked at while the hooks run. A thread that has not been switched since waited through the look, and its stack
//! is that of the whole wait. At the end one that has been is counted as lost for its last wait.

use super::follow::lock;
use super::made::{Made, PerProcess, describe};
use super::registry::Registry;
use super::waits;
use crate::inspect::{self, ElfCache};
use crate::kernel::Kernel;
use crate::merge::{NATIVE, ProgramKey};
use crate::profile::{Frame, FrameId, Merge, Profile, Sample, Thread, ThreadId};
use crate::remote::RemoteProcess;
use crate::snapshot::{self, Snapshot, ThreadStack};
use crate::types::{KtimeNs, Pid};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tachyon_common::event::{SampleRecord, WaitFacts, status};
use tachyon_common::wait::SeenThread;

/// How long all processes together are looked at when the recording has ended: somebody waits.
pub(super) const AT_END: Duration = Duration::from_secs(5);
/// And at a cut: who is not reached is told of at the next one, or when the wait is over.
pub(super) const AT_CUT: Duration = Duration::from_secs(1);

/// All threads of a process, as they were just before the segment's end.
pub(super) struct Looked {
    key: ProgramKey,
    pid: u32,
    at: KtimeNs,
    snapshot: Snapshot,
    calls: HashMap<u32, WaitFacts>,
    starts: HashMap<u32, u64>,
}

/// The part of a wait that a segment has of one that lasts.
pub(super) struct Part {
    /// Indices of the process and of its thread among those that were looked at.
    process: usize,
    thread: usize,
    tid: u32,
    facts: WaitFacts,
}

/// Waits that lasted at the last cut.
#[derive(Debug, Default)]
pub(super) struct Sleepers {
    /// Thread -> up to when its wait has been told of, nanoseconds.
    told: HashMap<u32, u64>,
    /// What is known of the interpreters' files: the processes are looked at at each cut.
    files: ElfCache,
}

impl Sleepers {
    /// Looks at all processes that are recorded and live.
    pub fn look(&mut self, registry: &Mutex<Registry>, limit: Duration) -> Vec<Looked> {
        let deadline = Instant::now() + limit;
        let processes = lock(registry).live_programs();
        let mut look = |(key, pid)| {
            let limit = deadline.checked_duration_since(Instant::now())?;
            look_at(key, pid, limit, &mut self.files)
        };
        processes.into_iter().filter_map(&mut look).collect()
    }

    /// Waits that last at a cut: the segment that ends has the part before it, the next ones have the rest. A thread that was
    /// switched while it was looked at is left out; the segment in which its wait ends has all of it.
    pub fn cut(&mut self, looked: &[Looked], kernel: &mut Kernel, at: KtimeNs) -> Vec<Part> {
        let seen = kernel.seen_threads();
        let mut parts = self.lasting(looked, &seen, kernel, at);
        self.forget_those_that_are_over(&seen, kernel);
        parts.retain(|part| part.facts.weight > 0);
        let left: HashSet<u32> = kernel.leave_waits(parts.iter().map(|part| part.tid), &seen, at).into_iter().collect();
        for part in parts.iter().filter(|part| !left.contains(&part.tid)) {
            self.told.remove(&part.tid);
            kernel.forget_wait(part.tid);
        }
        parts.retain(|part| left.contains(&part.tid));
        self.told.extend(left.into_iter().map(|tid| (tid, at.0)));
        parts
    }

    /// Forgets waits that were told of and have ended.
    fn forget_those_that_are_over(&mut self, seen: &BTreeMap<u32, SeenThread>, kernel: &mut Kernel) {
        let lasts = |tid: &u32, told: u64| match seen.get(tid) {
            Some(seen) => seen.left_ns != 0 && seen.left_ns < told,
            // It was never switched, or is gone.
            None => Path::new(&format!("/proc/{tid}")).exists(),
        };
        self.told.retain(|tid, told| {
            let lasts = lasts(tid, *told);
            if !lasts {
                kernel.forget_wait(*tid);
            }
            lasts
        });
    }

    /// Waits that last at the end, when nothing is switched unseen any more, and how many ticks lie in those of threads that could not
    /// be looked at.
    pub fn end(&self, looked: &[Looked], kernel: &Kernel, at: KtimeNs) -> (Vec<Part>, u64) {
        let mut seen = kernel.seen_threads();
        let parts = self.lasting(looked, &seen, kernel, at);
        for part in &parts {
            seen.remove(&part.tid);
        }
        let waiting = seen.values().filter(|seen| seen.left_ns != 0);
        let unread = waiting.map(|seen| kernel.ticks(seen.tid, self.not_told(seen.tid, seen.left_ns), at.0)).sum();
        (parts, unread)
    }

    fn not_told(&self, tid: u32, began_ns: u64) -> u64 {
        self.told.get(&tid).map_or(began_ns, |&told| told.max(began_ns))
    }

    /// Waits of threads that have not been switched since they were looked at.
    fn lasting(
        &self,
        looked: &[Looked],
        seen: &BTreeMap<u32, SeenThread>,
        kernel: &Kernel,
        until: KtimeNs,
    ) -> Vec<Part> {
        let recorded_ns = kernel.waits_began().0;
        let part = |(process, thread): (usize, usize)| {
            let of = &looked[process];
            let tid = of.snapshot.threads[thread].tid?;
            let left_ns = match seen.get(&tid) {
                Some(seen) if seen.left_ns == 0 || seen.left_ns >= of.at.0 => return None,
                Some(seen) => seen.left_ns,
                None => of.starts.get(&tid).map_or(recorded_ns, |&start| start.max(recorded_ns)),
            };
            // One that was never switched may run all the time.
            let facts = of.calls.get(&tid)?;
            let began_ns = self.not_told(tid, left_ns);
            let weight = u32::try_from(kernel.ticks(tid, began_ns, until.0)).unwrap_or(u32::MAX);
            Some(Part { process, thread, tid, facts: WaitFacts { began_ns, ended_ns: until.0, weight, ..*facts } })
        };
        let threads = |process: usize| (0..looked[process].snapshot.threads.len()).map(move |thread| (process, thread));
        (0..looked.len()).flat_map(threads).filter_map(part).collect()
    }
}

fn look_at(key: ProgramKey, pid: u32, limit: Duration, files: &mut ElfCache) -> Option<Looked> {
    let at = KtimeNs::now();
    let process = RemoteProcess::open(Pid(pid)).ok()?;
    let inspect::Verdict::Python(interpreter) = inspect::inspect(&process, files).ok()? else {
        return None;
    };
    let snapshot = snapshot::take(&process, &interpreter, limit, None).ok()?;
    let threads = || snapshot.threads.iter().filter_map(|thread| Some((thread.tid?, thread)));
    let call = |(tid, thread)| Some((tid, waits::of_sleeping(&process, thread, snapshot.gil_of(thread))?));
    let calls = threads().filter_map(call).collect();
    let starts = threads().filter_map(|(tid, _)| Some((tid, process.task_start_ns(tid)?))).collect();
    Some(Looked { key, pid, at, snapshot, calls, starts })
}

/// Makes samples of the parts.
pub(super) fn add(parts: &[Part], looked: &[Looked], registry: &Mutex<Registry>, made: &mut Made) {
    for Part { process, thread, tid, facts } in parts {
        made.waited.due_at_end += u64::from(facts.weight);
        let process = &looked[*process];
        sample(process, &process.snapshot.threads[*thread], *tid, facts, registry, made);
    }
}

fn sample(
    looked: &Looked,
    thread: &ThreadStack,
    tid: u32,
    facts: &WaitFacts,
    registry: &Mutex<Registry>,
    made: &mut Made,
) {
    if facts.weight == 0 {
        return;
    }
    let interpreter = thread.python.as_ref().and_then(|python| python.interpreter).unwrap_or(0);
    let owner = owner(looked, thread, tid, u32::try_from(interpreter).unwrap_or(u32::MAX), registry, made);
    let cause = waits::cause(looked.pid, facts);
    let frames = thread.python.as_ref().map_or(&[][..], |python| &python.frames);
    let mut stack = vec![made.profile.special_frame(&crate::profile::waiting(cause))];
    stack.extend(frames.iter().map(|&frame| copy(&looked.snapshot.profile, frame, &mut made.profile)));
    if frames.is_empty() {
        stack.push(made.profile.special_frame(NATIVE));
    }
    let main = if thread.main { status::MAIN_THREAD } else { 0 };
    let holds = thread.python.as_ref().and_then(|python| python.holds_gil) == Some(true);
    let status = (main | if holds { status::HAS_GIL } else { 0 }) as u8;
    let sample = Sample { thread: owner, time_us: 0, status, frames: &stack, merge: Merge::None };
    made.wait(&sample, cause, stack[1], facts);
}

/// The thread in the profile, which may not have met it or its process.
fn owner(
    looked: &Looked,
    thread: &ThreadStack,
    tid: u32,
    interpreter: u32,
    registry: &Mutex<Registry>,
    made: &mut Made,
) -> ThreadId {
    let process = made.processes.iter().position(|known| known.program == looked.key).unwrap_or_else(|| {
        let ProgramKey { instance, image } = looked.key;
        let record = SampleRecord { instance, image, tgid: looked.pid, ..SampleRecord::default() };
        made.profile.processes.push(describe(registry, &record));
        made.processes.push(PerProcess { program: looked.key, ..PerProcess::default() });
        made.processes.len() - 1
    });
    let process = u32::try_from(process).unwrap_or(u32::MAX);
    let threads = &mut made.profile.threads;
    let same = |known: &Thread| (known.process, known.tid, known.interpreter) == (process, tid, interpreter);
    let index = threads.iter().position(same).unwrap_or_else(|| {
        threads.push(Thread {
            process,
            tid,
            unique_tid: u64::from(tid),
            ns_tid: thread.ns_tid.unwrap_or(tid),
            interpreter,
            name: thread.name.clone(),
        });
        threads.len() - 1
    });
    ThreadId(u32::try_from(index).unwrap_or(u32::MAX))
}

/// The same frame in another profile.
fn copy(from: &Profile, frame: FrameId, to: &mut Profile) -> FrameId {
    let frame = from.frames.get(frame);
    let (filename, function) =
        (to.strings.intern(from.strings.get(frame.filename)), to.strings.intern(from.strings.get(frame.function)));
    to.frames.intern(Frame { filename, function, ..*frame })
}
