//! State that belongs to one CPU.
//!
//! A [`Local`] proves that the code runs on a CPU: there is at most one for each number, and
//! `Local` is not `Sync`. [`PerCpu`] returns the slot of this CPU for a `Local`, so a slot may
//! contain plain `Cell`s. Each slot starts on separate cache lines.

use super::atomic::made;
use super::order::Record;
use crate::error::OutOfMemory;
use crate::machine::CpuId;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;

/// The proof that the code runs on CPU `id`.
///
/// *Invariant (one local per CPU):* for one subsystem there is at most one `Local` of each number
/// at any time, and the number is a CPU of the subsystem.
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
    /// No second `Local` with this number exists for the same [`PerCpu`] values while this `Local`
    /// does, all these values have more than `id` slots, and code that interrupts the holder does
    /// not use the `Local`.
    pub const unsafe fn claim(id: CpuId) -> Self {
        Self { id, order: Record::new(), not_sync: PhantomData }
    }

    /// Returns the CPU's number.
    #[inline]
    pub const fn id(&self) -> CpuId {
        self.id
    }

    /// Returns the record of the resources held by this CPU.
    #[inline(always)]
    pub const fn order(&self) -> &Record {
        &self.order
    }
}

/// A value on a separate cache line, together with the line's prefetched neighbour, to prevent
/// false sharing.
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

// SAFETY: a slot is accessed as `&T` either through `get`, from the one CPU that holds its `Local`
// (one local per CPU; `Local` is not `Sync`), for which `T: Send` suffices; or through `remote`,
// which requires `T: Sync`.
unsafe impl<T: Send> Sync for PerCpu<T> {}

impl<T> PerCpu<T> {
    /// Returns a slot for each of `cpus` CPUs.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub fn try_new(cpus: usize, mut make: impl FnMut(CpuId) -> T) -> Result<Self, OutOfMemory> {
        Self::try_new_with(cpus, |id| Ok(make(id)))
    }

    /// Returns a slot for each of `cpus` CPUs, for a `make` that may fail.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted, and errors of `make`.
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

    /// Returns the number of slots.
    #[inline]
    pub const fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns the slot of the CPU of `local`.
    #[inline(always)]
    pub fn get<'a>(&'a self, local: &'a Local) -> &'a T {
        debug_assert!(local.id.index() < self.slots.len());
        // SAFETY: one local per CPU: the number has a slot.
        &unsafe { self.slots.get_unchecked(local.id.index()) }.0
    }

    /// Iterates over all slots with exclusive access, in the order of CPU numbers.
    #[cfg(any(test, loom, shuttle))]
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().map(|slot| &mut slot.0)
    }
}

impl<T: Sync> PerCpu<T> {
    /// Returns the slot of any CPU.
    #[inline]
    pub fn remote(&self, id: CpuId) -> &T {
        &self.slots[id.index()].0
    }

    /// Iterates over all slots, in the order of CPU numbers.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().map(|slot| &slot.0)
    }
}

impl<T> fmt::Debug for PerCpu<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PerCpu({} slots)", self.slots.len())
    }
}
