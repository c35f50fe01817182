//! Read-ahead for reads of the kernel: `read`, `pread`, `sendfile`.
//!
//! A fault [reads ahead](crate::fault) what the predictor of its thread expects. A read of the kernel belongs to an open file, and several
//! threads, or a position that moves, may be behind it. So the kernel keeps a predictor of the same type for each open file. To the predictor the
//! object is the space, the pages of the file are the pages, and a read that finds a page missing is the fault.
//!
//! What came of a window is told by the accessed bit of the object's entries, which no MMU uses: it is clear in a page that was read,
//! and [`read_page`](Shared::read_page) sets it. Mappings have accessed bits of their own, in their page tables.

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

/// What the entry of a page tells the predictor of an open file.
fn seen_as(entry: Entry) -> Seen {
    if entry.is_none() {
        Seen::Empty
    } else if entry.is_present() && entry.is_accessed() {
        Seen::Used
    } else {
        // Or it is being read.
        Seen::Unused
    }
}

/// A run of so many pages and more is a long one.
const LONG: u64 = 16;

/// The order of the longest window after the run of used pages that ends beside `page`, as far as `most` pages:
/// half of a long run. The window of a predictor grows at once for all long runs, and a run may end soon.
fn longest_after(page: u64, most: u64, look: impl Fn(u64) -> Seen) -> u8 {
    let used = |page: &u64| look(*page) == Seen::Used;
    let below = (page.saturating_sub(most)..page).rev().take_while(used).count();
    let above = (page + 1..page.saturating_add(most)).take_while(used).count();
    let run = below.max(above) as u64;
    if run < LONG { MAX_ORDER } else { (run / 2).ilog2() as u8 }
}

/// A window of the predictor of an open file.
type ExpectedWindow<M> = Window<<<M as Machine>::Predictor as Predictor>::Record>;

impl Object {
    /// Notes in the entry of a page, which the kernel reads, that it was used.
    pub(super) fn note_used<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64) {
        let seen = load(slot);
        if seen.is_present() && !seen.is_accessed() {
            protocol::settle(slot, cpu, |now| if now.is_present() { now.used() } else { now });
        }
    }
}

impl Shared<Object> {
    /// Begins to read those of `pages` that are not there, for a read of an open file, and with them as many behind as `reader` expects the
    /// open file to need next. `reader` is a predictor for that open file alone.
    ///
    /// Afterwards the kernel waits for the pages that it needs, and reads them, with [`read_page`](Self::read_page). Of an object without a
    /// store, nothing is to be read.
    ///
    /// # Errors
    /// As [`read_ahead`](Self::read_ahead), of the pages that are needed.
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
        // They are about to be read, and continue the run of pages that ends at the missing one.
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

    /// The window that the predictor of an open file expects for `page`, which is missing, and the number of its
    /// pages to read from `page` on. The caller reports the pages that are read to `reader`.
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
        // The largest windows of a predictor end at multiples of their size. Runs that grow need not.
        let window = reader.predict(&miss, MAX_ORDER, &vm.defaults, look);
        // The policy is not of this crate.
        window.is_for(&miss).then(|| {
            let run = window.run_from(page).min(1 << most);
            (window, run)
        })
    }

    /// The pages of the object that the table with `page` has, `page` among them.
    fn reach(&self, page: u64) -> Range<u64> {
        let first = page - page % ENTRIES as u64;
        first..(first + ENTRIES as u64).min(self.pages()).max(page + 1)
    }

    /// The pages around `page` that were read for `window`: the block of the store, and the pages that
    /// the predictor and the caller wanted. The next page of a stream that is missing is the one beyond.
    fn run_read<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        window: &Window<R>,
        page: u64,
    ) -> Range<u64> {
        // Of a window that leaves pages out only the first page is read; the stream goes on as predicted.
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
