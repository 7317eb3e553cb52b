//! What a thread is doing, beside its frames: the GIL, exceptions, the garbage collector.

use super::buffer::{InterpBuffer, ThreadBuffer};
use super::memory::{Unreadable, UserMemory, read_u32, read_u64};
use super::thread::ThreadPointer;
use crate::event::status;
use crate::layout::Layout;
use crate::opaque;
use crate::process::ProcessEntry;

/// State of a thread at the moment of the sample, beside its frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadFacts {
    /// Bits of [`status`].
    pub status: u32,
    /// `PyInterpreterState.id`; -1 when unreadable.
    pub interp_id: i64,
    /// `_code_object_generation`; 0 when absent.
    pub code_generation: u64,
    /// Frame above which the garbage collector runs (3.15+); 0: it does not, or this does not tell.
    pub gc_frame: u64,
}

/// Reads the GIL's state and the rest of [`ThreadFacts`] of the thread with this pointer, whose state
/// [`super::read_thread`] has copied. What there was in `buffer` does not matter.
///
/// `HAS_GIL` is exact: besides `locked` and `last_holder`, which a releasing and a taking thread change one after
/// the other, it asks for the thread's own mark, which is set and cleared while the GIL is held: `_status.holds_gil`
/// (3.13+), `_status.active` (3.12), `gilstate.tstate_current` (before). A free-threaded build has the same mark, and sets
/// it where its GIL was switched on, by `PYTHON_GIL=1` or by an extension that asks for it (`take_gil` in
/// `Python/ceval_gil.c`).
#[inline(always)]
pub fn thread_facts<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    (process, pointer): (&ProcessEntry, ThreadPointer),
    tstate: u64,
    thread: &ThreadBuffer,
    buffer: &mut InterpBuffer,
) -> ThreadFacts {
    let mut facts = ThreadFacts { status: status::ON_CPU, interp_id: -1, ..ThreadFacts::default() };
    let start = thread.u64(layout.tstate_interp).wrapping_add(u64::from(layout.interp_at));
    let read = buffer.fill(memory, start, u32::from(layout.interp_read));
    let interp = Interp { buffer, at: layout.interp_at, read };
    if let Ok(id) = interp.u64(layout.interp_id) {
        facts.interp_id = id.cast_signed();
    }
    match holds_gil(memory, layout, process, (tstate, thread), &interp) {
        Ok(true) => facts.status |= status::HAS_GIL,
        Ok(false) => {}
        Err(Unreadable) => facts.status |= status::UNKNOWN,
    }
    let main = if Layout::present(layout.interp_threads_main) {
        interp.u64(layout.interp_threads_main) == Ok(tstate)
    } else {
        // Not the id in the thread state, which is that of the thread that made it.
        read_u64(memory, process.runtime, layout.runtime_main_thread).is_ok_and(|main| pointer.is_of(main))
    };
    if main {
        facts.status |= status::MAIN_THREAD;
    }
    if Layout::present(layout.interp_code_generation) {
        facts.code_generation = interp.u64(layout.interp_code_generation).unwrap_or(0);
    }
    if has_exception(layout, process, thread) {
        facts.status |= status::HAS_EXCEPTION;
    }
    if Layout::present(layout.tstate_gil_requested) {
        // Who holds it does not ask for it. No branch: the verifier would follow all that comes after for each sum of bits.
        let without = opaque::differ(u64::from(facts.status & status::HAS_GIL), u64::from(status::HAS_GIL));
        let requested = opaque::differ(u64::from(thread.u32(layout.tstate_gil_requested)), 0);
        facts.status |= status::GIL_REQUESTED * (without & requested) as u32;
    }
    facts.gc_frame = gc_frame(layout, &interp);
    if facts.gc_frame != 0 {
        facts.status |= status::GC;
    }
    facts
}

/// The thread's interpreter, of which one read has got what is asked here.
struct Interp<'a> {
    buffer: &'a InterpBuffer,
    /// [`Layout::interp_at`].
    at: u32,
    read: Result<(), Unreadable>,
}

impl Interp<'_> {
    #[inline(always)]
    fn u64(&self, offset: u32) -> Result<u64, Unreadable> {
        self.read.map(|()| self.buffer.u64(offset.wrapping_sub(self.at)))
    }

    #[inline(always)]
    fn u32(&self, offset: u32) -> Result<u32, Unreadable> {
        self.read.map(|()| self.buffer.u32(offset.wrapping_sub(self.at)))
    }
}

/// Whether an exception is being raised, or handled by the thread outside of generators: what CPython 3.15's profiler
/// asks (`Modules/_remote_debugging/threads.c`, `unwind_stack_for_thread`).
#[inline(always)]
fn has_exception(layout: &Layout, process: &ProcessEntry, thread: &ThreadBuffer) -> bool {
    let raised = thread.u64(layout.tstate_current_exception);
    let handled = thread.u64(layout.tstate_exc_state.wrapping_add(layout.exc_value));
    // Where an exception has been handled before, 3.11 and 3.12 leave `None` (`POP_EXCEPT` in `Python/bytecodes.c`).
    raised != 0 || (handled != 0 && handled != process.none)
}

/// The frame above which the collector runs, which 3.15 publishes.
///
/// Before, only `collecting` tells of a collection, and it belongs to the interpreter: a finalizer that lets go of the GIL
/// lets other threads run meanwhile (66 to 79 % of another thread's samples were marked by it, 3.8 to 3.14). There the
/// native stack tells, which has the collector where it stands.
#[inline(always)]
fn gc_frame(layout: &Layout, interp: &Interp<'_>) -> u64 {
    if !Layout::present(layout.interp_gc_frame) || interp.u32(layout.interp_gc_collecting).unwrap_or(0) == 0 {
        return 0;
    }
    interp.u64(layout.interp_gc_frame).unwrap_or(0)
}

#[inline(always)]
fn holds_gil<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    process: &ProcessEntry,
    (tstate, thread): (u64, &ThreadBuffer),
    interp: &Interp<'_>,
) -> Result<bool, Unreadable> {
    if Layout::present(layout.tstate_holds_gil) {
        return Ok(thread.u32(layout.tstate_holds_gil) != 0);
    }
    if layout.status_holds_gil != 0 {
        return Ok(thread.u32(layout.tstate_status) & layout.status_holds_gil != 0);
    }
    let gil = if Layout::present(layout.interp_ceval_gil) {
        if thread.u32(layout.tstate_status) & layout.status_active == 0 {
            return Ok(false);
        }
        interp.u64(layout.interp_ceval_gil)?
    } else {
        if read_u64(memory, process.runtime, layout.runtime_tstate_current)? != tstate {
            return Ok(false);
        }
        process.runtime.wrapping_add(u64::from(layout.runtime_gil))
    };
    // `locked` is -1 before the GIL exists.
    Ok(read_u32(memory, gil, layout.gil_locked)? == 1 && read_u64(memory, gil, layout.gil_last_holder)? == tstate)
}
