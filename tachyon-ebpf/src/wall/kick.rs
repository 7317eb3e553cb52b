//! The kick: an interrupt that meets a thread when its wait is over, before it runs code of its own.

use super::{counts, facts, record};
use crate::kernel::KernelPtr;
use crate::maps::{KICKS, WAIT_ENDS, WAITING};
use crate::sample;
use aya_ebpf::cty::c_void;
use aya_ebpf::helpers::generated::{bpf_get_smp_processor_id, bpf_map_lookup_elem, bpf_ringbuf_output};
use aya_ebpf::programs::RawTracePointContext;
use core::ptr::NonNull;

/// `BPF_RB_FORCE_WAKEUP`.
const FORCE_WAKEUP: u64 = 2;

/// Raises an interrupt on this CPU.
#[inline(always)]
pub fn kick() -> bool {
    // SAFETY: the helper takes nothing and cannot fail.
    let cpu = unsafe { bpf_get_smp_processor_id() } as u32;
    // SAFETY: what the loader puts in the place of `KICKS` is an array of maps with keys like this one.
    let ring = unsafe { bpf_map_lookup_elem((&raw const KICKS).cast_mut().cast(), (&raw const cpu).cast()) };
    let Some(ring): Option<NonNull<c_void>> = NonNull::new(ring) else { return false };
    let mut nothing = 0_u64;
    // SAFETY: a ring, and a word that is valid for reads.
    unsafe { bpf_ringbuf_output(ring.as_ptr(), (&raw mut nothing).cast(), 8, FORCE_WAKEUP) == 0 }
}

/// The interrupt: the walk begins if it met the thread that it was raised for.
#[inline(always)]
pub fn on_kick(ctx: &RawTracePointContext) {
    let Some(waiting) = WAITING.get_ptr_mut(WAIT_ENDS) else { return };
    // SAFETY: this CPU's value; the interrupt does not come while a CPU switches.
    let waiting = unsafe { &mut *waiting };
    if waiting.task == 0 {
        return;
    }
    let met = waiting.task == KernelPtr::current_task().0;
    waiting.task = 0;
    if waiting.sparse != 0 {
        waiting.sparse = 0;
        return counts(waiting.bank, |counts| counts.tries_met += u64::from(met));
    }
    if met {
        record::make(ctx, WAIT_ENDS);
    }
    let lost = facts::weight(&waiting.facts);
    counts(waiting.bank, |counts| counts.not_met += lost);
}

/// Kicks whatever runs, which counts as a try ([`WaitCounters::tries_met`](tachyon_common::event::WaitCounters)).
#[inline(always)]
pub fn try_kick() {
    let Some(waiting) = WAITING.get_ptr_mut(WAIT_ENDS) else { return };
    // SAFETY: this CPU's value; no waits are sampled yet.
    let waiting = unsafe { &mut *waiting };
    waiting.task = KernelPtr::current_task().0;
    waiting.sparse = 1;
    waiting.bank = sample::bank();
    if !kick() {
        (waiting.task, waiting.sparse) = (0, 0);
    }
}
