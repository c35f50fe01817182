//! `MADV_WILLNEED` of pages in the swap area. Of pages of files: `stores`.

use crate::knob::Setting;
use crate::reclaim::tests::swap::{page_out, with_swap};
use crate::space::Advice;
use crate::testing::guest::{AT, P, load, store};
use std::vec::Vec;

/// `MADV_WILLNEED` reads pages with adjacent slots in one read, and the later faults map the pages.
/// If memory is short, the advice has no effect.
#[test]
fn willneed_reads_swapped_pages() {
    with_swap((256, 64, 48), |cpu, space, memory| {
        (0..48).for_each(|page| store(cpu, space, AT + page * P, 5 + page).unwrap());
        page_out(cpu, space, 0, 40);
        let cached = || {
            let mut pages = 0;
            cpu.each_swap_cached(|_| pages += 1);
            pages
        };
        let reads = || core::mem::take(&mut *memory.reads.lock().unwrap());
        let need = |pages| space.madvise(cpu, AT + 2 * P, pages * P, Advice::WillNeed).unwrap();
        let vm = cpu.vm();
        let taken = vm.total_frames() - vm.free_frames();
        vm.set(Setting::FrameLimit(taken + 40));
        need(37);
        assert_eq!(cached(), 0);
        vm.set(Setting::FrameLimit(u64::MAX));
        need(37);
        assert_eq!((cached(), space.swapped_pages(cpu), space.resident_pages(cpu)), (37, 40, 8));
        let read = reads();
        assert!(read.len() <= 3, "{read:?}");
        for page in 2..39 {
            assert_eq!(load(cpu, space, AT + page * P), Ok(5 + page));
        }
        assert_eq!(reads(), [], "pages were read again");
        assert_eq!(space.swapped_pages(cpu), 3);
        // Pages elsewhere in the area are read separately.
        let mut at: Vec<_> = (0..48).collect();
        at.sort_by_key(|page| page * 7 % 48);
        at.iter().for_each(|page| page_out(cpu, space, *page, 1));
        space.madvise(cpu, AT, 48 * P, Advice::WillNeed).unwrap();
        reads();
        (0..48).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(5 + page)));
        assert_eq!(reads(), [], "other pages were read");
    });
}
