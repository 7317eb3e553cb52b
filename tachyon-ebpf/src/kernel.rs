//! Reading kernel structures by the offsets the loader found.

use crate::maps::config;
use aya_ebpf::helpers::generated::{bpf_get_current_task, bpf_probe_read_kernel};
use aya_ebpf::programs::PerfEventContext;

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

/// `cs` and `ss` of 64-bit user code (`__USER_CS`, `__USER_DS`).
const USER_CS: u64 = 0x33;
const USER_SS: u64 = 0x2b;

impl UserRegs {
    /// From the event's context when it interrupted user code, else from the top of the kernel stack.
    #[inline(always)]
    pub fn of(ctx: &PerfEventContext, task: KernelPtr) -> Self {
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

    /// `task_pt_regs()`: 5.10 has no helper for it. They end where the kernel stack does, less the padding some
    /// configurations leave (16 bytes with FRED, `TOP_OF_KERNEL_STACK_PADDING`); the segment registers tell which.
    #[inline(always)]
    fn saved(task: KernelPtr) -> Self {
        let top = task.follow(config!(task_stack)).0.wrapping_add(u64::from(config!(thread_size)));
        let mut padding = 0;
        while padding <= 16 {
            let regs = KernelPtr(top.wrapping_sub(u64::from(config!(pt_regs_size))).wrapping_sub(padding));
            // Offsets of the kernel's user ABI (`struct pt_regs` of x86-64: rbp 32, rip 128, cs 136, rsp 152, ss 160).
            if regs.read::<u64>(136) == USER_CS && regs.read::<u64>(160) == USER_SS {
                return Self { ip: regs.read(128), sp: regs.read(152), fp: regs.read(32), in_kernel: true };
            }
            padding += 16;
        }
        Self { in_kernel: true, ..Self::default() }
    }
}
