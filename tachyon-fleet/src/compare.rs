//! Two versions of a service, compared with the statistics of `tachyon-bpf diff` (`tachyon::analysis::diff`): replicates are blocks of time
//! of each host, and the tests are about the share of the service's CPU time and the CPU time per process-hour.
//!
//! Load follows the hour of the day: if both sides have at least a whole day, whole days are compared. The time in which some hosts still
//! run the old version and others the new one is a rollout, which then belongs to neither side.

use crate::args::Period;
use crate::columns::{Columns, id};
use crate::facts::{Map, Names, bounds};
use crate::hash::StackId;
use crate::lake::{Lake, LakeFile};
use crate::tables::Table;
use anyhow::ensure;
use arrow_array::{Array as _, Int32Array, RecordBatch};
use foldhash::fast::RandomState;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use tachyon::analysis::diff::{Difference, Measured, Options, diff};
use tachyon::analysis::{Aggregate, Entry, NoDistributions, Place, Recording, ThreadInfo};
use tachyon::sinks::FrameKind;

const DAY_MS: i64 = 86_400_000;
/// Most replicates that the statistics distinguish, for all hosts together.
const REPLICATES: usize = 4096;
/// And for one host.
const BLOCKS: usize = 64;
/// Length of a slice if nothing shows it.
const SLICE_MS: i64 = 60_000;

/// When a version was seen, and how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Version.
    pub version: Arc<str>,
    /// First slice.
    pub first_ms: i64,
    /// Last slice.
    pub last_ms: i64,
    /// CPU time, nanoseconds.
    pub ns: i64,
}

/// Versions of each service, the most recently introduced one first. A service without versions has none.
///
/// # Errors
/// When tables cannot be read.
pub fn spans(lake: &Lake, period: Period) -> anyhow::Result<BTreeMap<Arc<str>, Vec<Span>>> {
    #[derive(Default)]
    struct Sum {
        known: Vec<(Arc<str>, Option<Span>)>,
    }
    let files = lake.files(Table::Samples, period)?;
    lake.expect_some(&files)?;
    let (since, until) = bounds(period);
    let add = |sum: &mut Sum, _: &LakeFile, batch: &RecordBatch| {
        let columns = Columns { batch };
        let (times, on_cpu) = (columns.times("slice_start")?, columns.numbers("on_cpu_ns")?);
        let (services, versions) = (columns.texts("service")?, columns.texts("version")?);
        for row in (0..times.len()).filter(|row| (since..until).contains(&times[*row])) {
            let (service, time) = (services.value(row), times[row]);
            let version = versions.is_valid(row).then(|| versions.value(row));
            let is = |(of, span): &(Arc<str>, Option<Span>)| {
                &**of == service && span.as_ref().map(|span| &*span.version) == version
            };
            let found = sum.known.iter().rposition(is).unwrap_or_else(|| {
                let span =
                    version.map(|version| Span { version: version.into(), first_ms: time, last_ms: time, ns: 0 });
                sum.known.push((service.into(), span));
                sum.known.len() - 1
            });
            if let Some(span) = &mut sum.known[found].1 {
                span.first_ms = span.first_ms.min(time);
                span.last_ms = span.last_ms.max(time);
                span.ns += on_cpu.value(row);
            }
        }
        Ok(())
    };
    let mut all: BTreeMap<Arc<str>, Vec<Span>> = BTreeMap::new();
    for sum in lake.sums(&files, &["slice_start", "service", "version", "on_cpu_ns"], add)? {
        for (service, span) in sum.known {
            let of_service = all.entry(service).or_default();
            let Some(span) = span else { continue };
            match of_service.iter_mut().find(|known| known.version == span.version) {
                Some(known) => {
                    known.first_ms = known.first_ms.min(span.first_ms);
                    known.last_ms = known.last_ms.max(span.last_ms);
                    known.ns += span.ns;
                }
                None => of_service.push(span),
            }
        }
    }
    for of_service in all.values_mut() {
        of_service.retain(|span| span.ns > 0);
        of_service.sort_by(|a, b| (b.first_ms, &b.version).cmp(&(a.first_ms, &a.version)));
    }
    Ok(all)
}

/// One side: a version, in a period of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// `None`: whatever runs at that time.
    pub version: Option<Arc<str>>,
    /// From this slice on.
    pub since_ms: i64,
    /// Before that.
    pub until_ms: i64,
}

/// The sides of an old and a new version: whole days before and after the rollout if there are any, otherwise everything.
#[must_use]
pub fn sides(old: &Span, new: &Span) -> [Side; 2] {
    let side = |of: &Span, since_ms, until_ms| Side { version: Some(Arc::clone(&of.version)), since_ms, until_ms };
    let ended = old.last_ms.saturating_add(SLICE_MS);
    let before = (new.first_ms - old.first_ms) / DAY_MS;
    let after = (new.last_ms.saturating_add(SLICE_MS) - ended.max(new.first_ms)) / DAY_MS;
    if before >= 1 && after >= 1 {
        let begins = ended.max(new.first_ms);
        return [side(old, new.first_ms - before * DAY_MS, new.first_ms), side(new, begins, begins + after * DAY_MS)];
    }
    [side(old, i64::MIN, i64::MAX), side(new, i64::MIN, i64::MAX)]
}

/// A comparison.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Service.
    pub service: Arc<str>,
    /// What was compared.
    pub sides: [Side; 2],
    /// Hosts on each side.
    pub hosts: [usize; 2],
    /// Process-hours on each side: slices in which a process had a sample.
    pub process_hours: [f64; 2],
    /// Functions.
    pub difference: Difference,
    /// CPU seconds per process-second, for the whole service.
    pub whole: Measured,
}

/// One side's counts.
#[derive(Default)]
struct Counts {
    hosts: Vec<Arc<str>>,
    /// Samples on a CPU, by host, block and stack.
    cells: Map<(u32, i64, StackId), f64>,
    /// By host: CPU time and samples.
    weight: Map<u32, (f64, f64)>,
    /// Slices in which a process had a sample: host, pid, slice.
    alive: HashSet<(u32, i32, i64), RandomState>,
}

impl Counts {
    fn host(&mut self, host: &str) -> u32 {
        let found = self.hosts.iter().rposition(|known| &**known == host).unwrap_or_else(|| {
            self.hosts.push(host.into());
            self.hosts.len() - 1
        });
        u32::try_from(found).expect("hosts are counted in 32 bits")
    }

    fn merge(&mut self, other: Self) {
        let numbers: Vec<u32> = other.hosts.iter().map(|host| self.host(host)).collect();
        let own = |host: u32| numbers[host as usize];
        for ((host, block, stack), samples) in other.cells {
            *self.cells.entry((own(host), block, stack)).or_default() += samples;
        }
        for (host, (ns, samples)) in other.weight {
            let sum = self.weight.entry(own(host)).or_default();
            *sum = (sum.0 + ns, sum.1 + samples);
        }
        self.alive.extend(other.alive.into_iter().map(|(host, pid, slice)| (own(host), pid, slice)));
    }
}

/// Compares two sides of a service.
///
/// # Errors
/// When tables cannot be read, or a side is empty.
pub fn compare(
    lake: &Lake,
    service: &str,
    sides: [Side; 2],
    period: Period,
    options: Options,
) -> anyhow::Result<Comparison> {
    let of_service = |file: &LakeFile| file.service.as_deref() == Some(service);
    let files: Vec<LakeFile> = lake.files(Table::Samples, period)?.into_iter().filter(of_service).collect();
    let (since, until) = bounds(period);
    let block_ms = block_ms(lake, &files, &sides)?;
    let add = |sums: &mut [Counts; 2], _: &LakeFile, batch: &RecordBatch| {
        let columns = Columns { batch };
        let (times, on_cpu) = (columns.times("slice_start")?, columns.numbers("on_cpu_ns")?);
        let (waiting, samples) = (columns.numbers("waiting_ns")?, columns.numbers("samples")?);
        let (services, versions, hosts) =
            (columns.texts("service")?, columns.texts("version")?, columns.texts("host")?);
        let (ids, pids): (_, &Int32Array) = (columns.ids("stack_id")?, columns.get("pid")?);
        for row in
            (0..times.len()).filter(|row| (since..until).contains(&times[*row]) && services.value(*row) == service)
        {
            let (time, version) = (times[row], versions.is_valid(row).then(|| versions.value(row)));
            let is = |side: &Side| {
                let in_time = (side.since_ms..side.until_ms).contains(&time);
                in_time && side.version.as_deref().is_none_or(|of| Some(of) == version)
            };
            let Some(number) = sides.iter().position(is) else { continue };
            let sum = &mut sums[number];
            let host = sum.host(hosts.value(row));
            let pid = if pids.is_valid(row) { pids.value(row) } else { 0 };
            sum.alive.insert((host, pid, time));
            let ns = on_cpu.value(row) as f64;
            if ns > 0.0 {
                // Each sample of a row stands for the same time.
                let count = samples.value(row) as f64 * ns / (ns + waiting.value(row) as f64);
                *sum.cells.entry((host, time.div_euclid(block_ms), id(ids, row)?)).or_default() += count;
                let weight = sum.weight.entry(host).or_default();
                *weight = (weight.0 + ns, weight.1 + count);
            }
        }
        Ok(())
    };
    let columns =
        ["slice_start", "service", "version", "host", "pid", "stack_id", "on_cpu_ns", "waiting_ns", "samples"];
    let mut counts: [Counts; 2] = Default::default();
    for sums in lake.sums(&files, &columns, add)? {
        let [before, after] = sums;
        counts[0].merge(before);
        counts[1].merge(after);
    }
    ensure!(counts.iter().all(|side| !side.cells.is_empty()), "{service} has no CPU time on one of the sides");
    let wanted = counts.iter().flat_map(|side| side.cells.keys().map(|(.., stack)| *stack)).collect();
    let names = Names::read(lake, period, &wanted, &of_service)?;
    let slice_ms = slice_ms(&counts);
    let built = counts.each_ref().map(|side| aggregate(side, &names, block_ms, slice_ms, false));
    let whole = counts.each_ref().map(|side| aggregate(side, &names, block_ms, slice_ms, true));
    let difference = diff(&built[0], &built[1], options, &NoDistributions);
    let whole = diff(&whole[0], &whole[1], Options { per_unit: None, ..options }, &NoDistributions);
    let whole = whole.changes.first().map_or_else(Measured::default, |change| change.other);
    Ok(Comparison {
        service: service.into(),
        sides,
        hosts: counts.each_ref().map(|side| side.hosts.len()),
        process_hours: counts.each_ref().map(|side| side.alive.len() as f64 * slice_ms as f64 / 3.6e6),
        difference,
        whole,
    })
}

/// Length of blocks, such that the statistics can distinguish all of them.
fn block_ms(lake: &Lake, files: &[LakeFile], sides: &[Side; 2]) -> anyhow::Result<i64> {
    // The first and last file give a good enough idea of hosts and times.
    let mut hosts: HashSet<String> = HashSet::new();
    let (mut first, mut last) = (i64::MAX, i64::MIN);
    let some: Vec<&LakeFile> = files.first().into_iter().chain(files.last()).collect();
    for file in some {
        for batch in lake.batches(file, &["slice_start", "host"])? {
            let columns = Columns { batch: &batch };
            let (times, names) = (columns.times("slice_start")?, columns.texts("host")?);
            for (row, &time) in times.iter().enumerate() {
                (first, last) = (first.min(time), last.max(time));
                if !hosts.contains(names.value(row)) {
                    hosts.insert(names.value(row).to_owned());
                }
            }
        }
    }
    let length = |side: &Side| (side.until_ms.min(last + SLICE_MS) - side.since_ms.max(first)).max(SLICE_MS);
    let longest = sides.iter().map(length).max().unwrap_or(SLICE_MS);
    let blocks = (REPLICATES / hosts.len().max(1)).clamp(4, BLOCKS) as i64;
    Ok((longest / blocks).max(SLICE_MS))
}

/// The shortest time between slices of one process.
fn slice_ms(counts: &[Counts; 2]) -> i64 {
    let mut last: HashMap<(u32, i32), Vec<i64>> = HashMap::new();
    for &(host, pid, slice) in counts.iter().flat_map(|side| side.alive.iter()).take(100_000) {
        last.entry((host, pid)).or_default().push(slice);
    }
    let shortest = last.into_values().filter_map(|mut slices| {
        slices.sort_unstable();
        slices.windows(2).map(|pair| pair[1] - pair[0]).filter(|gap| *gap > 0).min()
    });
    shortest.min().unwrap_or(SLICE_MS)
}

/// One side in the form that the statistics need: each host is a recording. `whole`: everything is one function.
fn aggregate(counts: &Counts, names: &Names, block_ms: i64, slice_ms: i64, whole: bool) -> Aggregate {
    let mut aggregate = Aggregate::default();
    let mut first: HashMap<u32, i64> = HashMap::new();
    for (host, block, _) in counts.cells.keys() {
        let first = first.entry(*host).or_insert(*block);
        *first = (*first).min(*block);
    }
    let mut alive: HashMap<u32, i64> = HashMap::new();
    for (host, ..) in &counts.alive {
        *alive.entry(*host).or_default() += 1;
    }
    let us = |ms: i64| u64::try_from(ms).unwrap_or(0).saturating_mul(1000);
    let mut recordings = Vec::new();
    for (number, host) in (0..).zip(&counts.hosts) {
        let (ns, samples) = counts.weight.get(&number).copied().unwrap_or_default();
        let seconds = alive.get(&number).copied().unwrap_or(0) as f64 * slice_ms as f64 / 1e3;
        let recording = aggregate.push_recording(Recording {
            host: host.to_string(),
            samples: rounded(samples),
            seconds,
            interval_us: rounded(ns / samples.max(1.0) / 1e3).max(1),
            lost: None,
            block_us: us(block_ms),
        });
        let thread = aggregate.intern_thread(ThreadInfo { process: host.to_string(), ..ThreadInfo::default() });
        recordings.push((recording, thread));
    }
    let mut stacks: Map<StackId, u32> = Map::default();
    let mut cells: Vec<_> = counts.cells.iter().collect();
    cells.sort_by_key(|((host, block, stack), _)| (*host, *block, *stack));
    for ((host, block, stack), samples) in cells {
        let known = stacks.get(stack).copied();
        let number = known.unwrap_or_else(|| {
            let places = if whole { vec![all(&mut aggregate)] } else { places(&mut aggregate, names, *stack) };
            let number = aggregate.intern_stack(&places);
            stacks.insert(*stack, number);
            number
        });
        let (recording, thread) = recordings[*host as usize];
        let block = u16::try_from(block - first[host]).unwrap_or(u16::MAX);
        let entry = Entry { recording, thread, stack: number, block, gil: None, on_cpu: true };
        aggregate.push_entry(entry, rounded(*samples));
    }
    aggregate
}

fn all(aggregate: &mut Aggregate) -> tachyon::analysis::PlaceId {
    let (function, file) = (aggregate.text("all"), aggregate.text(""));
    aggregate.intern_place(Place { kind: FrameKind::Python, function, file, line: None })
}

fn places(aggregate: &mut Aggregate, names: &Names, stack: StackId) -> Vec<tachyon::analysis::PlaceId> {
    let frames = names.stacks.get(&stack).into_iter().flat_map(|frames| frames.iter());
    frames
        .filter_map(|frame| names.frames.get(frame))
        .map(|frame| {
            let kind = match &*frame.kind {
                "python" => FrameKind::Python,
                "native" => FrameKind::Native,
                "kernel" => FrameKind::Kernel,
                _ => FrameKind::Special,
            };
            let (function, file) = (aggregate.text(&frame.function), aggregate.text(&frame.file));
            let line = frame.line.and_then(|line| u32::try_from(line).ok());
            aggregate.intern_place(Place { kind, function, file, line })
        })
        .collect()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float that is too large becomes the largest number"
)]
fn rounded(number: f64) -> u64 {
    number.round().max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_days_are_compared_where_there_are_some() {
        let span = |version: &str, first_ms, last_ms| Span { version: version.into(), first_ms, last_ms, ns: 1 };
        let hour = 3_600_000;
        // Three days and a half of the old one, a rollout of two hours, two days and a bit of the new one.
        let [old, new] = sides(&span("1", 0, 86 * hour), &span("2", 84 * hour, 140 * hour));
        assert_eq!((old.since_ms, old.until_ms), (12 * hour, 84 * hour));
        assert_eq!((new.since_ms, new.until_ms), (86 * hour + SLICE_MS, 134 * hour + SLICE_MS));
        let [old, new] = sides(&span("1", 0, 5 * hour), &span("2", 5 * hour, 9 * hour));
        assert_eq!((old.since_ms, new.until_ms), (i64::MIN, i64::MAX));
    }
}
