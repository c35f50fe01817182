//! The slots of the swap area: when they become free, and the handling of unneeded pages.

use super::swap::{count, page_out, with_swap};
use crate::error::Errno;
use crate::space::Advice;
use crate::stat::Counter;
use crate::testing::guest::{AT, FIXED, P, RW, load, store};
use crate::testing::store::Plan;

#[test]
fn a_full_area_accepts_pages_after_slots_are_freed() {
    with_swap((64, 8, 16), |cpu, space, _| {
        (0..16).for_each(|page| store(cpu, space, AT + page * P, 70 + page).unwrap());
        page_out(cpu, space, 0, 16);
        assert_eq!((space.swapped_pages(cpu), cpu.swap_usage()), (8, (8, 8)));
        // While no slot is free, no private page is looked at.
        let scanned = count(cpu, Counter::PageScanned);
        assert_eq!(cpu.reclaim(8), 0);
        assert_eq!(count(cpu, Counter::PageScanned), scanned);
        space.madvise(cpu, AT, 4 * P, Advice::DontNeed).unwrap();
        assert_eq!(cpu.swap_usage(), (8, 4));
        page_out(cpu, space, 8, 8);
        assert_eq!((space.swapped_pages(cpu), cpu.swap_usage()), (8, (8, 8)));
        (4..16).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(70 + page)));
    });
}

#[test]
fn unneeded_pages_are_not_written() {
    with_swap((64, 16, 8), |cpu, space, memory| {
        (0..4).for_each(|page| store(cpu, space, AT + page * P, 70 + page).unwrap());
        // The pages are needed again soon, so reclaim would normally spare them.
        page_out(cpu, space, 0, 4);
        (0..4).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(70 + page)));
        // The pages stay in memory, dirty, since the write fails at this moment.
        memory.plan([Plan::Fail(0)]);
        page_out(cpu, space, 0, 4);
        assert_eq!((space.swapped_pages(cpu), count(cpu, Counter::SwapOut)), (4, 4));
        space.madvise(cpu, AT, 4 * P, Advice::DontNeed).unwrap();
        memory.writes.lock().unwrap().clear();
        let scanned = count(cpu, Counter::PageScanned);
        assert_eq!(cpu.reclaim(64), 4, "the pages are dropped");
        assert_eq!(*memory.writes.lock().unwrap(), []);
        assert_eq!(count(cpu, Counter::PageScanned) - scanned, 4, "without a second scan");
    });
}

#[test]
fn a_mapping_may_reserve_memory_and_the_swap_area() {
    with_swap((64, 100, 1), |cpu, space, _| {
        let map = |pages: u64| space.mmap(cpu, AT + P, pages * P, RW, FIXED).map(drop);
        assert_eq!(map(163), Ok(()));
        assert_eq!(map(164).unwrap_err().errno, Errno::ENOMEM);
    });
}
