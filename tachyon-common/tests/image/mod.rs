//! A made-up process's memory: as much of CPython as the walk looks at, one layout for each family of versions.
//!
//! Offsets are not CPython's own but differ between families, so that a walk that mixes fields up is found out. The
//! fuzzer takes the same images for its seeds.

use core::cell::Cell;
use std::collections::BTreeMap;
use tachyon_common::event::RawFrame;
use tachyon_common::layout::{Layout, flags};
use tachyon_common::limits::{MAX_PY_FRAMES, MAX_THREAD_STEPS, PY_FRAMES_PER_STEP};
use tachyon_common::process::ProcessEntry;
use tachyon_common::stop::StopReason;
use tachyon_common::walk::{
    CodeBuffer, CodeIdentity, Found, FrameBuffer, FrameSink, FrameWalk, Link, OwnStack, SlotBuffer, ThreadBuffer,
    ThreadPointer, ThreadSearch, Unreadable, UserMemory, believable_stop, innermost_frame, read_thread,
};

/// Pieces of memory by their address. A read must lie within one piece.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// The pieces.
    pub pieces: BTreeMap<u64, Vec<u8>>,
    /// Reads so far.
    pub reads: Cell<u64>,
    /// The read that fails, counted from 0.
    pub failing: Option<u64>,
}

impl UserMemory for Memory {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let number = self.reads.get();
        self.reads.set(number + 1);
        if self.failing == Some(number) {
            return Err(Unreadable);
        }
        let (start, piece) = self.pieces.range(..=addr).next_back().ok_or(Unreadable)?;
        let from = usize::try_from(addr - start).map_err(|_| Unreadable)?;
        let to = from.checked_add(into.len()).ok_or(Unreadable)?;
        into.copy_from_slice(piece.get(from..to).ok_or(Unreadable)?);
        Ok(())
    }
}

impl Memory {
    /// Writes into the piece that starts at `piece`.
    pub fn put(&mut self, piece: u64, offset: u32, bytes: &[u8]) {
        let piece = self.pieces.get_mut(&piece).expect("the piece is there");
        piece[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
    }

    /// Writes a word.
    pub fn put_u64(&mut self, piece: u64, offset: u32, word: u64) {
        self.put(piece, offset, &word.to_ne_bytes());
    }

    /// Writes half a word.
    pub fn put_u32(&mut self, piece: u64, offset: u32, word: u32) {
        self.put(piece, offset, &word.to_ne_bytes());
    }
}

/// Versions whose frames are found in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// 3.8 and 3.9: frame objects, instructions counted in bytes.
    FrameObjects,
    /// 3.10: the same, counted in units of two.
    FrameObjects310,
    /// 3.11: `cframe`, `is_entry`.
    CFrame,
    /// 3.12: `cframe`, shim frames, `bound_gilstate`.
    CFrameShims,
    /// 3.13: `current_frame`, `instr_ptr`.
    CurrentFrame,
    /// 3.14: tagged references.
    Tagged,
    /// 3.14, free-threaded: a bigger head of objects.
    FreeThreaded,
    /// 3.15: the root sentinel.
    BaseFrame,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::FrameObjects,
        Self::FrameObjects310,
        Self::CFrame,
        Self::CFrameShims,
        Self::CurrentFrame,
        Self::Tagged,
        Self::FreeThreaded,
        Self::BaseFrame,
    ];

    /// Its layout.
    #[must_use]
    pub fn layout(self) -> Layout {
        use Family as F;
        let absent = Layout::ABSENT;
        let objects = matches!(self, F::FrameObjects | F::FrameObjects310);
        let old_gil = objects || self == F::CFrame;
        let cframe = matches!(self, F::CFrame | F::CFrameShims);
        let new = matches!(self, F::Tagged | F::FreeThreaded | F::BaseFrame);
        let when = |has: bool, offset: u32| if has { offset } else { absent };
        let bit = |has: bool, bit: u32| if has { bit } else { 0 };
        // The head of objects: two words, or four.
        let head = if self == F::FreeThreaded { 32 } else { 16 };
        let minor = Family::ALL.iter().position(|&family| family == self).expect("it is one of all") as u32 + 8;
        let instructions = if objects {
            flags::FRAME_OBJECTS | flags::LASTI_IS_OFFSET
        } else {
            flags::QUALNAME | bit(cframe, flags::CFRAME | flags::PREV_INSTR)
        };
        Layout {
            version_hex: 3 << 24 | minor << 16,
            flags: instructions | bit(self == F::FreeThreaded, flags::FREE_THREADED),
            runtime_interpreters_head: 40,
            runtime_next_interp_id: 56,
            runtime_main_thread: when(!new, 64),
            runtime_tstate_current: when(old_gil, 72),
            runtime_gil: when(old_gil, 128),
            interp_next: 8,
            interp_threads_head: 24,
            interp_id: 48,
            interp_ceval_gil: when(!old_gil, 88),
            interp_threads_main: when(self == F::CurrentFrame || new, 32),
            runtime_gc_collecting: absent,
            interp_gc_collecting: 104,
            interp_gc_frame: absent,
            interp_code_generation: when(new, 112),
            gil_locked: 16,
            gil_last_holder: 8,
            tstate_next: 8,
            tstate_interp: 16,
            tstate_thread_id: 104,
            tstate_native_thread_id: when(!objects, 112),
            tstate_frame: 56,
            tstate_cframe: when(cframe, 56),
            tstate_status: when(!old_gil, 36),
            status_bound_gilstate: bit(!old_gil, 1 << 3),
            status_active: bit(!old_gil, 1 << 2),
            status_holds_gil: bit(self == F::CurrentFrame || self == F::Tagged, 1 << 7),
            tstate_holds_gil: when(self == F::BaseFrame, 120),
            tstate_gil_requested: absent,
            tstate_current_exception: 64,
            tstate_exc_state: 72,
            exc_value: 0,
            tstate_base_frame: when(self == F::BaseFrame, 48),
            tstate_current_executor: when(new, 88),
            cframe_current_frame: when(cframe, 8),
            frame_previous: if objects { 24 } else { 8 },
            frame_code: if objects { 32 } else { 0 },
            frame_instr: if objects { 60 } else { 56 },
            frame_owner: when(!objects, 70),
            frame_is_entry: when(self == F::CFrame, 69),
            frame_tlbc_index: when(self == F::FreeThreaded, 72),
            frame_stacktop: when(cframe, 64),
            frame_return_offset: when(self == F::CFrameShims, 68),
            frame_localsplus: when(cframe, 80),
            ob_type: head - 8,
            ob_size: head,
            code_filename: head + 96,
            code_qualname: head + 112,
            code_linetable: head + 120,
            code_firstlineno: head + 52,
            code_code_adaptive: when(!objects, head + 168),
            code_tlbc: when(self == F::FreeThreaded, head + 136),
            code_nlocalsplus: when(cframe, head + 56),
            code_stacksize: when(cframe, head + 48),
            generator_state_before: when(cframe, 5),
            code_version: when(!objects && !cframe, head + 76),
            bytes_sval: head + 16,
            unicode_state: head + 16,
            unicode_length: head,
            unicode_ascii_size: head + 24,
            unicode_compact_size: head + 40,
            unicode_kind_shift: 2,
            unicode_compact_bit: 1 << 5,
            unicode_ascii_bit: 1 << 6,
            owner_shim_min: if objects || self == F::CFrame { 255 } else { 3 },
            owner_generator: if objects { 255 } else { 1 },
            stackref_tag_mask: bit(new, 3),
            instr_unit: if self == F::FrameObjects { 1 } else { 2 },
            ..Layout::default()
        }
        .complete()
    }
}

/// `_PyRuntime`.
pub const RUNTIME: u64 = 0x10_0000;
/// `PyCode_Type`.
pub const CODE_TYPE: u64 = 0x20_0000;
/// The thread whose stack is walked.
pub const THREAD: u64 = 0x7f00_0000_1000;
/// The same as a search is told it.
pub const WANTED: ThreadPointer = ThreadPointer { address: THREAD, reach: 0 };
/// Code units of every code object.
pub const UNITS: u32 = 50;
/// `FRAME_OWNED_BY_CSTACK`.
pub const OWNER_SHIM: u8 = 3;

/// A process in the making.
#[derive(Clone, Debug)]
pub struct Image {
    /// Its memory.
    pub memory: Memory,
    /// Where things are in it.
    pub layout: Layout,
    /// What the kernel side would know.
    pub entry: ProcessEntry,
    /// Its only interpreter, until there are more.
    pub interp: u64,
    /// `struct _gil_runtime_state`.
    pub gil: u64,
    next: u64,
}

/// How a walk ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Why.
    pub stop: StopReason,
    /// The frames, leaf first.
    pub frames: Vec<RawFrame>,
    /// The thread state, 0 for none.
    pub tstate: u64,
}

#[allow(dead_code, reason = "each test uses a part of it")]
impl Image {
    /// An interpreter without threads.
    #[must_use]
    pub fn new(family: Family) -> Self {
        let layout = family.layout();
        let entry = ProcessEntry { runtime: RUNTIME, code_type: CODE_TYPE, ..ProcessEntry::default() };
        let mut image = Self { memory: Memory::default(), layout, entry, interp: 0, gil: 0, next: 0x100_0000 };
        image.memory.pieces.insert(RUNTIME, vec![0; 256]);
        image.interp = image.alloc(256);
        image.memory.put_u64(RUNTIME, layout.runtime_interpreters_head, image.interp);
        if Layout::present(layout.interp_ceval_gil) {
            image.gil = image.alloc(64);
            image.memory.put_u64(image.interp, layout.interp_ceval_gil, image.gil);
        }
        image
    }

    /// Zeroed memory of its own: nothing can be read just before or behind it.
    pub fn alloc(&mut self, len: usize) -> u64 {
        let at = self.next;
        self.next += 0x1000 + (len as u64).next_multiple_of(0x1000);
        self.memory.pieces.insert(at, vec![0; len]);
        at
    }

    /// Another interpreter, behind the first.
    pub fn interpreter(&mut self) -> u64 {
        let interp = self.alloc(256);
        self.memory.put_u64(self.interp, self.layout.interp_next, interp);
        interp
    }

    /// A code object, with just the bytes that belong to it.
    pub fn code(&mut self, firstlineno: i32, linetable: &[u8]) -> u64 {
        let layout = self.layout;
        let [name, filename] = [self.text("f"), self.text("f.py")];
        let table = self.alloc(layout.bytes_sval as usize + linetable.len() + 1);
        self.memory.put_u64(table, layout.ob_size, linetable.len() as u64);
        self.memory.put(table, layout.bytes_sval, linetable);
        let code = self.alloc(usize::from(layout.code_read));
        self.memory.put_u64(code, layout.ob_type, CODE_TYPE);
        if !layout.has(flags::FRAME_OBJECTS) {
            self.memory.put_u64(code, layout.ob_size, u64::from(UNITS));
        }
        self.memory.put_u64(code, layout.code_filename, filename);
        self.memory.put_u64(code, layout.code_qualname, name);
        self.memory.put_u64(code, layout.code_linetable, table);
        self.memory.put_u32(code, layout.code_firstlineno, firstlineno.cast_unsigned());
        code
    }

    /// An ASCII string, in blocks of 16 bytes as CPython's allocators give.
    pub fn text(&mut self, text: &str) -> u64 {
        let layout = self.layout;
        let at = self.alloc((layout.unicode_ascii_size as usize + text.len() + 1).next_multiple_of(16));
        self.memory.put_u64(at, layout.unicode_length, text.len() as u64);
        let state = layout.unicode_compact_bit | layout.unicode_ascii_bit | 1 << layout.unicode_kind_shift;
        self.memory.put_u32(at, layout.unicode_state, state);
        self.memory.put(at, layout.unicode_ascii_size, text.as_bytes());
        at
    }

    /// A frame that stands at code unit `unit` (-1: before the first).
    pub fn frame(&mut self, code: u64, unit: i32, owner: u8, previous: u64) -> u64 {
        let layout = self.layout;
        // C entered the evaluator for the outermost frame: it says so itself (3.11), or stands on a shim.
        let outermost = previous == 0 && u32::from(owner) < layout.owner_shim_min;
        let previous =
            if outermost && layout.owner_shim_min < 255 { self.frame(0, 0, OWNER_SHIM, 0) } else { previous };
        let frame = self.alloc(usize::from(layout.frame_read));
        if outermost && Layout::present(layout.frame_is_entry) {
            self.memory.put(frame, layout.frame_is_entry, &[1]);
        }
        self.memory.put_u64(frame, layout.frame_previous, previous);
        self.memory.put_u64(frame, layout.frame_code, code | u64::from(layout.stackref_tag_mask & 1));
        if layout.has(flags::LASTI_IS_OFFSET) {
            let lasti = if unit < 0 { -1 } else { unit * 2 / layout.instr_unit.cast_signed() };
            self.memory.put_u32(frame, layout.frame_instr, lasti.cast_unsigned());
        } else {
            let start = code + u64::from(layout.code_code_adaptive);
            let at = start.wrapping_add_signed(i64::from(unit) * 2);
            self.memory.put_u64(frame, layout.frame_instr, at);
            self.memory.put(frame, layout.frame_owner, &[owner]);
        }
        frame
    }

    /// A thread state at the head of an interpreter's list; `frame` is its innermost frame.
    pub fn thread(&mut self, interp: u64, thread_id: u64, frame: u64) -> u64 {
        let layout = self.layout;
        let tstate = self.alloc(128);
        let head = u64::from_ne_bytes(
            self.memory.pieces[&interp][layout.interp_threads_head as usize..][..8].try_into().expect("a word"),
        );
        self.memory.put_u64(tstate, layout.tstate_next, head);
        self.memory.put_u64(interp, layout.interp_threads_head, tstate);
        self.memory.put_u64(tstate, layout.tstate_interp, interp);
        self.memory.put_u64(tstate, layout.tstate_thread_id, thread_id);
        if layout.status_bound_gilstate != 0 {
            self.memory.put_u32(tstate, layout.tstate_status, layout.status_bound_gilstate);
        }
        let mut first = frame;
        if layout.has(flags::CFRAME) {
            if frame == 0 {
                // One of its own, past the fields.
                let own = u64::from(layout.cframe_current_frame);
                first = tstate + 120 - own;
            } else {
                first = self.alloc(32);
                self.memory.put_u64(first, layout.cframe_current_frame, frame);
            }
        }
        self.memory.put_u64(tstate, layout.tstate_frame, first);
        tstate
    }

    /// Memory around a thread pointer, which keeps a thread state at this offset.
    #[allow(dead_code, reason = "not all that share this file need it")]
    pub fn descriptor(&mut self, tstate: u64, offset: u32) -> u64 {
        let at = self.alloc(0x900);
        self.memory.put_u64(at, offset, tstate);
        at
    }

    /// A thread with `depth` frames; the leaf (line 1) stands at unit 1, its caller (line 2) at 2, and so on in circles.
    pub fn stack(&mut self, depth: u32) -> (u64, Vec<u64>) {
        let mut frames = Vec::new();
        let mut previous = 0;
        for number in (1..=depth).rev() {
            let code = self.code(number.cast_signed(), &[number as u8; 40]);
            previous = self.frame(code, (number % UNITS).cast_signed(), 0, previous);
            frames.push(previous);
        }
        frames.reverse();
        (self.thread(self.interp, THREAD, previous), frames)
    }

    /// A thread state, copied.
    pub fn copied(&self, tstate: u64) -> Result<ThreadBuffer, Unreadable> {
        let mut thread = ThreadBuffer::default();
        read_thread(&self.memory, &self.layout, tstate, &mut thread).map(|()| thread)
    }

    /// Walks the stack of [`THREAD`] as the kernel side does, with its bounds.
    #[must_use]
    pub fn walk(&self) -> Outcome {
        walk(&self.memory, &self.layout, &self.entry)
    }
}

/// Takes frames, and checks what a sink is promised.
#[derive(Default)]
struct Sink(Vec<RawFrame>);

impl FrameSink for Sink {
    fn store(&mut self, index: usize, frame: RawFrame, _identity: &CodeIdentity) {
        assert!(index == self.0.len() && index < MAX_PY_FRAMES, "frame {index} after {}", self.0.len());
        self.0.push(frame);
    }

    fn mark_entry(&mut self, index: usize) {
        assert!(index + 1 == self.0.len(), "frame {index} of {}", self.0.len());
        self.0[index].flags |= tachyon_common::event::frame::ENTRY;
    }
}

/// Finds [`THREAD`] and walks its stack, with the bounds of `tachyon-ebpf`'s `sample.rs`.
pub fn walk<M: UserMemory>(memory: &M, layout: &Layout, entry: &ProcessEntry) -> Outcome {
    let mut sink = Sink::default();
    let ended = |stop, sink: Sink, tstate| Outcome { stop, frames: sink.0, tstate };
    // Every address is on the thread's stack, where that matters and a `cframe` tells.
    let sp = u64::from(layout.has(flags::CFRAME));
    let stack = OwnStack { sp, end: u64::MAX };
    let mut search = match ThreadSearch::start(memory, layout, entry, WANTED, stack, false) {
        Ok(search) => search,
        Err(stop) => return ended(stop, sink, 0),
    };
    let slots = SlotBuffer::default();
    let found = (0..MAX_THREAD_STEPS).map(|_| search.step(memory, layout, &slots)).find(|found| *found != Found::More);
    let tstate = match found {
        Some(Found::State { tstate, .. }) => tstate,
        Some(Found::Stop(stop)) => return ended(stop, sink, 0),
        Some(Found::More | Found::Scan) | None => return ended(StopReason::ThreadListTooLong, sink, 0),
    };
    let mut thread = ThreadBuffer::default();
    if read_thread(memory, layout, tstate, &mut thread).is_err() {
        return ended(StopReason::UnreadableThread, sink, tstate);
    }
    let frame = match innermost_frame(memory, layout, &thread) {
        Ok(frame) => frame,
        Err(stop) => return ended(stop, sink, tstate),
    };
    let mut walk = FrameWalk::start(frame);
    walk.enter(layout, &thread);
    let (mut frame_buffer, mut code_buffer) = (FrameBuffer::default(), CodeBuffer::default());
    // Shims take no slot: a chain of nothing else ends with the tail calls.
    for _ in 0..(MAX_PY_FRAMES.div_ceil(PY_FRAMES_PER_STEP) + 1) * PY_FRAMES_PER_STEP {
        let stop = walk.frame(memory, layout, entry.code_type, 7, &mut frame_buffer, &mut code_buffer, &mut sink);
        if let Some(stop) = stop {
            let linked =
                sink.0.first().is_some_and(|leaf| is_linked(memory, layout, &mut walk, leaf, &mut frame_buffer));
            if believable_stop(layout, stop, sink.0.len(), sink.0.first(), sink.0.last(), linked) != stop {
                return ended(StopReason::EnteringEval, Sink::default(), tstate);
            }
            return ended(stop, sink, tstate);
        }
    }
    ended(StopReason::TailCallFailed, sink, tstate)
}

/// Whether the leaf is proven to be linked, as `tachyon-ebpf`'s `frames.rs` asks.
fn is_linked<M: UserMemory>(
    memory: &M,
    layout: &Layout,
    walk: &mut FrameWalk,
    leaf: &RawFrame,
    buffer: &mut FrameBuffer,
) -> bool {
    let mut link = walk.leaf_is_linked(layout, leaf, Some(0));
    let mut looks = 0;
    while looks < FrameWalk::CALLERS && link == Link::More {
        link = walk.look_at_callers(memory, layout, buffer);
        looks += 1;
    }
    link == Link::Linked
}
