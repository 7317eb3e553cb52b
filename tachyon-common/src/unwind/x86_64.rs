//! Rules of x86-64, and a step by one.

use super::{NativeWalk, Rule, StackBuffer, kind};
use crate::stop::StopReason;
use crate::walk::UserMemory;

/// Where `rbp` was saved: bits 4–13 of a [`Rule`]. Other values are words below the CFA.
pub mod saved {
    /// Nowhere: it still holds the caller's value.
    pub const UNCHANGED: u32 = 0;
    /// Where `rbp` points to (functions that align their stack).
    pub const AT_FP: u32 = 1023;
    /// Furthest place below the CFA, in words.
    pub const MAX: u32 = 1022;
}

/// Where the registers of another frame lie, in bytes from some place.
pub struct Saved {
    /// `rbp`.
    pub fp: u64,
    /// `rsp`, and behind it `rip`.
    pub sp: u64,
}

/// `struct ucontext` of Linux at `rsp`: `uc_mcontext` 40, in it `rbp` 80, `rsp` 120, `rip` 128.
const UCONTEXT: Saved = Saved { fp: 120, sp: 160 };

/// `struct _Unwind_Context` of GCC's `libgcc/unwind-dw2.c`: 18 places of registers as DWARF numbers them, `cfa`, `ra`. Of
/// registers it has the addresses of where they were saved.
pub const UNWIND_CONTEXT: Saved = Saved { fp: 48, sp: 144 };

impl Rule {
    /// A rule of `kind` with an offset in bytes; `None` when it does not fit.
    #[must_use]
    pub fn new(kind: u32, offset: i64, saved: u32) -> Option<Self> {
        let words = offset / 8;
        let fits = offset % 8 == 0 && (-(1 << 17)..1 << 17).contains(&words) && saved <= saved::AT_FP;
        fits.then(|| Self(kind | (saved << 4) | ((words as i32).cast_unsigned() << 14)))
    }

    /// A rule that reads the CFA from memory: `inner` and `outer` in bytes; `None` when they do not fit.
    #[must_use]
    pub fn deref(kind: u32, inner: i64, outer: i64, saved: u32) -> Option<Self> {
        let (words, plus) = (inner / 8, outer / 8);
        let fits =
            inner % 8 == 0 && outer % 8 == 0 && (-(1 << 10)..1 << 10).contains(&words) && (0..128).contains(&plus);
        if !fits {
            return None;
        }
        // 11 bits signed, then 7 bits unsigned.
        Self::new(kind, ((words << 7) | plus) * 8, saved)
    }

    /// A rule of [`kind::REGISTER`]: a register as DWARF numbers it, and an offset in bytes; `None` when they do not fit.
    #[must_use]
    pub fn register(register: u16, offset: i64, saved: u32) -> Option<Self> {
        let words = offset / 8;
        let fits = register < 16 && offset % 8 == 0 && (-(1 << 13)..1 << 13).contains(&words);
        if !fits {
            return None;
        }
        Self::new(kind::REGISTER, ((words << 4) | i64::from(register)) * 8, saved)
    }

    /// A rule of [`kind::THROW`], of a frame that keeps in `cfa` bytes from its `rbp` the stack pointer of the frame that it
    /// throws to; `None` when it does not fit.
    #[must_use]
    pub fn throw(cfa: i64) -> Option<Self> {
        Self::new(kind::THROW, cfa.checked_sub_unsigned(UNWIND_CONTEXT.sp)?, saved::UNCHANGED)
    }

    /// One of [`saved`], or words below the CFA.
    #[inline(always)]
    #[must_use]
    pub const fn saved(self) -> u32 {
        (self.0 >> 4) & 1023
    }

    /// The offset in words.
    #[inline(always)]
    #[must_use]
    pub const fn words(self) -> i64 {
        (self.0.cast_signed() >> 14) as i64
    }
}

impl NativeWalk {
    /// Steps to the caller by a rule. `Err` is the end of the walk.
    #[inline(always)]
    pub(super) fn apply<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        stack: &mut StackBuffer,
        rule: Rule,
    ) -> Result<(), StopReason> {
        let words = rule.words();
        let bytes = (words * 8).cast_unsigned();
        let kind = rule.kind();
        let cfa = if kind == kind::SP {
            self.sp.wrapping_add(bytes)
        } else if kind == kind::FP {
            self.fp.wrapping_add(bytes)
        } else if kind == kind::DEREF_SP || kind == kind::DEREF_FP {
            let base = if kind == kind::DEREF_SP { self.sp } else { self.fp };
            let inner = ((words >> 7) * 8).cast_unsigned();
            self.stack_word(memory, stack, base.wrapping_add(inner), 0)?
                .wrapping_add(((words & 127) * 8).cast_unsigned())
        } else if kind == kind::REGISTER {
            if self.stored != 1 || self.leaf_known == 0 {
                return Err(StopReason::UnsupportedUnwindRule);
            }
            self.leaf[(words & 15) as usize].wrapping_add(((words >> 4) * 8).cast_unsigned())
        } else if kind == kind::PLT {
            let slot = self.ip & 15;
            self.sp.wrapping_add(if slot >= bytes / 8 { 16 } else { 8 })
        } else if kind == kind::SIGNAL || kind == kind::THROW {
            let throw = kind == kind::THROW;
            let saved = if throw { UNWIND_CONTEXT } else { UCONTEXT };
            let base = if throw { self.fp.wrapping_add(bytes) } else { self.sp };
            let sp = self.stack_word(memory, stack, base.wrapping_add(saved.sp), 0)?;
            // A signal handler may have a stack of its own.
            if throw && sp <= self.sp {
                return Err(StopReason::StackNotRising);
            }
            let ip = self.stack_word(memory, stack, base.wrapping_add(saved.sp), 8)?;
            let mut fp = self.stack_word(memory, stack, base.wrapping_add(saved.fp), 0)?;
            if throw {
                fp = self.stack_word(memory, stack, fp, 0)?;
            }
            (self.ip, self.fp, self.sp, self.exact) = (ip, fp, sp, 1);
            return Ok(());
        } else {
            return Err(self.end(kind));
        };
        // A caller's frame lies above: whatever the memory holds, the walk ends.
        if cfa <= self.sp {
            return Err(StopReason::StackNotRising);
        }
        let saved = rule.saved();
        if saved != saved::UNCHANGED {
            let place = if saved == saved::AT_FP { self.fp } else { cfa.wrapping_sub(u64::from(saved) * 8) };
            self.fp = self.stack_word(memory, stack, place, 0)?;
        }
        let ip = self.stack_word(memory, stack, cfa.wrapping_sub(8), 0)?;
        self.arrive(ip, cfa)
    }
}
