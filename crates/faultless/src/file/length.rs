//! The length of an object, and holes in the object.
//!
//! # Cutting pages off a store
//!
//! The store changes first, because it may refuse; afterwards the present pages leave the object.
//! In between, no page that is being cut off may be read in. Otherwise a program could store to a
//! page and lose the store; or a read that began before could show the old contents after the file
//! has grown again. So a CPU that cuts pages off
//!
//! 1. publishes the range of pages in the object's [`Cut`]. A CPU that begins to read one of these
//!    pages, or [overwrites](super::overwrite) a missing one, checks the cut again after taking the
//!    entry, and waits;
//! 2. drops the reads of these pages in progress, by emptying their entries;
//! 3. changes the store, and removes the pages from the object.
//!
//! There is a full fence between 1 and 2, and another between taking an entry and reading the cut.
//! So either the cutting CPU sees and drops the read, or the reading CPU sees the cut.

use super::object::{Object, Stored};
use super::write_back::each_page;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::error::Errno;
use crate::heap::Shared;
use crate::machine::Machine;
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, StoreCall};
use crate::table::Entry;
use crate::table::{node, protocol};
use crate::vm::Cpu;
use core::ops::Range;

impl Object {
    /// Sets the length. Pages beyond the new length leave the object, and their mappings must be
    /// [revoked](crate::Space::revoke); added pages are zeros. Tables stay. The length of an object
    /// with a store is set in bytes, by [`set_len`](Shared::set_len).
    ///
    /// # Errors
    /// `EFBIG`: more than [`MAX_PAGES`](Self::MAX_PAGES). `EINVAL`: the object has a store. Nothing
    /// has changed.
    pub fn set_pages<M: Machine>(&self, cpu: &Cpu<'_, M>, pages: u64) -> Result<(), Errno> {
        self.check_vm(cpu);
        if pages > Self::MAX_PAGES {
            return Err(Errno::EFBIG);
        }
        if self.is_stored() {
            return Err(Errno::EINVAL);
        }
        self.set_end(cpu, pages);
        Ok(())
    }

    /// Stores the new length, and removes the pages beyond it from the object.
    fn set_end<M: Machine>(&self, cpu: &Cpu<'_, M>, pages: u64) {
        let before = self.pages.swap(pages, Ordering::SeqCst);
        if pages < before {
            if !lost(Mutant::TruncateFence) {
                fence(Ordering::SeqCst);
            }
            self.free_pages(cpu, pages..before);
        }
    }
}

/// The pages being cut off the store by the CPU with the object's turn, from `first` to `end`. A
/// `first` of the largest number means none.
#[derive(Debug)]
pub(super) struct Cut {
    first: AtomicU64,
    end: AtomicU64,
}

impl Default for Cut {
    fn default() -> Self {
        Self { first: AtomicU64::new(u64::MAX), end: AtomicU64::new(0) }
    }
}

impl Cut {
    fn begin(&self, pages: &Range<u64>) -> Cutting<'_> {
        self.end.store(pages.end, Ordering::SeqCst);
        self.first.store(pages.start, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Cutting(self)
    }
}

/// Pages are being cut off; the drop ends the cut.
struct Cutting<'a>(&'a Cut);

impl Drop for Cutting<'_> {
    fn drop(&mut self) {
        self.0.first.store(u64::MAX, Ordering::Release);
    }
}

impl Object {
    /// Returns whether the page at `index` is being cut off the store. The caller holds the page's
    /// entry, or waits for the end of the cut.
    pub(super) fn is_cut(&self, index: u64) -> bool {
        self.stored.as_deref().is_some_and(|Stored { cut, .. }| {
            // The acquire load of `first` of a later cut makes its `end` visible. For a finished
            // cut, either result is allowed.
            index >= cut.first.load(Ordering::Acquire) && index < cut.end.load(Ordering::Acquire)
        })
    }

    /// Drops the reads of `pages` in progress: their data is discarded, and the pages are read
    /// again.
    fn drop_reads<M: Machine>(&self, cpu: &Cpu<'_, M>, pages: Range<u64>) {
        let drop = |now: Entry| if now.is_hidden() { Entry::NONE } else { now };
        // SAFETY: the object's tables are unlinked only when no share is left.
        unsafe {
            each_page(cpu, self.top(), pages, |_, slot| {
                if !node::load(slot).is_none() && !lost(Mutant::CutDropsReads) {
                    protocol::wait_and_replace(slot, cpu, drop);
                }
            });
        }
    }

    /// Steps 1 and 2 of cutting `pages` off the store. The caller has the turn.
    fn cut<'s, M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        stored: &'s Stored,
        pages: Range<u64>,
    ) -> Cutting<'s> {
        let cutting = stored.cut.begin(&pages);
        self.drop_reads(cpu, pages);
        cutting
    }

    /// Zeroes the page of byte `end` from this byte on, if the page is present. A missing page is
    /// read with zeros beyond the end.
    fn clear_behind<M: Machine>(&self, cpu: &Cpu<'_, M>, end: u64) {
        let (index, used) = (end >> PAGE_SHIFT, (end % PAGE_SIZE) as usize);
        let Some(slot) = self.slot(cpu, index).filter(|_| used != 0) else { return };
        // Another CPU may briefly hold the entry.
        while protocol::wait_and_load(slot, cpu).is_present() {
            let cleared = self.write_present(cpu, index, |page| {
                // SAFETY: the page's bytes, lent by the object.
                unsafe { page.add(used).write_bytes(0, PAGE_SIZE as usize - used) };
            });
            if cleared.is_some() {
                return;
            }
        }
        // Programs may still see a page that was evicted.
        if !lost(Mutant::CutSettles) {
            cpu.flush_if_pending(&self.pending);
        }
    }
}

impl Shared<Object> {
    /// Sets the length of an object and of its store, in bytes. Pages beyond the new length leave
    /// the object, and their mappings must be [revoked](crate::Space::revoke). Added bytes are
    /// zeros, including the rest of the former last page, even if programs stored beyond the end.
    /// (An object without a store has whole pages: the length is rounded up.)
    ///
    /// # Errors
    /// `EFBIG`: more than [`MAX_PAGES`](Object::MAX_PAGES). The store's error. The length is the
    /// old one, and no page has changed.
    pub fn set_len<M: Machine>(&self, cpu: &Cpu<'_, M>, bytes: u64) -> Result<(), Errno> {
        self.check_vm(cpu);
        let pages = bytes.div_ceil(PAGE_SIZE);
        if pages > Object::MAX_PAGES {
            return Err(Errno::EFBIG);
        }
        let Some(stored) = &self.stored else { return self.set_pages(cpu, pages) };
        // A write in progress must not complete after the change of the store.
        let _turn = stored.turn.take(cpu);
        let before = stored.bytes.load(Ordering::Relaxed);
        let shorter = bytes < before;
        let _cut = shorter.then(|| self.cut(cpu, stored, bytes >> PAGE_SHIFT..u64::MAX));
        order::before::<StoreCall>(cpu);
        stored.store.set_len(bytes)?;
        self.clear_behind(cpu, before.min(bytes));
        stored.bytes.store(bytes, Ordering::Release);
        self.set_end(cpu, pages);
        Ok(())
    }

    /// Punches a hole: the pages of `range` leave the object, and are zeros in its store. Their
    /// mappings must be [revoked](crate::Space::revoke), with private copies
    /// [kept](crate::PrivateCopies::Keep).
    ///
    /// # Errors
    /// The store's error; then no page has left the object.
    pub fn punch<M: Machine>(&self, cpu: &Cpu<'_, M>, range: Range<u64>) -> Result<(), Errno> {
        self.check_vm(cpu);
        let Some(stored) = &self.stored else {
            self.free_pages(cpu, range);
            return Ok(());
        };
        // A write in progress must not complete after the change of the store.
        let _turn = stored.turn.take(cpu);
        let end = range.end.min(self.pages());
        let _cut = self.cut(cpu, stored, range.clone());
        if range.start < end {
            order::before::<StoreCall>(cpu);
            stored.store.punch(range.start..end)?;
        }
        self.free_pages(cpu, range);
        Ok(())
    }
}
