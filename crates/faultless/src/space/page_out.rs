//! `MADV_COLD` and `MADV_PAGEOUT`: pages of files, private ones if there is a swap area, and lazily freed ones, that a program does not need soon.
//!
//! Neither changes what a program sees. Nothing is claimed: entries are read as faults read them, and [eviction](crate::reclaim) takes them by its own
//! rules. Pages that have other mappings, too, stay as they are: others may need them.

use super::Space;
use super::move_pages::is_shared;
use super::unmap::user_range;
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::error::{Errno, Error};
use crate::file::pages::Lent;
use crate::frame::{Kind, Use};
use crate::machine::Machine;
use crate::reclaim::taken::FrameList;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::node;
use crate::table::range::{self, Leaves};
use crate::vm::Cpu;
use core::convert::Infallible;

impl<M: Machine> Space<M> {
    /// Lets reclaim take the pages in `range` first.
    pub(super) fn make_cold(&self, cpu: &Cpu<'_, M>, range: VirtRange) {
        let all = self.each_page_to_leave(cpu, range, false, |slot, page| {
            let seen = node::load(slot);
            if seen.is_mapped() && seen.frame() == page.frame() {
                cpu.take_accessed(slot, seen);
            }
            cpu.vm().frames.meta(page.frame()).lives.store(0, Ordering::Relaxed);
            Ok::<_, Infallible>(())
        });
        let Ok(()) = all;
    }

    /// Evicts what is mapped in the pages from `addr` on, `len` bytes rounded up to pages, as far as that is possible, whoever else maps it: pages of files,
    /// and private ones if there is a [swap area](Cpu::swap_on). It is for a kernel that wants a program out of memory; programs ask by
    /// [`PageOut`](crate::Advice::PageOut), which leaves what others use. It waits for other CPUs, and calls stores.
    ///
    /// # Errors
    /// `EINVAL`: `addr` is not page-aligned, `len` is 0, or the range leaves user space.
    pub fn evict(&self, cpu: &Cpu<'_, M>, addr: u64, len: u64) -> Result<(), Error> {
        self.check_vm(cpu);
        let range = VirtRange::new(addr, addr.saturating_add(len));
        let refused = Error { operation: "evict", range, errno: Errno::EINVAL };
        self.evict_pages(cpu, user_range(addr, len).ok_or(refused)?, true);
        Ok(())
    }

    /// Evicts the pages in `range` that have no other mapping, or `all` of them, as far as that is possible.
    pub(super) fn evict_pages(&self, cpu: &Cpu<'_, M>, range: VirtRange, all: bool) {
        let mut left = range;
        while !left.is_empty() {
            let (_holds, mut frames) = (cpu.hold_pages(), FrameList::new());
            let gathered = self.each_page_to_leave(cpu, left, all, |_, page| {
                // One that the range maps twice would be in use by its own second reference.
                let is_twice = is_shared(cpu, page.frame()) && frames.contains(&page.frame());
                if !is_twice {
                    frames.push(page.keep());
                }
                if frames.is_full() { Err(()) } else { Ok(()) }
            });
            cpu.evict(&frames);
            let next = gathered.map_or_else(|(last, ())| last + PAGE_SIZE, |()| left.end);
            left.start = next;
        }
    }

    /// Calls `each` with the entries of `range` that map pages which reclaim may take, `all` or those which have no other mapping, until it fails.
    ///
    /// # Errors
    /// What `each` returned, and the address.
    fn each_page_to_leave<E>(
        &self,
        cpu: &Cpu<'_, M>,
        range: VirtRange,
        all: bool,
        mut each: impl FnMut(&AtomicU64, Lent<'_, '_, M>) -> Result<(), E>,
    ) -> Result<(), (u64, E)> {
        let section = self.section(cpu);
        // The tables of a space that another CPU owns may change in place.
        self.core.enter(cpu.id(), cpu, &section);
        let swaps = cpu.vm().swap.get().is_some();
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
                let may_leave = match cpu.vm().frames.meta(page.frame()).kind() {
                    Kind::Used(Use::Shared) => true,
                    Kind::Used(Use::Anon) => swaps || cpu.is_lazily_freed(now),
                    _ => false,
                };
                if still && may_leave && (all || !is_shared(cpu, page.frame())) {
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
