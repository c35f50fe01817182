//! Eviction: pages of files leave memory, and [private ones](super::swap) once they are pages of the swap area.
//!
//! A batch of pages is [taken](super::taken) from its programs, together with the entries that the pages have in their object. What then happens to a
//! page depends on whether it is [dirty](crate::file::write_back):
//!
//! - a [lazily freed](super::lazy) page goes if no program that has it stored to it since. Its entries are emptied, and flushed at once: what is there then
//!   is zeros;
//! - a clean page goes. All of its entries are emptied: a fault finds no page, and reads it again. The flush may be deferred, for until
//!   somebody stores to the page, a CPU that still sees it sees what the store has;
//! - a dirty page is written first. Its mappings' entries are emptied, and flushed at once, and the object's entry becomes clean: from here on a
//!   store of a program faults and marks the page dirty again, as does a call of the kernel that stores to it. Then the page is written, and evicted if
//!   it is still clean.
//!
//! Nobody had a reference to the page while its entries were taken. So what was stored to it before is in what is written, and what is stored later marks
//! the page. Whoever writes must have the object's turn to write; if another CPU has it, the page is skipped, since that CPU may be waiting for memory. So
//! private pages stay with their programs as long as another CPU writes to the swap area. A CPU that finds nothing else looks again, and waits for the turn then: the other may
//! be one that finds nothing that can leave, again and again.
//!
//! A page stays if it is pinned or in use, if a VMA that maps it is locked, if it is being written back, or if its object has no store.

use super::Set;
use super::swap::Swap;
use super::taken::{BATCH, Batch, FrameList, Mapping, Page, Referred, Then};
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

/// Which pages are taken.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    /// Clean ones.
    Clean,
    /// Dirty ones of one object.
    DirtyOf(&'a Shared<Object>),
}

impl<M: Machine> Cpu<'_, M> {
    /// Evicts the pages in `frames`, at most [`BATCH`], as far as that is possible, and drops the reference that the caller has to each. Returns how many
    /// frames are free then, or will be once their flush is done. Not inside a grace section, and holding no lock.
    pub(crate) fn evict(&self, frames: &[FrameNumber]) -> u64 {
        if frames.is_empty() {
            return 0;
        }
        let _holds = self.hold_pages();
        // The flag and the references go back, also if a store panics.
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

    /// Lets those of the pages leave that may become pages of the swap area, if the CPU has the turn to write there, which it takes first, so that no page
    /// has left its program that cannot be written. Returns how many frames that gave. The other pages stay in `frames`.
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

    /// The turn to write to the swap area, if no other CPU has it, or this one [waits](Self::evict_some) for it.
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

    /// Takes those of the pages that are lazily freed from their programs. The caller's reference, which it keeps, is then the last. Returns how many that were.
    #[cold]
    #[inline(never)]
    fn evict_lazily_freed(&self, frames: &[FrameNumber]) -> u64 {
        let mut anon = FrameList::new();
        frames.iter().filter(|frame| self.is_anon(**frame)).for_each(|frame| anon.push(*frame));
        if anon.is_empty() {
            return 0;
        }
        let mut freed = 0;
        // Where the heap is exhausted, they stay.
        let wanted = |page: &Page<'_>, mappings: &[Mapping<'_>]| {
            // One that nobody maps, or has an object, was not advised.
            let is_private = page.object.is_none() && !mappings.is_empty();
            let all = is_private && mappings.iter().all(|it| self.is_lazily_freed(it.found.seen));
            if all { Ok(()) } else { Err(Errno::EBUSY) }
        };
        let _taken = self.with_taken(&anon, Then::Stay, wanted, |batch, at| {
            if batch.pages()[at].failed.is_some() {
                return;
            }
            let mappings = self.unmap(batch, at, |name| name);
            let last = batch.leave(self, at, mappings, |frame| self.free(frame));
            debug_assert!(!last, "the caller has a reference");
            freed += 1;
        });
        self.state().counts.add(Counter::LazilyFreed, freed);
        freed
    }

    /// Drops the reference that the caller has to each of the frames.
    pub(super) fn put_all_unmapped(&self, frames: &[FrameNumber]) {
        for frame in frames {
            // SAFETY: the caller's reference, which never was a mapping.
            unsafe { self.put_unmapped(*frame) };
        }
    }

    /// Evicts those of the pages that are clean, and drops the references to all but the dirty ones, which it adds to `dirty`.
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
            // With the caller's own.
            let refs = page.entries() + 1;
            self.note_evicted(page);
            self.unmap(batch, at, |_| Entry::NONE);
            freed += u64::from(batch.leave(self, at, refs, |frame| self.free(frame)));
        });
        if let Err(OutOfMemory) = taken {
            self.put_all_unmapped(&frames);
        }
        freed
    }

    /// Writes pages that are dirty, and evicts them. Drops the references to all.
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
                // A program's again.
                continue;
            };
            freed += self.write_and_evict(&object, object.try_launder(self), own);
            Object::release(object, self);
        }
        freed
    }

    /// Writes those pages of `object` in `frames` that are dirty, if the CPU has the turn to, and evicts them. Drops the references to all.
    fn write_and_evict(
        &self,
        object: &Shared<Object>,
        laundry: Option<Laundry<'_>>,
        mut frames: Referred<'_, '_, M>,
    ) -> u64 {
        if let Some(laundry) = laundry {
            self.launder(object, laundry, &mut frames);
        }
        // Those that could not be written are dirty still.
        let mut again = Referred::new(self);
        let freed = self.evict_clean(frames.take(), &mut again);
        self.state().counts.add(Counter::PageLaundered, freed);
        freed
    }

    /// Unmaps those pages of `object` in `frames` that are dirty, marks them clean, and writes them to the store.
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
            batch.leave(self, at, mappings, |frame| self.free(frame));
        });
        let written = laundry.write(self, &cleaned[..count]);
        self.count_swapped(object, Counter::SwapOut, written);
    }

    /// Empties the entries of the mappings of a page that is taken, and stores what `name` makes of its entry in its object. Returns how many mappings
    /// there were.
    fn unmap(&self, batch: &mut Batch<'_>, at: usize, name: impl FnOnce(Entry) -> Entry) -> u32 {
        let empty = |found: &Found<'_>| {
            self.add_resident_of(found.space, -1);
            Entry::NONE
        };
        batch.store(at, empty, name)
    }

    /// Takes the pages in `frames` that are `wanted`, flushes them, by what happens `then`, and calls `each` with each place of the batch: of pages that
    /// are taken, and of those that failed.
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

    /// Whether a page whose entries are taken may be evicted, or written. `EAGAIN`: it is dirty.
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
        // What a slot of the swap area held for nobody is not written.
        let dead = || {
            let index = self.vm().frames.meta(page.frame).index.load(Ordering::Relaxed);
            let swap = self.vm().swap.get().filter(|swap| swap.is(object));
            swap.is_some_and(|swap| swap.is_dead(index))
        };
        let dirty = name.is_dirty() && !dead() && !lost(Mutant::EvictLooksAtDirty);
        // Who writes a page back marks it clean, then protects its mappings, and has a reference to it all the while.
        debug_assert!(name.is_dirty() || !mappings.iter().any(|it| it.found.seen.is_writable()));
        match wanted {
            Wanted::Clean if dirty => Err(Errno::EAGAIN),
            Wanted::DirtyOf(of) if !dirty || !of.same(object) => Err(Errno::EBUSY),
            _ => Ok(()),
        }
    }
}
