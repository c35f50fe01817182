//! Eviction of an object's pages from all spaces.

use super::object::Object;
use crate::addr::PAGE_SHIFT;
use crate::machine::Machine;
use crate::reclaim::isolate::FrameList;
use crate::table::range::Leaves;
use crate::vm::Cpu;
use core::ops::Range;

impl Object {
    /// Evicts the pages of `pages` as far as possible: dirty pages are first written to the store,
    /// and all mappings are removed. The pages are read again when needed. Pages stay if they are
    /// pinned, locked, in use by another call, or cannot be written by the store; all pages stay if
    /// the object has no store. Returns the number of frames released, some of which may become
    /// free only after a deferred [flush](crate::Cpu::flush_deferred).
    ///
    /// If the choice of pages does not matter, use [`Cpu::reclaim`], which chooses better. The call
    /// waits for other CPUs, and calls the store.
    pub fn evict<M: Machine>(&self, cpu: &Cpu<'_, M>, pages: Range<u64>) -> u64 {
        self.check_vm(cpu);
        let (mut left, mut freed) = (pages, 0);
        loop {
            let (_holds, mut frames) = (cpu.hold_pages(), FrameList::new());
            let gather = |leaves: Leaves<'_>| {
                let Leaves::Pages { start, slots } = leaves else { return Ok(()) };
                for (index, slot) in (start >> PAGE_SHIFT..).zip(slots) {
                    if frames.is_full() {
                        return Err(index);
                    }
                    if let Some(frame) = Self::refer_to_copy(cpu, slot) {
                        frames.push(frame);
                    }
                }
                Ok(())
            };
            // SAFETY: the object's tables are unlinked only when no share is left.
            let gathered = unsafe { self.top().visit(cpu, left.clone(), gather) };
            freed += cpu.evict(&frames);
            match gathered {
                Ok(()) => return freed,
                Err(index) => left.start = index,
            }
        }
    }
}
