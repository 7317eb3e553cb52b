//! Native stacks: compact unwind rows, and one step of a stack over the same memory trait as the Python walk.
//!
//! User space compiles `.eh_frame` into sorted [`Row`]s, 8 bytes each, with an index ([`pages`]); the kernel side searches
//! them and steps. A row says only what a stack needs: where the caller's frame starts (the CFA), where the frame pointer
//! and the return address were saved. What it cannot say is [`Rule::UNSUPPORTED`], and ends the walk with a reason: a stack
//! is whole or labelled, never guessed. A rule is 32 bits of the processor's own, here x86-64's and in [`arm64`] the
//! other's; search, ranges and reasons serve both.

pub mod arm64;
mod calls;
pub mod pages;
mod rows;
mod slices;
mod x86_64;

pub use calls::may_call;
pub use rows::{Range, Row, Rule, kind, no_table};
pub use slices::Slices;
pub use x86_64::{UNWIND_CONTEXT, saved};

use crate::config::machine;
use crate::limits::{MAX_NATIVE_FRAMES, NATIVE_FRAMES_PER_STEP, RANGE_SEARCH_STEPS, STACK_READ};
use crate::opaque;
use crate::stop::StopReason;
use crate::walk::{Buffer, UserMemory};

/// Values of [`NativeWalk::place`].
mod place {
    /// No code that is known.
    pub const UNKNOWN: u32 = 0;
    /// There is a rule.
    pub const RULE: u32 = 1;
    /// Frame pointers are followed.
    pub const FRAME_POINTERS: u32 = 2;
    /// There is no table for it.
    pub const STOP: u32 = 3;
}

/// Room for a piece of the stack.
pub type StackBuffer = Buffer<STACK_READ, { STACK_READ / 8 }>;

/// What no page is smaller than.
const PAGE: u64 = 4096;

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
    /// A number that no other content of the ranges has: what was found under it holds for whoever has it.
    pub version: u32,
    /// Explicit padding.
    pub _pad: u32,
}

/// The tables, wherever they are kept.
pub trait Tables {
    /// The range with this index.
    fn range(&self, index: u32) -> Option<Range>;
    /// Where the range with this index starts.
    #[inline(always)]
    fn range_start(&self, index: u32) -> Option<u64> {
        self.range(index).map(|range| range.start)
    }
    /// Where rows lie. Those of one range lie together, so that this is looked up once for them all.
    type Chunk: Copy;
    /// Where the row with this index lies.
    fn chunk(&self, index: u32) -> Option<Self::Chunk>;
    /// The row with this index, which lies there.
    fn row(&self, chunk: Self::Chunk, index: u32) -> Option<Row>;
    /// The rule that [`Tables::remember`] was told of an address, if it is still there.
    #[inline(always)]
    fn remembered(&self, _version: u32, _at: u64) -> Option<Rule> {
        None
    }
    /// Is told which rule holds at an address of the space with this [`Space::version`].
    #[inline(always)]
    fn remember(&self, _version: u32, _at: u64, _rule: Rule) {}
    /// Finds what is known of an address whose rule is not remembered: [`NativeWalk::find`]. The kernel side has it as a function of
    /// its own, which its verifier looks at once.
    #[inline(always)]
    fn find(&self, walk: &mut NativeWalk, space: &Space, at: u64) {
        walk.find(self, space, at);
    }
    /// The processor that the rules are for, one of [`machine`]: by default the one that this was compiled for.
    #[inline(always)]
    fn machine(&self) -> u32 {
        if cfg!(target_arch = "aarch64") { machine::ARM64 } else { machine::X86_64 }
    }
    /// The bits that a return address has beside its signature (pointer authentication of arm64, where addresses of user
    /// space have 48 bits or fewer).
    #[inline(always)]
    fn code_mask(&self) -> u64 {
        if self.machine() == machine::ARM64 { (1 << 48) - 1 } else { u64::MAX }
    }
    /// The same word. Where the compiler must not see what is computed from it, lest it make branches of masks, this is
    /// more than nothing.
    #[inline(always)]
    fn hide(&self, word: u64) -> u64 {
        word
    }
}

/// Takes the addresses of a walk, leaf first.
pub trait AddressSink {
    /// Stores the address at `index`, which is below [`MAX_NATIVE_FRAMES`].
    fn store(&mut self, index: usize, address: u64);
    /// Is told of the stack pointer at an address, too.
    #[inline(always)]
    fn arrived(&mut self, _address: u64, _sp: u64) {}
}

/// Where the walk of a native stack stands.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct NativeWalk {
    /// Instruction pointer, or return address.
    pub ip: u64,
    /// Stack pointer.
    pub sp: u64,
    /// `rbp`, `x29`.
    pub fp: u64,
    /// `x30` of the interrupted instruction: where a function of arm64 returns to that has not saved it. It has no meaning
    /// for callers.
    pub link: u64,
    /// Range found last: most callers lie in the same file.
    range: Range,
    /// Row found last.
    row: u64,
    /// Address of the first word in the buffer.
    window: u64,
    /// From how many addresses on the buffer has a word; 0: it has none.
    window_words: u64,
    /// Addresses stored so far.
    pub stored: u32,
    /// 1 when `ip` is where the thread was interrupted, 0 when it is a return address.
    exact: u32,
    /// Steps that trusted a frame pointer because no table covers the code.
    pub by_frame_pointer: u32,
    /// 1 when `leaf` was filled in.
    pub leaf_known: u32,
    /// 1 when `sp` is no more than a lower bound: a frame pointer of arm64 does not tell where a caller's frame starts.
    sp_lost: u32,
    /// What is known of the present address, one of [`place`].
    place: u32,
    /// Registers of the interrupted instruction, as DWARF numbers them: hand-written loops keep their frame in any.
    pub leaf: [u64; 16],
}

impl NativeWalk {
    /// A walk that starts at these registers.
    #[inline(always)]
    #[must_use]
    pub const fn start(ip: u64, sp: u64, fp: u64) -> Self {
        const NONE: Range = Range { start: 0, end: 0, bias: 0, first_row: 0, rows: 0, pages: 0 };
        Self {
            ip,
            sp,
            fp,
            link: 0,
            range: NONE,
            row: 0,
            window: 0,
            window_words: 0,
            stored: 0,
            exact: 1,
            by_frame_pointer: 0,
            leaf_known: 0,
            sp_lost: 0,
            place: place::UNKNOWN,
            leaf: [0; 16],
        }
    }

    /// Whether a walk that ended for this reason might go on with tables that are not there yet. (Code that nobody knows is found by
    /// chance, too, once a frame pointer was only believed.)
    #[inline(always)]
    #[must_use]
    pub const fn lacks_tables(&self, reason: u32) -> bool {
        let never = self.range.rows == 0 && self.range.first_row == no_table::NEVER;
        (reason == StopReason::NoUnwindTables as u32 && !never)
            || (reason == StopReason::UnknownCode as u32 && self.by_frame_pointer == 0)
    }

    /// The return address at which the walk stands; `None`: it was interrupted here.
    #[inline(always)]
    #[must_use]
    pub const fn return_address(&self) -> Option<u64> {
        if self.exact == 0 { Some(self.ip) } else { None }
    }

    /// Has a walk that ended for want of tables go on with others, where there were none. Gives whether that address was `last`, the last
    /// one stored, which then will be stored again.
    pub fn begin_again(&mut self, last: Option<u64>) -> bool {
        let stored = last == Some(self.ip.wrapping_sub(u64::from(1 - (self.exact & 1))));
        self.stored = self.stored.saturating_sub(u32::from(stored));
        (self.range, self.window_words, self.place) = (Range::default(), 0, place::UNKNOWN);
        stored
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
        stack: &mut StackBuffer,
        sink: &mut S,
    ) -> Option<StopReason> {
        self.frames::<NATIVE_FRAMES_PER_STEP, M, T, S>(memory, tables, space, stack, sink)
    }

    /// Walks up to `MOST` frames, likewise.
    #[inline(always)]
    pub fn frames<const MOST: usize, M: UserMemory + ?Sized, T: Tables, S: AddressSink>(
        &mut self,
        memory: &M,
        tables: &T,
        space: Space,
        stack: &mut StackBuffer,
        sink: &mut S,
    ) -> Option<StopReason> {
        let mut steps = 0;
        while steps < MOST {
            steps += 1;
            // The state goes through memory at each turn: kept in registers, it would make every path of one turn a
            // state of its own for the verifier in the next.
            let this = opaque::place(&mut *self);
            if this.stored as usize >= MAX_NATIVE_FRAMES {
                return Some(StopReason::TooDeep);
            }
            let at = this.ip.wrapping_sub(u64::from(1 - (this.exact & 1)));
            // Return addresses are few and come again and again, so most rules are remembered.
            if let Some(rule) = tables.remembered(space.version, at) {
                this.row = u64::from(rule.0);
                this.place = place::RULE;
            } else {
                tables.find(this, &space, at);
            }
            let this = opaque::place(&mut *this);
            // What is no code at all was no return address. Where the thread was interrupted is true in any case.
            if this.place == place::UNKNOWN && this.stored > 0 {
                return Some(StopReason::UnknownCode);
            }
            sink.store(this.stored as usize, at);
            sink.arrived(at, this.sp);
            let this = opaque::place(&mut *this);
            this.stored += 1;
            if this.place == place::UNKNOWN {
                return Some(StopReason::UnknownCode);
            }
            if this.place == place::STOP {
                return Some(StopReason::NoUnwindTables);
            }
            let result = if this.place == place::FRAME_POINTERS {
                this.follow_frame_pointer(memory, tables, stack)
            } else {
                let rule = Rule(this.row as u32);
                // A constant for the verifier, which looks at one of the two only.
                if tables.machine() == machine::ARM64 {
                    this.apply_arm64(memory, tables, stack, arm64::Rule(rule))
                } else {
                    this.apply(memory, stack, rule)
                }
            };
            if let Err(reason) = result {
                return Some(reason);
            }
        }
        None
    }

    /// Finds out what is known of an address whose rule is not remembered, and keeps that for the next step. Only to be called by
    /// [`Tables::find`].
    #[inline(always)]
    pub fn find<T: Tables + ?Sized>(&mut self, tables: &T, space: &Space, at: u64) {
        // One comparison, which holds of no address while there is no range.
        let inside = at.wrapping_sub(self.range.start) < self.range.end.wrapping_sub(self.range.start);
        if !inside && self.find_range(tables, space.first, space.count, at) == 0 {
            self.place = place::UNKNOWN;
            return;
        }
        let this = opaque::place(&mut *self);
        if this.range.rows == 0 {
            let stop = this.range.first_row != no_table::FRAME_POINTERS;
            this.place = if stop { place::STOP } else { place::FRAME_POINTERS };
            return;
        }
        let _zero = this.find_row(tables, at);
        let this = opaque::place(&mut *this);
        this.place = place::RULE;
        let rule = Rule(this.row as u32);
        // A gap may be a table that is being written.
        if rule.kind() != kind::GAP {
            tables.remember(space.version, at, rule);
        }
    }

    /// Reads the word of the stack at an address into the beginning of the buffer. 0: it cannot be read. Only to be called by
    /// [`UserMemory::load`].
    ///
    /// What follows it on its page is read with it: callers' frames, most of which are small.
    #[inline(always)]
    pub fn load<M: UserMemory + ?Sized>(&mut self, memory: &M, stack: &mut StackBuffer, address: u64) -> u64 {
        let mut len = (PAGE - (address & (PAGE - 1))).min(STACK_READ as u64);
        if address & 7 != 0 || stack.fill(memory, address, len as u32).is_err() {
            len = 8;
            if stack.fill(memory, address, 8).is_err() {
                self.window_words = 0;
                return 0;
            }
        }
        (self.window, self.window_words) = (address, len - 7);
        1
    }

    /// The word of the stack at `base + offset`.
    #[inline(always)]
    fn stack_word<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        stack: &mut StackBuffer,
        base: u64,
        offset: u32,
    ) -> Result<u64, StopReason> {
        let address = base.wrapping_add(u64::from(offset));
        let inside = address.wrapping_sub(self.window) < self.window_words;
        if !inside && memory.load(self, stack, address) == 0 {
            return Err(StopReason::UnreadableStack);
        }
        Ok(stack.u64(address.wrapping_sub(opaque::place(&mut *self).window) as u32))
    }

    /// Finds the range that holds an address: the last one that starts at or below it, if that reaches so far. Gives 1, or 0
    /// when there is none.
    ///
    /// Both searches (the other is [`pages`]) are functions of their own, and choose with masks and not with branches: the
    /// verifier has one state behind each halving, and one behind the call.
    #[inline(never)]
    fn find_range<T: Tables + ?Sized>(&mut self, tables: &T, first: u32, count: u32, at: u64) -> u64 {
        let (first, count) = (u64::from(first), u64::from(count));
        let (mut below, mut bit) = (0, 1_u64 << RANGE_SEARCH_STEPS);
        self.range = Range::default();
        while bit > 1 {
            bit >>= 1;
            let next = below + bit;
            // What is read in its place, where a halving would lead beyond the last candidate, counts for nothing.
            let there = not_above(tables, next, count);
            let Some(start) = tables.range_start((first + ((next - 1) & there)) as u32) else { return 0 };
            // Halved, because a mask is made of a sign; starts are even.
            below += bit & there & not_above(tables, start >> 1, at >> 1);
        }
        if below == 0 {
            return 0;
        }
        let Some(range) = tables.range((first + below - 1) as u32) else { return 0 };
        if at >= range.end {
            return 0;
        }
        self.range = range;
        1
    }

    /// Why a walk ends at a rule of a kind that leads to no caller.
    #[inline(always)]
    const fn end(&self, kind: u32) -> StopReason {
        // Start-up code of some libcs has no rules; the ABI has it clear the frame pointer.
        if kind == kind::END || (kind == kind::GAP && self.fp == 0) {
            StopReason::Complete
        } else if kind == kind::GAP {
            StopReason::NoUnwindRule
        } else {
            StopReason::UnsupportedUnwindRule
        }
    }

    /// Steps to the caller by the frame pointer: it must point into the stack above, as code that keeps them has it.
    #[inline(always)]
    fn follow_frame_pointer<M: UserMemory + ?Sized, T: Tables>(
        &mut self,
        memory: &M,
        tables: &T,
        stack: &mut StackBuffer,
    ) -> Result<(), StopReason> {
        self.by_frame_pointer += 1;
        if self.fp == 0 {
            return Err(StopReason::Complete);
        }
        if self.fp & 7 != 0 || self.fp < self.sp {
            return Err(StopReason::NoFramePointer);
        }
        let fp = self.stack_word(memory, stack, self.fp, 0)?;
        let ip = self.stack_word(memory, stack, self.fp, 8)?;
        let above = self.fp.wrapping_add(16);
        self.fp = fp;
        self.sp_lost = u32::from(tables.machine() == machine::ARM64);
        self.arrive(ip & tables.code_mask(), above)
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

/// All bits when `value` is not above `limit`, else none; both below 2^63.
#[inline(always)]
fn not_above<T: Tables + ?Sized>(tables: &T, value: u64, limit: u64) -> u64 {
    // The difference is negative when it is above: its shifted sign is inverted.
    let sign = tables.hide(limit.wrapping_sub(value)).cast_signed() >> 63;
    !tables.hide(sign.cast_unsigned())
}

const _: () = assert!(core::mem::size_of::<Row>() == 8);
const _: () = assert!(core::mem::size_of::<Range>() == 32);
const _: () = assert!(core::mem::size_of::<Space>() == 24);
const _: () = assert!(core::mem::size_of::<NativeWalk>() == 240);
