//! Pages of an object that are to leave memory, whoever maps them.

use super::object::Object;
use crate::addr::PAGE_SHIFT;
use crate::machine::Machine;
use crate::reclaim::taken::FrameList;
use crate::table::range::Leaves;
use crate::vm::Cpu;
use core::ops::Range;

impl Object {
    /// Evicts the pages of `pages`, as far as that is possible: those that are dirty are written to the store first, and none stays mapped. They
    /// are read again where they are needed. Pages stay that are pinned, locked, or in use by another call, and those that the store cannot write; and all,
    /// if the object has no store. Returns how many frames that gave, some of which may be free only after a
    /// [flush](crate::Cpu::settle_flushes) that is deferred.
    ///
    /// Where it does not matter which pages leave, [`Cpu::reclaim`] knows better. It waits for other CPUs, and calls the store.
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
