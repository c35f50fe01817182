//! Workloads in memory of two nodes, with and without deferred flushes, on simulated CPUs.

mod common;

use faultless_virtual::{Config, Profile, Virtual};
use faultless_workload::{Outcome, Workload};

/// Runs `name` on `cpus` simulated CPUs with its required memory.
fn run(name: &str, arguments: &str, cpus: usize, deferred: bool) -> Outcome {
    let profile = Profile::bundled("two-socket").expect("a bundled profile");
    let workload = Workload::parse(name, arguments.split_whitespace()).expect("good arguments");
    let tiers = workload.needs().tiers.expect("a workload that needs tiers");
    let (memory_bytes, slow_bytes) = (tiers.fast, tiers.slow);
    let system = Virtual::new(&profile, Config { cpus, memory_bytes, slow_bytes, seed: 0 });
    let system = system.expect("memory");
    system.set(&format!("deferred_flush={}", u8::from(deferred))).expect("a knob");
    let outcome = workload.run(&system).unwrap_or_else(|failure| panic!("{name}: {failure}"));
    system.audit(&[]).unwrap_or_else(|error| panic!("{name}: {error}"));
    outcome
}

fn counter(outcome: &Outcome, name: &str) -> u64 {
    outcome.counter(name).unwrap_or_else(|| panic!("no counter {name}"))
}

/// Runs without deferral and with deferral.
fn both(name: &str, arguments: &str, cpus: usize) -> [Outcome; 2] {
    [false, true].map(|deferred| run(name, arguments, cpus, deferred))
}

#[test]
fn read_only_table_moves_with_few_interrupts() {
    let [off, on] = both("xsbench", "threads=8 fast=8M lookups=4000", 8);
    for outcome in [&off, &on] {
        assert_eq!(outcome.operations, 8 * 4000);
        assert!(counter(outcome, "pgdemote") > 500 && counter(outcome, "pgpromote_success") > 100);
        assert_eq!(outcome.allocations.len() % 8, 0);
        assert!(outcome.allocation(500) < outcome.allocation(990), "{:?}", outcome.allocations);
        assert!(outcome.footprint.mean() > Some(0.0));
    }
    let [off, on] = [off, on].map(|outcome| counter(&outcome, "tlb_shootdown_sent"));
    assert!(on * 3 < off, "{on} interrupts, and {off} without deferral");
}

#[test]
fn written_table_has_no_deferred_flush() {
    let [off, on] = both("xsbench", "threads=4 fast=4M lookups=1000 access=write", 4);
    assert_eq!(counter(&on, "flush_deferred"), 0);
    assert!(counter(&off, "tlb_flush") > 0 && counter(&on, "tlb_flush") > 0);
}

#[test]
fn models_are_evicted_and_read_again_with_any_number_of_processes() {
    for threads in [1, 2, 4] {
        let [off, on] = both("llm", &format!("threads={threads} fast=2M passes=2"), 4);
        for outcome in [&off, &on] {
            assert!(counter(outcome, "pgsteal") > 500, "{threads}");
            assert!(counter(outcome, "workingset_refault_file") > 100, "{threads}");
        }
        let [off, on] = [off, on].map(|outcome| counter(&outcome, "tlb_shootdown_sent"));
        assert!(on <= off, "{threads}: {on} interrupts, and {off} without deferral");
    }
}

#[test]
fn runs_are_reproducible() {
    let run = || run("xsbench", "threads=4 fast=4M lookups=500", 4, true);
    assert_eq!(run(), run());
}

#[test]
fn invalid_sizes_are_rejected() {
    for (arguments, why) in [("fast=4K", "from 1M on"), ("ratio=1:5", "1:2.3"), ("fast=1", "fast")]
    {
        for name in ["xsbench", "llm"] {
            let error = Workload::parse(name, [arguments]).expect_err("refused").to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}

/// The counts and times of a run do not depend on an earlier run in the same process, whose memory
/// the run may reuse.
#[test]
fn runs_do_not_depend_on_earlier_runs() {
    let simulate = |ratio: &str| {
        let outcome = run("llm", &format!("threads=6 fast=2M passes=2 ratio={ratio}"), 6, false);
        (outcome.counters, outcome.wall, outcome.allocations)
    };
    let first = simulate("1:4");
    simulate("1:1");
    assert_eq!(simulate("1:4"), first);
}
