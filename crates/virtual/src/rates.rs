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
}

/// A measured path.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Path {
    /// The case of `bench instructions`.
    pub case: String,
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
    /// Of [`Operation::Map`].
    pub map: Path,
    /// Of [`Operation::Break`].
    pub brk: Path,
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

    /// The path that stands for an operation.
    pub const fn of(&self, operation: Operation) -> &Path {
        match operation {
            Operation::Fault => &self.fault,
            Operation::Map => &self.map,
            Operation::Break => &self.brk,
            Operation::Protect => &self.protect,
            Operation::Fork => &self.fork,
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

/// The time between two accesses, by operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates([Time; Operation::ALL.len()]);

impl Rates {
    pub(crate) fn new(profile: &Profile) -> Self {
        let paths = Paths::measured();
        Self(Operation::ALL.map(|operation| {
            let path = paths.of(operation);
            let each = 1000.0 / (profile.cpu.ghz.value * per_cycle(profile, operation));
            (path.instructions / path.accesses * each).round() as Time
        }))
    }

    pub(crate) fn of(&self, operation: Operation) -> Time {
        self.0[operation as usize]
    }
}
