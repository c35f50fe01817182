//! [Deferred flushes](crate::tlb::deferred), and the frames that wait for them.

use super::Cpu;
use crate::machine::{CpuId, Machine};
use crate::stat::Counter;
use crate::sync::atomic::Ordering;
use crate::sync::mutant::{Mutant, lost};
use crate::tlb::cpuset::CpuSet;
use crate::tlb::deferred::Pending;

/// Where one in so many of the frames that may wait for their flush does, a CPU that works in the background looks whose flush is done.
const COLLECTED: u64 = 16;

/// Where one in so many does after that, and at least [`FOR_EACH`] for each CPU, a CPU that moves pages interrupts those that were asked and have not flushed.
const SETTLED: u64 = 8;
/// So many frames are worth an interrupt.
const FOR_EACH: u64 = 16;

impl<M: Machine> Cpu<'_, M> {
    /// Does all flushes that are deferred, and frees the frames that wait for them. CPUs that have dropped their translations since are
    /// not interrupted. Returns how many frames were freed.
    ///
    /// Calls do so where they must; a kernel need not.
    pub fn settle_flushes(&self) -> u64 {
        self.settle_pending();
        self.release_owed()
    }

    /// Does all flushes that are deferred. It may be in a section, and hold busy entries.
    #[cold]
    pub(crate) fn settle_pending(&self) {
        let vm = self.vm();
        let runs = |cpu| self.runs_a_space(cpu);
        let sent = vm.deferred.settle(vm.machine(), &vm.inboxes, self.local(), self, runs);
        self.count(Counter::DeferredSettled);
        if sent != 0 {
            self.state().counts.add(Counter::TlbShootdownSent, sent);
        }
    }

    /// Whether a CPU runs a space. What it dropped when it left one comes before the answer that it runs none.
    pub(crate) fn runs_a_space(&self, cpu: CpuId) -> bool {
        self.vm().cpus.remote(cpu).resident.space.load(Ordering::Acquire) != 0
    }

    /// Frees the frames whose flush is done.
    pub(crate) fn release_owed(&self) -> u64 {
        let paid =
            if lost(Mutant::ReleaseLooksAtStamps) { u64::MAX } else { self.vm().deferred.paid() };
        // SAFETY: these stamps are paid.
        unsafe { self.vm().frames.release_owed(paid, self) }
    }

    /// As [`settle_flushes`](Self::settle_flushes), if frames wait. Returns whether any were freed.
    #[inline]
    pub(crate) fn settle_owed(&self) -> bool {
        self.vm().frames.owed_count() != 0 && self.settle_flushes() != 0
    }

    /// Frees those frames whose flush is done since CPUs have flushed by themselves; if there are none, those that wait for a flush, which it does. Returns
    /// whether there were any. For whoever needs some frames, and not all.
    pub(crate) fn settle_some(&self) -> bool {
        self.vm().frames.owed_count() != 0
            && (self.collect_owed() != 0 || self.settle_flushes() != 0)
    }

    /// Frees the frames whose flush is done since CPUs have flushed by themselves. Nobody is interrupted. Returns how many there were.
    pub(crate) fn collect_owed(&self) -> u64 {
        let vm = self.vm();
        if vm.frames.owed_count() == 0 {
            return 0;
        }
        self.flush_if_asked();
        vm.deferred.collect(self, |cpu| self.runs_a_space(cpu));
        self.release_owed()
    }

    /// What a CPU that reclaims or balances memory does about deferred flushes, before each batch. A program's own call has no part in it: it need not wait for
    /// that.
    #[inline]
    pub(crate) fn collect_ahead(&self) {
        if self.vm().frames.owes_some(COLLECTED) {
            self.collect_owed();
        } else {
            self.flush_if_asked();
        }
    }

    /// As [`collect_ahead`](Self::collect_ahead), where pages move between nodes: memory is not short, so nothing else ends the wait for CPUs that do not flush, and
    /// every frame that waits is one more in use.
    #[inline]
    pub(crate) fn settle_ahead(&self) {
        self.collect_ahead();
        let frames = &self.vm().frames;
        let least = FOR_EACH * self.vm().cpus.len() as u64;
        if frames.owes_some(SETTLED) && frames.owed_count() >= least {
            self.settle_flushes();
        }
    }

    /// Drops all translations of this CPU, if CPUs were asked to since many frames wait for it.
    #[inline]
    pub(crate) fn flush_if_asked(&self) {
        if self.vm().deferred.is_asked(self.local()) {
            self.flush_own();
            self.count(Counter::DeferredOwn);
        }
    }

    /// Drops all translations of this CPU. The subsystem does so itself where it must. A kernel may wherever it costs little, as before a CPU is idle: then the
    /// CPU need not be interrupted for what was deferred so far, nor for pages that it does not use until they leave.
    pub fn flush_own(&self) {
        let deferred = &self.vm().deferred;
        let before = deferred.before_flush();
        self.vm().machine().invalidate_all(self.id());
        deferred.flushed(self.local(), before);
    }

    /// Defers the flush of entries that have changed in spaces with the sets `of`, and returns its stamp.
    pub(crate) fn defer_flush<'a>(&self, of: impl Iterator<Item = &'a CpuSet>) -> u64 {
        self.count(Counter::FlushDeferred);
        self.vm().deferred.defer(of, self)
    }

    /// Whether the flush of a page of a space or object, which keeps `pending`, may not have been done.
    #[inline(always)]
    pub(crate) fn is_pending(&self, pending: &Pending) -> bool {
        self.vm().deferred.is_pending(pending) && !lost(Mutant::WriteSettles)
    }

    /// Does the flush of `pending`, if it was not done: what a page shows is about to change.
    #[inline(always)]
    pub(crate) fn settle(&self, pending: &Pending) {
        if self.is_pending(pending) {
            self.settle_pending();
        }
    }
}
