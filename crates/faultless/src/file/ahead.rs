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
use crate::fault::prefault::{Kind, MAX_ORDER, Miss, Predictor, Seen, ThreadPredictor};
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
        let expected = first + self.predicted(cpu, reader, first);
        self.read_missing(cpu, first..needed.end, Reach::Block(needed.end.max(expected)))
    }

    /// How many pages from `page` on, which is missing, are to be read: as many as the open file of `reader` is expected to need.
    fn predicted<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        reader: &ThreadPredictor<M>,
        page: u64,
    ) -> u64 {
        let Some(mut reader) = reader.of_fault() else { return 1 };
        let look = |page| self.slot(cpu, page).map_or(Seen::Empty, |slot| seen_as(load(slot)));
        let space = SpaceId(self.id());
        while let Some(check) = reader.to_check() {
            reader.checked(&check, look);
        }
        let first = page - page % ENTRIES as u64;
        let reach = first..(first + ENTRIES as u64).min(self.pages()).max(page + 1);
        let miss = Miss { space, page, kind: Kind::Read, reach, history: BlockHistory::default() };
        let vm = cpu.vm();
        let most = vm.knobs.prefault_max_order() + self.block_order();
        let window = reader.predict(&miss, most.min(MAX_ORDER), &vm.defaults, look);
        // The policy is not of this crate.
        if !window.is_for(&miss) {
            return 1;
        }
        reader.mapped(&window, window.span());
        window.run_from(page)
    }
}
