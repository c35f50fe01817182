//! `munmap`, and the unmapping that other calls need.
//!
//! # When tables are unlinked
//!
//! A last-level table is unlinked with the last VMA over its span, by a writer with an exclusive
//! claim on the whole span. At each end of its range, an unmapping writer claims the whole span of
//! the table if nothing else is mapped there, and only its own pages if another VMA stays. So
//! operations in different parts of one table run in parallel ([`with_tables`]). The writer reads
//! the tree to choose the claim, and checks the claim again in the step that removes the VMAs,
//! under the lock of the tree, or of the shard of the tree that has all VMAs over the table. Of two
//! operations that unmap the last two VMAs over a table, the one whose step comes second finds that
//! the other VMA is gone. If the second writer has claimed too little, its step changes nothing,
//! and the writer starts over. The new claim, on the whole table, then waits for the other
//! operation, which may still have entries to empty there.
//!
//! A VMA that is over the span in the step stays until a later step removes the VMA, and the writer
//! of that step unlinks the table. No writer can put a VMA over a claimed span. (`brk` takes the
//! heap's pages as mapped: see [`loses_table`](super::brk::bounds::Heap::loses_table).)
//!
//! # The baselines' lock
//!
//! As in Linux 6.12, a baseline holds the space's one lock to write until the VMAs are out of the
//! tree, and to read during the removal of the pages ([`Writing::let_readers_in`]). Other readers
//! at that time:
//!
//! - Readers find the tree without the VMAs, and the tree stays so: an operation that maps, unmaps,
//!   or grows a stack needs the lock to write.
//! - Faults in the neighbouring VMAs use other entries, maybe of the same tables. The writer
//!   unlinks only tables without a VMA over their span, so none of these. No VMA can be added over
//!   a table before that is done, as that needs the lock to write. Faults under the lock of a VMA
//!   hold no lock of the space, and rely on the same argument.
//! - Discards read tables in a grace section. Discards find the entries there empty, or wait for
//!   each busy entry.
//! - An operation that finds no VMA may have found a hole that is unmapped but not flushed yet.
//!   Before returning an error for the hole, the operation waits for the flush
//!   ([`Guard::await_unmapping`]): afterwards no CPU can use the page. The revocation of an
//!   object's pages does the same, for the mappings that it did not find.

use super::write::{NOWHERE, Writing};
use super::{Guard, Space};
use crate::addr::{PAGE_SIZE, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::space::harvest::Was;
use crate::space::tree::View;
use crate::space::vma::Vma;
use crate::stat::Counter;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::Wait;
use crate::table::format::USER_END;
use crate::table::node::{LAST, TABLE_ALIGN, holds_table, table_span};
use crate::vm::Cpu;

/// Returns the page-aligned user range of a call, or `None` if Linux fails with `EINVAL`.
pub(super) fn user_range(addr: u64, len: u64) -> Option<VirtRange> {
    let len = page_up(len).filter(|&len| len != 0)?;
    (is_page_aligned(addr) && len <= USER_END && addr <= USER_END - len)
        .then(|| VirtRange::new(addr, addr + len))
}

/// Returns the claim needed to unmap `range`: at either end the whole span of the last-level table,
/// if nothing outside `range` is mapped in the span.
pub(super) fn with_tables(view: &View<'_, Vma>, range: VirtRange) -> VirtRange {
    let VirtRange { start, end } = range;
    let wide = range.widen(TABLE_ALIGN);
    let shared_below = wide.start < start && view.find_below(wide.start, start).is_some();
    let one_table = wide.len() == TABLE_ALIGN;
    if shared_below && one_table {
        return range;
    }
    let shared_above = end < wide.end && view.find_below(end, wide.end).is_some();
    if shared_above && one_table {
        return range;
    }
    VirtRange {
        start: if shared_below { start } else { wide.start },
        end: if shared_above { end } else { wide.end },
    }
}

impl<M: Machine> Space<M> {
    /// Unmaps the pages in the `len` bytes starting at `addr`, rounded up to pages.
    ///
    /// # Errors
    /// `EINVAL`: `addr` is not page-aligned, `len` is 0, or the range leaves user space. `ENOMEM`:
    /// a VMA would have to be split and cannot be. A failed call changes nothing.
    pub fn munmap(&self, cpu: &Cpu<'_, M>, addr: u64, len: u64) -> Result<(), Error> {
        let given = VirtRange::new(addr, addr.saturating_add(len));
        let refused = |errno| Error { operation: "munmap", range: given, errno };
        let Some(range) = user_range(addr, len) else {
            // The claim of a valid range makes this check.
            self.check_vm(cpu);
            return Err(refused(Errno::EINVAL));
        };
        // For the owner, claiming whole tables costs nothing.
        match self.write_alone(cpu, [range, NOWHERE], TABLE_ALIGN) {
            Some(writing) => writing.unmap(range, |_| true).map(drop),
            None => self.unmap_beside(cpu, range),
        }
        .map_err(refused)?;
        cpu.collect();
        Ok(())
    }

    /// [`munmap`](Self::munmap) by a CPU that does not own the space.
    #[inline(never)]
    fn unmap_beside(&self, cpu: &Cpu<'_, M>, range: VirtRange) -> Result<(), Errno> {
        for tries in 0.. {
            let choose = |view: &View<'_, Vma>| [with_tables(view, range), NOWHERE];
            let writing = self.write_where(cpu, PAGE_SIZE, tries, choose, None);
            if writing.unmap(range, |view| writing.claims_tables(view, range))? {
                break;
            }
        }
        Ok(())
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Returns whether the claim is enough to unmap `range` in `view`, the current tree.
    pub(super) fn claims_tables(&self, view: &View<'_, Vma>, range: VirtRange) -> bool {
        lost(Mutant::UnmapLooksAgain)
            || !self.is_outdated(view)
            || self.claims(with_tables(view, range))
    }

    /// Unmaps `range`, as the writer's last action, if `is_enough` confirms that the claim is
    /// sufficient in the current tree. Returns whether the range was unmapped.
    #[inline(always)]
    pub(super) fn unmap(
        &self,
        range: VirtRange,
        is_enough: impl Fn(&View<'_, Vma>) -> bool,
    ) -> Result<bool, Errno> {
        let was = self.harvest_accessed(range);
        let unmapped = self.step(range, |step| {
            let enough = is_enough(&step.view());
            if enough {
                step.remove(range)?;
            }
            Ok(enough)
        })?;
        if unmapped {
            self.let_readers_in();
            self.clear(range, was.as_ref());
        }
        Ok(unmapped)
    }

    /// Empties `range`, in which no VMA is left, and records the use of the pages as
    /// [`zap`](Self::zap) does.
    #[inline(always)]
    pub(super) fn clear(&self, range: VirtRange, was: Option<&Was<'_>>) {
        let mut batch = FlushBatch::new(self.cpu, self.space);
        let tables = self.zap(range, was, &mut batch);
        let claimed = self.claimed_around(range);
        // Without a last-level table, only tables of a level above may be empty, and those have a
        // larger span.
        if holds_table(claimed) && (tables || claimed.len() >= table_span(LAST + 1)) {
            self.prune(range, claimed, &mut batch);
        }
        batch.finish();
    }
}

impl Guard<'_> {
    /// Waits until the unmappings in the locked range that have published their trees are flushed.
    pub(super) fn await_unmapping(&self, wait: &impl Wait) {
        if let Self::Reading { guard } = self
            && !lost(Mutant::HoleIsFlushed)
        {
            guard.await_downgraded(wait);
        }
    }
}

impl<M: Machine> Space<M> {
    /// Waits until every unmapping in `range` that has published its tree is flushed.
    #[cold]
    #[inline(never)]
    pub(crate) fn await_unmapping(&self, cpu: &Cpu<'_, M>, range: VirtRange) {
        drop(self.share_flushed(cpu, range, Counter::RangeLockShared));
    }

    /// Locks `range`, and waits until every unmapping in the range that has published its tree is
    /// flushed.
    #[inline(never)]
    pub(super) fn share_flushed<'a>(
        &'a self,
        cpu: &'a Cpu<'_, M>,
        range: VirtRange,
        counted: Counter,
    ) -> Guard<'a> {
        let guard = self.share(cpu, range, counted);
        guard.await_unmapping(cpu);
        guard
    }
}
