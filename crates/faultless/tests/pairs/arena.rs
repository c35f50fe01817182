//! Where a case is: in a space of its own, or in an *arena* of a space that other cases share.
//!
//! An arena is a few ranges around the pages that cases name. What is mapped there is the case's alone, and all that is judged of it; what
//! placement puts elsewhere is found by what a call returned.

use super::op::{APART, BASE, BOUNDARY, LEAF, Span, TOP_PAGE, WINDOW};
use super::place::Base;
use super::table::Kind;
use faultless::{PAGE_SIZE, USER_END, VirtRange};

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arena {
    /// The address of page 0.
    base: u64,
    shared: Option<Share>,
}

/// What a case has of a space that others share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    /// Pages on both sides of those that cases name.
    margin: i64,
    heap: bool,
    mark: u8,
}

impl Arena {
    /// A space of its own: what is placed goes right above the window.
    pub const WHOLE: Self = Self { base: BASE, shared: None };

    /// One of a space that others share, `boundary` being the address, a multiple of 2 MiB, in the middle of its window. It has `margin` pages
    /// on both sides of the window, and on both sides of where moves come from and go to. One case of a space has the heap. From `mark`
    /// on are a few numbers that no other arena has.
    pub const fn at(boundary: u64, margin: i64, heap: bool, mark: u8) -> Self {
        let base = boundary - BOUNDARY as u64 * PAGE_SIZE;
        Self { base, shared: Some(Share { margin, heap, mark }) }
    }

    /// Whether the space, and what is set for the whole machine, is the case's alone.
    pub fn is_whole(&self) -> bool {
        self.shared.is_none()
    }

    pub fn has_heap(&self) -> bool {
        self.shared.is_none_or(|share| share.heap)
    }

    /// Numbers that no other arena has. They are of one byte, which is what a file may have of its last page.
    pub fn marks(&self) -> impl Iterator<Item = u64> {
        let first = self.shared.map_or(0, |share| share.mark);
        (0..=u8::MAX).map(move |number| u64::from(first.wrapping_add(number)))
    }

    /// Whether it has what such an operation is about.
    pub fn admits(&self, kind: Kind) -> bool {
        match kind {
            Kind::BrkGrow | Kind::BrkShrink => self.has_heap(),
            Kind::Collapse => self.has_leaf(),
            _ => true,
        }
    }

    /// Whether it may be in such a starting state.
    pub fn admits_base(&self, base: Base) -> bool {
        match base {
            // All share how many VMAs there may be.
            Base::Full => self.is_whole(),
            Base::Text => self.has_leaf(),
            _ => true,
        }
    }

    /// Whether a huge leaf fits beside the window.
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

    /// All that cases may have mapped in it.
    pub fn parts(&self) -> Vec<VirtRange> {
        let Some(Share { margin, .. }) = self.shared else {
            return vec![VirtRange::new(0x1_0000, USER_END)];
        };
        let around = |at| self.range(Span::new(at - margin, WINDOW + 2 * margin));
        [0, APART[0], APART[1]].map(around).into()
    }

    /// The last page of each part, where something is mapped: else an access to a hole of this arena could grow a stack of the next.
    pub fn fences(&self) -> Vec<VirtRange> {
        if self.is_whole() {
            return Vec::new();
        }
        let last = |part: VirtRange| VirtRange::page(part.end - PAGE_SIZE);
        self.parts().into_iter().map(last).collect()
    }

    /// Whether an address is in it.
    pub fn has(&self, addr: u64) -> bool {
        self.parts().iter().any(|part| (part.start..part.end).contains(&addr))
    }

    /// How far a roof from `at` on goes: in a whole space to where placement starts.
    pub fn roof(&self, at: i64) -> Span {
        let pages = if self.is_whole() { TOP_PAGE - at } else { 2 * WINDOW };
        Span::new(at, pages)
    }
}
