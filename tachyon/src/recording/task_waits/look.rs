//! One look at the event loops and greenlets of all processes.

use super::super::follow::lock;
use super::super::registry::Registry;
use super::{IdleLoop, NotRead, TaskWaits};
use crate::inspect::{self, ElfCache, GreenletLayout};
use crate::kernel::Kernel;
use crate::merge::ProgramKey;
use crate::profile::Profile;
use crate::remote::ledger::{self, Work};
use crate::remote::{Blocked, RemoteProcess, Task};
use crate::snapshot::{Missing, TaskLayout, TaskReader, Tasks, TasksRead, Waiters};
use crate::types::{KtimeNs, Pid};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tachyon_common::wait::SeenThread;

/// How long one process is read at most, and all of them in one look: the end of a recording waits for it.
const OF_ONE: Duration = Duration::from_millis(200);
const OF_ALL: Duration = Duration::from_millis(400);

/// A process without event loops is looked at again after this long, then after twice as long, up to the maximum.
const AGAIN: Duration = Duration::from_millis(250);
const AGAIN_AT_MOST: Duration = Duration::from_secs(4);
/// The same for greenlets: only all of a process's mappings show that it has none, and programs usually import greenlet early.
const GREENLETS_AGAIN_AT_MOST: Duration = Duration::from_secs(60);

/// How long a reading of a loop that sleeps on is believed: another thread may have started a loop meanwhile.
const BELIEVED: Duration = Duration::from_secs(1);

/// The tasks of a process, as they were read.
#[derive(Debug)]
pub(in crate::recording) struct LookedTasks {
    pub key: ProgramKey,
    pub pid: u32,
    pub tasks: Tasks,
    /// The threads of its loops by their ids, if they are alive.
    pub threads: HashMap<u32, Task>,
    /// The profile that the tasks' frames belong to.
    pub profile: Profile,
}

/// A sleeping thread: when it left its CPU, or that it has not been switched since wait sampling began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asleep {
    Since(u64),
    AllAlong,
}

/// What is looked at in each process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum What {
    Tasks,
    Greenlets,
}

/// What is known about a process.
struct Program {
    what: What,
    reader: Option<TaskReader>,
    /// The profile for the frames of its tasks as they are read: of all tasks seen so far.
    profile: Profile,
    /// Not to be looked at before this time, after a pause of this length.
    not_before: Option<(Instant, Duration)>,
    /// The threads of its loops at the last reading, which may have been incomplete.
    threads: Vec<u32>,
    last: Option<Last>,
}

/// Its tasks at the last reading, and since when the loops' threads had been asleep then.
struct Last {
    read: Instant,
    asleep: BTreeMap<u32, Option<Asleep>>,
    tasks: Arc<LookedTasks>,
}

impl Last {
    /// Whether what was read still holds, with the threads as they are now.
    fn sleeps_on(&self, process: &RemoteProcess, seen: &Seen) -> bool {
        let as_then = |(&tid, then): (&u32, &Option<Asleep>)| then.is_some() && asleep(process, tid, seen) == *then;
        self.read.elapsed() < BELIEVED && self.asleep.iter().all(as_then)
    }
}

/// The threads that have been switched since wait sampling began, by their ids.
type Seen = BTreeMap<u32, SeenThread>;

/// The processes that have been looked at.
#[derive(Default)]
pub(super) struct Looks {
    programs: HashMap<(ProgramKey, What), Program>,
    files: ElfCache,
}

impl Looks {
    /// Looks at all event loops; idle ones get their threads' ticks of a stretch of time.
    pub fn look(&mut self, registry: &Mutex<Registry>, kernel: &Mutex<Kernel>, stretch: Range<u64>) -> TaskWaits {
        let (deadline, live) = (Instant::now() + OF_ALL, lock(registry).live_programs());
        let keys: HashSet<ProgramKey> = live.iter().map(|(key, _)| *key).collect();
        self.programs.retain(|(key, _), _| keys.contains(key));
        let mut waits = TaskWaits { at: KtimeNs::now(), ..TaskWaits::default() };
        let seen = || lock(kernel).seen_threads();
        let before = seen();
        let both = |of| [(of, What::Tasks), (of, What::Greenlets)];
        for ((key, pid), what) in live.into_iter().flat_map(both) {
            let program = self.programs.entry((key, what)).or_insert_with(|| Program::new(what));
            if program.not_before.is_some_and(|(moment, _)| Instant::now() < moment) {
                continue;
            }
            let ticks = |tid: u32| {
                let widening = before.get(&tid).map_or(0, |seen| seen.widening);
                lock(kernel).ticks((tid, widening), stretch.start, stretch.end)
            };
            if Instant::now() > deadline {
                program.lose(NotRead::Late, &before, ticks, &mut waits);
                continue;
            }
            if program.reader.is_none() {
                program.reader = open(pid, what, &mut self.files);
            }
            program.look((key, pid), &before, seen, ticks, &mut waits);
        }
        waits
    }
}

impl Program {
    fn new(what: What) -> Self {
        Self { what, reader: None, profile: Profile::default(), not_before: None, threads: Vec::new(), last: None }
    }

    fn look(
        &mut self,
        of: (ProgramKey, u32),
        before: &Seen,
        seen: impl Fn() -> Seen,
        ticks: impl Fn(u32) -> u64,
        waits: &mut TaskWaits,
    ) {
        let Some(reader) = &self.reader else {
            return self.pause(match self.what {
                What::Tasks => AGAIN_AT_MOST,
                What::Greenlets => GREENLETS_AGAIN_AT_MOST,
            });
        };
        if self.last.as_ref().is_some_and(|last| last.sleeps_on(reader.process(), before)) {
            return self.tell(before, &ticks, waits);
        }
        // As close to the reading as possible: other processes may have been read in between.
        let before = seen();
        match self.read(of, &before, seen) {
            Ok(()) => self.tell(&before, &ticks, waits),
            Err(reason) => self.lose(reason, &before, ticks, waits),
        }
    }

    /// Reads its tasks; `before`: the threads just before that.
    fn read(&mut self, (key, pid): (ProgramKey, u32), before: &Seen, seen: impl Fn() -> Seen) -> Result<(), NotRead> {
        if !ledger::may(Work::Tasks, Pid(pid), Duration::ZERO) {
            return Err(NotRead::Late);
        }
        let Some(reader) = &mut self.reader else { return Ok(()) };
        let charged = ledger::charge(Work::Tasks, Pid(pid));
        let read = reader.read(&mut self.profile, OF_ONE, seen);
        drop(charged);
        let Ok(TasksRead { mut tasks, missing, after }) = read else {
            self.pause(AGAIN_AT_MOST);
            return Err(NotRead::Unreadable);
        };
        self.threads = tasks.loops.iter().filter_map(|found| found.tid).collect();
        match missing {
            // All of a loop or nothing: missing tasks would not be counted anywhere.
            Some(Missing::Late) => return Err(NotRead::Late),
            Some(Missing::Unreadable) => return Err(NotRead::Unreadable),
            None => {}
        }
        if tasks.tasks.is_empty() {
            self.last = None;
            // Greenlets come and go: leaving the process alone while none waits would miss those that come.
            if !reader.uses_greenlets() {
                self.pause(AGAIN_AT_MOST);
            }
            return Ok(());
        }
        let process = reader.process();
        let still = |tid: u32| asleep(process, tid, before).filter(|then| asleep(process, tid, &after) == Some(*then));
        let tids = &self.threads;
        let slept = tids.iter().map(|&tid| (tid, still(tid))).collect();
        let threads = tids.iter().filter_map(|&tid| Some((tid, process.task(tid)?))).collect();
        // Making samples of it must not have to wait for the next reading.
        let profile = taken_out(&self.profile, &mut tasks);
        let tasks = Arc::new(LookedTasks { key, pid, tasks, threads, profile });
        self.last = Some(Last { read: Instant::now(), asleep: slept, tasks });
        self.not_before = None;
        Ok(())
    }

    /// Reports which of its loops are idle.
    fn tell(&self, before: &Seen, ticks: impl Fn(u32) -> u64, waits: &mut TaskWaits) {
        let (Some(reader), Some(last)) = (&self.reader, &self.last) else { return };
        let of = &last.tasks;
        for (event_loop, found) in of.tasks.loops.iter().enumerate() {
            // A loop that has been stopped leaves tasks that will never go on.
            let Some(tid) = found.tid.filter(|_| found.runs != Some(false)) else { continue };
            if asleep(reader.process(), tid, before).is_none() {
                continue;
            }
            let weight = ticks(tid);
            let mut own = of.tasks.tasks.iter().filter(|task| task.event_loop == event_loop).peekable();
            match last.asleep.get(&tid) {
                _ if weight == 0 || own.peek().is_none() => {}
                // If the thread went to sleep within a task, its loop is not idle.
                Some(Some(_)) if own.any(|task| task.running) => {}
                Some(Some(_)) => waits.idle.push(IdleLoop { of: Arc::clone(of), event_loop, tid, weight }),
                _ => *waits.not_read.entry(NotRead::WentOn).or_default() += weight,
            }
        }
    }

    /// Counts the ticks of loops that sleep as lost.
    fn lose(&self, reason: NotRead, before: &Seen, ticks: impl Fn(u32) -> u64, waits: &mut TaskWaits) {
        let Some(reader) = &self.reader else { return };
        let sleeping = self.threads.iter().filter(|tid| asleep(reader.process(), **tid, before).is_some());
        let lost: u64 = sleeping.map(|&tid| ticks(tid)).sum();
        if lost > 0 {
            *waits.not_read.entry(reason).or_default() += lost;
        }
    }

    /// Leaves the process alone for a while.
    fn pause(&mut self, most: Duration) {
        let pause = self.not_before.map_or(AGAIN, |(_, pause)| (pause * 2).min(most));
        self.not_before = Some((Instant::now() + pause, pause));
    }
}

/// Moves the frames of tasks to a profile that has no others.
fn taken_out(from: &Profile, tasks: &mut Tasks) -> Profile {
    let (mut profile, mut known) = (Profile::default(), HashMap::new());
    for frame in tasks.tasks.iter_mut().flat_map(|task| &mut task.frames) {
        *frame = *known.entry(*frame).or_insert_with(|| profile.adopt_frame(from, *frame));
    }
    profile
}

/// Opens a process that has such things, or may have them soon.
fn open(pid: u32, what: What, files: &mut ElfCache) -> Option<TaskReader> {
    let process = RemoteProcess::open(Pid(pid)).ok()?;
    let inspect::Verdict::Python(interpreter) = inspect::inspect(&process, files).ok()? else { return None };
    let waiters = match what {
        What::Tasks => Waiters::Tasks(TaskLayout::of(&process, &interpreter, files)?),
        What::Greenlets => Waiters::Greenlets(GreenletLayout::of(&interpreter, &process.maps().ok()?)?),
    };
    Some(TaskReader::new(process, *interpreter, waiters))
}

/// Since when a thread sleeps; `None`: it runs, or waits for a CPU in the middle of something.
fn asleep(process: &RemoteProcess, tid: u32, seen: &Seen) -> Option<Asleep> {
    match seen.get(&tid) {
        Some(seen) => (seen.left_ns != 0 && seen.state != 0).then_some(Asleep::Since(seen.left_ns)),
        None => matches!(process.blocked(tid), Some(Blocked::At { .. })).then_some(Asleep::AllAlong),
    }
}
