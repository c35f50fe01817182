//! The interface between the fault path and a prefault policy: the [`Predictor`] trait and its
//! types.
//!
//! A machine names its predictor ([`Machine::Predictor`](crate::Machine::Predictor)), so the fault
//! path calls it without indirection. [`Streams`](super::Streams) predicts from a thread's faults;
//! [`FixedWindow`](super::fixed::FixedWindow) maps an aligned block around every fault.
//!
//! The calls of one fault, in this order:
//!
//! 1. [`skips`](Predictor::skips), if the entries of the page and of the page [`beside`] it are
//!    empty. After `true` there are no further calls.
//! 2. [`known`](Predictor::known), [`to_check`](Predictor::to_check), and
//!    [`checked`](Predictor::checked) for each returned [`Check`]: which pages of earlier windows
//!    were used.
//! 3. [`predict`](Predictor::predict): the window.
//! 4. [`mapped`](Predictor::mapped): the pages of the window that were mapped. Not called if the
//!    fault was aborted.
//!
//! When a call of the thread unmaps pages, [`to_check_in`](Predictor::to_check_in) is called first,
//! because unmapping discards the accessed bits. When the thread leaves its space,
//! [`exit`](Predictor::exit) is called afterwards.

use super::history::BlockHistory;
use crate::machine::SpaceId;
use crate::table::format::INDEX_BITS;
use crate::table::protocol::lowest;
use core::fmt;
use core::ops::Range;

/// The largest order of a window: a whole table.
pub const MAX_ORDER: u8 = INDEX_BITS as u8;

/// A prefault policy: one value for each thread.
///
/// Its functions must not panic: the unwinding would leak the frame prepared by the fault.
pub trait Predictor: Sized + Send {
    /// The predictor of a thread that has not faulted.
    const NEW: Self;

    /// The state shared by the threads of a machine.
    type Defaults: Default + Send + Sync + fmt::Debug;

    /// The predictor's record of a window until the window is checked.
    type Record: Clone + fmt::Debug;

    /// Returns whether a fault on `page` of `space` is served without a prediction. Most faults of
    /// a random-access thread end here, so the function must be cheap.
    #[inline(always)]
    fn skips(&mut self, space: SpaceId, page: u64) -> bool {
        let _ = (space, page);
        false
    }

    /// Returns the window of at most `2^max_order` pages to map for `miss`; an order of 0 turns
    /// prefault off. A window that exceeds the reach of `miss`, or does not contain its page, is
    /// ignored. `look` returns the state of the entry of a page in reach. The first fault in a new
    /// space begins with `defaults`.
    fn predict(
        &mut self,
        miss: &Miss,
        max_order: u8,
        defaults: &Self::Defaults,
        look: impl Look,
    ) -> Window<Self::Record>;

    /// Reports that the pages in `mapped` are mapped, by this fault or before: all of `window`, or
    /// a part of it. For a read of a file these are the pages that were read, which may exceed the
    /// window, since a store reads whole blocks.
    fn mapped(&mut self, window: &Window<Self::Record>, mapped: Range<u64>);

    /// Returns the number of prefaulted pages of the next window [to check](Self::to_check), if the
    /// predictor already knows that all of them were used. The window then counts as checked.
    /// Windows of a space that the thread has left are not reported.
    #[inline(always)]
    fn known(&mut self, space: SpaceId) -> Option<u32> {
        let _ = space;
        None
    }

    /// Returns an earlier window to check before the next window is [mapped](Self::mapped).
    fn to_check(&mut self) -> Option<Check<Self::Record>>;

    /// Returns a window to check because pages in `range` of `space` are about to be unmapped.
    /// Called until it returns `None`.
    fn to_check_in(&mut self, space: SpaceId, range: &Range<u64>) -> Option<Check<Self::Record>>;

    /// Returns the kind of the fault of a window, and the range of pages that its check reads,
    /// which lie in one table.
    fn extent(record: &Self::Record) -> (Kind, Range<u64>);

    /// Learns from the entries of the pages of `check`, as returned by `look`: [`Seen::Empty`] if
    /// there is no table.
    fn checked(&mut self, check: &Check<Self::Record>, look: impl Look) -> Tally;

    /// The thread leaves its space, after a check of all windows [to check](Self::to_check_in)
    /// there: forgets everything except the information for other threads.
    fn exit(&mut self, defaults: &Self::Defaults);
}

/// Access to the entries of the pages in reach of a fault. Implemented by closures that return the
/// state of a page.
pub trait Look {
    /// Returns the state of the entry of `page`.
    fn at(&self, page: u64) -> Seen;

    /// Returns `true` if the entries of all `pages` have the state `seen` and this can be checked
    /// at once; `false` implies nothing. For policies that check many pages, which mostly have the
    /// same state.
    #[inline(always)]
    fn all(&self, pages: Range<u64>, seen: Seen) -> bool {
        let _ = (pages, seen);
        false
    }
}

impl<F: Fn(u64) -> Seen> Look for F {
    #[inline(always)]
    fn at(&self, page: u64) -> Seen {
        self(page)
    }
}

/// What a fault fills. Streams of one kind predict nothing about another kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A load from an untouched page: maps the zero page.
    Read,
    /// A store to an untouched page: maps a new page.
    Write,
    /// A store to a page that maps the zero page: maps a new page.
    Copy,
}

/// The state of the entry of a page near the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// A fault of this kind would fill the entry.
    Empty,
    /// The page was prefaulted, and its accessed bit is clear.
    Unused,
    /// The entry maps a page that was accessed, or cannot be filled (swapped out, busy).
    Used,
}

/// A fault that may be served with further pages. Pages are numbers: addresses divided by the page
/// size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Miss {
    /// The address space.
    pub space: SpaceId,
    /// The faulting page.
    pub page: u64,
    /// The kind of the fault.
    pub kind: Kind,
    /// The limits of the window: the part of the VMA that the table of `page` covers. Contains
    /// `page`.
    pub reach: Range<u64>,
    /// The access history of the page's block in previous mappings, or an empty history.
    pub history: BlockHistory,
}

/// The pages to map for one fault. `R` is the [record](Predictor::Record) of its predictor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window<R> {
    /// First to last page, in reach, including the faulting page.
    pages: Range<u64>,
    /// The distance between the pages of the window, starting with the first page. The window has
    /// at most `2^max_order` pages.
    stride: u8,
    /// Bit n: the window leaves out page n. Always 0 for the faulting page.
    holes: u64,
    record: Option<R>,
}

impl<R> Window<R> {
    /// Returns a window of the faulting page alone, from which the predictor learns nothing.
    #[inline]
    pub const fn single(page: u64) -> Self {
        Self { pages: page..page + 1, stride: 1, holes: 0, record: None }
    }

    /// Returns a window of every `stride`th page of `pages`, beginning with the first. The last of
    /// `pages` belongs to the window. A `stride` of 0 is 1.
    #[inline]
    pub const fn strided(pages: Range<u64>, stride: u8, record: R) -> Self {
        Self { pages, stride: if stride == 0 { 1 } else { stride }, holes: 0, record: Some(record) }
    }

    /// Returns a window of page `first + n` for each bit n of `pages`, which is not 0.
    #[inline]
    pub const fn masked(first: u64, pages: u64, record: Option<R>) -> Self {
        let (low, high) = (pages.trailing_zeros(), pages.ilog2());
        let span = first + low as u64..first + high as u64 + 1;
        Self { pages: span, stride: 1, holes: !(pages >> low), record }
    }

    /// Returns the predictor's record of the window.
    #[inline]
    pub const fn record(&self) -> Option<&R> {
        self.record.as_ref()
    }

    /// Returns the range from the first to the last page, including pages that the window leaves
    /// out.
    pub fn span(&self) -> Range<u64> {
        self.pages.clone()
    }

    /// Returns the pages to map, upwards, including the faulting page. Entries that are not empty
    /// stay unchanged.
    pub fn pages(&self) -> impl Iterator<Item = u64> + Clone + use<R> {
        let (start, holes) = (self.pages.start, self.holes);
        let meant = move |page: &u64| *page - start >= 64 || holes >> (page - start) & 1 == 0;
        self.pages.clone().step_by(self.stride()).filter(meant)
    }

    /// Returns the number of contiguous pages from `page` upwards, a page of the window, judged by
    /// the stride alone.
    pub(crate) fn run_from(&self, page: u64) -> u64 {
        if self.stride == 1 { self.pages.end - page } else { 1 }
    }

    /// Returns whether the window is valid for `miss`: the window lies in reach and contains the
    /// faulting page.
    #[inline]
    pub(crate) fn is_for(&self, miss: &Miss) -> bool {
        let Range { start, end } = self.pages;
        let at = miss.page.wrapping_sub(start);
        miss.reach.start <= start
            && end <= miss.reach.end
            && self.pages.contains(&miss.page)
            && (self.stride == 1 || at.is_multiple_of(self.stride.into()))
            && (at >= 64 || self.holes >> at & 1 == 0)
    }

    /// Returns the distance between the pages.
    #[inline]
    pub fn stride(&self) -> usize {
        self.stride.into()
    }

    /// Returns which of 64 pages are to be mapped: bit n is the nth page. The pages start with
    /// `first`, a page of the window, at a distance of [one stride](Self::stride).
    #[inline]
    pub fn among(&self, first: u64) -> u64 {
        let left = self.pages.end.saturating_sub(first);
        let left = if self.stride == 1 { left } else { left.div_ceil(self.stride.into()) };
        let before = (first - self.pages.start).min(64) as u32;
        lowest(left.min(64) as usize) & !self.holes.checked_shr(before).unwrap_or(0)
    }

    /// Returns whether the window contains only the faulting page.
    #[inline]
    pub fn is_single(&self) -> bool {
        self.pages.end - self.pages.start == 1
    }
}

/// A window whose pages' accessed bits are to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check<R> {
    /// The space of the window.
    pub space: SpaceId,
    /// The predictor's record of the window.
    pub record: R,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Prefaulted pages that were accessed.
    pub used: u32,
    /// Prefaulted pages that were not accessed.
    pub unused: u32,
}

/// Returns the page paired with `page`. The fault path reads its entry before it calls the
/// predictor. A sequential stream is visible there at every second page, and both entries lie in
/// one cache line.
#[inline(always)]
pub const fn beside(page: u64) -> u64 {
    page ^ 1
}
