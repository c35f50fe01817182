//! Deferred flushes: harmless stale translations are dropped when their frames are needed.
//!
//! If a page moves while all of its mappings are read-only, TLBs of other CPUs may keep
//! translations to the old frame. While neither the frame nor the page changes, these translations
//! show the correct contents. So the flush is deferred: no CPU is interrupted, the frame is
//! [kept](crate::frame::flush_pending) with its contents, and a *stamp* records which flush is
//! pending.
//!
//! # Stamps
//!
//! A stamp is a value of a 64-bit clock, which every deferral advances; the clock does not wrap.
//! For each CPU two stamps are stored: `owes`, the last deferral whose translations the CPU may
//! hold; and `flushed`, the last deferral before a moment at which the CPU dropped all
//! translations, for any reason. A CPU that leaves a space drops all its translations, because each
//! CPU runs one space at a time.
//!
//! 1. *Defer.* The entries have changed. The CPU advances the clock, issues a full fence, and then
//!    raises `owes` of each CPU in the set of a space that mapped the page. A CPU outside the set
//!    will walk the changed tables.
//! 2. *Flush.* A CPU advances the clock, or only reads the clock if another CPU requested the
//!    flush; drops all translations; and then stores this clock value to `flushed`.
//! 3. *Settle.* The CPU requests a full flush from each CPU with a running space and with `flushed`
//!    below `owes`, and waits until the CPU has flushed or runs no space. Then all stamps up to the
//!    clock value read before are *paid*. One settlement covers all waiting frames; CPUs that have
//!    flushed since their deferral are not interrupted.
//!
//! Once 1/32 of the deferral budget is used, the CPUs are *asked* (4) to flush at a convenient
//! time, through one word, which is read by CPUs that reclaim or balance memory in the background.
//! An allocation with a free frame does not read the word, because the flush would make the
//! allocation several times as long. There, once 1/16 of the budget is used, the stamps that all
//! CPUs have already flushed are paid without a settlement (5), and no CPU is interrupted.
//!
//! 4. *Ask.* Stores the clock value to `asked`. A CPU with `flushed` below both `asked` and `owes`
//!    flushes (2).
//! 5. *Collect.* Pays the lowest `flushed` of the CPUs with a running space and with `flushed`
//!    below `owes`.
//!
//! Deferrals, settlements and collections exclude each other while they read and raise `owes`, so
//! no stamp is paid before its CPUs are recorded.
//!
//! Pages of which no CPU can have a translation need [no flush at all](crate::reclaim::flush_free).
//!
//! # Operations that require a settlement
//!
//! - Using the frame: zeroing it, allocating it, returning it to the buddy allocator. The type
//!   [`FlushPending`](crate::frame::FlushPending) enforces this.
//! - Any change of the contents of the page. A space and an object store the stamp of the last
//!   deferral of one of their pages ([`Pending`]). Before a store to a page with possible further
//!   mappings, and before allowing stores, an operation checks the stamp: a fault that makes a page
//!   writable, and the kernel's writes to an object. An operation that replaces a page at one
//!   address flushes this address anyway.
//!
//! # When a flush is not deferred
//!
//! - A mapping allows stores: a CPU could store to the old frame.
//! - An operation with a claim on the page is in progress. `fork`, `mprotect` and write-back first
//!   remove permissions and flush afterwards: until then a CPU may have a translation that allows
//!   stores, although no entry does.
//! - Another user has a reference to the old frame, so the frame cannot be kept for later.
//! - Memory is scarce and pages move, or many frames wait already.

use super::cpuset::CpuSet;
use super::shootdown::Inbox;
use crate::error::OutOfMemory;
use crate::machine::{CpuId, Machine};
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::cpus::OwnCpus;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, DeferredStamps, Flush};
use crate::sync::percpu::{Local, Padded, PerCpu};
use crate::sync::spin::SpinLock;
use crate::sync::wait::{Wait, until};

/// The stamps of one CPU.
#[derive(Debug, Default)]
struct Stamps {
    /// The last deferral whose translations the CPU may hold. Written under the lock.
    owes: AtomicU64,
    /// The CPU holds no translations of deferrals up to this one. Written by the CPU itself.
    flushed: AtomicU64,
}

/// The deferred flushes of a subsystem.
#[derive(Debug)]
pub struct Deferred {
    /// The last stamp assigned.
    clock: Padded<AtomicU64>,
    /// Stamps up to this one are paid.
    paid: Padded<AtomicU64>,
    /// CPUs are asked to flush deferrals up to this one.
    asked: Padded<AtomicU64>,
    lock: SpinLock<(), DeferredStamps>,
    cpus: PerCpu<Stamps>,
}

/// The stamp of the last deferral of a page of a space or of an object; 0 before the first.
#[derive(Debug, Default)]
pub struct Pending(AtomicU64);

impl Pending {
    /// Returns the stamp.
    #[inline(always)]
    pub fn stamp(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Records a deferral, before the new entries are stored.
    pub fn note(&self, stamp: u64) {
        self.0.fetch_max(stamp, Ordering::AcqRel);
    }
}

impl Deferred {
    /// Creates the deferred flushes of a machine with `cpus` CPUs.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub fn try_new(cpus: usize) -> Result<Self, OutOfMemory> {
        Ok(Self {
            clock: Padded(AtomicU64::new(0)),
            paid: Padded(AtomicU64::new(0)),
            asked: Padded(AtomicU64::new(0)),
            lock: SpinLock::ordered(()),
            cpus: PerCpu::try_new(cpus, |_| Stamps::default())?,
        })
    }

    /// Step 1 for changed entries of spaces with the sets `of`. Returns the stamp.
    pub fn defer<'a>(&self, of: impl Iterator<Item = &'a CpuSet>, wait: &impl Wait) -> u64 {
        let _lock = self.lock.lock(wait);
        let stamp = self.clock.fetch_add(1, Ordering::SeqCst) + 1;
        // Either a CPU that joins the set walks the changed tables, or the CPU is in the set read
        // below.
        if !lost(Mutant::DeferFence) {
            fence(Ordering::SeqCst);
        }
        for set in of {
            for cpu in set.iter(self.cpus.len()) {
                self.cpus.remote(cpu).owes.fetch_max(stamp, Ordering::Relaxed);
            }
        }
        stamp
    }

    /// Begins step 2: advances the clock and returns the new value. The calling CPU then drops all
    /// its translations, and passes the value to [`flushed`](Self::flushed). Because the clock
    /// advances, the flush is known to follow every earlier [clear of an accessed
    /// bit](crate::reclaim::flush_free).
    #[inline]
    pub fn before_flush(&self) -> u64 {
        let stamp = self.clock.fetch_add(1, Ordering::SeqCst) + 1;
        fence(Ordering::SeqCst);
        stamp
    }

    /// As [`before_flush`](Self::before_flush), for a flush that another CPU requested. The clock
    /// does not advance: otherwise all CPUs of a program with frequent unmaps would write the
    /// clock, even if memory is never short. So accessed bits cleared since the last advance are
    /// not known to precede this flush.
    #[inline]
    pub fn before_served_flush(&self) -> u64 {
        let stamp = self.clock.load(Ordering::SeqCst);
        fence(Ordering::SeqCst);
        stamp
    }

    /// Called after the clear of an accessed bit: flushes with the returned number, or a later one,
    /// begin after the clear.
    #[inline]
    pub fn after_clear(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.clock.load(Ordering::SeqCst) + 1
    }

    /// Returns the stamp up to which all CPUs selected by `runs` have flushed. Called after changes
    /// of entries: a CPU that begins to run a space later sees the changes.
    pub fn flushed_by_all(&self, runs: impl Fn(CpuId) -> bool) -> u64 {
        fence(Ordering::SeqCst);
        let cpus = (0..self.cpus.len()).map(|cpu| CpuId(cpu as u16));
        let flushed = |cpu| self.cpus.remote(cpu).flushed.load(Ordering::Acquire);
        cpus.filter(|cpu| runs(*cpu)).map(flushed).min().unwrap_or(u64::MAX)
    }

    /// Ends step 2 on the CPU that dropped its translations: raises its `flushed` to `before`, the
    /// value from the begin of the step.
    #[inline]
    pub fn flushed(&self, local: &Local, before: u64) {
        self.cpus.get(local).flushed.fetch_max(before, Ordering::Release);
    }

    /// Records step 2 of a CPU that has dropped its translations and has left the set of its space,
    /// the only space of its translations. (A deferral that saw the CPU in the set may advance the
    /// clock afterwards; a settlement checks whether the CPU runs a space.)
    #[inline]
    pub fn left_space(&self, local: &Local) {
        self.flushed(local, self.clock.load(Ordering::Acquire));
    }

    /// Returns whether the flush of `pending` may still be outstanding.
    #[inline(always)]
    pub fn is_pending(&self, pending: &Pending) -> bool {
        pending.stamp() > self.paid.load(Ordering::Acquire)
    }

    /// Returns the last paid stamp: all earlier stamps are paid.
    #[inline]
    pub fn paid(&self) -> u64 {
        self.paid.load(Ordering::Acquire)
    }

    /// Step 4. If an earlier request is not paid yet, no new request is made.
    pub fn ask(&self) {
        if self.asked.load(Ordering::Relaxed) <= self.paid() {
            self.asked.fetch_max(self.clock.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Returns whether the CPU was asked to flush and has not flushed since.
    #[inline]
    pub fn is_asked(&self, local: &Local) -> bool {
        let asked = self.asked.load(Ordering::Relaxed);
        if asked == 0 {
            return false;
        }
        let Stamps { owes, flushed } = self.cpus.get(local);
        flushed.load(Ordering::Relaxed) < asked.min(owes.load(Ordering::Relaxed))
    }

    /// Step 5. `runs` as in [`flush_all`](Self::flush_all).
    pub fn collect(&self, wait: &impl Wait, runs: impl Fn(CpuId) -> bool) {
        let _lock = self.lock.lock(wait);
        let mut floor = self.clock.load(Ordering::SeqCst);
        for cpu in (0..self.cpus.len()).map(|cpu| CpuId(cpu as u16)) {
            let Stamps { owes, flushed } = self.cpus.remote(cpu);
            let flushed = flushed.load(Ordering::Acquire);
            if flushed < owes.load(Ordering::Relaxed) && runs(cpu) && !lost(Mutant::CollectLooks) {
                floor = floor.min(flushed);
            }
        }
        self.paid.fetch_max(floor, Ordering::AcqRel);
    }

    /// Step 3. Returns the number of CPUs interrupted. `runs` returns whether a CPU runs a space.
    /// Before `runs` returns false, the CPU has dropped its translations of its last space.
    pub fn flush_all<M: Machine>(
        &self,
        machine: &M,
        inboxes: &PerCpu<Inbox>,
        local: &Local,
        wait: &impl Wait,
        runs: impl Fn(CpuId) -> bool,
    ) -> u64 {
        order::before::<Flush>(wait);
        let mut owing = OwnCpus::default();
        let stamp = {
            let _lock = self.lock.lock(wait);
            let owes = |cpu: &CpuId| {
                let Stamps { owes, flushed } = self.cpus.remote(*cpu);
                flushed.load(Ordering::Acquire) < owes.load(Ordering::Relaxed) && runs(*cpu)
            };
            owing.extend((0..self.cpus.len()).map(|cpu| CpuId(cpu as u16)).filter(owes));
            self.clock.load(Ordering::SeqCst)
        };
        let (here, mut sent) = (local.id(), 0);
        owing.retain(|cpu| {
            if cpu == here {
                let before = self.before_flush();
                machine.invalidate_all(here);
                self.flushed(local, before);
            } else {
                inboxes.remote(cpu).post_everything(machine, local);
                machine.interrupt(cpu);
                sent += 1;
            }
            cpu != here
        });
        owing.retain(|cpu| {
            if !lost(Mutant::FlushAwaitsCpus) {
                // A CPU that has left its space has no translations any more, and need not respond.
                let Stamps { owes, flushed } = self.cpus.remote(cpu);
                let due = || owes.load(Ordering::Relaxed).min(stamp);
                until(wait, || flushed.load(Ordering::Acquire) >= due() || !runs(cpu));
            }
            false
        });
        self.paid.fetch_max(stamp, Ordering::AcqRel);
        sent
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::testing::TestMachine;
    use core::cell::Cell;

    /// Panics after 1,000 waits.
    struct Impatient;

    impl Wait for Impatient {
        fn wait(&self, looks: u32) {
            assert!(looks < 1000, "an endless wait");
        }
    }

    fn local(cpu: usize) -> Local {
        // SAFETY: each test claims each CPU of its own `Deferred` once.
        unsafe { Local::claim(CpuId(cpu as u16)) }
    }

    /// Returns the deferred flushes of two CPUs, with one deferral for translations of the second
    /// CPU.
    fn with_deferral() -> (Deferred, CpuSet) {
        let (deferred, set) = (Deferred::try_new(2).unwrap(), CpuSet::new());
        set.insert(CpuId(1));
        assert_eq!(deferred.defer([&set].into_iter(), &Impatient), 1);
        (deferred, set)
    }

    /// Settles; `runs` returns whether a CPU runs a space. Returns the number of CPUs interrupted.
    fn flush_all(deferred: &Deferred, runs: impl Fn(CpuId) -> bool) -> u64 {
        let inboxes = PerCpu::try_new(2, |_| Inbox::new()).unwrap();
        deferred.flush_all(&TestMachine::new(2, 8), &inboxes, &local(0), &Impatient, runs)
    }

    #[test]
    fn a_cpu_without_a_space_leaves_no_stamp_unpaid() {
        let (deferred, _) = with_deferral();
        deferred.collect(&Impatient, |_| true);
        assert_eq!(deferred.paid(), 0);
        deferred.collect(&Impatient, |_| false);
        assert_eq!(deferred.paid(), 1);
        let (deferred, _) = with_deferral();
        assert_eq!((flush_all(&deferred, |_| false), deferred.paid()), (0, 1));
    }

    /// The CPU has left its space; the change of `runs` is the only sign.
    #[test]
    fn flush_does_not_wait_for_a_cpu_that_left_its_space() {
        let (deferred, _) = with_deferral();
        let looks = Cell::new(0);
        let runs = |_| looks.replace(looks.get() + 1) == 0;
        assert_eq!((flush_all(&deferred, runs), deferred.paid()), (1, 1));
    }

    /// Other CPUs continue to defer flushes during a settlement.
    #[test]
    fn flush_does_not_wait_for_later_deferrals() {
        let (deferred, set) = with_deferral();
        let (there, looks) = (local(1), Cell::new(0));
        let runs = |_| {
            if looks.replace(looks.get() + 1) == 1 {
                deferred.flushed(&there, 1);
                deferred.defer([&set].into_iter(), &Impatient);
            }
            true
        };
        assert_eq!((flush_all(&deferred, runs), deferred.paid()), (1, 1));
    }

    #[test]
    fn cpus_are_not_asked_again_before_payment() {
        let (deferred, set) = with_deferral();
        let there = local(1);
        assert!(!deferred.is_asked(&there));
        deferred.ask();
        assert!(deferred.is_asked(&there));
        deferred.flushed(&there, 1);
        deferred.defer([&set].into_iter(), &Impatient);
        deferred.ask();
        assert!(!deferred.is_asked(&there), "the first flush is still pending");
        deferred.collect(&Impatient, |_| true);
        deferred.ask();
        assert!(deferred.is_asked(&there));
    }
}
