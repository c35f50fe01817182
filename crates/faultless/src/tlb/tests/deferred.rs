//! The number of frames that wait for a deferred flush, and the time of the flush.

use crate::addr::VirtRange;
use crate::file::Object;
use crate::knob::Setting;
use crate::machine::{CpuId, Invalidate};
use crate::reclaim::tests::tiers::tiers;
use crate::space::tests::migration_flushes::read_only_pages;
use crate::space::tests::migrations::moved;
use crate::space::{Prot, Space};
use crate::stat::Counter;
use crate::testing::guest::{
    AT, P, RW, SHARED, TestCpu, TestSpace, TestVm, between, check, cpu, load, map, map_object,
    store, two_nodes, vm, write_object,
};
use crate::testing::store::{Memory, file, finish};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::vec::Vec;

/// Runs `call` while CPU 1 runs `space` and only serves interrupts.
pub(crate) fn beside<R>(vm: &TestVm, space: &TestSpace, call: impl FnOnce() -> R) -> R {
    /// Ends CPU 1 even if `call` panics.
    struct Ended<'a>(&'a AtomicBool);
    impl Drop for Ended<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let ended = &ended;
        let (begin, begun) = channel();
        scope.spawn(move || {
            let other = cpu(vm, 1);
            space.activate(&other);
            begin.send(()).unwrap();
            while !ended.load(Ordering::Acquire) {
                other.serve_flushes();
                thread::yield_now();
            }
            // SAFETY: the CPU uses no translations.
            unsafe { space.deactivate(&other) };
        });
        let _ended = Ended(ended);
        begun.recv().unwrap();
        call()
    })
}

fn settled(vm: &TestVm) -> u64 {
    vm.totals().get(Counter::DeferredSettled)
}

/// One sixteenth of the permitted number, and the frames of the batch that reaches this limit.
#[test]
fn a_limited_part_of_memory_waits_for_a_flush() {
    for (limit, most) in [(511, 32), (256, 16)] {
        let vm = two_nodes(256);
        vm.set(Setting::FrameLimit(limit));
        let cpu = cpu(&vm, 0);
        let space = read_only_pages(&cpu, 128);
        beside(&vm, &space, || {
            for first in (0..128).step_by(16) {
                assert_eq!(moved(&cpu, &space, (first, 16), 1), [Ok(1); 16]);
                assert!(vm.usage().flush_pending <= most, "{} wait", vm.usage().flush_pending);
            }
        });
        assert_eq!(settled(&vm), 128 / most - 1);
        assert_eq!(
            vm.totals().get(Counter::TlbShootdownSent),
            settled(&vm),
            "one shootdown for each flush"
        );
        check(&cpu, &[&space], &[], 0);
        space.exit(&cpu);
    }
}

/// CPUs that flush by themselves are not interrupted, and half as many wait as may.
#[test]
fn cpu_flushes_release_frames() {
    let vm = two_nodes(256);
    let (cpu0, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = read_only_pages(&cpu0, 128);
    space.activate(&other);
    for first in (0..128).step_by(4) {
        assert_eq!(moved(&cpu0, &space, (first, 4), 1), [Ok(1); 4]);
        assert!(vm.usage().flush_pending <= 20, "{} wait", vm.usage().flush_pending);
        other.flush_if_asked();
    }
    assert_eq!((settled(&vm), vm.totals().get(Counter::TlbShootdownSent)), (0, 0));
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&other) };
    check(&cpu0, &[&space], &[], 0);
    space.exit(&cpu0);
}

/// Some of the waiting frames are released without a flush, which leaves as many as the limit
/// allows.
#[test]
fn no_flush_is_deferred_at_the_limit() {
    let vm = two_nodes(260);
    let (cpu0, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let (space, second) = (read_only_pages(&cpu0, 64), read_only_pages(&cpu0, 8));
    space.activate(&other);
    assert_eq!(moved(&cpu0, &space, (0, 1), 1), [Ok(1)]);
    vm.deferred.ask();
    other.flush_if_asked();
    // One frame is too few to search for.
    assert_eq!(moved(&cpu0, &space, (16, 32), 1), [Ok(1); 32]);
    assert_eq!(vm.usage().flush_pending, 1 + 32);
    assert_eq!(moved(&cpu0, &second, (0, 8), 1), [Ok(1); 8]);
    assert_eq!((vm.usage().flush_pending, settled(&vm)), (32, 0));
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&other) };
    check(&cpu0, &[&space, &second], &[], 0);
    [space, second].into_iter().for_each(|space| space.exit(&cpu0));
}

/// The writable pages of a batch are flushed at once, whatever their position, and the other pages
/// wait.
#[test]
fn writable_pages_of_a_batch_are_flushed_at_once() {
    for writable in 0..16_u64 {
        let vm = two_nodes(2048);
        let cpu = cpu(&vm, 0);
        let space = read_only_pages(&cpu, 4);
        for page in (0..4).filter(|page| writable & (1 << page) != 0) {
            space.mprotect(&cpu, AT + page * P, P, RW).unwrap();
            store(&cpu, &space, AT + page * P, page).unwrap();
        }
        let count = || [Counter::TlbFlush, Counter::FrameOwed].map(|it| vm.totals().get(it));
        let [flushes, flush_pending] = count();
        beside(&vm, &space, || assert_eq!(moved(&cpu, &space, (0, 4), 1), [Ok(1); 4]));
        let found = [count()[0] - flushes, count()[1] - flush_pending];
        let stay = 4 - u64::from(writable.count_ones());
        assert_eq!(found, [u64::from(writable != 0), stay], "{writable:b}");
        assert_eq!(vm.usage().flush_pending, stay);
        check(&cpu, &[&space], &[], 0);
        space.exit(&cpu);
    }
}

/// An operation that removes permissions may not have flushed yet.
#[test]
fn claimed_pages_of_a_batch_are_flushed_at_once() {
    for claimed in [0, 7, 15] {
        let vm = tiers(3, &[2048, 2048]);
        let [cpu0, other] = [0, 2].map(|id| cpu(&vm, id));
        let space = read_only_pages(&cpu0, 16);
        let count = || [Counter::TlbFlush, Counter::FrameOwed].map(|it| vm.totals().get(it));
        let [flushes, flush_pending] = count();
        let page = VirtRange::page(AT + claimed * P);
        let claim = space.claim_shared(&other, page, Counter::RangeLockShared);
        beside(&vm, &space, || assert_eq!(moved(&cpu0, &space, (0, 16), 1), [Ok(1); 16]));
        drop(claim);
        assert_eq!([count()[0] - flushes, count()[1] - flush_pending], [1, 15], "page {claimed}");
        check(&cpu0, &[&space], &[], 0);
        space.exit(&cpu0);
    }
}

/// Pages of a batch may have mappings in several spaces, whichever of which is found first.
#[test]
fn a_batch_marks_the_flush_of_each_space() {
    for runs in 0..2 {
        let vm = two_nodes(256);
        let cpu = cpu(&vm, 0);
        let memory = Memory::new(8, 0);
        let file = file(&cpu, &memory);
        let spaces = [(); 2].map(|()| {
            let space = Space::new(&cpu).unwrap();
            map_object(&cpu, &space, (0, 8), Prot::READ, SHARED, (&file, 0));
            (0..8).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
            space
        });
        beside(&vm, &spaces[runs], || {
            assert_eq!(moved(&cpu, &spaces[0], (0, 8), 1), [Ok(1); 8]);
            assert_eq!(
                (vm.usage().flush_pending, vm.totals().get(Counter::TlbShootdownSent)),
                (8, 0)
            );
            cpu.flush_deferred();
            assert_eq!(vm.totals().get(Counter::TlbShootdownSent), 1, "space {runs}");
        });
        let stamps = spaces.each_ref().map(|space| space.core.pending.stamp());
        assert!(stamps[0] != 0 && stamps[0] == stamps[1], "{stamps:?}");
        let [first, second] = spaces;
        second.exit(&cpu);
        finish(&cpu, first, Vec::from([file]));
    }
}

/// A collected flush does not count for a later deferral.
#[test]
fn a_deferral_after_a_collection_waits() {
    let vm = two_nodes(256);
    let (cpu0, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = read_only_pages(&cpu0, 8);
    space.activate(&other);
    assert_eq!(moved(&cpu0, &space, (0, 1), 1), [Ok(1)]);
    other.flush_local();
    assert_eq!(cpu0.free_flushed(), 1);
    assert_eq!(moved(&cpu0, &space, (1, 1), 1), [Ok(1)]);
    assert_eq!((cpu0.release_flushed(), vm.usage().flush_pending), (0, 1));
    // SAFETY: no access follows.
    unsafe { space.deactivate(&other) };
    cpu0.flush_deferred();
    check(&cpu0, &[&space], &[], 0);
    space.exit(&cpu0);
}

/// The frame is in no waiting list, so its deferred flush is done at once.
#[test]
fn a_referenced_moving_page_is_flushed_at_once() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = read_only_pages(&cpu, 1);
    let frame = space.entry_at(&cpu, AT).frame();
    let refer = |_: &TestCpu<'_>| assert!(vm.frames.meta(frame).get_ref_unless_zero());
    assert_eq!(between(&vm, refer, || moved(&cpu, &space, (0, 1), 1)), [Ok(1)]);
    assert_eq!((vm.usage().flush_pending, settled(&vm)), (0, 1));
    // SAFETY: the reference above, which never was a mapping.
    unsafe { cpu.put_unmapped(frame) };
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// The frames that wait for a flush belong to the full node.
#[test]
fn a_move_to_a_full_node_flushes_for_its_frames() {
    let vm = two_nodes(4096);
    let cpu = cpu(&vm, 0);
    let space = read_only_pages(&cpu, 6);
    assert_eq!(moved(&cpu, &space, (0, 6), 1), [Ok(1); 6]);
    assert_eq!(moved(&cpu, &space, (0, 6), 0), [Ok(0); 6]);
    fill(&cpu, &space, 1);
    assert_eq!(vm.usage().flush_pending, 12);
    assert_eq!(moved(&cpu, &space, (0, 6), 1), [Ok(1); 6]);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// Runs `test` with a subsystem of two CPUs, and a file of which enough pages are read to leave
/// `left` of 1,023 frames free.
fn read_until(left: u64, test: impl FnOnce(&TestVm, &TestCpu<'_>, &TestSpace)) {
    let vm = vm(2, 1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(1000, 0);
    let file = file(&cpu, &memory);
    map_object(&cpu, &space, (0, 1000), Prot::READ, SHARED, (&file, 0));
    for page in 0.. {
        cpu.drain();
        if vm.free_frames() <= left {
            break;
        }
        assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1));
    }
    test(&vm, &cpu, &space);
    finish(&cpu, space, Vec::from([file]));
}

/// The frames that wait for a flush are about to become free. Background reclaim evicts no further
/// pages for them, and interrupts no CPU while frames remain.
#[test]
fn background_reclaim_waits_for_flushing_cpus() {
    read_until(80, |vm, here, space| {
        let other = cpu(vm, 1);
        space.activate(&other);
        let freed = here.reclaim_ahead();
        // Two parts in 16 are to be had.
        assert!((47..47 + 32).contains(&freed) && vm.usage().flush_pending == freed, "{freed}");
        assert_eq!(here.reclaim_ahead(), 0);
        assert_eq!(vm.usage().flush_pending, freed);
        other.flush_if_asked();
        assert_eq!(here.reclaim_ahead(), 0);
        assert_eq!((vm.usage().flush_pending, vm.frames.missing()), (0, 0));
        assert_eq!((settled(vm), vm.totals().get(Counter::DeferredOwn)), (0, 1));
        // SAFETY: the CPU uses no translations.
        unsafe { space.deactivate(&other) };
        other.drain();
    });
}

#[test]
fn background_reclaim_flushes_if_memory_is_short() {
    read_until(62, |vm, here, space| {
        let freed = beside(vm, space, || here.reclaim_ahead());
        assert!(freed >= 65, "{freed}");
        assert_eq!((vm.usage().flush_pending, vm.frames.missing(), settled(vm)), (0, 0, 1));
        cpu(vm, 1).drain();
    });
}

#[test]
fn a_background_cpu_flushes_on_request() {
    let vm = two_nodes(256);
    let (cpu0, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = read_only_pages(&cpu0, 16);
    space.activate(&other);
    assert_eq!(moved(&cpu0, &space, (0, 8), 1), [Ok(1); 8]);
    assert_eq!(moved(&cpu0, &space, (8, 8), 1), [Ok(1); 8], "the move requests a flush");
    assert_eq!(other.reclaim_ahead(), 0, "memory is plentiful");
    assert_eq!(vm.totals().get(Counter::DeferredOwn), 1);
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&other) };
    check(&cpu0, &[&space], &[], 0);
    space.exit(&cpu0);
}

#[test]
fn a_cpu_reading_from_a_store_flushes_on_request() {
    let vm = two_nodes(256);
    let (cpu0, other) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = read_only_pages(&cpu0, 16);
    let memory = Memory::new(64, 0);
    let file = file(&cpu0, &memory);
    space.activate(&other);
    assert_eq!(moved(&cpu0, &space, (0, 8), 1), [Ok(1); 8]);
    file.read_ahead(&other, 0..1).unwrap();
    assert_eq!(vm.totals().get(Counter::DeferredOwn), 0);
    assert_eq!(moved(&cpu0, &space, (8, 8), 1), [Ok(1); 8], "the move requests a flush");
    file.read_ahead(&other, 40..41).unwrap();
    assert_eq!(vm.totals().get(Counter::DeferredOwn), 1);
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&other) };
    finish(&cpu0, space, Vec::from([file]));
}

/// A kernel store to an object does the flush that is deferred for a moved page of the object. Each
/// object of a batch is marked, whatever the order of the pages.
#[test]
fn a_store_to_an_object_waits_for_the_flush_of_its_moved_pages() {
    for order in [[0, 0, 1], [0, 1, 0], [1, 0, 0]] {
        for stored in 0..2 {
            let vm = two_nodes(256);
            let cpu = cpu(&vm, 0);
            let objects = [(); 2].map(|()| Object::try_new(&cpu, 3, 0).unwrap());
            let space = Space::new(&cpu).unwrap();
            for (page, object) in (0..).zip(order.map(|object: usize| &objects[object])) {
                write_object(&cpu, object, page, page + 1).unwrap();
                map_object(&cpu, &space, (page, 1), Prot::READ, SHARED, (object, page));
                assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1));
            }
            beside(&vm, &space, || {
                assert_eq!(moved(&cpu, &space, (0, 3), 1), [Ok(1); 3]);
                assert_eq!(
                    (vm.usage().flush_pending, settled(&vm)),
                    (3, 0),
                    "the flush is deferred"
                );
                for object in &objects {
                    assert!(cpu.is_pending(&object.pending), "{order:?}");
                }
                let page = order.iter().position(|object| *object == stored).unwrap() as u64;
                write_object(&cpu, &objects[stored], page, 9).unwrap();
                assert_eq!(settled(&vm), 1, "{order:?}: the store came before the flush");
            });
            space.exit(&cpu);
            objects.into_iter().for_each(|object| Object::release(object, &cpu));
        }
    }
}

/// Stores to new pages, which move to `node` until the node has no free frame.
fn fill(cpu: &TestCpu<'_>, space: &TestSpace, node: u8) {
    map(cpu, space, 100, 5000, RW);
    for page in 100.. {
        if cpu.vm().frames.free_on(node, cpu) == 0 {
            break;
        }
        store(cpu, space, AT + page * P, page).unwrap();
        assert_eq!(moved(cpu, space, (page, 1), node), [Ok(node)]);
    }
}

/// A single flush covers any number of pages of the space.
#[test]
fn pages_of_a_space_that_move_together_are_flushed_once() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 8, RW);
    space.activate(&cpu);
    (0..8).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    vm.machine().invalidated.lock().unwrap().clear();
    assert_eq!(moved(&cpu, &space, (0, 8), 1), [Ok(1); 8]);
    let flushes = || core::mem::take(&mut *vm.machine().invalidated.lock().unwrap());
    let all = Invalidate::Range(VirtRange::new(AT, AT + 8 * P));
    assert_eq!(flushes(), [(CpuId(0), space.id(), all)]);
    // A page without a possible translation in any CPU is not flushed.
    space.mprotect(&cpu, AT, 8 * P, Prot::empty()).unwrap();
    vm.set(Setting::DeferredFlush(false));
    flushes();
    assert_eq!(moved(&cpu, &space, (0, 8), 0), [Ok(0); 8]);
    assert_eq!(flushes(), []);
    // SAFETY: the CPU uses no translations.
    unsafe { space.deactivate(&cpu) };
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}
