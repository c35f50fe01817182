//! Programs that use every call and fail in every way, and functions to run them.

#![allow(dead_code, reason = "each test uses a part")]

use faultless::{Advice, MapFlags as Map, Prot};
use faultless_workload::{
    Child, Contents, Crew, FUNCTION, Failure, FileSpec, Mode, Needs, Outcome, Param, ParamError,
    Program, Settings, System, Tally, Task, Worker, Workload,
};
use std::time::Duration;

pub const PAGE: u64 = 4096;

/// Runs `name` with space-separated `arguments` on `system`, and checks the properties of any
/// outcome.
pub fn run<S: System>(system: &S, name: &str, arguments: &str) -> Outcome {
    let workload = Workload::parse(name, arguments.split_whitespace()).expect("good arguments");
    let outcome = workload.run(system).unwrap_or_else(|failure| panic!("{name}: {failure}"));
    assert_eq!(outcome.workload, name);
    assert_eq!(outcome.workers.len(), outcome.threads);
    assert_eq!(outcome.machine, system.machine());
    assert!(outcome.wall > 0.0 && outcome.wall < 60.0, "{}", outcome.wall);
    assert!(outcome.operations_per_second() > 0.0);
    for worker in &outcome.workers {
        assert!(worker.wall() > 0.0 && worker.wall() <= outcome.wall);
    }
    outcome
}

/// A program that uses all calls, or fails in one way.
#[derive(Clone, Copy, Debug)]
pub enum Odd {
    Calls,
    /// Maps 64 pages, writes to the first 20 and keeps them until the end of the process.
    StopsShort,
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

/// The failure of the failing programs.
pub const WRONG: Failure = Failure::Wrong { what: "test", addr: 1, expected: 2, found: 3 };

// SAFETY: `Calls` and `StopsShort` access their own mappings. The others access no memory, or
// intentionally an address that is never mapped, which ends the process.
unsafe impl Program for Odd {
    const NAME: &'static str = "odd";
    const SUMMARY: &'static str = "fails";
    const UNIT: &'static str = "times";
    const PARAMS: &'static [&'static Param] = &[];
    type State = ();

    fn new(_: &Settings) -> Result<Self, ParamError> {
        Ok(Self::Calls)
    }

    fn files(&self, _: &Crew) -> Vec<FileSpec> {
        vec![FileSpec { bytes: 3 * PAGE, contents: Contents::Code }]
    }

    fn needs(&self, _: &Crew) -> Needs {
        Needs::written(64 * PAGE)
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
            Self::StopsShort => {
                let (rw, private) = (Prot::READ | Prot::WRITE, Map::PRIVATE | Map::ANONYMOUS);
                let at = task.mmap(None, 64 * PAGE, rw, private)?;
                (0..20).try_for_each(|page| task.store(at + page * PAGE, page))?;
            }
            Self::Refused => task.munmap(1, PAGE)?,
            Self::Wrong => Err(WRONG)?,
            Self::Segfault => task.store(8, 1)?,
            Self::Panic => panic!("on purpose"),
            Self::FailInFork => task.fork(Forked::Fails)?,
            Self::SegfaultInFork => task.fork(Forked::Faults)?,
            Self::SegfaultInPrepare | Self::FailInPrepare | Self::FailInFinish => {}
        }
        Ok(Tally::default())
    }

    fn finish<T: Task>(&self, _: &mut T, (): &(), _: Worker) -> Result<(), Failure> {
        if matches!(self, Self::FailInFinish) { Err(WRONG) } else { Ok(()) }
    }
}

enum Forked {
    Fails,
    Faults,
    Stores([u64; 2]),
}

impl Child for Forked {
    fn run<T: Task>(self, task: &mut T) -> Result<(), Failure> {
        match self {
            Self::Fails => Err(WRONG),
            Self::Faults => task.load(8).map(|_| ()),
            Self::Stores(places) => places.into_iter().try_for_each(|addr| task.store(addr, 9)),
        }
    }
}

/// Uses every call of `Task` once or twice.
fn calls<T: Task>(task: &mut T) -> Result<(), Failure> {
    let rw = Prot::READ | Prot::WRITE;
    let at = task.mmap(None, 4 * PAGE, rw, Map::PRIVATE | Map::ANONYMOUS | Map::POPULATE)?;
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
    let shared = task.mmap(None, PAGE, rw, Map::SHARED | Map::ANONYMOUS)?;
    task.fork(Forked::Stores([shared, moved]))?;
    Failure::check("the child's shared store", shared, 9, task.load(shared)?)?;
    Failure::check("the child's private store", moved, 0, task.load(moved)?)?;
    let copy = task.mmap_file(0, (None, 2 * PAGE), rw, Map::PRIVATE, PAGE)?;
    Failure::check("a page of a file", copy, 1, task.load(copy)?)?;
    task.store(copy, 7)?;
    let file = task.mmap_file(0, (None, 3 * PAGE), Prot::READ | Prot::EXEC, Map::PRIVATE, 0)?;
    for page in 0..3 {
        Failure::check("a page of code", file, page, task.load(file + page * PAGE)?)?;
        task.call(file + page * PAGE + FUNCTION)?;
    }
    Failure::check("a private copy of the page", copy, 7, task.load(copy)?)?;
    task.munmap(moved, 64 * PAGE)?;
    let unaligned = task.munmap(moved + 1, PAGE);
    assert!(matches!(unaligned, Err(Failure::Refused { call: "munmap", errno: 22, .. })));
    let low = task.brk(0);
    Failure::check("an invalid break", low, low, task.brk(8))
}

/// Runs `program` with two workers.
pub fn odd<S: System>(system: &S, program: Odd, mode: Mode) -> Result<(), Failure> {
    let crew = Crew { workers: 2, mode, limit: Some(Duration::from_secs(5)) };
    system.run(&program, &crew).map(|measured| assert_eq!(measured.workers.len(), 2))
}

/// Returns small arguments for the workload `name`.
pub fn small(name: &str) -> &'static str {
    match name {
        "small_allocs" => "size=64K unit=8K",
        "ebizzy" => "chunk=64K chunks=2",
        "forks" => "image=64K dirty=4 fresh=4",
        "brk1" => "",
        "xsbench" => "fast=4M ratio=1:1 lookups=100",
        "llm" => "fast=4M ratio=1:1",
        _ if name.starts_with("vma_") => "chunks=8",
        _ => "size=64K",
    }
}
