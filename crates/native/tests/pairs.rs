//! Pairs of operations of two CPUs on one space end like one of their sequential orders. Ten
//! million rounds are
//! `cargo run --release -p faultless-native --example pairs -- --rounds 10_000_000`.

#[path = "common/pairs.rs"]
mod stress;

use core::sync::atomic::Ordering;
use faultless::Locking;
use faultless_native::{Config, Native};
use std::collections::BTreeSet;
use stress::pairs::arena::{Arena, POWERS};
use stress::pairs::known::known;
use stress::pairs::op::{BOUNDARY, Op, RW};
use stress::pairs::place::{Base, Relation};
use stress::pairs::table::Kind;
use stress::{Plan, Progress, Source, Thread};

/// Runs `source` under each policy. Returns the number of mapped and of split huge leaves.
fn run(name: &str, source: &Source, rounds: u64) -> [u64; 2] {
    let mut leaves = [0; 2];
    for locking in Locking::ALL {
        let source = source.clone();
        let plan = Plan { source, rounds, seed: 7, locking, jitter: 0, prefault: 0 };
        let progress = Progress::default();
        plan.run(&progress, |number, what| panic!("{name}, {locking:?}, case {number}: {what}"));
        assert!(progress.rounds.load(Ordering::Relaxed) >= rounds);
        leaves[0] += progress.leaves.into_inner();
        leaves[1] += progress.splits.into_inner();
    }
    leaves
}

#[test]
fn random_pairs_match_a_sequential_order() {
    let [mapped, split] = run("random", &Source::Drawn, 6_000);
    assert!(mapped > 50 && split > 50, "{mapped} huge leaves, {split} split");
}

#[test]
fn formerly_failing_programs_match_a_sequential_order() {
    for (name, case) in known() {
        run(name, &Source::One(Box::new(case)), 500);
    }
}

#[test]
fn an_outcome_without_an_order_is_detected() {
    let (_, case) = known().swap_remove(0);
    let mut wrong = case.clone();
    let protect = &mut wrong.sides[1][1];
    let Op::Protect(span, _) = *protect else { panic!("{protect:?}") };
    // As if the page had stayed writable.
    *protect = Op::Protect(span, RW);
    let native = Native::new(Config::default()).unwrap();
    let judged = native.process().unwrap().run(|cpu| {
        let hand = Thread(cpu, case.whole());
        let orders = case.orders(&hand);
        Ok([&case, &wrong].map(|done| {
            let found = done.in_order(&hand, &[0, 1, 1]);
            case.judge(&hand, &found, &orders).is_ok()
        }))
    });
    assert_eq!(judged, Ok([true, false]));
}

#[test]
fn drawn_cases_have_boundaries_of_every_power() {
    let (source, locking) = (Source::Drawn, Locking::Speculative);
    let plan = Plan { source, rounds: 0, seed: 3, locking, jitter: 0, prefault: 0 };
    let powers: BTreeSet<_> = (0..400).map(|number| plan.case(number).power).collect();
    assert!(powers.into_iter().eq(POWERS));
    for power in POWERS {
        let boundary = Arena::whole(power).addr(BOUNDARY);
        assert_eq!(boundary.trailing_zeros(), power, "{boundary:#x}");
    }
}

/// The numbers of SPECIFICATION.md, B16.
#[test]
fn the_specification_matches_the_table() {
    let specification = include_str!("../../../SPECIFICATION.md");
    let [kinds, relations, bases] = [Kind::ALL.len(), Relation::ALL.len(), Base::ALL.len()];
    let says = format!(
        "every pair of {kinds} operations in {relations} relations from {bases} starting states"
    );
    assert!(specification.contains(&says), "SPECIFICATION.md does not contain: {says}");
}
