//! The length of an object, and the holes in it.
//!
//! # What is cut off a store
//!
//! The store changes first, since it may refuse; the pages that are there leave the object afterwards. Meanwhile nobody may read a page in that
//! is being cut off. A program would find it cut off already, store to it, and find the store gone; or a read that began before would show
//! what was cut off, once the file is longer again. So whoever cuts
//!
//! 1. says which pages, in the object's [`Cut`]. Who begins to read one of them, or [overwrites](super::overwrite) one that is not there, looks
//!    there again once it has its entry, and waits;
//! 2. drops the reads of these pages that are under way, by emptying their entries;
//! 3. changes the store, and takes the pages out of the object.
//!
//! Between 1 and 2 is a full fence, and another between the taking of an entry and the look at the cut. So either the read is seen and dropped, or
//! the cut is.

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
    /// Sets the length. Pages beyond it leave the object, and what is mapped of them is to be
    /// [revoked](crate::Space::revoke); pages that are added are zeros. Tables stay. The length of an object with a store is set in bytes, by
    /// [`set_len`](Shared::set_len).
    ///
    /// # Errors
    /// `EFBIG`: more than [`MAX_PAGES`](Self::MAX_PAGES). `EINVAL`: the object has a store. Nothing has changed.
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

    /// Stores the new length, and takes the pages beyond out of the object.
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

/// The pages that the CPU with the object's turn is cutting off the store: those from the first on, up to the end. None is the largest number.
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

/// Pages are being cut off; dropping it ends that.
struct Cutting<'a>(&'a Cut);

impl Drop for Cutting<'_> {
    fn drop(&mut self) {
        self.0.first.store(u64::MAX, Ordering::Release);
    }
}

impl Object {
    /// Whether the page at `index` is being cut off the store. For a caller that has its entry, or waits.
    pub(super) fn is_cut(&self, index: u64) -> bool {
        self.stored.as_deref().is_some_and(|Stored { cut, .. }| {
            // After the first of a later cut comes its end. Of one that is over the answer may be either.
            index >= cut.first.load(Ordering::Acquire) && index < cut.end.load(Ordering::Acquire)
        })
    }

    /// Drops the reads of `pages` that are under way: what they read is nobody's, and the pages are read again.
    fn drop_reads<M: Machine>(&self, cpu: &Cpu<'_, M>, pages: Range<u64>) {
        let drop = |now: Entry| if now.is_hidden() { Entry::NONE } else { now };
        // SAFETY: the object's tables are unlinked only when no share is left.
        unsafe {
            each_page(cpu, self.top(), pages, |_, slot| {
                if !node::load(slot).is_none() && !lost(Mutant::CutDropsReads) {
                    protocol::settle(slot, cpu, drop);
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

    /// Makes the rest of the page in which byte `end` is zeros, if it is there. One that is not is read with zeros behind the end.
    fn clear_behind<M: Machine>(&self, cpu: &Cpu<'_, M>, end: u64) {
        let (index, used) = (end >> PAGE_SHIFT, (end % PAGE_SIZE) as usize);
        let Some(slot) = self.slot(cpu, index).filter(|_| used != 0) else { return };
        // Another CPU may have the entry for a moment.
        while protocol::look(slot, cpu).is_present() {
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
            cpu.settle(&self.pending);
        }
    }
}

impl Shared<Object> {
    /// Sets the length of an object and of its store, in bytes. Pages beyond it leave the object, and what is mapped of them is to be
    /// [revoked](crate::Space::revoke); bytes that are added are zeros, also those of the last page before, whatever programs
    /// stored there beyond the end. (An object without a store has whole pages: the length is rounded up.)
    ///
    /// # Errors
    /// `EFBIG`: more than [`MAX_PAGES`](Object::MAX_PAGES). The store's error. The length is the old one, and no page has changed.
    pub fn set_len<M: Machine>(&self, cpu: &Cpu<'_, M>, bytes: u64) -> Result<(), Errno> {
        self.check_vm(cpu);
        let pages = bytes.div_ceil(PAGE_SIZE);
        if pages > Object::MAX_PAGES {
            return Err(Errno::EFBIG);
        }
        let Some(stored) = &self.stored else { return self.set_pages(cpu, pages) };
        // What is being written must not come after.
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

    /// Punches a hole: the pages of `range` leave the object, and are zeros in its store. What is mapped of them is to be
    /// [revoked](crate::Space::revoke), with private copies [kept](crate::Copies::Keep).
    ///
    /// # Errors
    /// The store's error; no page has left then.
    pub fn punch<M: Machine>(&self, cpu: &Cpu<'_, M>, range: Range<u64>) -> Result<(), Errno> {
        self.check_vm(cpu);
        let Some(stored) = &self.stored else {
            self.free_pages(cpu, range);
            return Ok(());
        };
        // What is being written must not come after.
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
