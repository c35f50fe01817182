//! `mprotect`, and the `madvise` calls that change the behaviour of VMAs the same way.

use super::Space;
use super::area::{Prot, VmaFlags};
use super::made::State;
use super::pages::{Leaf, each_leaf};
use super::vma::{Attributes, Vma};
use super::write::{NOWHERE, Writing};
use crate::addr::{PAGE_SIZE, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::{node, protocol};
use crate::vm::Cpu;

/// `PROT_SEM`, which Linux accepts and ignores.
const PROT_SEM: u32 = 8;

impl<M: Machine> Space<M> {
    /// Sets the protection of the pages in the `len` bytes starting at `addr`, rounded up to pages.
    ///
    /// # Errors
    /// As Linux: `EINVAL` (unaligned, unknown protection bits, `GROWSDOWN` if nothing grows down),
    /// `ENOMEM` (the range wraps, has a hole, or VMAs cannot be split), `EACCES` (a shared mapping
    /// of an object that may not be written). As on Linux, the call changes VMAs below a hole.
    pub fn mprotect(&self, cpu: &Cpu<'_, M>, addr: u64, len: u64, prot: Prot) -> Result<(), Error> {
        self.check_vm(cpu);
        let given = VirtRange::new(addr, addr.saturating_add(len));
        self.protect(cpu, addr, len, prot).map_err(|errno| Error {
            operation: "mprotect",
            range: given,
            errno,
        })?;
        cpu.collect();
        Ok(())
    }

    fn protect(&self, cpu: &Cpu<'_, M>, addr: u64, len: u64, prot: Prot) -> Result<(), Errno> {
        let grows = prot & (Prot::GROWSDOWN | Prot::GROWSUP);
        let access = Prot::READ | Prot::WRITE | Prot::EXEC;
        let unknown = (prot - grows - access).bits() & !PROT_SEM;
        if grows == Prot::GROWSDOWN | Prot::GROWSUP || !is_page_aligned(addr) {
            return Err(Errno::EINVAL);
        }
        if len == 0 {
            return Ok(());
        }
        let end = page_up(len)
            .and_then(|len| addr.checked_add(len))
            .filter(|&end| end > addr)
            .ok_or(Errno::ENOMEM)?;
        if unknown != 0 {
            return Err(Errno::EINVAL);
        }
        let prot = prot & access;
        let change = |old: &Attributes| {
            let mut flags = old.flags;
            if prot.contains(Prot::WRITE) && flags.contains(VmaFlags::NOWRITE) {
                return Err(Errno::EACCES);
            }
            let promised = VmaFlags::ACCOUNT | VmaFlags::SHARED | VmaFlags::NORESERVE;
            if prot.contains(Prot::WRITE)
                && !old.prot.contains(Prot::WRITE)
                && !flags.intersects(promised)
            {
                flags |= VmaFlags::ACCOUNT;
            }
            Ok((prot, flags))
        };
        let mut range = VirtRange::new(addr, end);
        let mut locked = range;
        loop {
            let writing = self.write(cpu, [locked, NOWHERE], PAGE_SIZE);
            if !grows.is_empty() {
                let vma = writing.view().find(addr).ok_or(Errno::ENOMEM)?;
                let behind = if grows == Prot::GROWSUP { addr + 1 } else { end };
                if vma.start >= behind {
                    return Err(Errno::ENOMEM);
                }
                let area = writing.vma_at(vma.start).ok_or(Errno::ENOMEM)?.area();
                // Nothing grows upwards on this architecture.
                if grows == Prot::GROWSUP || !area.flags.contains(VmaFlags::GROWSDOWN) {
                    return Err(Errno::EINVAL);
                }
                range.start = area.range.start;
                // A stack that grows claims the page below: a stack that has not grown yet may not
                // grow until this call ends.
                let needed = VirtRange::new(range.start.saturating_sub(PAGE_SIZE), range.end);
                if !locked.covers(needed) {
                    locked = locked.hull(needed);
                    continue;
                }
            }
            return writing.modify_all(range, change);
        }
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Gives every VMA in `range`, or the part inside, the protection and flags that `change`
    /// returns. VMAs without a change stay the same.
    ///
    /// # Errors
    /// `ENOMEM` at the first hole or if a VMA cannot be split, and the errors of `change`. The
    /// changes below that address stay.
    #[inline(always)]
    pub(super) fn modify_all(
        &self,
        range: VirtRange,
        change: impl Fn(&Attributes) -> Result<(Prot, VmaFlags), Errno>,
    ) -> Result<(), Errno> {
        let mut at = range.start;
        while at < range.end {
            let vma = self.vma_at(at).ok_or(Errno::ENOMEM)?;
            let part = vma.range().intersect(VirtRange::new(at, range.end));
            at = part.end;
            self.modify(vma, part, &change)?;
        }
        Ok(())
    }

    /// Gives `part` of `vma` the protection and flags that `change` returns.
    pub(super) fn modify(
        &self,
        vma: &Vma,
        part: VirtRange,
        change: impl Fn(&Attributes) -> Result<(Prot, VmaFlags), Errno>,
    ) -> Result<(), Errno> {
        let (prot, flags) = change(&vma.attributes)?;
        let before = vma.prot();
        if prot == before && flags == vma.flags() {
            return Ok(());
        }
        // No CPU may use a new permission while another still uses an old one.
        let both = !before.contains(prot) && !prot.contains(before);
        let state = if both { State::WriteLocked } else { State::Unlocked };
        self.step(part.with_neighbours(), |step| {
            let mut piece = step.take_known(part, vma)?;
            debug_assert_eq!(piece.range, part, "claimed pages remain in one VMA");
            (piece.attributes.prot, piece.attributes.flags) = (prot, flags);
            // If no page or tree was ever made under a promise of memory, the promise can be taken
            // back. With an object, Linux keeps the promise.
            let never_written = piece.attributes.is_private()
                && piece.attributes.memory.is_anonymous()
                && piece.root.is_none();
            if !prot.contains(Prot::WRITE) && never_written {
                piece.attributes.flags -= VmaFlags::ACCOUNT;
            }
            step.replace(part, piece, state)
        })?;
        if prot != before {
            self.protect_pages(part, prot);
        }
        self.finish();
        Ok(())
    }

    /// Makes the entries of `range` allow no more than `prot`. Faults allow stores again, because a
    /// fault knows whether the page is shared.
    fn protect_pages(&self, range: VirtRange, prot: Prot) {
        let mut batch = FlushBatch::new(self.cpu, self.space);
        let allow = |entry: Entry| {
            if !entry.is_mapped() {
                return entry;
            }
            let entry = entry.with_hidden(prot.is_empty()).with_execute(prot.contains(Prot::EXEC));
            if prot.contains(Prot::WRITE) { entry } else { entry.read_only() }
        };
        // SAFETY: the range is locked.
        unsafe {
            each_leaf(self.cpu, self.space.root(), range, |leaf| match leaf {
                Leaf::Page { addr, slot } => {
                    if node::load(slot).is_none() {
                        return;
                    }
                    let (old, new) = protocol::wait_and_replace(slot, self.cpu, allow);
                    if new.needs_flush(old) && !lost(Mutant::ProtectFlush) {
                        batch.flush(VirtRange::page(addr));
                    }
                }
                Leaf::Huge { start, slot, whole } => {
                    self.restrict_huge(start, slot, whole, &mut batch, &allow);
                }
            });
        }
        batch.finish();
    }
}
