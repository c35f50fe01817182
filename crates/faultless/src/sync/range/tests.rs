use super::*;
use crate::sync::wait::{Spin, Yield};
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
#[should_panic(expected = "a CPU holds one claim at a time")]
fn a_second_claim_of_a_cpu_is_refused() {
    let (slots, parent, child, here) = (slots(1), RangeLock::new(), RangeLock::new(), local(0));
    let _outer = parent.acquire(&slots, &here, [VirtRange::USER, NONE], &Spin);
    let _inner = child.acquire(&slots, &here, [VirtRange::USER, NONE], &Spin);
}

#[derive(Clone, Debug)]
enum Step {
    Arrive([VirtRange; 2]),
    Try([VirtRange; 2]),
    Release(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0u64..12, 0u64..5).prop_map(|(start, len)| VirtRange::new(start, start + len));
    let ranges = || (range(), prop_oneof![2 => Just(NONE), 1 => range()]).prop_map(|(a, b)| [a, b]);
    prop_oneof![
        4 => ranges().prop_map(Step::Arrive),
        1 => ranges().prop_map(Step::Try),
        4 => any::<prop::sample::Index>().prop_map(Step::Release),
    ]
}

/// By bytes, not by bounds: the model shares nothing with the lock.
fn collide(a: [VirtRange; 2], b: [VirtRange; 2]) -> bool {
    (0..20).any(|byte| a.iter().any(|r| r.contains(byte)) && b.iter().any(|r| r.contains(byte)))
}

proptest! {
    /// A claim is held exactly if no earlier one that is still there collides with it. A release
    /// may hit a claim that waits, as `try_acquire`'s do.
    #[test]
    fn claims_are_held_as_the_model_says(steps in prop::collection::vec(step(), 1..60)) {
        const CPUS: usize = 10;
        let (slots, lock) = (slots(CPUS), RangeLock::new());
        let locals: Vec<Local> = (0..CPUS).map(local).collect();
        let mut claims: Vec<(usize, [VirtRange; 2], RangeGuard<'_>)> = Vec::new();
        for step in steps {
            let free = (0..CPUS).find(|cpu| claims.iter().all(|claim| claim.0 != *cpu));
            match (step, free) {
                (Step::Arrive(ranges), Some(cpu)) => {
                    let claim = lock.arrive(&slots, &locals[cpu], ranges, &Spin);
                    claims.push((cpu, ranges, claim));
                }
                (Step::Try(ranges), Some(cpu)) => {
                    let expected = !claims.iter().any(|c| collide(c.1, ranges));
                    let got = lock.try_acquire(&slots, &locals[cpu], ranges, &Spin);
                    prop_assert_eq!(got.is_some(), expected);
                    claims.extend(got.map(|claim| (cpu, ranges, claim)));
                }
                (Step::Release(index), _) if !claims.is_empty() => {
                    let index = index.index(claims.len());
                    drop(claims.remove(index));
                }
                _ => {}
            }
            for (at, (_, ranges, claim)) in claims.iter().enumerate() {
                let blocked = claims[..at].iter().any(|earlier| collide(earlier.1, *ranges));
                prop_assert_eq!(claim.held(), !blocked, "claim {} of {:?}", at, claims);
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
