//! A few rounds of the stress program, `examples/stress.rs`, which runs many.

#[allow(dead_code, reason = "the program uses all parts")]
#[path = "../examples/stress/mod.rs"]
mod rounds;

use rounds::plan::Plan;
use rounds::tally::Tally;
use rounds::world::{self, Control, Ended};

#[test]
fn rounds_of_random_operations_lose_no_data() {
    let (tally, control) = (Tally::default(), Control::new());
    for round in 0..8 {
        // Shorter than the program's.
        let plan = Plan { phases: 2, ..Plan::new(1, round) };
        let ended = world::run(&plan, &tally, &control);
        assert_eq!(ended, Ok(Ended::Whole), "round {round} of seed 1\n{plan}");
    }
    assert!(tally.operations() > 1000, "{tally}");
}
