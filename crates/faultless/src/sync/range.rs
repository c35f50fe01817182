//! The range lock: writers of disjoint ranges run in parallel, and write no common cache line;
//! conflicting ones are served in the order of arrival, except that parked ones may be overtaken.
//!
//! A *claim* names up to two ranges, which it gets together (moving a mapping takes its source and
//! its destination), *exclusive* or *shared*. Two claims conflict where they overlap, unless both
//! are shared. There is no list of claims: each CPU publishes its own in a [slot](ClaimSlot), on a
//! line that other CPUs only read, and reads the slots of the CPUs that use the lock. Protocol:
//!
//! - *try*: the CPU writes its claim into its slot, makes the slot *active*, and issues a full
//!   fence. Then it looks at the other slots. If no claim there is active or waits, and conflicts,
//!   the claim is held: of two claims that are tried at the same time, at least one finds the
//!   other.
//! - *wait*: otherwise the claim takes a ticket, whose number is higher than those before, and the
//!   slot says that it *waits*. Claims that conflict and are active, or wait with a lower ticket,
//!   are before it. It watches the slot of the one with the highest ticket among them, which is
//!   most often the last to go. It looks at the others when that one becomes active, and at those
//!   that are left then once it has gone. Once it finds none before it, it makes its slot active,
//!   and holds the claim.
//! - *park*: after polling for some time the slot says *parked*, and the CPU yields its core. A
//!   parked claim stops no other, and wakes parked CPUs as a release does. When the CPU runs again
//!   it tries, as if it had just arrived. After some parkings it parks *firmly*: it keeps its
//!   ticket, and stops others as if it waited.
//! - *release*: the CPU makes its slot free, and issues a full fence. If CPUs are parked, it wakes
//!   those whose claims conflict with its own, unless another claim stops them, too, and is to be
//!   served before them: that one will wake them in turn. Such a claim is active; or waits or is
//!   firmly parked (before a firmly parked one only with a lower ticket); or is parked with a lower
//!   ticket.
//!
//! Why two claims that conflict are never both held:
//!
//! ```text
//! one CPU                                another CPU
//!   slot: active, or waits (SeqCst RMW)    slot: active, or waits (SeqCst RMW)
//!   ---- full fence ----                   ---- full fence ----
//!   the other slot?                        the other slot?
//! ```
//!
//! A claim is tried before it takes a ticket, so it is in its slot before any claim with a higher
//! ticket looks. Once one that waits has found that a slot has none before it, none can come before
//! it there, and it does not look at that slot again: a claim that is tried there later finds this
//! one waiting. A claim that was parked may have been passed meanwhile, so it begins again with a
//! try, and gets a new ticket.
//!
//! Waiting is acyclic: an active claim is held, or will be held or wait in a moment; all others
//! wait for lower tickets.
//!
//! No wake-up is lost: a CPU parks only if it finds an active claim that conflicts, behind a full
//! fence. So either that claim's release finds it parked, or it finds the release. The try of a
//! claim that then waits is such a claim, too: it looks for parked CPUs. A CPU may be left asleep
//! because another claim is to be served before its own. It is woken when that claim goes, or moves
//! behind it: each step by which a claim moves back in that order (from active to waiting, and from
//! waiting to parked) looks for parked CPUs.
//!
//! *Bound.* A claim waits for those before it when it arrived; and again for those that wait when
//! it wakes up, at most [`YIELDING_PARKS`] times. A parked CPU does not delay the others while it
//! wakes up: a hand-over to it takes a wake-up, which is longer than most claims are held, and
//! where CPUs are virtual or share cores it takes until the host runs it.
//!
//! *Invariant (users):* the lock's set has every CPU whose slot has a claim of it. A CPU enters the
//! set before it first tries, and leaves it when it stops to run the space. So a claim looks at
//! CPUs that use the space, and at no others. Of these it looks only at those that make claims
//! nearby, which it knows from its last claim unless one of them has changed its place; see
//! [home](home).
//!
//! Nothing is allocated: a CPU has one slot for all locks of a subsystem ([`ClaimSlots`]), as it
//! holds or waits for one claim at a time.

mod home;
mod near;

use super::atomic::{AtomicU32, AtomicU64, Ordering, fence, fence_after_rmw};
use super::cpus::{Cpus, OwnCpus};
use super::mutant::{Mutant, lost};
use super::order::{self, Mark, RangeClaim};
use super::percpu::{Local, Padded, PerCpu};
use super::wait::{LOOKS_BEFORE_PARKING, Wait};
use crate::addr::VirtRange;
use crate::machine::CpuId;
use core::fmt;
use home::Home;
use near::Near;

/// In how many of its parkings a CPU lets its claim be overtaken.
pub const YIELDING_PARKS: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 4 };

const NOWHERE: VirtRange = VirtRange { start: 0, end: 0 };

/// The claims of all CPUs, for all range locks of one subsystem.
pub type ClaimSlots = PerCpu<ClaimSlot>;

/// The slot of one CPU's claim, which that CPU alone writes.
///
/// *Invariant (one claim, one number):* `key` and `bounds` change only while `state` says that the
/// slot is free, and `state` has another number afterwards. So who finds the same state before and
/// after it reads them has read one claim.
#[derive(Debug, Default)]
pub struct ClaimSlot {
    /// The number of the claim, and how it stands.
    state: AtomicU64,
    /// Its place among those that wait.
    ticket: AtomicU64,
    /// The address of its lock, with [`SHARED`] and [`TWO`].
    key: AtomicU64,
    /// Start and end of the two ranges.
    bounds: [AtomicU64; 4],
    /// Where the claims of this CPU are. Other CPUs read it before the rest, which is on lines that
    /// change with each claim.
    home: Padded<Home>,
    /// The CPUs to look at.
    near: Padded<Near>,
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
        Self { ranges: [range, NOWHERE], shared: true }
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

// How a claim stands: the low bits of a state. The others are its number.

/// There is none.
const FREE: u64 = 0;
/// It is held, or tried.
const ACTIVE: u64 = 1;
/// It waits with its ticket.
const WAITS: u64 = 2;
/// It waits, its CPU gave the core away, and it stops no other claim.
const PARKED: u64 = 3;
/// It waits with its ticket, and its CPU gave the core away.
const FIRM: u64 = 4;

const STANDING: u64 = 7;
const NUMBER: u64 = STANDING + 1;

// The low bits of a key.

/// The claim is shared.
const SHARED: u64 = 1;
/// The second range is not empty.
const TWO: u64 = 2;
const OF_KEY: u64 = 3;

/// A claim as another CPU finds it.
#[derive(Clone, Copy)]
struct Seen {
    standing: u64,
    ticket: u64,
    wanted: Wanted,
}

impl Seen {
    const fn is_parked(self) -> bool {
        matches!(self.standing, PARKED | FIRM)
    }

    /// In which order claims that conflict are served, if no other comes: those that let themselves
    /// be overtaken come last.
    const fn rank(self) -> (u8, u64) {
        match self.standing {
            ACTIVE => (0, 0),
            PARKED => (2, self.ticket),
            _ => (1, self.ticket),
        }
    }
}

impl ClaimSlot {
    /// What the CPU asks for, of its own slot.
    #[inline]
    fn wanted(&self) -> Wanted {
        self.read(self.key.load(Ordering::Relaxed))
    }

    /// What the claim with this key asks for. Of the CPU's own slot, or between two looks at its
    /// state.
    #[inline]
    fn read(&self, key: u64) -> Wanted {
        let range = |at: usize| {
            let bound = |at: usize| self.bounds[at].load(Ordering::Relaxed);
            VirtRange::new(bound(at), bound(at + 1))
        };
        let second = if key & TWO != 0 { range(2) } else { NOWHERE };
        Wanted { ranges: [range(0), second], shared: key & SHARED != 0 }
    }

    /// Writes a claim of the lock at `lock` into the free slot, one of `slots`. Returns whether the
    /// home has changed.
    #[inline]
    fn write(&self, lock: u64, wanted: Wanted, slots: &ClaimSlots) -> bool {
        let Wanted { ranges: [first, second], shared } = wanted;
        let number = (self.state.load(Ordering::Relaxed) & !STANDING).wrapping_add(NUMBER);
        self.state.store(number | FREE, Ordering::Relaxed);
        let afresh = Home::is_old(number / NUMBER, slots.len()) && self.near.is_any();
        let (changed, parts) = self.home.cover(lock, wanted, number / NUMBER, afresh);
        if let Some(unused) = self.near.uses(parts, number / NUMBER) {
            self.home.empty(unused);
        }
        // Who reads a part of this finds afterwards that the slot was free.
        fence(Ordering::Release);
        let two = !second.is_empty();
        let marks = if shared { SHARED } else { 0 } | if two { TWO } else { 0 };
        self.key.store(lock | marks, Ordering::Relaxed);
        let store = |at: usize, range: VirtRange| {
            self.bounds[at].store(range.start, Ordering::Relaxed);
            self.bounds[at + 1].store(range.end, Ordering::Relaxed);
        };
        store(0, first);
        if two {
            store(2, second);
        }
        changed
    }

    /// The claim of the lock at `lock` that is there. Acquire meets the Release of the last holder:
    /// its changes are seen.
    #[inline]
    fn look(&self, lock: u64) -> Option<Seen> {
        loop {
            let state = self.state.load(Ordering::Acquire);
            if state & STANDING == FREE {
                return None;
            }
            let key = self.key.load(Ordering::Relaxed);
            let wanted = self.read(key);
            let standing = state & STANDING;
            let ticket = if standing == ACTIVE { 0 } else { self.ticket.load(Ordering::Relaxed) };
            fence(Ordering::Acquire);
            if self.state.load(Ordering::Relaxed) == state {
                let seen = Seen { standing, ticket, wanted };
                return (key & !OF_KEY == lock).then_some(seen);
            }
        }
    }
}

/// The CPUs that are parked. On a line of its own, since claims that wait briefly only read it.
#[derive(Debug)]
struct Parked {
    count: AtomicU32,
    cpus: Cpus,
}

impl Parked {
    /// Before the full fence of the step by which the slot of `cpu` says so.
    fn enter(&self, cpu: CpuId) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.cpus.insert(cpu);
    }

    /// After the step by which the slot of `cpu` says something else.
    fn leave(&self, cpu: CpuId) {
        self.cpus.remove(cpu);
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A lock of address ranges; see the module for the order of service. One per address space. Once
/// it was used it does not move: claims know it by its address.
#[derive(Debug)]
pub struct RangeLock {
    /// The CPUs that may have claims.
    users: Cpus,
    /// How often a user changed its home for a claim, or a CPU became a user. That a part of a home
    /// is emptied is not counted: sets of CPUs that are near may have too many.
    changes: Padded<AtomicU64>,
    parked: Padded<Parked>,
    /// The next ticket. On a line of its own, since only claims that conflict write it.
    tickets: Padded<AtomicU64>,
    /// Whether claims look at all users. Models of loom do: they would else try too many orders.
    /// That the CPUs that are near suffice is a model of its own, and holds under shuttle in all of
    /// its checks.
    #[cfg(loom)]
    looks_at_all: bool,
}

impl RangeLock {
    /// A lock without claims.
    pub fn new() -> Self {
        Self {
            users: Cpus::new(),
            changes: Padded(AtomicU64::new(0)),
            parked: Padded(Parked { count: AtomicU32::new(0), cpus: Cpus::new() }),
            tickets: Padded(AtomicU64::new(0)),
            #[cfg(loom)]
            looks_at_all: true,
        }
    }

    /// A lock whose claims look at the CPUs that are near, as they do in all builds but loom's.
    #[cfg(loom)]
    pub fn with_near() -> Self {
        Self { looks_at_all: false, ..Self::new() }
    }

    /// Takes what is `wanted` (two ranges are taken together), waiting as `wait` does, here and
    /// when the guard is dropped. All calls of one lock give the same `slots`.
    ///
    /// # Panics
    /// When the CPU has a claim already, in whichever lock: a mistake in the caller. In builds with
    /// debug assertions, also when the CPU holds what it must not, or is in a section; see
    /// [`order`].
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

    /// As [`Self::acquire`]; runs `leave` once if it has to wait: for what must not be kept up
    /// meanwhile.
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
        let claim = self.write(slots, local, wanted, wait);
        if !claim.tries() {
            claim.take_ticket();
            leave();
            order::before::<RangeClaim>(wait);
            claim.await_turn();
        }
        claim.marked()
    }

    /// Takes what is `wanted` if no claim, held or waiting, conflicts. It does not wait, so it is
    /// allowed in sections and under every lock.
    ///
    /// # Panics
    /// When the CPU has a claim already.
    pub fn try_acquire<'a>(
        &'a self,
        slots: &'a ClaimSlots,
        local: &'a Local,
        wanted: impl Into<Wanted>,
        wait: &'a dyn Wait,
    ) -> Option<RangeGuard<'a>> {
        let claim = self.write(slots, local, wanted, wait);
        claim.tries().then(|| claim.marked())
    }

    /// Whether there is a claim, held or waiting, on a part of `range`, by a CPU that published it
    /// before the caller's last full fence.
    pub fn is_claimed(&self, slots: &ClaimSlots, range: VirtRange) -> bool {
        let alone = Wanted::from([range, NOWHERE]);
        let slots = self.users.iter(slots.len()).map(|cpu| slots.remote(cpu));
        let near = slots.filter(|slot| slot.home.may_have(self.key(), alone));
        let mut claims = near.filter_map(|slot| slot.look(self.key()));
        claims.any(|claim| claim.wanted.conflicts(alone))
    }

    /// The CPU, which has no claim, will make none for some time.
    pub fn leave(&self, cpu: CpuId) {
        self.users.remove(cpu);
    }

    /// What claims of this lock are known by.
    #[inline(always)]
    fn key(&self) -> u64 {
        core::ptr::from_ref(self).addr() as u64
    }

    /// Writes a claim into the CPU's slot, which is free until the claim is
    /// [tried](RangeGuard::tries).
    #[inline]
    fn write<'a>(
        &'a self,
        slots: &'a ClaimSlots,
        local: &'a Local,
        wanted: impl Into<Wanted>,
        wait: &'a dyn Wait,
    ) -> RangeGuard<'a> {
        let (slot, cpu) = (slots.get(local), local.id());
        let free = slot.state.load(Ordering::Relaxed) & STANDING == FREE;
        assert!(free, "a CPU holds one claim at a time");
        let changed = slot.write(self.key(), wanted.into(), slots);
        // Before the full fence of the try: who misses it there is found by the try.
        if self.users.insert(cpu) | changed {
            self.home_changed(cpu, slots);
        }
        RangeGuard { lock: self, slots, cpu, wait, mark: Mark::none() }
    }
}

impl Default for RangeLock {
    fn default() -> Self {
        Self::new()
    }
}

/// A held claim. Dropping it lets the later ones in; it cannot leave the CPU that took it.
#[must_use = "the drop of the guard releases the ranges"]
pub struct RangeGuard<'a> {
    lock: &'a RangeLock,
    slots: &'a ClaimSlots,
    cpu: CpuId,
    // Not `Sync`, so the guard is not `Send`.
    wait: &'a dyn Wait,
    mark: Mark<'a>,
}

impl<'a> RangeGuard<'a> {
    /// The claim, held from now on.
    #[inline(always)]
    fn marked(mut self) -> Self {
        self.mark = order::hold::<RangeClaim>(self.wait);
        self
    }

    /// The two ranges that the claim named; either may be empty.
    #[inline]
    pub fn ranges(&self) -> [VirtRange; 2] {
        self.slot().wanted().ranges
    }

    /// Whether all of `range` lies in one of the claim's ranges.
    #[cfg(any(test, loom, shuttle))]
    #[inline]
    pub fn covers(&self, range: VirtRange) -> bool {
        range.is_empty() || self.ranges().iter().any(|own| own.covers(range))
    }

    /// The CPU's own slot.
    #[inline]
    fn slot(&self) -> &'a ClaimSlot {
        self.slots.remote(self.cpu)
    }

    /// The claim's number, in the slot's state.
    #[inline]
    fn number(&self) -> u64 {
        self.slot().state.load(Ordering::Relaxed) & !STANDING
    }

    /// Says how the claim stands, before whatever is read next.
    #[inline]
    fn publish(&self, standing: u64) {
        self.slot().state.swap(self.number() | standing, Ordering::SeqCst);
        if !lost(Mutant::ClaimFence) {
            fence_after_rmw();
        }
    }

    /// The CPUs that may have a claim that conflicts, ascending: of those whose homes come near
    /// later, none has one that is held before this one, or has a lower ticket. After
    /// [`Self::publish`].
    #[inline]
    fn near(&self) -> impl Iterator<Item = CpuId> {
        self.slot().near.cpus(self.cpu, self.lock, self.slots)
    }

    /// The slots of these CPUs.
    #[inline]
    fn others(&self) -> impl Iterator<Item = &'a ClaimSlot> {
        let slots = self.slots;
        self.near().map(move |cpu| slots.remote(cpu))
    }

    /// The claim in `slot`, if it is one that conflicts and `stops` this one.
    #[inline]
    fn stopped_by(
        &self,
        slot: &ClaimSlot,
        wanted: Wanted,
        stops: impl Fn(Seen) -> bool,
    ) -> Option<Seen> {
        let key = self.lock.key();
        let seen = if slot.home.may_have(key, wanted) { slot.look(key) } else { None };
        seen.filter(|other| stops(*other) && other.wanted.conflicts(wanted))
    }

    /// Makes the claim active, and returns whether it is held now. If not, it takes a ticket next,
    /// or is dropped.
    #[inline]
    fn tries(&self) -> bool {
        self.publish(ACTIVE);
        let (wanted, stops) = (self.slot().wanted(), |other: Seen| other.standing != PARKED);
        !self.others().any(|slot| self.stopped_by(slot, wanted, stops).is_some())
    }

    /// The claim in `slot`, if it is before this one, which waits.
    fn behind(&self, slot: &ClaimSlot) -> Option<Seen> {
        let own = self.slot();
        let (wanted, ticket) = (own.wanted(), own.ticket.load(Ordering::Relaxed));
        self.stopped_by(slot, wanted, |other| match other.standing {
            ACTIVE => true,
            WAITS | FIRM => other.ticket < ticket,
            _ => false,
        })
    }

    /// Looks at the claims of the CPUs in `before`, and leaves those in it that are before this
    /// one, which waits. Returns the slot of the last of them.
    fn last_of(&self, before: &mut OwnCpus) -> Option<&'a ClaimSlot> {
        let mut last: Option<(u64, &ClaimSlot)> = None;
        before.retain(|cpu| {
            let slot = self.slots.remote(cpu);
            let Some(seen) = self.behind(slot) else { return false };
            if last.is_none_or(|(ticket, _)| ticket <= seen.ticket) {
                last = Some((seen.ticket, slot));
            }
            true
        });
        last.map(|(_, slot)| slot)
    }

    /// The claim waits from now on, behind all that wait.
    #[cold]
    fn take_ticket(&self) {
        // Acquire and Release: whoever has a higher ticket sees that this claim is in its slot.
        let ticket = self.lock.tickets.fetch_add(1, Ordering::AcqRel);
        self.slot().ticket.store(ticket, Ordering::Relaxed);
        self.publish(WAITS);
        // It may have been active for a moment.
        self.let_others_in();
    }

    /// Waits, with a ticket, until the claim is held.
    #[cold]
    #[inline(never)]
    fn await_turn(&self) {
        let mut parks = 0;
        while !self.awaits_those_before(&mut parks) {
            // It was parked, and may have been passed.
            let held = self.tries();
            self.lock.parked.leave(self.cpu);
            if held {
                return;
            }
            self.take_ticket();
        }
        // Others see that it waits, or that it is active: either stops them.
        self.slot().state.store(self.number() | ACTIVE, Ordering::Release);
    }

    /// Waits until no claim is left before this one. Returns false if the claim was parked
    /// meanwhile so that others could overtake it.
    fn awaits_those_before(&self, parks: &mut u32) -> bool {
        let (mut before, mut looks) = (OwnCpus::default(), 0);
        before.extend(self.near());
        while let Some(slot) = self.last_of(&mut before) {
            let mut has_begun = false;
            while let Some(last) = self.behind(slot) {
                if last.standing == ACTIVE && !has_begun {
                    // Most often the others have gone by now. Found out while the last one is at
                    // work, that costs no time once it goes.
                    has_begun = true;
                    self.last_of(&mut before);
                    continue;
                }
                if looks < LOOKS_BEFORE_PARKING {
                    self.wait.wait(looks);
                    looks += 1;
                    continue;
                }
                looks = 0;
                if *parks < YIELDING_PARKS {
                    *parks += 1;
                    self.park(PARKED);
                    if !lost(Mutant::ParkedTriesAgain) {
                        return false;
                    }
                } else {
                    self.park(FIRM);
                }
                self.publish(WAITS);
                self.lock.parked.leave(self.cpu);
            }
        }
        true
    }

    /// Gives the core away until a claim that conflicts has gone, or for less. It counts as parked
    /// until the caller says otherwise.
    fn park(&self, standing: u64) {
        if self.says_parked(standing) {
            self.wait.park();
        }
    }

    /// Says that the claim is parked. Returns whether one that conflicts is active, which looks for
    /// parked ones when it goes.
    fn says_parked(&self, standing: u64) -> bool {
        self.lock.parked.enter(self.cpu);
        self.publish(standing);
        if standing == PARKED {
            // Others may have been left asleep since this one was to be served before them.
            self.wake_others();
        }
        let (wanted, active) = (self.slot().wanted(), |other: Seen| other.standing == ACTIVE);
        self.others().any(|slot| self.stopped_by(slot, wanted, active).is_some())
    }

    /// The rest of what makes the claim active no more: wakes the CPUs that it kept parked.
    #[inline]
    fn let_others_in(&self) {
        if self.lock.parked.count.load(Ordering::Relaxed) != 0 {
            self.wake_others();
        }
    }

    #[cold]
    #[inline(never)]
    fn wake_others(&self) {
        let (lock, wanted) = (self.lock, self.slot().wanted());
        let parked = || {
            let parked = |cpu: CpuId| Some((cpu, self.slots.remote(cpu).look(lock.key())?));
            let others = lock.parked.cpus.iter(self.slots.len()).filter(|cpu| *cpu != self.cpu);
            others
                .filter_map(parked)
                .filter(|(_, it)| it.is_parked() && it.wanted.conflicts(wanted))
        };
        let Some((first, head)) = parked().min_by_key(|(_, it)| it.rank()) else { return };
        // Who is found before one of these, by the looks that follow, finds it parked when it goes.
        fence(Ordering::SeqCst);
        self.wake_unless_stopped(first, head);
        for (cpu, claim) in parked().filter(|(_, it)| !it.wanted.conflicts(head.wanted)) {
            self.wake_unless_stopped(cpu, claim);
        }
    }

    /// Wakes `cpu`, whose claim is parked, unless another claim stops it, which looks for parked
    /// ones when it goes.
    fn wake_unless_stopped(&self, cpu: CpuId, parked: Seen) {
        let stops = |other: Seen| other.rank() < parked.rank();
        let others = self.lock.users.iter(self.slots.len()).filter(|other| *other != cpu);
        let mut others = others.map(|other| self.slots.remote(other));
        if !others.any(|slot| self.stopped_by(slot, parked.wanted, stops).is_some())
            && !lost(Mutant::ReleaseWakes)
        {
            self.wait.wake(cpu);
        }
    }

    fn is_held(&self) -> bool {
        self.slot().state.load(Ordering::Relaxed) & STANDING == ACTIVE
    }
}

impl Drop for RangeGuard<'_> {
    // Out of line: the owner of a space drops writers, too, which have none.
    #[inline(never)]
    fn drop(&mut self) {
        self.publish(FREE);
        self.slot().home.shrink();
        self.let_others_in();
    }
}

impl fmt::Debug for RangeGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RangeGuard({:?}, held: {})", self.ranges(), self.is_held())
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
