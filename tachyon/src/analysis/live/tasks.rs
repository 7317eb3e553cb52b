//! The asyncio tasks of a recording that is being watched.

use super::{Key, Live, Scope, Span};
use crate::analysis::groups::NO_TASK;
use crate::analysis::rows::Sum;
use crate::profile::ThreadId;
use crate::sinks::process_title;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// A task.
#[derive(Clone, Debug)]
pub struct TaskRow {
    /// Its samples, and those of tasks that it awaits.
    pub scope: Scope,
    /// Its name.
    pub name: String,
    /// Its process, for people.
    pub process: String,
    /// While it ran, in the window.
    pub own: Sum,
    /// And while a task that it awaits ran.
    pub total: Sum,
    /// Likewise, since the start.
    pub own_whole: Sum,
    /// Likewise.
    pub total_whole: Sum,
}

/// The tasks that stacks name.
#[derive(Clone, Debug, Default)]
pub(super) struct Tasks {
    names: Vec<Arc<str>>,
    ids: HashMap<Arc<str>, u32, RandomState>,
    /// By stack of the aggregate: the task that ran, then those that await it.
    of_stack: Vec<Box<[u32]>>,
}

impl Tasks {
    /// Notes the tasks of the next stack.
    pub fn push(&mut self, names: &[&str]) {
        let mut id_of = |name: &&str| {
            self.ids.get(*name).copied().unwrap_or_else(|| {
                let (name, id) = (Arc::<str>::from(*name), u32::try_from(self.names.len()).expect("names fit memory"));
                self.names.push(Arc::clone(&name));
                self.ids.insert(name, id);
                id
            })
        };
        let ids = names.iter().map(&mut id_of).collect();
        self.of_stack.push(ids);
    }

    /// Those of a stack.
    pub fn of(&self, stack: u32) -> &[u32] {
        &self.of_stack[stack as usize]
    }

    /// A task's name.
    pub fn name(&self, task: u32) -> &str {
        &self.names[task as usize]
    }
}

impl Live {
    /// The tasks that have a sample, and a row for samples without a task, in no particular order. Tasks of one process
    /// with one name are one row.
    #[must_use]
    pub fn task_rows(&self, length: Duration) -> Vec<TaskRow> {
        let mut rows: HashMap<Scope, [Sum; 4]> = HashMap::new();
        let mut add = |span, at: usize| {
            self.counts(span, Scope::All, |key: Key, sum| {
                let process = self.profile().thread(ThreadId(key.thread)).process;
                let tasks = self.tasks.of(key.stack);
                for (number, &task) in tasks.iter().enumerate() {
                    let sums = rows.entry(Scope::Task { process, task }).or_default();
                    sums[at + 1] += sum;
                    if number == 0 {
                        sums[at] += sum;
                    }
                }
                if tasks.is_empty() {
                    let sums = rows.entry(Scope::NoTask).or_default();
                    sums[at] += sum;
                    sums[at + 1] += sum;
                }
            });
        };
        add(Span::Window(length), 0);
        add(Span::Whole, 2);
        let row = |(scope, sums): (Scope, [Sum; 4])| {
            let [own, total, own_whole, total_whole] = sums;
            let (name, process) = match scope {
                Scope::Task { process, task } => {
                    (self.tasks.name(task).to_owned(), process_title(&self.profile().processes[process as usize]))
                }
                _ => (NO_TASK.to_owned(), String::new()),
            };
            TaskRow { scope, name, process, own, total, own_whole, total_whole }
        };
        rows.into_iter().map(row).collect()
    }
}
