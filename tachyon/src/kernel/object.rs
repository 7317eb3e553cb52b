//! The BPF object: loaded, its maps typed, its programs attached and detached.

use super::btf::kernel_config;
use super::chosen::ChosenEvent;
use super::diagnostics::{self, Diagnostics};
use super::error::{KernelError, program_error};
use super::loader::loader;
use super::made_for::{Loaded, Narrow};
use super::native::NativeMaps;
use super::numbered::Numbered;
use super::options::Options;
use super::perf::Sampling;
use super::pod::{FileKey, Pod};
use super::programs::{TRACEPOINTS, has_tracepoints, hooks, load_programs, samplers, tracepoint};
use super::rows::RowChunks;
use super::sampling::TraceMaps;
use super::waits::{WAKE, WaitMaps, Waits};
use crate::types::KtimeNs;
use aya::Ebpf;
use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, ProgramArray, RingBuf};
use aya::programs::ProgramInfo;
use aya::programs::raw_trace_point::RawTracePointLinkId;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tachyon_common::config::flags as config_flags;
use tachyon_common::event::Counters;
use tachyon_common::layout::Layout;
use tachyon_common::limits::{
    CHANGES_BY_USER_SPACE, MAX_ASYNCIO, MAX_GREENLET_PLACES, MAX_LAYOUTS, MAX_PROCESSES, MAX_SEEN_THREADS, MAX_SPANS,
    RULE_SLOTS, THREAD_SLOTS, TOLD_WAITS, UNWATCHED_SLOTS,
};
use tachyon_common::process::{Life, ProcessEntry, flags};
use tachyon_common::segment::{ALL_BANKS, BANKS};
use tachyon_common::whose::{Asyncio, Greenlets, ThreadLocal};

/// The committed object (see `build.rs`).
pub(super) static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/tachyon.bpf.o"));

/// How long the parts of loading took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadTimes {
    /// The kernel's types were read.
    pub types: Duration,
    /// The object was parsed, its maps were made, and the hooks that follow processes were loaded.
    pub maps: Duration,
    /// The verifier checked the programs that make samples.
    pub programs: Duration,
}

/// The loaded object.
pub struct Kernel {
    /// Absent while the verifier checks the programs that make samples.
    pub(super) ebpf: Option<Ebpf>,
    pub(super) narrow: Option<Narrow>,
    /// What is loaded beside that.
    pub(super) wide: Option<Loaded>,
    lives: HashMap<MapData, u32, Pod<Life>>,
    entries: HashMap<MapData, u64, Pod<ProcessEntry>>,
    pub(super) verdicts: Array<MapData, u64>,
    /// Number of changes that user space made to the process table.
    changes: u64,
    executables: HashMap<MapData, Pod<FileKey>, Pod<ProcessEntry>>,
    dull: HashMap<MapData, Pod<FileKey>, u64>,
    pub(super) layouts: Numbered<Layout>,
    pub(super) asyncio: Numbered<Asyncio>,
    pub(super) spans: Numbered<ThreadLocal>,
    pub(super) greenlets: Numbered<Greenlets>,
    pub(super) counters: PerCpuArray<MapData, Pod<Counters>>,
    pub(super) events_lost: PerCpuArray<MapData, u64>,
    /// The bank of `counters` that runs count in.
    pub(super) bank: u32,
    // Held while attached: tail calls work only as long as the table's descriptor is open.
    pub(super) stages: ProgramArray<MapData>,
    /// Events that are sampled, if any were chosen, and what tracepoints among them need.
    pub(super) events: Vec<ChosenEvent>,
    pub(super) traces: Option<TraceMaps>,
    /// The programs that make samples.
    pub(super) samplers: Vec<&'static str>,
    /// Whether running threads are sampled.
    pub(super) running: bool,
    /// Time between two samples, as last attached.
    pub(super) interval: std::time::Duration,
    pub(super) waits: Option<WaitMaps>,
    native: Option<NativeMaps>,
    seed: u64,
    map_bytes: Arc<AtomicU64>,
    pub(super) load_times: LoadTimes,
    pub(super) sampling: Option<Sampling>,
    lifecycle: Vec<(&'static str, RawTracePointLinkId)>,
    _diagnostics: Option<Diagnostics>,
}

impl Kernel {
    /// Loads the object and all programs; attaches nothing.
    ///
    /// # Errors
    /// When the kernel lacks something or refuses.
    pub fn load(options: &Options) -> Result<Self, KernelError> {
        let mut kernel = Self::open(options)?;
        let verified = kernel.verify()?.wait()?;
        kernel.add_samplers(verified)?;
        Ok(kernel)
    }

    /// Makes the maps and loads the hooks that follow processes; attaches nothing. There is no sampling before
    /// [`Kernel::add_samplers`].
    ///
    /// # Errors
    /// When the kernel lacks something or refuses.
    pub fn open(options: &Options) -> Result<Self, KernelError> {
        let start = Instant::now();
        // The library tries out what this kernel can do, which is mostly waiting: time to read the kernel's types.
        let waits = options.waits.are_wanted();
        let config = std::thread::scope(|scope| {
            scope.spawn(aya::features);
            kernel_config(waits, options.kept.as_deref())
        });
        let mut config = config?;
        let types = start.elapsed();
        config.seed = random_seed();
        config.wake_bytes = options.ring_bytes / 4;
        config.own_pid_ns = options.pid_namespace.unwrap_or(0);
        config.flags |= options.flags();
        let wakes = waits && (options.wakers || config.task_last_queued == 0);
        for (period, event) in config.trace_periods.iter_mut().zip(&options.events) {
            *period = event.period();
        }
        let mut samplers = samplers(options.unwind_memory.is_some(), options.awaiting, waits, &options.events);
        samplers.retain(|&name| wakes || name != WAKE);
        let native = |entries: u32| if options.unwind_memory.is_some() { entries } else { 1 };
        let seed = config.seed;
        let made_for = options.made_for();
        let mut of_all = config;
        if let Some(made_for) = &made_for {
            config.flags |= made_for.flags();
            of_all.flags |= config_flags::AFTER_ONE_LAYOUT;
        }
        let config = Pod(config);
        let layout = Pod(made_for.map_or_else(Layout::default, |made_for| made_for.layout));
        let processes = processes_override().unwrap_or(options.processes);
        let mut ebpf = loader()
            .override_global("CONFIG", &config, true)
            .override_global("LAYOUT", &layout, true)
            .map_max_entries("PROCESSES", processes)
            .map_max_entries("ENTRIES", processes)
            .map_max_entries("SAMPLES", options.ring_bytes)
            .map_max_entries("EVENTS", options.events_ring_bytes())
            .map_max_entries("COUNTERS", if waits { ALL_BANKS } else { BANKS })
            .map_max_entries("THREADS_SEEN", if waits { MAX_SEEN_THREADS } else { 1 })
            .map_max_entries("THREAD_SLOTS", if waits { THREAD_SLOTS } else { 1 })
            .map_max_entries("SLOTS_TAKEN", if waits { THREAD_SLOTS } else { 1 })
            .map_max_entries("UNWATCHED", if waits { UNWATCHED_SLOTS } else { 1 })
            .map_max_entries("WAITS_TOLD", if waits { TOLD_WAITS } else { 1 })
            .map_max_entries("LEADERS", if options.pid_namespace.is_some() { MAX_PROCESSES } else { 1 })
            .map_max_entries("RANGES", native(options.ranges()))
            .map_max_entries("SPACES", native(processes))
            .map_max_entries("RULES", native(RULE_SLOTS))
            .load(&diagnostics::object_or(OBJECT))
            .map_err(|error| KernelError::Load(Box::new(error)))?;
        let diagnostics = Diagnostics::start(&mut ebpf);
        let map_bytes = Arc::default();
        let rows = options.unwind_memory.map(|bytes| RowChunks::put_in_place(&ebpf, bytes, &map_bytes)).transpose()?;
        let wait_maps = waits.then(|| WaitMaps::of(&mut ebpf)).transpose()?;
        map_bytes.store(ebpf.maps().filter_map(|(_, map)| memlock(map_fd(map)?)).sum(), Ordering::Relaxed);
        let narrow = made_for.map(|made_for| Narrow::of(made_for, of_all, &ebpf, samplers.clone())).transpose()?;
        load_programs(&mut ebpf, &hooks())?;
        let mut layouts = Numbered::of(&mut ebpf, "LAYOUTS", 0, MAX_LAYOUTS)?;
        if let Some(made_for) = &made_for {
            // The number 0.
            layouts.number(&made_for.layout)?;
        }
        Ok(Self {
            wide: None,
            narrow,
            lives: take(&mut ebpf, "PROCESSES")?,
            entries: take(&mut ebpf, "ENTRIES")?,
            verdicts: take(&mut ebpf, "VERDICTS")?,
            changes: 0,
            executables: take(&mut ebpf, "EXECUTABLES")?,
            dull: take(&mut ebpf, "DULL")?,
            layouts,
            asyncio: Numbered::of(&mut ebpf, "ASYNCIO", 1, MAX_ASYNCIO)?,
            spans: Numbered::of(&mut ebpf, "SPANS", 1, MAX_SPANS)?,
            greenlets: Numbered::of(&mut ebpf, "GREENLETS", 1, MAX_GREENLET_PLACES)?,
            counters: take(&mut ebpf, "COUNTERS")?,
            events_lost: take(&mut ebpf, "EVENTS_LOST")?,
            bank: 0,
            stages: take(&mut ebpf, "STAGES")?,
            samplers,
            events: options.events.clone(),
            traces: has_tracepoints(&options.events).then(|| TraceMaps::of(&mut ebpf)).transpose()?,
            running: options.waits != Waits::Alone,
            interval: options.interval,
            waits: wait_maps,
            native: rows.map(|rows| NativeMaps::of(&mut ebpf, rows, options.ranges())).transpose()?,
            seed,
            map_bytes,
            load_times: LoadTimes { types, maps: start.elapsed() - types, programs: Duration::ZERO },
            sampling: None,
            lifecycle: Vec::new(),
            _diagnostics: diagnostics,
            ebpf: Some(ebpf),
        })
    }

    fn ebpf(&mut self) -> Result<&mut Ebpf, KernelError> {
        self.ebpf.as_mut().ok_or(KernelError::Verifying)
    }

    /// The key of every fingerprint of this recording.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// Takes the ring of samples and code objects; once.
    ///
    /// # Errors
    /// When it was taken before.
    pub fn take_samples(&mut self) -> Result<RingBuf<MapData>, KernelError> {
        take(self.ebpf()?, "SAMPLES")
    }

    /// Takes the ring of process events; once.
    ///
    /// # Errors
    /// When it was taken before.
    pub fn take_events(&mut self) -> Result<RingBuf<MapData>, KernelError> {
        take(self.ebpf()?, "EVENTS")
    }

    /// Follows fork, exec and exit from now on.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach_lifecycle(&mut self) -> Result<(), KernelError> {
        for (name, point) in TRACEPOINTS {
            let link = tracepoint(self.ebpf()?, name)?
                .attach(point)
                .map_err(|source| KernelError::Attach { what: format!("raw tracepoint {point}"), source })?;
            self.lifecycle.push((name, link));
        }
        Ok(())
    }

    /// Detaches the lifecycle hooks.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn detach_lifecycle(&mut self) -> Result<(), KernelError> {
        let ebpf = self.ebpf.as_mut().ok_or(KernelError::Verifying)?;
        for (name, link) in self.lifecycle.drain(..) {
            tracepoint(ebpf, name)?.detach(link).map_err(program_error(name))?;
        }
        Ok(())
    }

    /// What the kernel side keeps about a process, if it knows it. `tgid` is of the profiler's namespace.
    #[must_use]
    pub fn process(&self, tgid: u32) -> Option<Life> {
        self.lives.get(&tgid, 0).ok().map(|life| life.0)
    }

    /// What was found out about the program that a process runs; `None` if it has not been decided on yet.
    #[must_use]
    pub fn entry(&self, life: &Life) -> Option<ProcessEntry> {
        self.entries.get(&life.entry, 0).ok().map(|entry| entry.0)
    }

    /// How many processes are known, and how many entries there are.
    #[must_use]
    pub fn table_sizes(&self) -> (usize, usize) {
        (self.lives.keys().count(), self.entries.keys().count())
    }

    /// Sets what was found out about a program that a process runs. Image and instance are filled in. False if that program
    /// has ended by now: then nothing was changed.
    ///
    /// # Errors
    /// When the table is full.
    pub fn decide(&mut self, tgid: u32, life: &Life, entry: &ProcessEntry) -> Result<bool, KernelError> {
        let entry = ProcessEntry { image: life.image, instance: life.instance, ..known(entry) };
        self.entries.insert(life.entry, Pod(entry), 0).map_err(KernelError::map("ENTRIES"))?;
        // A hook that ends the program removes the entry after it has changed the table of processes: either it finds this
        // one, or its change is seen here.
        let runs = self.process(tgid).is_some_and(|now| now.entry == life.entry);
        if runs {
            self.changed()?;
        } else {
            // The key is never used for anything else.
            let _removed_by_hook = self.entries.remove(&life.entry);
        }
        Ok(runs)
    }

    /// Sets the entry of a process, whether it is known already or not.
    ///
    /// # Errors
    /// When the tables are full.
    pub fn set_process(&mut self, tgid: u32, entry: &ProcessEntry) -> Result<(), KernelError> {
        while !self.add_process(tgid, entry)? {
            if let Some(life) = self.process(tgid)
                && self.decide(tgid, &life, entry)?
            {
                break;
            }
        }
        Ok(())
    }

    /// Signals that the process table has changed, which invalidates the verdicts that the kernel side has cached.
    fn changed(&mut self) -> Result<(), KernelError> {
        self.changes += 1;
        self.verdicts.set(CHANGES_BY_USER_SPACE, self.changes, 0).map_err(KernelError::map("VERDICTS"))
    }

    /// Adds a process that is not known yet, with what was found out about it; false if a lifecycle hook was faster.
    ///
    /// # Errors
    /// When the tables are full.
    pub fn add_process(&mut self, tgid: u32, entry: &ProcessEntry) -> Result<bool, KernelError> {
        const BPF_NOEXIST: u64 = 1;
        let life = Life::new(entry.flags & (flags::SELECTED | flags::FOLLOW), entry.image, entry.instance);
        let decided = entry.flags & (flags::PYTHON | flags::NOT_PYTHON) != 0;
        if self.process(tgid).is_some() {
            return Ok(false);
        }
        if decided {
            self.entries.insert(life.entry, Pod(known(entry)), 0).map_err(KernelError::map("ENTRIES"))?;
        }
        let added = match self.lives.insert(tgid, Pod(life), BPF_NOEXIST) {
            Ok(()) => return self.changed().map(|()| true),
            Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
            Err(reason) => Err(KernelError::Map { map: "PROCESSES", reason }),
        };
        if decided {
            // Nothing refers to the key.
            let _gone = self.entries.remove(&life.entry);
        }
        added
    }

    /// The entry that processes of an executable get at `exec`, before user space has seen them.
    ///
    /// # Errors
    /// When the table is full.
    pub fn set_executable(&mut self, key: FileKey, entry: &ProcessEntry) -> Result<(), KernelError> {
        self.executables.insert(Pod(key), Pod(*entry), 0).map_err(KernelError::map("EXECUTABLES"))
    }

    /// Until then, starts and ends of this executable's processes do not wake anyone: they are read along with the next event that
    /// does, or when a quarter of the ring is full.
    pub fn let_wait(&mut self, key: FileKey, until: KtimeNs) {
        // If that fails, they wake.
        let _woken = self.dull.insert(Pod(key), until.0, 0);
    }

    /// Takes the maps of native stacks; once.
    ///
    /// # Errors
    /// When they were taken before, or native stacks are not wanted.
    pub fn take_native(&mut self) -> Result<NativeMaps, KernelError> {
        self.native.take().ok_or(KernelError::Missing("ROWS"))
    }

    /// Processes that found the tables of processes full.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn without_room(&self) -> Result<u64, KernelError> {
        self.lost(1)
    }

    /// A count of `EVENTS_LOST`.
    pub(super) fn lost(&self, index: u32) -> Result<u64, KernelError> {
        let lost = self.events_lost.get(&index, 0).map_err(KernelError::map("EVENTS_LOST"))?;
        Ok(lost.iter().sum())
    }

    /// How long loading took.
    #[must_use]
    pub const fn load_times(&self) -> LoadTimes {
        self.load_times
    }

    /// Memory of all maps as the kernel reports it (`memlock` of each descriptor's `fdinfo`), bytes.
    #[must_use]
    pub fn map_bytes(&self) -> u64 {
        self.map_bytes.load(Ordering::Relaxed)
    }

    /// The same, kept up to date: maps of unwind rows are made as they are needed.
    #[must_use]
    pub fn live_map_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.map_bytes)
    }

    /// Instructions that the verifier processed, for each program, if the kernel says (5.16+).
    #[must_use]
    pub fn verified_instructions(&self) -> Vec<(String, Option<u32>)> {
        let count = |info: &ProgramInfo| info.verified_instruction_count().filter(|count| *count > 0);
        let first = self.ebpf.iter().flat_map(Ebpf::programs);
        let first = first.map(|(name, program)| (name.to_owned(), program.info().ok().and_then(|info| count(&info))));
        first.chain(self.wide.iter().flatten().map(|(name, info)| (name.clone(), count(info)))).collect()
    }
}

/// The descriptor of a map of the kinds used here.
pub(super) fn map_fd(map: &Map) -> Option<i32> {
    match map {
        Map::Array(data)
        | Map::HashMap(data)
        | Map::LruHashMap(data)
        | Map::PerCpuArray(data)
        | Map::ProgramArray(data)
        | Map::RingBuf(data) => Some(data.fd().as_fd().as_raw_fd()),
        _ => None,
    }
}

/// Memory of a map, as the kernel reports it.
pub(super) fn memlock(fd: i32) -> Option<u64> {
    // It has some 150 bytes, and comes in one piece.
    let mut info = [0; 1024];
    let len = File::open(format!("/proc/self/fdinfo/{fd}")).ok()?.read(&mut info).ok()?;
    let info = std::str::from_utf8(&info[..len]).ok()?;
    info.lines().find_map(|line| line.strip_prefix("memlock:")?.trim().parse().ok())
}

/// `TACHYON_MAX_PROCESSES`: tables for fewer processes, for tests of full ones.
fn processes_override() -> Option<u32> {
    let processes: u32 = std::env::var("TACHYON_MAX_PROCESSES").ok()?.parse().ok()?;
    (1..=MAX_PROCESSES).contains(&processes).then_some(processes)
}

/// An entry, with since when it says that a process is CPython.
fn known(entry: &ProcessEntry) -> ProcessEntry {
    let is_new = entry.flags & flags::PYTHON != 0 && entry.known_ns == 0;
    ProcessEntry { known_ns: if is_new { KtimeNs::now().0 } else { entry.known_ns }, ..*entry }
}

fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: the buffer is valid for writes of its length.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    debug_assert_eq!(got, 8, "eight bytes of randomness are never short (getrandom(2))");
    u64::from_ne_bytes(bytes)
}

pub(super) fn take<T>(ebpf: &mut Ebpf, name: &'static str) -> Result<T, KernelError>
where
    T: TryFrom<aya::maps::Map, Error = MapError>,
{
    let map = ebpf.take_map(name).ok_or(KernelError::Missing(name))?;
    T::try_from(map).map_err(KernelError::map(name))
}

#[cfg(test)]
mod tests;
