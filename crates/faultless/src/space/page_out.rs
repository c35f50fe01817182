//! `MADV_COLD` and `MADV_PAGEOUT`: pages of files that a program does not need soon.
//!
//! Neither changes what a program sees. Nothing is claimed: entries are read as faults read them, and [eviction](crate::reclaim) takes them by its own
//! rules. Pages that have other mappings, too, stay as they are: others may need them.

use super::Space;
use super::move_pages::is_shared;
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::file::pages::Lent;
use crate::frame::{Kind, Use};
use crate::machine::Machine;
use crate::reclaim::clock::take_accessed;
use crate::reclaim::taken::BATCH;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::node;
use crate::table::range::{self, Leaves};
use crate::vm::Cpu;
use core::convert::Infallible;

impl<M: Machine> Space<M> {
    /// Lets reclaim take the pages of files in `range` first.
    pub(super) fn make_cold(&self, cpu: &Cpu<'_, M>, range: VirtRange) {
        let all = self.each_file_page(cpu, range, |slot, page| {
            take_accessed(slot, node::load(slot));
            cpu.vm().frames.meta(page.frame()).lives.store(0, Ordering::Relaxed);
            Ok::<_, Infallible>(())
        });
        let Ok(()) = all;
    }

    /// Evicts the pages of files in `range`, as far as that is possible.
    pub(super) fn page_out(&self, cpu: &Cpu<'_, M>, range: VirtRange) {
        let mut left = range;
        loop {
            let mut frames = [FrameNumber(0); BATCH];
            let mut count = 0;
            let gathered = self.each_file_page(cpu, left, |_, page| {
                if count == BATCH {
                    return Err(());
                }
                frames[count] = page.keep();
                count += 1;
                Ok(())
            });
            cpu.evict(&frames[..count]);
            match gathered {
                Ok(()) => break,
                Err((at, ())) => left = VirtRange::new(at, left.end),
            }
        }
    }

    /// Calls `each` with the entries of `range` that map pages of files which have no other mapping, until it fails.
    ///
    /// # Errors
    /// What `each` returned, and the address.
    fn each_file_page<E>(
        &self,
        cpu: &Cpu<'_, M>,
        range: VirtRange,
        mut each: impl FnMut(&AtomicU64, Lent<'_, '_, M>) -> Result<(), E>,
    ) -> Result<(), (u64, E)> {
        let section = self.section(cpu);
        // The tables of a space that another CPU owns may change in place.
        self.core.enter(cpu.id(), cpu, &section);
        let visit = |leaves: Leaves<'_>| {
            // A huge leaf is of text, which is in use as a whole.
            let Leaves::Pages { start, slots } = leaves else { return Ok(()) };
            for (at, slot) in slots.iter().enumerate() {
                let addr = start + at as u64 * PAGE_SIZE;
                let seen = node::load(slot);
                let mapped = seen.is_mapped() && !seen.is_locked() && !seen.is_special();
                let page = if mapped { Lent::try_new(cpu, seen.frame()) } else { None };
                let Some(page) = page else { continue };
                let now = node::load(slot);
                let still = now.is_mapped() && now.frame() == seen.frame();
                let of_file = cpu.vm().frames.meta(page.frame()).kind() == Kind::Used(Use::Shared);
                if still && of_file && !is_shared(cpu, page.frame()) {
                    each(slot, page).map_err(|error| (addr, error))?;
                }
            }
            cpu.serve_flushes();
            Ok(())
        };
        // SAFETY: in a section of the space.
        unsafe { range::visit(cpu.vm().machine(), self.root(), range, cpu, visit) }
    }
}
