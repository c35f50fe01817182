//! The swap area: its creation, swap-in, and swap-out without any free memory.

use super::guest::{AT, P, PRIVATE, RW, Small, TestCpu, TestVm, World};
use super::shim::{self, Plan};
use super::stores::Words;
use super::{Case, FRAMES, Left, Refused, exhaust, new_world};
use faultless::{
    Access, AnonVmaCheck, BackingStore, CpuId, FaultKind, MemoryLock, Space, audit::audit,
};
use std::sync::Arc;

const LATE: &[AnonVmaCheck] = &[AnonVmaCheck::Late];

/// Creates three pages. The last page is locked, and stays under every shortage.
fn stored(cpu: &TestCpu<'_>, world: &mut World) {
    cpu.swap_on(Arc::new(Words)).unwrap();
    world.map(cpu, 0, 4, RW, PRIVATE);
    (0..3).for_each(|page| world.store(cpu, page, 10 + page));
    world.spaces[0].mlock(cpu, AT + 2 * P, P, MemoryLock::Now).unwrap();
}

/// Swaps out the other two pages.
fn swapped(cpu: &TestCpu<'_>, world: &mut World) {
    stored(cpu, world);
    world.spaces[0].evict(cpu, AT, 2 * P).unwrap();
    assert_eq!(world.spaces[0].swapped_pages(cpu), 2);
}

/// Shares the pages with a child.
fn shared(cpu: &TestCpu<'_>, world: &mut World) {
    swapped(cpu, world);
    let child = world.spaces[0].fork(cpu).unwrap();
    world.spaces.push(child);
}

#[test]
fn creation_of_a_swap_area() {
    let store: Arc<dyn BackingStore> = Arc::new(Words);
    let setup = |_: &TestCpu<'_>, _: &mut World| {};
    let call = |cpu: &TestCpu<'_>, _: &mut World| Ok::<_, Refused>(cpu.swap_on(store.clone())?);
    let left = Left::Nothing;
    exhaust(&Case {
        name: "swap_on",
        setup: &setup,
        call: &call,
        left,
        checks: LATE,
        may_fail: true,
    });
}

#[test]
fn faults_that_swap_in() {
    type Setup = fn(&TestCpu<'_>, &mut World);
    for (setup, kind) in
        [(swapped as Setup, FaultKind::Swapped), (shared as Setup, FaultKind::Copy)]
    {
        for access in [Access::Read, Access::Write] {
            let call = |cpu: &TestCpu<'_>, world: &mut World| {
                assert_eq!(world.spaces[0].fault_remote(cpu, AT + P, access)?, kind);
                Ok::<_, Refused>(())
            };
            let (name, left) = (&*format!("{access:?} of a swapped page"), Left::Ways);
            exhaust(&Case { name, setup: &setup, call: &call, left, checks: LATE, may_fail: true });
        }
    }
}

#[test]
fn forks_of_swapped_pages() {
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        let child = world.spaces[0].fork(cpu)?;
        assert_eq!(child.swapped_pages(cpu), 2);
        world.spaces.push(child);
        Ok::<_, Refused>(())
    };
    let left = Left::ReadOnly;
    exhaust(&Case {
        name: "fork",
        setup: &swapped,
        call: &call,
        left,
        checks: LATE,
        may_fail: true,
    });
}

/// Whatever request is refused, a page is in memory or in the area.
#[test]
fn evictions_to_the_swap_area() {
    for only in [false, true] {
        for step in 0.. {
            let vm = TestVm::new(Small::new(FRAMES)).unwrap();
            // SAFETY: the only CPU handle.
            let cpu = unsafe { vm.cpu(CpuId(0)) };
            let mut world = new_world(&cpu);
            stored(&cpu, &mut world);
            let child: Space<Small> = world.spaces[0].fork(&cpu).unwrap();
            world.spaces.push(child);
            let plan = if only { Plan::Only(step) } else { Plan::From(step) };
            let ((), refused) = shim::with(plan, || {
                world.spaces[0].evict(&cpu, AT, 2 * P).unwrap();
                cpu.reclaim(4);
            });
            cpu.drain();
            world.audit(&cpu);
            for space in &world.spaces {
                for page in 0..3 {
                    let mut word = [0; 8];
                    space.read_bytes(&cpu, AT + page * P, &mut word).unwrap();
                    assert_eq!(u64::from_ne_bytes(word), 10 + page, "step {step}");
                }
            }
            world.end(&cpu);
            cpu.drain();
            assert_eq!(cpu.swap_usage().1, 0);
            audit(&cpu, &[]).unwrap_or_else(|error| panic!("{error}"));
            if refused == 0 {
                assert!(step > 2, "no allocation failed");
                break;
            }
        }
    }
}
