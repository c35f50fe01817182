//! Write-protecting the pages of an object, before they are written back.

use super::Space;
use super::pages::each_slot;
use super::write::NOWHERE;
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::file::Object;
use crate::heap::Shared;
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::table::Entry;
use crate::table::{node, protocol};
use crate::vm::Cpu;
use core::ops::Range;

impl<M: Machine> Space<M> {
    /// Write-protects the pages of `object` with the numbers `pages` in the shared mappings of this
    /// space. After the return no CPU stores to the pages through this space, until a fault has
    /// marked the page [dirty](Object::is_dirty) again. This is step 2 of write-back
    /// ([`write_back`](Shared::write_back)).
    ///
    /// The claim is exclusive, to exclude also calls that store to the pages from outside. A child
    /// that a concurrent [`fork`](Self::fork) makes of this space is a separate space: the kernel
    /// must protect the pages there, too.
    pub fn write_protect(&self, cpu: &Cpu<'_, M>, object: &Shared<Object>, pages: Range<u64>) {
        self.check_vm(cpu);
        object.check_vm(cpu);
        let mut mapped = self.hull(cpu, object, &pages);
        while let Some(hull) = mapped {
            let writing = self.write(cpu, [hull, NOWHERE], PAGE_SIZE);
            // Another operation may have moved a part before the range was claimed.
            mapped = writing.hull_of(object, &pages).filter(|now| !hull.covers(*now));
            if mapped.is_some() {
                continue;
            }
            let mut batch = FlushBatch::new(cpu, self);
            for vma in writing.vmas(hull).filter(|vma| !vma.is_private()) {
                let Some(range) = vma.area().shows(object, &pages) else { continue };
                let protect =
                    |entry: Entry| if entry.is_mapped() { entry.read_only() } else { entry };
                // SAFETY: the range is claimed.
                unsafe {
                    each_slot(cpu, self.root(), range.intersect(hull), |addr, slot| {
                        if !node::load(slot).is_none() {
                            let (old, new) = protocol::wait_and_replace(slot, cpu, protect);
                            if new.needs_flush(old) {
                                batch.flush(VirtRange::page(addr));
                            }
                        }
                    });
                }
            }
            batch.finish();
        }
    }
}
