//! What proves that a thread state is the interrupted thread's: its C stack, and what its C library keeps for it.
//!
//! `PyThreadState.thread_id` is that of the thread that made the state. Another one may run it.

use super::buffer::{Buffer, SlotBuffer, ThreadBuffer};
use super::memory::UserMemory;
use super::thread::ThreadPointer;
use crate::layout::Layout;
use crate::limits::SLOTS_READ;
use crate::opaque;
use crate::unwind::StackBuffer;

/// The interrupted thread's C stack, as far as it is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct OwnStack {
    /// The stack pointer; 0: not known.
    pub sp: u64,
    /// An address past its end that is before any other thread's.
    pub end: u64,
}

impl OwnStack {
    /// The stack of the thread with this pointer and stack pointer.
    ///
    /// glibc and musl put the descriptor of a thread that they start at the upper end of its stack. The first thread's
    /// lies elsewhere, below its stack, and no other stack lies above that one.
    #[inline(always)]
    #[must_use]
    pub const fn of(pointer: ThreadPointer, sp: u64) -> Self {
        Self { sp, end: if pointer.address > sp { pointer.address } else { u64::MAX } }
    }

    /// Whether anything is known.
    #[inline(always)]
    #[must_use]
    pub const fn is_known(self) -> bool {
        self.sp != 0
    }

    /// Whether an address lies on it.
    #[inline(always)]
    #[must_use]
    pub const fn has(self, address: u64) -> bool {
        address.wrapping_sub(self.sp) < self.end.wrapping_sub(self.sp)
    }
}

/// Whether `cframe` is the one in the thread state itself: nothing runs with it.
#[inline(always)]
pub(super) const fn is_root_cframe(tstate: u64, cframe: u64) -> bool {
    // No thread state of those versions is larger (3.11.7: 360 bytes).
    cframe.wrapping_sub(tstate) < 512
}

/// Whether a thread state, which [`super::read_thread`] has copied, runs nothing that is on another thread's stack, where
/// its `cframe` tells (3.10 to 3.12).
#[inline(always)]
#[must_use]
pub fn runs_here(layout: &Layout, tstate: u64, stack: OwnStack, thread: &ThreadBuffer) -> bool {
    if !Layout::present(layout.tstate_cframe) || !stack.is_known() {
        return true;
    }
    let cframe = thread.u64(layout.tstate_cframe);
    stack.has(cframe) || is_root_cframe(tstate, cframe)
}

/// Whether the native stack is where the innermost entry frame of a Python stack lies, if there is one (3.13+; the entry
/// frame is a local variable of `_PyEval_EvalFrameDefault` in `Python/ceval.c`). 0: the walk met none.
#[inline(always)]
#[must_use]
pub fn entered_here(layout: &Layout, stack: OwnStack, entry_frame: u64) -> bool {
    Layout::present(layout.tstate_cframe) || entry_frame == 0 || !stack.is_known() || stack.has(entry_frame)
}

/// `struct pthread.specific_1stblock` of glibc on x86-64 (`nptl/descr.h`; 2.36, and as long as that processor has had it).
const SLOTS_X86_64: u64 = 0x310;
/// The same on arm64, from the thread pointer downwards: the descriptor of 1,856 bytes (2.36) ends there.
const SLOTS_ARM64: u64 = 1856 - 0x110;

/// Reads what the C library keeps for the thread, where CPython has the thread state that the thread has attached last,
/// with or without the GIL (`bind_gilstate_tstate` in `Python/pystate.c`).
///
/// 3.12 to 3.14 have it under a key of `pthread_setspecific` (`autoTSSkey`), of which glibc has the first 32 in the
/// descriptor. From 3.15 on it is a thread-local variable (`_Py_tss_gilstate`): those of the executable lie next to the
/// thread pointer, and behind them those of the libraries that it was started with. Elsewhere lies something else, which
/// is no thread state's address.
#[inline(always)]
pub fn read_slots<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, pointer: ThreadPointer, into: &mut SlotBuffer) {
    let x86_64 = pointer.reach == 0;
    let start = match (x86_64, layout.version_hex >= 0x030f_0000) {
        (true, false) => pointer.address.wrapping_add(SLOTS_X86_64),
        (false, false) => pointer.address.wrapping_sub(SLOTS_ARM64),
        (true, true) => pointer.address.wrapping_sub(SLOTS_READ as u64),
        (false, true) => pointer.address,
    };
    into.fill_or_zero::<M, SLOTS_READ>(memory, start);
}

/// Whether a thread state is among those values.
#[inline(always)]
pub(super) fn is_in_slots(slots: &SlotBuffer, tstate: u64) -> bool {
    let mut at = 0;
    let mut differs = u64::MAX;
    while at < SLOTS_READ as u32 {
        differs = opaque::word(differs & difference_of_eight(slots, at, tstate));
        at += 64;
    }
    differs >> 63 == 0
}

/// A word with its sign set where none of the eight words at an offset, a multiple of 64, has this value: no branch, for the verifier
/// would follow each.
#[inline(always)]
fn difference_of_eight<const BYTES: usize, const WORDS: usize>(
    words: &Buffer<BYTES, WORDS>,
    at: u32,
    value: u64,
) -> u64 {
    // The compiler must not drop the mask, without which 7.2 refused the program.
    let at = opaque::word(u64::from(at)) as u32;
    let (mut nth, mut differs) = (0, u64::MAX);
    while nth < 8 {
        let difference = words.nth_of::<8>(at, nth) ^ value;
        differs &= difference | difference.wrapping_neg();
        nth += 1;
    }
    differs
}

/// A look for where a thread's stack refers to a frame object first, from its stack pointer on.
///
/// Up to 3.9 nothing in a thread state tells on whose stack its frames run, but an evaluator has the address of the frame
/// that it runs in a register, which its callees save on the stack, or on the stack itself.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct StackScan {
    /// The frame.
    pub frame: u64,
    /// Where it is referred to; 1: in a register; 0: nowhere.
    pub place: u64,
    /// The piece of the stack to look at next.
    piece: u32,
    _pad: u32,
}

impl StackScan {
    /// Pieces of 1 KiB that are looked at: the callees of an evaluator in C.
    pub const PIECES: u32 = 16;

    /// A look for a frame, in the registers at first.
    #[inline(always)]
    pub(super) fn begin(&mut self, frame: u64) {
        *self = Self { frame, ..Self::default() };
    }

    /// Looks at the next piece, and at the registers where it is the first.
    #[inline(always)]
    pub fn go_on<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        stack: OwnStack,
        registers: &[u64; 16],
        buffer: &mut StackBuffer,
    ) {
        if self.place != 0 || self.piece >= Self::PIECES {
            return;
        }
        // Aligned, so that no piece is part of two pages.
        let start = (stack.sp & !1023).wrapping_add(u64::from(self.piece) * 1024);
        self.piece += 1;
        // Pages of a large variable may never have been written.
        if buffer.fill(memory, start, 1024).is_err() {
            return;
        }
        // What is found is kept in memory: for the verifier all turns end alike.
        let this = opaque::place(&mut *self);
        let mut eight = 16;
        while eight > 0 {
            eight -= 1;
            memory.look_at_eight(this, stack, buffer, eight);
        }
        let mut register = 0;
        while register < 16 {
            if registers[register] == this.frame {
                this.place = 1;
            }
            register += 1;
        }
    }

    /// Looks at eight words of the piece that was read last. Only to be called by [`UserMemory::look_at_eight`].
    #[inline(always)]
    pub fn look_at_eight(&mut self, stack: OwnStack, buffer: &StackBuffer, eight: u32) {
        let piece = u64::from(self.piece.wrapping_sub(1));
        let start = (stack.sp & !1023).wrapping_add(piece * 1024).wrapping_add(u64::from(eight) * 64);
        let mut word = 8;
        while word > 0 {
            word -= 1;
            let here = start.wrapping_add(u64::from(word) * 8);
            if buffer.u64(eight.wrapping_mul(64).wrapping_add(word * 8)) == self.frame && here >= stack.sp {
                self.place = here;
            }
        }
    }
}
const _: () = assert!(core::mem::size_of::<OwnStack>() == 16 && core::mem::size_of::<StackScan>() == 24);
/// How many of the words on a thread's stack, from an address on, are addresses in the 256 bytes from a structure on: a function
/// that has its frame there was given that. [`REFERRED_WORDS`] words are looked at, and no second page.
///
/// Without a branch in the loop: a verifier would look at each path through all its turns.
#[inline(always)]
pub fn references<M: UserMemory + ?Sized>(memory: &M, buffer: &mut StackBuffer, from: u64, structure: u64) -> u64 {
    let room = PAGE - (from & (PAGE - 1));
    let len = if room < REFERRED_WORDS as u64 * 8 { room } else { REFERRED_WORDS as u64 * 8 };
    if from & 7 != 0 || buffer.fill(memory, from, len as u32).is_err() {
        return 0;
    }
    let (mut found, mut word) = (0, 0);
    while word < len as u32 / 8 {
        let far = opaque::word(buffer.u64(word * 8).wrapping_sub(structure) >> 8);
        // 1 where it is 0.
        found += 1 - ((far | far.wrapping_neg()) >> 63);
        word += 1;
        if word == REFERRED_WORDS as u32 {
            break;
        }
    }
    found
}

/// Words that [`references`] looks at.
pub const REFERRED_WORDS: usize = 24;

/// What no page is smaller than.
const PAGE: u64 = 4096;
