//! `MADV_WILLNEED`: pages of files, and of the swap area, that a program needs soon.
//!
//! The pages are read into memory and not mapped: a later fault finds the pages in the page cache,
//! or among the pages of the swap area. The reads go through the object and its
//! [store](crate::file::read), without a lock: if the mappings change during the call, some pages
//! may be read that no program needs.

use super::Space;
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::file::Object;
use crate::machine::Machine;
use crate::reclaim::isolate::BATCH;
use crate::table::node::{self, ENTRIES};
use crate::table::range::{self, Leaves};
use crate::vm::Cpu;

impl<M: Machine> Space<M> {
    /// Begins to read the pages of files that are mapped in `range`, in runs of 2 MiB, as long as
    /// memory is not short. The call ignores read errors: a later access will report them.
    pub(super) fn read_mapped(&self, cpu: &Cpu<'_, M>, range: VirtRange) {
        const RUN: u64 = ENTRIES as u64;
        let mut left = range;
        while !left.is_empty() {
            // One VMA at a time, in its current state. No section is open during a call of its
            // store.
            let mut found = None;
            self.each_area(cpu, left, |area| {
                let object = area.memory.object().filter(|object| object.is_stored());
                found = object.map(|object| {
                    let start = area.range.start.max(left.start);
                    let end = area.range.end.min(left.end).min(start + RUN * PAGE_SIZE);
                    (object.clone(), area.index_of(start), VirtRange::new(start, end))
                });
                found.is_none()
            });
            let Some((object, first, part)) = found else { break };
            let spared = cpu.vm().frames.can_spare(2 * part.pages());
            if spared {
                let _unread = object.read_ahead(cpu, first..first + part.pages());
            }
            Object::release(object, cpu);
            if !spared {
                break;
            }
            left = VirtRange::new(part.end, left.end);
        }
    }

    /// Begins to read the private pages of `range` that are in the swap area, with one read for
    /// each run of neighbouring slots, as long as memory is not short.
    pub(super) fn read_swapped(&self, cpu: &Cpu<'_, M>, range: VirtRange) {
        let Some(swap) = cpu.vm().swap.get() else { return };
        let mut left = range;
        while !left.is_empty() && cpu.vm().frames.can_spare(2 * BATCH as u64) {
            let mut slots = [0; BATCH];
            let (count, next) = self.swapped_in(cpu, left, &mut slots);
            let sides = |before: &u64, slot: &u64| before + 1 == *slot;
            for run in slots[..count].chunk_by(sides) {
                let _unread = swap.object().read_exactly(cpu, run[0]..run[0] + run.len() as u64);
            }
            left.start = next;
        }
    }

    /// Puts the slots of the first swapped pages of `range` into `slots`. Returns the number of
    /// slots, and the address where the search stopped.
    fn swapped_in(
        &self,
        cpu: &Cpu<'_, M>,
        range: VirtRange,
        slots: &mut [u64; BATCH],
    ) -> (usize, u64) {
        let section = self.section(cpu);
        // Another CPU that owns the space may change the tables in place.
        self.core.enter(cpu.id(), cpu, &section);
        let mut count = 0;
        let visit = |leaves: Leaves<'_>| {
            let Leaves::Pages { start, slots: entries } = leaves else { return Ok(()) };
            for (at, entry) in entries.iter().map(node::load).enumerate() {
                if count == BATCH {
                    return Err(start + at as u64 * PAGE_SIZE);
                }
                if entry.is_swapped() {
                    slots[count] = entry.slot();
                    count += 1;
                }
            }
            cpu.serve_flushes();
            Ok(())
        };
        // SAFETY: in a section of the space.
        let visited = unsafe { range::visit(cpu.vm().machine(), self.root(), range, cpu, visit) };
        (count, visited.err().unwrap_or(range.end))
    }
}
