//! Sets and states of pages, with a few bits per page, because recordings have millions of pages.

use faultless::PAGE_SIZE;
use std::collections::HashMap;
use std::ops::Range;

/// Returns the pages of `len` bytes from `start` on. The range must not wrap, which
/// [`Trace::check`](crate::Trace::check) ensures for events.
pub(crate) fn pages(start: u64, len: u64) -> Range<u64> {
    start / PAGE_SIZE..(start + len) / PAGE_SIZE
}

/// A set of page numbers, 64 to a word.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageSet {
    words: HashMap<u64, u64>,
}

impl PageSet {
    const PAGES: u64 = 64;

    /// Adds `page`. Returns whether the page was missing.
    pub fn insert(&mut self, page: u64) -> bool {
        let word = self.words.entry(page / Self::PAGES).or_default();
        let bit = 1 << (page % Self::PAGES);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    /// Adds all pages in `range`.
    pub fn insert_all(&mut self, range: Range<u64>) {
        range.for_each(|page| _ = self.insert(page));
    }

    /// Returns whether `page` is in the set.
    pub fn contains(&self, page: u64) -> bool {
        let word = self.words.get(&(page / Self::PAGES));
        word.is_some_and(|word| word >> (page % Self::PAGES) & 1 != 0)
    }

    /// Returns whether the set has no page.
    pub fn is_empty(&self) -> bool {
        self.words.values().all(|word| *word == 0)
    }

    /// Returns the number of pages in `range`.
    pub fn count(&self, range: Range<u64>) -> u64 {
        let (first, last) = (range.start / Self::PAGES, range.end.div_ceil(Self::PAGES));
        let in_word = |at: u64, word: u64| {
            u64::from((word & mask(&range, at * Self::PAGES, Self::PAGES as u32, 1)).count_ones())
        };
        if last.saturating_sub(first) > self.words.len() as u64 {
            return self.words.iter().map(|(at, word)| in_word(*at, *word)).sum();
        }
        (first..last).filter_map(|at| Some(in_word(at, *self.words.get(&at)?))).sum()
    }

    /// Returns the pages in `range`, in any order.
    pub fn list(&self, range: Range<u64>) -> Vec<u64> {
        let (first, last) = (range.start / Self::PAGES, range.end.div_ceil(Self::PAGES));
        let in_word = |at: u64, word: u64| {
            let inside = word & mask(&range, at * Self::PAGES, Self::PAGES as u32, 1);
            let bits = (0..Self::PAGES).filter(move |bit| inside >> bit & 1 != 0);
            bits.map(move |bit| at * Self::PAGES + bit)
        };
        if last.saturating_sub(first) > self.words.len() as u64 {
            return self.words.iter().flat_map(|(at, word)| in_word(*at, *word)).collect();
        }
        let words = (first..last).filter_map(|at| Some((at, *self.words.get(&at)?)));
        words.flat_map(|(at, word)| in_word(at, word)).collect()
    }

    /// Removes the pages in `range`.
    pub fn remove(&mut self, range: Range<u64>) {
        let bits = |at| mask(&range, at * Self::PAGES, Self::PAGES as u32, 1);
        for_words(&mut self.words, &range, Self::PAGES, |at, word| *word &= !bits(at));
        if self.words.len() > 1 << 10 {
            return;
        }
        self.words.retain(|_, word| *word != 0);
    }

    /// Returns the pages, in any order.
    pub fn pages(&self) -> impl Iterator<Item = u64> {
        self.words.iter().flat_map(|(at, word)| {
            let first = at * Self::PAGES;
            (0..Self::PAGES).filter(move |bit| word >> bit & 1 != 0).map(move |bit| first + bit)
        })
    }

    /// Returns the number of pages.
    pub fn len(&self) -> u64 {
        self.words.values().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// The state of a touched page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Mapped.
    There = 1,
    /// Freed by `munmap` or `brk`.
    Returned = 2,
    /// Freed by `MADV_DONTNEED`.
    Discarded = 3,
}

/// The states of pages, 32 to a word.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageStates {
    words: HashMap<u64, u64>,
}

impl PageStates {
    const PAGES: u64 = 32;

    /// Marks `page` as mapped. Returns its earlier state, or `None` for an untouched page.
    pub fn touch(&mut self, page: u64) -> Option<State> {
        let word = self.words.entry(page / Self::PAGES).or_default();
        let shift = page % Self::PAGES * 2;
        let before = *word >> shift & 3;
        *word = *word & !(3 << shift) | (State::There as u64) << shift;
        match before {
            0 => None,
            1 => Some(State::There),
            2 => Some(State::Returned),
            _ => Some(State::Discarded),
        }
    }

    /// Sets the state of all touched pages in `range` to `state`.
    pub fn set(&mut self, range: Range<u64>, state: State) {
        for_words(&mut self.words, &range, Self::PAGES, |at, word| {
            let inside = mask(&range, at * Self::PAGES, Self::PAGES as u32, 2);
            // The lower bit of each touched page in the range.
            let touched = (*word | *word >> 1) & inside & (u64::MAX / 3);
            *word = *word & !(touched * 3) | (touched * state as u64);
        });
    }
}

/// Returns the bits in a word for the pages of `range`. The word has `count` pages from `first` on,
/// of `bits` bits each.
fn mask(range: &Range<u64>, first: u64, count: u32, bits: u32) -> u64 {
    let below = |page: u64| {
        let pages = page.saturating_sub(first).min(count.into()) as u32;
        1u64.checked_shl(pages * bits).map_or(u64::MAX, |bit| bit - 1)
    };
    below(range.end) & !below(range.start)
}

/// Calls `change` for each word with pages of `range`. Each word has `pages`.
fn for_words(
    words: &mut HashMap<u64, u64>,
    range: &Range<u64>,
    pages: u64,
    mut change: impl FnMut(u64, &mut u64),
) {
    if range.is_empty() {
        return;
    }
    let numbers = range.start / pages..=(range.end - 1) / pages;
    // A range may be far larger than its touched part.
    if numbers.end() - numbers.start() >= words.len() as u64 {
        let inside = words.iter_mut().filter(|(at, _)| numbers.contains(at));
        inside.for_each(|(at, word)| change(*at, word));
        return;
    }
    for at in numbers {
        if let Some(word) = words.get_mut(&at) {
            change(at, word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    proptest! {
        #[test]
        fn sets_and_states_match_plain_maps(
            steps in proptest::collection::vec((0u64..200, 0u64..300, 0u8..4), 0..60),
        ) {
            let (mut set, mut plain) = (PageSet::default(), BTreeSet::new());
            let (mut states, mut map) = (PageStates::default(), BTreeMap::new());
            for (page, len, what) in steps {
                let range = page..page + len;
                if what == 0 {
                    set.remove(range.clone());
                    plain.retain(|page| !range.contains(page));
                    states.set(range.clone(), State::Returned);
                    map.range_mut(range).for_each(|(_, state)| *state = State::Returned);
                } else if what == 1 {
                    states.set(range.clone(), State::Discarded);
                    map.range_mut(range).for_each(|(_, state)| *state = State::Discarded);
                } else {
                    prop_assert_eq!(set.insert(page), plain.insert(page));
                    prop_assert_eq!(states.touch(page), map.insert(page, State::There));
                }
                prop_assert_eq!(set.len(), plain.len() as u64);
                prop_assert_eq!(set.is_empty(), plain.is_empty());
                prop_assert_eq!(set.contains(page), plain.contains(&page));
                let range = page.min(len)..page.max(len);
                prop_assert_eq!(set.count(range.clone()), plain.range(range).count() as u64);
            }
        }
    }
}
