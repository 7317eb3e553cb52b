//! The three questions that fleets are asked, answered by plain Rust: the same rows that the engines give ([`crate::sql`]).

use crate::hash::StackId;
use crate::load::Tables;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// A question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Top functions of the fleet, by service.
    Functions,
    /// What changed between two versions.
    Changes,
    /// Which hosts lose samples.
    Losses,
}

impl Question {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Functions, Self::Changes, Self::Losses];
}

/// A function of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FunctionRow {
    /// Service.
    pub service: Arc<str>,
    /// Function.
    pub function: Arc<str>,
    /// Its file, or a native function's object.
    pub file: Arc<str>,
    /// CPU time in it, nanoseconds.
    pub self_ns: i64,
    /// CPU time in it and in what it called, nanoseconds.
    pub total_ns: i64,
}

/// A function whose share changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChangeRow {
    /// Service.
    pub service: Arc<str>,
    /// Its version before.
    pub old_version: String,
    /// Its version after.
    pub new_version: String,
    /// Function.
    pub function: Arc<str>,
    /// Its file, or a native function's object.
    pub file: Arc<str>,
    /// Share of the service's CPU time before, with what it called, in millionths.
    pub old_ppm: i64,
    /// The same after.
    pub new_ppm: i64,
    /// The difference.
    pub change_ppm: i64,
}

/// What a host lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LossRow {
    /// Host.
    pub host: Arc<str>,
    /// Samples in tables.
    pub stored: i64,
    /// Samples lost.
    pub lost: i64,
    /// Share that was lost, in millionths.
    pub lost_ppm: i64,
    /// Recovered segments, whose losses are unknown.
    pub recovered: i64,
}

/// Function and file.
type Function = (Arc<str>, Arc<str>);

/// Functions of each stack, once each; whether it is the innermost one.
struct Functions<'a> {
    tables: &'a Tables,
    by_stack: HashMap<StackId, Vec<(Function, bool)>>,
}

impl<'a> Functions<'a> {
    fn new(tables: &'a Tables) -> Self {
        Self { tables, by_stack: HashMap::new() }
    }

    fn of(&mut self, stack: StackId) -> &[(Function, bool)] {
        let tables = self.tables;
        self.by_stack.entry(stack).or_insert_with(|| {
            let frames = tables.stacks.get(&stack).into_iter().flat_map(|frames| frames.iter());
            let mut seen = HashSet::new();
            let mut functions = Vec::new();
            for (place, frame) in frames.enumerate() {
                let Some(frame) = tables.frames.get(frame) else { continue };
                let function = (Arc::clone(&frame.function), Arc::clone(&frame.file));
                if seen.insert(function.clone()) {
                    functions.push((function, place == 0));
                }
            }
            functions
        })
    }
}

/// Top functions by CPU time of their own, `lines` of each service.
#[must_use]
pub fn functions(tables: &Tables, lines: usize) -> Vec<FunctionRow> {
    let mut functions = Functions::new(tables);
    let mut totals: BTreeMap<Arc<str>, HashMap<Function, [i64; 2]>> = BTreeMap::new();
    for row in tables.samples.iter().filter(|row| row.on_cpu_ns > 0) {
        let of_service = totals.entry(Arc::clone(&row.service)).or_default();
        for (function, is_leaf) in functions.of(row.stack_id) {
            let [own, total] = of_service.entry(function.clone()).or_default();
            *own += if *is_leaf { row.on_cpu_ns } else { 0 };
            *total += row.on_cpu_ns;
        }
    }
    let top = |(service, of_service): (Arc<str>, HashMap<Function, [i64; 2]>)| {
        let mut rows: Vec<_> = of_service.into_iter().collect();
        rows.sort_by(|(a, x), (b, y)| (Reverse(x), a).cmp(&(Reverse(y), b)));
        rows.truncate(lines);
        rows.into_iter().map(move |((function, file), [self_ns, total_ns])| FunctionRow {
            service: Arc::clone(&service),
            function,
            file,
            self_ns,
            total_ns,
        })
    };
    totals.into_iter().flat_map(top).collect()
}

/// A service's two versions that were first seen last.
struct Versions<'a> {
    old: &'a str,
    new: &'a str,
    old_ns: i64,
    new_ns: i64,
}

fn versions(tables: &Tables) -> BTreeMap<Arc<str>, Versions<'_>> {
    // First slice and CPU time.
    let mut seen: BTreeMap<Arc<str>, BTreeMap<&str, (i64, i64)>> = BTreeMap::new();
    for row in &tables.samples {
        let Some(version) = row.labels.version.as_deref() else { continue };
        let of_service = seen.entry(Arc::clone(&row.service)).or_default();
        let (first_ms, ns) = of_service.entry(version).or_insert((i64::MAX, 0));
        *first_ms = row.slice_start_ms.min(*first_ms);
        *ns += row.on_cpu_ns;
    }
    let mut pairs = BTreeMap::new();
    for (service, of_service) in seen {
        let mut found: Vec<_> = of_service.into_iter().filter(|&(_, (_, ns))| ns > 0).collect();
        found.sort_by_key(|&(version, (first_ms, _))| Reverse((first_ms, version)));
        if let [(new, (_, new_ns)), (old, (_, old_ns)), ..] = found[..] {
            pairs.insert(service, Versions { old, new, old_ns, new_ns });
        }
    }
    pairs
}

/// Functions whose share of their service's CPU time changed most between its two newest versions, `lines` of each service.
#[must_use]
pub fn changes(tables: &Tables, lines: usize) -> Vec<ChangeRow> {
    let versions = versions(tables);
    let mut functions = Functions::new(tables);
    let mut totals: BTreeMap<Arc<str>, HashMap<Function, [i64; 2]>> = BTreeMap::new();
    for row in &tables.samples {
        let (Some(pair), Some(version)) = (versions.get(&row.service), row.labels.version.as_deref()) else { continue };
        let sides = [version == pair.old, version == pair.new];
        let of_service = totals.entry(Arc::clone(&row.service)).or_default();
        for (function, _) in functions.of(row.stack_id) {
            let ns = of_service.entry(function.clone()).or_default();
            for (ns, side) in ns.iter_mut().zip(sides) {
                *ns += if side { row.on_cpu_ns } else { 0 };
            }
        }
    }
    let changed = |(service, of_service): (Arc<str>, HashMap<Function, [i64; 2]>)| {
        let pair = &versions[&service];
        let change = |((function, file), [old_ns, new_ns]): (Function, [i64; 2])| {
            let (old_ppm, new_ppm) = (ppm(old_ns, pair.old_ns), ppm(new_ns, pair.new_ns));
            ChangeRow {
                service: Arc::clone(&service),
                old_version: pair.old.to_owned(),
                new_version: pair.new.to_owned(),
                function,
                file,
                old_ppm,
                new_ppm,
                change_ppm: new_ppm - old_ppm,
            }
        };
        let mut rows: Vec<_> = of_service.into_iter().map(change).filter(|row| row.change_ppm != 0).collect();
        rows.sort_by(|a, b| {
            let key =
                |row: &ChangeRow| (Reverse(row.change_ppm.abs()), Arc::clone(&row.function), Arc::clone(&row.file));
            key(a).cmp(&key(b))
        });
        rows.truncate(lines);
        rows
    };
    totals.into_iter().flat_map(changed).collect()
}

/// What each host lost, those that lose most first.
#[must_use]
pub fn losses(tables: &Tables) -> Vec<LossRow> {
    let mut hosts: BTreeMap<Arc<str>, [i64; 3]> = BTreeMap::new();
    for row in &tables.samples {
        hosts.entry(Arc::clone(&row.host)).or_default()[0] += row.samples;
    }
    for row in &tables.loss {
        let [_, lost, recovered] = hosts.entry(Arc::clone(&row.host)).or_default();
        *lost += row.runs;
        *recovered += i64::from(row.cause == "cut");
    }
    let row = |(host, [stored, lost, recovered]): (Arc<str>, [i64; 3])| LossRow {
        host,
        stored,
        lost,
        lost_ppm: if lost == 0 { 0 } else { ppm(lost, stored + lost) },
        recovered,
    };
    let mut rows: Vec<LossRow> = hosts.into_iter().map(row).collect();
    rows.sort_by_key(|row| Reverse((row.lost_ppm, row.recovered)));
    rows
}

/// A share in millionths, rounded as the engines do: `floor(x + 0.5)`, because their own `round` differs.
#[expect(clippy::cast_possible_truncation, reason = "a share of what has a share")]
fn ppm(part: i64, whole: i64) -> i64 {
    (part as f64 * 1e6 / whole as f64 + 0.5).floor() as i64
}
