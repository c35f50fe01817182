//! Compaction: blocks become free, and programs observe no change.

use crate::addr::FrameNumber;
use crate::fault::tests::huge::{F, FRAMES, RX, Setup};
use crate::knob::{HugeText, Setting};
use crate::machine::MemoryRegion;
use crate::reclaim::compact::Compacted;
use crate::reclaim::compact::Limits;
use crate::space::{Advice, MemPolicy, NodeSet, Prot, Space};
use crate::stat::Counter;
use crate::testing::TestMachine;
use crate::testing::guest::{AT, P, RW, TestCpu, TestSpace, check, cpu, load, map, store, vm};
use crate::vm::Vm;
use std::vec;
use std::vec::Vec;

/// log2 of the frames of a block.
const ORDER: u8 = 5;
const PAGES: u64 = 700;

fn limits(blocks: u64, pages: u64) -> Limits {
    let looks = u64::MAX;
    Limits { order: ORDER, blocks, pages, looks, each: (1 << ORDER) - 1, gathers: true }
}

/// Stores to all pages, and frees all but one page in `kept`.
fn scatter(cpu: &TestCpu<'_>, space: &TestSpace, kept: u64) -> Vec<u64> {
    map(cpu, space, 0, PAGES, RW);
    (0..PAGES).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
    let goes = |page: &u64| !page.is_multiple_of(kept);
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
fn scattered_pages_are_compacted() {
    let vm = vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let pages = scatter(&cpu, &space, 8);
    let before = free_blocks(&cpu);
    let done = cpu.compact_by(limits(u64::MAX, u64::MAX));
    let after = free_blocks(&cpu);
    assert_eq!(after, before + done.blocks);
    // Page tables and the initial allocations keep a few blocks in use.
    assert!(done.blocks >= 14, "{before} and {done:?}");
    assert!(done.moved <= pages.len() as u64, "{done:?}");
    assert_eq!(vm.totals().get(Counter::MigrateSuccess), done.moved);
    assert_eq!(vm.totals().get(Counter::CompactBlock), done.blocks);
    holds(&cpu, &space, &pages);
    assert_eq!(cpu.compact_by(limits(u64::MAX, u64::MAX)).blocks, 0, "all pages are contiguous");
    holds(&cpu, &space, &pages);
    space.exit(&cpu);
}

/// Each call moves a few pages and continues at the end of the previous call.
#[test]
fn short_calls_continue_each_other() {
    let vm = vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let pages = scatter(&cpu, &space, 8);
    let before = free_blocks(&cpu);
    let (mut calls, mut moved) = (0, 0);
    while free_blocks(&cpu) < before + 14 {
        let done = cpu.compact_by(limits(1, 3));
        assert!(done.moved <= 3 && done.blocks <= 1, "{done:?}");
        (calls, moved) = (calls + 1, moved + done.moved);
        assert!(calls < 200, "{moved} pages moved, and {} blocks are free", free_blocks(&cpu));
        holds(&cpu, &space, &pages);
    }
    assert!(moved <= pages.len() as u64 + 14, "{moved}");
    space.exit(&cpu);
}

/// Read-only pages move without an immediate flush. The flush is done before their block is
/// reported free.
#[test]
fn flushes_are_done_before_a_block_is_free() {
    let vm = vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let pages = scatter(&cpu, &space, 8);
    for page in &pages {
        space.mprotect(&cpu, AT + page * P, P, Prot::READ).unwrap();
    }
    let before = free_blocks(&cpu);
    let done = cpu.compact_by(limits(2, u64::MAX));
    assert_eq!((done.blocks, free_blocks(&cpu)), (2, before + 2));
    assert!(vm.totals().get(Counter::FrameOwed) >= done.moved, "{done:?}");
    assert_eq!(vm.frames.flush_pending_count(), 0);
    holds(&cpu, &space, &pages);
    space.exit(&cpu);
}

/// Compaction skips a block with an immovable frame, and moves no page out of the block.
#[test]
fn an_immovable_frame_keeps_its_block() {
    let vm = vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let pages = scatter(&cpu, &space, 8);
    let frame = |page: u64| space.page_at(&cpu, AT + page * P).unwrap().frame;
    let places = || pages.iter().map(|page| frame(*page)).collect::<Vec<_>>();
    let before = places();
    // Pins all pages.
    let pins: Vec<_> =
        pages.iter().map(|page| space.pin(&cpu, AT + page * P, 1, true).unwrap()).collect();
    assert_eq!(cpu.compact_by(limits(u64::MAX, u64::MAX)), Compacted::default());
    assert_eq!(places(), before);
    drop(pins);
    let pinned = pages[40];
    let pin = space.pin(&cpu, AT + pinned * P, 1, true).unwrap();
    assert!(cpu.compact_by(limits(u64::MAX, u64::MAX)).blocks >= 12);
    assert_eq!(frame(pinned), pin.frames()[0]);
    let block = |frame: FrameNumber| frame.0 >> ORDER;
    let of_pinned = || pages.iter().filter(|page| block(frame(**page)) == block(frame(pinned)));
    assert!(of_pinned().count() >= 4, "the neighbours have moved");
    drop(pin);
    holds(&cpu, &space, &pages);
    space.exit(&cpu);
}

/// Isolated frames are unavailable to other CPUs, so compaction isolates no frame if memory is
/// short.
#[test]
fn compaction_stops_while_memory_is_short() {
    let vm = vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let pages = scatter(&cpu, &space, 8);
    let taken = vm.total_frames() - vm.free_frames();
    vm.set(Setting::FrameLimit(taken + 40));
    assert_eq!(cpu.compact_by(limits(u64::MAX, u64::MAX)), Compacted::default());
    vm.set(Setting::FrameLimit(u64::MAX));
    assert!(cpu.compact_by(limits(1, u64::MAX)).blocks == 1);
    holds(&cpu, &space, &pages);
    space.exit(&cpu);
}

/// A collapse creates its free block by compaction.
#[test]
fn a_collapse_compacts() {
    let vm = vm(1, FRAMES);
    vm.set(Setting::HugeText(HugeText::Never));
    let setup = Setup::mapped(&vm, RX, crate::testing::guest::PRIVATE);
    let (cpu, space) = (&setup.cpu, &setup.space);
    (0..F).for_each(|page| assert_eq!(setup.load(page), Ok(page + 1)));
    // Nearly all memory is used, and scattered afterwards.
    const FIRST: u64 = 8 * F;
    let pages = u64::from(FRAMES) * 3 / 4;
    map(cpu, space, FIRST, pages, RW);
    let at = |page: u64| AT + (FIRST + page) * P;
    (0..pages).for_each(|page| store(cpu, space, at(page), page).unwrap());
    let mut blocks = Vec::new();
    cpu.drain();
    while let Ok(block) = cpu.alloc_block(9) {
        blocks.push(block);
    }
    for page in (0..pages).filter(|page| !page.is_multiple_of(8)) {
        space.madvise(cpu, at(page), P, Advice::DontNeed).unwrap();
    }
    cpu.drain();
    assert_eq!(cpu.free_huge_blocks(), 0);
    space.madvise(cpu, AT, F * P, Advice::Collapse).unwrap();
    assert_eq!(setup.huge(), F);
    let count = |counter| setup.count(counter);
    assert_eq!([Counter::CompactStall, Counter::CompactSuccess].map(count), [1, 1]);
    assert_eq!(count(Counter::CompactFail), 0);
    drop(blocks);
    (0..pages).step_by(8).for_each(|page| assert_eq!(load(cpu, space, at(page)), Ok(page)));
    setup.shows_all();
    setup.finish();
}

/// Node 0 has two regions, with node 1 in between.
fn interleaved() -> crate::testing::guest::TestVm {
    let mut machine = TestMachine::new(1, 512 * 6);
    let region = |node, first, frames| MemoryRegion { node, first: FrameNumber(first), frames };
    machine.regions = vec![region(0, 1, 1023), region(1, 1024, 1024), region(0, 2048, 1024)];
    let vm = Vm::new(machine).unwrap();
    vm.set(Setting::PrefaultMaxOrder(0));
    vm
}

/// The regions of two nodes may interleave.
#[test]
fn pages_stay_on_their_node() {
    let vm = interleaved();
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let all = 2900;
    map(&cpu, &space, 0, all, RW);
    (0..all).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    let kept: Vec<_> = (0..all).filter(|page| page.is_multiple_of(8)).collect();
    for page in (0..all).filter(|page| !page.is_multiple_of(8)) {
        space.munmap(&cpu, AT + page * P, P).unwrap();
    }
    cpu.drain();
    let addrs: Vec<_> = kept.iter().map(|page| AT + page * P).collect();
    let nodes = || {
        let mut nodes = vec![Ok(9); addrs.len()];
        space.page_nodes(&cpu, &addrs, &mut nodes);
        nodes
    };
    let before = nodes();
    assert!(before.contains(&Ok(0)) && before.contains(&Ok(1)));
    assert!(cpu.compact(u64::MAX).moved != 0);
    assert_eq!(nodes(), before);
    holds(&cpu, &space, &kept);
    space.exit(&cpu);
}

/// Frames of the first node, which holds the page tables, and its number of whole blocks: the first
/// block lacks a frame.
const NEAR: u32 = 8 << ORDER;
const NEAR_BLOCKS: u64 = 7;

/// Runs `test` with a second node of otherwise unused blocks. `used` gives the number of pages in
/// use in each block, from the block's first frame. The last argument of `test` contains the frames
/// of these pages in the first block.
fn with_blocks(used: &[u32], test: impl FnOnce(&TestCpu<'_>, &[FrameNumber])) {
    let size = 1 << ORDER;
    let frames = used.len() as u32 * size;
    let mut machine = TestMachine::new(1, NEAR + frames);
    let region = |node, first, frames| MemoryRegion { node, first: FrameNumber(first), frames };
    machine.regions = vec![region(0, 1, NEAR - 1), region(1, NEAR, frames)];
    let vm = Vm::new(machine).unwrap();
    vm.set(Setting::PrefaultMaxOrder(0));
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let pages = u64::from(frames);
    map(&cpu, &space, 0, pages, RW);
    space.mbind(&cpu, AT, pages * P, MemPolicy::Preferred(NodeSet::only(1))).unwrap();
    (0..pages).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    let frame = |page: u64| space.page_at(&cpu, AT + page * P).unwrap().frame;
    let is_used = |page: &u64| {
        let place = frame(*page).0 - NEAR;
        place % size < used[(place / size) as usize]
    };
    let (kept, gone): (Vec<_>, Vec<_>) = (0..pages).partition(is_used);
    gone.iter().for_each(|page| space.munmap(&cpu, AT + page * P, P).unwrap());
    cpu.drain();
    let mut first: Vec<_> =
        kept.iter().map(|page| frame(*page)).filter(|it| it.0 < NEAR + size).collect();
    first.sort_unstable();
    test(&cpu, &first);
    holds(&cpu, &space, &kept);
    space.exit(&cpu);
}

/// Only one limit: the number of blocks of the second node to scan, which the hand reaches after
/// the first node's blocks.
fn looking_at(blocks: u64) -> Limits {
    Limits { looks: NEAR_BLOCKS + blocks, ..limits(u64::MAX, u64::MAX) }
}

fn done(blocks: u64, moved: u64) -> Compacted {
    Compacted { blocks, moved }
}

#[test]
fn one_free_frame_is_room_for_one_page() {
    with_blocks(&[1, 31], |cpu, _| {
        assert_eq!(cpu.compact_by(limits(u64::MAX, u64::MAX)), done(1, 1));
    });
}

/// In a lone block, next to free blocks, and next to full blocks.
#[test]
fn pages_stay_if_no_block_becomes_free() {
    for used in [&[1][..], &[1, 0], &[0, 1], &[1, 32], &[32, 1, 0, 32]] {
        with_blocks(used, |cpu, _| {
            assert_eq!(cpu.compact_by(limits(u64::MAX, u64::MAX)), done(0, 0), "{used:?}");
        });
    }
}

#[test]
fn a_block_with_too_many_pages_is_skipped() {
    with_blocks(&[5, 4, 5], |cpu, _| {
        let few = Limits { each: 4, ..limits(u64::MAX, u64::MAX) };
        assert_eq!(cpu.compact_by(few), done(1, 4));
    });
}

#[test]
fn each_call_continues_with_the_next_block() {
    with_blocks(&[1, 1, 20], |cpu, _| {
        assert_eq!(cpu.compact_by(looking_at(0)), done(0, 0));
        assert_eq!(cpu.compact_by(looking_at(1)), done(1, 1));
        assert_eq!(cpu.compact_by(looking_at(1)), done(1, 1));
        assert_eq!(cpu.compact_by(looking_at(1)), done(0, 0));
    });
}

#[test]
fn a_call_continues_with_a_partly_emptied_block() {
    with_blocks(&[4, 20], |cpu, _| {
        let two = Limits { pages: 2, ..looking_at(1) };
        assert_eq!(cpu.compact_by(two), done(0, 2));
        assert_eq!(cpu.compact_by(two), done(1, 2));
    });
}

/// A briefly referenced page stays, as do the pages behind it, because their block does not become
/// free.
#[test]
fn a_block_is_abandoned_at_an_immovable_page() {
    with_blocks(&[2, 31, 31], |cpu, first| {
        assert!(cpu.vm().frames.meta(first[0]).get_ref_unless_zero());
        assert_eq!(cpu.compact_by(limits(u64::MAX, u64::MAX)), done(0, 0));
        // SAFETY: the reference just taken, which never was a mapping.
        unsafe { cpu.put_unmapped(first[0]) };
        assert_eq!(cpu.compact_by(limits(u64::MAX, u64::MAX)), done(1, 2));
    });
}

/// A frame on this CPU's list would keep its block from becoming free.
#[test]
fn the_frames_of_the_cpu_list_are_freed_first() {
    let compacted = |is_drained: bool| {
        let vm = vm(1, 1024);
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        let pages = scatter(&cpu, &space, 8);
        let (gone, kept): (Vec<_>, Vec<_>) = pages.iter().partition(|page| *page % 5 == 0);
        gone.iter().for_each(|page| space.munmap(&cpu, AT + page * P, P).unwrap());
        if is_drained {
            cpu.drain();
        }
        let done = cpu.compact_by(limits(u64::MAX, u64::MAX));
        holds(&cpu, &space, &kept);
        space.exit(&cpu);
        done
    };
    assert_eq!(compacted(false), compacted(true));
}

/// Runs `test` with memory of which a free block of 2 MiB is one sixteenth. Nearly all memory is
/// used at first; in the end, `kept` of every eight pages stay.
fn with_large_memory(kept: u64, test: impl FnOnce(&TestCpu<'_>)) {
    let vm = vm(1, 9000);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let all = 8960;
    map(&cpu, &space, 0, all, RW);
    (0..all).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    for page in (0..all).step_by(8) {
        let from = AT + (page + kept) * P;
        space.madvise(&cpu, from, (8 - kept) * P, Advice::DontNeed).unwrap();
    }
    cpu.drain();
    assert_eq!(cpu.free_huge_blocks(), 0);
    test(&cpu);
    holds(&cpu, &space, &(0..all).filter(|page| page % 8 < kept).collect::<Vec<_>>());
    space.exit(&cpu);
}

#[test]
fn background_compaction_continues_until_a_block_is_free() {
    with_large_memory(1, |cpu| {
        let (mut moved, mut calls) = (0, 0);
        while cpu.free_huge_blocks() == 0 {
            let done = cpu.compact_ahead(20);
            assert!(done.moved <= 20, "{done:?}");
            (moved, calls) = (moved + done.moved, calls + 1);
            assert!(calls < 50, "{moved} pages moved");
        }
        assert!(moved < 2 * 512 / 8, "{moved}");
        assert_eq!(cpu.compact_ahead(20), done(0, 0), "no further block is needed");
    });
}

#[test]
fn background_compaction_frees_twice_the_moved_memory() {
    with_large_memory(5, |cpu| {
        assert_eq!(cpu.compact_ahead(u64::MAX), done(0, 0));
        assert_eq!(cpu.compact(1).blocks, 1);
    });
}

/// A call in the background without success is followed by calls that scan no block.
#[test]
fn unsuccessful_background_compaction_runs_less_often() {
    with_large_memory(5, |cpu| {
        let scanned = || cpu.vm().totals().get(Counter::CompactMigrateScanned);
        let mut calls = Vec::new();
        for call in 0..30 {
            let before = scanned();
            assert_eq!(cpu.compact_ahead(u64::MAX), done(0, 0));
            calls.extend((scanned() != before).then_some(call));
        }
        assert_eq!(calls, [0, 2, 6, 14]);
    });
}
