//! Makes samples of waits' records, with who ended them and who held what was waited for.

use super::super::follow::lock;
use super::super::waits::{self, GIL, LOCK, Stretch};
use super::Maker;
use crate::events::{Event, Events, Frames};
use crate::profile::{FrameId, Holder, Sample, ThreadId, Wait};
use crate::remote::RemoteProcess;
use crate::sinks::label::Label;
use crate::symbolize::CodeKey;
use crate::types::Pid;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use tachyon_common::event::{SampleRecord, WaitFacts, status};
use tachyon_common::layout::flags;
use tachyon_common::wait::BY_INTERRUPT;

/// Most threads whose thread states are remembered.
const MOST_STATES: usize = 1 << 16;
/// Most threads whose names are remembered because they woke others.
const MOST_NAMES: usize = 1 << 12;

/// What is known about threads apart from their samples.
#[derive(Debug, Default)]
pub(super) struct Threads {
    /// Thread state and the instance of its process -> thread.
    states: HashMap<(u64, u64), u32>,
    /// Names of threads that are not recorded but woke threads that are.
    names: HashMap<u32, String>,
}

impl Threads {
    /// Learns from a record which thread its thread state belongs to.
    pub fn learn(&mut self, record: &SampleRecord) {
        if record.tstate == 0 {
            return;
        }
        if self.states.len() >= MOST_STATES {
            self.states.clear();
        }
        self.states.insert((record.instance, record.tstate), record.tid);
    }

    fn of_state(&self, instance: u64, tstate: u64) -> Option<u32> {
        self.states.get(&(instance, tstate)).copied()
    }

    fn name(&mut self, tid: u32) -> &str {
        if self.names.len() >= MOST_NAMES {
            self.names.clear();
        }
        self.names.entry(tid).or_insert_with(|| {
            // The thread may have ended by now.
            RemoteProcess::at(Pid(tid)).comm().unwrap_or_else(|_| format!("thread {tid}"))
        })
    }
}

/// Who ended a wait.
struct Waker {
    /// The frame shown for it between the line that waited and what it waited for.
    shown: FrameId,
    /// Its thread and stack, if it is recorded.
    stack: Option<(ThreadId, Vec<FrameId>)>,
}

impl Maker {
    /// Handles the end of a wait whose stack was taken at its beginning.
    pub(super) fn wait_end(&mut self, record: &SampleRecord, facts: &WaitFacts) {
        let begun = self.begun.take(record.tid, facts.left_ns);
        let Some(Ok(Event::WaitBegin(record, frames, begun))) =
            begun.as_deref().and_then(|bytes| Events::new(bytes).next())
        else {
            self.made.waited.unread += u64::from(facts.weight) + u64::from(facts.queued);
            return;
        };
        let facts = WaitFacts {
            left_ns: facts.left_ns,
            began_ns: facts.began_ns,
            queued_ns: facts.queued_ns,
            ended_ns: facts.ended_ns,
            weight: facts.weight,
            queued: facts.queued,
            state: facts.state,
            waker: facts.waker,
            ..begun
        };
        self.wait(&record, frames, &facts);
    }

    /// Takes a wait: one of weight `n` counts as `n` samples.
    pub(super) fn wait(&mut self, record: &SampleRecord, frames: Frames<'_>, facts: &WaitFacts) {
        let waker = self.waker_of(record.tid, facts);
        // The statistics of native stacks are about the clock's samples only.
        let native = std::mem::take(&mut self.made.native);
        let (owner, record, (merge, work)) = self.stack(record, frames);
        self.made.native = native;
        // After the first record of an image, which says whose it is.
        let holder = self.holder_of(&record, frames, facts);
        let cause = || self.cause_of(&record, facts);
        let stretches: Vec<Stretch> = waits::stretches(facts, cause).collect();
        let made = &mut self.made;
        let stack = self.merger.last();
        let is_python = |frame: &&FrameId| Label::of(&made.profile, made.profile.frames.get(**frame)).kind.is_python();
        let charged = stack.iter().find(is_python).or(stack.first()).copied();
        let status = (record.status & 0x3f & !status::ON_CPU) as u8;
        let mut frames = Vec::with_capacity(stack.len() + 2);
        for stretch in stretches {
            let mark = made.profile.special_frame(&crate::profile::waiting(stretch.cause));
            frames.clear();
            frames.push(mark);
            // For a wait for a CPU, there is no point in saying who gave it up.
            let waker = waker.as_ref().filter(|_| stretch.cause != waits::FOR_A_CPU);
            frames.extend(waker.map(|waker| waker.shown));
            frames.extend_from_slice(stack);
            let sample = Sample { thread: owner.thread, time_us: 0, status, frames: &frames, merge, work };
            let more = Wait {
                waker_stack: waker.and_then(|waker| waker.stack.as_ref()).map(|(thread, frames)| (*thread, &**frames)),
                holder: holder.filter(|_| stretch.cause == GIL),
                ..stretch.wait
            };
            let charged = charged.unwrap_or(mark);
            made.wait(&sample, charged, &stretch, &more);
            if let Some(waker) = waker {
                *made.waited.by_waker.entry((stretch.cause, charged, waker.shown)).or_default() += stretch.wait.weight;
            }
        }
        if made.first_error.is_some() {
            self.live.failed.store(true, Ordering::Relaxed);
        }
    }

    /// What the thread whose stack was merged last waited for. If the system call does not show whose a futex is, the waiting
    /// functions do.
    fn cause_of(&mut self, record: &SampleRecord, facts: &WaitFacts) -> &'static str {
        let cause = waits::cause(record.tgid, facts);
        if cause != LOCK {
            return cause;
        }
        let free_threaded =
            lock(&self.registry).layout(record.layout).is_some_and(|layout| layout.has(flags::FREE_THREADED));
        let profile = &mut self.made.profile;
        let frames = self.native.as_mut().map_or(Vec::new(), |native| native.leaf_first(profile));
        let names = frames.iter().map(|&frame| profile.strings.get(profile.frames.get(frame).function));
        waits::told_by_native(names, free_threaded).unwrap_or(cause)
    }

    /// The line that held the GIL.
    fn holder_of(&mut self, record: &SampleRecord, frames: Frames<'_>, facts: &WaitFacts) -> Option<Holder> {
        let raw = frames.holder()?;
        let key = CodeKey { image: record.image, code: raw.code, fingerprint: raw.fingerprint };
        let frame = self.symbolizer.frame(&mut self.made.profile, key, raw.lasti, raw.opcode);
        Some(Holder { tid: self.threads.of_state(record.instance, facts.holder), frame })
    }

    /// Who ended a thread's wait, where that was asked for.
    fn waker_of(&mut self, tid: u32, facts: &WaitFacts) -> Option<Waker> {
        if !self.wakers || facts.state == 0 || facts.waker == 0 {
            return None;
        }
        if facts.waker == BY_INTERRUPT {
            let shown = self.made.profile.special_frame(&crate::profile::woken_by("an interrupt"));
            return Some(Waker { shown, stack: None });
        }
        let record = self.waking.take(tid, facts.left_ns);
        let Some(Ok(Event::Waker(record, frames, _))) = record.as_deref().and_then(|bytes| Events::new(bytes).next())
        else {
            let name = crate::profile::woken_by(self.threads.name(facts.waker));
            return Some(Waker { shown: self.made.profile.special_frame(&name), stack: None });
        };
        let native = std::mem::take(&mut self.made.native);
        let (owner, _, _) = self.stack(&record, frames);
        self.made.native = native;
        let stack = self.merger.last().to_vec();
        let profile = &mut self.made.profile;
        let python = stack.iter().find(|&&frame| Label::of(profile, profile.frames.get(frame)).kind.is_python());
        let shown = match python {
            Some(&frame) => waits::place(profile, frame),
            None => profile.thread(owner.thread).name.clone(),
        };
        let shown = profile.special_frame(&crate::profile::woken_by(&shown));
        Some(Waker { shown, stack: Some((owner.thread, stack)) })
    }
}
