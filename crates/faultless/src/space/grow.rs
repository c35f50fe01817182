//! Growth of a stack by a fault below it.

use super::STACK_GUARD;
use super::Space;
use super::area::VmaFlags;
use super::step::Step;
use super::write::Refused;
use super::write::{NOWHERE, Writing};
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::error::OutOfMemory;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::Ordering;
use crate::vm::Cpu;

impl<M: Machine> Space<M> {
    /// Sets the maximum size of a growing stack of this space, in bytes (`RLIMIT_STACK`); initially
    /// the knob `stack_limit`. A copy of the space has the same limit.
    pub fn set_stack_limit(&self, bytes: u64) {
        self.core.stack_limit.store(bytes.max(1), Ordering::Relaxed);
    }

    /// Extends the stack above `page`, which is unmapped, down to it. `Some`: there is no stack,
    /// the stack may not grow to this page, or its neighbour is too near. The returned range
    /// contains everything that decided this: the hole, and the first page of the VMA above it. The
    /// caller is in no grace section.
    ///
    /// # Errors
    /// [`OutOfMemory`]: the kernel's heap is exhausted, so that no VMA can be made.
    #[cold]
    #[inline(never)]
    pub(crate) fn grow_stack(
        &self,
        cpu: &Cpu<'_, M>,
        page: u64,
    ) -> Result<Option<VirtRange>, OutOfMemory> {
        if page < cpu.vm().machine().lowest_address() {
            return Ok(Some(VirtRange::page(page)));
        }
        loop {
            let stack = {
                let section = cpu.section();
                let view = self.view(cpu, &section);
                let found = view.find(page).or_else(|| {
                    // A stack may have been mapped in a shard that was read before, and another one
                    // unmapped in a shard that was read later. Only a view of one moment proves
                    // that there is none.
                    if view.is_whole() {
                        return None;
                    }
                    let (local, grace) = (cpu.local(), &cpu.vm().grace);
                    // SAFETY: the subsystem has one grace period, in whose sections all trees are
                    // read.
                    unsafe { self.tree.of_one_moment(&section, local, grace, cpu) }.find(page)
                });
                match found {
                    Some(entry) if entry.start > page => entry.start,
                    // The page has been mapped meanwhile, which the next attempt will find.
                    Some(_) => return Ok(None),
                    None => return Ok(Some(VirtRange::new(page, VirtRange::USER.end))),
                }
            };
            let writing = self.write(cpu, [VirtRange::new(page, stack), NOWHERE], PAGE_SIZE);
            // Including the guard, so that no mapping is made in it meanwhile.
            let place = VirtRange::new(page.saturating_sub(STACK_GUARD), stack + PAGE_SIZE);
            let grown = writing.step(place, |step| {
                // Another CPU may have grown or unmapped the stack since, so the earlier state
                // decides nothing.
                if step.view().find(page).is_none_or(|entry| entry.start != stack) {
                    return Ok(None);
                }
                writing.grow_down(step, stack, page).map(Some)
            });
            match grown {
                Ok(None) => {}
                Ok(Some(true)) => {
                    cpu.count(Counter::StackGrowth);
                    return Ok(None);
                }
                Ok(Some(false)) => return Ok(Some(VirtRange::new(page, stack + PAGE_SIZE))),
                Err(_) => return Err(OutOfMemory),
            }
        }
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Extends the VMA that starts at `stack` down to `page`, with no VMA between, if it is a stack
    /// that may grow. Returns whether it did.
    fn grow_down(
        &self,
        step: &mut Step<'_, '_, '_, '_, M>,
        stack: u64,
        page: u64,
    ) -> Result<bool, Refused> {
        let gap = VirtRange::new(page, stack);
        let limit = match self.space.core.stack_limit.load(Ordering::Relaxed) {
            0 => self.cpu.vm().knobs.stack_limit(),
            own => own,
        };
        let Some(own) = step.view().at(stack).map(|own| own.get().area()) else { return Ok(false) };
        if !own.flags.contains(VmaFlags::GROWSDOWN)
            || own.range.end - page > limit
            || own.offset < gap.pages()
        {
            return Ok(false);
        }
        if let Some(below) = step.view().before(page + 1)
            && page - below.end < STACK_GUARD
            && let below = below.get().area()
            && !below.prot.is_empty()
            && !below.flags.contains(VmaFlags::GROWSDOWN)
        {
            return Ok(false);
        }
        step.extend_down(stack, page)?;
        Ok(true)
    }
}
