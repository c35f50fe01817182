//! Storms under some seeds. `cargo run --release -p faultless-virtual --example storm` runs
//! any number of seeds.

#[path = "storm/mod.rs"]
mod storm;

use faultless_virtual::Profile;
use storm::Storm;

fn storms(policy: &str, cpus: usize, seeds: std::ops::Range<u64>) {
    let profile = Profile::bundled("two-socket").unwrap();
    for seed in seeds {
        let storm = Storm { profile: &profile, cpus, seed, steps: 30 };
        let settings = [format!("locking={policy}")];
        let settings = settings.each_ref().map(String::as_str);
        let (took, counters) = storm.run(&settings);
        assert!(took > 0);
        if seed == 1 && policy == "speculative" {
            let count = |name| counters.iter().find(|(known, _)| *known == name).unwrap().1;
            assert!(count("range_lock_write") > cpus as u64 * 10, "{counters:?}");
            // A second run takes the same time, to the last picosecond.
            assert_eq!(storm.run(&settings).0, took);
        }
    }
}

#[test]
fn cpus_find_their_own_contents() {
    storms("speculative", 16, 0..6);
}

#[test]
fn cpus_find_their_own_contents_under_the_baselines() {
    storms("per_vma", 8, 1..3);
    storms("mmap_lock", 8, 1..3);
}
