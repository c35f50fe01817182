//! Tests of the modules that need no machine.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::disallowed_macros,
    reason = "tests run on hosts with enough memory"
)]

mod pages {
    use faultless_bare::pages::*;

    #[test]
    fn runs_are_aligned_disjoint_and_reusable() {
        let mut storage = vec![0; words(150)];
        let mut pages = Pages::new(&mut storage, 150);
        assert_eq!(pages.take(3, 1), Some(0));
        assert_eq!(pages.take(4, 4), Some(4));
        assert_eq!(pages.take(70, 1), Some(8));
        assert_eq!(pages.take(70, 64), None, "only 72 pages remain, from 78 on");
        assert_eq!(pages.take(72, 1), Some(78));
        assert_eq!(pages.free(), 1);
        assert_eq!(pages.take(1, 1), Some(3));
        assert_eq!(pages.take(1, 1), None);
        pages.give(8, 70);
        assert_eq!(pages.take(64, 8), Some(8));
        pages.give(4, 4);
        assert_eq!(pages.take(2, 2), Some(4));
    }

    /// Compares with a vector of booleans.
    #[test]
    fn pages_match_a_simple_model() {
        let mut storage = vec![0; words(200)];
        let mut pages = Pages::new(&mut storage, 200);
        let mut model = [false; 200];
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        for _ in 0..5000 {
            if random(2) == 0 && !runs.is_empty() {
                let (at, count) = runs.swap_remove(random(runs.len()));
                pages.give(at, count);
                model[at..at + count].fill(false);
            } else {
                let (count, align) = (1 + random(20), 1 << random(4));
                let fits = |at: &usize| {
                    at + count <= 200 && model[*at..at + count].iter().all(|used| !used)
                };
                let expected = (0..200).step_by(align).find(fits);
                assert_eq!(pages.take(count, align), expected);
                if let Some(at) = expected {
                    model[at..at + count].fill(true);
                    runs.push((at, count));
                }
            }
            assert_eq!(pages.free(), model.iter().filter(|used| !**used).count());
        }
    }
}

mod pcid {
    use faultless_bare::pcid::*;

    #[test]
    fn a_space_keeps_its_translations_until_they_are_stale() {
        let mut slots = Slots::new();
        let first = slots.load(7);
        assert!(first.flush, "the earlier translations under the identifier are unknown");
        assert_eq!(slots.load(7), Load { flush: false, ..first });
        let other = slots.load(8);
        assert_ne!(other.pcid, first.pcid);
        slots.mark_stale(7);
        assert_eq!(slots.load(7), Load { flush: true, ..first });
        assert_eq!(slots.load(7), Load { flush: false, ..first }, "flushed once");
        assert!(!slots.load(8).flush, "only the mark of this space");
    }

    #[test]
    fn new_space_takes_and_flushes_the_least_recently_loaded_slot() {
        let mut slots = Slots::new();
        let pcids: Vec<_> = (1..=SLOTS as u64).map(|id| slots.load(id).pcid).collect();
        slots.load(1);
        assert_eq!(slots.load(100), Load { pcid: pcids[1], flush: true });
        assert!(slots.load(2).flush, "another space took the slot");
        assert!(!slots.load(1).flush);
        assert!(pcids.iter().all(|&pcid| pcid != 0));
    }

    #[test]
    fn mark_all_stale_skips_the_running_space() {
        let mut slots = Slots::new();
        slots.load(1);
        slots.load(2);
        slots.mark_all_stale(2);
        assert!(!slots.load(2).flush);
        assert!(slots.load(1).flush);
    }
}

mod ranges {
    use faultless_bare::ranges::*;

    fn sorted(ranges: &Ranges) -> Vec<(u64, u64)> {
        let mut all: Vec<_> = ranges.iter().map(|range| (range.start, range.end)).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn remove_cuts_ranges_and_add_does_not_duplicate() {
        let mut ranges = Ranges::EMPTY;
        ranges.add(Range::new(0, 100)).unwrap();
        ranges.add(Range::new(200, 300)).unwrap();
        ranges.remove(Range::new(40, 60)).unwrap();
        assert_eq!(sorted(&ranges), [(0, 40), (60, 100), (200, 300)]);
        ranges.remove(Range::new(90, 250)).unwrap();
        assert_eq!(sorted(&ranges), [(0, 40), (60, 90), (250, 300)]);
        ranges.add(Range::new(30, 70)).unwrap();
        assert_eq!(sorted(&ranges), [(0, 30), (30, 70), (70, 90), (250, 300)]);
        ranges.remove(Range::new(10, 10)).unwrap();
        assert_eq!(sorted(&ranges).len(), 4, "no range was removed");
    }

    #[test]
    fn take_aligns_and_prefers_low_addresses() {
        let mut ranges = Ranges::EMPTY;
        ranges.add(Range::new(0x5000, 0x9000)).unwrap();
        ranges.add(Range::new(0x1800, 0x4000)).unwrap();
        assert_eq!(ranges.take(0x1000, 0x1000), Some(Range::new(0x2000, 0x3000)));
        assert_eq!(ranges.take(0x2000, 0x1000), Some(Range::new(0x5000, 0x7000)));
        assert_eq!(ranges.take(0x2001, 1), None);
        assert_eq!(ranges.take(u64::MAX, 2), None);
        assert_eq!(sorted(&ranges), [(0x1800, 0x2000), (0x3000, 0x4000), (0x7000, 0x9000)]);
    }

    #[test]
    fn parts_have_their_shares() {
        let mut ranges = Ranges::EMPTY;
        ranges.add(Range::new(0x9000, 0xd000)).unwrap();
        ranges.add(Range::new(0x1000, 0x5000)).unwrap();
        let parts = |shares: &[u16]| -> Vec<_> {
            ranges.parts(shares).map(|(part, Range { start, end })| (part, start, end)).collect()
        };
        assert_eq!(parts(&[7]), [(0, 0x1000, 0x5000), (0, 0x9000, 0xd000)]);
        assert_eq!(parts(&[1, 1]), [(0, 0x1000, 0x5000), (1, 0x9000, 0xd000)]);
        let uneven = [(0, 0x1000, 0x3000), (1, 0x3000, 0x5000), (1, 0x9000, 0xd000)];
        assert_eq!(parts(&[1, 3]), uneven);
        let last = [(0, 0x1000, 0x5000), (0, 0x9000, 0xc000), (1, 0xc000, 0xd000)];
        assert_eq!(parts(&[99, 1]), last, "in whole pages");
        assert_eq!(parts(&[1, 99]), [(1, 0x1000, 0x5000), (1, 0x9000, 0xd000)], "less than a page");
    }

    #[test]
    fn too_many_ranges_are_refused() {
        let mut ranges = Ranges::EMPTY;
        for at in 0..MAX_RANGES as u64 {
            ranges.add(Range::new(at * 10, at * 10 + 8)).unwrap();
        }
        assert_eq!(ranges.add(Range::new(5000, 5001)), Err(TooMany));
        assert_eq!(ranges.remove(Range::new(2, 4)), Err(TooMany));
    }
}
