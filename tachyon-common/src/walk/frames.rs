//! The frame chain, leaf first.

use super::buffer::{CodeBuffer, FrameBuffer};
use super::code::{CodeIdentity, code_identity};
use super::memory::{Unreadable, UserMemory, read_u8, read_u64};
use crate::event::{RawFrame, frame as frame_flags};
use crate::layout::{Layout, flags};
use crate::limits::MAX_PY_FRAMES;
use crate::stop::StopReason;

/// Address of the innermost frame of a thread; 0 when it runs none.
///
/// # Errors
/// [`StopReason::UnreadableFrame`].
#[inline(always)]
pub fn innermost_frame<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, tstate: u64) -> Result<u64, StopReason> {
    let frame = read_u64(memory, tstate, layout.tstate_frame).map_err(|_| StopReason::UnreadableFrame)?;
    if !layout.has(flags::CFRAME) || frame == 0 {
        return Ok(frame);
    }
    read_u64(memory, frame, layout.cframe_current_frame).map_err(|_| StopReason::UnreadableFrame)
}

/// Takes the frames of a walk, leaf first.
pub trait FrameSink {
    /// Stores the frame at `index`, which is below [`MAX_PY_FRAMES`].
    fn store(&mut self, index: usize, frame: RawFrame);
    /// Sets [`frame_flags::ENTRY`] on the frame stored last, at `index`.
    fn mark_entry(&mut self, index: usize);
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
}

impl FrameWalk {
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
        if frame_buffer.fill(memory, self.next, layout.frame_read).is_err() {
            return Some(StopReason::UnreadableFrame);
        }
        let previous = frame_buffer.u64(layout.frame_previous);
        let owner =
            if Layout::present(layout.frame_owner) { u32::from(frame_buffer.u8(layout.frame_owner)) } else { 0 };
        if self.next == self.gc_frame {
            self.gc = u32::from(frame_flags::GC);
        }
        let last = (self.stored as usize).wrapping_sub(1);
        if owner >= layout.owner_shim_min {
            if last < MAX_PY_FRAMES {
                sink.mark_entry(last);
            }
            self.shims = self.shims.wrapping_add(1);
            self.next = previous;
            return None;
        }
        if self.stored as usize >= MAX_PY_FRAMES {
            return Some(StopReason::TooDeep);
        }
        let code = frame_buffer.u64(layout.frame_code) & !u64::from(layout.stackref_tag_mask);
        if !self.identify(memory, layout, seed, code, code_buffer) {
            return Some(StopReason::UnreadableCode);
        }
        let identity = &self.identity;
        if code_type != 0 && identity.ob_type != code_type {
            return Some(StopReason::NotACodeObject);
        }
        let start = match instructions(memory, layout, frame_buffer, code, identity.tlbc) {
            Ok(start) => start,
            Err(reason) => return Some(reason),
        };
        let Some(lasti) = lasti(layout, frame_buffer, start, identity.code_units) else {
            return Some(StopReason::BadInstruction);
        };
        let mut opcode = 255;
        if self.opcodes != 0 {
            opcode = read_u8(memory, frame_buffer.u64(layout.frame_instr)).unwrap_or(255);
        }
        let mut flags = self.gc as u8;
        if owner == layout.owner_generator {
            flags |= frame_flags::GENERATOR;
        }
        if Layout::present(layout.frame_is_entry) && frame_buffer.u8(layout.frame_is_entry) != 0 {
            flags |= frame_flags::ENTRY;
        }
        sink.store(
            self.stored as usize,
            RawFrame {
                code,
                fingerprint: identity.fingerprint,
                lasti,
                flags,
                opcode,
                shims: (self.shims & 0xffff) as u16,
            },
        );
        self.stored += 1;
        self.shims = 0;
        self.gc = 0;
        self.next = previous;
        None
    }

    /// Reads what tells a code object from others; false when it cannot be read.
    ///
    /// A function of its own for the verifier: behind a call it keeps nothing but the result, so the paths through here are
    /// not multiplied with those that follow. Its result lies in memory and not on a stack, because no such function may
    /// return with a pointer to one in a register.
    #[inline(never)]
    fn identify<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        seed: u64,
        code: u64,
        buffer: &mut CodeBuffer,
    ) -> bool {
        match code_identity(memory, layout, seed, code, buffer) {
            Ok(identity) => {
                self.identity = identity;
                true
            }
            Err(_) => false,
        }
    }
}

/// What a walk's end means, by the innermost and the outermost of the frames it stored: [`StopReason::EnteringEval`], and
/// no frames, where the innermost one was being linked.
///
/// An inlined call publishes its frame before `previous` is written (3.11.7's `CALL_PY_EXACT_ARGS` as compiled: 9
/// instructions). A leaf that has run nothing may be such a frame, and nothing tells a stale `previous` (3.11, 3.12);
/// and C entered the evaluator for the outermost frame of every whole stack, so a chain that ends elsewhere was read
/// while its leaf was being linked.
///
/// From 3.12 on the evaluator links the frame that C calls to an entry frame on its own C stack, and compilers are free to
/// set that one's `owner` last: until then it does not look like a shim, and it has no code object (3.14.9t and 3.15.1t
/// as GCC 10 compiles them: 1 instruction). User space asks, of each chain.
#[inline(always)]
#[must_use]
pub fn settle(
    layout: &Layout,
    stop: StopReason,
    stored: usize,
    leaf: Option<&RawFrame>,
    root: Option<&RawFrame>,
) -> StopReason {
    let (Some(leaf), Some(root)) = (leaf, root) else { return stop };
    if layout.has(flags::FRAME_OBJECTS) {
        return stop;
    }
    let entered = !matches!(stop, StopReason::Complete) || root.flags & frame_flags::ENTRY != 0;
    let started = !layout.has(flags::PREV_INSTR) || leaf.lasti >= 0;
    let linked = stop != StopReason::NotACodeObject || stored > 1 || !Layout::present(layout.frame_owner);
    if entered && started && linked { stop } else { StopReason::EnteringEval }
}

/// Where the instructions start that the frame runs: in its code object, or in its thread's own copy of them
/// (`_PyCode_GetTLBC`: `co_tlbc->entries[tlbc_index]`, 3.14t+; the entry of index 0 is the code object's own).
#[inline(always)]
fn instructions<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    frame: &FrameBuffer,
    code: u64,
    tlbc: u64,
) -> Result<u64, StopReason> {
    let own = code.wrapping_add(u64::from(layout.code_code_adaptive));
    if !Layout::present(layout.frame_tlbc_index) || tlbc == 0 {
        return Ok(own);
    }
    // A wrong index leads to an address that the instruction is not near to: no need to read the array's size.
    let index = frame.u32(layout.frame_tlbc_index) & 0xff_ffff;
    if index == 0 {
        return Ok(own);
    }
    match read_u64(memory, tlbc, 8 + index * 8) {
        Ok(0) => Ok(own),
        Ok(copy) => Ok(copy),
        Err(Unreadable) => Err(StopReason::UnreadableCode),
    }
}

/// Byte offset of the frame's instruction from `start`, where its code starts; `None` when it lies outside.
#[inline(always)]
fn lasti(layout: &Layout, frame: &FrameBuffer, start: u64, code_units: u32) -> Option<i32> {
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
