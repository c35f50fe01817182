//! Discards: remove pages without changing their VMAs.
//!
//! `MADV_DONTNEED` and the revocation of an object's pages change entries but no VMA. They hold a
//! shared [`Visit`](super::visit::Visit), which excludes only writers that change VMAs. They hold
//! each emptied entry from its removal to the end of the flush: see *a discard* in [`protocol`].

use super::batch::FlushBatch;
use super::visit::Visit;
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::machine::Machine;
use crate::space::harvest::Was;
use crate::sync::atomic::AtomicU64;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, BusyEntry, Mark};
use crate::table::Entry;
use crate::table::range::{self, Leaves};
use crate::table::{node, protocol};
use crate::vm::Cpu;
use core::convert::Infallible;

/// The number of tables whose entries a discard empties and flushes at once.
const MOST_TABLES: usize = 16;

/// The entries of some tables, and the pending flush of the emptied entries.
///
/// The tables are gathered first and emptied afterwards, so that the CPU does not wait in the walk
/// to the next table while it holds entries.
struct Discard<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    batch: FlushBatch<'a, 'v, M>,
    /// By table: the address of the first entry's page, and the entries.
    tables: [(u64, &'v [AtomicU64]); MOST_TABLES],
    count: usize,
    mark: Mark<'a>,
    /// The number of removed pages that counted as resident.
    gone: usize,
}

impl<'a, 'v, M: Machine> Visit<'a, 'v, M> {
    /// Empties the entries of `range` selected by `goes`, flushes, and drops the references to
    /// their pages. Records the use of the pages for the VMAs of `was`, if any.
    pub(super) fn discard(
        &self,
        range: VirtRange,
        was: Option<&Was<'_>>,
        goes: impl Fn(Entry) -> bool,
    ) {
        debug_assert!(self.claims(range), "{range:?} is not claimed");
        let (cpu, batch) = (self.cpu, FlushBatch::new(self.cpu, self.space));
        let tables = [(0, &[][..]); MOST_TABLES];
        let mut discard = Discard { cpu, batch, tables, count: 0, mark: Mark::none(), gone: 0 };
        let visit = |leaves: Leaves<'v>| {
            let (start, slots) = match leaves {
                Leaves::Pages { start, slots } => (start, slots),
                Leaves::Huge { start, slot, whole } => {
                    // No entry is held yet.
                    self.discard_huge(start, slot, whole, &goes);
                    return Ok(());
                }
            };
            if slots.iter().all(|slot| node::load(slot).is_none()) {
                return Ok::<(), Infallible>(());
            }
            if let Some(was) = was {
                self.remember(start, slots, was);
            }
            if discard.count == MOST_TABLES {
                discard.take_all(&goes);
            }
            discard.tables[discard.count] = (start, slots);
            discard.count += 1;
            Ok(())
        };
        // SAFETY: in the grace section of the visit.
        let Ok(()) =
            unsafe { range::visit(cpu.vm().machine(), self.space.root(), range, cpu, visit) };
        discard.take_all(&goes);
        if discard.gone != 0 {
            cpu.add_resident(self.space, -(discard.gone as i64));
        }
    }
}

impl<M: Machine> Discard<'_, '_, M> {
    /// Takes the entries of the gathered tables selected by `goes`, and flushes.
    fn take_all(&mut self, goes: impl Fn(Entry) -> bool) {
        for at in 0..self.count {
            let (start, slots) = self.tables[at];
            self.cpu.serve_flushes();
            if self.batch.is_full_for(slots) {
                self.flush();
            }
            for (at, slot) in slots.iter().enumerate() {
                self.take(start + at as u64 * PAGE_SIZE, slot, &goes);
            }
        }
        self.flush();
        self.count = 0;
    }

    /// Takes the entry of the page at `addr`, if `goes` selects it.
    #[inline]
    fn take(&mut self, addr: u64, slot: &AtomicU64, goes: impl Fn(Entry) -> bool) {
        let mut seen = node::load(slot);
        while !seen.is_none() {
            if seen.is_locked() {
                // A CPU must not wait for an entry while it holds others.
                self.flush();
                seen = protocol::wait_and_load(slot, self.cpu);
                continue;
            }
            if !goes(seen) {
                return;
            }
            match protocol::hold(slot, seen, self.cpu.id()) {
                Ok(()) => {
                    if self.batch.is_empty() {
                        self.mark = order::hold::<BusyEntry>(self.cpu);
                    }
                    self.gone += self.batch.add(addr, seen);
                    return;
                }
                Err(now) => seen = now,
            }
        }
    }

    /// Flushes, empties the entries, and then drops the references.
    fn flush(&mut self) {
        let (tables, by) = (&self.tables[..self.count], self.cpu.id());
        let release = || tables.iter().for_each(|(_, slots)| protocol::release(slots, by));
        if lost(Mutant::DiscardHolds) {
            release();
        }
        self.batch.flush_and(release);
        self.mark = Mark::none();
    }
}
