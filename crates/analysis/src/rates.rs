//! The rates of one configuration's repetitions, and the range of their median. Ranges and medians
//! of other numbers.

/// The smallest number of repetitions with a range of the median. The range of all of `n`
/// repetitions contains the median with a probability of `1 - 2 / 2^n`: 93.75 % for 5, and 96.9 %
/// for 6.
pub const LEAST: usize = 6;
/// Standard deviations on both sides of the middle that contain 95 % of a normal distribution.
const SIDES: f64 = 1.96;

/// Returns the median: the middle value, or the mean of the two middle values. Returns `None`
/// without values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.len().checked_sub(1)? / 2, sorted.len() / 2);
    Some(f64::midpoint(sorted[low], sorted[high]))
}

/// Returns the least and the most of these ratios.
pub fn ends(ratios: impl Iterator<Item = f64>) -> (f64, f64) {
    ratios.fold((f64::INFINITY, 0.0), |(least, most), ratio| (ratio.min(least), ratio.max(most)))
}

/// Rates in the order of measurement.
#[derive(Clone, Debug)]
pub struct Rates {
    measured: Vec<f64>,
    sorted: Vec<f64>,
}

impl Rates {
    /// Creates the rates from the `measured` values.
    pub fn new(measured: Vec<f64>) -> Self {
        let mut sorted = measured.clone();
        sorted.sort_by(f64::total_cmp);
        Self { measured, sorted }
    }

    /// Returns the median.
    pub fn median(&self) -> Option<f64> {
        median(&self.sorted)
    }

    /// Returns half the interquartile range, as a fraction of the median; 0 without rates.
    pub fn spread(&self) -> f64 {
        let count = self.sorted.len();
        let quartiles = self.sorted.get(count / 4).zip(self.sorted.get(count * 3 / 4));
        let spread = quartiles.zip(self.median());
        spread
            .map_or(0.0, |((low, high), median)| (high - low) / 2.0 / median.max(f64::MIN_POSITIVE))
    }

    /// Returns the range of the true median, at a confidence of 95 %. Its ends are the sorted
    /// repetitions whose ranks bound the number of heads of a fair coin with one toss per
    /// repetition, at this confidence. The range needs no assumption on the distribution of the
    /// rates. Returns `None` with fewer than [`LEAST`] repetitions, whose range has a lower
    /// confidence.
    pub fn range(&self) -> Option<(f64, f64)> {
        let count = self.sorted.len();
        if count < LEAST {
            return None;
        }
        let (middle, sides) = (count as f64 / 2.0, SIDES / 2.0 * (count as f64).sqrt());
        let low = (middle - sides).floor().max(1.0) as usize - 1;
        let high = ((middle + sides).ceil() as usize).min(count - 1);
        Some((self.sorted[low], self.sorted[high]))
    }

    /// Returns half of this range, as a fraction of the median.
    pub fn uncertainty(&self) -> Option<f64> {
        let ((low, high), median) = self.range().zip(self.median())?;
        (median > 0.0).then(|| (high - low) / 2.0 / median)
    }

    /// Returns the relative difference between the medians of the even and the odd repetitions of
    /// this configuration.
    pub fn halves(&self) -> Option<f64> {
        let every_other = |first| {
            Self::new(self.measured.iter().copied().skip(first).step_by(2).collect()).median()
        };
        let (one, other) = every_other(0).zip(every_other(1))?;
        (other > 0.0).then(|| (one / other - 1.0).abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(measured: impl IntoIterator<Item = i32>) -> Rates {
        Rates::new(measured.into_iter().map(f64::from).collect())
    }

    #[test]
    fn median_averages_the_two_middle_values() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        assert_eq!(rates([4, 1, 2, 3]).median(), Some(2.5));
    }

    #[test]
    fn spread_is_half_the_interquartile_range() {
        assert_eq!(rates([1, 900, 90, 110, 100]).spread(), 0.1);
        assert_eq!(rates([]).spread(), 0.0);
    }

    #[test]
    fn range_contains_the_median() {
        for count in 0..6 {
            assert_eq!(rates(0..count).range(), None, "{count} repetitions");
        }
        assert_eq!(rates([3, 1, 6, 2, 5, 4]).range(), Some((1.0, 6.0)));
        // The 8th to the 19th of 25 by the binomial distribution. The approximation is one rank
        // wider.
        assert_eq!(rates(1..=25).range(), Some((7.0, 19.0)));
        assert_eq!(rates(1..=25).uncertainty(), Some(6.0 / 13.0));
        assert_eq!(rates([2; 9]).uncertainty(), Some(0.0));
    }

    /// Counts how many of a thousand medians of a known distribution are outside the range: at most
    /// 5 %.
    #[test]
    fn range_contains_95_percent_of_medians() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            f64::from((state >> 40) as u32)
        };
        for count in [6, 9, 15, 25, 45] {
            let median = f64::from(1u32 << 23);
            let outside = (0..1000).filter(|_| {
                let (low, high) =
                    Rates::new((0..count).map(|_| random()).collect()).range().expect("enough");
                !(low..=high).contains(&median)
            });
            let outside = outside.count();
            assert!(outside <= 60, "{outside} of a thousand with {count}");
        }
    }

    #[test]
    fn equal_halves_do_not_differ() {
        assert_eq!(rates([100, 110, 100, 110, 100]).halves(), Some(1.0 - 100.0 / 110.0));
        assert_eq!(rates([5; 8]).halves(), Some(0.0));
        assert_eq!(rates([5]).halves(), None);
    }
}
