//! What goes below a stack: the greenlet that it is of, and its parents; the task whose work it is, and those that await it.

use super::Merger;
use crate::profile::{FrameId, Profile};
use crate::symbolize::Symbolizer;
use tachyon_common::event::{RawFrame, SampleRecord};

/// Frames that stand for what is missing where a task's coroutines, or the tasks that await one, could not all be followed.
pub const COROUTINES_CUT: &str = "<stack cut: coroutines>";
pub const TASKS_CUT: &str = "<stack cut: tasks that await it>";
/// The same for a greenlet's outer frames.
pub const GREENLET_CUT: &str = "<stack cut: greenlet>";
/// Name of the frame in place of parents of the running greenlet, if there may be more.
pub const PARENTS_CUT: &str = "<stack cut: parents of the greenlet>";

/// Whose work frames are: what goes below them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkBelow {
    /// The greenlet that they are of, then its parent, and so on; empty: the thread's main one.
    pub greenlets: Vec<Other>,
    /// The last of those may have a parent that is not among them.
    pub more_greenlets: bool,
    /// The frame that stands for the task.
    pub task: Option<FrameId>,
    /// How many Python frames, leaf first, lie above that: the record's, then those of parents; 0: not known.
    pub above: usize,
    /// Who awaits it, and who awaits that: in place of the event loop, which called the task.
    pub awaiting: Vec<Other>,
    /// There may be more of them.
    pub more: bool,
}

/// A greenlet, or a task that awaits another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Other {
    /// The frame that stands for it.
    pub task: FrameId,
    /// The frames that it has left, or those of its coroutines, leaf first.
    pub frames: Vec<RawFrame>,
    /// Whether frames are missing further in, and further out.
    pub cut: (bool, bool),
}

impl Merger {
    /// The task lies below the outermost frame of its coroutine.
    pub(super) fn push_task(&mut self, index: usize) {
        let Some(task) = self.work.as_ref().filter(|work| work.above == index + 1).and_then(|work| work.task) else {
            return;
        };
        if self.task_at.is_none() {
            self.task_at = Some(self.stack.len());
            self.stack.push(task);
        }
    }

    /// Puts below the stack the greenlet that it is of, and its parents with their frames, as far as the task, if there is one; the task,
    /// if its coroutine's frame is not in the stack; and the tasks that await it, if wanted.
    pub(super) fn put_work_below(&mut self, profile: &mut Profile, symbolizer: &mut Symbolizer, record: &SampleRecord) {
        let Some(work) = self.work.take() else { return };
        match self.task_at {
            Some(at) => self.stack.truncate(at + 1),
            None => self.put_greenlets_below(profile, symbolizer, record, &work),
        }
        for Other { task, frames, cut: (inner, outer) } in &work.awaiting {
            self.mark(profile, *inner, COROUTINES_CUT);
            for raw in frames {
                self.push_python(profile, symbolizer, record, raw);
            }
            self.mark(profile, *outer, COROUTINES_CUT);
            self.stack.push(*task);
        }
        self.mark(profile, work.more, TASKS_CUT);
        self.work = Some(work);
    }

    fn put_greenlets_below(
        &mut self,
        profile: &mut Profile,
        symbolizer: &mut Symbolizer,
        record: &SampleRecord,
        work: &WorkBelow,
    ) {
        // Those that the record has, also if they are not in the stack.
        let mut above = usize::from(record.python_frames);
        for Other { task, frames, cut: (_, outer) } in &work.greenlets {
            for raw in frames {
                self.push_python(profile, symbolizer, record, raw);
                above += 1;
                if let Some(task) = work.task.filter(|_| above == work.above) {
                    self.stack.push(task);
                    return;
                }
            }
            self.mark(profile, *outer, GREENLET_CUT);
            self.stack.push(*task);
        }
        self.mark(profile, work.more_greenlets, PARENTS_CUT);
        self.stack.extend(work.task);
    }

    /// Says that frames are missing here, if any are.
    fn mark(&mut self, profile: &mut Profile, missing: bool, mark: &str) {
        self.stack.extend(missing.then(|| profile.special_frame(mark)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_of_those_that_await_is_told() {
        let (mut merger, mut profile) = (Merger::default(), Profile::default());
        let [task, inner, outer] = ["task", "inner", "outer"].map(|name| profile.special_frame(name));
        let waiter = |task, cut| Other { task, frames: Vec::new(), cut };
        merger.work = Some(WorkBelow {
            task: Some(task),
            awaiting: vec![waiter(inner, (true, false)), waiter(outer, (false, true))],
            more: true,
            ..WorkBelow::default()
        });
        merger.put_work_below(&mut profile, &mut Symbolizer::default(), &SampleRecord::default());
        let names: Vec<_> =
            merger.last().iter().map(|&frame| profile.strings.get(profile.frames.get(frame).function)).collect();
        let coroutines = "<stack cut: coroutines>";
        assert_eq!(names, ["task", coroutines, "inner", coroutines, "outer", "<stack cut: tasks that await it>"]);
    }

    #[test]
    fn parents_go_below_their_greenlet_as_far_as_the_task() {
        let code = |code| RawFrame { code, ..RawFrame::default() };
        let stack_of = |above, task: bool, more_greenlets| {
            let (mut merger, mut profile) = (Merger::default(), Profile::default());
            let [running, parent, main, task_frame] =
                ["running", "parent", "main", "task"].map(|name| profile.special_frame(name));
            let other = |task, frames, outer| Other { task, frames, cut: (false, outer) };
            merger.work = Some(WorkBelow {
                greenlets: vec![
                    other(running, Vec::new(), false),
                    other(parent, vec![code(8), code(9)], true),
                    other(main, vec![code(10), code(11)], false),
                ],
                more_greenlets,
                task: task.then_some(task_frame),
                above,
                ..WorkBelow::default()
            });
            let record = SampleRecord { python_frames: 3, ..SampleRecord::default() };
            merger.put_work_below(&mut profile, &mut Symbolizer::default(), &record);
            let special = |frame: &FrameId| {
                let name = profile.strings.get(profile.frames.get(*frame).function);
                if [running, parent, main, task_frame].contains(frame) || name.starts_with("<stack") {
                    name
                } else {
                    "python"
                }
            };
            merger.last().iter().map(special).map(str::to_owned).collect::<Vec<_>>()
        };
        let cut = "<stack cut: greenlet>";
        let all = ["running", "python", "python", cut, "parent", "python", "python", "main"];
        assert_eq!(stack_of(0, false, false), all);
        assert_eq!(stack_of(0, false, true), [&all[..], &["<stack cut: parents of the greenlet>"]].concat());
        // The third of the thread's own frames is not in the stack here; the sixth is the first of the main greenlet.
        assert_eq!(stack_of(6, true, false), [&all[..6], &["task"]].concat());
        assert_eq!(stack_of(0, true, false), [&all[..], &["task"]].concat(), "its coroutine's frame was not met");
    }
}
