//! `move_pages`: pages with any number of mappings move between nodes, and programs observe no
//! change.

use crate::error::Errno;
use crate::file::Object;
use crate::knob::{Locking, Setting};
use crate::space::{Advice, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::testing::guest::{
    AT, P, PRIVATE, RW, SHARED, TestCpu, TestSpace, between, check, cpu, load, map, map_object,
    read_object, store, two_nodes, write_object,
};
use std::thread;
use std::time::Duration;
use std::vec;
use std::vec::Vec;

/// Moves the pages from page `first` on. Returns the status of each page.
pub(crate) fn moved(
    cpu: &TestCpu<'_>,
    space: &TestSpace,
    (first, pages): (u64, u64),
    node: u8,
) -> Vec<Result<u8, Errno>> {
    let addrs: Vec<_> = (first..first + pages).map(|page| AT + page * P).collect();
    let mut status = vec![Err(Errno::EIO); addrs.len()];
    space.move_pages(cpu, &addrs, node, true, &mut status).unwrap();
    let mut now = status.clone();
    space.page_nodes(cpu, &addrs, &mut now);
    for (said, is) in status.iter().zip(&now) {
        if let Ok(node) = said {
            assert_eq!(is, &Ok(*node));
        }
    }
    status
}

/// Returns the value stored to `page` of the space number `space`.
pub(super) fn value(space: u64, page: u64) -> u64 {
    1000 * space + page
}

#[test]
fn private_pages_move_with_their_contents() {
    for locking in Locking::ALL {
        let vm = two_nodes(256);
        vm.set(Setting::Locking(locking));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, 0, 100, RW);
        (0..80).for_each(|page| store(&cpu, &space, AT + page * P, value(1, page)).unwrap());
        for node in [1, 0, 1] {
            assert_eq!(moved(&cpu, &space, (0, 80), node), vec![Ok(node); 80]);
            check(&cpu, &[&space], &[], 0);
            for page in 0..80 {
                assert_eq!(load(&cpu, &space, AT + page * P), Ok(value(1, page)));
            }
        }
        // Stores go on, to the new frames.
        store(&cpu, &space, AT + P, 7).unwrap();
        assert_eq!(load(&cpu, &space, AT + P), Ok(7));
        assert_eq!(vm.totals().get(Counter::MigrateSuccess), 240);
        // A page with one mapping needs one attempt.
        assert_eq!(vm.totals().get(Counter::MigrateFail), 0);
        space.exit(&cpu);
        cpu.drain();
        assert_eq!(vm.free_frames() + 1, vm.total_frames());
    }
}

#[test]
fn pages_that_do_not_move_report_the_reason() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 8, RW);
    store(&cpu, &space, AT, 1).unwrap();
    load(&cpu, &space, AT + P).unwrap();
    store(&cpu, &space, AT + 3 * P, 3).unwrap();
    let pins = space.pin(&cpu, AT + 3 * P, P, true).unwrap();
    let reported = [Ok(1), Err(Errno::EFAULT), Err(Errno::ENOENT), Err(Errno::EBUSY)];
    assert_eq!(moved(&cpu, &space, (0, 4), 1), reported);
    assert_eq!(vm.totals().get(Counter::MigrateFail), 1, "no other pages to try");
    drop(pins);
    assert_eq!(moved(&cpu, &space, (3, 1), 1), [Ok(1)]);
    // A page requested twice moves once, and has two results.
    let mut status = [Err(Errno::EIO); 2];
    space.move_pages(&cpu, &[AT, AT + 8], 0, false, &mut status).unwrap();
    assert_eq!(status, [Ok(0); 2]);
    let mut refused = |node, pages: &[u64]| {
        space.move_pages(&cpu, pages, node, true, &mut status).unwrap_err().errno
    };
    assert_eq!(refused(2, &[AT, AT]), Errno::ENODEV);
    assert_eq!(refused(1, &[AT]), Errno::EINVAL);
    // Nowhere is no page.
    let mut nodes = [Ok(9); 3];
    space.page_nodes(&cpu, &[0, u64::MAX, AT + 3 * P], &mut nodes);
    assert_eq!(nodes, [Err(Errno::EFAULT), Err(Errno::EFAULT), Ok(1)]);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn a_full_node_accepts_no_pages() {
    let vm = two_nodes(64);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 100, RW);
    (0..100).for_each(|page| store(&cpu, &space, AT + page * P, value(1, page)).unwrap());
    let reported = moved(&cpu, &space, (0, 100), 1);
    assert!(reported.iter().any(|reported| reported == &Err(Errno::ENOMEM)), "{reported:?}");
    for page in 0..100 {
        assert_eq!(load(&cpu, &space, AT + page * P), Ok(value(1, page)));
    }
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn shared_pages_move_in_all_forked_spaces() {
    let vm = two_nodes(512);
    let cpu = cpu(&vm, 0);
    let mut spaces = vec![Space::new(&cpu).unwrap()];
    map(&cpu, &spaces[0], 0, 8, RW);
    (0..8).for_each(|page| store(&cpu, &spaces[0], AT + page * P, value(0, page)).unwrap());
    // Children, and a child of a child, each of which has written one page.
    for child in 1..6 {
        let parent = if child == 5 { 4 } else { 0 };
        let new = spaces[parent].fork(&cpu).unwrap();
        store(&cpu, &new, AT + child as u64 * P, value(child as u64, child as u64)).unwrap();
        spaces.push(new);
    }
    let mut status = [Err(Errno::EIO)];
    spaces[2].move_pages(&cpu, &[AT], 1, false, &mut status).unwrap();
    assert_eq!(status, [Err(Errno::EACCES)], "other spaces map the page");
    assert_eq!(moved(&cpu, &spaces[2], (0, 8), 1), [Ok(1); 8]);
    let all: Vec<_> = spaces.iter().collect();
    check(&cpu, &all, &[], 0);
    // The shared pages moved in all spaces. Private pages of other spaces stayed.
    let mut nodes = [Err(Errno::EIO); 6];
    spaces[3].page_nodes(&cpu, &[0, 1, 2, 3, 4, 5].map(|page| AT + page * P), &mut nodes);
    assert_eq!(nodes, [Ok(1), Ok(1), Ok(0), Ok(0), Ok(1), Ok(1)]);
    for (number, space) in spaces.iter().enumerate() {
        for page in 0..8 {
            let own = page == number as u64 && number != 0 || (number == 5 && page == 4);
            let maker = if own { if page == 4 { 4 } else { number as u64 } } else { 0 };
            assert_eq!(load(&cpu, space, AT + page * P), Ok(value(maker, page)), "{number} {page}");
        }
    }
    spaces.into_iter().for_each(|space| space.exit(&cpu));
    cpu.drain();
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

#[test]
fn a_walk_visits_only_the_mappings_of_a_page() {
    let vm = two_nodes(512);
    let cpu = cpu(&vm, 0);
    let first = Space::new(&cpu).unwrap();
    map(&cpu, &first, 0, 2, RW);
    store(&cpu, &first, AT, 1).unwrap();
    // Each generation forks the next, and ends.
    let mut last = first;
    for _ in 0..if cfg!(miri) { 5 } else { 200 } {
        let next = last.fork(&cpu).unwrap();
        last.exit(&cpu);
        last = next;
    }
    let looks = |space: &TestSpace, page, node| {
        let before = vm.totals().get(Counter::RmapLook);
        assert_eq!(moved(&cpu, space, (page, 1), node), [Ok(node)]);
        vm.totals().get(Counter::RmapLook) - before
    };
    assert_eq!(looks(&last, 0, 1), 1, "one space of the family remains");
    // A private page among many related spaces.
    let others: Vec<_> = (0..20).map(|_| last.fork(&cpu).unwrap()).collect();
    store(&cpu, &last, AT + P, 2).unwrap();
    assert_eq!(looks(&last, 1, 1), 1);
    store(&cpu, &others[7], AT + P, 2).unwrap();
    assert_eq!(looks(&others[7], 1, 1), 1);
    assert_eq!(looks(&last, 0, 0), 21, "all spaces map the page");
    others.into_iter().chain([last]).for_each(|space| space.exit(&cpu));
    cpu.drain();
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

#[test]
fn pages_moved_by_mremap_are_found() {
    let vm = two_nodes(512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 8, RW);
    (0..4).for_each(|page| store(&cpu, &space, AT + page * P, value(0, page)).unwrap());
    let child = space.fork(&cpu).unwrap();
    store(&cpu, &space, AT, 9).unwrap();
    let there = AT + (1 << 30);
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    space.mremap(&cpu, AT, 8 * P, 8 * P, flags, there).unwrap();
    check(&cpu, &[&space, &child], &[], 0);
    let addrs = [0, 1, 2, 3].map(|page| there + page * P);
    let mut status = [Err(Errno::EIO); 4];
    space.move_pages(&cpu, &addrs, 1, true, &mut status).unwrap();
    assert_eq!(status, [Ok(1); 4]);
    // A part moves on, and a grandchild is forked.
    space.mremap(&cpu, there + 2 * P, 2 * P, 2 * P, flags, AT).unwrap();
    let grandchild = space.fork(&cpu).unwrap();
    check(&cpu, &[&space, &child, &grandchild], &[], 0);
    assert_eq!(moved(&cpu, &grandchild, (0, 2), 0), [Ok(0); 2]);
    assert_eq!(load(&cpu, &child, AT + 2 * P), Ok(value(0, 2)));
    assert_eq!([0, P].map(|at| load(&cpu, &space, AT + at)), [Ok(value(0, 2)), Ok(value(0, 3))]);
    assert_eq!(load(&cpu, &space, there), Ok(9));
    [space, child, grandchild].into_iter().for_each(|space| space.exit(&cpu));
}

#[test]
fn pages_of_an_object_move_with_all_of_their_mappings() {
    let vm = two_nodes(512);
    let cpu = cpu(&vm, 0);
    let object = Object::try_new(&cpu, 16, 1).unwrap();
    let spaces = [(); 2].map(|()| Space::new(&cpu).unwrap());
    map_object(&cpu, &spaces[0], (0, 8), RW, SHARED, (&object, 4));
    map_object(&cpu, &spaces[0], (32, 4), Prot::READ, PRIVATE, (&object, 6));
    map_object(&cpu, &spaces[1], (3, 8), RW, SHARED, (&object, 4));
    (4..12).for_each(|index| write_object(&cpu, &object, index, 100 + index).unwrap());
    for page in 0..8 {
        assert_eq!(load(&cpu, &spaces[1], AT + (3 + page) * P), Ok(104 + page));
    }
    assert_eq!(load(&cpu, &spaces[0], AT + 32 * P), Ok(106));
    assert_eq!(moved(&cpu, &spaces[1], (3, 8), 1), [Ok(1); 8]);
    check(&cpu, &[&spaces[0], &spaces[1]], &[&object], 0);
    // All mappings still show the same page.
    store(&cpu, &spaces[0], AT + 2 * P, 77).unwrap();
    assert_eq!(load(&cpu, &spaces[1], AT + 5 * P), Ok(77));
    assert_eq!(load(&cpu, &spaces[0], AT + 32 * P), Ok(77));
    assert_eq!(read_object(&cpu, &object, 6), Some(77));
    write_object(&cpu, &object, 6, 78).unwrap();
    assert_eq!(load(&cpu, &spaces[0], AT + 2 * P), Ok(78));
    // A part of a mapping, and a part of a split mapping, are found as well.
    spaces[1].munmap(&cpu, AT + 4 * P, P).unwrap();
    spaces[1].mprotect(&cpu, AT + 6 * P, P, Prot::READ).unwrap();
    assert_eq!(moved(&cpu, &spaces[1], (5, 6), 0), [Ok(0); 6]);
    check(&cpu, &[&spaces[0], &spaces[1]], &[&object], 0);
    spaces.into_iter().for_each(|space| space.exit(&cpu));
    Object::release(object, &cpu);
    cpu.drain();
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

/// More mappings of an object, and more objects, than a walk remembers from one page to the next.
#[test]
fn pages_of_many_objects_with_many_mappings_move() {
    let vm = two_nodes(512);
    let cpu = cpu(&vm, 0);
    let objects = [(); 6].map(|()| Object::try_new(&cpu, 2, 1).unwrap());
    let spaces = [(); 2].map(|()| Space::new(&cpu).unwrap());
    let at = |object: usize, mapping: u64| mapping * 12 + 2 * object as u64;
    for (number, object) in objects.iter().enumerate() {
        for mapping in 0..100 {
            let space = &spaces[mapping as usize % 2];
            map_object(&cpu, space, (at(number, mapping), 2), RW, SHARED, (object, 0));
            for page in 0..2 {
                let addr = AT + (at(number, mapping) + page) * P;
                store(&cpu, space, addr, value(number as u64, page)).unwrap();
            }
        }
    }
    for node in [1, 0] {
        assert_eq!(moved(&cpu, &spaces[0], (0, 12), node), [Ok(node); 12]);
        check(&cpu, &[&spaces[0], &spaces[1]], &objects.each_ref(), 0);
    }
    for (number, object) in objects.iter().enumerate() {
        for page in 0..2 {
            let addr = AT + (at(number, 99) + page) * P;
            assert_eq!(load(&cpu, &spaces[1], addr), Ok(value(number as u64, page)));
            assert_eq!(read_object(&cpu, object, page), Some(value(number as u64, page)));
        }
    }
    spaces.into_iter().for_each(|space| space.exit(&cpu));
    objects.into_iter().for_each(|object| Object::release(object, &cpu));
    cpu.drain();
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

/// The mappings claimed for pages beyond the limit are released.
#[test]
fn pages_move_up_to_the_frame_limit() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 32, RW);
    (0..32).for_each(|page| store(&cpu, &space, AT + page * P, value(1, page)).unwrap());
    cpu.drain();
    vm.frames.set_limit(vm.total_frames() - vm.free_frames() + 3);
    let status = moved(&cpu, &space, (0, 8), 1);
    assert_eq!(status.iter().filter(|status| **status == Ok(1)).count(), 3, "{status:?}");
    vm.frames.set_limit(u64::MAX);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// A walk copies a few mappings of the list at a time. Sometimes all copied mappings belong to an
/// ending, already closed space.
#[test]
fn mappings_before_an_ending_space_are_found() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let object = Object::try_new(&cpu, 1, 1).unwrap();
    let [first, ending, last] = [(); 3].map(|()| Space::new(&cpu).unwrap());
    for (space, mappings) in [(&first, 1), (&ending, 40), (&last, 70)] {
        (0..mappings).for_each(|at| map_object(&cpu, space, (2 * at, 1), RW, SHARED, (&object, 0)));
    }
    store(&cpu, &first, AT, 7).unwrap();
    ending.core.close(&cpu);
    assert_eq!(moved(&cpu, &first, (0, 1), 1), [Ok(1)]);
    check(&cpu, &[&first, &ending, &last], &[&object], 0);
    assert_eq!(load(&cpu, &first, AT), Ok(7));
    [first, ending, last].into_iter().for_each(|space| space.exit(&cpu));
    Object::release(object, &cpu);
    cpu.drain();
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

#[test]
fn hidden_and_lazily_freed_pages_keep_their_state() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 8, RW);
    (0..8).for_each(|page| store(&cpu, &space, AT + page * P, value(1, page)).unwrap());
    space.mprotect(&cpu, AT, P, Prot::empty()).unwrap();
    space.madvise(&cpu, AT + 4 * P, P, Advice::Free).unwrap();
    assert_eq!(moved(&cpu, &space, (0, 8), 1), [Ok(1); 8]);
    check(&cpu, &[&space], &[], 0);
    assert_eq!(cpu.reclaim_lazy(8), 1, "the page is still lazily freed");
    space.mprotect(&cpu, AT, P, RW).unwrap();
    assert_eq!(load(&cpu, &space, AT), Ok(value(1, 0)));
    assert_eq!(load(&cpu, &space, AT + 4 * P), Ok(0));
    space.exit(&cpu);
}

/// The entries of a page are busy during its copy. An access waits, and then uses the new frame.
#[test]
fn a_store_during_the_copy_waits_for_the_new_frame() {
    let vm = two_nodes(256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    map(&cpu0, &space, 0, 8, RW);
    store(&cpu0, &space, AT, 1).unwrap();
    let (vm, space) = (&vm, &space);
    thread::scope(|scope| {
        let (begin, begun) = std::sync::mpsc::channel();
        scope.spawn(move || {
            let other = cpu(vm, 1);
            begun.recv().unwrap();
            store(&other, space, AT + 8, 2).unwrap();
            assert_eq!(load(&other, space, AT), Ok(1));
        });
        vm.machine().interpose(
            move || {
                begin.send(()).unwrap();
                thread::sleep(Duration::from_millis(20));
            },
            || assert_eq!(moved(&cpu0, space, (0, 1), 1), [Ok(1)]),
        );
    });
    assert_eq!([0, 8].map(|at| load(&cpu0, space, AT + at)), [Ok(1), Ok(2)]);
}

/// A fault that copies a page retries if the page moves during the copy.
#[test]
fn a_copy_of_a_moving_page_is_discarded() {
    let vm = two_nodes(256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    map(&cpu0, &space, 0, 8, RW);
    store(&cpu0, &space, AT, 1).unwrap();
    let child = space.fork(&cpu0).unwrap();
    // While the child's copy is made the page has one reference more, and stays.
    let got = between(
        &vm,
        |other| assert_eq!(moved(other, &space, (0, 1), 1), [Err(Errno::EBUSY)]),
        || store(&cpu0, &child, AT, 2),
    );
    assert_eq!(got, Ok(()));
    assert_eq!([&space, &child].map(|space| load(&cpu0, space, AT)), [Ok(1), Ok(2)]);
    cpu(&vm, 1).drain();
    check(&cpu0, &[&space, &child], &[], 0);
    [space, child].into_iter().for_each(|space| space.exit(&cpu0));
}

#[test]
fn a_huge_leaf_of_two_spaces_is_shared() {
    use crate::fault::Access;
    use crate::fault::tests::huge::{PAGES, RX, Setup};
    let vm = two_nodes(8192);
    vm.set(Setting::HugeText(crate::knob::HugeText::Always));
    let setup = Setup::mapped(&vm, RX, PRIVATE);
    setup.fetch(0).unwrap();
    let other = Space::new(&setup.cpu).unwrap();
    map_object(&setup.cpu, &other, (0, PAGES), RX, PRIVATE, (&setup.file, 0));
    other.fault_remote(&setup.cpu, AT, Access::Execute).unwrap();
    let move_one = |all| {
        let mut status = [Err(Errno::EIO)];
        setup.space.move_pages(&setup.cpu, &[AT], 1, all, &mut status).unwrap();
        status[0]
    };
    let leaves = || vm.totals().get(Counter::FilePmdMapped);
    assert_eq!((move_one(false), leaves()), (Err(Errno::EACCES), 2));
    // Both leaves are split, and the page moves in both spaces.
    assert_eq!((move_one(true), leaves()), (Ok(1), 0));
    other.exit(&setup.cpu);
    assert_eq!((move_one(false), leaves()), (Ok(1), 0));
}

#[test]
fn a_repeatedly_moved_shared_page_is_found() {
    let vm = two_nodes(1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 1, RW);
    store(&cpu, &space, AT, 1).unwrap();
    let child = space.fork(&cpu).unwrap();
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    let mut at = AT;
    for number in 1..100 {
        let to = AT + number * 2 * P;
        space.mremap(&cpu, at, P, P, flags, to).unwrap();
        assert_eq!(space.core.moves.count(), 1);
        at = to;
    }
    let mut status = [Err(Errno::EIO)];
    space.move_pages(&cpu, &[at], 1, true, &mut status).unwrap();
    assert_eq!(status, [Ok(1)]);
    check(&cpu, &[&space, &child], &[], 0);
    [space, child].into_iter().for_each(|space| space.exit(&cpu));
}

#[test]
fn a_shared_page_on_the_target_node_reports_success() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 8, RW);
    store(&cpu, &space, AT, 1).unwrap();
    let child = space.fork(&cpu).unwrap();
    let mut status = [Err(Errno::EIO)];
    space.move_pages(&cpu, &[AT], 0, false, &mut status).unwrap();
    assert_eq!(status, [Ok(0)]);
    [space, child].into_iter().for_each(|space| space.exit(&cpu));
}

/// A fork is about to copy a pinned page. The pin is dropped, and the page moves: the fork copies
/// the old contents, and never the contents of the frame's next owner.
#[test]
fn a_pin_dropped_during_a_fork_does_not_corrupt_the_copy() {
    let mut wrong = Vec::new();
    for nth in 1..60 {
        let vm = two_nodes(256);
        vm.set(Setting::EditInPlace(false));
        let cpu0 = cpu(&vm, 0);
        let (space, victim) = (Space::new(&cpu0).unwrap(), Space::new(&cpu0).unwrap());
        {
            let share = cpu(&vm, 1);
            space.activate(&share);
            // SAFETY: the CPU uses no translations.
            unsafe { space.deactivate(&share) };
        }
        map(&cpu0, &space, 0, 8, RW);
        map(&cpu0, &victim, 0, 8, RW);
        store(&cpu0, &victim, AT, 90).unwrap();
        store(&cpu0, &space, AT, 1).unwrap();
        let pins = space.pin(&cpu0, AT, P, true).unwrap();
        let mut child = None;
        let (s, v) = (&space, &victim);
        let other = cpu(&vm, 1);
        let mut status = [Err(Errno::EIO)];
        let reported = &mut status;
        let came = vm.machine().at_look(
            nth,
            move || {
                drop(pins);
                s.move_pages(&other, &[AT], 1, true, reported).unwrap();
                // The next owner of the old frame.
                (1..8).for_each(|page| store(&other, v, AT + page * P, 99).unwrap());
            },
            || child = Some(space.fork(&cpu0).unwrap()),
        );
        let child = child.unwrap();
        let got = load(&cpu0, &child, AT);
        if got != Ok(1) {
            wrong.push(nth);
        }
        [space, victim, child].into_iter().for_each(|space| space.exit(&cpu0));
        if !came {
            break;
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// A shared page that moved with a range, then alone, and then back: two notes lead to its one
/// entry.
#[test]
fn a_shared_page_moved_away_and_back_is_found_once() {
    let vm = two_nodes(512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 4, RW);
    (0..4).for_each(|page| store(&cpu, &space, AT + page * P, page + 1).unwrap());
    let child = space.fork(&cpu).unwrap();
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    let (there, away) = (AT + 100 * P, AT + 200 * P);
    for (from, to, pages) in [(AT, there, 4), (there, away, 1), (away, there, 1)] {
        space.mremap(&cpu, from, pages * P, pages * P, flags, to).unwrap();
    }
    let pages: Vec<_> = (0..4).map(|page| there + page * P).collect();
    let mut nodes = [Ok(9); 4];
    space.move_pages(&cpu, &pages, 1, true, &mut nodes).unwrap();
    assert_eq!(nodes, [Ok(1); 4]);
    check(&cpu, &[&space, &child], &[], 0);
    child.exit(&cpu);
    space.exit(&cpu);
}

/// One CPU forks while another CPU moves pages shared with an earlier child: the notes of the new
/// child lead to all its entries.
#[test]
fn fork_beside_mremap_copies_all_notes() {
    let rounds = if cfg!(miri) { 3 } else { 1000 };
    for round in 0..rounds {
        let vm = two_nodes(512);
        vm.set(Setting::EditInPlace(false));
        let cpu0 = cpu(&vm, 0);
        let space = Space::new(&cpu0).unwrap();
        map(&cpu0, &space, 0, 4, RW);
        (0..4).for_each(|page| store(&cpu0, &space, AT + page * P, page + 1).unwrap());
        let first = space.fork(&cpu0).unwrap();
        let start = std::sync::Barrier::new(2);
        let child = std::thread::scope(|scope| {
            let (vm, space, start) = (&vm, &space, &start);
            scope.spawn(move || {
                let other = cpu(vm, 1);
                let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
                start.wait();
                (0..round % 64).for_each(|_| core::hint::spin_loop());
                space.mremap(&other, AT, 4 * P, 4 * P, flags, AT + 100 * P).unwrap();
            });
            start.wait();
            space.fork(&cpu0).unwrap()
        });
        check(&cpu0, &[&space, &first, &child], &[], 0);
        [space, first, child].into_iter().for_each(|space| space.exit(&cpu0));
    }
}

/// Pages that moved one by one, shared with an ending child: each page can be moved to another
/// node.
#[test]
fn thousands_of_singly_moved_pages_are_found() {
    let vm = two_nodes(8192);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let pages = 1500;
    map(&cpu, &space, 0, pages, RW);
    (0..pages).for_each(|page| store(&cpu, &space, AT + page * P, page + 1).unwrap());
    let child = space.fork(&cpu).unwrap();
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    let to = |page| AT + (10_000 + 2 * page) * P;
    for page in 0..pages {
        space.mremap(&cpu, AT + page * P, P, P, flags, to(page)).unwrap();
    }
    assert_eq!(space.core.moves.count(), pages);
    let migrate = |node| {
        let mut status = vec![Err(Errno::EIO); pages as usize];
        let at: Vec<_> = (0..pages).map(to).collect();
        space.move_pages(&cpu, &at, node, true, &mut status).unwrap();
        assert!(status.iter().all(|status| *status == Ok(node)), "all are found");
    };
    migrate(1);
    check(&cpu, &[&space, &child], &[], 0);
    child.exit(&cpu);
    migrate(0);
    (0..pages).for_each(|page| assert_eq!(load(&cpu, &space, to(page)), Ok(page + 1)));
    space.munmap(&cpu, to(0), 2 * pages * P).unwrap();
    assert_eq!(space.core.moves.count(), 0, "notes end with the pages");
    space.exit(&cpu);
}

/// A move makes notes of pages that a relative shares, and no notes in a space without relatives.
#[test]
fn mremap_makes_notes_of_pages_shared_with_relatives() {
    let vm = two_nodes(512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 4, RW);
    (0..4).for_each(|page| store(&cpu, &space, AT + page * P, page + 1).unwrap());
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    let (there, away) = (AT + 100 * P, AT + 200 * P);
    let remap = |from, to| space.mremap(&cpu, from, 4 * P, 4 * P, flags, to).unwrap();
    // A transient reference, as of a CPU that reads an entry, does not make a page shared.
    let frame = space.page_at(&cpu, AT).unwrap().frame;
    assert!(vm.frames.meta(frame).get_ref_unless_zero());
    remap(AT, there);
    // SAFETY: the reference just taken, which never was a mapping.
    unsafe { cpu.put_unmapped(frame) };
    assert_eq!(space.core.moves.count(), 0);
    check(&cpu, &[&space], &[], 0);
    let child = space.fork(&cpu).unwrap();
    remap(there, away);
    assert_eq!(space.core.moves.count(), 1);
    check(&cpu, &[&space, &child], &[], 0);
    child.exit(&cpu);
    remap(away, there);
    assert_eq!(space.core.moves.count(), 0);
    let pages: Vec<_> = (0..4).map(|page| there + page * P).collect();
    let mut nodes = [Ok(9); 4];
    space.move_pages(&cpu, &pages, 1, true, &mut nodes).unwrap();
    assert_eq!(nodes, [Ok(1); 4], "all are found");
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// A range with shared and private pages moves, and then each page moves to another node. The walk
/// of the reverse map finds the entries of each shared page in both spaces.
#[test]
fn a_range_with_some_shared_pages_keeps_its_reverse_map() {
    const PAGES: u64 = 3;
    for shared in 0..1 << PAGES {
        let vm = two_nodes(512);
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, 0, PAGES, RW);
        (0..PAGES).for_each(|page| store(&cpu, &space, AT + page * P, value(1, page)).unwrap());
        let child = space.fork(&cpu).unwrap();
        let private = (0..PAGES).filter(|page| shared >> page & 1 == 0);
        private.for_each(|page| store(&cpu, &child, AT + page * P, value(2, page)).unwrap());
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        let to = AT + 100 * P;
        space.mremap(&cpu, AT, PAGES * P, PAGES * P, flags, to).unwrap();
        assert_eq!(space.core.moves.count() != 0, shared != 0, "{shared:#b}");
        assert_eq!(moved(&cpu, &space, (100, PAGES), 1), vec![Ok(1); 3], "{shared:#b}");
        check(&cpu, &[&space, &child], &[], 0);
        for page in 0..PAGES {
            let of_child = if shared >> page & 1 == 0 { value(2, page) } else { value(1, page) };
            assert_eq!(load(&cpu, &space, to + page * P), Ok(value(1, page)), "{shared:#b}");
            assert_eq!(load(&cpu, &child, AT + page * P), Ok(of_child), "{shared:#b}");
        }
        [space, child].into_iter().for_each(|space| space.exit(&cpu));
    }
}
