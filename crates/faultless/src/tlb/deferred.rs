//! Deferred flushes: translations that do no harm are dropped when their frames are needed.
//!
//! A page that moves while all of its mappings are read-only leaves translations to its old frame in the TLBs of other CPUs. As long as
//! neither the frame nor the page changes, they show what is there. So the flush is deferred: no CPU is interrupted, the frame
//! is [kept](crate::frame::owed) with its bytes, and a *stamp* says which flush is pending.
//!
//! # Stamps
//!
//! A stamp is a number of a clock of 64 bits, which every deferral advances: it does not wrap. Of each CPU two stamps are known: `owes`, the last
//! deferral whose translations it may hold; and `flushed`, the last one before a moment at which it dropped all translations, for
//! whatever reason. A CPU that leaves a space drops all that it has, for it runs one space at a time.
//!
//! 1. *Defer.* The entries have changed. The CPU advances the clock, issues a full fence, and then raises `owes` of each CPU that is in the set of a
//!    space that mapped the page. A CPU that is not in the set yet will walk the changed tables.
//! 2. *Flush.* A CPU advances the clock, or reads it if another CPU asked for the flush; drops all translations; and then stores that number to `flushed`.
//! 3. *Settle.* The CPU asks all CPUs that run a space, and whose `flushed` is below their `owes`, to drop everything, and waits until they
//!    have or run none any more. Then all stamps up to the clock's value before are *paid*. One settlement is for all frames that wait; CPUs
//!    that have flushed since are left alone.
//!
//! Where one in 32 of the frames that may wait does, the CPUs are *asked* (4) to flush when it suits them, by one word that they look at where they
//! reclaim or balance memory in the background: not in an allocation that finds a frame, which would take several times as long. There, from one in 16 on, the stamps that all of them have flushed by then
//! are paid without a settlement (5), and nobody is interrupted.
//!
//! 4. *Ask.* The clock's value is stored to `asked`. A CPU that finds its `flushed` below both that and its `owes` flushes (2).
//! 5. *Collect.* Of the CPUs that run a space, and whose `flushed` is below their `owes`, the lowest `flushed` is paid.
//!
//! Deferrals, settlements and collections exclude each other while they read and raise `owes`, so no stamp is paid whose CPUs are not known yet.
//!
//! Pages of which no CPU can have a translation need [no flush at all](crate::reclaim::cold).
//!
//! # What must come after a settlement
//!
//! - Using the frame: zeroing it, handing it out, giving it to the buddy allocator. Its type says so: [`Owed`](crate::frame::Owed).
//! - Any change of what the page shows. A space and an object keep the stamp of the last deferral of a page of theirs ([`Pending`]). Who will
//!   store to a page that may be mapped elsewhere, or allow stores, looks at it first: a fault that makes a page writable,
//!   and the kernel's writes to an object. Who replaces a page at one address flushes that address anyway.
//!
//! # When a flush is not deferred
//!
//! - A mapping allows stores: a CPU could store to the old frame.
//! - An operation with a claim on the page is under way. `fork`, `mprotect` and writing back take permissions away first, and flush afterwards: until
//!   then a CPU may have a translation that allows stores, though no entry does.
//! - Somebody has a reference to the old frame, so that it cannot be kept for later.
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

/// What is known of a CPU.
#[derive(Debug, Default)]
struct Stamps {
    /// The last deferral of which it may hold translations. Written under the lock.
    owes: AtomicU64,
    /// Deferrals up to this one have no translations on it any more. Written by the CPU itself.
    flushed: AtomicU64,
}

/// The flushes of a subsystem that are deferred.
#[derive(Debug)]
pub struct Deferred {
    /// The last stamp that was given.
    clock: Padded<AtomicU64>,
    /// Stamps up to this one are paid.
    paid: Padded<AtomicU64>,
    /// CPUs are to flush what is up to this one.
    asked: Padded<AtomicU64>,
    lock: SpinLock<(), DeferredStamps>,
    cpus: PerCpu<Stamps>,
}

/// The stamp of the last deferral of a page of a space, or of an object; 0 before the first.
#[derive(Debug, Default)]
pub struct Pending(AtomicU64);

impl Pending {
    /// The stamp.
    #[inline(always)]
    pub fn stamp(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Notes a deferral, before the new entries are stored.
    pub fn note(&self, stamp: u64) {
        self.0.fetch_max(stamp, Ordering::AcqRel);
    }
}

impl Deferred {
    /// For a machine of `cpus` CPUs.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    pub fn try_new(cpus: usize) -> Result<Self, OutOfMemory> {
        Ok(Self {
            clock: Padded(AtomicU64::new(0)),
            paid: Padded(AtomicU64::new(0)),
            asked: Padded(AtomicU64::new(0)),
            lock: SpinLock::ordered(()),
            cpus: PerCpu::try_new(cpus, |_| Stamps::default())?,
        })
    }

    /// Step 1 for entries that have changed, of spaces with the sets `of`. Returns the stamp.
    pub fn defer<'a>(&self, of: impl Iterator<Item = &'a CpuSet>, wait: &impl Wait) -> u64 {
        let _lock = self.lock.lock(wait);
        let stamp = self.clock.fetch_add(1, Ordering::SeqCst) + 1;
        // Either a CPU that joins walks the changed tables, or it is in the set.
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

    /// The first half of step 2: what the CPU that drops all translations next has flushed then. The clock advances, so that the flush is known to come after accessed bits
    /// that were [cleared](crate::reclaim::cold) before.
    #[inline]
    pub fn before_flush(&self) -> u64 {
        let stamp = self.clock.fetch_add(1, Ordering::SeqCst) + 1;
        fence(Ordering::SeqCst);
        stamp
    }

    /// As [`before_flush`](Self::before_flush), for a flush that another CPU asked for. The clock stays: all CPUs of a program that unmaps would write it, whether memory is
    /// ever short or not. So what was cleared since it last advanced is not known to come before this flush.
    #[inline]
    pub fn before_served_flush(&self) -> u64 {
        let stamp = self.clock.load(Ordering::SeqCst);
        fence(Ordering::SeqCst);
        stamp
    }

    /// Behind a clear of an accessed bit: flushes with the number that it returns, or a later one, begin after it.
    #[inline]
    pub fn after_clear(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.clock.load(Ordering::SeqCst) + 1
    }

    /// Up to which stamp all CPUs for which `runs` says so have flushed. Behind changes of entries: a CPU that begins to run a space later sees them.
    pub fn flushed_by_all(&self, runs: impl Fn(CpuId) -> bool) -> u64 {
        fence(Ordering::SeqCst);
        let cpus = (0..self.cpus.len()).map(|cpu| CpuId(cpu as u16));
        let flushed = |cpu| self.cpus.remote(cpu).flushed.load(Ordering::Acquire);
        cpus.filter(|cpu| runs(*cpu)).map(flushed).min().unwrap_or(u64::MAX)
    }

    /// The second half, on the CPU that dropped them.
    #[inline]
    pub fn flushed(&self, local: &Local, before: u64) {
        self.cpus.get(local).flushed.fetch_max(before, Ordering::Release);
    }

    /// Step 2 of a CPU that has dropped its translations, and has left the set of its space: it had translations of that alone. (A
    /// deferral that found it in the set may advance the clock afterwards; whoever settles looks whether the CPU runs a space.)
    #[inline]
    pub fn left(&self, local: &Local) {
        self.flushed(local, self.clock.load(Ordering::Acquire));
    }

    /// Whether the flush of `pending` may not have been done yet.
    #[inline(always)]
    pub fn is_pending(&self, pending: &Pending) -> bool {
        pending.stamp() > self.paid.load(Ordering::Acquire)
    }

    /// Stamps up to this one are paid.
    #[inline]
    pub fn paid(&self) -> u64 {
        self.paid.load(Ordering::Acquire)
    }

    /// Step 4. CPUs that were asked before have time until what they were asked for is paid.
    pub fn ask(&self) {
        if self.asked.load(Ordering::Relaxed) <= self.paid() {
            self.asked.fetch_max(self.clock.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Whether the CPU was asked to flush, and has not done so since.
    #[inline]
    pub fn is_asked(&self, local: &Local) -> bool {
        let asked = self.asked.load(Ordering::Relaxed);
        if asked == 0 {
            return false;
        }
        let Stamps { owes, flushed } = self.cpus.get(local);
        flushed.load(Ordering::Relaxed) < asked.min(owes.load(Ordering::Relaxed))
    }

    /// Step 5. `runs` as in [`settle`](Self::settle).
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

    /// Step 3. Returns how many CPUs were interrupted. `runs` tells whether a CPU runs a space; what a CPU dropped when it left one comes before
    /// the answer that it runs none.
    pub fn settle<M: Machine>(
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
            if !lost(Mutant::SettleAwaits) {
                // One that has left its space has none of them any more, and need not answer.
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

    /// Gives up soon.
    struct Impatient;

    impl Wait for Impatient {
        fn wait(&self, looks: u32) {
            assert!(looks < 1000, "it waits for ever");
        }
    }

    fn local(cpu: usize) -> Local {
        // SAFETY: each test claims a CPU of its own flushes once.
        unsafe { Local::claim(CpuId(cpu as u16)) }
    }

    /// Flushes of two CPUs, of which the second has translations that one is deferred for.
    fn owed() -> (Deferred, CpuSet) {
        let (deferred, set) = (Deferred::try_new(2).unwrap(), CpuSet::new());
        set.insert(CpuId(1));
        assert_eq!(deferred.defer([&set].into_iter(), &Impatient), 1);
        (deferred, set)
    }

    /// Settles while `runs` tells which CPUs run a space. Returns how many were interrupted.
    fn settle(deferred: &Deferred, runs: impl Fn(CpuId) -> bool) -> u64 {
        let inboxes = PerCpu::try_new(2, |_| Inbox::new()).unwrap();
        deferred.settle(&TestMachine::new(2, 8), &inboxes, &local(0), &Impatient, runs)
    }

    #[test]
    fn a_cpu_that_runs_no_space_keeps_nothing_unpaid() {
        let (deferred, _) = owed();
        deferred.collect(&Impatient, |_| true);
        assert_eq!(deferred.paid(), 0);
        deferred.collect(&Impatient, |_| false);
        assert_eq!(deferred.paid(), 1);
        let (deferred, _) = owed();
        assert_eq!((settle(&deferred, |_| false), deferred.paid()), (0, 1));
    }

    /// It has left its space, which is all that it says.
    #[test]
    fn a_cpu_that_leaves_need_not_answer() {
        let (deferred, _) = owed();
        let looks = Cell::new(0);
        let runs = |_| looks.replace(looks.get() + 1) == 0;
        assert_eq!((settle(&deferred, runs), deferred.paid()), (1, 1));
    }

    /// Others go on deferring while a CPU settles.
    #[test]
    fn what_is_deferred_later_is_not_waited_for() {
        let (deferred, set) = owed();
        let (there, looks) = (local(1), Cell::new(0));
        let runs = |_| {
            if looks.replace(looks.get() + 1) == 1 {
                deferred.flushed(&there, 1);
                deferred.defer([&set].into_iter(), &Impatient);
            }
            true
        };
        assert_eq!((settle(&deferred, runs), deferred.paid()), (1, 1));
    }

    #[test]
    fn who_was_asked_is_not_asked_for_more_until_that_is_paid() {
        let (deferred, set) = owed();
        let there = local(1);
        assert!(!deferred.is_asked(&there));
        deferred.ask();
        assert!(deferred.is_asked(&there));
        deferred.flushed(&there, 1);
        deferred.defer([&set].into_iter(), &Impatient);
        deferred.ask();
        assert!(!deferred.is_asked(&there), "the first is not paid");
        deferred.collect(&Impatient, |_| true);
        deferred.ask();
        assert!(deferred.is_asked(&there));
    }
}
