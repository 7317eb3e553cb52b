//! A finished record -> the ring buffer.

use crate::interrupt::Interrupt;
use crate::maps::{SAMPLE, SAMPLES, SCRATCH_BYTES, config};
use crate::memory::masked;
use crate::sample::{Scratch, lose};
use crate::whose;
use aya_ebpf::helpers::generated::{bpf_get_stack, bpf_ringbuf_output, bpf_ringbuf_query};
use tachyon_common::config::flags as config_flags;
use tachyon_common::event::{RawFrame, SampleRecord, status};
use tachyon_common::limits::{MAX_KERNEL_FRAMES, MAX_NATIVE_FRAMES};
use tachyon_common::stop::LossCause;

/// Hands the record to the ring buffer.
#[inline(always)]
pub fn emit<C: Interrupt>(ctx: &C, scratch: &mut Scratch) {
    let frames = masked::<0x7ff>(scratch.state.walk.stored as usize);
    let record = &mut scratch.sample.record;
    let native = masked::<{ 2 * MAX_NATIVE_FRAMES as u32 - 1 }>(usize::from(record.native_frames));
    let mut bytes = size_of::<SampleRecord>() + frames * size_of::<RawFrame>() + native * 8;
    record.python_frames = frames as u16;
    record.tail_calls = scratch.state.tail_calls as u16;
    if config!(flags) & config_flags::KERNEL != 0 && record.status & status::IN_KERNEL != 0 {
        let kernel = kernel_stack(ctx, (&raw mut *scratch.sample).cast(), bytes);
        scratch.sample.record.kernel_frames = (kernel / 8) as u16;
        bytes += kernel;
    }
    if scratch.state.whose.flags != 0 {
        bytes = whose::append_whose(bytes as u64) as usize;
    }
    bytes += ctx.append(bytes);
    #[cfg(feature = "log")]
    crate::diagnostics::tell_stop();
    if send(bytes as u64) != 0 {
        ctx.sent();
        // Last: the run has come to its end.
        scratch.counters.sent += ctx.weight();
    } else {
        lose(ctx, scratch.counters, LossCause::RingFull);
    }
}

/// Sends the record and what follows it, `bytes` in all: 1, or 0 where the ring is full. A global function, as
/// `sample::frames::walk_python_frames` is.
#[unsafe(export_name = "send_record")]
#[inline(never)]
pub extern "C" fn send(bytes: u64) -> u64 {
    let Some(sample) = SAMPLE.get_ptr_mut(0) else { return 0 };
    // SAFETY: this CPU's value, see `Scratch::get`.
    let len = unsafe { &raw mut (*sample).record.header.len };
    // SAFETY: as above.
    unsafe { len.write(bytes as u32) };
    let ring = (&raw const SAMPLES).cast_mut().cast();
    // The reader polls; it is woken only when the ring fills faster than it polls.
    // SAFETY: a map of the right type.
    let waiting = unsafe { bpf_ringbuf_query(ring, AVAIL_DATA) };
    let wake = if waiting >= u64::from(config!(wake_bytes)) { FORCE_WAKEUP } else { NO_WAKEUP };
    // SAFETY: the scratch value is 32 KiB long and the length is masked below that.
    let failed = unsafe { bpf_ringbuf_output(ring, sample.cast(), masked::<0x7fff>(bytes as usize) as u64, wake) };
    u64::from(failed == 0)
}

/// Whether the sample ring is less than half full.
#[inline(always)]
pub fn has_room() -> bool {
    let ring = (&raw const SAMPLES).cast_mut().cast();
    // SAFETY: a map of the right type.
    let waiting = unsafe { bpf_ringbuf_query(ring, AVAIL_DATA) };
    // SAFETY: likewise.
    let size = unsafe { bpf_ringbuf_query(ring, RING_SIZE) };
    waiting < size / 2
}

/// Puts the kernel's stack behind what the sample has so far, leaf first, and gives its length in bytes.
#[inline(always)]
fn kernel_stack<C: Interrupt>(ctx: &C, sample: *mut u8, at: usize) -> usize {
    const BYTES: usize = MAX_KERNEL_FRAMES * 8;
    let at = masked::<0x7fff>(at);
    if at > SCRATCH_BYTES - BYTES {
        return 0;
    }
    // SAFETY: `at` is inside the scratch value.
    let stack = unsafe { sample.add(at) };
    // SAFETY: as many bytes are left of the scratch value; the helper writes no more than it is told.
    let written = unsafe { bpf_get_stack(ctx.as_ptr(), stack.cast(), BYTES as u32, 0) };
    if written > 0 { masked::<0x3ff>(written as usize) } else { 0 }
}

/// `BPF_RB_AVAIL_DATA`.
const AVAIL_DATA: u64 = 0;
/// `BPF_RB_RING_SIZE`.
const RING_SIZE: u64 = 1;
/// `BPF_RB_NO_WAKEUP`.
pub const NO_WAKEUP: u64 = 1;
/// `BPF_RB_FORCE_WAKEUP`.
const FORCE_WAKEUP: u64 = 2;
