//! The locks of the baselines `mmap_lock` and `per_vma`, which model Linux's address spaces for
//! comparison.
//!
//! Readers interested only in the subsystem may skip this file,
//! [`fault::baseline`](crate::fault::baseline), and [`RwLock`](crate::sync::rwlock::RwLock).
//! ARCHITECTURE.md, "The locks of the baselines", lists the exclusions of each lock.
//!
//! - Under both policies every operation takes the space's [`RwLock`]: operations that change VMAs
//!   for writing, others for reading. This lock replaces the claim in the range lock.
//! - Under `per_vma` a fault first tries the [`VmaLock`] of its VMA, and a writer also takes the
//!   locks of the VMAs that it write-locks.
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

/// The VMA lock of Linux 6.4 to 6.14: faults try it for reading, and writers of the VMA exclude
/// readers. Used only by the `per_vma` baseline.
#[derive(Debug)]
pub struct VmaLock(AtomicU32);

const WRITER: u32 = 1 << 31;

impl Default for VmaLock {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl VmaLock {
    /// Takes the lock for reading, unless a writer has it.
    #[inline(always)]
    pub fn try_read(&self) -> Option<VmaReader<'_>> {
        let before = self.0.fetch_add(1, Ordering::AcqRel);
        // The drop of the reader restores the count.
        let reader = VmaReader(self);
        (before & WRITER == 0).then_some(reader)
    }

    /// Takes the lock for writing: waits for readers, and makes new readers fail.
    pub fn write(&self, wait: &impl Wait) {
        order::before::<order::VmaLock>(wait);
        self.0.fetch_or(WRITER, Ordering::AcqRel);
        let mut looks = 0;
        while self.0.load(Ordering::Acquire) != WRITER {
            wait.wait(looks);
            looks += 1;
        }
    }

    /// Admits readers again.
    pub fn end_write(&self) {
        self.0.fetch_and(!WRITER, Ordering::Release);
    }
}

/// A reader of a [`VmaLock`], until the drop.
#[derive(Debug)]
#[must_use = "the drop releases the lock"]
pub struct VmaReader<'a>(&'a VmaLock);

impl Drop for VmaReader<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

impl<M: Machine> Space<M> {
    /// Takes the space's lock for writing.
    #[inline(never)]
    pub(super) fn mmap_write_lock<'a>(&'a self, cpu: &'a Cpu<'_, M>) -> Guard<'a> {
        cpu.count(Counter::MmapLockWrite);
        Guard::Writing { guard: self.core.mmap_lock.write(cpu) }
    }

    /// Takes the space's lock for reading.
    #[inline(always)]
    pub(super) fn mmap_read_lock<'a>(&'a self, cpu: &'a Cpu<'_, M>) -> Guard<'a> {
        cpu.count(Counter::MmapLockRead);
        Guard::Reading { guard: self.core.mmap_lock.read(cpu) }
    }

    /// Takes every lock of every policy, switches, and waits for attempts under VMA locks that saw
    /// the old policy. There is no need to wait for attempts without a lock, because every writer
    /// changes the sequences.
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
    /// Under `per_vma`, takes the lock of `vma` for writing.
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

    /// Downgrades the baselines' lock from write to read. This writer must not change VMAs
    /// afterwards.
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
    fn a_writer_excludes_readers() {
        let lock = VmaLock::default();
        drop(lock.try_read().unwrap());
        lock.write(&Spin);
        assert!(lock.try_read().is_none());
        lock.end_write();
        assert!(lock.try_read().is_some());
    }
}
