use super::*;
use crate::testing::guest::{self, AT, P, RW, TestCpu, TestSpace, cpu, map, store};
use std::vec::Vec;

const PAGES: u64 = 8;
const FIXED: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::FIXED);

/// Runs `test` with a space of [`PAGES`] pages at `AT`, and a child that shares the pages whose
/// bits are set in `shared`.
fn with_shared(shared: u64, test: impl FnOnce(&TestCpu<'_>, &TestSpace)) {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, PAGES, RW);
    (0..PAGES).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    let child = space.fork(&cpu).unwrap();
    for page in (0..PAGES).filter(|page| shared >> page & 1 == 0) {
        store(&cpu, &child, AT + page * P, 100 + page).unwrap();
    }
    test(&cpu, &space);
    guest::check(&cpu, &[&space, &child], &[], 0);
    [space, child].into_iter().for_each(|space| space.exit(&cpu));
}

/// Returns whether `reserve_notes` finds a shared page in `pages` pages from `first` on, and for
/// how many notes the function reserves memory.
fn reserved(cpu: &TestCpu<'_>, space: &TestSpace, first: u64, pages: u64) -> (bool, usize) {
    let range = VirtRange::new(AT + first * P, AT + (first + pages) * P);
    let writing = space.write(cpu, [range, NOWHERE], PAGE_SIZE);
    let Moving { shares, run, reserved } = writing.reserve_notes(range).unwrap();
    assert!(run.is_none());
    (shares, reserved.notes())
}

/// A single shared page in any place decides. A move without shared pages needs no memory.
#[test]
fn each_shared_page_is_found_before_a_move() {
    with_shared(0, |cpu, space| assert_eq!(reserved(cpu, space, 0, PAGES), (false, 0)));
    for page in 0..PAGES {
        with_shared(1 << page, |cpu, space| {
            assert_eq!(reserved(cpu, space, 0, PAGES), (true, 1), "page {page}");
            let others = [(0, page), (page + 1, PAGES - page - 1)];
            for (first, pages) in others.into_iter().filter(|(_, pages)| *pages != 0) {
                assert_eq!(reserved(cpu, space, first, pages), (false, 0), "not page {page}");
            }
        });
    }
}

/// Pages at the same distance from the addresses of their numbers need one note. Each change of the
/// distance needs another note.
#[test]
fn memory_is_reserved_for_each_run() {
    with_shared(!0, |cpu, space| {
        let there = 100;
        map(cpu, space, there, PAGES, RW);
        let to_there = |page: u64, to: u64, pages: u64| {
            let (from, to) = (AT + page * P, AT + (there + to) * P);
            space.mremap(cpu, from, pages * P, pages * P, FIXED, to).unwrap();
        };
        let runs = |expected: &[usize]| {
            let found: Vec<_> =
                (1..=PAGES).map(|pages| reserved(cpu, space, there, pages).1).collect();
            assert_eq!(found, expected);
        };
        // The places are 2, 3, 0, a hole, 4, 6, 7, 5.
        to_there(2, 0, 2);
        runs(&[1; 8]);
        to_there(0, 2, 1);
        to_there(4, 4, 1);
        runs(&[1, 1, 2, 2, 3, 3, 3, 3]);
        to_there(6, 5, 2);
        to_there(5, 7, 1);
        runs(&[1, 1, 2, 2, 3, 4, 4, 5]);
    });
}
