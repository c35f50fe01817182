//! Cached results of the reverse map, for a CPU with a sequence of searches.
//!
//! A space and an object are found under the lock of a list, and taking a share of an object writes
//! a line shared by all its users. A CPU with a sequence of searches finds most pages in the same
//! space, or in the same few objects, as do concurrent CPUs. So the CPU keeps the results for the
//! duration of its [walk](super::walker), some dozens of pages. Mappings of an object made in the
//! meantime are not found: like all data of the reverse map, the cache is a hint.

use super::mapping::Place;
use super::walker::Walk;
use crate::file::Object;
use crate::heap::{Bounded, Shared};
use crate::space::core::Core;
use crate::sync::wait::Wait;

/// The number of cached objects.
const OBJECTS: usize = 4;
/// The number of cached mappings of an object. Older mappings are looked up for each page.
const PLACES: usize = if cfg!(test) { 64 } else { 1 << 16 };

/// The cached results of a walk.
#[derive(Debug, Default)]
pub(crate) struct Visits<'w> {
    /// The space that made the last private page.
    pub(super) maker: Option<&'w Core>,
    objects: [Option<Known<'w>>; OBJECTS],
    /// The object of the last page.
    last: usize,
}

impl<'w> Visits<'w> {
    /// Returns the object whose pages name its anchor by `word`: a cached object, or else the
    /// result of `find`, which may replace a cached object.
    #[inline]
    pub(super) fn object(
        &mut self,
        word: u64,
        find: impl FnOnce() -> Option<Shared<Object>>,
    ) -> Option<&mut Known<'w>> {
        let is = |place: &Option<Known<'_>>| place.as_ref().is_some_and(|known| known.word == word);
        if !is(&self.objects[self.last]) {
            self.last = match self.objects.iter().position(is) {
                Some(at) => at,
                None => {
                    let object = find()?;
                    let at = (self.last + 1) % OBJECTS;
                    let before = Some(u64::MAX);
                    self.objects[at] = Some(Known { word, object, places: None, before });
                    at
                }
            };
        }
        self.objects[self.last].as_mut()
    }
}

/// A share of an object, and its mappings.
#[derive(Debug)]
pub(super) struct Known<'w> {
    /// The word by which pages name the object.
    word: u64,
    pub(super) object: Shared<Object>,
    /// The spaces that map the object, the newest mapping first, once they were searched.
    pub(super) places: Option<Bounded<Place<'w>>>,
    /// The remaining mappings are older than the mapping of this number; `None` if there are no
    /// more.
    pub(super) before: Option<u64>,
}

impl<'w> Known<'w> {
    /// Finds the spaces that map the object: only the newest mappings if there are very many, and
    /// none if the heap is exhausted. The first call serves all later calls, because finding one
    /// mapping requires a scan of all newer mappings.
    #[inline]
    pub(super) fn find(&mut self, walk: &'w Walk<'_>, wait: &impl Wait) {
        if self.places.is_none()
            && let Ok((places, before)) = self.object.mappings.all(PLACES, walk, wait)
        {
            (self.places, self.before) = (Some(places), before);
        }
    }
}
