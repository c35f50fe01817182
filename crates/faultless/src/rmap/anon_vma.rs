//! anon_vma: shared by the VMAs that may contain the same private anonymous pages.
//!
//! The parts of a split VMA share an [`AnonVma`], as do neighbours that may merge again. A VMA has
//! no anon_vma until its first anonymous page is made: until then a fork need not copy its entries.
//! A forked child gets new anon_vmas. Linux's rules determine from the anon_vmas which VMAs merge.
//!
//! An anon_vma is a number. Frames do not name anon_vmas. Frames name their space of origin and its
//! [family](super::anchor), which lead to all of their entries. So no memory belongs to an
//! anon_vma, no reference to it is counted, and a CPU makes a new number without another CPU.

use crate::machine::{CpuId, MAX_CPUS};
use crate::sync::atomic::{AtomicU64, Ordering};
use core::cell::Cell;
use core::fmt;
use core::num::NonZeroU64;

/// An anon_vma: a number, and whether VMAs under the anon_vma came from a parent process.
///
/// *Invariant (numbers):* two anon_vmas of a subsystem that were made separately differ. The number
/// consists of a count that grows with each anon_vma of a CPU, the number of the CPU, and the bit
/// [`INHERITED`](Self::INHERITED).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AnonVma(NonZeroU64);

impl AnonVma {
    /// The bit of an anon_vma that replaces a parent's anon_vma in a forked child.
    const INHERITED: u64 = 1;

    /// Returns whether VMAs under this anon_vma came from a parent process.
    #[inline(always)]
    pub const fn is_inherited(self) -> bool {
        self.0.get() & Self::INHERITED != 0
    }
}

impl fmt::Debug for AnonVma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnonVma({:#x})", self.0)
    }
}

/// The anon_vmas that one CPU makes.
#[derive(Debug)]
pub struct AnonVmas {
    /// The next number without the number of the CPU.
    next: Cell<NonZeroU64>,
}

impl Default for AnonVmas {
    fn default() -> Self {
        Self { next: Cell::new(Self::FIRST) }
    }
}

impl AnonVmas {
    /// The bit above the numbers of CPUs.
    const FIRST: NonZeroU64 = NonZeroU64::new(2 * MAX_CPUS as u64).expect("there is a CPU");

    /// Makes an anon_vma on the CPU `id`, to which `self` belongs: a new one of a space, or the
    /// replacement of a parent's anon_vma in a forked child (`inherited`).
    #[inline(always)]
    pub fn make(&self, id: CpuId, inherited: bool) -> AnonVma {
        let next = self.next.get();
        // There are 2^53 numbers: they last for three months at one anon_vma each nanosecond.
        self.next.set(next.saturating_add(Self::FIRST.get()));
        AnonVma(next | u64::from(id.0) << 1 | u64::from(inherited))
    }
}

/// A VMA's slot for its anon_vma: empty, then set once.
///
/// | value | meaning |
/// |---|---|
/// | 0 | no anon_vma; the next fault that needs an anon_vma sets it |
/// | [`SEALED`](Self::SEALED) | no anon_vma, and none may be set: a writer changes the VMA, or has replaced it |
/// | other | an anon_vma |
///
/// A writer seals the slots of the VMAs it write-locks, so that all of its steps see the same
/// anon_vmas. Otherwise a fault in progress could set an anon_vma at any time, although the fault
/// cannot install a page.
#[derive(Default)]
pub struct AnonVmaSlot(AtomicU64);

impl AnonVmaSlot {
    const EMPTY: u64 = 0;
    /// The [value](Self::value) of a sealed slot.
    pub(crate) const SEALED: u64 = 1;

    /// Returns a slot that is already set to `anon_vma`.
    #[inline(always)]
    pub fn new(anon_vma: Option<AnonVma>) -> Self {
        Self(AtomicU64::new(anon_vma.map_or(Self::EMPTY, |anon_vma| anon_vma.0.get())))
    }

    /// Returns the value of the slot: 0 if there is no anon_vma, or [`SEALED`](Self::SEALED) while
    /// none can be set: then no page may be made here.
    #[inline(always)]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Returns the anon_vma, if there is one. Unless the slot is sealed, another CPU may set it a
    /// moment later.
    #[inline(always)]
    pub fn get(&self) -> Option<AnonVma> {
        NonZeroU64::new(self.value()).filter(|value| value.get() != Self::SEALED).map(AnonVma)
    }

    /// Prevents changes of an empty slot until it is [unsealed](Self::unseal).
    #[inline]
    pub(crate) fn seal(&self) {
        if self.0.load(Ordering::Relaxed) == Self::EMPTY {
            let (release, relaxed) = (Ordering::Release, Ordering::Relaxed);
            // Release: a fault that finds the slot sealed also finds the VMA's sequence changed. If
            // the swap fails, an anon_vma was set just before.
            let _ = self.0.compare_exchange(Self::EMPTY, Self::SEALED, release, relaxed);
        }
    }

    /// Sets the slot to `anon_vma`, if it has none, sealed or not.
    pub(crate) fn give(&self, anon_vma: AnonVma) {
        let (acq_rel, relaxed) = (Ordering::AcqRel, Ordering::Relaxed);
        let put = |seen| self.0.compare_exchange(seen, anon_vma.0.get(), acq_rel, relaxed).is_ok();
        if !put(Self::EMPTY) {
            put(Self::SEALED);
        }
    }

    /// Allows setting an anon_vma again, if there is none.
    #[inline]
    pub(crate) fn unseal(&self) {
        if self.0.load(Ordering::Relaxed) == Self::SEALED {
            self.0.store(Self::EMPTY, Ordering::Relaxed);
        }
    }

    /// Sets the anon_vma, unless another CPU was faster. Returns the anon_vma in the slot, or
    /// `None` if the slot is sealed.
    pub fn set(&self, anon_vma: AnonVma) -> Option<AnonVma> {
        let (acq_rel, acquire) = (Ordering::AcqRel, Ordering::Acquire);
        match self.0.compare_exchange(Self::EMPTY, anon_vma.0.get(), acq_rel, acquire) {
            Ok(_) => Some(anon_vma),
            Err(_) => self.get(),
        }
    }
}

impl fmt::Debug for AnonVmaSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnonVmaSlot({:#x})", self.value())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn anon_vmas_of_all_cpus_and_of_both_kinds_differ() {
        let last = CpuId(MAX_CPUS as u16 - 1);
        let [one, other] = [AnonVmas::default(), AnonVmas::default()];
        let mut made = Vec::new();
        for inherited in [false, true, false] {
            made.push(one.make(CpuId(0), inherited));
            made.push(other.make(last, inherited));
            assert!(made[made.len() - 2..].iter().all(|new| new.is_inherited() == inherited));
        }
        for (at, new) in made.iter().enumerate() {
            assert!(new.0.get() > AnonVmaSlot::SEALED && !made[..at].contains(new), "{new:?}");
        }
    }

    #[test]
    fn a_slot_is_set_once() {
        let (slot, made) = (AnonVmaSlot::default(), AnonVmas::default());
        assert!(slot.get().is_none() && slot.value() == 0);
        let [first, second] = [0; 2].map(|_| made.make(CpuId(0), false));
        assert_eq!(slot.set(first), Some(first));
        assert_eq!(slot.set(second), Some(first));
        slot.seal();
        slot.unseal();
        slot.give(second);
        assert_eq!(slot.get(), Some(first));
    }

    #[test]
    fn a_sealed_slot_takes_an_anon_vma_from_a_writer_only() {
        let (slot, made) = (AnonVmaSlot::default(), AnonVmas::default());
        let [first, second] = [0; 2].map(|_| made.make(CpuId(0), false));
        slot.seal();
        assert!(slot.set(first).is_none() && slot.get().is_none());
        slot.unseal();
        assert_eq!(slot.set(first), Some(first));
        let sealed = AnonVmaSlot::default();
        sealed.seal();
        sealed.give(second);
        sealed.unseal();
        assert_eq!(sealed.get(), Some(second));
    }
}
