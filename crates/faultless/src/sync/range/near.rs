//! The CPUs that one CPU has to look at before it holds a claim.

use super::{ClaimSlots, RangeLock};
use crate::machine::CpuId;
use crate::sync::cpus::{OwnCpus, WORDS, members};
use crate::sync::mutant::{Mutant, lost};
// Of the language: they hold what one CPU keeps for itself, which models need not interleave.
use core::sync::atomic::{AtomicU64, Ordering};

/// No count is that high.
const NEVER: u64 = u64::MAX;
/// After how many claims what was not used meanwhile is forgotten: parts of the home, and CPUs that
/// are near no more.
const FORGET: u64 = 64;

/// The CPUs whose homes overlap the home of one CPU, which alone uses it.
///
/// *Invariant (near):* while the lock's count of changes is `count`, every CPU whose home overlaps
/// is in `cpus`.
#[derive(Debug)]
pub(super) struct Near {
    count: AtomicU64,
    /// The parts of the home that cover claims of late: a bit for each.
    used: AtomicU64,
    cpus: [AtomicU64; WORDS],
}

impl Default for Near {
    fn default() -> Self {
        Self {
            count: AtomicU64::new(NEVER),
            used: AtomicU64::new(0),
            cpus: [const { AtomicU64::new(0) }; WORDS],
        }
    }
}

impl Near {
    /// The home of the CPU changed, or its lock.
    pub(super) fn forget(&self) {
        self.count.store(NEVER, Ordering::Relaxed);
    }

    /// Claim number `number` is covered by these parts of the home, a bit for each. Every
    /// [`FORGET`] claims it returns the parts that no claim has used since, and the CPU looks again
    /// for those that are near, if any were: some may be so no more.
    #[inline(always)]
    pub(super) fn uses(&self, parts: u64, number: u64) -> Option<u64> {
        let used = self.used.load(Ordering::Relaxed) | parts;
        if !number.is_multiple_of(FORGET) {
            self.used.store(used, Ordering::Relaxed);
            return None;
        }
        self.used.store(0, Ordering::Relaxed);
        if self.is_any() {
            self.forget();
        }
        Some(!used)
    }

    /// Whether any CPU may be near.
    pub(super) fn is_any(&self) -> bool {
        self.cpus.iter().any(|bits| bits.load(Ordering::Relaxed) != 0)
    }

    /// The CPUs near `own`, whose home covers its claim, and whose full fence for that claim was
    /// just issued.
    #[inline(always)]
    pub(super) fn cpus<'a>(
        &'a self,
        own: CpuId,
        lock: &RangeLock,
        slots: &'a ClaimSlots,
    ) -> impl Iterator<Item = CpuId> + 'a {
        let count = lock.counted();
        if self.count.load(Ordering::Relaxed) != count || cfg!(loom) && count == NEVER {
            self.find(own, lock, slots, count);
        }
        let words = &self.cpus[..slots.len().div_ceil(64)];
        members(words.iter().map(|bits| bits.load(Ordering::Relaxed)))
    }

    #[cold]
    #[inline(never)]
    fn find(&self, own: CpuId, lock: &RangeLock, slots: &ClaimSlots, count: u64) {
        let home = &slots.remote(own).home;
        let others = lock.users.iter(slots.len()).filter(|cpu| *cpu != own);
        let mut near = OwnCpus::default();
        near.extend(others.filter(|cpu| {
            let all = cfg!(loom) && count == NEVER;
            all || slots.remote(*cpu).home.overlaps(lock.key(), home)
        }));
        for (bits, near) in self.cpus.iter().zip(near.words()) {
            bits.store(*near, Ordering::Relaxed);
        }
        self.count.store(count, Ordering::Relaxed);
    }
}

impl RangeLock {
    /// The count of changes. What is counted is found in the homes, and in the set of users.
    #[inline(always)]
    fn counted(&self) -> u64 {
        #[cfg(loom)]
        if self.looks_at_all {
            return NEVER;
        }
        self.changes.load(Ordering::Acquire)
    }

    /// The home of `cpu` covers its next claim, and did not before; or the CPU is a new user.
    /// Before the full fence of the claim's try.
    #[cold]
    #[inline(never)]
    pub(super) fn home_changed(&self, cpu: CpuId, slots: &ClaimSlots) {
        slots.remote(cpu).near.forget();
        #[cfg(loom)]
        if self.looks_at_all {
            return;
        }
        if !lost(Mutant::HomeCounts) {
            // Release: a CPU that reads the new count reads the new home, and finds the CPU among
            // the users.
            self.changes.fetch_add(1, Ordering::AcqRel);
        }
    }
}
