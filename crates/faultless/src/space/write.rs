//! What every change of an address space starts with.
//!
//! 1. **Lock.** [`Space::write`] locks the ranges that the operation is about, widened to whole VMAs: those
//!    inside, and those that touch an end and might merge. It also locks the page on either side, so that two
//!    operations on ranges that touch exclude each other even where nothing is mapped yet: each of them merges
//!    with what the other creates. Since that needs a look at the tree before
//!    the lock is had, it looks again afterwards if the tree has changed, and starts over if a VMA
//!    reaches further now.
//!
//!    *Invariant (only what is locked):* a writer stops, merges with and replaces only VMAs that lie wholly
//!    inside a range that it has locked. Builds with debug assertions check it. What it reads of other VMAs
//!    may be out of date a moment later, and each place that does so says why that does no harm.
//! 2. **Stop.** [`Writing::stop`] makes the sequences of the VMAs that will be replaced or whose
//!    entries will change odd, and issues one full fence. From here on no fault installs anything in
//!    them, but for those whose entries are busy, for which the visit of the entries waits. Nor does a fault
//!    give them an anon_vma, so all that the writer does goes by the same ones.
//! 3. **Replace.** [`Writing::replace`] publishes the new VMAs in place of the old ones. This is the
//!    step that can fail, and so it comes before any entry is changed: until then, nothing has
//!    happened. New VMAs start out stopped, so nobody uses them before the entries are as they say.
//! 4. The entries are changed, and the flushes paid.
//! 5. **Finish.** All VMAs of the locked ranges that are in the tree run again. Those that were
//!    replaced stay stopped for ever, and go to the grace period.

use super::merge::Plan;
use super::visit::Visit;
use super::vma::{Area, Vma, VmaLock};
use super::{Guard, Space};
use crate::addr::VirtRange;
use crate::error::{Errno, OutOfMemory};
use crate::heap;
use crate::knob::Locking;
use crate::machine::Machine;
use crate::rmap::{Root, RootSlot};
use crate::space::tree::{Edit, Entry, View};
use crate::stat::Counter;
use crate::sync::atomic::Ordering;
use crate::sync::grace::{RetireChain, RetireLink};
use crate::sync::order::{self, Mark};
use crate::sync::sequence::Sequence;
use crate::vm::{Cpu, RETIRE_VMA};
use alloc::boxed::Box;
use core::cell::Cell;
use core::convert::Infallible;
use core::ops::Deref;
use core::ptr::NonNull;

/// No range.
pub(super) const NOWHERE: VirtRange = VirtRange { start: 0, end: 0 };

/// The right to change one or two ranges of a space.
pub(crate) struct Writing<'a, 'v, M: Machine> {
    /// What it was asked to lock.
    pub(super) asked: [VirtRange; 2],
    /// How many VMAs in the tree this writer has stopped.
    stopped: Cell<usize>,
    /// Those that it put there last.
    fresh: Cell<Fresh>,
    /// Whether VMAs have locks to be taken.
    per_vma: bool,
    /// The locks of the VMAs that this writer has stopped.
    _vma_locks: Mark<'a>,
    visit: Visit<'a, 'v, M>,
}

impl<'a, 'v, M: Machine> Deref for Writing<'a, 'v, M> {
    type Target = Visit<'a, 'v, M>;

    fn deref(&self) -> &Self::Target {
        &self.visit
    }
}

/// Some VMAs: the first so many.
type Fresh = (usize, [NonNull<Vma>; 3]);

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
        let Ok(writing) = self.write_where(cpu, align, |_| Ok::<_, Infallible>(ranges));
        writing
    }

    /// As [`write`](Self::write), the ranges that `choose` finds in the tree. Others may have changed what it looked at before they are locked.
    ///
    /// # Errors
    /// What `choose` returns.
    pub(super) fn write_where<'a, 'v, E>(
        &'a self,
        cpu: &'a Cpu<'v, M>,
        align: u64,
        choose: impl Fn(&View<'_, Vma>) -> Result<[VirtRange; 2], E>,
    ) -> Result<Writing<'a, 'v, M>, E> {
        loop {
            let locking = self.locking(cpu);
            let coarse = (locking != Locking::Speculative).then(|| self.lock_all(cpu));
            let section = cpu.section();
            let seen = self.tree.snapshot(&section);
            let version = seen.version();
            let asked = choose(&seen)?;
            let locked = asked.map(|range| reach(&seen, range, align));
            let mut section = Some(section);
            // Nothing is waited for in a section.
            let guard = coarse.unwrap_or_else(|| {
                cpu.count(Counter::RangeLockWrite);
                self.claim(cpu, locked, || drop(section.take()))
            });
            if self.locking_in_force() != locking {
                continue;
            }
            let section = match section {
                // Within one section the same version is the same tree.
                Some(section) if self.tree.snapshot(&section).version() == version => section,
                section => {
                    let section = section.unwrap_or_else(|| cpu.section());
                    let now = self.tree.snapshot(&section);
                    if asked.map(|range| reach(&now, range, align)) != locked {
                        continue;
                    }
                    section
                }
            };
            let (stopped, per_vma) = (Cell::new(0), locking == Locking::PerVma);
            let fresh = Cell::new((0, [NonNull::dangling(); 3]));
            let vma_locks = if per_vma { order::hold::<order::VmaLock>(cpu) } else { Mark::none() };
            let visit = Visit { cpu, space: self, claimed: locked, section, _guard: guard };
            return Ok(Writing { asked, stopped, fresh, per_vma, _vma_locks: vma_locks, visit });
        }
    }

    /// Takes the baselines' one lock.
    #[inline(never)]
    fn lock_all<'a>(&'a self, cpu: &'a Cpu<'_, M>) -> Guard<'a> {
        cpu.count(Counter::MmapLockWrite);
        Guard::Writing { _guard: self.core.mmap_lock.write(cpu) }
    }
}

/// `range`, widened to multiples of `align`, by a page on either side, and to the whole of every VMA that
/// overlaps or touches it.
fn reach(view: &View<'_, Vma>, range: VirtRange, align: u64) -> VirtRange {
    if range.is_empty() {
        return range;
    }
    // Whatever is in the neighbouring pages touches the range.
    let near = range.with_neighbours();
    let mut reach = range.widen(align).hull(near);
    let mut vmas = view.iter_from(near.start);
    while let Some(entry) = vmas.next()
        && entry.start < near.end
    {
        reach = reach.hull(entry.range());
    }
    reach
}

impl<M: Machine> Writing<'_, '_, M> {
    /// The VMA of `entry`, which is in the tree or was in this writer's time, and in a locked range.
    pub(super) fn vma(&self, entry: Entry<Vma>) -> &Vma {
        debug_assert!(self.claims(entry.range()), "{:?} is not locked", entry.range());
        self.vma_anywhere(entry)
    }

    /// The VMA of `entry`, which is in the tree or was in this writer's time. It may have been replaced since.
    pub(super) fn vma_anywhere(&self, entry: Entry<Vma>) -> &Vma {
        // SAFETY: VMAs in a view live as long as the section, which lives as long as `self`.
        unsafe { entry.value.as_ref() }
    }

    /// The VMA at `addr`, which is locked.
    pub(super) fn vma_at(&self, addr: u64) -> Option<&Vma> {
        self.view().at(addr).map(|entry| self.vma(entry))
    }

    /// Stops the VMAs that overlap `range`: no fault without a lock succeeds in them any more.
    pub(super) fn stop(&self, range: VirtRange) {
        self.vmas(range).for_each(|vma| self.stop_one(vma));
        Sequence::writer_fence();
    }

    /// Stops `vma`, of a locked range, unless it is stopped already. [`Sequence::writer_fence`] must
    /// follow.
    pub(super) fn stop_one(&self, vma: &Vma) {
        debug_assert!(self.claims(vma.area.range), "{:?} is not locked", vma.area.range);
        if vma.sequence.read().is_some() {
            if self.per_vma {
                vma.lock.write(self.cpu);
            }
            vma.sequence.begin_write();
            vma.root.seal();
            self.stopped.set(self.stopped.get() + 1);
        }
    }

    /// Lets `vma`, which this writer has stopped, run again.
    fn resume(&self, vma: &Vma) {
        debug_assert!(self.claims(vma.area.range), "{:?} is not locked", vma.area.range);
        vma.root.unseal();
        self.begin(vma);
    }

    /// Lets `vma`, which was made stopped, run.
    fn begin(&self, vma: &Vma) {
        vma.sequence.end_write();
        if self.per_vma {
            vma.lock.end_write();
        }
        self.stopped.set(self.stopped.get() - 1);
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
        let no_entry = Entry { start: 0, end: 0, value: NonNull::dangling() };
        let mut entries = [no_entry; 3];
        let (mut count, mut pages) = (0, 0);
        for vma in new.into_iter().flatten() {
            let range = vma.area.range;
            let VirtRange { start, end } = range;
            // No box from here on: to move one is to claim that there is no other pointer.
            entries[count] = Entry { start, end, value: NonNull::from(Box::leak(vma)) };
            count += 1;
            pages += range.pages();
        }
        self.publish(range, &entries[..count], pages).inspect_err(|_| {
            for entry in &entries[..count] {
                // SAFETY: a box until just now, and the tree does not have it.
                drop(unsafe { Box::from_raw(entry.value.as_ptr()) });
            }
        })?;
        self.fresh.set((count, entries.map(|entry| entry.value)));
        Ok(())
    }

    /// The part of [`replace`](Self::replace) that can fail. Then the tree is as it was. `pages` is how many
    /// the new VMAs have.
    #[inline(always)]
    fn publish(&self, range: VirtRange, new: &[Entry<Vma>], mut pages: u64) -> Result<(), Errno> {
        let vm = self.cpu.vm();
        // SAFETY: the subsystem has one grace period, in whose sections all trees are read.
        let mut edit = unsafe { self.space.tree.edit(self.cpu.local(), &vm.grace, self.cpu) };
        let mut old = RetireChain::default();
        edit.replace(range, new, |entry| {
            debug_assert!(self.vma(entry).sequence.read().is_none());
            pages = pages.wrapping_sub(entry.range().pages());
            // SAFETY: a link is the first field of a VMA. It lives until it is retired, and only the
            // writer of its range touches the link.
            unsafe { old.push(entry.value.cast::<RetireLink>()) };
        })?;
        if new.len() > old.len() && edit.view().len() as u64 > vm.knobs.max_map_count() {
            return Err(Errno::ENOMEM);
        }
        self.stopped.set(self.stopped.get() + new.len() - old.len());
        self.space.mapped.fetch_add(pages, Ordering::Relaxed);
        // SAFETY: the published version does not have the old ones, and only this writer removed them.
        unsafe { edit.publish_retiring(old) };
        Ok(())
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Does `first`, and what `second` plans in view of its result, at once: what a move changes here
    /// and there must not be half done.
    ///
    /// # Errors
    /// As [`replace`](Self::replace). Nothing has changed.
    pub(super) fn replace_both(
        &self,
        first: Plan,
        second: impl FnOnce(&View<'_, Vma>) -> Result<Option<Plan>, OutOfMemory>,
    ) -> Result<(), Errno> {
        let vm = self.cpu.vm();
        // SAFETY: the subsystem has one grace period, in whose sections all trees are read.
        let mut edit = unsafe { self.space.tree.edit(self.cpu.local(), &vm.grace, self.cpu) };
        let mut old = RetireChain::default();
        let mut made = Made::default();
        let mut pages = 0;
        let mut replace = |edit: &mut Edit<'_, Vma>,
                           plan: Plan,
                           made: &mut [Option<NonNull<Vma>>]| {
            let (before, rest) = made.split_at_mut(made.len() - plan.new.len());
            // No box from here on, as in `replace`.
            let leak = |vma| NonNull::from(Box::leak(vma));
            rest.iter_mut().zip(plan.new).for_each(|(made, new)| *made = new.map(leak));
            let no_entry = Entry { start: 0, end: 0, value: NonNull::dangling() };
            let (mut entries, mut count) = ([no_entry; 3], 0);
            for &value in rest.iter().flatten() {
                // SAFETY: made just now, and freed by `made` only.
                let range = unsafe { value.as_ref() }.area.range;
                entries[count] = Entry { start: range.start, end: range.end, value };
                count += 1;
                pages += range.pages();
            }
            edit.replace(plan.taken, &entries[..count], |entry| {
                debug_assert!(self.vma(entry).sequence.read().is_none());
                pages = pages.wrapping_sub(entry.range().pages());
                if let Some(first) = before.iter_mut().find(|made| **made == Some(entry.value)) {
                    *first = None;
                    // SAFETY: made by the first plan; nobody has seen it, and nobody will.
                    drop(unsafe { Box::from_raw(entry.value.as_ptr()) });
                    return;
                }
                // SAFETY: a link is the first field of a VMA. It lives until it is retired, and only
                // the writer of its range touches the link.
                unsafe { old.push(entry.value.cast::<RetireLink>()) };
            })
        };
        replace(&mut edit, first, &mut made.0[..3])?;
        if let Some(second) = second(&edit.view())? {
            replace(&mut edit, second, &mut made.0)?;
        }
        let count = made.0.iter().flatten().count();
        if count > old.len() && edit.view().len() as u64 > vm.knobs.max_map_count() {
            return Err(Errno::ENOMEM);
        }
        // The tree has them now.
        core::mem::forget(made);
        self.stopped.set(self.stopped.get() + count - old.len());
        // Too many to be remembered one by one.
        self.fresh.set((0, [NonNull::dangling(); 3]));
        self.space.mapped.fetch_add(pages, Ordering::Relaxed);
        // SAFETY: the published version does not have the old ones, and only this writer removed them.
        unsafe { edit.publish_retiring(old) };
        Ok(())
    }
}

/// VMAs that no tree has yet, for two plans; they are freed if none ever will.
#[derive(Default)]
struct Made([Option<NonNull<Vma>>; 6]);

impl Drop for Made {
    fn drop(&mut self) {
        for vma in self.0.into_iter().flatten() {
            // SAFETY: leaked from a box, and in no tree, or they would have been forgotten.
            drop(unsafe { Box::from_raw(vma.as_ptr()) });
        }
    }
}

/// A VMA for `area`, stopped.
pub(super) fn make_stopped(area: Area, root: Option<Root>) -> Result<Box<Vma>, OutOfMemory> {
    let vma = heap::try_box_with(|| Vma {
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
        let (fresh, vmas) = self.fresh.get();
        if self.stopped.get() == fresh {
            // As many as these are stopped, and these are: no other is.
            for vma in &vmas[..fresh] {
                // SAFETY: VMAs that were in the tree live as long as the section.
                self.begin(unsafe { vma.as_ref() });
            }
            return;
        }
        for range in self.claimed {
            // Whatever is stopped in the locked ranges, this writer stopped.
            let mut vmas = self.vmas(range).filter(|vma| vma.sequence.read().is_none());
            while self.stopped.get() != 0
                && let Some(vma) = vmas.next()
            {
                self.resume(vma);
            }
        }
        debug_assert_eq!(self.stopped.get(), 0, "stopped outside of the locked ranges");
    }
}
