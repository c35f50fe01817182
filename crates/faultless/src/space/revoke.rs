//! What a space does when pages have left an object behind some of its mappings.

use super::Space;
use super::visit::Visit;
use super::vma::Vma;
use crate::addr::VirtRange;
use crate::file::Object;
use crate::frame::{Kind, Use};
use crate::heap::Shared;
use crate::machine::Machine;
use crate::space::tree::View;
use crate::table::Entry;
use crate::vm::Cpu;
use core::ops::Range;

/// What becomes of the pages that private mappings copied from an object, when the pages that they were
/// copied from leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    /// They stay: a hole was punched. What was stored to a private mapping is no longer the file's.
    Keep,
    /// They go with the pages: the object was shortened, and there is nothing any more that they copy.
    Drop,
}

impl<M: Machine> Space<M> {
    /// Unmaps the pages of `object` with the numbers `pages`, wherever it is mapped here, and treats their
    /// private copies as `copies` says. The mappings stay. When it returns no CPU uses the pages through
    /// this space any more. Those that the object [has no longer](Object::set_pages) are not mapped
    /// again; in the place of those that [left it](Object::free_pages) a fault maps new ones.
    ///
    /// The kernel keeps the object from growing between its shortening and the last revocation:
    /// otherwise what a program stores to a private mapping of the pages that were added is dropped, too. A
    /// child that [`fork`](Self::fork) is making of this space is a space like any other: the kernel
    /// lets none be in the making between the two.
    pub fn revoke(
        &self,
        cpu: &Cpu<'_, M>,
        object: &Shared<Object>,
        pages: Range<u64>,
        copies: Copies,
    ) {
        object.check_vm(cpu);
        let mut mapped = self.hull(cpu, object, &pages);
        while let Some(hull) = mapped {
            // A full fence between the object, which the pages have left, and the entries: its section begins with one.
            let visit = self.visit(cpu, hull);
            // Another operation may have moved some of it before the range was claimed.
            mapped = visit.hull_of(object, &pages).filter(|now| !hull.covers(*now));
            if mapped.is_some() {
                continue;
            }
            let of_object = |entry: Entry| {
                entry.is_mapped()
                    && !entry.is_special()
                    && cpu.vm().frames.meta(entry.frame()).kind() == Kind::Used(Use::Shared)
            };
            let goes = |entry: Entry| copies == Copies::Drop || of_object(entry);
            for vma in visit.vmas(hull) {
                if let Some(range) = vma.area.shows(object, &pages) {
                    visit.discard(range.intersect(hull), None, goes);
                }
            }
        }
        // An unmapping may be published, and not flushed yet.
        self.await_unmapping(cpu, VirtRange::USER);
    }

    /// A range that covers those pages of `object`, if some may be mapped.
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
        // SAFETY: VMAs in a view live as long as the section.
        .filter_map(|entry| unsafe { entry.value.as_ref() }.area.shows(object, pages))
        .reduce(VirtRange::hull)
}
