//! Tasks of 3.14 and newer: in the lists of the thread that made them, and of the interpreter once that thread has ended.
//!
//! A list is a circle of `struct llist_node`s with a head that belongs to no task (`pycore_llist.h`).

use super::super::memory::Pages;
use super::super::threads::ThreadState;
use super::object::awaited_by;
use super::{MAX_READINGS, MAX_TASKS, Place, RawTask, Reader, Reading, RunningTask, TaskProblem};
use crate::inspect::AsyncioOffsets;
use std::collections::HashSet;
use tachyon_common::walk::{UserMemory, read_u64};

impl<M: UserMemory + ?Sized> Reader<'_, M> {
    pub(super) fn read_published(&self, offsets: &AsyncioOffsets, reading: &mut Reading) {
        for state in self.states {
            let place = Place { interp: state.interp, tstate: state.tstate };
            let running = self.pointer(state.tstate, offsets.thread_running_task);
            if let Some(event_loop) = self.pointer(state.tstate, offsets.thread_running_loop) {
                reading.running.push((place, event_loop, self.kind_of(event_loop)));
            }
            let head = state.tstate.wrapping_add(offsets.thread_tasks_head);
            let mut listed = self.list(offsets, head, &mut reading.problems);
            // A task that is being started eagerly is not in any list yet.
            listed.extend(running.filter(|running| !listed.contains(running)));
            self.add_all(offsets, reading, place, listed, running);
        }
        for interp in self.interpreters() {
            let head = interp.wrapping_add(offsets.interp_tasks_head);
            let listed = self.list(offsets, head, &mut reading.problems);
            self.add_all(offsets, reading, Place { interp, tstate: 0 }, listed, None);
        }
        // Tasks that await others and are in no list: they have ended, or are about to.
        let mut at = 0;
        while let Some(task) = reading.order.get(at).and_then(|address| reading.tasks.get(address)) {
            at += 1;
            let unknown = |awaiter: &u64| !reading.known.contains(awaiter);
            let (place, unknown) = (task.place, task.awaited_by.iter().copied().filter(unknown).collect());
            self.add_all(offsets, reading, place, unknown, None);
        }
    }

    pub(super) fn running_published(&self, offsets: &AsyncioOffsets) -> Vec<(u64, RunningTask)> {
        let running = |state: &ThreadState| {
            let address = self.pointer(state.tstate, offsets.thread_running_task)?;
            let is_task = self.is_task(offsets, address)?;
            is_task.then(|| (state.tstate, RunningTask { address, name: self.name(address, offsets.task_name) }))
        };
        self.states.iter().filter_map(running).collect()
    }

    fn add_all(
        &self,
        offsets: &AsyncioOffsets,
        reading: &mut Reading,
        place: Place,
        listed: Vec<u64>,
        running: Option<u64>,
    ) {
        for address in listed {
            let running = running == Some(address);
            let get = |frames_left| self.published_task(offsets, place, address, running, frames_left);
            if !self.add(reading, address, get) {
                return;
            }
        }
    }

    /// The task at an address; `None` if there is none.
    fn published_task(
        &self,
        offsets: &AsyncioOffsets,
        place: Place,
        address: u64,
        running: bool,
        frames_left: usize,
    ) -> Option<RawTask> {
        if !self.is_task(offsets, address)? {
            return None;
        }
        let coroutine = self.word(address, offsets.task_coro)?;
        // A task without a loop is just being made or freed.
        let event_loop = self.pointer(address, self.header())?;
        Some(RawTask {
            place,
            name: self.name(address, offsets.task_name),
            event_loop,
            loop_kind: self.kind_of(event_loop),
            running,
            chain: self.chain(coroutine, place.tstate, frames_left),
            awaited_by: awaited_by(
                address,
                |future| self.awaiters(offsets, future).unwrap_or_default(),
                |future| self.is_task(offsets, future),
            ),
        })
    }

    /// Whether the future at an address is a task; `None` if unreadable or neither.
    fn is_task(&self, offsets: &AsyncioOffsets, future: u64) -> Option<bool> {
        match self.byte(future, offsets.task_is_task)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    /// The contents of a future's `awaited_by`.
    fn awaiters(&self, offsets: &AsyncioOffsets, future: u64) -> Option<Vec<u64>> {
        let Some(awaited_by) = self.pointer(future, offsets.task_awaited_by) else { return Some(Vec::new()) };
        match self.byte(future, offsets.task_awaited_by_is_set)? {
            0 => Some(vec![awaited_by]),
            _ => self.set(awaited_by),
        }
    }

    /// Addresses of a list's tasks, oldest first, as far as they could be read.
    fn list(&self, offsets: &AsyncioOffsets, head: u64, problems: &mut HashSet<TaskProblem>) -> Vec<u64> {
        let mut longest = Vec::new();
        for _ in 0..MAX_READINGS {
            let (tasks, problem) = self.list_once(offsets, head);
            if problem != Some(TaskProblem::Torn) {
                problems.extend(problem);
                return tasks;
            }
            if tasks.len() > longest.len() {
                longest = tasks;
            }
            if self.deadline.passed() {
                break;
            }
        }
        problems.insert(TaskProblem::Torn);
        longest
    }

    fn list_once(&self, offsets: &AsyncioOffsets, head: u64) -> (Vec<u64>, Option<TaskProblem>) {
        // The list as it was a moment ago would be torn again the next time.
        let memory = Pages::new(self.now);
        let word = |node: u64, offset: u64| read_u64(&memory, node.checked_add(offset)?, 0).ok();
        let (next, prev) = (self.layout.awaits.node_next, self.layout.awaits.node_prev);
        let mut tasks = Vec::new();
        // A circle that does not lead back to the head would be followed for ever.
        let mut seen = HashSet::from([head]);
        let mut node = head;
        loop {
            let following = word(node, next).filter(|&following| following != 0);
            let Some(following) = following else { return (tasks, Some(TaskProblem::Torn)) };
            // If a node was taken out, or is being put in, its neighbour does not link back to it.
            if word(following, prev) != Some(node) {
                return (tasks, Some(TaskProblem::Torn));
            }
            if following == head {
                return (tasks, None);
            }
            let task = following.checked_sub(offsets.task_node).filter(|_| seen.insert(following));
            let Some(task) = task else { return (tasks, Some(TaskProblem::Torn)) };
            if tasks.len() >= MAX_TASKS {
                return (tasks, Some(TaskProblem::TooMany));
            }
            tasks.push(task);
            node = following;
        }
    }
}
