//! Overwriting whole pages by the kernel, without reading them from the store first.
//!
//! If the page is present, the kernel stores to it as to any other page. If the page is missing or
//! being read, the kernel stores to a new private frame. Then the frame becomes the page, in one
//! step: its entry is taken, as by a CPU that [begins a read](super::read), with the same checks of
//! the length and of pages being [cut off](super::length), and the entry is dirty from the start.
//!
//! A hidden entry belongs to the read of another CPU. This read ends as after a truncation: it
//! finds that the entry no longer names its frame, and frees the frame. Threads that wait for the
//! read retry and find the page, even if the read fails. If another CPU has made the page in the
//! meantime, the bytes are copied into this page.

use super::object::Object;
use super::pages::Lent;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::error::Errno;
use crate::fault::prepared::Preparing;
use crate::frame::FrameUse;
use crate::heap::Shared;
use crate::machine::Machine;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::until;
use crate::table::Entry;
use crate::table::node::ENTRIES;
use crate::table::protocol;
use crate::vm::Cpu;

const PAGE: usize = PAGE_SIZE as usize;

impl Shared<Object> {
    /// As [`write_page`](Self::write_page), for a `write` that overwrites the whole page, or the
    /// whole part of the page within the file: the page is not read first. `write` returns the
    /// number of bytes stored, from the page's start; the memory lent to it has arbitrary contents.
    /// Returns the number of bytes stored: 0 if `write` stopped early, for example at the end of a
    /// program's memory, and the page is missing. Then the page has not changed, and
    /// [`write_page`](Self::write_page) can store the part.
    ///
    /// # Errors
    /// `EFBIG`: `index` is beyond the end. `ENOMEM`. `ENOSPC`: the object is charged, and the limit
    /// is reached; `write` was called, but no byte is stored. After other errors `write` was not
    /// called, or the file has become shorter since.
    pub fn overwrite_page<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        write: impl FnOnce(*mut u8) -> usize,
    ) -> Result<usize, Errno> {
        self.check_vm(cpu);
        if let Some(frame) = self.get(cpu, index) {
            return Ok(self.write_charged(cpu, index, frame, write)?.min(PAGE));
        }
        let mut prepared = Preparing::new(cpu);
        let slots = self.table_or_wait(cpu, index, &mut prepared);
        let frame = slots.is_ok().then(|| prepared.clean(cpu)).flatten();
        drop(prepared);
        let slot = &slots?[index as usize % ENTRIES];
        let frame = frame.map_or_else(|| cpu.alloc_or_wait().map_err(|_| Errno::ENOMEM), Ok)?;
        let own =
            Lent::new(cpu, cpu.vm().frames.publish(frame, FrameUse::Shared, self.anchor(), index));
        let stored = write(own.bytes()).min(PAGE);
        // SAFETY: within the frame, which belongs to this CPU alone.
        unsafe { own.bytes().add(stored).write_bytes(0, PAGE - stored) };
        loop {
            let seen = protocol::wait_and_load(slot, cpu);
            if seen.is_present() {
                let copy = |to: *mut u8| {
                    // SAFETY: two pages; one is lent, and the other belongs to this CPU.
                    unsafe { to.copy_from_nonoverlapping(own.bytes(), stored) };
                };
                let Some(frame) = self.get(cpu, index) else { continue };
                self.write_charged(cpu, index, frame, copy)?;
                return Ok(stored);
            }
            until(cpu, || !self.is_cut(index));
            let Some(held) = self.take_absent(cpu, slot, index, seen)? else { continue };
            // A CPU that made the file longer and stored there came before the entry was empty.
            let needed = self.bytes().saturating_sub(index << PAGE_SHIFT).min(PAGE_SIZE);
            if (stored as u64) < needed {
                held.revert();
                return Ok(0);
            }
            // While the entry is busy: programs may still see the page as it was before it was
            // evicted.
            if !lost(Mutant::OverwriteSettles) {
                cpu.flush_if_pending(&self.pending);
            }
            if self.charge(cpu).is_err() {
                held.revert();
                return Err(Errno::ENOSPC);
            }
            let page = Entry::leaf(own.keep());
            held.commit(if self.is_stored() { page.dirty() } else { page });
            return Ok(stored);
        }
    }
}
