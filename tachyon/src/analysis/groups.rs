//! The rows of a report that do not stand for code: processes, threads, asyncio tasks.

use super::aggregate::{Aggregate, Entry};
use super::rows::{By, Row, RowKind, RowName, Sum};
use std::collections::HashMap;

/// Samples that belong to no task.
pub(super) const NO_TASK: &str = "<no task>";

/// Rows of processes or threads: they have what ran in them.
pub(super) fn group_rows(aggregate: &Aggregate, by: By, by_thread: &[Sum]) -> Vec<Row> {
    let mut groups: HashMap<String, Sum> = HashMap::new();
    // With several processes, threads are named by both.
    let many = has_many_processes(aggregate);
    for (thread, &sum) in aggregate.threads().iter().zip(by_thread) {
        let name = match by {
            By::Thread if many => format!("{}, {}", thread.process, thread.thread),
            By::Thread => thread.thread.clone(),
            _ => thread.process.clone(),
        };
        *groups.entry(name).or_default() += sum;
    }
    groups.into_iter().map(|(name, sum)| group_row(name, RowKind::Group, sum, sum)).collect()
}

fn has_many_processes(aggregate: &Aggregate) -> bool {
    aggregate.threads().iter().any(|thread| thread.process != aggregate.threads()[0].process)
}

fn group_row(name: String, kind: RowKind, own: Sum, total: Sum) -> Row {
    let name = RowName { name, function: None, file: None, line: None, kind };
    Row { name, own, total, hottest_line: None, native: Vec::new() }
}

/// Rows of tasks: a sample belongs to the task that ran, and to the total of those that await it.
pub(super) fn task_rows<'a>(aggregate: &Aggregate, entries: impl Iterator<Item = (&'a Entry, Sum)>) -> Vec<Row> {
    let mut groups: HashMap<(Option<&str>, &str), (Sum, Sum)> = HashMap::new();
    let mut without = Sum::default();
    // With several processes, tasks are named by both.
    let many = has_many_processes(aggregate);
    for (entry, sum) in entries {
        let names = aggregate.tasks_of(&aggregate.stacks()[entry.stack as usize]);
        let process = many.then(|| &*aggregate.threads()[entry.thread as usize].process);
        for (number, name) in names.iter().enumerate() {
            let (own, total) = groups.entry((process, name)).or_default();
            *total += sum;
            if number == 0 {
                *own += sum;
            }
        }
        if names.is_empty() {
            without += sum;
        }
    }
    let row = |((process, name), (own, total)): ((Option<&str>, &str), _)| {
        let name = process.map_or_else(|| name.to_owned(), |process| format!("{process}, {name}"));
        group_row(name, RowKind::Group, own, total)
    };
    let without = group_row(NO_TASK.to_owned(), RowKind::Special, without, without);
    groups.into_iter().map(row).chain([without]).collect()
}
