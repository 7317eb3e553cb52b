//! The lists that tasks are in: circles of `struct llist_node`s, each with a head that is no task's (`pycore_llist.h`).

use super::{MAX_READINGS, MAX_TASKS, Reader, TaskProblem};
use std::collections::HashSet;
use tachyon_common::walk::UserMemory;

impl<M: UserMemory + ?Sized> Reader<'_, M> {
    /// Addresses of a list's tasks, the oldest first; as far as they could be read.
    pub(super) fn list(&self, head: u64, problems: &mut HashSet<TaskProblem>) -> Vec<u64> {
        let mut longest = Vec::new();
        for _ in 0..MAX_READINGS {
            let (tasks, problem) = self.list_once(head);
            let torn = problem == Some(TaskProblem::Torn);
            if tasks.len() >= longest.len() || !torn {
                longest = tasks;
            }
            if !torn || self.deadline.passed() {
                problems.extend(problem);
                return longest;
            }
        }
        problems.insert(TaskProblem::Torn);
        longest
    }

    fn list_once(&self, head: u64) -> (Vec<u64>, Option<TaskProblem>) {
        let (next, prev) = (self.layout.awaits.node_next, self.layout.awaits.node_prev);
        let mut tasks = Vec::new();
        // A circle that does not lead back to the head would be walked for ever.
        let mut seen = HashSet::from([head]);
        let mut node = head;
        loop {
            let Some(following) = self.pointer(node, next) else { return (tasks, Some(TaskProblem::Torn)) };
            // A node that was taken out, or is being put in, is not what its neighbour comes from.
            if self.word(following, prev) != Some(node) {
                return (tasks, Some(TaskProblem::Torn));
            }
            if following == head {
                return (tasks, None);
            }
            if !seen.insert(following) {
                return (tasks, Some(TaskProblem::Torn));
            }
            if tasks.len() >= MAX_TASKS {
                return (tasks, Some(TaskProblem::TooMany));
            }
            let Some(task) = following.checked_sub(self.layout.asyncio.task_node) else {
                return (tasks, Some(TaskProblem::Torn));
            };
            tasks.push(task);
            node = following;
        }
    }
}
