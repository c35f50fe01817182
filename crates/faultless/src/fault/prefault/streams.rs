//! The policy that chooses the pages to map around the faulting page: one [`Streams`] for each
//! thread.
//!
//! # History
//!
//! The page table records which pages were touched, for any number of interleaved streams, and
//! drops the record of unmapped pages. The run of used pages that ends at the faulting page shows
//! the direction of a stream and its length. The policy uses only the length of the run, in classes
//! of 0, 1, 2–3, 4–7, 8–15 and more pages, upwards and downwards. An unused prefaulted page ends a
//! run, so a stream whose pages were not used starts again.
//!
//! If no neighbour was used, the stream may be strided: if the nearest used page on one side is the
//! first of [`LATTICE`] or more at a constant distance, this distance is the stride, and the run,
//! the window and the check of the stream are counted in strides.
//!
//! # Width
//!
//! The policy learns how far streams of a class continue: each class has a width, by kind of fault
//! and by direction; strided streams have separate widths. A class begins as wide as its run, which
//! makes windows of 1, 2, 4, 8, … pages. Some faults later a check reads the accessed bits of the
//! window, and of as many pages beyond it. If all were used the class widens, else it shrinks at
//! once to the width that would have been right. If a thread faults just beyond a completely used
//! window, the result is known without waiting, and the run continues, also from the previous
//! table.
//!
//! A new thread begins with the predictor defaults in [`Defaults`].
//!
//! # Credit
//!
//! Every page found used earns one page of credit, and every unused prefaulted page costs
//! [`PRICE`], down to a credit of 0. A window may have as many pages as there is credit for, plus
//! half the run that it continues; a fault that a window would have saved also earns credit. So a
//! thread with sparse accesses prefaults nothing. While a thread finds no used page beside its
//! faults, prediction runs more and more rarely: it is skipped for the other faults, except for a
//! fault at which the last stream continues.
//!
//! # Previous mappings
//!
//! If the space's [`History`](super::History) contains an access history for a page, the prediction
//! for the page uses only this history.

use super::defaults::{AS_LONG_AS_THE_RUN, CLASSES, Defaults, HALVES, Widths};
use super::history::BLOCK;
use super::predictor::{
    Check, Kind, Look, MAX_ORDER, Miss, Predictor, Seen, Tally, Window, beside,
};
use crate::machine::SpaceId;
use core::ops::Range;
use record::{Record, Way};

/// The number of windows that wait for their check. Large enough for a stream among several to
/// continue.
const WAITING: usize = 32;
/// Single pages that continue no stream have a shorter wait, so that a random-access thread is
/// detected soon.
const WAITING_ALONE: usize = 8;
/// No page.
const NOWHERE: u64 = u64::MAX;
/// The credit that an unused prefaulted page costs: the number of used pages that compensate for
/// it.
const PRICE: u32 = 12;
/// The maximum distance between the pages of a strided stream.
const STRIDE: u64 = 32;
/// The number of pages, without the faulting one, that distinguish a strided stream from chance.
const LATTICE: u64 = 6;
/// The length from which runs are treated alike.
const RUN: u64 = 16;
/// A thread that skips prediction for more than this number of faults without history counts as a
/// random-access thread.
const DISORDER: u8 = 64;
/// The number of faults without a search for a stride after a search that found none; fewer if
/// prediction is mostly skipped.
const REST: u8 = 7;

/// The space of the thread, and which of its faults there skip prediction. In one struct, because a
/// skipped fault reads nothing else.
#[derive(Clone, Copy, Debug)]
struct Here {
    space: SpaceId,
    /// The number of faults that still skip prediction.
    skips: u8,
    /// The page at which the last stream continues; a fault there does not skip.
    continues_at: u64,
}

/// One thread's view of its streams of page faults.
#[derive(Clone, Debug)]
pub struct Streams {
    here: Here,
    /// By kind, [`Way::side`] and class.
    widths: Widths,
    /// The initial widths.
    begun: Widths,
    /// The number of pages that may be risked, times [`PRICE`].
    credit: u32,
    /// The windows that wait for a check, oldest first, from index `first`.
    waiting: [Record; WAITING],
    /// The page at which each window continues, or [`NOWHERE`]. A separate array, because each
    /// fault searches all of them.
    leads: [u64; WAITING],
    first: u8,
    len: u8,
    /// The number of faults that skip prediction next, between two that do not.
    backoff: u8,
    /// The number of faults for which no stride is searched yet.
    rest: u8,
}

impl Default for Streams {
    fn default() -> Self {
        Self::new()
    }
}

impl Predictor for Streams {
    const NEW: Self = Self {
        here: Here { space: SpaceId(u64::MAX), skips: 0, continues_at: NOWHERE },
        widths: AS_LONG_AS_THE_RUN,
        begun: AS_LONG_AS_THE_RUN,
        credit: 0,
        waiting: [Record::NONE; WAITING],
        leads: [NOWHERE; WAITING],
        first: 0,
        len: 0,
        backoff: 0,
        rest: 0,
    };

    type Defaults = Defaults;
    type Record = Record;

    #[inline(always)]
    fn skips(&mut self, space: SpaceId, page: u64) -> bool {
        let here = &mut self.here;
        if here.skips == 0 || here.space != space || here.continues_at == page {
            return false;
        }
        here.skips -= 1;
        true
    }

    #[inline(always)]
    fn predict(
        &mut self,
        miss: &Miss,
        max_order: u8,
        defaults: &Defaults,
        look: impl Look,
    ) -> Window<Record> {
        let page = miss.page;
        let single = Window::single(page);
        if max_order == 0 {
            return single;
        }
        if self.here.space != miss.space {
            let widths = defaults.begin();
            let here = Here { space: miss.space, ..Self::NEW.here };
            *self = Self { here, widths, begun: widths, ..Self::NEW };
        }
        let most = 1 << max_order.min(MAX_ORDER);
        let reach = &miss.reach;
        let has_history = miss.history.known >> (page % BLOCK) & 1 == 1;
        if self.here.continues_at == page
            && !has_history
            && let Some((way, run)) = self.goes_on(page, reach, &look)
        {
            return self.along(way, run, miss, most, &look);
        }
        // Beyond the reach there is no page to map, and no run.
        let below = (page > reach.start).then(|| look.at(page - 1));
        let above = (page + 1 < reach.end).then(|| look.at(page + 1));
        let (neighbour, next) = if beside(page) < page {
            (below, page.wrapping_sub(2))
        } else {
            (above, page.wrapping_add(2))
        };
        let used = |page| reach.contains(&page) && look.at(page) == Seen::Used;
        // For a random-access thread one used page is chance, and two are a stream.
        let told = neighbour == Some(Seen::Used) && (self.backoff <= DISORDER || used(next));
        if !told && self.skips(miss.space, page) {
            return single;
        }
        if has_history {
            return again(miss, most, &look);
        }
        match self.choose(miss, below, above, &look) {
            Some((way, run)) => self.along(way, run, miss, most, &look),
            None => single,
        }
    }

    fn mapped(&mut self, window: &Window<Record>, mapped: Range<u64>) {
        let Some(mut record) = window.record().copied() else { return };
        let span = if record.way.down {
            (record.page + 1).saturating_sub(mapped.start)
        } else {
            mapped.end.saturating_sub(record.page)
        };
        let pages = span.div_ceil(window.stride() as u64) as u16;
        if pages == 0 || mapped.is_empty() {
            return;
        }
        if pages != record.mapped {
            record.resize(pages);
        }
        if record.end > 1 && usize::from(self.len) < WAITING {
            let slot = (usize::from(self.first) + usize::from(self.len)) % WAITING;
            self.waiting[slot] = record;
            self.leads[slot] = record.leads_to();
            if !record.is_alone() {
                self.here.continues_at = record.leads_to();
            }
            self.len += 1;
        }
    }

    #[inline(always)]
    fn known(&mut self, space: SpaceId) -> Option<u32> {
        let oldest = usize::from(self.first);
        let record = &mut self.waiting[oldest];
        let is_known = record.credited && record.end == record.mapped && record.end > 0;
        if !is_known || usize::from(self.len) < WAITING || self.here.space != space {
            return None;
        }
        let ahead = u32::from(record.mapped) - 1;
        // The same as [`checked`](Predictor::checked) would learn: the width of the class was
        // right.
        if record.starts_stream() {
            self.backoff = 0;
            self.here.skips = 0;
        }
        record.end = 0;
        self.leads[oldest] = NOWHERE;
        self.drop_oldest();
        Some(ahead)
    }

    #[inline]
    fn to_check(&mut self) -> Option<Check<Record>> {
        let oldest = &self.waiting[usize::from(self.first)];
        let wait = if oldest.is_alone() { WAITING_ALONE } else { WAITING };
        if usize::from(self.len) < wait {
            return None;
        }
        let record = self.take(self.first.into());
        self.drop_oldest();
        (record.end > 0).then_some(Check { space: self.here.space, record })
    }

    fn to_check_in(&mut self, space: SpaceId, range: &Range<u64>) -> Option<Check<Record>> {
        if space != self.here.space {
            return None;
        }
        let inside = |record: &Record| record.end > 0 && range.contains(&record.page);
        let at = self.waiting.iter().position(inside)?;
        Some(Check { space, record: self.take(at) })
    }

    #[inline]
    fn extent(record: &Record) -> (Kind, Range<u64>) {
        (record.kind, record.span(record.end))
    }

    fn checked(&mut self, check: &Check<Record>, look: impl Look) -> Tally {
        let record = &check.record;
        let used = |steps: Range<u16>| {
            let (start, end) = (u64::from(steps.start), u64::from(steps.end));
            if record.way.are_all(record.page, start..end, &look, Seen::Used) {
                return (end - start) as u32;
            }
            record.at(steps).filter(|page| look.at(*page) == Seen::Used).count() as u32
        };
        let (ahead, beyond) = (record.mapped - 1, record.end - record.mapped);
        let hits = if record.credited { ahead.into() } else { used(1..record.mapped) };
        let more = used(record.mapped..record.end);
        let tally = Tally { used: hits, unused: u32::from(ahead) - hits };
        if check.space != self.here.space {
            return tally;
        }
        if !record.credited {
            self.earn(hits + more, tally.unused);
        }
        if record.starts_stream() {
            let fruitless = hits + more == 0;
            self.backoff =
                if fruitless { self.backoff.saturating_mul(2).saturating_add(1) } else { 0 };
            self.here.skips = self.backoff;
        }
        let width = self.width(record);
        // At least nine in ten.
        let most = |part: u32, all: u16| 10 * part >= 9 * u32::from(all);
        if most(hits, ahead) && beyond > 0 && most(more, beyond) {
            *width = (*width + 1).min(MAX_ORDER * HALVES);
        } else if !most(hits, ahead) || beyond > 0 {
            // The width that would have been right.
            *width = (*width).min((hits + more + 1).ilog2() as u8 * HALVES);
        }
        tally
    }

    fn exit(&mut self, defaults: &Defaults) {
        defaults.learn(&self.begun, &self.widths);
        *self = Self::NEW;
    }
}

impl Streams {
    /// Returns the predictor of a thread that has not faulted.
    pub const fn new() -> Self {
        Self::NEW
    }

    /// Returns the way and the run of the last stream if the stream faults at `page`, is long, and
    /// continues. The result equals the result of [`choose`](Self::choose), with fewer reads of
    /// entries.
    #[inline(always)]
    fn goes_on(&mut self, page: u64, reach: &Range<u64>, look: &impl Look) -> Option<(Way, u64)> {
        let newest = self.newest();
        let Record { way, run, mapped, .. } = self.waiting[newest];
        let next = way.on(page, 1);
        let goes_on = self.leads[newest] == page
            && way.stride == 1
            && u64::from(run) >= RUN
            && mapped > 1
            && reach.contains(&next)
            && look.at(next) == Seen::Empty;
        if goes_on { self.follow(newest, page, reach, look) } else { None }
    }

    /// Returns the way and the run of the stream that faults at a page without an access history.
    #[inline(never)]
    fn choose(
        &mut self,
        miss: &Miss,
        below: Option<Seen>,
        above: Option<Seen>,
        look: &impl Look,
    ) -> Option<(Way, u64)> {
        let (page, reach) = (miss.page, &miss.reach);
        // A stream upwards has its run below the page.
        let behind = [below, above].map(|neighbour| neighbour == Some(Seen::Used));
        let mut runs = [0, 0];
        if (behind != [false, false] || page == reach.start || page + 1 == reach.end)
            && let Some((way, run)) = self.continued(page, reach, look)
            && way.stride == 1
        {
            runs[way.side()] = run;
        }
        for way in [Way::UP, Way::DOWN] {
            let run = &mut runs[way.side()];
            // A stream that continues has already counted its run.
            if behind[way.side()] && *run < RUN {
                *run = run_behind(way, page, reach, look).max(*run);
            }
        }
        let widths = self.widths[miss.kind as usize];
        // If streams that begin here have mostly been short, the stream may be strided.
        if runs == [0, 0]
            && widths[0][0].max(widths[1][0]) < HALVES
            && let Some(strided) = self.strided(page, reach, look)
        {
            return Some(strided);
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
        Some((way, runs[way.side()]))
    }

    /// Returns the way and the run of the strided stream that now faults at `page`.
    fn strided(&mut self, page: u64, reach: &Range<u64>, look: &impl Look) -> Option<(Way, u64)> {
        if self.rest > 0 {
            self.rest -= 1;
            return None;
        }
        // The stream may have a longer run than the search covers, and may come from the previous
        // table.
        let known = self.continued(page, reach, look).filter(|(way, _)| way.stride > 1);
        let behind = |way: Way| {
            let mut beside = way.back().pages(page, 2..STRIDE + 1, reach);
            let stride = 2 + beside.position(|page| look.at(page) == Seen::Used)? as u8;
            let way = Way { stride, ..way };
            let run = run_behind(way, page, reach, look);
            (run >= LATTICE).then_some((way, run))
        };
        let found = known.or_else(|| {
            let found = [behind(Way::UP), behind(Way::DOWN)].into_iter().flatten();
            found.max_by_key(|(_, run)| *run)
        });
        self.rest = if found.is_none() { REST.saturating_sub(self.backoff) } else { 0 };
        found
    }

    /// Returns the window of a stream with the given run.
    #[inline(always)]
    fn along(
        &self,
        way: Way,
        run: u64,
        miss: &Miss,
        most: u64,
        look: &impl Look,
    ) -> Window<Record> {
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
            // A window of full width ends at a multiple of its width; otherwise each table would
            // need one window more.
            pages -= page & (pages - 1);
        } else if pages == most && way == Way::DOWN {
            pages = (page & (pages - 1)) + 1;
        }
        let free = |steps| way.row(page, steps, reach, look, Seen::Empty);
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
            credited: false,
            resized: false,
        };
        let pages = record.span(record.mapped);
        Window::strided(pages, way.stride, record)
    }

    /// Searches for the window that `page` continues. Returns its way and its run if the window was
    /// used completely, which also earns its credit, or if the window lies in the previous table,
    /// which is not read.
    fn continued(&mut self, page: u64, reach: &Range<u64>, look: &impl Look) -> Option<(Way, u64)> {
        // Usually it is the last window.
        let newest = self.newest();
        let at = if self.leads[newest] == page {
            newest
        } else {
            self.leads.iter().position(|lead| *lead == page)?
        };
        self.follow(at, page, reach, look)
    }

    /// Returns the place of the window that was mapped last.
    #[inline(always)]
    fn newest(&self) -> usize {
        (usize::from(self.first) + usize::from(self.len) + WAITING - 1) % WAITING
    }

    /// [`continued`](Self::continued) for the window at place `at`.
    #[inline(always)]
    fn follow(
        &mut self,
        at: usize,
        page: u64,
        reach: &Range<u64>,
        look: &impl Look,
    ) -> Option<(Way, u64)> {
        let record = &mut self.waiting[at];
        let (way, run) = (record.way, u64::from(record.run));
        let others = u64::from(record.mapped) - 1;
        let back = way.back();
        if back.row(page, 1..others + 1, reach, look, Seen::Used) < others {
            return back.pages(page, 1..2, reach).next().is_none().then_some((way, run));
        }
        if !record.credited {
            record.credited = true;
            let record = *record;
            self.earn(record.mapped.into(), 0);
            let width = self.width(&record);
            let fits = 1 << (*width / HALVES) == record.mapped;
            // The store read more than the predictor expected, and all of it was used.
            let fits_more = record.resized && !record.starts_stream();
            let mapped = record.mapped.ilog2() as u8 * HALVES;
            if fits || fits_more && *width <= mapped {
                *width = ((*width).max(if fits { 0 } else { mapped }) + 1).min(MAX_ORDER * HALVES);
            }
        }
        Some((way, run))
    }

    fn take(&mut self, at: usize) -> Record {
        self.leads[at] = NOWHERE;
        core::mem::replace(&mut self.waiting[at], Record::NONE)
    }

    fn drop_oldest(&mut self) {
        self.first = (self.first + 1) % WAITING as u8;
        self.len -= 1;
    }

    fn earn(&mut self, used: u32, unused: u32) {
        let credit = (self.credit + used).min(PRICE << MAX_ORDER);
        self.credit = credit.saturating_sub(PRICE * unused);
    }

    fn width(&mut self, record: &Record) -> &mut u8 {
        &mut self.widths[record.kind as usize][record.way.side()][usize::from(record.class)]
    }
}

/// Returns the number of contiguous used pages that end before `page`, at most [`RUN`].
fn run_behind(way: Way, page: u64, reach: &Range<u64>, look: &impl Look) -> u64 {
    way.back().row(page, 1..RUN + 1, reach, look, Seen::Used)
}

/// Returns the class of a run.
fn class(run: u64) -> usize {
    let class = run.checked_ilog2().map_or(0, |log| log as usize + 1);
    class.min(CLASSES - 1)
}

/// Returns the window for a page with an access history. Of the block's pages that are expected to
/// be used, the window takes the part of the maximum size that contains most of them.
fn again(miss: &Miss, most: u64, look: &impl Look) -> Window<Record> {
    let page = miss.page;
    let (block, own) = (page - page % BLOCK, 1 << (page % BLOCK));
    let expected = if miss.history.expected & own != 0 {
        miss.history.expected
    } else if miss.history.last & own != 0 {
        // The page was used in some mappings: predict its neighbours.
        miss.history.last & (own << 1 | own >> 1)
    } else {
        0
    };
    let wanted = |n: &u64| {
        let at = block + n;
        expected >> n & 1 == 1 && miss.reach.contains(&at) && look.at(at) == Seen::Empty
    };
    let wanted = (0..BLOCK).filter(wanted).fold(own, |mask, n| mask | 1 << n);
    let part = |first: u64| wanted & (!0 >> (BLOCK - most.min(BLOCK))) << first;
    let from = (page % BLOCK + 1).saturating_sub(most);
    let part = (from..=page % BLOCK).map(part).max_by_key(|part| part.count_ones()).unwrap_or(own);
    Window::masked(block, part, None)
}

mod record;
#[cfg(test)]
mod tests;
