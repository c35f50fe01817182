//! The CPUs that may hold translations of a space.

use crate::machine::CpuId;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::cpus::Cpus;
use crate::sync::mutant::{Mutant, lost};

/// The CPUs that may hold translations of a space.
///
/// *Invariant (the set is wide enough):* a CPU is in the set from before its first use of the
/// space's tables until after the CPU has flushed the space.
#[derive(Debug, Default)]
pub struct CpuSet(Cpus);

impl CpuSet {
    /// Returns the empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a CPU, before all its later accesses.
    pub fn insert(&self, cpu: CpuId) {
        self.0.insert(cpu);
        // The CPU's walks come after the fence: either a writer sees the bit, or the walk sees the
        // writer's change.
        if !lost(Mutant::EnterSetFence) {
            fence(Ordering::SeqCst);
        }
    }

    /// Removes a CPU, after all its earlier accesses.
    pub fn remove(&self, cpu: CpuId) {
        self.0.remove(cpu);
    }

    /// Returns whether the CPU is in the set.
    #[inline]
    pub fn contains(&self, cpu: CpuId) -> bool {
        self.0.contains(cpu)
    }

    /// Returns whether any CPU except `cpu` is in the set, of a machine with `cpus` CPUs.
    #[inline]
    pub fn any_but(&self, cpu: CpuId, cpus: usize) -> bool {
        self.0.any_but(cpu, cpus)
    }

    /// Iterates over the CPUs in the set, ascending, of a machine with `cpus` CPUs; each word is
    /// read once.
    pub fn iter(&self, cpus: usize) -> impl Iterator<Item = CpuId> {
        self.0.iter(cpus)
    }
}
