//! The pages of an object: how a page is found, added, read, written and freed.

use super::charge::{Charges, take_out};
use super::object::{NoPage, Object};
use super::read::{Fetched, Lack, Reach};
use super::root::Top;
use crate::addr::{FrameNumber, PAGE_SHIFT};
use crate::error::Errno;
use crate::fault::prepared::{Prepared, Preparing};
use crate::fault::table;
use crate::fault::ticket::{Abort, Ticket};
use crate::frame::{FrameMeta, FrameUse};
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
    /// Removes the pages of `range` from the object: they read as zeros from now on, except through
    /// mappings that are not [revoked](crate::Space::revoke). Frames without mappings are freed;
    /// the object's tables stay. For an object with a store, changes that were not written back are
    /// lost, and the pages are read again; to make a hole, use [`punch`](Shared::punch).
    pub fn free_pages<M: Machine>(&self, cpu: &Cpu<'_, M>, range: Range<u64>) {
        self.check_vm(cpu);
        // New pages in their place may become folios.
        self.unfit.store(0, Ordering::Relaxed);
        let charges = Charges::of(self.charged, self.is_stored());
        // SAFETY: the object's tables are unlinked only in `end`, when no share is left.
        unsafe { Self::free_below(cpu, self.top(), range, charges) };
        // Programs may still see pages that were evicted, and are not to be revoked: nothing maps
        // them.
        if !lost(Mutant::CutSettles) {
            cpu.flush_if_pending(&self.pending);
        }
    }

    /// Takes the pages of `range` out of the tables below `top`, the root of an object with these
    /// `charges`.
    ///
    /// # Safety
    /// The tables stay linked.
    pub(super) unsafe fn free_below<M: Machine>(
        cpu: &Cpu<'_, M>,
        top: Top,
        range: Range<u64>,
        charges: Charges,
    ) {
        let put = |leaves: Leaves<'_>| {
            if let Leaves::Pages { slots, .. } = leaves {
                for slot in slots.iter().filter(|slot| !node::load(slot).is_none()) {
                    let old = take_out(cpu, slot, charges);
                    if old.is_present() {
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
    }

    /// Returns whether the page at `index` is present, because it was written or mapped.
    pub fn has_page<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64) -> bool {
        self.check_vm(cpu);
        // A page that is moving into a folio counts as present throughout.
        self.slot(cpu, index).is_some_and(|slot| protocol::wait_and_load(slot, cpu).is_present())
    }

    /// Counts the pages that are present.
    pub fn resident_pages<M: Machine>(&self, cpu: &Cpu<'_, M>) -> u64 {
        let mut pages = 0;
        self.each_resident(cpu, |_, _| pages += 1);
        pages
    }

    /// Calls `tell` for each present page with its frame, and with whether the page is
    /// [dirty](Self::is_dirty). The page may leave during the call.
    pub fn each_resident<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        mut tell: impl FnMut(FrameNumber, bool),
    ) {
        self.check_vm(cpu);
        let each = |leaves: Leaves<'_>| {
            if let Leaves::Pages { slots, .. } = leaves {
                for entry in slots.iter().map(|slot| protocol::wait_and_load(slot, cpu)) {
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

    /// Returns the entry of the page at `index`, if its table exists.
    pub(crate) fn slot<'v, M: Machine>(
        &self,
        cpu: &Cpu<'v, M>,
        index: u64,
    ) -> Option<&'v AtomicU64> {
        Some(&self.slots(cpu, index)?[node::index(index << PAGE_SHIFT, LAST)])
    }

    /// Returns the entries of the table of the page at `index`, if the table exists.
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

    /// Returns the page at `index` with a reference for the caller, if the page is present. The
    /// caller owns a share of the object, or has found a share in a VMA.
    pub(crate) fn get<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64) -> Option<FrameNumber> {
        Self::refer_settled(cpu, self.slot(cpu, index)?)
    }

    /// As [`refer_to_copy`](Self::refer_to_copy), after waiting until no CPU holds the entry: a
    /// page that is [moving into a folio](super::folio) is present, although its entry is busy. For
    /// a caller that treats `None` as a page of zeros, and holds no entry.
    #[inline(always)]
    pub(crate) fn refer_settled<M: Machine>(
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
    ) -> Option<FrameNumber> {
        Self::refer_to_copy(cpu, slot).or_else(|| Self::refer_later(cpu, slot))
    }

    /// The slow path of [`refer_settled`](Self::refer_settled), if the first read found no page.
    #[cold]
    #[inline(never)]
    fn refer_later<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64) -> Option<FrameNumber> {
        while protocol::wait_and_load(slot, cpu).is_present() {
            let found = Self::refer_to_copy(cpu, slot);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Returns the page named by `slot`, an entry of an object, with a reference for the caller;
    /// `None` if the entry names no page.
    #[inline]
    pub(crate) fn refer_to_copy<M: Machine>(
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
    ) -> Option<FrameNumber> {
        Self::refer(cpu, slot, FrameMeta::get_ref_unless_zero)
    }

    /// Returns the page named by `slot`, an entry of an object, with a reference for a mapping;
    /// `None` if the entry names no page or the page has the maximum number of mappings.
    #[inline(always)]
    pub(crate) fn refer_to_map<M: Machine>(
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
    ) -> Option<FrameNumber> {
        Self::refer(cpu, slot, FrameMeta::get_mapping_unless_zero)
    }

    /// Returns whether the page named by `slot` has the maximum number of mappings.
    pub(crate) fn is_full<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64) -> bool {
        let seen = node::load(slot);
        seen.is_present() && cpu.vm().frames.meta(seen.frame()).is_full()
    }

    /// Takes a reference with `take` to the page named by `slot`, an entry of an object; `None` if
    /// the entry names no page or `take` fails.
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
                // The page is about to leave, or has the maximum number of references.
                if meta.is_referred_to() && node::load(slot) == seen {
                    return None;
                }
                continue;
            }
            if node::load(slot) == seen || lost(Mutant::ReferLooksAgain) {
                return Some(frame);
            }
            // SAFETY: drops the reference taken above, which never was a mapping.
            unsafe { cpu.put_unmapped(frame) };
        }
    }

    /// Returns the last-level table of the page at `index`, after adding the page if it was
    /// missing. The page may leave again at any time. The caller owns a share of the object, or has
    /// found a share in a VMA.
    ///
    /// # Errors
    /// The reason why there is no page.
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

    /// The slow path of [`page`](Self::page), if the first read found no page.
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
            if protocol::wait_and_load(slot, cpu).is_present() {
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
            if let Err(full) = self.charge(cpu) {
                held.revert();
                prepared.keep_zeroed(frame);
                return Err(full);
            }
            let number = cpu.vm().frames.publish(frame, FrameUse::Shared, self.anchor(), index);
            held.commit(Entry::leaf(number));
            return Ok(slots);
        }
    }

    /// Returns the last-level table of the page at `index`, and makes it if necessary. The caller
    /// owns a share of the object, or has found a share in a VMA.
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
                        protocol::wait_and_load(slot, cpu);
                        continue;
                    }
                    // Tables stay linked, for any length.
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
    /// Lends the [`PAGE_SIZE`](crate::PAGE_SIZE) bytes of the page at `index` to `read`; `None` if
    /// the page is missing, which reads as zeros, or beyond the end. Programs may store to the page
    /// concurrently. For an object with a store, the page is first read from the store.
    ///
    /// `read` may make calls and faults, but must return on the same CPU.
    ///
    /// # Errors
    /// Only for an object with a store; `read` was not called. `EAGAIN`: the page is being read,
    /// and [`Cpu::pending_read`] returns the read to wait for. `ENOMEM`; and the store's error.
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

    /// Lends the [`PAGE_SIZE`](crate::PAGE_SIZE) bytes of the page at `index` to `write`, after
    /// adding the page if it was missing. Programs may load and store the bytes concurrently. For
    /// an object with a store, the page is first read from the store, and is dirty afterwards. To
    /// overwrite a whole page, use [`overwrite_page`](Self::overwrite_page), which does not read
    /// it.
    ///
    /// `write` may make calls and faults, but must return on the same CPU.
    ///
    /// # Errors
    /// `EFBIG`: `index` is beyond the end. `ENOMEM`. `ENOSPC`: the object is charged, and the limit
    /// is reached. For an object with a store, also the errors of [`read_page`](Self::read_page).
    /// `write` was not called.
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
                // Other CPUs see the page, too: a reference is taken as for any other page.
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
    /// `EAGAIN`: the page is being read. `ENOMEM`, and the store's error.
    fn fetch_now<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64) -> Result<(), Errno> {
        match self.fetch(cpu, index, Reach::Block(index)) {
            // The caller retries and finds the new end.
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
    /// Lends the page at `index` to `write`, as [`write_page`](Shared::write_page) does, if it is
    /// there. The page is charged whatever the limit.
    pub(super) fn write_present<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        write: impl FnOnce(*mut u8) -> R,
    ) -> Option<R> {
        let slot = self.slot(cpu, index)?;
        let lent = Lent::new(cpu, Self::refer_settled(cpu, slot)?);
        self.charge_always(cpu, slot);
        Some(self.write_frame(cpu, index, lent.keep(), write))
    }

    /// Charges the page at `index`, which is in `frame`, and lends it to `write`. Takes over the
    /// caller's reference.
    ///
    /// # Errors
    /// `ENOSPC`: the page would become dirty, and the limit of charged pages is reached.
    pub(super) fn write_charged<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        frame: FrameNumber,
        write: impl FnOnce(*mut u8) -> R,
    ) -> Result<R, Errno> {
        let lent = Lent::new(cpu, frame);
        self.charge_store(cpu, self.slot(cpu, index)).map_err(|_| Errno::ENOSPC)?;
        Ok(self.write_frame(cpu, index, lent.keep(), write))
    }

    /// Lends the page at `index`, which is in `frame`, to `write`. Takes over the reference.
    fn write_frame<M: Machine, R>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        frame: FrameNumber,
        write: impl FnOnce(*mut u8) -> R,
    ) -> R {
        let lent = Lent::new(cpu, frame);
        // After a migration programs may still use the page's old frame. From now on the reference
        // keeps the page in this frame.
        cpu.flush_if_pending(&self.pending);
        let _stored = self.is_stored().then(|| StoredTo { cpu, object: self, index, frame });
        write(lent.bytes())
    }
}

/// The kernel stores to a page of an object with a store. The drop marks the page dirty, also if
/// the kernel's closure panics after a part. A page of a charged object is dirty already, or has
/// left.
struct StoredTo<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    object: &'a Object,
    index: u64,
    frame: FrameNumber,
}

impl<M: Machine> Drop for StoredTo<'_, '_, M> {
    fn drop(&mut self) {
        self.object.mark_dirty(self.cpu, self.index, self.frame);
    }
}

/// A page with a transient reference, which the drop releases.
pub(crate) struct Lent<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    frame: FrameNumber,
}

impl<'a, 'v, M: Machine> Lent<'a, 'v, M> {
    /// Wraps the page in `frame`, and takes over a reference of the caller.
    pub(super) const fn new(cpu: &'a Cpu<'v, M>, frame: FrameNumber) -> Self {
        Self { cpu, frame }
    }

    /// Returns the frame.
    pub(crate) const fn frame(&self) -> FrameNumber {
        self.frame
    }

    /// Returns the reference to the caller.
    pub(crate) fn keep(self) -> FrameNumber {
        let frame = self.frame;
        core::mem::forget(self);
        frame
    }

    /// Returns the page in `frame` with a new reference, unless the last reference was dropped.
    /// Afterwards the caller must check, by the entry that named the frame, that it still is the
    /// right page.
    pub(crate) fn try_new(cpu: &'a Cpu<'v, M>, frame: FrameNumber) -> Option<Self> {
        cpu.vm().frames.meta(frame).get_ref_unless_zero().then(|| Self { cpu, frame })
    }

    /// Returns the page's bytes, which belong to the page while this value lives.
    pub(crate) fn bytes(&self) -> *mut u8 {
        self.cpu.vm().machine().frame_bytes(self.frame)
    }
}

impl<M: Machine> Drop for Lent<'_, '_, M> {
    fn drop(&mut self) {
        // SAFETY: drops the transient reference, which never was a mapping.
        unsafe { self.cpu.put_unmapped(self.frame) };
    }
}
