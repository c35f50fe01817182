//! The buddy allocator of an arena.
//!
//! Free memory consists of blocks of 2^order frames, aligned to their size, in one doubly linked
//! list for each order, linked through the metadata of the blocks' heads. Two free blocks that are
//! the halves of a block of twice the size (*buddies*) are merged at once, so after all frames are
//! freed the lists equal their initial state. All state is protected by the arena's lock.
//!
//! The arena's pool of zeroed frames has a second allocator of the same type. The *kind* of a
//! block's head identifies the allocator, so blocks merge only within their allocator.
//!
//! *Invariant (free lists):* a frame heads a block on the list of order `k` exactly when its kind
//! is the allocator's (`Free` or `Zeroed`) and its order is `k`; such a block is aligned, all its
//! other frames are tails, and its buddy is not on the list. `validate` checks this invariant.

use super::MAX_ORDER;
use super::census::Imbalance;
use super::meta::{FrameTable, Kind, NO_FRAME};
use crate::addr::FrameNumber;
use crate::sync::atomic::Ordering;

/// No larger block is split for fewer than 1/`FEW` of the frames of a run.
const FEW: usize = 8;
const ORDERS: usize = MAX_ORDER as usize + 1;

/// The free memory of one arena.
#[derive(Debug)]
pub(super) struct Buddy {
    arena: u8,
    /// The kind of the heads of blocks on the lists.
    kind: Kind,
    /// Bit `k` is set exactly when the list of order `k` has a block.
    nonempty: u32,
    heads: [u32; ORDERS],
    free: u64,
}

impl Buddy {
    /// Returns an allocator without memory for the frames of `arena`, whose listed blocks have
    /// `kind`.
    pub(super) const fn new(arena: u8, kind: Kind) -> Self {
        Self { arena, kind, nonempty: 0, heads: [NO_FRAME; ORDERS], free: 0 }
    }

    /// Returns the number of frames on the lists.
    pub(super) const fn free_count(&self) -> u64 {
        self.free
    }

    /// Adds `frames` unused frames, starting at `first`, with any alignment and number.
    pub(super) fn adopt(&mut self, table: &FrameTable, first: FrameNumber, frames: u32) {
        let (mut at, end) = (first.0, first.0 + frames);
        while at < end {
            let fits = (end - at).ilog2();
            let order = at.trailing_zeros().min(fits).min(u32::from(MAX_ORDER)) as u8;
            self.free(table, FrameNumber(at), order);
            at += 1 << order;
        }
    }

    /// Takes a block of 2^`order` frames. Its head becomes `Pooled` with this order.
    pub(super) fn alloc(&mut self, table: &FrameTable, order: u8) -> Option<FrameNumber> {
        let enough = self.nonempty & u32::MAX.checked_shl(order.into())?;
        if enough == 0 {
            return None;
        }
        let mut have = enough.trailing_zeros() as u8;
        let head = self.heads[usize::from(have)];
        self.unlink(table, head, have);
        while have > order {
            have -= 1;
            self.link(table, head + (1 << have), have);
        }
        let meta = table.meta(FrameNumber(head));
        meta.set_order(order);
        meta.set_kind(Kind::Pooled);
        self.free -= 1 << order;
        Some(FrameNumber(head))
    }

    /// Takes the largest block of at most `most` frames (not 0). Splits a larger block only if
    /// there is no such block.
    pub(super) fn alloc_at_most(
        &mut self,
        table: &FrameTable,
        most: usize,
    ) -> Option<(FrameNumber, u8)> {
        let fitting = self.fitting(most);
        let order = if fitting == 0 { most } else { fitting as usize }.ilog2();
        let order = order.min(MAX_ORDER.into()) as u8;
        Some((self.alloc(table, order)?, order))
    }

    /// Takes the largest block of at most `most` frames, unless the largest such block is smaller
    /// than `least`.
    pub(super) fn alloc_block(
        &mut self,
        table: &FrameTable,
        least: usize,
        most: usize,
    ) -> Option<(FrameNumber, u8)> {
        let fitting = self.fitting(most);
        let small = fitting != 0 && fitting.ilog2() < least.ilog2();
        if small { None } else { self.alloc_at_most(table, most) }
    }

    /// Returns the mask of the non-empty lists with blocks of at most `most` frames (not 0).
    fn fitting(&self, most: usize) -> u32 {
        self.nonempty & ((2 << most.ilog2().min(MAX_ORDER.into())) - 1)
    }

    /// Takes the listed block with head `head`, if it has at most 2^`most` frames. Returns the
    /// order; the head becomes `Pooled` with this order.
    #[inline]
    pub(super) fn take(&mut self, table: &FrameTable, head: FrameNumber, most: u8) -> Option<u8> {
        let meta = table.meta(head);
        let order = meta.order();
        debug_assert!(
            table.is_listed(head.0, order, self.arena, self.kind),
            "{head:?} heads no free block"
        );
        if order > most {
            return None;
        }
        self.unlink(table, head.0, order);
        meta.set_kind(Kind::Pooled);
        self.free -= 1 << order;
        Some(order)
    }

    /// Returns how many blocks of 2^`order` frames are on the lists, including parts of larger
    /// blocks; stops counting at `most` or soon after.
    pub(super) fn blocks(&self, table: &FrameTable, order: u8, most: u64) -> u64 {
        let mut found = 0;
        for larger in order..=MAX_ORDER {
            let mut at = self.heads[usize::from(larger)];
            while at != NO_FRAME && found < most {
                found += 1 << (larger - order);
                at = table.meta(FrameNumber(at)).next.load(Ordering::Relaxed);
            }
        }
        found
    }

    /// Fills `run` with single frames and returns their number. Blocks as large as the need are
    /// taken whole, and larger blocks are split only after those are used up. So a run costs a few
    /// list operations, is mostly contiguous, and preserves large blocks. For the last few frames
    /// no block is split, because the remainder would supply the small blocks of the next run, and
    /// so on indefinitely.
    ///
    /// Only the metadata of each block's head is written, which keeps the time under the lock
    /// short: the caller makes the frames [single](super::FrameMeta::make_single).
    pub(super) fn alloc_bulk(&mut self, table: &FrameTable, run: &mut [FrameNumber]) -> usize {
        let mut got = 0;
        while got < run.len() {
            let left = run.len() - got;
            if left < run.len() / FEW && self.fitting(left) == 0 {
                break;
            }
            let Some((head, order)) = self.alloc_at_most(table, left) else { break };
            for (slot, number) in run[got..].iter_mut().zip(head.0..head.0 + (1 << order)) {
                *slot = FrameNumber(number);
            }
            got += 1 << order;
        }
        got
    }

    /// Frees single frames. Consecutive neighbours in `run`, which are common for the frames of one
    /// program, are freed as the largest blocks they form, without a check of each frame's buddy.
    pub(super) fn free_run(&mut self, table: &FrameTable, run: &[FrameNumber]) {
        let mut left = run;
        while let [first, ..] = left {
            let most = 1 << first.0.trailing_zeros().min(MAX_ORDER.into());
            let order = neighbours(&left[..left.len().min(most)]).ilog2();
            let rest = &left[1 << order..];
            for tail in table.run(*first, 1 << order).into_iter().flatten().skip(1) {
                debug_assert!(!tail.kind().is_listed(), "freed twice, behind {first:?}");
                tail.set_kind(Kind::Tail);
            }
            self.free(table, *first, order as u8);
            left = rest;
        }
    }

    /// Frees a block of 2^`order` frames, and merges it with free buddies.
    pub(super) fn free(&mut self, table: &FrameTable, frame: FrameNumber, order: u8) {
        debug_assert!(!table.meta(frame).kind().is_listed(), "{frame:?} freed twice");
        self.free += 1 << order;
        let (mut head, mut order) = (frame.0, order);
        while order < MAX_ORDER {
            let buddy = head ^ (1 << order);
            if !table.is_listed(buddy, order, self.arena, self.kind) {
                break;
            }
            self.unlink(table, buddy, order);
            table.meta(FrameNumber(head.max(buddy))).set_kind(Kind::Tail);
            head = head.min(buddy);
            order += 1;
        }
        self.link(table, head, order);
    }

    fn link(&mut self, table: &FrameTable, head: u32, order: u8) {
        let first = &mut self.heads[usize::from(order)];
        let meta = table.meta(FrameNumber(head));
        meta.set_kind(self.kind);
        meta.set_order(order);
        meta.prev.store(NO_FRAME, Ordering::Relaxed);
        meta.next.store(*first, Ordering::Relaxed);
        if *first != NO_FRAME {
            table.meta(FrameNumber(*first)).prev.store(head, Ordering::Relaxed);
        }
        *first = head;
        self.nonempty |= 1 << order;
    }

    fn unlink(&mut self, table: &FrameTable, head: u32, order: u8) {
        let meta = table.meta(FrameNumber(head));
        // The field counts huge leaves while the frame is in use.
        let (prev, next) = (meta.prev.load(Ordering::Relaxed), meta.next.load(Ordering::Relaxed));
        meta.next.store(0, Ordering::Relaxed);
        if next != NO_FRAME {
            table.meta(FrameNumber(next)).prev.store(prev, Ordering::Relaxed);
        }
        if prev != NO_FRAME {
            table.meta(FrameNumber(prev)).next.store(next, Ordering::Relaxed);
            return;
        }
        self.heads[usize::from(order)] = next;
        if next == NO_FRAME {
            self.nonempty &= !(1 << order);
        }
    }

    /// Walks every list and checks the free-list invariant by brute force. Returns the number of
    /// free frames found.
    pub(super) fn validate(&self, table: &FrameTable) -> Result<u64, Imbalance> {
        let mut found = 0;
        for order in 0..=MAX_ORDER {
            let (mut prev, mut at) = (NO_FRAME, self.heads[usize::from(order)]);
            if (at != NO_FRAME) != (self.nonempty & (1 << order) != 0) {
                return Err(Imbalance::new(at, "the mask of non-empty lists is wrong"));
            }
            // A cyclic list visits a frame twice, and the frame's `prev` cannot match both times.
            while at != NO_FRAME {
                let wrong = |what| Err(Imbalance::new(at, what));
                let meta = table.meta(FrameNumber(at));
                if !table.is_listed(at, order, self.arena, self.kind) {
                    return wrong("a frame on a free list is not free in this list");
                }
                if meta.prev.load(Ordering::Relaxed) != prev {
                    return wrong("a free list's links disagree");
                }
                if !at.is_multiple_of(1 << order) {
                    return wrong("a free block is not aligned to its size");
                }
                if order < MAX_ORDER
                    && table.is_listed(at ^ (1 << order), order, self.arena, self.kind)
                {
                    return wrong("two free buddies are not merged");
                }
                let is_tail = |number| table.meta(FrameNumber(number)).kind() == Kind::Tail;
                if !(at + 1..at + (1 << order)).all(is_tail) {
                    return wrong("a free block contains a frame of another block");
                }
                found += 1 << order;
                (prev, at) = (at, meta.next.load(Ordering::Relaxed));
            }
        }
        if found != self.free {
            return Err(Imbalance::new(NO_FRAME, "the count of free frames is wrong"));
        }
        Ok(found)
    }
}

/// Returns the number of consecutive frames at the start of `run`.
#[inline(always)]
fn neighbours(run: &[FrameNumber]) -> usize {
    let Some(first) = run.first() else { return 0 };
    // Usually all frames are consecutive; this check has no branch for each frame.
    let differ = run.iter().zip(first.0..).fold(0, |differ, (frame, at)| differ | (frame.0 ^ at));
    if differ == 0 {
        return run.len();
    }
    run.iter().zip(first.0..).take_while(|(frame, at)| frame.0 == *at).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::MemoryRegion;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};
    use std::vec::Vec;

    fn region(node: u8, first: u32, frames: u32) -> MemoryRegion {
        MemoryRegion { node, first: FrameNumber(first), frames }
    }

    fn node_of(regions: &[MemoryRegion], node: u8) -> (FrameTable, Buddy) {
        let table = FrameTable::try_new(regions, |node, _| node).unwrap();
        let buddy = adopted(&table, regions, node);
        (table, buddy)
    }

    fn adopted(table: &FrameTable, regions: &[MemoryRegion], node: u8) -> Buddy {
        let mut buddy = Buddy::new(node, Kind::Free);
        for region in regions.iter().filter(|region| region.node == node) {
            buddy.adopt(table, region.first, region.frames);
        }
        buddy
    }

    /// Returns every block on the free lists: head and order.
    fn lists(buddy: &Buddy, table: &FrameTable) -> BTreeSet<(u32, u8)> {
        let mut blocks = BTreeSet::new();
        for order in 0..=MAX_ORDER {
            let mut at = buddy.heads[usize::from(order)];
            while at != NO_FRAME {
                blocks.insert((at, order));
                at = table.meta(FrameNumber(at)).next.load(Ordering::Relaxed);
            }
        }
        blocks
    }

    #[derive(Clone, Debug)]
    enum Step {
        Alloc(u8),
        Run(usize),
        Free(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0u8..8).prop_map(Step::Alloc),
            1 => Just(Step::Alloc(MAX_ORDER + 1)),
            2 => (1usize..80).prop_map(Step::Run),
            5 => any::<usize>().prop_map(Step::Free),
        ]
    }

    /// The reference model: the existing frames, and the allocated blocks.
    struct Model {
        frames: BTreeSet<u32>,
        out: BTreeMap<u32, u8>,
    }

    impl Model {
        /// Records a block as allocated: all its frames exist, and none was allocated before.
        fn take(&mut self, head: u32, order: u8) {
            assert!(head.is_multiple_of(1 << order));
            for frame in head..head + (1 << order) {
                assert!(self.frames.remove(&frame), "frame {frame:#x} handed out twice");
            }
            assert_eq!(self.out.insert(head, order), None);
        }

        fn give(&mut self, which: usize) -> Option<(u32, u8)> {
            let nth = which.checked_rem(self.out.len())?;
            let (&head, &order) = self.out.iter().nth(nth)?;
            self.out.remove(&head);
            self.frames.extend(head..head + (1 << order));
            Some((head, order))
        }

        /// Returns whether the free frames contain an aligned block of this order, which an
        /// allocator with immediate merging must find.
        fn has(&self, order: u8) -> bool {
            order <= MAX_ORDER
                && self.frames.iter().any(|&head| {
                    head.is_multiple_of(1 << order)
                        && self.frames.range(head..head + (1 << order)).count() == 1 << order
                })
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 96 }))]

        #[test]
        fn never_overlaps_and_merges_back(
            first in 0u32..if cfg!(miri) { 20 } else { 600 },
            sizes in if cfg!(miri) { (1u32..40, 1u32..9, 1u32..9) } else { (1u32..700, 1u32..300, 1u32..300) },
            hole in 0u32..if cfg!(miri) { 5 } else { 70 },
            steps in prop::collection::vec(step(), 1..if cfg!(miri) { 6 } else { 120 }),
        ) {
            // The last region belongs to another node, with all frames free, and no block may merge
            // with it.
            let second = first + sizes.0 + hole;
            let third = second + sizes.1;
            let regions =
                [region(0, first, sizes.0), region(0, second, sizes.1), region(1, third, sizes.2)];
            let (table, mut buddy) = node_of(&regions, 0);
            let other = adopted(&table, &regions, 1);
            let initially = lists(&buddy, &table);
            let mut model = Model {
                frames: (first..first + sizes.0).chain(second..third).collect(),
                out: BTreeMap::new(),
            };
            prop_assert_eq!(buddy.validate(&table), Ok(model.frames.len() as u64));
            for step in steps {
                match step {
                    Step::Alloc(order) => {
                        let expected = model.has(order);
                        let head = buddy.alloc(&table, order);
                        prop_assert_eq!(head.is_some(), expected, "order {}", order);
                        if let Some(head) = head {
                            model.take(head.0, order);
                        }
                    }
                    Step::Run(length) => {
                        let mut run = std::vec![FrameNumber(0); length];
                        let got = buddy.alloc_bulk(&table, &mut run);
                        let all = length.min(model.frames.len());
                        prop_assert!(got <= all && got + length / FEW >= all, "{} of {}", got, all);
                        for number in &run[..got] {
                            table.meta(*number).make_single();
                            model.take(number.0, 0);
                        }
                    }
                    Step::Free(which) => {
                        if let Some((head, order)) = model.give(which) {
                            buddy.free(&table, FrameNumber(head), order);
                        }
                    }
                }
                prop_assert_eq!(buddy.validate(&table), Ok(model.frames.len() as u64));
            }
            while let Some((head, order)) = model.give(0) {
                buddy.free(&table, FrameNumber(head), order);
            }
            prop_assert_eq!(lists(&buddy, &table), initially);
            prop_assert_eq!(buddy.validate(&table), Ok(model.frames.len() as u64));
            prop_assert_eq!(other.validate(&table), Ok(u64::from(sizes.2)));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
    fn the_largest_block_is_a_gibibyte() {
        let frames = 1 << MAX_ORDER;
        let (table, mut buddy) = node_of(&[region(0, frames / 2, frames + frames / 2)], 0);
        assert_eq!(buddy.alloc(&table, MAX_ORDER), Some(FrameNumber(frames)));
        assert_eq!(buddy.alloc(&table, MAX_ORDER), None);
        buddy.free(&table, FrameNumber(frames), MAX_ORDER);
        assert_eq!(buddy.validate(&table), Ok(u64::from(frames + frames / 2)));
    }

    #[test]
    fn a_run_preserves_large_blocks_while_small_blocks_suffice() {
        let (table, mut buddy) = node_of(&[region(0, 64, 64), region(0, 129, 16)], 0);
        let mut run = [FrameNumber(0); 14];
        assert_eq!(buddy.alloc_bulk(&table, &mut run), 14);
        let mut numbers: Vec<u32> = run.iter().map(|number| number.0).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 14);
        assert!(numbers.iter().all(|&number| (129..145).contains(&number)));
        assert_eq!(buddy.alloc(&table, 6), Some(FrameNumber(64)));
    }

    #[test]
    fn validate_detects_corrupt_lists() {
        type Damage = fn(&FrameTable, &mut Buddy);
        let broken = |damage: Damage| {
            let (table, mut buddy) = node_of(&[region(0, 8, 8)], 0);
            assert_eq!(buddy.validate(&table), Ok(8));
            damage(&table, &mut buddy);
            buddy.validate(&table).unwrap_err().what
        };
        let damages: [(Damage, &str); 6] = [
            (
                |table, _| table.meta(FrameNumber(8)).set_kind(Kind::Pooled),
                "a frame on a free list is not free in this list",
            ),
            (
                |table, _| table.meta(FrameNumber(11)).set_kind(Kind::Pooled),
                "a free block contains a frame of another block",
            ),
            (|_, buddy| buddy.free -= 1, "the count of free frames is wrong"),
            (|_, buddy| buddy.nonempty = 0, "the mask of non-empty lists is wrong"),
            (
                |table, _| table.meta(FrameNumber(8)).prev.store(8, Ordering::Relaxed),
                "a free list's links disagree",
            ),
            (
                |table, buddy| {
                    buddy.unlink(table, 8, 3);
                    buddy.link(table, 8, 2);
                    buddy.link(table, 12, 2);
                },
                "two free buddies are not merged",
            ),
        ];
        for (damage, what) in damages {
            assert_eq!(broken(damage), what);
        }
    }
}
