//! Waits (`--wall`, `--off-cpu`): their programs, the rings whose wake-ups are the kicks, and what was counted.
//!
//! The rings carry no data, but they must be emptied all the same, or they are full after a thousand kicks.

mod method;
mod told;

pub(super) use method::TRY;
pub use method::{WaitMethod, wait_method};

use super::error::{KernelError, program_error};
use super::native::shared;
use super::object::{Kernel, take};
use super::pod::Pod;
use super::programs::tracepoint;
use super::rows::{array_of_maps, put_in_place};
use super::segment::since;
use super::shared::SharedArray;
use crate::types::KtimeNs;
use aya::Ebpf;
use aya::maps::{HashMap, Map, MapData, MapError, PerCpuArray, ProgramArray, RingBuf};
use aya::programs::raw_trace_point::RawTracePointLinkId;
use aya_obj::generated::bpf_map_type;
use std::collections::VecDeque;
use std::os::fd::AsRawFd as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tachyon_common::event::{Counters, WaitCounters};
use tachyon_common::limits::THREAD_SLOTS;
use tachyon_common::segment::WAIT_BANKS;
use tachyon_common::wait::{BEGAN, PERIOD, SeenThread, ThreadSlot, widened_ticks};
use told::Told;

/// Whether waiting threads are sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waits {
    /// Running threads only.
    #[default]
    Not,
    /// Waiting threads too.
    Too,
    /// Waiting threads only.
    Alone,
}

impl Waits {
    /// Whether there are any.
    #[must_use]
    pub fn are_wanted(self) -> bool {
        self != Self::Not
    }
}

/// The program that finds waits, the one that finds what ends them, and the one that the kick runs.
pub(super) const SWITCH: &str = "on_switch";
pub(super) const WAKE: &str = "on_wake";
pub(super) const KICK: &str = "on_kick";
/// The programs that those tail-call, in the order of `programs::STAGES`, and the one that walks the frames of a lock's
/// holder.
pub(super) const WAIT_STAGES: [&str; 7] =
    ["wait_search", "wait_frames", "wait_codes", NATIVE_WAIT_STAGE, "wait_begin", "wait_awaiting", "wait_holder"];
pub(super) const NATIVE_WAIT_STAGE: &str = "wait_native";

/// The tracepoint of the interrupt that a ring's wake-up raises.
const INTERRUPT: &str = if cfg!(target_arch = "aarch64") { "ipi_entry" } else { "irq_work_entry" };

/// Bytes of each CPU's ring: a thousand kicks, which is more than a CPU takes in a second.
const RING_BYTES: u32 = 1 << 14;
/// How often the rings are emptied.
const EMPTIED: Duration = Duration::from_millis(100);
/// A kick that has not come this long after the last switch does not come.
const LAST_KICKS: Duration = Duration::from_millis(20);

/// What exists only if waits are wanted.
pub(super) struct WaitMaps {
    counts: PerCpuArray<MapData, Pod<WaitCounters>>,
    slots: SharedArray<ThreadSlot>,
    /// Threads without a slot.
    threads: HashMap<MapData, u64, Pod<SeenThread>>,
    /// The same map.
    threads_fd: OwnedFd,
    told: Told,
    periods: Periods,
    began: KtimeNs,
    method: WaitMethod,
    // Tail calls work only as long as the table's descriptor is open.
    stages: ProgramArray<MapData>,
    _kicks: OwnedFd,
    stopping: Arc<AtomicBool>,
    emptying: Option<JoinHandle<()>>,
    links: Vec<(&'static str, RawTracePointLinkId)>,
}

/// Most changes of the period that are remembered: each is a change of the sampling rate, and there are few.
const MOST_PERIODS: usize = 256;

/// Periods of the ticks, each with the moment from which it holds, oldest first; the first also holds for the time before it.
#[derive(Clone, Debug, Default)]
struct Periods(VecDeque<(KtimeNs, u64)>);

impl Periods {
    fn change(&mut self, at: KtimeNs, period_ns: u64) {
        if self.0.len() >= MOST_PERIODS {
            self.0.pop_front();
        }
        self.0.push_back((at, period_ns));
    }

    fn ticks(&self, seed: u64, (tid, widening): (u32, u32), began_ns: u64, ended_ns: u64) -> u64 {
        let ends = self.0.iter().skip(1).map(|(from, _)| from.0).chain([u64::MAX]);
        let parts = self.0.iter().zip(ends).enumerate();
        let of_part = |(at, (&(from, period_ns), end)): (usize, (&(KtimeNs, u64), u64))| {
            let from = if at == 0 { 0 } else { from.0 };
            widened_ticks(seed, tid, (period_ns, widening), began_ns.max(from), ended_ns.min(end))
        };
        parts.map(of_part).sum()
    }
}

/// What became of waits, in ticks.
#[derive(Clone, Copy, Debug, Default)]
pub struct WaitTotals {
    /// What became of them before the walk.
    pub before: WaitCounters,
    /// What became of those that were walked.
    pub walked: Counters,
}

impl WaitTotals {
    /// Ticks of waits that are known to have been dropped before a walk, or to have begun one.
    #[must_use]
    pub fn met(&self) -> u64 {
        let WaitCounters { too_many, not_kicked, not_met, unreported, .. } = self.before;
        too_many + not_kicked + not_met + unreported + self.walked.ran
    }

    /// Whether no kick is on its way, and no walk.
    #[must_use]
    pub fn are_settled(&self) -> bool {
        self.met() == self.before.due && self.walked.is_settled()
    }

    /// Counts kicks that have not come as lost.
    #[must_use]
    pub fn without_kicks_to_come(mut self) -> Self {
        self.before.not_met += self.before.due.saturating_sub(self.met());
        self
    }

    /// What was counted since an earlier reading of the same bank.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut before = self.before;
        each(&mut before, &earlier.before, u64::saturating_sub);
        Self { before, walked: since(&earlier.walked, &self.walked) }
    }
}

fn each(into: &mut WaitCounters, other: &WaitCounters, of: impl Fn(u64, u64) -> u64) {
    let WaitCounters {
        due,
        widened,
        too_many,
        not_kicked,
        not_met,
        unreported,
        threads_without_room,
        records,
        tries_met,
    } = into;
    for (into, other) in [
        (due, other.due),
        (widened, other.widened),
        (too_many, other.too_many),
        (not_kicked, other.not_kicked),
        (not_met, other.not_met),
        (unreported, other.unreported),
        (threads_without_room, other.threads_without_room),
        (records, other.records),
        (tries_met, other.tries_met),
    ] {
        *into = of(*into, other);
    }
}

impl WaitMaps {
    /// Makes the rings and takes the maps. To be called before programs are loaded.
    pub(super) fn of(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        let share = |source| KernelError::Share("KICKS", source);
        let cpus = u32::try_from(aya::util::nr_cpus().map_err(|(_, source)| share(source))?).unwrap_or(u32::MAX);
        let rings = (0..cpus).map(|_| ring()).collect::<Result<Vec<_>, _>>().map_err(KernelError::map("KICKS"))?;
        let first = rings.first().ok_or(KernelError::Missing("KICKS"))?;
        let outer = array_of_maps(first, cpus).map_err(share)?;
        put_in_place(ebpf.map("KICKS").ok_or(KernelError::Missing("KICKS"))?, outer.as_raw_fd())?;
        let keep = outer.try_clone().map_err(share)?;
        let mut array = super::rows::typed(outer).map_err(KernelError::map("KICKS"))?;
        for (cpu, ring) in (0..).zip(&rings) {
            array.set(cpu, ring, 0).map_err(KernelError::map("KICKS"))?;
        }
        let rings: Vec<RingBuf<MapData>> = rings
            .into_iter()
            .map(|ring| RingBuf::try_from(Map::RingBuf(ring)))
            .collect::<Result<_, _>>()
            .map_err(KernelError::map("KICKS"))?;
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&stopping);
        let empty = move || empty(rings, &stop);
        let thread = std::thread::Builder::new().name("tachyon-kicks".to_owned()).spawn(empty);
        let Some(Map::HashMap(seen)) = ebpf.map("THREADS_SEEN") else {
            return Err(KernelError::Missing("THREADS_SEEN"));
        };
        let threads_fd = seen.fd().as_fd().try_clone_to_owned().map_err(share)?;
        Ok(Self {
            counts: take(ebpf, "WAIT_COUNTS")?,
            slots: shared(ebpf, "THREAD_SLOTS", THREAD_SLOTS)?,
            threads: take(ebpf, "THREADS_SEEN")?,
            threads_fd,
            told: Told::of(ebpf)?,
            periods: Periods::default(),
            began: KtimeNs::default(),
            method: WaitMethod::Kick,
            stages: take(ebpf, "WAIT_STAGES")?,
            _kicks: keep,
            stopping,
            emptying: Some(thread.map_err(KernelError::Thread)?),
            links: Vec::new(),
        })
    }
}

impl Drop for WaitMaps {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        let _panicked = self.emptying.take().map(JoinHandle::join);
    }
}

fn ring() -> Result<MapData, MapError> {
    let ring = aya_obj::Map::new_from_params(bpf_map_type::BPF_MAP_TYPE_RINGBUF as u32, 0, 0, RING_BYTES, 0);
    MapData::create(ring, "KICK", None)
}

fn empty(mut rings: Vec<RingBuf<MapData>>, stopping: &AtomicBool) {
    while !stopping.load(Ordering::Acquire) {
        for ring in &mut rings {
            while ring.next().is_some() {}
        }
        std::thread::sleep(EMPTIED);
    }
}

impl Kernel {
    /// Puts the programs that walk after the kick into their table.
    pub(super) fn add_wait_stages(&mut self, ebpf: &mut Ebpf) -> Result<(), KernelError> {
        let Some(waits) = &mut self.waits else { return Ok(()) };
        for (index, name) in (0_u32..).zip(WAIT_STAGES).filter(|(_, name)| self.samplers.contains(name)) {
            let fd = tracepoint(ebpf, name)?.fd().map_err(program_error(name))?;
            waits.stages.set(index, fd, 0).map_err(KernelError::map("WAIT_STAGES"))?;
        }
        Ok(())
    }

    /// Does what takes long before waits are sampled, if those are wanted: [`Kernel::attach_waits`] then takes a moment.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn prepare_waits(&mut self) -> Result<(), KernelError> {
        if self.waits.is_none() {
            return Ok(());
        }
        let method = self.prepare_wait_programs()?;
        self.waits.iter_mut().for_each(|waits| waits.method = method);
        Ok(())
    }

    /// Starts sampling waits, if those are wanted and prepared.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach_waits(&mut self) -> Result<(), KernelError> {
        let Some(waits) = &mut self.waits else { return Ok(()) };
        // Until the hook is there, nobody sees a thread that runs and sleeps again: it counts as if it had slept all the time.
        waits.began = KtimeNs::now();
        self.verdicts.set(BEGAN, waits.began.0, 0).map_err(KernelError::map("VERDICTS"))?;
        self.attach_wait_program(SWITCH, "sched_switch")
    }

    /// Where the stacks of waiting threads are taken; known once waits are sampled.
    #[must_use]
    pub fn wait_method(&self) -> WaitMethod {
        self.waits.as_ref().map_or(WaitMethod::Kick, |waits| waits.method)
    }

    /// Stops sampling waits: when this returns, all that were to be looked at have been, or never will be. Returns the moment up
    /// to which waits that are still going on count.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn detach_waits(&mut self) -> Result<KtimeNs, KernelError> {
        let ended = KtimeNs::now();
        let Some(waits) = &mut self.waits else { return Ok(ended) };
        let ebpf = self.ebpf.as_mut().ok_or(KernelError::Verifying)?;
        while let Some((name, link)) = waits.links.pop() {
            tracepoint(ebpf, name)?.detach(link).map_err(program_error(name))?;
            if name == SWITCH {
                std::thread::sleep(LAST_KICKS);
            }
        }
        Ok(ended)
    }

    /// From now on, each waiting thread gets one tick per period.
    pub(super) fn set_wait_period(&mut self, period: Duration) -> Result<(), KernelError> {
        let Some(waits) = &mut self.waits else { return Ok(()) };
        let period_ns = u64::try_from(period.as_nanos()).unwrap_or(u64::MAX).max(1);
        waits.periods.change(KtimeNs::now(), period_ns);
        self.verdicts.set(PERIOD, period_ns, 0).map_err(KernelError::map("VERDICTS"))
    }

    /// Since when waits of a process's threads have been sampled.
    #[must_use]
    pub fn waits_began_of(&self, tgid: u32) -> KtimeNs {
        let began = self.waits.as_ref().map_or_else(KtimeNs::default, |waits| waits.began);
        let entry = self.process(tgid).and_then(|life| self.entry(&life));
        began.max(KtimeNs(entry.map_or(0, |entry| entry.known_ns)))
    }

    /// Ticks of a thread, in the periods of its present wait, between two moments.
    #[must_use]
    pub fn ticks(&self, thread: (u32, u32), began_ns: u64, ended_ns: u64) -> u64 {
        self.waits.as_ref().map_or(0, |waits| waits.periods.ticks(self.seed(), thread, began_ns, ended_ns))
    }

    /// What has become, since the start, of waits that count in a bank; `None` if waits are not wanted.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn waits(&self, bank: u32) -> Result<Option<WaitTotals>, KernelError> {
        let Some(waits) = &self.waits else { return Ok(None) };
        let mut before = WaitCounters::default();
        for Pod(cpu) in waits.counts.get(&bank, 0).map_err(KernelError::map("WAIT_COUNTS"))?.iter() {
            each(&mut before, cpu, |sum, more| sum + more);
        }
        Ok(Some(WaitTotals { before, walked: self.bank_counters(WAIT_BANKS + bank)?.0 }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_of_a_wait_has_the_period_of_its_time() {
        let mut periods = Periods::default();
        periods.change(KtimeNs(5_000_000_000), 10_000_000);
        let thread = (2, 0);
        assert_eq!(periods.ticks(1, thread, 0, 8_000_000_000), widened_ticks(1, 2, (10_000_000, 0), 0, 8_000_000_000));
        periods.change(KtimeNs(6_000_000_000), 100_000_000);
        // A second at 100 Hz, two at 10 Hz, and a tick more or less at each end.
        assert!((119..=121).contains(&periods.ticks(1, thread, 5_000_000_000, 8_000_000_000)));
        assert!((19..=21).contains(&periods.ticks(1, thread, 6_000_000_000, 8_000_000_000)));
        assert!((99..=101).contains(&periods.ticks(1, thread, 4_500_000_000, 5_500_000_000)));
        for at in 0..1_000 {
            periods.change(KtimeNs(7_000_000_000 + at), 10_000_000);
        }
        assert_eq!(periods.0.len(), MOST_PERIODS);
    }
}
