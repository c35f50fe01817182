//! `munmap`, and what other calls unmap.
//!
//! # Tables that go
//!
//! A last-level table goes with the last VMA over its span, and only who has claimed all of the span alone may unlink it.
//! So who unmaps claims whole tables at the ends of its range where it has all that is mapped there, and only its pages
//! where another VMA stays, so that calls in different parts of one table run side by side ([`with_tables`]). That is
//! chosen by a look at the tree, and looked at again in the step that removes the VMAs, under the lock of the tree: of two
//! calls that unmap the last two VMAs over a table, the one whose step comes second finds that the other VMA is gone. If it
//! has claimed too little, its step does not happen, and it starts over. The claim on the whole table then waits for the other
//! call, which may yet have entries to empty there.
//!
//! A VMA that is over the span in the step stays until a later step removes it, which then unlinks the table; and none can be
//! put over a span that is claimed.
//!
//! # The baselines' lock
//!
//! Under the locks of Linux (6.12) the one lock of the space is held to write until the VMAs are out of the tree, and to
//! read while the pages are taken away ([`Writing::let_readers_in`]). What the other readers do meanwhile:
//!
//! - They find the tree without the VMAs, and it stays so: who maps, unmaps, or grows a stack wants the lock to write.
//! - Faults in the VMAs around use other entries, maybe of the same tables. Only tables are unlinked over whose span no VMA
//!   is left, whatever else the lock covers; so none of these. Nor can a VMA come to lie over them before that is
//!   done, as nobody can map. Faults under the lock of a VMA hold none of the space in any case, and rely on the same.
//! - Discards stand in tables in a grace section, and find the entries there empty, or wait for each other entry by entry.
//! - The revocation of an object's pages finds no VMA of a mapping that is not flushed yet. It waits for that
//!   ([`await_unmapping`](Space::await_unmapping)).

use super::step::State;
use super::write::{NOWHERE, Writing};
use super::{Guard, Space};
use crate::addr::{PAGE_SIZE, USER_END, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::space::leave::Was;
use crate::space::tree::View;
use crate::space::vma::Vma;
use crate::stat::Counter;
use crate::sync::mutant::{Mutant, lost};
use crate::table::node::{LAST, holds_table, table_span};
use crate::vm::Cpu;
use core::convert::Infallible;

/// What a last-level table spans.
pub(super) const TABLE_ALIGN: u64 = table_span(LAST);

/// The page-aligned user range of a call, or `None` where Linux refuses it.
pub(super) fn user_range(addr: u64, len: u64) -> Option<VirtRange> {
    let len = page_up(len).filter(|&len| len != 0)?;
    (is_page_aligned(addr) && len <= USER_END && addr <= USER_END - len)
        .then(|| VirtRange::new(addr, addr + len))
}

/// What is claimed to unmap `range`: at either end all of the last-level table, if `range` has all that is mapped in it.
pub(super) fn with_tables(view: &View<'_, Vma>, range: VirtRange) -> VirtRange {
    let VirtRange { start, end } = range;
    let wide = range.widen(TABLE_ALIGN);
    let shared_below =
        wide.start < start && view.find(wide.start).is_some_and(|below| below.start < start);
    let one_table = wide.len() == TABLE_ALIGN;
    if shared_below && one_table {
        return range;
    }
    let shared_above = end < wide.end && view.find(end).is_some_and(|above| above.start < wide.end);
    if shared_above && one_table {
        return range;
    }
    VirtRange {
        start: if shared_below { start } else { wide.start },
        end: if shared_above { end } else { wide.end },
    }
}

impl<M: Machine> Space<M> {
    /// Unmaps whatever is mapped in the pages from `addr` on, `len` bytes rounded up to pages.
    ///
    /// # Errors
    /// `EINVAL`: `addr` is not page-aligned, `len` is 0, or the range leaves user space. `ENOMEM`: a
    /// VMA would have to be split and cannot be. Nothing has changed then.
    pub fn munmap(&self, cpu: &Cpu<'_, M>, addr: u64, len: u64) -> Result<(), Error> {
        let given = VirtRange::new(addr, addr.saturating_add(len));
        let refused = |errno| Error { operation: "munmap", range: given, errno };
        let range = user_range(addr, len).ok_or(refused(Errno::EINVAL))?;
        for tries in 0.. {
            // Alone, whole tables cost nothing.
            if let Some(writing) = self.write_alone(cpu, [range, NOWHERE], TABLE_ALIGN) {
                writing.unmap(range, |_| true).map_err(refused)?;
                break;
            }
            let Ok(writing) = self.write_where(cpu, PAGE_SIZE, tries, |view| {
                Ok::<_, Infallible>([with_tables(view, range), NOWHERE])
            });
            let claims_tables = |view: &View<'_, Vma>| writing.claims_tables(view, range);
            if writing.unmap(range, claims_tables).map_err(refused)? {
                break;
            }
        }
        cpu.collect();
        Ok(())
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Whether what it takes to unmap `range` in `view`, which is the present tree, is claimed.
    pub(super) fn claims_tables(&self, view: &View<'_, Vma>, range: VirtRange) -> bool {
        lost(Mutant::UnmapLooksAgain)
            || !self.is_outdated(view)
            || self.claims(with_tables(view, range))
    }

    /// Unmaps `range`, as the last that it does, if the claim `stands` in view of the tree. Returns whether it did.
    pub(super) fn unmap(
        &self,
        range: VirtRange,
        stands: impl Fn(&View<'_, Vma>) -> bool,
    ) -> Result<bool, Errno> {
        let was = self.leave(range);
        let unmapped = self.step(|step| {
            let stands = stands(&step.view());
            if stands {
                step.replace(range, None, State::Running)?;
            }
            Ok(stands)
        })?;
        if unmapped {
            self.let_readers_in();
            self.clear(range, was.as_ref());
        }
        Ok(unmapped)
    }

    /// Holds the baselines' one lock to read from now on. This writer changes no VMA any more.
    fn let_readers_in(&self) {
        if let Guard::Writing { guard } = &self.guard {
            guard.downgrade();
        }
    }

    /// Empties `range`, in which no VMA is left, and remembers what was used as [`zap`](Self::zap) does.
    pub(super) fn clear(&self, range: VirtRange, was: Option<&Was<'_>>) {
        let mut batch = FlushBatch::new(self.cpu, self.space);
        let tables = self.zap(range, was, &mut batch);
        let claimed = self.claimed_around(range);
        // Where there is none below, only tables of a level above may be empty, and those are wide.
        if holds_table(claimed) && (tables || claimed.len() >= table_span(LAST + 1)) {
            self.prune(range, claimed, &mut batch);
        }
        batch.finish();
    }
}

impl<M: Machine> Space<M> {
    /// Waits until what has been unmapped is flushed: all who change VMAs, and have published that.
    pub(super) fn await_unmapping(&self, cpu: &Cpu<'_, M>) {
        if let Guard::Reading { guard } =
            &self.share(cpu, VirtRange::USER, Counter::RangeLockShared)
        {
            guard.await_downgraded(cpu);
        }
    }
}
