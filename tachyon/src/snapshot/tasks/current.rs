//! Where a process of 3.8 to 3.13 keeps the tasks that its event loops run: for the kernel side, which reads them with each sample.

use super::super::memory::Pages;
use super::super::objects::Objects;
use crate::inspect::{Interpreter, ModuleTasks};
use tachyon_common::walk::UserMemory;

/// Most interpreters that are passed on the way to the first one.
const MAX_INTERPRETERS: usize = 1024;

/// Address of the dictionary `asyncio.tasks._current_tasks` of a process's first interpreter: the running task of each loop.
/// `None`: it has not imported asyncio, or not one with the C module of its version.
pub fn current_tasks<M: UserMemory>(memory: &M, interpreter: &Interpreter, rows: &ModuleTasks) -> Option<u64> {
    let (layout, pages) = (&interpreter.layout, Pages::new(memory));
    let objects = Objects { memory: &pages, layout, objects: rows.objects };
    // The first one was put into the list first, so it is last.
    let next = |&interp: &u64| objects.pointer(interp, u64::from(layout.interp_next));
    let newest = objects.pointer(interpreter.runtime, u64::from(layout.runtime_interpreters_head));
    let interp = std::iter::successors(newest, next).take(MAX_INTERPRETERS).last()?;
    let modules = objects.pointer(interp, rows.objects.interp_modules)?;
    let module = objects.find(modules, "asyncio.tasks")?;
    let dict = objects.pointer(module, rows.objects.module_dict)?;
    let task_type = objects.find(dict, "_CTask")?;
    let current = objects.find(dict, "_current_tasks")?;
    (objects.word(task_type, rows.objects.type_basicsize)? == rows.task_size).then_some(current)
}
