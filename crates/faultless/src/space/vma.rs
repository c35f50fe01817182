//! A VMA: a range of one space whose pages are alike.
//!
//! While other CPUs may read a published VMA, the VMA never changes, except for its sequence, its
//! lock (baseline policy only) and its anon_vma, which is set once. A writer that changes a mapping
//! publishes new VMAs in place of old VMAs; the old VMAs' sequences stay odd, and the memory is
//! freed after a grace period. So a fault never sees half a change in a VMA's fields. The
//! [owner](crate::sync::owner) of a space changes the bounds of a VMA in place, since no other CPU
//! reads the VMA.

use super::baseline::VmaLock;
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::file::Object;
use crate::heap::Shared;
use crate::rmap::mapping::Listed;
use crate::rmap::{AnonVmaSlot, SharedAnonVma};
use crate::sync::atomic::{AtomicU8, Ordering};
use crate::sync::grace::RetireLink;
use crate::sync::sequence::Sequence;
use crate::table::Entry;
use crate::table::format::CacheMode;
use bitflags::bitflags;
use core::cell::UnsafeCell;
use core::fmt;
use core::ops::{Deref, Range};

/// The kind of a VMA that waits for a grace period to end.
pub(crate) const RETIRE_VMA: u8 = 2;

bitflags! {
    /// What a program may do with a page: Linux's `PROT_*`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Prot: u32 {
        /// Loads.
        const READ = 1;
        /// Stores.
        const WRITE = 2;
        /// Instruction fetches.
        const EXEC = 4;
        /// `mprotect` only: extend down to the start of a growing VMA.
        const GROWSDOWN = 0x0100_0000;
        /// `mprotect` only: extend up to the end of an upward-growing VMA.
        const GROWSUP = 0x0200_0000;
    }
}

impl Prot {
    /// Loads and stores.
    pub const RW: Self = Self::READ.union(Self::WRITE);
    /// Loads, stores and instruction fetches. (`Prot::all()` also has the two flags that only
    /// `mprotect` accepts.)
    pub const RWX: Self = Self::RW.union(Self::EXEC);
}

bitflags! {
    /// How a VMA behaves, beyond its protection.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct VmaFlags: u32 {
        /// All mappings of the same object show the stores.
        const SHARED = 1 << 0;
        /// Grows downwards on faults just below.
        const GROWSDOWN = 1 << 1;
        /// Memory is promised for the pages.
        const ACCOUNT = 1 << 2;
        /// Mapped with `MAP_NORESERVE`.
        const NORESERVE = 1 << 3;
        /// Absent in forked children.
        const DONTFORK = 1 << 4;
        /// Empty in forked children.
        const WIPEONFORK = 1 << 5;
        /// `MADV_RANDOM`.
        const RANDOM = 1 << 6;
        /// `MADV_SEQUENTIAL`.
        const SEQUENTIAL = 1 << 7;
        /// `MADV_HUGEPAGE`.
        const HUGEPAGE = 1 << 8;
        /// `MADV_NOHUGEPAGE`.
        const NOHUGEPAGE = 1 << 9;
        /// A shared mapping of a file that was not opened for writing, which stays read-only.
        const NOWRITE = 1 << 10;
        /// `mlock`: the pages stay in memory.
        const LOCKED = 1 << 11;
        /// `MLOCK_ONFAULT`, with [`LOCKED`](Self::LOCKED): each page stays in memory after its
        /// fault.
        const LOCK_ON_FAULT = 1 << 12;
        /// All flags of memory locking.
        const ANY_LOCK = Self::LOCKED.bits() | Self::LOCK_ON_FAULT.bits();
        /// The policy [`Preferred`](super::MemPolicy::Preferred), or with no node `Local`.
        const PREFERRED = 1 << 13;
        /// The policy [`Interleave`](super::MemPolicy::Interleave).
        const INTERLEAVE = 1 << 14;
        /// The policy, with a bit for each of the nodes 0 to 7.
        const POLICY = Self::PREFERRED.bits() | Self::INTERLEAVE.bits() | 0xff << Self::NODES_SHIFT;
    }
}

impl VmaFlags {
    /// The position of the first bit of the nodes.
    pub(super) const NODES_SHIFT: u32 = 16;
}

/// The properties of a VMA that stay the same while the VMA lives.
#[derive(Clone, Debug)]
pub struct Area {
    /// The addresses.
    pub range: VirtRange,
    /// What programs may do with the pages.
    pub prot: Prot,
    /// How the VMA behaves.
    pub flags: VmaFlags,
    /// Page offset of the first page: into the object; the frame number of device memory; or for
    /// private anonymous memory the number of the page at its first mapping.
    pub offset: u64,
    /// The source of the pages.
    pub memory: PageSource,
}

/// The source of the pages of a VMA.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PageSource {
    /// Private anonymous memory: zeros.
    Anonymous,
    /// A memory object, or private copies of its pages.
    Object(Shared<Object>),
    /// A fixed range of physical memory outside the subsystem
    /// ([`Space::mmap_device`](crate::Space::mmap_device)).
    Device {
        /// How CPUs cache the memory.
        cache: CacheMode,
        /// The kernel's tag of the device.
        tag: u64,
    },
}

impl PageSource {
    /// Returns whether this is private anonymous memory.
    #[inline(always)]
    pub const fn is_anonymous(&self) -> bool {
        matches!(self, Self::Anonymous)
    }

    /// Returns whether this is device memory.
    #[inline]
    pub const fn is_device(&self) -> bool {
        matches!(self, Self::Device { .. })
    }

    /// Returns the object, if there is one.
    #[inline]
    pub const fn object(&self) -> Option<&Shared<Object>> {
        if let Self::Object(object) = self { Some(object) } else { None }
    }

    /// Returns the object, if there is one, for the caller to [release](Object::release).
    #[must_use]
    pub fn into_object(self) -> Option<Shared<Object>> {
        if let Self::Object(object) = self { Some(object) } else { None }
    }

    /// Returns whether pages of the same number are the same in both.
    #[inline(always)]
    fn same(&self, other: &Self) -> bool {
        if self.is_anonymous() { other.is_anonymous() } else { self.same_object(other) }
    }

    #[inline(never)]
    fn same_object(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Object(a), Self::Object(b)) => a.same(b),
            (Self::Device { cache, tag }, Self::Device { cache: other, tag: its }) => {
                cache == other && tag == its
            }
            _ => false,
        }
    }
}

impl Area {
    /// Returns the part of this area inside `range`, which must overlap the area.
    #[must_use]
    pub fn part(&self, range: VirtRange) -> Self {
        let range = self.range.intersect(range);
        let skipped = (range.start - self.range.start) >> PAGE_SHIFT;
        Self { range, offset: self.offset + skipped, ..self.clone() }
    }

    /// Moves the start of the area to `start`, below its end. The pages in the area keep their page
    /// offsets.
    pub(crate) const fn move_start(&mut self, start: u64) {
        // Downwards the difference wraps around, and so does the sum.
        let moved = start.wrapping_sub(self.range.start).cast_signed() >> PAGE_SHIFT;
        self.offset = self.offset.wrapping_add_signed(moved);
        self.range.start = start;
    }

    /// Returns the page offset of the page at `addr`, which must be in the area.
    #[inline]
    pub const fn index_of(&self, addr: u64) -> u64 {
        self.offset + ((addr - self.range.start) >> PAGE_SHIFT)
    }

    /// Returns whether the access in `prot` is allowed.
    #[inline]
    pub const fn allows(&self, prot: Prot) -> bool {
        self.prot.contains(prot)
    }

    /// Returns the first form of the entries of the pages: stores are allowed if the CPU that maps
    /// the page may store to the page. For a file with a store, the subsystem must learn of stores
    /// to its pages, so the first store faults.
    pub(crate) fn leaf(&self) -> Entry {
        let leaf = Entry::template(self.allows(Prot::EXEC));
        let leaf = match self.memory {
            PageSource::Device { cache, .. } => leaf.special().cached(cache),
            _ => leaf,
        };
        let shares = self.allows(Prot::WRITE) && !self.is_private();
        let notes = || self.memory.object().is_some_and(|object| object.is_stored());
        if shares && !notes() { leaf.writable() } else { leaf }
    }

    /// Returns the range in which the area shows the pages of `object` with the numbers `pages`, or
    /// `None`.
    pub(crate) fn shows(&self, object: &Shared<Object>, pages: &Range<u64>) -> Option<VirtRange> {
        // Counted in pages from the first page of the area.
        let first = pages.start.saturating_sub(self.offset);
        let end = pages.end.saturating_sub(self.offset).min(self.range.pages());
        let addr = |page: u64| self.range.start + (page << PAGE_SHIFT);
        let same = self.memory.object().is_some_and(|own| own.same(object));
        (same && first < end).then(|| VirtRange::new(addr(first), addr(end)))
    }

    /// Returns whether the pages are private copies.
    #[inline]
    pub const fn is_private(&self) -> bool {
        !self.flags.contains(VmaFlags::SHARED)
    }

    /// Returns whether `self`, directly below `next`, equals `next` in everything but the
    /// protection and the reverse map.
    pub fn resembles(&self, next: &Self) -> bool {
        self.range.end == next.range.start && self.agrees(next, next.range.start)
    }

    /// Returns whether `self` and `other`, of which neither starts above `at`, have the same flags,
    /// and the same page of the same memory at `at`.
    pub fn agrees(&self, other: &Self, at: u64) -> bool {
        self.flags == other.flags
            && self.memory.same(&other.memory)
            && self.index_of(at) == other.index_of(at)
    }
}

/// A published VMA. On cache lines of its own: faults read the VMA all the time, and its neighbour
/// on the heap may be another VMA that calls write.
#[repr(C, align(64))]
pub struct Vma {
    /// The link for the grace period; first, so that a link and its VMA have the same address.
    pub(crate) retire: RetireLink,
    /// Odd while a writer changes the VMA, and for ever after a replacement.
    pub(crate) sequence: Sequence,
    /// The lock of the `per_vma` baseline.
    pub(crate) lock: VmaLock,
    /// The anon_vma, set with the first anonymous page.
    pub(crate) anon_vma: AnonVmaSlot,
    /// The first form of the entries: computed once, used by every fault.
    pub(crate) leaf: Entry,
    pub(crate) merges: Merges,
    /// The link by which reclaim finds the VMA, if it maps an object, or is locked. Before the
    /// area, which keeps the object longer.
    pub(crate) mapping: Option<Listed>,
    /// The properties.
    pub area: InPlace<Area>,
}

impl Vma {
    /// Returns the area of `range`, a part of this VMA, and the anon_vma.
    #[inline(always)]
    pub(super) fn part(&self, range: VirtRange) -> (Area, Option<SharedAnonVma>) {
        (self.area.part(range), self.anon_vma.get())
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

/// A value that stays the same while a VMA is published, unless the [owner](crate::sync::owner) of
/// its space changes the value.
pub struct InPlace<T>(UnsafeCell<T>);

// SAFETY: a shared value is only read, except in `change`, whose caller ensures that no CPU reads
// the value during the change.
unsafe impl<T: Sync> Sync for InPlace<T> {}

impl<T> InPlace<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Changes a value that nothing else refers to.
    pub(crate) const fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// Changes the value.
    ///
    /// # Safety
    /// No other CPU reads the value during the change: the caller holds the space of the VMA as its
    /// owner, or has the only reference to the VMA. This CPU has no reference to the value either.
    pub(crate) unsafe fn change(&self, change: impl FnOnce(&mut T)) {
        // SAFETY: the caller's promise.
        change(unsafe { &mut *self.0.get() });
    }
}

impl<T> Deref for InPlace<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the caller of `change` ensures that no CPU reads the value during the change.
        unsafe { &*self.0.get() }
    }
}

impl fmt::Debug for Vma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vma").field("area", &*self.area).field("anon_vma", &self.anon_vma).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn area(start: u64, end: u64) -> Area {
        Area {
            range: VirtRange::new(start << PAGE_SHIFT, end << PAGE_SHIFT),
            prot: Prot::READ | Prot::WRITE,
            flags: VmaFlags::ACCOUNT,
            offset: start,
            memory: PageSource::Anonymous,
        }
    }

    #[test]
    fn a_part_keeps_its_page_offsets() {
        let whole = area(10, 20);
        let part = whole.part(VirtRange::new(14 << PAGE_SHIFT, 30 << PAGE_SHIFT));
        assert_eq!(part.range, VirtRange::new(14 << PAGE_SHIFT, 20 << PAGE_SHIFT));
        assert_eq!(part.offset, 14);
        assert_eq!(part.index_of(15 << PAGE_SHIFT), whole.index_of(15 << PAGE_SHIFT));
    }

    #[test]
    fn only_like_neighbours_resemble() {
        assert!(area(1, 2).resembles(&area(2, 3)));
        assert!(!area(1, 2).resembles(&area(3, 4)), "a gap");
        assert!(!area(1, 2).resembles(&Area { offset: 7, ..area(2, 3) }), "moved");
        assert!(area(1, 2).resembles(&Area { prot: Prot::READ, ..area(2, 3) }));
        let flags = VmaFlags::ACCOUNT | VmaFlags::DONTFORK;
        assert!(!area(1, 2).resembles(&Area { flags, ..area(2, 3) }));
    }
}
