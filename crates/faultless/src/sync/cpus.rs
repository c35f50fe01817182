//! Sets of CPUs: a bit for each CPU.

use super::atomic::{AtomicU64, Ordering};
use crate::machine::{CpuId, MAX_CPUS};

/// Words of a set.
pub const WORDS: usize = MAX_CPUS / 64;

/// A set that many CPUs change concurrently.
#[derive(Debug)]
pub struct Cpus([AtomicU64; WORDS]);

impl Default for Cpus {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpus {
    /// Returns the empty set.
    pub fn new() -> Self {
        Self(core::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Adds a CPU, and returns whether it is new. If other CPUs must see the addition, the caller
    /// issues a full fence next. Does not write if the set already contains the CPU.
    #[inline]
    pub fn insert(&self, cpu: CpuId) -> bool {
        let is_new = !self.contains(cpu);
        if is_new {
            self.0[cpu.index() / 64].fetch_or(bit(cpu), Ordering::AcqRel);
        }
        is_new
    }

    /// Removes a CPU, after all its earlier accesses. Does not write if the CPU is not in the set.
    #[inline]
    pub fn remove(&self, cpu: CpuId) {
        if self.contains(cpu) {
            self.0[cpu.index() / 64].fetch_and(!bit(cpu), Ordering::AcqRel);
        }
    }

    /// Returns whether the CPU is in the set.
    #[inline]
    pub fn contains(&self, cpu: CpuId) -> bool {
        self.0[cpu.index() / 64].load(Ordering::Acquire) & bit(cpu) != 0
    }

    /// Returns whether any CPU except `cpu` is in the set, of a machine with `cpus` CPUs.
    #[inline]
    pub fn any_but(&self, cpu: CpuId, cpus: usize) -> bool {
        self.0[..cpus.div_ceil(64)].iter().enumerate().any(|(word, bits)| {
            let mine = if cpu.index() / 64 == word { bit(cpu) } else { 0 };
            bits.load(Ordering::Acquire) & !mine != 0
        })
    }

    /// Iterates over the CPUs in the set, ascending, of a machine with `cpus` CPUs; each word is
    /// read once.
    #[inline]
    pub fn iter(&self, cpus: usize) -> impl Iterator<Item = CpuId> {
        members(self.0[..cpus.div_ceil(64)].iter().map(|bits| bits.load(Ordering::Acquire)))
    }
}

/// A set that belongs to one CPU.
#[derive(Debug, Default)]
pub struct OwnCpus([u64; WORDS]);

impl OwnCpus {
    /// Returns the bits, by words of 64 CPUs.
    pub fn words(&self) -> &[u64; WORDS] {
        &self.0
    }

    /// Keeps the CPUs for which `keep` returns true; calls it in ascending order.
    pub fn retain(&mut self, mut keep: impl FnMut(CpuId) -> bool) {
        for (word, bits) in self.0.iter_mut().enumerate() {
            for cpu in members_of_word(word, *bits) {
                if !keep(cpu) {
                    *bits &= !bit(cpu);
                }
            }
        }
    }
}

impl Extend<CpuId> for OwnCpus {
    fn extend<I: IntoIterator<Item = CpuId>>(&mut self, cpus: I) {
        for cpu in cpus {
            self.0[cpu.index() / 64] |= bit(cpu);
        }
    }
}

/// Returns the bit of a CPU in its word.
#[inline(always)]
const fn bit(cpu: CpuId) -> u64 {
    1 << (cpu.index() % 64)
}

/// Iterates over the CPUs of a set with these words, ascending.
#[inline(always)]
pub fn members(words: impl Iterator<Item = u64>) -> impl Iterator<Item = CpuId> {
    words.enumerate().flat_map(|(word, bits)| members_of_word(word, bits))
}

/// Iterates over the CPUs of a word, ascending.
#[inline(always)]
fn members_of_word(word: usize, mut bits: u64) -> impl Iterator<Item = CpuId> {
    core::iter::from_fn(move || {
        let bit = bits.checked_ilog2().map(|_| bits.trailing_zeros())?;
        bits &= bits - 1;
        Some(CpuId((word * 64) as u16 + bit as u16))
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn members_come_out_in_order_across_words() {
        let set = Cpus::new();
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

    #[test]
    fn retain_removes_rejected_cpus() {
        let mut own = OwnCpus::default();
        own.extend([700, 3, 64, 63].map(CpuId));
        own.retain(|cpu| cpu.0 % 2 == 0);
        let mut left = Vec::new();
        own.retain(|cpu| {
            left.push(cpu.0);
            true
        });
        assert_eq!(left, [64, 700]);
    }
}
