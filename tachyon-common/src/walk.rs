//! The walk over a CPython process's memory: thread, frame chain, identity of code objects.
//!
//! One piece of code for three places: the BPF program (over `bpf_probe_read_user`), tests (over recorded memory)
//! and user space (over `process_vm_readv`). It trusts nothing that it reads: every loop is bounded, every buffer
//! access is masked or checked, and every early end has a [`StopReason`]. Loops stop after a fixed number of steps
//! and can be continued, because a BPF program must end and may only tail-call on.

use crate::event::{RawFrame, frame as frame_flags, status};
use crate::layout::{Layout, flags};
use crate::limits::{CODE_READ, FRAME_READ, LINETABLE_HASHED, MAX_PY_FRAMES, PY_FRAMES_PER_STEP, THREADS_PER_STEP};
use crate::process::ProcessEntry;
use crate::stop::StopReason;

/// Some of the bytes asked for could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreadable;

/// Memory of a target process.
pub trait UserMemory {
    /// Fills `into` with the bytes at `addr`.
    ///
    /// # Errors
    /// [`Unreadable`] when any of them cannot be read; what `into` holds then is not specified.
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable>;
}

/// Reads a pointer-sized word at `base + offset`.
#[inline(always)]
pub fn read_u64<M: UserMemory + ?Sized>(memory: &M, base: u64, offset: u32) -> Result<u64, Unreadable> {
    let mut bytes = [0; 8];
    memory.read(base.wrapping_add(u64::from(offset)), &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Reads a 32-bit word at `base + offset`.
#[inline(always)]
pub fn read_u32<M: UserMemory + ?Sized>(memory: &M, base: u64, offset: u32) -> Result<u32, Unreadable> {
    let mut bytes = [0; 4];
    memory.read(base.wrapping_add(u64::from(offset)), &mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// Reads a byte at `addr`.
#[inline(always)]
pub fn read_u8<M: UserMemory + ?Sized>(memory: &M, addr: u64) -> Result<u8, Unreadable> {
    let mut byte = [0];
    memory.read(addr, &mut byte)?;
    Ok(byte[0])
}

/// A structure copied from the target, as aligned words: `BYTES` bytes that an offset may name (a power of two), in
/// `WORDS` = `BYTES / 8` words. Offsets are masked, which is the bound the verifier sees.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Buffer<const BYTES: usize, const WORDS: usize> {
    words: [u64; WORDS],
}

/// Room for one frame.
pub type FrameBuffer = Buffer<FRAME_READ, { FRAME_READ / 8 }>;
/// Room for one code object's head.
pub type CodeBuffer = Buffer<CODE_READ, { CODE_READ / 8 }>;

impl<const BYTES: usize, const WORDS: usize> Default for Buffer<BYTES, WORDS> {
    fn default() -> Self {
        Self { words: [0; WORDS] }
    }
}

impl<const BYTES: usize, const WORDS: usize> Buffer<BYTES, WORDS> {
    const CHECKED: () = assert!(BYTES == WORDS * 8 && BYTES.is_power_of_two());

    /// Copies `len` bytes (at most `BYTES`) from `addr`.
    #[inline(always)]
    fn fill<M: UserMemory + ?Sized>(&mut self, memory: &M, addr: u64, len: u32) -> Result<(), Unreadable> {
        let () = Self::CHECKED;
        // `len` is at most `BYTES` by validation; the mask is for the verifier, the comparison for us.
        let len = len as usize & (2 * BYTES - 1);
        if len > BYTES {
            return Err(Unreadable);
        }
        // SAFETY: the words are `BYTES` initialised bytes, and any bytes are valid words.
        let bytes = unsafe { core::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>(), BYTES) };
        let Some(into) = bytes.get_mut(..len) else { return Err(Unreadable) };
        memory.read(addr, into)
    }

    /// The word at an offset, which is a multiple of 8.
    #[inline(always)]
    fn u64(&self, offset: u32) -> u64 {
        self.words[(offset / 8) as usize & (WORDS - 1)]
    }

    /// The half word at an offset, which is a multiple of 4.
    #[inline(always)]
    fn u32(&self, offset: u32) -> u32 {
        (self.shifted(offset) & 0xffff_ffff) as u32
    }

    /// The byte at an offset.
    #[inline(always)]
    fn u8(&self, offset: u32) -> u8 {
        (self.shifted(offset) & 0xff) as u8
    }

    /// The word around an offset, with the byte at the offset lowest. (Targets that eBPF is built for here are
    /// little-endian.)
    #[inline(always)]
    fn shifted(&self, offset: u32) -> u64 {
        self.u64(offset) >> ((offset & 7) * 8)
    }
}

/// Mixes a word into a hash (a multiply and a fold; the multiplier is 2^64 divided by the golden ratio).
#[inline(always)]
#[must_use]
pub const fn mix(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

/// What tells one code object from every other that ever lies at its address, and where its names are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodeIdentity {
    /// Hash of the three addresses below, `firstlineno`, the code size and the line table's length and first bytes.
    pub fingerprint: u64,
    /// `ob_type`.
    pub ob_type: u64,
    /// Address of the `co_qualname` (before 3.11 `co_name`) string.
    pub qualname: u64,
    /// Address of the `co_filename` string.
    pub filename: u64,
    /// Address of the line table's bytes object.
    pub linetable: u64,
    /// Length of the line table in bytes, as the target claims.
    pub linetable_len: u64,
    /// `co_firstlineno`.
    pub firstlineno: i32,
    /// Size of the code: code units (3.11+), else 0.
    pub code_units: u32,
    /// Address of the array of per-thread copies of the code (free-threaded 3.14+), else 0.
    pub tlbc: u64,
}

/// Reads the head of the code object at `code` and the head of its line table.
///
/// # Errors
/// [`StopReason::UnreadableCode`].
#[inline(always)]
pub fn code_identity<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    seed: u64,
    code: u64,
    buffer: &mut CodeBuffer,
) -> Result<CodeIdentity, StopReason> {
    if buffer.fill(memory, code, layout.code_read).is_err() {
        return Err(StopReason::UnreadableCode);
    }
    let mut identity = CodeIdentity {
        fingerprint: 0,
        ob_type: buffer.u64(layout.ob_type),
        qualname: buffer.u64(layout.code_qualname),
        filename: buffer.u64(layout.code_filename),
        linetable: buffer.u64(layout.code_linetable),
        linetable_len: 0,
        firstlineno: buffer.u32(layout.code_firstlineno).cast_signed(),
        code_units: if layout.has(flags::FRAME_OBJECTS) { 0 } else { buffer.u32(layout.ob_size) },
        tlbc: if Layout::present(layout.code_tlbc) { buffer.u64(layout.code_tlbc) } else { 0 },
    };
    let mut hash = mix(seed, identity.qualname);
    hash = mix(hash, identity.filename);
    hash = mix(hash, identity.linetable);
    hash = mix(hash, u64::from(identity.firstlineno.cast_unsigned()) | (u64::from(identity.code_units) << 32));
    // One read for the table's length and first bytes, which lie side by side; into the same buffer, whose fields have
    // been taken out.
    let head = layout.bytes_sval.wrapping_sub(layout.ob_size) & 0x3f;
    let from = identity.linetable.wrapping_add(u64::from(layout.ob_size));
    let whole = buffer.fill(memory, from, head + LINETABLE_HASHED as u32).is_ok();
    // The object may end within these bytes, and its page with it; or the table is not in memory at this moment. The
    // identity without its bytes is still one, under a hash of its own.
    if !whole && buffer.fill(memory, from, 8).is_err() {
        identity.fingerprint = mix(hash, u64::MAX);
        return Ok(identity);
    }
    let len = buffer.u64(0);
    identity.linetable_len = len;
    hash = mix(hash, len);
    // Whole words inside the table only: bytes past its end belong to somebody else and change.
    let words = if whole { len / 8 } else { 0 };
    let mut at = 0;
    while at < LINETABLE_HASHED as u32 / 8 {
        if u64::from(at) >= words {
            break;
        }
        hash = mix(hash, buffer.u64(head + at * 8));
        at += 1;
    }
    identity.fingerprint = hash;
    Ok(identity)
}

/// Where the search for a thread's state stands.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ThreadSearch {
    /// `thread_id` looked for.
    pub wanted: u64,
    /// Interpreter whose list is being walked.
    pub interp: u64,
    /// Thread state to look at next; 0: the list is done.
    pub tstate: u64,
    /// `gilstate.tstate_current` (up to 3.11).
    pub current: u64,
    /// Best match so far.
    pub best: u64,
    /// Address that decides between matches with a frame (3.11: of the `cframe`).
    pub best_rank: u64,
    /// Matches so far.
    pub matches: u32,
    /// Matches that have a frame.
    pub framed: u32,
}

/// What a search step found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The bound on steps was reached: call again.
    More,
    /// This thread state; `unique` when no other can be this thread's until a thread or interpreter starts.
    State {
        /// Address of the `PyThreadState`.
        tstate: u64,
        /// Whether the answer may be remembered.
        unique: bool,
    },
    /// None, for this reason.
    Stop(StopReason),
}

impl ThreadSearch {
    /// Starts a search for the thread whose thread pointer is `thread_pointer`.
    ///
    /// # Errors
    /// [`StopReason::RuntimeNotInitialized`] or [`StopReason::UnreadableThread`].
    #[inline(always)]
    pub fn start<M: UserMemory + ?Sized>(
        memory: &M,
        layout: &Layout,
        process: &ProcessEntry,
        thread_pointer: u64,
    ) -> Result<Self, StopReason> {
        let unreadable = |_| StopReason::UnreadableThread;
        // A page of `_PyRuntime` that cannot be read has not been touched yet, as a rule.
        let interp = read_u64(memory, process.runtime, layout.runtime_interpreters_head).unwrap_or(0);
        if interp == 0 {
            return Err(StopReason::RuntimeNotInitialized);
        }
        let mut search = Self {
            wanted: thread_pointer.wrapping_sub(process.thread_pointer_bias.cast_unsigned()),
            interp,
            tstate: read_u64(memory, interp, layout.interp_threads_head).map_err(unreadable)?,
            ..Self::default()
        };
        if Layout::present(layout.runtime_tstate_current) {
            search.current = read_u64(memory, process.runtime, layout.runtime_tstate_current).map_err(unreadable)?;
        }
        Ok(search)
    }

    /// Looks at up to [`THREADS_PER_STEP`] thread states.
    #[inline(always)]
    pub fn step<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) -> Found {
        let mut steps = 0;
        while steps < THREADS_PER_STEP {
            steps += 1;
            if self.tstate == 0 {
                match read_u64(memory, self.interp, layout.interp_next) {
                    Ok(0) => return self.verdict(layout),
                    Ok(next) => self.interp = next,
                    Err(Unreadable) => return Found::Stop(StopReason::UnreadableThread),
                }
                match read_u64(memory, self.interp, layout.interp_threads_head) {
                    Ok(head) => self.tstate = head,
                    Err(Unreadable) => return Found::Stop(StopReason::UnreadableThread),
                }
                continue;
            }
            let Ok(thread_id) = read_u64(memory, self.tstate, layout.tstate_thread_id) else {
                return Found::Stop(StopReason::UnreadableThread);
            };
            if thread_id == self.wanted
                && let Some(found) = self.weigh(memory, layout)
            {
                return found;
            }
            match read_u64(memory, self.tstate, layout.tstate_next) {
                Ok(next) => self.tstate = next,
                Err(Unreadable) => return Found::Stop(StopReason::UnreadableThread),
            }
        }
        Found::More
    }

    /// Weighs a thread state that carries the right thread id; an answer ends the search.
    #[inline(always)]
    fn weigh<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) -> Option<Found> {
        if layout.status_bound_gilstate != 0 {
            return match is_bound(memory, layout, self.tstate) {
                Ok(true) => Some(Found::State { tstate: self.tstate, unique: true }),
                Ok(false) => None,
                Err(Unreadable) => Some(Found::Stop(StopReason::UnreadableThread)),
            };
        }
        self.matches += 1;
        // The holder of the GIL is the current thread itself when its state is among the matches.
        if self.tstate == self.current {
            return Some(Found::State { tstate: self.tstate, unique: false });
        }
        let Ok(mut frame) = read_u64(memory, self.tstate, layout.tstate_frame) else {
            return Some(Found::Stop(StopReason::UnreadableThread));
        };
        let rank = frame;
        if layout.has(flags::CFRAME) && frame != 0 {
            frame = match read_u64(memory, frame, layout.cframe_current_frame) {
                Ok(frame) => frame,
                Err(Unreadable) => return Some(Found::Stop(StopReason::UnreadableThread)),
            };
        }
        if frame != 0 {
            self.framed += 1;
            // 3.11: the `cframe` that lies lower on the C stack is the inner one.
            if self.best == 0 || self.framed == 1 || rank < self.best_rank {
                self.best = self.tstate;
                self.best_rank = rank;
            }
        } else if self.best == 0 {
            self.best = self.tstate;
        }
        None
    }

    /// The answer once the lists are done (up to 3.11; later versions answer at the match).
    #[inline(always)]
    fn verdict(&self, layout: &Layout) -> Found {
        if self.matches == 0 {
            return Found::Stop(StopReason::NoThreadState);
        }
        if self.framed > 1 && !layout.has(flags::CFRAME) {
            return Found::Stop(StopReason::AmbiguousThread);
        }
        Found::State { tstate: self.best, unique: self.matches == 1 }
    }
}

/// Whether `_status.bound_gilstate` is set: exactly one thread state of an OS thread has it (3.12+).
#[inline(always)]
fn is_bound<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, tstate: u64) -> Result<bool, Unreadable> {
    Ok(read_u32(memory, tstate, layout.tstate_status)? & layout.status_bound_gilstate != 0)
}

/// Whether a remembered thread state is (still) the one of the thread with this thread pointer.
///
/// For versions without `bound_gilstate` the caller must also know that no thread and no interpreter has started
/// since the state was found to be unique.
#[inline(always)]
pub fn verify_thread<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    process: &ProcessEntry,
    thread_pointer: u64,
    tstate: u64,
) -> bool {
    let wanted = thread_pointer.wrapping_sub(process.thread_pointer_bias.cast_unsigned());
    read_u64(memory, tstate, layout.tstate_thread_id) == Ok(wanted)
        && (layout.status_bound_gilstate == 0 || is_bound(memory, layout, tstate) == Ok(true))
}

/// State of a thread at the moment of the sample, beside its frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadFacts {
    /// Bits of [`status`].
    pub status: u32,
    /// `PyInterpreterState.id`; -1 when unreadable.
    pub interp_id: i64,
    /// `_code_object_generation`; 0 when absent.
    pub code_generation: u64,
    /// Frame above which the garbage collector runs; 0: it does not, or nobody can tell for whom.
    pub gc_frame: u64,
}

/// Reads the GIL's state and the rest of [`ThreadFacts`].
///
/// `HAS_GIL` is exact: besides `locked` and `last_holder`, which a releasing and a taking thread change one after
/// the other, it asks for the thread's own mark, which is set and cleared while the GIL is held: `_status.holds_gil`
/// (3.13+), `_status.active` (3.12), `gilstate.tstate_current` (before).
#[inline(always)]
pub fn thread_facts<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    process: &ProcessEntry,
    tstate: u64,
) -> ThreadFacts {
    let mut facts = ThreadFacts { status: status::ON_CPU, interp_id: -1, ..ThreadFacts::default() };
    let Ok(interp) = read_u64(memory, tstate, layout.tstate_interp) else {
        facts.status |= status::UNKNOWN;
        return facts;
    };
    if let Ok(id) = read_u64(memory, interp, layout.interp_id) {
        facts.interp_id = id.cast_signed();
    }
    if !layout.has(flags::FREE_THREADED) {
        match holds_gil(memory, layout, process, tstate, interp) {
            Ok(true) => facts.status |= status::HAS_GIL,
            Ok(false) => {}
            Err(Unreadable) => facts.status |= status::UNKNOWN,
        }
    }
    let main = if Layout::present(layout.interp_threads_main) {
        read_u64(memory, interp, layout.interp_threads_main) == Ok(tstate)
    } else {
        let thread_id = read_u64(memory, tstate, layout.tstate_thread_id);
        thread_id.is_ok() && read_u64(memory, process.runtime, layout.runtime_main_thread) == thread_id
    };
    if main {
        facts.status |= status::MAIN_THREAD;
    }
    if Layout::present(layout.interp_code_generation) {
        facts.code_generation = read_u64(memory, interp, layout.interp_code_generation).unwrap_or(0);
    }
    if has_exception(memory, layout, process, tstate) {
        facts.status |= status::HAS_EXCEPTION;
    }
    if facts.status & status::HAS_GIL == 0
        && Layout::present(layout.tstate_gil_requested)
        && !layout.has(flags::FREE_THREADED)
        && read_u32(memory, tstate, layout.tstate_gil_requested).unwrap_or(0) != 0
    {
        facts.status |= status::GIL_REQUESTED;
    }
    facts.gc_frame = gc_frame(memory, layout, process, tstate, interp, facts.status);
    if facts.gc_frame != 0 {
        facts.status |= status::GC;
    }
    facts
}

/// Whether an exception is being raised, or handled by the thread outside of generators: what CPython 3.15's profiler
/// asks (`Modules/_remote_debugging/threads.c`, `unwind_stack_for_thread`).
#[inline(always)]
fn has_exception<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, process: &ProcessEntry, tstate: u64) -> bool {
    let raised = read_u64(memory, tstate, layout.tstate_current_exception).unwrap_or(0);
    let handled = read_u64(memory, tstate, layout.tstate_exc_state.wrapping_add(layout.exc_value)).unwrap_or(0);
    // Where an exception has been handled before, 3.11 and 3.12 leave `None` (`POP_EXCEPT` in `Python/bytecodes.c`).
    raised != 0 || (handled != 0 && handled != process.none)
}

/// The frame above which the collector runs.
///
/// 3.15 publishes it. Before, it is the innermost frame of the thread that holds the GIL while a collection runs:
/// exact but for finalizers, which are Python code with the collector below them. Free-threaded builds before 3.15 let
/// other threads run during parts of a collection, and do not tell whose it is.
#[inline(always)]
fn gc_frame<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    process: &ProcessEntry,
    tstate: u64,
    interp: u64,
    status: u32,
) -> u64 {
    let collecting = if Layout::present(layout.runtime_gc_collecting) {
        read_u32(memory, process.runtime, layout.runtime_gc_collecting)
    } else {
        read_u32(memory, interp, layout.interp_gc_collecting)
    };
    if collecting.unwrap_or(0) == 0 {
        return 0;
    }
    if Layout::present(layout.interp_gc_frame) {
        return read_u64(memory, interp, layout.interp_gc_frame).unwrap_or(0);
    }
    if status & status::HAS_GIL == 0 {
        return 0;
    }
    innermost_frame(memory, layout, tstate).unwrap_or(0)
}

#[inline(always)]
fn holds_gil<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    process: &ProcessEntry,
    tstate: u64,
    interp: u64,
) -> Result<bool, Unreadable> {
    if Layout::present(layout.tstate_holds_gil) {
        return Ok(read_u32(memory, tstate, layout.tstate_holds_gil)? != 0);
    }
    if layout.status_holds_gil != 0 {
        return Ok(read_u32(memory, tstate, layout.tstate_status)? & layout.status_holds_gil != 0);
    }
    let gil = if Layout::present(layout.interp_ceval_gil) {
        if read_u32(memory, tstate, layout.tstate_status)? & layout.status_active == 0 {
            return Ok(false);
        }
        read_u64(memory, interp, layout.interp_ceval_gil)?
    } else {
        if read_u64(memory, process.runtime, layout.runtime_tstate_current)? != tstate {
            return Ok(false);
        }
        process.runtime.wrapping_add(u64::from(layout.runtime_gil))
    };
    // `locked` is -1 before the GIL exists.
    Ok(read_u32(memory, gil, layout.gil_locked)? == 1 && read_u64(memory, gil, layout.gil_last_holder)? == tstate)
}

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
    pub frame: u64,
    /// `tstate.base_frame` (3.15+): the chain's root sentinel; 0: none.
    pub base_frame: u64,
    /// Frames stored so far.
    pub stored: u32,
    /// Shim frames passed since the frame stored last.
    pub shims: u32,
    /// Frame above which the garbage collector runs ([`ThreadFacts::gc_frame`]); 0: none.
    pub gc_frame: u64,
    /// [`frame_flags::GC`] once that frame has been met and until the next one is stored, else 0.
    pub gc: u32,
    /// Whether each frame's opcode is read: 0 or 1.
    pub opcodes: u32,
}

impl FrameWalk {
    /// Walks up to [`PY_FRAMES_PER_STEP`] frames. `None`: call again.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "a BPF program has its scratch space in maps, not in one structure")]
    pub fn step<M: UserMemory + ?Sized, S: FrameSink>(
        &mut self,
        memory: &M,
        layout: &Layout,
        code_type: u64,
        seed: u64,
        frame_buffer: &mut FrameBuffer,
        code_buffer: &mut CodeBuffer,
        sink: &mut S,
    ) -> Option<StopReason> {
        let mut steps = 0;
        while steps < PY_FRAMES_PER_STEP {
            steps += 1;
            // The state goes through memory at each turn: kept in registers, it would make every path of one turn a
            // state of its own for the verifier in the next.
            let this = core::hint::black_box(&mut *self);
            if this.frame == 0 || this.frame == this.base_frame {
                return Some(if this.stored == 0 { StopReason::NoFrame } else { StopReason::Complete });
            }
            if frame_buffer.fill(memory, this.frame, layout.frame_read).is_err() {
                return Some(StopReason::UnreadableFrame);
            }
            let previous = frame_buffer.u64(layout.frame_previous);
            let owner =
                if Layout::present(layout.frame_owner) { u32::from(frame_buffer.u8(layout.frame_owner)) } else { 0 };
            if this.frame == this.gc_frame {
                this.gc = u32::from(frame_flags::GC);
            }
            let last = (this.stored as usize).wrapping_sub(1);
            if owner >= layout.owner_shim_min {
                if last < MAX_PY_FRAMES {
                    sink.mark_entry(last);
                }
                this.shims = this.shims.wrapping_add(1);
                this.frame = previous;
                continue;
            }
            if this.stored as usize >= MAX_PY_FRAMES {
                return Some(StopReason::TooDeep);
            }
            let code = frame_buffer.u64(layout.frame_code) & !u64::from(layout.stackref_tag_mask);
            let identity = match code_identity(memory, layout, seed, code, code_buffer) {
                Ok(identity) => identity,
                Err(reason) => return Some(reason),
            };
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
            if this.opcodes != 0 {
                opcode = read_u8(memory, frame_buffer.u64(layout.frame_instr)).unwrap_or(255);
            }
            let mut flags = this.gc as u8;
            if owner == layout.owner_generator {
                flags |= frame_flags::GENERATOR;
            }
            if Layout::present(layout.frame_is_entry) && frame_buffer.u8(layout.frame_is_entry) != 0 {
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
            );
            this.stored += 1;
            this.shims = 0;
            this.gc = 0;
            this.frame = previous;
        }
        None
    }
}

/// Whether a chain that was walked to its end can be believed, by its innermost and its outermost frame.
///
/// An inlined call publishes its frame before `previous` is written (3.11.7's `CALL_PY_EXACT_ARGS` as compiled: 9
/// instructions). A leaf that has run nothing may be such a frame, and nothing tells a stale `previous` (3.11, 3.12);
/// and C entered the evaluator for the outermost frame of every whole stack, so a chain that ends elsewhere was read
/// while its leaf was being linked. `dump` asks; the kernel side does not yet: with this test the verifiers of 6.18 and
/// 7.2 took the walk's program for too large.
#[inline(always)]
#[must_use]
pub fn is_linked(layout: &Layout, leaf: &RawFrame, root: &RawFrame) -> bool {
    if layout.has(flags::FRAME_OBJECTS) {
        return true;
    }
    root.flags & frame_flags::ENTRY != 0 && !(layout.has(flags::PREV_INSTR) && leaf.lasti < 0)
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
