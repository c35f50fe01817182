//! The address space of a process at a point of the recording.

use crate::event::{Access, Backing, Prot};
use faultless::{PAGE_SIZE, VirtRange};
use rangemap::RangeMap;

/// The distance below its lowest page at which a stack may be touched: Linux's default limit of a
/// stack's size.
const STACK_REACH: u64 = 8 << 20;

/// An area of an address space. Equal adjacent areas are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    pub prot: Prot,
    pub backing: Backing,
    /// The recording does not contain the area.
    pub assumed: bool,
}

/// The result of a touch.
pub(crate) enum Met {
    /// An area, and its extent.
    Area(VirtRange, Area),
    /// The reach of a stack, which grows by this range.
    Growth(VirtRange, Area),
    Hole,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Space {
    areas: RangeMap<u64, Area>,
    /// The program break, after the first `brk`.
    pub brk: Option<u64>,
}

impl Area {
    /// Returns whether `access` is permitted. On x86-64, writable or executable memory is readable.
    pub fn permits(self, access: Access) -> bool {
        match access {
            Access::Unknown | Access::Read => !self.prot.is_empty(),
            Access::Write => self.prot.contains(Prot::WRITE),
            Access::Exec => self.prot.contains(Prot::EXEC),
        }
    }

    /// Returns whether the area is shared with other mappings and across `fork`.
    pub fn is_shared(self) -> bool {
        matches!(self.backing, Backing::SharedAnon | Backing::SharedFile)
    }
}

impl Space {
    pub fn area_count(&self) -> usize {
        self.areas.len()
    }

    pub fn is_empty(&self) -> bool {
        self.areas.is_empty() && self.brk.is_none()
    }

    pub fn insert(&mut self, range: VirtRange, area: Area) {
        if !range.is_empty() {
            self.areas.insert(range.start..range.end, area);
        }
    }

    pub fn remove(&mut self, range: VirtRange) {
        if !range.is_empty() {
            self.areas.remove(range.start..range.end);
        }
    }

    /// Returns the areas in `range`, cut to `range`.
    pub fn areas_in(&self, range: VirtRange) -> Vec<(VirtRange, Area)> {
        if range.is_empty() {
            return Vec::new();
        }
        let cut = |r: &std::ops::Range<u64>| VirtRange::new(r.start, r.end).intersect(range);
        self.areas.overlapping(&(range.start..range.end)).map(|(r, area)| (cut(r), *area)).collect()
    }

    /// Returns the parts of `range` without an area.
    pub fn holes_in(&self, range: VirtRange) -> Vec<VirtRange> {
        if range.is_empty() {
            return Vec::new();
        }
        let outer = range.start..range.end;
        self.areas.gaps(&outer).map(|gap| VirtRange::new(gap.start, gap.end)).collect()
    }

    /// Returns the result of a touch of `page`.
    pub fn meet(&self, page: u64) -> Met {
        if let Some((range, area)) = self.areas.get_key_value(&page) {
            return Met::Area(VirtRange::new(range.start, range.end), *area);
        }
        let reach = page..page.saturating_add(STACK_REACH + PAGE_SIZE);
        match self.areas.overlapping(&reach).next() {
            Some((range, area)) if area.backing == Backing::Stack => {
                Met::Growth(VirtRange::new(page, range.start), *area)
            }
            _ => Met::Hole,
        }
    }
}
