//! Pages that no CPU has cached: they are taken from their programs without a flush.
//!
//! A CPU caches a translation only if the entry's accessed bit is set; it sets the bit first. So once reclaim has cleared the bit, and then each CPU
//! has dropped all of its translations, no CPU has one of that entry as long as the bit stays clear, whatever the entry allows. Such a page is *cold*. Most pages that
//! reclaim takes are: they were not used for a round of a [hand](super::clock), and in each round every CPU that
//! works in the background drops its translations twice.
//!
//! 1. *Clear.* The CPU has a reference to the frame. It clears the bit, issues a full fence, reads the clock of the [deferred
//!    flushes](crate::tlb::deferred), and raises the frame's [stamp](FrameMeta) to the number after it. Then it drops the reference.
//! 2. *Flush.* A CPU that drops all translations advances the clock first, or reads it where another CPU asked for that, and afterwards notes the number. The clock
//!    had not advanced to a frame's stamp before the clear. So a flush whose number is that or above began after it. (A CPU that leaves a space notes the clock after it has dropped them: it has none then.)
//! 3. *Take.* The page's entries are [taken](super::taken), all of them aged, with the bit clear, and nobody has another reference: so no clear is under way, and the stamp is
//!    that of the last one. Full fence. If each CPU that runs a space has flushed with that stamp or a later one, the page is cold. A CPU that
//!    begins to run a space later finds the bit clear, and sets it; so does one that uses the page after its flush. Either has done so before the entry
//!    was taken, and then the bit is set, or finds the entry taken.
//!
//! This must stay true:
//!
//! - An entry is aged only if its frame has the stamp of the last clear. A new entry is not aged, or is accessed, as are those that `fork` makes. What `MADV_FREE` clears is
//!   not aged any more. One that `mremap` moves keeps its frame.
//! - Migration copies the stamp. No CPU has a translation to the new frame as long as the bit is clear. But where the flush of the move is deferred, one may still have one of the
//!   page's address, to the old frame; it has flushed since, if it has flushed since the clear.
//! - Where a huge leaf is split, its translations are dropped: no CPU has one of the entries that are made, which may be aged, whatever stamps their frames have.

use crate::frame::FrameMeta;
use crate::machine::Machine;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::{Entry, node};
use crate::vm::Cpu;

impl<M: Machine> Cpu<'_, M> {
    /// Step 1 for an entry that was `seen`, to whose frame the caller has a reference. Returns whether the bit was set, or another CPU has changed the entry and it is set now.
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

    /// Step 3 for the frame of a page whose entries are taken, aged, and not accessed: `flushed` tells up to which stamp all CPUs have dropped their translations.
    pub(super) fn is_cold(&self, meta: &FrameMeta, flushed: u64) -> bool {
        meta.aged.load(Ordering::Relaxed) <= flushed || lost(Mutant::ColdLooksAtStamps)
    }

    /// Up to which stamp all CPUs have dropped their translations, those aside that run no space.
    pub(super) fn flushed_by_all(&self) -> u64 {
        self.vm().deferred.flushed_by_all(|cpu| self.runs_a_space(cpu))
    }
}
