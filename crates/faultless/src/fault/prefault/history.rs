//! The access history of a space's previous mappings.
//!
//! Allocators unmap memory and map it again, and programs often use the same pages again: a thread
//! that reuses the arena of another, a buffer that is mapped for each file. So an unmap records
//! here, for each block of [`BLOCK`] pages, which pages had been used, and a fault in the block
//! uses the record to predict.
//!
//! A page is predicted if it was used in each of its last three mappings, or in all if there were
//! fewer. A page with a single previous mapping is predicted only while second mappings have mostly
//! resembled the first. All records are hints: slots are overwritten and read without a lock, and a
//! torn slot costs one window.

mod cell;

pub(crate) use cell::HistoryCell;

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Pages in a block; blocks are aligned to their size.
pub const BLOCK: u64 = 64;
const SLOTS: usize = 64;
/// The scale of [`History::likeness`].
const ALIKE: u32 = 256;

/// The access history of a block's previous mappings. Bit n is the block's page n.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockHistory {
    /// The pages that were mapped before.
    pub known: u64,
    /// The pages that are predicted to be used.
    pub expected: u64,
    /// The pages that were used in the last mapping.
    pub last: u64,
}

/// The access history of one space.
#[derive(Debug)]
pub struct History {
    slots: [Slot; SLOTS],
    /// The recent fraction of pages used in one mapping that were also used in the next, in units
    /// of 1/[`ALIKE`].
    likeness: AtomicU32,
}

/// The access history of one block.
#[derive(Debug, Default)]
struct Slot {
    /// The block number plus one; 0 is an empty slot.
    block: AtomicU64,
    /// The pages that were used in the last mapping, the second last, and the third last. If there
    /// were fewer mappings, all pages count as used in the missing ones.
    used: [AtomicU64; 3],
    /// The pages that were mapped at least once.
    once: AtomicU64,
    /// The pages that were mapped at least twice.
    twice: AtomicU64,
}

impl Default for History {
    fn default() -> Self {
        Self { slots: core::array::from_fn(|_| Slot::default()), likeness: AtomicU32::new(ALIKE) }
    }
}

impl History {
    /// Returns the history of the block of `page` (a page number).
    #[inline]
    pub fn recall(&self, page: u64) -> BlockHistory {
        let slot = self.slot(page);
        if slot.block.load(Relaxed) != page / BLOCK + 1 {
            return BlockHistory::default();
        }
        let alike = self.likeness.load(Relaxed) >= ALIKE - ALIKE / 10;
        let known = slot.once.load(Relaxed);
        let trusted = if alike { known } else { slot.twice.load(Relaxed) };
        let [last, before, first] = slot.used.each_ref().map(|used| used.load(Relaxed));
        BlockHistory { known, expected: last & before & first & trusted, last: last & known }
    }

    /// Records that the pages `taken` of the block of `page` are unmapped, and that the pages
    /// `used` were accessed. Both are masks as in [`BlockHistory`]. The caller must not pass a
    /// block in which no page of `taken` was mapped.
    pub fn record(&self, page: u64, taken: u64, used: u64) {
        let slot = self.slot(page);
        let used = used & taken;
        if slot.block.swap(page / BLOCK + 1, Relaxed) != page / BLOCK + 1 {
            slot.used.iter().for_each(|used| used.store(!0, Relaxed));
            slot.once.store(0, Relaxed);
            slot.twice.store(0, Relaxed);
        }
        let once = slot.once.load(Relaxed);
        let mut newer = used;
        self.compare(slot.used[0].load(Relaxed) & once & taken, used);
        for mapping in &slot.used {
            let older = mapping.load(Relaxed);
            mapping.store(older & !taken | newer & taken, Relaxed);
            newer = older;
        }
        slot.twice.store(slot.twice.load(Relaxed) | once & taken, Relaxed);
        slot.once.store(once | taken, Relaxed);
    }

    /// Moves the likeness towards the likeness of these two mappings, in proportion to the number
    /// of pages.
    fn compare(&self, before: u64, now: u64) {
        let pages = before.count_ones();
        if let Some(again) = ((before & now).count_ones() * ALIKE).checked_div(pages) {
            let old = self.likeness.load(Relaxed);
            // A full block moves the likeness by a quarter of the difference.
            let share = 4 * BLOCK as u32;
            self.likeness.store((old * (share - pages) + again * pages) / share, Relaxed);
        }
    }

    fn slot(&self, page: u64) -> &Slot {
        // Maps neighbouring blocks to different slots, and also the regions that mmap often aligns.
        let block = page / BLOCK;
        &self.slots[((block ^ (block >> 6) ^ (block >> 12)) % SLOTS as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_pages_are_expected_again() {
        let space = History::default();
        assert_eq!(space.recall(640), BlockHistory::default());
        space.record(640, 0xffff, 0x0ff0);
        let history = BlockHistory { known: 0xffff, expected: 0x0ff0, last: 0x0ff0 };
        assert_eq!(space.recall(650), history);
        assert_eq!(space.recall(704), BlockHistory::default(), "another block");
    }

    #[test]
    fn three_mappings_predict_pages_used_in_all() {
        let space = History::default();
        let expected = [0b1110, 0b0111, 0b0111, 0b0111, 0b1111, 0b1111, 0b1111].map(|used| {
            space.record(0, !0, used);
            assert_eq!(space.recall(0).last, used);
            space.recall(0).expected
        });
        assert_eq!(expected, [0b1110, 0b0110, 0b0110, 0b0111, 0b0111, 0b0111, 0b1111]);
    }

    #[test]
    fn parts_of_a_block_have_separate_histories() {
        let space = History::default();
        space.record(0, 0xff, 0xff);
        space.record(0, 0xff00, 0x0100);
        space.record(0, 0xff, 0x0f);
        assert_eq!(space.recall(0), BlockHistory { known: 0xffff, expected: 0x010f, last: 0x010f });
    }

    #[test]
    fn a_single_mapping_predicts_only_while_mappings_are_alike() {
        let space = History::default();
        for block in 0..8 {
            space.record(block * BLOCK, !0, !0);
            space.record(block * BLOCK, !0, 1);
        }
        space.record(20 * BLOCK, !0, !0);
        assert_eq!(space.recall(20 * BLOCK), BlockHistory { known: !0, expected: 0, last: !0 });
        for _ in 0..16 {
            space.record(21 * BLOCK, !0, 1);
        }
        assert_eq!(space.recall(20 * BLOCK).expected, 0, "one page is too little evidence");
        for _ in 0..16 {
            space.record(21 * BLOCK, !0, !1);
        }
        assert_eq!(space.recall(20 * BLOCK).expected, !0);
    }

    #[test]
    fn a_slot_holds_the_last_recorded_block() {
        let space = History::default();
        for block in 0..10_000 {
            space.record(block * BLOCK, !0, block);
            assert_eq!(space.recall(block * BLOCK).last, block);
        }
        let left = (0..10_000).filter(|block| space.recall(block * BLOCK).known != 0).count();
        assert_eq!(left, SLOTS);
        assert_eq!(space.recall(u64::MAX), BlockHistory::default());
    }
}
