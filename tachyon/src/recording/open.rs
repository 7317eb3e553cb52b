//! The start of a recording: the kernel side is loaded and gets its data, then sampling begins.
//!
//! The order at the start matters for the account: mappings and lifecycle hooks first, then the existing processes, so that
//! one that starts in between is seen twice rather than never; the sampling event last.

use super::bell::Bells;
use super::follow::{Follow, Follower, Wanted, lock};
use super::made::Made;
use super::memory::{self, Memory};
use super::native::{KernelFrames, Mapper, Mixer, NativePlan, Spaces};
use super::registry::Registry;
use super::request::{Request, Targets};
use super::running::{Parts, Running, Threads};
use super::samples::{Live, Maker, NativeSide};
use super::sleepers::{self, Choice, Sleepers};
use super::start::Clock;
use super::stats::Stats;
use super::targets::{self, Children};
use super::task_waits;
use super::throttle::Limiter;
use super::timer::Timer;
use crate::discover::watch::Watch;
use crate::events::Reader;
use crate::inspect::ElfCache;
use crate::kept::SymbolCache;
use crate::kernel::{Kernel, LoadTimes, Options, drop_privileges, make_urgent, processes, ring_bytes};
use crate::profile::{Meta, Profile};
use crate::remote::{End, Patience, own_pid_namespace, prepare_to_read};
use crate::sinks::Sink;
use crate::snapshot::NativeChoice;
use crate::symbolize::KernelSymbols;
use crate::symbolize::native::NativeSymbols;
use crate::types::KtimeNs;
use anyhow::Context as _;
use aya::maps::{MapData, RingBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A recording that can begin: everything is loaded, targets are known and followed, nothing is sampled yet.
pub struct Opened {
    request: Request,
    kernel: Arc<Mutex<Kernel>>,
    registry: Arc<Mutex<Registry>>,
    stats: Arc<Stats>,
    samples: RingBuf<MapData>,
    follow: Follow,
    mapper: Option<Mapper>,
    mixer: Option<Mixer>,
    /// What is known of native symbols.
    symbols: Option<Arc<NativeSymbols>>,
    children: Children,
    most_queued: usize,
    ring_bytes: u32,
    bells: Bells,
    clock: Clock,
    machine_s: f64,
    processes_s: f64,
    load_times: LoadTimes,
    opened: Instant,
    /// Signals the end to all threads that read from targets.
    end: End,
}

impl Request {
    /// Loads the kernel side and finds the targets. Limits, signals and capabilities of the calling process and thread stay
    /// as they are; the recorder's own threads give up what they do not need. (Before Linux 5.11, where maps count as
    /// locked memory, the library that makes them raises `RLIMIT_MEMLOCK` when it is refused.)
    ///
    /// # Errors
    /// When the kernel lacks something or refuses, or when a target given by pid is not a CPython that can be profiled.
    /// The [`Advice`](crate::advice::Advice) for the error's cause says what to do.
    pub fn open(self) -> anyhow::Result<Opened> {
        self.open_timed(Clock::start())
    }

    /// The same, with a clock that was started before the machine was asked what it can do.
    pub(crate) fn open_timed(self, mut clock: Clock) -> anyhow::Result<Opened> {
        let (request, opened, end) = (self, Instant::now(), End::default());
        prepare_to_read();
        let machine_s = clock.lap();
        let pid_namespace = own_pid_namespace()?;
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let share = request.max_memory.map(memory::share);
        let wanted_native = request.native.map(|native| native.within(share.map(|share| share.0)));
        let (most_ring, most_queued) = share.unwrap_or((u32::MAX, usize::MAX));
        let mut options = Options {
            interval: request.interval,
            all_python: request.targets == Targets::AllPython,
            gil_only: request.gil,
            filtered: !request.filter.is_empty(),
            opcodes: request.opcodes,
            kernel_stacks: request.kernel,
            waits: request.waits,
            wakers: request.wakers,
            awaiting: request.awaiting,
            thread_times: request.thread_times && request.waits.are_wanted(),
            events: request.events.clone(),
            processes: processes(request.only()),
            unwind_memory: wanted_native.map(|native| native.unwind_memory),
            ring_bytes: request
                .ring_bytes
                .unwrap_or_else(|| ring_bytes(request.samples_a_second(), cpus).min(most_ring)),
            pid_namespace,
            made_for: None,
            // Opened now, while this thread has its rights.
            kept: request.symbol_cache.as_ref().and_then(SymbolCache::open).map(Arc::new),
        };
        let mut files = ElfCache::default();
        if options.may_be_made_for_less() {
            options.made_for = targets::made_for(&request, &mut files);
        }
        let mut kernel = Kernel::open(&options)?;
        request.release();
        clock.lap();
        let stats = Arc::new(Stats::start());
        let samples = kernel.take_samples()?;
        let events = kernel.take_events()?;
        let kernel = Arc::new(Mutex::new(kernel));
        let registry = Arc::new(Mutex::new(Registry::default()));
        lock(&registry).told_of_processes = request.told();
        let wanted = Wanted {
            all_python: options.all_python,
            follow_children: request.follow_children,
            filter: request.filter.clone(),
            variables: request.variables.clone(),
        };
        let mut follower = Follower::new(Arc::clone(&kernel), Arc::clone(&registry), wanted, files);
        let watch = (request.follow_children || request.native.is_some()).then(Watch::open).transpose()?;
        lock(&kernel).attach_lifecycle()?;
        let verifying = lock(&kernel).verify()?;
        let (mut mapper, mixer, symbols) = match wanted_native {
            Some(wanted) => {
                let symbols = NativeSymbols::with_budget(wanted.symbol_memory);
                let symbols = Arc::new(symbols.keeping_names(options.kept.clone()));
                let (mapper, mixer) = native(wanted, &symbols, &kernel, &end)?;
                follower.tell(mapper.news());
                (Some(mapper), Some(mixer), Some(symbols))
            }
            None => (None, None, None),
        };
        let of_few = !options.all_python;
        if let Some(mapper) = mapper.as_mut().filter(|_| of_few) {
            mapper.start()?;
        }
        targets::select(&request, &mut follower, &registry)?;
        let processes_s = clock.lap();
        let bells = Bells::new()?;
        let follow = Follow::start(follower, events, watch, request.samples_a_second(), bells.clone(), end.clone())?;
        let verified = verifying.wait()?;
        lock(&kernel).add_samplers(verified)?;
        let load_times = lock(&kernel).load_times();
        clock.lap();
        if let Some(mapper) = mapper.as_mut().filter(|_| !of_few) {
            // For a whole host, the processes' tables are made while sampling runs: at the same time as the verifier
            // they would slow it down.
            mapper.start()?;
        }
        let children = Children::of(&request);
        Ok(Opened {
            request,
            kernel,
            registry,
            stats,
            samples,
            follow,
            mapper,
            mixer,
            symbols,
            children,
            most_queued,
            ring_bytes: options.ring_bytes,
            bells,
            clock,
            machine_s,
            processes_s,
            load_times,
            opened,
            end,
        })
    }
}

impl Opened {
    /// Starts sampling. The segments hold the samples by stack, if [`Request::keep_stacks`] asked for that.
    ///
    /// # Errors
    /// When the kernel refuses, or the limit of memory is too small.
    pub fn start(self) -> anyhow::Result<Running> {
        self.start_with(|_| Ok(None))
    }

    /// Starts sampling, into the sink that `open` returns for the profile of the first segment.
    ///
    /// # Errors
    /// As [`Opened::start`], and any error of `open`.
    pub fn start_into(
        self,
        open: impl FnOnce(&Profile) -> anyhow::Result<Box<dyn Sink + Send>>,
    ) -> anyhow::Result<Running> {
        self.start_with(|profile| open(profile).map(Some))
    }

    fn start_with(
        self,
        open: impl FnOnce(&Profile) -> anyhow::Result<Option<Box<dyn Sink + Send>>>,
    ) -> anyhow::Result<Running> {
        let Self {
            request,
            kernel,
            registry,
            stats,
            samples,
            follow,
            mapper,
            mixer,
            symbols,
            children,
            bells,
            clock,
            end,
            ..
        } = self;
        let seed = lock(&kernel).seed();
        let mut profile = Profile { meta: meta(&request), ..Profile::default() };
        profile.meta.python_version = targets::newest_version(&lock(&registry)).unwrap_or_default();
        let sink = open(&profile)?;
        let (has_sink, streams) = (sink.is_some(), sink.as_ref().is_some_and(|sink| sink.streams()));
        let made = Made::new(profile, sink, request.keep_stacks).within(request.max_memory);
        let (sender, told) = mpsc::channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let live = Arc::new(Live::new(bells.clone()));
        let native = mapper.as_ref().zip(mixer).map(|(mapper, mixer)| NativeSide::new(mixer, mapper.news()));
        let mut maker = Maker::new(made, Arc::clone(&registry), seed, Arc::clone(&live), native);
        maker.events.clone_from(&request.events);
        maker.wakers = request.wakers;
        maker.tasks.chains = request.awaiting;
        if request.kernel {
            // Now, because reading them takes CAP_SYSLOG.
            maker.kernel = Some(kernel_frames(&registry)?);
        }
        let map_bytes = lock(&kernel).live_map_bytes();
        maker.memory = request.max_memory.map(|limit| Memory::start(limit, map_bytes)).transpose()?;
        if let Some(limit) = request.max_memory {
            maker.symbolizer.limit(limit);
        }
        let maker = {
            let (queued, end, symbols) = (Arc::clone(&queued), end.clone(), symbols.clone());
            std::thread::Builder::new().name("tachyon-samples".to_owned()).spawn(move || {
                // Programs that give it a lot to name must not take the CPU from it as well.
                make_urgent();
                // If the kernel refuses, it works with more rights than it needs.
                let _refused = drop_privileges();
                let _concerned = end.concerns_this_thread(Patience::Usual);
                let made = maker.run(&told, &queued);
                if let Some(symbols) = symbols {
                    symbols.keep();
                }
                made
            })?
        };
        let reader = Reader::start(samples, sender.clone(), queued, self.most_queued)?;
        if let (Some(mapper), Targets::Pids(_) | Targets::Child(_)) = (&mapper, &request.targets) {
            mapper.wait();
        }
        lock(&kernel).prepare_waits()?;
        let started = Instant::now();
        lock(&registry).sampling_starts();
        let start_unix = unix_now();
        let event = lock(&kernel).attach_sampling(request.interval)?;
        lock(&kernel).attach_waits()?;
        if request.waits.are_wanted() {
            stats.waits_begin(&lock(&kernel));
        }
        let start = clock.finish(self.machine_s, self.load_times, self.processes_s);
        let limiter = Limiter::start(&request, &stats, &kernel, &registry, &bells.news)?;
        let choice = Choice { native: request.native.zip(symbols).map(look_with), kernel: request.kernel };
        let sleepers = Arc::new(Mutex::new(Sleepers::new(choice)));
        let second_look = request.waits.are_wanted().then(|| {
            let means = sleepers::Means {
                sleepers: Arc::clone(&sleepers),
                registry: Arc::clone(&registry),
                kernel: Arc::clone(&kernel),
                told: streams.then(|| sender.clone()),
            };
            sleepers::start(means, end.clone())
        });
        let second_look = second_look.transpose()?;
        // Where samples are kept only by stack, nothing would distinguish them from those of threads.
        let task_looks = (request.waits.are_wanted() && request.awaiting && has_sink).then(|| {
            let means = task_waits::Means {
                registry: Arc::clone(&registry),
                kernel: Arc::clone(&kernel),
                told: sender.clone(),
            };
            task_waits::start(means, end.clone())
        });
        let task_looks = task_looks.transpose()?;
        request.release();
        let timer = Timer::start(&kernel, &registry, &stats, request.give_back)?;
        let threads = Threads { reader, follow, sender, maker, mapper, second_look, task_looks };
        let parts = Parts {
            request,
            kernel,
            registry,
            stats,
            children,
            sleepers,
            live,
            limiter,
            timer,
            bells,
            event,
            start,
            opened: self.opened,
            end,
            started,
            start_unix,
            ring_bytes: self.ring_bytes,
        };
        Ok(Running::new(parts, threads))
    }
}

/// What names the kernel's frames.
fn kernel_frames(registry: &Mutex<Registry>) -> anyhow::Result<KernelFrames> {
    let symbols = KernelSymbols::read().context("cannot read /proc/kallsyms")?;
    if symbols.is_empty() {
        let note = "kernel frames have no names: give CAP_SYSLOG (`tachyon-bpf doctor` has kptr_restrict)";
        lock(registry).notes.insert(note.to_owned());
    }
    Ok(KernelFrames::new(symbols))
}

/// The mapper, which keeps the tables for native stacks, and what names their addresses.
fn native(
    wanted: NativePlan,
    symbols: &Arc<NativeSymbols>,
    kernel: &Arc<Mutex<Kernel>>,
    end: &End,
) -> anyhow::Result<(Mapper, Mixer)> {
    let spaces = Arc::new(Spaces::default());
    let maps = lock(kernel).take_native()?;
    let mapper = Mapper::new(maps, Arc::clone(kernel), Arc::clone(&spaces), Arc::clone(symbols), end.clone());
    Ok((mapper, Mixer::new(spaces, Arc::clone(symbols), wanted.keep)))
}

/// How to show native frames of threads that are read from outside: like those of samples.
fn look_with((plan, symbols): (NativePlan, Arc<NativeSymbols>)) -> (NativeChoice, Arc<NativeSymbols>) {
    (NativeChoice { interpreter_frames: plan.keep.interpreter, roots: plan.keep.roots }, symbols)
}

/// The metadata of a segment that begins now.
pub(super) fn meta(request: &Request) -> Meta {
    Meta {
        start_us: KtimeNs::now().as_micros(),
        start_unix: unix_now(),
        interval_us: u64::try_from(request.interval.as_micros()).unwrap_or(u64::MAX),
        many_processes: request.many_processes(),
        gil_only: request.gil,
        waits: request.waits.are_wanted(),
        opcodes: request.opcodes,
        native: request.native.is_some(),
        hostname: nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        python_version: (0, 0, 0),
    }
}

/// Seconds since 1970, UTC.
pub(super) fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
