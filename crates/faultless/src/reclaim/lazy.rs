//! Lazily freed pages: by `MADV_FREE` a program declares the pages unneeded until its next store to
//! them.
//!
//! The advice clears the dirty bit in their entries, and drops the translations that allowed
//! stores, so that the next store sets the bit again. A private anonymous page is installed dirty.
//! Therefore *an entry that maps an anonymous page and is not dirty* maps a lazily freed page
//! without a store since the advice; loads do not matter. No further state is recorded for a page.
//! A space records the *hull* of the advised ranges, which limits a search. The first advice adds
//! the space to a list of the subsystem.
//!
//! # Reclaim
//!
//! A CPU that needs frames scans the spaces of the list. For each space:
//!
//! 1. The CPU locks the whole space against writers and locked faults, under every policy. No VMA
//!    is write-locked, so faults without a lock proceed.
//! 2. The CPU takes entries of lazily freed pages, each by a compare-and-swap from the clean value.
//!    So no store has used the entry. No store will, because the entry is busy: a CPU with a cached
//!    translation must read the entry again before a store, because the cached translation is not
//!    dirty. The advice has dropped all dirty translations: a writer's flush completes before its
//!    lock is released.
//! 3. The CPU flushes the pages on every CPU of the space, empties the entries, and only then drops
//!    the mappings' references. Until the flush is complete, faults wait for the busy entries: no
//!    CPU reads the old page after a store to a new page.
//!
//! A [pinned](crate::Space::pin) page stays. A page shared by a later fork is taken from each space
//! that maps the page; the last drop frees the page. The child of a fork inherits its parent's
//! hull.

use super::lazy_list::add;
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::frame::{FrameUse, Kind};
use crate::machine::{Machine, SpaceId};
use crate::space::batch::shoot_core;
use crate::space::core::Core;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, Reclaim};
use crate::table::Entry;
use crate::table::node;
use crate::table::protocol::{self, MOST_TAKEN, Taken};
use crate::table::range::{self, Leaves};
use crate::vm::Cpu;

const NOWHERE: VirtRange = VirtRange { start: 0, end: 0 };

impl<M: Machine> Cpu<'_, M> {
    /// Frees lazily freed pages of any space, at least `wanted` if there are so many, and not many
    /// more. Returns the number of frames freed. The caller is in no grace section and holds no
    /// lock.
    #[cold]
    pub(crate) fn reclaim_lazy(&self, wanted: usize) -> usize {
        let (mut freed, mut below) = (0, SpaceId(u64::MAX));
        while freed < wanted {
            order::before::<Reclaim>(self);
            let Some(core) = self.vm().lazy.enter(self, below) else { break };
            {
                let _reclaim = order::hold::<Reclaim>(self);
                freed += self.reclaim_from(&core, wanted - freed);
            }
            below = core.id;
        }
        freed
    }

    /// Frees lazily freed pages of one space, which cannot end during the call.
    fn reclaim_from(&self, core: &Core, wanted: usize) -> usize {
        if core.lazy.hull(self).is_none() {
            return 0;
        }
        let (vm, all) = (self.vm(), [VirtRange::USER, NOWHERE]);
        // Both locks: together they exclude the writers and locked faults of every policy.
        let _coarse = core.mmap_lock.write(self);
        let _fine = core.ranges.acquire(&vm.claims, self.local(), all, self);
        let section = self.section();
        // An owner of the space holds none of its locks, and may be changing the hull.
        core.enter(self.id(), self, &section);
        // The hull keeps its value until the end, because a second CPU fails as out of memory if it
        // finds no hull.
        let Some(hull) = core.lazy.hull(self) else { return 0 };
        let (mut freed, mut left) = (0, None);
        let visit = |leaves: Leaves<'_>| {
            let Leaves::Pages { start, slots } = leaves else { return Ok(()) };
            for (number, slots) in slots.chunks(MOST_TAKEN).enumerate() {
                let start = start + (number * MOST_TAKEN) as u64 * PAGE_SIZE;
                if freed >= wanted {
                    return Err(start);
                }
                freed += self.reclaim_run(core, start, slots, &mut left);
            }
            Ok(())
        };
        // SAFETY: the space cannot end during the call; its range is locked.
        let visited = unsafe { range::visit(vm.machine(), core.root, hull, self, visit) };
        if let Err(start) = visited {
            add(&mut left, VirtRange { start, end: hull.end });
        }
        // An operation that extends the hull waits for the locks held here, and no CPU becomes the
        // owner in this section.
        *core.lazy.hull.lock(self) = left;
        freed
    }

    /// Returns whether `entry` maps a lazily freed page.
    pub(crate) fn is_lazily_freed(&self, entry: Entry) -> bool {
        entry.is_mapped()
            && !entry.is_locked()
            && !entry.is_special()
            && (!entry.is_dirty() || lost(Mutant::ReclaimLooksAtDirty))
            && self.vm().frames.meta(entry.frame()).kind() == Kind::Used(FrameUse::Anon)
    }

    /// Returns the entry for a page that must stay: the same entry, but not lazily freed.
    pub(crate) fn kept(&self, entry: Entry) -> Entry {
        if self.is_lazily_freed(entry) { entry.dirty().used() } else { entry }
    }

    /// Frees the lazily freed pages among the pages starting at `start`, and adds pages held by
    /// another CPU to `left`. Returns the number of frames freed.
    fn reclaim_run(
        &self,
        core: &Core,
        start: u64,
        slots: &[AtomicU64],
        left: &mut Option<VirtRange>,
    ) -> usize {
        let addr = |at: usize| start + at as u64 * PAGE_SIZE;
        let mut held: [Option<(Taken<'_>, FrameNumber)>; MOST_TAKEN] = [const { None }; MOST_TAKEN];
        let (mut first, mut behind) = (usize::MAX, 0);
        for (at, slot) in slots.iter().enumerate() {
            let mut seen = node::load(slot);
            if self.is_lazily_freed(seen) && self.vm().frames.meta(seen.frame()).is_pinned() {
                // A device uses the page. Pins are taken under a claim, so the page cannot become
                // pinned later.
                add(left, VirtRange::page(addr(at)));
                continue;
            }
            while self.is_lazily_freed(seen) {
                match protocol::take(slot, seen, self) {
                    Ok(taken) => {
                        held[at] = Some((taken, seen.frame()));
                        first = first.min(at);
                        behind = at + 1;
                        break;
                    }
                    Err(now) => seen = now,
                }
            }
            if seen.is_locked() {
                // A fault holds the entry. A CPU does not wait for an entry while holding entries.
                add(left, VirtRange::page(addr(at)));
            }
        }
        if behind == 0 {
            return 0;
        }
        if !lost(Mutant::ReclaimFlush) {
            shoot_core(self, core, VirtRange::new(addr(first), addr(behind)));
        }
        let mut gone = [FrameNumber(0); MOST_TAKEN];
        let mut count = 0;
        for (taken, frame) in held.into_iter().flatten() {
            taken.commit(Entry::NONE);
            gone[count] = frame;
            count += 1;
        }
        let mut freed = 0;
        for frame in &gone[..count] {
            // SAFETY: drops the reference of the removed mapping, which was flushed above.
            freed += usize::from(unsafe { self.put_unmapped(*frame) });
        }
        self.add_resident_of(core, -(count as i64));
        self.state().counts.add(Counter::LazilyFreed, count as u64);
        freed
    }
}
