//! The end of a space.

use super::Space;
use crate::addr::VirtRange;
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::table::node::ROOT;
use crate::vm::Cpu;
use alloc::boxed::Box;

impl<M: Machine> Space<M> {
    /// Unmaps everything and frees the space's tables. No CPU runs it any more, this one included.
    ///
    /// # Panics
    /// When a CPU still runs the space, and so may use its tables: it [leaves](Space::deactivate) first. When
    /// `cpu` is of another [`Vm`](crate::Vm). The space's frames are lost then.
    pub fn exit(mut self, cpu: &Cpu<'_, M>) {
        self.check_vm(cpu);
        let inside = self.core.cpus.iter(cpu.vm().machine().cpus()).next();
        assert!(inside.is_none(), "{:?} is to end while {inside:?} runs it", self.id());
        cpu.vm().lazy.remove(cpu, &self.core);
        {
            let writing = self.write(cpu, [VirtRange::USER, VirtRange::new(0, 0)], 1);
            writing.write_lock_all();
            let mut batch = FlushBatch::new(cpu, &self);
            batch.flush(VirtRange::USER);
            for vma in writing.vmas(VirtRange::USER) {
                writing.zap(vma.area.range, None, &mut batch);
            }
            batch.finish();
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
