//! Every workload on the native machine in checked mode, under every locking, with exact accounts
//! at the end.

mod common;

use common::{Odd, WRONG, small};
use faultless::{AnonVmaCheck, HugeText, Locking, Setting};
use faultless_native::{Checked, Config, Native};
use faultless_workload::{Crew, Failure, Mode, Outcome, System, Workload, all};

/// Creates a machine on which each touched page is a fault.
fn native() -> Native {
    let config =
        Config { memory_bytes: 64 << 20, cpus: 3, checked: Checked::Panic, ..Config::default() };
    let native = Native::new(config).expect("64 MiB of host memory");
    native.vm().set(Setting::PrefaultMaxOrder(0));
    native
}

/// Checks the end state: no leaked frame, and no violation of law 1.
fn end(native: Native) {
    native.audit(&[]).expect("every frame is accounted for");
    assert_eq!(native.machine().violation_count(), 0);
}

fn counter(outcome: &Outcome, name: &str) -> u64 {
    outcome.counter(name).unwrap_or_else(|| panic!("no counter {name}"))
}

#[test]
fn every_workload_runs_under_every_locking() {
    let native = native();
    for locking in Locking::ALL {
        for check in [AnonVmaCheck::Early, AnonVmaCheck::Late] {
            native.vm().set(Setting::Locking(locking));
            native.vm().set(Setting::AnonVmaCheck(check));
            for (name, arguments, operations, faults) in [
                ("pft", "size=2M repetitions=2", 1024, 1024),
                ("page_fault1", "size=512K passes=3 mode=processes", 384, 384),
                ("page_fault1", "size=512K passes=3", 384, 384),
                ("page_fault2", "size=512K passes=3", 384, 384),
                ("page_fault2", "size=512K passes=3 mode=processes", 384, 384),
                ("page_fault3", "size=512K passes=3", 384, 384),
                ("page_fault3", "size=512K passes=3 mode=processes", 384, 384),
                ("text", "size=1M passes=2 mode=processes", 512, 16),
                ("page_fault_read", "size=2M passes=2", 1024, 1024),
                ("page_fault1_churn", "size=2M every=8 churn_touch=yes", 512, 512),
                ("discard", "size=512K piece=32K passes=3", 384, 384),
                ("discard", "size=512K piece=20K passes=3", 384, 384),
                ("vma_mmap", "chunks=16 passes=3", 48, 0),
                ("vma_mmap_touch", "chunks=16 passes=3", 48, 192),
                ("vma_fault", "chunks=16 passes=3", 192, 192),
                ("vma_fault", "chunks=16 passes=3 order=shuffled", 192, 192),
                ("vma_unmap", "chunks=16 passes=3", 48, 0),
                ("vma_unmap", "chunks=16 passes=3 order=shuffled", 48, 0),
                ("vma_unmap_untouched", "chunks=16 passes=3 order=shuffled", 48, 0),
                ("brk1", "passes=100", 200, 0),
                ("mmap1", "size=1M passes=100", 100, 0),
                ("small_allocs", "size=400K unit=40K passes=2", 200, 200),
                ("ebizzy", "chunks=3 chunk=64K records=10", 10, 160),
                ("forks", "image=256K dirty=8 fresh=16 processes=4", 4, 4 * 24),
            ] {
                for threads in 1..=2 {
                    let arguments = format!("{arguments} threads={threads}");
                    let outcome = common::run(&native, name, &arguments);
                    // These workloads share an area. Otherwise each worker has a separate area.
                    let shared = matches!(name, "pft" | "page_fault_read" | "page_fault1_churn");
                    let factor = if shared { 1 } else { threads };
                    assert_eq!(outcome.operations, operations * factor, "{name} {arguments}");
                    assert!(outcome.faults >= faults * factor, "{name}: {}", outcome.faults);
                    assert_eq!(counter(&outcome, "faults"), outcome.faults);
                }
            }
        }
    }
    end(native);
}

/// The preparation of a round is off the clock: its time, faults and calls.
#[test]
fn figures_exclude_preparation() {
    let native = native();
    for order in ["private", "shuffled"] {
        for (name, faults, units) in [
            ("vma_mmap", 0, 320),
            ("vma_mmap_touch", 640, 320),
            ("vma_fault", 640, 640),
            ("vma_unmap", 0, 320),
            ("vma_unmap_untouched", 0, 320),
        ] {
            let arguments = format!("chunk=8K chunks=16 passes=10 threads=2 order={order}");
            let outcome = common::run(&native, name, &arguments);
            assert_eq!((outcome.faults, outcome.operations), (faults, units), "{name} {order}");
            assert_eq!(counter(&outcome, "faults"), faults, "{name} {order}");
            for worker in &outcome.workers {
                assert_eq!(worker.tally.operations, units / 2, "{name} {order}");
                assert!(worker.aside > 0.0, "{name} {order}");
                assert!(worker.user + worker.system <= 1.1 * outcome.wall + 0.01, "{name} {order}");
            }
        }
    }
    end(native);
}

/// Half of the threads only touch, half only give back: the pages are those of the first.
#[test]
fn discards_do_not_affect_touching_threads() {
    let native = native();
    for locking in Locking::ALL {
        native.vm().set(Setting::Locking(locking));
        for (refill, threads) in [("no", 2), ("yes", 2), ("no", 3)] {
            let arguments =
                format!("role=split size=4M piece=16K refill={refill} threads={threads} passes=2");
            let outcome = common::run(&native, "discard", &arguments);
            let touching = threads - 1;
            let discards = outcome.extra("discards").expect("counted discards");
            assert_eq!(outcome.operations, 2 * 1024 * touching, "{arguments}");
            assert_eq!(outcome.workers.last().map(|worker| worker.tally.operations), Some(0));
            let refilled = if refill == "yes" { discards as u64 } else { 0 };
            assert_eq!(outcome.faults, outcome.operations + refilled, "{arguments}");
            assert!(discards > 0.0, "{arguments}");
        }
    }
    end(native);
}

/// The pages of a file in memory are shared by all its mappings; private copies are not shared.
#[test]
fn mappings_of_a_file_share_its_pages() {
    let native = native();
    let left = |name: &str, arguments: &str| {
        let outcome = common::run(&native, name, arguments);
        (counter(&outcome, "file_pages"), counter(&outcome, "shared_frames"))
    };
    assert_eq!(left("text", "size=1M passes=1 threads=1"), (256, 0));
    assert_eq!(left("text", "size=1M passes=1 threads=2"), (256, 256));
    assert_eq!(left("text", "size=1M passes=1 threads=2 mode=threads"), (256, 0));
    assert_eq!(left("page_fault2", "size=1M passes=1 threads=2"), (512, 0));
    assert_eq!(left("page_fault3", "size=1M passes=1 threads=2 mode=processes"), (512, 0));
    let outcome = common::run(&native, "pft", "size=1M");
    assert!(outcome.left.is_empty());
    end(native);
}

/// With code in pages of 4 KiB that exceeds the second level of the TLBs, every call of every pass
/// is a walk. With smaller code, and in pages of 2 MiB, only the first pass has walks.
#[test]
fn calls_of_a_large_program_are_walks_for_instructions() {
    let native = native();
    for (text, size, faults, walks) in [
        (HugeText::Never, "4M", 1024 / 16, 1024),
        (HugeText::Never, "16M", 4096 / 16, 3 * 4096),
        (HugeText::Always, "4M", 2, 2),
        (HugeText::Always, "16M", 8, 8),
    ] {
        native.vm().set(Setting::HugeText(text));
        let outcome = common::run(&native, "text", &format!("size={size} passes=3"));
        assert_eq!(outcome.faults, faults, "{text:?} {size}");
        // A fault is walked for twice.
        let walked = counter(&outcome, "iTLB-load-misses") - faults;
        assert_eq!(walked, walks, "{text:?} {size}");
        assert_eq!(counter(&outcome, "dTLB-load-misses"), 0, "{text:?} {size}");
        let second = counter(&outcome, "itlb_misses.stlb_hit");
        assert!(walked + second <= outcome.operations, "{text:?} {size}: {second}");
    }
    // Only with the advice.
    native.vm().set(Setting::HugeText(HugeText::Madvise));
    for (advise, mapped) in [("no", 0), ("huge", 2)] {
        let outcome = common::run(&native, "text", &format!("size=4M passes=1 advise={advise}"));
        assert_eq!(counter(&outcome, "thp_file_mapped"), mapped, "{advise}");
    }
    end(native);
}

#[test]
fn read_faults_of_small_allocs_take_no_lock() {
    let native = native();
    native.vm().set(Setting::Locking(Locking::Speculative));
    native.vm().set(Setting::AnonVmaCheck(AnonVmaCheck::Late));
    let outcome = common::run(&native, "small_allocs", "size=4M threads=2");
    assert_eq!(counter(&outcome, "mmap_lock_read"), 0);
    // A thread that maps next to the area of another thread merges with this area, and sometimes
    // invalidates a concurrent fault there. The fault then takes a range lock on the page, and no
    // wider lock.
    let changed = counter(&outcome, "spf_vma_changed");
    assert_eq!(counter(&outcome, "read_fault_locked"), changed);
    assert_eq!(counter(&outcome, "range_lock_fault"), changed);
    assert_eq!(counter(&outcome, "anon_vma_prepared"), 0);
    assert!(counter(&outcome, "spf") > 0);

    native.vm().set(Setting::Locking(Locking::MmapLock));
    let outcome = common::run(&native, "small_allocs", "size=4M threads=2");
    assert!(counter(&outcome, "mmap_lock_read") >= outcome.operations);
    assert_eq!(counter(&outcome, "spf"), 0);
    end(native);
}

#[test]
fn classic_row_counts_no_faults_for_prefaulted_pages() {
    let native = native();
    let mut faults = Vec::new();
    for order in [0, 3, 5] {
        native.vm().set(Setting::PrefaultMaxOrder(order));
        let outcome = common::run(&native, "pft", "size=16M threads=2");
        assert_eq!(outcome.operations, 4096);
        assert_eq!(outcome.faults + counter(&outcome, "prefault_page"), 4096, "order {order}");
        assert_eq!(counter(&outcome, "prefault_wasted"), 0);
        let row = outcome.pft_row().expect("a row of pft");
        let rate: f64 = row.split_whitespace().last().expect("columns").parse().expect("a number");
        assert!((rate * outcome.wall - 4096.0).abs() < 1.0, "order {order}: {row}");
        faults.push(outcome.faults as f64);
    }
    assert!(faults[0] == 4096.0 && faults[0] > 7.5 * faults[1], "{faults:?}");
    assert!(faults[1] > 3.5 * faults[2], "{faults:?}");
    end(native);
}

/// Unused prefaulted pages are detected at the end of the process.
#[test]
fn waste_is_counted_until_the_end_of_the_processes() {
    let native = native();
    for order in [3, 5] {
        native.vm().set(Setting::PrefaultMaxOrder(order));
        let crew = Crew { workers: 1, mode: Mode::Threads, limit: None };
        let measured = native.run(&Odd::StopsShort, &crew).expect("a run of the workload");
        let count = |name| measured.counters.iter().find(|(known, _)| *known == name).unwrap().1;
        let (ahead, wasted) = (count("prefault_page"), count("prefault_wasted"));
        assert!(wasted > 0, "order {order}");
        assert_eq!(measured.faults + ahead - wasted, 20, "order {order}: {wasted} of {ahead}");
    }
    end(native);
}

#[test]
fn time_limit_ends_every_workload() {
    let native = native();
    for info in all() {
        // On a busy host workers may start late, and the limit does not wait for them.
        let arguments = format!("{} seconds=0.1 threads=2", small(info.name));
        let outcome = common::run(&native, info.name, &arguments);
        let ran = outcome.wall + outcome.workers[0].aside;
        assert!(ran >= 0.01, "{} ended after its passes: {ran}", info.name);
    }
    end(native);
}

#[test]
fn every_failure_is_returned() {
    let native = native();
    for mode in [Mode::Threads, Mode::Processes] {
        assert_eq!(common::odd(&native, Odd::Calls, mode), Ok(()), "{mode:?}");
        for odd in [Odd::Wrong, Odd::FailInFork, Odd::FailInPrepare, Odd::FailInFinish] {
            assert_eq!(common::odd(&native, odd, mode), Err(WRONG), "{odd:?} {mode:?}");
        }
        let refused = common::odd(&native, Odd::Refused, mode);
        assert!(
            matches!(refused, Err(Failure::Refused { call: "munmap", errno: 22, .. })),
            "{refused:?} {mode:?}"
        );
        for odd in [Odd::Segfault, Odd::SegfaultInFork, Odd::SegfaultInPrepare] {
            let failure = common::odd(&native, odd, mode);
            let segv = matches!(
                failure,
                Err(Failure::Access { addr: 8, reason: "SIGSEGV (SEGV_MAPERR)", .. })
            );
            assert!(segv, "{failure:?} {odd:?} {mode:?}");
        }
        assert_eq!(
            common::odd(&native, Odd::Panic, mode),
            Err(Failure::Lost { worker: 0 }),
            "{mode:?}"
        );
    }
    end(native);
}

#[test]
fn too_small_machine_reports_out_of_memory() {
    let native = native();
    let workload = Workload::parse("pft", ["threads=4"]).expect("valid");
    let failure = workload.run(&native);
    assert!(
        matches!(failure, Err(Failure::Refused { call: "clone", errno: 11, .. })),
        "{failure:?}"
    );
    // The same amount as the memory, and twice as much. If a thread fails, the thread that waits
    // for it at a meeting ends.
    for (name, size) in [
        ("pft", "size=128M"),
        ("vma_fault", "chunk=64M chunks=1 threads=2"),
        ("vma_fault", "chunk=32M chunks=1 threads=2"),
        ("vma_unmap", "chunk=32M chunks=1 threads=2"),
    ] {
        let workload = Workload::parse(name, size.split_whitespace()).expect("valid");
        let failure = workload.run(&native).expect_err("too large for memory");
        let out = matches!(failure, Failure::Access { reason: "out of memory", .. })
            || matches!(failure, Failure::Refused { call: "mmap", errno: 12, .. });
        assert!(out, "{name}: {failure:?}");
    }
    end(native);
}
