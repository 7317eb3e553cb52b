//! Makes samples of records and hands them to the sink.
//!
//! Runs in a thread of its own between the ring's reader and the disk. It may take its time: nothing but memory is held
//! up by it, and that is bounded (see `events::Reader`).

mod lasting;
mod native;
mod task_waits;
mod waits;
mod whose;

pub(super) use lasting::Lasting;
pub(super) use native::NativeSide;

use super::bell::Bells;
use super::follow::lock;
use super::made::{Made, PerProcess, describe};
use super::memory::Memory;
use super::names::Names;
use super::native::KernelFrames;
use super::registry::Registry;
use super::settled::Settled;
use super::task_waits::TaskWaits;
use super::waits::Held;
use crate::events::{Batch, Event, Events, Frames};
use crate::kernel::ChosenEvent;
use crate::merge::{Merger, Owner, ProgramKey};
use crate::profile::{FrameId, MOST_WORKS, Merge, Sample, WorkId};
use crate::remote::RemoteProcess;
use crate::remote::ledger::{self, Work, owner_of};
use crate::sinks::label::Label;
use crate::symbolize::Symbolizer;
use crate::types::Pid;
use foldhash::fast::RandomState;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tachyon_common::event::{SampleRecord, kind};
use tachyon_common::segment::WAIT_BANKS;
use tachyon_common::stop::StopReason;

/// How often missing names are read from live processes.
const TICK: Duration = Duration::from_secs(1);

/// How often to check for work while no messages come.
const IDLE_TICK: Duration = Duration::from_secs(5);

/// How often a streaming sink is flushed. A recording that is killed then loses no more than its last second: this plus the 0.2 s
/// after which the ring is read again, or the 0.8 s of a calm recording, whose samples are flushed as they come; plus the time that
/// threads wait for CPUs.
const FLUSH: Duration = Duration::from_millis(500);

/// How many code objects of a process are read before checking whether that costs too much.
const AT_A_TIME: u32 = 32;

/// An image is forgotten this long after its last process: its last records have been read by then.
pub(super) const SETTLED: Duration = Duration::from_secs(5);

/// Numbers that the progress line shows while the thread runs.
#[derive(Debug)]
pub(super) struct Live {
    pub stored: AtomicU64,
    /// The sink failed: there is no point in going on.
    pub failed: AtomicBool,
    /// `--max-memory` is reached.
    pub no_memory: AtomicBool,
    /// Rung when one of these is set, and when other threads have something to do.
    pub bells: Bells,
}

impl Live {
    pub fn new(bells: Bells) -> Self {
        Self { stored: AtomicU64::new(0), failed: AtomicBool::new(false), no_memory: AtomicBool::new(false), bells }
    }
}

/// Messages to the thread.
pub(super) enum Told {
    /// Records, as they lay in the ring.
    Batch(Batch),
    /// Waits that last.
    Lasting(Lasting),
    /// Tasks of event loops that are idle.
    TaskWaits(TaskWaits),
    /// All records of a bank of counters have been sent: what follows belongs to the next segment.
    Cut(Box<Cut>),
}

impl From<Batch> for Told {
    fn from(batch: Batch) -> Self {
        Self::Batch(batch)
    }
}

/// The end of a segment, and what the next one begins with.
pub(super) struct Cut {
    /// The next segment.
    pub next: Made,
    /// Its bank of counters.
    pub bank: u32,
    /// Where to send the segment that has ended.
    pub reply: Sender<Made>,
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
    /// How often each was met: otherwise a frame that never gets its name would take memory with every sample.
    unnamed: HashMap<Unnamed, u64, RandomState>,
    /// Images that have sent code objects since they were last judged.
    images: HashSet<u64>,
    /// Names the kernel's frames, where those are wanted.
    pub kernel: Option<KernelFrames>,
    native: Option<NativeSide>,
    /// Events that are sampled, where they were chosen.
    pub events: Vec<ChosenEvent>,
    /// Whether to record who ends waits, too.
    pub wakers: bool,
    /// Stacks of waits that have begun, and of threads that have ended a wait.
    begun: Held,
    waking: Held,
    threads: waits::Threads,
    pub tasks: whose::Tasks,
    /// The bank of counters of the present segment.
    bank: u32,
    /// Sample records of the next segment that arrived before this one was over.
    early: Vec<u8>,
}

impl Maker {
    pub fn new(
        made: Made,
        registry: Arc<Mutex<Registry>>,
        seed: u64,
        live: Arc<Live>,
        native: Option<NativeSide>,
    ) -> Self {
        Self {
            made,
            merger: Merger::default(),
            symbolizer: Symbolizer::default(),
            names: Names::new(),
            registry,
            seed,
            live,
            memory: None,
            unnamed: HashMap::default(),
            images: HashSet::new(),
            kernel: None,
            native,
            events: Vec::new(),
            wakers: false,
            begun: Held::default(),
            waking: Held::default(),
            threads: waits::Threads::default(),
            tasks: whose::Tasks::default(),
            bank: 0,
            early: Vec::new(),
        }
    }

    /// Handles messages until all senders are gone. Returns the last segment.
    pub fn run(mut self, told: &Receiver<Told>, queued: &AtomicUsize) -> Made {
        let (mut last_tick, mut last_flush) = (Instant::now(), Instant::now());
        // Whether the sink may have received anything since the last flush.
        let mut fresh = false;
        loop {
            let message = told.recv_timeout(self.patience(fresh, last_tick.elapsed(), last_flush.elapsed()));
            fresh |= message.is_ok();
            match message {
                Ok(Told::Batch(batch)) => {
                    self.batch(&batch);
                    self.names.read(&mut self.made.profile, &self.registry, false);
                    queued.fetch_sub(batch.len(), Ordering::Relaxed);
                }
                Ok(Told::Lasting(lasting)) => self.lasting(&lasting),
                Ok(Told::TaskWaits(waits)) => self.task_waits(&waits),
                Ok(Told::Cut(cut)) => self.cut(*cut),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.keep_within_memory();
            if last_tick.elapsed() >= TICK {
                last_tick = Instant::now();
                self.tell_refused();
                self.read_missing();
                self.names.read(&mut self.made.profile, &self.registry, true);
                self.judge_images();
                self.forget_images();
            }
            if fresh && last_flush.elapsed() >= FLUSH {
                (fresh, last_flush) = (false, Instant::now());
                let result = self.made.sink.as_mut().map_or(Ok(()), |sink| sink.tick(&self.made.profile));
                self.note_error(result);
            }
        }
        self.read_missing();
        self.names.read(&mut self.made.profile, &self.registry, true);
        self.symbolizer.finish(&mut self.made.profile);
        self.judge_unnamed(&[]);
        self.tell_refused();
        self.made
    }

    /// How long to wait for a message, `ticked` after the last tick and `flushed` after the last flush.
    fn patience(&self, fresh: bool, ticked: Duration, flushed: Duration) -> Duration {
        let wants_names = self.symbolizer.is_missing_any() || self.names.are_missing();
        let tick = if wants_names || !self.images.is_empty() { TICK } else { IDLE_TICK };
        let until_tick = tick.saturating_sub(ticked);
        if fresh {
            return until_tick.min(FLUSH.saturating_sub(flushed));
        }
        if self.memory.is_some() { until_tick.min(FLUSH) } else { until_tick }
    }

    /// Reports whose names are left out.
    fn tell_refused(&mut self) {
        for note in self.symbolizer.refused() {
            lock(&self.registry).note(note);
        }
    }

    /// Ends the segment, hands it over and begins the next. What is known about code objects, names and mappings stays;
    /// references to the ending profile are looked up anew in the next one.
    fn cut(&mut self, cut: Cut) {
        let Cut { next, bank, reply } = cut;
        self.read_missing();
        self.names.read(&mut self.made.profile, &self.registry, true);
        self.judge_unnamed(&[]);
        self.unnamed.clear();
        let ended = std::mem::replace(&mut self.made, next);
        self.symbolizer.begin_profile(&ended.profile, &mut self.made.profile);
        let registry = lock(&self.registry);
        self.merger.begin_profile(&ended.profile, |program| registry.is_alive(program));
        drop(registry);
        self.names.begin_profile();
        self.tasks.begin_profile();
        if let Some(native) = &mut self.native {
            native.mixer.begin_profile();
            native.copies.begin_profile();
        }
        if let Some(kernel) = &mut self.kernel {
            kernel.begin_profile();
        }
        self.bank = bank;
        // The receiver is gone only if the recording is being dropped.
        let _gone = reply.send(ended);
        let early = std::mem::take(&mut self.early);
        self.batch(&early);
    }

    fn batch(&mut self, batch: &[u8]) {
        let mut events = Events::new(batch);
        loop {
            let (before, is_sample) = (events.rest(), events.next_kind() == Some(kind::SAMPLE));
            let Some(event) = events.next() else { return };
            let bytes = &before[..before.len() - events.rest().len()];
            if let Some((native, event)) = self.native.as_mut().zip(event.as_ref().ok())
                && let Some(finished) = native.finish(bytes, event)
            {
                self.made.native.copied += u64::from(is_sample);
                self.batch(&finished);
                continue;
            }
            match event {
                Ok(Event::Sample(record, frames)) if u32::from(record.header.bank) == self.bank => {
                    self.made.received += 1;
                    self.sample(&record, frames);
                }
                Ok(Event::Wait(record, frames, facts)) if u32::from(record.header.bank) == WAIT_BANKS + self.bank => {
                    self.made.waited.received += u64::from(facts.weight) + u64::from(facts.queued);
                    self.wait(&record, frames, &facts);
                }
                Ok(Event::WaitEnd(record, facts)) if u32::from(record.header.bank) == WAIT_BANKS + self.bank => {
                    self.made.waited.received += u64::from(facts.weight) + u64::from(facts.queued);
                    self.wait_end(&record, &facts);
                }
                // Their records come later; after an early one, they belong to the next segment.
                Ok(Event::WaitBegin(record, _, facts)) if self.early.is_empty() => {
                    self.begun.hold(record.tid, facts.left_ns, bytes);
                }
                Ok(Event::Waker(_, _, facts)) if self.early.is_empty() => {
                    self.waking.hold(facts.waker, facts.left_ns, bytes);
                }
                Ok(Event::Stack(record, stack)) if u32::from(record.header.bank) % WAIT_BANKS == self.bank => {
                    if let Some(native) = &mut self.native {
                        native.copies.hold(&record, stack);
                    }
                }
                Ok(
                    Event::Sample(..)
                    | Event::Wait(..)
                    | Event::WaitEnd(..)
                    | Event::WaitBegin(..)
                    | Event::Waker(..)
                    | Event::Stack(..),
                ) => self.early.extend_from_slice(bytes),
                Ok(Event::Code(record, payload)) => {
                    self.names.learn_layout(record.image, record.layout);
                    let registry = lock(&self.registry);
                    let layout = registry.layout(record.layout).copied();
                    drop(registry);
                    let Some(layout) = layout else { continue };
                    self.images.insert(record.image);
                    self.symbolizer.begin_image(record.image, || owner_of(record.tgid));
                    // What a target claims of its code objects may be nonsense: its frames then have no names.
                    let _refused = self.symbolizer.add_code(&mut self.made.profile, &record, payload, &layout);
                }
                // A sample of which only the header can be read; the reader has counted records of unknown kinds.
                Err(_) if is_sample => {
                    self.made.received += 1;
                    self.made.bad_samples += 1;
                }
                Ok(Event::Process(_)) | Err(_) => {}
            }
        }
    }

    /// The owner of a record, with its stack left in the merger, and whose work it was.
    fn stack(&mut self, record: &SampleRecord, frames: Frames<'_>) -> (Owner, SampleRecord, (Merge, Option<WorkId>)) {
        self.threads.learn(record);
        let mut settled = Settled::of(&lock(&self.registry), record, frames);
        self.symbolizer.begin_image(record.image, || owner_of(record.tgid));
        let registry = &self.registry;
        let made = &mut self.made;
        let owner = self.merger.owner(&mut made.profile, record, || describe(registry, record));
        if owner.nameless {
            self.names.expect(owner.thread, record);
        }
        if owner.first {
            made.processes.push(PerProcess { program: ProgramKey::of(record), ..PerProcess::default() });
        }
        // Each request of a server is different work: it is not to be remembered if no sink writes it down.
        let tells_work = made.sink.as_ref().is_some_and(|sink| sink.tells_work());
        let whose = frames.whose().filter(|_| tells_work);
        let greenlet = frames.greenlets().next().map(|(greenlet, _)| greenlet);
        let work = whose.and_then(|whose| self.tasks.work(&mut made.profile, &whose, greenlet));
        if whose.is_some() && work.is_none() {
            let note = format!("more than {MOST_WORKS} tasks and spans: later samples do not say whose work they were");
            lock(registry).note(note);
        }
        let (merger, symbolizer) = (&mut self.merger, &mut self.symbolizer);
        merger.work = self.tasks.below(&mut made.profile, owner.process, frames);
        let merge = match &mut self.native {
            Some(native) => native.stack(made, merger, symbolizer, owner.process, &mut settled),
            None => {
                merger.stack(&mut made.profile, symbolizer, &settled.record, settled.frames);
                Merge::None
            }
        };
        if let Some(kernel) = &mut self.kernel {
            let waits = u32::from(record.header.bank) >= WAIT_BANKS;
            merger.put_above(kernel.of(&mut made.profile, frames, waits));
        }
        (owner, settled.record, (merge, work))
    }

    fn sample(&mut self, record: &SampleRecord, frames: Frames<'_>) {
        let (owner, record, (merge, work)) = self.stack(record, frames);
        let number = usize::from(record.header.event);
        let event = self.events.get(number);
        if let Some(event) = event.filter(|event| !event.is_clock()) {
            let root = self.made.profile.special_frame(&crate::profile::event_root(&event.to_string()));
            self.merger.put_below(root);
        }
        let (made, record, stack) = (&mut self.made, &record, self.merger.last());
        let status = (record.status & 0x3f) as u8;
        let sample =
            Sample { thread: owner.thread, time_us: record.ktime_ns / 1000, status, frames: stack, merge, work };
        let result = made.sink.as_mut().map_or(Ok(()), |sink| sink.sample(&made.profile, &sample));
        if result.is_err() {
            made.write_errors += 1;
            self.note_error(result);
            return;
        }
        made.stored += 1;
        if event.is_some() {
            made.by_event[number] += 1;
        }
        self.live.stored.fetch_add(1, Ordering::Relaxed);
        if let Some(stacks) = &mut made.stacks {
            *stacks.entry((owner.thread, status, stack.into())).or_default() += 1;
        }
        *made.stops.entry(record.stop).or_default() += 1;
        let is_python = |frame: &&FrameId| Label::of(&made.profile, made.profile.frames.get(**frame)).kind.is_python();
        let above_event = &stack[..stack.len() - usize::from(made.profile.event_of(stack).is_some())];
        if let Some(&charged) = above_event.iter().find(is_python).or(stack.first()) {
            *made.own.entry(charged).or_default() += 1;
        }
        let process = &mut made.processes[owner.process.0 as usize];
        process.samples += 1;
        process.merges.count(merge);
        process.not_initialized += u64::from(record.stop == StopReason::RuntimeNotInitialized as u8);
        // Only whole stacks count as named when their frames are.
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
            if !self.live.failed.swap(true, Ordering::Relaxed) {
                self.live.bells.news.ring();
            }
            self.made.first_error.get_or_insert(error);
        }
    }

    /// Frees what is known about images whose last process has been gone for a while: a host that starts programs all
    /// day must not fill memory with them. Their frames stay in the profile.
    fn forget_images(&mut self) {
        let dead = lock(&self.registry).take_dead_images(SETTLED);
        for &image in &dead {
            self.symbolizer.forget(&mut self.made.profile, image);
            self.names.forget(image);
            if let Some(native) = &self.native {
                native.mixer.forget(image);
            }
        }
        if !dead.is_empty() {
            self.judge_unnamed(&dead);
        }
    }

    /// Decides on samples that waited for names: images in `ended` will get no more of them.
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

    /// The layouts' last test: with a wrong layout, code objects are noise.
    fn judge_images(&mut self) {
        for image in std::mem::take(&mut self.images) {
            let health = self.symbolizer.health(image);
            let bad = health.bad_names + health.bad_tables + health.outside;
            // One in a hundred may be a target's own doing; a wrong layout spoils nearly all of them.
            if bad >= 4 && bad * 4 > health.codes {
                lock(&self.registry).nonsense.push(image);
                self.live.bells.follow.ring();
            }
        }
    }

    /// Reads from live processes what did not fit into the kernel's budget or could not be read there.
    fn read_missing(&mut self) {
        let mut open: HashMap<u32, Option<RemoteProcess>> = HashMap::new();
        let mut spent_on: HashMap<u32, u32> = HashMap::new();
        for missing in self.symbolizer.missing() {
            let (Some(tgid), Some(layout)) = (missing.tgid, missing.layout) else { continue };
            let Some(layout) = lock(&self.registry).layout(layout).copied() else { continue };
            // A process that has cost enough is read another time.
            let may = || ledger::may(Work::Names, Pid(tgid), Duration::ZERO);
            let process = open.entry(tgid).or_insert_with(|| may().then(|| RemoteProcess::open(Pid(tgid)).ok())?);
            let Some(process) = process else { continue };
            let charged = ledger::charge(Work::Names, Pid(tgid));
            // A code object that is gone stays without a name; the report counts it.
            let _gone = self.symbolizer.read_missing(&mut self.made.profile, missing.key, &layout, self.seed, process);
            drop(charged);
            let spent = spent_on.entry(tgid).or_default();
            *spent += 1;
            if spent.is_multiple_of(AT_A_TIME) && !ledger::may(Work::Names, Pid(tgid), Duration::ZERO) {
                open.insert(tgid, None);
            }
        }
    }
}
