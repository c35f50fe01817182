//! The number of instructions executed by the subsystem between two reported accesses.
//!
//! The accesses of an operation are observed. Its instructions are not, because the simulation runs
//! the subsystem natively; `bench instructions` counts them in the same paths on one CPU. Each
//! kind of operation therefore has a rate: its instructions divided by its accesses. A path with
//! more accesses than the measured one, due to retries or more pages, is charged in proportion.
//!
//! `instructions.toml` holds both numbers. `bench instructions --check` fails if its counts
//! differ from the instructions in this file, and a test of this crate fails if the observed
//! accesses differ from the accesses in this file.

use crate::profile::{Profile, Time};
use serde::Deserialize;

/// The kind of operation executed by a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Operation {
    /// A page fault.
    Fault,
    /// mmap, munmap, mremap, and advice, which changes entries or VMAs.
    Map,
    /// The program break.
    Break,
    /// mprotect.
    Protect,
    /// fork and exit.
    Fork,
}

impl Operation {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Fault, Self::Map, Self::Break, Self::Protect, Self::Fork];

    /// Returns the name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fault => "fault",
            Self::Map => "map",
            Self::Break => "break",
            Self::Protect => "protect",
            Self::Fork => "fork",
        }
    }
}

/// A measured path.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Path {
    /// The case of `bench instructions`.
    pub case: String,
    /// Whether another CPU runs the space, too.
    #[serde(default)]
    pub shared: bool,
    /// Instructions counted in the case.
    pub instructions: f64,
    /// Accesses reported by the subsystem in the same path.
    pub accesses: f64,
}

/// The measured paths, by operation.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paths {
    /// [`Operation::Fault`].
    pub fault: Path,
    /// [`Operation::Map`], by the owner of the space.
    pub map: Path,
    /// [`Operation::Map`], in a space run by several CPUs.
    pub map_shared: Path,
    /// [`Operation::Break`], by the owner of the space.
    pub brk: Path,
    /// [`Operation::Break`], in a space run by several CPUs.
    pub brk_shared: Path,
    /// [`Operation::Protect`].
    pub protect: Path,
    /// [`Operation::Fork`].
    pub fork: Path,
}

/// The text of `instructions.toml`.
pub const MEASURED: &str = include_str!("../instructions.toml");

impl Paths {
    /// Returns the paths of `instructions.toml`.
    pub fn measured() -> Self {
        toml::from_str(MEASURED).expect("instructions.toml is well-formed; a test reads it")
    }

    /// Returns the path that represents an operation, in a space run by one CPU or by several. (The
    /// mprotect of one page is counted for the owner only, because a shared space would require a
    /// flush of the other CPUs. With several CPUs, mprotect is charged like the remaining changes
    /// of VMAs.)
    pub const fn of(&self, operation: Operation, shared: bool) -> &Path {
        match (operation, shared) {
            (Operation::Fault, _) => &self.fault,
            (Operation::Map, false) => &self.map,
            (Operation::Map | Operation::Protect, true) => &self.map_shared,
            (Operation::Break, false) => &self.brk,
            (Operation::Break, true) => &self.brk_shared,
            (Operation::Protect, false) => &self.protect,
            (Operation::Fork, _) => &self.fork,
        }
    }
}

/// Returns the instructions per cycle of an operation.
fn per_cycle(profile: &Profile, operation: Operation) -> f64 {
    let number = match (&profile.measured, operation) {
        (None, _) => &profile.cpu.instructions_per_cycle,
        (Some(measured), Operation::Fault) => &measured.fault_ipc,
        (Some(measured), Operation::Map) => &measured.map_ipc,
        (Some(measured), Operation::Break) => &measured.brk_ipc,
        (Some(measured), Operation::Protect) => &measured.protect_ipc,
        (Some(measured), Operation::Fork) => &measured.fork_ipc,
    };
    number.value
}

/// The time between two accesses, by operation: in spaces run by one CPU, and in shared spaces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates([[Time; Operation::ALL.len()]; 2]);

impl Rates {
    pub(crate) fn new(profile: &Profile) -> Self {
        let paths = Paths::measured();
        let rate = |operation, shared| {
            let path = paths.of(operation, shared);
            let each = 1000.0 / (profile.cpu.ghz.value * per_cycle(profile, operation));
            (path.instructions / path.accesses * each).round() as Time
        };
        Self([false, true].map(|shared| Operation::ALL.map(|operation| rate(operation, shared))))
    }

    pub(crate) fn of(&self, operation: Operation, shared: bool) -> Time {
        self.0[usize::from(shared)][operation as usize]
    }
}
