//! `munmap`.

use super::Space;
use super::step::State;
use super::write::{NOWHERE, Writing};
use crate::addr::{USER_END, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::space::leave::Was;
use crate::table::node::{LAST, table_span};
use crate::vm::Cpu;

/// Unmapping locks whole last-level tables, so that it can unlink those that it empties.
pub(super) const TABLE_ALIGN: u64 = table_span(LAST);

/// The page-aligned user range of a call, or `None` where Linux refuses it.
pub(super) fn user_range(addr: u64, len: u64) -> Option<VirtRange> {
    let len = page_up(len).filter(|&len| len != 0)?;
    (is_page_aligned(addr) && len <= USER_END && addr <= USER_END - len)
        .then(|| VirtRange::new(addr, addr + len))
}

impl<M: Machine> Space<M> {
    /// Unmaps whatever is mapped in the pages from `addr` on, `len` bytes rounded up to pages.
    ///
    /// # Errors
    /// `EINVAL`: `addr` is not page-aligned, `len` is 0, or the range leaves user space. `ENOMEM`: a
    /// VMA would have to be split and cannot be. Nothing has changed then.
    pub fn munmap(&self, cpu: &Cpu<'_, M>, addr: u64, len: u64) -> Result<(), Error> {
        let given = VirtRange::new(addr, addr.saturating_add(len));
        let refused = |errno| Error { operation: "munmap", range: given, errno };
        let range = user_range(addr, len).ok_or(refused(Errno::EINVAL))?;
        self.write(cpu, [range, NOWHERE], TABLE_ALIGN).unmap(range).map_err(refused)?;
        cpu.collect();
        Ok(())
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Unmaps `range`.
    pub(super) fn unmap(&self, range: VirtRange) -> Result<(), Errno> {
        let was = self.leave(range);
        self.step(|step| step.replace(range, None, State::Running))?;
        self.clear(range, was.as_ref());
        Ok(())
    }

    /// Empties `range`, in which no VMA is left, and remembers what was used as [`zap`](Self::zap) does.
    pub(super) fn clear(&self, range: VirtRange, was: Option<&Was<'_>>) {
        let mut batch = FlushBatch::new(self.cpu, self.space);
        let tables = self.zap(range, was, &mut batch);
        // Where there is none below, only tables of a level above may be empty, and those are wide.
        if tables || self.claimed_around(range).len() >= table_span(LAST + 1) {
            self.prune(range, &mut batch);
        }
        batch.finish();
    }
}
