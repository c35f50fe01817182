//! The bounds of the heap.

use crate::addr::PAGE_SIZE;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::node::TABLE_ALIGN;

/// A copy of the program break, read at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::space) struct Heap {
    pub(in crate::space) start: u64,
    pub(in crate::space) end: u64,
}

impl Heap {
    /// Returns the end of the heap's last page.
    #[inline(always)]
    pub(super) const fn top(self) -> u64 {
        // No end is beyond user space, so this does not overflow.
        (self.end + (PAGE_SIZE - 1)) & !(PAGE_SIZE - 1)
    }

    /// Returns whether shrinking the heap to `new`, the end of a page, leaves a table without pages
    /// of the heap. The heap's pages are assumed to be mapped. If the program has unmapped the
    /// remaining pages, their table may stay empty until the heap uses it again or the space ends.
    #[inline(always)]
    pub(super) const fn loses_table(self, new: u64) -> bool {
        let table = new & !(TABLE_ALIGN - 1);
        // No table is lost if the page below `new` belongs to the heap, and all removed pages are
        // in the same table.
        table == new || self.start > new - PAGE_SIZE || self.top() > table + TABLE_ALIGN
    }
}

/// The program break.
#[derive(Debug)]
pub(in crate::space) struct HeapBounds {
    pub(super) start: AtomicU64,
    pub(super) end: AtomicU64,
}

impl HeapBounds {
    pub(in crate::space) fn new(heap: Heap) -> Self {
        Self { start: AtomicU64::new(heap.start), end: AtomicU64::new(heap.end) }
    }

    /// Returns the bounds; another CPU may move them immediately afterwards.
    #[inline(always)]
    pub(in crate::space) fn get(&self) -> Heap {
        Heap { start: self.start.load(Ordering::Acquire), end: self.end.load(Ordering::Acquire) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE_SIZE;
    const TABLE: u64 = TABLE_ALIGN;

    #[test]
    fn a_table_without_remaining_pages_is_lost() {
        const AT: u64 = 8 * TABLE;
        let near = |at: u64| [at - P, at - 1, at, at + 1, at + P, at + 3 * P];
        let starts = near(AT).into_iter().chain(near(AT + TABLE));
        for start in starts {
            for pages in [1, 2, 4, 511, 512, 513, 1025] {
                let heap = Heap { start, end: start + pages * P };
                let first = start.next_multiple_of(P);
                for new in (first..heap.top()).step_by(P as usize) {
                    let stays = |table: u64| (first..new).contains(&table.max(first));
                    let mut gone = (new..heap.top()).step_by(P as usize);
                    let lost = gone.any(|page| !stays(page & !(TABLE - 1)));
                    assert_eq!(heap.loses_table(new), lost, "{heap:x?} to {new:#x}");
                }
            }
        }
    }
}
