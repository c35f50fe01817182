//! The length of an object, and the holes in it.

use super::object::Object;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::error::Errno;
use crate::heap::Shared;
use crate::machine::Machine;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::mutant::{Mutant, lost};
use crate::vm::Cpu;
use core::ops::Range;

impl Object {
    /// Sets the length. Pages beyond it leave the object, and what is mapped of them is to be
    /// [revoked](crate::Space::revoke); pages that are added are zeros. That of an object with a store is set in bytes, by
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

impl Shared<Object> {
    /// Sets the length of an object and of its store, in bytes. Pages beyond it leave the object, and what is mapped of them is to be
    /// [revoked](crate::Space::revoke); bytes that are added are zeros, also those of the last page before, whatever programs
    /// stored there beyond the end. (An object without a store has whole pages: the length is rounded up.)
    ///
    /// # Errors
    /// `EFBIG`: more than [`MAX_PAGES`](Object::MAX_PAGES). The store's error. `EAGAIN`, `ENOMEM`: the page with the old end, or the new
    /// one, could not be read, as of [`read_page`](Self::read_page). The length is the old one.
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
        stored.store.set_len(bytes)?;
        let end = before.min(bytes);
        let cut = self.clear_behind(cpu, end);
        if let Err(errno) = cut {
            // The bytes are still in the object, or are zeros as before.
            return stored.store.set_len(before).and(Err(errno));
        }
        stored.bytes.store(bytes, Ordering::Release);
        self.set_end(cpu, pages);
        Ok(())
    }

    /// Makes the rest of the page in which byte `end` is zeros.
    fn clear_behind<M: Machine>(&self, cpu: &Cpu<'_, M>, end: u64) -> Result<(), Errno> {
        let (index, used) = (end >> PAGE_SHIFT, (end % PAGE_SIZE) as usize);
        // What is not there is read with zeros behind the end.
        if used == 0 || !self.has_page(cpu, index) {
            return Ok(());
        }
        self.write_page(cpu, index, |page| {
            // SAFETY: the page's bytes, lent by the object.
            unsafe { page.add(used).write_bytes(0, PAGE_SIZE as usize - used) };
        })
    }

    /// Punches a hole: the pages of `range` leave the object, and are zeros in its store. What is mapped of them is to be
    /// [revoked](crate::Space::revoke), with private copies [kept](crate::Copies::Keep).
    ///
    /// # Errors
    /// The store's error; no page has left then.
    pub fn punch<M: Machine>(&self, cpu: &Cpu<'_, M>, range: Range<u64>) -> Result<(), Errno> {
        self.check_vm(cpu);
        // What is being written must not come after.
        let _turn = self.stored.as_ref().map(|stored| stored.turn.take(cpu));
        if let Some(stored) = &self.stored {
            let end = range.end.min(self.pages());
            if range.start < end {
                stored.store.punch(range.start..end)?;
            }
        }
        // A page that was read before is read from the object no more; one that is being read is dropped.
        self.free_pages(cpu, range);
        Ok(())
    }
}
