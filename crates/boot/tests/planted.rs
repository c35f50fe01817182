//! Programs detect faults injected into the kernel, which proves that the regular tests can fail.
//!
//! The programs run their checks in one process: a forked process could not continue with wrong
//! translations.

mod common;

use common::{Ran, boot, busybox, deterministic, machines, parallel, run, tiered};
use faultless_boot::{End, Machine, Program};

fn with(plant: &str, machine: Machine) -> Machine {
    let words = [machine.words, vec![format!("plant={plant}")]].concat();
    Machine { words, ..machine }
}

fn planted(machine: Machine, plant: &str, checks: &[&str]) -> Ran {
    run(&with(plant, machine), "tlb", &[&["here", "rounds=1000"], checks].concat())
}

/// Checks that each of `checks` fails.
#[track_caller]
fn seen(machine: &Machine, plant: &str, checks: &[&str]) {
    for check in checks {
        let ran = planted(machine.clone(), plant, &[check]).exited(1);
        assert!(ran.output.contains(&format!("FAIL {check}: round ")), "{plant}: {ran}");
    }
}

#[test]
fn programs_detect_a_skipped_invlpg() {
    let checks =
        ["remap_reads_fresh", "store_through_stale", "revoked_here", "dontneed_reads_zero"];
    seen(&deterministic(), "skip-invlpg", &checks);
    seen(&parallel(), "skip-invlpg", &checks);
}

#[test]
fn programs_detect_an_early_reuse() {
    let checks = [
        "remap_seen_elsewhere",
        "reuse_seen_elsewhere",
        "revoked_elsewhere",
        "move_seen_elsewhere",
    ];
    seen(&Machine { cpus: 4, ..deterministic() }, "early-reuse", &checks);
    // In parallel, the time of the fault, and the overlap of the CPUs, are random.
    let beside =
        || planted(parallel(), "early-reuse", &["revoked_elsewhere", "move_seen_elsewhere"]);
    assert!((0..5).any(|_| beside().output.contains("FAIL ")), "no run detects the fault");
    // On one CPU there is no other CPU to be too early for.
    planted(deterministic(), "early-reuse", &checks).exited(0);
}

/// If a move of pages omits a flush, permanently or until later, a check of `migrate` detects the
/// omission. The flushes are: of pages that are stored to; before a store to a page moved while
/// read-only; and before the reuse of an old frame.
#[test]
fn programs_detect_a_missing_flush_of_a_move() {
    let all = ["store_elsewhere", "store_after_move", "write_after_move", "old_frames_reused"];
    for deferred in [true, false] {
        let one = tiered(deterministic(), deferred);
        let four = Machine { cpus: 4, ..one.clone() };
        // On one CPU the store itself looks up the new frame.
        let here = [all[0], all[2], all[3]];
        for (plant, machine, checks) in
            [("skip-invlpg", one, &here[..]), ("early-reuse", four, &all[..])]
        {
            for check in checks {
                let machine = with(plant, machine.clone());
                let ran = run(&machine, "migrate", &["here", "rounds=500", check]).exited(1);
                assert!(ran.output.contains(&format!("FAIL {check}: round ")), "{plant}: {ran}");
            }
        }
    }
}

/// A wait for a CPU that is never interrupted does not end, and the kernel reports this.
#[test]
fn kernel_reports_a_lost_interrupt() {
    let ran = planted(parallel(), "lost-ipi", &["remap_seen_elsewhere"]);
    assert!(
        matches!(&ran.end, End::Panicked(why) if why.contains("waits for a flush")),
        "lost-ipi: {ran}"
    );
    planted(deterministic(), "lost-ipi", &["remap_seen_elsewhere"]).exited(0);
}

/// The kernel overflows its own stack: the page below is not mapped, and the report names the
/// stack.
#[test]
fn kernel_reports_an_overflowed_stack() {
    let cases = [
        (
            "overrun-thread",
            "while true; do :; done",
            "the kernel stack of thread 2 of 2 was run over",
        ),
        ("overrun-idle", "sleep 0.1", "the stack of the idle loop was run over"),
        ("overrun-fatal", "sleep 0.1", "the stack of fatal exceptions was run over"),
    ];
    for (plant, command, expected) in cases {
        for machine in machines() {
            let program = Program::file(busybox()).expect("a valid program");
            let ran = boot(&with(plant, machine), &program.args(["sh", "-c", command]));
            assert!(
                matches!(&ran.end, End::Panicked(why) if why.contains(expected)),
                "{plant}: {ran}"
            );
        }
    }
}
