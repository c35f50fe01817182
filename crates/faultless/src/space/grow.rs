//! Growth of a stack by a fault below it.

use super::Space;
use super::vma::{Area, VmaFlags};
use super::write::NOWHERE;
use super::{MMAP_MIN_ADDR, STACK_GUARD_PAGES};
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtRange};
use crate::error::OutOfMemory;
use crate::fault::anon::root_of_neighbour;
use crate::machine::Machine;
use crate::rmap::AnonVma;
use crate::stat::Counter;
use crate::vm::Cpu;

impl<M: Machine> Space<M> {
    /// Extends the stack above `page`, which is unmapped, down to it. False: there is none, it may not
    /// grow so far, or its neighbour is too near. Not inside a grace section.
    ///
    /// # Errors
    /// [`OutOfMemory`]: it might grow, if the heap had room for what describes it.
    pub(crate) fn grow_stack(&self, cpu: &Cpu<'_, M>, page: u64) -> Result<bool, OutOfMemory> {
        if page < MMAP_MIN_ADDR {
            return Ok(false);
        }
        let stack = {
            let section = cpu.section();
            match self.tree.snapshot(&section).find(page) {
                Some(entry) if entry.start > page => entry.start,
                // Nothing above; or mapped meanwhile, which the next attempt finds out.
                other => return Ok(other.is_some()),
            }
        };
        let gap = VirtRange::new(page, stack);
        let guard = STACK_GUARD_PAGES << PAGE_SHIFT;
        let writing = self.write(cpu, [gap, NOWHERE], PAGE_SIZE);
        let Some(vma) = writing.vma_at(stack) else {
            return Ok(false);
        };
        let area = &vma.area;
        if !area.flags.contains(VmaFlags::GROWSDOWN)
            || area.range.start != stack
            || writing.vmas(gap).next().is_some()
            || area.range.end - page > cpu.vm().knobs.stack_limit()
            || area.offset < gap.pages()
        {
            return Ok(false);
        }
        if let Some(below) = writing.view().before(page + 1)
            && page - below.end < guard
            && writing.vma_at(below.start).is_some_and(|vma| {
                !vma.area.prot.is_empty() && !vma.area.flags.contains(VmaFlags::GROWSDOWN)
            })
        {
            return Ok(false);
        }
        writing.stop(area.range);
        // It grows alone: even one below that is like it is not joined.
        let range = VirtRange::new(page, area.range.end);
        let more = Area { range, offset: area.offset - gap.pages(), ..area.clone() };
        // As on Linux, one that has grown has a root, which tells whom it merges with later.
        let root = vma.root.get().or_else(|| root_of_neighbour(&writing.view(), area));
        let root = root.map_or_else(|| AnonVma::try_new(None), Ok).map_err(|_| OutOfMemory)?;
        let grown = writing.make(more, Some(root))?;
        writing.replace(range, [None, Some(grown), None]).map_err(|_| OutOfMemory)?;
        cpu.count(Counter::StackGrowth);
        Ok(true)
    }
}
