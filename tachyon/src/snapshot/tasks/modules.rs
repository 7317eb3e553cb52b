//! Tasks of 3.8 to 3.13: in the sets of the module `asyncio.tasks`.
//!
//! The sets do not say who awaits whom. A task knows the future that it waits for; where that is not a task, a callback of the
//! awaited task leads to it, left there by asyncio's own functions: `gather`, `shield`, `wait`, `wait_for` and task groups.

use super::super::objects::Objects;
use super::super::threads::ThreadState;
use super::object::awaited_by;
use super::{Place, RawTask, Reader, Reading, RunningTask, TaskProblem};
use crate::inspect::ModuleTasks;
use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};
use tachyon_common::walk::{UserMemory, read_u32};

/// Sets of weak references to tasks: up to 3.11, and from 3.12 on.
const WEAK_SETS: [&str; 2] = ["_all_tasks", "_scheduled_tasks"];

/// Set of tasks that are being started eagerly (3.12, 3.13).
const EAGER: &str = "_eager_tasks";

/// Functions of `asyncio/tasks.py` whose closure holds the future that they complete.
const CLOSURES: [&str; 4] = [
    "gather.<locals>._done_callback",
    // 3.9.
    "_gather.<locals>._done_callback",
    "shield.<locals>._inner_done_callback",
    "_wait.<locals>._on_completion",
];

/// A function that is passed the future that it completes.
const RELEASES: &str = "_release_waiter";

/// Key under which a thread's dictionary has the loop that it runs (up to 3.12).
const RUNNING_LOOP: &str = "__asyncio_running_event_loop__";

/// What holds the loop there up to 3.11, with the process's pid, and where in it (`Modules/_asynciomodule.c`).
const LOOP_HOLDER: &str = "_RunningLoopHolder";
const HELD_LOOP: u64 = 16;

/// Most callbacks of a future, cells of a closure, or arguments looked at.
const MAX_ITEMS: u64 = 4096;

/// Most base classes between a type and asyncio's own.
const MAX_BASES: usize = 64;

/// The tasks of one interpreter, by their addresses.
struct Module {
    tasks: Vec<u64>,
    /// The task that runs in each loop.
    running: HashMap<u64, u64>,
    task_type: u64,
    future_type: u64,
}

impl<M: UserMemory + ?Sized> Reader<'_, M> {
    pub(super) fn read_modules(&self, rows: &ModuleTasks, reading: &mut Reading) {
        for interp in self.interpreters() {
            let module = match self.module(rows, interp) {
                Ok(Some(module)) => module,
                Ok(None) => continue,
                Err(problem) => {
                    reading.problems.insert(problem);
                    continue;
                }
            };
            let mut threads = HashMap::new();
            let mut loops = HashSet::new();
            let waiting = self.waiting(rows, &module.tasks);
            let runners = LazyCell::new(|| self.runners(rows, interp));
            for &address in &module.tasks {
                let Some(event_loop) = self.pointer(address, self.header()) else { continue };
                let thread =
                    threads.entry(event_loop).or_insert_with(|| self.thread_of(rows, interp, event_loop, &runners));
                let place = Place { interp, tstate: thread.flatten().unwrap_or(0) };
                if thread.is_none() {
                    reading.untold.insert(event_loop);
                } else if place.tstate != 0 && loops.insert(event_loop) {
                    reading.running.push((place, event_loop, self.kind_of(event_loop)));
                }
                let running = module.running.get(&event_loop) == Some(&address);
                let get = |frames_left| {
                    Some(RawTask {
                        place,
                        name: self.name(address, rows.name),
                        event_loop,
                        loop_kind: self.kind_of(event_loop),
                        running,
                        chain: self.chain(self.word(address, rows.coro)?, place.tstate, frames_left),
                        awaited_by: self.module_awaiters(rows, &module, &waiting, address),
                    })
                };
                if !self.add(reading, address, get) {
                    return;
                }
            }
        }
    }

    pub(super) fn running_in_modules(&self, rows: &ModuleTasks) -> Vec<(u64, RunningTask)> {
        let mut found = Vec::new();
        for interp in self.interpreters() {
            let Ok(Some((dict, task_type))) = self.tasks_module(rows, interp) else { continue };
            let runners = LazyCell::new(|| self.runners(rows, interp));
            for (event_loop, address) in self.current_tasks(rows, dict) {
                let thread = self.thread_of(rows, interp, event_loop, &runners).flatten();
                let thread = thread.filter(|_| self.derives(rows, address, task_type));
                found.extend(
                    thread.map(|thread| (thread, RunningTask { address, name: self.name(address, rows.name) })),
                );
            }
        }
        found
    }

    fn objects<'o>(&'o self, rows: &'o ModuleTasks) -> Objects<'o, M> {
        Objects { memory: self.memory, layout: &self.target.layout, objects: rows.objects }
    }

    /// The dictionary of an interpreter's module `asyncio.tasks`, and the type of tasks; `None` if it has not imported the module.
    fn tasks_module(&self, rows: &ModuleTasks, interp: u64) -> Result<Option<(u64, u64)>, TaskProblem> {
        let objects = self.objects(rows);
        let modules = objects.pointer(interp, rows.objects.interp_modules);
        let Some(module) = modules.and_then(|modules| objects.find(modules, "asyncio.tasks")) else {
            return Ok(None);
        };
        let dict = objects.pointer(module, rows.objects.module_dict).ok_or(TaskProblem::Torn)?;
        // Without its C module asyncio has no such name (or not yet).
        let Some(task_type) = objects.find(dict, "_CTask") else {
            return if objects.find(dict, "Task").is_some() { Err(TaskProblem::OtherTasks) } else { Ok(None) };
        };
        if self.word(task_type, rows.objects.type_basicsize) != Some(rows.task_size) {
            return Err(TaskProblem::OtherTasks);
        }
        Ok(Some((dict, task_type)))
    }

    /// The task that runs in each loop, as pairs of loop and task.
    fn current_tasks(&self, rows: &ModuleTasks, dict: u64) -> Vec<(u64, u64)> {
        let objects = self.objects(rows);
        let current = objects.find(dict, "_current_tasks");
        // A busy loop changes it with each step: then it is unknown which task runs.
        let mut entries = current.and_then(|current| objects.entries(current)).unwrap_or_default();
        entries.retain(|&(event_loop, task)| event_loop != 0 && task != 0);
        entries
    }

    /// The tasks of an interpreter; `None` if it has not imported asyncio.
    fn module(&self, rows: &ModuleTasks, interp: u64) -> Result<Option<Module>, TaskProblem> {
        let Some((dict, task_type)) = self.tasks_module(rows, interp)? else { return Ok(None) };
        let objects = self.objects(rows);
        let future_type = self.pointer(task_type, rows.type_base).ok_or(TaskProblem::Torn)?;
        let mut tasks = Vec::new();
        for name in WEAK_SETS {
            let Some(weak_set) = objects.find(dict, name) else { continue };
            let references = objects.attribute(weak_set, "data").and_then(|data| self.set(data));
            let references = references.ok_or(TaskProblem::Torn)?;
            tasks.extend(references.iter().filter_map(|&reference| self.pointer(reference, rows.weakref_object)));
        }
        if let Some(eager) = objects.find(dict, EAGER) {
            tasks.extend(self.set(eager).ok_or(TaskProblem::Torn)?);
        }
        let running = self.current_tasks(rows, dict).into_iter().collect();
        let pending = |task: u64| read_u32(self.memory, task.wrapping_add(rows.state), 0) == Ok(0);
        tasks.retain(|&task| self.derives(rows, task, task_type) && pending(task));
        // A set's order means nothing; addresses at least do not change.
        tasks.sort_unstable();
        tasks.dedup();
        Ok(Some(Module { tasks, running, task_type, future_type }))
    }

    /// The thread that runs a loop, if one does; `None` if unknown: for loops that are not asyncio's own, unless a thread says that it
    /// runs them.
    fn thread_of<F: FnOnce() -> HashMap<u64, u64>>(
        &self,
        rows: &ModuleTasks,
        interp: u64,
        event_loop: u64,
        runners: &LazyCell<HashMap<u64, u64>, F>,
    ) -> Option<Option<u64>> {
        let objects = self.objects(rows);
        let Some(ident) = objects.attribute(event_loop, "_thread_id") else {
            return runners.get(&event_loop).copied().map(Some);
        };
        // `None` is no integer: the loop does not run.
        let Some(ident) = objects.integer(ident) else { return Some(None) };
        let runs = |state: &&ThreadState| state.interp == interp && state.thread_id == ident;
        Some(self.states.iter().find(runs).map(|state| state.tstate))
    }

    /// The threads of an interpreter, by the loop that each says it runs.
    fn runners(&self, rows: &ModuleTasks, interp: u64) -> HashMap<u64, u64> {
        let states = self.states.iter().filter(|state| state.interp == interp);
        states.filter_map(|state| Some((self.running_loop(rows, state.tstate)?, state.tstate))).collect()
    }

    /// The loop that a thread says it runs (`asyncio._set_running_loop`).
    fn running_loop(&self, rows: &ModuleTasks, tstate: u64) -> Option<u64> {
        if let Some(offset) = rows.objects.tstate_running_loop {
            return self.pointer(tstate, offset);
        }
        let told = self.objects(rows).find(self.pointer(tstate, rows.objects.tstate_dict)?, RUNNING_LOOP)?;
        if self.kind_of(told)? == LOOP_HOLDER { self.pointer(told, HELD_LOOP) } else { Some(told) }
    }

    /// Tasks, by the future or task that each waits for.
    fn waiting(&self, rows: &ModuleTasks, tasks: &[u64]) -> HashMap<u64, Vec<u64>> {
        let mut waiting: HashMap<u64, Vec<u64>> = HashMap::new();
        for &task in tasks {
            if let Some(future) = self.pointer(task, rows.fut_waiter) {
                waiting.entry(future).or_default().push(task);
            }
        }
        waiting
    }

    /// Tasks that await the given one, through whatever leads to them.
    fn module_awaiters(
        &self,
        rows: &ModuleTasks,
        module: &Module,
        waiting: &HashMap<u64, Vec<u64>>,
        task: u64,
    ) -> Vec<u64> {
        let awaiters = |future: u64| {
            let mut awaiters = waiting.get(&future).cloned().unwrap_or_default();
            awaiters.extend(self.callbacks(rows, future).into_iter().flat_map(|call| self.completes(rows, call)));
            awaiters
        };
        awaited_by(task, awaiters, |future| {
            if self.derives(rows, future, module.task_type) {
                return Some(module.tasks.binary_search(&future).is_ok()).filter(|&is_task| is_task);
            }
            self.derives(rows, future, module.future_type).then_some(false)
        })
    }

    /// The functions called when a future is done.
    fn callbacks(&self, rows: &ModuleTasks, future: u64) -> Vec<u64> {
        let list = self.pointer(future, rows.callbacks).filter(|&list| self.kind_of(list).as_deref() == Some("list"));
        let pairs =
            list.and_then(|list| self.items(self.word(list, rows.var_size)?, self.pointer(list, rows.list_items)?));
        let calls = pairs.unwrap_or_default().into_iter().filter_map(|pair| self.pointer(pair, rows.tuple_items));
        self.pointer(future, rows.callback0).into_iter().chain(calls).collect()
    }

    /// Futures that a callback completes, or the task whose group it belongs to.
    fn completes(&self, rows: &ModuleTasks, callback: u64) -> Vec<u64> {
        let found = match self.kind_of(callback).as_deref() {
            Some("function") => self.held_by_closure(rows, callback),
            Some("partial") => self.given_to_partial(rows, callback),
            Some("method") => self.parent_of_group(rows, callback).map(|parent| vec![parent]),
            _ => None,
        };
        found.unwrap_or_default()
    }

    fn held_by_closure(&self, rows: &ModuleTasks, function: u64) -> Option<Vec<u64>> {
        let name = self.objects(rows).text(self.pointer(function, rows.function_qualname)?)?;
        if !CLOSURES.contains(&name.as_str()) {
            return None;
        }
        let cells = self.tuple(rows, self.pointer(function, rows.function_closure)?)?;
        Some(cells.into_iter().filter_map(|cell| self.pointer(cell, rows.cell_ref)).collect())
    }

    fn given_to_partial(&self, rows: &ModuleTasks, partial: u64) -> Option<Vec<u64>> {
        let function = self.pointer(partial, rows.partial_function)?;
        if self.kind_of(function)? != "function" {
            return None;
        }
        let name = self.objects(rows).text(self.pointer(function, rows.function_qualname)?)?;
        if name == RELEASES { self.tuple(rows, self.pointer(partial, rows.partial_args)?) } else { None }
    }

    /// `TaskGroup._parent_task`, from a method of the group (3.11+).
    fn parent_of_group(&self, rows: &ModuleTasks, method: u64) -> Option<u64> {
        let group = self.pointer(method, rows.method_self)?;
        if self.kind_of(group)? != "TaskGroup" {
            return None;
        }
        self.objects(rows).attribute(group, "_parent_task")
    }

    fn tuple(&self, rows: &ModuleTasks, tuple: u64) -> Option<Vec<u64>> {
        self.items(self.word(tuple, rows.var_size)?, tuple.checked_add(rows.tuple_items)?)
    }

    /// Consecutive pointers.
    fn items(&self, count: u64, start: u64) -> Option<Vec<u64>> {
        let mut bytes = vec![0; usize::try_from(count.min(MAX_ITEMS)).ok()? * 8];
        self.memory.read(start, &mut bytes).ok()?;
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
        Some(words.filter(|&word| word != 0).collect())
    }

    /// Whether an object's type is the given one, or derived from it.
    fn derives(&self, rows: &ModuleTasks, object: u64, from: u64) -> bool {
        let base = |&kind: &u64| self.pointer(kind, rows.type_base);
        std::iter::successors(self.type_of(object), base).take(MAX_BASES).any(|kind| kind == from)
    }
}
