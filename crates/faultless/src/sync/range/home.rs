//! Where a CPU's claims are, so that other CPUs need not read its slot.
//!
//! A CPU writes its slot with each claim, so another CPU that reads the slot takes a cache miss,
//! and causes one. Most CPUs make their claims in a few places: where they map, and where their
//! heap is. So each CPU publishes, on a line of its own that seldom changes, up to two ranges that
//! cover its claims: its *home*. Other CPUs read its slot only if their own claim overlaps the
//! home. Before a CPU makes a claim that its home does not cover, it changes the home.
//!
//! Nor need a CPU read the homes of all others for each claim. The lock counts the changes by which
//! a home covers more, and a CPU keeps, with the count that it found, the CPUs whose homes overlap
//! its own: those that are *near* (`near.rs`). While the count is the same, it looks at no others.
//!
//! Why no claim is missed: the home covers a claim, and the change is counted, before the full
//! fence of the claim's try, as the slot has it before that fence. The count and the homes of
//! others are read after it. So of two claims that conflict, at least one finds the home and the
//! slot of the other. A CPU changes its home only while its slot is free, by Release stores. So a
//! CPU that finds, by Acquire loads, that a home no longer covers a range sees all that was done
//! under the claims on that range that the home covered before.

use super::Wanted;
use crate::addr::VirtRange;
use crate::sync::atomic::{AtomicU64, Ordering, load_beside};
use crate::sync::mutant::{Mutant, lost};
use crate::table::format::USER_END;

/// The binary logarithm of the bytes of a unit. Units are so large that the number of each fits in
/// 32 bits; in models of loom, a byte.
const UNIT: u32 = if cfg!(loom) { 0 } else { USER_END.next_power_of_two().ilog2() - 32 };
/// In units: how far from a part of the home a claim may be to extend that part.
const NEAR: u64 = if cfg!(loom) { 0 } else { 1 << 30 >> UNIT };
/// In units: a part is not extended to as many. A part that is as long nevertheless, since one
/// claim was, or since it was rounded, is emptied when the claim is released.
const LONG: u64 = if cfg!(loom) { 1 << 20 } else { 1 << 36 >> UNIT };
/// After how many claims, times the number of CPUs, a home at which other CPUs look is emptied, and
/// made of the next claim alone: a power of two. So of all claims one in so many does this, which
/// makes every other CPU look for the CPUs that are near.
const AFRESH: u64 = 1024;

/// Where the claims of one CPU are.
#[derive(Debug)]
pub(super) struct Home {
    /// The address of the lock.
    lock: AtomicU64,
    parts: [AtomicU64; 2],
}

impl Default for Home {
    fn default() -> Self {
        let part = || AtomicU64::new(Part::EMPTY.pack());
        Self { lock: AtomicU64::new(0), parts: [part(), part()] }
    }
}

/// A range of units: the first and the last. It is empty if the first is above the last.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Part {
    first: u64,
    last: u64,
}

impl Part {
    const EMPTY: Self = Self { first: 1, last: 0 };

    /// The units of `range`, which is not empty.
    #[inline(always)]
    fn of(range: VirtRange) -> Self {
        let unit = |addr: u64| (addr >> UNIT).min(u32::MAX.into());
        Self { first: unit(range.start), last: unit(range.end - 1) }
    }

    #[inline(always)]
    const fn unpack(word: u64) -> Self {
        Self { first: word >> 32, last: word & u32::MAX as u64 }
    }

    const fn pack(self) -> u64 {
        self.first << 32 | self.last
    }

    const fn is_empty(self) -> bool {
        self.first > self.last
    }

    #[inline(always)]
    const fn covers(self, other: Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }

    #[inline(always)]
    fn overlaps(self, other: Self) -> bool {
        self.first.max(other.first) <= self.last.min(other.last)
    }

    fn hull(self, other: Self) -> Self {
        Self { first: self.first.min(other.first), last: self.last.max(other.last) }
    }

    /// Extended to cover `other`, and then to the next multiple of a power of two that is at least
    /// its length. So a CPU whose claims follow each other changes its home seldom. If CPUs divide
    /// one mapping at round addresses, their homes end there, too.
    fn extended(self, other: Self) -> Self {
        let hull = self.hull(other);
        let step = (hull.last - hull.first + 1).next_power_of_two();
        Self {
            first: if other.first < self.first { hull.first & !(step - 1) } else { hull.first },
            last: if other.last > self.last { hull.last | (step - 1) } else { hull.last },
        }
    }

    /// Whether it may be extended to cover `other`.
    fn may_take(self, other: Self) -> bool {
        let near = self.first <= other.last.saturating_add(NEAR)
            && other.first <= self.last.saturating_add(NEAR);
        !self.is_empty() && near && !self.hull(other).is_long()
    }

    const fn is_long(self) -> bool {
        !self.is_empty() && self.last - self.first >= LONG
    }
}

/// The ranges of a claim that are not empty.
#[inline(always)]
fn ranges(wanted: Wanted) -> impl Iterator<Item = Part> {
    wanted.ranges.into_iter().filter(|range| !range.is_empty()).map(Part::of)
}

impl Home {
    /// A part of the caller's own home.
    #[inline(always)]
    fn part(&self, at: usize) -> Part {
        Part::unpack(self.parts[at].load(Ordering::Relaxed))
    }

    fn set(&self, at: usize, part: Part) {
        self.parts[at].store(part.pack(), Ordering::Release);
    }

    /// Whether to make the home afresh for claim number `number` of one CPU of `cpus`, if others
    /// look at it.
    #[inline(always)]
    pub(super) fn is_old(number: u64, cpus: usize) -> bool {
        number.is_multiple_of(AFRESH * cpus.next_power_of_two() as u64)
    }

    /// Makes it cover claim number `number`, of the lock at `lock`, which is published next, and
    /// nothing else if it is made `afresh`. Returns whether it has changed, and the parts that
    /// cover the claim, a bit for each. Only the CPU itself calls it, and has no claim.
    #[inline(always)]
    pub(super) fn cover(
        &self,
        lock: u64,
        wanted: Wanted,
        number: u64,
        afresh: bool,
    ) -> (bool, u64) {
        let here = self.lock.load(Ordering::Relaxed) == lock && !afresh;
        if let Some(parts) = self.covering(wanted).filter(|_| here) {
            return (false, parts);
        }
        if lost(Mutant::HomeCovers) {
            return (false, 0);
        }
        self.change(lock, wanted, here, number);
        (true, self.covering(wanted).unwrap_or(0))
    }

    /// The parts that cover `wanted`, a bit for each; none if a range is not covered.
    #[inline(always)]
    fn covering(&self, wanted: Wanted) -> Option<u64> {
        let bit = |range| (0..2).find(|&at| self.part(at).covers(range)).map(|at| 1 << at);
        ranges(wanted).try_fold(0, |parts, range| Some(parts | bit(range)?))
    }

    /// Empties `parts`, a bit for each. The CPU has no claim. Nothing is written of what is empty:
    /// other CPUs read the line.
    #[cold]
    pub(super) fn empty(&self, parts: u64) {
        for at in (0..2).filter(|at| parts & 1 << at != 0) {
            if !self.part(at).is_empty() {
                self.set(at, Part::EMPTY);
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn change(&self, lock: u64, wanted: Wanted, here: bool, number: u64) {
        let mut parts = [0, 1].map(|at| if here { self.part(at) } else { Part::EMPTY });
        // The part that covers the first of two ranges must go on to cover it.
        let mut taken = None;
        for range in ranges(wanted) {
            let find = |fits: &dyn Fn(Part) -> bool| parts.iter().position(|own| fits(*own));
            let at = if let Some(at) = find(&|own| own.covers(range)) {
                at
            } else if let Some(at) = find(&|own| own.may_take(range)) {
                parts[at] = parts[at].extended(range);
                at
            } else {
                let other = || taken.map_or(number as usize % 2, |taken| 1 - taken);
                let at = find(&|own| own.is_empty()).unwrap_or_else(other);
                parts[at] = range;
                at
            };
            taken = Some(at);
        }
        for (at, part) in parts.into_iter().enumerate() {
            if self.part(at) != part {
                self.set(at, part);
            }
        }
        if !here {
            // Last: a CPU that reads this value reads the new parts.
            self.lock.store(lock, Ordering::Release);
        }
    }

    /// Empties long parts, after the claim was released. Claims as long are rare, and other CPUs
    /// would read the slot for nothing.
    #[inline(always)]
    pub(super) fn shrink(&self) {
        for at in 0..2 {
            if self.part(at).is_long() {
                self.set(at, Part::EMPTY);
            }
        }
    }

    /// Whether it overlaps the home `other`, which covers what is wanted of the lock at `lock`. The
    /// CPU of the other home calls it.
    pub(super) fn overlaps(&self, lock: u64, other: &Self) -> bool {
        let own = [other.part(0), other.part(1)].into_iter();
        self.meets(lock, own.filter(|part| !part.is_empty()))
    }

    /// Whether a claim of the lock at `lock` that conflicts with `wanted` may be in the slot. Other
    /// CPUs call it.
    #[inline(always)]
    pub(super) fn may_have(&self, lock: u64, wanted: Wanted) -> bool {
        self.meets(lock, ranges(wanted))
    }

    #[inline(always)]
    fn meets(&self, lock: u64, mut ranges: impl Iterator<Item = Part>) -> bool {
        self.lock.load(Ordering::Acquire) == lock && {
            let part = |at: usize| Part::unpack(load_beside(&self.parts[at], Ordering::Acquire));
            let parts = [part(0), part(1)];
            ranges.any(|range| parts.iter().any(|part| part.overlaps(range)))
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn claim(ranges: [(u64, u64); 2]) -> Wanted {
        Wanted::from(ranges.map(|(start, end)| VirtRange::new(start, end)))
    }

    fn one(start: u64, end: u64) -> Wanted {
        claim([(start, end), (0, 0)])
    }

    #[test]
    fn a_home_covers_every_claim_and_stays_where_claims_stay() {
        let home = Home::default();
        home.cover(8, one(100 * GIB, 101 * GIB), 1, false);
        assert!(home.may_have(8, one(100 * GIB, 100 * GIB + 1)));
        assert!(!home.may_have(16, one(100 * GIB, 100 * GIB + 1)), "another lock");
        assert!(!home.may_have(8, one(101 * GIB, 102 * GIB)));
        // Near: it grows. Far: the other part. Farther: one of the two.
        home.cover(8, one(101 * GIB, 102 * GIB), 2, false);
        home.cover(8, one(500 * GIB, 501 * GIB), 3, false);
        for at in [100, 101, 500] {
            assert!(home.may_have(8, one(at * GIB, at * GIB + 1)), "{at}");
        }
        home.cover(8, one(900 * GIB, 901 * GIB), 4, false);
        assert!(home.may_have(8, one(900 * GIB, 900 * GIB + 1)));
        home.cover(8, claim([(10 * GIB, 11 * GIB), (700 * GIB, 701 * GIB)]), 5, false);
        for at in [10, 700] {
            assert!(home.may_have(8, one(at * GIB, at * GIB + 1)), "{at}");
        }
        assert!(!home.may_have(8, one(500 * GIB, 501 * GIB)));
    }

    #[test]
    fn claims_in_a_row_change_the_home_seldom_and_keep_to_a_round_part() {
        let home = Home::default();
        let mut changes = 0;
        for at in 0..256 {
            let start = 4 * GIB + at * (4 << 20);
            let before = home.parts[0].load(Ordering::Relaxed);
            home.cover(8, one(start, start + (4 << 20)), 1, false);
            assert!(home.may_have(8, one(start, start + 1)));
            changes += u32::from(home.parts[0].load(Ordering::Relaxed) != before);
        }
        assert_eq!(changes, 9, "the part doubles");
        assert!(
            !home.may_have(8, one(3 * GIB, 4 * GIB)) && !home.may_have(8, one(5 * GIB, 6 * GIB))
        );
    }

    #[test]
    fn both_ranges_of_a_claim_stay_in_it() {
        let home = Home::default();
        home.cover(8, one(10 * GIB, 11 * GIB), 1, false);
        home.cover(8, one(900 * GIB, 901 * GIB), 2, false);
        for (number, first) in [(3, 10), (4, 10), (5, 900), (6, 900)] {
            home.cover(
                8,
                claim([(first * GIB, first * GIB + 1), (400 * GIB, 401 * GIB)]),
                number,
                false,
            );
            for at in [first, 400] {
                assert!(home.may_have(8, one(at * GIB, at * GIB + 1)), "{at} in {number}");
            }
            home.cover(8, claim([(10 * GIB, 11 * GIB), (900 * GIB, 901 * GIB)]), number, false);
        }
    }

    #[test]
    fn a_claim_of_everything_does_not_stay() {
        let home = Home::default();
        home.cover(8, Wanted::from([VirtRange::USER, VirtRange::new(0, 0)]), 1, false);
        assert!(home.may_have(8, one(0, 1)) && home.may_have(8, one(USER_END - 1, USER_END)));
        home.shrink();
        assert!(!home.may_have(8, Wanted::from([VirtRange::USER, VirtRange::new(0, 0)])));
        home.cover(8, one(GIB, 2 * GIB), 2, false);
        home.shrink();
        assert!(home.may_have(8, one(GIB, 2 * GIB)), "a short part remains");
        home.cover(8, one(5 * GIB, 6 * GIB), 1, true);
        assert!(!home.may_have(8, one(GIB, 2 * GIB)), "the parts are reset occasionally");
    }
}
