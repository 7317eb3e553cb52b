//! How far a measured share may be from the true one.

/// Quantile of the normal distribution for a two-sided 99.999 % interval: the matrix of interpreters compares some 200 numbers
/// in one run, so every fifth run would leave a 99.9 % interval by chance.
const Z: f64 = 4.4172;

/// Whether `hits` of `total` lie in the 99.999 % interval of a binomial distribution with this `share`.
///
/// The normal approximation with continuity correction: exact enough if `total * share * (1 - share)` exceeds ten,
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

/// Whether `share` lies in the 99.999 % interval around the `expected` one, give or take 0.03 for what the ends may add, if it is the share
/// of the weight of looks that found something. Looks that differ in weight are worth as many equal ones as have the same variance.
#[must_use]
pub fn within_looks(share: f64, expected: f64, weights: &[u64]) -> bool {
    let squares: f64 = weights.iter().map(|&weight| (weight as f64).powi(2)).sum();
    let equal = (weights.iter().sum::<u64>() as f64).powi(2) / squares;
    (share - expected).abs() <= Z * (expected * (1.0 - expected) / equal).sqrt() + 0.03
}

/// Whether `measured` is at most this `share` (0.05: 5 %) of `expected` away from it.
#[must_use]
pub fn within(measured: f64, expected: f64, share: f64) -> bool {
    (measured - expected).abs() <= share * expected
}

/// Whether `count` fits the ticks of a timer, `rate` per second, that hit a thread which ran for `ran_s` seconds (at
/// least, at most) in this many `stretches`, each ended by another thread that wanted the CPU.
///
/// Each stretch gets the whole ticks that fit into it, and by chance one more: a variance of at most a quarter. So the busier the
/// machine, the wider the 99.999 % interval. A timer makes up in each of its drawn intervals for the one before
/// (`kernel/jitter.rs`), so it is ahead or behind only by what the first and the last interval of the time add: three standard
/// deviations of that. `share` (0.05: 5 %) is what may be wrong besides.
#[must_use]
pub fn within_ticks(count: usize, rate: f64, ran_s: (f64, f64), stretches: u64, share: f64) -> bool {
    let slack = |ran_s: f64| {
        let drawn = of_drawn_intervals(DRAWN_S) * std::f64::consts::SQRT_2 * DRAWN_S;
        (share * ran_s + drawn.min(of_drawn_intervals(ran_s) * ran_s)) * rate
            + Z * 0.5 * (stretches as f64).sqrt()
            + 1.0
    };
    let least = ran_s.0 * rate - slack(ran_s.0);
    let most = ran_s.1 * rate + slack(ran_s.1);
    (least..=most).contains(&(count as f64))
}

/// How long an interval of a CPU's timer is in use.
const DRAWN_S: f64 = 0.5;

/// How much more or less often than asked a CPU's timer may fire in `seconds`, as a share of the rate: its interval is drawn anew
/// within a fifth every half second (`kernel/jitter.rs`), and these are three standard deviations of the mean of that many draws.
#[must_use]
pub fn of_drawn_intervals(seconds: f64) -> f64 {
    let draws = (seconds / DRAWN_S).max(1.0);
    3.0 * (0.2_f64.powi(2) / 3.0 / draws).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_a_thread() {
        // In one piece: 5 %, the timer's 245 ticks and two more. In 400 pieces the chance of each piece is added: 10 ticks are one
        // standard deviation.
        for (count, stretches, inside) in [
            (10_747, 1, true),
            (10_751, 1, false),
            (9_253, 1, true),
            (10_790, 400, true),
            (10_791, 400, false),
            (9_208, 400, false),
        ] {
            assert_eq!(within_ticks(count, 1000.0, (10.0, 10.0), stretches, 0.05), inside, "{count} in {stretches}");
        }
        // Within less than such an interval there is only one.
        assert!(within_ticks(140, 1000.0, (0.1, 0.1), 1, 0.05) && !within_ticks(143, 1000.0, (0.1, 0.1), 1, 0.05));
        // A thread that ran for less than assumed has fewer.
        assert!(within_ticks(8_000, 1000.0, (8.0, 10.0), 1, 0.05));
        assert!(!within_ticks(7_000, 1000.0, (8.0, 10.0), 1, 0.05));
    }

    #[test]
    fn intervals_that_are_drawn() {
        // One draw is within a fifth; its standard deviation is 0.2/√3.
        for (seconds, share) in [(0.1, 0.3464), (0.5, 0.3464), (2.0, 0.1732), (50.0, 0.034_64)] {
            assert!(within(of_drawn_intervals(seconds), share, 0.001), "{seconds} s");
        }
    }

    #[test]
    fn looks_of_different_weight() {
        // Of 100 equal looks the interval is 22 % wide to either side; one that weighs as much as all others makes four of them.
        let equal = [7; 100];
        let unequal = [&[700; 1][..], &[7; 100]].concat();
        for (share, weights, inside) in [
            (0.64, &equal[..], true),
            (0.66, &equal, false),
            (0.16, &equal, true),
            (0.14, &equal, false),
            (1.0, &unequal, true),
        ] {
            assert_eq!(within_looks(share, 0.4, weights), inside, "{share} of {} looks", weights.len());
        }
    }

    #[test]
    fn binomial_interval() {
        // 1,000 coin tosses: standard deviation 15.8, so 70.3 either side.
        for (hits, inside) in [(500, true), (570, true), (571, false), (430, true), (429, false)] {
            assert_eq!(within_binomial(hits, 1000, 0.5), inside, "{hits}");
        }
    }
}
