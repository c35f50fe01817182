//! Pairs of operations on many simulated CPUs, under some seeds; `cargo run --release -p faultless-virtual --example pairs` runs as many as are asked
//! for.

// The checks are written over the subsystem; here it is the one of the virtual machine.
extern crate faultless_observed as faultless;

mod crowd;

use crowd::{Crowd, Ran};
use faultless_virtual::Profile;

fn crowd(locking: &str, cpus: usize, seed: u64) -> Ran {
    let profile = Profile::bundled("two-socket").unwrap();
    let crowd = Crowd { profile: &profile, cpus, seed, locking, cases: 2, only: None };
    let ran = crowd.run(|_| ());
    assert!(ran.bad.is_empty(), "{locking}, seed {seed}: {}", ran.bad[0]);
    ran
}

#[test]
fn pairs_of_a_crowd_have_an_order() {
    let start = std::time::Instant::now();
    let cpus = std::env::var("C").map_or(64, |it| it.parse().unwrap());
    let ran = crowd("speculative", cpus, 1);
    println!("{} rounds, {:?}, {} ms", ran.rounds, start.elapsed(), ran.took/1_000_000_000);
}
