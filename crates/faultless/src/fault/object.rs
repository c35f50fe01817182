//! The first touch of a page that a VMA maps from an object, and of the neighbouring pages.
//!
//! A read also maps the surrounding pages already present in the object: a block of up to
//! `fault_around_pages` pages, aligned to its size, limited by the VMA and by one table of the
//! object. The fault locks all their entries, validates the ticket once, and commits or reverts all
//! of them. A full barrier lies between each compare-and-swap and the read of the sequence, so the
//! protocol holds for each entry individually. The fault does not wait while it holds entries; it
//! skips an entry held by another CPU.

use super::{Access, Attempt, FaultKind};
use crate::addr::FrameNumber;
use crate::fault::prepared::Prepared;
use crate::fault::ticket::{Abort, why_invalid};
use crate::file::{Mark, Object};
use crate::frame::Frame;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, ENTRIES, LAST};
use crate::table::protocol::{self, Slots, TakenSome};
use crate::vm::Cpu;
use core::ops::BitOr;

impl<'c, M: Machine> Attempt<'c, '_, M> {
    /// Maps the object's page into `table`, and for a read also the surrounding pages. Counting the
    /// mappings writes the lines of the frames, and no other shared line. `None`: another CPU was
    /// faster, or the page left the object.
    pub(super) fn map_object(
        self,
        prepared: &mut Prepared,
        object: &Object,
        table: &[AtomicU64; ENTRIES],
    ) -> Result<Option<FaultKind>, Abort> {
        let index = self.vma.index_of(self.page);
        let pages = object.page(self.cpu, index, prepared)?;
        let (here, there) = (node::index(self.page, LAST), index as usize % ENTRIES);
        let (below, above) = if self.access == Access::Write { (0, 0) } else { self.around(here) };
        let (below, above) = (below.min(there), above.min(ENTRIES - 1 - there));
        let run = &table[here - below..=here + above];
        let names = &pages[there - below..=there + above];
        let present = |(at, name)| u64::from(node::load(name).is_present()) << at;
        let wanted = names.iter().enumerate().map(present).fold(0, BitOr::bitor);
        // A store maps one page, so it can detect this afterwards.
        if self.access != Access::Write && Object::is_full(self.cpu, &names[below]) {
            return Err(Abort::TooManyMappings);
        }
        let stores = self.access == Access::Write || self.vma.leaf.is_writable();
        if stores {
            // After migrations other CPUs may still use the old frames of pages.
            self.cpu.flush_if_pending(&object.pending);
        }
        let notes = self.access == Access::Write && object.is_stored();
        if notes {
            object.charge_store(self.cpu, Some(&names[below]))?;
        }
        let Some(held) = self.take_run(run, below, wanted)? else { return self.entry_changed() };
        let template = if self.access == Access::Write {
            self.vma.leaf.writable_dirty()
        } else {
            self.vma.leaf
        };
        let mut mapped = 0;
        held.commit(|at| match Object::refer_to_map(self.cpu, &names[at]) {
            Some(frame) if stores && self.cpu.is_pending(&object.pending) => {
                // The page was migrated again in the meantime. SAFETY: drops the reference of a
                // mapping which was never installed.
                unsafe { self.cpu.put_unmapped(frame) };
                Entry::NONE
            }
            Some(frame) if notes && !note_store(self.cpu, object, &names[at], frame) => Entry::NONE,
            Some(frame) => {
                mapped += 1;
                template.of(frame)
            }
            None => Entry::NONE,
        });
        if mapped == 0 && Object::is_full(self.cpu, &names[below]) {
            return Err(Abort::TooManyMappings);
        }
        self.cpu.add_resident(self.space, mapped);
        self.cpu.count(Counter::SharedPage);
        if mapped > 1 {
            self.cpu.state().counts.add(Counter::AroundPage, mapped as u64 - 1);
        }
        // If the page has just left the object, or has just reached the maximum number of mappings,
        // retry.
        if node::load(&run[below]).is_none() {
            return Ok(None);
        }
        Ok(Some(FaultKind::Shared))
    }

    /// Locks the empty entries of `run` selected by `wanted`, except entries that other CPUs change
    /// first, and validates the ticket. The faulting page has place `own`. `None`: another CPU
    /// changed the entry of the faulting page first.
    #[inline(always)]
    pub(super) fn take_run<'t>(
        self,
        run: &'t [AtomicU64],
        own: usize,
        wanted: u64,
    ) -> Result<Option<TakenSome<'t>>, Abort>
    where
        'c: 't,
    {
        let held = protocol::take_some(Slots::all(run), Entry::NONE, wanted, self.cpu);
        if !held.holds(own) {
            held.revert();
            return Ok(None);
        }
        if !self.ticket.is_valid() {
            held.revert();
            return Err(why_invalid(self.cpu, self.space, self.page, &run[own]));
        }
        Ok(Some(held))
    }

    /// Returns the maximum numbers of pages below and above its own page that a fault maps. `here`
    /// is the page's index in its table.
    #[inline]
    pub(super) fn around(self, here: usize) -> (usize, usize) {
        if !self.ticket.is_of_neighbours() {
            return (0, 0);
        }
        let block = self.cpu.vm().knobs.fault_around_pages();
        let range = self.vma.range();
        let (vma_below, vma_above) = (
            (self.page - range.start) >> crate::addr::PAGE_SHIFT,
            ((range.end - self.page) >> crate::addr::PAGE_SHIFT) - 1,
        );
        let in_block = here & (block - 1);
        (in_block.min(vma_below as usize), (block - 1 - in_block).min(vma_above as usize))
    }

    /// Serves a store to an untouched page of a private mapping: maps a copy of the object's page,
    /// or a new zeroed page if the object has no page there.
    #[inline(always)]
    pub(super) fn copy_object_page(
        self,
        prepared: &mut Prepared,
        object: &Object,
        slot: &AtomicU64,
    ) -> Result<Option<FaultKind>, Abort> {
        let index = self.vma.index_of(self.page);
        // As on Linux, this comes first: the anon_vma decides later merges of the VMA, even if the
        // page does not exist.
        self.prepare_anon_vma()?;
        if index >= object.pages() {
            return Err(Abort::BeyondObject);
        }
        // The fault's own reference prevents reuse of the frame under the same number during the
        // copy.
        let name = object.slot(self.cpu, index);
        let source = name.and_then(|name| Object::refer_settled(self.cpu, name));
        if source.is_none() && object.is_stored() {
            return Err(Abort::Absent);
        }
        let frame = match source {
            None => prepared.zeroed_seldom(self.cpu).map(Frame::from),
            Some(source) => prepared.clean(self.cpu).inspect(|frame| {
                // SAFETY: the new frame is unpublished and belongs to this fault; the source is
                // referenced.
                unsafe { self.cpu.vm().machine().copy_frame(frame.number(), source) };
            }),
        };
        let held = match &frame {
            Some(_) => protocol::take(slot, Entry::NONE, self.cpu).ok(),
            None => None,
        };
        // A truncation removes copies of the object's pages without a change of the sequence. So
        // the fault reads the object again.
        let now = name.map_or(Entry::NONE, node::load);
        let same = |source| now.is_present() && now.frame() == source;
        let stays = index < object.pages() && source.is_none_or(same);
        if let Some(source) = source {
            // SAFETY: drops the reference taken above, which never was a mapping.
            unsafe { self.cpu.put_unmapped(source) };
        }
        let frame = frame.ok_or(Abort::NoMemory)?;
        let Some(held) = held else {
            prepared.keep_clean(frame);
            return self.entry_changed();
        };
        if !self.ticket.is_valid() {
            held.revert();
            prepared.keep_clean(frame);
            return Err(why_invalid(self.cpu, self.space, self.page, slot));
        }
        if !stays && !lost(Mutant::CopyLooksAgain) {
            held.revert();
            prepared.keep_clean(frame);
            return Ok(None);
        }
        // The flush comes while the entry is busy: other CPUs may still use a translation of the
        // evicted object page.
        if !lost(Mutant::CopySettlesEvicted) {
            self.cpu.flush_if_pending(&self.space.core.evicted);
        }
        let entry = self.own_leaf(frame.number());
        self.publish(frame);
        held.commit(entry);
        self.cpu.add_resident(self.space, 1);
        let (counter, kind) = match source {
            None => (Counter::AnonPage, FaultKind::Anon),
            Some(_) => (Counter::CowCopy, FaultKind::Copy),
        };
        self.cpu.count(counter);
        Ok(Some(kind))
    }
}

/// Marks the page of a file with a store dirty, whose entry `name` named `frame`, for a mapping
/// that allows stores. If it cannot be marked there is no such mapping: the reference taken for it
/// goes back.
#[cold]
#[inline(never)]
fn note_store<M: Machine>(
    cpu: &Cpu<'_, M>,
    object: &Object,
    name: &AtomicU64,
    frame: FrameNumber,
) -> bool {
    let noted =
        !object.lacks_charge(name, frame) && Object::try_mark_dirty(name, frame) == Mark::Done;
    if !noted {
        // SAFETY: drops the reference of a mapping which was never installed.
        unsafe { cpu.put_unmapped(frame) };
    }
    noted
}
