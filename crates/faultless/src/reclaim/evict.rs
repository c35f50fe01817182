//! Eviction: pages of files leave memory, and [private pages](super::swap) after they became pages
//! of the swap area.
//!
//! A batch of pages is [taken](super::isolate) from its programs, together with the pages' entries
//! in their object. The next steps depend on whether a page is [dirty](crate::file::write_back):
//!
//! - A [lazily freed](super::lazy) page leaves memory if no program has stored to the page since.
//!   Its entries are emptied and flushed at once, because afterwards the memory reads as zeros.
//! - A clean page leaves memory. All of its entries are emptied: a fault finds no page, and reads
//!   the page again. The flush may be deferred, because until a store to the page, a CPU with an
//!   old translation sees the same contents as the store.
//! - A dirty page is first written. Its mappings' entries are emptied and flushed at once, and the
//!   object's entry becomes clean: from here on a program's store faults and marks the page dirty
//!   again, as does a store by the kernel. Then the page is written, and evicted if still clean.
//!
//! There was no other reference to the page while its entries were taken. So earlier stores are
//! included in the write, and later stores mark the page dirty. The writing CPU must have the
//! object's turn to write. If another CPU has the turn, the page is skipped, since the owner of the
//! turn may itself be waiting for memory. So private pages stay with their programs while another
//! CPU writes to the swap area. A CPU without any further page scans again, and then waits for the
//! turn: otherwise a second CPU that repeatedly finds no evictable page could keep the first CPU
//! out.
//!
//! A page stays if it is pinned or in use, if a VMA that maps the page is locked, if the page is
//! being written back, or if its object has no store.

use super::Set;
use super::isolate::{BATCH, Batch, FrameList, Mapping, Page, Referred, Then};
use super::swap::Swap;
use crate::addr::FrameNumber;
use crate::error::{Errno, OutOfMemory};
use crate::file::{Laundry, Object};
use crate::heap::Shared;
use crate::machine::Machine;
use crate::rmap::walk::Found;
use crate::stat::Counter;
use crate::sync::atomic::Ordering;
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::vm::Cpu;

/// Which pages to take.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    /// Clean pages.
    Clean,
    /// Dirty pages of one object.
    DirtyOf(&'a Shared<Object>),
}

impl<M: Machine> Cpu<'_, M> {
    /// Evicts the pages in `frames`, at most [`BATCH`], as far as possible, and drops the caller's
    /// reference to each. Returns how many frames are free, or will be after their flush. The
    /// caller is in no grace section and holds no lock.
    pub(crate) fn evict(&self, frames: &[FrameNumber]) -> u64 {
        if frames.is_empty() {
            return 0;
        }
        let _holds = self.hold_pages();
        // The flag is reset and the references are dropped also if a store panics.
        let evicting = Set::new(&self.state().evicting);
        let nested = evicting.was_set();
        let mut frames = Referred::of(self, frames);
        let mut dirty = Referred::new(self);
        let mut freed = 0;
        if !self.vm().lazy.is_empty(self) {
            freed += self.evict_lazily_freed(&frames);
        }
        if let Some(swap) = self.vm().swap.get().filter(|_| !nested) {
            freed += self.swap_out_and_evict(swap, &mut frames);
        }
        if !frames.is_empty() {
            freed += self.evict_clean(frames.take(), &mut dirty);
        }
        if !dirty.is_empty() && !nested {
            freed += self.evict_dirty(dirty);
        }
        self.state().counts.add(Counter::PageStolen, freed);
        freed
    }

    /// Evicts the pages that may become pages of the swap area. The CPU first takes the turn to
    /// write there, so that every page which leaves its program can be written. Returns how many
    /// frames were released. The remaining pages stay in `frames`.
    #[cold]
    #[inline(never)]
    fn swap_out_and_evict(&self, swap: &Swap, frames: &mut Referred<'_, '_, M>) -> u64 {
        let mut own = Referred::new(self);
        let is_private = frames.iter().any(|frame| self.is_anon(*frame));
        let laundry = if is_private { self.turn_to_swap(swap) } else { None };
        let swapped = if laundry.is_some() { self.swap_out(swap, frames) } else { 0 };
        for (at, frame) in frames.take().iter().enumerate() {
            let is_own = swapped & (1 << at) != 0;
            if is_own { own.push(*frame) } else { frames.push(*frame) }
        }
        if own.is_empty() { 0 } else { self.write_and_evict(swap.object(), laundry, own) }
    }

    /// Takes the turn to write to the swap area, if no other CPU has it, or if this CPU
    /// [waits](Self::evict_some) for it.
    fn turn_to_swap<'a>(&'a self, swap: &'a Swap) -> Option<Laundry<'a>> {
        if self.state().awaits_turn.get() {
            return swap.object().launder(self);
        }
        let laundry = swap.object().try_launder(self);
        if laundry.is_none() {
            self.state().missed_turn.set(true);
        }
        laundry
    }

    /// Takes the lazily freed pages from their programs. The caller keeps its references, which are
    /// then the last. Returns the number of pages.
    #[cold]
    #[inline(never)]
    fn evict_lazily_freed(&self, frames: &[FrameNumber]) -> u64 {
        let mut anon = FrameList::new();
        frames.iter().filter(|frame| self.is_anon(**frame)).for_each(|frame| anon.push(*frame));
        if anon.is_empty() {
            return 0;
        }
        let mut freed = 0;
        // If the heap is exhausted, the pages stay.
        let wanted = |page: &Page<'_>, mappings: &[Mapping<'_>]| {
            // An unmapped page, or a page of an object, was not advised.
            let is_private = page.object.is_none() && !mappings.is_empty();
            let all = is_private && mappings.iter().all(|it| self.is_lazily_freed(it.found.seen));
            if all { Ok(()) } else { Err(Errno::EBUSY) }
        };
        let _taken = self.with_taken(&anon, Then::Stay, wanted, |batch, at| {
            if batch.pages()[at].failed.is_some() {
                return;
            }
            let mappings = self.unmap(batch, at, |name| name);
            let last = batch.put_references(self, at, mappings, |frame| self.free(frame));
            debug_assert!(!last, "the caller holds a reference");
            freed += 1;
        });
        self.state().counts.add(Counter::LazilyFreed, freed);
        freed
    }

    /// Drops the caller's reference to each of the frames.
    pub(super) fn put_all_unmapped(&self, frames: &[FrameNumber]) {
        for frame in frames {
            // SAFETY: drops the caller's reference, which never was a mapping.
            unsafe { self.put_unmapped(*frame) };
        }
    }

    /// Evicts the clean pages, and drops the references to all pages except the dirty ones, which
    /// are added to `dirty`.
    fn evict_clean(&self, frames: FrameList, dirty: &mut Referred<'_, '_, M>) -> u64 {
        let mut freed = 0;
        let wanted = |page: &Page<'_>, mappings: &[Mapping<'_>]| {
            self.is_evictable(page, mappings, Wanted::Clean)
        };
        let taken = self.with_taken(&frames, Then::Leave, wanted, |batch, at| {
            let page = &batch.pages()[at];
            match page.failed {
                Some(Errno::EAGAIN) => return dirty.push(page.frame),
                Some(_) => return self.put_all_unmapped(&[page.frame]),
                None => {}
            }
            // Including the caller's own.
            let refs = page.entries() + 1;
            self.note_evicted(page);
            self.unmap(batch, at, |_| Entry::NONE);
            freed += u64::from(batch.put_references(self, at, refs, |frame| self.free(frame)));
        });
        if let Err(OutOfMemory) = taken {
            self.put_all_unmapped(&frames);
        }
        freed
    }

    /// Writes dirty pages, and evicts them. Drops the references to all.
    fn evict_dirty(&self, mut dirty: Referred<'_, '_, M>) -> u64 {
        let mut freed = 0;
        while let Some((first, rest)) = dirty.take().split_first() {
            let object = self.object_of(*first);
            let mut own = Referred::new(self);
            own.push(*first);
            for frame in rest {
                let other = self.object_of(*frame);
                let is_own = object.as_ref().zip(other).is_some_and(|(it, other)| other.same(it));
                if is_own { own.push(*frame) } else { dirty.push(*frame) }
            }
            let Some(object) = object else {
                // The page belongs to a program again.
                continue;
            };
            freed += self.write_and_evict(&object, object.try_launder(self), own);
            Object::release(object, self);
        }
        freed
    }

    /// Writes the dirty pages of `object` in `frames`, if the CPU has the turn, and evicts them.
    /// Drops the references to all.
    fn write_and_evict(
        &self,
        object: &Shared<Object>,
        laundry: Option<Laundry<'_>>,
        mut frames: Referred<'_, '_, M>,
    ) -> u64 {
        if let Some(laundry) = laundry {
            self.launder(object, laundry, &mut frames);
        }
        // Pages that could not be written are still dirty.
        let mut again = Referred::new(self);
        let freed = self.evict_clean(frames.take(), &mut again);
        self.state().counts.add(Counter::PageLaundered, freed);
        freed
    }

    /// Unmaps the dirty pages of `object` in `frames`, marks the pages clean, and writes them to
    /// the store.
    fn launder(
        &self,
        object: &Shared<Object>,
        mut laundry: Laundry<'_>,
        frames: &mut [FrameNumber],
    ) {
        let index = |frame: FrameNumber| self.vm().frames.meta(frame).index.load(Ordering::Relaxed);
        frames.sort_unstable_by_key(|frame| index(*frame));
        let mut cleaned = [(0, FrameNumber(0)); BATCH];
        let mut count = 0;
        let wanted = |page: &Page<'_>, mappings: &[Mapping<'_>]| {
            self.is_evictable(page, mappings, Wanted::DirtyOf(object))
        };
        let _taken = self.with_taken(frames, Then::Stay, wanted, |batch, at| {
            let Page { frame, failed, .. } = batch.pages()[at];
            if failed.is_some() {
                return;
            }
            let mappings = self.unmap(batch, at, Entry::undirtied);
            cleaned[count] = (index(frame), frame);
            count += 1;
            batch.put_references(self, at, mappings, |frame| self.free(frame));
        });
        let written = laundry.write(self, &cleaned[..count]);
        self.count_swapped(object, Counter::SwapOut, written);
    }

    /// Empties the entries of the mappings of a taken page, and replaces the page's entry in its
    /// object by the result of `name`. Returns the number of mappings.
    fn unmap(&self, batch: &mut Batch<'_>, at: usize, name: impl FnOnce(Entry) -> Entry) -> u32 {
        let empty = |found: &Found<'_>| {
            self.add_resident_of(found.space, -1);
            Entry::NONE
        };
        batch.store(at, empty, name)
    }

    /// Takes the pages in `frames` that are `wanted`, flushes them as required by `then`, and calls
    /// `each` for each place of the batch: for taken pages, and for failed ones.
    fn with_taken(
        &self,
        frames: &[FrameNumber],
        then: Then,
        mut wanted: impl FnMut(&Page<'_>, &[Mapping<'_>]) -> Result<(), Errno>,
        mut each: impl FnMut(&mut Batch<'_>, usize),
    ) -> Result<(), OutOfMemory> {
        let walk = self.walk();
        let mut batch = Batch::try_new(self, frames.len())?;
        frames.iter().for_each(|frame| batch.find(self, &walk, *frame));
        batch.take(self, |_, page, mappings| wanted(page, mappings));
        if !lost(Mutant::EvictFlush) {
            batch.flush(self, then);
        }
        (0..batch.len()).for_each(|at| each(&mut batch, at));
        batch.end(self);
        Ok(())
    }

    /// Returns whether a page whose entries are taken may be evicted, or written. `EAGAIN`: the
    /// page is dirty.
    fn is_evictable(
        &self,
        page: &Page<'_>,
        mappings: &[Mapping<'_>],
        wanted: Wanted<'_>,
    ) -> Result<(), Errno> {
        let (Some(object), Some(name)) = (&page.object, page.name_of_object()) else {
            return Err(Errno::EOPNOTSUPP);
        };
        if !object.is_stored() {
            return Err(Errno::EOPNOTSUPP);
        }
        if self.are_locked(mappings) {
            return Err(Errno::EPERM);
        }
        // A dead page of the swap area is not written.
        let dead = || {
            let index = self.vm().frames.meta(page.frame).index.load(Ordering::Relaxed);
            let swap = self.vm().swap.get().filter(|swap| swap.is(object));
            swap.is_some_and(|swap| swap.is_dead(index))
        };
        let dirty = name.is_dirty() && !dead() && !lost(Mutant::EvictLooksAtDirty);
        // Write-back marks a page clean, then protects its mappings, and has a reference to the
        // page throughout.
        debug_assert!(name.is_dirty() || !mappings.iter().any(|it| it.found.seen.is_writable()));
        match wanted {
            Wanted::Clean if dirty => Err(Errno::EAGAIN),
            Wanted::DirtyOf(of) if !dirty || !of.same(object) => Err(Errno::EBUSY),
            _ => Ok(()),
        }
    }
}
