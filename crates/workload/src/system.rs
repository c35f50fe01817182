//! The interface between a program and its system, and the results of a run.
//!
//! All interfaces are generic and not dynamic: on Linux [`Task::load`] and [`Task::store`] must
//! compile to the bare instruction, or the benchmark would measure its own overhead.

use crate::program::Program;
use faultless::{Advice, MapFlags, Prot};
use std::time::Duration;

/// The reason for a failed run.
///
/// `Copy` and without heap memory, to allow a transfer between processes in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The system refused a call.
    #[error(
        "{call}{}: {}",
        if *len == 0 { String::new() } else { format!(" of {len} bytes at {addr:#x}") },
        std::io::Error::from_raw_os_error(*errno)
    )]
    Refused {
        /// The call, by its Linux name.
        call: &'static str,
        /// The requested address.
        addr: u64,
        /// The requested bytes; 0 for a call without a range.
        len: u64,
        /// Linux's error number.
        errno: i32,
    },
    /// A load or store did not complete.
    #[error("{access} at {addr:#x}: {reason}")]
    Access {
        /// `"load"`, `"store"`, `"copy"` or `"call"`.
        access: &'static str,
        /// The accessed address.
        addr: u64,
        /// The reason reported by the system.
        reason: &'static str,
    },
    /// The system returned a wrong result.
    #[error("wrong result: {what} at {addr:#x} is {found:#x}, not {expected:#x}")]
    Wrong {
        /// The checked value.
        what: &'static str,
        /// Its address.
        addr: u64,
        /// The expected value.
        expected: u64,
        /// The found value.
        found: u64,
    },
    /// A signal ended a process of the workload.
    #[error("a process of the workload was ended by signal {signal}")]
    Killed {
        /// The signal's number.
        signal: i32,
    },
    /// A worker ended without a result.
    #[error("worker {worker} ended without a result")]
    Lost {
        /// The worker's index.
        worker: usize,
    },
}

impl Failure {
    /// Returns `Ok` if `found` is `expected`, [`Failure::Wrong`] otherwise.
    #[inline]
    pub fn check(what: &'static str, addr: u64, expected: u64, found: u64) -> Result<(), Self> {
        if found == expected { Ok(()) } else { Err(Self::Wrong { what, addr, expected, found }) }
    }
}

/// Memory sufficient for a run with all workers, in bytes. Excludes the system's management data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// The largest number of bytes in pages written and not freed: each page has a separate frame.
    pub written: u64,
    /// The largest mapping: a system may refuse a mapping larger than the memory.
    pub largest: u64,
    /// The required memory of the machine, for programs that must not fit in fast memory: tiers
    /// whose fast node is too small for all their pages.
    pub tiers: Option<Tiers>,
}

/// Two memory nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiers {
    /// Bytes of the fast node, which contains the CPUs.
    pub fast: u64,
    /// Bytes of the slow node.
    pub slow: u64,
}

impl Tiers {
    /// Returns the bytes of both nodes.
    pub const fn bytes(self) -> u64 {
        self.fast + self.slow
    }
}

impl Needs {
    /// Returns the needs of a program with written pages, all in at most one mapping.
    pub const fn written(bytes: u64) -> Self {
        Self { written: bytes, largest: bytes, tiers: None }
    }

    /// Returns the needs of a program that only maps and reads: such pages need no frames.
    pub const fn mapped(bytes: u64) -> Self {
        Self { written: 0, largest: bytes, tiers: None }
    }
}

/// One thread of a program, on a system.
///
/// Loads, stores and copies refer to the program's own memory, as required by [`Program`]'s
/// contract.
pub trait Task: Sized {
    /// Maps `len` bytes, at `at` if the flags require or the system chooses it, and returns the
    /// address.
    ///
    /// # Errors
    /// [`Failure::Refused`] with Linux's error; the same applies to all calls here.
    fn mmap(
        &mut self,
        at: impl Into<Option<u64>>,
        len: u64,
        prot: Prot,
        flags: MapFlags,
    ) -> Result<u64, Failure>;

    /// Maps the run's file number `file`, from byte `offset` on, like [`mmap`](Self::mmap). `place`
    /// is the address and the number of bytes.
    ///
    /// # Errors
    /// [`Failure::Refused`].
    fn mmap_file(
        &mut self,
        file: usize,
        place: (Option<u64>, u64),
        prot: Prot,
        flags: MapFlags,
        offset: u64,
    ) -> Result<u64, Failure>;

    /// Unmaps all mappings in `addr..addr + len`.
    ///
    /// # Errors
    /// [`Failure::Refused`].
    fn munmap(&mut self, addr: u64, len: u64) -> Result<(), Failure>;

    /// Changes the permissions of `addr..addr + len`.
    ///
    /// # Errors
    /// [`Failure::Refused`].
    fn mprotect(&mut self, addr: u64, len: u64, prot: Prot) -> Result<(), Failure>;

    /// Gives advice about `addr..addr + len`.
    ///
    /// # Errors
    /// [`Failure::Refused`].
    fn madvise(&mut self, addr: u64, len: u64, advice: Advice) -> Result<(), Failure>;

    /// Resizes a mapping, moving the mapping if necessary, and returns the new address.
    ///
    /// # Errors
    /// [`Failure::Refused`].
    fn mremap(&mut self, addr: u64, len: u64, new_len: u64) -> Result<u64, Failure>;

    /// Moves the program break to `addr` and returns the new break, which is unchanged if `addr` is
    /// invalid. `brk(0)` only queries the break.
    fn brk(&mut self, addr: u64) -> u64;

    /// Loads the 8 bytes at `addr`, a multiple of 8.
    ///
    /// # Errors
    /// [`Failure::Access`]; the same applies to stores and copies.
    fn load(&mut self, addr: u64) -> Result<u64, Failure>;

    /// Stores 8 bytes at `addr`, a multiple of 8.
    ///
    /// # Errors
    /// [`Failure::Access`].
    fn store(&mut self, addr: u64, value: u64) -> Result<(), Failure>;

    /// Copies `len` bytes to `to` from `from`, which do not overlap.
    ///
    /// # Errors
    /// [`Failure::Access`].
    fn copy(&mut self, to: u64, from: u64, len: u64) -> Result<(), Failure>;

    /// Calls the function at `addr`, which returns at once. A system that does not run its
    /// programs' code fetches from the address.
    ///
    /// # Errors
    /// [`Failure::Access`].
    fn call(&mut self, addr: u64) -> Result<(), Failure>;

    /// Forks, runs `child` in the child process, and waits for its end.
    ///
    /// # Errors
    /// [`Failure::Refused`], or the failure of `child`.
    fn fork<C: Child>(&mut self, child: C) -> Result<(), Failure>;

    /// Does `what` off the clock: the result excludes its time and the system's counts for this
    /// worker. The clock belongs to the crew, so all workers must be off the clock at the same
    /// times: see `Rounds`, in which they wait for each other.
    fn aside<R>(&mut self, what: impl FnOnce(&mut Self) -> R) -> R;

    /// Stores to an untouched page, and measures the time as the latency of an allocation:
    /// [`Measured::allocations`].
    ///
    /// # Errors
    /// As [`store`](Self::store).
    fn allocate(&mut self, addr: u64, value: u64) -> Result<(), Failure> {
        self.store(addr, value)
    }

    /// Does the background work of a system thread on this CPU: makes room in the fast memory node,
    /// promotes at most `promoted` used pages, and evicts pages of files if memory is short. Then
    /// records the memory in use: [`Measured::footprint`]. Does nothing on a kernel with its own
    /// background threads.
    fn background(&mut self, promoted: u64) {
        let _ = promoted;
    }

    /// Yields while the program waits for another of its workers, after `looks` checks.
    fn rest(&mut self, looks: u32);

    /// Returns whether the crew's time is up. Loads one rarely written flag.
    fn expired(&self) -> bool;
}

/// The work of a forked child. (A closure could not be generic over its task, which may have
/// another type than the parent's.)
pub trait Child {
    /// Does the work. Must not allocate from the heap, which another thread may have been using at
    /// the time of the fork.
    ///
    /// # Errors
    /// The failure to be returned by its parent's [`Task::fork`].
    fn run<T: Task>(self, task: &mut T) -> Result<(), Failure>;
}

/// A system that runs programs.
pub trait System {
    /// The machine's name in results, such as `linux-6.18`.
    fn machine(&self) -> String;

    /// Runs `program` in a new address space with `crew`.
    ///
    /// # Errors
    /// The first [`Failure`] of any worker; the address space is destroyed in either case.
    fn run<P: Program>(&self, program: &P, crew: &Crew) -> Result<Measured, Failure>;
}

/// Whether the workers share an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Threads of one process.
    Threads,
    /// Processes of one thread each, with a separate [`Program::State`].
    Processes,
}

impl Mode {
    /// Returns `"threads"` or `"processes"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Processes => "processes",
        }
    }
}

/// The workers that run a program, and the time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crew {
    /// The number of workers; at least one.
    pub workers: usize,
    /// The memory shared by the workers.
    pub mode: Mode,
    /// The time after which [`Task::expired`] returns true, counted from the common start; `None`
    /// for never.
    pub limit: Option<Duration>,
}

impl Crew {
    /// Returns the number of processes.
    pub fn processes(&self) -> usize {
        match self.mode {
            Mode::Threads => 1,
            Mode::Processes => self.workers,
        }
    }
}

/// A worker of a crew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worker {
    /// The index, from 0.
    pub index: usize,
    /// The number of workers.
    pub count: usize,
}

/// The counts of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operations, in the program's unit.
    pub operations: u64,
    /// A further count of the program; see its documentation.
    pub extra: u64,
}

/// One worker's part of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// The counts.
    pub tally: Tally,
    /// Seconds of processor time in the program itself, including forked children.
    pub user: f64,
    /// Seconds of processor time in the system, including forked children.
    pub system: f64,
    /// Its start and end, in seconds of a clock common to the crew.
    pub span: (f64, f64),
    /// Seconds off the clock within this span: preparing another round, together with the crew.
    pub aside: f64,
}

impl Report {
    /// Returns the seconds from start to end, on the clock.
    pub fn wall(&self) -> f64 {
        self.span.1 - self.span.0 - self.aside
    }
}

/// The measurements of a run, by worker. Excludes preparation, final checks and work done
/// [aside](Task::aside).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// The workers, by index.
    pub workers: Vec<Report>,
    /// Page faults served by the system.
    pub faults: u64,
    /// Other counters of the system, by name.
    pub counters: Vec<(&'static str, u64)>,
    /// Counts at the end of the work, by name, for a run with files.
    pub left: Vec<(&'static str, u64)>,
    /// The times of [`Task::allocate`], in nanoseconds, in ascending order. Empty if the system
    /// does not report them.
    pub allocations: Vec<f64>,
    /// Frames in use, if the system reports them, including frames waiting for a deferred flush.
    pub footprint: Footprint,
}

/// Frames in use at some moments of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    moments: u64,
    sum: u64,
    /// The maximum.
    pub most: u64,
}

impl Footprint {
    /// Adds a moment.
    pub fn note(&mut self, frames: u64) {
        self.moments += 1;
        self.sum += frames;
        self.most = self.most.max(frames);
    }

    /// Adds the moments of `other`.
    pub fn merge(&mut self, other: Self) {
        self.moments += other.moments;
        self.sum += other.sum;
        self.most = self.most.max(other.most);
    }

    /// Returns the mean; `None` without moments.
    pub fn mean(&self) -> Option<f64> {
        (self.moments != 0).then(|| self.sum as f64 / self.moments as f64)
    }
}

impl Measured {
    /// Returns the seconds from the first start to the last end. If the crew was off the clock in
    /// between, returns the longest time of a worker on the clock, which extends from the first
    /// return to the clock to the end.
    pub fn wall(&self) -> f64 {
        if self.workers.iter().any(|worker| worker.aside > 0.0) {
            return self.workers.iter().map(Report::wall).fold(0.0, f64::max);
        }
        let first = self.workers.iter().map(|worker| worker.span.0).fold(f64::INFINITY, f64::min);
        let last = self.workers.iter().map(|worker| worker.span.1).fold(0.0, f64::max);
        (last - first).max(0.0)
    }

    /// Returns the counts of the whole crew.
    pub fn tally(&self) -> Tally {
        self.workers.iter().fold(Tally::default(), |sum, worker| Tally {
            operations: sum.operations + worker.tally.operations,
            extra: sum.extra + worker.tally.extra,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_aside_is_excluded_from_wall_time() {
        let worker = |begin, end, aside| Report { span: (begin, end), aside, ..Report::default() };
        let workers = vec![worker(1.0, 6.0, 2.0), worker(1.5, 6.0, 2.0)];
        let measured = Measured { workers, ..Measured::default() };
        assert_eq!(measured.workers[1].wall(), 2.5);
        // The second worker returned to the clock later.
        assert_eq!(measured.wall(), 3.0);
        assert_eq!(Measured::default().wall(), 0.0);
    }
}
