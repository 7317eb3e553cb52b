//! What changed between two profiles, and which of the changes are more than noise.
//!
//! Each row's share (or CPU time per unit of work) before and after is a ratio over replicates (`replicates`); whether
//! it changed is decided by Student's test with the bootstrap's error, and of many rows those are significant whose q,
//! by Benjamini and Hochberg, is at most [`LEVEL`].
//!
//! Cost under another name is not a change. A function that one side lacks is charged, on both sides, to its nearest
//! caller that both have: what was renamed, split, inlined or moved to another file adds up to the same there. So a row
//! is significant only if this ancestor changed, too.

mod align;
mod few;
mod replicates;
mod side;
#[cfg(any(test, feature = "internals"))]
pub mod simulate;
mod test;

pub use test::LEVEL;

use super::aggregate::Aggregate;
use super::module::Distributions;
use super::rows::{By, RowKind, RowName, RowTable};
use few::Counts;
use replicates::{Estimate, Replicates};
use serde::Serialize;
use side::{Outside, Places, Side, Values, presence};
use std::collections::BTreeMap;
use std::sync::Arc;
use test::{Tested, false_discoveries, visible, welch};

/// How to compare.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// What has a row: a function, a line or a module.
    pub by: By,
    /// Units of work done before and after: then CPU seconds per unit are compared.
    pub per_unit: Option<(f64, f64)>,
    /// Rounds of the bootstrap.
    pub rounds: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { by: By::Function, per_unit: None, rounds: 1000 }
    }
}

/// One side, in numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Whole {
    /// Samples.
    pub samples: u64,
    /// Length of its recordings, seconds.
    pub seconds: f64,
    /// What the samples stand for, seconds.
    pub sampled_seconds: f64,
    /// Replicates.
    pub replicates: usize,
}

/// A quantity before and after. In JSON the interval is `low` and `high`, or null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(into = "InJson")]
pub struct Measured {
    /// Before.
    pub before: f64,
    /// After.
    pub after: f64,
    /// After less before.
    pub change: f64,
    /// The interval that contains the true change in 99 of 100 cases; `None` without enough replicates.
    pub interval: Option<(f64, f64)>,
    /// Share of false alarms if all rows with a q this low are accepted; `None`: not tested.
    pub q: Option<f64>,
    /// More than noise, and not just moved.
    pub significant: bool,
}

#[derive(Serialize)]
struct InJson {
    before: f64,
    after: f64,
    change: f64,
    low: Option<f64>,
    high: Option<f64>,
    q: Option<f64>,
    significant: bool,
}

impl From<Measured> for InJson {
    fn from(Measured { before, after, change, interval, q, significant }: Measured) -> Self {
        let (low, high) = interval.unzip();
        Self { before, after, change, low, high, q, significant }
    }
}

/// A row that one of the sides has.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// What identifies it.
    pub name: RowName,
    /// Samples before and after.
    pub samples: (u64, u64),
    /// What was asked for: its share, or with [`Options::per_unit`] its CPU seconds for each unit.
    pub measured: Measured,
    /// CPU seconds per second of recording; with [`Options::per_unit`] its share.
    pub other: Measured,
    /// It changed, but its ancestor did not: it was moved, renamed, split, or inlined.
    pub only_moved: bool,
    /// The row that got most of what it lost, if it only moved.
    pub moved_to: Option<RowName>,
}

/// A comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Before.
    pub before: Whole,
    /// After.
    pub after: Whole,
    /// The smallest change, as a part of the whole, that would have been found in four of five cases in a function with
    /// 1 % of it; `None` without enough replicates.
    pub smallest_visible_share: Option<f64>,
    /// Significant ones first, then the largest.
    pub changes: Vec<Change>,
    /// Files that have another path afterwards.
    pub moved_files: BTreeMap<Arc<str>, Arc<str>>,
}

/// Rows with fewer samples on both sides together are not tested: nothing could be said about them.
const FEWEST_SAMPLES: u64 = 10;
/// If one side has less than this fraction of what the other has, it counts as not having it.
const HARDLY_ANY: f64 = 0.02;
/// Changes that chance produces more often than this are not examined any closer.
const UNREMARKABLE: f64 = 0.2;
/// The share for which the smallest visible change is given.
const TOLD_FOR: f64 = 0.01;

/// Compares two profiles.
#[must_use]
pub fn diff(before: &Aggregate, after: &Aggregate, options: Options, distributions: &dyn Distributions) -> Difference {
    let by = options.by;
    let (mut rows, mut ancestors) = (RowTable::default(), RowTable::default());
    let above = if by == By::Module { By::Module } else { By::Function };
    let aggregates = [before, after];
    let moved_files = align::moved(before, after);
    let aligned = align::aligned(before, &moved_files);
    let places = [&aligned[..], after.places()].map(|places| Places {
        row: rows.places(places, by, distributions),
        ancestor: ancestors.places(places, above, distributions),
    });
    let ((row_python, row_frames), (python, frames)) = (rows.without_python(), ancestors.without_python());
    let root = RowName { name: String::new(), function: None, file: None, line: None, kind: RowKind::Special };
    let root = ancestors.intern(root);
    let outside = Outside { no_python: (row_python, python), no_frames: (row_frames, frames), root };
    let present = [0, 1].map(|side| presence(aggregates[side], &places[side], by, ancestors.names.len()));
    let whole = aggregates.map(|aggregate| aggregate.sampled_seconds() * 1e6);
    let common: Vec<bool> = (0..ancestors.names.len())
        .map(|ancestor| {
            let [a, b] = [0, 1].map(|side| present[side][ancestor] / whole[side].max(1.0));
            a.min(b) > HARDLY_ANY * a.max(b)
        })
        .collect();
    let sides =
        [0, 1].map(|side| Side::new(aggregates[side], &places[side], by, (&rows, &ancestors), &common, outside));
    let compared = Compared::new(&sides, rows.names.len(), root);
    let shares = Measure::shares(&sides, options.rounds);
    let rates = Measure::rates(&sides, options, aggregates);
    let (share, rate) = (compared.measure(&shares, &rows), compared.measure(&rates, &rows));
    let (asked, other) = if options.per_unit.is_some() { (rate, share) } else { (share, rate) };

    let mut changes: Vec<Change> = Vec::new();
    for (row, name) in rows.names.iter().enumerate() {
        let samples = (sides[0].samples[row], sides[1].samples[row]);
        if samples != (0, 0) {
            let moved_to = asked.moved_to[row].map(|to| rows.names[to].clone());
            let (measured, other) = (asked.rows[row], other.rows[row]);
            let only_moved = asked.only_moved[row];
            changes.push(Change { name: name.clone(), samples, measured, other, only_moved, moved_to });
        }
    }
    changes.sort_by(|a, b| {
        (b.measured.significant, b.measured.change.abs())
            .partial_cmp(&(a.measured.significant, a.measured.change.abs()))
            .expect("changes are numbers")
            .then_with(|| a.name.cmp(&b.name))
    });
    let whole = |side: usize| Whole {
        samples: aggregates[side].samples(),
        seconds: aggregates[side].seconds(),
        sampled_seconds: aggregates[side].sampled_seconds(),
        replicates: shares.replicates[side].len(),
    };
    let smallest_visible_share = compared.smallest_visible(&shares, [before.samples(), after.samples()]);
    Difference { before: whole(0), after: whole(1), smallest_visible_share, changes, moved_files }
}

/// What is compared: a ratio to a whole, times what the whole stands for.
struct Measure {
    replicates: [Replicates; 2],
    scale: [f64; 2],
    /// What a sample weighs.
    sample: [f64; 2],
    /// Samples that rows share: infinite if one row may have more without another having less.
    shared: f64,
}

/// The replicates of a side, with blocks as long as its rows show to be necessary.
fn replicates(side: &Side, units: &[(replicates::Unit, f64)], seed: u64, rounds: usize) -> Replicates {
    let mut replicates = Replicates::new(units, seed, rounds);
    let well_known = side.own.iter().zip(&side.samples).filter(|(_, samples)| **samples >= 5 * FEWEST_SAMPLES);
    replicates.learn(well_known.map(|(values, _)| &values[..]));
    replicates
}

impl Measure {
    fn new(sides: &[Side; 2], replicates: [Replicates; 2], scale: [f64; 2]) -> Self {
        let samples = [0, 1].map(|side| sides[side].samples.iter().sum::<u64>() as f64);
        let weight = [0, 1].map(|side| sides[side].units.iter().map(|(_, weight)| weight).sum::<f64>());
        let sample = [0, 1].map(|side: usize| weight[side] / f64::max(samples[side], 1.0));
        Self { replicates, scale, sample, shared: samples.iter().sum() }
    }

    /// Shares of the samples' CPU time.
    fn shares(sides: &[Side; 2], rounds: usize) -> Self {
        let replicates = [0, 1].map(|side| replicates(&sides[side], &sides[side].units, side as u64, rounds));
        Self::new(sides, replicates, [1.0, 1.0])
    }

    /// CPU seconds per second, or per unit of work.
    fn rates(sides: &[Side; 2], options: Options, aggregates: [&Aggregate; 2]) -> Self {
        let replicates =
            [0, 1].map(|side| replicates(&sides[side], &sides[side].lengths, 2 + side as u64, options.rounds));
        let scale = match options.per_unit {
            Some((before, after)) => [aggregates[0].seconds() / before, aggregates[1].seconds() / after],
            None => [1.0, 1.0],
        };
        // Values are microseconds.
        Self { shared: f64::INFINITY, ..Self::new(sides, replicates, scale.map(|scale| scale / 1e6)) }
    }

    fn are_enough(&self) -> bool {
        self.replicates.iter().all(Replicates::are_enough)
    }

    fn estimate(&self, side: usize, values: &Values) -> Estimate {
        self.scaled(side, self.replicates[side].estimate(values))
    }

    fn scaled(&self, side: usize, estimate: Estimate) -> Estimate {
        let scale = self.scale[side];
        Estimate { value: estimate.value * scale, variance: estimate.variance * scale * scale, ..estimate }
    }

    fn test(&self, values: [&Values; 2]) -> (Tested, [Estimate; 2]) {
        let raw = [0, 1].map(|side| self.replicates[side].estimate(values[side]));
        let counts = self.counts(values);
        let estimates = [0, 1].map(|side| self.scaled(side, raw[side]));
        let (tested, estimates) = few::test(estimates, &counts);
        if tested.p > UNREMARKABLE || !self.are_enough() {
            return (tested, estimates);
        }
        let resampled = [0, 1].map(|side| {
            let variance = self.replicates[side].bootstrap(values[side], &raw[side]);
            self.scaled(side, Estimate { variance, ..raw[side] })
        });
        few::test(resampled, &counts)
    }

    fn counts(&self, values: [&Values; 2]) -> Counts {
        let side = |side: usize| {
            let sample = self.sample[side].max(f64::MIN_POSITIVE);
            let count = values[side].iter().map(|(_, value)| value).sum::<f64>() / sample;
            // The exposure: the number of samples that a row of value 1 would have.
            let exposure = self.replicates[side].denominator() / (sample * self.scale[side].max(f64::MIN_POSITIVE));
            (count, exposure)
        };
        Counts { sides: [side(0), side(1)], shared: self.shared }
    }
}

/// All rows of a measure.
struct Rows {
    rows: Vec<Measured>,
    only_moved: Vec<bool>,
    moved_to: Vec<Option<usize>>,
}

/// Both sides' rows, and the ancestors that they are compared with.
struct Compared<'a> {
    sides: &'a [Side; 2],
    /// By row: the ancestor that most of it is charged to.
    ancestor: Vec<usize>,
    tested: Vec<bool>,
}

impl<'a> Compared<'a> {
    fn new(sides: &'a [Side; 2], rows: usize, root: usize) -> Self {
        let mut most = vec![(0.0, root); rows];
        let mut charged: Vec<_> = sides.iter().flat_map(|side| &side.charged).collect();
        charged.sort_by_key(|(pair, _)| **pair);
        let mut pairs: Vec<((usize, usize), f64)> = Vec::new();
        for (&pair, &weight) in charged {
            match pairs.last_mut() {
                Some((last, sum)) if *last == pair => *sum += weight,
                _ => pairs.push((pair, weight)),
            }
        }
        for ((row, ancestor), weight) in pairs {
            if weight > most[row].0 {
                most[row] = (weight, ancestor);
            }
        }
        let tested = (0..rows).map(|row| sides.iter().map(|side| side.samples[row]).sum::<u64>() >= FEWEST_SAMPLES);
        let tested = tested.collect();
        Self { sides, ancestor: most.into_iter().map(|(_, ancestor)| ancestor).collect(), tested }
    }

    fn measure(&self, measure: &Measure, table: &RowTable) -> Rows {
        let enough = measure.are_enough();
        let mut rows = Vec::with_capacity(self.tested.len());
        let (mut places, mut alone, mut together) = (Vec::new(), Vec::new(), Vec::new());
        for (row, &is_tested) in self.tested.iter().enumerate() {
            let (tested, [before, after]) = measure.test([&self.sides[0].own[row], &self.sides[1].own[row]]);
            rows.push(Measured {
                before: before.value,
                after: after.value,
                change: tested.change,
                interval: enough.then(|| tested.interval()),
                q: None,
                significant: false,
            });
            if is_tested && enough {
                let collapsed = [0, 1].map(|side| &self.sides[side].collapsed[self.ancestor[row]]);
                let ancestor = if tested.p > UNREMARKABLE { tested.p } else { measure.test(collapsed).0.p };
                places.push(row);
                alone.push(tested.p);
                together.push(tested.p.max(ancestor));
            }
        }
        let (alone, together) = (false_discoveries(&alone), false_discoveries(&together));
        let (mut only_moved, mut moved_to) = (vec![false; rows.len()], vec![None; rows.len()]);
        for ((&row, alone), together) in places.iter().zip(alone).zip(together) {
            rows[row].q = Some(together);
            rows[row].significant = together <= LEVEL;
            only_moved[row] = alone <= LEVEL && together > LEVEL;
            if only_moved[row] && rows[row].change < 0.0 {
                // The row charged to the same ancestor that grew most; one with the same name comes first.
                let others = (0..rows.len()).filter(|&other| self.ancestor[other] == self.ancestor[row]);
                let rank = |other: &usize| {
                    let namesake = table.names[*other].function == table.names[row].function;
                    (namesake && rows[*other].change > 0.0, rows[*other].change)
                };
                let grown = others.max_by(|a, b| rank(a).partial_cmp(&rank(b)).expect("changes are numbers"));
                moved_to[row] = grown.filter(|&other| rows[other].change > 0.0);
            }
        }
        Rows { rows, only_moved, moved_to }
    }

    /// The smallest visible change of a row with 1 %, assuming its samples depend on each other as in other rows.
    fn smallest_visible(&self, measure: &Measure, samples: [u64; 2]) -> Option<f64> {
        if !measure.are_enough() || samples.contains(&0) {
            return None;
        }
        let tests = self.tested.iter().filter(|tested| **tested).count();
        let binomial = |share: f64| {
            samples
                .into_iter()
                .map(|samples| share * (1.0 - share) / samples as f64)
                .sum::<f64>()
                .max(f64::MIN_POSITIVE)
        };
        let well_known = |row: &usize| self.sides.iter().all(|side| side.samples[*row] >= 5 * FEWEST_SAMPLES);
        let mut reaches: Vec<f64> = (0..self.tested.len())
            .filter(well_known)
            .map(|row| [0, 1].map(|side| measure.estimate(side, &self.sides[side].own[row])))
            .filter(|estimates| estimates.iter().all(|estimate| estimate.value < 1.0))
            .map(|estimates| {
                let [before, after] = &estimates;
                let chance = binomial((before.value + after.value) / 2.0);
                // A smaller deviation than that of independent samples is chance.
                let effect = ((before.variance + after.variance) / chance).max(1.0);
                visible(effect.sqrt(), welch(before, after).freedom, tests)
            })
            .collect();
        reaches.sort_by(f64::total_cmp);
        let replicates = measure.replicates.iter().map(|replicates| replicates.len() as f64 - 1.0).sum();
        let reach = reaches.get(reaches.len() / 2).copied().unwrap_or_else(|| visible(1.0, replicates, tests));
        Some(reach * binomial(TOLD_FOR).sqrt())
    }
}

#[cfg(test)]
mod tests;
