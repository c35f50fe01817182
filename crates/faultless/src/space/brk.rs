//! `brk`: the heap that grows and shrinks at one end.

use super::Space;
use super::merge::Piece;
use super::unmap::TABLE_ALIGN;
use super::vma::{Area, Prot, VmaFlags};
use super::write::NOWHERE;
use super::{Heap, STACK_GUARD_PAGES};
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, USER_END, VirtRange, page_up};
use crate::machine::Machine;
use crate::vm::Cpu;

impl<M: Machine> Space<M> {
    /// Says where the heap starts: what a program loader knows. Only while the heap is empty.
    pub fn set_heap_start(&self, cpu: &Cpu<'_, M>, start: u64) {
        let mut heap = self.heap.lock(cpu);
        if heap.start == heap.end && start <= USER_END {
            *heap = Heap { start, end: start };
        }
    }

    /// Moves the end of the heap to `addr` if that is possible, and returns where it is now: the
    /// raw system call, which reports a refusal by an unchanged end.
    pub fn brk(&self, cpu: &Cpu<'_, M>, addr: u64) -> u64 {
        // Whoever waits for this lock answers flush requests, so it may be held over a flush.
        let mut heap = self.heap.lock(cpu);
        if addr >= heap.start && addr <= USER_END && self.move_break(cpu, *heap, addr) {
            heap.end = addr;
        }
        let end = heap.end;
        drop(heap);
        cpu.collect();
        end
    }

    fn move_break(&self, cpu: &Cpu<'_, M>, heap: Heap, addr: u64) -> bool {
        let (Some(old), Some(new)) = (page_up(heap.end), page_up(addr)) else {
            return false;
        };
        if new == old {
            return true;
        }
        if new < old {
            let gone = VirtRange::new(new, old);
            return self.write(cpu, [gone, NOWHERE], TABLE_ALIGN).unmap(gone).is_ok();
        }
        let range = VirtRange::new(old, new);
        if range.pages() > cpu.vm().total_frames() {
            return false;
        }
        let writing = self.write(cpu, [range, NOWHERE], PAGE_SIZE);
        // A page stays free above the heap, and a stack keeps its guard.
        if let Some(next) = writing.view().find(old) {
            let grows = writing
                .vma_at(next.start)
                .is_some_and(|vma| vma.area.flags.contains(VmaFlags::GROWSDOWN));
            let guard = if grows { STACK_GUARD_PAGES } else { 1 };
            if next.start < new.saturating_add(guard << PAGE_SHIFT) {
                return false;
            }
        }
        let area = Area {
            range,
            prot: Prot::READ | Prot::WRITE,
            flags: VmaFlags::ACCOUNT,
            offset: range.start >> PAGE_SHIFT,
            object: None,
        };
        writing.put(range, Some(Piece { area, root: None })).is_ok()
    }
}
