//! Flush-free pages, of which no CPU has a translation: reclaim unmaps them without a flush.
//!
//! A CPU caches a translation only if the entry's accessed bit is set; the CPU sets the bit first.
//! Suppose reclaim has cleared the bit, and then each CPU has dropped all of its translations.
//! While the bit stays clear, no CPU has a translation of the entry, whatever its permissions. Such
//! a page is *flush-free*. Most pages taken by reclaim are flush-free: they were unused for a round
//! of a [hand](super::clock), and in each round every CPU with background work drops its
//! translations twice.
//!
//! 1. *Clear.* The CPU has a reference to the frame. The CPU clears the bit, issues a full fence,
//!    reads the clock of the [deferred flushes](crate::tlb::deferred), and raises the frame's
//!    [stamp](FrameMeta) to the clock value plus one. Then the CPU drops the reference.
//! 2. *Flush.* Before dropping all translations a CPU advances the clock, or only reads the clock
//!    if another CPU requested the flush, and afterwards it records the clock value. Before the
//!    clear the clock had not reached the frame's stamp. So a flush with this number or a higher
//!    number began after the clear. (A CPU that leaves a space records the clock after dropping its
//!    translations: the CPU has no translations then.)
//! 3. *Take.* The page's entries are [taken](super::isolate), all of them aged, with the bit clear,
//!    and there is no other reference to the frame. So no clear is in progress, and the stamp
//!    belongs to the last clear. After a full fence the CPU checks whether each CPU that runs a
//!    space has flushed with this stamp or a later stamp; if so, the page is flush-free. A CPU that
//!    begins to run a space later finds the bit clear, and sets the bit; so does a CPU that uses
//!    the page after its flush. Either the bit was set before the entry was taken, and then the
//!    taking CPU sees the set bit, or the using CPU finds the entry taken.
//!
//! Required invariants:
//!
//! - An entry is aged only if its frame has the stamp of the last clear. A new entry is not aged,
//!   or is accessed, as are entries made by `fork`. Entries cleared by `MADV_FREE` are not aged.
//!   Entries moved by `mremap` keep their frames.
//! - Migration copies the stamp. No CPU has a translation to the new frame while the bit is clear.
//!   If the flush of the move is deferred, a CPU may still have a translation of the page's address
//!   to the old frame; a CPU that has flushed since the clear has dropped this translation, too.
//! - When a huge leaf is split, its translations are dropped: no CPU has a translation of the new
//!   entries, which may be aged, for any stamps of their frames.

use crate::frame::FrameMeta;
use crate::machine::Machine;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::{Entry, node};
use crate::vm::Cpu;

impl<M: Machine> Cpu<'_, M> {
    /// Step 1 for an entry that was `seen`; the caller has a reference to its frame. Returns
    /// whether the bit was set, or is set now after another CPU has changed the entry.
    pub(crate) fn take_accessed(&self, slot: &AtomicU64, seen: Entry) -> bool {
        if !seen.is_accessed() || seen.is_locked() {
            return seen.is_accessed();
        }
        let order = (Ordering::Relaxed, Ordering::Relaxed);
        if slot.compare_exchange(seen.0, seen.aged().0, order.0, order.1).is_err() {
            return node::load(slot).is_accessed();
        }
        let stamp = self.vm().deferred.after_clear();
        self.vm().frames.meta(seen.frame()).aged.fetch_max(stamp, Ordering::Relaxed);
        true
    }

    /// Step 3 for the frame of a page whose entries are taken, aged, and not accessed. All CPUs
    /// have dropped their translations up to the stamp `flushed`.
    pub(super) fn is_flush_free(&self, meta: &FrameMeta, flushed: u64) -> bool {
        meta.aged.load(Ordering::Relaxed) <= flushed || lost(Mutant::FlushFreeChecksStamps)
    }

    /// Returns the stamp up to which all CPUs that run a space have dropped their translations.
    pub(super) fn flushed_by_all(&self) -> u64 {
        self.vm().deferred.flushed_by_all(|cpu| self.runs_a_space(cpu))
    }
}
