//! The range lock: writers of disjoint ranges run side by side, in the order of arrival elsewhere.
//!
//! A [`RangeLock`] is a list, in the order of arrival, of the *claims* that are held or waiting. A
//! claim names up to two ranges, which it gets together (moving a mapping takes its source and its
//! destination). Protocol, each step under the list's spin lock:
//!
//! - *arrive*: count the claims in the list that conflict, append the claim, note the count as its
//!   blockers. Zero blockers: it is held. Otherwise its CPU watches the count, outside the spin
//!   lock, on a line that only releases write;
//! - *release*: unlink the claim, and take one off the count of each later claim that conflicts.
//!
//! So a claim waits for exactly the earlier claims that conflict with it, held or waiting: nobody
//! overtakes into a range that someone waits for, and each waiter is served when the claims that
//! were there before it are gone. Waiting is acyclic, because it goes by the order of arrival only.
//!
//! Nothing is allocated: the list links slots that belong to the CPUs ([`ClaimSlots`], once for all
//! locks of a subsystem), by number. A CPU has one: it holds or waits for one claim at a time.

use super::atomic::{AtomicU32, AtomicU64, Ordering};
use super::mutant::{Mutant, lost};
use super::order::{self, ClaimQueue, Mark, RangeClaim};
use super::percpu::{Local, PerCpu};
use super::spin::SpinLock;
use super::wait::{Wait, until};
use crate::addr::VirtRange;
use crate::machine::CpuId;
use core::fmt;

/// The claims of all CPUs, for all range locks of one subsystem.
pub type ClaimSlots = PerCpu<ClaimSlot>;

/// Room for one claim.
///
/// *Invariant (slot and list):* a slot whose `state` is not `FREE` is in one lock's list, and but
/// for the state only whoever has that list's spin lock reads or writes it; a free one belongs to
/// its CPU.
#[derive(Debug, Default)]
pub struct ClaimSlot {
    /// [`FREE`], or [`HELD`] plus the number of blockers.
    state: AtomicU32,
    earlier: AtomicU32,
    later: AtomicU32,
    /// Start and end of the two ranges.
    bounds: [AtomicU64; 4],
}

/// The slot holds no claim.
const FREE: u32 = 0;
/// The claim has no blocker.
const HELD: u32 = 1;

/// Names a slot: 0 is none, else 1 + the number of its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Name(u32);

impl Name {
    const NONE: Self = Self(0);

    fn new(cpu: CpuId) -> Self {
        Self(1 + u32::from(cpu.0))
    }

    fn slot(self, slots: &ClaimSlots) -> Option<&ClaimSlot> {
        Some(slots.remote(CpuId(self.0.checked_sub(1)? as u16)))
    }
}

impl ClaimSlot {
    // All relaxed: a slot passes between CPUs under the spin lock, which orders it.

    fn ranges(&self) -> [VirtRange; 2] {
        let [a, b, c, d] = &self.bounds;
        let range = |start: &AtomicU64, end: &AtomicU64| {
            VirtRange::new(start.load(Ordering::Relaxed), end.load(Ordering::Relaxed))
        };
        [range(a, b), range(c, d)]
    }

    fn set_ranges(&self, [first, second]: [VirtRange; 2]) {
        let values = [first.start, first.end, second.start, second.end];
        for (bound, value) in self.bounds.iter().zip(values) {
            bound.store(value, Ordering::Relaxed);
        }
    }

    fn conflicts(&self, with: [VirtRange; 2]) -> bool {
        !lost(Mutant::RangeConflict)
            && self
                .ranges()
                .iter()
                .any(|&mine| with.iter().any(|&other| !mine.intersect(other).is_empty()))
    }
}

/// The claims of one lock, in the order of arrival.
#[derive(Debug)]
struct Queue {
    first: Name,
    last: Name,
}

impl Queue {
    fn after(mut name: Name, slots: &ClaimSlots) -> impl Iterator<Item = &ClaimSlot> {
        core::iter::from_fn(move || {
            let slot = name.slot(slots)?;
            name = Name(slot.later.load(Ordering::Relaxed));
            Some(slot)
        })
    }

    fn append(&mut self, name: Name, slot: &ClaimSlot, slots: &ClaimSlots) {
        slot.earlier.store(self.last.0, Ordering::Relaxed);
        slot.later.store(Name::NONE.0, Ordering::Relaxed);
        match self.last.slot(slots) {
            Some(last) => last.later.store(name.0, Ordering::Relaxed),
            None => self.first = name,
        }
        self.last = name;
    }

    fn unlink(&mut self, slot: &ClaimSlot, slots: &ClaimSlots) {
        let earlier = Name(slot.earlier.load(Ordering::Relaxed));
        let later = Name(slot.later.load(Ordering::Relaxed));
        match earlier.slot(slots) {
            Some(before) => before.later.store(later.0, Ordering::Relaxed),
            None => self.first = later,
        }
        match later.slot(slots) {
            Some(behind) => behind.earlier.store(earlier.0, Ordering::Relaxed),
            None => self.last = earlier,
        }
    }
}

/// A lock of address ranges, first come, first served. One per address space.
#[derive(Debug)]
pub struct RangeLock {
    queue: SpinLock<Queue, ClaimQueue>,
}

impl RangeLock {
    /// A lock that nobody holds.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { queue: SpinLock::ordered(Queue { first: Name::NONE, last: Name::NONE }) }
    }

    /// A lock that nobody holds.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { queue: SpinLock::ordered(Queue { first: Name::NONE, last: Name::NONE }) }
    }

    /// Takes both `ranges` (either may be empty) together, waiting as `wait` does, here and when
    /// the guard is dropped. All calls of one lock give the same `slots`.
    ///
    /// # Panics
    /// When the CPU has a claim already, in whichever lock: a mistake in the caller. In builds with debug assertions, also
    /// when the CPU holds what it must not, or is in a section; see [`order`].
    pub fn acquire<'a>(
        &'a self,
        slots: &'a ClaimSlots,
        local: &'a Local,
        ranges: [VirtRange; 2],
        wait: &'a dyn Wait,
    ) -> RangeGuard<'a> {
        order::before::<RangeClaim>(wait);
        self.acquire_leaving(slots, local, ranges, wait, || {})
    }

    /// As [`Self::acquire`]; runs `leave` once, with the place in the queue already had, if it has to
    /// wait: for what must not be kept up meanwhile.
    ///
    /// # Panics
    /// As [`Self::acquire`].
    #[inline]
    pub fn acquire_leaving<'a>(
        &'a self,
        slots: &'a ClaimSlots,
        local: &'a Local,
        ranges: [VirtRange; 2],
        wait: &'a dyn Wait,
        leave: impl FnOnce(),
    ) -> RangeGuard<'a> {
        let claim = self.arrive(slots, local, ranges, wait);
        if !claim.held() {
            leave();
            order::before::<RangeClaim>(wait);
            claim.await_blockers();
        }
        claim.marked()
    }

    /// Takes both `ranges` if no claim, held or waiting, conflicts; otherwise as [`Self::acquire`].
    ///
    /// # Panics
    /// As [`Self::acquire`].
    pub fn try_acquire<'a>(
        &'a self,
        slots: &'a ClaimSlots,
        local: &'a Local,
        ranges: [VirtRange; 2],
        wait: &'a dyn Wait,
    ) -> Option<RangeGuard<'a>> {
        // Arrived and blocked, the claim leaves again: nobody can have waited for it for longer
        // than for those that block it.
        let claim = self.arrive(slots, local, ranges, wait);
        claim.held().then(|| claim.marked())
    }

    /// Queues a claim, which is not held before [`RangeGuard::held`] says so.
    fn arrive<'a>(
        &'a self,
        slots: &'a ClaimSlots,
        local: &'a Local,
        ranges: [VirtRange; 2],
        wait: &'a dyn Wait,
    ) -> RangeGuard<'a> {
        let slot = slots.get(local);
        assert!(slot.state.load(Ordering::Relaxed) == FREE, "a CPU holds one claim at a time");
        slot.set_ranges(ranges);
        let name = Name::new(local.id());
        let mut queue = self.queue.lock(wait);
        let blockers = Queue::after(queue.first, slots).filter(|s| s.conflicts(ranges)).count();
        slot.state.store(HELD + blockers as u32, Ordering::Relaxed);
        queue.append(name, slot, slots);
        RangeGuard { lock: self, slots, slot, wait, mark: Mark::none() }
    }
}

impl Default for RangeLock {
    fn default() -> Self {
        Self::new()
    }
}

/// A held claim. Dropping it lets the later ones in; it cannot leave the CPU that took it.
#[must_use = "the ranges are free again when the guard is dropped"]
pub struct RangeGuard<'a> {
    lock: &'a RangeLock,
    slots: &'a ClaimSlots,
    slot: &'a ClaimSlot,
    // Not `Sync`, so the guard is not `Send`.
    wait: &'a dyn Wait,
    mark: Mark<'a>,
}

impl RangeGuard<'_> {
    /// The claim, held from now on.
    #[inline(always)]
    fn marked(mut self) -> Self {
        self.mark = order::hold::<RangeClaim>(self.wait);
        self
    }

    /// The two ranges that the claim named; either may be empty.
    #[inline]
    pub fn ranges(&self) -> [VirtRange; 2] {
        self.slot.ranges()
    }

    /// Whether all of `range` lies in one of the claim's ranges.
    #[inline]
    pub fn covers(&self, range: VirtRange) -> bool {
        range.is_empty() || self.ranges().iter().any(|own| own.covers(range))
    }

    #[cold]
    #[inline(never)]
    fn await_blockers(&self) {
        until(self.wait, || self.held());
    }

    fn held(&self) -> bool {
        // Acquire meets the Release of the last blocker: its changes are seen.
        self.slot.state.load(Ordering::Acquire) == HELD
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.lock.queue.lock(self.wait);
        let later = Name(self.slot.later.load(Ordering::Relaxed));
        queue.unlink(self.slot, self.slots);
        if later != Name::NONE {
            let ranges = self.slot.ranges();
            for waiter in Queue::after(later, self.slots).filter(|s| s.conflicts(ranges)) {
                waiter.state.fetch_sub(1, Ordering::Release);
            }
        }
        self.slot.state.store(FREE, Ordering::Relaxed);
    }
}

impl fmt::Debug for RangeGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RangeGuard({:?}, held: {})", self.ranges(), self.held())
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
