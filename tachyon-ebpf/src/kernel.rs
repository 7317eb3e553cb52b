//! Reading kernel structures by the offsets the loader found.

use crate::maps::config;
use aya_ebpf::helpers::generated::{bpf_get_current_task, bpf_probe_read_kernel};
use aya_ebpf::programs::PerfEventContext;
use core::ffi::c_void;
use tachyon_common::config::machine;

/// Address of a kernel structure.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KernelPtr(pub u64);

impl KernelPtr {
    /// The current `task_struct`.
    #[inline(always)]
    pub fn current_task() -> Self {
        // SAFETY: the helper takes nothing and cannot fail.
        Self(unsafe { bpf_get_current_task() })
    }

    /// Plain data at `offset`; the type's default when it cannot be read.
    #[inline(always)]
    pub fn read<T: Copy + Default>(self, offset: u32) -> T {
        let mut value = T::default();
        let from = self.0.wrapping_add(u64::from(offset)) as *const _;
        // SAFETY: `value` is valid for writes of its size; the helper checks the address itself. On failure the helper
        // zeroes the destination, which is what `T::default()` of the integers used here is too.
        unsafe { bpf_probe_read_kernel((&raw mut value).cast(), size_of::<T>() as u32, from) };
        value
    }

    /// The pointer at `offset`; a null one when it cannot be read.
    #[inline(always)]
    pub fn follow(self, offset: u32) -> Self {
        Self(self.read(offset))
    }
}

/// Registers of the interrupted thread in user mode; zeros when they are not known.
#[derive(Clone, Copy, Default)]
pub struct UserRegs {
    pub ip: u64,
    pub sp: u64,
    pub fp: u64,
    pub in_kernel: bool,
}

/// `struct user_pt_regs` of arm64, with which both the context and `struct pt_regs` begin (`arch/arm64/include/uapi/asm/ptrace.h`).
pub mod arm64 {
    /// `x29`.
    pub const FP: u32 = 29 * 8;
    /// `x30`.
    pub const LINK: u32 = 30 * 8;
    /// `sp`.
    pub const SP: u32 = 31 * 8;
    /// `pc`.
    pub const PC: u32 = 32 * 8;
    /// `orig_x0`, where the system call's first argument stays.
    pub const ORIG_X0: u32 = 34 * 8;
    /// `syscallno`, a signed 32-bit word.
    pub const SYSCALL: u32 = 35 * 8;
    /// `pstate`.
    pub const PSTATE: u32 = 33 * 8;
    /// Of `pstate`: exception level and width, 0 for 64-bit user code (`PSR_MODE_EL0t`).
    pub const MODE: u64 = 0x1f;
}

/// A word of a perf event's context. In assembly, for the verifier wants one load at a constant offset from the context
/// itself, and the compiler would share such loads between branches.
#[inline(always)]
fn context_word<const OFFSET: i32>(ctx: *const c_void) -> u64 {
    let word: u64;
    // SAFETY: the verifier checks that the offset is one of the context's.
    unsafe {
        core::arch::asm!("{word} = *(u64 *)({ctx} + {at})", word = out(reg) word, ctx = in(reg) ctx, at = const OFFSET);
    }
    word
}

/// `cs` and `ss` of 64-bit user code (`__USER_CS`, `__USER_DS`).
const USER_CS: u64 = 0x33;
const USER_SS: u64 = 0x2b;

impl UserRegs {
    /// From the event's context when it interrupted user code, else from the top of the kernel stack.
    #[inline(always)]
    pub fn of(ctx: &PerfEventContext, task: KernelPtr) -> Self {
        // A constant for the verifier, which looks at only one of the two: the other's context does not exist there.
        if config!(machine) == machine::ARM64 {
            return Self::of_arm64(ctx, task);
        }
        // SAFETY: the context is valid for the whole run of the program.
        let regs = unsafe { &raw const (*ctx.ctx).regs };
        // SAFETY: as above; the verifier turns the load into one from the real registers.
        let cs = unsafe { (*regs).cs };
        if cs & 3 == 3 {
            // SAFETY: as above.
            let ip = unsafe { (*regs).rip };
            // SAFETY: as above.
            let sp = unsafe { (*regs).rsp };
            // SAFETY: as above.
            let fp = unsafe { (*regs).rbp };
            return Self { ip, sp, fp, in_kernel: false };
        }
        Self::saved(task)
    }

    /// The other registers of x86-64, as DWARF numbers them, of the same place. `false`: they are not known.
    #[inline(always)]
    pub fn others(ctx: &PerfEventContext, into: &mut [u64; 16]) -> bool {
        // SAFETY: the context is valid for the whole run of the program.
        let regs = unsafe { &raw const (*ctx.ctx).regs };
        // SAFETY: as above; the verifier turns each load into one from the real registers.
        if unsafe { (*regs).cs } & 3 != 3 {
            return Self::saved_others(into);
        }
        // SAFETY: as above.
        into[0] = unsafe { (*regs).rax };
        // SAFETY: as above.
        into[1] = unsafe { (*regs).rdx };
        // SAFETY: as above.
        into[2] = unsafe { (*regs).rcx };
        // SAFETY: as above.
        into[3] = unsafe { (*regs).rbx };
        // SAFETY: as above.
        into[4] = unsafe { (*regs).rsi };
        // SAFETY: as above.
        into[5] = unsafe { (*regs).rdi };
        // SAFETY: as above.
        into[8] = unsafe { (*regs).r8 };
        // SAFETY: as above.
        into[9] = unsafe { (*regs).r9 };
        // SAFETY: as above.
        into[10] = unsafe { (*regs).r10 };
        // SAFETY: as above.
        into[11] = unsafe { (*regs).r11 };
        // SAFETY: as above.
        into[12] = unsafe { (*regs).r12 };
        // SAFETY: as above.
        into[13] = unsafe { (*regs).r13 };
        // SAFETY: as above.
        into[14] = unsafe { (*regs).r14 };
        // SAFETY: as above.
        into[15] = unsafe { (*regs).r15 };
        true
    }

    /// The same from the top of the kernel stack. A system call has lost rcx and r11, in which no rule that holds there
    /// can keep anything; an interrupt or a fault keeps all.
    #[inline(always)]
    pub fn saved_others(into: &mut [u64; 16]) -> bool {
        let Some(regs) = Self::saved_at(KernelPtr::current_task()) else { return false };
        // `struct pt_regs` begins with r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi.
        let all: [u64; 15] = regs.read(0);
        *into = [
            all[10], all[12], all[11], all[5], all[13], all[14], 0, 0, all[9], all[8], all[7], all[6], all[3], all[2],
            all[1], all[0],
        ];
        true
    }

    /// From the top of the kernel stack.
    #[inline(always)]
    pub fn saved(task: KernelPtr) -> Self {
        // Offsets of the kernel's user ABI (`struct pt_regs` of x86-64: rbp 32, rip 128, rsp 152).
        match Self::saved_at(task) {
            Some(regs) => Self { ip: regs.read(128), sp: regs.read(152), fp: regs.read(32), in_kernel: true },
            None => Self { in_kernel: true, ..Self::default() },
        }
    }

    /// The same on arm64, where the object's own type for the context, x86-64's, is of no use.
    #[inline(always)]
    fn of_arm64(ctx: &PerfEventContext, task: KernelPtr) -> Self {
        let regs: *const c_void = ctx.ctx.cast();
        if context_word::<{ arm64::PSTATE as i32 }>(regs) & arm64::MODE == 0 {
            return Self {
                ip: context_word::<{ arm64::PC as i32 }>(regs),
                sp: context_word::<{ arm64::SP as i32 }>(regs),
                fp: context_word::<{ arm64::FP as i32 }>(regs),
                in_kernel: false,
            };
        }
        Self::saved_arm64(task)
    }

    /// From the top of arm64's kernel stack.
    #[inline(always)]
    pub fn saved_arm64(task: KernelPtr) -> Self {
        match Self::saved_at_arm64(task) {
            Some(regs) => {
                Self { ip: regs.read(arm64::PC), sp: regs.read(arm64::SP), fp: regs.read(arm64::FP), in_kernel: true }
            }
            None => Self { in_kernel: true, ..Self::default() },
        }
    }

    /// `x30` of arm64, of the same place; 0: not known.
    #[inline(always)]
    pub fn link(ctx: &PerfEventContext) -> u64 {
        let regs: *const c_void = ctx.ctx.cast();
        if context_word::<{ arm64::PSTATE as i32 }>(regs) & arm64::MODE == 0 {
            return context_word::<{ arm64::LINK as i32 }>(regs);
        }
        Self::saved_at_arm64(KernelPtr::current_task()).map_or(0, |regs| regs.read(arm64::LINK))
    }

    /// `task_pt_regs()` of arm64: they end where the kernel stack does.
    #[inline(always)]
    pub fn saved_at_arm64(task: KernelPtr) -> Option<KernelPtr> {
        let top = task.follow(config!(task_stack)).0.wrapping_add(u64::from(config!(thread_size)));
        let regs = KernelPtr(top.wrapping_sub(u64::from(config!(pt_regs_size))));
        let user = regs.read::<u64>(arm64::PC) != 0 && regs.read::<u64>(arm64::PSTATE) & arm64::MODE == 0;
        user.then_some(regs)
    }

    /// `task_pt_regs()`: 5.10 has no helper for it. They end where the kernel stack does, less the padding some
    /// configurations leave (16 bytes with FRED, `TOP_OF_KERNEL_STACK_PADDING`); the segment registers tell which.
    #[inline(always)]
    pub fn saved_at(task: KernelPtr) -> Option<KernelPtr> {
        let top = task.follow(config!(task_stack)).0.wrapping_add(u64::from(config!(thread_size)));
        let mut padding = 0;
        while padding <= 16 {
            let regs = KernelPtr(top.wrapping_sub(u64::from(config!(pt_regs_size))).wrapping_sub(padding));
            // As above: cs 136, ss 160.
            if regs.read::<u64>(136) == USER_CS && regs.read::<u64>(160) == USER_SS {
                return Some(regs);
            }
            padding += 16;
        }
        None
    }
}
