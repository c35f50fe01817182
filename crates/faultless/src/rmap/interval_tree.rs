//! A balanced tree of address ranges, which may overlap: an AVL tree whose nodes store the greatest
//! end of their subtree.
//!
//! The tree allocates no memory. Callers allocate nodes before they take the lock of the tree, and
//! free nodes after they release it, through a list of [`Spare`] nodes. The depth of the recursion
//! is at most 1.44 times the binary logarithm of the number of nodes.

use crate::addr::VirtRange;
use crate::error::OutOfMemory;
use crate::heap::try_box;
use alloc::boxed::Box;

/// A range, and an associated number. Items are ordered by the start of the range, then by the
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) range: VirtRange,
    pub(super) other: u64,
}

impl Item {
    /// Returns the item's key in the order.
    pub(super) const fn key(self) -> (u64, u64) {
        (self.range.start, self.other)
    }
}

type Link = Option<Box<Node>>;

#[derive(Debug)]
pub(super) struct Node {
    item: Item,
    /// The greatest end of the ranges in this subtree.
    end: u64,
    height: u8,
    left: Link,
    right: Link,
}

impl Node {
    fn update(&mut self) {
        let (left, right) = (self.left.as_deref(), self.right.as_deref());
        let end = |link: Option<&Self>| link.map_or(0, |node| node.end);
        let height = |link: Option<&Self>| link.map_or(0, |node| node.height);
        self.end = self.item.range.end.max(end(left)).max(end(right));
        self.height = 1 + height(left).max(height(right));
    }
}

/// Nodes outside of trees.
#[derive(Debug, Default)]
pub(super) struct Spare {
    /// The first node; `right` links to the next node.
    first: Link,
    count: usize,
}

impl Spare {
    /// Returns the number of nodes.
    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Allocates nodes until there are `count`.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub(super) fn fill(&mut self, count: usize) -> Result<(), OutOfMemory> {
        while self.count < count {
            let item = Item { range: VirtRange::new(0, 0), other: 0 };
            self.put(try_box(Node { item, end: 0, height: 1, left: None, right: None })?);
        }
        Ok(())
    }

    fn put(&mut self, mut node: Box<Node>) {
        (node.left, node.right) = (None, self.first.take());
        self.first = Some(node);
        self.count += 1;
    }

    fn take(&mut self) -> Link {
        let mut node = self.first.take()?;
        self.first = node.right.take();
        self.count -= 1;
        Some(node)
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        // Iterative, because the list may be too long for a recursion.
        while self.take().is_some() {}
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct IntervalTree {
    root: Link,
}

impl IntervalTree {
    /// Adds `item`, which is not in the tree, with a node of `spare`. Returns whether `spare` had a
    /// node.
    pub(super) fn insert(&mut self, item: Item, spare: &mut Spare) -> bool {
        let Some(mut node) = spare.take() else { return false };
        node.item = item;
        insert(&mut self.root, node);
        true
    }

    /// Removes `item`. Its node goes to `spare`.
    pub(super) fn remove(&mut self, item: Item, spare: &mut Spare) {
        if let Some(node) = remove(&mut self.root, item.key()) {
            spare.put(node);
        }
    }

    /// Returns the first item whose range overlaps `range`, after the key `after` if given.
    pub(super) fn next(&self, range: VirtRange, after: Option<(u64, u64)>) -> Option<Item> {
        next(self.root.as_deref(), range, after)
    }

    #[cfg(test)]
    pub(super) fn check(&self) -> usize {
        fn check(link: Option<&Node>) -> (u8, u64, usize) {
            let Some(node) = link else { return (0, 0, 0) };
            let (left, right) = (check(node.left.as_deref()), check(node.right.as_deref()));
            assert!(left.0.abs_diff(right.0) <= 1, "balanced");
            assert_eq!(node.height, 1 + left.0.max(right.0));
            assert_eq!(node.end, node.item.range.end.max(left.1).max(right.1));
            (node.height, node.end, 1 + left.2 + right.2)
        }
        check(self.root.as_deref()).2
    }
}

fn next(mut link: Option<&Node>, range: VirtRange, after: Option<(u64, u64)>) -> Option<Item> {
    while let Some(node) = link {
        if node.end <= range.start {
            return None;
        }
        if after.is_none_or(|after| node.item.key() > after) {
            if let Some(found) = next(node.left.as_deref(), range, after) {
                return Some(found);
            }
            if !node.item.range.intersect(range).is_empty() {
                return Some(node.item);
            }
        }
        if node.item.range.start >= range.end {
            return None;
        }
        link = node.right.as_deref();
    }
    None
}

fn insert(link: &mut Link, mut new: Box<Node>) {
    match link {
        None => {
            new.update();
            *link = Some(new);
        }
        Some(node) => {
            let left = new.item.key() < node.item.key();
            insert(if left { &mut node.left } else { &mut node.right }, new);
            rebalance(link);
        }
    }
}

fn remove(link: &mut Link, key: (u64, u64)) -> Link {
    let node = link.as_deref_mut()?;
    let removed = match key.cmp(&node.item.key()) {
        core::cmp::Ordering::Less => remove(&mut node.left, key),
        core::cmp::Ordering::Greater => remove(&mut node.right, key),
        core::cmp::Ordering::Equal => {
            let mut node = link.take()?;
            let (left, mut right) = (node.left.take(), node.right.take());
            *link = match take_first(&mut right) {
                Some(mut first) => {
                    (first.left, first.right) = (left, right);
                    Some(first)
                }
                None => left,
            };
            Some(node)
        }
    };
    rebalance(link);
    removed
}

fn take_first(link: &mut Link) -> Link {
    let node = link.as_deref_mut()?;
    if node.left.is_some() {
        let first = take_first(&mut node.left);
        rebalance(link);
        return first;
    }
    let mut first = link.take()?;
    *link = first.right.take();
    Some(first)
}

/// Restores the balance of a subtree in which the height of one child has changed by one level.
fn rebalance(link: &mut Link) {
    let Some(node) = link.as_deref_mut() else { return };
    node.update();
    let height = |link: &Link| link.as_ref().map_or(0, |node| node.height);
    let (left, right) = (height(&node.left), height(&node.right));
    if left > right + 1 {
        if let Some(child) = node.left.as_deref()
            && height(&child.right) > height(&child.left)
        {
            rotate_left(&mut node.left);
        }
        rotate_right(link);
    } else if right > left + 1 {
        if let Some(child) = node.right.as_deref()
            && height(&child.left) > height(&child.right)
        {
            rotate_right(&mut node.right);
        }
        rotate_left(link);
    }
}

fn rotate_left(link: &mut Link) {
    let Some(mut node) = link.take() else { return };
    let Some(mut top) = node.right.take() else {
        *link = Some(node);
        return;
    };
    node.right = top.left.take();
    node.update();
    top.left = Some(node);
    top.update();
    *link = Some(top);
}

fn rotate_right(link: &mut Link) {
    let Some(mut node) = link.take() else { return };
    let Some(mut top) = node.left.take() else {
        *link = Some(node);
        return;
    };
    node.left = top.right.take();
    node.update();
    top.right = Some(node);
    top.update();
    *link = Some(top);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Random insertions, removals and queries, compared with a list.
    #[test]
    fn tree_agrees_with_a_list() {
        let (mut tree, mut spare) = (IntervalTree::default(), Spare::default());
        let mut list: Vec<Item> = Vec::new();
        let mut seed = 1_u64;
        let mut draw = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for step in 0..if cfg!(miri) { 200 } else { 5000 } {
            if list.is_empty() || draw(5) > 1 {
                let start = draw(500);
                let range = VirtRange::new(start, start + 1 + draw(30));
                let item = Item { range, other: draw(1000) };
                if list.iter().all(|known| known.key() != item.key()) {
                    spare.fill(1).unwrap();
                    assert!(tree.insert(item, &mut spare));
                    list.push(item);
                }
            } else {
                let at = draw(list.len() as u64) as usize;
                tree.remove(list.swap_remove(at), &mut spare);
            }
            assert_eq!(tree.check(), list.len(), "step {step}");
            let start = draw(540);
            let range = VirtRange::new(start, start + 1 + draw(20));
            let mut expected: Vec<_> = list
                .iter()
                .copied()
                .filter(|item| !item.range.intersect(range).is_empty())
                .collect();
            expected.sort_by_key(|item| item.key());
            let first = tree.next(range, None);
            let found: Vec<_> =
                core::iter::successors(first, |last| tree.next(range, Some(last.key()))).collect();
            assert_eq!(found, expected, "step {step}");
        }
    }
}
