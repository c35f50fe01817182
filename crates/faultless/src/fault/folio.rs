//! Huge text: the first fault in 2 MiB of a file mapping maps all 2 MiB with one huge leaf.
//!
//! The leaf is an entry of the level above the last, under the [same
//! protocol](crate::table::protocol): a fault finds the entry empty, locks it, validates the
//! ticket, checks that the object still has the [folio](crate::file::folio), and commits. The
//! ticket holds for all pages of the leaf, because they lie in the VMA.
//!
//! A huge leaf never allows stores. It maps pages of a file for loads and fetches, in mappings that
//! [want huge leaves](wanted). A store to one of the pages first [splits](crate::space::huge) the
//! leaf, so a program may write to its text. If a table exists already, or if there is no folio,
//! the fault maps base pages on the same path as without huge text.

use super::absent::ReadIn;
use super::{Access, Attempt, FaultKind, MAX_RETRIES};
use crate::addr::VirtRange;
use crate::fault::ticket::Abort;
use crate::file::{Fetched, NoFolio, Object};
use crate::heap::Shared;
use crate::knob::HugeText;
use crate::machine::{Invalidate, Machine};
use crate::space::Space;
use crate::space::area::{Area, PageSource, Prot, VmaFlags};
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::table::Entry;
use crate::table::node::{ENTRIES, TABLE_ALIGN};
use crate::table::protocol;
use crate::vm::Cpu;

/// After a failure, only one fault in this number tries again to make a folio, because the attempt
/// reads the entries of all its pages.
const SELDOM: u32 = 64;

/// Returns what a huge leaf at `start` [shows](shown) of `area`, if the knob and the advice allow a
/// huge leaf.
pub(crate) fn wanted(
    choice: HugeText,
    area: Area<'_>,
    start: u64,
) -> Option<(&Shared<Object>, u64)> {
    let advised = area.flags.contains(VmaFlags::HUGEPAGE);
    // In memory with random access, only the needed pages are read.
    let refused = VmaFlags::NOHUGEPAGE.union(VmaFlags::RANDOM);
    let text = area.prot.contains(Prot::EXEC) && !area.flags.intersects(refused);
    let chosen = match choice {
        HugeText::Never => false,
        HugeText::Madvise => advised,
        HugeText::Always => advised || text,
    };
    chosen.then(|| shown(area, start)).flatten()
}

/// Returns the object and the object page which a huge leaf at `start` would map first. `None`
/// unless the whole leaf lies in the VMA and in the object, and address and offset have the same
/// alignment.
pub(crate) fn shown(area: Area<'_>, start: u64) -> Option<(&Shared<Object>, u64)> {
    let PageSource::Object(object) = area.memory else { return None };
    let all = VirtRange::new(start, start + TABLE_ALIGN);
    let first = area.range.covers(all).then(|| area.index_of(start))?;
    object.spans_folio(first).then_some((object, first))
}

impl<M: Machine> Attempt<'_, '_, M> {
    /// Serves a fault whose entry above the last level is `seen`, empty or a huge leaf. `None`: the
    /// page has a table, or needs one.
    #[inline(never)]
    pub(super) fn serve_huge(
        self,
        slot: &AtomicU64,
        seen: Entry,
    ) -> Result<Option<FaultKind>, Abort> {
        if seen.is_mapped() {
            return self.serve_mapped(slot, seen);
        }
        let start = self.page & !(TABLE_ALIGN - 1);
        let choice = self.cpu.vm().knobs.huge_text();
        let fits = self.access != Access::Write && self.ticket.is_of_neighbours();
        let Some((object, first)) = wanted(choice, self.vma.area(), start).filter(|_| fits) else {
            return Ok(None);
        };
        let state = self.cpu.state();
        if state.no_folio.get() == Some((state.counts.get(Counter::Faults), object.id(), first)) {
            return Ok(None);
        }
        let names = object.slots(self.cpu, first).filter(|names| Object::folio(names).is_some());
        let Some(names) = names else {
            return if self.tries_folio(object, first) { Err(Abort::NoFolio) } else { Ok(None) };
        };
        let Ok(held) = protocol::take(slot, Entry::NONE, self.cpu) else {
            self.cpu.count(Counter::TrylockFailed);
            return Ok(None);
        };
        if !self.ticket.is_valid() {
            held.revert();
            return Err(Abort::VmaChanged);
        }
        // This check follows the full barrier. A page that leaves the object is either already
        // missing here, or its revocation waits for the entry.
        let Some(frame) = Object::refer_to_folio(self.cpu, names) else {
            held.revert();
            return Err(Abort::NoFolio);
        };
        held.commit(self.vma.leaf.of(frame).huge());
        self.cpu.add_resident(self.space, ENTRIES as i64);
        self.cpu.count(Counter::ThpFileMapped);
        self.cpu.count(Counter::FilePmdMapped);
        Ok(Some(FaultKind::Huge))
    }

    /// Returns whether the fault should try to make a folio of the pages of `object` from `first`
    /// upwards. The result is false if a read of one of the pages has failed. If an earlier attempt
    /// failed, one fault in [`SELDOM`] tries again.
    fn tries_folio(self, object: &Object, first: u64) -> bool {
        let state = self.cpu.state();
        let seldom = object.is_unfit(first) && {
            let skipped = state.folios_skipped.get().wrapping_add(1);
            state.folios_skipped.set(skipped);
            !skipped.is_multiple_of(SELDOM)
        };
        if seldom || object.has_failed(first) {
            self.cpu.count(Counter::ThpFileFallback);
            return false;
        }
        true
    }

    /// Serves a fault on a page of a huge leaf.
    fn serve_mapped(self, slot: &AtomicU64, seen: Entry) -> Result<Option<FaultKind>, Abort> {
        if !seen.is_present() {
            // This VMA allows the access, so a writer has changed the entry concurrently.
            return Err(Abort::VmaChanged);
        }
        if self.access == Access::Write {
            self.space.split(self.cpu, self.page & !(TABLE_ALIGN - 1), slot);
            return Ok(None);
        }
        // The entry already allows the access. This CPU may have cached an older entry.
        let page = VirtRange::page(self.page);
        self.cpu.vm().machine().invalidate(self.cpu.id(), self.space.id(), Invalidate::Range(page));
        self.cpu.count(Counter::Spurious);
        Ok(Some(FaultKind::Spurious))
    }
}

impl<M: Machine> Space<M> {
    /// Makes a folio of the pages around `page`, for a fault that holds no locks. If no folio is
    /// possible, the retried fault detects this and maps base pages. The same happens after
    /// [`MAX_RETRIES`] `looks` that found a folio but got no leaf, since a page may already have
    /// the maximum number of mappings.
    #[cold]
    #[inline(never)]
    pub(super) fn read_folio(&self, cpu: &Cpu<'_, M>, page: u64, looks: u32) -> ReadIn {
        let start = page & !(TABLE_ALIGN - 1);
        let choice = cpu.vm().knobs.huge_text();
        let found = self.with_vma(cpu, page, |vma| {
            wanted(choice, vma.area(), start).map(|(object, first)| (object.clone(), first))
        });
        let Some((object, first)) = found else { return ReadIn::Retry };
        let state = cpu.state();
        let reads = state.counts.get(Counter::PageRead);
        let fetched =
            if looks < MAX_RETRIES { object.fetch_folio(cpu, first) } else { Err(NoFolio) };
        if state.counts.get(Counter::PageRead) != reads
            || matches!(fetched, Ok(Fetched::Pending(_)))
        {
            cpu.count(Counter::MajorFault);
        }
        let came = match fetched {
            Ok(Fetched::There) => ReadIn::Retry,
            Ok(Fetched::Pending(pending)) => {
                // The page itself may be present, or be read, without the other pages.
                cpu.set_pending(pending.for_any());
                ReadIn::Pending
            }
            Err(NoFolio) => {
                cpu.count(Counter::ThpFileFallback);
                let this = (state.counts.get(Counter::Faults), object.id(), first);
                state.no_folio.set(Some(this));
                ReadIn::Retry
            }
        };
        Object::release(object, cpu);
        came
    }
}
