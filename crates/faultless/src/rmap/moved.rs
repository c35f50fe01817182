//! The addresses of shared anonymous pages that `mremap` has moved.
//!
//! If a page moved by `mremap` has a single mapping, the page gets the page number of its new
//! address. A page shared between spaces keeps its number, which is common to all of them. The
//! space that moves such a page records the move in a note, and a walk of the reverse map reads the
//! notes.
//!
//! - A note describes a run of pages: their numbers, and their addresses. The note is made from the
//!   numbers of the pages themselves, independently of earlier notes.
//! - An address belongs to at most one note, since only one page is there. So the number of notes
//!   is at most the number of addresses of moved shared pages. Neighbouring notes with the same
//!   distance merge.
//! - Two trees index the notes: by the numbers of the pages, for walks, and by their addresses.
//!   Each operation takes logarithmic time for each note found.
//! - A note is dropped when its address is unmapped, or another page moves to this address.
//! - The number of notes is not limited. `mremap` allocates the memory for its notes before the
//!   move, so each moved shared page has its note.

use super::interval_tree::{IntervalTree, Item, Spare};
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::error::OutOfMemory;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::order::MovedPages;
use crate::sync::spin::SpinLock;
use crate::sync::wait::Wait;
use core::ops::ControlFlow;

/// The number of notes that a fork copies before it releases the parent's lock temporarily.
const COPIED: usize = 32;
/// A run of pages with the numbers of the addresses `from`, mapped at addresses starting at `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    pub(crate) from: VirtRange,
    pub(crate) to: u64,
}

impl Note {
    /// Returns the note of the page with number `index`, at `addr`.
    pub(crate) const fn page(index: u64, addr: u64) -> Self {
        Self { from: VirtRange::page(index << PAGE_SHIFT), to: addr }
    }

    /// Adds the page with number `index`, at `addr`, if the page continues the run: it follows the
    /// pages of the run, at the same distance from its number. A note may cover places between its
    /// pages, with unrelated pages or without pages. Returns whether the page continues the run.
    pub(crate) fn extend(&mut self, index: u64, addr: u64) -> bool {
        let page = Self::page(index, addr);
        let continues = page.distance() == self.distance() && addr >= self.target().end;
        if continues {
            self.from.end = page.from.end;
        }
        continues
    }

    /// Returns the distance between the pages and the addresses of their numbers.
    const fn distance(self) -> u64 {
        self.to.wrapping_sub(self.from.start)
    }

    const fn target(self) -> VirtRange {
        VirtRange::new(self.to, self.to + self.from.len())
    }

    /// Returns whether the pages are at the addresses of their numbers.
    const fn is_at_home(self) -> bool {
        self.from.start == self.to
    }

    /// Returns the part whose pages are in `range`.
    fn part(self, range: VirtRange) -> Option<Self> {
        let part = self.target().intersect(range);
        let start = self.from.start + part.start.saturating_sub(self.to);
        let from = VirtRange::new(start, start + part.len());
        (!part.is_empty()).then_some(Self { from, to: part.start })
    }

    const fn by_source(self) -> Item {
        Item { range: self.from, other: self.to }
    }

    const fn by_target(self) -> Item {
        Item { range: self.target(), other: self.from.start }
    }

    const fn of_source(item: Item) -> Self {
        Self { from: item.range, to: item.other }
    }

    const fn of_target(item: Item) -> Self {
        let Item { range, other } = item;
        Self { from: VirtRange::new(other, other + range.len()), to: range.start }
    }
}

/// Each note is in both trees.
#[derive(Debug, Default)]
struct Notes {
    by_source: IntervalTree,
    by_target: IntervalTree,
    count: u64,
}

impl Notes {
    /// Returns how many spare nodes cutting `target` out of all notes requires.
    fn needed_to_cut(&self, target: VirtRange) -> usize {
        let first = self.by_target.next(target, None);
        let splits = |item: Item| item.range.start < target.start && item.range.end > target.end;
        if first.is_some_and(splits) { 2 } else { 0 }
    }

    /// Removes the addresses in `target` from all notes.
    fn cut(&mut self, target: VirtRange, spare: &mut Spare) {
        while let Some(item) = self.by_target.next(target, None) {
            let note = Note::of_target(item);
            self.remove(note, spare);
            let rest = [
                VirtRange::new(item.range.start, target.start.max(item.range.start)),
                VirtRange::new(target.end.min(item.range.end), item.range.end),
            ];
            for part in rest.into_iter().filter_map(|rest| note.part(rest)) {
                self.add(part, spare);
            }
        }
    }

    /// Adds `note`, whose addresses have no note, and merges adjacent notes.
    fn join(&mut self, mut note: Note, spare: &mut Spare) {
        let Note { from, to } = note;
        let end = note.target().end;
        let at = |addr| self.by_target.next(VirtRange::new(addr, addr + 1), None);
        let below = to.checked_sub(1).and_then(at).map(Note::of_target);
        let above = at(end).map(Note::of_target);
        if let Some(below) = below
            && below.from.end == from.start
        {
            self.remove(below, spare);
            (note.from.start, note.to) = (below.from.start, below.to);
        }
        if let Some(above) = above
            && above.from.start == from.end
        {
            self.remove(above, spare);
            note.from.end = above.from.end;
        }
        self.add(note, spare);
    }

    fn add(&mut self, note: Note, spare: &mut Spare) {
        let all = self.by_source.insert(note.by_source(), spare)
            && self.by_target.insert(note.by_target(), spare);
        debug_assert!(all, "the caller has reserved nodes");
        self.count += 1;
    }

    fn remove(&mut self, note: Note, spare: &mut Spare) {
        self.by_source.remove(note.by_source(), spare);
        self.by_target.remove(note.by_target(), spare);
        self.count -= 1;
    }
}

/// The memory for the notes of one move, allocated before the move.
#[derive(Debug, Default)]
pub(crate) struct Reserved(Spare);

impl Reserved {
    /// Reserves memory for `runs` notes, and for the notes of both ranges that are cut by the move.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub(crate) fn try_new(runs: usize) -> Result<Self, OutOfMemory> {
        let mut spare = Spare::default();
        // A note has two nodes, and a note that is cut in two needs another two.
        spare.fill(2 * runs + 4)?;
        Ok(Self(spare))
    }

    /// Returns for how many notes there is memory.
    #[cfg(test)]
    pub(crate) const fn notes(&self) -> usize {
        self.0.count().saturating_sub(4) / 2
    }
}

/// The notes of a space.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    notes: SpinLock<Notes, MovedPages>,
    /// The number of notes. Written under the lock.
    count: AtomicU64,
}

impl Moves {
    /// Records a move of shared pages. The caller has claimed their addresses, and `reserved`
    /// belongs to this move.
    pub(crate) fn note(&self, note: Note, reserved: &mut Reserved, wait: &impl Wait) {
        let noted = self.try_note(note, &mut reserved.0, wait);
        debug_assert!(noted.is_ok(), "the notes of a move were not reserved");
    }

    fn try_note(&self, note: Note, spare: &mut Spare, wait: &impl Wait) -> Result<(), OutOfMemory> {
        if note.is_at_home() {
            self.forget(note.target(), wait);
            return Ok(());
        }
        loop {
            {
                let mut notes = self.notes.lock(wait);
                if spare.count() >= notes.needed_to_cut(note.target()) + 2 {
                    notes.cut(note.target(), spare);
                    notes.join(note, spare);
                    self.count.store(notes.count, Ordering::Relaxed);
                    return Ok(());
                }
            }
            // Not under the lock, because the heap may be slow.
            let more = if spare.count() < 2 { 2 } else { 4 };
            spare.fill(more)?;
        }
    }

    /// As [`forget`](Self::forget), for a range of the move of `reserved`: drops all notes.
    pub(crate) fn forget_all(&self, target: VirtRange, reserved: &mut Reserved, wait: &impl Wait) {
        if self.count.load(Ordering::Relaxed) != 0 {
            let mut notes = self.notes.lock(wait);
            if reserved.0.count() >= notes.needed_to_cut(target) {
                notes.cut(target, &mut reserved.0);
                self.count.store(notes.count, Ordering::Relaxed);
            }
        }
    }

    /// Drops all notes about the addresses in `target`, whose pages are gone. If the heap is
    /// exhausted, some of these notes may stay. A walk finds no page through them.
    #[inline]
    pub(crate) fn forget(&self, target: VirtRange, wait: &impl Wait) {
        if self.count.load(Ordering::Relaxed) != 0 {
            self.forget_some(target, wait);
        }
    }

    #[cold]
    #[inline(never)]
    fn forget_some(&self, target: VirtRange, wait: &impl Wait) {
        let mut spare = Spare::default();
        loop {
            {
                let mut notes = self.notes.lock(wait);
                if spare.count() >= notes.needed_to_cut(target) {
                    notes.cut(target, &mut spare);
                    self.count.store(notes.count, Ordering::Relaxed);
                    return;
                }
            }
            if spare.fill(2).is_err() {
                return;
            }
        }
    }

    /// Copies the notes of a parent; the caller has claimed all of the parent's addresses.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub(crate) fn copy_from(&self, parent: &Self, wait: &impl Wait) -> Result<(), OutOfMemory> {
        let (mut after, mut spare) = (None, Spare::default());
        while parent.count.load(Ordering::Relaxed) != 0 {
            let mut copied = [None; COPIED];
            {
                let notes = parent.notes.lock(wait);
                for place in &mut copied {
                    *place = notes.by_target.next(VirtRange::USER, after);
                    let Some(item) = place else { break };
                    after = Some(item.key());
                }
            }
            for item in copied {
                let Some(item) = item else { return Ok(()) };
                self.try_note(Note::of_target(item), &mut spare, wait)?;
            }
        }
        Ok(())
    }

    /// Calls `look` with each further address at which the page with number `index` may be mapped.
    #[inline]
    pub(super) fn each(
        &self,
        index: u64,
        wait: &impl Wait,
        look: impl FnMut(u64) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return ControlFlow::Continue(());
        }
        self.each_noted(index, wait, look)
    }

    #[cold]
    #[inline(never)]
    fn each_noted(
        &self,
        index: u64,
        wait: &impl Wait,
        mut look: impl FnMut(u64) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let page = VirtRange::page(index << PAGE_SHIFT);
        let mut after = None;
        loop {
            let next = self.notes.lock(wait).by_source.next(page, after);
            let Some(item) = next else { return ControlFlow::Continue(()) };
            after = Some(item.key());
            let Note { from, to } = Note::of_source(item);
            look(to + (page.start - from.start))?;
        }
    }

    /// Returns the number of notes.
    #[cfg(test)]
    pub(crate) fn count(&self) -> u64 {
        let notes = self.notes.lock(&crate::sync::wait::Spin);
        assert_eq!(notes.by_source.check() as u64, notes.count);
        assert_eq!(notes.by_target.check() as u64, notes.count);
        notes.count
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::wait::Spin;
    use std::collections::BTreeMap;
    use std::vec::Vec;

    fn pages(start: u64, end: u64) -> VirtRange {
        VirtRange::new(start << PAGE_SHIFT, end << PAGE_SHIFT)
    }

    fn note(start: u64, end: u64, to: u64) -> Note {
        Note { from: pages(start, end), to: to << PAGE_SHIFT }
    }

    fn add(moves: &Moves, note: Note) {
        moves.note(note, &mut Reserved::try_new(1).unwrap(), &Spin);
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
    fn pages_moved_twice_are_found_by_their_numbers() {
        let moves = Moves::default();
        add(&moves, note(10, 20, 100));
        assert_eq!(places(&moves, 12), [102]);
        // Pages 105 to 107 move again.
        add(&moves, note(15, 18, 300));
        moves.forget(pages(105, 108), &Spin);
        assert_eq!((places(&moves, 16), moves.count()), (Vec::from([301]), 3));
        assert_eq!((places(&moves, 14), places(&moves, 18)), (Vec::from([104]), Vec::from([108])));
        let child = Moves::default();
        child.copy_from(&moves, &Spin).unwrap();
        assert_eq!((places(&child, 16), child.count()), (Vec::from([301]), 3));
        // The pages move back.
        add(&moves, note(15, 18, 105));
        moves.forget(pages(300, 303), &Spin);
        assert_eq!((places(&moves, 16), moves.count()), (Vec::from([106]), 1), "notes merge");
    }

    /// A run continues after unrelated pages. Pages in the gap have different places, with earlier
    /// notes.
    #[test]
    fn a_run_continues_after_a_gap() {
        let at = |index: u64, addr: u64| (index, addr << PAGE_SHIFT);
        let ((index, addr), mut run) = (at(12, 102), note(10, 11, 100));
        assert!(run.extend(index, addr));
        assert_eq!(run, note(10, 13, 100));
        for (index, addr) in [at(14, 103), at(12, 102), at(9, 99), at(13, 104)] {
            assert!(!run.extend(index, addr), "another distance, or not after the run");
        }
        let mut home = note(10, 11, 10);
        assert!(home.extend(12, 12 << PAGE_SHIFT) && home.is_at_home());
    }

    /// The reserved nodes suffice for one run for each page, in a range inside of older notes.
    #[test]
    fn reserved_nodes_suffice_for_all_runs_of_a_move() {
        let moves = Moves::default();
        add(&moves, note(10, 40, 100));
        add(&moves, note(50, 90, 200));
        let mut reserved = Reserved::try_new(8).unwrap();
        moves.forget_all(pages(110, 118), &mut reserved, &Spin);
        for page in 0..8 {
            let run = note(210 - page, 211 - page, 110 + page);
            assert!(reserved.0.count() >= moves.notes.lock(&Spin).needed_to_cut(run.target()) + 2);
            moves.note(run, &mut reserved, &Spin);
        }
        moves.forget_all(pages(210, 218), &mut reserved, &Spin);
        assert_eq!(moves.count(), 2 + 8 + 2);
        assert_eq!((places(&moves, 60), places(&moves, 68)), (Vec::new(), Vec::from([218])));
    }

    #[test]
    fn a_page_moved_back_needs_no_note() {
        let moves = Moves::default();
        for _ in 0..if cfg!(miri) { 4 } else { 100 } {
            add(&moves, note(10, 20, 50));
            moves.forget(pages(10, 20), &Spin);
            assert_eq!((places(&moves, 15), moves.count()), (Vec::from([55]), 1));
            add(&moves, note(10, 20, 10));
            moves.forget(pages(50, 60), &Spin);
            assert_eq!((places(&moves, 15), moves.count()), (Vec::new(), 0));
        }
    }

    #[test]
    fn unmapping_drops_notes() {
        let moves = Moves::default();
        for number in 0..if cfg!(miri) { 10 } else { 1000 } {
            add(&moves, note(10, 12, 100 * number + 100));
            moves.forget(pages(100 * number + 100, 100 * number + 102), &Spin);
        }
        assert_eq!(moves.count(), 0);
    }

    #[test]
    fn thousands_of_notes_are_kept_and_copied() {
        let moves = Moves::default();
        let number = if cfg!(miri) { 20 } else { 5000 };
        (0..number).for_each(|at| add(&moves, note(10 + at, 11 + at, 100_000 - 2 * at)));
        let child = Moves::default();
        child.copy_from(&moves, &Spin).unwrap();
        for moves in [&moves, &child] {
            assert_eq!(moves.count(), number);
            (0..number).for_each(|at| assert_eq!(places(moves, 10 + at), [100_000 - 2 * at]));
        }
    }

    /// Random notes, compared with a map from each address to the number of its page.
    #[test]
    fn notes_agree_with_a_map_of_pages() {
        let (moves, mut map) = (Moves::default(), BTreeMap::new());
        let mut seed = 1_u64;
        let mut draw = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for _ in 0..if cfg!(miri) { 10 } else { 3000 } {
            let (from, to, len) = (draw(60), draw(60), 1 + draw(8));
            if draw(3) == 0 {
                moves.forget(pages(to, to + len), &Spin);
                (to..to + len).for_each(|addr| _ = map.remove(&addr));
            } else {
                add(&moves, note(from, from + len, to));
                for at in 0..len {
                    map.insert(to + at, from + at);
                }
                map.retain(|addr, index| addr != index);
            }
            for index in 0..70 {
                let expected = map.iter().filter(|(_, it)| **it == index).map(|(addr, _)| *addr);
                assert_eq!(places(&moves, index), expected.collect::<Vec<_>>());
            }
            let continues = |(addr, index): (&u64, &u64)| {
                addr.checked_sub(1).and_then(|before| map.get(&before))
                    == index.checked_sub(1).as_ref()
                    && *index != 0
                    && *addr != 0
            };
            let runs = map.iter().filter(|page| !continues(*page)).count() as u64;
            assert_eq!(moves.count(), runs, "neighbours merge");
        }
    }
}
