//! Which pages to map beside the one that faulted: policy only, one [`Streams`] a thread.
//!
//! The page table itself is the memory of what was touched: a run of used pages that ends at the
//! faulting page says where a stream comes from and how long it has been, for any number of
//! streams. So a window is as long as the run beside it, which makes windows of 1, 2, 4, 8, … pages.

use crate::machine::SpaceId;
use core::ops::Range;

/// Windows that wait to be audited.
const PAST: usize = 8;

/// What a fault is to fill. Streams of one kind say nothing about another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A load from memory never touched: gets the page of zeros.
    Read,
    /// A store to memory never touched: gets a fresh page.
    Write,
    /// A store to a page that shows the page of zeros: gets a fresh page.
    Copy,
}

/// What the entry of a page near the fault tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// A fault of this kind there would fill it.
    Empty,
    /// It was mapped ahead, and its accessed bit is clear.
    Unused,
    /// It maps a page that was accessed, or cannot be filled (swapped out, busy, a hole).
    Used,
}

/// A fault that may be served with more than its own page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Miss {
    /// The address space.
    pub space: SpaceId,
    /// The page's number (its address divided by the page size).
    pub page: u64,
    /// What is to be filled.
    pub kind: Kind,
    /// The page numbers that the window must stay in; contains `page`: the part of the VMA that the
    /// page's table covers.
    pub reach: Range<u64>,
}

/// What to map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Page numbers, in reach, among them the one that faulted. Entries in it that are not empty
    /// stay as they are.
    pub pages: Range<u64>,
    /// To be handed back to [`Streams::mapped`].
    pub stream: u8,
}

/// Pages whose accessed bits are to be looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audit {
    /// The space they were mapped in.
    pub space: SpaceId,
    /// Page numbers; all in one table.
    pub pages: Range<u64>,
    /// To be handed back to [`Streams::audited`].
    pub stream: u8,
}

/// One thread's view of its streams of page faults.
#[derive(Clone, Debug)]
pub struct Streams {
    space: SpaceId,
    past: [Range<u64>; PAST],
    next: u8,
}

impl Default for Streams {
    fn default() -> Self {
        Self::new()
    }
}

impl Streams {
    /// Of a thread that has not faulted.
    pub const fn new() -> Self {
        Self { space: SpaceId(u64::MAX), past: [const { 0..0 }; PAST], next: 0 }
    }

    /// Forgets everything: the thread has a new space, or its space is a fresh copy.
    pub fn reset(&mut self) {
        *self = Self::new();
    }

    /// The window of at most `2^max_order` pages to map for `miss`. `look` tells what the entry of a
    /// page is; it is asked only for pages in the miss's reach, other than the faulting one.
    pub fn predict(
        &mut self,
        miss: &Miss,
        max_order: u8,
        mut look: impl FnMut(u64) -> Seen,
    ) -> Window {
        let page = miss.page;
        if self.space != miss.space {
            *self = Self { space: miss.space, ..Self::new() };
        }
        let most = 1u64 << max_order.min(9);
        let (low, high) = (miss.reach.start, miss.reach.end);
        let mut used = |page| look(page) == Seen::Used;
        let below = (1..most).take_while(|n| page - low >= *n && used(page - n)).count() as u64;
        let above = (1..most).take_while(|n| high - page > *n && used(page + n)).count() as u64;
        let pages = if below >= above {
            page..page + (below + 1).min(high - page)
        } else {
            page - above.min(page - low)..page + 1
        };
        Window { pages, stream: self.next }
    }

    /// Of `window`, the pages `mapped` were really mapped.
    pub fn mapped(&mut self, window: &Window, mapped: Range<u64>) {
        self.next = (window.stream + 1) % PAST as u8;
        self.past[window.stream as usize % PAST] = mapped;
    }

    /// The pages mapped ahead whose use is to be counted now, before [`mapped`](Self::mapped)
    /// forgets them.
    pub fn to_audit(&mut self, window: &Window) -> Option<Audit> {
        let pages = core::mem::replace(&mut self.past[window.stream as usize % PAST], 0..0);
        let ahead = !pages.is_empty() && pages.end - pages.start > 1;
        ahead.then_some(Audit { space: self.space, pages, stream: window.stream })
    }

    /// Of the pages of an audit, so many were used and so many were not.
    pub fn audited(&mut self, _audit: &Audit, _used: u32, _unused: u32) {}
}
