//! Creation and end of an object.

use super::charge::Charges;
use super::length::Cut;
use super::object::{Object, Parts, Stored};
use super::root::{Root, Top};
use super::store::Store;
use super::write_back::{Turn, WriteErrors};
use crate::addr::PAGE_SIZE;
use crate::error::Errno;
use crate::frame::FrameUse;
use crate::heap::{Shared, try_box};
use crate::machine::Machine;
use crate::rmap::anchor::ObjectAnchor;
use crate::rmap::mapping::Mappings;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::tlb::deferred::Pending;
use crate::vm::Cpu;
use alloc::boxed::Box;

impl Object {
    /// Creates an object of `pages` pages of zeros. The kernel defines the meaning of `tag`, which
    /// listings contain ([`AreaInfo::tag`](crate::AreaInfo::tag)); 0 is unnamed memory.
    ///
    /// # Errors
    /// `EFBIG`: more than [`MAX_PAGES`](Self::MAX_PAGES). `ENOMEM`.
    pub fn try_new<M: Machine>(
        cpu: &Cpu<'_, M>,
        pages: u64,
        tag: u64,
    ) -> Result<Shared<Self>, Errno> {
        Self::make(cpu, pages, tag, None, false)
    }

    /// As [`try_new`](Self::try_new), but the pages are charged: the knob `file_limit` limits their
    /// number. A fault that would add a page beyond the limit fails with
    /// [`Bus`](crate::FaultError::Bus), a call with `ENOSPC`.
    ///
    /// # Errors
    /// As [`try_new`](Self::try_new).
    pub fn try_new_charged<M: Machine>(
        cpu: &Cpu<'_, M>,
        pages: u64,
        tag: u64,
    ) -> Result<Shared<Self>, Errno> {
        Self::make(cpu, pages, tag, None, true)
    }

    /// Creates an object of the contents of `store`, an [`Arc`](alloc::sync::Arc) or a [`Box`] of a
    /// [`BackingStore`](super::BackingStore), with the length of the store. `tag` is as with
    /// [`try_new`](Self::try_new).
    ///
    /// If the store is [read-only](super::BackingStore::is_read_only), dirty pages are charged like
    /// the pages of [`try_new_charged`](Self::try_new_charged), because they stay in memory.
    ///
    /// At any time there must be at most one object of a store, because each object has separate
    /// copies of the pages. Dirty pages are written back by [`write_back`](Shared::write_back), and
    /// finally when the object ends. This may be after the kernel has [released](Self::release) the
    /// object. So a kernel that may open the store again either writes back before the release, and
    /// the object then writes no page later; or it waits until the object has ended and dropped its
    /// share of the store.
    ///
    /// # Errors
    /// `EFBIG`: the store is longer than [`MAX_PAGES`](Self::MAX_PAGES). `ENOMEM`.
    pub fn of_store<M: Machine>(
        cpu: &Cpu<'_, M>,
        store: impl Into<Store>,
        tag: u64,
    ) -> Result<Shared<Self>, Errno> {
        let store = store.into();
        let (bytes, turn) = (store.len(), Turn::try_new(&*store)?);
        let charged = store.is_read_only();
        let errors = WriteErrors::default();
        let stored = Stored {
            store,
            bytes: AtomicU64::new(bytes),
            turn,
            cut: Cut::default(),
            errors,
            failed: AtomicU64::new(0),
        };
        Self::make(cpu, bytes.div_ceil(PAGE_SIZE), tag, Some(try_box(stored)?), charged)
    }

    fn make<M: Machine>(
        cpu: &Cpu<'_, M>,
        pages: u64,
        tag: u64,
        stored: Option<Box<Stored>>,
        charged: bool,
    ) -> Result<Shared<Self>, Errno> {
        if pages > Self::MAX_PAGES {
            return Err(Errno::EFBIG);
        }
        cpu.end_dropped();
        let place = cpu.vm().ended.place()?;
        let frame = cpu.alloc_table_or_wait()?;
        let level = Top::level_for(pages);
        let table = cpu.vm().frames.publish(frame, FrameUse::Table, 0, u64::from(level));
        let root = Root::new(Top { table, level });
        let identity = cpu.identity();
        let (pages, unfit) = (AtomicU64::new(pages), AtomicU64::new(0));
        let anchors = cpu.vm().anchors.clone();
        let anchor = ObjectAnchor::try_new(anchors, cpu).inspect_err(|_| {
            // SAFETY: no CPU has seen the table.
            unsafe { cpu.free_tables(table, level) };
        })?;
        let mappings = Mappings::default();
        let pending = Pending::default();
        let object = Self {
            root,
            pages,
            tag,
            identity,
            unfit,
            stored,
            charged,
            place,
            anchor,
            mappings,
            pending,
        };
        let object = Shared::try_new(object).inspect_err(|_| {
            // The object was dropped.
            cpu.end_dropped();
        })?;
        cpu.vm().anchors.lead_to(object.anchor.anchor(), &object, cpu);
        Ok(object)
    }

    /// Releases a share. With the last share the object ends; pages from which another CPU is
    /// copying end slightly later.
    ///
    /// The last share may belong to the subsystem: to a VMA until its grace period after an unmap
    /// is over, or to another CPU that accesses a page of the object to evict or move it. The end
    /// of a space does not wait for such a CPU. In this case the object ends later, and dirty pages
    /// are written to the store then. A kernel that uses the store in the meantime must [write
    /// back](Shared::write_back) first.
    pub fn release<M: Machine>(object: Shared<Self>, cpu: &Cpu<'_, M>) {
        object.check_vm(cpu);
        // Before the object moves, because the reverse map has a pointer to it.
        if let Some(last) = object.into_last_after(|object| object.anchor.give_up()) {
            last.destroy(cpu);
        }
    }

    /// Checks that `cpu` belongs to the subsystem that made this object. Every public operation
    /// calls this first.
    ///
    /// # Panics
    /// If the subsystems differ.
    #[inline]
    pub(crate) fn check_vm<M: Machine>(&self, cpu: &Cpu<'_, M>) {
        self.identity.check(cpu.identity());
    }

    /// Frees all pages and tables of the object.
    fn destroy<M: Machine>(mut self, cpu: &Cpu<'_, M>) {
        self.place.vacate();
        // SAFETY: the last share of the object is gone, so no other CPU can access its tables.
        unsafe { self.parts().end(cpu) };
    }
}

impl Parts {
    /// Writes back the dirty pages, if there is a store, and frees all pages and tables.
    ///
    /// # Safety
    /// Only the caller can access the tables.
    pub(crate) unsafe fn end<M: Machine>(self, cpu: &Cpu<'_, M>) {
        let Self { top, pages, stored, charged } = self;
        let is_stored = stored.is_some();
        // It is dropped last, also if the store panics.
        let charges = Charges::of(charged, is_stored);
        let mut ending = Ending { cpu, top, pages, charges, is_lost: is_stored };
        if let Some(stored) = stored {
            // No open file is left that could receive an error.
            ending.is_lost = stored.write_back(cpu, top, 0..pages, |_| {}).is_err();
        }
    }
}

/// The pages and tables of an object that ends. The drop frees them.
struct Ending<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    top: Top,
    pages: u64,
    charges: Charges,
    /// Whether some pages were not written back.
    is_lost: bool,
}

impl<M: Machine> Drop for Ending<'_, '_, M> {
    fn drop(&mut self) {
        let Self { cpu, top, pages, charges, is_lost } = *self;
        if is_lost {
            cpu.count(Counter::WriteBackLost);
        }
        // SAFETY: the promise of the caller of `Parts::end`.
        unsafe {
            Object::free_below(cpu, top, 0..pages, charges);
            cpu.free_tables(top.table, top.level);
        }
    }
}
