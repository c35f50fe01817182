//! Every reachable state of three CPUs; and for each step on which the machine rests, a check that
//! a law breaks without the step.
//!
//! `cargo test --release -p faultless-model`

mod common;

use faultless::Mutant;
use faultless_model::protocol::Protocol;

/// The rounds of unmapping: the remains of one round meet the next round, and its remains meet the
/// last.
const ROUNDS: u8 = 3;

fn model(lost: Option<Mutant>) -> Protocol {
    Protocol { rounds: ROUNDS, lost }
}

#[test]
fn the_laws_hold_in_every_state() {
    common::hold(model(None));
}

/// Checks that `law` breaks without `mutant`.
fn breaks(mutant: Mutant, law: &'static str) {
    common::breaks(model(Some(mutant)), mutant, law);
}

const STALE: &str = "law 1: never a stale owner";
const ACCOUNTED: &str = "law 6: every frame is accounted for";
const HAUNTED: &str = "nothing is mapped behind a writer's back";

#[test]
fn without_the_writers_fence_a_page_is_mapped_behind_its_back() {
    breaks(Mutant::WriterFence, HAUNTED);
}

#[test]
fn without_the_faults_barrier_a_page_is_mapped_behind_the_writers_back() {
    breaks(Mutant::FaultFence, HAUNTED);
}

#[test]
fn without_the_second_read_a_page_is_mapped_behind_the_writer() {
    breaks(Mutant::SecondLook, HAUNTED);
}

#[test]
fn a_writer_ignoring_a_busy_entry_loses_a_frame() {
    breaks(Mutant::ReplaceWaits, ACCOUNTED);
}

#[test]
fn a_frame_freed_before_the_flush_is_read_by_its_old_user() {
    breaks(Mutant::FlushFirst, STALE);
}

#[test]
fn an_acknowledgement_without_a_drop_leaves_a_translation() {
    breaks(Mutant::DropTranslations, STALE);
}

#[test]
fn a_flush_without_a_wait_has_no_effect() {
    breaks(Mutant::AwaitAnswers, STALE);
}
