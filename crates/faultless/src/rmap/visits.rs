//! What a CPU has found for a while, as it looks for one page after another.
//!
//! A space and an object are found under the lock of the list that leads to them, and a share of an object writes a line that all who have one write. A CPU that looks for one page after another
//! finds most of them in the same space, or of the same few objects, as do the others that look at the same time. So it keeps what it has found for one page as long as its
//! [walk](super::walker) is, that is for some dozens of pages. What begins to map an object meanwhile is not looked at: as all that the reverse map says, this is a hint.

use super::mapping::Place;
use super::walker::Walk;
use crate::file::Object;
use crate::heap::{Bounded, Shared};
use crate::space::fixed::Core;
use crate::sync::wait::Wait;

/// Objects that are remembered.
const OBJECTS: usize = 4;
/// Mappings of an object that are remembered. Those that were made before are looked up for each page.
const PLACES: usize = if cfg!(test) { 64 } else { 1 << 16 };

/// What was found in a walk.
#[derive(Debug, Default)]
pub(crate) struct Visits<'w> {
    /// The space that made the last private page.
    pub(super) maker: Option<&'w Core>,
    objects: [Option<Known<'w>>; OBJECTS],
    /// The object of the last page.
    last: usize,
}

impl<'w> Visits<'w> {
    /// The object whose pages name its anchor by `word`: one that was found before, or else what `find` finds, which may take the place of another.
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

/// A share of an object, and where that is mapped.
#[derive(Debug)]
pub(super) struct Known<'w> {
    /// How pages name the object.
    word: u64,
    pub(super) object: Shared<Object>,
    /// Spaces that map it, the last mapping first, once they were looked for.
    pub(super) places: Option<Bounded<Place<'w>>>,
    /// Where the others are: in the mappings that were made before the one of this number, if there may be any.
    pub(super) before: Option<u64>,
}

impl<'w> Known<'w> {
    /// Finds the spaces that map the object, but for those of the first mappings where there are very many, or of all if the heap is exhausted. The first call does so for all that
    /// follow: to find one mapping takes a look at all that were made later.
    #[inline]
    pub(super) fn find(&mut self, walk: &'w Walk<'_>, wait: &impl Wait) {
        if self.places.is_none()
            && let Ok((places, before)) = self.object.mappings.all(PLACES, walk, wait)
        {
            (self.places, self.before) = (Some(places), before);
        }
    }
}
