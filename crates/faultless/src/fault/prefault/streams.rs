//! Which pages to map beside the one that faulted: policy only, one [`Streams`] a thread.
//!
//! # History
//!
//! The page table records which pages were touched, for any number of interleaved streams, and it
//! drops the record of unmapped pages. The run of used pages that ends at the faulting page gives
//! the direction of a stream and its length. The policy uses only the length of the run, in
//! classes of 0, 1, 2–3, 4–7, 8–15 and more pages, upwards and downwards. An unused prefaulted page
//! ends a run, so a stream whose pages were not used starts again.
//!
//! If no neighbour was used, the stream may be strided: if the nearest used page on one side is
//! the first of [`LATTICE`] or more at a constant distance, that distance is the stride,
//! and the run, the window and the audit of the stream are in strides.
//!
//! # Width
//!
//! The policy learns how far streams of a class continue: each class has a width, by kind of fault and
//! by direction; strided streams have their own. A class begins as wide as its run, which makes windows of 1, 2, 4, 8, … pages. Some
//! faults later an audit reads the accessed bits of the window, and of as many pages beyond it: if all
//! were used the class widens, else it shrinks at once to the width that would have been right. If a thread
//! faults just beyond a window that was used completely, that is known without waiting, and the run
//! continues, also from the previous table.
//!
//! A new thread begins with the predictor defaults in [`Habits`].
//!
//! # Credit
//!
//! Every page that is found used earns one page of credit, and every unused prefaulted page
//! costs [`PRICE`], as far as there is credit. A window may have as many pages as there is credit for, and half
//! the run that it continues; a fault that a window would have saved also earns credit. So a thread
//! with sparse accesses prefaults nothing. While a thread finds no used page beside its faults, prediction runs
//! more and more rarely: it is skipped for the other faults, except for a fault where the last stream continues.
//!
//! # Previous mappings
//!
//! If the space's [`Footprints`](super::Footprints) have an access history for a page, the prediction for it
//! uses only that history.

use super::habits::{AS_LONG_AS_THE_RUN, CLASSES, HALVES, Habits, Widths};
use super::past::{BLOCK, Past};
use crate::machine::SpaceId;
use crate::table::format::INDEX_BITS;
use core::ops::Range;
use record::{Record, Way};

/// Windows that wait for their audit. Enough that a stream among several has time to continue.
const WAITING: usize = 32;
/// Single pages that continue no stream wait for less, so that a random-access thread is detected soon.
const HOPING: usize = 8;
/// No page.
const NOWHERE: u64 = u64::MAX;
/// Credit that an unused prefaulted page costs: how many used pages make up for it.
const PRICE: u32 = 12;
/// The farthest that the pages of a strided stream may be apart.
const STRIDE: u64 = 32;
/// How many pages distinguish a strided stream from chance, the faulting one left out.
const LATTICE: u64 = 6;
/// The longest run that is distinguished from longer ones.
const RUN: u64 = 16;
/// The largest order of a window: a whole table.
pub const MAX_ORDER: u8 = INDEX_BITS as u8;
/// A thread that skips prediction for more faults without history than this has long been a random-access thread.
const DISORDER: u8 = 64;
/// For so many faults no stride is searched after a search that found none; for fewer, where prediction is mostly skipped.
const REST: u8 = 7;

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
    /// What the space's [`Footprints`](super::Footprints) recall of the page's block, or nothing.
    pub past: Past,
}

/// What to map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// First to last, in reach, and among them the one that faulted.
    pages: Range<u64>,
    /// Every so many pages one is meant, from the first on: no more than `2^max_order`.
    stride: u8,
    /// Bit n: the window leaves page n out. Always 0 for the one that faulted.
    holes: u64,
    /// To be audited some time.
    record: Option<Record>,
}

impl Window {
    /// The page that faulted and no other; nothing is to be learned from it.
    #[inline]
    pub const fn single(page: u64) -> Self {
        Self { pages: page..page + 1, stride: 1, holes: 0, record: None }
    }

    /// First to last page, those that are left out included.
    pub fn span(&self) -> Range<u64> {
        self.pages.clone()
    }

    /// The pages to map, upwards, the one that faulted among them. Entries that are not empty are to
    /// be left alone.
    pub fn pages(&self) -> impl Iterator<Item = u64> + Clone + use<> {
        let (start, holes) = (self.pages.start, self.holes);
        let meant = move |page: &u64| *page - start >= 64 || holes >> (page - start) & 1 == 0;
        self.pages.clone().step_by(self.stride()).filter(meant)
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
        let left = self.pages.end.saturating_sub(first).div_ceil(self.stride.into());
        let before = (first - self.pages.start).min(64) as u32;
        lowest(left.min(64) as u32) & !self.holes.checked_shr(before).unwrap_or(0)
    }

    /// Whether it holds the page that faulted only.
    #[inline]
    pub fn is_single(&self) -> bool {
        self.pages.end - self.pages.start == 1
    }
}

/// Pages whose accessed bits are to be looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audit {
    /// The space that they are in.
    pub space: SpaceId,
    record: Record,
}

impl Audit {
    /// What the faults were about that it is of.
    pub fn kind(&self) -> Kind {
        self.record.kind
    }

    /// Those that will be asked about lie in here: in one table.
    pub fn pages(&self) -> Range<u64> {
        self.record.span(self.record.end)
    }
}

/// What an audit found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Prefaulted pages that were accessed.
    pub used: u32,
    /// Prefaulted pages that were not.
    pub unused: u32,
}

/// Where the thread is, and which of its faults there are let pass. Together, as nothing else is read for those.
#[derive(Clone, Copy, Debug)]
struct Here {
    space: SpaceId,
    /// Faults without evidence that are still let pass.
    passes: u8,
    /// But not one here: where the last stream goes on.
    goes_on: u64,
}

/// One thread's view of its streams of page faults.
#[derive(Clone, Debug)]
pub struct Streams {
    here: Here,
    /// By kind, [`Way::side`] and class.
    widths: Widths,
    /// Those that it began with.
    begun: Widths,
    /// Pages that may be risked, times [`PRICE`].
    credit: u32,
    /// Oldest first from `first` on.
    waiting: [Record; WAITING],
    /// Where each of them goes on, or [`NOWHERE`]: apart, as all are looked through for each fault.
    leads: [u64; WAITING],
    first: u8,
    len: u8,
    /// How many are let pass next, between two that are looked at.
    patience: u8,
    /// Faults that are still not looked at for strides.
    rest: u8,
}

impl Default for Streams {
    fn default() -> Self {
        Self::new()
    }
}

impl Streams {
    /// Of a thread that has not faulted.
    pub const fn new() -> Self {
        Self {
            here: Here { space: SpaceId(u64::MAX), passes: 0, goes_on: NOWHERE },
            widths: AS_LONG_AS_THE_RUN,
            begun: AS_LONG_AS_THE_RUN,
            credit: 0,
            waiting: [Record::NONE; WAITING],
            leads: [NOWHERE; WAITING],
            first: 0,
            len: 0,
            patience: 0,
            rest: 0,
        }
    }

    /// The thread leaves its space, and all that was [to be audited](Self::to_audit_in) there has been:
    /// forgets everything, but for what others may learn from it.
    pub fn leave(&mut self, habits: &Habits) {
        habits.learn(&self.begun, &self.widths);
        self.reset();
    }

    /// Forgets everything: the thread is in a copy of its parent's space, or its parent in what was copied.
    pub fn reset(&mut self) {
        *self = Self::new();
    }

    /// The window of at most `2^max_order` pages to map for `miss`; 0 is off. A thread new in its space begins with
    /// `habits`; `look` tells what the entry of a page in reach is.
    #[inline]
    pub fn predict(
        &mut self,
        miss: &Miss,
        max_order: u8,
        habits: &Habits,
        mut look: impl FnMut(u64) -> Seen,
    ) -> Window {
        let page = miss.page;
        let single = Window::single(page);
        if max_order == 0 {
            return single;
        }
        if self.here.space != miss.space {
            let widths = habits.begin();
            let here = Here { space: miss.space, ..Self::new().here };
            *self = Self { here, widths, begun: widths, ..Self::new() };
        }
        let most = 1 << max_order.min(MAX_ORDER);
        // Beyond the reach is nothing to map, and no run.
        let reach = &miss.reach;
        let below = (page > reach.start).then(|| look(page - 1));
        let above = (page + 1 < reach.end).then(|| look(page + 1));
        let (neighbour, next) = if beside(page) < page {
            (below, page.wrapping_sub(2))
        } else {
            (above, page.wrapping_add(2))
        };
        let mut used = |page| reach.contains(&page) && look(page) == Seen::Used;
        // Of a thread that has long touched memory in no order, one page is chance, and two are a stream.
        let told = neighbour == Some(Seen::Used) && (self.patience <= DISORDER || used(next));
        if !told && self.lets_pass(miss.space, page) {
            return single;
        }
        if miss.past.known >> (page % BLOCK) & 1 == 1 {
            return again(miss, most, look);
        }
        self.choose(miss, most, below, above, look).unwrap_or(single)
    }

    /// Whether a fault on `page` of `space` without evidence is let pass: then this is all that there is to do
    /// about it. Who finds out by itself that there is none is spared to [`predict`](Self::predict).
    #[inline(always)]
    pub fn lets_pass(&mut self, space: SpaceId, page: u64) -> bool {
        let here = &mut self.here;
        if here.passes == 0 || here.space != space || here.goes_on == page {
            return false;
        }
        here.passes -= 1;
        true
    }

    /// The window for a page of which nothing is remembered.
    fn choose(
        &mut self,
        miss: &Miss,
        most: u64,
        below: Option<Seen>,
        above: Option<Seen>,
        mut look: impl FnMut(u64) -> Seen,
    ) -> Option<Window> {
        let (page, reach) = (miss.page, &miss.reach);
        // Up has its run below.
        let behind = [below, above].map(|neighbour| neighbour == Some(Seen::Used));
        let mut runs = [0, 0];
        if (behind != [false, false] || page == reach.start || page + 1 == reach.end)
            && let Some((way, run)) = self.goes_on(page, reach, &mut look)
            && way.stride == 1
        {
            runs[way.side()] = run;
        }
        for way in [Way::UP, Way::DOWN] {
            let run = &mut runs[way.side()];
            // What goes on has been counted as far as it is told.
            if behind[way.side()] && *run < RUN {
                *run = run_behind(way, page, reach, &mut look).max(*run);
            }
        }
        let widths = self.widths[miss.kind as usize];
        // Streams that begin here have mostly been short: it may be one that leaves pages out.
        if runs == [0, 0]
            && widths[0][0].max(widths[1][0]) < HALVES
            && let Some((way, run)) = self.strided(page, reach, &mut look)
        {
            return Some(self.along(way, run, miss, most, look));
        }
        let open = [above == Some(Seen::Empty), below == Some(Seen::Empty)];
        let way = match open {
            [false, false] => return None,
            [true, false] => Way::UP,
            [false, true] => Way::DOWN,
            [true, true] if runs[0] > runs[1] => Way::UP,
            [true, true] if runs[0] < runs[1] => Way::DOWN,
            [true, true] if widths[1][class(runs[1])] > widths[0][class(runs[0])] => Way::DOWN,
            [true, true] => Way::UP,
        };
        Some(self.along(way, runs[way.side()], miss, most, look))
    }

    /// The way and the run of the stream that leaves pages out and now faults at `page`.
    fn strided(
        &mut self,
        page: u64,
        reach: &Range<u64>,
        look: &mut impl FnMut(u64) -> Seen,
    ) -> Option<(Way, u64)> {
        if self.rest > 0 {
            self.rest -= 1;
            return None;
        }
        // It may have a longer run than is looked at, and come from the table before.
        let known = self.goes_on(page, reach, &mut *look).filter(|(way, _)| way.stride > 1);
        let mut behind = |way: Way| {
            let mut beside = way.back().pages(page, 2..STRIDE + 1, reach);
            let stride = 2 + beside.position(|page| look(page) == Seen::Used)? as u8;
            let way = Way { stride, ..way };
            let run = run_behind(way, page, reach, look);
            (run >= LATTICE).then_some((way, run))
        };
        let found = known.or_else(|| {
            let found = [behind(Way::UP), behind(Way::DOWN)].into_iter().flatten();
            found.max_by_key(|(_, run)| *run)
        });
        self.rest = if found.is_none() { REST.saturating_sub(self.patience) } else { 0 };
        found
    }

    /// The window of a stream with such a run.
    fn along(
        &self,
        way: Way,
        run: u64,
        miss: &Miss,
        most: u64,
        mut look: impl FnMut(u64) -> Seen,
    ) -> Window {
        let (page, reach) = (miss.page, &miss.reach);
        let class = class(run);
        let width = self.widths[miss.kind as usize][way.side()][class];
        let wide = (1u64 << (width / HALVES)).min(most);
        let mut pages = wide;
        let risk = u64::from(self.credit / PRICE) + run / 2;
        while pages - 1 > risk {
            pages /= 2;
        }
        if pages == most && way == Way::UP {
            // At full width end where a multiple of it does, or each table would take one window more.
            pages -= page & (pages - 1);
        } else if pages == most && way == Way::DOWN {
            pages = (page & (pages - 1)) + 1;
        }
        let mut free = |steps| {
            let pages = way.pages(page, steps, reach);
            pages.take_while(|page| look(*page) == Seen::Empty).count() as u64
        };
        let mapped = 1 + free(1..pages);
        let mut end = mapped;
        if mapped == pages && pages < most {
            end += free(mapped..2 * wide.min(most / 2).max(pages));
        }
        let record = Record {
            page,
            mapped: mapped as u16,
            end: end as u16,
            run: (run + mapped).min(1 << MAX_ORDER) as u16,
            kind: miss.kind,
            class: class as u8,
            way,
            paid: false,
        };
        let pages = record.span(record.mapped);
        Window { pages, stride: way.stride, holes: 0, record: Some(record) }
    }

    /// Looks for the window that `page` continues. If all of it was used, it is credited; and then, or
    /// where it lies in the table before, which is not looked at, its way and its run are taken over.
    fn goes_on(
        &mut self,
        page: u64,
        reach: &Range<u64>,
        mut look: impl FnMut(u64) -> Seen,
    ) -> Option<(Way, u64)> {
        // Mostly it is the last one.
        let newest = (usize::from(self.first) + usize::from(self.len) + WAITING - 1) % WAITING;
        let at = if self.leads[newest] == page {
            newest
        } else {
            self.leads.iter().position(|lead| *lead == page)?
        };
        let record = &mut self.waiting[at];
        let (way, run) = (record.way, u64::from(record.run));
        let others = u64::from(record.mapped) - 1;
        let behind = |steps| way.back().pages(page, steps, reach);
        let used =
            behind(1..others + 1).take_while(|page| look(*page) == Seen::Used).count() as u64;
        if used < others {
            return behind(1..2).next().is_none().then_some((way, run));
        }
        if !record.paid {
            record.paid = true;
            let record = *record;
            self.earn(record.mapped.into(), 0);
            let width = self.width(&record);
            if 1 << (*width / HALVES) == record.mapped {
                *width = (*width + 1).min(MAX_ORDER * HALVES);
            }
        }
        Some((way, run))
    }

    /// Of `window`, the pages `mapped` were mapped, or there already: all from the one that faulted
    /// up to where frames ran out.
    pub fn mapped(&mut self, window: &Window, mapped: Range<u64>) {
        let Some(mut record) = window.record else { return };
        let span = mapped.end.saturating_sub(mapped.start);
        let pages = span.div_ceil(window.stride.into()) as u16;
        if pages == 0 {
            return;
        }
        if pages < record.mapped {
            record.mapped = pages;
            record.end = pages;
        }
        if record.end > 1 && usize::from(self.len) < WAITING {
            let slot = (usize::from(self.first) + usize::from(self.len)) % WAITING;
            self.waiting[slot] = record;
            self.leads[slot] = record.leads_to();
            if !record.is_alone() {
                self.here.goes_on = record.leads_to();
            }
            self.len += 1;
        }
    }

    /// What is to be audited before the next window is [mapped](Self::mapped); its answers go to
    /// [`audited`](Self::audited).
    #[inline]
    pub fn to_audit(&mut self) -> Option<Audit> {
        let oldest = &self.waiting[usize::from(self.first)];
        let wait = if oldest.is_alone() { HOPING } else { WAITING };
        if usize::from(self.len) < wait {
            return None;
        }
        let record = self.take(self.first.into());
        self.first = (self.first + 1) % WAITING as u8;
        self.len -= 1;
        (record.end > 0).then_some(Audit { space: self.here.space, record })
    }

    /// What is to be audited because pages in `range` of `space` are about to be unmapped; to be
    /// called until there is nothing more.
    pub fn to_audit_in(&mut self, space: SpaceId, range: &Range<u64>) -> Option<Audit> {
        if space != self.here.space {
            return None;
        }
        let inside = |record: &Record| record.end > 0 && range.contains(&record.page);
        let at = self.waiting.iter().position(inside)?;
        Some(Audit { space, record: self.take(at) })
    }

    fn take(&mut self, at: usize) -> Record {
        self.leads[at] = NOWHERE;
        core::mem::replace(&mut self.waiting[at], Record::NONE)
    }

    /// Learns from what `look` tells of the audit's pages, which is `Empty` where no table is.
    pub fn audited(&mut self, audit: &Audit, mut look: impl FnMut(u64) -> Seen) -> Tally {
        let record = &audit.record;
        let mut used = |steps: Range<u16>| {
            record.at(steps).filter(|page| look(*page) == Seen::Used).count() as u32
        };
        let (ahead, beyond) = (record.mapped - 1, record.end - record.mapped);
        let hits = if record.paid { ahead.into() } else { used(1..record.mapped) };
        let more = used(record.mapped..record.end);
        let tally = Tally { used: hits, unused: u32::from(ahead) - hits };
        if audit.space != self.here.space {
            return tally;
        }
        if !record.paid {
            self.earn(hits + more, tally.unused);
        }
        if record.is_hope() {
            let fruitless = hits + more == 0;
            self.patience =
                if fruitless { self.patience.saturating_mul(2).saturating_add(1) } else { 0 };
            self.here.passes = self.patience;
        }
        let width = self.width(record);
        // Nine in ten.
        let most = |part: u32, all: u16| 10 * part >= 9 * u32::from(all);
        if most(hits, ahead) && beyond > 0 && most(more, beyond) {
            *width = (*width + 1).min(MAX_ORDER * HALVES);
        } else if !most(hits, ahead) || beyond > 0 {
            // As wide as would have been right.
            *width = (*width).min((hits + more + 1).ilog2() as u8 * HALVES);
        }
        tally
    }

    fn earn(&mut self, used: u32, unused: u32) {
        let credit = (self.credit + used).min(PRICE << MAX_ORDER);
        self.credit = credit.saturating_sub(PRICE * unused);
    }

    fn width(&mut self, record: &Record) -> &mut u8 {
        &mut self.widths[record.kind as usize][record.way.side()][usize::from(record.class)]
    }
}

/// The page beside `page` that is looked at for evidence where none is expected: a stream that goes on is
/// seen with every other page, and the entries of both lie in one cache line.
#[inline(always)]
pub const fn beside(page: u64) -> u64 {
    page ^ 1
}

/// The used pages in a row that end before `page`, [`RUN`] at most.
fn run_behind(way: Way, page: u64, reach: &Range<u64>, look: &mut impl FnMut(u64) -> Seen) -> u64 {
    let pages = way.back().pages(page, 1..RUN + 1, reach);
    pages.take_while(|page| look(*page) == Seen::Used).count() as u64
}

/// The lowest `n` bits.
const fn lowest(n: u32) -> u64 {
    if n < 64 { (1 << n) - 1 } else { !0 }
}

/// That of a run.
fn class(run: u64) -> usize {
    let class = run.checked_ilog2().map_or(0, |log| log as usize + 1);
    class.min(CLASSES - 1)
}

/// The window for a page with an access history: what is expected to be used, of the part of its
/// block that is as large as a window may be and holds the most of it.
fn again(miss: &Miss, most: u64, mut look: impl FnMut(u64) -> Seen) -> Window {
    let page = miss.page;
    let (block, own) = (page - page % BLOCK, 1 << (page % BLOCK));
    let expected = if miss.past.expected & own != 0 {
        miss.past.expected
    } else if miss.past.last & own != 0 {
        // Sometimes used: then with its neighbours.
        miss.past.last & (own << 1 | own >> 1)
    } else {
        0
    };
    let wanted = |n: &u64| {
        let at = block + n;
        expected >> n & 1 == 1 && miss.reach.contains(&at) && look(at) == Seen::Empty
    };
    let wanted = (0..BLOCK).filter(wanted).fold(own, |mask, n| mask | 1 << n);
    let part = |first: u64| wanted & (!0 >> (BLOCK - most.min(BLOCK))) << first;
    let from = (page % BLOCK + 1).saturating_sub(most);
    let part = (from..=page % BLOCK).map(part).max_by_key(|part| part.count_ones()).unwrap_or(own);
    let (first, last) = (part.trailing_zeros(), part.ilog2());
    Window {
        pages: block + u64::from(first)..block + u64::from(last) + 1,
        stride: 1,
        holes: !(part >> first),
        record: None,
    }
}

mod record;
#[cfg(test)]
mod tests;
