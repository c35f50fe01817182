//! A [`Visit`]: the claim on pages that every operation on a range starts with.
//!
//! There are three kinds of operations.
//!
//! 1. **Operations that change entries, and no VMA**: `MADV_DONTNEED`, `MADV_FREE`, the revocation
//!    of an object's pages, and populating, which is a series of faults. Each holds a [`Visit`]: a
//!    *shared* claim on its pages. Shared claims do not conflict with each other, or with the claim
//!    of a fault that is served under a lock. An operation that changes VMAs claims its pages
//!    exclusively. So the protection, flags and object of each claimed page do not change during a
//!    visit. (A writer may at any time replace the VMA by another VMA with the same values for the
//!    page.) Visits and faults synchronise by entries; see [`protocol`](crate::table::protocol).
//! 2. **Operations that change VMAs**: `mmap`, `munmap`, `mprotect`, `mremap`, `brk`, the growth of
//!    a stack, `mlock`, advice that sets flags. Each is a [`Writing`](super::write::Writing): a
//!    `Visit` with an exclusive claim on its pages.
//! 3. **Operations that change everything**: `fork`, `exit`. They are writers that claim the whole
//!    space.
//!
//! # How the first kind is ordered
//!
//! | against | order |
//! |---|---|
//! | a fault on the same page | by the entry: the fault finds the old entry, or waits while the entry is busy and takes effect after the visit |
//! | a discard, `MADV_FREE` or populating of the same page | by the entry, page by page |
//! | `munmap`, `mprotect`, `mremap`, `mmap` over it | by the claims: completely before or after |
//! | `fork`, `exit` | by the claims; a child sees all of it or nothing |
//! | reclaim of lazily freed pages | by the claims: reclaim claims the whole space exclusively |
//!
//! `MADV_FREE` does not hold its entries busy: between the store of the clean entry and the flush a
//! CPU may store through an old translation, which leaves the entry clean. That store takes effect
//! before the advice. Reclaim does not take the page before the flush, since reclaim waits for the
//! claim.
//!
//! The caller revokes pages after the pages have left their object. The visit begins with a full
//! fence: both the claim and the section have one. A fault that maps a page of an object checks the
//! object again after taking the entry, behind a full barrier. So either the fault finds the page
//! gone, or the revocation finds the fault's entry.

use super::{Guard, Space};
use crate::addr::VirtRange;
use crate::machine::Machine;
use crate::space::tree::View;
use crate::space::vma::Vma;
use crate::stat::Counter;
use crate::sync::grace::Section;
use crate::vm::Cpu;

/// A claim on up to two ranges of a space, and a grace section in which to read them.
pub(crate) struct Visit<'a, 'v, M: Machine> {
    pub(super) cpu: &'a Cpu<'v, M>,
    pub(super) space: &'a Space<M>,
    pub(super) claimed: [VirtRange; 2],
    pub(super) section: Section<'a>,
    pub(super) guard: Guard<'a>,
}

impl<M: Machine> Space<M> {
    /// Makes a shared claim on `range`. The caller is in no grace section.
    #[inline(never)]
    pub(super) fn visit<'a, 'v>(
        &'a self,
        cpu: &'a Cpu<'v, M>,
        range: VirtRange,
    ) -> Visit<'a, 'v, M> {
        let guard = self.share(cpu, range, Counter::RangeLockShared);
        let claimed = [range, VirtRange::new(0, 0)];
        let section = cpu.section();
        self.view(cpu, &section);
        Visit { cpu, space: self, claimed, section, guard }
    }
}

impl<M: Machine> Visit<'_, '_, M> {
    /// Returns the current tree.
    pub(super) fn view(&self) -> View<'_, Vma> {
        self.space.tree.snapshot(&self.section)
    }

    /// Returns the VMAs that overlap `range`, in order.
    pub(super) fn vmas(&self, range: VirtRange) -> impl Iterator<Item = &Vma> {
        self.view()
            .iter_from(range.start)
            .take_while(move |entry| entry.start < range.end)
            .map(|entry| entry.get())
    }

    /// Returns whether all of `range` is claimed.
    pub(super) fn claims(&self, range: VirtRange) -> bool {
        self.claimed.iter().any(|claimed| claimed.covers(range))
    }

    /// Returns the claimed range that covers `range`.
    pub(super) fn claimed_around(&self, range: VirtRange) -> VirtRange {
        self.claimed.into_iter().find(|claimed| claimed.covers(range)).unwrap_or(range)
    }
}
