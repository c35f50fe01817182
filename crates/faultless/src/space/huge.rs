//! Huge leaves of a space: splitting, unmapping, and restricting them.
//!
//! A huge leaf maps 512 pages of a file, a [folio](crate::file::folio), and never allows stores. It
//! is an entry of the level above the last, with the [same lock](crate::table::protocol). An
//! operation on all of its pages changes it like any leaf. An operation on a part of the pages, or
//! a store, *splits* the leaf:
//!
//! 1. It takes the entry, which becomes busy: walks that reach the entry wait.
//! 2. It flushes the leaf's pages, because no CPU may use the huge translation and translations of
//!    base pages at the same time.
//! 3. It fills a new table with the leaves of the base pages, with the attributes of the huge leaf
//!    (permissions, accessed and dirty bits), and with a reference each.
//! 4. It stores the table, and drops the huge leaf.
//!
//! Neighbouring pages are not affected: a split needs no claim on the other pages, and stops no
//! VMA. If no frame is free for the table, the whole leaf is dropped: the file has the pages, and
//! the next access maps them again. So a split never fails.

use super::Space;
use super::batch::{FlushBatch, shoot, shoot_core};
use super::core::Core;
use super::visit::Visit;
use super::write::Writing;
use crate::addr::{FrameNumber, VirtRange};
use crate::frame::{FrameUse, folio};
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, ENTRIES, LAST, TABLE_ALIGN};
use crate::table::protocol;
use crate::vm::Cpu;

/// Returns whether `entry`, of the level above the last, is a huge leaf.
fn is_leaf(entry: Entry) -> bool {
    entry.is_huge() && entry.is_mapped()
}

/// Returns the pages of a huge leaf.
const fn pages_of(start: u64) -> VirtRange {
    VirtRange { start, end: start + TABLE_ALIGN }
}

impl<M: Machine> Space<M> {
    /// [`split_leaf`] of this space.
    #[inline]
    pub(crate) fn split(&self, cpu: &Cpu<'_, M>, start: u64, slot: &AtomicU64) {
        split_leaf(cpu, &self.core, start, slot);
    }
}

/// Splits the huge leaf in `slot`, the entry of the pages starting at `start` in the space of
/// `core`, if it is a huge leaf. After the call the entry was not a huge leaf at some moment.
#[cold]
#[inline(never)]
pub(crate) fn split_leaf<M: Machine>(cpu: &Cpu<'_, M>, core: &Core, start: u64, slot: &AtomicU64) {
    let mut table = cpu.alloc_table();
    loop {
        let seen = protocol::wait_and_load(slot, cpu);
        if !is_leaf(seen) {
            break;
        }
        let Ok(held) = protocol::take(slot, seen, cpu) else { continue };
        shoot_core(cpu, core, pages_of(start));
        let (next, left) = match table.take() {
            Some(frame) => {
                let number = cpu.vm().frames.publish(frame, FrameUse::Table, 0, u64::from(LAST));
                (Entry::table(number), fill(cpu, number, seen))
            }
            None => (Entry::NONE, 0),
        };
        held.commit(next);
        // SAFETY: flushed above, while the entry was busy.
        unsafe { cpu.put_leaf(seen.frame()) };
        if left != ENTRIES {
            cpu.add_resident_of(core, left as i64 - ENTRIES as i64);
        }
        cpu.count(Counter::ThpSplitPmd);
        cpu.state().counts.take(Counter::FilePmdMapped, 1);
        break;
    }
    if let Some(frame) = table {
        cpu.free(frame);
    }
}

/// Fills the new table in `number` with the parts of `leaf`, and returns how many of them have a
/// page: all except pages with the maximum number of mappings.
fn fill<M: Machine>(cpu: &Cpu<'_, M>, number: FrameNumber, leaf: Entry) -> usize {
    // SAFETY: only this CPU has access to the table until it is stored.
    let slots = unsafe { node::entries(cpu.vm().machine(), number) };
    let mut left = 0;
    for (at, (slot, frame)) in slots.iter().zip(folio::frames_of(leaf.frame())).enumerate() {
        // The leaf's reference still exists.
        if cpu.vm().frames.meta(frame).get_mapping() {
            slot.store(leaf.part(at).0, Ordering::Relaxed);
            left += 1;
        }
    }
    left
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Unmaps the huge leaf in `slot`, the entry of the pages starting at `start`, or splits it if
    /// not the `whole` leaf is affected. Returns how many pages were unmapped.
    #[cold]
    #[inline(never)]
    pub(super) fn zap_huge(
        &self,
        start: u64,
        slot: &AtomicU64,
        whole: bool,
        batch: &mut FlushBatch<'_, '_, M>,
    ) -> usize {
        if !whole {
            self.space.split(self.cpu, start, slot);
            return 0;
        }
        let empty = |entry| if is_leaf(entry) { Entry::NONE } else { entry };
        let (old, new) = protocol::wait_and_replace(slot, self.cpu, empty);
        if old == new {
            return 0;
        }
        batch.unmap_folio(start, old);
        self.cpu.state().counts.take(Counter::FilePmdMapped, 1);
        ENTRIES
    }

    /// Replaces the huge leaf in `slot`, the entry of the pages starting at `start`, by the result
    /// of `allow`, or splits it if not the `whole` leaf is affected.
    #[cold]
    #[inline(never)]
    pub(super) fn restrict_huge(
        &self,
        start: u64,
        slot: &AtomicU64,
        whole: bool,
        batch: &mut FlushBatch<'_, '_, M>,
        allow: &impl Fn(Entry) -> Entry,
    ) {
        if !whole {
            return self.space.split(self.cpu, start, slot);
        }
        let change = |entry| if is_leaf(entry) { allow(entry) } else { entry };
        let (old, new) = protocol::wait_and_replace(slot, self.cpu, change);
        if new.needs_flush(old) && !lost(Mutant::ProtectFlush) {
            batch.flush(pages_of(start));
        }
    }
}

impl<M: Machine> Visit<'_, '_, M> {
    /// Removes the huge leaf in `slot`, the entry of the pages starting at `start`, if `goes`
    /// selects its pages, or splits it if not the `whole` leaf is affected. As in [any
    /// discard](super::discard), the entry is busy until the flush is complete.
    #[cold]
    #[inline(never)]
    pub(super) fn discard_huge(
        &self,
        start: u64,
        slot: &AtomicU64,
        whole: bool,
        goes: &impl Fn(Entry) -> bool,
    ) {
        if !whole {
            return self.space.split(self.cpu, start, slot);
        }
        loop {
            let seen = protocol::wait_and_load(slot, self.cpu);
            if !is_leaf(seen) || !goes(seen.part(0)) {
                return;
            }
            let Ok(held) = protocol::take(slot, seen, self.cpu) else { continue };
            shoot(self.cpu, self.space, pages_of(start));
            held.commit(Entry::NONE);
            // SAFETY: flushed above.
            unsafe { self.cpu.put_leaf(seen.frame()) };
            self.cpu.add_resident(self.space, -(ENTRIES as i64));
            self.cpu.state().counts.take(Counter::FilePmdMapped, 1);
            return;
        }
    }
}
