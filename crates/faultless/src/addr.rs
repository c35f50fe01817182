//! Addresses, frame numbers and ranges.
//!
//! Virtual addresses are plain `u64` byte addresses in a half-open, page-aligned [`VirtRange`];
//! physical memory is counted in frames of [`PAGE_SIZE`] bytes.

use core::fmt;

/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in a base page and in a frame.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;

/// Rounds `addr` down to a page boundary.
#[inline]
pub const fn page_down(addr: u64) -> u64 {
    addr & !(PAGE_SIZE - 1)
}

/// Rounds `addr` up to a page boundary; `None` beyond the last page.
#[inline]
pub const fn page_up(addr: u64) -> Option<u64> {
    match addr.checked_add(PAGE_SIZE - 1) {
        Some(sum) => Some(page_down(sum)),
        None => None,
    }
}

/// Returns whether `addr` is a multiple of [`PAGE_SIZE`].
#[inline]
pub const fn is_page_aligned(addr: u64) -> bool {
    addr & (PAGE_SIZE - 1) == 0
}

/// The number of a physical frame: its physical address shifted right by [`PAGE_SHIFT`].
///
/// 32 bits number 16 TiB of physical memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct FrameNumber(pub u32);

impl FrameNumber {
    /// Returns the physical address of the frame's first byte.
    #[inline]
    pub const fn phys(self) -> u64 {
        (self.0 as u64) << PAGE_SHIFT
    }

    /// Returns the frame that contains the physical address `phys`; `None` for addresses of 16 TiB
    /// and above.
    #[inline]
    pub const fn from_phys(phys: u64) -> Option<Self> {
        let number = phys >> PAGE_SHIFT;
        if number <= u32::MAX as u64 { Some(Self(number as u32)) } else { None }
    }
}

impl fmt::Debug for FrameNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frame {:#x}", self.0)
    }
}

/// A half-open range of virtual addresses, `start..end`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VirtRange {
    /// First byte of the range.
    pub start: u64,
    /// First byte after the range; not below `start`.
    pub end: u64,
}

impl VirtRange {
    /// Returns the range `start..end`; empty if `end` is below `start`.
    #[inline]
    pub const fn new(start: u64, end: u64) -> Self {
        Self { start, end: if end < start { start } else { end } }
    }

    /// Returns the page that contains `addr`.
    #[inline]
    pub const fn page(addr: u64) -> Self {
        let start = page_down(addr);
        Self { start, end: start + PAGE_SIZE }
    }

    /// Returns the bytes in the range.
    #[inline]
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Returns whether the range is empty.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// Returns the pages in the range, which must be page-aligned.
    #[inline]
    pub const fn pages(self) -> u64 {
        self.len() >> PAGE_SHIFT
    }

    /// Returns whether `addr` lies in the range.
    #[inline]
    pub const fn contains(self, addr: u64) -> bool {
        self.start <= addr && addr < self.end
    }

    /// Returns whether `other` lies wholly inside this range.
    #[inline]
    pub const fn covers(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// Returns whether the two ranges share a byte.
    #[inline]
    pub const fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// Returns the common part of the two ranges; empty if they do not overlap.
    #[inline]
    pub fn intersect(self, other: Self) -> Self {
        Self::new(self.start.max(other.start), self.end.min(other.end))
    }

    /// Returns the smallest range that covers both.
    #[inline]
    pub fn hull(self, other: Self) -> Self {
        Self { start: self.start.min(other.start), end: self.end.max(other.end) }
    }

    /// Returns the range extended by one page on either side, within the address space.
    #[inline(always)]
    pub(crate) const fn with_neighbours(self) -> Self {
        Self {
            start: self.start.saturating_sub(PAGE_SIZE),
            end: self.end.saturating_add(PAGE_SIZE),
        }
    }

    /// Returns the range widened to multiples of `align`, a power of two.
    #[inline]
    pub const fn widen(self, align: u64) -> Self {
        let start = self.start & !(align - 1);
        let end = match self.end.checked_add(align - 1) {
            Some(sum) => sum & !(align - 1),
            None => !(align - 1),
        };
        Self { start, end }
    }
}

impl fmt::Debug for VirtRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_stops_at_the_end_of_the_address_space() {
        assert_eq!(page_up(1), Some(PAGE_SIZE));
        assert_eq!(page_up(u64::MAX), None);
        assert_eq!(page_up(u64::MAX - PAGE_SIZE + 1), Some(u64::MAX - PAGE_SIZE + 1));
    }

    #[test]
    fn half_open_ranges_that_touch_do_not_overlap() {
        let (a, b) = (VirtRange::new(0, 4096), VirtRange::new(4096, 8192));
        assert!(!a.overlaps(b));
        assert!(a.intersect(b).is_empty());
        assert_eq!(a.hull(b), VirtRange::new(0, 8192));
        assert_eq!(VirtRange::new(4096, 8192).widen(1 << 20), VirtRange::new(0, 1 << 20));
    }
}
