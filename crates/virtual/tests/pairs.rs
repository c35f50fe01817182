//! Pairs of operations on many simulated CPUs, under some seeds.
//! `cargo run --release -p faultless-virtual --example pairs` runs any number of seeds.

// The checks are written for the subsystem; here they use the virtual machine's copy.
extern crate faultless_observed as faultless;

mod crowd;

use crowd::pairs::op::BOUNDARY;
use crowd::{Crowd, POWERS, Ran};
use faultless_virtual::Profile;
use std::collections::BTreeSet;

fn pairs(locking: &str, cpus: usize, seed: u64, cases: u64) -> Ran {
    let profile = Profile::bundled("two-socket").unwrap();
    let ran = Crowd { profile: &profile, cpus, seed, locking, cases, only: None }.run(|_| ());
    assert!(ran.bad.is_empty(), "{locking}, seed {seed}: {}", ran.bad[0]);
    assert!(ran.rounds >= cpus as u64 * cases);
    ran
}

#[test]
fn pairs_of_64_cpus_are_serializable() {
    let ran = pairs("speculative", 64, 1, 1);
    let count = |name| ran.counters.iter().find(|(known, _)| *known == name).unwrap().1;
    assert!(
        count("range_lock_write") > 1_000 && count("spf_vma_changed") > 10,
        "{:?}",
        ran.counters
    );
}

#[test]
fn pairs_of_few_cpus_are_serializable_under_the_baselines() {
    pairs("per_vma", 8, 2, 4);
    pairs("mmap_lock", 8, 3, 4);
}

#[test]
fn arenas_of_many_seeds_have_boundaries_of_every_power() {
    let profile = Profile::bundled("two-socket").unwrap();
    let (locking, cases) = ("speculative", 1);
    let largest = |seed| {
        let crowd = Crowd { profile: &profile, cpus: 64, seed, locking, cases, only: None };
        let boundaries = (0..64).map(|cpu| crowd.arena(cpu).addr(BOUNDARY));
        boundaries.map(u64::trailing_zeros).max()
    };
    let found: BTreeSet<_> = (0..400).filter_map(largest).collect();
    // Of small powers, another arena of the seed is at a multiple of a larger one.
    assert!(POWERS.filter(|power| *power > 33).all(|power| found.contains(&power)), "{found:?}");
}

#[test]
fn seed_determines_the_schedule() {
    let [first, again] = [(); 2].map(|()| pairs("speculative", 8, 4, 2));
    // To the last picosecond.
    assert_eq!(first, again);
    assert_ne!(pairs("speculative", 8, 5, 2).took, first.took);
}
