//! Rows with few samples: where replicates say too little, the number of samples helps.
//!
//! A row that has 20 samples before and, at a tenth of the rate, happens to have none after, has no variance there: judged by its
//! replicates alone the change is certain. So a row's variance is at least that of independent samples with the share of both
//! sides together, and a change must also be significant by the exact test of two counts. If replicates deviate more than
//! independent samples would, a count stands for correspondingly fewer.

use super::replicates::Estimate;
use super::test::{Tested, welch};
use statrs::function::beta::beta_reg;

/// The samples of a row on both sides.
pub(super) struct Counts {
    /// By side: samples, and the exposure: how many samples there would be if the row's value were 1.
    pub sides: [(f64, f64); 2],
    /// Samples of all rows on both sides; infinite if rows are not parts of a whole: CPU time per second or per request.
    pub shared: f64,
}

impl Counts {
    /// The variance of each side's value if its samples were independent and both sides the same.
    fn variances(&self) -> [f64; 2] {
        let [(a, of_a), (b, of_b)] = self.sides;
        let value = (a + b) / (of_a + of_b).max(f64::MIN_POSITIVE);
        // The total number of samples is fixed: what one row has, others do not.
        let others = (1.0 - (a + b) / self.shared.max(1.0)).max(0.0);
        [of_a, of_b].map(|exposure| value * others / exposure.max(f64::MIN_POSITIVE))
    }

    /// How often chance alone divides the samples as unequally, if each stands for `effect` dependent ones.
    fn exact(&self, effect: f64) -> f64 {
        let [(a, of_a), (b, of_b)] = self.sides;
        let (a, b, share) = (a / effect, b / effect, of_a / (of_a + of_b).max(f64::MIN_POSITIVE));
        // P(X >= a) and P(X <= a) of a binomial X, which the incomplete beta function gives for any a.
        let tail = |a: f64, b: f64, share: f64| if a > 0.0 { beta_reg(a, b + 1.0, share.clamp(0.0, 1.0)) } else { 1.0 };
        (2.0 * tail(a, b, share).min(tail(b, a, 1.0 - share))).min(1.0)
    }
}

/// Tests two estimates of a row.
pub(super) fn test(estimates: [Estimate; 2], counts: &Counts) -> (Tested, [Estimate; 2]) {
    let least = counts.variances();
    let sum = |variances: [f64; 2]| variances[0] + variances[1];
    let effect = (sum([estimates[0].variance, estimates[1].variance]) / sum(least).max(f64::MIN_POSITIVE)).max(1.0);
    let estimates =
        [0, 1].map(|side| Estimate { variance: estimates[side].variance.max(least[side]), ..estimates[side] });
    let tested = welch(&estimates[0], &estimates[1]);
    let exact = if effect.is_finite() { counts.exact(effect) } else { 1.0 };
    (Tested { p: tested.p.max(exact), ..tested }, estimates)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(value: f64, variance: f64) -> Estimate {
        Estimate { value, variance, freedom: 100.0, level: 0 }
    }

    #[test]
    fn exact_probabilities() {
        // Ten tosses: none or ten heads, 2 / 1,024.
        let counts = Counts { sides: [(10.0, 500.0), (0.0, 500.0)], shared: 1e6 };
        assert!((counts.exact(1.0) - 2.0 / 1024.0).abs() < 1e-12);
        // R: binom.test(8, 10, 0.25)'s upper tail, 0.000415802001953125, twice.
        let counts = Counts { sides: [(8.0, 100.0), (2.0, 300.0)], shared: 1e6 };
        assert!((counts.exact(1.0) - 2.0 * 0.000_415_802_001_953_125).abs() < 1e-12);
    }

    #[test]
    fn none_of_few_is_no_change() {
        // 20 of 10,000 before, none of 1,000 after: two are expected.
        let counts = Counts { sides: [(20.0, 10_000.0), (0.0, 1_000.0)], shared: 11_000.0 };
        let (tested, _) = test([estimate(0.002, 0.002 / 10_000.0), estimate(0.0, 0.0)], &counts);
        assert!(tested.p > 0.1, "{tested:?}");
        // With many samples it is a significant change.
        let counts = Counts { sides: [(2_000.0, 1e6), (0.0, 1e5)], shared: 1.1e6 };
        let (tested, _) = test([estimate(0.002, 0.002 / 1e6), estimate(0.0, 0.0)], &counts);
        assert!(tested.p < 1e-9, "{tested:?}");
    }
}
