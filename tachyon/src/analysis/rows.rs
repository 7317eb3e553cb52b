//! The rows of a report: self and total of functions, lines, modules, processes, threads or asyncio tasks.
//!
//! *Self* of Python code includes native code that it called; *total* also includes Python functions that it called. A
//! stack in which a function occurs several times counts once in its total. Native code has rows of its own if asked
//! for; their self is what ran in them, and is also part of some Python row's.

use super::aggregate::{Aggregate, Entry, Place, PlaceId};
use super::filter::Filter;
use super::groups::{group_rows, task_rows};
use super::module::{Distributions, module};
use super::ratio;
use crate::profile::{Library, TASK_WAIT, library, package_path};
use crate::sinks::label::Kind;
use foldhash::fast::RandomState;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What has a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// A function of a file.
    #[default]
    Function,
    /// A line of a function.
    Line,
    /// A distribution, the standard library, a native object, or a file of the program.
    Module,
    /// A process.
    Process,
    /// A thread.
    Thread,
    /// An asyncio task, by its name.
    Task,
}

impl By {
    /// Its word in options and files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Function => "function",
            Self::Line => "line",
            Self::Module => "module",
            Self::Process => "process",
            Self::Thread => "thread",
            Self::Task => "task",
        }
    }
}

/// What a row stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowKind {
    /// Python code.
    Python,
    /// Native or kernel code.
    Native,
    /// No code: the garbage collector, a cut stack, samples without Python.
    Special,
    /// A process, thread or task.
    Group,
}

impl RowKind {
    /// Its word in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Native => "native",
            Self::Special => "special",
            Self::Group => "group",
        }
    }
}

/// What identifies a row.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowName {
    /// Name for people, unique among the rows of its kind that have no file.
    pub name: String,
    /// Qualified name, of functions and lines.
    pub function: Option<Arc<str>>,
    /// Source file or object, of functions and lines.
    pub file: Option<Arc<str>>,
    /// Line, of lines.
    pub line: Option<u32>,
    /// What it stands for.
    pub kind: RowKind,
}

impl RowName {
    /// It is the mark of a wait, of an event or of a task.
    pub(super) fn is_mark(&self) -> bool {
        let file = self.file.as_deref().unwrap_or_default();
        if self.function.as_deref().is_some_and(|function| crate::profile::task_name(file, function).is_some()) {
            return true;
        }
        let is_mark =
            |name: &str| crate::profile::waited_for(name).is_some() || crate::profile::event_of_root(name).is_some();
        self.kind == RowKind::Special && is_mark(&self.name)
    }
}

/// Samples, and the CPU time that they stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sum {
    /// Samples.
    pub samples: u64,
    /// Microseconds.
    pub cpu_us: u64,
}

impl std::ops::AddAssign for Sum {
    fn add_assign(&mut self, other: Self) {
        self.samples += other.samples;
        self.cpu_us = self.cpu_us.saturating_add(other.cpu_us);
    }
}

/// A row.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What identifies it.
    pub name: RowName,
    /// In itself.
    pub own: Sum,
    /// In itself and what it called.
    pub total: Sum,
    /// For functions, the line with most of its self.
    pub hottest_line: Option<u32>,
    /// What native code its self went into, most first: symbol, object, samples.
    pub native: Vec<(Arc<str>, Arc<str>, u64)>,
}

/// A report.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// What has a row.
    pub by: By,
    /// Samples that the filter lets through.
    pub samples: u64,
    /// All samples.
    pub all_samples: u64,
    /// Length of all recordings together.
    pub seconds: f64,
    /// Time that the samples stand for, seconds: CPU time, unless waiting threads were sampled too.
    pub sampled_seconds: f64,
    /// Share of samples that held the GIL, among those for which that is known.
    pub gil_share: Option<f64>,
    /// Share of samples in the garbage collector.
    pub gc_share: f64,
    /// Share of samples that ran on a CPU.
    pub cpu_share: f64,
    /// Share of samples that ran native code.
    pub native_share: f64,
    /// Samples of waiting threads, by what they waited for.
    pub waiting: BTreeMap<String, u64>,
    /// Samples of events other than the clock, by the event's name and how many of them a sample stands for.
    pub events: BTreeMap<(String, u64), u64>,
    /// Samples lost; `None`: not known for all recordings.
    pub lost: Option<u64>,
    /// Distinct processes, and distinct threads.
    pub processes: usize,
    /// Likewise.
    pub threads: usize,
    /// Rows: most self first, then most total, then by name.
    pub rows: Vec<Row>,
}

/// Stands for stacks without any Python frame: their threads run no Python.
const NO_PYTHON: &str = "<no Python frame>";
/// A stack without frames.
const NO_FRAMES: &str = "<no frames>";

impl Report {
    /// Share of samples of waiting threads.
    #[must_use]
    pub fn waiting_share(&self) -> f64 {
        ratio(self.waiting.values().sum(), self.samples)
    }

    /// Whether no sample stands for time.
    #[must_use]
    pub fn is_of_events(&self) -> bool {
        self.samples > 0 && self.sampled_seconds == 0.0
    }

    /// Whether samples are of tasks that waited.
    #[must_use]
    pub fn is_of_tasks(&self) -> bool {
        self.samples > 0 && self.events.get(&(TASK_WAIT.to_owned(), 1)) == Some(&self.samples)
    }

    /// What threads waited for and the share of all samples that did, most first.
    #[must_use]
    pub fn waits(&self) -> Vec<(&str, f64)> {
        let mut waits: Vec<_> = self.waiting.iter().collect();
        waits.sort_by_key(|&(_, &samples)| std::cmp::Reverse(samples));
        waits.into_iter().map(|(cause, &samples)| (cause.as_str(), ratio(samples, self.samples))).collect()
    }
}

/// Rows by name, and what row a place belongs to.
#[derive(Debug, Default)]
pub(super) struct RowTable {
    pub names: Vec<RowName>,
    ids: HashMap<RowName, usize, RandomState>,
}

impl RowTable {
    pub fn intern(&mut self, name: RowName) -> usize {
        if let Some(&id) = self.ids.get(&name) {
            return id;
        }
        self.names.push(name.clone());
        self.ids.insert(name, self.names.len() - 1);
        self.names.len() - 1
    }

    /// The row of each place.
    pub fn places(&mut self, places: &[Place], by: By, distributions: &dyn Distributions) -> Vec<usize> {
        places.iter().map(|place| self.intern(row_name(place, by, distributions))).collect()
    }

    /// The row of stacks without Python, and that of stacks without frames.
    pub fn without_python(&mut self) -> (usize, usize) {
        let mut special = |name: &str| {
            let function = Some(Arc::from(name));
            self.intern(RowName { name: name.to_owned(), function, file: None, line: None, kind: RowKind::Special })
        };
        (special(NO_PYTHON), special(NO_FRAMES))
    }
}

fn row_name(place: &Place, by: By, distributions: &dyn Distributions) -> RowName {
    let kind = match place.kind {
        Kind::Python => RowKind::Python,
        Kind::Native | Kind::Kernel => RowKind::Native,
        Kind::Special => RowKind::Special,
    };
    if by == By::Module {
        let name = module(place, distributions);
        return RowName { name, function: None, file: None, line: None, kind };
    }
    let line = place.line.filter(|_| by == By::Line && kind == RowKind::Python);
    let name = match line {
        Some(line) => format!("{} ({}:{line})", place.function, package_path(&place.file)),
        None => place.function.to_string(),
    };
    let file = (!place.file.is_empty()).then(|| Arc::clone(&place.file));
    RowName { name, function: Some(Arc::clone(&place.function)), file, line, kind }
}

/// A stack as its rows see it.
pub(super) struct Charged {
    /// The innermost frame of Python, which the sample is charged to.
    pub python: Option<PlaceId>,
    /// The leaf, if it is native code.
    pub native: Option<PlaceId>,
}

/// A stack without the mark of a wait, which belongs to the line that waits.
pub(super) fn without_wait<'a>(aggregate: &Aggregate, stack: &'a [PlaceId]) -> &'a [PlaceId] {
    match stack {
        [leaf, rest @ ..] if !rest.is_empty() && aggregate.place(*leaf).waits_for().is_some() => rest,
        _ => stack,
    }
}

/// A waiting task's stack without asyncio's own frames above the line that awaits: that line is what people want to see.
fn without_asyncio<'a>(aggregate: &Aggregate, stack: &'a [PlaceId]) -> &'a [PlaceId] {
    if aggregate.event_of(stack).is_none_or(|(event, _)| event != TASK_WAIT) {
        return stack;
    }
    let is_asyncio =
        |file: &str| matches!(library(file), Some(Library::Standard(inside)) if inside.starts_with("asyncio/"));
    let line = stack.iter().position(|&place| !is_asyncio(&aggregate.place(place).file));
    // A task that runs one of asyncio's own coroutines has no other.
    match line {
        Some(at) if aggregate.place(stack[at]).task().is_none() => &stack[at..],
        _ => stack,
    }
}

impl Charged {
    pub fn of(aggregate: &Aggregate, stack: &[PlaceId]) -> Self {
        let stack = without_asyncio(aggregate, without_wait(aggregate, stack));
        let python = stack.iter().copied().find(|&id| aggregate.place(id).is_python());
        let native = stack.first().copied().filter(|&id| !aggregate.place(id).is_python());
        Self { python, native }
    }
}

/// Makes a report.
#[must_use]
pub fn report(
    aggregate: &Aggregate,
    by: By,
    filter: &Filter,
    native: bool,
    distributions: &dyn Distributions,
) -> Report {
    let kept = filter.stacks(aggregate);
    let kept_entries = || {
        let kept = aggregate.entries().iter().filter(|(entry, _)| kept[entry.stack as usize]);
        kept.map(|(entry, count)| (entry, sum_of(aggregate, entry, *count)))
    };
    let mut sums = Totals::default();
    let mut by_stack = vec![Sum::default(); aggregate.stacks().len()];
    let mut by_thread = vec![Sum::default(); aggregate.threads().len()];
    for (entry, sum) in kept_entries() {
        by_stack[entry.stack as usize] += sum;
        by_thread[entry.thread as usize] += sum;
        sums.add(sum, entry.gil, entry.on_cpu);
    }
    let mut waiting: BTreeMap<String, u64> = BTreeMap::new();
    let mut events: BTreeMap<(String, u64), u64> = BTreeMap::new();
    for (stack, sum) in aggregate.stacks().iter().zip(&by_stack).filter(|(_, sum)| sum.samples > 0) {
        let waits_for = stack.first().and_then(|&leaf| aggregate.place(leaf).waits_for());
        if let Some(cause) = waits_for {
            *waiting.entry(cause.to_owned()).or_default() += sum.samples;
        }
        if let Some((name, period)) = aggregate.event_of(stack) {
            *events.entry((name.to_owned(), period)).or_default() += sum.samples;
        }
        let gc = stack.iter().any(|&place| aggregate.place(place).is_gc());
        sums.gc += if gc { sum.samples } else { 0 };
        let native = waits_for.is_none() && Charged::of(aggregate, stack).native.is_some();
        sums.native += if native { sum.samples } else { 0 };
    }
    let mut rows = match by {
        By::Process | By::Thread => group_rows(aggregate, by, &by_thread),
        By::Task => task_rows(aggregate, kept_entries()),
        By::Function | By::Line | By::Module => {
            code_rows(aggregate, by, native || by == By::Module, &by_stack, distributions)
        }
    };
    // What was waited for, and which events were sampled, is reported separately.
    rows.retain(|row| row.total.samples > 0 && !(row.name.is_mark() && row.own.samples == 0));
    rows.sort_by(|a, b| {
        let order = |row: &Row| std::cmp::Reverse((row.own.samples, row.total.samples));
        order(a).cmp(&order(b)).then_with(|| a.name.cmp(&b.name))
    });
    let threads = aggregate.threads().iter().zip(&by_thread).filter(|(_, sum)| sum.samples > 0);
    let mut processes: Vec<_> = threads.clone().map(|(thread, _)| &thread.process).collect();
    let threads = threads.count();
    processes.sort_unstable();
    processes.dedup();
    Report {
        by,
        samples: sums.all.samples,
        all_samples: aggregate.samples(),
        seconds: aggregate.seconds(),
        sampled_seconds: sums.all.cpu_us as f64 / 1e6,
        gil_share: (sums.gil_known > 0).then(|| ratio(sums.gil, sums.gil_known)),
        gc_share: ratio(sums.gc, sums.all.samples),
        cpu_share: ratio(sums.on_cpu, sums.all.samples),
        native_share: ratio(sums.native, sums.all.samples),
        waiting,
        events,
        lost: aggregate.recordings().iter().map(|recording| recording.lost).sum(),
        processes: processes.len(),
        threads,
        rows,
    }
}

/// What samples stand for.
fn sum_of(aggregate: &Aggregate, entry: &Entry, samples: u64) -> Sum {
    let interval_us = aggregate.recordings()[entry.recording as usize].interval_us;
    // Samples of events other than the clock stand for no time.
    let is_time = aggregate.is_time(&aggregate.stacks()[entry.stack as usize]);
    Sum { samples, cpu_us: if is_time { samples.saturating_mul(interval_us) } else { 0 } }
}

#[derive(Default)]
struct Totals {
    all: Sum,
    gil: u64,
    gil_known: u64,
    on_cpu: u64,
    gc: u64,
    native: u64,
}

impl Totals {
    fn add(&mut self, sum: Sum, gil: Option<bool>, on_cpu: bool) {
        self.all += sum;
        self.gil_known += if gil.is_some() { sum.samples } else { 0 };
        self.gil += if gil == Some(true) { sum.samples } else { 0 };
        self.on_cpu += if on_cpu { sum.samples } else { 0 };
    }
}

/// Rows of functions, lines or modules: one for each that the aggregate has, in the same order for all sums.
pub(super) fn code_rows(
    aggregate: &Aggregate,
    by: By,
    native: bool,
    by_stack: &[Sum],
    distributions: &dyn Distributions,
) -> Vec<Row> {
    let mut table = RowTable::default();
    let of_place = table.places(aggregate.places(), by, distributions);
    let (no_python, no_frames) = table.without_python();
    let mut own = vec![Sum::default(); table.names.len()];
    let mut total = own.clone();
    let mut seen = vec![usize::MAX; own.len()];
    let mut lines: HashMap<(usize, u32), u64, RandomState> = HashMap::default();
    let mut detail: HashMap<(usize, PlaceId), u64, RandomState> = HashMap::default();
    for (number, (stack, &sum)) in aggregate.stacks().iter().zip(by_stack).enumerate() {
        if sum.samples == 0 {
            continue;
        }
        let charged = Charged::of(aggregate, stack);
        let row = match charged.python {
            Some(place) => of_place[place.0 as usize],
            None => {
                let row = if stack.is_empty() { no_frames } else { no_python };
                total[row] += sum;
                row
            }
        };
        own[row] += sum;
        if let Some(line) = charged.python.and_then(|place| aggregate.place(place).line) {
            *lines.entry((row, line)).or_default() += sum.samples;
        }
        if let Some(leaf) = charged.native {
            *detail.entry((row, leaf)).or_default() += sum.samples;
            if native {
                own[of_place[leaf.0 as usize]] += sum;
            }
        }
        for &place in &**stack {
            let row = of_place[place.0 as usize];
            if seen[row] != number && (native || aggregate.place(place).is_python()) {
                seen[row] = number;
                total[row] += sum;
            }
        }
    }
    let mut rows: Vec<Row> = table
        .names
        .into_iter()
        .zip(own.iter().zip(&total))
        .map(|(name, (&own, &total))| Row { name, own, total, hottest_line: None, native: Vec::new() })
        .collect();
    if by == By::Function {
        let mut most = vec![0; rows.len()];
        let mut lines: Vec<_> = lines.into_iter().collect();
        lines.sort_unstable();
        for ((row, line), samples) in lines {
            if samples > most[row] {
                (most[row], rows[row].hottest_line) = (samples, Some(line));
            }
        }
    }
    for ((row, place), samples) in detail {
        let Place { function, file, .. } = aggregate.place(place);
        rows[row].native.push((Arc::clone(function), Arc::clone(file), samples));
    }
    for row in &mut rows {
        row.native.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.cmp(b)));
    }
    rows
}
