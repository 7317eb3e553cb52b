//! The tasks of a process again and again, within a millisecond or so each time: of threads that sleep, and may go on at
//! any moment.
//!
//! What is read lies mostly where it lay the last time. So all pages that were needed then are read at once, and the tasks are told by
//! those: nearly all of it is of one moment. Names of code objects are kept.

use super::memory::Pages;
use super::tasks::{TaskLayout, TaskProblem, Tasks, TasksOf};
use super::threads::{self, ThreadState};
use super::{Deadline, Namer, Target};
use crate::inspect::Interpreter;
use crate::profile::Profile;
use crate::remote::{RemoteError, RemoteProcess};
use crate::symbolize::Symbolizer;
use crate::types::RemoteAddr;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tachyon_common::process::ProcessEntry;

/// Reads the tasks of one process.
pub struct TaskReader {
    process: RemoteProcess,
    interpreter: Interpreter,
    layout: TaskLayout,
    /// Pages that were needed the last time.
    pages: Vec<u64>,
    symbolizer: Symbolizer,
    /// The thread states of the last time, as they were read, and whose they are.
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
    /// Why they are not all.
    pub missing: Option<Missing>,
    /// What was told by `moment` when the last byte of it had been read.
    pub after: T,
}

/// Why tasks are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The time was up.
    Late,
    /// A list of tasks or threads could not be read to its end, or has too many.
    Unreadable,
}

impl TaskReader {
    /// Nothing is read yet.
    #[must_use]
    pub fn new(process: RemoteProcess, interpreter: Interpreter, layout: TaskLayout) -> Self {
        Self {
            process,
            interpreter,
            layout,
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

    /// Reads all tasks; their frames are put into a profile, the same one each time. `moment` is asked after a part has been read
    /// that may be all.
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
        let Self { process, interpreter, layout, pages: needed, symbolizer, .. } = self;
        let mut memory = Pages::new(&*process);
        memory.fill(needed.iter().copied().zip(process.read_pages(needed)));
        let (mut after, at_once) = (moment(), memory.len());
        let entry =
            ProcessEntry { runtime: interpreter.runtime, code_type: interpreter.code_type, ..ProcessEntry::default() };
        let target = Target { process, layout: interpreter.layout.complete(), entry };
        let (mut states, problem) = threads::states(&memory, &target, deadline);
        if problem.is_some() {
            // Where nothing at all can be read: why.
            process.read_u64(RemoteAddr(interpreter.runtime))?;
        }
        if states != self.states || self.tids.is_empty() {
            self.states.clone_from(&states);
            let tasks = process.tasks()?;
            self.tids = tasks.iter().map(|task| (task.ns_tid, task.tid)).collect();
            super::tell_tids(&memory, &target, &mut states, &tasks);
            self.owners = states.iter().map(|state| (state.tstate, state.ns_tid)).collect();
        }
        for state in &mut states {
            state.ns_tid = self.owners.get(&state.tstate).copied().flatten();
        }
        let mut namer =
            Namer { memory: &memory, target: &target, symbolizer: std::mem::take(symbolizer), profile, deadline };
        let of = TasksOf { memory: &memory, target: &target, layout, states: &states, tids: &self.tids, deadline };
        let (tasks, problems) = of.read_still(&mut namer);
        // Those of another asyncio are known to be left out.
        let missing = problems.into_iter().find(|problem| *problem != TaskProblem::OtherTasks);
        let missing =
            missing.map(|problem| if problem == TaskProblem::Late { Missing::Late } else { Missing::Unreadable });
        let missing = missing.or(problem.map(|_| Missing::Unreadable));
        *symbolizer = namer.symbolizer;
        if memory.len() > at_once {
            after = moment();
        }
        *needed = memory.numbers();
        needed.sort_unstable();
        Ok(TasksRead { tasks, missing, after })
    }
}
