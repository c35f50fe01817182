//! The end of a space.

use super::Space;
use crate::addr::VirtRange;
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::sync::atomic::Ordering;
use crate::table::node::ROOT;
use crate::vm::Cpu;
use alloc::boxed::Box;

impl<M: Machine> Space<M> {
    /// Unmaps everything and frees the space's tables. This CPU may still run it; no other does any
    /// more, or, if one does, its translations are flushed and it must not use the tables again.
    pub fn exit(mut self, cpu: &Cpu<'_, M>) {
        cpu.vm().lazy.remove(cpu, &self.core);
        {
            let writing = self.write(cpu, [VirtRange::USER, VirtRange::new(0, 0)], 1);
            writing.stop(VirtRange::USER);
            let mut batch = FlushBatch::new(cpu, &self);
            batch.flush(VirtRange::USER);
            for vma in writing.vmas(VirtRange::USER) {
                writing.zap(vma.area.range, None, &mut batch);
            }
            batch.finish();
        }
        if cpu.state().resident.space.load(Ordering::Relaxed) == self.id().0 {
            self.deactivate(cpu);
        }
        // `self` is by value: nobody else can find a VMA or a table of it any more, and so none needs
        // to wait for a grace period.
        let section = cpu.section();
        for entry in self.tree.snapshot(&section).iter_from(0) {
            // SAFETY: the tree's only pointer to it; made by `heap::try_box`.
            cpu.drop_vma(unsafe { Box::from_raw(entry.value.as_ptr()) });
        }
        drop(section);
        self.tree.destroy();
        // SAFETY: flushed above, and unreachable.
        unsafe { cpu.free_tables(self.root(), ROOT) };
        cpu.collect();
    }
}
