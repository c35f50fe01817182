//! Read-ahead for reads of the kernel: `read`, `pread`, `sendfile`.
//!
//! A fault [reads ahead](crate::fault) by the predictor of its thread. A read of the kernel belongs
//! to an open file, which may be used by several threads or with a moving position. So the kernel
//! keeps a predictor of the same type for each open file. For this predictor the object is the
//! space, the pages of the file are the pages, and a read of a missing page is the fault.
//!
//! The accessed bit of the object's entries, unused by any MMU, records which pages of a window
//! were used: it is clear after a page was read from the store, and
//! [`read_page`](Shared::read_page) sets it. Mappings have separate accessed bits, in their page
//! tables.

use super::object::Object;
use super::read::Reach;
use crate::error::Errno;
use crate::fault::prefault::history::BlockHistory;
use crate::fault::prefault::{Kind, MAX_ORDER, Miss, Predictor, Seen, ThreadPredictor, Window};
use crate::heap::Shared;
use crate::machine::{Machine, SpaceId};
use crate::sync::atomic::AtomicU64;
use crate::table::Entry;
use crate::table::node::{ENTRIES, load};
use crate::table::protocol;
use crate::vm::Cpu;
use core::ops::Range;

/// Returns how the predictor of an open file sees the entry of a page.
fn seen_as(entry: Entry) -> Seen {
    if entry.is_none() {
        Seen::Empty
    } else if entry.is_present() && entry.is_accessed() {
        Seen::Used
    } else {
        // Or the page is being read.
        Seen::Unused
    }
}

/// The number of pages from which a run counts as long.
const LONG: u64 = 16;

/// Returns the order of the longest window after the run of used pages that ends beside `page`,
/// searching at most `most` pages on each side: half of a long run. A predictor's window grows at
/// once for all long runs, but a run may end soon.
fn longest_after(page: u64, most: u64, look: impl Fn(u64) -> Seen) -> u8 {
    let used = |page: &u64| look(*page) == Seen::Used;
    let below = (page.saturating_sub(most)..page).rev().take_while(used).count();
    let above = (page + 1..=page.saturating_add(most)).take_while(used).count();
    let run = below.max(above) as u64;
    if run < LONG { MAX_ORDER } else { (run / 2).ilog2() as u8 }
}

/// A window of the predictor of an open file.
type ExpectedWindow<M> = Window<<<M as Machine>::Predictor as Predictor>::Record>;

impl Object {
    /// Marks a page read by the kernel as used, in its entry.
    pub(super) fn note_used<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64) {
        let seen = load(slot);
        if seen.is_present() && !seen.is_accessed() {
            protocol::wait_and_replace(
                slot,
                cpu,
                |now| if now.is_present() { now.used() } else { now },
            );
        }
    }
}

impl Shared<Object> {
    /// Begins to read the missing pages of `pages`, for a read of an open file, and in addition the
    /// following pages that `reader` expects the open file to need next. `reader` is a predictor
    /// used only for this open file.
    ///
    /// Afterwards the kernel waits for the required pages, and reads them with
    /// [`read_page`](Self::read_page). For an object without a store, this call does nothing.
    ///
    /// # Errors
    /// As [`read_ahead`](Self::read_ahead), for the required pages.
    pub fn read_in_sequence<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        reader: &ThreadPredictor<M>,
        pages: Range<u64>,
    ) -> Result<(), Errno> {
        self.check_vm(cpu);
        let needed = pages.start..pages.end.min(self.pages());
        let missing = |index: &u64| self.slot(cpu, *index).is_none_or(|slot| load(slot).is_none());
        let Some(first) = needed.clone().find(missing).filter(|_| self.is_stored()) else {
            return Ok(());
        };
        // These pages are about to be read, and continue the run of pages that ends at the missing
        // one.
        let before = (needed.start..first).filter_map(|index| self.slot(cpu, index));
        before.for_each(|slot| Object::note_used(cpu, slot));
        let window = self.predicted(cpu, reader, first);
        let expected = first + window.as_ref().map_or(1, |(_, run)| *run);
        let reach = Reach::Block(needed.end.max(expected));
        let read = self.read_missing(cpu, first..needed.end, reach);
        if let Some((window, _)) = window
            && let Some(mut reader) = reader.of_fault()
        {
            reader.mapped(&window, self.run_read(cpu, &window, first));
        }
        read
    }

    /// Returns the window that the predictor of an open file expects for `page`, a missing page,
    /// and the number of its pages to read from `page` upwards. The caller reports the pages
    /// actually read to `reader`.
    fn predicted<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        reader: &ThreadPredictor<M>,
        page: u64,
    ) -> Option<(ExpectedWindow<M>, u64)> {
        let mut reader = reader.of_fault()?;
        let look = |page| self.slot(cpu, page).map_or(Seen::Empty, |slot| seen_as(load(slot)));
        let space = SpaceId(self.id());
        while let Some(check) = reader.to_check() {
            reader.checked(&check, look);
        }
        let reach = self.reach(page);
        let miss = Miss { space, page, kind: Kind::Read, reach, history: BlockHistory::default() };
        let vm = cpu.vm();
        let most = (vm.knobs.prefault_max_order() + self.block_order()).min(MAX_ORDER);
        let most = most.min(longest_after(page, 2 << most, look));
        // A predictor's largest windows end at multiples of their size. Growing runs need not.
        let window = reader.predict(&miss, MAX_ORDER, &vm.defaults, look);
        // The predictor is outside this crate and not trusted.
        window.is_for(&miss).then(|| {
            let run = window.run_from(page).min(1 << most);
            (window, run)
        })
    }

    /// Returns the pages of the object in the table of `page`, including `page`.
    fn reach(&self, page: u64) -> Range<u64> {
        let first = page - page % ENTRIES as u64;
        first..(first + ENTRIES as u64).min(self.pages()).max(page + 1)
    }

    /// Returns the pages around `page` that were read for `window`: the block of the store, and the
    /// pages requested by the predictor and the caller. The next missing page of the stream is the
    /// page beyond.
    fn run_read<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        window: &Window<R>,
        page: u64,
    ) -> Range<u64> {
        // Only the first page of a window with a stride is read; the stream continues as predicted.
        if window.stride() > 1 {
            return window.span();
        }
        let reach = self.reach(page);
        let there = |page: &u64| self.slot(cpu, *page).is_some_and(|slot| !load(slot).is_none());
        let block = reach.start.max(page - page % self.block());
        let below = (block..page).rev().take_while(there).count() as u64;
        let above = (page..reach.end).take_while(there).count() as u64;
        page - below..page + above
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;
