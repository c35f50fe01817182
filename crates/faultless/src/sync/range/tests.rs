use super::*;
use crate::sync::wait::{Spin, Yield};
use core::cell::{Cell, RefCell};
use core::sync::atomic::AtomicBool;
use proptest::prelude::*;
use std::vec;
use std::vec::Vec;

const NONE: VirtRange = VirtRange { start: 0, end: 0 };

fn slots(cpus: usize) -> ClaimSlots {
    ClaimSlots::try_new(cpus, |_| Default::default()).unwrap()
}

fn local(cpu: usize) -> Local {
    // SAFETY: each test claims a CPU of its own slots once at a time.
    unsafe { Local::claim(CpuId(cpu as u16)) }
}

#[test]
fn a_claim_covers_exactly_its_two_ranges() {
    let (slots, lock, here, there) = (slots(2), RangeLock::new(), local(0), local(1));
    let both = [VirtRange::new(0, 10), VirtRange::new(20, 30)];
    let guard = lock.acquire(&slots, &here, both, &Spin);
    assert_eq!(guard.ranges(), both);
    assert!(guard.covers(VirtRange::new(2, 10)) && guard.covers(VirtRange::new(20, 21)));
    assert!(guard.covers(NONE) && !guard.covers(VirtRange::new(9, 21)));
    let taken = |range| lock.try_acquire(&slots, &there, [NONE, range], &Spin).is_none();
    assert!(taken(VirtRange::new(9, 20)) && taken(VirtRange::new(29, 30)));
    assert!(!taken(VirtRange::new(10, 20)) && !taken(VirtRange::new(30, 40)));
    drop(guard);
    assert!(!taken(VirtRange::new(0, 40)));
}

#[test]
fn an_empty_range_has_no_conflicts() {
    let (slots, lock, here, there) = (slots(2), RangeLock::new(), local(0), local(1));
    let _all = lock.acquire(&slots, &here, [VirtRange::USER, NONE], &Spin);
    let inside = VirtRange::new(4096, 4096);
    assert!(lock.try_acquire(&slots, &there, [inside, NONE], &Spin).is_some());
}

#[test]
fn shared_claims_conflict_only_with_exclusive_claims() {
    let (slots, lock, here, there) = (slots(2), RangeLock::new(), local(0), local(1));
    let (range, inside) = (VirtRange::new(0, 10), VirtRange::new(4, 5));
    let alone = || lock.try_acquire(&slots, &there, [inside, NONE], &Spin).is_some();
    let beside = || lock.try_acquire(&slots, &there, Wanted::shared(inside), &Spin).is_some();
    let shared = lock.acquire(&slots, &here, Wanted::shared(range), &Spin);
    assert!(beside() && !alone());
    drop(shared);
    let _exclusive = lock.acquire(&slots, &here, [range, NONE], &Spin);
    assert!(!beside() && !alone());
}

#[test]
#[should_panic(expected = "a CPU holds one claim at a time")]
fn a_second_claim_of_a_cpu_is_refused() {
    let (slots, parent, child, here) = (slots(1), RangeLock::new(), RangeLock::new(), local(0));
    let _outer = parent.acquire(&slots, &here, [VirtRange::USER, NONE], &Spin);
    let _inner = child.acquire(&slots, &here, [VirtRange::USER, NONE], &Spin);
}

/// Records the woken CPUs.
#[derive(Default)]
struct Notes(RefCell<Vec<u16>>);

impl Wait for Notes {
    fn wait(&self, _: u32) {
        panic!("waits");
    }

    fn wake(&self, cpu: CpuId) {
        self.0.borrow_mut().push(cpu.0);
    }
}

impl RangeLock {
    /// Returns a claim after its arrival: it is held, or waits.
    fn arrive<'a>(
        &'a self,
        slots: &'a ClaimSlots,
        local: &'a Local,
        wanted: impl Into<Wanted>,
        wait: &'a dyn Wait,
    ) -> RangeGuard<'a> {
        let claim = self.write(slots, local, wanted, wait);
        if !claim.tries() {
            claim.take_ticket();
        }
        claim
    }
}

impl RangeGuard<'_> {
    fn standing(&self) -> u64 {
        self.slot().state.load(Ordering::Relaxed) & STANDING
    }

    /// Checks once, on the claim's CPU, whether the claim is held.
    fn looks(&self) -> bool {
        let mut before = OwnCpus::default();
        before.extend(self.near());
        if self.standing() == WAITS && self.last_of(&mut before).is_none() {
            self.slot().state.store(self.number() | ACTIVE, Ordering::Release);
        }
        self.is_held()
    }

    /// Prepares the parking of the claim's CPU. Returns whether the CPU then parks.
    fn parks(&self, standing: u64) -> bool {
        assert_eq!(self.standing(), WAITS);
        self.says_parked(standing)
    }

    /// Lets the claim's CPU run again. Returns whether the claim got a new ticket.
    fn wakes(&self) -> bool {
        let yielding = self.standing() == PARKED;
        let waits = yielding && !self.tries();
        if !yielding {
            self.publish(WAITS);
        }
        self.lock.parked.leave(self.cpu);
        if waits {
            self.take_ticket();
        }
        waits
    }
}

const ALL: [VirtRange; 2] = [VirtRange::USER, NONE];

#[test]
fn a_parked_claim_is_overtaken_and_becomes_the_last_waiter() {
    let (slots, lock) = (slots(4), RangeLock::new());
    let [a, b, c, d] = [0, 1, 2, 3].map(local);
    let holder = lock.arrive(&slots, &a, ALL, &Spin);
    let sleeper = lock.arrive(&slots, &b, ALL, &Spin);
    let waiter = lock.arrive(&slots, &c, ALL, &Spin);
    assert!(holder.is_held() && !sleeper.looks() && !waiter.looks());
    sleeper.parks(PARKED);
    drop(holder);
    assert!(waiter.looks(), "a claim does not wait for parked claims");
    drop(waiter);
    let overtaker = lock.arrive(&slots, &c, ALL, &Spin);
    assert!(overtaker.is_held());
    let last = lock.arrive(&slots, &d, ALL, &Spin);
    assert!(sleeper.wakes() && !sleeper.looks());
    drop(overtaker);
    assert!(!sleeper.looks() && last.looks(), "the last claim arrived while the first was parked");
    drop(last);
    assert!(sleeper.looks());
}

#[test]
fn a_firmly_parked_claim_is_not_overtaken() {
    let (slots, lock) = (slots(3), RangeLock::new());
    let [a, b, c] = [0, 1, 2].map(local);
    let holder = lock.arrive(&slots, &a, ALL, &Spin);
    let sleeper = lock.arrive(&slots, &b, ALL, &Spin);
    sleeper.parks(FIRM);
    drop(holder);
    let late = lock.arrive(&slots, &c, ALL, &Spin);
    assert!(!late.looks());
    assert!(!sleeper.wakes(), "a parked claim keeps its ticket");
    assert!(!late.looks() && sleeper.looks());
    drop(sleeper);
    assert!(late.looks());
}

#[test]
fn a_cpu_without_a_conflict_does_not_park() {
    let (slots, lock, notes) = (slots(2), RangeLock::new(), Notes::default());
    let (here, there) = (local(0), local(1));
    let holder = lock.arrive(&slots, &here, ALL, &notes);
    let waiter = lock.arrive(&slots, &there, ALL, &notes);
    drop(holder);
    // `Notes` panics if the CPU parks.
    waiter.park(PARKED);
    assert!(!waiter.wakes() && waiter.is_held());
    assert_eq!(notes.0.take(), []);
}

/// The parking CPU; each time, another CPU arrives and the holder leaves.
struct Robbed<'a, F: Fn() -> RangeGuard<'a>> {
    arrive: [F; 2],
    holder: RefCell<Option<RangeGuard<'a>>>,
    parks: Cell<usize>,
}

impl<'a, F: Fn() -> RangeGuard<'a>> Wait for Robbed<'a, F> {
    fn wait(&self, looks: u32) {
        assert!(looks < LOOKS_BEFORE_PARKING);
        if let Some(holder) = &*self.holder.borrow() {
            holder.looks();
        }
    }

    fn park(&self) {
        let parks = self.parks.replace(self.parks.get() + 1);
        drop(self.holder.take());
        *self.holder.borrow_mut() = Some(self.arrive[parks % 2]());
    }
}

#[test]
fn the_number_of_overtakings_is_bounded() {
    let (slots, lock) = (slots(3), RangeLock::new());
    let [first, second, sleeper] = [0, 1, 2].map(local);
    let arrive = |local| lock.arrive(&slots, local, ALL, &Spin);
    let (first, second) = (&first, &second);
    let robbed = Robbed {
        arrive: [second, first].map(|local| move || arrive(local)),
        holder: RefCell::new(Some(arrive(first))),
        parks: Cell::new(0),
    };
    let claim = lock.acquire(&slots, &sleeper, ALL, &robbed);
    assert!(claim.is_held() && !robbed.holder.borrow().as_ref().unwrap().looks());
    assert_eq!(robbed.parks.get(), YIELDING_PARKS as usize + 1);
    drop(claim);
    assert!(robbed.holder.take().unwrap().looks());
    assert_eq!(lock.parked.count.load(Ordering::Relaxed), 0);
}

#[test]
fn a_release_wakes_the_unblocked_parked_claims() {
    let (slots, lock, notes) = (slots(6), RangeLock::new(), Notes::default());
    let locals: Vec<Local> = (0..6).map(local).collect();
    let range = |start, end| [VirtRange::new(start, end), NONE];
    let claim = |cpu: usize, ranges| lock.arrive(&slots, &locals[cpu], ranges, &notes);
    let holder = claim(0, range(0, 8));
    let (low, spinner) = (claim(1, range(0, 2)), claim(2, range(2, 4)));
    let (high, behind, apart) =
        (claim(3, range(4, 8)), claim(4, range(4, 6)), claim(5, range(9, 10)));
    assert!(low.parks(PARKED) && high.parks(PARKED) && behind.parks(FIRM));
    assert!(apart.is_held());
    drop(holder);
    assert_eq!(
        notes.0.take(),
        [4, 1],
        "the next claims are woken, but no claim that waits for them"
    );
    assert!(!low.wakes() && spinner.looks());
    drop((low, spinner));
    assert_eq!(notes.0.take(), []);
    assert!(!behind.wakes() && behind.looks());
    let late = claim(0, range(6, 8));
    assert!(late.is_held(), "a parked claim blocks no other claim");
    drop(behind);
    assert_eq!(notes.0.take(), [], "another held claim blocks the waiter");
    drop(late);
    assert_eq!(notes.0.take(), [3]);
    assert!(!high.wakes() && high.looks());
}

#[test]
fn a_failed_try_wakes_the_claims_that_found_it_active() {
    let (slots, lock, notes) = (slots(3), RangeLock::new(), Notes::default());
    let locals: Vec<Local> = (0..3).map(local).collect();
    let range = |start, end| [VirtRange::new(start, end), NONE];
    let claim = |cpu: usize, ranges| lock.arrive(&slots, &locals[cpu], ranges, &notes);
    let holder = claim(0, range(0, 4));
    let sleeper = claim(1, range(3, 8));
    sleeper.parks(FIRM);
    let failing = lock.write(&slots, &locals[2], range(2, 8), &notes);
    assert!(!failing.tries());
    drop(holder);
    assert_eq!(notes.0.take(), [], "the tried claim blocks the waiter");
    failing.take_ticket();
    assert_eq!(notes.0.take(), [1]);
    assert!(!failing.looks() && !sleeper.wakes() && sleeper.looks());
}

/// Waiters that keep their core are served first, and wake the claims they blocked.
#[test]
fn a_release_defers_parked_claims_to_a_waiter() {
    for standing in [PARKED, FIRM] {
        let (slots, lock, notes) = (slots(4), RangeLock::new(), Notes::default());
        let [a, b, c, d] = [0, 1, 2, 3].map(local);
        let range = |start, end| [VirtRange::new(start, end), NONE];
        let holder = lock.arrive(&slots, &a, ALL, &notes);
        let before = lock.arrive(&slots, &b, range(0, 3), &notes);
        let sleeper = lock.arrive(&slots, &c, range(2, 6), &notes);
        let behind = lock.arrive(&slots, &d, range(5, 8), &notes);
        sleeper.parks(standing);
        drop(holder);
        assert_eq!(notes.0.take(), [], "{standing}");
        assert!(before.looks());
        drop(before);
        // The other claim has a higher ticket, and must wait for a firmly parked claim.
        assert_eq!(notes.0.take(), if standing == FIRM { vec![2] } else { vec![] });
        assert_eq!(behind.looks(), standing == PARKED);
        if standing == PARKED {
            drop(behind);
            assert_eq!(notes.0.take(), [2]);
        }
        assert!(!sleeper.wakes() && sleeper.looks());
    }
}

/// A parking claim is overtaken, so the claims deferred to it are no longer blocked.
#[test]
fn a_parking_claim_wakes_the_claims_deferred_to_it() {
    for standing in [PARKED, FIRM] {
        let (slots, lock, notes) = (slots(4), RangeLock::new(), Notes::default());
        let [a, b, c, d] = [0, 1, 2, 3].map(local);
        let range = |start, end| [VirtRange::new(start, end), NONE];
        let low = lock.arrive(&slots, &a, range(0, 2), &notes);
        let high = lock.arrive(&slots, &b, range(5, 7), &notes);
        let [sleeper, waiter] = {
            let sleeper = || lock.arrive(&slots, &c, range(1, 4), &notes);
            let waiter = || lock.arrive(&slots, &d, range(3, 6), &notes);
            // Only lower tickets block a firmly parked claim.
            if standing == FIRM {
                let waiter = waiter();
                [sleeper(), waiter]
            } else {
                [sleeper(), waiter()]
            }
        };
        assert!(sleeper.parks(standing));
        drop(low);
        assert_eq!(notes.0.take(), [], "the waiting claim comes first");
        assert!(waiter.parks(PARKED));
        assert_eq!(notes.0.take(), [2], "{standing}");
        drop(high);
        assert!(!sleeper.wakes() && sleeper.looks());
        drop(sleeper);
        assert_eq!(notes.0.take(), [3]);
        assert!(!waiter.wakes() && waiter.looks());
    }
}

#[test]
fn claims_are_searched_at_the_users_of_the_lock() {
    let (slots, lock, other) = (slots(130), RangeLock::new(), RangeLock::new());
    let [a, b, c, there] = [3, 64, 129, 4].map(local);
    let users =
        |lock: &RangeLock| lock.users.iter(slots.len()).map(|cpu| cpu.0).collect::<Vec<_>>();
    let claims =
        [&a, &c].map(|local| lock.arrive(&slots, local, Wanted::shared(VirtRange::USER), &Spin));
    let elsewhere = other.arrive(&slots, &b, ALL, &Spin);
    assert_eq!((users(&lock), users(&other)), ([3, 129].into(), [64].into()));
    assert!(lock.is_claimed(&slots, VirtRange::new(5, 6)));
    let waits = lock.arrive(&slots, &there, ALL, &Spin);
    drop(claims);
    assert!(!waits.is_held() && lock.is_claimed(&slots, VirtRange::USER));
    drop(waits);
    assert!(!lock.is_claimed(&slots, VirtRange::USER));
    lock.leave(CpuId(129));
    lock.leave(CpuId(64));
    lock.leave(CpuId(4));
    assert_eq!(users(&lock), [3]);
    // A slot with a claim of another lock.
    lock.users.insert(CpuId(64));
    assert!(!lock.is_claimed(&slots, VirtRange::USER) && elsewhere.is_held());
}

#[derive(Clone, Debug)]
enum Step {
    Arrive(Wanted),
    Try(Wanted),
    Release(prop::sample::Index),
    /// A claim's CPU checks whether the claim is held.
    Look(prop::sample::Index),
    /// A claim's CPU parks, firmly or not, or runs again.
    Turn(prop::sample::Index, bool),
}

fn wanted() -> impl Strategy<Value = Wanted> {
    let range = || (0u64..12, 0u64..5).prop_map(|(start, len)| VirtRange::new(start, start + len));
    let ranges = || (range(), prop_oneof![2 => Just(NONE), 1 => range()]).prop_map(|(a, b)| [a, b]);
    (ranges(), any::<bool>()).prop_map(|(ranges, shared)| Wanted { ranges, shared })
}

/// Claims that each conflict with few others.
fn narrow() -> impl Strategy<Value = Wanted> {
    let alone = |(start, len)| Wanted::from([VirtRange::new(start, start + len), NONE]);
    prop_oneof![4 => (0u64..6, 1u64..3).prop_map(alone), 1 => wanted()]
}

fn step<W: Strategy<Value = Wanted>>(wanted: fn() -> W) -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => wanted().prop_map(Step::Arrive),
        1 => wanted().prop_map(Step::Try),
        4 => index().prop_map(Step::Release),
        6 => index().prop_map(Step::Look),
        4 => (index(), any::<bool>()).prop_map(|(index, firm)| Step::Turn(index, firm)),
    ]
}

/// Compares bytes, not bounds: the model shares no code with the lock.
fn collide(a: Wanted, b: Wanted) -> bool {
    let has = |claim: Wanted, byte| claim.ranges.iter().any(|range| range.contains(byte));
    (!a.shared || !b.shared) && (0..20).any(|byte| has(a, byte) && has(b, byte))
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stands {
    Held,
    /// With its place among the waiters.
    Waits(u64),
    Parked,
    Firm(u64),
}

/// A claim of the model's.
struct Claim<'a> {
    cpu: usize,
    wanted: Wanted,
    stands: Stands,
    guard: RangeGuard<'a>,
}

/// Returns whether a claim for `wanted` is blocked by claims of CPUs other than `cpu`: held claims,
/// and waiting claims with a place before `place`.
fn is_stopped(claims: &[Claim<'_>], cpu: usize, wanted: Wanted, place: u64) -> bool {
    let stops = |claim: &Claim<'_>| match claim.stands {
        Stands::Held => true,
        Stands::Waits(other) | Stands::Firm(other) => other < place,
        Stands::Parked => false,
    };
    claims.iter().any(|other| other.cpu != cpu && stops(other) && collide(other.wanted, wanted))
}

proptest! {
    /// A claim is held exactly in the order of arrival, except that parked claims are overtaken.
    /// Two conflicting claims are never held together.
    #[test]
    #[cfg_attr(miri, ignore = "safe code on one thread; the interpreter takes minutes")]
    fn held_claims_match_the_model(steps in prop::collection::vec(step(wanted), 1..80)) {
        const CPUS: usize = 10;
        let (slots, lock) = (slots(CPUS), RangeLock::new());
        let locals: Vec<Local> = (0..CPUS).map(local).collect();
        let mut claims: Vec<Claim<'_>> = Vec::new();
        let mut places = 0..;
        let mut next_place = || places.next().unwrap();
        for step in steps {
            let free = (0..CPUS).find(|cpu| claims.iter().all(|claim| claim.cpu != *cpu));
            match (step, free) {
                (Step::Arrive(wanted), Some(cpu)) => {
                    let stopped = is_stopped(&claims, cpu, wanted, u64::MAX);
                    let guard = lock.arrive(&slots, &locals[cpu], wanted, &Spin);
                    let stands = if stopped { Stands::Waits(next_place()) } else { Stands::Held };
                    claims.push(Claim { cpu, wanted, stands, guard });
                }
                (Step::Try(wanted), Some(cpu)) => {
                    let stopped = is_stopped(&claims, cpu, wanted, u64::MAX);
                    let got = lock.try_acquire(&slots, &locals[cpu], wanted, &Spin);
                    prop_assert_eq!(got.is_some(), !stopped);
                    if let Some(guard) = got {
                        claims.push(Claim { cpu, wanted, stands: Stands::Held, guard });
                    }
                }
                (Step::Release(index), _) if !claims.is_empty() => {
                    let at = index.index(claims.len());
                    if claims[at].stands == Stands::Held {
                        drop(claims.remove(at));
                    }
                }
                (Step::Look(index), _) if !claims.is_empty() => {
                    let at = index.index(claims.len());
                    let Claim { cpu, wanted, stands, ref guard } = claims[at];
                    if let Stands::Waits(place) = stands {
                        let held = !is_stopped(&claims, cpu, wanted, place);
                        prop_assert_eq!(guard.looks(), held);
                        if held {
                            claims[at].stands = Stands::Held;
                        }
                    }
                }
                (Step::Turn(index, firm), _) if !claims.is_empty() => {
                    let at = index.index(claims.len());
                    let Claim { cpu, wanted, stands, ref guard } = claims[at];
                    claims[at].stands = match stands {
                        Stands::Held => Stands::Held,
                        Stands::Waits(place) => {
                            guard.parks(if firm { FIRM } else { PARKED });
                            if firm { Stands::Firm(place) } else { Stands::Parked }
                        }
                        Stands::Firm(place) => {
                            prop_assert!(!guard.wakes());
                            Stands::Waits(place)
                        }
                        Stands::Parked => {
                            let stopped = is_stopped(&claims, cpu, wanted, u64::MAX);
                            prop_assert_eq!(guard.wakes(), stopped);
                            if stopped { Stands::Waits(next_place()) } else { Stands::Held }
                        }
                    };
                }
                _ => {}
            }
            let held = || claims.iter().filter(|claim| claim.stands == Stands::Held);
            for claim in held() {
                let beside = held().filter(|other| other.cpu != claim.cpu);
                prop_assert!(!beside.map(|other| other.wanted).any(|it| collide(it, claim.wanted)));
            }
            for claim in &claims {
                prop_assert_eq!(claim.guard.is_held(), claim.stands == Stands::Held);
            }
        }
    }
}

/// How far the CPU of a claim is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    Holds,
    /// The claim has tried, and conflicts with another claim.
    Fails,
    Waits,
    /// The claim is parked; if true, it sleeps until it is woken.
    Parked(bool),
}

impl RangeGuard<'_> {
    fn tries_to_hold(&self) -> Does {
        if self.tries() { Does::Holds } else { Does::Fails }
    }

    /// Takes the next step of the claim's CPU, which does not park.
    fn goes_on(&self, does: Does) -> Does {
        match does {
            Does::Fails => self.take_ticket(),
            Does::Waits if self.looks() => return Does::Holds,
            Does::Parked(false) if self.standing() == PARKED => {
                let does = self.tries_to_hold();
                self.lock.parked.leave(self.cpu);
                return does;
            }
            Does::Parked(false) => {
                self.publish(WAITS);
                self.lock.parked.leave(self.cpu);
            }
            _ => return does,
        }
        Does::Waits
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Whatever happened before: if each awake CPU continues from now on, and releases its claim,
    /// then every claim is finally held.
    #[test]
    #[cfg_attr(miri, ignore = "as the other model test")]
    fn every_claim_is_finally_held(steps in prop::collection::vec(step(narrow), 1..80)) {
        const CPUS: usize = 8;
        let (slots, lock, notes) = (slots(CPUS), RangeLock::new(), Notes::default());
        let locals: Vec<Local> = (0..CPUS).map(local).collect();
        let mut claims: Vec<(usize, Does, RangeGuard<'_>)> = Vec::new();
        let rouse = |claims: &mut Vec<(usize, Does, RangeGuard<'_>)>| {
            let woken = notes.0.take();
            for (cpu, does, _) in claims {
                if *does == Does::Parked(true) && woken.contains(&(*cpu as u16)) {
                    *does = Does::Parked(false);
                }
            }
        };
        for step in steps {
            let free = (0..CPUS).find(|cpu| claims.iter().all(|claim| claim.0 != *cpu));
            match (step, free) {
                (Step::Arrive(wanted) | Step::Try(wanted), Some(cpu)) => {
                    let guard = lock.write(&slots, &locals[cpu], wanted, &notes);
                    claims.push((cpu, guard.tries_to_hold(), guard));
                }
                (Step::Release(index), _) if !claims.is_empty() => {
                    let at = index.index(claims.len());
                    if matches!(claims[at].1, Does::Holds | Does::Fails) {
                        drop(claims.swap_remove(at));
                    }
                }
                (Step::Look(index), _) if !claims.is_empty() => {
                    let at = index.index(claims.len());
                    let (_, does, guard) = &mut claims[at];
                    *does = guard.goes_on(*does);
                }
                (Step::Turn(index, firm), _) if !claims.is_empty() => {
                    let at = index.index(claims.len());
                    let (_, does, guard) = &mut claims[at];
                    *does = match *does {
                        Does::Waits => Does::Parked(guard.parks(if firm { FIRM } else { PARKED })),
                        // For no reason.
                        Does::Parked(true) if firm => Does::Parked(false),
                        does => does,
                    };
                }
                _ => {}
            }
            rouse(&mut claims);
        }
        let mut went_on = true;
        while went_on {
            went_on = false;
            for at in (0..claims.len()).rev() {
                let (_, does, guard) = &mut claims[at];
                let now = guard.goes_on(*does);
                went_on |= now != *does;
                *does = now;
                if now == Does::Holds {
                    drop(claims.swap_remove(at));
                    went_on = true;
                }
                rouse(&mut claims);
            }
        }
        prop_assert!(claims.is_empty(), "{claims:?}");
        prop_assert_eq!(lock.parked.count.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn threads_never_share_a_page() {
    const CPUS: usize = 4;
    const PAGES: u64 = 8;
    let (slots, lock) = (slots(CPUS), RangeLock::new());
    let owned: Vec<AtomicBool> = (0..PAGES).map(|_| AtomicBool::new(false)).collect();
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            let (slots, lock, owned) = (&slots, &lock, &owned);
            scope.spawn(move || {
                let here = local(cpu);
                let mut random = cpu as u64 + 1;
                let mut below = |limit: u64| {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
                    (random >> 33) % limit
                };
                for _ in 0..if cfg!(miri) { 8 } else { 3_000 } {
                    let ranges = [(); 2].map(|()| {
                        let start = below(PAGES);
                        VirtRange::new(start, start + below(PAGES - start + 1))
                    });
                    let _guard = lock.acquire(slots, &here, ranges, &Yield);
                    let mine = |page: &u64| ranges.iter().any(|range| range.contains(*page));
                    for page in (0..PAGES).filter(mine) {
                        assert!(!owned[page as usize].swap(true, Ordering::Relaxed));
                    }
                    if below(4) == 0 {
                        std::thread::yield_now();
                    }
                    for page in (0..PAGES).filter(mine) {
                        owned[page as usize].store(false, Ordering::Relaxed);
                    }
                }
            });
        }
    });
}

#[test]
fn a_cpu_new_to_a_lock_searches_for_near_claims() {
    let (slots, first, second) = (slots(2), RangeLock::new(), RangeLock::new());
    let [one, other] = [0, 1].map(local);
    let at = |gib: u64| [VirtRange::new(gib << 30, (gib << 30) + 4096), NOWHERE];
    drop(first.acquire(&slots, &other, at(1), &Spin));
    drop(first.acquire(&slots, &other, at(900), &Spin));
    // Both locks have counted equally many changes: knowledge of the first lock does not apply to
    // the second.
    let held = second.acquire(&slots, &one, at(1), &Spin);
    assert!(second.try_acquire(&slots, &other, at(1), &Spin).is_none());
    drop(held);
}

#[test]
fn unused_parts_of_a_home_are_released() {
    let (slots, lock) = (slots(3), RangeLock::new());
    let [one, other, third] = [0, 1, 2].map(local);
    let at = |gib: u64| [VirtRange::new(gib << 30, (gib << 30) + 4096), NOWHERE];
    let near = |cpu: &Local| {
        let guard = lock.acquire(&slots, cpu, at(900 + u64::from(cpu.id().0) * 100), &Spin);
        guard.near().collect::<Vec<_>>()
    };
    for cpu in [&one, &other] {
        drop(lock.acquire(&slots, cpu, at(1), &Spin));
    }
    assert_eq!(near(&one), [CpuId(1)], "both claims were at 1 GiB");
    for cpu in [&one, &other, &one].into_iter().cycle().take(600) {
        near(cpu);
    }
    assert_eq!((near(&one), near(&other)), (vec![], vec![]));
    // A CPU with a claim near the home is found.
    drop(lock.acquire(&slots, &third, at(900), &Spin));
    assert_eq!(near(&one), [CpuId(2)]);
}
