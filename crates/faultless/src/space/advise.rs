//! `madvise`.

use super::Space;
use super::area::{Area, VmaFlags};
use super::lock::MemoryLock;
use super::pages::each_slot;
use super::visit::Visit;
use super::vma::Vma;
use super::write::{NOWHERE, Writing};
use crate::addr::{PAGE_SIZE, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::fault::Access;
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::stat::Counter;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::{node, protocol};
use crate::vm::Cpu;

/// A program's advice about the use of a range: Linux's `MADV_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Advice {
    /// No special treatment.
    Normal = 0,
    /// Random access: pages of files with a store are read individually, and no text is read for a
    /// huge leaf.
    Random = 1,
    /// Sequential access.
    Sequential = 2,
    /// Needed soon: begin to read pages of files with a store, and private pages in the swap area.
    WillNeed = 3,
    /// Not needed any more: private pages read as zeros, or as the pages of their object, again.
    DontNeed = 4,
    /// Not needed until the next store: pages may be dropped when memory is short. Pages shared
    /// with another space, or in use at the moment, do not change.
    Free = 8,
    /// Not inherited by children.
    DontFork = 10,
    /// Inherited by children again.
    DoFork = 11,
    /// Huge pages wanted.
    HugePage = 14,
    /// Huge pages not wanted.
    NoHugePage = 15,
    /// Empty in children.
    WipeOnFork = 18,
    /// Inherited with contents by children again.
    KeepOnFork = 19,
    /// Not needed soon: pages of files, and private pages if there is a [swap area](Cpu::swap_on),
    /// are the first to be [evicted](Cpu::reclaim).
    Cold = 20,
    /// Not needed soon: pages of files, and private pages if there is a [swap area](Cpu::swap_on),
    /// are written to their store if necessary, and evicted. They are read again when needed.
    PageOut = 21,
    /// [`DontNeed`](Self::DontNeed), including locked memory.
    DontNeedLocked = 24,
    /// Fault all pages in for reading.
    PopulateRead = 22,
    /// Fault all pages in for writing.
    PopulateWrite = 23,
    /// Replace base pages of files by huge pages now, for any value of the knob `huge_text`.
    Collapse = 25,
}

impl Advice {
    const ALL: [Self; 18] = [
        Self::Normal,
        Self::Random,
        Self::Sequential,
        Self::WillNeed,
        Self::DontNeed,
        Self::Free,
        Self::DontFork,
        Self::DoFork,
        Self::HugePage,
        Self::NoHugePage,
        Self::WipeOnFork,
        Self::KeepOnFork,
        Self::PopulateRead,
        Self::PopulateWrite,
        Self::Cold,
        Self::PageOut,
        Self::DontNeedLocked,
        Self::Collapse,
    ];

    /// Returns the advice with Linux's number `number`, if supported.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|advice| *advice as u32 == number)
    }
}

impl<M: Machine> Space<M> {
    /// Applies advice to the pages starting at `addr`, with `len` bytes rounded up to pages.
    ///
    /// # Errors
    /// As Linux: `EINVAL` (unaligned, the range wraps, or a VMA unsuitable for the advice),
    /// `EAGAIN` (a VMA would have to be split, and the space has the maximum number of VMAs),
    /// `ENOMEM` (holes: the rest is still done, except for populating), `EFAULT` (populating met a
    /// fault that cannot be served). For [`Collapse`](Advice::Collapse), which still does the rest:
    /// `EINVAL` (2 MiB that belong to no file, or with different alignments of address and offset;
    /// a range that reaches no multiple of 2 MiB), `EAGAIN` (pages are in use, dirty, or being
    /// read), `ENOMEM`.
    pub fn madvise(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        len: u64,
        advice: Advice,
    ) -> Result<(), Error> {
        self.check_vm(cpu);
        let given = VirtRange::new(addr, addr.saturating_add(len));
        self.advise(cpu, addr, len, advice).map_err(|errno| Error {
            operation: "madvise",
            range: given,
            errno,
        })?;
        cpu.collect();
        Ok(())
    }

    fn advise(&self, cpu: &Cpu<'_, M>, addr: u64, len: u64, advice: Advice) -> Result<(), Errno> {
        if !is_page_aligned(addr) {
            return Err(Errno::EINVAL);
        }
        let end = page_up(len).and_then(|len| addr.checked_add(len)).ok_or(Errno::EINVAL)?;
        let range = VirtRange::new(addr, end);
        if range.is_empty() {
            return Ok(());
        }
        match advice {
            Advice::PopulateRead => self.populate_advised(cpu, range, Access::Read),
            Advice::PopulateWrite => self.populate_advised(cpu, range, Access::Write),
            Advice::Collapse => self.collapse(cpu, range),
            Advice::DontNeed | Advice::DontNeedLocked | Advice::Free => {
                let visit = self.visit(cpu, range);
                each_part(&visit, range, |vma, part| visit.take_away(vma.area(), part, advice))
            }
            Advice::WillNeed => {
                let visit = self.visit(cpu, range);
                let found = each_part(&visit, range, |_, _| Ok(()));
                drop(visit);
                self.read_mapped(cpu, range);
                self.read_swapped(cpu, range);
                found
            }
            Advice::Cold | Advice::PageOut => {
                let found = {
                    let visit = self.visit(cpu, range);
                    each_part(&visit, range, |vma, _| may_leave(vma.area()))
                };
                match advice {
                    _ if found == Err(Errno::EINVAL) => {}
                    Advice::Cold => self.make_cold(cpu, range),
                    _ => self.evict_pages(cpu, range, false),
                }
                found
            }
            _ => {
                let writing = self.write(cpu, [range, NOWHERE], PAGE_SIZE);
                cpu.state().crowded.set(false);
                each_part(&writing, range, |vma, part| {
                    writing.advise_part(vma, part, advice).map_err(|errno| match errno {
                        Errno::ENOMEM if cpu.state().crowded.get() => Errno::EAGAIN,
                        errno => errno,
                    })
                })
            }
        }
    }
}

/// Calls `each` for the part of each VMA in `range`, reading the current VMAs one after the other,
/// until `each` fails.
///
/// # Errors
/// The error of `each`; `ENOMEM` at the end, if there are holes.
fn each_part<M: Machine>(
    visit: &Visit<'_, '_, M>,
    range: VirtRange,
    each: impl Fn(&Vma, VirtRange) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let mut at = range.start;
    let mut hole = false;
    while at < range.end {
        let Some(next) = visit.vmas(VirtRange::new(at, range.end)).next() else {
            hole = true;
            break;
        };
        hole |= next.start() > at;
        let part = next.range().intersect(VirtRange::new(at, range.end));
        at = part.end;
        each(next, part)?;
    }
    if hole {
        visit.guard.await_unmapping(visit.cpu);
        return Err(Errno::ENOMEM);
    }
    Ok(())
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Removes the flags `remove` from `part` of `vma`, and adds `add`.
    #[inline(never)]
    pub(super) fn set_flags(
        &self,
        vma: &Vma,
        part: VirtRange,
        remove: VmaFlags,
        add: VmaFlags,
    ) -> Result<(), Errno> {
        self.modify(vma, part, move |old| Ok((old.prot, (old.flags - remove) | add)))
    }

    /// Applies advice that sets flags.
    fn advise_part(&self, vma: &Vma, part: VirtRange, advice: Advice) -> Result<(), Errno> {
        let with = |remove: VmaFlags, add: VmaFlags| self.set_flags(vma, part, remove, add);
        let order = VmaFlags::RANDOM | VmaFlags::SEQUENTIAL;
        let none = VmaFlags::empty();
        match advice {
            Advice::Normal => with(order, none),
            Advice::Random => with(order, VmaFlags::RANDOM),
            Advice::Sequential => with(order, VmaFlags::SEQUENTIAL),
            Advice::DontFork => with(none, VmaFlags::DONTFORK),
            Advice::DoFork if vma.memory().is_device() => Err(Errno::EINVAL),
            Advice::DoFork => with(VmaFlags::DONTFORK, none),
            Advice::HugePage => with(VmaFlags::NOHUGEPAGE, VmaFlags::HUGEPAGE),
            Advice::NoHugePage => with(VmaFlags::HUGEPAGE, VmaFlags::NOHUGEPAGE),
            Advice::WipeOnFork if !vma.memory().is_anonymous() => Err(Errno::EINVAL),
            Advice::WipeOnFork => with(none, VmaFlags::WIPEONFORK),
            Advice::KeepOnFork => with(VmaFlags::WIPEONFORK, none),
            Advice::DontNeed | Advice::DontNeedLocked | Advice::Free => Ok(()),
            Advice::PopulateRead | Advice::PopulateWrite | Advice::WillNeed => Ok(()),
            Advice::Cold | Advice::PageOut | Advice::Collapse => Ok(()),
        }
    }
}

/// Checks whether the pages of a VMA may be passed to reclaim: not locked pages, nor device memory.
fn may_leave(area: Area<'_>) -> Result<(), Errno> {
    let may = area.lock() == MemoryLock::No && !area.memory.is_device();
    if may { Ok(()) } else { Err(Errno::EINVAL) }
}

impl<M: Machine> Visit<'_, '_, M> {
    /// Applies advice that removes pages, to `part` of `area`.
    fn take_away(&self, area: Area<'_>, part: VirtRange, advice: Advice) -> Result<(), Errno> {
        // Locked pages stay, as does device memory.
        let locked = advice != Advice::DontNeedLocked && area.lock() != MemoryLock::No;
        if locked || area.memory.is_device() {
            return Err(Errno::EINVAL);
        }
        if advice != Advice::Free {
            self.discard(part, self.harvest_accessed(part).as_ref(), |_| true);
            return Ok(());
        }
        if !area.memory.is_anonymous() {
            return Err(Errno::EINVAL);
        }
        self.free_lazily(part);
        Ok(())
    }

    /// Marks the private pages of `range` as clean: reclaim need not save them later. A store must
    /// make them dirty again, which is why translations that allow stores are dropped.
    fn free_lazily(&self, range: VirtRange) {
        let mut cleaned = 0;
        let mut batch = FlushBatch::new(self.cpu, self.space);
        // SAFETY: the range is claimed, and tables are unlinked only by writers with an exclusive
        // claim on their whole span.
        unsafe {
            each_slot(self.cpu, self.space.root(), range, |addr, slot| {
                let private = |entry: Entry| {
                    entry.is_mapped()
                        && !entry.is_special()
                        && self.cpu.vm().frames.meta(entry.frame()).is_sole()
                };
                if node::load(slot).is_none() {
                    return;
                }
                let (old, new) = protocol::wait_and_replace(slot, self.cpu, |entry| match entry {
                    _ if private(entry) && entry.is_aged() && lost(Mutant::FreeUnages) => {
                        entry.clean().aged()
                    }
                    _ if private(entry) => entry.clean(),
                    // An unneeded page is not swapped in.
                    _ if entry.is_swapped() => Entry::NONE,
                    _ => entry,
                });
                if old.is_swapped() {
                    self.cpu.drop_swapped(&self.space.core, old);
                }
                if new.needs_flush(old) && !lost(Mutant::FreeFlush) {
                    batch.flush(VirtRange::page(addr));
                }
                if old.is_dirty() && !new.is_dirty() {
                    cleaned += 1;
                    // The page may have been pinned meanwhile, and a device's stores mark no entry
                    // dirty. See `pin`.
                    fence(Ordering::SeqCst);
                    let meta = self.cpu.vm().frames.meta(old.frame());
                    if meta.is_pinned() && !lost(Mutant::FreeLooksAtPins) {
                        protocol::wait_and_replace(slot, self.cpu, |entry| self.cpu.kept(entry));
                    }
                }
            });
        }
        batch.finish();
        if cleaned != 0 {
            self.cpu.state().counts.add(Counter::LazyFree, cleaned);
            self.cpu.vm().lazy.note(self.cpu, &self.space.core, range);
        }
    }
}
