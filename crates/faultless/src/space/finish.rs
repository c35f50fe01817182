//! The end of a change: unlocks its VMAs, and merges them with their neighbours.
//!
//! A step defers a merge if one of the two VMAs is under change ([`step`](super::step)). The writer
//! that finishes its change makes up for the merge, in separate steps.

use super::merge::merge_later;
use super::versions::Versions;
use super::vma::Vma;
use super::write::{Refused, Writing};
use crate::addr::VirtRange;
use crate::error::Errno;
use crate::machine::Machine;
use crate::space::tree::View;
use core::ptr::NonNull;

impl<M: Machine> Writing<'_, '_, M> {
    /// Unlocks the VMAs under change, whose entries must be up to date and flushed, and merges them
    /// with the neighbours for which a merge was deferred, if possible.
    #[inline]
    pub(super) fn finish(&self) {
        if self.changing.get().is_some() {
            self.finish_all();
        }
    }

    #[inline(never)]
    fn finish_all(&self) {
        for change in self.under_change() {
            if !self.is_changing(change) {
                // A VMA finished earlier has merged with this one.
                continue;
            }
            // SAFETY: in the tree until this writer replaces it, and valid as long as the section.
            let vma = unsafe { change.as_ref() };
            // Without memory they stay separate.
            while self.finish_one(vma) == Ok(true) {}
            if self.is_changing(change) {
                // Only in a step, under the lock of the tree or shard: so a VMA that a step finds
                // under change stays under change until this step ends.
                let unlocked = self.step_versions(VirtRange::page(vma.start()), |_| {
                    self.unlock_changed(vma);
                    Ok(())
                });
                debug_assert!(unlocked.is_ok(), "a step without a new VMA needs no memory");
            }
        }
        self.changing.set(None);
    }

    /// Merges the next two of the VMAs that can merge with `vma`, which is or was under change by
    /// this writer. If there are none, unlocks `vma`. Returns whether two VMAs merged.
    fn finish_one(&self, vma: &Vma) -> Result<bool, Errno> {
        // The VMAs with which its merge was deferred are in the same shard of the tree.
        self.step_versions(VirtRange::page(vma.start()), |step| {
            let merged = self.merge_next(step, vma.start())?;
            if !merged && self.is_changing(NonNull::from(vma)) {
                // Under the lock of the tree or shard: a writer that did not merge with `vma`,
                // because it is under change, has published by now.
                self.unlock_changed(vma);
            }
            Ok(merged)
        })
    }

    /// Merges the VMAs that can merge with the VMA at `addr`, and were not merged when it was
    /// finished, as far as memory permits.
    pub(super) fn merge_at(&self, addr: u64) {
        while self.merge_two(addr) == Ok(true) {}
    }

    /// Merges the next two of the VMAs around `addr` that can merge, in a separate step. Returns
    /// whether there were any.
    ///
    /// # Errors
    /// `ENOMEM`: the heap is exhausted. Nothing has changed.
    pub(super) fn merge_two(&self, addr: u64) -> Result<bool, Errno> {
        self.step_versions(VirtRange::page(addr), |step| self.merge_next(step, addr))
    }

    /// Merges the next two of the VMAs around `addr` that can merge. Returns whether there were
    /// any.
    fn merge_next(&self, step: &mut Versions<'_, '_, '_, M>, addr: u64) -> Result<bool, Refused> {
        let next = self.next_merge(&step.view(), addr);
        if let Some(range) = next {
            step.merge(range)?;
        }
        Ok(next.is_some())
    }

    /// Unlocks `vma`, which is under change by this writer: from then on another writer may merge
    /// with it.
    fn unlock_changed(&self, vma: &Vma) {
        self.unlock(vma);
        let others = |all: [Option<NonNull<Vma>>; 4]| {
            all.map(|change| change.filter(|change| *change != NonNull::from(vma)))
        };
        self.changing.set(self.changing.get().map(others));
    }

    /// Returns the VMA that must [merge](Versions::merge) with its neighbours next, of the VMAs
    /// around `addr` that can merge, in address order. A VMA under change by another writer merges
    /// when this writer finishes.
    fn next_merge(&self, view: &View<'_, Vma>, addr: u64) -> Option<VirtRange> {
        let near = |addr| view.at(addr).map(|entry| entry.get());
        let is_busy =
            |vma: &Vma| vma.sequence.read().is_none() && !self.is_changing(NonNull::from(vma));
        let mut vma: &Vma = near(addr).filter(|vma| !is_busy(vma))?;
        let merges_above = |above: &&Vma| merge_later(vma, above) && !is_busy(above);
        let mut next = near(vma.end()).filter(merges_above).map(|_| vma.range());
        while let Some(below) = vma.start().checked_sub(1).and_then(near)
            && merge_later(below, vma)
            && !is_busy(below)
        {
            // The VMA above the lowest, which merges with the lowest rather than with the one
            // above.
            next = Some(vma.range());
            vma = below;
        }
        next
    }
}

impl<M: Machine> Drop for Writing<'_, '_, M> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.all_locked.get() {
            self.vmas(VirtRange::USER).for_each(|vma| self.unlock(vma));
        } else {
            self.finish();
        }
        if !self.gone.get().is_empty() {
            // SAFETY: removed as the owner from the tree, which no other CPU has read since.
            unsafe { self.cpu.leave_gone(self.gone.take()) };
        }
    }
}
