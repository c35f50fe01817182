//! What a space does when an object behind some of its mappings was shortened.

use super::Space;
use super::write::NOWHERE;
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::file::Object;
use crate::heap::Shared;
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::vm::Cpu;

impl<M: Machine> Space<M> {
    /// Unmaps every page of `object` from the one at `first` on, wherever it is mapped here, and drops
    /// private copies of such pages, as Linux does when a file is truncated. The mappings stay. When it
    /// returns no CPU uses the pages through this space any more, and those that the object
    /// [has no longer](Object::set_pages) are not mapped again.
    ///
    /// A child that [`fork`](Self::fork) is making of this space is a space like any other: the kernel
    /// lets none be in the making between the shortening of the object and the last revocation.
    pub fn revoke(&self, cpu: &Cpu<'_, M>, object: &Shared<Object>, first: u64) {
        while let Some(hull) = self.hull(cpu, object, first) {
            let writing = self.write(cpu, [hull, NOWHERE], PAGE_SIZE);
            // A call may have moved some of it before the lock was had.
            match self.hull(cpu, object, first) {
                Some(now) if !hull.covers(now) => continue,
                None => return,
                Some(_) => {}
            }
            writing.stop(hull);
            let mut batch = FlushBatch::new(cpu, self);
            for vma in writing.vmas(hull) {
                if let Some(range) = vma.area.shows(object, first) {
                    writing.zap(range, None, &mut batch);
                }
            }
            batch.finish();
            return;
        }
    }

    /// A range that covers all pages of `object` from `first` on, if some may be mapped.
    fn hull(&self, cpu: &Cpu<'_, M>, object: &Shared<Object>, first: u64) -> Option<VirtRange> {
        let section = self.section(cpu);
        self.tree
            .snapshot(&section)
            .iter_from(0)
            // SAFETY: VMAs in a view live as long as the section.
            .filter_map(|entry| unsafe { entry.value.as_ref() }.area.shows(object, first))
            .reduce(VirtRange::hull)
    }
}
