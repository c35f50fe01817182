//! `mlock`: locked VMAs.
//!
//! The pages of a locked VMA are not [evicted](crate::Cpu::reclaim), and advice does not remove
//! them; the VMA counts as locked; its lazily freed pages are no longer lazily freed. The kernel
//! faults the pages in.

use super::Space;
use super::area::{Area, VmaFlags};
use super::write::NOWHERE;
use crate::addr::{PAGE_SIZE, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::machine::Machine;
use crate::vm::Cpu;

/// How a VMA is locked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryLock {
    /// Not locked.
    #[default]
    No,
    /// Locked completely. This faults in no page: a kernel that serves `mlock` or `MAP_LOCKED`
    /// populates the range afterwards ([`Advice::PopulateRead`](crate::Advice::PopulateRead)).
    Now,
    /// Each page is locked after it was faulted in.
    OnFault,
}

impl MemoryLock {
    /// Returns the flags of a VMA that is locked in this way.
    const fn flags(self) -> VmaFlags {
        match self {
            Self::No => VmaFlags::empty(),
            Self::Now => VmaFlags::LOCKED,
            Self::OnFault => VmaFlags::LOCKED.union(VmaFlags::LOCK_ON_FAULT),
        }
    }
}

impl Area<'_> {
    /// Returns how the area is locked.
    pub const fn lock(self) -> MemoryLock {
        if !self.flags.contains(VmaFlags::LOCKED) {
            MemoryLock::No
        } else if self.flags.contains(VmaFlags::LOCK_ON_FAULT) {
            MemoryLock::OnFault
        } else {
            MemoryLock::Now
        }
    }
}

impl<M: Machine> Space<M> {
    /// Locks the pages starting at `addr`, `len` bytes rounded up to pages, as specified by `lock`,
    /// or unlocks them. Faults in no page.
    ///
    /// # Errors
    /// As Linux: `EINVAL` (unaligned, or the range wraps), `ENOMEM` (a hole, or VMAs cannot be
    /// split). VMAs below a hole are changed. A length that rounds up to 2^64 counts as 0.
    pub fn mlock(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        len: u64,
        lock: MemoryLock,
    ) -> Result<(), Error> {
        self.check_vm(cpu);
        // As on Linux, a length that wraps when it is rounded up counts as 0.
        let end = addr.checked_add(page_up(len).unwrap_or(0));
        let done = match end.filter(|_| is_page_aligned(addr)) {
            None => Err(Errno::EINVAL),
            Some(end) if end == addr => Ok(()),
            Some(end) => {
                let range = VirtRange::new(addr, end);
                let writing = self.write(cpu, [range, NOWHERE], PAGE_SIZE);
                let done = writing.modify_all(range, |old| {
                    // As on Linux, device memory does not change.
                    if old.memory.is_device() {
                        return Ok((old.prot, old.flags));
                    }
                    let flags = (old.flags - VmaFlags::ANY_LOCK) | lock.flags();
                    Ok((old.prot, flags))
                });
                if lock != MemoryLock::No {
                    writing.keep_pages(range);
                }
                done
            }
        };
        cpu.collect();
        let range = VirtRange::new(addr, addr.saturating_add(len));
        done.map_err(|errno| Error { operation: "mlock", range, errno })
    }

    /// Returns the number of pages of all locked VMAs, by checking each VMA.
    pub fn locked_pages(&self, cpu: &Cpu<'_, M>) -> u64 {
        let mut pages = 0;
        self.each_area(cpu, VirtRange::USER, |area| {
            if area.lock() != MemoryLock::No {
                pages += area.range.pages();
            }
            true
        });
        pages
    }
}
