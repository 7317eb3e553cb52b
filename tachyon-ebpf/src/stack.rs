//! Copies of stacks whose native walk has ended for want of unwind tables: user space ends it there.

use crate::emit::{NO_WAKEUP, has_room};
use crate::maps::{CODE, CodeScratch, SAMPLES, config};
use crate::memory::masked;
use crate::sample::Scratch;
use aya_ebpf::helpers::generated::{bpf_probe_read_user, bpf_ringbuf_output};
use tachyon_common::config::machine;
use tachyon_common::event::{RecordHeader, StackRecord, kind};
use tachyon_common::limits::{STACK_COPY, STACK_LOOKS, STACK_PAGE, STACK_PART, STACK_PARTS, STACKS_A_TENTH};
use tachyon_common::opaque;
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{NativeWalk, may_call};

/// A tenth of a second, in nanoseconds.
const TENTH: u64 = 100_000_000;

/// Sends what the thread has on its stack from where the walk stands, as far as it can be read and as the limits allow. A global
/// function, as `sample::frames::walk_python_frames` is. Always 0.
#[unsafe(export_name = "copy_stack")]
#[inline(never)]
pub extern "C" fn copy() -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    if sample.record.native_stop == StopReason::UnknownCode as u8 && !is_plausible(&state.native) {
        return 0;
    }
    let now = sample.record.ktime_ns;
    if now.wrapping_sub(state.copies_since) > TENTH {
        (state.copies_since, state.copies) = (now, 0);
    }
    if state.copies >= STACKS_A_TENTH {
        return 0;
    }
    state.copies += 1;
    let first = state.native.sp & !7;
    let (mut passed, mut parts) = (0, 0);
    while parts < STACK_PARTS && passed < STACK_COPY {
        let more = copy_part(first.wrapping_add(passed));
        if more == 0 {
            break;
        }
        passed += more;
        parts += 1;
    }
    0
}

/// Whether code that nobody knows is code at all: where a greenlet's stack ends, anything may lie.
#[inline(always)]
fn is_plausible(walk: &NativeWalk) -> bool {
    let Some(address) = walk.return_address() else { return true };
    let mut before = 0_u64;
    let into = (&raw mut before).cast();
    // SAFETY: the word is as long as is told.
    let read = unsafe { bpf_probe_read_user(into, size_of::<u64>() as u32, address.wrapping_sub(8) as *const _) };
    read == 0 && may_call(before, config!(machine) == machine::ARM64)
}

/// Sends what can be read in one piece from an address on, or from the first page behind it that can be read: large variables have pages
/// that were never written. Returns how many bytes it has passed; 0: there is no more. A global function, likewise.
#[unsafe(export_name = "copy_part_of_stack")]
#[inline(never)]
pub extern "C" fn copy_part(from: u64) -> u64 {
    // Samples come first.
    if !has_room() {
        return 0;
    }
    let Some(state) = Scratch::state() else { return 0 };
    let Some(part) = CODE.get_ptr_mut(0) else { return 0 };
    let part = part.cast::<u8>();
    let (mut start, mut bytes, mut pages) = (from, 0, 0);
    while pages < STACK_LOOKS && bytes < STACK_PART {
        pages += 1;
        let at = start.wrapping_add(bytes as u64);
        let len =
            opaque::min((STACK_PAGE - (at as usize & (STACK_PAGE - 1))) as u64, (STACK_PART - bytes) as u64) as usize;
        if at >= state.own_stack.end {
            break;
        }
        let into = size_of::<StackRecord>() + masked::<{ STACK_PART as u32 - 1 }>(bytes);
        // SAFETY: masked below the end of the value, as is asserted below.
        let into = unsafe { part.add(into) };
        // SAFETY: so is what is written there.
        let read = unsafe { bpf_probe_read_user(into.cast(), masked::<LEN_MASK>(len) as u32, at as *const _) };
        if read == 0 {
            bytes += len;
        } else if bytes == 0 {
            start = at.wrapping_add(len as u64);
        } else {
            break;
        }
    }
    if bytes == 0 {
        return 0;
    }
    send_part(start, bytes as u64);
    start.wrapping_add(bytes as u64).wrapping_sub(from)
}

/// Sends as many bytes of the stack from an address on, which have been read. A global function, likewise: how many they are is not
/// followed. Always 0.
#[unsafe(export_name = "send_part_of_stack")]
#[inline(never)]
pub extern "C" fn send_part(start: u64, bytes: u64) -> u64 {
    let Some((sample, state)) = Scratch::sample_and_state() else { return 0 };
    let Some(part) = CODE.get_ptr_mut(0) else { return 0 };
    let part = part.cast::<u8>();
    let bytes = bytes as usize;
    let len = size_of::<StackRecord>() + bytes;
    let header = RecordHeader { kind: kind::STACK, bank: sample.record.header.bank, event: 0, len: len as u32 };
    // SAFETY: the value is larger than a record, aligned as one, and this CPU's alone while the program runs.
    let record = unsafe { &mut *part.cast::<StackRecord>() };
    // Field by field: a whole record would pass over the BPF stack, which is too small for it.
    record.header = header;
    record.ktime_ns = sample.record.ktime_ns;
    record.start = start;
    record.entered_at = state.entered_at;
    record.tid = sample.record.tid;
    record.bytes = bytes as u32;
    // Word by word: the compiler would copy it by way of the stack, which 5.10 has no room for here.
    let (from, to) = ((&raw const state.native).cast::<u64>(), (&raw mut record.walk).cast::<u64>());
    let mut word = 0;
    while word < size_of::<NativeWalk>() / 8 {
        // SAFETY: a word of the walk, which consists of such.
        let value = unsafe { from.wrapping_add(word).read_volatile() };
        // SAFETY: likewise.
        unsafe { to.wrapping_add(word).write_volatile(value) };
        word += 1;
    }
    let ring = (&raw const SAMPLES).cast_mut().cast();
    // SAFETY: a map of the right type; the value is 32 KiB long and the length is masked below that. If it does not fit, it is as if it
    // could not be read.
    unsafe { bpf_ringbuf_output(ring, part.cast(), masked::<0x7fff>(len) as u64, NO_WAKEUP) };
    0
}

/// Bits of the length of a page, or of less.
const LEN_MASK: u32 = 2 * STACK_PAGE as u32 - 1;

const _: () = assert!(size_of::<StackRecord>() + STACK_PART + LEN_MASK as usize <= size_of::<CodeScratch>());
