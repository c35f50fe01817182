//! The mappings of a memory object: which VMAs of which spaces show its pages.
//!
//! Each VMA of an object has a [`Mapping`], from before it is published until it is freed. It says how far the VMA's addresses are from the
//! numbers of its pages, which stays as it is as long as the VMA is there. So the list of an object's mappings tells where in each space
//! a page of the object can be.
//!
//! A VMA that is [locked](super::locked) has one, too, even if it has no object: what reclaim has to know of a VMA is in one place, and the VMAs that
//! have none cost one test when they are made, and one when they end.

use super::locked::Locked;
use super::walker::Walk;
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::error::OutOfMemory;
use crate::heap::{Bounded, Shared, try_box_with};
use crate::space::Lock;
use crate::space::fixed::Core;
use crate::space::vma::Area;
use crate::sync::order::ObjectMappings;
use crate::sync::spin::SpinLock;
use crate::sync::wait::{Spin, Wait};
use alloc::boxed::Box;
use core::cell::Cell;
use core::fmt;
use core::ptr::NonNull;

/// A space that maps an object, and the [distance](Mapping) of the mapping.
pub(super) type Place<'w> = (&'w Core, u64);

/// The mappings of one object, the last that was made first.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    list: SpinLock<List, ObjectMappings>,
}

#[derive(Debug, Default)]
struct List {
    first: Option<NonNull<Mapping>>,
    /// How many mappings were ever added.
    count: u64,
}

// SAFETY: mappings take themselves off the list before they are gone, and may be reached from all CPUs.
unsafe impl Send for List {}

/// That one VMA maps pages of an object, or is locked.
///
/// *Invariant (mappings are listed):* as long as its [`Listed`] is there it is in the list of its object, if it has one, which the VMA keeps alive longer. Its links
/// are accessed under the list's lock.
pub(crate) struct Mapping {
    /// The object's.
    list: Option<NonNull<Mappings>>,
    /// That the VMA is in its space's list of locked ones, if it is.
    locked: Option<Locked>,
    core: Shared<Core>,
    /// The page number of an address less the number of the page that is there, modulo 2^64.
    distance: u64,
    /// Its place in the order in which mappings were added, from 1.
    number: u64,
    previous: Cell<Option<NonNull<Self>>>,
    next: Cell<Option<NonNull<Self>>>,
}

// SAFETY: only the CPU that holds the list's lock accesses the cells (mappings are listed).
unsafe impl Sync for Mapping {}
// SAFETY: it owns its share of the core.
unsafe impl Send for Mapping {}

impl Mapping {
    /// The mapping of a new VMA of `area` in the space of `core`, if that is of an object, or locked.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    #[inline]
    pub(crate) fn try_new(area: &Area, core: &Shared<Core>) -> Result<Option<Listed>, OutOfMemory> {
        if area.memory.object().is_none() && area.lock() == Lock::No {
            return Ok(None);
        }
        Self::make(area, core).map(Some)
    }

    #[inline(never)]
    fn make(area: &Area, core: &Shared<Core>) -> Result<Listed, OutOfMemory> {
        let distance = (area.range.start >> PAGE_SHIFT).wrapping_sub(area.offset);
        let locked = Locked::try_new(area, core)?;
        let mappings = area.memory.object().map(|object| &object.mappings);
        let (list, core) = (mappings.map(NonNull::from), core.clone());
        let (previous, next) = (Cell::new(None), Cell::new(None));
        // What does not come to be is not dropped either.
        let new =
            try_box_with(|| Self { list, locked, core, distance, number: 0, previous, next })?;
        // No box from here on: to move one is to claim that there is no other pointer.
        let at = NonNull::from(Box::leak(new));
        if let Some(mappings) = mappings {
            mappings.add(at);
        }
        Ok(Listed(at))
    }
}

/// A mapping, which leaves its lists when this is dropped.
#[derive(Debug)]
pub(crate) struct Listed(NonNull<Mapping>);

// SAFETY: as the mapping.
unsafe impl Send for Listed {}
// SAFETY: as the mapping.
unsafe impl Sync for Listed {}

impl Listed {
    /// The VMA lies in `range` now, by an edit in place.
    #[inline]
    pub(crate) fn resize(&self, range: VirtRange) {
        // SAFETY: it is there as long as this.
        if let Some(locked) = unsafe { &self.0.as_ref().locked } {
            locked.resize(range);
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        // SAFETY: it was leaked from a box, and is there until it has left the list.
        unsafe { self.0.as_ref() }.leave();
        // SAFETY: leaked from a box, and no list leads to it any more.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Mapping {
    fn leave(&self) {
        let Some(list) = self.list else { return };
        // SAFETY: the VMA keeps the object (mappings are listed).
        let mut list = unsafe { list.as_ref() }.list.lock(&Spin);
        let (previous, next) = (self.previous.get(), self.next.get());
        match previous {
            // SAFETY: in the list, so they are there (mappings are listed).
            Some(previous) => unsafe { previous.as_ref() }.next.set(next),
            None => list.first = next,
        }
        if let Some(next) = next {
            // SAFETY: as above.
            unsafe { next.as_ref() }.previous.set(previous);
        }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({:?}, {:#x})", self.core.id, self.distance)
    }
}

impl Mappings {
    /// Puts a mapping that was made just now into the list.
    fn add(&self, new: NonNull<Mapping>) {
        let mut list = self.list.lock(&Spin);
        list.count += 1;
        let first = list.first.replace(new);
        // SAFETY: nobody else knows it yet.
        let mapping = unsafe { &mut *new.as_ptr() };
        mapping.number = list.count;
        mapping.next.set(first);
        if let Some(next) = first {
            // SAFETY: in the list, so it is there (mappings are listed).
            unsafe { next.as_ref() }.previous.set(Some(new));
        }
    }

    /// The spaces of all mappings, or of the first `most`, but for spaces that are ending. As [`next`](Self::next) besides.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    pub(super) fn all<'w>(
        &self,
        most: usize,
        walk: &'w Walk<'_>,
        wait: &impl Wait,
    ) -> Result<(Bounded<Place<'w>>, Option<u64>), OutOfMemory> {
        let count = self.list.lock(wait).iter().take(most).count();
        let mut places = Bounded::try_new(count)?;
        let add = |place| _ = places.push(place);
        let rest = self.next(u64::MAX, count, walk, wait, add);
        Ok((places, rest))
    }

    /// Calls `each` with the spaces of the next `most` mappings that were made before the one numbered `before`, but for spaces that are ending. Returns the number of the last, whose space may be
    /// ending, if there are more.
    pub(super) fn next<'w>(
        &self,
        before: u64,
        most: usize,
        walk: &'w Walk<'_>,
        wait: &impl Wait,
        mut each: impl FnMut(Place<'w>),
    ) -> Option<u64> {
        let list = self.list.lock(wait);
        let mut earlier = list.iter().filter(|mapping| mapping.number < before);
        let mut last = Some(before);
        for _ in 0..most {
            let mapping = earlier.next()?;
            if let Some(space) = walk.space(&mapping.core) {
                each((space, mapping.distance));
            }
            last = Some(mapping.number);
        }
        earlier.next().and(last)
    }
}

impl List {
    fn iter(&self) -> impl Iterator<Item = &Mapping> {
        // SAFETY: in the list, which is locked (mappings are listed).
        let mapping = |at: NonNull<Mapping>| unsafe { at.as_ref() };
        core::iter::successors(self.first, move |at| mapping(*at).next.get()).map(mapping)
    }
}
