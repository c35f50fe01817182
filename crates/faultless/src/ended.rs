//! The remains of dropped spaces and objects, until a CPU ends them.
//!
//! The end of a space or of an object frees frames, which requires a CPU, and a drop has no CPU. So
//! a drop puts the remains on a list of the subsystem. CPUs empty the list while they hold no
//! locks, and only in calls rare enough to keep the check off the other paths: when a space or an
//! object is made or a space ends, when they free retired objects, before they report
//! out-of-memory, and on request of the kernel ([`Cpu::end_dropped`](crate::Cpu::end_dropped)).
//! [`Space::exit`](crate::Space::exit) and [`Object::release`](crate::Object::release) end their
//! argument at once, unless a further share exists: of another CPU that scans or writes pages, or
//! of a VMA in its grace period.
//!
//! The [`Place`] on the list is allocated together with the space or object, so a drop needs no
//! memory. The list is a stack: a drop pushes with a compare-and-swap, and a CPU takes the whole
//! list with a swap. Neither waits. No place is pushed twice, so the compare-and-swap is not
//! subject to the ABA problem.
//!
//! A space that is dropped while a CPU runs it is never ended, because the CPU may use its tables
//! indefinitely. Its frames and VMAs stay allocated, and the audit reports them.
//!
//! If the subsystem is dropped first, its frames no longer matter: a later drop of a space or
//! object only frees its heap memory, at once.

use crate::error::OutOfMemory;
use crate::file::{Parts, Unread};
use crate::heap::{Shared, try_box};
use crate::space::dropped::DroppedSpace;
use crate::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use alloc::boxed::Box;
use core::ptr::{self, NonNull};

/// An item on the list.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "an object needs a frame for its root table in any case"
)]
pub(crate) enum Left {
    Space(DroppedSpace),
    Object(Parts),
    /// A read that was never completed.
    Reading(Unread),
}

#[derive(Debug)]
struct Node {
    next: AtomicPtr<Node>,
    left: Option<Left>,
}

/// The list of a subsystem. It lives until the subsystem and its last space and object are dropped.
#[derive(Debug)]
pub(crate) struct List {
    first: AtomicPtr<Node>,
    /// The subsystem was dropped.
    closed: AtomicBool,
}

impl List {
    /// Returns whether the list looks empty (racy).
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.load(Ordering::Relaxed).is_null()
    }

    fn push(&self, node: Box<Node>) {
        let node = NonNull::from(Box::leak(node));
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node was just leaked from a box, and is not on the list yet.
            unsafe { node.as_ref() }.next.store(first, Ordering::Relaxed);
            let (order, relaxed) = (Ordering::SeqCst, Ordering::Relaxed);
            match self.first.compare_exchange(first, node.as_ptr(), order, relaxed) {
                Ok(_) => break,
                Err(now) => first = now,
            }
        }
        // Either the drop of the subsystem finds the node, or this code finds the list closed.
        if self.closed.load(Ordering::SeqCst) {
            self.take().for_each(drop);
        }
    }

    /// Takes all items so far, the last first.
    fn take(&self) -> Taken<'_> {
        Taken { list: self, next: self.first.swap(ptr::null_mut(), Ordering::SeqCst) }
    }
}

/// Items taken off a list. If ending an item panics, the drop puts the remaining items back.
#[derive(Debug)]
pub(crate) struct Taken<'l> {
    list: &'l List,
    next: *mut Node,
}

impl Taken<'_> {
    fn next_node(&mut self) -> Option<Box<Node>> {
        let node = NonNull::new(self.next)?;
        // SAFETY: `push` leaked the box, and the swap took it off the list for this CPU alone.
        let node = unsafe { Box::from_raw(node.as_ptr()) };
        self.next = node.next.load(Ordering::Relaxed);
        Some(node)
    }
}

impl Iterator for Taken<'_> {
    type Item = Left;

    fn next(&mut self) -> Option<Left> {
        self.next_node()?.left
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        while let Some(node) = self.next_node() {
            self.list.push(node);
        }
    }
}

/// The subsystem's handle to the list; its drop closes the list.
#[derive(Debug)]
pub(crate) struct Ended(Shared<List>);

impl Ended {
    /// Creates an empty list.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub(crate) fn try_new() -> Result<Self, OutOfMemory> {
        let (first, closed) = (AtomicPtr::new(ptr::null_mut()), AtomicBool::new(false));
        Shared::try_new(List { first, closed }).map(Self)
    }

    /// Returns whether the list looks empty (racy).
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes all items so far, the last first.
    pub(crate) fn take(&self) -> Taken<'_> {
        self.0.take()
    }

    /// Returns a place for the remains of a space or an object.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub(crate) fn place(&self) -> Result<Place, OutOfMemory> {
        let node = try_box(Node { next: AtomicPtr::new(ptr::null_mut()), left: None })?;
        Ok(Place(Some((node, self.0.clone()))))
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::SeqCst);
        // The remains of a space may hold the last share of an object, which is dropped with them,
        // and finds the list closed.
        self.0.take().for_each(drop);
    }
}

/// The place of a space or an object on the list, until used by [`push`](Self::push) or
/// [vacated](Self::vacate).
#[derive(Debug)]
pub(crate) struct Place(Option<(Box<Node>, Shared<List>)>);

impl Place {
    /// Returns no place: for an item that is ending.
    pub(crate) const fn none() -> Self {
        Self(None)
    }

    /// Releases the place: its owner is ended now.
    pub(crate) fn vacate(&mut self) {
        self.0 = None;
    }

    /// Puts the result of `left` on the list, unless the place was vacated.
    pub(crate) fn push(&mut self, left: impl FnOnce() -> Left) {
        if let Some((mut node, list)) = self.0.take() {
            node.left = Some(left());
            list.push(node);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::addr::FrameNumber;
    use crate::file::Top;
    use std::thread;

    const ROOT: Top = Top { table: FrameNumber(7), level: 1 };

    fn left() -> Left {
        Left::Object(Parts::of_root(ROOT, 1))
    }

    #[test]
    fn items_are_taken_once_last_first() {
        let ended = Ended::try_new().unwrap();
        assert!(ended.is_empty());
        for pages in 1..=3 {
            ended.place().unwrap().push(|| Left::Object(Parts::of_root(ROOT, pages)));
        }
        let mut vacated = ended.place().unwrap();
        vacated.vacate();
        vacated.push(|| unreachable!("the owner has ended"));
        assert!(!ended.is_empty());
        let pages = ended.take().map(|left| match left {
            Left::Object(parts) => parts.pages(),
            Left::Space(_) | Left::Reading(_) => unreachable!("only an object ended"),
        });
        assert!(pages.eq([3, 2, 1]));
        assert_eq!(ended.take().count(), 0);
    }

    #[test]
    fn a_closed_list_drops_its_items() {
        let ended = Ended::try_new().unwrap();
        let list = ended.0.clone();
        let [mut before, mut after] = [(); 2].map(|()| ended.place().unwrap());
        before.push(left);
        drop(ended);
        assert!(list.is_empty());
        after.push(left);
        assert!(list.is_empty());
    }

    #[test]
    fn items_pushed_during_the_close_are_freed() {
        for _ in 0..if cfg!(miri) { 20 } else { 2000 } {
            let ended = Ended::try_new().unwrap();
            let list = ended.0.clone();
            let mut place = ended.place().unwrap();
            thread::scope(|scope| {
                scope.spawn(move || place.push(left));
                drop(ended);
            });
            assert!(list.is_empty());
        }
    }
}
