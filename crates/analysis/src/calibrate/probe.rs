//! Probes: single paths of the subsystem, repeated, measured on the native machine and simulated on
//! the virtual machine.

use crate::error::Error;
use crate::run;
use faultless::{Advice, MapFlags, PAGE_SIZE, Prot, Setting};
use faultless_native::Native;
use faultless_virtual::{Config, Profile, Virtual};
use faultless_workload::{
    Child, Crew, Failure, Measured, Mode, Needs, Param, ParamError, Program, Settings, System,
    Tally, Task, Worker,
};
use std::sync::atomic::{AtomicBool, Ordering};

/// Pages of the area in which faults occur: a number that fits in a CPU's own caches, a number that
/// fits in the last-level cache, and a larger number.
const FAULTED: u64 = 128;
const SHARED: u64 = 2048;
const COLD: u64 = 49_152;
/// Pages accessed by page walks: more than the TLBs hold.
const WALKED: u64 = 4096;
/// Pages that are mapped, protected or forked.
const SMALL: u64 = 16;
/// Memory of the machines, in bytes.
const MEMORY: u64 = 384 << 20;

/// A path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Loads of one word.
    Access,
    /// Loads from more pages than the TLBs hold.
    Walk,
    /// Empty calls.
    Call,
    /// First stores to discarded pages, with frames in the CPU's own caches.
    Fault,
    /// First stores to discarded pages, with frames in the last-level cache.
    SharedFault,
    /// First stores to discarded pages, with frames in no cache.
    ColdFault,
    /// Pairs of mmap and munmap of 16 pages, untouched.
    Map,
    /// Pairs of mmap and munmap without other mappings, which also create and free the VMA tree.
    FirstMap,
    /// Pairs of brk up and down.
    Break,
    /// Pairs of mprotect of a page in the middle of 16.
    Protect,
    /// Forks of 128 touched pages, with a child that exits at once; per page.
    Fork,
    /// Discards of a page with a TLB flush on another CPU, including the preceding fault.
    Flush,
}

impl Probe {
    /// Returns the name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Access => "access, TLB hit",
            Self::Walk => "access, page walk",
            Self::Call => "empty call",
            Self::Fault => "write fault, own caches",
            Self::SharedFault => "write fault, last-level cache",
            Self::ColdFault => "write fault, memory",
            Self::Map => "mmap + munmap",
            Self::FirstMap => "mmap + munmap, nothing else mapped",
            Self::Break => "brk up + down",
            Self::Protect => "mprotect pair",
            Self::Fork => "fork + exit, a page",
            Self::Flush => "discard, 2 CPUs",
        }
    }

    /// Returns the number of repetitions by a worker, and the operations counted per repetition.
    const fn times(self) -> (u64, u64) {
        match self {
            Self::Access => (200_000, 1),
            Self::Walk => (6, WALKED),
            Self::Call => (50_000, 1),
            Self::Fault => (40, FAULTED),
            Self::SharedFault => (4, SHARED),
            Self::ColdFault => (1, COLD),
            Self::Map | Self::FirstMap | Self::Break => (5_000, 1),
            Self::Protect => (3_000, 1),
            Self::Fork => (60, FAULTED),
            Self::Flush => (500, 1),
        }
    }

    const fn pages(self) -> u64 {
        match self {
            Self::Access | Self::Call | Self::Map | Self::Break | Self::Flush => 1,
            Self::FirstMap => 0,
            Self::Walk => WALKED,
            Self::Fault | Self::Fork => FAULTED,
            Self::SharedFault => SHARED,
            Self::ColdFault => COLD,
            Self::Protect => SMALL,
        }
    }

    /// Returns the required number of CPUs.
    const fn cpus(self) -> usize {
        if matches!(self, Self::Flush) { 2 } else { 1 }
    }

    /// Returns the nanoseconds of the probe on `system`.
    ///
    /// # Errors
    /// A failed call of the system.
    fn on<S: System>(self, system: &S) -> Result<f64, Error> {
        let crew = Crew { workers: self.cpus(), mode: Mode::Threads, limit: None };
        let measured: Measured = system
            .run(&self, &crew)
            .map_err(|failure| Error::run(format_args!("{} ", self.name()), failure))?;
        Ok(measured.wall() * 1e9 / measured.tally().operations.max(1) as f64)
    }

    /// Returns the nanoseconds of the probe on the native machine.
    ///
    /// # Errors
    /// A failed call of the machine.
    pub fn natively(self, native: &Native) -> Result<f64, Error> {
        self.on(native)
    }

    /// Returns the nanoseconds of the probe on a simulated machine with this profile.
    ///
    /// # Errors
    /// A failed call of the machine.
    pub fn simulated(self, profile: &Profile) -> Result<f64, Error> {
        let config = Config { cpus: self.cpus(), memory_bytes: MEMORY, slow_bytes: 0, seed: 0 };
        let system = Virtual::new(profile, config)
            .map_err(|errno| Error::machine("a simulated machine", errno.name()))?;
        system.set(OFF).map_err(|error| Error::setting(OFF, error))?;
        self.on(&system)
    }
}

/// Each fault maps only its own page.
const OFF: &str = "prefault_max_order=0";

/// Creates the native machine for the probes.
///
/// # Errors
/// The host has too little memory.
pub fn machine() -> Result<Native, Error> {
    let native = run::machine(MEMORY, 2)?;
    let off = OFF.parse::<Setting>().map_err(|error| Error::setting(OFF, error))?;
    native.vm().set(off);
    Ok(native)
}

/// A child that exits at once.
struct Nothing;

impl Child for Nothing {
    fn run<T: Task>(self, _: &mut T) -> Result<(), Failure> {
        Ok(())
    }
}

/// The area, and whether the first worker has finished.
#[derive(Debug)]
pub struct State {
    area: u64,
    done: AtomicBool,
}

const RW: Prot = Prot::READ.union(Prot::WRITE);

fn map<T: Task>(task: &mut T, pages: u64) -> Result<u64, Failure> {
    task.mmap(None, pages * PAGE_SIZE, RW, MapFlags::PRIVATE | MapFlags::ANONYMOUS)
}

// SAFETY: accesses are to the area of `prepare`, which stays mapped. Only the first worker stores
// to the area, and moves the break, which it restores.
unsafe impl Program for Probe {
    const NAME: &'static str = "calibrate";
    const SUMMARY: &'static str = "one path of the subsystem, repeated";
    const UNIT: &'static str = "times";
    const PARAMS: &'static [&'static Param] = &[];

    type State = State;

    fn new(_: &Settings) -> Result<Self, ParamError> {
        Ok(Self::Access)
    }

    fn needs(&self, _: &Crew) -> Needs {
        Needs::written(self.pages() * PAGE_SIZE)
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<State, Failure> {
        let area = if self.pages() > 0 { map(task, self.pages())? } else { 0 };
        for page in (area..).step_by(PAGE_SIZE as usize).take(self.pages() as usize) {
            match self {
                // All pages map the zero page, whose line stays in the cache, so only the walk is
                // measured.
                Self::Walk => task.load(page).map(drop)?,
                _ => task.store(page, 1)?,
            }
        }
        Ok(State { area, done: AtomicBool::new(false) })
    }

    fn work<T: Task>(&self, task: &mut T, state: &State, of: Worker) -> Result<Tally, Failure> {
        if of.index > 0 {
            // A worker that exists to be interrupted, and polls at short intervals.
            let mut looks = 0u32;
            while !state.done.load(Ordering::Relaxed) {
                looks = looks % 128 + 1;
                task.rest(looks);
            }
            return Ok(Tally::default());
        }
        let (times, each) = self.times();
        let done = (0..times).try_for_each(|_| self.once(task, state.area));
        state.done.store(true, Ordering::Relaxed);
        done.map(|()| Tally { operations: times * each, extra: 0 })
    }
}

impl Probe {
    fn once<T: Task>(self, task: &mut T, area: u64) -> Result<(), Failure> {
        match self {
            Self::Access => task.load(area).map(drop),
            Self::Walk => {
                (0..WALKED).try_for_each(|page| task.load(area + page * PAGE_SIZE).map(drop))
            }
            Self::Call => task.madvise(area, 0, Advice::DontNeed),
            Self::Fault | Self::SharedFault | Self::ColdFault => {
                let bytes = self.pages() * PAGE_SIZE;
                task.aside(|task| task.madvise(area, bytes, Advice::DontNeed))?;
                (area..area + bytes)
                    .step_by(PAGE_SIZE as usize)
                    .try_for_each(|page| task.store(page, 1))
            }
            Self::Map | Self::FirstMap => {
                let mapped = map(task, SMALL)?;
                task.munmap(mapped, SMALL * PAGE_SIZE)
            }
            Self::Break => {
                let low = task.brk(0);
                task.brk(low + PAGE_SIZE);
                task.brk(low);
                Ok(())
            }
            Self::Protect => {
                let page = area + SMALL / 2 * PAGE_SIZE;
                task.mprotect(page, PAGE_SIZE, Prot::READ)?;
                task.mprotect(page, PAGE_SIZE, RW)
            }
            Self::Fork => task.fork(Nothing),
            Self::Flush => {
                task.store(area, 1)?;
                task.madvise(area, PAGE_SIZE, Advice::DontNeed)
            }
        }
    }
}
