//! A recording that is being watched: what its last seconds show, and what all of it shows.
//!
//! A [`BatchSink`] takes the samples of a segment; when the segment has ended, [`Live::add`] makes them a [`Step`]. The last
//! minute is kept by step, for windows and histories; all that came before is kept by stack. Memory grows with the number of
//! distinct stacks and threads; [`Live::is_full`] says when there are too many.

mod batch;
mod shares;
mod tasks;

pub use batch::{Batch, BatchSink};
pub use shares::Shares;
pub use tasks::TaskRow;

use super::aggregate::{Aggregate, Place, PlaceId};
use super::groups::NO_TASK;
use super::module::NoDistributions;
use super::ratio;
use super::rows::{By, Charged, Row, RowName, RowTable, Sum, code_rows};
use crate::profile::{Adopted, Adopter, FrameId, Profile, ThreadId};
use crate::report::Report;
use crate::sinks::label::{Label, thread_name};
use crate::sinks::process_title;
use crate::sinks::stacks::{StackId, Stacks, gil_held};
use batch::BatchSample;
use foldhash::fast::RandomState;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tachyon_common::event::status::HAS_EXCEPTION;

/// Length of what is kept by step.
pub const HISTORY: Duration = Duration::from_secs(60);
/// Distinct stacks that are kept.
const MOST_STACKS: usize = 100_000;
/// Distinct lines of code that are kept.
const MOST_PLACES: usize = 200_000;

/// What samples that are counted together have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    thread: u32,
    /// Index of the aggregate's stack.
    stack: u32,
    gil: Option<bool>,
    /// An exception was being raised or handled.
    exception: bool,
}

/// A segment, summed up.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Its length.
    pub seconds: f64,
    /// Samples lost in it.
    pub lost: u64,
    /// CPU time that the profiler itself took, including its BPF programs if the kernel measures them.
    pub profiler_s: f64,
    counts: Vec<(Key, Sum)>,
}

/// A sample as [`Live`] numbers things.
#[derive(Clone, Copy, Debug)]
pub struct Numbered {
    /// Microseconds on `CLOCK_MONOTONIC`.
    pub time_us: u64,
    /// Its thread, in [`Live::profile`].
    pub thread: ThreadId,
    /// See [`Live::stack`].
    pub(crate) stack: StackId,
    /// With the sample's [`crate::profile::Merge`] in its upper two bits.
    pub status: u8,
}

/// Which samples count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scope {
    /// All.
    #[default]
    All,
    /// Those of a process: its index in [`Profile::processes`].
    Process(u32),
    /// Those of a thread.
    Thread(ThreadId),
    /// Those of the tasks of one name in a process, and of tasks that they await.
    Task {
        /// Its index in [`Profile::processes`].
        process: u32,
        /// The name's number.
        task: u32,
    },
    /// Those that belong to no task.
    NoTask,
}

/// A stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// The last seconds.
    Window(Duration),
    /// Since the start.
    Whole,
}

/// A function or a line.
#[derive(Clone, Debug)]
pub struct LiveRow {
    /// Its number among the rows of its kind.
    pub id: usize,
    /// What identifies it.
    pub name: RowName,
    /// In itself and in native code that it called, in the window.
    pub own: Sum,
    /// And in Python functions that it called.
    pub total: Sum,
    /// Likewise, since the start.
    pub own_whole: Sum,
    /// Likewise.
    pub total_whole: Sum,
    /// For functions, the line with most of its self in the window, or else since the start.
    pub hottest_line: Option<u32>,
    /// What native code its self in the window went into: symbol, object, samples.
    pub native: Vec<(Arc<str>, Arc<str>, u64)>,
}

/// A thread or a process.
#[derive(Clone, Debug)]
pub struct GroupRow {
    /// Its samples.
    pub scope: Scope,
    /// For people.
    pub name: String,
    /// For a thread: its process, for people.
    pub process: String,
    /// In the window.
    pub sum: Sum,
    /// Of those, samples that held the GIL; `None`: not known.
    pub gil: Option<Sum>,
    /// Since the start.
    pub whole: Sum,
    /// Of those, samples that held the GIL.
    pub gil_whole: Option<Sum>,
}

/// What a stack says besides its places.
#[derive(Clone, Copy, Debug)]
struct StackKind {
    /// It is in the garbage collector.
    gc: bool,
    /// It ran native code.
    native: bool,
    /// Its thread waited.
    waiting: bool,
}

/// What was seen of a recording.
#[derive(Clone, Debug, Default)]
pub struct Live {
    adopter: Adopter,
    stacks: Stacks,
    aggregate: Aggregate,
    /// By [`FrameId`].
    place_of: Vec<PlaceId>,
    /// By [`StackId`]: the aggregate's stack.
    stack_of: Vec<u32>,
    /// By stack of the aggregate.
    kinds: Vec<StackKind>,
    tasks: tasks::Tasks,
    whole: HashMap<Key, Sum, RandomState>,
    whole_seconds: f64,
    whole_lost: u64,
    whole_profiler_s: f64,
    steps: VecDeque<Step>,
}

impl Live {
    /// Adds a segment. Returns its samples, numbered.
    pub fn add(&mut self, profile: &Profile, report: &Report, batch: &Batch) -> Vec<Numbered> {
        let Adopted { frames, threads } = self.adopter.adopt(profile);
        self.name_places();
        let mut shown = Vec::new();
        let mut take = |stack: &[FrameId]| {
            shown.clear();
            shown.extend(stack.iter().map(|frame| frames[frame.0 as usize]));
            let id = self.stacks.intern(&shown);
            if id.0 as usize == self.stack_of.len() {
                let places: Vec<PlaceId> = shown.iter().map(|frame| self.place_of[frame.0 as usize]).collect();
                self.stack_of.push(self.aggregate.intern_stack(&places));
            }
            id
        };
        let stacks: Vec<StackId> = batch.stacks.iter().map(&mut take).collect();
        for stack in &self.aggregate.stacks()[self.kinds.len()..] {
            let gc = stack.iter().any(|&place| self.aggregate.place(place).is_gc());
            let waiting = stack.first().is_some_and(|&leaf| self.aggregate.place(leaf).waits_for().is_some());
            let native = !waiting && Charged::of(&self.aggregate, stack).native.is_some();
            self.kinds.push(StackKind { gc, native, waiting });
            self.tasks.push(&self.aggregate.tasks_of(stack));
        }
        let number = |sample: &BatchSample| Numbered {
            time_us: sample.time_us,
            thread: threads[sample.thread.0 as usize],
            stack: stacks[sample.stack.0 as usize],
            status: sample.status,
        };
        let numbered: Vec<Numbered> = batch.samples.iter().map(number).collect();
        self.count(&numbered, profile.meta.interval_us.max(1), report);
        numbered
    }

    fn count(&mut self, samples: &[Numbered], cpu_us: u64, report: &Report) {
        let mut counts: HashMap<Key, Sum, RandomState> = HashMap::default();
        for Numbered { thread, stack, status, .. } in samples {
            let key = Key {
                thread: thread.0,
                stack: self.stack_of[stack.0 as usize],
                gil: gil_held(status & 0x3f),
                exception: u32::from(*status) & HAS_EXCEPTION != 0,
            };
            *counts.entry(key).or_default() += Sum { samples: 1, cpu_us };
        }
        for (&key, &sum) in &counts {
            *self.whole.entry(key).or_default() += sum;
        }
        let lost = report.loss.values().sum();
        let profiler_s = report.cost.user_cpu_s + report.cost.bpf_run_ns.unwrap_or(0) as f64 / 1e9;
        let step = Step { seconds: report.duration_s, lost, profiler_s, counts: counts.into_iter().collect() };
        self.whole_seconds += step.seconds;
        self.whole_lost += lost;
        self.whole_profiler_s += profiler_s;
        // The first segment ends as soon as it begins: the cost of the start is not part of any window.
        if report.cost.start.total_s == 0.0 {
            self.steps.push_back(step);
        }
        let length = |steps: &VecDeque<Step>| steps.iter().skip(1).map(|step| step.seconds).sum::<f64>();
        while length(&self.steps) >= HISTORY.as_secs_f64() {
            self.steps.pop_front();
        }
    }

    /// Gives places to frames that are new.
    fn name_places(&mut self) {
        let (profile, aggregate) = (&self.adopter.profile, &mut self.aggregate);
        for frame in profile.frames.iter().skip(self.place_of.len()) {
            let Label { kind, function, filename, line } = Label::of(profile, frame);
            let (function, file) = (aggregate.text(function), aggregate.text(filename));
            self.place_of.push(aggregate.intern_place(Place { kind, function, file, line }));
        }
    }

    /// All frames, threads and processes so far.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        &self.adopter.profile
    }

    /// The stack of a sample, leaf first.
    #[must_use]
    pub fn stack(&self, sample: &Numbered) -> &[FrameId] {
        self.stacks.get(sample.stack)
    }

    /// Whether it holds so much that it is time to start over.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.stack_of.len() > MOST_STACKS || self.place_of.len() > MOST_PLACES
    }

    /// The steps of the last minute, oldest first.
    pub fn steps(&self) -> impl ExactSizeIterator<Item = &Step> + DoubleEndedIterator {
        self.steps.iter()
    }

    /// The steps of a window: whole ones, at least one.
    fn window(&self, length: Duration) -> impl Iterator<Item = &Step> {
        let mut before = 0.0;
        self.steps.iter().rev().take_while(move |step| {
            // Steps are always a little short; that must not make a window a step longer.
            let within = before < length.as_secs_f64() - step.seconds / 2.0 || before == 0.0;
            before += step.seconds;
            within
        })
    }

    fn is_in(&self, scope: Scope, key: &Key) -> bool {
        let process_of = |key: &Key| self.profile().thread(ThreadId(key.thread)).process;
        match scope {
            Scope::All => true,
            Scope::Process(process) => process_of(key) == process,
            Scope::Thread(one) => one.0 == key.thread,
            Scope::Task { process, task } => self.tasks.of(key.stack).contains(&task) && process_of(key) == process,
            Scope::NoTask => self.tasks.of(key.stack).is_empty(),
        }
    }

    fn counts(&self, span: Span, scope: Scope, mut each: impl FnMut(Key, Sum)) {
        let mut counted = |key: &Key, sum: &Sum| {
            if self.is_in(scope, key) {
                each(*key, *sum);
            }
        };
        match span {
            Span::Window(length) => {
                self.window(length).flat_map(|step| &step.counts).for_each(|(key, sum)| counted(key, sum));
            }
            Span::Whole => self.whole.iter().for_each(|(key, sum)| counted(key, sum)),
        }
    }

    /// What all samples together show.
    #[must_use]
    pub fn shares(&self, span: Span, scope: Scope) -> Shares {
        let mut shares = match span {
            Span::Window(length) => self.window(length).fold(Shares::default(), |sum, step| Shares {
                seconds: sum.seconds + step.seconds,
                lost: sum.lost + step.lost,
                profiler_s: sum.profiler_s + step.profiler_s,
                ..sum
            }),
            Span::Whole => Shares {
                seconds: self.whole_seconds,
                lost: self.whole_lost,
                profiler_s: self.whole_profiler_s,
                ..Shares::default()
            },
        };
        let (mut held, mut known, mut gc, mut native, mut raising) = (0, 0, 0, 0, 0);
        self.counts(span, scope, |key, sum| {
            shares.sum += sum;
            known += if key.gil.is_some() { sum.samples } else { 0 };
            held += if key.gil == Some(true) { sum.samples } else { 0 };
            let kind = self.kinds[key.stack as usize];
            gc += if kind.gc { sum.samples } else { 0 };
            native += if kind.native { sum.samples } else { 0 };
            if !kind.waiting {
                shares.running += sum;
            }
            raising += if key.exception { sum.samples } else { 0 };
        });
        shares.waiting = ratio(shares.sum.samples - shares.running.samples, shares.sum.samples);
        shares.exceptions = ratio(raising, shares.sum.samples);
        shares.gil = (known > 0).then(|| ratio(held, known));
        (shares.gc, shares.native) = (ratio(gc, shares.sum.samples), ratio(native, shares.sum.samples));
        shares
    }

    /// The rows of functions or lines that have a sample, in no particular order.
    ///
    /// # Panics
    /// When asked for processes, threads or modules.
    #[must_use]
    pub fn rows(&self, by: By, length: Duration, scope: Scope) -> Vec<LiveRow> {
        assert!(matches!(by, By::Function | By::Line), "the others have no place");
        let make = |span| {
            let mut by_stack = vec![Sum::default(); self.aggregate.stacks().len()];
            self.counts(span, scope, |key, sum| by_stack[key.stack as usize] += sum);
            code_rows(&self.aggregate, by, false, &by_stack, &NoDistributions)
        };
        // The same places have the same rows.
        let both = make(Span::Window(length)).into_iter().zip(make(Span::Whole)).enumerate();
        let row = |(id, (window, whole)): (usize, (Row, Row))| LiveRow {
            id,
            name: window.name,
            own: window.own,
            total: window.total,
            own_whole: whole.own,
            total_whole: whole.total,
            hottest_line: window.hottest_line.or(whole.hottest_line),
            native: window.native,
        };
        both.map(row)
            .filter(|row| {
                let is_mark = row.name.is_mark() && row.own_whole.samples == 0;
                row.total_whole.samples > 0 && !is_mark
            })
            .collect()
    }

    /// For each of these rows, its self time in each step of the last minute, as shares of one CPU.
    #[must_use]
    pub fn histories(&self, by: By, scope: Scope, rows: &[usize]) -> Vec<Vec<f64>> {
        let mut table = RowTable::default();
        let of_place = table.places(self.aggregate.places(), by, &NoDistributions);
        let (no_python, no_frames) = table.without_python();
        let mut wanted = vec![usize::MAX; table.names.len()];
        for (at, &row) in rows.iter().enumerate() {
            wanted[row] = at;
        }
        let mut histories = vec![vec![0.0; self.steps.len()]; rows.len()];
        for (at, step) in self.steps.iter().enumerate() {
            for (key, sum) in step.counts.iter().filter(|(key, _)| self.is_in(scope, key)) {
                let stack = &self.aggregate.stacks()[key.stack as usize];
                let row = match Charged::of(&self.aggregate, stack).python {
                    Some(place) => of_place[place.0 as usize],
                    None if stack.is_empty() => no_frames,
                    None => no_python,
                };
                if let Some(history) = histories.get_mut(wanted[row]) {
                    history[at] += sum.cpu_us as f64 / 1e6 / step.seconds.max(1e-9);
                }
            }
        }
        histories
    }

    /// CPUs in use in each step of the last minute, and those of them whose thread held the GIL.
    #[must_use]
    pub fn history(&self, scope: Scope) -> Vec<(f64, f64)> {
        let of_step = |step: &Step| {
            let is_shown = |key: &Key| !self.kinds[key.stack as usize].waiting && self.is_in(scope, key);
            let counts = step.counts.iter().filter(|(key, _)| is_shown(key));
            let (all, held) = counts.fold((0, 0), |(all, held), (key, sum)| {
                (all + sum.cpu_us, held + if key.gil == Some(true) { sum.cpu_us } else { 0 })
            });
            let cpus = |cpu_us: u64| cpu_us as f64 / 1e6 / step.seconds.max(1e-9);
            (cpus(all), cpus(held))
        };
        self.steps.iter().map(of_step).collect()
    }

    /// Threads, or processes, in the order in which they were first met.
    #[must_use]
    pub fn groups(&self, by: By, length: Duration) -> Vec<GroupRow> {
        let profile = self.profile();
        let threads = (0..).map(ThreadId).take(profile.threads.len());
        let row = |scope, name, process| GroupRow {
            scope,
            name,
            process,
            sum: Sum::default(),
            gil: None,
            whole: Sum::default(),
            gil_whole: None,
        };
        let mut rows: Vec<GroupRow> = if by == By::Process {
            let processes = profile.processes.iter().zip(0..);
            processes.map(|(process, at)| row(Scope::Process(at), process_title(process), String::new())).collect()
        } else {
            let name = |id| (thread_name(profile, id), process_title(profile.process_of(id)));
            threads
                .map(|id| {
                    let (thread, process) = name(id);
                    row(Scope::Thread(id), thread, process)
                })
                .collect()
        };
        let at = |thread: u32| match by {
            By::Process => profile.thread(ThreadId(thread)).process as usize,
            _ => thread as usize,
        };
        let held = |key: Key, sum: Sum| key.gil.map(|held| if held { sum } else { Sum::default() });
        let add = |known: &mut Option<Sum>, more: Option<Sum>| {
            if let Some(more) = more {
                *known.get_or_insert_default() += more;
            }
        };
        let is_waiting = |key: Key| self.kinds[key.stack as usize].waiting;
        self.counts(Span::Window(length), Scope::All, |key, sum| {
            if is_waiting(key) {
                return;
            }
            let row = &mut rows[at(key.thread)];
            row.sum += sum;
            add(&mut row.gil, held(key, sum));
        });
        self.counts(Span::Whole, Scope::All, |key, sum| {
            if is_waiting(key) {
                return;
            }
            let row = &mut rows[at(key.thread)];
            row.whole += sum;
            add(&mut row.gil_whole, held(key, sum));
        });
        rows
    }

    /// What a scope is called.
    #[must_use]
    pub fn scope_name(&self, scope: Scope) -> String {
        let profile = self.profile();
        match scope {
            Scope::All => "all threads".to_owned(),
            Scope::Process(process) => process_title(&profile.processes[process as usize]),
            Scope::Thread(id) if profile.processes.len() > 1 => {
                format!("{}, {}", process_title(profile.process_of(id)), thread_name(profile, id))
            }
            Scope::Thread(id) => thread_name(profile, id),
            Scope::Task { process, task } if profile.processes.len() > 1 => {
                format!("{}, task {}", process_title(&profile.processes[process as usize]), self.tasks.name(task))
            }
            Scope::Task { task, .. } => format!("task {}", self.tasks.name(task)),
            Scope::NoTask => NO_TASK.to_owned(),
        }
    }
}
