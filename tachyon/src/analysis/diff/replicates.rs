//! How far a share may be from the truth, estimated from its replicates.
//!
//! Samples of one process depend on each other, so their number says little about the error of a share. Its replicates
//! do: blocks of time of each process of each recording. A share is a ratio of two sums over blocks; its variance comes
//! from how much each block deviates from the ratio (the delta method), and from resampling the blocks (the bootstrap).
//!
//! Blocks depend on each other, too, if a program works in phases that are longer than a block. So longer blocks are
//! tried, then whole processes and whole recordings: if the sums of neighbours deviate by more than independent blocks
//! would, these are used as the replicates.

use std::cell::OnceCell;

/// Fewer blocks than this say nothing about an error.
const FEWEST_BLOCKS: usize = 6;
/// Fewer processes or recordings likewise.
const FEWEST_GROUPS: usize = 3;
/// Most replicates: blocks are made long enough for this.
const MOST: usize = 4096;
/// From this many standard deviations on, the blocks of a row are assumed to depend on each other: one time in 1,000
/// that is chance. Not one in 100, because each such mistake hides a change, and several sizes are tried.
const DEPENDENT: f64 = 3.1;
/// The same for all rows together: what makes them depend on each other is a property of the program, not of a row.
const ALL_DEPENDENT: f64 = 2.33;

/// Where a replicate lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Unit {
    /// The recording.
    pub recording: u32,
    /// The process.
    pub process: u32,
    /// The block of time.
    pub block: u16,
}

/// The replicates of one side, at several sizes.
pub(super) struct Replicates {
    levels: Vec<Level>,
    denominator: f64,
    seed: u64,
    rounds: usize,
    /// The smallest size at which rows as a whole are independent.
    independent: usize,
}

/// Replicates of one size.
struct Level {
    /// By unit: the group.
    group: Vec<u32>,
    /// By group: the whole that its values are part of.
    denominators: Vec<f64>,
    /// Groups that have any.
    groups: usize,
    draws: OnceCell<Draws>,
}

/// How often each group is drawn in each round, and the wholes that the rounds' sums are part of.
struct Draws {
    times: Vec<u16>,
    denominators: Vec<f64>,
}

/// A ratio and its error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    /// The ratio.
    pub value: f64,
    /// Its variance.
    pub variance: f64,
    /// Number of replicates behind the variance, less one.
    pub freedom: f64,
    /// Size of the replicates.
    pub level: usize,
}

impl Replicates {
    /// Takes `units` in order, with the wholes that their values are part of.
    pub fn new(units: &[(Unit, f64)], seed: u64, rounds: usize) -> Self {
        let mut levels: Vec<Level> = Vec::new();
        let longest = units.iter().map(|(unit, _)| unit.block).max().unwrap_or(0);
        let bits = u16::BITS - longest.leading_zeros();
        for halvings in 0..=bits {
            levels.push(Level::new(units, |unit| (unit.recording, unit.process, unit.block >> halvings)));
        }
        levels.push(Level::new(units, |unit| (unit.recording, 0, 0)));
        let finest = levels.iter().position(|level| level.groups <= MOST).unwrap_or(levels.len() - 1);
        levels.drain(..finest);
        let denominator = sum(units.iter().map(|(_, denominator)| denominator));
        Self { levels, denominator, seed, rounds, independent: 0 }
    }

    /// Finds out from rows with many samples whether longer blocks are needed for all.
    pub fn learn<'a>(&mut self, rows: impl Iterator<Item = &'a [(u32, f64)]>) {
        let (mut excesses, mut count) = (vec![0.0; self.levels.len()], 0.0);
        for row in rows {
            let (value, finest) = self.ratio(row);
            if finest > 0.0 {
                count += 1.0;
                for (level, excess) in excesses.iter_mut().enumerate() {
                    *excess += self.excess(level, self.levels[level].deviations(row, value), finest);
                }
            }
        }
        let dependent = |level: &usize| excesses[*level] > ALL_DEPENDENT * count;
        self.independent = (1..self.levels.len()).rev().find(dependent).unwrap_or(0);
    }

    /// Whether a level has enough groups to estimate an error.
    fn has_enough(&self, level: usize) -> bool {
        let is_time = level + 2 < self.levels.len();
        self.levels[level].groups >= if is_time { FEWEST_BLOCKS } else { FEWEST_GROUPS }
    }

    fn ratio(&self, values: &[(u32, f64)]) -> (f64, f64) {
        let value = sum(values.iter().map(|(_, value)| value)) / self.denominator.max(f64::MIN_POSITIVE);
        (value, self.levels[0].deviations(values, value))
    }

    /// By how many standard deviations the groups of a level deviate more than independent ones would, whose squared
    /// deviations add up to the same at any size.
    fn excess(&self, level: usize, deviations: f64, finest: f64) -> f64 {
        let groups = self.levels[level].groups;
        if !self.has_enough(level) || groups == self.levels[0].groups {
            return 0.0;
        }
        let size = self.levels[0].groups as f64 / groups as f64;
        let chance = (2.0 * (1.0 - 1.0 / size) / groups as f64).sqrt();
        (deviations / finest - 1.0) / chance
    }

    /// The whole that values are part of.
    pub fn denominator(&self) -> f64 {
        self.denominator
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.levels[0].groups
    }

    /// Whether they are enough to estimate an error.
    pub fn are_enough(&self) -> bool {
        self.len() >= FEWEST_BLOCKS
    }

    /// The ratio of these values (by unit) to the whole.
    pub fn estimate(&self, values: &[(u32, f64)]) -> Estimate {
        let (value, finest) = self.ratio(values);
        let of = |level: usize| {
            let deviations = if level == 0 { finest } else { self.levels[level].deviations(values, value) };
            let freedom = self.levels[level].groups.saturating_sub(1) as f64;
            (Estimate { value, variance: self.variance(deviations, level), freedom, level }, deviations)
        };
        let mut best = of(self.independent).0;
        let mut dependent = self.independent > 0;
        for level in self.independent + 1..self.levels.len() {
            let (coarser, deviations) = of(level);
            dependent |= finest > 0.0 && self.excess(level, deviations, finest) > DEPENDENT;
            // If blocks depend on each other at all, longer ones that deviate more are accepted without proof.
            if dependent && self.has_enough(level) && coarser.variance > best.variance {
                best = coarser;
            }
        }
        best
    }

    fn variance(&self, deviations: f64, level: usize) -> f64 {
        let groups = self.levels[level].groups as f64;
        deviations / self.denominator.powi(2).max(f64::MIN_POSITIVE) * groups / (groups - 1.0).max(1.0)
    }

    /// The variance of an estimate by resampling its replicates. The same every time: the seed is the side's.
    pub fn bootstrap(&self, values: &[(u32, f64)], estimate: &Estimate) -> f64 {
        let level = &self.levels[estimate.level];
        let draws = level.draws.get_or_init(|| level.draw(self.seed ^ estimate.level as u64, self.rounds));
        let mut sums = vec![0.0; level.denominators.len()];
        for &(unit, value) in values {
            sums[level.group[unit as usize] as usize] += value;
        }
        let present: Vec<(usize, f64)> = sums.into_iter().enumerate().filter(|(_, sum)| *sum > 0.0).collect();
        let (mut mean, mut squares) = (0.0, 0.0);
        for (round, denominator) in draws.denominators.iter().enumerate() {
            let times = &draws.times[round * level.denominators.len()..][..level.denominators.len()];
            let sum: f64 = present.iter().map(|&(group, sum)| f64::from(times[group]) * sum).sum();
            let ratio = sum / denominator.max(f64::MIN_POSITIVE);
            // Welford's method: no difference of large sums.
            let before = ratio - mean;
            mean += before / (round + 1) as f64;
            squares += before * (ratio - mean);
        }
        let groups = level.groups as f64;
        squares / (draws.denominators.len() as f64 - 1.0).max(1.0) * groups / (groups - 1.0).max(1.0)
    }
}

/// The sum of nothing is 0, where the standard library's is -0.
fn sum<'a>(values: impl Iterator<Item = &'a f64>) -> f64 {
    values.fold(0.0, |sum, value| sum + value)
}

impl Level {
    fn new<K: PartialEq>(units: &[(Unit, f64)], key: impl Fn(&Unit) -> K) -> Self {
        let mut level = Self {
            group: Vec::with_capacity(units.len()),
            denominators: Vec::new(),
            groups: 0,
            draws: OnceCell::new(),
        };
        let mut last = None;
        for (unit, denominator) in units {
            let key = key(unit);
            if last.as_ref() != Some(&key) {
                level.denominators.push(0.0);
                last = Some(key);
            }
            let group = level.denominators.len() - 1;
            level.group.push(u32::try_from(group).expect("units are counted in 32 bits"));
            level.denominators[group] += denominator;
        }
        level.groups = level.denominators.iter().filter(|denominator| **denominator > 0.0).count();
        level
    }

    /// The sum of the squared deviations of groups from a ratio.
    fn deviations(&self, values: &[(u32, f64)], ratio: f64) -> f64 {
        let mut deviations: Vec<f64> = self.denominators.iter().map(|denominator| -ratio * denominator).collect();
        for &(unit, value) in values {
            deviations[self.group[unit as usize] as usize] += value;
        }
        deviations.iter().map(|deviation| deviation * deviation).sum()
    }

    fn draw(&self, seed: u64, rounds: usize) -> Draws {
        let mut random = fastrand::Rng::with_seed(seed);
        let present: Vec<usize> =
            (0..self.denominators.len()).filter(|&group| self.denominators[group] > 0.0).collect();
        let mut draws = Draws { times: vec![0; rounds * self.denominators.len()], denominators: vec![0.0; rounds] };
        for round in 0..rounds {
            for _ in 0..present.len() {
                let group = present[random.usize(..present.len())];
                draws.times[round * self.denominators.len() + group] += 1;
                draws.denominators[round] += self.denominators[group];
            }
        }
        draws
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(count: u16) -> Vec<(Unit, f64)> {
        (0..count).map(|block| (Unit { recording: 0, process: 0, block }, 100.0)).collect()
    }

    #[test]
    fn independent_blocks_are_replicates() {
        let mut random = fastrand::Rng::with_seed(7);
        let replicates = Replicates::new(&units(64), 1, 2000);
        let values: Vec<(u32, f64)> =
            (0..64).map(|unit| (unit, (0..100).filter(|_| random.f64() < 0.1).count() as f64)).collect();
        let estimate = replicates.estimate(&values);
        // Binomial: 0.1 * 0.9 / 6,400.
        let binomial = 0.09 / 6400.0;
        assert!((0.5..2.0).contains(&(estimate.variance / binomial)), "{estimate:?}");
        assert_eq!(estimate.freedom, 63.0);
        let resampled = replicates.bootstrap(&values, &estimate);
        assert!((0.9..1.1).contains(&(resampled / estimate.variance)), "{resampled} {estimate:?}");
        assert_eq!(resampled, Replicates::new(&units(64), 1, 2000).bootstrap(&values, &estimate));
    }

    /// Phases of eight blocks: treated as 64 replicates, the result would look three times too certain.
    #[test]
    fn phases_are_no_replicates_of_each_other() {
        let replicates = Replicates::new(&units(64), 1, 100);
        let values: Vec<(u32, f64)> =
            (0..64).map(|unit| (unit, [40.0, 3.0, 20.0, 55.0, 8.0, 31.0, 60.0, 12.0][unit as usize / 8])).collect();
        let estimate = replicates.estimate(&values);
        assert_eq!(estimate.freedom, 7.0);
    }
}
