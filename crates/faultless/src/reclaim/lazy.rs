//! Lazily freed pages: `MADV_FREE` says that a program does not need them until it
//! stores to them again.
//!
//! The advice clears the dirty bit in their entries, and drops the translations that allowed stores, so
//! that the next store sets the bit again. A private anonymous page is installed dirty. Therefore *an entry
//! that maps an anonymous page and is not dirty* maps a lazily freed one that was not stored to since; loads
//! do not matter. Nothing else is recorded of a page. A space records the *hull* of the advised ranges, which limits a
//! search. Its first advice puts it on a list of the subsystem.
//!
//! # Reclaim
//!
//! A CPU that needs frames goes through the spaces of the list. In each:
//!
//! 1. it locks the whole space against writers and locked faults, whatever the policy. It write-locks no VMA, so
//!    faults without a lock proceed;
//! 2. it takes entries of lazily freed pages, each by a compare-and-swap from the value that was not dirty.
//!    So no store has gone through the entry. None will, for it is busy: a CPU that cached the translation
//!    has to look at the entry again before it stores, because it cached it not dirty. The advice has dropped
//!    all others: a writer's flush is complete before its lock is free;
//! 3. it flushes them on every CPU of the space, stores that nothing is there, and only then drops the
//!    mappings' references. Until the flush is complete, faults wait for the busy entries: no CPU still reads
//!    the old page when another stores to a new one.
//!
//! A page that a device has [pinned](crate::Space::pin) stays. A page that a fork has shared since is taken from each space that has it; the last drop frees it. A fork's
//! child notes what its parent has noted.

use super::listed::add;
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::frame::{Kind, Use};
use crate::machine::{Machine, SpaceId};
use crate::space::batch::shoot_core;
use crate::space::fixed::Core;
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
    /// Frees lazily freed pages of any space, at least `wanted` if there are so many and not many more.
    /// Returns how many frames that were. Not inside a grace section, and holding no lock.
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

    /// Frees lazily freed pages of one space, which does not end meanwhile.
    fn reclaim_from(&self, core: &Core, wanted: usize) -> usize {
        if core.lazy.hull(self).is_none() {
            return 0;
        }
        let (vm, all) = (self.vm(), [VirtRange::USER, NOWHERE]);
        // Both locks: they exclude the writers and locked faults of every policy.
        let _coarse = core.mmap_lock.write(self);
        let _fine = core.ranges.acquire(&vm.claims, self.local(), all, self);
        let section = self.section();
        // An owner of the space has no lock of it, and may be moving what is noted.
        core.enter(self.id(), self, &section);
        // The hull stays as it is until this is done: another CPU that finds none fails as out of memory.
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
        // SAFETY: the space does not end meanwhile; its range is locked.
        let visited = unsafe { range::visit(vm.machine(), core.root, hull, self, visit) };
        if let Err(start) = visited {
            add(&mut left, VirtRange { start, end: hull.end });
        }
        // An operation that extends the hull waits for the locks held here, and no CPU becomes the owner in this section.
        *core.lazy.hull.lock(self) = left;
        freed
    }

    /// Whether `entry` maps a lazily freed page.
    pub(crate) fn is_lazily_freed(&self, entry: Entry) -> bool {
        entry.is_mapped()
            && !entry.is_locked()
            && !entry.is_special()
            && (!entry.is_dirty() || lost(Mutant::ReclaimLooksAtDirty))
            && self.vm().frames.meta(entry.frame()).kind() == Kind::Used(Use::Anon)
    }

    /// What `entry` becomes where its page is to stay: the same, but not lazily freed.
    pub(crate) fn kept(&self, entry: Entry) -> Entry {
        if self.is_lazily_freed(entry) { entry.dirty().used() } else { entry }
    }

    /// Frees the lazily freed ones of the pages from `start` on, and adds those to `left` that another CPU holds.
    /// Returns how many frames were freed.
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
                // A device reads it. Pins are taken under a claim, so it is not pinned later.
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
                // A fault has it. A CPU does not wait for an entry while it holds others.
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
            // SAFETY: the reference of the mapping that is gone, flushed above.
            freed += usize::from(unsafe { self.put_unmapped(*frame) });
        }
        self.add_resident_of(core, -(count as i64));
        self.state().counts.add(Counter::LazilyFreed, count as u64);
        freed
    }
}
