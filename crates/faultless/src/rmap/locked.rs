//! The locked parts of a space (`mlock`): pages mapped there are not evicted.
//!
//! Each locked VMA has a [`Locked`] in its [mapping](super::mapping), from before its publication
//! until it is freed. Reclaim arrives through the reverse map, with a space and an address, but
//! without a VMA. So reclaim checks this list after taking the page's entries.

use crate::addr::VirtRange;
use crate::error::OutOfMemory;
use crate::heap::{Shared, try_box_with};
use crate::space::MemoryLock;
use crate::space::area::Area;
use crate::space::core::Core;
use crate::sync::order::LockedAreas;
use crate::sync::spin::SpinLock;
use crate::sync::wait::{Spin, Wait};
use alloc::boxed::Box;
use core::cell::Cell;
use core::fmt;
use core::ptr::NonNull;

/// The locked VMAs of one space, the newest first.
#[derive(Debug, Default)]
pub(crate) struct LockedVmas {
    first: SpinLock<First, LockedAreas>,
}

#[derive(Debug, Default)]
struct First(Option<NonNull<Node>>);

// SAFETY: nodes are removed from the list before they are freed, and may be accessed from all CPUs.
unsafe impl Send for First {}

/// The range of one locked VMA.
///
/// *Invariant (locked is listed):* while its [`Locked`] exists, the node is in the list of its
/// space's core, of which it has a share. Its cells are accessed under the list's lock.
struct Node {
    core: Shared<Core>,
    range: Cell<VirtRange>,
    previous: Cell<Option<NonNull<Self>>>,
    next: Cell<Option<NonNull<Self>>>,
}

// SAFETY: only the CPU that holds the list's lock accesses the cells (locked is listed).
unsafe impl Sync for Node {}
// SAFETY: the node owns its share of the core.
unsafe impl Send for Node {}

/// Marks a VMA as locked; the drop ends the lock.
pub(crate) struct Locked(NonNull<Node>);

// SAFETY: as the node.
unsafe impl Send for Locked {}
// SAFETY: as the node.
unsafe impl Sync for Locked {}

impl Locked {
    /// Returns the `Locked` of a new VMA of `area` in the space of `core`, if the area is locked.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    #[inline]
    pub(crate) fn try_new(
        area: Area<'_>,
        core: &Shared<Core>,
    ) -> Result<Option<Self>, OutOfMemory> {
        if area.lock() == MemoryLock::No { Ok(None) } else { Self::at(area.range, core).map(Some) }
    }

    #[inline(never)]
    fn at(range: VirtRange, core: &Shared<Core>) -> Result<Self, OutOfMemory> {
        let (range, core) = (Cell::new(range), core.clone());
        let (previous, next) = (Cell::new(None), Cell::new(None));
        let new = try_box_with(|| Node { core, range, previous, next })?;
        // No box from here on: moving a box would claim that there is no other pointer.
        let at = NonNull::from(Box::leak(new));
        // SAFETY: leaked just now.
        let node = unsafe { at.as_ref() };
        let mut first = node.core.locked.first.lock(&Spin);
        node.next.set(first.0);
        if let Some(next) = first.0.replace(at) {
            // SAFETY: in the list, so it is alive (locked is listed).
            unsafe { next.as_ref() }.previous.set(Some(at));
        }
        drop(first);
        Ok(Self(at))
    }

    fn node(&self) -> &Node {
        // SAFETY: the node lives as long as this value (locked is listed).
        unsafe { self.0.as_ref() }
    }

    /// Changes the range of the VMA to `range`, after an edit in place.
    pub(crate) fn resize(&self, range: VirtRange) {
        let node = self.node();
        let _first = node.core.locked.first.lock(&Spin);
        node.range.set(range);
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let node = self.node();
        {
            let mut first = node.core.locked.first.lock(&Spin);
            let (previous, next) = (node.previous.get(), node.next.get());
            match previous {
                // SAFETY: in the list, so they are alive (locked is listed).
                Some(previous) => unsafe { previous.as_ref() }.next.set(next),
                None => first.0 = next,
            }
            if let Some(next) = next {
                // SAFETY: as above.
                unsafe { next.as_ref() }.previous.set(previous);
            }
        }
        // SAFETY: leaked from a box, and no list links to the node any more.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl fmt::Debug for Locked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Locked({:?})", self.node().core.id)
    }
}

impl LockedVmas {
    /// Returns whether a locked VMA contains `addr`.
    pub(crate) fn contains(&self, addr: u64, wait: &impl Wait) -> bool {
        let first = self.first.lock(wait);
        // SAFETY: in the list, which is locked (locked is listed).
        let node = |at: NonNull<Node>| unsafe { at.as_ref() };
        let mut nodes = core::iter::successors(first.0.map(node), |at| at.next.get().map(node));
        nodes.any(|node| node.range.get().contains(addr))
    }
}
