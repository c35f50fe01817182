//! `fork`: a copy of the space whose private pages are shared until somebody writes.

use super::Space;
use super::pages::{each_slot, last_table};
use super::vma::{Vma, VmaFlags};
use super::write::{NOWHERE, Writing, make_stopped};
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::error::{Errno, Error, OutOfMemory};
use crate::machine::Machine;
use crate::rmap::AnonVma;
use crate::space::batch::FlushBatch;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::node::{self, LAST};
use crate::table::protocol;
use crate::vm::Cpu;
use alloc::boxed::Box;
use core::ptr::NonNull;

impl<M: Machine> Space<M> {
    /// A copy of this space: the same VMAs, but for those that advice keeps out, and the same
    /// contents. Private pages are shared by both, read-only, until one of them writes.
    ///
    /// # Errors
    /// `ENOMEM`; then there is no child, and this space is as it was (pages that were writable may
    /// have to be made so again by faults).
    pub fn fork(&self, cpu: &Cpu<'_, M>) -> Result<Self, Error> {
        let once = || -> Result<Self, Errno> {
            let child = Self::new(cpu).map_err(|error| error.errno)?;
            // Let go of this space before the child ends, which takes locks of its own.
            let copied = self.write(cpu, [VirtRange::USER, NOWHERE], PAGE_SIZE).copy_to(&child);
            match copied {
                Ok(()) => Ok(child),
                Err(OutOfMemory) => {
                    child.exit(cpu);
                    Err(Errno::ENOMEM)
                }
            }
        };
        // What was retired may be what is missing.
        let child = once().or_else(|_| {
            cpu.settle_retired();
            once()
        });
        cpu.collect();
        child.map_err(|errno| Error { operation: "fork", range: VirtRange::USER, errno })
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    fn copy_to(&self, child: &Space<M>) -> Result<(), OutOfMemory> {
        // Fork changes entries of every private VMA, so it is a writer of all of them. Their flush is
        // paid before any of them runs again: until then a CPU could store through an old translation
        // to a page that the child has.
        self.stop(VirtRange::USER);
        *child.heap.lock(self.cpu) = *self.space.heap.lock(self.cpu);
        let mut batch = FlushBatch::new(self.cpu, self.space);
        let copied = self.copy_vmas(child, &mut batch);
        batch.finish();
        for entry in child.tree.snapshot(&self.cpu.section()).iter_from(0) {
            // SAFETY: the child's tree owns it, and nobody else knows the child.
            unsafe { entry.value.as_ref() }.sequence.end_write();
        }
        copied
    }

    fn copy_vmas(
        &self,
        child: &Space<M>,
        batch: &mut FlushBatch<'_, '_, M>,
    ) -> Result<(), OutOfMemory> {
        let grace = &self.cpu.vm().grace;
        // SAFETY: the subsystem has one grace period, in whose sections all trees are read.
        let mut edit = unsafe { child.tree.edit(self.cpu.local(), grace, self.cpu) };
        let mut mapped = 0;
        let mut result = Ok(());
        for vma in self.vmas(VirtRange::USER) {
            if vma.area.flags.contains(VmaFlags::DONTFORK) {
                continue;
            }
            let copy = match self.copy_vma(vma) {
                Ok(copy) => copy,
                Err(oom) => {
                    result = Err(oom);
                    break;
                }
            };
            let VirtRange { start, end } = copy.area.range;
            if let Err(oom) = edit.insert(start, end, NonNull::from(&*copy)) {
                self.cpu.drop_vma(copy);
                result = Err(oom);
                break;
            }
            // The tree has it now, and is published even on failure, so that exit finds it.
            Box::leak(copy);
            mapped += vma.area.range.pages();
            if has_private_pages(vma)
                && let Err(oom) = self.share_pages(child.root(), vma.area.range, batch, child)
            {
                result = Err(oom);
                break;
            }
        }
        edit.publish();
        child.mapped.store(mapped, Ordering::Relaxed);
        result
    }

    /// The child's VMA, with a reverse-map root of its own under the parent's.
    fn copy_vma(&self, vma: &Vma) -> Result<Box<Vma>, OutOfMemory> {
        let root = match vma.root.get() {
            Some(parent) if has_private_pages(vma) => Some(AnonVma::try_new(Some(parent))?),
            _ => None,
        };
        make_stopped(vma.area.clone(), root)
    }

    /// Maps the pages of `range` in the child too, read-only in both.
    fn share_pages(
        &self,
        child_root: FrameNumber,
        range: VirtRange,
        batch: &mut FlushBatch<'_, '_, M>,
        child: &Space<M>,
    ) -> Result<(), OutOfMemory> {
        let mut table: Option<(u64, &[AtomicU64])> = None;
        let mut result = Ok(());
        let mut shared = 0;
        let mut share = |addr: u64, slot: &AtomicU64| {
            if result.is_err() || node::load(slot).is_none() {
                return;
            }
            let span = addr & !(node::table_span(LAST) - 1);
            let slots = match table {
                Some((at, slots)) if at == span => slots,
                // SAFETY: the child is this call's own.
                _ => match unsafe { last_table(self.cpu, child_root, span) } {
                    Ok(slots) => table.insert((span, slots)).1,
                    Err(oom) => {
                        result = Err(oom);
                        return;
                    }
                },
            };
            let (old, new) = protocol::settle(slot, self.cpu, |entry| {
                if entry.is_mapped() { entry.read_only() } else { entry }
            });
            if !new.is_mapped() {
                return;
            }
            if old != new {
                batch.flush(VirtRange::page(addr));
            }
            if !new.is_special() {
                self.cpu.vm().frames.meta(new.frame()).get_ref();
                shared += 1;
            }
            slots[node::index(addr, LAST)].store(new.0, Ordering::Release);
        };
        // SAFETY: the range is locked.
        unsafe { each_slot(self.cpu, self.space.root(), range, &mut share) };
        child.resident.fetch_add(shared, Ordering::Relaxed);
        result
    }
}

/// Whether a child needs the pages: what was never written it can fault in itself.
fn has_private_pages(vma: &Vma) -> bool {
    vma.area.is_private() && vma.root.id() != 0 && !vma.area.flags.contains(VmaFlags::WIPEONFORK)
}
