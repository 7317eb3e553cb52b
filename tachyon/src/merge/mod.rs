//! One record -> one sample of the profile: whose it is, and its whole stack.
//!
//! Today a stack is its Python frames; where the walk could not give the whole stack, a marker frame says so in its
//! place, so that no sample vanishes and no cut stack passes for a whole one. Which process a record belongs to is
//! told by the record's instance, never by its pid alone: pids are used again.

mod mixed;

pub use mixed::{Boundaries, Joined, Native, NativeKind, Python, PythonFrame, Quality, Repair, join};

use crate::events::Frames;
use crate::profile::{FrameId, Process, ProcessId, Profile, Thread, ThreadId};
use crate::symbolize::{CodeKey, Symbolizer};
use std::collections::HashMap;
use tachyon_common::event::{SampleRecord, frame};
use tachyon_common::stop::StopReason;

/// Name of the frame that stands for code outside Python, as CPython's own profiler writes it.
pub const NATIVE: &str = "<native>";
/// Name of the frame that stands for the garbage collector, as CPython's own profiler writes it.
pub const GC: &str = "<GC>";
/// Name of the frame of a thread that was just entering the evaluator ([`StopReason::EnteringEval`]).
pub const ENTERING: &str = "<entering evaluator>";

/// What the kernel side calls a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Instance(pub u64);

/// Turns records into samples.
#[derive(Debug, Default)]
pub struct Merger {
    processes: HashMap<Instance, ProcessId>,
    threads: HashMap<(Instance, u32, i64), ThreadId>,
    /// Who has a tid, and for the how-manieth time it was given out.
    tids: HashMap<u32, (Instance, u64)>,
    stack: Vec<FrameId>,
    markers: HashMap<StopReason, FrameId>,
    gc: Option<FrameId>,
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
}

impl Merger {
    /// Whose the record is. A process met for the first time is described by `describe`.
    pub fn owner(&mut self, profile: &mut Profile, record: &SampleRecord, describe: impl FnOnce() -> Process) -> Owner {
        let instance = Instance(record.instance);
        let known = self.processes.get(&instance).copied();
        let process = known.unwrap_or_else(|| {
            let id = ProcessId(u32::try_from(profile.processes.len()).unwrap_or(u32::MAX));
            profile.processes.push(describe());
            self.processes.insert(instance, id);
            id
        });
        let key = (instance, record.tid, record.interp_id.max(0));
        let tids = &mut self.tids;
        let thread = *self.threads.entry(key).or_insert_with(|| {
            let (holder, generation) = tids.entry(record.tid).or_insert((instance, 0));
            if *holder != instance {
                *holder = instance;
                *generation += 1;
            }
            let id = ThreadId(u32::try_from(profile.threads.len()).unwrap_or(u32::MAX));
            profile.threads.push(Thread {
                process: process.0,
                tid: record.tid,
                unique_tid: u64::from(record.tid) | (*generation << 32),
                ns_tid: record.ns_tid,
                interpreter: u32::try_from(record.interp_id.max(0)).unwrap_or(u32::MAX),
                name: comm_text(&record.comm),
            });
            id
        });
        Owner { process, thread, first: known.is_none() }
    }

    /// The whole stack of a record, leaf first. Valid until the next call.
    pub fn stack(
        &mut self,
        profile: &mut Profile,
        symbolizer: &mut Symbolizer,
        record: &SampleRecord,
        frames: Frames<'_>,
    ) -> &[FrameId] {
        self.stack.clear();
        for raw in frames.iter() {
            if raw.flags & frame::GC != 0 {
                self.stack.push(*self.gc.get_or_insert_with(|| profile.special_frame(GC)));
            }
            let key = CodeKey { image: record.image, code: raw.code, fingerprint: raw.fingerprint };
            self.stack.push(symbolizer.frame(profile, key, raw.lasti, raw.opcode));
        }
        let reason = StopReason::from_number(record.stop);
        if reason != Some(StopReason::Complete) {
            let reason = reason.unwrap_or(StopReason::UnreadableFrame);
            let marker = *self.markers.entry(reason).or_insert_with(|| profile.special_frame(&marker(reason)));
            self.stack.push(marker);
        }
        &self.stack
    }
}

/// The frame that stands where a stack ended early.
fn marker(reason: StopReason) -> String {
    match reason {
        StopReason::NoThreadState | StopReason::NoFrame | StopReason::RuntimeNotInitialized => NATIVE.to_owned(),
        StopReason::EnteringEval => ENTERING.to_owned(),
        cut => format!("<stack cut: {}>", cut.name()),
    }
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
    fn each_interpreter_of_a_thread_is_a_thread_of_the_profile() {
        let (mut merger, mut profile) = (Merger::default(), Profile::default());
        let main = owner_of(&mut merger, &mut profile, 1, 100, 0);
        let sub = owner_of(&mut merger, &mut profile, 1, 100, 3);
        assert_ne!(main.thread, sub.thread);
        assert_eq!(profile.thread(sub.thread).unique_tid, profile.thread(main.thread).unique_tid);
        assert_eq!(profile.thread(sub.thread).interpreter, 3);
    }
}
