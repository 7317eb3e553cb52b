//! The profile: samples as small handles into tables of frames, threads and processes.
//!
//! It is all that sinks read. Strings and frames are stored once, in order of first use; a handle is an index into its
//! table. A frame may be *pending*: it has its place in the table, but its names arrive later (see
//! [`Profile::resolve`]); at the end every frame has names, if only `<unreadable>`.

mod adopt;
mod chosen;
mod details;
mod frames;
mod library;
mod nameless;
mod native;
mod script;
mod strings;
mod task;
mod waiting;
mod work;

pub use adopt::{Adopted, Adopter};
pub use chosen::{TASK_WAIT, event_of_root, event_root};
pub use details::Details;
pub use frames::{Frame, FrameId, FrameTable};
pub use library::{Library, library, package, package_path};
pub use nameless::{address_of_name, name_of_address};
pub use native::{MappingId, NativeMapping, NativePlace, NativePlaces};
pub use script::{script, without_arguments};
pub use strings::{StrId, StringTable};
pub use task::{GREENLET_FILENAME, MAIN_GREENLET, TASK_FILENAME, WorkOf, awaited_by, task_name};
pub use waiting::{Holder, Wait, waited_for, waiting, waker_of, woken_by};
pub use work::{MOST_WORKS, Task, Work, WorkId, WorkTable};

use std::borrow::Cow;
use std::collections::BTreeMap;

/// File name of frames that are not Python source lines, as CPython 3.15's profiler writes it.
pub const SPECIAL_FILENAME: &str = "~";

/// Index of a process in [`Profile::processes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId(pub u32);

/// Index of a thread (more exactly a pair of thread and interpreter) in [`Profile::threads`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ThreadId(pub u32);

/// One process that was sampled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Process {
    /// Its pid in the profiler's own namespace.
    pub pid: u32,
    /// The kernel's short name of its main thread.
    pub comm: String,
    /// Its command line, when it could be read.
    pub cmdline: Vec<String>,
    /// CPython's version, e.g. `3.12.1`; empty when never learnt.
    pub python_version: String,
    /// Id of its container, from its control group; empty when it is in none that can be seen.
    pub container: String,
    /// Uid of its Kubernetes pod, likewise.
    pub pod: String,
    /// The service that it says it belongs to (OpenTelemetry's process context); empty if it does not say.
    pub service: String,
    /// Variables that it was started with, by name: those that the recording asked for as labels.
    pub environment: BTreeMap<String, String>,
    /// Distinguishes it from every other process of this boot of its host, including one with the same pid: hexadecimal
    /// digits. Empty if not known.
    pub instance: String,
    /// Its user and its environment, if the recording asked for them.
    pub details: Option<Box<Details>>,
}

impl Process {
    /// Labels that say what it is and where it runs, by name; empty ones are not listed.
    pub fn labels(&self) -> impl Iterator<Item = (Cow<'static, str>, String)> {
        let labels = [
            ("script", script(&self.cmdline)),
            ("container", self.container.clone()),
            ("pod", self.pod.clone()),
            ("service", self.service.clone()),
        ];
        let labels = labels.map(|(name, text)| (Cow::Borrowed(name), text));
        let variables = self.environment.iter().map(|(name, text)| (Cow::Owned(format!("env.{name}")), text.clone()));
        labels.into_iter().chain(variables).filter(|(_, text)| !text.is_empty())
    }

    /// What it runs, in a word: its script without directories, its module, or the kernel's short name.
    #[must_use]
    pub fn program(&self) -> String {
        let script = script(&self.cmdline);
        let program = script.strip_prefix("-m ").unwrap_or(&script);
        // For `python -c …` the kernel's name says more.
        if program.is_empty() || program.starts_with('-') {
            return self.comm.clone();
        }
        program.rsplit('/').next().unwrap_or(program).to_owned()
    }
}

/// One thread of one interpreter of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thread {
    /// Its process: index into [`Profile::processes`].
    pub process: u32,
    /// Thread id in the profiler's own namespace.
    pub tid: u32,
    /// Thread id as written to files: unique in the recording (a reused tid gets a generation in its upper half).
    pub unique_tid: u64,
    /// Thread id in the thread's own pid namespace.
    pub ns_tid: u32,
    /// `PyInterpreterState.id`; 0 when none was found.
    pub interpreter: u32,
    /// The thread's name, as far as known.
    pub name: String,
}

/// One thread-sample.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// The thread.
    pub thread: ThreadId,
    /// Microseconds on `CLOCK_MONOTONIC`.
    pub time_us: u64,
    /// TACH's status byte (bits of [`tachyon_common::event::status`], the first six).
    pub status: u8,
    /// Whole stack, leaf first.
    pub frames: &'a [FrameId],
    /// How its native and Python frames were put together.
    pub merge: Merge,
    /// Whose work it was, where that is known.
    pub work: Option<WorkId>,
}

/// How far the order of native and Python frames in a stack can be trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Merge {
    /// There was nothing to put together: native frames were not recorded, or not known.
    #[default]
    None,
    /// Both stacks were whole and matched.
    Exact,
    /// They differed for a known reason.
    Repaired,
    /// They contradicted each other: native frames between Python frames are left out.
    Failed,
}

impl Merge {
    /// Its number, below 4: it fits beside the six bits of a status byte and needs no byte of its own.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The one with this number; only the last two bits count.
    #[must_use]
    pub const fn from_number(number: u8) -> Self {
        match number & 3 {
            0 => Self::None,
            1 => Self::Exact,
            2 => Self::Repaired,
            _ => Self::Failed,
        }
    }

    /// Its name in files; `None` if there is nothing to say.
    #[must_use]
    pub const fn name(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Exact => Some("exact"),
            Self::Repaired => Some("repaired"),
            Self::Failed => Some("failed"),
        }
    }
}

/// Everything that samples refer to.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Interned strings.
    pub strings: StringTable,
    /// Interned frames.
    pub frames: FrameTable,
    /// Where native frames' code is.
    pub native: NativePlaces,
    /// Tasks and spans whose work samples were.
    pub works: WorkTable,
    /// Processes in order of first sample.
    pub processes: Vec<Process>,
    /// Threads in order of first sample.
    pub threads: Vec<Thread>,
    /// Facts that do not change while samples come in.
    pub meta: Meta,
}

/// How the recording was made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Meta {
    /// Start on `CLOCK_MONOTONIC`, microseconds.
    pub start_us: u64,
    /// Start as seconds since 1970, UTC.
    pub start_unix: f64,
    /// Microseconds between samples of a running thread.
    pub interval_us: u64,
    /// Several processes in one profile: sinks put `comm (pid)` at the root of every stack.
    pub many_processes: bool,
    /// Only samples that held the GIL.
    pub gil_only: bool,
    /// Waiting threads too.
    pub waits: bool,
    /// Opcodes were recorded.
    pub opcodes: bool,
    /// Native frames were recorded.
    pub native: bool,
    /// This machine's host name.
    pub hostname: String,
    /// Version of the (single or newest) interpreter: major, minor, micro.
    pub python_version: (u8, u8, u8),
}

impl Profile {
    /// The thread behind a handle.
    ///
    /// # Panics
    /// When the handle is of another profile.
    #[must_use]
    pub fn thread(&self, id: ThreadId) -> &Thread {
        &self.threads[id.0 as usize]
    }

    /// The process of a thread.
    ///
    /// # Panics
    /// When the handle is of another profile.
    #[must_use]
    pub fn process_of(&self, id: ThreadId) -> &Process {
        &self.processes[self.thread(id).process as usize]
    }

    /// The frames to count by if addresses do not matter ([`Profile::shown`]); `buffer` holds them if they differ.
    #[must_use]
    pub fn shown_stack<'a>(&self, frames: &'a [FrameId], buffer: &'a mut Vec<FrameId>) -> &'a [FrameId] {
        if self.native.is_empty() {
            return frames;
        }
        buffer.clear();
        buffer.extend(frames.iter().map(|&frame| self.shown(frame)));
        buffer
    }

    /// Interns a frame that is not a source line: `name` under the file name `~`, no location.
    pub fn special_frame(&mut self, name: &str) -> FrameId {
        let filename = self.strings.intern(SPECIAL_FILENAME);
        let function = self.strings.intern(name);
        self.frames.intern(Frame::without_location(filename, function))
    }

    /// The same frame as another profile's; it must not be a native one.
    pub fn adopt_frame(&mut self, from: &Self, frame: FrameId) -> FrameId {
        let frame = from.frames.get(frame);
        let [filename, function] =
            [frame.filename, frame.function].map(|text| self.strings.intern(from.strings.get(text)));
        self.frames.intern(Frame { filename, function, ..*frame })
    }

    /// Gives a pending frame its names.
    pub fn resolve(&mut self, id: FrameId, frame: Frame) {
        self.frames.replace(id, frame);
    }
}
