//! Where a process records whose work its threads do: found when it is inspected, and again when it has loaded or
//! published something new.

use super::{Follower, lock};
use crate::inspect::spans::{Published, Spans};
use crate::inspect::{self, GreenletLayout, Interpreter, ModuleTasks, Verdict};
use crate::kernel::KernelError;
use crate::remote::ledger::{self, Work};
use crate::remote::{Mapping, RemoteProcess};
use crate::snapshot;
use crate::types::Pid;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, Instant};
use tachyon_common::process::{ProcessEntry, flags};
use tachyon_common::whose::{Asyncio, ThreadLocal};

/// A process is looked at this long after it mapped something: libraries tend to come in groups.
const BURST: Duration = Duration::from_millis(20);
/// A program that has just started, or a forked child, is not looked at before this: most end sooner.
const YOUNG: Duration = Duration::from_millis(200);
/// What may not be looked at now is tried again after this.
const LATER: Duration = Duration::from_secs(1);
/// How long looks go on before other work has its turn.
const SLICE: Duration = Duration::from_millis(50);

/// What is known about one process.
#[derive(Clone)]
struct OfProcess {
    /// What it published at the last look.
    published: Option<Published>,
    /// Before this it is not looked at.
    not_before: Instant,
    /// When it last mapped something new.
    mapped: Instant,
    /// When it is looked at next.
    due: Instant,
    /// From when on it is looked at if another one is due: one wake-up for many.
    due_with_others: Instant,
    /// It ran before it was found, and nothing that it mapped has been seen.
    is_old: bool,
    /// It has mapped something since the last look.
    is_new: bool,
    /// It has mapped something since it was found. What has not is looked at now and then all the same: where that takes longer, nothing
    /// is missing.
    changes: bool,
    /// The user it is charged to, once looked up.
    user: Option<u32>,
}

impl OfProcess {
    /// It has just been found; `young`: it has just begun, too.
    fn new(young: bool) -> Self {
        let now = Instant::now();
        let due = if young { now + YOUNG } else { now };
        Self {
            published: None,
            not_before: due,
            mapped: now,
            due,
            due_with_others: due,
            is_old: !young,
            is_new: true,
            changes: false,
            user: None,
        }
    }

    /// It has mapped something, or may have.
    fn changed(&mut self, now: Instant) {
        (self.is_new, self.changes, self.is_old) = (true, true, false);
        self.due = self.due.min(now + BURST).max(self.not_before);
        self.due_with_others = self.due;
    }

    /// It is looked at again after this, or up to a quarter of it earlier, with others.
    fn rest(&mut self, now: Instant, interval: Duration) {
        (self.due, self.due_with_others) = (now + interval, now + interval * 3 / 4);
    }
}

/// Where a process keeps its running tasks: parts of its [`ProcessEntry`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Running {
    /// 0: not known.
    pub asyncio: u16,
    /// 0: the threads themselves know.
    pub current_tasks: u64,
}

/// What a look found.
struct Looked {
    published: Published,
    /// It seems to be importing asyncio.
    imports: bool,
    /// asyncio is built in and not used yet: no event tells when it is.
    may_import: bool,
}

/// What is known about all recorded processes.
#[derive(Default)]
pub(super) struct WorkLooks {
    spans: Spans,
    processes: HashMap<u32, OfProcess>,
}

impl WorkLooks {
    /// A process runs CPython; schedules its first look.
    pub fn begin(&mut self, pid: u32, young: bool) {
        self.processes.insert(pid, OfProcess::new(young));
    }

    /// A child was forked; it has what its parent has, and may publish another context soon.
    pub fn fork(&mut self, parent: u32, child: u32) {
        let Some(OfProcess { published, is_new, .. }) = self.processes.get(&parent).cloned() else { return };
        self.processes.insert(child, OfProcess { published, is_new, ..OfProcess::new(true) });
    }

    /// A process has mapped a file as executable.
    pub fn mapped(&mut self, pid: u32, dev: (u32, u32), inode: u64, path: &OsStr) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let now = Instant::now();
        if inspect::is_named_asyncio(Path::new(path)) || !self.spans.is_known(dev, inode, path, now) {
            process.mapped = now;
            process.changed(now);
        }
    }

    /// Mapping events were lost.
    pub fn lost(&mut self) {
        let now = Instant::now();
        for process in self.processes.values_mut() {
            process.changed(now);
        }
    }

    pub fn forget(&mut self, pid: u32) {
        self.processes.remove(&pid);
    }

    /// How long until the next look.
    pub fn wait(&self) -> Option<Duration> {
        let due = self.processes.values().map(|process| process.due).min()?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    /// Those that are due, and if there are any, those that may be looked at with them.
    fn due(&self, now: Instant) -> Vec<u32> {
        if !self.processes.values().any(|process| process.due <= now) {
            return Vec::new();
        }
        self.processes.iter().filter(|(_, process)| process.due_with_others <= now).map(|(&pid, _)| pid).collect()
    }
}

impl Follower {
    /// Looks at the processes that are due. True if more are left.
    pub(super) fn look_for_work(&mut self) -> bool {
        let begun = Instant::now();
        for pid in self.work.due(begun) {
            if begun.elapsed() > SLICE {
                return true;
            }
            let now = Instant::now();
            let Some(process) = self.work.processes.get_mut(&pid) else { continue };
            let user = *process.user.get_or_insert_with(|| super::user_of(pid));
            if !self.queue.may(pid, user, now) {
                if process.changes {
                    ledger::put_off(Work::Look, pid, user);
                }
                process.rest(now, LATER);
                continue;
            }
            let worked = ledger::thread_time();
            let looked = self.look_at_work_of(pid);
            self.queue.spent(pid, user, 2 * ledger::thread_time().saturating_sub(worked), Instant::now());
            let Some(process) = self.work.processes.get_mut(&pid) else { continue };
            match looked {
                Some(Looked { published, imports, may_import }) => {
                    // One that is not about to publish anything has been quiet for as long as it has run, for all that is known.
                    if process.is_old && !imports && !may_import && published.is_none() {
                        process.mapped = began(pid).unwrap_or(process.mapped);
                    }
                    process.is_old = false;
                    let quiet = now.saturating_duration_since(process.mapped);
                    let again = published.again_after(quiet);
                    process.rest(now, if imports { again.min(quiet.max(YOUNG)) } else { again });
                    (process.published, process.is_new) = (Some(published), imports);
                }
                // The record of its end will come soon.
                None => process.rest(now, LATER),
            }
        }
        false
    }

    /// `None`: it is gone, or no longer recorded.
    fn look_at_work_of(&mut self, pid: u32) -> Option<Looked> {
        let (life, entry) = {
            let kernel = lock(&self.kernel);
            let life = kernel.process(pid)?;
            (life, kernel.entry(&life)?)
        };
        const WANTED: u32 = flags::PYTHON | flags::SELECTED;
        if entry.flags & WANTED != WANTED {
            return None;
        }
        let process = RemoteProcess::open(Pid(pid)).ok()?;
        let known = self.work.processes.get(&pid)?;
        let current = known.published.as_ref().filter(|known| known.is_current(&process));
        if let Some(published) = current.filter(|_| !known.is_new) {
            return Some(Looked { published: published.clone(), imports: false, may_import: false });
        }
        let maps = process.maps().ok()?;
        let published = self.work.spans.look(&process, &maps, Instant::now());
        let spans = published.thread.as_ref().map_or(0, |place| self.spans_number(place));
        let known = Running { asyncio: entry.asyncio, current_tasks: entry.current_tasks };
        let running = if known.asyncio == 0 { self.tasks_of_mapped(&process, &maps, &entry) } else { known };
        let greenlets = if entry.greenlets == 0 { self.greenlets_of(&process, &maps) } else { entry.greenlets };
        if (spans, running, greenlets) != (entry.spans, known, entry.greenlets) {
            let Running { asyncio, current_tasks } = running;
            let entry = ProcessEntry { spans, asyncio, current_tasks, greenlets, ..entry };
            let written = lock(&self.kernel).decide(pid, &life, &entry);
            if let Err(error) = written {
                self.refuse(pid, &error.to_string());
            }
        }
        if let Some(service) = published.process.as_ref().ok().and_then(|context| context.service.as_ref()) {
            lock(&self.registry).is_of_service(life.instance, life.image, service);
        }
        // Its C module is mapped before it can be used.
        let imports = running.asyncio == 0 && inspect::has_asyncio(&maps);
        let may_import = running.asyncio == 0 && self.asyncio_is_built_in(&entry);
        Some(Looked { published, imports, may_import })
    }

    /// Whether asyncio is built in and has to be looked for: no file is mapped when it is imported, and before 3.14 it publishes no offsets.
    fn asyncio_is_built_in(&self, entry: &ProcessEntry) -> bool {
        entry.flags & flags::ASYNCIO_BUILT_IN != 0
            && lock(&self.registry).layout(entry.layout).is_some_and(|layout| ModuleTasks::of(layout).is_some())
    }

    /// Where a process that may have loaded asyncio by now keeps its running tasks.
    fn tasks_of_mapped(&mut self, process: &RemoteProcess, maps: &[Mapping], entry: &ProcessEntry) -> Running {
        if !inspect::has_asyncio(maps) && !self.asyncio_is_built_in(entry) {
            return Running::default();
        }
        let Ok(Verdict::Python(interpreter)) = inspect::inspect(process, &mut self.cache) else {
            return Running::default();
        };
        self.tasks_of(process, &interpreter)
    }

    /// Where the threads of a process that may have loaded greenlet by now keep their greenlets; 0: not known.
    fn greenlets_of(&mut self, process: &RemoteProcess, maps: &[Mapping]) -> u32 {
        if !GreenletLayout::is_loaded(maps) {
            return 0;
        }
        let Ok(Verdict::Python(interpreter)) = inspect::inspect(process, &mut self.cache) else { return 0 };
        let place = inspect::running_greenlets(process, maps, &interpreter, &mut self.work.spans);
        let Some(place) = place else { return 0 };
        let number = lock(&self.kernel).greenlets_number(&place);
        u32::from(
            self.number(number, "more places of greenlets than there is room for: greenlets of some are not told"),
        )
    }

    /// Where a process keeps its running tasks.
    pub(super) fn tasks_of(&mut self, process: &RemoteProcess, interpreter: &Interpreter) -> Running {
        let Some(awaits) = interpreter.awaits.as_ref() else { return Running::default() };
        let Some(rows) = ModuleTasks::of(&interpreter.layout) else { return self.tasks_in_files(process, interpreter) };
        // Searching for it means reading hundreds of words of `sys.modules`.
        let may_have = interpreter.asyncio_built_in || inspect::has_asyncio(&process.maps().unwrap_or_default());
        let current = if may_have { snapshot::current_tasks(process, interpreter, &rows) } else { None };
        let Some(current_tasks) = current else { return Running::default() };
        self.running(rows.for_kernel(&interpreter.layout, awaits), current_tasks)
    }

    /// The same where the process's mapped files say so (3.14+): the interpreter's file, or the module's own.
    pub(super) fn tasks_in_files(&mut self, process: &RemoteProcess, interpreter: &Interpreter) -> Running {
        let Some(awaits) = interpreter.awaits.as_ref() else { return Running::default() };
        if ModuleTasks::of(&interpreter.layout).is_some() {
            return Running::default();
        }
        let offsets = inspect::asyncio_offsets(process, interpreter, &mut self.cache);
        self.running(offsets.and_then(|offsets| offsets.for_kernel(awaits)), 0)
    }

    fn running(&mut self, asyncio: Option<Asyncio>, current_tasks: u64) -> Running {
        let Some(asyncio) = asyncio else { return Running::default() };
        let number = lock(&self.kernel).asyncio_number(&asyncio);
        let number = self.number(number, "more builds of asyncio than there is room for: tasks of some are not told");
        if number == 0 { Running::default() } else { Running { asyncio: number, current_tasks } }
    }

    fn spans_number(&self, place: &ThreadLocal) -> u16 {
        let number = lock(&self.kernel).spans_number(place);
        self.number(number, "more libraries that publish spans than there is room for: spans of some are not told")
    }

    /// A number in the kernel side's table, or 0 and a note.
    fn number(&self, number: Result<Option<u16>, KernelError>, full: &str) -> u16 {
        match number {
            Ok(Some(number)) => return number,
            Ok(None) => self.note(full.to_owned()),
            Err(error) => self.note(format!("whose work it is cannot be told of some processes: {error}")),
        }
        0
    }
}

/// When a process began.
fn began(pid: u32) -> Option<Instant> {
    Instant::now().checked_sub(RemoteProcess::open(Pid(pid)).ok()?.age()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thousand idle processes are no reason to say that they change.
    #[test]
    fn only_what_maps_something_changes() {
        let mut looks = WorkLooks::default();
        looks.begin(1, false);
        looks.begin(2, true);
        looks.fork(1, 3);
        let changing = |looks: &WorkLooks| {
            let mut pids: Vec<u32> =
                looks.processes.iter().filter(|(_, process)| process.changes).map(|(&pid, _)| pid).collect();
            pids.sort_unstable();
            pids
        };
        assert_eq!(changing(&looks), [0; 0]);
        looks.mapped(1, (8, 1), 5, OsStr::new("/usr/lib/_asyncio.so"));
        looks.fork(1, 4);
        assert_eq!(changing(&looks), [1], "a child has mapped nothing yet");
        looks.lost();
        assert_eq!(changing(&looks), [1, 2, 3, 4], "what they mapped is not known");
    }

    /// A look that is not due yet wakes nobody, but is taken with one that is.
    #[test]
    fn looks_are_taken_together() {
        let mut looks = WorkLooks::default();
        let now = Instant::now();
        for (pid, seconds) in [(1, 80), (2, 100), (3, 120)] {
            looks.begin(pid, false);
            looks.processes.get_mut(&pid).expect("it was begun").rest(now, Duration::from_secs(seconds));
        }
        let due = |looks: &WorkLooks, seconds| {
            let mut pids = looks.due(now + Duration::from_secs(seconds));
            pids.sort_unstable();
            pids
        };
        assert_eq!(due(&looks, 79), [0; 0]);
        assert_eq!(due(&looks, 80), [1, 2]);
        assert_eq!(due(&looks, 90), [1, 2, 3]);
        // What has just mapped something is given the time to map more, whatever else is due.
        looks.mapped(3, (8, 1), 5, OsStr::new("/usr/lib/_asyncio.so"));
        let third = &looks.processes[&3];
        assert!(third.due_with_others == third.due && third.due < now + Duration::from_secs(60));
    }

    /// What a child publishes is its own, however long its parent has been quiet.
    #[test]
    fn a_child_is_quiet_since_its_fork() {
        let mut looks = WorkLooks::default();
        let long_ago = Instant::now().checked_sub(Duration::from_secs(5)).expect("the machine is up");
        looks.begin(1, false);
        looks.processes.get_mut(&1).expect("it was begun").mapped = long_ago;
        let forked = Instant::now();
        looks.fork(1, 2);
        let (parent, child) = (&looks.processes[&1], &looks.processes[&2]);
        assert!(parent.mapped == long_ago && child.mapped >= forked);
        assert!(parent.is_old && !child.is_old && child.due >= forked + YOUNG);
    }
}
