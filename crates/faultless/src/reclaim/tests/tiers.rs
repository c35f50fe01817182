//! Memory tiers: unused pages move to slower memory, and used pages come back.

use super::swap::swap_on;
use crate::addr::FrameNumber;
use crate::knob::Setting;
use crate::machine::MemoryRegion;
use crate::reclaim::tiers::Balanced;
use crate::space::tests::migration_flushes::read_only_pages;
use crate::space::tests::migrations::moved;
use crate::space::{Advice, Prot, Space};
use crate::stat::Counter;
use crate::testing::TestMachine;
use crate::testing::guest::map_object;
use crate::testing::guest::{
    AT, P, RW, SHARED, TestCpu, TestSpace, TestVm, check, cpu, load, map, store,
};
use crate::testing::store::{Memory, file, finish};
use crate::tlb::tests::deferred::beside;
use crate::vm::Vm;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use std::vec;
use std::vec::Vec;

/// Creates nodes of `frames` frames each, the fastest node first.
pub(crate) fn tiers(cpus: usize, frames: &[u32]) -> TestVm {
    let mut machine = TestMachine::new(cpus, frames.iter().sum());
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

/// Returns the number of `pages` in each node.
fn places(cpu: &TestCpu<'_>, space: &TestSpace, pages: Range<u64>) -> [u64; 3] {
    let addrs: Vec<_> = pages.map(|page| AT + page * P).collect();
    let mut nodes = vec![Ok(9); addrs.len()];
    space.page_nodes(cpu, &addrs, &mut nodes);
    [0, 1, 2].map(|node| nodes.iter().filter(|there| **there == Ok(node)).count() as u64)
}

/// Calls `balance` until it makes no change.
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
    panic!("balancing never ends: {all:?}");
}

#[test]
fn unused_pages_are_demoted_from_fast_memory() {
    let vm = tiers(1, &[256, 512]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 400, RW);
    (0..200).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    let free = |cpu: &TestCpu<'_>| {
        cpu.drain();
        vm.frames.free_on(0, cpu)
    };
    assert_eq!(cpu.balance(0), Balanced::default(), "fast memory has room");
    (200..250).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    let there = free(&cpu);
    assert!(there < 15, "{there}");
    balance(&cpu, 0);
    assert!(free(&cpu) >= 30, "{}", free(&cpu));
    let demoted = vm.totals().get(Counter::Demoted);
    assert!((16..60).contains(&demoted), "{demoted}");
    // Pages in use come back if they were demoted, and other pages are demoted for them.
    for _ in 0..40 {
        (0..50).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page)));
        cpu.balance(8);
    }
    assert_eq!(places(&cpu, &space, 0..50), [50, 0, 0]);
    // New pages are allocated in fast memory.
    (300..320).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    assert_eq!(places(&cpu, &space, 300..320), [20, 0, 0]);
    for page in (0..250).chain(300..320) {
        assert_eq!(load(&cpu, &space, AT + page * P), Ok(page));
    }
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn used_pages_are_promoted_at_a_limited_rate() {
    let vm = tiers(1, &[256, 512]);
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
        assert!(now <= before + 8, "{before} to {now}");
        before = now;
    }
    assert_eq!(places(&cpu, &space, 32..64), [32, 0, 0]);
    assert_eq!(before, vm.totals().get(Counter::Promoted));
    // The other pages were stored to once, before their move.
    assert!(before < 64, "{before}");
    // The hand advances by 64 of 512 frames in one call, and translations are dropped twice in each
    // round.
    let dropped = vm.totals().get(Counter::FlushAged);
    assert!((10..=15).contains(&dropped), "{dropped}");
    assert_eq!(vm.totals().get(Counter::Demoted), 0);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// The limit holds even if more of the scanned frames are in use.
#[test]
fn promotion_respects_the_requested_limit() {
    with_tiers(&[512, 2048], |cpu, space| {
        (0..400).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
        let all: Vec<_> = (0..400).map(|page| AT + page * P).collect();
        space.move_pages(cpu, &all, 1, true, &mut vec![Ok(0); 400]).unwrap();
        let mut most = [0; 3];
        for _ in 0..300 {
            use_all(cpu, space, 0..400);
            for (wanted, most) in [1, 5, 40].into_iter().zip(&mut most) {
                *most = cpu.balance(wanted).promoted.max(*most);
            }
        }
        assert_eq!(most, [1, 5, 40]);
    });
}

#[test]
fn pages_are_demoted_to_the_last_tier_and_then_evicted() {
    let vm = tiers(1, &[128, 128, 128]);
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
fn reclaim_evicts_unused_pages_of_every_node() {
    let vm = tiers(1, &[128, 512]);
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
    assert_eq!(again(), before, "used pages were evicted");
    // The other pages left both nodes.
    let [fast, slow, _] = places(&cpu, &space, 64..450);
    assert!(fast < 32 && slow < 64, "{fast} {slow}");
    finish(&cpu, space, Vec::from([file]));
}

#[test]
fn frames_between_regions_belong_to_no_node() {
    let mut machine = TestMachine::new(1, 64);
    machine.regions = [(1, 4), (0, 40)]
        .map(|(node, first)| MemoryRegion { node, first: FrameNumber(first), frames: 16 })
        .into();
    let vm = Vm::new(machine).unwrap();
    let nodes = [3, 4, 19, 20, 39, 40, 55, 56].map(|frame| vm.frame_node(FrameNumber(frame)));
    assert_eq!(nodes, [None, Some(1), Some(1), None, None, Some(0), Some(0), None]);
    let frames = [0, 1].map(|node| (vm.usage_on(node).total(), vm.usage_on(node).reserved));
    assert_eq!(frames, [(16, 0); 2]);
}

#[test]
fn frames_beyond_the_cpu_lists_are_free_in_their_node() {
    with_tiers(&[8192, 64], |cpu, space| {
        store(cpu, space, AT, 1).unwrap();
        assert_ne!(cpu.vm().frames.reserved_count(), 0);
        let free = [0, 1].map(|node| cpu.vm().free_frames_on(node));
        assert_eq!((free[0] + free[1], free[1]), (cpu.vm().free_frames(), 64));
    });
}

/// Creates a space run by both CPUs with 100 read-only pages, which leave six free frames in the
/// fast node.
fn short_of_frames(here: &TestCpu<'_>, other: &TestCpu<'_>) -> TestSpace {
    let space = read_only_pages(here, 100);
    map(here, &space, 100, 100, RW);
    fill(here, &space, 100, 0, 6);
    space.activate(other);
    space
}

/// A demoting CPU stops when the node has enough free frames again, whichever CPU freed the frames.
#[test]
fn demotion_stops_when_other_cpus_free_frames() {
    let demoted_at = |nth| {
        let vm = tiers(2, &[128, 512]);
        let here = cpu(&vm, 0);
        let [space, other] = [(); 2].map(|()| Space::new(&here).unwrap());
        map(&here, &space, 0, 200, RW);
        map(&here, &other, 0, 40, RW);
        (0..40).for_each(|page| store(&here, &other, AT + page * P, page).unwrap());
        fill(&here, &space, 0, 0, 6);
        let frees = || {
            let there = cpu(&vm, 1);
            other.munmap(&there, AT, 40 * P).unwrap();
            vm.frames.drain(there.local(), &there);
        };
        let mut demoted = 0;
        let is_reached = vm.machine().at_look(nth, frees, || demoted = here.balance(0).demoted);
        [space, other].into_iter().for_each(|space| space.exit(&here));
        (is_reached, demoted)
    };
    assert!(demoted_at(u64::MAX).1 > 8, "only the missing number of pages moves");
    assert_eq!(demoted_at(20), (true, 0));
}

/// A CPU that balances its node drops its translations on request.
#[test]
fn a_balancing_cpu_flushes_on_request() {
    let vm = tiers(2, &[128, 512]);
    let (here, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = short_of_frames(&here, &other);
    here.balance(0);
    assert_eq!(here.balance(0), Balanced::default());
    let own = || vm.totals().get(Counter::DeferredOwn);
    let before = own();
    other.balance(0);
    assert_eq!(own(), before + 1);
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&other) };
    check(&here, &[&space], &[], 0);
    space.exit(&here);
}

#[test]
fn a_single_tier_is_not_balanced() {
    let vm = tiers(1, &[128]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 110, RW);
    (0..110).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    assert_eq!(cpu.balance(100), Balanced::default());
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// Returns the free frames of a node, including the frames kept by this CPU.
pub(crate) fn free(cpu: &TestCpu<'_>, node: u8) -> u64 {
    cpu.vm().frames.drain(cpu.local(), cpu);
    cpu.vm().frames.free_on(node, cpu)
}

/// Stores to pages from `first` on, each of which moves to `node`, until the node has at most
/// `left` free frames. Returns the page behind the last stored page.
pub(crate) fn fill(cpu: &TestCpu<'_>, space: &TestSpace, first: u64, node: u8, left: u64) -> u64 {
    let mut page = first;
    while free(cpu, node) > left {
        store(cpu, space, AT + page * P, page).unwrap();
        if node != 0 {
            assert_eq!(moved(cpu, space, (page, 1), node), [Ok(node)]);
        }
        page += 1;
    }
    page
}

fn use_all(cpu: &TestCpu<'_>, space: &TestSpace, mut pages: Range<u64>) {
    assert!(pages.all(|page| load(cpu, space, AT + page * P) == Ok(page)));
}

/// Runs `test` on a CPU with nodes of so many frames and a space of many pages.
fn with_tiers(frames: &[u32], test: impl FnOnce(&TestCpu<'_>, &TestSpace)) {
    let vm = tiers(1, frames);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 1000, RW);
    test(&cpu, &space);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn promotion_keeps_some_fast_memory_free() {
    with_tiers(&[256, 96], |cpu, space| {
        let slow = fill(cpu, space, 0, 1, 30);
        // Enough free memory that no page needs to leave, but less than the promotable pages need.
        let end = fill(cpu, space, slow, 0, 24);
        assert_eq!(cpu.balance(100), Balanced::default(), "each page was used once");
        use_all(cpu, space, 0..slow);
        // 1/32 of the frames stays free. The hand advances by three frames at a time.
        let Balanced { promoted, demoted, .. } = cpu.balance(100);
        assert!((17..17 + 3).contains(&promoted) && demoted == 0, "{promoted} {demoted}");
        use_all(cpu, space, 0..end);
    });
}

#[test]
fn demotion_keeps_some_slow_memory_free() {
    with_tiers(&[128, 128], |cpu, space| {
        let slow = fill(cpu, space, 0, 1, 12);
        let end = fill(cpu, space, slow, 0, 0);
        // 1/16 of the frames stays free. The hand advances by three frames at a time.
        let Balanced { demoted, .. } = cpu.balance(0);
        assert!((4..4 + 3).contains(&demoted), "{demoted}");
        use_all(cpu, space, 0..end);
    });
}

#[test]
fn each_page_is_demoted_to_the_next_node_with_room() {
    with_tiers(&[256, 96, 96], |cpu, space| {
        let slow = fill(cpu, space, 0, 1, 16);
        let end = fill(cpu, space, slow, 0, 0);
        let Balanced { demoted, evicted, .. } = cpu.balance(0);
        // 2/16 of the frames must be free. The hand advances by seven frames at a time in each
        // node.
        assert!((31..31 + 14).contains(&demoted) && evicted == 0, "{demoted} {evicted}");
        let [_, next, last] = places(cpu, space, slow..end);
        assert!((10..10 + 7).contains(&next) && last == demoted - next, "{next} {last}");
        use_all(cpu, space, 0..end);
    });
}

#[test]
fn fast_memory_is_short_below_one_sixteenth_free() {
    with_tiers(&[256, 512], |cpu, space| {
        let end = fill(cpu, space, 0, 0, 16);
        assert_eq!(cpu.balance(0), Balanced::default());
        fill(cpu, space, end, 0, 14);
        assert_ne!(cpu.balance(0), Balanced::default());
    });
}

#[test]
fn frames_kept_by_the_cpu_count_as_free() {
    with_tiers(&[128, 512], |cpu, space| {
        fill(cpu, space, 0, 0, 0);
        space.munmap(cpu, AT, 20 * P).unwrap();
        assert!(cpu.vm().frames.free_on(0, cpu) < 7, "the frames are on the list of the CPU");
        assert_eq!(cpu.balance(0), Balanced::default());
    });
}

#[test]
fn pages_of_all_slower_nodes_share_one_promotion_rate() {
    with_tiers(&[256, 96, 96], |cpu, space| {
        let middle = fill(cpu, space, 0, 1, 60);
        let end = fill(cpu, space, middle, 2, 60);
        for _ in 0..40 {
            use_all(cpu, space, 0..end);
            let Balanced { promoted, .. } = cpu.balance(8);
            assert!(promoted < 8 + 3, "{promoted}");
        }
        assert_eq!(places(cpu, space, 0..end), [end, 0, 0]);
    });
}

#[test]
fn few_frames_are_scanned_for_a_few_pages() {
    with_tiers(&[256, 512], |cpu, space| {
        fill(cpu, space, 0, 1, 100);
        let looks = || cpu.vm().totals().get(Counter::PageScanned);
        let before = looks();
        assert_eq!(cpu.balance(1), Balanced::default());
        // Eight for each, and not all of a stride.
        assert!(looks() - before <= 8, "{}", looks() - before);
    });
}

#[test]
fn a_moved_page_keeps_its_use_count() {
    with_tiers(&[256, 96], |cpu, space| {
        let end = fill(cpu, space, 0, 1, 64);
        assert_eq!(cpu.balance(100), Balanced::default(), "each page was used once");
        for node in [0, 1] {
            assert!(moved(cpu, space, (0, end), node).iter().all(|there| *there == Ok(node)));
        }
        use_all(cpu, space, 0..end);
        assert_eq!(cpu.balance(100).promoted, end);
    });
}

/// Immovable pages do not cause evictions while there is room for movable pages.
#[test]
fn no_page_is_evicted_while_slower_nodes_have_room() {
    let vm = tiers(1, &[128, 256]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(32, 0);
    let file = file(&cpu, &memory);
    map_object(&cpu, &space, (0, 32), Prot::READ, SHARED, (&file, 0));
    (0..32).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
    assert_eq!(moved(&cpu, &space, (0, 32), 1), [Ok(1); 32]);
    cpu.flush_deferred();
    map(&cpu, &space, 32, 200, RW);
    let end = fill(&cpu, &space, 32, 0, 0);
    let pins = space.pin(&cpu, AT + 32 * P, (end - 32) * P, true).unwrap();
    assert_eq!(cpu.balance(0), Balanced::default());
    assert_eq!(file.resident_pages(&cpu), 32);
    drop(pins);
    finish(&cpu, space, Vec::from([file]));
}

/// Frames waiting for a flush will become free. No further pages are demoted for them, and no CPU
/// is interrupted while free frames remain.
#[test]
fn frames_waiting_for_a_flush_count_as_free_soon() {
    let vm = tiers(2, &[128, 512]);
    let (here, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = short_of_frames(&here, &other);
    let demoted = here.balance(0).demoted;
    assert!((9..9 + 3).contains(&demoted), "{demoted}");
    let flush_pending = vm.frames.flush_pending_on(0);
    assert!(flush_pending > 0 && free(&here, 0) == 6 + demoted - flush_pending, "{flush_pending}");
    assert_eq!(here.balance(0), Balanced::default());
    other.flush_if_asked();
    assert_eq!(here.balance(0), Balanced::default());
    assert_eq!((vm.frames.flush_pending_on(0), free(&here, 0)), (0, 6 + demoted));
    let count = |counter| vm.totals().get(counter);
    assert_eq!((count(Counter::DeferredOwn), count(Counter::DeferredSettled)), (1, 0));
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&other) };
    check(&here, &[&space], &[], 0);
    space.exit(&here);
}

/// Many frames wait, and one CPU has not flushed although requested. A CPU that moves pages then
/// interrupts this CPU. The threshold is 1/128 of all frames, and at least 16 frames per CPU.
#[test]
fn a_cpu_that_has_not_flushed_is_interrupted() {
    for (frames, enough) in [([512, 1536], 32), ([2048, 6144], 63)] {
        let vm = tiers(2, &frames);
        let cpu = cpu(&vm, 0);
        let space = read_only_pages(&cpu, 80);
        let count = |counter| vm.totals().get(counter);
        beside(&vm, &space, || {
            moved(&cpu, &space, (0, enough - 1), 1);
            assert_eq!(cpu.balance(0), Balanced::default());
            assert_eq!(
                (vm.usage().flush_pending, count(Counter::TlbShootdownSent)),
                (enough - 1, 0)
            );
            moved(&cpu, &space, (enough, 1), 1);
            assert_eq!(cpu.reclaim_ahead(), 0);
            assert_eq!((vm.usage().flush_pending, count(Counter::TlbShootdownSent)), (enough, 0));
            assert_eq!(cpu.balance(0), Balanced::default());
            assert_eq!((vm.usage().flush_pending, count(Counter::TlbShootdownSent)), (0, 1));
        });
        check(&cpu, &[&space], &[], 0);
        space.exit(&cpu);
    }
}

/// Creates a space with 1,000 read-only pages, and other pages that leave 60 free frames in the
/// fast node.
fn far_short_of_frames(cpu: &TestCpu<'_>) -> TestSpace {
    let space = read_only_pages(cpu, 1000);
    map(cpu, &space, 1000, 1100, RW);
    fill(cpu, &space, 1000, 0, 60);
    space
}

/// The limit is checked before each batch, and not only at the beginning.
#[test]
fn one_call_leaves_few_frames_waiting() {
    let vm = tiers(2, &[2048, 4096]);
    let cpu = cpu(&vm, 0);
    let space = far_short_of_frames(&cpu);
    let demoted = beside(&vm, &space, || cpu.balance(0).demoted);
    let flush_pending = vm.usage().flush_pending;
    assert!(demoted >= 150 && flush_pending < 48 + 2 * 32, "{flush_pending} wait of {demoted}");
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// Frames used only by this CPU, which flushes its own translations, become free after the
/// following batch, and not only at the end of the call.
#[test]
fn frames_of_earlier_batches_are_free_during_a_call() {
    let vm = tiers(1, &[2048, 4096]);
    let cpu = cpu(&vm, 0);
    let space = far_short_of_frames(&cpu);
    space.activate(&cpu);
    let demoted = cpu.balance(0).demoted;
    assert!(demoted >= 100, "{demoted}");
    let flush_pending = vm.frames.flush_pending_on(0);
    assert!(flush_pending <= 2 * 32, "{flush_pending} wait of {demoted}");
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&cpu) };
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// CPUs that demote concurrently therefore stop when enough frames are free.
#[test]
fn frames_of_earlier_batches_are_visible_during_a_call() {
    // The number of free frames seen by another CPU at different moments of the call.
    let seen_at = |look: u64| {
        let vm = tiers(2, &[512, 1024]);
        let here = cpu(&vm, 0);
        let space = Space::new(&here).unwrap();
        map(&here, &space, 0, 512, RW);
        fill(&here, &space, 0, 0, 0);
        let there = || vm.frames.free_on(0, &cpu(&vm, 1));
        let (mut demoted, seen) = (0, AtomicU64::new(0));
        let at_look = || seen.store(there(), Ordering::Relaxed);
        let is_reached = vm.machine().at_look(look, at_look, || demoted = here.balance(0).demoted);
        assert!(demoted >= 64, "two batches: {demoted}");
        check(&here, &[&space], &[], 0);
        space.exit(&here);
        is_reached.then_some(seen.into_inner())
    };
    let seen: Vec<_> = (1..).map_while(|part| seen_at(part * 50)).collect();
    assert!(seen.iter().any(|seen| (32..64).contains(seen)), "{seen:?}");
}

/// One flush serves a whole batch, however far apart its pages lie.
#[test]
fn distant_pages_move_in_full_batches() {
    let vm = tiers(2, &[1024, 2048]);
    let here = cpu(&vm, 0);
    vm.set(Setting::DeferredFlush(false));
    swap_on(&here, 100);
    let space = Space::new(&here).unwrap();
    map(&here, &space, 0, 1024, RW);
    let pages = fill(&here, &space, 0, 0, 0);
    for page in (0..pages).step_by(8) {
        space.madvise(&here, AT + page * P, P, Advice::Cold).unwrap();
    }
    let flushes = || vm.totals().get(Counter::TlbFlush);
    let before = flushes();
    let demoted = beside(&vm, &space, || here.balance(0).demoted);
    let flushes = flushes() - before;
    assert!(demoted >= 96, "{demoted}");
    assert!(flushes != 0 && flushes <= demoted / 32 + 1, "{flushes} for {demoted}");
    check(&here, &[&space], &[], 0);
    space.exit(&here);
}

#[test]
fn a_full_node_gets_free_frames_at_once() {
    let vm = tiers(2, &[128, 512]);
    let cpu = cpu(&vm, 0);
    let space = read_only_pages(&cpu, 100);
    map(&cpu, &space, 100, 100, RW);
    fill(&cpu, &space, 100, 0, 0);
    let demoted = beside(&vm, &space, || cpu.balance(0).demoted);
    assert!(vm.totals().get(Counter::FrameOwed) != 0);
    assert_eq!((vm.frames.flush_pending_on(0), free(&cpu, 0)), (0, demoted));
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// Creates a space with 24 pages in the slower node, whose move leaves frames waiting for a flush.
fn slow_read_only_pages(cpu: &TestCpu<'_>) -> TestSpace {
    let space = read_only_pages(cpu, 24);
    assert_eq!(moved(cpu, &space, (0, 24), 1), [Ok(1); 24]);
    cpu.flush_deferred();
    map(cpu, &space, 100, 800, RW);
    space
}

/// The waiting frames of a slower node are flushed if the node has no other frames for the pages
/// from the fast node.
#[test]
fn slower_nodes_flush_for_free_frames() {
    let vm = tiers(2, &[256, 256]);
    let cpu = cpu(&vm, 0);
    let space = slow_read_only_pages(&cpu);
    let page = fill(&cpu, &space, 100, 1, 6);
    fill(&cpu, &space, page, 0, 34);
    let demoted = beside(&vm, &space, || {
        assert_eq!(moved(&cpu, &space, (0, 24), 0), [Ok(0); 24]);
        assert_eq!((vm.frames.flush_pending_on(1), free(&cpu, 0), free(&cpu, 1)), (24, 10, 6));
        cpu.balance(0).demoted
    });
    // All frames except 1/16 of the then free frames, in strides of seven frames.
    assert!((14..14 + 7).contains(&demoted), "{demoted}");
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// While frames of a slower node wait for a flush, no page is evicted for a lack of frames.
#[test]
fn no_page_is_evicted_while_frames_wait_for_a_flush() {
    let vm = tiers(2, &[256, 256]);
    let cpu = cpu(&vm, 0);
    let space = slow_read_only_pages(&cpu);
    let memory = Memory::new(20, 0);
    let file = file(&cpu, &memory);
    map_object(&cpu, &space, (900, 20), Prot::READ, SHARED, (&file, 0));
    (900..920).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page - 899)));
    let page = fill(&cpu, &space, 100, 1, 20);
    fill(&cpu, &space, page, 0, 34);
    let balanced = beside(&vm, &space, || {
        assert_eq!(moved(&cpu, &space, (0, 24), 0), [Ok(0); 24]);
        assert_eq!((vm.frames.flush_pending_on(1), free(&cpu, 0), free(&cpu, 1)), (24, 10, 20));
        cpu.balance(0)
    });
    assert!(balanced.demoted > 0 && balanced.evicted == 0, "{balanced:?}");
    assert_eq!(vm.totals().get(Counter::PageStolen), 0);
    finish(&cpu, space, Vec::from([file]));
}

/// However much is missing, a call takes a bounded time.
#[test]
fn one_call_demotes_a_bounded_number_of_pages() {
    let vm = tiers(1, &[17_408, 4096]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 17_408, RW);
    fill(&cpu, &space, 0, 0, 100);
    let demoted = cpu.balance(0).demoted;
    // By strides of 64 frames.
    assert!((256..256 + 64).contains(&demoted), "{demoted}");
    space.exit(&cpu);
}
