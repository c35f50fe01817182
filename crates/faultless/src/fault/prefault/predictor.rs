//! What the fault path asks of a prefault policy: the [`Predictor`] trait, and the questions and answers.
//!
//! A machine names its predictor ([`Machine::Predictor`](crate::Machine::Predictor)), so the fault path calls it without indirection.
//! [`Streams`](super::Streams) predicts from a thread's faults; [`FixedWindow`](super::fixed::FixedWindow) maps an aligned block around
//! every fault.
//!
//! The calls of one fault, in this order:
//!
//! 1. [`skips`](Predictor::skips), if the entries of the page and of the page [`beside`] it are empty. `true` ends it here.
//! 2. [`known`](Predictor::known), [`to_check`](Predictor::to_check), and [`checked`](Predictor::checked) for each [`Check`] that it returns: which pages of earlier
//!    windows were used.
//! 3. [`predict`](Predictor::predict): the window.
//! 4. [`mapped`](Predictor::mapped): what was mapped of it. Not called if the fault was aborted.
//!
//! When a call of the thread unmaps pages, [`to_check_in`](Predictor::to_check_in) comes first, since their accessed bits go with
//! them; when the thread leaves its space, [`leave`](Predictor::leave) follows.

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
/// Its functions must not panic: the unwinding would lose the frame that the fault has prepared.
pub trait Predictor: Sized + Send {
    /// The predictor of a thread that has not faulted.
    const NEW: Self;

    /// What the threads of a machine learn from each other.
    type Defaults: Default + Send + Sync + fmt::Debug;

    /// What the predictor notes of a window until it is checked.
    type Record: Clone + fmt::Debug;

    /// Whether a fault on `page` of `space` is served without a prediction. Most faults of a random-access thread end here,
    /// so it must be cheap.
    #[inline(always)]
    fn skips(&mut self, space: SpaceId, page: u64) -> bool {
        let _ = (space, page);
        false
    }

    /// The window of at most `2^max_order` pages to map for `miss`; 0 is off. One that leaves the reach of `miss`, or leaves its
    /// page out, is ignored. `look` tells what the entry of a page in reach
    /// is. The first fault in a new space begins with `defaults`.
    fn predict(
        &mut self,
        miss: &Miss,
        max_order: u8,
        defaults: &Self::Defaults,
        look: impl Look,
    ) -> Window<Self::Record>;

    /// The pages in `mapped` were mapped, or mapped already: all of `window`, or less of it. For a read of a file these
    /// are the pages that were read, which may be more than the window, since a store reads whole blocks.
    fn mapped(&mut self, window: &Window<Self::Record>, mapped: Range<u64>);

    /// An earlier window that would be [to be checked](Self::to_check) now, were it not known already that all its pages were used: how
    /// many were prefaulted. It is checked then. Windows of a space that the thread has left are not told.
    #[inline(always)]
    fn known(&mut self, space: SpaceId) -> Option<u32> {
        let _ = space;
        None
    }

    /// An earlier window that is to be checked before the next one is [mapped](Self::mapped).
    fn to_check(&mut self) -> Option<Check<Self::Record>>;

    /// A window to check because pages in `range` of `space` are about to be unmapped. Called until there is none.
    fn to_check_in(&mut self, space: SpaceId, range: &Range<u64>) -> Option<Check<Self::Record>>;

    /// What the fault of a window filled, and the pages that its check looks at, which lie in one table.
    fn extent(record: &Self::Record) -> (Kind, Range<u64>);

    /// Learns from what `look` tells of the pages of `check`: [`Seen::Empty`] where there is no table.
    fn checked(&mut self, check: &Check<Self::Record>, look: impl Look) -> Tally;

    /// The thread leaves its space, and all that was [to be checked](Self::to_check_in) there has been: forgets
    /// everything, except what other threads may learn from it.
    fn leave(&mut self, defaults: &Self::Defaults);
}

/// What the entries of the pages in reach of a fault tell. A closure that tells it of each page is one.
pub trait Look {
    /// What the entry of `page` tells.
    fn at(&self, page: u64) -> Seen;

    /// Whether the entries of all `pages` are `seen` so, where that can be told at once; `false` tells nothing. For policies that ask
    /// about many pages, of which mostly all are the same.
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

/// What a fault fills. Streams of one kind predict nothing about another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A load from an untouched page: maps the zero page.
    Read,
    /// A store to an untouched page: maps a new page.
    Write,
    /// A store to a page that maps the zero page: maps a new page.
    Copy,
}

/// What the entry of a page near the fault tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// A fault of this kind there would fill it.
    Empty,
    /// It was prefaulted, and its accessed bit is clear.
    Unused,
    /// It maps a page that was accessed, or cannot be filled (swapped out, busy).
    Used,
}

/// A fault that may be served with more than its own page. Pages are numbers: addresses divided by
/// the page size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Miss {
    /// The address space.
    pub space: SpaceId,
    /// The page that faulted.
    pub page: u64,
    /// What is to be filled.
    pub kind: Kind,
    /// What the window must stay in; contains `page`: the part of the VMA that the page's table
    /// covers.
    pub reach: Range<u64>,
    /// The access history of the page's block in previous mappings, or nothing.
    pub history: BlockHistory,
}

/// The pages to map for one fault. `R` is the [record](Predictor::Record) of its predictor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window<R> {
    /// First to last, in reach, and among them the one that faulted.
    pages: Range<u64>,
    /// Every so many pages one is meant, from the first on: no more than `2^max_order`.
    stride: u8,
    /// Bit n: the window leaves page n out. Always 0 for the one that faulted.
    holes: u64,
    record: Option<R>,
}

impl<R> Window<R> {
    /// The page that faulted and no other; nothing is to be learned from it.
    #[inline]
    pub const fn single(page: u64) -> Self {
        Self { pages: page..page + 1, stride: 1, holes: 0, record: None }
    }

    /// Every `stride`th page of `pages`, from the first on. The last of `pages` is one of them. A `stride` of 0 is 1.
    #[inline]
    pub const fn strided(pages: Range<u64>, stride: u8, record: R) -> Self {
        Self { pages, stride: if stride == 0 { 1 } else { stride }, holes: 0, record: Some(record) }
    }

    /// Page `first + n` for each bit n of `pages`, which are not 0.
    #[inline]
    pub const fn masked(first: u64, pages: u64, record: Option<R>) -> Self {
        let (low, high) = (pages.trailing_zeros(), pages.ilog2());
        let span = first + low as u64..first + high as u64 + 1;
        Self { pages: span, stride: 1, holes: !(pages >> low), record }
    }

    /// What the predictor noted of it.
    #[inline]
    pub const fn record(&self) -> Option<&R> {
        self.record.as_ref()
    }

    /// First to last page, those that are left out included.
    pub fn span(&self) -> Range<u64> {
        self.pages.clone()
    }

    /// The pages to map, upwards, the one that faulted among them. Entries that are not empty are to
    /// be left alone.
    pub fn pages(&self) -> impl Iterator<Item = u64> + Clone + use<R> {
        let (start, holes) = (self.pages.start, self.holes);
        let meant = move |page: &u64| *page - start >= 64 || holes >> (page - start) & 1 == 0;
        self.pages.clone().step_by(self.stride()).filter(meant)
    }

    /// How many pages without a gap it has from `page` on, one of its pages, as far as its stride tells.
    pub(crate) fn run_from(&self, page: u64) -> u64 {
        if self.stride == 1 { self.pages.end - page } else { 1 }
    }

    /// Whether it is a window for `miss`: it lies in reach, and the page that faulted is one of its pages.
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

    /// How far they are apart.
    #[inline]
    pub fn stride(&self) -> usize {
        self.stride.into()
    }

    /// Which of 64 pages, each [a stride](Self::stride) from the one before and `first` the first of them and one
    /// of the window's, are to be mapped: bit n is the nth.
    #[inline]
    pub fn among(&self, first: u64) -> u64 {
        let left = self.pages.end.saturating_sub(first);
        let left = if self.stride == 1 { left } else { left.div_ceil(self.stride.into()) };
        let before = (first - self.pages.start).min(64) as u32;
        lowest(left.min(64) as usize) & !self.holes.checked_shr(before).unwrap_or(0)
    }

    /// Whether it holds the page that faulted only.
    #[inline]
    pub fn is_single(&self) -> bool {
        self.pages.end - self.pages.start == 1
    }
}

/// A window whose pages' accessed bits are to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check<R> {
    /// The space that it is in.
    pub space: SpaceId,
    /// What the predictor noted of it.
    pub record: R,
}

/// What a check found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Prefaulted pages that were accessed.
    pub used: u32,
    /// Prefaulted pages that were not.
    pub unused: u32,
}

/// The page beside `page`. The fault path looks at its entry before it asks for a prediction: a sequential stream is
/// seen there at every other page, and the entries of both lie in one cache line.
#[inline(always)]
pub const fn beside(page: u64) -> u64 {
    page ^ 1
}
