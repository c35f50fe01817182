//! Whole pages that the kernel overwrites: nothing of them is read from the store first.
//!
//! Where the page is there, it is stored to like any other. Where it is not, or is being read, the kernel stores to a new frame, which nobody else
//! has. Then the frame becomes the page, in one step: its entry is taken, as [who begins to read](super::read) takes it, with the same looks at the
//! length and at what is being [cut off](super::length), and is dirty from the start.
//!
//! An entry that was hidden is another's read. That ends as after a truncation: it finds that the entry names its frame no more, and
//! frees the frame. Threads that wait for the read look again, and find the page, also where the read fails. If another CPU has
//! made the page meanwhile, the bytes are copied there.

use super::object::Object;
use super::pages::Lent;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE};
use crate::error::Errno;
use crate::fault::prepared::Preparing;
use crate::frame::Use;
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
    /// As [`write_page`](Self::write_page), for a `write` that overwrites the whole page, or all that the file has of it: the page is not read first.
    /// `write` returns how many bytes it has stored, from the page's start on; what is lent to it may hold anything. Returns how many are
    /// stored: none if `write` gave up early, as where a program's memory ends, and the page is not there. Then the page is as it
    /// was, and [`write_page`](Self::write_page) stores the part.
    ///
    /// # Errors
    /// `EFBIG`: `index` is beyond the end. `ENOMEM`. `ENOSPC`: the object is charged, and the limit
    /// is reached; `write` was called, but nothing is stored. After other errors `write` was not called, or the file has become
    /// shorter since.
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
        let own = Lent::new(cpu, cpu.vm().frames.publish(frame, Use::Shared, self.anchor(), index));
        let stored = write(own.bytes()).min(PAGE);
        // SAFETY: within the frame, which nobody else has.
        unsafe { own.bytes().add(stored).write_bytes(0, PAGE - stored) };
        loop {
            let seen = protocol::look(slot, cpu);
            if seen.is_present() {
                let copy = |to: *mut u8| {
                    // SAFETY: two pages, of which one is lent and the other is ours.
                    unsafe { to.copy_from_nonoverlapping(own.bytes(), stored) };
                };
                if self.write_present(cpu, index, copy).is_some() {
                    return Ok(stored);
                }
                continue;
            }
            until(cpu, || !self.is_cut(index));
            let Some(held) = self.take_absent(cpu, slot, index, seen)? else { continue };
            // Whoever has made the file longer, and stored there, came before the entry was empty.
            let needed = self.bytes().saturating_sub(index << PAGE_SHIFT).min(PAGE_SIZE);
            if (stored as u64) < needed {
                held.revert();
                return Ok(0);
            }
            let mut charge = match self.charge(cpu) {
                Ok(charge) => charge,
                Err(_) => {
                    held.revert();
                    return Err(Errno::ENOSPC);
                }
            };
            // While the entry is busy: programs may still see the page as it was before it was evicted.
            if !lost(Mutant::OverwriteSettles) {
                cpu.settle(&self.pending);
            }
            let page = Entry::leaf(own.keep());
            held.commit(if self.is_stored() { page.dirty() } else { page });
            charge.keep();
            return Ok(stored);
        }
    }
}
