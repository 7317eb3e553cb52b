//! What threads waited for, and the account of waits.

mod cause;
mod held;
mod stretch;

pub(super) use cause::{FOR_A_CPU, GIL, LOCK, told_by_native};
pub(crate) use cause::{cause, cause_with_stack, of_sleeping};
pub(super) use held::Held;
pub(crate) use stretch::told;
pub(super) use stretch::{Stretch, stretches};

use super::task_waits::NotRead;
use crate::kernel::{WaitMethod, WaitTotals};
use crate::profile::{FrameId, Profile, SPECIAL_FILENAME, ThreadId, waker_of};
use crate::report::{CauseReport, HolderReport, MOST_LINES, PlaceReport, TaskWaitReport, WakerReport, WallReport};
use std::collections::{BTreeMap, HashMap};
use tachyon_common::stop::LossCause;

/// The sums of waits, in ticks.
#[derive(Clone, Debug, Default)]
pub(super) struct Waited {
    /// Of records that arrived.
    pub received: u64,
    /// Those of them that are in the file.
    pub stored: u64,
    /// In waits that were still going on when the segment ended, and those of them whose stack could not be determined.
    pub due_at_end: u64,
    pub unread: u64,
    /// Those that could not be written.
    pub write_errors: u64,
    /// By cause and by the frame that they are charged to.
    pub by_place: HashMap<(&'static str, FrameId), u64>,
    /// For the GIL, by the frame that held it.
    pub by_holder: HashMap<FrameId, u64>,
    /// By cause, the frame that they are charged to, and the frame that ended them, where that was asked for.
    pub by_waker: HashMap<(&'static str, FrameId, FrameId), u64>,
    /// By thread of the profile and by cause.
    pub by_thread: HashMap<ThreadId, BTreeMap<&'static str, u64>>,
    /// What tasks waited for while their loops were idle.
    pub tasks: TasksWaited,
}

/// The sums of tasks that waited concurrently. Their ticks are not part of their thread's.
#[derive(Clone, Debug, Default)]
pub(super) struct TasksWaited {
    /// Ticks in which loops were idle at a look, counted once per loop.
    pub idle: u64,
    /// Those of them in which the tasks could not be read.
    pub not_read: BTreeMap<NotRead, u64>,
    /// Ticks of tasks that are in the file, of tasks beyond the limit, and of those that could not be written.
    pub stored: u64,
    /// Those in the file that are greenlets'.
    pub greenlets: u64,
    pub too_many: u64,
    pub write_errors: u64,
    /// By the frame that they are charged to.
    pub by_place: HashMap<FrameId, u64>,
}

impl Waited {
    /// Ticks of some threads, by cause.
    pub fn of(&self, threads: &[ThreadId]) -> BTreeMap<&'static str, u64> {
        let mut sum = BTreeMap::new();
        threads.iter().filter_map(|thread| self.by_thread.get(thread)).for_each(|causes| add(&mut sum, causes));
        sum
    }

    /// Ticks of all threads of each process, by index into the profile's processes and by cause.
    pub fn by_process(&self, profile: &Profile) -> HashMap<u32, BTreeMap<&'static str, u64>> {
        let mut sums: HashMap<u32, BTreeMap<&'static str, u64>> = HashMap::new();
        for (thread, causes) in &self.by_thread {
            add(sums.entry(profile.thread(*thread).process).or_default(), causes);
        }
        sums
    }
}

fn add(sum: &mut BTreeMap<&'static str, u64>, causes: &BTreeMap<&'static str, u64>) {
    for (cause, ticks) in causes {
        *sum.entry(*cause).or_default() += ticks;
    }
}

/// Waits are lost for this where the kernel did not report that the thread came back.
pub(crate) const UNREPORTED: &str = "unreported";

/// The account of waits: `ticks_due = stored + Σ loss`. Also returns by how much two counts of the same thing differ.
pub(super) fn account(
    (method, totals): (WaitMethod, &WaitTotals),
    waited: &Waited,
    tasks_are_looked_at: bool,
    profile: &Profile,
) -> (WallReport, u64) {
    let WaitTotals { before, walked } = totals;
    let mut loss: BTreeMap<String, u64> =
        LossCause::ALL.into_iter().map(|cause| (cause.name().to_owned(), walked.loss[cause as usize])).collect();
    let mut add = |cause: &str, ticks: u64| *loss.entry(cause.to_owned()).or_default() += ticks;
    add("too_many", before.too_many);
    add("not_kicked", before.not_kicked);
    add("unread", waited.unread);
    add("not_met", before.not_met);
    add(UNREPORTED, before.unreported);
    add(LossCause::WriteError.name(), waited.write_errors);
    add(LossCause::BadRecord.name(), walked.sent.saturating_sub(waited.received));
    add(LossCause::Internal.name(), walked.ran.saturating_sub(walked.ended()));
    let inconsistent = totals.met().abs_diff(before.due)
        + walked.ran.abs_diff(walked.ended())
        + walked.sent.abs_diff(waited.received)
        + (waited.received + waited.due_at_end).abs_diff(waited.stored + waited.write_errors + waited.unread);
    let report = WallReport {
        method: method.name().to_owned(),
        ticks_due: before.due + waited.due_at_end,
        stored: waited.stored,
        loss,
        widened: before.widened,
        threads_without_room: before.threads_without_room,
        causes: causes(waited, profile),
        holders: holders(waited, profile),
        wakers: wakers(waited, profile),
        tasks: tasks_are_looked_at.then(|| task_waits(&waited.tasks, profile)),
    };
    (report, inconsistent)
}

/// What tasks waited for. `idle = read + Σ loss`.
fn task_waits(tasks: &TasksWaited, profile: &Profile) -> TaskWaitReport {
    let lost = |reason: NotRead| tasks.not_read.get(&reason).copied().unwrap_or(0);
    let mut loss: BTreeMap<String, u64> = NotRead::ALL.map(|reason| (reason.name().to_owned(), lost(reason))).into();
    let read = tasks.idle.saturating_sub(loss.values().sum());
    loss.insert("too_many".to_owned(), tasks.too_many);
    loss.insert(LossCause::WriteError.name().to_owned(), tasks.write_errors);
    let mut places: BTreeMap<String, u64> = BTreeMap::new();
    for (&frame, &ticks) in &tasks.by_place {
        *places.entry(place(profile, frame)).or_default() += ticks;
    }
    let places = places.into_iter().map(|(place, stored)| PlaceReport { stored, place });
    TaskWaitReport {
        idle: tasks.idle,
        read,
        loss,
        stored: tasks.stored,
        greenlets: tasks.greenlets,
        places: largest(places.collect()),
    }
}

fn causes(waited: &Waited, profile: &Profile) -> BTreeMap<String, CauseReport> {
    let mut causes: BTreeMap<String, CauseReport> = BTreeMap::new();
    for (&(cause, frame), &ticks) in &waited.by_place {
        let known = causes.entry(cause.to_owned()).or_default();
        known.stored += ticks;
        if ticks > known.at_place {
            (known.place, known.at_place) = (place(profile, frame), ticks);
        }
    }
    causes
}

/// Lines that held the GIL, most ticks first.
fn holders(waited: &Waited, profile: &Profile) -> Vec<HolderReport> {
    let mut lines: BTreeMap<HolderReport, u64> = BTreeMap::new();
    for (&frame, &ticks) in &waited.by_holder {
        let frame = profile.frames.get(frame);
        let line = HolderReport {
            stored: 0,
            function: profile.strings.get(frame.function).to_owned(),
            file: profile.strings.get(frame.filename).to_owned(),
            line: u32::try_from(frame.lineno).ok(),
        };
        *lines.entry(line).or_default() += ticks;
    }
    let lines = lines.into_iter().map(|(line, stored)| HolderReport { stored, ..line });
    largest(lines.collect())
}

/// Lines that ended waits, likewise.
fn wakers(waited: &Waited, profile: &Profile) -> Vec<WakerReport> {
    let mut lines: BTreeMap<WakerReport, u64> = BTreeMap::new();
    for (&(cause, charged, waker), &ticks) in &waited.by_waker {
        let (place, waker) = (place(profile, charged), place(profile, waker));
        let waker = waker_of(&waker).unwrap_or(&waker).to_owned();
        *lines.entry(WakerReport { stored: 0, cause: cause.to_owned(), place, waker }).or_default() += ticks;
    }
    let lines = lines.into_iter().map(|(line, stored)| WakerReport { stored, ..line });
    largest(lines.collect())
}

fn largest<T: Ord>(mut lines: Vec<T>) -> Vec<T> {
    lines.sort_by(|a, b| b.cmp(a));
    lines.truncate(MOST_LINES);
    lines
}

/// A frame as people name it: `file:line function`.
pub(super) fn place(profile: &Profile, frame: FrameId) -> String {
    let frame = profile.frames.get(frame);
    let (file, function) = (profile.strings.get(frame.filename), profile.strings.get(frame.function));
    if file == SPECIAL_FILENAME {
        return function.to_owned();
    }
    let name = file.rsplit('/').next().unwrap_or(file);
    format!("{name}:{} {function}", frame.lineno)
}
