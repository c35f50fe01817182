use super::*;
use crate::sync::wait::{Spin, Yield};
use core::cell::{Cell, RefCell};
use core::sync::atomic::AtomicBool;
use proptest::prelude::*;
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
fn a_claim_takes_two_ranges_and_leaves_the_rest() {
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
fn an_empty_range_conflicts_with_nothing() {
    let (slots, lock, here, there) = (slots(2), RangeLock::new(), local(0), local(1));
    let _all = lock.acquire(&slots, &here, [VirtRange::USER, NONE], &Spin);
    let inside = VirtRange::new(4096, 4096);
    assert!(lock.try_acquire(&slots, &there, [inside, NONE], &Spin).is_some());
}

#[test]
fn shared_claims_keep_out_only_who_wants_a_page_alone() {
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

/// Notes whom it wakes.
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

impl RangeGuard<'_> {
    /// What its CPU does first, and last, when it parks.
    fn mark_parked(&self, parked: bool) {
        if parked {
            self.slot.state.fetch_or(PARKED, Ordering::Relaxed);
        } else {
            self.slot.state.fetch_and(!PARKED, Ordering::Relaxed);
        }
    }
}

const ALL: [VirtRange; 2] = [VirtRange::USER, NONE];

#[test]
fn a_parked_claim_is_overtaken_so_often_and_no_more() {
    let (slots, lock) = (slots(5), RangeLock::new());
    let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(local);
    let holder = lock.arrive(&slots, &a, ALL, &Spin);
    let sleeper = lock.arrive(&slots, &b, ALL, &Spin);
    let spinner = lock.arrive(&slots, &c, ALL, &Spin);
    assert!(holder.held() && !sleeper.held() && !spinner.held());
    sleeper.mark_parked(true);
    drop(holder);
    assert!(!sleeper.held() && !spinner.held(), "who is parked has nothing, who came later waits");
    drop(spinner);
    for _ in 0..MOST_OVERTAKEN {
        let overtaker = lock.arrive(&slots, &d, ALL, &Spin);
        assert!(overtaker.held());
        sleeper.mark_parked(false);
        assert!(!sleeper.held(), "it was overtaken");
        let waiter = lock.arrive(&slots, &e, ALL, &Spin);
        assert!(!waiter.held());
        drop(waiter);
        sleeper.mark_parked(true);
        drop(overtaker);
    }
    let late = lock.arrive(&slots, &d, ALL, &Spin);
    assert!(!late.held(), "enough");
    sleeper.mark_parked(false);
    assert!(sleeper.held());
    drop(sleeper);
    assert!(late.held());
}

#[test]
fn who_was_let_in_before_it_parked_runs_on() {
    let (slots, lock, notes) = (slots(2), RangeLock::new(), Notes::default());
    let (here, there) = (local(0), local(1));
    let holder = lock.arrive(&slots, &here, ALL, &notes);
    let waiter = lock.arrive(&slots, &there, ALL, &notes);
    assert!(!waiter.held());
    drop(holder);
    // `Notes` panics where it would park.
    waiter.park(PARKED);
    assert!(waiter.held());
    assert_eq!(notes.0.take(), []);
}

/// The CPU that parks; each time another CPU arrives and the holder goes.
struct Robbed<'a, F: Fn() -> RangeGuard<'a>> {
    arrive: [F; 2],
    holder: RefCell<Option<RangeGuard<'a>>>,
    parks: Cell<usize>,
}

impl<'a, F: Fn() -> RangeGuard<'a>> Wait for Robbed<'a, F> {
    fn wait(&self, looks: u32) {
        assert!(looks < LOOKS_BEFORE_PARKING);
    }

    fn park(&self) {
        let parks = self.parks.replace(self.parks.get() + 1);
        let next = self.arrive[parks % 2]();
        drop(self.holder.replace(Some(next)));
    }
}

#[test]
fn a_claim_is_overtaken_in_so_many_parkings_and_no_more() {
    let (slots, lock) = (slots(3), RangeLock::new());
    let [first, second, sleeper] = [0, 1, 2].map(local);
    let arrive = |local| lock.arrive(&slots, local, ALL, &Spin);
    let (first, second) = (&first, &second);
    let robbed = Robbed {
        arrive: [second, first].map(|local| move || arrive(local)),
        holder: RefCell::new(Some(arrive(first))),
        parks: Cell::new(0),
    };
    let parks = (YIELDING_PARKS.min(MOST_OVERTAKEN) + 1) as usize;
    let claim = lock.acquire(&slots, &sleeper, ALL, &robbed);
    assert!(claim.held() && !robbed.holder.borrow().as_ref().unwrap().held());
    assert_eq!(robbed.parks.get(), parks);
    drop(claim);
    assert!(robbed.holder.take().unwrap().held());
}

#[test]
fn a_release_wakes_the_parked_that_nothing_blocks_any_more() {
    let (slots, lock, notes) = (slots(6), RangeLock::new(), Notes::default());
    let locals: Vec<Local> = (0..6).map(local).collect();
    let range = |start, end| [VirtRange::new(start, end), NONE];
    let claim = |cpu: usize, ranges| lock.arrive(&slots, &locals[cpu], ranges, &notes);
    let holder = claim(0, range(0, 8));
    let (low, spinner) = (claim(1, range(0, 2)), claim(2, range(2, 4)));
    let (high, behind, apart) =
        (claim(3, range(4, 8)), claim(4, range(4, 6)), claim(5, range(9, 10)));
    [&low, &high, &behind].into_iter().for_each(|claim| claim.mark_parked(true));
    assert!(apart.held());
    drop(holder);
    assert_eq!(notes.0.take(), [1, 3], "the first two, and not who waits for one of them");
    assert!(spinner.held());
    drop((low, spinner));
    assert_eq!(notes.0.take(), []);
    high.mark_parked(false);
    drop(high);
    assert_eq!(notes.0.take(), [4]);
}

#[derive(Clone, Debug)]
enum Step {
    Arrive(Wanted),
    Try(Wanted),
    Release(prop::sample::Index),
    /// A claim's CPU parks, or runs again.
    Turn(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0u64..12, 0u64..5).prop_map(|(start, len)| VirtRange::new(start, start + len));
    let ranges = || (range(), prop_oneof![2 => Just(NONE), 1 => range()]).prop_map(|(a, b)| [a, b]);
    let wanted =
        || (ranges(), any::<bool>()).prop_map(|(ranges, shared)| Wanted { ranges, shared });
    prop_oneof![
        4 => wanted().prop_map(Step::Arrive),
        1 => wanted().prop_map(Step::Try),
        4 => any::<prop::sample::Index>().prop_map(Step::Release),
        4 => any::<prop::sample::Index>().prop_map(Step::Turn),
    ]
}

/// By bytes, not by bounds: the model shares nothing with the lock.
fn collide(a: Wanted, b: Wanted) -> bool {
    let has = |claim: Wanted, byte| claim.ranges.iter().any(|range| range.contains(byte));
    (!a.shared || !b.shared) && (0..20).any(|byte| has(a, byte) && has(b, byte))
}

/// A claim of the model's.
struct Claim<'a> {
    cpu: usize,
    wanted: Wanted,
    parked: bool,
    overtaken: u32,
    guard: RangeGuard<'a>,
}

/// Where a claim that arrives stands among those of the model, which are in the order of the list.
fn place(claims: &mut [Claim<'_>], wanted: Wanted) -> usize {
    let mut place = claims.len();
    for (at, claim) in claims.iter_mut().enumerate().rev() {
        if collide(claim.wanted, wanted) {
            if !claim.parked || claim.overtaken == MOST_OVERTAKEN {
                break;
            }
            claim.overtaken += 1;
            place = at;
        }
    }
    place
}

proptest! {
    /// A claim is held exactly if it is not parked and no earlier one that is still there collides with it.
    /// A release may hit a claim that waits, as `try_acquire`'s do.
    #[test]
    fn claims_are_held_as_the_model_says(steps in prop::collection::vec(step(), 1..80)) {
        const CPUS: usize = 10;
        let (slots, lock) = (slots(CPUS), RangeLock::new());
        let locals: Vec<Local> = (0..CPUS).map(local).collect();
        let mut claims: Vec<Claim<'_>> = Vec::new();
        for step in steps {
            let free = (0..CPUS).find(|cpu| claims.iter().all(|claim| claim.cpu != *cpu));
            let (parked, overtaken) = (false, 0);
            match (step, free) {
                (Step::Arrive(wanted), Some(cpu)) => {
                    let place = place(&mut claims, wanted);
                    let guard = lock.arrive(&slots, &locals[cpu], wanted, &Spin);
                    claims.insert(place, Claim { cpu, wanted, parked, overtaken, guard });
                }
                (Step::Try(wanted), Some(cpu)) => {
                    let place = place(&mut claims, wanted);
                    let expected = !claims[..place].iter().any(|c| collide(c.wanted, wanted));
                    let got = lock.try_acquire(&slots, &locals[cpu], wanted, &Spin);
                    prop_assert_eq!(got.is_some(), expected);
                    if let Some(guard) = got {
                        claims.insert(place, Claim { cpu, wanted, parked, overtaken, guard });
                    }
                }
                (Step::Release(index), _) if !claims.is_empty() => {
                    drop(claims.remove(index.index(claims.len())));
                }
                (Step::Turn(index), _) if !claims.is_empty() => {
                    let at = index.index(claims.len());
                    let claim = &mut claims[at];
                    // Who has its claim does not park.
                    if claim.parked || !claim.guard.held() {
                        claim.parked = !claim.parked;
                        claim.guard.mark_parked(claim.parked);
                    }
                }
                _ => {}
            }
            for (at, claim) in claims.iter().enumerate() {
                let blocked = claims[..at].iter().any(|c| collide(c.wanted, claim.wanted));
                let expected = !blocked && !claim.parked;
                prop_assert_eq!(claim.guard.held(), expected, "claim {} by {}", at, claim.cpu);
            }
        }
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
                for _ in 0..if cfg!(miri) { 20 } else { 3_000 } {
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
