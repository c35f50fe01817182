//! Every reachable state of two CPUs of a program, a CPU that moves and evicts its page, and
//! settlements; and for each step on which deferred flushes rest, a check that a law breaks without
//! the step.
//!
//! `cargo test --release -p faultless-model`

mod common;

use faultless::Mutant;
use faultless_model::deferred::Deferral;

/// The number of kernel operations, and of earlier agings of the page: larger numbers give too many
/// states.
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
fn the_laws_hold_with_flush_free_pages() {
    common::hold(model(ROUNDS[1], None));
}

/// Checks that `law` breaks without `mutant`.
fn breaks(mutant: Mutant, law: &'static str) {
    let rounds = ROUNDS[usize::from(mutant == Mutant::FlushFreeChecksStamps)];
    common::breaks(model(rounds, Some(mutant)), mutant, law);
}

const STALE: &str = "law 1: never a stale owner";
const LOST: &str = "law 2: never a lost write";

#[test]
fn unmapping_a_cached_page_without_a_flush_leaves_a_stale_owner() {
    breaks(Mutant::FlushFreeChecksStamps, STALE);
}

#[test]
fn a_move_without_a_flush_leaves_a_stale_owner() {
    breaks(Mutant::MigrateFlush, STALE);
}

#[test]
fn an_eviction_without_a_flush_leaves_a_stale_owner() {
    breaks(Mutant::EvictFlush, STALE);
}

#[test]
fn a_deferred_flush_of_a_writable_page_loses_a_store() {
    breaks(Mutant::DeferLooksAtStores, LOST);
}

#[test]
fn making_a_page_writable_without_a_settlement_hides_its_stores() {
    breaks(Mutant::WriteFlushesPending, LOST);
}

#[test]
fn overwriting_an_evicted_page_without_a_settlement_hides_it() {
    breaks(Mutant::OverwriteSettles, LOST);
}

#[test]
fn a_settlement_without_waiting_frees_used_frames() {
    breaks(Mutant::FlushAwaitsCpus, STALE);
}

#[test]
fn a_collection_that_checks_no_cpu_frees_used_frames() {
    breaks(Mutant::CollectLooks, STALE);
}

#[test]
fn a_frame_freed_before_its_flush_is_in_use() {
    breaks(Mutant::ReleaseLooksAtStamps, STALE);
}
