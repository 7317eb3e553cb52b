//! Threads that wait when the recording ends: nobody kicks them, so they are read from outside, once.
//!
//! They are looked at while the hooks still run. A thread that has not been switched since waited through the look, and its stack
//! is that of the whole wait; one that has is counted as lost for its last wait.

use super::follow::lock;
use super::made::{Made, PerProcess, describe};
use super::registry::Registry;
use super::waits;
use crate::inspect::{self, ElfCache};
use crate::merge::{NATIVE, ProgramKey};
use crate::profile::{Frame, FrameId, Merge, Profile, Sample, Thread, ThreadId};
use crate::remote::RemoteProcess;
use crate::snapshot::{self, Snapshot, ThreadStack};
use crate::types::{KtimeNs, Pid};
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tachyon_common::event::{SampleRecord, WaitFacts, status};
use tachyon_common::wait::{SeenThread, ticks};

/// How long all processes together are looked at: the recording has ended, and somebody waits.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// All threads of a process, as they were at the end.
pub(super) struct Looked {
    key: ProgramKey,
    pid: u32,
    at: KtimeNs,
    snapshot: Snapshot,
    calls: HashMap<u32, WaitFacts>,
    starts: HashMap<u32, u64>,
}

/// The period of a waiting thread's ticks, and in which of them this recording's lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lattice {
    pub seed: u64,
    pub period_ns: u64,
    pub began_ns: u64,
    pub ended_ns: u64,
}

/// Looks at all processes that are recorded and live.
pub(super) fn look(registry: &Mutex<Registry>) -> Vec<Looked> {
    let deadline = Instant::now() + TIME_LIMIT;
    let processes = lock(registry).live_programs();
    let look = |(key, pid)| {
        let limit = deadline.checked_duration_since(Instant::now())?;
        look_at(key, pid, limit)
    };
    processes.into_iter().filter_map(look).collect()
}

fn look_at(key: ProgramKey, pid: u32, limit: Duration) -> Option<Looked> {
    let at = KtimeNs::now();
    let process = RemoteProcess::open(Pid(pid)).ok()?;
    let inspect::Verdict::Python(interpreter) = inspect::inspect(&process, &mut ElfCache::default()).ok()? else {
        return None;
    };
    let snapshot = snapshot::take(&process, &interpreter, limit, None).ok()?;
    let threads = || snapshot.threads.iter().filter_map(|thread| Some((thread.tid?, thread)));
    let call = |(tid, thread)| Some((tid, waits::of_sleeping(&process, thread, snapshot.gil_of(thread))?));
    let calls = threads().filter_map(call).collect();
    let starts = threads().filter_map(|(tid, _)| Some((tid, process.task_start_ns(tid)?))).collect();
    Some(Looked { key, pid, at, snapshot, calls, starts })
}

/// Makes samples of those that have not been switched since.
pub(super) fn add(
    looked: &[Looked],
    seen: &[SeenThread],
    lattice: Lattice,
    registry: &Mutex<Registry>,
    made: &mut Made,
) {
    let mut seen: HashMap<u32, SeenThread> = seen.iter().map(|seen| (seen.tid, *seen)).collect();
    for process in looked {
        for thread in &process.snapshot.threads {
            let Some(tid) = thread.tid else { continue };
            let began_ns = match seen.get(&tid).copied() {
                Some(seen) if seen.left_ns == 0 || seen.left_ns >= process.at.0 => continue,
                Some(seen) => seen.left_ns,
                None => process.starts.get(&tid).map_or(lattice.began_ns, |&start| start.max(lattice.began_ns)),
            };
            // One that was never switched may run all the time.
            let Some(facts) = process.calls.get(&tid) else { continue };
            seen.remove(&tid);
            let count = ticks(lattice.seed, tid, lattice.period_ns, began_ns, lattice.ended_ns);
            made.waited.due_at_end += count;
            let facts = WaitFacts {
                began_ns,
                ended_ns: lattice.ended_ns,
                weight: u32::try_from(count).unwrap_or(u32::MAX),
                ..*facts
            };
            sample(process, thread, tid, &facts, registry, made);
        }
    }
    for seen in seen.values().filter(|seen| seen.left_ns != 0) {
        let count = ticks(lattice.seed, seen.tid, lattice.period_ns, seen.left_ns, lattice.ended_ns);
        made.waited.due_at_end += count;
        made.waited.unread += count;
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
