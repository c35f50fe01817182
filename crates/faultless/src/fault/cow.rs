//! A write to a page that is mapped read-only in a writable VMA: copy-on-write, or
//! reuse by the last owner.

use super::{Attempt, FaultKind};
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::fault::prepared::Prepared;
use crate::fault::ticket::{Abort, overtaken};
use crate::file::{Charged, Mark, Object};
use crate::frame::{FrameMeta, Kind, Use};
use crate::machine::Machine;
use crate::space::batch::shoot;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::Wait;
use crate::table::Entry;
use crate::table::{node, protocol};

impl<'c, M: Machine> Attempt<'c, '_, M> {
    /// Makes the page behind `seen`, a present entry that forbids the store, writable for this space
    /// alone. `None`: the entry changed first.
    pub(super) fn write_protected(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
        seen: Entry,
    ) -> Result<Option<FaultKind>, Abort> {
        if !self.vma.area.is_private() {
            return self.unprotect(slot, seen);
        }
        if self.cpu.vm().maps_zeros(seen) {
            return self.replace_zero_page(prepared, slot, seen);
        }
        // An object's page with one reference is still the object's, and never becomes this VMA's own.
        let meta = self.cpu.vm().frames.meta(seen.frame());
        if self.vma.area.memory.is_anonymous() || meta.kind() == Kind::Used(Use::Anon) {
            match self.is_only_mapping(meta) {
                Some(true) => return self.reuse(slot, seen),
                Some(false) => {}
                None => return Ok(None),
            }
        }
        self.copy(prepared, slot, seen)
    }

    /// Whether the only mapping of an anonymous page is this one; `None` where that will be clear in a moment.
    #[inline(always)]
    pub(super) fn is_only_mapping(self, meta: &FrameMeta) -> Option<bool> {
        if meta.refs() == 1 {
            return Some(true);
        }
        if !meta.is_pinned() {
            return Some(false);
        }
        // Either a fault is copying a pinned page, and will give up; or a pin was taken of a page that is shared, and will be
        // given up. Neither lasts. A pin by itself does not say that there is no other mapping.
        self.cpu.wait(0);
        None
    }

    /// Makes the page of the only mapping writable. Two operations may take a reference meanwhile, and both go
    /// through this entry: a fork, which changes the VMA's sequence; and a fault that copies the page,
    /// which drops its copy when it finds the entry changed. The reference count is read again all the
    /// same: a migration of the page away and back would leave the entry as it was, and
    /// changes no sequence.
    fn reuse(self, slot: &AtomicU64, seen: Entry) -> Result<Option<FaultKind>, Abort> {
        self.prepare_anon_vma()?;
        let pending = &self.space.core.pending;
        // Other CPUs may see the page in a frame that it left.
        self.cpu.settle(pending);
        let Ok(held) = protocol::pin(slot, seen, self.cpu) else {
            return self.outrun();
        };
        if self.cpu.is_pending(pending) && !lost(Mutant::StoreLooksAgain) {
            // It left another meanwhile.
            held.revert();
            return Ok(None);
        }
        let meta = self.cpu.vm().frames.meta(seen.frame());
        if !self.ticket.is_valid() {
            held.revert();
            return Err(overtaken(self.cpu, self.space, self.page, slot));
        }
        if meta.refs() != 1 {
            held.revert();
            return Ok(None);
        }
        // The page belongs to this space alone now, wherever it was made.
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

    /// Allows stores through an entry whose frame may be written through any mapping. A page of a file with a store becomes dirty.
    fn unprotect(self, slot: &AtomicU64, seen: Entry) -> Result<Option<FaultKind>, Abort> {
        let pending = self.vma.area.memory.object().map(|object| &object.pending);
        // Other CPUs may see the page in a frame that it left.
        pending.into_iter().for_each(|pending| self.cpu.settle(pending));
        let mut charge = self.charge_store()?;
        let Ok(held) = protocol::pin(slot, seen, self.cpu) else {
            return self.outrun();
        };
        let again = !lost(Mutant::StoreLooksAgain);
        if again && pending.is_some_and(|pending| self.cpu.is_pending(pending)) {
            // It left another meanwhile.
            held.revert();
            return Ok(None);
        }
        if !self.ticket.is_valid() {
            held.revert();
            return Err(overtaken(self.cpu, self.space, self.page, slot));
        }
        if let Some(name) = busy_name(self, seen, &mut charge) {
            held.revert();
            // Held by this fault, the entry might be what the other CPU waits for.
            protocol::look(name, self.cpu);
            return Ok(None);
        }
        held.commit(seen.writable_dirty());
        self.cpu.count(Counter::SharedPage);
        Ok(Some(FaultKind::Shared))
    }

    /// Charges the page that a store makes dirty, if its object is charged.
    fn charge_store(self) -> Result<Charged<'c>, Abort> {
        let area = &self.vma.area;
        let object =
            area.memory.object().filter(|object| object.is_stored() && object.is_charged());
        let Some(object) = object else { return Ok(Charged::NONE) };
        let name = object.slot(self.cpu, area.index_of(self.page));
        Ok(object.charge_store(self.cpu, name)?)
    }

    /// The first write to a page that was only read so far.
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
            return self.outrun();
        };
        if !self.ticket.is_valid() {
            held.revert();
            prepared.keep_zeroed(frame);
            return Err(overtaken(self.cpu, self.space, self.page, slot));
        }
        // While the entry is busy: no CPU may read zeros here after another has stored.
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

    /// The page is shared with another space, or an object's: a copy of it.
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
        // This reference keeps the frame from being reused while it is copied. So if the entry, which no writer has
        // changed meanwhile, still names the frame when the fault takes the entry, it did so all the time. Otherwise the
        // copy may be of another owner's data, and is dropped.
        if !meta.get_ref_unless_zero() {
            return self.outrun();
        }
        let put = || {
            // SAFETY: the reference taken above, dropped once on each way out. It never was a mapping, and
            // a mapping's reference is dropped only after its flush.
            unsafe { self.cpu.put_unmapped(source) };
        };
        let Some(frame) = prepared.clean(self.cpu) else {
            put();
            return Err(Abort::NoMemory);
        };
        // SAFETY: the fresh frame is ours; the source is referenced.
        unsafe { vm.machine().copy_frame(frame.number(), source) };
        let Ok(held) = protocol::take(slot, seen, self.cpu) else {
            put();
            prepared.keep_clean(frame);
            return self.outrun();
        };
        if !self.ticket.is_valid() {
            held.revert();
            put();
            prepared.keep_clean(frame);
            return Err(overtaken(self.cpu, self.space, self.page, slot));
        }
        // Pinned since it was looked at: the page is this space's own by now. The pin looks at the entry again, as this looks
        // at the pins again, and at least one of the two finds the other.
        let own = meta.kind() == Kind::Used(Use::Anon);
        if own && meta.is_pinned() && !lost(Mutant::CopyLooksAtPins) {
            held.revert();
            put();
            prepared.keep_clean(frame);
            return Ok(None);
        }
        // While the entry is busy: no CPU may read the old page once another may store to the new.
        if !lost(Mutant::CopyFlush) {
            shoot(self.cpu, self.space, VirtRange::page(self.page));
        }
        let entry = self.own_leaf(frame.number());
        self.publish(frame);
        held.commit(entry);
        put();
        // SAFETY: the reference of the mapping that the entry was; flushed above.
        unsafe { self.cpu.put_unmapped(source) };
        self.cpu.count(Counter::CowCopy);
        Ok(Some(FaultKind::Copy))
    }
}

/// Marks the page behind `seen`, an entry that the fault holds, dirty if it is of a file with a store. Returns the page's entry in the object
/// where another CPU has that for a moment: then the page is not marked. The `charge` stays if the
/// page was clean.
#[inline(never)]
fn busy_name<'a, M: Machine>(
    attempt: Attempt<'a, '_, M>,
    seen: Entry,
    charge: &mut Charged<'_>,
) -> Option<&'a AtomicU64> {
    let area = &attempt.vma.area;
    let object = area.memory.object().filter(|object| object.is_stored())?;
    let name = object.slot(attempt.cpu, area.index_of(attempt.page))?;
    if object.lacks_charge(charge, name, seen.frame()) {
        let now = node::load(name);
        let is_it = now.is_present() && now.frame() == seen.frame();
        // Another page there was cut off; see below.
        return (now.is_locked() || is_it).then_some(name);
    }
    match Object::try_mark_dirty(name, seen.frame()) {
        // It was cut off. Until the mapping is revoked, which may be this CPU's to do, stores go on as through an entry that was
        // writable before.
        Mark::Done => {
            charge.keep();
            None
        }
        Mark::Was | Mark::Left => None,
        Mark::Busy => Some(name),
    }
}
