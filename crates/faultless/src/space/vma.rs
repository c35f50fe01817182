//! A VMA: a range of one space whose pages are alike.
//!
//! While other CPUs may read a published VMA, the VMA never changes, except for its sequence, its
//! lock (baseline policy only) and its anon_vma, which is set once. A writer that changes a mapping
//! publishes new VMAs in place of old VMAs; the old VMAs' sequences stay odd, and the VMAs are free
//! after a grace period. So a fault never sees half a change in a VMA's fields. The
//! [owner](crate::sync::owner) of a space changes the bounds of a VMA in place, since no other CPU
//! reads the VMA. The memory of a free VMA becomes [another VMA](super::stock).
//!
//! A VMA stores the page offset that its memory would have at address 0. So growth and cuts change
//! the bounds alone.

use super::area::{Area, PageSource, Prot, VmaFlags};
use super::baseline::VmaLock;
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::rmap::mapping::Listed;
use crate::rmap::{AnonVma, AnonVmaSlot};
use crate::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use crate::sync::grace::RetireLink;
use crate::sync::sequence::Sequence;
use crate::table::Entry;
use core::fmt;
use core::ptr::NonNull;

/// The kind of a VMA that waits for a grace period to end.
pub(crate) const RETIRE_VMA: u8 = 2;

/// A published VMA. On cache lines of its own: faults read the VMA all the time, and its neighbour
/// on the heap may be another VMA that calls write.
#[repr(C, align(64))]
pub(crate) struct Vma {
    /// The link for the grace period; first, so that a link and its VMA have the same address.
    pub(crate) retire: RetireLink,
    /// Odd while a writer changes the VMA, and from a replacement on until the memory is reused.
    pub(crate) sequence: Sequence,
    /// The lock of the `per_vma` baseline.
    pub(crate) lock: VmaLock,
    /// The anon_vma, set with the first anonymous page.
    pub(crate) anon_vma: AnonVmaSlot,
    /// The first form of the entries: computed once, used by every fault.
    pub(crate) leaf: Entry,
    pub(crate) merges: Merges,
    /// The link by which reclaim finds the VMA, if it maps an object, or is locked. Before the
    /// memory, which keeps the object longer.
    pub(crate) mapping: Option<Listed>,
    start: AtomicU64,
    end: AtomicU64,
    pub(super) attributes: Attributes,
}

impl Vma {
    /// Returns memory for a VMA, free.
    pub(super) fn free() -> Self {
        let nowhere = VirtRange { start: 0, end: 0 };
        let nothing =
            Piece::new(nowhere, Prot::empty(), VmaFlags::empty(), 0, PageSource::Anonymous);
        let vma = Self::new(nothing, [false; 2], None);
        vma.sequence.detach();
        vma
    }

    /// Makes the free VMA `vma` one of `piece`, which reclaim finds by `mapping`. The sequence
    /// stays odd.
    ///
    /// # Safety
    /// `vma` is free, and only the caller reaches it, except for its sequence.
    #[inline(always)]
    pub(super) unsafe fn reuse(
        vma: NonNull<Self>,
        piece: Piece,
        merges: [bool; 2],
        mapping: Option<Listed>,
    ) {
        let new = Self::new(piece, merges, mapping);
        let Self { retire: _, sequence: _, lock, anon_vma, leaf, merges, mapping, .. } = new;
        let Self { start, end, attributes, .. } = new;
        let at = vma.as_ptr();
        // The values of a free VMA own nothing, so they need no drop. SAFETY: the caller's promise.
        // Other CPUs may read the sequence, which these writes leave alone.
        unsafe {
            (&raw mut (*at).lock).write(lock);
            (&raw mut (*at).anon_vma).write(anon_vma);
            (&raw mut (*at).leaf).write(leaf);
            (&raw mut (*at).merges).write(merges);
            (&raw mut (*at).mapping).write(mapping);
            (&raw mut (*at).start).write(start);
            (&raw mut (*at).end).write(end);
            (&raw mut (*at).attributes).write(attributes);
        }
    }

    /// Frees `vma`, and returns the source of its pages.
    ///
    /// # Safety
    /// `vma` is not free, its sequence is odd, and only the caller reaches it, except for its
    /// sequence.
    #[inline(always)]
    pub(super) unsafe fn make_free(vma: NonNull<Self>) -> PageSource {
        let at = vma.as_ptr();
        // The mapping goes first, because the memory keeps its object. SAFETY: the caller's
        // promise.
        unsafe {
            (*at).check_ended();
            (*at).sequence.detach();
            drop((&raw mut (*at).mapping).replace(None));
            (&raw mut (*at).attributes.memory).replace(PageSource::Anonymous)
        }
    }

    /// Checks that the VMA has ended, in builds with checks: its sequence is odd. Otherwise a CPU
    /// could still use the VMA, or another writer has unlocked it after its end.
    #[inline(always)]
    fn check_ended(&self) {
        if cfg!(any(debug_assertions, loom, shuttle)) {
            assert!(self.sequence.read().is_none(), "{self:?} is freed, and in use");
        }
    }

    /// Returns an unlocked VMA of `piece`, which reclaim finds by `mapping`.
    #[inline(always)]
    fn new(piece: Piece, merges: [bool; 2], mapping: Option<Listed>) -> Self {
        let leaf = piece.attributes.leaf();
        let Piece { range, attributes, root } = piece;
        Self {
            retire: RetireLink::new(RETIRE_VMA),
            sequence: Sequence::new(),
            lock: VmaLock::default(),
            anon_vma: AnonVmaSlot::new(root),
            leaf,
            merges: Merges::new(merges),
            mapping,
            start: AtomicU64::new(range.start),
            end: AtomicU64::new(range.end),
            attributes,
        }
    }

    /// Returns the address of the first page.
    #[inline(always)]
    pub(crate) fn start(&self) -> u64 {
        self.start.load(Ordering::Acquire)
    }

    /// Returns the address behind the last page.
    #[inline(always)]
    pub(crate) fn end(&self) -> u64 {
        self.end.load(Ordering::Acquire)
    }

    /// Returns the addresses.
    #[inline(always)]
    pub(crate) fn range(&self) -> VirtRange {
        VirtRange::new(self.start(), self.end())
    }

    /// Moves the first page to `start`. The other pages keep their page offsets. The caller owns
    /// the space.
    #[inline(always)]
    pub(super) fn set_start(&self, start: u64) {
        self.start.store(start, Ordering::Release);
        self.resized();
    }

    /// Moves the end to `end`. The caller owns the space.
    #[inline(always)]
    pub(super) fn set_end(&self, end: u64) {
        self.end.store(end, Ordering::Release);
        self.resized();
    }

    /// Lets reclaim know where a locked VMA lies now.
    #[inline(always)]
    fn resized(&self) {
        if let Some(mapping) = &self.mapping {
            mapping.resize(self.range());
        }
    }

    /// Returns what programs may do with the pages.
    #[inline(always)]
    pub(crate) const fn prot(&self) -> Prot {
        self.attributes.prot
    }

    /// Returns how the VMA behaves.
    #[inline(always)]
    pub(crate) const fn flags(&self) -> VmaFlags {
        self.attributes.flags
    }

    /// Returns the source of the pages.
    #[inline(always)]
    pub(crate) const fn memory(&self) -> &PageSource {
        &self.attributes.memory
    }

    /// Returns the properties.
    #[inline(always)]
    pub(crate) fn area(&self) -> Area<'_> {
        self.attributes.at(self.range())
    }

    /// Returns the page offset of the page at `addr`, which must be in the VMA.
    #[inline(always)]
    pub(crate) const fn index_of(&self, addr: u64) -> u64 {
        self.attributes.index_of(addr)
    }

    /// Returns whether the pages are private copies.
    #[inline(always)]
    pub(crate) const fn is_private(&self) -> bool {
        self.attributes.is_private()
    }

    /// Returns a VMA to make with the part of this VMA inside `range`, which must overlap the VMA,
    /// and with the same anon_vma.
    #[inline(always)]
    pub(super) fn part(&self, range: VirtRange) -> Piece {
        let (range, attributes) = (self.range().intersect(range), self.attributes.clone());
        Piece { range, attributes, root: self.anon_vma.get() }
    }
}

impl fmt::Debug for Vma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vma").field("area", &self.area()).field("anon_vma", &self.anon_vma).finish()
    }
}

/// What a VMA maps, and how: all of its properties that do not change with its bounds.
#[derive(Clone, Debug)]
pub(crate) struct Attributes {
    pub(crate) prot: Prot,
    pub(crate) flags: VmaFlags,
    /// The page offset at address 0, modulo 2^64.
    base: u64,
    pub(crate) memory: PageSource,
}

impl Attributes {
    /// Returns the page offset at `addr`.
    #[inline(always)]
    const fn index_of(&self, addr: u64) -> u64 {
        self.base.wrapping_add(addr >> PAGE_SHIFT)
    }

    /// Returns the properties of a VMA at `range`.
    #[inline(always)]
    const fn at(&self, range: VirtRange) -> Area<'_> {
        let Self { prot, flags, ref memory, .. } = *self;
        Area { range, prot, flags, offset: self.index_of(range.start), memory }
    }

    /// Returns whether the pages are private copies.
    #[inline(always)]
    pub(super) const fn is_private(&self) -> bool {
        !self.flags.contains(VmaFlags::SHARED)
    }

    /// Returns the first form of the entries of the pages: stores are allowed if the CPU that maps
    /// the page may store to the page. For a file with a store, the subsystem must learn of stores
    /// to its pages, so the first store faults.
    fn leaf(&self) -> Entry {
        let leaf = Entry::template(self.prot.contains(Prot::EXEC));
        let leaf = match self.memory {
            PageSource::Device { cache, .. } => leaf.special().cached(cache),
            _ => leaf,
        };
        let shares = self.prot.contains(Prot::WRITE) && !self.is_private();
        let notes = || self.memory.object().is_some_and(|object| object.is_stored());
        if shares && !notes() { leaf.writable() } else { leaf }
    }

    /// Returns whether both are equal in everything but the protection: so adjacent VMAs show
    /// consecutive pages of the same memory.
    #[inline(always)]
    pub(super) fn resemble(&self, other: &Self) -> bool {
        self.flags == other.flags && self.base == other.base && self.memory.same(&other.memory)
    }

    /// Returns whether adjacent VMAs with both may be one VMA.
    #[inline(always)]
    pub(super) fn agree(&self, other: &Self) -> bool {
        self.prot == other.prot && self.resemble(other)
    }
}

/// A VMA to make.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(super) range: VirtRange,
    pub(crate) attributes: Attributes,
    pub(super) root: Option<AnonVma>,
}

impl Piece {
    /// Returns a VMA to make at `range`, which shows the pages of `memory` starting at `offset`.
    #[inline(always)]
    pub(super) fn new(
        range: VirtRange,
        prot: Prot,
        flags: VmaFlags,
        offset: u64,
        memory: PageSource,
    ) -> Self {
        let base = offset.wrapping_sub(range.start >> PAGE_SHIFT);
        Self { range, attributes: Attributes { prot, flags, base, memory }, root: None }
    }

    /// Moves the piece to `range`, whose first page has the page offset `offset`.
    #[inline(always)]
    pub(super) fn move_to(&mut self, range: VirtRange, offset: u64) {
        self.range = range;
        self.attributes.base = offset.wrapping_sub(range.start >> PAGE_SHIFT);
    }

    /// Returns the properties.
    #[inline(always)]
    pub(crate) const fn area(&self) -> Area<'_> {
        self.attributes.at(self.range)
    }
}

/// Whether a VMA merges with the VMA below, and with the VMA above, once nothing there is under
/// change.
///
/// Only the owner of the space, or the holder of the lock of the tree, or of the shard of the tree
/// that has the VMA, changes this value. Faults read the value without a lock.
#[derive(Debug)]
pub(crate) struct Merges(AtomicU8);

impl Merges {
    const fn bits([below, above]: [bool; 2]) -> u8 {
        below as u8 | (above as u8) << 1
    }

    pub(crate) fn new(merges: [bool; 2]) -> Self {
        Self(AtomicU8::new(Self::bits(merges)))
    }

    #[inline(always)]
    pub(crate) fn below(&self) -> bool {
        self.get()[0]
    }

    #[inline(always)]
    pub(crate) fn above(&self) -> bool {
        self.get()[1]
    }

    #[inline(always)]
    pub(crate) fn get(&self) -> [bool; 2] {
        let bits = self.0.load(Ordering::Relaxed);
        [bits & 1 != 0, bits & 2 != 0]
    }

    #[inline(always)]
    pub(crate) fn set_below(&self, merges: bool) {
        self.0.store(Self::bits([merges, self.above()]), Ordering::Relaxed);
    }

    #[inline(always)]
    pub(crate) fn set_above(&self, merges: bool) {
        self.0.store(Self::bits([self.below(), merges]), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn piece(start: u64, end: u64, offset: u64) -> Piece {
        let range = VirtRange::new(start << PAGE_SHIFT, end << PAGE_SHIFT);
        Piece::new(range, Prot::RW, VmaFlags::ACCOUNT, offset, PageSource::Anonymous)
    }

    #[test]
    fn a_part_keeps_its_page_offsets() {
        let vma = Vma::new(piece(10, 20, 3), [false; 2], None);
        let part = vma.part(VirtRange::new(14 << PAGE_SHIFT, 30 << PAGE_SHIFT));
        assert_eq!(part.range, VirtRange::new(14 << PAGE_SHIFT, 20 << PAGE_SHIFT));
        assert_eq!(part.area().offset, 7);
        assert_eq!(part.area().index_of(15 << PAGE_SHIFT), vma.index_of(15 << PAGE_SHIFT));
    }

    #[test]
    fn moved_bounds_keep_the_page_offsets() {
        let vma = Vma::new(piece(10, 20, 3), [false; 2], None);
        vma.set_start(8 << PAGE_SHIFT);
        vma.set_end(25 << PAGE_SHIFT);
        assert_eq!(vma.range(), VirtRange::new(8 << PAGE_SHIFT, 25 << PAGE_SHIFT));
        assert_eq!((vma.area().offset, vma.index_of(10 << PAGE_SHIFT)), (1, 3));
    }

    #[test]
    fn adjacent_vmas_with_consecutive_pages_agree() {
        let [one, next, moved] = [piece(1, 2, 5), piece(2, 3, 6), piece(2, 3, 7)];
        assert!(one.attributes.agree(&next.attributes));
        assert!(!one.attributes.resemble(&moved.attributes), "moved");
        let mut other = next.clone();
        other.attributes.prot = Prot::READ;
        assert!(!one.attributes.agree(&other.attributes));
        assert!(one.attributes.resemble(&other.attributes));
        other.attributes.flags |= VmaFlags::DONTFORK;
        assert!(!one.attributes.resemble(&other.attributes));
    }
}
