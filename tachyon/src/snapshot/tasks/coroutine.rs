//! From a task's coroutine to the place where it awaits: each coroutine awaits the next one.

use super::super::SEED;
use super::Reader;
use std::rc::Rc;
use tachyon_common::event::RawFrame;
use tachyon_common::limits::MAX_PY_FRAMES;
use tachyon_common::walk::{
    self, CodeBuffer, CodeIdentity, FrameBuffer, FrameSink, FrameWalk, ThreadBuffer, UserMemory,
};

/// Frames looked at in a thread's stack, shim frames among them.
const MAX_LOOKS: usize = 6 * MAX_PY_FRAMES;

/// Most bytes of a frame: what it awaits lies on its own stack.
const MAX_FRAME_BYTES: u64 = 1 << 20;

/// Objects with a frame of their own: `PyGenObject` and those that share its fields (`_PyGenObject_HEAD`).
const WITH_FRAME: [&str; 3] = ["coroutine", "generator", "async_generator"];

/// Objects whose first field is one of those: `PyCoroWrapper`, `PyAsyncGenASend`, `PyAsyncGenAThrow` (`Objects/genobject.c`).
const AROUND: [&str; 3] = ["coroutine_wrapper", "async_generator_asend", "async_generator_athrow"];

/// A task's frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Chain {
    /// Innermost first.
    pub frames: Vec<RawFrame>,
    /// The innermost one was reached.
    pub whole: bool,
}

impl Chain {
    /// Whether two readings show the same. The leaf of one that runs may have moved on.
    pub(super) fn agrees(&self, other: &Self, running: bool) -> bool {
        let callers = usize::from(running);
        self.whole == other.whole && self.frames.get(callers..) == other.frames.get(callers..)
    }
}

/// A thread's frames with their addresses, innermost first.
pub(super) type ThreadFrames = Vec<(u64, RawFrame)>;

impl<M: UserMemory + ?Sized> Reader<'_, M> {
    /// The frames of a task by its coroutine and the thread that may run it.
    pub(super) fn chain(&self, coroutine: u64, tstate: u64, frames_left: usize) -> Chain {
        let mut chain = Chain::default();
        let complete = self.follow(coroutine, tstate, frames_left.min(MAX_PY_FRAMES), &mut chain.frames);
        chain.whole = complete.is_some();
        chain.frames.reverse();
        chain
    }

    /// Puts frames into `frames`, outermost first; `None` when they could not be read to the end.
    fn follow(&self, coroutine: u64, tstate: u64, most: usize, frames: &mut Vec<RawFrame>) -> Option<()> {
        let awaits = &self.layout.awaits;
        let mut object = coroutine;
        let mut looks = 0;
        while object != 0 {
            looks += 1;
            if looks > 2 * MAX_PY_FRAMES {
                return None;
            }
            let kind = self.kind_of(object)?;
            if AROUND.contains(&kind.as_str()) {
                object = self.word(object, self.header())?;
                continue;
            }
            if !WITH_FRAME.contains(&kind.as_str()) {
                // A future, mostly.
                return Some(());
            }
            let state = self.byte(object, awaits.gen_frame_state)?.cast_signed();
            if state >= awaits.states.ended {
                return Some(());
            }
            if frames.len() >= most {
                return None;
            }
            let frame = object.checked_add(awaits.gen_iframe)?;
            if state == awaits.states.executing {
                let stack = self.stack_of(tstate);
                if let Some(root) = stack.iter().position(|(at, _)| *at == frame) {
                    let called = stack.get(..=root)?.iter().rev().map(|(_, raw)| *raw);
                    frames.extend(called.take(most - frames.len()));
                    return (frames.len() < most).then_some(());
                }
                // It runs in another thread, or no longer.
                frames.push(self.frame_at(frame)?);
                return None;
            }
            frames.push(self.frame_at(frame)?);
            if state != awaits.states.awaits && Some(state) != awaits.states.awaits_locked {
                // Not started, or suspended by a `yield`.
                return Some(());
            }
            let top = self.word(frame, awaits.frame_stackpointer)?;
            let within = top.checked_sub(frame).is_some_and(|distance| distance <= MAX_FRAME_BYTES);
            let awaited = self.word(top.checked_sub(8 * awaits.awaited_below).filter(|_| within)?, 0)?;
            object = awaited & !u64::from(self.target.layout.stackref_tag_mask);
        }
        Some(())
    }

    /// One frame that is not running.
    fn frame_at(&self, address: u64) -> Option<RawFrame> {
        let mut one = Frames::default();
        let mut walk = FrameWalk::start(address);
        self.step(&mut walk, &mut one);
        one.0.first().copied()
    }

    /// The frames of a thread, read once.
    fn stack_of(&self, tstate: u64) -> Rc<ThreadFrames> {
        let mut stacks = self.stacks.borrow_mut();
        Rc::clone(stacks.entry(tstate).or_insert_with(|| Rc::new(self.frames_of(tstate))))
    }

    /// The frames of a thread; none when there is no such thread.
    fn frames_of(&self, tstate: u64) -> ThreadFrames {
        let layout = &self.target.layout;
        let (mut thread, mut found) = (ThreadBuffer::default(), ThreadFrames::new());
        if tstate == 0 || walk::read_thread(self.memory, layout, tstate, &mut thread).is_err() {
            return found;
        }
        let Ok(innermost) = walk::innermost_frame(self.memory, layout, &thread) else { return found };
        let mut walk = FrameWalk::start(innermost);
        walk.enter(layout, &thread);
        let mut frames = Frames::default();
        for _ in 0..MAX_LOOKS {
            let at = walk.next;
            if !self.step(&mut walk, &mut frames) {
                break;
            }
            if let Some(raw) = frames.0.get(found.len()) {
                found.push((at, *raw));
            }
        }
        found
    }

    /// Looks at the next frame of a walk; false when there is none.
    fn step(&self, walk: &mut FrameWalk, frames: &mut Frames) -> bool {
        let (mut frame, mut code) = (FrameBuffer::default(), CodeBuffer::default());
        let code_type = self.target.entry.code_type;
        walk.frame(self.memory, &self.target.layout, code_type, SEED, &mut frame, &mut code, frames).is_none()
    }
}

/// Frames in the order they are met.
#[derive(Debug, Default)]
struct Frames(Vec<RawFrame>);

impl FrameSink for Frames {
    fn store(&mut self, index: usize, frame: RawFrame, _identity: &CodeIdentity) {
        if index == self.0.len() && index < MAX_PY_FRAMES {
            self.0.push(frame);
        }
    }

    fn mark_entry(&mut self, _index: usize) {}
}
