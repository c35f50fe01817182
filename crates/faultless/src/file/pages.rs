//! The pages of an object: how a page is found, added, read, written and freed.

use super::charge::Charged;
use super::object::{NoPage, Object};
use super::read::{Fetched, Lack, Reach};
use super::root::Top;
use crate::addr::{FrameNumber, PAGE_SHIFT};
use crate::error::Errno;
use crate::fault::prepared::{Prepared, Preparing};
use crate::fault::table;
use crate::fault::ticket::{Abort, Ticket};
use crate::frame::{FrameMeta, Use};
use crate::heap::Shared;
use crate::machine::Machine;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, ENTRIES, LAST};
use crate::table::protocol;
use crate::table::range::Leaves;
use crate::table::walk::Reached;
use crate::vm::Cpu;
use core::convert::Infallible;
use core::ops::Range;

impl Object {
    /// Takes the pages of `range` out of the object: they read as zeros from now on, except through
    /// mappings that are not [revoked](crate::Space::revoke). Frames that are not mapped are freed; the object's tables stay. Of an
    /// object with a store, what was not written back is lost, and the pages are read again; for a hole there is [`punch`](Shared::punch).
    pub fn free_pages<M: Machine>(&self, cpu: &Cpu<'_, M>, range: Range<u64>) {
        self.check_vm(cpu);
        // Pages that take their place may become folios.
        self.unfit.store(0, Ordering::Relaxed);
        // SAFETY: the object's tables are unlinked only in `end`, when no share is left.
        let freed = unsafe { Self::free_below(cpu, self.top(), range, self.is_stored()) };
        self.uncharge(cpu, freed);
        // Programs may still see pages that were evicted, and are not to be revoked: nothing maps them.
        if !lost(Mutant::CutSettles) {
            cpu.settle(&self.pending);
        }
    }

    /// Takes the pages of `range` out of the tables below `top`, the root of an object. Returns
    /// their number, or with `only_dirty` that of the dirty pages.
    ///
    /// # Safety
    /// The tables stay linked.
    pub(super) unsafe fn free_below<M: Machine>(
        cpu: &Cpu<'_, M>,
        top: Top,
        range: Range<u64>,
        only_dirty: bool,
    ) -> u64 {
        let mut freed = 0;
        let put = |leaves: Leaves<'_>| {
            if let Leaves::Pages { slots, .. } = leaves {
                for slot in slots.iter().filter(|slot| !node::load(slot).is_none()) {
                    let (old, _) = protocol::settle(slot, cpu, |_| Entry::NONE);
                    if old.is_present() {
                        freed += u64::from(!only_dirty || old.is_dirty());
                        // SAFETY: the object's own reference, which never was a mapping; those of
                        // the mappings are put when they are flushed.
                        unsafe { cpu.put_unmapped(old.frame()) };
                    }
                }
            }
            Ok::<(), Infallible>(())
        };
        // SAFETY: the caller's promise.
        let Ok(()) = unsafe { top.visit(cpu, range, put) };
        freed
    }

    /// Whether the page at `index` is there: it was written, or mapped.
    pub fn has_page<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64) -> bool {
        self.check_vm(cpu);
        // A page that moves into a folio is there all the time.
        self.slot(cpu, index).is_some_and(|slot| protocol::look(slot, cpu).is_present())
    }

    /// How many of its pages are there, by counting them.
    pub fn resident_pages<M: Machine>(&self, cpu: &Cpu<'_, M>) -> u64 {
        let mut pages = 0;
        self.each_resident(cpu, |_, _| pages += 1);
        pages
    }

    /// Calls `tell` for each of its pages that is there: with its frame, and whether it is [dirty](Self::is_dirty). The page may leave
    /// meanwhile.
    pub fn each_resident<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        mut tell: impl FnMut(FrameNumber, bool),
    ) {
        self.check_vm(cpu);
        let each = |leaves: Leaves<'_>| {
            if let Leaves::Pages { slots, .. } = leaves {
                for entry in slots.iter().map(|slot| protocol::look(slot, cpu)) {
                    if entry.is_present() {
                        tell(entry.frame(), self.is_stored() && entry.is_dirty());
                    }
                }
            }
            Ok::<(), Infallible>(())
        };
        // SAFETY: as in `free_pages`.
        let Ok(()) = unsafe { self.top().visit(cpu, 0..self.pages(), each) };
    }

    /// The entry of the page at `index`, if there is a table for it.
    pub(crate) fn slot<'v, M: Machine>(
        &self,
        cpu: &Cpu<'v, M>,
        index: u64,
    ) -> Option<&'v AtomicU64> {
        Some(&self.slots(cpu, index)?[node::index(index << PAGE_SHIFT, LAST)])
    }

    /// The entries of the table of the page at `index`, if there is one.
    #[inline(always)]
    pub(crate) fn slots<'v, M: Machine>(
        &self,
        cpu: &Cpu<'v, M>,
        index: u64,
    ) -> Option<&'v [AtomicU64; ENTRIES]> {
        // SAFETY: the object's tables are unlinked only in `end`, when no share is left.
        match unsafe { self.top().find(cpu.vm().machine(), index) } {
            Some(Reached::Last(slots)) => Some(slots),
            Some(Reached::Above { .. }) | None => None,
        }
    }

    /// The page at `index`, with a reference for the caller, if it is there. The caller owns a share of
    /// the object, or sees one in a VMA.
    pub(crate) fn get<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64) -> Option<FrameNumber> {
        Self::refer_settled(cpu, self.slot(cpu, index)?)
    }

    /// As [`refer_to_copy`](Self::refer_to_copy), once no CPU has the entry: a page that [moves into a folio](super::folio) is there, though
    /// its entry is busy. For a caller to which `None` is a zero page, and which holds no entry.
    #[inline(always)]
    pub(crate) fn refer_settled<M: Machine>(
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
    ) -> Option<FrameNumber> {
        Self::refer_to_copy(cpu, slot).or_else(|| Self::refer_later(cpu, slot))
    }

    /// The rest of that, where there is no page at the first look.
    #[cold]
    #[inline(never)]
    fn refer_later<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64) -> Option<FrameNumber> {
        while protocol::look(slot, cpu).is_present() {
            let found = Self::refer_to_copy(cpu, slot);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// The page that `slot`, an entry of an object, names, with a reference for the caller, if it names one.
    #[inline]
    pub(crate) fn refer_to_copy<M: Machine>(
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
    ) -> Option<FrameNumber> {
        Self::refer(cpu, slot, FrameMeta::get_ref_unless_zero)
    }

    /// The page that `slot`, an entry of an object, names, with a reference for a mapping of it; if it names
    /// one, and the page has not as many mappings as can be counted.
    #[inline(always)]
    pub(crate) fn refer_to_map<M: Machine>(
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
    ) -> Option<FrameNumber> {
        Self::refer(cpu, slot, FrameMeta::get_mapping_unless_zero)
    }

    /// Whether the page that `slot` names has as many mappings as can be counted.
    pub(crate) fn is_full<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64) -> bool {
        let seen = node::load(slot);
        seen.is_present() && cpu.vm().frames.meta(seen.frame()).is_full()
    }

    /// One more reference to the page that `slot`, an entry of an object, names, if it names one, and
    /// `take` can take one.
    #[inline(always)]
    fn refer<M: Machine>(
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
        take: impl Fn(&FrameMeta) -> bool,
    ) -> Option<FrameNumber> {
        loop {
            let seen = node::load(slot);
            if !seen.is_present() {
                return None;
            }
            let frame = seen.frame();
            let meta = cpu.vm().frames.meta(frame);
            if !take(meta) {
                // On its way out; or it has as many references as can be counted.
                if meta.is_referred_to() && node::load(slot) == seen {
                    return None;
                }
                continue;
            }
            if node::load(slot) == seen || lost(Mutant::ReferLooksAgain) {
                return Some(frame);
            }
            // SAFETY: the reference taken above, which never was a mapping.
            unsafe { cpu.put_unmapped(frame) };
        }
    }

    /// The last-level table of the page at `index`, in which that page is, made if it was not there; it
    /// may leave again at any time. The caller owns a share of the object, or sees one in a VMA.
    ///
    /// # Errors
    /// Why there is no page.
    pub(crate) fn page<'v, M: Machine>(
        &self,
        cpu: &Cpu<'v, M>,
        index: u64,
        prepared: &mut Prepared,
    ) -> Result<&'v [AtomicU64; ENTRIES], NoPage> {
        if index >= self.pages() {
            return Err(NoPage::Beyond);
        }
        if let Some(slots) = self.slots(cpu, index) {
            let seen = node::load(&slots[index as usize % ENTRIES]);
            if seen.is_present() && !seen.is_locked() {
                return Ok(slots);
            }
        }
        self.make_page(cpu, index, prepared)
    }

    /// The rest of [`page`](Self::page), where the page is not there at the first look.
    #[inline(never)]
    fn make_page<'v, M: Machine>(
        &self,
        cpu: &Cpu<'v, M>,
        index: u64,
        prepared: &mut Prepared,
    ) -> Result<&'v [AtomicU64; ENTRIES], NoPage> {
        let slots = self.table(cpu, index, prepared)?;
        let slot = &slots[index as usize % ENTRIES];
        loop {
            if protocol::look(slot, cpu).is_present() {
                return Ok(slots);
            }
            if self.is_stored() {
                return Err(NoPage::Absent);
            }
            let frame = prepared.zeroed_seldom(cpu).ok_or(NoPage::OutOfMemory)?;
            let Ok(held) = protocol::take(slot, Entry::NONE, cpu) else {
                prepared.keep_zeroed(frame);
                continue;
            };
            // The length is the sequence.
            if index >= self.pages() && !lost(Mutant::ObjectLooksAgain) {
                held.revert();
                prepared.keep_zeroed(frame);
                return Err(NoPage::Beyond);
            }
            // While the entry is held: no other CPU sees a charge that is dropped again for this page.
            let mut charge = match self.charge(cpu) {
                Ok(charge) => charge,
                Err(full) => {
                    held.revert();
                    prepared.keep_zeroed(frame);
                    return Err(full);
                }
            };
            let number = cpu.vm().frames.publish(frame, Use::Shared, self.anchor(), index);
            held.commit(Entry::leaf(number));
            charge.keep();
            return Ok(slots);
        }
    }

    /// The last-level table of the page at `index`, made if it was not there. The caller owns a share of
    /// the object, or sees one in a VMA.
    ///
    /// # Errors
    /// Beyond the end, or no frame for a table.
    pub(super) fn table<'v, M: Machine>(
        &self,
        cpu: &Cpu<'v, M>,
        index: u64,
        prepared: &mut Prepared,
    ) -> Result<&'v [AtomicU64; ENTRIES], NoPage> {
        if index >= self.pages() {
            return Err(NoPage::Beyond);
        }
        loop {
            let top = self.top();
            // SAFETY: the object's tables are unlinked only in `end`, when no share is left.
            match unsafe { top.find(cpu.vm().machine(), index) } {
                None => self.grow(cpu, top, prepared)?,
                Some(Reached::Above { slot, level, seen }) => {
                    if seen.is_locked() {
                        protocol::look(slot, cpu);
                        continue;
                    }
                    // Tables stay, whatever the length.
                    if table::publish(cpu, Ticket::held(), slot, level, prepared)
                        == Err(Abort::NoMemory)
                    {
                        return Err(NoPage::OutOfMemory);
                    }
                }
                Some(Reached::Last(slots)) => return Ok(slots),
            }
        }
    }
}

impl Shared<Object> {
    /// Lends the [`PAGE_SIZE`](crate::PAGE_SIZE) bytes of the page at `index` to `read`, or `None` where
    /// no page is there, which reads as zeros; beyond the end, too. Programs may be storing to them. Of an object with a store, the page is read from
    /// there first.
    ///
    /// `read` may make calls and faults, but must come back on the same CPU.
    ///
    /// # Errors
    /// Only of an object with a store; `read` was not called. `EAGAIN`: the page is being read, and [`Cpu::pending_read`] tells what
    /// to wait for. `ENOMEM`; and the store's error.
    pub fn read_page<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        read: impl FnOnce(Option<*const u8>) -> R,
    ) -> Result<R, Errno> {
        self.check_vm(cpu);
        let frame = loop {
            let slot = self.slot(cpu, index);
            match slot.and_then(|slot| Object::refer_settled(cpu, slot)) {
                None if self.is_stored() && index < self.pages() => self.fetch_now(cpu, index)?,
                found => {
                    slot.into_iter().for_each(|slot| Object::note_used(cpu, slot));
                    break found;
                }
            }
        };
        let Some(frame) = frame else {
            return Ok(read(None));
        };
        let lent = Lent::new(cpu, frame);
        Ok(read(Some(lent.bytes().cast_const())))
    }

    /// Lends the [`PAGE_SIZE`](crate::PAGE_SIZE) bytes of the page at `index`, made if it was not there,
    /// to `write`. Programs may be loading and storing them. Of an object with a store, the page is read from there first, and is to
    /// be written back afterwards. For a whole page there is [`overwrite_page`](Self::overwrite_page), which reads nothing.
    ///
    /// `write` may make calls and faults, but must come back on the same CPU.
    ///
    /// # Errors
    /// `EFBIG`: `index` is beyond the end. `ENOMEM`. `ENOSPC`: the object is charged, and the limit
    /// is reached. Of an object with a store, those of [`read_page`](Self::read_page), too. `write`
    /// was not called.
    pub fn write_page<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        write: impl FnOnce(*mut u8) -> R,
    ) -> Result<R, Errno> {
        self.check_vm(cpu);
        let mut prepared = Preparing::new(cpu);
        let frame = loop {
            if let Some(frame) = self.get(cpu, index) {
                break Ok(frame);
            }
            let made = {
                let _section = cpu.section();
                self.page(cpu, index, &mut prepared)
            };
            match made {
                // Others see it too: a reference is to be had as for any other.
                Ok(_) => {}
                Err(NoPage::Beyond) => break Err(Errno::EFBIG),
                Err(NoPage::Full) => break Err(Errno::ENOSPC),
                Err(NoPage::Absent) => match self.fetch_now(cpu, index) {
                    Ok(()) => {}
                    Err(errno) => break Err(errno),
                },
                Err(NoPage::OutOfMemory) if prepared.wait_for_one(cpu) => {}
                Err(NoPage::OutOfMemory) => break Err(Errno::ENOMEM),
            }
        };
        drop(prepared);
        self.write_charged(cpu, index, frame?, write)
    }

    /// [Fetches](Self::fetch) the page for a call of the kernel.
    ///
    /// # Errors
    /// `EAGAIN`: it is being read. `ENOMEM`, and the store's error.
    fn fetch_now<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64) -> Result<(), Errno> {
        match self.fetch(cpu, index, Reach::Block(index)) {
            // Who looks again finds the new end.
            Ok(Fetched::There) | Err(Lack::Beyond) => Ok(()),
            Ok(Fetched::Pending(pending)) => {
                cpu.set_pending(pending);
                Err(Errno::EAGAIN)
            }
            Err(lack) => Err(lack.into()),
        }
    }
}

impl Object {
    /// Lends the page at `index` to `write`, as [`write_page`](Shared::write_page) does, if it is there.
    pub(super) fn write_present<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        write: impl FnOnce(*mut u8) -> R,
    ) -> Option<R> {
        let charge = self.charge_always(cpu);
        self.get(cpu, index).map(|frame| self.write_frame(cpu, index, frame, charge, write))
    }

    /// Charges the page at `index`, which is in `frame`, and lends it to `write`. Takes over the
    /// reference.
    ///
    /// # Errors
    /// `ENOSPC`: the page would become dirty, and as many are charged as the limit allows.
    pub(super) fn write_charged<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        frame: FrameNumber,
        write: impl FnOnce(*mut u8) -> R,
    ) -> Result<R, Errno> {
        let lent = Lent::new(cpu, frame);
        let charge = self.charge_store(cpu, self.slot(cpu, index)).map_err(|_| Errno::ENOSPC)?;
        Ok(self.write_frame(cpu, index, lent.keep(), charge, write))
    }

    /// Lends the page at `index`, which is in `frame`, to `write`. Takes over the reference. The
    /// `charge` stays if the page was clean.
    fn write_frame<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        frame: FrameNumber,
        mut charge: Charged<'_>,
        write: impl FnOnce(*mut u8) -> R,
    ) -> R {
        let lent = Lent::new(cpu, frame);
        // Programs may see the page in a frame that it left. From now on the reference keeps it in this one.
        cpu.settle(&self.pending);
        // Before the closure, which may fault on this page itself. No page of a read-only store becomes clean again.
        if self.is_charged() && self.is_stored() && self.mark_dirty(cpu, index, frame) {
            charge.keep();
        }
        let _stored =
            self.is_stored().then(|| StoredTo { cpu, object: self, index, frame, charge });
        write(lent.bytes())
    }
}

/// The kernel stores to a page of an object with a store. The drop marks the page dirty, also if the kernel's closure panics after
/// a part. The charge stays if the page was clean.
struct StoredTo<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    object: &'a Object,
    index: u64,
    frame: FrameNumber,
    charge: Charged<'a>,
}

impl<M: Machine> Drop for StoredTo<'_, '_, M> {
    fn drop(&mut self) {
        if self.object.mark_dirty(self.cpu, self.index, self.frame) {
            self.charge.keep();
        }
    }
}

/// A page with a transient reference, which goes back when this is dropped.
pub(crate) struct Lent<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    frame: FrameNumber,
}

impl<'a, 'v, M: Machine> Lent<'a, 'v, M> {
    /// The page in `frame`, with a reference of the caller's, which this takes over.
    pub(super) const fn new(cpu: &'a Cpu<'v, M>, frame: FrameNumber) -> Self {
        Self { cpu, frame }
    }

    /// Its frame.
    pub(crate) const fn frame(&self) -> FrameNumber {
        self.frame
    }

    /// Gives the reference to the caller.
    pub(crate) fn keep(self) -> FrameNumber {
        let frame = self.frame;
        core::mem::forget(self);
        frame
    }

    /// The page in `frame`, unless it has lost its last reference. Whether it is the one that was looked for is the caller's
    /// to check afterwards, by the entry that named it.
    pub(crate) fn try_new(cpu: &'a Cpu<'v, M>, frame: FrameNumber) -> Option<Self> {
        cpu.vm().frames.meta(frame).get_ref_unless_zero().then(|| Self { cpu, frame })
    }

    /// Its bytes, which stay the page's as long as this.
    pub(crate) fn bytes(&self) -> *mut u8 {
        self.cpu.vm().machine().frame_bytes(self.frame)
    }
}

impl<M: Machine> Drop for Lent<'_, '_, M> {
    fn drop(&mut self) {
        // SAFETY: the transient reference, which never was a mapping.
        unsafe { self.cpu.put_unmapped(self.frame) };
    }
}
