//! From estimates to conclusions: Student's test, and how many false alarms many tests make.

use super::replicates::Estimate;
use statrs::distribution::{ContinuousCDF as _, StudentsT};

/// Share of false alarms among the changes that are called significant.
pub const LEVEL: f64 = 0.01;

/// The power for which the smallest visible change is computed, so that in fact four of five such changes are found: now and
/// then blocks seem to depend on each other and hide one. In pairs drawn from real recordings 0.87 found 78 to 91 % (`cargo
/// xtask differences`).
const AIM: f64 = 0.92;

/// A difference of two estimates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tested {
    /// After less before.
    pub change: f64,
    /// Its standard error.
    pub error: f64,
    /// Welch's degrees of freedom.
    pub freedom: f64,
    /// How often chance alone produces a change this large.
    pub p: f64,
}

/// Welch's test of two estimates whose variances are known from their replicates.
pub(super) fn welch(before: &Estimate, after: &Estimate) -> Tested {
    let change = after.value - before.value;
    let variance = before.variance + after.variance;
    let freedom = |of: &Estimate| of.variance.powi(2) / of.freedom.max(1.0);
    let freedom = match freedom(before) + freedom(after) {
        sum if sum > 0.0 => (variance.powi(2) / sum).max(1.0),
        _ => 1.0,
    };
    let error = variance.sqrt();
    let p = if error > 0.0 { (2.0 * student(freedom).sf((change / error).abs())).min(1.0) } else { 1.0 };
    Tested { change, error, freedom, p }
}

impl Tested {
    /// The interval that contains the true change in 99 of 100 cases.
    pub fn interval(&self) -> (f64, f64) {
        let reach = quantile(1.0 - LEVEL / 2.0, self.freedom) * self.error;
        (self.change - reach, self.change + reach)
    }
}

/// The smallest change that a test finds four times in five if it is one of `tests`.
pub(super) fn visible(error: f64, freedom: f64, tests: usize) -> f64 {
    let level = LEVEL / tests.max(1) as f64;
    (quantile(1.0 - level / 2.0, freedom) + quantile(AIM, freedom)) * error
}

fn student(freedom: f64) -> StudentsT {
    StudentsT::new(0.0, 1.0, freedom).expect("degrees of freedom are positive")
}

fn quantile(share: f64, freedom: f64) -> f64 {
    student(freedom).inverse_cdf(share)
}

/// Benjamini's and Hochberg's q of each p: the share of false alarms if all with a q this low are accepted.
pub(super) fn false_discoveries(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut q = vec![1.0; p.len()];
    let mut least: f64 = 1.0;
    for (rank, &place) in order.iter().enumerate().rev() {
        least = least.min(p[place] * p.len() as f64 / (rank + 1) as f64);
        q[place] = least;
    }
    q
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q_values() {
        // The example of R's documentation of p.adjust, by hand.
        let q = false_discoveries(&[0.01, 0.04, 0.03, 0.005]);
        let expected = [0.02, 0.04, 0.04, 0.02];
        assert!(q.iter().zip(expected).all(|(q, expected)| (q - expected).abs() < 1e-12), "{q:?}");
        assert!(false_discoveries(&[]).is_empty());
    }

    #[test]
    fn quantiles_of_student() {
        // Tables: t(0.995; 10) = 3.169.
        assert!((quantile(0.995, 10.0) - 3.169).abs() < 1e-3);
        assert!((visible(1.0, 1e6, 1) - 2.576 - 1.405).abs() < 2e-3);
    }
}
