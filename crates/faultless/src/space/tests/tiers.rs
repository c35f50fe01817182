//! Memory in tiers: what is not used moves to slower memory, and what is used comes back.

use super::guest::map_object;
use super::guest::{AT, P, RW, SHARED, TestCpu, TestSpace, TestVm, check, cpu, load, map, store};
use super::store::{Memory, file, finish};
use crate::addr::FrameNumber;
use crate::knob::Setting;
use crate::machine::MemoryRegion;
use crate::reclaim::tiers::Balanced;
use crate::space::{Prot, Space};
use crate::stat::Counter;
use crate::testing::TestMachine;
use crate::vm::Vm;
use std::vec;
use std::vec::Vec;

/// Nodes of so many frames, the first of which is the fastest.
fn tiers(frames: &[u32]) -> TestVm {
    let mut machine = TestMachine::new(1, frames.iter().sum());
    let mut first = 1;
    machine.regions = vec![];
    for (node, count) in (0..).zip(frames) {
        let frames = if node == 0 { count - 1 } else { *count };
        machine.regions.push(MemoryRegion { node, first: FrameNumber(first), frames });
        first += frames;
    }
    let vm = Vm::new(machine).unwrap();
    vm.set(Setting::PrefaultMaxOrder(0));
    vm
}

/// How many of `pages` are in each node.
fn places(cpu: &TestCpu<'_>, space: &TestSpace, pages: core::ops::Range<u64>) -> [u64; 3] {
    let addrs: Vec<_> = pages.map(|page| AT + page * P).collect();
    let mut nodes = vec![Ok(9); addrs.len()];
    space.page_nodes(cpu, &addrs, &mut nodes);
    [0, 1, 2].map(|node| nodes.iter().filter(|there| **there == Ok(node)).count() as u64)
}

/// Calls it until it does nothing.
fn balance(cpu: &TestCpu<'_>, promoted: u64) -> Balanced {
    let mut all = Balanced::default();
    for _ in 0..100 {
        let Balanced { demoted, promoted, evicted } = cpu.balance(promoted);
        if demoted + promoted + evicted == 0 {
            return all;
        }
        all.demoted += demoted;
        all.promoted += promoted;
        all.evicted += evicted;
    }
    panic!("it never comes to rest: {all:?}");
}

#[test]
fn unused_pages_make_room_in_fast_memory() {
    let vm = tiers(&[256, 512]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 400, RW);
    (0..200).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    let free = |cpu: &TestCpu<'_>| {
        cpu.drain();
        vm.frames.free_on(0, cpu)
    };
    assert_eq!(cpu.balance(0), Balanced::default(), "there is room");
    (200..250).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    let there = free(&cpu);
    assert!(there < 15, "{there}");
    balance(&cpu, 0);
    assert!(free(&cpu) >= 30, "{}", free(&cpu));
    let demoted = vm.totals().get(Counter::Demoted);
    assert!((16..60).contains(&demoted), "{demoted}");
    // Pages that are in use come back if they were among them, and others make room.
    for _ in 0..40 {
        (0..50).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page)));
        cpu.balance(8);
    }
    assert_eq!(places(&cpu, &space, 0..50), [50, 0, 0]);
    // New pages are fast ones.
    (300..320).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    assert_eq!(places(&cpu, &space, 300..320), [20, 0, 0]);
    for page in (0..250).chain(300..320) {
        assert_eq!(load(&cpu, &space, AT + page * P), Ok(page));
    }
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn pages_that_are_used_come_back_at_a_rate() {
    let vm = tiers(&[256, 512]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 128, RW);
    (0..128).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    let all: Vec<_> = (0..128).map(|page| AT + page * P).collect();
    space.move_pages(&cpu, &all, 1, true, &mut vec![Ok(0); 128]).unwrap();
    assert_eq!(places(&cpu, &space, 0..128), [0, 128, 0]);
    let mut before = 0;
    for _ in 0..60 {
        (32..64).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page)));
        cpu.balance(8);
        let [now, ..] = places(&cpu, &space, 0..128);
        assert!(now <= before + 8 + 8, "{before} to {now}");
        before = now;
    }
    assert_eq!(places(&cpu, &space, 32..64), [32, 0, 0]);
    assert_eq!(before, vm.totals().get(Counter::Promoted));
    // The others were stored to once, before they were moved.
    assert!(before < 64, "{before}");
    assert_eq!(vm.totals().get(Counter::Demoted), 0);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn pages_fall_to_the_last_tier_and_then_out_of_memory() {
    let vm = tiers(&[128, 128, 128]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(600, 0);
    let file = file(&cpu, &memory);
    map_object(&cpu, &space, (0, 600), Prot::READ, SHARED, (&file, 0));
    for page in 0..600 {
        assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1));
        cpu.balance(0);
    }
    let [.., last] = places(&cpu, &space, 0..600);
    assert!(last > 50, "{last}");
    assert!(vm.totals().get(Counter::Demoted) > 200);
    assert!(vm.totals().get(Counter::PageStolen) > 200);
    for page in 0..600 {
        assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1));
    }
    finish(&cpu, space, Vec::from([file]));
}

#[test]
fn reclaim_takes_what_is_not_used_from_whichever_node_it_is_in() {
    let vm = tiers(&[128, 512]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(450, 0);
    let file = file(&cpu, &memory);
    map_object(&cpu, &space, (0, 450), Prot::READ, SHARED, (&file, 0));
    (0..450).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
    let read_used = || {
        (0..64).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
    };
    // At first all seem used.
    let mut freed = cpu.reclaim(1);
    read_used();
    let again = || vm.totals().get(Counter::WorkingsetRefault);
    let before = again();
    while freed < 340 {
        read_used();
        freed += cpu.reclaim(30);
    }
    read_used();
    assert_eq!(again(), before, "pages that are used left memory");
    // The others left both nodes.
    let [fast, slow, _] = places(&cpu, &space, 64..450);
    assert!(fast < 32 && slow < 64, "{fast} {slow}");
    finish(&cpu, space, Vec::from([file]));
}

#[test]
fn one_tier_is_left_alone() {
    let vm = tiers(&[128]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 110, RW);
    (0..110).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    assert_eq!(cpu.balance(100), Balanced::default());
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}
