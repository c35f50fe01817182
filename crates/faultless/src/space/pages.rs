//! How writers change the entries of a range. The VMAs over the range are write-locked, so no fault
//! without a lock installs anything behind the writer. The range is locked, so no other fault is
//! there.

use super::Space;
use super::write::Writing;
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::error::OutOfMemory;
use crate::fault::prepared::Preparing;
use crate::fault::table;
use crate::fault::ticket::{Abort, Ticket};
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::space::harvest::Was;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::grace::RetireChain;
use crate::table::Entry;
use crate::table::format::USER_END;
use crate::table::node::{self, ENTRIES, LAST, TABLE_ALIGN};
use crate::table::protocol;
use crate::table::range::{self, Leaves};
use crate::table::walk::{Reached, descend};
use crate::vm::Cpu;
use core::convert::Infallible;

/// Calls `each` with every run of neighbouring entries that map base pages of `range`, and the
/// address of the first entry. The call leaves out huge leaves.
///
/// # Safety
/// As [`range::visit`].
pub(super) unsafe fn each_run<'v, M: Machine, E>(
    cpu: &Cpu<'v, M>,
    root: FrameNumber,
    range: VirtRange,
    mut each: impl FnMut(u64, &'v [AtomicU64]) -> Result<(), E>,
) -> Result<(), E> {
    let visit = |leaves: Leaves<'v>| match leaves {
        Leaves::Pages { start, slots } => each(start, slots),
        Leaves::Huge { .. } => Ok(()),
    };
    // SAFETY: the caller's promise.
    unsafe { range::visit(cpu.vm().machine(), root, range, cpu, visit) }
}

/// A leaf that a visit meets.
pub(super) enum Leaf<'a> {
    /// The entry of the page at `addr`, mapped or not.
    Page { addr: u64, slot: &'a AtomicU64 },
    /// The entry of a huge leaf, for the pages starting at `start`. `whole` is set if the range
    /// covers all the pages.
    Huge { start: u64, slot: &'a AtomicU64, whole: bool },
}

/// Calls `each` with every leaf of `range` for which a table exists.
///
/// # Safety
/// As [`range::visit`].
#[inline(always)]
pub(super) unsafe fn each_leaf<M: Machine>(
    cpu: &Cpu<'_, M>,
    root: FrameNumber,
    range: VirtRange,
    mut each: impl FnMut(Leaf<'_>),
) {
    let visit = |leaves: Leaves<'_>| {
        match leaves {
            Leaves::Pages { start, slots } => {
                for (at, slot) in slots.iter().enumerate() {
                    each(Leaf::Page { addr: start + at as u64 * PAGE_SIZE, slot });
                }
            }
            Leaves::Huge { start, slot, whole } => each(Leaf::Huge { start, slot, whole }),
        }
        Ok::<(), Infallible>(())
    };
    // SAFETY: the caller's promise.
    let Ok(()) = unsafe { range::visit(cpu.vm().machine(), root, range, cpu, visit) };
}

/// Calls `tell` with every present entry of `range`, in ascending order: the entry of a page, or
/// the entry of a huge leaf with the pages that are in the range. Each page is in at most one call.
///
/// # Safety
/// As [`range::visit`].
pub(super) unsafe fn each_entry<M: Machine>(
    cpu: &Cpu<'_, M>,
    root: FrameNumber,
    range: VirtRange,
    mut tell: impl FnMut(VirtRange, Entry),
) {
    let mut next = range.start;
    let mut tell = |part: VirtRange, entry: Entry| {
        // Once for each table.
        if node::index(part.start, LAST) == 0 {
            cpu.serve_flushes();
        }
        tell(part, entry);
    };
    let leaf = |leaf: Leaf<'_>| match leaf {
        // If another CPU splits a huge leaf, the visit meets the new table afterwards, with pages
        // already reported.
        Leaf::Page { addr, .. } if addr < next => {}
        Leaf::Page { addr, slot } => tell(VirtRange::page(addr), node::load(slot)),
        Leaf::Huge { start, slot, .. } => {
            let seen = node::load(slot);
            // Not if the leaf was split before this load.
            if seen.is_huge() {
                next = start + TABLE_ALIGN;
                tell(range.intersect(VirtRange::new(start, next)), seen);
            }
        }
    };
    // SAFETY: the caller's promise.
    unsafe { each_leaf(cpu, root, range, leaf) };
}

/// Calls `each` with the address and the slot of every base page of `range` for which a table
/// exists. The call leaves out huge leaves.
///
/// # Safety
/// As [`range::visit`].
pub(super) unsafe fn each_slot<M: Machine>(
    cpu: &Cpu<'_, M>,
    root: FrameNumber,
    range: VirtRange,
    mut each: impl FnMut(u64, &AtomicU64),
) {
    let page = |leaf: Leaf<'_>| {
        if let Leaf::Page { addr, slot } = leaf {
            each(addr, slot);
        }
    };
    // SAFETY: the caller's promise.
    unsafe { each_leaf(cpu, root, range, page) };
}

impl<M: Machine> Space<M> {
    /// Returns the entry of the page at `addr`. If the page has no table, the result is the empty
    /// entry above, which is none or busy. The entry may change a moment later.
    ///
    /// Above user space the result is none: the upper half of the root table belongs to the kernel,
    /// and may point to memory outside the subsystem.
    pub(crate) fn entry_at(&self, cpu: &Cpu<'_, M>, addr: u64) -> Entry {
        let _section = self.section(cpu);
        if addr >= USER_END {
            return Entry::NONE;
        }
        // SAFETY: inside a grace section.
        match unsafe { descend(cpu.vm().machine(), self.root(), addr) } {
            Reached::Last(slots) => node::load(&slots[node::index(addr, LAST)]),
            Reached::Above { seen, .. } if seen.is_huge() => seen.part(node::index(addr, LAST)),
            Reached::Above { seen, .. } => seen,
        }
    }
}

impl<M: Machine> Space<M> {
    /// Makes a lazily freed page at `addr` stay, then returns the entry of the page, as
    /// [`entry_at`](Self::entry_at).
    pub(super) fn entry_kept(&self, cpu: &Cpu<'_, M>, addr: u64) -> Entry {
        let _section = self.section(cpu);
        // SAFETY: inside a grace section.
        match unsafe { descend(cpu.vm().machine(), self.root(), addr) } {
            // By compare-and-swap, so an entry that a writer or reclaim has changed keeps that
            // change.
            Reached::Last(slots) => {
                protocol::wait_and_replace(&slots[node::index(addr, LAST)], cpu, |entry| {
                    cpu.kept(entry)
                })
                .1
            }
            // The pages of a huge leaf are the file's.
            Reached::Above { seen, .. } if seen.is_huge() => seen.part(node::index(addr, LAST)),
            Reached::Above { seen, .. } => seen,
        }
    }
}

/// Returns the last-level table of `addr`, and makes missing tables. If the call meets a huge leaf,
/// it calls `split` with the entry and the address of the first page.
///
/// # Errors
/// [`OutOfMemory`]; the tables made so far stay, empty.
///
/// # Safety
/// The caller holds the range lock over `addr`, or no other CPU can use the space.
pub(super) unsafe fn last_table<'v, M: Machine>(
    cpu: &Cpu<'v, M>,
    root: FrameNumber,
    addr: u64,
    split: impl Fn(u64, &AtomicU64),
) -> Result<&'v [AtomicU64; ENTRIES], OutOfMemory> {
    let mut prepared = Preparing::new(cpu);
    loop {
        // SAFETY: the caller's promise.
        match unsafe { descend(cpu.vm().machine(), root, addr) } {
            Reached::Last(slots) => return Ok(slots),
            Reached::Above { slot, level, .. } => {
                if protocol::wait_and_load(slot, cpu).is_huge() {
                    split(addr & !(TABLE_ALIGN - 1), slot);
                }
                if node::load(slot).is_none()
                    && table::publish(cpu, Ticket::held(), slot, level, &mut prepared)
                        == Err(Abort::NoMemory)
                {
                    cpu.note_starved();
                    return Err(OutOfMemory);
                }
            }
        }
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Empties every entry of `range`, and adds the old contents to `batch`. Records the use of the
    /// pages for the VMAs in `was`, if given. Returns whether any last-level table exists over the
    /// range.
    pub(super) fn zap(
        &self,
        range: VirtRange,
        was: Option<&Was<'_>>,
        batch: &mut FlushBatch<'_, '_, M>,
    ) -> bool {
        let (mut gone, mut tables) = (0, false);
        let zap = |leaves: Leaves<'_>| {
            gone += match leaves {
                Leaves::Pages { start, slots } => {
                    tables = true;
                    self.zap_table(start, slots, was, batch)
                }
                Leaves::Huge { start, slot, whole } => self.zap_huge(start, slot, whole, batch),
            };
            Ok::<(), Infallible>(())
        };
        let machine = self.cpu.vm().machine();
        // SAFETY: the range is locked.
        let Ok(()) = unsafe { range::visit(machine, self.space.root(), range, self.cpu, zap) };
        if gone != 0 {
            self.cpu.add_resident(self.space, -(gone as i64));
        }
        self.space.core.moves.forget(range, self.cpu);
        tables
    }

    /// [`zap`](Self::zap) for the pages starting at `start`, whose entries `slots` are in one
    /// table. Returns the number of pages removed.
    #[inline(never)]
    fn zap_table(
        &self,
        start: u64,
        slots: &[AtomicU64],
        was: Option<&Was<'_>>,
        batch: &mut FlushBatch<'_, '_, M>,
    ) -> usize {
        if let Some(was) = was
            && slots.iter().any(|slot| !node::load(slot).is_none())
        {
            self.remember(start, slots, was);
        }
        batch.unmap(start, slots, |slot, seen| {
            let old = protocol::wait_and_replace_from(slot, seen, self.cpu, |_| Entry::NONE).0;
            if old.is_swapped() {
                self.cpu.drop_swapped(&self.space.core, old);
            }
            old
        })
    }

    /// Unlinks the tables of `range` that have no VMA over them, within `claimed`, the claimed
    /// range around `range`. The entries below are empty.
    #[inline(never)]
    pub(super) fn prune(
        &self,
        range: VirtRange,
        claimed: VirtRange,
        batch: &mut FlushBatch<'_, '_, M>,
    ) {
        let (below, above) = self.view().around(range.start);
        let free = VirtRange {
            start: below.map_or(0, |entry| entry.end),
            end: above.map_or(u64::MAX, |entry| entry.start),
        };
        debug_assert!(free.covers(range), "{range:?} is not free");
        let hull = claimed.intersect(free);
        if !node::holds_table(hull) {
            return;
        }
        let machine = self.cpu.vm().machine();
        let mut unlinked = RetireChain::default();
        let mut retire = |number: FrameNumber, level: u32| {
            let recorded = || self.cpu.vm().frames.meta(number).index.load(Ordering::Relaxed);
            debug_assert_eq!(recorded(), u64::from(level));
            self.retire_table(number, &mut unlinked);
        };
        // SAFETY: `hull` is locked and without a VMA; entries without a VMA are empty.
        unsafe { range::prune(machine, self.space.root(), hull, self.cpu, &mut retire) };
        if !unlinked.is_empty() {
            // CPUs may have cached the path to the tables.
            batch.flush(hull);
            // SAFETY: unlinked just now, with every VMA over their spans gone; retired once. The
            // batch is finished before this call's section closes, so before a table is freed.
            unsafe { self.cpu.retire_all(unlinked) };
        }
    }

    /// Adds the table in `number`, which was unlinked just now, to the tables that one call is to
    /// retire.
    #[inline(always)]
    pub(super) fn retire_table(&self, number: FrameNumber, unlinked: &mut RetireChain) {
        self.cpu.count(Counter::TablePruned);
        let meta = self.cpu.vm().frames.meta(number);
        meta.set_use(crate::frame::FrameUse::Retired);
        // SAFETY: unlinked once; alive until the retirement.
        unsafe { unlinked.push(meta.retire_link()) };
    }

    /// Makes the lazily freed pages in `range` stay.
    pub(super) fn keep_pages(&self, range: VirtRange) {
        // SAFETY: the range is locked.
        unsafe {
            each_slot(self.cpu, self.space.root(), range, |_, slot| {
                if !node::load(slot).is_none() {
                    protocol::wait_and_replace(slot, self.cpu, |entry| self.cpu.kept(entry));
                }
            });
        }
    }

    /// Makes the tables that the pages of `from` need at `to`, so that the move of the pages cannot
    /// fail. A large range with few pages needs few tables.
    pub(super) fn make_tables(&self, from: VirtRange, to: u64) -> Result<(), OutOfMemory> {
        let root = self.space.root();
        let make = |leaves: Leaves<'_>| {
            let part = match leaves {
                Leaves::Pages { start, slots } => {
                    VirtRange::new(start, start + slots.len() as u64 * PAGE_SIZE)
                }
                Leaves::Huge { start, .. } => {
                    VirtRange::new(start, start + TABLE_ALIGN).intersect(from)
                }
            };
            // The range may be large, and the loop waits for nothing else.
            self.cpu.serve_flushes();
            // At `to` the part may be in two tables.
            for addr in [part.start, part.end - PAGE_SIZE] {
                let split = |start: u64, slot: &AtomicU64| self.space.split(self.cpu, start, slot);
                // SAFETY: the range is locked.
                unsafe { last_table(self.cpu, root, to + (addr - from.start), split) }?;
            }
            Ok(())
        };
        // SAFETY: as above.
        unsafe { range::visit(self.cpu.vm().machine(), root, from, self.cpu, make) }
    }
}
