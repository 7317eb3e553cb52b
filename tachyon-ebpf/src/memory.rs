//! The target's memory, as the helpers give it.

use crate::maps::{LAYOUTS, STATE};
use aya_ebpf::helpers::generated::bpf_probe_read_user;
use tachyon_common::layout::Layout;
use tachyon_common::walk::{Content, Unreadable, UserMemory};

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

    #[inline(always)]
    fn hash_object(&self, _layout: &Layout, content: &mut Content) {
        // `content` is the one of this CPU's scratch, which the function looks up itself: the compiler must not think
        // that it does not change.
        core::hint::black_box(&mut *content);
        let _zero = hash_object();
        core::hint::black_box(content);
    }

    #[inline(always)]
    fn hash_piece(&self, content: &mut Content) {
        // As above.
        core::hint::black_box(&mut *content);
        let _zero = hash_piece();
        core::hint::black_box(content);
    }
}

/// [`Content::object`] of this CPU's scratch. A global function, as [`crate::sample::walk_frames`]' are. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn hash_object() -> u64 {
    let Some(state) = STATE.get_ptr_mut(0) else { return 0 };
    // SAFETY: this CPU's value, and the caller leaves the field alone meanwhile.
    let state = unsafe { &mut *state };
    if let Some(layout) = LAYOUTS.get(state.process.layout) {
        state.code_buffer.content.object(&CurrentProcess, layout);
    }
    0
}

/// [`Content::piece`] of this CPU's scratch, likewise. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn hash_piece() -> u64 {
    let Some(state) = STATE.get_ptr_mut(0) else { return 0 };
    // SAFETY: as above.
    unsafe { &mut *state }.code_buffer.content.piece(&CurrentProcess);
    0
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
