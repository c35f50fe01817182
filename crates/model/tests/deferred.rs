//! Every state that two CPUs of a program, one that moves and evicts its page, and settlements can
//! reach; and for each line that deferred flushes rest on, that a law breaks without it.
//!
//! `cargo test --release -p faultless-model`

mod common;

use faultless::Mutant;
use faultless_model::deferred::Deferral;

/// Operations of the kernel, and how often it ages the page before: all states of more of both are
/// too many.
const ROUNDS: [(u8, u8); 2] = [(2, 0), (1, 1)];
/// Stores of the program.
const STORES: u8 = 2;

fn model((rounds, ages): (u8, u8), lost: Option<Mutant>) -> Deferral {
    Deferral { rounds, ages, stores: STORES, lost }
}

#[test]
fn the_laws_hold_in_every_state() {
    common::hold(model(ROUNDS[0], None));
}

#[test]
#[ignore = "takes half a minute; `.ci/long` runs it"]
fn the_laws_hold_where_pages_are_cold() {
    common::hold(model(ROUNDS[1], None));
}

/// The law that breaks without `mutant`.
fn breaks(mutant: Mutant, law: &'static str) {
    let rounds = ROUNDS[usize::from(mutant == Mutant::ColdLooksAtStamps)];
    common::breaks(model(rounds, Some(mutant)), mutant, law);
}

const STALE: &str = "law 1: never a stale owner";
const LOST: &str = "law 2: never a lost write";

#[test]
fn a_page_that_is_taken_without_a_flush_while_a_cpu_has_it_leaves_a_stale_owner() {
    breaks(Mutant::ColdLooksAtStamps, STALE);
}

#[test]
fn a_move_that_does_not_flush_leaves_a_stale_owner() {
    breaks(Mutant::MigrateFlush, STALE);
}

#[test]
fn an_eviction_that_does_not_flush_leaves_a_stale_owner() {
    breaks(Mutant::EvictFlush, STALE);
}

#[test]
fn a_flush_that_is_deferred_where_stores_are_allowed_loses_one() {
    breaks(Mutant::DeferLooksAtStores, LOST);
}

#[test]
fn who_makes_a_page_writable_without_a_settlement_hides_its_stores() {
    breaks(Mutant::WriteSettles, LOST);
}

#[test]
fn who_overwrites_an_evicted_page_without_a_settlement_hides_it() {
    breaks(Mutant::OverwriteSettles, LOST);
}

#[test]
fn a_settlement_that_waits_for_nobody_frees_what_is_in_use() {
    breaks(Mutant::SettleAwaits, STALE);
}

#[test]
fn a_collection_that_looks_at_no_cpu_frees_what_is_in_use() {
    breaks(Mutant::CollectLooks, STALE);
}

#[test]
fn a_frame_that_is_freed_before_its_own_flush_is_in_use() {
    breaks(Mutant::ReleaseLooksAtStamps, STALE);
}
