//! State that belongs to one CPU.
//!
//! A [`Local`] is the proof of being on a CPU: there is at most one for each number, and it is not
//! `Sync`. [`PerCpu`] hands out the slot of that CPU against it, so a slot may hold plain `Cell`s.
//! Each slot starts on cache lines of its own.

use super::atomic::made;
use super::order::Record;
use crate::error::OutOfMemory;
use crate::machine::CpuId;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;

/// The proof of running on CPU `id`.
///
/// *Invariant (one local per CPU):* for one subsystem there is at most one `Local` of each number
/// at any time, and its number is one of the subsystem's CPUs.
#[derive(Debug)]
pub struct Local {
    id: CpuId,
    order: Record,
    not_sync: PhantomData<Cell<()>>,
}

impl Local {
    /// Claims CPU `id`.
    ///
    /// # Safety
    /// No other `Local` with this number exists for the same [`PerCpu`] values while this one does,
    /// all of these have more than `id` slots, and code that interrupts its holder does not use it.
    pub const unsafe fn claim(id: CpuId) -> Self {
        Self { id, order: Record::new(), not_sync: PhantomData }
    }

    /// The CPU's number.
    #[inline]
    pub const fn id(&self) -> CpuId {
        self.id
    }

    /// What this CPU holds.
    #[inline(always)]
    pub const fn order(&self) -> &Record {
        &self.order
    }
}

/// A cache line and its prefetched neighbour: what keeps two CPUs from sharing.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Padded<T>(pub T);

impl<T> core::ops::Deref for Padded<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> core::ops::DerefMut for Padded<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// One `T` for each CPU.
pub struct PerCpu<T> {
    slots: Vec<Padded<T>>,
}

// SAFETY: a slot is reached as `&T` either through `get`, from the one CPU that holds its `Local`
// (one local per CPU; `Local` is not `Sync`), for which `T: Send` suffices; or through `remote`,
// which asks for `T: Sync`.
unsafe impl<T: Send> Sync for PerCpu<T> {}

impl<T> PerCpu<T> {
    /// A slot for each of `cpus` CPUs.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    pub fn try_new(cpus: usize, mut make: impl FnMut(CpuId) -> T) -> Result<Self, OutOfMemory> {
        Self::try_new_with(cpus, |id| Ok(make(id)))
    }

    /// A slot for each of `cpus` CPUs, where `make` may fail.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted, and what `make` returns.
    pub fn try_new_with(
        cpus: usize,
        mut make: impl FnMut(CpuId) -> Result<T, OutOfMemory>,
    ) -> Result<Self, OutOfMemory> {
        let mut slots = Vec::new();
        slots.try_reserve_exact(cpus).map_err(|_| OutOfMemory)?;
        made(slots.as_ptr(), cpus);
        for id in 0..cpus {
            slots.push(Padded(make(CpuId(id as u16))?));
        }
        Ok(Self { slots })
    }

    /// How many CPUs have a slot.
    #[inline]
    pub const fn len(&self) -> usize {
        self.slots.len()
    }

    /// The slot of the CPU that `local` proves.
    #[inline(always)]
    pub fn get<'a>(&'a self, local: &'a Local) -> &'a T {
        debug_assert!(local.id.index() < self.slots.len());
        // SAFETY: one local per CPU: its number has a slot.
        &unsafe { self.slots.get_unchecked(local.id.index()) }.0
    }

    /// Exclusive access to every slot, in the order of CPU numbers.
    #[cfg(any(test, loom, shuttle))]
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().map(|slot| &mut slot.0)
    }
}

impl<T: Sync> PerCpu<T> {
    /// The slot of any CPU.
    #[inline]
    pub fn remote(&self, id: CpuId) -> &T {
        &self.slots[id.index()].0
    }

    /// Every CPU's slot, in the order of CPU numbers.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().map(|slot| &slot.0)
    }
}

impl<T> fmt::Debug for PerCpu<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PerCpu({} slots)", self.slots.len())
    }
}
