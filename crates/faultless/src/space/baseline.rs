//! The locks of the baselines `mmap_lock` and `per_vma`, which stand for Linux's address spaces and exist for comparison.
//!
//! Readers who want to know only the subsystem may skip this file, [`fault::baseline`](crate::fault::baseline), and
//! [`RwLock`](crate::sync::rwlock::RwLock). What each lock excludes is in ARCHITECTURE.md, "The locks of the baselines".
//!
//! - Under both policies every operation takes the space's [`RwLock`]: one that changes VMAs to write, any other to read. It
//!   takes the place of the claim in the range lock.
//! - Under `per_vma` a fault tries the [`VmaLock`] of its VMA first, and a writer also takes those of the VMAs that it
//!   write-locks.
//!
//! The VMA tree, the sequences and the entry protocol are the same under all policies.

use super::vma::Vma;
use super::write::Writing;
use super::{Guard, Space};
use crate::addr::VirtRange;
use crate::knob::Locking;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::order;
use crate::sync::wait::Wait;
use crate::vm::Cpu;

/// The VMA lock of Linux 6.4 to 6.14: faults try it to read, writers of the VMA lock readers out.
/// Used by the `per_vma` baseline only.
#[derive(Debug)]
pub struct VmaLock(AtomicU32);

const WRITER: u32 = 1 << 31;

impl Default for VmaLock {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl VmaLock {
    /// Takes it to read, unless a writer has it.
    #[inline(always)]
    pub fn try_read(&self) -> Option<VmaReader<'_>> {
        let before = self.0.fetch_add(1, Ordering::AcqRel);
        // Dropped, it takes itself back.
        let reader = VmaReader(self);
        (before & WRITER == 0).then_some(reader)
    }

    /// Takes it to write: readers drain, new ones fail.
    pub fn write(&self, wait: &impl Wait) {
        order::before::<order::VmaLock>(wait);
        self.0.fetch_or(WRITER, Ordering::AcqRel);
        let mut looks = 0;
        while self.0.load(Ordering::Acquire) != WRITER {
            wait.wait(looks);
            looks += 1;
        }
    }

    /// Lets readers in again.
    pub fn end_write(&self) {
        self.0.fetch_and(!WRITER, Ordering::Release);
    }
}

/// A reader of a [`VmaLock`], until it is dropped.
#[derive(Debug)]
#[must_use = "the lock is free again when this is dropped"]
pub struct VmaReader<'a>(&'a VmaLock);

impl Drop for VmaReader<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

impl<M: Machine> Space<M> {
    /// Takes the space's lock to write.
    #[inline(never)]
    pub(super) fn mmap_write_lock<'a>(&'a self, cpu: &'a Cpu<'_, M>) -> Guard<'a> {
        cpu.count(Counter::MmapLockWrite);
        Guard::Writing { guard: self.core.mmap_lock.write(cpu) }
    }

    /// Takes the space's lock to read.
    #[inline(always)]
    pub(super) fn mmap_read_lock<'a>(&'a self, cpu: &'a Cpu<'_, M>) -> Guard<'a> {
        cpu.count(Counter::MmapLockRead);
        Guard::Reading { guard: self.core.mmap_lock.read(cpu) }
    }

    /// Takes every lock of every policy, switches, and waits for attempts under VMA locks that saw
    /// the old policy. Attempts without a lock need no waiting for: every writer moves the sequences.
    #[cold]
    pub(super) fn switch_locking(&self, cpu: &Cpu<'_, M>, wanted: u64) {
        self.check_vm(cpu);
        let vm = cpu.vm();
        let _coarse = self.core.mmap_lock.write(cpu);
        let all = [VirtRange::USER, VirtRange::new(0, 0)];
        let _fine = self.core.ranges.acquire(&vm.claims, cpu.local(), all, cpu);
        self.locking.store(wanted, Ordering::Release);
        vm.grace.synchronize_locked(cpu.local(), cpu);
    }
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Under `per_vma`, takes the lock of `vma` to write.
    #[inline(always)]
    pub(super) fn write_lock_vma(&self, vma: &Vma) {
        if self.locking == Locking::PerVma {
            vma.lock.write(self.cpu);
        }
    }

    /// Ends [`write_lock_vma`](Self::write_lock_vma).
    #[inline(always)]
    pub(super) fn write_unlock_vma(&self, vma: &Vma) {
        if self.locking == Locking::PerVma {
            vma.lock.end_write();
        }
    }

    /// Downgrades the baselines' one lock from write to read. This writer must not change VMAs after that.
    #[inline(always)]
    pub(super) fn let_readers_in(&self) {
        if let Guard::Writing { guard } = &self.guard {
            guard.downgrade();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::wait::Spin;

    #[test]
    fn a_writer_keeps_readers_out() {
        let lock = VmaLock::default();
        drop(lock.try_read().unwrap());
        lock.write(&Spin);
        assert!(lock.try_read().is_none());
        lock.end_write();
        assert!(lock.try_read().is_some());
    }
}
