//! `move_pages` of read-only pages: the flush of their translations is deferred.

use super::migrations::{moved, value};
use crate::knob::Setting;
use crate::space::{Prot, Space};
use crate::stat::Counter;
use crate::testing::guest::{
    AT, P, RW, TestCpu, TestSpace, check, cpu, load, map, store, two_nodes,
};
use std::vec::Vec;

/// Creates a space with eight read-only pages.
fn read_only_space(cpu: &TestCpu<'_>) -> TestSpace {
    read_only_pages(cpu, 8)
}

/// Creates a space with `pages` read-only pages.
pub(crate) fn read_only_pages(cpu: &TestCpu<'_>, pages: u64) -> TestSpace {
    let space = Space::new(cpu).unwrap();
    map(cpu, &space, 0, pages, RW);
    (0..pages).for_each(|page| store(cpu, &space, AT + page * P, value(1, page)).unwrap());
    space.mprotect(cpu, AT, pages * P, Prot::READ).unwrap();
    space
}

#[test]
fn read_only_pages_move_without_an_interrupt() {
    let vm = two_nodes(256);
    let (cpu0, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = read_only_space(&cpu0);
    // The CPU serves no requests: a CPU that sent a request would wait forever.
    space.activate(&other);
    let count = |counter| vm.totals().get(counter);
    assert_eq!(moved(&cpu0, &space, (0, 8), 1), [Ok(1); 8]);
    assert_eq!(count(Counter::TlbShootdownSent), 0);
    assert_eq!((count(Counter::FlushDeferred), count(Counter::FrameOwed)), (1, 8));
    assert_eq!(vm.usage().flush_pending, 8);
    // The CPU drops its translations when it leaves the space, so no request is needed. SAFETY: the
    // CPU uses no translations.
    unsafe { space.deactivate(&other) };
    assert_eq!(cpu0.flush_deferred(), 8);
    assert_eq!((count(Counter::TlbShootdownSent), vm.usage().flush_pending), (0, 0));
    check(&cpu0, &[&space], &[], 0);
    space.exit(&cpu0);
}

/// CPUs are asked to flush if many frames wait. After all CPUs have flushed, no CPU is interrupted.
#[test]
fn cpus_flush_without_an_interrupt() {
    let vm = two_nodes(2048);
    let (cpu0, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = read_only_space(&cpu0);
    space.activate(&other);
    let count = |counter| vm.totals().get(counter);
    assert_eq!(moved(&cpu0, &space, (0, 4), 1), [Ok(1); 4]);
    other.flush_if_asked();
    assert_eq!(count(Counter::DeferredOwn), 0, "four frames are not many");
    assert_eq!(moved(&cpu0, &space, (4, 4), 1), [Ok(1); 4]);
    // This batch finds eight waiting frames.
    assert_eq!(moved(&cpu0, &space, (0, 1), 0), [Ok(0)]);
    assert_eq!(cpu0.free_flushed(), 0, "the other CPU may use the frames");
    other.flush_if_asked();
    other.flush_if_asked();
    assert_eq!(count(Counter::DeferredOwn), 1, "one flush is sufficient");
    assert_eq!(moved(&cpu0, &space, (1, 1), 0), [Ok(0)]);
    assert!(cpu0.free_some_flush_pending());
    assert_eq!(vm.usage().flush_pending, 1, "the last frame came after the flush");
    assert_eq!((count(Counter::TlbShootdownSent), count(Counter::DeferredSettled)), (0, 0));
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&other) };
    check(&cpu0, &[&space], &[], 0);
    space.exit(&cpu0);
}

/// Frames flushed by all CPUs are freed by a background CPU, even if memory is not short, and not
/// by a program's call.
#[test]
fn flushed_frames_are_freed_in_the_background() {
    let vm = two_nodes(2048);
    let (cpu0, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = read_only_pages(&cpu0, 64);
    space.activate(&other);
    assert_eq!(moved(&cpu0, &space, (0, 32), 1), [Ok(1); 32]);
    cpu0.reclaim_ahead();
    assert_eq!(vm.usage().flush_pending, 32, "the other CPU may use the frames");
    vm.deferred.ask();
    other.flush_if_asked();
    assert_eq!(moved(&cpu0, &space, (32, 4), 1), [Ok(1); 4]);
    assert_eq!(vm.usage().flush_pending, 36);
    cpu0.reclaim_ahead();
    assert_eq!(vm.usage().flush_pending, 4, "the last frame came after the flush");
    let sent = vm.totals().get(Counter::TlbShootdownSent);
    assert_eq!((sent, vm.totals().get(Counter::DeferredSettled)), (0, 0));
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&other) };
    check(&cpu0, &[&space], &[], 0);
    space.exit(&cpu0);
}

#[test]
fn a_store_first_does_the_deferred_flush() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = read_only_space(&cpu);
    space.activate(&cpu);
    assert_eq!(moved(&cpu, &space, (0, 8), 1), [Ok(1); 8]);
    let settled = || vm.totals().get(Counter::DeferredSettled);
    assert_eq!(settled(), 0);
    space.mprotect(&cpu, AT, 8 * P, RW).unwrap();
    assert_eq!(load(&cpu, &space, AT), Ok(value(1, 0)));
    assert_eq!(settled(), 0, "no content changes");
    store(&cpu, &space, AT, 5).unwrap();
    assert_eq!(settled(), 1);
    store(&cpu, &space, AT + P, 6).unwrap();
    assert_eq!(settled(), 1, "all deferred flushes are done");
    // Writable pages are flushed at once.
    assert_eq!(moved(&cpu, &space, (0, 2), 0), [Ok(0); 2]);
    assert_eq!(vm.totals().get(Counter::FlushDeferred), 1);
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&cpu) };
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn waiting_frames_are_used_when_needed() {
    let vm = two_nodes(64);
    let cpu = cpu(&vm, 0);
    let space = read_only_space(&cpu);
    map(&cpu, &space, 16, 200, RW);
    assert_eq!(moved(&cpu, &space, (0, 8), 1), [Ok(1); 8]);
    assert_ne!(vm.usage().flush_pending, 0);
    // All available frames are used; the last frames come from the waiting frames.
    let mut pages = 0;
    while store(&cpu, &space, AT + (16 + pages) * P, pages).is_ok() {
        pages += 1;
    }
    assert_eq!((vm.usage().flush_pending, vm.free_frames()), (0, 0), "after {pages} pages");
    (0..pages).for_each(|page| assert_eq!(load(&cpu, &space, AT + (16 + page) * P), Ok(page)));
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn no_flush_is_deferred_with_the_knob_off_or_memory_short() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = read_only_space(&cpu);
    vm.set(Setting::DeferredFlush(false));
    assert_eq!(moved(&cpu, &space, (0, 8), 1), [Ok(1); 8]);
    vm.set(Setting::DeferredFlush(true));
    let taken = vm.total_frames() - vm.free_frames();
    vm.set(Setting::FrameLimit(taken + 1));
    assert_eq!(moved(&cpu, &space, (0, 1), 0), [Ok(0)]);
    assert_eq!(vm.totals().get(Counter::FlushDeferred), 0);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn a_block_is_allocated_from_waiting_frames() {
    let vm = two_nodes(64);
    let cpu = cpu(&vm, 0);
    let space = read_only_space(&cpu);
    assert_eq!(moved(&cpu, &space, (0, 8), 1), [Ok(1); 8]);
    let mut blocks = Vec::new();
    while let Ok(block) = cpu.alloc_block(0) {
        blocks.push(block);
    }
    assert_eq!((vm.usage().flush_pending, vm.free_frames()), (0, 0));
    drop(blocks);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}
