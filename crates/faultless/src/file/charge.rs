//! The charge of file pages against the knob `file_limit`.
//!
//! A kernel makes an object [charged](Object::try_new_charged) if the object's pages stay in memory
//! until the object drops them: the files of a memory file system, and files whose store is
//! read-only. Each page of a charged object without a store is charged, and each dirty page of a
//! charged object with a read-only store. Pages that can be written back are not charged, because
//! reclaim frees them.
//!
//! A page is charged while its entry is held, right before the entry is committed, and uncharged
//! while its entry is held, right before the entry is emptied. So a CPU that finds a page, or finds
//! that a page has left, finds its charge or its room, too. No charge is taken in vain: a store
//! fails only if the limit has no room for its page.
//!
//! A store to a page of a read-only store first marks the page dirty and charges the page, in one
//! step. If the store then fails, the page stays dirty and charged.

use super::object::{NoPage, Object};
use crate::addr::FrameNumber;
use crate::machine::Machine;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node;
use crate::table::protocol;
use crate::vm::{Cpu, Vm};
use core::sync::atomic::AtomicU64 as Count;

/// The number of charged pages.
#[derive(Debug, Default)]
pub(crate) struct Charge(Count);

impl Charge {
    /// Adds a page unless `limit` pages are charged.
    fn add(&self, limit: u64) -> bool {
        let more = |pages| (pages < limit).then_some(pages + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Removes a page.
    fn remove(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns the number of charged pages.
    pub(crate) fn pages(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Which pages of an object are charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Charges {
    None,
    All,
    Dirty,
}

impl Charges {
    /// For an object that is `charged`, with a store or without.
    pub(super) const fn of(charged: bool, is_stored: bool) -> Self {
        match (charged, is_stored) {
            (false, _) => Self::None,
            (true, false) => Self::All,
            (true, true) => Self::Dirty,
        }
    }

    /// Whether the page of `entry` is charged.
    fn has(self, entry: Entry) -> bool {
        entry.is_present() && (self == Self::All || self == Self::Dirty && entry.is_dirty())
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

    /// Charges a page if the object is charged. The caller holds the page's entry, and commits the
    /// page next.
    ///
    /// # Errors
    /// [`NoPage::Full`].
    pub(super) fn charge<M: Machine>(&self, cpu: &Cpu<'_, M>) -> Result<(), NoPage> {
        let vm = cpu.vm();
        if self.charged && !vm.charge.add(vm.knobs.file_limit()) {
            return Err(NoPage::Full);
        }
        Ok(())
    }

    /// Marks the page that `slot`, an entry of the object, names dirty, and charges the page, if
    /// the object is charged and has a store. The caller holds no entry, and is about to store to
    /// the page.
    ///
    /// # Errors
    /// [`NoPage::Full`]: the page is clean, and stays clean.
    #[inline]
    pub(crate) fn charge_store<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        slot: Option<&AtomicU64>,
    ) -> Result<(), NoPage> {
        match slot {
            Some(slot) if self.charged && self.is_stored() && !node::load(slot).is_dirty() => {
                charge_dirty(cpu, slot, cpu.vm().knobs.file_limit())
            }
            _ => Ok(()),
        }
    }

    /// As [`charge_store`](Self::charge_store), whatever the limit: the kernel must store to the
    /// page.
    pub(super) fn charge_always<M: Machine>(&self, cpu: &Cpu<'_, M>, slot: &AtomicU64) {
        if self.charged && self.is_stored() {
            // It cannot fail.
            let _ = charge_dirty(cpu, slot, u64::MAX);
        }
    }

    /// Returns whether the page in `frame` could become dirty without a charge: the page that was
    /// charged has left the entry `name` since [`charge_store`](Self::charge_store). The caller has
    /// a reference to the frame. No page of a read-only store becomes clean again.
    pub(crate) fn lacks_charge(&self, name: &AtomicU64, frame: FrameNumber) -> bool {
        if !self.charged || lost(Mutant::StoreLooksAtCharge) {
            return false;
        }
        let now = node::load(name);
        !(now.is_present() && now.frame() == frame && now.is_dirty())
    }
}

/// Empties `slot`, an entry of an object with these `charges`, and uncharges its page. Returns the
/// entry's value before. If another CPU has the entry, it waits.
pub(super) fn take_out<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64, charges: Charges) -> Entry {
    if charges == Charges::None {
        return protocol::wait_and_replace(slot, cpu, |_| Entry::NONE).0;
    }
    loop {
        let seen = protocol::wait_and_load(slot, cpu);
        if let Ok(held) = protocol::take(slot, seen, cpu) {
            if charges.has(seen) {
                cpu.vm().charge.remove();
            }
            held.commit(Entry::NONE);
            return seen;
        }
    }
}

/// Marks the page of `slot`, an entry of a charged object with a store, dirty, and charges the
/// page, unless the page is dirty or has left. If another CPU has the entry, it waits.
///
/// # Errors
/// [`NoPage::Full`]: `limit` pages are charged.
#[cold]
#[inline(never)]
fn charge_dirty<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64, limit: u64) -> Result<(), NoPage> {
    let charge = &cpu.vm().charge;
    loop {
        let seen = protocol::wait_and_load(slot, cpu);
        if !seen.is_present() || seen.is_dirty() {
            return Ok(());
        }
        if lost(Mutant::ChargeHoldsEntry) && !charge.add(limit) {
            return Err(NoPage::Full);
        }
        let Ok(held) = protocol::take(slot, seen, cpu) else {
            if lost(Mutant::ChargeHoldsEntry) {
                charge.remove();
            }
            continue;
        };
        if !lost(Mutant::ChargeHoldsEntry) && !charge.add(limit) {
            held.revert();
            return Err(NoPage::Full);
        }
        held.commit(seen.dirty());
        return Ok(());
    }
}
