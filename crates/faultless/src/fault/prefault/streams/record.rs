//! Windows that were mapped, and the direction and stride of their stream: arithmetic of page
//! numbers.

use super::{Kind, Look, MAX_ORDER, Seen};
use core::ops::Range;

/// The step of a stream from one page to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) down: bool,
    /// In pages, from 1 to [`STRIDE`](super::STRIDE).
    pub(super) stride: u8,
}

impl Way {
    pub(super) const UP: Self = Self { down: false, stride: 1 };
    pub(super) const DOWN: Self = Self { down: true, stride: 1 };

    /// Returns the page `steps` steps after `page`; on overflow, some distant page.
    #[inline(always)]
    pub(super) fn on(self, page: u64, steps: u64) -> u64 {
        let stride = u64::from(self.stride);
        let step = if self.down { stride.wrapping_neg() } else { stride };
        page.wrapping_add(steps.wrapping_mul(step))
    }

    /// Returns the pages at `steps` from `page` within `reach`; `page` itself is in reach.
    #[inline(always)]
    pub(super) fn pages(
        self,
        page: u64,
        steps: Range<u64>,
        reach: &Range<u64>,
    ) -> impl Iterator<Item = u64> + use<> {
        let room = if self.down { page - reach.start } else { reach.end - 1 - page };
        let last = if self.stride > 1 { room / u64::from(self.stride) } else { room };
        (steps.start..steps.end.min(last + 1)).map(move |step| self.on(page, step))
    }

    /// Returns the number of consecutive pages at `steps` from `page`, from the first step, whose
    /// state is `seen`.
    #[inline(always)]
    pub(super) fn row(
        self,
        page: u64,
        steps: Range<u64>,
        reach: &Range<u64>,
        look: &impl Look,
        seen: Seen,
    ) -> u64 {
        let pages = self.pages(page, steps.clone(), reach);
        let length = pages.size_hint().0 as u64;
        if self.are_all(page, steps.start..steps.start + length, look, seen) {
            return length;
        }
        pages.take_while(|page| look.at(*page) == seen).count() as u64
    }

    /// Returns `true` if all pages at `steps` from `page` have the state `seen` and this can be
    /// checked at once.
    #[inline(always)]
    pub(super) fn are_all(
        self,
        page: u64,
        steps: Range<u64>,
        look: &impl Look,
        seen: Seen,
    ) -> bool {
        let (near, behind) = (self.on(page, steps.start), self.on(page, steps.end));
        let pages =
            if self.down { behind.wrapping_add(1)..near.wrapping_add(1) } else { near..behind };
        self.stride == 1 && look.all(pages, seen)
    }

    pub(super) fn back(self) -> Self {
        Self { down: !self.down, ..self }
    }

    /// The index of the widths for this direction and stride.
    pub(super) fn side(self) -> usize {
        if self.stride > 1 { 2 } else { self.down.into() }
    }
}

/// A window that was mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The faulting page.
    pub(super) page: u64,
    /// The number of pages mapped from `page`, in the direction of the stream.
    pub(super) mapped: u16,
    /// The end of the pages that a wider window would have had.
    pub(super) end: u16,
    /// The run that the window continued, including the window.
    pub(super) run: u16,
    pub(super) kind: Kind,
    pub(super) class: u8,
    pub(super) way: Way,
    /// The whole window was found used, and credited.
    pub(super) credited: bool,
    /// More pages were mapped than the predictor expected.
    pub(super) resized: bool,
}

impl Record {
    pub(super) const NONE: Self = Self {
        page: 0,
        mapped: 0,
        end: 0,
        run: 0,
        kind: Kind::Read,
        class: 0,
        way: Way::UP,
        credited: false,
        resized: false,
    };

    /// Returns the pages at `steps` from the faulting page.
    pub(super) fn at(&self, steps: Range<u16>) -> impl Iterator<Item = u64> + Clone + use<> {
        let (page, way) = (self.page, self.way);
        steps.map(move |step| way.on(page, step.into()))
    }

    /// Returns the range from the first to the last of `pages` pages.
    pub(super) fn span(&self, pages: u16) -> Range<u64> {
        let far = self.way.on(self.page, u64::from(pages.max(1)) - 1);
        self.page.min(far)..self.page.max(far) + 1
    }

    /// Sets the number of pages that were mapped. A store that reads whole blocks may have read
    /// more pages than the window has.
    #[cold]
    pub(super) fn resize(&mut self, pages: u16) {
        let run = self.run - self.mapped + pages;
        self.run = run.min(1 << MAX_ORDER);
        self.resized = pages > self.mapped;
        self.end = if self.resized { self.end.max(pages) } else { pages };
        self.mapped = pages;
    }

    /// Returns whether the window continued no stream.
    pub(super) const fn starts_stream(&self) -> bool {
        self.run == self.mapped
    }

    /// Returns whether the window is a single page that continued no stream, or an empty record.
    pub(super) const fn is_alone(&self) -> bool {
        self.run < 2
    }

    /// Returns the page at which the stream continues.
    pub(super) fn leads_to(&self) -> u64 {
        self.way.on(self.page, self.mapped.into())
    }
}
