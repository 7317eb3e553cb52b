//! Whose work a sample was: its task and its span, as recorded in the profile.

use crate::events::Frames;
use crate::merge::{Other, WorkBelow};
use crate::profile::{
    Frame, FrameId, GREENLET_FILENAME, MAIN_GREENLET, ProcessId, Profile, StrId, TASK_FILENAME, Task, Work, WorkId,
    awaited_by,
};
use crate::snapshot::{AsyncTask, RunningTask};
use crate::symbolize::{CUT_MARK, decode_text};
use foldhash::fast::RandomState;
use std::borrow::Cow;
use std::collections::HashMap;
use tachyon_common::whose::{self, NAME_BYTES, Whose, flags};

/// Most tasks with automatic names (`Task-7`) that have frames of their own, per process: a server makes one for each request.
const MOST_NUMBERED: u32 = 1 << 14;
/// The frame of all others.
const OTHERS: &str = "Task-*";
/// The frame of a task whose name could not be read.
const UNREADABLE: &str = "<unreadable>";
/// Most names that are remembered; beyond that, they are made anew.
const MOST_NAMES: usize = 1 << 16;

/// Names of tasks, and frames that stand for them.
#[derive(Debug, Default)]
pub(in crate::recording) struct Tasks {
    names: HashMap<Name, StrId, RandomState>,
    /// Frames, where wanted, by the task's name and by how many await it.
    frames: HashMap<(ProcessId, Name, u16), FrameId, RandomState>,
    /// Whether tasks, and those that await the running one, have frames.
    pub chains: bool,
    /// How many tasks with automatic names have frames of their own, by process.
    numbered: HashMap<ProcessId, u32>,
}

/// A task's name as the kernel side has read it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Name {
    Number(u64),
    Text {
        kind: u8,
        bytes: u8,
        cut: bool,
        text: [u8; NAME_BYTES],
    },
    /// Of a greenlet's type.
    Type {
        cut: bool,
        text: [u8; NAME_BYTES],
    },
    /// That of a thread's main greenlet.
    Main,
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
        if task.flags & flags::MAIN != 0 {
            return Self::Main;
        }
        let mut text = task.name;
        if task.flags & flags::TYPE_NAME != 0 {
            let end = text.iter().position(|&byte| byte == 0).unwrap_or(NAME_BYTES);
            text[end..].fill(0);
            return Self::Type { cut: end == NAME_BYTES, text };
        }
        // Anything after it is left over from another name.
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
            // Without the modules that it is in.
            Self::Type { cut, text } => {
                let text = String::from_utf8_lossy(text);
                let own = text.trim_end_matches('\0').rsplit('.').next().unwrap_or_default();
                if *cut { format!("{own}{CUT_MARK}") } else { own.to_owned() }
            }
            Self::Main => MAIN_GREENLET.to_owned(),
            Self::Unreadable => UNREADABLE.to_owned(),
        }
    }
}

impl Tasks {
    /// A new profile begins, with no processes, strings or frames yet.
    pub(super) fn begin_profile(&mut self) {
        self.names.clear();
        self.frames.clear();
        self.numbered.clear();
    }

    /// A task or greenlet that was read from outside: its handle, and the frame that stands for it where several tasks await it.
    pub(super) fn of_outside(
        &mut self,
        profile: &mut Profile,
        process: ProcessId,
        task: &AsyncTask,
    ) -> (Option<WorkId>, FrameId) {
        let name = shown(task.name.as_deref());
        let several = u16::try_from(task.awaited_by.len()).unwrap_or(u16::MAX);
        let frame = match name.strip_prefix("Task-").and_then(|number| number.parse().ok()) {
            _ if task.greenlet => frame_of(profile, GREENLET_FILENAME, &name),
            // From CPython 3.14 on, the kernel side reports these only by number.
            Some(number) => self.named_frame(profile, process, Name::Number(number), several),
            None => task_frame(profile, &name, several),
        };
        (work_of(profile, &name, task.address), frame)
    }

    /// What the profile calls the work of a sample: that of its task, or else of the greenlet that it ran.
    pub(super) fn work(
        &mut self,
        profile: &mut Profile,
        whose: &Whose,
        greenlet: Option<whose::Task>,
    ) -> Option<WorkId> {
        let task = (whose.flags & flags::TASK != 0).then_some(whose.task).or(greenlet);
        let task = task.map(|task| Task { name: self.name(profile, Name::of(&task)), id: task.address });
        let span = (whose.flags & flags::SPAN != 0).then_some((whose.trace_id, whose.span_id));
        profile.works.intern(Work { task, span })
    }

    /// The greenlet and the task of a sample, and whatever leads on from them, where they are wanted in its stack.
    pub(super) fn below(&mut self, profile: &mut Profile, process: ProcessId, frames: Frames<'_>) -> Option<WorkBelow> {
        let whose = frames.whose().filter(|_| self.chains)?;
        let has = |flag| whose.flags & flag != 0;
        let mut other = |task: &whose::Task, frames| {
            let cut = (task.flags & flags::INNER_CUT != 0, task.flags & flags::OUTER_CUT != 0);
            Other { task: self.frame(profile, process, task), frames, cut }
        };
        let task = has(flags::TASK).then(|| other(&whose.task, Vec::new()).task);
        let awaiting = frames.awaiting().map(|(task, frames)| other(&task, frames.collect())).collect();
        let greenlets = frames.greenlets().map(|(greenlet, frames)| Other {
            task: self.greenlet_frame(profile, &greenlet),
            frames: frames.collect(),
            cut: (false, greenlet.flags & flags::OUTER_CUT != 0),
        });
        Some(WorkBelow {
            greenlets: greenlets.collect(),
            more_greenlets: has(flags::MORE_GREENLETS),
            task,
            above: usize::from(whose.task.frames),
            awaiting,
            more: has(flags::MORE_AWAITING),
        })
    }

    fn name(&mut self, profile: &mut Profile, name: Name) -> StrId {
        if self.names.len() >= MOST_NAMES {
            self.names.clear();
        }
        *self.names.entry(name).or_insert_with(|| profile.strings.intern(&name.text()))
    }

    /// The frame that stands for a greenlet.
    fn greenlet_frame(&mut self, profile: &mut Profile, greenlet: &whose::Task) -> FrameId {
        let (filename, name) = (profile.strings.intern(GREENLET_FILENAME), self.name(profile, Name::of(greenlet)));
        profile.frames.intern(Frame::without_location(filename, name))
    }

    /// The frame that stands for a task.
    fn frame(&mut self, profile: &mut Profile, process: ProcessId, task: &whose::Task) -> FrameId {
        self.named_frame(profile, process, Name::of(task), task.awaited_by)
    }

    fn named_frame(&mut self, profile: &mut Profile, process: ProcessId, name: Name, several: u16) -> FrameId {
        if let Some(&known) = self.frames.get(&(process, name, several)) {
            return known;
        }
        if self.frames.len() >= MOST_NAMES {
            self.frames.clear();
        }
        let shown = if self.has_own_frame(process, name) { name.text() } else { OTHERS.to_owned() };
        let frame = task_frame(profile, &shown, several);
        self.frames.insert((process, name, several), frame);
        frame
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

fn task_frame(profile: &mut Profile, name: &str, several: u16) -> FrameId {
    frame_of(profile, TASK_FILENAME, &awaited_by(name, several))
}

fn frame_of(profile: &mut Profile, filename: &str, function: &str) -> FrameId {
    let [filename, function] = [filename, function].map(|text| profile.strings.intern(text));
    profile.frames.intern(Frame::without_location(filename, function))
}

/// The work of a task that was read from outside.
pub(super) fn work_outside(profile: &mut Profile, task: &RunningTask) -> Option<WorkId> {
    work_of(profile, &shown(task.name.as_deref()), task.address)
}

fn work_of(profile: &mut Profile, name: &str, id: u64) -> Option<WorkId> {
    let task = Task { name: profile.strings.intern(name), id };
    profile.works.intern(Work { task: Some(task), span: None })
}

/// A name that was read from outside, as all formats have it.
fn shown(name: Option<&str>) -> Cow<'_, str> {
    name.map_or(Cow::Borrowed(UNREADABLE), shortened)
}

/// A name as the kernel side reports it: it reads only the first bytes, of a string with 1, 2 or 4 bytes per character.
fn shortened(name: &str) -> Cow<'_, str> {
    let width = match name.chars().max().map_or(0, u32::from) {
        0..=0xff => 1,
        0x100..=0xffff => 2,
        _ => 4,
    };
    match name.char_indices().nth(NAME_BYTES / width) {
        Some((end, _)) => Cow::Owned(format!("{}{CUT_MARK}", &name[..end])),
        None => Cow::Borrowed(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(profile: &Profile, frame: FrameId) -> &str {
        profile.strings.get(profile.frames.get(frame).function)
    }

    fn of(tasks: &mut Tasks, profile: &mut Profile, whose: Whose) -> (String, String) {
        let work = tasks.work(profile, &whose, None).expect("there is room");
        let (task, frame) = (profile.works.get(work).task, tasks.frame(profile, ProcessId(0), &whose.task));
        let name = profile.strings.get(task.expect("it has a task").name);
        (name.to_owned(), name_of(profile, frame).to_owned())
    }

    #[test]
    fn names_are_numbers_or_texts() {
        let (mut tasks, mut profile) = (Tasks::default(), Profile::default());
        let task = whose::Task { address: 8, name_bytes: 6, ..whose::Task::NONE };
        let mut whose = Whose { task, flags: flags::TASK, ..Whose::NOBODY };
        whose.task.name[..7].copy_from_slice(b"pay\xe9e!?");
        let both = |text: &str| (text.to_owned(), text.to_owned());
        assert_eq!(of(&mut tasks, &mut profile, whose), both("pay\u{e9}e!"));
        // Whatever lies behind the name has no meaning.
        whose.task.name[6] = 0;
        assert_eq!(of(&mut tasks, &mut profile, whose), both("pay\u{e9}e!"));
        assert_eq!(tasks.names.len(), 1);
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
    fn names_from_outside_are_those_of_the_kernel_side() {
        let (mut tasks, mut profile) = (Tasks::default(), Profile::default());
        for (kind, name) in [(1, "é".repeat(65)), (1, "n".repeat(64)), (2, "α".repeat(33)), (4, "😀".repeat(17))] {
            let bytes: Vec<u8> = match kind {
                1 => name.chars().map(|char| char as u8).collect(),
                2 => name.encode_utf16().flat_map(u16::to_ne_bytes).collect(),
                _ => name.chars().flat_map(|char| u32::from(char).to_ne_bytes()).collect(),
            };
            let (cut, len) = (bytes.len() > NAME_BYTES, bytes.len().min(NAME_BYTES));
            let flags = if cut { flags::NAME_CUT } else { 0 };
            let mut task = whose::Task { name_kind: kind, name_bytes: len as u8, flags, ..whose::Task::NONE };
            task.name[..len].copy_from_slice(&bytes[..len]);
            assert_eq!(shortened(&name), Name::of(&task).text());
            let outside = AsyncTask { name: Some(name), address: 8, ..AsyncTask::default() };
            let (work, frame) = tasks.of_outside(&mut profile, ProcessId(0), &outside);
            let whose = Whose { task: whose::Task { address: 8, ..task }, flags: flags::TASK, ..Whose::NOBODY };
            assert_eq!(work, tasks.work(&mut profile, &whose, None));
            assert_eq!(frame, tasks.frame(&mut profile, ProcessId(0), &whose.task));
        }
    }

    #[test]
    fn a_greenlet_has_a_name_of_its_own_or_that_of_its_type() {
        let of = |flags, text: &[u8]| {
            let mut task = whose::Task { flags, name_bytes: text.len() as u8, ..whose::Task::NONE };
            task.name[..text.len()].copy_from_slice(text);
            Name::of(&task).text()
        };
        assert_eq!(of(0, b"a.b"), "a.b");
        assert_eq!(of(flags::TYPE_NAME, b"gevent._gevent_cgreenlet.Greenlet\0left.over"), "Greenlet");
        assert_eq!(of(flags::TYPE_NAME, b"Worker\0"), "Worker");
        assert_eq!(of(flags::TYPE_NAME, &[b'n'; NAME_BYTES]), format!("{}\u{2026}", "n".repeat(NAME_BYTES)));
        assert_eq!(of(flags::MAIN, b""), MAIN_GREENLET);
        assert_eq!(of(flags::TYPE_NAME | flags::NAME_UNREADABLE, b""), UNREADABLE);
    }

    #[test]
    fn a_span_needs_no_task() {
        let (mut tasks, mut profile) = (Tasks::default(), Profile::default());
        let whose = Whose { trace_id: [7; 16], span_id: [9; 8], flags: flags::SPAN, ..Whose::NOBODY };
        let work = tasks.work(&mut profile, &whose, None).expect("there is room");
        let work = profile.works.get(work);
        assert_eq!((work.task, work.span), (None, Some(([7; 16], [9; 8]))));
    }
}
