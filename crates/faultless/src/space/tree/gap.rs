//! The search for free addresses.
//!
//! The search enters a subtree only if a gap of the subtree is long enough, and the subtree
//! overlaps the window. In a subtree inside the window, the search ends; at most two subtrees of a
//! level cross the ends of the window. So the number of visited nodes is proportional to the
//! height. In a tree in shards, the search goes from shard to shard until it finds a gap, and
//! visits as many nodes in each.

use super::node::Node;
use super::view::View;

/// `len` free bytes inside `low..high`.
#[derive(Clone, Copy)]
struct Wanted {
    len: u64,
    low: u64,
    high: u64,
}

/// Free addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The place where the wanted bytes fit.
    pub start: u64,
    /// No entry is between the start and here.
    pub end: u64,
}

impl<T> View<'_, T> {
    /// Returns the highest `A` such that no entry overlaps `A..A + len`, `low <= A` and
    /// `A + len <= high`: the place where Linux maps top-down. `len` is in bytes and not 0.
    #[inline]
    pub fn gap(&self, len: u64, low: u64, high: u64) -> Option<Gap> {
        let wanted = Wanted { len, low, high };
        if self.is_whole() { wanted.highest_of(self.own.root) } else { self.highest(wanted) }
    }

    #[inline(never)]
    fn highest(&self, wanted: Wanted) -> Option<Gap> {
        let Wanted { low, high, .. } = wanted;
        let mut last = high;
        // The start of the lowest entry seen so far. The window ends in the first shard.
        let mut above = self.part_at(last.saturating_sub(1)).0.end;
        loop {
            let (part, version) = self.part_at(last.saturating_sub(1));
            if let Some(root) = version.root {
                if let Some(found) = wanted.highest(root, above) {
                    return Some(found);
                }
                above = root.keys().0.first().copied().unwrap_or(above);
            }
            // Free addresses at the low end of the shard may go on in the shard below, unless the
            // window ends in this shard.
            let known = if part.start <= low { 0 } else { part.start };
            let found = wanted.last_in(known, above);
            if found.is_some() || known == 0 {
                return found;
            }
            last = part.start;
        }
    }

    /// Returns the lowest `A` such that no entry overlaps `A..A + len`, `low <= A` and
    /// `A + len <= high`. `len` is in bytes and not 0.
    pub fn gap_bottom_up(&self, len: u64, low: u64, high: u64) -> Option<u64> {
        let wanted = Wanted { len, low, high };
        // The end of the highest entry seen so far.
        let mut below = 0;
        let mut first = low;
        loop {
            let (part, version) = self.part_at(first);
            if let Some(root) = version.root {
                if let Some(found) = wanted.lowest(root, below) {
                    return Some(found);
                }
                below = root.limit;
            }
            let known = if part.end >= high { u64::MAX } else { part.end };
            let found = wanted.first_in(below, known);
            if found.is_some() || known == u64::MAX {
                return found;
            }
            first = part.end;
        }
    }
}

impl Wanted {
    /// The last fit in a tree in one piece.
    fn highest_of(self, root: Option<&Node>) -> Option<Gap> {
        let Some(root) = root else { return self.last_in(0, u64::MAX) };
        let found = self.highest(root, u64::MAX);
        found.or_else(|| self.last_in(0, root.keys().0.first().copied()?))
    }

    /// The last fit in the free range `from..to`.
    fn last_in(self, from: u64, to: u64) -> Option<Gap> {
        let start = to.min(self.high).checked_sub(self.len)?;
        (start >= from.max(self.low)).then_some(Gap { start, end: to })
    }

    /// The first fit in the free range `from..to`.
    fn first_in(self, from: u64, to: u64) -> Option<u64> {
        let at = from.max(self.low);
        (at.checked_add(self.len)? <= to.min(self.high)).then_some(at)
    }

    /// The last fit above an entry of the node and below `above`, where the next entry starts.
    fn highest(self, node: &Node, mut above: u64) -> Option<Gap> {
        let (starts, ends) = node.keys();
        for at in (0..starts.len()).rev() {
            if let Some(found) = self.last_in(ends[at], above) {
                return Some(found);
            }
            if ends[at] <= self.low {
                return None;
            }
            if node.gap(at) >= self.len
                && starts[at] < self.high
                && let Some(found) = self.highest(child(node, at), ends[at])
            {
                return Some(found);
            }
            above = starts[at];
        }
        None
    }

    /// The first fit below an entry of the node and above `below`, where the entry before ends.
    fn lowest(self, node: &Node, mut below: u64) -> Option<u64> {
        let (starts, ends) = node.keys();
        for at in 0..starts.len() {
            if let Some(found) = self.first_in(below, starts[at]) {
                return Some(found);
            }
            if starts[at] >= self.high {
                return None;
            }
            if node.gap(at) >= self.len
                && ends[at] > self.low
                && let Some(found) = self.lowest(child(node, at), starts[at])
            {
                return Some(found);
            }
            below = ends[at];
        }
        None
    }
}

/// The child at a slot with a gap.
fn child(node: &Node, at: usize) -> &Node {
    // SAFETY: a slot that holds a gap is a subtree; the child is part of the same version and as
    // valid as its parent.
    unsafe { node.child(at).as_ref() }
}
