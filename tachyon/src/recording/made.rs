//! What the samples of one segment add up to: its profile, its sink, and the counts of its account.

use super::follow::lock;
use super::registry::{ProcessInfo, Registry};
use super::segment::StackCount;
use super::waits::{Stretch, Waited};
use crate::merge::{ProgramKey, comm_text};
use crate::profile::{FrameId, Merge, Process, Profile, Sample, ThreadId, Wait};
use crate::sinks::Sink;
use foldhash::fast::RandomState;
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;
use tachyon_common::event::SampleRecord;
use tachyon_common::limits::MAX_EVENTS;

/// Most samples of a wait that a sink is given at once.
const MOST_AT_ONCE: u64 = 1024;

/// Counts of one process, in the order of [`Profile::processes`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PerProcess {
    pub program: ProgramKey,
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
    pub fn count(&mut self, merge: Merge) {
        match merge {
            Merge::None => {}
            Merge::Exact => self.exact += 1,
            Merge::Repaired => self.repaired += 1,
            Merge::Failed => self.failed += 1,
        }
    }
}

/// What the samples of one segment add up to.
#[derive(Default)]
pub(super) struct Made {
    pub profile: Profile,
    /// `None`: samples are only kept by stack.
    pub sink: Option<Box<dyn Sink + Send>>,
    /// Sample records that arrived.
    pub received: u64,
    pub stored: u64,
    /// Those of them that could not be read.
    pub bad_samples: u64,
    pub write_errors: u64,
    pub first_error: Option<std::io::Error>,
    pub processes: Vec<PerProcess>,
    pub stops: HashMap<u8, u64, RandomState>,
    /// Samples by the frame that they are charged to.
    pub own: HashMap<FrameId, u64, RandomState>,
    /// Samples by thread, status and stack, where those are kept.
    pub stacks: Option<HashMap<StackKey, u64, RandomState>>,
    pub native: NativeCounts,
    /// Samples by event, where events were chosen.
    pub by_event: [u64; MAX_EVENTS],
    pub waited: Waited,
}

/// Thread, status and stack of a sample.
pub(super) type StackKey = (ThreadId, u8, Box<[FrameId]>);

/// What became of native stacks.
#[derive(Debug, Default)]
pub(super) struct NativeCounts {
    /// Samples whose stacks were not plainly exact, by reason.
    pub repairs: HashMap<&'static str, u64>,
    /// Samples by the reason why their native stack ended.
    pub stops: HashMap<u8, u64, RandomState>,
    /// Samples whose native stacks were walked to their ends in copies.
    pub copied: u64,
}

impl Made {
    /// An empty segment with this profile and sink.
    pub fn new(profile: Profile, sink: Option<Box<dyn Sink + Send>>, keep_stacks: bool) -> Self {
        Self { profile, sink, stacks: keep_stacks.then(HashMap::default), ..Self::default() }
    }

    /// The same within a limit of memory.
    pub fn within(mut self, max_memory: Option<u64>) -> Self {
        if let (Some(limit), Some(sink)) = (max_memory, &mut self.sink) {
            sink.limit(limit);
        }
        self
    }

    /// Adds a part of a wait.
    pub fn wait(&mut self, sample: &Sample<'_>, charged: FrameId, stretch: &Stretch, told: &Wait<'_>) {
        let (began, ended) = (stretch.began_ns / 1000, stretch.ended_ns / 1000);
        let (stored, result) = self.put_wait(sample, told, (began, ended, stretch.over_ns / 1000));
        let (waited, weight) = (&mut self.waited, stretch.wait.weight);
        waited.stored += stored;
        if let Err(error) = result {
            waited.write_errors += weight - stored;
            self.first_error.get_or_insert(error);
            return;
        }
        if let Some(holder) = told.holder {
            *waited.by_holder.entry(holder.frame).or_default() += weight;
        }
        *waited.by_place.entry((stretch.cause, charged)).or_default() += weight;
        *waited.by_thread.entry(sample.thread).or_default().entry(stretch.cause).or_default() += weight;
        if let Some(stacks) = &mut self.stacks {
            *stacks.entry((sample.thread, sample.status, sample.frames.into())).or_default() += weight;
        }
    }

    /// Adds what a task or greenlet waited while its loop was idle, at a look; it is charged to the frame where people would look for it.
    pub fn task_wait(&mut self, sample: &Sample<'_>, charged: FrameId, weight: u64, is_greenlet: bool) {
        let (time_us, told) = (sample.time_us, Wait { weight, ..Wait::default() });
        let (stored, result) = self.put_wait(sample, &told, (time_us, time_us, time_us));
        let tasks = &mut self.waited.tasks;
        tasks.stored += stored;
        tasks.greenlets += if is_greenlet { stored } else { 0 };
        tasks.write_errors += weight - stored;
        if let Err(error) = result {
            self.first_error.get_or_insert(error);
            return;
        }
        *tasks.by_place.entry(charged).or_default() += weight;
    }

    /// Gives a wait to the sink: as a whole if the sink supports that, else as the number of samples that it stands for, one period
    /// apart, the last at its end. Takes when it began, when it ended, and when the wait that it is part of was over, in
    /// microseconds. Returns how many were stored.
    fn put_wait(
        &mut self,
        sample: &Sample<'_>,
        told: &Wait<'_>,
        (began, ended, over): (u64, u64, u64),
    ) -> (u64, std::io::Result<()>) {
        let Self { profile, sink, .. } = self;
        let Some(sink) = sink else { return (told.weight, Ok(())) };
        match sink.wait(profile, &Sample { time_us: over, ..*sample }, told) {
            Ok(true) => return (told.weight, Ok(())),
            Ok(false) => {}
            Err(error) => return (0, Err(error)),
        }
        let time_us = |after| ended.saturating_sub(after * profile.meta.interval_us).max(began);
        let mut left = told.weight;
        while left > 0 {
            let many = left.min(MOST_AT_ONCE);
            let times: Vec<u64> = (left - many..left).rev().map(time_us).collect();
            if let Err(error) = sink.repeated(profile, sample, &times) {
                return (told.weight - left, Err(error));
            }
            left -= many;
        }
        (told.weight, Ok(()))
    }

    /// The samples by stack.
    pub fn take_stacks(&mut self) -> Vec<StackCount> {
        let counted = self.stacks.take().into_iter().flatten();
        counted.map(|((thread, status, frames), samples)| StackCount { thread, status, frames, samples }).collect()
    }
}

/// What a profile may have of its processes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Told {
    /// Whole command lines, not just program and script.
    pub arguments: bool,
    /// Variables of their environment, as labels.
    pub environment: bool,
}

impl Told {
    /// The part of a command line that goes into the profile.
    pub fn cmdline(self, cmdline: &[String]) -> Vec<String> {
        if self.arguments { cmdline.to_vec() } else { crate::profile::without_arguments(cmdline) }
    }

    /// The part of the environment that goes into it.
    pub fn environment(self, info: &ProcessInfo) -> BTreeMap<String, String> {
        info.details.as_ref().filter(|_| self.environment).map(|details| details.labels()).unwrap_or_default()
    }
}

/// What is known about a process, apart from its identity.
pub(super) fn known_of(info: &ProcessInfo, told: Told) -> Process {
    Process {
        pid: info.pid,
        comm: info.comm.clone(),
        cmdline: told.cmdline(&info.cmdline),
        environment: told.environment(info),
        python_version: info.version().to_owned(),
        container: info.container.clone(),
        pod: info.pod.clone(),
        service: info.service.clone(),
        details: info.details.clone(),
        instance: String::new(),
    }
}

/// What is known about the process of a record.
pub(super) fn describe(registry: &Mutex<Registry>, record: &SampleRecord) -> Process {
    let mut registry = lock(registry);
    let told = registry.told_of_processes;
    match registry.sampled(ProgramKey::of(record)) {
        Some(info) => {
            let instance = info.identity(record.instance).to_owned();
            Process { instance, ..known_of(info, told) }
        }
        None => Process {
            pid: record.tgid,
            comm: comm_text(&record.comm),
            instance: format!("{:016x}-{:x}", record.instance, record.image),
            ..Process::default()
        },
    }
}
