//! Where a mapping without a given address goes: as high as possible below a common top, as on
//! Linux.
//!
//! CPUs that map at the same time, or map while another unmaps, all want the highest hole, and
//! would wait for each other: each claims a range before mapping there, and an unmapping keeps its
//! claim until after its flush. So a CPU that finds the chosen range claimed does not wait.
//! Instead, the CPU uses its *own region*, which begins further down, and stays there for its next
//! mappings in that space; the knob `map_apart` sets their number. Each time the CPU returns and
//! meets another CPU again, the number doubles, up to 2^[`MOST_DOUBLINGS`] times the knob:
//! otherwise, CPUs that all map all the time would disturb each other all the time. In a region no
//! other CPU chooses a place, and no page-table entry shares a cache line with an entry of another
//! CPU. A region reserves nothing: mappings with a fixed address, hints, and mappings that fit
//! nowhere else also go there.

use super::area::VmaFlags;
use super::unmap::user_range;
use super::vma::Vma;
use super::{MMAP_BASE, STACK_GUARD, Space};
use crate::addr::{VirtRange, page_down};
use crate::machine::{CpuId, MAX_CPUS, Machine, SpaceId};
use crate::space::tree::{Found, Gap, View};
use crate::table::format::USER_END;
use crate::vm::Cpu;

/// Bytes between the regions of two CPUs: 1,024 regions take half of user space.
pub(super) const REGION: u64 = 1 << 36;
const _: () = assert!(USER_END / 3 + (MAX_CPUS as u64 + 1) * REGION <= MMAP_BASE);

/// The maximum number of doublings.
const MOST_DOUBLINGS: u32 = 8;

/// How a CPU maps apart from other CPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Apart {
    /// The space.
    space: SpaceId,
    /// The number of mappings left.
    mappings: u32,
    /// How often the number of mappings has doubled.
    doublings: u32,
}

impl Apart {
    /// Apart in no space.
    pub(crate) const NOWHERE: Self = Self { space: SpaceId(0), mappings: 0, doublings: 0 };

    /// After a meeting in `space`. If the CPU was apart there before, and has returned, the number
    /// of mappings doubles.
    fn met(self, space: SpaceId) -> Self {
        let doublings = match self {
            Self { space: before, .. } if before != space => 0,
            Self { mappings: 0, doublings, .. } => MOST_DOUBLINGS.min(doublings + 1),
            // In the CPU's region.
            Self { doublings, .. } => doublings,
        };
        Self { space, mappings: u32::MAX, doublings }
    }

    /// After one more mapping, with `map_apart` of the knob. Returns `None` if no mapping is left.
    fn maps(self, map_apart: u32) -> Option<Self> {
        let most = map_apart.saturating_mul(1 << self.doublings);
        let mappings = self.mappings.min(most).checked_sub(1)?;
        Some(Self { mappings, ..self })
    }
}

/// Where one call may place a mapping.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// As high as possible below this address.
    top: u64,
    /// Never below this address.
    lowest: u64,
}

impl Places {
    /// Below the common top.
    #[inline(always)]
    pub(super) fn common<M: Machine>(cpu: &Cpu<'_, M>) -> Self {
        Self { top: MMAP_BASE, lowest: cpu.vm().machine().lowest_address() }
    }

    /// The places of the CPU's next mapping in `space`.
    #[inline(always)]
    pub(super) fn next<M: Machine>(space: &Space<M>, cpu: &Cpu<'_, M>) -> Self {
        let apart = cpu.state().apart.get();
        if apart.mappings == 0 || space.core.owner.was(cpu.id()) || apart.space != space.id() {
            return Self::common(cpu);
        }
        Self::further(cpu, apart)
    }

    /// The places of a CPU that has met the claim of another CPU in `space`, for this mapping and
    /// the next. `None`: the CPU is to wait.
    #[cold]
    pub(super) fn apart<M: Machine>(space: &Space<M>, cpu: &Cpu<'_, M>) -> Option<Self> {
        let places = Self::further(cpu, cpu.state().apart.get().met(space.id()));
        places.are_apart().then_some(places)
    }

    /// The places of a CPU that maps in its region, at most for the number of mappings in `apart`.
    #[inline(never)]
    fn further<M: Machine>(cpu: &Cpu<'_, M>, apart: Apart) -> Self {
        let common = Self::common(cpu);
        let Some(apart) = apart.maps(cpu.vm().knobs.map_apart()) else { return common };
        cpu.state().apart.set(apart);
        Self { top: region(cpu.id()), ..common }
    }

    /// Returns whether the places begin in a region.
    pub(super) fn are_apart(self) -> bool {
        self.top != MMAP_BASE
    }

    /// Returns the page of the hint `addr`.
    #[inline(always)]
    pub(super) fn hint(self, addr: u64) -> u64 {
        page_down(addr).max(self.lowest)
    }

    /// Finds the place of a mapping of `len` bytes: the hint if that range is free, else as high as
    /// possible below the top, or below the common top, else as low as possible above a third of
    /// user space.
    pub(super) fn find(self, view: &View<'_, Vma>, hint: Option<u64>, len: u64) -> Option<u64> {
        let Self { top, lowest } = self;
        if let Some(hint) = hint.map(|addr| self.hint(addr))
            && let Some(range) = user_range(hint, len)
            && is_free(view, range)
        {
            return Some(hint);
        }
        let top = if len <= REGION { top } else { MMAP_BASE };
        let found = below(view, len, lowest, top);
        let elsewhere =
            || if top != MMAP_BASE { below(view, len, lowest, MMAP_BASE) } else { None };
        found.or_else(elsewhere).or_else(|| above(view, len, page_down(USER_END / 3).max(lowest)))
    }
}

/// The end of the region of `cpu`.
fn region(cpu: CpuId) -> u64 {
    MMAP_BASE - (cpu.index() as u64 + 1) * REGION
}

/// The highest free place from `lowest` to `high`.
#[inline(always)]
fn below(view: &View<'_, Vma>, len: u64, lowest: u64, mut high: u64) -> Option<u64> {
    while let Some(Gap { start, end }) = view.gap(len, lowest, high) {
        let top = start + len;
        // If no VMA is near, no stack is.
        if end - top < STACK_GUARD
            && let Some(limit) = guard_below(view, top)
            && limit < top
        {
            high = limit;
        } else {
            return Some(start);
        }
    }
    None
}

/// The lowest free place at or above `low`.
#[cold]
fn above(view: &View<'_, Vma>, len: u64, mut low: u64) -> Option<u64> {
    while let Some(start) = view.gap_bottom_up(len, low, USER_END) {
        // One search for the stack: a second search may find another entry, or no entry.
        match near_above(view, start + len) {
            Some(near) if start + len > guarded_by(near) => low = near.end,
            _ => return Some(start),
        }
    }
    None
}

/// Returns whether `range` and the guard of a stack above are free.
pub(super) fn is_free(view: &View<'_, Vma>, range: VirtRange) -> bool {
    match view.find_below(range.start, range.end.saturating_add(STACK_GUARD)) {
        Some(entry) if entry.start < range.end => false,
        Some(_) => guard_below(view, range.end).is_none_or(|limit| range.end <= limit),
        None => true,
    }
}

/// The limit for mappings below the first VMA at or above `addr`; `None` if that VMA is too far up
/// to matter for a mapping up to `addr`.
#[inline(always)]
fn guard_below(view: &View<'_, Vma>, addr: u64) -> Option<u64> {
    near_above(view, addr).map(guarded_by)
}

/// The first VMA at or above `addr`, if the VMA is so near that the guard of a stack there would
/// cover the page below `addr`.
fn near_above<'s>(view: &View<'s, Vma>, addr: u64) -> Option<Found<'s, Vma>> {
    view.find_below(addr, addr.saturating_add(STACK_GUARD))
}

/// The limit for mappings below the VMA of `entry`.
fn guarded_by(entry: Found<'_, Vma>) -> u64 {
    entry.start.saturating_sub(if is_stack(entry) { STACK_GUARD } else { 0 })
}

/// Returns whether the VMA of `entry`, of a view, grows down, and so keeps a guard below.
pub(super) fn is_stack(entry: Found<'_, Vma>) -> bool {
    entry.get().flags().contains(VmaFlags::GROWSDOWN)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    const SPACE: SpaceId = SpaceId(7);

    /// Returns how many mappings a CPU makes apart after a meeting, and the state afterwards.
    fn stay(met: Apart) -> (u32, Apart) {
        let mut now = met;
        let mut count = 0;
        while let Some(next) = now.maps(4) {
            (now, count) = (next, count + 1);
        }
        (count, now)
    }

    #[test]
    fn each_meeting_after_a_return_doubles_the_stay() {
        let mut now = Apart::NOWHERE;
        let mut stays = Vec::new();
        for _ in 0..11 {
            let count;
            (count, now) = stay(now.met(SPACE));
            stays.push(count);
        }
        assert_eq!(stays, [4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]);
        // Another space has not seen the meeting.
        assert_eq!(stay(now.met(SpaceId(8))).0, 4);
    }

    #[test]
    fn a_meeting_in_the_region_does_not_double_the_stay() {
        let inside = Apart::NOWHERE.met(SPACE).maps(4).unwrap();
        assert_eq!(stay(inside.met(SPACE)).0, 4);
        assert!(Apart::NOWHERE.met(SPACE).maps(0).is_none(), "the knob is 0");
        assert!(inside.met(SPACE).maps(u32::MAX).is_some());
    }
}
