//! Every guest program passes on the bare kernel, on one CPU and on four.

mod common;

use common::{deterministic, parallel, passes, run};
use faultless_boot::Machine;

/// Runs a program of checks on both machines.
#[track_caller]
fn both(name: &str, args: &[&str], least: usize) {
    for machine in [deterministic(), parallel()] {
        passes(&machine, name, args, least);
    }
}

#[test]
fn faults() {
    both("faults", &[], 10);
}

#[test]
fn signals() {
    both("signals", &[], 10);
}

#[test]
fn threads() {
    both("threads", &[], 14);
}

#[test]
fn processes() {
    both("processes", &[], 8);
}

#[test]
fn files() {
    both("files", &[], 15);
}

#[test]
fn clocks() {
    both("clocks", &[], 6);
}

#[test]
fn procfs() {
    both("procfs", &[], 5);
}

#[test]
fn shm() {
    both("shm", &[], 6);
}

#[test]
fn sysv() {
    both("sysv", &[], 3);
}

#[test]
fn memory() {
    both("memory", &[], 5);
}

#[test]
fn translations() {
    passes(&deterministic(), "tlb", &["rounds=500"], 13);
    passes(&parallel(), "tlb", &["rounds=100"], 13);
}

/// No shootdown is sent where no other CPU can hold a translation.
#[test]
fn shootdowns() {
    for machine in [deterministic(), parallel(), Machine { cpus: 4, ..deterministic() }] {
        let ran = passes(&machine, "counts", &["rounds=50", "strict=yes"], 8);
        let sent =
            ran.output.lines().find_map(|line| line.strip_prefix("count readers shootdowns "));
        let sent: u64 = sent.and_then(|count| count.parse().ok()).expect("a count");
        // And where others do hold one, it is.
        assert_eq!(sent > 0, machine.cpus > 1, "{ran}");
    }
}

/// Whoever asks for more than there is, is refused or ended; the machine goes on.
#[test]
fn out_of_memory() {
    for machine in [deterministic(), parallel()] {
        passes(&Machine { memory: 256 << 20, ..machine }, "oom", &[], 12);
    }
}

/// A minute of random system calls from every CPU, beside some seconds of them on one.
#[test]
fn random_calls() {
    passes(&deterministic(), "fuzz", &["seconds=2", "calls=all", "seed=7"], 1);
    passes(&parallel(), "fuzz", &["seconds=60", "calls=all"], 1);
}

#[test]
fn workloads() {
    let runs: [&[&str]; 8] = [
        &["pft", "size=4M", "threads=4"],
        &["page_fault1", "size=1M", "passes=3", "threads=4"],
        &["page_fault1", "size=1M", "passes=3", "threads=4", "mode=processes"],
        &["mmap1", "passes=50", "threads=4"],
        &["brk1", "passes=50", "threads=2", "mode=processes"],
        &["ebizzy", "seconds=0.2", "threads=4"],
        &["forks", "seconds=0.2"],
        &["small_allocs", "seconds=0.2", "threads=2"],
    ];
    for args in runs {
        for machine in [deterministic(), parallel()] {
            let ran = run(&machine, "workload", args).exited(0);
            assert!(ran.output.contains("\noperations "), "{args:?}: {ran}");
        }
    }
    let ran = run(&deterministic(), "workload", &["bogus"]).exited(1);
    assert!(ran.errors.contains("page_fault1"), "{ran}");
}

#[test]
fn rows() {
    let ran = run(&deterministic(), "rows", &["passes=1"]).exited(0);
    assert_eq!(ran.output.lines().filter(|line| line.starts_with("row ")).count(), 14, "{ran}");
}
