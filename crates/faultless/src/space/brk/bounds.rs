//! Where the heap starts and ends.

use crate::sync::atomic::{AtomicU64, Ordering};

/// The program break, as it was when it was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::space) struct Heap {
    pub(in crate::space) start: u64,
    pub(in crate::space) end: u64,
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
