//! Looks of reclaim at private pages: what they cost, and how many lives a page has.

use super::guest::{AT, P, RW, TestCpu, TestSpace, load, map, store};
use super::swap::{count, page_out, with_swap};
use crate::knob::Setting;
use crate::stat::Counter;

const PAGES: u64 = 800;

/// With 1024 frames, so that a hand sees frames that it will come to within 32.
fn with_pages(test: impl Fn(&TestCpu<'_>, &TestSpace)) {
    with_swap((1024, 2000, PAGES), |cpu, space, _| {
        cpu.vm().set(Setting::PrefaultMaxOrder(0));
        (0..PAGES).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
        test(cpu, space);
    });
}

/// How many pages were looked at, and entries walked to, in `work`.
fn looks(cpu: &TestCpu<'_>, work: impl FnOnce()) -> [u64; 2] {
    let counts = || [Counter::PageScanned, Counter::RmapLook].map(|counter| count(cpu, counter));
    let before = counts();
    work();
    core::array::from_fn(|at| counts()[at] - before[at])
}

/// All pages seem used in the first round of the hand; the page that leaves is found in the next.
#[test]
fn pages_that_were_used_together_need_few_walks() {
    with_pages(|cpu, _| {
        let mut freed = 0;
        let [scanned, walks] = looks(cpu, || freed = cpu.reclaim(1));
        assert!(freed >= 1 && (PAGES..PAGES + 200).contains(&scanned), "{freed}, {scanned}");
        // In the second round each page was unused, so it is walked to, and once more as it leaves.
        let first = walks - (scanned - PAGES) - freed;
        // One marks 32 at most.
        assert!((PAGES / 33..PAGES / 16).contains(&first), "{first} of {walks} for {scanned}");
    });
}

/// A page that was not used since the last look is not spared for its neighbours.
#[test]
fn what_is_not_used_leaves_from_among_what_is() {
    with_pages(|cpu, space| {
        let mut freed = cpu.reclaim(1);
        let is_used = |page: &u64| !page.is_multiple_of(8);
        while freed < PAGES / 8 {
            for page in (0..PAGES).filter(is_used) {
                assert_eq!(load(cpu, space, AT + page * P), Ok(page));
            }
            freed += cpu.reclaim(PAGES / 8 - freed);
        }
        let gone = |page: &u64| space.entry_at(cpu, AT + page * P).is_swapped();
        let used = (0..PAGES).filter(is_used).filter(gone).count();
        let unused = (0..PAGES).filter(|page| !is_used(page)).filter(gone).count();
        assert!(used <= 8 && unused >= 60, "{used} and {unused}");
    });
}

/// Others' entries are looked at, too.
#[test]
fn pages_of_two_programs_are_walked_to() {
    with_pages(|cpu, space| {
        let child = space.fork(cpu).unwrap();
        let [scanned, walks] = looks(cpu, || assert!(cpu.reclaim(1) >= 1));
        assert!(walks >= 2 * scanned, "{walks} for {scanned}");
        child.exit(cpu);
    });
}

/// Whatever the frames' last pages had.
#[test]
fn a_new_page_has_no_lives() {
    with_pages(|cpu, space| {
        for _ in 0..3 {
            cpu.reclaim(1);
            (0..PAGES).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(page)));
        }
        space.munmap(cpu, AT, PAGES * P).unwrap();
        map(cpu, space, 0, PAGES, RW);
        (0..PAGES).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
        // Those that were walked to, and those that were marked.
        let most = PAGES - 10;
        let [scanned, _] = looks(cpu, || assert!(cpu.reclaim(most) >= most));
        assert!(scanned <= 2 * PAGES, "{scanned}: some were spared once more");
    });
}

#[test]
fn what_comes_back_soon_outlives_what_is_new() {
    with_pages(|cpu, space| {
        page_out(cpu, space, 0, PAGES / 2);
        (0..PAGES / 2).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(page)));
        cpu.reclaim(PAGES / 2);
        let stay = |pages: core::ops::Range<u64>| {
            let stays = |page: &u64| !space.entry_at(cpu, AT + page * P).is_swapped();
            pages.filter(stays).count() as u64
        };
        let [back, new] = [stay(0..PAGES / 2), stay(PAGES / 2..PAGES)];
        // Some notes of what was evicted are lost to others.
        assert!(back >= 250 && new <= 150, "{back} and {new}");
    });
}
