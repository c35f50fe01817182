//! Every guest program passes on the host's kernel, which is the reference for correct behaviour.

use std::process::{Command, Output};

fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().expect("the program is built and runs")
}

/// Runs a program that must pass; returns its output.
fn passes(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {}\n{printed}{errors}", output.status);
    printed
}

/// Runs a program of checks, all of which must pass; at least `least` checks must run.
fn all_pass(program: &str, arguments: &[&str], least: usize) {
    let printed = passes(program, arguments);
    assert!(!printed.contains("FAIL"), "{printed}");
    let passed = printed.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(passed >= least, "{passed} of {least}:\n{printed}");
}

#[test]
fn tlb() {
    all_pass(env!("CARGO_BIN_EXE_tlb"), &["rounds=100"], 13);
}

/// With one node, which most hosts have, the pages stay on their node.
#[test]
fn migrate() {
    all_pass(env!("CARGO_BIN_EXE_migrate"), &["rounds=100"], 7);
}

/// As above.
#[test]
fn mempolicy() {
    all_pass(env!("CARGO_BIN_EXE_mempolicy"), &[], 6);
}

#[test]
fn faults() {
    all_pass(env!("CARGO_BIN_EXE_faults"), &[], 10);
}

#[test]
fn signals() {
    all_pass(env!("CARGO_BIN_EXE_signals"), &[], 10);
}

#[test]
fn threads() {
    all_pass(env!("CARGO_BIN_EXE_threads"), &[], 14);
}

#[test]
fn processes() {
    all_pass(env!("CARGO_BIN_EXE_processes"), &[], 11);
}

#[test]
fn orphans() {
    all_pass(env!("CARGO_BIN_EXE_orphans"), &[], 7);
}

#[test]
fn limits() {
    all_pass(env!("CARGO_BIN_EXE_limits"), &[], 5);
}

#[test]
fn refused() {
    all_pass(env!("CARGO_BIN_EXE_refused"), &[], 16);
}

#[test]
fn files() {
    all_pass(env!("CARGO_BIN_EXE_files"), &[], 12);
}

#[test]
fn streams() {
    all_pass(env!("CARGO_BIN_EXE_streams"), &[], 10);
}

#[test]
fn clocks() {
    all_pass(env!("CARGO_BIN_EXE_clocks"), &[], 6);
}

#[test]
fn procfs() {
    all_pass(env!("CARGO_BIN_EXE_procfs"), &[], 8);
}

#[test]
fn seals() {
    all_pass(env!("CARGO_BIN_EXE_seals"), &[], 10);
}

#[test]
fn rlimits() {
    all_pass(env!("CARGO_BIN_EXE_rlimits"), &[], 10);
}

#[test]
fn errors() {
    all_pass(env!("CARGO_BIN_EXE_errors"), &[], 16);
}

/// Only root can have processes of other users.
#[test]
fn users() {
    // SAFETY: a plain call.
    if unsafe { libc::getuid() } == 0 {
        all_pass(env!("CARGO_BIN_EXE_users"), &[], 9);
    }
}

/// As `users`.
#[test]
fn rights() {
    // SAFETY: a plain call.
    if unsafe { libc::getuid() } == 0 {
        all_pass(env!("CARGO_BIN_EXE_rights"), &[], 11);
    }
}

#[test]
fn shm() {
    all_pass(env!("CARGO_BIN_EXE_shm"), &[], 7);
}

#[test]
fn sysv() {
    all_pass(env!("CARGO_BIN_EXE_sysv"), &[], 3);
}

#[test]
fn memory() {
    all_pass(env!("CARGO_BIN_EXE_memory"), &[], 7);
}

#[test]
fn pages() {
    all_pass(env!("CARGO_BIN_EXE_pages"), &[], 6);
}

#[test]
fn registers() {
    all_pass(env!("CARGO_BIN_EXE_registers"), &[], 7);
}

#[test]
fn oom() {
    all_pass(env!("CARGO_BIN_EXE_oom"), &["limit=64"], 13);
}

/// The other checks take all memory of the machine.
#[test]
fn victims() {
    all_pass(env!("CARGO_BIN_EXE_victims"), &["score"], 1);
}

#[test]
fn fuzz() {
    all_pass(env!("CARGO_BIN_EXE_fuzz"), &["seconds=1"], 1);
}

#[test]
fn counts() {
    all_pass(env!("CARGO_BIN_EXE_counts"), &["rounds=20"], 8);
}

#[test]
fn rows() {
    let names = [
        "anon_write_fault",
        "anon_munmap_page",
        "anon_mmap_touch_munmap_page",
        "anon_read_fault",
        "file_shared_write",
        "file_private_write",
        "file_shared_read_around",
        "text_read",
        "mmap_munmap_pair",
        "mmap_touch_munmap",
        "brk_pair",
        "mprotect_pair",
        "mprotect_pair_roomy",
        "getppid",
        "fork_exit_wait",
    ];
    let printed = passes(env!("CARGO_BIN_EXE_rows"), &["passes=1"]);
    for (line, name) in printed.lines().zip(names) {
        let words: Vec<_> = line.split(' ').collect();
        assert_eq!(words[..2], ["row", name], "{printed}");
        let value: f64 = words[2].parse().expect("a number");
        assert!(value > 0.0, "{line}");
    }
    assert_eq!(printed.lines().count(), names.len(), "{printed}");
}

#[test]
fn mistakes_are_named() {
    let errors = |program: &str, argument: &str| {
        let output = run(program, &[argument]);
        assert_eq!(output.status.code(), Some(2), "{argument}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(errors(env!("CARGO_BIN_EXE_signals"), "bogus").contains("realtime_queues"));
    assert!(errors(env!("CARGO_BIN_EXE_rows"), "pass=3").contains("passes"));
    assert!(errors(env!("CARGO_BIN_EXE_tlb"), "rounds=x").contains("rounds=x"));
    assert!(errors(env!("CARGO_BIN_EXE_fuzz"), "calls=all").contains("harm"));
    assert!(errors(env!("CARGO_BIN_EXE_counts"), "bogus").contains("readers"));
}
