//! What interrupted a thread: the timer or another perf event, a tracepoint, or the kick at the end of a wait. The walk is the same.

use crate::kernel::{KernelPtr, UserRegs, arm64};
use crate::maps::{STAGES, TRACE_STAGES, WAIT_STAGES, config};
use crate::wall;
use aya_ebpf::EbpfContext;
use aya_ebpf::maps::ProgramArray;
use aya_ebpf::programs::{PerfEventContext, RawTracePointContext, TracePointContext};
use tachyon_common::config::machine;

/// The context of the programs that make a sample.
pub trait Interrupt: EbpfContext {
    /// Tail calls that have led to the first stage.
    const CALLS_BEFORE: u32;

    /// The programs of this type, for tail calls.
    fn stages(&self) -> &'static ProgramArray;
    /// Registers of the thread in user mode.
    fn user_regs(&self, task: KernelPtr) -> UserRegs;
    /// [`UserRegs::others`].
    fn others(&self, into: &mut [u64; 16]) -> bool;
    /// [`UserRegs::link`].
    fn link(&self) -> u64;
    /// How many samples this one stands for.
    fn weight(&self) -> u64;
    /// Counts its record, which was sent.
    fn sent(&self);
    /// Whether, once the thread's Python frames have been walked, another thread's are wanted behind them; then the walk is there.
    fn has_more_python(&self) -> bool;
    /// Puts what the format has for such a sample behind its frames, and gives its length in bytes.
    fn append(&self, at: usize) -> usize;
}

impl Interrupt for PerfEventContext {
    const CALLS_BEFORE: u32 = 0;

    #[inline(always)]
    fn stages(&self) -> &'static ProgramArray {
        &STAGES
    }

    #[inline(always)]
    fn user_regs(&self, task: KernelPtr) -> UserRegs {
        UserRegs::of(self, task)
    }

    #[inline(always)]
    fn others(&self, into: &mut [u64; 16]) -> bool {
        UserRegs::others(self, into)
    }

    #[inline(always)]
    fn link(&self) -> u64 {
        UserRegs::link(self)
    }

    #[inline(always)]
    fn weight(&self) -> u64 {
        1
    }

    #[inline(always)]
    fn sent(&self) {}

    #[inline(always)]
    fn has_more_python(&self) -> bool {
        false
    }

    #[inline(always)]
    fn append(&self, _at: usize) -> usize {
        0
    }
}

/// The kick, a switch or a waker: the thread is in the kernel, and its registers lie at the top of its kernel stack.
impl Interrupt for RawTracePointContext {
    const CALLS_BEFORE: u32 = 1;

    #[inline(always)]
    fn stages(&self) -> &'static ProgramArray {
        &WAIT_STAGES
    }

    #[inline(always)]
    fn user_regs(&self, task: KernelPtr) -> UserRegs {
        saved_regs(task)
    }

    #[inline(always)]
    fn others(&self, into: &mut [u64; 16]) -> bool {
        UserRegs::saved_others(into)
    }

    #[inline(always)]
    fn link(&self) -> u64 {
        saved_link()
    }

    #[inline(always)]
    fn weight(&self) -> u64 {
        wall::weight()
    }

    #[inline(always)]
    fn sent(&self) {
        wall::sent();
    }

    #[inline(always)]
    fn has_more_python(&self) -> bool {
        wall::find_holder() != 0
    }

    #[inline(always)]
    fn append(&self, at: usize) -> usize {
        wall::append(at)
    }
}

/// A tracepoint: the thread is in the kernel, as at the kick; its kernel stack is its own.
impl Interrupt for TracePointContext {
    const CALLS_BEFORE: u32 = 0;

    #[inline(always)]
    fn stages(&self) -> &'static ProgramArray {
        &TRACE_STAGES
    }

    #[inline(always)]
    fn user_regs(&self, task: KernelPtr) -> UserRegs {
        saved_regs(task)
    }

    #[inline(always)]
    fn others(&self, into: &mut [u64; 16]) -> bool {
        UserRegs::saved_others(into)
    }

    #[inline(always)]
    fn link(&self) -> u64 {
        saved_link()
    }

    #[inline(always)]
    fn weight(&self) -> u64 {
        1
    }

    #[inline(always)]
    fn sent(&self) {}

    #[inline(always)]
    fn has_more_python(&self) -> bool {
        false
    }

    #[inline(always)]
    fn append(&self, _at: usize) -> usize {
        0
    }
}

/// Registers in user mode of a thread that is in the kernel.
#[inline(always)]
fn saved_regs(task: KernelPtr) -> UserRegs {
    if config!(machine) == machine::ARM64 { UserRegs::saved_arm64(task) } else { UserRegs::saved(task) }
}

#[inline(always)]
fn saved_link() -> u64 {
    UserRegs::saved_at_arm64(KernelPtr::current_task()).map_or(0, |regs| regs.read(arm64::LINK))
}
