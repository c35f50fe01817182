//! Nodes: their layout, the search in one node, and the splicing of its slots.
//!
//! Leaves and inner nodes have the same shape, an array of *slots* in the order of addresses. A
//! leaf's slot is an entry; an inner node's slot is a subtree, with the start of its first entry,
//! the end of its last, and the widest gap between two of its entries. So every key is an end of an
//! entry, not a mere bound: a search that has begun in a subtree ends in that subtree. A node does
//! not store the gaps between its slots, because each is the difference of two neighbouring keys.

use crate::error::OutOfMemory;
use crate::sync::atomic::{made, reads};
use crate::sync::grace::RetireLink;
use alloc::alloc::Layout;
use core::cell::Cell;
use core::hint::select_unpredictable;
use core::ptr::{self, NonNull};

/// Slots in a node. The search in a node counts over one key less, in four halvings.
pub(super) const FANOUT: usize = 16;
/// The minimum number of slots in any node but the root. Less than half of [`FANOUT`], so that a
/// node that was just split or joined takes several edits to become due again.
pub(super) const MIN_FILL: usize = 5;
/// The maximum number of levels of a tree: 2 * 5^15 entries exceed the pages of a 47-bit space.
pub(super) const MAX_LEVELS: usize = 16;

/// The `kind` by which the reclaimer of retired objects recognises a tree node.
pub const RETIRE_TREE_NODE: u8 = 1;

/// One slot, taken out of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    /// Start of the entry, or of the subtree's first entry.
    pub start: u64,
    /// End of the entry, or of the subtree's last entry.
    pub end: u64,
    /// The widest gap between two entries of the subtree; 0 for an entry.
    pub gap: u64,
    /// The entry's value, or the subtree's topmost node.
    pub target: NonNull<()>,
}

impl Slot {
    pub(super) const BLANK: Self =
        Self { start: u64::MAX, end: u64::MAX, gap: 0, target: NonNull::dangling() };
}

/// Slots on their way into a node, in order.
pub(super) trait Slots: ExactSizeIterator<Item = Slot> + Clone {
    /// Returns the number of slots, which are entries, and the bytes of their ranges.
    #[inline(always)]
    fn extent(&self) -> Extent {
        let bytes = self.clone().map(|slot| slot.end - slot.start).sum();
        Extent { entries: self.len(), bytes }
    }
}

impl<I: ExactSizeIterator<Item = Slot> + Clone> Slots for I {}

/// The number of entries in a tree, or in a part of a tree, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) entries: usize,
    /// The bytes of all ranges.
    pub(super) bytes: u64,
}

impl Extent {
    /// The extent without `gone` and with `new`.
    #[inline(always)]
    pub(super) fn change(self, gone: Self, new: Self) -> Self {
        let entries = self.entries - gone.entries + new.entries;
        Self { entries, bytes: self.bytes - gone.bytes + new.bytes }
    }
}

/// A node. Once published, a node is never written while others may read it, except for `retire`
/// and `chain`, which no reader reads.
#[repr(C)]
pub(super) struct Node {
    /// First, so that a node and its link have the same address.
    retire: RetireLink,
    /// Links the nodes that a draft has in reserve.
    chain: Cell<Option<NonNull<Node>>>,
    /// The edit that made the node.
    pub born: u64,
    /// In a root: the end of the last entry.
    pub limit: u64,
    /// In a root: the bytes of all entries' ranges.
    pub bytes: u64,
    /// In a root: the number of entries in the tree.
    pub entries: u32,
    /// 0 for a leaf.
    pub level: u8,
    /// The number of slots in use.
    count: u8,
    /// Unused keys are `u64::MAX`, so that the search needs no count.
    ends: [u64; FANOUT],
    starts: [u64; FANOUT],
    targets: [NonNull<()>; FANOUT],
    gaps: [u64; FANOUT],
}

impl Node {
    /// Makes a node without slots.
    pub(super) fn blank(level: u8, born: u64) -> Self {
        Self {
            retire: RetireLink::new(RETIRE_TREE_NODE),
            chain: Cell::new(None),
            born,
            limit: 0,
            bytes: 0,
            entries: 0,
            level,
            count: 0,
            ends: [Slot::BLANK.end; FANOUT],
            starts: [Slot::BLANK.start; FANOUT],
            targets: [Slot::BLANK.target; FANOUT],
            gaps: [Slot::BLANK.gap; FANOUT],
        }
    }

    /// Returns the number of slots in use.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.count as usize
    }

    /// Returns the keys of the slots in use: their starts and their ends.
    #[inline]
    pub(super) fn keys(&self) -> (&[u64], &[u64]) {
        (&self.starts[..self.count()], &self.ends[..self.count()])
    }

    /// Returns the widest gap within the subtree at slot `at`.
    #[inline]
    pub(super) fn gap(&self, at: usize) -> u64 {
        self.gaps[at]
    }

    /// Returns slot `at`.
    #[inline]
    pub(super) fn slot(&self, at: usize) -> Slot {
        reads(&self.targets[at]);
        Slot {
            start: self.starts[at],
            end: self.ends[at],
            gap: self.gaps[at],
            target: self.targets[at],
        }
    }

    /// Returns the node that slot `at` leads to.
    ///
    /// # Safety
    /// This is an inner node, and `at < count()`.
    #[inline(always)]
    pub(super) unsafe fn child(&self, at: usize) -> NonNull<Self> {
        debug_assert!(self.level > 0 && at < self.count());
        // SAFETY: `at` is below `FANOUT`, for `at` is below `count()`.
        let target = unsafe { self.targets.get_unchecked(at) };
        reads(target);
        target.cast()
    }

    /// Returns the first slot that ends above `addr`, if this node has such a slot.
    ///
    /// The search counts the keys not above `addr` by halving, without a branch, because the
    /// branches of a search are as unpredictable as the addresses of the faults.
    #[inline(always)]
    pub(super) fn rank(&self, addr: u64) -> usize {
        reads(&self.ends);
        let mut rank = 0;
        for half in [8, 4, 2, 1] {
            // SAFETY: before this step `rank` is at most the sum of the earlier halves, so the
            // index is at most 8 + 4 + 2 + 1 - 1.
            let end = unsafe { *self.ends.get_unchecked(rank + half - 1) };
            rank = select_unpredictable(end <= addr, rank + half, rank);
        }
        rank
    }

    /// Returns the number of slots that end at or below `addr`.
    #[inline]
    pub(super) fn position(&self, addr: u64) -> usize {
        let rank = self.rank(addr);
        // An unused key is not above the last address.
        (rank + usize::from(self.ends[rank] <= addr)).min(self.count())
    }

    /// Puts `new` in place of the `removed` slots starting at `at`. The result must fit.
    pub(super) fn splice(&mut self, at: usize, removed: usize, new: impl Slots) {
        let (count, tail, to) = (self.count(), at + removed, at + new.len());
        let left = count - removed + new.len();
        // The tail is usually short: slots move singly, in the order in which no slot is
        // overwritten too early.
        if to > tail {
            for at in (tail..count).rev() {
                self.set(at + (to - tail), self.slot(at));
            }
        } else if to < tail {
            // As many unused slots move with the tail as there are slots less.
            for at in to..count {
                let from = at + (tail - to);
                self.set(at, if from < count { self.slot(from) } else { Slot::BLANK });
            }
        }
        self.count = left as u8;
        for (at, slot) in (at..).zip(new) {
            self.set(at, slot);
        }
    }

    /// Returns the extent of the tree, for a root.
    #[inline(always)]
    pub(super) fn extent(&self) -> Extent {
        Extent { entries: self.entries as usize, bytes: self.bytes }
    }

    /// Returns the extent of the `count` slots of a leaf starting at `first`.
    #[inline(always)]
    pub(super) fn extent_of(&self, first: usize, count: usize) -> Extent {
        let slots = first..first + count;
        let bytes = slots.map(|at| self.ends[at] - self.starts[at]).sum();
        Extent { entries: count, bytes }
    }

    /// Makes the node a root that leads to entries of this extent.
    #[inline(always)]
    pub(super) fn crown(&mut self, extent: Extent) {
        (self.entries, self.bytes) = (extent.entries as u32, extent.bytes);
        self.limit = self.keys().1.last().copied().unwrap_or(0);
    }

    /// Changes slot `at`, which is in use or is next.
    #[inline(always)]
    pub(super) fn set(&mut self, at: usize, slot: Slot) {
        self.ends[at] = slot.end;
        self.starts[at] = slot.start;
        self.targets[at] = slot.target;
        self.gaps[at] = slot.gap;
    }

    /// Returns the slot by which a parent refers to this node. `this` points to the node, which is
    /// not empty.
    pub(super) fn summary(&self, this: NonNull<Self>) -> Slot {
        let (starts, ends) = self.keys();
        let mut gap = 0;
        for (start, end) in starts.iter().skip(1).zip(ends) {
            gap = gap.max(start - end);
        }
        if self.level > 0 {
            gap = self.gaps[..starts.len()].iter().copied().fold(gap, u64::max);
        }
        Slot { start: starts[0], end: ends[ends.len() - 1], gap, target: this.cast() }
    }
}

/// Allocates memory for a node; the contents are undefined.
pub(super) fn allocate() -> Result<NonNull<Node>, OutOfMemory> {
    #[cfg(all(test, not(loom)))]
    ledger::allocating()?;
    // SAFETY: a node is not of size zero.
    let memory = unsafe { alloc::alloc::alloc(Layout::new::<Node>()) }.cast::<Node>();
    made(memory, 1);
    NonNull::new(memory).ok_or(OutOfMemory)
}

/// Frees the memory of a node.
///
/// # Safety
/// The memory came from [`allocate`], and nothing refers to the node any more.
pub(super) unsafe fn free(node: NonNull<Node>) {
    #[cfg(all(test, not(loom)))]
    ledger::freed();
    // SAFETY: allocated with this layout; the rest is the caller's promise. A node needs no drop.
    unsafe { alloc::alloc::dealloc(node.as_ptr().cast(), Layout::new::<Node>()) };
}

/// Frees the node that `link`, a retired link of kind [`RETIRE_TREE_NODE`], belongs to.
///
/// # Safety
/// As [`free_retired`](super::free_retired).
pub(super) unsafe fn free_link(link: NonNull<RetireLink>) {
    // SAFETY: a link of this kind is the first field of a node and was made from a pointer to the
    // whole node; its grace period is over, so no reader has a reference.
    unsafe { free(link.cast()) };
}

/// Returns the address of a node's link, for handing the node to the grace period.
pub(super) fn retire_link(node: NonNull<Node>) -> NonNull<RetireLink> {
    node.cast()
}

/// Nodes that belong to a writer, linked through their own fields.
#[derive(Default)]
pub(super) struct Chain {
    head: Option<NonNull<Node>>,
    len: usize,
}

impl Chain {
    /// Adds a node.
    ///
    /// # Safety
    /// The node's memory stays valid while it is chained; it is in no other chain, and only the
    /// writer that has the chain uses the node's `chain` field.
    pub(super) unsafe fn push(&mut self, node: NonNull<Node>) {
        // SAFETY: valid memory by the caller's promise; only this writer uses the field. The node
        // may be uninitialised, hence no reference to it.
        unsafe { ptr::write(&raw mut (*node.as_ptr()).chain, Cell::new(self.head)) };
        self.head = Some(node);
        self.len += 1;
    }

    /// Takes the last node added.
    pub(super) fn pop(&mut self) -> Option<NonNull<Node>> {
        let node = self.head?;
        // SAFETY: `push` has initialised the field, and its contract has kept the node valid and
        // the field unused by others.
        self.head = unsafe { ptr::read(&raw const (*node.as_ptr()).chain) }.get();
        self.len -= 1;
        Some(node)
    }

    /// Returns the number of chained nodes.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// The counts of this thread's nodes for tests, and the failures that tests order.
#[cfg(all(test, not(loom)))]
pub(super) mod ledger {
    use crate::error::OutOfMemory;
    use core::cell::Cell;
    use std::thread_local;

    thread_local! {
        static LIVE: Cell<isize> = const { Cell::new(0) };
        static ALLOWED: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    pub(super) fn allocating() -> Result<(), OutOfMemory> {
        let allowed = ALLOWED.get().checked_sub(1).ok_or(OutOfMemory)?;
        ALLOWED.set(allowed);
        LIVE.set(LIVE.get() + 1);
        Ok(())
    }

    pub(super) fn freed() {
        LIVE.set(LIVE.get() - 1);
    }

    /// Returns the nodes allocated less the nodes freed by this thread.
    pub(in super::super) fn live() -> isize {
        LIVE.get()
    }

    /// Lets only `allowed` more allocations of this thread succeed.
    pub(in super::super) fn allow(allowed: usize) {
        ALLOWED.set(allowed);
    }
}
