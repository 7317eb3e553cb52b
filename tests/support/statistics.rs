//! How far a measured share may lie from the true one.

/// Quantile of the normal distribution for a two-sided 99.9 % interval.
const Z: f64 = 3.2905;

/// Whether `hits` of `total` lie in the 99.9 % interval of a binomial distribution with this `share`.
///
/// The normal approximation with continuity correction: exact enough where `total * share * (1 - share)` passes ten,
/// which is asserted.
///
/// # Panics
/// When there are too few samples to tell.
#[must_use]
pub fn within_binomial(hits: usize, total: usize, share: f64) -> bool {
    let variance = total as f64 * share * (1.0 - share);
    assert!(variance > 10.0, "{total} samples are too few for a share of {share}");
    (hits as f64 - total as f64 * share).abs() <= Z * variance.sqrt() + 0.5
}

/// Whether `measured` is at most this `share` (0.05: 5 %) of `expected` away from it.
#[must_use]
pub fn within(measured: f64, expected: f64, share: f64) -> bool {
    (measured - expected).abs() <= share * expected
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binomial_interval() {
        // 1,000 throws of a coin: standard deviation 15.8, so 52.5 either side.
        for (hits, inside) in [(500, true), (552, true), (553, false), (448, true), (447, false)] {
            assert_eq!(within_binomial(hits, 1000, 0.5), inside, "{hits}");
        }
    }
}
