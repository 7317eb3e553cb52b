//! What a thread is doing, beside its frames: the GIL, exceptions, the garbage collector.

use super::buffer::{InterpBuffer, ThreadBuffer};
use super::frames::innermost_frame;
use super::memory::{Unreadable, UserMemory, read_u32, read_u64};
use crate::event::status;
use crate::layout::Layout;
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
    /// Frame above which the garbage collector runs; 0: it does not, or nobody can tell for whom.
    pub gc_frame: u64,
}

/// Reads the GIL's state and the rest of [`ThreadFacts`] of the thread whose state [`super::read_thread`] has copied. What
/// there was in `buffer` does not matter.
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
    process: &ProcessEntry,
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
        read_u64(memory, process.runtime, layout.runtime_main_thread) == Ok(thread.u64(layout.tstate_thread_id))
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
    if facts.status & status::HAS_GIL == 0
        && Layout::present(layout.tstate_gil_requested)
        && thread.u32(layout.tstate_gil_requested) != 0
    {
        facts.status |= status::GIL_REQUESTED;
    }
    facts.gc_frame = gc_frame(memory, layout, process, thread, &interp, facts.status);
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
    thread: &ThreadBuffer,
    interp: &Interp<'_>,
    status: u32,
) -> u64 {
    let collecting = if Layout::present(layout.runtime_gc_collecting) {
        read_u32(memory, process.runtime, layout.runtime_gc_collecting)
    } else {
        interp.u32(layout.interp_gc_collecting)
    };
    if collecting.unwrap_or(0) == 0 {
        return 0;
    }
    if Layout::present(layout.interp_gc_frame) {
        return interp.u64(layout.interp_gc_frame).unwrap_or(0);
    }
    if status & status::HAS_GIL == 0 {
        return 0;
    }
    innermost_frame(memory, layout, thread).unwrap_or(0)
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
