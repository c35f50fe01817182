//! [Deferred flushes](crate::tlb::deferred), and the frames waiting for a deferred flush.

use super::Cpu;
use crate::machine::{CpuId, Machine};
use crate::stat::Counter;
use crate::sync::atomic::Ordering;
use crate::sync::mutant::{Mutant, lost};
use crate::tlb::cpuset::CpuSet;
use crate::tlb::deferred::Pending;

/// Once 1/16 of the deferral budget is used, a CPU in the background collects flushes that CPUs
/// have already done.
const COLLECTED: u64 = 16;

/// If 1/8 of the budget is still used after a collection, and at least [`FOR_EACH`] frames for each
/// CPU, a CPU that moves pages interrupts the CPUs that were asked and have not flushed.
const SETTLED: u64 = 8;
/// The number of frames for which an interrupt is worthwhile.
const FOR_EACH: u64 = 16;

impl<M: Machine> Cpu<'_, M> {
    /// Does all deferred flushes, and frees the waiting frames. CPUs are not interrupted if they
    /// have dropped their translations since. Returns the number of frames freed.
    ///
    /// Calls do this when necessary; a kernel need not call this function.
    pub fn flush_deferred(&self) -> u64 {
        self.do_deferred_flushes();
        self.release_flushed()
    }

    /// Does all deferred flushes. The caller may be in a grace section and hold busy entries.
    #[cold]
    pub(crate) fn do_deferred_flushes(&self) {
        let vm = self.vm();
        let runs = |cpu| self.runs_a_space(cpu);
        let sent = vm.deferred.flush_all(vm.machine(), &vm.inboxes, self.local(), self, runs);
        self.count(Counter::DeferredSettled);
        if sent != 0 {
            self.state().counts.add(Counter::TlbShootdownSent, sent);
        }
    }

    /// Returns whether a CPU runs a space. If the result is false, the CPU has dropped its
    /// translations of its last space before.
    pub(crate) fn runs_a_space(&self, cpu: CpuId) -> bool {
        self.vm().cpus.remote(cpu).resident.space.load(Ordering::Acquire) != 0
    }

    /// Frees the frames whose flush is done.
    pub(crate) fn release_flushed(&self) -> u64 {
        let paid =
            if lost(Mutant::ReleaseLooksAtStamps) { u64::MAX } else { self.vm().deferred.paid() };
        // SAFETY: these stamps are paid.
        unsafe { self.vm().frames.release_flushed(paid, self) }
    }

    /// As [`flush_deferred`](Self::flush_deferred), if frames wait. Returns whether any were freed.
    #[inline]
    pub(crate) fn flush_deferred_if_any(&self) -> bool {
        self.vm().frames.flush_pending_count() != 0 && self.flush_deferred() != 0
    }

    /// Frees frames whose flush other CPUs have already done; if there are none, does the deferred
    /// flushes and frees the waiting frames. Returns whether any were freed. For callers that need
    /// only some frames.
    pub(crate) fn free_some_flush_pending(&self) -> bool {
        self.vm().frames.flush_pending_count() != 0
            && (self.free_flushed() != 0 || self.flush_deferred() != 0)
    }

    /// Frees frames whose flush other CPUs have already done, without interrupts. Returns the
    /// number of frames freed.
    pub(crate) fn free_flushed(&self) -> u64 {
        let vm = self.vm();
        if vm.frames.flush_pending_count() == 0 {
            return 0;
        }
        self.flush_if_asked();
        vm.deferred.collect(self, |cpu| self.runs_a_space(cpu));
        self.release_flushed()
    }

    /// Handles deferred flushes before each batch of a CPU that reclaims or balances memory. A
    /// program's own call does not use this function, so it does not wait for the flush.
    #[inline]
    pub(crate) fn collect_in_background(&self) {
        if self.vm().frames.uses_budget(COLLECTED) {
            self.free_flushed();
        } else {
            self.flush_if_asked();
        }
    }

    /// As [`collect_in_background`](Self::collect_in_background), for pages that move between
    /// nodes. Memory is not short then, so no other event forces the CPUs to flush, and every
    /// waiting frame increases memory use.
    #[inline]
    pub(crate) fn flush_in_background(&self) {
        self.collect_in_background();
        let frames = &self.vm().frames;
        let least = FOR_EACH * self.vm().cpus.len() as u64;
        if frames.uses_budget(SETTLED) && frames.flush_pending_count() >= least {
            self.flush_deferred();
        }
    }

    /// Drops all translations of this CPU, if CPUs were asked to flush because many frames wait.
    #[inline]
    pub(crate) fn flush_if_asked(&self) {
        if self.vm().deferred.is_asked(self.local()) {
            self.flush_local();
            self.count(Counter::DeferredOwn);
        }
    }

    /// Drops all translations of this CPU. The subsystem does this itself when necessary. A kernel
    /// may call it when the flush is cheap, for example before a CPU goes idle: then the CPU need
    /// not be interrupted for flushes deferred so far, nor for pages not used again before their
    /// eviction.
    pub fn flush_local(&self) {
        let deferred = &self.vm().deferred;
        let before = deferred.before_flush();
        self.vm().machine().invalidate_all(self.id());
        deferred.flushed(self.local(), before);
    }

    /// Defers the flush of entries that have changed in spaces with the sets `of`, and returns its
    /// stamp.
    pub(crate) fn defer_flush<'a>(&self, of: impl Iterator<Item = &'a CpuSet>) -> u64 {
        self.count(Counter::FlushDeferred);
        self.vm().deferred.defer(of, self)
    }

    /// Returns whether the flush of a page of a space or object, which stores `pending`, may still
    /// be outstanding.
    #[inline(always)]
    pub(crate) fn is_pending(&self, pending: &Pending) -> bool {
        self.vm().deferred.is_pending(pending) && !lost(Mutant::WriteFlushesPending)
    }

    /// Does the flush of `pending` if it is outstanding: the contents of a page are about to
    /// change.
    #[inline(always)]
    pub(crate) fn flush_if_pending(&self, pending: &Pending) {
        if self.is_pending(pending) {
            self.do_deferred_flushes();
        }
    }
}
