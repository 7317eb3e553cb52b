//! What a comparison says about drawn pairs: how often it is wrong, and how often it finds a real change.

use super::{Edit, Pool, SMALL};
use crate::analysis::diff::{Difference, Options, diff};
use crate::analysis::{Aggregate, By, NoDistributions};
use fastrand::Rng;

/// How trials are made.
#[derive(Clone, Copy, Debug)]
pub struct Trials {
    /// Pairs.
    pub pairs: u64,
    /// Blocks of a side.
    pub blocks: usize,
    /// Average number of consecutive blocks kept as they were recorded.
    pub run: usize,
    /// Rounds of the comparison's bootstrap.
    pub rounds: usize,
    /// Seed for the random numbers.
    pub seed: u64,
}

impl Trials {
    fn compare(self, before: &Aggregate, after: &Aggregate) -> Difference {
        let options = Options { by: By::Function, rounds: self.rounds, ..Options::default() };
        diff(before, after, options, &NoDistributions)
    }

    /// Number of pairs with any significant row if the side after is edited this way.
    #[must_use]
    pub fn alarms(self, pool: &Pool, edit: Edit<'_>) -> u64 {
        let is_alarm = |pair: &u64| {
            let mut random = Rng::with_seed(self.seed.wrapping_add(*pair));
            let before = pool.draw(&mut random, self.blocks, self.run, Edit::None);
            let after = pool.draw(&mut random, self.blocks, self.run, edit);
            self.compare(&before, &after).changes.iter().any(|change| change.measured.significant)
        };
        (0..self.pairs).filter(is_alarm).count() as u64
    }

    /// A part of this function with one percent of all samples takes five percent more. Returns how many samples per side are
    /// said to suffice to see that in four of five cases, and in how many pairs of that size it is found.
    ///
    /// # Panics
    /// When a drawn recording of [`Trials::blocks`] says nothing.
    #[must_use]
    pub fn found(self, pool: &Pool, function: &str) -> (f64, u64) {
        let small = |slower| Edit::Small { function, share: 0.01, slower };
        let mut random = Rng::with_seed(self.seed);
        // With more samples, more rows are tested, each more strictly: the second round uses as many as the first one calls for.
        let (mut blocks, mut samples) = (self.blocks, 0.0);
        for _ in 0..2 {
            let [a, b] = [(); 2].map(|()| pool.draw(&mut random, blocks, self.run, small(0.0)));
            let visible = self.compare(&a, &b).smallest_visible_share.expect("a drawn recording has replicates");
            samples = (a.samples() + b.samples()) as f64 / 2.0 * (visible / 0.0005).powi(2);
            blocks = (samples / pool.samples_a_block()).ceil() as usize;
        }
        let is_found = |pair: &u64| {
            let mut random = Rng::with_seed(self.seed.wrapping_add(1 + *pair));
            let before = pool.draw(&mut random, blocks, self.run, small(0.0));
            let after = pool.draw(&mut random, blocks, self.run, small(0.05));
            let found = self.compare(&before, &after);
            let mut significant = found.changes.iter().filter(|change| change.measured.significant);
            significant.any(|change| change.name.name == SMALL && change.measured.change > 0.0)
        };
        (samples, (0..self.pairs).filter(is_found).count() as u64)
    }
}

/// Both ends of the 99.9 % interval for the number of hits in `pairs`, if each has this chance.
#[must_use]
pub fn binomial(share: f64, pairs: u64) -> (u64, u64) {
    use statrs::distribution::{Binomial, DiscreteCDF as _};
    let distribution = Binomial::new(share, pairs).expect("a share lies between 0 and 1");
    let low = (0..=pairs).find(|&count| distribution.cdf(count) > 0.0005).unwrap_or(0);
    let high = (0..=pairs).find(|&count| distribution.cdf(count) >= 0.9995).unwrap_or(pairs);
    (low, high)
}
