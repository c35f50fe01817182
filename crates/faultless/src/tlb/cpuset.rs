//! A set of CPUs that many CPUs change at once.

use crate::machine::{CpuId, MAX_CPUS};
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::mutant::{Mutant, lost};

const WORDS: usize = MAX_CPUS / 64;

/// The CPUs that may hold translations of a space.
///
/// *Invariant (the set is wide enough):* a CPU is in the set from before its first use of the space's
/// tables until after it has flushed the space.
#[derive(Debug)]
pub struct CpuSet {
    words: [AtomicU64; WORDS],
}

impl Default for CpuSet {
    fn default() -> Self {
        Self::new()
    }
}

impl CpuSet {
    /// The empty set.
    pub fn new() -> Self {
        Self { words: core::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Adds a CPU, before anything it does next.
    pub fn insert(&self, cpu: CpuId) {
        self.words[cpu.index() / 64].fetch_or(1 << (cpu.index() % 64), Ordering::AcqRel);
        // The CPU's walks come after: either a writer sees the bit, or the walk sees its change.
        if !lost(Mutant::EnterSetFence) {
            fence(Ordering::SeqCst);
        }
    }

    /// Removes a CPU, after all that it did.
    pub fn remove(&self, cpu: CpuId) {
        self.words[cpu.index() / 64].fetch_and(!(1 << (cpu.index() % 64)), Ordering::AcqRel);
    }

    /// Whether the CPU is in the set.
    #[inline]
    pub fn contains(&self, cpu: CpuId) -> bool {
        self.words[cpu.index() / 64].load(Ordering::Acquire) >> (cpu.index() % 64) & 1 != 0
    }

    /// Whether any CPU but `cpu` is in the set, of a machine with `cpus` CPUs.
    #[inline]
    pub fn any_but(&self, cpu: CpuId, cpus: usize) -> bool {
        self.words[..cpus.div_ceil(64)].iter().enumerate().any(|(word, bits)| {
            let mine = if cpu.index() / 64 == word { 1 << (cpu.index() % 64) } else { 0 };
            bits.load(Ordering::Acquire) & !mine != 0
        })
    }

    /// The CPUs in the set, ascending, of a machine with `cpus` CPUs; each word is read once.
    pub fn iter(&self, cpus: usize) -> impl Iterator<Item = CpuId> {
        self.words[..cpus.div_ceil(64)].iter().enumerate().flat_map(|(word, bits)| {
            let mut bits = bits.load(Ordering::Acquire);
            core::iter::from_fn(move || {
                let bit = bits.checked_ilog2().map(|_| bits.trailing_zeros())?;
                bits &= bits - 1;
                Some(CpuId((word * 64) as u16 + bit as u16))
            })
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn members_come_out_in_order_across_words() {
        let set = CpuSet::new();
        for id in [700, 3, 64, 63] {
            set.insert(CpuId(id));
        }
        let members: Vec<_> = set.iter(MAX_CPUS).map(|cpu| cpu.0).collect();
        assert_eq!(members, [3, 63, 64, 700]);
        set.remove(CpuId(64));
        assert!(!set.contains(CpuId(64)) && set.contains(CpuId(63)));
        assert!(set.any_but(CpuId(3), 128));
        set.remove(CpuId(63));
        assert!(!set.any_but(CpuId(3), 128), "700 is beyond a machine of 128");
    }
}
