//! The diagnostic build only (`cargo xtask bpf build --log`): tells user space why walks stop, a few lines a second.

use crate::sample::Scratch;
use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use aya_ebpf::macros::map;
use aya_ebpf::maps::PerCpuArray;
use aya_log_ebpf::info;
use tachyon_common::stop::StopReason;

/// Most lines of one CPU in a second.
const LINES_A_SECOND: u32 = 10;

/// Value of `LINES`.
#[repr(C)]
struct Lines {
    /// When the present second began, `bpf_ktime_get_ns()`.
    since_ns: u64,
    /// Lines in it.
    told: u32,
    /// Stops since the last line that were not told.
    held_back: u32,
}

/// Key 0 -> the present second's lines; written and read by `tell_stop`.
#[map]
static LINES: PerCpuArray<Lines> = PerCpuArray::with_max_entries(1, 0);

/// Tells where the walk of the present sample stopped and why, unless it saw the whole stack. The numbers are of
/// [`StopReason`]; user space names them. A global function: it is verified once, and not at each place that emits.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn tell_stop() -> u64 {
    let Some(Scratch { sample, state, .. }) = Scratch::get() else { return 0 };
    let record = &sample.record;
    let (python, native) = (record.stop, record.native_stop);
    let whole = [StopReason::Complete as u8, StopReason::NoFrame as u8];
    if whole.contains(&python) && native == StopReason::Complete as u8 {
        return 0;
    }
    let Some(lines) = LINES.get_ptr_mut(0) else { return 0 };
    // SAFETY: this CPU's value; perf programs do not nest on a CPU.
    let lines = unsafe { &mut *lines };
    // SAFETY: the helper takes nothing and cannot fail.
    let now = unsafe { bpf_ktime_get_ns() };
    if now.wrapping_sub(lines.since_ns) > 1_000_000_000 {
        (lines.since_ns, lines.told) = (now, 0);
    }
    if lines.told >= LINES_A_SECOND {
        lines.held_back += 1;
        return 0;
    }
    lines.told += 1;
    // Before a frame was met: the thread whose state was looked for.
    let at = if state.walk.next == 0 { state.thread_pointer.address } else { state.walk.next };
    info!(
        (),
        "pid {} thread {}: python stop {} at {:x}, native stop {} at {:x}; {} not told",
        record.tgid,
        record.tid,
        python,
        at,
        native,
        state.native.ip,
        lines.held_back
    );
    lines.held_back = 0;
    1
}
