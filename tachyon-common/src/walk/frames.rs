//! The frame chain, leaf first.

use super::buffer::{CodeBuffer, FrameBuffer, ThreadBuffer};
use super::code::{CodeIdentity, Identified};
use super::content::TextHash;
use super::memory::{Unreadable, UserMemory, read_u8, read_u64};
use crate::event::{RawFrame, frame as frame_flags};
use crate::layout::{Layout, flags};
use crate::limits::{FRAME_READ, FRAMES_READ, MAX_PY_FRAMES};
use crate::opaque;
use crate::stop::StopReason;
use crate::whose::MAX_LOOPS;

/// Address of the innermost frame of a thread whose state [`super::read_thread`] has copied; 0 when it runs none.
///
/// # Errors
/// [`StopReason::UnreadableFrame`].
#[inline(always)]
pub fn innermost_frame<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    thread: &ThreadBuffer,
) -> Result<u64, StopReason> {
    let frame = thread.u64(layout.tstate_frame);
    if !layout.has(flags::CFRAME) || frame == 0 {
        return Ok(frame);
    }
    read_u64(memory, frame, layout.cframe_current_frame).map_err(|_| StopReason::UnreadableFrame)
}

/// Takes the frames of a walk, leaf first.
pub trait FrameSink {
    /// Stores the frame at `index`, which is below [`MAX_PY_FRAMES`], and what it runs.
    fn store(&mut self, index: usize, frame: RawFrame, identity: &CodeIdentity);
    /// Sets [`frame_flags::ENTRY`] on the frame stored last, at `index`.
    fn mark_entry(&mut self, index: usize);
    /// Whether this sink knows the code object at `code` from an earlier walk, and that it still is the same one: then
    /// [`CodeIdentity::fingerprint`] and `code_units` are filled in, and it need not be read.
    #[inline(always)]
    fn known(&mut self, _code: u64, _identity: &mut CodeIdentity) -> bool {
        false
    }
}

/// Where the walk of a frame chain stands.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct FrameWalk {
    /// Frame to look at next.
    pub next: u64,
    /// `tstate.base_frame` (3.15+): the chain's root sentinel; 0: none.
    pub base_frame: u64,
    /// Frames stored so far.
    pub stored: u32,
    /// Shim frames passed since the frame stored last.
    pub shims: u32,
    /// Frame above which the garbage collector runs ([`super::ThreadFacts::gc_frame`]); 0: none.
    pub gc_frame: u64,
    /// [`frame_flags::GC`] once that frame has been met and until the next one is stored, else 0.
    pub gc: u32,
    /// Whether each frame's opcode is read: 0 or 1.
    pub opcodes: u32,
    /// What the frame looked at last runs.
    pub identity: CodeIdentity,
    /// Its code object; 0: none yet.
    identified: u64,
    /// The file of the code object read last.
    file: TextHash,
    /// Address of the first frame among the neighbours in the buffer.
    window: u64,
    /// How far behind it their last one lies.
    window_reach: u64,
    /// Frame looked at last that is no shim: its caller may lie next to it.
    near: u64,
    /// The innermost entry frame (3.12+: it lies on the C stack); 0: none was met.
    pub entry_frame: u64,
    /// The frame that was stored first; 0: none was.
    pub(super) leaf: u64,
    /// What its `previous` names; then the callers of that ([`FrameWalk::look_at_callers`]).
    pub(super) leafs_caller: u64,
    /// Where in the buffer the present frame lies.
    at: u32,
    /// The first of them is in a call: 0 or 1.
    pub(super) in_a_call: u32,
    /// The leaf runs in a trace of the JIT: 0 or 1. See [`FrameWalk::enter`].
    in_trace: u32,
    /// [`Task::frames`](crate::whose::Task::frames): the first frame that was met of those of tasks is the last of so many; 0: none
    /// was met.
    pub task_frames: u32,
    /// The frames of the coroutines of the tasks that may be running; 0: none.
    pub tasks: [u64; MAX_LOOPS],
    /// Which of them was met, from 1 on; 0: none.
    pub task_met: u32,
    /// Explicit padding.
    pub _pad: u32,
}

impl FrameWalk {
    /// A walk that starts at a frame.
    #[inline(always)]
    #[must_use]
    pub fn start(frame: u64) -> Self {
        Self { next: frame, ..Self::default() }
    }

    /// Starts anew at a frame of the same thread.
    #[inline(always)]
    pub fn restart(&mut self, frame: u64) {
        let tasks = self.tasks;
        *self = Self::start(frame);
        self.tasks = tasks;
    }

    /// Goes on at a frame of another thread, whose state the walk has to [enter](Self::enter) first, and stores behind the frames of this
    /// one. (In place: a BPF stack has no room for a walk.)
    #[inline(always)]
    pub fn go_on_at(&mut self, frame: u64) {
        self.next = frame;
        self.tasks = [0; MAX_LOOPS];
        self.shims = 0;
        self.gc_frame = 0;
        self.gc = 0;
        self.identified = 0;
        (self.window, self.window_reach, self.near) = (0, 0, 0);
        self.entry_frame = 0;
    }

    /// Takes from a thread state, which [`super::read_thread`] has copied, what the walk of its frames needs to know.
    #[inline(always)]
    pub fn enter(&mut self, layout: &Layout, thread: &ThreadBuffer) {
        if Layout::present(layout.tstate_base_frame) {
            self.base_frame = thread.u64(layout.tstate_base_frame);
        }
        // What the evaluator was entered from does not count: it puts that aside (`Python/ceval.c`,
        // `_PyEval_EvalFrameDefault` [v3.14.0]).
        if Layout::present(layout.tstate_current_executor) && thread.u64(layout.tstate_current_executor) != 0 {
            self.in_trace = 1;
        }
    }

    /// Looks at the next frame and goes on to its caller. `None`: there is more.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "a BPF program has its scratch space in maps, not in one structure")]
    pub fn frame<M: UserMemory + ?Sized, S: FrameSink>(
        &mut self,
        memory: &M,
        layout: &Layout,
        code_type: u64,
        seed: u64,
        frame_buffer: &mut FrameBuffer,
        code_buffer: &mut CodeBuffer,
        sink: &mut S,
    ) -> Option<StopReason> {
        if self.next == 0 || self.next == self.base_frame {
            return Some(if self.stored == 0 { StopReason::NoFrame } else { StopReason::Complete });
        }
        if !self.read_frame(memory, layout, frame_buffer) {
            return Some(StopReason::UnreadableFrame);
        }
        // What is read again, and what is masked, the verifier does not know more of on one path than on another.
        let this = opaque::place(&mut *self);
        let frame = Frame { buffer: frame_buffer, at: this.at };
        let previous = frame.u64(layout.frame_previous);
        let owner = u32::from(frame.u8(layout.frame_owner)) & mask_of_present(layout.frame_owner);
        if this.next == this.gc_frame {
            this.gc = u32::from(frame_flags::GC);
        }
        let last = (this.stored as usize).wrapping_sub(1);
        if owner >= layout.owner_shim_min {
            if last < MAX_PY_FRAMES {
                sink.mark_entry(last);
            }
            this.shims = this.shims.wrapping_add(1);
            if this.entry_frame == 0 {
                this.entry_frame = this.next;
            }
            this.next = previous;
            return None;
        }
        if this.stored as usize >= MAX_PY_FRAMES {
            return Some(StopReason::TooDeep);
        }
        this.near = this.next;
        let code = frame.u64(layout.frame_code) & !u64::from(layout.stackref_tag_mask);
        // A function that calls itself runs what its caller does.
        if code != this.identified || code == 0 {
            if !sink.known(code, &mut this.identity) {
                if !memory.identify(this, layout, seed, code, code_buffer) {
                    return Some(StopReason::UnreadableCode);
                }
                if code_type != 0 && this.identity.ob_type != code_type {
                    return Some(StopReason::NotACodeObject);
                }
            }
            this.identified = code;
        }
        let start = match instructions(memory, layout, &frame, code) {
            Ok(start) => start,
            Err(reason) => return Some(reason),
        };
        let identity = &this.identity;
        let Some(mut lasti) = lasti(layout, &frame, start, identity.code_units) else {
            return Some(StopReason::BadInstruction);
        };
        let mut opcode = 255;
        if this.opcodes != 0 {
            opcode = read_u8(memory, frame.u64(layout.frame_instr)).unwrap_or(255);
        }
        if this.in_trace != 0 {
            (lasti, opcode, this.in_trace) = (frame_flags::UNKNOWN_LASTI, 255, 0);
        }
        let mut flags = this.gc as u8;
        if owner == layout.owner_generator {
            flags |= frame_flags::GENERATOR;
        }
        if Layout::present(layout.frame_is_entry) && frame.u8(layout.frame_is_entry) != 0 {
            flags |= frame_flags::ENTRY;
        }
        sink.store(
            this.stored as usize,
            RawFrame {
                code,
                fingerprint: identity.fingerprint,
                lasti,
                flags,
                opcode,
                shims: (this.shims & 0xffff) as u16,
            },
            identity,
        );
        if this.stored == 0 {
            (this.leaf, this.leafs_caller) = (this.next, previous);
        }
        this.stored += 1;
        this.meet_task();
        this.shims = 0;
        this.gc = 0;
        this.next = previous;
        None
    }

    /// Notes which task runs, if the present frame, which was stored last, is that of its coroutine.
    #[inline(always)]
    fn meet_task(&mut self) {
        if self.tasks[0] == 0 || self.task_met != 0 {
            return;
        }
        let mut met = u64::from(self.tasks[0] == self.next);
        // Most programs have one loop.
        let mut at = if self.tasks[1] == 0 { MAX_LOOPS } else { 1 };
        while at < MAX_LOOPS {
            // No branch, for the verifier would follow each.
            met |= (at as u64 + 1) * (1 - opaque::differ(self.tasks[at], self.next));
            at += 1;
        }
        if met != 0 {
            (self.task_met, self.task_frames) = (met as u32, self.stored);
        }
    }

    /// Puts the next frame into the buffer, and where it lies there into `at`; false when it cannot be read.
    ///
    /// Frames of one chunk of a thread's data stack lie callers first, so one read of what lies before a frame that is
    /// near its callee gets several: none past the start of its page, which the next page need not be in memory with. A
    /// frame that lies alone (a generator's, on the C stack, before 3.11) is read by itself.
    #[inline(always)]
    fn read_frame<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout, buffer: &mut FrameBuffer) -> bool {
        let frame = self.next;
        let behind = frame.wrapping_sub(self.window);
        if behind <= self.window_reach {
            self.at = behind as u32;
            return true;
        }
        if self.near.wrapping_sub(frame) <= MOST_BEFORE && frame & 7 == 0 {
            let before = (frame & (PAGE - 1)).min(MOST_BEFORE);
            let first = frame - before;
            if buffer.fill_at::<M, 0, FRAMES_READ>(memory, first, before as u32 + u32::from(layout.frame_read)).is_ok()
            {
                (self.window, self.window_reach, self.at) = (first, before, before as u32);
                return true;
            }
        }
        self.at = FRAMES_READ as u32;
        buffer.fill_at::<M, FRAMES_READ, FRAME_READ>(memory, frame, u32::from(layout.frame_read)).is_ok()
    }

    /// Reads what tells a code object from others, up to its file's name. Only to be called by [`UserMemory::identify`].
    #[inline(always)]
    pub fn identify<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        seed: u64,
        code: u64,
        buffer: &mut CodeBuffer,
    ) -> Identified {
        buffer.content.file = self.file;
        self.identity.read(memory, layout, (seed, code), buffer)
    }

    /// Reads its file's name where that is [another one](Identified::OfAnotherFile), likewise.
    #[inline(always)]
    pub fn identify_file<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout, buffer: &mut CodeBuffer) {
        buffer.content.file_name(memory, layout);
        self.file = buffer.content.file;
    }

    /// Reads its line table, likewise.
    #[inline(always)]
    pub fn identify_table<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout, buffer: &mut CodeBuffer) {
        self.identity.read_table(memory, layout, &mut buffer.content);
    }
}

/// All bits where a build has the field at an offset, else none.
#[inline(always)]
fn mask_of_present(offset: u32) -> u32 {
    (opaque::word((u64::from(offset) + 1) >> 32) as u32).wrapping_sub(1)
}

/// Most bytes read before a frame, so that it and they fit the buffer.
const MOST_BEFORE: u64 = (FRAMES_READ - FRAME_READ) as u64;

/// What no page is smaller than.
const PAGE: u64 = 4096;

/// A frame that has been read.
pub(super) struct Frame<'a> {
    pub(super) buffer: &'a FrameBuffer,
    /// Where in the buffer it lies.
    pub(super) at: u32,
}

impl Frame<'_> {
    #[inline(always)]
    pub(super) fn u64(&self, offset: u32) -> u64 {
        self.buffer.u64(self.at.wrapping_add(offset))
    }

    #[inline(always)]
    pub(super) fn u32(&self, offset: u32) -> u32 {
        self.buffer.u32(self.at.wrapping_add(offset))
    }

    #[inline(always)]
    pub(super) fn u8(&self, offset: u32) -> u8 {
        self.buffer.u8(self.at.wrapping_add(offset))
    }
}

/// What a walk's end means, by the innermost and the outermost of the frames it stored: [`StopReason::EnteringEval`], and
/// no frames, where the innermost one was being linked.
///
/// An inlined call publishes its frame before `previous` is written (3.11.7's `CALL_PY_EXACT_ARGS` as compiled: 9
/// instructions). A leaf that has run nothing may be such a frame, with a stale `previous` (3.11, 3.12), unless `linked`: it is
/// proven not to be ([`status::LINKED`](crate::event::status::LINKED)); and C entered the evaluator for the outermost frame of every whole stack, so a chain that ends elsewhere was read
/// while its leaf was being linked.
///
/// From 3.12 on the evaluator links the frame that C calls to an entry frame on its own C stack, and compilers are free to
/// set that one's `owner` last: until then it does not look like a shim, and it has no code object (3.14.9t and 3.15.1t
/// as GCC 10 compiles them: 1 instruction). User space asks, of each chain.
#[inline(always)]
#[must_use]
pub fn believable_stop(
    layout: &Layout,
    stop: StopReason,
    stored: usize,
    leaf: Option<&RawFrame>,
    root: Option<&RawFrame>,
    linked: bool,
) -> StopReason {
    let (Some(leaf), Some(root)) = (leaf, root) else { return stop };
    if layout.has(flags::FRAME_OBJECTS) {
        return stop;
    }
    let entered = !matches!(stop, StopReason::Complete) || root.flags & frame_flags::ENTRY != 0;
    let started = !layout.has(flags::PREV_INSTR) || leaf.lasti >= 0 || linked;
    let whole = stop != StopReason::NotACodeObject || stored > 1 || !Layout::present(layout.frame_owner);
    if entered && started && whole { stop } else { StopReason::EnteringEval }
}

/// Where the instructions start that the frame runs: in its code object, or in its thread's own copy of them
/// (`_PyCode_GetTLBC`: `co_tlbc->entries[tlbc_index]`, 3.14t+; the entry of index 0 is the code object's own).
#[inline(always)]
fn instructions<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    frame: &Frame<'_>,
    code: u64,
) -> Result<u64, StopReason> {
    let own = code.wrapping_add(u64::from(layout.code_code_adaptive));
    if !Layout::present(layout.frame_tlbc_index) || !Layout::present(layout.code_tlbc) {
        return Ok(own);
    }
    // A wrong index leads to an address that the instruction is not near to: no need to read the array's size.
    let index = frame.u32(layout.frame_tlbc_index) & 0xff_ffff;
    if index == 0 {
        return Ok(own);
    }
    // Read anew for a code object that is known, too: the array is another one when more threads have run the code.
    match read_u64(memory, code, layout.code_tlbc) {
        Ok(0) => Ok(own),
        Ok(tlbc) => match read_u64(memory, tlbc, 8 + index * 8) {
            Ok(0) => Ok(own),
            Ok(copy) => Ok(copy),
            Err(Unreadable) => Err(StopReason::UnreadableCode),
        },
        Err(Unreadable) => Err(StopReason::UnreadableCode),
    }
}

/// Byte offset of the frame's instruction from `start`, where its code starts; `None` when it lies outside.
#[inline(always)]
fn lasti(layout: &Layout, frame: &Frame<'_>, start: u64, code_units: u32) -> Option<i32> {
    if layout.has(flags::LASTI_IS_OFFSET) {
        let lasti = frame.u32(layout.frame_instr).cast_signed();
        return if lasti < 0 { Some(-1) } else { lasti.checked_mul(layout.instr_unit.cast_signed()) };
    }
    let offset = frame.u64(layout.frame_instr).wrapping_sub(start).cast_signed();
    // A new frame's `prev_instr` is the unit before the first one.
    if offset < 0 {
        return if layout.has(flags::PREV_INSTR) && offset == -2 { Some(-1) } else { None };
    }
    if offset >= i64::from(code_units) * 2 {
        return None;
    }
    Some(offset as i32)
}

const _: () = assert!(core::mem::size_of::<FrameWalk>() == 192 + 32);
