//! Every workload on the host's kernel, small, and programs that fail in every way.
#![cfg(target_os = "linux")]

use faultless::{Advice, MapFlags as Map, Prot};
use faultless_workload::{
    Crew, Failure, Linux, Mode, Outcome, PFT_HEADER, Param, ParamError, Program, Prot, Settings,
    System, Tally, Task, Worker, Workload, all,
};
use std::time::Duration;

const PAGE: u64 = 4096;

fn run(name: &str, arguments: &str) -> Outcome {
    let workload = Workload::parse(name, arguments.split_whitespace()).expect("good arguments");
    let outcome = workload.run(&Linux::new()).unwrap_or_else(|failure| panic!("{name}: {failure}"));
    assert_eq!(outcome.workload, name);
    assert_eq!(outcome.workers.len(), outcome.threads);
    assert!(outcome.machine.starts_with("linux-"), "{}", outcome.machine);
    assert!(outcome.wall > 0.0 && outcome.wall < 60.0, "{}", outcome.wall);
    assert!(outcome.operations_per_second() > 0.0);
    for worker in &outcome.workers {
        assert!(worker.wall() > 0.0 && worker.wall() <= outcome.wall);
    }
    outcome
}

/// Runs it with 1 and 2 workers and expects `operations` and at least `faults` of each worker.
fn check(name: &str, arguments: &str, operations: u64, faults: u64) {
    for threads in 1..=2 {
        let outcome = run(name, &format!("{arguments} threads={threads}"));
        assert_eq!(outcome.operations, operations * threads, "{name}, {threads} threads");
        // A few more are the workers' own stacks and the like, but not many.
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
        let row = outcome.pft_row().expect("pft has its row");
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
        // A child's writes are a copy or a fresh page each. Its stack and its program's data, and the
        // parent's after it, are more.
        let faults = 5 * threads * 24;
        assert!(
            (faults..faults + 5 * threads * 100).contains(&outcome.faults),
            "{}",
            outcome.faults
        );
    }
}

#[test]
fn a_time_limit_ends_every_workload() {
    for info in all() {
        let small = match info.name {
            "small_allocs" => "size=64K unit=8K",
            "ebizzy" => "chunk=64K chunks=2",
            "forks" => "image=64K dirty=4 fresh=4",
            "brk1" => "",
            _ => "size=64K",
        };
        let outcome = run(info.name, &format!("{small} seconds=0.03 threads=2"));
        assert!(outcome.wall >= 0.02, "{} ran its passes only: {}", info.name, outcome.wall);
        assert!(outcome.wall < 10.0, "{}: {}", info.name, outcome.wall);
    }
}

/// A program that tries all calls, or fails in one way.
#[derive(Clone, Copy)]
enum Odd {
    Calls,
    Refused,
    Wrong,
    Segfault,
    SegfaultInPrepare,
    Panic,
    FailInFork,
    SegfaultInFork,
    FailInPrepare,
    FailInFinish,
}

const WRONG: Failure = Failure::Wrong { what: "test", addr: 1, expected: 2, found: 3 };

// SAFETY: `Calls` accesses what it maps. The others access nothing, or an address that nothing is
// ever mapped at, on purpose: the process ends there.
unsafe impl Program for Odd {
    const NAME: &'static str = "odd";
    const SUMMARY: &'static str = "fails";
    const UNIT: &'static str = "times";
    const PARAMS: &'static [&'static Param] = &[];
    type State = ();

    fn new(_: &Settings) -> Result<Self, ParamError> {
        Ok(Self::Calls)
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<(), Failure> {
        match self {
            Self::SegfaultInPrepare => task.store(8, 1),
            Self::FailInPrepare => Err(WRONG),
            _ => Ok(()),
        }
    }

    fn work<T: Task>(&self, task: &mut T, (): &(), worker: Worker) -> Result<Tally, Failure> {
        if worker.index > 0 {
            return Ok(Tally::default());
        }
        match self {
            Self::Calls => calls(task)?,
            Self::Refused => task.munmap(1, PAGE)?,
            Self::Wrong => Err(WRONG)?,
            Self::Segfault => task.store(8, 1)?,
            Self::Panic => panic!("on purpose"),
            Self::FailInFork => task.fork(|_| Err(WRONG))?,
            Self::SegfaultInFork => task.fork(|child| child.load(8).map(|_| ()))?,
            Self::SegfaultInPrepare | Self::FailInPrepare | Self::FailInFinish => {}
        }
        Ok(Tally::default())
    }

    fn finish<T: Task>(&self, _: &mut T, (): &(), _: Worker) -> Result<(), Failure> {
        if matches!(self, Self::FailInFinish) { Err(WRONG) } else { Ok(()) }
    }
}

/// Every call of `Task` once or twice.
fn calls<T: Task>(task: &mut T) -> Result<(), Failure> {
    let rw = Prot::READ | Prot::WRITE;
    let at = task.mmap(0, 4 * PAGE, rw, Map::PRIVATE | Map::ANONYMOUS | Map::POPULATE)?;
    task.store(at, 7)?;
    task.mprotect(at, PAGE, Prot::READ)?;
    Failure::check("after mprotect", at, 7, task.load(at)?)?;
    task.copy(at + PAGE, at, 8)?;
    Failure::check("the copy", at, 7, task.load(at + PAGE)?)?;
    task.madvise(at, PAGE, Advice::DontNeed)?;
    Failure::check("after madvise", at, 0, task.load(at)?)?;
    let moved = task.mremap(at + PAGE, PAGE, 64 * PAGE)?;
    Failure::check("after mremap", moved, 7, task.load(moved)?)?;
    task.mmap(moved, PAGE, rw, Map::PRIVATE | Map::ANONYMOUS | Map::FIXED)?;
    Failure::check("mapped over", moved, 0, task.load(moved)?)?;
    let taken = task.mmap(moved, PAGE, rw, Map::PRIVATE | Map::ANONYMOUS | Map::FIXED_NOREPLACE);
    assert!(matches!(taken, Err(Failure::Refused { call: "mmap", errno: 17, .. })), "{taken:?}");
    let shared = task.mmap(0, PAGE, rw, Map::SHARED | Map::ANONYMOUS)?;
    task.fork(|child| {
        child.store(shared, 9)?;
        child.store(moved, 9)
    })?;
    Failure::check("the child's shared store", shared, 9, task.load(shared)?)?;
    Failure::check("the child's private store", moved, 0, task.load(moved)?)?;
    task.munmap(moved, 64 * PAGE)?;
    let unaligned = task.munmap(moved + 1, PAGE);
    assert!(matches!(unaligned, Err(Failure::Refused { call: "munmap", errno: 22, .. })));
    let low = task.brk(0);
    Failure::check("a break that cannot be", low, low, task.brk(8))
}

fn odd(program: Odd, mode: Mode) -> Result<(), Failure> {
    let crew = Crew { workers: 2, mode, limit: Some(Duration::from_secs(5)) };
    Linux::new().run(&program, &crew).map(|measured| assert_eq!(measured.workers.len(), 2))
}

#[test]
fn every_failure_comes_out() {
    for mode in [Mode::Threads, Mode::Processes] {
        let killed = Err(Failure::Killed { signal: 11 });
        assert_eq!(odd(Odd::Calls, mode), Ok(()), "{mode:?}");
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
