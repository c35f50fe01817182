//! The location of a case: a space of its own, or an *arena* of a space shared with other cases.
//!
//! An arena consists of a few ranges around the pages named by cases. The mappings there belong to
//! the case alone, and only they are judged. Mappings placed elsewhere are found from the return
//! values of the calls.

use super::op::{APART, BOUNDARY, LEAF, Span, TOP, WINDOW};
use super::place::Base;
use super::table::Kind;
use faultless::{PAGE_SIZE, USER_END, VirtRange};
use std::ops::RangeInclusive;

/// The powers of two whose multiples are boundaries of windows: from the span of a last-level page
/// table to the largest power with a multiple between the start of placement and the regions of
/// CPUs.
pub const POWERS: RangeInclusive<u32> = 21..=34;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arena {
    /// The address of page 0.
    base: u64,
    shared: Option<Share>,
}

/// The part of a shared space that belongs to a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    /// The number of pages on each side of the named pages.
    margin: i64,
    heap: bool,
    mark: u8,
}

impl Arena {
    /// A space of its own, whose window has an odd multiple of 2^`power` as its boundary: the
    /// highest below the start of placement. Placed mappings go above the window, or to a hole
    /// below a [roof](Self::roof).
    pub const fn whole(power: u32) -> Self {
        let odd = ((TOP >> power) - 1) | 1;
        Self { base: (odd << power) - BOUNDARY as u64 * PAGE_SIZE, shared: None }
    }

    /// An arena of a shared space. `boundary` is the address in the middle of its window, a
    /// multiple of 2 MiB. The arena has `margin` pages on both sides of the window, and on both
    /// sides of the source and target of moves. One case of a space has the heap. The few numbers
    /// from `mark` on belong to no other arena.
    pub const fn at(boundary: u64, margin: i64, heap: bool, mark: u8) -> Self {
        let base = boundary - BOUNDARY as u64 * PAGE_SIZE;
        Self { base, shared: Some(Share { margin, heap, mark }) }
    }

    /// Returns whether the space, and the settings of the whole machine, belong to the case alone.
    pub fn is_whole(&self) -> bool {
        self.shared.is_none()
    }

    pub fn has_heap(&self) -> bool {
        self.shared.is_none_or(|share| share.heap)
    }

    /// Returns numbers of no other arena. Each number has one byte, the possible size of a file's
    /// last page.
    pub fn marks(&self) -> impl Iterator<Item = u64> {
        let first = self.shared.map_or(0, |share| share.mark);
        (0..=u8::MAX).map(move |number| u64::from(first.wrapping_add(number)))
    }

    /// Returns whether the arena supports operations of `kind`.
    pub fn admits(&self, kind: Kind) -> bool {
        match kind {
            Kind::BrkGrow | Kind::BrkShrink => self.has_heap(),
            Kind::Collapse => self.has_leaf(),
            _ => true,
        }
    }

    /// Returns whether the arena supports the starting state `base`.
    pub fn admits_base(&self, base: Base) -> bool {
        match base {
            // All share how many VMAs there may be.
            Base::Full => self.is_whole(),
            Base::Text => self.has_leaf(),
            _ => true,
        }
    }

    /// Returns whether a huge leaf fits next to the window.
    fn has_leaf(&self) -> bool {
        self.shared.is_none_or(|share| share.margin > LEAF.pages)
    }

    /// The address of a page.
    pub fn addr(&self, page: i64) -> u64 {
        self.base.wrapping_add_signed(page * PAGE_SIZE as i64)
    }

    /// The page at an address.
    pub fn page(&self, addr: u64) -> i64 {
        addr.wrapping_sub(self.base) as i64 / PAGE_SIZE as i64
    }

    pub fn range(&self, span: Span) -> VirtRange {
        VirtRange::new(self.addr(span.at), self.addr(span.end()))
    }

    /// Returns all ranges in which cases may have mappings.
    pub fn parts(&self) -> Vec<VirtRange> {
        let Some(Share { margin, .. }) = self.shared else {
            return vec![VirtRange::new(0x1_0000, USER_END)];
        };
        let around = |at| self.range(Span::new(at - margin, WINDOW + 2 * margin));
        [0, APART[0], APART[1]].map(around).into()
    }

    /// Returns the last page of each part, which must be mapped: otherwise, an access to a hole of
    /// this arena could grow a stack of the next arena.
    pub fn fences(&self) -> Vec<VirtRange> {
        if self.is_whole() {
            return Vec::new();
        }
        let last = |part: VirtRange| VirtRange::page(part.end - PAGE_SIZE);
        self.parts().into_iter().map(last).collect()
    }

    /// Returns whether an address belongs to the arena.
    pub fn has(&self, addr: u64) -> bool {
        self.parts().iter().any(|part| (part.start..part.end).contains(&addr))
    }

    /// How far a roof from `at` on goes: in a whole space to where placement starts.
    pub fn roof(&self, at: i64) -> Span {
        let pages = if self.is_whole() { self.page(TOP) - at } else { 2 * WINDOW };
        Span::new(at, pages)
    }
}
