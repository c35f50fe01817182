//! Reclaim: frees frames when a CPU has run out of them.
//!
//! When a CPU finds no free frame, it frees frames in this order, and stops as soon
//! as there is one:
//!
//! 1. frames that wait for a [deferred flush](crate::tlb::deferred);
//! 2. what was dropped and has not ended yet ([`ended`](crate::ended)), and what any CPU has retired: it waits for a grace
//!    period, after which all of that is free;
//! 3. lazily freed pages, of any space ([`lazy`]);
//! 4. pages of files ([`evict`]), and where there is a swap area private pages ([`swap`]), beginning with those that were not used for long ([`clock`]).
//!
//! The operation fails as out of memory only if there are none of these either. Free frames in the lists of other CPUs
//! are not found (see [`frame`](crate::frame)).
//!
//! All of this waits for other CPUs. So the CPU must hold nothing, and must not be in a grace section: a fault
//! releases its lock first, and a call releases its locks and starts again.

mod backoff;
pub(crate) mod clock;
pub(crate) mod cold;
pub(crate) mod compact;
mod evict;
pub(crate) mod holders;
pub(crate) mod lazy;
pub(crate) mod listed;
mod look_around;
pub(crate) mod migrate;
mod refault;
mod slots;
pub(crate) mod swap;
pub(crate) mod taken;
pub(crate) mod tiers;

use crate::error::{Errno, OutOfMemory};
use crate::frame::{Clean, Frame, Zeroed};
use crate::machine::{CpuId, Machine};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::GracePeriod;
use crate::sync::wait::Wait;
use crate::vm::Cpu;
use core::cell::Cell;

/// How many pages are reclaimed at a time when one is needed: as many as are flushed together.
const BATCH: usize = crate::table::protocol::MOST_TAKEN;
/// How many pages are evicted where one frame is needed, at most. They cost one flush if it may be deferred.
const EVICTED: u64 = 128;
/// What part of memory that is, at most.
const PART: u64 = 32;
/// How many are evicted for a call that may need many, at first: twice what one table maps.
const EVICTED_BY_CALL: u64 = 2 * crate::table::node::ENTRIES as u64;
/// How often no page can be evicted before memory is out: pages are in use for a moment.
const TRIES: u32 = 4;
/// How often pages are evicted for a call.
const ATTEMPTS: u32 = 8;
/// Retired objects beyond which an idle CPU tries to free them. A step of the epoch costs other CPUs' faults
/// a look at the tree, so not for every few.
const IDLE_ABOVE: usize = 16;

/// A flag of a CPU that is set until the drop of this, which puts the former value back.
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
    /// Allocates a frame, after reclaiming some when there is none. Not inside a grace section, and holding
    /// no lock.
    ///
    /// # Errors
    /// [`OutOfMemory`] when there is nothing to be reclaimed either.
    pub(crate) fn alloc_or_wait(&self) -> Result<Frame<Clean>, OutOfMemory> {
        self.local().order().before::<GracePeriod>();
        let frame = self.alloc().or_else(|| {
            self.settle_some();
            self.alloc()
        });
        let frame = frame.or_else(|| {
            self.settle_all();
            self.settle_owed();
            self.alloc()
        });
        let frame = frame.or_else(|| {
            // What it frees is on this CPU's own list.
            self.reclaim_lazy(BATCH);
            self.alloc()
        });
        frame.or_else(|| self.evict_for_one()).ok_or_else(|| {
            self.note_starved();
            OutOfMemory
        })
    }

    /// As [`alloc_or_wait`](Self::alloc_or_wait), a frame of zeros for a page table.
    ///
    /// # Errors
    /// As there.
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

    /// Evicts about `pages` pages, and frees their frames. Private pages may have stayed since another CPU had the turn to write to the swap area: if there was nothing else,
    /// it looks again, and waits for that turn. If there are none, it waits for other CPUs that [hold](holders) some: those
    /// may be all that there are, or those of the only file, of which one CPU at a time writes. Returns whether any CPU has evicted some.
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
        self.settle_some();
        if evicted == 0 {
            self.wait(0);
            self.await_holders(|| clock.evicted.count() != before);
            // A walk may have had the last share of an object.
            self.end_dropped();
            self.settle_owed();
        }
        clock.evicted.count() != before
    }

    /// Makes a call that may need many frames. If it fails for want of memory, it is made once more, after
    /// what is retired has been freed and, if it was frames that it wanted, all lazily freed pages have been
    /// reclaimed; and then a few times after pages have been evicted, more each time. (`ENOMEM` has other reasons, too. One that memory does not remedy, that the space has as many VMAs as it
    /// may have, is told at once: a call of several parts must not go on after another CPU's.) Not inside a grace section,
    /// and holding no lock.
    ///
    /// # Errors
    /// What `call` returns.
    pub(crate) fn with_memory<R>(&self, call: impl Fn() -> Result<R, Errno>) -> Result<R, Errno> {
        let (starved, crowded) = (&self.state().starved, &self.state().crowded);
        starved.set(false);
        crowded.set(false);
        let fails =
            |result: &Result<R, Errno>| matches!(result, Err(Errno::ENOMEM)) && !crowded.get();
        let mut result = call();
        if fails(&result) {
            self.settle_all();
            self.settle_owed();
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
            // All of them: it may need many.
            self.settle_owed();
            result = call();
        }
        result
    }

    /// Whether an operation of this CPU found no frame, and nothing to reclaim, since this was last asked. So a kernel tells an `ENOMEM` that
    /// the end of a program remedies from one of another reason: it asks before the call, and after it.
    pub fn take_starved(&self) -> bool {
        self.state().starved.take()
    }

    /// Notes that the call that this CPU is in got no frame.
    #[cold]
    pub(crate) fn note_starved(&self) {
        self.state().starved.set(true);
    }

    /// Frees what this CPU retired, if that is more than a little and no section can read it any more: for an idle
    /// CPU.
    pub(crate) fn collect_idle(&self) {
        // It takes two steps of the epoch.
        for _ in 0..2 {
            if self.vm().grace.pending(self.local()) > IDLE_ABOVE {
                self.collect_now();
            }
        }
    }

    /// Waits until all that any CPU had retired when it was called is free: VMAs, tree nodes and tables. For an operation that
    /// would otherwise fail as out of memory. Not inside a grace section, and holding no lock.
    #[cold]
    pub fn settle_all(&self) {
        self.local().order().before::<GracePeriod>();
        self.end_dropped();
        let grace = &self.vm().grace;
        if grace.pending_anywhere() == 0 {
            return;
        }
        grace.synchronize(self.local(), self);
        for of in 0..self.vm().machine().cpus() {
            for link in grace.collect_from(self.local(), CpuId(of as u16)) {
                // SAFETY: the grace period of the link is over, and it comes out once.
                unsafe { self.free_retired(link) };
            }
            self.serve_flushes();
        }
    }
}
