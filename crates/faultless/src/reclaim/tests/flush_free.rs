//! Pages cached by no CPU are moved and evicted without a flush.

use super::swap::{count, swap_on};
use crate::fault::Access;
use crate::knob::Setting;
use crate::space::tests::migrations::moved;
use crate::space::{Advice, Prot, Space};
use crate::stat::Counter;
use crate::testing::guest::{AT, P, RW, SHARED, TestCpu, TestSpace, TestVm};
use crate::testing::guest::{check, cpu, load, map, map_object, store, two_nodes};
use crate::testing::store::{Memory, file, finish};
use crate::tlb::tests::deferred::beside;
use std::vec::Vec;

const PAGES: u64 = 8;

/// Creates a space with private pages that have been stored to. `MADV_COLD` ages the pages, since
/// there is a swap area.
fn pages(cpu: &TestCpu<'_>, pages: u64) -> TestSpace {
    cpu.vm().set(Setting::PrefaultMaxOrder(0));
    swap_on(cpu, 2000);
    let space = Space::new(cpu).unwrap();
    map(cpu, &space, 0, pages, RW);
    (0..pages).for_each(|page| store(cpu, &space, AT + page * P, 7 + page).unwrap());
    space
}

fn age(cpu: &TestCpu<'_>, space: &TestSpace) {
    space.madvise(cpu, AT, PAGES * P, Advice::Cold).unwrap();
}

fn end(vm: &TestVm, cpu: &TestCpu<'_>, space: TestSpace) {
    (0..PAGES).for_each(|page| assert_eq!(load(cpu, &space, AT + page * P), Ok(7 + page)));
    check(cpu, &[&space], &[], 0);
    assert_eq!(vm.usage().flush_pending, 0);
    space.exit(cpu);
}

/// Creates a space with pages that were aged before CPU 1 dropped its translations. CPU 1 runs the
/// space and serves no requests: a CPU that sent a request would wait forever.
fn dropped(vm: &TestVm) -> (TestCpu<'_>, TestCpu<'_>, TestSpace) {
    let (here, other) = (cpu(vm, 0), cpu(vm, 1));
    let space = pages(&here, PAGES);
    space.activate(&other);
    age(&here, &space);
    other.flush_local();
    (here, other, space)
}

/// Moves pages to `node`. Returns the number of pages moved without a flush, and of interrupted
/// CPUs.
fn moves(cpu: &TestCpu<'_>, space: &TestSpace, (first, pages): (u64, u64), node: u8) -> [u64; 2] {
    let counts =
        || [Counter::FlushNeedless, Counter::TlbShootdownSent].map(|counter| count(cpu, counter));
    let before = counts();
    let all = moved(cpu, space, (first, pages), node);
    assert!(all.iter().all(|page| *page == Ok(node)), "{all:?}");
    core::array::from_fn(|at| counts()[at] - before[at])
}

#[test]
fn pages_dropped_by_all_cpus_move_without_a_flush() {
    let vm = two_nodes(256);
    let (here, other, space) = dropped(&vm);
    let flushes = count(&here, Counter::TlbFlush);
    assert_eq!(moves(&here, &space, (0, PAGES), 1), [PAGES, 0]);
    assert_eq!((count(&here, Counter::TlbFlush), vm.usage().flush_pending), (flushes, 0));
    // No CPU has a translation to the new frames either.
    assert_eq!(moves(&here, &space, (0, PAGES), 0), [PAGES, 0]);
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&other) };
    end(&vm, &here, space);
}

#[test]
fn a_page_used_since_needs_a_flush() {
    let vm = two_nodes(256);
    let (here, other, space) = dropped(&vm);
    assert!(space.walk(&other, AT + 2 * P, Access::Read).is_some());
    // SAFETY: the CPU uses no translations from here on.
    unsafe { space.deactivate(&other) };
    let flushes = count(&here, Counter::TlbFlush);
    assert_eq!(moves(&here, &space, (0, PAGES), 1), [PAGES - 1, 0]);
    assert_eq!(count(&here, Counter::TlbFlush), flushes + 1);
    end(&vm, &here, space);
}

/// A flush counts only after the accessed bit was cleared.
#[test]
fn an_earlier_flush_does_not_count() {
    let vm = two_nodes(256);
    let here = cpu(&vm, 0);
    let space = pages(&here, PAGES);
    beside(&vm, &space, || ());
    age(&here, &space);
    beside(&vm, &space, || assert_eq!(moves(&here, &space, (0, PAGES), 1), [0, 1]));
    // The CPU drops all its translations when it leaves the space.
    here.flush_local();
    beside(&vm, &space, || ());
    beside(&vm, &space, || {
        assert_eq!(moves(&here, &space, (0, PAGES), 0), [PAGES, 0]);
    });
    end(&vm, &here, space);
}

#[test]
fn without_deferred_flushes_every_page_is_flushed() {
    let vm = two_nodes(256);
    let here = cpu(&vm, 0);
    vm.set(Setting::DeferredFlush(false));
    let space = pages(&here, PAGES);
    age(&here, &space);
    let flushes = count(&here, Counter::TlbFlush);
    assert_eq!(moves(&here, &space, (0, PAGES), 1), [0, 0]);
    assert_eq!(count(&here, Counter::TlbFlush), flushes + 1);
    end(&vm, &here, space);
}

/// `MADV_FREE` of a clean page does not flush, but clears the accessed bit.
#[test]
fn a_page_freed_lazily_twice_needs_a_flush() {
    let vm = two_nodes(256);
    let (here, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = pages(&here, PAGES);
    age(&here, &space);
    space.madvise(&here, AT, PAGES * P, Advice::Free).unwrap();
    space.activate(&other);
    other.flush_local();
    assert!(space.walk(&other, AT, Access::Read).is_some());
    space.madvise(&here, AT, P, Advice::Free).unwrap();
    // SAFETY: the CPU uses no translations from here on.
    unsafe { space.deactivate(&other) };
    let flushes = count(&here, Counter::TlbFlush);
    assert_eq!(moves(&here, &space, (0, 1), 1), [0, 0]);
    assert_eq!(count(&here, Counter::TlbFlush), flushes + 1);
    end(&vm, &here, space);
}

/// A CPU still reaches the frame which the page left without a flush. This CPU must flush before
/// the page leaves without a flush again.
#[test]
fn a_page_moved_by_a_deferred_flush_is_not_cold() {
    let vm = two_nodes(256);
    let (here, other) = (cpu(&vm, 0), cpu(&vm, 1));
    vm.set(Setting::PrefaultMaxOrder(0));
    let memory = Memory::new(8, 0);
    let file = file(&here, &memory);
    let space = Space::new(&here).unwrap();
    map_object(&here, &space, (0, 1), Prot::READ, SHARED, (&file, 0));
    space.activate(&other);
    load(&here, &space, AT).unwrap();
    assert!(space.walk(&other, AT, Access::Read).is_some());
    space.madvise(&here, AT, P, Advice::Cold).unwrap();
    assert_eq!(moves(&here, &space, (0, 1), 1), [0, 0]);
    space.madvise(&here, AT, P, Advice::PageOut).unwrap();
    assert!(space.entry_at(&here, AT).is_none());
    assert!(here.is_pending(&space.core.evicted), "the unmapping call flushes");
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&other) };
    finish(&here, space, Vec::from([file]));
}

/// The CPU that unmaps a page may have used the page.
#[test]
fn a_translation_of_this_cpu_needs_a_flush() {
    let vm = two_nodes(256);
    let here = cpu(&vm, 0);
    let space = pages(&here, PAGES);
    space.activate(&here);
    age(&here, &space);
    assert_eq!(moves(&here, &space, (0, PAGES), 1), [0, 0]);
    here.flush_local();
    assert_eq!(moves(&here, &space, (0, PAGES), 0), [PAGES, 0]);
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&here) };
    end(&vm, &here, space);
}

/// All entries of a page must be idle.
#[test]
fn a_page_used_in_another_space_needs_a_flush() {
    let vm = two_nodes(256);
    let here = cpu(&vm, 0);
    let space = pages(&here, PAGES);
    age(&here, &space);
    let child = space.fork(&here).unwrap();
    assert_eq!(moves(&here, &child, (0, PAGES), 1)[0], 0);
    child.exit(&here);
    end(&vm, &here, space);
}
