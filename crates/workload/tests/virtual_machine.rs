//! Every workload on the virtual machine: reproducible figures, independent of addresses on the
//! host, and exact accounts at the end.

mod common;

use common::{Odd, WRONG, small};
use faultless_virtual::{Accounts, Config, HotPlace, Profile, Spent, Virtual};
use faultless_workload::{Failure, Mode, Outcome, Workload, all};

const CPUS: usize = 3;

fn system(seed: u64, settings: &[&str]) -> Virtual {
    let profile = Profile::bundled("two-socket").expect("a bundled profile");
    let config = Config { cpus: CPUS, memory_bytes: 256 << 20, slow_bytes: 0, seed };
    let system = Virtual::new(&profile, config).expect("memory for tables");
    settings.iter().for_each(|setting| system.set(setting).expect("a knob"));
    system
}

/// All results of a run.
#[derive(Debug, PartialEq)]
struct Figures {
    outcome: Outcome,
    accounts: Accounts,
    hottest: Vec<HotPlace>,
}

/// Runs `name` on a new machine. `disturb` allocates on the host's heap in between, which must not
/// affect any figure.
fn figures(name: &str, arguments: &str, seed: u64, settings: &[&str], disturb: usize) -> Figures {
    let mut kept: Vec<Vec<u8>> = Vec::new();
    let mut disturb = |salt: usize| {
        for size in 1..disturb {
            kept.push(Vec::with_capacity(size * salt % 700 + 8));
            if size % 3 == 0 {
                kept.remove(size * salt % kept.len());
            }
        }
    };
    disturb(17);
    let system = system(seed, settings);
    disturb(29);
    let process = system.process().expect("memory for a table");
    disturb(31);
    let outcome = common::run(&system, name, arguments);
    let figures = Figures { outcome, accounts: system.accounts(), hottest: system.hottest(20) };
    system.audit(&[&process]).unwrap_or_else(|error| panic!("{name} {arguments}: {error}"));
    system.exit(process);
    system.audit(&[]).unwrap_or_else(|error| panic!("{name} {arguments}: {error}"));
    figures
}

fn modes(name: &str) -> &'static [Mode] {
    all().iter().find(|info| info.name == name).expect("a listed workload").modes
}

#[test]
fn every_workload_is_reproducible() {
    for info in all() {
        for mode in modes(info.name) {
            for seed in [0, 5] {
                let (few, mode) = (small(info.name), mode.name());
                let passes = info.params().iter().any(|param| param.name == "passes");
                let passes = if passes { "passes=3" } else { "" };
                let arguments = format!("{few} {passes} mode={mode} threads={CPUS}");
                let first = figures(info.name, &arguments, seed, &[], 0);
                let again = figures(info.name, &arguments, seed, &[], 60);
                assert_eq!(first, again, "{} {arguments}, seed {seed}", info.name);
                let spent: u64 = first.accounts.spent.iter().sum();
                let workers = &first.outcome.workers;
                let reported: f64 = workers.iter().map(|worker| worker.user + worker.system).sum();
                // Conversion to seconds in floating-point numbers loses some picoseconds.
                assert!(
                    (spent as f64 * 1e-12 - reported).abs() < 1e-9 + reported * 0.02,
                    "{}",
                    info.name
                );
            }
        }
    }
}

/// Under each locking the work is done, and counted as on other machines.
#[test]
fn every_workload_does_its_work_under_every_locking() {
    for (name, arguments, operations, faults) in [
        ("pft", "size=1M", 256, 256),
        ("page_fault1", "size=256K passes=2 mode=processes", 384, 384),
        ("page_fault2", "size=256K passes=2", 384, 384),
        ("page_fault3", "size=256K passes=2 mode=processes", 384, 384),
        ("text", "size=1M passes=2 mode=processes", 1536, 48),
        ("page_fault1_churn", "size=1M every=8 churn_touch=yes churner=alone", 256, 256),
        ("discard", "size=256K piece=32K passes=2 role=split", 256, 256),
        ("vma_unmap", "chunks=16 passes=3 order=shuffled", 144, 0),
        ("forks", "image=256K dirty=8 fresh=16 processes=4", 12, 12 * 24),
    ] {
        for policy in ["locking=speculative", "locking=per_vma", "locking=mmap_lock"] {
            let arguments = format!("{arguments} threads={CPUS}");
            let settings = [policy, "prefault_max_order=0"];
            let Figures { outcome, accounts, .. } = figures(name, &arguments, 0, &settings, 0);
            assert_eq!(outcome.operations, operations, "{name} {arguments} {policy}");
            assert!(outcome.faults >= faults, "{name} {policy}: {} faults", outcome.faults);
            // The figures exclude preparation off the clock: a worker that only unmaps has no
            // fault, and makes no access.
            let program = accounts.spent[Spent::Program as usize];
            let touches = name != "vma_unmap";
            assert_eq!((outcome.faults > 0, program > 0), (touches, touches), "{name} {policy}");
        }
    }
}

/// In a workload of rounds, the window is open in each round from the second on, while all CPUs
/// work. Preparation off the books does not count.
#[test]
fn steady_window_is_open_in_rounds() {
    let run = |arguments: &str, warm_up| {
        let system = system(0, &["prefault_max_order=0"]);
        system.measure_steady(CPUS, warm_up);
        let arguments = format!("{arguments} threads={CPUS}");
        let outcome = common::run(&system, "vma_unmap", &arguments);
        (outcome, system.steady().expect("requested"))
    };
    // A CPU touches 64 pages off the books in each round, and unmaps 16 chunks.
    let (outcome, steady) = run("chunks=16 passes=3", 16);
    assert_eq!((steady.all_calls, steady.fewest), (3 * 48, 3 * 16));
    assert_eq!(steady.all_calls, outcome.operations);
    // Of 96 calls, less those after the first CPU has done its part.
    assert!((80..=96).contains(&steady.calls), "{steady:?}");
    let length = steady.length as f64 * 1e-12;
    assert!(length > 0.5 * outcome.wall && length < 0.75 * outcome.wall, "{steady:?}");
    let count = |name| steady.counters.iter().find(|(known, _)| *known == name).map(|it| it.1);
    assert_eq!(count("faults"), Some(0));
    // One round more adds as many calls.
    let (_, longer) = run("chunks=16 passes=4", 16);
    assert!((longer.calls - steady.calls).abs_diff(48) <= 8, "{longer:?} {steady:?}");
}

/// The limit is in simulated time.
#[test]
fn time_limit_ends_every_workload() {
    for info in all() {
        let arguments = format!("{} seconds=0.0005 threads={CPUS}", small(info.name));
        let Figures { outcome, .. } = figures(info.name, &arguments, 0, &[], 0);
        let ran = outcome.wall + outcome.workers[0].aside;
        assert!((0.0005..0.01).contains(&ran), "{}: {ran} s", info.name);
    }
}

#[test]
fn every_failure_is_returned() {
    for mode in [Mode::Threads, Mode::Processes] {
        let odd = |odd| common::odd(&system(0, &[]), odd, mode);
        assert_eq!(odd(Odd::Calls), Ok(()), "{mode:?}");
        assert_eq!(odd(Odd::StopsShort), Ok(()), "{mode:?}");
        for fails in [Odd::Wrong, Odd::FailInFork, Odd::FailInPrepare, Odd::FailInFinish] {
            assert_eq!(odd(fails), Err(WRONG), "{mode:?}");
        }
        let refused = odd(Odd::Refused);
        assert!(matches!(refused, Err(Failure::Refused { call: "munmap", errno: 22, .. })));
        for fails in [Odd::Segfault, Odd::SegfaultInFork, Odd::SegfaultInPrepare] {
            let reason = "SIGSEGV (SEGV_MAPERR)";
            let segv = |failure| matches!(failure, Err(Failure::Access { addr: 8, reason: is, .. }) if is == reason);
            assert!(segv(odd(fails)), "{mode:?}");
        }
    }
}

#[test]
fn too_small_machine_reports_out_of_memory() {
    let run = |arguments: &str| {
        let workload = Workload::parse("pft", arguments.split_whitespace()).expect("valid");
        workload.run(&system(0, &[])).expect_err("too large for memory")
    };
    assert!(matches!(run("threads=4"), Failure::Refused { call: "clone", errno: 11, .. }));
    let failure = run("size=512M");
    let out = matches!(failure, Failure::Access { reason: "out of memory", .. })
        || matches!(failure, Failure::Refused { call: "mmap", errno: 12, .. });
    assert!(out, "{failure:?}");
}
