//! What a program asks of its system, and what a system tells about a run.
//!
//! Everything is generic rather than dynamic: on Linux [`Task::load`] and [`Task::store`] must
//! compile to the bare instruction, or the benchmark would measure its own plumbing.

use crate::program::Program;
use faultless::{Advice, MapFlags, Prot};
use std::time::Duration;

/// Why a run came to nothing.
///
/// `Copy` and without heap memory, so that it can cross from one process to another in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The system refused a call.
    #[error("{call} of {len} bytes at {addr:#x}: {}", std::io::Error::from_raw_os_error(*errno))]
    Refused {
        /// The call, by its Linux name.
        call: &'static str,
        /// The address it was asked for.
        addr: u64,
        /// The bytes it was asked for.
        len: u64,
        /// Linux's error number.
        errno: i32,
    },
    /// A load or store did not complete.
    #[error("{access} at {addr:#x}: {reason}")]
    Access {
        /// `"load"`, `"store"`, `"copy"` or `"call"`.
        access: &'static str,
        /// The address that was accessed.
        addr: u64,
        /// What the system said.
        reason: &'static str,
    },
    /// The system answered, and the answer is wrong.
    #[error("wrong result: {what} at {addr:#x} is {found:#x}, not {expected:#x}")]
    Wrong {
        /// What was checked.
        what: &'static str,
        /// Where it lies.
        addr: u64,
        /// What it must be.
        expected: u64,
        /// What it is.
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
    /// `Ok` where `found` is `expected`, [`Failure::Wrong`] otherwise.
    #[inline]
    pub fn check(what: &'static str, addr: u64, expected: u64, found: u64) -> Result<(), Self> {
        if found == expected { Ok(()) } else { Err(Self::Wrong { what, addr, expected, found }) }
    }
}

/// Memory that suffices for a run, all workers together, in bytes. What a system takes to manage it comes on top.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Pages that are written to and not given back, at most: each has a frame of its own.
    pub written: u64,
    /// The largest of its mappings: a system may refuse one that is larger than its memory.
    pub largest: u64,
    /// The memory that it is to run in, where that is no matter of what suffices: tiers, of which all it needs does not fit into the fast one.
    pub tiers: Option<Tiers>,
}

/// Two nodes of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiers {
    /// Bytes of the fast one, which is the CPUs'.
    pub fast: u64,
    /// Bytes of the slow one.
    pub slow: u64,
}

impl Tiers {
    /// Bytes of both.
    pub const fn bytes(self) -> u64 {
        self.fast + self.slow
    }
}

impl Needs {
    /// Of a program whose pages are written to, and of which one mapping has them all at most.
    pub const fn written(bytes: u64) -> Self {
        Self { written: bytes, largest: bytes, tiers: None }
    }

    /// Of a program that only maps, and reads: such pages need no frames.
    pub const fn mapped(bytes: u64) -> Self {
        Self { written: 0, largest: bytes, tiers: None }
    }
}

/// One thread of a program, on some system.
///
/// Loads, stores and copies name the program's own memory, as [`Program`]'s contract says.
pub trait Task: Sized {
    /// Maps `len` bytes, at `addr` where the flags or chance have it so, and returns where.
    ///
    /// # Errors
    /// [`Failure::Refused`] with Linux's error; so for all calls here.
    fn mmap(&mut self, addr: u64, len: u64, prot: Prot, flags: MapFlags) -> Result<u64, Failure>;

    /// Maps as many bytes as the second number of `place` says of the run's file number `file`, from byte
    /// `offset` of it on, at the address that is the first, as [`mmap`](Self::mmap) does.
    ///
    /// # Errors
    /// [`Failure::Refused`].
    fn mmap_file(
        &mut self,
        file: usize,
        place: (u64, u64),
        prot: Prot,
        flags: MapFlags,
        offset: u64,
    ) -> Result<u64, Failure>;

    /// Unmaps what is mapped in `addr..addr + len`.
    ///
    /// # Errors
    /// [`Failure::Refused`].
    fn munmap(&mut self, addr: u64, len: u64) -> Result<(), Failure>;

    /// Changes what may be done with `addr..addr + len`.
    ///
    /// # Errors
    /// [`Failure::Refused`].
    fn mprotect(&mut self, addr: u64, len: u64, prot: Prot) -> Result<(), Failure>;

    /// Gives advice about `addr..addr + len`.
    ///
    /// # Errors
    /// [`Failure::Refused`].
    fn madvise(&mut self, addr: u64, len: u64, advice: Advice) -> Result<(), Failure>;

    /// Resizes a mapping, moving it if it must, and returns where it is now.
    ///
    /// # Errors
    /// [`Failure::Refused`].
    fn mremap(&mut self, addr: u64, len: u64, new_len: u64) -> Result<u64, Failure>;

    /// Moves the program break to `addr` and returns where it is now: where it was, if `addr` would
    /// not do. `brk(0)` only asks.
    fn brk(&mut self, addr: u64) -> u64;

    /// Loads the 8 bytes at `addr`, a multiple of 8.
    ///
    /// # Errors
    /// [`Failure::Access`]; so for stores and copies.
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

    /// Calls the function at `addr`, which returns at once. A system that does not run its programs' code fetches from there.
    ///
    /// # Errors
    /// [`Failure::Access`].
    fn call(&mut self, addr: u64) -> Result<(), Failure>;

    /// Forks, runs `child` in the child to its end, and waits for it.
    ///
    /// # Errors
    /// [`Failure::Refused`], or what `child` failed with.
    fn fork<C: Child>(&mut self, child: C) -> Result<(), Failure>;

    /// Does `what` off the clock: neither its time nor what the system counts for this worker meanwhile is in the
    /// result. The clock is the crew's, so that all workers are off it at the same times: see `Rounds`, which
    /// has them wait for each other.
    fn aside<R>(&mut self, what: impl FnOnce(&mut Self) -> R) -> R;

    /// Stores to a page that was never touched. What that takes is the latency of an allocation: [`Measured::allocations`].
    ///
    /// # Errors
    /// As [`store`](Self::store).
    fn allocate(&mut self, addr: u64, value: u64) -> Result<(), Failure> {
        self.store(addr, value)
    }

    /// Does on this CPU what a thread of the system does in the background: makes room in the fast node of memory, brings back at most
    /// `promoted` pages that are used, and evicts pages of files if memory is short. Afterwards it notes how much memory is in use: [`Measured::footprint`]. A kernel that does so by
    /// itself is not asked to.
    fn tend(&mut self, promoted: u64) {
        let _ = promoted;
    }

    /// Lets others get on, while the program waits for another of its workers, and has looked for it `looks` times.
    fn rest(&mut self, looks: u32);

    /// Whether the time that the crew was given is up. A load of one rarely written flag.
    fn expired(&self) -> bool;
}

/// What a forked child does. (A closure could not be generic over its task, which may be of another
/// type than the parent's.)
pub trait Child {
    /// Does it. It must not allocate from the heap, which another thread may have been using at the
    /// moment of the fork.
    ///
    /// # Errors
    /// What its parent's [`Task::fork`] is to fail with.
    fn run<T: Task>(self, task: &mut T) -> Result<(), Failure>;
}

/// Runs programs.
pub trait System {
    /// The machine's name in results, such as `linux-6.18`.
    fn machine(&self) -> String;

    /// Runs `program` in a fresh address space with `crew`.
    ///
    /// # Errors
    /// The first [`Failure`] of any worker; the address space is gone either way.
    fn run<P: Program>(&self, program: &P, crew: &Crew) -> Result<Measured, Failure>;
}

/// Whether the workers share an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Threads of one process.
    Threads,
    /// Processes of one thread each, every one with its own [`Program::State`].
    Processes,
}

impl Mode {
    /// `"threads"` or `"processes"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Processes => "processes",
        }
    }
}

/// Who runs a program, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crew {
    /// How many workers; at least one.
    pub workers: usize,
    /// What they share.
    pub mode: Mode,
    /// When [`Task::expired`] begins to hold, counted from the common start; `None` for never.
    pub limit: Option<Duration>,
}

impl Crew {
    /// How many processes there are.
    pub fn processes(&self) -> usize {
        match self.mode {
            Mode::Threads => 1,
            Mode::Processes => self.workers,
        }
    }
}

/// One worker among its crew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worker {
    /// This one, from 0.
    pub index: usize,
    /// All of them.
    pub count: usize,
}

/// What a worker did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operations, in the program's unit.
    pub operations: u64,
    /// What else the program counts; see its documentation.
    pub extra: u64,
}

/// One worker's part of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// What it did.
    pub tally: Tally,
    /// Seconds of processor time in the program itself, forked children with it.
    pub user: f64,
    /// Seconds of processor time in the system, forked children with it.
    pub system: f64,
    /// When it began and ended, in seconds of a clock common to the crew.
    pub span: (f64, f64),
    /// Seconds in between that it was off the clock: preparing another round, with all the crew.
    pub aside: f64,
}

impl Report {
    /// Seconds from its begin to its end, on the clock.
    pub fn wall(&self) -> f64 {
        self.span.1 - self.span.0 - self.aside
    }
}

/// A run, worker by worker. Preparation and final checks are not in it, nor is what was done [aside](Task::aside).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// The workers, by index.
    pub workers: Vec<Report>,
    /// Page faults that the system served them.
    pub faults: u64,
    /// What else the system counted, under its own names.
    pub counters: Vec<(&'static str, u64)>,
    /// What there was at the end of the work, by name, where the run had files.
    pub left: Vec<(&'static str, u64)>,
    /// What [`Task::allocate`] took, in nanoseconds, the shortest first. Empty where the system does not tell.
    pub allocations: Vec<f64>,
    /// Frames in use, where the system tells: those that wait for a deferred flush are in use.
    pub footprint: Footprint,
}

/// Frames in use at some moments of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    moments: u64,
    sum: u64,
    /// The most at any of them.
    pub most: u64,
}

impl Footprint {
    /// One more moment.
    pub fn note(&mut self, frames: u64) {
        self.moments += 1;
        self.sum += frames;
        self.most = self.most.max(frames);
    }

    /// The moments of another, too.
    pub fn merge(&mut self, other: Self) {
        self.moments += other.moments;
        self.sum += other.sum;
        self.most = self.most.max(other.most);
    }

    /// The mean; `None` of nothing.
    pub fn mean(&self) -> Option<f64> {
        (self.moments != 0).then(|| self.sum as f64 / self.moments as f64)
    }
}

impl Measured {
    /// Seconds from the first begin to the last end. Where the crew was off the clock in between: the longest time that
    /// a worker was on it, which is from when the first came back to it to the end.
    pub fn wall(&self) -> f64 {
        if self.workers.iter().any(|worker| worker.aside > 0.0) {
            return self.workers.iter().map(Report::wall).fold(0.0, f64::max);
        }
        let first = self.workers.iter().map(|worker| worker.span.0).fold(f64::INFINITY, f64::min);
        let last = self.workers.iter().map(|worker| worker.span.1).fold(0.0, f64::max);
        (last - first).max(0.0)
    }

    /// What the whole crew did.
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
    fn what_all_do_aside_is_in_nobodys_time() {
        let worker = |begin, end, aside| Report { span: (begin, end), aside, ..Report::default() };
        let workers = vec![worker(1.0, 6.0, 2.0), worker(1.5, 6.0, 2.0)];
        let measured = Measured { workers, ..Measured::default() };
        assert_eq!(measured.workers[1].wall(), 2.5);
        // The second came later to the clock.
        assert_eq!(measured.wall(), 3.0);
        assert_eq!(Measured::default().wall(), 0.0);
    }
}
