//! The charge of file pages against the knob `file_limit`.
//!
//! A kernel makes an object [charged](Object::try_new_charged) if the object's pages stay in memory
//! until the object drops them: the files of a memory file system, and files whose store is
//! read-only. Each page of a charged object without a store is charged, and each dirty page of a
//! charged object with a read-only store. Pages that can be written back are not charged, because
//! reclaim frees them.
//!
//! A page is charged before its entry is committed, and uncharged after its entry was emptied. So
//! the count is never below the number of charged pages.

use super::object::{NoPage, Object};
use crate::addr::FrameNumber;
use crate::machine::Machine;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::node;
use crate::vm::{Cpu, Vm};
use core::sync::atomic::AtomicU64 as Count;

/// The number of charged pages.
#[derive(Debug, Default)]
pub(crate) struct Charge(Count);

impl Charge {
    /// Adds a page beyond any limit.
    fn add_always(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds a page unless `limit` pages are charged.
    fn add(&self, limit: u64) -> bool {
        let more = |pages| (pages < limit).then_some(pages + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Removes `pages` pages.
    pub(super) fn remove(&self, pages: u64) {
        self.0.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Returns the number of charged pages.
    pub(crate) fn pages(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A charge for one page, which is removed again unless the page is [kept](Charged::keep).
#[derive(Debug)]
pub(crate) struct Charged<'a>(Option<&'a Charge>);

impl Charged<'_> {
    /// Holds no charge.
    pub(crate) const NONE: Self = Self(None);

    /// Keeps the charge, because the page is in the object.
    pub(crate) const fn keep(&mut self) {
        self.0 = None;
    }
}

impl Drop for Charged<'_> {
    fn drop(&mut self) {
        if let Some(charge) = self.0 {
            charge.remove(1);
        }
    }
}

impl<M: Machine> Vm<M> {
    /// Returns the number of pages that are charged against the knob `file_limit`.
    pub fn charged_pages(&self) -> u64 {
        self.charge.pages()
    }
}

impl Object {
    /// Returns whether the pages of this object are charged.
    pub const fn is_charged(&self) -> bool {
        self.charged
    }

    /// Charges a page if the object is charged.
    ///
    /// # Errors
    /// [`NoPage::Full`].
    pub(super) fn charge<'v, M: Machine>(&self, cpu: &Cpu<'v, M>) -> Result<Charged<'v>, NoPage> {
        if !self.charged {
            return Ok(Charged::NONE);
        }
        let vm = cpu.vm();
        if !vm.charge.add(vm.knobs.file_limit()) {
            return Err(NoPage::Full);
        }
        Ok(Charged(Some(&vm.charge)))
    }

    /// Charges the page in `slot`, an entry of an object with a store, if a store will make the
    /// page dirty.
    ///
    /// # Errors
    /// [`NoPage::Full`].
    #[inline]
    pub(crate) fn charge_store<'v, M: Machine>(
        &self,
        cpu: &Cpu<'v, M>,
        slot: Option<&AtomicU64>,
    ) -> Result<Charged<'v>, NoPage> {
        if !self.charged
            || !self.is_stored()
            || slot.is_some_and(|slot| node::load(slot).is_dirty())
        {
            return Ok(Charged::NONE);
        }
        self.charge(cpu)
    }

    /// Returns whether the page in `frame` could become dirty without a charge. The caller has a
    /// reference to the frame, and took `charge` for an earlier page with the entry `name`, which
    /// may have been dirty. No page of a read-only store becomes clean again.
    pub(crate) fn lacks_charge(
        &self,
        charge: &Charged<'_>,
        name: &AtomicU64,
        frame: FrameNumber,
    ) -> bool {
        if !self.charged || charge.0.is_some() {
            return false;
        }
        let now = node::load(name);
        !(now.is_present() && now.frame() == frame && now.is_dirty())
    }

    /// Charges a page beyond any limit, for a page that the kernel must store to: the kernel clears
    /// the rest of a page beyond the end of the object.
    pub(super) fn charge_always<'v, M: Machine>(&self, cpu: &Cpu<'v, M>) -> Charged<'v> {
        let charge = &cpu.vm().charge;
        if !self.charged || !self.is_stored() {
            return Charged::NONE;
        }
        charge.add_always();
        Charged(Some(charge))
    }

    /// Removes the charge of `pages` pages that left the object.
    pub(super) fn uncharge<M: Machine>(&self, cpu: &Cpu<'_, M>, pages: u64) {
        if self.charged {
            cpu.vm().charge.remove(pages);
        }
    }
}
