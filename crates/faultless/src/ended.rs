//! What is left of spaces and objects that were dropped, until a CPU ends it.
//!
//! The end of a space or of an object frees frames, which takes a CPU, and a drop has none at hand. So a drop leaves what
//! there is to free on a list of the subsystem. CPUs empty the list where they hold nothing, and seldom enough that the other
//! calls need not look: when a space or an object is made or a space ends, when they free what they retired, before
//! they say that memory is out, and when the kernel asks for it ([`Cpu::end_dropped`](crate::Cpu::end_dropped)). [`Space::exit`](crate::Space::exit) and
//! [`Object::release`](crate::Object::release) end at once what they are given, unless another CPU that looks at pages or writes them, or a VMA in its grace period,
//! has a share of it.
//!
//! The [`Place`] on the list is allocated together with the space or object, so a drop needs no memory. The list is a stack:
//! a drop pushes with a compare-and-swap, and a CPU takes all of it with a swap. Neither waits, and no place is on the
//! list twice, so the compare-and-swap cannot take one place for another (ABA).
//!
//! A space that a CPU runs when it is dropped has no end: the CPU may use its tables for ever. Its frames and VMAs stay
//! allocated, and the audit finds them.
//!
//! Where the subsystem is dropped first, its frames are of no interest any more: what is dropped later frees its heap
//! memory alone, at once.

use crate::error::OutOfMemory;
use crate::file::{Parts, Unread};
use crate::heap::{Shared, try_box};
use crate::space::remains::Remains;
use crate::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use alloc::boxed::Box;
use core::ptr::{self, NonNull};

/// What there is to end.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "an object takes a frame for its root table anyway")]
pub(crate) enum Left {
    Space(Remains),
    Object(Parts),
    /// A read that nobody completed.
    Reading(Unread),
}

#[derive(Debug)]
struct Node {
    next: AtomicPtr<Node>,
    left: Option<Left>,
}

/// The list of a subsystem, which outlives the subsystem until the last space and object are gone.
#[derive(Debug)]
pub(crate) struct List {
    first: AtomicPtr<Node>,
    /// The subsystem is gone.
    closed: AtomicBool,
}

impl List {
    /// Whether nothing was left, at a glance.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.load(Ordering::Relaxed).is_null()
    }

    fn push(&self, node: Box<Node>) {
        let node = NonNull::from(Box::leak(node));
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: a box until just now, and not on the list yet.
            unsafe { node.as_ref() }.next.store(first, Ordering::Relaxed);
            let (order, relaxed) = (Ordering::SeqCst, Ordering::Relaxed);
            match self.first.compare_exchange(first, node.as_ptr(), order, relaxed) {
                Ok(_) => break,
                Err(now) => first = now,
            }
        }
        // Either the subsystem's end finds the node, or this finds that the subsystem has ended.
        if self.closed.load(Ordering::SeqCst) {
            self.take().for_each(drop);
        }
    }

    /// Takes what was left so far, the last first.
    fn take(&self) -> Taken<'_> {
        Taken { list: self, next: self.first.swap(ptr::null_mut(), Ordering::SeqCst) }
    }
}

/// What was taken off a list. The drop puts the rest back, which is there if ending an item panicked.
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

/// The list, for the subsystem: with it the list is closed.
#[derive(Debug)]
pub(crate) struct Ended(Shared<List>);

impl Ended {
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    pub(crate) fn try_new() -> Result<Self, OutOfMemory> {
        let (first, closed) = (AtomicPtr::new(ptr::null_mut()), AtomicBool::new(false));
        Shared::try_new(List { first, closed }).map(Self)
    }

    /// Whether nothing was left, at a glance.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes what was left so far, the last first.
    pub(crate) fn take(&self) -> Taken<'_> {
        self.0.take()
    }

    /// A place for what will be left of a space or an object.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    pub(crate) fn place(&self) -> Result<Place, OutOfMemory> {
        let node = try_box(Node { next: AtomicPtr::new(ptr::null_mut()), left: None })?;
        Ok(Place(Some((node, self.0.clone()))))
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::SeqCst);
        // What a space leaves may hold the last share of an object, which is dropped with it, and finds the list closed.
        self.0.take().for_each(drop);
    }
}

/// The place of a space or an object on the list, until it is left there or [ends](Self::vacate).
#[derive(Debug)]
pub(crate) struct Place(Option<(Box<Node>, Shared<List>)>);

impl Place {
    /// None: of what is ending.
    pub(crate) const fn none() -> Self {
        Self(None)
    }

    /// Gives the place up: its owner ends now.
    pub(crate) fn vacate(&mut self) {
        self.0 = None;
    }

    /// Puts what `left` says on the list, unless the place was given up.
    pub(crate) fn leave(&mut self, left: impl FnOnce() -> Left) {
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
    fn what_is_left_is_taken_once_the_last_first() {
        let ended = Ended::try_new().unwrap();
        assert!(ended.is_empty());
        for pages in 1..=3 {
            ended.place().unwrap().leave(|| Left::Object(Parts::of_root(ROOT, pages)));
        }
        let mut vacated = ended.place().unwrap();
        vacated.vacate();
        vacated.leave(|| unreachable!("its owner has ended"));
        assert!(!ended.is_empty());
        let pages = ended.take().map(|left| match left {
            Left::Object(parts) => parts.pages(),
            Left::Space(_) | Left::Reading(_) => unreachable!("none was left"),
        });
        assert!(pages.eq([3, 2, 1]));
        assert_eq!(ended.take().count(), 0);
    }

    #[test]
    fn a_closed_list_keeps_nothing() {
        let ended = Ended::try_new().unwrap();
        let list = ended.0.clone();
        let [mut before, mut after] = [(); 2].map(|()| ended.place().unwrap());
        before.leave(left);
        drop(ended);
        assert!(list.is_empty());
        after.leave(left);
        assert!(list.is_empty());
    }

    #[test]
    fn what_is_left_while_the_list_closes_is_freed() {
        for _ in 0..if cfg!(miri) { 20 } else { 2000 } {
            let ended = Ended::try_new().unwrap();
            let list = ended.0.clone();
            let mut place = ended.place().unwrap();
            thread::scope(|scope| {
                scope.spawn(move || place.leave(left));
                drop(ended);
            });
            assert!(list.is_empty());
        }
    }
}
