//! The properties of a VMA that programs see: what is mapped where, and how.

use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::file::Object;
use crate::heap::Shared;
use crate::table::format::CacheMode;
use bitflags::bitflags;
use core::ops::Range;

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

/// The properties of a VMA, as a CPU has read them.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Area<'a> {
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
    pub memory: &'a PageSource,
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
    pub(super) fn same(&self, other: &Self) -> bool {
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

impl Area<'_> {
    /// Returns the part of this area inside `range`, which must overlap the area.
    #[must_use]
    #[inline]
    pub fn part(self, range: VirtRange) -> Self {
        let range = self.range.intersect(range);
        Self { range, offset: self.index_of(range.start), ..self }
    }

    /// Returns the page offset of the page at `addr`, which must be in the area.
    #[inline(always)]
    pub const fn index_of(self, addr: u64) -> u64 {
        self.offset + ((addr - self.range.start) >> PAGE_SHIFT)
    }

    /// Returns whether the access in `prot` is allowed.
    #[inline(always)]
    pub const fn allows(self, prot: Prot) -> bool {
        self.prot.contains(prot)
    }

    /// Returns whether the pages are private copies.
    #[inline(always)]
    pub const fn is_private(self) -> bool {
        !self.flags.contains(VmaFlags::SHARED)
    }

    /// Returns the range in which the area shows the pages of `object` with the numbers `pages`, or
    /// `None`.
    pub(crate) fn shows(self, object: &Shared<Object>, pages: &Range<u64>) -> Option<VirtRange> {
        // Counted in pages from the first page of the area.
        let first = pages.start.saturating_sub(self.offset);
        let end = pages.end.saturating_sub(self.offset).min(self.range.pages());
        let addr = |page: u64| self.range.start + (page << PAGE_SHIFT);
        let same = self.memory.object().is_some_and(|own| own.same(object));
        (same && first < end).then(|| VirtRange::new(addr(first), addr(end)))
    }
}
