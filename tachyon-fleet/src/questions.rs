//! The three questions about fleets, answered in plain Rust: with the same rows as from the engines ([`crate::sql`]).

use crate::facts::{Facts, Map, Names, Release};
use crate::hash::StackId;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// A question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
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

/// The functions of each stack, once each, and whether each is the innermost one.
struct Functions<'a> {
    names: &'a Names,
    by_stack: Map<StackId, Vec<(Function, bool)>>,
}

impl<'a> Functions<'a> {
    fn new(names: &'a Names) -> Self {
        Self { names, by_stack: Map::default() }
    }

    fn of(&mut self, stack: StackId) -> &[(Function, bool)] {
        let names = self.names;
        self.by_stack.entry(stack).or_insert_with(|| {
            let frames = names.stacks.get(&stack).into_iter().flat_map(|frames| frames.iter());
            let mut seen = HashSet::new();
            let mut functions = Vec::new();
            for (place, frame) in frames.enumerate() {
                let Some(frame) = names.frames.get(frame) else { continue };
                let function = (Arc::clone(&frame.function), Arc::clone(&frame.file));
                if seen.insert(function.clone()) {
                    functions.push((function, place == 0));
                }
            }
            functions
        })
    }
}

/// Top functions by their own CPU time, `lines` per service.
#[must_use]
pub fn functions(facts: &Facts, lines: usize) -> Vec<FunctionRow> {
    let mut functions = Functions::new(&facts.names);
    let mut totals: BTreeMap<Arc<str>, Map<Function, [i64; 2]>> = BTreeMap::new();
    for (((service, _), stack), ns) in &facts.time {
        let of_service = totals.entry(Arc::clone(service)).or_default();
        for (function, is_leaf) in functions.of(*stack) {
            let [own, total] = of_service.entry(function.clone()).or_default();
            *own += if *is_leaf { *ns } else { 0 };
            *total += ns;
        }
    }
    let top = |(service, of_service): (Arc<str>, Map<Function, [i64; 2]>)| {
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

/// A service's two most recently introduced versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The older one.
    pub old: Arc<str>,
    /// The newer one.
    pub new: Arc<str>,
    old_ns: i64,
    new_ns: i64,
}

/// The versions of each service that has two with CPU time.
#[must_use]
pub fn versions(facts: &Facts) -> BTreeMap<Arc<str>, Versions> {
    let mut ns_of: BTreeMap<&Release, i64> = BTreeMap::new();
    for ((release, _), ns) in &facts.time {
        *ns_of.entry(release).or_default() += ns;
    }
    // When it was first seen, the version, its time.
    type Seen = (i64, Arc<str>, i64);
    let mut found: BTreeMap<Arc<str>, Vec<Seen>> = BTreeMap::new();
    for (release, &ns) in &ns_of {
        let (service, Some(version)) = release else { continue };
        let first_ms = facts.first_ms.get(release).copied().unwrap_or(i64::MAX);
        found.entry(Arc::clone(service)).or_default().push((first_ms, Arc::clone(version), ns));
    }
    let mut pairs = BTreeMap::new();
    for (service, mut of_service) in found {
        of_service.sort_by(|a, b| (b.0, &b.1).cmp(&(a.0, &a.1)));
        if let [(_, new, new_ns), (_, old, old_ns), ..] = &of_service[..] {
            let (old, new) = (Arc::clone(old), Arc::clone(new));
            pairs.insert(service, Versions { old, new, old_ns: *old_ns, new_ns: *new_ns });
        }
    }
    pairs
}

/// Functions whose share of their service's CPU time changed most between its two newest versions, `lines` per service.
#[must_use]
pub fn changes(facts: &Facts, lines: usize) -> Vec<ChangeRow> {
    let versions = versions(facts);
    let mut functions = Functions::new(&facts.names);
    let mut totals: BTreeMap<Arc<str>, Map<Function, [i64; 2]>> = BTreeMap::new();
    for (((service, version), stack), ns) in &facts.time {
        let (Some(pair), Some(version)) = (versions.get(service), version) else { continue };
        let sides = [*version == pair.old, *version == pair.new];
        if sides == [false; 2] {
            continue;
        }
        let of_service = totals.entry(Arc::clone(service)).or_default();
        for (function, _) in functions.of(*stack) {
            let sums = of_service.entry(function.clone()).or_default();
            for (sum, side) in sums.iter_mut().zip(sides) {
                *sum += if side { *ns } else { 0 };
            }
        }
    }
    let changed = |(service, of_service): (Arc<str>, Map<Function, [i64; 2]>)| {
        let pair = &versions[&service];
        let change = |((function, file), [old_ns, new_ns]): (Function, [i64; 2])| {
            let (old_ppm, new_ppm) = (ppm(old_ns, pair.old_ns), ppm(new_ns, pair.new_ns));
            ChangeRow {
                service: Arc::clone(&service),
                old_version: pair.old.to_string(),
                new_version: pair.new.to_string(),
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

/// What each host lost, the one that loses most first.
#[must_use]
pub fn losses(facts: &Facts) -> Vec<LossRow> {
    let row = |(host, &[stored, lost, recovered]): (&Arc<str>, &[i64; 3])| LossRow {
        host: Arc::clone(host),
        stored,
        lost,
        lost_ppm: if lost == 0 { 0 } else { ppm(lost, stored + lost) },
        recovered,
    };
    let mut rows: Vec<LossRow> = facts.hosts.iter().map(row).collect();
    rows.sort_by_key(|row| Reverse((row.lost_ppm, row.recovered)));
    rows
}

/// A share in millionths, rounded as in the engines: `floor(x + 0.5)`, because their own `round` differs.
#[expect(clippy::cast_possible_truncation, reason = "a share of what has a share")]
fn ppm(part: i64, whole: i64) -> i64 {
    (part as f64 * 1e6 / whole as f64 + 0.5).floor() as i64
}
