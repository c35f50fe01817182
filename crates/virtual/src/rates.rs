//! How many instructions the subsystem executes between two accesses that it reports.
//!
//! The accesses of an operation are observed; its instructions are not, as the simulation runs the subsystem natively. But `bench
//! instructions` counts them, in the same paths on one CPU. So each kind of operation has a rate: its instructions by its accesses. A
//! path that makes more accesses than the measured one, since it tries again or works on more pages, is charged in
//! proportion.
//!
//! `instructions.toml` holds both numbers. `bench instructions --check` fails if the instructions there are not those that it
//! counts, and a test of this crate if the accesses are not those that are observed.

use crate::profile::{Profile, Time};
use serde::Deserialize;

/// What a CPU executes.
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
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Fault, Self::Map, Self::Break, Self::Protect, Self::Fork];

    /// Its name in results.
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
    /// Instructions that it counts.
    pub instructions: f64,
    /// Accesses that the subsystem reports in the same path.
    pub accesses: f64,
}

/// The measured paths, by operation.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paths {
    /// Of [`Operation::Fault`].
    pub fault: Path,
    /// Of [`Operation::Map`], by the owner of the space.
    pub map: Path,
    /// Of [`Operation::Map`], in a space that other CPUs run, too.
    pub map_shared: Path,
    /// Of [`Operation::Break`], by the owner of the space.
    pub brk: Path,
    /// Of [`Operation::Break`], in a space that other CPUs run, too.
    pub brk_shared: Path,
    /// Of [`Operation::Protect`].
    pub protect: Path,
    /// Of [`Operation::Fork`].
    pub fork: Path,
}

/// The text of `instructions.toml`.
pub const MEASURED: &str = include_str!("../instructions.toml");

impl Paths {
    /// Those of `instructions.toml`.
    pub fn measured() -> Self {
        toml::from_str(MEASURED).expect("instructions.toml is well-formed; a test reads it")
    }

    /// The path that stands for an operation in a space that one CPU runs, or several. (The mprotect of one page is counted for the owner
    /// only, as it would have to flush the other CPUs. With others it is charged as other changes of VMAs.)
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

/// Instructions a cycle of an operation.
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

/// The time between two accesses, by operation: in spaces that one CPU runs, and in shared ones.
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
