//! Background work with few or no results runs less often.

use super::swap::{is_swapped, swap_on};
use super::tiers::{fill, free, tiers};
use crate::reclaim::tiers::Balanced;
use crate::space::{MemoryLock, Prot, Space};
use crate::stat::Counter;
use crate::testing::guest::{AT, P, RW, SHARED, TestCpu, cpu, load, map, map_object, store};
use crate::testing::store::{Memory, file, finish};
use std::vec::Vec;

/// The calls of `again` in which frames are looked at, of thirty.
fn looking(cpu: &TestCpu<'_>, mut again: impl FnMut()) -> Vec<usize> {
    let looks = || cpu.vm().totals().get(Counter::PageScanned);
    let mut calls = Vec::new();
    for call in 0..30 {
        let before = looks();
        again();
        calls.extend((looks() != before).then_some(call));
    }
    calls
}

/// Background calls without a result are skipped: one, three, seven and so on, until a call has a
/// result.
#[test]
fn unsuccessful_background_work_runs_less_often() {
    let vm = tiers(1, &[128, 128]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(120, 0);
    let file = file(&cpu, &memory);
    map_object(&cpu, &space, (0, 120), Prot::READ, SHARED, (&file, 0));
    space.mlock(&cpu, AT, 120 * P, MemoryLock::Now).unwrap();
    (0..120).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
    map(&cpu, &space, 200, 300, RW);
    let mut page = fill(&cpu, &space, 200, 0, 0);
    while free(&cpu, 1) > 2 {
        store(&cpu, &space, AT + page * P, page).unwrap();
        page += 1;
    }
    let seldom = [0, 2, 6, 14];
    assert_eq!(looking(&cpu, || assert_eq!(cpu.reclaim_ahead(), 0)), seldom);
    // The hand scans pages that cannot leave the node, and pages that reclaim cannot evict.
    assert_eq!(looking(&cpu, || assert_eq!(cpu.balance(0), Balanced::default())), seldom);
    space.mlock(&cpu, AT, 120 * P, MemoryLock::No).unwrap();
    assert_ne!((0..16).map(|_| cpu.reclaim_ahead()).sum::<u64>(), 0);
    finish(&cpu, space, Vec::from([file]));
}

/// The area is full, except for the slots of pages swapped in one by one, and memory is nearly
/// short. Background reclaim does not scan all of memory for each slot.
#[test]
fn a_freed_slot_causes_a_short_scan() {
    const FRAMES: u32 = 1024;
    let vm = tiers(1, &[FRAMES]);
    let cpu = cpu(&vm, 0);
    swap_on(&cpu, 256);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 2000, RW);
    let mut pages = 0;
    while cpu.swap_usage().1 < 256 || vm.free_frames() > 80 {
        store(&cpu, &space, AT + pages * P, pages).unwrap();
        pages += 1;
    }
    let swapped: Vec<_> = (0..pages).filter(|page| is_swapped(&cpu, &space, *page)).collect();
    let mut passed = 0;
    for page in &swapped[..40] {
        assert_eq!(load(&cpu, &space, AT + page * P), Ok(*page));
        let before = vm.clock.passed();
        (0..4).for_each(|_| {
            cpu.reclaim_ahead();
        });
        passed += vm.clock.passed() - before;
    }
    let rounds = passed / u64::from(FRAMES);
    assert!(rounds < 32, "{rounds} rounds");
    space.exit(&cpu);
}
