//! The mappings of a memory object: the VMAs of all spaces that map its pages.
//!
//! Each VMA of an object has a [`Mapping`], from before its publication until it is freed. The
//! mapping stores the distance between the VMA's page addresses and the numbers of its pages, which
//! is constant for the VMA's lifetime. So the list of an object's mappings gives, for each space,
//! the address at which a page of the object can be.
//!
//! A [locked](super::locked) VMA also has a mapping, even without an object: this keeps all data
//! for reclaim in one place, and VMAs without a mapping cost one test at their creation, and one at
//! their end.

use super::locked::Locked;
use super::walker::Walk;
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::error::OutOfMemory;
use crate::heap::{Bounded, Shared, try_box_with};
use crate::space::VmaFlags;
use crate::space::core::Core;
use crate::space::vma::Piece;
use crate::sync::order::ObjectMappings;
use crate::sync::spin::SpinLock;
use crate::sync::wait::{Spin, Wait};
use alloc::boxed::Box;
use core::cell::Cell;
use core::fmt;
use core::ptr::NonNull;

/// A space that maps an object, and the [distance](Mapping) of the mapping.
pub(super) type Place<'w> = (&'w Core, u64);

/// The mappings of one object, the newest first.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    list: SpinLock<List, ObjectMappings>,
}

#[derive(Debug, Default)]
struct List {
    first: Option<NonNull<Mapping>>,
    /// The number of mappings ever added.
    count: u64,
}

// SAFETY: mappings are removed from the list before they are freed, and may be accessed from all
// CPUs.
unsafe impl Send for List {}

/// Records that a VMA maps pages of an object, or is locked.
///
/// *Invariant (mappings are listed):* while its [`Listed`] exists, the mapping is in the list of
/// its object, if any, which the VMA keeps alive longer. Its links are accessed under the list's
/// lock.
pub(crate) struct Mapping {
    /// The list of the object.
    list: Option<NonNull<Mappings>>,
    /// The VMA's entry in its space's list of locked VMAs, if locked.
    locked: Option<Locked>,
    core: Shared<Core>,
    /// The page number of an address minus the number of the page at this address, modulo 2^64.
    distance: u64,
    /// The position in the order in which mappings were added, from 1.
    number: u64,
    previous: Cell<Option<NonNull<Self>>>,
    next: Cell<Option<NonNull<Self>>>,
}

// SAFETY: only the CPU that holds the list's lock accesses the cells (mappings are listed).
unsafe impl Sync for Mapping {}
// SAFETY: the mapping owns its share of the core.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Returns the mapping of a new VMA of `piece` in the space of `core`, if the piece is of an
    /// object, or locked.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    #[inline]
    pub(crate) fn try_new(
        piece: &Piece,
        core: &Shared<Core>,
    ) -> Result<Option<Listed>, OutOfMemory> {
        let is_locked = piece.attributes.flags.contains(VmaFlags::LOCKED);
        if piece.attributes.memory.object().is_none() && !is_locked {
            return Ok(None);
        }
        Self::make(piece, core).map(Some)
    }

    #[inline(never)]
    fn make(piece: &Piece, core: &Shared<Core>) -> Result<Listed, OutOfMemory> {
        let area = piece.area();
        let distance = (area.range.start >> PAGE_SHIFT).wrapping_sub(area.offset);
        let locked = Locked::try_new(area, core)?;
        let mappings = area.memory.object().map(|object| &object.mappings);
        let (list, core) = (mappings.map(NonNull::from), core.clone());
        let (previous, next) = (Cell::new(None), Cell::new(None));
        // Constructed in place, so that a failed allocation drops no mapping.
        let new =
            try_box_with(|| Self { list, locked, core, distance, number: 0, previous, next })?;
        // No box from here on: moving a box would claim that there is no other pointer.
        let at = NonNull::from(Box::leak(new));
        if let Some(mappings) = mappings {
            mappings.add(at);
        }
        Ok(Listed(at))
    }
}

/// A mapping, removed from its lists by the drop.
#[derive(Debug)]
pub(crate) struct Listed(NonNull<Mapping>);

// SAFETY: as the mapping.
unsafe impl Send for Listed {}
// SAFETY: as the mapping.
unsafe impl Sync for Listed {}

impl Listed {
    /// Changes the range of the VMA to `range`, after an edit in place.
    #[inline]
    pub(crate) fn resize(&self, range: VirtRange) {
        // SAFETY: the mapping lives as long as this value.
        if let Some(locked) = unsafe { &self.0.as_ref().locked } {
            locked.resize(range);
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        // SAFETY: the mapping was leaked from a box, and is alive until it has left the list.
        unsafe { self.0.as_ref() }.unlink();
        // SAFETY: leaked from a box, and no list links to the mapping any more.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Mapping {
    fn unlink(&self) {
        let Some(list) = self.list else { return };
        // SAFETY: the VMA keeps the object alive (mappings are listed).
        let mut list = unsafe { list.as_ref() }.list.lock(&Spin);
        let (previous, next) = (self.previous.get(), self.next.get());
        match previous {
            // SAFETY: in the list, so they are alive (mappings are listed).
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
    /// Adds a new mapping to the list.
    fn add(&self, new: NonNull<Mapping>) {
        let mut list = self.list.lock(&Spin);
        list.count += 1;
        let first = list.first.replace(new);
        // SAFETY: no other CPU has a pointer to the mapping yet.
        let mapping = unsafe { &mut *new.as_ptr() };
        mapping.number = list.count;
        mapping.next.set(first);
        if let Some(next) = first {
            // SAFETY: in the list, so it is alive (mappings are listed).
            unsafe { next.as_ref() }.previous.set(Some(new));
        }
    }

    /// Returns the spaces of all mappings, or of the first `most`, except spaces that are ending.
    /// Otherwise as [`next`](Self::next).
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
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

    /// Calls `each` with the spaces of the next `most` mappings older than the mapping numbered
    /// `before`, except spaces that are ending. Returns the number of the last mapping, whose space
    /// may be ending, if there are more.
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
