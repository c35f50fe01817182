//! The place of a change in the tree, and the effect on the nodes there.

use super::node::{FANOUT, MAX_LEVELS, MIN_FILL, Node};
use core::mem::MaybeUninit;
use core::ptr::NonNull;

/// The place of a splice: for each level, the node and the slot in the node.
///
/// *Invariant (a path reaches the root):* the steps up to `top` have been written.
pub(super) struct Path {
    /// By level: the node, and the slot in the node.
    steps: [MaybeUninit<Step>; MAX_LEVELS],
    /// The root's level.
    pub(super) top: usize,
    /// The start of the first entry beyond the leaf.
    pub(super) above: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Step {
    pub(super) node: NonNull<Node>,
    pub(super) at: usize,
}

/// The effect of a changed number of slots on a node.
pub(super) enum Fit {
    Fits,
    /// Becomes two nodes.
    Splits,
    /// Takes in all slots of a sibling.
    Joins(Sibling),
    /// Evens out with a sibling.
    Shares(Sibling),
}

pub(super) struct Sibling {
    pub(super) node: NonNull<Node>,
    /// Set if the sibling is on the left, at the lower addresses.
    pub(super) left: bool,
}

impl Path {
    /// Makes an empty path. Filled in place, because a path is large.
    pub(super) const fn new() -> Self {
        Self { steps: [const { MaybeUninit::uninit() }; MAX_LEVELS], top: 0, above: u64::MAX }
    }

    /// Makes this the path to the first entry that ends above `addr`, or to behind the last entry.
    #[inline(always)]
    pub(super) fn lead(&mut self, root: NonNull<Node>, addr: u64) {
        // SAFETY: the draft's nodes are valid while it lives.
        self.top = unsafe { root.as_ref() }.level as usize;
        self.above = u64::MAX;
        let mut below = root;
        for level in (0..=self.top).rev() {
            // SAFETY: as above.
            let node = unsafe { below.as_ref() };
            let mut at = node.position(addr);
            let this = below;
            if level > 0 {
                let starts = node.keys().0;
                at = at.min(starts.len() - 1);
                self.above = starts.get(at + 1).copied().unwrap_or(self.above);
                // SAFETY: an inner node, and a slot in use.
                below = unsafe { node.child(at) };
            }
            self.steps[level].write(Step { node: this, at });
        }
    }

    #[inline(always)]
    pub(super) fn step(&self, level: usize) -> Step {
        debug_assert!(level <= self.top);
        // SAFETY: a path reaches the root, and no caller asks for more.
        unsafe { self.steps[level].assume_init() }
    }

    /// Returns the node at `level`.
    #[inline(always)]
    pub(super) fn node(&self, level: usize) -> &Node {
        // SAFETY: the draft's nodes are valid while it lives, and nothing is changed through
        // another reference while this one is used.
        unsafe { self.step(level).node.as_ref() }
    }

    /// Returns the slot in the node at `level`.
    #[inline(always)]
    pub(super) fn at(&self, level: usize) -> usize {
        self.step(level).at
    }

    /// Returns how the node at `level` changes when it has `count` slots.
    pub(super) fn fit(&self, level: usize, count: usize) -> Fit {
        if count > FANOUT {
            return Fit::Splits;
        }
        if count >= MIN_FILL || level == self.top {
            return Fit::Fits;
        }
        let at = self.at(level + 1);
        let (parent, left) = (self.node(level + 1), at > 0);
        // SAFETY: an inner node has at least two slots, so the slot beside `at` is in use.
        let node = unsafe { parent.child(if left { at - 1 } else { at + 1 }) };
        let sibling = Sibling { node, left };
        if count + sibling.node().count() <= FANOUT {
            Fit::Joins(sibling)
        } else {
            Fit::Shares(sibling)
        }
    }
}

impl Sibling {
    pub(super) fn node(&self) -> &Node {
        // SAFETY: as for the node of a path.
        unsafe { self.node.as_ref() }
    }
}
