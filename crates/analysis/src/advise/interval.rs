//! The saving of pairs of runs, and its confidence interval.
//!
//! The estimate is the median of the averages of any two differences (Hodges and Lehmann, 1963).
//! The interval inverts the Wilcoxon signed-rank test (Tukey, 1949; M. Hollander and D. A. Wolfe,
//! *Nonparametric Statistical Methods*, section 3.3): its ends are the averages of rank `k` from
//! below and from above, where `k` follows from the exact distribution of the statistic. The test
//! assumes differences that are symmetric about the saving. Without an effect, the two runs of a
//! pair are exchangeable, so the assumption holds.

use crate::rates::median;

/// The probability that an interval does not contain the saving, at most.
const OUTSIDE: f64 = 0.05;
/// Pairs of runs below which no interval has this probability: 2 / 2^5 is 0.0625.
pub const FEWEST: usize = 6;

/// The saving of pairs of runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Saving {
    /// The estimate.
    pub middle: f64,
    /// The interval; `None` with fewer than [`FEWEST`] pairs.
    pub interval: Option<[f64; 2]>,
}

impl Saving {
    /// Computes the saving of `with` against `before`, in pairs; `None` without pairs.
    pub fn of(before: &[f64], with: &[f64]) -> Option<Self> {
        let saved: Vec<f64> = before.iter().zip(with).map(|(before, with)| before - with).collect();
        let mut averages: Vec<f64> = (0..saved.len())
            .flat_map(|at| saved[at..].iter().map(move |other| (at, other)))
            .map(|(at, other)| f64::midpoint(saved[at], *other))
            .collect();
        averages.sort_by(f64::total_cmp);
        let middle = median(&averages)?;
        let interval =
            rank(saved.len()).map(|rank| [averages[rank - 1], averages[averages.len() - rank]]);
        Some(Self { middle, interval })
    }

    /// Returns the saving and its interval, multiplied by `factor`, which is positive.
    pub fn scaled(&self, factor: f64) -> Self {
        let by = |value: f64| value * factor;
        Self { middle: by(self.middle), interval: self.interval.map(|ends| ends.map(by)) }
    }

    /// Returns whether the interval excludes 0.
    pub fn is_sure(&self) -> bool {
        self.interval.is_some_and(|[low, high]| low > 0.0 || high < 0.0)
    }
}

/// Returns the largest `k` for which the statistic of `pairs` differences is below `k` with a
/// probability of at most half of [`OUTSIDE`]; `None` if even 1 is too large.
fn rank(pairs: usize) -> Option<usize> {
    // The probability of each sum of ranks, if each rank is part of it with probability 1/2.
    let mut sums = vec![0.0; pairs * (pairs + 1) / 2 + 1];
    sums[0] = 1.0;
    for rank in 1..=pairs {
        for sum in (0..sums.len()).rev() {
            let without = if sum >= rank { sums[sum - rank] } else { 0.0 };
            sums[sum] = f64::midpoint(sums[sum], without);
        }
    }
    let mut below = 0.0;
    let fits = sums.iter().take_while(|probability| {
        below += **probability;
        below <= OUTSIDE / 2.0
    });
    Some(fits.count()).filter(|rank| *rank > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_of_an_effect_beyond_the_noise_excludes_zero() {
        let before = [2.0, 2.1, 2.05, 1.95, 2.0, 2.02];
        let with = [1.5, 1.52, 1.49, 1.6, 1.48, 1.51];
        let saving = Saving::of(&before, &with).expect("pairs");
        let [low, high] = saving.interval.expect("six pairs");
        assert!((saving.middle - 0.51).abs() < 0.02 && low > 0.3 && high < 0.7, "{saving:?}");
        assert!(low <= saving.middle && saving.middle <= high && saving.is_sure());
        let none = Saving::of(&before, &[2.2, 1.8, 2.02, 1.9, 2.1, 2.0]).expect("pairs");
        assert!(!none.is_sure(), "{none:?}");
        // Load that changes between pairs affects both runs of a pair.
        let loaded = [2.0, 3.0, 4.0, 3.0, 2.0, 2.5];
        let saving = Saving::of(&loaded, &loaded.map(|run| run - 0.1)).expect("pairs");
        let [low, high] = saving.interval.expect("six pairs");
        assert!((saving.middle - 0.1).abs() < 1e-9 && (high - low) < 1e-9, "{saving:?}");
        assert!(Saving::of(&[], &[1.0]).is_none());
    }

    #[test]
    fn fewer_than_six_pairs_have_no_interval() {
        for pairs in 1..FEWEST {
            let saving = Saving::of(&vec![2.0; pairs], &vec![1.0; pairs]).expect("pairs");
            assert_eq!((saving.interval, saving.is_sure()), (None, false));
        }
        assert!(Saving::of(&[2.0; FEWEST], &[1.0; FEWEST]).expect("pairs").is_sure());
    }

    /// The critical values of table A.4 in Hollander and Wolfe, and of R's `qsignrank(0.025, n)`.
    #[test]
    fn ranks_match_the_exact_distribution() {
        let ranks = [(5, None), (6, Some(1)), (7, Some(3)), (8, Some(4)), (9, Some(6))];
        assert_eq!(ranks.map(|(pairs, _)| rank(pairs)), ranks.map(|(_, rank)| rank));
        assert_eq!([10, 15, 20, 30].map(rank), [9, 26, 53, 138].map(Some));
    }

    /// Measures the share of runs without any effect that are called beyond the noise.
    #[test]
    fn intervals_without_an_effect_exclude_zero_at_most_once_in_twenty() {
        const TRIES: u32 = 20_000;
        let mut random = fastrand::Rng::with_seed(1);
        // Run times are skewed: some runs take much longer than the others.
        let mut run = || 1.0 - 0.05 * (1.0 - random.f64()).ln();
        for pairs in [2, 3, 5, 6, 7, 8, 11, 15] {
            let wrong = (0..TRIES).filter(|_| {
                let [before, with] =
                    [(); 2].map(|()| (0..pairs).map(|_| run()).collect::<Vec<_>>());
                Saving::of(&before, &with).expect("pairs").is_sure()
            });
            let share = wrong.count() as f64 / f64::from(TRIES);
            // Three standard deviations of the measurement.
            let most = OUTSIDE + 3.0 * (OUTSIDE * (1.0 - OUTSIDE) / f64::from(TRIES)).sqrt();
            assert!(share <= most, "{pairs} pairs: {share}");
            assert!(share > 0.02 || pairs < FEWEST, "{pairs} pairs: {share} is too cautious");
        }
    }
}
