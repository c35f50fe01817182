//! Reclaim's scans of private pages: their cost, and the use count of a page.

use super::swap::{count, page_out, with_swap};
use crate::knob::Setting;
use crate::stat::Counter;
use crate::testing::guest::{AT, P, RW, TestCpu, TestSpace, load, map, store};

const PAGES: u64 = 800;

/// Runs `test` with 1,024 frames, so that the clock hand also inspects the next 32 frames in
/// advance.
fn with_pages(test: impl Fn(&TestCpu<'_>, &TestSpace)) {
    with_swap((1024, 2000, PAGES), |cpu, space, _| {
        cpu.vm().set(Setting::PrefaultMaxOrder(0));
        (0..PAGES).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
        test(cpu, space);
    });
}

/// Returns the number of scanned pages, and of entries walked to, during `work`.
fn looks(cpu: &TestCpu<'_>, work: impl FnOnce()) -> [u64; 2] {
    let counts = || [Counter::PageScanned, Counter::RmapLook].map(|counter| count(cpu, counter));
    let before = counts();
    work();
    core::array::from_fn(|at| counts()[at] - before[at])
}

/// All pages seem used in the first round of the hand. The evicted page is found in the second
/// round.
#[test]
fn pages_used_together_need_few_walks() {
    with_pages(|cpu, _| {
        let mut freed = 0;
        let [scanned, walks] = looks(cpu, || freed = cpu.reclaim(1));
        assert!(freed >= 1 && (PAGES..PAGES + 200).contains(&scanned), "{freed}, {scanned}");
        // In the second round each page is unused, so its entry is walked to, and once more for its
        // eviction.
        let first = walks - (scanned - PAGES) - freed;
        // One walk marks at most 32 pages.
        assert!((PAGES / 33..PAGES / 16).contains(&first), "{first} of {walks} for {scanned}");
    });
}

/// A page unused since the last scan is not spared because of its neighbours.
#[test]
fn unused_pages_among_used_pages_are_evicted() {
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

/// The entries of other programs are checked as well.
#[test]
fn pages_of_two_programs_are_walked_to() {
    with_pages(|cpu, space| {
        let child = space.fork(cpu).unwrap();
        let [scanned, walks] = looks(cpu, || assert!(cpu.reclaim(1) >= 1));
        assert!(walks >= 2 * scanned, "{walks} for {scanned}");
        child.exit(cpu);
    });
}

/// The use counts of the frames' previous pages have no effect.
#[test]
fn a_new_page_has_use_count_zero() {
    with_pages(|cpu, space| {
        for _ in 0..3 {
            cpu.reclaim(1);
            (0..PAGES).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(page)));
        }
        space.munmap(cpu, AT, PAGES * P).unwrap();
        map(cpu, space, 0, PAGES, RW);
        (0..PAGES).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
        // Both the pages walked to and the pages marked.
        let most = PAGES - 10;
        let [scanned, _] = looks(cpu, || assert!(cpu.reclaim(most) >= most));
        assert!(scanned <= 2 * PAGES, "{scanned}: some pages were skipped again");
    });
}

#[test]
fn refaulted_private_pages_outlive_new_pages() {
    with_pages(|cpu, space| {
        page_out(cpu, space, 0, PAGES / 2);
        (0..PAGES / 2).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(page)));
        cpu.reclaim(PAGES / 2);
        let stay = |pages: core::ops::Range<u64>| {
            let stays = |page: &u64| !space.entry_at(cpu, AT + page * P).is_swapped();
            pages.filter(stays).count() as u64
        };
        let [back, new] = [stay(0..PAGES / 2), stay(PAGES / 2..PAGES)];
        // Some notes of evicted pages are lost to collisions.
        assert!(back >= 250 && new <= 150, "{back} and {new}");
    });
}
