//! Every guest program passes on the bare kernel, on one CPU and on four (by default only on four).

mod common;

use common::{Ran, deterministic, is_long, machines, parallel, passes, run, tiered, try_boot};
use faultless_boot::{BootError, Machine, Program, guest};

/// Runs a program of checks on both machines.
#[track_caller]
fn both(name: &str, args: &[&str], least: usize) {
    for machine in machines() {
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
    both("processes", &[], 11);
}

#[test]
fn orphans() {
    both("orphans", &[], 7);
}

#[test]
fn files() {
    both("files", &[], 12);
}

#[test]
fn streams() {
    both("streams", &[], 10);
}

#[test]
fn clocks() {
    both("clocks", &[], 6);
}

#[test]
fn limits() {
    both(
        "limits",
        &["epoll_chains", "deep_paths", "many_entries", "shortened_in_fork", "closed_descriptors"],
        5,
    );
}

#[test]
fn seals() {
    both("seals", &[], 10);
}

#[test]
fn limits_of_memory() {
    both("rlimits", &[], 10);
}

#[test]
fn errors() {
    both("errors", &[], 16);
}

#[test]
fn users() {
    both("users", &[], 9);
}

#[test]
fn rights() {
    for machine in machines() {
        let ran = passes(&machine, "rights", &[], 11);
        assert!(!ran.output.contains("# CAP_SYS_RESOURCE is missing"), "{ran}");
    }
}

#[test]
fn procfs() {
    both("procfs", &[], 16);
}

#[test]
fn shm() {
    both("shm", &[], 7);
}

#[test]
fn sysv() {
    both("sysv", &[], 3);
}

#[test]
fn memory() {
    both("memory", &[], 7);
}

#[test]
fn pages() {
    both("pages", &[], 6);
}

/// Text in base pages is collapsed to huge pages in the background, unless the knob is off.
#[test]
fn collapse() {
    // The kernel's default period is a second of CPU time.
    let often = || vec!["text_scan=20".to_owned()];
    for machine in machines() {
        let checks = [
            "pages_touched_before_they_are_text",
            "changed_and_discarded_pages",
            "process_ends_during_collapse",
        ];
        let machine = Machine { words: often(), ..machine };
        let ran = passes(&machine, "collapse", &checks, 3);
        assert!(ran.report.counter("thp_collapse_file") >= Some(6), "{ran}");
    }
    let words = [often(), vec!["set=huge_text=never".into()]].concat();
    let off = Machine { words, ..deterministic() };
    let ran = passes(&off, "collapse", &["no_collapse_when_off"], 1);
    assert_eq!(ran.report.counter("thp_collapse_file"), Some(0), "{ran}");
}

/// Also on processors with fewer features: no AVX, no XSAVE.
#[test]
fn registers() {
    both("registers", &[], 7);
    for without in ["avx", "xsave"] {
        let cpu = format!("max,-erms,-{without}");
        passes(&Machine { cpu, ..deterministic() }, "registers", &["unfit_states"], 1);
    }
}

#[test]
fn translations() {
    passes(&deterministic(), "tlb", &["rounds=500"], 13);
    passes(&parallel(), "tlb", &["rounds=100"], 13);
}

/// Pages move between nodes of memory, with deferred flushes and without.
#[test]
fn migrations() {
    for deferred in [true, false] {
        for machine in machines() {
            let rounds = if machine.cpus == 1 { 150 } else { 50 };
            let machine = tiered(machine, deferred);
            let ran = passes(&machine, "migrate", &[&format!("rounds={rounds}")], 7);
            assert!(!ran.output.contains("# one memory node"), "{ran}");
            assert!(ran.report.counter("pgmigrate_success") > Some(2000), "{ran}");
            let counters = ["flush_deferred", "frame_owed"].map(|name| ran.report.counter(name));
            let counted = counters.map(|count| count.expect("a counter") > 0);
            assert_eq!(counted, [deferred; 2], "{ran}");
        }
    }
}

/// With one node of memory, and with two.
#[test]
fn policies_of_memory() {
    both("mempolicy", &[], 6);
    for machine in machines() {
        let ran = passes(&tiered(machine, true), "mempolicy", &[], 6);
        assert!(!ran.output.contains("# one memory node"), "{ran}");
    }
}

/// Used pages move to the fast node, and stay there and in memory while other pages leave.
#[test]
#[ignore = "takes half a minute; `.ci/long` runs it"]
fn tiers() {
    for machine in machines() {
        let nodes = "1:3".parse().expect("shares");
        let machine = Machine { memory: 128 << 20, nodes, swap: Some(256 << 20), ..machine };
        let ran = passes(&machine, "tiers", &[], 3);
        for name in ["pgdemote", "pgpromote_success", "pswpout"] {
            assert!(ran.report.counter(name) > Some(0), "{name}; {ran}");
        }
    }
}

/// No shootdown is sent if no other CPU can hold a translation.
#[test]
fn shootdowns() {
    for machine in [deterministic(), parallel(), Machine { cpus: 4, ..deterministic() }] {
        let ran = passes(&machine, "counts", &["rounds=50", "strict=yes"], 8);
        let sent =
            ran.output.lines().find_map(|line| line.strip_prefix("count readers shootdowns "));
        let sent: u64 = sent.and_then(|count| count.parse().ok()).expect("a count");
        // A shootdown is sent if other CPUs can hold a translation.
        assert_eq!(sent > 0, machine.cpus > 1, "{ran}");
    }
}

/// A request for more memory than available is refused, or its process is killed; the machine
/// continues.
#[test]
fn out_of_memory() {
    for machine in machines() {
        passes(&Machine { memory: 256 << 20, ..machine }, "oom", &[], 13);
    }
}

/// Only the process chosen by Linux's rule is killed; the process that found no memory continues.
#[test]
fn victims() {
    for machine in machines() {
        for swap in [None, Some(64 << 20)] {
            let machine = Machine { memory: 128 << 20, swap, ..machine.clone() };
            let ran = passes(&machine, "victims", &[], 10);
            let killed = |line: &&String| line.starts_with("Out of memory: Killed process ");
            let counted = ran.report.messages.iter().filter(killed).count();
            // As many as the checks find in `oom_kill`, each of which the checks wait for.
            assert_eq!((counted, ran.report.messages.len()), (14, 14), "{ran}");
        }
    }
}

/// If every process is protected, the process that finds no memory is killed, and the kernel
/// continues.
#[test]
fn oom_without_candidates_kills_the_caller() {
    for machine in machines() {
        let ran =
            passes(&Machine { memory: 128 << 20, ..machine }, "victims", &["no_candidates"], 1);
        let reports = |what: &str| ran.report.messages.iter().any(|line| line.starts_with(what));
        assert!(reports("Out of memory and no killable processes"), "{ran}");
        assert!(reports("Out of memory: Killed process "), "{ran}");
    }
}

/// Programs use more memory than the machine has, and the rest is on the swap disk.
#[test]
fn swap() {
    for machine in machines() {
        let machine = Machine { memory: 96 << 20, swap: Some(256 << 20), ..machine };
        let ran = passes(&machine, "swap", &[], 5);
        for name in ["pswpin", "pswpout", "fault_swap_page", "interrupts_device"] {
            assert!(ran.report.counter(name) > Some(0), "{name}; {ran}");
        }
        assert!(ran.report.messages.is_empty(), "{ran}");
    }
    // Larger than memory can hold tables for.
    let machine = Machine { memory: 96 << 20, swap: Some(32 << 30), ..deterministic() };
    let program = Program::guest(guest("swap").expect("embedded guest programs"));
    let refused = try_boot(&machine, &program).err();
    assert!(matches!(refused, Some(BootError::Swap { tables: 96, .. })), "{refused:?}");
    let none = run(&Machine { memory: 96 << 20, ..deterministic() }, "swap", &["none"]).exited(0);
    assert!(none.output.contains("ok none"), "{none}");
}

/// Unreadable pages of the swap disk cause signals for their users, and unwritable pages are not
/// used.
#[test]
#[ignore = "takes half a minute; `.ci/long` runs it"]
fn errors_of_a_swap_disk() {
    for machine in machines() {
        let swap = Some(256 << 20);
        let bad_swap = [(100..108).chain([3000, 9000]).collect(), vec![200, 201, 5000]];
        let machine = Machine { memory: 96 << 20, swap, bad_swap, ..machine };
        let ran = passes(&machine, "swap", &["errors"], 1);
        assert!(ran.report.counter("pswpin") > Some(0), "{ran}");
        assert!(ran.report.messages.is_empty(), "{ran}");
    }
}

/// Each allocation of the kernel fails once. On one CPU: cached heap memory of other CPUs would
/// look like a leak.
#[test]
fn every_kernel_allocation_may_fail() {
    let words = vec!["fail-nth".to_owned()];
    let ran = passes(&Machine { words, ..deterministic() }, "refused", &[], 16);
    let refused = ran.output.lines().filter_map(|line| line.strip_prefix("# refused ")).count();
    assert!(refused >= 13, "memory is refused in {refused} checks; {ran}");
}

/// As many concurrent threads as Linux supports with this much memory. (On one CPU: all threads
/// unmap their stacks at once.)
#[test]
fn three_thousand_threads() {
    let machine = Machine { memory: 1 << 30, ..deterministic() };
    let ran = passes(&machine, "limits", &["many_threads"], 1);
    assert!(ran.output.contains("# 3000 threads"), "{ran}");
}

/// Random system calls from each CPU for 5 seconds, and with `FAULTLESS_LONG` for a minute; on one
/// CPU for 2 seconds.
#[test]
fn random_calls() {
    let seconds = if is_long() { "seconds=60" } else { "seconds=5" };
    passes(&deterministic(), "fuzz", &["seconds=2", "calls=all", "seed=7"], 1);
    passes(&parallel(), "fuzz", &[seconds, "calls=all"], 1);
}

#[test]
fn workloads() {
    let runs: [&[&str]; 12] = [
        &["pft", "size=4M", "threads=4"],
        &["page_fault1", "size=1M", "passes=3", "threads=4"],
        &["page_fault1", "size=1M", "passes=3", "threads=4", "mode=processes"],
        &["mmap1", "passes=50", "threads=4"],
        &["brk1", "passes=50", "threads=2", "mode=processes"],
        &["ebizzy", "seconds=0.2", "threads=4"],
        &["forks", "seconds=0.2"],
        &["small_allocs", "seconds=0.2", "threads=2"],
        &["discard", "size=1M", "threads=4"],
        &["discard", "size=1M", "role=split", "refill=yes", "threads=4"],
        &["vma_mmap_touch", "chunks=64", "passes=4", "threads=4"],
        &["vma_unmap", "chunks=64", "passes=4", "order=shuffled", "threads=4"],
    ];
    for args in runs {
        for machine in machines() {
            let ran = run(&machine, "workload", args).exited(0);
            assert!(ran.output.contains("\noperations "), "{args:?}: {ran}");
        }
    }
    let ran = run(&deterministic(), "workload", &["bogus"]).exited(1);
    assert!(ran.errors.contains("page_fault1"), "{ran}");
}

/// CPUs of which the host runs only some at a time contend for one range: the running CPUs make
/// progress. (A lock handed to CPUs that do not run would take a turn of the host's scheduler for
/// each pair, and minutes for this test.)
#[test]
#[ignore = "takes a quarter of a minute; `.ci/long` runs it"]
fn cpus_that_share_cores() {
    for locking in ["set=locking=speculative", "set=locking=mmap_lock"] {
        let machine = Machine { cpus: 8, words: vec![locking.into()], ..parallel() };
        let ran = run(&machine, "workload", &["mmap1", "passes=4000", "threads=8"]).exited(0);
        assert!(ran.output.contains("\noperations 32000 "), "{ran}");
    }
}

/// Returns the cost measured by `rows` on a machine with these knobs.
fn write_fault(knobs: &[&str], args: &[&str]) -> (f64, Ran) {
    let words = knobs.iter().map(|knob| format!("set={knob}")).collect();
    let ran = run(&Machine { words, ..deterministic() }, "rows", args).exited(0);
    let cost = ran.output.lines().find_map(|line| {
        line.strip_prefix("row anon_write_fault ")?.strip_suffix(" per_page")?.parse().ok()
    });
    (cost.expect("the row of anonymous stores"), ran)
}

#[test]
fn rows() {
    let (alone, ran) = write_fault(&["prefault_max_order=0"], &["passes=1"]);
    assert_eq!(ran.output.lines().filter(|line| line.starts_with("row ")).count(), 15, "{ran}");
    assert_eq!(ran.report.counter("prefault_page"), Some(0), "{ran}");

    // Two passes of 8,192 pages. With a pool, which the machine fills while idle, no page is zeroed
    // in its fault.
    let args = ["row=anon_write_fault", "passes=1", "rest=100"];
    let (_, ran) = write_fault(&["prefault_max_order=5"], &args);
    let count = |ran: &Ran, name: &str| ran.report.counter(name).expect("a counter");
    assert!(count(&ran, "prefault_page") > 2 * 8192 * 9 / 10, "{ran}");
    assert!(count(&ran, "zeroed_in_fault") > 2 * 8192, "{ran}");
    let (zeroed, ran) = write_fault(&["prefault_max_order=5", "zeroed_pool=16384"], &args);
    assert!(count(&ran, "zeroed_pool_hit") > 2 * 8192, "{ran}");
    assert!(count(&ran, "zeroed_in_fault") < 8192 / 8, "{ran}");
    // A store of eight bytes at a time zeroes a page in 512.
    assert!(alone - zeroed > 512.0, "{alone} and {zeroed}");
}
