//! The `PyThreadState` of the interrupted thread, out of all in the process.

use super::buffer::{SlotBuffer, ThreadBuffer};
use super::memory::{Unreadable, UserMemory, read_u32, read_u64};
use super::owner::{OwnStack, StackScan, is_in_slots, is_root_cframe};
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
    /// Its C stack.
    pub stack: OwnStack,
    /// Interpreter whose list is being walked.
    pub interp: u64,
    /// Thread state to look at next; 0: the list is done.
    pub tstate: u64,
    /// `gilstate.tstate_current` (up to 3.11).
    pub current: u64,
    /// The best of those that run something, as far as can be told on the thread's stack.
    pub best: u64,
    /// Where on the C stack it does: what lies lower is the inner one. Where that is not known, address of its frame.
    pub best_rank: u64,
    /// The best of those that run nothing.
    pub idle: u64,
    /// States that carry the thread's id.
    pub matches: u32,
    /// States that `best` is one of.
    pub framed: u32,
    /// States that carry the thread's id and run on another stack, or on one that is not known.
    pub elsewhere: u32,
    /// Interpreters so far.
    pub interpreters: u32,
    /// 1 when the next state to look at is one that was found before the search was broken off.
    pub detour: u32,
    /// States of other threads that the stack seems to refer to (3.8, 3.9).
    pub foreign: u32,
    /// The one after it.
    pub after: u64,
    /// Where the stack refers to the frame of a state (3.8, 3.9).
    pub scan: StackScan,
}

/// What a search step found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The bound on steps was reached: call again.
    More,
    /// [`ThreadSearch::scan`] is to be done ([`StackScan::go_on`], [`StackScan::PIECES`] times), then call again.
    Scan,
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
    /// Starts a search for a thread; `forked`: its process has [`flags::FORKED`](crate::process::flags::FORKED).
    ///
    /// # Errors
    /// [`StopReason::RuntimeNotInitialized`] or [`StopReason::UnreadableThread`].
    #[inline(always)]
    pub fn start<M: UserMemory + ?Sized>(
        memory: &M,
        layout: &Layout,
        process: &ProcessEntry,
        wanted: ThreadPointer,
        stack: OwnStack,
        forked: bool,
    ) -> Result<Self, StopReason> {
        let unreadable = |_| StopReason::UnreadableThread;
        let interp = match newest_interpreter(memory, layout, process.runtime) {
            Ok(interp) if interp != 0 => interp,
            Err(Unreadable) if forked => return Err(StopReason::UnreadableThread),
            // A page of `_PyRuntime` that cannot be read has not been touched yet, as a rule.
            _ => return Err(StopReason::RuntimeNotInitialized),
        };
        let mut search = Self {
            wanted,
            stack,
            interp,
            interpreters: 1,
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
        if !is_state || earlier.matches > 1 || earlier.framed > 1 || earlier.wanted != self.wanted {
            return;
        }
        let found = if earlier.best != 0 { earlier.best } else { earlier.idle };
        let still = || read_u64(memory, found, layout.tstate_thread_id).is_ok_and(|id| self.wanted.is_of(id));
        if found != 0 && !still() {
            return;
        }
        self.interp = earlier.interp;
        self.interpreters = earlier.interpreters;
        self.tstate = earlier.tstate;
        if found != 0 {
            // Weighed anew, for it may run elsewhere by now, or nothing any more.
            (self.tstate, self.after, self.detour) = (found, earlier.tstate, 1);
        }
    }

    /// Looks at up to [`THREADS_PER_STEP`] thread states.
    pub fn step<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout, slots: &SlotBuffer) -> Found {
        let mut looks = (0..THREADS_PER_STEP).map(|_| self.look(memory, layout, slots));
        looks.find(|found| *found != Found::More).unwrap_or(Found::More)
    }

    /// Looks at one thread state, or at the end of an interpreter's list.
    #[inline(always)]
    pub fn look<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout, slots: &SlotBuffer) -> Found {
        if self.tstate == 0 {
            match read_u64(memory, self.interp, layout.interp_next) {
                Ok(0) => return self.verdict(layout),
                Ok(next) => {
                    self.interp = next;
                    self.interpreters += 1;
                }
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
        if let Some(found) = self.weigh(memory, layout, self.wanted.is_of(thread_id), slots) {
            return found;
        }
        if self.detour != 0 {
            self.detour = 0;
            self.tstate = self.after;
            return Found::More;
        }
        let Ok(next) = read_u64(memory, self.tstate, layout.tstate_next) else {
            return Found::Stop(StopReason::UnreadableThread);
        };
        // Whoever has the memory of a state that was just freed may have a zero there: that ends no list.
        if next == 0 && read_u64(memory, self.tstate, layout.tstate_interp) != Ok(self.interp) {
            return Found::Stop(StopReason::UnreadableThread);
        }
        self.tstate = next;
        Found::More
    }

    /// Weighs a thread state; `own`: it carries the thread's id. An answer ends the search.
    #[inline(always)]
    fn weigh<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        own: bool,
        slots: &SlotBuffer,
    ) -> Option<Found> {
        let weighed = if Layout::present(layout.tstate_cframe) && self.stack.is_known() {
            self.weigh_cframe(memory, layout, own)
        } else if layout.status_bound_gilstate != 0 {
            return self.weigh_bound(memory, layout, own, slots);
        } else if !layout.has(flags::CFRAME) && self.stack.is_known() {
            return self.weigh_frame_object(memory, layout, own);
        } else if own {
            self.weigh_id(memory, layout)
        } else {
            Ok(())
        };
        weighed.is_err().then_some(Found::Stop(StopReason::UnreadableThread))
    }

    /// 3.10 to 3.12: on whose C stack the `cframe` lies.
    #[inline(always)]
    fn weigh_cframe<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        own: bool,
    ) -> Result<(), Unreadable> {
        let cframe = read_u64(memory, self.tstate, layout.tstate_cframe)?;
        self.matches += u32::from(own);
        if is_root_cframe(self.tstate, cframe) {
            let bound = layout.status_bound_gilstate != 0 && is_bound(memory, layout, self.tstate)?;
            if own && (self.idle == 0 || bound) {
                self.idle = self.tstate;
            }
        } else if self.stack.has(cframe) {
            self.runs(cframe);
        } else if own {
            self.elsewhere += 1;
        }
        Ok(())
    }

    /// 3.13+: the one that the thread has bound, which its C library tells, else the one with its id that is bound.
    #[inline(always)]
    fn weigh_bound<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        own: bool,
        slots: &SlotBuffer,
    ) -> Option<Found> {
        let attached = is_in_slots(slots, self.tstate);
        if !own && !attached {
            return None;
        }
        match is_bound(memory, layout, self.tstate) {
            Ok(true) if attached => return Some(Found::State { tstate: self.tstate, unique: own }),
            Ok(true) => {
                self.matches += 1;
                self.runs(self.tstate);
            }
            Ok(false) => {}
            Err(Unreadable) => return Some(Found::Stop(StopReason::UnreadableThread)),
        }
        None
    }

    /// 3.8 and 3.9: whose frame the stack refers to.
    #[inline(always)]
    fn weigh_frame_object<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout, own: bool) -> Option<Found> {
        // Of other threads' states, that of the GIL's holder, and those of interpreters other than the first, which stands
        // last: up to 3.12 they are run by whoever runs code in them.
        if !own && self.tstate != self.current && read_u64(memory, self.interp, layout.interp_next).unwrap_or(0) == 0 {
            return None;
        }
        let Ok(frame) = read_u64(memory, self.tstate, layout.tstate_frame) else {
            return Some(Found::Stop(StopReason::UnreadableThread));
        };
        if frame != 0 && self.scan.frame != frame {
            self.scan.begin(frame);
            return Some(Found::Scan);
        }
        self.matches += u32::from(own);
        if frame != 0 && self.scan.place != 0 && !own {
            // A word that an earlier call left on the stack refers to a frame object as well, whoever has that by now: this
            // is a reason to doubt, and no proof. (One of some thousand samples of threads that start and end all the time.)
            self.foreign += 1;
        } else if frame != 0 && self.scan.place != 0 {
            self.runs(self.scan.place);
        } else if own && frame != 0 {
            self.elsewhere += 1;
        } else if own && self.idle == 0 {
            self.idle = self.tstate;
        }
        None
    }

    /// Up to 3.11, where the stack is not known: the one with a frame. (3.11: whose `cframe` lies lower.)
    #[inline(always)]
    fn weigh_id<M: UserMemory + ?Sized>(&mut self, memory: &M, layout: &Layout) -> Result<(), Unreadable> {
        self.matches += 1;
        let rank = read_u64(memory, self.tstate, layout.tstate_frame)?;
        let mut frame = rank;
        if layout.has(flags::CFRAME) && frame != 0 {
            frame = read_u64(memory, frame, layout.cframe_current_frame)?;
        }
        if frame != 0 {
            self.runs(rank);
        } else if self.idle == 0 {
            self.idle = self.tstate;
        }
        Ok(())
    }

    /// The present state may run on the thread's stack, at this place of it.
    #[inline(always)]
    fn runs(&mut self, rank: u64) {
        self.framed += 1;
        if self.framed == 1 || rank < self.best_rank {
            self.best = self.tstate;
            self.best_rank = rank;
        }
    }

    /// The answer once the lists are done.
    #[inline(always)]
    fn verdict(&self, layout: &Layout) -> Found {
        // Up to 3.11 nothing shows later that the thread has gone over to another interpreter's.
        let one = self.matches == 1 && (self.interpreters == 1 || layout.status_bound_gilstate != 0);
        if self.framed > 1 {
            let by_stack =
                self.stack.is_known() && (Layout::present(layout.tstate_cframe) || layout.status_bound_gilstate == 0);
            if !by_stack {
                return Found::Stop(StopReason::AmbiguousThread);
            }
        }
        if self.foreign != 0 {
            return Found::Stop(StopReason::AmbiguousThread);
        }
        if self.best != 0 {
            return Found::State {
                tstate: self.best,
                unique: one && self.framed == 1 && self.idle | u64::from(self.elsewhere) == 0,
            };
        }
        if self.idle != 0 {
            return Found::State { tstate: self.idle, unique: one };
        }
        Found::Stop(if self.elsewhere != 0 { StopReason::UnknownThread } else { StopReason::NoThreadState })
    }
}

/// The first of a runtime's list of interpreters, 0 where there is none yet.
///
/// A forked child takes all but the main interpreter out of the list, which it empties first
/// (`_PyInterpreterState_DeleteExceptMain` in `Python/pystate.c`); a page of its own, which it is given when it first writes to
/// the main one's, comes between. So an empty list with a main interpreter has that one.
///
/// # Errors
/// [`Unreadable`]: a page of `_PyRuntime` that has not been touched yet, as a rule.
#[inline(always)]
pub fn newest_interpreter<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    runtime: u64,
) -> Result<u64, Unreadable> {
    match read_u64(memory, runtime, layout.runtime_interpreters_head)? {
        0 => read_u64(memory, runtime, layout.runtime_interpreters_head.wrapping_add(Layout::MAIN_AFTER_HEAD)),
        head => Ok(head),
    }
}

/// Whether `_status.bound_gilstate` is set (3.12+): of the states that a thread runs, one has it.
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

const _: () = assert!(core::mem::size_of::<ThreadPointer>() == 16);
const _: () = assert!(core::mem::size_of::<ThreadSearch>() == 136);
