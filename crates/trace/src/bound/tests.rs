use super::*;
use crate::Trace;
use crate::event::{Event, Kind};
use proptest::prelude::*;
use std::collections::HashSet;

const START: u64 = 1 << 40;

/// A step of one thread.
#[derive(Clone, Copy, Debug)]
enum Step {
    Touch(u64),
    Forget(u64),
}

fn trace(pages: u64, steps: &[Step]) -> Trace {
    let len = pages * PAGE_SIZE;
    let (prot, backing) = (Prot::READ | Prot::WRITE, Backing::Anon);
    let map = Kind::Map { start: START, len, prot, flags: 0x22, backing };
    let kind = |step: &Step| match step {
        Step::Touch(page) => Kind::first(START + page * PAGE_SIZE, Access::Write),
        Step::Forget(page) => {
            let start = START + page * PAGE_SIZE;
            Kind::Advise { start, len: PAGE_SIZE, advice: MADV_DONTNEED }
        }
    };
    let kinds = std::iter::once(map).chain(steps.iter().map(kind));
    Trace::of_one_thread(kinds)
}

fn bound_of(pages: u64, steps: &[Step], max_order: u8) -> Bound {
    let plan = Plan::in_turn(&trace(pages, steps)).unwrap();
    let mut there = HashSet::new();
    let took = |step: &Step| match step {
        Step::Touch(page) if there.insert(*page) => Took::First,
        Step::Touch(_) => Took::Nothing,
        Step::Forget(page) => {
            there.remove(page);
            Took::Nothing
        }
    };
    let took: Vec<_> = std::iter::once(Took::Nothing).chain(steps.iter().map(took)).collect();
    let done: Vec<_> = took.into_iter().map(|took| Done::new(0, took)).collect();
    bound(&plan, &done, max_order)
}

/// Returns the fewest faults of any policy: each fault maps its page and any `room` other empty
/// pages.
fn fewest(pages: u64, steps: &[Step], there: u32, room: u32) -> u64 {
    let Some((step, rest)) = steps.split_first() else { return 0 };
    match *step {
        Step::Forget(page) => fewest(pages, rest, there & !(1 << page), room),
        Step::Touch(page) if there >> page & 1 == 1 => fewest(pages, rest, there, room),
        Step::Touch(page) => {
            let sets = (0..1u32 << pages)
                .filter(|set| set & there == 0 && set >> page & 1 == 0 && set.count_ones() <= room);
            let best = sets.map(|set| fewest(pages, rest, there | set | 1 << page, room)).min();
            1 + best.unwrap_or(0)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Within one VMA and table the bound equals the savings of the best policy.
    #[test]
    fn best_policy_reaches_the_bound(
        steps in proptest::collection::vec(
            prop_oneof![3 => (0..5u64).prop_map(Step::Touch), 1 => (0..5u64).prop_map(Step::Forget)],
            0..9,
        ),
        max_order in 0..3u8,
    ) {
        let Bound { touches, saved } = bound_of(5, &steps, max_order);
        prop_assert_eq!(touches - saved, fewest(5, &steps, 0, (1 << max_order) - 1));
    }
}

#[test]
fn window_may_omit_pages() {
    let steps: Vec<_> = (0..32).map(|n| Step::Touch(16 * n)).collect();
    assert_eq!(bound_of(512, &steps, 3), Bound { touches: 32, saved: 28 });
    // A window stays in its table.
    let steps: Vec<_> = (0..4).map(|n| Step::Touch(512 * n)).collect();
    assert_eq!(bound_of(2048, &steps, 9), Bound { touches: 4, saved: 0 });
}

#[test]
fn order_zero_saves_no_fault() {
    let steps: Vec<_> = (0..9).map(Step::Touch).collect();
    assert_eq!(bound_of(9, &steps, 0), Bound { touches: 9, saved: 0 });
}

/// Adjacent VMAs of the same protection may have merged, and a fault reaches both.
#[test]
fn mergeable_adjacent_vmas_count_as_one() {
    let steps: Vec<_> = (0..8).map(Step::Touch).collect();
    let saved = |prot| {
        let mut trace = trace(8, &steps);
        let map = Kind::Map {
            start: START + 4 * PAGE_SIZE,
            len: 4 * PAGE_SIZE,
            prot,
            flags: 0x32,
            backing: Backing::Anon,
        };
        let map = Event { time_us: 0, thread: 0, kind: map };
        let (first, others) = (trace.events.iter().take(1), trace.events.iter().skip(1));
        trace.events = first.chain([map]).chain(others).collect();
        let plan = Plan::in_turn(&trace).unwrap();
        let took = |at| if at < 2 { Took::Nothing } else { Took::First };
        let done: Vec<_> = (0..10).map(|at| Done::new(0, took(at))).collect();
        bound(&plan, &done, 3).saved
    };
    let rw = Prot::READ | Prot::WRITE;
    assert_eq!((saved(rw), saved(rw | Prot::EXEC)), (7, 6));
}
