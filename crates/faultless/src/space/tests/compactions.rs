//! Compaction: blocks become free, and programs notice nothing.

use super::guest::{AT, P, RW, TestCpu, TestSpace, check, cpu, load, map, store, vm};
use crate::reclaim::compact::Limits;
use crate::space::Space;
use crate::stat::Counter;
use std::vec::Vec;

/// log2 of the frames of a block.
const ORDER: u8 = 5;
const PAGES: u64 = 700;

fn limits(blocks: u64, pages: u64) -> Limits {
    Limits { order: ORDER, blocks, pages, looks: u64::MAX, each: (1 << ORDER) - 1 }
}

/// Stores to all pages, and gives all but one in `kept` up.
fn scatter(cpu: &TestCpu<'_>, space: &TestSpace, kept: u64) -> Vec<u64> {
    map(cpu, space, 0, PAGES, RW);
    (0..PAGES).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
    let goes = |page: &u64| page % kept != 0;
    for page in (0..PAGES).filter(goes) {
        space.munmap(cpu, AT + page * P, P).unwrap();
    }
    cpu.drain();
    (0..PAGES).filter(|page| !goes(page)).collect()
}

fn free_blocks(cpu: &TestCpu<'_>) -> u64 {
    cpu.vm().frames.free_blocks(ORDER, u64::MAX, cpu)
}

fn holds(cpu: &TestCpu<'_>, space: &TestSpace, pages: &[u64]) {
    for page in pages {
        assert_eq!(load(cpu, space, AT + page * P), Ok(*page));
    }
    check(cpu, &[space], &[], 0);
}

#[test]
fn scattered_pages_come_together() {
    let vm = vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let pages = scatter(&cpu, &space, 8);
    let before = free_blocks(&cpu);
    let done = cpu.compact_by(limits(u64::MAX, u64::MAX));
    let after = free_blocks(&cpu);
    assert_eq!(after, before + done.blocks);
    // Page tables and what was there at the start leave a few blocks as they are.
    assert!(done.blocks >= 14, "{before} and {done:?}");
    assert!(done.moved <= pages.len() as u64, "{done:?}");
    assert_eq!(vm.totals().get(Counter::MigrateSuccess), done.moved);
    assert_eq!(vm.totals().get(Counter::CompactBlock), done.blocks);
    holds(&cpu, &space, &pages);
    assert_eq!(cpu.compact_by(limits(u64::MAX, u64::MAX)).blocks, 0, "all is together");
    holds(&cpu, &space, &pages);
    space.exit(&cpu);
}
