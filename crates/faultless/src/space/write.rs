//! What every change of an address space starts with.
//!
//! 1. **Lock.** [`Space::write`] locks the ranges that the call is about, widened to whole VMAs: those
//!    inside, and those that touch an end and might merge. Since that needs a look at the tree before
//!    the lock is had, it looks again afterwards, and starts over if a VMA reaches further now.
//! 2. **Stop.** [`Writing::stop`] makes the sequences of the VMAs that will be replaced or whose
//!    entries will change odd, and issues one full fence. From here on no fault installs anything in
//!    them, but for those whose entries are busy, for which the visit of the entries waits.
//! 3. **Replace.** [`Writing::replace`] publishes the new VMAs in place of the old ones. This is the
//!    step that can fail, and so it comes before any entry is changed: until then, nothing has
//!    happened. New VMAs start out stopped, so nobody uses them before the entries are as they say.
//! 4. The entries are changed, and the flushes paid.
//! 5. **Finish.** All VMAs of the locked ranges that are in the tree run again. Those that were
//!    replaced stay stopped for ever, and go to the grace period.

use super::vma::{Area, Vma, VmaLock};
use super::{Guard, Space};
use crate::addr::VirtRange;
use crate::error::{Errno, OutOfMemory};
use crate::heap;
use crate::knob::Locking;
use crate::machine::Machine;
use crate::rmap::{Root, RootSlot};
use crate::space::tree::{Entry, View};
use crate::sync::atomic::Ordering;
use crate::sync::grace::{RetireLink, Section};
use crate::sync::sequence::Sequence;
use crate::vm::{Cpu, RETIRE_VMA};
use alloc::boxed::Box;
use core::ptr::NonNull;

/// No range.
pub(super) const NOWHERE: VirtRange = VirtRange { start: 0, end: 0 };

/// The right to change one or two ranges of a space.
pub(crate) struct Writing<'a, 'v, M: Machine> {
    pub(super) cpu: &'a Cpu<'v, M>,
    pub(super) space: &'a Space<M>,
    locked: [VirtRange; 2],
    section: Section<'a>,
    _guard: Guard<'a>,
}

/// VMAs about to be published: at most a left rest, the thing itself, and a right rest.
pub(super) type NewVmas = [Option<Box<Vma>>; 3];

impl<M: Machine> Space<M> {
    /// Locks `ranges` for writing, widened to multiples of `align` and to whole VMAs. Not inside a
    /// grace section.
    pub(super) fn write<'a, 'v>(
        &'a self,
        cpu: &'a Cpu<'v, M>,
        ranges: [VirtRange; 2],
        align: u64,
    ) -> Writing<'a, 'v, M> {
        let mut wanted =
            ranges.map(|range| if range.is_empty() { range } else { range.widen(align) });
        loop {
            wanted = self.reach(cpu, wanted, ranges);
            let guard = self.lock_ranges(cpu, wanted);
            if self.reach(cpu, wanted, ranges) == wanted {
                return Writing {
                    cpu,
                    space: self,
                    locked: wanted,
                    section: cpu.section(),
                    _guard: guard,
                };
            }
        }
    }

    /// `wanted`, and the whole of every VMA that overlaps or touches `ranges`.
    fn reach(
        &self,
        cpu: &Cpu<'_, M>,
        wanted: [VirtRange; 2],
        ranges: [VirtRange; 2],
    ) -> [VirtRange; 2] {
        let section = cpu.section();
        let view = self.tree.snapshot(&section);
        let mut reached = wanted;
        for (reach, range) in reached.iter_mut().zip(ranges) {
            if range.is_empty() {
                continue;
            }
            let first = view.find(range.start.saturating_sub(1));
            let last = view.at(range.end).or_else(|| view.before(range.end.saturating_add(1)));
            for entry in [first, last].into_iter().flatten() {
                let extent = VirtRange::new(entry.start, entry.end);
                if entry.start <= range.end && entry.end >= range.start {
                    *reach = reach.hull(extent);
                }
            }
        }
        // The two may have grown into each other, but locking both at once is one step anyway.
        reached
    }
}

impl<'a, 'v, M: Machine> Writing<'a, 'v, M> {
    /// The tree as it is now. In the locked ranges only this writer changes it.
    pub(super) fn view(&self) -> View<'_, Vma> {
        self.space.tree.snapshot(&self.section)
    }

    /// The VMAs that overlap `range`, in order.
    pub(super) fn vmas(&self, range: VirtRange) -> impl Iterator<Item = &Vma> {
        self.view()
            .iter_from(range.start)
            .take_while(move |entry| entry.start < range.end)
            // SAFETY: VMAs in a view live as long as the section, which lives as long as `self`.
            .map(|entry| unsafe { entry.value.as_ref() })
    }

    /// The VMA at `addr`.
    pub(super) fn vma_at(&self, addr: u64) -> Option<&Vma> {
        // SAFETY: as in `vmas`.
        self.view().at(addr).map(|entry| unsafe { entry.value.as_ref() })
    }

    /// The locked range that covers `range`.
    pub(super) fn locked_around(&self, range: VirtRange) -> VirtRange {
        self.locked.into_iter().find(|locked| locked.covers(range)).unwrap_or(range)
    }

    /// The VMA that ends at `addr`.
    pub(super) fn vma_ending(&self, addr: u64) -> Option<&Vma> {
        self.vma_at(addr.checked_sub(1)?).filter(|vma| vma.area.range.end == addr)
    }

    /// Stops the VMAs that overlap `range`: no fault without a lock succeeds in them any more.
    pub(super) fn stop(&self, range: VirtRange) {
        let per_vma = self.space.locking_in_force() == Locking::PerVma;
        for vma in self.vmas(range).filter(|vma| vma.sequence.read().is_some()) {
            if per_vma {
                vma.lock.write(self.cpu);
            }
            vma.sequence.begin_write();
        }
        Sequence::writer_fence();
    }

    /// A VMA for `area`, stopped until the writer finishes.
    pub(super) fn make(&self, area: Area, root: Option<Root>) -> Result<Box<Vma>, OutOfMemory> {
        make_stopped(area, root)
    }

    /// Puts `new` in place of all VMAs that overlap `range`; these lie wholly inside it, and are
    /// stopped.
    ///
    /// # Errors
    /// `ENOMEM`: the heap is exhausted, or the space has too many VMAs. Nothing has changed.
    pub(super) fn replace(&self, range: VirtRange, new: NewVmas) -> Result<(), Errno> {
        let vm = self.cpu.vm();
        let old = self.view();
        let (mut old_count, mut old_pages) = (0u64, 0u64);
        for vma in self.vmas(range) {
            debug_assert!(range.covers(vma.area.range) && vma.sequence.read().is_none());
            old_count += 1;
            old_pages += vma.area.range.pages();
        }
        let new_count = new.iter().flatten().count() as u64;
        let after = old.len() as u64 + new_count - old_count;
        if new_count > old_count && after > vm.knobs.max_map_count() {
            return Err(Errno::ENOMEM);
        }
        let no_entry = Entry { start: 0, end: 0, value: NonNull::dangling() };
        let mut entries = [no_entry; 3];
        let mut new_pages = 0;
        for (entry, vma) in entries.iter_mut().zip(new.iter().flatten()) {
            let VirtRange { start, end } = vma.area.range;
            *entry = Entry { start, end, value: NonNull::from(&**vma) };
            new_pages += vma.area.range.pages();
        }
        // SAFETY: the subsystem has one grace period, in whose sections all trees are read.
        let mut edit = unsafe { self.space.tree.edit(self.cpu.local(), &vm.grace, self.cpu) };
        edit.replace(range, &entries[..new_count as usize])?;
        edit.publish();
        // The tree has them now.
        new.into_iter().flatten().for_each(|vma| {
            Box::leak(vma);
        });
        let mapped = &self.space.mapped;
        mapped.fetch_add(new_pages.wrapping_sub(old_pages), Ordering::Relaxed);
        for entry in old.iter_from(range.start).take_while(|entry| entry.start < range.end) {
            // SAFETY: the published version does not have it, and only this writer removed it.
            // A link is the first field of a VMA.
            unsafe { self.cpu.retire(entry.value.cast::<RetireLink>()) };
        }
        Ok(())
    }
}

/// A VMA for `area`, stopped.
pub(super) fn make_stopped(area: Area, root: Option<Root>) -> Result<Box<Vma>, OutOfMemory> {
    let vma = heap::try_box(Vma {
        retire: RetireLink::new(RETIRE_VMA),
        sequence: Sequence::new(),
        lock: VmaLock::default(),
        root: RootSlot::new(root),
        leaf: area.leaf(),
        area,
    })?;
    vma.sequence.begin_write();
    Ok(vma)
}

impl<M: Machine> Drop for Writing<'_, '_, M> {
    fn drop(&mut self) {
        let per_vma = self.space.locking_in_force() == Locking::PerVma;
        for range in self.locked {
            // Whatever is stopped in the locked ranges, this writer stopped.
            for vma in self.vmas(range).filter(|vma| vma.sequence.read().is_none()) {
                vma.sequence.end_write();
                if per_vma {
                    vma.lock.end_write();
                }
            }
        }
    }
}
