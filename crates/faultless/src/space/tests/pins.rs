//! Pages used by a device through their frames.

use crate::addr::FrameNumber;
use crate::error::Errno;
use crate::fault::{Access, FaultError, FaultKind};
use crate::file::Object;
use crate::frame::{FrameMeta, FrameUse};
use crate::heap::Shared;
use crate::machine::Machine;
use crate::space::{Advice, DeviceMemory, Pins, PrivateCopies, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::table::format::{CacheMode, USER_END};
use crate::testing::TestMachine;
use crate::testing::guest::{self, AT, P, PRIVATE, RW, SHARED, TestCpu, TestSpace, TestVm};
use crate::testing::guest::{
    check, cpu, load, map, map_object, read_object, store, with_space, write_object,
};
use std::thread;
use std::vec::Vec;

const TO: u64 = 2 << 30;

fn pin<'v>(
    cpu: &TestCpu<'v>,
    space: &TestSpace,
    page: u64,
    pages: u64,
    write: bool,
) -> Result<Pins<'v, TestMachine>, Errno> {
    let pins = space.pin(cpu, AT + page * P, pages * P, write).map_err(|error| error.errno)?;
    assert_eq!(pins.frames().len() as u64, pages);
    Ok(pins)
}

/// Returns the first word of a frame, as a device accesses the frame.
fn word(cpu: &TestCpu<'_>, frame: FrameNumber) -> *mut u64 {
    cpu.vm().machine().frame_bytes(frame).cast()
}

fn device_load(cpu: &TestCpu<'_>, frame: FrameNumber) -> u64 {
    // SAFETY: a word of a pinned page.
    unsafe { word(cpu, frame).read() }
}

fn device_store(cpu: &TestCpu<'_>, frame: FrameNumber, value: u64) {
    // SAFETY: a word of a pinned page.
    unsafe { word(cpu, frame).write(value) }
}

fn frame_of(cpu: &TestCpu<'_>, space: &TestSpace, page: u64) -> Option<FrameNumber> {
    space.page_at(cpu, AT + page * P).map(|at| at.frame)
}

/// Maps memory of the machine's device, uncached.
fn map_device(cpu: &TestCpu<'_>, space: &TestSpace, page: u64, pages: u64) -> Result<u64, Errno> {
    let (first, cache) = (cpu.vm().machine().device(), CacheMode::Uncached);
    let device = DeviceMemory { first, cache, tag: 0, may_write: true };
    // SAFETY: device memory of the test machine, without other users.
    let mapped = unsafe { space.mmap_device(cpu, AT + page * P, pages * P, RW, SHARED, device) };
    mapped.map_err(|error| error.errno)
}

/// Maps the whole of an object, shared at `AT` and private behind.
fn map_both(cpu: &TestCpu<'_>, space: &TestSpace, file: &Shared<Object>) {
    let pages = file.pages();
    map_object(cpu, space, (0, pages), RW, SHARED, (file, 0));
    map_object(cpu, space, (pages, pages), RW, PRIVATE, (file, 0));
}

/// Maps `pages` pages, and stores to each its number plus 10.
fn map_numbered(cpu: &TestCpu<'_>, space: &TestSpace, pages: u64) {
    map(cpu, space, 0, pages, RW);
    (0..pages).for_each(|page| store(cpu, space, AT + page * P, 10 + page).unwrap());
}

/// As many pins of the first page as can be counted.
fn pin_often<'v>(cpu: &TestCpu<'v>, space: &TestSpace) -> Vec<Pins<'v, TestMachine>> {
    (0..FrameMeta::MAX_PINS).map(|_| pin(cpu, space, 0, 1, true).unwrap()).collect()
}

#[test]
fn a_device_and_the_program_see_each_others_stores() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 8, RW);
        store(cpu, space, AT + P, 1).unwrap();
        load(cpu, space, AT + 2 * P).unwrap();
        for write in [false, true] {
            let pins = space.pin(cpu, AT + 100, 3 * P, write).unwrap();
            let frames = pins.frames();
            assert_eq!(frames.len(), 4, "a part of a page is pinned whole");
            for (page, &frame) in (0..).zip(frames) {
                assert_eq!(frame_of(cpu, space, page), Some(frame));
                assert!(space.page_at(cpu, AT + page * P).unwrap().pinned);
                device_store(cpu, frame, 50 + page);
                assert_eq!(load(cpu, space, AT + page * P), Ok(50 + page));
                store(cpu, space, AT + page * P, 60 + page).unwrap();
                assert_eq!(device_load(cpu, frame), 60 + page);
            }
        }
        assert!(!space.page_at(cpu, AT).unwrap().pinned);
        assert!(pin(cpu, space, 0, 0, true).unwrap().frames().is_empty());
    });
}

#[test]
fn a_refused_pin_leaves_no_page_pinned() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 2, RW);
        map(cpu, space, 2, 1, Prot::READ);
        map(cpu, space, 3, 1, Prot::empty());
        let refused = |page, pages, write| pin(cpu, space, page, pages, write).map(drop);
        assert_eq!(refused(0, 3, true), Err(Errno::EFAULT), "read-only");
        assert_eq!(refused(0, 3, false), Ok(()));
        assert_eq!(refused(0, 4, false), Err(Errno::EFAULT), "no permission");
        assert_eq!(refused(4, 1, false), Err(Errno::EFAULT), "no page");
        for (addr, len) in [(USER_END - P, 2 * P), (u64::MAX, 2), (AT, u64::MAX), (USER_END, 1)] {
            let error = space.pin(cpu, addr, len, false).unwrap_err();
            assert_eq!((error.operation, error.errno), ("pin", Errno::EFAULT), "{addr:#x}");
        }
        let file = Object::try_new(cpu, 1, 0).unwrap();
        for flags in [SHARED, PRIVATE] {
            map_object(cpu, space, (8, 2), RW, flags, (&file, 0));
            assert_eq!(refused(8, 2, true), Err(Errno::EFAULT), "beyond the end");
            assert_eq!(refused(8, 2, false), Err(Errno::EFAULT));
        }
        map_device(cpu, space, 20, 1).unwrap();
        assert_eq!(refused(20, 1, false), Err(Errno::EFAULT), "device memory");
        for page in 0..3 {
            assert!(!space.page_at(cpu, AT + page * P).unwrap().pinned);
        }
        Object::release(file, cpu);
    });
}

/// A range with few mappings. Memory for the frame list is not allocated in advance: the full list
/// would exceed the heap.
#[test]
fn a_hole_in_a_huge_range_is_no_memory_error() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 1, RW);
        for len in [1 << 40, USER_END - AT] {
            let error = space.pin(cpu, AT, len, true).unwrap_err();
            assert_eq!(error.errno, Errno::EFAULT, "{len:#x}");
            assert!(!space.page_at(cpu, AT).unwrap().pinned);
        }
        // A growing list, of pins of one page.
        let file = Object::try_new(cpu, 1, 0).unwrap();
        for page in 0..1024 {
            map_object(cpu, space, (page, 1), RW, SHARED, (&file, 0));
        }
        let refused = |pages| pin(cpu, space, 0, pages, true).map(drop);
        assert_eq!(refused(1000), Ok(()));
        assert_eq!(refused(1024), Err(Errno::ENOMEM), "the limit of pins of one page");
        assert!(!space.page_at(cpu, AT).unwrap().pinned);
        Object::release(file, cpu);
    });
}

/// Removes the mapping of the first pages.
type TakeAway = fn(&TestCpu<'_>, &TestSpace);

/// Whatever call removes the mapping, the frame stays as long as the pin.
#[test]
fn a_pin_outlives_the_mapping() {
    let take_away: [TakeAway; 4] = [
        |cpu, space| space.munmap(cpu, AT, 2 * P).unwrap(),
        |cpu, space| space.madvise(cpu, AT, 2 * P, Advice::DontNeed).unwrap(),
        |cpu, space| map(cpu, space, 0, 2, RW),
        |cpu, space| {
            let keep = RemapFlags::MAYMOVE | RemapFlags::DONTUNMAP;
            let to = space.mremap(cpu, AT, 2 * P, 2 * P, keep, 0).unwrap();
            space.munmap(cpu, to, 2 * P).unwrap();
        },
    ];
    for take_away in take_away {
        with_space(|cpu, space| {
            map(cpu, space, 0, 2, RW);
            let pins = pin(cpu, space, 0, 2, true).unwrap();
            let again = pin(cpu, space, 1, 1, false).unwrap();
            device_store(cpu, pins.frames()[0], 5);
            take_away(cpu, space);
            check(cpu, &[space], &[], 2);
            // Other mappings use all other memory in the meantime.
            map(cpu, space, 8, 300, RW);
            let all = (8..308).map_while(|page| store(cpu, space, AT + page * P, 9).ok()).count();
            assert!(all > 200);
            assert_eq!(device_load(cpu, pins.frames()[0]), 5);
            space.munmap(cpu, AT + 8 * P, 300 * P).unwrap();
            drop(pins);
            check(cpu, &[space], &[], 1);
            drop(again);
        });
    }
}

#[test]
fn a_pin_outlives_its_space_and_needs_no_cpu() {
    let vm = guest::vm(2, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 2, RW);
    let pins = pin(&cpu, &space, 0, 2, true).unwrap();
    space.exit(&cpu);
    check(&cpu, &[], &[], 2);
    device_store(&cpu, pins.frames()[1], 7);
    thread::scope(|scope| {
        scope.spawn(move || drop(pins));
    });
    check(&cpu, &[], &[], 0);
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

#[test]
fn fork_copies_pinned_pages() {
    with_space(|cpu, space| {
        map_numbered(cpu, space, 4);
        let pins = pin(cpu, space, 1, 2, true).unwrap();
        let child = space.fork(cpu).unwrap();
        // Only the pinned pages are copied.
        let same = |page| frame_of(cpu, space, page) == frame_of(cpu, &child, page);
        assert_eq!([0, 1, 2, 3].map(same), [true, false, false, true]);
        check(cpu, &[space, &child], &[], 0);
        assert_eq!(
            [0, 1, 2, 3].map(|page| load(cpu, &child, AT + page * P).unwrap()),
            [10, 11, 12, 13]
        );
        // A store of the parent stays on the device's page.
        assert_eq!(space.fault_remote(cpu, AT + P, Access::Write), Ok(FaultKind::Reuse));
        store(cpu, space, AT + P, 21).unwrap();
        assert_eq!(device_load(cpu, pins.frames()[0]), 21);
        device_store(cpu, pins.frames()[1], 22);
        assert_eq!(load(cpu, space, AT + 2 * P), Ok(22));
        // The child's pages are private to the child.
        store(cpu, &child, AT + P, 31).unwrap();
        assert_eq!([1, 2].map(|page| load(cpu, &child, AT + page * P).unwrap()), [31, 12]);
        assert_eq!(device_load(cpu, pins.frames()[0]), 21);
        assert!(!child.page_at(cpu, AT + P).unwrap().pinned);
        // A second generation, and a generation after the pins are dropped.
        let second = space.fork(cpu).unwrap();
        assert_ne!(frame_of(cpu, space, 1), frame_of(cpu, &second, 1));
        drop(pins);
        let third = space.fork(cpu).unwrap();
        assert_eq!(frame_of(cpu, space, 1), frame_of(cpu, &third, 1));
        check(cpu, &[space, &child, &second, &third], &[], 0);
        [child, second, third].into_iter().for_each(|child| child.exit(cpu));
    });
}

/// A pin of a page that was already shared gives the space its own copy, also for loads.
#[test]
fn a_pin_copies_previously_shared_pages() {
    for (write, prot) in [(true, RW), (false, RW), (false, Prot::READ)] {
        with_space(|cpu, space| {
            map(cpu, space, 0, 2, RW);
            store(cpu, space, AT, 5).unwrap();
            let child = space.fork(cpu).unwrap();
            space.mprotect(cpu, AT, 2 * P, prot).unwrap();
            let before = frame_of(cpu, space, 0);
            assert_eq!(before, frame_of(cpu, &child, 0));
            let pins = pin(cpu, space, 0, 2, write).unwrap();
            assert_ne!(frame_of(cpu, space, 0), before);
            assert_eq!(frame_of(cpu, &child, 0), before);
            check(cpu, &[space, &child], &[], 0);
            assert_eq!([0, 1].map(|at| device_load(cpu, pins.frames()[at])), [5, 0]);
            assert_eq!(store(cpu, space, AT, 6).is_ok(), prot == RW);
            // Whatever the later protection, stores reach the same frame.
            space.mprotect(cpu, AT, 2 * P, RW).unwrap();
            store(cpu, space, AT, 6).unwrap();
            store(cpu, space, AT + P, 7).unwrap();
            assert_eq!([0, 1].map(|at| device_load(cpu, pins.frames()[at])), [6, 7]);
            space.mprotect(cpu, AT, 2 * P, Prot::READ).unwrap();
            space.mprotect(cpu, AT, 2 * P, Prot::empty()).unwrap();
            space.mprotect(cpu, AT, 2 * P, RW).unwrap();
            store(cpu, space, AT, 8).unwrap();
            assert_eq!(device_load(cpu, pins.frames()[0]), 8);
            assert_eq!(load(cpu, &child, AT), Ok(5));
            child.exit(cpu);
        });
    }
}

/// Stores of another space to the formerly shared page do not reach the device.
#[test]
fn a_pin_does_not_see_stores_of_another_space() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 1, RW);
        store(cpu, space, AT, 5).unwrap();
        let child = space.fork(cpu).unwrap();
        space.mprotect(cpu, AT, P, Prot::READ).unwrap();
        let pins = pin(cpu, space, 0, 1, false).unwrap();
        space.munmap(cpu, AT, P).unwrap();
        store(cpu, &child, AT, 6).unwrap();
        assert_eq!(device_load(cpu, pins.frames()[0]), 5);
        drop(pins);
        child.exit(cpu);
    });
}

#[test]
fn shared_object_pages_are_pinned_in_place() {
    with_space(|cpu, space| {
        let file = Object::try_new(cpu, 4, 0).unwrap();
        (0..2).for_each(|index| write_object(cpu, &file, index, 40 + index).unwrap());
        map_both(cpu, space, &file);
        load(cpu, space, AT + 4 * P).unwrap();
        let shared = pin(cpu, space, 0, 3, true).unwrap();
        let private = pin(cpu, space, 4, 3, false).unwrap();
        let usage = |page| space.page_at(cpu, AT + page * P).unwrap().usage;
        assert_eq!((usage(0), usage(4)), (FrameUse::Shared, FrameUse::Anon));
        let seen =
            |pins: &Pins<'_, TestMachine>| [0, 1, 2].map(|at| device_load(cpu, pins.frames()[at]));
        assert_eq!((seen(&shared), seen(&private)), ([40, 41, 0], [40, 41, 0]));
        device_store(cpu, shared.frames()[1], 99);
        assert_eq!(read_object(cpu, &file, 1), Some(99));
        assert_eq!(load(cpu, space, AT + 5 * P), Ok(41));
        // Fork shares the object's pages, pinned or not.
        let child = space.fork(cpu).unwrap();
        store(cpu, &child, AT, 77).unwrap();
        assert_eq!(device_load(cpu, shared.frames()[0]), 77);
        assert_ne!(frame_of(cpu, &child, 4), frame_of(cpu, space, 4));
        child.exit(cpu);
        // The pages leave the object, and the device keeps the frames.
        file.set_pages(cpu, 0).unwrap();
        space.revoke(cpu, &file, 0..u64::MAX, PrivateCopies::Drop);
        check(cpu, &[space], &[&file], 6);
        assert_eq!((seen(&shared), seen(&private)), ([77, 99, 0], [40, 41, 0]));
        drop((shared, private));
        Object::release(file, cpu);
    });
}

/// A read-only private mapping of an object: the page is copied, and stays read-only.
#[test]
fn a_pin_copies_read_only_pages() {
    with_space(|cpu, space| {
        let file = Object::try_new(cpu, 2, 0).unwrap();
        write_object(cpu, &file, 0, 40).unwrap();
        map_object(cpu, space, (0, 2), Prot::READ, PRIVATE, (&file, 0));
        let pins = pin(cpu, space, 0, 2, false).unwrap();
        write_object(cpu, &file, 0, 41).unwrap();
        assert_eq!((device_load(cpu, pins.frames()[0]), load(cpu, space, AT)), (40, Ok(40)));
        assert_eq!(store(cpu, space, AT, 1), Err(FaultError::Segv { mapped: true }));
        check(cpu, &[space], &[&file], 0);
        drop(pins);
        Object::release(file, cpu);
    });
}

/// Allocates all remaining frames.
fn fill(cpu: &TestCpu<'_>, space: &TestSpace) {
    map(cpu, space, 600, 400, RW);
    let full = (600..1000).find_map(|page| store(cpu, space, AT + page * P, 1).err());
    assert_eq!(full, Some(FaultError::OutOfMemory));
}

#[test]
fn reclaim_skips_pinned_pages() {
    with_space(|cpu, space| {
        map_numbered(cpu, space, 4);
        // Pinned before the advice, after the advice for loads, after the advice for stores, and
        // not pinned.
        let before = pin(cpu, space, 0, 1, true).unwrap();
        space.madvise(cpu, AT, 4 * P, Advice::Free).unwrap();
        let loads = pin(cpu, space, 1, 1, false).unwrap();
        let stores = pin(cpu, space, 2, 1, true).unwrap();
        device_store(cpu, before.frames()[0], 20);
        device_store(cpu, stores.frames()[0], 22);
        let dirty = [0, 1, 2, 3].map(|page| space.entry_at(cpu, AT + page * P).is_dirty());
        assert_eq!(dirty, [true, false, true, false]);
        let freed = cpu.vm().totals();
        fill(cpu, space);
        assert_eq!(cpu.vm().totals().since(&freed).get(Counter::LazilyFreed), 1);
        assert_eq!(device_load(cpu, loads.frames()[0]), 11);
        assert_eq!(frame_of(cpu, space, 1), Some(loads.frames()[0]));
        // The page stored to by the device stays. A page only read by the device is freed.
        drop((before, loads, stores));
        space.munmap(cpu, AT + 600 * P, 400 * P).unwrap();
        fill(cpu, space);
        assert_eq!(cpu.vm().totals().since(&freed).get(Counter::LazilyFreed), 2);
        space.munmap(cpu, AT + 600 * P, 400 * P).unwrap();
        assert_eq!(
            [0, 1, 2, 3].map(|page| load(cpu, space, AT + page * P).unwrap()),
            [20, 0, 22, 0]
        );
    });
}

#[test]
fn pins_are_counted_up_to_a_limit() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 2, RW);
        let all = pin_often(cpu, space);
        assert_eq!(all.len(), 1023);
        assert_eq!(pin(cpu, space, 0, 2, true).map(drop), Err(Errno::ENOMEM));
        assert_eq!(pin(cpu, space, 1, 1, false).map(drop), Ok(()));
        // Mappings are counted separately.
        let child = space.fork(cpu).unwrap();
        store(cpu, space, AT, 3).unwrap();
        assert_eq!(load(cpu, &child, AT), Ok(0));
        child.exit(cpu);
        space.munmap(cpu, AT, P).unwrap();
        assert_eq!(device_load(cpu, all[0].frames()[0]), 3);
        check(cpu, &[space], &[], 1);
    });
}

#[test]
fn a_pin_without_memory_leaves_no_page_pinned() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 300, RW);
        assert_eq!(pin(cpu, space, 0, 300, true).map(drop), Err(Errno::ENOMEM));
        assert!(!space.page_at(cpu, AT).unwrap().pinned);
        let kept = pin(cpu, space, 0, 1, true).unwrap();
        assert!(space.fork(cpu).is_err(), "no free frame for the copy");
        store(cpu, space, AT, 4).unwrap();
        assert_eq!(device_load(cpu, kept.frames()[0]), 4);
    });
}

/// The page moves together with the device's pin.
#[test]
fn a_pin_follows_a_move() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 2, RW);
        let pins = pin(cpu, space, 0, 2, true).unwrap();
        let to = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        space.mremap(cpu, AT, 2 * P, 2 * P, to, TO).unwrap();
        store(cpu, space, TO + P, 8).unwrap();
        assert_eq!(device_load(cpu, pins.frames()[1]), 8);
        let child = space.fork(cpu).unwrap();
        store(cpu, space, TO, 9).unwrap();
        assert_eq!((device_load(cpu, pins.frames()[0]), load(cpu, &child, TO)), (9, Ok(0)));
        child.exit(cpu);
    });
}

/// One CPU pins and unpins while other CPUs fork, store and discard: no store of a device or a
/// program is lost.
#[test]
fn pins_beside_forks_and_stores() {
    const ROUNDS: u64 = if cfg!(miri) { 5 } else { 2000 };
    let vm: TestVm = guest::vm(3, 512);
    let [first, second, third] = [0, 1, 2].map(|id| cpu(&vm, id));
    let space = Space::new(&third).unwrap();
    map(&third, &space, 0, 4, RW);
    thread::scope(|scope| {
        let space = &space;
        scope.spawn(move || {
            for round in 1..=ROUNDS {
                let pins = pin(&first, space, 0, 1, true).unwrap();
                device_store(&first, pins.frames()[0], round);
                assert_eq!(
                    load(&first, space, AT),
                    Ok(round),
                    "the program uses another page than the device"
                );
                store(&first, space, AT, round + 1).unwrap();
                assert_eq!(device_load(&first, pins.frames()[0]), round + 1);
            }
            first.drain();
        });
        scope.spawn(move || {
            for _ in 0..ROUNDS {
                let child = space.fork(&second).unwrap();
                store(&second, &child, AT, 0).unwrap();
                child.exit(&second);
            }
            second.drain();
        });
        for round in 0..ROUNDS {
            let pins = pin(&third, space, 1, 1, false).unwrap();
            store(&third, space, AT + P, round).unwrap();
            assert_eq!(device_load(&third, pins.frames()[0]), round);
            space.madvise(&third, AT + P, P, Advice::DontNeed).unwrap();
        }
    });
    check(&third, &[&space], &[], 0);
    space.exit(&third);
}

/// A pin for loads of a page shared by parent and child, while another CPU stores to the page in
/// one of the spaces. The other space must not see the store.
#[test]
fn an_aborted_pin_leaks_no_store_to_the_other_space() {
    for same_space in [false, true] {
        for nth in 1.. {
            let vm = guest::vm(2, 256);
            let [first, second] = [0, 1].map(|id| cpu(&vm, id));
            let space = Space::new(&first).unwrap();
            map(&first, &space, 0, 1, RW);
            store(&first, &space, AT, 1).unwrap();
            let child = space.fork(&first).unwrap();
            // Both spaces are shared and have no owner.
            assert_eq!([&space, &child].map(|space| load(&second, space, AT)), [Ok(1); 2]);
            let (writer, other) = if same_space { (&space, &child) } else { (&child, &space) };
            let worst = move || {
                store(&second, writer, AT, 2).unwrap();
                assert_eq!(load(&second, other, AT), Ok(1), "check {nth}, same {same_space}");
            };
            let body = || drop(pin(&first, &space, 0, 1, false).unwrap());
            let ran = vm.machine().at_look(nth, worst, body);
            child.exit(&first);
            space.exit(&first);
            if !ran {
                break;
            }
        }
    }
}

/// The object's page has the maximum number of pins. A private mapping still gets a copy.
#[test]
fn a_private_pin_does_not_pin_the_object_page() {
    with_space(|cpu, space| {
        let file = Object::try_new(cpu, 1, 0).unwrap();
        map_both(cpu, space, &file);
        store(cpu, space, AT, 5).unwrap();
        assert_eq!(load(cpu, space, AT + P), Ok(5));
        let all = pin_often(cpu, space);
        assert_eq!(pin(cpu, space, 1, 1, false).map(drop), Ok(()));
        drop(all);
        Object::release(file, cpu);
    });
}

/// Pins do not count as mappings: an object's pinned page is shared with a child like any other.
#[test]
fn fork_shares_a_pinned_page_of_an_object() {
    with_space(|cpu, space| {
        let file = Object::try_new(cpu, 2, 0).unwrap();
        map_both(cpu, space, &file);
        store(cpu, space, AT, 5).unwrap();
        assert_eq!(load(cpu, space, AT + 2 * P), Ok(5));
        // An anon_vma, so that fork shares the pages.
        store(cpu, space, AT + 3 * P, 6).unwrap();
        let pins = pin(cpu, space, 0, 1, true).unwrap();
        let child = space.fork(cpu).unwrap();
        assert_eq!(frame_of(cpu, &child, 2), Some(pins.frames()[0]));
        child.exit(cpu);
        drop(pins);
        Object::release(file, cpu);
    });
}

/// A region without frames overlaps no device.
#[test]
fn an_empty_region_does_not_refuse_a_device() {
    let mut machine = TestMachine::new(1, 256);
    let first = machine.device();
    let empty = crate::MemoryRegion { node: 0, first: FrameNumber(first.0 + 1), frames: 0 };
    machine.regions.push(empty);
    let vm = crate::Vm::new(machine).unwrap();
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    assert_eq!(map_device(&cpu, &space, 0, 4), Ok(AT));
    space.exit(&cpu);
}

/// A pin for loads copies a lazily freed page in read-only memory. The copy is dirty, and not
/// lazily freed.
#[test]
fn a_page_copied_by_a_pin_is_not_lazily_freed() {
    with_space(|cpu, space| {
        map_numbered(cpu, space, 4);
        let child = space.fork(cpu).unwrap();
        store(cpu, space, AT, 10).unwrap();
        store(cpu, space, AT + 3 * P, 13).unwrap();
        space.madvise(cpu, AT, 4 * P, Advice::Free).unwrap();
        space.mprotect(cpu, AT, 4 * P, Prot::READ).unwrap();
        drop(pin(cpu, space, 1, 1, false).unwrap());
        fill(cpu, space);
        assert_eq!([0, 1, 2, 3].map(|page| load(cpu, space, AT + page * P).is_ok()), [true; 4]);
        assert_eq!([1, 2].map(|page| load(cpu, space, AT + page * P)), [Ok(11), Ok(12)]);
        child.exit(cpu);
    });
}
