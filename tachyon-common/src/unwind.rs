//! Native stacks: compact unwind rows, and one step of an x86-64 stack over the same memory trait as the Python walk.
//!
//! User space compiles `.eh_frame` into sorted [`Row`]s, 8 bytes each; the kernel side searches them and steps. A row says
//! only what a stack needs: where the caller's frame starts (the CFA), where `rbp` was saved, and that the return address
//! lies below the CFA. What it cannot say is [`Rule::UNSUPPORTED`], and ends the walk with a reason: a stack is whole or
//! labelled, never guessed. A rule is 32 bits of the architecture's own; search, ranges and reasons serve any.

use crate::limits::{MAX_NATIVE_FRAMES, NATIVE_FRAMES_PER_STEP, RANGE_SEARCH_STEPS, ROW_SEARCH_STEPS};
use crate::stop::StopReason;
use crate::walk::{UserMemory, read_u64};

/// How to find the caller's registers at an instruction.
///
/// Bits 0–3 are the kind, bits 4–13 say where `rbp` was saved, bits 14–31 are the offset, signed. Offsets count words
/// of 8 bytes, which is how compilers move the stack.
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
}

/// Where `rbp` was saved: bits 4–13 of a [`Rule`]. Other values are words below the CFA.
pub mod saved {
    /// Nowhere: it still holds the caller's value.
    pub const UNCHANGED: u32 = 0;
    /// Where `rbp` points to (functions that align their stack).
    pub const AT_FP: u32 = 1023;
    /// Furthest place below the CFA, in words.
    pub const MAX: u32 = 1022;
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

    /// One of [`kind`].
    #[inline(always)]
    #[must_use]
    pub const fn kind(self) -> u32 {
        self.0 & 15
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
    /// What to subtract from an address to get the one that rows start at.
    pub bias: u64,
    /// Index of the table's first row; where there is no table, one of [`no_table`].
    pub first_row: u32,
    /// Rows of the table; 0: there is none.
    pub rows: u32,
}

/// [`Range::first_row`] of a range without a table.
pub mod no_table {
    /// Code here is taken to keep frame pointers: generated code, and files that have no rules at all.
    pub const FRAME_POINTERS: u32 = 0;
    /// There are rules, but not here: no room was left, or they make no sense.
    pub const STOP: u32 = 1;
}

/// Where a process's ranges are: `count` of them, sorted, from `first` on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Space {
    /// [`crate::process::ProcessEntry::image`] they belong to; with any other they mean nothing.
    pub image: u64,
    /// Index of the first one.
    pub first: u32,
    /// How many there are.
    pub count: u32,
}

/// The tables, wherever they are kept.
pub trait Tables {
    /// The range with this index.
    fn range(&self, index: u32) -> Option<Range>;
    /// The row with this index.
    fn row(&self, index: u32) -> Option<Row>;
}

/// Takes the addresses of a walk, leaf first.
pub trait AddressSink {
    /// Stores the address at `index`, which is below [`MAX_NATIVE_FRAMES`].
    fn store(&mut self, index: usize, address: u64);
}

/// Where the walk of a native stack stands.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct NativeWalk {
    /// Instruction pointer, or return address.
    pub ip: u64,
    /// Stack pointer.
    pub sp: u64,
    /// `rbp`.
    pub fp: u64,
    /// Range found last: most callers lie in the same file.
    range: Range,
    /// Row found last.
    row: u64,
    /// First candidate of a search.
    low: u32,
    /// First one past the candidates.
    high: u32,
    /// Addresses stored so far.
    pub stored: u32,
    /// 1 when `ip` is where the thread was interrupted, 0 when it is a return address.
    exact: u32,
    /// Steps that trusted a frame pointer because no table covers the code.
    pub by_frame_pointer: u32,
    /// Explicit padding.
    _pad: u32,
}

impl NativeWalk {
    /// A walk that starts at these registers.
    #[inline(always)]
    #[must_use]
    pub const fn start(ip: u64, sp: u64, fp: u64) -> Self {
        const NONE: Range = Range { start: 0, end: 0, bias: 0, first_row: 0, rows: 0 };
        Self { ip, sp, fp, range: NONE, row: 0, low: 0, high: 0, stored: 0, exact: 1, by_frame_pointer: 0, _pad: 0 }
    }

    /// Walks up to [`NATIVE_FRAMES_PER_STEP`] frames. `None`: call again.
    ///
    /// Stored are addresses to look names up with: the interrupted instruction's own, and of each caller one inside of
    /// the call, which is its return address less 1.
    #[inline(always)]
    pub fn step<M: UserMemory + ?Sized, T: Tables, S: AddressSink>(
        &mut self,
        memory: &M,
        tables: &T,
        space: Space,
        sink: &mut S,
    ) -> Option<StopReason> {
        let mut steps = 0;
        while steps < NATIVE_FRAMES_PER_STEP {
            steps += 1;
            // The state goes through memory at each turn: kept in registers, it would make every path of one turn a
            // state of its own for the verifier in the next.
            let this = core::hint::black_box(&mut *self);
            if this.stored as usize >= MAX_NATIVE_FRAMES {
                return Some(StopReason::TooDeep);
            }
            let at = this.ip.wrapping_sub(u64::from(1 - (this.exact & 1)));
            let known = (at >= this.range.start && at < this.range.end) || this.find_range(tables, space, at);
            // What is no code at all was no return address. Where the thread was interrupted is true in any case.
            if !known && this.stored > 0 {
                return Some(StopReason::UnknownCode);
            }
            sink.store(this.stored as usize, at);
            let this = core::hint::black_box(&mut *this);
            this.stored += 1;
            if !known {
                return Some(StopReason::UnknownCode);
            }
            let result = if this.range.rows == 0 {
                if this.range.first_row == no_table::STOP {
                    return Some(StopReason::NoUnwindTables);
                }
                this.by_frame_pointer += 1;
                this.follow_frame_pointer(memory)
            } else {
                this.find_row(tables, at);
                let this = core::hint::black_box(&mut *this);
                this.apply(memory, Rule(this.row as u32))
            };
            if let Err(reason) = result {
                return Some(reason);
            }
        }
        None
    }

    /// Finds the range that holds an address.
    #[inline(always)]
    fn find_range<T: Tables>(&mut self, tables: &T, space: Space, at: u64) -> bool {
        self.low = space.first;
        self.high = space.first.wrapping_add(space.count);
        self.range = Range::default();
        let mut steps = 0;
        while steps < RANGE_SEARCH_STEPS {
            steps += 1;
            let this = core::hint::black_box(&mut *self);
            if this.low >= this.high {
                break;
            }
            let middle = this.low + (this.high - this.low) / 2;
            let Some(range) = tables.range(middle) else { return false };
            if at < range.start {
                this.high = middle;
            } else if at >= range.end {
                this.low = middle + 1;
            } else {
                this.range = range;
                return true;
            }
        }
        false
    }

    /// Finds the row that holds at an address of the present range.
    #[inline(always)]
    fn find_row<T: Tables>(&mut self, tables: &T, at: u64) {
        let pc = at.wrapping_sub(self.range.bias);
        self.low = self.range.first_row;
        self.high = self.range.first_row.wrapping_add(self.range.rows);
        self.row = u64::from(Rule::GAP.0);
        // A row's address has 32 bits: what lies beyond is in no table.
        if pc > u64::from(u32::MAX) {
            return;
        }
        let wanted = (pc << 32) | 0xffff_ffff;
        let mut steps = 0;
        while steps < ROW_SEARCH_STEPS {
            steps += 1;
            let this = core::hint::black_box(&mut *self);
            if this.low >= this.high {
                break;
            }
            let middle = this.low + (this.high - this.low) / 2;
            let Some(row) = tables.row(middle) else { return };
            if row.0 <= wanted {
                this.row = row.0;
                this.low = middle + 1;
            } else {
                this.high = middle;
            }
        }
    }

    /// Steps to the caller by a rule. `Err` is the end of the walk.
    #[inline(always)]
    fn apply<M: UserMemory + ?Sized>(&mut self, memory: &M, rule: Rule) -> Result<(), StopReason> {
        let unreadable = |_| StopReason::UnreadableStack;
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
            read_u64(memory, base.wrapping_add(inner), 0)
                .map_err(unreadable)?
                .wrapping_add(((words & 127) * 8).cast_unsigned())
        } else if kind == kind::PLT {
            let slot = self.ip & 15;
            self.sp.wrapping_add(if slot >= bytes / 8 { 16 } else { 8 })
        } else if kind == kind::SIGNAL {
            // `struct ucontext` of x86-64 at `rsp`: `uc_mcontext` 40, in it rbp 80, rsp 120, rip 128.
            let fp = read_u64(memory, self.sp, 120).map_err(unreadable)?;
            let sp = read_u64(memory, self.sp, 160).map_err(unreadable)?;
            self.ip = read_u64(memory, self.sp, 168).map_err(unreadable)?;
            (self.fp, self.sp, self.exact) = (fp, sp, 1);
            return Ok(());
        } else if kind == kind::END {
            return Err(StopReason::Complete);
        } else if kind == kind::GAP {
            // Start-up code of some libcs has no rules; the ABI has it clear `rbp`.
            return Err(if self.fp == 0 { StopReason::Complete } else { StopReason::NoUnwindRule });
        } else {
            return Err(StopReason::UnsupportedUnwindRule);
        };
        // A caller's frame lies above: whatever the memory holds, the walk ends.
        if cfa <= self.sp {
            return Err(StopReason::StackNotRising);
        }
        let saved = rule.saved();
        if saved != saved::UNCHANGED {
            let place = if saved == saved::AT_FP { self.fp } else { cfa.wrapping_sub(u64::from(saved) * 8) };
            self.fp = read_u64(memory, place, 0).map_err(unreadable)?;
        }
        let ip = read_u64(memory, cfa.wrapping_sub(8), 0).map_err(unreadable)?;
        self.arrive(ip, cfa)
    }

    /// Steps to the caller by `rbp`: it must point into the stack above, as code that keeps frame pointers has it.
    #[inline(always)]
    fn follow_frame_pointer<M: UserMemory + ?Sized>(&mut self, memory: &M) -> Result<(), StopReason> {
        if self.fp == 0 {
            return Err(StopReason::Complete);
        }
        if self.fp & 7 != 0 || self.fp < self.sp {
            return Err(StopReason::NoFramePointer);
        }
        let unreadable = |_| StopReason::UnreadableStack;
        let fp = read_u64(memory, self.fp, 0).map_err(unreadable)?;
        let ip = read_u64(memory, self.fp, 8).map_err(unreadable)?;
        let cfa = self.fp.wrapping_add(16);
        self.fp = fp;
        self.arrive(ip, cfa)
    }

    #[inline(always)]
    fn arrive(&mut self, ip: u64, sp: u64) -> Result<(), StopReason> {
        // A thread's first function returns to nowhere.
        if ip == 0 {
            return Err(StopReason::Complete);
        }
        (self.ip, self.sp, self.exact) = (ip, sp, 0);
        Ok(())
    }
}

const _: () = assert!(core::mem::size_of::<Row>() == 8);
const _: () = assert!(core::mem::size_of::<Range>() == 32);
const _: () = assert!(core::mem::size_of::<Space>() == 16);
