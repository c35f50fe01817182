//! Where shared anonymous pages are that `mremap` moved.
//!
//! A page that a move finds mapped once takes the page number of its new address. One that other spaces of the family map too keeps
//! its number, which they share. So the space notes the move, and a walk looks there as well. Moves of what has moved before are
//! noted from where the pages were made, and notes of ranges that were moved away again are dropped: there are as many notes
//! as there are moved ranges with shared pages, but no more than [`MOST`]. Pages of which there is no note are not found, and stay in their
//! frames.

use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::error::OutOfMemory;
use crate::heap::try_box;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::order::MovedPages;
use crate::sync::spin::SpinLock;
use crate::sync::wait::Wait;
use alloc::boxed::Box;
use core::ops::ControlFlow;

/// Notes of one space. A walk and a fork look at all of them.
pub(crate) const MOST: usize = if cfg!(test) { 64 } else { 512 };

/// Pages made at `from` may be mapped at `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Note {
    from: VirtRange,
    to: u64,
}

impl Note {
    const fn target(self) -> VirtRange {
        VirtRange::new(self.to, self.to + self.from.len())
    }

    /// The part of it whose pages are in `range` now, as a note of a move on to `next`, where `range` moves to.
    fn moved_on(self, range: VirtRange, next: u64) -> Option<Self> {
        let part = self.target().intersect(range);
        let start = self.from.start + part.start.saturating_sub(self.to);
        let from = VirtRange::new(start, start + part.len());
        let to = next + part.start.saturating_sub(range.start);
        (!part.is_empty() && to != from.start).then_some(Self { from, to })
    }
}

#[derive(Debug)]
struct Node {
    note: Note,
    next: Option<Box<Self>>,
}

/// The notes of a space.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    first: SpinLock<Option<Box<Node>>, MovedPages>,
    /// Whether a note was left out.
    left_out: AtomicBool,
}

/// The shared pages that a move found, by where they were made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Behind {
    /// Some where the move found them.
    pub(crate) here: bool,
    /// Some elsewhere: they have moved before.
    pub(crate) elsewhere: bool,
}

impl Moves {
    /// Notes that shared pages of `from`, those `behind`, have moved to `to`. The caller has claimed both. Where the heap is exhausted, or
    /// there are too many notes, some are left out.
    pub(crate) fn note(&self, from: VirtRange, to: u64, behind: Behind, wait: &impl Wait) {
        let (mut seen, mut all) = (0, true);
        // What was moved there before, one by one, so that no memory is asked for under the lock.
        while behind.elsewhere
            && let Some(on) = self.nth_moved_on(from, to, seen, wait)
        {
            seen += 1;
            all &= self.push(on, wait).is_ok();
        }
        if behind.here {
            all &= self.push(Note { from, to }, wait).is_ok();
        }
        self.forget(from, wait);
        if !all {
            self.left_out.store(true, Ordering::Relaxed);
        }
    }

    /// Whether all moves of shared pages were noted.
    pub(crate) fn is_complete(&self) -> bool {
        !self.left_out.load(Ordering::Relaxed)
    }

    /// Takes over the notes of a parent.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    pub(crate) fn copy_from(&self, parent: &Self, wait: &impl Wait) -> Result<(), OutOfMemory> {
        let mut seen = 0;
        self.left_out.store(!parent.is_complete(), Ordering::Relaxed);
        loop {
            let nth = notes(&parent.first.lock(wait)).nth(seen);
            let Some(note) = nth else { return Ok(()) };
            self.push(note, wait)?;
            seen += 1;
        }
    }

    /// Calls `look` with each other address at which the page that was made at page `index` may be mapped: once, though notes of several ranges may lead there.
    pub(super) fn each(
        &self,
        index: u64,
        wait: &impl Wait,
        mut look: impl FnMut(u64) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let addr = index << PAGE_SHIFT;
        let mut seen = 0;
        loop {
            let nth = {
                let first = self.first.lock(wait);
                let targets = || {
                    let there = notes(&first).filter(|note| note.from.contains(addr));
                    there.map(|Note { from, to }| to + (addr - from.start))
                };
                let nth = targets().nth(seen);
                nth.map(|target| (target, targets().take(seen).any(|before| before == target)))
            };
            let Some((target, again)) = nth else { return ControlFlow::Continue(()) };
            if !again {
                look(target)?;
            }
            seen += 1;
        }
    }

    /// How many notes there are.
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        notes(&self.first.lock(&crate::sync::wait::Spin)).count()
    }

    /// The nth note about pages that are in `range`, as one of their move on to `to`. What is added meanwhile comes first, and is about
    /// pages elsewhere.
    fn nth_moved_on(
        &self,
        range: VirtRange,
        to: u64,
        nth: usize,
        wait: &impl Wait,
    ) -> Option<Note> {
        let first = self.first.lock(wait);
        notes(&first).filter_map(|note| note.moved_on(range, to)).nth(nth)
    }

    fn push(&self, note: Note, wait: &impl Wait) -> Result<(), OutOfMemory> {
        let mut node = try_box(Node { note, next: None })?;
        let mut first = self.first.lock(wait);
        let (mut count, mut known) = (0, false);
        for other in notes(&first) {
            count += 1;
            known |= other == note;
        }
        if known {
            return Ok(());
        }
        if count >= MOST {
            return Err(OutOfMemory);
        }
        node.next = first.take();
        *first = Some(node);
        Ok(())
    }

    /// Drops the notes of pages that were in `range`, all of which have moved on.
    fn forget(&self, range: VirtRange, wait: &impl Wait) {
        let mut gone: Option<Box<Node>> = None;
        {
            let mut first = self.first.lock(wait);
            let (mut rest, mut kept) = (first.take(), &mut *first);
            while let Some(mut node) = rest {
                rest = node.next.take();
                if range.covers(node.note.target()) {
                    node.next = gone.take();
                    gone = Some(node);
                } else {
                    kept = &mut kept.insert(node).next;
                }
            }
        }
        drop_all(gone);
    }
}

fn notes(first: &Option<Box<Node>>) -> impl Iterator<Item = Note> {
    core::iter::successors(first.as_deref(), |node| node.next.as_deref()).map(|node| node.note)
}

/// One by one: there may be too many for a recursion.
fn drop_all(mut next: Option<Box<Node>>) {
    while let Some(mut node) = next {
        next = node.next.take();
    }
}

impl Drop for Moves {
    fn drop(&mut self) {
        drop_all(self.first.get_mut().take());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::wait::Spin;
    use std::vec::Vec;

    const BOTH: Behind = Behind { here: true, elsewhere: true };

    fn pages(start: u64, end: u64) -> VirtRange {
        VirtRange::new(start << PAGE_SHIFT, end << PAGE_SHIFT)
    }

    fn places(moves: &Moves, index: u64) -> Vec<u64> {
        let mut found = Vec::new();
        let _ = moves.each(index, &Spin, |addr| {
            found.push(addr >> PAGE_SHIFT);
            ControlFlow::Continue(())
        });
        found.sort_unstable();
        found
    }

    #[test]
    fn what_moved_twice_is_found_by_where_it_was_made() {
        let moves = Moves::default();
        moves.note(pages(10, 20), 100 << PAGE_SHIFT, BOTH, &Spin);
        assert_eq!(places(&moves, 12), [102]);
        // A part moves on; what was made at the second place moves with it.
        moves.note(pages(105, 108), 300 << PAGE_SHIFT, BOTH, &Spin);
        assert_eq!(places(&moves, 16), [106, 301]);
        assert_eq!(places(&moves, 106), [301]);
        assert!(places(&moves, 30).is_empty());
        let child = Moves::default();
        child.copy_from(&moves, &Spin).unwrap();
        assert_eq!(places(&child, 16), [106, 301]);
    }

    #[test]
    fn moves_there_and_back_leave_no_more_notes_than_ranges() {
        let moves = Moves::default();
        let (here, there) = (pages(10, 20), pages(50, 60));
        for _ in 0..100 {
            moves.note(here, there.start, BOTH, &Spin);
            assert_eq!(places(&moves, 15), [55]);
            moves.note(there, here.start, BOTH, &Spin);
            assert_eq!(places(&moves, 55), [15]);
            assert_eq!(places(&moves, 15), [], "what is at home again needs no note");
            assert_eq!(moves.count(), 1);
        }
        assert!(moves.is_complete());
    }

    #[test]
    fn one_page_that_moves_on_and_on_has_one_note() {
        let moves = Moves::default();
        let mut at = pages(10, 11);
        for number in 1..200 {
            let to = pages(100 * number, 100 * number + 1);
            let behind = Behind { here: number == 1, elsewhere: number != 1 };
            moves.note(at, to.start, behind, &Spin);
            assert_eq!((places(&moves, 10), moves.count()), (Vec::from([100 * number]), 1));
            at = to;
        }
    }

    #[test]
    fn what_is_too_much_is_left_out() {
        let moves = Moves::default();
        for number in 0..MOST as u64 + 1 {
            assert!(moves.is_complete());
            let from = pages(10 + number, 11 + number);
            moves.note(from, (1000 + 2 * number) << PAGE_SHIFT, BOTH, &Spin);
        }
        assert_eq!((moves.count(), moves.is_complete()), (MOST, false));
        let child = Moves::default();
        child.copy_from(&moves, &Spin).unwrap();
        assert!(!child.is_complete());
    }
}
