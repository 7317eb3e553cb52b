//! Waits that are still going on and were looked at from outside: their parts so far become samples.

use super::super::made::{PerProcess, describe};
use super::super::sleepers::{Part, Sleeper};
use super::super::waits;
use super::{Maker, whose};
use crate::merge::{NATIVE, ProgramKey};
use crate::profile::{FrameId, Merge, NativePlace, Profile, Sample, ThreadId, name_of_address};
use crate::sinks::label::Label;
use crate::snapshot::MixedFrame;
use crate::symbolize::native::NativeName;
use std::sync::atomic::Ordering;
use tachyon_common::event::{SampleRecord, status};

/// A report on waits that are still going on.
#[derive(Clone, Debug, Default)]
pub(in crate::recording) struct Lasting {
    pub parts: Vec<Part>,
    /// Ticks in waits of threads that could not be looked at.
    pub unread: u64,
}

impl Maker {
    /// Makes samples of the parts.
    pub(super) fn lasting(&mut self, lasting: &Lasting) {
        self.made.waited.due_at_end += lasting.unread;
        self.made.waited.unread += lasting.unread;
        for part in lasting.parts.iter().filter(|part| part.weight() > 0) {
            self.made.waited.due_at_end += part.weight();
            self.part(part);
        }
        if self.made.first_error.is_some() {
            self.live.failed.store(true, Ordering::Relaxed);
        }
    }

    fn part(&mut self, part: &Part) {
        let Part { tid, sleeper, facts } = part;
        let owner = self.owner_of(*tid, sleeper);
        let made = &mut self.made;
        // The first place is for what was waited for.
        let mut stack = vec![FrameId(0)];
        frames(sleeper, &mut made.profile, &mut stack);
        let (thread, python) = (&sleeper.stack, sleeper.stack.python.as_ref());
        let main = if thread.main { status::MAIN_THREAD } else { 0 };
        let holds = python.and_then(|python| python.holds_gil) == Some(true);
        let status = (main | if holds { status::HAS_GIL } else { 0 }) as u8;
        let is_python = |frame: &&FrameId| Label::of(&made.profile, made.profile.frames.get(**frame)).kind.is_python();
        let charged = stack[1..].iter().find(is_python).or(stack.get(1)).copied().unwrap_or(FrameId(0));
        let tells_work = made.sink.as_ref().is_some_and(|sink| sink.tells_work());
        let task = sleeper.task.as_ref().filter(|_| tells_work);
        let work = task.and_then(|task| whose::work_outside(&mut made.profile, task));
        let merge = if matches!(thread.mixed, Some(Ok(_))) { Merge::Exact } else { Merge::None };
        let of = &sleeper.of;
        let cause = || waits::cause_with_stack(of.pid, facts, thread, of.free_threaded);
        for stretch in waits::stretches(facts, cause) {
            stack[0] = made.profile.special_frame(&crate::profile::waiting(stretch.cause));
            let sample = Sample { thread: owner, time_us: 0, status, frames: &stack, merge, work };
            made.wait(&sample, charged, &stretch, &stretch.wait);
        }
    }

    /// The thread in the profile, to which it or its process may be new.
    fn owner_of(&mut self, tid: u32, sleeper: &Sleeper) -> ThreadId {
        let ProgramKey { instance, image } = sleeper.of.key;
        let (stack, mut comm) = (&sleeper.stack, [0; 16]);
        comm.iter_mut().zip(stack.comm.bytes().take(15)).for_each(|(to, from)| *to = from);
        let interpreter = stack.python.as_ref().and_then(|python| python.interpreter).unwrap_or(0);
        let record = SampleRecord {
            instance,
            image,
            tgid: sleeper.of.pid,
            tid,
            ns_tid: stack.ns_tid.unwrap_or(tid),
            interp_id: i64::try_from(interpreter).unwrap_or(0),
            comm,
            ..SampleRecord::default()
        };
        let made = &mut self.made;
        let registry = &self.registry;
        let owner = self.merger.owner(&mut made.profile, &record, || describe(registry, &record));
        if owner.first {
            made.processes.push(PerProcess { program: ProgramKey::of(&record), ..PerProcess::default() });
        }
        if owner.nameless && !stack.name.is_empty() {
            made.profile.threads[owner.thread.0 as usize].name.clone_from(&stack.name);
        }
        owner.thread
    }
}

/// Puts the frames of a thread that was looked at on a stack, leaf first.
fn frames(sleeper: &Sleeper, profile: &mut Profile, stack: &mut Vec<FrameId>) {
    let before = stack.len();
    let kernel = sleeper.kernel.iter().map(|name| profile.special_frame(&format!("[k] {name}")));
    stack.extend(kernel);
    let above = stack.len();
    let python = |frame: FrameId, profile: &mut Profile| profile.adopt_frame(&sleeper.of.profile, frame);
    match (&sleeper.stack.mixed, &sleeper.stack.python) {
        (Some(Ok(mixed)), _) => {
            for frame in &mixed.frames {
                match frame {
                    MixedFrame::Python(frame) => stack.push(python(*frame, profile)),
                    MixedFrame::Native(name) => native(name, profile, stack),
                }
            }
        }
        (_, Some(of)) => stack.extend(of.frames.iter().map(|&frame| python(frame, profile))),
        _ => {}
    }
    if stack.len() == above.max(before) {
        stack.push(profile.special_frame(NATIVE));
    }
}

/// A native frame as the recorder names it, with the functions inlined into it.
fn native(name: &NativeName, profile: &mut Profile, stack: &mut Vec<FrameId>) {
    const UNKNOWN: &str = "<unknown>";
    let functions = name.lines.len().max(1);
    for at in 0..functions {
        let (line, inlined) = (name.lines.get(at), at + 1 < functions);
        let function = if inlined { line.and_then(|line| line.function.as_deref()) } else { name.shown() };
        let function =
            function.map(str::to_owned).or_else(|| name.function_vaddr.filter(|_| !inlined).map(name_of_address));
        let shown = format!("{}!{}", name.object, function.as_deref().unwrap_or(UNKNOWN));
        let place = NativePlace { mapping: None, address: name.vaddr, vaddr: name.vaddr, inlined };
        let (file, line) = (line.and_then(|line| line.file.as_deref()), line.and_then(|line| line.line));
        stack.push(profile.native_frame(&shown, file, line, place));
    }
}
