//! The caches of upper-level entries, which Intel calls paging-structure caches. For the three
//! levels above the last, they hold the next table, and the rights of the way there ("Intel 64 and
//! IA-32 Architectures Software Developer's Manual", volume 3, 4.10.3). A walk starts at the
//! deepest known table. Barr, Cox and Rixner compare such caches in "Translation caching: skip,
//! don't walk (the page table)", ISCA 2010; the sizes here are similar.
//!
//! Like hardware, the caches keep an entry even if the walk ended in a fault, and a fault drops no
//! entry: entries not covered by a program's invalidation stay. A table that was unlinked without a
//! flush is therefore still used, a defect hidden by emulators without such caches.

use super::buffer::Buffer;
use super::{EPOCH_SHIFT, LAST_EPOCH};
use crate::mmu::{PageSize, ROOT_SHIFT, Step};
use faultless::PAGE_SHIFT;
use faultless::format::INDEX_BITS;

/// log2 of the bytes that an entry of the second and of the third level is for.
const SECOND: u32 = PageSize::Size2M.shift();
const THIRD: u32 = PageSize::Size1G.shift();

/// The caches of one CPU, by the level of their entries.
#[derive(Debug)]
pub(super) struct UpperCaches {
    /// Entries of the root, each for 512 GiB.
    root: Buffer<1, 4>,
    /// Entries that cover 1 GiB each.
    third: Buffer<1, 4>,
    /// Entries that cover 2 MiB each.
    second: Buffer<8, 4>,
}

/// Returns the number of the covered range, above `shift`, and the tag: this number and the epoch.
fn tag(addr: u64, shift: u32, epoch: u64) -> (u64, u64) {
    debug_assert!(epoch <= LAST_EPOCH);
    (addr >> shift, addr >> shift | epoch << EPOCH_SHIFT)
}

impl UpperCaches {
    pub(super) fn new() -> Self {
        Self { root: Buffer::new(), third: Buffer::new(), second: Buffer::new() }
    }

    pub(super) fn find(&self, addr: u64, epoch: u64) -> Option<Step> {
        let (number, key) = tag(addr, SECOND, epoch);
        if let Some(found) = self.second.find(number, key) {
            return Some(Step::from_cache(found, PAGE_SHIFT));
        }
        let (number, key) = tag(addr, THIRD, epoch);
        if let Some(found) = self.third.find(number, key) {
            return Some(Step::from_cache(found, SECOND));
        }
        let (number, key) = tag(addr, ROOT_SHIFT, epoch);
        Some(Step::from_cache(self.root.find(number, key)?, THIRD))
    }

    pub(super) fn fill(&self, addr: u64, epoch: u64, step: Step) {
        let (number, key) = tag(addr, step.shift() + INDEX_BITS, epoch);
        let found = step.into_cache();
        match step.shift() {
            PAGE_SHIFT => self.second.fill(number, key, found),
            SECOND => self.third.fill(number, key, found),
            _ => self.root.fill(number, key, found),
        }
    }

    /// Drops the known tables on the way to `addr`.
    pub(super) fn forget(&self, addr: u64, epoch: u64) {
        let (number, key) = tag(addr, SECOND, epoch);
        self.second.drop_page(number, key);
        let (number, key) = tag(addr, THIRD, epoch);
        self.third.drop_page(number, key);
        let (number, key) = tag(addr, ROOT_SHIFT, epoch);
        self.root.drop_page(number, key);
    }

    pub(super) fn clear(&self) {
        self.second.clear();
        self.third.clear();
        self.root.clear();
    }
}
