//! The memory of VMAs: a freed VMA is reused for the next VMA of any space.
//!
//! Each CPU has free VMAs of its own, in two chains of at most [`MOST`] VMAs. A CPU that has filled
//! both chains gives one chain to the stock that all CPUs share, and a CPU without a free VMA takes
//! some from there. So a CPU that only frees, and a CPU that only makes VMAs, do not need more and
//! more memory. The allocation of a VMA on the heap is rare, and costs more than the rest of a
//! call that maps.
//!
//! *Invariant (VMA memory is stable):* while the subsystem exists, the memory of a VMA is a VMA,
//! free or not: it does not return to the heap. So a CPU may read the sequence of a VMA through a
//! pointer that it kept from an earlier call ([`Hint`](crate::vm::state::Hint)).
//!
//! *Invariant (sequences do not repeat):* the sequence of one piece of memory only grows. It is odd
//! while the memory is free, and has a higher value when the memory is used again. So an even
//! sequence that a CPU has read identifies one VMA, and one state of this VMA.

use super::vma::Vma;
use crate::error::OutOfMemory;
use crate::heap;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::grace::{RetireChain, RetireLink};
use crate::sync::order::FreeVmas;
use crate::sync::spin::SpinLock;
use crate::sync::wait::Wait;
use alloc::boxed::Box;
use core::cell::Cell;
use core::ptr::NonNull;

/// The largest number of VMAs in one chain of a CPU. Both chains together have room for all VMAs
/// that usually become free at the end of a grace period. Small in models and scenarios, so that
/// they reach the shared stock.
const MOST: usize = if cfg!(any(test, loom, shuttle)) { 2 } else { 64 };

/// The free VMAs of one CPU.
///
/// *Invariant (free VMAs are ours):* only this CPU reaches the VMAs in the chains, except for their
/// sequences, and each VMA is in one chain.
#[derive(Debug, Default)]
pub(crate) struct VmaStock {
    /// VMAs are taken from this chain, and added to it.
    current: Cell<RetireChain>,
    /// Full or empty.
    other: Cell<RetireChain>,
    /// The number of VMAs that this CPU has allocated on the heap. Only this CPU writes it.
    allocated: AtomicU64,
}

/// The free VMAs that all CPUs share.
#[derive(Debug, Default)]
pub(crate) struct SharedVmaStock {
    free: SpinLock<Chain, FreeVmas>,
    /// The number of VMAs in the chain, which is written under the lock. CPUs read it before they
    /// take the lock: many CPUs that make their first VMAs write no common line.
    len: AtomicU64,
}

/// The memory of VMAs: [`Vm::vma_usage`](crate::Vm::vma_usage).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VmaUsage {
    /// The number of VMAs on the heap.
    pub allocated: u64,
    /// The number of these VMAs that no space uses and no CPU holds. A CPU holds up to 128 unused
    /// VMAs until it is [drained](crate::Cpu::drain), and VMAs whose grace period has not ended.
    pub free: u64,
    /// The bytes of all VMAs on the heap.
    pub bytes: u64,
}

/// A chain of free VMAs, which the owner of the value alone reaches.
#[derive(Debug, Default)]
struct Chain(RetireChain);

// SAFETY: free VMAs own no data, and only the owner of the chain reaches them.
unsafe impl Send for Chain {}

impl VmaStock {
    /// Returns a free VMA: its sequence is odd, and it refers to no memory and no mapping.
    ///
    /// # Errors
    /// [`OutOfMemory`] if no VMA is free, and the heap is exhausted.
    #[inline(always)]
    pub(super) fn take(
        &self,
        shared: &SharedVmaStock,
        wait: &impl Wait,
    ) -> Result<NonNull<Vma>, OutOfMemory> {
        let mut current = self.current.get();
        // SAFETY: free VMAs are ours.
        match unsafe { current.pop() } {
            Some(link) => {
                self.current.set(current);
                Ok(link.cast())
            }
            None => self.refill(shared, wait),
        }
    }

    /// [`take`](Self::take), if the current chain is empty.
    #[cold]
    #[inline(never)]
    fn refill(
        &self,
        shared: &SharedVmaStock,
        wait: &impl Wait,
    ) -> Result<NonNull<Vma>, OutOfMemory> {
        let mut chain = self.other.take();
        if chain.is_empty() {
            chain = shared.take_some(wait);
        }
        // SAFETY: free VMAs are ours; those of the shared stock are from now on.
        let first = unsafe { chain.pop() };
        self.current.set(chain);
        match first {
            Some(link) => Ok(link.cast()),
            None => {
                // No box from here on: moving a box would claim that there is no other pointer.
                let new = NonNull::from(Box::leak(heap::try_box_with(Vma::free)?));
                self.allocated.store(self.allocated() + 1, Ordering::Relaxed);
                Ok(new)
            }
        }
    }

    /// Adds `vma`.
    ///
    /// # Safety
    /// `vma` is free, came from [`take`](Self::take) of a stock of this subsystem, and no CPU
    /// reaches it, except for its sequence.
    #[inline(always)]
    pub(super) unsafe fn give(&self, vma: NonNull<Vma>, shared: &SharedVmaStock, wait: &impl Wait) {
        let mut current = self.current.get();
        if current.len() == MOST {
            current = self.make_room(shared, wait);
        }
        // SAFETY: free VMAs are ours, and the caller's promise. A link is the first field of a VMA.
        unsafe { current.push(vma.cast::<RetireLink>()) };
        self.current.set(current);
    }

    /// Returns the number of VMAs that this CPU has allocated on the heap.
    pub(crate) fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Passes all VMAs to the stock that all CPUs share.
    pub(crate) fn drain(&self, shared: &SharedVmaStock, wait: &impl Wait) {
        for chain in [self.current.take(), self.other.take()] {
            if !chain.is_empty() {
                shared.give(chain, wait);
            }
        }
    }

    /// Moves the current chain, which is full, away. Returns the next one, which has room.
    #[cold]
    #[inline(never)]
    fn make_room(&self, shared: &SharedVmaStock, wait: &impl Wait) -> RetireChain {
        let other = self.other.replace(self.current.take());
        if other.len() == MOST {
            shared.give(other, wait);
            return RetireChain::default();
        }
        other
    }
}

impl Drop for VmaStock {
    fn drop(&mut self) {
        free_all(self.current.take());
        free_all(self.other.take());
    }
}

impl SharedVmaStock {
    /// Removes up to [`MOST`] VMAs.
    fn take_some(&self, wait: &impl Wait) -> RetireChain {
        let mut some = RetireChain::default();
        if self.len.load(Ordering::Relaxed) == 0 {
            return some;
        }
        let mut all = self.free.lock(wait);
        while some.len() < MOST {
            // SAFETY: the stock owns its VMAs, and passes them to the caller.
            let Some(link) = (unsafe { all.0.pop() }) else { break };
            // SAFETY: as above.
            unsafe { some.push(link) };
        }
        self.len.store(all.0.len() as u64, Ordering::Relaxed);
        some
    }

    fn give(&self, chain: RetireChain, wait: &impl Wait) {
        let mut all = self.free.lock(wait);
        // SAFETY: the caller owned the VMAs, and passes them to the stock.
        unsafe { all.0.prepend(chain) };
        self.len.store(all.0.len() as u64, Ordering::Relaxed);
    }

    /// Returns the usage if all CPUs have `allocated` VMAs on the heap.
    pub(crate) fn usage(&self, allocated: u64) -> VmaUsage {
        let free = self.len.load(Ordering::Relaxed);
        VmaUsage { allocated, free, bytes: allocated * size_of::<Vma>() as u64 }
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        free_all(core::mem::take(&mut self.0));
    }
}

/// Frees the VMAs of a subsystem that ends.
fn free_all(mut chain: RetireChain) {
    // SAFETY: the caller owns the VMAs.
    while let Some(link) = unsafe { chain.pop() } {
        // SAFETY: made by `heap::try_box_with` in `refill`. Only CPUs of the subsystem have hints.
        drop(unsafe { Box::from_raw(link.cast::<Vma>().as_ptr()) });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::wait::Spin;
    use alloc::vec::Vec;
    use std::collections::BTreeSet;

    fn take(stock: &VmaStock, shared: &SharedVmaStock, count: usize) -> Vec<NonNull<Vma>> {
        (0..count).map(|_| stock.take(shared, &Spin).unwrap()).collect()
    }

    fn give(stock: &VmaStock, shared: &SharedVmaStock, vmas: &[NonNull<Vma>]) {
        for vma in vmas {
            // SAFETY: taken from a stock, and unused since.
            unsafe { stock.give(*vma, shared, &Spin) };
        }
    }

    #[test]
    fn the_vma_freed_last_is_reused_first() {
        let (stock, shared) = (VmaStock::default(), SharedVmaStock::default());
        let taken = take(&stock, &shared, 2);
        give(&stock, &shared, &taken);
        assert_eq!(take(&stock, &shared, 1), [taken[1]]);
        give(&stock, &shared, &taken[1..]);
    }

    #[test]
    fn a_drained_cpu_holds_no_vma() {
        let (stock, shared) = (VmaStock::default(), SharedVmaStock::default());
        let taken = take(&stock, &shared, MOST + 1);
        let usage = |free| {
            let allocated = MOST as u64 + 1;
            VmaUsage { allocated, free, bytes: allocated * size_of::<Vma>() as u64 }
        };
        assert_eq!(shared.usage(stock.allocated()), usage(0));
        give(&stock, &shared, &taken);
        stock.drain(&shared, &Spin);
        assert_eq!(shared.usage(stock.allocated()), usage(MOST as u64 + 1));
    }

    #[test]
    fn another_cpu_reuses_vmas_beyond_two_chains() {
        let (one, two, shared) = Default::default();
        let all: BTreeSet<_> = take(&one, &shared, 10 * MOST).into_iter().collect();
        assert_eq!(all.len(), 10 * MOST, "no VMA is given twice");
        give(&two, &shared, &all.iter().copied().collect::<Vec<_>>());
        let again = take(&one, &shared, 8 * MOST);
        assert!(again.iter().all(|vma| all.contains(vma)), "a VMA is from the heap");
        let rest = take(&two, &shared, 2 * MOST);
        let reused: BTreeSet<_> = again.iter().chain(&rest).copied().collect();
        assert_eq!(reused, all);
        give(&one, &shared, &again);
        give(&two, &shared, &rest);
    }
}
