//! One process -> all its threads' stacks at this moment, sleeping threads too: the same walk as on the kernel side, over
//! `process_vm_readv`.
//!
//! Needs no BPF, and no rights except to read the process. Nothing in the target is stopped or changed: a stack that
//! changes while it is read is read again, and marked if it never holds still. The target's memory is not trusted
//! beyond a bounded cost: lists and chains that lead in circles end, and so does the time.

mod greenlets;
mod idle;
mod memory;
mod mixed;
mod namer;
mod names;
mod objects;
mod owner;
mod stack;
mod tasks;
mod threads;
mod unwind;

pub use idle::{Missing, TaskReader, TasksRead, Waiters};
pub use mixed::{MixedFrame, MixedStack, NativeChoice, NoNative};
pub use names::{SampledThread, identify, thread_names, thread_names_of};
use tasks::TasksOf;
pub use tasks::{EventLoop, RunningTask, Task as AsyncTask, TaskLayout, TaskLists, Tasks, current_tasks};

use crate::inspect::{GreenletLayout, Interpreter};
use crate::profile::{FrameId, Profile};
use crate::remote::{RemoteError, RemoteProcess, Task};
use crate::symbolize::Symbolizer;
use crate::symbolize::native::NativeSymbols;
use crate::types::RemoteAddr;
use greenlets::{CStacks, GreenletsOf};
use memory::Pages;
use mixed::NativeStacks;
use namer::Namer;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tachyon_common::event::status;
use tachyon_common::layout::Layout;
use tachyon_common::process::ProcessEntry;
use tachyon_common::stop::StopReason;
use tachyon_common::walk::UserMemory;
use threads::ThreadState;
use unwind::NativeStack;

/// Seed of the fingerprints: they last only while the snapshot is made, so no target can aim at them.
const SEED: u64 = 0;

/// How long a snapshot may take by default. A process with 10,000 threads can be read within it.
pub const TIME_LIMIT: Duration = Duration::from_secs(10);

/// All threads of a process at one moment (or nearly: nothing is stopped).
#[derive(Debug, Default)]
pub struct Snapshot {
    /// The main thread first, then by tid; those whose tid is not known last.
    pub threads: Vec<ThreadStack>,
    /// asyncio's tasks; `None` if not asked for.
    pub tasks: Option<Tasks>,
    /// Greenlets, as tasks, if asked for; `None` if the process has none.
    pub greenlets: Option<Tasks>,
    /// The tasks that threads run, by tid, if asked for.
    pub running_tasks: HashMap<u32, RunningTask>,
    /// What could not be read, for users.
    pub problems: Vec<String>,
    /// Frames and strings that [`PythonStack::frames`] refer to.
    pub profile: Profile,
}

/// One thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadStack {
    /// Its tid in the profiler's own pid namespace; `None` if unknown (3.10 and before, unusual C library).
    pub tid: Option<u32>,
    /// Its tid in its own pid namespace.
    pub ns_tid: Option<u32>,
    /// Its `threading.get_ident()`; 0 when it never entered Python.
    pub thread_id: u64,
    /// Its name: Python's own where it could be read, else the kernel's.
    pub name: String,
    /// The kernel's short name for it.
    pub comm: String,
    /// The kernel's state letter: `R` running, `S` sleeping, `D` in an uninterruptible wait, `T` stopped, …
    pub state: Option<char>,
    /// It is the process's first thread.
    pub main: bool,
    /// What it does in Python; `None` when it never entered Python.
    pub python: Option<PythonStack>,
    /// Python and native frames together, or why there is no such stack; `None` if not asked for.
    pub mixed: Option<Result<MixedStack, NoNative>>,
}

impl Snapshot {
    /// Address of the GIL that a thread may wait for: its interpreter's, or the first known one if it never entered Python.
    #[must_use]
    pub fn gil_of(&self, thread: &ThreadStack) -> Option<u64> {
        let of = |thread: &ThreadStack| thread.python.as_ref()?.gil;
        of(thread).or_else(|| self.threads.iter().find_map(of))
    }
}

/// What a thread does in one interpreter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PythonStack {
    /// `PyInterpreterState.id`; `None` when unreadable.
    pub interpreter: Option<u64>,
    /// Whether it held its interpreter's GIL when its stack was read; `None` when unreadable, or the build has no GIL.
    pub holds_gil: Option<bool>,
    /// Address of that GIL; `None` when unreadable, or the build has none.
    pub gil: Option<u64>,
    /// Its frames, leaf first.
    pub frames: Vec<FrameId>,
    /// Why the stack ends where it does: [`StopReason::Complete`] or [`StopReason::NoFrame`]; otherwise it was cut.
    pub stop: StopReason,
    /// It was the same in two readings. If not, it kept changing, and frames may not belong together.
    pub steady: bool,
}

/// The process and what is known about it.
struct Target<'a> {
    process: &'a RemoteProcess,
    layout: Layout,
    entry: ProcessEntry,
}

/// When to stop.
#[derive(Clone, Copy, Debug)]
struct Deadline(Instant);

impl Deadline {
    fn passed(self) -> bool {
        self.rest().is_none()
    }

    /// The time that is left, if any.
    fn rest(self) -> Option<Duration> {
        self.0.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero())
    }
}

/// What a snapshot should contain.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// How long it may take.
    pub limit: Duration,
    /// Native frames, where they are wanted.
    pub native: Option<NativeChoice>,
    /// Native symbols that are already known.
    pub symbols: Option<Arc<NativeSymbols>>,
    /// Only the stacks of these threads, by their tids in the profiler's namespace, which sleep while they are read (the caller makes
    /// sure that they did): each page is read once for all of them.
    pub asleep: Option<&'a HashSet<u32>>,
    /// Where asyncio's tasks are, if they are wanted.
    pub tasks: Option<TaskLayout>,
    /// Where greenlets are, if they are wanted.
    pub greenlets: Option<GreenletLayout>,
    /// Like `tasks`, if only the tasks that threads run are wanted.
    pub running_tasks: Option<TaskLayout>,
}

impl Default for Wanted<'_> {
    fn default() -> Self {
        Self {
            limit: TIME_LIMIT,
            native: None,
            symbols: None,
            asleep: None,
            tasks: None,
            greenlets: None,
            running_tasks: None,
        }
    }
}

/// Takes a snapshot of a process whose interpreter is known.
///
/// # Errors
/// When its memory cannot be read at all (see [`RemoteError::is_denied`]) or it is gone.
pub fn take(process: &RemoteProcess, interpreter: &Interpreter, wanted: &Wanted<'_>) -> Result<Snapshot, RemoteError> {
    // A read whose error is kept: the walk only knows that something is unreadable.
    process.read_u64(RemoteAddr(interpreter.runtime))?;
    match wanted.asleep {
        Some(_) => take_from(&Pages::new(process), process, interpreter, wanted),
        None => take_from(process, process, interpreter, wanted),
    }
}

fn take_from<M: UserMemory>(
    memory: &M,
    process: &RemoteProcess,
    interpreter: &Interpreter,
    wanted: &Wanted<'_>,
) -> Result<Snapshot, RemoteError> {
    let entry =
        ProcessEntry { runtime: interpreter.runtime, code_type: interpreter.code_type, ..ProcessEntry::default() };
    let target = Target { process, layout: interpreter.layout.complete(), entry };
    let deadline = Deadline(Instant::now() + wanted.limit);
    let tasks = process.tasks()?;
    let (mut states, problem) = threads::states(memory, &target, deadline);
    let tids_told = tell_tids(memory, &target, &mut states, &tasks);
    let mut snapshot = Snapshot::default();
    snapshot.problems.extend(problem.map(|problem| problem.to_string()));
    if !tids_told {
        snapshot.problems.push("which of its threads are Python's could not be told: some are listed twice".to_owned());
    }
    let maps = process.maps()?;
    owner::settle(memory, &target, &mut states, &tasks, &maps, deadline);
    let tids: HashMap<u32, u32> = tasks.iter().map(|task| (task.ns_tid, task.tid)).collect();
    let tasks = chosen(tasks, &mut states, wanted.asleep);
    let symbols = wanted.symbols.clone().unwrap_or_default();
    let mut mixer =
        wanted.native.map(|choice| NativeStacks::new(process, &maps, interpreter, &target.layout, choice, symbols));
    let mut stacks = read_stacks(memory, &target, &states, &tasks, mixer.as_mut(), deadline);
    let unread = states.len() - stacks.len();
    if unread > 0 {
        let limit = wanted.limit;
        snapshot.problems.push(format!("{unread} thread states were not read: the time was up after {limit:?}"));
    }
    // It is not known what they run: they are not threads that never entered Python.
    let unread: HashSet<u32> = states[stacks.len()..].iter().filter_map(|state| state.ns_tid).collect();
    let tasks: Vec<Task> = tasks.into_iter().filter(|task| !unread.contains(&task.ns_tid)).collect();
    one_gil_one_holder(&mut stacks);
    only_those_with_frames(&mut stacks);
    let mut namer = Namer::new((memory, &target), Symbolizer::new(), &mut snapshot.profile, deadline);
    if tids_told {
        // With or without frames: a state without a thread is that of a thread that has just ended or not begun.
        stacks.retain(|read| read.state.ns_tid.is_some());
    }
    let names = names_by_interpreter(memory, &target, &stacks, deadline);
    snapshot.threads = arrange(process, &tasks, &stacks, &names, |read| {
        let (python, named) = namer.name(read);
        let mix = |mixer: &mut NativeStacks<'_>| match &read.native {
            Ok(native) => mixer.mix(native, Some(&read.stack), &named),
            Err(reason) => Err(*reason),
        };
        let mixed = mixer.as_mut().map(mix);
        (python, mixed)
    });
    let tasks_of = |layout| TasksOf { memory, target: &target, layout, states: &states, tids: &tids, deadline };
    if let Some(layout) = &wanted.running_tasks {
        snapshot.running_tasks = tasks_of(layout).running();
    }
    if let Some(layout) = &wanted.tasks {
        let of = tasks_of(layout);
        let (found, problems) = of.read(&mut namer);
        snapshot.tasks = Some(found);
        snapshot.problems.extend(problems.iter().map(ToString::to_string));
    }
    if let Some(layout) = &wanted.greenlets {
        let stacks = &CStacks::of(&states, &tids, process.pid(), &maps);
        let of = GreenletsOf { memory, target: &target, layout, states: &states, tids: &tids, stacks, deadline };
        let (found, problems) = of.read(&mut namer);
        snapshot.greenlets = Some(found);
        snapshot.problems.extend(problems.iter().map(ToString::to_string));
    }
    if namer.late {
        let limit = wanted.limit;
        snapshot.problems.push(format!("names of functions are missing: the time was up after {limit:?}"));
    }
    if let Some(mixer) = &mut mixer {
        for thread in snapshot.threads.iter_mut().filter(|thread| thread.mixed.is_none() && !deadline.passed()) {
            let native = mixer.read(thread.tid, || ()).1;
            thread.mixed = Some(native.and_then(|native| mixer.mix(&native, None, &[])));
        }
    }
    Ok(snapshot)
}

/// Keeps the threads and thread states that are wanted. A state whose thread is not known may be any thread's.
fn chosen(tasks: Vec<Task>, states: &mut Vec<ThreadState>, wanted: Option<&HashSet<u32>>) -> Vec<Task> {
    let Some(wanted) = wanted else { return tasks };
    let tasks: Vec<Task> = tasks.into_iter().filter(|task| wanted.contains(&task.tid)).collect();
    let ns_tids: HashSet<u32> = tasks.iter().map(|task| task.ns_tid).collect();
    states.retain(|state| state.ns_tid.is_none_or(|tid| ns_tids.contains(&tid)));
    tasks
}

/// Keeps only the tids of live threads in thread states. Returns whether states without a tid have no thread.
fn tell_tids<M: UserMemory>(memory: &M, target: &Target<'_>, states: &mut [ThreadState], tasks: &[Task]) -> bool {
    let live: HashSet<u32> = tasks.iter().map(|task| task.ns_tid).collect();
    for state in states.iter_mut() {
        state.ns_tid = state.ns_tid.filter(|tid| live.contains(tid));
    }
    // Up to 3.10 no state has a tid; later ones have the parent's in a child that C code forked.
    let found = threads::find_tids(memory, states, tasks);
    found || Layout::present(target.layout.tstate_native_thread_id)
}

/// A thread state's stack as it was read.
struct ReadStack {
    state: ThreadState,
    gil: Option<u64>,
    stack: stack::Stack,
    native: Result<NativeStack, NoNative>,
}

fn read_stacks<M: UserMemory>(
    memory: &M,
    target: &Target<'_>,
    states: &[ThreadState],
    tasks: &[Task],
    mut mixer: Option<&mut NativeStacks<'_>>,
    deadline: Deadline,
) -> Vec<ReadStack> {
    let by_ns_tid: HashMap<u32, u32> = tasks.iter().map(|task| (task.ns_tid, task.tid)).collect();
    let read = |state: &ThreadState| {
        if deadline.passed() {
            return None;
        }
        let gil = threads::gil_of(memory, target, state.interp);
        let python = || stack::read(memory, target, state.tstate, deadline);
        let tid = state.ns_tid.and_then(|tid| by_ns_tid.get(&tid).copied());
        let (stack, native) = match &mut mixer {
            Some(mixer) => mixer.read(tid, python),
            None => (python(), Err(NoNative::Unknown)),
        };
        Some(ReadStack { state: *state, gil, stack, native })
    };
    states.iter().map_while(read).collect()
}

/// The GIL changed hands while the threads were read one after the other: of several that held it, the last one read holds it.
fn one_gil_one_holder(stacks: &mut [ReadStack]) {
    let mut held = HashSet::new();
    for read in stacks.iter_mut().rev() {
        let facts = &mut read.stack.facts;
        if facts.status & status::HAS_GIL != 0 && !held.insert(read.gil) {
            facts.status &= !status::HAS_GIL;
        }
    }
}

/// A thread that has been in several interpreters has a state in each, and up to 3.11 the state of a thread that is
/// just being started carries its creator's id: of the states of one thread ([`owner`]), those that run something count. In
/// one interpreter the newest does: a child that C code forked keeps the states of its parent's threads, whose ids are
/// given to its own.
fn only_those_with_frames(stacks: &mut Vec<ReadStack>) {
    let framed = |read: &ReadStack| !read.stack.frames.is_empty() || read.stack.stop != StopReason::NoFrame;
    let whose = |read: &ReadStack| read.state.ns_tid.ok_or(read.state.thread_id);
    let busy: HashSet<_> = stacks.iter().filter(|read| framed(read)).map(whose).collect();
    let mut met = HashSet::new();
    stacks.retain(|read| !framed(read) || met.insert((whose(read), read.state.interp)));
    let mut idle = HashSet::new();
    // From the oldest interpreter and thread on: that is where an idle thread came from.
    stacks.reverse();
    stacks.retain(|read| framed(read) || (!busy.contains(&whose(read)) && idle.insert(whose(read))));
}

/// Python's own names of threads, by interpreter and ident.
fn names_by_interpreter<M: UserMemory>(
    memory: &M,
    target: &Target<'_>,
    stacks: &[ReadStack],
    deadline: Deadline,
) -> HashMap<u64, HashMap<u64, String>> {
    let interpreters: HashSet<u64> = stacks.iter().map(|read| read.state.interp).collect();
    let names = |interp| Some((interp, thread_names(memory, &target.layout, interp, deadline.rest()?)?));
    interpreters.into_iter().filter_map(names).collect()
}

/// Assigns stacks to threads.
fn arrange(
    process: &RemoteProcess,
    tasks: &[Task],
    stacks: &[ReadStack],
    names: &HashMap<u64, HashMap<u64, String>>,
    mut stacks_of: impl FnMut(&ReadStack) -> (PythonStack, Option<Result<MixedStack, NoNative>>),
) -> Vec<ThreadStack> {
    let by_ns_tid: HashMap<u32, &Task> = tasks.iter().map(|task| (task.ns_tid, task)).collect();
    let pid = process.pid().0;
    let thread = |task: &Task| ThreadStack {
        tid: Some(task.tid),
        ns_tid: Some(task.ns_tid),
        name: task.comm.clone(),
        comm: task.comm.clone(),
        state: Some(task.state),
        main: task.tid == pid,
        ..ThreadStack::default()
    };
    let mut entered = HashSet::new();
    let mut threads = Vec::new();
    for read in stacks {
        let task = read.state.ns_tid.and_then(|tid| by_ns_tid.get(&tid).copied());
        let known = task.map_or_else(ThreadStack::default, thread);
        entered.extend(known.tid);
        // A sub-interpreter may not have imported `threading`, but the interpreter that the thread came from has.
        let ident = &read.state.thread_id;
        let own = names.get(&read.state.interp).and_then(|names| names.get(ident));
        let name = own.or_else(|| names.values().find_map(|names| names.get(ident)));
        let name = name.cloned().unwrap_or_else(|| known.name.clone());
        let (python, mixed) = stacks_of(read);
        let thread_id = read.state.thread_id;
        threads.push(ThreadStack { thread_id, name, python: Some(python), mixed, ..known });
    }
    threads.extend(tasks.iter().filter(|task| !entered.contains(&task.tid)).map(thread));
    threads.sort_by_key(|thread| (!thread.main, thread.tid.is_none(), thread.tid, thread.thread_id));
    threads
}

#[cfg(test)]
mod tests {
    use super::*;
    use tachyon_common::event::RawFrame;
    use tachyon_common::walk::ThreadFacts;

    fn read(thread_id: u64, gil: u64, holds: bool, frames: usize) -> ReadStack {
        let stop = if frames == 0 { StopReason::NoFrame } else { StopReason::Complete };
        let facts = ThreadFacts { status: u32::from(holds) * status::HAS_GIL, ..ThreadFacts::default() };
        let stack =
            stack::Stack { frames: vec![RawFrame::default(); frames], stop, root_shims: 0, facts, steady: true };
        let state = ThreadState { tstate: thread_id, interp: gil, thread_id, ns_tid: None };
        ReadStack { state, gil: Some(gil), stack, native: Err(NoNative::Unknown) }
    }

    #[test]
    fn each_gil_has_one_holder_at_most() {
        let mut stacks = vec![read(1, 10, true, 1), read(2, 10, true, 1), read(3, 20, true, 1), read(4, 10, false, 1)];
        one_gil_one_holder(&mut stacks);
        let holders: Vec<u64> = stacks
            .iter()
            .filter(|read| read.stack.facts.status & status::HAS_GIL != 0)
            .map(|read| read.state.thread_id)
            .collect();
        assert_eq!(holders, [2, 3]);
    }

    #[test]
    fn of_a_threads_states_those_that_run_something_are_shown() {
        // Newest first: thread 1 in two interpreters, thread 2 idle in two, thread 3 busy in two, and once before.
        let mut stacks = vec![
            read(1, 20, false, 0),
            read(2, 20, false, 0),
            read(3, 20, false, 2),
            read(1, 10, false, 3),
            read(2, 10, false, 0),
            read(3, 10, false, 1),
            read(3, 10, false, 4),
        ];
        only_those_with_frames(&mut stacks);
        let left: Vec<_> = stacks.iter().map(|read| (read.state.thread_id, read.state.interp)).collect();
        assert_eq!(left, [(3, 10), (2, 10), (1, 10), (3, 20)]);
        assert_eq!(stacks[0].stack.frames.len(), 1);
    }
}
