//! The end of a space, and the remains of a space that is dropped instead.

use super::Space;
use super::brk::bounds::{Heap, HeapBounds};
use super::dropped::{DroppedSpace, take_vmas};
use crate::addr::{FrameNumber, VirtRange};
use crate::ended::{Left, Place};
use crate::fault::prefault::history::HistoryCell;
use crate::machine::{CpuId, MAX_CPUS, Machine};
use crate::space::batch::FlushBatch;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::grace::{RetireChain, RetireLink};
use crate::sync::order::Reclaim;
use crate::table::node::ROOT;
use crate::vm::Cpu;
use core::marker::PhantomData;

impl<M: Machine> Space<M> {
    /// Unmaps all pages and frees the space's tables. No CPU may run the space any more, including
    /// this one.
    ///
    /// # Panics
    /// If a CPU still runs the space, and so may use its tables: the CPU must
    /// [deactivate](Space::deactivate) it first. The space's frames are leaked then. If `cpu`
    /// belongs to another [`Vm`](crate::Vm); a CPU of its own `Vm` ends the space later. In builds
    /// with debug assertions, inside a closure that lists areas; the space is dropped then, and
    /// [ended later](Cpu::end_dropped).
    pub fn exit(self, cpu: &Cpu<'_, M>) {
        self.check_vm(cpu);
        // The first class that the call waits for: a CPU that may not wait has changed no state
        // yet.
        cpu.local().order().before::<Reclaim>();
        if let Some(CpuId(inside)) = self.core.cpus.iter(cpu.vm().machine().cpus()).next() {
            panic!("{:?} must not end while CPU {inside} runs it", self.id());
        }
        self.end(cpu);
        cpu.end_dropped();
        cpu.collect();
    }

    /// [`exit`](Self::exit) of a space that no CPU runs, on a CPU of its subsystem.
    pub(crate) fn end(mut self, cpu: &Cpu<'_, M>) {
        self.place.vacate();
        cpu.vm().lazy.remove(cpu, &self.core);
        cpu.vm().anchors.remove(&self.core, cpu);
        self.core.close(cpu);
        {
            let writing = self.write(cpu, [VirtRange::USER, VirtRange::new(0, 0)], 1);
            writing.write_lock_all();
            let mut batch = FlushBatch::new(cpu, &self);
            batch.flush(VirtRange::USER);
            for vma in writing.vmas(VirtRange::USER) {
                writing.zap(vma.range(), None, &mut batch);
            }
            batch.finish();
        }
        // `self` is owned: no other CPU can find one of its VMAs or tables any more, so none needs
        // to wait for a grace period.
        let _tables = Tables { cpu, root: self.root() };
        let mut vmas = RetireChain::default();
        // SAFETY: a link is the first field of a VMA. This CPU alone reaches the VMAs.
        take_vmas(&mut self.tree, |vma| unsafe {
            vma.as_ref().sequence.detach();
            vmas.append(vma.cast::<RetireLink>());
        });
        // SAFETY: as above.
        unsafe { cpu.leave_gone(vmas) };
        cpu.free_gone();
    }

    /// Reconstructs a space from its remains.
    pub(crate) fn from_remains(mut remains: DroppedSpace) -> Self {
        let core = remains.core.clone();
        Self {
            id: core.id,
            root: core.root,
            anchor: core.kin.anchor.word(core.id),
            locking: AtomicU64::new(remains.locking),
            history: core::mem::replace(&mut remains.history, HistoryCell::new()),
            tree: core::mem::take(&mut remains.tree),
            core,
            // The end of a space does not use these fields.
            heap: HeapBounds::new(Heap { start: 0, end: 0 }),
            place: Place::none(),
            machine: PhantomData,
        }
    }
}

/// The tables of a space that ends: flushed, and unreachable. The drop frees them, also if the
/// store of an object that ends with its last VMA panics.
struct Tables<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    root: FrameNumber,
}

impl<M: Machine> Drop for Tables<'_, '_, M> {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { self.cpu.free_tables(self.root, ROOT) };
    }
}

impl<M: Machine> Drop for Space<M> {
    fn drop(&mut self) {
        if self.core.cpus.iter(MAX_CPUS).next().is_some() {
            // See `ended`.
            self.place.vacate();
        }
        let Self { tree, history, core, locking, place, .. } = self;
        place.push(|| {
            Left::Space(DroppedSpace {
                tree: core::mem::take(tree),
                history: core::mem::replace(history, HistoryCell::new()),
                core: core.clone(),
                locking: locking.load(Ordering::Relaxed),
            })
        });
    }
}
