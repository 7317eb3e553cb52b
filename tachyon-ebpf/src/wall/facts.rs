//! What is said of a wait beside its stack: the system call, and the lock.

use super::record;
use crate::kernel::{KernelPtr, UserRegs, arm64};
use crate::maps::{SCRATCH_BYTES, config};
use crate::memory::{CurrentProcess, masked};
use crate::sample::Scratch;
use tachyon_common::config::machine;
use tachyon_common::event::{SampleRecord, WaitFacts};
use tachyon_common::layout::Layout;
use tachyon_common::wait::{GIL_BYTES, GIL_REFERENCES, NEAR_STACK};
use tachyon_common::walk;

/// Ticks of a wait.
#[inline(always)]
pub fn weight(facts: &WaitFacts) -> u64 {
    u64::from(facts.weight) + u64::from(facts.queued)
}

/// Takes down the system call in which the thread waits, with its arguments.
#[inline(always)]
pub fn note_call(facts: &mut WaitFacts, task: KernelPtr) {
    facts.syscall = -1;
    facts.args = [0; 3];
    facts.polled = 0;
    facts.gil = 0;
    (facts.holder, facts.holder_frames, facts.gil_is_near) = (0, 0, 0);
    if config!(machine) == machine::ARM64 {
        let Some(regs) = UserRegs::saved_at_arm64(task) else { return };
        facts.syscall = i64::from(regs.read::<u32>(arm64::SYSCALL) as i32);
        facts.args = [regs.read(arm64::ORIG_X0), regs.read(8), regs.read(16)];
    } else {
        let Some(regs) = UserRegs::saved_at(task) else { return };
        // `struct pt_regs`: dx 96, si 104, di 112, orig_ax 120.
        facts.syscall = regs.read::<u64>(120) as i64;
        facts.args = [regs.read(112), regs.read(104), regs.read(96)];
    }
}

/// `futex` (`arch/x86/entry/syscalls/syscall_64.tbl`, `include/uapi/asm-generic/unistd.h`).
const FUTEX: [i64; 2] = [202, 98];

/// Whether the thread waited for the GIL, as far as the futex tells. A futex on the thread's own stack is one of musl's condition
/// variables; which one, pointers near it say.
#[inline(always)]
pub fn is_for_gil(facts: &mut WaitFacts, record: &SampleRecord) -> bool {
    let futex = if config!(machine) == machine::ARM64 { FUTEX[1] } else { FUTEX[0] };
    if facts.gil == 0 || facts.state == 0 || facts.syscall != futex {
        return false;
    }
    let address = facts.args[0];
    if address.wrapping_sub(facts.gil) < GIL_BYTES {
        return true;
    }
    if address.wrapping_sub(record.user_sp) >= NEAR_STACK {
        return false;
    }
    facts.gil_is_near = count_references() as u32;
    facts.gil_is_near >= GIL_REFERENCES
}

/// How many words behind the futex, which is on the thread's stack, refer to the GIL. A global function: its turns are not multiplied with what follows.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn count_references() -> u64 {
    let (Some(Scratch { state, .. }), Some(waiting)) = (Scratch::get(), record::waiting()) else { return 0 };
    walk::references(&CurrentProcess, &mut state.stack_buffer, waiting.facts.args[0] & !7, waiting.facts.gil)
}

/// Puts what is known of the wait behind the frames of the sample, from `at` on, and gives its length.
#[inline(always)]
pub fn append(at: usize) -> usize {
    append_wait(at as u64) as usize & 0xff
}

/// The same. A global function: it is verified once.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn append_wait(at: u64) -> u64 {
    const BYTES: usize = size_of::<WaitFacts>();
    let (Some(Scratch { sample, .. }), Some(waiting)) = (Scratch::get(), record::waiting()) else { return 0 };
    let facts = &mut waiting.facts;
    facts.polled = walk::read_u64(&CurrentProcess, facts.args[0], 0).unwrap_or(0);
    let at = masked::<0x7ff8>(at as usize);
    if at > SCRATCH_BYTES - BYTES {
        return 0;
    }
    // SAFETY: `at` is inside the scratch value.
    let to = unsafe { (&raw mut *sample).cast::<u8>().add(at) };
    // SAFETY: as many bytes are left of it.
    unsafe { to.cast::<WaitFacts>().write(*facts) };
    BYTES as u64
}

/// Where the GIL of a thread state is; 0: not known.
#[inline(always)]
pub fn gil(layout: &Layout, runtime: u64, tstate: u64) -> u64 {
    if Layout::present(layout.interp_ceval_gil) {
        let interp = walk::read_u64(&CurrentProcess, tstate, layout.tstate_interp).unwrap_or(0);
        return walk::read_u64(&CurrentProcess, interp, layout.interp_ceval_gil).unwrap_or(0);
    }
    if Layout::present(layout.runtime_gil) { runtime.wrapping_add(u64::from(layout.runtime_gil)) } else { 0 }
}
