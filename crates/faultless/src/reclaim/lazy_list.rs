//! The list of the spaces that may have lazily freed pages.
//!
//! # The end of a space
//!
//! The owner of a [`Space`](crate::Space) may move the value while other CPUs reclaim in the space.
//! So the state required for reclaim is in its [`Core`], which the list shares. The tables are
//! freed when the space ends: this removes the space from the list and waits until no CPU has
//! [entered](Entered) the space. (A space that is dropped while a CPU runs it keeps its tables, and
//! stays on the list.)

use crate::addr::VirtRange;
use crate::heap::Shared;
use crate::machine::SpaceId;
use crate::space::core::{Core, Entered};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::order::{LazyHull, LazySpaces};
use crate::sync::spin::SpinLock;
use crate::sync::wait::Wait;
use core::cell::UnsafeCell;

/// A space's record of its lazily freed pages.
#[derive(Debug, Default)]
pub(crate) struct Lazy {
    /// A range that contains all lazily freed pages; possibly without any such page.
    pub(super) hull: SpinLock<Option<VirtRange>, LazyHull>,
    /// Written under the list's lock.
    listed: AtomicBool,
    next: Next,
}

/// The next space in the list.
///
/// *Invariant (listed is locked):* only the CPU that holds the list's lock accesses it.
#[derive(Debug, Default)]
struct Next(UnsafeCell<Option<Shared<Core>>>);

// SAFETY: one CPU at a time accesses the cell (listed is locked).
unsafe impl Sync for Next {}
// SAFETY: the link owns the rest of the list.
unsafe impl Send for Next {}

impl Lazy {
    /// Returns the range that may contain lazily freed pages.
    pub(crate) fn hull(&self, wait: &impl Wait) -> Option<VirtRange> {
        *self.hull.lock(wait)
    }

    /// Records that pages of the hull at `from` have moved to `to`.
    pub(crate) fn moved(&self, wait: &impl Wait, from: VirtRange, to: VirtRange) {
        let mut hull = self.hull.lock(wait);
        if let Some(old) = hull.filter(|old| !old.intersect(from).is_empty()) {
            *hull = Some(old.hull(to));
        }
    }

    fn note(&self, wait: &impl Wait, range: VirtRange) {
        add(&mut self.hull.lock(wait), range);
    }
}

/// Extends a hull to `range`.
pub(super) fn add(hull: &mut Option<VirtRange>, range: VirtRange) {
    *hull = Some(hull.map_or(range, |old| old.hull(range)));
}

/// The spaces that may have lazily freed pages.
#[derive(Debug, Default)]
pub(crate) struct Spaces {
    first: SpinLock<Option<Shared<Core>>, LazySpaces>,
}

/// Iterative: with many spaces that were dropped without being ended, a recursion could be too
/// deep.
impl Drop for Spaces {
    fn drop(&mut self) {
        let mut next = self.first.get_mut().take();
        while let Some(core) = next {
            // SAFETY: no other CPU can access the list any more (listed is locked).
            next = unsafe { (*core.lazy.next.0.get()).take() };
        }
    }
}

impl Spaces {
    /// Records that pages of `range` of the space of `core` are lazily freed. The caller excludes
    /// writers of the range, or no other CPU can reach the space.
    pub(crate) fn note(&self, wait: &impl Wait, core: &Shared<Core>, range: VirtRange) {
        core.lazy.note(wait, range);
        let mut first = self.first.lock(wait);
        if !core.lazy.listed.swap(true, Ordering::Relaxed) {
            // SAFETY: listed is locked.
            unsafe { *core.lazy.next.0.get() = first.take() };
            *first = Some(core.clone());
        }
    }

    /// Returns whether no space may have lazily freed pages.
    pub(super) fn is_empty(&self, wait: &impl Wait) -> bool {
        self.first.lock(wait).is_none()
    }

    /// Removes a space that is about to end from the list.
    pub(crate) fn remove(&self, wait: &impl Wait, core: &Shared<Core>) {
        if !core.lazy.listed.load(Ordering::Relaxed) {
            return;
        }
        let mut first = self.first.lock(wait);
        let mut at: *mut Option<Shared<Core>> = &mut *first;
        // SAFETY: the first link, or a link of a listed space: alive, and accessed only by this CPU
        // (listed is locked).
        while let Some(listed) = unsafe { &*at } {
            let next = listed.lazy.next.0.get();
            if listed.same(core) {
                // SAFETY: as above. The space itself keeps the target of `at` alive.
                unsafe { *at = (*next).take() };
                break;
            }
            at = next;
        }
        core.lazy.listed.store(false, Ordering::Relaxed);
    }

    /// Enters the listed space with the highest number below `below` that is not ending.
    pub(super) fn enter(&self, wait: &impl Wait, below: SpaceId) -> Option<Entered> {
        let first = self.first.lock(wait);
        let mut best: Option<&Shared<Core>> = None;
        let mut at = first.as_ref();
        while let Some(core) = at {
            if core.id.0 < below.0 && best.is_none_or(|best| best.id.0 < core.id.0) {
                best = Some(core);
            }
            // SAFETY: alive, and accessed only by this CPU while `first` is held (listed is
            // locked).
            at = unsafe { &*core.lazy.next.0.get() }.as_ref();
        }
        best.and_then(Entered::new)
    }
}
