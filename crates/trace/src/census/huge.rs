//! Huge pages of shared memory.

use crate::page_set::PageSet;
use faultless::PAGE_SIZE;
use std::cell::RefCell;
use std::rc::Rc;

/// Faults on shared memory in aligned ranges of the size of a huge page within one mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugeShared {
    /// Faults of `shared`.
    pub first: u64,
    /// Faults of `file`.
    pub mapped: u64,
    /// Huge pages that would be allocated.
    pub folios: u64,
    /// Faults of other processes that would map existing huge pages.
    pub maps: u64,
}

impl HugeShared {
    /// Returns the bytes that would be allocated and never touched, in huge pages of this number of
    /// pages.
    pub fn unused(&self, huge: u64) -> u64 {
        (self.folios * huge).saturating_sub(self.first) * PAGE_SIZE
    }
}

/// Huge pages of shared memory, by their first page.
#[derive(Clone, Default)]
pub(super) struct SharedFolios {
    /// The huge pages that this process or a relative would have allocated.
    pub allocated: Rc<RefCell<PageSet>>,
    /// The huge pages that this process would have mapped.
    pub mapped: PageSet,
}
