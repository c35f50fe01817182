//! Every reachable state of two writers, a fault, a migration and TLBs, for many pairs of calls;
//! and for each step on which the protocol rests, a check that a law breaks without the step.
//!
//! `cargo test --release -p faultless-model`

use faultless_model::explore::{ENDS, Explored, explore};
use faultless_model::leaves::laws::{
    ENTRIES, FRAMES_HELD, GONE, LINKED, MAPPED, ONCE, OWN, RETURNS, SERIAL, TRANSLATIONS,
};
use faultless_model::leaves::{Call, Change, Leaves, Rule};
use std::time::Instant;

/// The objects of new mappings. The pages begin with the first, so only that mapping merges.
const SAME: Change = Change::Map(0);
const OTHER: Change = Change::Map(1);
/// A page table for each page, or one for both pages of the lower leaf.
const SEPARATE: [u8; 3] = [0, 1, 2];
const SHARED: [u8; 3] = [0, 0, 2];
/// All ranges: inside of each leaf, beside the bound, and across the bound.
const RANGES: [(u8, u8); 6] = [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)];

/// Two writers with these calls, beside a program that faults on `touched`.
fn scenario(first: &[Call], second: &[Call], touched: &[u8]) -> Leaves {
    Leaves {
        pairs: vec![[first.to_vec(), second.to_vec()]],
        touched: touched.to_vec(),
        present: Vec::new(),
        moved: None,
        evicts: false,
        tables: SEPARATE,
        both_tlbs: false,
        strangers: 0,
        ends_alike: false,
        lost: None,
    }
}

/// Returns each pair of these lists of calls.
fn pairs(lists: &[Vec<Call>]) -> Vec<[Vec<Call>; 2]> {
    let with = |first: usize| {
        lists[first..].iter().map(move |second| [lists[first].clone(), second.clone()])
    };
    (0..lists.len()).flat_map(with).collect()
}

/// Returns each change of `changes` in each of `ranges`, one call a list.
fn single_calls(changes: &[Change], ranges: &[(u8, u8)]) -> Vec<Vec<Call>> {
    let calls =
        |change: Change| ranges.iter().map(move |(start, end)| vec![Call(change, *start, *end)]);
    changes.iter().flat_map(|change| calls(*change)).collect()
}

/// Lists of calls that unmap, revoke or replace pages, and undo the change.
fn changes_and_undos() -> Vec<Vec<Call>> {
    let [lower, upper, both] = [(1, 2), (2, 3), (1, 3)];
    let then = |range: (u8, u8), changes: [Change; 2]| {
        changes.map(|change| Call(change, range.0, range.1)).to_vec()
    };
    [lower, upper, both]
        .into_iter()
        .flat_map(|range| {
            let pairs = [[Change::Unmap, SAME], [Change::Revoke, Change::Grant], [OTHER, SAME]];
            pairs.map(|changes| then(range, changes))
        })
        .collect()
}

/// The laws hold in each state of `model`, and each state can end.
fn hold(model: &Leaves) -> Explored {
    let start = Instant::now();
    let explored = explore(model, |state| model.is_ended(state), None)
        .unwrap_or_else(|broken| panic!("{}: {:?}\n{:#?}", broken.law, broken.trace, broken.state));
    println!("{} pairs of calls: {explored:?} in {:.1?}", model.pairs.len(), start.elapsed());
    explored
}

/// `law` holds in `model`, and breaks without `rule`.
fn breaks(rule: Rule, law: &str, model: Leaves) {
    if let Err(broken) = explore(&model, |state| model.is_ended(state), Some(law)) {
        panic!("with all rules: {broken:#?}");
    }
    let model = Leaves { lost: Some(rule), ..model };
    let broken = explore(&model, |state| model.is_ended(state), Some(law))
        .expect_err("the law holds without the rule");
    println!("without {rule:?}, {law} is broken after {} steps", broken.trace.len());
    println!("{:?}: {:?}", model.pairs, broken.trace);
}

#[test]
fn the_laws_hold_for_each_pair_of_calls() {
    let calls = single_calls(&[Change::Unmap, OTHER, Change::Revoke], &RANGES);
    hold(&Leaves { pairs: pairs(&calls), present: vec![1], ..scenario(&[], &[], &[1, 2]) });
}

#[test]
fn the_laws_hold_when_changes_are_undone() {
    let pairs = pairs(&changes_and_undos());
    hold(&Leaves { pairs, present: vec![2], ..scenario(&[], &[], &[1]) });
}

#[test]
fn the_laws_hold_when_vmas_go_to_another_space() {
    let calls = single_calls(&[Change::Unmap, OTHER], &RANGES);
    hold(&Leaves { pairs: pairs(&calls), strangers: 1, ..scenario(&[], &[], &[1]) });
}

#[test]
fn the_laws_hold_beside_a_migration() {
    let calls = single_calls(&[Change::Unmap, OTHER, Change::Revoke], &RANGES);
    let model = scenario(&[], &[], &[1]);
    hold(&Leaves { pairs: pairs(&calls), present: vec![1, 2], moved: Some(1), ..model });
}

#[test]
fn the_laws_hold_with_one_table_for_two_pages() {
    let calls = single_calls(&[Change::Unmap, OTHER], &RANGES);
    let model = scenario(&[], &[], &[0, 1]);
    hold(&Leaves { pairs: pairs(&calls), present: vec![0], tables: SHARED, ..model });
}

#[test]
fn the_laws_hold_for_two_calls_beside_a_migration() {
    let pairs = pairs(&changes_and_undos());
    let model = scenario(&[], &[], &[1]);
    hold(&Leaves { pairs, present: vec![1], moved: Some(1), strangers: 1, ..model });
}

#[test]
fn the_laws_hold_for_two_calls_beside_an_eviction() {
    let lists = RANGES[1..5].iter().flat_map(|&(start, end)| {
        let then = [Change::Unmap, OTHER, Change::Grant].map(|change| Call(change, start, end));
        then.map(|then| vec![Call(Change::Revoke, start, end), then])
    });
    let pairs = pairs(&lists.collect::<Vec<_>>());
    let model = scenario(&[], &[], &[1]);
    hold(&Leaves { pairs, present: vec![1], moved: Some(1), evicts: true, ..model });
}

/// The laws hold for moves beside moves and `changes`, with a migration of source or target.
fn hold_with_moves(changes: &[Change]) {
    let moves = single_calls(&[Change::MoveUp, Change::MoveDown], &[(0, 2), (1, 3)]);
    let calls = single_calls(changes, &RANGES[1..5]);
    let pairs = pairs(&moves.into_iter().chain(calls).collect::<Vec<_>>());
    for moved in [1, 2] {
        let model = Leaves { present: vec![1], moved: Some(moved), ..scenario(&[], &[], &[1, 2]) };
        hold(&Leaves { pairs: pairs.clone(), ..model });
    }
}

#[test]
fn the_laws_hold_for_moved_pages() {
    hold_with_moves(&[OTHER]);
}

#[test]
#[ignore = "takes a minute"]
fn the_laws_hold_for_moved_pages_beside_all_changes() {
    hold_with_moves(&[Change::Unmap, OTHER, Change::Revoke]);
}

#[test]
fn the_laws_hold_with_two_tlbs() {
    let calls = single_calls(&[Change::Unmap, OTHER, Change::Revoke], &RANGES);
    let model = scenario(&[], &[], &[1, 2]);
    hold(&Leaves { pairs: pairs(&calls), present: vec![1], both_tlbs: true, ..model });
}

#[test]
#[ignore = "takes minutes, and 2 GiB of memory"]
fn the_laws_hold_for_faults_on_all_pages() {
    let calls = changes_and_undos().into_iter().chain(single_calls(&[Change::Unmap], &RANGES));
    let pairs = pairs(&calls.collect::<Vec<_>>());
    hold(&Leaves { pairs, present: vec![1], strangers: 1, ..scenario(&[], &[], &[0, 1, 2]) });
}

#[test]
fn a_mark_that_ends_before_the_flush_leaves_a_translation() {
    let model = scenario(&[Call(Change::Unmap, 1, 2)], &[], &[1]);
    breaks(Rule::MarkOutlastsFlush, TRANSLATIONS, Leaves { present: vec![1], ..model });
}

#[test]
fn a_fault_without_the_space_id_uses_a_vma_of_another_space() {
    let model = scenario(&[Call(Change::Unmap, 0, 2)], &[], &[1]);
    breaks(Rule::SpaceIsChecked, OWN, Leaves { strangers: 1, ..model });
}

#[test]
fn a_removal_that_leaves_the_count_lets_a_fault_pass() {
    let model = scenario(&[Call(Change::Unmap, 0, 2)], &[], &[1]);
    breaks(Rule::RemovalMovesCount, OWN, model);
}

#[test]
fn a_count_checked_before_the_entry_is_busy_lets_a_fault_pass() {
    let model = scenario(&[Call(Change::Unmap, 1, 2)], &[], &[1]);
    breaks(Rule::CheckFollowsBusy, ENTRIES, Leaves { tables: SHARED, ..model });
}

#[test]
fn bounds_read_after_the_walk_put_a_page_in_an_unlinked_table() {
    let calls = [Call(Change::Unmap, 1, 2), Call(SAME, 1, 2)];
    breaks(Rule::BoundsPrecedeWalk, LINKED, scenario(&calls, &[], &[0, 1]));
}

#[test]
fn a_count_that_repeats_shows_a_page_of_the_replaced_object() {
    let model = scenario(&[Call(OTHER, 2, 3)], &[], &[2]);
    breaks(Rule::CountNeverRepeats, ENTRIES, model);
}

#[test]
fn waiting_for_an_even_count_never_ends_if_the_vma_is_free() {
    let model = scenario(&[Call(Change::Unmap, 2, 3)], &[], &[2]);
    breaks(Rule::WaitsForChange, ENDS, model);
}

#[test]
fn waiting_for_another_count_never_ends_if_the_vma_is_free() {
    let model = scenario(&[Call(Change::Unmap, 2, 3)], &[], &[2]);
    breaks(Rule::WaitsAtMark, ENDS, model);
}

#[test]
fn locks_in_descending_order_deadlock() {
    let model = scenario(&[Call(Change::Unmap, 1, 3)], &[Call(Change::Revoke, 1, 3)], &[]);
    breaks(Rule::LocksAscend, ENDS, model);
}

#[test]
fn a_writer_that_registers_after_its_search_misses_the_wake_up() {
    let model = scenario(&[Call(Change::Unmap, 1, 2)], &[Call(Change::Revoke, 1, 2)], &[]);
    breaks(Rule::WaiterHoldsLock, ENDS, model);
}

#[test]
fn a_fault_that_registers_after_its_search_misses_the_wake_up() {
    let model = scenario(&[Call(Change::Unmap, 1, 2)], &[], &[1]);
    breaks(Rule::WaiterHoldsLock, ENDS, model);
}

#[test]
fn a_migration_that_ignores_marks_loses_a_store() {
    let model = scenario(&[Call(Change::Revoke, 1, 2)], &[], &[1]);
    let model = Leaves { present: vec![1], moved: Some(1), ..model };
    breaks(Rule::MigrationSeesMarks, FRAMES_HELD, model);
}

#[test]
fn a_migration_that_flushes_a_moved_page_alone_leaves_a_translation() {
    let model = scenario(&[Call(Change::MoveUp, 1, 3)], &[], &[1]);
    let model = Leaves { present: vec![1], moved: Some(2), ..model };
    breaks(Rule::MigrationFlushesSpace, FRAMES_HELD, model);
}

#[test]
fn an_unmapping_of_an_evicted_page_without_a_flush_leaves_a_translation() {
    let calls = [Call(Change::Revoke, 1, 2), Call(Change::Unmap, 1, 2)];
    let model = scenario(&calls, &[], &[1]);
    let model = Leaves { present: vec![1], moved: Some(1), evicts: true, ..model };
    breaks(Rule::FlushCoversEvicted, TRANSLATIONS, model);
}

#[test]
fn a_joined_bit_under_one_lock_counts_wrongly() {
    let model = scenario(&[Call(Change::Revoke, 1, 2)], &[Call(Change::Revoke, 2, 3)], &[]);
    breaks(Rule::JoinedUnderBothLocks, ONCE, model);
}

#[test]
fn a_missing_page_reported_during_an_edit_is_a_replaced_page() {
    let model = scenario(&[Call(OTHER, 1, 2)], &[], &[1]);
    breaks(Rule::MissingChecksSequence, MAPPED, model);
}

#[test]
fn a_missing_page_reported_before_its_flush_is_still_in_use() {
    let model = scenario(&[Call(Change::Unmap, 1, 2)], &[], &[1]);
    breaks(Rule::MissingSeesMarks, GONE, Leaves { present: vec![1], ..model });
}

#[test]
fn a_writer_that_waits_for_an_entry_with_a_leaf_deadlocks() {
    let model = scenario(&[Call(Change::Revoke, 1, 2)], &[Call(Change::Unmap, 0, 1)], &[]);
    let model = Leaves { present: vec![1], moved: Some(1), ..model };
    breaks(Rule::BusyWithoutLeaf, ENDS, model);
}

#[test]
fn a_writer_that_waits_for_a_flush_with_a_leaf_deadlocks() {
    let model = scenario(&[Call(Change::Revoke, 1, 2)], &[Call(Change::Unmap, 0, 1)], &[]);
    breaks(Rule::FlushWithoutLeaf, ENDS, Leaves { present: vec![1], ..model });
}

#[test]
fn a_new_mapping_that_ignores_marks_returns_before_the_flush() {
    let model = scenario(&[Call(Change::Unmap, 1, 2)], &[Call(OTHER, 1, 2)], &[1]);
    breaks(Rule::GrowthSeesMarks, RETURNS, Leaves { present: vec![1], ..model });
}

#[test]
fn unlinking_a_table_with_a_marked_page_loses_a_page() {
    let model = scenario(&[Call(Change::Unmap, 0, 1)], &[Call(Change::Unmap, 1, 2)], &[]);
    let model = Leaves { present: vec![0, 1], tables: SHARED, ..model };
    breaks(Rule::PruneSeesMarks, LINKED, model);
}

#[test]
fn a_spanning_call_that_edits_leaf_by_leaf_is_overtaken() {
    let revokes = [Call(Change::Revoke, 2, 3), Call(Change::Revoke, 1, 3)];
    let model = scenario(&[Call(Change::Grant, 1, 3)], &revokes, &[]);
    breaks(Rule::SpanMarksFirst, SERIAL, Leaves { ends_alike: true, ..model });
}
