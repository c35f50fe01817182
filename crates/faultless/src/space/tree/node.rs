//! Nodes: their layout, the search in one node, and the splicing of its slots.
//!
//! Leaves and inner nodes have one shape, an array of *slots* in the order of addresses. A leaf's
//! slot is an entry; an inner node's slot is a subtree, with the start of its first entry, the end
//! of its last, and the widest gap between two of its entries. So no key is ever a mere bound: a
//! search that has begun in a subtree ends in it. Gaps between slots are not stored, they are the
//! difference of two neighbouring keys.

use crate::error::OutOfMemory;
use crate::sync::atomic::{made, reads};
use crate::sync::grace::RetireLink;
use alloc::alloc::Layout;
use core::cell::Cell;
use core::hint::select_unpredictable;
use core::ptr::{self, NonNull};

/// Slots in a node. The search in a node counts over one key less, in four halvings.
pub(super) const FANOUT: usize = 16;
/// Slots in any node but the root, at least. It is less than half of [`FANOUT`], so that a node
/// that was just split or joined takes several edits to become due again.
pub(super) const MIN_FILL: usize = 5;
/// Levels of a tree, at most: 2 * 5^15 entries exceed the pages of a 47-bit space.
pub(super) const MAX_LEVELS: usize = 16;

/// The `kind` by which the reclaimer of retired objects knows a tree node.
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
    /// How many entries they are, and the bytes of their ranges. They are entries.
    #[inline(always)]
    fn extent(&self) -> Extent {
        let bytes = self.clone().map(|slot| slot.end - slot.start).sum();
        Extent { entries: self.len(), bytes }
    }
}

impl<I: ExactSizeIterator<Item = Slot> + Clone> Slots for I {}

/// How much a tree, or a part of it, holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) entries: usize,
    /// The bytes of all their ranges.
    pub(super) bytes: u64,
}

impl Extent {
    /// After `gone` have gone and `new` have come.
    #[inline(always)]
    pub(super) fn change(self, gone: Self, new: Self) -> Self {
        let entries = self.entries - gone.entries + new.entries;
        Self { entries, bytes: self.bytes - gone.bytes + new.bytes }
    }
}

/// A node. Once published it is never written while others may read it, but for `retire` and `chain`, which no reader
/// reads.
#[repr(C)]
pub(super) struct Node {
    /// First, so that a node's address is its link's.
    retire: RetireLink,
    /// Links the nodes that a draft has in reserve.
    chain: Cell<Option<NonNull<Node>>>,
    /// The edit that made the node.
    pub born: u64,
    /// In a root: the end of the last entry.
    pub limit: u64,
    /// In a root: the bytes of all entries' ranges.
    pub bytes: u64,
    /// In a root: how many entries the tree has.
    pub entries: u32,
    /// 0 for a leaf.
    pub level: u8,
    /// How many slots are in use.
    count: u8,
    /// Unused keys are `u64::MAX`, so that the search needs no count.
    ends: [u64; FANOUT],
    starts: [u64; FANOUT],
    targets: [NonNull<()>; FANOUT],
    gaps: [u64; FANOUT],
}

impl Node {
    /// A node without slots.
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

    /// How many slots are in use.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.count as usize
    }

    /// The keys of the slots in use: where they start and where they end.
    #[inline]
    pub(super) fn keys(&self) -> (&[u64], &[u64]) {
        (&self.starts[..self.count()], &self.ends[..self.count()])
    }

    /// The widest gap within the subtree at slot `at`.
    #[inline]
    pub(super) fn gap(&self, at: usize) -> u64 {
        self.gaps[at]
    }

    /// Slot `at`.
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

    /// The node that slot `at` leads to.
    ///
    /// # Safety
    /// This is an inner node, and `at < count()`.
    #[inline(always)]
    pub(super) unsafe fn child(&self, at: usize) -> NonNull<Self> {
        debug_assert!(self.level > 0 && at < self.count());
        // SAFETY: `at` is below `FANOUT`, for it is below `count()`.
        let target = unsafe { self.targets.get_unchecked(at) };
        reads(target);
        target.cast()
    }

    /// The first slot that ends above `addr`, if there is one in this node.
    ///
    /// Counts the keys not above `addr` by halving, without a branch: the branches of a search
    /// are as unpredictable as the faults it serves.
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

    /// How many slots end at or below `addr`.
    #[inline]
    pub(super) fn position(&self, addr: u64) -> usize {
        let rank = self.rank(addr);
        // An unused key is not above the last address.
        (rank + usize::from(self.ends[rank] <= addr)).min(self.count())
    }

    /// Puts `new` where the `removed` slots from `at` on were. The result must fit.
    pub(super) fn splice(&mut self, at: usize, removed: usize, new: impl Slots) {
        let (count, tail, to) = (self.count(), at + removed, at + new.len());
        let left = count - removed + new.len();
        // The tail is short, most often: slots move one by one, in the order in which none is lost.
        if to > tail {
            for at in (tail..count).rev() {
                self.set(at + (to - tail), self.slot(at));
            }
        } else if to < tail {
            // With it move as many unused slots as there are more.
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

    /// How much the tree holds, of a root.
    #[inline(always)]
    pub(super) fn extent(&self) -> Extent {
        Extent { entries: self.entries as usize, bytes: self.bytes }
    }

    /// The extent of the `count` slots of a leaf from `first` on.
    #[inline(always)]
    pub(super) fn extent_of(&self, first: usize, count: usize) -> Extent {
        let slots = first..first + count;
        let bytes = slots.map(|at| self.ends[at] - self.starts[at]).sum();
        Extent { entries: count, bytes }
    }

    /// Makes it a root that leads to entries of this extent.
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

    /// The slot by which a parent refers to this node, which `this` points to and is not empty.
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

/// Memory for a node; what it holds is undefined.
pub(super) fn allocate() -> Result<NonNull<Node>, OutOfMemory> {
    #[cfg(all(test, not(loom)))]
    ledger::allocating()?;
    // SAFETY: a node is not of size zero.
    let memory = unsafe { alloc::alloc::alloc(Layout::new::<Node>()) }.cast::<Node>();
    made(memory, 1);
    NonNull::new(memory).ok_or(OutOfMemory)
}

/// Gives the memory of a node back.
///
/// # Safety
/// It came from [`allocate`], and nothing refers to it any more.
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
    // SAFETY: a link of this kind is the first field of a node and was made from a pointer to all
    // of it; its grace period is over, so no reader has a reference.
    unsafe { free(link.cast()) };
}

/// The address of a node's link, for handing the node to the grace period.
pub(super) fn retire_link(node: NonNull<Node>) -> NonNull<RetireLink> {
    node.cast()
}

/// Nodes that belong to a writer, linked through themselves.
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
        // SAFETY: valid memory by the caller's promise; only this writer uses the field. The
        // node may be uninitialised, hence no reference to it.
        unsafe { ptr::write(&raw mut (*node.as_ptr()).chain, Cell::new(self.head)) };
        self.head = Some(node);
        self.len += 1;
    }

    /// Takes the node that was added last.
    pub(super) fn pop(&mut self) -> Option<NonNull<Node>> {
        let node = self.head?;
        // SAFETY: `push` has initialised the field, and its contract has kept the node valid and
        // the field unused by others.
        self.head = unsafe { ptr::read(&raw const (*node.as_ptr()).chain) }.get();
        self.len -= 1;
        Some(node)
    }

    /// How many nodes are chained.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// What the tests know of this thread's nodes, and the failures that they order.
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

    /// Nodes allocated less nodes freed by this thread.
    pub(in super::super) fn live() -> isize {
        LIVE.get()
    }

    /// Lets only `allowed` more allocations of this thread succeed.
    pub(in super::super) fn allow(allowed: usize) {
        ALLOWED.set(allowed);
    }
}
