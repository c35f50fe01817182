//! `brk`: the heap, which grows and shrinks at its end.
//!
//! The bounds of the heap are two atomics. They are read before a lock is taken, as a guess, and
//! again under the lock: a CPU that moves the end, even within its page, or the start, holds a
//! claim on the pages on either side of the end.

pub(super) mod bounds;

use super::STACK_GUARD;
use super::Space;
use super::area::{PageSource, Prot, VmaFlags};
use super::made::State;
use super::place::is_stack;
use super::vma::Piece;
use super::write::{NOWHERE, Writing};
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtRange};
use crate::error::{Errno, Error};
use crate::machine::Machine;
use crate::sync::atomic::Ordering;
use crate::table::format::USER_END;
use crate::table::node::TABLE_ALIGN;
use crate::vm::Cpu;
use bounds::Heap;

impl<M: Machine> Space<M> {
    /// Sets the start of the heap, for a program loader.
    ///
    /// # Errors
    /// `EINVAL`: the heap is not empty, or would start below the [lowest
    /// address](Machine::lowest_address) or beyond user space. A failed call changes nothing.
    pub fn set_heap_start(&self, cpu: &Cpu<'_, M>, start: u64) -> Result<(), Error> {
        let _writing = self.write(cpu, [VirtRange::USER, NOWHERE], PAGE_SIZE);
        let heap = self.heap.get();
        if heap.start != heap.end || start < cpu.vm().machine().lowest_address() || start > USER_END
        {
            let range = VirtRange::new(start, start);
            return Err(Error { operation: "set_heap_start", range, errno: Errno::EINVAL });
        }
        self.heap.start.store(start, Ordering::Release);
        self.heap.end.store(start, Ordering::Release);
        Ok(())
    }

    /// Moves the end of the heap to `addr` if possible, and returns the current end: the raw system
    /// call, which reports a refusal by an unchanged end.
    pub fn brk(&self, cpu: &Cpu<'_, M>, addr: u64) -> u64 {
        let end = loop {
            let heap = self.heap.get();
            if addr < heap.start || addr > USER_END || addr == heap.end {
                self.check_vm(cpu);
                break heap.end;
            }
            if let Some(end) = self.move_break(cpu, heap, addr) {
                break end;
            }
        };
        cpu.collect();
        end
    }

    /// Moves the end of the heap, whose bounds were read as `heap`. Returns the current end, or
    /// `None` if another CPU moved it first.
    fn move_break(&self, cpu: &Cpu<'_, M>, heap: Heap, addr: u64) -> Option<u64> {
        let (old, new) = (heap.top(), Heap { end: addr, ..heap }.top());
        let shrinks = new < old;
        let range = VirtRange::new(old.min(new), old.max(new));
        if !shrinks && !cpu.vm().may_promise(range.pages()) {
            self.check_vm(cpu);
            return Some(heap.end);
        }
        if new == old {
            return self.move_within_page(cpu, heap, addr);
        }
        // All CPUs that move the end claim the pages on either side of it, and so exclude each
        // other.
        let align = if shrinks && heap.loses_table(new) { TABLE_ALIGN } else { PAGE_SIZE };
        let writing = self.write(cpu, [range.with_neighbours(), NOWHERE], align);
        if self.heap.get() != heap {
            return None;
        }
        let moved = if shrinks {
            // The required range is claimed for any state of the tree: see above.
            writing.unmap(range, |_| true).is_ok()
        } else {
            writing.extend_heap(range)
        };
        if moved {
            self.heap.end.store(addr, Ordering::Release);
            return Some(addr);
        }
        Some(heap.end)
    }

    /// [`move_break`](Self::move_break) to an address in the same page.
    #[inline(never)]
    fn move_within_page(&self, cpu: &Cpu<'_, M>, heap: Heap, addr: u64) -> Option<u64> {
        let top = VirtRange::new(heap.top(), heap.top());
        let _writing = self.write(cpu, [top.with_neighbours(), NOWHERE], PAGE_SIZE);
        if self.heap.get() != heap {
            return None;
        }
        self.heap.end.store(addr, Ordering::Release);
        Some(addr)
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Maps `range`, adjacent to the heap, unless another VMA is too near. Returns whether it did.
    fn extend_heap(&self, range: VirtRange) -> bool {
        let extended = self.step(range.with_neighbours(), |step| {
            // A page stays free above the heap, and a stack keeps its guard.
            if let Some(next) = step.view().find(range.start) {
                let guard = if is_stack(next) { STACK_GUARD } else { PAGE_SIZE };
                if next.start < range.end.saturating_add(guard) {
                    return Err(Errno::ENOMEM.into());
                }
            }
            let (offset, memory) = (range.start >> PAGE_SHIFT, PageSource::Anonymous);
            let piece = Piece::new(range, Prot::RW, VmaFlags::ACCOUNT, offset, memory);
            step.replace(range, piece, State::Unlocked)
        });
        extended.is_ok()
    }
}
