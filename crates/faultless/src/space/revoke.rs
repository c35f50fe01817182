//! How a space reacts when pages have left an object that the space maps.

use super::Space;
use super::visit::Visit;
use super::vma::Vma;
use crate::addr::VirtRange;
use crate::file::Object;
use crate::frame::{FrameUse, Kind};
use crate::heap::Shared;
use crate::machine::Machine;
use crate::space::tree::View;
use crate::table::Entry;
use crate::vm::Cpu;
use core::ops::Range;

/// What happens to the private copies of an object's pages when the pages leave the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrivateCopies {
    /// The copies stay: a hole was punched. A page stored to through a private mapping is no longer
    /// the file's.
    Keep,
    /// The copies go with the pages: the object was shortened, and the copied pages no longer
    /// exist.
    Drop,
}

impl<M: Machine> Space<M> {
    /// Unmaps the pages of `object` with the numbers `pages` from all mappings in this space, and
    /// treats their private copies as `copies` says. The mappings stay. After the call no CPU uses
    /// the pages through this space any more. Pages that the object [has no
    /// longer](Object::set_pages) are not mapped again. In place of pages that [left the
    /// object](Object::free_pages) a fault maps new pages.
    ///
    /// The kernel keeps the object from growing between its shortening and the last revocation:
    /// otherwise the revocation would also drop a program's stores to private mappings of the added
    /// pages. A child that [`fork`](Self::fork) is making of this space is a space like any other:
    /// the kernel allows no fork in progress between the two.
    pub fn revoke(
        &self,
        cpu: &Cpu<'_, M>,
        object: &Shared<Object>,
        pages: Range<u64>,
        copies: PrivateCopies,
    ) {
        object.check_vm(cpu);
        let mut mapped = self.hull(cpu, object, &pages);
        while let Some(hull) = mapped {
            // A full fence between the change of the object, which the pages have left, and the
            // loads of the entries: the section of the visit begins with a full fence.
            let visit = self.visit(cpu, hull);
            // Another operation may have moved some of the pages before the claim.
            mapped = visit.hull_of(object, &pages).filter(|now| !hull.covers(*now));
            if mapped.is_some() {
                continue;
            }
            let of_object = |entry: Entry| {
                entry.is_mapped()
                    && !entry.is_special()
                    && cpu.vm().frames.meta(entry.frame()).kind() == Kind::Used(FrameUse::Shared)
            };
            let goes = |entry: Entry| copies == PrivateCopies::Drop || of_object(entry);
            for vma in visit.vmas(hull) {
                if let Some(range) = vma.area().shows(object, &pages) {
                    visit.discard(range.intersect(hull), None, goes);
                }
            }
        }
        // An unmapping may be published and not flushed yet.
        self.await_unmapping(cpu, VirtRange::USER);
    }

    /// Returns a range that covers those pages of `object`, or `None` if no page can be mapped.
    pub(super) fn hull(
        &self,
        cpu: &Cpu<'_, M>,
        object: &Shared<Object>,
        pages: &Range<u64>,
    ) -> Option<VirtRange> {
        let section = self.section(cpu);
        hull_in(self.view(cpu, &section), object, pages)
    }
}

impl<M: Machine> Visit<'_, '_, M> {
    /// As [`Space::hull`].
    pub(super) fn hull_of(&self, object: &Shared<Object>, pages: &Range<u64>) -> Option<VirtRange> {
        hull_in(self.view(), object, pages)
    }
}

fn hull_in(view: View<'_, Vma>, object: &Shared<Object>, pages: &Range<u64>) -> Option<VirtRange> {
    view.iter_from(0)
        .filter_map(|entry| entry.get().area().shows(object, pages))
        .reduce(VirtRange::hull)
}
