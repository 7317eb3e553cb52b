//! Rules of arm64, and a step by one.
//!
//! A call leaves the return address in `x30`, and a function that calls another saves it, most often in a pair with `x29`.
//! Compilers put that pair at the frame's bottom (GCC) or at its top (LLVM), so a place is counted from either end. A return
//! address may be signed (`paciasp`): its signature is taken off, whether the rules tell of one or not, for an address of
//! user space has no bits there.

use super::{NativeWalk, StackBuffer, Tables, kind};
use crate::stop::StopReason;
use crate::walk::UserMemory;

/// How to find the caller's registers at an instruction of arm64.
///
/// Bits 0–3 are the kind, of [`kind`] those that are here for both processors: [`kind::SP`] and [`kind::FP`] count from
/// `sp` and `x29`. Bits 4–5 say what was [`saved`], bit 6 from which end its place is counted, bits 7–15 are that place,
/// bits 16–31 the CFA's offset, both in words of 8 bytes and never negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Rule(pub super::Rule);

/// What a function has saved: bits 4–5 of a [`Rule`].
pub mod saved {
    /// Nothing: `x29` and `x30` are the caller's still.
    pub const NOTHING: u32 = 0;
    /// `x30`.
    pub const LINK: u32 = 1;
    /// `x29`, and `x30` in the word above.
    pub const PAIR: u32 = 2;
    /// `x29`; `x30` is the caller's still.
    pub const FP: u32 = 3;
}

/// Bit 6 of a [`Rule`]: the place is counted up from the CFA's register, not down from the CFA.
const FROM_REGISTER: u32 = 1 << 6;

/// Furthest place, in words.
const MAX_PLACE: i64 = 511;

/// Largest offset of the CFA, in words: 512 KiB.
const MAX_OFFSET: i64 = 65_535;

/// `struct rt_sigframe` (`arch/arm64/kernel/signal.c`) lies at `sp`: 128 bytes of `siginfo`, then `ucontext`, whose
/// `uc_mcontext` is at 176 and has the registers from 8 on (`arch/arm64/include/uapi/asm/{ucontext,sigcontext}.h`).
mod frame {
    const REGISTERS: u32 = 128 + 176 + 8;
    pub(super) const FP: u32 = REGISTERS + 29 * 8;
    pub(super) const LINK: u32 = REGISTERS + 30 * 8;
    pub(super) const SP: u32 = REGISTERS + 31 * 8;
    pub(super) const PC: u32 = REGISTERS + 32 * 8;
}

impl Rule {
    /// A function that has saved nothing and not moved the stack pointer.
    pub const LEAF: Self = Self(super::Rule(kind::SP));

    /// A rule of [`kind::SP`] or [`kind::FP`]: CFA = register + `offset`, and what is saved lies at CFA + `place`, both in
    /// bytes. `None` when they do not fit.
    #[must_use]
    pub fn new(kind: u32, offset: i64, saved: u32, place: i64) -> Option<Self> {
        let words = offset / 8;
        if offset % 8 != 0 || place % 8 != 0 || !(0..=MAX_OFFSET).contains(&words) || saved > saved::FP {
            return None;
        }
        let (below, above) = (-(place / 8), words.checked_add(place / 8)?);
        let place = if saved == saved::NOTHING {
            0
        } else if (0..=MAX_PLACE).contains(&below) {
            (below as u32) << 7
        } else if (0..=MAX_PLACE).contains(&above) {
            FROM_REGISTER | (above as u32) << 7
        } else {
            return None;
        };
        Some(Self(super::Rule(kind | saved << 4 | place | (words as u32) << 16)))
    }

    #[inline(always)]
    const fn saved(self) -> u32 {
        (self.0.0 >> 4) & 3
    }

    /// The CFA's offset in bytes.
    #[inline(always)]
    const fn offset(self) -> u64 {
        (self.0.0 >> 16) as u64 * 8
    }

    /// Where what is saved lies, below the CFA, in bytes; it wraps where it lies above.
    #[inline(always)]
    const fn below(self) -> u64 {
        let place = ((self.0.0 >> 7) & 511) as u64 * 8;
        if self.0.0 & FROM_REGISTER == 0 { place } else { self.offset().wrapping_sub(place) }
    }
}

impl NativeWalk {
    /// Steps to the caller by a rule of arm64. `Err` is the end of the walk.
    #[inline(always)]
    pub(super) fn apply_arm64<M: UserMemory + ?Sized, T: Tables>(
        &mut self,
        memory: &M,
        tables: &T,
        stack: &mut StackBuffer,
        rule: Rule,
    ) -> Result<(), StopReason> {
        let kind = rule.0.kind();
        let saved = rule.saved();
        let cfa = if kind == kind::SP {
            if self.sp_lost == 0 {
                self.sp.wrapping_add(rule.offset())
            } else if saved == saved::PAIR {
                // Frame pointers led here, so this one points to its function's pair.
                self.by_frame_pointer += 1;
                self.fp.wrapping_add(rule.below())
            } else {
                return Err(StopReason::NoFramePointer);
            }
        } else if kind == kind::FP {
            self.fp.wrapping_add(rule.offset())
        } else if kind == kind::SIGNAL {
            if self.sp_lost != 0 {
                return Err(StopReason::NoFramePointer);
            }
            let fp = self.stack_word(memory, stack, self.sp, frame::FP)?;
            let link = self.stack_word(memory, stack, self.sp, frame::LINK)?;
            let sp = self.stack_word(memory, stack, self.sp, frame::SP)?;
            self.ip = self.stack_word(memory, stack, self.sp, frame::PC)?;
            (self.fp, self.link, self.sp, self.exact) = (fp, link, sp, 1);
            return Ok(());
        } else if kind == kind::CHAIN {
            return self.follow_frame_pointer(memory, tables, stack);
        } else {
            return Err(self.end(kind));
        };
        let in_memory = saved == saved::LINK || saved == saved::PAIR;
        if !in_memory && self.exact == 0 {
            // It has made a call, so `x30` is not its caller's.
            return Err(StopReason::UnsupportedUnwindRule);
        }
        // A caller's frame lies above, and only that of the interrupted function may have no size: whatever the memory
        // holds, the walk ends.
        if cfa < self.sp || (cfa == self.sp && self.exact == 0) {
            return Err(StopReason::StackNotRising);
        }
        let place = cfa.wrapping_sub(rule.below());
        let mut ip = self.link;
        if in_memory {
            let above = if saved == saved::PAIR { 8 } else { 0 };
            ip = self.stack_word(memory, stack, place, above)?;
        }
        if saved == saved::PAIR || saved == saved::FP {
            self.fp = self.stack_word(memory, stack, place, 0)?;
        }
        self.sp_lost = 0;
        self.arrive(ip & tables.code_mask(), cfa)
    }
}
