//! What a CPU has found for a while, as it looks for one page after another.
//!
//! A space and an object are found under the lock of the list that leads to them, and a share of an object writes a line that all who have one write. A CPU that looks for one page after another
//! finds most of them in the same space, or of the same few objects, as do the others that look at the same time. So it keeps what it has found for one page as long as its
//! [walk](super::walker) is, that is for some dozens of pages. What begins to map an object meanwhile is not looked at: as all that the reverse map says, this is a hint.

use super::walk::BATCH;
use super::walker::Walk;
use crate::file::Object;
use crate::heap::Shared;
use crate::space::fixed::Core;
use crate::sync::wait::Wait;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;

/// What was found in a walk.
#[derive(Default)]
pub(crate) struct Visits<'w> {
    /// The space that made the last private page.
    pub(super) maker: Cell<Option<&'w Core>>,
    objects: Few<Known<'w>, 4>,
}

impl<'w> Visits<'w> {
    /// The object whose pages name its anchor by `word`, if it was found before. It is the caller's until it is [kept](Self::keep).
    pub(super) fn object(&self, word: u64) -> Option<Known<'w>> {
        self.objects.take(|known| known.object.anchor() == word)
    }

    /// Keeps an object.
    pub(super) fn keep(&self, known: Known<'w>) {
        self.objects.keep(known);
    }
}

impl fmt::Debug for Visits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Visits").finish_non_exhaustive()
    }
}

/// Mappings of an object that are remembered, about. Those that were made before are looked up for each page.
const MOST_PLACES: usize = 64;

/// A share of an object, and where that is mapped.
pub(super) struct Known<'w> {
    pub(super) object: Shared<Object>,
    /// Spaces that map it, the last mapping first, and the distance of each.
    pub(super) places: Vec<(&'w Core, u64)>,
    /// Where the others are: in the mappings that were made before the one of this number, if there may be any.
    pub(super) before: Option<u64>,
}

impl<'w> Known<'w> {
    pub(super) const fn new(object: Shared<Object>) -> Self {
        Self { object, places: Vec::new(), before: Some(u64::MAX) }
    }

    /// Finds the spaces that map the object, but for those of the first mappings where there are many, or the heap is exhausted. The first call does so for all that follow.
    pub(super) fn find(&mut self, walk: &'w Walk<'_>, wait: &impl Wait) {
        while let Some(before) = self.before
            && self.places.len() < MOST_PLACES
            && self.places.try_reserve(BATCH).is_ok()
        {
            let mut places = [const { None }; BATCH];
            self.before = self.object.mappings.next(before, walk, &mut places, wait);
            self.places.extend(places.into_iter().flatten());
        }
    }
}

/// At most `N` values, of which each may be taken out for a while.
struct Few<T, const N: usize> {
    /// In the first places, but for those that are taken out.
    places: [Cell<Option<T>>; N],
    /// How many places were used.
    used: Cell<usize>,
    /// The place behind that of the last one that was taken, and of the last that was kept: what is looked for in an order is there in this order.
    next: Cell<usize>,
    kept: Cell<usize>,
}

impl<T, const N: usize> Default for Few<T, N> {
    fn default() -> Self {
        let places = [const { Cell::new(None) }; N];
        Self { places, used: Cell::new(0), next: Cell::new(0), kept: Cell::new(0) }
    }
}

impl<T, const N: usize> Few<T, N> {
    /// Takes one that `is` it.
    fn take(&self, is: impl Fn(&T) -> bool) -> Option<T> {
        for at in self.from(self.next.get()) {
            match self.places[at].take() {
                Some(value) if is(&value) => {
                    self.next.set(at + 1);
                    return Some(value);
                }
                other => self.places[at].set(other),
            }
        }
        None
    }

    /// Keeps one, in the place of the one that was kept the longest time ago if there are as many as may be.
    fn keep(&self, value: T) {
        let used = self.used.get();
        let free = self.from(self.kept.get()).find(|at| {
            let there = self.places[*at].take();
            let is_free = there.is_none();
            self.places[*at].set(there);
            is_free
        });
        let at = free.unwrap_or(if used < N { used } else { self.kept.get() % N });
        self.used.set(used.max(at + 1));
        self.kept.set(at + 1);
        self.places[at].set(Some(value));
    }

    /// The places that were used, from `first` on.
    fn from(&self, first: usize) -> impl Iterator<Item = usize> + use<T, N> {
        let used = self.used.get();
        let first = if first < used { first } else { 0 };
        (first..used).chain(0..first)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn all<const N: usize>(few: &Few<u32, N>) -> Vec<u32> {
        let mut all: Vec<u32> = few.places.iter().filter_map(Cell::take).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn what_is_kept_is_found_until_others_take_its_place() {
        let few = Few::<u32, 4>::default();
        assert_eq!(few.take(|_| true), None);
        (1..=4).for_each(|value| few.keep(value));
        for round in 0..3 {
            for value in [3, 1, 4, 2] {
                assert_eq!(few.take(|it| *it == value), Some(value), "{round}");
                assert_eq!(few.take(|it| *it == value), None, "taken out");
                few.keep(value);
            }
        }
        few.keep(5);
        let kept = all(&few);
        assert_eq!(kept.len(), 4, "{kept:?}");
        assert!(kept.contains(&5), "{kept:?}");
    }

    #[test]
    fn the_oldest_gives_its_place() {
        let few = Few::<u32, 4>::default();
        (1..=9).for_each(|value| few.keep(value));
        assert_eq!(all(&few), [6, 7, 8, 9]);
    }

    #[test]
    fn what_is_taken_together_is_kept_together() {
        let few = Few::<u32, 8>::default();
        (1..=5).for_each(|value| few.keep(value));
        for _ in 0..10 {
            let taken: Vec<_> = (1..=5).map(|value| few.take(|it| *it == value)).collect();
            assert!(taken.iter().all(Option::is_some), "{taken:?}");
            taken.into_iter().flatten().for_each(|value| few.keep(value));
        }
        assert_eq!((few.used.get(), all(&few)), (5, Vec::from([1, 2, 3, 4, 5])));
    }
}
