//! The bit of statistics that a benchmark needs: mean with its interval, median, a line through points.

/// A mean and the half width of its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Interval {
    /// The mean.
    pub(crate) mean: f64,
    /// Half the width of the 95 % interval (Student's t).
    pub(crate) half: f64,
    /// Number of values.
    pub(crate) count: usize,
}

impl Interval {
    /// From at least two values; `None` for fewer.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let count = values.len();
        if count < 2 {
            return None;
        }
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let error = (squares / (count - 1) as f64 / count as f64).sqrt();
        Some(Self { mean, half: student(count - 1) * error, count })
    }

    /// Upper end.
    pub(crate) fn upper(&self) -> f64 {
        self.mean + self.half
    }
}

/// The 97.5 % quantile of Student's t. Up to 4 degrees of freedom from the table, above by the Cornish-Fisher expansion
/// (Abramowitz and Stegun 26.7.5), good to 2 in 1,000 there.
fn student(freedom: usize) -> f64 {
    const TABLE: [f64; 4] = [12.706, 4.303, 3.182, 2.776];
    if let Some(quantile) = freedom.checked_sub(1).and_then(|row| TABLE.get(row)) {
        return *quantile;
    }
    let (z, n) = (1.959_964_f64, freedom as f64);
    let first = (z.powi(3) + z) / 4.0;
    let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
    let third = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
    z + first / n + second / n.powi(2) + third / n.powi(3)
}

/// By how much something takes longer in one state than in another, from alternating rounds of runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Longer {
    /// Difference in percent between the slowest of the fastest tenth of all runs in each state: other activity only makes runs longer,
    /// never shorter.
    pub(crate) percent: f64,
    /// The 95 % interval, from rounds drawn again and again with replacement (the bootstrap: Efron and Tibshirani 1993, chapter 13).
    pub(crate) interval: [f64; 2],
}

impl Longer {
    /// From the same number of rounds in each state; `None` for fewer than two, or without any run.
    pub(crate) fn of(without: &[Vec<f64>], with: &[Vec<f64>]) -> Option<Self> {
        const DRAWS: usize = 2_000;
        let rounds = without.len();
        if rounds < 2 || with.len() != rounds {
            return None;
        }
        let percent = |chosen: &[usize]| -> Option<f64> {
            let of = |state: &[Vec<f64>]| fastest_tenth(chosen.iter().filter_map(|&round| state.get(round)).flatten());
            Some((of(with)? / of(without)? - 1.0) * 100.0)
        };
        // The same each time, so that the same figures give the same interval.
        let mut drawn = fastrand::Rng::with_seed(1);
        let mut again = || percent(&(0..rounds).map(|_| drawn.usize(..rounds)).collect::<Vec<_>>());
        let mut draws = (0..DRAWS).map(|_| again()).collect::<Option<Vec<f64>>>()?;
        draws.sort_by(f64::total_cmp);
        let at = |part: f64| draws.get((part * DRAWS as f64) as usize).copied();
        Some(Self { percent: percent(&(0..rounds).collect::<Vec<_>>())?, interval: [at(0.025)?, at(0.975)?] })
    }
}

/// The slowest of the fastest tenth; `None` if there are no values.
fn fastest_tenth<'a>(values: impl Iterator<Item = &'a f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.copied().collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 10).copied()
}

/// The middle value; `None` if there are no values.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted.get(middle).copied(),
        _ => Some(f64::midpoint(*sorted.get(middle.checked_sub(1)?)?, *sorted.get(middle)?)),
    }
}

/// Intercept and slope of the line with the least squares through (x, y); `None` for fewer than two different x.
pub(crate) fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let count = points.len() as f64;
    let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / count;
    let mean_y = points.iter().map(|(_, y)| y).sum::<f64>() / count;
    let spread: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let together: f64 = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    // Also false for NaN, if there are no points.
    (spread > 0.0).then(|| (mean_y - together / spread * mean_x, together / spread))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_table() {
        for (freedom, table) in [(1, 12.706), (4, 2.776), (5, 2.571), (9, 2.262), (19, 2.093), (120, 1.980)] {
            assert!((student(freedom) - table).abs() < 0.002 * table, "{freedom}: {}", student(freedom));
        }
    }

    #[test]
    fn interval_of_known_values() {
        let interval = Interval::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        assert_eq!((interval.mean, interval.count), (3.0, 5));
        assert!((interval.half - 2.776 * (0.5_f64).sqrt()).abs() < 1e-9);
        assert_eq!(Interval::of(&[1.0]), None);
    }

    #[test]
    fn what_takes_longer_does_so_whatever_else_the_machine_does() {
        // A third of all rounds are half as long again.
        let disturbed = |round: usize| if round.is_multiple_of(3) { 1.5 } else { 1.0 };
        let rounds = |shift: usize, each: f64| -> Vec<Vec<f64>> {
            let run = |round: usize, run: usize| {
                each * disturbed(round + shift) * (1.0 + (round * 7 + run * 3) as f64 % 10.0 / 1_000.0)
            };
            (0..20).map(|round| (0..4).map(|at| run(round, at)).collect()).collect()
        };
        let longer = Longer::of(&rounds(0, 10.0), &rounds(1, 10.4)).unwrap();
        assert!((longer.percent - 4.0).abs() < 0.5, "{longer:?}");
        let [low, high] = longer.interval;
        assert!(low <= 4.1 && high >= 3.9 && high - low < 2.0, "{longer:?}");
        assert_eq!(Longer::of(&rounds(0, 1.0), &rounds(0, 1.0)).unwrap().percent, 0.0);
        assert_eq!(Longer::of(&[vec![1.0]], &[vec![1.0]]), None);
        assert_eq!(Longer::of(&[vec![], vec![]], &[vec![1.0], vec![]]), None);
    }

    #[test]
    fn line_and_median() {
        let (intercept, slope) = line(&[(2.0, 7.0), (30.0, 63.0), (200.0, 403.0)]).unwrap();
        assert!((intercept - 3.0).abs() < 1e-9 && (slope - 2.0).abs() < 1e-9);
        assert_eq!(line(&[(1.0, 1.0)]), None);
        assert_eq!(line(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }
}
