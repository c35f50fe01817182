//! `MADV_COLD` and `MADV_PAGEOUT` for pages that a program does not need soon: pages of files,
//! private pages if there is a swap area, and lazily freed pages.
//!
//! Neither changes what a program sees. Neither claims a range: both read entries as faults do, and
//! [eviction](crate::reclaim) takes entries by its own rules. Pages with other mappings stay
//! unchanged, because other programs may need the pages.

use super::Space;
use super::move_pages::is_shared;
use super::unmap::user_range;
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::error::{Errno, Error};
use crate::file::pages::Lent;
use crate::frame::{FrameUse, Kind};
use crate::machine::Machine;
use crate::reclaim::isolate::FrameList;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::node;
use crate::table::range::{self, Leaves};
use crate::vm::Cpu;
use core::convert::Infallible;

impl<M: Machine> Space<M> {
    /// Makes the pages in `range` the first that reclaim takes.
    pub(super) fn make_cold(&self, cpu: &Cpu<'_, M>, range: VirtRange) {
        let all = self.each_page_to_leave(cpu, range, false, |slot, page| {
            let seen = node::load(slot);
            if seen.is_mapped() && seen.frame() == page.frame() {
                cpu.take_accessed(slot, seen);
            }
            cpu.vm().frames.meta(page.frame()).use_count.store(0, Ordering::Relaxed);
            Ok::<_, Infallible>(())
        });
        let Ok(()) = all;
    }

    /// Evicts the pages in the `len` bytes starting at `addr`, rounded up to pages, if possible,
    /// even pages with other mappings: pages of files, and private pages if there is a [swap
    /// area](Cpu::swap_on). A kernel uses this call to remove a program from memory. Programs use
    /// [`PageOut`](crate::Advice::PageOut), which leaves the pages that other programs use. The
    /// call waits for other CPUs, and calls stores.
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

    /// Evicts the pages in `range` that have no other mapping, or `all` pages, if possible.
    pub(super) fn evict_pages(&self, cpu: &Cpu<'_, M>, range: VirtRange, all: bool) {
        let mut left = range;
        while !left.is_empty() {
            let (_holds, mut frames) = (cpu.hold_pages(), FrameList::new());
            let gathered = self.each_page_to_leave(cpu, left, all, |_, page| {
                // A page that the range maps twice would be in use by its own second reference.
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

    /// Calls `each` with the entries of `range` that map pages which reclaim may take, `all` or
    /// only pages without another mapping, until `each` fails.
    ///
    /// # Errors
    /// The error of `each`, and the address.
    fn each_page_to_leave<E>(
        &self,
        cpu: &Cpu<'_, M>,
        range: VirtRange,
        all: bool,
        mut each: impl FnMut(&AtomicU64, Lent<'_, '_, M>) -> Result<(), E>,
    ) -> Result<(), (u64, E)> {
        let section = self.section(cpu);
        // Another CPU that owns the space may change the tables in place.
        self.core.enter(cpu.id(), cpu, &section);
        let swaps = cpu.vm().swap.get().is_some();
        let visit = |leaves: Leaves<'_>| {
            // A huge leaf maps text, which is in use as a whole.
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
                    Kind::Used(FrameUse::Shared) => true,
                    Kind::Used(FrameUse::Anon) => swaps || cpu.is_lazily_freed(now),
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
