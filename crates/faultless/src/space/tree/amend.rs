//! A change of the present version itself, while no other CPU reads the tree.

use super::node::{Extent, Node, Slot};
use super::path::{Fit, Path};
use super::version::{Entry, Iter, Version};
use super::{entry_of, slot_of};
use core::fmt;
use core::iter;
use core::marker::PhantomData;
use core::ptr::NonNull;

/// Where in its present version a tree is read, and then [changed](Self::amend): from the first
/// entry that ends above some address on.
pub struct Spot<'s, T> {
    root: Option<NonNull<Node>>,
    /// The way from the root to that entry. None without a root.
    path: Path,
    marker: PhantomData<(&'s Node, NonNull<T>)>,
}

impl<'s, T> Spot<'s, T> {
    /// None. Filled in place, because it is large.
    #[inline(always)]
    pub const fn nowhere() -> Self {
        Self { root: None, path: Path::new(), marker: PhantomData }
    }

    /// Makes it the first entry that ends above `addr`, of the version under `root`.
    ///
    /// # Safety
    /// The version is valid for `'s`, and changes only by [`amend`](Self::amend).
    #[inline(always)]
    pub(super) unsafe fn lead(&mut self, root: Option<NonNull<Node>>, addr: u64) {
        self.root = root;
        if let Some(root) = root {
            self.path.lead(root, addr);
        }
    }

    /// The entries in order.
    #[inline(always)]
    pub fn iter(&self) -> Iter<'s, T> {
        // SAFETY: the contract of `lead`; with a root the path leads to a leaf.
        unsafe {
            let leaf = self.root.map(|_| (self.path.step(0).node.as_ref(), self.path.at(0)));
            Iter::new(Version::new(self.root), leaf)
        }
    }

    /// Changes the leaf in place, if the first `needed` entries are in it, and if it neither splits
    /// nor joins another when `removed` of them go and `added` come. Else it takes an
    /// [edit](super::Tree::edit).
    ///
    /// # Safety
    /// No other edit is under way, and neither this spot nor any other view of the tree is used
    /// from now on.
    #[inline(always)]
    pub unsafe fn amend(
        &self,
        needed: usize,
        removed: usize,
        added: usize,
    ) -> Option<Amend<'_, T>> {
        self.root?;
        let (path, leaf) = (&self.path, self.path.node(0));
        if path.at(0) + needed > leaf.count() {
            return None;
        }
        let count = leaf.count() - removed + added;
        let fits = count != 0 && matches!(path.fit(0, count), Fit::Fits);
        let (less, more) = (Extent::default(), Extent::default());
        fits.then_some(Amend { path, less, more, marker: PhantomData })
    }
}

/// A change of one leaf in place. Its entries are counted from those of the [spot](Spot) on.
#[must_use = "finishing the change updates the other data about the leaf"]
pub struct Amend<'p, T> {
    path: &'p Path,
    /// What has gone, and what has come.
    less: Extent,
    more: Extent,
    marker: PhantomData<NonNull<T>>,
}

impl<T> Amend<'_, T> {
    /// The leaf.
    #[inline(always)]
    fn leaf(&mut self) -> &mut Node {
        // SAFETY: no other CPU reads the nodes, and no other reference is in use (the contract of
        // `Spot::amend`).
        unsafe { self.path.step(0).node.as_mut() }
    }

    /// Gives entry number `at` other bounds.
    #[inline(always)]
    pub fn bound(&mut self, at: usize, start: u64, end: u64) {
        let at = self.path.at(0) + at;
        let slot = self.leaf().slot(at);
        self.less.bytes += slot.end - slot.start;
        self.more.bytes += end - start;
        self.leaf().set(at, Slot { start, end, ..slot });
    }

    /// Removes `count` entries from number `at` on, of which it tells `gone`.
    #[inline(always)]
    pub fn remove(&mut self, at: usize, count: usize, mut gone: impl FnMut(Entry<T>)) {
        let at = self.path.at(0) + at;
        for at in at..at + count {
            let slot = self.leaf().slot(at);
            self.less.bytes += slot.end - slot.start;
            gone(entry_of(slot));
        }
        if count != 0 {
            self.less.entries += count;
            self.leaf().splice(at, count, iter::empty());
        }
    }

    /// Adds `entry`, as number `at`.
    #[inline(always)]
    pub fn insert(&mut self, at: usize, entry: Entry<T>) {
        let at = self.path.at(0) + at;
        self.more.entries += 1;
        self.more.bytes += entry.end - entry.start;
        self.leaf().splice(at, 0, iter::once(slot_of(entry)));
    }

    /// Ends the change.
    #[inline(always)]
    pub fn finish(self) {
        let Self { path, less, more, .. } = self;
        let mut this = path.step(0).node;
        // What is said of it above.
        for level in 1..=path.top {
            // SAFETY: as in `leaf`, one node after the other.
            let slot = unsafe { this.as_ref() }.summary(this);
            this = path.step(level).node;
            // SAFETY: as above.
            unsafe { this.as_mut() }.set(path.at(level), slot);
        }
        // SAFETY: as above.
        let root = unsafe { this.as_mut() };
        root.crown(root.extent().change(less, more));
    }
}

impl<T> fmt::Debug for Spot<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<T> fmt::Debug for Amend<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { less, more, .. } = self;
        f.debug_struct("Amend").field("less", less).field("more", more).finish_non_exhaustive()
    }
}
