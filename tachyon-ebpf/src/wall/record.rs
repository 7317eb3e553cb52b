//! The record of a wait: made where its thread is the running one, by the stages that samples have.

use super::{WANTED, counts, facts};
use crate::interrupt::Interrupt as _;
use crate::kernel::KernelPtr;
use crate::maps::{
    COUNTERS, ENTRIES, PROCESSES, SAMPLE, SAMPLES, STAGE_BEGIN, STATE, SampleScratch, WAIT_BEGINS, WAIT_ENDS,
    WAIT_STAGES, WAIT_WAKES, WAITING, Waiting,
};
use crate::sample::{self, Scratch};
use crate::thread;
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::helpers::generated::bpf_ringbuf_output;
use aya_ebpf::programs::RawTracePointContext;
use tachyon_common::event::{RecordHeader, SampleRecord, WaitFacts, kind};
use tachyon_common::segment::WAIT_BANKS;
use tachyon_common::stop::LossCause;
use tachyon_common::wait::SeenThread;

/// Goes on to [`begin`] for one of `WAITING`; comes back only when the kernel refuses.
#[inline(always)]
pub fn make(ctx: &RawTracePointContext, which: u32) {
    let Some(state) = STATE.get_ptr_mut(0) else { return };
    // SAFETY: this CPU's value: neither the timer nor the interrupt of a kick comes while a CPU switches or wakes a thread.
    unsafe { (*state).wait = which };
    // SAFETY: nothing here has a destructor, and all state lies in maps.
    unsafe { WAIT_STAGES.tail_call(ctx, STAGE_BEGIN) };
}

/// The wait whose record is made, and which of `WAITING` it is.
#[inline(always)]
fn current() -> Option<(&'static mut Waiting, u32)> {
    let state = STATE.get_ptr(0)?;
    // SAFETY: this CPU's value.
    let which = unsafe { (*state).wait };
    let waiting = WAITING.get_ptr_mut(which)?;
    // SAFETY: this CPU's value.
    Some((unsafe { &mut *waiting }, which))
}

/// The wait whose record is made.
#[inline(always)]
pub fn waiting() -> Option<&'static mut Waiting> {
    Some(current()?.0)
}

/// Ticks that the record stands for: none but of a wait that is over.
#[inline(always)]
pub fn weight() -> u64 {
    match current() {
        Some((waiting, WAIT_ENDS)) => facts::weight(&waiting.facts),
        _ => 0,
    }
}

/// The record was sent.
#[inline(always)]
pub fn sent() {
    if let Some((waiting, WAIT_ENDS)) = current() {
        counts(waiting.bank, |counts| counts.records += 1);
    }
}

/// The first stage: as [`sample::on_sample`] of a process that is known.
#[inline(always)]
pub fn begin(ctx: &RawTracePointContext) {
    let Some((waiting, which)) = current() else { return };
    let bank = waiting.bank + WAIT_BANKS;
    let (Some(counters), Some(sample), Some(state)) =
        (COUNTERS.get_ptr_mut(bank), SAMPLE.get_ptr_mut(0), STATE.get_ptr_mut(0))
    else {
        let lost = weight();
        counts(waiting.bank, |counts| counts.not_met += lost);
        return;
    };
    let mut scratch = Scratch {
        // SAFETY: this CPU's value, see `make`.
        counters: unsafe { &mut *counters },
        // SAFETY: as above.
        sample: unsafe { &mut *sample },
        // SAFETY: as above.
        state: unsafe { &mut *state },
    };
    scratch.counters.ran += ctx.weight();
    let task = KernelPtr::current_task();
    let pid_tgid = bpf_get_current_pid_tgid();
    let tgid = thread::own_tgid(pid_tgid);
    let tid = thread::own_tid(task, pid_tgid);
    let Some(process) = PROCESSES.get_ptr_mut(&tgid).filter(|_| tid != 0) else {
        return sample::lose(ctx, scratch.counters, LossCause::ProcessGone);
    };
    // SAFETY: a live map value, as in `sample::on_sample`.
    let process = unsafe { &mut *process };
    let Some(entry) = ENTRIES.get_ptr(&process.entry) else {
        return sample::lose(ctx, scratch.counters, LossCause::ProcessGone);
    };
    // SAFETY: a live map value, copied.
    scratch.state.process = unsafe { *entry };
    let known = &scratch.state.process;
    if known.flags & WANTED != WANTED || known.instance != process.instance || known.image != process.image {
        return sample::lose(ctx, scratch.counters, LossCause::ProcessGone);
    }
    facts::note_call(&mut waiting.facts, task);
    let kind = match which {
        WAIT_BEGINS => kind::WAIT_BEGIN,
        WAIT_WAKES => kind::WAKER,
        _ => kind::WAIT,
    };
    scratch.sample.record.header = RecordHeader { kind, bank: bank as u8, event: 0, len: 0 };
    sample::begin(ctx, &mut scratch, process, task, (tgid, tid));
}

/// The end of a wait whose stack was taken at its beginning: what is known of it, without frames.
#[inline(always)]
pub fn send_end(waiting: &Waiting, seen: &SeenThread) {
    const LEN: usize = size_of::<SampleRecord>() + size_of::<WaitFacts>();
    let bank = waiting.bank + WAIT_BANKS;
    let (Some(counters), Some(sample)) = (COUNTERS.get_ptr_mut(bank), SAMPLE.get_ptr_mut(0)) else { return };
    // SAFETY: this CPU's values, see `make`.
    let (counters, sample) = (unsafe { &mut *counters }, sample);
    let weight = facts::weight(&waiting.facts);
    counters.ran += weight;
    let header = RecordHeader { kind: kind::WAIT_END, bank: bank as u8, event: 0, len: LEN as u32 };
    // SAFETY: as above.
    let record: &mut SampleRecord = unsafe { &mut (*sample).record };
    (record.header, record.ktime_ns, record.tgid, record.tid) = (header, waiting.facts.ended_ns, seen.tgid, seen.tid);
    (record.python_frames, record.native_frames, record.kernel_frames, record.whose) = (0, 0, 0, 0);
    // SAFETY: the facts lie behind the record, inside of the scratch value.
    let to = unsafe { sample.cast::<u8>().add(size_of::<SampleRecord>()) };
    // SAFETY: as above.
    unsafe { to.cast::<WaitFacts>().write(waiting.facts) };
    let (ring, from): (_, *mut SampleScratch) = ((&raw const SAMPLES).cast_mut().cast(), sample);
    // SAFETY: a map of the right type, and a value that is longer.
    if unsafe { bpf_ringbuf_output(ring, from.cast(), LEN as u64, NO_WAKEUP) } == 0 {
        counts(waiting.bank, |counts| counts.records += 1);
        // Last: the run has come to its end.
        counters.sent += weight;
    } else {
        counters.loss[LossCause::RingFull as usize] += weight;
    }
}

/// `BPF_RB_NO_WAKEUP`.
const NO_WAKEUP: u64 = 1;
