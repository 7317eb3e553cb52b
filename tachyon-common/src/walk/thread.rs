//! The `PyThreadState` of the interrupted thread, out of all in the process.

use super::buffer::ThreadBuffer;
use super::memory::{Unreadable, UserMemory, read_u32, read_u64};
use crate::layout::{Layout, flags};
use crate::limits::THREADS_PER_STEP;
use crate::process::ProcessEntry;
use crate::stop::StopReason;

/// A thread's pointer (`fsbase`, `tpidr_el0`), by which its state is known.
///
/// `PyThreadState.thread_id` is `pthread_self()`, the address of the thread's descriptor. On x86-64 the thread pointer is
/// that address. On arm64 it is the descriptor's end (`TLS_DTV_AT_TP`: glibc 2.36 `sysdeps/aarch64/nptl/tls.h`, musl 1.2
/// `arch/aarch64/pthread_arch.h`), so they differ by its size: 1,856 bytes in glibc 2.36, some 200 in musl. No two
/// descriptors overlap and each lies in a mapping or on a stack of its own, so the one that ends at the pointer is the one
/// that begins less than a page before it. Nothing needs to be learnt, and nothing learnt can be wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ThreadPointer {
    /// The register.
    pub address: u64,
    /// Most bytes that it may lie above the `thread_id`: 0 on x86-64, [`THREAD_POINTER_REACH`] on arm64.
    pub reach: u64,
}

impl ThreadPointer {
    /// Whether this is the pointer of the thread with that `thread_id`.
    #[inline(always)]
    #[must_use]
    pub const fn is_of(self, thread_id: u64) -> bool {
        self.address.wrapping_sub(thread_id) <= self.reach
    }
}

/// [`ThreadPointer::reach`] of arm64: more than any libc's descriptor has (`struct pthread`), less than the smallest
/// distance of two (a page).
pub const THREAD_POINTER_REACH: u32 = 4095;

/// Where the search for a thread's state stands.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ThreadSearch {
    /// The thread looked for.
    pub wanted: ThreadPointer,
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
    /// Starts a search for a thread.
    ///
    /// # Errors
    /// [`StopReason::RuntimeNotInitialized`] or [`StopReason::UnreadableThread`].
    #[inline(always)]
    pub fn start<M: UserMemory + ?Sized>(
        memory: &M,
        layout: &Layout,
        process: &ProcessEntry,
        wanted: ThreadPointer,
    ) -> Result<Self, StopReason> {
        let unreadable = |_| StopReason::UnreadableThread;
        // A page of `_PyRuntime` that cannot be read has not been touched yet, as a rule.
        let interp = read_u64(memory, process.runtime, layout.runtime_interpreters_head).unwrap_or(0);
        if interp == 0 {
            return Err(StopReason::RuntimeNotInitialized);
        }
        let mut search = Self {
            wanted,
            interp,
            tstate: read_u64(memory, interp, layout.interp_threads_head).map_err(unreadable)?,
            ..Self::default()
        };
        if Layout::present(layout.runtime_tstate_current) {
            search.current = read_u64(memory, process.runtime, layout.runtime_tstate_current).map_err(unreadable)?;
        }
        Ok(search)
    }

    /// Goes on with a search that an earlier sample of the same thread had to break off: this one is new, and is put where
    /// `earlier` stopped if that still makes sense. A thread state that was freed since then shows in the interpreter it
    /// names; a match must still be one, and several would have to be weighed anew, so then it starts over.
    #[inline(always)]
    pub fn go_on_from<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout, earlier: &Self) {
        let is_state = earlier.tstate == 0
            || read_u64(memory, earlier.tstate, layout.tstate_interp).is_ok_and(|interp| interp == earlier.interp);
        if !is_state || earlier.matches > 1 || earlier.wanted != self.wanted {
            return;
        }
        if earlier.matches == 1 {
            let still = read_u64(memory, earlier.best, layout.tstate_thread_id).is_ok_and(|id| self.wanted.is_of(id));
            let Ok(rank) = read_u64(memory, earlier.best, layout.tstate_frame) else { return };
            if !still {
                return;
            }
            self.best = earlier.best;
            self.best_rank = rank;
            self.matches = 1;
            self.framed = earlier.framed;
        }
        self.interp = earlier.interp;
        self.tstate = earlier.tstate;
    }

    /// Looks at up to [`THREADS_PER_STEP`] thread states.
    pub fn step<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) -> Found {
        let mut looks = (0..THREADS_PER_STEP).map(|_| self.look(memory, layout));
        looks.find(|found| *found != Found::More).unwrap_or(Found::More)
    }

    /// Looks at one thread state, or at the end of an interpreter's list.
    #[inline(always)]
    pub fn look<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) -> Found {
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
            return Found::More;
        }
        let Ok(thread_id) = read_u64(memory, self.tstate, layout.tstate_thread_id) else {
            return Found::Stop(StopReason::UnreadableThread);
        };
        if self.wanted.is_of(thread_id)
            && let Some(found) = self.weigh(memory, layout)
        {
            return found;
        }
        match read_u64(memory, self.tstate, layout.tstate_next) {
            Ok(next) => self.tstate = next,
            Err(Unreadable) => return Found::Stop(StopReason::UnreadableThread),
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

/// Copies a thread state: what is asked of it afterwards, in one read.
///
/// # Errors
/// [`Unreadable`].
#[inline(always)]
pub fn read_thread<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    tstate: u64,
    into: &mut ThreadBuffer,
) -> Result<(), Unreadable> {
    into.fill(memory, tstate, u32::from(layout.tstate_read))
}

/// Whether a remembered thread state, which [`read_thread`] has copied, is (still) the one of a thread.
///
/// For versions without `bound_gilstate` the caller must also know that no thread and no interpreter has started
/// since the state was found to be unique.
#[inline(always)]
#[must_use]
pub fn verify_thread(layout: &Layout, wanted: ThreadPointer, thread: &ThreadBuffer) -> bool {
    wanted.is_of(thread.u64(layout.tstate_thread_id))
        && (layout.status_bound_gilstate == 0 || thread.u32(layout.tstate_status) & layout.status_bound_gilstate != 0)
}
