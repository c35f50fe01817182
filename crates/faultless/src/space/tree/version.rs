//! One version of a persistent tree, as a reader sees it.

use super::node::Node;
use crate::addr::VirtRange;
use core::fmt;
use core::iter::FusedIterator;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::NonNull;

/// A range and what the tree keeps for it.
pub struct Entry<T> {
    /// First byte of the range.
    pub start: u64,
    /// First byte after the range, above `start`.
    pub end: u64,
    /// The value, which the caller has stored.
    pub value: NonNull<T>,
}

impl<T> Entry<T> {
    /// The entry's range.
    #[inline]
    pub fn range(&self) -> VirtRange {
        VirtRange::new(self.start, self.end)
    }
}

impl<T> Clone for Entry<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Entry<T> {}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.start, self.end, self.value) == (other.start, other.end, other.value)
    }
}

impl<T> Eq for Entry<T> {}

impl<T> fmt::Debug for Entry<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} -> {:?}", self.range(), self.value)
    }
}

/// An entry that a reader has found. Its value lives as long as the section of the reader.
pub struct Found<'s, T> {
    entry: Entry<T>,
    section: PhantomData<&'s T>,
}

impl<'s, T> Found<'s, T> {
    /// Returns the value.
    #[inline(always)]
    pub fn get(&self) -> &'s T {
        // SAFETY: found in a version that is valid for `'s`; values in a tree stay alive (the
        // contract of `Tree::edit`).
        unsafe { self.entry.value.as_ref() }
    }
}

impl<T> Deref for Found<'_, T> {
    type Target = Entry<T>;

    #[inline(always)]
    fn deref(&self) -> &Entry<T> {
        &self.entry
    }
}

impl<T> Clone for Found<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Found<'_, T> {}

impl<T> fmt::Debug for Found<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entry.fmt(f)
    }
}

/// One version of a tree in one piece, or of a shard. What other CPUs publish meanwhile does not
/// show in it.
pub struct Version<'s, T> {
    pub(super) root: Option<&'s Node>,
    marker: PhantomData<NonNull<T>>,
}

impl<T> Clone for Version<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Version<'_, T> {}

impl<'s, T> Version<'s, T> {
    /// The version without entries.
    pub(super) const EMPTY: Self = Self { root: None, marker: PhantomData };

    /// The version under `root`.
    ///
    /// # Safety
    /// That version's nodes are valid and unchanged for `'s`.
    #[inline(always)]
    pub(super) unsafe fn new(root: Option<NonNull<Node>>) -> Self {
        // SAFETY: the caller's promise.
        Self { root: root.map(|root| unsafe { root.as_ref() }), marker: PhantomData }
    }

    /// Which version it is: while the section that this one was seen in is open, another has
    /// another number, except that all versions without entries have number 0.
    #[inline]
    pub fn number(&self) -> usize {
        self.root.map_or(0, |root| core::ptr::from_ref(root).addr())
    }

    /// How many entries there are.
    #[inline]
    pub fn len(&self) -> usize {
        self.root.map_or(0, |root| root.entries as usize)
    }

    /// The bytes of all entries' ranges.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.root.map_or(0, |root| root.bytes)
    }

    /// Whether there is no entry.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    /// The first entry that ends above `addr`; it holds `addr` unless it starts above it.
    #[inline]
    pub fn find(&self, addr: u64) -> Option<Found<'s, T>> {
        let (leaf, at) = self.seek(addr)?;
        Some(entry(leaf, at))
    }

    /// The entry that holds `addr`.
    #[inline]
    pub fn at(&self, addr: u64) -> Option<Found<'s, T>> {
        self.find(addr).filter(|entry| entry.start <= addr)
    }

    /// The last entry that ends at `addr` or below.
    #[inline]
    pub fn before(&self, addr: u64) -> Option<Found<'s, T>> {
        self.around(addr).0
    }

    /// The last entry that ends at `addr` or below, and the first that ends above it.
    pub fn around(&self, addr: u64) -> (Option<Found<'s, T>>, Option<Found<'s, T>>) {
        let Some(mut node) = self.root else { return (None, None) };
        // The last slot left of the way down to `addr`: all that is under it ends by `addr`.
        let mut left = None;
        let right = loop {
            let at = node.position(addr);
            if at > 0 {
                left = Some((node, at - 1));
            }
            if at == node.count() {
                break None;
            }
            if node.level == 0 {
                break Some(entry(node, at));
            }
            node = child(node, at);
        };
        let left = left.map(|(mut node, mut at)| {
            while node.level > 0 {
                node = child(node, at);
                at = node.count() - 1;
            }
            entry(node, at)
        });
        (left, right)
    }

    /// The entries in order, from the first that ends above `addr` on.
    #[inline]
    pub fn iter_from(&self, addr: u64) -> Iter<'s, T> {
        Iter::new(*self, self.seek(addr))
    }

    /// All entries in order.
    #[inline]
    pub fn iter(&self) -> Iter<'s, T> {
        self.iter_from(0)
    }

    /// Where the first entry that ends above `addr` is.
    #[inline(always)]
    fn seek(&self, addr: u64) -> Option<(&'s Node, usize)> {
        let mut node = self.root?;
        // Some entry ends above `addr`, so at each level some slot does, and is found.
        if addr >= node.limit {
            return None;
        }
        for _ in 0..node.level {
            node = child(node, node.rank(addr));
        }
        Some((node, node.rank(addr)))
    }
}

/// The child at a slot in use of an inner node.
#[inline(always)]
fn child(node: &Node, at: usize) -> &Node {
    // SAFETY: callers pass an inner node and a slot in use; the child is part of the same version
    // and as valid as its parent.
    unsafe { node.child(at).as_ref() }
}

/// The entry at slot `at` of a leaf.
#[inline(always)]
fn entry<'s, T>(leaf: &'s Node, at: usize) -> Found<'s, T> {
    Found { entry: super::entry_of(leaf.slot(at)), section: PhantomData }
}

impl<T> fmt::Debug for Version<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Entries of one version in the order of addresses.
///
/// Nodes of a persistent tree have no links to their neighbours, so behind the end of a leaf the
/// iterator seeks the end of its last entry.
pub struct Iter<'s, T> {
    version: Version<'s, T>,
    leaf: Option<(&'s Node, usize)>,
}

impl<'s, T> Iter<'s, T> {
    /// From slot `at` of a leaf of `version` on.
    #[inline(always)]
    pub(super) fn new(version: Version<'s, T>, leaf: Option<(&'s Node, usize)>) -> Self {
        Self { version, leaf }
    }
}

impl<T> Clone for Iter<'_, T> {
    fn clone(&self) -> Self {
        Self { version: self.version, leaf: self.leaf }
    }
}

impl<'s, T: 's> Iterator for Iter<'s, T> {
    type Item = Found<'s, T>;

    #[inline(always)]
    fn next(&mut self) -> Option<Found<'s, T>> {
        let (mut leaf, mut at) = self.leaf?;
        if at == leaf.count() {
            self.leaf = self.version.seek(leaf.slot(at - 1).end);
            (leaf, at) = self.leaf?;
        }
        self.leaf = Some((leaf, at + 1));
        Some(entry(leaf, at))
    }
}

impl<'s, T: 's> FusedIterator for Iter<'s, T> {}

impl<T> fmt::Debug for Iter<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iter").field("version", &self.version).finish_non_exhaustive()
    }
}
