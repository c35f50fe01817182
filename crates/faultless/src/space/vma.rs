//! A VMA: a range of one space whose pages are alike.
//!
//! While others may read it, a published VMA never changes, but for its sequence, its lock (baseline policy only) and its
//! anon_vma, which is set once. A writer that changes a mapping publishes new VMAs in place of old
//! ones; the old ones' sequences stay odd, and they are freed after a grace period. So a
//! fault never sees half a change in a VMA's fields. The [owner](crate::sync::owner) of a space changes the bounds of a VMA in place,
//! since no other CPU reads it.

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
    /// Loads, stores and instruction fetches. (`Prot::all()` has the two flags that only `mprotect` knows, too.)
    pub const RWX: Self = Self::RW.union(Self::EXEC);
}

bitflags! {
    /// How a VMA behaves, beyond its protection.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct VmaFlags: u32 {
        /// Stores are seen by all that map the same object.
        const SHARED = 1 << 0;
        /// Grows downwards on faults just below.
        const GROWSDOWN = 1 << 1;
        /// Its pages are promised memory.
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
        /// A shared mapping of a file that was not opened for writing: it stays read-only.
        const NOWRITE = 1 << 10;
        /// `mlock`: its pages stay where they are.
        const LOCKED = 1 << 11;
        /// `MLOCK_ONFAULT`, with [`LOCKED`](Self::LOCKED): once they were faulted in.
        const LOCK_ON_FAULT = 1 << 12;
        /// All flags of memory locking.
        const ANY_LOCK = Self::LOCKED.bits() | Self::LOCK_ON_FAULT.bits();
        /// It has the policy [`Preferred`](super::MemPolicy::Preferred), or with no node `Local`.
        const PREFERRED = 1 << 13;
        /// It has the policy [`Interleave`](super::MemPolicy::Interleave).
        const INTERLEAVE = 1 << 14;
        /// Its policy, with a bit for each of the nodes 0 to 7.
        const POLICY = Self::PREFERRED.bits() | Self::INTERLEAVE.bits() | 0xff << Self::NODES_SHIFT;
    }
}

impl VmaFlags {
    /// Where the bits of the nodes begin.
    pub(super) const NODES_SHIFT: u32 = 16;
}

/// What a VMA is: everything that stays the same while it lives.
#[derive(Clone, Debug)]
pub struct Area {
    /// Where it lies.
    pub range: VirtRange,
    /// What programs may do with it.
    pub prot: Prot,
    /// How it behaves.
    pub flags: VmaFlags,
    /// Page offset of its first page: into the object; the frame number of device memory; or for private
    /// anonymous memory the page number it was first mapped at.
    pub offset: u64,
    /// What its pages come from.
    pub memory: Memory,
}

/// What the pages of a VMA come from.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Memory {
    /// Private anonymous memory: zeros.
    Anonymous,
    /// A memory object, or private copies of its pages.
    Object(Shared<Object>),
    /// A fixed range of physical memory that is not the subsystem's
    /// ([`Space::mmap_device`](crate::Space::mmap_device)).
    Device {
        /// How CPUs cache it.
        cache: CacheMode,
        /// What the kernel knows it by.
        tag: u64,
    },
}

impl Memory {
    /// Whether it is private anonymous memory.
    #[inline(always)]
    pub const fn is_anonymous(&self) -> bool {
        matches!(self, Self::Anonymous)
    }

    /// Whether it is device memory.
    #[inline]
    pub const fn is_device(&self) -> bool {
        matches!(self, Self::Device { .. })
    }

    /// The object, if it is one.
    #[inline]
    pub const fn object(&self) -> Option<&Shared<Object>> {
        if let Self::Object(object) = self { Some(object) } else { None }
    }

    /// The object, if it is one, for the caller to [release](Object::release).
    #[must_use]
    pub fn into_object(self) -> Option<Shared<Object>> {
        if let Self::Object(object) = self { Some(object) } else { None }
    }

    /// Whether pages of the same number are the same in both.
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
    /// The part of this area inside `range`, which must overlap it.
    #[must_use]
    pub fn part(&self, range: VirtRange) -> Self {
        let range = self.range.intersect(range);
        let skipped = (range.start - self.range.start) >> PAGE_SHIFT;
        Self { range, offset: self.offset + skipped, ..self.clone() }
    }

    /// Lets it start at `start`, below its end. The pages in it keep their page offsets.
    pub(crate) const fn move_start(&mut self, start: u64) {
        // Downwards the difference wraps around, and so does the sum.
        let moved = start.wrapping_sub(self.range.start).cast_signed() >> PAGE_SHIFT;
        self.offset = self.offset.wrapping_add_signed(moved);
        self.range.start = start;
    }

    /// The page offset of the page at `addr`, which must lie in the area.
    #[inline]
    pub const fn index_of(&self, addr: u64) -> u64 {
        self.offset + ((addr - self.range.start) >> PAGE_SHIFT)
    }

    /// Whether the access that `prot` names is allowed.
    #[inline]
    pub const fn allows(&self, prot: Prot) -> bool {
        self.prot.contains(prot)
    }

    /// What the entries of its pages look like at first: stores are allowed where the CPU that maps the page
    /// may store to it. That the pages of a file with a store were stored to must be known, so the first store faults.
    pub(crate) fn leaf(&self) -> Entry {
        let leaf = Entry::template(self.allows(Prot::EXEC));
        let leaf = match self.memory {
            Memory::Device { cache, .. } => leaf.special().cached(cache),
            _ => leaf,
        };
        let shares = self.allows(Prot::WRITE) && !self.is_private();
        let notes = || self.memory.object().is_some_and(|object| object.is_stored());
        if shares && !notes() { leaf.writable() } else { leaf }
    }

    /// Where it shows the pages of `object` with the numbers `pages`, if it does.
    pub(crate) fn shows(&self, object: &Shared<Object>, pages: &Range<u64>) -> Option<VirtRange> {
        // In pages from the area's first.
        let first = pages.start.saturating_sub(self.offset);
        let end = pages.end.saturating_sub(self.offset).min(self.range.pages());
        let addr = |page: u64| self.range.start + (page << PAGE_SHIFT);
        let same = self.memory.object().is_some_and(|own| own.same(object));
        (same && first < end).then(|| VirtRange::new(addr(first), addr(end)))
    }

    /// Whether its pages are private copies.
    #[inline]
    pub const fn is_private(&self) -> bool {
        !self.flags.contains(VmaFlags::SHARED)
    }

    /// Whether `self`, directly below `next`, is like it in all but the protection and the reverse map.
    pub fn resembles(&self, next: &Self) -> bool {
        self.range.end == next.range.start && self.agrees(next, next.range.start)
    }

    /// Whether `self` and `other`, of which neither starts above `at`, have the same flags, and the same
    /// page of the same memory at `at`.
    pub fn agrees(&self, other: &Self, at: u64) -> bool {
        self.flags == other.flags
            && self.memory.same(&other.memory)
            && self.index_of(at) == other.index_of(at)
    }
}

/// A published VMA. On lines of its own: faults read it all the time, and what lies next to it on the heap
/// may be another that calls write.
#[repr(C, align(64))]
pub struct Vma {
    /// Its way to the grace period; first, so that a link is a VMA.
    pub(crate) retire: RetireLink,
    /// Odd while a writer works on it, and for ever once it is replaced.
    pub(crate) sequence: Sequence,
    /// The lock of the `per_vma` baseline.
    pub(crate) lock: VmaLock,
    /// The anon_vma, once an anonymous page was made.
    pub(crate) anon_vma: AnonVmaSlot,
    /// What its entries look like: computed once, used by every fault.
    pub(crate) leaf: Entry,
    pub(crate) merges: Merges,
    /// Where reclaim finds it, if it is of an object, or locked. Before the area, which keeps the object longer.
    pub(crate) mapping: Option<Listed>,
    /// What it is.
    pub area: InPlace<Area>,
}

impl Vma {
    /// The area of `range`, a part of this one, and the anon_vma.
    #[inline(always)]
    pub(super) fn part(&self, range: VirtRange) -> (Area, Option<SharedAnonVma>) {
        (self.area.part(range), self.anon_vma.get())
    }
}

/// Whether a VMA merges with the VMA below it, and with the one above, once nothing there is under change.
///
/// Only the holder of the lock of the tree, or of the shard of the tree that has the VMA, changes it, or the owner of the space. Faults read
/// it without a lock.
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

/// What stays as it is while a VMA is published, unless the [owner](crate::sync::owner) of its space changes it.
pub struct InPlace<T>(UnsafeCell<T>);

// SAFETY: shared, it is only read, except in `change`, whose caller ensures that no CPU reads it meanwhile.
unsafe impl<T: Sync> Sync for InPlace<T> {}

impl<T> InPlace<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Changes a value that nothing else refers to.
    pub(crate) const fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// Changes it.
    ///
    /// # Safety
    /// No other CPU reads it meanwhile: the caller holds the space of the VMA as its owner, or has the VMA alone. This CPU
    /// has no reference to it either.
    pub(crate) unsafe fn change(&self, change: impl FnOnce(&mut T)) {
        // SAFETY: the caller's promise.
        change(unsafe { &mut *self.0.get() });
    }
}

impl<T> Deref for InPlace<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the caller of `change` ensures that no CPU reads it meanwhile.
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
            memory: Memory::Anonymous,
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
