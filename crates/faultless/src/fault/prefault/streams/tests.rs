//! Tests of the policy against a map as the page table.

use super::super::history::BlockHistory;
use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::vec::Vec;

const TABLE: u64 = 512;

/// A thread, and the memory it touches.
struct Program {
    defaults: Defaults,
    streams: Streams,
    area: Range<u64>,
    pages: BTreeMap<u64, Seen>,
    order: u8,
    faults: u64,
    checks: u64,
    tally: Tally,
}

impl Program {
    fn new(area: Range<u64>, order: u8) -> Self {
        Self {
            defaults: Defaults::new(),
            streams: Streams::new(),
            area,
            pages: BTreeMap::new(),
            order,
            faults: 0,
            checks: 0,
            tally: Tally::default(),
        }
    }

    fn miss(&self, page: u64) -> Miss {
        let table = page - page % TABLE;
        let reach = self.area.start.max(table)..self.area.end.min(table + TABLE);
        Miss { space: SpaceId(1), page, kind: Kind::Write, reach, history: BlockHistory::default() }
    }

    fn touch(&mut self, page: u64) {
        if self.pages.insert(page, Seen::Used).is_some() {
            return;
        }
        self.faults += 1;
        let miss = self.miss(page);
        let seen = |page| {
            assert!(miss.reach.contains(&page), "checked {page:#x}, out of reach");
            self.pages.get(&page).copied().unwrap_or(Seen::Empty)
        };
        let window = self.streams.predict(&miss, self.order, &self.defaults, seen);
        check(&window, &miss, self.order);
        self.check();
        self.streams.mapped(&window, window.span());
        for page in window.pages() {
            self.pages.entry(page).or_insert(Seen::Unused);
        }
    }

    fn check(&mut self) {
        if let Some(check) = self.streams.to_check() {
            let (_, pages) = Streams::extent(&check.record);
            let tables = pages.start / TABLE..=(pages.end - 1) / TABLE;
            assert_eq!(tables.start(), tables.end(), "a check in two tables");
            let seen = |page| {
                assert!(pages.contains(&page));
                self.pages.get(&page).copied().unwrap_or(Seen::Empty)
            };
            let tally = self.streams.checked(&check, seen);
            self.checks += 1;
            self.tally.used += tally.used;
            self.tally.unused += tally.unused;
        }
    }

    /// Returns the number of unused prefaulted pages.
    fn wasted(&self) -> usize {
        self.pages.values().filter(|seen| **seen == Seen::Unused).count()
    }
}

fn check(window: &Window<Record>, miss: &Miss, order: u8) {
    let span = window.span();
    assert!(miss.reach.start <= span.start && span.end <= miss.reach.end, "{window:?} {miss:?}");
    let pages: Vec<u64> = window.pages().collect();
    assert!(pages.len() <= 1 << order.min(MAX_ORDER), "{window:?} of order {order}");
    assert!(pages.contains(&miss.page), "{window:?} without {miss:?}");
    assert!(pages.iter().all(|page| span.contains(page)));
    assert_eq!((pages.first(), pages.last()), (Some(&span.start), Some(&(span.end - 1))));
    let stride = window.stride() as u64;
    let masks = span.step_by(64 * window.stride()).flat_map(|first| {
        let among = window.among(first);
        (0..64).filter(move |n| among >> n & 1 == 1).map(move |n| first + n * stride)
    });
    assert!(masks.eq(pages), "{window:?}");
}

/// A deterministic pseudo-random generator.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// 64 MiB.
const MANY: u64 = 16384;

#[test]
fn sequential_touch_takes_one_fault_a_window_both_ways() {
    for (order, times) in [(3, 79), (5, 310), (9, 1500)] {
        for start in [0, 5, 0x7_ffff_f001] {
            let area = start..start + MANY;
            let mut up = Program::new(area.clone(), order);
            area.clone().for_each(|page| up.touch(page));
            let mut down = Program::new(area.clone(), order);
            area.clone().rev().for_each(|page| down.touch(page));
            for program in [up, down] {
                let faults = program.faults;
                assert!(10 * MANY >= times * faults, "order {order} from {start:#x}: {faults}");
                assert_eq!(program.wasted(), 0);
            }
        }
    }
}

#[test]
fn interleaved_streams_are_distinguished() {
    let area = 0..8 * MANY;
    let mut program = Program::new(area, 5);
    for n in 0..2048 {
        for stream in 0..8 {
            let base = stream * MANY + 333 * stream;
            program.touch(if stream % 2 == 0 { base + n } else { base + 4096 - n });
        }
    }
    assert!(program.faults < 8 * 2048 / 25, "{}", program.faults);
}

#[test]
fn sparse_and_random_touch_prefault_few_pages() {
    let touched = 20_000;
    let mut sparse = Program::new(0..touched * 16, 5);
    (0..touched).for_each(|n| sparse.touch(n * 16));
    let mut state = 7;
    let mut scattered = Program::new(0..touched * 64, 5);
    (0..touched).for_each(|_| scattered.touch(random(&mut state) % (touched * 64)));
    // Such a thread rarely runs the prediction, from which it cannot benefit.
    assert!(scattered.checks < touched / 40, "{}", scattered.checks);
    for program in [sparse, scattered] {
        assert!(program.wasted() as u64 <= touched / 1000, "{}", program.wasted());
    }
}

#[test]
fn random_access_threads_are_detected_soon() {
    let mut program = Program::new(0..1 << 22, 5);
    let mut state = 7;
    (0..40).for_each(|_| program.touch(random(&mut state) % (1 << 22)));
    assert!(program.streams.backoff >= 31, "{}", program.streams.backoff);
}

#[test]
fn streams_after_random_access_prefault_soon() {
    let mut program = Program::new(0..1 << 22, 5);
    let mut state = 7;
    (0..20_000).for_each(|_| program.touch(random(&mut state) % (1 << 21)));
    let faults = program.faults;
    for n in 0..512 {
        (0..8).for_each(|stream| program.touch((1 << 21) + 1024 * stream + n));
    }
    let faults = program.faults - faults;
    assert!(faults < 8 * 512 / 12, "{faults}");
}

#[test]
fn unused_pages_cost_credit() {
    let mut program = Program::new(0..8 * TABLE, 5);
    (0..TABLE).for_each(|page| program.touch(page));
    (2 * TABLE..2 * TABLE + 9).for_each(|page| program.touch(page));
    while let Some(check) = program.streams.to_check_in(SpaceId(1), &(0..8 * TABLE)) {
        let seen = |page| program.pages.get(&page).copied().unwrap_or(Seen::Empty);
        program.streams.checked(&check, seen);
    }
    let wasted = program.wasted() as u32;
    assert!(wasted > 4, "{wasted}");
    let most = TABLE as u32 + 9 - PRICE * wasted;
    assert!(program.streams.credit <= most, "{} of {most}", program.streams.credit);
}

#[test]
fn strided_windows_leave_out_pages_between() {
    let mut program = Program::new(0..512 * 16, 5);
    (0..512).for_each(|n| program.touch(n * 16));
    assert!(program.faults < 512 / 10, "{}", program.faults);
    assert_eq!(program.wasted(), 0);
}

#[test]
fn strided_streams_continue_in_strides() {
    // The expected faults for each page, in tenths. A table of 512 pages holds few pages of a large
    // stride.
    for (stride, each) in [(2, 40), (5, 40), (16, 35), (32, 15)] {
        let touched = 4096;
        let area = 0..touched * stride;
        let mut up = Program::new(area.clone(), 5);
        area.clone().step_by(stride as usize).for_each(|page| up.touch(page));
        let mut down = Program::new(area.clone(), 5);
        area.rev().step_by(stride as usize).for_each(|page| down.touch(page));
        for program in [up, down] {
            let (faults, wasted) = (program.faults, program.wasted());
            assert!(each * faults < 10 * touched, "{faults} of {touched} at each {stride}th page");
            assert!(wasted <= 64, "{wasted} at each {stride}th page");
        }
    }
}

#[test]
fn few_equally_spaced_pages_are_no_stream() {
    let mut program = Program::new(0..1 << 20, 5);
    for group in 0..2000 {
        (0..LATTICE).for_each(|n| program.touch(group * 512 + 9 * n));
    }
    assert_eq!(program.faults, 2000 * LATTICE);
    assert_eq!(program.wasted(), 0);
}

#[test]
fn unused_streams_lose_width_and_earn_it_back() {
    let area = 0..1 << 20;
    let mut program = Program::new(area, 5);
    (0..2048).for_each(|page| program.touch(page));
    // Runs of eight pages, far apart.
    let before = program.wasted();
    for run in 0..2000 {
        (0..8).for_each(|n| program.touch(4096 + run * 64 + n));
    }
    let early = program.wasted() - before;
    for run in 2000..4000 {
        (0..8).for_each(|n| program.touch(4096 + run * 64 + n));
    }
    let late = program.wasted() - before - early;
    assert!(late <= 2000 * 8 / 50, "{late} of {} wasted after {early}", 2000 * 8);
    assert!(program.tally.unused > 0);
    let faults = program.faults;
    (500_000..502_048).for_each(|page| program.touch(page));
    assert!(program.faults - faults < 2048 / 25, "{}", program.faults - faults);
}

/// Streams of all directions, strides and lengths, several at a time, drawn by a generator.
fn mixture(state: &mut u64) -> Vec<u64> {
    let mut touched = Vec::new();
    for _ in 0..120 {
        let streams = (0..1 + random(state) % 4).map(|_| {
            let stride = if random(state).is_multiple_of(3) { 2 + random(state) % 40 } else { 1 };
            let (start, down) = (random(state) % (1 << 20), random(state).is_multiple_of(2));
            (start, stride, 1 << (random(state) % 10), down)
        });
        let streams: Vec<_> = streams.collect();
        for n in 0..512 {
            let going = streams.iter().filter(|(_, _, len, _)| n < *len);
            touched.extend(going.map(|&(start, stride, _, down)| {
                if down { (1 << 21) + start - n * stride } else { (1 << 21) + start + n * stride }
            }));
        }
    }
    touched
}

/// The costs of a pattern with windows of up to 8, 32 and 512 pages: the number of faults, of
/// unused pages, and of prefaulted pages seen used.
type Costs = [[u64; 3]; 3];

/// Shows the effect of a change of the policy.
#[test]
fn patterns_have_recorded_costs() {
    let mut state = 11;
    let far = |run: u64| 5000 * run + 37 * (run % 9);
    let runs = |each: u64| (0..300).flat_map(move |run| (0..each).map(move |n| far(run) + n));
    let comb = (0..512).map(|n| 2 * n).chain((0..512).rev().map(|n| 2 * n + 1));
    let to_and_fro = (0..400).flat_map(|n| [3000 - n, 3001 + n]);
    let patterns: [(&str, Vec<u64>, Costs); 9] = [
        ("up", (777..5777).collect(), [[631, 7, 4152], [165, 15, 3858], [35, 111, 1]]),
        ("down", (777..5777).rev().collect(), [[630, 1, 4147], [165, 9, 3852], [35, 9, 1]]),
        ("runs of 5", runs(5).collect(), [[634, 26, 818], [632, 29, 820], [632, 29, 820]]),
        (
            "runs of 21",
            runs(21).collect(),
            [[1464, 268, 4723], [1502, 583, 4649], [1502, 583, 4649]],
        ),
        (
            "runs of 21, down",
            runs(21).map(|page| (1 << 22) - page).collect(),
            [[1459, 265, 4726], [1426, 517, 4758], [1478, 726, 4715]],
        ),
        ("a comb", comb.collect(), [[584, 0, 223], [540, 0, 0], [533, 0, 0]]),
        ("to and fro", to_and_fro.collect(), [[106, 8, 478], [38, 32, 8], [27, 160, 0]]),
        (
            "no order",
            (0..3000).map(|_| random(&mut state) % 60_000).collect(),
            [[2924, 1, 0], [2924, 1, 0], [2924, 1, 0]],
        ),
        (
            "a mixture",
            mixture(&mut state),
            [[13628, 645, 21266], [9270, 2017, 25084], [9774, 4889, 24466]],
        ),
    ];
    let costs = patterns.each_ref().map(|(name, pattern, _)| {
        let cost = [3, 5, 9].map(|order| {
            let mut program = Program::new(0..1 << 23, order);
            pattern.iter().for_each(|page| program.touch(*page));
            [program.faults, program.wasted() as u64, program.tally.used.into()]
        });
        (*name, cost)
    });
    assert_eq!(costs, patterns.map(|(name, _, cost)| (name, cost)));
}

#[test]
fn order_zero_is_off() {
    let mut program = Program::new(0..600, 0);
    (0..600).for_each(|page| program.touch(page));
    assert_eq!((program.faults, program.wasted()), (600, 0));
}

#[test]
fn forty_hits_in_a_row_at_any_order() {
    let mut program = Program::new(0..1 << 20, u8::MAX);
    (0..40 * TABLE).for_each(|page| program.touch(page));
    assert!(program.faults < 2 * 40, "{}", program.faults);
}

#[test]
fn streams_work_at_both_ends_of_the_page_numbers() {
    let top = 1 << 52;
    for area in [0..3, 0..1, top - 3..top, top - 1..top] {
        let mut up = Program::new(area.clone(), 9);
        area.clone().for_each(|page| up.touch(page));
        let mut down = Program::new(area.clone(), 9);
        area.rev().for_each(|page| down.touch(page));
    }
}

#[test]
fn a_short_allocation_shrinks_the_record() {
    let mut program = Program::new(0..TABLE, 5);
    (0..40).for_each(|page| program.touch(page));
    let page = (0..TABLE).find(|page| !program.pages.contains_key(page)).unwrap();
    (0..page).for_each(|page| program.touch(page));
    let miss = program.miss(page);
    let seen = |at| program.pages.get(&at).copied().unwrap_or(Seen::Empty);
    let window = program.streams.predict(&miss, 5, &program.defaults, seen);
    assert!(!window.is_single());
    program.check();
    // No frame except the faulting page's own.
    program.streams.mapped(&window, page..page + 1);
    program.pages.insert(page, Seen::Used);
    while let Some(check) = program.streams.to_check_in(SpaceId(1), &(0..TABLE)) {
        if check.record.page == page {
            assert_eq!(Streams::extent(&check.record).1, page..page + 1);
        }
        program.streams.checked(&check, |_| Seen::Used);
    }
}

#[test]
fn a_new_space_resets_the_predictor() {
    let mut program = Program::new(0..TABLE, 5);
    (0..200).for_each(|page| program.touch(page));
    assert!(program.streams.credit > 0);
    let miss = Miss { space: SpaceId(2), ..program.miss(300) };
    assert!(program.streams.predict(&miss, 5, &program.defaults, |_| Seen::Empty).is_single());
    assert_eq!((program.streams.credit, program.streams.len), (0, 0));
    assert_eq!(program.streams.to_check_in(SpaceId(1), &(0..TABLE)), None);
}

/// Child threads, each of which touches a few pages behind many used pages, and ends.
#[test]
fn ended_threads_teach_new_threads() {
    let mut wasted = Vec::new();
    let mut defaults = Defaults::new();
    for _ in 0..60 {
        let mut child = Program::new(0..TABLE, 5);
        child.defaults = defaults;
        child.pages.extend((0..100).map(|page| (page, Seen::Used)));
        child.touch(100);
        wasted.push(child.wasted());
        while let Some(check) = child.streams.to_check_in(SpaceId(1), &(0..TABLE)) {
            let seen = |page| child.pages.get(&page).copied().unwrap_or(Seen::Empty);
            child.streams.checked(&check, seen);
        }
        child.streams.exit(&child.defaults);
        defaults = child.defaults;
    }
    assert!(wasted[0] > 4, "{wasted:?}");
    assert_eq!(wasted.last(), Some(&0), "{wasted:?}");
}

#[test]
fn previously_used_pages_are_mapped_again() {
    let program = Program::new(0..TABLE, 5);
    let history = BlockHistory { known: !0, expected: 0x1_00f0_f00f, last: 0x3_00f0_f00f };
    let predict = |page: u64, order: u8| {
        let miss = Miss { history, ..program.miss(page) };
        let taken = |page| if page == 64 + 3 { Seen::Used } else { Seen::Empty };
        let window = Streams::new().predict(&miss, order, &Defaults::new(), taken);
        check(&window, &miss, order);
        window.pages().map(|page| page - 64).collect::<Vec<_>>()
    };
    assert_eq!(predict(64, 9), [0, 1, 2, 12, 13, 14, 15, 20, 21, 22, 23, 32]);
    assert_eq!(predict(64, 5), [0, 1, 2, 12, 13, 14, 15, 20, 21, 22, 23]);
    assert_eq!(predict(64 + 21, 3), [20, 21, 22, 23]);
    assert_eq!(predict(64 + 21, 0), [21]);
    assert_eq!(predict(64 + 8, 5), [8], "not used before");
    assert_eq!(predict(64 + 33, 5), [32, 33], "used only the last time");
}

#[test]
fn kinds_learn_separately() {
    let mut program = Program::new(0..TABLE, 5);
    (0..TABLE).for_each(|page| program.touch(page));
    let taught = |kind: Kind| {
        let new = Streams::new();
        program.streams.widths[kind as usize] != new.widths[kind as usize]
    };
    assert_eq!([Kind::Read, Kind::Write, Kind::Copy].map(taught), [false, true, false]);
}

proptest! {
    /// For any accesses, page table and history, windows follow the rules (`check`), and no page
    /// out of reach is read.
    #[test]
    fn windows_follow_the_rules(
        start in prop_oneof![Just(0u64), Just((1 << 52) - 700), 0..1u64 << 40],
        len in 1..700u64,
        order in 0..12u8,
        touches in proptest::collection::vec((0..700u64, 0..6u8, any::<u64>(), any::<u64>()), 1..200),
    ) {
        let mut program = Program::new(start..start + len, order);
        for (at, what, known, used) in touches {
            let page = start + at % len;
            match what {
                0 => drop(program.pages.remove(&page)),
                1 => {
                    let history = BlockHistory { known, expected: known & used, last: known & used };
                    let miss = Miss { history, ..program.miss(page) };
                    let seen = |page| {
                        assert!(miss.reach.contains(&page));
                        program.pages.get(&page).copied().unwrap_or(Seen::Empty)
                    };
                    let window = program.streams.predict(&miss, order, &program.defaults, seen);
                    check(&window, &miss, order);
                }
                2 => while let Some(check) =
                    program.streams.to_check_in(SpaceId(1), &(page..page + 64))
                {
                    program.streams.checked(&check, |_| Seen::Empty);
                },
                _ => program.touch(page),
            }
        }
    }
}
