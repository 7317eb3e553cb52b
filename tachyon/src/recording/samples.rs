//! Makes samples of records and hands them to the sink.
//!
//! A thread of its own between the ring's reader and the disk: it may take its time, for nothing waits for it but
//! memory, and that is bounded (see `events::Reader`).

use super::follow::lock;
use super::memory::Memory;
use super::names::Names;
use super::native::{KernelFrames, Mixer, News};
use super::registry::Registry;
use crate::cli::account::TopFunction;
use crate::events::{Batch, Event, Events, Frames};
use crate::merge::{Boundaries, Merger, MixedWith, Quality, comm_text};
use crate::profile::{FrameId, Merge, Process, ProcessId, Profile, SPECIAL_FILENAME, Sample};
use crate::remote::RemoteProcess;
use crate::sinks::Sink;
use crate::symbolize::Symbolizer;
use crate::types::Pid;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tachyon_common::event::{SampleRecord, frame, status};
use tachyon_common::stop::StopReason;
use tachyon_common::walk;

/// How often missing names are read from live processes.
const TICK: Duration = Duration::from_secs(1);

/// How often a streaming sink is flushed. A recording that is killed then loses no more than its last second: this, the
/// 0.2 s after which the ring is read again, and what threads wait for their CPUs.
const FLUSH: Duration = Duration::from_millis(500);

/// An image is forgotten this long after its last process: its last records have been read by then.
pub(super) const SETTLED: Duration = Duration::from_secs(5);

/// Numbers that the progress line shows while the thread runs.
#[derive(Debug, Default)]
pub(super) struct Live {
    pub stored: AtomicU64,
    /// The sink failed: there is no point in going on.
    pub failed: AtomicBool,
    /// `--max-memory` is reached.
    pub no_memory: AtomicBool,
}

/// Counts of one process, in the order of [`Profile::processes`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PerProcess {
    pub instance: u64,
    pub samples: u64,
    pub named: u64,
    pub not_initialized: u64,
    /// Samples by how their native and Python frames were put together.
    pub merges: Merges,
}

/// Samples by how their native and Python frames were put together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Merges {
    pub exact: u64,
    pub repaired: u64,
    pub failed: u64,
}

impl Merges {
    fn count(&mut self, merge: Merge) {
        match merge {
            Merge::None => {}
            Merge::Exact => self.exact += 1,
            Merge::Repaired => self.repaired += 1,
            Merge::Failed => self.failed += 1,
        }
    }
}

/// What native stacks need, and what became of them.
pub(super) struct NativeSide {
    mixer: Mixer,
    mapper: Option<Sender<News>>,
    /// Samples whose stacks were not plainly exact, by reason.
    pub repairs: HashMap<&'static str, u64>,
    /// Samples by the reason why their native stack ended.
    pub stops: HashMap<u8, u64>,
}

/// What is left when all records are dealt with.
pub(super) struct Made {
    pub profile: Profile,
    pub sink: Box<dyn Sink + Send>,
    pub stored: u64,
    pub bad_records: u64,
    pub write_errors: u64,
    pub first_error: Option<std::io::Error>,
    pub processes: Vec<PerProcess>,
    pub stops: HashMap<u8, u64>,
    pub leaves: HashMap<FrameId, u64>,
    pub native: Option<NativeSide>,
}

/// A record as it is to be believed.
struct Settled<'a> {
    /// With the reason why its Python stack ended.
    record: SampleRecord,
    /// Without Python frames where they were being linked.
    frames: Frames<'a>,
    /// Where activations begin in its interpreter's stacks.
    boundaries: Boundaries,
    /// Those Python frames, where they may be right all the same.
    doubted: Option<Frames<'a>>,
}

impl Settled<'_> {
    fn forget_python(&mut self) {
        self.frames = self.frames.without_python();
        self.record.root_shims = 0;
    }
}

/// Whole stacks with frames that have no names yet.
#[derive(PartialEq, Eq, Hash)]
struct Unnamed {
    /// Index of its process.
    process: u32,
    image: u64,
    frames: Vec<FrameId>,
}

/// The thread's state.
pub(super) struct Maker {
    pub made: Made,
    merger: Merger,
    pub symbolizer: Symbolizer,
    names: Names,
    pub registry: Arc<Mutex<Registry>>,
    seed: u64,
    pub live: Arc<Live>,
    /// The limit of `--max-memory`.
    pub memory: Option<Memory>,
    /// How often each was met: one frame that never gets its name would else take memory with every sample.
    unnamed: HashMap<Unnamed, u64>,
    /// Images that sent code objects since they were judged last.
    images: HashSet<u64>,
    /// Names the kernel's frames, where those are wanted.
    pub kernel: Option<KernelFrames>,
}

impl Maker {
    pub fn new(
        profile: Profile,
        sink: Box<dyn Sink + Send>,
        registry: Arc<Mutex<Registry>>,
        seed: u64,
        live: Arc<Live>,
        native: Option<NativeSide>,
    ) -> Self {
        let made = Made {
            profile,
            sink,
            stored: 0,
            bad_records: 0,
            write_errors: 0,
            first_error: None,
            processes: Vec::new(),
            stops: HashMap::new(),
            leaves: HashMap::new(),
            native,
        };
        let (merger, symbolizer) = (Merger::default(), Symbolizer::default());
        let (names, images) = (Names::new(), HashSet::new());
        let unnamed = HashMap::new();
        Self { made, merger, symbolizer, names, registry, seed, live, memory: None, unnamed, images, kernel: None }
    }

    /// Deals with batches until the reader has gone.
    pub fn run(mut self, batches: &Receiver<Batch>, queued: &AtomicUsize) -> Made {
        let (mut last_tick, mut last_flush) = (Instant::now(), Instant::now());
        loop {
            match batches.recv_timeout(FLUSH.saturating_sub(last_flush.elapsed())) {
                Ok(batch) => {
                    self.batch(&batch);
                    self.names.read(&mut self.made.profile, &self.registry, false);
                    queued.fetch_sub(batch.len(), Ordering::Relaxed);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.keep_within_memory();
            if last_tick.elapsed() >= TICK {
                last_tick = Instant::now();
                self.read_missing();
                self.names.read(&mut self.made.profile, &self.registry, true);
                self.judge_images();
                self.forget_images();
            }
            if last_flush.elapsed() >= FLUSH {
                last_flush = Instant::now();
                let result = self.made.sink.tick(&self.made.profile);
                self.note_error(result);
            }
        }
        self.read_missing();
        self.names.read(&mut self.made.profile, &self.registry, true);
        self.symbolizer.finish(&mut self.made.profile);
        self.judge_unnamed(&[]);
        self.made
    }

    fn batch(&mut self, batch: &Batch) {
        for event in Events::new(batch) {
            match event {
                Ok(Event::Sample(record, frames)) => self.sample(&record, frames),
                Ok(Event::Code(record, payload)) => {
                    self.names.learn_layout(record.image, record.layout);
                    let registry = lock(&self.registry);
                    let layout = registry.layout(record.layout).copied();
                    drop(registry);
                    let Some(layout) = layout else { continue };
                    self.images.insert(record.image);
                    // What a target claims of its code objects may be nonsense: its frames then have no names.
                    let _refused = self.symbolizer.add_code(&mut self.made.profile, &record, payload, &layout);
                }
                Ok(Event::Process(_)) | Err(_) => self.made.bad_records += 1,
            }
        }
    }

    /// The record as it is to be believed.
    fn settle<'a>(&self, record: &SampleRecord, frames: Frames<'a>) -> Settled<'a> {
        let (mut leaf_first, record) = (frames.iter(), *record);
        let leaf = leaf_first.next();
        let root = leaf_first.next_back().or(leaf);
        let registry = lock(&self.registry);
        let known = registry.layout(record.layout).zip(StopReason::from_number(record.stop));
        let mut settled = Settled { record, frames, boundaries: Boundaries::Shim, doubted: None };
        let Some((layout, stop)) = known else { return settled };
        settled.boundaries = Boundaries::of(layout);
        if record.status & status::CALLERS != 0 {
            // C entered the evaluator for the outermost of all frames; else what was read was no `cframe`.
            let entered = root.is_some_and(|root| root.flags & frame::ENTRY != 0);
            if !entered {
                settled.forget_python();
            }
            return settled;
        }
        let reason = walk::settle(layout, stop, frames.iter().len(), leaf.as_ref(), root.as_ref());
        if reason != stop {
            // C entered the evaluator for the leaf alone: the native stack can tell whether that is so.
            if stop == StopReason::Complete && leaf.is_some_and(|leaf| leaf.flags & frame::ENTRY != 0) {
                settled.doubted = Some(frames);
            }
            settled.record.stop = reason as u8;
            settled.forget_python();
        }
        settled
    }

    fn sample(&mut self, record: &SampleRecord, frames: Frames<'_>) {
        let mut settled = self.settle(record, frames);
        let registry = &self.registry;
        let made = &mut self.made;
        let known_threads = made.profile.threads.len();
        let owner = self.merger.owner(&mut made.profile, record, || describe(registry, record));
        if made.profile.threads.len() > known_threads {
            self.names.expect(owner.thread, record);
        }
        if owner.first {
            made.processes.push(PerProcess { instance: record.instance, ..PerProcess::default() });
        }
        let (merger, symbolizer) = (&mut self.merger, &mut self.symbolizer);
        let merge = match &mut made.native {
            Some(native) => native.stack(&mut made.profile, merger, symbolizer, owner.process, &mut settled),
            None => {
                merger.stack(&mut made.profile, symbolizer, &settled.record, settled.frames);
                Merge::None
            }
        };
        if let Some(kernel) = &mut self.kernel {
            merger.put_above(kernel.of(&mut made.profile, frames));
        }
        let (record, stack) = (&settled.record, merger.last());
        let status = (record.status & 0x3f) as u8;
        let sample = Sample { thread: owner.thread, time_us: record.ktime_ns / 1000, status, frames: stack, merge };
        let result = made.sink.sample(&made.profile, &sample);
        if result.is_err() {
            made.write_errors += 1;
            self.note_error(result);
            return;
        }
        made.stored += 1;
        self.live.stored.store(made.stored, Ordering::Relaxed);
        *made.stops.entry(record.stop).or_default() += 1;
        if let Some(&leaf) = stack.first() {
            *made.leaves.entry(leaf).or_default() += 1;
        }
        let process = &mut made.processes[owner.process.0 as usize];
        process.samples += 1;
        process.merges.count(merge);
        process.not_initialized += u64::from(record.stop == StopReason::RuntimeNotInitialized as u8);
        // Only these count as named when their frames are.
        if !StopReason::from_number(record.stop).is_some_and(StopReason::is_whole) {
            return;
        }
        let mut frames: Vec<_> = stack.iter().copied().filter(|&frame| !self.symbolizer.is_named(frame)).collect();
        frames.sort_unstable();
        frames.dedup();
        if frames.is_empty() {
            process.named += 1;
        } else {
            *self.unnamed.entry(Unnamed { process: owner.process.0, image: record.image, frames }).or_default() += 1;
        }
    }

    fn note_error(&mut self, result: std::io::Result<()>) {
        if let Err(error) = result {
            self.live.failed.store(true, Ordering::Relaxed);
            self.made.first_error.get_or_insert(error);
        }
    }

    /// Frees what is known of images whose last process has been gone for a while: a host that starts programs all day
    /// must not fill memory with them. Their frames stay in the profile.
    fn forget_images(&mut self) {
        let dead = lock(&self.registry).take_dead_images(SETTLED);
        for &image in &dead {
            self.symbolizer.forget(&mut self.made.profile, image);
            self.names.forget(image);
            if let Some(native) = &self.made.native {
                native.mixer.forget(image);
            }
        }
        if !dead.is_empty() {
            self.judge_unnamed(&dead);
        }
    }

    /// Decides on samples that waited for names: those of images in `ended` will get no more.
    fn judge_unnamed(&mut self, ended: &[u64]) {
        let (symbolizer, processes) = (&self.symbolizer, &mut self.made.processes);
        self.unnamed.retain(|Unnamed { process, image, frames }, count| {
            if frames.iter().all(|&frame| symbolizer.is_named(frame)) {
                processes[*process as usize].named += *count;
                return false;
            }
            !ended.contains(image)
        });
    }

    /// The layouts' last test: code objects of a wrong one are noise.
    fn judge_images(&mut self) {
        for image in std::mem::take(&mut self.images) {
            let health = self.symbolizer.health(image);
            let bad = health.bad_names + health.bad_tables + health.outside;
            // One in a hundred may be a target's own doing; a wrong layout spoils nearly all.
            if bad >= 4 && bad * 4 > health.codes {
                lock(&self.registry).nonsense.push(image);
            }
        }
    }

    /// Reads from live processes what did not fit into the kernel's budget or could not be read there.
    fn read_missing(&mut self) {
        let mut open: HashMap<u32, Option<RemoteProcess>> = HashMap::new();
        for missing in self.symbolizer.missing() {
            let (Some(tgid), Some(layout)) = (missing.tgid, missing.layout) else { continue };
            let Some(layout) = lock(&self.registry).layout(layout).copied() else { continue };
            let process = open.entry(tgid).or_insert_with(|| RemoteProcess::open(Pid(tgid)).ok());
            let Some(process) = process else { continue };
            // A code object that is gone stays without a name; the report counts it.
            let _gone = self.symbolizer.read_missing(&mut self.made.profile, missing.key, &layout, self.seed, process);
        }
    }
}

impl NativeSide {
    /// Nothing yet.
    pub fn new(mixer: Mixer, mapper: Sender<News>) -> Self {
        Self { mixer, mapper: Some(mapper), repairs: HashMap::new(), stops: HashMap::new() }
    }

    /// Nothing is to be told to the mapper any more: it ends when nobody can.
    pub fn hang_up(&mut self) {
        self.mapper = None;
    }

    /// Makes the whole stack of a record, native frames included. What was doubted is believed where the native stack
    /// bears it out.
    fn stack(
        &mut self,
        profile: &mut Profile,
        merger: &mut Merger,
        symbolizer: &mut Symbolizer,
        process: ProcessId,
        settled: &mut Settled<'_>,
    ) -> Merge {
        let (record, frames) = (&settled.record, settled.frames);
        const STALE: [u8; 2] = [StopReason::UnknownCode as u8, StopReason::NoUnwindTables as u8];
        *self.stops.entry(record.native_stop).or_default() += 1;
        if let Some(mapper) = &self.mapper
            && STALE.contains(&record.native_stop)
        {
            // One that has panicked is told of at the end.
            let _ended = mapper.send(News::Unknown { pid: record.tgid });
        }
        let mixer = &mut self.mixer;
        mixer.take(profile, process, record, frames);
        if mixer.kinds.is_empty() {
            merger.stack(profile, symbolizer, record, frames);
            return Merge::None;
        }
        let with = MixedWith {
            kinds: &mixer.kinds,
            ends: &mixer.ends,
            ids: &mixer.ids,
            boundaries: settled.boundaries,
            foreign: mixer.foreign,
            switching: mixer.switching,
            keep_interpreter: mixer.keep_interpreter,
        };
        if let Some(doubted) = settled.doubted {
            let complete = SampleRecord { stop: StopReason::Complete as u8, ..*record };
            if merger.mixed(profile, symbolizer, (&complete, doubted), &with) == Quality::Exact {
                (settled.record, settled.frames) = (complete, doubted);
                return Merge::Exact;
            }
        }
        let quality = merger.mixed(profile, symbolizer, (record, frames), &with);
        let merge = match quality {
            Quality::Exact => Merge::Exact,
            Quality::Repaired(_) => Merge::Repaired,
            Quality::Failed => Merge::Failed,
        };
        if merge != Merge::Exact {
            *self.repairs.entry(quality.name()).or_default() += 1;
        }
        merge
    }
}

/// What is known of the process of a record.
fn describe(registry: &Mutex<Registry>, record: &SampleRecord) -> Process {
    let mut registry = lock(registry);
    match registry.sampled(record.instance) {
        Some(info) => Process {
            pid: info.pid,
            comm: info.comm.clone(),
            cmdline: info.cmdline.clone(),
            python_version: info.version().to_owned(),
            container: info.container.clone(),
            pod: info.pod.clone(),
        },
        None => Process { pid: record.tgid, comm: comm_text(&record.comm), ..Process::default() },
    }
}

/// Functions by how often they were the leaf, most often first.
pub(super) fn top_functions(profile: &Profile, leaves: &HashMap<FrameId, u64>) -> Vec<TopFunction> {
    let mut functions: HashMap<(&str, &str), (u64, u64, i32)> = HashMap::new();
    for (&frame, &samples) in leaves {
        let frame = profile.frames.get(frame);
        let key = (profile.strings.get(frame.filename), profile.strings.get(frame.function));
        let (sum, most, line) = functions.entry(key).or_insert((0, 0, -1));
        *sum += samples;
        if samples > *most {
            (*most, *line) = (samples, frame.lineno);
        }
    }
    let mut top: Vec<_> = functions
        .into_iter()
        .map(|((filename, function), (samples, _, line))| TopFunction {
            function: function.to_owned(),
            filename: if filename == SPECIAL_FILENAME { String::new() } else { filename.to_owned() },
            lineno: u32::try_from(line).ok(),
            samples,
        })
        .collect();
    top.sort_by(|a, b| b.samples.cmp(&a.samples).then_with(|| a.function.cmp(&b.function)));
    top
}
