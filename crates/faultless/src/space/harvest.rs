//! Reads the accessed bits of pages before they are unmapped or moved.
//!
//! The bits update two predictors: the calling thread's predictor, whose faults may have
//! [prefaulted](crate::fault::prefault) some of the pages, and the space's [access
//! history](crate::fault::prefault::history::History), for the next mapping of the addresses. No
//! bits are read while prefault is off, or when a whole space ends.

use super::tree::View;
use super::visit::Visit;
use super::vma::Vma;
use super::write::Writing;
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::fault::prefault::history::BLOCK;
use crate::machine::Machine;
use crate::sync::atomic::AtomicU64;
use crate::sync::grace::RetireChain;
use crate::table::node;
use core::cell::Cell;
use core::ops::Range;

/// The VMAs that covered the unmapped pages.
pub(super) enum Was<'a> {
    /// The VMAs in this version of the tree.
    Seen(View<'a, Vma>),
    /// The VMAs removed by the owner of the space, which makes no versions, and the parts cut off
    /// other VMAs.
    Removed(&'a Cell<RetireChain>, &'a Cell<[VirtRange; 2]>),
}

impl Was<'_> {
    /// Calls `each` for the parts of `range` in private anonymous memory.
    fn each_private(&self, range: VirtRange, mut each: impl FnMut(VirtRange)) {
        let mut look = |vma: &Vma| {
            let area = vma.area();
            let part = area.range.intersect(range);
            if area.memory.is_anonymous() && !part.is_empty() {
                each(part);
            }
        };
        match self {
            Self::Seen(view) => view
                .iter_from(range.start)
                .take_while(|entry| entry.start < range.end)
                .for_each(|entry| look(entry.get())),
            Self::Removed(gone, cut) => {
                // SAFETY: the writer that removed the VMAs has not freed them yet, and uses their
                // links for no other purpose.
                unsafe { gone.get().iter().for_each(|link| look(link.cast().as_ref())) };
                let cut = cut.get().map(|cut| cut.intersect(range));
                cut.into_iter().filter(|cut| !cut.is_empty()).for_each(each);
            }
        }
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// As [`Visit::harvest_accessed`].
    #[inline]
    pub(super) fn harvest_accessed(&self, range: VirtRange) -> Option<Was<'_>> {
        if !self.owns() {
            return self.visit().harvest_accessed(range);
        }
        self.visit().check_used(range).then_some(Was::Removed(&self.gone, &self.cut))
    }
}

impl<M: Machine> Visit<'_, '_, M> {
    /// Updates the thread's predictor from the pages of `range`, which are about to be unmapped or
    /// moved. Returns the current VMAs, if the use of the unmapped pages must be
    /// [recorded](Self::remember).
    #[inline]
    pub(super) fn harvest_accessed(&self, range: VirtRange) -> Option<Was<'_>> {
        self.check_used(range).then(|| Was::Seen(self.view().holding(range.start)))
    }

    /// Updates the thread's predictor from the pages of `range`. Returns whether the use of pages
    /// is recorded.
    #[inline]
    fn check_used(&self, range: VirtRange) -> bool {
        if self.cpu.vm().knobs.prefault_max_order() == 0 {
            return false;
        }
        if let Some(thread) = self.cpu.thread() {
            thread.check_used(self.cpu, self.space, range);
        }
        true
    }

    /// Records which of the pages starting at `start`, with the entries `slots`, were used, for the
    /// parts in private anonymous memory of the VMAs of `was`.
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

    /// Records the part `pages` of a block; the pages in `there` are mapped.
    fn remember_block(&self, pages: Range<u64>, there: u64, used: u64, was: &Was<'_>) {
        let range = VirtRange::new(pages.start << PAGE_SHIFT, pages.end << PAGE_SHIFT);
        was.each_private(range, |part| {
            let taken = !0 >> (BLOCK - part.pages()) << ((part.start >> PAGE_SHIFT) % BLOCK);
            if taken & there != 0
                && let Some(history) = self.space.history.get_or_make()
            {
                history.record(pages.start, taken, used);
            }
        });
    }
}
