//! One record -> one sample of the profile: whose it is, and its whole stack.
//!
//! A stack is its Python frames, with native ones between them where those were recorded; where the walk could not give all
//! Python frames, a marker frame says so in their place, so that no sample vanishes and no cut stack passes for a whole one. The
//! record's instance and image say which process it belongs to, never its pid alone: pids are reused.

mod mixed;
mod work;

pub use mixed::{Boundaries, Joined, Keep, Native, NativeKind, Python, PythonFrame, Quality, Repair, join};
pub use work::{COROUTINES_CUT, GREENLET_CUT, Other, PARENTS_CUT, TASKS_CUT, WorkBelow};

use crate::events::Frames;
use crate::profile::{FrameId, Process, ProcessId, Profile, Thread, ThreadId};
use crate::symbolize::{CodeKey, Symbolizer};
use foldhash::fast::RandomState;
use std::collections::HashMap;
use tachyon_common::event::{RawFrame, SampleRecord, frame, status};
use tachyon_common::stop::StopReason;

/// Name of the frame that stands for code outside Python, as CPython's own profiler writes it.
pub const NATIVE: &str = "<native>";
/// Name of the frame that stands for the garbage collector, as CPython's own profiler writes it.
pub const GC: &str = "<GC>";
/// Name of the frame of a thread that was just entering the evaluator ([`StopReason::EnteringEval`]).
pub const ENTERING: &str = "<entering evaluator>";

/// How the kernel side identifies a program in a process. After an `exec` it is another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ProgramKey {
    /// The process.
    pub instance: u64,
    /// Its program; forked children share it.
    pub image: u64,
}

impl ProgramKey {
    /// Whose a record is.
    #[must_use]
    pub const fn of(record: &SampleRecord) -> Self {
        Self { instance: record.instance, image: record.image }
    }
}

/// Turns records into samples.
#[derive(Debug, Default)]
pub struct Merger {
    processes: HashMap<ProgramKey, ProcessId, RandomState>,
    threads: HashMap<(ProgramKey, u32, i64), ThreadId, RandomState>,
    /// Names of threads in the previous profile.
    named: HashMap<(ProgramKey, u32, i64), String>,
    /// Which program has a tid, and how many times the tid has been given out.
    tids: HashMap<u32, (ProgramKey, u64), RandomState>,
    stack: Vec<FrameId>,
    python: Vec<PythonFrame>,
    raw: Vec<RawFrame>,
    joined: Vec<Joined>,
    markers: HashMap<StopReason, FrameId, RandomState>,
    gc: Option<FrameId>,
    /// Whose work the record is.
    pub work: Option<WorkBelow>,
    /// Where the task's frame is in the stack.
    task_at: Option<usize>,
}

/// Whose a sample is.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The process.
    pub process: ProcessId,
    /// The thread.
    pub thread: ThreadId,
    /// Whether this is the process's first sample.
    pub first: bool,
    /// Whether this is the first sample of a thread whose name is still to be read.
    pub nameless: bool,
}

impl Merger {
    /// Whose the record is. A process met for the first time is described by `describe`.
    pub fn owner(&mut self, profile: &mut Profile, record: &SampleRecord, describe: impl FnOnce() -> Process) -> Owner {
        let program = ProgramKey::of(record);
        let known = self.processes.get(&program).copied();
        let process = known.unwrap_or_else(|| {
            let id = ProcessId(u32::try_from(profile.processes.len()).unwrap_or(u32::MAX));
            profile.processes.push(describe());
            self.processes.insert(program, id);
            id
        });
        let key = (program, record.tid, record.interp_id.max(0));
        let (tids, named, mut nameless) = (&mut self.tids, &mut self.named, false);
        let thread = *self.threads.entry(key).or_insert_with(|| {
            let (holder, generation) = tids.entry(record.tid).or_insert((program, 0));
            if *holder != program {
                *holder = program;
                *generation += 1;
            }
            let id = ThreadId(u32::try_from(profile.threads.len()).unwrap_or(u32::MAX));
            profile.threads.push(Thread {
                process: process.0,
                tid: record.tid,
                unique_tid: u64::from(record.tid) | (*generation << 32),
                ns_tid: record.ns_tid,
                interpreter: u32::try_from(record.interp_id.max(0)).unwrap_or(u32::MAX),
                name: named.remove(&key).unwrap_or_else(|| {
                    nameless = true;
                    comm_text(&record.comm)
                }),
            });
            id
        });
        Owner { process, thread, first: known.is_none(), nameless }
    }

    /// A new profile begins, with no processes, threads or frames yet. Threads of processes that are `alive` keep their
    /// names from the profile that ends; nothing is kept about the others.
    pub fn begin_profile(&mut self, ended: &Profile, alive: impl Fn(ProgramKey) -> bool) {
        self.processes.clear();
        self.named = self
            .threads
            .drain()
            .filter(|((program, ..), _)| alive(*program))
            .map(|(key, thread)| (key, ended.thread(thread).name.clone()))
            .collect();
        self.markers.clear();
        self.gc = None;
        self.tids.retain(|_, (holder, _)| alive(*holder));
    }

    /// Makes the whole stack of a record: [`Merger::last`].
    pub fn stack(
        &mut self,
        profile: &mut Profile,
        symbolizer: &mut Symbolizer,
        record: &SampleRecord,
        frames: Frames<'_>,
    ) {
        self.begin_stack();
        for (index, raw) in frames.iter().enumerate() {
            self.push_python(profile, symbolizer, record, &raw);
            self.push_task(index);
        }
        if record.stop != StopReason::Complete as u8 {
            let marker = self.marker(profile, record);
            // If a thread was entering the evaluator, its callers' frames follow.
            let at = if record.stop == StopReason::EnteringEval as u8 { 0 } else { self.stack.len() };
            self.insert(at, marker);
        }
        self.put_work_below(profile, symbolizer, record);
    }

    /// The same with native frames in their places: `native` holds the record's, each with its kind; `names` names those that are
    /// shown. Without any this is [`Merger::stack`]. The stack is [`Merger::last`].
    pub fn mixed(
        &mut self,
        profile: &mut Profile,
        symbolizer: &mut Symbolizer,
        (record, frames): (&SampleRecord, Frames<'_>),
        native: &MixedWith<'_>,
        names: &mut dyn NativeFrames,
    ) -> Quality {
        let whole = record.native_stop == StopReason::Complete as u8;
        self.python.clear();
        let python = |raw: RawFrame| PythonFrame { entry: raw.flags & frame::ENTRY != 0, shims: raw.shims };
        self.python.extend(frames.iter().map(python));
        let stop = StopReason::from_number(record.stop).unwrap_or(StopReason::UnreadableFrame);
        let callers = stop == StopReason::EnteringEval && !frames.is_empty();
        // All are callers of the activation that is being entered.
        let stop = if callers { StopReason::Complete } else { stop };
        let (root_shims, boundaries) = (u16::from(record.root_shims), native.boundaries);
        let python = Python { frames: &self.python, root_shims, stop, boundaries };
        let mut joined = std::mem::take(&mut self.joined);
        let with = Native {
            frames: native.kinds,
            whole,
            foreign: native.foreign || record.interp_id > 0,
            switching: native.switching,
            // How far the last frame of a cut stack reaches is unknown.
            entered: (record.entered as usize)
                .checked_sub(1)
                .filter(|&at| at < native.kinds.len() && (whole || at + 1 < usize::from(record.native_frames))),
        };
        let mut quality = join(&with, &python, native.keep, &mut joined);
        if record.status & status::BY_FRAME_POINTER != 0 && quality == Quality::Exact {
            quality = Quality::Repaired(Repair::FramePointers);
        }
        if native.assembly && quality == Quality::Exact {
            quality = Quality::Repaired(Repair::Assembly);
        }
        // If the native stack shows the collector, it is already in its place.
        let flags = if joined.contains(&Joined::Collector) { !frame::GC } else { u8::MAX };
        let mut raw = std::mem::take(&mut self.raw);
        raw.clear();
        raw.extend(frames.iter().map(|raw| RawFrame { flags: raw.flags & flags, ..raw }));
        // If Python's part of the stack was cut, the mark goes below its outermost frame; without Python frames, where the
        // innermost evaluator runs something unknown.
        let cut = !matches!(
            stop,
            StopReason::Complete | StopReason::NoFrame | StopReason::NoThreadState | StopReason::RuntimeNotInitialized
        );
        let last = joined.iter().rposition(|frame| matches!(frame, Joined::Python(_)));
        let evaluator = |joined: &Joined| match joined {
            Joined::Native(index) => {
                matches!(native.kinds[*index], NativeKind::Evaluator { .. } | NativeKind::Handler)
            }
            Joined::Python(_) | Joined::Collector => false,
        };
        let unknown = || joined.iter().position(evaluator).unwrap_or(joined.len());
        let marked = cut.then(|| last.map_or_else(unknown, |last| last + 1));
        self.begin_stack();
        for (at, frame) in joined.iter().enumerate() {
            if marked == Some(at) {
                let marker = self.marker(profile, record);
                self.stack.push(marker);
            }
            match *frame {
                Joined::Python(index) => {
                    self.push_python(profile, symbolizer, record, &raw[index]);
                    self.push_task(index);
                }
                Joined::Native(index) => self.stack.extend_from_slice(names.frames(profile, index)),
                Joined::Collector => self.push_gc(profile),
            }
        }
        if marked == Some(joined.len()) || joined.is_empty() {
            let marker = self.marker(profile, record);
            self.stack.push(marker);
        }
        if callers {
            let marker = self.marker(profile, record);
            self.insert(0, marker);
        }
        (self.joined, self.raw) = (joined, raw);
        self.put_work_below(profile, symbolizer, record);
        quality
    }

    /// The stack that was made last, leaf first.
    #[must_use]
    pub fn last(&self) -> &[FrameId] {
        &self.stack
    }

    /// Puts frames above the stack that was made last.
    pub fn put_above(&mut self, frames: &[FrameId]) {
        self.stack.splice(..0, frames.iter().copied());
    }

    /// Puts a frame below the stack that was made last.
    pub fn put_below(&mut self, frame: FrameId) {
        self.stack.push(frame);
    }

    fn push_python(
        &mut self,
        profile: &mut Profile,
        symbolizer: &mut Symbolizer,
        record: &SampleRecord,
        raw: &RawFrame,
    ) {
        if raw.flags & frame::GC != 0 {
            self.push_gc(profile);
        }
        let key = CodeKey { image: record.image, code: raw.code, fingerprint: raw.fingerprint };
        if symbolizer.is_shim(key) {
            return;
        }
        self.stack.push(symbolizer.frame(profile, key, raw.lasti, raw.opcode));
    }

    fn insert(&mut self, at: usize, frame: FrameId) {
        self.stack.insert(at, frame);
        if let Some(task) = self.task_at.as_mut().filter(|task| **task >= at) {
            *task += 1;
        }
    }

    fn begin_stack(&mut self) {
        self.stack.clear();
        self.task_at = None;
    }

    fn push_gc(&mut self, profile: &mut Profile) {
        self.stack.push(*self.gc.get_or_insert_with(|| profile.special_frame(GC)));
    }

    fn marker(&mut self, profile: &mut Profile, record: &SampleRecord) -> FrameId {
        let reason = StopReason::from_number(record.stop).unwrap_or(StopReason::UnreadableFrame);
        *self.markers.entry(reason).or_insert_with(|| profile.special_frame(&marker(reason)))
    }
}

/// What a record's Python frames are joined with.
#[derive(Clone, Copy, Debug)]
pub struct MixedWith<'a> {
    /// What each native frame is, leaf first.
    pub kinds: &'a [NativeKind],
    /// Where activations begin in this interpreter's Python stacks.
    pub boundaries: Boundaries,
    /// Whether greenlets are among them, whose outer frames are not this thread state's.
    pub foreign: bool,
    /// Where the innermost ones are code that switches between greenlets: how many they are.
    pub switching: Option<usize>,
    /// Whether one of them is code in assembly language, whose unwind rules were derived from its instructions.
    pub assembly: bool,
    /// Which native frames are wanted even though they say nothing about the Python code.
    pub keep: Keep,
}

/// Names native frames if they are to be shown: most never are.
pub trait NativeFrames {
    /// Frames of the profile that the native frame of this index stands for, leaf first: more than one where functions were
    /// inlined.
    fn frames(&mut self, profile: &mut Profile, index: usize) -> &[FrameId];
}

/// The number of the reason why a record's Python stack ended, once its native frames are known: evaluators among them
/// distinguish a thread without Python from one whose state was not found.
#[must_use]
pub fn thread_told(record: &SampleRecord, kinds: &[NativeKind]) -> u8 {
    const NONE: u8 = StopReason::NoThreadState as u8;
    const UNKNOWN: u8 = StopReason::UnknownThread as u8;
    let evaluators = kinds.iter().any(|kind| matches!(kind, NativeKind::Evaluator { .. } | NativeKind::Handler));
    match record.stop {
        NONE if evaluators => UNKNOWN,
        UNKNOWN if !evaluators && record.native_stop == StopReason::Complete as u8 => NONE,
        stop => stop,
    }
}

/// The frame that stands where a stack ended early.
fn marker(reason: StopReason) -> String {
    match reason {
        StopReason::NoThreadState | StopReason::NoFrame | StopReason::RuntimeNotInitialized => NATIVE.to_owned(),
        StopReason::EnteringEval => ENTERING.to_owned(),
        cut => cut_mark(cut.name()),
    }
}

/// The name of a frame that stands for what is missing.
fn cut_mark(what: &str) -> String {
    format!("<stack cut: {what}>")
}

/// A NUL-padded `comm` as text.
#[must_use]
pub fn comm_text(comm: &[u8; 16]) -> String {
    let len = comm.iter().position(|byte| *byte == 0).unwrap_or(comm.len());
    String::from_utf8_lossy(&comm[..len]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner_of(merger: &mut Merger, profile: &mut Profile, instance: u64, tid: u32, interp_id: i64) -> Owner {
        let record = SampleRecord { instance, tid, interp_id, ..SampleRecord::default() };
        merger.owner(profile, &record, Process::default)
    }

    #[test]
    fn a_reused_tid_is_another_thread() {
        let (mut merger, mut profile) = (Merger::default(), Profile::default());
        let first = owner_of(&mut merger, &mut profile, 1, 100, 0);
        let same = owner_of(&mut merger, &mut profile, 1, 100, 0);
        let other = owner_of(&mut merger, &mut profile, 2, 100, 0);
        assert_eq!(first.thread, same.thread);
        assert!(first.first && !same.first && other.first);
        assert_ne!(first.process, other.process);
        assert_eq!(profile.thread(first.thread).unique_tid, 100);
        assert_eq!(profile.thread(other.thread).unique_tid, 100 | 1 << 32);
    }

    #[test]
    fn a_process_that_execs_is_another_one() {
        let (mut merger, mut profile) = (Merger::default(), Profile::default());
        let first = owner_of(&mut merger, &mut profile, 1, 100, 0);
        let record = SampleRecord { instance: 1, image: 5, tid: 100, ..SampleRecord::default() };
        let later = merger.owner(&mut profile, &record, Process::default);
        assert!(later.first && first.process != later.process);
        assert_eq!(profile.thread(later.thread).unique_tid, 100 | 1 << 32);
    }

    #[test]
    fn each_interpreter_of_a_thread_is_a_thread_of_the_profile() {
        let (mut merger, mut profile) = (Merger::default(), Profile::default());
        let main = owner_of(&mut merger, &mut profile, 1, 100, 0);
        let sub = owner_of(&mut merger, &mut profile, 1, 100, 3);
        assert_ne!(main.thread, sub.thread);
        assert_eq!(profile.thread(sub.thread).unique_tid, profile.thread(main.thread).unique_tid);
        assert_eq!(profile.thread(sub.thread).interpreter, 3);
    }
}
