//! Huge text: the first fault in 2 MiB of a file's mapping maps all of them with one huge leaf.
//!
//! The leaf is an entry of the level above the last, under the [same protocol](crate::table::protocol): a fault finds it empty, takes it,
//! validates its ticket, looks whether the object still has the [folio](crate::file::folio), and commits. The ticket holds for all pages of
//! the leaf, as they lie in the VMA.
//!
//! A huge leaf never allows stores. It maps a file's pages for loads and fetches, in mappings that
//! are [asked for it](wanted). A store to one of the pages [splits](crate::space::huge) it first, so that a program may
//! write to its text. Where there is a table already, or no folio, there are base pages: the fallback is the same path as without huge text.

use super::absent::ReadIn;
use super::{Access, Attempt, FaultKind, MOST_LOOKS};
use crate::addr::VirtRange;
use crate::fault::ticket::Abort;
use crate::file::{Fetched, NoFolio, Object};
use crate::heap::Shared;
use crate::knob::HugeText;
use crate::machine::{Invalidate, Machine};
use crate::space::Space;
use crate::space::vma::{Area, Memory, Prot, VmaFlags};
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::table::Entry;
use crate::table::node::{ENTRIES, TABLE_ALIGN};
use crate::table::protocol;
use crate::vm::Cpu;

/// One fault in so many tries to make a folio where that failed before: it looks at all of its pages.
const SELDOM: u32 = 64;

/// What a huge leaf at `start` [shows](shown) of `area`, if there is to be one by the knob and the advice.
pub(crate) fn wanted(choice: HugeText, area: &Area, start: u64) -> Option<(&Shared<Object>, u64)> {
    let advised = area.flags.contains(VmaFlags::HUGEPAGE);
    // Of what is used at random, only what is needed is read.
    let refused = VmaFlags::NOHUGEPAGE.union(VmaFlags::RANDOM);
    let text = area.prot.contains(Prot::EXEC) && !area.flags.intersects(refused);
    let chosen = match choice {
        HugeText::Never => false,
        HugeText::Madvise => advised,
        HugeText::Always => advised || text,
    };
    chosen.then(|| shown(area, start)).flatten()
}

/// The object and its page that a huge leaf at `start` would show first of `area`, if there can be one: all of it lies in the VMA and in the
/// object, and address and offset agree.
pub(crate) fn shown(area: &Area, start: u64) -> Option<(&Shared<Object>, u64)> {
    let Memory::Object(object) = &area.memory else { return None };
    let all = VirtRange::new(start, start + TABLE_ALIGN);
    let first = area.range.covers(all).then(|| area.index_of(start))?;
    object.spans_folio(first).then_some((object, first))
}

impl<M: Machine> Attempt<'_, '_, M> {
    /// A fault where the entry above the last level is `seen`, empty or a huge leaf. `None`: the page has, or is to have, a
    /// table.
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
        let Some((object, first)) = wanted(choice, &self.vma.area, start).filter(|_| fits) else {
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
        // Behind the full barrier: what leaves the object is missing here, or its revocation waits for the entry.
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

    /// Whether the fault is to try to make a folio of the pages of `object` from `first` on. No page there failed to be read; and where it could
    /// not be done before, one fault in [`SELDOM`] tries again.
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

    /// A fault on a page of a huge leaf.
    fn serve_mapped(self, slot: &AtomicU64, seen: Entry) -> Result<Option<FaultKind>, Abort> {
        if !seen.is_present() {
            // This VMA allows the access, so a writer has come in between.
            return Err(Abort::VmaChanged);
        }
        if self.access == Access::Write {
            self.space.split(self.cpu, self.page & !(TABLE_ALIGN - 1), slot);
            return Ok(None);
        }
        // In order as it is. This CPU may have cached an older one.
        let page = VirtRange::page(self.page);
        self.cpu.vm().machine().invalidate(self.cpu.id(), self.space.id(), Invalidate::Range(page));
        self.cpu.count(Counter::Spurious);
        Ok(Some(FaultKind::Spurious))
    }
}

impl<M: Machine> Space<M> {
    /// Makes a folio of the pages around `page`, for a fault that holds nothing. Where there can be none, the fault that looks again finds
    /// that out, and maps base pages. So it does after [`MOST_LOOKS`] `looks` at folios that are there, and of which it gets no leaf: a page may have
    /// as many mappings as can be counted.
    #[cold]
    #[inline(never)]
    pub(super) fn read_folio(&self, cpu: &Cpu<'_, M>, page: u64, looks: u32) -> ReadIn {
        let start = page & !(TABLE_ALIGN - 1);
        let choice = cpu.vm().knobs.huge_text();
        let found = self.with_vma(cpu, page, |vma| {
            wanted(choice, &vma.area, start).map(|(object, first)| (object.clone(), first))
        });
        let Some((object, first)) = found else { return ReadIn::LookAgain };
        let state = cpu.state();
        let reads = state.counts.get(Counter::PageRead);
        let fetched =
            if looks < MOST_LOOKS { object.fetch_folio(cpu, first) } else { Err(NoFolio) };
        if state.counts.get(Counter::PageRead) != reads
            || matches!(fetched, Ok(Fetched::Pending(_)))
        {
            cpu.count(Counter::MajorFault);
        }
        let came = match fetched {
            Ok(Fetched::There) => ReadIn::LookAgain,
            Ok(Fetched::Pending(pending)) => {
                // The page itself may be there, or be read, without the others.
                cpu.set_pending(pending.for_any());
                ReadIn::Pending
            }
            Err(NoFolio) => {
                cpu.count(Counter::ThpFileFallback);
                let this = (state.counts.get(Counter::Faults), object.id(), first);
                state.no_folio.set(Some(this));
                ReadIn::LookAgain
            }
        };
        Object::release(object, cpu);
        came
    }
}
