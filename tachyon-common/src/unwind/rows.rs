//! What an unwind table says: rules, the addresses from which they hold, and the part of a process that a table is for.

/// How to find the caller's registers at an instruction.
///
/// Bits 0–3 are the kind, bits 4–13 say where `rbp` was saved, bits 14–31 are the offset, signed. Offsets count words
/// of 8 bytes, which is how compilers move the stack. Of [`kind::REGISTER`] bits 14–17 are the register, and the offset
/// has the 14 bits above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Rule(pub u32);

/// Kinds of a [`Rule`].
pub mod kind {
    /// The file's rule has no compact form.
    pub const UNSUPPORTED: u32 = 0;
    /// CFA = `rsp` + offset.
    pub const SP: u32 = 1;
    /// CFA = `rbp` + offset.
    pub const FP: u32 = 2;
    /// CFA = word at `rsp` + inner offset, plus outer offset.
    pub const DEREF_SP: u32 = 3;
    /// CFA = word at `rbp` + inner offset, plus outer offset.
    pub const DEREF_FP: u32 = 4;
    /// A slot of the procedure linkage table: CFA = `rsp` + 8, and 8 more from byte `offset` of the slot's 16 on.
    pub const PLT: u32 = 5;
    /// `rt_sigreturn`: the interrupted registers lie on the stack.
    pub const SIGNAL: u32 = 6;
    /// The return address is undefined: the outermost frame.
    pub const END: u32 = 7;
    /// No function is known here.
    pub const GAP: u32 = 8;
    /// CFA = another register + offset. Such a register is known only of the instruction that was interrupted.
    pub const REGISTER: u32 = 9;
    /// No rules are known of code that is taken to keep frame pointers (of arm64's vdso, all but the signal trampoline).
    pub const CHAIN: u32 = 10;
    /// A frame that is being left by a throw: the registers of the frame that it is thrown to lie at `rbp` + offset.
    pub const THROW: u32 = 11;
}

impl Rule {
    /// The file's rule has no compact form.
    pub const UNSUPPORTED: Self = Self(kind::UNSUPPORTED);
    /// No function is known here.
    pub const GAP: Self = Self(kind::GAP);
    /// The outermost frame.
    pub const END: Self = Self(kind::END);
    /// A signal handler's return.
    pub const SIGNAL: Self = Self(kind::SIGNAL);
    /// Frame pointers are followed, of arm64 alone: on x86-64 every piece of code has rules or is in a file that has none.
    pub const CHAIN: Self = Self(kind::CHAIN);

    /// One of [`kind`].
    #[inline(always)]
    #[must_use]
    pub const fn kind(self) -> u32 {
        self.0 & 15
    }
}

/// A rule and where it starts to hold, as one word that sorts by address: the upper half is the address relative to the
/// table's base, the lower half the [`Rule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Row(pub u64);

impl Row {
    /// The row of a rule that holds from `pc` on.
    #[must_use]
    pub const fn new(pc: u32, rule: Rule) -> Self {
        Self(((pc as u64) << 32) | rule.0 as u64)
    }

    /// First address, relative to the table's base.
    #[inline(always)]
    #[must_use]
    pub const fn pc(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The rule.
    #[inline(always)]
    #[must_use]
    pub const fn rule(self) -> Rule {
        Rule(self.0 as u32)
    }
}

/// A part of a process's address space that may hold code, and its table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// First address past it.
    pub end: u64,
    /// What to subtract from an address to get the one that rows start at: the first row's own starts at 0.
    pub bias: u64,
    /// Index of the table's first row; where there is no table, one of [`no_table`].
    pub first_row: u32,
    /// Rows of the table; 0: there is none.
    pub rows: u16,
    /// Pages of the index that follows them ([`super::pages`]).
    pub pages: u16,
}

/// [`Range::first_row`] of a range without a table.
pub mod no_table {
    /// Code here is taken to keep frame pointers: generated code, and files that have no rules at all.
    pub const FRAME_POINTERS: u32 = 0;
    /// There are rules, but not here: not yet, or no room was left.
    pub const STOP: u32 = 1;
    /// There are rules, but they make no sense: there will never be a table.
    pub const NEVER: u32 = 2;
}
