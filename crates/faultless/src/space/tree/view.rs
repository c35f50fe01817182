//! The tree as a reader sees it, whether in one piece or in [shards](super::shard).

use super::shard::Shard;
use super::version::{self, Found, Version};
use crate::addr::VirtRange;
use core::fmt;
use core::iter::FusedIterator;

/// All addresses.
pub const EVERYWHERE: VirtRange = VirtRange { start: 0, end: u64::MAX };

/// The result of [`View::version`] if no number identifies the version. No version has this number.
pub const UNKNOWN: usize = usize::MAX;

/// A reader's view of a tree.
///
/// A view of a tree in one piece is the tree at one moment: later versions that other CPUs publish
/// do not appear in the view.
///
/// A view of a tree in shards keeps the directory of one moment, and each question reads the shard
/// at that address again. So two answers about one shard may be from two of its versions, and of
/// changes in two shards the view may show only the later. The view shows each change completely or
/// not at all. [`holding`](Self::holding) keeps one version of one shard;
/// [`of_one_moment`](super::Tree::of_one_moment) joins the shards.
pub struct View<'s, T> {
    /// The version of `part` in this view, even after another version is published there.
    pub(super) own: Version<'s, T>,
    /// The addresses of one shard, or none; all, if there are no shards.
    part: VirtRange,
    /// The directory of the shards; empty if the tree is in one piece.
    shards: Version<'s, Shard<T>>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

impl<'s, T> View<'s, T> {
    /// A view of a tree in one piece.
    #[inline(always)]
    pub const fn whole(own: Version<'s, T>) -> Self {
        Self { own, part: EVERYWHERE, shards: Version::EMPTY }
    }

    /// A view of a tree in `shards`, with `own` as the version of `part`, which is the part of one
    /// shard, or is empty.
    ///
    /// # Safety
    /// The shards are valid for `'s`, and so are the versions that their roots lead to during `'s`.
    #[inline(always)]
    pub(super) unsafe fn of_shards(
        shards: Version<'s, Shard<T>>,
        part: VirtRange,
        own: Version<'s, T>,
    ) -> Self {
        Self { own, part, shards }
    }

    /// Returns whether the tree is in one piece.
    #[inline(always)]
    pub fn is_whole(&self) -> bool {
        self.shards.is_empty()
    }

    /// Returns the addresses and the current version of the shard that has `addr`. For `part`, the
    /// result is the version that the view keeps.
    pub(super) fn part_at(&self, addr: u64) -> (VirtRange, Version<'s, T>) {
        let addr = addr.min(u64::MAX - 1);
        if self.part.contains(addr) {
            return (self.part, self.own);
        }
        match self.shards.at(addr) {
            // SAFETY: the contract of `of_shards`: the shard is valid for `'s`, and so are the
            // versions that its root leads to.
            Some(shard) => (shard.range(), unsafe { shard.value.as_ref().version() }),
            None => {
                debug_assert!(false, "the shards cover every address");
                (VirtRange::new(addr, u64::MAX), Version::EMPTY)
            }
        }
    }

    /// Returns the addresses and the current version of each shard, ascending; for a tree in one
    /// piece, all addresses and the version of the tree.
    pub(super) fn parts(&self) -> impl Iterator<Item = (VirtRange, Version<'s, T>)> + use<'s, T> {
        let (view, mut next) = (*self, Some(0));
        core::iter::from_fn(move || {
            let (part, version) = view.part_at(next?);
            next = (part.end != u64::MAX).then_some(part.end);
            Some((part, version))
        })
    }

    /// Returns the number of shards.
    #[cfg(any(test, loom, shuttle))]
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Returns the root of the directory of shards, if there are shards.
    #[cfg(all(test, not(loom)))]
    pub(super) fn directory(&self) -> Option<&'s super::node::Node> {
        self.shards.root
    }

    /// Returns a view that keeps the current version of the shard that has `addr`, and of no other
    /// shard: later changes there do not appear in the view.
    pub fn holding(self, addr: u64) -> Self {
        let (part, own) = self.part_at(addr);
        Self { own, part, ..self }
    }

    /// Returns the number of the version of `range` in this view: while the section of the view is
    /// open, another version has another number. The result is [`UNKNOWN`] if `range` is in several
    /// shards, which have no common version, or in a shard without entries.
    #[inline]
    pub fn version(&self, range: VirtRange) -> usize {
        if self.is_whole() { self.own.number() } else { self.version_in_shards(range) }
    }

    #[inline(never)]
    fn version_in_shards(&self, range: VirtRange) -> usize {
        if range.is_empty() {
            return 0;
        }
        let (part, version) = self.part_at(range.start);
        // All versions without entries have one number, so an empty shard looks like another empty
        // shard with other bounds.
        if part.covers(range) && !version.is_empty() { version.number() } else { UNKNOWN }
    }

    /// Returns the number of entries.
    #[inline]
    pub fn len(&self) -> usize {
        if self.is_whole() {
            self.own.len()
        } else {
            self.parts().map(|(_, part)| part.len()).sum()
        }
    }

    /// Returns the bytes of all entries' ranges.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.parts().map(|(_, part)| part.bytes()).sum()
    }

    /// Returns whether there is no entry.
    #[inline]
    #[cfg(all(test, not(loom)))]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the first entry that ends above `addr`; the entry holds `addr` unless it starts
    /// above.
    #[inline]
    pub fn find(&self, addr: u64) -> Option<Found<'s, T>> {
        if self.is_whole() { self.own.find(addr) } else { self.find_in_shards(addr, u64::MAX) }
    }

    /// [`find`](Self::find), if the entry starts below `limit`. The call reads no shard that begins
    /// at `limit` or above.
    #[inline]
    pub fn find_below(&self, addr: u64, limit: u64) -> Option<Found<'s, T>> {
        let found =
            if self.is_whole() { self.own.find(addr) } else { self.find_in_shards(addr, limit) };
        found.filter(|entry| entry.start < limit)
    }

    #[inline(never)]
    fn find_in_shards(&self, addr: u64, limit: u64) -> Option<Found<'s, T>> {
        let mut at = addr;
        loop {
            let (part, version) = self.part_at(at);
            let found = version.find(addr);
            if found.is_some() || part.end >= limit {
                return found;
            }
            at = part.end;
        }
    }

    /// Returns the entry that holds `addr`.
    #[inline]
    pub fn at(&self, addr: u64) -> Option<Found<'s, T>> {
        if self.is_whole() { self.own.at(addr) } else { self.at_in_shard(addr) }
    }

    /// Out of line, as most trees are in one piece.
    #[inline(never)]
    fn at_in_shard(&self, addr: u64) -> Option<Found<'s, T>> {
        self.part_at(addr).1.at(addr)
    }

    /// Returns the last entry that ends at `addr` or below.
    #[inline]
    pub fn before(&self, addr: u64) -> Option<Found<'s, T>> {
        if self.is_whole() { self.own.before(addr) } else { self.before_in_shards(addr) }
    }

    #[inline(never)]
    fn before_in_shards(&self, addr: u64) -> Option<Found<'s, T>> {
        let mut at = addr;
        loop {
            let (part, version) = self.part_at(at);
            let found = version.before(addr);
            if found.is_some() || part.start == 0 {
                return found;
            }
            at = part.start - 1;
        }
    }

    /// Returns the last entry that ends at `addr` or below, and the first entry that ends above. In
    /// shards the two may be of different versions.
    pub fn around(&self, addr: u64) -> (Option<Found<'s, T>>, Option<Found<'s, T>>) {
        if self.is_whole() { self.own.around(addr) } else { (self.before(addr), self.find(addr)) }
    }

    /// Returns the entries in order, starting at the first that ends above `addr`.
    #[inline]
    pub fn iter_from(&self, addr: u64) -> Iter<'s, T> {
        let (part, version) =
            if self.is_whole() { (self.part, self.own) } else { self.part_at(addr) };
        Iter { entries: version.iter_from(addr), end: part.end, view: *self }
    }

    /// Returns all entries in order.
    #[inline]
    pub fn iter(&self) -> Iter<'s, T> {
        self.iter_from(0)
    }
}

impl<T> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Entries of a view in the order of addresses.
pub struct Iter<'s, T> {
    entries: version::Iter<'s, T>,
    /// The end of the shard of `entries`.
    end: u64,
    view: View<'s, T>,
}

impl<T> Clone for Iter<'_, T> {
    fn clone(&self) -> Self {
        Self { entries: self.entries.clone(), ..*self }
    }
}

impl<'s, T> Iter<'s, T> {
    #[inline(never)]
    fn next_in_shards(&mut self) -> Option<Found<'s, T>> {
        while self.end != u64::MAX {
            let (part, version) = self.view.part_at(self.end);
            (self.entries, self.end) = (version.iter(), part.end);
            let next = self.entries.next();
            if next.is_some() {
                return next;
            }
        }
        None
    }
}

impl<'s, T: 's> Iterator for Iter<'s, T> {
    type Item = Found<'s, T>;

    #[inline(always)]
    fn next(&mut self) -> Option<Found<'s, T>> {
        let next = self.entries.next();
        if next.is_none() && self.end != u64::MAX { self.next_in_shards() } else { next }
    }
}

impl<'s, T: 's> FusedIterator for Iter<'s, T> {}

impl<T> fmt::Debug for Iter<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iter").field("view", &self.view).finish_non_exhaustive()
    }
}
