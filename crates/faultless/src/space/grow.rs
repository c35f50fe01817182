//! Growth of a stack by a fault below it.

use super::Space;
use super::vma::{Area, VmaFlags};
use super::write::Writing;
use super::{MMAP_MIN_ADDR, STACK_GUARD};
use crate::addr::{PAGE_SIZE, VirtRange};
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
    #[cold]
    #[inline(never)]
    pub(crate) fn grow_stack(&self, cpu: &Cpu<'_, M>, page: u64) -> Result<bool, OutOfMemory> {
        if page < MMAP_MIN_ADDR {
            return Ok(false);
        }
        loop {
            let stack = {
                let section = cpu.section();
                match self.tree.snapshot(&section).find(page) {
                    Some(entry) if entry.start > page => entry.start,
                    // Nothing above; or mapped meanwhile, which the next attempt finds out.
                    other => return Ok(other.is_some()),
                }
            };
            // What comes into its guard meanwhile would be too near, so that is locked too.
            let guard = VirtRange::new(page.saturating_sub(STACK_GUARD), page);
            let writing = self.write(cpu, [VirtRange::new(page, stack), guard], PAGE_SIZE);
            // Another CPU may have grown it since, or unmapped it: what was seen of it decides nothing.
            if writing.view().find(page).is_some_and(|entry| entry.start == stack) {
                return writing.grow_down(stack, page);
            }
        }
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Extends the VMA that starts at `stack` down to `page`, with nothing between, if it is a stack that
    /// may. Returns whether it did.
    fn grow_down(&self, stack: u64, page: u64) -> Result<bool, OutOfMemory> {
        let Some(vma) = self.vma_at(stack) else {
            return Ok(false);
        };
        let (area, gap) = (&vma.area, VirtRange::new(page, stack));
        if !area.flags.contains(VmaFlags::GROWSDOWN)
            || area.range.end - page > self.cpu.vm().knobs.stack_limit()
            || area.offset < gap.pages()
        {
            return Ok(false);
        }
        if let Some(below) = self.view().before(page + 1)
            && page - below.end < STACK_GUARD
            && self.vma_at(below.start).is_some_and(|vma| {
                !vma.area.prot.is_empty() && !vma.area.flags.contains(VmaFlags::GROWSDOWN)
            })
        {
            return Ok(false);
        }
        self.stop(area.range);
        // It grows alone: even one below that is like it is not joined.
        let range = VirtRange::new(page, area.range.end);
        let more = Area { range, offset: area.offset - gap.pages(), ..area.clone() };
        // As on Linux, one that has grown has a root, which tells whom it merges with later.
        let root = vma.root.get().or_else(|| root_of_neighbour(&self.view(), area));
        let root = root.map_or_else(|| AnonVma::try_new(None), Ok).map_err(|_| OutOfMemory)?;
        let grown = self.make(more, Some(root))?;
        self.replace(range, [None, Some(grown), None]).map_err(|_| OutOfMemory)?;
        self.cpu.count(Counter::StackGrowth);
        Ok(true)
    }
}
