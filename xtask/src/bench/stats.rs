//! The little statistics a benchmark needs: mean with its interval, median, a line through points.

/// A mean and the half width of its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Interval {
    /// The mean.
    pub(crate) mean: f64,
    /// Half the width of the 95 % interval (Student's t).
    pub(crate) half: f64,
    /// Values it is made of.
    pub(crate) count: usize,
}

impl Interval {
    /// Of at least two values; `None` of fewer.
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

/// The middle value; `None` of none.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted.get(middle).copied(),
        _ => Some(f64::midpoint(*sorted.get(middle.checked_sub(1)?)?, *sorted.get(middle)?)),
    }
}

/// Intercept and slope of the line with the least squares through (x, y); `None` of fewer than two different x.
pub(crate) fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let count = points.len() as f64;
    let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / count;
    let mean_y = points.iter().map(|(_, y)| y).sum::<f64>() / count;
    let spread: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let together: f64 = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    // Also false for the NaN of no points.
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
