//! Who calls a function, and whom it calls.

use super::aggregate::{Aggregate, PlaceId};
use super::filter::{Filter, matches};
use super::module::NoDistributions;
use super::rows::{By, RowName, RowTable};
use regex::Regex;

/// A caller or callee.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The function.
    pub name: RowName,
    /// Samples in which it calls one of the functions, or is called by one.
    pub samples: u64,
    /// Of these, those that were taken in the callee itself.
    pub own: u64,
}

/// The functions that match a pattern, with their callers and callees. Most samples first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edges {
    /// All samples that the filter lets through.
    pub all: u64,
    /// Samples in which one of the functions occurs.
    pub samples: u64,
    /// The functions.
    pub functions: Vec<RowName>,
    /// Those that call them.
    pub callers: Vec<Edge>,
    /// Those that they call.
    pub callees: Vec<Edge>,
}

/// Looks for functions whose name, file or object matches. As in pprof's `-peek`, a function that calls itself is not its
/// own caller. Native code between Python functions counts only with `native`.
#[must_use]
pub fn edges(aggregate: &Aggregate, pattern: &Regex, filter: &Filter, native: bool) -> Edges {
    let kept = filter.stacks(aggregate);
    let mut by_stack = vec![0; kept.len()];
    for (entry, count) in aggregate.entries() {
        by_stack[entry.stack as usize] += if kept[entry.stack as usize] { count } else { &0 };
    }
    let mut table = RowTable::default();
    let rows = table.places(aggregate.places(), By::Function, &NoDistributions);
    let mut wanted = vec![false; table.names.len()];
    for (place, &row) in aggregate.places().iter().zip(&rows) {
        wanted[row] |= matches(pattern, place) && (native || place.is_python());
    }
    let mut sides = [Side::new(wanted.len()), Side::new(wanted.len())];
    let mut found = vec![false; wanted.len()];
    let mut result = Edges { all: by_stack.iter().sum(), ..Edges::default() };
    for (number, (stack, &samples)) in aggregate.stacks().iter().zip(&by_stack).enumerate() {
        if samples == 0 {
            continue;
        }
        let shown: Vec<usize> = stack
            .iter()
            .filter(|&&place| native || aggregate.place(place).is_python())
            .map(|&PlaceId(place)| rows[place as usize])
            .collect();
        let mut any = false;
        for &row in shown.iter().filter(|&&row| wanted[row]) {
            (any, found[row]) = (true, true);
        }
        result.samples += if any { samples } else { 0 };
        for (depth, pair) in shown.windows(2).enumerate() {
            let (callee, caller) = (pair[0], pair[1]);
            if callee != caller {
                let own = if depth == 0 { samples } else { 0 };
                if wanted[callee] {
                    sides[0].add(caller, number, samples, own);
                }
                if wanted[caller] {
                    sides[1].add(callee, number, samples, own);
                }
            }
        }
    }
    let [callers, callees] = sides.map(|side| side.edges(&table));
    let functions = table.names.iter().zip(&found).filter(|(_, found)| **found).map(|(name, _)| name.clone()).collect();
    Edges { functions, callers, callees, ..result }
}

/// Sums of one direction.
struct Side {
    sums: Vec<(u64, u64)>,
    seen: Vec<usize>,
}

impl Side {
    fn new(rows: usize) -> Self {
        Self { sums: vec![(0, 0); rows], seen: vec![usize::MAX; rows] }
    }

    fn add(&mut self, row: usize, stack: usize, samples: u64, own: u64) {
        // The innermost call comes first, so `own` is never missed.
        if self.seen[row] != stack {
            self.seen[row] = stack;
            self.sums[row].0 += samples;
            self.sums[row].1 += own;
        }
    }

    fn edges(self, table: &RowTable) -> Vec<Edge> {
        let rows = table.names.iter().zip(self.sums).filter(|(_, (samples, _))| *samples > 0);
        let mut edges: Vec<_> = rows.map(|(name, (samples, own))| Edge { name: name.clone(), samples, own }).collect();
        edges.sort_by(|a, b| b.samples.cmp(&a.samples).then_with(|| a.name.cmp(&b.name)));
        edges
    }
}
