//! The range lock: writers of disjoint ranges run in parallel; conflicting ones are served in the order of arrival, except that
//! parked ones may be overtaken.
//!
//! A [`RangeLock`] is a list of the *claims* that are held or waiting. A claim names up to two ranges,
//! which it gets together (moving a mapping takes its source and its destination), *exclusive* or *shared*.
//! Two claims conflict where they overlap, unless both are shared. The *blockers* of a claim are the
//! claims before it in the list that conflict with it, and it is held once it has none. Protocol, the first
//! and the last step under the list's spin lock:
//!
//! - *arrive*: append the claim, and count its blockers. Zero blockers: it is held. Otherwise its CPU
//!   watches the count, on a line that is written only by releases and by those that overtake it;
//! - *park*: after polling for some time the CPU marks its claim as parked and yields its core. When it runs
//!   again, it clears the mark. A claim is held when it has no blocker *and* is not marked: so its CPU, by
//!   one step on one word, either has the claim or has been overtaken;
//! - *overtake*: a claim that arrives goes through the conflicting ones before it from the last to the
//!   first, and takes its place before each that is marked as parked, adding itself to that claim's count.
//!   It stops at the first that may not be overtaken;
//! - *release*: unlink the claim, and take one off the count of each later claim that conflicts. Those that
//!   now have no blocker and are parked are woken, after the spin lock is free.
//!
//! So running CPUs are served in the order of arrival: a claim waits for exactly the earlier ones that
//! conflict with it, held or waiting. A parked CPU does not delay the others while it wakes
//! up: a hand-over to it takes a wake-up, which is longer than most claims are held, and where CPUs are
//! virtual or share cores it takes until the host runs it.
//!
//! *Bound.* A claim may be overtaken in its CPU's first [`YIELDING_PARKS`] parkings, and in these at most
//! [`MOST_OVERTAKEN`] times; from then on it is served before every later claim. So it waits for the
//! conflicting claims that were there when it arrived, and for at most [`MOST_OVERTAKEN`] later ones; where
//! claims are held for longer than a CPU takes to wake up, which then sees each release, for about
//! [`YIELDING_PARKS`] later ones.
//!
//! Waiting is acyclic: it follows the positions in the list, and a claim that takes a position before another
//! waits for none that the other did not wait for.
//!
//! No wake-up is lost: mark and count are one word, so a release either sees the mark and wakes, or comes
//! first, and the CPU sees zero blockers as it sets the mark, and does not park.
//!
//! Nothing is allocated: the list links slots that belong to the CPUs ([`ClaimSlots`], once for all
//! locks of a subsystem), by number. A CPU has one: it holds or waits for one claim at a time.

use super::atomic::{AtomicU32, AtomicU64, Ordering};
use super::mutant::{Mutant, lost};
use super::order::{self, ClaimQueue, Mark, RangeClaim};
use super::percpu::{Local, PerCpu};
use super::spin::{SpinGuard, SpinLock};
use super::wait::{LOOKS_BEFORE_PARKING, Spin, Wait};
use crate::addr::VirtRange;
use crate::machine::{CpuId, MAX_CPUS};
use core::fmt;

/// How many later claims may be served before one that waits. Many, since a CPU that shares its core may take
/// milliseconds to wake up, and others run many operations in that time; few in models and tests, so that they reach it.
pub const MOST_OVERTAKEN: u32 = if cfg!(any(loom, shuttle)) {
    1
} else if cfg!(test) {
    6
} else {
    1024
};

/// In how many of its parkings a CPU lets its claim be overtaken.
pub const YIELDING_PARKS: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 4 };

/// The claims of all CPUs, for all range locks of one subsystem.
pub type ClaimSlots = PerCpu<ClaimSlot>;

/// The slot of one claim.
///
/// *Invariant (slot and list):* a slot whose `state` is not `FREE` is in one lock's list, and but
/// for the state only the holder of that list's spin lock reads or writes it; a free one belongs to
/// its CPU.
#[derive(Debug, Default)]
pub struct ClaimSlot {
    /// [`FREE`], or [`HELD`] plus the number of blockers, with [`PARKED`], and perhaps [`FIRM`], while its
    /// CPU is.
    state: AtomicU32,
    /// How often it was overtaken.
    overtaken: AtomicU32,
    earlier: AtomicU32,
    later: AtomicU32,
    /// Start and end of the two ranges.
    bounds: [AtomicU64; 4],
    /// Whether the claim is shared: 1 or 0.
    shared: AtomicU32,
}

/// What a claim asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    ranges: [VirtRange; 2],
    shared: bool,
}

impl Wanted {
    /// `range`, together with other shared claims.
    #[inline(always)]
    pub const fn shared(range: VirtRange) -> Self {
        Self { ranges: [range, VirtRange { start: 0, end: 0 }], shared: true }
    }

    #[inline(always)]
    fn conflicts(self, with: Self) -> bool {
        let overlap = |mine: VirtRange, other| !mine.intersect(other).is_empty();
        let excluded = !(self.shared && with.shared);
        !lost(Mutant::RangeConflict)
            && excluded
            && self.ranges.iter().any(|&mine| with.ranges.iter().any(|&other| overlap(mine, other)))
    }
}

/// Either range may be empty. The claim is exclusive.
impl From<[VirtRange; 2]> for Wanted {
    #[inline(always)]
    fn from(ranges: [VirtRange; 2]) -> Self {
        Self { ranges, shared: false }
    }
}

/// The slot holds no claim.
const FREE: u32 = 0;
/// The claim has no blocker.
const HELD: u32 = 1;
/// The claim's CPU gave its core away, and must be woken.
const PARKED: u32 = 1 << 31;
/// The claim, parked, is not to be overtaken.
const FIRM: u32 = 1 << 30;

/// Names a slot: 0 is none, else 1 + the number of its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Name(u32);

impl Name {
    const NONE: Self = Self(0);

    fn new(cpu: CpuId) -> Self {
        Self(1 + u32::from(cpu.0))
    }

    fn cpu(self) -> Option<CpuId> {
        Some(CpuId(self.0.checked_sub(1)? as u16))
    }

    fn slot(self, slots: &ClaimSlots) -> Option<&ClaimSlot> {
        Some(slots.remote(self.cpu()?))
    }
}

impl ClaimSlot {
    // All relaxed: a slot passes between CPUs under the spin lock, which orders it.

    fn wanted(&self) -> Wanted {
        let [a, b, c, d] = &self.bounds;
        let range = |start: &AtomicU64, end: &AtomicU64| {
            VirtRange::new(start.load(Ordering::Relaxed), end.load(Ordering::Relaxed))
        };
        let shared = self.shared.load(Ordering::Relaxed) != 0;
        Wanted { ranges: [range(a, b), range(c, d)], shared }
    }

    fn set_wanted(&self, Wanted { ranges: [first, second], shared }: Wanted) {
        let values = [first.start, first.end, second.start, second.end];
        for (bound, value) in self.bounds.iter().zip(values) {
            bound.store(value, Ordering::Relaxed);
        }
        self.shared.store(u32::from(shared), Ordering::Relaxed);
    }

    fn conflicts(&self, with: Wanted) -> bool {
        self.wanted().conflicts(with)
    }

    /// Lets a later claim that conflicts go first, if that is allowed. Under the list's spin lock.
    fn let_pass(&self) -> bool {
        let overtaken = self.overtaken.load(Ordering::Relaxed);
        let state = self.state.load(Ordering::Relaxed);
        let parked = state & (PARKED | FIRM) == PARKED || lost(Mutant::OvertakesParked);
        let passed = parked
            && overtaken < MOST_OVERTAKEN
            // It fails if the CPU has just taken the mark off.
            && self
                .state
                .compare_exchange(state, state + 1, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        self.overtaken.store(overtaken + u32::from(passed), Ordering::Relaxed);
        passed
    }
}

/// The claims of one lock: the earlier one in the list is served first.
#[derive(Debug)]
struct Queue {
    first: Name,
    last: Name,
}

impl Queue {
    /// The claims from `name` on, by `next`.
    fn walk(
        mut name: Name,
        slots: &ClaimSlots,
        next: impl Fn(&ClaimSlot) -> &AtomicU32,
    ) -> impl Iterator<Item = (Name, &ClaimSlot)> {
        core::iter::from_fn(move || {
            let here = (name, name.slot(slots)?);
            name = Name(next(here.1).load(Ordering::Relaxed));
            Some(here)
        })
    }

    /// The claims from `name` to the last.
    fn from(name: Name, slots: &ClaimSlots) -> impl Iterator<Item = (Name, &ClaimSlot)> {
        Self::walk(name, slots, |slot| &slot.later)
    }

    /// All claims, from the last to the first.
    fn backwards<'s>(
        &self,
        slots: &'s ClaimSlots,
    ) -> impl Iterator<Item = (Name, &'s ClaimSlot)> + use<'s> {
        Self::walk(self.last, slots, |slot| &slot.earlier)
    }

    /// Where a claim that arrives stands: before that of the name, or at the end; and how many block it. It
    /// overtakes those that it stands before.
    #[inline(never)]
    fn place(&mut self, wanted: Wanted, slots: &ClaimSlots) -> (Name, u32) {
        let (mut later, mut blockers) = (Name::NONE, 0);
        for (name, other) in self.backwards(slots).filter(|(_, other)| other.conflicts(wanted)) {
            if blockers == 0 && other.let_pass() {
                later = name;
            } else {
                blockers += 1;
            }
        }
        (later, blockers)
    }

    /// Links a claim in before that of `later`, which is none for the end of the list.
    fn insert(&mut self, name: Name, slot: &ClaimSlot, later: Name, slots: &ClaimSlots) {
        let earlier = match later.slot(slots) {
            Some(behind) => Name(behind.earlier.swap(name.0, Ordering::Relaxed)),
            None => core::mem::replace(&mut self.last, name),
        };
        slot.earlier.store(earlier.0, Ordering::Relaxed);
        slot.later.store(later.0, Ordering::Relaxed);
        match earlier.slot(slots) {
            Some(before) => before.later.store(name.0, Ordering::Relaxed),
            None => self.first = name,
        }
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

/// CPUs that are to be woken.
struct Sleepers([u64; MAX_CPUS / 64]);

impl Sleepers {
    const NONE: Self = Self([0; MAX_CPUS / 64]);

    fn add(&mut self, cpu: CpuId) {
        self.0[cpu.index() / 64] |= 1 << (cpu.index() % 64);
    }

    #[cold]
    #[inline(never)]
    fn wake(self, wait: &dyn Wait) {
        if lost(Mutant::ReleaseWakes) {
            return;
        }
        for (at, mut word) in self.0.into_iter().enumerate() {
            while word != 0 {
                wait.wake(CpuId((at * 64) as u16 + word.trailing_zeros() as u16));
                word &= word - 1;
            }
        }
    }
}

/// A lock of address ranges; see the module for the order of service. One per address space.
#[derive(Debug)]
pub struct RangeLock {
    queue: SpinLock<Queue, ClaimQueue>,
}

impl RangeLock {
    /// A lock without claims.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { queue: SpinLock::ordered(Queue { first: Name::NONE, last: Name::NONE }) }
    }

    /// A lock without claims.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { queue: SpinLock::ordered(Queue { first: Name::NONE, last: Name::NONE }) }
    }

    /// Takes what is `wanted` (two ranges are taken together), waiting as `wait` does, here and when
    /// the guard is dropped. All calls of one lock give the same `slots`.
    ///
    /// # Panics
    /// When the CPU has a claim already, in whichever lock: a mistake in the caller. In builds with debug assertions, also
    /// when the CPU holds what it must not, or is in a section; see [`order`].
    pub fn acquire<'a>(
        &'a self,
        slots: &'a ClaimSlots,
        local: &'a Local,
        wanted: impl Into<Wanted>,
        wait: &'a dyn Wait,
    ) -> RangeGuard<'a> {
        order::before::<RangeClaim>(wait);
        self.acquire_leaving(slots, local, wanted, wait, || {})
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
        wanted: impl Into<Wanted>,
        wait: &'a dyn Wait,
        leave: impl FnOnce(),
    ) -> RangeGuard<'a> {
        let claim = self.arrive(slots, local, wanted, wait);
        if !claim.held() {
            leave();
            order::before::<RangeClaim>(wait);
            claim.await_blockers();
        }
        claim.marked()
    }

    /// Takes what is `wanted` if no claim, held or waiting, conflicts; otherwise as [`Self::acquire`].
    ///
    /// # Panics
    /// As [`Self::acquire`].
    #[cfg(any(test, loom, shuttle))]
    pub fn try_acquire<'a>(
        &'a self,
        slots: &'a ClaimSlots,
        local: &'a Local,
        wanted: impl Into<Wanted>,
        wait: &'a dyn Wait,
    ) -> Option<RangeGuard<'a>> {
        // A claim that is blocked is withdrawn: a later claim cannot have waited for it longer
        // than for those that block it.
        let claim = self.arrive(slots, local, wanted, wait);
        claim.held().then(|| claim.marked())
    }

    /// Whether there is a claim, held or waiting, on a part of `range`. The calling CPU serves no flush requests meanwhile.
    pub fn is_claimed(&self, slots: &ClaimSlots, range: VirtRange) -> bool {
        let queue = self.queue.lock(&Spin);
        let alone = Wanted::from([range, VirtRange { start: 0, end: 0 }]);
        queue.backwards(slots).any(|(_, claim)| claim.conflicts(alone))
    }

    /// Queues a claim, which is not held before [`RangeGuard::held`] returns true.
    fn arrive<'a>(
        &'a self,
        slots: &'a ClaimSlots,
        local: &'a Local,
        wanted: impl Into<Wanted>,
        wait: &'a dyn Wait,
    ) -> RangeGuard<'a> {
        let (slot, wanted) = (slots.get(local), wanted.into());
        assert!(slot.state.load(Ordering::Relaxed) == FREE, "a CPU holds one claim at a time");
        slot.set_wanted(wanted);
        slot.overtaken.store(0, Ordering::Relaxed);
        let mut queue = self.queue.lock(wait);
        let (later, blockers) =
            if queue.last == Name::NONE { (Name::NONE, 0) } else { queue.place(wanted, slots) };
        slot.state.store(HELD + blockers, Ordering::Relaxed);
        queue.insert(Name::new(local.id()), slot, later, slots);
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
        self.slot.wanted().ranges
    }

    /// Whether all of `range` lies in one of the claim's ranges.
    #[cfg(any(test, loom, shuttle))]
    #[inline]
    pub fn covers(&self, range: VirtRange) -> bool {
        range.is_empty() || self.ranges().iter().any(|own| own.covers(range))
    }

    #[cold]
    #[inline(never)]
    fn await_blockers(&self) {
        let (mut looks, mut parks) = (0, 0);
        while !self.held() {
            if looks < LOOKS_BEFORE_PARKING {
                self.wait.wait(looks);
                looks += 1;
            } else {
                self.park(if parks < YIELDING_PARKS { PARKED } else { PARKED | FIRM });
                (looks, parks) = (0, parks + 1);
            }
        }
    }

    /// Gives the core away until the last blocker has gone, or for less, with the claim marked meanwhile.
    fn park(&self, mark: u32) {
        let state = &self.slot.state;
        if state.fetch_or(mark, Ordering::Relaxed) != HELD {
            self.wait.park();
        }
        // What is left is the number of blockers.
        state.fetch_and(!mark, Ordering::Relaxed);
    }

    /// The rest of a release where there are later claims: this one is no blocker of theirs any more.
    #[inline(never)]
    fn unblock(&self, later: Name, queue: SpinGuard<'_, Queue, ClaimQueue>) {
        let wanted = self.slot.wanted();
        let mut sleepers = None;
        for (name, waiter) in Queue::from(later, self.slots).filter(|(_, it)| it.conflicts(wanted))
        {
            let before = waiter.state.fetch_sub(1, Ordering::Release);
            if before & !FIRM == PARKED | (HELD + 1)
                && let Some(cpu) = name.cpu()
            {
                sleepers.get_or_insert(Sleepers::NONE).add(cpu);
            }
        }
        self.slot.state.store(FREE, Ordering::Relaxed);
        drop(queue);
        if let Some(sleepers) = sleepers {
            sleepers.wake(self.wait);
        }
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
        if later == Name::NONE {
            self.slot.state.store(FREE, Ordering::Relaxed);
        } else {
            self.unblock(later, queue);
        }
    }
}

impl fmt::Debug for RangeGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RangeGuard({:?}, held: {})", self.ranges(), self.held())
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
