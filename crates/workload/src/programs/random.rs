//! Random numbers, the same in every run.

/// A small generator of good quality (SplitMix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x0065_6269_7a7a_7921)
    }

    /// Returns a number below `bound`, almost uniformly distributed.
    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((u128::from(mixed) * u128::from(bound)) >> 64) as u64
    }

    /// Shuffles `items` (Fisher and Yates).
    pub(crate) fn shuffle<I>(&mut self, items: &mut [I]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffle_is_a_reproducible_permutation() {
        let shuffled = |seed| {
            let mut items: Vec<u32> = (0..1000).collect();
            Random::new(seed).shuffle(&mut items);
            items
        };
        let items = shuffled(1);
        assert_eq!(items, shuffled(1));
        assert_ne!(items, shuffled(2));
        // On average, a single item of a thousand keeps its place.
        assert!(items.iter().zip(0..).filter(|&(item, at)| *item == at).count() < 20);
        let mut sorted = items;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
    }
}
