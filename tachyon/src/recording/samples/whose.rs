//! Whose work a sample was: its task and its span, as the profile has them.

use crate::profile::{Frame, FrameId, ProcessId, Profile, StrId, TASK_FILENAME, Task, Work, WorkId, awaited_by};
use crate::symbolize::decode_text;
use std::collections::HashMap;
use tachyon_common::whose;
use tachyon_common::whose::{NAME_BYTES, Whose, flags};

/// Most tasks without a name of their own (`Task-7`) of one process that have frames of their own: a server makes one for each
/// request.
const MOST_NUMBERED: u32 = 1 << 14;
/// The frame of the others.
const OTHERS: &str = "Task-*";
/// The frame of a task whose name could not be read.
const UNREADABLE: &str = "<unreadable>";
/// Most names that are remembered; then they are made anew.
const MOST_NAMES: usize = 1 << 16;

/// Names of tasks.
#[derive(Debug, Default)]
pub(in crate::recording) struct Tasks {
    names: HashMap<(ProcessId, Name, u16), (StrId, FrameId)>,
    /// Tasks have frames, and those that await the running one too.
    pub chains: bool,
    /// How many tasks of a process without a name of their own have frames of their own.
    numbered: HashMap<ProcessId, u32>,
}

/// A task's name as the kernel side has read it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Name {
    Number(u64),
    Text { kind: u8, bytes: u8, cut: bool, text: [u8; NAME_BYTES] },
    Unreadable,
}

impl Name {
    fn of(task: &whose::Task) -> Self {
        if task.flags & flags::NUMBERED != 0 {
            return Self::Number(task.number);
        }
        if task.flags & flags::NAME_UNREADABLE != 0 {
            return Self::Unreadable;
        }
        let mut text = task.name;
        // What lies behind it is left from another one.
        text[usize::from(task.name_bytes).min(NAME_BYTES)..].fill(0);
        let cut = task.flags & flags::NAME_CUT != 0;
        Self::Text { kind: task.name_kind, bytes: task.name_bytes, cut, text }
    }

    fn text(&self) -> String {
        match self {
            Self::Number(number) => format!("Task-{number}"),
            Self::Text { kind, bytes, cut, text } => {
                let bytes = &text[..usize::from(*bytes).min(NAME_BYTES)];
                decode_text(*kind, bytes, *cut).unwrap_or_else(|_| UNREADABLE.to_owned())
            }
            Self::Unreadable => UNREADABLE.to_owned(),
        }
    }
}

impl Tasks {
    /// A profile begins that has no processes, strings and frames yet.
    pub(super) fn begin_profile(&mut self) {
        self.names.clear();
        self.numbered.clear();
    }

    /// What the profile calls the work of a sample, and the frame that stands for its task where that is wanted.
    pub(super) fn of(
        &mut self,
        profile: &mut Profile,
        process: ProcessId,
        whose: &Whose,
    ) -> (Option<WorkId>, Option<FrameId>) {
        let named = (whose.flags & flags::TASK != 0).then(|| self.named(profile, process, &whose.task));
        let task = named.map(|(name, _)| Task { name, id: whose.task.address });
        let span = (whose.flags & flags::SPAN != 0).then_some((whose.trace_id, whose.span_id));
        (profile.works.intern(Work { task, span }), named.map(|(_, frame)| frame).filter(|_| self.chains))
    }

    /// A task's name, and the frame that stands for it.
    pub(super) fn named(&mut self, profile: &mut Profile, process: ProcessId, task: &whose::Task) -> (StrId, FrameId) {
        let (name, several) = (Name::of(task), task.awaited_by);
        if let Some(&known) = self.names.get(&(process, name, several)) {
            return known;
        }
        if self.names.len() >= MOST_NAMES {
            self.names.clear();
        }
        let text = name.text();
        let shown = if self.has_own_frame(process, name) { &*text } else { OTHERS };
        let filename = profile.strings.intern(TASK_FILENAME);
        let function = profile.strings.intern(&awaited_by(shown, several));
        let frame = profile.frames.intern(Frame::without_location(filename, function));
        let named = (profile.strings.intern(&text), frame);
        self.names.insert((process, name, several), named);
        named
    }

    fn has_own_frame(&mut self, process: ProcessId, name: Name) -> bool {
        if !matches!(name, Name::Number(_)) {
            return true;
        }
        let numbered = self.numbered.entry(process).or_default();
        *numbered += 1;
        *numbered <= MOST_NUMBERED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(profile: &Profile, frame: FrameId) -> &str {
        profile.strings.get(profile.frames.get(frame).function)
    }

    fn of(tasks: &mut Tasks, profile: &mut Profile, whose: Whose) -> (String, String) {
        let (work, frame) = tasks.of(profile, ProcessId(0), &whose);
        let task = profile.works.get(work.expect("there is room")).task.expect("it has a task");
        (profile.strings.get(task.name).to_owned(), name_of(profile, frame.expect("it has a frame")).to_owned())
    }

    #[test]
    fn names_are_numbers_or_texts() {
        let (mut tasks, mut profile) = (Tasks { chains: true, ..Tasks::default() }, Profile::default());
        let task = whose::Task { address: 8, name_bytes: 6, ..whose::Task::NONE };
        let mut whose = Whose { task, flags: flags::TASK, ..Whose::NOBODY };
        whose.task.name[..7].copy_from_slice(b"pay\xe9e!?");
        let both = |text: &str| (text.to_owned(), text.to_owned());
        assert_eq!(of(&mut tasks, &mut profile, whose), both("pay\u{e9}e!"));
        // What lies behind the name says nothing.
        whose.task.name[6] = 0;
        assert_eq!(of(&mut tasks, &mut profile, whose), both("pay\u{e9}e!"));
        assert_eq!(profile.works.len(), 1);
        let numbered = |number| Whose {
            task: whose::Task { address: 8, number, flags: flags::NUMBERED, ..whose::Task::NONE },
            flags: flags::TASK,
            ..Whose::NOBODY
        };
        let most = u64::from(MOST_NUMBERED);
        for number in 1..=most {
            assert_eq!(of(&mut tasks, &mut profile, numbered(number)), both(&format!("Task-{number}")));
        }
        let next = most + 1;
        assert_eq!(of(&mut tasks, &mut profile, numbered(next)), (format!("Task-{next}"), "Task-*".to_owned()));
        assert_eq!(of(&mut tasks, &mut profile, numbered(most)), both(&format!("Task-{most}")));
        let task = whose::Task { address: 8, flags: flags::NAME_UNREADABLE, ..whose::Task::NONE };
        let unreadable = Whose { task, flags: flags::TASK, ..Whose::NOBODY };
        assert_eq!(of(&mut tasks, &mut profile, unreadable), both("<unreadable>"));
    }

    #[test]
    fn a_span_needs_no_task() {
        let (mut tasks, mut profile) = (Tasks::default(), Profile::default());
        let whose = Whose { trace_id: [7; 16], span_id: [9; 8], flags: flags::SPAN, ..Whose::NOBODY };
        let (work, frame) = tasks.of(&mut profile, ProcessId(0), &whose);
        assert_eq!(frame, None);
        let work = profile.works.get(work.expect("there is room"));
        assert_eq!((work.task, work.span), (None, Some(([7; 16], [9; 8]))));
    }
}
