//! Reads the tasks or greenlets of a process again and again, within a millisecond or so each time: those of threads that sleep and
//! may go on at any moment.
//!
//! What is read is mostly where it was the last time. So all pages that were needed then are read at once, and the tasks are taken
//! from those: nearly all of it is from one moment. Names of code objects are kept.

use super::greenlets::{CStacks, GreenletProblem, GreenletsOf, Heap};
use super::memory::Pages;
use super::tasks::{TaskLayout, TaskProblem, Tasks, TasksOf};
use super::threads::{self, ThreadState};
use super::{Deadline, Namer, Target};
use crate::inspect::{GreenletLayout, Interpreter};
use crate::profile::Profile;
use crate::remote::{RemoteError, RemoteProcess};
use crate::symbolize::Symbolizer;
use crate::types::RemoteAddr;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tachyon_common::process::ProcessEntry;

/// What waits in a process while the thread that would run it is idle.
#[derive(Clone, Copy, Debug)]
pub enum Waiters {
    /// asyncio's tasks.
    Tasks(TaskLayout),
    /// Greenlets.
    Greenlets(GreenletLayout),
}

/// Reads the tasks of one process, or its greenlets.
pub struct TaskReader {
    process: RemoteProcess,
    interpreter: Interpreter,
    waiters: Waiters,
    /// Greenlets found so far.
    heap: Heap,
    stacks: CStacks,
    /// Pages needed the last time.
    pages: Vec<u64>,
    symbolizer: Symbolizer,
    /// The thread states of the last time, as they were read, and the threads that they belong to.
    states: Vec<ThreadState>,
    owners: HashMap<u64, Option<u32>>,
    /// Threads by their tids in their own pid namespace.
    tids: HashMap<u32, u32>,
}

/// What was read.
#[derive(Debug)]
pub struct TasksRead<T> {
    /// The tasks.
    pub tasks: Tasks,
    /// Why some are missing.
    pub missing: Option<Missing>,
    /// What `moment` returned after the last byte had been read.
    pub after: T,
}

/// Why tasks are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Time was up.
    Late,
    /// A list of tasks or threads could not be read to its end, or has too many.
    Unreadable,
}

impl Missing {
    fn of_tasks(problem: TaskProblem) -> Option<Self> {
        match problem {
            TaskProblem::Late => Some(Self::Late),
            // Those of another asyncio are deliberately left out.
            TaskProblem::OtherTasks => None,
            _ => Some(Self::Unreadable),
        }
    }

    fn of_greenlets(problem: GreenletProblem) -> Self {
        match problem {
            GreenletProblem::Late => Self::Late,
            _ => Self::Unreadable,
        }
    }
}

impl TaskReader {
    /// A reader that has read nothing yet.
    #[must_use]
    pub fn new(process: RemoteProcess, interpreter: Interpreter, waiters: Waiters) -> Self {
        Self {
            process,
            interpreter,
            waiters,
            heap: Heap::default(),
            stacks: CStacks::default(),
            pages: Vec::new(),
            symbolizer: Symbolizer::new(),
            states: Vec::new(),
            owners: HashMap::new(),
            tids: HashMap::new(),
        }
    }

    /// The process.
    #[must_use]
    pub fn process(&self) -> &RemoteProcess {
        &self.process
    }

    /// Whether a greenlet was found at the last reading, if only a thread's main one, which is there once the thread has used greenlets.
    #[must_use]
    pub fn uses_greenlets(&self) -> bool {
        !self.heap.greenlets.is_empty()
    }

    /// Reads all of them; their frames are put into a profile, the same one each time. `moment` is called each time that a part has been
    /// read that may be the last.
    ///
    /// # Errors
    /// When the process is gone, or its memory cannot be read at all.
    pub fn read<T>(
        &mut self,
        profile: &mut Profile,
        limit: Duration,
        moment: impl Fn() -> T,
    ) -> Result<TasksRead<T>, RemoteError> {
        let deadline = Deadline(Instant::now() + limit);
        let Self { process, interpreter, waiters, heap, stacks, pages: needed, symbolizer, .. } = self;
        let mut memory = Pages::new(&*process);
        memory.fill(needed.iter().copied().zip(process.read_pages(needed)));
        let (mut after, at_once) = (moment(), memory.len());
        let entry =
            ProcessEntry { runtime: interpreter.runtime, code_type: interpreter.code_type, ..ProcessEntry::default() };
        let target = Target { process, layout: interpreter.layout.complete(), entry };
        let (mut states, problem) = threads::states(&memory, &target, deadline);
        if problem.is_some() {
            // If nothing at all can be read, this says why.
            process.read_u64(RemoteAddr(interpreter.runtime))?;
        }
        if states != self.states || self.tids.is_empty() {
            self.states.clone_from(&states);
            let tasks = process.tasks()?;
            self.tids = tasks.iter().map(|task| (task.ns_tid, task.tid)).collect();
            super::tell_tids(&memory, &target, &mut states, &tasks);
            self.owners = states.iter().map(|state| (state.tstate, state.ns_tid)).collect();
            if matches!(waiters, Waiters::Greenlets(_)) {
                *stacks = CStacks::of(&states, &self.tids, process.pid(), &process.maps()?);
            }
        }
        for state in &mut states {
            state.ns_tid = self.owners.get(&state.tstate).copied().flatten();
        }
        let mut namer = Namer::new((&memory, &target), std::mem::take(symbolizer), profile, deadline);
        let (memory, target, states, tids) = (&memory, &target, &states, &self.tids);
        let (tasks, missing) = match waiters {
            Waiters::Tasks(layout) => {
                let of = TasksOf { memory, target, layout, states, tids, deadline };
                let (tasks, problems) = of.read_still(&mut namer);
                (tasks, problems.into_iter().find_map(Missing::of_tasks))
            }
            Waiters::Greenlets(layout) => {
                let of = GreenletsOf { memory, target, layout, states, tids, stacks, deadline };
                let unfound = of.search(&*process, heap);
                let (mut tasks, problems) = of.read_still(heap, &mut namer);
                // Those that run are in their threads' own stacks, and each of the others waits by itself.
                tasks.tasks.retain(|greenlet| !greenlet.running);
                tasks.tasks.iter_mut().for_each(|greenlet| greenlet.awaited_by.clear());
                (tasks, unfound.into_iter().chain(problems).map(Missing::of_greenlets).next())
            }
        };
        let missing = missing.or(problem.map(|_| Missing::Unreadable)).or(namer.late.then_some(Missing::Late));
        *symbolizer = namer.symbolizer;
        if memory.len() > at_once {
            after = moment();
        }
        *needed = memory.numbers();
        needed.sort_unstable();
        Ok(TasksRead { tasks, missing, after })
    }
}
