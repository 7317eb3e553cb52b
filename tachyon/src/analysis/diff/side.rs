//! One side of a comparison: what each replicate spent in each row.

use super::replicates::Unit;
use crate::analysis::aggregate::{Aggregate, PlaceId};
use crate::analysis::rows::{By, RowTable, without_wait};
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// Values of a row, by unit, in order.
pub(super) type Values = Vec<(u32, f64)>;

/// A side.
pub(super) struct Side {
    /// Replicates with the CPU time of their samples, microseconds.
    pub units: Vec<(Unit, f64)>,
    /// The same with their length: their parts of the recordings' seconds.
    pub lengths: Vec<(Unit, f64)>,
    /// By row: CPU time in it.
    pub own: Vec<Values>,
    /// By row: samples in it.
    pub samples: Vec<u64>,
    /// By ancestor: its own CPU time if what the other side does not have is charged to its caller.
    pub collapsed: Vec<Values>,
    /// CPU time of a row that is charged to an ancestor.
    pub charged: HashMap<(usize, usize), f64, RandomState>,
}

/// What a place means to a comparison.
pub(super) struct Places {
    /// Its row.
    pub row: Vec<usize>,
    /// Its row among those that may be ancestors: its function, or its module.
    pub ancestor: Vec<usize>,
}

/// Rows for stacks without frames of interest, and the root above everything.
#[derive(Clone, Copy)]
pub(super) struct Outside {
    pub no_python: (usize, usize),
    pub no_frames: (usize, usize),
    pub root: usize,
}

/// Whether a frame counts: native code has rows of its own only by module.
fn is_shown(aggregate: &Aggregate, place: PlaceId, by: By) -> bool {
    by == By::Module || aggregate.place(place).is_python()
}

/// By ancestor: CPU time of all samples in which it occurs.
pub(super) fn presence(aggregate: &Aggregate, places: &Places, by: By, ancestors: usize) -> Vec<f64> {
    let mut by_stack = vec![0.0; aggregate.stacks().len()];
    for (entry, count) in aggregate.entries() {
        by_stack[entry.stack as usize] += weight(aggregate, entry.recording, *count);
    }
    let mut present = vec![0.0; ancestors];
    let mut seen = vec![usize::MAX; ancestors];
    for (number, (stack, weight)) in aggregate.stacks().iter().zip(by_stack).enumerate() {
        for &place in stack.iter().filter(|&&place| is_shown(aggregate, place, by)) {
            let ancestor = places.ancestor[place.0 as usize];
            if seen[ancestor] != number {
                seen[ancestor] = number;
                present[ancestor] += weight;
            }
        }
    }
    present
}

fn weight(aggregate: &Aggregate, recording: u32, count: u64) -> f64 {
    count as f64 * aggregate.recordings()[recording as usize].interval_us as f64
}

impl Side {
    /// `common`, by ancestor: both sides have it.
    pub fn new(
        aggregate: &Aggregate,
        places: &Places,
        by: By,
        (rows, ancestors): (&RowTable, &RowTable),
        common: &[bool],
        outside: Outside,
    ) -> Self {
        let processes = processes(aggregate);
        let (mut units, numbers) = blocks(aggregate, &processes);
        let lengths = lengths(aggregate, &units);
        // By stack: the row that it is charged to, and the nearest ancestor that both sides have.
        let stacks: Vec<(usize, usize)> = aggregate
            .stacks()
            .iter()
            .map(|stack| {
                let stack = without_wait(aggregate, stack);
                let mut shown = stack.iter().filter(|&&place| is_shown(aggregate, place, by)).peekable();
                match shown.peek() {
                    None if stack.is_empty() => outside.no_frames,
                    None => outside.no_python,
                    Some(leaf) => {
                        let row = places.row[leaf.0 as usize];
                        let nearest = shown.map(|place| places.ancestor[place.0 as usize]).find(|&place| common[place]);
                        (row, nearest.unwrap_or(outside.root))
                    }
                }
            })
            .collect();
        let mut own: Vec<HashMap<u32, f64, RandomState>> = vec![HashMap::default(); rows.names.len()];
        let mut collapsed: Vec<HashMap<u32, f64, RandomState>> = vec![HashMap::default(); ancestors.names.len()];
        let mut samples = vec![0; rows.names.len()];
        let mut charged = HashMap::default();
        for (entry, count) in aggregate.entries() {
            let unit =
                Unit { recording: entry.recording, process: processes[entry.thread as usize], block: entry.block };
            let unit = numbers[&unit];
            let weight = weight(aggregate, entry.recording, *count);
            let (row, ancestor) = stacks[entry.stack as usize];
            units[unit as usize].1 += weight;
            samples[row] += count;
            *own[row].entry(unit).or_default() += weight;
            *collapsed[ancestor].entry(unit).or_default() += weight;
            *charged.entry((row, ancestor)).or_default() += weight;
        }
        let in_order = |values: Vec<HashMap<u32, f64, RandomState>>| {
            let mut all: Vec<Values> = values.into_iter().map(|values| values.into_iter().collect()).collect();
            all.iter_mut().for_each(|values| values.sort_unstable_by_key(|(unit, _)| *unit));
            all
        };
        Self { units, lengths, own: in_order(own), samples, collapsed: in_order(collapsed), charged }
    }
}

/// By thread: the number of its process.
fn processes(aggregate: &Aggregate) -> Vec<u32> {
    let mut known: HashMap<&str, u32> = HashMap::new();
    let threads = aggregate.threads().iter();
    threads
        .map(|thread| {
            let next = u32::try_from(known.len()).expect("threads are counted in 32 bits");
            *known.entry(&thread.process).or_insert(next)
        })
        .collect()
}

/// All blocks of each process of each recording, in order, including those in which it did nothing, with their numbers.
fn blocks(aggregate: &Aggregate, processes: &[u32]) -> (Vec<(Unit, f64)>, HashMap<Unit, u32>) {
    let mut last: HashMap<u32, u16> = HashMap::new();
    let mut pairs = Vec::new();
    for (entry, _) in aggregate.entries() {
        let last = last.entry(entry.recording).or_insert(0);
        *last = (*last).max(entry.block);
        pairs.push((entry.recording, processes[entry.thread as usize]));
    }
    pairs.sort_unstable();
    pairs.dedup();
    let units: Vec<(Unit, f64)> = pairs
        .into_iter()
        .flat_map(|(recording, process)| {
            (0..=last[&recording]).map(move |block| (Unit { recording, process, block }, 0.0))
        })
        .collect();
    let numbers = (0..).zip(&units).map(|(number, (unit, _))| (*unit, number)).collect();
    (units, numbers)
}

/// Each unit's part of its recording's seconds.
fn lengths(aggregate: &Aggregate, units: &[(Unit, f64)]) -> Vec<(Unit, f64)> {
    let length = |unit: &Unit| {
        let recording = &aggregate.recordings()[unit.recording as usize];
        let block_s = recording.block_us as f64 / 1e6;
        // The last block ends with the recording.
        (recording.seconds - f64::from(unit.block) * block_s).clamp(block_s / 100.0, block_s)
    };
    let mut sums: HashMap<u32, f64> = HashMap::new();
    for (unit, _) in units {
        *sums.entry(unit.recording).or_default() += length(unit);
    }
    units
        .iter()
        .map(|(unit, _)| {
            let seconds = aggregate.recordings()[unit.recording as usize].seconds;
            (*unit, length(unit) / sums[&unit.recording].max(f64::MIN_POSITIVE) * seconds)
        })
        .collect()
}
