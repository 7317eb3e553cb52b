//! asyncio's tasks: each with its name, its coroutines down to the place where it awaits, and who awaits it.
//!
//! They are found through the lists that CPython keeps from 3.14 on for outside readers ([`published`]), and before that in the
//! sets of the module `asyncio.tasks` ([`modules`]). The process keeps running while they are read: everything is read until two
//! readings agree, and a task on which they never did is marked. Every list, chain and set is bounded, as is their total.

mod coroutine;
mod current;
mod modules;
mod object;
mod published;

use super::memory::Pages;
use super::threads::ThreadState;
use super::{Deadline, Namer, Target};
use crate::inspect::{self, AsyncioOffsets, AwaitLayout, ElfCache, Interpreter, ModuleTasks};
use crate::profile::FrameId;
use crate::remote::RemoteProcess;
use coroutine::{Chain, ThreadFrames};
pub use current::current_tasks;
pub(super) use object::type_name;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use tachyon_common::event::RawFrame;
use tachyon_common::walk::{UserMemory, read_u8, read_u64};

/// Most tasks that are looked at.
const MAX_TASKS: usize = 65_536;

/// Most frames of all tasks together.
pub(super) const MAX_FRAMES: usize = 1 << 18;

/// Readings of everything. A loop that is busy all the time never agrees with itself.
const MAX_READINGS: usize = 8;

/// What is known about the tasks of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tasks {
    /// Event loops: those that run, and those that have tasks.
    pub loops: Vec<EventLoop>,
    /// Tasks in the order in which their threads list them: the oldest first.
    pub tasks: Vec<Task>,
}

impl Tasks {
    /// The main thread's loops and tasks first, then by tid; a thread's tasks keep their order.
    pub(super) fn sorted(mut self, pid: u32) -> Self {
        let mut order: Vec<usize> = (0..self.loops.len()).collect();
        let key =
            |at: &usize| self.loops.get(*at).map(|found| (found.tid != Some(pid), found.tid.is_none(), found.tid));
        order.sort_by_key(key);
        let mut places = vec![0; order.len()];
        for (now, &before) in order.iter().enumerate() {
            if let Some(place) = places.get_mut(before) {
                *place = now;
            }
        }
        self.loops = order.iter().filter_map(|&at| self.loops.get(at).cloned()).collect();
        for task in &mut self.tasks {
            task.event_loop = places.get(task.event_loop).copied().unwrap_or_default();
        }
        self.tasks.sort_by_key(|task| task.event_loop);
        self
    }
}

/// An event loop in one thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventLoop {
    /// Its address: `id(loop)`.
    pub address: u64,
    /// Name of its type, e.g. `_UnixSelectorEventLoop`; `None` when unreadable.
    pub kind: Option<String>,
    /// The thread in which its tasks were made, by its tid in the profiler's own pid namespace; `None` when it has ended.
    pub tid: Option<u32>,
    /// Address of that thread's `PyThreadState`; 0 when it has ended.
    pub tstate: u64,
    /// `PyInterpreterState.id`; `None` when unreadable.
    pub interpreter: Option<u64>,
    /// Whether its thread runs this loop; `None` if unknown.
    pub runs: Option<bool>,
}

/// A task.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Task {
    /// Its address: `id(task)`.
    pub address: u64,
    /// Its name; `None` when unreadable.
    pub name: Option<String>,
    /// It is a greenlet, not an asyncio task.
    pub greenlet: bool,
    /// Which of [`Tasks::loops`] it belongs to.
    pub event_loop: usize,
    /// `PyInterpreterState` it lives in, by its address.
    pub interp: u64,
    /// Its thread runs it now.
    pub running: bool,
    /// Its coroutines, innermost first; for a running task, everything that it calls.
    pub frames: Vec<FrameId>,
    /// They were read down to the innermost one.
    pub whole: bool,
    /// Addresses of the tasks that await it; for a greenlet, that of its parent.
    pub awaited_by: Vec<u64>,
    /// Two readings in a row agreed on it. If not, what is shown of it may not belong together.
    pub steady: bool,
}

/// The task that a thread runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningTask {
    /// Its address: `id(task)`.
    pub address: u64,
    /// Its name; `None` when unreadable.
    pub name: Option<String>,
}

/// Where fields of tasks, and of what they refer to, are.
#[derive(Clone, Copy, Debug)]
pub struct TaskLayout {
    /// Where the tasks are.
    pub lists: TaskLists,
    /// What leads from them to others.
    pub awaits: AwaitLayout,
}

impl TaskLayout {
    /// Where the tasks of a process are; `None` if it has not imported asyncio, or is of a version whose tasks cannot be listed.
    #[must_use]
    pub fn of(process: &RemoteProcess, interpreter: &Interpreter, files: &mut ElfCache) -> Option<Self> {
        let awaits = interpreter.awaits?;
        let lists = match ModuleTasks::of(&interpreter.layout) {
            Some(tasks) => TaskLists::Modules(tasks),
            None => TaskLists::Published(inspect::asyncio_offsets(process, interpreter, files)?),
        };
        Some(Self { lists, awaits })
    }
}

/// Where the tasks are.
#[derive(Clone, Copy, Debug)]
pub enum TaskLists {
    /// Where `_asyncio` publishes (3.14+).
    Published(AsyncioOffsets),
    /// In the sets of a module (3.8 to 3.13).
    Modules(ModuleTasks),
}

/// Why some tasks may be missing, for users.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub(super) enum TaskProblem {
    #[error("a list of tasks changed each time it was read: some tasks may be missing")]
    Torn,
    #[error("there are more than {MAX_TASKS} tasks: the others are left out")]
    TooMany,
    #[error("tasks have more than {MAX_FRAMES} frames together: the others are left out")]
    TooManyFrames,
    #[error("tasks were not read to the end: the time was up")]
    Late,
    #[error("the tasks of its asyncio are not those of its version's C module: they cannot be read")]
    OtherTasks,
}

/// Where tasks are listed: in a thread or in an interpreter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    interp: u64,
    /// The thread state; 0 for tasks whose thread has ended.
    tstate: u64,
}

/// A task as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RawTask {
    place: Place,
    name: Option<String>,
    event_loop: u64,
    loop_kind: Option<String>,
    running: bool,
    chain: Chain,
    awaited_by: Vec<u64>,
}

impl RawTask {
    /// Whether two readings agree. A running task moves on.
    fn agrees(&self, other: &Self) -> bool {
        let rest = |task: &Self| Self { chain: Chain::default(), ..task.clone() };
        rest(self) == rest(other) && self.chain.agrees(&other.chain, self.running)
    }
}

/// One reading.
#[derive(Debug, Default)]
struct Reading {
    /// In list order.
    order: Vec<u64>,
    tasks: HashMap<u64, RawTask>,
    /// Loops for which it is unknown whether they run.
    untold: HashSet<u64>,
    /// Running loops: by thread.
    running: Vec<(Place, u64, Option<String>)>,
    problems: HashSet<TaskProblem>,
    /// Tasks that were looked at.
    known: HashSet<u64>,
    frames_left: usize,
}

impl Reading {
    fn agrees(&self, other: &Self) -> bool {
        self.order == other.order
            && self.running == other.running
            && self.problems == other.problems
            && self.tasks.iter().all(|(at, task)| other.tasks.get(at).is_some_and(|other| task.agrees(other)))
    }
}

/// Reads from one process.
struct Reader<'a, M: ?Sized> {
    memory: &'a M,
    /// The same memory as it is now, where `memory` remembers what it read.
    now: &'a dyn UserMemory,
    target: &'a Target<'a>,
    layout: &'a TaskLayout,
    states: &'a [ThreadState],
    deadline: Deadline,
    /// Stacks of threads that run tasks, by thread state.
    stacks: RefCell<HashMap<u64, Rc<ThreadFrames>>>,
}

/// A process whose tasks are read and whose thread states are known.
pub(super) struct TasksOf<'a, M> {
    pub memory: &'a M,
    pub target: &'a Target<'a>,
    pub layout: &'a TaskLayout,
    pub states: &'a [ThreadState],
    /// Tids in the profiler's pid namespace, by the threads' tids in their own.
    pub tids: &'a HashMap<u32, u32>,
    pub deadline: Deadline,
}

impl<M: UserMemory> TasksOf<'_, M> {
    /// Reads all tasks until two readings agree.
    pub(super) fn read(&self, namer: &mut Namer<'_, M>) -> (Tasks, Vec<TaskProblem>) {
        let once = || self.once(&Pages::new(self.memory));
        let mut before = once();
        let mut last = once();
        for _ in 2..MAX_READINGS {
            if last.agrees(&before) || self.deadline.passed() {
                break;
            }
            before = std::mem::replace(&mut last, once());
        }
        self.told(&last, &before, namer)
    }

    /// The same in one reading of memory that does not change.
    pub(super) fn read_still(&self, namer: &mut Namer<'_, M>) -> (Tasks, Vec<TaskProblem>) {
        let read = self.once(self.memory);
        self.told(&read, &read, namer)
    }

    /// The tasks that threads run, by tid; for sleeping threads.
    pub(super) fn running(&self) -> HashMap<u32, RunningTask> {
        let running = self.reader(self.memory).running();
        let tid = |state: &ThreadState| self.tids.get(&state.ns_tid?).copied();
        let of_thread = |(tstate, task)| {
            let state = self.states.iter().find(|state| state.tstate == tstate)?;
            Some((tid(state)?, task))
        };
        running.into_iter().filter_map(of_thread).collect()
    }

    fn once<N: UserMemory>(&self, memory: &N) -> Reading {
        self.reader(memory).read()
    }

    fn reader<'r, N>(&'r self, memory: &'r N) -> Reader<'r, N> {
        let Self { memory: now, target, layout, states, deadline, .. } = *self;
        Reader { memory, now, target, layout, states, deadline, stacks: RefCell::default() }
    }

    fn told(&self, last: &Reading, before: &Reading, namer: &mut Namer<'_, M>) -> (Tasks, Vec<TaskProblem>) {
        let thread = |place: Place| {
            let state = self.states.iter().find(|state| state.tstate == place.tstate);
            let tid = state.and_then(|state| self.tids.get(&state.ns_tid?).copied());
            (tid, read_u64(self.memory, place.interp, self.target.layout.interp_id).ok())
        };
        let mut problems: Vec<TaskProblem> = last.problems.iter().copied().collect();
        problems.sort_by_key(ToString::to_string);
        (named(last, before, thread, namer).sorted(self.target.process.pid().0), problems)
    }
}

/// The result of a reading, with names; `before` is the one it was compared with.
fn named<M: UserMemory>(
    last: &Reading,
    before: &Reading,
    thread: impl Fn(Place) -> (Option<u32>, Option<u64>),
    namer: &mut Namer<'_, M>,
) -> Tasks {
    let mut found = Tasks::default();
    let mut loops: HashMap<(Place, u64), usize> = HashMap::new();
    let mut number = |found: &mut Tasks, place: Place, address: u64, kind: &Option<String>, runs: Option<bool>| {
        *loops.entry((place, address)).or_insert_with(|| {
            let (tid, interpreter) = thread(place);
            found.loops.push(EventLoop { address, kind: kind.clone(), tid, tstate: place.tstate, interpreter, runs });
            found.loops.len() - 1
        })
    };
    for (place, address, kind) in &last.running {
        number(&mut found, *place, *address, kind, Some(true));
    }
    for address in &last.order {
        let Some(raw) = last.tasks.get(address) else { continue };
        let runs = if last.untold.contains(&raw.event_loop) { None } else { Some(false) };
        let event_loop = number(&mut found, raw.place, raw.event_loop, &raw.loop_kind, runs);
        let mut steady = before.tasks.get(address).is_some_and(|before| before.agrees(raw));
        let mut name = |frame: &RawFrame| {
            let (frame, named) = namer.frame(frame);
            steady &= named;
            frame
        };
        let frames = raw.chain.frames.iter().filter_map(&mut name).collect();
        found.tasks.push(Task {
            address: *address,
            name: raw.name.clone(),
            greenlet: false,
            event_loop,
            interp: raw.place.interp,
            running: raw.running,
            frames,
            whole: raw.chain.whole,
            awaited_by: raw.awaited_by.clone(),
            steady,
        });
    }
    found
}

impl<M: UserMemory + ?Sized> Reader<'_, M> {
    /// The tasks that threads run, by their thread states.
    fn running(&self) -> Vec<(u64, RunningTask)> {
        match &self.layout.lists {
            TaskLists::Published(offsets) => self.running_published(offsets),
            TaskLists::Modules(tasks) => self.running_in_modules(tasks),
        }
    }

    fn read(&self) -> Reading {
        let mut reading = Reading { frames_left: MAX_FRAMES, ..Reading::default() };
        match &self.layout.lists {
            TaskLists::Published(offsets) => self.read_published(offsets, &mut reading),
            TaskLists::Modules(tasks) => self.read_modules(tasks, &mut reading),
        }
        reading
    }

    /// The interpreters, without duplicates.
    fn interpreters(&self) -> Vec<u64> {
        let mut seen = HashSet::new();
        self.states.iter().map(|state| state.interp).filter(|&interp| seen.insert(interp)).collect()
    }

    /// Adds a task to a reading unless it is there; `get` reads it, if it is a task. False when there is no more room.
    fn add(&self, reading: &mut Reading, address: u64, get: impl FnOnce(usize) -> Option<RawTask>) -> bool {
        if self.deadline.passed() {
            reading.problems.insert(TaskProblem::Late);
            return false;
        }
        if reading.known.len() >= MAX_TASKS {
            reading.problems.insert(TaskProblem::TooMany);
            return false;
        }
        if !reading.known.insert(address) {
            return true;
        }
        // If it has ended since the list was read, it is no longer a task.
        let Some(task) = get(reading.frames_left) else { return true };
        reading.frames_left = reading.frames_left.saturating_sub(task.chain.frames.len());
        if reading.frames_left == 0 {
            reading.problems.insert(TaskProblem::TooManyFrames);
        }
        reading.order.push(address);
        reading.tasks.insert(address, task);
        true
    }

    /// Size of an object's header, whose last word is the type: in all versions a future's loop comes next.
    fn header(&self) -> u64 {
        u64::from(self.target.layout.ob_type) + 8
    }

    fn word(&self, base: u64, offset: u64) -> Option<u64> {
        read_u64(self.memory, base.checked_add(offset)?, 0).ok()
    }

    /// A word that is not NULL.
    fn pointer(&self, base: u64, offset: u64) -> Option<u64> {
        self.word(base, offset).filter(|&pointer| pointer != 0)
    }

    fn byte(&self, base: u64, offset: u64) -> Option<u8> {
        read_u8(self.memory, base.checked_add(offset)?).ok()
    }
}
