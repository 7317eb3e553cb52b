//! The target's memory, as the helpers give it.

use aya_ebpf::helpers::generated::bpf_probe_read_user;
use tachyon_common::walk::{Unreadable, UserMemory};

/// Memory of the interrupted process. Pages that are not present are unreadable: no helper may fault here.
pub struct CurrentProcess;

impl UserMemory for CurrentProcess {
    #[inline(always)]
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        // SAFETY: `into` is valid for writes of its length; the helper checks `addr` itself.
        let result = unsafe { bpf_probe_read_user(into.as_mut_ptr().cast(), into.len() as u32, addr as *const _) };
        if result == 0 { Ok(()) } else { Err(Unreadable) }
    }

    #[inline(always)]
    fn read_or_zero(&self, addr: u64, into: &mut [u8]) {
        // The helper zeroes what it cannot fill (`bpf_probe_read_user_common`, kernel/trace/bpf_trace.c).
        // SAFETY: as above.
        unsafe { bpf_probe_read_user(into.as_mut_ptr().cast(), into.len() as u32, addr as *const _) };
    }
}

/// `value & MASK`, done where it stands: the compiler may neither drop the mask nor move it away from its use, and so
/// the verifier sees the bound.
#[inline(always)]
pub fn masked<const MASK: u32>(value: usize) -> usize {
    let mut value = value as u64;
    // SAFETY: one arithmetic instruction on a register.
    unsafe {
        core::arch::asm!("{value} &= {mask}", value = inout(reg) value, mask = const MASK, options(pure, nomem, nostack));
    }
    value as usize
}
