//! Waits (`--wall`, `--off-cpu`): their programs, the rings whose wake-ups are the kicks, and what was counted.
//!
//! The rings carry nothing; somebody must empty them all the same, or they are full after a thousand kicks.

use super::error::{KernelError, program_error};
use super::object::{Kernel, take};
use super::pod::Pod;
use super::programs::tracepoint;
use super::rows::{array_of_maps, put_in_place};
use crate::types::KtimeNs;
use aya::Ebpf;
use aya::maps::{HashMap, Map, MapData, MapError, PerCpuArray, ProgramArray, RingBuf};
use aya::programs::raw_trace_point::RawTracePointLinkId;
use aya_obj::generated::bpf_map_type;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tachyon_common::event::{Counters, WaitCounters};
use tachyon_common::segment::WAIT_BANKS;
use tachyon_common::wait::{BEGAN, SeenThread};

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

/// The program that finds waits, and the one that the kick runs.
pub(super) const SWITCH: &str = "on_switch";
pub(super) const KICK: &str = "on_kick";
/// What those tail-call, in the order of `programs::STAGES`.
pub(super) const WAIT_STAGES: [&str; 4] = ["wait_search", "wait_frames", "wait_codes", NATIVE_WAIT_STAGE];
pub(super) const NATIVE_WAIT_STAGE: &str = "wait_native";

/// The tracepoint of the interrupt that a ring's wake-up raises.
const INTERRUPT: &str = if cfg!(target_arch = "aarch64") { "ipi_entry" } else { "irq_work_entry" };

/// Bytes of each CPU's ring: a thousand kicks, which is more than a CPU takes in a second.
const RING_BYTES: u32 = 1 << 14;
/// How often the rings are emptied.
const EMPTIED: Duration = Duration::from_millis(100);
/// A kick that has not come this long after the last switch does not come.
const LAST_KICKS: Duration = Duration::from_millis(20);

/// What there is only where waits are wanted.
pub(super) struct WaitMaps {
    counts: PerCpuArray<MapData, Pod<WaitCounters>>,
    threads: HashMap<MapData, u64, Pod<SeenThread>>,
    // Tail calls work only as long as the table's descriptor is open.
    stages: ProgramArray<MapData>,
    _kicks: OwnedFd,
    stopping: Arc<AtomicBool>,
    emptying: Option<JoinHandle<()>>,
    links: Vec<(&'static str, RawTracePointLinkId)>,
}

/// What became of waits, in ticks.
#[derive(Clone, Copy, Debug, Default)]
pub struct WaitTotals {
    /// What became of them before the walk.
    pub before: WaitCounters,
    /// What became of those that were walked.
    pub walked: Counters,
}

impl WaitMaps {
    /// Makes the rings and takes the maps. To be called before programs are loaded.
    pub(super) fn of(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        let share = |source| KernelError::Share("KICKS", source);
        let cpus = u32::try_from(aya::util::nr_cpus().map_err(|(_, source)| share(source))?).unwrap_or(u32::MAX);
        let rings = (0..cpus).map(|_| ring()).collect::<Result<Vec<_>, _>>().map_err(KernelError::map("KICKS"))?;
        let first = rings.first().ok_or(KernelError::Missing("KICKS"))?;
        let outer = array_of_maps(first, cpus).map_err(share)?;
        put_in_place(ebpf, "KICKS", &outer)?;
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
        Ok(Self {
            counts: take(ebpf, "WAIT_COUNTS")?,
            threads: take(ebpf, "THREADS_SEEN")?,
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

    /// Samples waits from now on, where those are wanted.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach_waits(&mut self) -> Result<(), KernelError> {
        let Some(waits) = &mut self.waits else { return Ok(()) };
        let ebpf = self.ebpf.as_mut().ok_or(KernelError::Verifying)?;
        let began = SeenThread { left_ns: KtimeNs::now().0, ..SeenThread::default() };
        waits.threads.insert(BEGAN, Pod(began), 0).map_err(KernelError::map("THREADS_SEEN"))?;
        for (name, point) in [(KICK, INTERRUPT), (SWITCH, "sched_switch")] {
            let link = tracepoint(ebpf, name)?.attach(point).map_err(|source| {
                let what = format!("raw tracepoint {point}, which waiting threads are sampled by");
                KernelError::Attach { what, source }
            })?;
            waits.links.push((name, link));
        }
        Ok(())
    }

    /// Samples waits no more: when this returns, all that were to be looked at have been, or never will be. Gives the moment up to
    /// which waits that still last count.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn detach_waits(&mut self) -> Result<KtimeNs, KernelError> {
        let ended = KtimeNs::now();
        let Some(waits) = &mut self.waits else { return Ok(ended) };
        let ebpf = self.ebpf.as_mut().ok_or(KernelError::Verifying)?;
        while let Some((name, link)) = waits.links.pop() {
            tracepoint(ebpf, name)?.detach(link).map_err(program_error(name))?;
            std::thread::sleep(LAST_KICKS);
        }
        Ok(ended)
    }

    /// Threads that have been switched since the start, and live.
    #[must_use]
    pub fn seen_threads(&self) -> Vec<SeenThread> {
        let threads = self.waits.iter().flat_map(|waits| waits.threads.iter());
        threads.filter_map(Result::ok).filter(|(key, _)| *key != BEGAN).map(|(_, Pod(seen))| seen).collect()
    }

    /// What became of waits since the start; `None` where they are not wanted.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn waits(&self) -> Result<Option<WaitTotals>, KernelError> {
        let Some(waits) = &self.waits else { return Ok(None) };
        let mut before = WaitCounters::default();
        for Pod(cpu) in waits.counts.get(&0, 0).map_err(KernelError::map("WAIT_COUNTS"))?.iter() {
            before.due += cpu.due;
            before.too_many += cpu.too_many;
            before.not_kicked += cpu.not_kicked;
            before.not_met += cpu.not_met;
            before.threads_without_room += cpu.threads_without_room;
        }
        Ok(Some(WaitTotals { before, walked: self.bank_counters(WAIT_BANKS)?.0 }))
    }
}
