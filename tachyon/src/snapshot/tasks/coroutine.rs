//! From a task's coroutine to the place where it awaits: each coroutine awaits the next.

use super::super::SEED;
use super::super::stack::{Frames, MAX_LOOKS};
use super::Reader;
use crate::inspect::{CoroutineLayout, StackTop};
use std::rc::Rc;
use tachyon_common::event::RawFrame;
use tachyon_common::limits::MAX_PY_FRAMES;
use tachyon_common::walk::{self, CodeBuffer, FrameBuffer, FrameWalk, ThreadBuffer, UserMemory, read_u32};

/// Most bytes of a frame: what it awaits is on its own stack.
const MAX_FRAME_BYTES: u64 = 1 << 20;

/// Most threads whose stacks are searched for a frame whose thread is not known.
const MAX_THREADS: usize = 64;

/// Opcode of `YIELD_FROM`, in 3.8 to 3.10 (Include/opcode.h).
const YIELD_FROM: u8 = 72;

/// Objects with a frame of their own: `PyGenObject` and those that share its fields (`_PyGenObject_HEAD`).
const WITH_FRAME: [&str; 3] = ["coroutine", "generator", "async_generator"];

/// Objects whose first field is one of those: `PyCoroWrapper`, `PyAsyncGenASend`, `PyAsyncGenAThrow` (`Objects/genobject.c`).
const AROUND: [&str; 3] = ["coroutine_wrapper", "async_generator_asend", "async_generator_athrow"];

/// What a coroutine does, with the address of its frame.
enum State {
    /// It has no frame any more.
    Ended,
    Runs(u64),
    /// It has not started, or is suspended by a `yield`.
    Stands(u64),
    /// It awaits: its frame, and what it awaits.
    Awaits(u64, u64),
}

/// A task's frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Chain {
    /// Innermost first.
    pub frames: Vec<RawFrame>,
    /// The innermost one was reached.
    pub whole: bool,
}

impl Chain {
    /// Whether two readings show the same. The leaf of a running chain may have moved on.
    pub(super) fn agrees(&self, other: &Self, running: bool) -> bool {
        let callers = usize::from(running);
        self.whole == other.whole && self.frames.get(callers..) == other.frames.get(callers..)
    }
}

/// A thread's frames with their addresses, innermost first.
pub(super) type ThreadFrames = Vec<(u64, RawFrame)>;

impl<M: UserMemory + ?Sized> Reader<'_, M> {
    /// The frames of a task, from its coroutine and the thread that may run it.
    pub(super) fn chain(&self, coroutine: u64, tstate: u64, frames_left: usize) -> Chain {
        let mut chain = Chain::default();
        let complete = self.follow(coroutine, tstate, frames_left.min(MAX_PY_FRAMES), &mut chain.frames);
        chain.whole = complete.is_some();
        chain.frames.reverse();
        chain
    }

    /// Puts frames into `frames`, outermost first; `None` if they could not be read to the end.
    fn follow(&self, coroutine: u64, tstate: u64, most: usize, frames: &mut Vec<RawFrame>) -> Option<()> {
        let mut object = coroutine;
        for _ in 0..2 * MAX_PY_FRAMES {
            if object == 0 {
                return Some(());
            }
            let kind = self.kind_of(object)?;
            if AROUND.contains(&kind.as_str()) {
                object = self.word(object, self.header())?;
                continue;
            }
            if !WITH_FRAME.contains(&kind.as_str()) {
                // Usually a future.
                return Some(());
            }
            let state = self.state(object)?;
            if frames.len() >= most {
                return if matches!(state, State::Ended) { Some(()) } else { None };
            }
            match state {
                State::Ended => return Some(()),
                State::Runs(frame) => {
                    let called = self.called_by(frame, tstate);
                    let found = !called.is_empty();
                    frames.extend(called.into_iter().take(most - frames.len()));
                    if !found {
                        // It runs in another thread, or no longer runs.
                        frames.push(self.frame_at(frame)?);
                    }
                    return (found && frames.len() < most).then_some(());
                }
                State::Stands(frame) => {
                    frames.push(self.frame_at(frame)?);
                    return Some(());
                }
                State::Awaits(frame, awaited) => {
                    frames.push(self.frame_at(frame)?);
                    object = awaited;
                }
            }
        }
        None
    }

    /// What a coroutine, or a similar object, does.
    fn state(&self, object: u64) -> Option<State> {
        match &self.layout.awaits.coroutine {
            CoroutineLayout::Embedded { frame, state, states, top } => {
                let state = self.byte(object, *state)?.cast_signed();
                let frame = object.checked_add(*frame)?;
                if state >= states.ended {
                    return Some(State::Ended);
                }
                if state == states.executing {
                    return Some(State::Runs(frame));
                }
                let awaits = state == states.awaits || Some(state) == states.awaits_locked;
                if !awaits || states.by_resume && !self.resumes_an_await(frame)? {
                    return Some(State::Stands(frame));
                }
                Some(State::Awaits(frame, self.top(frame, top)?))
            }
            CoroutineLayout::Object { frame, executing, runs, code, top } => {
                let frame = self.word(object, *frame)?;
                if frame == 0 {
                    return Some(State::Ended);
                }
                if self.byte(frame, *executing)? == *runs {
                    return Some(State::Runs(frame));
                }
                if !self.yields_from(frame, *code)? {
                    return Some(State::Stands(frame));
                }
                Some(State::Awaits(frame, self.top(frame, top)?))
            }
        }
    }

    /// Whether a suspended frame's next instruction, a `RESUME`, is that of an `await` or `yield from` (`_PyGen_yf`, 3.11, 3.12): its
    /// argument is 2 or 3; a `yield`'s is 1.
    fn resumes_an_await(&self, frame: u64) -> Option<bool> {
        let previous = self.word(frame, u64::from(self.target.layout.frame_instr))?;
        // The code unit after that one: opcode, argument.
        Some(self.byte(previous, 3)? & 3 >= 2)
    }

    /// Whether a frame object's next instruction is a `YIELD_FROM` (`_PyGen_yf`, up to 3.10).
    fn yields_from(&self, frame: u64, code_code: u64) -> Option<bool> {
        let layout = &self.target.layout;
        let lasti = read_u32(self.memory, frame, layout.frame_instr).ok()?.cast_signed();
        let Ok(lasti) = u64::try_from(lasti) else { return Some(false) };
        let code = self.pointer(frame, u64::from(layout.frame_code))?;
        let bytes = self.pointer(code, code_code)?;
        let next = lasti * u64::from(layout.instr_unit) + 2;
        let within = self.word(bytes, u64::from(layout.ob_size)).is_some_and(|size| next < size);
        Some(within && self.byte(bytes, u64::from(layout.bytes_sval) + next)? == YIELD_FROM)
    }

    /// The value that a frame pushed last: what it awaits.
    fn top(&self, frame: u64, top: &StackTop) -> Option<u64> {
        let last = |count: u64| {
            let count = read_u32(self.memory, frame.checked_add(count)?, 0).ok()?;
            let within = (1..=MAX_FRAME_BYTES / 8).contains(&u64::from(count));
            within.then(|| 8 * (u64::from(count) - 1))
        };
        let at = match *top {
            StackTop::Pointer { at, below } => self.word(frame, at)?.checked_sub(8 * below)?,
            StackTop::Depth { depth, values } => self.word(frame, values)?.checked_add(last(depth)?)?,
            StackTop::Count { count, values } => frame.checked_add(values)?.checked_add(last(count)?)?,
        };
        // Its own stack is part of the frame.
        at.checked_sub(frame).filter(|distance| *distance <= MAX_FRAME_BYTES)?;
        Some(self.word(at, 0)? & !u64::from(self.target.layout.stackref_tag_mask))
    }

    /// The frames of a thread from a running one to the innermost, outermost first; none if that one is not there. A thread state
    /// of 0 means any thread.
    fn called_by(&self, frame: u64, tstate: u64) -> Vec<RawFrame> {
        let any = self.states.iter().map(|state| state.tstate).take(if tstate == 0 { MAX_THREADS } else { 0 });
        for tstate in any.chain([tstate]) {
            let stack = self.stack_of(tstate);
            if let Some(root) = stack.iter().position(|(at, _)| *at == frame) {
                return stack.iter().take(root + 1).rev().map(|(_, raw)| *raw).collect();
            }
        }
        Vec::new()
    }

    /// One frame that is not running.
    fn frame_at(&self, address: u64) -> Option<RawFrame> {
        let mut one = Frames::default();
        let mut walk = FrameWalk::start(address);
        self.step(&mut walk, &mut one);
        one.0.first().copied()
    }

    /// The frames of a thread, read only once.
    fn stack_of(&self, tstate: u64) -> Rc<ThreadFrames> {
        let mut stacks = self.stacks.borrow_mut();
        Rc::clone(stacks.entry(tstate).or_insert_with(|| Rc::new(self.frames_of(tstate))))
    }

    /// The frames of a thread; none if there is no such thread.
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
