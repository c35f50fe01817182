//! What is learned from pages before they are taken away.
//!
//! Two want to know which were used, as their accessed bits tell: the thread that takes them away, whose
//! faults may have mapped some of them [ahead](crate::fault::prefault), and the space, which
//! [remembers](Footprints) it for those who use the addresses next. Nobody looks while nothing is mapped
//! ahead, nor when a whole space ends.

use super::tree::View;
use super::visit::Visit;
use super::vma::Vma;
use super::write::Writing;
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::fault::prefault::past::BLOCK;
use crate::fault::prefault::{Footprints, Past};
use crate::heap;
use crate::machine::Machine;
use crate::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use crate::sync::grace::RetireChain;
use crate::table::node;
use alloc::boxed::Box;
use core::cell::Cell;
use core::ops::Range;
use core::ptr::{self, NonNull};

/// A space's [`Footprints`], which it has once there is something to remember.
#[derive(Debug)]
pub(crate) struct Memory(AtomicPtr<Footprints>);

impl Memory {
    pub(super) fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// What is known about the block of `page` (a page number).
    #[inline]
    pub(crate) fn recall(&self, page: u64) -> Past {
        self.get().map_or(Past::default(), |footprints| footprints.recall(page))
    }

    #[inline]
    fn get(&self) -> Option<&Footprints> {
        // SAFETY: what is not null was a box, and is one again when this is dropped.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// The footprints, made now if there are none and the heap has room.
    fn get_or_make(&self) -> Option<&Footprints> {
        if self.get().is_none() {
            let made = Box::into_raw(heap::try_box_with(Footprints::default).ok()?);
            let (none, release, relaxed) = (ptr::null_mut(), Ordering::Release, Ordering::Relaxed);
            if self.0.compare_exchange(none, made, release, relaxed).is_err() {
                // SAFETY: a box until just now, which nobody else has seen.
                drop(unsafe { Box::from_raw(made) });
            }
        }
        self.get()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(made) = NonNull::new(self.0.load(Ordering::Relaxed)) {
            // SAFETY: made from a box, and nobody has a reference: those borrow this.
            drop(unsafe { Box::from_raw(made.as_ptr()) });
        }
    }
}

/// The VMAs that there were over what is taken away.
pub(super) enum Was<'a> {
    /// In this version of the tree.
    Seen(View<'a, Vma>),
    /// Those that the owner of the space has removed, who keeps no version, and what it cut off others.
    Removed(&'a Cell<RetireChain>, &'a Cell<[VirtRange; 2]>),
}

impl Was<'_> {
    /// Calls `each` for the parts of `range` that lay in private anonymous memory.
    fn each_private(&self, range: VirtRange, mut each: impl FnMut(VirtRange)) {
        let mut look = |vma: NonNull<Vma>| {
            // SAFETY: VMAs in a view live as long as the section, and what was removed as long as its writer.
            let area = &unsafe { vma.as_ref() }.area;
            let part = area.range.intersect(range);
            if area.object.is_none() && !part.is_empty() {
                each(part);
            }
        };
        match self {
            Self::Seen(view) => view
                .iter_from(range.start)
                .take_while(|entry| entry.start < range.end)
                .for_each(|entry| look(entry.value)),
            Self::Removed(gone, cut) => {
                // SAFETY: the writer that removed them has not given them up, and uses their links for nothing else.
                unsafe { gone.get().iter() }.for_each(|link| look(link.cast()));
                let cut = cut.get().map(|cut| cut.intersect(range));
                cut.into_iter().filter(|cut| !cut.is_empty()).for_each(each);
            }
        }
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// As [`Visit::leave`].
    #[inline]
    pub(super) fn leave(&self, range: VirtRange) -> Option<Was<'_>> {
        let was = self.visit().leave(range)?;
        Some(if self.owns() { Was::Removed(&self.gone, &self.cut) } else { was })
    }
}

impl<M: Machine> Visit<'_, '_, M> {
    /// Learns from the pages of `range`, which are about to be unmapped or moved. Returns the VMAs as they are, if
    /// those that are unmapped are to be [remembered](Self::remember).
    #[inline]
    pub(super) fn leave(&self, range: VirtRange) -> Option<Was<'_>> {
        if self.cpu.vm().knobs.prefault_max_order() == 0 {
            return None;
        }
        if let Some(thread) = self.cpu.thread() {
            thread.judge(self.cpu, self.space, range);
        }
        Some(Was::Seen(self.view()))
    }

    /// Remembers which of the pages from `start` on, with the entries `slots`, were used, where the VMAs of
    /// `was` had private anonymous memory.
    #[inline(never)]
    pub(super) fn remember(&self, start: u64, slots: &[AtomicU64], was: &Was<'_>) {
        let (mut page, mut slots) = (start >> PAGE_SHIFT, slots);
        while !slots.is_empty() {
            let first = page % BLOCK;
            let (block, rest) = slots.split_at(slots.len().min((BLOCK - first) as usize));
            let (mut there, mut used) = (0, 0);
            for (at, slot) in (first..).zip(block) {
                let entry = node::load(slot);
                there |= u64::from(entry.is_mapped()) << at;
                used |= u64::from(entry.was_used()) << at;
            }
            let end = page + block.len() as u64;
            if there != 0 {
                self.remember_block(page..end, there, used, was);
            }
            (page, slots) = (end, rest);
        }
    }

    /// The part `pages` of a block; those `there` are mapped.
    fn remember_block(&self, pages: Range<u64>, there: u64, used: u64, was: &Was<'_>) {
        let range = VirtRange::new(pages.start << PAGE_SHIFT, pages.end << PAGE_SHIFT);
        was.each_private(range, |part| {
            let taken = !0 >> (BLOCK - part.pages()) << ((part.start >> PAGE_SHIFT) % BLOCK);
            if taken & there != 0
                && let Some(footprints) = self.space.past.get_or_make()
            {
                footprints.taken(pages.start, taken, used);
            }
        });
    }
}
