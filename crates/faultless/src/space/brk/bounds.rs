//! Where the heap starts and ends.

use crate::addr::PAGE_SIZE;
use crate::space::unmap::TABLE_ALIGN;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The program break, as it was when it was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::space) struct Heap {
    pub(in crate::space) start: u64,
    pub(in crate::space) end: u64,
}

impl Heap {
    /// The end of its last page.
    #[inline(always)]
    pub(super) const fn top(self) -> u64 {
        // No end is beyond user space, so this does not overflow.
        (self.end + (PAGE_SIZE - 1)) & !(PAGE_SIZE - 1)
    }

    /// Whether a table may be left without a page of the heap where the heap shrinks to `new`, the end of a page.
    #[inline(always)]
    pub(super) const fn loses_table(self, new: u64) -> bool {
        let table = new & !(TABLE_ALIGN - 1);
        // It keeps the page below `new`, if the heap has that, and all that goes is in the same table.
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

    /// What they are; another CPU may move them a moment later.
    #[inline(always)]
    pub(in crate::space) fn get(&self) -> Heap {
        Heap { start: self.start.load(Ordering::Acquire), end: self.end.load(Ordering::Acquire) }
    }
}
