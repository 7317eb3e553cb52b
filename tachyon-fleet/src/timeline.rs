//! The data of the overview: CPU time of services and of their top functions over time, changes, and losses.

use crate::args::Period;
use crate::columns::{Columns, id};
use crate::compare::{Comparison, Span, compare, sides, spans};
use crate::facts::{Facts, Map, Names, Wanted, bounds};
use crate::hash::StackId;
use crate::lake::{Lake, LakeFile};
use crate::questions::{self, LossRow};
use crate::tables::Table;
use arrow_array::RecordBatch;
use foldhash::fast::RandomState;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use tachyon::analysis::diff::Options;

/// Most parts that the time line has.
const PARTS: i64 = 168;
/// Lengths of a part, in milliseconds: a minute to a day.
const LENGTHS: [i64; 9] =
    [60_000, 300_000, 600_000, 1_800_000, 3_600_000, 7_200_000, 14_400_000, 43_200_000, 86_400_000];
/// Functions of a service.
const FUNCTIONS: usize = 25;
/// Most services that are shown; the rest is combined.
const SERVICES: usize = 60;
/// Most hosts with losses that are shown.
const HOSTS: usize = 100;
/// Changes of a service.
const CHANGES: usize = 30;

/// Everything that the page shows.
#[derive(Debug, Serialize)]
pub struct Overview {
    /// Where it is from.
    pub root: String,
    /// First part, milliseconds since 1970.
    pub start_ms: i64,
    /// Length of a part.
    pub part_ms: i64,
    /// How many parts.
    pub parts: usize,
    /// Hosts with samples.
    pub hosts: usize,
    /// Samples stored, and lost.
    pub stored: i64,
    /// Lost ones.
    pub lost: i64,
    /// Most CPU time first.
    pub services: Vec<ServiceLine>,
    /// Services beyond those.
    pub more_services: usize,
    /// With the newest versions.
    pub changes: Vec<ServiceChange>,
    /// Hosts that lose most first.
    pub losses: Vec<LossRow>,
}

/// A service over time.
#[derive(Debug, Serialize)]
pub struct ServiceLine {
    /// Name.
    pub name: Arc<str>,
    /// CPU time, seconds.
    pub seconds: f64,
    /// CPU seconds by part.
    pub line: Vec<f64>,
    /// Version and its first slice.
    pub versions: Vec<(Arc<str>, i64)>,
    /// Top functions.
    pub functions: Vec<FunctionLine>,
}

/// A function over time.
#[derive(Debug, Serialize)]
pub struct FunctionLine {
    /// Function.
    pub name: Arc<str>,
    /// File or object.
    pub file: Arc<str>,
    /// CPU seconds of its own.
    pub own: f64,
    /// And with what it called.
    pub total: f64,
    /// Its own by part.
    pub line: Vec<f64>,
}

/// What changed in a service.
#[derive(Debug, Serialize)]
pub struct ServiceChange {
    /// Service.
    pub service: Arc<str>,
    /// Versions.
    pub old: String,
    /// The newer one.
    pub new: String,
    /// CPU seconds of a process-hour, before and after, and whether that changed.
    pub whole: (f64, f64, bool),
    /// The smallest visible change, as a fraction of a function with 1 %.
    pub visible: Option<f64>,
    /// Significant ones, and those that only moved.
    pub changes: Vec<ChangeLine>,
}

/// What changed in a function.
#[derive(Debug, Serialize)]
pub struct ChangeLine {
    /// Function.
    pub name: String,
    /// File or object.
    pub file: String,
    /// Shares.
    pub before: f64,
    /// After.
    pub after: f64,
    /// 99 % interval of the change.
    pub interval: Option<(f64, f64)>,
    /// Where it moved to.
    pub moved_to: Option<String>,
}

#[derive(Default)]
struct Sum {
    services: Vec<Arc<str>>,
    time: Map<(u32, u32, StackId), i64>,
}

/// Reads it all.
///
/// # Errors
/// When tables cannot be read.
pub fn overview(lake: &Lake, root: &str, period: Period) -> anyhow::Result<Overview> {
    let spans = spans(lake, period)?;
    let files = lake.files(Table::Samples, period)?;
    let (start_ms, part_ms, parts) = parts(lake, &files, period)?;
    let (since, until) = bounds(period);
    let add = |sum: &mut Sum, _: &LakeFile, batch: &RecordBatch| {
        let columns = Columns { batch };
        let (times, on_cpu) = (columns.times("slice_start")?, columns.numbers("on_cpu_ns")?);
        let (services, ids) = (columns.texts("service")?, columns.ids("stack_id")?);
        for row in (0..times.len()).filter(|row| (since..until).contains(&times[*row])) {
            let ns = on_cpu.value(row);
            if ns <= 0 {
                continue;
            }
            let service = services.value(row);
            let found = sum.services.iter().rposition(|known| &**known == service).unwrap_or_else(|| {
                sum.services.push(service.into());
                sum.services.len() - 1
            });
            let part = (times[row] - start_ms).div_euclid(part_ms).clamp(0, parts as i64 - 1);
            *sum.time.entry((found as u32, part as u32, id(ids, row)?)).or_default() += ns;
        }
        Ok(())
    };
    let mut time: BTreeMap<Arc<str>, Map<(u32, StackId), i64>> = BTreeMap::new();
    for sum in lake.sums(&files, &["slice_start", "service", "stack_id", "on_cpu_ns"], add)? {
        for ((service, part, stack), ns) in sum.time {
            let of_service = time.entry(Arc::clone(&sum.services[service as usize])).or_default();
            *of_service.entry((part, stack)).or_default() += ns;
        }
    }
    let wanted: HashSet<StackId, RandomState> =
        time.values().flat_map(|of| of.keys().map(|(_, stack)| *stack)).collect();
    let names = Names::read(lake, period, &wanted, &|_| true)?;
    let mut services: Vec<ServiceLine> =
        time.iter().map(|(service, time)| service_line(service, time, parts, &names, spans.get(service))).collect();
    services.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
    let more_services = services.len().saturating_sub(SERVICES);
    services.truncate(SERVICES);
    let facts = Facts::read(lake, period, Wanted { time: false, hosts: true })?;
    let mut losses = questions::losses(&facts);
    let (stored, lost) = losses.iter().fold((0, 0), |(stored, lost), row| (stored + row.stored, lost + row.lost));
    let hosts = losses.len();
    losses.retain(|row| row.lost > 0 || row.recovered > 0);
    losses.truncate(HOSTS);
    let mut changes = Vec::new();
    for (service, versions) in &spans {
        if let [new, old, ..] = &versions[..] {
            let compared = compare(lake, service, sides(old, new), period, Options::default())?;
            changes.push(service_change(&compared, old, new));
        }
    }
    let root = root.to_owned();
    Ok(Overview { root, start_ms, part_ms, parts, hosts, stored, lost, services, more_services, changes, losses })
}

/// Start, length and number of parts.
fn parts(lake: &Lake, files: &[LakeFile], period: Period) -> anyhow::Result<(i64, i64, usize)> {
    let (since, until) = bounds(period);
    let (mut first, mut last) = (i64::MAX, i64::MIN);
    let hours = [files.iter().map(|file| &file.hour).min(), files.iter().map(|file| &file.hour).max()];
    for file in files.iter().filter(|file| hours.contains(&Some(&file.hour))) {
        for batch in lake.batches(file, &["slice_start"])? {
            let times = Columns { batch: &batch }.times("slice_start")?;
            for &time in times.iter().filter(|time| (since..until).contains(*time)) {
                (first, last) = (first.min(time), last.max(time));
            }
        }
    }
    if first > last {
        return Ok((0, LENGTHS[0], 1));
    }
    let length = last - first + 1;
    let part_ms = LENGTHS.into_iter().find(|part| length / part < PARTS).unwrap_or(length / PARTS + 1);
    let start_ms = first.div_euclid(part_ms) * part_ms;
    let count = (last - start_ms).div_euclid(part_ms) + 1;
    Ok((start_ms, part_ms, usize::try_from(count).unwrap_or(1)))
}

fn seconds(ns: i64) -> f64 {
    // Rounded to what a chart shows.
    (ns as f64 / 1e6).round() / 1e3
}

fn service_line(
    service: &Arc<str>,
    time: &Map<(u32, StackId), i64>,
    parts: usize,
    names: &Names,
    spans: Option<&Vec<Span>>,
) -> ServiceLine {
    type Function = (Arc<str>, Arc<str>);
    let mut line = vec![0; parts];
    let mut functions: Map<Function, (i64, i64, Vec<i64>)> = Map::default();
    for (&(part, stack), &ns) in time {
        line[part as usize] += ns;
        let frames = names.stacks.get(&stack).into_iter().flat_map(|frames| frames.iter());
        let mut seen: Vec<Function> = Vec::new();
        for (place, frame) in frames.filter_map(|frame| names.frames.get(frame)).enumerate() {
            let function = (Arc::clone(&frame.function), Arc::clone(&frame.file));
            if seen.contains(&function) {
                continue;
            }
            let (own, total, of_parts) = functions.entry(function.clone()).or_insert_with(|| (0, 0, vec![0; parts]));
            *total += ns;
            if place == 0 {
                *own += ns;
                of_parts[part as usize] += ns;
            }
            seen.push(function);
        }
    }
    let mut functions: Vec<_> = functions.into_iter().collect();
    functions.sort_by(|(a, (x, y, _)), (b, (v, w, _))| (v, w, a).cmp(&(x, y, b)));
    functions.truncate(FUNCTIONS);
    let functions = functions.into_iter().map(|((name, file), (own, total, of_parts))| FunctionLine {
        name,
        file,
        own: seconds(own),
        total: seconds(total),
        line: of_parts.into_iter().map(seconds).collect(),
    });
    ServiceLine {
        name: Arc::clone(service),
        seconds: seconds(line.iter().sum()),
        line: line.into_iter().map(seconds).collect(),
        versions: spans.into_iter().flatten().map(|span| (Arc::clone(&span.version), span.first_ms)).collect(),
        functions: functions.collect(),
    }
}

fn service_change(compared: &Comparison, old: &Span, new: &Span) -> ServiceChange {
    let told =
        compared.difference.changes.iter().filter(|change| change.measured.significant || change.moved_to.is_some());
    let text = |name: &tachyon::analysis::RowName| name.function.as_deref().unwrap_or(&name.name).to_owned();
    let changes = told.take(CHANGES).map(|change| ChangeLine {
        name: text(&change.name),
        file: change.name.file.as_deref().unwrap_or_default().to_owned(),
        before: change.measured.before,
        after: change.measured.after,
        interval: change.measured.interval,
        moved_to: change.moved_to.as_ref().map(text),
    });
    let whole = compared.whole;
    ServiceChange {
        service: Arc::clone(&compared.service),
        old: old.version.to_string(),
        new: new.version.to_string(),
        whole: (whole.before * 3600.0, whole.after * 3600.0, whole.significant),
        visible: compared.difference.smallest_visible_share.map(|share| share * 100.0),
        changes: changes.collect(),
    }
}
