//! `brk`: the heap that grows and shrinks at one end.

use super::Space;
use super::merge::Piece;
use super::unmap::TABLE_ALIGN;
use super::vma::{Area, Prot, VmaFlags};
use super::write::{NOWHERE, Writing};
use super::{Heap, STACK_GUARD};
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, USER_END, VirtRange, page_up};
use crate::machine::Machine;
use crate::vm::Cpu;

impl<M: Machine> Space<M> {
    /// Says where the heap starts: what a program loader knows. Only while the heap is empty.
    pub fn set_heap_start(&self, cpu: &Cpu<'_, M>, start: u64) {
        self.check_vm(cpu);
        let mut heap = self.heap.lock(cpu);
        if heap.start == heap.end && start <= USER_END {
            *heap = Heap { start, end: start };
        }
    }

    /// Moves the end of the heap to `addr` if that is possible, and returns where it is now: the
    /// raw system call, which reports a refusal by an unchanged end.
    pub fn brk(&self, cpu: &Cpu<'_, M>, addr: u64) -> u64 {
        self.check_vm(cpu);
        let end = loop {
            let heap = *self.heap.lock(cpu);
            if addr < heap.start || addr > USER_END {
                break heap.end;
            }
            if let Some(end) = self.move_break(cpu, heap, addr) {
                break end;
            }
        };
        cpu.collect();
        end
    }

    /// Moves the end of the heap, which was seen as `heap`. Returns where it is now, or `None` when
    /// another CPU moved it first.
    ///
    /// The heap's lock is a leaf, held while nothing is waited for: fork takes it with the whole
    /// space locked.
    fn move_break(&self, cpu: &Cpu<'_, M>, heap: Heap, addr: u64) -> Option<u64> {
        let (Some(old), Some(new)) = (page_up(heap.end), page_up(addr)) else {
            return Some(heap.end);
        };
        let shrinks = new < old;
        let range = VirtRange::new(old.min(new), old.max(new));
        if !shrinks && range.pages() > cpu.vm().total_frames() {
            return Some(heap.end);
        }
        let same = |now: &Heap| now.start == heap.start && page_up(now.end) == Some(old);
        if new == old {
            let mut now = self.heap.lock(cpu);
            now.end = if same(&now) { addr } else { return None };
            return Some(addr);
        }
        // Both growing and shrinking lock the pages on either side of the end, so all that move it by a page or
        // more exclude each other.
        let align = if shrinks { TABLE_ALIGN } else { PAGE_SIZE };
        let writing = self.write(cpu, [range, NOWHERE], align);
        if !same(&self.heap.lock(cpu)) {
            return None;
        }
        let moved = if shrinks { writing.unmap(range).is_ok() } else { writing.extend_heap(range) };
        let mut now = self.heap.lock(cpu);
        if moved {
            now.end = addr;
        }
        Some(now.end)
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Maps `range`, right above the heap, unless something is too near. Returns whether it did.
    fn extend_heap(&self, range: VirtRange) -> bool {
        // A page stays free above the heap, and a stack keeps its guard. The VMA above is not locked: one that
        // comes nearer meanwhile is ordered after this growth, but for a stack, whose growth locks its guard.
        if let Some(next) = self.view().find(range.start) {
            let grows = self.vma_anywhere(next).area.flags.contains(VmaFlags::GROWSDOWN);
            let guard = if grows { STACK_GUARD } else { PAGE_SIZE };
            if next.start < range.end.saturating_add(guard) {
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
        self.put(range, Some(Piece { area, root: None })).is_ok()
    }
}
