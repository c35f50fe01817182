//! Reclaim: frees frames when a CPU has run out of them.
//!
//! A CPU without a free frame frees frames in this order, and stops as soon as there is one:
//!
//! 1. frames that wait for a [deferred flush](crate::tlb::deferred);
//! 2. dropped spaces and objects that have not ended yet ([`ended`](crate::ended)), and objects
//!    retired by any CPU: the CPU waits for a grace period, after which all retired objects are
//!    freed;
//! 3. lazily freed pages, of any space ([`lazy`]);
//! 4. pages of files ([`evict`]), and private pages if there is a swap area ([`swap`]), beginning
//!    with the pages unused for the longest time ([`clock`]).
//!
//! The operation fails as out of memory only if no step frees a frame. Free frames in the lists of
//! further CPUs are not found (see [`frame`](crate::frame)).
//!
//! Reclaim waits for concurrent operations. So the CPU must hold no locks or entries, and must not
//! be in a grace section: a fault releases its lock first, and a call releases its locks and
//! restarts.

mod backoff;
pub(crate) mod clock;
pub(crate) mod compact;
mod evict;
pub(crate) mod flush_free;
pub(crate) mod holders;
pub(crate) mod isolate;
pub(crate) mod lazy;
pub(crate) mod lazy_list;
pub(crate) mod migrate;
mod refault;
mod scan_around;
mod slots;
pub(crate) mod swap;
pub(crate) mod tiers;

#[cfg(all(test, not(loom)))]
pub(crate) mod tests;

use crate::error::{Errno, OutOfMemory};
use crate::frame::{Clean, Frame, Zeroed};
use crate::machine::{CpuId, Machine};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::GracePeriod;
use crate::sync::wait::Wait;
use crate::vm::Cpu;
use core::cell::Cell;

/// The number of pages reclaimed at a time for a single needed frame: the pages of one flush.
const BATCH: usize = crate::table::protocol::MOST_TAKEN;
/// The maximum number of pages evicted for a single needed frame. The pages share one flush if the
/// flush may be deferred.
const EVICTED: u64 = 128;
/// The same maximum as a part of memory.
const PART: u64 = 32;
/// The initial number of pages evicted for a call that may need many: twice the entries of a table.
const EVICTED_BY_CALL: u64 = 2 * crate::table::node::ENTRIES as u64;
/// The number of failed evictions before memory counts as exhausted: pages may be in use briefly.
const TRIES: u32 = 4;
/// The number of eviction attempts for a call.
const ATTEMPTS: u32 = 8;
/// The number of retired objects above which an idle CPU tries to free the objects. A step of the
/// epoch makes faults of other CPUs read the tree again, so a few objects are not worth it.
const IDLE_ABOVE: usize = 16;

/// Sets a flag of a CPU; the drop restores the former value.
struct Set<'c>(&'c Cell<bool>, bool);

impl<'c> Set<'c> {
    fn new(flag: &'c Cell<bool>) -> Self {
        Self(flag, flag.replace(true))
    }

    /// Returns whether the flag was set before.
    const fn was_set(&self) -> bool {
        self.1
    }
}

impl Drop for Set<'_> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

impl<M: Machine> Cpu<'_, M> {
    /// Allocates a frame, and reclaims some if there is none. The caller is in no grace section and
    /// holds no lock.
    ///
    /// # Errors
    /// [`OutOfMemory`] if no frame could be reclaimed either.
    pub(crate) fn alloc_or_wait(&self) -> Result<Frame<Clean>, OutOfMemory> {
        self.local().order().before::<GracePeriod>();
        let frame = self.alloc().or_else(|| {
            self.free_some_flush_pending();
            self.alloc()
        });
        let frame = frame.or_else(|| {
            self.wait_grace_all();
            self.flush_deferred_if_any();
            self.alloc()
        });
        let frame = frame.or_else(|| {
            // The freed frames are on this CPU's own list.
            self.reclaim_lazy(BATCH);
            self.alloc()
        });
        frame.or_else(|| self.evict_for_one()).ok_or_else(|| {
            self.note_starved();
            OutOfMemory
        })
    }

    /// As [`alloc_or_wait`](Self::alloc_or_wait), but returns a frame of zeros for a page table.
    ///
    /// # Errors
    /// As [`alloc_or_wait`](Self::alloc_or_wait).
    pub(crate) fn alloc_table_or_wait(&self) -> Result<Frame<Zeroed>, OutOfMemory> {
        let frame = self.vm().frames.alloc_for_table(self.local(), self);
        let frame = frame.map_or_else(|| self.alloc_or_wait(), Ok)?;
        Ok(frame.zero(self.vm().machine()))
    }

    /// Evicts pages until there is a frame, or no page can be evicted.
    #[cold]
    fn evict_for_one(&self) -> Option<Frame<Clean>> {
        let pages = (self.vm().frames.limit() / PART).clamp(1, EVICTED);
        let mut failed = 0;
        while failed < TRIES {
            failed = if self.evict_some(pages) { 0 } else { failed + 1 };
            // Other CPUs may have been faster.
            if let Some(frame) = self.alloc() {
                return Some(frame);
            }
        }
        None
    }

    /// Evicts about `pages` pages, and frees their frames. Private pages may have stayed because
    /// another CPU had the turn to write to the swap area: if no other page was found, the CPU
    /// scans again, and waits for the turn. If still no page is found, the CPU waits for CPUs that
    /// [hold](holders) pages: the held pages may be all evictable pages, or all pages of the only
    /// file, which one CPU at a time writes. Returns whether any CPU has evicted pages.
    #[cold]
    fn evict_some(&self, pages: u64) -> bool {
        let clock = &self.vm().clock;
        let before = clock.evicted.count();
        let (missed, awaits) = (&self.state().missed_turn, &self.state().awaits_turn);
        missed.set(false);
        let mut evicted = self.reclaim(pages);
        if evicted == 0 && missed.get() && !lost(Mutant::ReclaimAwaitsTurn) {
            let _awaits = Set::new(awaits);
            evicted = self.reclaim(pages);
        }
        self.free_some_flush_pending();
        if evicted == 0 {
            self.wait(0);
            self.await_holders(|| clock.evicted.count() != before);
            // A walk may have dropped the last share of an object.
            self.end_dropped();
            self.flush_deferred_if_any();
        }
        clock.evicted.count() != before
    }

    /// Makes a call that may need many frames. If the call fails for lack of memory, it is repeated
    /// after all retired objects have been freed and, if it lacked frames, all lazily freed pages
    /// have been reclaimed. Then it is repeated a few times after evictions of pages, more each
    /// time. (`ENOMEM` also has other causes. Returns the error at once if freeing memory cannot
    /// help because the space has the maximum number of VMAs: otherwise a call of several parts
    /// would continue after changes by another CPU.) The caller is in no grace section and holds no
    /// lock.
    ///
    /// # Errors
    /// The error of `call`.
    pub(crate) fn with_memory<R>(&self, call: impl Fn() -> Result<R, Errno>) -> Result<R, Errno> {
        let (starved, crowded) = (&self.state().starved, &self.state().crowded);
        starved.set(false);
        crowded.set(false);
        let fails =
            |result: &Result<R, Errno>| matches!(result, Err(Errno::ENOMEM)) && !crowded.get();
        let mut result = call();
        if fails(&result) {
            self.wait_grace_all();
            self.flush_deferred_if_any();
            if starved.take() {
                self.reclaim_lazy(usize::MAX);
            }
            result = call();
        }
        for attempt in 0..ATTEMPTS {
            let wants_frames = fails(&result) && starved.take();
            let evicts = || self.evict_some(EVICTED_BY_CALL << attempt) || attempt < TRIES;
            if !wants_frames {
                break;
            }
            if !evicts() {
                self.note_starved();
                break;
            }
            // All waiting frames are freed, because the call may need many.
            self.flush_deferred_if_any();
            result = call();
        }
        result
    }

    /// Returns whether an operation of this CPU found no frame, and no frame to reclaim, since the
    /// last call of this function. A kernel calls the function before and after an operation, to
    /// find out whether ending a program can resolve an `ENOMEM`.
    pub fn take_starved(&self) -> bool {
        self.state().starved.take()
    }

    /// Records that the current call of this CPU got no frame.
    #[cold]
    pub(crate) fn note_starved(&self) {
        self.state().starved.set(true);
    }

    /// Frees objects retired by this CPU, if there are many and no section can read them any more:
    /// for an idle CPU.
    pub(crate) fn collect_idle(&self) {
        // Freeing takes two steps of the epoch.
        for _ in 0..2 {
            if self.vm().grace.pending(self.local()) > IDLE_ABOVE {
                self.collect_now();
            }
        }
    }

    /// Waits until all objects retired by any CPU before the call are freed: VMAs, tree nodes and
    /// tables. For an operation that would otherwise fail as out of memory. The caller is in no
    /// grace section and holds no lock.
    #[cold]
    pub fn wait_grace_all(&self) {
        self.local().order().before::<GracePeriod>();
        self.end_dropped();
        let grace = &self.vm().grace;
        if grace.pending_anywhere() == 0 {
            return;
        }
        grace.synchronize(self.local(), self);
        for of in 0..self.vm().machine().cpus() {
            for link in grace.collect_from(self.local(), CpuId(of as u16)) {
                // SAFETY: the grace period of the link is over, and the link is returned once.
                unsafe { self.free_retired(link) };
            }
            self.serve_flushes();
        }
    }
}
