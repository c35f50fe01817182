//! Every workload on the host's kernel, small, and programs that fail in every way.

mod common;

use common::{Odd, PAGE, WRONG, small};
use faultless_workload::{Failure, Linux, Mode, Outcome, PFT_HEADER, all};

fn run(name: &str, arguments: &str) -> Outcome {
    common::run(&Linux::new(), name, arguments)
}

fn odd(program: Odd, mode: Mode) -> Result<(), Failure> {
    common::odd(&Linux::new(), program, mode)
}

/// Runs a workload with 1 and 2 workers and expects `operations` and at least `faults` of each
/// worker.
fn check(name: &str, arguments: &str, operations: u64, faults: u64) {
    for threads in 1..=2 {
        let outcome = run(name, &format!("{arguments} threads={threads}"));
        assert_eq!(outcome.operations, operations * threads, "{name}, {threads} threads");
        // The workers' own stacks and similar memory cause a few more faults.
        let faults = faults * threads;
        let range = faults..=faults + faults / 10 + 100 * threads;
        assert!(range.contains(&outcome.faults), "{name}: {} not in {range:?}", outcome.faults);
    }
}

#[test]
fn pft() {
    for threads in [1, 2, 3] {
        let outcome = run("pft", &format!("size=4M repetitions=2 threads={threads}"));
        assert_eq!(outcome.operations, 2048);
        assert!((2048..2500).contains(&outcome.faults), "{}", outcome.faults);
        let row = outcome.pft_row().expect("a row of pft");
        let fields: Vec<_> = row.split_whitespace().collect();
        assert_eq!(fields.len(), PFT_HEADER.split_whitespace().count(), "{row}");
        assert_eq!(fields[..3], ["0.00", "2", &threads.to_string()], "{row}");
    }
    assert_eq!(run("pft", "size=4M mode=processes threads=2").operations, 1024);
}

#[test]
fn page_fault1() {
    check("page_fault1", "size=1M passes=3", 768, 768);
    check("page_fault1", "size=1M passes=3 mode=processes", 768, 768);
}

#[test]
fn page_faults_of_files() {
    for name in ["page_fault2", "page_fault3"] {
        check(name, "size=1M passes=3", 768, 768);
        check(name, "size=1M passes=3 mode=processes", 768, 768);
    }
}

/// A fault maps some surrounding pages: 16, or on newer kernels a whole large folio of at most 2
/// MiB.
#[test]
fn text() {
    for (mode, mappings) in [("processes", 2), ("threads", 1)] {
        let outcome = run("text", &format!("size=4M passes=3 threads=2 mode={mode}"));
        assert_eq!(outcome.operations, 2 * 3 * 1024);
        let least = mappings * 2;
        assert!((least..=2 * 1024 + 200).contains(&outcome.faults), "{mode}: {}", outcome.faults);
    }
}

#[test]
fn page_fault_read() {
    for threads in [1, 2] {
        let outcome = run("page_fault_read", &format!("size=8M passes=2 threads={threads}"));
        assert_eq!(outcome.operations, 4096);
        assert!(outcome.faults >= 4096, "{}", outcome.faults);
    }
}

#[test]
fn page_fault1_churn() {
    for access in ["read", "write"] {
        for threads in [1, 2] {
            let arguments =
                format!("size=4M every=8 churn_touch=yes access={access} threads={threads}");
            let outcome = run("page_fault1_churn", &arguments);
            assert_eq!(outcome.operations, 1024);
            assert_eq!(outcome.extra("churn_pairs"), Some(128.0 / f64::from(threads)));
            assert!(outcome.faults >= 1024, "{}", outcome.faults);
        }
        let arguments = format!("size=16M churner=alone access={access} threads=3");
        let outcome = run("page_fault1_churn", &arguments);
        assert_eq!(outcome.operations, 4096);
        assert_eq!(outcome.workers[0].tally.operations, 0, "the churner only churns");
    }
}

#[test]
fn discard() {
    check("discard", "size=1M piece=32K passes=3", 768, 768);
    assert_eq!(run("discard", "size=1M piece=20K threads=2").extra("discards"), Some(416.0));
    for refill in ["no", "yes"] {
        let outcome = run("discard", &format!("role=split size=16M refill={refill} threads=3"));
        assert_eq!(outcome.operations, 2 * 4 * 4096);
        assert_eq!(outcome.workers[2].tally.operations, 0, "the last thread only discards");
        assert!(outcome.extra("discards") > Some(0.0));
    }
}

/// The figures exclude the preparation of each chunk.
#[test]
fn vma() {
    for order in ["private", "shuffled"] {
        let arguments = format!("chunks=64 passes=10 order={order}");
        check("vma_mmap", &arguments, 640, 0);
        check("vma_mmap_touch", &arguments, 640, 2560);
        check("vma_fault", &arguments, 2560, 2560);
        check("vma_unmap", &arguments, 640, 0);
        check("vma_unmap_untouched", &arguments, 640, 0);
    }
}

#[test]
fn brk1() {
    check("brk1", "passes=500", 1000, 0);
    check("brk1", "passes=500 mode=processes", 1000, 0);
}

#[test]
fn mmap1() {
    check("mmap1", "size=1M passes=300", 300, 0);
    check("mmap1", "size=1M passes=300 mode=processes", 300, 0);
}

#[test]
fn small_allocs() {
    check("small_allocs", "size=400K unit=40K passes=2", 200, 200);
    assert_eq!(run("small_allocs", "size=400K unit=40K threads=2").extra("areas"), Some(20.0));
}

#[test]
fn ebizzy() {
    check("ebizzy", "chunks=3 chunk=64K records=20", 20, 16 * 20);
    check("ebizzy", "chunks=3 chunk=64K records=20 touch=yes", 20, 16 * 20);
    check("ebizzy", "chunks=3 chunk=64K records=20 mode=processes", 20, 16 * 20);
}

#[test]
fn forks() {
    for threads in 1..=2 {
        let arguments = format!("image=256K dirty=8 fresh=16 processes=5 threads={threads}");
        let outcome = run("forks", &arguments);
        assert_eq!(outcome.operations, 5 * threads);
        assert_eq!(outcome.extra("pages_touched"), Some((5 * threads * 24) as f64));
        // A child's writes are a copy or a fresh page each. Its stack and its program's data, and
        // the parent's afterwards, cause more faults.
        let faults = 5 * threads * 24;
        assert!(
            (faults..faults + 5 * threads * 100).contains(&outcome.faults),
            "{}",
            outcome.faults
        );
    }
}

#[test]
fn time_limit_ends_every_workload() {
    for info in all() {
        let small = small(info.name);
        let outcome = run(info.name, &format!("{small} seconds=0.2 threads=2"));
        let ran = outcome.wall + outcome.workers[0].aside;
        assert!(ran >= 0.05, "{} ended after its passes: {ran}", info.name);
        assert!(outcome.wall < 10.0, "{}: {}", info.name, outcome.wall);
    }
}

#[test]
fn every_failure_is_returned() {
    for mode in [Mode::Threads, Mode::Processes] {
        let killed = Err(Failure::Killed { signal: 11 });
        for good in [Odd::Calls, Odd::StopsShort] {
            assert_eq!(odd(good, mode), Ok(()), "{good:?} {mode:?}");
        }
        let refused = odd(Odd::Refused, mode).expect_err("an unaligned address");
        assert_eq!(refused, Failure::Refused { call: "munmap", addr: 1, len: PAGE, errno: 22 });
        let message = refused.to_string();
        assert!(message.starts_with("munmap of 4096 bytes at 0x1: "), "{message}");
        assert_eq!(odd(Odd::Wrong, mode), Err(WRONG), "{mode:?}");
        assert_eq!(odd(Odd::Segfault, mode), killed, "{mode:?}");
        assert_eq!(odd(Odd::SegfaultInPrepare, mode), killed, "{mode:?}");
        assert_eq!(odd(Odd::Panic, mode), Err(Failure::Lost { worker: 0 }), "{mode:?}");
        assert_eq!(odd(Odd::FailInFork, mode), Err(WRONG), "{mode:?}");
        assert_eq!(odd(Odd::SegfaultInFork, mode), killed, "{mode:?}");
        assert_eq!(odd(Odd::FailInPrepare, mode), Err(WRONG), "{mode:?}");
        assert_eq!(odd(Odd::FailInFinish, mode), Err(WRONG), "{mode:?}");
    }
}
