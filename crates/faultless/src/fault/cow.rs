//! Stores to a page that is mapped read-only in a writable VMA: copy-on-write, or reuse by the last
//! owner.

use super::{Attempt, FaultKind};
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::fault::prepared::Prepared;
use crate::fault::ticket::{Abort, why_invalid};
use crate::file::{Mark, Object};
use crate::frame::{FrameMeta, FrameUse, Kind};
use crate::machine::Machine;
use crate::space::batch::shoot;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::Wait;
use crate::table::Entry;
use crate::table::{node, protocol};

impl<'c, M: Machine> Attempt<'c, '_, M> {
    /// Makes the page behind `seen`, a present entry without write permission, writable for this
    /// space alone. `None`: the entry changed first.
    pub(super) fn write_protected(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
        seen: Entry,
    ) -> Result<Option<FaultKind>, Abort> {
        if !self.vma.is_private() {
            return self.unprotect(slot, seen);
        }
        if self.cpu.vm().maps_zeros(seen) {
            return self.replace_zero_page(prepared, slot, seen);
        }
        // An object's page with one reference still belongs to the object, and never becomes a
        // private page of this VMA.
        let meta = self.cpu.vm().frames.meta(seen.frame());
        if self.vma.memory().is_anonymous() || meta.kind() == Kind::Used(FrameUse::Anon) {
            match self.is_only_mapping(meta) {
                Some(true) => return self.reuse(slot, seen),
                Some(false) => {}
                None => return Ok(None),
            }
        }
        self.copy(prepared, slot, seen)
    }

    /// Returns whether this entry is the only mapping of an anonymous page; `None` if the caller
    /// should retry in a moment.
    #[inline(always)]
    pub(super) fn is_only_mapping(self, meta: &FrameMeta) -> Option<bool> {
        if meta.refs() == 1 {
            return Some(true);
        }
        if !meta.is_pinned() {
            return Some(false);
        }
        // Either a fault is copying a pinned page, and will abort; or a pin was taken of a shared
        // page, and will be released. Both states are short. A pin alone does not imply that there
        // is no second mapping.
        self.cpu.wait(0);
        None
    }

    /// Makes the page of the only mapping writable. Two operations can take a reference
    /// concurrently, and both read this entry: a fork, which changes the VMA's sequence; and a
    /// fault that copies the page, which drops the copy when it finds the entry changed. The
    /// reference count is still read again: a migration of the page to another frame and back
    /// leaves the same entry value and changes no sequence.
    fn reuse(self, slot: &AtomicU64, seen: Entry) -> Result<Option<FaultKind>, Abort> {
        self.prepare_anon_vma()?;
        let pending = &self.space.core.pending;
        // After a migration other CPUs may still use the old frame of the page.
        self.cpu.flush_if_pending(pending);
        let Ok(held) = protocol::pin(slot, seen, self.cpu) else {
            return self.entry_changed();
        };
        if self.cpu.is_pending(pending) && !lost(Mutant::StoreLooksAgain) {
            // The page was migrated again in the meantime.
            held.revert();
            return Ok(None);
        }
        let meta = self.cpu.vm().frames.meta(seen.frame());
        if !self.ticket.is_valid() {
            held.revert();
            return Err(why_invalid(self.cpu, self.space, self.page, slot));
        }
        if meta.refs() != 1 {
            held.revert();
            return Ok(None);
        }
        // The page now belongs to this space alone, whichever space created the page.
        let (anchor, index) = (self.space.anchor(), self.page >> PAGE_SHIFT);
        if meta.anchor.load(Ordering::Relaxed) != anchor {
            meta.anchor.store(anchor, Ordering::Relaxed);
        }
        if meta.index.load(Ordering::Relaxed) != index {
            meta.index.store(index, Ordering::Relaxed);
        }
        held.commit(seen.writable_dirty());
        self.cpu.count(Counter::CowReuse);
        Ok(Some(FaultKind::Reuse))
    }

    /// Allows stores through an entry whose frame may be written through any mapping. A page of a
    /// file with a store becomes dirty.
    fn unprotect(self, slot: &AtomicU64, seen: Entry) -> Result<Option<FaultKind>, Abort> {
        let pending = self.vma.memory().object().map(|object| &object.pending);
        // After a migration other CPUs may still use the old frame of the page.
        pending.into_iter().for_each(|pending| self.cpu.flush_if_pending(pending));
        self.charge_store()?;
        let Ok(held) = protocol::pin(slot, seen, self.cpu) else {
            return self.entry_changed();
        };
        let again = !lost(Mutant::StoreLooksAgain);
        if again && pending.is_some_and(|pending| self.cpu.is_pending(pending)) {
            // The page was migrated again in the meantime.
            held.revert();
            return Ok(None);
        }
        if !self.ticket.is_valid() {
            held.revert();
            return Err(why_invalid(self.cpu, self.space, self.page, slot));
        }
        if let Some(name) = busy_name(self, seen) {
            held.revert();
            // Wait only after releasing the entry: the other CPU may be waiting for it.
            protocol::wait_and_load(name, self.cpu);
            return Ok(None);
        }
        held.commit(seen.writable_dirty());
        self.cpu.count(Counter::SharedPage);
        Ok(Some(FaultKind::Shared))
    }

    /// Charges the page that a store makes dirty, if its object is charged.
    fn charge_store(self) -> Result<(), Abort> {
        let area = self.vma.area();
        let object =
            area.memory.object().filter(|object| object.is_stored() && object.is_charged());
        let Some(object) = object else { return Ok(()) };
        let name = object.slot(self.cpu, area.index_of(self.page));
        Ok(object.charge_store(self.cpu, name)?)
    }

    /// Serves the first store to a page that maps the zero page.
    pub(super) fn replace_zero_page(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
        seen: Entry,
    ) -> Result<Option<FaultKind>, Abort> {
        self.prepare_anon_vma()?;
        let frame = prepared.zeroed(self.cpu).ok_or(Abort::NoMemory)?;
        let Ok(held) = protocol::take(slot, seen, self.cpu) else {
            prepared.keep_zeroed(frame);
            return self.entry_changed();
        };
        if !self.ticket.is_valid() {
            held.revert();
            prepared.keep_zeroed(frame);
            return Err(why_invalid(self.cpu, self.space, self.page, slot));
        }
        // The flush comes while the entry is busy: no CPU may read zeros here after another CPU has
        // stored.
        if !lost(Mutant::ZeroPageFlush) {
            shoot(self.cpu, self.space, VirtRange::page(self.page));
        }
        let entry = self.own_leaf(frame.number());
        self.publish(frame);
        held.commit(entry);
        self.cpu.add_resident(self.space, 1);
        self.cpu.count(Counter::CowCopy);
        Ok(Some(FaultKind::Copy))
    }

    /// Maps a copy of a page that is shared with another space or belongs to an object.
    pub(super) fn copy(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
        seen: Entry,
    ) -> Result<Option<FaultKind>, Abort> {
        self.prepare_anon_vma()?;
        let vm = self.cpu.vm();
        let source = seen.frame();
        let meta = vm.frames.meta(source);
        // This reference prevents reuse of the frame during the copy. No writer changes the entry
        // in the meantime, so if the entry still names the frame when the fault locks the entry, it
        // named the frame throughout. Otherwise the copy may contain the data of another owner, and
        // is dropped.
        if !meta.get_ref_unless_zero() {
            return self.entry_changed();
        }
        let put = || {
            // SAFETY: drops the reference taken above, once on each path. The reference was never a
            // mapping's; a mapping's reference is dropped only after its flush.
            unsafe { self.cpu.put_unmapped(source) };
        };
        let Some(frame) = prepared.clean(self.cpu) else {
            put();
            return Err(Abort::NoMemory);
        };
        // SAFETY: the new frame is unpublished and belongs to this fault; the source is referenced.
        unsafe { vm.machine().copy_frame(frame.number(), source) };
        let Ok(held) = protocol::take(slot, seen, self.cpu) else {
            put();
            prepared.keep_clean(frame);
            return self.entry_changed();
        };
        if !self.ticket.is_valid() {
            held.revert();
            put();
            prepared.keep_clean(frame);
            return Err(why_invalid(self.cpu, self.space, self.page, slot));
        }
        // The page was pinned after the first check, and is private to this space by now. The pin
        // reads the entry again, and this code reads the pin count again, so at least one of the
        // two detects the other.
        let own = meta.kind() == Kind::Used(FrameUse::Anon);
        if own && meta.is_pinned() && !lost(Mutant::CopyLooksAtPins) {
            held.revert();
            put();
            prepared.keep_clean(frame);
            return Ok(None);
        }
        // The flush comes while the entry is busy: no CPU may read the old page once another CPU
        // may store to the new page.
        if !lost(Mutant::CopyFlush) {
            shoot(self.cpu, self.space, VirtRange::page(self.page));
        }
        let entry = self.own_leaf(frame.number());
        self.publish(frame);
        held.commit(entry);
        put();
        // SAFETY: drops the reference of the mapping that the entry represented, after the flush
        // above.
        unsafe { self.cpu.put_unmapped(source) };
        self.cpu.count(Counter::CowCopy);
        Ok(Some(FaultKind::Copy))
    }
}

/// Marks the page behind `seen`, an entry that the fault holds, dirty if it is of a file with a
/// store. Returns the page's entry in the object where another CPU has that for a moment: then the
/// page is not marked.
#[inline(never)]
fn busy_name<'a, M: Machine>(attempt: Attempt<'a, '_, M>, seen: Entry) -> Option<&'a AtomicU64> {
    let area = attempt.vma.area();
    let object = area.memory.object().filter(|object| object.is_stored())?;
    let name = object.slot(attempt.cpu, area.index_of(attempt.page))?;
    if object.lacks_charge(name, seen.frame()) {
        let now = node::load(name);
        let is_it = now.is_present() && now.frame() == seen.frame();
        // If another page is there, this page was cut off by a truncation; see below.
        return (now.is_locked() || is_it).then_some(name);
    }
    match Object::try_mark_dirty(name, seen.frame()) {
        // It was cut off. Until the mapping is revoked, which may be this CPU's to do, stores go on
        // as through an entry that was writable before.
        Mark::Done | Mark::Left => None,
        Mark::Busy => Some(name),
    }
}
